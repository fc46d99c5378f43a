/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r5.cu - grouped products at 2.5 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(5, 2)
