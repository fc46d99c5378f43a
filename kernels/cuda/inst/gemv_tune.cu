/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_tune.cu - other block shapes of the few-row kernels, for the bitrates that are tuned. */
#include "kernels/cuda/gemv_inst.cuh"

namespace exl3
{

#define TUNE(V)                                                                                    \
	GEMV_HALVES(8, CB_MCG, V, GEMV_VARIANT_##V), GEMV_MUL1(8, V, GEMV_VARIANT_##V),            \
		GEMV_EXPAND(GEMV_DUP, 12, CB_MCG, V, GEMV_VARIANT_##V)
#define TUNE_WGMMA(V, W, P)                                                                        \
	GEMV_WGMMA(8, CB_MCG, 2, V, W, P, 1), GEMV_WGMMA(8, CB_MCG, 4, V, W, P, 1),                \
		GEMV_WGMMA(8, CB_MUL1, 1, V, W, P, 0), GEMV_WGMMA(8, CB_MUL1, 2, V, W, P, 0),      \
		GEMV_WGMMA(8, CB_MUL1, 4, V, W, P, 0), GEMV_WGMMA(12, CB_MCG, 2, V, W, P, 1),      \
		GEMV_WGMMA(12, CB_MCG, 4, V, W, P, 1)

extern const gemv_instance gemv_tune[] = {TUNE(1),
					  TUNE(2),
					  TUNE(3),
					  TUNE(4),
					  TUNE(5),
					  TUNE_WGMMA(6, 8, 2),
					  TUNE_WGMMA(7, 16, 1),
					  TUNE_WGMMA(8, 12, 2),
					  {}};

} /* namespace exl3 */
