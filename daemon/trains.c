/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trains.c - brings decoders into step, so that their requests are for one module at one time.
 *
 * A decoder's requests are a cycle of keys, one cycle per token (a step). The cycle is learned from the
 * requests alone: it is closed by the key that had the longest think time before it, which is where the
 * client samples; that key becomes the *board* key of the module sequence, for all its flows. No client
 * says anything about it, and one that tells lies with its requests is a decoder with an odd cycle.
 *
 *   flow:   (unknown) -> boards at the first key of a step -> rides, a launch per key -> off after the last key
 *   train:  BOARDING -> RIDING -> gone (when its last member got off or was dropped)
 *
 * While n trains are under way, a call takes max(n S, S + H): S a launch, H the time from an answer to the
 * client's next request, all measured. So about K = (S + H) / S trains keep the device busy and cost their members
 * nothing; more only take turns with each other.
 *
 *  - If every flow can have a train of its own (flows <= K), nobody ever waits.
 *  - Else flows wait at the board key until fewer than K trains ride and those that are between two steps
 *    have come too (expected by their own mean and deviation), or until their train has its share, flows / K.
 *  - A launch of a train waits for members that are not there for as long as their own means and deviations
 *    say. Who is later than that is dropped. He rides alone if there are fewer than K trains; else he waits where
 *    he is for the next train that comes by, at most about a step.
 *  - Who makes others wait for more than it would cost to serve him alone is moved to another level: he
 *    rides with flows of that level only, for some steps. So a slow client slows those like it.
 *  - Every wait ends by itself: EXL3_HOLD_NS_MAX, in practice about one step.
 *
 * Long launches beside trains: a launch of many rows does not start while a train is about to come whose
 * tenant has used less of its share (exl3_trains_reserve()).
 */
#include "daemon/sched_priv.h"

#include <stddef.h>

#define WAIT_NS_MIN     10000ull /* what timing is good for */
#define PATIENCE_NS_MAX 1000000ull
#define LEVEL_MAX       3u
#define BAN_MAX         256u
#define CAPACITY_MAX    16u
#define NONE            UINT64_MAX

/* ---- members ---- */

static struct exl3_train *train_new(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	for (unsigned i = 0; i < EXL3_TRAINS_MAX; i++) {
		struct exl3_train *t = &s->trains[i];

		if (t->nr)
			continue;
		*t = (struct exl3_train){
			.boarding = true,
			.key = flow->head->key,
			.merge_class = flow->head->merge_class,
			.level = flow->level,
			.board = flow->board,
		};
		s->nr_trains++;
		return t;
	}
	return NULL;
}

static void member_add(struct exl3_train *t, struct exl3_sched_flow *flow)
{
	flow->train = t;
	flow->train_prev = NULL;
	flow->train_next = t->members;
	if (t->members)
		t->members->train_prev = flow;
	t->members = flow;
	t->nr++;
	t->nr_busy += flow->running > 0;
}

static void ready_add(struct exl3_sched *s, struct exl3_train *t, struct exl3_sched_flow *flow)
{
	flow->place = EXL3_FLOW_TRAIN;
	flow->prev = NULL;
	flow->next = t->ready;
	if (t->ready)
		t->ready->prev = flow;
	t->ready = flow;
	if (t->nr_ready++ == 0)
		t->since_ns = s->now_ns;
}

static void ready_del(struct exl3_train *t, struct exl3_sched_flow *flow)
{
	if (flow->prev)
		flow->prev->next = flow->next;
	else
		t->ready = flow->next;
	if (flow->next)
		flow->next->prev = flow->prev;
	flow->next = flow->prev = NULL;
	flow->place = EXL3_FLOW_NOWHERE;
	t->nr_ready--;
}

static void member_del(struct exl3_sched *s, struct exl3_train *t, struct exl3_sched_flow *flow)
{
	if (flow->train_prev)
		flow->train_prev->train_next = flow->train_next;
	else
		t->members = flow->train_next;
	if (flow->train_next)
		flow->train_next->train_prev = flow->train_prev;
	flow->train_next = flow->train_prev = NULL;
	flow->train = NULL;
	t->nr_busy -= flow->running > 0;
	if (--t->nr == 0)
		s->nr_trains--;
}

void exl3_trains_unplace(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	struct exl3_train *t = flow->train;

	ready_del(t, flow);
	if (t->boarding)
		member_del(s, t, flow); /* it waited there with that head */
}

/* A head that was ready has no place then. */
static void train_leave(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	struct exl3_train *t = flow->train;

	if (!t)
		return;
	if (flow->place == EXL3_FLOW_TRAIN)
		ready_del(t, flow);
	member_del(s, t, flow);
}

void exl3_trains_forget(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	train_leave(s, flow);
	exl3_steps_forget(flow);
}

static struct exl3_train *find_boarding(struct exl3_sched *s, const struct exl3_sched_flow *flow)
{
	const struct exl3_sched_item *head = flow->head;

	for (unsigned i = 0, left = s->nr_trains; left && i < EXL3_TRAINS_MAX; i++) {
		struct exl3_train *t = &s->trains[i];

		if (!t->nr)
			continue;
		left--;
		if (t->boarding && t->key == head->key && t->merge_class == head->merge_class &&
		    t->level == flow->level && t->board == flow->board && t->nr < s->merge_max)
			return t;
	}
	return NULL;
}

bool exl3_trains_place(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	struct exl3_train *t = flow->train;

	if (!s->trains_on)
		return false;
	if (t) {
		const struct exl3_sched_key *k =
			exl3_steps_is_step(flow->head) ? exl3_steps_key(s, flow->head) : NULL;

		if (k && !k->board) {
			ready_add(s, t, flow);
			return true;
		}
		train_leave(s, flow); /* a new step, or something else */
	}
	if (!exl3_steps_is_step(flow->head) || !exl3_steps_is_decoder(flow))
		return false;
	t = find_boarding(s, flow);
	if (!t)
		t = train_new(s, flow);
	if (!t)
		return false;
	member_add(t, flow);
	ready_add(s, t, flow);
	return true;
}

void exl3_trains_started(struct exl3_sched *s, struct exl3_sched_flow *flow)
{
	(void)s;
	if (flow->train && flow->running == 1)
		flow->train->nr_busy++;
}

/* How long after an answer its next request is still on time. */
static uint64_t pause_time(const struct exl3_sched_flow *flow)
{
	const struct exl3_sched_key *board = flow->board;
	uint64_t gap = flow->gap_ns ? flow->gap_ns + 4 * flow->gap_dev_ns : 2 * board->gap_ns;

	return exl3_least(gap, 8 * (exl3_steps_launch(board, 1) + board->gap_ns)) + WAIT_NS_MIN;
}

/* How long the others wait for a member that is late once in a while (a processor was busy, a page was not
 * there): who misses the train waits about a step for the next one, so they wait for up to half of what
 * that costs. Who is late often pays for it, see charge_late(). */
static uint64_t patience(const struct exl3_train *t)
{
	return exl3_least(t->board->step_ns / (2 * t->nr), PATIENCE_NS_MAX);
}

void exl3_trains_ended(struct exl3_sched *s, struct exl3_sched_flow *flow,
		       struct exl3_sched_item *item, uint64_t exec_ns)
{
	struct exl3_train *t = flow->train;
	struct exl3_sched_key *k;

	exl3_steps_ended(s, flow, item, exec_ns);
	if (t && !flow->running)
		t->nr_busy--;
	if (!s->trains_on || !exl3_steps_is_decoder(flow) || flow->queued || flow->running ||
	    !exl3_steps_is_step(item))
		return;
	k = exl3_steps_key(s, item);
	if (exl3_steps_is_last(flow, k)) {
		train_leave(s, flow);
		exl3_steps_tail_enter(s, flow);
	} else if (t) {
		t->due_ns = exl3_most(t->due_ns, s->now_ns + pause_time(flow));
		t->grace_ns = exl3_most(t->due_ns, s->now_ns + patience(t));
		t->expected_ns = exl3_most(t->expected_ns, s->now_ns + flow->gap_ns);
	}
}

/* ---- who may go ---- */

static void train_choice(struct exl3_train *t, struct exl3_choice *c)
{
	*c = (struct exl3_choice){
		.train = t, .used_ns = NONE, .own_used_ns = NONE, .since_ns = t->since_ns};
	for (struct exl3_sched_flow *f = t->members; f; f = f->train_next) {
		const struct exl3_sched_tenant *a = exl3_flow_account(f);

		if (a->priority > c->priority) {
			c->priority = a->priority;
			c->used_ns = c->own_used_ns = NONE;
		}
		if (a->priority < c->priority)
			continue;
		if (a->used_ns < c->used_ns) {
			c->used_ns = a->used_ns;
			c->own_used_ns = f->own.used_ns;
		} else if (a->used_ns == c->used_ns && f->own.used_ns < c->own_used_ns) {
			c->own_used_ns = f->own.used_ns;
		}
	}
}

/*
 * How many trains @flows flows had best have beside @others of other kinds; 0: not known yet. Between two
 * launches of a train its members are away for H, and the other trains have theirs: it goes on after the longer of
 * both. Launches differ, so that is not the longer of their means: with one other train it is the mean of the
 * longer, which is measured too (overlap_ns). Of the numbers that are nearly as good as the best the largest
 * is taken, because fewer flows wait for each other then.
 */
static uint32_t capacity(const struct exl3_sched_key *board, uint32_t flows, uint32_t others)
{
	uint64_t call[CAPACITY_MAX + 1] = {0}, best = NONE, one = exl3_steps_launch(board, 1);
	uint32_t n, max = flows < CAPACITY_MAX ? flows : CAPACITY_MAX;

	if (!one)
		return 0;
	for (n = 1; n <= max; n++) {
		uint32_t items = (flows + n - 1) / n;
		uint64_t launch_ns = exl3_steps_launch(board, items);
		uint64_t between = (n - 1) * launch_ns + others * one;

		if (n + others > 1)
			between = exl3_most(between, exl3_steps_overlap(board, items));
		call[n] = launch_ns + exl3_most(between, board->gap_ns);
		best = exl3_least(best, call[n]);
	}
	if (max == flows && call[max] <= best + best / 10)
		return max; /* nobody has to wait for anybody */
	for (n = max; n > 1 && call[n] > best + best / 20; n--)
		;
	return n ? n : 1;
}

struct census {
	uint32_t same, others; /* trains of its kind under way; of other kinds */
	uint32_t flows;        /* of its kind, in trains, waiting or expected */
	bool stations;         /* does one of its kind wait at the board key? */
};

static void count(struct exl3_sched *s, const struct exl3_train *t, struct census *c)
{
	*c = (struct census){0};
	for (unsigned i = 0, left = s->nr_trains; left && i < EXL3_TRAINS_MAX; i++) {
		const struct exl3_train *o = &s->trains[i];

		if (!o->nr)
			continue;
		left--;
		if (o->board != t->board || o->level != t->level) {
			c->others += !o->boarding;
			continue;
		}
		c->same += !o->boarding;
		c->flows += o->nr;
		c->stations |= o->boarding && o->key == t->board->key;
	}
}

/* Trains of its kind under way that are worth a place: stragglers must not keep a full train waiting. */
static uint32_t count_large(struct exl3_sched *s, const struct exl3_train *t, uint32_t share)
{
	uint32_t nr = 0;

	for (unsigned i = 0, left = s->nr_trains; left && i < EXL3_TRAINS_MAX; i++) {
		const struct exl3_train *o = &s->trains[i];

		if (!o->nr)
			continue;
		left--;
		nr += !o->boarding && o->board == t->board && o->level == t->level &&
		      2 * o->nr >= share;
	}
	return nr;
}

/* May a train that is boarding go? Else *@wake_ns is when to look again. */
static bool departs(struct exl3_sched *s, const struct exl3_train *t, uint64_t *wake_ns)
{
	struct exl3_sched_key *board = t->board;
	uint32_t room, share, expected;
	uint64_t until = t->since_ns + exl3_least(board->step_ns + board->step_ns / 4 + WAIT_NS_MIN,
						  EXL3_HOLD_NS_MAX);
	bool station = t->key == board->key;
	struct census c;

	if (!s->trains_on || !board->board || s->now_ns >= until)
		return true;
	count(s, t, &c);
	expected = exl3_steps_expected(s, board);
	c.flows += expected;
	room = capacity(board, c.flows, c.others);
	if (!room || c.flows <= room)
		return true; /* the device is not saturated */
	share = (c.flows + room - 1) / room;
	*wake_ns = until;
	if (!station) /* between stations: only if nobody needs the room who waits at one */
		return c.same + (c.stations || expected > 0) < room;
	if (c.same >= room && count_large(s, t, share) >= room)
		return false;
	if (t->nr >= share || t->nr >= s->merge_max || !expected)
		return true;
	*wake_ns = exl3_least(until, board->tail_until_ns);
	return false;
}

/* Members of a riding train that are not there are dropped. */
static void drop_missing(struct exl3_sched *s, struct exl3_train *t)
{
	struct exl3_sched_flow *next;

	for (struct exl3_sched_flow *f = t->members; f; f = next) {
		next = f->train_next;
		if (f->place != EXL3_FLOW_TRAIN && !f->running) {
			train_leave(s, f);
			s->stats.late++;
		}
	}
}

/* May a riding train's next launch go? */
static bool rolls(struct exl3_sched *s, struct exl3_train *t, uint64_t *wake_ns)
{
	if (t->nr_ready == t->nr || (t->nr_ready && !s->trains_on))
		return true;
	if (t->nr_busy)
		return false;
	if (s->now_ns < t->grace_ns) {
		*wake_ns = t->grace_ns;
		return false;
	}
	drop_missing(s, t);
	return t->nr && t->nr_ready == t->nr;
}

/*
 * Would a launch of @cost_ns that starts now delay a train of many more, which has used less and is about
 * to come? It had better follow that train then, while its members are away.
 */
static bool yields(struct exl3_sched *s, const struct exl3_choice *c, uint64_t cost_ns)
{
	uint32_t nr = c->train ? c->train->nr : 1;

	for (unsigned i = 0, left = s->nr_trains; left && i < EXL3_TRAINS_MAX; i++) {
		const struct exl3_train *t = &s->trains[i];
		struct exl3_choice o;

		if (!t->nr)
			continue;
		left--;
		if (t->boarding || t->nr < 3 * nr || t->nr_busy || s->now_ns >= t->due_ns ||
		    s->now_ns + cost_ns <= t->expected_ns || t->nr_ready == t->nr)
			continue;
		train_choice(&s->trains[i], &o);
		o.since_ns = NONE; /* for less use, not for having waited longer */
		if (!exl3_choice_before(&o, c))
			continue;
		s->wake_ns = exl3_least(s->wake_ns, t->due_ns);
		return true;
	}
	return false;
}

void exl3_trains_look(struct exl3_sched *s, struct exl3_choices *all)
{
	for (unsigned i = 0, left = s->nr_trains; left && i < EXL3_TRAINS_MAX; i++) {
		struct exl3_train *t = &s->trains[i];
		uint64_t wake = NONE;
		struct exl3_choice c;

		if (!t->nr)
			continue;
		left--;
		if (!(t->boarding ? departs(s, t, &wake) : rolls(s, t, &wake))) {
			s->wake_ns = exl3_least(s->wake_ns, wake);
			continue;
		}
		train_choice(t, &c);
		if (!yields(s, &c, exl3_steps_launch(t->board, t->nr)))
			exl3_choices_add(all, &c);
	}
}

bool exl3_trains_reserve(struct exl3_sched *s, const struct exl3_choice *c)
{
	const struct exl3_sched_item *head = c->flow->head;

	for (unsigned i = 0, left = s->nr_trains; left && i < EXL3_TRAINS_MAX; i++) {
		struct exl3_train *t = &s->trains[i];
		struct exl3_choice o;

		if (!t->nr)
			continue;
		left--;
		if (t->boarding || (!t->nr_busy && s->now_ns >= t->due_ns) ||
		    (head->rows <= EXL3_TRAIN_ROWS_MAX &&
		     head->cost_ns <= 2 * exl3_steps_launch(t->board, t->nr)))
			continue;
		train_choice(t, &o);
		o.since_ns = NONE; /* only for less use, not for having waited longer */
		if (!exl3_choice_before(&o, c))
			continue;
		if (!t->nr_busy)
			s->wake_ns = exl3_least(s->wake_ns, t->due_ns);
		return true;
	}
	return false;
}

/* ---- departure ---- */

static bool has_key(const struct exl3_sched_flow *f, const struct exl3_sched_item *like)
{
	return f->head->key == like->key && f->head->merge_class == like->merge_class;
}

/* The head that most others of a train are equal to. */
static const struct exl3_sched_item *majority(const struct exl3_train *t)
{
	const struct exl3_sched_item *best = NULL;
	uint32_t most_nr = 0;

	for (const struct exl3_sched_flow *f = t->ready; f && 2 * most_nr < t->nr_ready;
	     f = f->next) {
		uint32_t nr = 0;

		for (const struct exl3_sched_flow *o = t->ready; o; o = o->next)
			nr += has_key(o, f->head);
		if (nr > most_nr) {
			most_nr = nr;
			best = f->head;
		}
	}
	return best;
}

/* Whoever came so late that the device idled pays for it; who has overdrawn rides elsewhere from now on. */
static void charge_late(struct exl3_sched *s, struct exl3_train *t)
{
	const struct exl3_sched_key *board = t->board;
	uint64_t sum = 0, on_time, each, overlap;
	struct exl3_sched_flow *next;

	if (t->nr < 2 || s->launches || t->nr_ready < t->nr)
		return;
	for (struct exl3_sched_flow *f = t->ready; f; f = f->next)
		sum += f->ready_ns - t->since_ns;
	on_time = exl3_most(t->since_ns + sum / t->nr_ready, s->idle_ns);
	/* What serving him alone would cost the others; and a quarter of a launch, as clients that are served one
	 * after the other do not come in at once. */
	each = exl3_steps_launch(board, t->nr) / 4;
	overlap = exl3_steps_overlap(board, t->nr);
	if (overlap > board->gap_ns)
		each = exl3_most(each, overlap - board->gap_ns);
	for (struct exl3_sched_flow *f = t->ready; f; f = next) {
		next = f->next;
		if (f->ready_ns <= on_time)
			continue;
		f->late_ns += f->ready_ns - on_time;
		if (f->late_ns <= each * board->cycle || t->nr < 2)
			continue;
		f->late_ns = 0;
		f->level += f->level < LEVEL_MAX;
		f->ban = exl3_least(BAN_MAX, 2u << (2 * f->level));
		s->stats.expelled++;
		ready_del(t, f);
		member_del(s, t, f);
		exl3_flow_place(s, f);
	}
}

void exl3_trains_depart(struct exl3_sched *s, struct exl3_train *t, struct exl3_load *l)
{
	const struct exl3_sched_item *like;
	struct exl3_sched_flow *f, *next;

	s->stats.held_ns += s->now_ns - t->since_ns;
	if (t->boarding) {
		t->boarding = false;
		s->stats.trains += t->nr > 1;
	} else {
		charge_late(s, t);
	}
	t->grace_ns = t->due_ns = t->expected_ns = 0;
	like = majority(t);
	for (f = t->ready; f; f = next) {
		next = f->next;
		if (!has_key(f, like)) {
			/* Its client does something else now. */
			ready_del(t, f);
			member_del(s, t, f);
			exl3_flow_place(s, f);
		} else if (exl3_load_fits(l, f->head)) {
			ready_del(t, f);
			exl3_load_add(l, f);
		}
	}
}

void exl3_trains_join(struct exl3_sched *s, struct exl3_train *t, struct exl3_load *l)
{
	const struct exl3_sched_item *first = l->flows[0]->head;
	struct exl3_sched_flow *next;

	for (unsigned i = 0, left = s->nr_trains; left && i < EXL3_TRAINS_MAX; i++) {
		struct exl3_train *o = &s->trains[i];

		if (!o->nr)
			continue;
		left--;
		/* Of a train under way only all together: half of it would be ahead of the rest. */
		if (o == t || (!o->boarding && (!t || o->level != t->level || o->nr_ready < o->nr ||
						o->nr > l->nr_max - l->nr)))
			continue;
		for (struct exl3_sched_flow *f = o->ready; f; f = next) {
			next = f->next;
			if (!has_key(f, first) || !exl3_load_fits(l, f->head))
				continue;
			ready_del(o, f);
			member_del(s, o, f);
			if (t && f->level == t->level && f->board == t->board) {
				member_add(t, f);
				s->stats.joined++;
			}
			exl3_load_add(l, f);
		}
	}
}
