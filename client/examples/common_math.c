/* SPDX-License-Identifier: Apache-2.0 */
/* common_math.c - the arithmetic that a client does itself: norms, RoPE, softmax, sampling; plain f32. */
#include "client/examples/common_math.h"

#include <math.h>
#include <stdlib.h>

void ex_rmsnorm(float *y, const float *x, const float *w, uint32_t n, float eps)
{
	float scale = 1.0f / sqrtf(ex_dot(x, x, n) / (float)n + eps);

	for (uint32_t i = 0; i < n; i++)
		y[i] = x[i] * scale * w[i];
}

float *ex_rope_table(uint32_t positions, uint32_t dim, float theta)
{
	float *table = malloc(sizeof(*table) * positions * dim);

	if (!table)
		return NULL;
	for (uint32_t p = 0; p < positions; p++) {
		for (uint32_t i = 0; i < dim / 2; i++) {
			double angle = p * pow((double)theta, -2.0 * i / dim);

			table[(uint64_t)p * dim + 2 * i] = (float)cos(angle);
			table[(uint64_t)p * dim + 2 * i + 1] = (float)sin(angle);
		}
	}
	return table;
}

void ex_rope_apply(float *x, const float *table, uint32_t dim, enum ex_rope kind)
{
	uint32_t step = kind == EX_ROPE_PAIRS ? 2 : 1;
	uint32_t other = kind == EX_ROPE_PAIRS ? 1 : dim / 2;

	for (uint32_t i = 0; i < dim / 2; i++) {
		float *a = &x[i * step], *b = a + other;
		float c = table[2 * i], s = table[2 * i + 1];
		float turned = *a * c - *b * s;

		*b = *b * c + *a * s;
		*a = turned;
	}
}

float ex_dot(const float *a, const float *b, uint32_t n)
{
	float part[8] = {0}, sum = 0;
	uint32_t i = 0;

	/* Eight independent sums, so that the compiler may use vector registers. */
	for (; i + 8 <= n; i += 8)
		for (uint32_t j = 0; j < 8; j++)
			part[j] += a[i + j] * b[i + j];
	for (; i < n; i++)
		sum += a[i] * b[i];
	for (uint32_t j = 0; j < 8; j++)
		sum += part[j];
	return sum;
}

void ex_softmax(float *x, uint32_t n)
{
	float max = x[0], sum = 0;

	for (uint32_t i = 1; i < n; i++)
		max = x[i] > max ? x[i] : max;
	for (uint32_t i = 0; i < n; i++) {
		x[i] = expf(x[i] - max);
		sum += x[i];
	}
	for (uint32_t i = 0; i < n; i++)
		x[i] /= sum;
}

float ex_silu(float x)
{
	return x / (1.0f + expf(-x));
}

double ex_log_prob(const float *logits, uint32_t n, uint32_t at)
{
	double max = logits[0], sum = 0;

	for (uint32_t i = 1; i < n; i++)
		max = logits[i] > max ? logits[i] : max;
	for (uint32_t i = 0; i < n; i++)
		sum += exp(logits[i] - max);
	return logits[at] - max - log(sum);
}

/* splitmix64: the same seed gives the same text on every machine. */
static double rng_uniform(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

uint32_t ex_sample(const float *logits, uint32_t n, float temperature, uint64_t *rng)
{
	uint32_t best = 0;
	double sum = 0, left;

	for (uint32_t i = 1; i < n; i++)
		best = logits[i] > logits[best] ? i : best;
	if (temperature <= 0)
		return best;
	for (uint32_t i = 0; i < n; i++)
		sum += exp((double)(logits[i] - logits[best]) / (double)temperature);
	left = rng_uniform(rng) * sum;
	for (uint32_t i = 0; i < n; i++) {
		left -= exp((double)(logits[i] - logits[best]) / (double)temperature);
		if (left < 0)
			return i;
	}
	return best;
}
