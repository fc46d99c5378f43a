/* SPDX-License-Identifier: Apache-2.0 */
/* make_ckpt.h - writes small checkpoints for tests, right ones and wrong ones. */
#ifndef EXL3_TESTS_MAKE_CKPT_H
#define EXL3_TESTS_MAKE_CKPT_H

#include <stddef.h>
#include <stdint.h>

/* A safetensors file that is being put together. */
struct mk;

struct mk *mk_new(void);
/* Adds a tensor; @dims ends with -1 (just -1: a scalar). @data NULL: filled from the name. */
void mk_tensor(struct mk *f, const char *name, const char *dtype, const int64_t *dims,
	       const void *data, size_t bytes);
#define MK_DIMS(...) ((const int64_t[]){__VA_ARGS__, -1})
#define MK_SCALAR    ((const int64_t[]){-1})

enum {
	MK_SIGNS = 1,    /* su and sv instead of suh and svh */
	MK_BIAS = 2,     /* f16 bias of n elements */
	MK_ONE_DIM = 4,  /* the marker has shape [1], not [] */
	MK_BOTH = 8,     /* both markers */
	MK_UNKNOWN = 16, /* another multiplier */
};
/* Trellis, finite scales and marker of one matrix. @codebook: 0 3inst, 1 mcg, 2 mul1. */
void mk_matrix(struct mk *f, const char *name, uint32_t k, uint32_t n, uint32_t rate2,
	       uint32_t codebook, unsigned flags);

/* Writes @dir/@name and frees @f. @pad: blanks behind the header, so that data starts anywhere. */
void mk_save(struct mk *f, const char *dir, const char *name, unsigned pad);
void mk_text(const char *dir, const char *name, const char *text);
void mk_bytes(const char *dir, const char *name, const void *data, size_t bytes);

/* A new folder of this test; mk_rmdir() removes it and what is in it, and frees the name. */
char *mk_dir(void);
void mk_rmdir(char *dir);

/* What mk_tensor() fills a tensor of that name with. */
void mk_fill(const char *name, void *data, size_t bytes);

#endif
