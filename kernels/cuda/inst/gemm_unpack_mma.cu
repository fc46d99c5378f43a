/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_unpack_mma.cu - weights rebuilt by mma.sync, products issued together: what is to be compared. */
#include "kernels/cuda/unpack_mma.cuh"

exl3::unpack_entry exl3::unpack_mma_some(uint32_t rate2, uint32_t codebook, bool bf16)
{
	EXL3_UNPACK_MMA_CASE(8, 1)
	EXL3_UNPACK_MMA_CASE(8, 2)
	EXL3_UNPACK_MMA_CASE(12, 1)
	return {};
}
