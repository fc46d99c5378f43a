/* SPDX-License-Identifier: Apache-2.0 */
/* test_share.c - who loads a model, who waits, who adopts it; and what is kept, within its bounds. */
#include "tests/test.h"

#include "daemon/log.h"
#include "daemon/share.h"
#include "daemon/weights.h"
#include "tests/unit/make_ckpt.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define DOMAINS 3u

/* Domains without workers: what they are told is read from the other ends of their sockets. */
struct rig {
	struct exl3_loop *loop;
	struct exl3_config cfg;
	struct exl3_domains all;
	struct exl3_domain d[DOMAINS];
	uint32_t nr;
	int worker[DOMAINS]; /* owned: the workers' ends */
	struct exl3_share share;
	struct exl3_dev *dev;
	struct exl3_model *m;
	char *dir;
	uint64_t id; /* that USELESS and STALE name; 0: of the set that is kept now */
};

static void on_changed(struct exl3_domain *d)
{
	(void)d;
}

static void on_event(void *arg, uint32_t events)
{
	(void)arg;
	(void)events;
}

static void rig_open(struct rig *r, const char *config)
{
	struct exl3_dev_options opt = {.numa_node = -1, .threads = 1};
	struct mk *f = mk_new();
	struct exl3_error err;

	memset(r, 0, sizeof(*r));
	exl3_log_set_level((enum exl3_log_level)0);
	test_code(exl3_loop_new(&r->loop, &err), 0, &err);
	test_code(exl3_config_parse_string(config, &r->cfg, &err), 0, &err);
	r->all = (struct exl3_domains){.loop = r->loop, .cfg = &r->cfg, .changed = on_changed, .list = r->d};
	for (; r->nr < DOMAINS; r->nr++) {
		struct exl3_domain *d = &r->d[r->nr];
		char name[8];
		int pair[2];

		snprintf(name, sizeof(name), "d%u", r->nr);
		exl3_domain_init(d, &r->all, name);
		assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
		d->control_fd = pair[0];
		r->worker[r->nr] = pair[1];
		test_code(exl3_watch_add(r->loop, d->control_fd, POLLIN, EXL3_WATCH_LEVEL, on_event, d,
					 &d->watch), 0, &err);
	}
	exl3_share_init(&r->share, &r->cfg, r->d, &r->nr, r->loop);
	r->dir = mk_dir();
	mk_matrix(f, "a", 128, 128, 8, 2, 0);
	mk_tensor(f, "w", "F16", MK_DIMS(2, 3), NULL, 12);
	mk_save(f, r->dir, "x.safetensors", 0);
	test_code(exl3_backend_cpu.open(&opt, &r->dev, &err), 0, &err);
	test_code(exl3_model_new("m", r->dir, &exl3_backend_cpu, r->dev, &r->m, &err), 0, &err);
	test_code(exl3_model_load(r->m), 0, &r->m->error);
}

static void rig_close(struct rig *r)
{
	exl3_share_fini(&r->share);
	for (uint32_t i = 0; i < DOMAINS; i++) {
		r->d[i].worker = 0;
		exl3_domain_fini(&r->d[i]);
		close(r->worker[i]);
	}
	exl3_loop_free(r->loop);
	exl3_config_fini(&r->cfg);
	exl3_model_put(r->m);
	exl3_backend_cpu.close(r->dev);
	mk_rmdir(r->dir);
}

/* What a domain's worker says; @nr_fds of the loaded model go with it. */
static void says(struct rig *r, uint32_t i, enum exl3_sup_type type, const char *text,
		 unsigned flags, unsigned nr_fds)
{
	static struct exl3_sup_msg msg;
	int from[3] = {r->m->manifest_fd, r->m->slab->fd, r->m->tensor_fd}, fds[EXL3_FDS_MAX];

	msg = (struct exl3_sup_msg){.type = type, .flags = flags, .id = r->id};
	if (!msg.id && r->share.keep.sets)
		msg.id = r->share.keep.sets->id;
	snprintf(msg.text, sizeof(msg.text), "%s", text);
	for (unsigned k = 0; k < nr_fds; k++) {
		fds[k] = fcntl(from[k % 3], F_DUPFD_CLOEXEC, 3);
		assert_true(fds[k] >= 0);
	}
	assert_true(exl3_share_message(&r->share, &r->d[i], &msg, fds, nr_fds));
	for (unsigned k = 0; k < nr_fds && type == EXL3_SUP_KEEP; k++)
		assert_int_equal(fds[k], -1); /* taken, whatever became of them */
}

/* What a worker was told last of this kind, events apart: 0: nothing. */
static int told(struct rig *r, uint32_t i, const char *name, unsigned want_fds, unsigned *flags)
{
	static struct exl3_sup_msg msg;
	int fds[EXL3_FDS_MAX], rc;
	unsigned nr_fds;

	do {
		rc = exl3_sup_recv(r->worker[i], &msg, fds, &nr_fds, false);
	} while (rc > 0 && msg.type == EXL3_SUP_EVENT);
	if (rc <= 0)
		return 0;
	assert_string_equal(msg.text, name);
	assert_int_equal(nr_fds, want_fds);
	for (unsigned k = 0; k < nr_fds; k++)
		close(fds[k]);
	if (flags)
		*flags = msg.flags;
	return (int)msg.type;
}

static void expect(struct rig *r, int first, int second, int third)
{
	const int want[DOMAINS] = {first, second, third};

	for (uint32_t i = 0; i < DOMAINS; i++) {
		int got = told(r, i, "m", want[i] == EXL3_SUP_KEPT ? 3 : 0, NULL);

		if (got != want[i])
			fail_msg("domain %u was told %d, wanted %d", i, got, want[i]);
		assert_int_equal(told(r, i, "m", 0, NULL), 0); /* and nothing else */
	}
}

#define CONFIG "[model m]\npath = /m\n"

static void one_loads_others_wait(void **state)
{
	char users[64];
	struct rig r;

	(void)state;
	rig_open(&r, CONFIG);
	says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
	expect(&r, 0, EXL3_SUP_ALONE, 0);
	says(&r, 0, EXL3_SUP_WANT, "m", 0, 0);
	says(&r, 2, EXL3_SUP_WANT, "m", 0, 0);
	expect(&r, 0, 0, 0);
	says(&r, 1, EXL3_SUP_KEEP, "m", 0, 3);
	expect(&r, EXL3_SUP_KEPT, 0, EXL3_SUP_KEPT);
	assert_int_equal(r.share.keep.nr, 1);
	says(&r, 2, EXL3_SUP_ADOPTED, "m", 0, 0);
	exl3_share_users(&r.share, r.share.keep.sets, users, sizeof(users));
	assert_string_equal(users, "d1 d2");
	/* One that is started anew. */
	exl3_share_ended(&r.share, &r.d[1]);
	exl3_share_users(&r.share, r.share.keep.sets, users, sizeof(users));
	assert_string_equal(users, "d2");
	says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
	expect(&r, 0, EXL3_SUP_KEPT, 0);
	exl3_share_removed(&r.share, "m");
	assert_int_equal(r.share.keep.nr, 0);
	says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
	expect(&r, 0, EXL3_SUP_ALONE, 0);
	rig_close(&r);
}

/* A loader that dies, fails, or has nothing to keep: the next one is asked, one after the other. */
static void loader_is_lost(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, CONFIG);
	for (int way = 0; way < 2; way++) {
		for (uint32_t i = 0; i < DOMAINS; i++)
			says(&r, i, EXL3_SUP_WANT, "m", 0, 0);
		expect(&r, EXL3_SUP_ALONE, 0, 0);
		says(&r, 2, EXL3_SUP_OVER, "m", 0, 0); /* it is not the loader */
		expect(&r, 0, 0, 0);
		if (way)
			says(&r, 0, EXL3_SUP_OVER, "m", 0, 0);
		else
			exl3_share_ended(&r.share, &r.d[0]);
		expect(&r, 0, EXL3_SUP_ALONE, 0);
		exl3_share_ended(&r.share, &r.d[1]);
		expect(&r, 0, 0, EXL3_SUP_ALONE);
		says(&r, 2, EXL3_SUP_KEEP, "m", 0, 2); /* its tensor file is missing: nothing is kept */
		assert_int_equal(r.share.keep.nr, 0);
		assert_null(r.share.loads);
		expect(&r, 0, 0, 0);
	}
	/* One that waits dies: nobody is told anything. */
	says(&r, 0, EXL3_SUP_WANT, "m", 0, 0);
	says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
	expect(&r, EXL3_SUP_ALONE, 0, 0);
	exl3_share_ended(&r.share, &r.d[1]);
	says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
	expect(&r, 0, 0, 0);
	rig_close(&r);
}

static void useless_and_damaged(void **state)
{
	struct rig r;
	int wstatus;
	pid_t pid;

	(void)state;
	rig_open(&r, CONFIG);
	says(&r, 0, EXL3_SUP_WANT, "m", 0, 0);
	says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
	expect(&r, EXL3_SUP_ALONE, 0, 0);
	says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
	says(&r, 1, EXL3_SUP_ADOPTED, "m", 0, 0);
	expect(&r, 0, EXL3_SUP_KEPT, 0);
	pid = fork();
	if (pid == 0) {
		pause();
		_exit(0);
	}
	r.d[1].worker = pid;
	says(&r, 2, EXL3_SUP_WANT, "m", 0, 0);
	expect(&r, 0, 0, EXL3_SUP_KEPT);
	says(&r, 2, EXL3_SUP_USELESS, "m\nanother driver", 0, 0);
	expect(&r, 0, 0, EXL3_SUP_ALONE);
	assert_int_equal(r.share.keep.nr, 0);
	assert_int_equal(waitpid(pid, &wstatus, WNOHANG), 0); /* it may go on */
	says(&r, 2, EXL3_SUP_KEEP, "m\nanother driver", 0, 3);
	says(&r, 1, EXL3_SUP_ADOPTED, "m", 0, 0);
	says(&r, 2, EXL3_SUP_USELESS, "m\na hash is wrong", EXL3_SUP_DAMAGED, 0);
	assert_int_equal(waitpid(pid, &wstatus, 0), pid);
	assert_true(WIFSIGNALED(wstatus) && WTERMSIG(wstatus) == SIGKILL);
	expect(&r, 0, 0, EXL3_SUP_ALONE);
	rig_close(&r);
}

/* Two workers find the same set useless, or stale: the second one gets what the first has loaded. */
static void twice(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, CONFIG);
	for (int type = EXL3_SUP_USELESS; type <= EXL3_SUP_STALE; type++) {
		says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
		r.id = r.share.keep.sets->id;
		says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
		says(&r, 2, EXL3_SUP_WANT, "m", 0, 0);
		expect(&r, 0, EXL3_SUP_KEPT, EXL3_SUP_KEPT);
		says(&r, 1, (enum exl3_sup_type)type, "m\nother", EXL3_SUP_DAMAGED, 0);
		expect(&r, 0, EXL3_SUP_ALONE, 0);
		assert_int_equal(r.share.keep.nr, type == EXL3_SUP_STALE);
		says(&r, 2, (enum exl3_sup_type)type, "m\nother", EXL3_SUP_DAMAGED, 0);
		expect(&r, 0, 0, 0);
		says(&r, 1, EXL3_SUP_KEEP, "m", 0, 3);
		assert_int_not_equal(r.share.keep.sets->id, r.id);
		expect(&r, 0, 0, EXL3_SUP_KEPT);
		says(&r, 0, (enum exl3_sup_type)type, "m\nother", EXL3_SUP_DAMAGED, 0); /* late */
		expect(&r, EXL3_SUP_KEPT, 0, 0);
		assert_int_equal(r.share.keep.nr, 1);
		r.id = 0;
	}
	/* The files cannot be loaded: the next one's turn to try. */
	says(&r, 1, EXL3_SUP_STALE, "m", 0, 0);
	says(&r, 2, EXL3_SUP_STALE, "m", 0, 0);
	expect(&r, 0, EXL3_SUP_ALONE, 0);
	says(&r, 1, EXL3_SUP_ADOPTED, "m\nrefused", 0, 0);
	expect(&r, 0, 0, EXL3_SUP_ALONE);
	says(&r, 2, EXL3_SUP_ADOPTED, "m\nrefused", 0, 0);
	assert_null(r.share.loads);
	rig_close(&r);
}

static void never_and_verify(void **state)
{
	unsigned flags = 0;
	struct rig r;

	(void)state;
	rig_open(&r, "adopt = never\n" CONFIG);
	says(&r, 0, EXL3_SUP_WANT, "m", 0, 0);
	says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
	expect(&r, EXL3_SUP_ALONE, EXL3_SUP_ALONE, 0);
	says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
	assert_int_equal(r.share.keep.nr, 0);
	/* Kept before that was the configuration. */
	r.cfg.adopt[0] = 'N';
	says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
	assert_int_equal(r.share.keep.nr, 1);
	r.cfg.adopt[0] = 'n';
	says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
	expect(&r, 0, EXL3_SUP_ALONE, 0);
	assert_int_equal(r.share.keep.nr, 0);
	rig_close(&r);

	rig_open(&r, "adopt = verify\n" CONFIG);
	says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
	says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
	assert_int_equal(told(&r, 1, "m", 3, &flags), EXL3_SUP_KEPT);
	assert_int_equal(flags, EXL3_SUP_VERIFY_ALL);
	/* Unloaded by a client of another domain while it was on its way. */
	exl3_share_removed(&r.share, "m");
	exl3_config_remove_model(&r.cfg, "m");
	says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
	assert_int_equal(r.share.keep.nr, 0);
	rig_close(&r);
}

/* What a client has had mapped is hashed as a whole from then on: he may have it still, whoever adopts it. That a
 * tenant might map it is no reason. */
static void after_mappers(void **state)
{
	static const struct {
		const char *config;
		bool mapped;
	} cases[] = {
		{CONFIG "[tenant t]\nusers = 1\nmapped = yes\n", true},
		{CONFIG "[tenant t]\nusers = 1\nmapped = prefer\n", false},
		{CONFIG "[tenant t]\nusers = 1\n", false},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		unsigned flags = 0, all = cases[i].mapped ? EXL3_SUP_VERIFY_ALL : 0;
		struct rig r;
		uint64_t id;

		rig_open(&r, cases[i].config);
		says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
		says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
		assert_int_equal(told(&r, 1, "m", 3, &flags), EXL3_SUP_KEPT);
		assert_int_equal(flags, 0);
		id = exl3_keep_find(&r.share.keep, "m")->id;
		if (cases[i].mapped)
			says(&r, 1, EXL3_SUP_MAPPED, "m", 0, 0);
		says(&r, 1, EXL3_SUP_MAPPED, "other", 0, 0); /* of a model that nobody keeps */
		assert_int_equal(exl3_keep_find(&r.share.keep, "m")->mapped, cases[i].mapped);
		/* Its id says so, for systemd, and is the same all the same. */
		assert_int_equal(exl3_keep_find(&r.share.keep, "m")->id, id | (cases[i].mapped ? EXL3_KEEP_MAPPED_ID : 0));
		exl3_share_ended(&r.share, &r.d[1]);
		for (int again = 0; again < 2; again++) {
			says(&r, 1, EXL3_SUP_WANT, "m", 0, 0);
			assert_int_equal(told(&r, 1, "m", 3, &flags), EXL3_SUP_KEPT);
			assert_int_equal(flags, all);
			says(&r, 1, EXL3_SUP_ADOPTED, "m", 0, 0);
			exl3_share_ended(&r.share, &r.d[1]);
		}
		/* Whoever was given them before finds them of no use: they are the same ones. */
		r.id = id;
		says(&r, 0, EXL3_SUP_USELESS, "m\nbroken", 0, 0);
		assert_null(exl3_keep_find(&r.share.keep, "m"));
		rig_close(&r);
	}
}

/* What a worker hands over is checked as far as the supervisor looks at it. */
static void hostile(void **state)
{
	struct exl3_error err;
	int fds[EXL3_FDS_MAX], pipe_fds[2];
	struct rig r;

	(void)state;
	rig_open(&r, CONFIG "[model n]\npath = /n\n");
	for (unsigned nr = 0; nr < EXL3_FDS_MAX; nr++) {
		if (nr != 3)
			says(&r, 0, EXL3_SUP_KEEP, "m", 0, nr);
	}
	says(&r, 0, EXL3_SUP_KEEP, "n", 0, 3); /* another model's */
	assert_int_equal(r.share.keep.nr, 0);
	assert_int_equal(pipe(pipe_fds), 0); /* reading it would take for ever */
	fds[0] = pipe_fds[0];
	fds[1] = pipe_fds[1];
	assert_int_equal(exl3_keep_put(&r.share.keep, "m", fds, 2, &err), -EINVAL);
	assert_int_equal(fds[0], -1);
	/* Over and over: one set, no descriptor more. */
	for (int i = 0; i < 20; i++)
		says(&r, 0, EXL3_SUP_KEEP, "m", 0, 3);
	assert_int_equal(r.share.keep.nr, 1);
	assert_false(exl3_keep_drop(&r.share.keep, "n"));
	assert_true(exl3_keep_drop(&r.share.keep, "m"));
	assert_false(exl3_keep_drop(&r.share.keep, "m"));
	rig_close(&r);
}

/* Descriptors that do not fit into the process that gets them: whose they are is known all the same, or he
 * would wait for an answer for ever. */
static void descriptors_that_do_not_fit(void **state)
{
	static struct exl3_sup_msg out = {.type = EXL3_SUP_KEPT, .id = 7}, in;
	int pair[2], fds[EXL3_FDS_MAX], rc;
	struct rlimit old, low;
	unsigned nr_fds = 1;

	(void)state;
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(exl3_sup_send(pair[0], &out, "a much longer text before it", NULL, 0, false), 0);
	assert_int_equal(exl3_sup_send(pair[0], &out, "model", pair, 2, false), 0);
	assert_int_equal(exl3_sup_recv(pair[1], &in, fds, &nr_fds, false), 1);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	low = old;
	low.rlim_cur = (rlim_t)pair[1] + 1;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	rc = exl3_sup_recv(pair[1], &in, fds, &nr_fds, false);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	assert_int_equal(rc, -EPROTO);
	assert_int_equal(nr_fds, 0);
	assert_int_equal(in.type, EXL3_SUP_KEPT);
	assert_int_equal(in.id, 7);
	assert_string_equal(in.text, "model");
	close(pair[0]);
	close(pair[1]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(one_loads_others_wait), test_case(loader_is_lost),
		test_case(useless_and_damaged),   test_case(never_and_verify),
		test_case(hostile),               test_case(twice),
		test_case(after_mappers),  test_case(descriptors_that_do_not_fit),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
