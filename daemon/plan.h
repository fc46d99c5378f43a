/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - which tensors make which EXL3 matrix, what is left out and why, and where all of it goes.
 *
 * A module is an EXL3 matrix when it has .trellis, .suh or .su, and .svh or .sv. In the slab each
 * matrix lies as trellis, suh, svh, bias, every part at a multiple of 256 bytes. All other tensors are
 * kept as they are, one behind the other in a file of their own. What is stored is hashed in pieces of at
 * most EXL3_PIECE bytes of one part or tensor, in the order of the slab, then of the file: whoever maps
 * them later can check some of them or all.
 */
#ifndef EXL3_DAEMON_PLAN_H
#define EXL3_DAEMON_PLAN_H

#include "daemon/checkpoint.h"
#include "daemon/modelconf.h"
#include "daemon/weights.h"

#define EXL3_SLAB_ALIGN   256u
#define EXL3_TENSOR_ALIGN 64u
#define EXL3_PIECE        (1u << 20)
#define EXL3_PIECE_HASH   16u /* bytes: XXH3, 128 bits, canonical */

/* What becomes of a tensor. */
enum exl3_use {
	EXL3_USE_LEFT_OUT, /* read for the fingerprint only */
	EXL3_USE_PLAIN,    /* kept as it is */
	EXL3_USE_TRELLIS,
	EXL3_USE_SCALE,  /* suh, svh: f16, must be finite */
	EXL3_USE_SIGNS,  /* su, sv: packed signs; stored as f16 +-1 */
	EXL3_USE_BIAS,   /* f16, bf16 or f32; stored as f32 [n] */
	EXL3_USE_MARKER, /* names a codebook; its value must be the known multiplier */
};

struct exl3_plan_item {
	uint8_t use;
	uint32_t matrix; /* index, for the uses that belong to one */
	uint64_t offset; /* in the slab or the tensor file */
	uint64_t piece;  /* the first of its pieces */
};

/* How far slab, tensor file and pieces are taken. The places of all things follow from their order and
 * sizes alone, so what adopts a slab finds the same ones again. */
struct exl3_layout {
	uint64_t slab_bytes, tensor_bytes; /* to allocate */
	uint64_t weight_bytes;             /* of trellises, scales and biases */
	uint64_t nr_pieces;
};

enum exl3_part { EXL3_PART_TRELLIS, EXL3_PART_SUH, EXL3_PART_SVH, EXL3_PART_BIAS, EXL3_PARTS };

/* The next matrix: sets its offsets from its sizes; @piece: first piece of each part, or NULL. */
void exl3_layout_matrix(struct exl3_layout *layout, struct exl3_named_matrix *mat,
			uint64_t piece[EXL3_PARTS]);
/* The next tensor of the file: its offset; @piece: its first piece. */
uint64_t exl3_layout_tensor(struct exl3_layout *layout, uint64_t bytes, uint64_t *piece);
/* Where a part lies and how long it is; 0 bytes: there is no bias. */
uint64_t exl3_part_bytes(const struct exl3_named_matrix *mat, enum exl3_part part,
			 uint64_t *offset);
uint64_t exl3_pieces_of(uint64_t bytes);

struct exl3_plan {
	const struct exl3_ckpt *ckpt;       /* borrowed */
	struct exl3_plan_item **items;      /* owned; [file][tensor], in the order of the files */
	struct exl3_named_matrix *matrices; /* owned, sorted by name; the unsupported ones too */
	uint32_t nr_matrices;
	struct exl3_tensor_desc *tensors; /* owned, sorted by name */
	uint32_t nr_tensors;
	char **strays; /* owned; scales that have no trellis beside them */
	uint32_t nr_strays;
	struct exl3_layout layout;
	uint8_t (*pieces)[EXL3_PIECE_HASH]; /* owned; [layout.nr_pieces], filled in by the intake */
};

/* 0, -EINVAL (a matrix contradicts itself: file, tensor and reason), -EOPNOTSUPP (no trellis). */
int exl3_plan_make(const struct exl3_ckpt *ckpt, const struct exl3_modelconf *conf,
		   struct exl3_plan *ret, struct exl3_error *err);
void exl3_plan_fini(struct exl3_plan *plan); /* zeroed ones too */

/* Leaves a matrix out; the first reason stays. Returns 0 or -ENOMEM. */
int exl3_matrix_leave_out(struct exl3_named_matrix *mat, struct exl3_error *err, const char *fmt,
			  ...) __attribute__((format(printf, 3, 4)));

/* Free what these own, not the arrays themselves. */
void exl3_matrices_fini(struct exl3_named_matrix *matrices, uint32_t nr);
void exl3_tensors_fini(struct exl3_tensor_desc *tensors, uint32_t nr);

#endif
