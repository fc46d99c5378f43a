/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv_image.cuh - what a few-row launch is given, and how it makes the image of x.
 *
 *       image[k-tile][token][8 words] = H128(x * suh) / 8, two fp16 per word
 *
 * A token's 8 words of 16 values are in the order in which lane quarter q reads them as the B operand of
 * m16n8k16: word 2q holds k = 2q, 2q + 1, word 2q + 1 holds k = 2q + 8, 2q + 9. For int8 products the two
 * words of a quarter become the four hi and the four lo bytes of the same values. For wgmma a token has rows
 * of 128 bytes, 64 values, in the order that the tensor core reads (wide_word()).
 */
#ifndef EXL3_CUDA_GEMV_IMAGE_CUH
#define EXL3_CUDA_GEMV_IMAGE_CUH

#include "kernels/cuda/gemv_ptx.cuh"
#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/rows.cuh"

namespace exl3
{

enum gemv_form {
	FORM_DUP,    /* mcg, 3inst; m <= 8 */
	FORM_PACKED, /* any; mul1: integers and the sum of x (decode_sums()) */
	FORM_BYTES,  /* mul1: int8, two columns per token (value = hi + lo / 254), m <= 4 * MG */
	FORM_WIDE,   /* any, wgmma: gemv_wide.cuh */
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

/* Each line of 64 bytes is a miss of the constant cache: what every block needs lies together, in front. */
struct gemv_args {
	uint32_t m;
	uint32_t kt;             /* positions of a strip: k / (16 * K_TILES) */
	uint32_t kt_inverse;     /* ceil(2^32 / kt), for kt > 1 */
	uint32_t share, rest;    /* positions / blocks, and the remainder */
	uint32_t blocks_inverse; /* ceil(2^32 / blocks), for blocks > 1 */
	uint32_t m_inverse;      /* ceil(2^32 / m), for m > 1 */
	uint16_t nr_shards;
	uint8_t weights_first; /* before the grid dependency: weights are asked for before x */
	uint8_t ablate;        /* bench only: what is left out, enum gemv_ablate */
	uint32_t image_blocks; /* fused: 128-blocks of k that the image in shared memory holds; else 0 */
	uint32_t image_n;      /* wgmma: tokens that B has, else 0 */
	rows r;
	uint32_t *image; /* shared: [shard][k / 16][m][8] words; wgmma: [shard][k / 64][image_n][32] */
	uint32_t *slots; /* [block][m][128] handed-over sums */
	uint32_t *trace; /* ABLATE_TRACE: [block][16] */
	gemv_shard shard[EXL3_CUDA_SHARDS_MAX];
};

enum gemv_ablate {
	ABLATE_TRANSFORM = 1, /* the image is not made */
	ABLATE_REDUCE = 2,    /* no sums across blocks, no output */
	ABLATE_ALL = 4,       /* everything: what a launch costs */
	ABLATE_TRACE = 8,     /* points in time are written to trace */
};

#ifdef __CUDACC__

/* Word of an image of @n tokens for wgmma that holds word @word of a token's 16-group @group. */
static EXL3_HD uint32_t wide_word(uint32_t group, uint32_t token, uint32_t word, uint32_t n)
{
	const uint32_t chunk = (group & 3) * 2 + (word & 1);

	return (group >> 2) * (n * 32) + token * 32 + ((chunk ^ (token & 7)) << 2) + (word >> 1);
}

/* Brings the front of the arguments into the constant cache with one latency instead of one per line. */
EXL3_DEV void gemv_touch(const gemv_args &a)
{
	const uint32_t all = a.m ^ a.image_n ^ a.r.x_stride ^ a.r.k_log ^ a.shard[0].nt ^
			     (uint32_t)(uintptr_t)a.shard[0].trellis ^ a.shard[0].base_stored;

	if (all == 0x9e3779b9u) /* as good as never; keeps the loads above */
		do_nothing();
}

/* i / m for i < 2^16. */
EXL3_DEV uint32_t gemv_div_m(const gemv_args &a, uint32_t i)
{
	return a.m == 1 ? i : __umulhi(i, a.m_inverse);
}

/*
 * Rows of the image: blocks kb0 .. kb0 + nb - 1 (modulo @kb) of k for all m tokens, 8 (block, token) pairs
 * @r0 .. + 7 by a warp. Column c of the MMA is pair (c >> 1) + 4 * (c & 1): neighbours in the result's
 * lanes are then 8 words apart, in different banks. First what is asked of memory, then what is made of it.
 */
EXL3_DEV void gemv_rows_load(const gemv_args &a, const __half *suh, uint32_t kb, uint32_t kb0,
			     uint32_t nb, uint32_t r0, raw_rows &x)
{
	int lane = threadIdx.x & 31;

	keep(lane); /* or what depends on it alone is kept in registers all through the main loop */
	const int g = lane >> 2, q = lane & 3;
	const uint32_t r = r0 + (g >> 1) + 4 * (g & 1);

	if (r < nb * a.m) {
		const uint32_t block = gemv_div_m(a, r);
		const uint32_t b = kb0 + block < kb ? kb0 + block : kb0 + block - kb;

		load_raw(row_source(a.r, r - block * a.m), b * 128 + 8 * q, suh, x);
	} else {
#pragma unroll
		for (int c = 0; c < 4; c++)
			x.lo[c] = x.h[c] = make_uint4(0, 0, 0, 0);
		x.dtype = EXL3_F16;
	}
}

/* @peak: bits of each token's largest |value|, or NULL. */
EXL3_DEV void gemv_rows_make(const gemv_args &a, uint32_t nb, uint32_t r0, const raw_rows &raw,
			     uint32_t *image, uint32_t *peak)
{
	int lane = threadIdx.x & 31;

	keep(lane);
	const int q = lane & 3;
	const uint32_t m = a.m, total = nb * m;
	uint32_t h[4];
	uint4 x[4];
	float d[8][4];

	had_matrix(lane, h);
	scale_raw(raw, x);
	__syncwarp();
	had_rows(h, x, d);
#pragma unroll
	for (int odd = 0; odd < 2; odd++) {
		const uint32_t ro = r0 + q + 4 * odd;

		if (ro >= total)
			continue;
		const uint32_t block = gemv_div_m(a, ro), token = ro - block * m;
		uint32_t *out = image + ((block * 8 + had_group(0, lane)) * m + token) * 8 +
				had_word(0, lane);
		uint32_t top = 0;

#pragma unroll
		for (int i = 0; i < 8; i++) {
			const uint32_t v = had_pack(d[i], odd);

			if (a.image_n)
				image[wide_word(block * 8 + had_group(i, lane), token,
						had_word(i, lane), a.image_n)] = v;
			else
				out[(i >> 1) * 16 * m + (i & 1) * 4] = v;
			/* fp16 bits without the sign order like the values, NaN above all. */
			top = max(top, max(v & 0x7fff, v >> 16 & 0x7fff));
		}
		if (peak)
			atomicMax(peak + token, top);
	}
	__syncwarp();
}

/* All rows of the image of one shard, @kb blocks of k; @nr_warps warps share them. */
EXL3_DEV void gemv_transform(const gemv_args &a, const __half *suh, uint32_t kb, uint32_t *image,
			     uint32_t warp, uint32_t nr_warps)
{
#pragma unroll 1
	for (uint32_t r0 = warp * 8; r0 < kb * a.m; r0 += nr_warps * 8) {
		raw_rows x;

		gemv_rows_load(a, suh, kb, 0, kb, r0, x);
		gemv_rows_make(a, kb, r0, x, image, NULL);
	}
}

/*
 * The same for one row by a warp, a shorter way where rows are few. Lane l has values 4l .. 4l + 3 of a
 * block: word pairs of 16-group l / 4.
 */
EXL3_DEV void gemv_row_load(const gemv_args &a, const __half *suh, uint32_t kb, uint32_t kb0,
			    uint32_t r, raw_four &x)
{
	uint32_t lane = threadIdx.x & 31;

	keep(lane);
	const uint32_t block = gemv_div_m(a, r);
	const uint32_t b = kb0 + block < kb ? kb0 + block : kb0 + block - kb;

	load_raw(row_source(a.r, r - block * a.m), b * 128 + 4 * lane, suh, x);
}

EXL3_DEV void gemv_row_make(const gemv_args &a, uint32_t r, const raw_four &x, uint32_t *image,
			    uint32_t *peak)
{
	uint32_t lane = threadIdx.x & 31;

	keep(lane);
	const uint32_t m = a.m, t = lane & 3, block = gemv_div_m(a, r), token = r - block * m;
	uint32_t *out = image + ((block * 8 + (lane >> 2)) * m + token) * 8 + (t >> 1);
	float v[4];

	scale_raw(x, v);
	__syncwarp();
	had_warp(v);
	const uint32_t lo = pack_f16(v[0] * HAD_IN_SCALE, v[1] * HAD_IN_SCALE);
	const uint32_t hi = pack_f16(v[2] * HAD_IN_SCALE, v[3] * HAD_IN_SCALE);

	/* Pairs 2t and 2t + 1 of the group's eight: words 2 (pair & 3) + pair / 4. */
	out[4 * (t & 1)] = lo;
	out[4 * (t & 1) + 2] = hi;
	if (peak) {
		uint32_t top = max(max(lo & 0x7fff, lo >> 16 & 0x7fff),
				   max(hi & 0x7fff, hi >> 16 & 0x7fff));

#pragma unroll
		for (int s = 1; s < 32; s *= 2)
			top = max(top, __shfl_xor_sync(~0u, top, s));
		if (lane == 0)
			atomicMax(peak + token, top);
	}
}

/*
 * fp16 image to int8 in place: the word pair of a lane quarter becomes its four hi and four lo bytes.
 * @peak: fp16 bits of each token's largest |value|.
 */
EXL3_DEV void gemv_quantize(uint32_t *image, uint32_t pairs, uint32_t m, const uint32_t *peak)
{
	for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
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
			const int il =
				max(-127, min(127, __float2int_rn((f - q * (float)ih) * fine)));

			hi |= (uint32_t)(ih & 255) << (8 * j);
			lo |= (uint32_t)(il & 255) << (8 * j);
		}
		((uint2 *)image)[i] = make_uint2(hi, lo);
	}
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
