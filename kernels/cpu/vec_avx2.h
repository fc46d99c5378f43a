/* SPDX-License-Identifier: Apache-2.0 */
/* vec_avx2.h - eight floats; the same names as in vec_c.h and vec_avx512.h. */
#ifndef EXL3_KERNELS_CPU_VEC_AVX2_H
#define EXL3_KERNELS_CPU_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#define VL 8
typedef __m256 vf;

static inline vf v_load(const float *p)
{
	return _mm256_loadu_ps(p);
}
static inline void v_store(float *p, vf v)
{
	_mm256_storeu_ps(p, v);
}
static inline vf v_set1(float f)
{
	return _mm256_set1_ps(f);
}
static inline vf v_add(vf a, vf b)
{
	return _mm256_add_ps(a, b);
}
static inline vf v_sub(vf a, vf b)
{
	return _mm256_sub_ps(a, b);
}
static inline vf v_mul(vf a, vf b)
{
	return _mm256_mul_ps(a, b);
}
static inline vf v_div(vf a, vf b)
{
	return _mm256_div_ps(a, b);
}
static inline vf v_fma(vf a, vf b, vf c)
{
	return _mm256_fmadd_ps(a, b, c);
}
/* The instruction returns its second operand when either is NaN, so a NaN in @a stays. */
static inline vf v_min(vf limit, vf a)
{
	return _mm256_min_ps(limit, a);
}
static inline vf v_max(vf limit, vf a)
{
	return _mm256_max_ps(limit, a);
}
static inline float v_sum(vf v)
{
	__m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

	s = _mm_add_ps(s, _mm_movehl_ps(s, s));
	return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/*
 * exp(v) to about 1 ulp: v = n ln2 + r, |r| <= ln2 / 2, a polynomial for exp(r), then the exponent
 * in two halves, because 2^n alone may be out of range. Overflow gives infinity, a NaN stays.
 */
static inline vf v_exp(vf v)
{
	const vf log2e = v_set1(1.44269504f), hi = v_set1(0.693145752f),
		 lo = v_set1(1.42860677e-6f);
	vf x = v_max(v_set1(-104.0f), v_min(v_set1(89.0f), v));
	vf n = _mm256_round_ps(v_mul(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
	vf r = _mm256_fnmadd_ps(n, lo, _mm256_fnmadd_ps(n, hi, x));
	vf p = v_set1(1.0f / 5040);
	__m256i e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1);
	__m256i rest = _mm256_sub_epi32(e, half), bias = _mm256_set1_epi32(127);

	p = v_fma(p, r, v_set1(1.0f / 720));
	p = v_fma(p, r, v_set1(1.0f / 120));
	p = v_fma(p, r, v_set1(1.0f / 24));
	p = v_fma(p, r, v_set1(1.0f / 6));
	p = v_fma(p, r, v_set1(0.5f));
	p = v_fma(p, r, v_set1(1.0f));
	p = v_fma(p, r, v_set1(1.0f));
	p = v_mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
	return v_mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

static inline vf v_load_f16(const uint16_t *p)
{
	return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline vf v_load_bf16(const uint16_t *p)
{
	__m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));

	return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
/* Exponent and mantissa as an fp16 of 2^-8 times the value: exact, subnormals included. */
static inline vf v_load_e4m3(const uint8_t *p)
{
	__m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
	__m128i mag = _mm_and_si128(w, _mm_set1_epi16(0x7f));
	__m128i nan = _mm_cmpeq_epi16(mag, _mm_set1_epi16(0x7f));
	__m128i h = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x80)), 8),
				 _mm_slli_epi16(mag, 7));

	h = _mm_or_si128(h, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
	return _mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256.0f));
}
static inline void v_store_f16(uint16_t *p, vf v)
{
	_mm_storeu_si128((__m128i *)p,
			 _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void v_store_bf16(uint16_t *p, vf v)
{
	__m256i w = _mm256_castps_si256(v);
	__m256i odd = _mm256_and_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(1));
	__m256i r = _mm256_add_epi32(w, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
	__m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
	__m256i quiet = _mm256_or_si256(w, _mm256_set1_epi32(0x400000));

	r = _mm256_srli_epi32(_mm256_blendv_epi8(r, quiet, nan), 16);
	r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
	_mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(r));
}

/* The butterfly inside a vector: lanes with a set sign in @signs hold a - b, the others a + b. */
#define V_BUTTERFLY(v, shuffled, signs) _mm256_add_ps(shuffled, _mm256_xor_ps(v, signs))

/* v <- H128 v, not normalised: 16 vectors of 8. */
static inline void v_hadamard(vf v[16])
{
	const vf m1 = _mm256_setr_ps(0.f, -0.f, 0.f, -0.f, 0.f, -0.f, 0.f, -0.f);
	const vf m2 = _mm256_setr_ps(0.f, 0.f, -0.f, -0.f, 0.f, 0.f, -0.f, -0.f);
	const vf m4 = _mm256_setr_ps(0.f, 0.f, 0.f, 0.f, -0.f, -0.f, -0.f, -0.f);

	for (int i = 0; i < 16; i++) {
		v[i] = V_BUTTERFLY(v[i], _mm256_permute_ps(v[i], 0xb1), m1);
		v[i] = V_BUTTERFLY(v[i], _mm256_permute_ps(v[i], 0x4e), m2);
		v[i] = V_BUTTERFLY(v[i], _mm256_permute2f128_ps(v[i], v[i], 1), m4);
	}
	for (int s = 1; s < 16; s *= 2)
		for (int i = 0; i < 16; i++)
			if (!(i & s)) {
				vf a = v[i], b = v[i + s];

				v[i] = v_add(a, b);
				v[i + s] = v_sub(a, b);
			}
}

#endif
