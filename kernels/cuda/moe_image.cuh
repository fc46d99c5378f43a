/* SPDX-License-Identifier: Apache-2.0 */
/* moe_image.cuh - rows of activations as the products read them: f16, a power of two apart, three layouts. */
#ifndef EXL3_CUDA_MOE_IMAGE_CUH
#define EXL3_CUDA_MOE_IMAGE_CUH

#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/moe_int.h"

namespace exl3
{

/* Where a row of an image lies. */
struct moe_place {
	void *image; /* of the projection */
	int layout;  /* enum moe_layout */
	uint32_t k;
	uint32_t row; /* sorted */
	uint32_t first, rows, first_pad; /* its unit */
};

EXL3_DEV float moe_half(uint32_t bits)
{
	return __half2float(__ushort_as_half((unsigned short)bits));
}

/* Four f16 of 8 bytes. */
EXL3_DEV void moe_halves(const void *p, float (&v)[4])
{
	const uint2 h = *(const uint2 *)p;

	v[0] = moe_half(h.x & 0xffff);
	v[1] = moe_half(h.x >> 16);
	v[2] = moe_half(h.y & 0xffff);
	v[3] = moe_half(h.y >> 16);
}

EXL3_DEV uint32_t moe_pack(float a, float b)
{
	const __half2 h = __floats2half2_rn(a, b);

	return *(const uint32_t *)&h;
}

/* The power of two that brings @biggest into f16. */
EXL3_DEV float moe_power(float biggest)
{
	return biggest > 16384.0f ? exp2f(ceilf(log2f(biggest / 16384.0f))) : 1.0f;
}

/* max(biggest, |v|), NaN and Inf left out. */
EXL3_DEV float moe_biggest(float biggest, float v)
{
	return fabsf(v) <= 3.4e38f ? fmaxf(biggest, fabsf(v)) : biggest;
}

/* Columns col .. col + 3 of the row, a multiple of 4, as @v times @down. */
EXL3_DEV void moe_store4(const moe_place &to, uint32_t col, const float *v, float down)
{
	const uint32_t token = to.row - to.first;
	const uint32_t w0 = moe_pack(v[0] * down, v[1] * down), w1 = moe_pack(v[2] * down, v[3] * down);

	if (to.layout == MOE_FRAGMENT) {
		/* Pairs 2i, 2i + 1 of the k-tile's 8; trellis.cuh has the order. */
		const uint32_t i = col / 4 % 4;
		uint32_t *out = (uint32_t *)to.image + ((size_t)to.first * (to.k / 16) + col / 16 * to.rows + token) * 8 +
				(i & 1) * 4 + (i >> 1);

		out[0] = w0;
		out[2] = w1;
		return;
	}
	char *out = (char *)to.image;

	if (to.layout == MOE_TILES)
		out += (size_t)to.first_pad * to.k * 2 +
		       ((size_t)(col / 64) * ((to.rows + 7) / 8 * 8) + token) * 128 +
		       ((col / 8 ^ token) & 7) * 16 + (col & 4) * 2;
	else
		out += ((size_t)to.row * to.k + col) * 2;
	*(uint2 *)out = make_uint2(w0, w1);
}

} /* namespace exl3 */
#endif
