/* SPDX-License-Identifier: Apache-2.0 */
/*
 * manifest.h - a loaded model as a sealed file: what a later worker needs to serve the same slab again.
 *
 *   0                      sizeof(head)                                              head.bytes
 *   | head: magic, version | origin, files, config.json, matrices, tensors, strays, pieces |
 *     hash covers all of it, the head with a hash of zero
 *
 * It is written by one worker, kept as a descriptor by the supervisor and by systemd, and read by another
 * worker, maybe of another version of the program. So its reader trusts nothing: the seals say that nobody
 * can change it while it is read, the hash that it is what was written, and everything that follows from
 * something else (offsets, sizes, logical sizes, the number of pieces) is computed again and compared.
 */
#ifndef EXL3_DAEMON_MANIFEST_H
#define EXL3_DAEMON_MANIFEST_H

#include "daemon/plan.h"

#define EXL3_MANIFEST_MAGIC   "EXL3KEPT"
#define EXL3_MANIFEST_VERSION 1u /* a reader of another version loads the model anew */
#define EXL3_MANIFEST_MAX     (256u << 20)
#define EXL3_MANIFEST_SLABS   1u /* of one model */
#define EXL3_KEPT_FDS         (2u + EXL3_MANIFEST_SLABS) /* manifest, slabs, tensor file */

#define EXL3_MANIFEST_BY_CLIENT      (1u << 0) /* loaded at run time, not named by the configuration */
#define EXL3_MANIFEST_DEVICE_TENSORS (1u << 1) /* with unquantized = device */
#define EXL3_MANIFEST_FLAGS          3u

/* All that the supervisor looks at. Native byte order: it never leaves the machine. */
struct exl3_manifest_head {
	char magic[8];
	uint32_t version;
	uint32_t nr_slabs;     /* 1..EXL3_MANIFEST_SLABS */
	uint64_t bytes;        /* of the file */
	uint64_t slab_bytes;   /* as slab_new() was asked for */
	uint64_t tensor_bytes; /* of the tensor file, 0: there is none */
	uint64_t instance;     /* of the daemon whose worker loaded it */
	uint32_t generation;   /* of that worker */
	uint32_t flags;        /* EXL3_MANIFEST_... */
	uint8_t hash[EXL3_PIECE_HASH];
	char device[64]; /* exl3_dev_info.uuid; ends with a zero, as the next two */
	char name[EXL3_NAME_MAX + 1];
	char path[4096]; /* the checkpoint as the configuration or a client named it; absolute */
	char padding[7];
};

/* A file of the checkpoint, to see whether it is still the one that was loaded. */
struct exl3_manifest_file {
	char *name; /* owned; within the model's folder */
	uint64_t bytes, inode, dev;
	int64_t mtime_s, mtime_ns;
};

struct exl3_manifest {
	struct exl3_manifest_head head;
	char *path; /* owned, as everything below; where head.path really led */
	char fingerprint[33];
	char backend[16], driver[64];
	uint64_t data_bytes; /* of all tensors of the checkpoint */
	struct exl3_manifest_file *files;
	uint32_t nr_files;
	cJSON *config; /* config.json, or NULL: there was none */
	struct exl3_named_matrix *matrices;
	uint32_t nr_matrices;
	struct exl3_tensor_desc *tensors;
	uint32_t nr_tensors;
	char **strays;
	uint32_t nr_strays;
	uint8_t (*pieces)[EXL3_PIECE_HASH]; /* [layout.nr_pieces] */
	struct exl3_layout layout;          /* follows from the tables */
};

/**
 * exl3_manifest_write() - a new memfd with all of @man, fully sealed.
 * @man: its head needs no magic, version, bytes or hash; the layout is that of its tables.
 * Returns 0 (*ret is the caller's), -ENOMEM, -EFBIG, or what the kernel says. Any thread.
 */
int exl3_manifest_write(const struct exl3_manifest *man, int *ret, struct exl3_error *err);

/**
 * exl3_manifest_read() - check a manifest from its first to its last byte.
 * @fd: stays the caller's.
 * Returns 0 (exl3_manifest_fini()), -EINVAL (not sealed, broken, contradicts itself), -EOPNOTSUPP
 * (another version), -ENOMEM. The sentence says what is wrong. Any thread.
 */
int exl3_manifest_read(int fd, struct exl3_manifest *ret, struct exl3_error *err);
void exl3_manifest_fini(struct exl3_manifest *man); /* zeroed ones too */

/* Only the head, cheaply: seals, size, magic, version, strings that end. For the supervisor. */
int exl3_manifest_peek(int fd, struct exl3_manifest_head *ret, struct exl3_error *err);

/* What the files of @path are now; @ret and @nr are for the manifest. */
int exl3_manifest_list_files(const struct exl3_ckpt *ckpt, const char *path,
			     struct exl3_manifest_file **ret, uint32_t *nr, struct exl3_error *err);
void exl3_manifest_files_fini(struct exl3_manifest_file *files, uint32_t nr);
/* 0: the folder holds what was loaded; -ESTALE: something else, err says which file and how. */
int exl3_manifest_check_files(const struct exl3_manifest *man, struct exl3_error *err);

#endif
