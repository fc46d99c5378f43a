/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r6.cu - grouped products at 3 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(6, 0)
EXL3_MOE_INSTANTIATE(6, 1)
EXL3_MOE_INSTANTIATE(6, 2)
