/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r8_cb2.cu - wgmma kernels: mul1, 4 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(8, 2, EXL3_GEMM_VARIANTS)
