/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r8_cb1.cu - wgmma kernels: mcg, 4 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(8, 1, EXL3_GEMM_VARIANTS)
