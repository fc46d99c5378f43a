/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r16.cu - grouped products at 8 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(16, 0)
EXL3_MOE_INSTANTIATE(16, 1)
EXL3_MOE_INSTANTIATE(16, 2)
