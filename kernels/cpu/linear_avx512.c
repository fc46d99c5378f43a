/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_avx512.c - decode and multiply with 16 lanes.
 *
 * The 16 lanes are the columns 0..7 (or 8..15) of the two tiles of a unit: lane l is column l & 7 of
 * tile l >> 3. Weights t, t + 32, t + 64 ... of a tile are one row's columns 0, 1, 2 ... (see
 * format.h), and 32 weights take 16 * rate2 bits, so in every lane the window of weight t mod 32
 * ends at the same distance from where its lane's bits begin:
 *
 *       v[i]    the 32 ring bits from 32 i on, counted from the lane's first bit; v[-1]: those before
 *       window  (v[i-1] : v[i]) >> s, with i and s known when the code is compiled
 *
 * Columns of a unit in z and in a decoded block:
 *
 *       position   0..7         8..15        16..23        24..31
 *       column     0..7         16..23       8..15         24..31
 */
#include "kernels/cpu/vec_avx512.h"

static inline vf load_z(const float *z, unsigned i)
{
	const float *p = z + 32 * (i / 2) + 8 * (i & 1);

	return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(p)),
				  _mm256_loadu_ps(p + 16), 1);
}

#include "kernels/cpu/vec_ops.h"

#define INLINE static inline __attribute__((always_inline))

/* Tile rows ahead of the one that is decoded: the rows of a unit lie far apart. */
#define PREFETCH 6

/* fp16 conversions need no question of their own: AVX-512 and AVX2 never come without them. */
static bool available(void)
{
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
	       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
	       __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));

/* Where ring bits 16 @q .. 16 @q + 15, counted from lane @l's first bit, are: a u16 of the unit. */
INLINE int half_index(int rate2, int l, int q)
{
	int halves = 8 * rate2;

	return (l >> 3) * halves + (((q + (l & 7) * rate2 + halves) % halves) ^ 1);
}

/* Whole bits per weight: lanes begin with a word, so words move. */
INLINE __m512i lane_words_even(const __m512i *src, int rate2, int i)
{
#define W(l)   (half_index(rate2, l, 2 * i) / 2)
#define W4(l)  W(l), W(l + 1), W(l + 2), W(l + 3)
#define IS(l)  ((W(l) / 16 == s) << (l))
#define IS4(l) (IS(l) | IS(l + 1) | IS(l + 2) | IS(l + 3))
	const __m512i at = (__m512i)(i32x16){W4(0), W4(4), W4(8), W4(12)};
	__m512i v = _mm512_setzero_si512();

#pragma GCC unroll 8
	for (int s = 0; s < rate2 / 2; s++)
		v = _mm512_mask_permutexvar_epi32(
			v, (__mmask16)(IS4(0) | IS4(4) | IS4(8) | IS4(12)), at, src[s]);
	return v;
}

/* Half bits per weight: lanes of odd columns begin in the middle of a word, so halves move. */
INLINE __m512i lane_words_odd(const __m512i *src, int rate2, int i)
{
#define H(l)  half_index(rate2, l, 2 * i + 1), half_index(rate2, l, 2 * i)
#define H4(l) H(l), H(l + 1), H(l + 2), H(l + 3)
#define HAS(l)                                                                \
	((uint32_t)(half_index(rate2, l, 2 * i + 1) / 32 == s) << (2 * (l)) | \
	 (uint32_t)(half_index(rate2, l, 2 * i) / 32 == s) << (2 * (l) + 1))
#define HAS4(l) (HAS(l) | HAS(l + 1) | HAS(l + 2) | HAS(l + 3))
	const __m512i at = (__m512i)(i16x32){H4(0), H4(4), H4(8), H4(12)};
	__m512i v = _mm512_setzero_si512();

#pragma GCC unroll 8
	for (int s = 0; s < (rate2 + 1) / 2; s++)
		v = _mm512_mask_permutexvar_epi16(v, HAS4(0) | HAS4(4) | HAS4(8) | HAS4(12), at,
						  src[s]);
	return v;
}

struct unit_words {
	__m512i v[9]; /* v[0] is v[-1] of the comment above */
};

INLINE struct unit_words load_unit(const uint8_t *p, int rate2)
{
	struct unit_words u;
	__m512i src[8];

#pragma GCC unroll 8
	for (int s = 0; s < rate2 / 2; s++)
		src[s] = _mm512_loadu_si512(p + 64 * s);
	if (rate2 & 1) /* an odd rate ends with half a vector */
		src[rate2 / 2] = _mm512_castsi256_si512(
			_mm256_loadu_si256((const __m256i *)(p + 64 * (rate2 / 2))));
#pragma GCC unroll 9
	for (int i = 0; i <= (rate2 + 1) / 2; i++)
		u.v[i] = rate2 & 1 ? lane_words_odd(src, rate2, i - 1)
				   : lane_words_even(src, rate2, i - 1);
	return u;
}

/* The exact codebook values of 16 windows, as f32. */
INLINE __m512 code_values(__m512i w, int codebook)
{
	__m512i x;
	__m512 v, e;

	if (codebook == EXL3_CB_MUL1) {
		x = _mm512_mullo_epi32(w, _mm512_set1_epi32((int)EXL3_MUL_MUL1));
		x = _mm512_madd_epi16(_mm512_maddubs_epi16(x, _mm512_set1_epi8(1)),
				      _mm512_set1_epi16(1));
		/* The byte sum becomes the low mantissa bits of 2^23, which the product takes off. */
		x = _mm512_or_si512(x, _mm512_set1_epi32(0x4b000000));
		v = _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_set1_ps(1774 * 0x1p-18f),
				    _mm512_set1_ps(-(1774.0f * 32 + 905216 * 0x1p-18f)));
	} else {
		const __m512i mask = _mm512_set1_epi32((int)0x81ffe000);
		const __m512i flip = _mm512_set1_epi32(0x3f6c0000);
		__m512i hi, lo;

		if (codebook == EXL3_CB_MCG)
			x = _mm512_mullo_epi32(w, _mm512_set1_epi32((int)EXL3_MUL_MCG));
		else
			x = _mm512_add_epi32(
				_mm512_mullo_epi32(w, _mm512_set1_epi32(EXL3_MUL_3INST)),
				_mm512_set1_epi32(EXL3_ADD_3INST));
		/* fp16 halves to f32: the exponent field of a half is 12..15, of the float 124..127,
		 * so sign, two exponent bits and mantissa move, the rest is constant. */
		hi = _mm512_srai_epi32(x, 3);
		lo = _mm512_srai_epi32(_mm512_slli_epi32(x, 16), 3);
		hi = _mm512_ternarylogic_epi32(hi, mask, flip, 0x6a);
		lo = _mm512_ternarylogic_epi32(lo, mask, flip, 0x6a);
		v = _mm512_add_ps(_mm512_castsi512_ps(hi), _mm512_castsi512_ps(lo));
	}
	/* Rounding to fp16: 2^13 times v's power of two, added and taken away again. */
	e = _mm512_and_ps(v, _mm512_castsi512_ps(_mm512_set1_epi32((int)0xff800000)));
	v = _mm512_fmadd_ps(e, _mm512_set1_ps(8192), v);
	return _mm512_fnmadd_ps(e, _mm512_set1_ps(8192), v);
}

/* 16 weights: row @row, columns 8 @half .. 8 @half + 7 of both tiles. */
INLINE __m512 weights(const struct unit_words *u, int rate2, int codebook, int row, int half)
{
	const __m512i low = _mm512_set1_epi32(0xffff);
	int end = exl3_tile_end(rate2, exl3_tile_index(row, 8 * half));
	int i = (end - 1) >> 5, s = 32 * (i + 1) - end;
	__m512i w;

	if (s > 16) /* some of the window's bits are in the word before */
		w = _mm512_ternarylogic_epi32(_mm512_slli_epi32(u->v[i], (unsigned)(32 - s)),
					      _mm512_srli_epi32(u->v[i + 1], (unsigned)s), low,
					      0xa8);
	else if (s == 16)
		w = _mm512_srli_epi32(u->v[i + 1], 16);
	else
		w = _mm512_and_si512(_mm512_srli_epi32(u->v[i + 1], (unsigned)s), low);
	return code_values(w, codebook);
}

static const uint8_t *unit_address(const struct exl3_matrix *w, uint32_t row, uint32_t unit)
{
	return (const uint8_t *)w->trellis +
	       ((size_t)row * (w->n / EXL3_TILE) + unit * 2) * (size_t)exl3_tile_bytes(w->rate2);
}

INLINE void prefetch_unit(const uint8_t *p, int rate2)
{
#pragma GCC unroll 8
	for (int i = 0; i < 32 * rate2; i += 64)
		_mm_prefetch((const char *)p + i, _MM_HINT_T0);
}

INLINE void gemv_rate(const struct exl3_matrix *w, uint32_t unit, const float *x, float *z,
		      int rate2, int codebook)
{
	const uint8_t *p = unit_address(w, 0, unit);
	const size_t step = (size_t)(w->n / EXL3_TILE) * (size_t)exl3_tile_bytes(rate2);
	__m512 acc0 = _mm512_setzero_ps(), acc1 = _mm512_setzero_ps();

	for (uint32_t k = 0; k < w->k; k += EXL3_TILE, p += step, x += EXL3_TILE) {
		struct unit_words u = load_unit(p, rate2);

		if (k + PREFETCH * EXL3_TILE < w->k)
			prefetch_unit(p + PREFETCH * step, rate2);
#pragma GCC unroll 16
		for (int r = 0; r < EXL3_TILE; r++) {
			__m512 a = _mm512_set1_ps(x[r]);

			acc0 = _mm512_fmadd_ps(a, weights(&u, rate2, codebook, r, 0), acc0);
			acc1 = _mm512_fmadd_ps(a, weights(&u, rate2, codebook, r, 1), acc1);
		}
	}
	_mm512_storeu_ps(z, acc0);
	_mm512_storeu_ps(z + 16, acc1);
}

INLINE void decode_rate(const struct exl3_matrix *w, uint32_t k0, uint32_t unit, float *out,
			int rate2, int codebook)
{
	const uint8_t *p = unit_address(w, k0 / EXL3_TILE, unit);
	const size_t step = (size_t)(w->n / EXL3_TILE) * (size_t)exl3_tile_bytes(rate2);

	for (uint32_t k = 0; k < CPU_BLOCK; k += EXL3_TILE, p += step) {
		struct unit_words u = load_unit(p, rate2);

		if (k0 + k + CPU_BLOCK < w->k)
			prefetch_unit(p + CPU_BLOCK / EXL3_TILE * step, rate2);
#pragma GCC unroll 16
		for (int r = 0; r < EXL3_TILE; r++, out += CPU_UNIT) {
			_mm512_store_ps(out, weights(&u, rate2, codebook, r, 0));
			_mm512_store_ps(out + 16, weights(&u, rate2, codebook, r, 1));
		}
	}
}

/* One function per bitrate and codebook, and a table of them. */
#define RATES(X)                                                                                \
	X(2, 0)                                                                                 \
	X(2, 1)                                                                                 \
	X(2, 2)                                                                                 \
	X(3, 2) X(4, 0) X(4, 1) X(4, 2) X(5, 2) X(6, 0) X(6, 1) X(6, 2) X(7, 2) X(8, 0) X(8, 1) \
		X(8, 2) X(10, 0) X(10, 1) X(10, 2) X(12, 0) X(12, 1) X(12, 2) X(14, 0) X(14, 1) \
			X(14, 2) X(16, 0) X(16, 1) X(16, 2)

#define DEFINE(rate2, cb)                                                                          \
	static void gemv_##rate2##_##cb(const struct exl3_matrix *w, uint32_t unit,                \
					const float *x, float *z)                                  \
	{                                                                                          \
		gemv_rate(w, unit, x, z, rate2, cb);                                               \
	}                                                                                          \
	static void decode_##rate2##_##cb(const struct exl3_matrix *w, uint32_t k0, uint32_t unit, \
					  float *out)                                              \
	{                                                                                          \
		decode_rate(w, k0, unit, out, rate2, cb);                                          \
	}
RATES(DEFINE)

static const struct {
	void (*gemv)(const struct exl3_matrix *w, uint32_t unit, const float *x, float *z);
	void (*decode)(const struct exl3_matrix *w, uint32_t k0, uint32_t unit, float *out);
} table[EXL3_RATE2_MAX + 1][EXL3_CB_NR] = {
#define ENTRY(rate2, cb) [rate2][cb] = {gemv_##rate2##_##cb, decode_##rate2##_##cb},
	RATES(ENTRY)};

static void gemv(const struct exl3_matrix *w, uint32_t unit, const float *x, float *z)
{
	table[w->rate2][w->codebook].gemv(w, unit, x, z);
}

static void decode(const struct exl3_matrix *w, uint32_t k0, uint32_t unit, float *out)
{
	table[w->rate2][w->codebook].decode(w, k0, unit, out);
}

/* z[rows x 32] (+)= panel[128][rows] x block[128][32]: 2 accumulators per row. */
INLINE void multiply_rows(int rows, const float *panel, const float *block, float *z,
			  size_t z_stride, bool first)
{
	__m512 acc[14][2];

#pragma GCC unroll 14
	for (int r = 0; r < rows; r++) {
		acc[r][0] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(z + (size_t)r * z_stride);
		acc[r][1] = first ? _mm512_setzero_ps()
				  : _mm512_loadu_ps(z + (size_t)r * z_stride + 16);
	}
	for (unsigned k = 0; k < CPU_BLOCK; k++, panel += rows, block += CPU_UNIT) {
		__m512 b0 = _mm512_load_ps(block), b1 = _mm512_load_ps(block + 16);

#pragma GCC unroll 14
		for (int r = 0; r < rows; r++) {
			__m512 a = _mm512_set1_ps(panel[r]);

			acc[r][0] = _mm512_fmadd_ps(a, b0, acc[r][0]);
			acc[r][1] = _mm512_fmadd_ps(a, b1, acc[r][1]);
		}
	}
#pragma GCC unroll 14
	for (int r = 0; r < rows; r++) {
		_mm512_storeu_ps(z + (size_t)r * z_stride, acc[r][0]);
		_mm512_storeu_ps(z + (size_t)r * z_stride + 16, acc[r][1]);
	}
}

static void multiply(unsigned rows, const float *panel, const float *block, float *z,
		     size_t z_stride, bool first)
{
	switch (rows) {
#define ROWS(n)                                                     \
	case n:                                                     \
		multiply_rows(n, panel, block, z, z_stride, first); \
		break;
		ROWS(1)
		ROWS(2)
		ROWS(3)
		ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13)
			ROWS(14)
	}
}

const struct cpu_isa cpu_isa_avx512 = {
	.name = "avx512",
	.available = available,
	.panel = 14,
	.gemv = gemv,
	.decode = decode,
	.multiply = multiply,
	CPU_ISA_OPS,
};
