/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_sums.cuh - how few-row kernels add a strip's sums over warps and blocks, and make y of them; see gemv.cuh. */
#ifndef EXL3_CUDA_GEMV_SUMS_CUH
#define EXL3_CUDA_GEMV_SUMS_CUH

#include "kernels/cuda/gemv_cfg.cuh"

namespace exl3
{

#ifdef __CUDACC__

/* Four sums to another block, and from it. */
EXL3_DEV uint32_t slot_bits(float v)
{
	const uint32_t b = ~__float_as_uint(v);

	return b ? b : ~0x7fffffffu;
}

EXL3_DEV void slot_send(uint32_t *slot, const float (&v)[4])
{
	store_relaxed(slot, make_uint4(slot_bits(v[0]), slot_bits(v[1]), slot_bits(v[2]),
				       slot_bits(v[3])));
}

EXL3_DEV void slot_add(uint32_t *slot, uint4 w, float (&v)[4])
{
	while (!w.x || !w.y || !w.z || !w.w)
		w = load_relaxed(slot);
	*(uint4 *)slot = make_uint4(0, 0, 0, 0);
	v[0] += __uint_as_float(~w.x);
	v[1] += __uint_as_float(~w.y);
	v[2] += __uint_as_float(~w.z);
	v[3] += __uint_as_float(~w.w);
}

/* What the output side of a token needs beside its sums; loaded while those are on their way. */
struct gemv_out {
	row_out row;
	float4 bias;
	uint2 svh;
	uint32_t n;
};

EXL3_DEV gemv_out gemv_prepare(const gemv_args &a, const gemv_shard &s, uint32_t strip,
			       uint32_t token, uint32_t lane)
{
	gemv_out o;

	o.n = (strip - s.strip) * 128 + 4 * lane;
	o.svh = *(const uint2 *)(s.svh + o.n);
	o.bias = s.bias ? *(const float4 *)(s.bias + o.n) : make_float4(0, 0, 0, 0);
	o.row = row_target(a.r, token);
	return o;
}

/* Output side of one token of a strip, by a warp; v: the strip's columns 4 * lane .. + 3. */
EXL3_DEV void gemv_output(const gemv_out &o, const gemv_shard &s, float (&v)[4])
{
	had_warp(v);
	v[0] = v[0] * HAD_OUT_SCALE * half_bits(o.svh.x & 0xffff) + o.bias.x;
	v[1] = v[1] * HAD_OUT_SCALE * half_bits(o.svh.x >> 16) + o.bias.y;
	v[2] = v[2] * HAD_OUT_SCALE * half_bits(o.svh.y & 0xffff) + o.bias.z;
	v[3] = v[3] * HAD_OUT_SCALE * half_bits(o.svh.y >> 16) + o.bias.w;
	if (o.row.stored)
		store_four(o.row, s.base_stored + o.n, s.base_stored + s.nt * 16, v);
	else
		store_four(o.row, s.base_log + o.n, s.base_log + s.n_log, v);
}

/*
 * A strip's sums over all warps, then over blocks. @lo: where the block's part of the strip begins;
 * @owner: the block's range reaches the end of the strip.
 */
template <class C>
EXL3_DEV void gemv_reduce(const gemv_args &a, const gemv_shard &s, uint32_t strip, const float *red,
			  uint32_t token0, uint32_t lo, bool owner)
{
	constexpr int BATCH = 4; /* slots asked for at a time */
	uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

	keep(warp);
	keep(lane);
	const uint32_t tokens = min(a.m - token0, (uint32_t)C::RED);
	const uint32_t part = min(a.m, (uint32_t)C::RED) * C::ROW;
	const uint32_t half = 4 * lane / (C::NT * 16), col = 4 * lane % (C::NT * 16);
	const uint32_t first = strip * a.kt;
	const size_t stride = (size_t)a.m * 128;
	uint32_t c = blockIdx.x;

	/* Blocks below this one that hold earlier parts of the strip. */
	if (owner && lo > first)
		do
			c--;
		while (gemv_begin(a, c) > first);
#pragma unroll 1
	for (uint32_t t = warp; t < tokens; t += C::WARPS) {
		const uint32_t token = token0 + t;
		uint32_t *slot = a.slots + token * 128 + 4 * lane;
		uint4 w[BATCH];
		gemv_out out;
		float v[4] = {0, 0, 0, 0};

		if (owner)
			out = gemv_prepare(a, s, strip, token, lane);
#pragma unroll 4
		for (int kg = 0; kg < C::KG; kg++) {
			const float4 r = *(const float4 *)(red + (kg * C::HALVES + half) * part +
							   t * C::ROW + col);

			v[0] += r.x;
			v[1] += r.y;
			v[2] += r.z;
			v[3] += r.w;
		}
		if (a.ablate & ABLATE_REDUCE) {
			if (v[0] == 1.2345f)
				a.slots[0] = 0;
			continue;
		}
		if (!owner) {
			slot_send(slot + blockIdx.x * stride, v);
			continue;
		}
		/* In ascending order of blocks. */
#pragma unroll
		for (int i = 0; i < BATCH; i++)
			if (c + i < blockIdx.x)
				w[i] = load_relaxed(slot + (c + i) * stride);
#pragma unroll
		for (int i = 0; i < BATCH; i++)
			if (c + i < blockIdx.x)
				slot_add(slot + (c + i) * stride, w[i], v);
#pragma unroll 1
		for (uint32_t d = c + BATCH; d < blockIdx.x; d++)
			slot_add(slot + d * stride, load_relaxed(slot + d * stride), v);
		__syncwarp();
		gemv_output(out, s, v);
	}
}

/* A token's sums of all warps, this lane's four columns. */
template <class C>
EXL3_DEV void gemv_add_parts(const float *red, uint32_t part, uint32_t t, float (&v)[4])
{
	const uint32_t lane = threadIdx.x & 31;
	const uint32_t half = 4 * lane / (C::NT * 16), col = 4 * lane % (C::NT * 16);

	v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
	for (int kg = 0; kg < C::KG; kg++) {
		const float4 r = *(const float4 *)(red + (kg * C::HALVES + half) * part + t * C::ROW +
						   col);

		v[0] += r.x;
		v[1] += r.y;
		v[2] += r.z;
		v[3] += r.w;
	}
}

/*
 * As gemv_reduce(), same sums in the same order, for few blocks to a strip: slots that are late are asked for again
 * together, where gemv_reduce() waits for one after the other and so pays a latency for each that is late.
 */
template <class C>
EXL3_DEV void gemv_reduce_together(const gemv_args &a, const gemv_shard &s, uint32_t strip,
				   const float *red, uint32_t token0, uint32_t lo, bool owner)
{
	constexpr uint32_t BATCH = 4;
	uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

	keep(warp);
	keep(lane);
	const uint32_t tokens = min(a.m - token0, (uint32_t)C::RED);
	const uint32_t part = min(a.m, (uint32_t)C::RED) * C::ROW;
	const uint32_t first = strip * a.kt;
	const size_t stride = (size_t)a.m * 128;
	uint32_t c = blockIdx.x;

	if (a.ablate & ABLATE_REDUCE)
		return;
	if (owner && lo > first)
		do
			c--;
		while (gemv_begin(a, c) > first);
#pragma unroll 1
	for (uint32_t t = warp; t < tokens; t += C::WARPS) {
		uint32_t *slot = a.slots + (token0 + t) * 128 + 4 * lane;
		gemv_out out;
		float v[4];

		if (!owner) {
			gemv_add_parts<C>(red, part, t, v);
			slot_send(slot + blockIdx.x * stride, v);
			continue;
		}
		out = gemv_prepare(a, s, strip, token0 + t, lane);
		gemv_add_parts<C>(red, part, t, v);
		for (uint32_t d = c; d < blockIdx.x; d += BATCH) {
			uint4 w[BATCH];
			bool late = true;

#pragma unroll
			for (uint32_t i = 0; i < BATCH; i++)
				w[i] = make_uint4(0, 0, 0, 0);
			while (late) {
				late = false;
#pragma unroll
				for (uint32_t i = 0; i < BATCH; i++)
					if (d + i < blockIdx.x && (!w[i].x || !w[i].y || !w[i].z || !w[i].w)) {
						w[i] = load_relaxed(slot + (d + i) * stride);
						late = true;
					}
			}
			/* All are there: slot_add() adds and empties, in ascending order of blocks. */
#pragma unroll
			for (uint32_t i = 0; i < BATCH; i++)
				if (d + i < blockIdx.x)
					slot_add(slot + (d + i) * stride, w[i], v);
		}
		__syncwarp();
		gemv_output(out, s, v);
	}
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
