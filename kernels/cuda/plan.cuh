/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.cuh - what a plan's graph does between the kernels of its calls: one thread tells and waits.
 *
 *   step 0 | kernels of call 0 | step 1 | kernels of call 1 | ... | step n
 *
 *   step i:  i = 0          takes epoch and deadline of this replay from the host
 *            call i - 1     result, then done = epoch, behind its results
 *            call i         waits until its ready word has come to the epoch, or the time is up, or the host aborts
 *            i = n          tells the host that the replay has ended
 *
 * The client owns the words: nothing but a number is taken from them, and it decides only when this client's own call
 * begins. A replay that failed still goes through its remaining kernels, without waiting (their y is then undefined),
 * so that what kernels leave behind in the workspace is what the next replay expects; but from there on every result is
 * the error. A replay that ends while it waits for its first call has not begun: none of its words are written.
 *
 * Ordering: P0 client: operands, then ready (release, system)   | step: ready (acquire, system), then call's kernels
 *           P1 step: call's kernels before it, then done (release, system) | client: done (acquire), then results
 * Plain C++ on the host as well, where tests/gpu/host_plan.cc runs it with threads.
 */
#ifndef EXL3_CUDA_PLAN_CUH
#define EXL3_CUDA_PLAN_CUH

#include "kernels/format.h"

#include <errno.h>
#include <stdint.h>
#ifndef __CUDA_ARCH__
#include <time.h>
#endif

namespace exl3
{

/* In host memory of the worker, which no client maps. */
struct plan_ctl {
	/* The host writes these while the plan does not run ... */
	uint32_t seq;    /* of the replay; never 0 */
	uint32_t epoch;
	uint64_t wait_ns; /* how long all its waits may take together */
	/* ... this at any time: the number of the replay that is to give up, ... */
	uint32_t abort;
	/* ... and the device these: the last one is seq when all others are there. */
	int32_t result;  /* 0, -ETIMEDOUT, -ECANCELED, or -EAGAIN: it has not begun */
	uint32_t call;   /* where it failed */
	uint32_t ended;
};

/* In device memory, from the first step of a replay to its last. */
struct plan_state {
	uint64_t deadline; /* of the device's timer */
	uint32_t seq, epoch;
	int32_t failed;
	uint32_t call, begun, pad;
};

struct plan_step {
	struct plan_ctl *ctl;
	struct plan_state *state;
	/* Call i - 1: */
	uint32_t *done;                /* or NULL */
	int32_t *result;               /* or NULL */
	unsigned long long *counters;  /* [nr_counters] of invalid ids, device memory; set to zero */
	uint64_t *skipped;             /* [nr_counters] of the host */
	uint32_t nr_counters;
	/* Call i: */
	const uint32_t *ready;         /* or NULL */
	uint32_t call;                 /* i */
	uint8_t first, last;
};

#define PLAN_LOOKS 64u   /* at the ready word, between looks at the clock and the abort word */
#define PLAN_EAGER 1024u /* looks without a pause; a look over PCIe takes about a microsecond */

#ifdef __CUDA_ARCH__
static __device__ __forceinline__ uint32_t plan_load(const uint32_t *p)
{
	uint32_t v;

	asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

static __device__ __forceinline__ void plan_store(uint32_t *p, uint32_t v)
{
	__threadfence_system();
	asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

static __device__ __forceinline__ uint64_t plan_now(void)
{
	uint64_t t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
	return t;
}

static __device__ __forceinline__ void plan_pause(void)
{
	__nanosleep(500);
}
#else
static inline uint32_t plan_load(const uint32_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static inline void plan_store(uint32_t *p, uint32_t v)
{
	__atomic_store_n(p, v, __ATOMIC_RELEASE);
}

static inline uint64_t plan_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline void plan_pause(void)
{
	const struct timespec ts = {0, 500};

	nanosleep(&ts, 0);
}
#endif

static EXL3_HD void plan_begin(const struct plan_step *s)
{
	const volatile struct plan_ctl *ctl = s->ctl;
	struct plan_state *state = s->state;

	state->seq = ctl->seq;
	state->epoch = ctl->epoch;
	state->deadline = plan_now() + ctl->wait_ns;
	state->failed = 0;
	state->call = 0;
	state->begun = 0;
}

static EXL3_HD void plan_deliver(const struct plan_step *s)
{
	const struct plan_state *state = s->state;

	for (uint32_t i = 0; i < s->nr_counters; i++) {
		((volatile uint64_t *)s->skipped)[i] = s->counters[i];
		s->counters[i] = 0;
	}
	if (!state->begun || (state->failed && !s->result))
		return;
	if (s->result)
		*(volatile int32_t *)s->result = state->failed;
	if (s->done)
		plan_store(s->done, state->epoch); /* P1 */
}

static EXL3_HD void plan_wait(const struct plan_step *s)
{
	struct plan_state *state = s->state;
	uint32_t looks = 0;

	while (s->ready && !state->failed) {
		if ((int32_t)(plan_load(s->ready) - state->epoch) >= 0) /* P0 */
			break;
		looks++;
		if (looks % PLAN_LOOKS && looks < PLAN_EAGER)
			continue;
		if (plan_load(&s->ctl->abort) == state->seq)
			state->failed = -ECANCELED;
		else if (plan_now() > state->deadline)
			state->failed = -ETIMEDOUT;
		state->call = s->call;
		if (looks >= PLAN_EAGER)
			plan_pause();
	}
	/* A replay that has not waited for anything yet has begun with its first call. */
	if (!state->failed)
		state->begun = 1;
}

static EXL3_HD void plan_end(const struct plan_step *s)
{
	const struct plan_state *state = s->state;
	volatile struct plan_ctl *ctl = s->ctl;

	ctl->result = state->begun ? state->failed : -EAGAIN;
	ctl->call = state->call;
	plan_store(&s->ctl->ended, state->seq);
}

static EXL3_HD void plan_run_step(const struct plan_step *s)
{
	if (s->first)
		plan_begin(s);
	else
		plan_deliver(s);
	if (s->last)
		plan_end(s);
	else
		plan_wait(s);
}

} /* namespace exl3 */
#endif
