/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_moe.cc - the products that only variants of the routed block take, on emulated threads; needs no GPU.
 *
 * The chain of moe.cu (sort, input, gate and up, level, down; the last sum by the test) with a few small experts of very
 * different numbers of rows, against a reference in double: units that end anywhere, a lone last strip, more tasks than
 * blocks, holes, values that need a power of two.
 */
#include "kernels/cuda/moe_int.h" /* before gridDim is a macro: it launches */
#include "tests/gpu/emulate_many.h"

#include <math.h>

/* Blocks run one after another, so a block's variables may be the program's. */
#undef __shared__
#define __shared__ static
#include "kernels/cuda/moe_few.cuh"
#include "kernels/cuda/moe_input.cuh"
#undef __shared__
#define __shared__

#define moe_smem_team gemv_smem
#define moe_smem_tall gemv_smem
#define moe_smem_early gemv_smem
#include "kernels/cuda/moe_early.cuh"
#include "kernels/cuda/moe_tall.cuh"
#include "kernels/cuda/moe_team.cuh"

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

static std::vector<double> hadamard(std::vector<double> v)
{
	for (size_t base = 0; base < v.size(); base += 128)
		for (size_t s = 1; s < 128; s *= 2)
			for (size_t i = 0; i < 128; i++)
				if (!(i & s)) {
					const double x = v[base + i], y = v[base + i + s];

					v[base + i] = x + y;
					v[base + i + s] = x - y;
				}
	for (double &x : v)
		x *= EXL3_INV_SQRT128;
	return v;
}

struct matrix {
	std::vector<uint32_t> trellis;
	std::vector<uint16_t> suh, svh;
	std::vector<float> bias, w; /* w: decoded, [k][n] */
	exl3_matrix m;
	uint32_t spare[4]; /* so that alignment by luck is not by design */

	void make(uint32_t k, uint32_t n, uint32_t n_log, int rate2, int cb)
	{
		trellis.resize(exl3_trellis_bytes(k, n, rate2) / 4 + 8);
		for (uint32_t &v : trellis)
			v = rnd();
		for (uint32_t i = 0; i < k + 16; i++)
			suh.push_back(exl3_f32_to_f16(uniform(0.5f, 1.0f) * (rnd() & 1 ? 1.0f : -1.0f) / sqrtf((float)k)));
		for (uint32_t i = 0; i < n + 16; i++) {
			svh.push_back(exl3_f32_to_f16(uniform(0.5f, 1.0f)));
			bias.push_back(uniform(-0.25f, 0.25f));
		}
		m = {};
		m.k = m.k_log = k;
		m.n = n;
		m.n_log = n_log;
		m.rate2 = (uint8_t)rate2;
		m.codebook = (uint8_t)cb;
		m.trellis = trellis.data();
		m.suh = suh.data();
		m.svh = svh.data();
		m.bias = bias.data();
		w.resize((size_t)k * n);
		for (uint32_t row = 0; row < k; row++)
			for (uint32_t col = 0; col < n; col++) {
				const uint32_t *tile =
					trellis.data() + ((row / 16) * (n / 16) + col / 16) * exl3_tile_words32(rate2);

				w[(size_t)row * n + col] = exl3_f16_to_f32(exl3_code_f16(
					exl3_window(tile, rate2, exl3_tile_index(row % 16, col % 16)), cb));
			}
	}

	std::vector<double> run(std::vector<double> x) const
	{
		std::vector<double> o(m.n, 0.0);

		for (uint32_t i = 0; i < m.k; i++)
			x[i] *= exl3_f16_to_f32(suh[i]);
		x = hadamard(x);
		for (uint32_t i = 0; i < m.k; i++)
			for (uint32_t c = 0; c < m.n; c++)
				o[c] += x[i] * w[(size_t)i * m.n + c];
		o = hadamard(o);
		for (uint32_t c = 0; c < m.n; c++)
			o[c] = o[c] * exl3_f16_to_f32(svh[c]) + bias[c];
		return o;
	}
};

/* 16-byte aligned memory that says where it was not written: NaN. */
static std::vector<void *> garbage;

template <class T> static T *alloc(size_t n)
{
	void *p = aligned_alloc(256, (n * sizeof(T) + 511) / 256 * 256);

	memset(p, 0xff, n * sizeof(T));
	garbage.push_back(p);
	return (T *)p;
}

static int bad;

enum { TEAM, TALL, TURNS, EARLY };
static const char *const names[] = {"team", "tall", "turns", "early"};

/* @counts: rows of each expert; @loud: one token's values are too large for f16. */
template <int RATE2, int CB, int TILE>
static void check(int form, uint32_t hidden, uint32_t inter, uint32_t inter_log, std::vector<uint32_t> counts, unsigned blocks,
		  bool loud = false)
{
	constexpr bool few = TILE <= 16;
	using team_gu = team_cfg<RATE2, CB, (TILE > 64 ? 64 : TILE), true>;
	using team_down = team_cfg<RATE2, CB, (TILE > 64 ? 64 : TILE), false>;
	using tall_gu = tall_cfg<RATE2, CB, true>;
	using tall_down = tall_cfg<RATE2, CB, false>;
	using turns_gu = tall_cfg<RATE2, CB, true, true>;
	using turns_down = tall_cfg<RATE2, CB, false, true>;
	const uint32_t experts = (uint32_t)counts.size(), out = hidden;
	std::vector<matrix> mats(experts * 3);
	std::vector<exl3_matrix> table;
	std::vector<uint32_t> order;
	std::vector<int32_t> ids;

	for (uint32_t e = 0; e < experts; e++) {
		mats[e * 3].make(hidden, inter, inter_log, RATE2, CB);
		mats[e * 3 + 1].make(hidden, inter, inter_log, RATE2, CB);
		mats[e * 3 + 2].make(inter, out, out, RATE2, CB);
		order.push_back(e | (e ? 255u : 0u) << 24);
		for (uint32_t i = 0; i < counts[e]; i++)
			ids.push_back((int32_t)e);
	}
	for (const matrix &m : mats)
		table.push_back(m.m);
	for (size_t i = ids.size(); i-- > 1;)
		std::swap(ids[i], ids[rnd() % (i + 1)]);
	ids.push_back(-1); /* a hole, and an even number of pairs */
	if (ids.size() & 1)
		ids.push_back(1000000);
	const uint32_t topk = 2, pairs = (uint32_t)ids.size(), tokens = pairs / topk;
	const uint32_t image_rows = pairs + 7 * experts, units_max = experts + pairs / TILE;
	uint16_t *x = alloc<uint16_t>((size_t)tokens * (hidden + 8));
	float *y = alloc<float>((size_t)tokens * out), *weights = alloc<float>(pairs);
	unsigned long long skipped = 0;

	for (uint32_t t = 0; t < tokens; t++)
		for (uint32_t i = 0; i < hidden; i++)
			x[(size_t)t * (hidden + 8) + i] = exl3_f32_to_f16(uniform(-1, 1) * (loud && t == 1 ? 60000.0f : 1.0f));
	for (uint32_t i = 0; i < pairs; i++)
		weights[i] = uniform(0.1f, 1.0f);

	moe_entries en = {};
	en.nr = 1;
	en.e[0].x = x;
	en.e[0].y = y;
	en.e[0].ids = ids.data();
	en.e[0].weights = weights;
	en.e[0].skipped = &skipped;
	en.e[0].x_stride = (hidden + 8) * 2;
	en.e[0].y_stride = out * 4;
	en.e[0].m = tokens;
	en.e[0].topk = topk;
	en.e[0].x_dtype = EXL3_F16;
	en.e[0].y_dtype = en.e[0].weights_dtype = EXL3_F32;
	en.e[0].ids_dtype = EXL3_I32;

	moe_route r = {};
	r.mats = table.data();
	r.order = order.data();
	r.lists = 1;
	r.nr_experts = experts;
	r.nr_classes[0] = r.nr_classes[1] = 1;
	r.nr_pairs = pairs;
	r.tile = TILE;
	r.units_max = units_max;
	r.count = alloc<uint32_t>(experts);
	r.offset = alloc<uint32_t>(2 * experts);
	r.expert = alloc<uint32_t>(pairs);
	r.rank = alloc<uint32_t>(pairs);
	r.weight = alloc<float>(pairs);
	r.units = alloc<moe_unit>(units_max);
	r.class_units = alloc<uint32_t>(CLASSES_MAX + 1);

	float *scale = alloc<float>(2 * pairs), *scale_down = alloc<float>(pairs);
	float *block_scale = alloc<float>((size_t)pairs * (inter / 128));
	const size_t image_bytes = (size_t)image_rows * hidden * 2;
	char *image = alloc<char>(2 * image_bytes), *middle = alloc<char>((size_t)image_rows * inter * 2);
	float *down = alloc<float>((size_t)pairs * out);

	moe_few_pair *records = alloc<moe_few_pair>(pairs);
	if (few)
		emu::launch(1, 128, [&] { align_few_kernel(en, r, 0, records); });
	else
		emu::launch(1, 256, [&] { align_kernel(en, r); });
	moe_many_args a = {};
	moe_gemm_args &g = a.g;
	g.mats = table.data();
	g.units = r.units;
	g.class_units = r.class_units;
	g.image = image;
	g.image_bytes = image_bytes;
	g.row_scale = scale;
	g.image_rows = pairs;
	g.k = hidden;
	g.n = inter;
	g.n_log = inter_log;
	g.nr_proj = 2;
	g.tile = TILE;
	g.act = EXL3_ACT_SILU;
	g.next_image = middle;
	g.next_scale = block_scale;
	g.next_top = (uint32_t *)scale_down;
	a.scratch = alloc<float>((size_t)blocks * TALL_ROWS * 128);
	moe_early_args early = {};
	if constexpr (few) {
		for (uint32_t proj = 0; proj < 2; proj++)
			emu::launch(pairs, ROW_THREADS, [&] {
				emu::block_index.y = proj;
				input_few_kernel<2>(en, r, records, hidden, hidden, pairs, image, image_bytes, scale,
						    scale_down);
			});
		g.slots = alloc<uint32_t>(EXL3_CUDA_WS_ZERO / 4);
		memset(g.slots, 0, EXL3_CUDA_WS_ZERO);
		early.g = g;
		emu::launch(blocks, 256, [&] { moe_early_kernel<early_cfg<RATE2, CB, TILE / 8, 2, true>>(early); });
	} else {
		emu::launch((pairs + 7) / 8, ROW_THREADS, [&] {
			input_tiles_kernel<2>(en, r, 0, hidden, hidden, pairs, image, image_bytes, scale, scale_down);
		});
		if (form == TEAM)
			emu::launch(blocks, team_gu::THREADS, [&] { moe_team_kernel<team_gu>(a); });
		else if (form == TALL)
			emu::launch(blocks, tall_gu::THREADS, [&] { moe_tall_kernel<tall_gu>(a); });
		else
			emu::launch(blocks, turns_gu::THREADS, [&] { moe_tall_kernel<turns_gu>(a); });
		emu::launch((pairs + 7) / 8, ROW_THREADS, [&] { level_kernel(r, inter, middle, block_scale, scale_down); });
	}
	g.image = middle;
	g.row_scale = scale_down;
	g.out = down;
	g.k = inter;
	g.n = out;
	g.first_proj = 2;
	g.nr_proj = 1;
	if constexpr (few) {
		g.block_scale = block_scale;
		early.g = g;
		if (TILE == 8)
			emu::launch(blocks, 256, [&] { moe_early_kernel<early_cfg<RATE2, CB, 1, 4, false>>(early); });
		else
			emu::launch(blocks, 256, [&] { moe_early_kernel<early_cfg<RATE2, CB, 2, 2, false>>(early); });
		for (size_t i = 0; i < EXL3_CUDA_WS_ZERO / 4; i++)
			bad += g.slots[i] != 0;
	} else {
		if (form == TEAM)
			emu::launch(blocks, team_down::THREADS, [&] { moe_team_kernel<team_down>(a); });
		else if (form == TALL)
			emu::launch(blocks, tall_down::THREADS, [&] { moe_tall_kernel<tall_down>(a); });
		else
			emu::launch(blocks, turns_down::THREADS, [&] { moe_tall_kernel<turns_down>(a); });
	}
	/* combine is launched with a grid of two dimensions; here its sum, by the same rows. */
	double sum = 0, err = 0, worst = 0;

	for (uint32_t t = 0; t < tokens; t++) {
		std::vector<double> want(out, 0.0), got(out, 0.0);

		for (uint32_t s = 0; s < topk; s++) {
			const uint32_t p = t * topk + s;
			moe_row of;

			if (!row_of_pair(r, p, of))
				continue;
			std::vector<double> v(hidden), up, h(inter);

			for (uint32_t i = 0; i < hidden; i++)
				v[i] = exl3_f16_to_f32(x[(size_t)t * (hidden + 8) + i]);
			h = mats[of.expert * 3].run(v);
			up = mats[of.expert * 3 + 1].run(v);
			for (uint32_t i = 0; i < inter; i++)
				h[i] = i < inter_log ? h[i] / (1.0 + exp(-h[i])) * up[i] : 0.0;
			h = mats[of.expert * 3 + 2].run(h);
			for (uint32_t i = 0; i < out; i++) {
				want[i] += weights[p] * h[i];
				got[i] += weights[p] * (double)down[(size_t)of.row * out + i];
			}
		}
		/* Tokens count alike. */
		double size = 0, off = 0;

		for (uint32_t i = 0; i < out; i++) {
			size += want[i] * want[i];
			off += (got[i] - want[i]) * (got[i] - want[i]);
		}
		if (size > 0) {
			sum += 1;
			err += off / size;
			worst = off / size <= worst ? worst : off / size;
		}
	}
	const double rel = sqrt(err / sum);
	const bool wrong = !(rel < 1e-3) || !(sqrt(worst) < 3e-3) || skipped != (ids.back() == 1000000);

	printf("%s %d, rate2 %d codebook %d, hidden %u inter %u (%u), rows", names[form], TILE, RATE2, CB,
	       hidden, inter, inter_log);
	for (uint32_t c : counts)
		printf(" %u", c);
	printf(", %u blocks, %s copies%s: rms error %.1e, a token's largest %.1e%s\n", blocks, emu::eager ? "early" : "late",
	       loud ? ", loud" : "", rel, sqrt(worst), wrong ? " FAILED" : "");
	bad += wrong;
	for (void *p : garbage)
		free(p);
	garbage.clear();
}

int main(void)
{
	check<8, CB_MCG, 8>(EARLY, 384, 256, 250, {1, 0, 9, 3}, 5);
	check<8, CB_MUL1, 16>(EARLY, 256, 384, 384, {16, 2, 13}, 3);
	check<8, CB_MCG, 8>(EARLY, 256, 128, 128, {2, 5}, 2, true);
	check<8, CB_MCG, 32>(TEAM, 384, 256, 250, {5, 0, 23, 33}, 3);
	check<8, CB_MCG, 32>(TEAM, 256, 128, 128, {12, 20}, 2, true);
	check<8, CB_MCG, 256>(TALL, 256, 128, 128, {5, 60, 90, 0, 120}, 2);
	emu::eager = true;
	check<8, CB_MUL1, 64>(TEAM, 256, 128, 128, {9, 61, 70}, 2);
	check<8, CB_MCG, 64>(TEAM, 128, 128, 128, {1}, 5);
	check<8, CB_MUL1, 256>(TALL, 128, 256, 255, {290, 170}, 3);
	check<8, CB_MCG, 256>(TURNS, 256, 128, 128, {12, 40}, 2, true);
	printf("host_moe: %d failed\n", bad);
	return bad != 0;
}
