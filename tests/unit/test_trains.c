/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_trains.c - decoders in step: the rates of the model with margins, and thousands of random traces with
 * bounds on how long anybody waits.
 */
#include "tests/test.h"

#include "tests/sim/model.h"

static struct sim_result run(const struct sim_config *cfg)
{
	struct sim_result r;

	sim_run(cfg, &r);
	return r;
}

static double rate(struct sim_config *cfg, enum sim_mode mode)
{
	cfg->mode = mode;
	return run(cfg).tokens_per_s;
}

static void check_at_least(const char *what, double have, double want)
{
	if (have < want)
		fail_msg("%s: %.3f, at least %.3f wanted", what, have, want);
}

static double least_of(const struct sim_result *r, uint32_t nr)
{
	double least = r->client[0];

	for (uint32_t i = 1; i < nr; i++)
		least = r->client[i] < least ? r->client[i] : least;
	return least;
}

/* The plain case, several ways a machine may be: total rate against the unmerged one, at least. */
static void rates(void **state)
{
	static const struct {
		const char *what;
		double launch_us, hand_us, think_us, slope;
		uint32_t modules, depth, n;
		double want; /* of the unmerged total */
	} rows[] = {
		{"S 15", 15, 9, 6, 0, 256, 1, 1, 0.99},
		{"S 15", 15, 9, 6, 0, 256, 1, 2, 0.98},
		{"S 15", 15, 9, 6, 0, 256, 1, 3, 1.40},
		{"S 15", 15, 9, 6, 0, 256, 1, 4, 1.88},
		{"S 15", 15, 9, 6, 0, 256, 1, 8, 3.70},
		{"S 15", 15, 9, 6, 0, 256, 1, 16, 7.40},
		{"S 15", 15, 9, 6, 0, 256, 1, 32, 14.6},
		{"S 23", 23, 15, 6, 0.02, 129, 2, 1, 0.99},
		{"S 23", 23, 15, 6, 0.02, 129, 2, 2, 0.98},
		{"S 23", 23, 15, 6, 0.02, 129, 2, 3, 1.28},
		{"S 23", 23, 15, 6, 0.02, 129, 2, 4, 1.75},
		{"S 23", 23, 15, 6, 0.02, 129, 2, 8, 3.60},
		{"S 23", 23, 15, 6, 0.02, 129, 2, 16, 6.80},
		{"S 23", 23, 15, 6, 0.02, 129, 2, 32, 12.0},
		{"S 40", 40, 8, 3, 0.02, 129, 8, 1, 0.99},
		{"S 40", 40, 8, 3, 0.02, 129, 8, 2, 1.45},
		{"S 40", 40, 8, 3, 0.02, 129, 8, 4, 2.85},
		{"S 40", 40, 8, 3, 0.02, 129, 8, 8, 5.3},
		{"S 40", 40, 8, 3, 0.02, 129, 8, 32, 15.5},
		{"S 10", 10, 30, 20, 0, 129, 4, 1, 0.99},
		{"S 10", 10, 30, 20, 0, 129, 4, 2, 0.99},
		{"S 10", 10, 30, 20, 0, 129, 4, 4, 0.98},
		{"S 10", 10, 30, 20, 0, 129, 4, 6, 0.98},
		{"S 10", 10, 30, 20, 0, 129, 4, 8, 1.20},
		{"S 10", 10, 30, 20, 0, 129, 4, 32, 4.6},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct sim_config cfg;
		struct sim_result r;
		double unmerged;
		char what[64];

		sim_defaults(&cfg, rows[i].n);
		cfg.launch_ns = (uint64_t)(rows[i].launch_us * 1000);
		cfg.hand_ns = (uint64_t)(rows[i].hand_us * 1000);
		for (uint32_t k = 0; k < rows[i].n; k++)
			cfg.client[k].think_ns = (uint64_t)(rows[i].think_us * 1000);
		cfg.slope = rows[i].slope;
		cfg.spread = rows[i].slope ? 0.7 : 0; /* layers of different sizes */
		cfg.modules = rows[i].modules;
		cfg.depth = rows[i].depth;
		cfg.run_ns = 2000000000;
		cfg.warm_ns = 1000000000;
		unmerged = rate(&cfg, SIM_UNMERGED);
		cfg.mode = SIM_TRAINS;
		r = run(&cfg);
		snprintf(what, sizeof(what), "%s us, %u clients", rows[i].what, rows[i].n);
		check_at_least(what, r.tokens_per_s / unmerged, rows[i].want);
		/* Nobody is left behind for the others' good. */
		check_at_least(what, least_of(&r, rows[i].n) * rows[i].n, 0.9 * r.tokens_per_s);
		if (r.p99_us > (4 * rows[i].launch_us + rows[i].hand_us) * (1 + 32 * cfg.slope))
			fail_msg("%s: p99 %.1f us", what, r.p99_us);
	}
}

/* Merging what happens to be equal is not enough: without trains there is hardly anything to merge. */
static void trains_are_what_merges(void **state)
{
	struct sim_config cfg;
	double merged;

	(void)state;
	sim_defaults(&cfg, 8);
	merged = rate(&cfg, SIM_MERGED);
	check_at_least("trains against merging alone", rate(&cfg, SIM_TRAINS), 2.5 * merged);
}

/* One client takes up to 40 us longer for every call: the others are not slowed to its pace. */
static void a_slow_client(void **state)
{
	struct sim_config cfg;
	struct sim_result r;

	(void)state;
	sim_defaults(&cfg, 8);
	cfg.client[0].extra_ns = 40000;
	cfg.run_ns = 1500000000;
	r = run(&cfg);
	check_at_least("total", r.tokens_per_s, 260 * 3.1);
	check_at_least("the slow one", r.client[0], 50); /* 78 alone */
	for (int i = 1; i < 8; i++)
		check_at_least("the others", r.client[i], 98);
}

/* Two kinds of clients with very different steps: each kind rides with its like. */
static void different_step_times(void **state)
{
	struct sim_config cfg;
	struct sim_result r;

	(void)state;
	sim_defaults(&cfg, 16);
	for (int i = 0; i < 8; i++)
		cfg.client[i].think_ns = 60000;
	cfg.run_ns = 2000000000;
	cfg.warm_ns = 1000000000;
	r = run(&cfg);
	/* Alone 130 and 46. */
	for (int i = 0; i < 8; i++)
		check_at_least("slow", r.client[i], 30);
	for (int i = 8; i < 16; i++)
		check_at_least("fast", r.client[i], 75);
}

static void several_models(void **state)
{
	struct sim_config cfg;
	struct sim_result r;
	double unmerged;

	(void)state;
	sim_defaults(&cfg, 12);
	for (uint32_t i = 0; i < 12; i++)
		cfg.client[i].model = i % 3;
	cfg.run_ns = 2000000000;
	cfg.warm_ns = 1000000000;
	unmerged = rate(&cfg, SIM_UNMERGED);
	cfg.mode = SIM_TRAINS;
	r = run(&cfg);
	/* Three trains of four: no fewer launches are possible. */
	check_at_least("three models", r.tokens_per_s / unmerged, 3.6);
	check_at_least("the least", least_of(&r, 12) * 12, 0.85 * r.tokens_per_s);
}

/* Clients hang for milliseconds now and then: late members come back, the rest goes on. */
static void hiccups(void **state)
{
	struct sim_config cfg;
	struct sim_result r;

	(void)state;
	sim_defaults(&cfg, 8);
	for (uint32_t i = 0; i < 8; i++) {
		cfg.client[i].hiccup_ppm =
			500; /* every eighth step of each: one step in two of all */
		cfg.client[i].hiccup_ns = 1000000;
	}
	cfg.run_ns = 3000000000;
	cfg.warm_ns = 1000000000;
	r = run(&cfg);
	/* A hang of 1 ms costs its client 128 us a step of 7.7 ms, in any case. */
	check_at_least("rate with hangs", r.tokens_per_s, 260 * 2.7);
	assert_true(r.stats.late > 50);
}

/* Pauses that every machine has: nobody misses its train for them. */
static void short_pauses(void **state)
{
	struct sim_config cfg;
	struct sim_result r;

	(void)state;
	sim_defaults(&cfg, 8);
	cfg.launch_ns = 37000;
	cfg.hand_ns = 4000;
	cfg.modules = 129;
	cfg.depth = 8;
	for (uint32_t i = 0; i < 8; i++) {
		cfg.client[i].hiccup_ppm = 500;
		cfg.client[i].hiccup_ns = 150000;
	}
	cfg.run_ns = 2000000000;
	cfg.warm_ns = 700000000;
	r = run(&cfg);
	check_at_least("rows per launch", r.rows_per_launch, 7.9);
}

/* A client stops in the middle of a step, for good or for a while: nobody waits for it twice. */
static void a_client_stops(void **state)
{
	(void)state;
	for (int pause = 0; pause < 2; pause++) {
		struct sim_config cfg;
		struct sim_result r;

		sim_defaults(&cfg, 9);
		cfg.client[4].stop_ns = 503333333;
		cfg.client[4].pause_ns = pause ? 700000000 : 0;
		cfg.run_ns = 1600000000;
		cfg.warm_ns = 550000000;
		r = run(&cfg);
		for (int i = 0; i < 9; i++)
			if (i != 4)
				check_at_least("the others", r.client[i], 112);
		if (pause)
			check_at_least("who came back", r.client[4], 112 * 0.3);
		else
			assert_true(r.client[4] == 0);
	}
}

/* Attention of all layers has one key: a step is found all the same. */
static void keys_that_repeat(void **state)
{
	struct sim_config cfg;

	(void)state;
	for (uint32_t repeat = 2; repeat < 6; repeat++) {
		sim_defaults(&cfg, 8);
		cfg.repeat = repeat;
		cfg.modules = 120; /* the last one is not of them */
		cfg.run_ns = 2000000000;
		cfg.warm_ns = 1000000000;
		check_at_least("repeated keys", rate(&cfg, SIM_TRAINS),
			       3.4 * rate(&cfg, SIM_UNMERGED));
	}
}

/* Newcomers get on when they come to a station, whoever is under way. */
static void clients_come(void **state)
{
	struct sim_config cfg;
	struct sim_result r;

	(void)state;
	sim_defaults(&cfg, 16);
	for (uint32_t i = 8; i < 16; i++)
		cfg.client[i].start_ns = 400000000 + 3333333 * i;
	cfg.run_ns = 1500000000;
	cfg.warm_ns = 500000000;
	r = run(&cfg);
	check_at_least("sixteen", r.tokens_per_s, 260 * 7.2);
}

/*
 * Prefill beside decode: one client always has a long request queued, in slices of 300 us. Decoders' calls wait for one
 * slice at most, and the device's time is shared by weight.
 */
static void prefill_beside_decode(void **state)
{
	static const struct {
		uint32_t decode, prefill;   /* weights */
		double decode_part, p99_us; /* of the device, at least; at most */
	} rows[] = {
		{100, 100, 0.45, 300 + 2 * 15 + 10},
		{400, 100, 0.70, 300 + 2 * 15 + 10},
		{100, 400, 0.16,
		 300 + 6 * 15 + 10}, /* now and then both trains wait for the same slice */
	};

	(void)state;
	for (size_t i = 0; i < 3; i++) {
		struct exl3_sched_tenant tenants[2] = {{.weight = rows[i].decode},
						       {.weight = rows[i].prefill}};
		struct sim_config cfg;
		struct sim_result r;
		double prefill;

		sim_defaults(&cfg, 9);
		for (uint32_t k = 0; k < 8; k++)
			cfg.client[k].tenant = &tenants[0];
		cfg.client[8] = (struct sim_client){.rows = 512,
						    .ahead = 1,
						    .slice_ns = 300000,
						    .slices = 16,
						    .tenant = &tenants[1]};
		cfg.run_ns = 1500000000;
		r = run(&cfg);
		prefill = r.client[8] * 300e-6;
		/* The rest is time that is kept for a train that is about to come. */
		check_at_least("decoders' part", r.busy - prefill, rows[i].decode_part);
		check_at_least("prefill's part", prefill,
			       0.85 * rows[i].prefill / (rows[i].decode + rows[i].prefill));
		if (r.p99_us > rows[i].p99_us)
			fail_msg("p99 of decoders' calls beside slices of 300 us: %.1f us",
				 r.p99_us);
	}
}

/* Equal and unequal weights of tenants that flood the device. */
static void weights(void **state)
{
	struct exl3_sched_tenant tenants[3] = {{.weight = 100}, {.weight = 200}, {.weight = 400}};
	struct sim_config cfg;
	struct sim_result r;

	(void)state;
	sim_defaults(&cfg, 3);
	for (uint32_t i = 0; i < 3; i++)
		cfg.client[i] = (struct sim_client){.rows = 512,
						    .ahead = 2,
						    .slice_ns = 100000 + 30000 * i,
						    .slices = 5,
						    .tenant = &tenants[i]};
	cfg.run_ns = 3000000000;
	cfg.warm_ns = 0;
	r = run(&cfg);
	for (uint32_t i = 0; i < 3; i++) {
		double part = r.client[i] * (100e-6 + 30e-6 * i), want = (1u << i) / 7.0;

		if (part < 0.97 * want || part > 1.03 * want)
			fail_msg("tenant %u has %.3f of the device, %.3f are due", i, part, want);
	}
}

/* A higher priority goes first, and yet a lower one gets on. */
static void priorities(void **state)
{
	struct exl3_sched_tenant tenants[2] = {{.weight = 100, .priority = 3}, {.weight = 100}};
	struct sim_config cfg;
	struct sim_result r;

	(void)state;
	sim_defaults(&cfg, 2);
	for (uint32_t i = 0; i < 2; i++)
		cfg.client[i] = (struct sim_client){.rows = 512,
						    .ahead = 2,
						    .slice_ns = 100000,
						    .slices = 1,
						    .tenant = &tenants[i]};
	r = run(&cfg);
	check_at_least("the low one", r.client[1], 10000.0 / (EXL3_PASSED_OVER_MAX + 2));
	check_at_least("the high one", r.client[0], 10000.0 * 0.9);
}

/*
 * Anything at all, thousands of times. The model asserts order and exactly-once; here the waits: the head of
 * a flow starts within the time that it may be held plus one turn of everybody else.
 */
static void random_traces(void **state)
{
	const char *rounds_text = getenv("EXL3_TRACES");
	unsigned rounds = rounds_text ? (unsigned)atoi(rounds_text) : 2000;
	unsigned seed = 20261130;

	(void)state;
	for (unsigned round = 0; round < rounds; round++) {
		struct exl3_sched_tenant tenants[4];
		struct sim_config cfg;
		struct sim_result r;
		uint64_t longest = 0, bound;
		unsigned n = 1 + (unsigned)rand_r(&seed) % 24;

		memset(tenants, 0, sizeof(tenants));
		sim_defaults(&cfg, n);
		cfg.seed = round + 1;
		cfg.modules = 2 + (unsigned)rand_r(&seed) % 40;
		cfg.launch_ns = 1000 + (unsigned)rand_r(&seed) % 50000;
		cfg.hand_ns = (unsigned)rand_r(&seed) % 30000;
		cfg.slope = (double)(rand_r(&seed) % 10) / 100;
		cfg.spread = (double)(rand_r(&seed) % 90) / 100;
		cfg.jitter = (double)(rand_r(&seed) % 100) / 100;
		cfg.tail_ns = (unsigned)rand_r(&seed) % 200000;
		cfg.depth = 1 + (unsigned)rand_r(&seed) % 8;
		cfg.merge_max = 1 + (unsigned)rand_r(&seed) % 32;
		cfg.run_ns = 20000000;
		cfg.warm_ns = 0;
		for (unsigned i = 0; i < 4; i++)
			tenants[i].weight = 50 + (unsigned)rand_r(&seed) % 200;
		longest = cfg.launch_ns * 4;
		for (unsigned i = 0; i < n; i++) {
			struct sim_client *c = &cfg.client[i];

			c->model = (unsigned)rand_r(&seed) % 3;
			c->think_ns = (unsigned)rand_r(&seed) % 20000;
			c->extra_ns = rand_r(&seed) % 4 ? 0 : (unsigned)rand_r(&seed) % 200000;
			c->hiccup_ppm = rand_r(&seed) % 3 ? 0 : 20000;
			c->hiccup_ns = (unsigned)rand_r(&seed) % 3000000;
			c->start_ns = rand_r(&seed) % 3 ? 0 : (unsigned)rand_r(&seed) % 10000000;
			c->stop_ns = rand_r(&seed) % 4 ? 0 : 1 + (unsigned)rand_r(&seed) % 20000000;
			c->pause_ns = rand_r(&seed) % 2 ? 0 : (unsigned)rand_r(&seed) % 5000000;
			c->rows = 1 + (unsigned)rand_r(&seed) % 4;
			c->ahead = 1 + (rand_r(&seed) % 4 ? 0 : (unsigned)rand_r(&seed) % 5);
			c->tenant = rand_r(&seed) % 2 ? NULL : &tenants[rand_r(&seed) % 4];
			if (rand_r(&seed) % 8 == 0) {
				c->rows = 512;
				c->slices = 1 + (unsigned)rand_r(&seed) % 6;
				c->slice_ns = 1000 + (unsigned)rand_r(&seed) % 300000;
				longest = c->slice_ns > longest ? c->slice_ns : longest;
			}
		}
		r = run(&cfg);
		/* A hold of at most a step and a quarter, as steps are under this load; then its turn, which
		 * weights (up to 5 to 1) put off by as many turns of the others. */
		bound = (uint64_t)cfg.modules * 2 * longest * n + 5 * n * longest * 4;
		if (bound > EXL3_HOLD_NS_MAX + 20 * n * longest)
			bound = EXL3_HOLD_NS_MAX + 20 * n * longest;
		if (r.wait_ns_max > bound)
			fail_msg("seed %u: a request waited %llu us, bound %llu", round + 1,
				 (unsigned long long)r.wait_ns_max / 1000,
				 (unsigned long long)bound / 1000);
		assert_true(r.calls > 0);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(rates),
		test_case(trains_are_what_merges),
		test_case(a_slow_client),
		test_case(different_step_times),
		test_case(keys_that_repeat),
		test_case(several_models),
		test_case(hiccups),
		test_case(short_pauses),
		test_case(a_client_stops),
		test_case(clients_come),
		test_case(prefill_beside_decode),
		test_case(weights),
		test_case(priorities),
		test_case(random_traces),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
