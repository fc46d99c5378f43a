/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_early.cuh - moe_decode.cuh's products, started earlier and with a shorter loop.
 *
 * Work, sums and output are those of moe_decode.cuh. What differs:
 *
 *   list, weights  read before the input transform is waited for: it was started behind the sort, so the list is there
 *   successor      may start at once where a block leaves room for another on its SM (args.one): it fetches its
 *                  list and weights while this one computes. Blocks wait for lower ones only, and all of these run by then
 *   loop           rounds that end where a strip's copies end, so that a step does not look whether they have; all 16-bit
 *                  cuts of the dup form on the multiplier's pipe
 *
 *   stream     sort | input      | gate, up                  | down             | combine
 *   one        sort | input      |
 *                     list, weights | B, loop, sums, image   |
 *                                     list, weights ..         | B, loop, sums  |
 */
#ifndef EXL3_CUDA_MOE_EARLY_CUH
#define EXL3_CUDA_MOE_EARLY_CUH

#include "kernels/cuda/moe_decode.cuh"
#include "kernels/cuda/moe_many.h"
#include "kernels/cuda/moe_many_ptx.cuh"

namespace exl3
{

template <int RATE2_, int CB_, int MG_, int P_, bool GATED_> struct early_cfg : moe_cfg<RATE2_, CB_, MG_, P_, GATED_> {
	static constexpr int HX = CB_ == CB_MUL1 ? 0 : MG_ == 1 ? 2 : 1;
};

/* moe_rescale(): a step's B, in shared memory, from the powers of two of its blocks to those of the rows. */
template <class C> EXL3_DEV void early_rescale(const moe_gemm_args &a, const moe_unit &u, uint32_t kt, uint32_t b)
{
	const uint32_t lane = threadIdx.x & 31;

#pragma unroll 1
	for (uint32_t i = lane; i < u.rows * 8; i += 32) {
		const uint32_t row = u.first + i / 8;
		const __half2 s = __float2half2_rn(a.block_scale[(size_t)row * (a.k / 128) + kt / 8] / a.row_scale[row]);
		uint32_t v = lds32(b + i * 4);
		const __half2 r = __hmul2(*(__half2 *)&v, s);

		sts32(b + i * 4, *(const uint32_t *)&r);
	}
	__syncwarp();
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, C::PER_SM) moe_early_kernel(const __grid_constant__ moe_early_args args)
{
	extern __shared__ __align__(128) char moe_smem_early[];
	const moe_gemm_args &a = args.g;
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	const uint32_t kt_all = a.k / 16, groups = moe_groups<C>(a);
	const uint32_t unit0 = a.class_units[a.cls], nr = a.class_units[a.cls + 1] - unit0;
	const moe_unit *units = a.units + unit0;
	const uint32_t positions = nr * groups * kt_all;
	/* The host knows only a bound of the work: at least a step for every warp of the blocks that run. */
	const uint32_t blocks = min(gridDim.x, max(positions / C::KG, 1u));
	const moe_share share = {positions / blocks, positions % blocks, 1};
	const uint32_t begin = share.begin(blockIdx.x), end = share.begin(blockIdx.x + 1);
	const uint32_t ring = smem_addr(moe_smem_early) + warp * C::STAGES * C::LINE, ring_end = ring + C::STAGES * C::LINE;
	float *red = (float *)(moe_smem_early + C::WARPS * C::STAGES * C::LINE);
	int position = (int)(end - 1 - warp % C::KG);
	moe_loader<C> in;

	if (args.one)
		grid_launch_dependents();
	if (blockIdx.x >= blocks || begin == end) {
		grid_wait(); /* who waits for this kernel waits for those before it */
		grid_launch_dependents();
		return;
	}
	in.start(a, units, begin, position);
	moe_loader<C> in_b = in;
	uint32_t dst = ring + lane * 16, tiles = ring;

#pragma unroll 1
	for (int s = 0; s < C::STAGES - 1; s++) {
		if (in.left) {
			in.copy_weights(dst);
			in.next(a, units, begin);
		}
		dst += C::LINE;
	}
	if (warp == C::WARPS - 1)
		moe_prefetch<C>(a, units[(end - 1) / kt_all / groups], (end - 1) / kt_all);
	grid_wait();
#pragma unroll 1
	for (int s = 0; s < C::STAGES - 1; s++) {
		if (in_b.left) {
			in_b.copy_b(ring + s * C::LINE + C::ITEM + lane * 16);
			in_b.next(a, units, begin);
		}
		cp_async_commit(); /* the first group also has all weights so far */
	}

	const run_lane<C::RATE2> rl(lane);
	moe_acc<C> acc;
	uint32_t b_offset[C::MG];
	bool flushed = false;

#pragma unroll 1
	for (uint32_t task = (end - 1) / kt_all;; task--) {
		const uint32_t top = task * kt_all, lo = max(begin, top);
		const moe_unit &u = units[task / groups];
		const uint32_t rows = u.rows;
		int steps = position >= (int)lo ? (position - (int)lo) / C::KG + 1 : 0;
		bool scaled = false;

		if (flushed && warp == C::WARPS - 1)
			moe_prefetch<C>(a, u, task);
		if (a.block_scale)
			scaled = __any_sync(~0u, lane < rows && a.row_scale[u.first + lane] > 1.0f);
		acc = {};
		/* Columns beyond the unit's rows repeat the last one; nobody reads them. */
#pragma unroll
		for (int j = 0; j < C::MG; j++)
			b_offset[j] = min(j * 8 + (lane >> 2), rows - 1) * 32 + 8 * (lane & 3);
#pragma unroll 1
		while (steps > 0) {
			const bool copying = in.left > 0;
			int round = copying ? min(min(in.strip_left, in.left), steps) : steps;

			steps -= round;
			in.left -= copying ? round : 0;
			in.strip_left -= round;
#pragma unroll 1
			do {
				cp_async_wait<C::STAGES - 2>();
				__syncwarp(); /* all lanes are past the step before */
				if (copying) {
					in.copy_weights(dst);
					in.copy_b(dst + C::ITEM);
					in.src -= in.row;
					in.b -= in.b_row;
				}
				cp_async_commit();
				dst = dst + C::LINE >= ring_end ? dst + C::LINE - C::STAGES * C::LINE : dst + C::LINE;
				if (scaled)
					early_rescale<C>(a, u, (uint32_t)position - top, tiles + C::ITEM);
				moe_step<C>(tiles, rl, tiles + C::ITEM, b_offset, acc);
				tiles = tiles + C::LINE == ring_end ? ring : tiles + C::LINE;
				position -= C::KG;
			} while (--round);
			if (copying && in.left && !in.strip_left)
				in.enter_strip(a, units, begin);
		}
#pragma unroll
		for (int token0 = 0; token0 < C::TOKENS; token0 += C::RED) {
			if ((uint32_t)token0 >= rows)
				break;
			if (flushed)
				__syncthreads();
			flushed = true;
			moe_flush<C>(acc, red + warp * C::RED * C::ROW, token0, rows);
			__syncthreads();
			const uint32_t tokens = min(rows - token0, (uint32_t)C::RED);
			const bool owner = end >= top + kt_all;

			if constexpr (C::GATED) {
#pragma unroll 1
				for (uint32_t t = warp; t < tokens; t += C::WARPS)
					moe_reduce<C, 2>(a, u, share, task, red, token0, t, 0, lo, owner);
			} else {
#pragma unroll 1
				for (uint32_t i = warp; i < tokens * C::P; i += C::WARPS)
					moe_reduce<C, 1>(a, u, share, task, red, token0, i / C::P, i % C::P, lo,
							 owner);
			}
		}
		if (lo == begin)
			break;
	}
	grid_launch_dependents();
}

#ifndef EXL3_EMULATE

constexpr uint32_t EARLY_STEPS = 16; /* of a warp, on average: up to these one block per SM is enough */

template <class C> static int early_start(const moe_early_args &args, int sms, cudaStream_t stream)
{
	static bool ready; /* the same from every thread */
	const moe_gemm_args &a = args.g;
	moe_early_args to = args;

	if (!ready && cudaFuncSetAttribute(moe_early_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM))
		return -EIO;
	ready = true;
	const uint64_t steps = (uint64_t)a.tasks_max * (a.k / 16) / C::KG;
	const uint32_t slot_blocks = EXL3_CUDA_WS_ZERO / (C::TOKENS * C::P * 512);

	to.one = args.one || steps <= (uint64_t)sms * EARLY_STEPS;
	uint32_t blocks = (uint32_t)sms * (to.one ? 1 : C::PER_SM);

	if (blocks > slot_blocks)
		blocks = slot_blocks;
	if (blocks > steps)
		blocks = (uint32_t)steps;
	return moe_start(moe_early_kernel<C>, a.programmatic, dim3(blocks), C::THREADS, C::SMEM, stream, to);
}

/* As moe_decode_start_any(). */
template <int RATE2, int CB> static int early_start_any(const moe_early_args &a, int sms, cudaStream_t stream)
{
	if (a.g.nr_proj == 2)
		return a.g.tile == 8 ? early_start<early_cfg<RATE2, CB, 1, 2, true>>(a, sms, stream) :
				       early_start<early_cfg<RATE2, CB, 2, 2, true>>(a, sms, stream);
	if (a.g.tile == 8 && a.g.k <= 768)
		return early_start<early_cfg<RATE2, CB, 1, 4, false>>(a, sms, stream);
	return a.g.tile == 8 ? early_start<early_cfg<RATE2, CB, 1, 2, false>>(a, sms, stream) :
			       early_start<early_cfg<RATE2, CB, 2, 2, false>>(a, sms, stream);
}

#endif

} /* namespace exl3 */
#endif
