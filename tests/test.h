/* SPDX-License-Identifier: Apache-2.0 */
/* test.h - cmocka and what our unit tests add to it: files for a test's life, and a check for leaked fds. */
#ifndef EXL3_TESTS_TEST_H
#define EXL3_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

/* It needs the four above and does not include them: this blank line keeps them apart when sorted. */
#include <cmocka.h>

#include "shm/util.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEST_NR(a) (sizeof(a) / sizeof((a)[0]))

/* Fails with the sentence of @err if @code is not what was wanted. */
#define test_code(code, want, err)                                                \
	do {                                                                      \
		int code_ = (code), want_ = (want);                               \
		if (code_ != want_)                                               \
			fail_msg("%s: returned %d (%s), wanted %d", #code, code_, \
				 code_ < 0 ? (err)->text : "", want_);            \
	} while (0)

/* Open descriptors of this process. */
static inline int test_count_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	assert_non_null(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* For cmocka_unit_test_setup_teardown(): the test must close what it opens. */
static inline int test_fds_before(void **state)
{
	*state = (void *)(intptr_t)test_count_fds();
	return 0;
}

static inline int test_fds_after(void **state)
{
	int before = (int)(intptr_t)*state, after = test_count_fds();

	if (before == after)
		return 0;
	print_error("%d descriptors before the test, %d after it\n", before, after);
	return -1;
}

/* A test that is checked for leaked descriptors. */
#define test_case(f) cmocka_unit_test_setup_teardown(f, test_fds_before, test_fds_after)

#endif
