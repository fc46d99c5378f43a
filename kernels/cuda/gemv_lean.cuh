/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv_lean.cuh - the few-row kernel with a short way to its first copies; for one shard.
 *
 * Work, ring, loop and sums are those of gemv.cuh. What differs is what a block does before and after the loop, which
 * at 4096 x 4096 is half of its time:
 *
 *       start      nothing but the places of a warp's first STAGES - 1 steps, without a branch, then their copies;
 *                  gemv_kernel asks for x first, through code for several shards, types, tables (about 380
 *                  instructions that run once, so that each 128 bytes of them are fetched from afar)
 *       dependents may start at once: all blocks of the grid are running, so they take no place from it, and they ask for
 *                  their weights before they wait
 *       sums       gemv_reduce_together()
 *
 * The host sees to it that a launch has one shard and every warp at least two steps (gemv.cu, lean_fits()).
 */
#ifndef EXL3_CUDA_GEMV_LEAN_CUH
#define EXL3_CUDA_GEMV_LEAN_CUH

#include "kernels/cuda/gemv.cuh"

namespace exl3
{

#ifdef __CUDACC__

/* This block's part of the image of x; returns its first block of k. As gemv_make_image(), without what it interleaves. */
template <class C>
EXL3_DEV uint32_t lean_image(const gemv_args &a, const gemv_layout &l, uint32_t begin, uint32_t hi,
			     char *smem)
{
	uint32_t *image = (uint32_t *)(smem + l.image);
	uint32_t *peak = C::FORM == FORM_BYTES ? (uint32_t *)(smem + l.peak) : (uint32_t *)NULL;
	const __half *suh = a.shard[0].suh;
	const uint32_t kb = a.kt / C::BLOCK, warp = threadIdx.x >> 5;
	uint32_t nb = (hi - 1) / C::BLOCK - begin / C::BLOCK + 1;
	uint32_t kb0 = (begin - gemv_strip_of(a, begin) * a.kt) / C::BLOCK;

	if (nb >= kb) {
		kb0 = 0;
		nb = kb;
	}
	const uint32_t total = a.ablate & ABLATE_TRANSFORM ? 0 : nb * a.m;

	if (C::FORM == FORM_BYTES) {
		if (threadIdx.x < a.m)
			peak[threadIdx.x] = 0;
		__syncthreads();
	}
	if (total <= C::WARPS) {
		if (warp < total) {
			raw_four one;

			gemv_row_load(a, suh, kb, kb0, warp, one);
			gemv_row_make(a, warp, one, image, peak);
		}
	} else {
#pragma unroll 1
		for (uint32_t r0 = warp * 8; r0 < total; r0 += C::WARPS * 8) {
			raw_rows eight;

			gemv_rows_load(a, suh, kb, kb0, nb, r0, eight);
			gemv_rows_make(a, nb, r0, eight, image, peak);
		}
	}
	__syncthreads();
	if (C::FORM == FORM_BYTES) {
		gemv_quantize(image, nb * 8 * a.m * 4, a.m, peak);
		__syncthreads();
	}
	return kb0;
}

template <class C>
__global__ void __launch_bounds__(C::WARPS * 32, 1) lean_kernel(const __grid_constant__ gemv_args a)
{
	static_assert(C::STAGES <= 3, "the host sees to two steps per warp");
	extern __shared__ __align__(1024) char gemv_smem[];
	const uint32_t start = clock32();

	gemv_touch(a);
	const uint32_t begin = gemv_begin(a, blockIdx.x), end = gemv_begin(a, blockIdx.x + 1);
	const uint32_t smem = smem_addr(gemv_smem);
	int issued = C::STAGES - 1, taken = 0;

	{
		const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = warp % C::HALVES;
		const uint32_t first = end - 1 - warp / C::HALVES;
		const uint32_t ring = smem + warp * C::STAGES * C::STAGE + lane * 16;
		const char *base = (const char *)a.shard[0].trellis + half * C::ROW_ITEM + lane * 16;
		uint32_t kt[C::STAGES - 1];
		gemv_loader<C> in;

		in.row = a.shard[0].nt * (16 * C::RATE2);
#pragma unroll
		for (int s = 0; s < C::STAGES - 1; s++) {
			const uint32_t position = first - s * C::KG;
			const uint32_t strip = gemv_strip_of(a, position);

			kt[s] = position - strip * a.kt;
			in.src = base + (size_t)(kt[s] * C::K_TILES) * in.row + strip * (128 * C::RATE2);
			in.copy_weights(ring + s * C::STAGE);
			if (C::FUSED)
				cp_async_commit();
		}
		grid_launch_dependents();
		grid_wait();
		if (!C::FUSED)
#pragma unroll
			for (int s = 0; s < C::STAGES - 1; s++) {
				in.b = (const char *)a.image +
				       (size_t)kt[s] * a.m * (32 * C::K_TILES) + lane * 16;
				in.copy_b(ring + s * C::STAGE + C::ITEM, a.m);
				cp_async_commit();
			}
	}
	gemv_trace(a, AT_ASKED);
	gemv_trace(a, AT_START, start); /* here: to read the device's timer takes time */
	if (a.ablate & ABLATE_ALL) {
		cp_async_wait<0>();
		return;
	}
	const gemv_layout l = gemv_shared(gemv_shape_of<C>(), a.m, a.image_blocks);
	uint32_t strip = gemv_strip_of(a, end - 1), kb0 = 0;
	bool flushed = false;

	gemv_prefetch_scales(a, strip);
	gemv_trace(a, AT_X);
	if (C::FUSED)
		kb0 = lean_image<C>(a, l, begin, min(end, (strip + 1) * a.kt), gemv_smem);
#pragma unroll 1
	for (;; strip--) {
		const uint32_t top = strip * a.kt, lo = max(begin, top);
		const uint32_t red_part = min(a.m, (uint32_t)C::RED) * C::ROW;
		float *red = (float *)(gemv_smem + l.red);
		gemv_acc<C> acc;

		gemv_trace(a, AT_IMAGE);
		gemv_clear<C>(acc);
		gemv_strip<C>(a, l, smem, begin, end, strip, kb0, issued, taken, acc);
		gemv_trace(a, AT_MAIN);
#pragma unroll
		for (int token0 = 0; token0 < C::TOKENS; token0 += C::RED) {
			if ((uint32_t)token0 >= a.m)
				break;
			if (flushed)
				__syncthreads();
			flushed = true;
			gemv_flush<C>(acc, red + (threadIdx.x >> 5) * red_part, token0, a.m,
				      (const uint32_t *)(gemv_smem + l.peak));
			__syncthreads();
			gemv_trace(a, AT_FLUSH);
			gemv_reduce_together<C>(a, a.shard[0], strip, red, token0, lo, end >= top + a.kt);
		}
		if (lo == begin)
			break;
	}
	gemv_trace(a, AT_END);
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
