/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_decode.cuh - trellis.cuh's packed decode in the form that costs least beside tensor instructions. */
#ifndef EXL3_CUDA_GEMM_DECODE_CUH
#define EXL3_CUDA_GEMM_DECODE_CUH

#include "kernels/cuda/trellis.cuh"

namespace exl3
{

/*
 * Two weights as fp16. The adds take their operands as low and high half of one register each, which
 * costs one PRMT less than trellis.cuh's pair() and spreads over both pipes.
 */
template <int CB> static __device__ __forceinline__ uint32_t pair_select(uint32_t w0, uint32_t w1)
{
	if (CB == CB_MUL1)
		return pair<CB>(w0, w1);
	constexpr int HALVES = CB == CB_MUL1 ? CB_MCG : CB; /* compiled for mul1 too, never run */
	uint32_t x0 = halves<HALVES>(w0), x1 = halves<HALVES>(w1);
	__half2 a = *(__half2 *)&x0, b = *(__half2 *)&x1;
	__half2 h = __halves2half2(__hadd(__low2half(a), __high2half(a)),
				   __hadd(__low2half(b), __high2half(b)));

	return *(uint32_t *)&h;
}

template <int RATE2, int CB>
static __device__ __forceinline__ void decode_a(const uint32_t (&v)[run<RATE2>::NV],
						uint32_t (&a)[4])
{
	uint32_t w[8];

	/* mul1 keeps the multiplier's pipe busy enough by itself. */
	windows<RATE2, CB == CB_MUL1 ? 0 : 1>(v, w);
	a[0] = pair_select<CB>(w[0], w[1]);
	a[1] = pair_select<CB>(w[4], w[5]);
	a[2] = pair_select<CB>(w[2], w[3]);
	a[3] = pair_select<CB>(w[6], w[7]);
}

} // namespace exl3
#endif
