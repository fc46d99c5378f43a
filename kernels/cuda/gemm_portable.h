/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_portable.h - table entry of the mma.sync kernel: any device from sm_80 on, any m. */
#ifndef EXL3_CUDA_GEMM_PORTABLE_H
#define EXL3_CUDA_GEMM_PORTABLE_H

#include "kernels/cuda/launch.h"

bool exl3_gemm_portable_supports(const struct exl3_cuda_linear *a);
size_t exl3_gemm_portable_ws_bytes(const struct exl3_cuda_linear *a);
int exl3_gemm_portable_launch(const struct exl3_cuda_linear *a, cudaStream_t stream);

#endif
