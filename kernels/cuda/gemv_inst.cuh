/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv_inst.cuh - the list of compiled shapes of gemv.cuh; inst/gemv_*.cu instantiate it per bitrate.
 *
 * A variant is a block shape: tiles per warp, warps per block, blocks per SM. Variant 0 exists for every
 * bitrate and codebook, the others for the bitrates that are tuned (see gemv.cu for their names).
 */
#ifndef EXL3_CUDA_GEMV_INST_CUH
#define EXL3_CUDA_GEMV_INST_CUH

#include "kernels/cuda/gemv.cuh"

namespace exl3
{

struct gemv_instance {
	void (*kernel)(const gemv_args); /* NULL ends a list */
	uint8_t rate2, codebook, form, variant;
	uint8_t tokens, warps, per_sm, stages;
	uint16_t item, row, red;
};

template <class C>
static constexpr gemv_instance gemv_entry(int variant)
{
	return {gemv_kernel<C>,
		C::RATE2,
		C::CB,
		C::FORM,
		(uint8_t)variant,
		C::TOKENS,
		C::WARPS,
		C::PER_SM,
		C::STAGES,
		C::ITEM,
		C::ROW,
		C::RED};
}

/* Windows are cut on both integer pipes, except for mul1, whose byte sums load the multiplier's. */
#define GEMV_HALVES(R, CB, V, ...)                                                                 \
	gemv_entry<gemv_cfg<R, CB, FORM_DUP, 1, __VA_ARGS__, 1>>(V),                               \
		gemv_entry<gemv_cfg<R, CB, FORM_PACKED, 2, __VA_ARGS__, 1>>(V),                    \
		gemv_entry<gemv_cfg<R, CB, FORM_PACKED, 4, __VA_ARGS__, 1>>(V)
#define GEMV_MUL1(R, V, ...)                                                                       \
	gemv_entry<gemv_cfg<R, CB_MUL1, FORM_BYTES, 1, __VA_ARGS__, 0>>(V),                        \
		gemv_entry<gemv_cfg<R, CB_MUL1, FORM_PACKED, 1, __VA_ARGS__, 0>>(V),               \
		gemv_entry<gemv_cfg<R, CB_MUL1, FORM_PACKED, 2, __VA_ARGS__, 0>>(V),               \
		gemv_entry<gemv_cfg<R, CB_MUL1, FORM_PACKED, 4, __VA_ARGS__, 0>>(V)

/* tiles per warp, warps per block, blocks per SM */
#define GEMV_VARIANT_0 4, 8, 2
#define GEMV_VARIANT_1 4, 16, 1
#define GEMV_VARIANT_2 8, 8, 2
#define GEMV_VARIANT_3 4, 16, 2
#define GEMV_VARIANT_4 4, 12, 2

#define EXL3_GEMV_WHOLE(R)                                                                         \
	namespace exl3                                                                             \
	{                                                                                          \
	extern const gemv_instance gemv_rate_##R[] = {GEMV_HALVES(R, CB_3INST, 0, GEMV_VARIANT_0),  \
						      GEMV_HALVES(R, CB_MCG, 0, GEMV_VARIANT_0),    \
						      GEMV_MUL1(R, 0, GEMV_VARIANT_0),              \
						      {}};                                          \
	}
#define EXL3_GEMV_HALF(R)                                                                          \
	namespace exl3                                                                             \
	{                                                                                          \
	extern const gemv_instance gemv_rate_##R[] = {GEMV_MUL1(R, 0, GEMV_VARIANT_0), {}};         \
	}

} /* namespace exl3 */
#endif
