/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_r05.cu - few-row kernels for 2.5 bits. */
#include "kernels/cuda/gemv_inst.cuh"

EXL3_GEMV_HALF(5)
