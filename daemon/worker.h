/* SPDX-License-Identifier: Apache-2.0 */
/* worker.h - the process that serves: one loop, one device, all clients; started by the supervisor. */
#ifndef EXL3_DAEMON_WORKER_H
#define EXL3_DAEMON_WORKER_H

#include "daemon/config.h"
#include "daemon/dispatch.h"
#include "daemon/jobs.h"
#include "daemon/loop.h"
#include "daemon/models.h"

#include <limits.h>
#include <sys/types.h>

/* Descriptors that a worker is started with, and its exit statuses. */
#define EXL3_WORKER_LISTEN_FD  3
#define EXL3_WORKER_CONTROL_FD 4
#define EXL3_WORKER_REFUSED    78 /* cannot serve as configured: a restart would not help */

#define EXL3_SUP_TEXT_MAX (PATH_MAX + EXL3_NAME_MAX + 128) /* NAME=DIR,device=D */

/* What supervisor and worker tell each other, one packet each: this header and a text. */
enum exl3_sup_type {
	/* to the worker, at its start, in this order */
	EXL3_SUP_HELLO, /* instance, generation, pid; watchdog_ns: how often a BEAT is wanted, 0: never */
	EXL3_SUP_KEY,   /* text KEY=VALUE */
	EXL3_SUP_MODEL, /* text NAME=DIR; generation 0: of the start, 1: since then */
	EXL3_SUP_GO,
	/* to the worker, later */
	EXL3_SUP_DRAIN,
	EXL3_SUP_RELOAD, /* KEY, MODEL and GO follow; without GO nothing counts */
	/* from the worker */
	EXL3_SUP_READY,  /* all models of the start are loaded */
	EXL3_SUP_STATUS, /* text for systemctl status */
	EXL3_SUP_BEAT,   /* the loop turns */
	EXL3_SUP_ADDED,  /* text NAME=DIR: load it after a restart too */
	EXL3_SUP_REMOVED /* text NAME */
};

struct exl3_sup_msg {
	uint32_t type;
	uint32_t generation;
	uint64_t instance;
	uint64_t watchdog_ns;
	int32_t pid;
	uint32_t reserved;
	char text[EXL3_SUP_TEXT_MAX]; /* as long as the packet says, ends with a zero */
};

struct exl3_peer;

struct exl3_worker {
	struct exl3_config *cfg;   /* borrowed from main(); its values are the supervisor's */
	struct exl3_config *fresh; /* owned: between RELOAD and its GO; else NULL */
	struct exl3_loop *loop;
	struct exl3_jobs *loads, *memory; /* threads: long loads; arenas and their end */
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev;
	struct exl3_models models;
	struct exl3_dispatch *dispatch;

	struct exl3_peer *peers; /* list */
	uint32_t nr_peers;
	int listen_fd, control_fd, signal_fd, spare_fd;
	struct exl3_watch *listen_watch, *control_watch, *signal_watch;
	struct exl3_timer beat, drain_timer, listen_timer;

	char backends[4][384]; /* those compiled in, each with what it found at start */
	uint32_t nr_backends;
	uint64_t instance;
	uint32_t generation;
	pid_t supervisor;
	uint64_t start_ns, beat_ns;
	bool ready;    /* told the supervisor */
	bool draining; /* accepted requests finish, then stop */
	bool stop;
	int status; /* exit status */
};

/* Serves until it is told to stop; exit status of the process. */
int exl3_worker_main(struct exl3_config *cfg);

/* For control: */
void exl3_worker_drain(struct exl3_worker *w, const char *why);
/* A model may name the device that it wants: it must be ours. NULL or "" is. */
int exl3_worker_check_device(const struct exl3_worker *w, const char *device,
			     struct exl3_error *err);
void exl3_worker_tell(struct exl3_worker *w, enum exl3_sup_type type, const char *text);
/* A model that was loaded at run time: a worker that is started after this one loads it too. */
void exl3_worker_keep_model(struct exl3_worker *w, const struct exl3_registered *reg);

#endif
