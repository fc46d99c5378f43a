/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exl3_device.cuh - calls of a recorded plan from inside a program's own CUDA kernels.
 *
 * A call of a plan has words that client and daemon share: the client's kernel writes *ready*, the daemon's graph runs
 * the call and writes *result*, then *done*. Their values are epochs, one more with every replay, so a graph may be
 * launched again and again and never passes on what an earlier launch left. exl3_gpu.h has a host function that
 * enqueues one kernel of one thread which signals and waits; these are for those who do it in kernels of their own:
 *
 *   producer: every thread writes its part of the operands, __syncthreads() or a grid-wide count, then one thread
 *             exl3_device_signal(&call);
 *   consumer: one thread of each block exl3_device_wait(&call), then __syncthreads(), then the results are read
 *
 * A block that waits keeps its place on an SM. The daemon's kernels need SMs to run on, so all blocks that may wait at a
 * time must leave most of the device free: wait in small kernels, or in the first block of a chain only. Prefer shared
 * memory for such a kernel (cudaFuncAttributePreferredSharedMemoryCarveout, 100): an SM where a block waits keeps its division
 * into L1 and shared memory, and the daemon's kernels want the latter.
 * Signal and wait of a call come once each in a replay, in this order.
 *
 * Ordering: operands before the signal are seen by the daemon's kernels; results are seen after the wait. Header only;
 * C++17 or newer; also compiles for the host, where the test runs it.
 */
#ifndef EXL3_DEVICE_CUH
#define EXL3_DEVICE_CUH

#include <stdint.h>

#if defined(__CUDACC__)
#define EXL3_DEVICE_FN static __device__ __forceinline__
#else
#include <time.h>
#define EXL3_DEVICE_FN static inline
#endif

/* Why a wait ended, if not with the result: positive, so that no result of the daemon is one of them. */
enum exl3_device_error {
	EXL3_DEVICE_TIMEOUT = 1, /* wait_ns were over */
	EXL3_DEVICE_ABORTED = 2, /* exl3_gpu_abort() */
	EXL3_DEVICE_FAILED  = 3, /* an earlier wait had failed, and nobody has asked for its error yet */
};

/* One call; travels by value as a kernel's argument. exl3_gpu_call() fills it in. All addresses are the device's. */
struct exl3_device_call {
	/* Shared with the daemon. */
	uint32_t *ready;
	const uint32_t *done;
	const int32_t *result; /* or NULL: a call that fails is never done */
	/* Of this program. */
	uint32_t *epoch;       /* device memory: of the last signal of this call */
	uint32_t *failed;      /* device memory, one for all calls: a wait has failed */
	const uint32_t *abort; /* host memory: not 0: give up */
	uint64_t *error;       /* host memory, one for all calls: call << 32 | (uint32_t)error of the first failure */
	uint64_t wait_ns;
	uint32_t call;         /* its number, for error */
};

#if defined(__CUDACC__)
EXL3_DEVICE_FN uint32_t exl3_device_load(const uint32_t *p)
{
	uint32_t v;

	asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

EXL3_DEVICE_FN void exl3_device_store(uint32_t *p, uint32_t v)
{
	__threadfence_system();
	asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

EXL3_DEVICE_FN uint64_t exl3_device_now(void)
{
	uint64_t t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
	return t;
}
#else
EXL3_DEVICE_FN uint32_t exl3_device_load(const uint32_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

EXL3_DEVICE_FN void exl3_device_store(uint32_t *p, uint32_t v)
{
	__atomic_store_n(p, v, __ATOMIC_RELEASE);
}

EXL3_DEVICE_FN uint64_t exl3_device_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}
#endif

/**
 * exl3_device_signal() - the operands of @c are there. One thread, after a barrier behind all who wrote them.
 * What other blocks wrote has to be visible to this thread first (a grid-wide count with acquire, or a kernel before).
 */
EXL3_DEVICE_FN void exl3_device_signal(const struct exl3_device_call *c)
{
	const uint32_t epoch = *(volatile uint32_t *)c->epoch + 1;

	*(volatile uint32_t *)c->epoch = epoch;
	exl3_device_store(c->ready, epoch);
}

/* Says the first failure only; one thread at a time writes it, others may wait at the same time. */
EXL3_DEVICE_FN int exl3_device_fail(const struct exl3_device_call *c, int error)
{
	if (error != EXL3_DEVICE_FAILED && !*(volatile uint32_t *)c->failed) {
		*(volatile uint64_t *)c->error = (uint64_t)c->call << 32 | (uint32_t)error;
		*(volatile uint32_t *)c->failed = 1;
	}
	return error;
}

/**
 * exl3_device_wait() - waits until @c, signalled before, has ended.
 * Any number of threads; each waits for itself. Returns 0 (the results may be read), a negative errno (the call's
 * result: they are not to be used) or an exl3_device_error. After a failure the waits of other calls end soon too,
 * until the host has asked for the error: a chain of calls does not wait again and again.
 */
EXL3_DEVICE_FN int exl3_device_wait(const struct exl3_device_call *c)
{
	const uint32_t epoch = *(volatile uint32_t *)c->epoch;
	const uint64_t until = exl3_device_now() + c->wait_ns;

	for (uint32_t looks = 1; (int32_t)(exl3_device_load(c->done) - epoch) < 0; looks++) {
		if (looks % 64)
			continue;
		if (exl3_device_load(c->abort))
			return exl3_device_fail(c, EXL3_DEVICE_ABORTED);
		if (*(volatile uint32_t *)c->failed)
			return EXL3_DEVICE_FAILED;
		if (exl3_device_now() > until)
			return exl3_device_fail(c, EXL3_DEVICE_TIMEOUT);
#if defined(__CUDACC__)
		if (looks >= 4096)
			__nanosleep(500);
#endif
	}
	if (c->result) {
		const int result = *(const volatile int32_t *)c->result;

		if (result)
			return exl3_device_fail(c, result);
	}
	return 0;
}

#endif
