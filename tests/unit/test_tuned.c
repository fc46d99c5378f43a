/* SPDX-License-Identifier: Apache-2.0 */
/* test_tuned.c - tables of measured choices: lines, refusals, look-ups at every edge, two tables, the cpu's choice. */
#include "tests/test.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/tuned_builtin.h"
#include "kernels/tuned.h"

#include <errno.h>

static const struct exl3_kernel kernels[] = {
	{"gemv", EXL3_OP_LINEAR, NULL, NULL, false},	 {"gemm", EXL3_OP_LINEAR, NULL, NULL, false},
	{"wgmma_n32", EXL3_OP_LINEAR, NULL, NULL, false}, {"moe", EXL3_OP_MOE, NULL, NULL, false},
	{"next", EXL3_OP_LINEAR, NULL, NULL, true},
	{NULL, 0, NULL, NULL, false},
};

static int add(struct exl3_tuned *t, const char *line)
{
	struct exl3_error err;

	return exl3_tuned_add_line(t, line, kernels, &err);
}

static void lines_and_refusals(void **state)
{
	static const struct {
		const char *line;
		int want;
	} cases[] = {
		{"linear 4096 4096:4:mcg 1 8 gemv", 0},
		{"linear 4096 4096:4:mcg 1 8 gemv\n", 0},
		{"linear\t4096  4096:3.5:mul1,1024:6:3inst 1 8192 wgmma_n32   # 12.3 us", 0},
		{"linear 4096 4096:4:mcg 1 8 gemv # x\nrubbish", 0},
		{"linear 16777216 128:8:mul1 8192 8192 gemm", 0},
		{"", -EINVAL},
		{"moe 4096 4096:4:mcg 1 8 moe", -EINVAL},
		{"linear4096 4096:4:mcg 1 8 gemv", -EINVAL},
		{"linear 4096 4096:4:mcg 0 8 gemv", -EINVAL},
		{"linear 4096 4096:4:mcg 9 8 gemv", -EINVAL},
		{"linear 4096 4096:4:mcg 1 8193 gemv", -EINVAL},
		{"linear 4096 4096:4:mcg 1 99999999999999999999 gemv", -EINVAL},
		{"linear 4096 4096:4:mcg +1 8 gemv", -EINVAL},
		{"linear 4096 4096:4:mcg 1 8", -EINVAL},
		{"linear 4096 4096:4:mcg 1 8 gemv gemm", -EINVAL},
		{"linear 4096 4096:4:mcg 1 8 GEMV", -EINVAL},
		{"linear 4100 4096:4:mcg 1 8 gemv", -EINVAL},
		{"linear 4096 4100:4:mcg 1 8 gemv", -EINVAL},
		{"linear 0 4096:4:mcg 1 8 gemv", -EINVAL},
		{"linear 16777344 4096:4:mcg 1 8 gemv", -EINVAL},
		{"linear 4096 4096:9:mcg 1 8 gemv", -EINVAL},
		{"linear 4096 4096:0.5:mcg 1 8 gemv", -EINVAL},
		{"linear 4096 4096:4.5:mcg 1 8 gemv", -EINVAL},
		{"linear 4096 4096:3.5:mcg 1 8 gemv", -EINVAL}, /* half rates are of mul1 */
		{"linear 4096 4096:3.25:mcg 1 8 gemv", -EINVAL},
		{"linear 4096 4096:4:mcg2 1 8 gemv", -EINVAL},
		{"linear 4096 4096:4 1 8 gemv", -EINVAL},
		{"linear 4096 4096:4:mcg, 1 8 gemv", -EINVAL},
		{"linear 128 128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg 1 1 gemv", 0},
		{"linear 128 128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg,128:4:mcg 1 1 gemv",
		 -EINVAL},
		{"linear 4096 4096:4:mcg 1 8 gem", -ENOENT},
		{"linear 4096 4096:4:mcg 1 8 moe", -ENOENT},
		{"linear 4096 4096:4:mcg 1 8 next", -ENOENT}, /* not for requests */
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct exl3_tuned *t = exl3_tuned_new("test");
		int got = add(t, cases[i].line);

		if (got != cases[i].want)
			fail_msg("'%s': got %d, expected %d", cases[i].line, got, cases[i].want);
		assert_int_equal(t->nr, got == 0);
		exl3_tuned_put(t);
	}
}

static void a_line_that_is_too_long(void **state)
{
	struct exl3_tuned *t = exl3_tuned_new("test");
	char line[2 * EXL3_TUNED_LINE_MAX];

	(void)state;
	memset(line, ' ', sizeof(line));
	memcpy(line, "linear 4096 4096:4:mcg 1 8 gemv", 31);
	line[EXL3_TUNED_LINE_MAX + 1] = 0;
	assert_int_equal(add(t, line), -EINVAL);
	line[EXL3_TUNED_LINE_MAX] = 0;
	assert_int_equal(add(t, line), 0);
	exl3_tuned_put(t);
}

static struct exl3_tuned_shape shape_of(uint32_t k, uint32_t n, uint16_t rate2, uint16_t codebook)
{
	struct exl3_tuned_shape s = {.k = k, .nr_shards = 1, .shard = {{n, rate2, codebook}}};

	return s;
}

static const char *name_of(const struct exl3_tuned_line *l)
{
	return l ? l->kernel->name : "-";
}

static void every_edge_of_the_rows(void **state)
{
	struct exl3_tuned *t = exl3_tuned_new("test");
	struct exl3_tuned_shape s = shape_of(4096, 4096, 8, EXL3_CB_MCG);
	static const struct {
		uint32_t m;
		const char *want;
	} cases[] = {{1, "-"},	   {2, "gemv"},	      {8, "gemv"},  {9, "-"},	 {16, "-"},
		     {17, "gemm"}, {31, "gemm"}, {32, "wgmma_n32"}, {33, "-"}, {8192, "-"}};
	struct exl3_error err;

	(void)state;
	/* In no order, between shapes that sort before and behind. */
	assert_int_equal(add(t, "linear 4096 4096:4:mcg 32 32 wgmma_n32"), 0);
	assert_int_equal(add(t, "linear 5120 4096:4:mcg 1 8192 gemm"), 0);
	assert_int_equal(add(t, "linear 4096 4096:4:mcg 2 8 gemv"), 0);
	assert_int_equal(add(t, "linear 4096 4096:4:mul1 1 8192 gemm"), 0);
	assert_int_equal(add(t, "linear 4096 4096:4:mcg 17 31 gemm"), 0);
	assert_int_equal(add(t, "linear 128 4096:4:mcg 1 8192 gemm"), 0);
	assert_int_equal(exl3_tuned_done(t, &err), 0);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		assert_string_equal(name_of(exl3_tuned_find(t, &s, cases[i].m)), cases[i].want);
	s = shape_of(4096, 4096, 7, EXL3_CB_MCG);
	assert_string_equal(name_of(exl3_tuned_find(t, &s, 4)), "-");
	s = shape_of(4096, 4096, 8, EXL3_CB_MUL1);
	assert_string_equal(name_of(exl3_tuned_find(t, &s, 4)), "gemm");
	s = shape_of(4096, 2048, 8, EXL3_CB_MCG);
	assert_string_equal(name_of(exl3_tuned_find(t, &s, 4)), "-");
	assert_string_equal(name_of(exl3_tuned_find(NULL, &s, 4)), "-");
	exl3_tuned_put(t);
}

static void two_lines_for_the_same_rows(void **state)
{
	struct exl3_tuned *t = exl3_tuned_new("test");
	struct exl3_error err;

	(void)state;
	assert_int_equal(add(t, "linear 4096 4096:4:mcg 8 16 gemm"), 0);
	assert_int_equal(add(t, "linear 4096 4096:4:mcg 1 8 gemv"), 0);
	assert_int_equal(exl3_tuned_done(t, &err), -EINVAL);
	assert_non_null(strstr(err.text, "8 rows of linear 4096 4096:4:mcg"));
	exl3_tuned_put(t);
}

static void as_many_lines_as_there_may_be(void **state)
{
	struct exl3_tuned *t = exl3_tuned_new("test");
	struct exl3_tuned_shape s = shape_of(128, 128, 8, EXL3_CB_MCG);
	struct exl3_error err;

	(void)state;
	for (uint32_t i = 0; i < EXL3_TUNED_MAX; i++)
		assert_int_equal(exl3_tuned_add(t, &s, i + 1, i + 1, &kernels[i % 2], &err), 0);
	assert_int_equal(exl3_tuned_add(t, &s, 1, 1, kernels, &err), -E2BIG);
	assert_int_equal(exl3_tuned_done(t, &err), 0);
	for (uint32_t m = 1; m <= EXL3_M_MAX; m++)
		assert_ptr_equal(exl3_tuned_find(t, &s, m)->kernel, &kernels[(m - 1) % 2]);
	exl3_tuned_put(t);
}

/* What a line says is what it was made of. */
static void a_shape_in_words_and_back(void **state)
{
	static const char *const texts[] = {"4096 4096:4:mcg", "128 128:1.5:mul1,256:8:3inst,1024:3.5:mul1"};
	char line[256], text[256];

	(void)state;
	for (size_t i = 0; i < 2; i++) {
		struct exl3_tuned *t = exl3_tuned_new("test");

		snprintf(line, sizeof(line), "linear %s 1 1 gemv", texts[i]);
		assert_int_equal(add(t, line), 0);
		exl3_tuned_shape_text(&t->list[0].shape, text, sizeof(text));
		assert_string_equal(text, texts[i]);
		exl3_tuned_shape_text(&t->list[0].shape, text, 8); /* cut, not written beyond */
		assert_int_equal(strlen(text), 7);
		exl3_tuned_put(t);
	}
}

/* ---- two tables: a file's before the one built in, each only if its variant can run the work ---- */

static bool can(const void *arg, const struct exl3_kernel *kernel)
{
	return strcmp(kernel->name, arg) != 0;
}

static void a_file_comes_before_what_is_built_in(void **state)
{
	struct exl3_tuned *file = exl3_tuned_new("file"), *built = exl3_tuned_new("built in");
	struct exl3_tuned_shape s = shape_of(4096, 4096, 8, EXL3_CB_MCG);
	struct exl3_error err;

	(void)state;
	assert_int_equal(add(file, "linear 4096 4096:4:mcg 1 8 gemm"), 0);
	assert_int_equal(add(built, "linear 4096 4096:4:mcg 1 32 wgmma_n32"), 0);
	assert_int_equal(exl3_tuned_done(file, &err), 0);
	assert_int_equal(exl3_tuned_done(built, &err), 0);
	assert_string_equal(name_of(exl3_tuned_pick(file, built, &s, 8, can, "none")), "gemm");
	assert_string_equal(name_of(exl3_tuned_pick(file, built, &s, 9, can, "none")), "wgmma_n32");
	assert_string_equal(name_of(exl3_tuned_pick(file, built, &s, 8, can, "gemm")), "wgmma_n32");
	assert_string_equal(name_of(exl3_tuned_pick(file, built, &s, 9, can, "wgmma_n32")), "-");
	assert_string_equal(name_of(exl3_tuned_pick(file, built, &s, 33, can, "none")), "-");
	assert_string_equal(name_of(exl3_tuned_pick(NULL, built, &s, 1, can, "none")), "wgmma_n32");
	assert_string_equal(name_of(exl3_tuned_pick(NULL, NULL, &s, 1, can, "none")), "-");
	exl3_tuned_put(file);
	exl3_tuned_put(built);
}

/* The table that is compiled in can be read, with any names. */
static void the_built_in_table_can_be_read(void **state)
{
	struct exl3_tuned *t = exl3_tuned_new("built in");
	const char *line = exl3_tuned_builtin_sm90a;
	struct exl3_error err;

	(void)state;
	for (; *line; line += strcspn(line, "\n"), line += *line == '\n') {
		int rc = exl3_tuned_add_line(t, line, kernels, &err);

		assert_true(rc == 0 || rc == -ENOENT);
	}
	assert_int_equal(exl3_tuned_done(t, &err), 0);
	exl3_tuned_put(t);
}

/* ---- the cpu backend ---- */

static const struct exl3_matrix matrix = {.k = 256, .n = 128, .k_log = 256, .n_log = 128, .rate2 = 8,
					  .codebook = EXL3_CB_MCG};

static void what_the_cpu_takes(void **state)
{
	const struct exl3_matrix *shards[] = {&matrix};
	struct exl3_rows rows[2] = {{.m = 2}, {.m = 6}};
	struct exl3_work work = {.op = EXL3_OP_LINEAR, .rows = rows, .nr_rows = 1, .u.linear = {shards, 1}};
	struct exl3_dev_options opt = {.numa_node = -1, .threads = 1};
	const struct exl3_backend_ops *ops = &exl3_backend_cpu;
	struct exl3_tuned *t = exl3_tuned_new("test");
	const struct exl3_kernel *usual;
	struct exl3_dev *dev;
	struct exl3_error err;

	(void)state;
	assert_int_equal(ops->open(&opt, &dev, &err), 0);
	usual = ops->select(dev, &work);
	assert_int_equal(exl3_tuned_add_line(t, "linear 256 128:4:mcg 1 4 linear_c", ops->kernels, &err), 0);
	assert_int_equal(exl3_tuned_add_line(t, "linear 256 128:4:mcg 8 8 linear_ref", ops->kernels, &err), 0);
	assert_int_equal(exl3_tuned_done(t, &err), 0);
	work.tuned = t;
	assert_string_equal(ops->select(dev, &work)->name, "linear_c");
	rows[0].m = 5;
	assert_ptr_equal(ops->select(dev, &work), usual);
	/* A launch of several: its rows together. */
	rows[0].m = 2;
	work.nr_rows = 2;
	assert_string_equal(ops->select(dev, &work)->name, "linear_ref");
	/* Deterministic ones: each one's own rows, so these two may not meet. */
	work.deterministic = true;
	assert_false(cpu_one_class(dev, &work));
	rows[1].m = 3;
	assert_true(cpu_one_class(dev, &work));
	assert_string_equal(ops->select(dev, &work)->name, "linear_c");
	work.nr_rows = 1;
	uint32_t few = ops->merge_class(dev, &work);
	rows[0].m = 6;
	assert_int_not_equal(ops->merge_class(dev, &work), few);
	rows[0].m = 4;
	assert_int_equal(ops->merge_class(dev, &work), few);
	exl3_tuned_put(t);
	ops->close(dev);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(lines_and_refusals),
		test_case(a_line_that_is_too_long),
		test_case(every_edge_of_the_rows),
		test_case(two_lines_for_the_same_rows),
		test_case(as_many_lines_as_there_may_be),
		test_case(a_shape_in_words_and_back),
		test_case(a_file_comes_before_what_is_built_in),
		test_case(the_built_in_table_can_be_read),
		test_case(what_the_cpu_takes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
