/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lower.cu - from checked work to launches: which variant, which workspace, which row table.
 *
 * One stream per device, so launches share one workspace: [zero words | kernels' scratch | buffers of a
 * composed operation (MLP)]. A request whose scratch would not fit runs in chunks of rows.
 */
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/dev.h"
#include "kernels/cuda/lower.h"
#include "kernels/cuda/moe.h"
#include "kernels/tuned.h"

#include <errno.h>
#include <string.h>

/* ---- the list of variants, as backend.h wants it ---- */

#define KERNELS_MAX 96
#define COMPOSED    (2 + EXL3_CUDA_MOE_VARIANTS_NR) /* entries behind the linear ones */

struct exl3_kernel exl3_cuda_kernel_table[KERNELS_MAX + 1];
static const struct exl3_cuda_linear_kernel *g_linear[KERNELS_MAX];
static unsigned g_nr_kernels;

/* backend.h's supports() does not say for which entry it is asked: one function per position. */
template <int I> static bool supports_at(const struct exl3_dev *dev, const struct exl3_work *work)
{
	struct exl3_cuda_linear a;

	if (!exl3_cuda_linear_args(&dev->place, work, &a))
		return false;
	return g_linear[I]->supports(&a);
}

template <int I> struct fill_supports {
	static void at(struct exl3_kernel *k)
	{
		k[I].supports = supports_at<I>;
		fill_supports<I - 1>::at(k);
	}
};
template <> struct fill_supports<-1> {
	static void at(struct exl3_kernel *) {}
};

/* Composed operations choose their kernels themselves: one entry each, and the routed block's variants for who names one. */
static const struct exl3_kernel *g_mlp, *g_moe, *g_mla;

static bool supports_mlp(const struct exl3_dev *dev, const struct exl3_work *work)
{
	(void)dev;
	return work->op == EXL3_OP_MLP;
}

template <unsigned V> static bool supports_moe(const struct exl3_dev *dev, const struct exl3_work *work)
{
	return work->op == EXL3_OP_MOE && exl3_cuda_supports_moe(&dev->place, work, V);
}

template <unsigned V> static void list_moe(struct exl3_kernel *k)
{
	if constexpr (V < EXL3_CUDA_MOE_VARIANTS_NR) {
		k[V] = {exl3_cuda_moe_variants[V].name, EXL3_OP_MOE, supports_moe<V>, NULL, V > 0};
		list_moe<V + 1>(k);
	}
}

unsigned exl3_cuda_moe_variant_of(const struct exl3_kernel *kernel)
{
	return kernel ? (unsigned)(kernel - g_moe) : 0;
}

static bool supports_mla(const struct exl3_dev *dev, const struct exl3_work *work)
{
	return work->op == EXL3_OP_MLA_DECODE && exl3_cuda_supports_mla(&dev->place, work);
}

__attribute__((constructor)) static void list_kernels(void)
{
	const struct exl3_cuda_linear_kernel *tables[] = {exl3_cuda_gemv_kernels,
							  exl3_cuda_gemm_kernels};
	struct exl3_kernel *k;

	for (const struct exl3_cuda_linear_kernel *t : tables)
		for (; t->name && g_nr_kernels < KERNELS_MAX - COMPOSED; t++) {
			g_linear[g_nr_kernels] = t;
			exl3_cuda_kernel_table[g_nr_kernels].name = t->name;
			exl3_cuda_kernel_table[g_nr_kernels].op = EXL3_OP_LINEAR;
			exl3_cuda_kernel_table[g_nr_kernels].candidate = t->candidate;
			g_nr_kernels++;
		}
	fill_supports<KERNELS_MAX - 1>::at(exl3_cuda_kernel_table);
	k = &exl3_cuda_kernel_table[g_nr_kernels];
	k[0] = {"mlp", EXL3_OP_MLP, supports_mlp, NULL, false};
	k[1] = {"mla", EXL3_OP_MLA_DECODE, supports_mla, NULL, false};
	list_moe<0>(k + 2);
	g_mlp = &k[0];
	g_mla = &k[1];
	g_moe = &k[2];
	for (k += COMPOSED; k <= &exl3_cuda_kernel_table[KERNELS_MAX]; k++)
		memset(k, 0, sizeof(*k));
}

/* ---- linear ---- */

static uint32_t total_rows(const struct exl3_work *work)
{
	uint64_t m = 0;

	for (uint32_t i = 0; i < work->nr_rows; i++)
		m += work->rows[i].m;
	return m > EXL3_M_MAX ? 0 : (uint32_t)m;
}

static void fill_dev(const struct exl3_cuda_place *p, struct exl3_cuda_linear *a)
{
	a->ws = p->ws;
	a->ws_bytes = p->ws_bytes;
	a->device_sms = p->dev->sms;
	a->device_cc = p->dev->cc;
	a->builtin = p->dev->builtin;
}

bool exl3_cuda_linear_args(const struct exl3_cuda_place *p, const struct exl3_work *work,
			   struct exl3_cuda_linear *a)
{
	const struct exl3_rows *r = &work->rows[0];

	memset(a, 0, sizeof(*a));
	if (work->op != EXL3_OP_LINEAR || work->u.linear.nr_shards > EXL3_CUDA_SHARDS_MAX)
		return false;
	a->nr_shards = work->u.linear.nr_shards;
	for (uint32_t i = 0; i < a->nr_shards; i++)
		a->shard[i] = *work->u.linear.shards[i];
	a->m = total_rows(work);
	if (!a->m)
		return false;
	a->x = r->x;
	a->y = r->y;
	a->x_stride = r->x_stride;
	a->y_stride = r->y_stride;
	a->x_dtype = r->x_dtype;
	a->y_dtype = r->y_dtype;
	a->stored = r->stored;
	a->deterministic = work->deterministic || p->deterministic;
	a->tuned = work->tuned;
	fill_dev(p, a);
	if (a->deterministic && !work->kernel)
		a->class_m = exl3_cuda_linear_class(p, a, r->m);
	return true;
}

static const struct exl3_cuda_linear_kernel *linear_of(const struct exl3_kernel *kernel)
{
	return kernel >= exl3_cuda_kernel_table && kernel < exl3_cuda_kernel_table + g_nr_kernels
		       ? g_linear[kernel - exl3_cuda_kernel_table]
		       : NULL;
}

static bool can_run(const void *arg, const struct exl3_kernel *kernel)
{
	const struct exl3_cuda_linear *a = (const struct exl3_cuda_linear *)arg;
	const struct exl3_cuda_linear_kernel *k = linear_of(kernel);

	return k && k->supports(a) && k->ws_bytes(a) <= a->ws_bytes;
}

/* What was measured to be the best for it, or NULL. */
static const struct exl3_cuda_linear_kernel *tuned_linear(const struct exl3_cuda_linear *a)
{
	const struct exl3_matrix *shards[EXL3_CUDA_SHARDS_MAX];
	const struct exl3_linear_args linear = {shards, a->nr_shards};
	const struct exl3_tuned_line *line;
	struct exl3_tuned_shape shape;

	if (!a->tuned && !a->builtin)
		return NULL;
	for (uint32_t i = 0; i < a->nr_shards; i++)
		shards[i] = &a->shard[i];
	if (!exl3_tuned_shape(&shape, &linear))
		return NULL;
	line = exl3_tuned_pick(a->tuned, a->builtin, &shape, a->m, can_run, a);
	return line ? linear_of(line->kernel) : NULL;
}

/*
 * What was measured to be the best; else the first variant of the tables that can run it: they are ordered by
 * preference. A function of shapes and rows alone, and of the tables.
 */
static const struct exl3_cuda_linear_kernel *choose_linear(const struct exl3_cuda_linear *a)
{
	const struct exl3_cuda_linear_kernel *best = tuned_linear(a);

	if (best)
		return best;
	for (unsigned i = 0; i < g_nr_kernels; i++)
		if (g_linear[i]->supports(a) && g_linear[i]->ws_bytes(a) <= a->ws_bytes)
			return g_linear[i];
	return NULL;
}

/*
 * Runs @a with @kernel (NULL: the best one), in chunks of rows if the workspace asks for it. Chunks are
 * multiples of 8 rows and depend on shapes alone, so they do not disturb the deterministic mode; with a
 * class they may be of any size.
 */
static int run_linear(const struct exl3_cuda_linear *whole, const struct exl3_cuda_linear_kernel *kernel,
		      cudaStream_t stream)
{
	uint32_t done = 0;

	while (done < whole->m) {
		struct exl3_cuda_linear a = *whole;
		const struct exl3_cuda_linear_kernel *k = NULL;
		int ret;

		if (a.table)
			a.table += done;
		a.x = (const char *)a.x + (size_t)done * a.x_stride;
		a.y = (char *)a.y + (size_t)done * a.y_stride;
		a.m -= done;
		if (a.class_m) {
			kernel = &exl3_cuda_gemv_kernels[0];
			a.m = a.m < a.class_m ? a.m : a.class_m;
		}
		for (;;) {
			k = kernel ? kernel : choose_linear(&a);
			if (k && k->supports(&a) && k->ws_bytes(&a) <= a.ws_bytes)
				break;
			if (a.m <= 8)
				return k ? -ENOMEM : -EOPNOTSUPP;
			a.m = (a.m / 2 + 7) / 8 * 8;
		}
		ret = k->launch(&a, stream);
		if (ret)
			return ret;
		done += a.m;
	}
	return 0;
}

static int lower_linear(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot)
{
	const struct exl3_linear_args *linear = &slot->work->u.linear;
	const struct exl3_cuda_linear_kernel *kernel = NULL;
	struct exl3_cuda_linear a;
	struct exl3_work work;
	size_t ws_bytes;
	int ret;

	if (!exl3_cuda_linear_args(p, slot->work, &a))
		return -EOPNOTSUPP;
	ret = exl3_cuda_stage(p, slot, linear->shards[0]->k, linear->shards[0]->k_log, &work, &ws_bytes);
	if (ret)
		return ret;
	exl3_cuda_linear_args(p, &work, &a);
	a.ws_bytes = ws_bytes;
	if (work.kernel)
		kernel = g_linear[work.kernel - exl3_cuda_kernel_table];
	if (work.nr_rows > 1) {
		ret = exl3_cuda_table(p, slot, &work, a.m, &a.table);
		if (ret)
			return ret;
	}
	return run_linear(&a, kernel, p->stream);
}

/* ---- dense MLP: gate and up in one launch, activation, down ---- */

/* gu [m, gate | up] f32, stored sizes; a [m, inter] f32, padded columns exact zeros. */
__global__ static void mlp_act_kernel(const float *gu, float *a, uint32_t inter, uint32_t inter_log,
				      uint32_t gated, int act, float limit)
{
	uint32_t col = blockIdx.x * blockDim.x + threadIdx.x;
	size_t row = blockIdx.y;

	if (col >= inter)
		return;
	const float *src = gu + row * inter * (gated ? 2 : 1);
	float u = src[gated ? inter + col : col];
	float g = gated ? src[col] : 0.0f;

	a[row * inter + col] = col < inter_log ? exl3::activate(g, u, act, limit) : 0.0f;
}

/* Sum of the slices' outputs, converted into the rows' own memory. */
__global__ static void mlp_sum_kernel(const float *part, uint32_t nr, size_t part_stride, uint32_t n,
				      const struct exl3_cuda_row *table, void *y, uint32_t y_stride,
				      int y_dtype)
{
	uint32_t col = blockIdx.x * blockDim.x + threadIdx.x;
	size_t row = blockIdx.y;
	float v = 0.0f;

	if (col >= n)
		return;
	for (uint32_t i = 0; i < nr; i++)
		v += part[i * part_stride + row * n + col];
	void *dst = table ? table[row].y : (char *)y + row * y_stride;
	int dtype = table ? table[row].y_dtype : y_dtype;

	exl3::store_elem(dst, col, dtype, v);
}

static int lower_mlp(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot)
{
	const struct exl3_moe_args *moe = &slot->work->u.moe;
	const struct exl3_matrix *up = moe->experts[0].up, *down = moe->experts[0].down;
	struct exl3_cuda_linear whole;
	struct exl3_work one;
	bool gated = moe->experts[0].gate != NULL;
	uint32_t slices = moe->nr_experts, inter = 0, n_out, done = 0, rows;
	size_t per_row, budget, ws_bytes;
	int ret = exl3_cuda_stage(p, slot, up->k, up->k_log, &one, &ws_bytes);

	if (ret)
		return ret;
	/* Row addressing of the whole operation, through a linear of the same rows. */
	one.op = EXL3_OP_LINEAR;
	one.u.linear.shards = &up;
	one.u.linear.nr_shards = 1;
	if (!exl3_cuda_linear_args(p, &one, &whole))
		return -EOPNOTSUPP;
	whole.class_m = whole.deterministic ? exl3_cuda_mlp_class(p, slot->work) : 0;
	if (one.nr_rows > 1) {
		ret = exl3_cuda_table(p, slot, &one, whole.m, &whole.table);
		if (ret)
			return ret;
	}
	for (uint32_t i = 0; i < slices; i++)
		inter = inter > moe->experts[i].up->n ? inter : moe->experts[i].up->n;
	n_out = whole.stored ? down->n : down->n_log;
	/* gate | up, activation, and with slices one output each; the rest is the kernels' scratch. */
	per_row = (size_t)inter * 4 * (gated ? 3 : 2) + (slices > 1 ? (size_t)slices * n_out * 4 : 0);
	budget = (ws_bytes - EXL3_CUDA_WS_ZERO) / 2;
	rows = budget / per_row < whole.m ? (uint32_t)(budget / per_row) / 8 * 8 : whole.m;
	if (!rows)
		return -ENOMEM;
	char *buffers = p->ws + (ws_bytes - budget) / 256 * 256;

	for (; done < whole.m; done += rows) {
		uint32_t m = whole.m - done < rows ? whole.m - done : rows;
		float *gu = (float *)buffers, *a = gu + (size_t)m * inter * (gated ? 2 : 1);
		float *part = a + (size_t)m * inter;

		for (uint32_t i = 0; i < slices; i++) {
			const struct exl3_expert *e = &moe->experts[i];
			uint32_t width = e->up->n;
			struct exl3_cuda_linear l = whole;

			l.ws_bytes = (size_t)(buffers - p->ws);
			l.m = m;
			l.nr_shards = gated ? 2 : 1;
			if (gated)
				l.shard[0] = *e->gate;
			l.shard[gated ? 1 : 0] = *e->up;
			if (l.table)
				l.table += done;
			l.x = (const char *)whole.x + (size_t)done * whole.x_stride;
			l.y = gu;
			l.y_stride = width * 4 * (gated ? 2 : 1);
			l.y_dtype = EXL3_F32;
			l.y_private = true;
			ret = run_linear(&l, NULL, p->stream);
			if (ret)
				return ret;
			mlp_act_kernel<<<dim3((width + 255) / 256, m), 256, 0, p->stream>>>(
				gu, a, width, e->up->n_log, gated, moe->act, moe->limit);

			l = whole;
			l.ws_bytes = (size_t)(buffers - p->ws);
			l.m = m;
			l.nr_shards = 1;
			l.shard[0] = *e->down;
			l.x = a;
			l.x_stride = width * 4;
			l.x_dtype = EXL3_F32;
			l.x_private = true;
			if (l.table)
				l.table += done;
			l.y = (char *)whole.y + (size_t)done * whole.y_stride;
			if (slices > 1) {
				l.table = NULL;
				l.y = part + (size_t)i * m * n_out;
				l.y_stride = n_out * 4;
				l.y_dtype = EXL3_F32;
			}
			ret = run_linear(&l, NULL, p->stream);
			if (ret)
				return ret;
		}
		if (slices > 1)
			mlp_sum_kernel<<<dim3((n_out + 255) / 256, m), 256, 0, p->stream>>>(
				part, slices, (size_t)m * n_out, n_out,
				whole.table ? whole.table + done : NULL,
				(char *)whole.y + (size_t)done * whole.y_stride, whole.y_stride,
				whole.y_dtype);
	}
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

/* ---- entry points ---- */

const struct exl3_kernel *exl3_cuda_select(const struct exl3_dev *dev, const struct exl3_work *work)
{
	const struct exl3_cuda_linear_kernel *k;
	struct exl3_cuda_linear a;

	switch (work->op) {
	case EXL3_OP_LINEAR:
		if (!exl3_cuda_linear_args(&dev->place, work, &a))
			return NULL;
		k = choose_linear(&a);
		for (unsigned i = 0; k && i < g_nr_kernels; i++)
			if (g_linear[i] == k)
				return &exl3_cuda_kernel_table[i];
		return NULL;
	case EXL3_OP_MLP:
		return g_mlp;
	case EXL3_OP_MOE:
		return supports_moe<0>(dev, work) ? g_moe : NULL;
	case EXL3_OP_MLA_DECODE:
		return supports_mla(dev, work) ? g_mla : NULL;
	default:
		return NULL;
	}
}

__global__ static void nop_kernel(void)
{
}

static int lower(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot)
{
	switch (slot->work->op) {
	case EXL3_OP_NOP:
		nop_kernel<<<1, 1, 0, p->stream>>>();
		return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
	case EXL3_OP_LINEAR:
		return lower_linear(p, slot);
	case EXL3_OP_MLP:
		return lower_mlp(p, slot);
	case EXL3_OP_MOE:
		return exl3_cuda_lower_moe(p, slot);
	case EXL3_OP_MLA_DECODE:
		return exl3_cuda_lower_mla(p, slot);
	default:
		return -EOPNOTSUPP;
	}
}

/* Deterministic entries that may not meet: one after the other, each as if it were alone. */
static int lower_singly(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot)
{
	const struct exl3_work *work = slot->work;
	struct exl3_cuda_slot one = *slot;
	struct exl3_work part = *work;
	int ret = 0;

	one.work = &part;
	part.nr_rows = 1;
	for (uint32_t i = 0; i < work->nr_rows && !ret; i++) {
		part.rows = &work->rows[i];
		if (work->op == EXL3_OP_MOE)
			part.u.moe.routes = &work->u.moe.routes[i];
		else if (work->op == EXL3_OP_MLA_DECODE)
			part.u.mla.caches = &work->u.mla.caches[i];
		one.skipped_dev = slot->skipped_dev + i;
		ret = lower(p, &one);
	}
	return ret;
}

int exl3_cuda_lower(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot)
{
	const struct exl3_work *work = slot->work;

	if (work->nr_rows > 1 && (work->deterministic || p->deterministic) && !exl3_cuda_one_class(p, work))
		return lower_singly(p, slot);
	return lower(p, slot);
}
