/* SPDX-License-Identifier: Apache-2.0 */
/* jobs.c - the phases that every product goes through: input transform and product. */
#include "kernels/cpu/jobs.h"

/* A long row is transformed in pieces of this many blocks, so that one row can use the whole team. */
#define INPUT_BLOCKS 8u

void *cpu_bump(struct cpu_bump *b, size_t count, size_t size)
{
	void *ptr = b->next;
	size_t bytes;

	if (__builtin_mul_overflow(count, size, &bytes) || bytes > b->left) {
		b->left = 0; /* so that the last piece tells whether all of them fitted */
		return NULL;
	}
	bytes = (bytes + 63) / 64 * 64;
	bytes = bytes < b->left ? bytes : b->left;
	b->next += bytes;
	b->left -= bytes;
	return ptr;
}

uint64_t cpu_rows_total(const struct exl3_work *work)
{
	uint64_t total = 0;

	for (uint32_t i = 0; i < work->nr_rows; i++)
		total += work->rows[i].m;
	return total;
}

void cpu_rows_fill(const struct exl3_work *work, uint64_t first, uint32_t count,
		   struct cpu_row *out)
{
	uint32_t filled = 0;

	for (uint32_t e = 0; e < work->nr_rows && filled < count; e++) {
		const struct exl3_rows *rows = &work->rows[e];

		if (first >= rows->m) {
			first -= rows->m;
			continue;
		}
		for (uint64_t r = first; r < rows->m && filled < count; r++)
			out[filled++] = (struct cpu_row){
				.x = (const char *)rows->x + r * rows->x_stride,
				.y = (char *)rows->y + r * rows->y_stride,
				.entry = e,
				.x_dtype = rows->x_dtype,
				.y_dtype = rows->y_dtype,
				.stored = rows->stored,
			};
		first = 0;
	}
}

/* Panels differ by at most one row: @m rows in the fewest panels that the kernels allow. */
struct panels {
	uint32_t nr, rows, extra; /* the first @extra panels have one row more than @rows */
};

static struct panels panels_of(const struct cpu_isa *isa, uint32_t m)
{
	uint32_t nr = (m + isa->panel - 1) / isa->panel;

	return (struct panels){nr, m / nr, m % nr};
}

static uint32_t panel_start(const struct panels *p, uint32_t i)
{
	return i * p->rows + (i < p->extra ? i : p->extra);
}

float *cpu_panel_row(const struct cpu_isa *isa, float *xs, uint32_t k, uint32_t m, uint32_t r,
		     size_t *stride)
{
	struct panels p = panels_of(isa, m);
	uint32_t longer = p.extra * (p.rows + 1);
	uint32_t i = r < longer ? r / (p.rows + 1) : p.extra + (r - longer) / p.rows;
	uint32_t start = panel_start(&p, i);

	*stride = p.rows + (i < p.extra);
	return xs + (size_t)start * k + (r - start);
}

static uint32_t input_pieces(const struct cpu_job *job)
{
	uint32_t blocks = job->w->k / EXL3_HAD;

	return (blocks + INPUT_BLOCKS - 1) / INPUT_BLOCKS;
}

void cpu_jobs_prepare(struct cpu_jobs *jobs)
{
	jobs->nr_inputs = jobs->nr_units = jobs->products = 0;
	for (uint32_t i = 0; i < jobs->nr; i++) {
		struct cpu_job *job = &jobs->job[i];

		job->first_input = jobs->nr_inputs;
		job->first_unit = jobs->nr_units;
		jobs->nr_inputs += (uint64_t)job->m * input_pieces(job);
		jobs->nr_units += job->w->n / CPU_UNIT;
		jobs->products += (uint64_t)job->w->k * job->w->n * (8 + job->m);
	}
}

/* The last job whose first item is not beyond @item. */
static const struct cpu_job *find_job(const struct cpu_jobs *jobs, uint64_t item, bool unit)
{
	uint32_t low = 0, high = jobs->nr;

	while (high - low > 1) {
		uint32_t mid = low + (high - low) / 2;
		const struct cpu_job *job = &jobs->job[mid];

		if ((unit ? job->first_unit : job->first_input) <= item)
			low = mid;
		else
			high = mid;
	}
	return &jobs->job[low];
}

void cpu_jobs_input(const struct cpu_jobs *jobs, const struct cpu_row *rows)
{
	uint64_t item, end;

	cpu_share(jobs->nr_inputs, &item, &end);
	for (; item < end; item++) {
		const struct cpu_job *job = find_job(jobs, item, false);
		const struct exl3_matrix *w = job->w;
		uint32_t pieces = input_pieces(job);
		uint32_t r = (uint32_t)((item - job->first_input) / pieces);
		uint32_t b = (uint32_t)((item - job->first_input) % pieces) * INPUT_BLOCKS;
		uint32_t last = b + INPUT_BLOCKS;
		const struct cpu_row *row = &rows[job->rows ? job->rows[r] : r];
		size_t stride, size = exl3_dtype_bytes(row->x_dtype);
		float *xs = cpu_panel_row(jobs->isa, job->xs, w->k, job->m, r, &stride);

		if (last > w->k / EXL3_HAD)
			last = w->k / EXL3_HAD;
		for (; b < last; b++)
			jobs->isa->input(row->x + (size_t)b * EXL3_HAD * size, row->x_dtype,
					 cpu_columns(w->k_log, row->stored, b),
					 (const uint16_t *)w->suh + b * EXL3_HAD,
					 xs + (size_t)b * EXL3_HAD * stride, stride);
	}
}

static void product_unit(const struct cpu_isa *isa, const struct cpu_job *job, uint32_t unit)
{
	_Alignas(64) float block[CPU_BLOCK * CPU_UNIT];
	const struct exl3_matrix *w = job->w;
	float *z = job->z + (size_t)unit * CPU_UNIT;
	struct panels p;

	if (job->m == 1) {
		isa->gemv(w, unit, job->xs, z);
		return;
	}
	p = panels_of(isa, job->m);
	for (uint32_t k = 0; k < w->k; k += CPU_BLOCK) {
		isa->decode(w, k, unit, block);
		for (uint32_t i = 0; i < p.nr; i++) {
			uint32_t start = panel_start(&p, i), rows = p.rows + (i < p.extra);

			isa->multiply(rows, job->xs + (size_t)start * w->k + (size_t)k * rows,
				      block, z + (size_t)start * w->n, w->n, k == 0);
		}
	}
}

void cpu_jobs_product(const struct cpu_jobs *jobs, _Atomic uint64_t *next)
{
	uint64_t item;

	while ((item = atomic_fetch_add_explicit(next, 1, memory_order_relaxed)) < jobs->nr_units) {
		const struct cpu_job *job = find_job(jobs, item, true);

		product_unit(jobs->isa, job, (uint32_t)(item - job->first_unit));
	}
}
