/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.h - the header of one file: which tensor lies where, every claim checked.
 *
 *   0        8                  8 + n                                        size
 *   | n: u64 | JSON, n bytes    | tensor | tensor | ...                         |
 *              name -> dtype, shape, data_offsets [begin, end) from 8 + n
 *
 * The data section is covered without gaps or overlaps, in any order of names. Nothing in it is
 * aligned. Source: the format's own description; limits are ours.
 */
#ifndef EXL3_DAEMON_SAFETENSORS_H
#define EXL3_DAEMON_SAFETENSORS_H

#include "shm/util.h"

#include <time.h>

#define EXL3_ST_HEADER_MAX  100000000u /* bytes of a header */
#define EXL3_ST_DIMS_MAX    8
#define EXL3_ST_TENSORS_MAX 4000000u /* of one file */

struct exl3_st_dtype {
	char name[8];
	uint8_t bits; /* of one element */
};

struct exl3_st_tensor {
	char *name; /* owned */
	const struct exl3_st_dtype *dtype;
	uint32_t nr_dims;
	uint64_t shape[EXL3_ST_DIMS_MAX];
	uint64_t count;        /* elements */
	uint64_t begin, bytes; /* place in the file */
};

struct exl3_st_file {
	char *name;                     /* owned; within its directory */
	int fd;                         /* owned, or -1 */
	uint64_t bytes;                 /* of the file */
	uint64_t data;                  /* where the data section starts */
	struct timespec mtime;          /* with bytes: is the content still what was checked? */
	struct exl3_st_tensor *tensors; /* owned, in the order of their data */
	uint32_t nr_tensors;
};

/**
 * exl3_st_parse() - check a header and list its tensors.
 * @file:   its name, fd, bytes and data are set; gets tensors and nr_tensors.
 * @header: the JSON, file->data - 8 bytes.
 * Returns 0, -EINVAL (file, tensor and reason), -ENOMEM.
 */
int exl3_st_parse(struct exl3_st_file *file, const char *header, struct exl3_error *err);

/* Opens @dirfd/@name and parses it. -ENOENT, -EINVAL, -ENOMEM, or what the file system says. */
int exl3_st_open(int dirfd, const char *name, struct exl3_st_file *ret, struct exl3_error *err);
void exl3_st_fini(struct exl3_st_file *file); /* zeroed ones too, if fd is -1 */

/* 0 if the file is what it was when it was opened, else -EINVAL. */
int exl3_st_unchanged(const struct exl3_st_file *file, struct exl3_error *err);

const struct exl3_st_dtype *exl3_st_dtype_find(const char *name); /* NULL: no such dtype */

#endif
