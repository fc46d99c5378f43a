/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla_variants.cuh - other tile sizes of the MLA kernel, for mla_cuda's sweep (-s) only.
 *
 * Name: stages.
 */
#ifndef EXL3_BENCH_MLA_VARIANTS_CUH
#define EXL3_BENCH_MLA_VARIANTS_CUH

#include "kernels/cuda/mla.cuh"

#define EXL3_MLA_VARIANTS(X)                     \
	X(v_bf16_576_s3, EXL3_BF16, 576, 512, 3) \
	X(v_bf16_512_s4, EXL3_BF16, 512, 512, 4) \
	X(v_e4m3_576_s6, EXL3_E4M3, 576, 512, 6) \
	X(v_e4m3_576_s4, EXL3_E4M3, 576, 512, 4)

#define EXL3_MLA_VARIANT(name, cache, dp, vp, stages) \
	EXL3_MLA_INSTANTIATE(name, cache, dp, vp, stages, true, 25.0f)
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
