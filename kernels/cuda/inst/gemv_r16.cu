/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_r16.cu - few-row kernels for 8 bits. */
#include "kernels/cuda/gemv_inst.cuh"

EXL3_GEMV_WHOLE(16)
