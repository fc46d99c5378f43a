/* SPDX-License-Identifier: Apache-2.0 */
/*
 * domain.h - a fault domain: some users' worker through all its generations, and the clients that wait
 * for it.
 *
 * A fault, a crash or a hang ends one worker, and so touches the clients of one domain only. Nothing here
 * waits: what a worker does not read yet is queued, clients of a worker that is not there wait (so many,
 * so long, then they are told why not).
 *
 *   STARTING -> SERVING (its loop turns: clients are handed on)
 *   STARTING, SERVING -> BACKOFF (it died) -> STARTING, or FAILED after too many; FAILED -> STARTING (SIGHUP)
 *   any -> ENDED (drained, or the worker cannot serve as configured)
 */
#ifndef EXL3_DAEMON_DOMAIN_H
#define EXL3_DAEMON_DOMAIN_H

#include "daemon/config.h"
#include "daemon/events.h"
#include "daemon/loop.h"
#include "daemon/mps.h"
#include "daemon/supmsg.h"

#include <signal.h>
#include <sys/types.h>

#define EXL3_WAITING_MAX 256u /* clients of a domain that wait for its worker */
#define EXL3_WAITING_NS  25000000000ull /* so long; libexl3 gives up after 30 s */

enum exl3_domain_state {
	EXL3_DOMAIN_STARTING,
	EXL3_DOMAIN_SERVING,
	EXL3_DOMAIN_BACKOFF,
	EXL3_DOMAIN_FAILED,
	EXL3_DOMAIN_ENDED,
};

enum exl3_mps_mode {
	EXL3_MPS_OFF,
	EXL3_MPS_AUTO,   /* without it, if it cannot be had */
	EXL3_MPS_REQUIRE
};

struct exl3_domain;

/* What all of them have in common; the supervisor's. */
struct exl3_domains {
	struct exl3_loop *loop;
	const struct exl3_config *cfg; /* what a new worker gets */
	const char *program;           /* argv[0] of a worker */
	const sigset_t *worker_mask;
	uint64_t instance, beat_ns;
	struct exl3_domain *list; /* all of them */
	uint32_t nr;
	struct exl3_events events;
	enum exl3_mps_mode mps;
	char mps_base[104]; /* folder of all MPS control daemons; empty: none */
	/* A worker says something; descriptors are the callee's. */
	void (*message)(struct exl3_domain *d, const struct exl3_sup_msg *msg, int *fds,
			unsigned nr_fds);
	/* Its state has changed. */
	void (*changed)(struct exl3_domain *d);
	void *arg;
};

struct exl3_domain {
	struct exl3_domains *all; /* borrowed */
	char name[EXL3_DOMAIN_NAME_MAX + 1];
	enum exl3_domain_state state;
	bool ready;    /* its first worker has had all models */
	bool draining; /* its end is wanted */
	pid_t worker;  /* 0: none */
	int status;    /* ENDED, FAILED: for the daemon's exit status */
	uint32_t generation;
	uint64_t heard_ns; /* the worker's last word */

	/* of domain.c */
	int control_fd; /* owned */
	struct exl3_watch *watch;
	struct exl3_timer timer;    /* BACKOFF: start it; draining: kill it */
	struct exl3_timer patience; /* the first that waits has waited too long; or: try again */
	struct exl3_timer silence;  /* the worker has said nothing for so long that it must hang */
	uint64_t window_start_ns;
	uint32_t restarts; /* in the window */
	struct exl3_domain_packet *out, **out_tail;
	struct exl3_domain_client *waiting, **waiting_tail;
	uint32_t nr_out, nr_waiting;
	char says[256];   /* the worker's last STATUS */
	char reason[256]; /* why the worker ends, if somebody knows */
	/* of domain_mps.c */
	struct exl3_mps mps;
	uint64_t mps_failed_ns; /* when it was tried and not to be had; 0: never */
};

void exl3_domain_init(struct exl3_domain *d, struct exl3_domains *all, const char *name);
/* Starts the next generation of its worker. */
int exl3_domain_start(struct exl3_domain *d, struct exl3_error *err);
/* After exl3_domain_ended() has been called for its worker, or before there was one. */
void exl3_domain_fini(struct exl3_domain *d);

/* A client that has connected; takes @fd. @name: NULL, or its name, and another domain's worker has read its
 * Hello, which was request @id and is not answered. */
void exl3_domain_connected(struct exl3_domain *d, int fd, uint64_t id, const char *name);
/* To the worker; false: there is none, or it has not read for long. */
bool exl3_domain_tell(struct exl3_domain *d, enum exl3_sup_type type, unsigned flags,
		      const char *text);
/* The same with descriptors: @nr_fds of them, at most EXL3_FDS_MAX; stay the caller's. */
bool exl3_domain_send(struct exl3_domain *d, enum exl3_sup_type type, unsigned flags, uint64_t id,
		      const char *text, const int *fds, unsigned nr_fds);
/* Accepted requests finish, then the worker ends; the second time it is killed. */
void exl3_domain_drain(struct exl3_domain *d);
/* Another daemon serves from now on: the same, but its clients have a moment to end by themselves. */
void exl3_domain_leave(struct exl3_domain *d);
/* waitpid() has returned d->worker. */
void exl3_domain_ended(struct exl3_domain *d, int wstatus);
/* One that FAILED gets another chance. */
void exl3_domain_retry(struct exl3_domain *d);

/* Whether and how the domains use MPS; before the first start. Fails only with mps = require. */
int exl3_domains_mps_init(struct exl3_domains *all, struct exl3_error *err);
void exl3_domains_mps_fini(struct exl3_domains *all);
/* waitpid() has returned @pid; false: it is not of this domain's MPS. */
bool exl3_domain_mps_ended(struct exl3_domain *d, pid_t pid, int wstatus);

/* Something has happened: kept, and every worker is told. @kind: one word. */
void exl3_domain_event(struct exl3_domain *d, const char *kind, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
/* Answers a connection that nobody will serve and closes it; takes @fd. */
void exl3_domains_refuse(const struct exl3_domains *all, int fd, int code, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
/* NAME=DIR,device=D: always with a device, so that nothing in the path is taken for one. */
void exl3_domains_model_spec(const struct exl3_domains *all, const struct exl3_config_model *m,
			     char text[EXL3_SUP_TEXT_MAX]);

#endif
