/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.cu - host side of the kernels for many rows: workspace, schedule, variants by bitrate, table.
 *
 * Workspace: arrival counters (zero before and after every launch) | row scales | X images | partial sums.
 * Shards of one bitrate and codebook are one launch; a mixed linear is several, one after the other.
 */
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemm_f16.h"
#include "kernels/cuda/gemm_portable.h"
#include "kernels/cuda/gemm_variants.h"

namespace exl3
{

/* Fewer k than this per block is not worth the reduction. */
constexpr uint32_t K_PER_BLOCK = 256;

static size_t round_up(size_t v)
{
	return (v + 1023) & ~(size_t)1023;
}

void gemm_make_plan(const struct exl3_cuda_linear *a, uint32_t tn, uint32_t blocks, gemm_plan &p)
{
	p = {};
	p.tn = tn;
	p.m_tiles = (a->m + tn - 1) / tn;
	p.blocks = blocks;
	for (uint32_t i = 0; i < a->nr_shards; i++) {
		uint32_t j = 0;

		while (j < p.nr_images && p.suh[j] != a->shard[i].suh)
			j++;
		if (j == p.nr_images)
			p.suh[p.nr_images++] = a->shard[i].suh;
		p.image_of[i] = j;
	}
	const size_t rows = (size_t)p.m_tiles * tn;

	p.image_bytes = rows * a->shard[0].k * 2;
	p.scale_offset = EXL3_CUDA_WS_ZERO;
	p.image_offset = p.scale_offset + round_up(p.nr_images * rows * sizeof(float));
	p.partial_offset = p.image_offset + round_up(p.nr_images * p.image_bytes);
	p.bytes = p.partial_offset + (size_t)2 * blocks * GEMM_N * tn * sizeof(float);
}

int gemm_start(const struct exl3_cuda_linear *a, const gemm_plan &p, cudaStream_t stream)
{
	gemm_input in = {};

	if (a->ws_bytes < p.bytes)
		return -ENOMEM;
	for (uint32_t i = 0; i < p.nr_images; i++)
		in.suh[i] = (const __half *)p.suh[i];
	in.nr_images = p.nr_images;
	in.m = a->m;
	in.m_pad = p.m_tiles * p.tn;
	in.k = a->shard[0].k;
	in.k_log = a->shard[0].k_log;
	in.tn = p.tn;
	in.table = a->x_private ? nullptr : a->table;
	in.x = a->x;
	in.x_stride = a->x_stride;
	in.x_dtype = a->x_dtype;
	in.stored = a->stored || a->x_private;
	in.programmatic = a->programmatic && a->device_cc >= 90;
	in.image = (uint8_t *)a->ws + p.image_offset;
	in.image_bytes = p.image_bytes;
	in.row_scale = (float *)((uint8_t *)a->ws + p.scale_offset);
	return gemm_input_launch(in, stream);
}

/* Whole tiles per block first; what is left, up to two tiles per block, is shared by k steps. */
static void schedule(gemm_args &g, uint32_t blocks, uint32_t step)
{
	const uint32_t tiles = g.strips * g.m_tiles;

	g.k_steps = (g.k + step - 1) / step;
	g.blocks = blocks;
	g.rounds = tiles % blocks == 0   ? tiles / blocks
		   : tiles >= 2 * blocks ? tiles / blocks - 1
					 : 0;

	const uint32_t units = (tiles - g.rounds * blocks) * g.k_steps;

	if (!g.rounds) {
		const uint32_t useful = (uint32_t)((uint64_t)units * step / K_PER_BLOCK);

		g.blocks = useful < 1 ? 1 : useful < blocks ? useful : blocks;
		g.blocks = g.blocks < units ? g.blocks : units;
	}
	g.share = units / g.blocks;
	g.longer = units % g.blocks;
}

bool gemm_next_group(const struct exl3_cuda_linear *a, const gemm_plan &p, uint32_t step,
		     uint32_t &done, gemm_args &g, uint32_t &rate2, uint32_t &codebook)
{
	uint32_t col_log = 0, col_stored = 0;
	bool found = false;
	uint8_t *ws = (uint8_t *)a->ws;

	g = {};
	for (uint32_t i = 0; i < a->nr_shards; i++) {
		const struct exl3_matrix &m = a->shard[i];

		if (!(done >> i & 1) && !found) {
			found = true;
			rate2 = m.rate2;
			codebook = m.codebook;
		}
		if (!(done >> i & 1) && m.rate2 == rate2 && m.codebook == codebook) {
			gemm_shard &s = g.shard[g.nr_shards++];

			s.trellis = (const uint32_t *)m.trellis;
			s.svh = (const __half *)m.svh;
			s.bias = (const float *)m.bias;
			s.tiles_n = m.n / EXL3_TILE;
			s.strip0 = g.strips;
			s.image = p.image_of[i];
			s.n_log = m.n_log;
			s.n = m.n;
			s.col_log = col_log;
			s.col_stored = col_stored;
			g.strips += m.n / GEMM_N;
			done |= 1u << i;
		}
		col_log += m.n_log;
		col_stored += m.n;
	}
	if (!found)
		return false;
	g.m = a->m;
	g.k = a->shard[0].k;
	g.m_tiles = p.m_tiles;
	g.image = ws + p.image_offset;
	g.image_bytes = p.image_bytes;
	g.row_scale = (const float *)(ws + p.scale_offset);
	g.table = a->y_private ? nullptr : a->table;
	g.y = a->y;
	g.y_stride = a->y_stride;
	g.y_dtype = a->y_dtype;
	g.stored = a->stored || a->y_private;
	g.partial = (float *)(ws + p.partial_offset);
	g.arrived = (uint32_t *)ws;
	schedule(g, p.blocks, step);
	return true;
}

/* What the host must know of a variant. */
struct variant {
	uint32_t tn, wk, blocks;
};
#define VARIANT(name, tn, wk, blocks, ...) {tn, wk, blocks},
static const variant variants[EXL3_GEMM_NR] = {EXL3_GEMM_VARIANTS(VARIANT)
						       EXL3_GEMM_CANDIDATES(VARIANT)};

#define IS_CANDIDATE(name, ...) || variant == EXL3_GEMM_##name
static bool is_candidate(int variant)
{
	return false EXL3_GEMM_CANDIDATES(IS_CANDIDATE);
}

static exl3_gemm_entry entry_of(uint32_t rate2, uint32_t codebook, int variant)
{
	if (is_candidate(variant))
		return rate2 == 8 && codebook == EXL3_CB_MCG ? exl3_gemm_candidate_r8_cb1(variant)
							     : exl3_gemm_entry();
#define RATE(r, cb)                       \
	if (rate2 == r && codebook == cb) \
		return exl3_gemm_r##r##_cb##cb(variant);
	EXL3_GEMM_RATES(RATE)
#undef RATE
	return {};
}

static bool sm90_supports(const struct exl3_cuda_linear *a, int variant)
{
	if (a->device_cc != 90 || a->shard[0].k > GEMM_K_MAX)
		return false;
	for (uint32_t i = 0; i < a->nr_shards; i++)
		if (!entry_of(a->shard[i].rate2, a->shard[i].codebook, variant).kernel)
			return false;
	return true;
}

static size_t sm90_ws_bytes(const struct exl3_cuda_linear *a, int variant)
{
	gemm_plan p;

	gemm_make_plan(a, variants[variant].tn, variants[variant].blocks * a->device_sms, p);
	return p.bytes;
}

static int sm90_launch(const struct exl3_cuda_linear *a, int variant, cudaStream_t stream)
{
	const struct variant &v = variants[variant];
	uint32_t done = 0, rate2 = 0, codebook = 0;
	bool overlap = true;
	gemm_plan p;
	gemm_args g;
	int r;

	gemm_make_plan(a, v.tn, v.blocks * a->device_sms, p);
	r = gemm_start(a, p, stream);
	if (r < 0)
		return r;
	while (gemm_next_group(a, p, 64 * v.wk, done, g, rate2, codebook)) {
		const exl3_gemm_entry e = entry_of(rate2, codebook, variant);
		void *params[] = {&g};
		cudaLaunchAttribute attr = {};
		cudaLaunchConfig_t cfg = {};

		if (!e.kernel)
			return -EOPNOTSUPP;
		if (cudaFuncSetAttribute(e.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
					 e.smem_bytes) != cudaSuccess)
			return -EIO;
		/* The first launch may begin while the input transform ends; it waits for it itself. */
		attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
		attr.val.programmaticStreamSerializationAllowed = 1;
		cfg.gridDim = dim3(g.blocks);
		cfg.blockDim = dim3(e.threads);
		cfg.dynamicSmemBytes = e.smem_bytes;
		cfg.stream = stream;
		cfg.attrs = &attr;
		cfg.numAttrs = overlap ? 1 : 0;
		overlap = false;
		if (cudaLaunchKernelExC(&cfg, e.kernel, params) != cudaSuccess)
			return -EIO;
	}
	return 0;
}

/*
 * Which variant for how many rows; the first that fits. Measured on an H200: see docs/performance.md.
 * It depends on the rows and the shapes alone.
 */
static const struct {
	uint32_t m_max;
	int variant;
} preferred[] = {
	{32, EXL3_GEMM_n32},
	{64, EXL3_GEMM_n64},
	{128, EXL3_GEMM_n128},
	{EXL3_M_MAX, EXL3_GEMM_n256},
};

/*
 * From so many rows on, one product of rebuilt weights is faster, if the workspace holds them; earlier
 * for small matrices, where our kernels' fixed costs weigh more.
 */
static bool use_library(const struct exl3_cuda_linear *a)
{
	uint64_t weights = 0;

	for (uint32_t i = 0; i < a->nr_shards; i++)
		weights += (uint64_t)a->shard[i].k * a->shard[i].n;
	return a->m >= (weights <= 20000000 ? 512u : 1536u) && exl3_gemm_f16_supports(a) &&
	       exl3_gemm_f16_ws_bytes(a) <= a->ws_bytes;
}

/* A variant of the list, or -1: the portable kernel. */
static int choose(const struct exl3_cuda_linear *a)
{
	for (const auto &p : preferred)
		if (a->m <= p.m_max && sm90_supports(a, p.variant))
			return p.variant;
	return -1;
}

static bool auto_supports(const struct exl3_cuda_linear *a)
{
	return choose(a) >= 0 || exl3_gemm_portable_supports(a);
}

static size_t auto_ws_bytes(const struct exl3_cuda_linear *a)
{
	const int v = choose(a);

	if (use_library(a))
		return exl3_gemm_f16_ws_bytes(a);
	return v >= 0 ? sm90_ws_bytes(a, v) : exl3_gemm_portable_ws_bytes(a);
}

static int auto_launch(const struct exl3_cuda_linear *a, cudaStream_t stream)
{
	const int v = choose(a);

	if (use_library(a))
		return exl3_gemm_f16_launch(a, stream);
	return v >= 0 ? sm90_launch(a, v, stream) : exl3_gemm_portable_launch(a, stream);
}

} // namespace exl3

#define DEFINE(name, ...)                                                               \
	static bool supports_##name(const struct exl3_cuda_linear *a)                   \
	{                                                                               \
		return exl3::sm90_supports(a, EXL3_GEMM_##name);                        \
	}                                                                               \
	static size_t ws_bytes_##name(const struct exl3_cuda_linear *a)                 \
	{                                                                               \
		return exl3::sm90_ws_bytes(a, EXL3_GEMM_##name);                        \
	}                                                                               \
	static int launch_##name(const struct exl3_cuda_linear *a, cudaStream_t stream) \
	{                                                                               \
		return exl3::sm90_launch(a, EXL3_GEMM_##name, stream);                  \
	}
EXL3_GEMM_VARIANTS(DEFINE)
EXL3_GEMM_CANDIDATES(DEFINE)

#define ENTRY(name, ...) \
	{"wgmma_" #name, supports_##name, ws_bytes_##name, launch_##name, false},
#define ENTRY_CANDIDATE(name, ...) \
	{"wgmma_" #name, supports_##name, ws_bytes_##name, launch_##name, true},
const struct exl3_cuda_linear_kernel exl3_cuda_gemm_kernels[] = {
	{"gemm", exl3::auto_supports, exl3::auto_ws_bytes, exl3::auto_launch, false},
	EXL3_GEMM_VARIANTS(ENTRY){"mma_n64", exl3_gemm_portable_supports,
				  exl3_gemm_portable_ws_bytes, exl3_gemm_portable_launch, false},
	{"f16_library", exl3_gemm_f16_supports, exl3_gemm_f16_ws_bytes, exl3_gemm_f16_launch, false},
	{"f16_library_mma", exl3_gemm_f16_mma_supports, exl3_gemm_f16_ws_bytes,
	 exl3_gemm_f16_mma_launch, true},
	{"f16_library_wgmma", exl3_gemm_f16_wgmma_supports, exl3_gemm_f16_ws_bytes,
	 exl3_gemm_f16_wgmma_launch, true},
	EXL3_GEMM_CANDIDATES(ENTRY_CANDIDATE)
	{},
};
