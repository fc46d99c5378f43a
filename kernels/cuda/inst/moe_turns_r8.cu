/* SPDX-License-Identifier: Apache-2.0 */
/* moe_turns_r8.cu - the product for up to 256 rows in turns, mcg at 4 bits. */
#include "kernels/cuda/moe_tall.cuh"

int exl3::moe_turns_8_1(const moe_many_args &a, int sms, cudaStream_t stream)
{
	return tall_start_any<8, 1, true>(a, sms, stream);
}
