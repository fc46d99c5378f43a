/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r10.cu - grouped products at 5 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(10, 0)
EXL3_MOE_INSTANTIATE(10, 1)
EXL3_MOE_INSTANTIATE(10, 2)
