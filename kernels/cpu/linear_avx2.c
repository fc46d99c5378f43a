/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_avx2.c - decode and multiply with 8 lanes.
 *
 * The 8 lanes are the columns 0..7 (or 8..15) of a tile. Weights t, t + 32, t + 64 ... are one row's
 * columns 0, 1, 2 ... (see format.h), and 32 weights take 16 * rate2 bits, so in every lane the
 * window of weight t mod 32 ends at the same distance from where its lane's bits begin:
 *
 *       v[i]    the 32 ring bits from 32 i on, counted from the lane's first bit; v[-1]: those before
 *       window  (v[i-1] : v[i]) >> s, with i and s known when the code is compiled
 *
 * Columns of a unit in z are in natural order; a decoded block is [2 tiles][128 rows][16 columns].
 */
#include "kernels/cpu/vec_avx2.h"

static inline vf load_z(const float *z, unsigned i)
{
	return _mm256_loadu_ps(z + 8 * i);
}

#include "kernels/cpu/vec_ops.h"

#define INLINE static inline __attribute__((always_inline))

/* Tile rows ahead of the one that is decoded: the rows of a unit lie far apart. */
#define PREFETCH 6

/* fp16 conversions need no question of their own: AVX2 never comes without them. */
static bool available(void)
{
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

typedef int32_t i32x8 __attribute__((vector_size(32)));

/* Which word of the tile is number @i of lane @l; lanes of odd columns and rates begin inside it. */
INLINE int word_index(int rate2, int l, int i)
{
	int words = exl3_tile_words32(rate2);

	return (l * rate2 / 2 + i + words) % words;
}

INLINE __m256i gather_words(const __m256i *src, int rate2, int i)
{
#define W(l)  word_index(rate2, l, i)
#define IS(l) (W(l) / 8 == s ? -1 : 0)
	const __m256i at = (__m256i)(i32x8){W(0) % 8, W(1) % 8, W(2) % 8, W(3) % 8,
					    W(4) % 8, W(5) % 8, W(6) % 8, W(7) % 8};
	__m256i v = _mm256_setzero_si256();

#pragma GCC unroll 8
	for (int s = 0; s < (rate2 + 1) / 2; s++) {
		const __m256i here =
			(__m256i)(i32x8){IS(0), IS(1), IS(2), IS(3), IS(4), IS(5), IS(6), IS(7)};

		if (IS(0) | IS(1) | IS(2) | IS(3) | IS(4) | IS(5) | IS(6) | IS(7))
			v = _mm256_blendv_epi8(v, _mm256_permutevar8x32_epi32(src[s], at), here);
	}
	return v;
}

struct tile_words {
	__m256i v[9]; /* v[0] is v[-1] of the comment above */
};

INLINE struct tile_words load_tile(const uint8_t *p, int rate2)
{
	const __m256i left = (__m256i)(i32x8){0, 16, 0, 16, 0, 16, 0, 16};
	const __m256i right = (__m256i)(i32x8){32, 16, 32, 16, 32, 16, 32, 16};
	struct tile_words u;
	__m256i src[8];

#pragma GCC unroll 8
	for (int s = 0; s < rate2 / 2; s++)
		src[s] = _mm256_loadu_si256((const __m256i *)(p + 32 * s));
	if (rate2 & 1) /* an odd rate ends with half a vector */
		src[rate2 / 2] = _mm256_castsi128_si256(
			_mm_loadu_si128((const __m128i *)(p + 32 * (rate2 / 2))));
#pragma GCC unroll 9
	for (int i = 0; i <= (rate2 + 1) / 2; i++) {
		__m256i v = gather_words(src, rate2, i - 1);

		if (rate2 & 1)
			v = _mm256_or_si256(_mm256_sllv_epi32(v, left),
					    _mm256_srlv_epi32(gather_words(src, rate2, i), right));
		u.v[i] = v;
	}
	return u;
}

/* The exact codebook values of 8 windows, as f32. */
INLINE __m256 code_values(__m256i w, int codebook)
{
	__m256i x;
	__m256 v, e;

	if (codebook == EXL3_CB_MUL1) {
		x = _mm256_mullo_epi32(w, _mm256_set1_epi32((int)EXL3_MUL_MUL1));
		x = _mm256_madd_epi16(_mm256_maddubs_epi16(x, _mm256_set1_epi8(1)),
				      _mm256_set1_epi16(1));
		/* The byte sum becomes the low mantissa bits of 2^23, which the product takes off. */
		x = _mm256_or_si256(x, _mm256_set1_epi32(0x4b000000));
		v = _mm256_fmadd_ps(_mm256_castsi256_ps(x), _mm256_set1_ps(1774 * 0x1p-18f),
				    _mm256_set1_ps(-(1774.0f * 32 + 905216 * 0x1p-18f)));
	} else {
		const __m256i mask = _mm256_set1_epi32((int)0x81ffe000);
		const __m256i flip = _mm256_set1_epi32(0x3f6c0000);
		__m256i hi, lo;

		if (codebook == EXL3_CB_MCG)
			x = _mm256_mullo_epi32(w, _mm256_set1_epi32((int)EXL3_MUL_MCG));
		else
			x = _mm256_add_epi32(
				_mm256_mullo_epi32(w, _mm256_set1_epi32(EXL3_MUL_3INST)),
				_mm256_set1_epi32(EXL3_ADD_3INST));
		/* fp16 halves to f32: the exponent field of a half is 12..15, of the float 124..127,
		 * so sign, two exponent bits and mantissa move, the rest is constant. */
		hi = _mm256_srai_epi32(x, 3);
		lo = _mm256_srai_epi32(_mm256_slli_epi32(x, 16), 3);
		hi = _mm256_xor_si256(_mm256_and_si256(hi, mask), flip);
		lo = _mm256_xor_si256(_mm256_and_si256(lo, mask), flip);
		v = _mm256_add_ps(_mm256_castsi256_ps(hi), _mm256_castsi256_ps(lo));
	}
	/* Rounding to fp16: 2^13 times v's power of two, added and taken away again. */
	e = _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xff800000)));
	v = _mm256_fmadd_ps(e, _mm256_set1_ps(8192), v);
	return _mm256_fnmadd_ps(e, _mm256_set1_ps(8192), v);
}

/* 8 weights: row @row, columns 8 @half .. 8 @half + 7. */
INLINE __m256 weights(const struct tile_words *u, int rate2, int codebook, int row, int half)
{
	const __m256i low = _mm256_set1_epi32(0xffff);
	int end = exl3_tile_end(rate2, exl3_tile_index(row, 8 * half));
	int i = (end - 1) >> 5, s = 32 * (i + 1) - end;
	__m256i w = _mm256_srli_epi32(u->v[i + 1], s);

	if (s > 16) /* some of the window's bits are in the word before */
		w = _mm256_or_si256(w, _mm256_slli_epi32(u->v[i], 32 - s));
	if (s != 16)
		w = _mm256_and_si256(w, low);
	return code_values(w, codebook);
}

static const uint8_t *tile_address(const struct exl3_matrix *w, uint32_t row, uint32_t col)
{
	return (const uint8_t *)w->trellis +
	       ((size_t)row * (w->n / EXL3_TILE) + col) * (size_t)exl3_tile_bytes(w->rate2);
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
	const uint8_t *p = tile_address(w, 0, unit * 2);
	const size_t step = (size_t)(w->n / EXL3_TILE) * (size_t)exl3_tile_bytes(rate2);
	__m256 acc[2][2] = {{_mm256_setzero_ps(), _mm256_setzero_ps()},
			    {_mm256_setzero_ps(), _mm256_setzero_ps()}};

	for (uint32_t k = 0; k < w->k; k += EXL3_TILE, p += step, x += EXL3_TILE) {
		if (k + PREFETCH * EXL3_TILE < w->k)
			prefetch_unit(p + PREFETCH * step, rate2);
#pragma GCC unroll 2
		for (int b = 0; b < 2; b++) {
			struct tile_words u = load_tile(p + b * exl3_tile_bytes(rate2), rate2);

#pragma GCC unroll 16
			for (int r = 0; r < EXL3_TILE; r++) {
				__m256 a = _mm256_set1_ps(x[r]);

				acc[b][0] = _mm256_fmadd_ps(a, weights(&u, rate2, codebook, r, 0),
							    acc[b][0]);
				acc[b][1] = _mm256_fmadd_ps(a, weights(&u, rate2, codebook, r, 1),
							    acc[b][1]);
			}
		}
	}
	for (int b = 0; b < 2; b++) {
		_mm256_storeu_ps(z + 16 * b, acc[b][0]);
		_mm256_storeu_ps(z + 16 * b + 8, acc[b][1]);
	}
}

INLINE void decode_rate(const struct exl3_matrix *w, uint32_t k0, uint32_t unit, float *out,
			int rate2, int codebook)
{
	const size_t step = (size_t)(w->n / EXL3_TILE) * (size_t)exl3_tile_bytes(rate2);

	for (uint32_t b = 0; b < 2; b++) {
		const uint8_t *p = tile_address(w, k0 / EXL3_TILE, unit * 2 + b);

		for (uint32_t k = 0; k < CPU_BLOCK; k += EXL3_TILE, p += step) {
			struct tile_words u = load_tile(p, rate2);

			if (!b && k0 + k + CPU_BLOCK < w->k)
				prefetch_unit(p + CPU_BLOCK / EXL3_TILE * step, rate2);
#pragma GCC unroll 16
			for (int r = 0; r < EXL3_TILE; r++, out += EXL3_TILE) {
				_mm256_store_ps(out, weights(&u, rate2, codebook, r, 0));
				_mm256_store_ps(out + 8, weights(&u, rate2, codebook, r, 1));
			}
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

/* z[rows x 16] (+)= panel[128][rows] x block[128][16]: 2 accumulators per row. */
INLINE void multiply_rows(int rows, const float *panel, const float *block, float *z,
			  size_t z_stride, bool first)
{
	__m256 acc[6][2];

#pragma GCC unroll 6
	for (int r = 0; r < rows; r++) {
		acc[r][0] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(z + (size_t)r * z_stride);
		acc[r][1] =
			first ? _mm256_setzero_ps() : _mm256_loadu_ps(z + (size_t)r * z_stride + 8);
	}
	for (unsigned k = 0; k < CPU_BLOCK; k++, panel += rows, block += EXL3_TILE) {
		__m256 b0 = _mm256_load_ps(block), b1 = _mm256_load_ps(block + 8);

#pragma GCC unroll 6
		for (int r = 0; r < rows; r++) {
			__m256 a = _mm256_set1_ps(panel[r]);

			acc[r][0] = _mm256_fmadd_ps(a, b0, acc[r][0]);
			acc[r][1] = _mm256_fmadd_ps(a, b1, acc[r][1]);
		}
	}
#pragma GCC unroll 6
	for (int r = 0; r < rows; r++) {
		_mm256_storeu_ps(z + (size_t)r * z_stride, acc[r][0]);
		_mm256_storeu_ps(z + (size_t)r * z_stride + 8, acc[r][1]);
	}
}

static void multiply(unsigned rows, const float *panel, const float *block, float *z,
		     size_t z_stride, bool first)
{
	for (unsigned b = 0; b < 2; b++, block += CPU_BLOCK * EXL3_TILE, z += EXL3_TILE)
		switch (rows) {
#define ROWS(n)                                                     \
	case n:                                                     \
		multiply_rows(n, panel, block, z, z_stride, first); \
		break;
			ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
		}
}

const struct cpu_isa cpu_isa_avx2 = {
	.name = "avx2",
	.available = available,
	.panel = 6,
	.gemv = gemv,
	.decode = decode,
	.multiply = multiply,
	CPU_ISA_OPS,
};
