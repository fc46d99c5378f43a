/* SPDX-License-Identifier: Apache-2.0 */
/* model.c - a queueing model of one device and its clients that drives daemon/sched.c directly. */
#include "tests/sim/model.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define NEVER     UINT64_MAX
#define AHEAD_MAX 8u
#define SAMPLES   (1u << 20)
#define MODULES   4096u

struct request {
	struct exl3_sched_item item; /* first */
	struct client *owner;
	uint64_t number, pushed_ns, ready_ns, ready_launches;
	uint32_t slices;
};

struct client {
	const struct sim_client *cfg;
	struct exl3_sched_flow flow;
	struct request slot[AHEAD_MAX];
	uint64_t next_ns; /* when it pushes the next one */
	uint32_t at;      /* module */
	uint32_t outstanding, pushed;
	uint64_t number, started, ended;
	uint64_t tokens, slices; /* since warm */
	bool stopped;
};

struct launch {
	struct exl3_sched_item *items[EXL3_LAUNCH_ITEMS_MAX];
	uint32_t nr;
	uint64_t exec_ns;
};

struct sim {
	const struct sim_config *cfg;
	struct sim_result *out;
	struct exl3_sched sched;
	struct client client[SIM_CLIENTS_MAX];
	struct launch queue[64]; /* on the device, the first one runs */
	uint32_t head, nr;
	uint64_t ends_ns; /* of the first one */
	uint64_t loop_ns; /* until when the loop is busy */
	uint64_t now_ns, rng, launches, decode_launches, decode_rows, busy_ns;
	float *samples;
	uint64_t nr_samples;
};

static double uniform(struct sim *m)
{
	m->rng ^= m->rng << 13;
	m->rng ^= m->rng >> 7;
	m->rng ^= m->rng << 17;
	return (double)(m->rng >> 11) / 9007199254740992.0;
}

void sim_defaults(struct sim_config *cfg, uint32_t nr_clients)
{
	memset(cfg, 0, sizeof(*cfg));
	cfg->mode = SIM_TRAINS;
	cfg->nr_clients = nr_clients;
	for (uint32_t i = 0; i < nr_clients; i++)
		cfg->client[i] = (struct sim_client){.rows = 1, .think_ns = 6000, .ahead = 1};
	cfg->modules = 256;
	cfg->launch_ns = 15000;
	cfg->hand_ns = 9000;
	cfg->jitter = 0.3;
	cfg->tail_ns = 50000;
	cfg->depth = 1;
	cfg->merge_max = EXL3_LAUNCH_ITEMS_MAX;
	cfg->run_ns = 600000000;
	cfg->warm_ns = 200000000;
	cfg->seed = 1;
}

static bool warm(const struct sim *m)
{
	return m->now_ns >= m->cfg->warm_ns;
}

/* Modules of a model are addresses in a table of its own. */
static const char module_names[64][MODULES];

static double module_factor(const struct sim *m, uint32_t module)
{
	uint32_t h = (module + 1) * 2654435761u;

	return 1 + m->cfg->spread * ((double)(h >> 16) / 32768.0 - 1);
}

static uint64_t exec_ns(struct sim *m, const struct launch *l)
{
	const struct request *first = (const struct request *)l->items[0];
	const char *key = first->item.key;
	uint32_t rows = 0;
	double factor;

	if (!key)
		return first->item.cost_ns;
	for (uint32_t i = 0; i < l->nr; i++)
		rows += l->items[i]->rows;
	factor = 1 + m->cfg->noise * uniform(m);
	if (m->cfg->spike_ppm && uniform(m) * 1e6 < m->cfg->spike_ppm)
		factor *= 10;
	return (uint64_t)((double)m->cfg->launch_ns * (1 + (rows - 1) * m->cfg->slope) * factor *
			  module_factor(m,
					(uint32_t)(key - module_names[first->owner->cfg->model])));
}

/* ---- clients ---- */

static void note_ready(struct sim *m, struct client *c)
{
	struct request *head = (struct request *)c->flow.head;

	if (head && !head->ready_ns) {
		head->ready_ns = m->now_ns;
		head->ready_launches = m->launches;
	}
}

static const char *key_of(const struct sim *m, const struct client *c)
{
	bool same = m->cfg->repeat && c->at % m->cfg->repeat == 1;

	return &module_names[c->cfg->model][same ? MODULES - 1 : c->at];
}

static void push(struct sim *m, struct client *c)
{
	struct request *r = &c->slot[c->number % AHEAD_MAX];

	memset(r, 0, sizeof(*r));
	r->owner = c;
	r->number = c->number++;
	r->pushed_ns = m->now_ns;
	r->item.rows = c->cfg->rows;
	if (c->cfg->slice_ns) {
		r->slices = c->cfg->slices;
		r->item.more = r->slices > 1;
		r->item.cost_ns = c->cfg->slice_ns;
	} else {
		r->item.key = key_of(m, c);
		r->item.cost_ns = m->cfg->launch_ns;
		c->at = (c->at + 1) % m->cfg->modules;
	}
	c->outstanding++;
	exl3_sched_push(&m->sched, &c->flow, &r->item);
	note_ready(m, c);
}

/* After an answer, or the start: when the next request comes. */
static void plan(struct sim *m, struct client *c)
{
	const struct sim_client *k = c->cfg;
	double ns = (double)m->cfg->hand_ns +
		    (double)k->think_ns * (1 + m->cfg->jitter * (2 * uniform(m) - 1)) +
		    (double)k->extra_ns * uniform(m);

	if (k->slice_ns)
		ns = 0;
	else if (c->at == 0)
		ns += (double)m->cfg->tail_ns * (0.5 + uniform(m));
	if (k->hiccup_ppm && uniform(m) * 1e6 < k->hiccup_ppm)
		ns += (double)k->hiccup_ns;
	/* The loop answers one after the other, and takes the requests that come back likewise. */
	if (m->loop_ns < m->now_ns)
		m->loop_ns = m->now_ns;
	m->loop_ns += 2 * m->cfg->serial_ns;
	c->next_ns = m->loop_ns + (uint64_t)ns;
	if (k->stop_ns && c->next_ns >= k->stop_ns && !c->stopped) {
		c->stopped = true;
		c->next_ns = k->pause_ns ? k->stop_ns + k->pause_ns : NEVER;
	}
}

static void answered(struct sim *m, struct request *r)
{
	struct client *c = r->owner;

	assert(r->number == c->ended);
	c->ended++;
	c->outstanding--;
	if (warm(m)) {
		m->out->calls++;
		if (!c->cfg->slice_ns)
			m->samples[m->nr_samples++ % SAMPLES] =
				(float)(m->now_ns - r->pushed_ns) / 1000;
		if (!c->cfg->slice_ns &&
		    r->item.key == &module_names[c->cfg->model][m->cfg->modules - 1])
			c->tokens++;
	}
	if (c->next_ns == NEVER && !(c->stopped && !c->cfg->pause_ns))
		plan(m, c);
}

/* ---- the device ---- */

static void begin_first(struct sim *m)
{
	struct launch *l = &m->queue[m->head];

	l->exec_ns = exec_ns(m, l);
	m->ends_ns = m->now_ns + l->exec_ns;
}

static void started(struct sim *m, struct exl3_sched_item *item)
{
	struct request *r = (struct request *)item;
	uint64_t wait = m->now_ns - r->ready_ns, between = m->launches - r->ready_launches;

	assert(item->state == EXL3_ITEM_RUNNING);
	assert(r->number == r->owner->started || r->slices < r->owner->cfg->slices);
	if (r->number == r->owner->started)
		r->owner->started++;
	if (wait > m->out->wait_ns_max)
		m->out->wait_ns_max = wait;
	if (between > m->out->wait_launches_max)
		m->out->wait_launches_max = (uint32_t)between;
	r->ready_ns = 0;
	note_ready(m, r->owner);
}

static void launch_all(struct sim *m)
{
	for (;;) {
		struct launch *l = &m->queue[(m->head + m->nr) % 64];

		l->nr = exl3_sched_pick(&m->sched, l->items);
		if (!l->nr)
			return;
		for (uint32_t i = 0; i < l->nr; i++) {
			started(m, l->items[i]);
			for (uint32_t k = 0; k < i; k++)
				assert(l->items[i]->flow != l->items[k]->flow &&
				       l->items[i]->key == l->items[k]->key);
		}
		m->launches++;
		if (warm(m) && l->items[0]->key) {
			m->decode_launches++;
			m->decode_rows += l->nr;
		}
		if (m->nr++ == 0)
			begin_first(m);
	}
}

static void end_first(struct sim *m)
{
	struct launch l = m->queue[m->head];

	m->head = (m->head + 1) % 64;
	m->nr--;
	if (warm(m))
		m->busy_ns += l.exec_ns;
	exl3_sched_done(&m->sched, l.items, l.nr, l.exec_ns);
	for (uint32_t i = 0; i < l.nr; i++) {
		struct request *r = (struct request *)l.items[i];

		if (warm(m) && r->owner->cfg->slice_ns)
			r->owner->slices++;
		if (r->item.more) {
			r->slices--;
			r->item.more = r->slices > 1;
			exl3_sched_again(&m->sched, &r->item);
			note_ready(m, r->owner);
			continue;
		}
		answered(m, r);
		note_ready(m, r->owner);
	}
	if (m->nr)
		begin_first(m);
}

/* ---- the run ---- */

static void client_init(struct sim *m, struct client *c, const struct sim_client *cfg)
{
	c->cfg = cfg;
	c->flow.tenant = cfg->tenant;
	/* Somewhere in its step. */
	c->at = (uint32_t)(uniform(m) * m->cfg->modules);
	c->next_ns = cfg->start_ns +
		     (uint64_t)(uniform(m) * (double)m->cfg->launch_ns * m->cfg->nr_clients);
	assert(cfg->ahead >= 1 && cfg->ahead < AHEAD_MAX && cfg->model < 64);
}

static uint64_t next_event(const struct sim *m)
{
	uint64_t t = m->nr ? m->ends_ns : NEVER;

	for (uint32_t i = 0; i < m->cfg->nr_clients; i++)
		if (m->client[i].next_ns < t)
			t = m->client[i].next_ns;
	return m->sched.wake_ns < t ? m->sched.wake_ns : t;
}

static void clients_turn(struct sim *m)
{
	for (uint32_t i = 0; i < m->cfg->nr_clients; i++) {
		struct client *c = &m->client[i];

		if (c->next_ns > m->now_ns)
			continue;
		c->next_ns = NEVER;
		while (c->outstanding < c->cfg->ahead)
			push(m, c);
	}
}

static int by_value(const void *a, const void *b)
{
	float x = *(const float *)a, y = *(const float *)b;

	return (x > y) - (x < y);
}

static void report(struct sim *m)
{
	double seconds = (double)(m->cfg->run_ns - m->cfg->warm_ns) / 1e9;
	size_t n = m->nr_samples < SAMPLES ? m->nr_samples : SAMPLES;
	struct sim_result *out = m->out;

	for (uint32_t i = 0; i < m->cfg->nr_clients; i++) {
		const struct client *c = &m->client[i];

		out->client[i] = (double)(c->cfg->slice_ns ? c->slices : c->tokens) / seconds;
		out->tokens_per_s += (double)c->tokens / seconds;
	}
	if (n) {
		qsort(m->samples, n, sizeof(float), by_value);
		out->p50_us = m->samples[n / 2];
		out->p99_us = m->samples[n * 99 / 100];
		out->max_us = m->samples[n - 1];
	}
	if (m->decode_launches)
		out->rows_per_launch = (double)m->decode_rows / (double)m->decode_launches;
	out->busy = (double)m->busy_ns / (seconds * 1e9);
	out->stats = m->sched.stats;
}

void sim_run(const struct sim_config *cfg, struct sim_result *ret)
{
	struct sim *m = calloc(1, sizeof(*m));

	assert(m && cfg->modules <= MODULES && cfg->nr_clients <= SIM_CLIENTS_MAX);
	memset(ret, 0, sizeof(*ret));
	m->cfg = cfg;
	m->out = ret;
	m->rng = cfg->seed * 0x9e3779b97f4a7c15ull | 1;
	m->samples = malloc(SAMPLES * sizeof(float));
	assert(m->samples);
	exl3_sched_init(&m->sched, cfg->depth, cfg->mode == SIM_UNMERGED ? 1 : cfg->merge_max,
			4096);
	exl3_sched_set_trains(&m->sched, cfg->mode == SIM_TRAINS);
	for (uint32_t i = 0; i < cfg->nr_clients; i++)
		client_init(m, &m->client[i], &cfg->client[i]);
	while ((m->now_ns = next_event(m)) < cfg->run_ns) {
		exl3_sched_tick(&m->sched, m->now_ns);
		if (m->nr && m->ends_ns <= m->now_ns)
			end_first(m);
		clients_turn(m);
		launch_all(m);
		/* Asked to look again at a time that has passed, it would have to find something. */
		assert(m->sched.wake_ns > m->now_ns);
	}
	report(m);
	free(m->samples);
	free(m);
}
