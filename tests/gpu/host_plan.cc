/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_plan.cc - the steps of a plan's graph (kernels/cuda/plan.cuh) on the host: a thread is the graph, another the
 * client, a third the daemon that gives up.
 *
 * A call's "kernel" adds the epoch to the client's x; so a step that lets an old word pass, tells too early, or tells
 * of a call that did not run, shows as a wrong y. Then the same with the client's side as its own graph, made of the
 * device functions that programs use (client/cuda/exl3_device.cuh).
 */
#include "client/cuda/exl3_device.cuh"
#include "kernels/cuda/plan.cuh"

#include <stdio.h>
#include <string.h>
#include <thread>

using namespace exl3;

namespace
{

constexpr uint32_t CALLS = 5, REPLAYS = 100;
int failed;

#define CHECK(what)                                                             \
	do {                                                                    \
		if (!(what)) {                                                  \
			printf("%s:%d: %s\n", __FILE__, __LINE__, #what);       \
			failed++;                                               \
		}                                                               \
	} while (0)

struct words {
	alignas(64) uint32_t ready;
	alignas(64) uint32_t done;
	int32_t result;
	uint32_t x, y;
};

struct bench {
	plan_ctl ctl;
	plan_state state;
	words w[CALLS];
	unsigned long long counters[2];
	uint64_t skipped[CALLS][2];
	bool with_ready[CALLS], with_result;
	uint32_t ran; /* kernels that ran in the last replay */
};

plan_step step_of(bench *b, uint32_t i)
{
	plan_step s = {};

	s.ctl = &b->ctl;
	s.state = &b->state;
	s.first = i == 0;
	s.last = i == CALLS;
	s.call = i;
	if (i > 0) {
		s.done = &b->w[i - 1].done;
		s.result = b->with_result ? &b->w[i - 1].result : nullptr;
		s.counters = b->counters;
		s.skipped = b->skipped[i - 1];
		s.nr_counters = 2;
	}
	if (i < CALLS && b->with_ready[i])
		s.ready = &b->w[i].ready;
	return s;
}

/* The graph, launched once. */
void replay(bench *b)
{
	b->ran = 0;
	for (uint32_t i = 0; i <= CALLS; i++) {
		const plan_step s = step_of(b, i);

		plan_run_step(&s);
		if (i == CALLS)
			break;
		b->w[i].y = b->w[i].x + b->state.epoch;
		b->counters[1] += i;
		b->ran++;
	}
}

void start(bench *b, uint32_t epoch, uint64_t wait_ns)
{
	b->ctl.seq++;
	b->ctl.epoch = epoch;
	b->ctl.wait_ns = wait_ns;
	b->ctl.result = 77;
}

void init(bench *b, uint32_t before)
{
	memset(b, 0, sizeof(*b));
	b->with_result = true;
	for (uint32_t i = 0; i < CALLS; i++) {
		b->with_ready[i] = true;
		b->w[i].ready = b->w[i].done = before;
	}
}

/* Many replays, x changed each time, the epoch running through 0; calls without a word among the others. */
void replays(uint32_t first, bool gaps)
{
	bench b;

	init(&b, first - 1);
	if (gaps)
		b.with_ready[1] = b.with_ready[3] = false;
	for (uint32_t r = 0; r < REPLAYS; r++) {
		const uint32_t epoch = first + r;

		start(&b, epoch, 20000000000ull);
		std::thread graph(replay, &b);

		for (uint32_t i = 0; i < CALLS; i++) {
			const uint32_t last = gaps && i < CALLS - 1 && i % 2 == 0 ? i + 1 : i;

			for (uint32_t j = i; j <= last; j++)
				b.w[j].x = r * 31 + j;
			if (r % 16 == i)
				std::this_thread::yield();
			__atomic_store_n(&b.w[i].ready, epoch, __ATOMIC_RELEASE);
			for (; i <= last; i++) {
				while (__atomic_load_n(&b.w[i].done, __ATOMIC_ACQUIRE) != epoch)
					std::this_thread::yield();
				CHECK(b.w[i].y == r * 31 + i + epoch && b.w[i].result == 0);
			}
			i--;
		}
		graph.join();
		CHECK(b.ctl.result == 0 && b.ctl.ended == b.ctl.seq && b.ran == CALLS);
		for (uint32_t i = 0; i < CALLS; i++)
			CHECK(b.skipped[i][0] == 0 && b.skipped[i][1] == i);
		CHECK(b.counters[1] == 0);
	}
}

/* The client signals @calls of them. Then nothing more: time is up, or the daemon gives up. */
void stops(uint32_t calls, bool abort, bool with_result)
{
	const int32_t want = abort ? -ECANCELED : -ETIMEDOUT;
	bench b;

	init(&b, 41);
	b.with_result = with_result;
	for (int again = 0; again < 2; again++) {
		start(&b, 42, abort ? 20000000000ull : 30000000ull);
		b.ctl.abort = abort ? b.ctl.seq - 1 : 0; /* an old one means nothing */
		std::thread graph(replay, &b);

		for (uint32_t i = 0; i < calls; i++)
			__atomic_store_n(&b.w[i].ready, 42, __ATOMIC_RELEASE);
		if (abort) {
			while (calls && __atomic_load_n(&b.w[calls - 1].done, __ATOMIC_ACQUIRE) != 42)
				std::this_thread::yield();
			__atomic_store_n(&b.ctl.abort, b.ctl.seq, __ATOMIC_RELEASE);
		}
		graph.join();
		CHECK(b.ran == CALLS && b.ctl.ended == b.ctl.seq);
		CHECK(b.ctl.result == (calls ? want : -EAGAIN) && b.ctl.call == calls);
		for (uint32_t i = 0; i < CALLS; i++) {
			const bool told = i < calls || (calls && with_result);

			CHECK(b.w[i].done == (told ? 42u : 41u));
			CHECK(b.w[i].result == (told && i >= calls ? want : 0));
		}
		if (calls)
			return;
	}
	/* One that had not begun can be submitted again, and is as if nothing had been. */
	start(&b, 42, 20000000000ull);
	std::thread graph(replay, &b);

	for (uint32_t i = 0; i < CALLS; i++)
		__atomic_store_n(&b.w[i].ready, 42, __ATOMIC_RELEASE);
	graph.join();
	CHECK(b.ctl.result == 0);
	for (uint32_t i = 0; i < CALLS; i++)
		CHECK(b.w[i].done == 42 && b.w[i].result == 0);
}

/* The client's side of a plan, as libexl3-gpu lays it out. */
struct client {
	exl3_device_call call[CALLS];
	uint32_t epoch[CALLS], failed, abort;
	uint64_t error;
	int waits[CALLS];
};

void client_init(client *c, bench *b, uint32_t before, uint64_t wait_ns)
{
	memset(c, 0, sizeof(*c));
	for (uint32_t i = 0; i < CALLS; i++) {
		c->epoch[i] = before;
		c->call[i] = {&b->w[i].ready, &b->w[i].done, &b->w[i].result, &c->epoch[i], &c->failed, &c->abort,
			      &c->error, wait_ns, i};
	}
}

/* One launch of the client's graph: x of a call is the y of the one before. */
void client_replay(client *c, bench *b, uint32_t r)
{
	for (uint32_t i = 0; i < CALLS; i++) {
		b->w[i].x = i ? b->w[i - 1].y : r;
		exl3_device_signal(&c->call[i]);
		c->waits[i] = exl3_device_wait(&c->call[i]);
	}
}

void graphs(uint32_t first)
{
	bench b;
	client c;

	init(&b, first - 1);
	client_init(&c, &b, first - 1, 20000000000ull);
	for (uint32_t r = 0; r < REPLAYS; r++) {
		const uint32_t epoch = first + r;

		start(&b, epoch, 20000000000ull);
		std::thread graph(replay, &b);

		client_replay(&c, &b, r);
		graph.join();
		CHECK(b.ctl.result == 0 && !c.failed && b.w[CALLS - 1].y == r + CALLS * epoch);
		for (uint32_t i = 0; i < CALLS; i++)
			CHECK(c.waits[i] == 0);
	}
}

/* The daemon's side is not there, gives up, or the client does: an error on both, and later all is well again. */
void graphs_end(int how)
{
	bench b;
	client c;

	init(&b, 0);
	client_init(&c, &b, 0, how == 0 ? 20000000ull : 20000000000ull);
	if (how == 0) {
		client_replay(&c, &b, 1);
		CHECK(c.waits[0] == EXL3_DEVICE_TIMEOUT && c.error == (uint64_t)EXL3_DEVICE_TIMEOUT);
		for (uint32_t i = 1; i < CALLS; i++)
			CHECK(c.waits[i] == EXL3_DEVICE_FAILED);
	} else if (how == 1) { /* the plan is aborted once its first call has run */
		start(&b, 1, 20000000000ull);
		std::thread graph(replay, &b);

		b.w[0].x = 5;
		exl3_device_signal(&c.call[0]);
		CHECK(exl3_device_wait(&c.call[0]) == 0 && b.w[0].y == 6);
		__atomic_store_n(&b.ctl.abort, b.ctl.seq, __ATOMIC_RELEASE);
		graph.join();
		for (uint32_t i = 1; i < CALLS; i++) {
			exl3_device_signal(&c.call[i]);
			CHECK(exl3_device_wait(&c.call[i]) == -ECANCELED);
		}
		CHECK(c.error == (1ull << 32 | (uint32_t)-ECANCELED));
	} else { /* the client gives up */
		std::thread other(client_replay, &c, &b, 1u);

		__atomic_store_n(&c.abort, 1, __ATOMIC_RELEASE);
		other.join();
		CHECK(c.waits[0] == EXL3_DEVICE_ABORTED && c.error == (uint64_t)EXL3_DEVICE_ABORTED);
	}
	c.failed = 0;
	c.error = 0;
	c.abort = 0;
	for (uint32_t i = 0; i < CALLS; i++)
		c.call[i].wait_ns = 20000000000ull;
	start(&b, 2, 20000000000ull);
	std::thread graph(replay, &b);

	client_replay(&c, &b, 7);
	graph.join();
	CHECK(b.ctl.result == 0 && !c.error && b.w[CALLS - 1].y == 7 + CALLS * 2);
}

} /* namespace */

int main()
{
	replays(1, false);
	replays(0xffffffc0u, false);
	replays(0x7fffffc0u, true);
	for (uint32_t calls = 0; calls < CALLS; calls += 2)
		for (int how = 0; how < 4; how++)
			stops(calls, how & 1, how & 2);
	graphs(1);
	graphs(0xffffffc0u);
	for (int how = 0; how < 3; how++)
		graphs_end(how);
	printf("%s\n", failed ? "failed" : "a plan's steps: waits, results, epochs, ends: as they should be");
	return failed != 0;
}
