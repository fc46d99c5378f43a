/* SPDX-License-Identifier: Apache-2.0 */
/* moe_many_r8.cu - the products for many rows at 4 bits. */
#include "kernels/cuda/moe_tall.cuh"
#include "kernels/cuda/moe_team.cuh"

#define X(rate2, cb)                                                                               \
	int exl3::moe_team_##rate2##_##cb(const moe_many_args &a, int sms, cudaStream_t stream)    \
	{                                                                                          \
		return team_start_any<rate2, cb>(a, sms, stream);                                  \
	}                                                                                          \
	int exl3::moe_tall_##rate2##_##cb(const moe_many_args &a, int sms, cudaStream_t stream)    \
	{                                                                                          \
		return tall_start_any<rate2, cb, false>(a, sms, stream);                                  \
	}
X(8, 1)
X(8, 2)
#undef X
