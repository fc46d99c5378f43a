/* SPDX-License-Identifier: Apache-2.0 */
/* control_kernels.c - verbs about kernels: which there are, which a module gets and why, and a calibration. */
#include "daemon/control.h"

#include "daemon/calibrate.h"
#include "kernels/format.h"
#include "kernels/tuned.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- which this device can run at all ---- */

static bool runs_linear(const struct exl3_device *d, const struct exl3_kernel *k)
{
	static const uint32_t rows[] = {1, 16, 64, EXL3_M_MAX};
	struct exl3_tuned_probe probe;

	for (uint16_t rate2 = 2; rate2 <= 16; rate2++) {
		for (uint16_t cb = 0; cb < EXL3_CB_NR; cb++) {
			for (size_t i = 0; exl3_rate_valid(rate2, cb) && i < sizeof(rows) / sizeof(rows[0]); i++) {
				const struct exl3_tuned_shape shape = {
					.k = 512, .nr_shards = 1, .shard = {{512, rate2, cb}}};

				exl3_tuned_probe(&probe, &shape, rows[i]);
				if (k->supports(d->dev, &probe.work))
					return true;
			}
		}
	}
	return false;
}

/* One small work of an operation stands for all: what is asked is what the processor has. */
static bool runs_other(const struct exl3_device *d, const struct exl3_kernel *k)
{
	static const struct exl3_tuned_shape shape = {
		.k = 512, .nr_shards = 1, .shard = {{512, 8, EXL3_CB_MCG}}};
	const struct exl3_mla_cache cache = {.scale = 1, .kv_scale = 1};
	struct exl3_route route = {.topk = 1, .ids_dtype = EXL3_I32, .weights_dtype = EXL3_F32};
	struct exl3_tuned_probe probe;
	struct exl3_expert expert;
	struct exl3_work work;

	exl3_tuned_probe(&probe, &shape, 1);
	expert = (struct exl3_expert){probe.matrix, probe.matrix, probe.matrix};
	work = probe.work;
	work.op = k->op;
	memset(&work.u, 0, sizeof(work.u));
	if (k->op == EXL3_OP_MLA_DECODE) {
		work.u.mla.caches = &cache;
		work.u.mla.geometry = (struct exl3_mla_geometry){.heads = 16,
								 .dim = 576,
								 .value_dim = 512,
								 .topk = 64,
								 .slots = 64,
								 .cache_stride = 1152,
								 .indices_stride = 256,
								 .cache_dtype = EXL3_BF16,
								 .indices_dtype = EXL3_I32,
								 .page_rows = 1,
								 .table_queries = 1};
	} else {
		work.u.moe.experts = &expert;
		work.u.moe.nr_experts = 1;
		work.u.moe.act = EXL3_ACT_SILU;
		work.u.moe.routed_scale = 1;
		work.u.moe.routes = &route;
		work.u.moe.plan = probe.matrix; /* only whether there is one */
	}
	return k->supports(d->dev, &work);
}

/* ---- which rows of a module get, and why ---- */

#define ROWS_MAX 256u

struct why {
	const struct exl3_kernel *kernel; /* NULL: none */
	char text[256];
};

static void ask(const struct exl3_worker *w, const struct exl3_device *d, const struct exl3_tuned_shape *shape,
		uint32_t m, struct why *ret)
{
	const struct exl3_tuned *table = exl3_dispatch_tuned(w->dispatch, d->index);
	const struct exl3_tuned *builtin = d->ops->builtin ? d->ops->builtin(d->dev) : NULL;
	const struct exl3_tuned_line *line = exl3_tuned_find(table, shape, m), *other;
	struct exl3_tuned_probe probe;
	const char *rest;

	memset(ret, 0, sizeof(*ret));
	exl3_tuned_probe(&probe, shape, m);
	probe.work.tuned = table;
	ret->kernel = d->ops->select(d->dev, &probe.work);
	if (line && line->kernel == ret->kernel) {
		snprintf(ret->text, sizeof(ret->text), "measured: %s", table->source);
		return;
	}
	other = exl3_tuned_find(builtin, shape, m);
	rest = !ret->kernel ? "none can run it" : other && other->kernel == ret->kernel ? "built-in table"
										       : "order of preference";
	if (line)
		snprintf(ret->text, sizeof(ret->text), "%s (%s has %s, which cannot run it)", rest, table->source,
			 line->kernel->name);
	else
		snprintf(ret->text, sizeof(ret->text), "%s", rest);
}

static int ascending(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static uint32_t add_edges(const struct exl3_tuned *t, const struct exl3_tuned_shape *shape, uint32_t *rows, uint32_t nr)
{
	for (uint32_t i = 0; t && i < t->nr && nr + 2 <= ROWS_MAX; i++) {
		if (memcmp(&t->list[i].shape, shape, sizeof(*shape)) != 0)
			continue;
		rows[nr++] = t->list[i].m_first;
		if (t->list[i].m_last < EXL3_M_MAX)
			rows[nr++] = t->list[i].m_last + 1;
	}
	return nr;
}

/* Row counts at which the choice may change: where tables do, and where backends' own thresholds are. */
static uint32_t edges(const struct exl3_worker *w, const struct exl3_device *d, const struct exl3_tuned_shape *shape,
		      uint32_t rows[ROWS_MAX])
{
	uint32_t nr = 0;

	for (uint32_t m = 1; m <= 33; m++)
		rows[nr++] = m;
	for (uint32_t m = 64; m <= EXL3_M_MAX; m *= 2) {
		rows[nr++] = m;
		if (m < EXL3_M_MAX)
			rows[nr++] = m + 1;
		if (m + m / 2 < EXL3_M_MAX)
			rows[nr++] = m + m / 2;
	}
	nr = add_edges(exl3_dispatch_tuned(w->dispatch, d->index), shape, rows, nr);
	if (d->ops->builtin)
		nr = add_edges(d->ops->builtin(d->dev), shape, rows, nr);
	qsort(rows, nr, sizeof(rows[0]), ascending);
	return nr;
}

static int fill_choices(struct exl3_call *c, const struct exl3_device *d, const struct exl3_tuned_shape *shape,
			Exl3__Kernels *reply)
{
	uint32_t rows[ROWS_MAX], nr = edges(c->w, d, shape, rows);
	struct why last = {0}, now;
	Exl3__KernelChoice *choice = NULL;

	reply->choices = exl3_call_alloc(nr * sizeof(reply->choices[0]));
	if (!reply->choices)
		return exl3_call_nomem(c);
	for (uint32_t i = 0; i < nr; i++) {
		if (i && rows[i] == rows[i - 1])
			continue;
		ask(c->w, d, shape, rows[i], &now);
		if (choice && now.kernel == last.kernel && strcmp(now.text, last.text) == 0)
			continue;
		if (choice)
			choice->m_last = rows[i] - 1;
		choice = exl3_call_alloc(sizeof(*choice));
		if (!choice)
			return exl3_call_nomem(c);
		exl3__kernel_choice__init(choice);
		choice->m_first = rows[i];
		choice->m_last = EXL3_M_MAX;
		choice->kernel = (char *)(uintptr_t)(now.kernel ? now.kernel->name : "");
		choice->why = exl3_call_strdup(now.text);
		if (!choice->why)
			return exl3_call_nomem(c);
		reply->choices[reply->n_choices++] = choice;
		last = now;
	}
	return 0;
}

static int of_module(struct exl3_call *c, Exl3__Kernels *reply)
{
	const Exl3__ListKernels *req = c->req->list_kernels;
	const struct exl3_module_desc *desc;
	struct exl3_registered *reg = NULL;
	struct exl3_tuned_shape shape;
	struct exl3_linear_args linear;
	char text[EXL3_TUNED_LINE_MAX];
	int rc = exl3_call_model(c, req->model, &reg);

	if (rc < 0)
		return rc;
	rc = exl3_model_find(reg->model, req->module, EXL3_MOD_LINEAR, &desc, NULL, NULL, &c->err);
	if (rc < 0)
		return rc;
	linear = (struct exl3_linear_args){desc->shards, desc->nr_shards};
	if (!exl3_tuned_shape(&shape, &linear))
		return exl3_errf(&c->err, -EOPNOTSUPP, "%.100s has more than %u shards: no table has lines for it",
				 desc->name, EXL3_TUNED_SHARDS_MAX);
	exl3_tuned_shape_text(&shape, text, sizeof(text));
	reply->shape = exl3_call_strdup(text);
	reply->device = (char *)(uintptr_t)reg->device->name;
	return reply->shape ? fill_choices(c, reg->device, &shape, reply) : exl3_call_nomem(c);
}

int exl3_verb_list_kernels(struct exl3_call *c)
{
	const Exl3__ListKernels *req = c->req->list_kernels;
	const struct exl3_device *device = exl3_devices_find(&c->w->devices, req->device, &c->err);
	const struct exl3_kernel *kernels = device ? device->ops->kernels : NULL;
	Exl3__Kernels *reply = exl3_call_alloc(sizeof(*reply));
	size_t nr = 0;
	int rc;

	if (!device)
		return c->err.code;
	if (!reply)
		return exl3_call_nomem(c);
	exl3__kernels__init(reply);
	c->reply->body_case = EXL3__REPLY__BODY_KERNELS;
	c->reply->kernels = reply;
	if (*req->module) {
		rc = of_module(c, reply);
		if (rc < 0)
			c->reply->body_case = EXL3__REPLY__BODY__NOT_SET;
		return rc;
	}
	while (kernels[nr].name)
		nr++;
	reply->names = exl3_call_alloc((nr + 1) * sizeof(reply->names[0]));
	reply->usable = exl3_call_alloc((nr + 1) * sizeof(reply->usable[0]));
	reply->device = (char *)(uintptr_t)device->name;
	if (!reply->names || !reply->usable)
		return exl3_call_nomem(c);
	for (size_t i = 0; i < nr; i++) {
		reply->names[i] = (char *)(uintptr_t)kernels[i].name;
		reply->usable[i] = kernels[i].candidate            ? false
				   : kernels[i].op == EXL3_OP_LINEAR ? runs_linear(device, &kernels[i])
								   : runs_other(device, &kernels[i]);
	}
	reply->n_names = reply->n_usable = nr;
	return 0;
}

/* ---- calibration ---- */

int exl3_verb_calibrate(struct exl3_call *c)
{
	const Exl3__Calibrate *req = c->req->calibrate;

	return exl3_calibrate_start(c->w, req->models, req->n_models, req->apply, c->peer, &c->err);
}

int exl3_verb_calibrate_status(struct exl3_call *c)
{
	static const char *const words[] = {
		[EXL3_CALIBRATE_IDLE] = "idle",	      [EXL3_CALIBRATE_PREPARING] = "preparing",
		[EXL3_CALIBRATE_MEASURING] = "measuring", [EXL3_CALIBRATE_ENDING] = "ending",
		[EXL3_CALIBRATE_DONE] = "done",	      [EXL3_CALIBRATE_FAILED] = "failed"};
	uint64_t start = c->req->calibrate_status->start;
	Exl3__CalibrateReply *reply = exl3_call_alloc(sizeof(*reply));
	struct exl3_calibrate_progress p;
	size_t part;

	if (!reply)
		return exl3_call_nomem(c);
	exl3_calibrate_progress(c->w, &p);
	exl3__calibrate_reply__init(reply);
	reply->state = (char *)(uintptr_t)words[p.state];
	reply->shapes_done = p.shapes_done;
	reply->shapes = p.shapes;
	reply->rows = p.rows;
	reply->launches = p.launches;
	reply->what = exl3_call_strdup(p.what);
	reply->error = exl3_call_strdup(p.error);
	if (!reply->what || !reply->error)
		return exl3_call_nomem(c);
	if (start < p.table_bytes) {
		part = p.table_bytes - start < EXL3_PAGE_BYTES / 2 ? p.table_bytes - start : EXL3_PAGE_BYTES / 2;
		reply->table = exl3_call_alloc(part + 1);
		if (!reply->table)
			return exl3_call_nomem(c);
		memcpy(reply->table, p.table + start, part);
		reply->next = start + part < p.table_bytes ? start + part : 0;
	}
	c->reply->body_case = EXL3__REPLY__BODY_CALIBRATE;
	c->reply->calibrate = reply;
	return 0;
}
