/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_f16.h - weights rebuilt in f16 or bf16, then one library product; for very many rows.
 *
 * cuBLAS is opened at run time. Without it supports() is false and everything else works.
 */
#ifndef EXL3_CUDA_GEMM_F16_H
#define EXL3_CUDA_GEMM_F16_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

bool exl3_gemm_f16_supports(const struct exl3_cuda_linear *a);
size_t exl3_gemm_f16_ws_bytes(const struct exl3_cuda_linear *a);
int exl3_gemm_f16_launch(const struct exl3_cuda_linear *a, cudaStream_t stream);

/* The same with weights rebuilt by unpack_mma.cuh: a few bitrates. */
bool exl3_gemm_f16_mma_supports(const struct exl3_cuda_linear *a);
int exl3_gemm_f16_mma_launch(const struct exl3_cuda_linear *a, cudaStream_t stream);

/* The same with weights rebuilt by unpack_sm90.cuh: sm_90a only; workspace as above. */
bool exl3_gemm_f16_wgmma_supports(const struct exl3_cuda_linear *a);
int exl3_gemm_f16_wgmma_launch(const struct exl3_cuda_linear *a, cudaStream_t stream);

/*
 * y[m, n] = x[m, k] w[n, k]^T; row-major, strides in elements, x and w of @dtype (f16 or bf16), y of
 * @y_dtype (the same or f32). @ws: EXL3_GEMM_LIBRARY_WS bytes for the library. -EOPNOTSUPP: no cuBLAS.
 */
#define EXL3_GEMM_LIBRARY_WS (32u << 20)
int exl3_gemm_library(uint32_t m, uint32_t n, uint32_t k, const void *x, uint32_t x_stride,
		      const void *w, uint32_t w_stride, void *y, uint32_t y_stride, int dtype,
		      int y_dtype, void *ws, cudaStream_t stream);

/* Opens the library and makes the current device's handle, which allocates: before a capture that may use it.
 * false: no cuBLAS, then nothing uses it. */
bool exl3_gemm_library_open(void);

#ifdef __cplusplus
}
#endif
#endif
