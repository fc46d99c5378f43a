/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_gemv.cc - the few-row kernel on emulated threads against a reference in double; needs no GPU.
 *
 * Small layers, few blocks: ranges that start and end inside strips, shards, both places of the image of
 * x, every operand form, padded sizes, and the hand-over between blocks.
 */
#include "tests/gpu/emulate.h"

#include "kernels/cuda/gemv_lean.cuh"
#include "kernels/cuda/gemv_wide.cuh"

#include <math.h>

using namespace exl3;

static uint64_t seed = 7;

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

static int bad;

template <class C, bool LEAN = false>
static void check(const char *name, uint32_t k, uint32_t k_log, std::vector<uint32_t> ns,
		  uint32_t m, unsigned blocks, bool weights_first = false)
{
	constexpr bool fused = C::FUSED, wide = C::FORM == FORM_WIDE;
	const uint32_t kt = k / 16, nr = (uint32_t)ns.size();
	std::vector<std::vector<uint32_t>> trellis(nr);
	std::vector<std::vector<uint16_t>> suh(nr), svh(nr);
	const uint32_t x_stride = (k_log + 7) & ~7u;
	std::vector<uint16_t> x((size_t)m * x_stride + 8);
	uint32_t n_all = 0, strips = 0;
	gemv_args a = {};

	for (uint16_t &v : x)
		v = exl3_f32_to_f16(uniform(-2, 2));
	for (uint32_t s = 0; s < nr; s++) {
		trellis[s].resize(exl3_trellis_bytes(k, ns[s], C::RATE2) / 4);
		for (uint32_t &v : trellis[s])
			v = rnd();
		for (uint32_t i = 0; i < k; i++)
			suh[s].push_back(
				exl3_f32_to_f16(uniform(0.5f, 1.5f) * (rnd() & 1 ? 1.0f : -1.0f)));
		for (uint32_t i = 0; i < ns[s]; i++)
			svh[s].push_back(exl3_f32_to_f16(uniform(0.5f, 1.5f)));
		a.shard[s] = gemv_shard{trellis[s].data(),
					(const __half *)suh[s].data(),
					(const __half *)svh[s].data(),
					NULL,
					strips,
					ns[s] / 16,
					ns[s] - 3,
					n_all - 3 * s,
					n_all};
		n_all += ns[s];
		strips += ns[s] / 128;
	}
	const uint32_t width = n_all - 3 * nr;
	std::vector<float> y((size_t)m * width, NAN);
	std::vector<uint32_t> slots((size_t)blocks * m * 128, 0),
		image((size_t)nr * kt * (wide ? C::TOKENS : m) * 8, 0xffffffff);

	a.r.x = (const char *)x.data();
	a.r.y = (char *)y.data();
	a.r.x_stride = x_stride * 2;
	a.r.y_stride = width * 4;
	a.r.k = k;
	a.r.k_log = k_log;
	a.r.x_dtype = EXL3_F16;
	a.r.y_dtype = EXL3_F32;
	a.nr_shards = (uint16_t)nr;
	a.m = m;
	a.kt = kt;
	a.image_n = wide ? C::TOKENS : 0;
	const uint32_t positions = strips * kt / C::K_TILES;
	a.share = positions / blocks;
	a.rest = positions % blocks;
	a.blocks_inverse = (uint32_t)((0x100000000ull + blocks - 1) / blocks);
	a.m_inverse = (uint32_t)((0x100000000ull + m - 1) / m);
	a.slots = slots.data();
	a.image = image.data();
	a.weights_first = weights_first;
	if (fused) {
		a.image_blocks = std::min(kt / 8, (positions + blocks - 1) / blocks * C::K_TILES / 8 + 2);
	} else {
		for (uint32_t s = 0; s < nr; s++)
			emu::launch(1, 128, [&] {
				gemv_transform(a, a.shard[s].suh, kt / 8,
					       a.image + (size_t)s * kt *
							       (wide ? C::TOKENS : m) * 8,
					       threadIdx.x >> 5, 4);
			});
	}
	a.kt /= C::K_TILES;
	a.kt_inverse = (uint32_t)((0x100000000ull + a.kt - 1) / a.kt);
	emu::launch(blocks, C::WARPS * 32, [&] {
		if constexpr (wide)
			wide_kernel<C>(a);
		else if constexpr (LEAN)
			lean_kernel<C>(a);
		else
			gemv_kernel<C>(a);
	});

	double sum = 0, err = 0;
	bool dirty = false;

	for (uint32_t t = 0; t < m; t++)
		for (uint32_t s = 0; s < nr; s++) {
			std::vector<double> v(k, 0.0), o(ns[s], 0.0);

			for (uint32_t i = 0; i < k_log; i++)
				v[i] = (double)exl3_f16_to_f32(x[(size_t)t * x_stride + i]) *
				       exl3_f16_to_f32(suh[s][i]);
			v = hadamard(v);
			for (uint32_t row = 0; row < k; row++)
				for (uint32_t col = 0; col < ns[s]; col++) {
					const uint32_t *tile =
						trellis[s].data() +
						((row / 16) * (ns[s] / 16) + col / 16) *
							exl3_tile_words32(C::RATE2);
					const uint32_t w =
						exl3_window(tile, C::RATE2,
							    exl3_tile_index(row % 16, col % 16));

					o[col] += v[row] * exl3_f16_to_f32(exl3_code_f16(w, C::CB));
				}
			o = hadamard(o);
			for (uint32_t c = 0; c < ns[s] - 3; c++) {
				const double want = o[c] * exl3_f16_to_f32(svh[s][c]);
				const double got = y[(size_t)t * width + a.shard[s].base_log + c];

				sum += want * want;
				err += (got - want) * (got - want);
			}
		}
	for (uint32_t w : slots)
		dirty |= w != 0;
	const double rel = sqrt(err / sum);

	printf("%-28s k %u (%u) shards %u n %u m %2u blocks %u %s: rms error %.1e%s\n", name, k,
	       k_log, nr, ns[0], m, blocks, fused ? "fused " : "shared", rel,
	       rel < 1e-3 && !dirty ? ""
	       : dirty              ? " FAILED (slots)"
				    : " FAILED");
	bad += !(rel < 1e-3) || dirty;
}

static void check_all(void)
{
	using dup = gemv_cfg<8, CB_MCG, FORM_DUP, 1, 4, 1, 8, 4, 1, true>;
	using dup_pairs = gemv_cfg<8, CB_MCG, FORM_DUP, 1, 8, 2, 4, 3, 1, true>;
	using dup_shared = gemv_cfg<8, CB_MCG, FORM_DUP, 1, 4, 2, 8, 4, 2, false>;
	using dup6 = gemv_cfg<12, CB_3INST, FORM_DUP, 1, 8, 1, 4, 3, 1, true>;
	using packed2 = gemv_cfg<8, CB_MCG, FORM_PACKED, 2, 4, 2, 8, 4, 1, true>;
	using packed4 = gemv_cfg<5, CB_MUL1, FORM_PACKED, 4, 4, 1, 8, 4, 0, true>;
	using packed4_shared = gemv_cfg<5, CB_MUL1, FORM_PACKED, 4, 4, 1, 8, 4, 0, false>;
	using dup8 = gemv_cfg<16, CB_MCG, FORM_DUP, 1, 4, 1, 4, 4, 1, true>;
	using dup8_shared = gemv_cfg<16, CB_MCG, FORM_DUP, 1, 4, 1, 4, 4, 1, false>;
	using bytes15 = gemv_cfg<3, CB_MUL1, FORM_BYTES, 1, 8, 1, 8, 4, 1, true>;
	using bytes = gemv_cfg<8, CB_MUL1, FORM_BYTES, 1, 4, 1, 8, 4, 0, true>;

	using wide16 = wide_cfg<8, CB_MCG, 16, 1, 1>;
	using wide32 = wide_cfg<5, CB_MUL1, 32, 2, 0>;
	using wide32_6 = wide_cfg<12, CB_3INST, 32, 4, 1>;

	check<wide16>("4 bits mcg, wide", 256, 256, {256}, 13, 1);
	check<wide16>("4 bits mcg, wide", 1152, 1148, {128, 256}, 9, 5);
	check<wide32>("2.5 bits mul1, wide", 384, 384, {256, 128}, 17, 4);
	check<wide32>("2.5 bits mul1, wide", 768, 768, {128}, 32, 2);
	check<wide32_6>("6 bits 3inst, wide", 640, 640, {384}, 31, 2);
	check<dup>("4 bits mcg, dup", 256, 256, {256}, 1, 1);
	check<dup>("4 bits mcg, dup", 256, 256, {256}, 1, 1, true);
	check<dup>("4 bits mcg, dup", 256, 250, {256}, 5, 3);
	check<dup>("4 bits mcg, dup", 384, 384, {256, 128}, 8, 4);
	check<dup>("4 bits mcg, dup", 1152, 1148, {128, 128}, 1, 1, true);
	check<dup_pairs>("4 bits mcg, dup, two k-tiles", 384, 381, {256, 128}, 3, 4);
	check<dup_pairs>("4 bits mcg, dup, two k-tiles", 1152, 1152, {128}, 1, 2);
	check<dup_shared>("4 bits mcg, dup", 384, 384, {256, 128}, 3, 2);
	check<dup6>("6 bits 3inst, dup, 8 tiles", 128, 128, {384}, 2, 3);
	check<dup6>("6 bits 3inst, dup, 8 tiles", 128, 128, {128, 128}, 7, 1);
	check<packed2>("4 bits mcg, packed", 256, 256, {128}, 13, 2, true);
	check<packed4_shared>("2.5 bits mul1, packed", 256, 256, {128}, 31, 2);
	check<packed4>("2.5 bits mul1, packed", 128, 128, {128}, 18, 1);
	using sums = gemv_cfg<8, CB_MUL1, FORM_PACKED, 1, 8, 2, 12, 3, 0, true>;

	check<sums>("4 bits mul1, sums", 384, 384, {256}, 7, 2);
	check<bytes>("4 bits mul1, bytes", 256, 200, {256}, 4, 3);
	check<bytes>("4 bits mul1, bytes", 256, 256, {128, 128}, 1, 2, true);
	check<dup8_shared>("8 bits mcg, dup", 512, 510, {256}, 5, 3);
	check<dup8>("8 bits mcg, dup", 512, 510, {256}, 3, 3);
	check<bytes15>("1.5 bits mul1, bytes", 384, 384, {256}, 4, 3);
	using bulk16 = wide_cfg<8, CB_MCG, 16, 2, 1, WIDE_BULK>;
	using bulk32 = wide_cfg<12, CB_MCG, 32, 2, 1, WIDE_BULK>;
	using fused16 = wide_cfg<8, CB_MCG, 16, 2, 1, WIDE_FUSED>;
	using fused32 = wide_cfg<8, CB_MUL1, 32, 2, 0, WIDE_FUSED>;

	check<bulk16>("4 bits mcg, wide, bulk", 256, 256, {256}, 13, 1);
	check<bulk16>("4 bits mcg, wide, bulk", 1152, 1148, {128, 256}, 9, 5);
	check<bulk16>("4 bits mcg, wide, bulk", 2048, 2048, {128}, 16, 1);
	check<bulk32>("6 bits mcg, wide, bulk", 1152, 1152, {256}, 31, 3);
	check<fused16>("4 bits mcg, wide, fused", 256, 256, {256}, 13, 1);
	check<fused16>("4 bits mcg, wide, fused", 1152, 1148, {384}, 9, 5);
	check<fused16>("4 bits mcg, wide, fused", 1152, 1152, {256}, 16, 3);
	check<fused32>("4 bits mul1, wide, fused", 768, 760, {256}, 32, 3);
	check<fused32>("4 bits mul1, wide, fused", 1024, 1024, {128}, 17, 2);

	using lean = gemv_cfg<8, CB_MCG, FORM_DUP, 1, 8, 2, 12, 3, 2, true>;
	using lean_shared = gemv_cfg<8, CB_MCG, FORM_DUP, 1, 8, 2, 12, 2, 2, false>;
	using lean_small = gemv_cfg<8, CB_MCG, FORM_DUP, 1, 8, 2, 4, 3, 2, true>;
	using lean_bytes = gemv_cfg<8, CB_MUL1, FORM_BYTES, 1, 8, 2, 12, 3, 1, true>;

	/* At least two steps per warp: blocks <= strips * k / (16 * 2) / (2 * 12), or 2 * 4. */
	check<lean, true>("4 bits mcg, lean", 1152, 1148, {256}, 1, 3);
	check<lean, true>("4 bits mcg, lean", 1152, 1152, {256}, 5, 2);
	check<lean, true>("4 bits mcg, lean", 768, 768, {128}, 8, 1);
	check<lean_small, true>("4 bits mcg, lean, 4 warps", 512, 512, {384}, 2, 6);
	check<lean_small, true>("4 bits mcg, lean, 4 warps", 1536, 1530, {128}, 1, 6);
	check<lean_small, true>("4 bits mcg, lean, 4 warps", 1152, 1152, {256}, 8, 5);
	check<lean_shared, true>("4 bits mcg, lean", 1152, 1148, {256}, 8, 3);
	check<lean_shared, true>("4 bits mcg, lean", 1536, 1536, {128}, 3, 2);
	check<lean_bytes, true>("4 bits mul1, lean, bytes", 1152, 1150, {256}, 3, 3);
}

/* Copies arrive as late as they may, then as early: a place that is filled again too soon shows only then. */
int main(void)
{
	for (bool eager : {false, true}) {
		emu::eager = eager;
		check_all();
	}
	printf("host_gemv: %d failed\n", bad);
	return bad != 0;
}
