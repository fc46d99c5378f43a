/* SPDX-License-Identifier: Apache-2.0 */
/*
 * executor.h - one thread that runs a device's work, between two rings of fixed size.
 *
 * submit (loop thread) -> work ring -> executor thread -> done ring -> poll (loop thread)
 *
 * Both sides may sleep: the executor in a futex on the work ring's tail, the loop on an eventfd that is
 * written only when the loop armed it. Ordering pairs, as in shm/ring.h:
 *   E0 loop: store work tail, then load asleep   |  executor: store asleep, then load work tail
 *   E1 executor: store done tail, then load armed|  loop: store armed, then load done tail
 * (all seq_cst, so one side always sees the other).
 */
#ifndef EXL3_KERNELS_EXECUTOR_H
#define EXL3_KERNELS_EXECUTOR_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL3_EXECUTOR_QUEUE 256u /* works accepted and not yet polled; a power of two */

struct exl3_executor;

/* Called on the executor thread only. */
struct exl3_executor_ops {
	/* Once, before any work; binds the thread. */
	void (*start)(void *arg);
	/* Begins @work; true: begun (or run to its end, with exl3_executor_done() called); false: try again
	 * after progress(). */
	bool (*begin)(void *arg, const struct exl3_work *work);
	/* Looks at what is in flight and reports what finished; returns how many are still in flight.
	 * NULL where begin() runs everything to its end. */
	unsigned (*progress)(void *arg);
};

/* @spin_ns: how long the thread looks for work before it sleeps. */
int exl3_executor_new(const struct exl3_executor_ops *ops, void *arg, uint64_t spin_ns,
		      struct exl3_executor **ret, struct exl3_error *err);
/* Finishes what was submitted, then joins the thread. NULL allowed; returns NULL. */
struct exl3_executor *exl3_executor_free(struct exl3_executor *ex);

/* Loop thread. */
int exl3_executor_submit(struct exl3_executor *ex, const struct exl3_work *work); /* 0 or -EAGAIN */
int exl3_executor_poll(struct exl3_executor *ex, struct exl3_done *done, unsigned max);
int exl3_executor_event_fd(struct exl3_executor *ex);
bool exl3_executor_arm(struct exl3_executor *ex); /* true: nothing to poll, the fd will be written */

/* Loop thread, before @ex has work: what @ex finishes wakes the loop through @to's fd, armed by exl3_executor_arm(@to).
 * One for each @to. @ex is freed first, when nobody arms @to any more. */
void exl3_executor_join(struct exl3_executor *ex, struct exl3_executor *to);

/* Executor thread, in progress(): sleeps for @ns at most, or until there is more work. */
void exl3_executor_nap(struct exl3_executor *ex, uint64_t ns);

/* Executor thread, in begin(): does more work wait behind this one? */
bool exl3_executor_more(const struct exl3_executor *ex);

/* Executor thread: one result. Never fails: the done ring holds all that was accepted. */
void exl3_executor_done(struct exl3_executor *ex, void *tag, int result, uint64_t exec_ns);

#ifdef __cplusplus
}
#endif
#endif
