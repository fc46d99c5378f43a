/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_sm90.cuh - the wgmma kernel for many rows: weights decoded straight into the A fragment.
 *
 *       Y^T [128 x TN] += W^T [128 x k] X^T [k x TN]        (formula, tiles, schedule: gemm.cuh)
 *
 *   block   WK * 2 consumer warpgroups and one producer (one thread works); warpgroup (kh, nh) has
 *           columns 64nh..+63 and the k16 steps 4kh..4kh+3 of a stage
 *   stage   64 * WK of k: X [WK][TN rows x 128 bytes], swizzled; trellis [4 WK k-tiles][8 n-tiles]
 *   warp    n-tile w of its warpgroup: lane L decodes weights 8L..8L+7 of it into four registers, which
 *           are its part of A; B is the X block in shared memory
 *
 *   producer    | wait empty s | expect, trellis s, X s | wait empty s+1 | ...
 *   consumer    | wait full s | decode 0 | wgmma 0 | decode 1 | wgmma 1, wait 0 | decode 2 | ...
 *
 * Two sets of A registers: the decode of one step runs beside the wgmma of the step before. The trellis
 * of the first stages is fetched while the input transform still runs (programmatic launch).
 *
 * Two other ways through a stage: LOOP_PACKED is the same with a decode that takes fewer instructions
 * (decode_packed() leaves out masks that its multipliers do not need). LOOP_TURNS: gemm_turns.cuh.
 */
#ifndef EXL3_CUDA_GEMM_SM90_CUH
#define EXL3_CUDA_GEMM_SM90_CUH

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemm_decode.cuh"
#include "kernels/cuda/gemm_turns.cuh"
#include "kernels/cuda/gemm_variants.h"

namespace exl3
{

template <int RATE2, int TN, int WK, int BLOCKS> struct gemm_shape {
	static constexpr int CONSUMERS = 8 * WK; /* warps */
	static constexpr int THREADS = 32 * (CONSUMERS + 4);
	/* Registers per thread: at entry, then the producer's surplus goes to the consumers. */
	static constexpr int REGS_ENTRY = 65536 / (THREADS * BLOCKS) / 8 * 8;
	static constexpr int REGS_PRODUCER = 24;
	static constexpr int REGS_CONSUMER =
		(REGS_ENTRY * (2 * WK + 1) - REGS_PRODUCER) / (2 * WK) / 8 * 8;
	static constexpr int STEP = 64 * WK;
	static constexpr int X_BYTES = WK * TN * 128;
	static constexpr int ROW_BYTES = 8 * 16 * RATE2; /* trellis of one k-tile and 128 columns */
	static constexpr int ROWS = 4 * WK;
	static constexpr int W_BYTES = ROWS * ROW_BYTES;
	static constexpr int STAGE = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
	/* 227 KB per block, 228 KB per SM, 1 KB reserved per block. */
	static constexpr int BUDGET = (228 * 1024 / BLOCKS - 1024) / 1024 * 1024;
	static constexpr int FIXED = (int)sizeof(gemm_epilogue<TN>);
	static constexpr int FIT = (BUDGET - FIXED - 256) / STAGE;
	static constexpr int STAGES = FIT > 12 ? 12 : FIT;
	static constexpr int BYTES = FIXED + STAGES * STAGE + 16 * STAGES + 8;
	static constexpr int BYTES_TURNS = BYTES + 8 * 2 * WK;

	static_assert(STAGES >= 3, "too little shared memory for a pipeline");
	static_assert(TN * 128 % 1024 == 0, "a wgmma operand begins at a multiple of 1024 bytes");
};

/* One thread. Addresses are the same for all lanes, so copies issue from uniform registers back to back. */
template <class S>
static __device__ __forceinline__ void gemm_produce(const gemm_args &a, uint32_t base,
						    uint32_t full, uint32_t empty)
{
	gemm_segment seg;
	uint32_t strip, mt;

	/* Round 0: trellis of all stages, before the input is there. Round 1: everything else. */
#pragma unroll 1
	for (int round = 0; round < 2; round++) {
		gemm_walk walk = walk_begin(a, blockIdx.x);
		uint32_t it = 0, s = 0, parity = 1;

		if (round == 1)
			grid_wait();
		while (walk_next(a, walk, seg)) {
			tile_place(a, seg.tile, strip, mt);
			const gemm_shard &sh = a.shard[shard_of(a, strip)];
			const size_t row_bytes = (size_t)sh.tiles_n * (S::ROW_BYTES / 8);
			const char *w = (const char *)sh.trellis +
					(size_t)(strip - sh.strip0) * S::ROW_BYTES +
					(size_t)seg.begin * S::ROWS * row_bytes;
			const uint8_t *x = a.image + sh.image * a.image_bytes +
					   (size_t)mt * (a.k / 64) * (S::X_BYTES / (S::STEP / 64)) +
					   (size_t)seg.begin * S::X_BYTES;

			for (uint32_t step = seg.begin; step < seg.end; step++, it++) {
				const uint32_t bar = full + 8 * s;
				const uint32_t to = base + s * S::STAGE;
				const bool early = it < S::STAGES;

				if (round == 0 && !early)
					break;
				if (early == (round == 0)) {
					if (!early)
						mbar_wait(empty + 8 * s, parity);
					mbar_expect(bar, S::X_BYTES + S::W_BYTES);
#pragma unroll
					for (int r = 0; r < S::ROWS; r++)
						bulk_load(to + S::X_BYTES + r * S::ROW_BYTES,
							  w + r * row_bytes, S::ROW_BYTES, bar);
				}
				if (round == 1)
					bulk_load(to, x, S::X_BYTES, bar);
				w += S::ROWS * row_bytes;
				x += S::X_BYTES;
				if (++s == S::STAGES) {
					s = 0;
					parity ^= 1;
				}
			}
			if (round == 0 && it >= S::STAGES)
				break;
		}
	}
}

template <int RATE2, int CB, int TN, int WK, int BLOCKS, int GROUP, int LOOP = LOOP_PLAIN>
__global__ void __launch_bounds__((gemm_shape<RATE2, TN, WK, BLOCKS>::THREADS), BLOCKS)
	gemm_sm90(const __grid_constant__ gemm_args a)
{
#if defined(EXL3_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
	using S = gemm_shape<RATE2, TN, WK, BLOCKS>;
	extern __shared__ __align__(1024) uint8_t stages[];
	gemm_epilogue<TN> &e = *(gemm_epilogue<TN> *)(stages + S::STAGES * S::STAGE);
	/* 8-byte words behind the epilogue's: full[STAGES], empty[STAGES], with LOOP_TURNS a turn per group. */
	const uint32_t full = (smem_addr(&e) + (uint32_t)sizeof(e) + 7) & ~7u;
	const uint32_t empty = full + 8 * S::STAGES;
	const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

	if (threadIdx.x == 0) {
		for (int i = 0; i < S::STAGES; i++) {
			mbar_init(full + 8 * i, 1);
			mbar_init(empty + 8 * i, S::CONSUMERS);
		}
		if constexpr (LOOP == LOOP_TURNS)
			turns<2 * WK>::init(empty + 8 * S::STAGES);
		mbar_init_fence();
	}
	__syncthreads();

	if (warp >= S::CONSUMERS) {
		registers_less<S::REGS_PRODUCER>();
		if (warp == S::CONSUMERS && elect_one())
			gemm_produce<S>(a, smem_addr(stages), full, empty);
		return;
	}
	registers_more<S::REGS_CONSUMER>();

	const int slice = warp & 7, kh = warp >> 3;
	/* This warp's tile and B operand in stage 0; all else is an offset to them. */
	const uint32_t *w0 =
		(const uint32_t *)(stages + S::X_BYTES) + (kh * 4 * 8 + slice) * run<RATE2>::WORDS;
	const uint64_t desc = wgmma_desc(smem_addr(stages) + kh * TN * 128);
	const uint32_t desc_hi = (uint32_t)(desc >> 32), desc_lo0 = (uint32_t)desc;
	gemm_walk walk = walk_begin(a, blockIdx.x);
	gemm_segment seg;
	uint32_t s = 0, parity = 0;
	float d[TN / 2];

	turns<2 * WK> turn(empty + 8 * S::STAGES, warp >> 2); /* LOOP_TURNS */
	grid_wait();
	while (walk_next(a, walk, seg)) {
		const gemm_ahead ahead = gemm_look_ahead<TN>(a, seg.tile, threadIdx.x & 255);
		uint32_t before = S::STAGES;

#pragma unroll
		for (int i = 0; i < TN / 2; i++)
			d[i] = 0.0f;
#pragma unroll 1
		for (uint32_t step = seg.begin; step < seg.end; step++) {
			const uint32_t *w = w0 + s * (S::STAGE / 4);
			const uint32_t desc_lo = desc_lo0 + s * (S::STAGE / 16);

			if constexpr (LOOP == LOOP_TURNS) {
				mbar_wait(full + 8 * s, parity);
				turns_stage<RATE2, CB, TN, 2 * WK>(w, desc_hi, desc_lo, turn, lane, d);
				if (lane == 0)
					mbar_arrive(empty + 8 * s);
				if (++s == S::STAGES) {
					s = 0;
					parity ^= 1;
				}
				continue;
			}
			uint32_t frag[2][GROUP][4], v[GROUP][run<RATE2>::NV];

			mbar_wait(full + 8 * s, parity);
#pragma unroll
			for (int i = 0; i < GROUP; i++)
				load_run<RATE2>(w + i * 8 * run<RATE2>::WORDS, lane, v[i]);
#pragma unroll
			for (int g = 0; g < 4 / GROUP; g++) {
#pragma unroll
				for (int i = 0; i < GROUP; i++)
					if constexpr (LOOP == LOOP_PACKED)
						decode_packed<RATE2, CB, CB == CB_MUL1 ? 0 : 1>(
							v[i], frag[g & 1][i]);
					else
						decode_a<RATE2, CB>(v[i], frag[g & 1][i]);
				/* The next words arrive while the wgmma before is waited for. */
				if (g + 1 < 4 / GROUP)
#pragma unroll
					for (int i = 0; i < GROUP; i++)
						load_run<RATE2>(w + ((g + 1) * GROUP + i) * 8 *
										run<RATE2>::WORDS,
								lane, v[i]);
				wgmma_fence();
#pragma unroll
				for (int i = 0; i < GROUP; i++)
					wgmma<TN>::rs(d, frag[g & 1][i],
						      (uint64_t)desc_hi << 32 |
							      (desc_lo + 2 * (g * GROUP + i)));
				wgmma_commit();
				wgmma_wait<1>();
				/* The stage before is done with: its last wgmma has just been waited for. */
				if (g == 0 && before < S::STAGES && lane == 0)
					mbar_arrive(empty + 8 * before);
			}
			before = s;
			if (++s == S::STAGES) {
				s = 0;
				parity ^= 1;
			}
		}
		wgmma_wait<0>();
		wgmma_hold(d);
		if (LOOP != LOOP_TURNS && lane == 0)
			mbar_arrive(empty + 8 * before);
		gemm_finish<TN, S::CONSUMERS>(a, e, seg, ahead, d, warp, lane);
	}
	gemm_collect<TN, S::CONSUMERS>(a, e, warp, lane);
#endif
}

} // namespace exl3

/* One instance file per bitrate and codebook: which variants it has. */
#define EXL3_GEMM_CASE(name, tn, wk, blocks, group)                                      \
	case EXL3_GEMM_##name:                                                           \
		return {(const void *)exl3::gemm_sm90<RATE2, CB, tn, wk, blocks, group>, \
			exl3::gemm_shape<RATE2, tn, wk, blocks>::BYTES,                  \
			exl3::gemm_shape<RATE2, tn, wk, blocks>::THREADS};
#define EXL3_GEMM_INSTANTIATE(rate2, cb, VARIANTS)                      \
	struct exl3_gemm_entry exl3_gemm_r##rate2##_cb##cb(int variant) \
	{                                                               \
		constexpr int RATE2 = rate2, CB = cb;                   \
		switch (variant) {                                      \
			VARIANTS(EXL3_GEMM_CASE)                        \
		}                                                       \
		return {};                                              \
	}
#define EXL3_GEMM_CANDIDATE(name, tn, wk, blocks, group, loop)                                 \
	case EXL3_GEMM_##name:                                                                 \
		return {(const void *)exl3::gemm_sm90<RATE2, CB, tn, wk, blocks, group, exl3::loop>, \
			exl3::gemm_shape<RATE2, tn, wk, blocks>::BYTES_TURNS,                  \
			exl3::gemm_shape<RATE2, tn, wk, blocks>::THREADS};

#endif
