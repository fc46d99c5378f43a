/* SPDX-License-Identifier: Apache-2.0 */
/*
 * jobs.h - products of several matrices as one list of jobs that the team works through in phases.
 *
 *       input     x rows -> transformed panels xs        one item: a piece of a row of a job
 *       product   xs, weights -> z                       one item: a unit of columns of a job
 *       (output: the caller's, because a linear layer and an MLP do different things with z)
 *
 * All items of a phase are independent; between phases there is a barrier. Nothing here allocates:
 * memory comes from the device's workspace through struct cpu_bump.
 */
#ifndef EXL3_KERNELS_CPU_JOBS_H
#define EXL3_KERNELS_CPU_JOBS_H

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/isa.h"
#include "kernels/format.h"

#ifdef _OPENMP
#include <omp.h>
#else /* built without it: a team of one */
static inline int omp_get_thread_num(void)
{
	return 0;
}
static inline int omp_get_num_threads(void)
{
	return 1;
}
#endif

/* Rows that are computed together; weights are decoded once for them. */
#define CPU_ROWS_MAX 256u

/* Less than this, some 20 us for one thread, is not worth waking others and waiting for them. */
#define CPU_TEAM_MIN (1u << 20)

/* One row of the work's operands. */
struct cpu_row {
	const char *x;
	char *y;
	uint32_t entry; /* index of work->rows */
	uint8_t x_dtype, y_dtype;
	bool stored;
};

struct cpu_job {
	const struct exl3_matrix *w;
	uint32_t m;
	const uint32_t *rows;             /* [m] indices of the operands' rows, or NULL: 0..m-1 */
	float *xs;                        /* [m * k] in panels */
	float *z;                         /* [m][n] in unit order */
	uint64_t first_input, first_unit; /* items of the jobs before this one */
};

struct cpu_jobs {
	const struct cpu_isa *isa;
	struct cpu_job *job;
	uint32_t nr;
	uint64_t nr_inputs, nr_units;
	uint64_t products; /* about: decoding a weight costs as much as eight multiplications */
};

/* Hands out pieces of the workspace, 64-byte aligned; NULL when it is used up. */
struct cpu_bump {
	char *next;
	size_t left;
};
void *cpu_bump(struct cpu_bump *b, size_t count, size_t size);
#define CPU_BUMP(b, type, count) ((type *)cpu_bump(b, count, sizeof(type)))

/* Counts the items once all jobs are filled in. */
void cpu_jobs_prepare(struct cpu_jobs *jobs);
/* This thread's share of the input phase; @rows: what job->rows points into. */
void cpu_jobs_input(const struct cpu_jobs *jobs, const struct cpu_row *rows);
/* Takes units until none is left; @next starts at 0 and is shared by the team. */
void cpu_jobs_product(const struct cpu_jobs *jobs, _Atomic uint64_t *next);

/* Where row @r of a job's panels starts, and the distance between its consecutive k. */
float *cpu_panel_row(const struct cpu_isa *isa, float *xs, uint32_t k, uint32_t m, uint32_t r,
		     size_t *stride);

/* Columns of block @b (128 wide) that a row has. */
static inline unsigned cpu_columns(uint32_t logical, bool stored, uint32_t b)
{
	uint32_t start = b * EXL3_HAD;

	if (stored || logical >= start + EXL3_HAD)
		return EXL3_HAD;
	return logical > start ? logical - start : 0;
}

/* This thread's part [*begin, *end) of @total items of equal cost. */
static inline void cpu_share(uint64_t total, uint64_t *begin, uint64_t *end)
{
	uint64_t id = (uint64_t)omp_get_thread_num(), nr = (uint64_t)omp_get_num_threads();

	*begin = total * id / nr;
	*end = total * (id + 1) / nr;
}

/* Describes rows [@first, @first + @count) of all entries together. */
void cpu_rows_fill(const struct exl3_work *work, uint64_t first, uint32_t count,
		   struct cpu_row *out);
uint64_t cpu_rows_total(const struct exl3_work *work);

/*
 * Threads for a region that multiplies about @products numbers: one, or the whole team. Between
 * those there is nothing, because libgomp ends the threads that a smaller team leaves over, and
 * with them their pinning.
 */
static inline int cpu_team(const struct exl3_dev *dev, uint64_t products)
{
#ifdef __SANITIZE_THREAD__
	/* libgomp's barriers are not instrumented: a team would be reported as one big race. */
	(void)dev, (void)products;
	return 1;
#else
	return products < CPU_TEAM_MIN ? 1 : (int)dev->nr_threads;
#endif
}

/* The operations, each over one instruction set. */
bool cpu_linear_supports(const struct exl3_dev *dev, const struct exl3_work *work);
int cpu_linear_run(struct exl3_dev *dev, const struct exl3_work *work, const struct cpu_isa *isa);
bool cpu_moe_supports(const struct exl3_dev *dev, const struct exl3_work *work);
int cpu_moe_run(struct exl3_dev *dev, const struct exl3_work *work, const struct cpu_isa *isa);
bool cpu_mla_supports(const struct exl3_dev *dev, const struct exl3_work *work);
int cpu_mla_run(struct exl3_dev *dev, const struct exl3_work *work, const struct cpu_isa *isa);

#endif
