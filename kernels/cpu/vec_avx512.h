/* SPDX-License-Identifier: Apache-2.0 */
/* vec_avx512.h - sixteen floats; the same names as in vec_c.h and vec_avx2.h. */
#ifndef EXL3_KERNELS_CPU_VEC_AVX512_H
#define EXL3_KERNELS_CPU_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#define VL 16
typedef __m512 vf;

static inline vf v_load(const float *p)
{
	return _mm512_loadu_ps(p);
}
static inline void v_store(float *p, vf v)
{
	_mm512_storeu_ps(p, v);
}
static inline vf v_set1(float f)
{
	return _mm512_set1_ps(f);
}
static inline vf v_add(vf a, vf b)
{
	return _mm512_add_ps(a, b);
}
static inline vf v_sub(vf a, vf b)
{
	return _mm512_sub_ps(a, b);
}
static inline vf v_mul(vf a, vf b)
{
	return _mm512_mul_ps(a, b);
}
static inline vf v_div(vf a, vf b)
{
	return _mm512_div_ps(a, b);
}
static inline vf v_fma(vf a, vf b, vf c)
{
	return _mm512_fmadd_ps(a, b, c);
}
/* The instruction returns its second operand when either is NaN, so a NaN in @a stays. */
static inline vf v_min(vf limit, vf a)
{
	return _mm512_min_ps(limit, a);
}
static inline vf v_max(vf limit, vf a)
{
	return _mm512_max_ps(limit, a);
}
static inline float v_sum(vf v)
{
	return _mm512_reduce_add_ps(v);
}

/*
 * exp(v) to about 1 ulp: v = n ln2 + r, |r| <= ln2 / 2, a polynomial for exp(r), then the exponent.
 * Overflow gives infinity, underflow 0; a NaN stays.
 */
static inline vf v_exp(vf v)
{
	const vf log2e = v_set1(1.44269504f), hi = v_set1(0.693145752f),
		 lo = v_set1(1.42860677e-6f);
	vf x = v_max(v_set1(-104.0f), v_min(v_set1(89.0f), v));
	vf n = _mm512_roundscale_ps(v_mul(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
	vf r = _mm512_fnmadd_ps(n, lo, _mm512_fnmadd_ps(n, hi, x));
	vf p = v_set1(1.0f / 5040);

	p = v_fma(p, r, v_set1(1.0f / 720));
	p = v_fma(p, r, v_set1(1.0f / 120));
	p = v_fma(p, r, v_set1(1.0f / 24));
	p = v_fma(p, r, v_set1(1.0f / 6));
	p = v_fma(p, r, v_set1(0.5f));
	p = v_fma(p, r, v_set1(1.0f));
	p = v_fma(p, r, v_set1(1.0f));
	return _mm512_scalef_ps(p, n);
}

static inline vf v_load_f16(const uint16_t *p)
{
	return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf v_load_bf16(const uint16_t *p)
{
	__m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));

	return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
/* Exponent and mantissa as an fp16 of 2^-8 times the value: exact, subnormals included. */
static inline vf v_load_e4m3(const uint8_t *p)
{
	__m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
	__m256i mag = _mm256_and_si256(w, _mm256_set1_epi16(0x7f));
	__m256i nan = _mm256_cmpeq_epi16(mag, _mm256_set1_epi16(0x7f));
	__m256i h =
		_mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8),
				_mm256_slli_epi16(mag, 7));

	h = _mm256_or_si256(h, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
	return _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
}
static inline void v_store_f16(uint16_t *p, vf v)
{
	_mm256_storeu_si256((__m256i *)p,
			    _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void v_store_bf16(uint16_t *p, vf v)
{
	__m512i w = _mm512_castps_si512(v);
	__m512i odd = _mm512_and_si512(_mm512_srli_epi32(w, 16), _mm512_set1_epi32(1));
	__m512i r = _mm512_add_epi32(w, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
	__mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);

	r = _mm512_mask_or_epi32(r, nan, w, _mm512_set1_epi32(0x400000));
	_mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}

/* The butterfly of distance @s inside a vector: lanes with that bit hold a - b, the others a + b. */
#define V_BUTTERFLY(v, shuffled, mask)                                                        \
	_mm512_add_ps(shuffled, _mm512_castsi512_ps(_mm512_mask_xor_epi32(                    \
					_mm512_castps_si512(v), mask, _mm512_castps_si512(v), \
					_mm512_set1_epi32((int)0x80000000))))

/* v <- H128 v, not normalised: 8 vectors of 16. */
static inline void v_hadamard(vf v[8])
{
	for (int i = 0; i < 8; i++) {
		v[i] = V_BUTTERFLY(v[i], _mm512_permute_ps(v[i], 0xb1), 0xaaaa);
		v[i] = V_BUTTERFLY(v[i], _mm512_permute_ps(v[i], 0x4e), 0xcccc);
		v[i] = V_BUTTERFLY(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0xb1), 0xf0f0);
		v[i] = V_BUTTERFLY(v[i], _mm512_shuffle_f32x4(v[i], v[i], 0x4e), 0xff00);
	}
	for (int s = 1; s < 8; s *= 2)
		for (int i = 0; i < 8; i++)
			if (!(i & s)) {
				vf a = v[i], b = v[i + s];

				v[i] = v_add(a, b);
				v[i + s] = v_sub(a, b);
			}
}

#endif
