/* SPDX-License-Identifier: Apache-2.0 */
/*
 * models.h - the models of this worker by name: loaded and freed off the loop, counted while in use.
 *
 * A handle of a client holds the registration, not the weights: after an unload the name is free again
 * and the memory goes as soon as the last accepted request is done, whoever still has it open.
 *
 *   LOADING -> READY -> UNLOADING -> gone      LOADING -> FAILED -> gone (unload, or a load of that name)
 *   LOADING -> UNLOADING (the load is cancelled) -> gone
 *
 * Where somebody keeps weights for later workers, a load begins with a question: want() is called, and
 * exl3_models_answer() says whether there are some to adopt. Some that cannot be used are reported (REFUSED),
 * so that they go before the same memory is needed again, and the question stands once more. So it does where
 * the files have changed since (STALE): maybe somebody else has loaded those already; if not, the files are
 * loaded, and if they are refused, what was kept is adopted all the same.
 */
#ifndef EXL3_DAEMON_MODELS_H
#define EXL3_DAEMON_MODELS_H

#include "daemon/devices.h"
#include "daemon/jobs.h"
#include "daemon/weights.h"

#include <stdbool.h>
#include <stdint.h>

/* A name and what it stands for. Loop thread, except @model while a job has it. */
struct exl3_registered {
	struct exl3_job job; /* load, then free */
	struct exl3_models *all;
	struct exl3_registered *next; /* in all->list, in the order of their loads */
	char *name, *path;            /* owned */
	const struct exl3_device *device; /* borrowed from the worker: where it lives */
	struct exl3_model *model;     /* owned reference; NULL while and after it is freed */
	struct exl3_model *dying;     /* the same, handed to the job that frees it */
	int state;                    /* enum exl3_model_state; never NEW */
	uint32_t refs;                /* the list, and one per handle */
	uint32_t opened;              /* model handles of clients */
	uint64_t inflight;            /* requests accepted and not done */
	uint32_t mappers;             /* clients that have the weights in their own process */
	int map_fd;                   /* owned; the table that they get, -1: none was wanted */
	bool map_told;                /* the supervisor knows that they may have written into it */
	bool patient;                 /* UNLOADING: its mappers go when they like */
	uint64_t start_ns, shown_ns, shown_bytes; /* of the load, for the progress line */
	struct exl3_metrics_model *metrics;       /* borrowed; NULL: not counted */
	bool at_start;                            /* named by the configuration */
	bool job_busy;
	bool asked;                /* LOADING: waits for exl3_models_answer() */
	bool stale;                /* kept is sound, the files are others */
	struct exl3_kept_fds kept; /* owned; what it was answered; the job closes them, unless stale */
	uint64_t kept_id;          /* of those it was answered last */
	unsigned adopt_flags;      /* with them */
	enum exl3_models_way {
		EXL3_MODELS_FROM_FILES,
		EXL3_MODELS_ADOPTED,
		EXL3_MODELS_REFUSED_KEPT,
		EXL3_MODELS_STALE_KEPT
	} way;                 /* how the load ended */
	struct exl3_error why; /* code < 0: why weights were not adopted, or only because a load failed */
};

/* Both still LOADING. REFUSED: what was kept is not what it should be (reg->why) and is to be dropped; STALE: it
 * is sound, but of other files. */
enum exl3_models_event {
	EXL3_MODELS_LOADED,
	EXL3_MODELS_FAILED,
	EXL3_MODELS_REFUSED,
	EXL3_MODELS_STALE,
	EXL3_MODELS_GONE
};

struct exl3_models {
	struct exl3_loop *loop; /* borrowed from the worker, as the next */
	struct exl3_jobs *jobs;
	struct exl3_registered *list;
	uint32_t nr, nr_loading;
	struct exl3_timer progress;
	/* Loop thread; GONE: the last call in which @reg may be used. */
	void (*event)(void *arg, struct exl3_registered *reg, enum exl3_models_event event);
	/* NULL: nobody can map weights. Asks all that have mapped those of @reg to let go. */
	void (*revoke)(void *arg, struct exl3_registered *reg);
	/* NULL: every load reads the files. */
	void (*want)(void *arg, struct exl3_registered *reg);
	void *arg;
	uint64_t instance;   /* of this worker, for the manifests */
	uint32_t generation;
};

void exl3_models_init(struct exl3_models *all, struct exl3_loop *loop, struct exl3_jobs *jobs);
/* Starts to unload everything; the jobs' end does the rest. */
void exl3_models_unload_all(struct exl3_models *all);

struct exl3_registered *exl3_models_find(const struct exl3_models *all, const char *name);

/* Starts a load onto @device, in place of one that failed; @device_tensors: a copy of the unquantized ones too. -EEXIST: the name is taken; -EINVAL; -ENOMEM. */
int exl3_models_load(struct exl3_models *all, const char *name, const char *path,
		     const struct exl3_device *device, bool device_tensors, bool at_start,
		     struct exl3_registered **ret, struct exl3_error *err);
/* The answer to want(): @fds (taken in any case) to adopt from, or NULL: there is nothing, read the files.
 * Nothing happens if no model of that name has asked. @flags: EXL3_ADOPT_VERIFY_ALL. */
void exl3_models_answer(struct exl3_models *all, const char *name, const struct exl3_kept_fds *fds,
			unsigned flags);
/* Starts an unload; nothing happens if it has begun. Clients that map the weights are asked to let go. */
void exl3_models_unload(struct exl3_registered *reg);
/* The same, but they are not asked; a later exl3_models_unload() does that. */
void exl3_models_unload_patiently(struct exl3_registered *reg);
/* One that is UNLOADING and waits for its mappers, or NULL. */
struct exl3_registered *exl3_models_find_leaving(const struct exl3_models *all, const char *name);

/* 0: READY; -EAGAIN (loading), -EIO (failed) or -ENOENT (unloading), with a sentence. */
int exl3_models_usable(const struct exl3_registered *reg, struct exl3_error *err);

struct exl3_registered *exl3_registered_get(struct exl3_registered *reg);
struct exl3_registered *exl3_registered_put(struct exl3_registered *reg);
/* A request begins and ends to need the weights. */
void exl3_registered_pin(struct exl3_registered *reg);
void exl3_registered_unpin(struct exl3_registered *reg);
/* A client begins and ends to have them in its own process: they stay as long. */
void exl3_registered_map(struct exl3_registered *reg);
void exl3_registered_unmap(struct exl3_registered *reg);

#endif
