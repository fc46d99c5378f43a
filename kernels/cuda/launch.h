/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.h - the CUDA kernels' host side: what a launch needs, with device pointers, on a stream.
 *
 * Internal to kernels/cuda, its tests and its benchmark; backend_cuda.cu turns struct exl3_work into
 * these. Nothing here synchronises or allocates; every function only enqueues (so it can be captured
 * into a CUDA graph) and returns 0, -EOPNOTSUPP (shape or type not covered), -ENOMEM (workspace too
 * small), or -EIO (CUDA error). Arguments were checked by the caller.
 */
#ifndef EXL3_KERNELS_CUDA_LAUNCH_H
#define EXL3_KERNELS_CUDA_LAUNCH_H

#include "kernels/backend.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXL3_CUDA_SHARDS_MAX 8

/* Where one row comes from and goes to: the row table that lets rows of several clients share a launch. */
struct exl3_cuda_row {
	const void *x;
	void *y;
	uint8_t x_dtype, y_dtype;
	uint8_t stored; /* x and y have stored sizes */
	uint8_t pad[5];
};

struct exl3_cuda_linear {
	struct exl3_matrix shard[EXL3_CUDA_SHARDS_MAX]; /* by value: device pointers */
	uint32_t nr_shards;
	uint32_t m; /* 1..EXL3_M_MAX */
	/* Either a table of m rows in device memory ... */
	const struct exl3_cuda_row *table;
	/* ... or (table NULL) rows of one operand. */
	const void *x;
	void *y;
	uint32_t x_stride, y_stride; /* bytes */
	uint8_t x_dtype, y_dtype;
	bool stored;
	/* Composed operations (MLP): this side is a buffer of ours, addressed by x/x_stride/x_dtype (or
	 * y...) in stored sizes, also where the other side comes from the table. */
	bool x_private, y_private;
	bool deterministic; /* split and order of summation depend on m and the shapes alone */
	/*
	 * 0, or at least m: the few-row kernels take instance, split and order of summation as for so many rows,
	 * whatever m is, and make no use of what holds for fewer: a row's bits do not depend on m then.
	 */
	uint32_t class_m;
	bool programmatic;  /* sm_90: start before the stream's last kernel has ended, wait inside */
	uint8_t ablate;     /* bench only: parts of the work that a kernel leaves out, 0 = none */
	void *ws;           /* device workspace; the first EXL3_CUDA_WS_ZERO bytes are zero before the
	                     * first launch and are left zero by every launch */
	size_t ws_bytes;
	const struct exl3_tuned *tuned, *builtin; /* measured choices, see kernels/backend.h; NULL: none */
	int device_sms;
	int device_cc;      /* 90 for compute capability 9.0 */
};

#define EXL3_CUDA_WS_ZERO (5u << 20)

/* A variant: one line of the tables that the bench and checkkernel walk. */
struct exl3_cuda_linear_kernel {
	const char *name;
	bool (*supports)(const struct exl3_cuda_linear *a);
	size_t (*ws_bytes)(const struct exl3_cuda_linear *a);
	int (*launch)(const struct exl3_cuda_linear *a, cudaStream_t stream);
	bool candidate; /* to be compared with what is in use: runs only where it is named */
};

/* Tables end with a NULL name. */
extern const struct exl3_cuda_linear_kernel exl3_cuda_gemv_kernels[]; /* gemv.cu: m <= 32 */
extern const struct exl3_cuda_linear_kernel exl3_cuda_gemm_kernels[]; /* gemm.cu: any m */

#ifdef __cplusplus
}
#endif
#endif
