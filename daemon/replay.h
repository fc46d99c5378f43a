/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay.h - plans: the calls of a step, checked once, that one entry runs.
 *
 * Loop thread only.
 *
 *   plan:    recording -> whole, idle <-> replayed; freed when its handle is closed and no replay is under way
 *   replay:  waits in its channel's order (also for the one before it) -> its calls are queued, a few ahead of those
 *            that have ended; what is behind it in the channel waits -> the last one has ended -> answered
 *
 * The calls are items of the channel's flow like other requests: they run in order, share launches with other
 * channels' requests, board trains and run in slices. What a call has in flight is what its plan recorded; nothing
 * is checked, allocated or looked up again. The first call that fails ends the replay: those behind it are taken
 * out, unless they have started.
 *
 * A plan keeps the buffers of its operands, as a request in flight does. A model is kept only while a replay runs:
 * once it is unloaded, replays are refused (-ENOENT).
 */
#ifndef EXL3_DAEMON_REPLAY_H
#define EXL3_DAEMON_REPLAY_H

#include "daemon/dispatch.h"

/* What plans of one client there are, those too whose handle is closed while a replay runs; counted, as its client
 * may be gone by then. */
struct exl3_plan_count {
	uint32_t refs;
	uint32_t plans, calls;
};

struct exl3_plan_count *exl3_plan_count_put(struct exl3_plan_count *count);
/* Empty, one reference; for replays in @ch. -EDQUOT, -ENOMEM. */
int exl3_recorded_new(struct exl3_channel *ch, struct exl3_plan_count *count, struct exl3_recorded **ret,
		      struct exl3_error *err);
/**
 * exl3_recorded_add() - check so many more calls and keep what came out.
 * @sqes: private copies.
 * NOPs only count: in a replay there is nothing that they would do.
 * Returns 0; -E2BIG (more than EXL3_PLAN_CALLS_MAX), -EDQUOT (of the client), -EBUSY (it is whole), -ENOMEM, or what is wrong with one of
 * them, its number and detail in @err. After an error only exl3_recorded_put() makes sense.
 */
int exl3_recorded_add(struct exl3_recorded *r, const struct exl3_sqe *sqes, uint32_t nr, struct exl3_error *err);
/* It may be replayed from now on. -EINVAL: it is empty. */
int exl3_recorded_finish(struct exl3_recorded *r, struct exl3_error *err);
struct exl3_recorded *exl3_recorded_put(struct exl3_recorded *r);
/* A model that its calls use, 0, 1, ...; NULL: there are no more. */
const struct exl3_registered *exl3_recorded_model(const struct exl3_recorded *r, uint32_t i);

#endif
