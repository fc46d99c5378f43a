/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_input.cuh - the routed block's input transform for many rows: one pass over x for all projections.
 *
 * Eight lanes share a Hadamard block of 128: lane c has elements 8c .. 8c + 7 and 64 + 8c .. 64 + 8c + 7, so index bits
 * 0, 1, 2, 6 are registers and 3..5 lanes; a lane's 16 bytes of an image row are one chunk of its swizzle.
 */
#ifndef EXL3_CUDA_MOE_INPUT_CUH
#define EXL3_CUDA_MOE_INPUT_CUH

#include "kernels/cuda/moe_steps.cuh"

namespace exl3
{

/* Eight elements of a row of x from a multiple of 8 on, zero from @limit on. */
EXL3_DEV void load_x8(const char *x, int dtype, uint32_t col, uint32_t limit, float *v)
{
	const char *p = x + (size_t)col * 2;
	float part[2][4];

	if (dtype != EXL3_F32 && col + 8 <= limit && !((uintptr_t)p & 15)) {
		const uint4 w = *(const uint4 *)p;
		const uint32_t h[4] = {w.x, w.y, w.z, w.w};

#pragma unroll
		for (int j = 0; j < 4; j++) {
			v[2 * j] = dtype == EXL3_BF16 ? __uint_as_float(h[j] << 16) : moe_half(h[j] & 0xffff);
			v[2 * j + 1] = dtype == EXL3_BF16 ? __uint_as_float(h[j] & 0xffff0000u) : moe_half(h[j] >> 16);
		}
		return;
	}
	load_x(x, dtype, col, limit, part[0]);
	load_x(x, dtype, col + 4, limit, part[1]);
#pragma unroll
	for (int j = 0; j < 8; j++)
		v[j] = part[j / 4][j % 4];
}

/*
 * Hadamard of 16 columns of the lane times suh, of the block that 8 lanes have: column 64 (i / 8) + 8 c + i % 8.
 * Returns the largest magnitude.
 */
EXL3_DEV float moe_transform16(const __half *suh, const float (&x)[16], float (&v)[16])
{
	const uint32_t lane = threadIdx.x & 31;
	float biggest = 0.0f;

#pragma unroll
	for (int j = 0; j < 2; j++) {
		const uint4 w = *(const uint4 *)(suh + 64 * j);
		const uint32_t h[4] = {w.x, w.y, w.z, w.w};

#pragma unroll
		for (int i = 0; i < 4; i++) {
			v[8 * j + 2 * i] = x[8 * j + 2 * i] * moe_half(h[i] & 0xffff);
			v[8 * j + 2 * i + 1] = x[8 * j + 2 * i + 1] * moe_half(h[i] >> 16);
		}
	}
#pragma unroll
	for (int s = 1; s < 16; s *= 2)
#pragma unroll
		for (int i = 0; i < 16; i++)
			if (!(i & s)) {
				const float a = v[i], b = v[i | s];

				v[i] = a + b;
				v[i | s] = a - b;
			}
#pragma unroll
	for (int s = 1; s < 8; s *= 2) {
		const float sign = lane & s ? -1.0f : 1.0f;

#pragma unroll
		for (int i = 0; i < 16; i++)
			v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], s));
	}
#pragma unroll
	for (int i = 0; i < 16; i++) {
		v[i] *= (float)EXL3_INV_SQRT128;
		biggest = moe_biggest(biggest, v[i]);
	}
	return biggest;
}

/*
 * Many rows: a warp makes a pair's rows of all images (MOE_TILES) in one pass over x, 512 columns at a time, and
 * once more where a row turns out to need a power of two.
 */
template <int PROJS>
__global__ static void __launch_bounds__(ROW_THREADS)
	input_tiles_kernel(const __grid_constant__ moe_entries en, const moe_route r, uint32_t first_proj, uint32_t k,
			   uint32_t k_log, uint32_t image_rows, char *image, size_t image_bytes, float *row_scale,
			   float *top)
{
	const uint32_t pair = (blockIdx.x * ROW_THREADS + threadIdx.x) / 32, lane = threadIdx.x & 31, c = lane & 7;

	if (pair >= r.nr_pairs) {
		grid_wait();
		return;
	}
	const uint32_t p = r.first_pair + pair;
	const exl3_cuda_moe_entry &e = entry_of_pair(en, p);
	const char *x = (const char *)e.x + (size_t)((p - e.first_pair) / e.topk) * e.x_stride;
	const uint32_t limit = e.stored ? k : k_log;
	const int dtype = e.x_dtype;
	const __half *suh[PROJS];
	float biggest[PROJS] = {}, power[PROJS];
	moe_row of;

	grid_wait();
	grid_launch_dependents();
	if (!row_of_pair(r, pair, of))
		return;
	const uint32_t rows = (of.rows + 7) / 8 * 8, token = of.row - of.first;
	char *out = image + (size_t)of.first_pad * k * 2 + token * 128 + ((c ^ token) & 7) * 16;

#pragma unroll
	for (int q = 0; q < PROJS; q++) {
		suh[q] = (const __half *)r.mats[of.expert * 3 + first_proj + q].suh;
		power[q] = 1.0f;
	}
#pragma unroll 1
	for (bool again = false;; again = true) {
#pragma unroll 1
		for (uint32_t first = 0; first < k; first += 512) {
			const uint32_t col = first + (lane >> 3) * 128 + 8 * c, at = min(col, k - 128 + 8 * c);
			float in[16], v[16];

			load_x8(x, dtype, at, limit, in);
			load_x8(x, dtype, at + 64, limit, in + 8);
#pragma unroll
			for (int q = 0; q < PROJS; q++) {
				const float most = moe_transform16(suh[q] + at, in, v), down = 1.0f / power[q];

				biggest[q] = fmaxf(biggest[q], most);
				if (col >= k)
					continue;
#pragma unroll
				for (int j = 0; j < 2; j++)
					*(uint4 *)(out + q * image_bytes + (size_t)(col / 64 + j) * rows * 128) =
						make_uint4(moe_pack(v[8 * j] * down, v[8 * j + 1] * down),
							   moe_pack(v[8 * j + 2] * down, v[8 * j + 3] * down),
							   moe_pack(v[8 * j + 4] * down, v[8 * j + 5] * down),
							   moe_pack(v[8 * j + 6] * down, v[8 * j + 7] * down));
			}
		}
		bool fits = true;

#pragma unroll
		for (int q = 0; q < PROJS; q++) {
			for (int s = 16; s; s /= 2)
				biggest[q] = fmaxf(biggest[q], __shfl_xor_sync(~0u, biggest[q], s));
			power[q] = moe_power(biggest[q]);
			fits &= power[q] == 1.0f;
		}
		if (fits || again)
			break;
	}
	if (lane)
		return;
	top[of.row] = 1.0f;
#pragma unroll
	for (int q = 0; q < PROJS; q++)
		row_scale[(size_t)q * image_rows + of.row] = power[q];
}

} /* namespace exl3 */
#endif
