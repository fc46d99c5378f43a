/* SPDX-License-Identifier: Apache-2.0 */
/*
 * together.c - deterministic requests of several channels: the same bits alone and in company.
 *
 *       together SOCKET ROUNDS WORKER
 *
 * Eight channels bring rows for one module: a matrix and an MLP of tiny-llama, routed experts of tiny-deepseek. First
 * each by itself, then all at once, again and again, so that the daemon may put them into one launch: its WORKER, a
 * process id, is stopped until all are there.
 */
#include "tests/integration/client.h"

#define CHANNELS 8
#define ROWS_MAX 4
#define TOPK     2

static const struct {
	const char *model, *module;
	unsigned kind;
} modules[] = {{"tiny-llama", "model.layers.0.self_attn.q_proj", EXL3_KIND_LINEAR},
	       {"tiny-llama", "model.layers.1.mlp", EXL3_KIND_MLP},
	       {"tiny-deepseek", "model.layers.2.mlp", EXL3_KIND_MOE}};

struct place {
	struct exl3_channel *ch;
	float *x, *y, *weights, *want;
	int32_t *ids;
	uint32_t rows;
};

static struct exl3_arena *arena;
static pid_t worker;

static void prepare(const struct place *p, const struct exl3_module *mod, unsigned kind)
{
	struct exl3_sqe *sqe = exl3_sq_get(p->ch);
	exl3_ref x = exl3_arena_ref(arena, p->x), y = exl3_arena_ref(arena, p->y);

	if (!sqe)
		die("the ring is full");
	if (kind == EXL3_KIND_LINEAR)
		exl3_prep_linear(sqe, mod, x, EXL3_F32, y, EXL3_F32, p->rows);
	else if (kind == EXL3_KIND_MLP)
		exl3_prep_mlp(sqe, mod, x, EXL3_F32, y, EXL3_F32, p->rows);
	else
		exl3_prep_moe(sqe, mod, x, EXL3_F32, y, EXL3_F32, p->rows, exl3_arena_ref(arena, p->ids), EXL3_I32,
			      exl3_arena_ref(arena, p->weights), EXL3_F32, TOPK);
	sqe->flags |= EXL3_DETERMINISTIC;
}

static void finish(const struct place *p)
{
	struct exl3_cqe cqe;

	if (exl3_wait(p->ch, &cqe, UINT64_MAX) != 1)
		die("wait");
	if (cqe.result < 0) {
		fprintf(stderr, "request: %s\n", exl3_result_text(&cqe));
		exit(1);
	}
}

static void run(struct exl3_client *client, struct place *place, size_t which, int rounds)
{
	struct exl3_module_info info;
	struct exl3_model *model;
	struct exl3_module *mod;
	size_t bytes;

	if (exl3_model_open(client, modules[which].model, &model) < 0 ||
	    exl3_module_open(model, modules[which].module, modules[which].kind, &mod) < 0)
		die("open");
	exl3_module_get_info(mod, &info);
	for (int i = 0; i < CHANNELS; i++) {
		struct place *p = &place[i];

		p->rows = 1 + (uint32_t)i % ROWS_MAX;
		for (uint32_t e = 0; e < p->rows * info.k_logical; e++)
			p->x[e] = (float)((e * 37 + (uint32_t)i * 101) % 211) / 100 - 1;
		for (uint32_t e = 0; info.nr_experts && e < p->rows * TOPK; e++) {
			p->ids[e] = (int32_t)((e * 5 + (uint32_t)i * 3) % info.nr_experts);
			p->weights[e] = 0.5f;
		}
		prepare(p, mod, modules[which].kind);
		if (exl3_submit(p->ch) != 1)
			die("submit");
		finish(p);
		memcpy(p->want, p->y, p->rows * info.n_logical * sizeof(float));
	}
	for (int r = 0; r < rounds; r++) {
		for (int i = 0; i < CHANNELS; i++) {
			memset(place[i].y, 0, place[i].rows * info.n_logical * sizeof(float));
			prepare(&place[i], mod, modules[which].kind);
		}
		stop_asleep(worker);
		for (int i = 0; i < CHANNELS; i++)
			if (exl3_submit(place[i].ch) != 1)
				die("submit");
		kill(worker, SIGCONT);
		for (int i = 0; i < CHANNELS; i++)
			finish(&place[i]);
		for (int i = 0; i < CHANNELS; i++) {
			bytes = place[i].rows * info.n_logical * sizeof(float);
			if (memcmp(place[i].want, place[i].y, bytes) != 0) {
				fprintf(stderr, "%s: round %d, channel %d: other bits than alone\n",
					modules[which].module, r, i);
				exit(1);
			}
		}
	}
	exl3_model_close(model);
}

int main(int argc, char **argv)
{
	struct place place[CHANNELS];
	struct exl3_client *client;
	int rounds = argc == 4 ? atoi(argv[2]) : 0;

	worker = argc == 4 ? atoi(argv[3]) : 0;
	if (rounds < 1 || worker < 2)
		return 2;
	if (exl3_connect(argv[1], "together", &client) < 0 || exl3_arena_new(client, 8u << 20, &arena) < 0)
		die("connect");
	for (int i = 0; i < CHANNELS; i++) {
		struct place *p = &place[i];

		if (exl3_channel_new(client, 8, &p->ch) < 0)
			die("channel");
		p->x = exl3_arena_alloc(arena, 128u << 10);
		p->y = exl3_arena_alloc(arena, 128u << 10);
		p->ids = exl3_arena_alloc(arena, 4096);
		p->weights = exl3_arena_alloc(arena, 4096);
		p->want = malloc(128u << 10);
		if (!p->weights || !p->want)
			die("memory");
	}
	for (size_t i = 0; i < sizeof(modules) / sizeof(modules[0]); i++)
		run(client, place, i, rounds);
	for (int i = 0; i < CHANNELS; i++)
		free(place[i].want);
	exl3_close(client);
	return 0;
}
