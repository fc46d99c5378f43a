/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv_image.cuh - what a few-row launch is given, and how it makes the image of x.
 *
 *       image[k-tile][token][8 words] = H128(x * suh) / 8, two fp16 per word
 *
 * A token's 8 words of 16 values are in the order in which lane quarter q reads them as the B operand of
 * m16n8k16: word 2q holds k = 2q, 2q + 1, word 2q + 1 holds k = 2q + 8, 2q + 9. For int8 products the two
 * words of a quarter become the four hi and the four lo bytes of the same values.
 */
#ifndef EXL3_CUDA_GEMV_IMAGE_CUH
#define EXL3_CUDA_GEMV_IMAGE_CUH

#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/rows.cuh"

namespace exl3
{

enum gemv_form {
	FORM_DUP,    /* mcg, 3inst; m <= 8 */
	FORM_PACKED, /* any */
	FORM_BYTES,  /* mul1: int8, two columns per token (value = hi + lo / 254), m <= 4 * MG */
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
	uint32_t kt;             /* k / 16 */
	uint32_t m_inverse;      /* ceil(2^32 / m), for m > 1 */
	uint32_t positions;      /* of all shards */
	uint32_t share, rest;    /* positions / blocks, and the remainder */
	uint32_t blocks_inverse; /* ceil(2^32 / blocks), for blocks > 1 */
	uint32_t
		image_blocks; /* fused: 128-blocks of k that the image in shared memory holds; else 0 */
	uint32_t ablate;      /* bench only: what is left out, enum gemv_ablate */
	uint32_t *image;      /* shared: [shard][k / 16][m][8] words */
	uint32_t *slots;      /* [block][m][128] handed-over sums */
	uint32_t *trace;      /* ABLATE_TRACE: [block][8] */
};

enum gemv_ablate {
	ABLATE_TRANSFORM = 1, /* the image is not made */
	ABLATE_REDUCE = 2,    /* no sums across blocks, no output */
	ABLATE_DECODE = 4,    /* weights are loaded, not used */
	ABLATE_TRACE = 8,     /* points in time are written to trace */
};

#ifdef __CUDACC__

/* i / m for i < 2^16. */
EXL3_DEV uint32_t gemv_div_m(const gemv_args &a, uint32_t i)
{
	return a.m == 1 ? i : __umulhi(i, a.m_inverse);
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
			uint32_t *out = image + ((block * 8 + had_group(0, lane)) * m + token) * 8 +
					had_word(0, lane);
			uint32_t top = 0;

#pragma unroll
			for (int i = 0; i < 8; i++) {
				const uint32_t v = had_pack(d[i], odd);

				out[(i >> 1) * 16 * m + (i & 1) * 4] = v;
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
 * The same with one row per warp: less to do at once, so a shorter way for a few rows. Lane l has values
 * 4l .. 4l + 3 of a block: word pairs of 16-group l / 4.
 */
EXL3_DEV void gemv_transform_few(const gemv_args &a, const __half *suh, uint32_t kb0, uint32_t nb,
				 uint32_t *image, uint32_t *peak, uint32_t warp, uint32_t nr_warps)
{
	uint32_t lane = threadIdx.x & 31;

	keep(lane);
	keep(warp);
	const uint32_t m = a.m, total = nb * m, kb = a.kt / 8, t = lane & 3;

#pragma unroll 1
	for (uint32_t r = warp; r < total; r += nr_warps) {
		const uint32_t block = gemv_div_m(a, r), token = r - block * m;
		const uint32_t b = kb0 + block < kb ? kb0 + block : kb0 + block - kb;
		uint32_t *out = image + ((block * 8 + (lane >> 2)) * m + token) * 8 + (t >> 1);
		float v[4];

		load_scaled(row_source(a.r, token), b * 128 + 4 * lane, suh, v);
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
