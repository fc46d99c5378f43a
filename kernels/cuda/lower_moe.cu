/* SPDX-License-Identifier: Apache-2.0 */
/* lower_moe.cu - the routed block: from checked work to the launches of moe.cu. */
#include "kernels/cuda/lower.h"
#include "kernels/cuda/moe.h"

#include <errno.h>
#include <string.h>

bool exl3_cuda_supports_moe(const struct exl3_cuda_place *p, const struct exl3_work *work, unsigned variant)
{
	struct exl3_cuda_moe_entry entries[EXL3_CUDA_MOE_ENTRIES_MAX];
	struct exl3_cuda_moe a;

	if (!work->u.moe.plan || work->nr_rows > EXL3_CUDA_MOE_ENTRIES_MAX)
		return false;
	if (!variant)
		return true;
	memset(&a, 0, sizeof(a));
	memset(entries, 0, sizeof(entries));
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		entries[i].m = work->rows[i].m;
		entries[i].topk = work->u.moe.routes[i].topk;
	}
	a.plan = (const struct exl3_cuda_moe_plan *)work->u.moe.plan;
	a.entries = entries;
	a.nr_entries = work->nr_rows;
	a.deterministic = work->deterministic || p->deterministic;
	a.variant = (uint8_t)variant;
	a.ws_bytes = p->ws_bytes / 2; /* what staged rows leave, at least */
	a.device_sms = p->dev->sms;
	a.device_cc = p->dev->cc;
	return exl3_cuda_moe_variants[variant].supports(&a);
}

uint32_t exl3_cuda_class_of_moe(const struct exl3_cuda_place *p, const struct exl3_work *work)
{
	struct exl3_cuda_moe_entry e;
	struct exl3_cuda_moe a;

	if (!exl3_cuda_supports_moe(p, work, 0))
		return 0;
	memset(&a, 0, sizeof(a));
	memset(&e, 0, sizeof(e));
	e.m = work->rows[0].m;
	e.topk = work->u.moe.routes[0].topk;
	a.plan = (const struct exl3_cuda_moe_plan *)work->u.moe.plan;
	a.entries = &e;
	a.nr_entries = 1;
	a.ws_bytes = p->ws_bytes / 2; /* what staged rows leave, at least */
	a.device_cc = p->dev->cc;
	return exl3_cuda_moe_class(&a);
}

int exl3_cuda_lower_moe(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot)
{
	const struct exl3_matrix *up = slot->work->u.moe.experts[0].up;
	struct exl3_work staged;
	const struct exl3_work *work = &staged;
	struct exl3_cuda_moe_entry entries[EXL3_CUDA_MOE_ENTRIES_MAX];
	struct exl3_cuda_moe a;
	size_t ws_bytes;
	int ret;

	if (!exl3_cuda_supports_moe(p, slot->work, exl3_cuda_moe_variant_of(slot->work->kernel)))
		return -EOPNOTSUPP;
	ret = exl3_cuda_stage(p, slot, up->k, up->k_log, &staged, &ws_bytes);
	if (ret)
		return ret;
	memset(&a, 0, sizeof(a));
	memset(entries, 0, sizeof(entries));
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		const struct exl3_rows *r = &work->rows[i];
		const struct exl3_moe_args::exl3_route *route = &work->u.moe.routes[i];
		struct exl3_cuda_moe_entry *e = &entries[i];

		e->x = r->x;
		e->y = r->y;
		e->x_stride = r->x_stride;
		e->y_stride = r->y_stride;
		e->m = r->m;
		e->x_dtype = r->x_dtype;
		e->y_dtype = r->y_dtype;
		e->stored = r->stored;
		e->ids = route->ids;
		e->weights = route->weights;
		e->topk = route->topk;
		e->ids_dtype = route->ids_dtype;
		e->weights_dtype = route->weights_dtype;
		e->skipped = (unsigned long long *)&slot->skipped_dev[i];
	}
	a.plan = (const struct exl3_cuda_moe_plan *)work->u.moe.plan;
	a.entries = entries;
	a.nr_entries = work->nr_rows;
	a.deterministic = work->deterministic || p->deterministic;
	a.variant = (uint8_t)exl3_cuda_moe_variant_of(work->kernel);
	a.act = work->u.moe.act;
	a.limit = work->u.moe.limit;
	a.routed_scale = work->u.moe.routed_scale;
	a.ws = p->ws;
	a.ws_bytes = ws_bytes;
	a.device_sms = p->dev->sms;
	a.device_cc = p->dev->cc;
	return exl3_cuda_moe_launch(&a, p->stream);
}
