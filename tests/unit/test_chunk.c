/* SPDX-License-Identifier: Apache-2.0 */
/* test_chunk.c - slices of long requests on devices of known speed: length, number, evenness, memory. */
#include "tests/test.h"

#include "daemon/chunk.h"

#define CHUNK 1000000ull /* ns */

/* A device on paper: a launch takes fixed + rows * per_row. */
struct device {
	double fixed, per_row;
};

static uint64_t launch_ns(const struct device *d, uint32_t rows)
{
	return (uint64_t)(d->fixed + d->per_row * rows);
}

static struct exl3_pace pace;

static const struct exl3_module_desc linear_desc = {
	.kind = EXL3_MOD_LINEAR, .k = 4096, .n = 6144, .nr_shards = 3};

static struct exl3_checked linear(uint32_t rows)
{
	return (struct exl3_checked){.op = EXL3_OP_LINEAR,
				     .rows = {.m = rows, .x_dtype = EXL3_F16, .y_dtype = EXL3_F16},
				     .target = {.desc = &linear_desc}};
}

/* Runs a request to its end; launches, the longest of them and the shortest in rows. */
static unsigned run(const struct device *d, const struct exl3_checked *c, uint64_t *longest,
		    uint32_t *fewest)
{
	uint32_t first = 0;
	unsigned nr = 0;

	*longest = 0;
	*fewest = UINT32_MAX;
	while (first < c->rows.m) {
		struct exl3_slice s = exl3_chunk_next(&pace, c, first, CHUNK);
		uint64_t ns;

		assert_in_range(s.rows, 1, c->rows.m - first);
		ns = launch_ns(d, s.rows);
		exl3_chunk_learn(&pace, c, s.rows, ns);
		first += s.rows;
		nr++;
		if (ns > *longest)
			*longest = ns;
		if (s.rows < *fewest)
			*fewest = s.rows;
	}
	return nr;
}

static void slices_take_the_time_of_a_chunk(void **state)
{
	static const struct {
		struct device d;
		bool gpu;
		unsigned nr_max; /* launches of 8192 rows, once the shape is known */
	} cases[] = {
		{{30e3, 0.5e3}, true, 6},    /* 4.1 ms in all */
		{{30e3, 2e3}, true, 20},     /* 16 ms */
		{{5e3, 4e3}, true, 40},      /* 33 ms */
		{{100e3, 0.02e3}, true, 1},  /* all of it fits */
		{{20e3, 100e3}, false, 1366},
	};
	uint64_t longest;
	uint32_t fewest;

	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		struct exl3_checked c = linear(8192);
		unsigned nr;

		exl3_pace_init(&pace, cases[i].gpu);
		run(&cases[i].d, &c, &longest, &fewest);
		if (longest > CHUNK * 11 / 10)
			fail_msg("case %zu: a first slice took %llu ns", i, (unsigned long long)longest);
		nr = run(&cases[i].d, &c, &longest, &fewest);
		if (longest > CHUNK * 11 / 10 || nr > cases[i].nr_max)
			fail_msg("case %zu: %u slices, the longest %llu ns", i, nr,
				 (unsigned long long)longest);
		/* Even ones: the fewest rows are more than half of the mean. */
		if (fewest < 8192 / nr / 2)
			fail_msg("case %zu: %u slices, one of %u rows", i, nr, fewest);
	}
}

/* Decoding the weights takes longer than the chunk: slices grow until that is a quarter of them at most. */
static void no_slice_is_mostly_overhead(void **state)
{
	const struct device d = {5e6, 20e3};
	struct exl3_checked c = linear(8192);
	uint64_t longest;
	uint32_t fewest;
	unsigned nr;

	(void)state;
	exl3_pace_init(&pace, false);
	run(&d, &c, &longest, &fewest);
	nr = run(&d, &c, &longest, &fewest);
	assert_in_range(longest, 8000000, 26000000);
	assert_in_range(nr, 8, 24);
}

/* A launch that was slow once (its kernel was loaded) is not believed for ever. */
static void outliers_are_forgotten(void **state)
{
	const struct device d = {30e3, 0.5e3};
	struct exl3_checked c = linear(8192);
	uint64_t longest;
	uint32_t fewest;
	unsigned nr = 0;

	(void)state;
	exl3_pace_init(&pace, true);
	run(&d, &c, &longest, &fewest);
	for (uint32_t rows = 1; rows <= 8192; rows *= 2)
		exl3_chunk_learn(&pace, &c, rows, 200000000);
	for (int i = 0; i < 8; i++)
		nr = run(&d, &c, &longest, &fewest);
	assert_in_range(nr, 1, 8);
}

/* Slices of deterministic requests do not depend on what was measured, and the last is not a few rows. */
static void deterministic_slices_are_fixed(void **state)
{
	struct exl3_checked c = linear(5000);
	struct exl3_slice before, after;

	(void)state;
	exl3_pace_init(&pace, true);
	c.deterministic = true;
	before = exl3_chunk_next(&pace, &c, 0, CHUNK);
	assert_in_range(before.rows, 64, 4999);
	assert_int_equal(exl3_chunk_next(&pace, &c, before.rows, CHUNK).rows, before.rows < 2500 ? before.rows : 5000 - before.rows);
	for (uint32_t rows = 1; rows <= 8192; rows *= 2)
		exl3_chunk_learn(&pace, &c, rows, 200000000);
	after = exl3_chunk_next(&pace, &c, 0, CHUNK);
	assert_int_equal(before.rows, after.rows);
	assert_true(after.cost_ns > before.cost_ns);
	/* Without a limit all of it is one launch. */
	assert_int_equal(exl3_chunk_next(&pace, &c, 0, 0).rows, 5000);
}

/* Work per row of the largest legal MLA request: one query at a time where nothing is known. */
static void mla_by_query(void **state)
{
	struct exl3_checked c = {.op = EXL3_OP_MLA_DECODE, .rows = {.m = 8192}};

	(void)state;
	c.u.mla.geometry = (struct exl3_mla_geometry){
		.heads = 128, .dim = 576, .value_dim = 512, .topk = 65536};
	assert_int_equal(exl3_chunk_macs(&c), 128ull * 65536 * (576 + 512));
	exl3_pace_init(&pace, false);
	assert_int_equal(exl3_chunk_next(&pace, &c, 0, CHUNK).rows, 1);
	exl3_pace_init(&pace, true);
	assert_int_equal(exl3_chunk_next(&pace, &c, 0, CHUNK).rows, 1);
}

static void work_of_a_row(void **state)
{
	const struct exl3_matrix up = {.k = 256, .n = 512}, down = {.k = 512, .n = 256};
	const struct exl3_expert gated = {.gate = &up, .up = &up, .down = &down},
				 plain = {.up = &up, .down = &down};
	struct exl3_module_desc d = {.nr_experts = 16};
	struct exl3_checked c = linear(1);

	(void)state;
	assert_int_equal(exl3_chunk_macs(&c), 4096 * 6144);
	c.target.desc = &d;
	c.op = EXL3_OP_MOE;
	c.u.route.topk = 4;
	d.experts = (struct exl3_expert *)(uintptr_t)&gated;
	assert_int_equal(exl3_chunk_macs(&c), 4 * 3 * 256 * 512);
	c.op = EXL3_OP_MLP;
	d.experts = (struct exl3_expert *)(uintptr_t)&plain;
	assert_int_equal(exl3_chunk_macs(&c), 16 * 2 * 256 * 512);
}

/* Shapes are told apart; a flood of new ones does not forget the one in use. */
static void shapes(void **state)
{
	struct exl3_checked a = linear(64), b = linear(64), many = {.op = EXL3_OP_MLA_DECODE, .rows = {.m = 64}};
	struct exl3_module_desc other = linear_desc;

	(void)state;
	exl3_pace_init(&pace, true);
	other.n = 6272;
	b.target.desc = &other;
	assert_true(exl3_chunk_key(&a) != exl3_chunk_key(&b));
	exl3_chunk_learn(&pace, &a, 64, 64000);
	assert_int_equal(exl3_chunk_next(&pace, &a, 0, 0).cost_ns, 64000);
	for (uint32_t i = 0; i < 100000; i++) {
		many.u.mla.geometry = (struct exl3_mla_geometry){
			.heads = 1, .dim = 16, .value_dim = 16, .topk = i + 1};
		exl3_chunk_learn(&pace, &many, 64, 1);
		if (i % 16 == 0)
			assert_int_equal(exl3_chunk_next(&pace, &a, 0, 0).cost_ns, 64000);
	}
	b.target.desc = &linear_desc;
	b.rows.x_dtype = EXL3_F32;
	assert_true(exl3_chunk_key(&a) != exl3_chunk_key(&b));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(slices_take_the_time_of_a_chunk),
		test_case(no_slice_is_mostly_overhead),
		test_case(outliers_are_forgotten),
		test_case(deterministic_slices_are_fixed),
		test_case(mla_by_query),
		test_case(work_of_a_row),
		test_case(shapes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
