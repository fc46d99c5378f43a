/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exl3_map.h - a model's modules as a client of mapped mode gets them: a sealed file of plain structs.
 *
 *   0      head.bytes of each array, in this order, each padded to 8 bytes                    head.bytes
 *   | head | matrices [nr_matrices] | modules [nr_modules] | shards [nr_shards] | experts [nr_experts] | names |
 *
 * The daemon writes it (daemon/map_write.c) from what it serves itself; kernels/map.c reads it, checks every
 * number against every other, and makes what kernels want. Offsets of weights count from the beginning of the
 * model's slab, which comes as a descriptor of its own. Native byte order: it never leaves the machine. It is
 * sealed against every change, so that what was checked stays true.
 */
#ifndef EXL3_SHM_MAP_H
#define EXL3_SHM_MAP_H

#include "shm/exl3_abi.h"

#define EXL3_MAP_MAGIC     "EXL3MAP"
#define EXL3_MAP_VERSION   1u /* of everything here; a reader of another one refuses it */
#define EXL3_MAP_BYTES_MAX (512ull << 20)
#define EXL3_MAP_SHARDS    64u         /* of one module, at most */
#define EXL3_MAP_NONE      UINT32_MAX  /* no such matrix: gate of an expert that has none */

#define EXL3_MAP_DETERMINISTIC (1u << 0) /* all requests, as the daemon is configured */
#define EXL3_MAP_FLAGS         1u

struct exl3_map_head {
	char magic[8];
	uint32_t version;
	uint32_t flags;      /* EXL3_MAP_... */
	uint64_t bytes;      /* of the file */
	uint64_t slab_bytes; /* as slab_adopt() is to be told */
	uint64_t names_bytes;
	uint32_t nr_matrices, nr_modules, nr_shards, nr_experts;
	/* Texts end with a zero. */
	char backend[16];     /* "cpu", "cuda" */
	char uuid[64];        /* of the device, as exl3_dev_info: whoever maps must open this one */
	char driver[64];      /* likewise */
	char device[32];      /* the daemon's name for it, "cuda:0" */
	char fingerprint[40]; /* of the model's content */
	char model[EXL3_NAME_MAX + 8];
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_map_head) == 8 + 4 * 2 + 8 * 3 + 4 * 4 + 16 + 64 * 2 + 32 + 40 + 520,
		   "no gaps");

struct exl3_map_matrix {
	uint32_t k, n;         /* stored, multiples of 128 */
	uint32_t k_log, n_log; /* logical */
	uint8_t rate2;         /* 2 * bits per weight */
	uint8_t codebook;      /* enum exl3_codebook */
	uint8_t bias;          /* 1: bias counts */
	uint8_t reserved[5];
	uint64_t trellis;      /* [k/16, n/16, 8 * rate2] u16; offsets in the slab, multiples of 16 */
	uint64_t suh;          /* [k] f16 */
	uint64_t svh;          /* [n] f16 */
	uint64_t bias_at;      /* [n] f32 */
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_map_matrix) == 56, "no gaps");

/* Sorted by name and kind, each pair once. */
struct exl3_map_module {
	uint32_t name;         /* offset in names, where it ends with a zero */
	uint8_t kind;          /* 1 linear, 2 routed experts, 3 MLP */
	uint8_t act;           /* enum exl3_act, of experts and MLPs; else 0 */
	uint16_t reserved;
	uint32_t first, nr;    /* linear: in shards; else in experts */
	float limit;           /* of the activation, 0: none */
	float routed_scale;    /* 1: none */
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_map_module) == 24, "no gaps");

/* Shards: uint32_t, a matrix each. */

/* y = down(act(gate(x), up(x))) */
struct exl3_map_expert {
	uint32_t gate, up, down; /* matrices; gate may be EXL3_MAP_NONE */
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_map_expert) == 12, "no gaps");

/* Where each array begins. */
struct exl3_map_layout {
	uint64_t matrices, modules, shards, experts, names, end;
};

static inline void exl3_map_layout(const struct exl3_map_head *h, struct exl3_map_layout *ret)
{
	/* Counts have 32 bits: nothing here can overflow. */
	ret->matrices = sizeof(*h);
	ret->modules = ret->matrices + (uint64_t)h->nr_matrices * sizeof(struct exl3_map_matrix);
	ret->shards = ret->modules + (uint64_t)h->nr_modules * sizeof(struct exl3_map_module);
	ret->experts = (ret->shards + 4ull * h->nr_shards + 7) & ~7ull;
	ret->names = (ret->experts + (uint64_t)h->nr_experts * sizeof(struct exl3_map_expert) + 7) & ~7ull;
	ret->end = ret->names + (h->names_bytes < EXL3_MAP_BYTES_MAX ? h->names_bytes : EXL3_MAP_BYTES_MAX);
}

/*
 * What daemon and client share of one mapping, in a segment of its own: the daemon sets revoked, before it ends the
 * socket that came with it. From then on the client starts nothing with these weights; it lets go of them when what
 * it has running ends, and closes its end of the socket, by which the daemon knows.
 */
struct exl3_map_state {
	uint32_t revoked; /* atomic; 0, or 1 */
	uint32_t pad[15];
};

#endif
