/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_turns.cuh - a stage of the wgmma kernel in which the warpgroups take turns at the tensor cores.
 *
 * A scheduler has one warp of each group. If both decode at the same time and then both multiply, decode and product
 * add up, and nothing drives them apart: a group that is ahead by d stays ahead by d. So only the group whose turn it is
 * may multiply; it passes the turn on when its last product is all that is left, and the others decode meanwhile:
 *
 *       group 0   | decode | 4 wgmma |  decode  | 4 wgmma | ...
 *       group 1   |     decode     .. | 4 wgmma |  decode  | 4 wgmma | ...
 *
 * A turn is an mbarrier of the group that takes it, which the four warps of the group before it in the ring arrive at.
 * (A named barrier would do, but ptxas moves the decode behind it; a loop that waits is a border for it.)
 */
#ifndef EXL3_CUDA_GEMM_TURNS_CUH
#define EXL3_CUDA_GEMM_TURNS_CUH

#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/cuda/trellis.cuh"

namespace exl3
{

enum { LOOP_PLAIN, LOOP_PACKED, LOOP_TURNS };

/* One warp's view. @turns: a barrier per group; everybody's is over before the first, group 0's counts as given. */
template <int GROUPS> struct turns {
	static constexpr int BYTES = 8 * GROUPS;
	uint32_t own, next, parity;

	static __device__ __forceinline__ void init(uint32_t bars)
	{
		for (int i = 0; i < GROUPS; i++)
			mbar_init(bars + 8 * i, 4);
	}

	__device__ __forceinline__ turns(uint32_t bars, int group)
	{
		own = bars + 8 * group;
		next = bars + 8 * (group + 1 == GROUPS ? 0 : group + 1);
		parity = group == 0;
	}

	__device__ __forceinline__ void take()
	{
		mbar_wait(own, parity);
		parity ^= 1;
	}

	__device__ __forceinline__ void give(int lane)
	{
		if (lane == 0)
			mbar_arrive(next);
	}
};

/* Four k-tiles of this warp's n-tile, @w the first; decoded as a whole, then multiplied as a whole. */
template <int RATE2, int CB, int TN, int GROUPS>
static __device__ __forceinline__ void turns_stage(const uint32_t *w, uint32_t desc_hi, uint32_t desc_lo,
						   turns<GROUPS> &turn, int lane, float (&d)[TN / 2])
{
	uint32_t v[4][run<RATE2>::NV], a[4][4];

#pragma unroll
	for (int i = 0; i < 4; i++)
		load_run<RATE2>(w + i * 8 * run<RATE2>::WORDS, lane, v[i]);
#pragma unroll
	for (int i = 0; i < 4; i++)
		decode_packed<RATE2, CB, CB == CB_MUL1 ? 0 : 1>(v[i], a[i]);
#pragma unroll
	for (int i = 0; i < 16; i++)
		keep(a[i / 4][i % 4]); /* done before the turn is taken */
	turn.take();
	wgmma_fence();
#pragma unroll
	for (int i = 0; i < 4; i++) {
		wgmma<TN>::rs(d, a[i], (uint64_t)desc_hi << 32 | (desc_lo + 2 * i));
		if (i >= 2)
			wgmma_commit();
	}
	wgmma_wait<1>();
	turn.give(lane);
	wgmma_wait<0>();
	wgmma_hold(d);
}

} // namespace exl3
#endif
