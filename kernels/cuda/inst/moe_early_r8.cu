/* SPDX-License-Identifier: Apache-2.0 */
/* moe_early_r8.cu - the products for few rows that start early, at 4 bits. */
#include "kernels/cuda/moe_early.cuh"

#define X(rate2, cb)                                                                               \
	int exl3::moe_early_##rate2##_##cb(const moe_early_args &a, int sms, cudaStream_t stream)  \
	{                                                                                          \
		return early_start_any<rate2, cb>(a, sms, stream);                                 \
	}
X(8, 1)
X(8, 2)
#undef X
