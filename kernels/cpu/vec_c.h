/* SPDX-License-Identifier: Apache-2.0 */
/* vec_c.h - a "vector" of one float, so that the generic loops also run where there is no AVX. */
#ifndef EXL3_KERNELS_CPU_VEC_C_H
#define EXL3_KERNELS_CPU_VEC_C_H

#include "kernels/format.h"

#include <math.h>

#define VL 1
typedef float vf;

static inline vf v_load(const float *p)
{
	return *p;
}
static inline void v_store(float *p, vf v)
{
	*p = v;
}
static inline vf v_set1(float f)
{
	return f;
}
static inline vf v_add(vf a, vf b)
{
	return a + b;
}
static inline vf v_sub(vf a, vf b)
{
	return a - b;
}
static inline vf v_mul(vf a, vf b)
{
	return a * b;
}
static inline vf v_div(vf a, vf b)
{
	return a / b;
}
static inline vf v_fma(vf a, vf b, vf c)
{
	return a * b + c;
}
/* A NaN in @a stays, as in the other vec_*.h. */
static inline vf v_min(vf limit, vf a)
{
	return limit < a ? limit : a;
}
static inline vf v_max(vf limit, vf a)
{
	return limit > a ? limit : a;
}
static inline float v_sum(vf v)
{
	return v;
}
static inline vf v_exp(vf v)
{
	return expf(v);
}
static inline vf v_load_f16(const uint16_t *p)
{
	return exl3_f16_to_f32(*p);
}
static inline vf v_load_bf16(const uint16_t *p)
{
	return exl3_bf16_to_f32(*p);
}
static inline vf v_load_e4m3(const uint8_t *p)
{
	return exl3_e4m3_to_f32(*p);
}
static inline void v_store_f16(uint16_t *p, vf v)
{
	*p = exl3_f32_to_f16(v);
}
static inline void v_store_bf16(uint16_t *p, vf v)
{
	*p = exl3_f32_to_bf16(v);
}

/* v <- H128 v, not normalised. */
static inline void v_hadamard(vf v[128])
{
	for (int s = 1; s < 128; s *= 2)
		for (int i = 0; i < 128; i += 2 * s)
			for (int j = i; j < i + s; j++) {
				float a = v[j], b = v[j + s];

				v[j] = a + b;
				v[j + s] = a - b;
			}
}

#endif
