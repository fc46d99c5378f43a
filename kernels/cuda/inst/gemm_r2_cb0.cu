/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r2_cb0.cu - wgmma kernels: 3inst, 1 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(2, 0, EXL3_GEMM_VARIANTS)
