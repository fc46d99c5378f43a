/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tenant.h - whose a client is and what it may: policy, limits and what is held against them. No clock
 * (time is passed in) and no I/O.
 *
 * A tenant is a group of clients that share weight, rights and limits. Which one a client belongs to follows
 * from what the kernel says about its process (identity.h): the first tenant of the configuration that
 * matches, else "default", which matches everybody.
 *
 *   tenant:  ACTIVE -> RETIRED (a reload no longer names it) -> freed with the last that it holds
 *                      RETIRED -> ACTIVE (a later one names it again)
 *
 * Loop thread. What a tenant holds outlives its clients: memory and rows count until the last request that
 * uses them has ended.
 */
#ifndef EXL3_DAEMON_TENANT_H
#define EXL3_DAEMON_TENANT_H

#include "daemon/config.h"
#include "daemon/devices.h"
#include "daemon/identity.h"
#include "daemon/metrics.h"
#include "daemon/sched.h"
#include "shm/util.h"

#include <stdbool.h>
#include <stdint.h>

/* A bucket of tokens that fills at a rate. Zeroed: full. */
struct exl3_tokens {
	uint64_t interval_ns, burst; /* one token per interval, as many as burst at most; 0: no limit */
	uint64_t until_ns;           /* when all tokens taken so far will have come in again */
};

/* Tokens that are missing stay missing, but come in at the new rate. */
void exl3_tokens_set(struct exl3_tokens *t, uint64_t per_second, uint64_t burst, uint64_t now_ns);
/* Tokens there now; UINT32_MAX: no limit. */
uint32_t exl3_tokens_there(const struct exl3_tokens *t, uint64_t now_ns);
/* @nr: no more than there are. */
void exl3_tokens_take(struct exl3_tokens *t, uint32_t nr, uint64_t now_ns);
/* When there will be one; not after @now_ns if there is. */
uint64_t exl3_tokens_when(const struct exl3_tokens *t, uint64_t now_ns);

struct exl3_channel;

struct exl3_policy;

struct exl3_tenant {
	struct exl3_policy *policy; /* borrowed; it outlives its tenants */
	struct exl3_tenant *next; /* in the policy, in the order of the configuration; retired ones last */
	struct exl3_config_tenant conf; /* owned copy */
	struct exl3_sched_tenant sched[EXL3_DEVICES_MAX]; /* its account with each device's scheduler */
	struct exl3_tokens tokens;
	uint32_t slot; /* unique among those that are not freed */
	struct exl3_metrics_tenant *metrics; /* borrowed; NULL: not counted */
	bool retired;

	/* Held now. */
	uint32_t refs; /* clients, channels, memory: anything that points here */
	uint32_t clients, channels;
	uint64_t rows, requests; /* accepted and not complete; rows: not of what waits for a client's word */
	uint64_t bytes; /* registered: arenas, imports, rings */
	uint64_t by_kind[EXL3_BYTES_NR];
	uint64_t credits;               /* of its channels */

	/* For gate.c: channels that wait for tokens or for rows to end; the next tenant with some. */
	struct exl3_channel *waiting, *waiting_tail;
	struct exl3_tenant *next_waiting;
	struct exl3_channel *next_rows; /* first of all: its call is ready, and waits for rows to end; or NULL */
};

struct exl3_policy {
	struct exl3_tenant *list;
	struct exl3_tenant *fallback; /* the default one, in the list too */
	uint32_t nr, nr_configured;
	uint64_t slots; /* bit: slot in use */
	struct exl3_metrics *metrics; /* borrowed; NULL: none */
};

/**
 * exl3_policy_apply() - the tenants of a configuration, at the start and after a reload.
 * Tenants of the same name are changed in place, so that what they hold goes on counting; limits lowered below
 * that stop new things only. Returns 0, -ENOMEM or -EDQUOT (too many, retired ones that are in use among them);
 * then nothing was changed.
 */
int exl3_policy_apply(struct exl3_policy *p, const struct exl3_config *cfg, uint64_t now_ns,
		      struct exl3_error *err);
/* Nothing is held any more. */
void exl3_policy_fini(struct exl3_policy *p);

/* Whose @who is; never NULL. */
struct exl3_tenant *exl3_policy_match(const struct exl3_policy *p, const struct exl3_identity *who);
/* Whether a tenant may register CUDA IPC memory: "auto" is yes while only the default one is configured. */
bool exl3_tenant_cuda_ipc(const struct exl3_tenant *t);
bool exl3_tenant_model(const struct exl3_tenant *t, const char *model);

struct exl3_tenant *exl3_tenant_get(struct exl3_tenant *t);
/* Frees it if it is retired and this was the last reference. NULL is nothing. */
struct exl3_tenant *exl3_tenant_put(struct exl3_tenant *t);

/* What a new client, channel or registration takes; 0, or -EDQUOT with the limit, what is held and, for
 * bytes, what was asked for. The caller keeps a reference as long. */
int exl3_tenant_add_client(struct exl3_tenant *t, struct exl3_error *err);
int exl3_tenant_add_channel(struct exl3_tenant *t, struct exl3_error *err);
int exl3_tenant_charge(struct exl3_tenant *t, enum exl3_metric_kind kind, uint64_t bytes,
		       struct exl3_error *err);
void exl3_tenant_uncharge(struct exl3_tenant *t, enum exl3_metric_kind kind, uint64_t bytes);
/* What they hold now, for readers of the metrics. */
void exl3_policy_publish(const struct exl3_policy *p);
/* -EPERM for a model that it may not use. */
int exl3_tenant_check_model(const struct exl3_tenant *t, const char *model, struct exl3_error *err);

#endif
