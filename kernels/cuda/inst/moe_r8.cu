/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r8.cu - grouped products at 4 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(8, 0)
EXL3_MOE_INSTANTIATE(8, 1)
EXL3_MOE_INSTANTIATE(8, 2)
