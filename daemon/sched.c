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

void exl3_sched_set_cost_max(struct exl3_sched *s, uint64_t cost_max_ns)
{
	s->cost_max_ns = cost_max_ns;
}

void exl3_sched_set_tenant(struct exl3_sched *s, struct exl3_sched_flow *flow,
			   struct exl3_sched_tenant *tenant)
{
	(void)s;
	flow->tenant = tenant;
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

/*
 * Deadlines. A client may have half a million requests queued, all with deadlines of its choice: only
 * a heap keeps it from buying the loop's time with them. A pairing heap needs no memory but the items.
 */
static struct exl3_sched_item *meld(struct exl3_sched_item *a, struct exl3_sched_item *b)
{
	struct exl3_sched_item *low;

	if (!a || !b)
		return a ? a : b;
	low = b->deadline_ns < a->deadline_ns ? b : a;
	if (low == b)
		b = a;
	b->heap_prev = low;
	b->heap_next = low->heap_child;
	if (b->heap_next)
		b->heap_next->heap_prev = b;
	low->heap_child = b;
	return low;
}

/* Siblings become one heap: by twos from the left, then these from the right. */
static struct exl3_sched_item *meld_siblings(struct exl3_sched_item *first)
{
	struct exl3_sched_item *pairs = NULL, *top = NULL;

	while (first) {
		struct exl3_sched_item *a = first, *b = a->heap_next;

		first = b ? b->heap_next : NULL;
		a->heap_next = a->heap_prev = NULL;
		if (b)
			b->heap_next = b->heap_prev = NULL;
		a = meld(a, b);
		a->heap_next = pairs;
		pairs = a;
	}
	while (pairs) {
		struct exl3_sched_item *a = pairs;

		pairs = a->heap_next;
		a->heap_next = NULL;
		top = meld(top, a);
	}
	return top;
}

static void set_deadlines(struct exl3_sched *s, struct exl3_sched_item *top)
{
	s->deadlines = top;
	s->next_deadline = top ? top->deadline_ns : UINT64_MAX;
}

static void deadline_add(struct exl3_sched *s, struct exl3_sched_item *item)
{
	if (item->deadline_ns)
		set_deadlines(s, meld(s->deadlines, item));
}

static void deadline_del(struct exl3_sched *s, struct exl3_sched_item *item)
{
	struct exl3_sched_item *below, *prev = item->heap_prev;

	if (!item->deadline_ns)
		return;
	below = meld_siblings(item->heap_child);
	if (prev) {
		if (prev->heap_child == item)
			prev->heap_child = item->heap_next;
		else
			prev->heap_next = item->heap_next;
		if (item->heap_next)
			item->heap_next->heap_prev = prev;
		below = meld(s->deadlines, below);
	}
	item->heap_child = item->heap_next = item->heap_prev = NULL;
	set_deadlines(s, below);
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
	deadline_add(s, item);
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
	deadline_del(s, item);
	s->queued--;
	if (--flow->queued == 0)
		ring_del(s, flow);
}

static void start(struct exl3_sched *s, struct exl3_sched_item *item)
{
	exl3_sched_remove(s, item);
	item->state = EXL3_ITEM_RUNNING;
	item->flow->running++;
	item->flow->partial += item->more;
	s->running++;
	s->cost_ns += item->cost_ns;
}

/* Room for more of the device's time? @first: of a launch, which may be alone on the device. */
static bool fits(const struct exl3_sched *s, const struct exl3_sched_item *item, bool first)
{
	return !s->cost_max_ns || (first && !s->launches) ||
	       s->cost_ns + item->cost_ns <= s->cost_max_ns;
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
		if (flow != items[0]->flow && !flow->partial && !head->fence &&
		    head->key == items[0]->key && rows + head->rows <= s->rows_max &&
		    fits(s, head, false)) {
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
	bool full = false;

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
		/* Whose turn it is waits for room, or small ones would always overtake it. */
		if (!head->fence && !flow->partial && !fits(s, head, true))
			full = true;
		if (!head->fence && !flow->partial && !full && s->launches < s->launches_max) {
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
	item->flow->partial -= item->more;
	s->running--;
	s->cost_ns -= item->cost_ns;
}

void exl3_sched_done(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr)
{
	for (uint32_t i = 0; i < nr; i++)
		stop(s, items[i]);
	s->launches--;
}

void exl3_sched_again(struct exl3_sched *s, struct exl3_sched_item *item)
{
	struct exl3_sched_flow *flow = item->flow;

	assert(item->state == EXL3_ITEM_IDLE);
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
	deadline_add(s, item);
}

void exl3_sched_unpick(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr)
{
	exl3_sched_done(s, items, nr);
	for (uint32_t i = nr; i-- > 0;) {
		exl3_sched_again(s, items[i]);
		/* The picks before it moved the turn on: it is this flow's again. */
		s->turn = items[i]->flow;
	}
}

struct exl3_sched_item *exl3_sched_expire(struct exl3_sched *s, uint64_t now_ns)
{
	struct exl3_sched_item *item = s->deadlines;

	if (!item || item->deadline_ns > now_ns)
		return NULL;
	exl3_sched_remove(s, item);
	return item;
}
