/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vec_ops.h - transforms, stores, activations and attention, written once over vec_*.h.
 *
 * A file that includes this has included its vec_*.h and defined load_z(z, i): the i-th vector of
 * 128 columns in natural order, from a z in the order of its own units.
 */
#ifndef EXL3_KERNELS_CPU_VEC_OPS_H
#define EXL3_KERNELS_CPU_VEC_OPS_H

#include "kernels/cpu/isa.h"
#include "kernels/format.h"

#include <math.h>
#include <string.h>

static inline vf load_any(const void *x, uint8_t dtype, size_t i)
{
	switch (dtype) {
	case EXL3_F16:
		return v_load_f16((const uint16_t *)x + i);
	case EXL3_BF16:
		return v_load_bf16((const uint16_t *)x + i);
	case EXL3_E4M3:
		return v_load_e4m3((const uint8_t *)x + i);
	default:
		return v_load((const float *)x + i);
	}
}

static void ops_input(const void *x, uint8_t dtype, unsigned count, const uint16_t *suh, float *out,
		      size_t stride)
{
	_Alignas(64) float padded[EXL3_HAD];
	vf v[EXL3_HAD / VL];

	if (count < EXL3_HAD) {
		memset(padded, 0, sizeof(padded));
		memcpy(padded, x, (size_t)count * exl3_dtype_bytes(dtype));
		x = padded;
	}
	for (unsigned i = 0; i < EXL3_HAD / VL; i++)
		v[i] = v_mul(load_any(x, dtype, (size_t)i * VL), v_load_f16(suh + i * VL));
	v_hadamard(v);
	for (unsigned i = 0; i < EXL3_HAD / VL; i++)
		v_store(padded + i * VL, v_mul(v[i], v_set1((float)EXL3_INV_SQRT128)));
	if (stride == 1)
		memcpy(out, padded, sizeof(padded));
	else
		for (unsigned i = 0; i < EXL3_HAD; i++)
			out[i * stride] = padded[i];
}

static void ops_output(const float *z, const uint16_t *svh, const float *bias, float *y)
{
	vf v[EXL3_HAD / VL];

	for (unsigned i = 0; i < EXL3_HAD / VL; i++)
		v[i] = load_z(z, i);
	v_hadamard(v);
	for (unsigned i = 0; i < EXL3_HAD / VL; i++) {
		vf r = v_mul(v_mul(v[i], v_set1((float)EXL3_INV_SQRT128)),
			     v_load_f16(svh + i * VL));

		v_store(y + i * VL, bias ? v_add(r, v_load(bias + i * VL)) : r);
	}
}

static void ops_store(void *y, uint8_t dtype, size_t at, const float *v, unsigned count)
{
	_Alignas(64) uint16_t half[EXL3_HAD];
	unsigned whole = count / VL * VL;

	if (dtype == EXL3_F32) {
		memcpy((float *)y + at, v, count * sizeof(float));
		return;
	}
	for (unsigned i = 0; i < whole; i += VL)
		if (dtype == EXL3_F16)
			v_store_f16((uint16_t *)y + at + i, v_load(v + i));
		else
			v_store_bf16((uint16_t *)y + at + i, v_load(v + i));
	if (whole == count)
		return;
	/* The vector that holds the last values may be read as a whole, but not written. */
	if (dtype == EXL3_F16)
		v_store_f16(half, v_load(v + whole));
	else
		v_store_bf16(half, v_load(v + whole));
	memcpy((uint16_t *)y + at + whole, half, (count - whole) * sizeof(uint16_t));
}

/* g / (1 + exp(-s)) */
static inline vf gated(vf g, vf s)
{
	return v_div(g, v_add(v_set1(1), v_exp(v_sub(v_set1(0), s))));
}

static void ops_act(uint8_t act, float limit, const float *g, float *u, unsigned count)
{
	const vf top = v_set1(limit > 0 ? limit : INFINITY);
	const vf bottom = v_set1(limit > 0 ? -limit : -INFINITY);
	const vf zero = v_set1(0);

	for (unsigned i = 0; i < count; i += VL) {
		vf b = v_load(u + i), a = g ? v_load(g + i) : b, s;

		switch (act) {
		case EXL3_ACT_RELU2:
			b = v_max(zero, b);
			v_store(u + i, v_mul(b, b));
			continue;
		case EXL3_ACT_RELU2_GATED:
			a = v_max(zero, a);
			v_store(u + i, v_mul(v_mul(a, a), b));
			continue;
		case EXL3_ACT_SWIGLU_OAI:
			a = v_min(top, a);
			b = v_max(bottom, v_min(top, b));
			a = gated(a, v_mul(v_set1(1.702f), a));
			v_store(u + i, v_mul(a, v_add(b, v_set1(1))));
			continue;
		case EXL3_ACT_GELU:
			/* 0.5 (1 + tanh(s)) = 1 / (1 + exp(-2 s)) */
			s = v_fma(v_mul(v_set1(0.044715f), v_mul(a, a)), a, a);
			a = gated(a, v_mul(v_set1(1.5957691216f), s));
			break;
		default: /* EXL3_ACT_SILU */
			a = gated(a, a);
			break;
		}
		a = v_min(top, a);
		b = v_max(bottom, v_min(top, b));
		v_store(u + i, v_mul(a, b));
	}
}

static void ops_add(float *y, float p, const float *v)
{
	for (unsigned i = 0; i < EXL3_HAD; i += VL)
		v_store(y + i, v_fma(v_set1(p), v_load(v + i), v_load(y + i)));
}

static void ops_convert(const void *src, uint8_t dtype, float scale, unsigned count, float *out)
{
	for (unsigned i = 0; i < count; i += VL)
		v_store(out + i, v_mul(load_any(src, dtype, i), v_set1(scale)));
}

/* s[h][j] = q[h] . kv[j], four heads by four cache rows at a time: 8 loads for 16 products. */
static void mla_scores(struct cpu_mla_state *st, unsigned heads, unsigned slots, unsigned dim)
{
	for (unsigned h = 0; h < heads; h += 4)
		for (unsigned j = 0; j < slots; j += 4) {
			vf acc[4][4];

			for (int a = 0; a < 4; a++)
				for (int b = 0; b < 4; b++)
					acc[a][b] = v_set1(0);
			for (unsigned d = 0; d < dim; d += VL) {
				vf k[4];

				for (unsigned b = 0; b < 4; b++)
					k[b] = v_load(&st->kv[j + b][d]);
				for (unsigned a = 0; a < 4; a++) {
					vf q = v_load(&st->q[h + a][d]);

					for (unsigned b = 0; b < 4; b++)
						acc[a][b] = v_fma(q, k[b], acc[a][b]);
				}
			}
			for (unsigned a = 0; a < 4; a++)
				for (unsigned b = 0; b < 4; b++)
					st->s[h + a][j + b] = v_sum(acc[a][b]);
		}
}

/*
 * Turns one head's scores into exp(score - top) and returns the factor for what was summed before.
 * While all scores are -inf, 0 stands in for the top: each term is 0, as it has to be.
 */
static float mla_softmax(struct cpu_mla_state *st, unsigned h, unsigned slots)
{
	float *s = st->s[h], top = st->top[h], base, factor, sum = 0;

	for (unsigned j = 0; j < slots; j++)
		top = s[j] > top ? s[j] : top;
	base = top == -INFINITY ? 0 : top;
	for (unsigned j = 0; j < slots; j++)
		s[j] -= base;
	for (unsigned j = slots; j < CPU_MLA_SLOTS; j++)
		s[j] = -INFINITY;
	for (unsigned j = 0; j < CPU_MLA_SLOTS; j += VL)
		v_store(s + j, v_exp(v_load(s + j)));
	for (unsigned j = 0; j < slots; j++)
		sum += s[j];
	factor = st->top[h] == -INFINITY ? 0 : expf(st->top[h] - base);
	st->sum[h] = st->sum[h] * factor + sum;
	st->top[h] = top;
	return factor;
}

/* Four heads and @w vectors of columns from @d on: w + 4 loads for 4 w products. */
static inline __attribute__((always_inline)) void mla_columns(struct cpu_mla_state *st, unsigned h,
							      unsigned d, unsigned slots,
							      const float *factor, const unsigned w)
{
	vf acc[4][4];

	for (unsigned a = 0; a < 4; a++)
		for (unsigned i = 0; i < w; i++)
			acc[a][i] = v_mul(v_set1(factor[h + a]), v_load(&st->o[h + a][d + i * VL]));
	for (unsigned j = 0; j < slots; j++)
		for (unsigned i = 0; i < w; i++) {
			vf k = v_load(&st->kv[j][d + i * VL]);

			for (unsigned a = 0; a < 4; a++)
				acc[a][i] = v_fma(v_set1(st->s[h + a][j]), k, acc[a][i]);
		}
	for (unsigned a = 0; a < 4; a++)
		for (unsigned i = 0; i < w; i++)
			v_store(&st->o[h + a][d + i * VL], acc[a][i]);
}

/* o[h] = o[h] * factor[h] + sum over j of s[h][j] kv[j] */
static void mla_accumulate(struct cpu_mla_state *st, unsigned heads, unsigned slots,
			   unsigned value_dim, const float *factor)
{
	/* Accumulators for four heads fill 16 of 32 registers, or 8 of 16. */
	enum { WIDE = VL == 16 ? 4 : VL == 8 ? 2 : 1 };

	for (unsigned h = 0; h < heads; h += 4) {
		unsigned d = 0;

		for (; d + WIDE * VL <= value_dim; d += WIDE * VL)
			mla_columns(st, h, d, slots, factor, WIDE);
		for (; d < value_dim; d += VL)
			mla_columns(st, h, d, slots, factor, 1);
	}
}

/* Heads are processed in fours: those beyond @heads hold zeros and are not looked at. */
static void ops_attend(struct cpu_mla_state *st, unsigned heads, unsigned slots, unsigned dim,
		       unsigned value_dim)
{
	float factor[CPU_MLA_HEADS];
	unsigned padded = (heads + 3) / 4 * 4;

	mla_scores(st, padded, slots, dim);
	for (unsigned h = 0; h < padded; h++)
		factor[h] = mla_softmax(st, h, slots);
	mla_accumulate(st, padded, slots, value_dim, factor);
}

#define CPU_ISA_OPS                                                                   \
	.input = ops_input, .output = ops_output, .store = ops_store, .act = ops_act, \
	.add = ops_add, .convert = ops_convert, .attend = ops_attend

#endif
