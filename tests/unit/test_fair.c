/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fair.c - scheduler and slices together, before a device on paper: shares of tenants are those of their
 * weights whatever their requests look like, and a short request beside a flood of long ones waits for less than
 * two launches. Time is simulated: the results are the same on every machine.
 */
#include "tests/test.h"

#include "daemon/chunk.h"
#include "daemon/sched.h"

#include <math.h>

#define TENANTS 3
#define DEPTH   8
#define CHUNK   1000000ull
#define SAMPLES 4000

struct request {
	struct exl3_sched_item item; /* first: the scheduler hands it back */
	struct exl3_checked c;
	uint32_t first;
	uint64_t sent_ns, wanted_ns; /* IDLE: when it is sent (again) */
	unsigned tenant;
	bool light;
};

struct launch {
	struct exl3_sched_item *items[EXL3_LAUNCH_ITEMS_MAX];
	uint32_t nr, rows;
	uint64_t ns;
};

static struct sim {
	struct exl3_sched s;
	struct exl3_pace pace;
	struct exl3_sched_tenant tenant[TENANTS];
	struct exl3_sched_flow flow[TENANTS + 1];
	struct request req[TENANTS + 1][DEPTH];
	unsigned nr_flows, depth[TENANTS + 1];
	struct launch queue[16]; /* of the device, the first runs */
	unsigned queued;
	uint64_t now, free_ns; /* the device is done with the first */
	uint64_t device_ns[TENANTS], longest;
	double waits[SAMPLES]; /* of the light one, in launches as long as the longest */
	unsigned nr_waits;
	double fixed_ns, row_ns, noise;
} sim;

static const struct exl3_module_desc desc = {
	.kind = EXL3_MOD_LINEAR, .k = 4096, .n = 14336, .nr_shards = 1};

static void reset(double fixed_ns, double row_ns, double noise)
{
	memset(&sim, 0, sizeof(sim));
	exl3_sched_init(&sim.s, 8, 32, EXL3_M_MAX);
	exl3_sched_set_cost_max(&sim.s, CHUNK);
	exl3_pace_init(&sim.pace, true);
	sim.fixed_ns = fixed_ns;
	sim.row_ns = row_ns;
	sim.noise = noise;
	sim.now = 1;
	srand48(42);
}

/* A flow that keeps @depth requests of @rows rows waiting; light: one at a time, at odd moments. */
static void add_flow(unsigned tenant, uint32_t rows, unsigned depth, bool light)
{
	unsigned f = sim.nr_flows++;

	exl3_sched_set_tenant(&sim.s, &sim.flow[f], &sim.tenant[tenant]);
	sim.depth[f] = depth;
	for (unsigned i = 0; i < depth; i++) {
		struct request *r = &sim.req[f][i];

		r->c = (struct exl3_checked){.op = EXL3_OP_LINEAR,
					     .rows = {.m = rows, .x_dtype = EXL3_F16, .y_dtype = EXL3_F16},
					     .target = {.desc = &desc}};
		r->tenant = tenant;
		r->light = light;
		r->item.key = rows <= EXL3_TRAIN_ROWS_MAX ? &desc : NULL;
		r->wanted_ns = sim.now;
	}
}

static void plan(struct request *r)
{
	struct exl3_slice slice = exl3_chunk_next(&sim.pace, &r->c, r->first, CHUNK);

	r->item.rows = slice.rows;
	r->item.cost_ns = slice.cost_ns;
	r->item.more = r->first + slice.rows < r->c.rows.m;
}

static void send_due(void)
{
	for (unsigned f = 0; f < sim.nr_flows; f++) {
		for (unsigned i = 0; i < sim.depth[f]; i++) {
			struct request *r = &sim.req[f][i];

			if (r->item.state != EXL3_ITEM_IDLE || r->wanted_ns > sim.now)
				continue;
			r->first = 0;
			r->sent_ns = sim.now;
			r->wanted_ns = UINT64_MAX;
			plan(r);
			exl3_sched_push(&sim.s, &sim.flow[f], &r->item);
		}
	}
}

static void start_all(void)
{
	uint32_t nr;

	for (;;) {
		struct launch *l = &sim.queue[sim.queued];

		nr = exl3_sched_pick(&sim.s, l->items);
		if (!nr)
			return;
		l->nr = nr;
		l->rows = 0;
		for (uint32_t i = 0; i < nr; i++)
			l->rows += l->items[i]->rows;
		l->ns = (uint64_t)((sim.fixed_ns + sim.row_ns * l->rows) *
				   (1 + sim.noise * (2 * drand48() - 1)));
		if (!sim.queued++)
			sim.free_ns = sim.now + l->ns;
	}
}

static void answer(struct request *r)
{
	r->wanted_ns = sim.now;
	if (!r->light)
		return;
	if (sim.nr_waits < SAMPLES)
		sim.waits[sim.nr_waits++] = (double)(sim.now - r->sent_ns);
	r->wanted_ns = sim.now + (uint64_t)(drand48() * 3e6);
}

static void end_first(void)
{
	struct launch l = sim.queue[0];

	memmove(sim.queue, sim.queue + 1, --sim.queued * sizeof(sim.queue[0]));
	sim.free_ns = sim.queued ? sim.now + sim.queue[0].ns : UINT64_MAX;
	if (sim.nr_waits > 20 && l.ns > sim.longest)
		sim.longest = l.ns;
	exl3_chunk_learn(&sim.pace, &((struct request *)l.items[0])->c, l.rows, l.ns);
	for (uint32_t i = 0; i < l.nr; i++)
		sim.device_ns[((struct request *)l.items[i])->tenant] +=
			l.ns * l.items[i]->rows / l.rows;
	exl3_sched_done(&sim.s, l.items, l.nr, l.ns);
	for (uint32_t i = 0; i < l.nr; i++) {
		struct request *r = (struct request *)l.items[i];

		if (r->item.more) {
			r->first += r->item.rows;
			plan(r);
			exl3_sched_again(&sim.s, &r->item);
		} else {
			answer(r);
		}
	}
}

static void run_until(uint64_t end_ns)
{
	while (sim.now < end_ns) {
		uint64_t next = sim.queued ? sim.free_ns : UINT64_MAX;

		exl3_sched_tick(&sim.s, sim.now);
		send_due();
		start_all();
		if (sim.queued)
			next = sim.free_ns;
		for (unsigned f = 0; f < sim.nr_flows; f++) {
			for (unsigned i = 0; i < sim.depth[f]; i++) {
				if (sim.req[f][i].item.state == EXL3_ITEM_IDLE &&
				    sim.req[f][i].wanted_ns < next)
					next = sim.req[f][i].wanted_ns;
			}
		}
		if (sim.s.wake_ns > sim.now && sim.s.wake_ns < next)
			next = sim.s.wake_ns;
		assert_true(next != UINT64_MAX);
		sim.now = next > sim.now ? next : sim.now + 1;
		exl3_sched_tick(&sim.s, sim.now);
		while (sim.queued && sim.free_ns <= sim.now)
			end_first();
	}
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void a_light_tenant_beside_a_flood(void **state)
{
	static const struct {
		double fixed_ns, row_ns, noise;
		unsigned floods;
	} cases[] = {
		{30e3, 0.9e3, 0, 1},   {30e3, 0.9e3, 0.2, 1}, {30e3, 0.9e3, 0.2, 2},
		{10e3, 0.1e3, 0.1, 1}, {40e3, 8e3, 0.1, 1},   {400e3, 0.9e3, 0.05, 1},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		double p50, p99, own = cases[i].fixed_ns + cases[i].row_ns;

		reset(cases[i].fixed_ns, cases[i].row_ns, cases[i].noise);
		for (unsigned t = 0; t < TENANTS; t++)
			sim.tenant[t].weight = EXL3_WEIGHT_DEFAULT;
		add_flow(0, 1, 1, true);
		for (unsigned f = 0; f < cases[i].floods; f++)
			add_flow(1, EXL3_M_MAX, DEPTH, false);
		run_until(5000000000ull);
		assert_in_range(sim.nr_waits, 500, SAMPLES);
		/* The first ones teach how long launches take. */
		qsort(sim.waits + 20, sim.nr_waits - 20, sizeof(sim.waits[0]), compare);
		p50 = sim.waits[20 + (sim.nr_waits - 20) / 2];
		p99 = sim.waits[20 + (sim.nr_waits - 20) * 99 / 100];
		print_message("case %zu: longest launch %.0f us, own %.0f us; p50 %.2f, p99 %.2f, worst %.2f "
			      "launches\n",
			      i, (double)sim.longest / 1e3, own / 1e3, p50 / (double)sim.longest,
			      p99 / (double)sim.longest,
			      sim.waits[sim.nr_waits - 1] / (double)sim.longest);
		/* What runs, and itself. */
		assert_true(p99 <= (double)sim.longest + 1.3 * own);
		assert_true(p99 <= 2 * (double)sim.longest);
		if (cases[i].fixed_ns < 100e3)
			assert_in_range(sim.longest, CHUNK / 2, CHUNK * 14 / 10);
	}
}

static void shares_are_those_of_weights(void **state)
{
	static const struct {
		uint32_t weight[TENANTS], rows[TENANTS];
	} cases[] = {
		{{100, 100, 100}, {512, 512, 512}},   {{100, 200, 400}, {512, 512, 512}},
		{{100, 100, 100}, {8192, 128, 1000}}, {{100, 200, 400}, {8192, 128, 1000}},
		{{400, 200, 100}, {8192, 128, 1000}}, {{100, 200, 400}, {200, 8192, 70}},
		{{1, 2, 4}, {65, 65, 8192}},          {{1000, 2000, 4000}, {8192, 8192, 8192}},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		double all = 0, weights = 0, sum = 0, squares = 0, worst = 0;

		reset(30e3, 0.9e3, 0.1);
		for (unsigned t = 0; t < TENANTS; t++) {
			sim.tenant[t].weight = cases[i].weight[t];
			add_flow(t, cases[i].rows[t], DEPTH, false);
		}
		run_until(300000000ull); /* they have met, and shapes are known */
		memset(sim.device_ns, 0, sizeof(sim.device_ns));
		run_until(4300000000ull);
		for (unsigned t = 0; t < TENANTS; t++) {
			double r = (double)sim.device_ns[t] / cases[i].weight[t];

			all += (double)sim.device_ns[t];
			weights += cases[i].weight[t];
			sum += r;
			squares += r * r;
		}
		for (unsigned t = 0; t < TENANTS; t++) {
			double off = fabs((double)sim.device_ns[t] / all /
						  (cases[i].weight[t] / weights) -
					  1);

			worst = off > worst ? off : worst;
		}
		print_message("case %zu: worst deviation %.2f %%, Jain index %.4f, device busy %.1f %%\n", i,
			      worst * 100, sum * sum / (TENANTS * squares), all / 4e7);
		assert_true(worst < 0.05);
		assert_true(sum * sum / (TENANTS * squares) >= 0.98);
		assert_true(all > 0.99 * 4e9); /* nobody waits while the device does nothing */
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(a_light_tenant_beside_a_flood),
		test_case(shares_are_those_of_weights),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
