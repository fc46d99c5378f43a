/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rowtable.c - what it costs that the rows of a launch lie here and there: one entry of m rows against m entries of
 * one row each, as merged requests are.
 *
 *       rowtable [--backend B] [--dir TMPFS] [--layers N] [--shrink N] [--repeat N] [-o FILE]
 *
 * The matrices of an 8-billion-parameter model's layers in turn, so that weights are cold; both ways alternate.
 * us is the median time on the device of one launch; x and y lie in the device's memory where it has its own.
 */
#include "bench/bench.h"
#include "bench/ckpt.h"
#include "daemon/weights.h"
#include "shm/ring.h"

#include <errno.h>
#include <unistd.h>

#define ROWS_MAX   32u
#define LAYERS_MAX 64u

static const struct ckpt_matrix shapes[] = {
	{"self_attn.q_proj", 4096, 4096}, {"self_attn.k_proj", 4096, 1024},
	{"self_attn.v_proj", 4096, 1024}, {"self_attn.o_proj", 4096, 4096},
	{"mlp.gate_proj", 4096, 14336},   {"mlp.up_proj", 4096, 14336},
	{"mlp.down_proj", 14336, 4096},
};
#define SHAPES (sizeof(shapes) / sizeof(shapes[0]))
static const char *const modules[] = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj",
				      "mlp.down_proj"};

static char folder[4096];

static void fail(const char *what, const struct exl3_error *err)
{
	fprintf(stderr, "rowtable: %s: %s\n", what, err ? err->text : strerror(errno));
	exit(1);
}

static void remove_folder(void)
{
	char path[4200];

	snprintf(path, sizeof(path), "%s/model.safetensors", folder);
	unlink(path);
	rmdir(folder);
}

static const struct exl3_module_desc *find(const struct exl3_model *m, unsigned layer,
					   const char *name)
{
	char full[96];

	snprintf(full, sizeof(full), "model.layers.%u.%s", layer, name);
	for (uint32_t i = 0; i < m->nr_modules; i++)
		if (m->modules[i].kind == EXL3_MOD_LINEAR && !strcmp(m->modules[i].name, full))
			return &m->modules[i];
	fail(full, NULL);
	return NULL;
}

static double launch_us(const struct exl3_model *m, const struct exl3_module_desc *desc,
			const struct exl3_rows *rows, uint32_t nr)
{
	uint64_t skipped[ROWS_MAX] = {0};
	const struct exl3_work work = {
		.op = EXL3_OP_LINEAR,
		.rows = rows,
		.nr_rows = nr,
		.u.linear = {.shards = desc->shards, .nr_shards = desc->nr_shards},
		.skipped = skipped,
	};
	struct exl3_done done;
	int n;

	if (m->ops->submit(m->dev, &work) < 0)
		fail("submit", NULL);
	while ((n = m->ops->poll(m->dev, &done, 1)) == 0)
		exl3_ring_relax();
	if (n < 0 || done.result < 0)
		fail(desc->name, NULL);
	return (double)done.exec_ns / 1000;
}

static void measure(struct bench_file *f, const struct exl3_model *m,
		    const struct exl3_arena *arena, const char *name, unsigned layers, uint32_t nr,
		    int repeat)
{
	double *us[2] = {malloc((size_t)repeat * sizeof(double)),
			 malloc((size_t)repeat * sizeof(double))};
	const struct exl3_module_desc *desc = NULL;
	double plain, table;

	if (!us[0] || !us[1])
		fail("memory", NULL);
	for (int i = -20; i < repeat; i++) { /* the first ones warm up */
		struct exl3_rows many[ROWS_MAX], one;

		for (int way = 0; way < 2; way++) {
			double t;

			desc = find(m, (unsigned)(2 * (i + 20) + way) % layers, name);
			one = (struct exl3_rows){.x = arena->dev_ptr,
						 .y = (char *)arena->dev_ptr + arena->bytes / 2,
						 .x_stride = desc->k_log * 2,
						 .y_stride = desc->n_log * 2,
						 .m = nr,
						 .x_dtype = EXL3_F16,
						 .y_dtype = EXL3_F16,
						 .x_device = !arena->host_ptr};
			for (uint32_t r = 0; r < nr; r++) {
				many[r] = one;
				many[r].m = 1;
				/* Backwards: no two of them follow each other. */
				many[r].x =
					(const char *)one.x + (size_t)(nr - 1 - r) * one.x_stride;
				many[r].y = (char *)one.y + (size_t)(nr - 1 - r) * one.y_stride;
			}
			t = way ? launch_us(m, desc, many, nr) : launch_us(m, desc, &one, 1);
			if (i >= 0)
				us[way][i] = t;
		}
	}
	plain = bench_median(us[0], (size_t)repeat);
	table = bench_median(us[1], (size_t)repeat);
	bench_row(f, "%s,%u,%u,%s,%u,%.2f,%.2f,%.4f", name, desc->k_log, desc->n_log,
		  arena->host_ptr ? "host" : "device", nr, plain, table, table / plain);
	printf("%-20s %-6s %2u rows: plain %7.2f us, table %7.2f us, %+.1f %%\n", name,
	       arena->host_ptr ? "host" : "device", nr, plain, table, 100 * (table / plain - 1));
	free(us[0]);
	free(us[1]);
}

int main(int argc, char **argv)
{
	static const uint32_t rows[] = {2, 4, 8, 16, 32};
	const char *backend = "auto", *dir = "/dev/shm", *output = "bench/results/rowtable_cpu.csv";
	unsigned layers = 8, shrink = 1;
	int repeat = 200;
	struct ckpt_matrix scaled[SHAPES];
	const struct exl3_backend_ops *ops;
	struct exl3_dev_options opt = {.numa_node = -1};
	struct exl3_arena *arenas[2] = {NULL, NULL};
	struct exl3_dev_info info;
	struct exl3_error err = {0};
	struct exl3_model *m;
	struct exl3_dev *dev;
	struct bench_file f;
	uint64_t bytes;

	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--backend"))
			backend = argv[i + 1];
		else if (!strcmp(argv[i], "--dir"))
			dir = argv[i + 1];
		else if (!strcmp(argv[i], "--layers"))
			layers = (unsigned)atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--shrink"))
			shrink = (unsigned)atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--repeat"))
			repeat = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "-o"))
			output = argv[i + 1];
		else
			return 2;
	}
	if (!layers || layers > LAYERS_MAX || !shrink || repeat < 1)
		return 2;
	for (size_t i = 0; i < SHAPES; i++)
		scaled[i] = (struct ckpt_matrix){shapes[i].name,
						 (shapes[i].k / shrink + 127) / 128 * 128,
						 (shapes[i].n / shrink + 127) / 128 * 128};
	snprintf(folder, sizeof(folder), "%s/exl3-rowtable-XXXXXX", dir);
	if (!mkdtemp(folder))
		fail(folder, NULL);
	atexit(remove_folder);
	if (!ckpt_write(folder, layers, scaled, SHAPES, NULL, 0))
		fail(folder, NULL);
	ops = exl3_backend_find(backend);
	if (!ops || ops->open(&opt, &dev, &err) ||
	    exl3_model_new("bench", folder, ops, dev, &m, &err))
		fail("device", &err);
	if (exl3_model_load(m))
		fail("model", &m->error);
	bytes = 2ull * ROWS_MAX * 2 * 28672;
	if (ops->device_arena_new && ops->device_arena_new(dev, bytes, &arenas[0], &err))
		fail("arena", &err);
	if (ops->arena_new(dev, bytes, &arenas[1], &err))
		fail("arena", &err);
	ops->info(dev, &info);
	f = bench_open(output, argc, argv, info.name, "both ways alternate; weights cold",
		       "module,k,n,memory,rows,plain_us,table_us,ratio");
	for (int a = 0; a < 2; a++)
		for (size_t i = 0; arenas[a] && i < sizeof(modules) / sizeof(modules[0]); i++)
			for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++)
				measure(&f, m, arenas[a], modules[i], layers, rows[r], repeat);
	bench_close(&f);
	return 0;
}
