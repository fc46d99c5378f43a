/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla.c - sparse attention over a latent cache: one item is a query with a group of its heads.
 *
 *       s[h][j] = scale * q[h] . c[slot[j]]     p = softmax(s)     o[h] = sum of p[h][j] c[slot[j]][:value_dim]
 *
 * A thread converts CPU_MLA_SLOTS cache rows to f32 and uses them for all heads of its group, with a
 * running softmax; blocks follow each other in the order of the indices, so a query's bits depend
 * on that query alone.
 */
#include "kernels/cpu/jobs.h"

#include <errno.h>
#include <math.h>

struct query {
	uint32_t entry, row, count; /* valid slots */
	uint64_t skipped;
	uint64_t *slot; /* [topk] private copy, checked */
};

static size_t bytes_per_query(const struct exl3_mla_geometry *g)
{
	return sizeof(struct query) + (size_t)g->topk * sizeof(uint64_t) + 64;
}

#define FIXED_BYTES 4096u

bool cpu_mla_supports(const struct exl3_dev *dev, const struct exl3_work *work)
{
	const struct exl3_mla_geometry *g = &work->u.mla.geometry;

	return work->op == EXL3_OP_MLA_DECODE && g->dim && g->dim % 16 == 0 &&
	       g->dim <= EXL3_MLA_DIM_MAX && g->value_dim && g->value_dim % 16 == 0 &&
	       g->value_dim <= g->dim && g->page_rows && g->table_queries && g->heads && g->heads <= EXL3_MLA_HEADS_MAX &&
	       bytes_per_query(g) + FIXED_BYTES <= dev->ws_bytes;
}

/* Each index and length is read once and checked in our copy: its owner may change it at any time. */
static void read_slots(const struct exl3_work *work, struct query *q)
{
	const struct exl3_mla_geometry *g = &work->u.mla.geometry;
	const struct exl3_mla_cache *c = &work->u.mla.caches[q->entry];
	const char *indices =
		(const char *)c->indices +
		(size_t)((q->row + c->table_first) / g->table_queries) * g->indices_stride;
	uint32_t keys = g->topk;

	q->count = 0;
	q->skipped = 0;
	if (c->lengths) {
		int32_t length = ((const volatile int32_t *)c->lengths)[q->row];

		q->skipped += length < 0 || (uint32_t)length > g->topk;
		keys = length < 0 ? 0 : (uint32_t)length < g->topk ? (uint32_t)length : g->topk;
	}
	for (uint32_t j = 0; j < keys; j += g->page_rows) {
		int64_t page = g->indices_dtype == EXL3_I64
				       ? ((const volatile int64_t *)indices)[j / g->page_rows]
				       : ((const volatile int32_t *)indices)[j / g->page_rows];
		uint32_t rows = keys - j < g->page_rows ? keys - j : g->page_rows;

		if (page < 0 || (uint64_t)page >= g->slots / g->page_rows) {
			q->skipped += page != -1;
			continue;
		}
		for (uint32_t i = 0; i < rows; i++)
			q->slot[q->count++] = (uint64_t)page * g->page_rows + i;
	}
}

/* A cache row as f32. */
static void convert_row(const struct cpu_isa *isa, const char *row, uint8_t dtype, uint32_t dim,
			float *out)
{
	float factor[EXL3_RECORD_VALUES / EXL3_RECORD_BLOCK];

	if (dtype != EXL3_E4M3_656) {
		isa->convert(row, dtype, 1, dim, out);
		return;
	}
	memcpy(factor, row + EXL3_RECORD_VALUES, sizeof(factor));
	for (unsigned i = 0; i < EXL3_RECORD_VALUES / EXL3_RECORD_BLOCK; i++)
		isa->convert(row + i * EXL3_RECORD_BLOCK, EXL3_E4M3, factor[i], EXL3_RECORD_BLOCK,
			     out + i * EXL3_RECORD_BLOCK);
	isa->convert(row + EXL3_RECORD_VALUES + sizeof(factor), EXL3_BF16, 1,
		     EXL3_RECORD_DIM - EXL3_RECORD_VALUES, out + EXL3_RECORD_VALUES);
}

static void store_head(const struct exl3_work *work, const struct cpu_isa *isa,
		       const struct query *q, uint32_t head, struct cpu_mla_state *st, unsigned h)
{
	const struct exl3_mla_geometry *g = &work->u.mla.geometry;
	const struct exl3_mla_cache *c = &work->u.mla.caches[q->entry];
	const struct exl3_rows *rows = &work->rows[q->entry];
	char *y = (char *)rows->y + (size_t)q->row * rows->y_stride;
	float *o = st->o[h], factor = q->count ? c->kv_scale / st->sum[h] : 0;

	isa->convert(o, EXL3_F32, factor, g->value_dim, o);
	for (uint32_t d = 0; d < g->value_dim; d += EXL3_HAD)
		isa->store(y, rows->y_dtype, (size_t)head * g->value_dim + d, o + d,
			   g->value_dim - d < EXL3_HAD ? g->value_dim - d : EXL3_HAD);
	if (c->lse)
		c->lse[(size_t)q->row * g->heads + head] =
			q->count ? st->top[h] + logf(st->sum[h]) : -INFINITY;
}

static void run_group(const struct exl3_work *work, const struct cpu_isa *isa,
		      const struct query *q, uint32_t head, struct cpu_mla_state *st)
{
	const struct exl3_mla_geometry *g = &work->u.mla.geometry;
	const struct exl3_mla_cache *c = &work->u.mla.caches[q->entry];
	const struct exl3_rows *rows = &work->rows[q->entry];
	const char *x = (const char *)rows->x + (size_t)q->row * rows->x_stride;
	size_t head_bytes = (size_t)g->dim * exl3_dtype_bytes(rows->x_dtype);
	unsigned heads = g->heads - head < CPU_MLA_HEADS ? g->heads - head : CPU_MLA_HEADS;

	for (unsigned h = 0; h < CPU_MLA_HEADS; h++) {
		if (h < heads)
			isa->convert(x + (head + h) * head_bytes, rows->x_dtype,
				     c->scale * c->kv_scale, g->dim, st->q[h]);
		else
			memset(st->q[h], 0, g->dim * sizeof(float));
		memset(st->o[h], 0, g->value_dim * sizeof(float));
		st->top[h] = -INFINITY;
		st->sum[h] = 0;
	}
	for (uint32_t j = 0; j < q->count; j += CPU_MLA_SLOTS) {
		unsigned slots = q->count - j < CPU_MLA_SLOTS ? q->count - j : CPU_MLA_SLOTS;

		for (unsigned i = 0; i < slots; i++) {
			if (i + 4 < slots)
				__builtin_prefetch((const char *)c->cache +
						   q->slot[j + i + 4] * g->cache_stride);
			convert_row(isa, (const char *)c->cache + q->slot[j + i] * g->cache_stride,
				    g->cache_dtype, g->dim, st->kv[i]);
		}
		isa->attend(st, heads, slots, g->dim, g->value_dim);
	}
	for (unsigned h = 0; h < heads; h++)
		store_head(work, isa, q, head + h, st, h);
}

static void fill_queries(const struct exl3_work *work, uint64_t first, uint32_t count,
			 struct query *query, uint64_t *slot)
{
	uint64_t base = 0;
	uint32_t entry = 0;

	for (uint32_t i = 0; i < count; i++) {
		while (first + i >= base + work->rows[entry].m)
			base += work->rows[entry++].m;
		query[i] = (struct query){.entry = entry,
					  .row = (uint32_t)(first + i - base),
					  .slot = slot + (size_t)i * work->u.mla.geometry.topk};
	}
}

int cpu_mla_run(struct exl3_dev *dev, const struct exl3_work *work, const struct cpu_isa *isa)
{
	const struct exl3_mla_geometry *g = &work->u.mla.geometry;
	const uint32_t groups = (g->heads + CPU_MLA_HEADS - 1) / CPU_MLA_HEADS;
	struct cpu_bump b = {dev->ws, dev->ws_bytes};
	uint64_t total = cpu_rows_total(work), fit;
	struct query *query;
	uint64_t *slot;

	fit = (dev->ws_bytes - FIXED_BYTES) / bytes_per_query(g);
	fit = fit < total ? fit : total;
	query = CPU_BUMP(&b, struct query, fit);
	slot = CPU_BUMP(&b, uint64_t, fit * g->topk);
	if (!query || !slot)
		return -ENOMEM;
	for (uint64_t first = 0; first < total; first += fit) {
		uint32_t count = (uint32_t)(total - first < fit ? total - first : fit);
		uint64_t products = (uint64_t)count * g->topk * g->dim * (g->heads + 8);
		_Atomic uint64_t next = 0;

		fill_queries(work, first, count, query, slot);
#pragma omp parallel num_threads(cpu_team(dev, products))
		{
			struct cpu_mla_state *st = &dev->mla[omp_get_thread_num()];
			uint64_t item, end;

			cpu_share(count, &item, &end);
			for (; item < end; item++)
				read_slots(work, &query[item]);
#pragma omp barrier
			while ((item = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed)) <
			       (uint64_t)count * groups)
				run_group(work, isa, &query[item / groups],
					  (uint32_t)(item % groups) * CPU_MLA_HEADS, st);
		}
		for (uint32_t i = 0; work->skipped && i < count; i++)
			work->skipped[query[i].entry] += query[i].skipped;
	}
	return 0;
}
