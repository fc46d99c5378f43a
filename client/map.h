/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map.h - mapped mode inside libexl3: weights that this process has, and channels that it serves itself.
 *
 *   mapping:  MAPPED -> REVOKED (the daemon wants them back: nothing new begins) -> LET GO (what ran has ended)
 *             MAPPED -> ORPHAN (the worker is gone; the weights stay good) -> MAPPED, at the next worker
 * A mapping is counted by the models and modules that were opened of it, and pinned by what runs.
 */
#ifndef EXL3_CLIENT_MAP_H
#define EXL3_CLIENT_MAP_H

#include "client/internal.h"
#include "client/mapped/mapped.h"
#include "shm/exl3_map.h"

#define EXL3_MAPPINGS_MAX 64u /* of one client */

struct exl3_mapping {
	struct exl3_mapping *next;
	uint64_t serial;              /* never used again: the watcher's name for it */
	char *name, *fingerprint;     /* owned; of the model */
	struct exl3_mapped_model *model; /* owned; NULL: let go */
	struct exl3_segment *page;    /* owned; struct exl3_map_state */
	int sock;                     /* owned; -1: ORPHAN, or let go */
	uint8_t slab_id[16];
	size_t slab_id_bytes;
	uint32_t refs;
	uint32_t pins;                /* atomic; up under the lock only, down anywhere */
	bool revoked;
	bool captured;                /* a graph may use the weights at any time: they stay until all is closed */
	int gpu;                      /* -1: the processor */
	const char *device;           /* borrowed from model */
};

struct exl3_maps {
	pthread_mutex_t lock;   /* innermost; not held while the daemon is asked; a GPU may be waited for under it */
	const struct exl3_mapped_ops *ops; /* static; NULL: the library was not opened */
	struct exl3_mapping *list;
	struct exl3_object **handles; /* owned; modules and geometries by the lower half of their numbers; NULL: none */
	uint32_t nr_handles;
	struct exl3_arena *arenas[EXL3_BUFFERS_MAX]; /* likewise */
	uint64_t next_serial;
	int mode;    /* -1: auto, else enum exl3_mode */
	bool wanted; /* models are mapped as they are opened; under client.call */
};

/* ---- map.c ---- */

/* With the client; @flags: EXL3_CONNECT_MAPPED and so on. -EINVAL, -ENOMEM. */
int exl3_maps_new(struct exl3_client *c, unsigned flags);
void exl3_maps_free(struct exl3_client *c); /* no channel is left; objects may be */

/* A module, geometry or arena was opened, and can be named by requests; it is closed, and cannot. */
int exl3_map_enter(struct exl3_object *o);
void exl3_map_leave(struct exl3_object *o);
/* A model was opened: maps it if that is wanted. What goes wrong is met again by exl3_map_ready(). */
void exl3_map_model(struct exl3_model *m);
/* Maps all that is open. 0: a channel can be mapped; else why not, with a sentence. */
int exl3_map_ready(struct exl3_client *c);
/* Tells the daemon why a channel is direct although it was to be mapped. */
void exl3_map_tell(struct exl3_client *c, const char *why);

/* What a request names, pinned if 0 is returned. *@why: -ESTALE or -EOPNOTSUPP, where that says more. */
int exl3_map_target(struct exl3_client *c, uint32_t handle, struct exl3_mapped_target *ret, struct exl3_mapping **pinned,
		    int *why);
bool exl3_map_extent(struct exl3_client *c, uint32_t buffer, bool gpu, struct exl3_mapped_extent *ret);
void exl3_map_unpin(struct exl3_client *c, struct exl3_mapping *m);
/* On a thread of the driver's: takes no lock and calls no driver; what follows from it is the watcher's. */
void exl3_map_unpin_later(struct exl3_client *c, struct exl3_mapping *m);
void exl3_map_reap(struct exl3_client *c);

/* For the watcher: descriptors that end when a mapping ends; what it is then. */
unsigned exl3_map_fds(struct exl3_client *c, int *fds, uint64_t *serials);
void exl3_map_hangup(struct exl3_client *c, uint64_t serial);
/* For reconnect.c, which holds call: the worker is another one. @open: handle there of a model, or 0. */
void exl3_map_restore(struct exl3_client *c, uint32_t (*open)(void *arg, const char *name, const char *fingerprint),
		      void *arg);
/* The client will never be restored: nothing that is mapped is good any more. */
void exl3_map_lost(struct exl3_client *c);

/* ---- map_channel.c ---- */

/* Makes @ch one of mapped mode: its ring is served here. */
int exl3_map_channel_new(struct exl3_channel *ch, struct exl3_client *c, uint32_t entries);
void exl3_map_channel_free(struct exl3_channel *ch); /* waits for what runs; NULL map is nothing */
/* Takes what was submitted, runs what can run. */
void exl3_map_serve(struct exl3_channel *ch);
/* Does something wait for a word of the program, which nobody announces? */
bool exl3_map_stalled(const struct exl3_channel *ch);
/* One call on a stream of the caller's. 0, or a negative errno; then nothing was enqueued. */
int exl3_map_stream(struct exl3_channel *ch, const struct exl3_sqe *sqe, void *stream);
/* Has all come to its end that was enqueued on the caller's stream? 1, 0 (@end_ns has come) or -EIO. */
int exl3_map_stream_wait(struct exl3_channel *ch, uint64_t end_ns);

/* ---- map_cuda.c: all with the driver, which is opened then ---- */

/* A stream of the channel on that GPU. */
int exl3_map_cuda_stream(void **streams, int gpu, void **ret);
void exl3_map_cuda_stream_free(void *stream, int gpu);
int exl3_map_cuda_host(struct exl3_arena *a, int gpu); /* sets gpu_base, for all GPUs */
void exl3_map_cuda_unhost(struct exl3_arena *a);
/* Nothing of this process runs on that GPU any more. */
void exl3_map_cuda_wait(int gpu);
/* @fn is called when @stream has come so far. */
int exl3_map_cuda_after(void *stream, int gpu, void (*fn)(void *arg), void *arg);
/* 1: nothing is left on it, 0, or -EIO. */
int exl3_map_cuda_idle(void *stream);
int exl3_map_cuda_capturing(void *stream, bool *ret);

#endif
