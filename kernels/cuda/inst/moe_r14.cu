/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r14.cu - grouped products at 7 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(14, 0)
EXL3_MOE_INSTANTIATE(14, 1)
EXL3_MOE_INSTANTIATE(14, 2)
