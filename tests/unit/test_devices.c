/* SPDX-License-Identifier: Apache-2.0 */
/* test_devices.c - which devices a configuration opens, and what their names may be. */
#include "tests/test.h"

#include "daemon/devices.h"
#include "daemon/log.h"

static void opened_once_in_order(void **state)
{
	static const struct {
		const char *config;
		int code;
		const char *names; /* in order; or what the error says */
	} cases[] = {
		{"", 0, "cpu:0"},
		{"device = 2\n", 0, "cpu:2"},
		{"device = cpu:3\nbackend = auto\n", 0, "cpu:3"},
		{"devices = cpu:1, cpu:0,cpu:1 cpu\n", 0, "cpu:0 cpu:1"},
		{"[model a]\npath = /x\ndevice = cpu:5\n[model b]\npath = /y\ndevice = 5\n", 0, "cpu:0 cpu:5"},
		{"[model a]\npath = /x\ndevice = cpu:8\n", -ENODEV, "cpu:8"},
		{"devices = abacus:0\n", -ENODEV, "no such backend"},
		{"devices = cpu:\n", -EINVAL, "index or UUID is missing"},
		{"devices = cpu:GPU-1\n", -EINVAL, "no UUID"},
		{"devices = a-name-that-is-longer-than-any-device-could-have-because-nobody-writes-that:0\n", -EINVAL,
		 "too long"},
	};

	(void)state;
	exl3_log_set_level((enum exl3_log_level)0);
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		struct exl3_devices all = {.nr = 0};
		char text[512], names[256] = "";
		struct exl3_config cfg;
		struct exl3_error err = {0};

		snprintf(text, sizeof(text), "%sthreads = 1\nworkspace = 16M\n%s",
			 strstr(cases[i].config, "backend") ? "" : "backend = cpu\n", cases[i].config);
		if (strchr(cases[i].config, '[')) /* keys go before the headings */
			snprintf(text, sizeof(text), "backend = cpu\nthreads = 1\nworkspace = 16M\n%s",
				 cases[i].config);
		test_code(exl3_config_parse_string(text, &cfg, &err), 0, &err);
		test_code(exl3_devices_open(&all, &cfg, &err), cases[i].code, &err);
		for (uint32_t d = 0; d < all.nr; d++) {
			assert_int_equal(all.list[d].index, d);
			snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s", d ? " " : "",
				 all.list[d].name);
		}
		if (cases[i].code)
			assert_non_null(strstr(err.text, cases[i].names));
		else
			assert_string_equal(names, cases[i].names);
		exl3_devices_close(&all);
		exl3_config_fini(&cfg);
	}
}

static void looked_up(void **state)
{
	static const struct {
		const char *spec;
		int index; /* -1: not open */
	} cases[] = {{NULL, 0},   {"", 0},         {"cpu", 0},     {"1", 0},     {"cpu:1", 0},
		     {"2", 1},    {"cpu:2", 1},    {"cpu:0", -1},  {"0", -1},    {"cpu:x", -1},
		     {"cpu:", -1}, {"abacus", -1}, {"cuda:0", -1}, {"-1", -1},   {"cpu:99999999999999999999", -1}};
	struct exl3_devices all = {.nr = 0};
	struct exl3_config cfg;
	struct exl3_error err = {0};

	(void)state;
	test_code(exl3_config_parse_string("backend = cpu\nthreads = 1\nworkspace = 16M\ndevice = 1\ndevices = 2\n", &cfg,
					   &err),
		  0, &err);
	test_code(exl3_devices_open(&all, &cfg, &err), 0, &err);
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		const struct exl3_device *d = exl3_devices_find(&all, cases[i].spec, &err);
		int index = d ? (int)d->index : -1;

		if (index != cases[i].index)
			fail_msg("'%s': device %d, wanted %d", cases[i].spec ? cases[i].spec : "(none)", index,
				 cases[i].index);
	}
	exl3_devices_find(&all, "cpu:7", &err);
	assert_non_null(strstr(err.text, "cpu:1, cpu:2"));
	exl3_devices_close(&all);
	exl3_config_fini(&cfg);
}

/* A model that a client loaded may name a device that has gone: the others are served without it. */
static void a_model_of_a_client(void **state)
{
	struct exl3_devices all = {.nr = 0};
	struct exl3_config cfg;
	struct exl3_error err = {0};

	(void)state;
	test_code(exl3_config_parse_string("backend = cpu\nthreads = 1\nworkspace = 16M\n", &cfg, &err), 0, &err);
	test_code(exl3_config_add_model(&cfg, "a=/x,device=cuda:9", true, &err), 0, &err);
	test_code(exl3_devices_open(&all, &cfg, &err), 0, &err);
	assert_int_equal(all.nr, 1);
	exl3_devices_close(&all);
	exl3_config_fini(&cfg);
}

/* What a device can address of what another one made. */
static void addresses(void **state)
{
	const struct exl3_backend_ops gpu = {.name = "cuda"}, cpu = {.name = "cpu"};
	struct exl3_devices all = {.list = {{.ops = &cpu}, {.ops = &gpu, .index = 1}, {.ops = &gpu, .index = 2}}, .nr = 3};
	const struct exl3_device *d = all.list;
	char host[2];
	struct exl3_arena shared = {.dev_ptr = host, .host_ptr = host + 1}, own = {.dev_ptr = host, .device = true};

	(void)state;
	assert_ptr_equal(exl3_devices_for_arenas(&all), &d[1]);
	assert_ptr_equal(exl3_devices_address(&d[0], &d[1], &shared), host + 1);
	assert_ptr_equal(exl3_devices_address(&d[1], &d[1], &shared), host);
	assert_ptr_equal(exl3_devices_address(&d[2], &d[1], &shared), host);
	assert_null(exl3_devices_address(&d[0], &d[1], &own));
	assert_ptr_equal(exl3_devices_address(&d[1], &d[1], &own), host);
	assert_null(exl3_devices_address(&d[2], &d[1], &own));
	assert_null(exl3_devices_address(&d[1], &d[0], &shared)); /* made without being registered */
	all.nr = 1;
	assert_ptr_equal(exl3_devices_for_arenas(&all), &d[0]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(opened_once_in_order),
		test_case(looked_up),
		test_case(a_model_of_a_client),
		test_case(addresses),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
