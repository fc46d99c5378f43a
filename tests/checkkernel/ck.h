/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ck.h - what the parts of checkkernel share: device memory, random data, runs, comparisons.
 *
 * Operands and weights live in slabs, which every backend can write and read; the oracle works on
 * host copies of the same bytes.
 */
#ifndef EXL3_TESTS_CHECKKERNEL_CK_H
#define EXL3_TESTS_CHECKKERNEL_CK_H

#include "kernels/backend.h"
#include "kernels/format.h"

#include <stdio.h>
#include <stdlib.h>

#define CK_MARGIN     256u /* canary bytes before and after each output */
#define CK_CANARY     0xc5
#define CK_TIMEOUT_MS 60000 /* a result that takes longer counts as a lost wake-up */

struct ck {
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev;
	struct exl3_slab *slab;
	size_t used; /* of the slab, by this case */
	uint64_t random;
	const char *only_kernel;
	bool quick, tiny;
	unsigned turn; /* cases asked for; tiny runs every fifth */
	/* Bounds relative to the rms of the output, beyond half an ulp of its dtype. */
	double tol_max, tol_rms;
	uint64_t passed, failed, cases;
	double worst_max, worst_rms;
	double det_max, det_rms; /* the same in deterministic mode */
	uint64_t together;       /* launches of several deterministic requests that the daemon may merge */
	char what[256]; /* the case, for messages */
};

/* A matrix twice: with host and with device pointers. */
struct ck_matrix {
	struct exl3_matrix host, dev;
};

/* Bytes that both sides have. */
struct ck_buf {
	void *host;
	void *dev;
	size_t bytes, offset; /* offset in the slab */
};

/* One request's rows: operands with the oracle's result beside the device's. */
struct ck_rows {
	struct exl3_rows dev;  /* for the backend */
	struct exl3_rows host; /* for the oracle: y is f32, dense */
	struct ck_buf x, y;    /* y with its margins */
	float *ref;            /* [m][width] */
	uint32_t width;        /* columns of y */
	double typical;        /* errors are relative to this where it exceeds the rms of y */
	struct ck_buf lse;     /* MLA: [m][heads] f32 with margins */
	float *ref_lse;
	uint32_t heads;
	uint64_t skipped; /* what the oracle counted */
};

/* data.c */
uint64_t ck_random(struct ck *ck);
uint32_t ck_below(struct ck *ck, uint32_t limit);
double ck_uniform(struct ck *ck, double low, double high);
void *ck_alloc(size_t bytes); /* zeroed, or the program ends */
struct ck_buf ck_buf_new(struct ck *ck, size_t bytes);
void ck_buf_upload(struct ck *ck, const struct ck_buf *buf);
void ck_buf_download(struct ck *ck, const struct ck_buf *buf);
void ck_buf_free(struct ck_buf *buf);
struct ck_matrix *ck_matrix_new(struct ck *ck, uint32_t k_log, uint32_t n_log, int rate2,
				int codebook, bool bias);
struct ck_matrix *ck_matrix_free(struct ck_matrix *m);
/* Fills [m][width] values of @dtype in [-2, 2); @stride in bytes, @buf from its start. */
void ck_fill(struct ck *ck, const struct ck_buf *buf, uint32_t m, uint32_t width, uint8_t dtype,
	     size_t stride);
void ck_put(const struct ck_buf *buf, uint8_t dtype, size_t stride, uint32_t row, uint32_t col,
	    double value);
struct ck_rows ck_rows_new(struct ck *ck, uint32_t m, uint32_t x_width, uint32_t y_width,
			   uint8_t x_dtype, uint8_t y_dtype, bool stored, uint32_t x_gap,
			   uint32_t y_gap);
void ck_rows_free(struct ck_rows *rows);
/* Is this case left out? Asked once per case, before it is built. */
bool ck_skip(struct ck *ck);
void ck_case_begin(struct ck *ck, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* run.c: the oracle once, then every kernel of the table that supports the work. */
void ck_check(struct ck *ck, struct exl3_work *host, struct exl3_work *dev, struct ck_rows *rows);
/* One run of @work with @kernel; 0 or what the backend said. */
int ck_run(struct ck *ck, struct exl3_work *work, const struct exl3_kernel *kernel);
/* Does the output of @rows (downloaded) agree with the oracle? Prints why not. */
bool ck_compare(struct ck *ck, const struct ck_rows *rows, const char *kernel);
/* alone.c: several requests in one deterministic launch against each by itself, bit by bit. */
void ck_alone(struct ck *ck, const struct exl3_work *work, struct ck_rows *rows);
void ck_result(struct ck *ck, bool ok, const char *kernel, const char *why);
bool ck_wanted(const struct ck *ck, const struct exl3_kernel *kernel);

/* The three parts. */
void ck_linear(struct ck *ck);
void ck_moe(struct ck *ck);
void ck_mla(struct ck *ck);

#endif
