/* SPDX-License-Identifier: Apache-2.0 */
/* test_loop.c - readiness, wake-ups and timers of the event loop, and jobs beside it. */
#include "tests/test.h"

#include "daemon/jobs.h"
#include "daemon/loop.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

struct seen {
	struct exl3_loop *loop;
	struct exl3_watch *watch;
	int fd;
	unsigned calls;
	uint32_t events;
	bool drop; /* the callback drops its own watch */
};

static void on_event(void *arg, uint32_t events)
{
	struct seen *s = arg;

	s->calls++;
	s->events |= events;
	if (s->drop)
		s->watch = exl3_watch_drop(s->loop, s->watch);
}

static struct exl3_loop *loop_new(void)
{
	struct exl3_loop *loop = NULL;
	struct exl3_error err;

	test_code(exl3_loop_new(&loop, &err), 0, &err);
	return loop;
}

/* Polls until nothing happens any more. */
static void settle(struct exl3_loop *loop)
{
	for (int i = 0; i < 4; i++)
		exl3_loop_poll(loop, 0);
}

static void a_level_watch_lasts(void **state)
{
	struct seen s = {.loop = loop_new()};
	int pair[2];
	char byte;

	(void)state;
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
	assert_int_equal(
		exl3_watch_add(s.loop, pair[0], POLLIN, EXL3_WATCH_LEVEL, on_event, &s, &s.watch),
		0);
	settle(s.loop);
	assert_int_equal(s.calls, 0);
	assert_int_equal(write(pair[1], "x", 1), 1);
	settle(s.loop);
	assert_true(s.calls >= 2); /* nobody has read it: it is called again */
	assert_int_equal(s.events, POLLIN);
	assert_int_equal(read(pair[0], &byte, 1), 1);
	settle(s.loop);
	s.calls = 0;
	settle(s.loop);
	assert_int_equal(s.calls, 0);
	/* Another condition. */
	exl3_watch_set(s.loop, s.watch, POLLOUT);
	settle(s.loop);
	assert_true(s.calls > 0);
	assert_true(s.events & POLLOUT);
	exl3_watch_set(s.loop, s.watch, POLLIN);
	settle(s.loop);
	s.calls = 0;
	settle(s.loop);
	assert_int_equal(s.calls, 0);
	/* The end of the other side comes unasked. */
	close(pair[1]);
	settle(s.loop);
	assert_true(s.events & POLLHUP);
	s.watch = exl3_watch_drop(s.loop, s.watch);
	close(pair[0]);
	assert_null(exl3_loop_free(s.loop));
}

static void an_edge_watch_counts_wake_ups(void **state)
{
	struct seen s = {.loop = loop_new()};
	const uint64_t one = 1;

	(void)state;
	s.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	assert_int_equal(
		exl3_watch_add(s.loop, s.fd, POLLIN, EXL3_WATCH_EDGE, on_event, &s, &s.watch), 0);
	settle(s.loop);
	for (unsigned i = 1; i <= 5; i++) {
		/* Never read: the counter grows, and each write is a wake-up all the same. */
		assert_int_equal(write(s.fd, &one, sizeof(one)), sizeof(one));
		settle(s.loop);
		assert_int_equal(s.calls, i);
	}
	settle(s.loop);
	assert_int_equal(s.calls, 5);
	s.watch = exl3_watch_drop(s.loop, s.watch);
	assert_int_equal(write(s.fd, &one, sizeof(one)), sizeof(one));
	settle(s.loop);
	assert_int_equal(s.calls, 5);
	close(s.fd);
	assert_null(exl3_loop_free(s.loop));
}

static void a_callback_may_drop_itself_and_others(void **state)
{
	struct exl3_loop *loop = loop_new();
	struct seen s[2];

	(void)state;
	for (int i = 0; i < 2; i++) {
		s[i] = (struct seen){.loop = loop, .drop = true};
		s[i].fd = eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC); /* ready at once */
		assert_int_equal(exl3_watch_add(loop, s[i].fd, POLLIN, EXL3_WATCH_LEVEL, on_event,
						&s[i], &s[i].watch),
				 0);
	}
	settle(loop);
	assert_int_equal(s[0].calls, 1);
	assert_int_equal(s[1].calls, 1);
	/* The number may be another file's at once: that one is not mistaken for the old. */
	for (int i = 0; i < 2; i++)
		close(s[i].fd);
	s[0].fd = eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC);
	settle(loop);
	assert_int_equal(s[0].calls, 1);
	close(s[0].fd);
	assert_null(exl3_loop_free(loop));
}

/* ---- timers ---- */

struct clock {
	struct exl3_loop *loop;
	struct exl3_timer timer[4];
	int order[16];
	unsigned nr;
};

struct mark {
	struct clock *c;
	int what;
};

static void on_timer(void *arg)
{
	struct mark *m = arg;

	m->c->order[m->c->nr++] = m->what;
	if (m->what == 0 && m->c->nr < 4) /* sets itself again, later than what is due now */
		exl3_timer_set(m->c->loop, &m->c->timer[0], 1000);
}

static void timers_in_order(void **state)
{
	static const uint64_t at[4] = {10, 30, 20, 20};
	struct clock c = {.loop = loop_new()};
	struct mark marks[4];

	(void)state;
	assert_int_equal(exl3_loop_next_timer(c.loop), UINT64_MAX);
	for (int i = 0; i < 4; i++) {
		marks[i] = (struct mark){&c, i};
		c.timer[i].fn = on_timer;
		c.timer[i].arg = &marks[i];
		exl3_timer_set(c.loop, &c.timer[i], at[i]);
	}
	assert_int_equal(exl3_loop_next_timer(c.loop), 10);
	exl3_loop_poll(c.loop, 9);
	assert_int_equal(c.nr, 0);
	exl3_timer_set(c.loop, &c.timer[1], 5); /* moved to the front */
	exl3_timer_cancel(c.loop, &c.timer[3]);
	exl3_timer_cancel(c.loop, &c.timer[3]); /* twice is fine */
	exl3_loop_poll(c.loop, 100);
	assert_int_equal(c.nr, 3);
	assert_int_equal(c.order[0], 1);
	assert_int_equal(c.order[1], 0);
	assert_int_equal(c.order[2], 2);
	assert_int_equal(exl3_loop_next_timer(c.loop), 1000);
	exl3_timer_cancel(c.loop, &c.timer[0]);
	assert_null(exl3_loop_free(c.loop));
}

static void sleep_ends_with_time_or_event(void **state)
{
	struct seen s = {.loop = loop_new()};
	uint64_t start = exl3_now_ns();

	(void)state;
	exl3_loop_wait(s.loop, start + 2000000);
	assert_true(exl3_now_ns() >= start + 2000000);
	s.fd = eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC);
	assert_int_equal(
		exl3_watch_add(s.loop, s.fd, POLLIN, EXL3_WATCH_LEVEL, on_event, &s, &s.watch), 0);
	exl3_loop_wait(s.loop, UINT64_MAX); /* it is ready: hangs here if that goes unnoticed */
	exl3_loop_poll(s.loop, 0);
	assert_true(s.calls > 0);
	s.watch = exl3_watch_drop(s.loop, s.watch);
	close(s.fd);
	assert_null(exl3_loop_free(s.loop));
}

/* ---- jobs ---- */

struct work {
	struct exl3_job job;
	struct exl3_jobs *jobs;
	struct work *then; /* added by done() */
	unsigned *counter;
	unsigned ran, finished;
};

static void run_work(struct exl3_job *job)
{
	struct work *w = (struct work *)job;

	w->ran = ++*w->counter;
}

static void done_work(struct exl3_job *job)
{
	struct work *w = (struct work *)job;

	w->finished = w->ran;
	if (w->then)
		exl3_jobs_add(w->jobs, &w->then->job);
}

static void jobs_run_in_order(void **state)
{
	struct exl3_loop *loop = loop_new();
	struct exl3_jobs *jobs = NULL;
	struct exl3_error err;
	struct work w[5];
	unsigned counter = 0; /* the jobs' thread only, until it has ended */

	(void)state;
	test_code(exl3_jobs_new(loop, "test-jobs", &jobs, &err), 0, &err);
	for (int i = 0; i < 5; i++)
		w[i] = (struct work){.job = {.run = run_work, .done = done_work},
				     .jobs = jobs,
				     .counter = &counter};
	w[3].then = &w[4];
	exl3_jobs_add(jobs, &w[0].job);
	while (!w[0].finished) {
		exl3_loop_wait(loop, UINT64_MAX);
		exl3_loop_poll(loop, 0);
	}
	for (int i = 1; i < 4; i++)
		exl3_jobs_add(jobs, &w[i].job);
	assert_null(exl3_jobs_free(jobs)); /* with all that was added, and what that adds */
	for (unsigned i = 0; i < 5; i++)
		assert_int_equal(w[i].finished, i + 1);
	assert_null(exl3_loop_free(loop));
}

static void *write_all_the_time(void *arg)
{
	const struct seen *s = arg;
	const uint64_t one = 1;

	while (!__atomic_load_n(&s->drop, __ATOMIC_RELAXED))
		(void)!write(s->fd, &one, sizeof(one));
	return NULL;
}

/* Like a client that kicks without a pause: its watch goes all the same, else the loop's end hangs. */
static void a_watch_is_dropped_while_it_is_woken(void **state)
{
	struct seen s = {.loop = loop_new(), .fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
	pthread_t writer;

	(void)state;
	assert_true(s.fd >= 0);
	assert_int_equal(pthread_create(&writer, NULL, write_all_the_time, &s), 0);
	for (int i = 0; i < 1000; i++) {
		struct exl3_watch *watches[64];

		/* All of one eventfd: each write takes long to wake them, so that some are met at it. */
		for (unsigned w = 0; w < TEST_NR(watches); w++)
			assert_int_equal(exl3_watch_add(s.loop, s.fd, POLLIN, EXL3_WATCH_EDGE,
							on_event, &s, &watches[w]),
					 0);
		exl3_loop_poll(s.loop, 0);
		for (unsigned w = 0; w < TEST_NR(watches); w++)
			exl3_watch_drop(s.loop, watches[w]);
		s.calls = 0;
		settle(s.loop);
		assert_int_equal(s.calls, 0);
	}
	__atomic_store_n(&s.drop, true, __ATOMIC_RELAXED);
	pthread_join(writer, NULL);
	exl3_loop_free(s.loop);
	close(s.fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(a_level_watch_lasts),
		test_case(an_edge_watch_counts_wake_ups),
		test_case(a_callback_may_drop_itself_and_others),
		test_case(timers_in_order),
		test_case(sleep_ends_with_time_or_event),
		test_case(jobs_run_in_order),
		test_case(a_watch_is_dropped_while_it_is_woken),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
