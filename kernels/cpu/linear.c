/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear.c - y = [x W0 | x W1 | ...] for rows of one or several requests.
 *
 * Shards are jobs of one list: their inputs differ (each has its own suh), their units of columns
 * share the team. Rows are taken CPU_ROWS_MAX at a time, or as many as the workspace holds.
 */
#include "kernels/cpu/jobs.h"

#include <errno.h>

/* Most shards of one fused group; q, k, v and gate, up need 3. */
#define SHARDS_MAX 64u

static size_t bytes_per_row(const struct exl3_work *work)
{
	size_t bytes = sizeof(struct cpu_row) + 64;

	for (uint32_t s = 0; s < work->u.linear.nr_shards; s++) {
		const struct exl3_matrix *w = work->u.linear.shards[s];

		bytes += ((size_t)w->k + w->n) * sizeof(float);
	}
	return bytes;
}

/* Lists, and the rounding of every piece to 64 bytes. */
#define FIXED_BYTES (SHARDS_MAX * (sizeof(struct cpu_job) + 128) + 4096)

bool cpu_linear_supports(const struct exl3_dev *dev, const struct exl3_work *work)
{
	return work->op == EXL3_OP_LINEAR && work->u.linear.nr_shards <= SHARDS_MAX &&
	       dev->ws_bytes > FIXED_BYTES && bytes_per_row(work) <= dev->ws_bytes - FIXED_BYTES;
}

/* This thread's share of the output phase: one item is a block of 128 columns of a row. */
static void output(const struct cpu_jobs *jobs, const struct cpu_row *rows, uint32_t m,
		   uint64_t blocks)
{
	_Alignas(64) float y[EXL3_HAD];
	uint64_t item, end;

	cpu_share(m * blocks, &item, &end);
	while (item < end) {
		const struct cpu_row *row = &rows[item / blocks];
		uint64_t b = item % blocks;
		size_t at = 0;

		/* The shard of this block, and the column where the shard begins in y. */
		for (uint32_t s = 0; s < jobs->nr && item < end; s++) {
			const struct cpu_job *job = &jobs->job[s];
			const struct exl3_matrix *w = job->w;
			uint32_t nr = w->n / EXL3_HAD;

			for (; b < nr && item < end; b++, item++) {
				uint32_t col = (uint32_t)b * EXL3_HAD;
				unsigned count = cpu_columns(w->n_log, row->stored, (uint32_t)b);

				jobs->isa->output(job->z + (size_t)(row - rows) * w->n + col,
						  (const uint16_t *)w->svh + col,
						  w->bias ? (const float *)w->bias + col : NULL, y);
				jobs->isa->store(row->y, row->y_dtype, at + col, y, count);
			}
			b -= nr;
			at += row->stored ? w->n : w->n_log;
		}
	}
}

int cpu_linear_run(struct exl3_dev *dev, const struct exl3_work *work, const struct cpu_isa *isa)
{
	const struct exl3_linear_args *a = &work->u.linear;
	uint64_t total = cpu_rows_total(work), fit, blocks = 0;
	struct cpu_bump bump = {dev->ws, dev->ws_bytes};
	struct cpu_jobs jobs = {.isa = isa, .nr = a->nr_shards};
	struct cpu_row *rows;

	fit = (dev->ws_bytes - FIXED_BYTES) / bytes_per_row(work);
	fit = fit < CPU_ROWS_MAX ? fit : CPU_ROWS_MAX;
	fit = fit < total ? fit : total;
	jobs.job = CPU_BUMP(&bump, struct cpu_job, jobs.nr);
	rows = CPU_BUMP(&bump, struct cpu_row, fit);
	if (!jobs.job || !rows)
		return -ENOMEM;
	for (uint32_t s = 0; s < jobs.nr; s++) {
		const struct exl3_matrix *w = a->shards[s];
		struct cpu_job job = {.w = w,
				      .xs = CPU_BUMP(&bump, float, fit * w->k),
				      .z = CPU_BUMP(&bump, float, fit * w->n)};

		if (!job.xs || !job.z)
			return -ENOMEM;
		jobs.job[s] = job;
		blocks += w->n / EXL3_HAD;
	}
	for (uint64_t first = 0; first < total; first += fit) {
		uint32_t m = (uint32_t)(total - first < fit ? total - first : fit);
		_Atomic uint64_t next = 0;

		cpu_rows_fill(work, first, m, rows);
		for (uint32_t s = 0; s < jobs.nr; s++)
			jobs.job[s].m = m;
		cpu_jobs_prepare(&jobs);
#pragma omp parallel num_threads(cpu_team(dev, jobs.products))
		{
			cpu_jobs_input(&jobs, rows);
#pragma omp barrier
			cpu_jobs_product(&jobs, &next);
#pragma omp barrier
			output(&jobs, rows, m, blocks);
		}
	}
	return 0;
}
