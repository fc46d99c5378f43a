/* SPDX-License-Identifier: Apache-2.0 */
/* health.c - notices that a device is lost while nothing runs on it. */
#include "daemon/health.h"

#include "daemon/fault.h"

#include <string.h>

static void run(struct exl3_job *job)
{
	struct exl3_health *h = (struct exl3_health *)job;
	struct exl3_dev_info info;

	h->bad = -1;
	for (uint32_t i = 0; i < h->devices->nr; i++) {
		memset(&info, 0, sizeof(info));
		h->devices->list[i].ops->info(h->devices->list[i].dev, &info);
		if (!info.memory_total || exl3_fault("health.lost"))
			h->bad = (int32_t)i;
	}
}

static void done(struct exl3_job *job)
{
	struct exl3_health *h = (struct exl3_health *)job;

	h->busy = false;
	if (h->stop)
		return;
	if (h->bad >= 0)
		h->lost(h->arg, (uint32_t)h->bad);
	else
		exl3_timer_set(h->loop, &h->timer, exl3_now_ns() + EXL3_HEALTH_NS);
}

static void on_timer(void *arg)
{
	struct exl3_health *h = arg;

	h->busy = true;
	h->job = (struct exl3_job){.run = run, .done = done};
	exl3_jobs_add(h->jobs, &h->job);
}

void exl3_health_start(struct exl3_health *h)
{
	h->timer.fn = on_timer;
	h->timer.arg = h;
	exl3_timer_set(h->loop, &h->timer, exl3_now_ns() + EXL3_HEALTH_NS);
}

void exl3_health_stop(struct exl3_health *h)
{
	h->stop = true;
	if (h->loop)
		exl3_timer_cancel(h->loop, &h->timer);
}
