/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_gemm.cc - the wgmma kernels for many rows on emulated threads against a reference in double; needs no GPU.
 *
 * One block, so whole tiles only: several tiles one after the other, more stages than the ring has, every loop of
 * gemm_sm90.cuh. Tiles that blocks share need blocks that run at the same time; check_gemm has them.
 */
#include "tests/gpu/emulate.h"

#include "kernels/cuda/gemm_sm90.cuh"

#include <math.h>

using namespace exl3;

static uint64_t seed = 5;

static uint32_t rnd(void)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 32);
}

static float uniform(float lo, float hi)
{
	return lo + (hi - lo) * (float)(rnd() >> 8) / 16777216.0f;
}

static int bad;

template <int RATE2, int CB, int TN, int WK, int LOOP>
static void check(const char *name, uint32_t m, uint32_t k, uint32_t n)
{
	using S = gemm_shape<RATE2, TN, WK, 1>;
	const uint32_t m_tiles = (m + TN - 1) / TN, rows = m_tiles * TN;
	std::vector<uint32_t> trellis(exl3_trellis_bytes(k, n, RATE2) / 4);
	std::vector<uint16_t> svh(n), x((size_t)rows * k, 0);
	std::vector<uint8_t> image((size_t)rows * k * 2);
	std::vector<float> scale(rows, 1.0f), y((size_t)m * n, NAN), w((size_t)k * n);
	gemm_args a = {};
	double sum = 0, err = 0;

	for (uint32_t &v : trellis)
		v = rnd();
	for (uint16_t &v : svh)
		v = exl3_f32_to_f16(uniform(0.5f, 1.5f));
	for (uint32_t i = 0; i < m * k; i++)
		x[i] = exl3_f32_to_f16(uniform(-2, 2));
	for (uint32_t r = 0; r < m; r++)
		scale[r] = r & 1 ? 2.0f : 1.0f;
	/* As gemm.cuh describes it. */
	for (uint32_t r = 0; r < rows; r++)
		for (uint32_t i = 0; i < k; i++) {
			const size_t block = (size_t)(r / TN) * (k / 64) + i / 64;
			const size_t at = block * TN * 128 + r % TN * 128 +
					  ((i % 64 / 8 ^ (r & 7)) << 4) + i % 8 * 2;

			memcpy(&image[at], &x[(size_t)r * k + i], 2);
		}
	a.shard[0].trellis = trellis.data();
	a.shard[0].svh = (const __half *)svh.data();
	a.shard[0].tiles_n = n / 16;
	a.shard[0].n = a.shard[0].n_log = n;
	a.nr_shards = 1;
	a.strips = n / 128;
	a.m = m;
	a.k = k;
	a.m_tiles = m_tiles;
	a.k_steps = k / S::STEP;
	a.image = image.data();
	a.image_bytes = image.size();
	a.row_scale = scale.data();
	a.y = y.data();
	a.y_stride = n * 4;
	a.y_dtype = EXL3_F32;
	a.blocks = 1;
	a.rounds = a.strips * m_tiles;
	emu::launch(1, S::THREADS, [&] { gemm_sm90<RATE2, CB, TN, WK, 1, 2, LOOP>(a); });

	for (uint32_t row = 0; row < k; row++)
		for (uint32_t col = 0; col < n; col++) {
			const uint32_t *tile = trellis.data() + ((row / 16) * (n / 16) + col / 16) *
									exl3_tile_words32(RATE2);

			w[(size_t)row * n + col] = exl3_f16_to_f32(exl3_code_f16(
				exl3_window(tile, RATE2, exl3_tile_index(row % 16, col % 16)), CB));
		}
	for (uint32_t r = 0; r < m; r++) {
		std::vector<double> o(n, 0.0);

		for (uint32_t row = 0; row < k; row++)
			for (uint32_t col = 0; col < n; col++)
				o[col] += (double)exl3_f16_to_f32(x[(size_t)r * k + row]) *
					  w[(size_t)row * n + col];
		for (uint32_t base = 0; base < n; base += 128)
			for (uint32_t s = 1; s < 128; s *= 2)
				for (uint32_t i = base; i < base + 128; i++)
					if (!(i & s)) {
						const double u = o[i], v = o[i + s];

						o[i] = u + v;
						o[i + s] = u - v;
					}
		for (uint32_t col = 0; col < n; col++) {
			const double want = o[col] * EXL3_INV_SQRT128 * exl3_f16_to_f32(svh[col]) * scale[r];
			const double got = y[(size_t)r * n + col];

			sum += want * want;
			err += (got - want) * (got - want);
		}
	}
	const double rel = sqrt(err / sum);

	printf("%-8s %4.1f bits codebook %d tile %d x %d, m %u k %u n %u: rms error %.1e%s\n", name,
	       RATE2 / 2.0, CB, TN, WK, m, k, n, rel, rel < 1e-5 ? "" : " FAILED");
	bad += !(rel < 1e-5);
}

static void check_all(void)
{
	check<8, CB_MCG, 64, 2, LOOP_PLAIN>("plain", 50, 256, 256);
	check<8, CB_MCG, 64, 2, LOOP_PACKED>("packed", 50, 256, 256);
	check<8, CB_MCG, 64, 2, LOOP_TURNS>("turns", 50, 256, 256);
	check<8, CB_MCG, 64, 2, LOOP_TURNS>("turns", 130, 1280, 128);
	check<8, CB_MCG, 128, 1, LOOP_PLAIN>("plain", 128, 192, 128);
	check<8, CB_MCG, 128, 1, LOOP_PACKED>("packed", 100, 192, 128);
	check<8, CB_MCG, 128, 1, LOOP_TURNS>("turns", 128, 192, 128);
	check<8, CB_MCG, 128, 1, LOOP_TURNS>("turns", 131, 896, 256);
	check<5, CB_MUL1, 128, 1, LOOP_TURNS>("turns", 17, 128, 128);
	check<8, CB_MCG, 256, 1, LOOP_PACKED>("packed", 200, 128, 128);
	check<8, CB_MCG, 256, 1, LOOP_TURNS>("turns", 256, 640, 128);
	check<12, CB_3INST, 32, 1, LOOP_TURNS>("turns", 9, 256, 128);
}

/* Copies arrive as late as they may, then as early: a place that is filled again too soon shows only then. */
int main(void)
{
	for (bool eager : {false, true}) {
		emu::eager = eager;
		check_all();
	}
	printf("host_gemm: %d failed\n", bad);
	return bad != 0;
}
