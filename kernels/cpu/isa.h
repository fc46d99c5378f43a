/* SPDX-License-Identifier: Apache-2.0 */
/*
 * isa.h - what an instruction set contributes: the inner loops that linear.c, moe.c and mla.c call.
 *
 * Columns are handled in units of 32 (two tiles side by side), rows in panels of at most @panel.
 * x is transformed once into f32 panels, so that one row's values of consecutive k are @rows apart:
 *
 *       panel of r rows:  xs[k * r + row]         z [m][n] f32, columns in the order of the unit
 *
 * Every kernel adds the k of a column in ascending order, one fused multiply-add each, whatever the
 * number of rows: the bits of a row depend on that row alone, so all work is deterministic.
 */
#ifndef EXL3_KERNELS_CPU_ISA_H
#define EXL3_KERNELS_CPU_ISA_H

#include "kernels/backend.h"

#define CPU_UNIT      32u  /* columns */
#define CPU_BLOCK     128u /* rows of weights that are decoded at a time: 16 KiB, half an L1 */
#define CPU_MLA_HEADS 8u   /* heads that share one conversion of the cache */
#define CPU_MLA_SLOTS 32u  /* cache rows that are converted at a time */

/* Per-thread state of one (query, group of heads): running softmax over blocks of cache rows. */
struct cpu_mla_state {
	float q[CPU_MLA_HEADS][EXL3_MLA_DIM_MAX];  /* f32, scaled by both scales */
	float kv[CPU_MLA_SLOTS][EXL3_MLA_DIM_MAX]; /* the block of cache rows, f32 */
	float s[CPU_MLA_HEADS][CPU_MLA_SLOTS];     /* scores, then exp(score - top) */
	float o[CPU_MLA_HEADS][EXL3_MLA_DIM_MAX];
	float top[CPU_MLA_HEADS], sum[CPU_MLA_HEADS];
};

struct cpu_isa {
	const char *name;        /* "c", "avx2", "avx512" */
	bool (*available)(void); /* on this processor */
	unsigned panel;          /* most rows of one multiply() */

	/* out[i * stride] = (H128 (x * suh))[i] / sqrt(128), i < 128; x is zero from @count on. */
	void (*input)(const void *x, uint8_t dtype, unsigned count, const uint16_t *suh, float *out,
		      size_t stride);
	/* z[32] = x[k] W of one unit of columns. */
	void (*gemv)(const struct exl3_matrix *w, uint32_t unit, const float *x, float *z);
	/* CPU_BLOCK x CPU_UNIT weights from row @k0 as f32, in the order that multiply() wants. */
	void (*decode)(const struct exl3_matrix *w, uint32_t k0, uint32_t unit, float *out);
	/* z[rows][32] (+)= panel[CPU_BLOCK][rows] x block; @first: z was not written yet. */
	void (*multiply)(unsigned rows, const float *panel, const float *block, float *z,
			 size_t z_stride, bool first);
	/* y[128] = (H128 z / sqrt(128)) * svh + bias; z in unit order, y in natural order. */
	void (*output)(const float *z, const uint16_t *svh, const float *bias, float *y);
	/* Converts and writes @count values at element @at of y; @v has 128 values. */
	void (*store)(void *y, uint8_t dtype, size_t at, const float *v, unsigned count);
	/* u = act(g, u), @count a multiple of 16; g may be NULL for EXL3_ACT_RELU2. */
	void (*act)(uint8_t act, float limit, const float *g, float *u, unsigned count);
	/* y += p * v, 128 values. */
	void (*add)(float *y, float p, const float *v);

	/* @count values to f32, times @scale; @count a multiple of 16. */
	void (*convert)(const void *src, uint8_t dtype, float scale, unsigned count, float *out);
	/* One block of @slots rows in st->kv: scores, softmax, st->o. */
	void (*attend)(struct cpu_mla_state *st, unsigned heads, unsigned slots, unsigned dim,
		       unsigned value_dim);
};

extern const struct cpu_isa cpu_isa_c, cpu_isa_avx2, cpu_isa_avx512;

/* The fastest one that this processor has. */
const struct cpu_isa *cpu_isa_best(void);

#endif
