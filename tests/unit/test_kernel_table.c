/* SPDX-License-Identifier: Apache-2.0 */
/* test_kernel_table.c - files of measured choices: sections, whose they are, and the line of every mistake. */
#include "tests/test.h"

#include "daemon/kernel_table.h"
#include "daemon/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct exl3_kernel kernels[] = {
	{"gemv", EXL3_OP_LINEAR, NULL, NULL, false},
	{"gemm", EXL3_OP_LINEAR, NULL, NULL, false},
	{NULL, 0, NULL, NULL, false},
};
static const struct exl3_table_device here = {"cuda", "NVIDIA H200", "sm_90a", "580", "0.1.0-ab", kernels};

#define HEAD   "exl3-kernel-table 1\n"
#define DEVICE "device cuda NVIDIA H200\nisa sm_90a\ndriver 580\nbuild 0.1.0-ab\ndate 2026-01-01\n"
#define LINE   "linear 4096 4096:4:mcg 1 8 gemv\n"

/* What is expected: lines of the table, or -EINVAL; and what the message must have in it. */
static const struct {
	const char *text;
	int want;
	const char *says;
} cases[] = {
	{HEAD DEVICE LINE, 1, NULL},
	{"\n# first\n  " HEAD "\n" DEVICE "\r\n" LINE "   # indented\n\tlinear 128 128:4:mcg 1 8 gemm # 3 us", 2, NULL},
	{HEAD DEVICE LINE "linear 4096 4096:4:mcg 9 9 nonesuch\n", 1, NULL},
	{HEAD "device cpu X\nisa avx2\ndriver -\nbuild b\nlinear what ever\n" DEVICE LINE, 1, NULL},
	/* For somebody else. */
	{HEAD, 0, "no section"},
	{HEAD DEVICE, 0, "empty"},
	{HEAD "device cuda NVIDIA H100\nisa sm_90a\ndriver 580\nbuild 0.1.0-ab\n" LINE, 0, "'cuda NVIDIA H100'"},
	{HEAD "device cuda NVIDIA H200\nisa sm_90\ndriver 580\nbuild 0.1.0-ab\n" LINE, 0, "isa is 'sm_90'"},
	{HEAD "device cuda NVIDIA H200\nisa sm_90a\ndriver 570\nbuild 0.1.0-ab\n" LINE, 0, "driver is '570'"},
	{HEAD "device cuda NVIDIA H200\nisa sm_90a\ndriver -\nbuild 0.1.0-ab\n" LINE, 0, "driver is ''"},
	{HEAD "device cuda NVIDIA H200\nisa sm_90a\ndriver 580\nbuild 0.1.0-ac\n" LINE, 0, "build that measured is '0.1.0-ac'"},
	/* Mistakes. */
	{"", -EINVAL, "begins with"},
	{"exl3-kernel-table 2\n" DEVICE LINE, -EINVAL, ":1: a kernel table begins"},
	{"exl3-kernel-table 11\n" DEVICE LINE, -EINVAL, ":1: a kernel table begins"},
	{DEVICE LINE, -EINVAL, ":1: a kernel table begins"},
	{HEAD LINE, -EINVAL, ":2: no 'device' above it"},
	{HEAD "isa sm_90a\n" LINE, -EINVAL, ":2: isa above the first device"},
	{HEAD DEVICE "driver 580\n" LINE, -EINVAL, ":7: driver twice"},
	{HEAD "device cuda NVIDIA H200\nisa sm_90a\ndriver 580\n" LINE, -EINVAL, ":5: no 'build' above it"},
	{HEAD DEVICE LINE "linear 4096 4096:4:mcg 9 8 gemv\n", -EINVAL, ":8: rows are"},
	{HEAD DEVICE LINE "linear 4100 4096:4:mcg 9 9 gemv\n", -EINVAL, ":8: not a shape"},
	{HEAD DEVICE LINE "gemv\n", -EINVAL, ":8: it does not begin"},
	{HEAD DEVICE LINE "linear 4096 4096:4:mcg 8 9 gemm\n", -EINVAL, "two lines are for 8 rows"},
	{HEAD DEVICE LINE DEVICE LINE, -EINVAL, "two lines are for 1 rows"},
};

static void sections_and_mistakes(void **state)
{
	(void)state;
	exl3_log_set_level(EXL3_LOG_ERROR);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct exl3_tuned *table = NULL;
		struct exl3_error err = {0};
		int rc = exl3_kernel_table_parse("t", cases[i].text, strlen(cases[i].text), &here, &table, &err);

		if (rc == 0)
			rc = table ? (int)table->nr : 0;
		if (rc != cases[i].want || (cases[i].says && !strstr(err.text, cases[i].says)))
			fail_msg("case %zu: got %d '%s', expected %d '%s'", i, rc, err.text, cases[i].want,
				 cases[i].says);
		exl3_tuned_put(table);
	}
}

static void a_zero_byte(void **state)
{
	static const char text[] = HEAD DEVICE LINE "\0x";
	struct exl3_tuned *table = NULL;
	struct exl3_error err;

	(void)state;
	assert_int_equal(exl3_kernel_table_parse("t", text, sizeof(text) - 1, &here, &table, &err), -EINVAL);
}

/* What is written for a device is read for it. */
static void a_head_is_read_again(void **state)
{
	const struct exl3_table_device cpu = {"cpu", "AMD EPYC", "avx512", "", "0.1.0", kernels};
	const struct exl3_table_device *all[] = {&here, &cpu};
	struct exl3_tuned *table = NULL;
	struct exl3_error err;
	char text[4096];
	int n = 0;

	(void)state;
	for (size_t i = 0; i < 2; i++) {
		n += exl3_kernel_table_head(all[i], i == 0, text + n, sizeof(text) - (size_t)n);
		n += snprintf(text + n, sizeof(text) - (size_t)n, LINE);
	}
	for (size_t i = 0; i < 2; i++) {
		assert_int_equal(exl3_kernel_table_parse("t", text, (size_t)n, all[i], &table, &err), 0);
		assert_non_null(table);
		assert_int_equal(table->nr, 1);
		exl3_tuned_put(table);
	}
}

static void files(void **state)
{
	char dir[] = "/tmp/exl3-table-XXXXXX", path[64];
	struct exl3_tuned *table = NULL;
	struct exl3_error err;
	FILE *f;

	(void)state;
	assert_non_null(mkdtemp(dir));
	assert_int_equal(exl3_kernel_table_read(dir, &here, &table, &err), -EINVAL);
	snprintf(path, sizeof(path), "%s/t", dir);
	assert_int_equal(exl3_kernel_table_read(path, &here, &table, &err), -ENOENT);
	assert_int_equal(mkfifo(path, 0600), 0); /* nobody writes to it: no reason to wait */
	assert_int_equal(exl3_kernel_table_read(path, &here, &table, &err), -EINVAL);
	unlink(path);
	f = fopen(path, "w");
	assert_non_null(f);
	fputs(HEAD DEVICE LINE, f);
	fclose(f);
	assert_int_equal(exl3_kernel_table_read(path, &here, &table, &err), 0);
	assert_int_equal(table->nr, 1);
	assert_string_equal(table->source, path);
	exl3_tuned_put(table);
	assert_int_equal(truncate(path, EXL3_KERNEL_TABLE_MAX + 1), 0);
	assert_int_equal(exl3_kernel_table_read(path, &here, &table, &err), -EFBIG);
	unlink(path);
	rmdir(dir);
}

static void the_build_has_a_name(void **state)
{
	char a[64], b[64], cut[10];

	(void)state;
	exl3_build_text(&exl3_backend_cpu, a, sizeof(a));
	exl3_build_text((const void *)cases, b, sizeof(b));
	assert_string_equal(a, b); /* both are in this program */
	assert_true(strncmp(a, EXL3_DAEMON_VERSION, strlen(EXL3_DAEMON_VERSION)) == 0);
	exl3_build_text(cases, cut, sizeof(cut));
	assert_true(strlen(cut) < sizeof(cut));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(sections_and_mistakes), test_case(a_zero_byte), test_case(a_head_is_read_again),
		test_case(files), test_case(the_build_has_a_name),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
