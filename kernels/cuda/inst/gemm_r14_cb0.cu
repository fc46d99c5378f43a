/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r14_cb0.cu - wgmma kernels: 3inst, 7 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(14, 0, EXL3_GEMM_VARIANTS)
