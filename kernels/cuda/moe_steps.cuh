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
#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/moe_int.h"

namespace exl3
{

constexpr uint32_t NO_EXPERT = 0xffffffffu;

struct moe_entries {
	struct exl3_cuda_moe_entry e[EXL3_CUDA_MOE_ENTRIES_MAX];
	uint32_t nr;
};

/* Of one chunk of tokens; all in the workspace. */
struct moe_route {
	uint32_t nr_experts, nr_pairs, first_token, first_pair;
	uint32_t *count;      /* [nr_experts], zero before "count" */
	uint32_t *offset;     /* [nr_experts] */
	uint32_t *expert;     /* [pairs] or NO_EXPERT: the private copy of the ids */
	uint32_t *rank;       /* [pairs] within the expert, then sorted position */
	float *weight;        /* [pairs] */
	uint32_t *sorted;     /* [pairs] pair at a sorted position */
	uint32_t *row_expert; /* [pairs] expert at a sorted position */
	moe_unit *units;
	uint32_t *nr_units;   /* [2]: units, sorted rows */
};

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

/* One block: exclusive sums over the experts of their rows and of their units. */
EXL3_DEV void scan_block(const moe_route &r, uint32_t tn)
{
	__shared__ uint32_t warp_sum[2][32], base[2];
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;

	if (threadIdx.x == 0)
		base[0] = base[1] = 0;
	__syncthreads();
	for (uint32_t first = 0; first < r.nr_experts; first += blockDim.x) {
		const uint32_t e = first + threadIdx.x;
		const uint32_t rows = e < r.nr_experts ? r.count[e] : 0, units = (rows + tn - 1) / tn;
		uint32_t a = rows, b = units;

		for (int s = 1; s < 32; s *= 2) {
			const uint32_t pa = __shfl_up_sync(~0u, a, s), pb = __shfl_up_sync(~0u, b, s);

			if ((int)lane >= s) {
				a += pa;
				b += pb;
			}
		}
		if (lane == 31) {
			warp_sum[0][warp] = a;
			warp_sum[1][warp] = b;
		}
		__syncthreads();
		uint32_t row0 = base[0] + a - rows, unit0 = base[1] + b - units;

		for (uint32_t w = 0; w < warp; w++) {
			row0 += warp_sum[0][w];
			unit0 += warp_sum[1][w];
		}
		if (e < r.nr_experts)
			r.offset[e] = row0;
		for (uint32_t i = 0; i < units; i++)
			r.units[unit0 + i] = moe_unit{e, row0 + i * tn, min(tn, rows - i * tn)};
		__syncthreads();
		if (threadIdx.x == blockDim.x - 1) {
			base[0] = row0 + rows;
			base[1] = unit0 + units;
		}
		__syncthreads();
	}
	if (threadIdx.x == 0) {
		r.nr_units[0] = base[1];
		r.nr_units[1] = base[0];
	}
}

EXL3_DEV void place_pair(const moe_route &r, uint32_t p)
{
	const uint32_t e = r.expert[p];

	if (e == NO_EXPERT)
		return;
	const uint32_t s = r.offset[e] + r.rank[p];

	r.rank[p] = s;
	r.sorted[s] = p;
	r.row_expert[s] = e;
}

__global__ static void count_kernel(const __grid_constant__ moe_entries en, const moe_route r)
{
	const uint32_t p = blockIdx.x * blockDim.x + threadIdx.x;

	if (p < r.nr_pairs)
		count_pair(en, r, p);
}

__global__ static void scan_kernel(const moe_route r, uint32_t tn) { scan_block(r, tn); }

__global__ static void place_kernel(const moe_route r)
{
	const uint32_t p = blockIdx.x * blockDim.x + threadIdx.x;

	if (p < r.nr_pairs)
		place_pair(r, p);
}

/* Few pairs: all three steps in one block. */
__global__ static void __launch_bounds__(1024)
	align_kernel(const __grid_constant__ moe_entries en, const moe_route r, uint32_t tn)
{
	for (uint32_t e = threadIdx.x; e < r.nr_experts; e += blockDim.x)
		r.count[e] = 0;
	__syncthreads();
	for (uint32_t p = threadIdx.x; p < r.nr_pairs; p += blockDim.x)
		count_pair(en, r, p);
	__syncthreads();
	scan_block(r, tn);
	__syncthreads();
	for (uint32_t p = threadIdx.x; p < r.nr_pairs; p += blockDim.x)
		place_pair(r, p);
}

/* The power of two by which the block's row is too large for f16. NaN and Inf do not count. */
EXL3_DEV float block_scale(float biggest, float *shared)
{
	for (int s = 16; s; s /= 2)
		biggest = fmaxf(biggest, __shfl_xor_sync(~0u, biggest, s));
	if ((threadIdx.x & 31) == 0)
		shared[threadIdx.x / 32] = biggest;
	__syncthreads();
	biggest = 0.0f;
	for (uint32_t w = 0; w < blockDim.x / 32; w++)
		biggest = fmaxf(biggest, shared[w]);
	__syncthreads();
	return biggest > 16384.0f ? exp2f(ceilf(log2f(biggest / 16384.0f))) : 1.0f;
}

/* Hadamard of a row in shared memory, block of 128 by block, into the image; its power of two to @scale. */
EXL3_DEV void transform_row(float *row, uint32_t k, __half *image, float *scale)
{
	__shared__ float shared[32];
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
	float biggest = 0.0f;

	for (uint32_t b = warp; b < k / 128; b += warps) {
		float4 *p = (float4 *)(row + b * 128) + lane;
		float v[4] = {p->x, p->y, p->z, p->w};

		had_warp(v);
		for (int j = 0; j < 4; j++) {
			v[j] *= (float)EXL3_INV_SQRT128;
			const float mag = fabsf(v[j]);

			if (mag <= 3.4e38f) /* false for NaN and Inf */
				biggest = fmaxf(biggest, mag);
		}
		*p = make_float4(v[0], v[1], v[2], v[3]);
	}
	const float up = block_scale(biggest, shared), down = 1.0f / up;

	if (threadIdx.x == 0)
		*scale = up;
	for (uint32_t i = threadIdx.x * 2; i < k; i += blockDim.x * 2) {
		const float2 v = *(const float2 *)(row + i);

		*(__half2 *)(image + i) = __floats2half2_rn(v.x * down, v.y * down);
	}
}

/* Block (s, proj): image row of a sorted row. */
__global__ static void __launch_bounds__(256)
	input_kernel(const __grid_constant__ moe_entries en, const moe_route r, const exl3_matrix *mats,
		     uint32_t first_proj, uint32_t k, uint32_t k_log, uint32_t image_rows, __half *image,
		     float *row_scale)
{
	extern __shared__ __align__(16) float row[];
	const uint32_t s = blockIdx.x, proj = blockIdx.y;

	if (s >= r.nr_units[1])
		return;
	const uint32_t p = r.first_pair + r.sorted[s];
	const exl3_cuda_moe_entry &e = entry_of_pair(en, p);
	const char *x = (const char *)e.x + (size_t)((p - e.first_pair) / e.topk) * e.x_stride;
	const __half *suh = (const __half *)mats[r.row_expert[s] * 3 + first_proj + proj].suh;
	const uint32_t limit = e.stored ? k : k_log;

	for (uint32_t i = threadIdx.x; i < k; i += blockDim.x)
		row[i] = i < limit ? load_elem(x, i, e.x_dtype) * __half2float(suh[i]) : 0.0f;
	__syncthreads();
	transform_row(row, k, image + ((size_t)proj * image_rows + s) * k,
		      row_scale + (size_t)proj * image_rows + s);
}

/* Block s: gate and up outputs of a sorted row become down's image row. */
__global__ static void __launch_bounds__(256)
	middle_kernel(const moe_route r, const exl3_matrix *mats, const float *gu, uint32_t gated,
		      uint32_t inter, uint32_t inter_log, uint32_t image_rows, int act, float limit,
		      __half *image, float *row_scale)
{
	extern __shared__ __align__(16) float row[];
	const uint32_t s = blockIdx.x;

	if (s >= r.nr_units[1])
		return;
	const float *g = gu + (size_t)s * inter;
	const float *u = gated ? g + (size_t)image_rows * inter : g;
	const __half *suh = (const __half *)mats[r.row_expert[s] * 3 + 2].suh;

	for (uint32_t i = threadIdx.x; i < inter; i += blockDim.x)
		row[i] = i < inter_log ?
				 activate(gated ? g[i] : 0.0f, u[i], act, limit) * __half2float(suh[i]) :
				 0.0f;
	__syncthreads();
	transform_row(row, inter, image + (size_t)s * inter, row_scale + s);
}

/* Block (column part, token of the chunk): slots in order, so the order of the sum is fixed. */
__global__ static void __launch_bounds__(256)
	combine_kernel(const __grid_constant__ moe_entries en, const moe_route r, const float *down,
		       uint32_t n, uint32_t n_log, float routed_scale)
{
	const uint32_t token = r.first_token + blockIdx.y;
	const exl3_cuda_moe_entry &e = entry_of_token(en, token);
	const uint32_t t = token - e.first_token, col = blockIdx.x * blockDim.x + threadIdx.x;
	const uint32_t p0 = e.first_pair + t * e.topk - r.first_pair;
	float v = 0.0f;

	if (col >= (e.stored ? n : n_log))
		return;
	for (uint32_t i = 0; i < e.topk; i++)
		if (r.expert[p0 + i] != NO_EXPERT)
			v += r.weight[p0 + i] * down[(size_t)r.rank[p0 + i] * n + col];
	store_elem((char *)e.y + (size_t)t * e.y_stride, col, e.y_dtype, v * routed_scale);
}

} /* namespace exl3 */
#endif
