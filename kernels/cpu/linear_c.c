/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_c.c - the inner loops in plain C, for processors without AVX2 and as the yardstick of the
 * benchmark. Columns of a unit are in natural order.
 */
#include "kernels/cpu/vec_c.h"

static inline vf load_z(const float *z, unsigned i)
{
	return z[i];
}

#include "kernels/cpu/vec_ops.h"

static bool available(void)
{
	return true;
}

static const uint32_t *tile_words(const struct exl3_matrix *w, uint32_t row, uint32_t col)
{
	return (const uint32_t *)w->trellis +
	       ((size_t)row * (w->n / EXL3_TILE) + col) * (size_t)exl3_tile_words32(w->rate2);
}

/* The exact codebook value: in f32 the sum before the format's one rounding to fp16 is exact. */
static inline float code_value(uint32_t window, int codebook)
{
	uint32_t x = exl3_code_product(window, codebook), bits;
	float v, e;

	if (codebook == EXL3_CB_MUL1) {
		v = (float)(1774 * (int)exl3_code_bytesum(x) - 905216) * 0x1p-18f;
	} else {
		x = exl3_code_halves(x);
		v = exl3_f16_to_f32((uint16_t)x) + exl3_f16_to_f32((uint16_t)(x >> 16));
	}
	/* Adding and taking away 2^13 times v's power of two leaves 11 bits, ties to even. */
	memcpy(&bits, &v, 4);
	bits &= 0xff800000u;
	memcpy(&e, &bits, 4);
	e *= 8192.0f;
	return (v + e) - e;
}

static void decode(const struct exl3_matrix *w, uint32_t k0, uint32_t unit, float *out)
{
	for (uint32_t a = 0; a < CPU_BLOCK / EXL3_TILE; a++)
		for (uint32_t b = 0; b < CPU_UNIT / EXL3_TILE; b++) {
			const uint32_t *words = tile_words(w, k0 / EXL3_TILE + a, unit * 2 + b);
			float *tile = out + a * EXL3_TILE * CPU_UNIT + b * EXL3_TILE;

			for (int t = 0; t < 256; t++)
				tile[exl3_tile_row(t) * (int)CPU_UNIT + exl3_tile_col(t)] =
					code_value(exl3_window(words, w->rate2, t), w->codebook);
		}
}

static void multiply(unsigned rows, const float *panel, const float *block, float *z,
		     size_t z_stride, bool first)
{
	for (unsigned r = 0; r < rows; r++) {
		float acc[CPU_UNIT];

		if (first)
			memset(acc, 0, sizeof(acc));
		else
			memcpy(acc, z + r * z_stride, sizeof(acc));
		for (unsigned k = 0; k < CPU_BLOCK; k++) {
			float a = panel[k * rows + r];

			for (unsigned c = 0; c < CPU_UNIT; c++)
				acc[c] += a * block[k * CPU_UNIT + c];
		}
		memcpy(z + r * z_stride, acc, sizeof(acc));
	}
}

static void gemv(const struct exl3_matrix *w, uint32_t unit, const float *x, float *z)
{
	float block[CPU_BLOCK * CPU_UNIT];

	for (uint32_t k = 0; k < w->k; k += CPU_BLOCK) {
		decode(w, k, unit, block);
		multiply(1, x + k, block, z, 0, k == 0);
	}
}

const struct cpu_isa cpu_isa_c = {
	.name = "c",
	.available = available,
	.panel = 8,
	.gemv = gemv,
	.decode = decode,
	.multiply = multiply,
	CPU_ISA_OPS,
};
