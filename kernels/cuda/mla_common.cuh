/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla_common.cuh - what all MLA decode kernels share: parameters, the checked selection, the merge.
 *
 *   s[h, i] = scale * q[h, :] . kv[i, :]      p = exp(s - m)      o[h, :] = sum_i p[h, i] kv[i, 0:Dv] / sum_i p
 *
 * A work item is (query, TILE_H heads). Its keys are cut into `splits` equal ranges, one CTA each.
 * A cluster of S CTAs merges through distributed shared memory: the O of a CTA is cut into chunks of
 * 16 dims, rank r owns chunks with chunk * S / CHUNKS == r, everybody pushes its part of a chunk to the
 * owner. Several clusters (splits = S * groups) of one item merge in the workspace, by whichever CTA of
 * a rank arrives last. The order of summation is fixed: by rank, then by group.
 */
#ifndef EXL3_KERNELS_CUDA_MLA_COMMON_CUH
#define EXL3_KERNELS_CUDA_MLA_COMMON_CUH

#include "kernels/cuda/mla.h"
#include "kernels/cuda/mla_ptx.cuh"

#include <math_constants.h>

namespace exl3_mla
{

constexpr int CLUSTER_MAX = 16;
constexpr int MERGERS = 256; /* threads that compute and merge, in every kernel: named barrier 1 */

struct params {
	/* First, so that one constant line holds what every thread needs at once. */
	uint32_t nr_entries, heads, dim, value_dim;
	uint32_t head_tiles, splits, cluster, groups, most;
	uint32_t *counters; /* [items, cluster], zero; left zero */
	float *part;        /* [items, groups, TILE_H * VP] in the order of merge units */
	float *part_ml;     /* [items, groups, cluster, 2, TILE_H] max and sum */
	uint8_t first_chunk[CLUSTER_MAX + 1]; /* of each rank; CHUNKS past the last */
	struct exl3_cuda_mla_entry entries[EXL3_CUDA_MLA_ENTRIES_MAX];
};

__device__ __forceinline__ void sync_mergers()
{
	asm volatile("bar.sync 1, %0;" ::"n"(MERGERS) : "memory");
}

/* Two floats as a pair of the MMA type. */
template <bool BF16> __device__ __forceinline__ uint32_t pack2(float x, float y)
{
	if constexpr (BF16) {
		const __nv_bfloat162 b = __floats2bfloat162_rn(x, y);

		return *(const uint32_t *)&b;
	} else {
		const __half2 h = __floats2half2_rn(x, y);

		return *(const uint32_t *)&h;
	}
}

/* Eight adjacent elements of q, from @d on, in the MMA type. */
template <bool BF16>
__device__ __forceinline__ uint4 load_q8(const uint8_t *row, uint32_t dtype, uint32_t d)
{
	if (dtype == EXL3_F32) {
		const float4 a = *(const float4 *)(row + (size_t)d * 4);
		const float4 b = *(const float4 *)(row + (size_t)d * 4 + 16);

		return make_uint4(pack2<BF16>(a.x, a.y), pack2<BF16>(a.z, a.w),
				  pack2<BF16>(b.x, b.y), pack2<BF16>(b.z, b.w));
	}
	const uint4 raw = *(const uint4 *)(row + (size_t)d * 2);

	if (dtype == (BF16 ? EXL3_BF16 : EXL3_F16))
		return raw;
	uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};

#pragma unroll
	for (uint32_t &x : w) {
		const float2 v = BF16 ? __half22float2(*(const __half2 *)&x)
				      : __bfloat1622float2(*(const __nv_bfloat162 *)&x);

		x = pack2<BF16>(v.x, v.y);
	}
	return make_uint4(w[0], w[1], w[2], w[3]);
}

/* 2^x, to two units in the last place. */
__device__ __forceinline__ float exp2_fast(float x)
{
	float y;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

constexpr uint32_t NO_ROW = ~0u;

/*
 * A producer warp's view of the selection: where the next rows lie, checked, in registers. C gives KB
 * keys of a block, KEYS_W of them for this warp, SET blocks of them in 32 lanes.
 */
template <class C> struct selection {
	const uint8_t *indices; /* of this query */
	uint64_t pages;
	uint32_t stride16;   /* of the cache, in units of 16 bytes */
	uint32_t begin, end; /* keys of this CTA */
	uint32_t shift;      /* a page has 1 << shift rows */
	bool wide;
	uint32_t cur,
		nxt; /* lane l: row offset / 16 of key (block l / KEYS_W, l % KEYS_W), or NO_ROW */
	uint32_t bad;

	__device__ __forceinline__ void init(const struct exl3_cuda_mla_entry &e, uint32_t row,
					     uint32_t first, uint32_t last)
	{
		indices = (const uint8_t *)e.indices +
			  (size_t)(e.table_queries == 1 ? row : (row + e.table_first) / e.table_queries) * e.indices_stride;
		shift = e.page_shift;
		pages = e.slots >> shift;
		stride16 = (uint32_t)(e.cache_stride / 16);
		begin = first;
		end = last;
		wide = e.indices_dtype == EXL3_I64;
		bad = 0;
	}

	__device__ __forceinline__ void fetch(uint32_t set, int warp, int lane)
	{
		const uint32_t key = begin + (set * C::SET + lane / C::KEYS_W) * C::KB +
				     warp * C::KEYS_W + lane % C::KEYS_W;
		int64_t v = -1;

		if (key < end)
			v = load_index(indices + (size_t)(key >> shift) * (wide ? 8 : 4), wide);
		const bool ok = (uint64_t)v < pages;
		const uint32_t in = key & ((1u << shift) - 1);

		bad += !ok && v != -1 && in == 0;
		nxt = ok ? (((uint32_t)v << shift) + in) * stride16 : NO_ROW;
	}

	/* Steps to @block and returns which of this warp's keys exist. */
	__device__ __forceinline__ uint32_t advance(uint32_t block, int warp, int lane)
	{
		const uint32_t sub = block % C::SET;

		if (sub == 0) {
			cur = nxt;
			fetch(block / C::SET + 1, warp, lane);
		}
		return __ballot_sync(~0u, cur != NO_ROW) >> (sub * C::KEYS_W);
	}

	/* Row of this warp's key @k of @block; bytes to copy per chunk, 0 (zeros) where it does not exist. */
	__device__ __forceinline__ const uint8_t *row(const uint8_t *cache, uint32_t block,
						      uint32_t k, uint32_t &bytes) const
	{
		const uint32_t off16 = __shfl_sync(~0u, cur, block % C::SET * C::KEYS_W + k);

		bytes = off16 == NO_ROW ? 0 : 16;
		return cache + (off16 == NO_ROW ? 0 : (size_t)off16 * 16);
	}

	__device__ __forceinline__ void report(const struct exl3_cuda_mla_entry &e, uint32_t tile,
					       int lane) const
	{
		if (tile || !e.skipped)
			return;
		const uint32_t sum = __reduce_add_sync(~0u, bad);

		if (lane == 0 && sum)
			atomicAdd(e.skipped, sum);
	}
};

/* The keys of a CTA. */
struct extent {
	uint32_t begin, end;
	uint32_t bad; /* 1: the length was out of range */
};

/*
 * All threads of the CTA; @shared is theirs until the next barrier. A length is read by one of them, as its
 * owner may change it at any time and all must agree on the number of blocks.
 */
__device__ __forceinline__ extent extent_of(const params &p, const struct exl3_cuda_mla_entry &e, uint32_t row,
					    uint32_t split, float &shared)
{
	uint32_t keys = e.topk, each = e.split_keys;
	extent x;

	x.bad = 0;
	if (e.lengths) {
		if (threadIdx.x == 0)
			shared = __int_as_float((int32_t)load_index(e.lengths + row, false));
		__syncthreads();
		const int32_t length = __float_as_int(shared);

		keys = (uint32_t)min(max(length, 0), (int32_t)e.topk);
		x.bad = length < 0 || (uint32_t)length > e.topk;
		each = ((keys + p.splits - 1) / p.splits + 15) & ~15u;
	}
	x.begin = min(split * each, keys);
	x.end = min(x.begin + each, keys);
	return x;
}

/* Which entry a query of the launch belongs to. */
__device__ __forceinline__ uint32_t entry_of(const params &p, uint32_t query)
{
	uint32_t i = 0;

	while (i + 1 < p.nr_entries && query >= p.entries[i + 1].first)
		i++;
	return i;
}

/* Where the results of an item go. */
struct target {
	uint8_t *o; /* first head of the tile */
	float *lse; /* or NULL */
	uint32_t dtype, heads, value_dim;
	float kv_scale;

	__device__ __forceinline__ void init(const params &p, const struct exl3_cuda_mla_entry &e,
					     uint32_t row, uint32_t tile, uint32_t tile_h)
	{
		dtype = e.o_dtype;
		heads = min(p.heads - tile * tile_h, tile_h);
		value_dim = p.value_dim;
		kv_scale = e.kv_scale;
		o = (uint8_t *)e.o + (size_t)row * e.o_stride +
		    (size_t)tile * tile_h * value_dim * (dtype == EXL3_F32 ? 4 : 2);
		lse = e.lse ? e.lse + (size_t)row * p.heads + tile * tile_h : nullptr;
	}

	__device__ __forceinline__ float factor(float l) const
	{
		return l == 0.0f ? 0.0f : __fdividef(kv_scale, l);
	}

	__device__ __forceinline__ void store2(uint32_t row, uint32_t d, float x, float y) const
	{
		if (row >= heads || d >= value_dim)
			return;
		const size_t i = (size_t)row * value_dim + d;

		if (dtype == EXL3_F32)
			*(float2 *)(o + i * 4) = make_float2(x, y);
		else
			*(uint32_t *)(o + i * 2) =
				dtype == EXL3_BF16 ? pack2<true>(x, y) : pack2<false>(x, y);
	}

	__device__ __forceinline__ void store4(uint32_t row, uint32_t d, float4 v) const
	{
		if (row >= heads || d >= value_dim)
			return;
		const size_t i = (size_t)row * value_dim + d;

		if (dtype == EXL3_F32)
			*(float4 *)(o + i * 4) = v;
		else if (dtype == EXL3_BF16)
			*(uint2 *)(o + i * 2) =
				make_uint2(pack2<true>(v.x, v.y), pack2<true>(v.z, v.w));
		else
			*(uint2 *)(o + i * 2) =
				make_uint2(pack2<false>(v.x, v.y), pack2<false>(v.z, v.w));
	}

	__device__ __forceinline__ void store_lse(uint32_t row, float m, float l) const
	{
		if (lse && row < heads)
			lse[row] =
				l == 0.0f ? -CUDART_INF_F : (m + __log2f(l)) * 0.69314718055994531f;
	}
};

/* Base of exponents: any finite number where nothing but holes was seen. */
__device__ __forceinline__ float exponent_base(float m)
{
	return m == -CUDART_INF_F ? 0.0f : m;
}

__device__ __forceinline__ void fma4(float4 &acc, float w, float4 v)
{
	acc.x += w * v.x;
	acc.y += w * v.y;
	acc.z += w * v.z;
	acc.w += w * v.w;
}

/* What merging needs beside the received O; the same place in every CTA of a cluster. */
template <int TILE_H> struct merge_shared {
	float ml[2][CLUSTER_MAX][TILE_H]; /* max (log2 units) and sum, by rank */
	uint32_t last;
};

/* The merge of one CTA. Units of four dims in the order [chunk of 16 dims][row][4]. */
template <int TILE_H, int VP> struct merger {
	static constexpr int CHUNKS = VP / 16, CHUNK_FLOATS = TILE_H * 16, UNITS = TILE_H * VP / 4;

	merge_shared<TILE_H> &sm;
	float *recv;  /* [ranks][most chunks of a rank][CHUNK_FLOATS], local */
	uint32_t bar; /* local mbarrier: everything has arrived */
	const params &p;
	uint32_t item, rank, ranks, group, groups, most; /* most: chunks of a rank */

	__device__ __forceinline__ merger(merge_shared<TILE_H> &s, float *r, uint32_t b,
					  const params &ps)
	    : sm(s), recv(r), bar(b), p(ps), item(blockIdx.x), rank(cluster_rank()),
	      ranks(ps.cluster), group(ps.groups == 1 ? 0 : blockIdx.y / ps.cluster),
	      groups(ps.groups), most(ps.most)
	{
	}

	/* Bytes of recv that any number of ranks (1 to 8, 16) needs. */
	__host__ __device__ static constexpr size_t recv_bytes()
	{
		size_t most = 0;

		for (int s = 1; s <= CLUSTER_MAX; s = s == 8 ? 16 : s + 1) {
			const size_t n = (size_t)s * ((CHUNKS + s - 1) / s) * CHUNK_FLOATS * 4;

			most = n > most ? n : most;
		}
		return most;
	}

	__device__ __forceinline__ uint32_t first_chunk(uint32_t r) const
	{
		return p.first_chunk[r];
	}

	/* One thread, at the start: readies the mbarrier for what all ranks will push. */
	static __device__ __forceinline__ void expect(uint32_t mbar, const params &p)
	{
		const uint32_t r = cluster_rank();

		mbar_init(mbar, 1);
		mbar_expect(mbar,
			    p.cluster *
				    ((p.first_chunk[r + 1] - p.first_chunk[r]) * CHUNK_FLOATS +
				     2 * TILE_H) *
				    4);
	}

	/* One thread per row, and for each rank: this CTA's max and sum. */
	__device__ __forceinline__ void push_ml(uint32_t to, int row, float m, float l) const
	{
		const uint32_t b = cluster_map(bar, to);

		push1(cluster_map(smem_addr(&sm.ml[0][rank][row]), to), b, m);
		push1(cluster_map(smem_addr(&sm.ml[1][rank][row]), to), b, l);
	}

	/* Where this CTA's @chunk goes: its address at the owner, and the owner's mbarrier. */
	__device__ __forceinline__ uint32_t slot(uint32_t chunk, uint32_t &b) const
	{
		const uint32_t owner = chunk * ranks / CHUNKS;

		b = cluster_map(bar, owner);
		return cluster_map(smem_addr(recv), owner) +
		       (rank * most + chunk - first_chunk(owner)) * (CHUNK_FLOATS * 4);
	}

	/* After all pushes of this CTA. */
	__device__ __forceinline__ void finish(const target &to, int t) const
	{
#if EXL3_MLA_CLUSTERS
		mbar_wait(bar, 0);
#else
		sync_mergers();
#endif
		const uint32_t c0 = first_chunk(rank);
		const int units = (int)(first_chunk(rank + 1) - c0) * (CHUNK_FLOATS / 4);
		float4 *part =
			(float4 *)p.part + (size_t)item * groups * UNITS + c0 * (CHUNK_FLOATS / 4);
		float *ml = p.part_ml + ((size_t)item * groups * ranks + rank) * 2 * TILE_H;

#pragma unroll 1
		for (int u = t; u < units; u += MERGERS) {
			const int row = u % (CHUNK_FLOATS / 4) / 4;
			const bool first = u < CHUNK_FLOATS / 4 && u % 4 == 0; /* one per row */
			const float *src = recv + u * 4;
			const uint32_t step = most * CHUNK_FLOATS;
			float m, l;
			const float4 v = sum(
				ranks, m, l, [&](uint32_t k) { return sm.ml[0][k][row]; },
				[&](uint32_t k) { return sm.ml[1][k][row]; },
				[&](uint32_t k) { return *(const float4 *)(src + k * step); });

			if (groups == 1) {
				store(to, c0, u, v, m, l, first);
			} else {
				__stcg(part + (size_t)group * UNITS + u, v);
				if (first) {
					__stcg(ml + (size_t)group * ranks * 2 * TILE_H + row, m);
					__stcg(ml + (size_t)group * ranks * 2 * TILE_H + TILE_H +
						       row,
					       l);
				}
			}
		}
		if (groups > 1)
			merge_groups(to, c0, units, part, ml, t);
	}

      private:
	/* Weighted sum of @n results, in order, and their total max and sum. */
	template <class MAX, class SUM, class VALUE>
	static __device__ __forceinline__ float4 sum(uint32_t n, float &m, float &l, MAX max_of,
						     SUM sum_of, VALUE value_of)
	{
		float4 acc = make_float4(0, 0, 0, 0);

		m = -CUDART_INF_F;
		l = 0.0f;
#pragma unroll 1
		for (uint32_t i = 0; i < n; i += 4) {
#pragma unroll
			for (uint32_t k = i; k < i + 4; k++)
				m = fmaxf(m, k < n ? max_of(k) : -CUDART_INF_F);
		}
		const float base = exponent_base(m);

#pragma unroll 1
		for (uint32_t i = 0; i < n; i += 4) {
			float w[4], part[4];
			float4 v[4];

#pragma unroll
			for (uint32_t k = 0; k < 4; k++) {
				const bool in = i + k < n;

				w[k] = in ? max_of(i + k) : -CUDART_INF_F;
				part[k] = in ? sum_of(i + k) : 0.0f;
				v[k] = in ? value_of(i + k) : make_float4(0, 0, 0, 0);
			}
#pragma unroll
			for (uint32_t k = 0; k < 4; k++) {
				w[k] = exp2_fast(w[k] - base);
				l += w[k] * part[k];
				fma4(acc, w[k], v[k]);
			}
		}
		return acc;
	}

	__device__ __forceinline__ void store(const target &to, uint32_t c0, int u, float4 v,
					      float m, float l, bool first) const
	{
		const int row = u % (CHUNK_FLOATS / 4) / 4;
		const float f = to.factor(l);

		to.store4(row, (c0 + u / (CHUNK_FLOATS / 4)) * 16 + u % 4 * 4,
			  make_float4(v.x * f, v.y * f, v.z * f, v.w * f));
		if (first && rank == 0)
			to.store_lse(row, m, l);
	}

	/* The last CTA of this rank to arrive sums the groups' slices. */
	__device__ __forceinline__ void merge_groups(const target &to, uint32_t c0, int units,
						     const float4 *part, const float *ml,
						     int t) const
	{
		sync_mergers();
		if (t == 0) {
			uint32_t *counter = p.counters + item * ranks + rank;

			/* The barrier before it makes this fence speak for all threads. */
			__threadfence();
			sm.last = atomicAdd(counter, 1) == groups - 1;
			if (sm.last)
				*counter = 0;
			__threadfence();
		}
		sync_mergers();
		if (!sm.last)
			return;
		const uint32_t step = ranks * 2 * TILE_H;

#pragma unroll 1
		for (int u = t; u < units; u += MERGERS) {
			const int row = u % (CHUNK_FLOATS / 4) / 4;
			float m, l;
			const float4 v = sum(
				groups, m, l,
				[&](uint32_t k) { return __ldcg(ml + (size_t)k * step + row); },
				[&](uint32_t k) {
					return __ldcg(ml + (size_t)k * step + TILE_H + row);
				},
				[&](uint32_t k) { return __ldcg(part + (size_t)k * UNITS + u); });

			store(to, c0, u, v, m, l, u < CHUNK_FLOATS / 4 && u % 4 == 0);
		}
	}
};

/* What mla.cu knows of a compiled kernel. */
struct instance {
	const void *fn;
	size_t smem;
	int cache_dtype, dim_cap, value_cap, tile_h, threads;
	bool exact;
	/* For plan(), of one CTA: compute per key, start and end, pushing O through a cluster. */
	float key_ns, start_ns, merge_ns;
};

/* mla.cu; also for the benchmark's own variants. */
bool supports(const instance &in, const struct exl3_cuda_mla *a);
size_t ws_bytes(const instance &in, const struct exl3_cuda_mla *a);
int launch(const instance &in, const struct exl3_cuda_mla *a, cudaStream_t stream);

} // namespace exl3_mla

#endif
