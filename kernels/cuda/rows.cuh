/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.cuh - where rows come from and go to: one operand or a row table, any dtype, padded columns.
 *
 * Kernels see a row's x as fp16 products x * suh, 8 at a time, and hand over y as floats, 4 at a time.
 * Columns at and beyond the logical size are read as zero and not written, unless the row has stored
 * sizes. x and y are 16-byte aligned; their rows, and shards of logical sizes in y, may start at any element
 * (dense rows of an odd width do). Rows of x that are not 16-byte aligned are read one element at a time.
 */
#ifndef EXL3_CUDA_ROWS_CUH
#define EXL3_CUDA_ROWS_CUH

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

#include <cuda_bf16.h>

namespace exl3
{

/* The part of struct exl3_cuda_linear that says where rows are; a kernel parameter. */
struct rows {
	const struct exl3_cuda_row *table; /* NULL, or m rows, for the sides that are not private */
	const char *x;
	char *y;
	uint32_t x_stride, y_stride; /* bytes */
	uint32_t k, k_log;
	uint8_t x_dtype, y_dtype;
	bool x_table, y_table;
	bool x_stored, y_stored;
};

static inline rows rows_of(const struct exl3_cuda_linear *a)
{
	rows r{};

	r.table = a->table;
	r.x = (const char *)a->x;
	r.y = (char *)a->y;
	r.x_stride = a->x_stride;
	r.y_stride = a->y_stride;
	r.k = a->shard[0].k;
	r.k_log = a->shard[0].k_log;
	r.x_dtype = a->x_dtype;
	r.y_dtype = a->y_dtype;
	r.x_table = a->table && !a->x_private;
	r.y_table = a->table && !a->y_private;
	r.x_stored = a->stored || a->x_private;
	r.y_stored = a->stored || a->y_private;
	return r;
}

#ifdef __CUDACC__

struct row_in {
	const char *x;
	uint32_t limit; /* columns that exist */
	uint32_t dtype;
};

struct row_out {
	char *y;
	uint32_t dtype;
	bool stored;
};

EXL3_DEV row_in row_source(const rows &r, uint32_t token)
{
	row_in s;

	if (r.x_table) {
		const struct exl3_cuda_row *t = r.table + token;

		s.x = (const char *)t->x;
		s.limit = t->stored ? r.k : r.k_log;
		s.dtype = t->x_dtype;
	} else {
		s.x = r.x + (size_t)token * r.x_stride;
		s.limit = r.x_stored ? r.k : r.k_log;
		s.dtype = r.x_dtype;
	}
	return s;
}

EXL3_DEV row_out row_target(const rows &r, uint32_t token)
{
	row_out t;

	if (r.y_table) {
		const struct exl3_cuda_row *e = r.table + token;

		t.y = (char *)e->y;
		t.dtype = e->y_dtype;
		t.stored = e->stored;
	} else {
		t.y = r.y + (size_t)token * r.y_stride;
		t.dtype = r.y_dtype;
		t.stored = r.y_stored;
	}
	return t;
}

EXL3_DEV float half_bits(uint32_t b)
{
	return __half2float(__ushort_as_half((unsigned short)b));
}
EXL3_DEV float bf16_bits(uint32_t b)
{
	return __uint_as_float(b << 16);
}

EXL3_DEV uint32_t pack_f16(float lo, float hi)
{
	__half2 h = __floats2half2_rn(lo, hi);

	return *(uint32_t *)&h;
}

EXL3_DEV float load_one(const row_in &s, uint32_t i)
{
	if (i >= s.limit)
		return 0.0f;
	if (s.dtype == EXL3_F32)
		return ((const float *)s.x)[i];
	uint32_t b = ((const unsigned short *)s.x)[i];

	return s.dtype == EXL3_F16 ? half_bits(b) : bf16_bits(b);
}

EXL3_DEV uint32_t scale_pair(float lo, float hi, uint32_t suh)
{
	return pack_f16(lo * half_bits(suh & 0xffff), hi * half_bits(suh >> 16));
}

EXL3_DEV uint32_t scale_bf16(uint32_t x, uint32_t suh)
{
	return scale_pair(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u), suh);
}

/*
 * x * suh as fp16: chunk c holds columns i + 32 c .. + 7, i a multiple of 8; @suh: that of column 0. All
 * loads of a case are started before the first is used: this is latency, not throughput.
 */
EXL3_DEV void load_scaled(const row_in &s, uint32_t i, const __half *suh, uint4 (&r)[4])
{
	uint4 h[4], x[4];

#pragma unroll
	for (int c = 0; c < 4; c++)
		h[c] = *(const uint4 *)(suh + i + 32 * c);
	if (i + 104 > s.limit || (uintptr_t)s.x & 15) { /* a row's ragged end, or an odd beginning */
#pragma unroll 1
		for (int c = 0; c < 4; c++) {
			const uint32_t at = i + 32 * c;
			const uint4 o = *(const uint4 *)(suh + at);

			const uint4 v = make_uint4(
				scale_pair(load_one(s, at), load_one(s, at + 1), o.x),
				scale_pair(load_one(s, at + 2), load_one(s, at + 3), o.y),
				scale_pair(load_one(s, at + 4), load_one(s, at + 5), o.z),
				scale_pair(load_one(s, at + 6), load_one(s, at + 7), o.w));
#pragma unroll
			for (int d = 0; d < 4; d++)
				if (d == c)
					r[d] = v;
		}
		return;
	}
	if (s.dtype == EXL3_F32) {
		float4 lo[4], hi[4];

#pragma unroll
		for (int c = 0; c < 4; c++) {
			lo[c] = *(const float4 *)(s.x + (size_t)(i + 32 * c) * 4);
			hi[c] = *(const float4 *)(s.x + (size_t)(i + 32 * c) * 4 + 16);
		}
#pragma unroll
		for (int c = 0; c < 4; c++)
			r[c] = make_uint4(scale_pair(lo[c].x, lo[c].y, h[c].x),
					  scale_pair(lo[c].z, lo[c].w, h[c].y),
					  scale_pair(hi[c].x, hi[c].y, h[c].z),
					  scale_pair(hi[c].z, hi[c].w, h[c].w));
		return;
	}
#pragma unroll
	for (int c = 0; c < 4; c++)
		x[c] = *(const uint4 *)(s.x + (size_t)(i + 32 * c) * 2);
	if (s.dtype == EXL3_F16) {
#pragma unroll
		for (int c = 0; c < 4; c++)
			r[c] = make_uint4(mul_f16x2(x[c].x, h[c].x), mul_f16x2(x[c].y, h[c].y),
					  mul_f16x2(x[c].z, h[c].z), mul_f16x2(x[c].w, h[c].w));
	} else {
#pragma unroll
		for (int c = 0; c < 4; c++)
			r[c] = make_uint4(scale_bf16(x[c].x, h[c].x), scale_bf16(x[c].y, h[c].y),
					  scale_bf16(x[c].z, h[c].z), scale_bf16(x[c].w, h[c].w));
	}
}

/* The same for columns i .. i + 3, i a multiple of 4, as floats that were rounded to fp16. */
EXL3_DEV void load_scaled(const row_in &s, uint32_t i, const __half *suh, float (&v)[4])
{
	const uint2 h = *(const uint2 *)(suh + i);
	uint32_t lo, hi;

	if (i + 4 > s.limit || (uintptr_t)s.x & 15) {
		lo = scale_pair(load_one(s, i), load_one(s, i + 1), h.x);
		hi = scale_pair(load_one(s, i + 2), load_one(s, i + 3), h.y);
	} else if (s.dtype == EXL3_F32) {
		const float4 x = *(const float4 *)(s.x + (size_t)i * 4);

		lo = scale_pair(x.x, x.y, h.x);
		hi = scale_pair(x.z, x.w, h.y);
	} else {
		const uint2 x = *(const uint2 *)(s.x + (size_t)i * 2);

		lo = s.dtype == EXL3_F16 ? mul_f16x2(x.x, h.x) : scale_bf16(x.x, h.x);
		hi = s.dtype == EXL3_F16 ? mul_f16x2(x.y, h.y) : scale_bf16(x.y, h.y);
	}
	v[0] = half_bits(lo & 0xffff);
	v[1] = half_bits(lo >> 16);
	v[2] = half_bits(hi & 0xffff);
	v[3] = half_bits(hi >> 16);
}

/* y[col..col+3] = v, as far as they lie below @end. */
EXL3_DEV void store_four(const row_out &t, uint32_t col, uint32_t end, const float (&v)[4])
{
	if (t.dtype == EXL3_F32) {
		float *p = (float *)t.y + col;

		if (col + 4 <= end && !((uintptr_t)p & 15)) {
			*(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
			return;
		}
#pragma unroll
		for (int j = 0; j < 4; j++)
			if (col + j < end)
				p[j] = v[j];
		return;
	}
	unsigned short h[4];

#pragma unroll
	for (int j = 0; j < 4; j++)
		h[j] = t.dtype == EXL3_F16 ? __half_as_ushort(__float2half_rn(v[j]))
					   : __bfloat16_as_ushort(__float2bfloat16_rn(v[j]));
	unsigned short *p = (unsigned short *)t.y + col;

	if (col + 4 <= end && !((uintptr_t)p & 7)) {
		*(uint2 *)p = make_uint2(h[0] | (uint32_t)h[1] << 16, h[2] | (uint32_t)h[3] << 16);
		return;
	}
#pragma unroll
	for (int j = 0; j < 4; j++)
		if (col + j < end)
			p[j] = h[j];
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
