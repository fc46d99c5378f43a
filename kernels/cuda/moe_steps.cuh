/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_steps.cuh - device code of the routed block around its products: sort, transform, combine.
 *
 * A value of an image is f16: a row whose transform exceeds 2^14 is scaled by a power of two, and the
 * product's epilogue undoes it, so nothing overflows that is finite in f32.
 */
#ifndef EXL3_CUDA_MOE_STEPS_CUH
#define EXL3_CUDA_MOE_STEPS_CUH

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/moe_image.cuh"

namespace exl3
{

constexpr uint32_t NO_EXPERT = 0xffffffffu;

struct moe_entries {
	struct exl3_cuda_moe_entry e[EXL3_CUDA_MOE_ENTRIES_MAX];
	uint32_t nr;
};

/* Of one chunk of tokens; all but @mats and @order in the workspace. */
struct moe_route {
	const exl3_matrix *mats;
	const uint32_t *order; /* [lists][nr_experts] expert | class that begins here << 24, or 255 */
	uint32_t lists;        /* 2: gate and up, and down, have experts in different orders of class */
	uint32_t nr_experts, nr_classes[2], nr_pairs, first_token, first_pair;
	uint32_t tile;
	uint32_t *count;       /* [nr_experts], zero before "count" */
	uint32_t *offset;      /* [2][nr_experts] first row; the same with experts padded to 8 rows */
	uint32_t *expert;      /* [pairs] or NO_EXPERT: the private copy of the ids */
	uint32_t *rank;        /* [pairs] within the expert */
	float *weight;         /* [pairs] */
	moe_unit *units;       /* [lists][units_max] */
	uint32_t units_max;
	uint32_t *class_units; /* [lists][CLASSES_MAX + 1] first unit of a class */
};

constexpr uint32_t CLASSES_MAX = 31;

/* The entry that a pair (or token) of the launch belongs to; few entries, so a linear search. */
EXL3_DEV const exl3_cuda_moe_entry &entry_of_pair(const moe_entries &en, uint32_t pair)
{
	uint32_t i = 0;

	while (i + 1 < en.nr && pair >= en.e[i + 1].first_pair)
		i++;
	return en.e[i];
}

EXL3_DEV const exl3_cuda_moe_entry &entry_of_token(const moe_entries &en, uint32_t token)
{
	uint32_t i = 0;

	while (i + 1 < en.nr && token >= en.e[i + 1].first_token)
		i++;
	return en.e[i];
}

EXL3_DEV void count_pair(const moe_entries &en, const moe_route &r, uint32_t p)
{
	const exl3_cuda_moe_entry &e = entry_of_pair(en, r.first_pair + p);
	const uint32_t i = r.first_pair + p - e.first_pair;
	/* Read once: the client may change it at any time. */
	const long long id = e.ids_dtype == EXL3_I64 ? ((const volatile long long *)e.ids)[i] :
						       ((const volatile int *)e.ids)[i];
	uint32_t expert = NO_EXPERT;

	if (id >= 0 && id < (long long)r.nr_experts) {
		expert = (uint32_t)id;
		r.rank[p] = atomicAdd(&r.count[expert], 1u);
	} else if (id != -1 && e.skipped) {
		atomicAdd_system(e.skipped, 1ull);
	}
	r.expert[p] = expert;
	r.weight[p] = load_elem(e.weights, i, e.weights_dtype);
}

/*
 * One block: exclusive sums over the experts, in the list's order, of their rows, padded rows and units;
 * the units. @offset: out for list 0, in for list 1.
 */
EXL3_DEV void scan_block(const moe_route &r, uint32_t list)
{
	const uint32_t *count = r.count;
	uint32_t *offset = r.offset;
	__shared__ uint32_t warp_sum[3][32], base[3];
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32, tile = r.tile;
	uint32_t *class_units = r.class_units + list * (CLASSES_MAX + 1);
	moe_unit *units = r.units + (size_t)list * r.units_max;

	if (threadIdx.x < 3)
		base[threadIdx.x] = 0;
	__syncthreads();
	for (uint32_t begin = 0; begin < r.nr_experts; begin += blockDim.x) {
		const uint32_t i = begin + threadIdx.x;
		const bool live = i < r.nr_experts;
		const uint32_t o = live ? r.order[list * r.nr_experts + i] : ~0u, e = o & 0xffffff, cls = o >> 24;
		const uint32_t rows = live ? count[e] : 0;
		const uint32_t own[3] = {rows, (rows + 7) / 8 * 8, (rows + tile - 1) / tile};
		uint32_t sum[3] = {own[0], own[1], own[2]};

		for (int s = 1; s < 32; s *= 2)
			for (int j = 0; j < 3; j++) {
				const uint32_t before = __shfl_up_sync(~0u, sum[j], s);

				if ((int)lane >= s)
					sum[j] += before;
			}
		if (lane == 31)
			for (int j = 0; j < 3; j++)
				warp_sum[j][warp] = sum[j];
		__syncthreads();
		for (int j = 0; j < 3; j++) {
			/* The sum over the warps before, by the warp. */
			uint32_t before = lane < warp ? warp_sum[j][lane] : 0;

			for (int s = 16; s; s /= 2)
				before += __shfl_xor_sync(~0u, before, s);
			sum[j] += base[j] + before - own[j];
		}
		if (live) {
			if (list == 0) {
				offset[e] = sum[0];
				offset[r.nr_experts + e] = sum[1];
			}
			if (cls != 255)
				class_units[cls] = sum[2];
		}
		if (own[2]) {
			moe_unit u;

			for (int j = 0; j < 3; j++) {
				const exl3_matrix &m = r.mats[e * 3 + j];

				u.trellis[j] = (const char *)m.trellis;
				u.svh[j] = (const __half *)m.svh;
				u.bias[j] = (const float *)m.bias;
			}
			u.suh_down = (const __half *)r.mats[e * 3 + 2].suh;
			u.expert = e;
			for (uint32_t n = 0; n < own[2]; n++) {
				u.first = offset[e] + n * tile;
				u.first_pad = offset[r.nr_experts + e] + n * tile;
				u.rows = min(tile, rows - n * tile);
				units[sum[2] + n] = u;
			}
		}
		__syncthreads();
		if (threadIdx.x == blockDim.x - 1)
			for (int j = 0; j < 3; j++)
				base[j] = sum[j] + own[j];
		__syncthreads();
	}
	if (threadIdx.x == 0) {
		class_units[r.nr_classes[list]] = base[2];
	}
}

/* A pair's sorted row, expert and unit (struct moe_unit); false: it has none. */
struct moe_row {
	uint32_t row, expert, first, rows, first_pad;
};

EXL3_DEV bool row_of_pair(const moe_route &r, uint32_t p, moe_row &of)
{
	const uint32_t e = r.expert[p], rank = r.rank[p]; /* not written, not used, for a hole */

	if (e == NO_EXPERT)
		return false;
	const uint32_t before = rank / r.tile * r.tile, offset = r.offset[e];

	of.expert = e;
	of.row = offset + rank;
	of.first = offset + before;
	of.first_pad = r.offset[r.nr_experts + e] + before;
	of.rows = min(r.tile, r.count[e] - before);
	return true;
}

__global__ static void count_kernel(const __grid_constant__ moe_entries en, const moe_route r)
{
	const uint32_t p = blockIdx.x * blockDim.x + threadIdx.x;

	if (p < r.nr_pairs)
		count_pair(en, r, p);
}

__global__ static void __launch_bounds__(1024) scan_kernel(const moe_route r)
{
	for (uint32_t list = 0; list < r.lists; list++)
		scan_block(r, list);
}

/* Few pairs: both steps in one block. */
__global__ static void __launch_bounds__(1024)
	align_kernel(const __grid_constant__ moe_entries en, const moe_route r)
{
	for (uint32_t e = threadIdx.x; e < r.nr_experts; e += blockDim.x)
		r.count[e] = 0;
	__syncthreads();
	for (uint32_t p = threadIdx.x; p < r.nr_pairs; p += blockDim.x)
		count_pair(en, r, p);
	__syncthreads();
	for (uint32_t list = 0; list < r.lists; list++)
		scan_block(r, list);
	grid_launch_dependents();
}

constexpr uint32_t ROW_THREADS = 256;
constexpr uint32_t ROW_MAX     = 12 * 8 * 128;

/* WARPS warps per row, BLOCKS blocks of 128 values per warp: many warps where rows are few, few else. */
template <uint32_t WARPS_, uint32_t BLOCKS_>
struct row_cfg {
	static constexpr uint32_t WARPS = WARPS_, BLOCKS = BLOCKS_, ROWS = ROW_THREADS / 32 / WARPS;
};

/*
 * Hadamard of what @load gives, into the image; its power of two to @scale. All threads of the block; a
 * row by WARPS of its warps, not @live: none.
 */
template <class C, class Load>
EXL3_DEV void transform_row(const moe_place &to, bool live, float *scale, Load load)
{
	__shared__ float shared[ROW_THREADS / 32];
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32, w = warp % C::WARPS;
	const uint32_t blocks = live ? to.k / 128 : 0;
	float v[C::BLOCKS][4], biggest = 0.0f;

#pragma unroll
	for (uint32_t i = 0; i < C::BLOCKS; i++)
		if (w + i * C::WARPS < blocks)
			load((w + i * C::WARPS) * 128 + lane * 4, v[i]);
#pragma unroll
	for (uint32_t i = 0; i < C::BLOCKS; i++)
		if (w + i * C::WARPS < blocks) {
			had_warp(v[i]);
#pragma unroll
			for (int j = 0; j < 4; j++) {
				v[i][j] *= (float)EXL3_INV_SQRT128;
				biggest = moe_biggest(biggest, v[i][j]);
			}
		}
	for (int s = 16; s; s /= 2)
		biggest = fmaxf(biggest, __shfl_xor_sync(~0u, biggest, s));
	if (C::WARPS > 1) {
		if (lane == 0)
			shared[warp] = biggest;
		__syncthreads();
		for (uint32_t i = 0; i < C::WARPS; i++)
			biggest = fmaxf(biggest, shared[warp - w + i]);
	}
	const float up = moe_power(biggest), down = 1.0f / up;

	if (live && w == 0 && lane == 0)
		*scale = up;
#pragma unroll
	for (uint32_t i = 0; i < C::BLOCKS; i++)
		if (w + i * C::WARPS < blocks)
			moe_store4(to, (w + i * C::WARPS) * 128 + lane * 4, v[i], down);
}

/* Elements col .. col + 3 of a row of x, zero from @limit on. */
EXL3_DEV void load_x(const char *x, int dtype, uint32_t col, uint32_t limit, float (&v)[4])
{
	const char *p = x + (size_t)col * (dtype == EXL3_F32 ? 4 : 2);

	if (col + 4 > limit || ((uintptr_t)p & (dtype == EXL3_F32 ? 15 : 7))) {
#pragma unroll
		for (int j = 0; j < 4; j++)
			v[j] = col + j < limit ? load_elem(x, col + j, dtype) : 0.0f;
	} else if (dtype == EXL3_F32) {
		const float4 f = *(const float4 *)p;

		v[0] = f.x;
		v[1] = f.y;
		v[2] = f.z;
		v[3] = f.w;
	} else if (dtype == EXL3_BF16) {
		const uint2 h = *(const uint2 *)p;

		v[0] = __uint_as_float(h.x << 16);
		v[1] = __uint_as_float(h.x & 0xffff0000u);
		v[2] = __uint_as_float(h.y << 16);
		v[3] = __uint_as_float(h.y & 0xffff0000u);
	} else {
		moe_halves(p, v);
	}
}

/* Block (pairs, proj): image rows of the pairs. @top: down's scale of a row, to begin with. */
template <class C>
__global__ static void __launch_bounds__(ROW_THREADS)
	input_kernel(const __grid_constant__ moe_entries en, const moe_route r, uint32_t first_proj,
		     uint32_t k, uint32_t k_log, uint32_t image_rows, char *image, size_t image_bytes,
		     int layout, float *row_scale, float *top)
{
	const uint32_t pair = blockIdx.x * C::ROWS + threadIdx.x / 32 / C::WARPS, proj = blockIdx.y;
	const uint32_t p = r.first_pair + min(pair, r.nr_pairs - 1);
	const exl3_cuda_moe_entry &e = entry_of_pair(en, p);
	const char *x = (const char *)e.x + (size_t)((p - e.first_pair) / e.topk) * e.x_stride;
	const uint32_t limit = e.stored ? k : k_log;
	const int dtype = e.x_dtype;
	const __half *suh = NULL;
	moe_row of = {};

	grid_wait();
	grid_launch_dependents();
	const bool live = pair < r.nr_pairs && row_of_pair(r, pair, of);
	const moe_place to = {image + proj * image_bytes, layout, k, of.row, of.first, of.rows, of.first_pad};

	if (live) {
		suh = (const __half *)r.mats[of.expert * 3 + first_proj + proj].suh;
		if (proj == 0)
			top[of.row] = 1.0f;
	}
	transform_row<C>(to, live, row_scale + (size_t)proj * image_rows + of.row, [&](uint32_t col, float (&v)[4]) {
		float h[4];

		moe_halves(suh + col, h);
		load_x(x, dtype, col, limit, v);
#pragma unroll
		for (int j = 0; j < 4; j++)
			v[j] *= h[j];
	});
}

/* Block p: gate and up outputs of a pair become down's image row. */
__global__ static void __launch_bounds__(ROW_THREADS)
	middle_kernel(const moe_route r, const float *gu, uint32_t gated, uint32_t inter,
		      uint32_t inter_log, uint32_t image_rows, int act, float limit, char *image, int layout,
		      float *row_scale)
{
	moe_row of;

	grid_wait();
	grid_launch_dependents();
	if (!row_of_pair(r, blockIdx.x, of))
		return;
	const float *g = gu + (size_t)of.row * inter;
	const float *u = gated ? g + (size_t)image_rows * inter : g;
	const __half *suh = (const __half *)r.mats[of.expert * 3 + 2].suh;
	const moe_place to = {image, layout, inter, of.row, of.first, of.rows, of.first_pad};

	transform_row<row_cfg<8, 12>>(to, true, row_scale + of.row, [&](uint32_t col, float (&v)[4]) {
#pragma unroll
		for (int j = 0; j < 4; j++) {
			const uint32_t i = col + j;

			v[j] = i < inter_log ? activate(gated ? g[i] : 0.0f, u[i], act, limit) *
						       __half2float(suh[i]) :
					       0.0f;
		}
	});
}

/* A warp per pair: where its row of down's image (MOE_TILES) has different powers of two, the largest for all. */
__global__ static void __launch_bounds__(ROW_THREADS)
	level_kernel(const moe_route r, uint32_t k, char *image, const float *block_scale, const float *row_scale)
{
	const uint32_t pair = (blockIdx.x * ROW_THREADS + threadIdx.x) / 32;
	moe_row of;

	grid_wait();
	grid_launch_dependents();
	if (pair >= r.nr_pairs || !row_of_pair(r, pair, of) || row_scale[of.row] == 1.0f)
		return;
	for (uint32_t i = threadIdx.x & 31; i < k / 8; i += 32) {
		/* The swizzle stays within 64 values, a block's half. */
		uint4 *p = (uint4 *)image + (size_t)of.first_pad * (k / 8) +
			   ((size_t)(i / 8) * ((of.rows + 7) / 8 * 8) + of.row - of.first) * 8 + i % 8;
		const __half2 f = __float2half2_rn(block_scale[(size_t)of.row * (k / 128) + i / 16] / row_scale[of.row]);
		uint4 v = *p;

		for (uint32_t *w : {&v.x, &v.y, &v.z, &v.w}) {
			const __half2 h = __hmul2(*(__half2 *)w, f);

			*w = *(const uint32_t *)&h;
		}
		*p = v;
	}
}

/* Block (column part, token of the chunk): slots in order, so the order of the sum is fixed. */
__global__ static void __launch_bounds__(128)
	combine_kernel(const __grid_constant__ moe_entries en, const moe_route r, const float *down,
		       uint32_t n, uint32_t n_log, float routed_scale)
{
	__shared__ struct {
		const float *row; /* or NULL */
		float weight;
	} slot[EXL3_TOPK_MAX];
	const uint32_t token = r.first_token + blockIdx.y;
	const exl3_cuda_moe_entry &e = entry_of_token(en, token);
	const uint32_t t = token - e.first_token, col = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
	const uint32_t p0 = e.first_pair + t * e.topk - r.first_pair;
	const uint32_t left = e.stored ? n : n_log;
	float v[4] = {};

	grid_wait();
	for (uint32_t i = threadIdx.x; i < e.topk; i += blockDim.x) {
		moe_row of;

		slot[i].row = row_of_pair(r, p0 + i, of) ? down + (size_t)of.row * n : NULL;
		slot[i].weight = r.weight[p0 + i];
	}
	__syncthreads();
	if (col >= left)
		return;
#pragma unroll 4
	for (uint32_t i = 0; i < e.topk; i++)
		if (slot[i].row) {
			const float4 d = *(const float4 *)(slot[i].row + col);
			const float w = slot[i].weight;

			v[0] += w * d.x;
			v[1] += w * d.y;
			v[2] += w * d.z;
			v[3] += w * d.w;
		}
#pragma unroll
	for (int j = 0; j < 4; j++)
		if (col + j < left)
			store_elem((char *)e.y + (size_t)t * e.y_stride, col + j, e.y_dtype, v[j] * routed_scale);
}

} /* namespace exl3 */
#endif
