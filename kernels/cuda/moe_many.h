/* SPDX-License-Identifier: Apache-2.0 */
/* moe_many.h - the products that only a named variant of the routed block takes (moe.h). */
#ifndef EXL3_CUDA_MOE_MANY_H
#define EXL3_CUDA_MOE_MANY_H

#include "kernels/cuda/moe_int.h"

namespace exl3
{

constexpr uint32_t TALL_ROWS = 256; /* of a unit at most, moe_tall.cuh */

struct moe_many_args {
	moe_gemm_args g; /* image: MOE_TILES; gate and up: out is NULL; down: next_* are not used */
	float *scratch;  /* moe_tall.cuh, gate and up: [blocks][TALL_ROWS][128], of any content */
};

struct moe_early_args {
	moe_gemm_args g; /* as for decode; never whole */
	bool one;        /* one block per SM, and the next kernel may start at once; the launch sets it for little work */
};

/* Which (rate2, codebook) these are compiled for. */
#define EXL3_MOE_MANY_VARIANTS(X) X(8, 1) X(8, 2)

/* early: decode, moe_early.cuh; team: up to 64 rows a unit (g.tile 32 or 64); tall: up to TALL_ROWS. sm_90a. 0 or -EIO. */
#define X(rate2, cb)                                                                               \
	int moe_early_##rate2##_##cb(const moe_early_args &a, int sms, cudaStream_t stream);       \
	int moe_team_##rate2##_##cb(const moe_many_args &a, int sms, cudaStream_t stream);         \
	int moe_tall_##rate2##_##cb(const moe_many_args &a, int sms, cudaStream_t stream);
EXL3_MOE_MANY_VARIANTS(X)
#undef X
int moe_turns_8_1(const moe_many_args &a, int sms, cudaStream_t stream); /* tall, see TURNS there */

} /* namespace exl3 */
#endif
