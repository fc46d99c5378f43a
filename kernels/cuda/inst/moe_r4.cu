/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r4.cu - grouped products at 2 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(4, 0)
EXL3_MOE_INSTANTIATE(4, 1)
EXL3_MOE_INSTANTIATE(4, 2)
