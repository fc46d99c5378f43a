/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_decode_cpu.c - decoded weights of every instruction set, bit for bit, over all 65536 windows of
 * each codebook and at every bitrate.
 */
#include "tests/test.h"

#include "kernels/cpu/isa.h"
#include "kernels/cpu/ref.h"
#include "kernels/format.h"

static const struct cpu_isa *const all[] = {&cpu_isa_avx512, &cpu_isa_avx2, &cpu_isa_c};

/* Where a weight is in a decoded block; the order is each instruction set's own. */
static size_t place(const struct cpu_isa *isa, uint32_t row, uint32_t col)
{
	if (isa == &cpu_isa_avx512)
		return row * 32 + (col & 7) + 8 * (col >> 4) + 16 * (col >> 3 & 1);
	if (isa == &cpu_isa_avx2)
		return (size_t)(col >> 4) * CPU_BLOCK * 16 + row * 16 + (col & 15);
	return row * 32 + col;
}

struct random_matrix {
	struct exl3_matrix w;
	uint16_t *words;
	size_t nr_words;
	uint64_t state;
};

static void refill(struct random_matrix *m)
{
	for (size_t i = 0; i < m->nr_words; i++)
		m->words[i] = (uint16_t)((m->state = m->state * 6364136223846793005ull +
						     1442695040888963407ull) >>
					 48);
}

/* Compares one block with the oracle's tiles; notes the windows that occurred. */
static void check_block(const struct cpu_isa *isa, const struct random_matrix *m, uint32_t k0,
			uint32_t unit, const float *got, uint8_t *seen)
{
	const struct exl3_matrix *w = &m->w;
	int rate2 = w->rate2;

	for (uint32_t a = 0; a < CPU_BLOCK / EXL3_TILE; a++)
		for (uint32_t b = 0; b < 2; b++) {
			size_t tile =
				(size_t)(k0 / EXL3_TILE + a) * (w->n / EXL3_TILE) + unit * 2 + b;
			const uint16_t *words = m->words + tile * (size_t)exl3_tile_words16(rate2);
			uint32_t u32[64];
			uint16_t want[256];

			memcpy(u32, words, (size_t)exl3_tile_bytes(rate2));
			exl3_ref_tile(words, rate2, w->codebook, want);
			for (int t = 0; t < 256; t++)
				seen[exl3_window(u32, rate2, t)] = 1;
			for (uint32_t i = 0; i < 256; i++) {
				float v = got[place(isa, 16 * a + i / 16, 16 * b + i % 16)];

				if (v != exl3_f16_to_f32(want[i]))
					fail_msg("%s, %g bits, codebook %u: row %u column %u is %a "
						 "instead of %a",
						 isa->name, rate2 / 2.0, w->codebook,
						 k0 + 16 * a + i / 16, unit * 32 + 16 * b + i % 16,
						 (double)v, (double)exl3_f16_to_f32(want[i]));
			}
		}
}

static unsigned count(const uint8_t *seen)
{
	unsigned n = 0;

	for (int i = 0; i < 65536; i++)
		n += seen[i];
	return n;
}

/* @whole: go on until every window has occurred, else look at each place of the matrix once. */
static void check_rate(const struct cpu_isa *isa, int rate2, int codebook, bool whole)
{
	static uint8_t seen[65536];
	_Alignas(64) float block[CPU_BLOCK * CPU_UNIT];
	struct random_matrix m = {.w = {.k = 256,
					.n = 384,
					.k_log = 256,
					.n_log = 384,
					.rate2 = (uint8_t)rate2,
					.codebook = (uint8_t)codebook},
				  .state = (uint64_t)(rate2 * 3 + codebook)};

	memset(seen, 0, sizeof(seen));
	/* Exactly as long as the matrix, so that a sanitizer sees a load beyond it. */
	m.nr_words = exl3_trellis_bytes(m.w.k, m.w.n, rate2) / 2;
	m.words = malloc(2 * m.nr_words);
	assert_non_null(m.words);
	m.w.trellis = m.words;
	do {
		refill(&m);
		for (uint32_t k0 = 0; k0 < m.w.k; k0 += CPU_BLOCK)
			for (uint32_t unit = 0; unit < m.w.n / CPU_UNIT; unit++) {
				isa->decode(&m.w, k0, unit, block);
				check_block(isa, &m, k0, unit, block, seen);
			}
	} while (whole && count(seen) < 65536);
	free(m.words);
}

static void all_rates(void **state)
{
	int checked = 0;

	(void)state;
	for (size_t i = 0; i < TEST_NR(all); i++)
		for (int rate2 = EXL3_RATE2_MIN; all[i]->available() && rate2 <= EXL3_RATE2_MAX;
		     rate2++)
			for (int cb = 0; cb < EXL3_CB_NR; cb++)
				if (exl3_rate_valid(rate2, cb)) {
					check_rate(all[i], rate2, cb, false);
					checked++;
				}
	assert_true(checked >= 27 && checked % 27 == 0);
}

static void all_windows(void **state)
{
	(void)state;
	for (size_t i = 0; i < TEST_NR(all); i++)
		for (int cb = 0; all[i]->available() && cb < EXL3_CB_NR; cb++)
			check_rate(all[i], 16, cb, true);
}

/* The panel kernels add in the same order as gemv, whatever the number of rows. */
static void panels(void **state)
{
	enum { K = 256, N = 128 };
	struct exl3_matrix w = {.k = K, .n = N, .k_log = K, .n_log = N, .rate2 = 6, .codebook = 2};
	static uint16_t words[K * N * 3 / 16];
	static float panel[K * 16], row[K];
	_Alignas(64) float block[CPU_BLOCK * CPU_UNIT];
	float one[CPU_UNIT], many[16][CPU_UNIT];
	uint32_t v = 5;

	(void)state;
	for (size_t i = 0; i < TEST_NR(words); i++)
		words[i] = (uint16_t)((v = v * 1664525u + 1013904223u) >> 16);
	w.trellis = words;
	for (size_t i = 0; i < TEST_NR(all); i++) {
		const struct cpu_isa *isa = all[i];

		for (unsigned rows = 1; isa->available() && rows <= isa->panel; rows++) {
			for (size_t j = 0; j < (size_t)K * rows; j++)
				panel[j] = (float)(int)((v = v * 1664525u + 1013904223u) >> 16) /
						   65536 -
					   0.5f;
			for (uint32_t k = 0; k < K; k += CPU_BLOCK) {
				isa->decode(&w, k, 2, block);
				isa->multiply(rows, panel + (size_t)k * rows, block, many[0],
					      CPU_UNIT, k == 0);
			}
			for (unsigned r = 0; r < rows; r++) {
				for (int k = 0; k < K; k++)
					row[k] = panel[(unsigned)k * rows + r];
				isa->gemv(&w, 2, row, one);
				assert_memory_equal(one, many[r], sizeof(one));
			}
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(all_rates),
		test_case(all_windows),
		test_case(panels),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
