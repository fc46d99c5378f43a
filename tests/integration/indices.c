/* SPDX-License-Identifier: Apache-2.0 */
/*
 * indices.c - expert ids and cache slots that lie, or that change while the daemon uses them.
 *
 * usage: indices SOCKET MODEL MOE_MODULE ROUNDS
 * One thread sends MoE and MLA requests, another rewrites ids and slots with random 32-bit numbers all the
 * time. Each request must end with result 0 or be refused; afterwards a clean request has the same bits
 * as before. Broken fields of MoE and MLA entries are tried first.
 */
#include <pthread.h>

#include "tests/integration/raw.h"

#define ROWS  64u
#define TOPK  8u
#define HEADS 2u
#define DIM   64u
#define SLOTS 128u
#define SPOTS 32u /* indices of one MLA query */

struct state {
	int sock;
	uint32_t moe, k, n, mla;
	struct raw_channel ch;
	struct raw_arena arena;
	/* Offsets in the arena. */
	uint64_t x, y, ids, weights, q, o, cache, slots, lse;
	bool stop; /* atomic */
};

static uint64_t rng(uint64_t *s)
{
	uint64_t z = *s += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static uint32_t *ints(struct state *s, uint64_t offset)
{
	return (uint32_t *)(void *)(s->arena.ptr + offset);
}

static float *floats(struct state *s, uint64_t offset)
{
	return (float *)(void *)(s->arena.ptr + offset);
}

static void clean_values(struct state *s)
{
	for (uint32_t i = 0; i < ROWS * TOPK; i++) {
		__atomic_store_n(&ints(s, s->ids)[i], i * 5 % 16, __ATOMIC_RELAXED);
		floats(s, s->weights)[i] = 0.125f;
	}
	for (uint32_t i = 0; i < ROWS * SPOTS; i++)
		__atomic_store_n(&ints(s, s->slots)[i], i * 7 % SLOTS, __ATOMIC_RELAXED);
}

static void register_mla(struct state *s)
{
	RAW_REQUEST(req, register_mla, REGISTER_MLA,
		    Exl3__RegisterMla body = EXL3__REGISTER_MLA__INIT);
	Exl3__Reply *reply;

	body.heads = HEADS;
	body.dim = body.value_dim = DIM;
	body.topk = SPOTS;
	body.slots = SLOTS;
	body.cache_dtype = EXL3_F16;
	body.indices_dtype = EXL3_I32;
	reply = raw_call_ok(s->sock, &req, NULL, NULL);
	if (reply->body_case != EXL3__REPLY__BODY_HANDLE)
		raw_die("RegisterMla: wrong kind of reply");
	s->mla = reply->handle->handle;
	exl3__reply__free_unpacked(reply, NULL);
}

static void set_up(struct state *s, const char *path, const char *model, const char *module)
{
	uint64_t at = 0;

	s->sock = raw_connect(path);
	raw_hello(s->sock, "indices");
	s->moe = raw_open_module(s->sock, raw_open_model(s->sock, model), module,
				 EXL3__MODULE_KIND__MODULE_MOE, &s->k, &s->n);
	s->ch = raw_channel_new(s->sock, 64);
	register_mla(s);
	s->x = at;
	s->y = at += 4ull * ROWS * s->k;
	s->ids = at += 4ull * ROWS * s->n;
	s->weights = at += 4ull * ROWS * TOPK;
	s->q = at += 4ull * ROWS * TOPK;
	s->o = at += 4ull * ROWS * HEADS * DIM;
	s->cache = at += 4ull * ROWS * HEADS * DIM;
	s->slots = at += 2ull * SLOTS * DIM;
	s->lse = at += 4ull * ROWS * SPOTS;
	s->arena = raw_arena_new(s->sock, at + 4ull * ROWS * HEADS);
	for (uint32_t i = 0; i < ROWS * s->k; i++)
		floats(s, s->x)[i] = (float)(int)(i % 13) * 0.125f - 0.75f;
	for (uint32_t i = 0; i < ROWS * HEADS * DIM; i++)
		floats(s, s->q)[i] = (float)(int)(i % 11) * 0.125f - 0.625f;
	for (uint32_t i = 0; i < SLOTS * DIM; i++) /* fp16 numbers of 0.5 to 2 */
		((uint16_t *)(void *)(s->arena.ptr + s->cache))[i] =
			(uint16_t)(0x3800 + i * 37 % 2048);
	clean_values(s);
}

static void prep_moe(struct state *s, struct exl3_sqe *sqe)
{
	sqe->op = EXL3_OP_MOE;
	sqe->flags = EXL3_DETERMINISTIC;
	sqe->x_dtype = sqe->y_dtype = EXL3_F32;
	sqe->module = s->moe;
	sqe->rows = ROWS;
	sqe->x = raw_ref(&s->arena, s->x);
	sqe->y = raw_ref(&s->arena, s->y);
	sqe->u.moe.ids = raw_ref(&s->arena, s->ids);
	sqe->u.moe.weights = raw_ref(&s->arena, s->weights);
	sqe->u.moe.topk = TOPK;
	sqe->u.moe.ids_dtype = EXL3_I32;
	sqe->u.moe.weights_dtype = EXL3_F32;
}

static void prep_mla(struct state *s, struct exl3_sqe *sqe)
{
	sqe->op = EXL3_OP_MLA_DECODE;
	sqe->flags = EXL3_DETERMINISTIC;
	sqe->x_dtype = sqe->y_dtype = EXL3_F32;
	sqe->module = s->mla;
	sqe->rows = ROWS;
	sqe->x = raw_ref(&s->arena, s->q);
	sqe->y = raw_ref(&s->arena, s->o);
	sqe->u.mla.cache = raw_ref(&s->arena, s->cache);
	sqe->u.mla.indices = raw_ref(&s->arena, s->slots);
	sqe->u.mla.lse = raw_ref(&s->arena, s->lse);
	sqe->u.mla.scale = 0.125f;
	sqe->u.mla.kv_scale = 1.0f;
}

static struct exl3_cqe finish(struct state *s, const char *what)
{
	struct exl3_cqe cqe = {0};

	raw_submit(&s->ch);
	if (!raw_take(&s->ch, &cqe, RAW_TIMEOUT_MS))
		raw_die("%s: no completion", what);
	return cqe;
}

/* Both requests with clean values: same bits each time. */
static void clean_run(struct state *s, const char *when)
{
	static float first_y[ROWS * 4096], first_o[ROWS * HEADS * DIM];
	static bool known;
	struct exl3_cqe cqe;

	if (s->n > 4096)
		raw_die("the module is too wide for this test");
	clean_values(s);
	prep_moe(s, raw_get(&s->ch));
	cqe = finish(s, when);
	if (cqe.result || cqe.detail)
		raw_die("%s: MoE: result %d, detail %llu", when, cqe.result,
			(unsigned long long)cqe.detail);
	prep_mla(s, raw_get(&s->ch));
	cqe = finish(s, when);
	if (cqe.result || cqe.detail)
		raw_die("%s: MLA: result %d, detail %llu", when, cqe.result,
			(unsigned long long)cqe.detail);
	if (known && (memcmp(first_y, floats(s, s->y), 4ull * ROWS * s->n) ||
		      memcmp(first_o, floats(s, s->o), sizeof(first_o))))
		raw_die("%s: other bits than the first time", when);
	memcpy(first_y, floats(s, s->y), 4ull * ROWS * s->n);
	memcpy(first_o, floats(s, s->o), sizeof(first_o));
	known = true;
}

/* Invalid numbers are skipped and counted, exactly; holes are not counted. */
static void counted(struct state *s)
{
	struct exl3_cqe cqe;

	clean_values(s);
	ints(s, s->ids)[3] = 16;
	ints(s, s->ids)[9] = 0x7fffffff;
	ints(s, s->ids)[10] = 0x80000000u;
	ints(s, s->ids)[11] = UINT32_MAX; /* a hole */
	ints(s, s->ids)[12] = UINT32_MAX - 1;
	prep_moe(s, raw_get(&s->ch));
	cqe = finish(s, "counted ids");
	if (cqe.result || cqe.detail != 4)
		raw_die("4 invalid ids: result %d, detail %llu", cqe.result,
			(unsigned long long)cqe.detail);
	ints(s, s->slots)[0] = SLOTS;
	ints(s, s->slots)[1] = UINT32_MAX;
	ints(s, s->slots)[ROWS * SPOTS - 1] = 0x80000000u;
	prep_mla(s, raw_get(&s->ch));
	cqe = finish(s, "counted slots");
	if (cqe.result || cqe.detail != 2)
		raw_die("2 invalid slots: result %d, detail %llu", cqe.result,
			(unsigned long long)cqe.detail);
}

static void *rewrite(void *arg)
{
	struct state *s = arg;
	uint64_t seed = 99;

	while (!__atomic_load_n(&s->stop, __ATOMIC_RELAXED)) {
		for (unsigned i = 0; i < 64; i++) {
			uint64_t r = rng(&seed);
			uint32_t v = r & 1 ? (uint32_t)(r >> 32) : (uint32_t)(r >> 60);

			__atomic_store_n(&ints(s, s->ids)[(r >> 8) % (ROWS * TOPK)], v,
					 __ATOMIC_RELAXED);
			__atomic_store_n(&ints(s, s->slots)[(r >> 8) % (ROWS * SPOTS)], v,
					 __ATOMIC_RELAXED);
		}
	}
	return NULL;
}

static void raced(struct state *s, unsigned rounds)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, rewrite, s))
		raw_die("no thread");
	for (unsigned i = 0; i < rounds; i++) {
		struct exl3_cqe cqe;

		if (i & 1)
			prep_moe(s, raw_get(&s->ch));
		else
			prep_mla(s, raw_get(&s->ch));
		cqe = finish(s, "raced");
		if (cqe.result || cqe.detail > ROWS * SPOTS)
			raw_die("round %u: result %d, detail %llu", i, cqe.result,
				(unsigned long long)cqe.detail);
	}
	__atomic_store_n(&s->stop, true, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
}

struct broken {
	const char *what;
	bool mla;
	unsigned detail;
	void (*spoil)(struct state *s, struct exl3_sqe *sqe);
};

#define SPOIL(name, ...)                                              \
	static void spoil_##name(struct state *s, struct exl3_sqe *e) \
	{                                                             \
		(void)s;                                              \
		__VA_ARGS__;                                          \
	}
SPOIL(topk_none, e->u.moe.topk = 0)
SPOIL(topk_many, e->u.moe.topk = EXL3_TOPK_MAX + 1)
SPOIL(ids_type, e->u.moe.ids_dtype = EXL3_F32)
SPOIL(weights_type, e->u.moe.weights_dtype = EXL3_I32)
SPOIL(ids_none, e->u.moe.ids = EXL3_REF_NONE)
SPOIL(ids_past, e->u.moe.ids = raw_ref(&s->arena, s->arena.bytes - 16))
SPOIL(weights_past, e->u.moe.weights = raw_ref(&s->arena, s->arena.bytes - 16))
SPOIL(ids_align, e->u.moe.ids += 4)
SPOIL(act, e->u.moe.act = EXL3_ACT_NR)
SPOIL(overrides, e->u.moe.overrides = 0x80)
SPOIL(limit_nan, e->u.moe.overrides = EXL3_MOE_LIMIT; e->u.moe.limit = 0.0f / 0.0f)
SPOIL(y_on_ids, e->y = e->u.moe.ids)
SPOIL(moe_handle, e->module = s->mla)
SPOIL(mla_handle, e->module = s->moe)
SPOIL(cache_none, e->u.mla.cache = EXL3_REF_NONE)
SPOIL(cache_past, e->u.mla.cache = raw_ref(&s->arena, s->arena.bytes - 64))
SPOIL(slots_past, e->u.mla.indices = raw_ref(&s->arena, s->arena.bytes - 64))
SPOIL(lse_past, e->u.mla.lse = raw_ref(&s->arena, s->arena.bytes))
SPOIL(o_on_cache, e->y += 16) /* the cache begins where o ends */
SPOIL(scale_nan, e->u.mla.scale = 0.0f / 0.0f)
SPOIL(mla_reserved, e->u.mla.reserved[5] = 1)
SPOIL(mla_stored, e->flags = EXL3_STORED)

static const struct broken broken[] = {
	{"topk 0", false, EXL3_DETAIL_TOPK, spoil_topk_none},
	{"topk above the limit", false, EXL3_DETAIL_TOPK, spoil_topk_many},
	{"ids of floats", false, EXL3_DETAIL_DTYPE, spoil_ids_type},
	{"weights of integers", false, EXL3_DETAIL_DTYPE, spoil_weights_type},
	{"no ids", false, EXL3_DETAIL_BUFFER, spoil_ids_none},
	{"ids past the end", false, EXL3_DETAIL_BOUNDS, spoil_ids_past},
	{"weights past the end", false, EXL3_DETAIL_BOUNDS, spoil_weights_past},
	{"ids off 16", false, EXL3_DETAIL_ALIGN, spoil_ids_align},
	{"unknown activation", false, EXL3_DETAIL_OP, spoil_act},
	{"unknown override", false, EXL3_DETAIL_OP, spoil_overrides},
	{"limit of NaN", false, EXL3_DETAIL_OP, spoil_limit_nan},
	{"y over the ids", false, EXL3_DETAIL_OVERLAP, spoil_y_on_ids},
	{"MoE with an MLA handle", false, EXL3_DETAIL_MODULE, spoil_moe_handle},
	{"MLA with a module", true, EXL3_DETAIL_MODULE, spoil_mla_handle},
	{"no cache", true, EXL3_DETAIL_BUFFER, spoil_cache_none},
	{"cache past the end", true, EXL3_DETAIL_BOUNDS, spoil_cache_past},
	{"slots past the end", true, EXL3_DETAIL_BOUNDS, spoil_slots_past},
	{"lse past the end", true, EXL3_DETAIL_BOUNDS, spoil_lse_past},
	{"o over the cache", true, EXL3_DETAIL_OVERLAP, spoil_o_on_cache},
	{"scale of NaN", true, EXL3_DETAIL_OP, spoil_scale_nan},
	{"reserved field", true, EXL3_DETAIL_OP, spoil_mla_reserved},
	{"stored sizes of MLA", true, EXL3_DETAIL_OP, spoil_mla_stored},
};

static unsigned broken_entries(struct state *s)
{
	unsigned bad = 0;

	for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
		struct exl3_sqe *sqe = raw_get(&s->ch);
		struct exl3_cqe cqe;

		if (broken[i].mla)
			prep_mla(s, sqe);
		else
			prep_moe(s, sqe);
		broken[i].spoil(s, sqe);
		cqe = finish(s, broken[i].what);
		if (cqe.result < 0 && cqe.detail == broken[i].detail)
			continue;
		printf("%s: result %d detail %llu, expected detail %u\n", broken[i].what,
		       cqe.result, (unsigned long long)cqe.detail, broken[i].detail);
		bad++;
	}
	return bad;
}

int main(int argc, char **argv)
{
	struct state s = {0};
	unsigned bad;

	if (argc != 5)
		raw_die("usage: indices SOCKET MODEL MOE_MODULE ROUNDS");
	set_up(&s, argv[1], argv[2], argv[3]);
	clean_run(&s, "first");
	bad = broken_entries(&s);
	clean_run(&s, "after broken entries");
	counted(&s);
	raced(&s, (unsigned)strtoul(argv[4], NULL, 10));
	clean_run(&s, "after the race");
	raw_quit(bad ? 1 : 0);
}
