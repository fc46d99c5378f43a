/* SPDX-License-Identifier: Apache-2.0 */
/* test_tenant.c - who belongs to which tenant, token buckets, limits, and a policy that changes. */
#include "tests/test.h"

#include "daemon/tenant.h"

static struct exl3_config parse(const char *text)
{
	struct exl3_config cfg;
	struct exl3_error err;

	test_code(exl3_config_parse_string(text, &cfg, &err), 0, &err);
	return cfg;
}

static void apply(struct exl3_policy *p, const char *text, int want)
{
	struct exl3_config cfg = parse(text);
	struct exl3_error err;

	test_code(exl3_policy_apply(p, &cfg, 1000000000000, &err), want, &err);
	exl3_config_fini(&cfg);
}

static struct exl3_tenant *match(const struct exl3_policy *p, uid_t uid, gid_t gid, gid_t group,
				 const char *cgroup)
{
	const struct exl3_identity who = {.uid = uid,
					  .gid = gid,
					  .groups = &group,
					  .nr_groups = group ? 1 : 0,
					  .cgroup = (char *)(uintptr_t)cgroup};

	return exl3_policy_match(p, &who);
}

static void the_first_that_matches(void **state)
{
	static const struct {
		uid_t uid;
		gid_t gid, group;
		const char *cgroup, *want;
	} cases[] = {
		{1000, 7, 0, NULL, "users"},
		{1003, 7, 0, NULL, "users"},
		{999, 7, 0, NULL, "default"},
		{1006, 7, 0, NULL, "default"},
		{2000, 7, 0, NULL, "users"},
		{0, 0, 0, NULL, "users"}, /* by name */
		{1, 50, 0, NULL, "groups"},
		{1, 7, 50, NULL, "groups"}, /* supplementary */
		{1000, 50, 50, NULL, "users"}, /* the first one */
		{1, 7, 0, "/batch.slice/job-1.scope", "cgroup"},
		{1, 7, 0, "/batch.slice/a/b", "cgroup"},
		{1, 7, 0, "/batch.slicex", "default"},
		{1, 7, 0, "/user.slice/x", "default"},
		{3000, 7, 0, "/gpu/1", "both"},
		{3000, 7, 0, "/cpu/1", "default"}, /* its user, not its cgroup */
		{3000, 7, 0, NULL, "default"},     /* not known: no pattern matches */
		{3001, 7, 0, "/gpu/1", "default"},
	};
	struct exl3_policy p = {0};

	(void)state;
	apply(&p,
	      "[tenant default]\nweight = 7\n"
	      "[tenant nobody]\nweight = 1\n"
	      "[tenant users]\nusers = root, 1000-1005 2000\n"
	      "[tenant groups]\ngroups = 50\n"
	      "[tenant cgroup]\ncgroups = /batch.slice/*\n"
	      "[tenant both]\nusers = 3000\ncgroups = /none /gpu/*\n",
	      0);
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		const struct exl3_tenant *t = match(&p, cases[i].uid, cases[i].gid, cases[i].group,
						    cases[i].cgroup);

		if (strcmp(t->conf.name, cases[i].want) != 0)
			fail_msg("case %zu: tenant %s, wanted %s", i, t->conf.name, cases[i].want);
	}
	assert_int_equal(p.fallback->sched[0].weight, 7);
	exl3_policy_fini(&p);
	/* Without any there is the default one. */
	apply(&p, "", 0);
	assert_string_equal(match(&p, 5, 5, 0, NULL)->conf.name, "default");
	assert_int_equal(p.fallback->sched[0].weight, EXL3_WEIGHT_DEFAULT);
	assert_true(exl3_tenant_cuda_ipc(p.fallback));
	exl3_policy_fini(&p);
}

static void wrong_sections(void **state)
{
	static const struct {
		const char *text, *want;
	} cases[] = {
		{"[tenant a]\nuser = 1\n", "unknown key 'user'"},
		{"[tenant a]\nusers = nobody-of-that-name\n", "no user 'nobody-of-that-name'"},
		{"[tenant a]\ngroups = no-such-group\n", "no group 'no-such-group'"},
		{"[tenant a]\nusers = 5-3\n", "no name, number or range"},
		{"[tenant a]\nusers = 4294967296\n", "no name, number or range"},
		{"[tenant a]\nusers = 12x\n", "no name, number or range"},
		{"[tenant a]\nweight = 0\n", "not in 1..10000"},
		{"[tenant a]\nbytes = lots\n", "not a whole number with K"},
		{"[tenant a]\nconnect = maybe\n", "neither yes nor no"},
		{"[tenant a]\ncuda-ipc = maybe\n", "not auto, yes or no"},
		{"[tenant a b]\nweight = 1\n", "letters, digits"},
		{"tenant = a.weight=1\n", "not NAME:KEY=VALUE"},
	};
	struct exl3_config cfg;
	struct exl3_error err;

	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		if (exl3_config_parse_string(cases[i].text, &cfg, &err) != -EINVAL ||
		    !strstr(err.text, cases[i].want))
			fail_msg("case %zu: %s", i, err.text);
	}
}

/* What the supervisor sends is what a worker has. */
static void settings_go_to_workers(void **state)
{
	struct exl3_config a = parse("[tenant b]\nusers = root 5-9 *\nbytes = 3G\nmodels = x-* y\n"
				     "admin = yes\ncuda-ipc = no\nmodels = z\n[tenant a]\ncgroups = /a\n"),
			   b = parse("");
	struct exl3_error err;
	char text[2048], other[2048];
	size_t i = 0, j = 0;

	(void)state;
	while (exl3_config_setting(&a, &i, text, sizeof(text)))
		test_code(exl3_config_set(&b, text, &err), 0, &err);
	assert_int_equal(b.nr_tenants, 2);
	assert_string_equal(b.tenants[0].name, "b");
	assert_string_equal(b.tenants[0].models.text, "z"); /* a later value wins */
	assert_string_equal(b.tenants[0].users.text, "0 5-9 *");
	assert_true(b.tenants[0].bytes == 3ull << 30);
	i = 0;
	while (exl3_config_tenant_setting(&a, &i, text, sizeof(text))) {
		assert_true(exl3_config_tenant_setting(&b, &j, other, sizeof(other)));
		assert_string_equal(text, other);
	}
	exl3_config_fini(&a);
	exl3_config_fini(&b);
}

static void tokens(void **state)
{
	struct exl3_tokens t = {0};
	uint64_t now = 1000000000000;
	uint32_t taken = 0;

	(void)state;
	exl3_tokens_set(&t, 0, 0, now);
	assert_int_equal(exl3_tokens_there(&t, now), UINT32_MAX);
	exl3_tokens_take(&t, 1000, now);
	assert_int_equal(exl3_tokens_when(&t, now), now);
	exl3_tokens_set(&t, 1000, 5, now); /* one per millisecond */
	assert_int_equal(exl3_tokens_there(&t, now), 5);
	exl3_tokens_take(&t, 3, now);
	assert_int_equal(exl3_tokens_there(&t, now), 2);
	exl3_tokens_take(&t, 2, now);
	assert_int_equal(exl3_tokens_there(&t, now), 0);
	assert_int_equal(exl3_tokens_when(&t, now), now + 1000000);
	assert_int_equal(exl3_tokens_there(&t, now + 999999), 0);
	assert_int_equal(exl3_tokens_there(&t, now + 1000000), 1);
	assert_int_equal(exl3_tokens_when(&t, now + 1000000), now + 1000000);
	/* After a pause no more than the burst. */
	assert_int_equal(exl3_tokens_there(&t, now + 3600000000000), 5);
	/* Ten seconds of whoever takes all there is, at odd times: the rate, and one burst. */
	now += 3600000000000;
	for (uint64_t at = now; at < now + 10000000000; at += 777777) {
		uint32_t nr = exl3_tokens_there(&t, at);

		exl3_tokens_take(&t, nr, at);
		taken += nr;
	}
	assert_in_range(taken, 9990, 10005);
	/* By default a tenth of a second's, and one at least. */
	exl3_tokens_set(&t, 1000, 0, now);
	assert_int_equal(t.burst, 100);
	exl3_tokens_set(&t, 3, 0, now);
	assert_int_equal(t.burst, 1);
}

/* A reload changes the rate while tokens are missing: so many are missing still, the time is another one. */
static void tokens_at_another_rate(void **state)
{
	struct exl3_tokens t = {0};
	uint64_t now = 1000000000000;

	(void)state;
	exl3_tokens_set(&t, 1, 60, now);
	exl3_tokens_take(&t, 60, now);
	exl3_tokens_set(&t, 1000, 100, now);
	assert_int_equal(exl3_tokens_there(&t, now), 40);
	exl3_tokens_take(&t, 40, now);
	assert_int_equal(exl3_tokens_when(&t, now), now + 1000000);
	/* A smaller burst: none, never less than none. */
	exl3_tokens_set(&t, 1000, 1, now);
	assert_int_equal(exl3_tokens_there(&t, now), 0);
	assert_int_equal(exl3_tokens_when(&t, now), now + 1000000);
	exl3_tokens_set(&t, 2, 5, now); /* and slower: what is missing is no gift */
	assert_int_equal(exl3_tokens_there(&t, now), 4);
	exl3_tokens_set(&t, 0, 0, now);
	assert_int_equal(exl3_tokens_there(&t, now), UINT32_MAX);
	exl3_tokens_set(&t, 5, 5, now);
	assert_int_equal(exl3_tokens_there(&t, now), 5);
}

/* The same of a policy. */
static void rate_after_a_reload(void **state)
{
	struct exl3_policy p = {0};
	uint64_t now = 1000000000000; /* as in apply() */
	struct exl3_tenant *t;

	(void)state;
	apply(&p, "[tenant a]\nusers = 5\nrequests-per-second = 1\nburst = 3600\n", 0);
	t = match(&p, 5, 5, 0, NULL);
	exl3_tokens_take(&t->tokens, 3600, now);
	apply(&p, "[tenant a]\nusers = 5\nrequests-per-second = 10000\n", 0);
	assert_in_range(exl3_tokens_when(&t->tokens, now), now, now + 1000000000);
	exl3_policy_fini(&p);
}

static void limits(void **state)
{
	struct exl3_policy p = {0};
	struct exl3_tenant *t;
	struct exl3_error err;

	(void)state;
	apply(&p, "[tenant batch]\nusers = 5\nbytes = 2G\nclients = 2\nchannels = 1\nmodels = a b-*\n", 0);
	t = match(&p, 5, 5, 0, NULL);
	test_code(exl3_tenant_charge(t, EXL3_BYTES_ARENA, 1ull << 30, &err), 0, &err);
	test_code(exl3_tenant_charge(t, EXL3_BYTES_ARENA, 3ull << 30, &err), -EDQUOT, &err);
	assert_string_equal(err.text, "arena of 3221225472 bytes refused: tenant batch may register "
				      "2147483648 bytes (bytes), holds 1073741824");
	test_code(exl3_tenant_charge(t, EXL3_BYTES_IMPORT, UINT64_MAX, &err), -EDQUOT, &err);
	test_code(exl3_tenant_charge(t, EXL3_BYTES_ARENA, 1ull << 30, &err), 0, &err);
	test_code(exl3_tenant_charge(t, EXL3_BYTES_RING, 1, &err), -EDQUOT, &err);
	exl3_tenant_uncharge(t, EXL3_BYTES_ARENA, 1ull << 31);
	for (int i = 0; i < 2; i++)
		test_code(exl3_tenant_add_client(t, &err), 0, &err);
	test_code(exl3_tenant_add_client(t, &err), -EDQUOT, &err);
	assert_string_equal(err.text,
			    "client refused: tenant batch may have 2 clients (clients), has 2");
	test_code(exl3_tenant_add_channel(t, &err), 0, &err);
	test_code(exl3_tenant_add_channel(t, &err), -EDQUOT, &err);
	assert_string_equal(err.text,
			    "channel refused: tenant batch may have 1 channels (channels), has 1");
	test_code(exl3_tenant_check_model(t, "a", &err), 0, &err);
	test_code(exl3_tenant_check_model(t, "b-7", &err), 0, &err);
	test_code(exl3_tenant_check_model(t, "c", &err), -EPERM, &err);
	assert_string_equal(err.text, "model 'c' refused: tenant batch may use a b-* (models)");
	exl3_policy_fini(&p);
}

/* A reload: who is there stays what it is, new limits count, old tenants live as long as they hold something. */
static void a_policy_that_changes(void **state)
{
	struct exl3_policy p = {0};
	struct exl3_tenant *a, *b;
	struct exl3_error err;
	char many[64 * 40] = "";

	(void)state;
	apply(&p, "[tenant a]\nusers = 1\nbytes = 100\n[tenant b]\nusers = 2\n", 0);
	a = exl3_tenant_get(match(&p, 1, 1, 0, NULL));
	b = exl3_tenant_get(match(&p, 2, 2, 0, NULL));
	assert_false(exl3_tenant_cuda_ipc(a)); /* several tenants */
	assert_int_equal(p.nr, 3);
	assert_true(a->slot != b->slot && a->slot != p.fallback->slot);
	test_code(exl3_tenant_charge(a, EXL3_BYTES_ARENA, 80, &err), 0, &err);
	/* Other order, a lower limit: what is held stays, new things do not fit. */
	apply(&p, "[tenant b]\nusers = 1\n[tenant a]\nusers = 1\nbytes = 50\nweight = 3\n", 0);
	assert_ptr_equal(match(&p, 1, 1, 0, NULL), b);
	assert_int_equal(a->bytes, 80);
	assert_int_equal(a->sched[0].weight, 3);
	test_code(exl3_tenant_charge(a, EXL3_BYTES_ARENA, 1, &err), -EDQUOT, &err);
	exl3_tenant_uncharge(a, EXL3_BYTES_ARENA, 40);
	test_code(exl3_tenant_charge(a, EXL3_BYTES_ARENA, 1, &err), 0, &err);
	/* a is dropped while it holds something, and comes back. */
	apply(&p, "[tenant b]\nusers = 2\n", 0);
	assert_true(a->retired);
	assert_int_equal(p.nr, 3);
	assert_string_equal(match(&p, 1, 1, 0, NULL)->conf.name, "default");
	apply(&p, "[tenant a]\nusers = 1\n", 0);
	assert_false(a->retired);
	assert_true(b->retired);
	assert_ptr_equal(match(&p, 1, 1, 0, NULL), a);
	exl3_tenant_put(b); /* gone with its last */
	assert_int_equal(p.nr, 2);
	/* Too many with those that are retired: nothing changes. */
	for (int i = 0; i < 63; i++)
		snprintf(many + strlen(many), sizeof(many) - strlen(many), "[tenant t%d]\nusers = %d\n",
			 i, 100 + i);
	apply(&p, many, -EDQUOT);
	assert_ptr_equal(match(&p, 1, 1, 0, NULL), a);
	exl3_tenant_uncharge(a, EXL3_BYTES_ARENA, 41);
	exl3_tenant_put(a);
	apply(&p, many, 0);
	assert_int_equal(p.nr, 64);
	assert_string_equal(match(&p, 162, 1, 0, NULL)->conf.name, "t62");
	apply(&p, "", 0);
	assert_int_equal(p.nr, 1);
	exl3_policy_fini(&p);
}

static void cgroup_of_a_file(void **state)
{
	static const struct {
		const char *text, *want;
	} cases[] = {
		{"0::/a/b\n", "/a/b"},
		{"12:cpu:/x\n0::/\n", "/"},
		{"1:name=systemd:/x\n", NULL},
		{"10::/x\n0::/y", "/y"},
		{"", NULL},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		exl3_auto(exl3_freep) char *got = exl3_identity_cgroup(cases[i].text);

		if ((got == NULL) != (cases[i].want == NULL) ||
		    (got && strcmp(got, cases[i].want) != 0))
			fail_msg("case %zu: %s", i, got ? got : "NULL");
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(the_first_that_matches), test_case(wrong_sections),
		test_case(settings_go_to_workers), test_case(tokens),
		test_case(tokens_at_another_rate), test_case(rate_after_a_reload),
		test_case(limits),		   test_case(a_policy_that_changes),
		test_case(cgroup_of_a_file),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
