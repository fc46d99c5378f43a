/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_r04.cu - few-row kernels for 2 bits. */
#include "kernels/cuda/gemv_inst.cuh"

EXL3_GEMV_WHOLE(4)
