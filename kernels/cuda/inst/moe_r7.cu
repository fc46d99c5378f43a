/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r7.cu - grouped products at 3.5 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(7, 2)
