/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r12.cu - grouped products at 6 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(12, 0)
EXL3_MOE_INSTANTIATE(12, 1)
EXL3_MOE_INSTANTIATE(12, 2)
