/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_variants.h - the one list of wgmma variants and of the bitrates and codebooks they exist for. */
#ifndef EXL3_CUDA_GEMM_VARIANTS_H
#define EXL3_CUDA_GEMM_VARIANTS_H

/* V(name, tokens per tile, k halves per block, blocks per SM, k16 steps per wgmma group) */
#define EXL3_GEMM_VARIANTS_BASE(V)  \
	V(n32, 32, 2, 1, 2)         \
	V(n64, 64, 2, 1, 2)         \
	V(n128, 128, 2, 1, 1)       \
	V(n256, 256, 1, 1, 1)
#define EXL3_GEMM_VARIANTS_TUNE(V)  \
	V(n32b, 32, 1, 2, 2)        \
	V(n32c, 32, 1, 3, 2)        \
	V(n32d, 32, 2, 1, 1)        \
	V(n64b, 64, 1, 2, 2)        \
	V(n64c, 64, 1, 2, 1)        \
	V(n64d, 64, 2, 1, 1)        \
	V(n128b, 128, 1, 1, 2)      \
	V(n256b, 256, 1, 1, 2)
#define EXL3_GEMM_VARIANTS_FEW(V) EXL3_GEMM_VARIANTS_BASE(V)
#define EXL3_GEMM_VARIANTS_ALL(V) EXL3_GEMM_VARIANTS_BASE(V) EXL3_GEMM_VARIANTS_TUNE(V)

/* V(rate2, codebook, variants) */
#define EXL3_GEMM_RATES(V) \
	V(2, 0) V(4, 0) V(6, 0) V(8, 0) V(10, 0) V(12, 0) V(14, 0) V(16, 0) \
	V(2, 1) V(4, 1) V(6, 1) V(8, 1) V(10, 1) V(12, 1) V(14, 1) V(16, 1) \
	V(2, 2) V(3, 2) V(4, 2) V(5, 2) V(6, 2) V(7, 2) V(8, 2) V(10, 2) V(12, 2) V(14, 2) V(16, 2)

#define EXL3_GEMM_ENUM(name, tn, wk, blocks, group) EXL3_GEMM_##name,
enum exl3_gemm_variant { EXL3_GEMM_VARIANTS_ALL(EXL3_GEMM_ENUM) EXL3_GEMM_NR };

/* A compiled kernel; kernel NULL: this variant was not compiled for this bitrate. */
struct exl3_gemm_entry {
	const void *kernel;
	int smem_bytes, threads;
};

#define EXL3_GEMM_DECLARE(rate2, cb) struct exl3_gemm_entry exl3_gemm_r##rate2##_cb##cb(int variant);
EXL3_GEMM_RATES(EXL3_GEMM_DECLARE)

#endif
