/* SPDX-License-Identifier: Apache-2.0 */
/* npy.h - NumPy array files, as far as exl3ctl needs them. */
#ifndef EXL3_CLIENT_NPY_H
#define EXL3_CLIENT_NPY_H

#include "shm/util.h"

#include <stdbool.h>

#define EXL3_NPY_DIMS_MAX 8

/* An array in C order and the machine's byte order, whatever the file had. */
struct exl3_npy {
	char kind;     /* 'f', 'i' or 'u' */
	unsigned size; /* bytes of an element: 1, 2, 4 or 8 */
	unsigned nr_dims;
	uint64_t shape[EXL3_NPY_DIMS_MAX];
	uint64_t count; /* of elements: the product of shape */
	void *data;     /* owned; count * size bytes */
};

/**
 * exl3_npy_parse() - array from the bytes of a .npy file, format versions 1 to 3.
 * Takes little and big endian, C and Fortran order. Bytes after the last element are refused.
 * Returns 0, -EINVAL (no such file, or damaged), -EOPNOTSUPP (other element types), -ENOMEM.
 */
int exl3_npy_parse(const void *bytes, size_t size, struct exl3_npy *ret, struct exl3_error *err);
/* Reads a file to its end and parses it; the sentence starts with @path. Also errors of open and read. */
int exl3_npy_load(const char *path, struct exl3_npy *ret, struct exl3_error *err);
/* Writes a C-order array; @type as in the file: "f4", "f2", "u2". */
int exl3_npy_save(const char *path, const char *type, unsigned nr_dims, const uint64_t *shape,
		  const void *data, struct exl3_error *err);
void exl3_npy_fini(struct exl3_npy *a);

#endif
