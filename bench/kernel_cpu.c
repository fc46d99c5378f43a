/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cpu.c - the CPU's linear kernels against plain C and against OpenBLAS on decoded weights.
 *
 *       kernel_cpu [--isa NAME] [--threads N] [--quick] [-o bench/results/cpu_<isa>.csv]
 *
 * Without --threads: one, and then as many as the device takes.
 *
 * Each sample multiplies by other weights than the one before (copies that together exceed the last
 * level cache), so weights come from memory. The ratios are speed-ups: another's time divided by
 * ours, same machine, same number of threads, same run.
 */
#include "bench/bench.h"

#include "kernels/backend.h"
#include "kernels/format.h"

#include <cblas.h>
#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <unistd.h>

#define COLD_BYTES (96u << 20) /* more than the last level cache of most machines */
#define SAMPLES    20
#define SECONDS    1.0 /* stop sampling a cell after this long, but not before 5 samples */

struct shape {
	uint32_t k, n;
	int rate2, codebook;
};

struct bench {
	struct exl3_dev *dev;
	struct exl3_slab *slab;
	unsigned threads;
	float *dense, *x, *y; /* OpenBLAS: [copies][k][n], [m][k], [m][n] */
};

static const struct exl3_backend_ops *const ops = &exl3_backend_cpu;

static const struct exl3_kernel *find_kernel(const char *isa)
{
	char name[64];

	snprintf(name, sizeof(name), "linear_%s", isa);
	for (const struct exl3_kernel *k = ops->kernels; k->name; k++)
		if (!strcmp(k->name, name))
			return k;
	return NULL;
}

static void die(const char *what, int code)
{
	fprintf(stderr, "kernel_cpu: %s: %s\n", what, strerror(code < 0 ? -code : code));
	exit(1);
}

/* Seconds that the device needed. */
static double run(struct bench *b, const struct exl3_work *work)
{
	struct exl3_done done;
	int n = ops->submit(b->dev, work);

	if (n)
		die("submit", n);
	while ((n = ops->poll(b->dev, &done, 1)) == 0) {
		struct pollfd p = {.fd = ops->event_fd(b->dev), .events = POLLIN};

		if (ops->wake_arm(b->dev))
			poll(&p, 1, -1);
	}
	if (n < 0 || done.result)
		die("kernel", n < 0 ? n : done.result);
	return (double)done.exec_ns * 1e-9;
}

static size_t matrix_bytes(const struct shape *s)
{
	return exl3_trellis_bytes(s->k, s->n, s->rate2) + 2 * (size_t)(s->k + s->n);
}

static double time_ours(struct bench *b, const struct shape *s, uint32_t m,
			const struct exl3_kernel *kernel, int samples_max)
{
	unsigned copies = (unsigned)(COLD_BYTES / matrix_bytes(s)) + 1;
	double sample[SAMPLES], total = 0;
	int nr = 0;

	for (int i = 0; i < samples_max && (total < SECONDS || i < 5); i++, nr++) {
		char *base =
			(char *)b->slab->ptr + (size_t)((unsigned)i % copies) * matrix_bytes(s);
		size_t trellis = exl3_trellis_bytes(s->k, s->n, s->rate2);
		struct exl3_matrix w = {.k = s->k,
					.n = s->n,
					.k_log = s->k,
					.n_log = s->n,
					.rate2 = (uint8_t)s->rate2,
					.codebook = (uint8_t)s->codebook,
					.trellis = base,
					.suh = base + trellis,
					.svh = base + trellis + 2 * (size_t)s->k};
		const struct exl3_matrix *shards = &w;
		struct exl3_rows rows = {.x = b->x,
					 .y = b->y,
					 .x_stride = 4 * s->k,
					 .y_stride = 4 * s->n,
					 .m = m,
					 .x_dtype = EXL3_F32,
					 .y_dtype = EXL3_F32};
		struct exl3_work work = {.op = EXL3_OP_LINEAR,
					 .kernel = kernel,
					 .rows = &rows,
					 .nr_rows = 1,
					 .u.linear = {&shards, 1}};

		if (!kernel->supports(b->dev, &work))
			return 0;
		if (!i)
			run(b, &work); /* pages, threads */
		sample[nr] = run(b, &work);
		total += sample[nr];
	}
	return bench_median(sample, (size_t)nr);
}

static double time_openblas(struct bench *b, const struct shape *s, uint32_t m)
{
	size_t size = (size_t)s->k * s->n;
	unsigned copies = (unsigned)(COLD_BYTES / (4 * size)) + 1;
	double sample[SAMPLES], total = 0;
	int nr = 0;

	openblas_set_num_threads((int)b->threads);
	for (int i = -1; i < SAMPLES && (total < SECONDS || i < 5); i++) {
		const float *w = b->dense + size * ((unsigned)(i + 1) % copies);
		uint64_t start = exl3_now_ns();
		double seconds;

		if (m == 1)
			cblas_sgemv(CblasRowMajor, CblasTrans, (int)s->k, (int)s->n, 1, w,
				    (int)s->n, b->x, 1, 0, b->y, 1);
		else
			cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)s->n,
				    (int)s->k, 1, b->x, (int)s->k, w, (int)s->n, 0, b->y,
				    (int)s->n);
		seconds = (double)(exl3_now_ns() - start) * 1e-9;
		if (i < 0)
			continue;
		sample[nr++] = seconds;
		total += seconds;
	}
	return bench_median(sample, (size_t)nr);
}

/* Bytes per second of a sum over memory that no cache holds, one thread. */
static double read_rate(const struct bench *b)
{
	const uint64_t *p = b->slab->ptr;
	size_t n = b->slab->bytes / 8;
	double best = 0;
	uint64_t sum = 0;

	for (int i = 0; i < 5; i++) {
		uint64_t start = exl3_now_ns(), s0 = 0, s1 = 0, s2 = 0, s3 = 0;
		double rate;

		for (size_t j = 0; j + 4 <= n; j += 4) {
			s0 += p[j];
			s1 += p[j + 1];
			s2 += p[j + 2];
			s3 += p[j + 3];
		}
		sum += s0 + s1 + s2 + s3;
		rate = (double)(8 * n) / ((double)(exl3_now_ns() - start) * 1e-9);
		best = rate > best ? rate : best;
	}
	return sum ? best : 0;
}

static void fill(struct bench *b, uint32_t k_max, uint32_t n_max, uint32_t m_max)
{
	size_t words = b->slab->bytes / 8;
	uint64_t *p = b->slab->ptr, v = 1;

	/* Any bits are weights; as scales, 0x2c00 and 0x3c00 keep everything finite. */
	for (size_t i = 0; i < words; i++)
		p[i] = (v = v * 6364136223846793005ull + 1442695040888963407ull) &
		       0x3fff3fff3fff3fffull;
	for (size_t i = 0; i < (size_t)m_max * k_max; i++)
		b->x[i] = (float)(int)(i % 17) / 17 - 0.5f;
	for (size_t i = 0; i < COLD_BYTES / 4 + (size_t)k_max * n_max; i++)
		b->dense[i] = (float)(int)(i % 23) / 23 - 0.5f;
}

/* How many times @theirs is longer than @ours; nothing where it was not measured. */
static const char *ratio(double theirs, double ours, char text[16])
{
	if (theirs > 0)
		snprintf(text, 16, "%.3f", theirs / ours);
	return text;
}

static void bench_threads(struct bench *b, const struct exl3_kernel *kernel, bool quick,
			  struct bench_file *file)
{
	static const struct shape shapes[] = {
		{4096, 4096, 8, EXL3_CB_MUL1},  {4096, 4096, 8, EXL3_CB_MCG},
		{4096, 4096, 8, EXL3_CB_3INST}, {4096, 4096, 4, EXL3_CB_MUL1},
		{4096, 4096, 5, EXL3_CB_MUL1},  {4096, 4096, 6, EXL3_CB_MUL1},
		{4096, 4096, 10, EXL3_CB_MUL1}, {4096, 4096, 12, EXL3_CB_MUL1},
		{4096, 4096, 16, EXL3_CB_MUL1}, {7168, 2048, 8, EXL3_CB_MUL1},
		{2048, 7168, 8, EXL3_CB_MUL1},
	};
	static const uint32_t rows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256};
	static const char *const codebooks[] = {"3inst", "mcg", "mul1"};
	const struct exl3_kernel *plain = find_kernel("c");

	printf("%u thread%s\n%6s %6s %5s %6s %4s %10s %8s %9s %14s\n", b->threads,
	       b->threads == 1 ? "" : "s", "k", "n", "bits", "code", "m", "us", "x plain", "x blas",
	       "weights/s/thr");
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
		for (size_t j = 0; j < sizeof(rows) / sizeof(rows[0]); j++) {
			const struct shape *s = &shapes[i];
			uint32_t m = rows[j];
			double ours, c = 0, blas = 0;

			/* The other shapes only at the ends: what differs there is the decoding. */
			if ((i || quick) && m != 1 && m != 128)
				continue;
			if (quick && i && i != 7)
				continue;
			ours = time_ours(b, s, m, kernel, SAMPLES);
			if (ours <= 0)
				continue;
			/* Plain C is slow and varies little; its ratio is shown where it tells most. */
			if (m == 1 || (!i && m == 128))
				c = time_ours(b, s, m, plain, 5);
			if (i == 0 || s->k != shapes[0].k)
				blas = time_openblas(b, s, m);
			bench_row(file, "%u,%u,%g,%s,%u,%u,%.2f,%s,%s", s->k, s->n, s->rate2 / 2.0,
				  codebooks[s->codebook], m, b->threads, ours * 1e6,
				  ratio(c, ours, (char[16]){0}), ratio(blas, ours, (char[16]){0}));
			printf("%6u %6u %5g %6s %4u %10.1f %8s %9s %14.3g\n", s->k, s->n,
			       s->rate2 / 2.0, codebooks[s->codebook], m, ours * 1e6,
			       ratio(c, ours, (char[16]){0}), ratio(blas, ours, (char[16]){0}),
			       (double)s->k * s->n / ours / b->threads);
			fflush(stdout);
		}
}

static int usage(void)
{
	fputs("usage: kernel_cpu [--isa NAME] [--threads N] [--quick] [-o FILE]\n", stderr);
	return 2;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {{"isa", required_argument, NULL, 'i'},
						{"threads", required_argument, NULL, 't'},
						{"quick", no_argument, NULL, 'q'},
						{NULL, 0, NULL, 0}};
	struct exl3_dev_options opt = {.numa_node = -1};
	unsigned threads[2] = {1, 0},
		 nr_threads = 2; /* one, and what the device takes by default */
	struct exl3_dev_info info;
	struct exl3_error err;
	struct bench b = {0};
	struct bench_file file = {0};
	const char *isa = NULL, *path = NULL;
	char name[128], machine[200], ceilings[200];
	bool quick = false;
	int c;

	/* They would choose another kernel than the one that OpenBLAS has for this processor. */
	if (getenv("OPENBLAS_CORETYPE") || getenv("OPENBLAS_L2_SIZE")) {
		unsetenv("OPENBLAS_CORETYPE");
		unsetenv("OPENBLAS_L2_SIZE");
		execv("/proc/self/exe", argv);
		die("exec", errno);
	}
	while ((c = getopt_long(argc, argv, "o:", options, NULL)) != -1)
		switch (c) {
		case 'i':
			isa = optarg;
			break;
		case 't':
			threads[0] = (unsigned)strtoul(optarg, NULL, 0);
			nr_threads = 1;
			break;
		case 'q':
			quick = true;
			break;
		case 'o':
			path = optarg;
			break;
		default:
			return usage();
		}
	b.x = malloc(256 * 8192 * sizeof(float));
	b.y = malloc(256 * 8192 * sizeof(float));
	b.dense = malloc(COLD_BYTES + (size_t)8192 * 8192 * sizeof(float));
	if (!b.x || !b.y || !b.dense)
		die("memory", ENOMEM);
	for (unsigned i = 0; i < nr_threads; i++) {
		unsigned before = b.threads;

		opt.threads = threads[i];
		if (ops->open(&opt, &b.dev, &err) ||
		    ops->slab_new(b.dev, COLD_BYTES + (64u << 20), &b.slab, &err)) {
			fprintf(stderr, "kernel_cpu: %s\n", err.text);
			return 1;
		}
		ops->info(b.dev, &info);
		b.threads = info.threads;
		isa = isa ? isa : info.isa;
		if (!find_kernel(isa)) {
			fprintf(stderr, "kernel_cpu: no instruction set \"%s\"\n", isa);
			return 2;
		}
		fill(&b, 7168, 4096, 256);
		if (!file.f) {
			snprintf(name, sizeof(name), "bench/results/cpu_%s.csv", isa);
			snprintf(machine, sizeof(machine), "OpenBLAS kernel %s",
				 openblas_get_corename());
			snprintf(ceilings, sizeof(ceilings), "memory read %.1f GB/s (one thread)",
				 read_rate(&b) * 1e-9);
			printf("%s; %s; %s\n", isa, machine, ceilings);
			file = bench_open(path ? path : name, argc, argv, machine, ceilings,
					  "k,n,bits,codebook,m,threads,us,ratio_to_plain_c,"
					  "ratio_to_openblas");
		}
		if (b.threads != before) /* a machine with one core is measured once */
			bench_threads(&b, find_kernel(isa), quick, &file);
		ops->slab_free(b.slab);
		ops->close(b.dev);
	}
	bench_close(&file);
	printf("written: %s\n", file.path);
	free(b.x);
	free(b.y);
	free(b.dense);
	return 0;
}
