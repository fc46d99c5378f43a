/* SPDX-License-Identifier: Apache-2.0 */
/*
 * devices.c - a chain of requests that changes the device at every link, submitted as a whole.
 *
 *       devices SOCKET CHAINS
 *
 * The models "here" and "there" are one checkpoint on two devices. First every link is called by itself, then
 * all chains go into one channel at once: only if each link waits for the one before it are the results the
 * same. Prints the devices; status 0: same bits.
 */
#include "tests/integration/client.h"

#define LINKS  5
#define ROWS   4
#define MODULE "k4.mul1"

struct chain {
	float *y[LINKS + 1]; /* [ROWS, n]; the first is the input */
};

static uint32_t k, n;

/* A link reads the first k columns of what the one before it wrote. */
static void prepare(struct exl3_sqe *sqe, struct exl3_module *mod, struct exl3_arena *a, const struct chain *c,
		    int link)
{
	exl3_prep_linear(sqe, mod, exl3_arena_ref(a, c->y[link]), EXL3_F32,
			 exl3_arena_ref(a, c->y[link + 1]), EXL3_F32, ROWS);
	sqe->x_stride = n * (uint32_t)sizeof(float);
	sqe->flags = EXL3_DETERMINISTIC;
}

static void clear(const struct chain *c)
{
	for (int i = 1; i <= LINKS; i++)
		memset(c->y[i], 0, ROWS * n * sizeof(float));
}

int main(int argc, char **argv)
{
	static const char *const names[2] = {"here", "there"};
	struct exl3_client *client;
	struct exl3_channel *ch;
	struct exl3_arena *arena;
	struct exl3_model *model[2];
	struct exl3_module *mod[2];
	struct exl3_module_info info;
	struct exl3_cqe cqe;
	int chains = argc == 3 ? atoi(argv[2]) : 0;
	struct chain *c = calloc((size_t)chains + 1, sizeof(*c));
	float *want;

	if (chains < 1 || !c)
		die("usage: devices SOCKET CHAINS");
	if (exl3_connect(argv[1], "devices", &client) < 0 || exl3_channel_new(client, 1024, &ch) < 0)
		die("libexl3");
	for (int i = 0; i < 2; i++) {
		if (exl3_model_open(client, names[i], &model[i]) < 0 ||
		    exl3_module_open(model[i], MODULE, EXL3_KIND_LINEAR, &mod[i]) < 0)
			die("libexl3");
	}
	printf("devices %s %s\n", exl3_model_device(model[0]), exl3_model_device(model[1]));
	exl3_module_get_info(mod[0], &info);
	k = info.k_logical;
	n = info.n_logical;
	if (n < k || chains * LINKS > 1024)
		die("%s does not feed itself, or too many chains", MODULE);
	if (exl3_arena_new(client, ((size_t)chains * (LINKS + 1) + 1) * (ROWS * n * sizeof(float) + 64), &arena) < 0)
		die("libexl3");
	want = malloc((size_t)chains * LINKS * ROWS * n * sizeof(float));
	for (int i = 0; i < chains; i++) {
		for (int j = 0; j <= LINKS; j++)
			c[i].y[j] = exl3_arena_alloc(arena, ROWS * n * sizeof(float));
		if (!want || !c[i].y[LINKS])
			die("out of memory");
		for (uint32_t e = 0; e < ROWS * n; e++)
			c[i].y[0][e] = (float)((e * 31 + (uint32_t)i * 17) % 199) / 100 - 1;
		clear(&c[i]);
		for (int j = 0; j < LINKS; j++) {
			prepare(exl3_sq_get(ch), mod[j & 1], arena, &c[i], j);
			if (exl3_call(ch, &cqe) < 0)
				die("link %d by itself: %s", j, exl3_result_text(&cqe));
			memcpy(want + ((size_t)i * LINKS + (size_t)j) * ROWS * n, c[i].y[j + 1], ROWS * n * sizeof(float));
		}
	}
	for (int i = 0; i < chains; i++)
		clear(&c[i]);
	for (int i = 0; i < chains; i++) {
		for (int j = 0; j < LINKS; j++) {
			struct exl3_sqe *sqe = exl3_sq_get(ch);

			if (!sqe)
				die("the ring is full");
			prepare(sqe, mod[j & 1], arena, &c[i], j);
			sqe->user_data = (uint64_t)(i * LINKS + j);
		}
	}
	if (exl3_submit(ch) != chains * LINKS)
		die("submit");
	for (int i = 0; i < chains * LINKS; i++) {
		if (exl3_wait(ch, &cqe, UINT64_MAX) != 1 || cqe.result < 0)
			die("request %d: %s", i, exl3_result_text(&cqe));
		if (cqe.user_data != (uint64_t)i)
			die("completion %d is of request %d", i, (int)cqe.user_data);
	}
	for (int i = 0; i < chains; i++) {
		for (int j = 0; j < LINKS; j++) {
			if (memcmp(want + ((size_t)i * LINKS + (size_t)j) * ROWS * n, c[i].y[j + 1],
				   ROWS * n * sizeof(float)) != 0)
				die("chain %d, link %d: other bits than by itself", i, j);
		}
	}
	printf("%d chains of %d links\n", chains, LINKS);
	free(want);
	free(c);
	exl3_close(client);
	return 0;
}
