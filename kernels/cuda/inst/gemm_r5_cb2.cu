/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r5_cb2.cu - wgmma kernels: mul1, 2.5 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(5, 2, EXL3_GEMM_VARIANTS)
