/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv.cuh - linear layer for few rows (m <= 32): one launch, or two where the input transform is shared.
 *
 *       y[m, n] = ((x * suh) Hk What Hn) * svh + bias, shards side by side
 *
 * The work is a flat list of positions, position = strip * (k / 16) + k-tile; a strip is 128 columns of
 * one shard (one output Hadamard block), a position 128 columns x 16 rows of weights. Each block takes an
 * equal, contiguous range of positions, whatever the shape, and walks it from its end to its start:
 *
 *       strips         |     s      |    s + 1   |
 *       blocks         c-1 ] [    c     ] [ c+1
 *                             ^ end of strip s: done last; c owns s and adds the sums of the others
 *                                    ^ start of strip s + 1: done first, sums handed to its owner
 *
 *       warp (kg, half)   every KG-th position of the range, NT of the strip's 8 tiles
 *       lane              A fragment of a tile from its bits (trellis.cuh), B fragment from the image of x
 *
 * Stages against time, per warp; no block barrier inside a strip:
 *
 *       cp.async      weights of step i + S - 1 (and B of that step when the image is in global memory)
 *       decode, mma   step i
 *
 * (Bulk copies with a producer warp were slower: a k-tile of a strip is 256 bytes per bit, and copies of
 * 1 KiB reach half of the memory's rate.) Between strips only counters live: what the main loop needs is
 * made anew before it, so that the register needs of the transform and of the sums do not add to its own.
 *
 * The image of x, H(x * suh) / 8 as fp16: 8 words per token and 16 values of k in the order of the B
 * fragment. Fused: each block makes the part that its range needs, in shared memory, while its first
 * weights are on their way. Shared: a small kernel makes all of it in global memory, and the main
 * kernel's ring brings it along with the weights (large m * k, where blocks would repeat the transform).
 *
 * Sums cross warps through shared memory, and blocks through words in global memory that carry their own
 * flag: 0 is "not there yet", a value is stored with its bits inverted (no sum has the NaN pattern
 * 0xffffffff), and the owner zeroes what it has read. The owner waits only for blocks with lower
 * numbers, which start no later than it does, and adds in their order: same shapes, same bits. (Clusters of
 * four blocks, one per SM, do not all fit on an H200 at a time; so the sums do not take that way.)
 */
#ifndef EXL3_CUDA_GEMV_CUH
#define EXL3_CUDA_GEMV_CUH

#include "kernels/cuda/gemv_sums.cuh"
#include "kernels/cuda/trellis.cuh"

namespace exl3
{

/*
 * mul1: the A fragment with 1024 + S instead of the weight, exact in fp16. With the sum of x it gives
 * sum x w = MUL1_SCALE sum x (1024 + S) + MUL1_OFFSET sum x.
 */
constexpr float MUL1_OFFSET = MUL1_MEAN - 1534.0f * MUL1_SCALE; /* the value of S = -1024 */

template <int RATE2, int HX>
static EXL3_HD void decode_sums(const uint32_t (&v)[run<RATE2>::NV], uint32_t (&a)[4])
{
	uint32_t x[8];

	decode_products<RATE2, CB_MUL1, HX>(v, x);
	a[0] = prmt(bytesum(x[0]), bytesum(x[1]), 0x5410);
	a[1] = prmt(bytesum(x[4]), bytesum(x[5]), 0x5410);
	a[2] = prmt(bytesum(x[2]), bytesum(x[3]), 0x5410);
	a[3] = prmt(bytesum(x[6]), bytesum(x[7]), 0x5410);
}

#ifdef __CUDACC__

template <class C> struct gemv_acc {
	float f[C::FORM == FORM_BYTES ? 1 : C::NT][C::MG][4];
	int i[C::FORM == FORM_BYTES ? C::NT : 1][C::MG][4];
	int sum[C::MG]; /* bytes: of this lane's activations */
	float x[C::SUMS ? C::MG : 1][4]; /* sums of x, laid out like f */
};

template <class C> EXL3_DEV void gemv_clear(gemv_acc<C> &acc)
{
#pragma unroll
	for (int g = 0; g < C::MG; g++) {
		acc.sum[g] = 0;
		if constexpr (C::SUMS)
#pragma unroll
			for (int j = 0; j < 4; j++)
				acc.x[g][j] = 0.0f;
#pragma unroll
		for (int t = 0; t < C::NT; t++)
#pragma unroll
			for (int j = 0; j < 4; j++)
				if constexpr (C::FORM == FORM_BYTES)
					acc.i[t][g][j] = 0;
				else
					acc.f[t][g][j] = 0.0f;
	}
}

/* This lane's part of the B image of a k-tile: byte offset of its words, per group of columns. */
template <class C> EXL3_DEV void gemv_b_offsets(int lane, uint32_t m, uint32_t (&offset)[C::MG])
{
	const int g = lane >> 2, q = lane & 3;

	/* Columns beyond m repeat the last token; nobody reads them. */
#pragma unroll
	for (int j = 0; j < C::MG; j++) {
		if constexpr (C::FORM == FORM_BYTES)
			offset[j] =
				min((uint32_t)(j * 4 + (g >> 1)), m - 1) * 32 + 8 * q + 4 * (g & 1);
		else
			offset[j] = min((uint32_t)(j * 8 + g), m - 1) * 32 + 8 * q;
		keep(offset[j]);
	}
}

/* One step: NT tiles at @tiles times the B image of their k-tile at @b, shared memory addresses. */
template <class C>
EXL3_DEV void gemv_step(uint32_t tiles, const run_lane<C::RATE2> &rl, uint32_t b,
			const uint32_t (&b_offset)[C::MG], gemv_acc<C> &acc)
{
	uint32_t b0[C::MG], b1[C::MG], b2[C::MG], b3[C::MG];
	uint32_t addr[run<C::RATE2>::NV + 1];
	constexpr uint32_t ONES = 0x3c003c00u;

#pragma unroll
	for (int j = 0; j <= run<C::RATE2>::NV; j++)
		addr[j] = tiles + rl.offset[j];

#pragma unroll
	for (int j = 0; j < C::MG; j++) {
		if constexpr (C::FORM == FORM_BYTES) {
			const uint32_t w = lds32(b + b_offset[j]);

			acc.sum[j] = dp4a_signed(w, 0x01010101u, acc.sum[j]);
			b0[j] = prmt(w, 0, 0x0000);
			b1[j] = prmt(w, 0, 0x1111);
			b2[j] = prmt(w, 0, 0x2222);
			b3[j] = prmt(w, 0, 0x3333);
		} else {
			const uint2 w = lds64(b + b_offset[j]);

			if constexpr (C::FORM == FORM_DUP) {
				b0[j] = prmt(w.x, 0, 0x1010);
				b1[j] = prmt(w.x, 0, 0x3232);
				b2[j] = prmt(w.y, 0, 0x1010);
				b3[j] = prmt(w.y, 0, 0x3232);
			} else {
				b0[j] = w.x;
				b1[j] = w.y;
			}
			if constexpr (C::SUMS)
				mma_f16(acc.x[j], ONES, ONES, ONES, ONES, b0[j], b1[j]);
		}
	}
#pragma unroll
	for (int t = 0; t < C::NT; t++) {
		uint32_t v[run<C::RATE2>::NV];

		rl.load(addr, t * 16 * C::RATE2, v);
		if constexpr (C::FORM == FORM_DUP) {
			uint32_t r[8];

			decode_dup<C::RATE2, C::CB, C::HX>(v, r);
			mma_f16(acc.f[t][0], r[0], r[4], r[1], r[5], b0[0], b1[0]);
			mma_f16(acc.f[t][0], r[2], r[6], r[3], r[7], b2[0], b3[0]);
		} else if constexpr (C::FORM == FORM_BYTES) {
			uint32_t r[8];

			decode_products<C::RATE2, C::CB, C::HX>(v, r);
#pragma unroll
			for (int j = 0; j < C::MG; j++) {
				mma_u8s8(acc.i[t][j], r[0], r[4], r[1], r[5], b0[j], b1[j]);
				mma_u8s8(acc.i[t][j], r[2], r[6], r[3], r[7], b2[j], b3[j]);
			}
		} else {
			uint32_t r[4];

			if constexpr (C::SUMS)
				decode_sums<C::RATE2, C::HX>(v, r);
			else
				decode_packed<C::RATE2, C::CB, C::HX>(v, r);
#pragma unroll
			for (int j = 0; j < C::MG; j++)
				mma_f16(acc.f[t][j], r[0], r[1], r[2], r[3], b0[j], b1[j]);
		}
	}
}

/* A warp's sums of tokens token0 .. token0 + RED - 1 into its part of shared memory. */
template <class C>
EXL3_DEV void gemv_flush(gemv_acc<C> &acc, float *red, int token0, uint32_t m, const uint32_t *peak)
{
	int lane = threadIdx.x & 31;

	keep(lane);
	const int g = lane >> 2, q = lane & 3;

#pragma unroll
	for (int j = 0; j < C::MG; j++) {
		if constexpr (C::FORM == FORM_BYTES) {
			/* Columns 2q and 2q + 1 are hi and lo of token 4j + q. */
			int sum = acc.sum[j];

			sum += __shfl_xor_sync(~0u, sum, 1);
			sum += __shfl_xor_sync(~0u, sum, 2);
			const int sum_hi = __shfl_sync(~0u, sum, 8 * q);
			const int sum_lo = __shfl_sync(~0u, sum, 8 * q + 4);
			const uint32_t token = j * 4 + q;

			if (token < m) {
				const float unit = half_bits(peak[token]) * (1.0f / 127.0f);
				const float hi = unit * MUL1_SCALE, lo = hi * (1.0f / 254.0f);
				const float mean =
					unit * MUL1_MEAN *
					((float)sum_hi + (float)sum_lo * (1.0f / 254.0f));

#pragma unroll
				for (int t = 0; t < C::NT; t++) {
					const int(&c)[4] = acc.i[t][j];
					float *out = red + token * C::ROW + t * 16 + g;

					out[0] = (float)(c[0] - 510 * sum_hi) * hi +
						 (float)(c[1] - 510 * sum_lo) * lo + mean;
					out[8] = (float)(c[2] - 510 * sum_hi) * hi +
						 (float)(c[3] - 510 * sum_lo) * lo + mean;
				}
			}
		} else {
			const uint32_t token = j * 8 + 2 * q;

			if (j * 8 < token0 || j * 8 >= token0 + C::RED)
				continue;
#pragma unroll
			for (int t = 0; t < C::NT; t++) {
				float c[4];
				float *out = red + (token - token0) * C::ROW + t * 16 + g;

#pragma unroll
				for (int i = 0; i < 4; i++)
					if constexpr (C::SUMS)
						c[i] = acc.f[t][j][i] * MUL1_SCALE +
						       acc.x[j][i] * MUL1_OFFSET;
					else
						c[i] = acc.f[t][j][i];
				if (token < m) {
					out[0] = c[0];
					out[8] = c[2];
				}
				if (token + 1 < m) {
					out[C::ROW] = c[1];
					out[C::ROW + 8] = c[3];
				}
			}
		}
	}
}

/*
 * What a warp copies next: positions downwards, KG apart. Inside a strip only pointers move; the rest is
 * worked out again at its end.
 */
template <class C> struct gemv_loader {
	int rest;     /* steps until something else than pointers changes; 0: all is copied */
	int position; /* of the first step after those */
	const char *src; /* this lane's bytes of the weights */
	const char *b;   /* shared image: this lane's bytes of it */
	uint32_t row;    /* bytes to the next k-tile's weights */

	EXL3_DEV_MEMBER void enter(const gemv_args &a, uint32_t begin)
	{
		const uint32_t lane = threadIdx.x & 31, half = (threadIdx.x >> 5) % C::HALVES;

		rest = 0;
		if (position < (int)begin)
			return;
		const uint32_t strip = gemv_strip_of(a, (uint32_t)position);
		const uint32_t top = strip * a.kt, kt = (uint32_t)position - top;
		const int shard = gemv_shard_of(a, strip);
		const gemv_shard &s = a.shard[shard];

		row = s.nt * (16 * C::RATE2);
		src = (const char *)s.trellis + (size_t)kt * C::K_TILES * row +
		      ((strip - s.strip) * 8 + half * C::NT) * (16 * C::RATE2) + lane * 16;
		if (!C::FUSED)
			b = (const char *)a.image +
			    ((size_t)shard * a.kt + kt) * a.m * (32 * C::K_TILES) + lane * 16;
		rest = (position - (int)max(begin, top)) / C::KG + 1;
		position -= rest * C::KG;
	}

	EXL3_DEV_MEMBER void start(const gemv_args &a, uint32_t begin, int first)
	{
		position = first;
		enter(a, begin);
	}

	EXL3_DEV_MEMBER void next(const gemv_args &a)
	{
		src -= C::KG * C::K_TILES * row;
		if (!C::FUSED)
			b -= C::KG * a.m * (32 * C::K_TILES);
	}

	EXL3_DEV_MEMBER void copy_weights(uint32_t dst) const
	{
		const uint32_t lane = threadIdx.x & 31;

#pragma unroll
		for (int k = 0; k < C::K_TILES; k++)
#pragma unroll
			for (uint32_t c = 0; c < C::ROW_ITEM / 16; c += 32)
				if (c + 32 <= C::ROW_ITEM / 16 || c + lane < C::ROW_ITEM / 16)
					cp_async16(dst + k * C::ROW_ITEM + c * 16,
						   src + (size_t)k * row + c * 16);
	}

	EXL3_DEV_MEMBER void copy_b(uint32_t dst, uint32_t m) const
	{
		const uint32_t lane = threadIdx.x & 31;

#pragma unroll
		for (uint32_t c = 0; c < C::TOKENS * 2 * C::K_TILES; c += 32)
			if (c + lane < m * (2 * C::K_TILES))
				cp_async16(dst + c * 16, b + c * 16);
	}
};

/* Scales are cold too: asked for early, used at the very end. */
EXL3_DEV void gemv_prefetch_scales(const gemv_args &a, uint32_t strip)
{
	const gemv_shard &s = a.shard[gemv_shard_of(a, strip)];

	if (threadIdx.x < 2) /* 128 values are two lines */
		prefetch_l2(s.svh + (strip - s.strip) * 128 + threadIdx.x * 64);
}

/* Points in time of a block, for the benchmark (ABLATE_TRACE): clocks of its SM, by thread 0. */
enum gemv_point {
	AT_START,
	AT_ASKED,
	AT_X,
	AT_IMAGE,
	AT_MAIN,
	AT_FLUSH,
	AT_END,
	AT_START_NS,
	AT_END_NS,
};

EXL3_DEV void gemv_trace(const gemv_args &a, gemv_point point, uint32_t clocks)
{
	if ((a.ablate & ABLATE_TRACE) && threadIdx.x == 0) {
		a.trace[blockIdx.x * 16 + point] = clocks;
		if (point == AT_START || point == AT_END)
			a.trace[blockIdx.x * 16 + (point == AT_START ? AT_START_NS : AT_END_NS)] =
				nanoseconds32();
	}
}

EXL3_DEV void gemv_trace(const gemv_args &a, gemv_point point)
{
	gemv_trace(a, point, clock32());
}

/*
 * Fused: the part of the image that the rest of the range needs; returns its first block of k. @between
 * runs while x is on its way, or, with @first, before it is asked for.
 */
template <class C, class F>
EXL3_DEV uint32_t gemv_make_image(const gemv_args &a, const gemv_layout &l, int shard,
				  uint32_t begin, uint32_t hi, char *smem, bool first, F between)
{
	uint32_t *image = (uint32_t *)(smem + l.image);
	uint32_t *peak = C::FORM == FORM_BYTES ? (uint32_t *)(smem + l.peak) : (uint32_t *)NULL;
	const __half *suh = a.shard[shard].suh;
	const uint32_t kb = a.kt / C::BLOCK, warp = threadIdx.x >> 5;
	uint32_t nb = (hi - 1) / C::BLOCK - begin / C::BLOCK + 1;
	uint32_t kb0 = (begin - gemv_strip_of(a, begin) * a.kt) / C::BLOCK;
	raw_four one = {};
	raw_rows eight = {}; /* or the compiler thinks that it lives through the strips before */

	if (nb >= kb) {
		kb0 = 0;
		nb = kb;
	}
	const uint32_t total = a.ablate & ABLATE_TRANSFORM ? 0 : nb * a.m;
	const bool few = total <= C::WARPS;

#pragma unroll 1
	for (int pass = 0; pass < 2; pass++) {
		if (first == (pass == 0))
			between();
		else if (!few)
			gemv_rows_load(a, suh, kb, kb0, nb, warp * 8, eight);
		else if (warp < total)
			gemv_row_load(a, suh, kb, kb0, warp, one);
	}
	if (C::FORM == FORM_BYTES && threadIdx.x < a.m)
		peak[threadIdx.x] = 0;
	__syncthreads(); /* the image before is not used any more */
	gemv_trace(a, AT_X);
	if (few) {
		if (warp < total)
			gemv_row_make(a, warp, one, image, peak);
	} else {
#pragma unroll 1
		for (uint32_t r0 = warp * 8; r0 < total; r0 += C::WARPS * 8) {
			if (r0 != warp * 8)
				gemv_rows_load(a, suh, kb, kb0, nb, r0, eight);
			gemv_rows_make(a, nb, r0, eight, image, peak);
		}
	}
	__syncthreads();
	if (C::FORM == FORM_BYTES) {
		gemv_quantize(image, nb * 8 * a.m * 4, a.m, peak);
		__syncthreads();
	}
	return kb0;
}

/* A warp's steps of one strip. @issued, @taken: its steps copied and multiplied so far, in its whole range. */
template <class C>
EXL3_DEV void gemv_strip(const gemv_args &a, const gemv_layout &l, uint32_t smem, uint32_t begin,
			 uint32_t end, uint32_t strip, uint32_t kb0, int &issued, int &taken,
			 gemv_acc<C> &acc)
{
	uint32_t thread = threadIdx.x;

	keep(thread); /* nothing of this is kept between strips */
	const uint32_t warp = thread >> 5, lane = thread & 31;
	const int first = (int)(end - 1 - warp / C::HALVES);
	const uint32_t top = strip * a.kt, lo = max(begin, top), m = a.m;
	const int position = first - taken * C::KG;
	int steps = position >= (int)lo ? (position - (int)lo) / C::KG + 1 : 0;
	/* A strip's k-tiles lie in the image in one piece. */
	const int kt = position - (int)top;
	const int image_row = kt >= (int)(C::BLOCK * kb0) ? kt - (int)(C::BLOCK * kb0)
							  : kt + (int)(a.kt - C::BLOCK * kb0);
	/* Places in the ring are this lane's 16 bytes for the copies; reading takes that back. */
	const uint32_t ring = smem + warp * C::STAGES * C::STAGE + lane * 16;
	run_lane<C::RATE2> rl(lane);
	uint32_t b_offset[C::MG];
	uint32_t ring_last = ring + (C::STAGES - 1) * C::STAGE;
	uint32_t tiles = ring + taken % C::STAGES * C::STAGE;
	uint32_t free = ring + (taken + C::STAGES - 1) % C::STAGES * C::STAGE;
	const uint32_t b_row = m * 32;
	uint32_t b_image = smem + l.image + image_row * (int)(C::K_TILES * b_row);
	uint32_t b_step = C::KG * C::K_TILES * b_row;
	gemv_loader<C> in;

	keep(ring_last);
	keep(b_step);
#pragma unroll
	for (int j = 0; j <= run<C::RATE2>::NV; j++) {
		rl.offset[j] -= lane * 16;
		keep(rl.offset[j]);
	}
	gemv_b_offsets<C>(lane, m, b_offset);
	if (!C::FUSED)
#pragma unroll
		for (int j = 0; j < C::MG; j++) {
			b_offset[j] += C::ITEM - lane * 16;
			keep(b_offset[j]);
		}
	in.start(a, begin, first - issued * C::KG);
	issued += steps; /* beyond the end of the range there is nothing to copy either */
	taken += steps;
	/* Rounds end where the copies reach another strip, so that the loop inside is nothing but the work. */
#pragma unroll 1
	while (steps > 0) {
		const bool copying = in.rest > 0;
		int round = copying && in.rest < steps ? in.rest : steps;

		steps -= round;
		in.rest -= round;
#pragma unroll 1
		do {
			cp_async_wait<C::STAGES - 2>();
			__syncwarp();
			/* The slot of the step before is free: all lanes are past it. */
			if (copying) {
				in.copy_weights(free);
				if (!C::FUSED)
					in.copy_b(free + C::ITEM, m);
				in.next(a);
			}
			cp_async_commit();
#pragma unroll
			for (int k = 0; k < C::K_TILES; k++)
				gemv_step<C>(tiles + k * C::ROW_ITEM, rl,
					     (C::FUSED ? b_image : tiles) + k * b_row, b_offset,
					     acc);
			free = tiles;
			tiles = tiles == ring_last ? tiles - (C::STAGES - 1) * C::STAGE
						   : tiles + C::STAGE;
			b_image -= b_step;
		} while (--round);
		if (copying && !in.rest)
			in.enter(a, begin);
	}
}

template <class C>
__global__ void __launch_bounds__(C::WARPS * 32, 1)
	gemv_kernel(const __grid_constant__ gemv_args a)
{
	extern __shared__ __align__(1024) char gemv_smem[];
	const uint32_t start = clock32();

	gemv_touch(a);
	const gemv_layout l = gemv_shared(gemv_shape_of<C>(), a.m, a.image_blocks);
	const uint32_t begin = gemv_begin(a, blockIdx.x), end = gemv_begin(a, blockIdx.x + 1);
	const uint32_t smem = smem_addr(gemv_smem);
	uint32_t strip = gemv_strip_of(a, end - 1);
	int issued = 0, taken = 0;

	gemv_trace(a, AT_START, start);
	if (a.ablate & ABLATE_ALL)
		return;
	/* Weights do not depend on earlier kernels, so they need not wait for those. */
	auto first_copies = [&] {
		const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
		const uint32_t ring = smem + warp * C::STAGES * C::STAGE + lane * 16;
		gemv_loader<C> in;

		in.start(a, begin, (int)(end - 1 - warp / C::HALVES));
		gemv_loader<C> in_b = in;
#pragma unroll 1
		for (int s = 0; s < C::STAGES - 1; s++) {
			if (in.rest) {
				in.copy_weights(ring + s * C::STAGE);
				in.next(a);
				if (!--in.rest)
					in.enter(a, begin);
			}
			if (C::FUSED)
				cp_async_commit();
		}
		grid_wait();
		if (!C::FUSED)
#pragma unroll 1
			for (int s = 0; s < C::STAGES - 1; s++) {
				if (in_b.rest) {
					in_b.copy_b(ring + s * C::STAGE + C::ITEM, a.m);
					in_b.next(a);
					if (!--in_b.rest)
						in_b.enter(a, begin);
				}
				cp_async_commit();
			}
		gemv_prefetch_scales(a, strip);
		issued = C::STAGES - 1;
		gemv_trace(a, AT_ASKED);
	};

	if (!C::FUSED) {
		first_copies();
		gemv_trace(a, AT_X);
	}
	uint32_t kb0 = 0;
	int image_shard = -1;
	bool flushed = false;

#pragma unroll 1
	for (;; strip--) {
		const uint32_t top = strip * a.kt, lo = max(begin, top);
		const int shard = gemv_shard_of(a, strip);
		const uint32_t red_part = min(a.m, (uint32_t)C::RED) * C::ROW;
		float *red = (float *)(gemv_smem + l.red);
		gemv_acc<C> acc;

		if (C::FUSED && shard != image_shard) {
			kb0 = gemv_make_image<C>(a, l, shard, begin, min(end, top + a.kt),
						 gemv_smem, a.weights_first, [&] {
							 if (image_shard < 0)
								 first_copies();
						 });
			image_shard = shard;
		}
		gemv_trace(a, AT_IMAGE);
		gemv_clear<C>(acc);
		gemv_strip<C>(a, l, smem, begin, end, strip, kb0, issued, taken, acc);
		gemv_trace(a, AT_MAIN);
#pragma unroll
		for (int token0 = 0; token0 < C::TOKENS; token0 += C::RED) {
			if ((uint32_t)token0 >= a.m)
				break;
			if (flushed)
				__syncthreads();
			flushed = true;
			gemv_flush<C>(acc, red + (threadIdx.x >> 5) * red_part, token0, a.m,
				      (const uint32_t *)(gemv_smem + l.peak));
			__syncthreads();
			gemv_trace(a, AT_FLUSH);
			gemv_reduce<C>(a, a.shard[shard], strip, red, token0, lo,
				       end >= top + a.kt);
		}
		if (lo == begin)
			break;
	}
	gemv_trace(a, AT_END);
	grid_launch_dependents();
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
