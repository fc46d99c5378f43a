/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla_apart.cuh - mla_wide.cuh with warpgroups that do not wait for each other: each makes all scores.
 *
 * Items, rows in shared memory, producer and merge are mla_wide.cuh's. A block of 64 keys:
 *
 *   warpgroup 0, 1  S[64 x 64] = Q K^T               m64n64k16, D/16 steps: both make the same
 *                   P = exp2(S - max) in registers, in the order of the next product's A
 *                   O[64 x 256 dims each] += P V     m64n256k16 with A from registers, 4 steps
 *
 *   tensor core  | S(j) 0 | S(j) 1 | P V (j) 0, S(j+1) 0 | P V (j) 1, S(j+1) 1 | ...
 *   warps 0               | softmax |                     | softmax ..
 *   warps 1                         | softmax |                          | softmax ..
 *
 * The tensor cores do half as much again (1152 clocks of scores twice, 1024 of values), but no barrier, no maximum and no P goes
 * between the groups, and a score reads 128 bytes of shared memory per clock instead of 192: m64n32 needs all of q for half of
 * the keys. One group's softmax runs beside the other's products, and its next scores are asked for before its values are waited for.
 */
#ifndef EXL3_KERNELS_CUDA_MLA_APART_CUH
#define EXL3_KERNELS_CUDA_MLA_APART_CUH

#include "kernels/cuda/mla_wide.cuh"

namespace exl3_mla
{

template <int CACHE, int DP_> struct apart_config : wide_config<CACHE, DP_> {
	static constexpr bool CONVERT = wide_config<CACHE, DP_>::CONVERT;
	static constexpr int PRODUCER_REGS = CONVERT ? 88 : 56, CONSUMER_REGS = CONVERT ? 208 : 224;
	/* setmaxnreg hands out what the block was given, 168 a thread. */
	static_assert(128 * PRODUCER_REGS + 256 * CONSUMER_REGS <= 168 * 384, "registers of a block");
};

/* Starts S = Q K^T for the block in @slot. */
template <class C> __device__ __forceinline__ void apart_scores(wide_shared<C> &sm, float (&s)[32], uint32_t slot)
{
	const uint64_t a = desc_k_major(smem_addr(sm.q)), b = desc_k_major(smem_addr(sm.kv[slot]));

	wgmma_fence();
#pragma unroll
	for (int ks = 0; ks < C::DP / 16; ks++) {
		const int step = (ks >> 2) * (C::TILE_BYTES >> 4) + (ks & 3) * 2;

		wgmma_scores64<C::BF16>(s, a + step, b + step, ks != 0);
	}
	wgmma_commit();
}

/* Starts O += P V for this warpgroup's 256 dims. */
template <class C>
__device__ __forceinline__ void apart_values(wide_shared<C> &sm, float (&o)[128], const uint32_t (&p)[4][4], uint32_t slot,
					     int wg)
{
	const uint64_t b = desc_mn_major(smem_addr(sm.kv[slot]) + wg * 4 * C::TILE_BYTES, C::TILE_BYTES);

	wgmma_fence();
#pragma unroll
	for (int ks = 0; ks < C::KB / 16; ks++)
		wgmma_values_rs<C::BF16>(o, p[ks], b + ks * (16 * 128 >> 4));
	wgmma_commit();
}

/* m, l: max, and this thread's part of the sum over all keys, of its two rows: the same in both groups. */
template <class C>
__device__ __forceinline__ void apart_consume(wide_shared<C> &sm, float (&o)[128], float (&m)[2], float (&l)[2],
					      uint32_t blocks, float scale_log2, int wg, int t)
{
	const int l4 = t & 3;
	const uint32_t empty = smem_addr(sm.empty), full = smem_addr(sm.full);
	float s[32];

	if (!blocks)
		return;
	mbar_wait(full, 0);
	if (C::CONVERT)
		fence_async_proxy();
	apart_scores<C>(sm, s, 0);
	wgmma_wait<0>();
	wgmma_hold(s);
	for (uint32_t j = 0; j < blocks; j++) {
		const uint32_t slot = j & 1;
		/* Keys 8i + 2q, +1 of the block: producer warps have 16 each. */
		const uint32_t valid[2] = {(uint32_t)sm.valid[slot][0] | (uint32_t)sm.valid[slot][1] << 16,
					   (uint32_t)sm.valid[slot][2] | (uint32_t)sm.valid[slot][3] << 16};
		float top[2] = {-CUDART_INF_F, -CUDART_INF_F}, base[2], alpha[2];
		uint32_t p[4][4];

#pragma unroll
		for (int i = 0; i < 32; i++) {
			const bool in = valid[i >> 4] >> ((i >> 2 & 3) * 8 + 2 * l4 + (i & 1)) & 1;

			s[i] = in ? s[i] * scale_log2 : -CUDART_INF_F;
			top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], s[i]);
		}
#pragma unroll
		for (int r = 0; r < 2; r++) {
			top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
			top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
			top[r] = fmaxf(top[r], m[r]);
			base[r] = exponent_base(top[r]);
			alpha[r] = exp2_fast(m[r] - base[r]);
			m[r] = top[r];
			l[r] *= alpha[r];
		}
		/* D's registers 8k .. 8k + 7 are A's of step k: rows g, g + 8, g, g + 8. */
#pragma unroll
		for (int i = 0; i < 32; i += 2) {
			const int r = (i >> 1) & 1;
			const float x = exp2_fast(s[i] - base[r]), y = exp2_fast(s[i + 1] - base[r]);

			l[r] += x + y;
			p[i >> 3][i >> 1 & 3] = pack2<C::BF16>(x, y);
		}
		/* The maximum seldom moves after the first blocks. NaN compares unequal. */
		if (__any_sync(~0u, !(alpha[0] == 1.0f && alpha[1] == 1.0f))) {
#pragma unroll
			for (int i = 0; i < 128; i++)
				o[i] *= alpha[(i >> 1) & 1];
		}
		/* Accumulators must not be written by anything else while a product is on its way. */
#pragma unroll
		for (int i = 0; i < 32; i++)
			s[i] = 0.0f;
		wgmma_hold(s);
		wgmma_hold(o);
		apart_values<C>(sm, o, p, slot, wg);
		if (j + 1 < blocks) {
			mbar_wait(full + (slot ^ 1) * 8, ((j + 1) / 2) & 1);
			if (C::CONVERT)
				fence_async_proxy();
			apart_scores<C>(sm, s, slot ^ 1);
			wgmma_wait<1>();
		} else {
			wgmma_wait<0>();
		}
		/* The values are through; a slot is free when both groups say so. */
		mbar_arrive(empty + slot * 8);
		wgmma_wait<0>();
		wgmma_hold(o);
		wgmma_hold(s);
	}
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) apart_kernel(const __grid_constant__ params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	extern __shared__ __align__(1024) uint8_t smem_apart[];
	wide_shared<C> &sm = *reinterpret_cast<wide_shared<C> *>(smem_apart);
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

	apart_consume<C>(sm, o, m, l, blocks, e.scale * e.kv_scale * 1.4426950408889634f, wg, t);
	/* wide_deliver() adds the groups' sums; here each has all of it. */
	l[0] *= 0.5f;
	l[1] *= 0.5f;

	target to;

	to.init(p, e, row, tile, C::TILE_H);
	wide_deliver<C>(sm, p, to, o, m, l, wg, t);
#else
	__trap(); /* supports() offers it on sm_90 only */
#endif
}

} // namespace exl3_mla

/* Defines exl3_mla::NAME, an instance; key_ns is a guess. */
#define EXL3_MLA_APART_INSTANTIATE(name, cache, dp)                       \
	namespace exl3_mla                                                \
	{                                                                 \
	using name##_config = apart_config<cache, dp>;                    \
	extern const instance name;                                       \
	const instance name = {(const void *)apart_kernel<name##_config>, \
			       sizeof(wide_shared<name##_config>),        \
			       cache,                                     \
			       dp,                                        \
			       512,                                       \
			       64,                                        \
			       384,                                       \
			       true,                                      \
			       name##_config::CONVERT ? 80.0f : 28.0f,    \
			       12000.0f,                                  \
			       20000.0f};                                 \
	}

#endif
