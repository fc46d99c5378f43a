/* SPDX-License-Identifier: Apache-2.0 */
/* lower_mla.cu - sparse MLA decode: from checked work to one launch for all merged requests. */
#include "kernels/cuda/lower.h"
#include "kernels/cuda/mla.h"

#include <errno.h>
#include <string.h>

/* @entries: room for EXL3_CUDA_MLA_ENTRIES_MAX; @skipped may be NULL (asking only for support). */
static bool mla_args(const struct exl3_cuda_place *p, const struct exl3_work *work, uint64_t *skipped,
		     struct exl3_cuda_mla_entry *entries, struct exl3_cuda_mla *a)
{
	const struct exl3_mla_geometry *g = &work->u.mla.geometry;

	if (work->nr_rows > EXL3_CUDA_MLA_ENTRIES_MAX || !g->page_rows)
		return false;
	memset(a, 0, sizeof(*a));
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		const struct exl3_rows *r = &work->rows[i];
		const struct exl3_mla_args::exl3_mla_cache *c = &work->u.mla.caches[i];
		struct exl3_cuda_mla_entry *e = &entries[i];

		memset(e, 0, sizeof(*e));
		e->q = r->x;
		e->o = r->y;
		e->q_stride = r->x_stride;
		e->o_stride = r->y_stride;
		e->q_dtype = r->x_dtype;
		e->o_dtype = r->y_dtype;
		e->m = r->m;
		e->cache = c->cache;
		e->indices = c->indices;
		e->lengths = c->lengths;
		e->table_queries = g->table_queries;
		e->table_first = c->table_first;
		e->page_shift = (uint8_t)__builtin_ctz(g->page_rows);
		e->lse = c->lse;
		e->scale = c->scale;
		e->kv_scale = c->kv_scale;
		e->skipped = (unsigned long long *)(skipped ? &skipped[i] : NULL);
		e->slots = g->slots;
		e->cache_stride = g->cache_stride;
		e->indices_stride = g->indices_stride;
		e->indices_dtype = g->indices_dtype;
		e->topk = g->topk;
	}
	a->entries = entries;
	a->nr_entries = work->nr_rows;
	a->heads = g->heads;
	a->dim = g->dim;
	a->value_dim = g->value_dim;
	a->cache_dtype = g->cache_dtype;
	a->deterministic = work->deterministic || p->deterministic;
	a->ws = p->ws;
	a->ws_bytes = p->ws_bytes;
	a->device_sms = p->dev->sms;
	a->device_cc = p->dev->cc;
	return true;
}

bool exl3_cuda_supports_mla(const struct exl3_cuda_place *p, const struct exl3_work *work)
{
	struct exl3_cuda_mla_entry entries[EXL3_CUDA_MLA_ENTRIES_MAX];
	struct exl3_cuda_mla a;

	return mla_args(p, work, NULL, entries, &a) && exl3_cuda_mla_select(&a);
}

/* Each entry's variant and split are those of a launch without the others. */
bool exl3_cuda_mla_as_alone(const struct exl3_cuda_place *p, const struct exl3_work *work)
{
	struct exl3_cuda_mla_entry entries[EXL3_CUDA_MLA_ENTRIES_MAX];
	const struct exl3_cuda_mla_kernel *together, *alone;
	struct exl3_work one = *work;
	struct exl3_cuda_mla a;

	for (uint32_t i = 1; i < work->nr_rows; i++)
		if (work->rows[i].m != work->rows[0].m)
			return false;
	if (!mla_args(p, work, NULL, entries, &a))
		return false;
	together = exl3_cuda_mla_select(&a);
	if (!together || together->ws_bytes(&a) > a.ws_bytes)
		return false;
	one.nr_rows = 1;
	alone = mla_args(p, &one, NULL, entries, &a) ? exl3_cuda_mla_select(&a) : NULL;
	return together == alone;
}

int exl3_cuda_lower_mla(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot)
{
	struct exl3_cuda_mla_entry entries[EXL3_CUDA_MLA_ENTRIES_MAX];
	const struct exl3_cuda_mla_kernel *k;
	struct exl3_cuda_mla a;

	if (!mla_args(p, slot->work, slot->skipped_dev, entries, &a))
		return -EOPNOTSUPP;
	k = exl3_cuda_mla_select(&a);
	if (!k)
		return -EOPNOTSUPP;
	if (k->ws_bytes(&a) > a.ws_bytes)
		return -ENOMEM;
	return k->launch(&a, p->stream);
}
