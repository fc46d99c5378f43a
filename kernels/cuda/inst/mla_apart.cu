/* SPDX-License-Identifier: Apache-2.0 */
/* mla_apart.cu - MLA decode for 64 heads a CTA, warpgroups apart; by name only. */
#include "kernels/cuda/mla_apart.cuh"

EXL3_MLA_APART_INSTANTIATE(mla_wide_apart_bf16_576, EXL3_BF16, 576)
EXL3_MLA_APART_INSTANTIATE(mla_wide_apart_e4m3_576, EXL3_E4M3, 576)
