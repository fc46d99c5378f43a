/* SPDX-License-Identifier: Apache-2.0 */
/* moe_inst.cuh - a bitrate's instance file: all products for the codebooks that exist for it. */
#ifndef EXL3_CUDA_MOE_INST_CUH
#define EXL3_CUDA_MOE_INST_CUH

#include "kernels/cuda/moe_decode.cuh"
#include "kernels/cuda/moe_gemm.cuh"
#include "kernels/cuda/moe_wide.cuh"

#define EXL3_MOE_INSTANTIATE(rate2, cb)                                                            \
	namespace exl3                                                                             \
	{                                                                                          \
	int moe_gemm_##rate2##_##cb(const moe_gemm_args &a, int sms, cudaStream_t stream)          \
	{                                                                                          \
		return moe_gemm_start_any<rate2, cb>(a, sms, stream);                              \
	}                                                                                          \
	int moe_decode_##rate2##_##cb(const moe_gemm_args &a, int sms, cudaStream_t stream)        \
	{                                                                                          \
		return moe_decode_start_any<rate2, cb>(a, sms, stream);                            \
	}                                                                                          \
	int moe_wide_##rate2##_##cb(const moe_gemm_args &a, int sms, cudaStream_t stream)          \
	{                                                                                          \
		return moe_wide_start_any<rate2, cb>(a, sms, stream);                              \
	}                                                                                          \
	}

#endif
