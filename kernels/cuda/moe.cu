/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe.cu - the routed block: the device's expert table and the sequence of launches.
 *
 *   align    ids read once, checked, sorted by expert (count, scan, place for many pairs)
 *   input    per sorted row and projection: x * suh, Hadamard, f16 image and its row scale
 *   gemm     gate and up                                       (moe_gemm.cuh)
 *   middle   act(g, u) * suh_down, Hadamard, f16 image
 *   gemm     down
 *   combine  per token, slots in order: sum of weight * down, times the routed scale
 */
#include "kernels/cuda/moe.h"
#include "kernels/cuda/moe_steps.cuh"

#include <stdlib.h>
#include <string.h>

using namespace exl3;

/* Rows of the transforms lie in a block's default shared memory. */
#define ROW_MAX 11776u

struct exl3_cuda_moe_plan {
	exl3_matrix *mats; /* device, [nr_experts][gate, up, down] */
	uint32_t nr_experts;
	uint32_t hidden, hidden_log, inter, inter_log, out, out_log;
	bool gated;
	uint32_t rates[2]; /* which variants occur, bit i of EXL3_MOE_VARIANTS: gate and up; down */
};

typedef int (*moe_gemm_fn)(const moe_gemm_args &a, int tn, int sms, cudaStream_t stream);

static const struct {
	uint8_t rate2, codebook;
	moe_gemm_fn run;
} g_variants[] = {
#define X(rate2, cb) {rate2, cb, moe_gemm_##rate2##_##cb},
	EXL3_MOE_VARIANTS(X)
#undef X
};
#define NR_VARIANTS (sizeof(g_variants) / sizeof(g_variants[0]))

static uint32_t variant_bit(const exl3_matrix *m)
{
	for (unsigned i = 0; i < NR_VARIANTS; i++)
		if (g_variants[i].rate2 == m->rate2 && g_variants[i].codebook == m->codebook)
			return 1u << i;
	return 0;
}

static bool same_shape(const exl3_matrix *a, const exl3_matrix *b)
{
	return a->k == b->k && a->n == b->n && a->k_log == b->k_log && a->n_log == b->n_log;
}

extern "C" struct exl3_cuda_moe_plan *exl3_cuda_moe_plan_free(struct exl3_cuda_moe_plan *plan)
{
	if (plan) {
		cudaFree(plan->mats);
		free(plan);
	}
	return NULL;
}

/* Host side of the plan: shapes, variants, and the table in host memory. */
static int fill_plan(const struct exl3_expert *experts, uint32_t nr_experts,
		     struct exl3_cuda_moe_plan *plan, exl3_matrix *mats, struct exl3_error *err)
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
	for (uint32_t e = 0; e < nr_experts; e++) {
		const struct exl3_expert *x = &experts[e];

		if ((x->gate != NULL) != plan->gated || !same_shape(x->up, first->up) ||
		    (x->gate && !same_shape(x->gate, first->up)) ||
		    !same_shape(x->down, first->down) || x->down->k != x->up->n)
			return exl3_errf(err, -EOPNOTSUPP, "expert %u has another shape than expert 0", e);
		if (x->gate)
			mats[e * 3] = *x->gate;
		mats[e * 3 + 1] = *x->up;
		mats[e * 3 + 2] = *x->down;
		plan->rates[0] |= variant_bit(x->up) | (x->gate ? variant_bit(x->gate) : 0);
		plan->rates[1] |= variant_bit(x->down);
	}
	return 0;
}

extern "C" int exl3_cuda_moe_plan_new(const struct exl3_expert *experts, uint32_t nr_experts,
				      struct exl3_cuda_moe_plan **ret, struct exl3_error *err)
{
	struct exl3_cuda_moe_plan *plan = (struct exl3_cuda_moe_plan *)calloc(1, sizeof(*plan));
	exl3_matrix *mats = (exl3_matrix *)calloc(nr_experts, 3 * sizeof(*mats));
	const size_t bytes = (size_t)nr_experts * 3 * sizeof(*mats);
	int code;

	if (!plan || !mats)
		code = exl3_errf(err, -ENOMEM, "experts: out of memory");
	else
		code = fill_plan(experts, nr_experts, plan, mats, err);
	if (!code && (cudaMalloc((void **)&plan->mats, bytes) != cudaSuccess ||
		      cudaMemcpy(plan->mats, mats, bytes, cudaMemcpyHostToDevice) != cudaSuccess))
		code = exl3_errf(err, -ENOMEM, "experts: no GPU memory for a table of %zu bytes", bytes);
	free(mats);
	if (code)
		exl3_cuda_moe_plan_free(plan);
	else
		*ret = plan;
	return code;
}

static char *carve(char **at, size_t bytes)
{
	char *p = *at;

	*at += (bytes + 255) / 256 * 256;
	return p;
}

/* Bytes that one pair, and the whole chunk, take in the workspace. */
static size_t pair_bytes(const struct exl3_cuda_moe_plan *p)
{
	const size_t projs = p->gated ? 2 : 1;
	const size_t image = projs * p->hidden * 2, down = (size_t)p->out * 4;

	return (image > down ? image : down) + projs * p->inter * 4 + (size_t)p->inter * 2 +
	       projs * 4 + 4 + 5 * 4 + sizeof(moe_unit);
}

static size_t chunk_bytes(const struct exl3_cuda_moe_plan *p)
{
	return (size_t)p->nr_experts * (8 + sizeof(moe_unit)) + 16 * 256;
}

/* Rows of a unit: about what an expert gets, so that its weights are decoded once or a few times. */
static int choose_tn(uint32_t pairs, uint32_t nr_experts)
{
	const uint32_t mean = (pairs + nr_experts - 1) / nr_experts;

	return mean <= 4 ? 8 : mean <= 10 ? 16 : mean <= 24 ? 32 : 64;
}

static int run_variants(uint32_t set, const moe_gemm_args &g, int tn, int sms, cudaStream_t stream)
{
	for (unsigned i = 0; i < NR_VARIANTS; i++)
		if (set >> i & 1) {
			int ret = g_variants[i].run(g, tn, sms, stream);

			if (ret)
				return ret;
		}
	return 0;
}

static int align(const moe_entries &en, const moe_route &r, int tn, cudaStream_t stream)
{
	const uint32_t blocks = (r.nr_pairs + 255) / 256;

	if (r.nr_pairs <= 8192) {
		align_kernel<<<1, 1024, 0, stream>>>(en, r, tn);
		return 0;
	}
	if (cudaMemsetAsync(r.count, 0, r.nr_experts * 4ull, stream) != cudaSuccess)
		return -EIO;
	count_kernel<<<blocks, 256, 0, stream>>>(en, r);
	scan_kernel<<<1, 1024, 0, stream>>>(r, tn);
	place_kernel<<<blocks, 256, 0, stream>>>(r);
	return 0;
}

/* One chunk of whole tokens. */
static int run_chunk(const struct exl3_cuda_moe *a, const moe_entries &en, uint32_t first_token,
		     uint32_t tokens, uint32_t first_pair, uint32_t pairs, int tn, cudaStream_t stream)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;
	const uint32_t projs = plan->gated ? 2 : 1, first_proj = plan->gated ? 0 : 1;
	const size_t image_bytes = (size_t)projs * pairs * plan->hidden * 2;
	const size_t down_bytes = (size_t)pairs * plan->out * 4;
	const uint32_t units_max =
		pairs < plan->nr_experts ? pairs : plan->nr_experts + pairs / (uint32_t)tn;
	char *at = (char *)a->ws + EXL3_CUDA_WS_ZERO;
	moe_route r = {};
	moe_gemm_args g = {};
	int ret;

	r.nr_experts = plan->nr_experts;
	r.nr_pairs = pairs;
	r.first_token = first_token;
	r.first_pair = first_pair;
	r.count = (uint32_t *)carve(&at, plan->nr_experts * 4ull);
	r.offset = (uint32_t *)carve(&at, plan->nr_experts * 4ull);
	r.expert = (uint32_t *)carve(&at, pairs * 4ull);
	r.rank = (uint32_t *)carve(&at, pairs * 4ull);
	r.weight = (float *)carve(&at, pairs * 4ull);
	r.sorted = (uint32_t *)carve(&at, pairs * 4ull);
	r.row_expert = (uint32_t *)carve(&at, pairs * 4ull);
	r.units = (moe_unit *)carve(&at, (pairs + (size_t)plan->nr_experts) * sizeof(moe_unit));
	r.nr_units = (uint32_t *)carve(&at, 8);
	float *scale = (float *)carve(&at, (size_t)projs * pairs * 4);
	float *scale_down = (float *)carve(&at, pairs * 4ull);
	float *gu = (float *)carve(&at, (size_t)projs * pairs * plan->inter * 4);
	__half *middle = (__half *)carve(&at, (size_t)pairs * plan->inter * 2);
	/* The input images are dead when down's outputs are written. */
	char *shared = carve(&at, image_bytes > down_bytes ? image_bytes : down_bytes);

	ret = align(en, r, tn, stream);
	if (ret)
		return ret;
	input_kernel<<<dim3(pairs, projs), 256, plan->hidden * 4, stream>>>(
		en, r, plan->mats, first_proj, plan->hidden, plan->hidden_log, pairs,
		(__half *)shared, scale);
	g.mats = plan->mats;
	g.units = r.units;
	g.nr_units = r.nr_units;
	g.image = (const __half *)shared;
	g.row_scale = scale;
	g.out = gu;
	g.image_rows = pairs;
	g.n = plan->inter;
	g.first_proj = first_proj;
	g.nr_proj = projs;
	g.tasks_max = units_max * projs * (plan->inter / 128);
	ret = run_variants(plan->rates[0], g, tn, a->device_sms, stream);
	if (ret)
		return ret;
	middle_kernel<<<pairs, 256, plan->inter * 4, stream>>>(r, plan->mats, gu, plan->gated,
							       plan->inter, plan->inter_log, pairs,
							       a->act, a->limit, middle, scale_down);
	g.image = middle;
	g.row_scale = scale_down;
	g.out = (float *)shared;
	g.n = plan->out;
	g.first_proj = 2;
	g.nr_proj = 1;
	g.tasks_max = units_max * (plan->out / 128);
	ret = run_variants(plan->rates[1], g, tn, a->device_sms, stream);
	if (ret)
		return ret;
	combine_kernel<<<dim3((plan->out + 255) / 256, tokens), 256, 0, stream>>>(
		en, r, (const float *)shared, plan->out, plan->out_log, a->routed_scale);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

extern "C" int exl3_cuda_moe_launch(const struct exl3_cuda_moe *a, cudaStream_t stream)
{
	const struct exl3_cuda_moe_plan *plan = a->plan;
	uint32_t entry = 0, in_entry = 0, token = 0, pair = 0;
	uint64_t tokens = 0, pairs = 0;
	moe_entries en;
	size_t fit;

	if (a->nr_entries > EXL3_CUDA_MOE_ENTRIES_MAX || plan->hidden > ROW_MAX || plan->inter > ROW_MAX)
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
	if (a->ws_bytes < EXL3_CUDA_WS_ZERO + chunk_bytes(plan) + EXL3_TOPK_MAX * pair_bytes(plan))
		return -ENOMEM;
	fit = (a->ws_bytes - EXL3_CUDA_WS_ZERO - chunk_bytes(plan)) / pair_bytes(plan);
	const int tn = choose_tn((uint32_t)(pairs < fit ? pairs : fit), plan->nr_experts);

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
		int ret = run_chunk(a, en, token, t, pair, p, tn, stream);

		if (ret)
			return ret;
		token += t;
		pair += p;
	}
	return 0;
}
