/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_r03.cu - few-row kernels for 1.5 bits. */
#include "kernels/cuda/gemv_inst.cuh"

EXL3_GEMV_HALF(3)
