/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_r07.cu - few-row kernels for 3.5 bits. */
#include "kernels/cuda/gemv_inst.cuh"

EXL3_GEMV_HALF(7)
