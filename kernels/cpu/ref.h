/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref.h - the oracle: every operation in double precision, by the plainest loops that are right.
 *
 * All other kernels of all backends are compared with these. They work on host pointers, one
 * thread, and take their memory from the caller.
 */
#ifndef EXL3_KERNELS_REF_H
#define EXL3_KERNELS_REF_H

#include "kernels/backend.h"

/* The inner weights of one tile as fp16 bits, row-major [k][n]. @words: the tile in file order. */
void exl3_ref_tile(const void *words, int rate2, int codebook, uint16_t out[256]);

/* v <- H128 v / sqrt(128), in place. */
void exl3_ref_hadamard(double v[128]);

/* a = act(g, u) of one element; @limit 0: none. @g is ignored by EXL3_ACT_RELU2. */
double exl3_ref_act(uint8_t act, double limit, double g, double u);

/* W [k, n] in the original basis (suh, both transforms, svh applied; no bias), row-major double. */
void exl3_ref_dense(const struct exl3_matrix *w, double *out);

/* One element of an operand of any dtype, and its store with one rounding. */
double exl3_ref_load(const void *base, uint8_t dtype, size_t index);
void exl3_ref_store(void *base, uint8_t dtype, size_t index, double value);
/* An integer operand's element (i32 or i64). */
int64_t exl3_ref_load_index(const void *base, uint8_t dtype, size_t index);

/**
 * exl3_ref_run() - run @work (LINEAR, MOE, MLP or MLA_DECODE) to the end.
 * @scratch, @bytes: memory for intermediate values, 8-byte aligned; see exl3_ref_scratch().
 * Sets work->skipped. Returns 0, -EOPNOTSUPP (op), -ENOMEM (scratch too small).
 */
int exl3_ref_run(const struct exl3_work *work, void *scratch, size_t bytes);

/* Bytes of scratch that @work needs at least. */
size_t exl3_ref_scratch(const struct exl3_work *work);

#endif
