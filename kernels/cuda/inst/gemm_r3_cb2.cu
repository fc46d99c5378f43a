/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r3_cb2.cu - wgmma kernels: mul1, 1.5 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(3, 2, EXL3_GEMM_VARIANTS)
