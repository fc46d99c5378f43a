/* SPDX-License-Identifier: Apache-2.0 */
/* test_driver.c - which device files are kept open. */
#include "tests/test.h"

#include "daemon/driver.h"
#include "tests/unit/make_ckpt.h"

#include <stdbool.h>

static void gpus_only(void **state)
{
	static const struct {
		const char *name;
		bool held;
	} files[] = {
		{"nvidia0", true},      {"nvidia17", true},      {"nvidiactl", true}, {"nvidia", false},
		{"nvidia-uvm", false},  {"nvidia-modeset", false}, {"nvidia0x", false}, {"null", false},
		{"xnvidia0", false},
	};
	struct exl3_driver driver;
	char *dir = mk_dir(), link[64], target[4200];
	unsigned want = 0, found = 0;

	(void)state;
	for (size_t i = 0; i < TEST_NR(files); i++) {
		mk_text(dir, files[i].name, "");
		want += files[i].held;
	}
	exl3_driver_hold(&driver, dir);
	assert_int_equal(driver.nr, want);
	for (unsigned k = 0; k < driver.nr; k++) {
		ssize_t n;

		snprintf(link, sizeof(link), "/proc/self/fd/%d", driver.fds[k]);
		n = readlink(link, target, sizeof(target) - 1);
		assert_true(n > 0);
		target[n] = 0;
		for (size_t i = 0; i < TEST_NR(files); i++)
			found += files[i].held && !strcmp(strrchr(target, '/') + 1, files[i].name);
	}
	assert_int_equal(found, want);
	exl3_driver_release(&driver);
	assert_int_equal(driver.nr, 0);
	exl3_driver_hold(&driver, "/nonexistent");
	assert_int_equal(driver.nr, 0);
	exl3_driver_release(&driver);
	mk_rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {test_case(gpus_only)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
