/* SPDX-License-Identifier: Apache-2.0 */
/* worker.h - the process that serves: one loop, its devices, all clients; started by the supervisor. */
#ifndef EXL3_DAEMON_WORKER_H
#define EXL3_DAEMON_WORKER_H

#include "daemon/config.h"
#include "daemon/devices.h"
#include "daemon/dispatch.h"
#include "daemon/events.h"
#include "daemon/health.h"
#include "daemon/jobs.h"
#include "daemon/loop.h"
#include "daemon/metrics_http.h"
#include "daemon/models.h"
#include "daemon/mps.h"
#include "daemon/tenant.h"
#include "daemon/supmsg.h"

#include <sys/types.h>

struct exl3_peer;
struct exl3_calibration;

struct exl3_worker {
	struct exl3_config *cfg;   /* borrowed from main(); its values are the supervisor's */
	struct exl3_config *fresh; /* owned: between RELOAD and its GO; else NULL */
	struct exl3_loop *loop;
	struct exl3_jobs *loads, *memory; /* threads: long loads; arenas and their end */
	struct exl3_devices devices;
	struct exl3_models models;
	struct exl3_dispatch *dispatch;
	struct exl3_calibration *calibration; /* calibrate.c; the last one, or NULL */

	struct exl3_policy policy;
	struct exl3_metrics metrics; /* written by the loop, read by the thread of: */
	struct exl3_metrics_http *http; /* NULL: nobody can ask */
	struct exl3_peer *peers; /* list */
	uint32_t nr_peers, nr_refused; /* clients; those among them that are only told why not */
	int control_fd, signal_fd;
	struct exl3_watch *control_watch, *signal_watch;
	struct exl3_timer beat, drain_timer, leave_timer;
	struct exl3_health health; /* in an MPS server only */

	char backends[4][384]; /* those compiled in, each with what it found at start */
	uint32_t nr_backends;
	char domain[EXL3_DOMAIN_NAME_MAX + 1]; /* its users are served here */
	char mps_pipe[EXL3_MPS_DIR_MAX]; /* of the MPS server that this process is in; empty: none */
	uint64_t instance;
	uint32_t generation; /* of the domain */
	pid_t supervisor;
	uint64_t start_ns, beat_ns;
	struct exl3_events events; /* of all domains, as the supervisor tells them */
	bool ready;    /* told the supervisor */
	bool leaving;  /* another daemon serves: drain when no client is left */
	bool draining; /* accepted requests finish, then stop */
	bool stop;
	int status; /* exit status */
};

/* Serves until it is told to stop; exit status of the process. */
int exl3_worker_main(struct exl3_config *cfg);

/* worker_metrics.c: the thread that answers, before the first client; what the loop knows, after each turn in
 * which something happened; a model comes or goes. */
void exl3_worker_metrics_start(struct exl3_worker *w);
void exl3_worker_metrics_publish(struct exl3_worker *w);
void exl3_worker_metrics_model(struct exl3_worker *w, struct exl3_registered *reg,
			       enum exl3_models_event event);

/* For control: */
void exl3_worker_drain(struct exl3_worker *w, const char *why);
void exl3_worker_tell(struct exl3_worker *w, enum exl3_sup_type type, const char *text);
/* Hands a client on to another domain's worker, by way of the supervisor; @fd stays the caller's. 0 or -errno. */
int exl3_worker_pass(struct exl3_worker *w, int fd, const char *domain, uint64_t id,
		     const char *name);
/* A model that was loaded at run time: a worker that is started after this one loads it too. */
void exl3_worker_keep_model(struct exl3_worker *w, const struct exl3_registered *reg);

/* worker_kept.c: for exl3_models.want; after a load, however it came out; KEPT (takes @fds). */
void exl3_worker_want_kept(void *arg, struct exl3_registered *reg);
void exl3_worker_tell_way(struct exl3_worker *w, const struct exl3_registered *reg,
			  enum exl3_models_event event);
void exl3_worker_take_kept(struct exl3_worker *w, const struct exl3_sup_msg *msg, int *fds,
			   unsigned nr_fds);

#endif
