/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_candidate_r8_cb1.cu - wgmma kernels that are to be compared: mcg, 4 bits. */
#include "kernels/cuda/gemm_sm90.cuh"

struct exl3_gemm_entry exl3_gemm_candidate_r8_cb1(int variant)
{
	constexpr int RATE2 = 8, CB = 1;

	switch (variant) {
		EXL3_GEMM_CANDIDATES(EXL3_GEMM_CANDIDATE)
	}
	return {};
}
