/* SPDX-License-Identifier: Apache-2.0 */
/* test_config.c - files, drop-ins and flags: what wins, what is refused, and with which sentence. */
#include "tests/test.h"

#include "daemon/config.h"
#include "shm/exl3_abi.h"

#include <sys/stat.h>

/* ---- one file's text ---- */

#define LONG \
	"0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567"

static const struct text_case {
	const char *text;
	int code;
	const char *says; /* part of the error's sentence */
} text_cases[] = {
	{"", 0, NULL},
	{"# nothing\n; neither\n\n", 0, NULL},
	{"threads = 4\n", 0, NULL},
	{"[any heading]\nthreads=4096\n", 0, NULL},
	{"threads = 4097\n", -EINVAL, "4097 is not in 0..4096"},
	{"threads = -1\n", -EINVAL, "not in 0..4096"},
	{"threads = four\n", -EINVAL, "not a whole number"},
	{"threads = 4x\n", -EINVAL, "not a whole number"},
	{"threads = 0x10\n", -EINVAL, "not a whole number"},
	{"threads = 1.5\n", -EINVAL, "not a whole number"},
	{"threads =\n", -EINVAL, "not a whole number"},
	{"threads = 99999999999999999999\n", -EINVAL, "not a whole number"},
	{"node = -1\n", 0, NULL},
	{"node = 1023\n", 0, NULL},
	{"node = 1024\n", -EINVAL, "-1..1023"},
	{"node = -2\n", -EINVAL, "-1..1023"},
	{"arena-max = 1G\n", 0, NULL},
	{"arena-max = 64T\n", 0, NULL},
	{"arena-max = 65T\n", -EINVAL, "not in 0.."},
	{"arena-max = 9223372036854775807T\n", -EINVAL, "not a whole number"},
	{"arena-max = -1G\n", -EINVAL, "not a whole number"},
	{"arena-max = 1Q\n", -EINVAL, "with K, M, G or T"},
	{"deterministic = yes\n", 0, NULL},
	{"deterministic = maybe\n", -EINVAL, "neither yes nor no"},
	{"backend = cuda\n", 0, NULL},
	{"backend = cud\n", -EINVAL, "not one of auto|cpu|cuda"},
	{"backend = auto|cpu\n", -EINVAL, "not one of"},
	{"log-level = loud\n", -EINVAL, "not one of"},
	{"queue-depth = 0\n", -EINVAL, "1..64"},
	{"channels-max = 65\n", -EINVAL, "1..64"},
	{"thraeds = 4\n", -EINVAL, "unknown key 'thraeds'"},
	{"threads = 4\nthreads = 5x\n", -EINVAL, ":2"},
	{"[model a-name-that-is-too-long-for-the-heading-of-a-section]\npath = /x\n", -EINVAL,
	 "write model = NAME=DIR"},
	{"model = a=/" LONG LONG LONG "\n", -EINVAL, ":1: line is longer than"},
	{"threads = 1\n# " LONG LONG LONG "\nthreads = 2\n", -EINVAL, ":2: line is longer than"},
	{"just words\n", -EINVAL, "not a 'key = value' line"},
	{"model = a=/x\nmodel = b=/y\n", 0, NULL},
	{"model = a\n", -EINVAL, "is not NAME=DIR"},
	{"model = =/x\n", -EINVAL, "1 to 512 bytes"},
	{"model = a=\n", -EINVAL, "path is empty"},
	{"model = a/b=/x\n", -EINVAL, "no spaces"},
	{"[model a]\npath = /x\n", 0, NULL},
	{"[model a]\npath = /x\ndevice = 1\n", 0, NULL},
	{"[model a]\ndevice = 1\n", -EINVAL, "no path"},
	{"[model a]\npaht = /x\n", -EINVAL, "unknown key 'paht'"},
	{"[model a b]\npath = /x\n", -EINVAL, "no spaces"},
	{"[model a]\n", -EINVAL, ":1: a section without a key"},
	{"threads = 1\n\n[model a] ; c\n# path = /x\n", -EINVAL, ":3: a section without a key"},
	{"\n  [model\ta]\n[model b]\npath = /x\n", -EINVAL, ":2: a section without a key"},
	{"\xef\xbb\xbf[model a]\n[limits]\nthreads = 1\n", -EINVAL, ":1: a section without a key"},
	{"[model a]\npath = /x\n[model b]\n[model c]\n", -EINVAL, ":3: a section without a key"},
	{"[model a]\n[model b]\nthraeds = 4\n", -EINVAL, ":3"},
	{"[model a]\npath = /x\n[any heading]\n[models]\n", 0, NULL},
	{"# [model a]\n;[model b]\n", 0, NULL},
	{"[domain a]\nusers = 0\n", 0, NULL},
	{"[domain a]\nusers = 4294967294, @4294967294\n", 0, NULL},
	{"[domain a]\nusers = 4294967295\n", -EINVAL, "no user '4294967295'"},
	{"[domain a]\nusers = -1\n", -EINVAL, "no user '-1'"},
	{"[domain a]\nusers = @\n", -EINVAL, "no group ''"},
	{"[domain a]\nusers = 1\nuser = 2\n", -EINVAL, ":3: domain a: unknown key 'user'"},
	{"[domain a]\nusers = 1\n[domain a]\nusers = 2\n", 0, NULL},
	{"[domain a]\nusers = 1, 2, 1\n[domain b]\nusers = 3, @1\n", 0, NULL},
	{"[domain a]\nusers = 1\n[domain b]\nusers = 2 1\n", -EINVAL, "user 1 is in two domains"},
	{"[domain a]\nusers = @1\n[domain b]\nusers = 1,@1\n", -EINVAL, "group 1 is in two domains"},
	{"[domain default]\nusers = 1\n", -EINVAL, "is there already"},
	{"[domain .a]\nusers = 1\n", -EINVAL, "letters, digits"},
	{"[domain abcdefghijklmnopqrstuvwxyz0123456]\nusers = 1\n", -EINVAL, "1 to 32 bytes"},
	{"domain = a\n", -EINVAL, "is not NAME=USER"},
	{"domain = a=1,2\ndomain = b=@3\n", 0, NULL},
	{"[threads]\n[domain a]\n[threads]\nthreads = 1\n", -EINVAL, ":2: a section without a key"},
	{"mps = maybe\n", -EINVAL, "auto|require|off"},
	{"socket = "
	 "/a/very/long/path/that/is/longer/than/what/the/kernel/takes/for/a/unix/socket/address/"
	 "0123456789.sock\n",
	 -EINVAL, "longer than 100 bytes"},
};

static void texts(void **state)
{
	(void)state;
	for (size_t i = 0; i < TEST_NR(text_cases); i++) {
		const struct text_case *c = &text_cases[i];
		struct exl3_error err = {0};
		struct exl3_config cfg;
		int code = exl3_config_parse_string(c->text, &cfg, &err);

		if (code != c->code || (c->says && !strstr(err.text, c->says)))
			fail_msg("case %zu '%s': %d '%s', wanted %d '%s'", i, c->text, code,
				 err.text, c->code, c->says ? c->says : "");
		if (code == 0)
			exl3_config_fini(&cfg);
	}
}

static void values(void **state)
{
	struct exl3_config cfg;
	struct exl3_error err;

	(void)state;
	test_code(exl3_config_parse_string("arena-max = 3MiB\nspin-us = 7\nnode = 2\n"
					   "deterministic = on\n[model m]\npath = rel\n",
					   &cfg, &err),
		  0, &err);
	assert_int_equal(cfg.arena_max, 3 << 20);
	assert_int_equal(cfg.spin_us, 7);
	assert_int_equal(cfg.node, 2);
	assert_true(cfg.deterministic);
	assert_string_equal(cfg.backend, "auto");
	assert_string_equal(cfg.socket, EXL3_RUN_DIR "/2.sock"); /* follows the node */
	assert_int_equal(cfg.nr_models, 1);
	assert_int_equal(cfg.models[0].path[0], '/'); /* made absolute */
	assert_int_equal(cfg.queue_depth, 8);
	exl3_config_fini(&cfg);
}

/* ---- files, drop-ins, flags ---- */

struct folder {
	char dir[64], file[96], drop[128];
};

static void write_file(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");

	assert_non_null(f);
	fputs(text, f);
	assert_int_equal(fclose(f), 0);
}

static void folder_make(struct folder *f)
{
	strcpy(f->dir, "/tmp/exl3-config-XXXXXX");
	assert_non_null(mkdtemp(f->dir));
	snprintf(f->file, sizeof(f->file), "%s/d.conf", f->dir);
	snprintf(f->drop, sizeof(f->drop), "%s/d.conf.d", f->dir);
	assert_int_equal(mkdir(f->drop, 0700), 0);
}

static void folder_write(struct folder *f, const char *name, const char *text)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", f->drop, name);
	write_file(path, text);
}

static void folder_remove(struct folder *f)
{
	char command[256];

	snprintf(command, sizeof(command), "rm -rf '%s'", f->dir);
	assert_int_equal(system(command), 0);
}

static void later_ones_win(void **state)
{
	struct exl3_config_args args;
	struct exl3_config cfg;
	struct exl3_error err;
	struct folder f;

	(void)state;
	folder_make(&f);
	write_file(f.file, "threads = 1\nspin-us = 1\nclients-max = 1\nchannels-max = 1\n"
			   "[model a]\npath = /one\n");
	folder_write(&f, "20-b.conf", "clients-max = 3\n[model a]\npath = /two\n");
	folder_write(&f, "10-a.conf", "spin-us = 2\nclients-max = 2\n");
	folder_write(&f, "30-c.conf~", "clients-max = 99\n"); /* an editor's backup is no drop-in */
	char *argv[] = {"d", "--config", f.file, "--channels-max=4", "--model", "b=/three", NULL};
	test_code(exl3_config_read(6, argv, &cfg, &args, &err), 0, &err);
	assert_int_equal(cfg.threads, 1);
	assert_int_equal(cfg.spin_us, 2);
	assert_int_equal(cfg.clients_max, 3);
	assert_int_equal(cfg.channels_max, 4);
	assert_int_equal(cfg.nr_models, 2);
	assert_string_equal(cfg.models[0].path, "/two");
	assert_string_equal(cfg.models[1].path, "/three");
	assert_int_equal(args.worker_fd, -1);
	exl3_config_fini(&cfg);

	/* The error names the drop-in and its line. */
	folder_write(&f, "20-b.conf", "\n\nclients-max = x\n");
	assert_int_equal(exl3_config_read(6, argv, &cfg, &args, &err), -EINVAL);
	assert_non_null(strstr(err.text, "20-b.conf:3"));
	folder_remove(&f);
}

static void models_replace_and_go(void **state)
{
	struct exl3_config cfg;
	struct exl3_error err;
	char name[EXL3_NAME_MAX + 16];

	(void)state;
	test_code(exl3_config_parse_string("", &cfg, &err), 0, &err);
	test_code(exl3_config_add_model(&cfg, "a=/x,device=1", false, &err), 0, &err);
	test_code(exl3_config_add_model(&cfg, "b=/y,z", true, &err), 0, &err);
	test_code(exl3_config_add_model(&cfg, "a=/x2", false, &err), 0, &err);
	assert_int_equal(cfg.nr_models, 2);
	assert_string_equal(cfg.models[0].path, "/x2");
	assert_string_equal(cfg.models[1].path,
			    "/y,z"); /* a comma may be part of a folder's name */
	assert_true(cfg.models[1].by_client);
	exl3_config_remove_model(&cfg, "a");
	exl3_config_remove_model(&cfg, "nobody");
	assert_int_equal(cfg.nr_models, 1);
	assert_string_equal(cfg.models[0].name, "b");

	/* A name at its limit, and one byte longer. */
	memset(name, 'n', sizeof(name));
	strcpy(name + EXL3_NAME_MAX, "=/x");
	test_code(exl3_config_add_model(&cfg, name, false, &err), 0, &err);
	strcpy(name + EXL3_NAME_MAX, "n=/x");
	assert_int_equal(exl3_config_add_model(&cfg, name, false, &err), -EINVAL);
	exl3_config_fini(&cfg);
}

/* Options end the path, each once and only the last ones: what is left may look like one. */
static void options_of_models(void **state)
{
	static const struct {
		const char *spec;
		int code;
		const char *path, *device;
		bool device_tensors;
	} cases[] = {
		{"a=/x,unquantized=device", 0, "/x", NULL, true},
		{"a=/x,device=cpu:1,unquantized=device", 0, "/x", "cpu:1", true},
		{"a=/x,unquantized=device,device=cuda:GPU-1", 0, "/x", "cuda:GPU-1", true},
		{"a=/x,unquantized=host", 0, "/x", NULL, false},
		{"a=/odd,device=7,unquantized=device,device=0", 0, "/odd,device=7", "0", true},
		{"a=/odd,unquantized=moon,unquantized=host,device=0", 0, "/odd,unquantized=moon", "0", false},
		{"a=/x,y=1,device=2", 0, "/x,y=1", "2", false},
		{"a=/x,unquantized=moon", -EINVAL, NULL, NULL, false},
		{"a=/x,device=", -EINVAL, NULL, NULL, false},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		struct exl3_config_model *m;
		struct exl3_config cfg, again;
		struct exl3_error err;
		char text[256];

		test_code(exl3_config_parse_string("", &cfg, &err), 0, &err);
		test_code(exl3_config_add_model(&cfg, cases[i].spec, false, &err), cases[i].code, &err);
		if (cases[i].code) {
			exl3_config_fini(&cfg);
			continue;
		}
		m = &cfg.models[0];
		assert_string_equal(m->path, cases[i].path);
		assert_string_equal(m->device ? m->device : "", cases[i].device ? cases[i].device : "");
		assert_int_equal(m->device_tensors, cases[i].device_tensors);
		/* What a worker is told means the same. */
		exl3_config_model_spec(text, sizeof(text), m->name, m->path, m->device_tensors, "cpu:3");
		test_code(exl3_config_parse_string("", &again, &err), 0, &err);
		test_code(exl3_config_add_model(&again, text, false, &err), 0, &err);
		assert_string_equal(again.models[0].path, m->path);
		assert_string_equal(again.models[0].device, "cpu:3");
		assert_int_equal(again.models[0].device_tensors, m->device_tensors);
		exl3_config_fini(&again);
		exl3_config_fini(&cfg);
	}
}

static const struct flag_case {
	char *argv[4];
	int code;
	const char *says;
} flag_cases[] = {
	{{"d", "--threads", "2"}, 0, NULL},
	{{"d", "--threads=2"}, 0, NULL},
	{{"d", "--threads"}, -EINVAL, "--threads: value missing"},
	{{"d", "--threads", "x"}, -EINVAL, "--threads: threads: 'x'"},
	{{"d", "--deterministic"}, 0, NULL},
	{{"d", "--deterministic", "no"}, 0, NULL},
	{{"d", "--nothing", "2"}, -EINVAL, "unknown flag '--nothing'"},
	{{"d", "threads"}, -EINVAL, "flags begin with --"},
	{{"d", "--config"}, -EINVAL, "--config: value missing"},
	{{"d", "--config", "/nonexistent/x.conf"}, -ENOENT, "/nonexistent/x.conf"},
};

static void flags(void **state)
{
	(void)state;
	for (size_t i = 0; i < TEST_NR(flag_cases); i++) {
		const struct flag_case *c = &flag_cases[i];
		struct exl3_config_args args;
		struct exl3_error err = {0};
		struct exl3_config cfg;
		int argc = 0, code;

		while (argc < 4 && c->argv[argc])
			argc++;
		code = exl3_config_read(argc, c->argv, &cfg, &args, &err);
		if (code != c->code || (c->says && !strstr(err.text, c->says)))
			fail_msg("case %zu %s: %d '%s', wanted %d '%s'", i, c->argv[1], code,
				 err.text, c->code, c->says ? c->says : "");
		if (code == 0)
			exl3_config_fini(&cfg);
	}
}

/* A user counts before a group, the first domain that names a group before later ones. */
static void domain_of_a_user(void **state)
{
	static const struct {
		uint32_t uid, gids[2];
		size_t nr, want;
	} cases[] = {{7, {0}, 0, 0},      {1, {0}, 0, 1},	{2, {10, 20}, 2, 2},
		     {7, {10}, 1, 1},     {7, {20, 10}, 2, 1}, {7, {30, 20}, 2, 2},
		     {10, {40}, 1, 0}};
	struct exl3_config cfg, fresh;
	struct exl3_error err;

	(void)state;
	test_code(exl3_config_parse_string("domain = a=1,@10\n[domain b]\nusers = @20 2\n", &cfg, &err),
		  0, &err);
	for (size_t i = 0; i < TEST_NR(cases); i++)
		assert_int_equal(exl3_config_domain_of(&cfg, cases[i].uid, cases[i].gids, cases[i].nr),
				 cases[i].want);
	/* A reload takes lists of users, in whatever order, and no other domains. */
	test_code(exl3_config_parse_string("domain = b=1\ndomain = a=2\n", &fresh, &err), 0, &err);
	assert_true(exl3_config_reload_domains(&cfg, &fresh));
	assert_int_equal(exl3_config_domain_of(&cfg, 1, NULL, 0), 2);
	assert_int_equal(exl3_config_domain_of(&cfg, 2, NULL, 0), 1);
	exl3_config_fini(&fresh);
	test_code(exl3_config_parse_string("domain = b=3\ndomain = c=4\n", &fresh, &err), 0, &err);
	assert_false(exl3_config_reload_domains(&cfg, &fresh));
	assert_int_equal(exl3_config_domain_of(&cfg, 1, NULL, 0), 2);
	exl3_config_fini(&fresh);
	exl3_config_fini(&cfg);
}

/* What --check-config prints is a file that means the same. */
static void printed_text_reads_back(void **state)
{
	struct exl3_config cfg, again;
	struct exl3_error err;
	char *text = NULL, *text2 = NULL;
	size_t bytes;
	FILE *f;

	(void)state;
	test_code(
		exl3_config_parse_string("node = 1\narena-max = 5M\ndeterministic = yes\n"
					 "[model a]\npath = /x\ndevice = 2\n[model b]\npath = /y\n",
					 &cfg, &err),
		0, &err);
	f = open_memstream(&text, &bytes);
	exl3_config_print(&cfg, f);
	fclose(f);
	test_code(exl3_config_parse_string(text, &again, &err), 0, &err);
	f = open_memstream(&text2, &bytes);
	exl3_config_print(&again, f);
	fclose(f);
	assert_string_equal(text, text2);
	assert_non_null(strstr(text, "model = b=/y\n"));
	free(text);
	free(text2);
	exl3_config_fini(&cfg);
	exl3_config_fini(&again);
}

/* What the supervisor hands to a worker, key by key, makes the same configuration of whatever was there. */
static void settings_carry_over(void **state)
{
	struct exl3_config cfg, other;
	char text[2048], *text1 = NULL, *text2 = NULL;
	struct exl3_error err;
	size_t bytes, n = 0;
	FILE *f;

	(void)state;
	test_code(exl3_config_parse_string("node = 1\narena-max = 5M\ndeterministic = yes\n"
					   "device = GPU-1=2\nlog-level = debug\nspin-us = 3\n",
					   &cfg, &err),
		  0, &err);
	memset(&other, 0, sizeof(other));
	for (size_t i = 0; exl3_config_setting(&cfg, &i, text, sizeof(text)); n++)
		test_code(exl3_config_set(&other, text, &err), 0, &err);
	assert_true(n > 15);
	f = open_memstream(&text1, &bytes);
	exl3_config_print(&cfg, f);
	fclose(f);
	f = open_memstream(&text2, &bytes);
	exl3_config_print(&other, f);
	fclose(f);
	assert_string_equal(text1, text2);
	assert_int_equal(exl3_config_set(&other, "threads", &err), -EINVAL);
	assert_int_equal(exl3_config_set(&other, "thraeds=1", &err), -EINVAL);
	assert_int_equal(exl3_config_set(&other, "threads=x", &err), -EINVAL);
	free(text1);
	free(text2);
	exl3_config_fini(&cfg);
	exl3_config_fini(&other);
}

static void reload_takes_what_it_may(void **state)
{
	struct exl3_config cfg, fresh;
	struct exl3_error err;

	(void)state;
	test_code(exl3_config_parse_string("spin-us = 1\n", &cfg, &err), 0, &err);
	test_code(exl3_config_parse_string("spin-us = 9\nlog-level = error\nqueue-depth = 9\n",
					   &fresh, &err),
		  0, &err);
	assert_int_equal(exl3_config_reload(&cfg, &fresh), 1); /* queue-depth needs a restart */
	assert_int_equal(cfg.spin_us, 9);
	assert_string_equal(cfg.log_level, "error");
	assert_int_equal(cfg.queue_depth, 8);
	exl3_config_fini(&cfg);
	exl3_config_fini(&fresh);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(texts),
		test_case(values),
		test_case(later_ones_win),
		test_case(models_replace_and_go),
		test_case(options_of_models),
		test_case(flags),
		test_case(printed_text_reads_back),
		test_case(domain_of_a_user),
		test_case(settings_carry_over),
		test_case(reload_takes_what_it_may),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
