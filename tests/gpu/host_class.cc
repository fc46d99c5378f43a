/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_class.cc - a class of the few-row kernels: rows have the same bits alone, together, and beside NaN.
 *
 * What deterministic mode relies on (lower_class.cu): with instance, blocks and the image's kernel fixed, nothing of a
 * row depends on how many rows there are. On emulated threads; needs no GPU.
 */
#include "tests/gpu/emulate.h"

#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/gemv_wide.cuh"

#include <math.h>
#include <string.h>

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

struct layer {
	uint32_t k, n;
	std::vector<uint32_t> trellis;
	std::vector<uint16_t> suh, svh;
};

/* y [m][n] of @rows, through the image that a kernel before makes. */
template <class C> static std::vector<float> outputs(const layer &l, const std::vector<uint16_t> &rows, uint32_t m,
						 unsigned blocks)
{
	constexpr bool wide = C::FORM == FORM_WIDE;
	const uint32_t kt = l.k / 16, strips = l.n / 128, tokens = wide ? C::TOKENS : m;
	std::vector<float> y((size_t)m * l.n, NAN);
	std::vector<uint32_t> slots((size_t)blocks * m * 128, 0), image((size_t)kt * tokens * 8, 0xffffffff);
	gemv_args a = {};

	a.shard[0] = gemv_shard{l.trellis.data(), (const __half *)l.suh.data(), (const __half *)l.svh.data(), NULL, 0,
				l.n / 16, l.n, 0, 0};
	a.r.x = (const char *)rows.data();
	a.r.y = (char *)y.data();
	a.r.x_stride = l.k * 2;
	a.r.y_stride = l.n * 4;
	a.r.k = a.r.k_log = l.k;
	a.r.x_dtype = EXL3_F16;
	a.r.y_dtype = EXL3_F32;
	a.nr_shards = 1;
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
	emu::launch(1, 128, [&] { gemv_transform(a, a.shard[0].suh, kt / 8, a.image, threadIdx.x >> 5, 4); });
	a.kt /= C::K_TILES;
	a.kt_inverse = (uint32_t)((0x100000000ull + a.kt - 1) / a.kt);
	emu::launch(blocks, C::WARPS * 32, [&] {
		if constexpr (wide)
			wide_kernel<C>(a);
		else
			gemv_kernel<C>(a);
	});
	return y;
}

static int failed;

/* Rows first .. first + m - 1 by themselves against the same ones of @all. */
template <class C>
static void compare(const char *name, const layer &l, const std::vector<uint16_t> &x, const std::vector<float> &all,
		    uint32_t first, uint32_t m, unsigned blocks)
{
	const std::vector<uint16_t> part(x.begin() + (size_t)first * l.k, x.begin() + (size_t)(first + m) * l.k);
	const std::vector<float> y = outputs<C>(l, part, m, blocks);
	const bool same = !memcmp(y.data(), &all[(size_t)first * l.n], (size_t)m * l.n * sizeof(float));

	if (!same)
		printf("%s: k %u n %u blocks %u: rows %u to %u have other bits alone: FAILED\n", name, l.k, l.n, blocks,
		       first, first + m - 1);
	failed += !same;
}

template <class C> static void check(const char *name, uint32_t k, uint32_t n, unsigned blocks)
{
	const uint32_t most = C::TOKENS;
	layer l = {k, n, std::vector<uint32_t>(exl3_trellis_bytes(k, n, C::RATE2) / 4), {}, {}};
	std::vector<uint16_t> x((size_t)most * k);

	for (uint32_t &v : l.trellis)
		v = rnd();
	for (uint32_t i = 0; i < k; i++)
		l.suh.push_back(exl3_f32_to_f16(uniform(0.5f, 1.5f) * (rnd() & 1 ? 1.0f : -1.0f)));
	for (uint32_t i = 0; i < n; i++)
		l.svh.push_back(exl3_f32_to_f16(uniform(0.5f, 1.5f)));
	for (uint16_t &v : x)
		v = exl3_f32_to_f16(uniform(-2, 2));
	std::vector<float> all = outputs<C>(l, x, most, blocks);

	compare<C>(name, l, x, all, 0, 1, blocks);
	compare<C>(name, l, x, all, most - 1, 1, blocks);
	compare<C>(name, l, x, all, 3, 5, blocks);
	compare<C>(name, l, x, all, 2, most - 3, blocks);
	/* A neighbour's NaN changes nothing. */
	std::vector<uint16_t> spoiled = x;

	spoiled[(size_t)(most / 2) * k + 5] = 0x7e00;
	const std::vector<float> y = outputs<C>(l, spoiled, most, blocks);
	bool ok = isnan(y[(size_t)(most / 2) * n]);

	for (uint32_t r = 0; r < most; r++)
		ok &= r == most / 2 || !memcmp(&y[(size_t)r * n], &all[(size_t)r * n], n * sizeof(float));
	if (!ok)
		printf("%s: a row of NaN is seen by others: FAILED\n", name);
	failed += !ok;
}

int main(void)
{
	using wide16 = wide_cfg<8, CB_MCG, 16, 1, 1>;
	using wide32 = wide_cfg<5, CB_MUL1, 32, 2, 0>;
	using packed2 = gemv_cfg<8, CB_MCG, FORM_PACKED, 2, 4, 2, 8, 4, 1, false>;
	using packed4 = gemv_cfg<5, CB_MUL1, FORM_PACKED, 4, 4, 1, 8, 4, 0, false>;

	check<wide16>("16 rows, wgmma", 384, 256, 5);
	check<wide16>("16 rows, wgmma", 1152, 128, 2);
	check<wide32>("32 rows, wgmma", 384, 256, 4);
	check<packed2>("16 rows", 384, 256, 3);
	check<packed4>("32 rows", 256, 256, 3);
	printf("host_class: %d failed\n", failed);
	return failed != 0;
}
