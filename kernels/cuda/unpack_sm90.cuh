/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unpack_sm90.cuh - W = diag(suh) H What H diag(svh) / 128 rebuilt in 16 bits, both Hadamards by wgmma.
 *
 * H128 over k and over n are one level of additions in registers and a product with H64 each: half the tensor
 * time of a whole H128, a sixth of the additions of butterflies alone.
 *
 *   block        128 (n) x 128 (k), two warpgroups; warp v of group w decodes n-tile u = 4w + v
 *   add          k bit 6:       A = tile t + tile t + 4, tile t - tile t + 4            t = 0..3
 *   wgmma 1      k bits 0..5:   D1[n][c] = A[n][64] H64 / 16                             for both A
 *   add          n bit 3:       rows g and g + 8 of a lane, with suh in the same multiply-adds; f16
 *   shared       B[n bit 3][c = 0..127][8u + g], rows of 128 bytes, swizzled
 *   wgmma 2      n bits 012456: D2[n'][c] = diag(svh) H64 / 8 [64] B, group w has n' bit 3 = w; A in registers
 *   store        16 bytes of k per lane, 64 of a row, straight from the accumulators
 *
 * The last is why the columns of D1 stand in another order: c = 64s + 8(4a + b) + 2q + e is
 * k = 64s + 32a + 8q + 2b + e, so that the eight values that lane q holds for one a are neighbours. H64's rows in
 * shared memory (the B operand of wgmma 1) have that order; nothing else is to be done for it.
 *
 *   time         | 1 of i | add, to shared | barrier | fetch i + STAGES, 2 of i, store | 1 of i + 1 ...
 *
 * One barrier per block: B has two buffers, so what is written before barrier i + 1 was read before barrier i.
 * Two thread blocks share an SM; one decodes while the tensor cores work for the other.
 */
#ifndef EXL3_CUDA_UNPACK_SM90_CUH
#define EXL3_CUDA_UNPACK_SM90_CUH

#include "kernels/cuda/unpack_common.cuh"

namespace exl3
{

template <int RATE2> struct unpack_shape {
	static constexpr int THREADS = 256, PER_SM = 2;
	static constexpr int TILE = 16 * RATE2;   /* bytes */
	static constexpr int ROW = 8 * TILE;      /* trellis of one k-tile, 128 columns */
	static constexpr int SUH = 8 * ROW;       /* where suh lies in a stage */
	static constexpr int STAGE = SUH + 256;
	static constexpr int COPIES = 8 * ROW / 16;
	static constexpr int PER_THREAD = (COPIES + THREADS - 1) / THREADS;
	static constexpr int H64 = 0, B = 8192, B_BIT = 16384, B_BUFFER = 2 * B_BIT;
	static constexpr int RING = B + 2 * B_BUFFER;
	/* 227 KB of an SM less 1 KB per block. */
	static constexpr int FIT = (113 * 1024 - RING) / STAGE;
	static constexpr int STAGES = FIT > 4 ? 4 : FIT;
	static constexpr int BYTES = RING + STAGES * STAGE;

	static_assert(STAGES >= 2, "one stage in work, one on its way");
	static_assert(TILE % 16 == 0, "copies of 16 bytes");
};

/* k, without bits 7 and up, of column c of the products; see above. */
static EXL3_HD uint32_t unpack_k(uint32_t c)
{
	return (c & 64) | (c & 32) | (c >> 1 & 3) << 3 | (c >> 3 & 3) << 1 | (c & 1);
}

/* Both f16 lanes, each rounded once: a b - c. */
static EXL3_HD uint32_t fms_f16x2(uint32_t a, uint32_t b, uint32_t c)
{
#ifdef __CUDA_ARCH__
	uint32_t d;

	asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}" : "=r"(d) : "r"(a), "r"(b), "r"(c));
	return d;
#else
	return fma_f16x2(a, b, c ^ 0x80008000u);
#endif
}

#ifdef __CUDACC__

/* H64 / 16 as the B operand of wgmma 1. */
EXL3_DEV void unpack_h64(uint32_t to)
{
	for (uint32_t i = threadIdx.x; i < 64 * 8; i += 256) {
		const uint32_t c = i >> 3, chunk = i & 7, k = unpack_k(c);
		uint32_t w[4];

#pragma unroll
		for (uint32_t j = 0; j < 4; j++) {
			const uint32_t at = 8 * chunk + 2 * j;

			w[j] = 0x2c002c00u | odd_bits(at & k) << 15 | odd_bits((at + 1) & k) << 31;
		}
		sts128(to + c * 128 + ((chunk ^ (c & 7)) << 4), make_uint4(w[0], w[1], w[2], w[3]));
	}
}

/*
 * diag(svh) H64 / 8 as this lane's A operand of wgmma 2. Of row r = 16v + 8h + g and column m = 16t + 8j + 2q + e the
 * sign is that of the bits in common: g with 2q + e, h with j, v with t. So a lane needs two values, of rows g and
 * g + 8, and a sign per t that is the same for the whole warp. @svh: of the block's columns.
 */
struct unpack_rows {
	uint32_t lo, hi;

	EXL3_DEV_MEMBER void load(const __half *svh, uint32_t warp, uint32_t lane)
	{
		const uint32_t g = lane >> 2, q = lane & 3;
		const uint16_t *s = (const uint16_t *)svh + 32 * (warp & 3) + 8 * (warp >> 2) + g;
		const uint32_t eighth = 0x30003000u;
		const uint32_t sign = odd_bits(g & 2 * q) << 15 | odd_bits(g & (2 * q + 1)) << 31;

		lo = mul_f16x2(s[0] * 0x10001u, eighth) ^ sign;
		hi = mul_f16x2(s[16] * 0x10001u, eighth) ^ sign;
	}

	EXL3_DEV_MEMBER void make(uint32_t t, uint32_t warp, uint32_t (&a)[4]) const
	{
		const uint32_t flip = (0u - odd_bits(warp & t)) & 0x80008000u;

		a[0] = a[2] = lo ^ flip;
		a[1] = hi ^ flip;
		a[3] = a[1] ^ 0x80008000u;
#pragma unroll
		for (int i = 0; i < 4; i++)
			keep(a[i]); /* made before the first product, not between them */
	}
};

/* Decodes this warp's n-tile and multiplies by H64: d[s] has k bit 6 = s. @tiles: k-tile 0 of it. */
template <int RATE2, int CB>
EXL3_DEV void unpack_over_k(uint32_t tiles, const run_lane<RATE2> &rl, uint64_t h, float (&d)[2][32])
{
	/* mul1 keeps the multiplier's pipe busy enough by itself. */
	constexpr int NV = run<RATE2>::NV, ROW = unpack_shape<RATE2>::ROW, HX = CB == CB_MUL1 ? 0 : 1;
	uint32_t addr[NV + 1], v[2][NV], f[2][2][4];

#pragma unroll
	for (int j = 0; j <= NV; j++)
		addr[j] = tiles + rl.offset[j];
	rl.load(addr, 0, v[0]);
	rl.load(addr, 4 * ROW, v[1]);
#pragma unroll
	for (int t = 0; t < 4; t++) {
		uint32_t x[4], z[4];

		decode_packed<RATE2, CB, HX>(v[0], x);
		decode_packed<RATE2, CB, HX>(v[1], z);
		if (t < 3) { /* the next words arrive while the products before are waited for */
			rl.load(addr, (t + 1) * ROW, v[0]);
			rl.load(addr, (t + 5) * ROW, v[1]);
		}
#pragma unroll
		for (int i = 0; i < 4; i++) {
			f[t & 1][0][i] = add_f16x2(x[i], z[i]);
			f[t & 1][1][i] = sub_f16x2(x[i], z[i]);
		}
		wgmma_fence();
		if (t == 0) {
			wgmma_from<64, true>::rs(d[0], f[0][0], h);
			wgmma_from<64, true>::rs(d[1], f[0][1], h);
		} else {
			wgmma_from<64, false>::rs(d[0], f[t & 1][0], h + 2 * t);
			wgmma_from<64, false>::rs(d[1], f[t & 1][1], h + 2 * t);
		}
		wgmma_commit();
		wgmma_wait<1>();
	}
	wgmma_wait<0>();
	wgmma_hold(d[0]);
	wgmma_hold(d[1]);
}

/* Times suh, added over n bit 3, to shared memory. @at: where this lane's row of the first four matrices goes. */
EXL3_DEV void unpack_across(uint32_t suh, const float (&d)[2][32], uint32_t at)
{
#pragma unroll
	for (int s = 0; s < 2; s++)
#pragma unroll
		for (int a = 0; a < 2; a++) {
			const uint4 four = lds128(suh + 128 * s + 64 * a);
			const uint32_t u[4] = {four.x, four.y, four.z, four.w};

#pragma unroll
			for (int b = 0; b < 4; b += 2) {
				uint32_t r[4];

#pragma unroll
				for (int i = 0; i < 2; i++) {
					const float *c = &d[s][4 * (4 * a + b + i)];
					const uint32_t x = pack_16<false>(c[0], c[1]);
					const uint32_t z = mul_f16x2(pack_16<false>(c[2], c[3]), u[b + i]);

					r[2 * i] = fma_f16x2(x, u[b + i], z);
					r[2 * i + 1] = fms_f16x2(x, u[b + i], z);
				}
				store_transposed(at + (64 * s + 32 * a + 8 * b) * 128, r[0], r[1], r[2],
						 r[3]);
			}
		}
}

/* Each thread block has a run of consecutive 128 x 128 blocks. */
template <int RATE2, int CB, bool BF16>
__global__ void __launch_bounds__(256, 2) unpack_wgmma(const __grid_constant__ unpack_args a)
{
#if defined(EXL3_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
	using S = unpack_shape<RATE2>;
	extern __shared__ __align__(1024) char unpack_smem[];
	const uint32_t smem = smem_addr(unpack_smem);
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
	const uint32_t begin = (uint32_t)((uint64_t)a.blocks * blockIdx.x / gridDim.x);
	const uint32_t end = (uint32_t)((uint64_t)a.blocks * (blockIdx.x + 1) / gridDim.x);
	const run_lane<RATE2> rl((int)lane);
	const uint64_t h = wgmma_desc(smem + S::H64);
	/* Row 8jj + i of the matrices jj of bit 3 = mx: lanes 8 (2jj + mx) + i. */
	const uint32_t row = 8 * (lane >> 4) + (lane & 7);
	uint32_t b_at = smem + S::B + (lane >> 3 & 1) * S::B_BIT + row * 128 +
			((warp ^ (lane & 7)) << 4);
	uint32_t b_desc = smem + S::B + (warp >> 2) * S::B_BIT;
	uint32_t stage = smem + S::RING, flip = S::B_BUFFER, offset[S::PER_THREAD];
	unpack_rows rows = {};
	unpack_place at = {begin % a.blocks_k, begin / a.blocks_k}, ahead = at;
	uint16_t *to = a.w + ((size_t)at.nb * 128 + 32 * (warp & 3) + 8 * (warp >> 2) + g) * a.k +
		       at.kb * 128 + 8 * q;

#pragma unroll
	for (int i = 0; i < S::PER_THREAD; i++) {
		const uint32_t c = S::THREADS * i + threadIdx.x;

		offset[i] = c / (S::ROW / 16) * (uint32_t)a.row_bytes + c % (S::ROW / 16) * 16;
		keep(offset[i]);
	}
#pragma unroll 1
	for (uint32_t s = 0; s < S::STAGES; s++) {
		if (begin + s < end) {
			unpack_fetch<S>(a, stage + s * S::STAGE, ahead, offset);
			ahead.next(a);
		}
		cp_async_commit();
	}
	unpack_h64(smem + S::H64);
	cp_async_wait<S::STAGES - 1>();
	proxy_fence();
	__syncthreads();
#pragma unroll 1
	for (uint32_t b = begin; b < end; b++) {
		if (b == begin || at.kb == 0)
			rows.load(a.svh + at.nb * 128, warp, lane);
		{
			float d[2][32];

			unpack_over_k<RATE2, CB>(stage + warp * S::TILE, rl, h, d);
			unpack_across(stage + S::SUH + 16 * q, d, b_at);
		}
		/* The next block's trellis is there before the barrier, B for the tensor cores behind it. */
		cp_async_wait<S::STAGES - 2>();
		proxy_fence();
		__syncthreads();
		if (b + S::STAGES < end) {
			unpack_fetch<S>(a, stage, ahead, offset);
			ahead.next(a);
		}
		cp_async_commit();
		stage = stage == smem + S::RING + (S::STAGES - 1) * S::STAGE ? smem + S::RING
									     : stage + S::STAGE;

		const uint64_t desc = wgmma_desc(b_desc);
		float d[64];

		uint32_t a2[4][4];

#pragma unroll
		for (int t = 0; t < 4; t++)
			rows.make(t, warp, a2[t]);
		wgmma_fence();
		wgmma_from<128, true>::rs(d, a2[0], desc);
#pragma unroll
		for (int t = 1; t < 4; t++)
			wgmma_from<128, false>::rs(d, a2[t], desc + 2 * t);
		wgmma_commit();
		b_at += flip;
		b_desc += flip;
		flip = 0u - flip;
		wgmma_wait<0>();
		wgmma_hold(d);

#pragma unroll
		for (int e = 0; e < 2; e++)
#pragma unroll
			for (int c = 0; c < 4; c++) {
				uint32_t o[4];

#pragma unroll
				for (int j = 0; j < 4; j++)
					o[j] = pack_16<BF16>(d[4 * (4 * c + j) + 2 * e],
							     d[4 * (4 * c + j) + 2 * e + 1]);
				*(uint4 *)(to + e * 16 * (size_t)a.k + 32 * c) = make_uint4(o[0], o[1], o[2], o[3]);
			}
		to += 128 + (at.kb + 1 == a.blocks_k ? 127 * (size_t)a.k : 0);
		at.next(a);
	}
	cp_async_wait<0>();
#endif
}

#endif /* __CUDACC__ */

/* What instance files hold: the compiled rebuilds of one codebook. */
template <int RATE2, int CB, bool WANTED> struct unpack_compiled {
	static unpack_entry entry(bool)
	{
		return {};
	}
};

#ifndef EXL3_EMULATE
template <int RATE2, int CB> struct unpack_compiled<RATE2, CB, true> {
	static unpack_entry entry(bool bf16)
	{
		using S = unpack_shape<RATE2>;

		return {bf16 ? (const void *)unpack_wgmma<RATE2, CB, true>
			     : (const void *)unpack_wgmma<RATE2, CB, false>,
			S::BYTES, S::THREADS, S::PER_SM};
	}
};
#endif

#define EXL3_UNPACK_CASE(r, cb)                     \
	if (rate2 == r && cb == EXL3_UNPACK_CB) \
		return unpack_compiled<r, cb, cb == EXL3_UNPACK_CB>::entry(bf16);

} // namespace exl3
#endif
