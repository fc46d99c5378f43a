/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tuned.h - which variant measurement has shown to be the best, by shape and rows.
 *
 * A table is a sorted array of lines "shape, rows from..to -> variant". It is filled by one thread, then never
 * changed: any number of threads may look things up. A backend's select() asks the work's table
 * (exl3_work.tuned), then the one it was built with, then takes its order of preference; a variant that does not
 * support the work is passed over each time.
 *
 *   linear K SHARDS FIRST LAST NAME [# comment]        SHARDS: N:BITS:CODEBOOK, with commas
 *   linear 5120 17408:4:mcg,17408:4:mcg 9 16 gemv      BITS: 1..8, or 1.5, 2.5, 3.5; CODEBOOK: 3inst, mcg, mul1
 */
#ifndef EXL3_KERNELS_TUNED_H
#define EXL3_KERNELS_TUNED_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL3_TUNED_SHARDS_MAX 8u    /* a linear of more shards has no line */
#define EXL3_TUNED_MAX       8192u /* lines of a table */
#define EXL3_TUNED_DIM_MAX    (1u << 24)
#define EXL3_TUNED_LINE_MAX   512u  /* bytes of a line, without its comment */

/* What a line is for, padded with zeros: compared as bytes. */
struct exl3_tuned_shape {
	uint32_t k, nr_shards;
	struct exl3_tuned_shard {
		uint32_t n;
		uint16_t rate2, codebook;
	} shard[EXL3_TUNED_SHARDS_MAX];
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_tuned_shape) == 8 + 8 * EXL3_TUNED_SHARDS_MAX, "no padding");

struct exl3_tuned_line {
	struct exl3_tuned_shape shape;
	uint32_t m_first, m_last; /* 1..EXL3_M_MAX, both included */
	const struct exl3_kernel *kernel; /* borrowed from the backend */
};

struct exl3_tuned {
	struct exl3_tuned_line *list; /* owned; sorted by shape, then rows; no two overlap */
	uint32_t nr, room;
	uint32_t refs;            /* one thread */
	char source[128];         /* for people: file, or what made it */
};

/* One reference, empty. NULL: out of memory. */
struct exl3_tuned *exl3_tuned_new(const char *source);
struct exl3_tuned *exl3_tuned_get(struct exl3_tuned *c); /* NULL allowed, as below */
struct exl3_tuned *exl3_tuned_put(struct exl3_tuned *c);

/* The shape of a linear; false: none has a line. */
bool exl3_tuned_shape(struct exl3_tuned_shape *ret, const struct exl3_linear_args *linear);
/* "5120 17408:4:mcg" */
void exl3_tuned_shape_text(const struct exl3_tuned_shape *s, char *text, size_t size);

/**
 * exl3_tuned_add_line() - one line of a table, in words. Not trusted.
 * @line:    ends with 0 or a newline.
 * @kernels: of the backend, ends with a NULL name.
 * Returns 0; -EINVAL: it is not such a line, or meets another one's rows; -ENOENT: there is no such variant, for a
 * caller that may go on without it; -E2BIG; -ENOMEM. Lines may come in any order; look up after
 * exl3_tuned_done().
 */
int exl3_tuned_add_line(struct exl3_tuned *c, const char *line, const struct exl3_kernel *kernels,
			  struct exl3_error *err);
/* The same, not in words; @shape and rows must be valid. */
int exl3_tuned_add(struct exl3_tuned *c, const struct exl3_tuned_shape *shape, uint32_t m_first, uint32_t m_last,
		     const struct exl3_kernel *kernel, struct exl3_error *err);
/* All lines are there: sorts them. -EINVAL: two are for the same rows of a shape. */
int exl3_tuned_done(struct exl3_tuned *c, struct exl3_error *err);

/* The line for @m rows of @shape, or NULL. @c may be NULL. */
const struct exl3_tuned_line *exl3_tuned_find(const struct exl3_tuned *c, const struct exl3_tuned_shape *shape,
					    uint32_t m);
/* The line for all rows of a work; NULL: none, or not a linear. Its variant may not support it. */
const struct exl3_tuned_line *exl3_tuned_for_work(const struct exl3_tuned *c, const struct exl3_work *work);

/*
 * The first of two tables that has a variant for it that can run it; NULL: neither. @can is asked for each line that
 * fits. Either table may be NULL.
 */
const struct exl3_tuned_line *exl3_tuned_pick(const struct exl3_tuned *first, const struct exl3_tuned *second,
					      const struct exl3_tuned_shape *shape, uint32_t m,
					      bool (*can)(const void *arg, const struct exl3_kernel *kernel),
					      const void *arg);

/* A work of @m rows of a shape, to ask supports() and select() with; not to be run: its pointers lead nowhere. */
struct exl3_tuned_probe {
	struct exl3_matrix matrix[EXL3_TUNED_SHARDS_MAX];
	const struct exl3_matrix *shards[EXL3_TUNED_SHARDS_MAX];
	struct exl3_rows rows;
	struct exl3_work work; /* borrows from the others */
};
void exl3_tuned_probe(struct exl3_tuned_probe *ret, const struct exl3_tuned_shape *shape, uint32_t m);

/* Variants that are not meant to be fast, only to compare with: their names end in _ref. */
bool exl3_kernel_is_reference(const struct exl3_kernel *k);

#ifdef __cplusplus
}
#endif
#endif
