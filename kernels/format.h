/* SPDX-License-Identifier: Apache-2.0 */
/*
 * format.h - the EXL3 weight format: bit order, tile map, codebooks; for host and device.
 *
 * A matrix W [k, n] (y = x W) is stored as 16x16 tiles, row-major over (k/16, n/16). A tile is a
 * ring of R = 128 * rate2 bits, rate2 = 2 * bits per weight: even 2..16 for 1..8 bits, odd 3, 5, 7
 * for 1.5, 2.5, 3.5 bits (codebook mul1 only). Weight t (0..255) of a tile owns the bits that end at
 * exl3_tile_end(t); its 16-bit window is those and the bits before them on the ring:
 *
 *       ring   ... | t-2 | t-1 |  t  | t+1 | ...        bit 0 follows bit R-1
 *                    [ window of t  ]                   16 bits, first one most significant
 *
 * Ring bit p is bit 31 - (p & 31) of the tile's little-endian u32 word p >> 5.
 *
 * Where weight t sits in its tile, and the lane and register of the tensor-core fragment that it is
 * (lane L = t >> 3 decodes t = 8L..8L+7, the B operand of mma.m16n8k16, or with the two middle
 * registers swapped the A operand of the transposed product):
 *
 *       t bits   7 6 5 | 4 3 | 2 | 1 | 0        row (k) = r3 r2 r1 r0 = t1 t4 t3 t0
 *                n2..0 | k2,1| n3| k3| k0       col (n) = c3 c2 c1 c0 = t2 t7 t6 t5
 *
 * Codebooks map a window to an fp16 value with integer arithmetic modulo 2^32:
 *       3inst, mcg   x = w * M (+ A); (x & 0x8fff8fff) ^ 0x3b603b60; sum of the two fp16 halves, RNE
 *       mul1         x = w * M; S = sum of its four bytes; RNE16((1774 S - 905216) / 2^18)
 *
 * Linear layer: y = ((x * suh) Hk What Hn) * svh + bias, Hk = Hn = blockdiag(H128 / sqrt(128)),
 * H128[i][j] = (-1)^popcount(i & j). Source: the format as written by exllamav3 1.4.1 (facts only).
 */
#ifndef EXL3_KERNELS_FORMAT_H
#define EXL3_KERNELS_FORMAT_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define EXL3_HD __host__ __device__ __forceinline__
#else
#define EXL3_HD inline
#endif

#define EXL3_TILE       16  /* rows and columns of a tile */
#define EXL3_HAD        128 /* length of a Hadamard block: stored k and n are multiples of it */
#define EXL3_RATE2_MIN  2
#define EXL3_RATE2_MAX  16
#define EXL3_INV_SQRT128 0.08838834764831845 /* 1/sqrt(128), once per side */

#define EXL3_MUL_3INST 89226354u
#define EXL3_ADD_3INST 64248484u
#define EXL3_MUL_MCG   0xCBAC1FEDu /* also the value of the tensor "mcg" */
#define EXL3_MUL_MUL1  0x83DCD12Du /* also the value of the tensor "mul1" */

/* Is there such a bitrate with such a codebook? */
static EXL3_HD int exl3_rate_valid(int rate2, int codebook)
{
	if (codebook < 0 || codebook > 2)
		return 0;
	if (rate2 & 1)
		return codebook == 2 && rate2 >= 3 && rate2 <= 7;
	return rate2 >= EXL3_RATE2_MIN && rate2 <= EXL3_RATE2_MAX;
}

static EXL3_HD int exl3_tile_words16(int rate2) { return 8 * rate2; } /* u16 words of a tile */
static EXL3_HD int exl3_tile_words32(int rate2) { return 4 * rate2; }
static EXL3_HD int exl3_tile_bytes(int rate2) { return 16 * rate2; }

/* Bytes of the trellis of a stored [k, n] matrix. */
static EXL3_HD uint64_t exl3_trellis_bytes(uint32_t k, uint32_t n, int rate2)
{
	return (uint64_t)(k / EXL3_TILE) * (n / EXL3_TILE) * (uint64_t)exl3_tile_bytes(rate2);
}

/* Ring position just past the bits of weight t. */
static EXL3_HD int exl3_tile_end(int rate2, int t)
{
	return (t + 1) * (rate2 >> 1) + (rate2 & 1) * ((t + 1) >> 1);
}

/* 16-bit window of weight t; @w: the tile as u32 words, file order. */
static EXL3_HD uint32_t exl3_window(const uint32_t *w, int rate2, int t)
{
	int end = exl3_tile_end(rate2, t);
	int i = (end - 1) >> 5;
	int j = i ? i - 1 : exl3_tile_words32(rate2) - 1;
	uint64_t two = (uint64_t)w[j] << 32 | w[i];

	return (uint32_t)(two >> (32 * (i + 1) - end)) & 0xffff;
}

static EXL3_HD int exl3_tile_row(int t) { return (t & 1) | ((t >> 2) & 6) | ((t & 2) << 2); }
static EXL3_HD int exl3_tile_col(int t) { return (t >> 5) | ((t & 4) << 1); }

/* Inverse of the two above. */
static EXL3_HD int exl3_tile_index(int row, int col)
{
	return (row & 1) | (row & 8) >> 2 | (col & 8) >> 1 | (row & 6) << 2 | (col & 7) << 5;
}

/* The product that the codebook turns into a value. */
static EXL3_HD uint32_t exl3_code_product(uint32_t window, int codebook)
{
	if (codebook == 2)
		return window * EXL3_MUL_MUL1;
	if (codebook == 1)
		return window * EXL3_MUL_MCG;
	return window * EXL3_MUL_3INST + EXL3_ADD_3INST;
}

/* 3inst, mcg: the product's two fp16 halves, whose sum is the weight. */
static EXL3_HD uint32_t exl3_code_halves(uint32_t product)
{
	return (product & 0x8fff8fffu) ^ 0x3b603b60u;
}

/* mul1: byte sum S of the product, 0..1020. */
static EXL3_HD uint32_t exl3_code_bytesum(uint32_t x)
{
	return (x & 255) + ((x >> 8) & 255) + ((x >> 16) & 255) + (x >> 24);
}

/* ---- host only: fp16, bf16 and the exact codebook values ---- */

/* fp16 bits to float, exact; subnormals, infinities and NaN included. */
static inline float exl3_f16_to_f32(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff, bits;
	float f;

	if (mag >= 0x7c00) {
		bits = sign | 0x7f800000u | (mag & 0x3ff) << 13;
	} else if (mag >= 0x0400) {
		bits = sign | ((mag << 13) + 0x38000000u);
	} else {
		f = (float)mag * 0x1p-24f;
		memcpy(&bits, &f, 4);
		bits |= sign;
	}
	memcpy(&f, &bits, 4);
	return f;
}

/* double to fp16 bits: one rounding, nearest even; overflow to infinity, NaN stays NaN. */
static inline uint16_t exl3_f64_to_f16(double v)
{
	uint64_t b;
	uint16_t sign;
	int e;
	uint64_t m, half, rest;
	int shift;
	uint32_t out;

	memcpy(&b, &v, 8);
	sign = (uint16_t)(b >> 48) & 0x8000;
	e = (int)(b >> 52 & 0x7ff);
	m = b & 0xfffffffffffffull;
	if (e == 0x7ff)
		return (uint16_t)(sign | (m ? 0x7e00 : 0x7c00));
	if (e < 1023 - 26)
		return sign; /* less than half of the smallest subnormal */
	m |= 1ull << 52;
	/* One ulp of the result is 2^(e-1023-10) for normal numbers, 2^-24 for subnormal ones. */
	shift = e - 1023 >= -14 ? 42 : 42 + (-14 - (e - 1023));
	out = (uint32_t)(m >> shift);
	half = 1ull << (shift - 1);
	rest = m & ((1ull << shift) - 1);
	if (rest > half || (rest == half && (out & 1)))
		out++;
	if (e - 1023 >= -14)
		out += (uint32_t)(e - 1023 + 14) << 10; /* the implicit bit adds the last 1 */
	return (uint16_t)(sign | (out >= 0x7c00 ? 0x7c00 : out));
}

static inline uint16_t exl3_f32_to_f16(float v) { return exl3_f64_to_f16((double)v); }

static inline float exl3_bf16_to_f32(uint16_t h)
{
	uint32_t bits = (uint32_t)h << 16;
	float f;

	memcpy(&f, &bits, 4);
	return f;
}

/* float to bf16 bits, nearest even, NaN stays NaN. */
static inline uint16_t exl3_f32_to_bf16(float f)
{
	uint32_t bits;

	memcpy(&bits, &f, 4);
	if ((bits & 0x7fffffffu) > 0x7f800000u)
		return (uint16_t)(bits >> 16 | 0x40);
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* e4m3 (fn: no infinities, 0x7f and 0xff are NaN) to float. */
static inline float exl3_e4m3_to_f32(uint8_t v)
{
	uint32_t sign = (uint32_t)(v & 0x80) << 24, e = v >> 3 & 15, m = v & 7, bits;
	float f;

	if ((v & 0x7f) == 0x7f) {
		bits = sign | 0x7fc00000u;
	} else if (e) {
		bits = sign | (e + 120) << 23 | m << 20;
	} else {
		f = (float)m * 0x1p-9f;
		memcpy(&bits, &f, 4);
		bits |= sign;
	}
	memcpy(&f, &bits, 4);
	return f;
}

/* Value of a window, exactly as the format defines it: fp16 bits. */
static inline uint16_t exl3_code_f16(uint32_t window, int codebook)
{
	uint32_t x = exl3_code_product(window, codebook);

	if (codebook == 2)
		return exl3_f64_to_f16((1774.0 * exl3_code_bytesum(x) - 905216.0) / 262144.0);
	x = exl3_code_halves(x);
	return exl3_f64_to_f16((double)exl3_f16_to_f32((uint16_t)x) +
			       (double)exl3_f16_to_f32((uint16_t)(x >> 16)));
}

#endif
