/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lower_class.cu - deterministic mode: which requests may be in one launch without a bit of difference.
 *
 *   op       class                                  what it fixes
 *   linear   own rows to 16, to 32                  instance and split of the few-row kernels (class_m)
 *   MLP      the same, if it holds for all matrices
 *   MoE      rows per expert on average to 4, 10    the few-row product; blocks take whole strips
 *   MLA      own rows                               the split of keys
 *
 * Others run alone: their sums are split by the work that there is. A class depends on the module and on
 * the request's own row count, never on its neighbours.
 */
#include "kernels/cuda/lower.h"

static const uint32_t class_rows[] = {16, 32};

uint32_t exl3_cuda_linear_class(const struct exl3_cuda_place *p, const struct exl3_cuda_linear *a, uint32_t m)
{
	const struct exl3_cuda_linear_kernel *k = &exl3_cuda_gemv_kernels[0];

	for (uint32_t rows : class_rows) {
		struct exl3_cuda_linear c = *a;

		c.m = c.class_m = rows;
		c.table = NULL;
		/* A quarter is what staged rows and a composed operation's buffers leave at least. */
		if (m <= rows)
			return k->supports(&c) && k->ws_bytes(&c) <= p->ws_bytes / 4 ? rows : 0;
	}
	return 0;
}

uint32_t exl3_cuda_mlp_class(const struct exl3_cuda_place *p, const struct exl3_work *work)
{
	const struct exl3_moe_args *moe = &work->u.moe;
	struct exl3_cuda_linear a = {};
	uint32_t ret = 0;

	a.device_sms = p->dev->sms;
	a.device_cc = p->dev->cc;
	for (uint32_t i = 0; i < moe->nr_experts; i++) {
		const struct exl3_expert *e = &moe->experts[i];
		uint32_t in, down;

		a.nr_shards = 0;
		if (e->gate)
			a.shard[a.nr_shards++] = *e->gate;
		a.shard[a.nr_shards++] = *e->up;
		in = exl3_cuda_linear_class(p, &a, work->rows[0].m);
		a.nr_shards = 1;
		a.shard[0] = *e->down;
		down = exl3_cuda_linear_class(p, &a, work->rows[0].m);
		if (!in || in != down)
			return 0;
		ret = in;
	}
	return ret;
}

static uint32_t merge_class(const struct exl3_cuda_place *p, const struct exl3_work *work)
{
	struct exl3_work w = *work;
	struct exl3_cuda_linear a;

	if (work->kernel)
		return 0;
	w.deterministic = true;
	switch (work->op) {
	case EXL3_OP_LINEAR:
		return exl3_cuda_linear_args(p, &w, &a) ? a.class_m : 0;
	case EXL3_OP_MLP:
		return exl3_cuda_mlp_class(p, work);
	case EXL3_OP_MOE:
		return exl3_cuda_class_of_moe(p, work);
	case EXL3_OP_MLA_DECODE:
		return work->rows[0].m;
	default:
		return 0;
	}
}

uint32_t exl3_cuda_merge_class(const struct exl3_dev *dev, const struct exl3_work *work)
{
	return merge_class(&dev->place, work);
}

bool exl3_cuda_one_class(const struct exl3_cuda_place *p, const struct exl3_work *work)
{
	struct exl3_work one = *work;
	uint32_t first = 0;

	if (work->kernel)
		return false;
	if (work->op == EXL3_OP_MLA_DECODE)
		return exl3_cuda_mla_as_alone(p, work);
	one.nr_rows = 1;
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		uint32_t cls;

		one.rows = &work->rows[i];
		if (work->op == EXL3_OP_MOE)
			one.u.moe.routes = &work->u.moe.routes[i];
		cls = merge_class(p, &one);
		if (!cls || (i && cls != first))
			return false;
		first = cls;
	}
	return true;
}
