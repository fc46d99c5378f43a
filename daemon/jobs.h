/* SPDX-License-Identifier: Apache-2.0 */
/* jobs.h - a thread for what would block the loop: loading weights, making and freeing memory. */
#ifndef EXL3_DAEMON_JOBS_H
#define EXL3_DAEMON_JOBS_H

#include "daemon/loop.h"

struct exl3_jobs;

/* Part of what it works on; its owner keeps it until done() was called.
 * IDLE -> QUEUED -> running (run) -> finished -> IDLE (done) */
struct exl3_job {
	void (*run)(struct exl3_job *job);  /* the jobs' thread */
	void (*done)(struct exl3_job *job); /* loop thread; may free the job */
	struct exl3_job *next;
};

/* @name: of the thread, at most 15 bytes. */
int exl3_jobs_new(struct exl3_loop *loop, const char *name, struct exl3_jobs **ret,
		  struct exl3_error *err);
/* Loop thread. One after the other, in order. */
void exl3_jobs_add(struct exl3_jobs *jobs, struct exl3_job *job);
/* Finishes all jobs, and those that their done() adds, then ends the thread. */
struct exl3_jobs *exl3_jobs_free(struct exl3_jobs *jobs);

#endif
