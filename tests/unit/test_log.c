/* SPDX-License-Identifier: Apache-2.0 */
/* test_log.c - log lines: control characters, length, errno; a reader that has stopped holds nobody up. */
#include "tests/test.h"

#include "daemon/log.h"

#include <fcntl.h>

/* Sends stderr into a pipe; its read end, and the old stderr in *@old. */
static int capture(int *old)
{
	int fds[2];

	assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
	*old = dup(STDERR_FILENO);
	assert_true(*old >= 0);
	assert_true(dup2(fds[1], STDERR_FILENO) >= 0);
	close(fds[1]);
	return fds[0];
}

static void release(int fd, int old)
{
	assert_true(dup2(old, STDERR_FILENO) >= 0);
	close(old);
	close(fd);
}

static void lines_cannot_be_forged(void **state)
{
	char got[256];
	ssize_t n;
	int old, fd = capture(&old);

	(void)state;
	errno = ENOENT;
	exl3_warn("name '%s': %m", "a\nexl3-daemon: \x1b[2J");
	n = read(fd, got, sizeof(got) - 1);
	release(fd, old);
	assert_int_equal(errno, ENOENT);
	assert_true(n > 0);
	got[n] = 0;
	assert_string_equal(got,
			    "exl3-daemon: warning: name 'a?exl3-daemon: ?[2J': No such file or "
			    "directory\n");
}

static void long_lines_are_cut(void **state)
{
	char text[5000], got[8000];
	ssize_t n;
	int old, fd = capture(&old);

	(void)state;
	memset(text, 'x', sizeof(text));
	text[sizeof(text) - 1] = 0;
	exl3_warn("%s", text);
	n = read(fd, got, sizeof(got));
	release(fd, old);
	assert_true(n > 100 && n <= 1024);
	assert_int_equal(got[n - 1], '\n');
}

static void a_full_pipe_loses_lines(void **state)
{
	char text[500], got[4096];
	int old, fd = capture(&old);
	size_t taken = 0;
	ssize_t n;

	(void)state;
	memset(text, 'x', sizeof(text));
	text[sizeof(text) - 1] = 0;
	alarm(20); /* a call that waits would wait for ever */
	for (int i = 0; i < 4000; i++)
		exl3_warn("%s", text);
	alarm(0);
	assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
	while ((n = read(fd, got, sizeof(got))) > 0)
		taken += (size_t)n;
	exl3_warn("here again");
	n = read(fd, got, sizeof(got));
	release(fd, old);
	assert_true(taken > 1000 && taken < 4000 * sizeof(text));
	assert_true(n > 0);
}

/* What clients cause again and again does not fill the journal. */
static void floods_are_counted_not_written(void **state)
{
	const uint64_t second = 1000000000u, first = 5 * second;
	struct exl3_log_limit limit = {0};
	unsigned written = 0;
	char got[256];
	ssize_t n;
	int old, fd;

	(void)state;
	for (unsigned i = 0; i < 100000; i++)
		written += exl3_log_may(&limit, first + i * (9 * second / 100000));
	assert_in_range(written, 1, 100);
	fd = capture(&old);
	assert_true(exl3_log_may(&limit, first + 10 * second));
	n = read(fd, got, sizeof(got) - 1);
	release(fd, old);
	assert_true(n > 0);
	got[n] = 0;
	assert_non_null(strstr(got, "warning: "));
	assert_int_equal(strtoul(strstr(got, "warning: ") + 9, NULL, 10), 100000 - written);
	/* Those that come rarely are all written. */
	for (unsigned i = 2; i < 100; i++)
		assert_true(exl3_log_may(&limit, first + i * 10 * second));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(lines_cannot_be_forged),
		test_case(long_lines_are_cut),
		test_case(a_full_pipe_loses_lines),
		test_case(floods_are_counted_not_written),
	};

	unsetenv("JOURNAL_STREAM"); /* plain lines, wherever the tests run */
	exl3_log_init("exl3-daemon");
	return cmocka_run_group_tests(tests, NULL, NULL);
}
