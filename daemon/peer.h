/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.h - one connected client and all that it holds: exl3_peer_free() gives all of it back.
 *
 * A handle or buffer id carries the generation of its slot, so that one that was closed is never taken
 * for its successor.
 */
#ifndef EXL3_DAEMON_PEER_H
#define EXL3_DAEMON_PEER_H

#include "daemon/check.h"
#include "daemon/dispatch.h"
#include "daemon/tenant.h"
#include "daemon/worker.h"

#include <sys/types.h>

#define EXL3_REPLIES_MAX 64u /* replies that a client may leave unread */

enum exl3_handle_type { EXL3_HANDLE_NONE, EXL3_HANDLE_MODEL, EXL3_HANDLE_MODULE, EXL3_HANDLE_MLA, EXL3_HANDLE_PLAN, EXL3_HANDLE_NR };

struct exl3_handle {
	uint8_t type;
	uint16_t generation;
	struct exl3_registered *model;       /* counted; MODEL, MODULE */
	const struct exl3_module_desc *desc; /* MODULE; valid while model is READY */
	struct exl3_mla_geometry mla;
	uint32_t device; /* MLA: where its requests run */
	struct exl3_recorded *plan; /* counted; PLAN */
};

struct exl3_mapper;
struct exl3_buffer_job;   /* what frees a buffer */
struct exl3_reply_queued; /* a reply that did not fit into the socket */

/* What a client waits for: its next request is read after the reply. */
enum exl3_wait { EXL3_WAIT_NONE, EXL3_WAIT_LOADED, EXL3_WAIT_GONE, EXL3_WAIT_ARENA };

struct exl3_peer {
	struct exl3_worker *w;
	struct exl3_peer *next, *prev;
	int fd; /* owned; control socket */
	struct exl3_watch *watch;
	struct exl3_identity id; /* owned */
	struct exl3_tenant *tenant; /* counted */
	bool privileged; /* root or the daemon's own user: may connect, administer and use every model */
	bool counted;    /* among its tenant's clients: all but those that are refused */
	char name[64]; /* its own word, printable */
	char who[96];  /* for the log */
	bool hello, refused, closing;
	bool passed; /* to another domain: its end here is not that of the connection */
	struct exl3_error refusal; /* what its first request is answered with, if refused */
	uint64_t connected_ns;
	struct exl3_counters counters;

	struct exl3_handle *handles; /* owned array */
	uint32_t nr_handles;         /* slots */
	uint32_t free_hint;          /* no free slot below it */
	uint32_t nr_open[EXL3_HANDLE_NR];
	struct exl3_plan_count *plan_count; /* counted; NULL: it never had one */

	struct exl3_buffer *buffers[EXL3_BUFFERS_MAX]; /* a reference each */
	uint8_t buffer_generation[EXL3_BUFFERS_MAX];
	uint32_t nr_buffers;
	struct exl3_buffer_job *dropped; /* list of buffers that only requests use any more */
	uint64_t arena_bytes;            /* of buffers, these too, and of one that is being made */

	struct exl3_channel *channels[EXL3_CHANNELS_MAX];
	uint32_t nr_channels;

	struct exl3_mapper *mappers; /* list, mapper.h */
	char mode_note[128];         /* why its calls go through rings although it wanted to map; its own word, printable */

	enum exl3_wait waiting;
	uint64_t wait_id;                  /* of the request */
	struct exl3_registered *wait_for;  /* borrowed: GONE ends the wait */
	struct exl3_arena_job *wait_arena; /* borrowed: told when the peer is gone first */

	struct exl3_reply_queued *replies, **replies_tail;
	uint32_t nr_replies;
};

/* Takes @fd over on success. A client that may not connect, or is one too many, is refused: its first request
 * is answered with the reason. */
int exl3_peer_new(struct exl3_worker *w, int fd, struct exl3_error *err);
/* May it load, unload and drain? */
bool exl3_peer_admin(const struct exl3_peer *peer);
/* 0, or -EPERM: its tenant may not use that model. */
int exl3_peer_check_model(const struct exl3_peer *peer, const char *model, struct exl3_error *err);
/* After a change of the policy: counts against the tenant that it belongs to now, with all that it holds. A
 * client that may no longer connect, or has a model open that it may no longer use, is told and disconnected. */
void exl3_peer_reconsider(struct exl3_peer *peer);
struct exl3_peer *exl3_peer_free(struct exl3_peer *peer);
void exl3_peer_set_name(struct exl3_peer *peer, const char *name);
/* Copies a client's word, cut to @size, without what a terminal would act on. */
void exl3_printable(char *to, size_t size, const char *text);

/* ---- handles; the number is the client's, checked ---- */

/* -EDQUOT, -ENOMEM. @h: copied; a model in it is counted. */
int exl3_handle_add(struct exl3_peer *peer, const struct exl3_handle *h, uint32_t *ret,
		    struct exl3_error *err);
/* The same, but under the number @want that an earlier worker gave; 0: any. -EINVAL: no worker would have
 * given it, -EEXIST: in use. */
int exl3_handle_add_as(struct exl3_peer *peer, const struct exl3_handle *h, uint32_t want,
		       uint32_t *ret, struct exl3_error *err);
/* NULL: no such handle. Valid until the next add or close. */
struct exl3_handle *exl3_handle_find(struct exl3_peer *peer, uint32_t handle);
void exl3_handle_close(struct exl3_peer *peer, struct exl3_handle *h);

/* ---- buffers ---- */

/* Keeps the reference that @buf comes with; 0: all are in use. @want: the number that an earlier worker gave
 * it, or 0; 0 comes back if it is in use or impossible. */
uint32_t exl3_peer_add_buffer(struct exl3_peer *peer, struct exl3_buffer *buf, uint32_t want);
struct exl3_buffer *exl3_peer_buffer(void *peer, uint32_t id);  /* NULL: no such buffer */
int exl3_peer_drop_buffer(struct exl3_peer *peer, uint32_t id); /* -ENOENT */
/* One reference, no memory yet; to be freed by exl3_buffer_free() once it has an arena. */
struct exl3_buffer *exl3_buffer_new(void);
/* Before it has memory: its bytes count against the tenant until it is freed. -EDQUOT names the limit. */
int exl3_buffer_charge(struct exl3_buffer *buf, struct exl3_tenant *tenant,
		       enum exl3_metric_kind kind, uint64_t bytes, struct exl3_error *err);
/* It has turned out to be that large. */
void exl3_buffer_recharge(struct exl3_buffer *buf, uint64_t bytes);
void exl3_buffer_uncharge(struct exl3_buffer *buf);
void exl3_buffer_free(void *worker, struct exl3_buffer *buf); /* the last reference is gone */

int exl3_peer_target(void *peer, uint32_t handle, struct exl3_target *ret);
struct exl3_recorded *exl3_peer_plan(void *peer, uint32_t handle); /* NULL: no such plan */

/* ---- replies ---- */

/* Sends a packet or queues it; descriptors stay the caller's. A client that leaves too many unread is
 * marked closing. */
void exl3_peer_send(struct exl3_peer *peer, const void *data, size_t bytes, const int *fds,
		    unsigned nr_fds);
/* Marks it to be freed when the loop has handled what it is at. */
void exl3_peer_disconnect(struct exl3_peer *peer, const char *why);
/* What the control socket is watched for, after a change of waiting, replies or closing. */
void exl3_peer_rewatch(struct exl3_peer *peer);

#endif
