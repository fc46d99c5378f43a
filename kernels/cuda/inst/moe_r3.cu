/* SPDX-License-Identifier: Apache-2.0 */
/* moe_r3.cu - grouped products at 1.5 bits. */
#include "kernels/cuda/moe_inst.cuh"
EXL3_MOE_INSTANTIATE(3, 2)
