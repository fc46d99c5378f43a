/* SPDX-License-Identifier: Apache-2.0 */
/* common_math.h - the arithmetic that a client does itself: norms, RoPE, softmax, sampling; plain f32. */
#ifndef EXL3_EXAMPLES_COMMON_MATH_H
#define EXL3_EXAMPLES_COMMON_MATH_H

#include <stdint.h>

/* y = x / rms(x) * w, @n elements; y may be x. */
void ex_rmsnorm(float *y, const float *x, const float *w, uint32_t n, float eps);

/* Which elements of a head form the pair that position i of RoPE turns. */
enum ex_rope { EX_ROPE_HALVES /* i, i + dim/2 */, EX_ROPE_PAIRS /* 2i, 2i + 1 */ };

/* cos and sin of every angle, [positions, dim/2, 2]; malloc'ed, NULL without memory. */
float *ex_rope_table(uint32_t positions, uint32_t dim, float theta);
/* Turns one head of @dim elements in place; @table: the row of its position. */
void ex_rope_apply(float *x, const float *table, uint32_t dim, enum ex_rope kind);

float ex_dot(const float *a, const float *b, uint32_t n);
/* In place; numbers far below the largest become 0. */
void ex_softmax(float *x, uint32_t n);
float ex_silu(float x);

/* Natural logarithm of the softmax of @logits at @at, in double. */
double ex_log_prob(const float *logits, uint32_t n, uint32_t at);
/* The largest one if @temperature is 0, else drawn from softmax(logits / temperature). */
uint32_t ex_sample(const float *logits, uint32_t n, float temperature, uint64_t *rng);

#endif
