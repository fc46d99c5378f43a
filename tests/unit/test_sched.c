/* SPDX-License-Identifier: Apache-2.0 */
/* test_sched.c - order within a channel, turns between channels, fences, merging, deadlines. */
#include "tests/test.h"

#include "daemon/sched.h"

#define NR 64

struct bench {
	struct exl3_sched s;
	struct exl3_sched_flow flows[4];
	struct exl3_sched_item items[NR];
	unsigned used;
	struct exl3_sched_item *got[EXL3_LAUNCH_ITEMS_MAX];
};

static void bench_init(struct bench *b, uint32_t launches, uint32_t merge)
{
	memset(b, 0, sizeof(*b));
	exl3_sched_init(&b->s, launches, merge, 100);
}

static struct exl3_sched_item *push(struct bench *b, unsigned flow, const void *key, uint32_t rows,
				    uint64_t deadline)
{
	struct exl3_sched_item *item = &b->items[b->used++];

	assert_true(b->used <= NR);
	item->key = key;
	item->rows = rows;
	item->deadline_ns = deadline;
	exl3_sched_push(&b->s, &b->flows[flow], item);
	return item;
}

static struct exl3_sched_item *push_fence(struct bench *b, unsigned flow)
{
	struct exl3_sched_item *item = &b->items[b->used++];

	item->fence = true;
	exl3_sched_push(&b->s, &b->flows[flow], item);
	return item;
}

/* Picks one launch of one item, which must be @want; NULL: nothing may be picked. */
static void expect(struct bench *b, struct exl3_sched_item *want)
{
	uint32_t n = exl3_sched_pick(&b->s, b->got);

	assert_int_equal(n, want ? 1 : 0);
	if (want)
		assert_ptr_equal(b->got[0], want);
}

static void done(struct bench *b, struct exl3_sched_item *item)
{
	exl3_sched_done(&b->s, &item, 1, 1000);
}

static void in_order_within_a_flow(void **state)
{
	struct exl3_sched_item *item[5];
	struct bench b;

	(void)state;
	bench_init(&b, 3, 1);
	expect(&b, NULL);
	for (int i = 0; i < 5; i++)
		item[i] = push(&b, 0, NULL, 1, 0);
	expect(&b, item[0]);
	expect(&b, item[1]);
	expect(&b, item[2]);
	expect(&b, NULL); /* launches_max */
	done(&b, item[1]);
	expect(&b, item[3]);
	done(&b, item[0]);
	done(&b, item[2]);
	expect(&b, item[4]);
	done(&b, item[3]);
	done(&b, item[4]);
	assert_int_equal(b.s.queued, 0);
	assert_int_equal(b.s.running, 0);
	assert_int_equal(b.s.launches, 0);
	assert_null(b.s.turn);
}

static void flows_take_turns(void **state)
{
	struct exl3_sched_item *a[3], *c[3], *d;
	struct bench b;

	(void)state;
	bench_init(&b, NR, 1);
	for (int i = 0; i < 3; i++)
		a[i] = push(&b, 0, NULL, 1, 0);
	for (int i = 0; i < 3; i++)
		c[i] = push(&b, 1, NULL, 1, 0);
	expect(&b, a[0]);
	expect(&b, c[0]);
	d = push(&b, 2, NULL, 1, 0); /* a newcomer has used nothing yet */
	expect(&b, d);
	expect(&b, a[1]);
	expect(&b, c[1]);
	expect(&b, a[2]);
	expect(&b, c[2]);
	expect(&b, NULL);
}

/* However much one flow queues, another gets every second launch. */
static void a_greedy_flow_delays_nobody(void **state)
{
	struct bench b;
	unsigned between = 0;

	(void)state;
	bench_init(&b, 1, 1);
	for (int i = 0; i < 40; i++)
		push(&b, 0, NULL, 1, 0);
	for (int i = 0; i < 10; i++) {
		struct exl3_sched_item *mine = push(&b, 1, NULL, 1, 0);

		for (between = 0; exl3_sched_pick(&b.s, b.got) == 1 && b.got[0] != mine; between++)
			done(&b, b.got[0]);
		assert_ptr_equal(b.got[0], mine);
		assert_true(between <= 1);
		done(&b, mine);
	}
}

static void fences_wait_for_what_is_before_them(void **state)
{
	struct exl3_sched_item *first, *second, *fence, *after;
	struct bench b;

	(void)state;
	bench_init(&b, 4, 1);
	first = push(&b, 0, NULL, 1, 0);
	second = push(&b, 0, NULL, 1, 0);
	fence = push_fence(&b, 0);
	after = push(&b, 0, NULL, 1, 0);
	expect(&b, first);
	expect(&b, second);
	expect(&b, NULL);
	done(&b, second);
	expect(&b, NULL); /* the first one still runs */
	done(&b, first);
	expect(&b, fence);
	assert_int_equal(fence->state, EXL3_ITEM_IDLE); /* done: it needs no launch */
	expect(&b, after);
	/* A full device does not hold up the fences of others. */
	bench_init(&b, 1, 1);
	first = push(&b, 0, NULL, 1, 0);
	push(&b, 0, NULL, 1, 0);
	expect(&b, first);
	fence = push_fence(&b, 1);
	expect(&b, fence);
	expect(&b, NULL);
}

static void equal_keys_share_a_launch(void **state)
{
	static const int module, other;
	struct exl3_sched_item *a, *c, *d, *e;
	struct bench b;

	(void)state;
	bench_init(&b, 2, 8);
	a = push(&b, 0, &module, 30, 0);
	push(&b, 0, &module, 1, 0); /* behind a: a flow gives one item to a launch, order is kept */
	c = push(&b, 1, &other, 1, 0);
	d = push(&b, 2, &module, 70, 0);
	e = push(&b, 3, &module, 1, 0); /* 101 rows would be over the limit of 100 */
	assert_int_equal(exl3_sched_pick(&b.s, b.got), 2);
	assert_ptr_equal(b.got[0], a);
	assert_ptr_equal(b.got[1], d);
	assert_int_equal(b.s.launches, 1);
	assert_int_equal(b.s.running, 2);
	exl3_sched_done(&b.s, b.got, 2, 1000);
	expect(&b, c);
	assert_int_equal(exl3_sched_pick(&b.s, b.got), 2); /* e and the second of flow 0 */
	assert_ptr_equal(b.got[0], e);
	assert_ptr_equal(b.got[1], &b.items[1]);
	/* No key, no company. */
	bench_init(&b, 2, 8);
	a = push(&b, 0, NULL, 1, 0);
	push(&b, 1, NULL, 1, 0);
	expect(&b, a);
	/* All in one launch, up to merge_max. */
	bench_init(&b, 2, 3);
	for (unsigned i = 0; i < 4; i++)
		push(&b, i, &module, 1, 0);
	assert_int_equal(exl3_sched_pick(&b.s, b.got), 3);
	assert_int_equal(exl3_sched_pick(&b.s, b.got), 1);
	assert_null(b.s.turn);
}

static void a_launch_that_could_not_start_keeps_its_place(void **state)
{
	static const int module;
	struct exl3_sched_item *a, *a2, *c;
	struct bench b;

	(void)state;
	bench_init(&b, 4, 4);
	a = push(&b, 0, &module, 1, 50);
	a2 = push(&b, 0, NULL, 1, 0);
	c = push(&b, 1, &module, 1, 0);
	assert_int_equal(exl3_sched_pick(&b.s, b.got), 2);
	exl3_sched_unpick(&b.s, b.got, 2);
	assert_int_equal(b.s.queued, 3);
	assert_int_equal(b.s.launches, 0);
	assert_true(b.s.next_deadline <= 50);
	assert_int_equal(exl3_sched_pick(&b.s, b.got), 2);
	assert_ptr_equal(b.got[0], a);
	assert_ptr_equal(b.got[1], c);
	expect(&b, a2);
}

static void deadlines(void **state)
{
	struct exl3_sched_item *early, *late, *never;
	struct bench b;

	(void)state;
	bench_init(&b, 1, 1);
	assert_int_equal(b.s.next_deadline, UINT64_MAX);
	never = push(&b, 0, NULL, 1, 0);
	late = push(&b, 0, NULL, 1, 200);
	early = push(&b, 1, NULL, 1, 100);
	assert_int_equal(b.s.next_deadline, 100);
	assert_null(exl3_sched_expire(&b.s, 99));
	assert_ptr_equal(exl3_sched_expire(&b.s, 100), early); /* at it, not only after it */
	assert_null(exl3_sched_expire(&b.s, 100));
	assert_int_equal(b.s.next_deadline, 200);
	/* Also from the middle of a queue whose head has none. */
	assert_ptr_equal(exl3_sched_expire(&b.s, 1000), late);
	assert_null(exl3_sched_expire(&b.s, 1000));
	assert_int_equal(b.s.next_deadline, UINT64_MAX);
	expect(&b, never);
	/* What runs does not expire. */
	done(&b, never);
	early = push(&b, 2, NULL, 1, 10);
	expect(&b, early);
	assert_null(exl3_sched_expire(&b.s, 11));
}

/* Any order of coming and leaving: they expire by deadline, and each of them once. */
static void many_deadlines(void **state)
{
	unsigned seed = 4711;

	(void)state;
	for (int round = 0; round < 500; round++) {
		struct exl3_sched_item *got;
		uint64_t last = 0, left = 0;
		struct bench b;

		bench_init(&b, 1, 1);
		for (unsigned i = 0; i < NR; i++)
			push(&b, i % 4, NULL, 1, (unsigned)rand_r(&seed) % 50);
		for (unsigned i = 0; i < NR; i++) {
			if (rand_r(&seed) % 3 == 0)
				exl3_sched_remove(&b.s, &b.items[i]);
			else
				left += b.items[i].deadline_ns != 0;
		}
		while (left) {
			uint64_t earliest = UINT64_MAX;

			for (unsigned i = 0; i < NR; i++)
				if (b.items[i].state == EXL3_ITEM_QUEUED &&
				    b.items[i].deadline_ns && b.items[i].deadline_ns < earliest)
					earliest = b.items[i].deadline_ns;
			assert_int_equal(b.s.next_deadline, earliest);
			assert_null(exl3_sched_expire(&b.s, earliest - 1));
			got = exl3_sched_expire(&b.s, earliest);
			assert_non_null(got);
			assert_int_equal(got->deadline_ns, earliest);
			assert_int_equal(got->state, EXL3_ITEM_IDLE);
			assert_true(earliest >= last);
			last = earliest;
			left--;
		}
		assert_int_equal(b.s.next_deadline, UINT64_MAX);
		assert_null(exl3_sched_expire(&b.s, UINT64_MAX));
	}
}

static void removal_from_every_place(void **state)
{
	(void)state;
	for (int gone = 0; gone < 4; gone++) {
		struct exl3_sched_item *item[4];
		struct bench b;

		bench_init(&b, 4, 1);
		for (int i = 0; i < 4; i++)
			item[i] = push(&b, 0, NULL, 1, 0);
		exl3_sched_remove(&b.s, item[gone]);
		for (int i = 0; i < 4; i++) {
			if (i != gone)
				expect(&b, item[i]);
		}
		expect(&b, NULL);
		assert_int_equal(b.s.queued, 0);
	}
}

/* Random walks against the plainest model: counts of every kind, order of every flow. */
static void random_walk(void **state)
{
	static const int keys[2];
	unsigned seed = 12345;

	(void)state;
	for (int round = 0; round < 200; round++) {
		struct exl3_sched_item *running[NR];
		unsigned next[4] = {0}, last[4] = {0}, nr_running = 0, nr_done = 0;
		uint64_t order[NR];
		struct bench b;

		bench_init(&b, 1 + (unsigned)round % 5, 1 + (unsigned)round % 4);
		while (nr_done < NR) {
			unsigned dice = (unsigned)rand_r(&seed) % 3,
				 flow = (unsigned)rand_r(&seed) % 4;

			if (dice == 0 && b.used < NR) {
				order[b.used] = ++next[flow];
				push(&b, flow, (unsigned)rand_r(&seed) % 2 ? &keys[flow & 1] : NULL,
				     1, 0);
			} else if (dice == 1 || b.used == NR) {
				uint32_t n = exl3_sched_pick(&b.s, b.got);

				for (uint32_t i = 0; i < n; i++) {
					unsigned f = (unsigned)(b.got[i]->flow - b.flows);
					uint64_t at = order[b.got[i] - b.items];

					assert_int_equal(at, last[f] + 1);
					last[f]++;
					running[nr_running++] = b.got[i];
				}
				if (n)
					b.s.launches += n - 1; /* done one by one below */
			}
			if (nr_running && dice != 0) {
				unsigned i = (unsigned)rand_r(&seed) % nr_running;

				done(&b, running[i]);
				running[i] = running[--nr_running];
				nr_done++;
			}
			assert_int_equal(b.s.running, nr_running);
			assert_int_equal(b.s.queued + nr_running + nr_done, b.used);
		}
		assert_null(b.s.turn);
		assert_null(b.s.all);
		assert_int_equal(b.s.launches, 0);
	}
}

/* Slices of a long item: others have their turn between them, its own flow waits. */
static void a_long_item_in_slices(void **state)
{
	struct exl3_sched_item *a, *behind, *c[2], *fence;
	struct bench b;

	(void)state;
	bench_init(&b, 8, 1);
	a = push(&b, 0, NULL, 10, 50);
	a->more = true;
	behind = push(&b, 0, NULL, 1, 0);
	fence = push_fence(&b, 0);
	c[0] = push(&b, 1, NULL, 1, 0);
	c[1] = push(&b, 1, NULL, 1, 0);
	expect(&b, a);
	expect(&b, c[0]);
	expect(&b, c[1]);
	expect(&b, NULL); /* not what is behind the long one */
	done(&b, a);
	assert_int_equal(a->state, EXL3_ITEM_IDLE);
	exl3_sched_again(&b.s, a);
	assert_ptr_equal(b.flows[0].head, a);
	/* Between two slices its deadline counts. */
	assert_null(exl3_sched_expire(&b.s, 49));
	assert_ptr_equal(exl3_sched_expire(&b.s, 50), a);
	a->deadline_ns = 0;
	exl3_sched_again(&b.s, a);
	a->more = false; /* the last one */
	expect(&b, a);
	expect(&b, behind);
	expect(&b, NULL);
	done(&b, a);
	done(&b, behind);
	expect(&b, fence);
	assert_int_equal(b.flows[0].partial, 0);
}

/* The device gets no more work ahead than cost_max_ns, and merging stays below it too. */
static void costs_are_bounded(void **state)
{
	struct exl3_sched_item *a, *c, *d, *e;
	static const int key;
	struct bench b;

	(void)state;
	bench_init(&b, 8, 8);
	exl3_sched_set_cost_max(&b.s, 100);
	a = push(&b, 0, NULL, 1, 0);
	c = push(&b, 1, &key, 33, 0); /* so many rows that each costs its own */
	d = push(&b, 2, &key, 33, 0);
	e = push(&b, 3, &key, 33, 0);
	a->cost_ns = 1000; /* alone it may */
	c->cost_ns = 60;
	d->cost_ns = 41;
	e->cost_ns = 40;
	expect(&b, a);
	expect(&b, NULL);
	done(&b, a);
	assert_int_equal(exl3_sched_pick(&b.s, b.got), 2);
	assert_ptr_equal(b.got[0], c);
	assert_ptr_equal(b.got[1], e);
	assert_int_equal(b.s.cost_ns, 100);
	expect(&b, NULL);
	exl3_sched_unpick(&b.s, b.got, 2);
	assert_int_equal(b.s.cost_ns, 0);
	assert_int_equal(exl3_sched_pick(&b.s, b.got), 2);
	exl3_sched_done(&b.s, b.got, 2, 1000);
	expect(&b, d);
	done(&b, d);
	assert_int_equal(b.s.cost_ns, 0);
}

/* One launch that took very much longer than expected does not put its tenant into debt for long. */
static void surprises_are_not_charged(void **state)
{
	struct exl3_sched_tenant t[2] = {{.weight = 100}, {.weight = 100}};
	struct exl3_sched_item *a, *c;
	struct bench b;
	unsigned between = 0;

	(void)state;
	bench_init(&b, 1, 1);
	for (unsigned i = 0; i < 2; i++)
		exl3_sched_set_tenant(&b.s, &b.flows[i], &t[i]);
	a = push(&b, 0, NULL, 1, 0);
	a->cost_ns = 10000;
	c = push(&b, 1, NULL, 1, 0);
	c->cost_ns = 10000;
	expect(&b, a);
	exl3_sched_done(&b.s, &a, 1, 500000000);
	exl3_sched_push(&b.s, &b.flows[0], a);
	/* Launches of the other one until it is a's turn again. */
	while (exl3_sched_pick(&b.s, b.got) == 1 && b.got[0] == c && between < 100) {
		exl3_sched_done(&b.s, &c, 1, 10000);
		exl3_sched_push(&b.s, &b.flows[1], c);
		between++;
	}
	assert_ptr_equal(b.got[0], a);
	assert_in_range(between, 1, 10);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(in_order_within_a_flow),
		test_case(flows_take_turns),
		test_case(a_greedy_flow_delays_nobody),
		test_case(fences_wait_for_what_is_before_them),
		test_case(equal_keys_share_a_launch),
		test_case(a_launch_that_could_not_start_keeps_its_place),
		test_case(deadlines),
		test_case(many_deadlines),
		test_case(removal_from_every_place),
		test_case(a_long_item_in_slices),
		test_case(costs_are_bounded),
		test_case(surprises_are_not_charged),
		test_case(random_walk),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
