/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref.c - the oracle: every operation in double precision, by the plainest loops that are right.
 *
 * Never optimised. A row is computed alone, from its first input to its last output, so whatever
 * is in another row cannot matter.
 */
#include "kernels/cpu/ref.h"

#include "kernels/format.h"

#include <errno.h>
#include <math.h>

void exl3_ref_tile(const void *words, int rate2, int codebook, uint16_t out[256])
{
	uint32_t w[4 * EXL3_RATE2_MAX];

	memcpy(w, words, (size_t)exl3_tile_bytes(rate2));
	for (int t = 0; t < 256; t++)
		out[16 * exl3_tile_row(t) + exl3_tile_col(t)] =
			exl3_code_f16(exl3_window(w, rate2, t), codebook);
}

void exl3_ref_hadamard(double v[128])
{
	for (int s = 1; s < 128; s *= 2)
		for (int i = 0; i < 128; i++)
			if (!(i & s)) {
				double a = v[i], b = v[i + s];

				v[i] = a + b;
				v[i + s] = a - b;
			}
	for (int i = 0; i < 128; i++)
		v[i] *= EXL3_INV_SQRT128;
}

double exl3_ref_act(uint8_t act, double limit, double g, double u)
{
	const double sqrt_2_over_pi = 0.7978845608028654;
	double a;

	/* Comparisons are written so that a NaN stays one. */
	switch (act) {
	case EXL3_ACT_RELU2:
		return u < 0 ? 0 : u * u;
	case EXL3_ACT_RELU2_GATED:
		return g < 0 ? 0 * u : g * g * u;
	case EXL3_ACT_SWIGLU_OAI:
		if (limit > 0) {
			g = g > limit ? limit : g;
			u = u > limit ? limit : u < -limit ? -limit : u;
		}
		return g / (1 + exp(-1.702 * g)) * (u + 1);
	case EXL3_ACT_GELU:
		a = 0.5 * g * (1 + tanh(sqrt_2_over_pi * (g + 0.044715 * g * g * g)));
		break;
	default: /* EXL3_ACT_SILU */
		a = g / (1 + exp(-g));
		break;
	}
	if (limit > 0) {
		a = a > limit ? limit : a;
		u = u > limit ? limit : u < -limit ? -limit : u;
	}
	return a * u;
}

double exl3_ref_load(const void *base, uint8_t dtype, size_t i)
{
	uint16_t h;
	float f;

	switch (dtype) {
	case EXL3_F16:
		memcpy(&h, (const char *)base + 2 * i, 2);
		return exl3_f16_to_f32(h);
	case EXL3_BF16:
		memcpy(&h, (const char *)base + 2 * i, 2);
		return exl3_bf16_to_f32(h);
	case EXL3_E4M3:
		return exl3_e4m3_to_f32(((const uint8_t *)base)[i]);
	default:
		memcpy(&f, (const char *)base + 4 * i, 4);
		return f;
	}
}

void exl3_ref_store(void *base, uint8_t dtype, size_t i, double value)
{
	float f = (float)value;
	uint16_t h;

	switch (dtype) {
	case EXL3_F16:
		h = exl3_f64_to_f16(value);
		memcpy((char *)base + 2 * i, &h, 2);
		break;
	case EXL3_BF16:
		h = exl3_f32_to_bf16(f);
		memcpy((char *)base + 2 * i, &h, 2);
		break;
	default:
		memcpy((char *)base + 4 * i, &f, 4);
	}
}

int64_t exl3_ref_load_index(const void *base, uint8_t dtype, size_t i)
{
	int64_t wide;
	int32_t narrow;

	if (dtype == EXL3_I64) {
		memcpy(&wide, (const char *)base + 8 * i, 8);
		return wide;
	}
	memcpy(&narrow, (const char *)base + 4 * i, 4);
	return narrow;
}

/*
 * y[n] = ((x * suh) Hk What Hn) * svh + bias for one row of stored sizes; @x is destroyed.
 */
static void linear_row(const struct exl3_matrix *w, double *x, double *y)
{
	const uint16_t *suh = w->suh, *svh = w->svh;
	const float *bias = w->bias;
	uint16_t tile[256];

	for (uint32_t i = 0; i < w->k; i++)
		x[i] *= exl3_f16_to_f32(suh[i]);
	for (uint32_t i = 0; i < w->k; i += EXL3_HAD)
		exl3_ref_hadamard(x + i);
	for (uint32_t j = 0; j < w->n; j++)
		y[j] = 0;
	for (uint32_t a = 0; a < w->k / EXL3_TILE; a++)
		for (uint32_t b = 0; b < w->n / EXL3_TILE; b++) {
			size_t index = (size_t)a * (w->n / EXL3_TILE) + b;

			exl3_ref_tile((const char *)w->trellis +
					      index * (size_t)exl3_tile_bytes(w->rate2),
				      w->rate2, w->codebook, tile);
			for (int r = 0; r < EXL3_TILE; r++)
				for (int c = 0; c < EXL3_TILE; c++)
					y[EXL3_TILE * b + c] += x[EXL3_TILE * a + r] *
								exl3_f16_to_f32(tile[16 * r + c]);
		}
	for (uint32_t j = 0; j < w->n; j += EXL3_HAD)
		exl3_ref_hadamard(y + j);
	for (uint32_t j = 0; j < w->n; j++)
		y[j] = y[j] * exl3_f16_to_f32(svh[j]) + (bias ? bias[j] : 0.0);
}

void exl3_ref_dense(const struct exl3_matrix *w, double *out)
{
	const uint16_t *suh = w->suh, *svh = w->svh;
	double column[EXL3_HAD];
	uint16_t tile[256];

	for (uint32_t a = 0; a < w->k / EXL3_TILE; a++)
		for (uint32_t b = 0; b < w->n / EXL3_TILE; b++) {
			size_t index = (size_t)a * (w->n / EXL3_TILE) + b;

			exl3_ref_tile((const char *)w->trellis +
					      index * (size_t)exl3_tile_bytes(w->rate2),
				      w->rate2, w->codebook, tile);
			for (int i = 0; i < 256; i++)
				out[(size_t)(EXL3_TILE * a + i / 16) * w->n + EXL3_TILE * b +
				    i % 16] = exl3_f16_to_f32(tile[i]);
		}
	for (uint32_t i = 0; i < w->k; i++)
		for (uint32_t j = 0; j < w->n; j += EXL3_HAD)
			exl3_ref_hadamard(out + (size_t)i * w->n + j);
	for (uint32_t j = 0; j < w->n; j++)
		for (uint32_t i = 0; i < w->k; i += EXL3_HAD) {
			for (uint32_t r = 0; r < EXL3_HAD; r++)
				column[r] = out[(size_t)(i + r) * w->n + j];
			exl3_ref_hadamard(column);
			for (uint32_t r = 0; r < EXL3_HAD; r++)
				out[(size_t)(i + r) * w->n + j] = column[r] *
								  exl3_f16_to_f32(suh[i + r]) *
								  exl3_f16_to_f32(svh[j]);
		}
}

/* One row of an operand into @out[stored], zero beyond @logical unless the row is stored. */
static void load_row(const struct exl3_rows *rows, uint32_t r, uint32_t logical, uint32_t stored,
		     double *out)
{
	const char *x = (const char *)rows->x + (size_t)r * rows->x_stride;
	uint32_t n = rows->stored ? stored : logical;

	for (uint32_t i = 0; i < stored; i++)
		out[i] = i < n ? exl3_ref_load(x, rows->x_dtype, i) : 0;
}

static void store_row(const struct exl3_rows *rows, uint32_t r, uint32_t offset, uint32_t n,
		      const double *value)
{
	char *y = (char *)rows->y + (size_t)r * rows->y_stride;

	for (uint32_t i = 0; i < n; i++)
		exl3_ref_store(y, rows->y_dtype, offset + i, value[i]);
}

static void ref_linear(const struct exl3_linear_args *a, const struct exl3_rows *rows,
		       double *scratch)
{
	for (uint32_t r = 0; r < rows->m; r++) {
		uint32_t offset = 0;

		for (uint32_t s = 0; s < a->nr_shards; s++) {
			const struct exl3_matrix *w = a->shards[s];
			uint32_t n = rows->stored ? w->n : w->n_log;
			double *x = scratch, *y = scratch + w->k;

			load_row(rows, r, w->k_log, w->k, x);
			linear_row(w, x, y);
			store_row(rows, r, offset, n, y);
			offset += n;
		}
	}
}

/* out[hidden] += p * down(act(gate(x), up(x))) */
static void expert_row(const struct exl3_moe_args *a, const struct exl3_expert *e, const double *x,
		       double p, double *out, double *scratch)
{
	uint32_t k = e->up->k, inter = e->up->n, hidden = e->down->n;
	double *in = scratch, *g = in + k, *u = g + inter, *y = u + inter;

	for (uint32_t i = 0; i < inter; i++)
		g[i] = 0;
	if (e->gate) {
		memcpy(in, x, k * sizeof(*x));
		linear_row(e->gate, in, g);
	}
	memcpy(in, x, k * sizeof(*x));
	linear_row(e->up, in, u);
	/* The padding between the logical and the stored width is zero for the next matrix. */
	for (uint32_t i = 0; i < inter; i++)
		u[i] = i < e->up->n_log ? exl3_ref_act(a->act, a->limit, g[i], u[i]) : 0;
	linear_row(e->down, u, y);
	for (uint32_t i = 0; i < hidden; i++)
		out[i] += p * y[i];
}

static uint64_t ref_moe(const struct exl3_work *work, uint32_t entry, double *scratch)
{
	const struct exl3_moe_args *a = &work->u.moe;
	const struct exl3_rows *rows = &work->rows[entry];
	const struct exl3_route *route = work->op == EXL3_OP_MOE ? &a->routes[entry] : NULL;
	const struct exl3_expert *first = &a->experts[0];
	uint32_t k = first->up->k, n = first->down->n;
	double *x = scratch, *out = x + k, *rest = out + n;
	uint64_t skipped = 0;

	for (uint32_t r = 0; r < rows->m; r++) {
		uint32_t choices = route ? route->topk : a->nr_experts;

		load_row(rows, r, first->up->k_log, k, x);
		for (uint32_t i = 0; i < n; i++)
			out[i] = 0;
		for (uint32_t j = 0; j < choices; j++) {
			size_t at = (size_t)r * choices + j;
			int64_t id = route ? exl3_ref_load_index(route->ids, route->ids_dtype, at)
					   : (int64_t)j;
			double p =
				route ? exl3_ref_load(route->weights, route->weights_dtype, at) : 1;

			if (id >= 0 && id < a->nr_experts)
				expert_row(a, &a->experts[id], x, p, out, rest);
			else if (id != -1)
				skipped++;
		}
		if (route)
			for (uint32_t i = 0; i < n; i++)
				out[i] *= a->routed_scale;
		store_row(rows, r, 0, rows->stored ? n : first->down->n_log, out);
	}
	return skipped;
}

/* Element @d of a cache row. */
static double load_kv(const char *row, uint8_t dtype, size_t d)
{
	float factor;

	if (dtype != EXL3_E4M3_656)
		return exl3_ref_load(row, dtype, d);
	if (d >= EXL3_RECORD_VALUES)
		return exl3_ref_load(row + EXL3_RECORD_VALUES + 16, EXL3_BF16,
				     d - EXL3_RECORD_VALUES);
	memcpy(&factor, row + EXL3_RECORD_VALUES + d / EXL3_RECORD_BLOCK * sizeof(factor),
	       sizeof(factor));
	return exl3_ref_load(row, EXL3_E4M3, d) * (double)factor;
}

/* One query and head: @slot holds the valid slots only, so every loop is over all of them. */
static void mla_head(const struct exl3_mla_args *a, const struct exl3_mla_cache *c,
		     const struct exl3_rows *rows, uint32_t r, uint32_t h, const uint64_t *slot,
		     uint32_t nr, double *score)
{
	const struct exl3_mla_geometry *g = &a->geometry;
	const char *q = (const char *)rows->x + (size_t)r * rows->x_stride;
	char *o = (char *)rows->y + (size_t)r * rows->y_stride;
	double top = -INFINITY, sum = 0;

	for (uint32_t j = 0; j < nr; j++) {
		const char *kv = (const char *)c->cache + slot[j] * g->cache_stride;
		double dot = 0;

		for (uint32_t d = 0; d < g->dim; d++)
			dot += exl3_ref_load(q, rows->x_dtype, (size_t)h * g->dim + d) *
			       load_kv(kv, g->cache_dtype, d) * c->kv_scale;
		score[j] = dot * c->scale;
		top = score[j] > top || isnan(score[j]) ? score[j] : top;
	}
	for (uint32_t j = 0; j < nr; j++) {
		score[j] = exp(score[j] - top);
		sum += score[j];
	}
	for (uint32_t d = 0; d < g->value_dim; d++) {
		double v = 0;

		for (uint32_t j = 0; j < nr; j++)
			v += score[j] * c->kv_scale *
			     load_kv((const char *)c->cache + slot[j] * g->cache_stride,
				     g->cache_dtype, d);
		exl3_ref_store(o, rows->y_dtype, (size_t)h * g->value_dim + d, nr ? v / sum : 0);
	}
	if (c->lse)
		c->lse[(size_t)r * g->heads + h] = nr ? (float)(top + log(sum)) : -INFINITY;
}

static uint64_t ref_mla(const struct exl3_work *work, uint32_t entry, double *scratch)
{
	const struct exl3_mla_geometry *g = &work->u.mla.geometry;
	const struct exl3_mla_cache *c = &work->u.mla.caches[entry];
	const struct exl3_rows *rows = &work->rows[entry];
	uint64_t *slot = (uint64_t *)(scratch + g->topk), skipped = 0;

	for (uint32_t r = 0; r < rows->m; r++) {
		const char *index =
			(const char *)c->indices +
			(size_t)((r + c->table_first) / g->table_queries) * g->indices_stride;
		int64_t keys = g->topk, id = -1;
		uint32_t nr = 0;

		/* Read once: the client may change them while we work. */
		if (c->lengths)
			keys = exl3_ref_load_index(c->lengths, EXL3_I32, r);
		if (keys < 0 || keys > g->topk) {
			skipped++;
			keys = keys < 0 ? 0 : g->topk;
		}
		for (uint32_t j = 0; j < keys; j++) {
			uint32_t in = j % g->page_rows;

			if (in == 0) {
				id = exl3_ref_load_index(index, g->indices_dtype, j / g->page_rows);
				if (id < 0 || (uint64_t)id >= g->slots / g->page_rows) {
					skipped += id != -1;
					id = -1;
				}
			}
			if (id >= 0)
				slot[nr++] = (uint64_t)id * g->page_rows + in;
		}
		for (uint32_t h = 0; h < g->heads; h++)
			mla_head(&work->u.mla, c, rows, r, h, slot, nr, scratch);
	}
	return skipped;
}

size_t exl3_ref_scratch(const struct exl3_work *work)
{
	size_t most = 0;

	switch (work->op) {
	case EXL3_OP_LINEAR:
		for (uint32_t s = 0; s < work->u.linear.nr_shards; s++) {
			const struct exl3_matrix *w = work->u.linear.shards[s];
			size_t need = (size_t)w->k + w->n;

			most = need > most ? need : most;
		}
		break;
	case EXL3_OP_MOE:
	case EXL3_OP_MLP:
		for (uint32_t i = 0; i < work->u.moe.nr_experts; i++) {
			const struct exl3_expert *e = &work->u.moe.experts[i];
			size_t need = 2 * ((size_t)e->up->k + e->up->n + e->down->n);

			most = need > most ? need : most;
		}
		break;
	case EXL3_OP_MLA_DECODE:
		most = 2 * (size_t)work->u.mla.geometry.topk;
		break;
	default:
		break;
	}
	return most * sizeof(double);
}

int exl3_ref_run(const struct exl3_work *work, void *scratch, size_t bytes)
{
	if (bytes < exl3_ref_scratch(work))
		return -ENOMEM;
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		uint64_t skipped = 0;

		switch (work->op) {
		case EXL3_OP_LINEAR:
			ref_linear(&work->u.linear, &work->rows[i], scratch);
			break;
		case EXL3_OP_MOE:
		case EXL3_OP_MLP:
			skipped = ref_moe(work, i, scratch);
			break;
		case EXL3_OP_MLA_DECODE:
			skipped = ref_mla(work, i, scratch);
			break;
		default:
			return -EOPNOTSUPP;
		}
		if (work->skipped)
			work->skipped[i] = skipped;
	}
	return 0;
}
