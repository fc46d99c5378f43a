/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_rig.h - for programs that check or measure tracks and plans: the CUDA backend from its plugin, a small model
 * of random weights, calls of every kind in an arena in host memory, and their results by submit().
 */
#ifndef EXL3_TESTS_GPU_PLAN_RIG_H
#define EXL3_TESTS_GPU_PLAN_RIG_H

#include "facts/mps.h"

#include "kernels/backend.h"
#include "kernels/format.h"

#define RIG_K     1024u
#define RIG_N     1536u
#define RIG_M     64u   /* rows of a call at most */
#define RIG_HEADS 16u
#define RIG_DIM   576u
#define RIG_VALUE 512u
#define RIG_SLOTS 512u
#define RIG_KEYS  128u
#define RIG_EXPERTS 8u
#define RIG_TOPK  2u

enum rig_kind { RIG_ONE, RIG_MANY, RIG_PAIR, RIG_SHARDS, RIG_MLP, RIG_MOE, RIG_MLA, RIG_KINDS };
static const char *const rig_names[] = {"linear m=1", "linear m=64", "two requests", "shards", "mlp", "moe", "mla"};

/* Bytes of one call in the arena. */
#define RIG_X_BYTES (RIG_M * RIG_HEADS * RIG_DIM * 2u) /* the largest is no x but q, with fewer rows */
#define RIG_Y_BYTES (RIG_M * 2u * RIG_N * 2u)
#define RIG_ID_BYTES 4096u

struct rig {
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev;
	struct exl3_slab *slab;
	struct exl3_arena *arena;
	size_t slab_used, arena_used;
	uint64_t random;
	struct exl3_matrix gate[RIG_EXPERTS], up[RIG_EXPERTS], down[RIG_EXPERTS];
	struct exl3_expert expert[RIG_EXPERTS];
	const struct exl3_matrix *shard[2];
	void *experts;           /* moe_plan() of all */
	void *cache, *indices;
	size_t y_ref;            /* offset of a y for reference results */
};

struct rig_call {
	enum rig_kind kind;
	size_t x, y, ids; /* offsets in the arena */
	size_t x_bytes, y_bytes;
	struct exl3_rows rows[2];
	struct exl3_moe_args::exl3_route route;
	struct exl3_mla_args::exl3_mla_cache cache;
	struct exl3_work work;
	uint64_t skipped[2];
};

static inline uint32_t rig_random(struct rig *r)
{
	r->random = r->random * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(r->random >> 33);
}

static inline void *rig_host(const struct rig *r, size_t at)
{
	return (char *)r->arena->host_ptr + at;
}

static inline void *rig_dev(const struct rig *r, size_t at)
{
	return (char *)r->arena->dev_ptr + at;
}

static inline size_t rig_take(struct rig *r, size_t bytes)
{
	const size_t at = r->arena_used;

	r->arena_used += (bytes + 255) / 256 * 256;
	if (r->arena_used > r->arena->bytes)
		die("the arena is too small");
	return at;
}

/* Words of 16 bits in the slab: any (trellis, @mask 0xffff), or @base with random bits of @mask. */
static inline void *rig_words(struct rig *r, size_t nr, uint16_t base, uint16_t mask)
{
	uint16_t *w = (uint16_t *)malloc(2 * nr);
	struct exl3_error err;
	void *at = (char *)r->slab->ptr + r->slab_used;

	if (!w)
		die("out of memory");
	for (size_t i = 0; i < nr; i++)
		w[i] = (uint16_t)(base ^ (rig_random(r) & mask));
	if (r->ops->slab_write(r->slab, r->slab_used, w, 2 * nr, &err) || r->ops->slab_sync(r->slab, &err))
		die("slab: %s", err.text);
	free(w);
	r->slab_used += (2 * nr + 255) / 256 * 256;
	return at;
}

static inline struct exl3_matrix rig_matrix(struct rig *r, uint32_t k, uint32_t n)
{
	struct exl3_matrix w = {};

	w.k = w.k_log = k;
	w.n = w.n_log = n;
	w.rate2 = 8;
	w.codebook = EXL3_CB_MCG;
	w.trellis = rig_words(r, exl3_trellis_bytes(k, n, 8) / 2, 0, 0xffff);
	w.suh = rig_words(r, k, 0x2c00, 0x8000); /* +-1/16 */
	w.svh = rig_words(r, n, 0x3400, 0x8000); /* +-1/4 */
	return w;
}

/* Exits with 77 where there is no plugin. CUDA_DEVICE_MAX_CONNECTIONS is set, so before any CUDA call. */
static inline void rig_open(struct rig *r, size_t arena_bytes)
{
	const char *dir = getenv("EXL3_BACKEND_DIR");
	struct exl3_dev_options opt = {};
	struct exl3_error err;
	char path[4096];

	memset(r, 0, sizeof(*r));
	r->random = 1;
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
	snprintf(path, sizeof(path), "%s/exl3-cuda.so", dir ? dir : "build");
	void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (!so) {
		printf("skipped: %s\n", dlerror());
		exit(77);
	}
	r->ops = (const struct exl3_backend_ops *)dlsym(so, "exl3_backend_cuda");
	const uint32_t *abi = (const uint32_t *)dlsym(so, "exl3_backend_cuda_abi");

	if (!r->ops || !abi || *abi != EXL3_BACKEND_ABI)
		die("%s is of another version", path);
	opt.numa_node = -1;
	opt.workspace_bytes = 64u << 20; /* as a track's: then both choose alike */
	if (r->ops->open(&opt, &r->dev, &err))
		die("open: %s", err.text);
	if (r->ops->slab_new(r->dev, 128u << 20, &r->slab, &err) || r->ops->arena_new(r->dev, arena_bytes, &r->arena, &err))
		die("memory: %s", err.text);
	for (uint32_t e = 0; e < RIG_EXPERTS; e++) {
		r->gate[e] = rig_matrix(r, RIG_K, RIG_N);
		r->up[e] = rig_matrix(r, RIG_K, RIG_N);
		r->down[e] = rig_matrix(r, RIG_N, RIG_K);
		r->expert[e] = {&r->gate[e], &r->up[e], &r->down[e]};
	}
	r->shard[0] = &r->gate[0];
	r->shard[1] = &r->up[0];
	if (r->ops->moe_plan(r->dev, r->expert, RIG_EXPERTS, &r->experts, &err))
		die("experts: %s", err.text);
	r->cache = rig_words(r, RIG_SLOTS * RIG_DIM, 0x3000, 0x87ff);

	int32_t *idx = (int32_t *)malloc(RIG_M * RIG_KEYS * 4);

	for (uint32_t i = 0; i < RIG_M * RIG_KEYS; i++)
		idx[i] = (int32_t)(rig_random(r) % (RIG_SLOTS + 1)); /* some invalid */
	r->indices = (char *)r->slab->ptr + r->slab_used;
	if (r->ops->slab_write(r->slab, r->slab_used, idx, RIG_M * RIG_KEYS * 4, &err) || r->ops->slab_sync(r->slab, &err))
		die("slab: %s", err.text);
	free(idx);
	r->slab_used += RIG_M * RIG_KEYS * 4;
	r->y_ref = rig_take(r, RIG_Y_BYTES);
}

static inline void rig_close(struct rig *r)
{
	r->ops->moe_plan_free(r->dev, r->experts);
	r->ops->arena_free(r->arena);
	r->ops->slab_free(r->slab);
	r->ops->close(r->dev);
}

/* A call with its own operands in the arena. */
static inline void rig_call_init(struct rig *r, struct rig_call *c, enum rig_kind kind)
{
	const uint32_t m = kind == RIG_MANY ? RIG_M : kind == RIG_ONE ? 1 : 5;
	const uint32_t n = kind == RIG_SHARDS ? 2 * RIG_N : kind == RIG_MLP || kind == RIG_MOE ? RIG_K : RIG_N;
	struct exl3_rows *a = &c->rows[0];

	memset(c, 0, sizeof(*c));
	c->kind = kind;
	a->m = m;
	a->x_dtype = a->y_dtype = EXL3_F16;
	a->x_stride = (kind == RIG_MLA ? RIG_HEADS * RIG_DIM : RIG_K) * 2;
	a->y_stride = (kind == RIG_MLA ? RIG_HEADS * RIG_VALUE : n) * 2;
	c->x_bytes = (size_t)m * a->x_stride;
	c->y_bytes = (size_t)m * a->y_stride;
	c->x = rig_take(r, c->x_bytes);
	c->y = rig_take(r, c->y_bytes);
	c->ids = rig_take(r, RIG_ID_BYTES);
	a->x = rig_dev(r, c->x);
	a->y = rig_dev(r, c->y);
	c->work.op = EXL3_OP_LINEAR;
	c->work.rows = c->rows;
	c->work.nr_rows = 1;
	c->work.skipped = c->skipped;
	c->work.u.linear.shards = r->shard;
	c->work.u.linear.nr_shards = kind == RIG_SHARDS ? 2 : 1;
	if (kind == RIG_PAIR) {
		c->rows[1] = *a;
		c->rows[0].m = 2;
		c->rows[1].m = m - 2;
		c->rows[1].x = (const char *)a->x + 2 * a->x_stride;
		c->rows[1].y = (char *)a->y + 2 * a->y_stride;
		c->work.nr_rows = 2;
	} else if (kind == RIG_MLP || kind == RIG_MOE) {
		c->work.op = kind == RIG_MLP ? EXL3_OP_MLP : EXL3_OP_MOE;
		c->work.u.moe = {};
		c->work.u.moe.experts = r->expert;
		c->work.u.moe.nr_experts = kind == RIG_MLP ? 1 : RIG_EXPERTS;
		c->work.u.moe.plan = kind == RIG_MLP ? NULL : r->experts;
		c->work.u.moe.act = EXL3_ACT_SILU;
		c->work.u.moe.routed_scale = 1;
		c->work.u.moe.routes = &c->route;
		c->route.ids = rig_dev(r, c->ids);
		c->route.weights = rig_dev(r, c->ids + RIG_ID_BYTES / 2);
		c->route.topk = RIG_TOPK;
		c->route.ids_dtype = EXL3_I32;
		c->route.weights_dtype = EXL3_F32;
	} else if (kind == RIG_MLA) {
		struct exl3_mla_geometry *g = &c->work.u.mla.geometry;

		c->work.op = EXL3_OP_MLA_DECODE;
		c->work.u.mla = {};
		c->work.u.mla.caches = &c->cache;
		c->cache.cache = r->cache;
		c->cache.indices = r->indices;
		c->cache.scale = 0.04f;
		c->cache.kv_scale = 1;
		g->heads = RIG_HEADS;
		g->dim = RIG_DIM;
		g->value_dim = RIG_VALUE;
		g->topk = RIG_KEYS;
		g->slots = RIG_SLOTS;
		g->cache_stride = RIG_DIM * 2;
		g->indices_stride = RIG_KEYS * 4;
		g->cache_dtype = EXL3_F16;
		g->indices_dtype = EXL3_I32;
		g->page_rows = 1;
		g->table_queries = 1;
	}
}

/* New operands: f16 between 1/8 and 1, either sign; ids of which one in nine is invalid. */
static inline void rig_fill(struct rig *r, struct rig_call *c)
{
	uint64_t *x = (uint64_t *)rig_host(r, c->x);
	int32_t *ids = (int32_t *)rig_host(r, c->ids);
	float *weights = (float *)rig_host(r, c->ids + RIG_ID_BYTES / 2);
	uint64_t v = r->random = r->random * 6364136223846793005u + 1442695040888963407u;

	for (size_t i = 0; i < c->x_bytes / 8; i++) {
		v ^= v << 13;
		v ^= v >> 7;
		v ^= v << 17;
		x[i] = (v & 0x87ff87ff87ff87ffull) | 0x3000300030003000ull;
	}
	for (uint32_t i = 0; c->kind == RIG_MOE && i < c->rows[0].m * RIG_TOPK; i++) {
		ids[i] = (int32_t)(rig_random(r) % (RIG_EXPERTS + 1));
		weights[i] = 0.25f + (float)(rig_random(r) & 3) / 4;
	}
}

/* @work through submit(), to its end. */
static inline int rig_submit(struct rig *r, struct exl3_work *work)
{
	const double limit = now_ms() + 10000;
	struct exl3_done done;
	int n;

	work->tag = work;
	if (r->ops->submit(r->dev, work))
		die("submit");
	while ((n = r->ops->poll(r->dev, &done, 1)) == 0)
		if (now_ms() > limit)
			die("a work does not end");
	if (n != 1 || done.tag != work)
		die("poll: %d", n);
	return done.result;
}

/* The same operands through submit(), into y_ref; the counters of invalid ids into @skipped. */
static inline void rig_reference(struct rig *r, const struct rig_call *c, uint64_t skipped[2])
{
	struct exl3_work work = c->work;
	struct exl3_rows rows[2] = {c->rows[0], c->rows[1]};

	rows[0].y = rig_dev(r, r->y_ref);
	rows[1].y = (char *)rows[0].y + 2 * rows[0].y_stride;
	work.rows = rows;
	work.skipped = skipped;
	skipped[0] = skipped[1] = 0;
	memset(rig_host(r, r->y_ref), 0xff, c->y_bytes);
	if (rig_submit(r, &work))
		die("%s: submit() failed", rig_names[c->kind]);
}

/* Does @c's y have the bits that submit() gives? */
static inline bool rig_same(struct rig *r, const struct rig_call *c, uint64_t *bad)
{
	uint64_t skipped[2];

	rig_reference(r, c, skipped);
	if (bad)
		*bad = skipped[0] + skipped[1];
	return !memcmp(rig_host(r, c->y), rig_host(r, r->y_ref), c->y_bytes);
}

/* Waits for the end of a plan's replay; its result. */
static inline int rig_wait(struct rig *r, void *tag, int limit_ms)
{
	const double limit = now_ms() + limit_ms;
	struct exl3_done done;
	int n;

	while ((n = r->ops->poll(r->dev, &done, 1)) == 0)
		if (now_ms() > limit)
			die("a replay does not end");
	if (n != 1 || done.tag != tag)
		die("poll: %d, or the end of something else", n);
	return done.result;
}

#endif
