/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exl3_gpu.h - calls of a recorded plan in the order of a CUDA stream, from inside a graph (libexl3-gpu).
 *
 * libexl3 itself is free of CUDA; this small library has the one kernel that it cannot have: a single thread that
 * writes a call's *ready* word with the next epoch and waits for its *done* word. The kernel may be captured: each
 * launch of the graph counts its own epochs, in device memory. exl3_device.cuh has the device functions, for kernels
 * that signal and wait themselves.
 *
 * Thread safety: one thread at a time for each object; exl3_gpu_abort() from any. Functions need the context that they
 * are to work in to be current, always the same one.
 */
#ifndef EXL3_GPU_H
#define EXL3_GPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define EXL3_GPU_API __attribute__((visibility("default")))
#else
#define EXL3_GPU_API
#endif

struct exl3_gpu;
struct exl3_device_call; /* exl3_device.cuh */

/* Of one call, as the device addresses them. */
struct exl3_gpu_words {
	uint32_t *ready;
	const uint32_t *done;
	const int32_t *result; /* or NULL */
};

#define EXL3_GPU_CALLS_MAX 65536u

/**
 * exl3_gpu_new() - what @nr calls of a plan need on this side.
 * @words: [nr], copied; the memory that they point to stays until exl3_gpu_free().
 * @wait_ns: how long one wait may take. A graph that waits longer goes on, and exl3_gpu_error() says so.
 * Allocates pinned and device memory and clears it: not during a capture.
 * 0, -EINVAL, -ENOMEM, -EIO (CUDA refused).
 */
EXL3_GPU_API int exl3_gpu_new(const struct exl3_gpu_words *words, uint32_t nr, uint64_t wait_ns, struct exl3_gpu **ret);
/* After the last kernel that uses it has ended; waits for the device. NULL allowed; returns NULL. */
EXL3_GPU_API struct exl3_gpu *exl3_gpu_free(struct exl3_gpu *g);
/* Enqueues (or captures) signal and wait of @call on @stream, a cudaStream_t. 0, -EINVAL, -EIO. */
EXL3_GPU_API int exl3_gpu_enqueue(struct exl3_gpu *g, uint32_t call, void *stream);
/* @call for a kernel of the program's own. 0 or -EINVAL. */
EXL3_GPU_API int exl3_gpu_call(const struct exl3_gpu *g, uint32_t call, struct exl3_device_call *ret);
/* Epoch that the next launch of every call counts from: after a replay of which some calls were left out, or when
 * the plan is recorded anew. Nothing of @g may be running. 0 or -EIO. */
EXL3_GPU_API int exl3_gpu_set_epoch(struct exl3_gpu *g, uint32_t epoch);
/* All waits, now and from now on, end with an error, until exl3_gpu_error(). */
EXL3_GPU_API void exl3_gpu_abort(struct exl3_gpu *g);
/**
 * exl3_gpu_error() - the first failure since the last time this was asked, and waits are waits again.
 * Nothing of @g may be running: synchronise the stream first. @call may be NULL.
 * 0; -ETIMEDOUT; -ECANCELED (aborted); another negative errno, the call's result; -EIO (CUDA refused).
 */
EXL3_GPU_API int exl3_gpu_error(struct exl3_gpu *g, uint32_t *call);

#ifdef __cplusplus
}
#endif
#endif
