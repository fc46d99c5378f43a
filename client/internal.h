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

#include "client/cuda_api.h"
#include "client/exl3.h"
#include "proto/exl3.pb-c.h"
#include "shm/segment.h"

#include <pthread.h>

#define EXL3_CALL_TIMEOUT_NS (30ull * 1000000000u) /* for one control request */
#define EXL3_SPIN_DEFAULT_NS 20000u

/* map.h */
struct exl3_maps;
struct exl3_mapping;
struct exl3_map_channel;
struct exl3_module_desc;

/* In the order in which they are restored: each needs those before it at most. */
enum exl3_object_type {
	EXL3_OBJECT_MODEL,
	EXL3_OBJECT_MODULE,
	EXL3_OBJECT_MLA,
	EXL3_OBJECT_ARENA,
	EXL3_OBJECT_CHANNEL,
	EXL3_OBJECT_PLAN,
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
	uint64_t features;   /* that the worker has too */
	uint32_t map_policy; /* HelloReply.mapped, or 0: the daemon has no such mode */
	struct exl3_maps *maps; /* owned; map.h */
	const char *domain; /* borrowed from exl3ctl: the fault domain that is wanted, or NULL */
	char mps_pipe[128]; /* under list: of the worker's MPS server; empty: none */
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
	struct exl3_mapping *mapping; /* counted, under maps->lock; NULL: it is not mapped */
	char *name, *fingerprint, *device; /* owned */
};

struct exl3_module {
	struct exl3_object obj;
	uint32_t handle;
	char *model, *fingerprint; /* owned; its model may be closed before it */
	char *name;                /* owned; as it was opened, with kind */
	unsigned kind;
	char *canonical;              /* owned; what the daemon calls it */
	struct exl3_mapping *mapping; /* counted, under maps->lock, as the next; NULL: its model is not mapped */
	const struct exl3_module_desc *desc; /* of the mapping's weights, while they are there */
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

/* GPU memory, as the daemon is told of it; kept, for the next worker. */
struct exl3_offer {
	struct exl3_cu_ipc ipc; /* if there are no fds */
	int fds[EXL3_FDS_MAX];  /* owned */
	uint64_t fd_bytes[EXL3_FDS_MAX];
	unsigned nr_fds;
	uint64_t offset; /* of what is meant; its length is the arena's */
	char device[64];
};

enum exl3_arena_kind { EXL3_ARENA_HOST, EXL3_ARENA_DEVICE, EXL3_ARENA_REGISTERED };

struct exl3_arena {
	struct exl3_object obj;
	enum exl3_arena_kind kind;
	uint32_t buffer;
	struct exl3_segment *seg; /* HOST: owned */
	struct exl3_offer *offer; /* others: owned */
	exl3_cu_handle cu_handle; /* DEVICE: owned, mapped at base */
	char *base;               /* REGISTERED: the program's memory, borrowed */
	size_t bytes;
	exl3_cu_ptr gpu_base;     /* HOST: where GPUs find it in mapped mode, 0: not yet asked for; under maps->lock */
	int gpu;                  /* through which it was made known */
	size_t used; /* atomic; exl3_arena_alloc() */
};

#define EXL3_PLAN_CHUNK 64u

/* Recorded calls; kept, for the next worker. */
struct exl3_plan {
	struct exl3_object obj; /* once the daemon has it */
	struct exl3_channel *ch; /* borrowed; NULL: freed */
	struct exl3_plan *next;  /* in ch->plans, under the client's list lock */
	uint32_t handle;         /* atomic: reconnect.c clears it when the next worker does not get the plan */
	uint32_t nr;
	struct exl3_sqe *chunks[EXL3_PLAN_CALLS_MAX / EXL3_PLAN_CHUNK]; /* owned; entries do not move */
};

static inline uint32_t exl3_plan_handle(const struct exl3_plan *plan)
{
	return __atomic_load_n(&plan->handle, __ATOMIC_RELAXED);
}

/* A published request whose completion has not been taken. */
struct exl3_pending {
	uint64_t user_data;
	bool stream; /* a stream call: its number is the lower half of user_data */
	bool done; /* completed before one that was submitted earlier (CANCEL can do that) */
};

/* How a stream call ended. */
struct exl3_stream_end {
	uint32_t call;
	struct exl3_cqe cqe;
};

/* What a channel has for stream calls; the owner's thread, unless it says otherwise. */
struct exl3_stream {
	struct exl3_arena *words; /* owned, an object of the client; NULL in mapped mode, which has: */
	struct exl3_stream_slot *own; /* owned */
	struct exl3_stream_slot *slots; /* in words; [mask + 1] */
	uint32_t mask;
	uint32_t next;            /* number of the next call */
	uint32_t *issued;         /* owned; atomic: the last call of each slot; the watcher reads it */
	struct exl3_stream_end *ends; /* owned; of the last call of each slot that has ended */
	uint64_t epoch;           /* at which worker the words are bound to the channel */
	const struct exl3_cuda *cu; /* NULL: the words are not known to CUDA */
	exl3_cu_ptr dev;          /* where the GPU finds the words */
	void *ctx;                /* the context that they were registered in */
	int error;                /* the first one since exl3_stream_error() */
	uint32_t error_call;
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
	struct exl3_plan *recording; /* owned; what is prepared goes there; NULL: into the ring */
	struct exl3_plan *plans;     /* of this channel, under the client's list lock */
	struct exl3_stream *stream; /* owned; atomic, as the watcher looks; NULL: no stream call was made */
	bool last_is_stream;        /* what exl3_submit() publishes is a stream call */
	/* Completions of other requests that a stream call came across: for exl3_peek(). */
	struct exl3_cqe *kept; /* owned, as many as pending; NULL without stream */
	uint32_t kept_first, kept_last;
	uint32_t nr_plain; /* submitted and not taken from the ring, without stream calls */
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
	struct exl3_map_channel *map; /* owned; NULL: direct */
	char why[128];                /* why it is direct although mapped was preferred; or empty */
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
/* For reconnect.c: also while the client counts as dead; takes no lock: the caller holds call. @send: go
 * with the request, @nr_send of them, stay the caller's. */
int exl3_client_call_locked(struct exl3_client *c, Exl3__Request *req, Exl3__Reply__BodyCase want,
			    uint64_t timeout_ns, Exl3__Reply **ret, int *fds, unsigned nr_fds,
			    const int *send, unsigned nr_send);
/* exl3_client_call() without descriptors in the reply, with some in the request. */
int exl3_client_call_send(struct exl3_client *c, Exl3__Request *req, Exl3__Reply__BodyCase want,
			  uint64_t timeout_ns, Exl3__Reply **ret, const int *send, unsigned nr_send);
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

/* Takes one completion if one is there: what a stream call came to is noted, another one is kept for
 * exl3_peek(). 1, 0, -ESTALE, or -EAGAIN: too many are kept. */
int exl3_channel_take(struct exl3_channel *ch);
/* Waits as exl3_wait() does until something may be there; false: @end_ns has come. */
bool exl3_channel_sleep(struct exl3_channel *ch, uint64_t end_ns);
/* Drops what was handed out and not submitted. */
void exl3_channel_forget(struct exl3_channel *ch);
/* 0, also because it has just moved to the next worker; -ESTALE. */
int exl3_channel_live(struct exl3_channel *ch);

/* ---- stream.c ---- */

/* Words for stream calls, the first of which gets number @first. Once per channel. */
int exl3_stream_make(struct exl3_channel *ch, uint32_t first);
/* Notes how a call has ended. */
void exl3_stream_ended(struct exl3_channel *ch, const struct exl3_cqe *cqe);
/* Every stream that waits for a call of the channel goes on, and finds @result beside it. The watcher, too. */
void exl3_stream_release(struct exl3_channel *ch, int result);
/* Nobody may wait any more; leaves the words' arena, an object of the client. @forked: in a child. */
void exl3_stream_free(struct exl3_channel *ch, bool forked);

/* ---- plan.c ---- */

/* Room for one more call; NULL with an error. */
struct exl3_sqe *exl3_plan_next(struct exl3_channel *ch);
/* What is being recorded is forgotten. */
void exl3_plan_discard(struct exl3_channel *ch);
/* The channel is being freed: it records nothing any more, and its plans are of no use. */
void exl3_plans_forget(struct exl3_channel *ch);
/* The requests that make the plan at a worker, one by one, through @send. */
int exl3_plan_record(const struct exl3_plan *plan, uint32_t channel,
		     int (*send)(void *arg, Exl3__Request *req, Exl3__Reply **reply), void *arg, uint32_t want,
		     uint32_t *handle);

/* ---- arena.c, cuda_mem.c ---- */

void exl3_arena_add(struct exl3_client *c, struct exl3_arena *a); /* filled in: an object of the client */
void exl3_arena_tell_free(struct exl3_client *c, uint32_t buffer);
void exl3_offer_fini(struct exl3_arena *a); /* what only GPU memory has */
/* Fills in a request; its data is borrowed from the arena. */
void exl3_offer_fill(const struct exl3_arena *a, Exl3__RegisterBuffer *body);
/* The driver, opened at the first call. 0 or -ENODEV. */
int exl3_cuda_get(const struct exl3_cuda **ret);
/* And the context that is current in this thread; -EINVAL: none. */
int exl3_cuda_context(const struct exl3_cuda **ret, void **ctx);
/* 0, -ENOMEM or -EIO, with a sentence. */
int exl3_cuda_errf(exl3_cu_result r, const char *what);

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

/* exl3_connect_flags() to the worker of a domain, for administrators; @domain: NULL, or stays as it is until
 * exl3_close(). */
int exl3_client_connect(const char *path, const char *name, unsigned flags, const char *domain,
			struct exl3_client **ret);

/* ---- mps_env.c ---- */

/* What the worker's HelloReply says; any thread. */
void exl3_client_mps_learn(struct exl3_client *c, const char *pipe);
/* Sets the environment variable if that is of use. 1: CUDA here is or will be in the daemon's MPS server; 0:
 * there is none; -ESTALE: CUDA was started elsewhere; -ENOTCONN: somebody has chosen another one; -ENOMEM. */
int exl3_client_mps_env(struct exl3_client *c);

#endif
