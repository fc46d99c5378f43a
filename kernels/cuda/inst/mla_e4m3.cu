/* SPDX-License-Identifier: Apache-2.0 */
/* mla_e4m3.cu - MLA decode over e4m3 caches: one scale, or records with their own. */
#include "kernels/cuda/mla.cuh"

EXL3_MLA_INSTANTIATE(mla_e4m3_576, EXL3_E4M3, 576, 512, 8, true, 27.0f)
EXL3_MLA_INSTANTIATE(mla_e4m3_512, EXL3_E4M3, 512, 512, 8, true, 24.0f)
EXL3_MLA_INSTANTIATE(mla_e4m3_any, EXL3_E4M3, 640, 640, 5, false, 36.0f)
EXL3_MLA_INSTANTIATE(mla_e4m3_656, EXL3_E4M3_656, 576, 512, 8, true, 30.0f)
