/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r2.cu - grouped products at 1 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(2, 0)
EXL3_MOE_INSTANTIATE(2, 1)
EXL3_MOE_INSTANTIATE(2, 2)
