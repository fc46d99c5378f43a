/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unpack_mma.cuh - W = diag(suh) H What H diag(svh) / 128 rebuilt in 16 bits by mma.sync; sm_80 and later.
 *
 * As unpack_dense() in gemm_f16.cu, H128 = H8 (x) H16, H8 by additions across a warp's eight tiles, H16 by MMA. What
 * differs: all products of a step are issued before the first is used, suh and svh cost no pass of their own, results go
 * from registers to memory, one barrier per block.
 *
 *   block   128 (n) x 128 (k), 8 warps
 *   1       warp v: n-tile v, k-tiles 0..7: A = weights, H8 done, B = H16 / 16    -> [n][c], * suh, f16, shared
 *   2       warp v: columns c = 16v..16v+15, n-tiles 0..7: A = diag(svh) H16 / 8, B = [n][c], H8 done   -> w[n][k]
 *
 * Of 16 columns c of a tile, lane q holds 2q, 2q + 1, 8 + 2q, 9 + 2q; they are k = 4q .. 4q + 3, the order of H16's
 * columns in step 1. So suh is one load and a result is eight bytes of a row, 32 per quad.
 */
#ifndef EXL3_CUDA_UNPACK_MMA_CUH
#define EXL3_CUDA_UNPACK_MMA_CUH

#include "kernels/cuda/unpack_common.cuh"

namespace exl3
{

template <int RATE2> struct unpack_mma_shape {
	static constexpr int THREADS = 256, PER_SM = 2;
	static constexpr int TILE = 16 * RATE2, ROW = 8 * TILE; /* bytes: a tile, a k-tile of 128 columns */
	static constexpr int SUH = 8 * ROW, STAGE = SUH + 256;
	static constexpr int COPIES = 8 * ROW / 16;
	static constexpr int PER_THREAD = (COPIES + THREADS - 1) / THREADS;
	static constexpr int BUFFER = 128 * 256; /* [n][c], two of them */
	static constexpr int SVH = 2 * BUFFER;   /* [128] svh / 8 in both halves of a word, two of them */
	static constexpr int RING = SVH + 1024;
	static constexpr int STAGES = 2;
	static constexpr int BYTES = RING + STAGES * STAGE;
};

#ifdef __CUDACC__

template <int RATE2, int CB, bool BF16>
__global__ void __launch_bounds__(256, 2) unpack_mma(const __grid_constant__ unpack_args a)
{
	using S = unpack_mma_shape<RATE2>;
	constexpr int NV = run<RATE2>::NV, HX = CB == CB_MUL1 ? 0 : 1;
	extern __shared__ __align__(1024) char unpack_smem[];
	const uint32_t smem = smem_addr(unpack_smem);
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
	const uint32_t begin = (uint32_t)((uint64_t)a.blocks * blockIdx.x / gridDim.x);
	const uint32_t end = (uint32_t)((uint64_t)a.blocks * (blockIdx.x + 1) / gridDim.x);
	const run_lane<RATE2> rl((int)lane);
	unpack_place at = {begin % a.blocks_k, begin / a.blocks_k}, ahead = at;
	uint16_t *to = a.w + ((size_t)at.nb * 128 + g) * a.k + at.kb * 128 + 16 * warp + 4 * q;
	uint32_t stage = smem + S::RING, other = smem + S::RING + S::STAGE;
	uint32_t half = smem, half_other = smem + S::BUFFER, svh = smem + S::SVH;
	uint32_t offset[S::PER_THREAD], h[4], to_half[4], from_half;
	/* Signs of H16 for A in step 2: rows g and g + 8 alike, but for the last register. */
	const uint32_t sign = odd_bits(g & 2 * q) << 15 | odd_bits(g & (2 * q + 1)) << 31;
	/* A matrix's rows are n, its 16-byte chunks stand at chunk ^ (n & 7). */
	const uint32_t row = (lane & 7) + 8 * (lane >> 3 & 1), bit = lane >> 4;

#pragma unroll
	for (uint32_t i = 0; i < 4; i++) { /* H16 / 16: B of step 1, rows k, columns g (0, 1) and 8 + g (2, 3) */
		const uint32_t c = g + 8 * (i >> 1), k = 4 * (c >> 1 & 3) + 2 * (c >> 3) + (c & 1);
		const uint32_t r = 2 * q + 8 * (i & 1);

		h[i] = 0x2c002c00u | odd_bits(r & k) << 15 | odd_bits((r + 1) & k) << 31;
	}
#pragma unroll
	for (uint32_t t = 0; t < 4; t++) {
		to_half[t] = (16 * warp + row) * 256 + (((2 * t + bit) ^ (lane & 7)) << 4);
		keep(to_half[t]);
	}
	from_half = row * 256 + (((2 * warp + bit) ^ (lane & 7)) << 4);
	keep(from_half);
#pragma unroll
	for (int i = 0; i < S::PER_THREAD; i++) {
		const uint32_t c = S::THREADS * i + threadIdx.x;

		offset[i] = c / (S::ROW / 16) * (uint32_t)a.row_bytes + c % (S::ROW / 16) * 16;
		keep(offset[i]);
	}
	unpack_fetch<S>(a, stage, ahead, offset);
	ahead.next(a);
	cp_async_commit();
	if (begin + 1 < end) {
		unpack_fetch<S>(a, other, ahead, offset);
		ahead.next(a);
	}
	cp_async_commit();
	cp_async_wait<1>();
	__syncthreads();
#pragma unroll 1
	for (uint32_t b = begin; b < end; b++) {
		float d[8][2][4];

		if ((b == begin || at.kb == 0)) { /* rare; read behind the barrier */
			svh = smem + S::SVH + (svh == smem + S::SVH ? 512 : 0);
			if (threadIdx.x < 128)
				sts32(svh + 4 * threadIdx.x,
				      mul_f16x2(((const uint16_t *)a.svh)[at.nb * 128 + threadIdx.x] * 0x10001u,
						0x30003000u));
		}
		{
			uint32_t addr[NV + 1], f[8][4];

#pragma unroll
			for (int j = 0; j <= NV; j++)
				addr[j] = stage + warp * S::TILE + rl.offset[j];
#pragma unroll
			for (int t = 0; t < 8; t++) {
				uint32_t v[NV];

				rl.load(addr, t * S::ROW, v);
				decode_packed<RATE2, CB, HX>(v, f[t]);
			}
			unpack_add8(f);
#pragma unroll
			for (int t = 0; t < 8; t++)
#pragma unroll
				for (int j = 0; j < 2; j++) {
#pragma unroll
					for (int i = 0; i < 4; i++)
						d[t][j][i] = 0.0f;
					mma_f16(d[t][j], f[t][0], f[t][1], f[t][2], f[t][3], h[2 * j],
						h[2 * j + 1]);
				}
		}
		border(a.k);
#pragma unroll
		for (int t = 0; t < 8; t++) {
			const uint2 u = lds64(stage + S::SUH + 32 * t + 8 * q);

			store_straight(half + to_half[t & 3] + 128 * (t >> 2),
				       mul_f16x2(pack_16<false>(d[t][0][0], d[t][0][1]), u.x),
				       mul_f16x2(pack_16<false>(d[t][0][2], d[t][0][3]), u.x),
				       mul_f16x2(pack_16<false>(d[t][1][0], d[t][1][1]), u.y),
				       mul_f16x2(pack_16<false>(d[t][1][2], d[t][1][3]), u.y));
		}
		cp_async_wait<0>(); /* the next block's trellis */
		__syncthreads();
		if (b + 2 < end) {
			unpack_fetch<S>(a, stage, ahead, offset);
			ahead.next(a);
		}
		cp_async_commit();
		{
			uint32_t f[8][4];

#pragma unroll
			for (int t = 0; t < 8; t++)
				load_transposed(half + from_half + 16 * 256 * t, f[t]);
			unpack_add8(f);
#pragma unroll
			for (int t = 0; t < 8; t++) {
				const uint32_t lo = lds32(svh + 64 * t + 4 * g) ^ sign;
				const uint32_t hi = lds32(svh + 64 * t + 32 + 4 * g) ^ sign;

#pragma unroll
				for (int j = 0; j < 2; j++) {
#pragma unroll
					for (int i = 0; i < 4; i++)
						d[t][j][i] = 0.0f;
					mma_f16(d[t][j], lo, hi, lo, hi ^ 0x80008000u, f[t][2 * j],
						f[t][2 * j + 1]);
				}
			}
		}
		border(a.k);
#pragma unroll
		for (int t = 0; t < 8; t++)
#pragma unroll
			for (int e = 0; e < 2; e++)
				*(uint2 *)(to + (16 * t + 8 * e) * (size_t)a.k) =
					make_uint2(pack_16<BF16>(d[t][0][2 * e], d[t][0][2 * e + 1]),
						   pack_16<BF16>(d[t][1][2 * e], d[t][1][2 * e + 1]));
		to += 128 + (at.kb + 1 == a.blocks_k ? 127 * (size_t)a.k : 0);
		at.next(a);
		const uint32_t s = stage, f = half;

		stage = other;
		other = s;
		half = half_other;
		half_other = f;
	}
}

#endif /* __CUDACC__ */

#define EXL3_UNPACK_MMA_CASE(r, cb)                                                            \
	if (rate2 == r && codebook == cb)                                                      \
		return {bf16 ? (const void *)unpack_mma<r, cb, true>                           \
			     : (const void *)unpack_mma<r, cb, false>,                         \
			unpack_mma_shape<r>::BYTES, unpack_mma_shape<r>::THREADS, unpack_mma_shape<r>::PER_SM};

} // namespace exl3
#endif
