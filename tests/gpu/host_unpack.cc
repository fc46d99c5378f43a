/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_unpack.cc - weights rebuilt in 16 bits on emulated threads against the definition in double; needs no GPU.
 *
 *       W = diag(suh) H What H diag(svh) / 128
 *
 * Runs that begin and end inside a row of blocks, one block for all, more blocks than a ring has stages, every layout
 * of a run of bits (a lane's windows in one, two or three words), every codebook, both types.
 */
#include "tests/gpu/emulate.h"

#include "kernels/cuda/unpack_mma.cuh"
#include "kernels/cuda/unpack_sm90.cuh"

#include <math.h>

using namespace exl3;

static uint64_t seed = 11;

static uint32_t rnd(void)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 32);
}

static float uniform(float lo, float hi)
{
	return lo + (hi - lo) * (float)(rnd() >> 8) / 16777216.0f;
}

/* Along one of two dimensions of a matrix of @rows x @cols. */
static void hadamard(std::vector<double> &v, size_t rows, size_t cols, bool over_rows)
{
	const size_t step = over_rows ? cols : 1, other = over_rows ? 1 : cols;
	const size_t length = over_rows ? rows : cols, lines = over_rows ? cols : rows;

	for (size_t line = 0; line < lines; line++)
		for (size_t base = 0; base < length; base += 128)
			for (size_t s = 1; s < 128; s *= 2)
				for (size_t i = 0; i < 128; i++)
					if (!(i & s)) {
						double &x = v[line * other + (base + i) * step];
						double &y = v[line * other + (base + i + s) * step];
						const double a = x, b = y;

						x = a + b;
						y = a - b;
					}
}

static int bad;

template <int RATE2, int CB, bool BF16, bool MMA = false>
static void check(uint32_t k, uint32_t n, unsigned grid, float suh_size = 1.0f, float svh_size = 1.0f)
{
	std::vector<uint32_t> trellis(exl3_trellis_bytes(k, n, RATE2) / 4);
	std::vector<uint16_t> suh(k), svh(n), got((size_t)n * k, 0xffff);
	std::vector<double> want((size_t)k * n);
	unpack_args a = {};
	double sum = 0, err = 0, worst = 0;
	bool missing = false;

	for (uint32_t &v : trellis)
		v = rnd();
	for (uint16_t &v : suh)
		v = exl3_f32_to_f16(uniform(0.5f, 1.5f) * (rnd() & 1 ? suh_size : -suh_size));
	for (uint16_t &v : svh)
		v = exl3_f32_to_f16(uniform(0.5f, 1.5f) * (rnd() & 1 ? svh_size : -svh_size));
	a.trellis = (const uint8_t *)trellis.data();
	a.suh = (const __half *)suh.data();
	a.svh = (const __half *)svh.data();
	a.k = k;
	a.blocks_k = k / 128;
	a.blocks = k / 128 * (n / 128);
	a.row_bytes = (size_t)(n / 16) * exl3_tile_bytes(RATE2);
	a.w = got.data();
	emu::launch(grid, unpack_shape<RATE2>::THREADS, [&] {
		if constexpr (MMA)
			unpack_mma<RATE2, CB, BF16>(a);
		else
			unpack_wgmma<RATE2, CB, BF16>(a);
	});

	for (uint32_t row = 0; row < k; row++)
		for (uint32_t col = 0; col < n; col++) {
			const uint32_t *tile = trellis.data() + ((row / 16) * (n / 16) + col / 16) *
									exl3_tile_words32(RATE2);

			want[(size_t)row * n + col] = exl3_f16_to_f32(exl3_code_f16(
				exl3_window(tile, RATE2, exl3_tile_index(row % 16, col % 16)), CB));
		}
	hadamard(want, k, n, true);
	hadamard(want, k, n, false);
	for (uint32_t row = 0; row < k; row++)
		for (uint32_t col = 0; col < n; col++) {
			const uint16_t bits = got[(size_t)col * k + row];
			const double w = want[(size_t)row * n + col] / 128 * exl3_f16_to_f32(suh[row]) *
					 exl3_f16_to_f32(svh[col]);
			const double v = BF16 ? exl3_bf16_to_f32(bits) : exl3_f16_to_f32(bits);

			missing |= bits == 0xffff;
			sum += w * w;
			err += (v - w) * (v - w);
			worst = fmax(worst, fabs(v - w));
		}
	const double rel = sqrt(err / sum), rms = sqrt(sum / ((double)k * n));
	/* By mma.sync there are eight roundings to f16, by wgmma four. */
	const bool ok = !missing && rel < (BF16 ? 2.5e-3 : MMA ? 8e-4 : 5e-4) &&
			worst < (BF16 ? 3e-2 : MMA ? 8e-3 : 6e-3) * rms;

	printf("%s %4.1f bits codebook %d %s k %u n %u blocks %u: rms error %.1e, largest %.1e%s\n",
	       MMA ? "mma  " : "wgmma", RATE2 / 2.0, CB, BF16 ? "bf16" : "f16 ", k, n, grid, rel, worst / rms,
	       ok ? "" : " FAILED");
	bad += !ok;
}

static void check_all(void)
{
	check<8, CB_MCG, false>(128, 128, 1);
	check<8, CB_MCG, true>(256, 384, 1);
	check<8, CB_MCG, false>(640, 256, 3);
	check<8, CB_MCG, false>(384, 256, 5, 0.02f, 0.004f);
	check<8, CB_MCG, true>(384, 256, 2, 30.0f, 20.0f);
	check<8, CB_MUL1, false>(256, 256, 1);
	check<12, CB_3INST, true>(256, 128, 1);
	check<12, CB_MCG, false>(768, 128, 2);
	check<16, CB_MCG, false>(512, 128, 1);
	check<16, CB_MUL1, true>(256, 256, 3);
	check<2, CB_3INST, false>(256, 128, 1);
	check<3, CB_MUL1, false>(256, 256, 2);
	check<4, CB_MCG, false>(256, 128, 2);
	check<5, CB_MUL1, true>(384, 128, 1);
	check<6, CB_3INST, false>(256, 128, 1);
	check<7, CB_MUL1, false>(256, 128, 1);
	check<10, CB_MCG, false>(256, 128, 1);
	check<14, CB_MCG, true>(256, 128, 1);
	check<8, CB_MCG, false, true>(128, 128, 1);
	check<8, CB_MCG, true, true>(256, 384, 1);
	check<8, CB_MCG, false, true>(640, 256, 3);
	check<8, CB_MCG, false, true>(384, 256, 5, 0.02f, 0.004f);
	check<8, CB_MUL1, true, true>(256, 256, 3);
	check<12, CB_3INST, false, true>(768, 128, 2);
	check<16, CB_MCG, false, true>(512, 128, 1);
	check<5, CB_MUL1, false, true>(256, 256, 1);
}

/* Copies arrive as late as they may, then as early: a place that is filled again too soon shows only then. */
int main(void)
{
	for (bool eager : {false, true}) {
		emu::eager = eager;
		check_all();
	}
	printf("host_unpack: %d failed\n", bad);
	return bad != 0;
}
