/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla_variants.cuh - other tile sizes of the MLA kernel, for mla_cuda's sweep (-s) only.
 *
 * Name: keys of a block, stages, CTAs an SM.
 */
#ifndef EXL3_BENCH_MLA_VARIANTS_CUH
#define EXL3_BENCH_MLA_VARIANTS_CUH

#include "kernels/cuda/mla.cuh"

#define EXL3_MLA_VARIANTS(X)                                                                       \
	X(v_bf16_576_32x5x1, EXL3_BF16, 576, 512, 32, 5, 1)                                            \
	X(v_bf16_576_32x3x1, EXL3_BF16, 576, 512, 32, 3, 1)                                            \
	X(v_bf16_576_32x2x2, EXL3_BF16, 576, 512, 32, 2, 2)                                            \
	X(v_bf16_576_64x2x1, EXL3_BF16, 576, 512, 64, 2, 1)                                            \
	X(v_bf16_512_32x6x1, EXL3_BF16, 512, 512, 32, 6, 1)                                            \
	X(v_bf16_512_32x2x2, EXL3_BF16, 512, 512, 32, 2, 2)                                            \
	X(v_e4m3_576_64x3x1, EXL3_E4M3, 576, 512, 64, 3, 1)                                            \
	X(v_e4m3_576_64x2x2, EXL3_E4M3, 576, 512, 64, 2, 2)

#define EXL3_MLA_VARIANT(name, cache, dp, vp, kb, stages, mincta)                                  \
	EXL3_MLA_INSTANTIATE(name, cache, dp, vp, kb, stages, mincta, true)
EXL3_MLA_VARIANTS(EXL3_MLA_VARIANT)
#undef EXL3_MLA_VARIANT

static const struct {
	const char *name;
	const exl3_mla::instance *in;
} mla_variants[] = {
#define EXL3_MLA_VARIANT(name, ...) {#name, &exl3_mla::name},
	EXL3_MLA_VARIANTS(EXL3_MLA_VARIANT)
#undef EXL3_MLA_VARIANT
};

#endif
