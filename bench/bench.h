/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.h - medians, and result files that say how and where their figures were made.
 *
 * A result file begins with comment lines: the command, commit, date, machine and the ceilings that
 * were measured in the same run; then one line of column names. It is written under a temporary
 * name and takes the place of the old one only when it is complete.
 */
#ifndef EXL3_BENCH_H
#define EXL3_BENCH_H

#include "shm/util.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>

static int bench_compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* The @q quantile (0..1) of @n samples, which get sorted. */
static inline double bench_quantile(double *v, size_t n, double q)
{
	qsort(v, n, sizeof(*v), bench_compare);
	return v[(size_t)(q * (double)(n - 1) + 0.5)];
}

static inline double bench_median(double *v, size_t n)
{
	return bench_quantile(v, n, 0.5);
}

struct bench_file {
	FILE *f;
	char path[512], temporary[520];
};

/* First line that @command prints, or "unknown". */
static inline void bench_ask(const char *command, char *out, size_t size)
{
	FILE *p = popen(command, "r");

	if (!p || !fgets(out, (int)size, p) || *out == '\n')
		snprintf(out, size, "unknown");
	out[strcspn(out, "\n")] = 0;
	if (p)
		pclose(p);
}

/**
 * bench_open() - start a result file.
 * @machine: GPU, driver and CUDA where they matter; the CPU and the kernel are added.
 * @ceilings: what was measured in this run, as text.
 * Ends the program if the file cannot be made.
 */
static inline struct bench_file bench_open(const char *path, int argc, char **argv,
					   const char *machine, const char *ceilings,
					   const char *columns)
{
	struct bench_file b = {0};
	char commit[64], cpu[128], date[64];
	time_t now = time(NULL);
	struct utsname uts;

	snprintf(b.path, sizeof(b.path), "%s", path);
	snprintf(b.temporary, sizeof(b.temporary), "%s.new", path);
	b.f = fopen(b.temporary, "w");
	if (!b.f) {
		fprintf(stderr, "cannot write %s: %m\n", b.temporary);
		exit(1);
	}
	/* A copy without its history is told where it comes from. */
	bench_ask("echo ${EXL3_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null)}", commit, sizeof(commit));
	bench_ask("sed -n 's/^model name.*: //p' /proc/cpuinfo", cpu, sizeof(cpu));
	strftime(date, sizeof(date), "%Y-%m-%d %H:%M UTC", gmtime(&now));
	uname(&uts);
	uts.release[strcspn(uts.release, "-")] = 0; /* the version; what a distributor calls it says little */
	fprintf(b.f, "#");
	for (int i = 0; i < argc; i++)
		fprintf(b.f, " %s", argv[i]);
	fprintf(b.f, "\n# commit %s, %s\n# %s%s%s, Linux %s\n# measured in this run: %s\n%s\n",
		commit, date, machine, *machine ? ", " : "", cpu, uts.release, ceilings, columns);
	return b;
}

static inline void bench_row(struct bench_file *b, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
static inline void bench_row(struct bench_file *b, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vfprintf(b->f, fmt, ap);
	va_end(ap);
	fputc('\n', b->f);
	fflush(b->f);
}

static inline void bench_close(struct bench_file *b)
{
	if (fclose(b->f) || rename(b->temporary, b->path)) {
		fprintf(stderr, "cannot write %s: %m\n", b->path);
		exit(1);
	}
}

#endif
