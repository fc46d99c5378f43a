/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv.cu - table of the few-row linear kernels: picks the instance, lays out the work, launches.
 *
 * Shards of one bitrate and codebook go into one launch; others follow in the same stream. Whether the
 * input transform is fused or shared depends on how much of it every block would have to repeat.
 */
#include "kernels/cuda/gemv_inst.cuh"

#include <errno.h>

namespace exl3
{

extern const gemv_instance gemv_rate_2[], gemv_rate_3[], gemv_rate_4[], gemv_rate_5[],
	gemv_rate_6[], gemv_rate_7[], gemv_rate_8[], gemv_rate_10[], gemv_rate_12[], gemv_rate_14[],
	gemv_rate_16[], gemv_candidate_8[];

static const gemv_instance *const gemv_lists[] = {
	gemv_rate_2, gemv_rate_3,  gemv_rate_4,  gemv_rate_5,  gemv_rate_6, gemv_rate_7,
	gemv_rate_8, gemv_rate_10, gemv_rate_12, gemv_rate_14, gemv_rate_16, gemv_candidate_8};

enum gemv_mode {
	MODE_AUTO,
	MODE_FUSED = 1,
	MODE_SHARED = 2,
	MODE_SHARED_BESIDE = 6, /* shared, made by gemv_image_beside() */
};

/* Shared memory of a block: an SM's, by compute capability, less 1 KiB per block for the system. */
static uint32_t gemv_smem_max(int cc)
{
	return (cc >= 120 ? 99 : cc >= 90 ? 227 : cc == 80 || cc == 87 ? 163 : 99) * 1024;
}

/* Shared image: one warp per 8 (block, token) pairs of a shard; blockIdx.y is the shard. */
static __global__ void __launch_bounds__(128) gemv_image_kernel(const __grid_constant__ gemv_args a)
{
	grid_launch_dependents();
	grid_wait();
	if (!(a.ablate & ABLATE_TRANSFORM))
		gemv_transform(a, a.shard[blockIdx.y].suh, a.kt / 8,
			       a.image + (size_t)blockIdx.y * a.kt * (a.image_n ? a.image_n : a.m) * 8,
			       blockIdx.x * 4 + (threadIdx.x >> 5), gridDim.x * 4);
}

enum { BESIDE_WARPS = 2 }; /* of a block: few, so that it fits an SM beside a block of the main kernel */

/*
 * The same, launched so that both kernels can be on an SM at a time: small blocks, and the same division of the SM's
 * memory (shared against L1) as the main kernel's; else neither starts where the other still runs.
 */
static __global__ void __launch_bounds__(BESIDE_WARPS * 32)
	gemv_image_beside(const __grid_constant__ gemv_args a)
{
	gemv_touch(a);
	grid_launch_dependents();
	grid_wait();
	if (!(a.ablate & ABLATE_TRANSFORM))
		gemv_transform(a, a.shard[blockIdx.y].suh, a.kt / 8,
			       a.image + (size_t)blockIdx.y * a.kt * (a.image_n ? a.image_n : a.m) * 8,
			       blockIdx.x * BESIDE_WARPS + (threadIdx.x >> 5), gridDim.x * BESIDE_WARPS);
}

struct gemv_plan {
	const gemv_instance *inst;
	uint32_t blocks;
	uint32_t image_blocks; /* 0: shared */
	uint32_t smem;
};

static const gemv_instance *gemv_find(const struct exl3_matrix *w, uint32_t m, int variant, int cc,
				      bool bytes, bool fused)
{
	const gemv_instance *best = NULL;

	for (const gemv_instance *list : gemv_lists)
		for (const gemv_instance *i = list; i->kernel; i++) {
			if (i->rate2 != w->rate2 || i->codebook != w->codebook ||
			    i->variant != variant || i->shape.tokens < m ||
			    i->fused != fused || (i->form == FORM_BYTES && !bytes) ||
			    (i->form == FORM_WIDE && cc != 90))
				continue;
			if (!best || i->shape.tokens < best->shape.tokens)
				best = i;
		}
	return best;
}

/* The rows that choices are made for. */
static uint32_t gemv_rows(const struct exl3_cuda_linear *a)
{
	return a->class_m ? a->class_m : a->m;
}

static bool gemv_fits(const gemv_instance *i, const struct exl3_cuda_linear *a, gemv_plan *p)
{
	const uint32_t m = gemv_rows(a);
	/* An image for wgmma has all of its tokens, in shared memory too. */
	const uint32_t rows = i->form == FORM_WIDE && i->fused ? i->shape.tokens : m;

	p->smem = gemv_shared(i->shape, rows, p->image_blocks).total;
	return p->smem <= gemv_smem_max(a->device_cc) &&
	       (size_t)p->blocks * m * 512 <= EXL3_CUDA_WS_ZERO;
}

/* How many blocks share the work, and how many 128-blocks of k one of them meets at most. */
static uint32_t gemv_blocks(const gemv_instance *i, uint32_t sms, uint32_t strips, uint32_t kt,
			    uint32_t *span)
{
	const uint32_t tiles = i->k_tiles;
	const uint32_t positions = strips * kt / tiles;
	/* At least two steps per warp, and few blocks on one strip, so that its owner adds quickly. */
	uint32_t blocks = sms;

	if (blocks > positions / (2u * i->kg))
		blocks = positions / (2u * i->kg);
	if (blocks > strips * 24)
		blocks = strips * 24;
	if (!blocks)
		blocks = 1;
	/*
	 * Blocks that end with a strip do one sum instead of two, which is worth about 24 positions;
	 * fewer of them have more to do.
	 */
	const uint32_t parts = blocks / strips;

	if (parts && kt / parts / tiles <= positions / blocks + 24 / tiles)
		blocks = parts * strips;
	*span = (positions + blocks - 1) / blocks * tiles / 8 + 2;
	if (*span > kt / 8)
		*span = kt / 8;
	return blocks;
}

static bool gemv_try(const struct exl3_cuda_linear *a, const struct exl3_matrix *w, uint32_t strips,
		     int variant, bool fused, gemv_plan *ret)
{
	for (int bytes = 1; bytes >= 0; bytes--) {
		const gemv_instance *i = gemv_find(w, gemv_rows(a), variant, a->device_cc,
							bytes, fused);
		uint32_t span;

		if (!i)
			continue;
		const uint32_t blocks =
			gemv_blocks(i, (uint32_t)a->device_sms, strips, w->k / 16, &span);

		*ret = gemv_plan{i, blocks, fused ? span : 0, 0};
		if (gemv_fits(i, a, ret))
			return true;
	}
	return false;
}

/*
 * Shape of one launch over @strips strips. Measured on an H200: every block makes the image that it
 * needs where that is few rows of 128 values, else a kernel before makes it for all.
 */
static int gemv_choose(const struct exl3_cuda_linear *a, const struct exl3_matrix *w,
		       uint32_t strips, int variant, int mode, gemv_plan *ret)
{
	bool ok = false;

	if (variant == VARIANT_AUTO && mode == MODE_AUTO) {
		const uint32_t kb = w->k / 128, per_sm = strips * kb / (uint32_t)a->device_sms + 2;
		const uint32_t m = gemv_rows(a), rows = m * (per_sm < kb ? per_sm : kb);

		if (m > 8)
			ok = gemv_try(a, w, strips, VARIANT_WIDE, false, ret);
		else if (rows <= 48 || (m <= 4 && w->codebook == EXL3_CB_MUL1))
			ok = gemv_try(a, w, strips, VARIANT_W12, true, ret);
		else
			ok = gemv_try(a, w, strips, VARIANT_W16, false, ret);
	}
	if (variant == VARIANT_AUTO)
		variant = VARIANT_W12;
	if (!ok && !(mode & MODE_FUSED))
		ok = gemv_try(a, w, strips, variant, false, ret);
	/* Blocks that make their part of the image choose how by m itself. */
	if (!ok && !(mode & MODE_SHARED) && !a->class_m)
		ok = gemv_try(a, w, strips, variant, true, ret);
	return ok ? 0 : -EOPNOTSUPP;
}

/* Tokens of an image for wgmma are 16 or 32. */
static size_t gemv_image_bytes(const struct exl3_cuda_linear *a)
{
	const uint32_t m = gemv_rows(a);

	return (size_t)a->nr_shards * a->shard[0].k / 16 * (m <= 8 ? 8 : m <= 16 ? 16 : 32) * 32;
}

/* Shards that are alike, from @from on, packed into one launch; @done marks them. */
static uint32_t gemv_gather(const struct exl3_cuda_linear *a, uint32_t from, bool *done,
			    gemv_args *g, uint32_t *strips)
{
	const struct exl3_matrix *first = &a->shard[from];
	uint32_t base_log = 0, base_stored = 0, nr = 0;

	*strips = 0;
	for (uint32_t s = 0; s < a->nr_shards; s++) {
		const struct exl3_matrix *w = &a->shard[s];

		if (s >= from && !done[s] && w->rate2 == first->rate2 &&
		    w->codebook == first->codebook) {
			g->shard[nr++] = gemv_shard{(const uint32_t *)w->trellis,
						    (const __half *)w->suh,
						    (const __half *)w->svh,
						    (const float *)w->bias,
						    *strips,
						    w->n / 16,
						    w->n_log,
						    base_log,
						    base_stored};
			*strips += w->n / 128;
			done[s] = true;
		}
		base_log += w->n_log;
		base_stored += w->n;
	}
	return nr;
}

/* What gemv_lean.cuh takes for granted: one shard, two steps for every warp; wgmma's own image: the former. */
static bool lean_fits(const gemv_args &g, const gemv_plan &p, uint32_t strips, uint32_t k)
{
	const uint32_t positions = strips * (k / 16) / p.inst->k_tiles;

	return g.nr_shards == 1 && positions / p.blocks >= 2u * p.inst->kg;
}

static bool gemv_supports(const struct exl3_cuda_linear *a, int variant, int mode)
{
	bool done[EXL3_CUDA_SHARDS_MAX] = {};
	gemv_args g;
	gemv_plan plan;
	uint32_t strips;

	if (a->device_cc < 80 || a->m < 1 || a->m > gemv_rows(a) || gemv_rows(a) > 32 ||
	    a->nr_shards < 1 || a->nr_shards > EXL3_CUDA_SHARDS_MAX)
		return false;
	for (uint32_t s = 0; s < a->nr_shards; s++) {
		if (done[s])
			continue;
		g.nr_shards = (uint16_t)gemv_gather(a, s, done, &g, &strips);
		if (gemv_choose(a, &a->shard[s], strips, variant, mode, &plan))
			return false;
		if ((variant == VARIANT_LEAN || variant == VARIANT_WIDE_FUSED) &&
		    !lean_fits(g, plan, strips, a->shard[s].k))
			return false;
	}
	return true;
}

static size_t gemv_ws_bytes(const struct exl3_cuda_linear *a)
{
	return EXL3_CUDA_WS_ZERO + gemv_image_bytes(a);
}

static cudaError_t gemv_launch_one(const void *kernel, dim3 grid, uint32_t threads, uint32_t smem,
				   bool programmatic, gemv_args *g, cudaStream_t stream)
{
	cudaLaunchConfig_t cfg = {};
	cudaLaunchAttribute attr = {};
	void *params[] = {g};

	attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr.val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = grid;
	cfg.blockDim = dim3(threads);
	cfg.dynamicSmemBytes = smem;
	cfg.stream = stream;
	cfg.attrs = &attr;
	cfg.numAttrs = programmatic ? 1 : 0;
	return cudaLaunchKernelExC(&cfg, kernel, params);
}

/* Launches the kernel that makes the image. */
static cudaError_t gemv_launch_image(gemv_args *g, bool beside, bool programmatic, cudaStream_t stream)
{
	const uint32_t steps = (g->kt / 8 * g->m + 7) / 8;

	if (!beside)
		return gemv_launch_one((const void *)gemv_image_kernel, dim3((steps + 3) / 4, g->nr_shards),
				       128, 0, programmatic, g, stream);
	const cudaError_t e = cudaFuncSetAttribute((const void *)gemv_image_beside,
						   cudaFuncAttributePreferredSharedMemoryCarveout,
						   cudaSharedmemCarveoutMaxShared);

	return e != cudaSuccess
		       ? e
		       : gemv_launch_one((const void *)gemv_image_beside,
					 dim3((steps + BESIDE_WARPS - 1) / BESIDE_WARPS, g->nr_shards),
					 BESIDE_WARPS * 32, 0, programmatic, g, stream);
}

static int gemv_launch(const struct exl3_cuda_linear *a, int variant, int mode,
		       cudaStream_t stream)
{
	bool done[EXL3_CUDA_SHARDS_MAX] = {};
	bool programmatic = a->programmatic && a->device_cc >= 90;

	for (uint32_t s = 0; s < a->nr_shards; s++) {
		gemv_args g = {};
		gemv_plan p;
		uint32_t strips;
		cudaError_t e;

		if (done[s])
			continue;
		g.nr_shards = gemv_gather(a, s, done, &g, &strips);
		if (gemv_choose(a, &a->shard[s], strips, variant, mode, &p))
			return -EOPNOTSUPP;
		g.r = rows_of(a);
		g.m = a->m;
		const bool wide = p.inst->form == FORM_WIDE;

		g.kt = a->shard[s].k / 16;
		g.image_n = wide ? p.inst->shape.tokens : 0;
		g.m_inverse = (uint32_t)((0x100000000ull + a->m - 1) / a->m);
		const uint32_t positions = strips * g.kt / p.inst->k_tiles;

		g.share = positions / p.blocks;
		g.rest = positions % p.blocks;
		g.blocks_inverse = (uint32_t)((0x100000000ull + p.blocks - 1) / p.blocks);
		g.image_blocks = p.image_blocks;
		g.weights_first = programmatic;
		g.ablate = a->ablate;
		g.slots = (uint32_t *)a->ws;
		g.image = (uint32_t *)((char *)a->ws + EXL3_CUDA_WS_ZERO);
		g.trace = (uint32_t *)((char *)a->ws + a->ws_bytes) - 16 * p.blocks;
		if (a->ws_bytes < EXL3_CUDA_WS_ZERO + (p.image_blocks ? 0 : gemv_image_bytes(a)))
			return -ENOMEM;
		if (!p.image_blocks) {
			e = gemv_launch_image(&g, mode == MODE_SHARED_BESIDE, programmatic, stream);
			if (e != cudaSuccess)
				return -EIO;
			/* Inside the operation, the weights' first loads may overlap the transform. */
			programmatic = a->device_cc >= 90;
		}
		g.kt /= p.inst->k_tiles;
		g.kt_inverse = (uint32_t)((0x100000000ull + g.kt - 1) / g.kt);
		e = cudaFuncSetAttribute((const void *)p.inst->kernel,
					 cudaFuncAttributeMaxDynamicSharedMemorySize, (int)p.smem);
		if (e == cudaSuccess)
			e = gemv_launch_one((const void *)p.inst->kernel, dim3(p.blocks),
					    p.inst->shape.warps * 32u, p.smem, programmatic, &g,
					    stream);
		if (e != cudaSuccess)
			return -EIO;
		programmatic = a->programmatic && a->device_cc >= 90;
	}
	return 0;
}

} /* namespace exl3 */

#define GEMV_KERNEL(NAME, VARIANT, MODE, CANDIDATE)                                             \
	{                                                                                       \
		NAME,                                                                           \
			[](const struct exl3_cuda_linear *a) {                                  \
				return exl3::gemv_supports(a, exl3::VARIANT, exl3::MODE);       \
			},                                                                      \
			exl3::gemv_ws_bytes,                                                    \
			[](const struct exl3_cuda_linear *a, cudaStream_t stream) {             \
				return exl3::gemv_launch(a, exl3::VARIANT, exl3::MODE, stream); \
			},                                                                      \
			CANDIDATE,                                                              \
	}

extern "C" const struct exl3_cuda_linear_kernel exl3_cuda_gemv_kernels[] = {
	GEMV_KERNEL("gemv", VARIANT_AUTO, MODE_AUTO, false),
	GEMV_KERNEL("gemv_w12_fused", VARIANT_W12, MODE_FUSED, false),
	GEMV_KERNEL("gemv_w12_shared", VARIANT_W12, MODE_SHARED, false),
	GEMV_KERNEL("gemv_w16_fused", VARIANT_W16, MODE_FUSED, false),
	GEMV_KERNEL("gemv_w16_shared", VARIANT_W16, MODE_SHARED, false),
	GEMV_KERNEL("gemv_wide", VARIANT_WIDE, MODE_SHARED, false),
	GEMV_KERNEL("gemv_wide_beside", VARIANT_WIDE, MODE_SHARED_BESIDE, true),
	GEMV_KERNEL("gemv_wide_bulk", VARIANT_WIDE_BULK, MODE_SHARED_BESIDE, true),
	GEMV_KERNEL("gemv_wide_fused", VARIANT_WIDE_FUSED, MODE_FUSED, true),
	GEMV_KERNEL("gemv_pairs_fused", VARIANT_PAIRS, MODE_FUSED, true),
	GEMV_KERNEL("gemv_pairs_shared", VARIANT_PAIRS, MODE_SHARED, true),
	GEMV_KERNEL("gemv_lean_fused", VARIANT_LEAN, MODE_FUSED, true),
	GEMV_KERNEL("gemv_lean_shared", VARIANT_LEAN, MODE_SHARED, true),
	GEMV_KERNEL("gemv_lean_beside", VARIANT_LEAN, MODE_SHARED_BESIDE, true),
	{},
};
