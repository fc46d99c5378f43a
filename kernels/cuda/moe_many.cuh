/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_many.cuh - what the products for many rows (moe_team.cuh, moe_tall.cuh) do with their sums.
 *
 * Sums of 128 columns come through shared memory, [row][PITCH] floats, column bit 3 of the output Hadamard
 * done in the fragments. Eight lanes have a row: lane c of them columns 32j + 4c + i as v[4j + i], so column
 * bits 0, 1, 5, 6 are registers and 2, 3, 4 lane bits 0, 1, 2.
 */
#ifndef EXL3_CUDA_MOE_MANY_CUH
#define EXL3_CUDA_MOE_MANY_CUH

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/moe_image.cuh"
#include "kernels/cuda/moe_many.h"
#include "kernels/cuda/moe_many_ptx.cuh"
#include "kernels/cuda/trellis.cuh"

namespace exl3
{

constexpr int MANY_PITCH = 132; /* floats of a row in the buffer: writes by fragment meet no bank twice */

/* D fragments of @rows tokens from d[0] on, 16 columns, to @out, which is the lane's (token 2q, column g). */
template <int ROWS> EXL3_DEV void many_put(const float *d, float *out)
{
#pragma unroll
	for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
		for (int b = 0; b < 2; b++) {
			const float lo = d[4 * j + b], hi = d[4 * j + 2 + b];
			float *to = out + (8 * j + b) * MANY_PITCH;

			to[0] = lo + hi;
			to[8] = lo - hi;
		}
}

/* Hadamard over the 16 columns of the lane and lane bits 0 and 2; with @ALL also bit 1. Not scaled. */
template <bool ALL> EXL3_DEV void many_hadamard(float (&v)[16])
{
	const uint32_t lane = threadIdx.x & 31;

#pragma unroll
	for (int s = 1; s < 16; s *= 2)
#pragma unroll
		for (int i = 0; i < 16; i++)
			if (!(i & s)) {
				const float x = v[i], y = v[i | s];

				v[i] = x + y;
				v[i | s] = x - y;
			}
#pragma unroll
	for (int s = 1; s < 8; s *= 2) {
		const float sign = lane & s ? -1.0f : 1.0f;

		if (s == 2 && !ALL)
			continue;
#pragma unroll
		for (int i = 0; i < 16; i++)
			v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], s));
	}
}

/* A row of the buffer to outputs of projection @proj of the unit: Hadamard, scales, bias. All lanes. */
EXL3_DEV void many_output(const moe_unit &u, uint32_t proj, uint32_t strip, float scale, const float *row, float (&v)[16])
{
	const uint32_t c = threadIdx.x & 7;
	const __half *svh = u.svh[proj];
	const float *bias = u.bias[proj];

#pragma unroll
	for (int j = 0; j < 4; j++) {
		const float4 t = *(const float4 *)(row + 32 * j + 4 * c);

		v[4 * j] = t.x;
		v[4 * j + 1] = t.y;
		v[4 * j + 2] = t.z;
		v[4 * j + 3] = t.w;
	}
	many_hadamard<false>(v);
	scale *= (float)EXL3_INV_SQRT128;
#pragma unroll
	for (int j = 0; j < 4; j++) {
		const uint32_t col = strip * 128 + 32 * j + 4 * c;
		float h[4];
		float4 b = make_float4(0, 0, 0, 0);

		moe_halves(svh + col, h);
		if (bias)
			b = *(const float4 *)(bias + col);
		v[4 * j] = v[4 * j] * scale * h[0] + b.x;
		v[4 * j + 1] = v[4 * j + 1] * scale * h[1] + b.y;
		v[4 * j + 2] = v[4 * j + 2] * scale * h[2] + b.z;
		v[4 * j + 3] = v[4 * j + 3] * scale * h[3] + b.w;
	}
}

/* down: outputs of a row to out. */
EXL3_DEV void many_store(const moe_gemm_args &a, uint32_t row, uint32_t strip, const float (&v)[16])
{
	float *out = a.out + (size_t)row * a.n + strip * 128 + 4 * (threadIdx.x & 7);

#pragma unroll
	for (int j = 0; j < 4; j++)
		*(float4 *)(out + 32 * j) = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
}

/*
 * gate and up: a row's outputs @g and @v through the activation, times suh, Hadamard, and into down's image. All lanes;
 * where @live is false nothing is stored.
 */
EXL3_DEV void many_image(const moe_gemm_args &a, const moe_unit &u, uint32_t row, uint32_t strip, bool live,
			 const float (&g)[16], float (&v)[16])
{
	const uint32_t c = threadIdx.x & 7;
	float biggest = 0.0f;

#pragma unroll
	for (int i = 0; i < 16; i++)
		v[i] = activate(g[i], v[i], a.act, a.limit);
#pragma unroll
	for (int j = 0; j < 4; j++) {
		const uint32_t col = strip * 128 + 32 * j + 4 * c;
		float h[4];

		moe_halves(u.suh_down + col, h);
#pragma unroll
		for (int i = 0; i < 4; i++)
			v[4 * j + i] = col + i < a.n_log ? v[4 * j + i] * h[i] : 0.0f;
	}
	many_hadamard<true>(v);
#pragma unroll
	for (int i = 0; i < 16; i++) {
		v[i] *= (float)EXL3_INV_SQRT128;
		biggest = moe_biggest(biggest, v[i]);
	}
#pragma unroll
	for (int s = 1; s < 8; s *= 2)
		biggest = fmaxf(biggest, __shfl_xor_sync(~0u, biggest, s));
	if (!live)
		return;
	const moe_place to = {a.next_image, MOE_TILES, a.n, row, u.first, u.rows, u.first_pad};
	const float power = moe_power(biggest), down = 1.0f / power;

#pragma unroll
	for (int j = 0; j < 4; j++)
		moe_store4(to, strip * 128 + 32 * j + 4 * c, v + 4 * j, down);
	if (c == 0) {
		a.next_scale[(size_t)row * (a.n / 128) + strip] = power;
		if (power > 1.0f)
			atomicMax(a.next_top + row, __float_as_uint(power));
	}
}

} /* namespace exl3 */
#endif
