/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk.h - how many rows of a request one launch takes, so that it ends within a given time. Pure.
 *
 * A long request runs as several launches of some of its rows each, and others get their turn in between.
 * Rows do not depend on each other, so the results are those of one launch; a kernel that is chosen by the
 * number of rows may sum in another order. In deterministic mode the slices follow from the request alone,
 * never from what was measured.
 *
 * The time of a launch is learned: per shape (not per module: layers are alike), for each power of two of
 * rows. What was never measured is taken to cost per row what fewer rows cost, or, if nothing is known, what
 * a slow device needs; so the first slices of a new shape are short and grow with what they show.
 */
#ifndef EXL3_DAEMON_CHUNK_H
#define EXL3_DAEMON_CHUNK_H

#include "daemon/check.h"

#include <stdbool.h>
#include <stdint.h>

#define EXL3_PACE_SHAPES  1024u /* shapes remembered; the least lately used one is forgotten */
#define EXL3_PACE_BUCKETS 14u   /* rows 1, 2..3, 4..7, ..., 8192 */

struct exl3_pace_shape {
	uint64_t key;  /* 0: unused */
	uint64_t used; /* exl3_pace.clock at its last use */
	float row_ns[EXL3_PACE_BUCKETS]; /* per row, 0: not measured */
};

/* One per device. Loop thread. */
struct exl3_pace {
	struct exl3_pace_shape shapes[EXL3_PACE_SHAPES];
	uint64_t clock;
	double mac_ns;       /* of an unknown shape: time of one multiply-add on a slow device of this kind */
	double fixed_mac_ns; /* of deterministic slices: of a typical one, never learned */
};

struct exl3_slice {
	uint32_t rows;
	uint64_t cost_ns; /* expected */
};

/* @gpu: what unknown shapes are taken to cost. */
void exl3_pace_init(struct exl3_pace *p, bool gpu);

/* Multiply-adds of one row; an upper bound where they depend on what the client's memory says. */
uint64_t exl3_chunk_macs(const struct exl3_checked *c);
/* What requests of equal cost per row have in common: operation, kernel, shapes, never 0. */
uint64_t exl3_chunk_key(const struct exl3_checked *c);

/**
 * exl3_chunk_next() - the next slice of a request.
 * @first: rows of it that have run, less than c->rows.m.
 * @chunk_ns: what the slice should take at most; 0: all that is left.
 * At least one row; rows are spread evenly over the slices that are expected to be needed.
 */
struct exl3_slice exl3_chunk_next(struct exl3_pace *p, const struct exl3_checked *c, uint32_t first,
				  uint64_t chunk_ns);
/* A launch of @rows rows of this shape took @ns. */
void exl3_chunk_learn(struct exl3_pace *p, const struct exl3_checked *c, uint32_t rows,
		      uint64_t ns);

#endif
