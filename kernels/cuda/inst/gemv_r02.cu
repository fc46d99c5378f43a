/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_r02.cu - few-row kernels for 1 bits. */
#include "kernels/cuda/gemv_inst.cuh"

EXL3_GEMV_WHOLE(2)
