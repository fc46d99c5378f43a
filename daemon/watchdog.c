/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watchdog.c - finds a launch that never ends.
 *
 * A lane is overdue when none of its launches has ended for longer than all of them together can take on
 * the slowest device of the kind, plus the configured slack. What was running stays unanswered then: the
 * device may still write to it. The worker ends, which its clients see.
 *
 * The loop looks once a second while something runs. A longer gap means that this process did not run
 * either (it was stopped, or the machine was): that time does not count.
 */
#include "daemon/dispatch_priv.h"

#include "daemon/log.h"

#include <inttypes.h>

#define LOOK_NS  1000000000ull
#define GAP_NS   2500000000ull
#define SLOWNESS 4.0 /* times what chunk.c takes the slowest kernels for */

/* The longest that a launch may reasonably take. */
static uint64_t bound_ns(const struct exl3_lane *lane, const struct exl3_launch *l)
{
	double macs = 0;

	for (uint32_t i = 0; i < l->nr; i++) {
		const struct exl3_request *req = (const struct exl3_request *)l->items[i];

		macs += (double)exl3_chunk_macs(&req->c) * req->item.rows;
	}
	return (uint64_t)(macs * lane->pace.mac_ns * SLOWNESS);
}

void exl3_lane_launched(struct exl3_lane *lane, struct exl3_launch *l)
{
	struct exl3_dispatch *d = lane->d;

	l->bound_ns = bound_ns(lane, l);
	if (!lane->nr_watched++)
		lane->moved_ns = d->turn_ns;
	lane->bounds_ns += l->bound_ns;
}

void exl3_lane_ended(struct exl3_lane *lane, struct exl3_launch *l)
{
	lane->nr_watched--;
	lane->bounds_ns -= l->bound_ns;
	lane->moved_ns = lane->d->turn_ns;
}

void exl3_lanes_turn(struct exl3_dispatch *d, uint64_t now_ns)
{
	uint64_t gap = now_ns - d->turn_ns;

	d->turn_ns = now_ns;
	if (gap < GAP_NS)
		return;
	for (uint32_t i = 0; i < d->nr_lanes; i++)
		d->lanes[i].moved_ns += gap;
}

bool exl3_lane_overdue(struct exl3_lane *lane)
{
	struct exl3_dispatch *d = lane->d;
	uint64_t passed = d->turn_ns - lane->moved_ns;

	if (!lane->nr_watched || !d->slack_ns || d->lost.code < 0 || d->turn_ns < lane->moved_ns ||
	    passed < d->slack_ns + lane->bounds_ns)
		return false;
	exl3_errf(&d->lost, -ETIMEDOUT,
		  "a launch does not end: nothing of %u has for %.1f s, %.1f s were to be expected at "
		  "most and launch-timeout is %.1f s",
		  lane->nr_watched, (double)passed / 1e9, (double)lane->bounds_ns / 1e9,
		  (double)d->slack_ns / 1e9);
	exl3_err("device %u: %s", (unsigned)(lane - d->lanes), d->lost.text);
	return true;
}

uint64_t exl3_lanes_until(const struct exl3_dispatch *d, uint64_t now_ns)
{
	for (uint32_t i = 0; i < d->nr_lanes; i++) {
		if (d->lanes[i].nr_watched && d->slack_ns)
			return now_ns + LOOK_NS;
	}
	return UINT64_MAX;
}
