/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv_wide.cuh - the few-row kernel for 9 to 32 rows on sm_90a: one decode feeds all rows through wgmma.
 *
 * Work, sums and output are those of gemv.cuh; a position is 64 rows of weights here (a.kt = k / 64).
 *
 *       team      four warps, a warpgroup; every fourth position of the block's range is its own
 *       warp w    n-tiles w and 4 + w of a strip's eight, lane's A fragment straight from the bits
 *       B         [N tokens][64 k] of the image, rows of 128 bytes with the 128B swizzle
 *
 *       cp.async  weights and B of position i + DEPTH     (team of 128 threads)
 *       decode    tile t + 1        beside
 *       wgmma     tile t
 *
 * A slot is filled again two positions after its last use: then every warp has waited for the products
 * that read it, without a wait of their own. The image is made by a kernel before (gemv.cu) that writes
 * it as B lies in shared memory; weights are asked for before that kernel is waited for.
 *
 * Two other places of B, to be compared. B by cp.async takes a proxy fence in every step, which is a memory barrier for
 * all that is on its way. WIDE_BULK: one bulk copy per position, which the tensor core sees without a fence. WIDE_FUSED:
 * each block makes its part of the image itself, in shared memory, and no kernel runs before; for one shard and ranges
 * of k that are short enough.
 */
#ifndef EXL3_CUDA_GEMV_WIDE_CUH
#define EXL3_CUDA_GEMV_WIDE_CUH

#include "kernels/cuda/gemv.cuh"

namespace exl3
{

enum wide_place { WIDE_COPIED, WIDE_BULK, WIDE_FUSED };

template <int RATE2_, int CB_, int N_, int BATCH_, int HX_, wide_place PLACE_ = WIDE_COPIED>
struct wide_cfg {
	static constexpr wide_place PLACE = PLACE_;
	static constexpr int RATE2 = RATE2_, CB = CB_, N = N_, HX = HX_;
	static constexpr int BATCH = BATCH_; /* tiles of a warp that are multiplied together */
	static constexpr int TEAMS = 4, WARPS = 4 * TEAMS, KG = TEAMS, HALVES = 1, NT = 8;
	static constexpr int TOKENS = N, RED = N, ROW = NT * 16 + 4;
	static constexpr int K_TILES = 4;
	static constexpr int ITEM = K_TILES * 8 * 16 * RATE2; /* bytes of weights of a position */
	static constexpr int B_ITEM = N * 128;
	static constexpr int B_SLOT = PLACE == WIDE_FUSED ? 0 : B_ITEM; /* of a stage */
	static constexpr int HEAD = PLACE == WIDE_BULK ? 1024 : 0;      /* barriers before the ring */
	static constexpr int FIT =
		(226 * 1024 - TEAMS * N * ROW * 4 - 2048 - HEAD) / TEAMS / (ITEM + B_ITEM);
	static constexpr int MOST = PLACE == WIDE_FUSED ? 4 : 5;
	static constexpr int STAGES = FIT > MOST ? MOST : FIT, DEPTH = STAGES - 2;
	static constexpr int COPIES = (ITEM / 16 + 127) / 128; /* of a thread, weights */
	static constexpr gemv_form FORM = FORM_WIDE;
	static constexpr bool FUSED = PLACE == WIDE_FUSED;
	static constexpr int BLOCK = 8 / K_TILES; /* positions in 128 rows */
	static constexpr int IMAGE_BLOCK = 128 * 2 * N; /* bytes of the image of 128 rows */

	static_assert(STAGES >= 3, "one position in flight, one in work, one behind");
};

template <class C> static constexpr EXL3_HD gemv_shape wide_shape_of()
{
	return {C::WARPS, C::TEAMS, C::TOKENS, C::RED,
		C::HEAD + C::TEAMS *C::STAGES *(C::ITEM + C::B_SLOT), C::ROW};
}

#ifdef __CUDACC__

template <class C> struct wide_loader {
	int rest;     /* steps until something else than pointers changes; 0: all is copied */
	int position; /* of the first step after those */
	const char *src, *b;
	uint32_t row;               /* bytes to the next step's weights */
	uint32_t offset[C::COPIES]; /* of this thread's copies in a position */

	EXL3_DEV_MEMBER void enter(const gemv_args &a, uint32_t begin)
	{
		const uint32_t thread = threadIdx.x & 127;

		rest = 0;
		if (position < (int)begin)
			return;
		const uint32_t strip = gemv_strip_of(a, (uint32_t)position);
		const uint32_t top = strip * a.kt, kt = (uint32_t)position - top;
		const int shard = gemv_shard_of(a, strip);
		const gemv_shard &s = a.shard[shard];
		const uint32_t tile_row = s.nt * (16 * C::RATE2);

#pragma unroll
		for (int i = 0; i < C::COPIES; i++) {
			const uint32_t j = thread + 128 * i;

			offset[i] = j / (8 * C::RATE2) * tile_row + j % (8 * C::RATE2) * 16;
		}
		row = C::TEAMS * C::K_TILES * tile_row;
		src = (const char *)s.trellis + (size_t)kt * C::K_TILES * tile_row +
		      (strip - s.strip) * (8 * 16 * C::RATE2);
		b = (const char *)a.image + ((size_t)shard * a.kt + kt) * C::B_ITEM +
		    (C::PLACE == WIDE_COPIED ? thread * 16 : 0);
		rest = (position - (int)max(begin, top)) / C::TEAMS + 1;
		position -= rest * C::TEAMS;
	}

	EXL3_DEV_MEMBER void next()
	{
		src -= row;
		b -= C::TEAMS * C::B_ITEM;
	}

	/* B of a position by one thread of the team. @b is the team's, so without the thread's part. */
	EXL3_DEV_MEMBER void bulk_b(uint32_t dst, uint32_t bar) const
	{
		if ((threadIdx.x & 127) == 0) {
			mbar_expect(bar, C::B_ITEM);
			bulk_load(dst, b, C::B_ITEM, bar);
		}
	}

	/* @dst: this thread's 16 bytes of the first copy. */
	EXL3_DEV_MEMBER void copy_weights(uint32_t dst) const
	{
		const uint32_t thread = threadIdx.x & 127;

#pragma unroll
		for (int i = 0; i < C::COPIES; i++)
			if (128 * (i + 1) <= C::ITEM / 16 || 128 * i + thread < C::ITEM / 16)
				cp_async16(dst + 128 * 16 * i, src + offset[i]);
	}

	EXL3_DEV_MEMBER void copy_b(uint32_t dst, uint32_t m) const
	{
		const uint32_t thread = threadIdx.x & 127;

#pragma unroll
		for (uint32_t i = 0; i < C::B_ITEM / 16; i += 128)
			if (i + thread < m * 8)
				cp_async16(dst + i * 16, b + i * 16);
	}
};

/* A team's steps of one strip; see gemv_strip(). */
template <class C>
EXL3_DEV void wide_strip(const gemv_args &args, uint32_t smem, uint32_t begin, uint32_t end,
			 uint32_t strip, uint32_t kb0, int &issued, int &taken,
			 float (&acc)[2][C::N / 2])
{
	uint32_t thread = threadIdx.x;

	keep(thread);
	const uint32_t team = thread >> 7, lane = thread & 31, m = args.m;
	const int first = (int)(end - 1 - team);
	const uint32_t lo = max(begin, strip * args.kt);
	const int position = first - taken * C::TEAMS;
	int steps = position >= (int)lo ? (position - (int)lo) / C::TEAMS + 1 : 0;
	const uint32_t head = smem + C::HEAD + (C::FUSED ? args.image_blocks * C::IMAGE_BLOCK : 0);
	const uint32_t b_ring = head + team * C::STAGES * C::B_SLOT;
	const uint32_t ring = head + C::TEAMS * C::STAGES * C::B_SLOT + team * C::STAGES * C::ITEM;
	const uint32_t bars = smem + team * C::STAGES * 8;
	uint32_t phase = (uint32_t)taken / C::STAGES & 1;
	/* Fused: a strip's k-tiles lie in the image in one piece. */
	const int kt = position - (int)(strip * args.kt);
	uint32_t b_image = smem + (kt >= (int)(C::BLOCK * kb0)
					   ? kt - (int)(C::BLOCK * kb0)
					   : kt + (int)(args.kt - C::BLOCK * kb0)) *
					  C::B_ITEM;
	run_lane<C::RATE2> rl(lane);
	uint32_t slot = taken % C::STAGES, fill = (taken + C::DEPTH) % C::STAGES;
	const uint32_t copy_at = (thread & 127) * 16;
	uint32_t tile_at = ring + (thread >> 5 & 3) * (16 * C::RATE2);
	wide_loader<C> in;

	keep(tile_at);
	in.position = first - issued * C::TEAMS;
	in.enter(args, begin);
	issued += steps;
	taken += steps;
#pragma unroll 1
	while (steps > 0) {
		const bool copying = in.rest > 0;
		int round = copying && in.rest < steps ? in.rest : steps;

		steps -= round;
		in.rest -= round;
#pragma unroll 1
		do {
			uint32_t addr[run<C::RATE2>::NV + 1], w[2][C::BATCH][4];
			const uint64_t desc =
				wgmma_desc(C::FUSED ? b_image : b_ring + slot * C::B_SLOT);

			cp_async_wait<C::DEPTH - 1>();
			if (C::PLACE == WIDE_COPIED)
				proxy_fence();
			team_sync(1 + team, 128);
			if (C::PLACE == WIDE_BULK)
				mbar_wait(bars + 8 * slot, phase);
			if (copying) {
				in.copy_weights(ring + fill * C::ITEM + copy_at);
				if (C::PLACE == WIDE_BULK)
					in.bulk_b(b_ring + fill * C::B_SLOT, bars + 8 * fill);
				if (C::PLACE == WIDE_COPIED)
					in.copy_b(b_ring + fill * C::B_SLOT + copy_at, m);
				in.next();
			}
			cp_async_commit();
#pragma unroll
			for (int j = 0; j <= run<C::RATE2>::NV; j++)
				addr[j] = tile_at + slot * C::ITEM + rl.offset[j];
#pragma unroll
			for (int t = 0; t < 2 * C::K_TILES; t += C::BATCH) {
				uint32_t(&a)[C::BATCH][4] = w[t / C::BATCH & 1];

#pragma unroll
				for (int u = t; u < t + C::BATCH; u++) {
					uint32_t v[run<C::RATE2>::NV];

					rl.load(addr,
						(u >> 1) * (8 * 16 * C::RATE2) +
							(u & 1) * (4 * 16 * C::RATE2),
						v);
					decode_packed<C::RATE2, C::CB, C::HX>(v, a[u - t]);
				}
				wgmma_fence();
#pragma unroll
				for (int u = t; u < t + C::BATCH; u++)
					wgmma<C::N>::rs(acc[u & 1], a[u - t], desc + 2 * (u >> 1));
				wgmma_commit();
				wgmma_wait<1>();
			}
			if (C::PLACE == WIDE_BULK && slot + 1 == C::STAGES)
				phase ^= 1;
			b_image -= C::TEAMS * C::B_ITEM;
			slot = slot + 1 == C::STAGES ? 0 : slot + 1;
			fill = fill + 1 == C::STAGES ? 0 : fill + 1;
		} while (--round);
		if (copying && !in.rest)
			in.enter(args, begin);
	}
	wgmma_wait<0>();
	wgmma_hold(acc[0]);
	wgmma_hold(acc[1]);
}

/* Fused: this block's part of the image; returns its first block of k. */
template <class C>
EXL3_DEV uint32_t wide_image(const gemv_args &a, uint32_t begin, uint32_t hi, uint32_t *image)
{
	const uint32_t kb = a.kt / C::BLOCK, warp = threadIdx.x >> 5;
	uint32_t nb = (hi - 1) / C::BLOCK - begin / C::BLOCK + 1;
	uint32_t kb0 = (begin - gemv_strip_of(a, begin) * a.kt) / C::BLOCK;

	if (nb >= kb) {
		kb0 = 0;
		nb = kb;
	}
	const uint32_t total = a.ablate & ABLATE_TRANSFORM ? 0 : nb * a.m;

#pragma unroll 1
	for (uint32_t r0 = warp * 8; r0 < total; r0 += C::WARPS * 8) {
		raw_rows eight;

		gemv_rows_load(a, a.shard[0].suh, kb, kb0, nb, r0, eight);
		gemv_rows_make(a, nb, r0, eight, image, NULL);
	}
	proxy_fence();
	__syncthreads();
	return kb0;
}

template <class C>
__global__ void __launch_bounds__(C::WARPS * 32, 1) wide_kernel(const __grid_constant__ gemv_args a)
{
#if defined(EXL3_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
	extern __shared__ __align__(1024) char gemv_smem[];
	const uint32_t clocks = clock32();

	gemv_touch(a);
	/* Fused: the image lies before all else, as the tensor core reads it. */
	const uint32_t image_bytes = C::FUSED ? a.image_blocks * C::IMAGE_BLOCK : 0;
	gemv_layout l = gemv_shared(wide_shape_of<C>(), C::FUSED ? C::N : a.m, 0);
	const uint32_t begin = gemv_begin(a, blockIdx.x), end = gemv_begin(a, blockIdx.x + 1);
	const uint32_t smem = smem_addr(gemv_smem);
	uint32_t strip = gemv_strip_of(a, end - 1);
	int issued = C::DEPTH, taken = 0;
	uint32_t kb0 = 0;
	bool flushed = false;

	l.red += image_bytes;
	if (C::PLACE == WIDE_BULK) {
		if (threadIdx.x < C::TEAMS * C::STAGES)
			mbar_init(smem + 8 * threadIdx.x, 1);
		mbar_init_fence();
		__syncthreads();
	}
	gemv_trace(a, AT_START, clocks);
	if (a.ablate & ABLATE_ALL)
		return;
	{
		const uint32_t team = threadIdx.x >> 7, at = (threadIdx.x & 127) * 16;
		const uint32_t head = smem + C::HEAD + image_bytes;
		const uint32_t b_ring = head + team * C::STAGES * C::B_SLOT;
		const uint32_t ring = head + C::TEAMS * C::STAGES * C::B_SLOT +
				      team * C::STAGES * C::ITEM + at;
		wide_loader<C> in;

		in.position = (int)(end - 1 - team);
		in.enter(a, begin);
		wide_loader<C> in_b = in;
#pragma unroll 1
		for (int s = 0; s < C::DEPTH && in.rest; s++) {
			in.copy_weights(ring + s * C::ITEM);
			in.next();
			if (!--in.rest)
				in.enter(a, begin);
		}
		gemv_prefetch_scales(a, strip);
		grid_wait();
#pragma unroll 1
		for (int s = 0; s < C::DEPTH; s++) {
			if (!C::FUSED && in_b.rest) {
				if (C::PLACE == WIDE_BULK)
					in_b.bulk_b(b_ring + s * C::B_SLOT,
						    smem + (team * C::STAGES + s) * 8);
				else
					in_b.copy_b(b_ring + s * C::B_SLOT + at, a.m);
				in_b.next();
				if (!--in_b.rest)
					in_b.enter(a, begin);
			}
			cp_async_commit();
		}
	}
	gemv_trace(a, AT_ASKED);
	gemv_trace(a, AT_X);
	if (C::FUSED)
		kb0 = wide_image<C>(a, begin, min(end, (strip + 1) * a.kt), (uint32_t *)gemv_smem);
#pragma unroll 1
	for (;; strip--) {
		const uint32_t top = strip * a.kt, lo = max(begin, top), thread = threadIdx.x;
		const int shard = gemv_shard_of(a, strip);
		float *red = (float *)(gemv_smem + l.red);
		float acc[2][C::N / 2];

		gemv_trace(a, AT_IMAGE);
#pragma unroll
		for (int i = 0; i < C::N / 2; i++)
			acc[0][i] = acc[1][i] = 0.0f;
		wide_strip<C>(a, smem, begin, end, strip, kb0, issued, taken, acc);
		gemv_trace(a, AT_MAIN);
		if (flushed)
			__syncthreads();
		flushed = true;
		{
			const uint32_t g = thread >> 2 & 7, q = thread & 3, w = thread >> 5 & 3;
			float *out = red + ((thread >> 7) * a.m + 2 * q) * C::ROW + w * 16 + g;

#pragma unroll
			for (int j = 0; j < C::N / 8; j++)
#pragma unroll
				for (int h = 0; h < 2; h++) {
					float *o = out + 8 * j * C::ROW + 64 * h;
					const float *d = acc[h] + 4 * j;

					if (8 * j + 2 * q < a.m) {
						o[0] = d[0];
						o[8] = d[2];
					}
					if (8 * j + 2 * q + 1 < a.m) {
						o[C::ROW] = d[1];
						o[C::ROW + 8] = d[3];
					}
				}
		}
		__syncthreads();
		gemv_trace(a, AT_FLUSH);
		gemv_reduce<C>(a, a.shard[shard], strip, red, 0, lo, end >= top + a.kt);
		if (lo == begin)
			break;
	}
	gemv_trace(a, AT_END);
	grid_launch_dependents();
#endif
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
