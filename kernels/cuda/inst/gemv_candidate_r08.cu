/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_candidate_r08.cu - few-row kernels that are to be compared: 4 bits. */
#include "kernels/cuda/gemv_inst.cuh"

EXL3_GEMV_CANDIDATES(8)
