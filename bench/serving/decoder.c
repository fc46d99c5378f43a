/* SPDX-License-Identifier: Apache-2.0 */
/* decoder.c - a decoder's day: calls, pauses, notes. */
#include "bench/serving/serving.h"

#include "shm/ring.h"
#include "shm/util.h"

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

bool serving_module(const struct serving_options *o, uint32_t i, char *name, size_t size)
{
	static const char *const dense[] = {"self_attn.qkv_proj", "self_attn.o_proj",
					    "mlp.gate_up_proj", "mlp.down_proj"};
	static const char *const moe[] = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts"};
	uint32_t per_layer = o->moe ? 3 : 4;

	if (i < per_layer * o->layers)
		snprintf(name, size, "model.layers.%u.%s", i / per_layer,
			 (o->moe ? moe : dense)[i % per_layer]);
	else
		snprintf(name, size, "lm_head");
	return i <= per_layer * o->layers;
}

static double uniform(struct serving_decoder *d)
{
	d->rng ^= d->rng << 13;
	d->rng ^= d->rng >> 7;
	d->rng ^= d->rng << 17;
	return (double)(d->rng >> 11) / 9007199254740992.0;
}

/* Work of the client's own: it needs its processor for that. */
static void think(uint64_t until_ns)
{
	while (exl3_now_ns() < until_ns)
		exl3_ring_relax();
}

static void note(struct serving_record *r, uint64_t latency_ns)
{
	r->us[r->samples++ % SERVING_SAMPLES] = (float)latency_ns / 1000;
}

/* One cell. -1: a call failed. */
static int decode(struct serving_decoder *d)
{
	struct serving_sums sums = {0};
	uint32_t phase = SERVING_WARM, module = 0;
	uint64_t answer = exl3_now_ns();

	for (;;) {
		uint32_t now_phase = __atomic_load_n(&d->shared->phase, __ATOMIC_ACQUIRE);
		double us = d->o->think_us * (0.7 + 0.6 * uniform(d));
		uint64_t asked, exec_ns = 0;

		if (now_phase != phase && now_phase == SERVING_COUNT)
			d->record->begin = sums;
		phase = now_phase;
		if (phase != SERVING_WARM && phase != SERVING_COUNT)
			break;
		if (module == 0)
			us += d->o->tail_us * (0.5 + uniform(d));
		think(answer + (uint64_t)(us * 1000));
		asked = exl3_now_ns();
		if (module != 0)
			sums.think_ns += asked - answer;
		if (d->call(d, module, &exec_ns) < 0)
			return -1;
		answer = exl3_now_ns();
		sums.calls++;
		sums.exec_ns += exec_ns;
		sums.latency_ns += answer - asked;
		if (phase == SERVING_COUNT)
			note(d->record, answer - asked);
		module = (module + 1) % d->modules;
		sums.tokens += module == 0;
	}
	d->record->end = sums;
	return 0;
}

int serving_decode(struct serving_decoder *d, unsigned nth)
{
	cpu_set_t cpus;
	int e = 0;

	d->rng = (nth + 1) * 0x9e3779b97f4a7c15ull;
	__atomic_fetch_add(&d->shared->ready, 1, __ATOMIC_SEQ_CST);
	while (e == 0) {
		while (__atomic_load_n(&d->shared->phase, __ATOMIC_ACQUIRE) != SERVING_WARM)
			usleep(2000);
		d->mode = d->shared->mode;
		d->active = d->shared->active;
		d->crowded = sched_getaffinity(0, sizeof(cpus), &cpus) == 0 &&
			     d->active > (uint32_t)CPU_COUNT(&cpus) - (d->o->pin ? 0 : 2);
		if (nth < d->active) {
			e = decode(d);
			__atomic_fetch_add(&d->shared->finished, 1, __ATOMIC_SEQ_CST);
		}
		while (__atomic_load_n(&d->shared->phase, __ATOMIC_ACQUIRE) != SERVING_IDLE)
			usleep(2000);
	}
	return 1;
}
