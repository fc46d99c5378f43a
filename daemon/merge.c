/* SPDX-License-Identifier: Apache-2.0 */
/*
 * merge.c - which requests may share a launch: those of equal key and class.
 *
 * The key is the module, or for MLA the geometry, which clients register each for themselves: equal ones are found by
 * content in a table of those that queued requests have. The class holds what else a kernel may want to be the
 * same for all rows of a launch, so that nobody's odd types keep another one's request from running; for
 * deterministic requests also what the backend says, so that neighbours change no bit.
 */
#include "daemon/dispatch_priv.h"

#include <string.h>

EXL3_STATIC_ASSERT(sizeof(struct exl3_mla_geometry) == 48, "no padding: compared as bytes");

static uint32_t merge_class(const struct exl3_checked *c)
{
	uint32_t class = c->op | (uint32_t)c->rows.x_dtype << 4 | (uint32_t)c->rows.y_dtype << 8 |
			 (uint32_t)c->rows.stored << 12;

	if (c->op == EXL3_OP_MOE)
		class |= c->u.route.topk << 13 | (uint32_t)c->u.route.ids_dtype << 22 |
			 (uint32_t)c->u.route.weights_dtype << 26;
	return class;
}
EXL3_STATIC_ASSERT(EXL3_OP_NR <= 16 && EXL3_TOPK_MAX < 512, "the class has room for them");

#define DETERMINISTIC (1u << 31) /* never in a launch with others */

/*
 * Which deterministic requests of the module may meet without a bit of difference; 0: none. Two of the backend's
 * classes may become one here: it looks again, and runs one after the other what may not meet.
 */
static uint32_t deterministic_class(const struct exl3_lane *lane, const struct exl3_checked *c)
{
	struct exl3_work work;
	uint32_t class;

	if (!lane->ops->merge_class)
		return 0;
	exl3_work_describe(&work, c);
	work.tuned = lane->tuned;
	work.rows = &c->rows;
	work.nr_rows = 1;
	if (c->op == EXL3_OP_MOE)
		work.u.moe.routes = &c->u.route;
	else if (c->op == EXL3_OP_MLA_DECODE)
		work.u.mla.caches = &c->u.mla.cache;
	class = lane->ops->merge_class(lane->dev, &work);
	return class ? DETERMINISTIC | (merge_class(c) ^ class * 0x9e3779b1u) : 0;
}

/* NULL: the table is full of others, so this one runs alone. */
static struct exl3_shared_geometry *geometry(struct exl3_lane *lane,
					     const struct exl3_mla_geometry *g)
{
	struct exl3_shared_geometry *unused = NULL;

	for (uint32_t i = 0; i < EXL3_GEOMETRIES_MAX; i++) {
		struct exl3_shared_geometry *have = &lane->geometries[i];

		/* Also without users: decoders come back to it at once, and keep its history. */
		if (!memcmp(&have->g, g, sizeof(*g)))
			return have;
		if (!have->users && (!unused || have->used_ns < unused->used_ns))
			unused = have;
	}
	if (unused)
		unused->g = *g;
	return unused;
}

void exl3_merge_enter(struct exl3_request *req)
{
	const struct exl3_checked *c = &req->c;
	const struct exl3_module_desc *desc = c->target.desc;

	req->geometry = NULL;
	req->item.key = NULL;
	req->item.merge_class = 0;
	/* So many rows cost what they cost: company gains them nothing, and who is taken along by them waits for
	 * all of their launch. */
	if (c->rows.m > EXL3_TRAIN_ROWS_MAX)
		return;
	/* A chosen kernel or other constants are for this request alone. */
	if (c->kernel || !req->lane || c->op == EXL3_OP_NOP || c->op == EXL3_OP_PLAN ||
	    req->lane->sched.merge_max < 2)
		return;
	if (c->deterministic) {
		req->item.merge_class = deterministic_class(req->lane, c);
		if (!req->item.merge_class)
			return;
	}
	if (c->op == EXL3_OP_MLA_DECODE) {
		req->geometry = geometry(req->lane, &c->u.mla.geometry);
		if (!req->geometry)
			return;
		req->geometry->users++;
		req->geometry->used_ns = req->lane->sched.now_ns;
		req->item.key = req->geometry;
	} else if (c->op == EXL3_OP_LINEAR || (c->act == desc->act && c->limit == desc->limit &&
					       c->routed_scale == desc->routed_scale)) {
		req->item.key = desc;
	}
	if (!c->deterministic)
		req->item.merge_class = merge_class(c);
}

void exl3_merge_leave(struct exl3_request *req)
{
	if (req->geometry)
		req->geometry->users--;
	req->geometry = NULL;
}

void exl3_dispatch_merging(const struct exl3_dispatch *d, struct exl3_sched_stats *ret)
{
	memset(ret, 0, sizeof(*ret));
	for (uint32_t i = 0; i < d->nr_lanes; i++) {
		const struct exl3_sched_stats *s = &d->lanes[i].sched.stats;

		ret->launches += s->launches;
		ret->items += s->items;
		ret->merged += s->merged;
		ret->trains += s->trains;
		ret->late += s->late;
		ret->joined += s->joined;
		ret->expelled += s->expelled;
		ret->held_ns += s->held_ns;
	}
}

void exl3_dispatch_set_trains(struct exl3_dispatch *d, bool on)
{
	d->trains = on;
	for (uint32_t i = 0; i < d->nr_lanes; i++)
		exl3_sched_set_trains(&d->lanes[i].sched, on);
}
