/* SPDX-License-Identifier: Apache-2.0 */
/* slice.c - a request that runs as several launches: which rows are next, and where their operands are. */
#include "daemon/dispatch_priv.h"

void exl3_slice_plan(struct exl3_request *req, struct exl3_pace *pace, uint64_t chunk_ns)
{
	struct exl3_slice slice = {0};

	if (req->c.op != EXL3_OP_NOP)
		slice = exl3_chunk_next(pace, &req->c, req->first, chunk_ns);
	req->item.rows = slice.rows;
	req->item.cost_ns = slice.cost_ns;
	req->item.more = req->first + slice.rows < req->c.rows.m;
}

void exl3_slice_operands(const struct exl3_request *req, struct exl3_launch *l, uint32_t i)
{
	const struct exl3_checked *c = &req->c;
	size_t first = req->first;

	l->rows[i] = c->rows;
	l->rows[i].m = req->item.rows;
	l->rows[i].x = (const char *)c->rows.x + first * c->rows.x_stride;
	l->rows[i].y = (char *)c->rows.y + first * c->rows.y_stride;
	if (c->op == EXL3_OP_MOE) {
		const struct exl3_route *from = &c->u.route;
		struct exl3_route *route = &l->u.routes[i];

		*route = *from;
		route->ids = (const char *)from->ids +
			     first * from->topk * exl3_dtype_bytes(from->ids_dtype);
		route->weights = (const char *)from->weights +
				 first * from->topk * exl3_dtype_bytes(from->weights_dtype);
	} else if (c->op == EXL3_OP_MLA_DECODE) {
		const struct exl3_mla_geometry *g = &c->u.mla.geometry;
		struct exl3_mla_cache *cache = &l->u.caches[i];

		*cache = c->u.mla.cache;
		/* A slice may begin among queries that share a row of indices. */
		cache->indices =
			(const char *)cache->indices + first / g->table_queries * g->indices_stride;
		cache->table_first = (uint32_t)(first % g->table_queries);
		if (cache->lengths)
			cache->lengths += first;
		if (cache->lse)
			cache->lse += first * g->heads;
	}
}

bool exl3_slice_ended(struct exl3_request *req, int result, uint64_t skipped, uint64_t exec_ns)
{
	req->exec_ns += exec_ns;
	req->skipped += skipped;
	if (result < 0 || !req->item.more || req->cancelled || req->ch->closed || req->ch->failed)
		return false;
	req->first += req->item.rows;
	return true;
}
