/* SPDX-License-Identifier: Apache-2.0 */
/* moe_int.h - what moe.cu and the instances of its products share. */
#ifndef EXL3_CUDA_MOE_INT_H
#define EXL3_CUDA_MOE_INT_H

#include "kernels/backend.h"

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <errno.h>

namespace exl3
{

/* Up to a tile of sorted rows of one expert. */
struct moe_unit {
	const char *trellis[3]; /* gate, up, down */
	const __half *svh[3];
	const float *bias[3];   /* or NULL */
	const __half *suh_down;
	uint32_t expert, first, rows;
	uint32_t first_pad; /* as @first, where every expert begins at a multiple of 8 */
};

/* How an image of activations lies in memory, per projection. */
enum moe_layout {
	MOE_ROWS,     /* [row][k] f16 */
	MOE_FRAGMENT, /* per unit [k / 16][rows][8 words], words in the order of the B fragment */
	MOE_TILES,    /* per unit [k / 64][rows, rounded up to 8][128 bytes], 128B swizzle */
};

struct moe_gemm_args {
	const exl3_matrix *mats;    /* [nr_experts][gate, up, down], device */
	const moe_unit *units;
	const uint32_t *class_units; /* [class], [class + 1]: first unit of a class, device */
	const void *image;
	size_t image_bytes;         /* of one projection */
	const float *row_scale;     /* [nr_proj][image_rows], undoes the image's power of two */
	const float *block_scale;   /* down: [image_rows][k / 128] of the image's blocks, or NULL */
	float *out;                 /* [nr_proj][image_rows, n], or NULL: down's image is the output */
	uint32_t image_rows;
	uint32_t k, n;              /* stored */
	uint32_t first_proj, nr_proj;
	uint32_t tasks_max;         /* host's bound of the number of tasks: (unit, strip) */
	uint32_t tile;              /* rows of a unit at most */
	uint32_t cls;
	bool whole;                 /* decode: no block ends inside a sum over k, so its order is always the same */
	bool programmatic;          /* start before the stream's last kernel has ended */
	/* Where out is NULL: the activation, and down's image. */
	int act;
	float limit;
	uint32_t n_log;
	void *next_image;
	float *next_scale;          /* [image_rows][n / 128], powers of two */
	uint32_t *next_top;         /* [image_rows] bits of the largest of them, starts at 1.0 */
	uint32_t *slots;            /* zero before and after; EXL3_CUDA_WS_ZERO bytes */
};

/* Every (rate2, codebook) that exists; the one list that instances and dispatch come from. */
#ifndef EXL3_MOE_VARIANTS /* a build for tuning names a few */
#define EXL3_MOE_VARIANTS(X)                                                                       \
	X(2, 0) X(2, 1) X(2, 2) X(4, 0) X(4, 1) X(4, 2) X(6, 0) X(6, 1) X(6, 2) X(8, 0) X(8, 1)    \
	X(8, 2) X(10, 0) X(10, 1) X(10, 2) X(12, 0) X(12, 1) X(12, 2) X(14, 0) X(14, 1) X(14, 2)   \
	X(16, 0) X(16, 1) X(16, 2) X(3, 2) X(5, 2) X(7, 2)
#endif

/*
 * gemm: any mix, f32 out. decode: few rows, gate and up of one variant in one block, the activation
 * in its epilogue. wide: many rows, likewise, f32 out.
 */
#define X(rate2, cb)                                                                               \
	int moe_gemm_##rate2##_##cb(const moe_gemm_args &a, int sms, cudaStream_t stream);         \
	int moe_decode_##rate2##_##cb(const moe_gemm_args &a, int sms, cudaStream_t stream);       \
	int moe_wide_##rate2##_##cb(const moe_gemm_args &a, int sms, cudaStream_t stream);
EXL3_MOE_VARIANTS(X)
#undef X

/* A launch that may start before the stream's last kernel has ended; the kernel waits inside. */
template <class... P, class... A>
static inline int moe_start(void (*kernel)(P...), bool programmatic, dim3 grid, uint32_t threads,
			    size_t smem, cudaStream_t stream, A &&...args)
{
	cudaLaunchConfig_t c = {};
	cudaLaunchAttribute attr = {};

	c.gridDim = grid;
	c.blockDim = dim3(threads);
	c.dynamicSmemBytes = smem;
	c.stream = stream;
	attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr.val.programmaticStreamSerializationAllowed = 1;
	c.attrs = &attr;
	c.numAttrs = programmatic;
	return cudaLaunchKernelEx(&c, kernel, (P)args...) == cudaSuccess ? 0 : -EIO;
}

} /* namespace exl3 */
#endif
