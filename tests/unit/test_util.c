/* SPDX-License-Identifier: Apache-2.0 */
/* test_util.c - what shm/util.c does for everybody: the nearest name, and owners that clean up. */
#include "tests/test.h"

#include <fcntl.h>

/* Rows with a name in front, as the tables of verbs, options and keys. */
struct row {
	const char *name;
	int other;
};

static void nearest(void **state)
{
	static const struct row rows[] = {{"status", 1},         {"models", 2},
					  {"modules", 3},        {"ps", 4},
					  {"restart-window", 5}, {"restart-limit", 6}};
	char longest[49], too_long[50];
	const struct {
		const char *word, *want;
	} cases[] = {
		{"status", "status"},
		{"statsu", "status"}, /* swapped */
		{"stats", "status"},
		{"statuss", "status"}, /* missing, surplus */
		{"xtatus", "status"},
		{"model", "models"}, /* wrong; the nearer of two */
		{"module", "modules"},
		{"restart-windo", "restart-window"},
		{"restart-limt", "restart-limit"},
		{"pss", "ps"}, /* a third of a short name */
		{"", NULL},
		{"x", NULL}, /* anything is as near as that */
		{"quantize", NULL},
		{"STATUS", NULL},
		{longest, NULL},
		{too_long, NULL},
	};

	(void)state;
	memset(longest, 'a', sizeof(longest) - 1);
	memset(too_long, 'a', sizeof(too_long) - 1);
	longest[sizeof(longest) - 1] = too_long[sizeof(too_long) - 1] = 0;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		const char *got =
			exl3_nearest(cases[i].word, &rows[0].name, TEST_NR(rows), sizeof(rows[0]));

		if (!got != !cases[i].want || (got && strcmp(got, cases[i].want) != 0))
			fail_msg("'%s': '%s', expected '%s'", cases[i].word, got ? got : "(none)",
				 cases[i].want ? cases[i].want : "(none)");
	}
	assert_null(exl3_nearest("status", &rows[0].name, 0, sizeof(rows[0])));
}

/* The longest name and word that are compared, and one more byte of each. */
static void nearest_at_the_limit(void **state)
{
	char name[64], word[64];
	const char *names[] = {name};

	(void)state;
	for (size_t n = 47; n <= 50; n++) {
		memset(name, 'a', n);
		memset(word, 'a', n);
		name[n] = word[n] = 0;
		word[n / 2] = 'b';
		if (!exl3_nearest(word, names, 1, sizeof(names[0])) != (n > 48))
			fail_msg("%zu bytes with one letter wrong: %s", n,
				 n > 48 ? "found" : "not found");
	}
}

static void owners(void **state)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC), taken;
	char *text = strdup("x"), *kept;

	(void)state;
	taken = exl3_take_fd(&fd);
	assert_int_equal(fd, -1);
	errno = EDOM;
	exl3_closep(&fd); /* nothing to close */
	exl3_closep(&taken);
	assert_int_equal(errno, EDOM);
	assert_int_equal(taken, -1);
	kept = exl3_take_ptr(&text);
	assert_null(text);
	exl3_freep(&text);
	exl3_freep(&kept);
	assert_null(kept);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(nearest),
		test_case(nearest_at_the_limit),
		test_case(owners),
	};

	return cmocka_run_group_tests_name("util", tests, NULL, NULL);
}
