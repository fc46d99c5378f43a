/* SPDX-License-Identifier: Apache-2.0 */
/* mla_wide.cu - MLA decode for 64 heads a CTA. */
#include "kernels/cuda/mla_wide.cuh"

EXL3_MLA_WIDE_INSTANTIATE(mla_wide_bf16_576, EXL3_BF16, 576)
EXL3_MLA_WIDE_INSTANTIATE(mla_wide_bf16_512, EXL3_BF16, 512)
EXL3_MLA_WIDE_INSTANTIATE(mla_wide_f16_576, EXL3_F16, 576)
EXL3_MLA_WIDE_INSTANTIATE(mla_wide_f16_512, EXL3_F16, 512)
EXL3_MLA_WIDE_INSTANTIATE(mla_wide_e4m3_576, EXL3_E4M3, 576)
EXL3_MLA_WIDE_INSTANTIATE(mla_wide_e4m3_512, EXL3_E4M3, 512)
