/* SPDX-License-Identifier: Apache-2.0 */
/*
 * survivor.c - a client of libexl3 that goes on when the daemon's worker is killed, and checks every result.
 *
 * usage: survivor SOCKET MODEL MODULE THREADS [manual|paused]
 * Prints "ready" when every thread has its reference results (paused: and then does nothing until a line comes on
 * stdin). Goes on until its stdin ends, then prints one line of JSON. Exit status 0: no result was wrong, no request was lost, arenas kept their contents.
 *
 * MODULE: a linear, a dense MLP or a routed block; "mla": attention of 4 heads over a small cache.
 * All threads share one arena; each has a channel of its own and up to 8 requests in flight, of different
 * inputs. The same request always has the same bits, so a result is compared with the first one for its input.
 */
#include "tests/integration/client.h"

#include <errno.h>
#include <pthread.h>
#include <sys/poll.h>
#include <unistd.h>

#define SLOTS       8u
#define THREADS_MAX 16u
#define ROWS        3u
#define TOPK        4u
#define HEADS       4u
#define DIM         64u
#define CACHE       32u /* rows */
#define WAIT_NS     60000000000u

static struct exl3_client *client;
static struct exl3_module *mod;
static struct exl3_arena *arena;
static struct exl3_module_info info;
static bool mla; /* then info has the sizes of q and o */
static uint32_t geometry;
static uint32_t stop, ready, paused; /* atomic */

struct worker {
	pthread_t thread;
	unsigned index;
	float *x[SLOTS], *y[SLOTS], *want[SLOTS]; /* want: private */
	float *weights[SLOTS]; /* [ROWS, TOPK] */
	int32_t *ids[SLOTS];   /* [ROWS, TOPK]: experts, or rows of the cache */
	uint16_t *cache[SLOTS]; /* [CACHE, DIM] f16 */
	uint64_t requests, stale, reconnects, wrong, lost, worst_ns;
};

static size_t y_bytes(void)
{
	return 4ull * ROWS * info.n_logical;
}

static void fill(struct worker *w, unsigned slot)
{
	for (size_t i = 0; i < (size_t)ROWS * info.k_logical; i++)
		w->x[slot][i] = (float)((i * 37 + slot * 11 + w->index * 5) % 64) / 32 - 1;
	for (uint32_t i = 0; i < ROWS * TOPK; i++) {
		w->weights[slot][i] = 0.25f;
		w->ids[slot][i] = (int32_t)((i * 7 + slot) % (mla ? CACHE : info.nr_experts ? info.nr_experts : 1));
	}
	for (uint32_t i = 0; i < CACHE * DIM; i++)
		w->cache[slot][i] = (uint16_t)(0x3000 + (i * 29 + slot * 3 + w->index) % 0x800);
}

static bool same_input(struct worker *w, unsigned slot)
{
	for (size_t i = 0; i < (size_t)ROWS * info.k_logical; i++)
		if (w->x[slot][i] != (float)((i * 37 + slot * 11 + w->index * 5) % 64) / 32 - 1)
			return false;
	return true;
}

static void describe(struct exl3_sqe *sqe, struct worker *w, unsigned slot)
{
	exl3_ref x = exl3_arena_ref(arena, w->x[slot]), y = exl3_arena_ref(arena, w->y[slot]);
	exl3_ref ids = exl3_arena_ref(arena, w->ids[slot]);

	if (mla)
		exl3_prep_mla(sqe, geometry, x, EXL3_F32, exl3_arena_ref(arena, w->cache[slot]), ids, y,
			      EXL3_F32, EXL3_REF_NONE, ROWS, 0.125f, 1);
	else if (info.kind == EXL3_KIND_MOE)
		exl3_prep_moe(sqe, mod, x, EXL3_F32, y, EXL3_F32, ROWS, ids, EXL3_I32,
			      exl3_arena_ref(arena, w->weights[slot]), EXL3_F32, TOPK);
	else if (info.kind == EXL3_KIND_MLP)
		exl3_prep_mlp(sqe, mod, x, EXL3_F32, y, EXL3_F32, ROWS);
	else
		exl3_prep_linear(sqe, mod, x, EXL3_F32, y, EXL3_F32, ROWS);
}

/* false: the worker is gone. */
static bool send(struct exl3_channel *ch, struct worker *w, unsigned slot)
{
	struct exl3_sqe *sqe = exl3_sq_get(ch);

	if (!sqe)
		return false;
	memset(w->y[slot], 0xff, y_bytes());
	describe(sqe, w, slot);
	sqe->user_data = slot;
	return exl3_submit(ch) == 1;
}

static void check(struct worker *w, unsigned slot, bool first)
{
	if (first)
		memcpy(w->want[slot], w->y[slot], y_bytes());
	else if (memcmp(w->want[slot], w->y[slot], y_bytes()))
		w->wrong++;
}

/* Everything outstanding ends, each request once. Returns false if the worker is gone, or as good as. */
static bool drain(struct exl3_channel *ch, struct worker *w, unsigned sent, bool first)
{
	bool seen[SLOTS] = {false}, alive = true;
	struct exl3_cqe cqe;

	for (unsigned i = 0; i < sent; i++) {
		int r = exl3_wait(ch, &cqe, WAIT_NS);

		if (r != 1) {
			w->lost += sent - i;
			return false;
		}
		if (cqe.user_data >= sent || seen[cqe.user_data])
			die("completion of a request that was not sent: %llu",
			    (unsigned long long)cqe.user_data);
		seen[cqe.user_data] = true;
		w->requests++;
		if (cqe.result == 0) {
			check(w, (unsigned)cqe.user_data, first);
		} else if (cqe.result == -ESTALE || cqe.result == -EIO) {
			/* -EIO: the device has failed, and the worker is about to leave. */
			w->stale++;
			alive = false;
		} else {
			die("result %d: %s", cqe.result, exl3_result_text(&cqe));
		}
	}
	return alive;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	struct exl3_channel *ch = NULL;
	uint64_t down = 0;
	bool first = true;
	int e;

	if (exl3_channel_new(client, 16, &ch) < 0)
		die("no channel");
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		unsigned sent = 0;
		bool alive = true;

		while (sent < SLOTS && (alive = send(ch, w, sent)))
			sent++;
		alive &= drain(ch, w, sent, first);
		if (alive && down) {
			uint64_t ns = now_ns() - down;

			w->worst_ns = ns > w->worst_ns ? ns : w->worst_ns;
			down = 0;
			puts("back");
			fflush(stdout);
		}
		if (alive && first) {
			first = false;
			__atomic_add_fetch(&ready, 1, __ATOMIC_SEQ_CST);
			while (__atomic_load_n(&paused, __ATOMIC_SEQ_CST))
				poll(NULL, 0, 1);
		}
		if (alive)
			continue;
		if (!down) {
			down = now_ns();
			w->reconnects++;
		}
		e = exl3_reconnect(client, WAIT_NS);
		if (e < 0)
			die("exl3_reconnect: %d", e);
		for (unsigned i = 0; i < SLOTS; i++)
			if (!same_input(w, i))
				die("the arena has lost its contents");
	}
	exl3_channel_free(ch);
	return NULL;
}

static void set_up(struct worker *w, unsigned index)
{
	w->index = index;
	for (unsigned i = 0; i < SLOTS; i++) {
		w->x[i] = exl3_arena_alloc(arena, 4ull * ROWS * info.k_logical);
		w->y[i] = exl3_arena_alloc(arena, y_bytes());
		w->weights[i] = exl3_arena_alloc(arena, 4 * ROWS * TOPK);
		w->ids[i] = exl3_arena_alloc(arena, 4 * ROWS * TOPK);
		w->cache[i] = exl3_arena_alloc(arena, 2 * CACHE * DIM);
		w->want[i] = malloc(y_bytes());
		if (!w->x[i] || !w->y[i] || !w->weights[i] || !w->ids[i] || !w->cache[i] || !w->want[i])
			die("no memory");
		fill(w, i);
	}
}

static void open_module(const char *model_name, const char *name)
{
	const struct exl3_mla_shape shape = {.heads = HEADS,
					     .dim = DIM,
					     .value_dim = DIM,
					     .topk = TOPK,
					     .slots = CACHE,
					     .cache_dtype = EXL3_F16,
					     .indices_dtype = EXL3_I32};
	struct exl3_model *model;

	if (mla) {
		info.k_logical = info.n_logical = HEADS * DIM;
		if (exl3_mla_register(client, &shape, &geometry) < 0)
			die("cannot register a geometry");
		return;
	}
	if (exl3_model_open(client, model_name, &model) < 0 ||
	    exl3_module_open(model, name, EXL3_KIND_ANY, &mod) < 0)
		die("cannot open %s of %s", name, model_name);
	exl3_model_close(model); /* a module does not need it */
	/* It gets the model's number: the next worker needs the model once more before the module, under another. */
	if (exl3_mla_register(client, &shape, &geometry) < 0)
		die("cannot register a geometry");
	exl3_module_get_info(mod, &info);
}

int main(int argc, char **argv)
{
	static struct worker w[THREADS_MAX];
	unsigned n = argc > 4 ? (unsigned)atoi(argv[4]) : 0;
	struct worker all = {0};
	char c;

	paused = argc > 5 && !strcmp(argv[5], "paused");
	if (n < 1 || n > THREADS_MAX) {
		fprintf(stderr, "usage: survivor SOCKET MODEL MODULE THREADS [manual]\n");
		return 2;
	}
	mla = !strcmp(argv[3], "mla");
	if (exl3_connect_flags(argv[1], "survivor",
			       argc > 5 && !strcmp(argv[5], "manual") ? EXL3_CONNECT_MANUAL : 0, &client) < 0)
		die("cannot connect");
	open_module(argv[2], argv[3]);
	if (exl3_arena_new(client,
			   n * SLOTS *
				   (y_bytes() + 4ull * ROWS * info.k_logical + 8 * ROWS * TOPK +
				    2 * CACHE * DIM + 512),
			   &arena) < 0)
		die("no arena");
	for (unsigned i = 0; i < n; i++)
		set_up(&w[i], i);
	for (unsigned i = 0; i < n; i++)
		if (pthread_create(&w[i].thread, NULL, work, &w[i]))
			die("no thread");
	while (__atomic_load_n(&ready, __ATOMIC_SEQ_CST) < n)
		poll(NULL, 0, 1);
	announce("ready");
	while (read(STDIN_FILENO, &c, 1) == 1)
		__atomic_store_n(&paused, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
	for (unsigned i = 0; i < n; i++) {
		pthread_join(w[i].thread, NULL);
		all.requests += w[i].requests;
		all.stale += w[i].stale;
		all.reconnects += w[i].reconnects;
		all.wrong += w[i].wrong;
		all.lost += w[i].lost;
		all.worst_ns = w[i].worst_ns > all.worst_ns ? w[i].worst_ns : all.worst_ns;
	}
	printf("{\"requests\": %llu, \"stale\": %llu, \"reconnects\": %llu, \"wrong\": %llu, \"lost\": %llu, "
	       "\"worst_ms\": %.1f}\n",
	       (unsigned long long)all.requests, (unsigned long long)all.stale,
	       (unsigned long long)all.reconnects, (unsigned long long)all.wrong,
	       (unsigned long long)all.lost, (double)all.worst_ns / 1e6);
	exl3_close(client);
	return all.wrong || all.lost ? 1 : 0;
}
