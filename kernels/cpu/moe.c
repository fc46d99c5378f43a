/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe.c - routed experts and dense MLPs: out = sum over experts of p * down(act(gate(x), up(x))).
 *
 * A place is one (token, expert) pair that has to be computed. Places are sorted by expert, so an
 * expert's are consecutive and each of its matrices is one job:
 *
 *       place   0  1  2 | 3 | 4  5 ...          expert of the places 0..2, of place 3, of 4..5
 *
 *       input(gate, up)  product(gate, up)  act + input(down)  product(down)  combine
 *
 * A token adds its places in ascending order of experts, so its bits depend on its own choices
 * only. A dense MLP is the same with every token at every expert (slice) and p = 1.
 */
#include "kernels/cpu/jobs.h"

#include <errno.h>

struct place {
	uint32_t token, expert;
	float p;
};

struct group { /* an expert that has places */
	const struct exl3_expert *e;
	uint32_t start, m;                /* places */
	struct cpu_job *gate, *up, *down; /* gate may be NULL */
};

struct moe {
	const struct exl3_work *work;
	const struct cpu_isa *isa;
	uint32_t tokens, places, nr_groups;
	uint32_t tokens_max, places_max; /* what the memory below holds */
	uint32_t k, inter, hidden;       /* stored sizes; inter: the largest of all experts */

	struct cpu_row *rows;    /* [tokens] */
	struct place *unsorted;  /* [places] in order of tokens */
	struct place *place;     /* [places] sorted by expert */
	uint32_t *token_of;      /* [places] token of each sorted place: the jobs' rows */
	uint32_t *first;         /* [tokens + 1] where a token's list begins in mine */
	uint32_t *mine;          /* [places] sorted places of each token, ascending */
	uint32_t *group_of;      /* [places] */
	uint32_t *count;         /* [nr_experts + 1] */
	struct group *group;     /* [min(places, nr_experts)] */
	struct cpu_job *in_job;  /* gate and up jobs */
	struct cpu_job *out_job; /* down jobs */
	float *x_gate, *x_up, *z_gate, *z_up, *x_down, *z_down;
	struct cpu_jobs in, out;
};

static void sizes(const struct exl3_moe_args *a, struct moe *s)
{
	s->k = a->experts[0].up->k;
	s->hidden = a->experts[0].down->n;
	s->inter = 0;
	for (uint32_t i = 0; i < a->nr_experts; i++)
		if (a->experts[i].up->n > s->inter)
			s->inter = a->experts[i].up->n;
}

static uint32_t most_choices(const struct exl3_work *work)
{
	uint32_t most = 1;

	if (work->op == EXL3_OP_MLP)
		return work->u.moe.nr_experts;
	for (uint32_t i = 0; i < work->nr_rows; i++)
		if (work->u.moe.routes[i].topk > most)
			most = work->u.moe.routes[i].topk;
	return most;
}

static size_t bytes_per_place(const struct moe *s)
{
	return (2 * (size_t)s->k + 3 * (size_t)s->inter + s->hidden) * sizeof(float) +
	       2 * sizeof(struct place) + 3 * sizeof(uint32_t) + sizeof(struct group) +
	       3 * sizeof(struct cpu_job);
}

static size_t bytes_per_token(const struct moe *s, uint32_t choices)
{
	return sizeof(struct cpu_row) + sizeof(uint32_t) + choices * bytes_per_place(s);
}

static size_t bytes_fixed(const struct exl3_moe_args *a)
{
	return ((size_t)a->nr_experts + 1) * sizeof(uint32_t) + 4096;
}

bool cpu_moe_supports(const struct exl3_dev *dev, const struct exl3_work *work)
{
	const struct exl3_moe_args *a = &work->u.moe;
	struct moe s;

	if (work->op != EXL3_OP_MOE && work->op != EXL3_OP_MLP)
		return false;
	sizes(a, &s);
	return bytes_fixed(a) + bytes_per_token(&s, most_choices(work)) <= dev->ws_bytes;
}

static int carve(struct moe *s, const struct exl3_dev *dev)
{
	const struct exl3_moe_args *a = &s->work->u.moe;
	struct cpu_bump b = {dev->ws, dev->ws_bytes};
	uint32_t groups = s->places_max < a->nr_experts ? s->places_max : a->nr_experts;

	s->rows = CPU_BUMP(&b, struct cpu_row, s->tokens_max);
	s->unsorted = CPU_BUMP(&b, struct place, s->places_max);
	s->place = CPU_BUMP(&b, struct place, s->places_max);
	s->token_of = CPU_BUMP(&b, uint32_t, s->places_max);
	s->first = CPU_BUMP(&b, uint32_t, s->tokens_max + 1);
	s->mine = CPU_BUMP(&b, uint32_t, s->places_max);
	s->group_of = CPU_BUMP(&b, uint32_t, s->places_max);
	s->count = CPU_BUMP(&b, uint32_t, a->nr_experts + 1);
	s->group = CPU_BUMP(&b, struct group, groups);
	s->in_job = CPU_BUMP(&b, struct cpu_job, 2 * (size_t)groups);
	s->out_job = CPU_BUMP(&b, struct cpu_job, groups);
	s->x_gate = CPU_BUMP(&b, float, (size_t)s->places_max * s->k);
	s->x_up = CPU_BUMP(&b, float, (size_t)s->places_max * s->k);
	s->z_gate = CPU_BUMP(&b, float, (size_t)s->places_max * s->inter);
	s->z_up = CPU_BUMP(&b, float, (size_t)s->places_max * s->inter);
	s->x_down = CPU_BUMP(&b, float, (size_t)s->places_max * s->inter);
	s->z_down = CPU_BUMP(&b, float, (size_t)s->places_max * s->hidden);
	return s->z_down ? 0 : -ENOMEM; /* no piece fits after one that did not */
}

static int64_t load_id(const void *ids, uint8_t dtype, size_t i)
{
	return dtype == EXL3_I64 ? ((const volatile int64_t *)ids)[i]
				 : ((const volatile int32_t *)ids)[i];
}

/*
 * Takes the places of rows [s->tokens] from the operands: each id is read once, into private
 * memory, and checked there, because its owner may change it at any time.
 */
static void read_places(struct moe *s, uint64_t first_row)
{
	const struct exl3_work *work = s->work;
	const struct exl3_moe_args *a = &work->u.moe;
	uint64_t base = 0;
	uint32_t entry = 0;

	s->places = 0;
	for (uint32_t t = 0; t < s->tokens; t++) {
		uint64_t row = first_row + t;
		const struct exl3_route *route;
		uint32_t choices;

		while (row >= base + work->rows[entry].m)
			base += work->rows[entry++].m;
		route = work->op == EXL3_OP_MOE ? &a->routes[entry] : NULL;
		choices = route ? route->topk : a->nr_experts;
		for (uint32_t j = 0; j < choices; j++) {
			size_t at = (size_t)(row - base) * choices + j;
			int64_t id = route ? load_id(route->ids, route->ids_dtype, at) : (int64_t)j;
			float p = 1;

			if (id < 0 || id >= a->nr_experts) {
				if (id != -1 && work->skipped)
					work->skipped[entry]++;
				continue;
			}
			if (route && route->weights_dtype == EXL3_F32)
				p = ((const float *)route->weights)[at];
			else if (route && route->weights_dtype == EXL3_F16)
				p = exl3_f16_to_f32(((const uint16_t *)route->weights)[at]);
			else if (route)
				p = exl3_bf16_to_f32(((const uint16_t *)route->weights)[at]);
			s->unsorted[s->places++] = (struct place){t, (uint32_t)id, p};
		}
	}
}

/* Counting sort by expert, stable in the order of tokens; then the lists of groups and tokens. */
static void sort_places(struct moe *s)
{
	const struct exl3_moe_args *a = &s->work->u.moe;
	uint32_t sum = 0;

	memset(s->count, 0, (a->nr_experts + 1) * sizeof(*s->count));
	memset(s->first, 0, (s->tokens + 1) * sizeof(*s->first));
	for (uint32_t i = 0; i < s->places; i++) {
		s->count[s->unsorted[i].expert]++;
		s->first[s->unsorted[i].token + 1]++;
	}
	s->nr_groups = 0;
	for (uint32_t e = 0; e < a->nr_experts; e++) {
		uint32_t m = s->count[e];

		s->count[e] = sum;
		if (m)
			s->group[s->nr_groups++] =
				(struct group){.e = &a->experts[e], .start = sum, .m = m};
		sum += m;
	}
	for (uint32_t i = 0; i < s->places; i++)
		s->place[s->count[s->unsorted[i].expert]++] = s->unsorted[i];
	for (uint32_t t = 0; t < s->tokens; t++)
		s->first[t + 1] += s->first[t];
	for (uint32_t g = 0; g < s->nr_groups; g++)
		for (uint32_t i = s->group[g].start; i < s->group[g].start + s->group[g].m; i++) {
			uint32_t t = s->place[i].token;

			s->group_of[i] = g;
			s->token_of[i] = t;
			s->mine[s->first[t]++] = i;
		}
	/* first[t] now is where token t's list ends, which is where the next one begins. */
	for (uint32_t t = s->tokens; t > 0; t--)
		s->first[t] = s->first[t - 1];
	s->first[0] = 0;
}

static void make_jobs(struct moe *s)
{
	s->in = (struct cpu_jobs){.isa = s->isa, .job = s->in_job};
	s->out = (struct cpu_jobs){.isa = s->isa, .job = s->out_job};
	for (uint32_t i = 0; i < s->nr_groups; i++) {
		struct group *g = &s->group[i];
		struct cpu_job job = {.m = g->m, .rows = s->token_of + g->start};
		size_t at = g->start;

		if (g->e->gate) {
			job.w = g->e->gate;
			job.xs = s->x_gate + at * s->k;
			job.z = s->z_gate + at * s->inter;
			g->gate = &s->in_job[s->in.nr++];
			*g->gate = job;
		}
		job.w = g->e->up;
		job.xs = s->x_up + at * s->k;
		job.z = s->z_up + at * s->inter;
		g->up = &s->in_job[s->in.nr++];
		*g->up = job;
		job.w = g->e->down;
		job.rows = NULL;
		job.xs = s->x_down + at * s->inter;
		job.z = s->z_down + at * s->hidden;
		g->down = &s->out_job[s->out.nr++];
		*g->down = job;
	}
	cpu_jobs_prepare(&s->in);
	cpu_jobs_prepare(&s->out);
}

static void output_block(const struct cpu_isa *isa, const struct cpu_job *job, uint32_t r,
			 uint32_t col, float *y)
{
	const struct exl3_matrix *w = job->w;

	isa->output(job->z + (size_t)r * w->n + col, (const uint16_t *)w->svh + col,
		    w->bias ? (const float *)w->bias + col : NULL, y);
}

/* Between the products everything stays inside a block of 128 columns; one item is a block of a place. */
static void activate(const struct moe *s)
{
	const struct exl3_moe_args *a = &s->work->u.moe;
	const uint32_t blocks = s->inter / EXL3_HAD;
	_Alignas(64) float gate[EXL3_HAD], up[EXL3_HAD];
	uint64_t item, end;

	cpu_share((uint64_t)s->places * blocks, &item, &end);
	for (; item < end; item++) {
		uint32_t i = (uint32_t)(item / blocks), b = (uint32_t)(item % blocks);
		const struct group *g = &s->group[s->group_of[i]];
		const struct exl3_matrix *down = g->e->down;
		uint32_t r = i - g->start, col = b * EXL3_HAD;
		size_t stride;
		float *xs;

		if (col >= down->k)
			continue;
		if (g->gate)
			output_block(s->isa, g->gate, r, col, gate);
		output_block(s->isa, g->up, r, col, up);
		s->isa->act(a->act, a->limit, g->gate ? gate : NULL, up, EXL3_HAD);
		/* Columns between the logical and the stored width are zero for the next matrix. */
		xs = cpu_panel_row(s->isa, g->down->xs, down->k, g->m, r, &stride);
		s->isa->input(up, EXL3_F32, cpu_columns(down->k_log, false, b),
			      (const uint16_t *)down->suh + col, xs + (size_t)col * stride, stride);
	}
}

static void combine(const struct moe *s)
{
	const struct exl3_moe_args *a = &s->work->u.moe;
	const uint32_t blocks = s->hidden / EXL3_HAD, n_log = a->experts[0].down->n_log;
	const float scale = s->work->op == EXL3_OP_MOE ? a->routed_scale : 1;
	_Alignas(64) float sum[EXL3_HAD], y[EXL3_HAD];
	uint64_t item, end;

	cpu_share((uint64_t)s->tokens * blocks, &item, &end);
	for (; item < end; item++) {
		uint32_t t = (uint32_t)(item / blocks), b = (uint32_t)(item % blocks);
		const struct cpu_row *row = &s->rows[t];
		uint32_t col = b * EXL3_HAD;

		memset(sum, 0, sizeof(sum));
		for (uint32_t j = s->first[t]; j < s->first[t + 1]; j++) {
			uint32_t i = s->mine[j];
			const struct group *g = &s->group[s->group_of[i]];

			output_block(s->isa, g->down, i - g->start, col, y);
			s->isa->add(sum, s->place[i].p, y);
		}
		if (scale != 1) {
			memset(y, 0, sizeof(y));
			s->isa->add(y, scale, sum);
			memcpy(sum, y, sizeof(sum));
		}
		s->isa->store(row->y, row->y_dtype, col, sum, cpu_columns(n_log, row->stored, b));
	}
}

int cpu_moe_run(struct exl3_dev *dev, const struct exl3_work *work, const struct cpu_isa *isa)
{
	uint64_t total = cpu_rows_total(work), fit;
	uint32_t choices = most_choices(work);
	struct moe s = {.work = work, .isa = isa};
	int ret;

	sizes(&work->u.moe, &s);
	fit = (dev->ws_bytes - bytes_fixed(&work->u.moe)) / bytes_per_token(&s, choices);
	fit = fit < CPU_ROWS_MAX ? fit : CPU_ROWS_MAX;
	s.tokens_max = (uint32_t)(fit < total ? fit : total);
	s.places_max = s.tokens_max * choices;
	ret = carve(&s, dev);
	if (ret)
		return ret;
	for (uint64_t first = 0; first < total; first += s.tokens) {
		_Atomic uint64_t next_in = 0, next_out = 0;

		s.tokens = (uint32_t)(total - first < s.tokens_max ? total - first : s.tokens_max);
		cpu_rows_fill(work, first, s.tokens, s.rows);
		read_places(&s, first);
		sort_places(&s);
		make_jobs(&s);
#pragma omp parallel num_threads(cpu_team(dev, s.in.products + s.out.products))
		{
			cpu_jobs_input(&s.in, s.rows);
#pragma omp barrier
			cpu_jobs_product(&s.in, &next_in);
#pragma omp barrier
			activate(&s);
#pragma omp barrier
			cpu_jobs_product(&s.out, &next_out);
#pragma omp barrier
			combine(&s);
		}
	}
	return 0;
}
