/* SPDX-License-Identifier: Apache-2.0 */
/* chunk.c - how many rows of a request one launch takes, so that it ends within a given time. */
#include "daemon/chunk.h"

#include <string.h>

/* Multiply-adds per second. Unknown shapes: the slowest kernels of either kind (the double-precision
 * oracle; a GPU kernel that decodes for every row). Deterministic slices: half of what the large kernels
 * of an H200 reach, and a desktop CPU. */
#define CPU_SLOW  0.5e9
#define CPU_FIXED 20e9
#define GPU_SLOW  5e12
#define GPU_FIXED 100e12

#define PROBES     8u  /* slots that a key may be in */
#define ALIGN_FROM 64u /* slices of so many rows have a multiple of 16 */
#define FIXED_MAX  4.0 /* a slice takes at least so many times what a launch costs whatever its rows */

void exl3_pace_init(struct exl3_pace *p, bool gpu)
{
	memset(p, 0, sizeof(*p));
	p->mac_ns = 1e9 / (gpu ? GPU_SLOW : CPU_SLOW);
	p->fixed_mac_ns = 1e9 / (gpu ? GPU_FIXED : CPU_FIXED);
}

uint64_t exl3_chunk_macs(const struct exl3_checked *c)
{
	const struct exl3_module_desc *d = c->target.desc;
	const struct exl3_mla_geometry *g = &c->u.mla.geometry;
	uint64_t experts, macs = 0;

	switch (c->op) {
	case EXL3_OP_LINEAR:
		return (uint64_t)d->k * d->n;
	case EXL3_OP_MOE:
		experts = c->u.route.topk;
		break;
	case EXL3_OP_MLP:
		experts = d->nr_experts; /* slices of one: every row sees all of them */
		break;
	default:
		return (uint64_t)g->heads * g->topk * (g->dim + g->value_dim);
	}
	if (d->nr_experts) {
		const struct exl3_expert *e = &d->experts[0];

		macs = (uint64_t)e->up->k * e->up->n * (e->gate ? 2 : 1) +
		       (uint64_t)e->down->k * e->down->n;
	}
	return macs * experts;
}

static uint64_t mix(uint64_t key, uint64_t value)
{
	key = (key ^ value) * 0x9e3779b97f4a7c15ull;
	return key ^ key >> 29;
}

uint64_t exl3_chunk_key(const struct exl3_checked *c)
{
	const struct exl3_module_desc *d = c->target.desc;
	const struct exl3_mla_geometry *g = &c->u.mla.geometry;
	uint64_t key = mix(c->op, (uintptr_t)c->kernel);

	key = mix(key, (uint64_t)c->deterministic << 16 | c->rows.x_dtype << 8 | c->rows.y_dtype);
	if (c->op == EXL3_OP_MLA_DECODE) {
		key = mix(key, (uint64_t)g->heads << 32 | g->topk);
		key = mix(key, (uint64_t)g->dim << 32 | g->value_dim);
		key = mix(key, g->cache_dtype);
	} else {
		key = mix(key, (uint64_t)d->k << 32 | d->n);
		key = mix(key, (uint64_t)d->nr_shards << 32 | d->nr_experts);
		key = mix(key, (uint64_t)d->intermediate << 32 | d->rate2_min << 16 | d->rate2_max);
		key = mix(key, c->op == EXL3_OP_MOE ? c->u.route.topk : 0);
	}
	return key ? key : 1;
}

/* The shape's slot; if it has none, the least lately used one. */
static struct exl3_pace_shape *find(struct exl3_pace *p, uint64_t key)
{
	struct exl3_pace_shape *oldest = NULL, *s;

	for (uint32_t i = 0; i < PROBES; i++) {
		s = &p->shapes[((key >> 32) + i) & (EXL3_PACE_SHAPES - 1)];
		if (s->key == key) {
			s->used = ++p->clock;
			return s;
		}
		if (!oldest || s->used < oldest->used)
			oldest = s;
	}
	*oldest = (struct exl3_pace_shape){.key = key, .used = ++p->clock};
	return oldest;
}

static unsigned bucket(uint32_t rows)
{
	unsigned b = 31 - (unsigned)__builtin_clz(rows);

	return b < EXL3_PACE_BUCKETS ? b : EXL3_PACE_BUCKETS - 1;
}

/* Expected time of @rows rows. */
static double predict(const struct exl3_pace *p, const struct exl3_pace_shape *s, uint64_t macs,
		      uint32_t rows)
{
	unsigned at = bucket(rows);

	for (unsigned b = at + 1; b-- > 0;) {
		if (s->row_ns[b] > 0)
			return (double)rows * (double)s->row_ns[b];
	}
	/* Only more rows were measured: it takes no longer than they did. */
	for (unsigned b = at + 1; b < EXL3_PACE_BUCKETS; b++) {
		if (s->row_ns[b] > 0)
			return (double)(1u << b) * (double)s->row_ns[b];
	}
	return (double)rows * (double)macs * p->mac_ns;
}

/* What a launch costs before its first row (reading or decoding the weights): where the line through the
 * fewest and the most rows that were measured begins. */
static double fixed_ns(const struct exl3_pace_shape *s)
{
	double r[2] = {0, 0}, t[2] = {0, 0}, fixed;

	for (unsigned b = 0; b < EXL3_PACE_BUCKETS; b++) {
		if (!(s->row_ns[b] > 0))
			continue;
		r[1] = 1u << b;
		t[1] = r[1] * (double)s->row_ns[b];
		if (r[0] == 0) {
			r[0] = r[1];
			t[0] = t[1];
		}
	}
	if (r[1] <= r[0]) /* one measurement: nothing, so that fewer rows are tried, or of one row half */
		return r[0] > 1 ? 0 : t[0] * 2 / FIXED_MAX;
	fixed = t[0] - r[0] * (t[1] - t[0]) / (r[1] - r[0]);
	return fixed > 0 ? fixed < t[0] ? fixed : t[0] : 0;
}

/* The most rows that are expected to end within the time, to an eighth. */
static uint32_t most_rows(const struct exl3_pace *p, const struct exl3_pace_shape *s, uint64_t macs,
			  uint32_t left, double chunk_ns)
{
	uint32_t rows = left;

	if (chunk_ns < FIXED_MAX * fixed_ns(s))
		chunk_ns = FIXED_MAX * fixed_ns(s);
	while (rows > 1 && predict(p, s, macs, rows) > chunk_ns)
		rows = (rows + 1) / 2;
	for (uint32_t step = rows / 2, i = 0; step && i < 3; step /= 2, i++) {
		if (rows + step <= left && predict(p, s, macs, rows + step) <= chunk_ns)
			rows += step;
	}
	return rows;
}

/* @left rows in as many slices as @most of them ask for, all about equally long: a few rows at the end
 * would run in other kernels than the rest. */
static uint32_t even(uint32_t left, uint32_t most)
{
	uint32_t nr = (left + most - 1) / most, rows = (left + nr - 1) / nr;

	if (rows >= ALIGN_FROM)
		rows = (rows + 15) / 16 * 16;
	return rows < left ? rows : left;
}

struct exl3_slice exl3_chunk_next(struct exl3_pace *p, const struct exl3_checked *c, uint32_t first,
				  uint64_t chunk_ns)
{
	uint64_t macs = exl3_chunk_macs(c);
	struct exl3_pace_shape *s = find(p, exl3_chunk_key(c));
	struct exl3_slice slice = {.rows = c->rows.m - first};
	double rows;

	if (chunk_ns && c->deterministic) {
		rows = (double)chunk_ns / ((double)macs * p->fixed_mac_ns);
		if (rows < c->rows.m)
			slice.rows = even(c->rows.m, rows < 1 ? 1 : (uint32_t)rows);
		if (slice.rows > c->rows.m - first)
			slice.rows = c->rows.m - first;
	} else if (chunk_ns) {
		slice.rows = even(slice.rows, most_rows(p, s, macs, slice.rows, (double)chunk_ns));
	}
	slice.cost_ns = (uint64_t)predict(p, s, macs, slice.rows);
	return slice;
}

void exl3_chunk_learn(struct exl3_pace *p, const struct exl3_checked *c, uint32_t rows, uint64_t ns)
{
	struct exl3_pace_shape *s = find(p, exl3_chunk_key(c));
	unsigned b = bucket(rows);
	float now = (float)ns / (float)rows;

	if (!ns)
		return;
	s->row_ns[b] = s->row_ns[b] > 0 ? s->row_ns[b] + (now - s->row_ns[b]) / 4 : now;
	/* More rows cost no more each: one slow launch is not believed for ever by sizes that are not tried
	 * any more because of it. */
	for (unsigned i = b + 1; i < EXL3_PACE_BUCKETS; i++) {
		if (s->row_ns[i] > s->row_ns[b])
			s->row_ns[i] = s->row_ns[b];
	}
}
