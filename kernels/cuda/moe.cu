/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe.cu - the routed block: the device's expert table and the sequence of launches.
 *
 *   align    ids read once, checked, sorted by expert (count and scan for many pairs)
 *   input    per sorted row and projection: x * suh, Hadamard, f16 image and its row scale
 *   gate, up and down, each a grouped product:
 *     few rows per expert     moe_decode.cuh, the activation and down's image in its epilogue
 *     many                    moe_wide.cuh, likewise if there is a gate
 *     gate unlike up          moe_gemm.cuh, and a kernel in the middle
 *     variants, if asked for  moe_early.cuh, before it moe_few.cuh; moe_team.cuh, moe_tall.cuh, their input by moe_input.cuh
 *   combine  per token, slots in order: sum of weight * down, times the routed scale
 *
 * An expert's variant is its bitrate and codebook. Experts of one variant are neighbours in the sort (a
 * class), and each class has its launch; gate and up on one side and down on the other may differ.
 */
#include "kernels/cuda/moe.h"
#include "kernels/cuda/moe_few.cuh"
#include "kernels/cuda/moe_input.cuh"
#include "kernels/cuda/moe_many.h"
#include "kernels/cuda/moe_steps.cuh"

#include <stdlib.h>
#include <string.h>

using namespace exl3;

struct exl3_cuda_moe_plan {
	exl3_matrix *mats; /* device, [nr_experts][gate, up, down] */
	uint32_t *order;   /* device, [lists][nr_experts], see struct moe_route */
	uint32_t nr_experts;
	uint32_t lists;
	uint32_t nr_classes[2];
	uint8_t class_variant[2][CLASSES_MAX]; /* index of g_variants */
	bool pairs; /* every expert's gate and up are of one variant */
	uint32_t hidden, hidden_log, inter, inter_log, out, out_log;
	bool gated;
	uint32_t rates[2]; /* which variants occur, bit i of EXL3_MOE_VARIANTS: gate and up; down */
};

typedef int (*moe_gemm_fn)(const moe_gemm_args &a, int sms, cudaStream_t stream);

static const struct {
	uint8_t rate2, codebook;
	moe_gemm_fn gemm, decode, wide;
} g_variants[] = {
#define X(rate2, cb) {rate2, cb, moe_gemm_##rate2##_##cb, moe_decode_##rate2##_##cb, moe_wide_##rate2##_##cb},
	EXL3_MOE_VARIANTS(X)
#undef X
};
#define NR_VARIANTS (sizeof(g_variants) / sizeof(g_variants[0]))

/* Places in exl3_cuda_moe_variants. */
enum { MOE_DEFAULT, MOE_PASS, MOE_TEAM, MOE_TALL, MOE_TURNS, MOE_EARLY, MOE_EARLY_ONE };

typedef int (*moe_many_fn)(const moe_many_args &a, int sms, cudaStream_t stream);
typedef int (*moe_early_fn)(const moe_early_args &a, int sms, cudaStream_t stream);

static const struct {
	uint8_t rate2, codebook;
	moe_many_fn team, tall;
	moe_early_fn early;
} g_many[] = {
#define X(rate2, cb) {rate2, cb, moe_team_##rate2##_##cb, moe_tall_##rate2##_##cb, moe_early_##rate2##_##cb},
	EXL3_MOE_MANY_VARIANTS(X)
#undef X
};

/* The product of variant MOE_TEAM, MOE_TALL or MOE_TURNS for experts of @v of g_variants, or NULL. */
static moe_many_fn many_of(unsigned variant, unsigned v)
{
	if (variant == MOE_TURNS)
		return g_variants[v].rate2 == 8 && g_variants[v].codebook == EXL3_CB_MCG ? moe_turns_8_1 : NULL;
	for (const auto &m : g_many)
		if (m.rate2 == g_variants[v].rate2 && m.codebook == g_variants[v].codebook)
			return variant == MOE_TEAM ? m.team : m.tall;
	return NULL;
}

static unsigned variant_of(const exl3_matrix *m)
{
	unsigned i = 0;

	while (i < NR_VARIANTS && (g_variants[i].rate2 != m->rate2 || g_variants[i].codebook != m->codebook))
		i++;
	return i;
}

static moe_early_fn early_of(unsigned v)
{
	for (const auto &m : g_many)
		if (m.rate2 == g_variants[v].rate2 && m.codebook == g_variants[v].codebook)
			return m.early;
	return NULL;
}

static bool is_early(const struct exl3_cuda_moe *a)
{
	return a->variant == MOE_EARLY || a->variant == MOE_EARLY_ONE;
}

static bool same_shape(const exl3_matrix *a, const exl3_matrix *b)
{
	return a->k == b->k && a->n == b->n && a->k_log == b->k_log && a->n_log == b->n_log;
}

extern "C" struct exl3_cuda_moe_plan *exl3_cuda_moe_plan_free(struct exl3_cuda_moe_plan *plan)
{
	if (plan) {
		cudaFree(plan->mats);
		cudaFree(plan->order);
		free(plan);
	}
	return NULL;
}

/* Experts in the order of the variant of their up (list 0) or down (list 1) and the classes of that. */
static void sort_list(const exl3_matrix *mats, struct exl3_cuda_moe_plan *plan, uint32_t list, uint32_t *order)
{
	uint32_t n = 0;

	for (unsigned v = 0; v < NR_VARIANTS; v++) {
		const uint32_t begin = n;

		for (uint32_t e = 0; e < plan->nr_experts; e++)
			if (variant_of(&mats[e * 3 + 1 + list]) == v)
				order[n++] = e | 255u << 24;
		if (n == begin)
			continue;
		plan->class_variant[list][plan->nr_classes[list]] = (uint8_t)v;
		order[begin] = (order[begin] & 0xffffff) | plan->nr_classes[list]++ << 24;
	}
}

/* Host side of the plan: shapes, variants, and the tables in host memory. */
static int fill_plan(const struct exl3_expert *experts, uint32_t nr_experts,
		     struct exl3_cuda_moe_plan *plan, exl3_matrix *mats, uint32_t *order,
		     struct exl3_error *err)
{
	const struct exl3_expert *first = &experts[0];

	plan->nr_experts = nr_experts;
	plan->gated = first->gate != NULL;
	plan->hidden = first->up->k;
	plan->hidden_log = first->up->k_log;
	plan->inter = first->up->n;
	plan->inter_log = first->up->n_log;
	plan->out = first->down->n;
	plan->out_log = first->down->n_log;
	plan->pairs = true;
	for (uint32_t e = 0; e < nr_experts; e++) {
		const struct exl3_expert *x = &experts[e];
		const unsigned up = variant_of(x->up), down = variant_of(x->down);
		const unsigned gate = x->gate ? variant_of(x->gate) : up;

		if ((x->gate != NULL) != plan->gated || !same_shape(x->up, first->up) ||
		    (x->gate && !same_shape(x->gate, first->up)) ||
		    !same_shape(x->down, first->down) || x->down->k != x->up->n)
			return exl3_errf(err, -EOPNOTSUPP, "expert %u has another shape than expert 0", e);
		if (gate == NR_VARIANTS || up == NR_VARIANTS || down == NR_VARIANTS)
			return exl3_errf(err, -EOPNOTSUPP, "expert %u: no kernel for its bitrate and codebook", e);
		if (x->gate)
			mats[e * 3] = *x->gate;
		mats[e * 3 + 1] = *x->up;
		mats[e * 3 + 2] = *x->down;
		plan->pairs &= gate == up;
		plan->rates[0] |= 1u << up | 1u << gate;
		plan->rates[1] |= 1u << down;
	}
	sort_list(mats, plan, 0, order);
	sort_list(mats, plan, 1, order + nr_experts);
	plan->lists = memcmp(order, order + nr_experts, nr_experts * sizeof(*order)) ? 2 : 1;
	return 0;
}

static bool to_device(void **to, const void *from, size_t bytes)
{
	return cudaMalloc(to, bytes) == cudaSuccess &&
	       cudaMemcpy(*to, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess;
}

extern "C" int exl3_cuda_moe_plan_new(const struct exl3_expert *experts, uint32_t nr_experts,
				      struct exl3_cuda_moe_plan **ret, struct exl3_error *err)
{
	struct exl3_cuda_moe_plan *plan = (struct exl3_cuda_moe_plan *)calloc(1, sizeof(*plan));
	exl3_matrix *mats = (exl3_matrix *)calloc(nr_experts, 3 * sizeof(*mats));
	uint32_t *order = (uint32_t *)calloc(nr_experts, 2 * sizeof(*order));
	const size_t bytes = (size_t)nr_experts * 3 * sizeof(*mats);
	int code;

	if (!plan || !mats || !order)
		code = exl3_errf(err, -ENOMEM, "experts: out of memory");
	else
		code = fill_plan(experts, nr_experts, plan, mats, order, err);
	if (!code && (!to_device((void **)&plan->mats, mats, bytes) ||
		      !to_device((void **)&plan->order, order, nr_experts * 2 * sizeof(*order))))
		code = exl3_errf(err, -ENOMEM, "experts: no GPU memory for a table of %zu bytes", bytes);
	free(mats);
	free(order);
	if (code)
		exl3_cuda_moe_plan_free(plan);
	else
		*ret = plan;
	return code;
}

extern "C" size_t exl3_cuda_moe_plan_bytes(const struct exl3_cuda_moe_plan *plan)
{
	return (size_t)plan->nr_experts * (3 * sizeof(*plan->mats) + 2 * sizeof(*plan->order));
}

static char *carve(char **at, size_t bytes)
{
	char *p = *at;

	*at += (bytes + 255) / 256 * 256;
	return p;
}

/* How a launch runs: which product, rows of a unit at most, rows that an expert's images are padded to. */
struct moe_way {
	enum { DECODE, WIDE, GEMM, TEAM, TALL } product;
	uint32_t tile, pad;
};

static bool is_many(const moe_way &way)
{
	return way.product == moe_way::TEAM || way.product == moe_way::TALL;
}

/* About what an expert gets, so that its weights are decoded once or a few times. */
static moe_way choose_way(const struct exl3_cuda_moe *a, uint64_t pairs)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;
	const uint64_t mean = (pairs + plan->nr_experts - 1) / plan->nr_experts;

	if (a->variant == MOE_TEAM)
		return {moe_way::TEAM, mean <= 20 ? 32u : 64u, 8};
	if (a->variant == MOE_TALL || a->variant == MOE_TURNS)
		return {moe_way::TALL, TALL_ROWS, 8};
	if (!plan->pairs)
		return {moe_way::GEMM, mean <= 12 ? 16u : 64u, 1};
	if (mean <= 10)
		return {moe_way::DECODE, mean <= 4 ? 8u : 16u, 1};
	if (a->device_cc != 90)
		return {moe_way::GEMM, 64, 1};
	return {moe_way::WIDE, mean <= 40 ? 64u : 96u, 8};
}

/* Bytes that one pair, and the whole chunk, take in the workspace. */
static size_t pair_bytes(const struct exl3_cuda_moe_plan *p, const moe_way &way)
{
	const size_t projs = p->gated ? 2 : 1;
	const size_t image = projs * p->hidden * 2, down = (size_t)p->out * 4;
	const size_t sums = is_many(way) ? 0 : projs * p->inter * 4;

	return (image > down ? image : down) + sums + (size_t)p->inter * 2 +
	       (size_t)p->inter / 128 * 4 + projs * 4 + 4 + 3 * 4 + p->lists * sizeof(moe_unit);
}

static size_t scratch_bytes(const struct exl3_cuda_moe *a, const moe_way &way)
{
	return way.product == moe_way::TALL ? (size_t)a->device_sms * TALL_ROWS * 128 * 4 : 0;
}

static size_t chunk_bytes(const struct exl3_cuda_moe *a, const moe_way &way)
{
	const struct exl3_cuda_moe_plan *p = a->plan;
	const size_t image_row = ((size_t)p->hidden * (p->gated ? 2 : 1) + p->inter) * 2;

	return (size_t)p->nr_experts * (3 * 4 + p->lists * sizeof(moe_unit) + (way.pad - 1) * image_row) +
	       20 * 256 + 2 * 4 * (CLASSES_MAX + 1) + scratch_bytes(a, way);
}

/* Pairs of a chunk at most. */
static size_t chunk_pairs(const struct exl3_cuda_moe *a, const moe_way &way)
{
	const size_t fixed = EXL3_CUDA_WS_ZERO + chunk_bytes(a, way);

	return a->ws_bytes < fixed ? 0 : (a->ws_bytes - fixed) / pair_bytes(a->plan, way);
}

/* A launch for every variant of @set, each of which takes its tasks from the whole list. */
static int run_gemm(uint32_t set, const moe_gemm_args &g, int sms, cudaStream_t stream)
{
	for (unsigned i = 0; i < NR_VARIANTS; i++)
		if (set >> i & 1) {
			int ret = g_variants[i].gemm(g, sms, stream);

			if (ret)
				return ret;
		}
	return 0;
}

/* A launch for every class. */
static int run_classes(const struct exl3_cuda_moe_plan *plan, const moe_way &way, uint32_t list,
		       moe_gemm_args &g, int sms, cudaStream_t stream)
{
	for (g.cls = 0; g.cls < plan->nr_classes[list]; g.cls++) {
		const unsigned v = plan->class_variant[list][g.cls];
		int ret = (way.product == moe_way::WIDE ? g_variants[v].wide : g_variants[v].decode)(g, sms, stream);

		if (ret)
			return ret;
	}
	return 0;
}

/* The same for the products of a variant. */
static int run_early(const struct exl3_cuda_moe *a, uint32_t list, moe_gemm_args &g, cudaStream_t stream)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;

	for (g.cls = 0; g.cls < plan->nr_classes[list]; g.cls++) {
		const moe_early_args e = {g, a->variant == MOE_EARLY_ONE};
		int ret = early_of(plan->class_variant[list][g.cls])(e, a->device_sms, stream);

		if (ret)
			return ret;
	}
	return 0;
}

static int run_many(const struct exl3_cuda_moe *a, uint32_t list, moe_gemm_args &g, float *scratch,
		    cudaStream_t stream)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;

	for (g.cls = 0; g.cls < plan->nr_classes[list]; g.cls++) {
		const moe_many_args m = {g, scratch};
		int ret = many_of(a->variant, plan->class_variant[list][g.cls])(m, a->device_sms, stream);

		if (ret)
			return ret;
	}
	return 0;
}

static int align(const moe_entries &en, const moe_route &r, cudaStream_t stream)
{
	const uint32_t blocks = (r.nr_pairs + 255) / 256;

	if (r.nr_pairs <= 1024) {
		align_kernel<<<1, r.nr_pairs <= 256 && r.nr_experts <= 256 ? 256 : 1024, 0, stream>>>(en, r);
		return 0;
	}
	if (cudaMemsetAsync(r.count, 0, r.nr_experts * 4ull, stream) != cudaSuccess)
		return -EIO;
	count_kernel<<<blocks, 256, 0, stream>>>(en, r);
	scan_kernel<<<1, 1024, 0, stream>>>(r);
	return 0;
}

template <class C>
static int start_input(const struct exl3_cuda_moe *a, const moe_entries &en, const moe_route &r, uint32_t first_proj,
		       uint32_t projs, char *image, size_t image_bytes, int layout, float *scale, float *top,
		       cudaStream_t stream)
{
	return moe_start(input_kernel<C>, a->device_cc >= 90, dim3((r.nr_pairs + C::ROWS - 1) / C::ROWS, projs),
			 ROW_THREADS, 0, stream, en, r, first_proj, a->plan->hidden, a->plan->hidden_log,
			 r.nr_pairs, image, image_bytes, layout, scale, top);
}

/* Variants of decode, few pairs of one class: moe_few.cuh. */
static bool is_few(const struct exl3_cuda_moe *a, uint32_t pairs)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;

	return is_early(a) && pairs <= FEW_PAIRS && plan->nr_experts <= FEW_EXPERTS && plan->lists == 1 &&
	       plan->nr_classes[0] == 1;
}

static int align_few(const moe_entries &en, const moe_route &r, uint32_t first_proj,
		     moe_few_pair *records, cudaStream_t stream)
{
	const uint32_t most = r.nr_pairs > r.nr_experts ? r.nr_pairs : r.nr_experts;

	align_few_kernel<<<1, (most + 127) / 128 * 128, 0, stream>>>(en, r, first_proj, records);
	return 0;
}

static int input_few(const struct exl3_cuda_moe *a, const moe_entries &en, const moe_route &r, uint32_t projs,
		     const moe_few_pair *records, char *image, size_t image_bytes, float *scale, float *top,
		     cudaStream_t stream)
{
	const uint32_t k = a->plan->hidden;
	auto *kernel = k <= 2048 ? input_few_kernel<2> : k <= 4096 ? input_few_kernel<4> : input_few_kernel<12>;

	return moe_start(kernel, true, dim3(r.nr_pairs, projs), ROW_THREADS, 0, stream, en, r, records, k,
			 a->plan->hidden_log, r.nr_pairs, image, image_bytes, scale, top);
}

/* One chunk of whole tokens. */
static int run_chunk(const struct exl3_cuda_moe *a, const moe_entries &en, uint32_t first_token,
		     uint32_t tokens, uint32_t first_pair, uint32_t pairs, const moe_way &way, cudaStream_t stream)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;
	const uint32_t projs = plan->gated ? 2 : 1, first_proj = plan->gated ? 0 : 1;
	const uint32_t tile = way.tile;
	const uint32_t image_rows = pairs + (way.pad - 1) * (pairs < plan->nr_experts ? pairs : plan->nr_experts);
	const size_t image_bytes = (size_t)projs * image_rows * plan->hidden * 2;
	const size_t down_bytes = (size_t)pairs * plan->out * 4;
	const uint32_t units_max = pairs < plan->nr_experts ? pairs : plan->nr_experts + pairs / tile;
	const bool decode = way.product == moe_way::DECODE, gemm = way.product == moe_way::GEMM;
	const bool early = a->device_cc >= 90, fused = decode || (!gemm && plan->gated), many = is_many(way);
	const int layout = decode ? MOE_FRAGMENT : gemm ? MOE_ROWS : MOE_TILES;
	char *at = (char *)a->ws + EXL3_CUDA_WS_ZERO;
	moe_route r = {};
	moe_gemm_args g = {};
	int ret;

	r.mats = plan->mats;
	r.order = plan->order;
	r.lists = plan->lists;
	r.nr_experts = plan->nr_experts;
	r.nr_classes[0] = plan->nr_classes[0];
	r.nr_classes[1] = plan->nr_classes[1];
	r.nr_pairs = pairs;
	r.first_token = first_token;
	r.first_pair = first_pair;
	r.tile = tile;
	r.units_max = units_max;
	r.count = (uint32_t *)carve(&at, plan->nr_experts * 4ull);
	r.offset = (uint32_t *)carve(&at, plan->nr_experts * 8ull);
	r.expert = (uint32_t *)carve(&at, pairs * 4ull);
	r.rank = (uint32_t *)carve(&at, pairs * 4ull);
	r.weight = (float *)carve(&at, pairs * 4ull);
	r.units = (moe_unit *)carve(&at, (size_t)plan->lists * units_max * sizeof(moe_unit));
	r.class_units = (uint32_t *)carve(&at, 2 * 4 * (CLASSES_MAX + 1));
	float *scale = (float *)carve(&at, (size_t)projs * pairs * 4);
	float *scale_down = (float *)carve(&at, pairs * 4ull);
	float *block_scale = (float *)carve(&at, (size_t)pairs * (plan->inter / 128) * 4);
	float *gu = many ? NULL : (float *)carve(&at, (size_t)projs * pairs * plan->inter * 4);
	float *scratch = (float *)carve(&at, scratch_bytes(a, way));
	char *middle = carve(&at, (size_t)image_rows * plan->inter * 2);
	/* The input images are dead when down's outputs are written. */
	char *shared = carve(&at, image_bytes > down_bytes ? image_bytes : down_bytes);

	/* Decode has no use for gu: the pairs' records. */
	const bool few = is_few(a, pairs);
	moe_few_pair *records = (moe_few_pair *)gu;

	ret = few ? align_few(en, r, first_proj, records, stream) : align(en, r, stream);
	if (ret || a->steps == 1)
		return ret;
	/* Few rows: a block each. Many: short chains of latencies, many rows at a time. */
	auto *input = start_input<row_cfg<8, 12>>;

	if (plan->hidden <= 2048)
		input = pairs < 1024 ? start_input<row_cfg<8, 2>> : start_input<row_cfg<2, 8>>;
	else if (plan->hidden <= 4096)
		input = pairs < 1024 ? start_input<row_cfg<8, 4>> : start_input<row_cfg<2, 16>>;
	if (few)
		ret = input_few(a, en, r, projs, records, shared, image_bytes / projs, scale, scale_down, stream);
	else if (a->variant && !is_early(a))
		ret = moe_start(projs == 2 ? input_tiles_kernel<2> : input_tiles_kernel<1>, early, dim3((pairs + 7) / 8),
				ROW_THREADS, 0, stream, en, r, first_proj, plan->hidden, plan->hidden_log, pairs, shared,
				image_bytes / projs, scale, scale_down);
	else
		ret = input(a, en, r, first_proj, projs, shared, image_bytes / projs, layout, scale, scale_down, stream);
	if (ret || a->steps == 2)
		return ret;
	g.mats = plan->mats;
	g.units = r.units;
	g.class_units = r.class_units;
	g.image = shared;
	g.image_bytes = image_bytes / projs;
	g.row_scale = scale;
	g.out = fused ? NULL : gu;
	g.image_rows = pairs;
	g.k = plan->hidden;
	g.n = plan->inter;
	g.n_log = plan->inter_log;
	g.first_proj = first_proj;
	g.nr_proj = projs;
	g.tasks_max = units_max * (plan->inter / 128);
	g.tile = tile;
	g.cls = plan->nr_classes[0];
	g.programmatic = early;
	g.whole = a->deterministic;
	g.act = a->act;
	g.limit = a->limit;
	g.next_image = middle;
	g.next_scale = block_scale;
	g.next_top = (uint32_t *)scale_down;
	g.slots = (uint32_t *)a->ws;
	if (gemm)
		ret = run_gemm(plan->rates[0], g, a->device_sms, stream);
	else if (many)
		ret = run_many(a, 0, g, scratch, stream);
	else if (is_early(a))
		ret = run_early(a, 0, g, stream);
	else
		ret = run_classes(plan, way, 0, g, a->device_sms, stream);
	if (!ret && !fused)
		ret = moe_start(middle_kernel, early, dim3(pairs), ROW_THREADS, 0, stream, r, gu,
				plan->gated, plan->inter, plan->inter_log, pairs, a->act, a->limit, middle,
				layout, scale_down);
	if (!ret && fused && !decode)
		ret = moe_start(level_kernel, early, dim3((pairs + 7) / 8), ROW_THREADS, 0, stream, r, plan->inter,
				middle, block_scale, scale_down);
	if (ret || a->steps == 3)
		return ret;
	g.image = middle;
	g.row_scale = scale_down;
	g.out = (float *)shared;
	g.k = plan->inter;
	g.n = plan->out;
	g.first_proj = 2;
	g.nr_proj = 1;
	g.tasks_max = units_max * (plan->out / 128);
	if (gemm) {
		g.cls = plan->nr_classes[0];
		ret = run_gemm(plan->rates[1], g, a->device_sms, stream);
	} else {
		g.units = r.units + (size_t)(plan->lists - 1) * units_max;
		g.class_units = r.class_units + (plan->lists - 1) * (CLASSES_MAX + 1);
		g.block_scale = decode ? block_scale : NULL;
		ret = many	  ? run_many(a, 1, g, scratch, stream) :
		      is_early(a) ? run_early(a, 1, g, stream) :
				    run_classes(plan, way, 1, g, a->device_sms, stream);
	}
	if (ret || a->steps == 4)
		return ret;
	return moe_start(combine_kernel, early, dim3((plan->out + 511) / 512, tokens), 128, 0, stream, en, r,
			 (const float *)shared, plan->out, plan->out_log, a->routed_scale);
}

static uint64_t own_pairs(const struct exl3_cuda_moe *a)
{
	return (uint64_t)a->entries[0].m * a->entries[0].topk;
}

extern "C" uint32_t exl3_cuda_moe_class(const struct exl3_cuda_moe *a)
{
	const moe_way way = choose_way(a, own_pairs(a));

	/* Other products split sums by what there is to do. What does not fit may be cut otherwise when alone. */
	if (way.product != moe_way::DECODE || chunk_pairs(a, way) < own_pairs(a))
		return 0;
	return way.tile;
}

static bool supports_default(const struct exl3_cuda_moe *a)
{
	(void)a;
	return true;
}

static uint64_t all_pairs(const struct exl3_cuda_moe *a)
{
	uint64_t pairs = 0;

	for (uint32_t i = 0; i < a->nr_entries; i++)
		pairs += (uint64_t)a->entries[i].m * a->entries[i].topk;
	return pairs;
}

/* The default's product, where it reads tiles: only the input is another. */
static bool supports_pass(const struct exl3_cuda_moe *a)
{
	struct exl3_cuda_moe plain = *a;
	const uint64_t pairs = all_pairs(a);

	plain.variant = MOE_DEFAULT;
	const moe_way way = choose_way(&plain, pairs);

	return way.product == moe_way::WIDE && !a->deterministic && chunk_pairs(&plain, way) >= pairs;
}

/* A mean of more than @more rows an expert, all of a bitrate and codebook that the products are compiled for. */
static bool supports_many(const struct exl3_cuda_moe *a, unsigned variant, uint64_t more)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;

	if (a->device_cc != 90 || a->deterministic || !plan->pairs || !plan->gated ||
	    all_pairs(a) <= more * plan->nr_experts)
		return false;
	for (int list = 0; list < 2; list++)
		for (uint32_t c = 0; c < plan->nr_classes[list]; c++)
			if (!many_of(variant, plan->class_variant[list][c]))
				return false;
	return true;
}

static bool supports_team(const struct exl3_cuda_moe *a)
{
	return supports_many(a, MOE_TEAM, 2);
}

static bool supports_tall(const struct exl3_cuda_moe *a)
{
	return supports_many(a, MOE_TALL, 4);
}

static bool supports_turns(const struct exl3_cuda_moe *a)
{
	return supports_many(a, MOE_TURNS, 4);
}

/* The default's way is decode for all of it. */
static bool supports_early(const struct exl3_cuda_moe *a)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;
	struct exl3_cuda_moe plain = *a;
	const uint64_t pairs = all_pairs(a);

	plain.variant = MOE_DEFAULT;
	const moe_way way = choose_way(&plain, pairs);

	if (a->device_cc < 90 || a->deterministic || way.product != moe_way::DECODE || chunk_pairs(&plain, way) < pairs)
		return false;
	for (int list = 0; list < 2; list++)
		for (uint32_t c = 0; c < plan->nr_classes[list]; c++)
			if (!early_of(plan->class_variant[list][c]))
				return false;
	return true;
}

extern "C" const struct exl3_cuda_moe_variant exl3_cuda_moe_variants[] = {
	{"moe", supports_default},
	{"moe_pass", supports_pass},
	{"moe_team", supports_team},
	{"moe_tall", supports_tall},
	{"moe_tall_turns", supports_turns},
	{"moe_early", supports_early},
	{"moe_early_one", supports_early},
	{NULL, NULL},
};
static_assert(sizeof(exl3_cuda_moe_variants) / sizeof(exl3_cuda_moe_variants[0]) == EXL3_CUDA_MOE_VARIANTS_NR + 1,
	      "the number of variants");

extern "C" int exl3_cuda_moe_launch(const struct exl3_cuda_moe *a, cudaStream_t stream)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;
	uint32_t entry = 0, in_entry = 0, token = 0, pair = 0;
	uint64_t tokens = 0, pairs = 0;
	moe_entries en;
	size_t fit;

	if (a->nr_entries > EXL3_CUDA_MOE_ENTRIES_MAX || plan->hidden > ROW_MAX || plan->inter > ROW_MAX)
		return -EOPNOTSUPP;
	if (a->variant >= EXL3_CUDA_MOE_VARIANTS_NR || !exl3_cuda_moe_variants[a->variant].supports(a))
		return -EOPNOTSUPP;
	memset(&en, 0, sizeof(en));
	en.nr = a->nr_entries;
	for (uint32_t i = 0; i < a->nr_entries; i++) {
		en.e[i] = a->entries[i];
		en.e[i].first_token = (uint32_t)tokens;
		en.e[i].first_pair = (uint32_t)pairs;
		tokens += a->entries[i].m;
		pairs += (uint64_t)a->entries[i].m * a->entries[i].topk;
	}
	if (tokens > 65535 || pairs > 0x7fffffff)
		return -EOPNOTSUPP;
	const uint64_t own = a->deterministic ? own_pairs(a) : pairs;
	moe_way way = choose_way(a, own);

	fit = chunk_pairs(a, way);
	if (fit < own) {
		way = choose_way(a, fit > EXL3_TOPK_MAX ? fit : EXL3_TOPK_MAX);
		fit = chunk_pairs(a, way);
	}
	if (fit < EXL3_TOPK_MAX) {
		way = choose_way(a, 1); /* takes the least */
		fit = chunk_pairs(a, way);
	}
	if (fit < EXL3_TOPK_MAX)
		return -ENOMEM;

	while (token < tokens) {
		uint32_t t = 0, p = 0;

		while (entry < en.nr) {
			const uint32_t left = en.e[entry].m - in_entry;
			const size_t room = (fit - p) / en.e[entry].topk;
			const uint32_t take = left < room ? left : (uint32_t)room;

			t += take;
			p += take * en.e[entry].topk;
			in_entry += take;
			if (in_entry < en.e[entry].m)
				break;
			entry++;
			in_entry = 0;
		}
		int ret = run_chunk(a, en, token, t, pair, p, way, stream);

		if (ret)
			return ret;
		token += t;
		pair += p;
	}
	return 0;
}
