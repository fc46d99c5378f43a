/* SPDX-License-Identifier: Apache-2.0 */
/* test_executor.c - two executors of one device that wake one loop, and naps that end when work comes. */
#include "tests/test.h"

#include "kernels/executor.h"

#include <poll.h>

enum { ROUNDS = 2000 };

/* What runs is in flight until it has been looked at @looks times. */
struct engine {
	struct exl3_executor *ex;
	void *tags[EXL3_EXECUTOR_QUEUE];
	unsigned nr, looks;
	uint64_t nap_ns;
	uint64_t begun_ns; /* when the last work began */
};

static bool begin(void *arg, const struct exl3_work *work)
{
	struct engine *e = arg;

	e->tags[e->nr++] = work->tag;
	__atomic_store_n(&e->begun_ns, exl3_now_ns(), __ATOMIC_RELEASE);
	return true;
}

static unsigned progress(void *arg)
{
	struct engine *e = arg;

	if (e->nr && e->looks) {
		e->looks--;
		if (e->nap_ns)
			exl3_executor_nap(e->ex, e->nap_ns);
		return e->nr;
	}
	while (e->nr)
		exl3_executor_done(e->ex, e->tags[--e->nr], 0, 0);
	return 0;
}

static const struct exl3_executor_ops engine_ops = {.begin = begin, .progress = progress};

static void engine_open(struct engine *e)
{
	struct exl3_error err;

	memset(e, 0, sizeof(*e));
	test_code(exl3_executor_new(&engine_ops, e, 0, &e->ex, &err), 0, &err);
}

/* One result of either; the loop sleeps as the daemon's does. */
static const void *next_done(struct engine *main, struct engine *other)
{
	for (;;) {
		struct pollfd p = {.fd = exl3_executor_event_fd(main->ex), .events = POLLIN};
		struct exl3_done done;

		if (exl3_executor_poll(main->ex, &done, 1) || exl3_executor_poll(other->ex, &done, 1))
			return done.tag;
		if (exl3_executor_arm(main->ex))
			assert_int_equal(poll(&p, 1, 20000), 1);
	}
}

static void one_loop(void **state)
{
	struct engine main, other;
	struct exl3_work work[2] = {{.op = EXL3_OP_NOP}, {.op = EXL3_OP_NOP}};

	(void)state;
	engine_open(&main);
	engine_open(&other);
	exl3_executor_join(other.ex, main.ex);
	work[0].tag = &main;
	work[1].tag = &other;
	for (int i = 0; i < ROUNDS; i++) {
		const void *a, *b;

		assert_int_equal(exl3_executor_submit(other.ex, &work[1]), 0);
		assert_ptr_equal(next_done(&main, &other), &other);
		assert_int_equal(exl3_executor_submit(main.ex, &work[0]), 0);
		assert_int_equal(exl3_executor_submit(other.ex, &work[1]), 0);
		a = next_done(&main, &other);
		b = next_done(&main, &other);
		assert_true((a == &main && b == &other) || (a == &other && b == &main));
	}
	assert_null(exl3_executor_free(other.ex));
	assert_null(exl3_executor_free(main.ex));
}

/* While something is in flight the thread may sleep long, and begins what comes at once. */
static void naps(void **state)
{
	struct engine e;
	struct exl3_work work = {.op = EXL3_OP_NOP};
	struct exl3_done done;
	uint64_t first, now;

	(void)state;
	engine_open(&e);
	e.nap_ns = 20000000000ull;
	e.looks = 2;
	assert_int_equal(exl3_executor_submit(e.ex, &work), 0);
	while (!(first = __atomic_load_n(&e.begun_ns, __ATOMIC_ACQUIRE)))
		;
	usleep(20000);
	now = exl3_now_ns();
	assert_int_equal(exl3_executor_submit(e.ex, &work), 0);
	while (__atomic_load_n(&e.begun_ns, __ATOMIC_ACQUIRE) == first)
		assert_true(exl3_now_ns() - now < 10000000000ull);
	assert_int_equal(exl3_executor_submit(e.ex, &work), 0);
	for (int n = 0; n < 3;) {
		n += exl3_executor_poll(e.ex, &done, 1);
		assert_true(exl3_now_ns() - now < 15000000000ull);
	}
	/* So does the end. */
	e.looks = 1;
	assert_int_equal(exl3_executor_submit(e.ex, &work), 0);
	usleep(20000);
	assert_null(exl3_executor_free(e.ex));
	assert_true(exl3_now_ns() - now < 15000000000ull);
}

int main(void)
{
	const struct CMUnitTest tests[] = {test_case(one_loop), test_case(naps)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
