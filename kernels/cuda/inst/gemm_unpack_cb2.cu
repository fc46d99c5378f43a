/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_unpack_cb2.cu - weights rebuilt by wgmma: mul1, every bitrate. */
#include "kernels/cuda/gemm_variants.h"
#include "kernels/cuda/unpack_sm90.cuh"

#define EXL3_UNPACK_CB 2

exl3::unpack_entry exl3::unpack_wgmma_cb2(uint32_t rate2, bool bf16)
{
	EXL3_GEMM_RATES(EXL3_UNPACK_CASE)
	return {};
}
