/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r16_cb0.cu - wgmma kernels: 3inst, 8 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(16, 0, EXL3_GEMM_VARIANTS)
