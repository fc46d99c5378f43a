/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_decode.cc - trellis.cuh and hadamard.cuh against the format's definition, without a GPU.
 *
 * The device code is compiled as plain C++ (ptx.cuh has a host body for each integer instruction) and a
 * tensor instruction is emulated from its documented register map. Every window value of every codebook,
 * random tiles of every bitrate, the three operand forms, and the tensor-core Hadamard transform.
 */
#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/trellis.cuh"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

using namespace exl3;

static unsigned long checks, failures;

#define CHECK(cond, ...)                                \
	do {                                            \
		checks++;                               \
		if (!(cond) && failures++ < 20) {       \
			printf("FAILED: " __VA_ARGS__); \
			printf("\n");                   \
		}                                       \
	} while (0)

static uint64_t seed = 1;

static uint32_t rnd(void)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 32);
}

static double f16(uint32_t bits)
{
	return exl3_f16_to_f32((uint16_t)bits);
}

/* k slot s (0, 1 of a half register pair) of register r, lane quarter q, of an m16n8k16 operand. */
static int slot_k(int r, int q, int h)
{
	return 2 * q + h + 8 * r;
}

template <int RATE2, int CB, int HX> static void check_tile(const uint32_t *tile)
{
	for (int lane = 0; lane < 32; lane++) {
		uint32_t v[run<RATE2>::NV], a[4], r[8];
		int g = lane >> 2, q = lane & 3;

		load_run<RATE2>(tile, lane, v);
		decode_packed<RATE2, CB, HX>(v, a);
		/* A fragment: register, half -> row n, column k of the tile's transpose */
		for (int reg = 0; reg < 4; reg++)
			for (int h = 0; h < 2; h++) {
				int n = g + 8 * (reg & 1), k = slot_k(reg >> 1, q, h);
				uint32_t win = exl3_window(tile, RATE2, exl3_tile_index(k, n));
				uint16_t want = exl3_code_f16(win, CB);
				uint16_t got = (uint16_t)(a[reg] >> (16 * h));

				CHECK(got == want, "rate2 %d cb %d lane %d a%d.%d: %04x, want %04x",
				      RATE2, CB, lane, reg, h, got, want);
			}
		if constexpr (CB == CB_MUL1)
			decode_products<RATE2, CB, HX>(v, r);
		else
			decode_dup<RATE2, CB, HX>(v, r);
		/* two MMAs: A registers {0, 4, 1, 5} and {2, 6, 3, 7}; register pair j has k slot j */
		for (int i = 0; i < 8; i++) {
			int n = g + 8 * (i >> 2), k = 2 * q + (i & 1) + 8 * (i >> 1 & 1);
			uint32_t win = exl3_window(tile, RATE2, exl3_tile_index(k, n));
			uint32_t want = exl3_code_product(win, CB);

			if (CB != CB_MUL1)
				want = exl3_code_halves(want);
			CHECK(r[i] == want, "rate2 %d cb %d lane %d register %d: %08x, want %08x",
			      RATE2, CB, lane, i, r[i], want);
		}
	}
}

template <int RATE2> static void check_rate(void)
{
	uint32_t tile[run<RATE2>::WORDS];

	for (int round = 0; round < 40; round++) {
		for (uint32_t &w : tile)
			w = rnd();
		if constexpr (!(RATE2 & 1)) {
			check_tile<RATE2, CB_3INST, 1>(tile);
			check_tile<RATE2, CB_MCG, 0>(tile);
			check_tile<RATE2, CB_MCG, 2>(tile);
		}
		check_tile<RATE2, CB_MUL1, 0>(tile);
		check_tile<RATE2, CB_MUL1, 1>(tile);
	}
}

template <int CB> static void check_codebook(void)
{
	for (uint32_t w = 0; w < 65536; w++) {
		uint32_t other = 65535 - w;
		uint32_t got = pair_of_products<CB>(product<CB, false>(w),
						    product<CB, true>(other * 65537));
		uint32_t want = exl3_code_f16(w, CB) | (uint32_t)exl3_code_f16(other, CB) << 16;

		CHECK(got == want, "codebook %d windows %04x, %04x: %08x, want %08x", CB, w, other,
		      got, want);
	}
}

/* had_matrix, had_combine and the place of each result, with an emulated MMA. */
static void check_hadamard(void)
{
	static float x[8][128];
	static float d[32][8][4], image[8][8][8][2];

	for (int row = 0; row < 8; row++)
		for (int i = 0; i < 128; i++)
			x[row][i] = (float)(rnd() % 2001) - 1000;
	double A[16][16];
	for (int lane = 0; lane < 32; lane++) {
		uint32_t a[4];

		had_matrix(lane, a);
		for (int r = 0; r < 4; r++)
			for (int h = 0; h < 2; h++)
				A[(lane >> 2) + 8 * (r & 1)][slot_k(r >> 1, lane & 3, h)] =
					f16(a[r] >> (16 * h));
	}
	for (int m = 0; m < 8; m++) { /* MMA m = 2 * chunk + bit 2 */
		double B[16][8];

		for (int lane = 0; lane < 32; lane++)
			for (int s = 0; s < 4; s++)
				B[slot_k(s >> 1, lane & 3, s & 1)][lane >> 2] =
					x[lane >> 2]
					 [32 * (m >> 1) + 8 * (lane & 3) + 4 * (m & 1) + s];
		for (int lane = 0; lane < 32; lane++)
			for (int j = 0; j < 4; j++) {
				int row = (lane >> 2) + 8 * (j >> 1),
				    col = 2 * (lane & 3) + (j & 1);
				double sum = 0;

				for (int k = 0; k < 16; k++)
					sum += A[row][k] * B[k][col];
				d[lane][m][j] = (float)sum;
			}
	}
	for (int lane = 0; lane < 32; lane++) {
		had_combine(d[lane]);
		for (int i = 0; i < 8; i++)
			for (int odd = 0; odd < 2; odd++)
				for (int h = 0; h < 2; h++)
					image[2 * (lane & 3) + odd][had_group(i, lane)]
					     [had_word(i, lane)][h] = d[lane][i][odd + 2 * h];
	}
	for (int row = 0; row < 8; row++)
		for (int i = 0; i < 128; i++) {
			int kk = i & 15, word = ((kk & 7) >> 1) * 2 + (kk >> 3);
			double want = 0;

			for (int j = 0; j < 128; j++)
				want += (__builtin_popcount((unsigned)(i & j)) & 1 ? -1 : 1) *
					(double)x[row][j];
			want *= HAD_IN_SCALE;
			CHECK(fabs(image[row][i >> 4][word][kk & 1] - want) < 0.01,
			      "hadamard row %d element %d: %g, want %g", row, i,
			      image[row][i >> 4][word][kk & 1], want);
		}
}

int main(void)
{
	check_codebook<CB_3INST>();
	check_codebook<CB_MCG>();
	check_codebook<CB_MUL1>();
	check_rate<2>();
	check_rate<3>();
	check_rate<4>();
	check_rate<5>();
	check_rate<6>();
	check_rate<7>();
	check_rate<8>();
	check_rate<10>();
	check_rate<12>();
	check_rate<14>();
	check_rate<16>();
	check_hadamard();
	printf("host_decode: %lu checks, %lu failed\n", checks, failures);
	return failures != 0;
}
