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
 * Stages against time. PIPE_ASYNC (sm_80 and newer), per warp, no block barrier inside a strip:
 *
 *       cp.async      weights of step i + S - 1 (and B of that step when the image is in global memory)
 *       decode, mma   step i
 *
 * PIPE_BULK (sm_90): one more warp copies for all, lane kg for the warps of group kg, S stages ahead:
 *
 *       producer      wait empty[i % S]; bulk copies of KG positions -> full[i % S]
 *       consumers     wait full[i % S]; decode, mma; arrive empty[i % S]
 *
 * The image of x, H(x * suh) / 8 as fp16: 8 words per token and 16 values of k in the order of the B
 * fragment. Fused: each block makes the part that its range needs, in shared memory, while its first
 * weights are on their way. Shared: a small kernel makes all of it in global memory, and the main
 * kernel's ring brings it along with the weights (large m * k, where blocks would repeat the transform).
 *
 * Sums cross warps through shared memory, and blocks through words in global memory that carry their own
 * flag: 0 is "not there yet", a value is stored with its bits inverted (no sum has the NaN pattern
 * 0xffffffff), and the owner zeroes what it has read. The owner waits only for blocks with lower
 * numbers, which start no later than it does, and adds in their order: same shapes, same bits.
 */
#ifndef EXL3_CUDA_GEMV_CUH
#define EXL3_CUDA_GEMV_CUH

#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/trellis.cuh"

namespace exl3
{

enum gemv_form {
	FORM_DUP,    /* mcg, 3inst; m <= 8 */
	FORM_PACKED, /* any */
	FORM_BYTES,  /* mul1: int8, two columns per token (value = hi + lo / 254), m <= 4 * MG */
	FORM_WGMMA,  /* any, sm_90: a warpgroup per position, A from registers, B from the image */
};

struct gemv_shard {
	const uint32_t *trellis;
	const __half *suh, *svh;
	const float *bias; /* or NULL */
	uint32_t strip;    /* first of it in the launch's list */
	uint32_t nt;       /* n / 16 */
	uint32_t n_log;
	uint32_t base_log, base_stored; /* columns of y before it */
};

struct gemv_args {
	gemv_shard shard[EXL3_CUDA_SHARDS_MAX];
	rows r;
	uint32_t nr_shards;
	uint32_t m;
	uint32_t kt;           /* k / 16 */
	uint32_t m_inverse;    /* ceil(2^32 / m), for m > 1 */
	uint32_t positions;    /* of all shards */
	uint32_t share, rest;  /* positions / blocks, and the remainder: one more for the first blocks */
	uint32_t stages;       /* of the bulk pipeline */
	uint32_t b_line;       /* bytes of the image per k-tile */
	bool core;             /* image in the order that wgmma reads, see gemv_image_offset() */
	uint32_t image_blocks; /* fused: 128-blocks of k that the image in shared memory holds; else 0 */
	uint32_t ablate;       /* bench only: what is left out, enum gemv_ablate */
	uint32_t *image;       /* shared: [shard][k / 16][m][8] words */
	uint32_t *slots;       /* [block][m][128] handed-over sums */
};

enum gemv_ablate {
	ABLATE_TRANSFORM = 1, /* the image is not made */
	ABLATE_REDUCE = 2,    /* no sums across blocks, no output */
	ABLATE_DECODE = 4,    /* weights are loaded, not used */
};

enum gemv_pipe { PIPE_ASYNC, PIPE_BULK };

template <int RATE2_, int CB_, gemv_form FORM_, int MG_, int NT_, int WARPS_, int PER_SM_, int HX_,
	  gemv_pipe PIPE_>
struct gemv_cfg {
	static constexpr gemv_pipe PIPE = PIPE_;
	static constexpr int RATE2 = RATE2_, CB = CB_, MG = MG_, NT = NT_, WARPS = WARPS_;
	static constexpr int PER_SM = PER_SM_, HX = HX_;
	static constexpr gemv_form FORM = FORM_;
	static constexpr int HALVES = FORM == FORM_WGMMA ? 4 : 8 / NT; /* parts of a strip's columns */
	static constexpr int KG     = WARPS / HALVES; /* positions in work at a time */
	static constexpr int TOKENS = FORM == FORM_BYTES ? 4 * MG : 8 * MG;
	static constexpr int ITEM   = NT * 16 * RATE2; /* bytes of weights of a warp's step */
	/* A warp's tiles of a position: first one, and from one to the next. wgmma interleaves four warps. */
	static constexpr int PART      = FORM == FORM_WGMMA ? 16 * RATE2 : ITEM;
	static constexpr int TILE_STEP = FORM == FORM_WGMMA ? 64 * RATE2 : 16 * RATE2;
	static constexpr int SOURCE = PIPE == PIPE_BULK ? 8 * 16 * RATE2 : ITEM; /* bytes of one copy */
	static constexpr int LINES  = PIPE == PIPE_BULK ? KG : WARPS;            /* copies of a stage */
	static constexpr int THREADS = 32 * (WARPS + (PIPE == PIPE_BULK));
	/* Enough stages to cover the latency of memory: about 48 KiB of an SM in flight. */
	static constexpr int FIT = 96 * 1024 / PER_SM / (LINES * (SOURCE + (FORM == FORM_BYTES ? 0 : 32 * TOKENS)));
	static constexpr int STAGES = FIT < 3 ? 3 : FIT > 8 ? 8 : FIT;
	static constexpr int ROW    = NT * 16 + 4; /* floats: a warp's four quarters in different banks */
	static constexpr int RED    = TOKENS < 16 ? TOKENS : 16; /* tokens reduced at a time */

	static_assert(8 % NT == 0 && WARPS % HALVES == 0, "warps tile a strip");
	static_assert(FORM != FORM_WGMMA || (NT == 2 && PIPE == PIPE_BULK), "two tiles per warp of a warpgroup");
	static_assert(ITEM % 16 == 0, "copies of 16 bytes");
	static_assert(FORM != FORM_DUP || MG == 1, "dup is for one group of columns");
	static_assert(FORM != FORM_BYTES || CB == CB_MUL1, "bytes are a mul1 form");
	static_assert(FORM != FORM_DUP || CB != CB_MUL1, "dup needs halves");
};

/* What the host needs to know of a shape, and the device's layout follows from: one truth for both. */
struct gemv_shape {
	uint8_t lines, warps, stages, tokens;
	uint16_t source, row, red;
};

template <class C>
static constexpr EXL3_HD gemv_shape gemv_shape_of()
{
	return {C::LINES, C::WARPS, C::STAGES, C::TOKENS, C::SOURCE, C::ROW, C::RED};
}

/* Shared memory of a block, in bytes. */
struct gemv_layout {
	uint32_t line; /* of one copy: weights, then B if the image is shared */
	uint32_t red, image, peak, bars, total;
};

static EXL3_HD gemv_layout gemv_shared(const gemv_shape &s, uint32_t m, uint32_t b_line, uint32_t image_blocks,
				       uint32_t stages)
{
	gemv_layout l;

	l.line = s.source + (image_blocks ? 0 : b_line);
	l.red = stages * s.lines * l.line;
	l.image = l.red + s.warps * (m < s.red ? m : s.red) * s.row * 4;
	l.peak = l.image + image_blocks * 8 * b_line;
	l.bars = l.peak + 4 * 8;
	l.total = l.bars + 2 * 8 * stages;
	return l;
}

/* First position of block @c. */
static EXL3_HD uint32_t gemv_begin(const gemv_args &a, uint32_t c)
{
	return c * a.share + (c < a.rest ? c : a.rest);
}

#ifdef __CUDACC__

EXL3_DEV int gemv_shard_of(const gemv_args &a, uint32_t strip)
{
	int s = 0;

	for (uint32_t i = 1; i < a.nr_shards; i++)
		if (strip >= a.shard[i].strip)
			s = (int)i;
	return s;
}

/* i / m for i < 2^16. */
EXL3_DEV uint32_t gemv_div_m(const gemv_args &a, uint32_t i)
{
	return a.m == 1 ? i : __umulhi(i, a.m_inverse);
}

/*
 * Words of the image before word had_word(0, lane) of @token in a k-tile. Plain: 8 words per token, as a
 * lane reads them. Core: wgmma's K-major operand without swizzle, 8 tokens x 8 values (128 bytes) after
 * 8 tokens x 8 values: the other half of k 32 words on, the next 8 tokens 64 words on.
 */
EXL3_DEV uint32_t gemv_image_offset(const gemv_args &a, uint32_t token, int lane)
{
	const uint32_t w = had_word(0, lane); /* bits: k1, k3 */

	return a.core ? (token >> 3) * 64 + (token & 7) * 4 + (w & 1) * 32 + (w >> 1) : token * 8 + w;
}

/*
 * Makes rows of the image: blocks kb0 .. kb0 + nb - 1 (modulo kb) of k for all m tokens, 8 (block, token)
 * pairs per step of a warp. Column c of the MMA is pair (c >> 1) + 4 * (c & 1): neighbours in the
 * result's lanes are then 8 words apart, in different banks. @peak: bits of each token's largest |value|.
 */
EXL3_DEV void gemv_transform(const gemv_args &a, const __half *suh, uint32_t kb0, uint32_t nb,
			     uint32_t *image, uint32_t *peak, uint32_t warp, uint32_t nr_warps)
{
	int lane = threadIdx.x & 31;

	keep(lane); /* or what depends on it alone is kept in registers all through the main loop */
	keep(warp);
	const int g = lane >> 2, q = lane & 3;
	const uint32_t m = a.m, total = nb * m, kb = a.kt / 8;
	uint32_t h[4];

	had_matrix(lane, h);
#pragma unroll 1
	for (uint32_t r0 = warp * 8; r0 < total; r0 += nr_warps * 8) {
		const uint32_t r = r0 + (g >> 1) + 4 * (g & 1);
		uint4 x[4];
		float d[8][4];

		if (r < total) {
			const uint32_t block = gemv_div_m(a, r);
			const row_in src = row_source(a.r, r - block * m);
			const uint32_t b = kb0 + block < kb ? kb0 + block : kb0 + block - kb;

			load_scaled(src, b * 128 + 8 * q, suh, x);
		} else {
#pragma unroll
			for (int c = 0; c < 4; c++)
				x[c] = make_uint4(0, 0, 0, 0);
		}
		__syncwarp();
		had_rows(h, x, d);
#pragma unroll
		for (int odd = 0; odd < 2; odd++) {
			const uint32_t ro = r0 + q + 4 * odd;

			if (ro >= total)
				continue;
			const uint32_t block = gemv_div_m(a, ro), token = ro - block * m;
			uint32_t *out = image + (block * 8 + had_group(0, lane)) * (a.b_line / 4) +
					gemv_image_offset(a, token, lane);
			const uint32_t next = a.core ? 2 : 4; /* from bit k2 = 0 to 1 */
			uint32_t top = 0;

#pragma unroll
			for (int i = 0; i < 8; i++) {
				const uint32_t v = had_pack(d[i], odd);

				out[(i >> 1) * (a.b_line / 2) + (i & 1) * next] = v;
				/* fp16 bits without the sign order like the values, NaN above all. */
				top = max(top, max(v & 0x7fff, v >> 16 & 0x7fff));
			}
			if (peak)
				atomicMax(peak + token, top);
		}
		__syncwarp();
	}
}

/*
 * fp16 image to int8 in place: the word pair of a lane quarter becomes its four hi and four lo bytes.
 * @peak: fp16 bits of each token's largest |value|.
 */
EXL3_DEV void gemv_quantize(uint32_t *image, uint32_t pairs, uint32_t m, const uint32_t *peak, uint32_t threads)
{
	for (uint32_t i = threadIdx.x; i < pairs; i += threads) {
		const uint2 v = ((const uint2 *)image)[i];
		const float top = half_bits(peak[(i >> 2) % m]);
		const float q = top * (1.0f / 127.0f), inv = top > 0.0f ? 127.0f / top : 0.0f;
		const float fine = inv * 254.0f;
		const uint32_t half[4] = {v.x & 0xffff, v.x >> 16, v.y & 0xffff, v.y >> 16};
		uint32_t hi = 0, lo = 0;

#pragma unroll
		for (int j = 0; j < 4; j++) {
			const float f = half_bits(half[j]);
			const int ih = max(-127, min(127, __float2int_rn(f * inv)));
			const int il = max(-127, min(127, __float2int_rn((f - q * (float)ih) * fine)));

			hi |= (uint32_t)(ih & 255) << (8 * j);
			lo |= (uint32_t)(il & 255) << (8 * j);
		}
		((uint2 *)image)[i] = make_uint2(hi, lo);
	}
}

/* Four sums to another block, and from it. */
EXL3_DEV uint32_t slot_bits(float v)
{
	const uint32_t b = ~__float_as_uint(v);

	return b ? b : ~0x7fffffffu;
}

EXL3_DEV void slot_send(uint32_t *slot, const float (&v)[4])
{
	store_relaxed(slot, make_uint4(slot_bits(v[0]), slot_bits(v[1]), slot_bits(v[2]), slot_bits(v[3])));
}

EXL3_DEV void slot_add(uint32_t *slot, uint4 w, float (&v)[4])
{
	while (!w.x || !w.y || !w.z || !w.w)
		w = load_relaxed(slot);
	*(uint4 *)slot = make_uint4(0, 0, 0, 0);
	v[0] += __uint_as_float(~w.x);
	v[1] += __uint_as_float(~w.y);
	v[2] += __uint_as_float(~w.z);
	v[3] += __uint_as_float(~w.w);
}

template <class C>
struct gemv_acc {
	float f[C::FORM == FORM_BYTES ? 1 : C::NT][C::MG][4];
	int i[C::FORM == FORM_BYTES ? C::NT : 1][C::MG][4];
	int sum[C::MG]; /* bytes: of this lane's activations */
};

template <class C>
EXL3_DEV void gemv_clear(gemv_acc<C> &acc)
{
#pragma unroll
	for (int g = 0; g < C::MG; g++) {
		acc.sum[g] = 0;
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
template <class C>
EXL3_DEV void gemv_b_offsets(uint32_t m, uint32_t (&offset)[C::MG])
{
	const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;

	/* Columns beyond m repeat the last token; nobody reads them. */
#pragma unroll
	for (int j = 0; j < C::MG; j++) {
		if constexpr (C::FORM == FORM_BYTES)
			offset[j] = min((uint32_t)(j * 4 + (g >> 1)), m - 1) * 32 + 8 * q + 4 * (g & 1);
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
		}
	}
#pragma unroll
	for (int t = 0; t < C::NT; t++) {
		uint32_t v[run<C::RATE2>::NV];

		rl.load(addr, t * C::TILE_STEP, v);
		if constexpr (C::FORM == FORM_DUP) {
			uint32_t r[8];

			decode_dup<C::RATE2, C::CB, C::HX>(v, r);
			mma_f16(acc.f[t][0], r[0], r[4], r[1], r[5], b0[0], b1[0]);
			mma_f16(acc.f[t][0], r[2], r[6], r[3], r[7], b2[0], b3[0]);
		} else if constexpr (C::FORM == FORM_BYTES) {
			uint32_t r[8];

			decode_bytes<C::RATE2, C::HX>(v, r);
#pragma unroll
			for (int j = 0; j < C::MG; j++) {
				mma_u8s8(acc.i[t][j], r[0], r[4], r[1], r[5], b0[j], b1[j]);
				mma_u8s8(acc.i[t][j], r[2], r[6], r[3], r[7], b2[j], b3[j]);
			}
		} else {
			uint32_t r[4];

			decode_packed<C::RATE2, C::CB, C::HX>(v, r);
#pragma unroll
			for (int j = 0; j < C::MG; j++)
				mma_f16(acc.f[t][j], r[0], r[1], r[2], r[3], b0[j], b1[j]);
		}
	}
}

/* The same for a warpgroup: warp v decodes tiles v and v + 4, two products of 64 columns are in flight. */
template <class C, class F>
EXL3_DEV void gemv_step_wgmma(uint32_t tiles, const run_lane<C::RATE2> &rl, uint64_t b, uint32_t (&r)[2][4],
			      gemv_acc<C> &acc, F release_last)
{
	uint32_t addr[run<C::RATE2>::NV + 1];

#pragma unroll
	for (int j = 0; j <= run<C::RATE2>::NV; j++)
		addr[j] = tiles + rl.offset[j];
#pragma unroll
	for (int t = 0; t < 2; t++) {
		uint32_t v[run<C::RATE2>::NV];

		rl.load(addr, t * C::TILE_STEP, v);
		decode_packed<C::RATE2, C::CB, C::HX>(v, r[t]);
		wg_fence();
		wg_mma(acc.f[t], r[t], b);
		wg_commit();
		/* The other registers are free again; after t = 0, the products of the step before have ended. */
		wg_wait<1>();
		if (t == 0)
			release_last();
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
				const float mean = unit * MUL1_MEAN *
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
				const float(&c)[4] = acc.f[t][j];
				float *out = red + (token - token0) * C::ROW + t * 16 + g;

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

/* What the output side of a token needs beside its sums; loaded while those are on their way. */
struct gemv_out {
	row_out row;
	float4 bias;
	uint2 svh;
	uint32_t n;
};

EXL3_DEV gemv_out gemv_prepare(const gemv_args &a, const gemv_shard &s, uint32_t strip, uint32_t token,
			      uint32_t lane)
{
	gemv_out o;

	o.n = (strip - s.strip) * 128 + 4 * lane;
	o.svh = *(const uint2 *)(s.svh + o.n);
	o.bias = s.bias ? *(const float4 *)(s.bias + o.n) : make_float4(0, 0, 0, 0);
	o.row = row_target(a.r, token);
	return o;
}

/* Output side of one token of a strip, by a warp; v: the strip's columns 4 * lane .. + 3. */
EXL3_DEV void gemv_output(const gemv_out &o, const gemv_shard &s, float (&v)[4])
{
	had_warp(v);
	v[0] = v[0] * HAD_OUT_SCALE * half_bits(o.svh.x & 0xffff) + o.bias.x;
	v[1] = v[1] * HAD_OUT_SCALE * half_bits(o.svh.x >> 16) + o.bias.y;
	v[2] = v[2] * HAD_OUT_SCALE * half_bits(o.svh.y & 0xffff) + o.bias.z;
	v[3] = v[3] * HAD_OUT_SCALE * half_bits(o.svh.y >> 16) + o.bias.w;
	if (o.row.stored)
		store_four(o.row, s.base_stored + o.n, s.base_stored + s.nt * 16, v);
	else
		store_four(o.row, s.base_log + o.n, s.base_log + s.n_log, v);
}

/*
 * A strip's sums over all warps, then over blocks. @lo: where the block's part of the strip begins;
 * @owner: the block's range reaches the end of the strip.
 */
template <class C>
EXL3_DEV void gemv_reduce(const gemv_args &a, const gemv_shard &s, uint32_t strip, const float *red,
			  uint32_t token0, uint32_t lo, bool owner)
{
	constexpr int BATCH = 4; /* slots asked for at a time */
	uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

	keep(warp);
	keep(lane);
	const uint32_t tokens = min(a.m - token0, (uint32_t)C::RED);
	const uint32_t part = min(a.m, (uint32_t)C::RED) * C::ROW;
	const uint32_t tile = lane >> 2;
	const uint32_t half = C::FORM == FORM_WGMMA ? tile & 3 : tile / C::NT;
	const uint32_t col = (C::FORM == FORM_WGMMA ? tile >> 2 : tile % C::NT) * 16 + 4 * (lane & 3);
	const uint32_t first = strip * a.kt;
	const size_t stride = (size_t)a.m * 128;
	uint32_t c = blockIdx.x;

	/* Blocks below this one that hold earlier parts of the strip. */
	if (owner && lo > first)
		do
			c--;
		while (gemv_begin(a, c) > first);
#pragma unroll 1
	for (uint32_t t = warp; t < tokens; t += C::WARPS) {
		const uint32_t token = token0 + t;
		uint32_t *slot = a.slots + token * 128 + 4 * lane;
		uint4 w[BATCH];
		gemv_out out;
		float v[4] = {0, 0, 0, 0};

		if (owner)
			out = gemv_prepare(a, s, strip, token, lane);
#pragma unroll 4
		for (int kg = 0; kg < C::KG; kg++) {
			const float4 r =
				*(const float4 *)(red + (kg * C::HALVES + half) * part + t * C::ROW + col);

			v[0] += r.x;
			v[1] += r.y;
			v[2] += r.z;
			v[3] += r.w;
		}
		if (a.ablate & ABLATE_REDUCE) {
			if (v[0] == 1.2345f)
				a.slots[0] = 0;
			continue;
		}
		if (!owner) {
			slot_send(slot + blockIdx.x * stride, v);
			continue;
		}
		/* In ascending order of blocks. */
#pragma unroll
		for (int i = 0; i < BATCH; i++)
			if (c + i < blockIdx.x)
				w[i] = load_relaxed(slot + (c + i) * stride);
#pragma unroll
		for (int i = 0; i < BATCH; i++)
			if (c + i < blockIdx.x)
				slot_add(slot + (c + i) * stride, w[i], v);
#pragma unroll 1
		for (uint32_t d = c + BATCH; d < blockIdx.x; d++)
			slot_add(slot + d * stride, load_relaxed(slot + d * stride), v);
		__syncwarp();
		gemv_output(out, s, v);
	}
}

/*
 * What a warp copies next: position by position downwards, KG apart. Inside a strip only pointers move;
 * the rest is worked out again at its end.
 */
template <class C>
struct gemv_loader {
	int left;        /* steps to the end of the warp's work */
	int strip_left;  /* steps to the end of the strip */
	int position;    /* of the strip's first step that is not in strip_left */
	uint32_t offset, b_offset; /* of this lane's bytes in a strip's weights and in B */
	const char *src; /* this lane's bytes of the weights */
	const char *b;   /* shared image: this lane's bytes of it */
	size_t row, b_row; /* bytes to the next step's */

	EXL3_DEV_MEMBER void enter_strip(const gemv_args &a, uint32_t begin)
	{
		const uint32_t strip = (uint32_t)position / a.kt, top = strip * a.kt;
		const uint32_t kt = (uint32_t)position - top;
		const int shard = gemv_shard_of(a, strip);
		const gemv_shard &s = a.shard[shard];
		const size_t tile_row = (size_t)s.nt * (16 * C::RATE2);

		row = C::KG * tile_row;
		src = (const char *)s.trellis + kt * tile_row +
		      (strip - s.strip) * (8 * 16 * C::RATE2) + offset;
		b_row = (size_t)C::KG * a.b_line;
		b = (const char *)a.image + ((size_t)shard * a.kt + kt) * a.b_line + b_offset;
		strip_left = (position - (int)max(begin, top)) / C::KG + 1;
		position -= strip_left * C::KG;
	}

	EXL3_DEV_MEMBER void start(const gemv_args &a, uint32_t begin, int first, uint32_t offset_,
				   uint32_t b_offset_)
	{
		position = first;
		offset = offset_;
		b_offset = b_offset_;
		left = first >= (int)begin ? (first - (int)begin) / C::KG + 1 : 0;
		strip_left = 0;
		if (left)
			enter_strip(a, begin);
	}

	EXL3_DEV_MEMBER void next(const gemv_args &a, uint32_t begin)
	{
		src -= row;
		b -= b_row;
		if (--left && !--strip_left)
			enter_strip(a, begin);
	}

	EXL3_DEV_MEMBER void copy_weights(uint32_t dst) const
	{
		const uint32_t lane = threadIdx.x & 31;

#pragma unroll
		for (uint32_t c = 0; c < C::ITEM / 16; c += 32)
			if (c + 32 <= C::ITEM / 16 || c + lane < C::ITEM / 16)
				cp_async16(dst + c * 16, src + c * 16);
	}

	EXL3_DEV_MEMBER void copy_b(uint32_t dst, uint32_t m) const
	{
		const uint32_t lane = threadIdx.x & 31;

#pragma unroll
		for (uint32_t c = 0; c < C::TOKENS * 2; c += 32)
			if (c + lane < m * 2)
				cp_async16(dst + c * 16, b + c * 16);
	}
};

/* The pipeline of a warp with cp.async: it copies for itself. */
template <class C>
struct gemv_async {
	gemv_loader<C> in;
	uint32_t ring, end, line, dst, tiles;

	EXL3_DEV_MEMBER void start(const gemv_args &a, uint32_t smem, const gemv_layout &l, uint32_t begin, int first)
	{
		const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

		line = l.line;
		ring = smem + warp * C::STAGES * line;
		end = ring + C::STAGES * line;
		dst = ring + lane * 16;
		tiles = ring;
		in.start(a, begin, first, warp % C::HALVES * C::ITEM + lane * 16, lane * 16);
		gemv_loader<C> in_b = in;
		/* Weights do not depend on earlier kernels: asked for before anything is waited for. */
#pragma unroll 1
		for (int s = 0; s < C::STAGES - 1; s++) {
			if (in.left) {
				in.copy_weights(dst);
				in.next(a, begin);
			}
			dst += line;
			if (a.image_blocks)
				cp_async_commit();
		}
		grid_wait();
		if (a.image_blocks)
			return;
#pragma unroll 1
		for (int s = 0; s < C::STAGES - 1; s++) {
			if (in_b.left) {
				in_b.copy_b(ring + s * line + C::ITEM + lane * 16, a.m);
				in_b.next(a, begin);
			}
			cp_async_commit();
		}
	}

	/* Returns the address of the step's weights; the slot of the step before is refilled. */
	EXL3_DEV_MEMBER uint32_t acquire(const gemv_args &a, uint32_t begin)
	{
		cp_async_wait<C::STAGES - 2>();
		__syncwarp(); /* all lanes are past the step before */
		if (in.left) {
			in.copy_weights(dst);
			if (!a.image_blocks)
				in.copy_b(dst + C::ITEM, a.m);
			in.next(a, begin);
		}
		cp_async_commit();
		dst = dst + line >= end ? dst + line - C::STAGES * line : dst + line;
		return tiles;
	}

	EXL3_DEV_MEMBER uint32_t b(uint32_t t) const { return t + C::ITEM; }
	EXL3_DEV_MEMBER void release() { tiles = tiles + line == end ? ring : tiles + line; }
};

/* A consumer's side of the pipeline with bulk copies. */
template <class C>
struct gemv_bulk {
	uint32_t tiles, ring, ring_end, line;
	uint32_t full, full0; /* barrier of the slot, of slot 0 */
	uint32_t phase, to_b, leader, to_empty;
	uint32_t held; /* barrier of the slot in work */

	EXL3_DEV_MEMBER void start(uint32_t smem, const gemv_layout &l, uint32_t stages)
	{
		const uint32_t warp = threadIdx.x >> 5;

		line = l.line * C::LINES;
		ring = smem + warp / C::HALVES * l.line + warp % C::HALVES * C::PART;
		ring_end = ring + stages * line;
		to_empty = stages * 8;
		to_b = C::SOURCE - warp % C::HALVES * C::PART;
		full0 = smem + l.bars;
		leader = threadIdx.x & 31;
		keep(line);
		keep(ring);
		keep(ring_end);
		keep(to_b);
		keep(to_empty);
		keep(full0);
		keep(leader);
		full = full0;
		tiles = ring;
		phase = 0;
	}

	/* Returns the address of the step's weights. */
	EXL3_DEV_MEMBER uint32_t acquire()
	{
		const uint32_t t = tiles;

		mbar_wait(full, phase);
		held = full;
		tiles += line;
		full += 8;
		if (tiles == ring_end) {
			tiles = ring;
			full = full0;
			phase ^= 1;
		}
		return t;
	}

	EXL3_DEV_MEMBER uint32_t b(uint32_t t) const { return t + to_b; }

	/* The warp has read the slot of @bar. */
	EXL3_DEV_MEMBER void release(uint32_t bar) const
	{
		__syncwarp();
		if (!leader)
			mbar_arrive(bar + to_empty);
	}
};

/* The producer warp. */
template <class C>
EXL3_DEV void gemv_produce(const gemv_args &a, uint32_t smem, const gemv_layout &l, uint32_t begin, uint32_t end)
{
	const uint32_t lane = threadIdx.x & 31, full = smem + l.bars, empty = full + 8 * a.stages;
	const uint32_t b_bytes = a.image_blocks ? 0 : a.b_line, bytes = C::SOURCE + b_bytes;
	const uint32_t steps = (end - begin + C::KG - 1) / C::KG;
	const uint32_t ahead = min(steps, a.stages);
	gemv_loader<C> in;

	if (lane >= C::KG)
		return;
	in.start(a, begin, (int)(end - 1 - lane), 0, 0);
	gemv_loader<C> in_b = in;
	const uint32_t stride = C::LINES * l.line, first = smem + lane * l.line;

	/* Weights do not depend on earlier kernels: asked for before anything is waited for. */
#pragma unroll 1
	for (uint32_t i = 0; i < ahead; i++) {
		if (in.left) {
			mbar_expect(full + i * 8, bytes);
			bulk_load(first + i * stride, in.src, C::SOURCE, full + i * 8);
			in.next(a, begin);
		} else {
			mbar_arrive(full + i * 8);
		}
	}
	grid_wait();
	if (b_bytes)
#pragma unroll 1
		for (uint32_t i = 0; i < ahead && in_b.left; i++) {
			bulk_load(first + i * stride + C::SOURCE, in_b.b, b_bytes, full + i * 8);
			in_b.next(a, begin);
		}
	uint32_t slot = 0, phase = 0;

#pragma unroll 1
	for (uint32_t i = ahead; i < steps; i++) {
		const uint32_t bar = full + slot * 8, dst = first + slot * stride;

		mbar_wait(empty + slot * 8, phase);
		if (in.left) {
			mbar_expect(bar, bytes);
			bulk_load(dst, in.src, C::SOURCE, bar);
			if (b_bytes)
				bulk_load(dst + C::SOURCE, in.b, b_bytes, bar);
			in.next(a, begin);
		} else {
			mbar_arrive(bar);
		}
		if (++slot == a.stages) {
			slot = 0;
			phase ^= 1;
		}
	}
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, C::PER_SM) gemv_kernel(const __grid_constant__ gemv_args a)
{
	extern __shared__ __align__(128) char gemv_smem[];
	const uint32_t m = a.m;
	const gemv_layout l = gemv_shared(gemv_shape_of<C>(), m, a.b_line, a.image_blocks,
					  C::PIPE == PIPE_BULK ? a.stages : C::STAGES);
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	const uint32_t begin = gemv_begin(a, blockIdx.x);
	const uint32_t end = gemv_begin(a, blockIdx.x + 1);
	const bool fused = a.image_blocks != 0, decode = !(a.ablate & ABLATE_DECODE);
	uint32_t *image = (uint32_t *)(gemv_smem + l.image);
	uint32_t *peak = (uint32_t *)(gemv_smem + l.peak);
	float *red = (float *)(gemv_smem + l.red);
	const uint32_t red_part = min(m, (uint32_t)C::RED) * C::ROW;
	const uint32_t smem = smem_addr(gemv_smem), image_addr = smem + l.image;
	int position = (int)(end - 1 - warp / C::HALVES);
	gemv_async<C> async;
	gemv_bulk<C> bulk;

	if constexpr (C::PIPE == PIPE_BULK) {
		if (warp == C::WARPS && lane < a.stages) {
			mbar_init(smem + l.bars + lane * 8, C::KG);
			mbar_init(smem + l.bars + (a.stages + lane) * 8, C::WARPS);
			mbar_init_fence();
		}
		__syncthreads();
		if (warp == C::WARPS) {
			gemv_produce<C>(a, smem, l, begin, end);
			return;
		}
		bulk.start(smem, l, a.stages);
		grid_wait();
	} else {
		async.start(a, smem, l, begin, position);
	}

	const run_lane<C::RATE2> rl(lane);
	gemv_acc<C> acc;
	uint32_t b_offset[C::MG];
	uint32_t kb0 = 0;
	int image_shard = -1;
	bool flushed = false;

	gemv_b_offsets<C>(m, b_offset);
#pragma unroll 1
	for (uint32_t strip = (end - 1) / a.kt;; strip--) {
		const uint32_t top = strip * a.kt;
		const uint32_t lo = max(begin, top);
		const int shard = gemv_shard_of(a, strip);

		if (fused && shard != image_shard) {
			/* The blocks of k that the rest of the range needs, or all of them. */
			const uint32_t kb = a.kt / 8;
			uint32_t nb = (min(end, top + a.kt) - 1) / 8 - begin / 8 + 1;

			kb0 = begin / 8 % kb;
			if (nb >= kb) {
				kb0 = 0;
				nb = kb;
			}
			if (C::FORM == FORM_BYTES) {
				block_sync(C::WARPS * 32, 1);
				if (threadIdx.x < m)
					peak[threadIdx.x] = 0;
			}
			block_sync(C::WARPS * 32, 1);
			if (!(a.ablate & ABLATE_TRANSFORM))
				gemv_transform(a, a.shard[shard].suh, kb0, nb, image,
					       C::FORM == FORM_BYTES ? peak : (uint32_t *)NULL, warp,
					       C::WARPS);
			if constexpr (C::FORM == FORM_WGMMA)
				proxy_fence();
			block_sync(C::WARPS * 32, 1);
			if (C::FORM == FORM_BYTES) {
				gemv_quantize(image, nb * 8 * m * 4, m, peak, C::WARPS * 32);
				block_sync(C::WARPS * 32, 1);
			}
			image_shard = shard;
		}
		gemv_clear<C>(acc);

		int steps = position >= (int)lo ? (position - (int)lo) / C::KG + 1 : 0;
		/* A strip's k-tiles lie in the image in one piece. */
		const int kt = position - (int)top;
		const int row = kt >= (int)(8 * kb0) ? kt - (int)(8 * kb0) : kt + (int)(a.kt - 8 * kb0);
		uint32_t b_image = image_addr + row * a.b_line, b_step = fused ? C::KG * a.b_line : 0;

		keep(b_step);

		position -= steps * C::KG;
		if constexpr (C::FORM == FORM_WGMMA) {
			uint32_t r[2][4];
			uint32_t last = 0; /* slot of the step before */
			auto release = [&] {
				if (last)
					bulk.release(last);
				last = bulk.held;
			};

#pragma unroll 1
			for (; steps > 0; steps--) {
				const uint32_t tiles = bulk.acquire();
				const uint32_t b = fused ? b_image : bulk.b(tiles);

				gemv_step_wgmma<C>(tiles, rl, wg_descriptor(b, 128, 256), r, acc, release);
				b_image -= b_step;
			}
			wg_wait<0>();
			if (last)
				bulk.release(last);
		} else {
#pragma unroll 1
			for (; steps > 0; steps--) {
				uint32_t tiles, b;

				if constexpr (C::PIPE == PIPE_BULK) {
					tiles = bulk.acquire();
					b = fused ? b_image : bulk.b(tiles);
				} else {
					tiles = async.acquire(a, begin);
					b = fused ? b_image : async.b(tiles);
				}
				if (decode)
					gemv_step<C>(tiles, rl, b, b_offset, acc);
				if constexpr (C::PIPE == PIPE_BULK)
					bulk.release(bulk.held);
				else
					async.release();
				b_image -= b_step;
			}
		}
#pragma unroll
		for (int token0 = 0; token0 < C::TOKENS; token0 += C::RED) {
			if ((uint32_t)token0 >= m)
				break;
			if (flushed)
				block_sync(C::WARPS * 32, 1);
			flushed = true;
			gemv_flush<C>(acc, red + warp * red_part, token0, m, peak);
			block_sync(C::WARPS * 32, 1);
			gemv_reduce<C>(a, a.shard[shard], strip, red, token0, lo, end >= top + a.kt);
		}
		if (lo == begin)
			break;
	}
	grid_launch_dependents();
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
