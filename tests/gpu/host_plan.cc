/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_plan.cc - the steps of a plan's graph (kernels/cuda/plan.cuh) on the host: a thread is the graph, another the
 * client, a third the daemon that gives up.
 *
 * A call's "kernel" adds the epoch to the client's x; so a step that lets an old word pass, tells too early, or tells
 * of a call that did not run, shows as a wrong y.
 */
#include "kernels/cuda/plan.cuh"

#include <stdio.h>
#include <string.h>
#include <thread>

using namespace exl3;

namespace
{

constexpr uint32_t CALLS = 5;
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
	for (uint32_t r = 0; r < 300; r++) {
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

} /* namespace */

int main()
{
	replays(1, false);
	replays(0xffffff80u, false);
	replays(0x7fffff80u, true);
	for (uint32_t calls = 0; calls < CALLS; calls += 2)
		for (int how = 0; how < 4; how++)
			stops(calls, how & 1, how & 2);
	printf("%s\n", failed ? "failed" : "a plan's steps: waits, results, epochs, ends: as they should be");
	return failed != 0;
}
