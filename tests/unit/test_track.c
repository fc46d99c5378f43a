/* SPDX-License-Identifier: Apache-2.0 */
/* test_track.c - works on tracks: the bits of submit(), in several threads at once and beside it. */
#include "tests/test.h"

#include "kernels/backend.h"
#include "kernels/format.h"

#include <pthread.h>
#include <sched.h>

static const struct exl3_backend_ops *const ops = &exl3_backend_cpu;

enum { K = 256, N = 384, M = 9, EXPERTS = 5, TOPK = 2, HEADS = 4, DIM = 64, VALUE = 48, SLOTS = 40, KEYS = 24 };
enum { LINEAR, MERGED, SHARDS, MLP, MOE, MLA, NR_WORKS };
enum { ROUNDS = 20, THREADS = 3 };

/* Operands that everybody reads. */
static struct {
	struct exl3_matrix up[EXPERTS], gate[EXPERTS], down[EXPERTS];
	float x[M * K], q[M * HEADS * DIM];
	uint16_t cache[SLOTS * DIM];
	int32_t ids[M * TOPK], slots[M * KEYS];
	float weights[M * TOPK];
} in;

/* One thread's works and where they write. */
struct set {
	const struct exl3_matrix *shard[2];
	struct exl3_expert expert[EXPERTS];
	struct exl3_rows rows[NR_WORKS][2];
	struct exl3_route route[1];
	struct exl3_mla_cache cache[1];
	struct exl3_work work[NR_WORKS];
	uint64_t skipped[NR_WORKS][2];
	float y[NR_WORKS][M * 2 * N];
};

static uint32_t g_random = 1;

static uint32_t next(void)
{
	return (g_random = g_random * 1664525u + 1013904223u) >> 8;
}

static void matrix_init(struct exl3_matrix *w, uint32_t k, uint32_t n)
{
	size_t words = exl3_trellis_bytes(k, n, 8) / 2;
	uint16_t *trellis = malloc(2 * words), *suh = malloc(2 * k), *svh = malloc(2 * n);

	assert_true(trellis && suh && svh);
	for (size_t i = 0; i < words; i++)
		trellis[i] = (uint16_t)next();
	for (uint32_t i = 0; i < k; i++)
		suh[i] = next() & 1 ? 0x2c00 : 0xac66;
	for (uint32_t i = 0; i < n; i++)
		svh[i] = next() & 1 ? 0x3400 : 0xb100;
	*w = (struct exl3_matrix){.k = k, .n = n, .k_log = k, .n_log = n, .rate2 = 8, .codebook = EXL3_CB_MUL1,
				  .trellis = trellis, .suh = suh, .svh = svh};
}

static void matrix_fini(struct exl3_matrix *w)
{
	free((void *)w->trellis);
	free((void *)w->suh);
	free((void *)w->svh);
}

static int make_operands(void **state)
{
	(void)state;
	for (int e = 0; e < EXPERTS; e++) {
		matrix_init(&in.up[e], K, N);
		matrix_init(&in.gate[e], K, N);
		matrix_init(&in.down[e], N, K);
	}
	for (int i = 0; i < M * K; i++)
		in.x[i] = (float)(next() & 0xffff) / 65536 - 0.5f;
	for (int i = 0; i < M * HEADS * DIM; i++)
		in.q[i] = (float)(next() & 0xffff) / 65536 - 0.5f;
	for (int i = 0; i < SLOTS * DIM; i++)
		in.cache[i] = (uint16_t)(0x3000 + (next() & 0xfff)); /* f16, about 0.1 to 2 */
	for (int i = 0; i < M * TOPK; i++) {
		in.ids[i] = i == 3 ? EXPERTS : (int32_t)(next() % EXPERTS);
		in.weights[i] = 0.5f;
	}
	for (int i = 0; i < M * KEYS; i++)
		in.slots[i] = i % 50 == 7 ? SLOTS + i : (int32_t)(next() % SLOTS);
	return 0;
}

static int free_operands(void **state)
{
	(void)state;
	for (int e = 0; e < EXPERTS; e++) {
		matrix_fini(&in.up[e]);
		matrix_fini(&in.gate[e]);
		matrix_fini(&in.down[e]);
	}
	return 0;
}

static struct set *set_new(void)
{
	struct set *s = calloc(1, sizeof(*s));

	assert_non_null(s);
	s->shard[0] = &in.gate[0];
	s->shard[1] = &in.up[0];
	for (int e = 0; e < EXPERTS; e++)
		s->expert[e] = (struct exl3_expert){&in.gate[e], &in.up[e], &in.down[e]};
	for (int w = 0; w < NR_WORKS; w++) {
		const uint32_t n = w == SHARDS ? 2 * N : w == LINEAR || w == MERGED ? N : K;

		s->rows[w][0] = (struct exl3_rows){.x = in.x, .y = s->y[w], .x_stride = 4 * K, .y_stride = 4 * n,
						   .m = M, .x_dtype = EXL3_F32, .y_dtype = EXL3_F32};
		s->work[w] = (struct exl3_work){.op = EXL3_OP_LINEAR, .rows = s->rows[w], .nr_rows = 1,
						.skipped = s->skipped[w], .tag = s};
		s->work[w].u.linear = (struct exl3_linear_args){s->shard, w == SHARDS ? 2 : 1};
	}
	/* The same rows as two requests. */
	s->rows[MERGED][1] = s->rows[MERGED][0];
	s->rows[MERGED][0].m = 2;
	s->rows[MERGED][1].m = M - 2;
	s->rows[MERGED][1].x = in.x + 2 * K;
	s->rows[MERGED][1].y = s->y[MERGED] + 2 * N;
	s->work[MERGED].nr_rows = 2;
	s->work[MLP].op = EXL3_OP_MLP;
	s->work[MLP].u.moe = (struct exl3_moe_args){.experts = s->expert, .nr_experts = 1, .act = EXL3_ACT_SILU,
						    .routed_scale = 1};
	s->work[MOE].op = EXL3_OP_MOE;
	s->work[MOE].u.moe = s->work[MLP].u.moe;
	s->work[MOE].u.moe.nr_experts = EXPERTS;
	s->work[MOE].u.moe.routes = s->route;
	s->route[0] = (struct exl3_route){in.ids, in.weights, TOPK, EXL3_I32, EXL3_F32};
	s->rows[MLA][0].x = in.q;
	s->rows[MLA][0].x_stride = 4 * HEADS * DIM;
	s->rows[MLA][0].y_stride = 4 * HEADS * VALUE;
	s->cache[0] = (struct exl3_mla_cache){.cache = in.cache, .indices = in.slots, .scale = 0.125f, .kv_scale = 1};
	s->work[MLA].op = EXL3_OP_MLA_DECODE;
	s->work[MLA].u.mla = (struct exl3_mla_args){
		.caches = s->cache,
		.geometry = {.heads = HEADS, .dim = DIM, .value_dim = VALUE, .topk = KEYS, .slots = SLOTS,
			     .cache_stride = 2 * DIM, .indices_stride = 4 * KEYS, .cache_dtype = EXL3_F16,
			     .indices_dtype = EXL3_I32, .page_rows = 1, .table_queries = 1}};
	return s;
}

static struct exl3_dev *open_device(void)
{
	struct exl3_dev_options opt = {.numa_node = -1, .threads = 2};
	struct exl3_dev *dev = NULL;
	struct exl3_error err;

	test_code(ops->open(&opt, &dev, &err), 0, &err);
	return dev;
}

static void submit(struct exl3_dev *dev, struct set *s)
{
	struct exl3_done done;
	int n;

	for (int w = 0; w < NR_WORKS; w++) {
		assert_int_equal(ops->submit(dev, &s->work[w]), 0);
		while ((n = ops->poll(dev, &done, 1)) == 0)
			sched_yield();
		assert_int_equal(n, 1);
		assert_int_equal(done.result, 0);
	}
}

/* ---- threads with a track each ---- */

struct runner {
	struct exl3_dev *dev;
	const struct set *want;
	struct set *set;
	uint64_t skipped;
	int wrong; /* works whose result, bits or counters were others */
};

static void *run_track(void *arg)
{
	struct runner *r = arg;
	struct exl3_track_options opt = {.threads = 1 + (unsigned)(r->skipped & 1)};
	struct exl3_track *track = NULL;
	struct exl3_error err;

	if (ops->track_new(r->dev, &opt, &track, &err)) {
		r->wrong = -1;
		return NULL;
	}
	for (int i = 0; i < ROUNDS; i++)
		for (int w = 0; w < NR_WORKS; w++) {
			memset(r->set->y[w], 0xff, sizeof(r->set->y[w]));
			r->wrong += ops->track_run(track, &r->set->work[w], NULL) != 0 ||
				    memcmp(r->set->y[w], r->want->y[w], sizeof(r->want->y[w])) ||
				    memcmp(r->set->skipped[w], r->want->skipped[w], sizeof(r->want->skipped[w]));
		}
	if (ops->track_skipped(track, &r->skipped))
		r->wrong++;
	ops->track_free(track);
	return NULL;
}

/* Every operation, in three threads and through submit() at the same time: the same bits and counters. */
static void beside(void **state)
{
	struct exl3_dev *dev = open_device();
	struct set *want = set_new(), *own = set_new();
	struct runner runner[THREADS];
	pthread_t thread[THREADS];
	uint64_t bad = 0;

	(void)state;
	memset(want->y, 0xff, sizeof(want->y));
	submit(dev, want);
	for (int w = 0; w < NR_WORKS; w++)
		bad += want->skipped[w][0] + want->skipped[w][1];
	assert_int_equal(want->skipped[MOE][0], 1);
	assert_true(want->skipped[MLA][0] > 0);
	for (int i = 0; i < THREADS; i++) {
		runner[i] = (struct runner){.dev = dev, .want = want, .set = set_new(), .skipped = (uint64_t)i};
		assert_int_equal(pthread_create(&thread[i], NULL, run_track, &runner[i]), 0);
	}
	for (int i = 0; i < ROUNDS; i++) {
		memset(own->y, 0xff, sizeof(own->y));
		submit(dev, own);
		assert_memory_equal(own->y, want->y, sizeof(own->y));
	}
	for (int i = 0; i < THREADS; i++) {
		assert_int_equal(pthread_join(thread[i], NULL), 0);
		assert_int_equal(runner[i].wrong, 0);
		assert_int_equal(runner[i].skipped, ROUNDS * bad);
		free(runner[i].set);
	}
	free(want);
	free(own);
	ops->close(dev);
}

/* What a track refuses, and that its workspace is counted and comes back. */
static void refused(void **state)
{
	struct exl3_track_options opt = {.workspace_bytes = 1, .threads = 1000};
	struct exl3_dev *dev = open_device();
	struct set *s = set_new();
	struct exl3_signal signal = {NULL, 0};
	struct exl3_track *track = NULL;
	struct exl3_dev_info before, with, after;
	struct exl3_error err;

	(void)state;
	ops->info(dev, &before);
	test_code(ops->track_new(dev, &opt, &track, &err), 0, &err);
	ops->info(dev, &with);
	assert_true(with.workspace_bytes >= before.workspace_bytes + (1 << 20));
	s->work[LINEAR].signals = &signal;
	s->work[LINEAR].nr_signals = 1;
	assert_int_equal(ops->track_run(track, &s->work[LINEAR], NULL), -EINVAL);
	s->work[LINEAR].nr_signals = 0;
	assert_int_equal(ops->track_run(track, &s->work[LINEAR], s), -EINVAL); /* there are no streams here */
	assert_int_equal(ops->track_run(track, &s->work[LINEAR], NULL), 0);
	s->work[LINEAR].op = EXL3_OP_NOP;
	assert_int_equal(ops->track_run(track, &s->work[LINEAR], NULL), 0);
	s->work[LINEAR].op = EXL3_OP_CANCEL;
	assert_int_equal(ops->track_run(track, &s->work[LINEAR], NULL), -EOPNOTSUPP);
	assert_null(ops->track_free(track));
	ops->info(dev, &after);
	assert_int_equal(after.workspace_bytes, before.workspace_bytes);
	assert_null(ops->track_free(NULL));
	free(s);
	ops->close(dev);
}

static void *leave(void *arg)
{
	pthread_exit(arg);
}

/* Threads of a team leave by pthread_exit(), which loads the unwinder once: before descriptors are counted. */
static int prepare(void **state)
{
	pthread_t thread;

	return make_operands(state) || pthread_create(&thread, NULL, leave, NULL) || pthread_join(thread, NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {test_case(beside), test_case(refused)};

	return cmocka_run_group_tests(tests, prepare, free_operands);
}
