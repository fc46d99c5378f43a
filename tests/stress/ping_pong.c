/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ping_pong.c - one request at a time, both sides asleep in between: hangs if a wake-up gets lost.
 *
 * Between "nothing is there" and the sleep each side has the window that W0..W3 of shm/ring.h close;
 * with depth 1 nobody else comes along to wake a sleeper later. Each side dawdles before it
 * goes to sleep, about as long as the other one takes, so that the windows of both meet often. An alarm turns a
 * hang into a failure. A weakened W0 or W1 hangs within seconds; W2 and W3 have a second line of defence,
 * as the futex call compares cq_tail once more.
 */
#include "shm/segment.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#define ROUNDS  100000u
#define ALARM_S 240 /* the run takes seconds; only a hang gets here */

static struct exl3_segment *seg;
static struct exl3_ring_server srv;
static struct exl3_ring_client cli;
static int kick_fd;
static unsigned kicks, daemon_sleeps, client_sleeps;

static void fail(const char *what)
{
	fprintf(stderr, "ping_pong: %s\n", what);
	exit(1);
}

static void on_alarm(int sig)
{
	static const char text[] = "ping_pong: a wake-up was lost: both sides sleep\n";

	(void)sig;
	(void)!write(2, text, sizeof(text) - 1);
	_exit(1);
}

/* Waits for as long as the other side takes, more or less: longer after it came too late, shorter after
 * it came in time. So whoever goes to sleep does it just when the other one looks whether it sleeps. */
static unsigned daemon_patience[2],
	client_patience[2]; /* [1]: the other one had to be woken first */

static void dawdle(unsigned *turns, uint64_t seed)
{
	unsigned jitter = (unsigned)((seed * 0x9e3779b97f4a7c15u) >> 58);

	for (unsigned i = *turns + jitter; i; i--)
		__asm__ volatile("");
}

static void learn(unsigned *turns, bool slept)
{
	if (slept && *turns < 20000)
		*turns += 16;
	else if (!slept && *turns >= 16)
		*turns -= 16;
}

static void pin(unsigned nth)
{
	cpu_set_t allowed, one;

	if (sched_getaffinity(0, sizeof(allowed), &allowed) < 0)
		return;
	for (unsigned cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &allowed) || nth--)
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		sched_setaffinity(0, sizeof(one), &one); /* with one processor only, it shares */
		return;
	}
}

/* The daemon's way to sleep: armed flag, then the eventfd. */
static void *serve(void *arg)
{
	struct exl3_sqe in;
	struct exl3_cqe cqe = {0};

	bool woke = false;

	(void)arg;
	pin(1);
	for (unsigned n = 0; n < ROUNDS;) {
		int got = exl3_sq_take(&srv, &in, 1);

		if (got < 0)
			fail("exl3_sq_take");
		if (got == 0) {
			struct pollfd p = {.fd = kick_fd, .events = POLLIN};
			uint64_t v;
			bool sleeps;

			dawdle(&daemon_patience[woke], n);
			sleeps = exl3_sq_arm(&srv);
			learn(&daemon_patience[woke], sleeps);
			if (!sleeps)
				continue;
			daemon_sleeps++;
			if (poll(&p, 1, -1) < 0 || read(kick_fd, &v, sizeof(v)) < 0)
				fail("kick");
			exl3_sq_disarm(&srv);
			continue;
		}
		cqe.user_data = in.user_data;
		exl3_cq_post(&srv, &cqe);
		woke = exl3_cq_publish(&srv) & EXL3_CQ_NEED_WAKEUP;
		if (woke)
			exl3_cq_wake(&srv);
		n++;
	}
	return NULL;
}

static void call(uint64_t n)
{
	struct exl3_sqe *sqe;
	struct exl3_cqe cqe;
	uint64_t one = 1;
	bool woke;
	int e;

	if (exl3_ring_get(&cli, &sqe) < 0)
		fail("exl3_ring_get");
	sqe->user_data = n;
	woke = exl3_ring_publish(&cli);
	if (woke) {
		kicks++;
		if (write(kick_fd, &one, sizeof(one)) < 0)
			fail("kick");
	}
	while ((e = exl3_ring_take(&cli, &cqe)) == 0) {
		bool sleeps;

		dawdle(&client_patience[woke], ~n);
		sleeps = exl3_ring_arm(&cli, EXL3_CQ_NEED_WAKEUP);
		learn(&client_patience[woke], sleeps);
		if (sleeps) {
			client_sleeps++;
			exl3_ring_futex_wait(&cli.hdr->cq_tail.v, cli.cq_next, NULL);
		}
		exl3_ring_disarm(&cli, 0);
	}
	if (e < 0 || cqe.user_data != n)
		fail("wrong completion");
}

int main(void)
{
	struct exl3_ring_params p = {.sq_entries = 2, .first = UINT32_MAX - 999};
	struct exl3_error err;
	pthread_t t;

	kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (kick_fd < 0 || exl3_ring_create(&p, &seg, &srv, &err) < 0 ||
	    exl3_ring_attach(seg, &cli, &err) < 0)
		fail("cannot start");
	signal(SIGALRM, on_alarm);
	alarm(ALARM_S);
	if (pthread_create(&t, NULL, serve, NULL))
		fail("pthread_create");
	pin(0);
	for (uint64_t n = 0; n < ROUNDS; n++)
		call(n);
	pthread_join(t, NULL);
	printf("ping_pong: %u round trips, the daemon slept %u times, the client %u, %u kicks: "
	       "ok\n",
	       ROUNDS, daemon_sleeps, client_sleeps, kicks);
	if (!daemon_sleeps || !client_sleeps)
		fail("nobody slept: this run proves nothing");
	exl3_segment_free(seg);
	close(kick_fd);
	return 0;
}
