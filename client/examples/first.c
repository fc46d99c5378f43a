/* SPDX-License-Identifier: Apache-2.0 */
/* first.c - the first client of README.md: one matrix of a model, one row of ones. */
#include <exl3.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int r)
{
	if (r >= 0)
		return;
	fprintf(stderr, "%s\n", exl3_last_error());
	exit(1);
}

int main(int argc, char **argv)
{
	struct exl3_client *client;
	struct exl3_model *model;
	struct exl3_module *mod;
	struct exl3_module_info info;
	struct exl3_arena *arena;
	struct exl3_channel *channel;

	if (argc != 3)
		return fprintf(stderr, "usage: first MODEL MODULE\n"), 2;
	check(exl3_connect(NULL, "first", &client)); /* NULL: $EXL3_SOCKET */
	check(exl3_model_open(client, argv[1], &model));
	check(exl3_module_open(model, argv[2], EXL3_KIND_LINEAR, &mod));
	exl3_module_get_info(mod, &info);
	check(exl3_arena_new(client, 4 * (info.k_logical + info.n_logical) + 128, &arena));
	check(exl3_channel_new(client, 16, &channel));

	float *x = exl3_arena_alloc(arena, 4 * info.k_logical);
	float *y = exl3_arena_alloc(arena, 4 * info.n_logical);
	if (!x || !y)
		return fprintf(stderr, "the arena is too small\n"), 1;
	for (unsigned i = 0; i < info.k_logical; i++)
		x[i] = 1.0f;
	check(exl3_linear(channel, mod, arena, x, EXL3_F32, y, EXL3_F32, 1));
	printf("[%u, %u]: y[0] = %.6f\n", info.k_logical, info.n_logical, (double)y[0]);
	exl3_close(client);
	return 0;
}
