/* SPDX-License-Identifier: Apache-2.0 */
/* control.h - the control socket's verbs: decode, check, call, reply. */
#ifndef EXL3_DAEMON_CONTROL_H
#define EXL3_DAEMON_CONTROL_H

#include "daemon/peer.h"
#include "proto/exl3.pb-c.h"

/* Handles one packet of a client: one reply is sent, queued, or owed (peer->waiting).
 * @fds: what came with it; a verb that keeps one puts -1 in its place, the rest is the caller's to close. */
void exl3_control_request(struct exl3_peer *peer, const void *packet, size_t bytes, int *fds,
			  unsigned nr_fds);
/* A client whose Hello another domain's worker has read: answers it. */
void exl3_control_greet(struct exl3_peer *peer, uint64_t id, const char *name);
/* Something that clients may wait for has happened to a model. */
void exl3_control_model_event(struct exl3_worker *w, struct exl3_registered *reg,
			      enum exl3_models_event event);
/* Tells a client why it is disconnected now, unasked: a reply with id 0. */
void exl3_control_farewell(struct exl3_peer *peer, const struct exl3_error *why);
/* The peer is being freed: nothing it waits for may touch it any more. */
void exl3_control_forget(struct exl3_peer *peer);

/* ---- for control_*.c: one call ---- */

struct exl3_call {
	struct exl3_worker *w;
	struct exl3_peer *peer;
	const Exl3__Request *req;
	int *req_fds; /* borrowed; as in exl3_control_request() */
	unsigned nr_req_fds;
	Exl3__Reply *reply; /* body to be filled in, memory from exl3_call_alloc() */
	int fds[EXL3_FDS_MAX];
	unsigned nr_fds;
	int close_fd; /* one of fds that is ours to close after sending, or -1 */
	struct exl3_error err;
};

/* Zeroed memory that lives until the reply was sent; NULL: the message has grown too large. */
void *exl3_call_alloc(size_t bytes);
char *exl3_call_strdup(const char *text);
/* Bytes left for list entries of a reply: a page ends before it would not fit into a packet. */
#define EXL3_PAGE_BYTES (EXL3_PACKET_MAX - 4096u)
/* A model that the client may use and that is READY, by name. control_model.c */
int exl3_call_model(struct exl3_call *c, const char *name, struct exl3_registered **ret);
/* Pipe folder of the MPS server that this client may join; empty: none. */
char *exl3_call_mps_pipe(const struct exl3_call *c);
/* exl3_errf(call's error, -ENOMEM, ...) */
int exl3_call_nomem(struct exl3_call *c);
/* A reply of one body to a peer that waits; @fill may be NULL. */
void exl3_control_resume(struct exl3_peer *peer, int code, const char *text,
			 int (*fill)(struct exl3_call *c, void *arg), void *arg);

enum exl3_arena_how { EXL3_ARENA_NEW, EXL3_ARENA_NEW_DEVICE, EXL3_ARENA_ADOPT, EXL3_ARENA_IMPORT };

/* Memory that is made or mapped off the loop: zeroing gigabytes takes long. Its end is the reply. */
struct exl3_arena_job {
	struct exl3_job job;
	struct exl3_worker *w;
	struct exl3_peer *peer; /* borrowed; NULL: it has left meanwhile */
	enum exl3_arena_how how;
	uint64_t bytes;
	int fds[EXL3_FDS_MAX];   /* owned; that came with the request */
	unsigned nr_fds;
	uint64_t fd_bytes[EXL3_FDS_MAX];
	struct exl3_import import; /* IMPORT: borrows fds and fd_bytes */
	uint32_t want;           /* its number, 0 = any */
	struct exl3_buffer *buf; /* owned until the peer has it */
	int rc;
	struct exl3_error err;
};

/* Checks the client's limits. */
int exl3_arena_job_new(struct exl3_call *c, enum exl3_arena_how how, uint64_t bytes,
		       const struct exl3_device *maker, struct exl3_arena_job **ret);
/* Takes over the call's descriptors; from here on the client waits. Returns 0. */
int exl3_arena_job_start(struct exl3_call *c, struct exl3_arena_job *a);

/* control_model.c */
int exl3_verb_list_models(struct exl3_call *c);
int exl3_verb_open_model(struct exl3_call *c);
int exl3_verb_close_model(struct exl3_call *c);
int exl3_verb_list_modules(struct exl3_call *c);
int exl3_verb_open_module(struct exl3_call *c);
int exl3_verb_close_module(struct exl3_call *c);
int exl3_verb_list_tensors(struct exl3_call *c);
int exl3_verb_open_tensor(struct exl3_call *c);
int exl3_verb_resolve(struct exl3_call *c);
/* control_memory.c */
int exl3_verb_create_channel(struct exl3_call *c);
int exl3_verb_close_channel(struct exl3_call *c);
int exl3_verb_create_arena(struct exl3_call *c);
int exl3_verb_adopt_arena(struct exl3_call *c);
int exl3_verb_free_buffer(struct exl3_call *c);
int exl3_verb_register_mla(struct exl3_call *c);
void exl3_arena_job_forget(struct exl3_peer *peer);
/* Of the arena that is being made for it; NULL: none is. */
struct exl3_buffer *exl3_arena_job_buffer(const struct exl3_peer *peer);
/* control_buffer.c */
int exl3_verb_register_buffer(struct exl3_call *c);
int exl3_verb_bind_stream(struct exl3_call *c);
/* control_admin.c */
int exl3_verb_load(struct exl3_call *c);
int exl3_verb_unload(struct exl3_call *c);
int exl3_verb_drain(struct exl3_call *c);
int exl3_verb_status(struct exl3_call *c);
int exl3_verb_ps(struct exl3_call *c);
int exl3_verb_list_events(struct exl3_call *c); /* control_events.c */
/* control_kernels.c */
int exl3_verb_list_kernels(struct exl3_call *c);
int exl3_verb_calibrate(struct exl3_call *c);
int exl3_verb_calibrate_status(struct exl3_call *c);
/* control_map.c */
int exl3_verb_map_model(struct exl3_call *c);
int exl3_verb_map_failed(struct exl3_call *c);
/* control_plan.c */
int exl3_verb_record_plan(struct exl3_call *c);
int exl3_verb_free_plan(struct exl3_call *c);
/* control_tenant.c */
int exl3_verb_list_tenants(struct exl3_call *c);

/* Fills in what is known about a model; at most @skipped_max of what was left out. */
int exl3_model_message(const struct exl3_registered *reg, uint32_t skipped_max, Exl3__Model **ret);

#endif
