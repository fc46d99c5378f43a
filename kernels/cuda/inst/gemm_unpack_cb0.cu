/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_unpack_cb0.cu - weights rebuilt by wgmma: 3inst, every bitrate. */
#include "kernels/cuda/gemm_variants.h"
#include "kernels/cuda/unpack_sm90.cuh"

#define EXL3_UNPACK_CB 0

exl3::unpack_entry exl3::unpack_wgmma_cb0(uint32_t rate2, bool bf16)
{
	EXL3_GEMM_RATES(EXL3_UNPACK_CASE)
	return {};
}
