/* SPDX-License-Identifier: Apache-2.0 */
/* mla.c - sparse latent attention: sizes, cache types, holes, bad slots, bad rows, lse. */
#include "tests/checkkernel/ck.h"

#include "kernels/cpu/ref.h"

#include <math.h>
#include <string.h>

#define ENTRIES 4
#define SLOTS   150u

struct shape {
	uint32_t heads, dim, value_dim, topk;
	uint8_t cache_dtype, indices_dtype;
	uint32_t page_rows, table_queries, table_first;
	bool lengths;
	uint32_t cache_gap, indices_gap;
	bool garbage, no_lse, bad_rows;
	float kv_scale;
	uint32_t nr_entries;
	struct {
		uint32_t m;
		uint8_t x_dtype, y_dtype;
	} entry[ENTRIES];
};

struct mla {
	struct ck_buf cache[ENTRIES], indices[ENTRIES], lengths[ENTRIES];
	struct exl3_mla_cache host_caches[ENTRIES], dev_caches[ENTRIES];
	struct ck_rows rows[ENTRIES];
	struct exl3_rows host_rows[ENTRIES], dev_rows[ENTRIES];
	struct exl3_work host, dev;
};

static int64_t bad_slot(struct ck *ck, uint8_t dtype, uint32_t nr)
{
	switch (ck_below(ck, 5)) {
	case 0:
		return -2;
	case 1:
		return nr;
	case 2:
		return dtype == EXL3_I64 ? (1ll << 32) + 1 : INT32_MIN;
	case 3:
		return dtype == EXL3_I64 ? INT64_MIN : INT32_MAX;
	default:
		return nr + 1 + ck_below(ck, 1u << 30);
	}
}

static void build_indices(struct ck *ck, const struct shape *s, struct mla *m, uint32_t e,
			  uint32_t stride)
{
	const uint32_t tables =
		(s->table_first + s->entry[e].m + s->table_queries - 1) / s->table_queries;
	const uint32_t pages = SLOTS / s->page_rows;

	m->indices[e] = ck_buf_new(ck, (size_t)tables * stride);
	for (uint32_t r = 0; r < tables; r++)
		for (uint32_t j = 0; j < (s->topk + s->page_rows - 1) / s->page_rows; j++) {
			uint32_t kind = s->garbage ? ck_below(ck, 4) : 3;
			/* Every third query of garbage has nothing but holes. */
			int64_t slot = s->garbage && r % 3 == 2 ? -1
				       : kind == 0              ? -1
				       : kind == 1              ? bad_slot(ck, s->indices_dtype, pages)
								: ck_below(ck, pages);
			int32_t narrow = (int32_t)slot;
			char *at = (char *)m->indices[e].host + (size_t)r * stride;

			if (s->indices_dtype == EXL3_I64)
				memcpy(at + 8 * j, &slot, 8);
			else
				memcpy(at + 4 * j, &narrow, 4);
		}
	ck_buf_upload(ck, &m->indices[e]);
	if (!s->lengths)
		return;
	m->lengths[e] = ck_buf_new(ck, s->entry[e].m * sizeof(int32_t));
	for (uint32_t r = 0; r < s->entry[e].m; r++)
		((int32_t *)m->lengths[e].host)[r] = (int32_t)ck_below(ck, s->topk + 4) - 1;
	ck_buf_upload(ck, &m->lengths[e]);
}

/* A value of the cache: no NaN, and small enough for a softmax that is not one-hot. */
static uint8_t e4m3(struct ck *ck)
{
	return (uint8_t)ck_random(ck) & 0xbf;
}

static void put_record(struct ck *ck, char *row)
{
	float factor[4];
	uint16_t rope[64];

	for (uint32_t d = 0; d < EXL3_RECORD_VALUES; d++)
		row[d] = (char)e4m3(ck);
	for (uint32_t i = 0; i < 4; i++)
		factor[i] = (float)ck_uniform(ck, 0.1, 1);
	for (uint32_t i = 0; i < 64; i++)
		rope[i] = exl3_f32_to_bf16((float)ck_uniform(ck, -1, 1));
	memcpy(row + EXL3_RECORD_VALUES, factor, sizeof(factor));
	memcpy(row + EXL3_RECORD_VALUES + sizeof(factor), rope, sizeof(rope));
}

static void build(struct ck *ck, const struct shape *s, struct mla *m)
{
	uint32_t stride = exl3_cache_row_bytes(s->cache_dtype, s->dim) + s->cache_gap;
	uint32_t indices_stride =
		(s->topk * exl3_dtype_bytes(s->indices_dtype) + 15) / 16 * 16 + s->indices_gap;

	memset(m, 0, sizeof(*m));
	for (uint32_t e = 0; e < s->nr_entries; e++) {
		uint32_t q = s->heads * s->dim, o = s->heads * s->value_dim, mm = s->entry[e].m;

		m->cache[e] = ck_buf_new(ck, (size_t)SLOTS * stride);
		for (uint32_t r = 0; r < SLOTS; r++)
			for (uint32_t d = 0; d < s->dim; d++)
				if (s->cache_dtype == EXL3_E4M3_656) {
					put_record(ck, (char *)m->cache[e].host + (size_t)r * stride);
					break;
				} else if (s->cache_dtype == EXL3_E4M3) {
					((uint8_t *)m->cache[e].host)[(size_t)r * stride + d] =
						e4m3(ck);
				} else {
					ck_put(&m->cache[e], s->cache_dtype, stride, r, d,
					       ck_uniform(ck, -1, 1));
				}
		ck_buf_upload(ck, &m->cache[e]);
		build_indices(ck, s, m, e, indices_stride);
		m->rows[e] = ck_rows_new(ck, mm, q, o, s->entry[e].x_dtype, s->entry[e].y_dtype,
					 false, 16 * e, 48 * e);
		if (s->bad_rows) {
			ck_put(&m->rows[e].x, s->entry[e].x_dtype, m->rows[e].dev.x_stride, 0,
			       s->dim / 2, NAN);
			ck_buf_upload(ck, &m->rows[e].x);
		}
		m->host_rows[e] = m->rows[e].host;
		m->dev_rows[e] = m->rows[e].dev;
		if (!s->no_lse) {
			size_t bytes = (size_t)mm * s->heads * sizeof(float);

			m->rows[e].heads = s->heads;
			m->rows[e].lse = ck_buf_new(ck, bytes + 2 * CK_MARGIN);
			m->rows[e].ref_lse = ck_alloc(bytes);
		}
		m->host_caches[e] = (struct exl3_mla_cache){.cache = m->cache[e].host,
							    .indices = m->indices[e].host,
							    .lse = m->rows[e].ref_lse,
							    .table_first = s->table_first,
							    .lengths = (const int32_t *)m->lengths[e].host,
							    .scale = (float)(2 / sqrt(s->dim)),
							    .kv_scale = s->kv_scale};
		m->dev_caches[e] = m->host_caches[e];
		m->dev_caches[e].cache = m->cache[e].dev;
		m->dev_caches[e].indices = m->indices[e].dev;
		m->dev_caches[e].lengths = (const int32_t *)m->lengths[e].dev;
		if (!s->no_lse)
			m->dev_caches[e].lse =
				(float *)(void *)((char *)m->rows[e].lse.dev + CK_MARGIN);
	}
	m->host = (struct exl3_work){
		.op = EXL3_OP_MLA_DECODE, .rows = m->host_rows, .nr_rows = s->nr_entries};
	m->host.u.mla.caches = m->host_caches;
	m->host.u.mla.geometry = (struct exl3_mla_geometry){.heads = s->heads,
							    .dim = s->dim,
							    .value_dim = s->value_dim,
							    .topk = s->topk,
							    .slots = SLOTS,
							    .cache_stride = stride,
							    .indices_stride = indices_stride,
							    .cache_dtype = s->cache_dtype,
							    .indices_dtype = s->indices_dtype,
							    .page_rows = s->page_rows,
							    .table_queries = s->table_queries};
	m->dev = m->host;
	m->dev.rows = m->dev_rows;
	m->dev.u.mla.caches = m->dev_caches;
}

static void run_shape(struct ck *ck, const struct shape *s, const char *what)
{
	double tol_max = ck->tol_max, tol_rms = ck->tol_rms;
	struct mla m;

	if (ck_skip(ck))
		return;
	/* On the GPU q and the softmax's weights meet such rows as bf16, with an eighth of fp16's precision. */
	if (strcmp(ck->ops->name, "cpu") && (s->cache_dtype == EXL3_BF16 || s->cache_dtype == EXL3_E4M3_656)) {
		ck->tol_max *= 4;
		ck->tol_rms *= 4;
	}
	ck_case_begin(ck,
		      "mla %s: heads %u, dim %u, value %u, top %u, cache dtype %u, batch %u, o %u",
		      what, s->heads, s->dim, s->value_dim, s->topk, s->cache_dtype, s->entry[0].m,
		      s->entry[0].y_dtype);
	build(ck, s, &m);
	ck_check(ck, &m.host, &m.dev, m.rows);
	ck->tol_max = tol_max;
	ck->tol_rms = tol_rms;
	for (int e = 0; e < ENTRIES; e++) {
		ck_rows_free(&m.rows[e]);
		ck_buf_free(&m.cache[e]);
		ck_buf_free(&m.indices[e]);
		ck_buf_free(&m.lengths[e]);
	}
}

void ck_mla(struct ck *ck)
{
	static const uint8_t cache[] = {EXL3_F16, EXL3_BF16, EXL3_E4M3};
	static const uint8_t io[] = {EXL3_F32, EXL3_F16, EXL3_BF16};
	static const uint32_t heads[] = {1, 2, 4, 5, 8, 9, 16, 128};
	static const struct {
		uint32_t dim, value_dim;
	} size[] = {{16, 16}, {160, 128}, {576, 512}, {48, 32}, {640, 640}, {112, 16}};
	static const uint32_t topk[] = {1, 3, 31, 32, 33, 64, 100};
	int turns = ck->quick ? 16 : 72;

	for (int i = 0; i < turns; i++) {
		struct shape s = {.heads = heads[i % 8],
				  .dim = size[i % 6].dim,
				  .value_dim = size[i % 6].value_dim,
				  .topk = topk[i % 7],
				  .cache_dtype = cache[i % 3],
				  .indices_dtype = i % 2 ? EXL3_I64 : EXL3_I32,
				  .cache_gap = 16 * (uint32_t)(i % 4),
				  .indices_gap = 16 * (uint32_t)(i % 3),
				  .page_rows = i % 9 == 4 ? 2 : 1, /* SLOTS is even */
				  .table_queries = 1 + (uint32_t)i % 5 / 3,
				  .table_first = i % 5 == 4,
				  .lengths = i % 5 == 3 || i % 9 == 4,
				  .garbage = i % 5 > 1,
				  .no_lse = i % 7 == 6,
				  .kv_scale = i % 3 == 2 ? 0.4f : 1,
				  .nr_entries = 1 + (i % 4 == 3),
				  .entry = {{1 + (uint32_t)i % 4, io[i % 3], io[i / 3 % 3]},
					    {3, io[i / 2 % 3], io[i / 4 % 3]}}};

		if (i % 8 == 3) {
			s.cache_dtype = EXL3_E4M3_656;
			s.dim = EXL3_RECORD_DIM;
			s.value_dim = EXL3_RECORD_VALUES;
			s.kv_scale = 1;
			s.heads = heads[i / 8 % 8];
		}
		if (s.heads == 128 && i > 16)
			s.entry[0].m = 1;
		run_shape(ck, &s, "shapes");
		if (i % 8 == 5) {
			s.bad_rows = true;
			run_shape(ck, &s, "a query with NaN");
		}
	}
	/* One query each of several decoders, and requests of unlike sizes. */
	for (int i = 0; i < 8; i += ck->quick ? 2 : 1) {
		struct shape s = {.heads = i % 4 ? 16 : 64,
				  .dim = 576,
				  .value_dim = 512,
				  .topk = i < 4 ? 100 : 64,
				  .cache_dtype = cache[i % 3],
				  .indices_dtype = EXL3_I32,
				  .page_rows = 1,
				  .table_queries = 1,
				  .garbage = i % 4 > 1,
				  .kv_scale = i % 3 == 2 ? 0.4f : 1,
				  .nr_entries = ENTRIES};

		for (int e = 0; e < ENTRIES; e++) {
			s.entry[e].m = i % 8 > 5 ? 1 + (uint32_t)e : 1;
			s.entry[e].x_dtype = io[(i + e) % 3];
			s.entry[e].y_dtype = io[e % 3];
		}
		run_shape(ck, &s, "requests that meet");
	}
}
