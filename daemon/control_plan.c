/* SPDX-License-Identifier: Apache-2.0 */
/* control_plan.c - verbs for plans: calls that are recorded and checked once. */
#include "daemon/control.h"
#include "daemon/fault.h"
#include "daemon/replay.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void recorded_putp(struct exl3_recorded **r)
{
	*r = exl3_recorded_put(*r);
}

/* The first packet of a plan. */
static int plan_new(struct exl3_call *c, uint32_t *handle)
{
	const Exl3__RecordPlan *req = c->req->record_plan;
	exl3_auto(recorded_putp) struct exl3_recorded *plan = NULL;
	struct exl3_handle h = {.type = EXL3_HANDLE_PLAN};
	uint32_t slot = req->channel - 1;
	int rc;

	if (slot >= EXL3_CHANNELS_MAX || !c->peer->channels[slot])
		return exl3_errf(&c->err, -ENOENT, "plan: there is no channel %u", req->channel);
	if (!c->peer->plan_count) {
		c->peer->plan_count = exl3_fault("replay.count") ? NULL : calloc(1, sizeof(*c->peer->plan_count));
		if (!c->peer->plan_count)
			return exl3_errf(&c->err, -ENOMEM, "plan: out of memory");
		c->peer->plan_count->refs = 1;
	}
	rc = exl3_recorded_new(c->peer->channels[slot], c->peer->plan_count, &plan, &c->err);
	if (rc < 0)
		return rc;
	h.plan = plan;
	rc = exl3_handle_add_as(c->peer, &h, req->handle, handle, &c->err);
	if (rc == 0)
		plan = NULL; /* the handle's */
	return rc;
}

static int plan_add(struct exl3_call *c, struct exl3_handle *h)
{
	const Exl3__RecordPlan *req = c->req->record_plan;
	struct exl3_sqe sqes[EXL3_PACKET_MAX / sizeof(struct exl3_sqe)]; /* aligned, unlike the packet */
	uint32_t nr = (uint32_t)(req->entries.len / sizeof(sqes[0]));
	int rc;

	if (req->entries.len % sizeof(sqes[0]) || req->entries.len > sizeof(sqes))
		return exl3_errf(&c->err, -EINVAL, "plan: %zu bytes are no whole entries", req->entries.len);
	if (nr)
		memcpy(sqes, req->entries.data, req->entries.len);
	rc = exl3_recorded_add(h->plan, sqes, nr, &c->err);
	return rc == 0 && req->last ? exl3_recorded_finish(h->plan, &c->err) : rc;
}

int exl3_verb_record_plan(struct exl3_call *c)
{
	Exl3__Handle *reply = exl3_call_alloc(sizeof(*reply));
	uint32_t handle = c->req->record_plan->plan;
	struct exl3_handle *h;
	int rc;

	if (!reply)
		return exl3_call_nomem(c);
	if (!handle) {
		rc = plan_new(c, &handle);
		if (rc < 0)
			return rc;
	}
	h = exl3_handle_find(c->peer, handle);
	if (!h || h->type != EXL3_HANDLE_PLAN)
		return exl3_errf(&c->err, -ENOENT, "plan: no plan has handle %u", handle);
	rc = plan_add(c, h);
	if (rc < 0) {
		if (rc != -EBUSY) /* a complete one is not spoiled by what comes late */
			exl3_handle_close(c->peer, h);
		return rc;
	}
	exl3__handle__init(reply);
	reply->handle = handle;
	c->reply->body_case = EXL3__REPLY__BODY_HANDLE;
	c->reply->handle = reply;
	return 0;
}

int exl3_verb_free_plan(struct exl3_call *c)
{
	struct exl3_handle *h = exl3_handle_find(c->peer, c->req->free_plan->handle);

	if (!h || h->type != EXL3_HANDLE_PLAN)
		return exl3_errf(&c->err, -ENOENT, "plan: no plan has handle %u", c->req->free_plan->handle);
	exl3_handle_close(c->peer, h);
	return 0;
}
