/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trellis.cuh - from the bits of a 16x16 tile to tensor-core operands; host and device.
 *
 * Lane L = 4g + q of a warp decodes weights t = 8L..8L+7 of a tile (format.h): they are its A fragment
 * of the transposed product Y^T = W^T X^T, rows = output columns. With i = t & 7:
 *
 *       n = g + 8 * (i >> 2)        k = 2q + (i & 1) + 8 * (i >> 1 & 1)
 *
 *   packed   mma.m16n8k16, wgmma A from registers: a0 = (i0,i1) a1 = (i4,i5) a2 = (i2,i3) a3 = (i6,i7)
 *   dup      one register per weight, two k slots with the activation twice, so that the tensor core
 *            adds the halves: {i0,i4,i1,i5} with B = (x[2q],x[2q]), (x[2q+1],x[2q+1]), then
 *            {i2,i6,i3,i7} with x[2q+8], x[2q+9]
 *   bytes    (mul1) one register per weight, its four product bytes as u8 slots of mma.m16n8k32; same
 *            order as dup, B = the s8 activation four times
 *
 * The 8 windows of a lane lie in one run of bits that ends at ring bit 4 * rate2 * (L + 1). As one
 * little-endian integer V (v[0] its lowest word), window u of the run is bits [offset(u), +16). A
 * register of V at bit offset o gives the windows at o, o + 8 and o + 16 with one instruction each
 * (AND, PRMT, SHR; AND and SHR also as IDP.2A on the multiplier's pipe), so a greedy cover picks the
 * fewest funnel shifts. A window that straddles two words at byte 3 takes one PRMT too, which leaves it
 * in both halves of a register: w * 65537. The codebook's multiplier times the inverse of 65537 (mod 2^32)
 * undoes that for nothing. All of it is resolved at compile time.
 */
#ifndef EXL3_CUDA_TRELLIS_CUH
#define EXL3_CUDA_TRELLIS_CUH

#include "kernels/cuda/ptx.cuh"

namespace exl3
{

enum { CB_3INST = 0, CB_MCG = 1, CB_MUL1 = 2 };

/* mul1: weight = fma16(1024 + S, 0x1eee, 0xc931) = RNE16((1774 S - 905216) / 2^18). */
constexpr float MUL1_SCALE = 1774.0f / 262144.0f;
constexpr float MUL1_MEAN = (1774.0f * 510.0f - 905216.0f) / 262144.0f; /* the value of S = 510 */

template <int RATE2> struct run {
	static constexpr int WORDS = 4 * RATE2; /* u32 words of a tile */
	static constexpr int KA = RATE2 >> 1;

	/* Bit offset of window u from the low end of the run. */
	static constexpr __host__ __device__ int offset(int u)
	{
		return 4 * RATE2 - ((u + 1) * KA + (RATE2 & 1) * ((u + 1) >> 1));
	}

	static constexpr int BITS = 4 * RATE2 - KA + 16; /* of the run: offset(0) + 16 */
	static constexpr int NV = (BITS + 31) / 32;
	/* The run ends at a multiple of 4 * rate2 bits: the largest shift that aligns it. */
	static constexpr int STEP = RATE2 % 8 == 0   ? 32
				    : RATE2 % 4 == 0 ? 16
				    : RATE2 % 2 == 0 ? 8
						     : 4;
	static constexpr int SHIFT = 32 - STEP;
	static constexpr bool EXTRA = BITS + SHIFT > 32 * NV; /* one more word is touched */
};

/* Where each window is cut from. */
struct cover {
	int reg[8]; /* bit offset of the register */
	int pos[8]; /* 0, 1, 2: the window starts at byte 0, 1 or 2 of it; 3: byte 3, and the next word's byte 0 */
};

template <int RATE2> constexpr __host__ __device__ cover make_cover()
{
	cover c{};
	bool done[8] = {};

	for (int u = 0; u < 8; u++) {
		int o = run<RATE2>::offset(u), r = o % 32;

		if (r == 0 || r == 8 || r == 16 || (r == 24 && o / 32 + 1 < run<RATE2>::NV)) {
			c.reg[u] = o - r;
			c.pos[u] = r / 8;
			done[u] = true;
		}
	}
	for (int u = 7; u >= 0; u--) {
		int o = run<RATE2>::offset(u);

		if (done[u])
			continue;
		for (int v = u; v >= 0; v--) {
			int d = run<RATE2>::offset(v) - o;

			if (!done[v] && (d == 0 || d == 8 || d == 16)) {
				c.reg[v] = o;
				c.pos[v] = d / 8;
				done[v] = true;
			}
		}
	}
	return c;
}

/*
 * Loads a lane's run from a tile (shared or global memory, or the host's). The indices depend on the
 * lane alone, so the compiler keeps them outside of a loop over tiles.
 */
template <int RATE2>
static EXL3_HD void load_run(const uint32_t *tile, int lane, uint32_t (&v)[run<RATE2>::NV])
{
	using R = run<RATE2>;
	const int end = 4 * RATE2 * (lane + 1);
	const int i = (end - 1) >> 5;
	const int shift = 32 * (i + 1) - end;
	uint32_t w[R::NV + 1];

	if (RATE2 == 16) { /* 8 bits: words 2L, 2L + 1 with one load, and 2L - 1 */
#ifdef __CUDA_ARCH__
		uint2 two = *(const uint2 *)(tile + i - 1);

		w[0] = two.y;
		w[1] = two.x;
#else
		w[0] = tile[i];
		w[1] = tile[i - 1];
#endif
		w[2] = tile[(i - 2 + R::WORDS) % R::WORDS];
		w[3] = 0;
	} else {
#pragma unroll
		for (int j = 0; j <= R::NV; j++)
			w[j] = j < R::NV || R::EXTRA ? tile[(i - j + R::WORDS) % R::WORDS] : 0;
	}
#pragma unroll
	for (int j = 0; j < R::NV; j++)
		v[j] = R::SHIFT ? funnel(w[j], w[j + 1], shift) : w[j];
}

#ifdef __CUDACC__

/*
 * The same from shared memory, for loops over tiles: byte offsets of a lane's words in a tile are made
 * once, a tile's place is an address plus a constant.
 */
template <int RATE2> struct run_lane {
	uint32_t offset[run<RATE2>::NV + 1];
	int shift;

	EXL3_DEV_MEMBER run_lane(int lane)
	{
		using R = run<RATE2>;
		const int end = 4 * RATE2 * (lane + 1);
		const int i = (end - 1) >> 5;

		shift = 32 * (i + 1) - end;
#pragma unroll
		for (int j = 0; j <= R::NV; j++)
			offset[j] = (uint32_t)((i - j + R::WORDS) % R::WORDS) * 4, keep(offset[j]);
		keep(shift);
	}

	EXL3_DEV_MEMBER void load(const uint32_t (&addr)[run<RATE2>::NV + 1], int constant,
				  uint32_t (&v)[run<RATE2>::NV]) const
	{
		using R = run<RATE2>;
		uint32_t w[R::NV + 1];

		if (RATE2 == 16) { /* 8 bits: words 2L, 2L + 1 with one load, and 2L - 1 */
			const uint2 two = lds64(addr[1] + constant);

			w[0] = two.y;
			w[1] = two.x;
			w[2] = lds32(addr[2] + constant);
			w[3] = 0;
		} else {
#pragma unroll
			for (int j = 0; j <= R::NV; j++)
				w[j] = j < R::NV || R::EXTRA ? lds32(addr[j] + constant) : 0;
		}
#pragma unroll
		for (int j = 0; j < R::NV; j++)
			v[j] = R::SHIFT ? funnel(w[j], w[j + 1], shift) : w[j];
	}
};

#endif

/* Is window u left doubled, w * 65537? */
template <int RATE2, int U> static constexpr bool doubled = make_cover<RATE2>().pos[U] == 3;

constexpr uint32_t INVERSE_65537 = 0xffff0001u;
static_assert(65537u * INVERSE_65537 == 1u, "modulo 2^32");

/* Window u of a run. HX: share of the 16-bit extracts on the multiplier's pipe: 0 none, 1 half, 2 all. */
template <int RATE2, int U, int HX>
static EXL3_HD uint32_t window(const uint32_t (&v)[run<RATE2>::NV])
{
	constexpr int reg = make_cover<RATE2>().reg[U], pos = make_cover<RATE2>().pos[U];
	constexpr int word = reg / 32, shift = reg % 32;
	constexpr bool idp = HX == 2 || (HX == 1 && (U & 1));
	constexpr bool last = word + 1 >= run<RATE2>::NV;
	uint32_t s;

	if (pos == 3)
		return prmt(v[word], v[last ? word : word + 1], 0x4343);
	if (shift == 0)
		s = v[word];
	else
		s = last ? v[word] >> shift : funnel(v[word], v[last ? word : word + 1], shift);
	if (pos == 1)
		return prmt(s, 0, 0x4421);
	if (pos == 0)
		return idp ? dp2a(s, 0x1) : s & 0xffff;
	return idp ? dp2a(s, 0x100) : s >> 16;
}

/* The codebook's product of a window, plain or doubled. */
template <int CB, bool DOUBLED> static EXL3_HD uint32_t product(uint32_t w)
{
	constexpr uint32_t m = CB == CB_MUL1  ? EXL3_MUL_MUL1
			       : CB == CB_MCG ? EXL3_MUL_MCG
					      : EXL3_MUL_3INST;

	return w * (DOUBLED ? m * INVERSE_65537 : m) + (CB == CB_3INST ? EXL3_ADD_3INST : 0);
}

/* 1024 + S as fp16 in the low half (mul1). */
static EXL3_HD uint32_t bytesum(uint32_t x)
{
	return dp4a(x, 0x01010101u, 0x6400u);
}

/*
 * (a.lo + a.hi, b.lo + b.hi), each rounded once. Two HADD2 with half selects and one PRMT measured
 * faster than two PRMT and one HADD2.
 */
static EXL3_HD uint32_t add_halves(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
	uint32_t d;

	asm("{.reg .f16 l, h, s, t;\n"
	    "mov.b32 {l, h}, %1; add.rn.f16 s, l, h;\n"
	    "mov.b32 {l, h}, %2; add.rn.f16 t, l, h;\n"
	    "mov.b32 %0, {s, t};}"
	    : "=r"(d)
	    : "r"(a), "r"(b));
	return d;
#else
	uint32_t d = exl3_f64_to_f16((double)exl3_f16_to_f32((uint16_t)a) +
				     (double)exl3_f16_to_f32((uint16_t)(a >> 16)));

	return d | (uint32_t)exl3_f64_to_f16((double)exl3_f16_to_f32((uint16_t)b) +
					     (double)exl3_f16_to_f32((uint16_t)(b >> 16)))
			   << 16;
#endif
}

/* Both fp16 lanes: a * b + c, rounded once. */
static EXL3_HD uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c)
{
#ifdef __CUDA_ARCH__
	uint32_t d;

	asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
	return d;
#else
	uint32_t d = 0;

	for (int i = 0; i < 32; i += 16)
		d |= (uint32_t)exl3_f64_to_f16((double)exl3_f16_to_f32((uint16_t)(a >> i)) *
						       (double)exl3_f16_to_f32((uint16_t)(b >> i)) +
					       (double)exl3_f16_to_f32((uint16_t)(c >> i)))
		     << i;
	return d;
#endif
}

/* Two weights as fp16 from their products, exactly as the format defines them: the first in the low half. */
template <int CB> static EXL3_HD uint32_t pair_of_products(uint32_t x0, uint32_t x1)
{
	if (CB == CB_MUL1)
		return fma_f16x2(prmt(bytesum(x0), bytesum(x1), 0x5410), 0x1eee1eeeu, 0xc931c931u);
	return add_halves(code_halves(x0), code_halves(x1));
}

/* bytes: raw products in t order. */
template <int RATE2, int CB, int HX>
static EXL3_HD void decode_products(const uint32_t (&v)[run<RATE2>::NV], uint32_t (&r)[8])
{
	r[0] = product<CB, doubled<RATE2, 0>>(window<RATE2, 0, HX>(v));
	r[1] = product<CB, doubled<RATE2, 1>>(window<RATE2, 1, HX>(v));
	r[2] = product<CB, doubled<RATE2, 2>>(window<RATE2, 2, HX>(v));
	r[3] = product<CB, doubled<RATE2, 3>>(window<RATE2, 3, HX>(v));
	r[4] = product<CB, doubled<RATE2, 4>>(window<RATE2, 4, HX>(v));
	r[5] = product<CB, doubled<RATE2, 5>>(window<RATE2, 5, HX>(v));
	r[6] = product<CB, doubled<RATE2, 6>>(window<RATE2, 6, HX>(v));
	r[7] = product<CB, doubled<RATE2, 7>>(window<RATE2, 7, HX>(v));
}

/* dup: two fp16 halves per register whose sum is the weight, in t order (3inst, mcg only). */
template <int RATE2, int CB, int HX>
static EXL3_HD void decode_dup(const uint32_t (&v)[run<RATE2>::NV], uint32_t (&r)[8])
{
	static_assert(CB != CB_MUL1, "mul1 has no two-halves form");
	decode_products<RATE2, CB, HX>(v, r);
#pragma unroll
	for (int i = 0; i < 8; i++)
		r[i] = code_halves(r[i]);
}

/* packed: the f16 A fragment of m16n8k16 and of a wgmma warp, bit-exact weights. */
template <int RATE2, int CB, int HX>
static EXL3_HD void decode_packed(const uint32_t (&v)[run<RATE2>::NV], uint32_t (&a)[4])
{
	uint32_t x[8];

	decode_products<RATE2, CB, HX>(v, x);
	a[0] = pair_of_products<CB>(x[0], x[1]);
	a[1] = pair_of_products<CB>(x[4], x[5]);
	a[2] = pair_of_products<CB>(x[2], x[3]);
	a[3] = pair_of_products<CB>(x[6], x[7]);
}

/* ---- for decoders that mix the steps themselves: plain windows, and what follows from one ---- */

template <int RATE2, int HX>
static EXL3_HD void windows(const uint32_t (&v)[run<RATE2>::NV], uint32_t (&w)[8])
{
	w[0] = window<RATE2, 0, HX>(v) & 0xffff;
	w[1] = window<RATE2, 1, HX>(v) & 0xffff;
	w[2] = window<RATE2, 2, HX>(v) & 0xffff;
	w[3] = window<RATE2, 3, HX>(v) & 0xffff;
	w[4] = window<RATE2, 4, HX>(v) & 0xffff;
	w[5] = window<RATE2, 5, HX>(v) & 0xffff;
	w[6] = window<RATE2, 6, HX>(v) & 0xffff;
	w[7] = window<RATE2, 7, HX>(v) & 0xffff;
}

template <int CB> static EXL3_HD uint32_t halves(uint32_t w)
{
	return code_halves(product<CB, false>(w));
}

template <int CB> static EXL3_HD uint32_t pair(uint32_t w0, uint32_t w1)
{
	return pair_of_products<CB>(product<CB, false>(w0), product<CB, false>(w1));
}

} /* namespace exl3 */
#endif
