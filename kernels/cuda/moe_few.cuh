/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_few.cuh - sort and input transform of the routed block for few pairs: as few loads that wait for another as can be.
 *
 *   sort     one block, a thread per pair and per expert, counts in shared memory. Leaves for each pair all that its
 *            transform needs, in 32 bytes
 *   input    a block per pair and projection: x before the sort is waited for, then record, suh, Hadamard, image
 *
 * One class only: the experts' order is their number. Images are MOE_FRAGMENT, so first_pad is nobody's.
 */
#ifndef EXL3_CUDA_MOE_FEW_CUH
#define EXL3_CUDA_MOE_FEW_CUH

#include "kernels/cuda/moe_steps.cuh"

namespace exl3
{

constexpr uint32_t FEW_PAIRS = 256, FEW_EXPERTS = 1024;

struct alignas(32) moe_few_pair {
	uint32_t row, first, rows; /* sorted row, its unit; rows 0: a hole */
	uint32_t pad;
	const __half *suh[2];      /* per projection of the input */
};

/* Exclusive sum over the block's threads of two values. @total: of all; @sums: two words per warp. */
EXL3_DEV void few_scan(uint32_t (&v)[2], uint32_t (&total)[2], uint32_t (*sums)[2])
{
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
	const uint32_t own[2] = {v[0], v[1]};

	for (int s = 1; s < 32; s *= 2)
		for (int j = 0; j < 2; j++) {
			const uint32_t before = __shfl_up_sync(~0u, v[j], s);

			if ((int)lane >= s)
				v[j] += before;
		}
	if (lane == 31)
		for (int j = 0; j < 2; j++)
			sums[warp][j] = v[j];
	__syncthreads();
	for (int j = 0; j < 2; j++) {
		const uint32_t w = lane < warps ? sums[lane][j] : 0;
		uint32_t before = lane < warp ? w : 0;

		total[j] = w;
		for (int s = 16; s; s /= 2) {
			before += __shfl_xor_sync(~0u, before, s);
			total[j] += __shfl_xor_sync(~0u, total[j], s);
		}
		v[j] += before - own[j];
	}
}

/* One block of at least as many threads as there are pairs and experts, a multiple of 32. */
__global__ static void __launch_bounds__(1024)
	align_few_kernel(const __grid_constant__ moe_entries en, const moe_route r, uint32_t first_proj, moe_few_pair *pairs)
{
	__shared__ uint32_t count[FEW_EXPERTS], offset[FEW_EXPERTS], sums[32][2];
	const uint32_t i = threadIdx.x, p = r.first_pair + i;
	uint32_t expert = NO_EXPERT, rank = 0;
	moe_few_pair to = {};
	float weight = 0.0f;
	moe_unit u = {};

	if (i < r.nr_experts)
		count[i] = 0;
	__syncthreads();
	if (i < r.nr_pairs) {
		const exl3_cuda_moe_entry &e = entry_of_pair(en, p);
		/* Read once: the client may change it at any time. */
		const long long id = e.ids_dtype == EXL3_I64 ? ((const volatile long long *)e.ids)[p - e.first_pair] :
							       ((const volatile int *)e.ids)[p - e.first_pair];

		weight = load_elem(e.weights, p - e.first_pair, e.weights_dtype);
		if (id >= 0 && id < (long long)r.nr_experts) {
			expert = (uint32_t)id;
			rank = atomicAdd(&count[expert], 1u);
			to.suh[0] = (const __half *)r.mats[expert * 3 + first_proj].suh;
			to.suh[1] = (const __half *)r.mats[expert * 3 + 1].suh;
		} else if (id != -1 && e.skipped) {
			atomicAdd_system(e.skipped, 1ull);
		}
	}
	__syncthreads();
	const uint32_t rows = i < r.nr_experts ? count[i] : 0, tile = r.tile;
	uint32_t sum[2] = {rows, (rows + tile - 1) / tile}, total[2];

	if (rows) {
		for (int j = 0; j < 3; j++) {
			const exl3_matrix &m = r.mats[i * 3 + j];

			u.trellis[j] = (const char *)m.trellis;
			u.svh[j] = (const __half *)m.svh;
			u.bias[j] = (const float *)m.bias;
		}
		u.suh_down = (const __half *)r.mats[i * 3 + 2].suh;
		u.expert = i;
	}
	few_scan(sum, total, sums);
	if (rows) {
		offset[i] = sum[0];
		r.count[i] = rows;
		r.offset[i] = r.offset[r.nr_experts + i] = sum[0];
		for (uint32_t n = 0; n * tile < rows; n++) {
			u.first = u.first_pad = sum[0] + n * tile;
			u.rows = min(tile, rows - n * tile);
			r.units[sum[1] + n] = u;
		}
	}
	if (i == 0) {
		r.class_units[0] = 0;
		r.class_units[1] = total[1];
	}
	__syncthreads();
	if (i < r.nr_pairs) {
		if (expert != NO_EXPERT) {
			const uint32_t before = rank / tile * tile;

			to.row = offset[expert] + rank;
			to.first = offset[expert] + before;
			to.rows = min(tile, count[expert] - before);
			r.rank[i] = rank;
		}
		pairs[i] = to;
		r.expert[i] = expert;
		r.weight[i] = weight;
	}
	grid_launch_dependents();
}

/* Block (pair, projection). BLOCKS: blocks of 128 values per warp, of eight warps. As input_kernel. */
template <uint32_t BLOCKS>
__global__ static void __launch_bounds__(ROW_THREADS)
	input_few_kernel(const __grid_constant__ moe_entries en, const moe_route r, const moe_few_pair *pairs, uint32_t k,
			 uint32_t k_log, uint32_t image_rows, char *image, size_t image_bytes, float *row_scale, float *top)
{
	__shared__ float shared[ROW_THREADS / 32];
	const uint32_t pair = blockIdx.x, proj = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
	const uint32_t p = r.first_pair + pair, blocks = k / 128;
	const exl3_cuda_moe_entry &e = entry_of_pair(en, p);
	const char *x = (const char *)e.x + (size_t)((p - e.first_pair) / e.topk) * e.x_stride;
	const uint32_t limit = e.stored ? k : k_log;
	float v[BLOCKS][4], biggest = 0.0f;

	/* x is from before the sort, which waited for everything before it. */
#pragma unroll
	for (uint32_t i = 0; i < BLOCKS; i++)
		if (warp + i * 8 < blocks)
			load_x(x, e.x_dtype, (warp + i * 8) * 128 + lane * 4, limit, v[i]);
	grid_wait();
	grid_launch_dependents();
	const moe_few_pair of = pairs[pair];

	if (!of.rows)
		return;
	const __half *suh = of.suh[proj];
	const moe_place to = {image + proj * image_bytes, MOE_FRAGMENT, k, of.row, of.first, of.rows, 0};

#pragma unroll
	for (uint32_t i = 0; i < BLOCKS; i++)
		if (warp + i * 8 < blocks) {
			float h[4];

			moe_halves(suh + (warp + i * 8) * 128 + lane * 4, h);
#pragma unroll
			for (int j = 0; j < 4; j++)
				v[i][j] *= h[j];
		}
#pragma unroll
	for (uint32_t i = 0; i < BLOCKS; i++)
		if (warp + i * 8 < blocks) {
			had_warp(v[i]);
#pragma unroll
			for (int j = 0; j < 4; j++) {
				v[i][j] *= (float)EXL3_INV_SQRT128;
				biggest = moe_biggest(biggest, v[i][j]);
			}
		}
	for (int s = 16; s; s /= 2)
		biggest = fmaxf(biggest, __shfl_xor_sync(~0u, biggest, s));
	if (lane == 0)
		shared[warp] = biggest;
	__syncthreads();
	for (uint32_t i = 0; i < 8; i++)
		biggest = fmaxf(biggest, shared[i]);
	const float up = moe_power(biggest), down = 1.0f / up;

	if (threadIdx.x == 0) {
		row_scale[(size_t)proj * image_rows + of.row] = up;
		if (proj == 0)
			top[of.row] = 1.0f;
	}
#pragma unroll
	for (uint32_t i = 0; i < BLOCKS; i++)
		if (warp + i * 8 < blocks)
			moe_store4(to, (warp + i * 8) * 128 + lane * 4, v[i], down);
}

} /* namespace exl3 */
#endif
