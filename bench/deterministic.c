/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deterministic.c - the price of bits that depend on a request alone, and what merging gives back of it.
 *
 *       deterministic [--backend NAME] [-o FILE.csv]
 *
 * Decoders of one row each at one module. us per request, through the backend's queue as the daemon uses it:
 *   free          the backend chooses, each request is a launch
 *   free_merged   all requests of a launch share the weights
 *   det           deterministic, each request is a launch
 *   det_merged    deterministic and in one launch, where the backend says that they may meet
 * Weights are random and larger than any cache, by copies of the module that take turns.
 */
#include "bench/bench.h"

#include "kernels/backend.h"
#include "kernels/format.h"

#include <errno.h>
#include <getopt.h>
#include <poll.h>

#define REQUESTS_MAX 8u
#define COPIES_MAX   64u
#define AHEAD        8u /* works in the queue, as the daemon has by default */
#define ROUNDS       7u

struct shape {
	const char *op;
	uint32_t k, n; /* linear: its sizes; moe, mlp: hidden, intermediate */
	uint32_t experts, topk;
	int rate2, codebook;
};

static const struct shape shapes[] = {
	{"linear", 4096, 4096, 0, 0, 8, EXL3_CB_MCG},   {"linear", 4096, 4096, 0, 0, 8, EXL3_CB_MUL1},
	{"linear", 5120, 17408, 0, 0, 8, EXL3_CB_MCG},  {"linear", 17408, 5120, 0, 0, 8, EXL3_CB_MUL1},
	{"mlp", 4096, 12288, 1, 0, 8, EXL3_CB_MCG},     {"moe", 2048, 768, 128, 8, 8, EXL3_CB_MCG},
	{"moe", 2048, 512, 256, 8, 8, EXL3_CB_MUL1},
};

struct rig {
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev;
	struct exl3_slab *slab;
	struct exl3_arena *arena;
	size_t used;
	struct exl3_matrix *mats; /* [copies][experts][3] or [copies] */
	const struct exl3_matrix **shards;
	struct exl3_expert *experts;
	void *plans[COPIES_MAX];
	unsigned copies;
};

static void die(const char *what, const struct exl3_error *err)
{
	fprintf(stderr, "deterministic: %s: %s\n", what, err ? err->text : "failed");
	exit(1);
}

static void *carve(struct rig *r, size_t bytes)
{
	char *p = (char *)r->slab->ptr + r->used;

	r->used += (bytes + 255) & ~(size_t)255;
	if (r->used > r->slab->bytes)
		die("the slab is too small", NULL);
	return p;
}

static struct exl3_matrix matrix(struct rig *r, uint32_t k, uint32_t n, const struct shape *s)
{
	struct exl3_matrix m = {.k = k, .n = n, .k_log = k, .n_log = n, .rate2 = (uint8_t)s->rate2,
				.codebook = (uint8_t)s->codebook};

	m.trellis = carve(r, exl3_trellis_bytes(k, n, s->rate2));
	m.suh = (char *)r->slab->ptr; /* the slab begins with ones */
	m.svh = (char *)r->slab->ptr;
	return m;
}

static size_t bytes_of(const struct shape *s)
{
	size_t one = exl3_trellis_bytes(s->k, s->n, s->rate2) + 256;

	return s->experts ? 3 * one * s->experts : one;
}

/* Copies of the module in a slab of random words. */
static void build(struct rig *r, const struct shape *s, size_t cache)
{
	const size_t piece = 8u << 20, ones = 128 << 10;
	size_t each = bytes_of(s), at;
	uint16_t *words = malloc(piece);
	uint64_t seed = 1;
	struct exl3_error err;

	r->copies = (unsigned)(cache / each + 1);
	r->copies = r->copies > COPIES_MAX ? COPIES_MAX : r->copies;
	if (!words || r->ops->slab_new(r->dev, each * r->copies + ones, &r->slab, &err))
		die("memory", words ? &err : NULL);
	for (size_t i = 0; i < piece / 2; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		words[i] = (uint16_t)(seed >> 40);
	}
	for (at = 0; at < r->slab->bytes; at += piece)
		if (r->ops->slab_write(r->slab, at, words, r->slab->bytes - at < piece ? r->slab->bytes - at : piece,
				       &err) ||
		    r->ops->slab_sync(r->slab, &err))
			die("weights", &err);
	for (size_t i = 0; i < ones / 2; i++)
		words[i] = 0x3c00 - (uint16_t)((i & 1) << 10); /* 1 and 0.5 */
	if (r->ops->slab_write(r->slab, 0, words, ones, &err) || r->ops->slab_sync(r->slab, &err))
		die("weights", &err);
	free(words);
	r->used = ones;
	r->mats = calloc((size_t)r->copies * (s->experts ? 3 * s->experts : 1), sizeof(*r->mats));
	r->shards = calloc(r->copies, sizeof(*r->shards));
	r->experts = calloc((size_t)r->copies * (s->experts + 1), sizeof(*r->experts));
	for (unsigned c = 0; c < r->copies; c++) {
		if (!s->experts) {
			r->mats[c] = matrix(r, s->k, s->n, s);
			r->shards[c] = &r->mats[c];
			continue;
		}
		for (uint32_t e = 0; e < s->experts; e++) {
			struct exl3_matrix *m = &r->mats[(c * s->experts + e) * 3];

			m[0] = matrix(r, s->k, s->n, s);
			m[1] = matrix(r, s->k, s->n, s);
			m[2] = matrix(r, s->n, s->k, s);
			r->experts[c * s->experts + e] = (struct exl3_expert){&m[0], &m[1], &m[2]};
		}
		if (r->ops->moe_plan && r->ops->moe_plan(r->dev, &r->experts[c * s->experts], s->experts,
							 &r->plans[c], &err))
			die("plan", &err);
	}
}

static void destroy(struct rig *r)
{
	for (unsigned c = 0; c < r->copies; c++) {
		if (r->plans[c])
			r->ops->moe_plan_free(r->dev, r->plans[c]);
		r->plans[c] = NULL;
	}
	r->slab = r->ops->slab_free(r->slab);
	free(r->mats);
	free(r->shards);
	free(r->experts);
}

/* Rows of request @i in the arena; decoders choose experts of their own. */
static void describe(struct rig *r, const struct shape *s, uint32_t i, struct exl3_rows *rows,
		     struct exl3_route *route)
{
	char *base = (char *)r->arena->host_ptr + i * (512u << 10), *dev = (char *)r->arena->dev_ptr + i * (512u << 10);
	int32_t *ids = (int32_t *)(base + (384u << 10));
	float *weights = (float *)(base + (388u << 10));

	for (uint32_t c = 0; c < s->k; c++)
		((uint16_t *)base)[c] = exl3_f32_to_f16((float)((c * 37 + i * 11) % 101) / 50 - 1);
	for (uint32_t t = 0; t < s->topk; t++) {
		ids[t] = (int32_t)((i * 29 + t * 17) % s->experts);
		weights[t] = 1.0f / (float)s->topk;
	}
	*rows = (struct exl3_rows){.x = dev,
				   .y = dev + (128u << 10),
				   .x_stride = 2 * s->k,
				   .y_stride = 2 * (s->experts ? s->k : s->n),
				   .m = 1,
				   .x_dtype = EXL3_F16,
				   .y_dtype = EXL3_F16};
	*route = (struct exl3_route){.ids = dev + (384u << 10),
				     .weights = dev + (388u << 10),
				     .topk = s->topk,
				     .ids_dtype = EXL3_I32,
				     .weights_dtype = EXL3_F32};
}

static void take(struct rig *r, unsigned *running)
{
	struct exl3_done done[AHEAD];
	int n = r->ops->poll(r->dev, done, AHEAD);

	if (n < 0)
		die("the device is lost", NULL);
	for (int i = 0; i < n; i++)
		if (done[i].result)
			die(strerror(-done[i].result), NULL);
	*running -= (unsigned)n;
}

/* us per request of @turns launches, of all requests or of one each. */
static double run(struct rig *r, const struct shape *s, bool deterministic, bool merged, unsigned turns)
{
	static struct exl3_work works[AHEAD];
	static uint64_t skipped[AHEAD][REQUESTS_MAX];
	struct exl3_rows rows[REQUESTS_MAX];
	struct exl3_route routes[REQUESTS_MAX];
	double samples[ROUNDS];

	for (uint32_t i = 0; i < REQUESTS_MAX; i++)
		describe(r, s, i, &rows[i], &routes[i]);
	for (unsigned round = 0; round < ROUNDS; round++) {
		uint64_t start = exl3_now_ns();
		unsigned running = 0, slot = 0, copy = 0;

		/* Requests of a turn meet one copy of the weights, also where they come one by one. */
		for (unsigned t = 0; t < turns; t++, copy = (copy + 1) % r->copies)
			for (unsigned i = 0; i < (merged ? 1 : REQUESTS_MAX); i++) {
				struct exl3_work *w = &works[slot];

				while (running == AHEAD)
					take(r, &running);
				*w = (struct exl3_work){.deterministic = deterministic,
							.rows = &rows[i],
							.nr_rows = merged ? REQUESTS_MAX : 1,
							.skipped = skipped[slot],
							.tag = w};
				w->op = !s->experts ? EXL3_OP_LINEAR : s->topk ? EXL3_OP_MOE : EXL3_OP_MLP;
				if (!s->experts) {
					w->u.linear.shards = &r->shards[copy];
					w->u.linear.nr_shards = 1;
				} else {
					w->u.moe.experts = &r->experts[copy * s->experts];
					w->u.moe.nr_experts = s->experts;
					w->u.moe.plan = r->plans[copy];
					w->u.moe.act = EXL3_ACT_SILU;
					w->u.moe.routed_scale = 1;
					w->u.moe.routes = s->topk ? &routes[i] : NULL;
				}
				if (r->ops->submit(r->dev, w))
					die("submit", NULL);
				running++;
				slot = (slot + 1) % AHEAD;
			}
		while (running)
			take(r, &running);
		samples[round] = (double)(exl3_now_ns() - start) / 1e3 / turns / REQUESTS_MAX;
	}
	return bench_median(samples, ROUNDS);
}

int main(int argc, char **argv)
{
	const struct exl3_dev_options opt = {.numa_node = -1};
	const char *backend = "auto", *out = NULL;
	struct bench_file file = {0};
	struct exl3_dev_info info;
	struct exl3_error err = {0};
	struct rig r = {0};
	bool cpu;
	int c;
	static const struct option options[] = {{"backend", required_argument, NULL, 'b'}, {NULL, 0, NULL, 0}};

	while ((c = getopt_long(argc, argv, "o:", options, NULL)) != -1) {
		if (c == 'b')
			backend = optarg;
		else if (c == 'o')
			out = optarg;
		else
			return 2;
	}
	r.ops = exl3_backend_find(backend);
	if (!r.ops || r.ops->probe(&err) <= 0) {
		printf("skipped: no device of backend %s\n", backend);
		return 77;
	}
	if (r.ops->open(&opt, &r.dev, &err) || r.ops->arena_new(r.dev, REQUESTS_MAX * (512u << 10), &r.arena, &err))
		die("open", &err);
	r.ops->info(r.dev, &info);
	cpu = !strcmp(r.ops->name, "cpu");
	printf("%-8s %6s %6s %5s %9s %12s %9s %12s\n", "op", "k", "n", "cb", "free", "free_merged", "det", "det_merged");
	if (out)
		file = bench_open(out, argc, argv, info.name, "8 requests of one row, microseconds per request",
				  "op,k,n,experts,topk,bits,codebook,free,free_merged,det,det_merged");
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		const struct shape *s = &shapes[i];
		unsigned turns = cpu ? 1 : 40;
		double us[4];

		build(&r, s, cpu ? 0 : 256u << 20);
		for (int j = 0; j < 4; j++)
			us[j] = run(&r, s, j >= 2, j & 1, turns);
		printf("%-8s %6u %6u %5d %9.2f %12.2f %9.2f %12.2f\n", s->op, s->k, s->n, s->codebook, us[0], us[1],
		       us[2], us[3]);
		fflush(stdout);
		if (out)
			bench_row(&file, "%s,%u,%u,%u,%u,%g,%d,%.2f,%.2f,%.2f,%.2f", s->op, s->k, s->n, s->experts,
				  s->topk, s->rate2 / 2.0, s->codebook, us[0], us[1], us[2], us[3]);
		destroy(&r);
	}
	if (out)
		bench_close(&file);
	r.ops->arena_free(r.arena);
	r.ops->close(r.dev);
	return 0;
}
