/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_tune.cu - other block shapes of the few-row kernels, for the bitrates that are tuned. */
#include "kernels/cuda/gemv_inst.cuh"

namespace exl3
{

#define TUNE(V)                                                                                    \
	GEMV_HALVES(8, CB_MCG, V, GEMV_VARIANT_##V), GEMV_MUL1(8, V, GEMV_VARIANT_##V),            \
		GEMV_EXPAND(GEMV_DUP, 12, CB_MCG, V, GEMV_VARIANT_##V)

extern const gemv_instance gemv_tune[] = {TUNE(2), TUNE(3), TUNE(4), {}};

} /* namespace exl3 */
