/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load.c - how long a model takes from the page cache to the device, beside reading and copying it.
 *
 *       load [--mib N] [--dir DIR] [--backend NAME] [--repeat N] [-o FILE]
 *       load [--mib N] --make FOLDER     only make the checkpoint, for other measurements
 *
 * Makes a checkpoint of N MiB (4-bit matrices of an 8-billion-parameter model, and an embedding) in a
 * new folder under DIR (default $TMPDIR, else /tmp), reads it once, then measures in turn, and
 * reports medians of
 *       cat    `cat FILE > /dev/null`
 *       h2d    the same number of bytes through the device's staging buffer into a new slab: on a GPU
 *              the copy over its bus, on the CPU a memcpy into memory that is as new as the load's
 *       load   open, check, read, hash, convert, store, tables: everything until READY
 * On the CPU a load is to take at most (cat + h2d) / 0.9, on a GPU at most 1.15 max(cat, h2d).
 */
#include "bench/bench.h"
#include "daemon/weights.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB        (1u << 20)
#define REPEAT_MAX 99
#define STAGING    (4u * MIB)
#define FILE_NAME  "model.safetensors"

struct options {
	uint64_t bytes;
	const char *dir, *backend, *output, *make;
	int repeat;
};

static char folder[4096];

static void fail(const char *what, const struct exl3_error *err)
{
	fprintf(stderr, "load: %s: %s\n", what, err ? err->text : strerror(errno));
	exit(1);
}

static void remove_folder(void)
{
	char path[4200];

	snprintf(path, sizeof(path), "%s/" FILE_NAME, folder);
	unlink(path);
	rmdir(folder);
}

/* ---- the checkpoint ---- */

static const struct {
	const char *name;
	uint32_t k, n;
} shapes[] = {
	{"self_attn.q_proj", 4096, 4096}, {"self_attn.k_proj", 4096, 1024},
	{"self_attn.v_proj", 4096, 1024}, {"self_attn.o_proj", 4096, 4096},
	{"mlp.gate_proj", 4096, 14336},   {"mlp.up_proj", 4096, 14336},
	{"mlp.down_proj", 14336, 4096},
};

static const uint32_t mcg = 0xCBAC1FED;

/* What a tensor holds, by its kind; written after all names are known. */
struct part {
	uint64_t bytes;
	enum { NOISE, ONES, MARKER } content;
};

struct writer {
	FILE *header; /* in memory */
	char *text;
	size_t len;
	struct part *parts;
	size_t nr, room;
	uint64_t at;
};

static void add(struct writer *w, const char *prefix, const char *leaf, const char *dtype,
		const char *shape, uint64_t bytes, int content)
{
	if (w->nr == w->room) {
		w->room = w->room ? 2 * w->room : 256;
		w->parts = realloc(w->parts, w->room * sizeof(*w->parts));
		if (!w->parts)
			fail("checkpoint", NULL);
	}
	fprintf(w->header,
		"%s\"%s.%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%" PRIu64
		",%" PRIu64 "]}",
		w->nr ? "," : "{", prefix, leaf, dtype, shape, w->at, w->at + bytes);
	w->at += bytes;
	w->parts[w->nr++] = (struct part){bytes, (__typeof__(w->parts->content))content};
}

static void add_matrix(struct writer *w, unsigned layer, size_t s)
{
	char name[128], shape[64];
	uint32_t k = shapes[s].k, n = shapes[s].n;

	snprintf(name, sizeof(name), "model.layers.%u.%s", layer, shapes[s].name);
	snprintf(shape, sizeof(shape), "%u,%u,64", k / 16, n / 16);
	add(w, name, "trellis", "I16", shape, (uint64_t)k * n / 2, NOISE);
	snprintf(shape, sizeof(shape), "%u", k);
	add(w, name, "suh", "F16", shape, 2ull * k, ONES);
	snprintf(shape, sizeof(shape), "%u", n);
	add(w, name, "svh", "F16", shape, 2ull * n, ONES);
	add(w, name, "mcg", "I32", "", 4, MARKER);
}

static void write_part(FILE *f, const struct part *p, uint64_t *seed)
{
	static uint64_t block[MIB / 8];
	const uint16_t one = 0x3c00;

	if (p->content == MARKER && fwrite(&mcg, 4, 1, f) != 1)
		fail("checkpoint", NULL);
	for (uint64_t done = 0; p->content != MARKER && done < p->bytes;) {
		uint64_t n = p->bytes - done < MIB ? p->bytes - done : MIB;

		for (size_t i = 0; i < (n + 7) / 8; i++) {
			*seed = *seed * 6364136223846793005u + 1442695040888963407u;
			block[i] = p->content == ONES ? 0x0001000100010001u * one : *seed;
		}
		if (fwrite(block, 1, n, f) != n)
			fail("checkpoint", NULL);
		done += n;
	}
}

/* Writes at least @bytes, or a layer more; returns the bytes of the data section. */
static uint64_t make_checkpoint(uint64_t bytes)
{
	struct writer w = {0};
	char path[4200];
	uint64_t seed = 1, n;
	FILE *f;

	w.header = open_memstream(&w.text, &w.len);
	if (!w.header)
		fail("checkpoint", NULL);
	/* Two percent that stay unquantized. */
	snprintf(path, sizeof(path), "%" PRIu64 ",4096", bytes / 50 / 8192 + 1);
	add(&w, "model.embed_tokens", "weight", "BF16", path, (bytes / 50 / 8192 + 1) * 8192,
	    NOISE);
	for (unsigned layer = 0; w.at < bytes; layer++)
		for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]) && w.at < bytes; s++)
			add_matrix(&w, layer, s);
	fputc('}', w.header);
	if (fclose(w.header))
		fail("checkpoint", NULL);
	snprintf(path, sizeof(path), "%s/" FILE_NAME, folder);
	f = fopen(path, "we");
	n = w.len;
	if (!f || fwrite(&n, 8, 1, f) != 1 || fwrite(w.text, 1, w.len, f) != w.len)
		fail(path, NULL);
	for (size_t i = 0; i < w.nr; i++)
		write_part(f, &w.parts[i], &seed);
	if (fflush(f) || fsync(fileno(f)) || fclose(f))
		fail(path, NULL);
	free(w.parts);
	free(w.text);
	return w.at;
}

/* ---- what is measured ---- */

static double seconds_since(uint64_t t)
{
	return (double)(exl3_now_ns() - t) / 1e9;
}

static double run_cat(void)
{
	char path[4200], *argv[] = {"cat", path, NULL};
	posix_spawn_file_actions_t actions;
	uint64_t t = exl3_now_ns();
	int status;
	pid_t pid;

	snprintf(path, sizeof(path), "%s/" FILE_NAME, folder);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
	if (posix_spawnp(&pid, "cat", &actions, NULL, argv, NULL) ||
	    waitpid(pid, &status, 0) != pid || status)
		fail("cat", NULL);
	posix_spawn_file_actions_destroy(&actions);
	return seconds_since(t);
}

static double run_h2d(const struct exl3_backend_ops *ops, struct exl3_dev *dev, uint64_t bytes)
{
	struct exl3_slab *slab;
	struct exl3_error err;
	char *src = ops->staging_new(dev, STAGING);
	uint64_t t;
	double s;

	if (!src)
		fail("staging", NULL);
	memset(src, 1, STAGING);
	t = exl3_now_ns();
	if (ops->slab_new(dev, bytes, &slab, &err))
		fail("slab", &err);
	for (uint64_t done = 0; done < bytes; done += STAGING)
		if (ops->slab_write(slab, done, src,
				    bytes - done < STAGING ? bytes - done : STAGING, &err))
			fail("slab_write", &err);
	if (ops->slab_sync(slab, &err))
		fail("slab_sync", &err);
	s = seconds_since(t);
	ops->slab_free(slab);
	ops->staging_free(dev, src, STAGING);
	return s;
}

static double run_load(const struct exl3_backend_ops *ops, struct exl3_dev *dev)
{
	struct exl3_model *m;
	struct exl3_error err;
	uint64_t t = exl3_now_ns();
	double s;

	if (exl3_model_new("bench", folder, ops, dev, &m, &err))
		fail("model", &err);
	if (exl3_model_load(m))
		fail("model", &m->error);
	s = seconds_since(t);
	exl3_model_put(m);
	return s;
}

/* "h200" of "NVIDIA H200", or the backend's name. */
static void machine_name(const struct exl3_backend_ops *ops, const struct exl3_dev_info *info,
			 char *out, size_t size)
{
	const char *last = strrchr(info->name, ' ');

	snprintf(out, size, "%s",
		 strcmp(ops->name, "cuda") ? ops->name
		 : last                    ? last + 1
					   : info->name);
	for (char *p = out; *p; p++)
		*p = *p >= 'A' && *p <= 'Z' ? (char)(*p + 32) : *p == '/' ? '_' : *p;
}

static void report(const struct options *o, int argc, char **argv, const char *machine,
		   const char *device, uint64_t bytes, double cat, double h2d, double load)
{
	bool cpu = !strcmp(machine, "cpu");
	double limit = cpu ? (cat + h2d) / 0.9 : 1.15 * (cat > h2d ? cat : h2d);
	char path[512], ceilings[200];
	struct bench_file f;

	snprintf(path, sizeof(path), "bench/results/load_%s.csv", machine);
	snprintf(ceilings, sizeof(ceilings), "cat %.2f GB/s, %s %.2f GB/s, limit %.4f s (%s)",
		 (double)bytes / cat / 1e9, cpu ? "memcpy" : "h2d", (double)bytes / h2d / 1e9,
		 limit, load <= limit ? "met" : "missed");
	f = bench_open(o->output ? o->output : path, argc, argv, cpu ? "" : device, ceilings,
		       "bytes,seconds,gb_per_s,cat_seconds,h2d_seconds");
	bench_row(&f, "%" PRIu64 ",%.4f,%.3f,%.4f,%.4f", bytes, load, (double)bytes / load / 1e9,
		  cat, h2d);
	bench_close(&f);
	printf("%" PRIu64 " bytes: load %.4f s (%.2f GB/s); %s: %s\n", bytes, load,
	       (double)bytes / load / 1e9, ceilings, f.path);
}

static struct options parse(int argc, char **argv)
{
	static const struct option longs[] = {
		{"mib", required_argument, NULL, 'm'},     {"dir", required_argument, NULL, 'd'},
		{"backend", required_argument, NULL, 'b'}, {"repeat", required_argument, NULL, 'r'},
		{"output", required_argument, NULL, 'o'},  {"make", required_argument, NULL, 'M'},
		{0},
	};
	struct options o = {.bytes = 1024ull * MIB, .backend = "cpu", .repeat = 5};
	int c;

	o.dir = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
	while ((c = getopt_long(argc, argv, "o:", longs, NULL)) != -1) {
		if (c == 'm')
			o.bytes = strtoull(optarg, NULL, 10) * MIB;
		else if (c == 'd')
			o.dir = optarg;
		else if (c == 'b')
			o.backend = optarg;
		else if (c == 'r')
			o.repeat = atoi(optarg);
		else if (c == 'o')
			o.output = optarg;
		else if (c == 'M')
			o.make = optarg;
		else
			exit(2);
	}
	if (!o.bytes || o.repeat < 1 || o.repeat > REPEAT_MAX) {
		fprintf(stderr, "load: --mib at least 1, --repeat 1..%d\n", REPEAT_MAX);
		exit(2);
	}
	return o;
}

int main(int argc, char **argv)
{
	struct options o = parse(argc, argv);
	double cat[REPEAT_MAX], h2d[REPEAT_MAX], load[REPEAT_MAX];
	const struct exl3_backend_ops *ops = exl3_backend_find(o.backend);
	struct exl3_dev_options opt = {.numa_node = -1};
	struct exl3_dev_info info;
	struct exl3_error err = {0};
	struct exl3_dev *dev;
	char machine[128];
	uint64_t bytes;

	if (o.make) {
		snprintf(folder, sizeof(folder), "%s", o.make);
		make_checkpoint(o.bytes);
		return 0;
	}
	if (!ops) {
		fprintf(stderr, "load: no backend '%s' in this build\n", o.backend);
		return 2;
	}
	if (ops->open(&opt, &dev, &err))
		fail(ops->name, &err);
	ops->info(dev, &info);
	machine_name(ops, &info, machine, sizeof(machine));
	snprintf(folder, sizeof(folder), "%s/exl3-load-XXXXXX", o.dir);
	if (!mkdtemp(folder))
		fail(folder, NULL);
	atexit(remove_folder);
	bytes = make_checkpoint(o.bytes);
	run_cat();
	run_load(ops, dev); /* the machine's memory grows on first use */
	for (int i = 0; i < o.repeat; i++) {
		cat[i] = run_cat();
		h2d[i] = run_h2d(ops, dev, bytes);
		load[i] = run_load(ops, dev);
		printf("%d: cat %.4f, h2d %.4f, load %.4f s\n", i, cat[i], h2d[i], load[i]);
	}
	report(&o, argc, argv, machine, info.name, bytes, bench_median(cat, (size_t)o.repeat),
	       bench_median(h2d, (size_t)o.repeat), bench_median(load, (size_t)o.repeat));
	ops->close(dev);
	return 0;
}
