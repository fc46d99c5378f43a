/* SPDX-License-Identifier: Apache-2.0 */
/* mla_bf16.cu - MLA decode over bf16 caches. */
#include "kernels/cuda/mla.cuh"

EXL3_MLA_INSTANTIATE(mla_bf16_576, EXL3_BF16, 576, 512, 4, true, 23.5f)
EXL3_MLA_INSTANTIATE(mla_bf16_512, EXL3_BF16, 512, 512, 5, true, 21.5f)
EXL3_MLA_INSTANTIATE(mla_bf16_any, EXL3_BF16, 640, 640, 3, false, 32.0f)
EXL3_MLA_INSTANTIATE(mla_bf16_small, EXL3_BF16, 640, 640, 2, false, 45.0f) /* 163 KiB of shared memory */
