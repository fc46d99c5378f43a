/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_cfg.cuh - shapes of the few-row kernels, their shared memory, and whose work a position is; see gemv.cuh. */
#ifndef EXL3_CUDA_GEMV_CFG_CUH
#define EXL3_CUDA_GEMV_CFG_CUH

#include "kernels/cuda/gemv_image.cuh"
#include "kernels/cuda/trellis.cuh"

namespace exl3
{

template <int RATE2_, int CB_, gemv_form FORM_, int MG_, int NT_, int K_TILES_, int WARPS_,
	  int STAGES_, int HX_, bool FUSED_>
struct gemv_cfg {
	static constexpr int RATE2 = RATE2_, CB = CB_, MG = MG_, NT = NT_, WARPS = WARPS_;
	static constexpr int K_TILES = K_TILES_; /* of a position */
	static constexpr int STAGES = STAGES_, HX = HX_;
	static constexpr gemv_form FORM = FORM_;
	static constexpr bool FUSED = FUSED_; /* where the image of x lives */
	static constexpr bool SUMS = FORM == FORM_PACKED && CB == CB_MUL1;
	static constexpr int HALVES = 8 / NT;     /* parts of a strip's columns */
	static constexpr int KG = WARPS / HALVES; /* positions in work at a time */
	static constexpr int TOKENS = FORM == FORM_BYTES ? 4 * MG : 8 * MG;
	static constexpr int ROW_ITEM = NT * 16 * RATE2; /* bytes of weights of a k-tile */
	static constexpr int ITEM = K_TILES * ROW_ITEM;  /* of a warp's step */
	static constexpr int STAGE = ITEM + (FUSED ? 0 : K_TILES * 32 * TOKENS); /* of one warp */
	static constexpr int BLOCK = 8 / K_TILES; /* positions in 128 rows */
	static constexpr int ROW =
		NT * 16 + 4; /* floats: a warp's four quarters in different banks */
	static constexpr int RED = TOKENS < 16 ? TOKENS : 16; /* tokens reduced at a time */

	static_assert(8 % NT == 0 && WARPS % HALVES == 0, "warps tile a strip");
	static_assert(ROW_ITEM % 16 == 0, "copies of 16 bytes");
	static_assert(FORM != FORM_DUP || MG == 1, "dup is for one group of columns");
	static_assert(FORM != FORM_BYTES || CB == CB_MUL1, "bytes are a mul1 form");
	static_assert(FORM != FORM_DUP || CB != CB_MUL1, "dup needs halves");
};

/* What the host needs to know of a shape, and the device's layout follows from: one truth for both. */
struct gemv_shape {
	uint8_t warps, parts, tokens, red; /* parts: sums of a block that are added */
	uint32_t ring; /* bytes: all warps' stages */
	uint16_t row;
};

template <class C> static constexpr EXL3_HD gemv_shape gemv_shape_of()
{
	return {C::WARPS, C::WARPS, C::TOKENS, C::RED, C::WARPS *C::STAGES *C::STAGE, C::ROW};
}

/* Shared memory of a block, in bytes. */
struct gemv_layout {
	uint32_t red, image, peak, total; /* the ring lies before red */
};

static EXL3_HD gemv_layout gemv_shared(const gemv_shape &s, uint32_t m, uint32_t image_blocks)
{
	gemv_layout l;

	l.red = s.ring;
	l.image = l.red + s.parts * (m < s.red ? m : s.red) * s.row * 4;
	l.peak = l.image + image_blocks * 8 * m * 32;
	l.total = l.peak + 4 * 8;
	return l;
}

#ifdef __CUDACC__

/* First position of block @c: floor(c * positions / blocks), so multiples of whole strips stay exact. */
EXL3_DEV uint32_t gemv_begin(const gemv_args &a, uint32_t c)
{
	return c * a.share + (a.rest ? __umulhi(c * a.rest, a.blocks_inverse) : 0);
}

/* The strip of a position. */
EXL3_DEV uint32_t gemv_strip_of(const gemv_args &a, uint32_t position)
{
	const uint32_t s = __umulhi(position, a.kt_inverse); /* at most one too high */

	return s * a.kt > position ? s - 1 : s;
}

EXL3_DEV int gemv_shard_of(const gemv_args &a, uint32_t strip)
{
	int s = 0;

#pragma unroll 1
	for (uint32_t i = 1; i < a.nr_shards; i++)
		if (strip >= a.shard[i].strip)
			s = (int)i;
	return s;
}

#endif /* __CUDACC__ */
} /* namespace exl3 */
#endif
