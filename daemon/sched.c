/* SPDX-License-Identifier: Apache-2.0 */
/* sched.c - which request runs next: fairness between channels, order within one. */
#include "daemon/sched.h"

#include <assert.h>
#include <string.h>

void exl3_sched_init(struct exl3_sched *s, uint32_t launches_max, uint32_t merge_max,
		     uint32_t rows_max)
{
	memset(s, 0, sizeof(*s));
	s->launches_max = launches_max;
	s->merge_max = merge_max < EXL3_LAUNCH_ITEMS_MAX ? merge_max : EXL3_LAUNCH_ITEMS_MAX;
	s->rows_max = rows_max;
	s->next_deadline = UINT64_MAX;
}

/* Behind the flow whose turn it is, so that a newcomer waits for everybody else once. */
static void ring_add(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	s->flows++;
	if (!s->turn) {
		flow->next = flow->prev = flow;
		s->turn = flow;
		return;
	}
	flow->next = s->turn;
	flow->prev = s->turn->prev;
	flow->prev->next = flow;
	s->turn->prev = flow;
}

static void ring_del(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	s->flows--;
	if (flow->next == flow) {
		s->turn = NULL;
	} else {
		flow->next->prev = flow->prev;
		flow->prev->next = flow->next;
		if (s->turn == flow)
			s->turn = flow->next;
	}
	flow->next = flow->prev = NULL;
}

void exl3_sched_push(struct exl3_sched *s, struct exl3_sched_flow *flow,
		     struct exl3_sched_item *item)
{
	assert(item->state == EXL3_ITEM_IDLE);
	item->flow = flow;
	item->state = EXL3_ITEM_QUEUED;
	item->next = NULL;
	item->prev = flow->tail;
	if (flow->tail)
		flow->tail->next = item;
	else
		flow->head = item;
	flow->tail = item;
	if (flow->queued++ == 0)
		ring_add(s, flow);
	s->queued++;
	if (item->deadline_ns && item->deadline_ns < s->next_deadline)
		s->next_deadline = item->deadline_ns;
}

void exl3_sched_remove(struct exl3_sched *s, struct exl3_sched_item *item)
{
	struct exl3_sched_flow *flow = item->flow;

	assert(item->state == EXL3_ITEM_QUEUED);
	if (item->prev)
		item->prev->next = item->next;
	else
		flow->head = item->next;
	if (item->next)
		item->next->prev = item->prev;
	else
		flow->tail = item->prev;
	item->next = item->prev = NULL;
	item->state = EXL3_ITEM_IDLE;
	s->queued--;
	if (--flow->queued == 0)
		ring_del(s, flow);
}

static void start(struct exl3_sched *s, struct exl3_sched_item *item)
{
	exl3_sched_remove(s, item);
	item->state = EXL3_ITEM_RUNNING;
	item->flow->running++;
	s->running++;
}

/* Adds to a launch the heads of the flows after @first's that have its key. */
static uint32_t merge(struct exl3_sched *s, struct exl3_sched_item **items)
{
	struct exl3_sched_flow *flow = s->turn, *next;
	uint64_t rows = items[0]->rows;
	uint32_t nr = 1;

	/* Flows leave the ring with their last item while we walk: each of those of now is visited once. */
	for (uint32_t left = s->flows; left && nr < s->merge_max; left--, flow = next) {
		struct exl3_sched_item *head = flow->head;

		next = flow->next;
		if (flow != items[0]->flow && !head->fence && head->key == items[0]->key &&
		    rows + head->rows <= s->rows_max) {
			rows += head->rows;
			items[nr++] = head;
			start(s, head);
		}
	}
	return nr;
}

uint32_t exl3_sched_pick(struct exl3_sched *s, struct exl3_sched_item **items)
{
	struct exl3_sched_flow *flow = s->turn, *last;

	if (!flow)
		return 0;
	last = flow->prev;
	for (;; flow = flow->next) {
		struct exl3_sched_item *head = flow->head;

		if (head->fence && flow->running == 0) {
			/* Costs the device nothing, so the turn stays with whoever has it. */
			exl3_sched_remove(s, head);
			items[0] = head;
			return 1;
		}
		if (!head->fence && s->launches < s->launches_max) {
			s->turn = flow->next;
			items[0] = head;
			start(s, head);
			s->launches++;
			return head->key && s->merge_max > 1 ? merge(s, items) : 1;
		}
		if (flow == last)
			return 0;
	}
}

static void stop(struct exl3_sched *s, struct exl3_sched_item *item)
{
	assert(item->state == EXL3_ITEM_RUNNING);
	item->state = EXL3_ITEM_IDLE;
	item->flow->running--;
	s->running--;
}

void exl3_sched_done(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr)
{
	for (uint32_t i = 0; i < nr; i++)
		stop(s, items[i]);
	s->launches--;
}

void exl3_sched_unpick(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr)
{
	exl3_sched_done(s, items, nr);
	for (uint32_t i = nr; i-- > 0;) {
		struct exl3_sched_item *item = items[i];
		struct exl3_sched_flow *flow = item->flow;

		item->state = EXL3_ITEM_QUEUED;
		item->prev = NULL;
		item->next = flow->head;
		if (flow->head)
			flow->head->prev = item;
		else
			flow->tail = item;
		flow->head = item;
		if (flow->queued++ == 0)
			ring_add(s, flow);
		s->queued++;
		/* The picks before it moved the turn on: it is this flow's again. */
		s->turn = flow;
		if (item->deadline_ns && item->deadline_ns < s->next_deadline)
			s->next_deadline = item->deadline_ns;
	}
}

struct exl3_sched_item *exl3_sched_expire(struct exl3_sched *s, uint64_t now_ns)
{
	struct exl3_sched_flow *flow = s->turn;
	uint64_t next = UINT64_MAX;

	if (now_ns < s->next_deadline)
		return NULL;
	while (flow) {
		for (struct exl3_sched_item *item = flow->head; item; item = item->next) {
			if (!item->deadline_ns)
				continue;
			if (item->deadline_ns <= now_ns) {
				exl3_sched_remove(s, item);
				return item;
			}
			if (item->deadline_ns < next)
				next = item->deadline_ns;
		}
		flow = flow->next == s->turn ? NULL : flow->next;
	}
	s->next_deadline = next;
	return NULL;
}
