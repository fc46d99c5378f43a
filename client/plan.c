/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c - plans: entries that are recorded instead of submitted, and their replays. */
#include "client/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PACKET_CALLS ((EXL3_PACKET_MAX - 4096u) / sizeof(struct exl3_sqe))

static void plan_drop(struct exl3_object *o)
{
	struct exl3_plan *plan = (struct exl3_plan *)o;

	if (!plan)
		return;
	for (size_t i = 0; i < sizeof(plan->chunks) / sizeof(plan->chunks[0]); i++)
		free(plan->chunks[i]);
	free(plan);
}

static void plan_freep(struct exl3_plan **plan)
{
	plan_drop(*plan ? &(*plan)->obj : NULL);
	*plan = NULL;
}

/* ---- recording ---- */

int exl3_plan_begin(struct exl3_channel *ch)
{
	int e = exl3_client_check(ch->obj.client);

	if (e == 0)
		e = exl3_channel_live(ch);
	if (e < 0)
		return e;
	if (ch->map)
		return exl3_errf(exl3_client_err(), -EOPNOTSUPP,
				 "plan: the channel runs its calls in this process (mapped mode): make one with EXL3_CHANNEL_DIRECT (Python: mode=\"direct\")");
	if (ch->recording)
		return exl3_errf(exl3_client_err(), -EBUSY, "plan: the channel records one already");
	if (ch->ring.sq_next != ch->ring.sq_published)
		return exl3_errf(exl3_client_err(), -EBUSY,
				 "plan: the channel has entries that are not submitted");
	ch->recording = calloc(1, sizeof(*ch->recording));
	if (!ch->recording)
		return exl3_errf(exl3_client_err(), -ENOMEM, "plan: out of memory");
	return 0;
}

struct exl3_sqe *exl3_plan_next(struct exl3_channel *ch)
{
	struct exl3_plan *plan = ch->recording;
	struct exl3_sqe **chunk = &plan->chunks[plan->nr / EXL3_PLAN_CHUNK];

	if (plan->nr == EXL3_PLAN_CALLS_MAX) {
		exl3_errf(exl3_client_err(), -E2BIG, "plan: more than %u calls", EXL3_PLAN_CALLS_MAX);
		return NULL;
	}
	if (!*chunk)
		*chunk = calloc(EXL3_PLAN_CHUNK, sizeof(**chunk));
	if (!*chunk) {
		exl3_errf(exl3_client_err(), -ENOMEM, "plan: out of memory");
		return NULL;
	}
	return &(*chunk)[plan->nr++ % EXL3_PLAN_CHUNK];
}

int exl3_plan_record(const struct exl3_plan *plan, uint32_t channel,
		     int (*send)(void *arg, Exl3__Request *req, Exl3__Reply **reply), void *arg, uint32_t want,
		     uint32_t *handle)
{
	exl3_auto(exl3_freep) struct exl3_sqe *page = malloc(PACKET_CALLS * sizeof(*page));
	Exl3__RecordPlan body = EXL3__RECORD_PLAN__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	if (!page)
		return exl3_errf(exl3_client_err(), -ENOMEM, "plan: out of memory");
	req.body_case = EXL3__REQUEST__BODY_RECORD_PLAN;
	req.record_plan = &body;
	body.channel = channel;
	body.handle = want;
	body.entries.data = (uint8_t *)page;
	for (uint32_t first = 0, n; first < plan->nr || !first; first += n) {
		exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
		int e;

		for (n = 0; n < PACKET_CALLS && first + n < plan->nr; n++)
			page[n] = plan->chunks[(first + n) / EXL3_PLAN_CHUNK][(first + n) % EXL3_PLAN_CHUNK];
		body.entries.len = n * sizeof(*page);
		body.last = first + n == plan->nr;
		e = send(arg, &req, &reply);
		if (e < 0 || body.last) {
			if (e == 0)
				*handle = reply->handle->handle;
			return e;
		}
		body.plan = reply->handle->handle;
	}
	return 0;
}

struct sender {
	struct exl3_client *c;
	const struct exl3_channel *ch;
};

/* To the worker that the channel is at: its number means nothing to another one. */
static int send_locked(void *arg, Exl3__Request *req, Exl3__Reply **reply)
{
	struct sender *s = arg;
	int e = exl3_client_check(s->c);

	if (e == 0 && s->ch->epoch != s->c->epoch)
		e = exl3_errf(exl3_client_err(), -ESTALE, "plan: the daemon's worker has gone");
	if (e < 0)
		return e;
	return exl3_client_call_locked(s->c, req, EXL3__REPLY__BODY_HANDLE, EXL3_CALL_TIMEOUT_NS, reply, NULL, 0,
				       NULL, 0);
}

int exl3_plan_end(struct exl3_channel *ch, struct exl3_plan **ret)
{
	exl3_auto(plan_freep) struct exl3_plan *plan = exl3_take_ptr(&ch->recording);
	struct exl3_client *c = ch->obj.client;
	struct sender s = {c, ch};
	int e = exl3_client_check(c);

	if (!plan)
		return exl3_errf(exl3_client_err(), -EINVAL, "plan: the channel records none");
	if (!ret)
		return 0;
	if (e < 0)
		return e;
	/* The whole of it under one lock: a worker that follows in between would know the half of it. */
	pthread_mutex_lock(&c->call);
	e = exl3_plan_record(plan, ch->id, send_locked, &s, 0, &plan->handle);
	pthread_mutex_unlock(&c->call);
	if (e < 0)
		return e;
	pthread_mutex_lock(&c->list);
	plan->ch = ch;
	plan->next = ch->plans;
	ch->plans = plan;
	pthread_mutex_unlock(&c->list);
	exl3_object_add(c, &plan->obj, EXL3_OBJECT_PLAN, plan_drop);
	*ret = exl3_take_ptr(&plan);
	return 0;
}

/* ---- life ---- */

void exl3_plan_discard(struct exl3_channel *ch)
{
	plan_freep(&ch->recording);
}

void exl3_plans_forget(struct exl3_channel *ch)
{
	struct exl3_client *c = ch->obj.client;

	plan_freep(&ch->recording);
	pthread_mutex_lock(&c->list);
	while (ch->plans) {
		struct exl3_plan *plan = ch->plans;

		ch->plans = plan->next;
		plan->ch = NULL;
		plan->next = NULL;
	}
	pthread_mutex_unlock(&c->list);
}

static void unlink_plan(struct exl3_plan *plan)
{
	struct exl3_client *c = plan->obj.client;

	pthread_mutex_lock(&c->list);
	if (plan->ch) {
		struct exl3_plan **at = &plan->ch->plans;

		while (*at != plan)
			at = &(*at)->next;
		*at = plan->next;
		plan->ch = NULL;
	}
	pthread_mutex_unlock(&c->list);
}

struct exl3_plan *exl3_plan_free(struct exl3_plan *plan)
{
	Exl3__FreePlan body = EXL3__FREE_PLAN__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	struct exl3_client *c;

	if (!plan || exl3_client_forked(plan->obj.client))
		return NULL;
	c = plan->obj.client;
	exl3_object_remove(&plan->obj);
	unlink_plan(plan);
	body.handle = exl3_plan_handle(plan);
	req.body_case = EXL3__REQUEST__BODY_FREE_PLAN;
	req.free_plan = &body;
	if (body.handle)
		exl3_client_tell(c, &req, UINT64_MAX);
	plan_drop(&plan->obj);
	return NULL;
}

uint32_t exl3_plan_calls(const struct exl3_plan *plan)
{
	return plan->nr;
}

/* ---- replays ---- */

void exl3_prep_plan(struct exl3_sqe *sqe, const struct exl3_plan *plan)
{
	sqe->op = EXL3_OP_PLAN;
	sqe->module = exl3_plan_handle(plan);
}

static int next_entry(struct exl3_plan *plan, struct exl3_sqe **sqe)
{
	if (!plan->ch)
		return exl3_errf(exl3_client_err(), -ENOENT, "plan: its channel was freed");
	if (plan->ch->recording)
		return exl3_errf(exl3_client_err(), -EBUSY, "plan: its channel records another one");
	*sqe = exl3_sq_get(plan->ch);
	if (!*sqe)
		return exl3_client_err()->code;
	exl3_prep_plan(*sqe, plan);
	return 0;
}

int exl3_plan_run(struct exl3_plan *plan, struct exl3_cqe *ret)
{
	struct exl3_sqe *sqe;
	int e = next_entry(plan, &sqe);

	return e < 0 ? e : exl3_call(plan->ch, ret);
}

int exl3_plan_stream(struct exl3_plan *plan, void *stream, uint32_t *call)
{
	struct exl3_sqe *sqe;
	int e = next_entry(plan, &sqe);

	return e < 0 ? e : exl3_stream_call(plan->ch, stream, call);
}
