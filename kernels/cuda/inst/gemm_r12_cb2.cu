/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r12_cb2.cu - wgmma kernels: mul1, 6 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(12, 2, EXL3_GEMM_VARIANTS)
