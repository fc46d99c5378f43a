/* SPDX-License-Identifier: Apache-2.0 */
/* private.c - a decoder with the backend and a copy of the weights in its own process. */
#include "bench/serving/serving.h"

#include "daemon/weights.h"
#include "shm/ring.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct copy {
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev;
	struct exl3_model *model;
	struct exl3_arena *arena;
	const struct exl3_module_desc *modules[4 * SERVING_LAYERS_MAX + 1];
	uint32_t y_offset;
};

static int call(struct serving_decoder *d, uint32_t module, uint64_t *exec_ns)
{
	struct copy *me = d->arg;
	const struct exl3_module_desc *desc = me->modules[module];
	const struct exl3_rows rows = {
		.x = me->arena->dev_ptr,
		.y = (char *)me->arena->dev_ptr + me->y_offset,
		.x_stride = desc->k_log * 2,
		.y_stride = desc->n_log * 2,
		.m = 1,
		.x_dtype = EXL3_F16,
		.y_dtype = EXL3_F16,
		.x_device = !me->arena->host_ptr,
	};
	uint64_t skipped = 0;
	const struct exl3_work work = {
		.op = EXL3_OP_LINEAR,
		.rows = &rows,
		.nr_rows = 1,
		.u.linear = {.shards = desc->shards, .nr_shards = desc->nr_shards},
		.skipped = &skipped,
	};
	struct exl3_done done;
	int n;

	if (me->ops->submit(me->dev, &work) < 0)
		n = -1;
	else
		while ((n = me->ops->poll(me->dev, &done, 1)) == 0)
			exl3_ring_relax();
	if (n < 0 || done.result < 0) {
		snprintf(d->record->error, sizeof(d->record->error), "the device failed");
		return -1;
	}
	*exec_ns = done.exec_ns;
	return 0;
}

static const struct exl3_module_desc *find(const struct exl3_model *m, const char *name)
{
	for (uint32_t i = 0; i < m->nr_modules; i++)
		if (m->modules[i].kind == EXL3_MOD_LINEAR && !strcmp(m->modules[i].name, name))
			return &m->modules[i];
	return NULL;
}

static int load(const struct serving_options *o, struct copy *me, const char *folder, uint32_t *nr,
		struct exl3_error *err)
{
	struct exl3_dev_options opt = {.numa_node = -1};
	uint32_t k = 0, n = 0;
	char name[96];

	me->ops = exl3_backend_find(o->backend);
	if (!me->ops)
		return exl3_errf(err, -ENODEV, "no backend %s", o->backend);
	if (me->ops->open(&opt, &me->dev, err) ||
	    exl3_model_new("bench", folder, me->ops, me->dev, &me->model, err))
		return err->code;
	if (exl3_model_load(me->model)) {
		*err = me->model->error;
		return err->code;
	}
	for (*nr = 0; serving_module(o, *nr, name, sizeof(name)); ++*nr) {
		me->modules[*nr] = find(me->model, name);
		if (!me->modules[*nr])
			return exl3_errf(err, -ENOENT, "no module %s", name);
		k = me->modules[*nr]->k_log > k ? me->modules[*nr]->k_log : k;
		n = me->modules[*nr]->n_log > n ? me->modules[*nr]->n_log : n;
	}
	me->y_offset = (2 * k + 255) / 256 * 256;
	/* As a framework would have it: activations in the device's memory. */
	return (me->ops->device_arena_new ? me->ops->device_arena_new : me->ops->arena_new)(
		me->dev, me->y_offset + 2ull * n, &me->arena, err);
}

int serving_private(const struct serving_options *o, struct serving_shared *shared, unsigned nth,
		    const char *folder)
{
	struct copy *me = calloc(1, sizeof(*me));
	struct exl3_error err = {0};
	struct serving_decoder d = {
		.o = o, .shared = shared, .record = &shared->client[nth], .call = call, .arg = me};

	if (!me)
		return 1;
	if (load(o, me, folder, &d.modules, &err) < 0) {
		snprintf(d.record->error, sizeof(d.record->error), "%.250s", err.text);
		__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
		return 1;
	}
	__atomic_fetch_add(&shared->bytes, me->model->weight_bytes + me->arena->bytes,
			   __ATOMIC_SEQ_CST);
	return serving_decode(&d, nth);
}
