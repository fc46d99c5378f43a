/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.cuh - where rows come from and go to: one operand or a row table, any dtype, padded columns.
 *
 * Kernels see a row's x as fp16 products x * suh, 4 or 32 at a time, and hand over y as floats, 4 at a time.
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

EXL3_DEV uint32_t scale_pair(float lo, float hi, uint32_t suh)
{
	return pack_f16(lo * half_bits(suh & 0xffff), hi * half_bits(suh >> 16));
}

EXL3_DEV uint32_t scale_bf16(uint32_t x, uint32_t suh)
{
	return scale_pair(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u), suh);
}

/*
 * A lane's part of a row on its way from memory, with its scales. Asking and using are two steps, so that
 * other work is put in between: this is latency, not throughput.
 */
struct raw_four {
	uint4 x; /* columns i .. i + 3, i a multiple of 4: 16-bit values in x.x and x.y, or floats */
	uint2 h; /* suh */
	uint32_t dtype;
};

struct raw_rows {
	uint4 lo[4], hi[4]; /* chunk c: columns i + 32 c .. + 7, i a multiple of 8; hi: the second four floats */
	uint4 h[4];
	uint32_t dtype;
};

/* Columns at .. at + n - 1 of a row that ends among them or begins anywhere, n 4 or 8. Small, not fast. */
EXL3_DEV void load_ragged(const row_in &s, uint32_t at, int n, uint4 &lo, uint4 &hi)
{
	lo = hi = make_uint4(0, 0, 0, 0);
#pragma unroll 1
	for (int j = n - 1; j >= 0; j--) {
		const uint32_t i = at + (uint32_t)j;
		uint32_t b = 0;

		if (s.dtype == EXL3_F32) {
			if (i < s.limit)
				b = ((const uint32_t *)s.x)[i];
			hi = make_uint4(lo.w, hi.x, hi.y, hi.z);
			lo = make_uint4(b, lo.x, lo.y, lo.z);
		} else {
			if (i < s.limit)
				b = ((const unsigned short *)s.x)[i];
			lo = make_uint4(lo.x << 16 | b, lo.y << 16 | lo.x >> 16,
					lo.z << 16 | lo.y >> 16, lo.w << 16 | lo.z >> 16);
		}
	}
}

/* @suh: that of column 0. */
EXL3_DEV void load_raw(const row_in &s, uint32_t i, const __half *suh, raw_four &r)
{
	r.h = *(const uint2 *)(suh + i);
	r.dtype = s.dtype;
	if (i + 4 > s.limit || (uintptr_t)s.x & 15) {
		uint4 none;

		load_ragged(s, i, 4, r.x, none);
	} else if (s.dtype == EXL3_F32) {
		r.x = *(const uint4 *)(s.x + (size_t)i * 4);
	} else {
		const uint2 v = *(const uint2 *)(s.x + (size_t)i * 2);

		r.x = make_uint4(v.x, v.y, 0, 0);
	}
}

EXL3_DEV void load_raw(const row_in &s, uint32_t i, const __half *suh, raw_rows &r)
{
#pragma unroll
	for (int c = 0; c < 4; c++)
		r.h[c] = *(const uint4 *)(suh + i + 32 * c);
	r.dtype = s.dtype;
	if (i + 104 > s.limit || (uintptr_t)s.x & 15) { /* a row's ragged end, or an odd beginning */
#pragma unroll 1
		for (int c = 0; c < 4; c++) {
			uint4 lo, hi;

			load_ragged(s, i + 32 * c, 8, lo, hi);
#pragma unroll
			for (int d = 0; d < 3; d++) {
				r.lo[d] = r.lo[d + 1];
				r.hi[d] = r.hi[d + 1];
			}
			r.lo[3] = lo;
			r.hi[3] = hi;
		}
	} else if (s.dtype == EXL3_F32) {
#pragma unroll
		for (int c = 0; c < 4; c++) {
			r.lo[c] = *(const uint4 *)(s.x + (size_t)(i + 32 * c) * 4);
			r.hi[c] = *(const uint4 *)(s.x + (size_t)(i + 32 * c) * 4 + 16);
		}
	} else {
#pragma unroll
		for (int c = 0; c < 4; c++)
			r.lo[c] = *(const uint4 *)(s.x + (size_t)(i + 32 * c) * 2);
	}
}

EXL3_DEV uint32_t scale_bits(uint32_t lo, uint32_t hi, uint32_t suh)
{
	return scale_pair(__uint_as_float(lo), __uint_as_float(hi), suh);
}

/* x * suh, rounded to fp16; here as floats. */
EXL3_DEV void scale_raw(const raw_four &r, float (&v)[4])
{
	uint32_t lo, hi;

	if (r.dtype == EXL3_F32) {
		lo = scale_bits(r.x.x, r.x.y, r.h.x);
		hi = scale_bits(r.x.z, r.x.w, r.h.y);
	} else {
		lo = r.dtype == EXL3_F16 ? mul_f16x2(r.x.x, r.h.x) : scale_bf16(r.x.x, r.h.x);
		hi = r.dtype == EXL3_F16 ? mul_f16x2(r.x.y, r.h.y) : scale_bf16(r.x.y, r.h.y);
	}
	v[0] = half_bits(lo & 0xffff);
	v[1] = half_bits(lo >> 16);
	v[2] = half_bits(hi & 0xffff);
	v[3] = half_bits(hi >> 16);
}

EXL3_DEV void scale_raw(const raw_rows &r, uint4 (&v)[4])
{
	if (r.dtype == EXL3_F16) {
#pragma unroll
		for (int c = 0; c < 4; c++)
			v[c] = make_uint4(
				mul_f16x2(r.lo[c].x, r.h[c].x), mul_f16x2(r.lo[c].y, r.h[c].y),
				mul_f16x2(r.lo[c].z, r.h[c].z), mul_f16x2(r.lo[c].w, r.h[c].w));
	} else if (r.dtype == EXL3_F32) {
#pragma unroll
		for (int c = 0; c < 4; c++)
			v[c] = make_uint4(scale_bits(r.lo[c].x, r.lo[c].y, r.h[c].x),
					  scale_bits(r.lo[c].z, r.lo[c].w, r.h[c].y),
					  scale_bits(r.hi[c].x, r.hi[c].y, r.h[c].z),
					  scale_bits(r.hi[c].z, r.hi[c].w, r.h[c].w));
	} else {
#pragma unroll
		for (int c = 0; c < 4; c++)
			v[c] = make_uint4(scale_bf16(r.lo[c].x, r.h[c].x),
					  scale_bf16(r.lo[c].y, r.h[c].y),
					  scale_bf16(r.lo[c].z, r.h[c].z),
					  scale_bf16(r.lo[c].w, r.h[c].w));
	}
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
