/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.cuh - what the kernels for many rows share: arguments, work schedule, reduction and epilogue.
 *
 *       Y^T = svh * H (W^T X^T) + bias        X = H(x * suh), made first by gemm_input.cu
 *
 * Tile: 128 columns (one output Hadamard block) x TN rows ("tokens"), all of k. Warp v of the eight
 * (times two, if the block splits k) owns columns 16v..16v+15; lane 4g+q holds, for j < TN/8,
 *
 *       d[4j], d[4j+1] = column g,   tokens 8j+2q, 8j+2q+1
 *       d[4j+2], [4j+3] = column g+8, same tokens                (D of mma.m16n8k16 and of wgmma)
 *
 * X image: [image][m/TN][k/64] blocks of TN rows x 128 bytes of f16; 16-byte chunk c of row r stands at
 * position c ^ (r & 7): the 128B swizzle, so that a block is copied to shared memory as it is.
 *
 * Schedule: whole tiles go round robin to the blocks of the grid while at least two rounds are left;
 * the rest is one sequence of k steps, dealt out in equal contiguous shares. Blocks leave their parts of
 * a shared tile in the workspace; when all their own work is done, they wait for each other's parts and
 * each finishes some of the tile's rows, adding the parts in k order: results do not depend on timing.
 * A block waits for blocks of its own grid only, after its last contribution to theirs, and the grid is
 * never larger than what fits the device at once.
 */
#ifndef EXL3_CUDA_GEMM_CUH
#define EXL3_CUDA_GEMM_CUH

#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/cuda/launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <errno.h>

namespace exl3
{

constexpr int GEMM_N = 128;    /* columns of a tile */
constexpr int GEMM_RASTER = 8; /* token tiles that share a pass over the weights */
constexpr int EPI_PITCH =
	GEMM_N; /* floats per token in the epilogue's buffer; swizzled, no padding */

struct gemm_shard {
	const uint32_t *trellis;
	const __half *svh;
	const float *bias;
	uint32_t tiles_n; /* n / 16 */
	uint32_t strip0;  /* first strip (128 columns) of this launch */
	uint32_t image;   /* which transformed input */
	uint32_t n_log, n;
	uint32_t col_log, col_stored; /* first column of the shard in y */
};

struct gemm_args {
	struct gemm_shard shard[EXL3_CUDA_SHARDS_MAX];
	uint32_t nr_shards, strips; /* of this launch: shards of one bitrate and codebook */
	uint32_t m, k;
	uint32_t m_tiles;
	uint32_t k_steps; /* k / step of the kernel, rounded up */
	const uint8_t *image;
	size_t image_bytes;     /* one image */
	const float *row_scale; /* [image][m_tiles * TN]: what the image was divided by */
	const struct exl3_cuda_row *table; /* of y, or NULL */
	void *y;
	uint32_t y_stride;
	uint8_t y_dtype;
	bool stored;       /* y without table has stored sizes */
	float *partial;    /* [2 * blocks][TN][128], column bit 3 of the Hadamard done */
	uint32_t *arrived; /* [shared tiles][2]: parts there, blocks done; zero between launches */
	uint32_t rounds;   /* whole tiles per block */
	uint32_t blocks;   /* of the grid */
	uint32_t share,
		longer; /* k steps per block after the rounds; the first blocks have one more */
};

/* A piece of one tile: k steps [begin, end). */
struct gemm_segment {
	uint32_t tile, begin, end;
};

/* Walks the segments of a block. Producer and consumers each keep one; both see the same sequence. */
struct gemm_walk {
	uint32_t block, round;
	uint32_t unit, unit_end; /* k steps of the shared sequence that are ours */
};

static __device__ __forceinline__ uint32_t share_begin(const gemm_args &a, uint32_t block)
{
	return block * a.share + min(block, a.longer);
}

/* The block whose share has unit @u. */
static __device__ __forceinline__ uint32_t share_owner(const gemm_args &a, uint32_t u)
{
	const uint32_t split = a.longer * (a.share + 1);

	return u < split ? u / (a.share + 1) : a.longer + (u - split) / a.share;
}

static __device__ __forceinline__ gemm_walk walk_begin(const gemm_args &a, uint32_t block)
{
	gemm_walk w;

	w.block = block;
	w.round = 0;
	w.unit = share_begin(a, block);
	w.unit_end = share_begin(a, block + 1);
	return w;
}

static __device__ __forceinline__ bool walk_next(const gemm_args &a, gemm_walk &w, gemm_segment &s)
{
	if (w.round < a.rounds) {
		s.tile = w.round++ * a.blocks + w.block;
		s.begin = 0;
		s.end = a.k_steps;
		return true;
	}
	if (w.unit == w.unit_end)
		return false;

	const uint32_t t = w.unit / a.k_steps, u0 = t * a.k_steps;
	const uint32_t end = min(w.unit_end, u0 + a.k_steps);

	s.tile = a.rounds * a.blocks + t;
	s.begin = w.unit - u0;
	s.end = end - u0;
	w.unit = end;
	return true;
}

/* Tile number to place: token tiles run fastest, in groups, so that X stays in the L2. */
static __device__ __forceinline__ void tile_place(const gemm_args &a, uint32_t tile,
						  uint32_t &strip, uint32_t &mt)
{
	uint32_t group = tile / (GEMM_RASTER * a.strips);
	uint32_t rest = tile - group * GEMM_RASTER * a.strips;
	uint32_t width = min((uint32_t)GEMM_RASTER, a.m_tiles - group * GEMM_RASTER);

	strip = rest / width;
	mt = group * GEMM_RASTER + rest % width;
}

static __device__ __forceinline__ uint32_t shard_of(const gemm_args &a, uint32_t strip)
{
	uint32_t s = 0;

	while (s + 1 < a.nr_shards && strip >= a.shard[s + 1].strip0)
		s++;
	return s;
}

/* Where block @block's partial sums of shared tile @t lie: a block has at most two shared tiles. */
static __device__ __forceinline__ uint32_t partial_slot(const gemm_args &a, uint32_t t,
							uint32_t block)
{
	return 2 * block + (share_begin(a, block) / a.k_steps == t ? 0 : 1);
}

/* Shared memory of the epilogue. */
template <int TN> struct gemm_epilogue {
	static constexpr int TOKENS = TN < 64 ? TN : 64; /* per pass */
	float buf[TOKENS * EPI_PITCH];
	float scale[GEMM_N], bias[GEMM_N];
	float row[TN]; /* what each row was divided by */
};

/* Where a tile is, and the values of its columns and rows that a thread fetches ahead of the epilogue. */
struct gemm_ahead {
	uint32_t shard, col0, token0;
	float scale, bias, row;
};

template <int TN>
static __device__ __forceinline__ gemm_ahead gemm_look_ahead(const gemm_args &a, uint32_t tile,
							     int thread)
{
	gemm_ahead h;
	uint32_t strip, mt;

	tile_place(a, tile, strip, mt);
	h.shard = shard_of(a, strip);
	const gemm_shard &sh = a.shard[h.shard];

	h.col0 = (strip - sh.strip0) * GEMM_N;
	h.token0 = mt * TN;
	h.scale = h.bias = h.row = 0.0f;
	if (thread < GEMM_N) {
		h.scale = __half2float(sh.svh[h.col0 + thread]) * (float)EXL3_INV_SQRT128;
		if (sh.bias)
			h.bias = sh.bias[h.col0 + thread];
	}
	if (thread < TN)
		h.row = a.row_scale[(sh.image * a.m_tiles + mt) * TN + thread];
	return h;
}

/* 16-byte units of a token are permuted so that both the writes by fragment and the reads by row use all banks. */
static __device__ __forceinline__ int epilogue_unit(int token, int unit)
{
	return unit ^ (token & 6);
}

/* A row's 32 values of this lane, columns 16 r + 0..3 from @col on: whole and aligned, or one by one. */
template <typename T, typename T4>
static __device__ __forceinline__ void store_row(T *row, uint32_t left, const T4 (&v)[8])
{
	const bool whole = left >= GEMM_N - 12 && !((uintptr_t)row & (sizeof(T4) - 1));

#pragma unroll
	for (int r = 0; r < 8; r++) {
		const T *e = (const T *)&v[r];

		if (whole)
			*(T4 *)(row + 16 * r) = v[r];
		else
#pragma unroll
			for (uint32_t i = 0; i < 4; i++)
				if (16 * r + i < left)
					row[16 * r + i] = e[i];
	}
}

/*
 * The end of eight rows: Hadamard over 128 columns, scales, store. Lane 4p + c has one row and its columns
 * 16r + 4c + i, r < 8, i < 4, as v[4r + i]: column bits 0, 1, 4, 5, 6 are registers, bit 2 is a neighbour's,
 * bit 3 was done in the fragments. @scale(n), @bias(n): of columns n..n+3 of the strip.
 */
template <class Scale, class Bias>
static __device__ __forceinline__ void finish_row(const gemm_args &a, const gemm_shard &sh,
						  uint32_t col0, uint32_t row, float rs,
						  float (&v)[32], int c, Scale scale, Bias bias)
{
	char *y = (char *)a.y + (size_t)row * a.y_stride;
	uint8_t dtype = a.y_dtype;
	bool stored = a.stored;

	if (a.table && row < a.m) {
		const exl3_cuda_row *r = a.table + row;

		y = (char *)r->y;
		dtype = r->y_dtype;
		stored = r->stored;
	}
#pragma unroll
	for (int s = 1; s < 32; s <<= 1)
#pragma unroll
		for (int i = 0; i < 32; i++)
			if (!(i & s)) {
				float x = v[i], z = v[i + s];

				v[i] = x + z;
				v[i + s] = x - z;
			}
	const float sign = c & 1 ? -1.0f : 1.0f;
#pragma unroll
	for (int i = 0; i < 32; i++)
		v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], 1));
	if (row >= a.m)
		return;

	const uint32_t limit = stored ? sh.n : sh.n_log;
	const uint32_t first = col0 + 4 * c;
	const uint32_t col = (stored ? sh.col_stored : sh.col_log) + first;
	const uint32_t left = limit > first ? limit - first : 0;

#pragma unroll
	for (int r = 0; r < 8; r++) {
		const float4 sc = scale(16 * r + 4 * c), bi = bias(16 * r + 4 * c);

		v[4 * r] = fmaf(v[4 * r] * rs, sc.x, bi.x);
		v[4 * r + 1] = fmaf(v[4 * r + 1] * rs, sc.y, bi.y);
		v[4 * r + 2] = fmaf(v[4 * r + 2] * rs, sc.z, bi.z);
		v[4 * r + 3] = fmaf(v[4 * r + 3] * rs, sc.w, bi.w);
	}
	if (dtype == EXL3_F32) {
		float4 o[8];

#pragma unroll
		for (int r = 0; r < 8; r++)
			o[r] = make_float4(v[4 * r], v[4 * r + 1], v[4 * r + 2], v[4 * r + 3]);
		store_row((float *)y + col, left, o);
		return;
	}
	uint2 o[8];

#pragma unroll
	for (int r = 0; r < 8; r++) {
		if (dtype == EXL3_BF16) {
			__nv_bfloat162 lo = __floats2bfloat162_rn(v[4 * r], v[4 * r + 1]);
			__nv_bfloat162 hi = __floats2bfloat162_rn(v[4 * r + 2], v[4 * r + 3]);

			o[r] = make_uint2(*(uint32_t *)&lo, *(uint32_t *)&hi);
		} else {
			__half2 lo = __floats2half2_rn(v[4 * r], v[4 * r + 1]);
			__half2 hi = __floats2half2_rn(v[4 * r + 2], v[4 * r + 3]);

			o[r] = make_uint2(*(uint32_t *)&lo, *(uint32_t *)&hi);
		}
	}
	store_row((uint16_t *)y + col, left, o);
}

/* A whole tile to y, through shared memory, 64 tokens at a time. */
template <int TN, int WARPS>
static __device__ __forceinline__ void finish_tile(const gemm_args &a, gemm_epilogue<TN> &e,
						   const gemm_ahead &ahead,
						   const float (&d)[TN / 2], int warp, int lane)
{
	constexpr int THREADS = 32 * WARPS;
	constexpr int TOKENS = gemm_epilogue<TN>::TOKENS;
	constexpr int PER = TOKENS / 2; /* accumulators of a pass */
	const int slice = warp & 7, thread = slice * 32 + lane;
	const int g = lane >> 2, q = lane & 3, c = lane & 3, p = lane >> 2;
	const gemm_shard &sh = a.shard[ahead.shard];

	if (warp < 8) {
		if (thread < GEMM_N) {
			e.scale[thread] = ahead.scale;
			e.bias[thread] = ahead.bias;
		}
		if (thread < TN)
			e.row[thread] = ahead.row;
	}
#pragma unroll
	for (int pass = 0; pass < TN / TOKENS; pass++) {
		if (warp < 8) {
#pragma unroll
			for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
				for (int b = 0; b < 2; b++) {
					const int token = 8 * j + 2 * q + b;
					const float lo = d[pass * PER + 4 * j + b];
					const float hi = d[pass * PER + 4 * j + 2 + b];
					float *t = &e.buf[token * EPI_PITCH + (g & 3)];
					const int unit = 4 * slice + (g >> 2);

					t[4 * epilogue_unit(token, unit)] = lo + hi;
					t[4 * epilogue_unit(token, unit + 2)] = lo - hi;
				}
		}
		epilogue_sync<THREADS>();
		for (int base = 8 * warp; base < TOKENS; base += 8 * WARPS) {
			/* Tokens t and t + 4 read together: their permutations differ, so no bank is asked twice. */
			const int token = base + (p >> 1) + 4 * (p & 1);
			float v[32];

#pragma unroll
			for (int r = 0; r < 8; r++) {
				float4 t = *(const float4 *)&e
						    .buf[token * EPI_PITCH +
							 4 * epilogue_unit(token, 4 * r + c)];

				v[4 * r] = t.x;
				v[4 * r + 1] = t.y;
				v[4 * r + 2] = t.z;
				v[4 * r + 3] = t.w;
			}
			finish_row(
				a, sh, ahead.col0, ahead.token0 + pass * TOKENS + token,
				e.row[pass * TOKENS + token], v, c,
				[&](int n) { return *(const float4 *)&e.scale[n]; },
				[&](int n) { return *(const float4 *)&e.bias[n]; });
		}
		epilogue_sync<THREADS>();
	}
}

/*
 * The end of a segment. Called by the WARPS consumer warps (8, or 16 if the block splits k in two): a
 * whole tile goes to y, a part of one to the workspace.
 */
template <int TN, int WARPS>
static __device__ __forceinline__ void gemm_finish(const gemm_args &a, gemm_epilogue<TN> &e,
						   const gemm_segment &seg, const gemm_ahead &ahead,
						   float (&d)[TN / 2], int warp, int lane)
{
	constexpr int THREADS = 32 * WARPS;
	constexpr int TOKENS = gemm_epilogue<TN>::TOKENS;
	constexpr int PER = TOKENS / 2;
	const int slice = warp & 7, thread = slice * 32 + lane;
	const bool lead = warp < 8;

	if (WARPS == 16) {
#pragma unroll
		for (int pass = 0; pass < TN / TOKENS; pass++) {
			if (!lead)
#pragma unroll
				for (int i = 0; i < PER; i++)
					e.buf[i * 256 + thread] = d[pass * PER + i];
			epilogue_sync<THREADS>();
			if (lead)
#pragma unroll
				for (int i = 0; i < PER; i++)
					d[pass * PER + i] += e.buf[i * 256 + thread];
			epilogue_sync<THREADS>();
		}
	}
	if (seg.end - seg.begin == a.k_steps) {
		finish_tile<TN, WARPS>(a, e, ahead, d, warp, lane);
		return;
	}

	const uint32_t t = seg.tile - a.rounds * a.blocks;

	if (lead) {
		const int g = lane >> 2, q = lane & 3;
		float *out = a.partial + (size_t)partial_slot(a, t, blockIdx.x) * GEMM_N * TN +
			     2 * q * GEMM_N + 16 * slice + g;

#pragma unroll
		for (int j = 0; j < TN / 8; j++)
#pragma unroll
			for (int b = 0; b < 2; b++) {
				const float lo = d[4 * j + b], hi = d[4 * j + 2 + b];

				__stcg(out + (8 * j + b) * GEMM_N, lo + hi);
				__stcg(out + (8 * j + b) * GEMM_N + 8, lo - hi);
			}
	}
	epilogue_sync<THREADS>();
	if (threadIdx.x == 0)
		add_release(a.arrived + 2 * t);
}

/* A shared tile, as one of its blocks sees it. */
struct gemm_shared {
	uint32_t t, parts,
		first; /* tile number after the rounds; blocks that share it, the first of them */
	uint32_t shard, col0, mt;
	uint32_t items; /* groups of eight rows that this block finishes */
};

template <int TN>
static __device__ __forceinline__ gemm_shared shared_tile(const gemm_args &a, uint32_t t)
{
	gemm_shared h;
	uint32_t strip;

	h.t = t;
	h.first = share_owner(a, t * a.k_steps);
	h.parts = share_owner(a, (t + 1) * a.k_steps - 1) - h.first + 1;
	tile_place(a, a.rounds * a.blocks + t, strip, h.mt);
	h.shard = shard_of(a, strip);
	h.col0 = (strip - a.shard[h.shard].strip0) * GEMM_N;
	h.items = h.parts == 1 ? 0 : (TN / 8 - (blockIdx.x - h.first) + h.parts - 1) / h.parts;
	if (blockIdx.x - h.first >= TN / 8)
		h.items = 0; /* more parts than groups of rows */
	return h;
}

/*
 * After a block's last segment: its rows of the tiles that it shares, two at most, the first and the last
 * of its share. Both are waited for together and their rows spread over all warps.
 */
template <int TN, int WARPS>
static __device__ __forceinline__ void gemm_collect(const gemm_args &a, gemm_epilogue<TN> &e,
						    int warp, int lane)
{
	const uint32_t begin = share_begin(a, blockIdx.x), end = share_begin(a, blockIdx.x + 1);
	const int c = lane & 3, p = lane >> 2;

	if (begin == end)
		return;
	const bool two = begin / a.k_steps != (end - 1) / a.k_steps;
	gemm_shared s0 = shared_tile<TN>(a, begin / a.k_steps),
		    s1 = shared_tile<TN>(a, (end - 1) / a.k_steps);

	if (!two) {
		s1.parts = 1;
		s1.items = 0;
	}
	if (s0.parts == 1 && s1.parts == 1)
		return;
	/* The columns' scales and biases, while the other parts come in: [tile][scale 128 | bias 128]. */
	if (warp < 8) {
		const bool last = threadIdx.x >= GEMM_N;
		const uint32_t n = (last ? s1.col0 : s0.col0) + threadIdx.x % GEMM_N;
		const gemm_shard &sh = a.shard[last ? s1.shard : s0.shard];
		float *to = e.buf + (last ? 2 * GEMM_N : 0) + threadIdx.x % GEMM_N;

		to[0] = __half2float(sh.svh[n]) * (float)EXL3_INV_SQRT128;
		to[GEMM_N] = sh.bias ? sh.bias[n] : 0.0f;
	}
	if (threadIdx.x == 0 && s0.parts > 1)
		while (load_acquire(a.arrived + 2 * s0.t) < s0.parts)
			;
	if (threadIdx.x == 32 && s1.parts > 1)
		while (load_acquire(a.arrived + 2 * s1.t) < s1.parts)
			;
	epilogue_sync<32 * WARPS>();

	for (uint32_t item = warp; item < s0.items + s1.items; item += WARPS) {
		const bool last = item >= s0.items;
		const uint32_t t = last ? s1.t : s0.t, parts = last ? s1.parts : s0.parts;
		const uint32_t first = last ? s1.first : s0.first, mt = last ? s1.mt : s0.mt;
		const uint32_t group = blockIdx.x - first + parts * (last ? item - s0.items : item);
		const uint32_t token = 8 * group + p;
		const gemm_shard &sh = a.shard[last ? s1.shard : s0.shard];
		const float *sb = e.buf + (last ? 2 * GEMM_N : 0);
		const float rs = __ldcg(a.row_scale + (sh.image * a.m_tiles + mt) * TN + token);
		const float *in = a.partial + token * GEMM_N + 4 * c;
		float v[32];

		/* Always ((part 0 + part 1) + part 2) + ..., two parts in flight. */
		for (uint32_t part = 0; part < parts; part += 2) {
			const bool pair = part + 1 < parts;
			const float *in0 =
				in + (size_t)partial_slot(a, t, first + part) * GEMM_N * TN;
			const float *in1 =
				in + (size_t)partial_slot(a, t, first + part + pair) * GEMM_N * TN;
			float4 x[8], z[8];

#pragma unroll
			for (int r = 0; r < 8; r++)
				x[r] = __ldcg((const float4 *)(in0 + 16 * r));
#pragma unroll
			for (int r = 0; r < 8; r++)
				z[r] = pair ? __ldcg((const float4 *)(in1 + 16 * r))
					    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
			for (int r = 0; r < 8; r++) {
				v[4 * r] = (part ? v[4 * r] + x[r].x : x[r].x) + z[r].x;
				v[4 * r + 1] = (part ? v[4 * r + 1] + x[r].y : x[r].y) + z[r].y;
				v[4 * r + 2] = (part ? v[4 * r + 2] + x[r].z : x[r].z) + z[r].z;
				v[4 * r + 3] = (part ? v[4 * r + 3] + x[r].w : x[r].w) + z[r].w;
			}
		}
		finish_row(
			a, sh, last ? s1.col0 : s0.col0, mt * TN + token, rs, v, c,
			[&](int n) { return *(const float4 *)(sb + n); },
			[&](int n) { return *(const float4 *)(sb + GEMM_N + n); });
	}
	epilogue_sync<32 * WARPS>();
	/* The last one to leave puts the counters back. */
	if ((threadIdx.x == 0 && s0.parts > 1) || (threadIdx.x == 32 && s1.parts > 1)) {
		uint32_t *arrived = a.arrived + 2 * (threadIdx.x ? s1.t : s0.t);

		if (atomicAdd(arrived + 1, 1u) == (threadIdx.x ? s1.parts : s0.parts) - 1)
			arrived[0] = arrived[1] = 0;
	}
}

/* gemm_input.cu: x to the X image; see there. */
struct gemm_input {
	const __half *suh[EXL3_CUDA_SHARDS_MAX]; /* one per image */
	uint32_t nr_images;
	uint32_t m, m_pad; /* rows up to m_pad become zero */
	uint32_t k, k_log;
	uint32_t tn;
	const struct exl3_cuda_row *table; /* of x, or NULL */
	const void *x;
	uint32_t x_stride;
	uint8_t x_dtype;
	bool stored;
	bool programmatic; /* launch before the stream's last kernel has ended */
	uint8_t *image;
	size_t image_bytes;
	float *row_scale; /* [image][m_pad] */
};

constexpr uint32_t GEMM_K_MAX = 65536;

int gemm_input_launch(const gemm_input &in, cudaStream_t stream);

/* gemm.cu: how a linear lies in the workspace; the same for all kernels with this epilogue. */
struct gemm_plan {
	uint32_t tn, m_tiles, nr_images;
	uint32_t image_of[EXL3_CUDA_SHARDS_MAX];
	const void *suh[EXL3_CUDA_SHARDS_MAX];
	size_t image_bytes, scale_offset, image_offset, partial_offset, bytes;
	uint32_t blocks; /* upper bound of the grid */
};

void gemm_make_plan(const struct exl3_cuda_linear *a, uint32_t tn, uint32_t blocks, gemm_plan &p);
/* Launches the input transform. */
int gemm_start(const struct exl3_cuda_linear *a, const gemm_plan &p, cudaStream_t stream);
/* Arguments for the next shards of one bitrate and codebook; @step: k of a pipeline stage. False: no more. */
bool gemm_next_group(const struct exl3_cuda_linear *a, const gemm_plan &p, uint32_t step,
		     uint32_t &done, gemm_args &args, uint32_t &rate2, uint32_t &codebook);

} // namespace exl3
#endif
