/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla.cuh - sparse MLA decode for 16 heads a CTA: gather rows, online softmax, cluster merge.
 *
 *   s[h, i] = scale * q[h, :] . kv[i, :]      p = exp(s - m)      o[h, :] = sum_i p[h, i] kv[i, 0:Dv] / sum_i p
 *
 * q [m, heads, D], kv rows [slots, D] bf16, f16 or e4m3, o [m, heads, Dv]; f32 accumulation.
 *
 * A work item is (query, 16 heads). Its keys are cut into `splits` equal ranges, one CTA each; a
 * cluster of S CTAs merges through distributed shared memory; several clusters (splits = S * C) of
 * one item merge in the workspace, by whichever CTA of a slice arrives last, in fixed order.
 *
 * One CTA, 8 warps, KB keys a block:
 *
 *            16 heads (M)                         S = Q K^T: warp (dq = w & 3, kh = w >> 2) has a
 *          [ Q in registers ]                     quarter of the dims, half of the keys; the four
 *   KB    D                                       quarters meet in shared memory (part).
 *   keys [ kv block in shared memory ]            softmax: 256 threads, thread = (head, KB/16 keys)
 *   (N)    0 .. Dv/8 .. Dv                        O += P V: warp w has dims w*Dv/8.., all keys
 *
 *   stage      j-1    | j                          | j+1          | ..  j+STAGES-1
 *   cp.async   free   | landed                     | in flight    | issued during block j
 *   warps             | S, part, softmax, P, O     |
 *
 * Rows are gathered with 16-byte cp.async: a warp loads KB/8 keys of each block and holds their
 * checked row offsets in registers, 32 at a time, loaded once, one set ahead. e4m3 rows stay e4m3 in
 * shared memory and are converted to f16 fragments (exact); ldmatrix hands a lane four adjacent dims
 * for a k step, so Q's fragments are loaded in that order too.
 *
 * Rows are padded by 16 bytes: an odd number of 16-byte chunks, so ldmatrix meets no bank twice.
 */
#ifndef EXL3_KERNELS_CUDA_MLA_CUH
#define EXL3_KERNELS_CUDA_MLA_CUH

#include "kernels/cuda/mla.h"
#include "kernels/cuda/mla_ptx.cuh"

#include <math_constants.h>

namespace exl3_mla
{

constexpr int CLUSTER_MAX = 16;
constexpr int MERGERS = 256; /* threads that merge, in every kernel */

struct params {
	struct exl3_cuda_mla_entry entries[EXL3_CUDA_MLA_ENTRIES_MAX];
	uint32_t nr_entries, heads, dim, value_dim;
	uint32_t head_tiles, splits, cluster;
	uint32_t *counters; /* [items, cluster], zero; left zero */
	float *part;        /* [items, groups, 16, VP] */
	float *part_ml;     /* [items, groups, cluster, 16, 2] max and sum */
};

/* DP, VP: capacities, multiples of 64 and 128; EXACT: they are the sizes. */
template <int CACHE, int DP_, int VP_, int KB_, int STAGES_, int MINCTA_, bool EXACT_> struct config {
	static constexpr int DP = DP_, VP = VP_, KB = KB_, STAGES = STAGES_, MINCTA = MINCTA_;
	static constexpr int THREADS = 256, WARPS = 8, TILE_H = 16;
	static constexpr bool EXACT = EXACT_, FP8 = CACHE == EXL3_E4M3, BF16 = CACHE == EXL3_BF16;
	static constexpr int ESIZE = FP8 ? 1 : 2;
	static constexpr int ROW = DP * ESIZE + 16;    /* bytes of a row in shared memory */
	static constexpr int CHUNKS = DP * ESIZE / 16; /* of 16 bytes in a row */
	static constexpr int KEYS_W = KB / WARPS;     /* keys that a warp loads per block */
	static constexpr int SET = 32 / KEYS_W;        /* blocks per register set of offsets */
	static constexpr int KSTEPS = DP / 64;         /* k steps of 16 dims of a quarter */
	static constexpr int NT = KB / 16;             /* tiles of 8 keys of half a block */
	static constexpr int VW = VP / WARPS;          /* value dims of a warp */
	static constexpr int VT = VW / 8;
	static constexpr int KEYS_T = KB / 16;         /* scores of a softmax thread */
	static constexpr int PART = KB + 8;            /* words of a row of partial scores */
	static constexpr int PROW = KB * 2 + 16;       /* bytes of a row of P */
	static constexpr int OROW = VP + 4;            /* words of a row of O for the merge */
	static_assert(DP % 64 == 0 && VP % 128 == 0 && (CHUNKS & 1) == 0, "tile sizes");
	static_assert(KB == 32 || KB == 64, "softmax threads take 2 or 4 scores");
	static_assert(STAGES * KB * ROW >= TILE_H * OROW * 4, "O reuses the stages");
	static_assert(STAGES <= SET, "one set of offsets ahead covers the pipeline");
};

/* What merging needs; the same place in every CTA of a cluster. */
template <int TILE_H> struct merge_shared {
	float ml[2][TILE_H]; /* this CTA's max (log2 units) and sum */
	float weight[CLUSTER_MAX][TILE_H];
	float total[2][TILE_H]; /* the cluster's max and sum */
	uint32_t last;
};

template <class C> struct shared {
	alignas(128) uint8_t stage[C::STAGES][C::KB][C::ROW]; /* at the end: O, [16][OROW] f32 */
	alignas(16) float part[4][C::TILE_H][C::PART];
	alignas(16) uint8_t p[C::TILE_H][C::PROW];
	float alpha[C::TILE_H];
	merge_shared<C::TILE_H> merge;
	uint8_t valid[C::STAGES][C::WARPS]; /* bit k: key k of that warp exists */
};

/* Two adjacent elements of q as a pair of the cache's MMA type. */
template <bool BF16>
__device__ __forceinline__ uint32_t load_q2(const uint8_t *row, uint32_t dtype, uint32_t d)
{
	float2 v;

	if (dtype == EXL3_F32) {
		v = *(const float2 *)(row + (size_t)d * 4);
	} else {
		const uint32_t raw = *(const uint32_t *)(row + (size_t)d * 2);

		if (dtype == (BF16 ? EXL3_BF16 : EXL3_F16))
			return raw;
		if (dtype == EXL3_BF16)
			v = __bfloat1622float2(*(const __nv_bfloat162 *)&raw);
		else
			v = __half22float2(*(const __half2 *)&raw);
	}
	if constexpr (BF16) {
		const __nv_bfloat162 b = __floats2bfloat162_rn(v.x, v.y);

		return *(const uint32_t *)&b;
	} else {
		const __half2 h = __floats2half2_rn(v.x, v.y);

		return *(const uint32_t *)&h;
	}
}

/* Fragments of Q for one quarter of the dims; rows past the last head and padding are zero. */
template <class C>
__device__ __forceinline__ void load_q(uint32_t (&qf)[C::KSTEPS][4], const uint8_t *q,
				       uint32_t dtype, uint32_t heads, uint32_t dim, int dq, int lane)
{
	const uint32_t g = lane >> 2, l4 = lane & 3;
	const size_t head_bytes = (size_t)dim * (dtype == EXL3_F32 ? 4 : 2);

#pragma unroll
	for (int ks = 0; ks < C::KSTEPS; ks++) {
		const uint32_t d0 = (dq * C::KSTEPS + ks) * 16;
		/* k slots (2q, 2q+1, 2q+8, 2q+9) of a lane; four adjacent dims with e4m3. */
		const uint32_t lo = d0 + (C::FP8 ? 4 * l4 : 2 * l4), hi = lo + (C::FP8 ? 2 : 8);

#pragma unroll
		for (int r = 0; r < 4; r++) {
			const uint32_t head = g + (r & 1) * 8;
			const bool in = head < heads && (C::EXACT || d0 < dim);

			qf[ks][r] = in ? load_q2<C::BF16>(q + head * head_bytes, dtype,
							  r < 2 ? lo : hi)
				       : 0;
		}
	}
}

/* A warp's view of the selection: offsets of the next keys that it loads, checked, in registers. */
template <class C> struct selection {
	const uint8_t *indices; /* of this query */
	uint64_t slots, stride;
	uint32_t begin, end; /* keys of this CTA */
	bool wide;
	int64_t cur, nxt; /* lane l: byte offset of key (block l / KEYS_W, l % KEYS_W), or -1 */
	uint32_t bad;

	__device__ __forceinline__ void fetch(uint32_t set, int warp, int lane)
	{
		const uint32_t key = begin + (set * C::SET + lane / C::KEYS_W) * C::KB +
				     warp * C::KEYS_W + lane % C::KEYS_W;
		int64_t v = -1;

		if (key < end)
			v = load_index(indices + (size_t)key * (wide ? 8 : 4), wide);
		const bool ok = (uint64_t)v < slots;

		bad += !ok && v != -1;
		nxt = ok ? (int64_t)((uint64_t)v * stride) : -1;
	}
};

/* Starts the copies of block @block into @stage; empty keys are written as zeros. */
template <class C>
__device__ __forceinline__ void load_block(shared<C> &sm, selection<C> &sel, const uint8_t *cache,
					   uint32_t block, uint32_t stage, uint32_t row_chunks,
					   int warp, int lane)
{
	const uint32_t sub = block % C::SET;

	if (sub == 0) {
		sel.cur = sel.nxt;
		sel.fetch(block / C::SET + 1, warp, lane);
	}
	const uint32_t mask = __ballot_sync(~0u, sel.cur >= 0) >> (sub * C::KEYS_W);

	if (lane == 0)
		sm.valid[stage][warp] = (uint8_t)(mask & ((1u << C::KEYS_W) - 1));
	const uint32_t base = smem_addr(sm.stage[stage][warp * C::KEYS_W]);

	if constexpr (C::EXACT) {
		static_assert(C::KEYS_W * C::CHUNKS % 32 == 0, "whole warps");
#pragma unroll
		for (int i = 0; i < C::KEYS_W * C::CHUNKS / 32; i++) {
			const uint32_t id = i * 32 + lane, key = id / C::CHUNKS;
			const uint32_t c = id - key * C::CHUNKS;
			const int64_t off = __shfl_sync(~0u, sel.cur, sub * C::KEYS_W + key);
			const uint8_t *src = off >= 0 ? cache + off + c * 16 : cache;

			cp_async16(base + key * C::ROW + c * 16, src, off >= 0 ? 16 : 0);
		}
	} else {
		for (uint32_t key = 0; key < C::KEYS_W; key++) {
			const int64_t off = __shfl_sync(~0u, sel.cur, sub * C::KEYS_W + key);

			for (uint32_t c = lane; c < row_chunks; c += 32) {
				const uint8_t *src = off >= 0 ? cache + off + c * 16 : cache;

				cp_async16(base + key * C::ROW + c * 16, src, off >= 0 ? 16 : 0);
			}
		}
	}
}

/* This warp's part of S: a quarter of the dims, half of the keys. */
template <class C>
__device__ __forceinline__ void scores(shared<C> &sm, const uint32_t (&qf)[C::KSTEPS][4],
				       uint32_t stage, int dq, int kh, int lane)
{
	float s[C::NT][4] = {};
	const uint32_t base = smem_addr(sm.stage[stage][kh * (C::KB / 2)]);

	if constexpr (C::FP8) {
		/* One 16-byte chunk is one k step; a matrix is 8 keys of it. */
#pragma unroll
		for (int ks = 0; ks < C::KSTEPS; ks += C::NT == 4 ? 1 : 2) {
			const int extra = C::NT == 4 ? 0 : lane >> 4;
			const int row = C::NT == 4 ? lane : lane & 15;
			/* The last step of an odd count reads its chunk twice. */
			const int chunk = dq * C::KSTEPS + min(ks + extra, C::KSTEPS - 1);
			uint32_t b[4];

			ldmatrix4(b, base + row * C::ROW + chunk * 16);
#pragma unroll
			for (int i = 0; i < 4; i++) {
				const int nt = C::NT == 4 ? i : i & 1, k = ks + (C::NT == 4 ? 0 : i >> 1);

				if (k < C::KSTEPS)
					mma16816<false>(s[nt], qf[k], e4m3x2_to_f16x2(b[i] & 0xffff),
							e4m3x2_to_f16x2(b[i] >> 16));
			}
		}
	} else {
#pragma unroll
		for (int ks = 0; ks < C::KSTEPS; ks++) {
#pragma unroll
			for (int nt = 0; nt < C::NT; nt += 2) {
				const int row = nt * 8 + (lane >> 4) * 8 + (lane & 7);
				const int chunk = (dq * C::KSTEPS + ks) * 2 + ((lane >> 3) & 1);
				uint32_t b[4];

				ldmatrix4(b, base + row * C::ROW + chunk * 16);
				mma16816<C::BF16>(s[nt], qf[ks], b[0], b[1]);
				mma16816<C::BF16>(s[nt + 1], qf[ks], b[2], b[3]);
			}
		}
	}
	const int g = lane >> 2, l4 = lane & 3;

#pragma unroll
	for (int nt = 0; nt < C::NT; nt++) {
		const int col = kh * (C::KB / 2) + nt * 8 + 2 * l4;

		*(float2 *)&sm.part[dq][g][col] = make_float2(s[nt][0], s[nt][1]);
		*(float2 *)&sm.part[dq][g + 8][col] = make_float2(s[nt][2], s[nt][3]);
	}
}

/* Thread (head, KEYS_T keys): sums the quarters, updates running max and sum, writes P and alpha. */
template <class C>
__device__ __forceinline__ void softmax(shared<C> &sm, uint32_t stage, float scale_log2, float &m,
					float &l, int t)
{
	const int row = t >> 4, key = (t & 15) * C::KEYS_T;
	const uint32_t valid = sm.valid[stage][key / C::KEYS_W] >> (key % C::KEYS_W);
	float s[C::KEYS_T] = {};

#pragma unroll
	for (int dq = 0; dq < 4; dq++) {
#pragma unroll
		for (int i = 0; i < C::KEYS_T; i += 2) {
			const float2 v = *(const float2 *)&sm.part[dq][row][key + i];

			s[i] += v.x;
			s[i + 1] += v.y;
		}
	}
	float top = -CUDART_INF_F;

#pragma unroll
	for (int i = 0; i < C::KEYS_T; i++) {
		s[i] = (valid >> i) & 1 ? s[i] * scale_log2 : -CUDART_INF_F;
		top = fmaxf(top, s[i]);
	}
#pragma unroll
	for (int d = 8; d; d >>= 1)
		top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
	top = fmaxf(top, m);
	/* Nothing but holes so far: any finite base gives p = 0. */
	const float base = top == -CUDART_INF_F ? 0.0f : top;
	const float alpha = exp2f(m - base);
	float sum = 0.0f;

	m = top;
#pragma unroll
	for (int i = 0; i < C::KEYS_T; i++) {
		s[i] = exp2f(s[i] - base);
		sum += s[i];
	}
	l = l * alpha + sum;
#pragma unroll
	for (int i = 0; i < C::KEYS_T; i += 2) {
		uint32_t pair;

		if constexpr (C::BF16) {
			const __nv_bfloat162 b = __floats2bfloat162_rn(s[i], s[i + 1]);

			pair = *(const uint32_t *)&b;
		} else {
			const __half2 h = __floats2half2_rn(s[i], s[i + 1]);

			pair = *(const uint32_t *)&h;
		}
		*(uint32_t *)&sm.p[row][(key + i) * 2] = pair;
	}
	if ((t & 15) == 0)
		sm.alpha[row] = alpha;
}

/* O = alpha O + P V for this warp's dims. Tile pairs of e4m3 hold even and odd dims. */
template <class C>
__device__ __forceinline__ void values(shared<C> &sm, float (&o)[C::VT][4], uint32_t stage, int warp,
				       int lane)
{
	const float a0 = sm.alpha[lane >> 2], a1 = sm.alpha[(lane >> 2) + 8];

#pragma unroll
	for (int vt = 0; vt < C::VT; vt++) {
		o[vt][0] *= a0;
		o[vt][1] *= a0;
		o[vt][2] *= a1;
		o[vt][3] *= a1;
	}
	const uint32_t pbase = smem_addr(sm.p) + (lane & 15) * C::PROW + (lane >> 4) * 16;

#pragma unroll
	for (int ks = 0; ks < C::KB / 16; ks++) {
		uint32_t p[4];

		ldmatrix4(p, pbase + ks * 32);
		const uint32_t base = smem_addr(sm.stage[stage][ks * 16 + (lane & 15)]);

		if constexpr (C::FP8) {
			static_assert(C::VW % 16 == 0, "whole chunks");
#pragma unroll
			for (int c = 0; c < C::VW / 16; c += 2) {
				/* Two chunks a load; the last of an odd count is read twice. */
				const int chunk = min(c + (lane >> 4), C::VW / 16 - 1);
				uint32_t b[4];

				ldmatrix4_trans(b, base + warp * C::VW + chunk * 16);
#pragma unroll
				for (int i = 0; i < 4 && c + i / 2 < C::VW / 16; i += 2) {
					const uint32_t l0 = e4m3x2_to_f16x2(b[i] & 0xffff);
					const uint32_t h0 = e4m3x2_to_f16x2(b[i] >> 16);
					const uint32_t l1 = e4m3x2_to_f16x2(b[i + 1] & 0xffff);
					const uint32_t h1 = e4m3x2_to_f16x2(b[i + 1] >> 16);
					const int vt = (c + i / 2) * 2;

					mma16816<false>(o[vt], p, __byte_perm(l0, h0, 0x5410),
							__byte_perm(l1, h1, 0x5410));
					mma16816<false>(o[vt + 1], p, __byte_perm(l0, h0, 0x7632),
							__byte_perm(l1, h1, 0x7632));
				}
			}
		} else {
#pragma unroll
			for (int vt = 0; vt < C::VT; vt += 2) {
				uint32_t b[4];

				ldmatrix4_trans(b, base + (warp * C::VW + vt * 8 + (lane >> 4) * 8) * 2);
				mma16816<C::BF16>(o[vt], p, b[0], b[1]);
				mma16816<C::BF16>(o[vt + 1], p, b[2], b[3]);
			}
		}
	}
}

/* O fragments to shared memory as [16][OROW] f32. */
template <class C>
__device__ __forceinline__ void spill_o(float *osm, const float (&o)[C::VT][4], int warp, int lane)
{
	const int g = lane >> 2, l4 = lane & 3;

#pragma unroll
	for (int vt = 0; vt < C::VT; vt += C::FP8 ? 2 : 1) {
#pragma unroll
		for (int r = 0; r < 2; r++) {
			float *row = osm + (g + r * 8) * C::OROW + warp * C::VW + vt * 8;

			if constexpr (C::FP8)
				*(float4 *)(row + 4 * l4) =
					make_float4(o[vt][2 * r], o[vt + 1][2 * r], o[vt][2 * r + 1],
						    o[vt + 1][2 * r + 1]);
			else
				*(float2 *)(row + 2 * l4) = make_float2(o[vt][2 * r], o[vt][2 * r + 1]);
		}
	}
}

/* Four adjacent results. */
__device__ __forceinline__ void store_o4(uint8_t *row, uint32_t dtype, uint32_t d, float4 v)
{
	if (dtype == EXL3_F32) {
		*(float4 *)(row + (size_t)d * 4) = v;
	} else if (dtype == EXL3_BF16) {
		const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y);
		const __nv_bfloat162 b = __floats2bfloat162_rn(v.z, v.w);

		*(uint2 *)(row + (size_t)d * 2) =
			make_uint2(*(const uint32_t *)&a, *(const uint32_t *)&b);
	} else {
		const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);

		*(uint2 *)(row + (size_t)d * 2) =
			make_uint2(*(const uint32_t *)&a, *(const uint32_t *)&b);
	}
}

/* Total max, sum and weights of @n partial results; one thread per head row. */
template <int TILE_H, class LOAD>
__device__ __forceinline__ void merge_weights(float (*weight)[TILE_H], float (&total)[2][TILE_H],
					      int n, int row, LOAD load)
{
	float m = -CUDART_INF_F, l = 0.0f;

	for (int i = 0; i < n; i++)
		m = fmaxf(m, load(i, 0));
	const float base = m == -CUDART_INF_F ? 0.0f : m;

	for (int i = 0; i < n; i++) {
		const float w = exp2f(load(i, 0) - base);

		l += w * load(i, 1);
		if (weight)
			weight[i][row] = w;
	}
	total[0][row] = m;
	total[1][row] = l;
}

__device__ __forceinline__ void fma4(float4 &acc, float w, float4 v)
{
	acc.x += w * v.x;
	acc.y += w * v.y;
	acc.z += w * v.z;
	acc.w += w * v.w;
}

/* Where the results of an item go. */
struct target {
	uint8_t *o; /* first head of the tile */
	float *lse; /* or NULL */
	uint32_t dtype, heads, value_dim;
	float kv_scale;
};

/* sum / l to the caller's memory; @unit counts groups of four dims over [16][VP]. */
template <class C>
__device__ __forceinline__ void finish(const target &to, int unit, float4 v, float l)
{
	const uint32_t row = unit / (C::VP / 4), d = unit % (C::VP / 4) * 4;
	const float f = l == 0.0f ? 0.0f : to.kv_scale / l;
	const uint32_t esize = to.dtype == EXL3_F32 ? 4 : 2;

	if (row < to.heads && d < to.value_dim)
		store_o4(to.o + (size_t)row * to.value_dim * esize, to.dtype, d,
			 make_float4(v.x * f, v.y * f, v.z * f, v.w * f));
}

__device__ __forceinline__ float natural_lse(float m, float l)
{
	return l == 0.0f ? -CUDART_INF_F : (m + log2f(l)) * 0.69314718055994531f;
}

__device__ __forceinline__ void sync_mergers()
{
	asm volatile("bar.sync 1, %0;" ::"n"(MERGERS) : "memory");
}

/* Merges the CTAs of a cluster, then the clusters of an item. Rank r owns a slice of the units. */
template <class C>
__device__ __forceinline__ void merge(merge_shared<C::TILE_H> &sm, float *osm, const params &p,
				      const target &to, uint32_t item, uint32_t split, int t)
{
	constexpr int TILE_H = C::TILE_H, THREADS = MERGERS;
	const uint32_t ranks = p.cluster, rank = split % ranks, group = split / ranks;
	const uint32_t groups = p.splits / ranks;
	constexpr int UNITS = TILE_H * C::VP / 4;
	const int first = UNITS * rank / ranks, last = UNITS * (rank + 1) / ranks;

	if (ranks > 1) {
		cluster_arrive();
		cluster_wait();
	} else {
		sync_mergers();
	}
	if (t < TILE_H)
		merge_weights<TILE_H>(sm.weight, sm.total, ranks, t, [&](int i, int k) {
			return cluster_load(cluster_map(smem_addr(&sm.ml[k][t]), i));
		});
	sync_mergers();
	float *part = p.part + ((size_t)item * groups + group) * UNITS * 4;

	for (int u = first + t; u < last; u += THREADS) {
		const int row = u / (C::VP / 4), d = u % (C::VP / 4) * 4;
		const uint32_t addr = smem_addr(osm + row * C::OROW + d);
		float4 acc = make_float4(0, 0, 0, 0);

#pragma unroll 4
		for (uint32_t i = 0; i < ranks; i++)
			fma4(acc, sm.weight[i][row], cluster_load4(cluster_map(addr, i)));
		if (groups == 1)
			finish<C>(to, u, acc, sm.total[1][row]);
		else
			__stcg((float4 *)part + u, acc);
	}
	if (ranks > 1)
		cluster_arrive(); /* waited for below: peers may still read our O */
	if (groups == 1) {
		if (rank == 0 && to.lse && t < (int)to.heads)
			to.lse[t] = natural_lse(sm.total[0][t], sm.total[1][t]);
	} else {
		float *ml = p.part_ml + (size_t)item * groups * ranks * TILE_H * 2;

		if (t < TILE_H * 2)
			__stcg(ml + (group * ranks + rank) * TILE_H * 2 + t, sm.total[t & 1][t >> 1]);
		__threadfence();
		sync_mergers();
		if (t == 0) {
			uint32_t *counter = p.counters + item * ranks + rank;

			sm.last = atomicAdd(counter, 1) == groups - 1;
			if (sm.last)
				*counter = 0;
			__threadfence();
		}
		sync_mergers();
		if (sm.last) {
			if (t < TILE_H)
				merge_weights<TILE_H>(nullptr, sm.total, groups, t, [&](int i, int k) {
					return __ldcg(ml + ((i * ranks + rank) * TILE_H + t) * 2 + k);
				});
			sync_mergers();
			part = p.part + (size_t)item * groups * UNITS * 4;
			for (int u = first + t; u < last; u += THREADS) {
				const int row = u / (C::VP / 4);
				const float m = sm.total[0][row];
				const float base = m == -CUDART_INF_F ? 0.0f : m;
				float4 acc = make_float4(0, 0, 0, 0);

#pragma unroll 4
				for (uint32_t i = 0; i < groups; i++) {
					const float w = exp2f(
						__ldcg(ml + ((i * ranks + rank) * TILE_H + row) * 2) - base);

					fma4(acc, w, __ldcg((const float4 *)part + (size_t)i * UNITS + u));
				}
				finish<C>(to, u, acc, sm.total[1][row]);
			}
			if (rank == 0 && to.lse && t < (int)to.heads)
				to.lse[t] = natural_lse(sm.total[0][t], sm.total[1][t]);
		}
	}
	if (ranks > 1)
		cluster_wait();
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MINCTA) kernel(const __grid_constant__ params p)
{
	extern __shared__ __align__(128) uint8_t smem_raw[];
	shared<C> &sm = *reinterpret_cast<shared<C> *>(smem_raw);
	const int t = threadIdx.x, warp = t >> 5, lane = t & 31, dq = warp & 3, kh = warp >> 2;
	const uint32_t split = blockIdx.x % p.splits, item = blockIdx.x / p.splits;
	const uint32_t tile = item % p.head_tiles, query = item / p.head_tiles;
	uint32_t ei = 0;

	while (ei + 1 < p.nr_entries && query >= p.entries[ei + 1].first)
		ei++;
	const struct exl3_cuda_mla_entry &e = p.entries[ei];
	const uint32_t row = query - e.first;
	const uint32_t dim = C::EXACT ? C::DP : p.dim;
	const uint32_t per = ((e.topk + p.splits - 1) / p.splits + 15) & ~15u;
	selection<C> sel;

	sel.indices = (const uint8_t *)e.indices + (size_t)row * e.indices_stride;
	sel.slots = e.slots;
	sel.stride = e.cache_stride;
	sel.begin = min(split * per, e.topk);
	sel.end = min(sel.begin + per, e.topk);
	sel.wide = e.indices_dtype == EXL3_I64;
	sel.bad = 0;
	const uint32_t blocks = (sel.end - sel.begin + C::KB - 1) / C::KB;
	const uint8_t *cache = (const uint8_t *)e.cache;

	sel.fetch(0, warp, lane);
	if constexpr (!C::EXACT) {
		/* Columns past dim are never loaded; zeros there keep NaN out of S. */
		for (uint32_t i = t; i < sizeof(sm.stage) / 16; i += C::THREADS)
			((uint4 *)sm.stage)[i] = make_uint4(0, 0, 0, 0);
		__syncthreads();
	}
	const uint32_t row_chunks = dim * C::ESIZE / 16;

#pragma unroll
	for (int s = 0; s < C::STAGES - 1; s++) {
		if ((uint32_t)s < blocks)
			load_block<C>(sm, sel, cache, s, s, row_chunks, warp, lane);
		cp_async_commit();
	}
	const uint32_t q_esize = e.q_dtype == EXL3_F32 ? 4 : 2;
	const uint32_t heads = min(p.heads - tile * C::TILE_H, (uint32_t)C::TILE_H);
	uint32_t qf[C::KSTEPS][4];

	load_q<C>(qf, (const uint8_t *)e.q + (size_t)row * e.q_stride +
			      (size_t)tile * C::TILE_H * dim * q_esize,
		  e.q_dtype, heads, dim, dq, lane);
	const float scale_log2 = e.scale * e.kv_scale * 1.4426950408889634f;
	float o[C::VT][4] = {};
	float m = -CUDART_INF_F, l = 0.0f;
	uint32_t stage = 0, fill = C::STAGES - 1;

	for (uint32_t j = 0; j < blocks; j++) {
		cp_async_wait<C::STAGES - 2>();
		__syncthreads(); /* block j is there; block j - 1 has been read by all */
		if (j + C::STAGES - 1 < blocks)
			load_block<C>(sm, sel, cache, j + C::STAGES - 1, fill, row_chunks, warp, lane);
		cp_async_commit();
		scores<C>(sm, qf, stage, dq, kh, lane);
		__syncthreads();
		softmax<C>(sm, stage, scale_log2, m, l, t);
		__syncthreads();
		values<C>(sm, o, stage, warp, lane);
		stage = stage + 1 == C::STAGES ? 0 : stage + 1;
		fill = fill + 1 == C::STAGES ? 0 : fill + 1;
	}
#pragma unroll
	for (int d = 8; d; d >>= 1)
		l += __shfl_xor_sync(~0u, l, d);
	if ((t & 15) == 0) {
		sm.merge.ml[0][t >> 4] = m;
		sm.merge.ml[1][t >> 4] = l;
	}
	if (tile == 0 && e.skipped) {
		const uint32_t bad = __reduce_add_sync(~0u, sel.bad);

		if (lane == 0 && bad)
			atomicAdd(e.skipped, bad);
	}
	cp_async_wait<0>();
	__syncthreads(); /* the stages become O */
	spill_o<C>((float *)sm.stage, o, warp, lane);
	const uint32_t o_esize = e.o_dtype == EXL3_F32 ? 4 : 2;
	const uint32_t value_dim = C::EXACT ? C::VP : p.value_dim;
	target to;

	to.o = (uint8_t *)e.o + (size_t)row * e.o_stride +
	       (size_t)tile * C::TILE_H * value_dim * o_esize;
	to.lse = e.lse ? e.lse + (size_t)row * p.heads + tile * C::TILE_H : nullptr;
	to.dtype = e.o_dtype;
	to.heads = heads;
	to.value_dim = value_dim;
	to.kv_scale = e.kv_scale;
	merge<C>(sm.merge, (float *)sm.stage, p, to, item, split, t);
}

/* What mla.cu knows of a compiled kernel. */
struct instance {
	const void *fn;
	size_t smem;
	int cache_dtype, dim_cap, value_cap, tile_h, threads;
	bool exact;
	/* For plan(): percent of the time that HBM takes for a key; start and end of a CTA, in keys. */
	uint32_t key_cost, start_cost;
};

/* mla.cu; also for the benchmark's own variants. */
bool supports(const instance &in, const struct exl3_cuda_mla *a);
size_t ws_bytes(const instance &in, const struct exl3_cuda_mla *a);
int launch(const instance &in, const struct exl3_cuda_mla *a, cudaStream_t stream);

} // namespace exl3_mla

/* Defines exl3_mla::NAME, an instance. */
#define EXL3_MLA_INSTANTIATE(name, cache, dp, vp, kb, stages, mincta, exact)                         \
	namespace exl3_mla                                                                           \
	{                                                                                            \
	using name##_config = config<cache, dp, vp, kb, stages, mincta, exact>;                      \
	extern const instance name;                                                                  \
	const instance name = {(const void *)kernel<name##_config>, sizeof(shared<name##_config>),   \
			       cache, dp, vp, 16, 256, exact, 100, 64};                                            \
	}

#endif
