/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv_inst.cuh - the list of compiled shapes of gemv.cuh; inst/gemv_r*.cu instantiate it per bitrate.
 */
#ifndef EXL3_CUDA_GEMV_INST_CUH
#define EXL3_CUDA_GEMV_INST_CUH

#include "kernels/cuda/gemv_lean.cuh"
#include "kernels/cuda/gemv_wide.cuh"

namespace exl3
{

/*
 * The last four by name only, until a GPU has compared them: two k-tiles per step, the same with gemv_lean.cuh, and the
 * two other places of B for wgmma.
 */
enum gemv_variant {
	VARIANT_AUTO = -1,
	VARIANT_W12,
	VARIANT_W16,
	VARIANT_WIDE,
	VARIANT_PAIRS,
	VARIANT_LEAN,
	VARIANT_WIDE_BULK,
	VARIANT_WIDE_FUSED,
};

struct gemv_instance {
	void (*kernel)(const gemv_args); /* NULL ends a list */
	uint8_t rate2, codebook, form;
	uint8_t variant, kg, k_tiles;
	bool fused;
	gemv_shape shape;
};

template <class C> static constexpr gemv_instance gemv_entry(int variant)
{
	return {gemv_kernel<C>,   C::RATE2,  C::CB, C::FORM,
		(uint8_t)variant, C::KG,  C::K_TILES, C::FUSED,
		gemv_shape_of<C>()};
}

template <class C> static constexpr gemv_instance lean_entry(int variant)
{
	return {lean_kernel<C>,   C::RATE2, C::CB,      C::FORM,
		(uint8_t)variant, C::KG,    C::K_TILES, C::FUSED,
		gemv_shape_of<C>()};
}

template <class C> static constexpr gemv_instance wide_entry(int variant)
{
	return {wide_kernel<C>, C::RATE2, C::CB,    C::FORM,
		(uint8_t)variant, C::KG,  C::K_TILES, C::FUSED, wide_shape_of<C>()};
}

/*
 * Tiles and warps that were best on an H200. HX, the share of window cuts on the multiplier's pipe: all
 * where nothing else loads that pipe, half for pairs of halves, none where mul1's byte sums do.
 */
#define GEMV_W12 8, 1, 12, 3 /* tiles per warp, k-tiles, warps, stages */
#define GEMV_W16 8, 1, 16, 3
#define GEMV_W8  8, 1, 8, 4  /* registers for four groups of columns */

#define GEMV_ONE_(R, CB, V, FORM, MG, NT, KT, W, S, HX, FUSED) \
	gemv_entry<gemv_cfg<R, CB, FORM, MG, NT, KT, W, S, HX, FUSED>>(V)
#define GEMV_ONE(...) GEMV_ONE_(__VA_ARGS__)
#define GEMV_WIDE(R, CB, HX)                                \
	wide_entry<wide_cfg<R, CB, 16, 2, HX>>(VARIANT_WIDE),  \
		wide_entry<wide_cfg<R, CB, 32, 2, HX>>(VARIANT_WIDE)

#define GEMV_HALVES(R, CB)                                                   \
	GEMV_ONE(R, CB, VARIANT_W12, FORM_DUP, 1, GEMV_W12, 2, true),        \
		GEMV_ONE(R, CB, VARIANT_W12, FORM_DUP, 1, GEMV_W12, 2, false),    \
		GEMV_ONE(R, CB, VARIANT_W16, FORM_DUP, 1, GEMV_W16, 2, true),     \
		GEMV_ONE(R, CB, VARIANT_W16, FORM_DUP, 1, GEMV_W16, 2, false),    \
		GEMV_ONE(R, CB, VARIANT_W12, FORM_PACKED, 2, GEMV_W12, 1, false), \
		GEMV_ONE(R, CB, VARIANT_W12, FORM_PACKED, 4, GEMV_W8, 1, false),  \
		GEMV_WIDE(R, CB, 1)
#define GEMV_MUL1(R)                                                                   \
	GEMV_ONE(R, CB_MUL1, VARIANT_W12, FORM_BYTES, 1, GEMV_W12, 1, true),           \
		GEMV_ONE(R, CB_MUL1, VARIANT_W16, FORM_BYTES, 1, GEMV_W16, 1, true),   \
		GEMV_ONE(R, CB_MUL1, VARIANT_W12, FORM_PACKED, 1, GEMV_W12, 0, true),  \
		GEMV_ONE(R, CB_MUL1, VARIANT_W12, FORM_PACKED, 1, GEMV_W12, 0, false), \
		GEMV_ONE(R, CB_MUL1, VARIANT_W16, FORM_PACKED, 1, GEMV_W16, 0, false), \
		GEMV_ONE(R, CB_MUL1, VARIANT_W12, FORM_PACKED, 2, GEMV_W12, 0, false), \
		GEMV_ONE(R, CB_MUL1, VARIANT_W12, FORM_PACKED, 4, GEMV_W8, 0, false),  \
		GEMV_WIDE(R, CB_MUL1, 0)

#define GEMV_PAIRS_FUSED  8, 2, 12, 3
#define GEMV_PAIRS_SHARED 8, 2, 12, 2
#define GEMV_LEAN_(R, CB, FORM, MG, NT, KT, W, S, HX, FUSED) \
	lean_entry<gemv_cfg<R, CB, FORM, MG, NT, KT, W, S, HX, FUSED>>(VARIANT_LEAN)
#define GEMV_LEAN(...) GEMV_LEAN_(__VA_ARGS__)
#define GEMV_CANDIDATES(R)                                                                 \
	GEMV_ONE(R, CB_MCG, VARIANT_PAIRS, FORM_DUP, 1, GEMV_PAIRS_FUSED, 2, true),        \
		GEMV_ONE(R, CB_MCG, VARIANT_PAIRS, FORM_DUP, 1, GEMV_PAIRS_SHARED, 2, false), \
		GEMV_ONE(R, CB_MUL1, VARIANT_PAIRS, FORM_BYTES, 1, GEMV_PAIRS_FUSED, 1, true), \
		GEMV_LEAN(R, CB_MCG, FORM_DUP, 1, GEMV_PAIRS_FUSED, 2, true),              \
		GEMV_LEAN(R, CB_MCG, FORM_DUP, 1, GEMV_PAIRS_SHARED, 2, false),            \
		GEMV_LEAN(R, CB_MUL1, FORM_BYTES, 1, GEMV_PAIRS_FUSED, 1, true),           \
		wide_entry<wide_cfg<R, CB_MCG, 16, 2, 1, WIDE_BULK>>(VARIANT_WIDE_BULK),   \
		wide_entry<wide_cfg<R, CB_MCG, 32, 2, 1, WIDE_BULK>>(VARIANT_WIDE_BULK),   \
		wide_entry<wide_cfg<R, CB_MCG, 16, 2, 1, WIDE_FUSED>>(VARIANT_WIDE_FUSED), \
		wide_entry<wide_cfg<R, CB_MCG, 32, 2, 1, WIDE_FUSED>>(VARIANT_WIDE_FUSED)
#define EXL3_GEMV_CANDIDATES(R)                                                        \
	namespace exl3                                                                 \
	{                                                                              \
	extern const gemv_instance gemv_candidate_##R[] = {GEMV_CANDIDATES(R), {}};    \
	}

#define EXL3_GEMV_WHOLE(R)                             \
	namespace exl3                                 \
	{                                              \
	extern const gemv_instance gemv_rate_##R[] = { \
		GEMV_HALVES(R, CB_3INST),              \
		GEMV_HALVES(R, CB_MCG),                \
		GEMV_MUL1(R),                          \
		{}};                                   \
	}
#define EXL3_GEMV_HALF(R)                                                    \
	namespace exl3                                                       \
	{                                                                    \
	extern const gemv_instance gemv_rate_##R[] = {GEMV_MUL1(R), {}};     \
	}

} /* namespace exl3 */
#endif
