/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mapped.c - a client of mapped mode, told step by step what to do; and one that compares it with direct mode.
 *
 * usage: mapped SOCKET MODE STEP...     MODE: auto, mapped, direct
 * Each step prints one line, "STEP RESULT TEXT"; status 0 unless something is wrong that no step expects.
 *   open:MODEL      opens it                     close            closes it (and its module)
 *   module:NAME     opens it, of any kind        channel          makes one; its mode and why
 *   call            one row for the module: result, detail, sum of the bits of y
 *   compare         of the model that is open: direct and mapped, every module, all types; how many calls were equal
 *   mla             the same for attention over a small cache
 *   process         operands in memory of this process, without an arena
 *   wrong           entries that the daemon refuses: the same result and detail in both modes
 *   reconnect       waits until the connection is there again
 *   pause           nothing, until a line comes on stdin ("holding" is printed)
 *   memory          own share and resident size of the weights that are mapped, in KiB
 */
#include "tests/integration/client.h"

#include <errno.h>
#include <unistd.h>

#define ROWS   3u
#define TOPK   2u
#define ENTRY  16u
#define AREA   (4u << 20) /* of each operand */

struct session {
	struct exl3_client *client;
	struct exl3_model *model;
	struct exl3_module *mod;
	struct exl3_module_info info;
	struct exl3_arena *arena;
	struct exl3_channel *ch;
	char *x, *y, *other, *ids, *weights;
};

static void say(const char *step, long long result, const char *text)
{
	printf("%s %lld %s\n", step, result, text);
	fflush(stdout);
}

static void make_arena(struct session *s)
{
	if (s->arena)
		return;
	if (exl3_arena_new(s->client, 3 * AREA + (64u << 10), &s->arena) < 0)
		die("arena");
	s->x = exl3_arena_alloc(s->arena, AREA);
	s->y = exl3_arena_alloc(s->arena, AREA);
	s->other = exl3_arena_alloc(s->arena, AREA);
	s->ids = exl3_arena_alloc(s->arena, 16u << 10);
	s->weights = exl3_arena_alloc(s->arena, 16u << 10);
}

static uint16_t half(float v)
{
	_Float16 h = (_Float16)v;
	uint16_t bits;

	memcpy(&bits, &h, 2);
	return bits;
}

static void put(char *to, size_t i, unsigned dtype, float v)
{
	uint32_t bits;

	memcpy(&bits, &v, 4);
	if (dtype == EXL3_F32)
		((float *)(void *)to)[i] = v;
	else
		((uint16_t *)(void *)to)[i] = dtype == EXL3_F16 ? half(v) : (uint16_t)(bits >> 16);
}

static void fill(struct session *s, unsigned dtype, size_t count)
{
	for (size_t i = 0; i < count; i++)
		put(s->x, i, dtype, (float)((i * 37) % 64) / 32 - 1);
}

static void fill_routes(struct session *s, unsigned ids_dtype, unsigned weights_dtype, uint32_t experts)
{
	for (uint32_t i = 0; i < ROWS * TOPK; i++) {
		long long id = i == 3 ? -1 : i == 5 ? (long long)experts : (long long)(i * 7 % experts);

		if (ids_dtype == EXL3_I64)
			((int64_t *)(void *)s->ids)[i] = id;
		else
			((int32_t *)(void *)s->ids)[i] = (int32_t)id;
		put(s->weights, i, weights_dtype, 0.25f + 0.125f * (float)(i % 3));
	}
}

static void prepare(struct session *s, struct exl3_sqe *sqe, const struct exl3_module *mod, unsigned kind,
		    unsigned x_dtype, unsigned y_dtype, uint32_t rows, unsigned ids_dtype, unsigned weights_dtype)
{
	exl3_ref x = exl3_arena_ref(s->arena, s->x), y = exl3_arena_ref(s->arena, s->y);

	if (kind == EXL3_KIND_LINEAR)
		exl3_prep_linear(sqe, mod, x, x_dtype, y, y_dtype, rows);
	else if (kind == EXL3_KIND_MLP)
		exl3_prep_mlp(sqe, mod, x, x_dtype, y, y_dtype, rows);
	else
		exl3_prep_moe(sqe, mod, x, x_dtype, y, y_dtype, rows, exl3_arena_ref(s->arena, s->ids), ids_dtype,
			      exl3_arena_ref(s->arena, s->weights), weights_dtype, TOPK);
}

/* The entry's completion. */
static struct exl3_cqe finish(struct exl3_channel *ch)
{
	struct exl3_cqe cqe;
	int e = exl3_submit(ch);

	if (e < 0)
		return (struct exl3_cqe){.result = e};
	if (exl3_wait(ch, &cqe, UINT64_MAX) != 1)
		die("wait");
	return cqe;
}

static uint64_t sum_of(const char *p, size_t bytes)
{
	uint64_t sum = 1469598103934665603ull;

	for (size_t i = 0; i < bytes; i++)
		sum = (sum ^ (unsigned char)p[i]) * 1099511628211ull;
	return sum;
}

/* ---- steps ---- */

static void step_open(struct session *s, const char *name)
{
	int e = exl3_model_open(s->client, name, &s->model);

	say("open", e, e < 0 ? exl3_last_error() : "");
}

static void step_close(struct session *s)
{
	s->mod = exl3_module_close(s->mod);
	s->model = exl3_model_close(s->model);
	say("close", 0, "");
}

static void step_module(struct session *s, const char *name)
{
	int e = exl3_module_open(s->model, name, EXL3_KIND_ANY, &s->mod);

	if (e == 0)
		exl3_module_get_info(s->mod, &s->info);
	say("module", e, e < 0 ? exl3_last_error() : "");
}

static void step_channel(struct session *s)
{
	const char *why = "";
	int e;

	s->ch = exl3_channel_free(s->ch);
	e = exl3_channel_new(s->client, ENTRY, &s->ch);
	if (e == 0)
		e = exl3_channel_mode(s->ch, &why);
	say("channel", e, e < 0 ? exl3_last_error() : why);
}

static void step_call(struct session *s)
{
	struct exl3_sqe *sqe;
	struct exl3_cqe cqe;
	char text[128];

	make_arena(s);
	fill(s, EXL3_F32, s->info.k_logical);
	memset(s->y, 0xee, 4ull * s->info.n_logical);
	sqe = exl3_sq_get(s->ch);
	if (!sqe) {
		say("call", -ESTALE, exl3_last_error());
		return;
	}
	prepare(s, sqe, s->mod, s->info.kind, EXL3_F32, EXL3_F32, 1, EXL3_I32, EXL3_F32);
	cqe = finish(s->ch);
	snprintf(text, sizeof(text), "%llu %016llx", (unsigned long long)cqe.detail,
		 (unsigned long long)sum_of(s->y, 4ull * s->info.n_logical));
	say("call", cqe.result, text);
}

/* One call in both modes. */
static void same(struct session *s, struct exl3_channel *const ch[2], const struct exl3_module *mod,
		 const struct exl3_module_info *info, unsigned x_dtype, unsigned y_dtype, unsigned ids_dtype,
		 unsigned weights_dtype, unsigned flags)
{
	bool stored = flags & EXL3_STORED;
	size_t x = (size_t)ROWS * (stored ? info->k : info->k_logical);
	size_t bytes = (size_t)ROWS * (stored ? info->n : info->n_logical) * exl3_dtype_bytes(y_dtype);
	struct exl3_cqe cqe[2];

	if (x * 4 > AREA || bytes > AREA)
		die("a module of %u x %u is too large for this test", info->k, info->n);
	fill(s, x_dtype, x);
	if (info->kind == EXL3_KIND_MOE)
		fill_routes(s, ids_dtype, weights_dtype, info->nr_experts);
	for (int i = 0; i < 2; i++) {
		struct exl3_sqe *sqe = exl3_sq_get(ch[i]);

		memset(s->y, 0xee, bytes);
		if (!sqe)
			die("sq_get");
		prepare(s, sqe, mod, info->kind, x_dtype, y_dtype, ROWS, ids_dtype, weights_dtype);
		sqe->flags = flags;
		cqe[i] = finish(ch[i]);
		if (i == 0)
			memcpy(s->other, s->y, bytes);
	}
	if (cqe[0].result || cqe[1].result || cqe[0].detail != cqe[1].detail || memcmp(s->y, s->other, bytes) != 0)
		die("kind %u, %u x %u, x %u, y %u, flags %u: direct %d (%llu), mapped %d (%llu), %s bits", info->kind,
		    info->k_logical, info->n_logical, x_dtype, y_dtype, flags, cqe[0].result,
		    (unsigned long long)cqe[0].detail, cqe[1].result, (unsigned long long)cqe[1].detail,
		    memcmp(s->y, s->other, bytes) ? "other" : "the same");
}

static void both_channels(struct session *s, struct exl3_channel *ch[2])
{
	if (exl3_channel_new_flags(s->client, ENTRY, EXL3_CHANNEL_DIRECT, &ch[0]) < 0 ||
	    exl3_channel_new_flags(s->client, ENTRY, EXL3_CHANNEL_MAPPED, &ch[1]) < 0)
		die("channels");
	if (exl3_channel_mode(ch[0], NULL) != EXL3_MODE_DIRECT || exl3_channel_mode(ch[1], NULL) != EXL3_MODE_MAPPED)
		die("channels of other modes");
}

/* Names of modules come on stdin, one a line. */
static void step_compare(struct session *s)
{
	static const unsigned types[] = {EXL3_F16, EXL3_BF16, EXL3_F32};
	struct exl3_channel *ch[2];
	char name[EXL3_NAME_MAX + 8];
	unsigned nr = 0;

	make_arena(s);
	both_channels(s, ch);
	while (fgets(name, sizeof(name), stdin) && name[0] != '\n') {
		struct exl3_module_info info;
		struct exl3_module *mod;
		char *kind = strchr(name, ' ');

		name[strcspn(name, "\n")] = 0;
		if (!kind)
			die("'%s' has no kind", name);
		*kind++ = 0;
		if (exl3_module_open(s->model, name, (unsigned)atoi(kind), &mod) < 0)
			die("module %s", name);
		exl3_module_get_info(mod, &info);
		for (unsigned i = 0; i < 9; i++, nr++)
			same(s, ch, mod, &info, types[i % 3], types[i / 3], i % 2 ? EXL3_I32 : EXL3_I64, types[i % 3],
			     i == 4 ? EXL3_STORED : i == 5 ? EXL3_DETERMINISTIC : 0);
		exl3_module_close(mod);
	}
	exl3_channel_free(ch[0]);
	exl3_channel_free(ch[1]);
	say("compare", nr, "");
}

static void step_mla(struct session *s)
{
	static const unsigned caches[] = {EXL3_F16, EXL3_BF16, EXL3_E4M3}, types[] = {EXL3_F16, EXL3_BF16, EXL3_F32};
	struct exl3_channel *ch[2];
	unsigned nr = 0;

	make_arena(s);
	both_channels(s, ch);
	for (unsigned i = 0; i < 9; i++, nr++) {
		struct exl3_mla_shape shape = {.heads = 4,
					       .dim = 64,
					       .value_dim = 48,
					       .topk = 16,
					       .slots = 32,
					       .cache_dtype = caches[i / 3],
					       .indices_dtype = i % 2 ? EXL3_I64 : EXL3_I32};
		size_t bytes = (size_t)ROWS * 4 * 48 * exl3_dtype_bytes(types[i % 3]), all = bytes + ROWS * 4 * 4;
		exl3_ref cache = exl3_arena_ref(s->arena, s->x + (1u << 20)), o = exl3_arena_ref(s->arena, s->y);
		struct exl3_cqe cqe[2];
		uint32_t handle;

		if (exl3_mla_register(s->client, &shape, &handle) < 0)
			die("mla_register");
		fill(s, types[i % 3], (size_t)ROWS * 4 * 64);
		for (size_t k = 0; k < 32 * 64; k++) {
			if (shape.cache_dtype == EXL3_E4M3)
				s->x[(1u << 20) + k] = (char)(k * 5 % 96);
			else
				put(s->x + (1u << 20), k, shape.cache_dtype, (float)((k * 11) % 32) / 16 - 1);
		}
		for (int k = 0; k < (int)(ROWS * 16); k++) {
			int id = k % 9 == 4 ? -1 : k == 7 ? 99 : k * 5 % 32;

			if (shape.indices_dtype == EXL3_I64)
				((int64_t *)(void *)s->ids)[k] = id;
			else
				((int32_t *)(void *)s->ids)[k] = id;
		}
		for (int c = 0; c < 2; c++) {
			struct exl3_sqe *sqe = exl3_sq_get(ch[c]);

			memset(s->y, 0xee, all);
			exl3_prep_mla(sqe, handle, exl3_arena_ref(s->arena, s->x), types[i % 3], cache,
				      exl3_arena_ref(s->arena, s->ids), o, types[i % 3],
				      exl3_arena_ref(s->arena, s->y + bytes), ROWS, 0.125f, 0.5f);
			cqe[c] = finish(ch[c]);
			if (c == 0)
				memcpy(s->other, s->y, all);
		}
		if (cqe[0].result || cqe[1].result || cqe[0].detail != 1 || cqe[1].detail != 1 ||
		    memcmp(s->y, s->other, all) != 0)
			die("mla %u: direct %d (%llu), mapped %d (%llu)", i, cqe[0].result,
			    (unsigned long long)cqe[0].detail, cqe[1].result, (unsigned long long)cqe[1].detail);
	}
	exl3_channel_free(ch[0]);
	exl3_channel_free(ch[1]);
	say("mla", nr, "");
}

static void step_process(struct session *s)
{
	size_t x_bytes = 4ull * s->info.k_logical, y_bytes = 4ull * s->info.n_logical;
	float *x = aligned_alloc(64, (x_bytes + 63) & ~63ul), *y = aligned_alloc(64, (y_bytes + 63) & ~63ul);
	struct exl3_sqe *sqe = exl3_sq_get(s->ch);
	struct exl3_cqe cqe;
	bool equal;

	make_arena(s);
	if (!x || !y || !sqe || exl3_memory_ref(NULL) != EXL3_REF_NONE)
		die("process");
	fill(s, EXL3_F32, s->info.k_logical);
	memcpy(x, s->x, x_bytes);
	exl3_prep_linear(sqe, s->mod, exl3_memory_ref(x), EXL3_F32, exl3_memory_ref(y), EXL3_F32, 1);
	cqe = finish(s->ch);
	if (cqe.result < 0) {
		say("process", cqe.result, exl3_result_text(&cqe));
	} else {
		/* Mixed with an arena's, and onto itself: an arena is memory of the process too. */
		sqe = exl3_sq_get(s->ch);
		exl3_prep_linear(sqe, s->mod, exl3_arena_ref(s->arena, s->x), EXL3_F32, exl3_memory_ref(s->y), EXL3_F32, 1);
		cqe = finish(s->ch);
		equal = cqe.result == 0 && memcmp(y, s->y, y_bytes) == 0;
		sqe = exl3_sq_get(s->ch);
		exl3_prep_linear(sqe, s->mod, exl3_arena_ref(s->arena, s->x), EXL3_F32, exl3_memory_ref(s->x), EXL3_F32, 1);
		cqe = finish(s->ch);
		say("process", equal && cqe.result == -EINVAL && cqe.detail == EXL3_DETAIL_OVERLAP ? 0 : -EIO, "");
	}
	free(x);
	free(y);
}

/* Spoils an entry in one way. False: there are no more. */
static bool spoil(struct session *s, struct exl3_sqe *q, unsigned way)
{
	exl3_ref x = exl3_arena_ref(s->arena, s->x);
	size_t last = exl3_arena_bytes(s->arena) - 64;

	switch (way) {
	case 0: q->op = EXL3_OP_NR; return true;
	case 1: q->flags = 1u << 9; return true;
	case 2: q->reserved0 = 1; return true;
	case 3: q->module = 0x00510007; return true;
	case 4: q->op = EXL3_OP_MLP; return true;
	case 5: q->x_dtype = EXL3_I32; return true;
	case 6: q->y_dtype = EXL3_E4M3; return true;
	case 7: q->rows = 0; return true;
	case 8: q->rows = EXL3_M_MAX + 1; return true;
	case 9: q->x_stride = 16; return true;
	case 10: q->y_stride = 4 * s->info.n_logical + 8; return true;
	case 11: q->x = x + 4; return true;
	case 12: q->x = EXL3_REF(999, 0); return true;
	case 13: q->y = EXL3_REF_NONE; return true;
	case 14: q->y = EXL3_REF(EXL3_REF_BUF(x), last); return true;
	case 15: q->y = q->x; return true;
	case 16: q->kernel = 10000; return true;
	case 17: q->u.words[0] = 1; return true;
	case 18: q->stream_seq = 1; return true;
	case 19: q->op = EXL3_OP_CANCEL; return true;
	case 20: q->op = EXL3_OP_NOP; return true;
	case 21: q->deadline_ns = 1; return true;
	default: return false;
	}
}

static void step_wrong(struct session *s)
{
	struct exl3_channel *ch[2];
	unsigned way;

	make_arena(s);
	both_channels(s, ch);
	for (way = 0;; way++) {
		struct exl3_cqe cqe[2];
		bool more = true;

		for (int i = 0; i < 2 && more; i++) {
			struct exl3_sqe *sqe = exl3_sq_get(ch[i]);

			prepare(s, sqe, s->mod, EXL3_KIND_LINEAR, EXL3_F32, EXL3_F32, 1, 0, 0);
			more = spoil(s, sqe, way);
			cqe[i] = finish(ch[i]);
		}
		if (!more)
			break;
		if (cqe[0].result != cqe[1].result || cqe[0].detail != cqe[1].detail || cqe[0].result == 0)
			die("entry %u: direct %d (%llu), mapped %d (%llu)", way, cqe[0].result,
			    (unsigned long long)cqe[0].detail, cqe[1].result, (unsigned long long)cqe[1].detail);
	}
	exl3_channel_free(ch[0]);
	exl3_channel_free(ch[1]);
	say("wrong", way, "");
}

/* Of all mappings of slabs: resident, and this process's share of what several have. */
static void step_memory(void)
{
	FILE *f = fopen("/proc/self/smaps", "re");
	long rss = 0, pss = 0, value;
	char line[512], text[64];
	bool slab = false;

	while (f && fgets(line, sizeof(line), f)) {
		if (strchr(line, '-') && strstr(line, " r"))
			slab = strstr(line, "memfd:exl3-slab") != NULL;
		if (slab && sscanf(line, "Rss: %ld", &value) == 1)
			rss += value;
		if (slab && sscanf(line, "Pss: %ld", &value) == 1)
			pss += value;
	}
	if (f)
		fclose(f);
	snprintf(text, sizeof(text), "%ld", rss);
	say("memory", pss, text);
}

static void step_pause(void)
{
	char line[64];

	announce("holding");
	if (!fgets(line, sizeof(line), stdin))
		exit(0);
}

static bool takes(const char *step, const char *name, const char **arg)
{
	size_t n = strlen(name);

	*arg = step + n + 1;
	return strncmp(step, name, n) == 0 && step[n] == ':';
}

static void run(struct session *s, const char *step)
{
	const char *arg;

	if (takes(step, "open", &arg))
		step_open(s, arg);
	else if (takes(step, "module", &arg))
		step_module(s, arg);
	else if (!strcmp(step, "close"))
		step_close(s);
	else if (!strcmp(step, "channel"))
		step_channel(s);
	else if (!strcmp(step, "call"))
		step_call(s);
	else if (!strcmp(step, "compare"))
		step_compare(s);
	else if (!strcmp(step, "mla"))
		step_mla(s);
	else if (!strcmp(step, "process"))
		step_process(s);
	else if (!strcmp(step, "wrong"))
		step_wrong(s);
	else if (!strcmp(step, "memory"))
		step_memory();
	else if (!strcmp(step, "pause"))
		step_pause();
	else if (!strcmp(step, "reconnect"))
		say("reconnect", exl3_reconnect(s->client, 60000000000u), "");
	else
		die("%s: unknown step", step);
}

int main(int argc, char **argv)
{
	struct session s = {0};
	unsigned flags;

	if (argc < 3)
		return 2;
	flags = !strcmp(argv[2], "mapped") ? EXL3_CONNECT_MAPPED : !strcmp(argv[2], "direct") ? EXL3_CONNECT_DIRECT : 0;
	if (exl3_connect_flags(argv[1], "mapped", flags, &s.client) < 0)
		die("connect");
	for (int i = 3; i < argc; i++)
		run(&s, argv[i]);
	exl3_close(s.client);
	return 0;
}
