/* SPDX-License-Identifier: Apache-2.0 */
/* replay.c - plans: recording and checking of calls, and replays as items of their channel's flow. */
#include "daemon/replay.h"

#include "daemon/dispatch_priv.h"
#include "daemon/fault.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CALLS_FIRST 16u /* room for so many at first */
#define AHEAD       8u  /* calls that are queued or running: as many as keep a device busy */

struct exl3_recorded {
	uint32_t refs; /* its handle, and each replay that has been accepted */
	struct exl3_dispatch *d;
	struct exl3_channel *ch; /* whose requests its replays are; NULL: it is gone */
	struct exl3_recorded *list_next, *list_prev; /* in ch->plans */
	struct exl3_plan_count *count; /* counted */
	struct exl3_request *calls; /* owned; call->seq is its number in the recording */
	uint32_t nr, room;
	uint32_t recorded; /* with NOPs, of which only one is kept, if there is nothing else */
	bool whole;
	struct exl3_registered **models; /* owned, each counted; all that calls use */
	uint32_t nr_models;
	struct exl3_lane *lane; /* of all calls; NULL: none needs a device */
	uint32_t rows;          /* of the longest call */
	/* While it is replayed. */
	struct exl3_request *replay; /* NULL: it is not */
	uint32_t next;               /* that has not been queued */
	uint32_t under_way;          /* calls queued or running */
	int result;                  /* of the first call that failed */
	uint64_t detail, skipped, exec_ns;
};

/* ---- recording ---- */

struct exl3_plan_count *exl3_plan_count_put(struct exl3_plan_count *count)
{
	if (count && --count->refs == 0)
		free(count);
	return NULL;
}

int exl3_recorded_new(struct exl3_channel *ch, struct exl3_plan_count *count, struct exl3_recorded **ret,
		      struct exl3_error *err)
{
	struct exl3_recorded *r;

	if (count->plans >= EXL3_PLANS_MAX)
		return exl3_errf(err, -EDQUOT, "plan: a client may have %u of them", EXL3_PLANS_MAX);
	r = exl3_fault("replay.new") ? NULL : calloc(1, sizeof(*r));
	if (!r)
		return exl3_errf(err, -ENOMEM, "plan: out of memory");
	r->refs = 1;
	r->count = count;
	count->refs++;
	count->plans++;
	r->d = ch->d;
	r->ch = ch;
	r->list_next = ch->plans;
	if (r->list_next)
		r->list_next->list_prev = r;
	ch->plans = r;
	*ret = r;
	return 0;
}

static void leave_channel(struct exl3_recorded *r)
{
	if (!r->ch)
		return;
	if (r->list_prev)
		r->list_prev->list_next = r->list_next;
	else
		r->ch->plans = r->list_next;
	if (r->list_next)
		r->list_next->list_prev = r->list_prev;
	r->ch = NULL;
	r->list_next = r->list_prev = NULL;
}

void exl3_plans_orphan(struct exl3_channel *ch)
{
	while (ch->plans)
		leave_channel(ch->plans);
}

struct exl3_recorded *exl3_recorded_put(struct exl3_recorded *r)
{
	if (!r || --r->refs)
		return NULL;
	assert(!r->replay);
	leave_channel(r);
	r->count->plans--;
	r->count->calls -= r->recorded;
	exl3_plan_count_put(r->count);
	for (uint32_t i = 0; i < r->nr; i++) {
		struct exl3_checked *c = &r->calls[i].c;

		for (uint32_t k = 0; k < c->nr_pins; k++) {
			if (--c->pins[k]->refs == 0)
				r->d->buffer_free(r->d->arg, c->pins[k]);
		}
	}
	for (uint32_t i = 0; i < r->nr_models; i++)
		exl3_registered_put(r->models[i]);
	free(r->models);
	free(r->calls);
	free(r);
	return NULL;
}

const struct exl3_registered *exl3_recorded_model(const struct exl3_recorded *r, uint32_t i)
{
	return i < r->nr_models ? r->models[i] : NULL;
}

static int make_room(struct exl3_recorded *r, uint32_t nr, struct exl3_error *err)
{
	struct exl3_request *calls;
	uint32_t room = r->room ? r->room : CALLS_FIRST;

	while (room < r->nr + nr)
		room *= 2;
	if (room == r->room)
		return 0;
	calls = exl3_fault("replay.calls") ? NULL : realloc(r->calls, room * sizeof(*calls));
	if (!calls)
		return exl3_errf(err, -ENOMEM, "plan: out of memory");
	r->calls = calls;
	r->room = room;
	return 0;
}

static int keep_model(struct exl3_recorded *r, struct exl3_registered *model, struct exl3_error *err)
{
	struct exl3_registered **models;

	for (uint32_t i = 0; i < r->nr_models; i++) {
		if (r->models[i] == model)
			return 0;
	}
	models = exl3_fault("replay.models") ? NULL : realloc(r->models, (r->nr_models + 1) * sizeof(models[0]));
	if (!models)
		return exl3_errf(err, -ENOMEM, "plan: out of memory");
	r->models = models;
	models[r->nr_models++] = exl3_registered_get(model);
	return 0;
}

/* What a replay as a whole has and a single call of it has not. */
static bool alone(const struct exl3_sqe *sqe)
{
	return sqe->op == EXL3_OP_CANCEL || sqe->op == EXL3_OP_PLAN || sqe->flags & EXL3_STREAM || sqe->deadline_ns;
}

static int check_call(struct exl3_recorded *r, const struct exl3_sqe *sqe, struct exl3_request *call,
		      struct exl3_error *err)
{
	enum exl3_detail detail = EXL3_DETAIL_OP;
	const char *why;
	int rc = alone(sqe) ? -EINVAL : exl3_check_sqe(sqe, &r->ch->env, &call->c, &detail);

	if (rc < 0) {
		why = exl3_detail_text(detail);
		return exl3_errf(err, rc, "plan: call %u: %s", r->recorded, why ? why : "it is refused");
	}
	if (sqe->op == EXL3_OP_NOP)
		return 0;
	call->lane = &r->d->lanes[call->c.target.device];
	if (r->lane && r->lane != call->lane)
		return exl3_errf(err, -EOPNOTSUPP,
				 "plan: call %u is for another device than those before it: one plan for each", r->recorded);
	return call->c.target.model ? keep_model(r, call->c.target.model, err) : 0;
}

/* Nothing of a call that is refused stays: what is kept has its references. */
static int add_call(struct exl3_recorded *r, const struct exl3_sqe *sqe, struct exl3_error *err)
{
	bool nothing = !r->nr || r->calls[0].c.op == EXL3_OP_NOP; /* that needs a device, so far */
	struct exl3_request call = {.ch = r->ch, .plan = r, .seq = r->recorded};
	int rc = check_call(r, sqe, &call, err);

	if (rc < 0)
		return rc;
	r->recorded++;
	if (sqe->op == EXL3_OP_NOP && r->nr)
		return 0;
	for (uint32_t i = 0; i < call.c.nr_pins; i++)
		call.c.pins[i]->refs++;
	if (call.lane)
		r->lane = call.lane;
	if (call.c.rows.m > r->rows)
		r->rows = call.c.rows.m;
	r->calls[nothing ? 0 : r->nr] = call;
	r->nr += !nothing || !r->nr;
	return 0;
}

int exl3_recorded_add(struct exl3_recorded *r, const struct exl3_sqe *sqes, uint32_t nr, struct exl3_error *err)
{
	int rc;

	if (r->whole)
		return exl3_errf(err, -EBUSY, "plan: it is complete");
	if (!r->ch || r->ch->closed || r->ch->failed)
		return exl3_errf(err, -ENOENT, "plan: its channel is gone");
	if (nr > EXL3_PLAN_CALLS_MAX - r->recorded)
		return exl3_errf(err, -E2BIG, "plan: more than %u calls", EXL3_PLAN_CALLS_MAX);
	if (nr > EXL3_PLANS_CALLS_MAX - r->count->calls)
		return exl3_errf(err, -EDQUOT, "plan: a client may have %u calls recorded, %u are", EXL3_PLANS_CALLS_MAX,
				 r->count->calls);
	rc = make_room(r, nr, err);
	r->count->calls -= r->recorded;
	for (uint32_t i = 0; i < nr && rc == 0; i++)
		rc = add_call(r, &sqes[i], err);
	r->count->calls += r->recorded;
	return rc;
}

int exl3_recorded_finish(struct exl3_recorded *r, struct exl3_error *err)
{
	const struct exl3_tenant *t = r->ch ? r->ch->tenant : NULL;

	if (!r->recorded)
		return exl3_errf(err, -EINVAL, "plan: it has no calls");
	if (t && t->conf.rows && r->rows > t->conf.rows)
		return exl3_errf(err, -EDQUOT, "plan: a call has %u rows, tenant %s may have %llu in flight (rows)",
				 r->rows, t->conf.name, (unsigned long long)t->conf.rows);
	r->whole = true;
	return 0;
}

/* ---- replays ---- */

uint32_t exl3_replay_rows(const struct exl3_channel *ch, uint32_t handle)
{
	const struct exl3_recorded *r = ch->plan_of ? ch->plan_of(ch->env.arg, handle) : NULL;

	return r ? r->rows : 0;
}

int exl3_replay_enter(struct exl3_request *req, uint32_t handle, enum exl3_detail *detail)
{
	struct exl3_channel *ch = req->ch;
	struct exl3_recorded *r = ch->plan_of(ch->env.arg, handle);

	*detail = EXL3_DETAIL_MODULE;
	if (!r || r->ch != ch || !r->whole)
		return -ENOENT;
	*detail = EXL3_DETAIL_MODEL;
	for (uint32_t i = 0; i < r->nr_models; i++) {
		if (r->models[i]->state != EXL3_MODEL_READY)
			return -ENOENT;
	}
	*detail = EXL3_DETAIL_NONE;
	if (r->lane && r->lane->lost)
		return -EIO;
	for (uint32_t i = 0; i < r->nr_models; i++)
		exl3_registered_pin(r->models[i]);
	r->refs++;
	req->plan = r;
	req->lane = r->lane;
	req->c.rows.m = r->rows; /* they follow each other: no more are in flight at a time */
	return 0;
}

bool exl3_replay_may_start(const struct exl3_request *req)
{
	return !req->plan->replay;
}

bool exl3_replay_runs(const struct exl3_request *req)
{
	return req->c.op == EXL3_OP_PLAN && req->plan->replay == req;
}

/* With the last one what is behind the replay in its channel may follow. */
static void queue_more(struct exl3_recorded *r)
{
	struct exl3_channel *ch = r->ch;

	if (r->next == r->nr)
		return; /* by now another one may be queueing */
	for (; r->next < r->nr && r->under_way < AHEAD; r->next++) {
		struct exl3_request *call = &r->calls[r->next];

		call->item.deadline_ns = r->replay->item.deadline_ns;
		call->item.fence = call->c.op == EXL3_OP_NOP;
		call->accepted_ns = r->next < AHEAD ? r->replay->accepted_ns : ch->d->turn_ns;
		exl3_dispatch_fresh(call);
		exl3_sched_push(&ch->lane->sched, &ch->flow, &call->item);
		r->under_way++;
	}
	ch->replaying = r->next < r->nr ? r : NULL;
}

void exl3_replay_start(struct exl3_request *req)
{
	struct exl3_recorded *r = req->plan;

	r->replay = req;
	r->next = r->under_way = 0;
	r->result = 0;
	r->detail = r->skipped = r->exec_ns = 0;
	queue_more(r);
}

/* The replay has ended if nothing of it is under way; @ch goes on with what it holds back. */
static void settle(struct exl3_recorded *r)
{
	struct exl3_channel *ch = r->ch;
	struct exl3_request *req = r->replay;

	if (!r->under_way) {
		r->replay = NULL;
		exl3_dispatch_finish(req, r->result, r->result < 0 ? r->detail : r->skipped, r->exec_ns);
	} else if (!ch->replaying) {
		exl3_dispatch_release(ch);
	}
}

/* No further call begins. False: there is none that has not begun. */
static bool stop(struct exl3_recorded *r, int result, uint64_t detail)
{
	struct exl3_channel *ch = r->ch;
	uint32_t left = r->under_way;
	bool any = r->next < r->nr;

	if (r->result < 0)
		return false;
	/* From the last one that was queued: what is under way lies together there. */
	for (uint32_t i = r->next; left && i-- > 0;) {
		struct exl3_request *call = &r->calls[i];

		left -= call->item.state != EXL3_ITEM_IDLE;
		if (call->item.state == EXL3_ITEM_QUEUED) {
			exl3_sched_remove(&ch->lane->sched, &call->item);
			exl3_merge_leave(call);
			r->under_way--;
			any = true;
		} else if (call->item.state == EXL3_ITEM_RUNNING && call->item.more && !call->cancelled) {
			call->cancelled = true; /* no further slice */
			any = true;
		}
	}
	if (!any && result == -ECANCELED)
		return false;
	r->next = r->nr;
	if (ch->replaying == r)
		ch->replaying = NULL;
	r->result = result;
	r->detail = detail;
	return true;
}

void exl3_replay_call_ended(struct exl3_request *call, int result, uint64_t detail)
{
	struct exl3_recorded *r = call->plan;
	struct exl3_channel *ch = call->ch;

	exl3_merge_leave(call);
	r->under_way--;
	r->skipped += call->skipped;
	r->exec_ns += call->exec_ns;
	if (result == 0) {
		exl3_account_success(call);
		ch->d->counters.rows += call->c.rows.m;
		if (ch->counters)
			ch->counters->rows += call->c.rows.m;
		/* What was queued went when the channel did; those that ran then bring no others. */
		if (ch->closed || ch->failed)
			stop(r, -ECANCELED, EXL3_DETAIL_NONE);
		queue_more(r);
	} else {
		stop(r, result, EXL3_PLAN_DETAIL(call->seq, detail));
	}
	settle(r);
}

int exl3_replay_cancel(struct exl3_request *req)
{
	struct exl3_recorded *r = req->plan;

	if (!stop(r, -ECANCELED, EXL3_DETAIL_NONE))
		return -EALREADY;
	settle(r);
	return 0;
}

void exl3_replay_leave(struct exl3_request *req)
{
	struct exl3_recorded *r = req->plan;

	for (uint32_t i = 0; i < r->nr_models; i++)
		exl3_registered_unpin(r->models[i]);
	req->plan = exl3_recorded_put(r);
}
