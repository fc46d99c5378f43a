/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_variants.h - the one list of wgmma variants and of the bitrates and codebooks they exist for. */
#ifndef EXL3_CUDA_GEMM_VARIANTS_H
#define EXL3_CUDA_GEMM_VARIANTS_H

/*
 * V(name, tokens per tile, k halves per block, blocks per SM, k16 steps per wgmma group): what won of
 * the shapes that were compared on an H200.
 */
#define EXL3_GEMM_VARIANTS(V)  \
	V(n32, 32, 1, 2, 2)    \
	V(n64, 64, 2, 1, 2)    \
	V(n128, 128, 1, 1, 2)  \
	V(n256, 256, 1, 1, 2)

/*
 * Compiled for mcg with 4 bits only, by name only, until a GPU has compared them. V(name, tokens, halves, blocks, k16 steps, loop):
 * see gemm_sm90.cuh for the loops.
 */
#define EXL3_GEMM_CANDIDATES(V)                 \
	V(packed_n64, 64, 2, 1, 2, LOOP_PACKED)   \
	V(packed_n128, 128, 1, 1, 2, LOOP_PACKED) \
	V(packed_n256, 256, 1, 1, 2, LOOP_PACKED) \
	V(turns_n64, 64, 2, 1, 2, LOOP_TURNS)     \
	V(turns_n128, 128, 1, 1, 2, LOOP_TURNS)   \
	V(turns_n256, 256, 1, 1, 2, LOOP_TURNS)

/* V(rate2, codebook, variants) */
#define EXL3_GEMM_RATES(V) \
	V(2, 0) V(4, 0) V(6, 0) V(8, 0) V(10, 0) V(12, 0) V(14, 0) V(16, 0) \
	V(2, 1) V(4, 1) V(6, 1) V(8, 1) V(10, 1) V(12, 1) V(14, 1) V(16, 1) \
	V(2, 2) V(3, 2) V(4, 2) V(5, 2) V(6, 2) V(7, 2) V(8, 2) V(10, 2) V(12, 2) V(14, 2) V(16, 2)

#define EXL3_GEMM_ENUM(name, ...) EXL3_GEMM_##name,
enum exl3_gemm_variant {
	EXL3_GEMM_VARIANTS(EXL3_GEMM_ENUM) EXL3_GEMM_CANDIDATES(EXL3_GEMM_ENUM) EXL3_GEMM_NR
};

/* A compiled kernel; kernel NULL: this variant was not compiled for this bitrate. */
struct exl3_gemm_entry {
	const void *kernel;
	int smem_bytes, threads;
};

#define EXL3_GEMM_DECLARE(rate2, cb) struct exl3_gemm_entry exl3_gemm_r##rate2##_cb##cb(int variant);
EXL3_GEMM_RATES(EXL3_GEMM_DECLARE)
struct exl3_gemm_entry exl3_gemm_candidate_r8_cb1(int variant);

#endif
