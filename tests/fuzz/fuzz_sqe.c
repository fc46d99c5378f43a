/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_sqe.c - any 128 bytes as a submission entry.
 *
 * Whatever passes the check must have every operand inside of its buffer, computed here once more and
 * the plain way: row by row. The last 24 bytes of a longer input choose sizes of buffers and modules.
 */
#include "daemon/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct exl3_buffer buffers[4];
static struct exl3_module_desc modules[4];
static struct exl3_mla_geometry geometry;
static bool geometry_ok;
static struct exl3_matrix matrix;
static struct exl3_expert expert = {.gate = &matrix, .up = &matrix, .down = &matrix};
static const struct exl3_kernel kernels[] = {{.name = "l", .op = EXL3_OP_LINEAR},
					     {.name = "m", .op = EXL3_OP_MLA_DECODE}};

static struct exl3_buffer *buffer(void *arg, uint32_t id)
{
	(void)arg;
	return id >= 1 && id <= 3 ? &buffers[id] : NULL;
}

/* Handles by their low bits, so that random ones often name something. */
static int target(void *arg, uint32_t handle, struct exl3_target *ret)
{
	(void)arg;
	*ret = (struct exl3_target){0};
	if ((handle & 7) >= 5)
		return -2;
	if ((handle & 7) < 4)
		ret->desc = &modules[handle & 3];
	else if (geometry_ok)
		ret->mla = &geometry;
	else
		return -2;
	return 0;
}

static void set_up(const uint8_t *p)
{
	uint16_t w[12];

	memcpy(w, p, sizeof(w));
	for (int i = 1; i <= 3; i++)
		buffers[i] = (struct exl3_buffer){.base = {(char *)((uintptr_t)i << 40)},
						  .bytes = (uint64_t)(w[i] + 1u) << (w[0] & 7)};
	for (int i = 0; i < 4; i++) {
		uint32_t k = (w[4 + i] & 255u) + 1, n = (w[4 + i] >> 8) + 1u;

		modules[i] = (struct exl3_module_desc){
			.kind = (enum exl3_module_kind)(1 + i % 3),
			.k = (k + 127) / 128 * 128,
			.n = (n + 127) / 128 * 128,
			.k_log = k,
			.n_log = n,
			.experts = i ? &expert : NULL,
			.nr_experts = i ? 1 : 0,
			.act = EXL3_ACT_SILU,
			.routed_scale = 1,
		};
	}
	geometry = (struct exl3_mla_geometry){
		.heads = w[8] & 127u,
		.dim = (w[8] >> 7 & 63u) * 16,
		.value_dim = (w[9] & 63u) * 16,
		.topk = w[9] >> 6,
		.slots = w[10],
		.cache_stride = (uint64_t)(w[11] & 255u) * 16,
		.indices_stride = (w[11] >> 8) * 16u,
		.cache_dtype = (uint8_t)(1 + w[0] % 7),
		.indices_dtype = (uint8_t)(EXL3_I32 + (w[0] >> 8 & 1)),
		.page_rows = w[0] >> 9 & 15u,
		.table_queries = w[0] >> 13 & 7u,
	};
	geometry_ok = exl3_check_geometry(&geometry, NULL) == 0;
}

/* Every byte of the operand lies in one buffer. */
static void inside(const void *ptr, uint64_t rows, uint64_t stride, uint64_t row_bytes)
{
	uintptr_t at = (uintptr_t)ptr;
	unsigned id = (unsigned)(at >> 40);
	uint64_t offset = at & ((1ull << 40) - 1);

	if (id < 1 || id > 3 || at % 16)
		abort();
	for (uint64_t i = 0; i < rows; i++) {
		if (offset + i * stride + row_bytes > buffers[id].bytes)
			abort();
	}
}

static void check_result(const struct exl3_sqe *sqe, const struct exl3_checked *c)
{
	const struct exl3_rows *r = &c->rows;
	uint64_t x_elems, y_elems;

	if (c->op == EXL3_OP_NOP || c->op == EXL3_OP_CANCEL)
		return;
	if (r->m == 0 || r->m > EXL3_M_MAX || r->m != sqe->rows || !c->nr_pins ||
	    c->nr_pins > EXL3_PINS_MAX)
		abort();
	if (c->op == EXL3_OP_MLA_DECODE) {
		const struct exl3_mla_geometry *g = &c->u.mla.geometry;

		x_elems = (uint64_t)g->heads * g->dim;
		y_elems = (uint64_t)g->heads * g->value_dim;
		inside(c->u.mla.cache.cache, g->slots, g->cache_stride,
		       exl3_cache_row_bytes(g->cache_dtype, g->dim));
		inside(c->u.mla.cache.indices, (r->m + g->table_queries - 1) / g->table_queries,
		       g->indices_stride,
		       (uint64_t)exl3_mla_columns(g) * exl3_dtype_bytes(g->indices_dtype));
		if (c->u.mla.cache.lengths)
			inside(c->u.mla.cache.lengths, r->m, 4, 4);
		if (c->u.mla.cache.lse)
			inside(c->u.mla.cache.lse, r->m, g->heads * 4ull, g->heads * 4ull);
	} else {
		x_elems = r->stored ? c->target.desc->k : c->target.desc->k_log;
		y_elems = r->stored ? c->target.desc->n : c->target.desc->n_log;
	}
	inside(r->x, r->m, r->x_stride, x_elems * exl3_dtype_bytes(r->x_dtype));
	inside(r->y, r->m, r->y_stride, y_elems * exl3_dtype_bytes(r->y_dtype));
	if (c->op == EXL3_OP_MOE) {
		const struct exl3_route *t = &c->u.route;

		if (!t->topk || t->topk > EXL3_TOPK_MAX)
			abort();
		inside(t->ids, 1, 0, (uint64_t)r->m * t->topk * exl3_dtype_bytes(t->ids_dtype));
		inside(t->weights, 1, 0,
		       (uint64_t)r->m * t->topk * exl3_dtype_bytes(t->weights_dtype));
	}
	if (c->op == EXL3_OP_MOE || c->op == EXL3_OP_MLP) {
		if (c->act == EXL3_ACT_DEFAULT || c->act >= EXL3_ACT_NR || !isfinite(c->limit))
			abort();
	}
	/* Rows of y may lie between rows of x, but no row of one in a row of the other. */
	for (uint32_t i = 0; i < r->m && r->m <= 64; i++) {
		for (uint32_t j = 0; j < r->m; j++) {
			uintptr_t x = (uintptr_t)r->x + (uint64_t)i * r->x_stride;
			uintptr_t y = (uintptr_t)r->y + (uint64_t)j * r->y_stride;

			if (x < y + y_elems * exl3_dtype_bytes(r->y_dtype) &&
			    y < x + x_elems * exl3_dtype_bytes(r->x_dtype))
				abort();
		}
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct exl3_check_env env = {.buffer = buffer,
					   .extent = exl3_buffer_extent,
					   .target = target,
					   .kernels = {{kernels, 2}},
					   .stream = size && data[size - 1] & 1};
	struct exl3_checked out;
	enum exl3_detail detail;
	struct exl3_sqe sqe;
	uint8_t shape[24] = {0};
	int rc;

	if (size < sizeof(sqe))
		return 0;
	memcpy(&sqe, data, sizeof(sqe));
	size -= sizeof(sqe);
	memcpy(shape, data + sizeof(sqe), size < sizeof(shape) ? size : sizeof(shape));
	set_up(shape);
	/* Random opcodes are mostly unknown ones: fold them, the last stays unknown. */
	sqe.op %= EXL3_OP_NR + 1;
	rc = exl3_check_sqe(&sqe, &env, &out, &detail);
	if (rc == 0)
		check_result(&sqe, &out);
	else if (detail == EXL3_DETAIL_NONE || detail >= EXL3_DETAIL_NR)
		abort();
	return 0;
}
