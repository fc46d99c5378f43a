/* SPDX-License-Identifier: Apache-2.0 */
/* steps.c - what a flow's requests say about its steps: where they begin, how long launches and pauses are. */
#include "daemon/sched_priv.h"

#include <string.h>

#define CYCLE_MIN    4u     /* shorter ones meet by themselves */
#define CYCLE_MAX    16384u /* until an anchor is given up */
#define ALONE_NS_MAX 500000000ull /* who was the only board key of a cycle so lately stays one */
#define THINK_MAX    6400u
#define THINK_NS_MAX 20000000ull /* longer pauses say nothing about the next one */
#define WAIT_NS_MIN  10000ull    /* what timing is good for */

/* ---- keys ---- */

#define WAYS 8u

static struct exl3_sched_key *find_key(struct exl3_sched *s, const struct exl3_sched_item *item)
{
	uint64_t hash =
		((uint64_t)(uintptr_t)item->key + item->merge_class) * 0x9e3779b97f4a7c15ull;
	struct exl3_sched_key *set, *oldest;

	set = oldest = &s->keys[(hash >> 40) % (EXL3_SCHED_KEYS / WAYS) * WAYS];
	for (unsigned i = 0; i < WAYS; i++) {
		struct exl3_sched_key *k = &set[i];

		if (k->key == item->key && k->merge_class == item->merge_class) {
			k->seen_ns = s->now_ns;
			return k;
		}
		if (!k->key || (oldest->key && k->seen_ns < oldest->seen_ns))
			oldest = k;
	}
	/* Flows that still point at the old one find a key that is no board key: they learn again. */
	memset(oldest, 0, sizeof(*oldest));
	oldest->key = item->key;
	oldest->merge_class = item->merge_class;
	oldest->seen_ns = s->now_ns;
	return oldest;
}

struct exl3_sched_key *exl3_steps_key(struct exl3_sched *s, struct exl3_sched_item *item)
{
	if (!item->key)
		return NULL;
	if (!item->known || item->known->key != item->key ||
	    item->known->merge_class != item->merge_class)
		item->known = find_key(s, item);
	return item->known;
}

/* ---- steps ---- */

bool exl3_steps_is_step(const struct exl3_sched_item *item)
{
	return item->key && !item->fence && !item->more && item->rows <= EXL3_TRAIN_ROWS_MAX;
}

static void forget(struct exl3_sched_flow *flow, const struct exl3_sched_item *item)
{
	flow->board = flow->best = NULL;
	flow->anchor = item->key;
	flow->steps = flow->cycle = flow->step_items = 0;
}

static void begin_step(struct exl3_sched *s, struct exl3_sched_flow *flow, struct exl3_sched_key *k)
{
	flow->board = flow->best = k;
	flow->step_items = 0;
	flow->step_start_ns = s->now_ns;
	flow->step_gap_ns = flow->step_launch_ns = flow->step_overlap_ns = flow->step_company = 0;
}

/* The flow is off the list of those that are expected to board. */
static void tail_leave(struct exl3_sched_flow *flow)
{
	struct exl3_sched_key *k = flow->board;

	if (flow->tail_epoch && k && k->board && flow->tail_epoch == k->tail_epoch && k->tail)
		k->tail--;
	flow->tail_epoch = 0;
}

/* Flows that were expected at @k and did not come are expected no more. */
uint32_t exl3_steps_expected(struct exl3_sched *s, struct exl3_sched_key *k)
{
	if (k->tail && s->now_ns >= k->tail_until_ns) {
		k->tail = 0;
		k->tail_epoch++;
	}
	return k->tail;
}

void exl3_steps_tail_enter(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	struct exl3_sched_key *k = flow->board;
	uint64_t wait = flow->tail_ns ? flow->tail_ns + 4 * flow->tail_dev_ns : 0;

	tail_leave(flow);
	if (!k || !k->board || !wait)
		return;
	if (!exl3_steps_expected(s, k)) {
		k->tail_epoch += k->tail_epoch + 1 == 0 ? 2 : 1;
		k->tail_until_ns = 0;
	}
	k->tail++;
	k->tail_until_ns = exl3_most(k->tail_until_ns,
				     s->now_ns + exl3_least(wait, k->step_ns / 2) + WAIT_NS_MIN);
	flow->tail_epoch = k->tail_epoch;
}

/* 1, 2, 3..4, 5..8, 9..16, 17..32 items. */
static unsigned size_class(uint32_t items)
{
	unsigned c = items < 2 ? 0 : 32u - (unsigned)__builtin_clz(items - 1);

	return c < EXL3_TRAIN_SIZES ? c : EXL3_TRAIN_SIZES - 1;
}

/* Of the class of so many items, or the nearest that is known; 0: none is. */
static uint64_t of_size(const uint64_t *known, uint32_t items)
{
	unsigned c = size_class(items);

	for (unsigned d = 0; d < EXL3_TRAIN_SIZES; d++) {
		if (d <= c && known[c - d])
			return known[c - d];
		if (c + d < EXL3_TRAIN_SIZES && known[c + d])
			return known[c + d];
	}
	return 0;
}

uint64_t exl3_steps_launch(const struct exl3_sched_key *board, uint32_t items)
{
	return of_size(board->launch_ns, items);
}

/* A whole step from board key to board key. */
static void end_step(struct exl3_sched *s, struct exl3_sched_flow *flow, struct exl3_sched_key *k,
		     uint64_t gap_ns)
{
	uint64_t n = flow->step_items;

	if (n > 1) {
		unsigned c = size_class((uint32_t)(flow->step_company / n));

		k->launch_ns[c] = exl3_mean(k->launch_ns[c], flow->step_launch_ns / n, 3);
		k->overlap_ns[c] = exl3_mean(k->overlap_ns[c], flow->step_overlap_ns / n, 3);
		k->gap_ns = exl3_mean(k->gap_ns, flow->step_gap_ns / (n - 1), 3);
	}
	if (gap_ns < THINK_NS_MAX) {
		k->step_ns = exl3_mean(k->step_ns, s->now_ns - flow->step_start_ns, 2);
		flow->tail_dev_ns =
			exl3_mean(flow->tail_dev_ns, exl3_distance(gap_ns, flow->tail_ns), 2);
		flow->tail_ns = exl3_mean(flow->tail_ns, gap_ns, 2);
	}
	if (flow->steps < UINT32_MAX)
		flow->steps++;
	flow->cycle = k->cycle = flow->step_items;
	if (flow->level && --flow->ban == 0)
		flow->level--;
	flow->late_ns = 0;
}

static bool thinks_longer(const struct exl3_sched_key *a, const struct exl3_sched_key *b)
{
	return a->think > b->think + b->think / 2;
}

/* Two board keys in one cycle: one is too many, unless they are of two models that others use singly. */
static void resolve(const struct exl3_sched *s, struct exl3_sched_key *old, struct exl3_sched_key *k)
{
	if (thinks_longer(old, k))
		k->board = false;
	else if (thinks_longer(k, old) || s->now_ns - old->alone_ns > ALONE_NS_MAX)
		old->board = false;
}

/* Of all keys of the cycle that has just been closed, the step begins where clients think longest. */
static struct exl3_sched_key *elect(struct exl3_sched_flow *flow, struct exl3_sched_key *k)
{
	struct exl3_sched_key *best = flow->best;

	if (best && best != k && thinks_longer(best, k)) {
		k->board = false;
		best->board = true;
		return best;
	}
	k->board = true;
	return k;
}

static void learn_board(struct exl3_sched *s, struct exl3_sched_flow *flow,
			struct exl3_sched_key *k, uint64_t gap_ns)
{
	struct exl3_sched_key *old = flow->board;

	tail_leave(flow);
	if (old == k) {
		k->before = flow->last ? flow->last : k->before;
		k->alone_ns = s->now_ns;
		end_step(s, flow, k, gap_ns);
		if (elect(flow, k) != k)
			flow->steps = 0; /* steps are counted anew, from the other one */
	} else {
		flow->steps = 0;
	}
	begin_step(s, flow, k);
}

void exl3_steps_learn(struct exl3_sched *s, struct exl3_sched_flow *flow,
		      struct exl3_sched_item *item)
{
	bool idle = !flow->queued && !flow->running && flow->done_ns;
	uint64_t gap = idle ? s->now_ns - flow->done_ns : 0;
	struct exl3_sched_key *k;

	if (!exl3_steps_is_step(item)) {
		if (!item->fence)
			flow->last = NULL;
		return;
	}
	k = exl3_steps_key(s, item);
	if (idle && gap < THINK_NS_MAX && flow->gap_ns)
		k->think = exl3_mean(k->think, exl3_least(64 * gap / flow->gap_ns, THINK_MAX), 4);
	if (k->board && flow->board && flow->board != k && flow->board->board)
		resolve(s, flow->board, k);
	if (k->board) {
		learn_board(s, flow, k, gap);
	} else {
		if (flow->board && !flow->board->board)
			forget(flow, item);
		if (!flow->board && (!flow->anchor || flow->step_items > CYCLE_MAX))
			forget(flow, item);
		else if (!flow->board && flow->anchor == item->key && flow->step_items &&
			 elect(flow, k) == k)
			begin_step(s, flow, k); /* else it begins at the other one */
		if (!flow->best || k->think > flow->best->think)
			flow->best = k;
		if (idle && gap < THINK_NS_MAX) {
			flow->step_gap_ns += gap;
			flow->gap_dev_ns =
				exl3_mean(flow->gap_dev_ns, exl3_distance(gap, flow->gap_ns), 4);
			flow->gap_ns = exl3_mean(flow->gap_ns, gap, 4);
		}
	}
	flow->step_items++;
	flow->last = k;
}

bool exl3_steps_is_decoder(const struct exl3_sched_flow *flow)
{
	const struct exl3_sched_key *board = flow->board;

	return board && board->board && (flow->steps ? flow->cycle : board->cycle) >= CYCLE_MIN;
}

bool exl3_steps_is_last(const struct exl3_sched_flow *flow, const struct exl3_sched_key *k)
{
	/* Its key alone does not tell: attention of all layers has the same one. */
	return k == flow->board->before &&
	       flow->step_items == (flow->steps ? flow->cycle : flow->board->cycle);
}

void exl3_steps_forget(struct exl3_sched_flow *flow)
{
	tail_leave(flow);
	flow->board = flow->best = flow->last = NULL;
	flow->anchor = NULL;
	flow->steps = flow->cycle = flow->step_items = 0;
}

void exl3_steps_ended(struct exl3_sched *s, struct exl3_sched_flow *flow,
		      const struct exl3_sched_item *item, uint64_t exec_ns)
{
	flow->done_ns = s->now_ns;
	flow->step_launch_ns += exec_ns;
	flow->step_overlap_ns += flow->board ? exl3_most(exec_ns, flow->board->gap_ns) : exec_ns;
	flow->step_company += item->launch_items;
}

uint64_t exl3_steps_overlap(const struct exl3_sched_key *board, uint32_t items)
{
	return of_size(board->overlap_ns, items);
}
