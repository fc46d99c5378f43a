/* SPDX-License-Identifier: Apache-2.0 */
/* gemv_r12.cu - few-row kernels for 6 bits. */
#include "kernels/cuda/gemv_inst.cuh"

EXL3_GEMV_WHOLE(12)
