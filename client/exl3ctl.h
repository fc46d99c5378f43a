/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl.h - what the files of exl3ctl share: options, exit codes, output. */
#ifndef EXL3_CLIENT_EXL3CTL_H
#define EXL3_CLIENT_EXL3CTL_H

#include "client/internal.h"

#include <stdio.h>

enum ctl_exit {
	CTL_OK = 0,
	CTL_LOCAL = 1, /* a file here, or memory here */
	CTL_USAGE = 2,
	CTL_REFUSED = 3,     /* by the daemon */
	CTL_UNREACHABLE = 4, /* no daemon */
	CTL_LOST = 5,        /* the daemon went away, or Ctrl-C, after something was sent */
};

struct ctl {
	const char *socket;
	char socket_buf[64];
	struct exl3_client *client; /* owned */
	const char *const *args;    /* after the verb */
	int nr_args;

	bool help, json, bf16, stored, deterministic, no_wait, wait, client_only, apply;
	const char *mode, *output, *dtype, *kernel, *device, *unquantized;
	const char *ids, *weights, *act, *limit, *routed_scale;
	const char *q, *kv, *indices, *lse, *scale, *kv_scale, *value_dim;
	const char *interval, *count, *domain;
};

/* ---- exl3ctl.c ---- */

/* Prints "exl3ctl: sentence" and returns @code. */
int ctl_error(enum ctl_exit code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The last failed libexl3 call: prints its sentence, returns the fitting exit code. */
int ctl_failed(const struct ctl *c);
/* Connects if it has not yet; prints what went wrong. From here on Ctrl-C ends with CTL_LOST. */
int ctl_connect(struct ctl *c);
/* One request; what goes wrong is printed. Free the reply with exl3_reply_freep(). */
int ctl_call(struct ctl *c, Exl3__Request *req, Exl3__Reply__BodyCase want, uint64_t timeout_ns,
	     Exl3__Reply **ret);

/* ---- exl3ctl_out.c ---- */

/* For a terminal: no control bytes, no broken UTF-8. One of a few static buffers. */
const char *ctl_safe(const char *text);
/* "1.5 GiB" and so on; likewise static. */
const char *ctl_bytes(uint64_t bytes);
/* "3.5", "4", from twice the bits. */
const char *ctl_rate(uint32_t rate2_min, uint32_t rate2_max);
const char *ctl_codebook(uint32_t codebook);
/* Prints a message as JSON with the field names of exl3.proto; @skip: a field that is left out, or NULL. */
int ctl_print_json(const ProtobufCMessage *msg, const char *skip);
/* Joins pages: an array field of several messages under one key. */
struct cJSON;
struct cJSON *ctl_json(const ProtobufCMessage *msg, const char *skip);
int ctl_print_cjson(struct cJSON *json); /* frees it */
/* "ready" from an enum value of exl3.proto. */
const char *ctl_enum(const ProtobufCEnumDescriptor *desc, int value);

/* Replies to be freed with exl3_reply_freep(); what goes wrong is printed. */
int ctl_get_status(struct ctl *c, Exl3__Reply **ret);
int ctl_get_ps(struct ctl *c, Exl3__Reply **ret);

/* ---- exl3ctl_sup.c ---- */

/* A question on the daemon's admin socket; @line for each line of the answer, until it returns something else than
 * CTL_OK. What goes wrong is printed. */
int ctl_ask_supervisor(struct ctl *c, const char *request, int (*line)(void *arg, char *text),
		       void *arg);
bool ctl_may_ask_supervisor(const struct ctl *c);
/* Splits a line at its tabs; false: there are fewer than @nr fields. */
bool ctl_split(char *line, char **field, int nr);
/* @array: NULL prints them. */
int ctl_events_of_supervisor(struct ctl *c, struct cJSON *array);
void ctl_print_event(const Exl3__Event *e); /* exl3ctl_events.c */

/* ---- verbs: exit code ---- */

int ctl_domains(struct ctl *c);

int ctl_status(struct ctl *c);
int ctl_tenants(struct ctl *c);
int ctl_models(struct ctl *c);
int ctl_modules(struct ctl *c);
int ctl_tensors(struct ctl *c);
int ctl_ps(struct ctl *c);
int ctl_events(struct ctl *c);
int ctl_kernels(struct ctl *c);
int ctl_calibrate(struct ctl *c);
int ctl_top(struct ctl *c);
int ctl_load(struct ctl *c);
int ctl_unload(struct ctl *c);
int ctl_drain(struct ctl *c);
int ctl_fds(struct ctl *c);
int ctl_version(struct ctl *c);
int ctl_resolve(struct ctl *c);
int ctl_doctor(struct ctl *c);
int ctl_env(struct ctl *c);
int ctl_run(struct ctl *c);

#endif
