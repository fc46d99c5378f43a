/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_unpack.h - what every rebuild of weights in 16 bits is given, and where the compiled ones are found. */
#ifndef EXL3_CUDA_GEMM_UNPACK_H
#define EXL3_CUDA_GEMM_UNPACK_H

#include <cuda_fp16.h>
#include <stddef.h>
#include <stdint.h>

namespace exl3
{

struct unpack_args {
	const uint8_t *trellis;
	const __half *suh, *svh;
	uint32_t k, blocks_k, blocks; /* blocks of 128 x 128: along k, in all; k runs fastest */
	size_t row_bytes;             /* trellis of one k-tile row */
	uint16_t *w;                  /* [n][k] */
};

/* A compiled rebuild; kernel NULL: not for this bitrate. */
struct unpack_entry {
	const void *kernel;
	int smem_bytes, threads;
	int per_sm; /* blocks of an SM */
};

/* inst/gemm_unpack_cb*.cu: by wgmma, sm_90a only. */
unpack_entry unpack_wgmma_cb0(uint32_t rate2, bool bf16);
unpack_entry unpack_wgmma_cb1(uint32_t rate2, bool bf16);
unpack_entry unpack_wgmma_cb2(uint32_t rate2, bool bf16);

/* inst/gemm_unpack_mma.cu: by mma.sync with products issued together; a few bitrates, to be compared. */
unpack_entry unpack_mma_some(uint32_t rate2, uint32_t codebook, bool bf16);

} // namespace exl3
#endif
