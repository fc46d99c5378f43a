/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_r10_cb1.cu - wgmma kernels: mcg, 5 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

EXL3_GEMM_INSTANTIATE(10, 1, EXL3_GEMM_VARIANTS)
