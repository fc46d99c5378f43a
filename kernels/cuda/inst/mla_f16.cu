/* SPDX-License-Identifier: Apache-2.0 */
/* mla_f16.cu - MLA decode over f16 caches. */
#include "kernels/cuda/mla.cuh"

EXL3_MLA_INSTANTIATE(mla_f16_576, EXL3_F16, 576, 512, 4, true, 23.5f)
EXL3_MLA_INSTANTIATE(mla_f16_512, EXL3_F16, 512, 512, 5, true, 21.5f)
EXL3_MLA_INSTANTIATE(mla_f16_any, EXL3_F16, 640, 640, 3, false, 32.0f)
EXL3_MLA_INSTANTIATE(mla_f16_small, EXL3_F16, 640, 640, 2, false, 45.0f) /* 163 KiB of shared memory */
