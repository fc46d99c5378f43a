/* SPDX-License-Identifier: Apache-2.0 */
/* test_mps_acl.c - access lists of MPS folders, entry by entry. */
#include "tests/test.h"

#include "daemon/mps_acl.h"

/* One entry as text: "u", "u7", "g", "g8", "m", "o" and 1 or 0: may it enter? */
static void text_of(const void *acl, int bytes, char *text)
{
	uint32_t version;

	*text = 0;
	assert_true(bytes >= 4 && bytes % 8 == 4);
	memcpy(&version, acl, 4);
	assert_int_equal(version, 2);
	for (int at = 4; at < bytes; at += 8) {
		uint16_t tag, perm;
		uint32_t id;

		memcpy(&tag, (const char *)acl + at, 2);
		memcpy(&perm, (const char *)acl + at + 2, 2);
		memcpy(&id, (const char *)acl + at + 4, 4);
		text += sprintf(text, "%s%s", at > 4 ? " " : "",
				tag <= 2 ? "u" : tag <= 8 ? "g" : tag == 16 ? "m" : "o");
		if (tag == 2 || tag == 8)
			text += sprintf(text, "%u", id);
		else
			assert_int_equal(id, UINT32_MAX);
		text += sprintf(text, "=%d", perm & 1);
	}
}

static const struct {
	const char *config;
	size_t domain;
	const char *want; /* NULL: no list */
} cases[] = {
	{"", 0, NULL},
	{"domain = a=7\n", 0, "u=1 u7=0 g=1 m=1 o=1"},
	{"domain = a=7\n", 1, "u=1 u7=1 g=0 m=1 o=0"},
	{"domain = a=9,7,9,@8\n", 0, "u=1 u7=0 u9=0 g=1 g8=0 m=1 o=1"},
	{"domain = a=9,7,9,@8\n", 1, "u=1 u7=1 u9=1 g=0 g8=1 m=1 o=0"},
	/* a user of b who is in a's group counts as b's */
	{"domain = a=@8\ndomain = b=5,@6\n", 1, "u=1 u5=0 g=0 g8=1 m=1 o=0"},
	{"domain = a=@8\ndomain = b=5,@6\n", 2, "u=1 u5=1 g=0 g6=1 m=1 o=0"},
	{"domain = a=@8\ndomain = b=5,@6\n", 0, "u=1 u5=0 g=1 g6=0 g8=0 m=1 o=1"},
};

static void lists(void **state)
{
	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		exl3_auto(exl3_freep) void *acl = NULL;
		struct exl3_config cfg;
		struct exl3_error err;
		char text[256];
		int bytes;

		test_code(exl3_config_parse_string(cases[i].config, &cfg, &err), 0, &err);
		bytes = exl3_mps_acl_make(&cfg, cases[i].domain, &acl);
		assert_int_equal(acl == NULL, cases[i].want == NULL);
		if (acl) {
			text_of(acl, bytes, text);
			assert_string_equal(text, cases[i].want);
		}
		exl3_config_fini(&cfg);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {test_case(lists)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
