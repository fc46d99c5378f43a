/* SPDX-License-Identifier: Apache-2.0 */
/* sched.c - which request runs next: fairness between tenants, order within a channel. */
#include "daemon/sched_priv.h"

#include <assert.h>
#include <string.h>

void exl3_sched_init(struct exl3_sched *s, uint32_t launches_max, uint32_t merge_max,
		     uint32_t rows_max)
{
	memset(s, 0, sizeof(*s));
	s->launches_max = launches_max;
	s->merge_max = merge_max < EXL3_LAUNCH_ITEMS_MAX ? merge_max : EXL3_LAUNCH_ITEMS_MAX;
	s->rows_max = rows_max;
	s->next_deadline = s->wake_ns = UINT64_MAX;
	s->trains_on = s->merge_max > 1;
}

void exl3_sched_set_trains(struct exl3_sched *s, bool on)
{
	s->trains_on = on && s->merge_max > 1;
}

void exl3_sched_tick(struct exl3_sched *s, uint64_t now_ns)
{
	if (now_ns > s->now_ns)
		s->now_ns = now_ns;
}

void exl3_sched_set_cost_max(struct exl3_sched *s, uint64_t cost_max_ns)
{
	s->cost_max_ns = cost_max_ns;
}

/* ---- places of a flow ---- */

static void ring_add(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	struct exl3_sched_tenant *a = exl3_flow_account(flow);

	flow->place = EXL3_FLOW_FREE;
	if (a->turn) {
		/* Behind the flow whose turn it is: a newcomer waits for everybody else once. */
		flow->next = a->turn;
		flow->prev = a->turn->prev;
		flow->prev->next = flow;
		a->turn->prev = flow;
		return;
	}
	flow->next = flow->prev = flow;
	a->turn = flow;
	if (!s->turn) {
		a->next = a->prev = a;
		s->turn = a;
		return;
	}
	a->next = s->turn;
	a->prev = s->turn->prev;
	a->prev->next = a;
	s->turn->prev = a;
}

static void ring_del(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	struct exl3_sched_tenant *a = exl3_flow_account(flow);

	if (flow->next != flow) {
		flow->prev->next = flow->next;
		flow->next->prev = flow->prev;
		if (a->turn == flow)
			a->turn = flow->next;
	} else {
		a->turn = NULL;
		if (a->next == a) {
			s->turn = NULL;
		} else {
			a->next->prev = a->prev;
			a->prev->next = a->next;
			if (s->turn == a)
				s->turn = a->next;
		}
		a->next = a->prev = NULL;
	}
	flow->next = flow->prev = NULL;
}

static void fence_add(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	flow->place = EXL3_FLOW_FENCE;
	flow->prev = NULL;
	flow->next = s->fences;
	if (s->fences)
		s->fences->prev = flow;
	s->fences = flow;
}

static void fence_del(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	if (flow->prev)
		flow->prev->next = flow->next;
	else
		s->fences = flow->next;
	if (flow->next)
		flow->next->prev = flow->prev;
	flow->next = flow->prev = NULL;
}

void exl3_flow_unplace(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	if (flow->place == EXL3_FLOW_FREE)
		ring_del(s, flow);
	else if (flow->place == EXL3_FLOW_FENCE)
		fence_del(s, flow);
	else if (flow->place == EXL3_FLOW_TRAIN)
		exl3_trains_unplace(s, flow);
	flow->place = EXL3_FLOW_NOWHERE;
}

/* Where its head may start from. It has no place yet. */
void exl3_flow_place(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	const struct exl3_sched_item *head = flow->head;

	assert(flow->place == EXL3_FLOW_NOWHERE);
	if (!head)
		return;
	if (head->fence) {
		if (!flow->running)
			fence_add(s, flow);
		return;
	}
	if (flow->partial)
		return; /* the next slice of what runs comes first */
	flow->ready_ns = s->now_ns;
	if (!exl3_trains_place(s, flow))
		ring_add(s, flow);
}

/* ---- accounts ---- */

static void account_enter(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	struct exl3_sched_tenant *a = exl3_flow_account(flow);

	/* Who was away has saved up nothing: it starts where the others are. */
	if (a->items++ == 0 && a->used_ns < s->used_ns)
		a->used_ns = s->used_ns;
	if (a != &flow->own && flow->queued + flow->running == 0 &&
	    flow->own.used_ns < a->turn_used_ns)
		flow->own.used_ns = a->turn_used_ns;
}

static void account_leave(struct exl3_sched_flow *flow)
{
	exl3_flow_account(flow)->items--;
}

static uint64_t weighted(const struct exl3_sched_tenant *a, uint64_t ns)
{
	uint32_t weight = a->weight ? a->weight : EXL3_WEIGHT_DEFAULT;

	return ns * EXL3_WEIGHT_DEFAULT / weight;
}

static void charge(struct exl3_sched_flow *flow, uint64_t ns)
{
	struct exl3_sched_tenant *a = exl3_flow_account(flow);

	a->used_ns += weighted(a, ns);
	if (a != &flow->own)
		flow->own.used_ns += ns;
}

static void refund(struct exl3_sched_flow *flow, uint64_t ns)
{
	struct exl3_sched_tenant *a = exl3_flow_account(flow);
	uint64_t by_weight = weighted(a, ns);

	a->used_ns -= by_weight < a->used_ns ? by_weight : a->used_ns;
	if (a != &flow->own)
		flow->own.used_ns -= ns < flow->own.used_ns ? ns : flow->own.used_ns;
}

void exl3_sched_set_tenant(struct exl3_sched *s, struct exl3_sched_flow *flow,
			   struct exl3_sched_tenant *tenant)
{
	uint8_t place = flow->place;
	uint32_t items = flow->queued + flow->running;

	if (tenant == flow->tenant)
		return;
	if (place == EXL3_FLOW_FREE)
		ring_del(s, flow);
	exl3_flow_account(flow)->items -= items;
	flow->tenant = tenant;
	for (uint32_t i = 0; i < items; i++)
		account_enter(s, flow);
	if (place == EXL3_FLOW_FREE)
		ring_add(s, flow);
}

void exl3_sched_leave(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	assert(!flow->queued && !flow->running);
	exl3_trains_forget(s, flow);
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

/* ---- items ---- */

static void all_add(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	flow->all_next = NULL;
	flow->all_prev = s->all_tail;
	if (s->all_tail)
		s->all_tail->all_next = flow;
	else
		s->all = flow;
	s->all_tail = flow;
}

static void all_del(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	if (flow->all_prev)
		flow->all_prev->all_next = flow->all_next;
	else
		s->all = flow->all_next;
	if (flow->all_next)
		flow->all_next->all_prev = flow->all_prev;
	else
		s->all_tail = flow->all_prev;
	flow->all_next = flow->all_prev = NULL;
}

void exl3_sched_push(struct exl3_sched *s, struct exl3_sched_flow *flow,
		     struct exl3_sched_item *item)
{
	assert(item->state == EXL3_ITEM_IDLE);
	item->known = NULL; /* the slot may have been used with another scheduler */
	if (s->trains_on)
		exl3_steps_learn(s, flow, item);
	account_enter(s, flow);
	item->flow = flow;
	item->state = EXL3_ITEM_QUEUED;
	item->next = NULL;
	item->prev = flow->tail;
	if (flow->tail)
		flow->tail->next = item;
	else
		flow->head = item;
	flow->tail = item;
	s->queued++;
	deadline_add(s, item);
	if (flow->queued++ == 0) {
		all_add(s, flow);
		exl3_flow_place(s, flow);
	}
}

static void push_front(struct exl3_sched *s, struct exl3_sched_item *item)
{
	struct exl3_sched_flow *flow = item->flow;

	assert(item->state == EXL3_ITEM_IDLE);
	account_enter(s, flow);
	exl3_flow_unplace(s, flow);
	item->state = EXL3_ITEM_QUEUED;
	item->prev = NULL;
	item->next = flow->head;
	if (flow->head)
		flow->head->prev = item;
	else
		flow->tail = item;
	flow->head = item;
	if (flow->queued++ == 0)
		all_add(s, flow);
	s->queued++;
	deadline_add(s, item);
	exl3_flow_place(s, flow);
}

void exl3_sched_again(struct exl3_sched *s, struct exl3_sched_item *item)
{
	push_front(s, item);
}

/* Out of its flow's list; the flow has no place then if it was the head. */
static void take_out(struct exl3_sched *s, struct exl3_sched_item *item)
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
		all_del(s, flow);
}

void exl3_sched_remove(struct exl3_sched *s, struct exl3_sched_item *item)
{
	struct exl3_sched_flow *flow = item->flow;
	bool head = flow->head == item;

	if (head)
		exl3_flow_unplace(s, flow);
	take_out(s, item);
	account_leave(flow);
	if (head)
		exl3_flow_place(s, flow);
}

/* The head of a flow without a place begins to run. */
static void start(struct exl3_sched *s, struct exl3_sched_item *item)
{
	struct exl3_sched_flow *flow = item->flow;

	take_out(s, item);
	item->state = EXL3_ITEM_RUNNING;
	flow->running++;
	flow->partial += item->more;
	s->running++;
	exl3_trains_started(s, flow);
	exl3_flow_place(s, flow);
}

static void stop(struct exl3_sched *s, struct exl3_sched_item *item, uint64_t exec_ns)
{
	struct exl3_sched_flow *flow = item->flow;
	bool stuck;

	assert(item->state == EXL3_ITEM_RUNNING);
	item->state = EXL3_ITEM_IDLE;
	flow->running--;
	flow->partial -= item->more;
	s->running--;
	s->cost_ns -= item->flight_ns;
	account_leave(flow);
	exl3_trains_ended(s, flow, item, exec_ns);
	/* A fence, or what is behind a long item, may be able to go now. */
	stuck = flow->place == EXL3_FLOW_NOWHERE && flow->head;
	if (stuck)
		exl3_flow_place(s, flow);
}

/* ---- launches ---- */

#define SURPRISE_MAX 8u /* times the expected cost that a launch is charged at most */

/* Room for that much more of the device's time? A launch may always be alone. */
static bool fits(const struct exl3_sched *s, uint64_t cost_ns)
{
	return !s->cost_max_ns || !s->launches || s->cost_ns + cost_ns <= s->cost_max_ns;
}

static uint64_t choice_cost(const struct exl3_choice *c)
{
	uint64_t cost = 0;

	if (c->flow)
		return c->flow->head->cost_ns;
	for (const struct exl3_sched_flow *f = c->train->ready; f; f = f->next)
		cost = f->head->cost_ns > cost ? f->head->cost_ns : cost;
	return cost;
}

/* Few rows cost what one does, the weights are read once; many cost each their own. */
static uint64_t load_cost(uint64_t rows, uint64_t max_ns, uint64_t sum_ns)
{
	return rows <= EXL3_TRAIN_ROWS_MAX ? max_ns : sum_ns;
}

bool exl3_load_fits(const struct exl3_load *l, const struct exl3_sched_item *head)
{
	uint64_t rows = l->rows + head->rows;
	uint64_t max_ns = head->cost_ns > l->max_ns ? head->cost_ns : l->max_ns;

	if (!l->nr)
		return true;
	return l->nr < l->nr_max && rows <= l->rows_max &&
	       load_cost(rows, max_ns, l->sum_ns + head->cost_ns) <= l->cost_max_ns;
}

void exl3_load_add(struct exl3_load *l, struct exl3_sched_flow *flow)
{
	const struct exl3_sched_item *head = flow->head;

	l->flows[l->nr++] = flow;
	l->rows += head->rows;
	l->sum_ns += head->cost_ns;
	l->max_ns = head->cost_ns > l->max_ns ? head->cost_ns : l->max_ns;
}

#define VISITS_MAX 256u /* flows that one launch looks at for company */

/* Adds the flows of no train whose head has the key of the first. */
static void merge_free(struct exl3_sched *s, struct exl3_load *l)
{
	const struct exl3_sched_item *first = l->flows[0]->head;
	struct exl3_sched_flow *f = s->all, *next;

	for (unsigned i = 0; f && i < VISITS_MAX && l->nr < l->nr_max; i++, f = next) {
		next = f->all_next;
		if (f->place != EXL3_FLOW_FREE || f->head->key != first->key ||
		    f->head->merge_class != first->merge_class || !exl3_load_fits(l, f->head))
			continue;
		exl3_flow_unplace(s, f);
		exl3_load_add(l, f);
	}
}

/* Its rows' part of a launch's time; what is left of a division is nobody's. */
static uint64_t part_of(uint64_t ns, const struct exl3_sched_item *item)
{
	return ns * item->rows / item->launch_rows;
}

static uint32_t launch(struct exl3_sched *s, const struct exl3_load *l,
		       struct exl3_sched_item **items)
{
	uint64_t cost = load_cost(l->rows, l->max_ns, l->sum_ns);
	uint64_t price = cost < 1000 ? 1000 : cost; /* nothing is free */

	for (uint32_t i = 0; i < l->nr; i++) {
		struct exl3_sched_item *item = items[i] = l->flows[i]->head;

		item->launch_rows = l->rows ? (uint32_t)l->rows : 1;
		item->launch_items = l->nr;
		item->flight_ns = i == 0 ? cost : 0;
		item->charged_ns = part_of(price, item);
		charge(l->flows[i], item->charged_ns);
		start(s, item);
	}
	s->cost_ns += cost;
	s->launches++;
	s->stats.launches++;
	s->stats.items += l->nr;
	s->stats.merged += l->nr > 1 ? l->nr : 0;
	return l->nr;
}

static uint32_t go(struct exl3_sched *s, const struct exl3_choice *c,
		   struct exl3_sched_item **items)
{
	struct exl3_load l = {.nr_max = s->merge_max ? s->merge_max : 1, .rows_max = s->rows_max};

	l.cost_max_ns = !s->cost_max_ns ? UINT64_MAX
			: s->launches   ? s->cost_max_ns - s->cost_ns
					: s->cost_max_ns;
	s->used_ns = c->used_ns;
	if (c->train) {
		exl3_trains_depart(s, c->train, &l);
	} else {
		struct exl3_sched_tenant *a = exl3_flow_account(c->flow);

		a->turn_used_ns = c->own_used_ns;
		a->turn = c->flow->next;
		s->turn = a->next;
		exl3_flow_unplace(s, c->flow);
		exl3_load_add(&l, c->flow);
	}
	if (l.nr_max > 1 && l.flows[0]->head->key) {
		exl3_trains_join(s, c->train, &l);
		merge_free(s, &l);
	}
	return launch(s, &l, items);
}

/* ---- who is next ---- */

void exl3_flow_choice(struct exl3_sched_flow *flow, struct exl3_choice *c)
{
	const struct exl3_sched_tenant *a = exl3_flow_account(flow);

	*c = (struct exl3_choice){
		.flow = flow,
		.priority = a->priority,
		.used_ns = a->used_ns,
		.own_used_ns = flow->own.used_ns,
		.since_ns = flow->ready_ns,
	};
}

bool exl3_choice_before(const struct exl3_choice *a, const struct exl3_choice *b)
{
	if (a->priority != b->priority)
		return a->priority > b->priority;
	if (a->used_ns != b->used_ns)
		return a->used_ns < b->used_ns;
	if (a->own_used_ns != b->own_used_ns)
		return a->own_used_ns < b->own_used_ns;
	return a->since_ns < b->since_ns;
}

static void passed_over(struct exl3_choices *all, const struct exl3_choice *c)
{
	if (!all->lower || c->since_ns < all->low.since_ns)
		all->low = *c;
	all->lower = true;
}

void exl3_choices_add(struct exl3_choices *all, const struct exl3_choice *c)
{
	if (!all->any) {
		all->top = *c;
	} else if (c->priority < all->top.priority) {
		passed_over(all, c);
	} else if (exl3_choice_before(c, &all->top)) {
		if (c->priority > all->top.priority)
			passed_over(all, &all->top);
		all->top = *c;
	}
	all->any = true;
}

/* A tenant's flow whose turn it is, or the next one that need not leave the device to a train. */
static void add_tenant(struct exl3_sched *s, struct exl3_sched_tenant *a, struct exl3_choices *all)
{
	struct exl3_sched_flow *flow = a->turn;
	struct exl3_choice c;

	for (unsigned i = 0; i < VISITS_MAX; i++) {
		exl3_flow_choice(flow, &c);
		if (!exl3_trains_reserve(s, &c)) {
			exl3_choices_add(all, &c);
			return;
		}
		flow = flow->next;
		if (flow == a->turn)
			return;
	}
}

uint32_t exl3_sched_pick(struct exl3_sched *s, struct exl3_sched_item **items)
{
	struct exl3_sched_tenant *a = s->turn;
	struct exl3_choices all = {0};
	const struct exl3_choice *c = &all.top;

	s->wake_ns = UINT64_MAX;
	if (s->fences) {
		/* Costs the device nothing, so the turn stays with whoever has it. */
		items[0] = s->fences->head;
		exl3_sched_remove(s, items[0]);
		return 1;
	}
	if (s->launches >= s->launches_max)
		return 0;
	exl3_trains_look(s, &all);
	a = s->turn; /* trains may have let flows go */
	if (a) {
		do {
			add_tenant(s, a, &all);
			a = a->next;
		} while (a != s->turn);
	}
	if (all.lower && s->passed_over >= EXL3_PASSED_OVER_MAX)
		c = &all.low;
	/* Who is next waits for room, or small ones would always overtake it. */
	if (!all.any || !fits(s, choice_cost(c)))
		return 0;
	s->passed_over = all.lower && c == &all.top ? s->passed_over + 1 : 0;
	return go(s, c, items);
}

void exl3_sched_done(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr,
		     uint64_t exec_ns)
{
	/* Paid by estimate when it started; now by what it took. */
	for (uint32_t i = 0; i < nr; i++) {
		uint64_t due = part_of(exec_ns, items[i]);

		/* A launch that took very much longer than expected met a kernel that was not loaded yet, or a
		 * machine that stood still: not its tenant's doing. */
		if (due > SURPRISE_MAX * items[i]->charged_ns)
			due = SURPRISE_MAX * items[i]->charged_ns;
		if (due > items[i]->charged_ns)
			charge(items[i]->flow, due - items[i]->charged_ns);
		else
			refund(items[i]->flow, items[i]->charged_ns - due);
	}
	for (uint32_t i = 0; i < nr; i++)
		stop(s, items[i], exec_ns);
	if (--s->launches == 0)
		s->idle_ns = s->now_ns;
}

void exl3_sched_unpick(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr)
{
	s->stats.launches--;
	s->stats.items -= nr;
	s->stats.merged -= nr > 1 ? nr : 0;
	exl3_sched_done(s, items, nr, 0);
	for (uint32_t i = nr; i-- > 0;) {
		struct exl3_sched_flow *flow = items[i]->flow;

		push_front(s, items[i]);
		/* The pick moved the turn on: it is this flow's again. */
		if (flow->place == EXL3_FLOW_FREE) {
			exl3_flow_account(flow)->turn = flow;
			s->turn = exl3_flow_account(flow);
		}
	}
}

struct exl3_sched_item *exl3_sched_any(const struct exl3_sched *s)
{
	return s->all ? s->all->head : NULL;
}

struct exl3_sched_item *exl3_sched_expire(struct exl3_sched *s, uint64_t now_ns)
{
	struct exl3_sched_item *item = s->deadlines;

	if (!item || item->deadline_ns > now_ns)
		return NULL;
	exl3_sched_remove(s, item);
	return item;
}
