/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla_wide.cuh - sparse MLA decode for 64 heads a CTA with wgmma: many heads or many queries.
 *
 * Formula, work items, split and merge: mla_common.cuh. q [64, D] and two blocks of 64 cache rows
 * lie in shared memory as tiles of 64 rows x 128 bytes (swizzled, see mla_wgmma.cuh). Rows of f16 and bf16 are
 * copied; e4m3 rows become f16 on the way (exact).
 *
 *   warpgroup 0, 1  S[64 x 32 keys each] = Q K^T     m64n32k16, D/16 steps
 *                   O[64 x 256 dims each] += P V     m64n256k16, 4 steps; V = the same rows
 *   warpgroup 2     gathers rows with 16-byte cp.async (or loads, and converts), one block ahead
 *
 *   tensor core  | S(j) |           | P V (j) | S(j+1) |           | P V (j+1) |
 *   warps               | softmax j |                  | softmax   |
 *   copies       | block j + 1                | block j + 2 from the end of P V (j) on
 *
 * The two warpgroups swap row maxima and P through shared memory: one barrier each per block.
 */
#ifndef EXL3_KERNELS_CUDA_MLA_WIDE_CUH
#define EXL3_KERNELS_CUDA_MLA_WIDE_CUH

#include "kernels/cuda/mla_common.cuh"
#include "kernels/cuda/mla_wgmma.cuh"

namespace exl3_mla
{

template <int CACHE, int DP_> struct wide_config {
	static constexpr int DP = DP_, VP = 512, KB = 64, TILE_H = 64, THREADS = 384;
	static constexpr bool CONVERT = CACHE == EXL3_E4M3, BF16 = CACHE == EXL3_BF16;
	static constexpr int TILES = DP / 64; /* of 64 dims */
	static constexpr int TILE_BYTES = 64 * 128;
	static constexpr int CHUNKS = DP * 2 / 16; /* of 16 bytes in a row */
	static constexpr int KEYS_W = KB / 4;      /* keys that a producer warp loads per block */
	static constexpr int SET = 32 / KEYS_W;
	static constexpr int PRODUCER_REGS = CONVERT ? 88 : 72, CONSUMER_REGS = CONVERT ? 208 : 216;
	static_assert(DP % 64 == 0 && CACHE != EXL3_E4M3_656, "tiles of two-byte values");
	static_assert(128 * PRODUCER_REGS + 256 * CONSUMER_REGS <= 65536, "register file");
	using merger_type = merger<TILE_H, VP>;
	static_assert((size_t)(3 * TILES + 1) * TILE_BYTES >=
			      merger_type::recv_bytes() + sizeof(merge_shared<TILE_H>),
		      "the merge reuses q, the row blocks and P");
};

template <class C> struct wide_shared {
	uint8_t q[C::TILES][C::TILE_BYTES];     /* at the end, with kv and p: received O, */
	uint8_t kv[2][C::TILES][C::TILE_BYTES]; /* then merge_shared */
	uint8_t p[C::TILE_BYTES];
	float top[2][2][64]; /* row maxima of a block: parity, warpgroup, row */
	float sum[2][64];    /* warpgroup, row */
	uint64_t full[2], empty[2], merged;
	uint16_t valid[2][4]; /* bit k: key k of that producer warp exists */
};

/* Named barrier 0 is __syncthreads, 1 is sync_mergers(): the 256 consumer threads. */

template <class C>
__device__ __forceinline__ void wide_produce(wide_shared<C> &sm, selection<C> &sel,
					     const uint8_t *cache, uint32_t blocks, int warp,
					     int lane)
{
	const uint32_t empty = smem_addr(sm.empty), full = smem_addr(sm.full);

	for (uint32_t j = 0; j < blocks; j++) {
		const uint32_t slot = j & 1, mask = sel.advance(j, warp, lane);

		if (j >= 2)
			mbar_wait(empty + slot * 8, (j / 2 - 1) & 1);
		if (lane == 0)
			sm.valid[slot][warp] = (uint16_t)mask;
		const uint32_t base = smem_addr(sm.kv[slot]);

#pragma unroll
		for (int r = 0; r < C::KEYS_W; r += 4) {
			/* Eight lanes a row: every step copies a line of it, one per tile. */
			const uint32_t k = r + lane / 8, c = lane % 8, key = warp * C::KEYS_W + k;
			uint32_t bytes;
			const uint8_t *src = sel.row(cache, j, k, bytes) + c * 16;
			const uint32_t dst = base + key * 128 + (c ^ (key & 7)) * 16;

#pragma unroll
			for (int i = 0; i < C::TILES; i++)
				cp_async16(dst + i * C::TILE_BYTES, src + i * 128, bytes);
		}
		cp_async_commit();
		/* At the start both slots are requested before the first is waited for. */
		if (j == 0 && blocks > 1)
			continue;
		if (j == 1) {
			cp_async_wait<1>();
			fence_async_proxy();
			mbar_arrive(full);
		}
		cp_async_wait<0>();
		fence_async_proxy();
		mbar_arrive(full + slot * 8);
	}
}

/* 16 e4m3 values as two chunks of f16. */
__device__ __forceinline__ void wide_convert(uint4 raw, uint4 (&out)[2])
{
	e4m3x4_to_f16x2(raw.x, out[0].x, out[0].y);
	e4m3x4_to_f16x2(raw.y, out[0].z, out[0].w);
	e4m3x4_to_f16x2(raw.z, out[1].x, out[1].y);
	e4m3x4_to_f16x2(raw.w, out[1].z, out[1].w);
}

/* Four rows of a warp, in registers: chunk @lane of the first 32 of each, and what is behind those. */
template <class C> struct wide_batch {
	static constexpr int ROWS = 4;
	static constexpr int TAIL = (C::DP - 512) / 16; /* chunks past 512 values */
	uint4 raw[ROWS], tail; /* tail: lane's chunk, row lane / TAIL */

	__device__ __forceinline__ void load(const selection<C> &sel, const uint8_t *cache, uint32_t block, uint32_t row,
					     int lane)
	{
		uint32_t bytes;

#pragma unroll
		for (int k = 0; k < ROWS; k++) {
			const uint8_t *src = sel.row(cache, block, row + k, bytes);

			raw[k] = make_uint4(0, 0, 0, 0);
			if (bytes)
				raw[k] = __ldg((const uint4 *)src + lane);
		}
		if constexpr (TAIL > 0) {
			const uint8_t *src = sel.row(cache, block, row + lane / TAIL % ROWS, bytes) + 512;

			tail = make_uint4(0, 0, 0, 0);
			if (bytes && lane < ROWS * TAIL)
				tail = __ldg((const uint4 *)src + lane % TAIL);
		}
	}

	__device__ __forceinline__ void store(uint8_t (*kv)[C::TILE_BYTES], uint32_t key, int lane) const
	{
		uint4 out[2];

#pragma unroll
		for (int k = 0; k < ROWS; k++) {
			uint8_t *at = kv[lane / 4] + (key + k) * 128;
			const uint32_t c = lane % 4 * 2, s = (key + k) & 7;

			wide_convert(raw[k], out);
			*(uint4 *)(at + (c ^ s) * 16) = out[0];
			*(uint4 *)(at + ((c + 1) ^ s) * 16) = out[1];
		}
		if constexpr (TAIL > 0) {
			const uint32_t row = key + lane / TAIL % ROWS, c = lane % TAIL, s = row & 7;
			uint8_t *at = kv[C::TILES - 1] + row * 128;

			if (lane < ROWS * TAIL) {
				wide_convert(tail, out);
				*(uint4 *)(at + (2 * c ^ s) * 16) = out[0];
				*(uint4 *)(at + ((2 * c + 1) ^ s) * 16) = out[1];
			}
		}
	}
};

/*
 * Loads go ahead by a batch, past the wait for a free slot. The fence between these stores and wgmma is the
 * reader's, as here it would wait for those loads.
 */
template <class C>
__device__ __forceinline__ void wide_produce_converted(wide_shared<C> &sm, selection<C> &sel, const uint8_t *cache,
						       uint32_t blocks, int warp, int lane)
{
	const uint32_t empty = smem_addr(sm.empty), full = smem_addr(sm.full);
	constexpr int ROWS = wide_batch<C>::ROWS;
	wide_batch<C> batch[2];

	for (uint32_t j = 0; j < blocks; j++) {
		const uint32_t slot = j & 1, mask = sel.advance(j, warp, lane);

		batch[0].load(sel, cache, j, 0, lane);
		if (j >= 2)
			mbar_wait(empty + slot * 8, (j / 2 - 1) & 1);
		if (lane == 0)
			sm.valid[slot][warp] = (uint16_t)mask;
#pragma unroll
		for (int r = 0; r < C::KEYS_W; r += ROWS) {
			if (r + ROWS < C::KEYS_W)
				batch[(r / ROWS + 1) & 1].load(sel, cache, j, r + ROWS, lane);
			batch[r / ROWS & 1].store(sm.kv[slot], warp * C::KEYS_W + r, lane);
		}
		mbar_arrive(full + slot * 8);
	}
}

/* Q to shared memory in the cache's type; heads past the last are zero. */
template <class C>
__device__ __forceinline__ void wide_load_q(wide_shared<C> &sm, const uint8_t *q, uint32_t dtype,
					    uint32_t heads, int t)
{
	const size_t head_bytes = (size_t)C::DP * (dtype == EXL3_F32 ? 4 : 2);

	for (int u = t; u < C::TILE_H * C::CHUNKS; u += MERGERS) {
		const uint32_t head = u / C::CHUNKS, c = u % C::CHUNKS;
		uint4 v = make_uint4(0, 0, 0, 0);

		if (head < heads)
			v = load_q8<C::BF16>(q + head * head_bytes, dtype, c * 8);
		*(uint4 *)(sm.q[c >> 3] + head * 128 + ((c & 7) ^ (head & 7)) * 16) = v;
	}
}

/* Starts S = Q K^T for this warpgroup's 32 keys of the block in @slot. */
template <class C>
__device__ __forceinline__ void wide_scores(wide_shared<C> &sm, float (&s)[16], uint32_t slot,
					    int wg)
{
	const uint64_t a = desc_k_major(smem_addr(sm.q));
	const uint64_t b = desc_k_major(smem_addr(sm.kv[slot]) + wg * 32 * 128);

	wgmma_fence();
#pragma unroll
	for (int ks = 0; ks < C::DP / 16; ks++) {
		const int step = (ks >> 2) * (C::TILE_BYTES >> 4) + (ks & 3) * 2;

		wgmma_scores<C::BF16>(s, a + step, b + step, ks != 0);
	}
	wgmma_commit();
}

/* Starts O += P V for this warpgroup's 256 dims. */
template <class C>
__device__ __forceinline__ void wide_values(wide_shared<C> &sm, float (&o)[128], uint32_t slot,
					    int wg)
{
	const uint64_t a = desc_k_major(smem_addr(sm.p));
	const uint64_t b =
		desc_mn_major(smem_addr(sm.kv[slot]) + wg * 4 * C::TILE_BYTES, C::TILE_BYTES);

	wgmma_fence();
#pragma unroll
	for (int ks = 0; ks < C::KB / 16; ks++)
		wgmma_values<C::BF16>(o, a + ks * 2, b + ks * (16 * 128 >> 4), true);
	wgmma_commit();
}

template <class C>
__device__ __forceinline__ void wide_consume(wide_shared<C> &sm, float (&o)[128], float (&m)[2],
					     float (&l)[2], uint32_t blocks, float scale_log2,
					     int wg, int t)
{
	const int warp = (t >> 5) & 3, lane = t & 31, g = lane >> 2, l4 = lane & 3;
	const uint32_t empty = smem_addr(sm.empty), full = smem_addr(sm.full);
	const int row0 = warp * 16 + g;
	float s[16];

	if (!blocks)
		return;
	mbar_wait(full, 0);
	if (C::CONVERT)
		fence_async_proxy();
	wide_scores<C>(sm, s, 0, wg);
	wgmma_wait<0>();
	wgmma_hold(s);
	for (uint32_t j = 0; j < blocks; j++) {
		const uint32_t slot = j & 1;
		/* Keys 32wg + 8i + 2q, +1: two producer warps hold 16 keys each. */
		const uint32_t valid = (uint32_t)sm.valid[slot][wg * 2] |
				       (uint32_t)sm.valid[slot][wg * 2 + 1] << 16;
		float top[2] = {-CUDART_INF_F, -CUDART_INF_F};

#pragma unroll
		for (int i = 0; i < 16; i++) {
			const bool in = valid >> ((i >> 2) * 8 + 2 * l4 + (i & 1)) & 1;

			s[i] = in ? s[i] * scale_log2 : -CUDART_INF_F;
			top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], s[i]);
		}
#pragma unroll
		for (int r = 0; r < 2; r++) {
			top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
			top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
			if (l4 == 0)
				sm.top[slot][wg][row0 + 8 * r] = top[r];
		}
		sync_mergers();
		float base[2], alpha[2];

#pragma unroll
		for (int r = 0; r < 2; r++) {
			const float other = sm.top[slot][wg ^ 1][row0 + 8 * r];
			const float now = fmaxf(fmaxf(top[r], other), m[r]);

			base[r] = exponent_base(now);
			alpha[r] = exp2_fast(m[r] - base[r]);
			m[r] = now;
			l[r] *= alpha[r];
		}
#pragma unroll
		for (int i = 0; i < 16; i += 2) {
			const int r = (i >> 1) & 1, row = row0 + 8 * r, chunk = wg * 4 + (i >> 2);
			const float x = exp2_fast(s[i] - base[r]),
				    y = exp2_fast(s[i + 1] - base[r]);

			l[r] += x + y;
			*(uint32_t *)(sm.p + row * 128 + (chunk ^ (row & 7)) * 16 + l4 * 4) =
				pack2<C::BF16>(x, y);
		}
		fence_async_proxy();
		sync_mergers();
		/* The maximum seldom moves after the first blocks. NaN compares unequal. */
		if (__any_sync(~0u, !(alpha[0] == 1.0f && alpha[1] == 1.0f))) {
#pragma unroll
			for (int i = 0; i < 128; i++)
				o[i] *= alpha[(i >> 1) & 1];
		}
		/* Accumulators must not be written by anything else while a product is on its way. */
#pragma unroll
		for (int i = 0; i < 16; i++)
			s[i] = 0.0f;
		wgmma_hold(s);
		wgmma_hold(o);
		wide_values<C>(sm, o, slot, wg);
		/* Free the slot before waiting for the next block: its copies depend on it. */
		wgmma_wait<0>();
		mbar_arrive(empty + slot * 8);
		wgmma_hold(o);
		if (j + 1 < blocks) {
			mbar_wait(full + (slot ^ 1) * 8, ((j + 1) / 2) & 1);
			if (C::CONVERT)
				fence_async_proxy();
			wide_scores<C>(sm, s, slot ^ 1, wg);
			wgmma_wait<0>();
		}
		wgmma_hold(s);
	}
}

/* m, l: max and this thread's part of the sum of its two rows. */
template <class C>
__device__ __forceinline__ void wide_deliver(wide_shared<C> &sm, const params &p, const target &to,
					     const float (&o)[128], const float (&m)[2],
					     float (&l)[2], int wg, int t)
{
	const int lane = t & 31, l4 = lane & 3, row0 = ((t >> 5) & 3) * 16 + (lane >> 2);
	uint8_t *base = (uint8_t *)&sm;
	const typename C::merger_type mg(
		*reinterpret_cast<merge_shared<C::TILE_H> *>(base + C::merger_type::recv_bytes()),
		(float *)base, smem_addr(&sm.merged), p);

#pragma unroll
	for (int r = 0; r < 2; r++) {
		l[r] += __shfl_xor_sync(~0u, l[r], 1);
		l[r] += __shfl_xor_sync(~0u, l[r], 2);
		if (l4 == 0)
			sm.sum[wg][row0 + 8 * r] = l[r];
	}
	sync_mergers(); /* also: this CTA is done with the memory that what it receives will lie in */
#pragma unroll
	for (int r = 0; r < 2; r++)
		l[r] = sm.sum[0][row0 + 8 * r] + sm.sum[1][row0 + 8 * r];
	if (p.splits == 1) {
		const float f[2] = {to.factor(l[0]), to.factor(l[1])};

#pragma unroll
		for (int i = 0; i < 128; i += 2) {
			const int r = (i >> 1) & 1;

			to.store2(row0 + 8 * r, wg * 256 + (i >> 2) * 8 + 2 * l4, o[i] * f[r],
				  o[i + 1] * f[r]);
		}
		if (wg == 0 && l4 < 2)
			to.store_lse(row0 + 8 * l4, l4 ? m[1] : m[0], l4 ? l[1] : l[0]);
		return;
	}
	if (p.cluster > 1) {
		cluster_arrive();
		cluster_wait(); /* so are the others, and their mbarriers are ready */
	}
	/* The four lanes of a row, in both warpgroups, share the ranks. */
	for (uint32_t r = wg * 2 + (l4 >> 1); r < p.cluster; r += 4)
		mg.push_ml(r, row0 + 8 * (l4 & 1), l4 & 1 ? m[1] : m[0], l4 & 1 ? l[1] : l[0]);
#pragma unroll
	for (int c = 0; c < 16; c++) {
		uint32_t bar;
		const uint32_t at = mg.slot(wg * 16 + c, bar) + (row0 * 16 + 2 * l4) * 4;

#pragma unroll
		for (int i = 0; i < 8; i += 2)
			push2(at + ((i >> 1) & 1) * 512 + (i >> 2) * 32, bar, o[c * 8 + i],
			      o[c * 8 + i + 1]);
	}
	mg.finish(to, t);
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) wide_kernel(const __grid_constant__ params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	extern __shared__ __align__(1024) uint8_t smem_wide[];
	wide_shared<C> &sm = *reinterpret_cast<wide_shared<C> *>(smem_wide);
	const int t = threadIdx.x, wg = t >> 7;
	const uint32_t item = blockIdx.x, split = blockIdx.y;
	const uint32_t query = p.head_tiles == 1 ? item : item / p.head_tiles;
	const uint32_t tile = item - query * p.head_tiles;
	const struct exl3_cuda_mla_entry &e = p.entries[entry_of(p, query)];
	const uint32_t row = query - e.first;
	const extent keys = extent_of(p, e, row, split, sm.sum[0][0]);
	const uint32_t blocks = (keys.end - keys.begin + C::KB - 1) / C::KB;

	if (t == 0) {
		for (int i = 0; i < 2; i++) {
			mbar_init(smem_addr(&sm.full[i]), 128);
			mbar_init(smem_addr(&sm.empty[i]), MERGERS);
		}
		if (p.splits > 1)
			C::merger_type::expect(smem_addr(&sm.merged), p);
		fence_async_proxy();
	}
	__syncthreads();
	if (wg == 2) {
		registers_less<C::PRODUCER_REGS>();
		const int warp = (t >> 5) & 3, lane = t & 31;
		selection<C> sel;

		sel.init(e, row, keys.begin, keys.end);
		sel.bad = split == 0 && t == 256 ? keys.bad : 0;
		sel.fetch(0, warp, lane);
		if constexpr (C::CONVERT)
			wide_produce_converted<C>(sm, sel, (const uint8_t *)e.cache, blocks, warp, lane);
		else
			wide_produce<C>(sm, sel, (const uint8_t *)e.cache, blocks, warp, lane);
		sel.report(e, tile, lane);
		return; /* cluster barriers wait for threads that have not exited */
	}
	registers_more<C::CONSUMER_REGS>();
	const uint32_t q_esize = e.q_dtype == EXL3_F32 ? 4 : 2;
	const uint32_t heads = min(p.heads - tile * C::TILE_H, (uint32_t)C::TILE_H);

	wide_load_q<C>(sm,
		       (const uint8_t *)e.q + (size_t)row * e.q_stride +
			       (size_t)tile * C::TILE_H * C::DP * q_esize,
		       e.q_dtype, heads, t);
	fence_async_proxy();
	sync_mergers();
	float o[128] = {};
	float m[2] = {-CUDART_INF_F, -CUDART_INF_F}, l[2] = {};

	wide_consume<C>(sm, o, m, l, blocks, e.scale * e.kv_scale * 1.4426950408889634f, wg, t);

	target to;

	to.init(p, e, row, tile, C::TILE_H);
	wide_deliver<C>(sm, p, to, o, m, l, wg, t);
#else
	__trap(); /* supports() offers it on sm_90 only */
#endif
}

} // namespace exl3_mla

/* Defines exl3_mla::NAME, an instance. */
#define EXL3_MLA_WIDE_INSTANTIATE(name, cache, dp)                       \
	namespace exl3_mla                                               \
	{                                                                \
	using name##_config = wide_config<cache, dp>;                    \
	extern const instance name;                                      \
	const instance name = {(const void *)wide_kernel<name##_config>, \
			       sizeof(wide_shared<name##_config>),       \
			       cache,                                    \
			       dp,                                       \
			       512,                                      \
			       64,                                       \
			       384,                                      \
			       true,                                     \
			       name##_config::CONVERT ? 80.0f : 36.0f,   \
			       12000.0f,                                 \
			       20000.0f};                                \
	}

#endif
