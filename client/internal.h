/* SPDX-License-Identifier: Apache-2.0 */
/*
 * internal.h - what the files of libexl3 share; nothing of it is exported.
 *
 * Locks, in this order; none is held while user code runs:
 *   client.call   one control request and its reply at a time; may be held for seconds
 *   client.list   the list of objects and the watcher's list of channels; never held across a system call
 *                 that can block
 * A channel's data path takes no lock.
 */
#ifndef EXL3_CLIENT_INTERNAL_H
#define EXL3_CLIENT_INTERNAL_H

#include "client/exl3.h"
#include "proto/exl3.pb-c.h"
#include "shm/segment.h"

#include <pthread.h>

#define EXL3_CALL_TIMEOUT_NS (30ull * 1000000000u) /* for one control request */
#define EXL3_SPIN_DEFAULT_NS 20000u

/* In the order in which they are restored: each needs those before it at most. */
enum exl3_object_type {
	EXL3_OBJECT_MODEL,
	EXL3_OBJECT_MODULE,
	EXL3_OBJECT_MLA,
	EXL3_OBJECT_ARENA,
	EXL3_OBJECT_CHANNEL,
	EXL3_OBJECT_NR
};

/* Whatever was opened from a client, so that exl3_close() can free it all, and so that all of it can be had
 * again from the next worker. */
struct exl3_object {
	struct exl3_object *prev, *next;
	struct exl3_client *client;             /* borrowed: outlives the object */
	enum exl3_object_type type;
	bool pinned; /* under list; being restored: whoever removes it waits */
	void (*drop)(struct exl3_object *self); /* frees memory and fds, tells the daemon nothing */
};

/*
 * CONNECTED -> LOST (the worker is gone; dead is 1) -> CONNECTED again, everything restored, or
 * LOST -> LOST for good (gone), when the model's content is another.
 */
struct exl3_client {
	int sock;            /* owned; SOCK_SEQPACKET, replies are read under call only; changed under call and list */
	unsigned fork_epoch; /* of the process that connected */
	uint64_t instance;   /* of the daemon, from Hello */
	uint32_t generation; /* of the worker */
	uint32_t dead;       /* atomic; 1 from the worker's end until everything is restored */
	char *path, *name;   /* owned; what it connected with */
	unsigned flags;      /* EXL3_CONNECT_* */
	bool admin;
	char *daemon_version, *backend; /* owned */
	int daemon_pid;

	pthread_mutex_t call;
	uint64_t next_id; /* under call, as the buffer */
	uint8_t *packet;  /* owned, EXL3_PACKET_MAX bytes */
	uint64_t epoch;   /* under call; counts connections: a channel's id means something within one only */

	pthread_mutex_t list;
	struct exl3_object *objects;   /* under list */
	struct exl3_channel *channels; /* under list */
	uint64_t next_serial;          /* under list; of a channel */

	/* reconnect.c; under list */
	pthread_cond_t changed;     /* an object was unpinned, or dead has changed, or an attempt failed */
	unsigned waiters;           /* threads in exl3_reconnect() */
	bool gone;                  /* no further attempt makes sense */
	struct exl3_error last_try; /* why the last attempt failed */

	pthread_t watcher;
	bool watching;
	int watch_fd;  /* owned eventfd: the list of channels has changed, or stop */
	uint32_t stop; /* atomic */
};

struct exl3_model {
	struct exl3_object obj;
	uint32_t handle;
	char *name, *fingerprint, *device; /* owned */
};

struct exl3_module {
	struct exl3_object obj;
	uint32_t handle;
	char *model, *fingerprint; /* owned; its model may be closed before it */
	char *name;                /* owned; as it was opened, with kind */
	unsigned kind;
	struct exl3_module_info info;
	struct exl3_shard_info *shards; /* owned, info.nr_shards */
};

/* A registered geometry: only to be registered again. */
struct exl3_mla {
	struct exl3_object obj;
	uint32_t handle;
	struct exl3_mla_shape shape;
	char *device; /* owned; the shape's */
};

struct exl3_arena {
	struct exl3_object obj;
	uint32_t buffer;
	struct exl3_segment *seg; /* owned */
	size_t used;              /* atomic; exl3_arena_alloc() */
};

/* A published request whose completion has not been taken. */
struct exl3_pending {
	uint64_t user_data;
	bool done; /* completed before one that was submitted earlier (CANCEL can do that) */
};

/* A channel at one worker. */
struct exl3_channel_life {
	uint32_t id;
	uint64_t epoch;
	struct exl3_segment *seg; /* owned */
	struct exl3_ring_client ring;
	int kick_fd;   /* owned; eventfd of the daemon */
	int notify_fd; /* owned; the daemon's end closes when the channel ends */
};

/* States: OPEN -> STALE (worker gone, or the channel failed) -> still STALE: outstanding requests end
 * with -ESTALE one by one -> OPEN again, when the client has been restored. */
struct exl3_channel {
	struct exl3_object obj;
	struct exl3_channel *prev, *next; /* client's list, under its list lock */
	uint32_t id;
	uint64_t epoch;  /* of id */
	uint64_t serial; /* unlike pointer and fd never used again: the watcher's name for it */
	struct exl3_segment *seg; /* owned */
	struct exl3_ring_client ring;
	int kick_fd;                  /* owned; eventfd of the daemon */
	int notify_fd;                /* owned; the daemon's end closes when the channel ends */
	struct exl3_pending *pending; /* owned, cq_mask + 1; [first, last) free-running */
	uint32_t pending_first, pending_last;
	struct exl3_sqe *last; /* slot that was handed out last */
	uint64_t spin_ns;
	uint64_t syscalls;
	uint32_t
		cq_flags; /* what stays set while awake: EXL3_CQ_WANT_MSG once exl3_fd() was called */
	bool stale;
	uint32_t ended;    /* atomic; the watcher saw the notification socket close */
	uint32_t sleeping; /* atomic; in the futex, or about to be */
	/* Owned, under list; of the next worker. The owner's thread moves in when nothing of the old ring is in
	 * use any more: no lock is needed on the data path. */
	struct exl3_channel_life *next_life;
};

/* ---- errors ---- */

/* This thread's error; what exl3_last_error() reads. */
struct exl3_error *exl3_client_err(void);

/* ---- connect.c ---- */

/* 0, -ESTALE (worker gone) or -EPERM (in a child after fork). */
int exl3_client_check(const struct exl3_client *c);
bool exl3_client_forked(const struct exl3_client *c);
void exl3_object_add(struct exl3_client *c, struct exl3_object *o, enum exl3_object_type type,
		     void (*drop)(struct exl3_object *self));
void exl3_object_remove(struct exl3_object *o); /* waits while it is pinned */
/* A connected socket, bounded in time; and the first request on c->sock. */
int exl3_client_dial(const char *path, int *ret);
int exl3_client_hello(struct exl3_client *c);

/* ---- control.c ---- */

/**
 * exl3_client_call() - send one request and wait for its reply.
 * @req:        id is filled in.
 * @want:       body that the reply must have when it is positive, or EXL3__REPLY__BODY__NOT_SET.
 * @timeout_ns: UINT64_MAX = for ever (loading a model). When it passes, the connection is given up.
 * @ret:        reply with code 0, to be freed with exl3__reply__free_unpacked(); may be NULL.
 * @fds:        room for @nr_fds; exactly so many must come with a positive reply, the caller's then.
 * Returns 0, the reply's code, -ESTALE, -ETIMEDOUT, -EPROTO.
 */
int exl3_client_call(struct exl3_client *c, Exl3__Request *req, Exl3__Reply__BodyCase want,
		     uint64_t timeout_ns, Exl3__Reply **ret, int *fds, unsigned nr_fds);
/* For reconnect.c: also while the client counts as dead; takes no lock: the caller holds call. @send_fd: goes
 * with the request, stays the caller's; -1: none. */
int exl3_client_call_locked(struct exl3_client *c, Exl3__Request *req, Exl3__Reply__BodyCase want,
			    uint64_t timeout_ns, Exl3__Reply **ret, int *fds, unsigned nr_fds,
			    int send_fd);
/* For closing: no reply wanted, errors do not matter, does nothing when the worker is gone. While the client is
 * being restored it waits for the end of that, as what is closed may just have been opened again.
 * @epoch: only in this connection; UINT64_MAX: in any. */
void exl3_client_tell(struct exl3_client *c, Exl3__Request *req, uint64_t epoch);
void exl3_reply_freep(Exl3__Reply **reply);
/* The path that exl3_connect(NULL, ...) uses. */
const char *exl3_client_path(const char *path);

/* ---- queue.c ---- */

/* Asks for a channel of @entries; the caller holds call. */
int exl3_channel_life_new(struct exl3_client *c, uint32_t entries, struct exl3_channel_life **ret);
struct exl3_channel_life *exl3_channel_life_free(struct exl3_channel_life *life);

/* ---- model.c ---- */

void exl3_mla_fill(const struct exl3_mla_shape *shape, Exl3__RegisterMla *body);

/* ---- reconnect.c ---- */

/* One attempt; the watcher's thread. 0: everything is restored. */
int exl3_client_restore(struct exl3_client *c);

/* ---- watch.c ---- */

int exl3_watcher_start(struct exl3_client *c);
void exl3_watcher_stop(struct exl3_client *c);
void exl3_watcher_add(struct exl3_channel *ch);
void exl3_watcher_remove(struct exl3_channel *ch);
/* Something that it watches, or that it shall do, has changed. */
void exl3_watcher_poke(struct exl3_client *c);
/* The worker is gone, or has broken the protocol: nothing is sent to it any more. */
void exl3_client_lost(struct exl3_client *c);

#endif
