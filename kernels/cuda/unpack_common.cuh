/* SPDX-License-Identifier: Apache-2.0 */
/* unpack_common.cuh - what the rebuilds of weights in 16 bits share: arithmetic, places, copies. */
#ifndef EXL3_CUDA_UNPACK_COMMON_CUH
#define EXL3_CUDA_UNPACK_COMMON_CUH

#include "kernels/cuda/gemm_unpack.h"
#include "kernels/cuda/trellis.cuh"
#include "kernels/cuda/unpack_ptx.cuh"

#include <cuda_bf16.h>

namespace exl3
{

static EXL3_HD uint32_t odd_bits(uint32_t v)
{
#ifdef __CUDA_ARCH__
	return __popc(v) & 1;
#else
	return (uint32_t)__builtin_popcount(v) & 1;
#endif
}

static EXL3_HD uint32_t add_f16x2(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
	uint32_t d;

	asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
	return d;
#else
	return fma_f16x2(a, 0x3c003c00u, b);
#endif
}

static EXL3_HD uint32_t sub_f16x2(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
	uint32_t d;

	asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
	return d;
#else
	return fma_f16x2(b, 0xbc00bc00u, a);
#endif
}

template <bool BF16> static EXL3_HD uint32_t pack_16(float lo, float hi)
{
	if (BF16) {
		const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);

		return *(const uint32_t *)&v;
	}
	const __half2 v = __floats2half2_rn(lo, hi);

	return *(const uint32_t *)&v;
}

/* Additions and subtractions across eight tiles of four registers, two f16 each: H8. */
static EXL3_HD void unpack_add8(uint32_t (&v)[8][4])
{
#pragma unroll
	for (int s = 1; s < 8; s <<= 1)
#pragma unroll
		for (int t = 0; t < 8; t++)
			if (!(t & s))
#pragma unroll
				for (int i = 0; i < 4; i++) {
					const uint32_t x = v[t][i], z = v[t + s][i];

					v[t][i] = add_f16x2(x, z);
					v[t + s][i] = sub_f16x2(x, z);
				}
}

#ifdef __CUDACC__

/* A block's place: 128-blocks along k and n. */
struct unpack_place {
	uint32_t kb, nb;

	EXL3_DEV_MEMBER void next(const unpack_args &a)
	{
		if (++kb == a.blocks_k) {
			kb = 0;
			nb++;
		}
	}
};

/* Begins the copy of a block's trellis and suh; @offset: of this thread's copies. */
template <class S>
EXL3_DEV void unpack_fetch(const unpack_args &a, uint32_t stage, const unpack_place &at,
			   const uint32_t (&offset)[S::PER_THREAD])
{
	const uint8_t *from = a.trellis + (size_t)at.kb * 8 * a.row_bytes + (size_t)at.nb * S::ROW;

#pragma unroll
	for (int i = 0; i < S::PER_THREAD; i++)
		if (S::THREADS * (i + 1) <= S::COPIES || S::THREADS * i + threadIdx.x < S::COPIES)
			cp_async16(stage + (S::THREADS * i + threadIdx.x) * 16, from + offset[i]);
	if (threadIdx.x < 16)
		cp_async16(stage + S::SUH + threadIdx.x * 16, a.suh + at.kb * 128 + threadIdx.x * 8);
}

#endif /* __CUDACC__ */
} // namespace exl3
#endif
