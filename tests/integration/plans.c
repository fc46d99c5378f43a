/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plans.c - plans of libexl3: what is recorded once gives the bits of single calls at every replay.
 *
 * usage: plans SOCKET COMMAND [NUMBER]; exit status 0: all went as exl3.h says.
 *   same N      100 calls of all operations, N replays by entry, other inputs each time
 *   small N     100 calls of a small layer
 *   streams     replays in the order of a stream whose word the host writes; deadlines; CANCEL
 *   refused     what cannot be recorded, and says why; limits; what was freed
 *   failed      the first call that fails ends a replay, and has its number in the completion
 *   together W  eight clients' plans at once: the same bits as alone; worker W is stopped until all are there
 *   unloaded    prints "ready", waits for a line: its model was unloaded
 *   stale       prints "ready" with replays outstanding, waits for its worker to be killed, goes on at the next
 *   no_memory   the daemon's memory fails once while a plan is recorded
 *   busy        prints "ready", replays until it is killed
 */
#include "client/internal.h"
#include "tests/integration/client.h"

#include <errno.h>
#include <unistd.h>

#define CALLS    100
#define INPUTS   8 /* different ones, of each kind */
#define CHANNELS 8
#define TOPK     2
#define MLA_KEYS 8
#define MLA_DIM  32

enum { QKV, DOWN, MLP, MOE, MLA, NOP, KINDS, SMALL = KINDS };

struct kind {
	struct exl3_module *mod;
	size_t k, n;         /* elements */
	float *in[INPUTS];   /* the program's */
	float *want[INPUTS]; /* results of single calls */
};

struct session {
	char **argv;
	struct exl3_client *client;
	struct exl3_arena *arena;
	struct exl3_channel *ch;
	struct kind kind[KINDS + 1];
	uint32_t geometry;
	uint16_t *cache;
	int32_t *ids, *slots;
	float *weights;
	float *x[CALLS], *y[CALLS];
};

static void *take(struct session *s, size_t bytes)
{
	void *p = exl3_arena_alloc(s->arena, bytes);

	if (!p)
		die("the arena is full");
	return p;
}

static exl3_ref ref(const struct session *s, const void *p)
{
	return exl3_arena_ref(s->arena, p);
}

static void open_kind(struct session *s, int kind, struct exl3_model *model, const char *name, unsigned what)
{
	struct exl3_module_info info;
	struct kind *k = &s->kind[kind];

	if (exl3_module_open(model, name, what, &k->mod) < 0)
		die("%s", name);
	exl3_module_get_info(k->mod, &info);
	k->k = info.k_logical;
	k->n = info.n_logical;
}

/* One call of a kind on these operands. */
static void prepare(struct session *s, struct exl3_sqe *sqe, int kind, const float *x, float *y)
{
	const struct exl3_module *mod = s->kind[kind].mod;
	exl3_ref xr = ref(s, x), yr = ref(s, y);

	if (!sqe)
		die("no entry");
	switch (kind) {
	case MLP:
		exl3_prep_mlp(sqe, mod, xr, EXL3_F32, yr, EXL3_F32, 1);
		break;
	case MOE:
		exl3_prep_moe(sqe, mod, xr, EXL3_F32, yr, EXL3_F32, 1, ref(s, s->ids), EXL3_I32, ref(s, s->weights),
			      EXL3_F32, TOPK);
		break;
	case MLA:
		exl3_prep_mla(sqe, s->geometry, xr, EXL3_F32, ref(s, s->cache), ref(s, s->slots), yr, EXL3_F32,
			      EXL3_REF_NONE, 1, 0.25f, 1.0f);
		break;
	case NOP:
		exl3_prep_nop(sqe);
		return;
	default:
		exl3_prep_linear(sqe, mod, xr, EXL3_F32, yr, EXL3_F32, 1);
	}
	sqe->flags |= EXL3_DETERMINISTIC;
}

static void ended(struct exl3_channel *ch, int want, uint64_t detail, const char *what)
{
	struct exl3_cqe cqe;

	if (exl3_wait(ch, &cqe, UINT64_MAX) != 1)
		die("%s: wait", what);
	if (cqe.result != want || cqe.detail != detail)
		die("%s: result %d, detail %#llx; not %d, %#llx", what, cqe.result, (unsigned long long)cqe.detail, want,
		    (unsigned long long)detail);
}

static void set_up(struct session *s)
{
	static const struct exl3_mla_shape shape = {.heads = 4, .dim = MLA_DIM, .value_dim = MLA_DIM, .topk = MLA_KEYS,
						    .slots = 64, .cache_dtype = EXL3_F16, .indices_dtype = EXL3_I32};
	struct exl3_model *llama, *deepseek;

	if (exl3_connect(s->argv[1], "plans", &s->client) < 0 || exl3_arena_new(s->client, 4u << 20, &s->arena) < 0 ||
	    exl3_channel_new(s->client, 64, &s->ch) < 0 || exl3_model_open(s->client, "tiny-llama", &llama) < 0 ||
	    exl3_model_open(s->client, "tiny-deepseek", &deepseek) < 0)
		die("connect");
	open_kind(s, QKV, llama, "model.layers.0.self_attn.qkv_proj", EXL3_KIND_LINEAR);
	open_kind(s, DOWN, llama, "model.layers.0.mlp.down_proj", EXL3_KIND_LINEAR);
	open_kind(s, MLP, llama, "model.layers.1.mlp", EXL3_KIND_MLP);
	open_kind(s, MOE, deepseek, "model.layers.2.mlp", EXL3_KIND_MOE);
	open_kind(s, SMALL, llama, "model.layers.0.self_attn.k_proj", EXL3_KIND_LINEAR);
	if (exl3_mla_register(s->client, &shape, &s->geometry) < 0)
		die("geometry");
	s->kind[MLA].k = s->kind[MLA].n = (size_t)4 * MLA_DIM;
	s->cache = take(s, 64 * MLA_DIM * 2);
	s->ids = take(s, TOPK * 4);
	s->weights = take(s, TOPK * 4);
	s->slots = take(s, MLA_KEYS * 4);
	for (int i = 0; i < 64 * MLA_DIM; i++)
		s->cache[i] = (uint16_t)(0x3400 + i % 700); /* f16, 0.25 to 0.45 */
	for (int i = 0; i < TOPK; i++) {
		s->ids[i] = i * 5;
		s->weights[i] = 0.5f;
	}
	for (int i = 0; i < MLA_KEYS; i++)
		s->slots[i] = i * 7;
	float *y = take(s, 16384);

	for (int i = 0; i < CALLS; i++) {
		/* Room for the small layer too. */
		s->x[i] = take(s, 4096 + 16);
		s->y[i] = take(s, 4096 + 16);
	}
	for (int k = 0; k <= SMALL; k++) {
		if (s->kind[k].k * 4 > 4096 || s->kind[k].n * 4 > 4096)
			die("the models have larger layers than this test");
		for (int i = 0; i < INPUTS && k != NOP; i++) {
			struct kind *kind = &s->kind[k];

			kind->in[i] = malloc(kind->k * 4);
			kind->want[i] = malloc(kind->n * 4);
			if (!kind->in[i] || !kind->want[i])
				die("malloc");
			for (size_t e = 0; e < kind->k; e++)
				kind->in[i][e] = (float)((e * 37 + (size_t)i * 101 + (size_t)k) % 211) / 100 - 1;
			memcpy(s->x[0], kind->in[i], kind->k * 4);
			prepare(s, exl3_sq_get(s->ch), k, s->x[0], y);
			if (exl3_submit(s->ch) != 1)
				die("submit");
			ended(s->ch, 0, 0, "a single call");
			memcpy(kind->want[i], y, kind->n * 4);
		}
	}
}

/* All kinds in turn, each call with operands of its own. */
static struct exl3_plan *record(struct session *s, struct exl3_channel *ch)
{
	struct exl3_plan *plan;

	if (exl3_plan_begin(ch) < 0)
		die("begin");
	for (int i = 0; i < CALLS; i++)
		prepare(s, exl3_sq_get(ch), i % KINDS, s->x[i], s->y[i]);
	if (exl3_submit(ch) != 0)
		die("what is recorded was submitted");
	if (exl3_plan_end(ch, &plan) < 0)
		die("end");
	if (exl3_plan_calls(plan) != CALLS)
		die("%u calls were recorded", exl3_plan_calls(plan));
	return plan;
}

static void fill(struct session *s, int round)
{
	for (int i = 0; i < CALLS; i++) {
		const struct kind *k = &s->kind[i % KINDS];

		if (k->k)
			memcpy(s->x[i], k->in[(round + i) % INPUTS], k->k * 4);
		memset(s->y[i], 0xff, k->n * 4);
	}
}

static void compare(struct session *s, int round)
{
	for (int i = 0; i < CALLS; i++) {
		const struct kind *k = &s->kind[i % KINDS];

		if (k->n && memcmp(s->y[i], k->want[(round + i) % INPUTS], k->n * 4) != 0)
			die("replay %d, call %d: other bits than a single call", round, i);
	}
}

static void cmd_same(struct session *s)
{
	struct exl3_plan *plan = record(s, s->ch);
	int rounds = s->argv[3] ? atoi(s->argv[3]) : 1;
	struct exl3_cqe cqe;

	for (int r = 0; r < rounds; r++) {
		fill(s, r);
		if (exl3_plan_run(plan, &cqe) < 0)
			die("replay %d: %s", r, exl3_result_text(&cqe));
		if (cqe.detail)
			die("replay %d: %llu indices were skipped", r, (unsigned long long)cqe.detail);
		compare(s, r);
	}
	/* Invalid ids of all calls are summed up. */
	s->ids[0] = 1000;
	if (exl3_plan_run(plan, &cqe) < 0 || cqe.detail != (CALLS + KINDS - 1 - MOE) / KINDS)
		die("%llu indices were skipped", (unsigned long long)cqe.detail);
	/* Two of them and a single call in one go: in this order. */
	s->ids[0] = 0;
	fill(s, 3);
	for (int i = 0; i < 2; i++)
		exl3_prep_plan(exl3_sq_get(s->ch), plan);
	prepare(s, exl3_sq_get(s->ch), QKV, s->x[0], s->y[6]);
	if (exl3_submit(s->ch) != 3)
		die("submit");
	for (int i = 0; i < 3; i++)
		ended(s->ch, 0, 0, "replays in a row");
	if (memcmp(s->y[6], s->kind[QKV].want[3], s->kind[QKV].n * 4) != 0)
		die("the call behind two replays has other bits");
	exl3_plan_free(plan);
}

static void cmd_small(struct session *s)
{
	const struct kind *k = &s->kind[SMALL];
	int rounds = s->argv[3] ? atoi(s->argv[3]) : 1;
	struct exl3_plan *plan;

	exl3_plan_begin(s->ch);
	for (int i = 0; i < CALLS; i++)
		prepare(s, exl3_sq_get(s->ch), SMALL, s->x[i], s->y[i]);
	if (exl3_plan_end(s->ch, &plan) < 0)
		die("end");
	for (int r = 0; r < rounds; r++) {
		for (int i = 0; i < CALLS; i++)
			memcpy(s->x[i], k->in[(r + i) % INPUTS], k->k * 4);
		if (exl3_plan_run(plan, NULL) < 0)
			die("replay %d", r);
		for (int i = 0; i < CALLS; i++) {
			if (memcmp(s->y[i], k->want[(r + i) % INPUTS], k->n * 4) != 0)
				die("replay %d, call %d: other bits than a single call", r, i);
		}
	}
}

static void cmd_streams(struct session *s)
{
	struct exl3_plan *plan = record(s, s->ch);
	struct exl3_cqe cqe;
	uint32_t call;

	for (int r = 0; r < 20; r++) {
		fill(s, r + 1);
		if (exl3_plan_stream(plan, EXL3_STREAM_HOST, &call) < 0)
			die("plan_stream");
		fill(s, r); /* it must not have started */
		exl3_stream_ready(s->ch, call);
		if (exl3_stream_result(s->ch, call, &cqe, UINT64_MAX) < 0 || cqe.result < 0)
			die("replay %d: %s", r, exl3_result_text(&cqe));
		compare(s, r);
	}
	/* A deadline that has passed: no call starts. */
	fill(s, 0);
	struct exl3_sqe *sqe = exl3_sq_get(s->ch);

	exl3_prep_plan(sqe, plan);
	sqe->deadline_ns = 1;
	exl3_submit(s->ch);
	if (exl3_wait(s->ch, &cqe, UINT64_MAX) != 1 || cqe.result != -ETIME)
		die("a deadline in the past: %d", cqe.result);
	/* One that waits for its word is cancelled; one that runs, or is about to, ends soon in any case. */
	if (exl3_plan_stream(plan, EXL3_STREAM_HOST, &call) < 0)
		die("plan_stream");
	for (int i = 0; i < 2; i++) {
		sqe = exl3_sq_get(s->ch);
		exl3_prep_plan(sqe, plan);
		sqe->user_data = 77;
	}
	exl3_prep_cancel(exl3_sq_get(s->ch), 77);
	exl3_submit(s->ch);
	/* The first of that name, and then CANCEL itself: both take no turn. */
	ended(s->ch, -ECANCELED, 0, "a cancelled replay");
	ended(s->ch, 0, 0, "CANCEL");
	exl3_stream_ready(s->ch, call);
	ended(s->ch, 0, 0, "the replay behind it");
	for (int r = 0; r < 50; r++) {
		sqe = exl3_sq_get(s->ch);
		exl3_prep_plan(sqe, plan);
		sqe->user_data = 5;
		if (r % 2)
			exl3_submit(s->ch); /* else both entries at once */
		sqe = exl3_sq_get(s->ch);
		exl3_prep_cancel(sqe, 5);
		sqe->user_data = 6;
		exl3_submit(s->ch);
		for (int i = 0; i < 2; i++) {
			if (exl3_wait(s->ch, &cqe, UINT64_MAX) != 1)
				die("wait");
			if (cqe.user_data == 5 && cqe.result != 0 && cqe.result != -ECANCELED)
				die("a replay that is cancelled on its way: %d", cqe.result);
		}
	}
	fill(s, 2);
	if (exl3_plan_run(plan, NULL) < 0)
		die("after all that");
	compare(s, 2);
	exl3_plan_free(plan);
}

/* Records what @change leaves of a good call behind two good ones; the error names it. */
static void bad(struct session *s, const char *what, int want, void (*change)(struct session *s, struct exl3_sqe *sqe))
{
	struct exl3_plan *plan;
	struct exl3_sqe *sqe;
	int e;

	if (exl3_plan_begin(s->ch) < 0)
		die("begin");
	for (int i = 0; i < 3; i++) {
		sqe = exl3_sq_get(s->ch);
		prepare(s, sqe, QKV, s->x[0], s->y[0]);
	}
	change(s, sqe);
	e = exl3_plan_end(s->ch, &plan);
	if (e != want || !strstr(exl3_last_error(), "call 2"))
		die("%s: %d", what, e);
}

static void too_many_rows(struct session *s, struct exl3_sqe *sqe)
{
	(void)s;
	sqe->rows = EXL3_M_MAX;
}

static void with_deadline(struct session *s, struct exl3_sqe *sqe)
{
	(void)s;
	sqe->deadline_ns = UINT64_MAX;
}

static void a_stream_call(struct session *s, struct exl3_sqe *sqe)
{
	(void)s;
	sqe->flags |= EXL3_STREAM;
}

static void a_cancel(struct session *s, struct exl3_sqe *sqe)
{
	(void)s;
	memset(sqe, 0, sizeof(*sqe));
	exl3_prep_cancel(sqe, 1);
}

static void no_module(struct session *s, struct exl3_sqe *sqe)
{
	(void)s;
	sqe->module = 12345;
}

static void garbage(struct session *s, struct exl3_sqe *sqe)
{
	(void)s;
	memset(sqe, 0xa5, sizeof(*sqe));
}

static void cmd_refused(struct session *s)
{
	struct exl3_plan *plan = NULL, *plans[EXL3_PLANS_MAX];
	struct exl3_channel *other;
	struct exl3_arena *arena;
	struct exl3_sqe *sqe;
	int e;

	bad(s, "rows past the buffer", -EINVAL, too_many_rows);
	bad(s, "a deadline", -EINVAL, with_deadline);
	bad(s, "a stream call", -EINVAL, a_stream_call);
	bad(s, "CANCEL", -EINVAL, a_cancel);
	bad(s, "no module", -ENOENT, no_module);
	bad(s, "garbage", -EINVAL, garbage);
	exl3_plan_begin(s->ch);
	if (exl3_plan_begin(s->ch) != -EBUSY)
		die("two at once");
	if (exl3_plan_end(s->ch, &plan) != -EINVAL)
		die("an empty plan");
	if (exl3_plan_end(s->ch, &plan) != -EINVAL)
		die("an end without a beginning");
	/* Calls that wait for their end are recorded too, and do not wait. */
	exl3_plan_begin(s->ch);
	memset(s->y[0], 0, 16);
	if (exl3_linear(s->ch, s->kind[QKV].mod, s->arena, s->x[0], EXL3_F32, s->y[0], EXL3_F32, 1) != 0 ||
	    s->y[0][0] != 0.0f)
		die("linear while recording");
	if (exl3_stream_call(s->ch, EXL3_STREAM_HOST, NULL) != -EOPNOTSUPP)
		die("a stream call while recording");
	if (exl3_plan_end(s->ch, &plan) < 0 || exl3_plan_run(plan, NULL) < 0 || s->y[0][0] == 0.0f)
		die("what was recorded did not run");
	/* Another channel's. */
	if (exl3_channel_new(s->client, 8, &other) < 0)
		die("channel");
	exl3_prep_plan(exl3_sq_get(other), plan);
	exl3_submit(other);
	ended(other, -ENOENT, EXL3_DETAIL_MODULE, "a plan of another channel");
	/* Reserved fields. */
	sqe = exl3_sq_get(s->ch);
	exl3_prep_plan(sqe, plan);
	sqe->rows = 1;
	exl3_submit(s->ch);
	ended(s->ch, -EINVAL, EXL3_DETAIL_OP, "rows of a plan");
	/* Freed, with its number still in an entry; while a replay of it is on its way. */
	exl3_prep_plan(exl3_sq_get(s->ch), plan);
	sqe = exl3_sq_get(s->ch);
	exl3_prep_plan(sqe, plan);
	uint32_t handle = plan->handle;

	exl3_plan_free(plan);
	exl3_submit(s->ch);
	ended(s->ch, -ENOENT, EXL3_DETAIL_MODULE, "a freed plan");
	ended(s->ch, -ENOENT, EXL3_DETAIL_MODULE, "a freed plan");
	/* A plan keeps the memory of its operands. */
	if (exl3_arena_new(s->client, 65536, &arena) < 0)
		die("arena");
	exl3_plan_begin(s->ch);
	exl3_prep_linear(exl3_sq_get(s->ch), s->kind[QKV].mod, exl3_arena_ref(arena, exl3_arena_ptr(arena)), EXL3_F32,
			 ref(s, s->y[0]), EXL3_F32, 1);
	if (exl3_plan_end(s->ch, &plan) < 0)
		die("end");
	if (plan->handle == handle)
		die("a number came back at once");
	exl3_arena_free(arena);
	if (exl3_plan_run(plan, NULL) < 0)
		die("operands that were freed");
	exl3_plan_free(plan);
	/* Limits. */
	for (uint32_t i = 0; i < EXL3_PLANS_MAX; i++) {
		exl3_plan_begin(s->ch);
		exl3_prep_nop(exl3_sq_get(s->ch));
		if (exl3_plan_end(s->ch, &plans[i]) < 0)
			die("plan %u", i);
	}
	exl3_plan_begin(s->ch);
	exl3_prep_nop(exl3_sq_get(s->ch));
	e = exl3_plan_end(s->ch, &plan);
	if (e != -EDQUOT)
		die("one plan too many: %d", e);
	if (exl3_plan_run(plans[0], NULL) < 0)
		die("a plan of one NOP");
	for (uint32_t i = 0; i < EXL3_PLANS_MAX; i++)
		exl3_plan_free(plans[i]);
	for (uint32_t n = 0; n <= EXL3_PLANS_CALLS_MAX / EXL3_PLAN_CALLS_MAX; n++) {
		exl3_plan_begin(s->ch);
		for (uint32_t i = 0; i < EXL3_PLAN_CALLS_MAX; i++)
			exl3_prep_nop(exl3_sq_get(s->ch));
		if (exl3_sq_get(s->ch))
			die("a plan of more calls than it may have");
		e = exl3_plan_end(s->ch, &plans[n]);
		if (e != (n < EXL3_PLANS_CALLS_MAX / EXL3_PLAN_CALLS_MAX ? 0 : -EDQUOT))
			die("plan %u of the longest kind: %d", n, e);
	}
	if (exl3_plan_run(plans[1], NULL) < 0)
		die("the longest plan");
	exl3_plan_free(plans[0]);
	/* What was freed counts as long as a replay of it waits. */
	uint32_t call;

	for (uint32_t i = 1; i < EXL3_PLANS_CALLS_MAX / EXL3_PLAN_CALLS_MAX; i++)
		exl3_plan_free(plans[i]);
	for (uint32_t n = 0; n <= EXL3_PLANS_CALLS_MAX / EXL3_PLAN_CALLS_MAX; n++) {
		exl3_plan_begin(s->ch);
		for (uint32_t i = 0; i < EXL3_PLAN_CALLS_MAX; i++)
			exl3_prep_nop(exl3_sq_get(s->ch));
		e = exl3_plan_end(s->ch, &plan);
		if (e != (n < EXL3_PLANS_CALLS_MAX / EXL3_PLAN_CALLS_MAX ? 0 : -EDQUOT))
			die("plan %u whose replay waits: %d", n, e);
		if (e < 0)
			break;
		if (exl3_plan_stream(plan, EXL3_STREAM_HOST, &call) < 0)
			die("plan_stream");
	/* Until the daemon has taken it. */
		while (__atomic_load_n(&s->ch->ring.hdr->sq_head.v, __ATOMIC_ACQUIRE) != s->ch->ring.sq_published)
			usleep(1000);
		exl3_plan_free(plan);
	}
	for (uint32_t n = 1; n <= call; n++)
		exl3_stream_ready(s->ch, n);
	struct exl3_cqe last;

	if (exl3_stream_result(s->ch, call, &last, UINT64_MAX) < 0 || last.result < 0)
		die("a replay whose plan was freed: %d", last.result);
	/* Its channel is freed before it. */
	exl3_plan_begin(other);
	exl3_prep_nop(exl3_sq_get(other));
	if (exl3_plan_end(other, &plan) < 0)
		die("end");
	exl3_channel_free(other);
	if (exl3_plan_run(plan, NULL) != -ENOENT)
		die("a plan without a channel");
	exl3_plan_free(plan);
}

/* A kernel that this machine may lack is named only when it runs. */
static void cmd_failed(struct session *s)
{
	struct exl3_plan *plan;
	struct exl3_cqe cqe;
	struct exl3_sqe *sqe;

	exl3_plan_begin(s->ch);
	for (int i = 0; i < 4; i++)
		prepare(s, exl3_sq_get(s->ch), QKV, s->x[0], s->y[6 * i]);
	if (exl3_plan_end(s->ch, &plan) < 0)
		die("end");
	/* A deadline that passes while the replay waits behind others: the number of the call is in the completion. */
	for (int i = 0; i < 8; i++)
		prepare(s, exl3_sq_get(s->ch), MLP, s->x[2], s->y[2]);
	sqe = exl3_sq_get(s->ch);
	exl3_prep_plan(sqe, plan);
	sqe->deadline_ns = now_ns() + 1;
	sqe->user_data = 9;
	exl3_submit(s->ch);
	for (int i = 0; i < 9; i++) {
		if (exl3_wait(s->ch, &cqe, UINT64_MAX) != 1 || cqe.result != (cqe.user_data == 9 ? -ETIME : 0))
			die("a deadline behind others: %d", cqe.result);
		if (cqe.result && EXL3_PLAN_CALL(cqe.detail) != UINT32_MAX)
			die("the deadline passed before call %u", EXL3_PLAN_CALL(cqe.detail));
	}
	if (exl3_plan_run(plan, NULL) < 0)
		die("the next replay");
	exl3_plan_free(plan);
}

static void cmd_together(struct session *s)
{
	struct exl3_channel *ch[CHANNELS];
	struct exl3_plan *plan[CHANNELS];
	pid_t worker = s->argv[3] ? atoi(s->argv[3]) : 0;
	float *y[CHANNELS][3];

	if (worker < 2)
		die("which worker?");
	for (int i = 0; i < CHANNELS; i++) {
		if (exl3_channel_new(s->client, 8, &ch[i]) < 0 || exl3_plan_begin(ch[i]) < 0)
			die("channel");
		for (int k = 0; k < 3; k++) {
			static const int kind[3] = {QKV, MLP, MOE};
			const struct kind *what = &s->kind[kind[k]];
			float *x = take(s, what->k * 4 + 16);

			memcpy(x, what->in[i], what->k * 4);
			y[i][k] = take(s, what->n * 4 + 16);
			prepare(s, exl3_sq_get(ch[i]), kind[k], x, y[i][k]);
		}
		if (exl3_plan_end(ch[i], &plan[i]) < 0)
			die("end");
	}
	for (int r = 0; r < 20; r++) {
		stop_asleep(worker);
		for (int i = 0; i < CHANNELS; i++) {
			exl3_prep_plan(exl3_sq_get(ch[i]), plan[i]);
			exl3_submit(ch[i]);
		}
		kill(worker, SIGCONT);
		for (int i = 0; i < CHANNELS; i++)
			ended(ch[i], 0, 0, "a replay beside others");
		for (int i = 0; i < CHANNELS; i++) {
			if (memcmp(y[i][0], s->kind[QKV].want[i], s->kind[QKV].n * 4) ||
			    memcmp(y[i][1], s->kind[MLP].want[i], s->kind[MLP].n * 4) ||
			    memcmp(y[i][2], s->kind[MOE].want[i], s->kind[MOE].n * 4))
				die("round %d, channel %d: other bits than alone", r, i);
		}
	}
}

static void wait_for_line(void)
{
	char line[16];

	if (!fgets(line, sizeof(line), stdin))
		die("stdin");
}

static void cmd_unloaded(struct session *s)
{
	struct exl3_plan *plan = record(s, s->ch);

	if (exl3_plan_run(plan, NULL) < 0)
		die("before");
	announce("ready");
	wait_for_line();
	exl3_prep_plan(exl3_sq_get(s->ch), plan);
	exl3_submit(s->ch);
	ended(s->ch, -ENOENT, EXL3_DETAIL_MODEL, "its model was unloaded");
	exl3_plan_free(plan);
}

static void cmd_stale(struct session *s)
{
	struct exl3_plan *plan = record(s, s->ch), *narrow;
	struct exl3_cqe cqe;
	uint32_t call;

	/* One whose memory is freed before the worker goes: of no use afterwards, and in nobody's way. */
	struct exl3_arena *arena;

	if (exl3_arena_new(s->client, 65536, &arena) < 0)
		die("arena");
	exl3_plan_begin(s->ch);
	exl3_prep_linear(exl3_sq_get(s->ch), s->kind[QKV].mod, exl3_arena_ref(arena, exl3_arena_ptr(arena)), EXL3_F32,
			 ref(s, s->y[0]), EXL3_F32, 1);
	if (exl3_plan_end(s->ch, &narrow) < 0)
		die("end");
	exl3_arena_free(arena);
	/* Two whose channel is freed; another channel records something at once. */
	struct exl3_channel *gone, *idle;
	struct exl3_plan *orphan[2], *next;

	if (exl3_channel_new(s->client, 8, &gone) < 0 || exl3_channel_new(s->client, 8, &idle) < 0)
		die("channel");
	for (int i = 0; i < 2; i++) {
		exl3_plan_begin(gone);
		exl3_prep_nop(exl3_sq_get(gone));
		if (exl3_plan_end(gone, &orphan[i]) < 0)
			die("end");
	}
	exl3_channel_free(gone);
	if (exl3_plan_stream(plan, EXL3_STREAM_HOST, &call) < 0)
		die("plan_stream");
	exl3_prep_plan(exl3_sq_get(s->ch), plan);
	exl3_submit(s->ch);
	announce("ready");
	if (exl3_stream_result(s->ch, call, &cqe, UINT64_MAX) < 0 || cqe.result != -ESTALE)
		die("a replay that waited: %d", cqe.result);
	ended(s->ch, -ESTALE, 0, "the replay behind it");
	if (exl3_reconnect(s->client, UINT64_MAX) < 0)
		die("reconnect");
	if (exl3_plan_begin(idle) < 0)
		die("a channel that was idle records nothing at the next worker");
	exl3_prep_nop(exl3_sq_get(idle));
	if (exl3_plan_end(idle, &next) < 0)
		die("end");
	for (int i = 0; i < 2; i++) {
		exl3_plan_free(orphan[i]);
		if (exl3_plan_run(next, NULL) < 0)
			die("another plan went with one that nobody could replay");
	}
	for (int r = 0; r < 5; r++) {
		fill(s, r);
		if (exl3_plan_run(plan, &cqe) < 0)
			die("at the next worker: %s", exl3_result_text(&cqe));
		compare(s, r);
	}
	exl3_prep_plan(exl3_sq_get(s->ch), narrow);
	exl3_submit(s->ch);
	ended(s->ch, -ENOENT, EXL3_DETAIL_MODULE, "a plan whose memory was freed");
}

/* The daemon's memory fails once: while this one is recorded. */
static void cmd_no_memory(struct session *s)
{
	struct exl3_plan *plan;

	for (int i = 0; i < 2; i++) {
		int e;

		exl3_plan_begin(s->ch);
		exl3_prep_nop(exl3_sq_get(s->ch));
		for (int k = 0; k < 40; k++)
			prepare(s, exl3_sq_get(s->ch), k % KINDS, s->x[k], s->y[k]);
		e = exl3_plan_end(s->ch, &plan);
		if (e != (i ? 0 : -ENOMEM))
			die("recording %d: %d", i, e);
	}
	for (int k = 0; k < 40; k++) {
		if (s->kind[k % KINDS].k)
			memcpy(s->x[k], s->kind[k % KINDS].in[1], s->kind[k % KINDS].k * 4);
	}
	for (int r = 0; r < 3; r++) {
		if (exl3_plan_run(plan, NULL) < 0)
			die("replay");
		for (int k = 0; k < 40; k++) {
			const struct kind *kind = &s->kind[k % KINDS];

			if (kind->n && memcmp(s->y[k], kind->want[1], kind->n * 4) != 0)
				die("call %d: other bits than a single call", k);
		}
	}
	exl3_plan_free(plan);
}

static void cmd_busy(struct session *s)
{
	struct exl3_plan *plan = record(s, s->ch);

	announce("ready");
	for (;;) {
		struct exl3_cqe cqe;

		for (int i = 0; i < 8; i++)
			exl3_prep_plan(exl3_sq_get(s->ch), plan);
		if (exl3_submit(s->ch) != 8)
			die("submit");
		for (int i = 0; i < 8; i++) {
			if (exl3_wait(s->ch, &cqe, UINT64_MAX) != 1 || cqe.result < 0)
				die("replay: %d", cqe.result);
		}
	}
}

int main(int argc, char **argv)
{
	static const struct command commands[] = {
		{"small", cmd_small},
		{"no_memory", cmd_no_memory},
		{"same", cmd_same},         {"streams", cmd_streams},   {"refused", cmd_refused}, {"failed", cmd_failed},
		{"together", cmd_together}, {"unloaded", cmd_unloaded}, {"stale", cmd_stale},     {"busy", cmd_busy},
	};
	static struct session s;

	if (argc < 3)
		return 2;
	s.argv = argv;
	set_up(&s);
	run_command(commands, sizeof(commands) / sizeof(commands[0]), argv[2], &s);
	exl3_close(s.client);
	return 0;
}
