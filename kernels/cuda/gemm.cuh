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
 * the rest is one sequence of k steps, dealt out in equal contiguous shares. A tile that several blocks
 * share is summed by the block that arrives last, always in k order, so results do not depend on timing.
 */
#ifndef EXL3_CUDA_GEMM_CUH
#define EXL3_CUDA_GEMM_CUH

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <errno.h>

namespace exl3
{

constexpr int GEMM_N      = 128; /* columns of a tile */
constexpr int GEMM_RASTER = 8;   /* token tiles that share a pass over the weights */
constexpr int EPI_PITCH   = GEMM_N; /* floats per token in the epilogue's buffer; swizzled, no padding */

struct gemm_shard {
	const uint32_t *trellis;
	const __half *svh;
	const float *bias;
	uint32_t tiles_n;              /* n / 16 */
	uint32_t strip0;               /* first strip (128 columns) of this launch */
	uint32_t image;                /* which transformed input */
	uint32_t n_log, n;
	uint32_t col_log, col_stored;  /* first column of the shard in y */
};

struct gemm_args {
	struct gemm_shard shard[EXL3_CUDA_SHARDS_MAX];
	uint32_t nr_shards, strips;    /* of this launch: shards of one bitrate and codebook */
	uint32_t m, k;
	uint32_t m_tiles;
	uint32_t k_steps;              /* k / step of the kernel, rounded up */
	const uint8_t *image;
	size_t image_bytes;            /* one image */
	const float *row_scale;        /* [image][m_tiles * TN]: what the image was divided by */
	const struct exl3_cuda_row *table; /* of y, or NULL */
	void *y;
	uint32_t y_stride;
	uint8_t y_dtype;
	bool stored;                   /* y without table has stored sizes */
	float *partial;                /* [2 * blocks][128 * TN] */
	uint32_t *arrived;             /* zero before and after every launch */
	uint32_t rounds;               /* whole tiles per block */
	uint32_t blocks;               /* of the grid */
};

/* A piece of one tile: k steps [begin, end). */
struct gemm_segment {
	uint32_t tile, begin, end;
	uint32_t parts;   /* blocks that share the tile; 1: all of it is here */
	uint32_t part;    /* which of them we are, in k order */
	uint32_t first;   /* block that has part 0 */
};

/* Walks the segments of a block. Producer and consumers each keep one; both see the same sequence. */
struct gemm_walk {
	uint32_t block, round;
	uint32_t unit, unit_end;   /* k steps of the shared sequence that are ours */
};

static __device__ __forceinline__ uint32_t gemm_tiles(const gemm_args &a)
{
	return a.strips * a.m_tiles;
}

static __device__ __forceinline__ uint32_t share_begin(uint32_t units, uint32_t block, uint32_t blocks)
{
	return (uint32_t)((uint64_t)units * block / blocks);
}

static __device__ __forceinline__ gemm_walk walk_begin(const gemm_args &a, uint32_t block)
{
	uint32_t units = (gemm_tiles(a) - a.rounds * a.blocks) * a.k_steps;
	gemm_walk w;

	w.block = block;
	w.round = 0;
	w.unit = share_begin(units, block, a.blocks);
	w.unit_end = share_begin(units, block + 1, a.blocks);
	return w;
}

static __device__ __forceinline__ bool walk_next(const gemm_args &a, gemm_walk &w, gemm_segment &s)
{
	if (w.round < a.rounds) {
		s.tile = w.round++ * a.blocks + w.block;
		s.begin = 0;
		s.end = a.k_steps;
		s.parts = 1;
		s.part = 0;
		s.first = w.block;
		return true;
	}
	if (w.unit == w.unit_end)
		return false;

	uint32_t units = (gemm_tiles(a) - a.rounds * a.blocks) * a.k_steps;
	uint32_t t = w.unit / a.k_steps, u0 = t * a.k_steps;
	uint32_t end = min(w.unit_end, u0 + a.k_steps);
	/* The block that owns unit u is the last one whose share begins at or before it. */
	uint32_t first = (uint32_t)((((uint64_t)u0 + 1) * a.blocks - 1) / units);
	uint32_t last = (uint32_t)((((uint64_t)u0 + a.k_steps) * a.blocks - 1) / units);

	s.tile = a.rounds * a.blocks + t;
	s.begin = w.unit - u0;
	s.end = end - u0;
	s.parts = last - first + 1;
	s.part = w.block - first;
	s.first = first;
	w.unit = end;
	return true;
}

/* Tile number to place: token tiles run fastest, in groups, so that X stays in the L2. */
static __device__ __forceinline__ void tile_place(const gemm_args &a, uint32_t tile, uint32_t &strip,
						  uint32_t &mt)
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

/* Where a block's partial sums of a tile lie: a block has at most two shared tiles. */
static __device__ __forceinline__ uint32_t partial_slot(const gemm_args &a, const gemm_segment &s,
							uint32_t part)
{
	uint32_t units = (gemm_tiles(a) - a.rounds * a.blocks) * a.k_steps;
	uint32_t block = s.first + part;
	uint32_t begin = share_begin(units, block, a.blocks);
	bool head = begin / a.k_steps == s.tile - a.rounds * a.blocks;

	return 2 * block + (head ? 0 : 1);
}

/* Shared memory of the epilogue. */
template <int TN> struct gemm_epilogue {
	static constexpr int TOKENS = TN < 64 ? TN : 64; /* per pass */
	float buf[TOKENS * EPI_PITCH];
	float scale[GEMM_N], bias[GEMM_N];
	uint32_t order;
};

/* Named barrier 1: all threads that hold accumulators. */
template <int THREADS> static __device__ __forceinline__ void epilogue_sync()
{
	asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

/* Counts an arrival: writes before it are seen by whoever counts later. */
static __device__ __forceinline__ uint32_t arrive_acq_rel(uint32_t *p)
{
	uint32_t old;

	asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(old) : "l"(p) : "memory");
	return old;
}

/* 16-byte units of a token are permuted so that both the writes by fragment and the reads by row use all banks. */
static __device__ __forceinline__ int epilogue_unit(int token, int unit)
{
	return unit ^ (token & 6);
}

static __device__ __forceinline__ void store4(void *row, uint8_t dtype, uint32_t col, uint32_t left,
					      const float (&v)[4])
{
	if (dtype == EXL3_F32) {
		float *p = (float *)row + col;

		if (left >= 4 && !((uintptr_t)p & 15)) {
			*(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
			return;
		}
		for (uint32_t i = 0; i < 4 && i < left; i++)
			p[i] = v[i];
		return;
	}
	uint16_t h[4];
#pragma unroll
	for (int i = 0; i < 4; i++)
		h[i] = dtype == EXL3_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(v[i]))
					  : __half_as_ushort(__float2half_rn(v[i]));
	uint16_t *p = (uint16_t *)row + col;

	if (left >= 4 && !((uintptr_t)p & 7)) {
		*(uint2 *)p = make_uint2(h[0] | (uint32_t)h[1] << 16, h[2] | (uint32_t)h[3] << 16);
		return;
	}
	for (uint32_t i = 0; i < 4 && i < left; i++)
		p[i] = h[i];
}

/*
 * Eight tokens of the buffer: Hadamard over the 128 columns, scales, store. Lane 4p + c has token
 * (p >> 1) + 4 (p & 1) and columns 16r + 4c + i, r < 8, i < 4: column bits 0, 1, 4, 5, 6 are registers,
 * bit 2 is a neighbour's, bit 3 was done in the fragments.
 */
template <int TN>
static __device__ __forceinline__ void epilogue_rows(const gemm_args &a, const gemm_shard &sh,
						     gemm_epilogue<TN> &e, const float *row_scale,
						     uint32_t token0, int base, uint32_t col0, int lane)
{
	const int c = lane & 3, p = lane >> 2;
	const int token = base + (p >> 1) + 4 * (p & 1);
	const uint32_t row = token0 + token;
	const bool live = row < a.m;
	float v[32];
	float rs = 1.0f;
	void *y = nullptr;
	uint8_t dtype = a.y_dtype;
	bool stored = a.stored;

	if (live) {
		rs = row_scale[row];
		if (a.table) {
			const exl3_cuda_row *r = a.table + row;

			y = r->y;
			dtype = r->y_dtype;
			stored = r->stored;
		} else {
			y = (char *)a.y + (size_t)row * a.y_stride;
		}
	}
#pragma unroll
	for (int r = 0; r < 8; r++) {
		float4 t = *(const float4 *)&e.buf[token * EPI_PITCH + 4 * epilogue_unit(token, 4 * r + c)];

		v[4 * r] = t.x;
		v[4 * r + 1] = t.y;
		v[4 * r + 2] = t.z;
		v[4 * r + 3] = t.w;
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
		v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], 1)) * rs;
	if (!live)
		return;

	const uint32_t limit = stored ? sh.n : sh.n_log;
	const uint32_t base_col = (stored ? sh.col_stored : sh.col_log) + col0;
#pragma unroll
	for (int r = 0; r < 8; r++) {
		const int n = 16 * r + 4 * c;
		const float4 sc = *(const float4 *)&e.scale[n], bi = *(const float4 *)&e.bias[n];
		float o[4] = { fmaf(v[4 * r], sc.x, bi.x), fmaf(v[4 * r + 1], sc.y, bi.y),
			       fmaf(v[4 * r + 2], sc.z, bi.z), fmaf(v[4 * r + 3], sc.w, bi.w) };

		if (col0 + n < limit)
			store4(y, dtype, base_col + n, limit - col0 - n, o);
	}
}

/*
 * One segment's accumulators to y, or to the workspace if other blocks have parts of the tile and have
 * not all arrived. Called by the WARPS consumer warps (8, or 16 if the block splits k in two).
 */
template <int TN, int WARPS>
static __device__ __forceinline__ void gemm_finish(const gemm_args &a, gemm_epilogue<TN> &e,
						   const gemm_segment &seg, float (&d)[TN / 2], int warp,
						   int lane)
{
	constexpr int THREADS = 32 * WARPS;
	constexpr int TOKENS  = gemm_epilogue<TN>::TOKENS;
	constexpr int PER     = TOKENS / 2; /* accumulators of a pass */
	const int slice = warp & 7, thread = slice * 32 + lane;
	const bool lead = warp < 8;
	const int g = lane >> 2, q = lane & 3;

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
	if (seg.parts > 1) {
		uint32_t *arrived = a.arrived + (seg.tile - a.rounds * a.blocks);
		const size_t tile_floats = GEMM_N * TN;

		if (lead) {
			float4 *out = (float4 *)(a.partial + partial_slot(a, seg, seg.part) * tile_floats) +
				      thread;
#pragma unroll
			for (int i = 0; i < TN / 8; i++)
				__stcg(out + i * 256, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2],
								  d[4 * i + 3]));
		}
		/* Release and acquire by one thread cover the others through the barriers around them. */
		epilogue_sync<THREADS>();
		if (warp == 0 && lane == 0) {
			e.order = arrive_acq_rel(arrived);
			if (e.order == seg.parts - 1)
				*arrived = 0;
		}
		epilogue_sync<THREADS>();
		if (e.order != seg.parts - 1)
			return;
		if (lead) {
			if (seg.parts > 2) {
#pragma unroll
				for (int i = 0; i < TN / 2; i++)
					d[i] = 0.0f;
			}
			/* Two parts: the order of one addition does not matter. More: in k order, ours too. */
			for (uint32_t part = 0; part < seg.parts; part++) {
				if (seg.parts == 2 && part == seg.part)
					continue;
				const float4 *in =
					(const float4 *)(a.partial + partial_slot(a, seg, part) * tile_floats) +
					thread;
#pragma unroll
				for (int i = 0; i < TN / 8; i++) {
					float4 t = __ldcg(in + i * 256);

					d[4 * i] += t.x;
					d[4 * i + 1] += t.y;
					d[4 * i + 2] += t.z;
					d[4 * i + 3] += t.w;
				}
			}
		}
	}

	uint32_t strip, mt;

	tile_place(a, seg.tile, strip, mt);
	const gemm_shard &sh = a.shard[shard_of(a, strip)];
	const uint32_t col0 = (strip - sh.strip0) * GEMM_N;
	const float *row_scale = a.row_scale + (size_t)sh.image * a.m_tiles * TN;

	if (warp < 4) {
		const int n = warp * 32 + lane;

		e.scale[n] = __half2float(sh.svh[col0 + n]) * (float)EXL3_INV_SQRT128;
		e.bias[n] = sh.bias ? sh.bias[col0 + n] : 0.0f;
	}
#pragma unroll
	for (int pass = 0; pass < TN / TOKENS; pass++) {
		if (lead) {
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
		for (int base = 8 * warp; base < TOKENS; base += 8 * WARPS)
			epilogue_rows<TN>(a, sh, e, row_scale, mt * TN + pass * TOKENS, base, col0, lane);
		epilogue_sync<THREADS>();
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
bool gemm_next_group(const struct exl3_cuda_linear *a, const gemm_plan &p, uint32_t step, uint32_t &done,
		     gemm_args &args, uint32_t &rate2, uint32_t &codebook);

} // namespace exl3
#endif
