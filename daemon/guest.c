/* SPDX-License-Identifier: Apache-2.0 */
/* guest.c - works of the daemon's own on a device: when they may start, and how they end. */
#include "daemon/dispatch_priv.h"

#include <assert.h>
#include <errno.h>

#define QUIET_NS 5000000ull /* since the last launch for a client: shorter gaps are a client's that goes on */
#define SHARE    20u        /* otherwise a start has to be that many times its length behind the last one */

void exl3_dispatch_set_guest(struct exl3_dispatch *d, uint32_t device, struct exl3_guest *guest)
{
	assert(!d->lanes[device].guests);
	d->lanes[device].guest = guest;
}

bool exl3_dispatch_guest_runs(const struct exl3_dispatch *d, uint32_t device)
{
	return d->lanes[device].guests > 0;
}

/* From when on nobody who uses the device now is in its way. */
static uint64_t quiet_from(const struct exl3_lane *lane)
{
	if (lane->sched.queued || lane->sched.launches)
		return UINT64_MAX;
	return lane->moved_ns + QUIET_NS;
}

uint64_t exl3_guest_until(const struct exl3_lane *lane, uint64_t now_ns)
{
	uint64_t quiet = quiet_from(lane);
	uint64_t until = quiet < lane->guest_after_ns ? quiet : lane->guest_after_ns;

	if (!lane->guest || !lane->guest->nr || lane->guests || lane->lost)
		return UINT64_MAX;
	return until > now_ns ? until : now_ns + 1000000; /* it was refused: the device's queue is full */
}

static void ended(struct exl3_lane *lane)
{
	struct exl3_guest *guest = lane->guest;

	lane->guest_after_ns = lane->d->turn_ns + SHARE * lane->guest_ns;
	guest->nr = 0;
	guest->done(guest->arg, lane->guest_result, lane->guest_ns);
}

bool exl3_guest_turn(struct exl3_lane *lane, uint64_t now_ns)
{
	struct exl3_guest *guest = lane->guest;
	uint32_t started = 0;
	int rc = 0;

	if (!guest->nr || lane->guests || lane->lost || lane->d->draining ||
	    (now_ns < quiet_from(lane) && now_ns < lane->guest_after_ns))
		return false;
	lane->guest_ns = 0;
	lane->guest_result = 0;
	while (started < guest->nr && rc == 0) {
		guest->works[started].tag = guest;
		rc = lane->ops->submit(lane->dev, &guest->works[started]);
		started += rc == 0;
	}
	lane->guests = started;
	if (rc == -EAGAIN && !started)
		return false; /* another time */
	if (rc < 0)
		lane->guest_result = rc == -EAGAIN ? -EBUSY : rc; /* not all ran one after the other */
	if (!started)
		ended(lane);
	return true;
}

bool exl3_guest_ended(struct exl3_lane *lane, const struct exl3_done *done)
{
	if (!lane->guests || done->tag != lane->guest)
		return false;
	lane->guest_ns += done->exec_ns;
	if (done->result < 0)
		lane->guest_result = done->result;
	if (--lane->guests == 0)
		ended(lane);
	return true;
}

void exl3_guest_lost(struct exl3_lane *lane)
{
	if (!lane->guests)
		return;
	lane->guests = 0;
	lane->guest_result = -EIO;
	ended(lane);
}
