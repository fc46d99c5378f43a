/* SPDX-License-Identifier: Apache-2.0 */
/* test_client.c - libexl3 against a daemon that answers wrongly, late, out of order, or dies. */
#include "tests/test.h"
#include "tests/unit/fake_daemon.h"

#include "client/exl3.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

/* A daemon, a client of it, and whatever a test opens. */
struct rig {
	struct fake_daemon d;
	struct exl3_client *c;
	struct exl3_channel *ch;
};

static void ok(int e, const char *what)
{
	if (e < 0)
		fail_msg("%s: %d, %s", what, e, exl3_last_error());
}

static void wants(int e, int want, const char *what)
{
	if (e != want)
		fail_msg("%s: %d (%s), wanted %d", what, e, e < 0 ? exl3_last_error() : "", want);
}

static void rig_open(struct rig *r, uint32_t entries)
{
	memset(r, 0, sizeof(*r));
	fake_start(&r->d);
	ok(exl3_connect(r->d.path, "test", &r->c), "connect");
	if (entries)
		ok(exl3_channel_new(r->c, entries, &r->ch), "channel");
}

static void rig_close(struct rig *r)
{
	r->c = exl3_close(r->c); /* with whatever is still open */
	fake_stop(&r->d);
}

static void nop(struct rig *r, uint64_t user_data)
{
	struct exl3_sqe *sqe = exl3_sq_get(r->ch);

	if (!sqe)
		fail_msg("exl3_sq_get: %s", exl3_last_error());
	exl3_prep_nop(sqe);
	sqe->user_data = user_data;
}

static void completes(struct rig *r, uint64_t user_data, int result)
{
	struct exl3_cqe cqe;

	wants(exl3_wait(r->ch, &cqe, UINT64_MAX), 1, "exl3_wait");
	assert_int_equal(cqe.user_data, user_data);
	assert_int_equal(cqe.result, result);
}

/* ---- connecting ---- */

static void nobody_there(void **state)
{
	char dir[] = "/tmp/exl3-none-XXXXXX", path[64], longer[200];
	struct sockaddr_un sa = {.sun_family = AF_UNIX};
	struct exl3_client *c = NULL;
	int fd;

	(void)state;
	assert_non_null(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/s", dir);
	wants(exl3_connect(path, NULL, &c), -ENOENT, "no socket");
	assert_non_null(strstr(exl3_last_error(), path));
	strcpy(sa.sun_path, path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof(sa)), 0);
	close(fd);
	wants(exl3_connect(path, NULL, &c), -ECONNREFUSED, "nobody listens");
	memset(longer, 'a', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = 0;
	wants(exl3_connect(longer, NULL, &c), -ENAMETOOLONG, "long path");
	assert_null(c);
	assert_null(exl3_close(NULL));
	assert_false(exl3_alive(NULL));
	unlink(path);
	rmdir(dir);
}

static void hello_goes_wrong(void **state)
{
	static const struct {
		enum fake_fault fault;
		int want;
	} rows[] = {
		{FAKE_REFUSE, -EDQUOT},     {FAKE_POSITIVE_CODE, -EPROTO},
		{FAKE_WRONG_ID, -EPROTO},   {FAKE_GARBAGE, -EPROTO},
		{FAKE_NO_BODY, -EPROTO},    {FAKE_OTHER_VERSION, -EPROTO},
		{FAKE_SURPLUS_FD, -EPROTO}, {FAKE_HANG_UP, -ESTALE},
		{FAKE_TURN_AWAY, -EAGAIN},
	};
	struct fake_daemon d;

	(void)state;
	fake_start(&d);
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		struct exl3_client *c = NULL;

		fake_fault(&d, rows[i].fault);
		wants(exl3_connect(d.path, NULL, &c), rows[i].want, "connect");
		assert_null(c);
	}
	fake_stop(&d);
}

/* Whether the daemon's end comes before, in or after our first request: what it has said is heard. */
static void turned_away(void **state)
{
	struct fake_daemon d;

	(void)state;
	fake_start(&d);
	for (int i = 0; i < 200; i++) {
		struct exl3_client *c = NULL;

		fake_fault(&d, i % 2 ? FAKE_TURN_AWAY_UNREAD : FAKE_TURN_AWAY);
		wants(exl3_connect(d.path, NULL, &c), -EAGAIN, "connect");
		assert_string_equal(exl3_last_error(), "come back later");
		assert_null(c);
	}
	fake_stop(&d);
}

/* ---- control ---- */

static void models_and_modules(void **state)
{
	struct exl3_module_info info;
	struct exl3_shard_info shard;
	struct exl3_model *m;
	struct exl3_module *mod;
	struct rig r;
	char longer[EXL3_NAME_MAX + 2];

	(void)state;
	rig_open(&r, 0);
	ok(exl3_model_open(r.c, "m", &m), "model");
	assert_string_equal(exl3_model_fingerprint(m), "cafe");
	ok(exl3_module_open(m, "x", EXL3_KIND_LINEAR, &mod), "module");
	exl3_module_get_info(mod, &info);
	assert_int_equal(info.k, 256);
	assert_int_equal(info.k_logical, 192);
	assert_int_equal(info.n_logical, 160);
	assert_int_equal(info.nr_shards, 1);
	ok(exl3_module_get_shard(mod, 0, &shard), "shard");
	assert_int_equal(shard.rate2, 7);
	wants(exl3_module_get_shard(mod, 1, &shard), -EINVAL, "shard past the end");
	assert_int_equal(exl3_module_handle(mod), 9);
	assert_null(exl3_module_close(mod));

	fake_fault(&r.d, FAKE_OTHER_FINGERPRINT);
	wants(exl3_module_open(m, "x", EXL3_KIND_ANY, &mod), -ESTALE, "other content");
	wants(exl3_module_open(m, "", EXL3_KIND_ANY, &mod), -EINVAL, "empty name");
	wants(exl3_module_open(m, NULL, EXL3_KIND_ANY, &mod), -EINVAL, "no name");
	wants(exl3_module_open(m, "x", 4, &mod), -EINVAL, "no such kind");
	memset(longer, 'a', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = 0;
	wants(exl3_model_open(r.c, longer, &m), -EINVAL, "long name");
	longer[EXL3_NAME_MAX] = 0;
	ok(exl3_model_open(r.c, longer, &m), "longest name");
	fake_fault(&r.d, FAKE_REFUSE);
	wants(exl3_model_open(r.c, "m", &m), -EDQUOT, "refused");
	assert_string_equal(exl3_last_error(), "no more of that");
	assert_true(exl3_alive(r.c)); /* a refusal is an answer */
	rig_close(&r);
}

/* Answers that cannot be believed; those after which the connection cannot be used end it. */
static void answers_that_lie(void **state)
{
	static const struct {
		enum fake_fault fault;
		bool channel, alive;
	} rows[] = {
		{FAKE_NO_FDS, true, true},        {FAKE_SURPLUS_FD, true, true},
		{FAKE_WRONG_SIZE, true, true},    {FAKE_BAD_HEADER, true, true},
		{FAKE_OTHER_ENTRIES, true, true}, {FAKE_NO_BODY, true, true},
		{FAKE_WRONG_ID, true, false},     {FAKE_GARBAGE, true, false},
		{FAKE_NO_FDS, false, true},       {FAKE_SURPLUS_FD, false, true},
		{FAKE_WRONG_SIZE, false, true},   {FAKE_UNSEALED, false, true},
		{FAKE_WRONG_ID, false, false},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		struct exl3_channel *ch = NULL;
		struct exl3_arena *a = NULL;
		struct rig r;
		int e;

		rig_open(&r, 0);
		fake_fault(&r.d, rows[i].fault);
		e = rows[i].channel ? exl3_channel_new(r.c, 8, &ch) : exl3_arena_new(r.c, 100, &a);
		wants(e, -EPROTO, "an answer that lies");
		assert_null(ch);
		assert_null(a);
		assert_int_equal(exl3_alive(r.c), rows[i].alive);
		e = exl3_arena_new(r.c, 100, &a);
		wants(e, rows[i].alive ? 0 : -ESTALE, "the next request");
		rig_close(&r);
	}
}

static void another_daemon_answers(void **state)
{
	struct exl3_arena *a;
	struct rig r;

	(void)state;
	rig_open(&r, 0);
	fake_fault(&r.d, FAKE_OTHER_INSTANCE);
	wants(exl3_arena_new(r.c, 100, &a), -ESTALE, "another instance");
	rig_close(&r);
}

static void *many_opens(void *arg)
{
	struct rig *r = arg;
	struct exl3_model *m;

	for (int i = 0; i < 200; i++) {
		if (exl3_model_open(r->c, "m", &m) < 0)
			return (void *)1;
		exl3_model_close(m);
	}
	return NULL;
}

static void threads_share_a_client(void **state)
{
	pthread_t t[3];
	void *bad;
	struct rig r;

	(void)state;
	rig_open(&r, 0);
	for (size_t i = 0; i < TEST_NR(t); i++)
		assert_int_equal(pthread_create(&t[i], NULL, many_opens, &r), 0);
	for (size_t i = 0; i < TEST_NR(t); i++) {
		assert_int_equal(pthread_join(t[i], &bad), 0);
		assert_null(bad);
	}
	rig_close(&r);
}

/* ---- arenas ---- */

static void arenas(void **state)
{
	struct exl3_arena *a;
	struct rig r;
	char *base, *p;
	size_t bytes;

	(void)state;
	rig_open(&r, 0);
	ok(exl3_arena_new(r.c, 5000, &a), "arena");
	base = exl3_arena_ptr(a);
	bytes = exl3_arena_bytes(a);
	assert_int_equal(bytes, 8192);
	assert_int_equal(exl3_arena_ref(a, base), EXL3_REF(3, 0));
	assert_int_equal(exl3_arena_ref(a, base + bytes - 1), EXL3_REF(3, bytes - 1));
	assert_int_equal(exl3_arena_ref(a, base + bytes), EXL3_REF_NONE);
	assert_int_equal(exl3_arena_ref(a, base - 1), EXL3_REF_NONE);
	assert_int_equal(exl3_arena_ref(a, NULL), EXL3_REF_NONE);
	assert_ptr_equal(exl3_arena_alloc(a, 1), base);
	assert_ptr_equal(exl3_arena_alloc(a, 64), base + 64);
	assert_null(exl3_arena_alloc(a, SIZE_MAX));
	assert_null(exl3_arena_alloc(a, bytes - 127));
	p = exl3_arena_alloc(a, bytes - 128);
	assert_ptr_equal(p, base + 128);
	memset(p, 1, bytes - 128);
	assert_null(exl3_arena_alloc(a, 1));
	assert_null(exl3_arena_free(a));
	rig_close(&r);
}

static void pointers_outside_the_arena(void **state)
{
	struct exl3_model *m;
	struct exl3_module *mod;
	struct exl3_arena *a;
	struct rig r;
	uint16_t *in, stack[256] = {0};
	float *out;

	(void)state;
	rig_open(&r, 2);
	ok(exl3_model_open(r.c, "m", &m), "model");
	ok(exl3_module_open(m, "x", EXL3_KIND_LINEAR, &mod), "module"); /* 192 in, 160 out */
	ok(exl3_arena_new(r.c, 4096, &a), "arena");
	in = exl3_arena_alloc(a, 192 * 2);
	out = exl3_arena_alloc(a, 160 * 4);
	wants(exl3_linear(r.ch, mod, a, in, EXL3_F16, out, EXL3_F32, 1), 0, "all inside");
	wants(exl3_linear(r.ch, mod, a, stack, EXL3_F16, out, EXL3_F32, 1), -EFAULT, "x outside");
	assert_non_null(strstr(exl3_last_error(), "x:"));
	wants(exl3_linear(r.ch, mod, a, in, EXL3_F16, stack, EXL3_F32, 1), -EFAULT, "y outside");
	wants(exl3_linear(r.ch, mod, a, NULL, EXL3_F16, out, EXL3_F32, 1), -EFAULT, "x NULL");
	wants(exl3_linear(r.ch, mod, a, in, EXL3_F16, out, EXL3_F32, 6), -EFAULT,
	      "y reaches past the end");
	wants(exl3_linear(r.ch, mod, a, in, EXL3_F16, out, EXL3_F32, UINT32_MAX), -EFAULT,
	      "far past the end");
	wants(exl3_moe(r.ch, mod, a, in, EXL3_F16, out, EXL3_F32, 1, stack, EXL3_I32, in, EXL3_F16,
		       2, NULL),
	      -EFAULT, "ids outside");
	rig_close(&r);
}

/* ---- requests ---- */

static void in_order_and_full(void **state)
{
	struct exl3_cqe cqe;
	struct rig r;
	uint64_t sent = 0;

	(void)state;
	rig_open(&r, 4);
	wants(exl3_wait(r.ch, &cqe, UINT64_MAX), 0, "nothing outstanding");
	fake_mode(&r.d, FAKE_HOLD);
	/* The SQ is emptied by the daemon, the CQ's eight entries are the limit. */
	while (sent < 8) {
		nop(&r, ++sent);
		wants(exl3_submit(r.ch), 1, "submit");
		fake_wait_taken(&r.d, (uint32_t)sent);
	}
	assert_null(exl3_sq_get(r.ch));
	assert_non_null(strstr(exl3_last_error(), "full"));
	wants(exl3_peek(r.ch, &cqe), 0, "peek");
	wants(exl3_wait(r.ch, &cqe, 1000000), 0, "time is up");
	fake_mode(&r.d, FAKE_ANSWER);
	for (uint64_t i = 1; i <= 8; i++)
		completes(&r, i, 0);
	nop(&r, 9);
	nop(&r, 10);
	wants(exl3_submit(r.ch), 2, "submit");
	wants(exl3_submit(r.ch), 0, "nothing new");
	completes(&r, 9, 0);
	completes(&r, 10, 0);
	rig_close(&r);
}

/* Out-of-order completions, as of CANCEL: each request ends once, and room for them never runs out. */
static void out_of_order(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 4);
	fake_mode(&r.d, FAKE_REVERSE);
	for (uint64_t round = 0; round < 50; round++) {
		for (uint64_t i = 1; i <= 3; i++)
			nop(&r, i);
		wants(exl3_submit(r.ch), 3, "submit");
		for (uint64_t i = 3; i >= 1; i--)
			completes(&r, i, 0);
	}
	rig_close(&r);
}

static void calls_asleep(void **state)
{
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 2);
	exl3_channel_set_spin(r.ch, 0);
	for (int i = 0; i < 500; i++) {
		nop(&r, 5);
		wants(exl3_call(r.ch, &cqe), 0, "call");
		assert_int_equal(cqe.user_data, 5);
	}
	assert_true(exl3_channel_syscalls(r.ch) > 0);
	wants(exl3_call(r.ch, &cqe), -EBUSY, "nothing prepared");
	nop(&r, 1);
	exl3_submit(r.ch);
	nop(&r, 2);
	wants(exl3_call(r.ch, &cqe), -EBUSY, "another one outstanding");
	rig_close(&r);
}

static void poll_loop(void **state)
{
	struct pollfd p;
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 4);
	p = (struct pollfd){.fd = exl3_fd(r.ch), .events = POLLIN};
	assert_int_equal(poll(&p, 1, 0), 0);
	for (uint64_t i = 1; i <= 100; i++) {
		int e;

		nop(&r, i);
		exl3_submit(r.ch);
		do {
			assert_int_equal(poll(&p, 1, -1), 1);
			exl3_fd_clear(r.ch);
			e = exl3_peek(r.ch, &cqe);
		} while (e == 0);
		wants(e, 1, "peek after poll");
		assert_int_equal(cqe.user_data, i);
	}
	rig_close(&r);
}

/* ---- the end ---- */

struct waiter {
	struct rig *r;
	int got[16], nr;
	int last;
};

/* Reaps until there is nothing more; asleep most of the time. */
static void *reap_all(void *arg)
{
	struct waiter *w = arg;
	struct exl3_cqe cqe;

	while ((w->last = exl3_wait(w->r->ch, &cqe, UINT64_MAX)) == 1 && w->nr < 16)
		if (cqe.result == -ESTALE)
			w->got[w->nr++] = (int)cqe.user_data;
	return NULL;
}

/* @spin_ns: whoever waits is asleep, or spins. @connection: the daemon dies, or fails the channel. */
static void ends_while_waiting(uint64_t spin_ns, bool connection)
{
	struct waiter w = {0};
	struct rig r;
	pthread_t t;

	rig_open(&r, 8);
	exl3_channel_set_spin(r.ch, spin_ns);
	fake_mode(&r.d, FAKE_HOLD);
	for (uint64_t i = 1; i <= 5; i++)
		nop(&r, i);
	wants(exl3_submit(r.ch), 5, "submit");
	fake_wait_taken(&r.d, 5);
	w.r = &r;
	assert_int_equal(pthread_create(&t, NULL, reap_all, &w), 0);
	usleep(5000); /* most likely it waits by then; right in any case */
	if (connection)
		fake_die(&r.d);
	else
		fake_end_channels(&r.d);
	pthread_join(t, NULL);
	assert_int_equal(w.nr, 5);
	for (int i = 0; i < 5; i++)
		assert_int_equal(w.got[i], i + 1);
	assert_int_equal(w.last, -ESTALE);
	assert_int_equal(exl3_submit(r.ch), -ESTALE);
	assert_null(exl3_sq_get(r.ch));
	/* A process that dies closes one socket after the other: the channel's may be seen to end first. */
	while (connection && exl3_alive(r.c))
		usleep(100);
	assert_int_equal(exl3_alive(r.c), !connection);
	if (!connection) { /* a new channel of the same connection works */
		exl3_channel_free(r.ch);
		fake_mode(&r.d, FAKE_ANSWER);
		ok(exl3_channel_new(r.c, 2, &r.ch), "another channel");
		nop(&r, 1);
		wants(exl3_call(r.ch, NULL), 0, "call");
	}
	rig_close(&r);
}

static void daemon_dies_while_asleep(void **state)
{
	(void)state;
	ends_while_waiting(0, true);
}

static void daemon_dies_while_spinning(void **state)
{
	(void)state;
	ends_while_waiting(UINT64_MAX, true);
}

static void channel_fails_while_asleep(void **state)
{
	(void)state;
	ends_while_waiting(0, false);
}

static void results_before_the_end_count(void **state)
{
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 8);
	nop(&r, 1);
	nop(&r, 2);
	exl3_submit(r.ch);
	while (__atomic_load_n(&r.d.channels[0].ring.hdr->cq_tail.v, __ATOMIC_ACQUIRE) !=
	       UINT32_MAX - 1)
		usleep(100);
	fake_mode(&r.d, FAKE_HOLD);
	nop(&r, 3);
	exl3_submit(r.ch);
	fake_wait_taken(&r.d, 3);
	nop(&r, 4); /* never submitted: ends without a completion */
	fake_die(&r.d);
	while (exl3_alive(r.c))
		usleep(100);
	completes(&r, 1, 0);
	completes(&r, 2, 0);
	completes(&r, 3, -ESTALE);
	wants(exl3_wait(r.ch, &cqe, UINT64_MAX), -ESTALE, "nothing left");
	wants(exl3_peek(r.ch, &cqe), -ESTALE, "nothing left");
	wants(exl3_submit(r.ch), -ESTALE, "submit");
	wants(exl3_peek(r.ch, &cqe), -ESTALE, "the one that was not submitted");
	rig_close(&r);
}

static void poll_sees_the_end(void **state)
{
	struct pollfd p;
	struct rig r;

	(void)state;
	rig_open(&r, 2);
	p = (struct pollfd){.fd = exl3_fd(r.ch), .events = POLLIN};
	fake_die(&r.d);
	assert_int_equal(poll(&p, 1, -1), 1);
	exl3_fd_clear(r.ch);
	rig_close(&r);
}

static void rings_that_lie(void **state)
{
	static const enum fake_mode modes[] = {FAKE_WRONG_USER, FAKE_TOO_MANY};

	(void)state;
	for (size_t i = 0; i < TEST_NR(modes); i++) {
		struct exl3_cqe cqe;
		struct rig r;

		rig_open(&r, 4);
		fake_mode(&r.d, modes[i]);
		nop(&r, 1);
		nop(&r, 2);
		exl3_submit(r.ch);
		completes(&r, 1, -ESTALE);
		completes(&r, 2, -ESTALE);
		wants(exl3_wait(r.ch, &cqe, UINT64_MAX), -ESTALE, "nothing left");
		rig_close(&r);
	}
}

static void child_after_fork(void **state)
{
	struct rig r;
	pid_t pid;
	int status;

	(void)state;
	rig_open(&r, 2);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		struct exl3_arena *a;
		struct exl3_cqe cqe;

		alarm(20);
		if (exl3_alive(r.c) || exl3_arena_new(r.c, 100, &a) != -EPERM ||
		    exl3_sq_get(r.ch) || exl3_submit(r.ch) != -EPERM ||
		    exl3_peek(r.ch, &cqe) != -EPERM ||
		    exl3_wait(r.ch, &cqe, UINT64_MAX) != -EPERM || exl3_channel_free(r.ch) ||
		    exl3_close(r.c))
			_exit(1);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	nop(&r, 1); /* the parent does not notice */
	wants(exl3_call(r.ch, NULL), 0, "call");
	rig_close(&r);
}

static void result_texts(void **state)
{
	static const struct {
		struct exl3_cqe cqe;
		const char *word;
	} rows[] = {
		{{.result = 0}, "done"},
		{{.result = -ENOENT}, "no such module"},
		{{.result = -EINVAL, .detail = EXL3_DETAIL_ALIGN}, "16-byte aligned"},
		{{.result = -EINVAL, .detail = 12345}, "wrong"},
		{{.result = -EINVAL, .detail = UINT64_MAX}, "wrong"},
		{{.result = -12345}, "unknown"},
		{{.result = 1}, "unknown"},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++)
		assert_non_null(strstr(exl3_result_text(&rows[i].cqe), rows[i].word));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(nobody_there),
		test_case(hello_goes_wrong),
		test_case(turned_away),
		test_case(models_and_modules),
		test_case(answers_that_lie),
		test_case(another_daemon_answers),
		test_case(threads_share_a_client),
		test_case(arenas),
		test_case(pointers_outside_the_arena),
		test_case(in_order_and_full),
		test_case(out_of_order),
		test_case(calls_asleep),
		test_case(poll_loop),
		test_case(daemon_dies_while_asleep),
		test_case(daemon_dies_while_spinning),
		test_case(channel_fails_while_asleep),
		test_case(results_before_the_end_count),
		test_case(poll_sees_the_end),
		test_case(rings_that_lie),
		test_case(child_after_fork),
		test_case(result_texts),
	};

	alarm(300); /* a wait that never ends is a failure, not a hang */
	return cmocka_run_group_tests_name("client", tests, NULL, NULL);
}
