/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r2_cb2.cu - wgmma kernels: mul1, 1 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(2, 2, EXL3_GEMM_VARIANTS)
