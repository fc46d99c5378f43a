/* SPDX-License-Identifier: Apache-2.0 */
/* moe_int.h - what moe.cu and the instances of moe_gemm.cuh share. */
#ifndef EXL3_CUDA_MOE_INT_H
#define EXL3_CUDA_MOE_INT_H

#include "kernels/backend.h"

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <errno.h>

namespace exl3
{

/* Up to TN sorted rows of one expert. */
struct moe_unit {
	uint32_t expert, first, rows;
};

struct moe_gemm_args {
	const exl3_matrix *mats;    /* [nr_experts][gate, up, down], device */
	const moe_unit *units;
	const uint32_t *nr_units;   /* device */
	const __half *image;        /* [nr_proj][image_rows, k] */
	const float *row_scale;     /* [nr_proj][image_rows], undoes the image's power of two */
	float *out;                 /* [nr_proj][image_rows, n] */
	uint32_t image_rows;
	uint32_t n;                 /* stored */
	uint32_t first_proj, nr_proj;
	uint32_t tasks_max;         /* host's bound of the number of tasks */
};

/* Every (rate2, codebook) that exists; the one list that instances and dispatch come from. */
#define EXL3_MOE_VARIANTS(X)                                                                       \
	X(2, 0) X(2, 1) X(2, 2) X(4, 0) X(4, 1) X(4, 2) X(6, 0) X(6, 1) X(6, 2) X(8, 0) X(8, 1)    \
	X(8, 2) X(10, 0) X(10, 1) X(10, 2) X(12, 0) X(12, 1) X(12, 2) X(14, 0) X(14, 1) X(14, 2)   \
	X(16, 0) X(16, 1) X(16, 2) X(3, 2) X(5, 2) X(7, 2)

#define X(rate2, cb)                                                                               \
	int moe_gemm_##rate2##_##cb(const moe_gemm_args &a, int tn, int sms, cudaStream_t stream);
EXL3_MOE_VARIANTS(X)
#undef X

} /* namespace exl3 */
#endif
