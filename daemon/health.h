/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health.h - notices that a device is lost while nothing runs on it.
 *
 * In an MPS server another client's fault ends this process's context too. With work in flight that is
 * seen at once; without, the next request would be the first to meet it. So the device is asked now and
 * then, off the loop: a driver's call may take long.
 */
#ifndef EXL3_DAEMON_HEALTH_H
#define EXL3_DAEMON_HEALTH_H

#include "daemon/devices.h"
#include "daemon/jobs.h"

#define EXL3_HEALTH_NS 500000000ull

struct exl3_health {
	struct exl3_job job;   /* first */
	struct exl3_loop *loop; /* borrowed, as the next two */
	struct exl3_jobs *jobs;
	const struct exl3_devices *devices;
	void (*lost)(void *arg, uint32_t device); /* loop thread */
	void *arg;
	struct exl3_timer timer;
	int32_t bad; /* of the job: index of a device that does not answer, or -1 */
	bool busy, stop;
};

/* All but the last four are set by the caller. */
void exl3_health_start(struct exl3_health *h);
/* Before the jobs are freed. */
void exl3_health_stop(struct exl3_health *h);

#endif
