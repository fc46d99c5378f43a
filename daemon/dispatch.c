/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch.c - from ring entry to completion: check once, queue, launch, complete. */
#include "daemon/dispatch_priv.h"

#include "daemon/fault.h"
#include "daemon/log.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---- completions ---- */

/* A request of the channel has this result; the client need not know yet. */
static void count_result(struct exl3_channel *ch, uint8_t op, int result)
{
	struct exl3_dispatch *d = ch->d;

	d->counters.requests++;
	d->counters.errors += result < 0;
	if (ch->counters) {
		ch->counters->requests++;
		ch->counters->errors += result < 0;
	}
	exl3_account_answer(ch, op, result);
}

static void post(struct exl3_channel *ch, uint8_t op, uint64_t user_data, int result,
		 uint64_t detail, uint64_t exec_ns)
{
	const struct exl3_cqe cqe = {
		.user_data = user_data, .result = result, .detail = detail, .exec_ns = exec_ns};

	count_result(ch, op, result);
	if (ch->closed || ch->failed)
		return; /* nobody reads it, and a broken ring is not written any more */
	exl3_cq_post(&ch->ring, &cqe);
	exl3_channel_touch(ch);
}

static void pin(struct exl3_request *req)
{
	for (uint32_t i = 0; i < req->c.nr_pins; i++)
		req->c.pins[i]->refs++;
	if (req->c.target.model)
		exl3_registered_pin(req->c.target.model);
}

static void unpin(struct exl3_dispatch *d, struct exl3_request *req)
{
	for (uint32_t i = 0; i < req->c.nr_pins; i++) {
		if (--req->c.pins[i]->refs == 0)
			d->buffer_free(d->arg, req->c.pins[i]);
	}
	if (req->c.target.model)
		exl3_registered_unpin(req->c.target.model);
}

/* Whom CANCEL means. A look through all requests would cost a client with many of them little and the
 * others much; the key keeps it from choosing names that fall into one bucket. */
static struct exl3_bucket *bucket(const struct exl3_channel *ch, uint64_t user_data)
{
	const uint64_t *key = ch->d->hash_key;
	unsigned __int128 wide = (unsigned __int128)(user_data ^ key[0]) * key[1];

	return &ch->named[((uint64_t)(wide >> 64) ^ (uint64_t)wide) & ch->ring.cq_mask];
}

static void name_add(struct exl3_channel *ch, struct exl3_request *req)
{
	struct exl3_bucket *b = bucket(ch, req->user_data);

	req->next = NULL;
	req->prev = b->tail;
	if (b->tail)
		b->tail->next = req;
	else
		b->head = req;
	b->tail = req;
}

static void name_del(struct exl3_channel *ch, struct exl3_request *req)
{
	struct exl3_bucket *b = bucket(ch, req->user_data);

	if (req->prev)
		req->prev->next = req->next;
	else
		b->head = req->next;
	if (req->next)
		req->next->prev = req->prev;
	else
		b->tail = req->prev;
}

/* ---- order across devices, and of stream calls ---- */

/* May it join what its channel has in its lane? If so, it does. */
static bool may_join(struct exl3_channel *ch, struct exl3_request *req)
{
	/* What it asks for comes behind all calls of a replay. */
	if (ch->replaying || (req->c.op == EXL3_OP_PLAN && !exl3_replay_may_start(req)))
		return false;
	if (!exl3_words_ready(req)) {
		exl3_gate_unready(ch); /* the client may have changed its word */
		return false;
	}
	return (!req->lane || req->lane == ch->lane || (!ch->flow.queued && !ch->flow.running)) &&
	       exl3_gate_rows(ch, req);
}

static void join(struct exl3_channel *ch, struct exl3_request *req)
{
	if (req->lane && req->lane != ch->lane) {
		if (ch->lane)
			exl3_sched_leave(&ch->lane->sched, &ch->flow);
		ch->lane = req->lane;
		exl3_channel_account(ch);
	}
	if (req->c.op == EXL3_OP_PLAN)
		exl3_replay_start(req);
	else
		exl3_sched_push(&ch->lane->sched, &ch->flow, &req->item);
}

/* Where a QUEUED item is. */
static struct exl3_sched *sched_of(const struct exl3_request *req)
{
	struct exl3_channel *ch = req->ch;

	return req->item.flow == &ch->held ? &ch->d->held : &ch->lane->sched;
}

void exl3_dispatch_release(struct exl3_channel *ch)
{
	while (ch->held.head) {
		struct exl3_request *req = (struct exl3_request *)ch->held.head;

		if (!may_join(ch, req))
			return;
		exl3_sched_remove(&ch->d->held, &req->item);
		join(ch, req);
	}
}

/* The request has ended, however: unpinned, answered, its slot free again. */
static void end(struct exl3_request *req, int result)
{
	struct exl3_channel *ch = req->ch;

	assert(req->item.state == EXL3_ITEM_IDLE);
	unpin(ch->d, req);
	exl3_merge_leave(req);
	name_del(ch, req);
	req->next = ch->free;
	ch->free = req;
	exl3_gate_ended(ch, req);
	if (ch->tenant) {
		ch->tenant->requests--;
		ch->requests--;
	}
	if (req->c.op == EXL3_OP_PLAN) {
		exl3_replay_leave(req); /* its calls were counted one by one */
	} else if (result == 0) {
		exl3_account_success(req);
		ch->d->counters.rows += req->c.rows.m;
		if (ch->counters)
			ch->counters->rows += req->c.rows.m;
	}
	if (req->stream)
		exl3_words_end(ch, req->seq, result);
}

void exl3_dispatch_finish(struct exl3_request *req, int result, uint64_t detail, uint64_t exec_ns)
{
	struct exl3_channel *ch = req->ch;

	if (req->plan && req->c.op != EXL3_OP_PLAN) {
		exl3_replay_call_ended(req, result, detail);
		return;
	}
	end(req, result);
	post(ch, req->c.op, req->user_data, result, detail, exec_ns);
	exl3_dispatch_release(ch);
}

void exl3_dispatch_end(struct exl3_request *req, int result)
{
	exl3_sched_remove(sched_of(req), &req->item);
	exl3_dispatch_finish(req, result, EXL3_DETAIL_NONE, 0);
}

/* ---- entries ---- */

/* The oldest request of that name that has not started is taken out, or one with slices left ends after the
 * one that runs: 0, -EALREADY, -ENOENT. */
static int cancel(struct exl3_channel *ch, uint64_t user_data)
{
	struct exl3_request *req = bucket(ch, user_data)->head;
	int rc = -ENOENT;

	for (; req; req = req->next) {
		if (req->user_data != user_data)
			continue;
		if (exl3_replay_runs(req)) {
			rc = exl3_replay_cancel(req);
			if (rc == 0)
				return 0;
			continue;
		}
		if (req->item.state == EXL3_ITEM_RUNNING && req->item.more && !req->cancelled) {
			req->cancelled = true;
			return 0;
		}
		if (req->item.state == EXL3_ITEM_RUNNING) {
			rc = -EALREADY; /* unless a later one of that name waits */
			continue;
		}
		exl3_dispatch_end(req, -ECANCELED);
		return 0;
	}
	return rc;
}

/* May this be accepted at all, leaving aside whether it is right? */
static int admit(const struct exl3_dispatch *d, uint8_t op, uint32_t device)
{
	if (op == EXL3_OP_CANCEL)
		return 0;
	if (d->draining)
		return -ESHUTDOWN;
	return op != EXL3_OP_NOP && op != EXL3_OP_PLAN && d->lanes[device].lost ? -EIO : 0;
}

void exl3_dispatch_refuse(struct exl3_channel *ch, const struct exl3_sqe *sqe, int code,
			  enum exl3_detail detail)
{
	/* Whatever is wrong with it: a stream may wait for it. */
	if (sqe->flags & EXL3_STREAM && ch->words)
		exl3_words_end(ch, sqe->stream_seq, code);
	post(ch, sqe->op, sqe->user_data, code, detail, 0);
}

void exl3_dispatch_fresh(struct exl3_request *req)
{
	exl3_merge_enter(req);
	req->first = 0;
	req->skipped = req->exec_ns = 0;
	req->cancelled = false;
	if (req->c.op != EXL3_OP_PLAN)
		exl3_slice_plan(req, req->lane ? &req->lane->pace : NULL, req->ch->d->chunk_ns);
}

void exl3_dispatch_entry(struct exl3_channel *ch, const struct exl3_sqe *sqe)
{
	struct exl3_dispatch *d = ch->d;
	struct exl3_request *req = ch->free;
	enum exl3_detail detail;
	bool stream;
	int rc;

	assert(req); /* as many slots as credit, which was checked when the entry was taken */
	rc = exl3_check_sqe(sqe, &ch->env, &req->c, &detail);
	if (rc == 0)
		rc = admit(d, sqe->op, req->c.target.device);
	/* The turn began before the entry was seen, perhaps before the deadline was set. */
	if (rc == 0 && sqe->deadline_ns && sqe->op != EXL3_OP_CANCEL && exl3_now_ns() >= sqe->deadline_ns)
		rc = -ETIME;
	req->plan = NULL;
	if (rc == 0 && sqe->op == EXL3_OP_PLAN)
		rc = exl3_replay_enter(req, sqe->module, &detail);
	if (rc < 0) {
		exl3_dispatch_refuse(ch, sqe, rc, detail);
		return;
	}
	if (sqe->op == EXL3_OP_CANCEL) {
		/* Takes no turn: behind what it cancels it would be of no use. */
		rc = cancel(ch, sqe->u.cancel.user_data);
		post(ch, sqe->op, sqe->user_data, rc, EXL3_DETAIL_NONE, 0);
		return;
	}
	stream = sqe->flags & EXL3_STREAM;
	if (sqe->op == EXL3_OP_NOP && !stream && !ch->replaying && !ch->flow.queued && !ch->flow.running &&
	    !ch->held.queued) {
		post(ch, sqe->op, sqe->user_data, 0, EXL3_DETAIL_NONE, 0);
		return;
	}
	ch->free = req->next;
	req->user_data = sqe->user_data;
	req->item.deadline_ns = sqe->deadline_ns;
	/* In a stream a NOP is an empty kernel of whatever device is in use. */
	req->item.fence = sqe->op == EXL3_OP_NOP && !stream;
	if (sqe->op == EXL3_OP_NOP)
		req->lane = stream ? ch->lane : NULL;
	else if (sqe->op != EXL3_OP_PLAN)
		req->lane = &d->lanes[req->c.target.device];
	req->stream = stream;
	req->seq = sqe->stream_seq;
	req->accepted_ns = d->turn_ns;
	exl3_dispatch_fresh(req);
	req->counted = false;
	if (ch->tenant) {
		ch->tenant->requests++;
		ch->requests++;
	}
	pin(req);
	name_add(ch, req);
	if (!stream && !ch->waits)
		exl3_gate_count(ch, req); /* what it may wait for ends by itself */
	if (!ch->held.queued && may_join(ch, req)) {
		join(ch, req);
		return;
	}
	exl3_sched_push(&d->held, &ch->held, &req->item);
	if (stream)
		exl3_words_hold(ch, exl3_now_ns());
}

void exl3_dispatch_drop_queued(struct exl3_channel *ch)
{
	/* Those held back first: the end of the others would let them go. */
	while (ch->held.head || ch->flow.head) {
		struct exl3_request *req =
			(struct exl3_request *)(ch->held.tail ? ch->held.tail : ch->flow.head);

		exl3_dispatch_end(req, -ECANCELED);
	}
}

/* ---- launches ---- */

static void build_rows(struct exl3_launch *l)
{
	for (uint32_t i = 0; i < l->nr; i++) {
		const struct exl3_request *req = (struct exl3_request *)l->items[i];

		exl3_slice_operands(req, l, i);
		l->skipped[i] = 0;
		l->work.nr_signals += exl3_words_signal(req, &l->signals[l->work.nr_signals]);
	}
}

static void build(struct exl3_launch *l)
{
	const struct exl3_checked *c = &((struct exl3_request *)l->items[0])->c;
	struct exl3_work *work = &l->work;

	exl3_work_describe(work, c);
	work->rows = l->rows;
	work->nr_rows = l->nr;
	work->skipped = l->skipped;
	work->signals = l->signals;
	work->tag = l;
	build_rows(l);
	if (c->op == EXL3_OP_MOE)
		work->u.moe.routes = l->u.routes;
	else if (c->op == EXL3_OP_MLA_DECODE)
		work->u.mla.caches = l->u.caches;
}

/* What the device needed is what the next slices of such requests are planned by. */
static void learn(struct exl3_lane *lane, const struct exl3_launch *l, uint64_t exec_ns)
{
	uint32_t rows = 0;

	exl3_account_ended(lane->d, l, exec_ns);
	if (l->work.op == EXL3_OP_NOP)
		return;
	for (uint32_t i = 0; i < l->nr; i++)
		rows += l->rows[i].m;
	exl3_chunk_learn(&lane->pace, &((struct exl3_request *)l->items[0])->c, rows, exec_ns);
}

/* The launch has ended: every request of it is answered or goes on with its next slice, the launch can be
 * used again. */
static void complete(struct exl3_lane *lane, struct exl3_launch *l, int result, uint64_t exec_ns)
{
	struct exl3_cqe cqe[EXL3_LAUNCH_ITEMS_MAX];
	bool ended[EXL3_LAUNCH_ITEMS_MAX], told[EXL3_LAUNCH_ITEMS_MAX];
	uint64_t now_ns = exl3_now_ns();
	uint32_t nr = l->nr;

	exl3_lane_ended(lane, l);
	l->tuned = exl3_tuned_put(l->tuned);
	/* Those who wait hear of it first: all that follows takes longer than they need for their next request.
	 * Words of streams have their own order. */
	for (uint32_t i = 0; i < nr; i++) {
		struct exl3_request *req = (struct exl3_request *)l->items[i];
		struct exl3_channel *ch = req->ch;
		/* Only then is the backend done with what it writes there. */
		uint64_t skipped = result == 0 ? l->skipped[i] : 0;

		ended[i] = !exl3_slice_ended(req, result, skipped, exec_ns);
		cqe[i] = (struct exl3_cqe){
			.user_data = req->user_data,
			.result = result == 0 && req->item.more ? -ECANCELED : result,
			.detail = result == -EOPNOTSUPP ? EXL3_DETAIL_KERNEL : EXL3_DETAIL_NONE,
			.exec_ns = req->exec_ns};
		if (cqe[i].result == 0)
			cqe[i].detail = req->skipped;
		told[i] = ended[i] && !req->stream && !req->plan && !ch->closed && !ch->failed;
		if (told[i])
			exl3_channel_answer(ch, &cqe[i]);
	}
	if (result == 0)
		learn(lane, l, exec_ns);
	exl3_sched_done(&lane->sched, l->items, nr, exec_ns);
	for (uint32_t i = 0; i < nr; i++) {
		struct exl3_request *req = (struct exl3_request *)l->items[i];
		struct exl3_channel *ch = req->ch;

		if (!ended[i]) {
			exl3_slice_plan(req, &lane->pace, lane->d->chunk_ns);
			exl3_sched_again(&lane->sched, &req->item);
			continue;
		}
		if (told[i]) {
			end(req, cqe[i].result);
			count_result(ch, req->c.op, cqe[i].result);
			exl3_channel_answered(ch, now_ns);
			exl3_dispatch_release(ch);
		} else {
			exl3_dispatch_finish(req, cqe[i].result, cqe[i].detail, cqe[i].exec_ns);
		}
		exl3_channel_try_free(ch);
	}
	l->nr = 0;
	l->next = lane->free;
	lane->free = l;
}

/* The same channels in the same order whenever they are together: a backend may know their rows again. */
static void in_order(struct exl3_launch *l)
{
	for (uint32_t i = 1; i < l->nr; i++) {
		struct exl3_sched_item *item = l->items[i];
		uint32_t k = i;

		for (; k > 0 && (uintptr_t)l->items[k - 1]->flow > (uintptr_t)item->flow; k--)
			l->items[k] = l->items[k - 1];
		l->items[k] = item;
	}
}

/* 0, or -EAGAIN: the device's queue is full and the launch is undone. */
static int launch(struct exl3_lane *lane, struct exl3_sched_item *const *items, uint32_t nr)
{
	struct exl3_launch *l = lane->free;
	int rc;

	assert(l); /* as many as the scheduler may have running */
	lane->free = l->next;
	l->nr = nr;
	memcpy(l->items, items, nr * sizeof(items[0]));
	in_order(l);
	build(l);
	l->work.tuned = l->tuned = exl3_tuned_get(lane->tuned);
	rc = exl3_fault("dispatch.submit") ? -EIO : lane->ops->submit(lane->dev, &l->work);
	if (rc == -EAGAIN) {
		exl3_sched_unpick(&lane->sched, items, nr);
		l->tuned = exl3_tuned_put(l->tuned);
		l->nr = 0;
		l->next = lane->free;
		lane->free = l;
		return rc;
	}
	exl3_lane_launched(lane, l);
	exl3_account_launched(l, lane->d->turn_ns);
	if (rc < 0)
		complete(lane, l, rc, 0);
	return 0;
}

/* Starts what can be started; true: something was. */
static bool launch_all(struct exl3_lane *lane)
{
	struct exl3_sched_item *items[EXL3_LAUNCH_ITEMS_MAX];
	bool any = false;
	uint32_t nr;

	for (uint32_t i = 0; i < EXL3_ENDS_MAX; i++) {
		nr = exl3_sched_pick(&lane->sched, items);
		if (!nr)
			break;
		if (items[0]->state == EXL3_ITEM_IDLE) {
			exl3_dispatch_finish((struct exl3_request *)items[0], 0, EXL3_DETAIL_NONE, 0);
		} else if (launch(lane, items, nr) < 0) {
			break; /* the device's next completion brings us back here */
		}
		any = true;
	}
	return any;
}

/* True: there was something. */
static bool fail_queued(struct exl3_lane *lane)
{
	bool any = lane->sched.queued;

	struct exl3_request *req;

	while ((req = (struct exl3_request *)exl3_sched_any(&lane->sched))) {
		exl3_dispatch_end(req, -EIO);
	}
	return any;
}

static void device_failed(struct exl3_lane *lane, int code)
{
	if (lane->lost)
		return;
	lane->lost = true;
	if (lane->d->metrics)
		exl3_metric_add(&lane->d->metrics->device_faults, 1);
	errno = -code;
	exl3_errf(&lane->d->lost, code, "device %u is lost (%m)",
		  (unsigned)(lane - lane->d->lanes));
	exl3_err("%s: running requests fail, new ones are refused", lane->d->lost.text);
	fail_queued(lane);
	/* "All work failed": nothing of it comes back through poll(). */
	for (uint32_t i = 0; i < lane->sched.launches_max; i++) {
		if (lane->launches[i].nr)
			complete(lane, &lane->launches[i], -EIO, 0);
	}
	fail_queued(lane); /* what was held back until then */
	exl3_guest_lost(lane);
}

void exl3_dispatch_fail(struct exl3_dispatch *d, uint32_t device)
{
	device_failed(&d->lanes[device], -EIO);
}

static bool poll_device(struct exl3_lane *lane)
{
	struct exl3_done done[EXL3_DONE_MAX];
	int n;

	if (!lane->sched.launches && !lane->guests)
		return false;
	if (exl3_fault("dispatch.hang"))
		return exl3_lane_overdue(lane);
	n = exl3_fault("dispatch.poll") ? -EIO : lane->ops->poll(lane->dev, done, EXL3_DONE_MAX);
	if (n < 0) {
		device_failed(lane, n);
		return true;
	}
	for (int i = 0; i < n; i++) {
		if (!exl3_guest_ended(lane, &done[i]))
			complete(lane, done[i].tag, done[i].result, done[i].exec_ns);
	}
	return n > 0 || exl3_lane_overdue(lane);
}

static bool expire(struct exl3_sched *sched, uint64_t now_ns)
{
	struct exl3_sched_item *item;
	bool any = false;

	for (uint32_t i = 0; i < EXL3_ENDS_MAX; i++) {
		item = exl3_sched_expire(sched, now_ns);
		if (!item)
			break;
		exl3_dispatch_finish((struct exl3_request *)item, -ETIME, EXL3_DETAIL_NONE, 0);
		any = true;
	}
	return any;
}

/* ---- the loop's side ---- */

bool exl3_dispatch_turn(struct exl3_dispatch *d, uint64_t now_ns)
{
	bool any;

	exl3_lanes_turn(d, now_ns);
	for (uint32_t i = 0; i < d->nr_lanes; i++)
		exl3_sched_tick(&d->lanes[i].sched, now_ns);
	any = !d->leaving && d->waiting && exl3_gates_turn(d, now_ns);
	any |= !d->leaving && exl3_channels_turn(d, now_ns);
	for (uint32_t i = 0; i < d->nr_lanes; i++) {
		any |= poll_device(&d->lanes[i]);
		any |= expire(&d->lanes[i].sched, now_ns);
	}
	any |= expire(&d->held, now_ns);
	if (d->listening)
		any |= exl3_words_turn(d, now_ns);
	for (uint32_t i = 0; i < d->nr_lanes; i++) {
		if (d->lanes[i].lost)
			any |= fail_queued(&d->lanes[i]); /* what another device's end let go */
		else if (d->lanes[i].sched.queued)
			any |= launch_all(&d->lanes[i]);
		if (d->lanes[i].guest)
			any |= exl3_guest_turn(&d->lanes[i], now_ns);
	}
	if (d->dirty)
		exl3_channels_publish(d);
	if (any)
		d->last_ns = now_ns;
	return any;
}

bool exl3_dispatch_may_sleep(struct exl3_dispatch *d, uint64_t now_ns, uint64_t *until_ns)
{
	bool spin = now_ns - d->last_ns < d->spin_ns && !exl3_dispatch_needs_cpu(d);

	/* Polled channels arm themselves when their spin budget is used up. */
	if ((d->polled.head && !d->leaving) || d->dirty)
		return false;
	*until_ns = exl3_lanes_until(d, now_ns);
	if (d->held.next_deadline < *until_ns)
		*until_ns = d->held.next_deadline;
	for (uint32_t i = 0; i < d->nr_lanes; i++) {
		const struct exl3_lane *lane = &d->lanes[i];

		if (lane->sched.next_deadline < *until_ns)
			*until_ns = lane->sched.next_deadline;
		if (lane->sched.queued && lane->sched.wake_ns < *until_ns)
			*until_ns = lane->sched.wake_ns;
		if (lane->guest && exl3_guest_until(lane, now_ns) < *until_ns)
			*until_ns = exl3_guest_until(lane, now_ns);
		if (!lane->sched.launches && !lane->guests)
			continue;
		if (spin || !lane->ops->wake_arm(lane->dev))
			return false;
	}
	if (!d->leaving && d->waiting && exl3_gates_until(d, now_ns) < *until_ns)
		*until_ns = exl3_gates_until(d, now_ns);
	return exl3_words_may_sleep(d, now_ns, until_ns);
}

bool exl3_dispatch_needs_cpu(const struct exl3_dispatch *d)
{
	for (uint32_t i = 0; i < d->nr_lanes; i++) {
		if (d->lanes[i].sched.launches && !d->lanes[i].spin_beside)
			return true;
	}
	return false;
}

static void on_device(void *arg, uint32_t events)
{
	/* Only the wake-up counts: the next turn polls the device. */
	(void)arg;
	(void)events;
}

int exl3_dispatch_new(const struct exl3_dispatch_options *opt, struct exl3_dispatch **ret,
		      struct exl3_error *err)
{
	struct exl3_dispatch *d = calloc(1, sizeof(*d));

	if (!d)
		return exl3_errf(err, -ENOMEM, "dispatch: out of memory");
	d->loop = opt->loop;
	d->queue_depth = opt->queue_depth;
	d->merge_max = opt->merge_max;
	d->trains = opt->trains;
	d->spin_ns = opt->spin_ns;
	d->deterministic = opt->deterministic;
	d->buffer_free = opt->buffer_free;
	d->arg = opt->arg;
	d->metrics = opt->metrics;
	if (getrandom(d->hash_key, sizeof(d->hash_key), GRND_NONBLOCK) < 0)
		d->hash_key[0] = exl3_now_ns();
	d->hash_key[1] |= 1u | 1ull << 63;
	d->muted_timer.fn = exl3_channels_on_muted;
	d->muted_timer.arg = d;
	d->chunk_ns = opt->chunk_ns;
	d->slack_ns = opt->slack_ns;
	d->turn_ns = exl3_now_ns();
	exl3_sched_init(&d->held, 0, 1, EXL3_M_MAX);
	*ret = d;
	return 0;
}

int exl3_dispatch_add_device(struct exl3_dispatch *d, const struct exl3_backend_ops *ops,
			     struct exl3_dev *dev, bool spin_beside, struct exl3_error *err)
{
	struct exl3_lane *lane = &d->lanes[d->nr_lanes];
	int fd, rc;

	assert(d->nr_lanes < EXL3_DEVICES_MAX && !d->nr_channels);
	*lane = (struct exl3_lane){.d = d, .ops = ops, .dev = dev, .spin_beside = spin_beside};
	lane->launches = calloc(d->queue_depth, sizeof(*lane->launches));
	if (!lane->launches)
		return exl3_errf(err, -ENOMEM, "dispatch: out of memory");
	for (uint32_t i = 0; i < d->queue_depth; i++) {
		lane->launches[i].next = lane->free;
		lane->free = &lane->launches[i];
	}
	while (ops->kernels[lane->nr_kernels].name)
		lane->nr_kernels++;
	exl3_sched_init(&lane->sched, d->queue_depth, d->merge_max, EXL3_M_MAX);
	exl3_sched_set_trains(&lane->sched, d->trains);
	exl3_sched_set_cost_max(&lane->sched, d->chunk_ns);
	exl3_pace_init(&lane->pace, strcmp(ops->name, "cpu") != 0);
	fd = ops->event_fd(dev);
	rc = fd < 0 ? 0
		    : exl3_watch_add(d->loop, fd, POLLIN, EXL3_WATCH_EDGE, on_device, d,
				     &lane->watch);
	if (rc < 0) {
		free(lane->launches);
		return exl3_errf(err, rc, "dispatch: out of memory");
	}
	d->nr_lanes++;
	return 0;
}

struct exl3_dispatch *exl3_dispatch_free(struct exl3_dispatch *d)
{
	if (!d)
		return NULL;
	assert(!d->nr_channels && !d->held.queued);
	exl3_timer_cancel(d->loop, &d->muted_timer);
	for (uint32_t i = 0; i < d->nr_lanes; i++) {
		assert(!d->lanes[i].sched.launches && !d->lanes[i].guests);
		exl3_tuned_put(d->lanes[i].tuned);
		exl3_watch_drop(d->loop, d->lanes[i].watch);
		free(d->lanes[i].launches);
	}
	free(d);
	return NULL;
}

void exl3_dispatch_set_spin(struct exl3_dispatch *d, uint64_t spin_ns)
{
	d->spin_ns = spin_ns;
}

void exl3_dispatch_set_slack(struct exl3_dispatch *d, uint64_t slack_ns)
{
	d->slack_ns = slack_ns;
}

void exl3_dispatch_set_ready(struct exl3_dispatch *d, uint64_t spin_ns, uint64_t timeout_ns)
{
	d->ready_spin_ns = spin_ns;
	d->ready_timeout_ns = timeout_ns;
}

void exl3_dispatch_set_chunk(struct exl3_dispatch *d, uint64_t chunk_ns)
{
	d->chunk_ns = chunk_ns;
	for (uint32_t i = 0; i < d->nr_lanes; i++)
		exl3_sched_set_cost_max(&d->lanes[i].sched, chunk_ns);
}

void exl3_dispatch_set_tuned(struct exl3_dispatch *d, uint32_t device, struct exl3_tuned *tuned)
{
	struct exl3_lane *lane = &d->lanes[device];

	exl3_tuned_get(tuned);
	exl3_tuned_put(lane->tuned);
	lane->tuned = tuned;
}

const struct exl3_tuned *exl3_dispatch_tuned(const struct exl3_dispatch *d, uint32_t device)
{
	return d->lanes[device].tuned;
}

void exl3_dispatch_drain(struct exl3_dispatch *d)
{
	d->draining = true;
	d->drain_ns = exl3_now_ns();
}

void exl3_dispatch_leave(struct exl3_dispatch *d)
{
	d->draining = d->leaving = true;
}

bool exl3_dispatch_busy(const struct exl3_dispatch *d)
{
	bool busy = d->held.queued || d->dirty;

	for (uint32_t i = 0; i < d->nr_lanes; i++)
		busy |= d->lanes[i].sched.queued || d->lanes[i].sched.running || d->lanes[i].guests;
	return busy;
}

const struct exl3_counters *exl3_dispatch_counters(const struct exl3_dispatch *d)
{
	return &d->counters;
}

bool exl3_dispatch_lost(const struct exl3_dispatch *d, const char **why)
{
	if (why)
		*why = d->lost.text;
	return d->lost.code < 0;
}

uint32_t exl3_dispatch_channels(const struct exl3_dispatch *d)
{
	return d->nr_channels;
}

uint64_t exl3_dispatch_syscalls(const struct exl3_dispatch *d)
{
	return d->syscalls;
}
