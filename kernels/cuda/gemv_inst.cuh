/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv_inst.cuh - the list of compiled shapes of gemv.cuh; inst/gemv_r*.cu instantiate it per bitrate.
 */
#ifndef EXL3_CUDA_GEMV_INST_CUH
#define EXL3_CUDA_GEMV_INST_CUH

#include "kernels/cuda/gemv.cuh"

namespace exl3
{

struct gemv_instance {
	void (*kernel)(const gemv_args); /* NULL ends a list */
	uint8_t rate2, codebook, form;
	uint8_t variant, per_sm, kg;
	gemv_shape shape;
};

template <class C> static constexpr gemv_instance gemv_entry(int variant)
{
	return {gemv_kernel<C>,   C::RATE2,  C::CB, C::FORM,
		(uint8_t)variant, C::PER_SM, C::KG, gemv_shape_of<C>()};
}

/*
 * A variant: tiles per warp for 1, 2 and 4 groups of columns, warps per block, blocks per SM, and the
 * share of window cuts on the multiplier's pipe for halves and for mul1 (whose byte sums load that pipe).
 */
#define GEMV_VARIANT_0 8, 8, 4, 12, 1, 1, 0
#define GEMV_VARIANT_1 4, 4, 2, 16, 1, 2, 1

#define GEMV_DUP(R, CB, V, NT1, NT2, NT4, W, P, HXH, HXM) \
	gemv_entry<gemv_cfg<R, CB, FORM_DUP, 1, NT1, W, P, HXH>>(V)
#define GEMV_PACKED_2(R, CB, V, NT1, NT2, NT4, W, P, HXH, HXM) \
	gemv_entry<gemv_cfg<R, CB, FORM_PACKED, 2, NT2, W, P, CB == CB_MUL1 ? HXM : HXH>>(V)
#define GEMV_PACKED_4(R, CB, V, NT1, NT2, NT4, W, P, HXH, HXM) \
	gemv_entry<gemv_cfg<R, CB, FORM_PACKED, 4, NT4, W, P, CB == CB_MUL1 ? HXM : HXH>>(V)
#define GEMV_BYTES(R, V, NT1, NT2, NT4, W, P, HXH, HXM) \
	gemv_entry<gemv_cfg<R, CB_MUL1, FORM_BYTES, 1, NT1, W, P, HXM>>(V)
#define GEMV_PACKED_1(R, V, NT1, NT2, NT4, W, P, HXH, HXM) \
	gemv_entry<gemv_cfg<R, CB_MUL1, FORM_PACKED, 1, NT1, W, P, HXM>>(V)
#define GEMV_EXPAND(M, ...) M(__VA_ARGS__)

#define GEMV_HALVES(R, CB, V, ...)                                 \
	GEMV_EXPAND(GEMV_DUP, R, CB, V, __VA_ARGS__),              \
		GEMV_EXPAND(GEMV_PACKED_2, R, CB, V, __VA_ARGS__), \
		GEMV_EXPAND(GEMV_PACKED_4, R, CB, V, __VA_ARGS__)
#define GEMV_MUL1(R, V, ...)                                                                       \
	GEMV_EXPAND(GEMV_BYTES, R, V, __VA_ARGS__), GEMV_EXPAND(GEMV_PACKED_1, R, V, __VA_ARGS__), \
		GEMV_EXPAND(GEMV_PACKED_2, R, CB_MUL1, V, __VA_ARGS__),                            \
		GEMV_EXPAND(GEMV_PACKED_4, R, CB_MUL1, V, __VA_ARGS__)

/* Variant 1 differs where there is one group of columns, m <= 8. */
#define GEMV_SMALL(R)                                  \
	GEMV_EXPAND(GEMV_BYTES, R, 1, GEMV_VARIANT_1), \
		GEMV_EXPAND(GEMV_PACKED_1, R, 1, GEMV_VARIANT_1)

#define EXL3_GEMV_WHOLE(R)                                             \
	namespace exl3                                                 \
	{                                                              \
	extern const gemv_instance gemv_rate_##R[] = {                 \
		GEMV_HALVES(R, CB_3INST, 0, GEMV_VARIANT_0),           \
		GEMV_HALVES(R, CB_MCG, 0, GEMV_VARIANT_0),             \
		GEMV_MUL1(R, 0, GEMV_VARIANT_0),                       \
		GEMV_EXPAND(GEMV_DUP, R, CB_3INST, 1, GEMV_VARIANT_1), \
		GEMV_EXPAND(GEMV_DUP, R, CB_MCG, 1, GEMV_VARIANT_1),   \
		GEMV_SMALL(R),                                         \
		{}};                                                   \
	}
#define EXL3_GEMV_HALF(R)                                            \
	namespace exl3                                               \
	{                                                            \
	extern const gemv_instance gemv_rate_##R[] = {               \
		GEMV_MUL1(R, 0, GEMV_VARIANT_0), GEMV_SMALL(R), {}}; \
	}

} /* namespace exl3 */
#endif
