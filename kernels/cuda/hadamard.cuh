/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hadamard.cuh - the 128-point Hadamard transform: on tensor cores for inputs, in a warp for outputs.
 *
 * Input side, 8 rows of 128 fp16 values per call of a warp. With the bits of the index i6..i0,
 * H128 = H8 (bits 6 5 2) x H16 (bits 4 3 1 0): the H16 part is an MMA whose A operand is a constant
 * +-1/8 matrix and whose 8 columns are 8 rows of x, the H8 part a butterfly over 8 such results in
 * registers. The input bits are dealt out so that a lane loads 16 contiguous bytes, the output bits so
 * that a lane ends up with whole words of the B operand of m16n8k16:
 *
 *       B fragment   column g = lane >> 2: row g of the 8; q = lane & 3 = bits 4 3; chunk c = bits 6 5:
 *                    elements 32c + 8q .. + 7, bit 2 selects one of two MMAs, bits 1 0 the k slot
 *       D fragment   columns 2q, 2q + 1: rows; row g of D: bits 4 1 3 = g2 g1 g0, bit 0 = 0; row
 *                    g + 8 the same with bit 0 = 1
 *
 * Both sides of a layer together need the factor 1/128 = (1/8) (1/16): the input side applies 1/8
 * (exact), the output side 1/16 (HAD_OUT_SCALE).
 */
#ifndef EXL3_CUDA_HADAMARD_CUH
#define EXL3_CUDA_HADAMARD_CUH

#include "kernels/cuda/ptx.cuh"

namespace exl3
{

constexpr float HAD_IN_SCALE = 0.125f;
constexpr float HAD_OUT_SCALE = 0.0625f;

/* The constant A operand of this lane. */
static EXL3_HD void had_matrix(int lane, uint32_t (&a)[4])
{
	const int g = lane >> 2, q = lane & 3;

#pragma unroll
	for (int r = 0; r < 4; r++) {
		uint32_t v = 0;

#pragma unroll
		for (int h = 0; h < 2; h++) {
			/* row bits 4 1 3 0 and column bits 4 3 1 0 of this element */
			const int r4 = g >> 2, r1 = g >> 1 & 1, r3 = g & 1, r0 = r & 1;
			const int c4 = q >> 1, c3 = q & 1, c1 = r >> 1, c0 = h;
			const int odd = (r4 & c4) ^ (r3 & c3) ^ (r1 & c1) ^ (r0 & c0);

			v |= (odd ? 0xb000u : 0x3000u) << (16 * h); /* -+ 1/8 */
		}
		a[r] = v;
	}
}

/* The H8 butterfly over the 8 MMA results d[4 * bit6 + 2 * bit5 + bit2]. */
static EXL3_HD void had_combine(float (&d)[8][4])
{
#pragma unroll
	for (int s = 1; s < 8; s *= 2)
#pragma unroll
		for (int i = 0; i < 8; i++)
			if (!(i & s))
#pragma unroll
				for (int j = 0; j < 4; j++) {
					float x = d[i][j], y = d[i | s][j];

					d[i][j] = x + y;
					d[i | s][j] = x - y;
				}
}

/*
 * Where a lane's result goes: the B image holds 8 words per row and 16 values of k, in the order in
 * which lane q reads its two registers (word 2q: k = 2q, 2q + 1; word 2q + 1: k = 2q + 8, 2q + 9).
 * d[i] belongs to 16-group had_group(i, lane) of the 8 in the block and to word had_word(i, lane).
 */
static EXL3_HD int had_group(int i, int lane)
{
	return (i >> 1) * 2 + (lane >> 4);
}
static EXL3_HD int had_word(int i, int lane)
{
	return (i & 1) * 4 + (lane >> 2 & 3);
}

#ifdef __CUDACC__

/* Transforms 8 rows: x[c] = this lane's 8 fp16 values of chunk c (x * suh). */
EXL3_DEV void had_rows(const uint32_t (&a)[4], const uint4 (&x)[4], float (&d)[8][4])
{
#pragma unroll
	for (int c = 0; c < 4; c++) {
#pragma unroll
		for (int j = 0; j < 4; j++)
			d[2 * c][j] = d[2 * c + 1][j] = 0.0f;
		mma_f16(d[2 * c], a[0], a[1], a[2], a[3], x[c].x, x[c].y);
		mma_f16(d[2 * c + 1], a[0], a[1], a[2], a[3], x[c].z, x[c].w);
	}
	had_combine(d);
}

/* Word of the B image for the even (0) or odd (1) column of this lane's pair: two fp16. */
EXL3_DEV uint32_t had_pack(const float (&d)[4], int odd)
{
	__half2 h = __floats2half2_rn(d[odd], d[odd + 2]);

	return *(uint32_t *)&h;
}

/* Output side: 128 values over a warp, element 4 * lane + j in v[j]; unscaled. */
EXL3_DEV void had_warp(float (&v)[4])
{
	float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], e = v[2] - v[3];

	v[0] = a + c;
	v[1] = b + e;
	v[2] = a - c;
	v[3] = b - e;
	const int lane = threadIdx.x & 31;
#pragma unroll
	for (int s = 1; s < 32; s *= 2)
#pragma unroll
		for (int j = 0; j < 4; j++) {
			float o = __shfl_xor_sync(~0u, v[j], s);

			v[j] = lane & s ? o - v[j] : v[j] + o;
		}
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
