/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_tune.cu - other block shapes of the few-row kernels, for the bitrates that are tuned. */
#include "kernels/cuda/gemv_inst.cuh"

namespace exl3
{

#define TUNE(V)                                                                                    \
	gemv_entry<gemv_cfg<8, CB_MCG, FORM_DUP, 1, GEMV_VARIANT_##V, 1>>(V),                      \
		gemv_entry<gemv_cfg<8, CB_MCG, FORM_PACKED, 2, GEMV_VARIANT_##V, 1>>(V),           \
		gemv_entry<gemv_cfg<12, CB_MCG, FORM_DUP, 1, GEMV_VARIANT_##V, 1>>(V),             \
		gemv_entry<gemv_cfg<8, CB_MUL1, FORM_BYTES, 1, GEMV_VARIANT_##V, 0>>(V),           \
		gemv_entry<gemv_cfg<8, CB_MUL1, FORM_PACKED, 1, GEMV_VARIANT_##V, 0>>(V)

extern const gemv_instance gemv_tune[] = {TUNE(1), TUNE(2), TUNE(3), TUNE(4), {}};

} /* namespace exl3 */
