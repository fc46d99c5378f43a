/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_unpack_cb1.cu - weights rebuilt by wgmma: mcg, every bitrate. */
#include "kernels/cuda/gemm_variants.h"
#include "kernels/cuda/unpack_sm90.cuh"

#define EXL3_UNPACK_CB 1

exl3::unpack_entry exl3::unpack_wgmma_cb1(uint32_t rate2, bool bf16)
{
	EXL3_GEMM_RATES(EXL3_UNPACK_CASE)
	return {};
}
