/* SPDX-License-Identifier: Apache-2.0 */
/* account.c - what dispatch.c does, counted: per operation, tenant and model. */
#include "daemon/dispatch_priv.h"

void exl3_account_answer(const struct exl3_channel *ch, uint8_t op, int result)
{
	if (!ch->tenant || !ch->tenant->metrics)
		return;
	exl3_metric_request(ch->tenant->metrics, op, result);
}

void exl3_account_success(const struct exl3_request *req)
{
	const struct exl3_tenant *t = req->ch->tenant;
	const struct exl3_registered *model = req->c.target.model;

	if (t && t->metrics)
		exl3_metric_add(&t->metrics->rows, req->c.rows.m);
	if (model && model->metrics) {
		exl3_metric_add(&model->metrics->requests, 1);
		exl3_metric_add(&model->metrics->rows, req->c.rows.m);
	}
}

void exl3_account_launched(const struct exl3_launch *l, uint64_t now_ns)
{
	for (uint32_t i = 0; i < l->nr; i++) {
		const struct exl3_request *req = (const struct exl3_request *)l->items[i];
		const struct exl3_tenant *t = req->ch->tenant;

		if (t && t->metrics && req->first == 0)
			exl3_metric_time(&t->metrics->queue, now_ns > req->accepted_ns
								      ? now_ns - req->accepted_ns
								      : 0);
	}
}

/* What a launch reads of the weights. Which experts rows go to is in the clients' memory: no more than they can
 * name, and no more than there are. */
static uint64_t weight_bytes(const struct exl3_launch *l, uint32_t rows)
{
	const struct exl3_checked *c = &((const struct exl3_request *)l->items[0])->c;
	const struct exl3_module_desc *desc = c->target.desc;
	uint64_t named;

	if (!desc)
		return 0;
	if (c->op != EXL3_OP_MOE || !desc->nr_experts)
		return desc->bytes;
	named = (uint64_t)rows * c->u.route.topk;
	if (named > desc->nr_experts)
		named = desc->nr_experts;
	return desc->bytes / desc->nr_experts * named;
}

void exl3_account_ended(struct exl3_dispatch *d, const struct exl3_launch *l, uint64_t exec_ns)
{
	uint32_t rows = 0, slices = 0;

	d->counters.launches++;
	d->counters.launch_ns += exec_ns;
	if (!d->metrics)
		return;
	for (uint32_t i = 0; i < l->nr; i++)
		rows += l->rows[i].m;
	for (uint32_t i = 0; i < l->nr; i++) {
		const struct exl3_request *req = (const struct exl3_request *)l->items[i];
		const struct exl3_tenant *t = req->ch->tenant;

		slices += l->rows[i].m < req->c.rows.m;
		if (t && t->metrics && rows)
			exl3_metric_add(&t->metrics->device_ns,
					(uint64_t)((double)exec_ns * l->rows[i].m / rows));
	}
	exl3_metric_launch(&d->metrics->op[l->work.op], exec_ns, rows, l->nr, slices,
			   weight_bytes(l, rows));
}
