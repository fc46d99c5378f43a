/* SPDX-License-Identifier: Apache-2.0 */
/* weights_model.h - a model on the fake backend: made, loaded, refused, searched; for the weight tests. */
#ifndef EXL3_TESTS_WEIGHTS_MODEL_H
#define EXL3_TESTS_WEIGHTS_MODEL_H

#include "tests/test.h"

#include "daemon/checkpoint.h"
#include "daemon/weights.h"
#include "kernels/format.h"
#include "tests/unit/fake_backend.h"

#include <sys/mman.h>
#include <sys/stat.h>

static inline struct exl3_model *new_model(const char *dir)
{
	struct exl3_model *m;
	struct exl3_error err;

	test_code(exl3_model_new("m", dir, &fake_ops, fake_dev(), &m, &err), 0, &err);
	assert_int_equal(m->state, EXL3_MODEL_NEW);
	return m;
}

static inline struct exl3_model *load(const char *dir)
{
	struct exl3_model *m = new_model(dir);

	test_code(exl3_model_load(m), 0, &m->error);
	assert_int_equal(m->state, EXL3_MODEL_READY);
	assert_int_equal(m->bytes_loaded, m->bytes_total);
	assert_int_equal(strlen(m->fingerprint), 32);
	return m;
}

/* Loads what must be refused with @want and words @say. */
static inline void refused(const char *dir, int want, const char *say)
{
	struct exl3_model *m = new_model(dir);
	int rc = exl3_model_load(m);

	if (rc != want || !strstr(m->error.text, say))
		fail_msg("returned %d, '%s'; wanted %d, '%s'", rc, m->error.text, want, say);
	assert_int_equal(m->state, EXL3_MODEL_FAILED);
	assert_int_equal(m->error.code, want);
	assert_null(m->slab);
	assert_int_equal(m->tensor_fd, -1);
	exl3_model_put(m);
}

static inline const struct exl3_module_desc *find(const struct exl3_model *m, const char *name,
						  enum exl3_module_kind kind)
{
	const struct exl3_module_desc *d = NULL;
	struct exl3_error err;

	test_code(exl3_model_find(m, name, kind, &d, NULL, NULL, &err), 0, &err);
	return d;
}

static inline void not_found(const struct exl3_model *m, const char *name,
			     enum exl3_module_kind kind, int want, const char *say)
{
	const struct exl3_module_desc *d = NULL;
	struct exl3_error err = {0};
	int rc = exl3_model_find(m, name, kind, &d, NULL, NULL, &err);

	if (rc != want || !strstr(err.text, say))
		fail_msg("%s: returned %d, '%s'; wanted %d, '%s'", name, rc, err.text, want, say);
	assert_null(d);
}

/* Is @name listed as left out, for a reason that contains @say? */
static inline bool skipped(const struct exl3_model *m, const char *name, const char *say)
{
	size_t n = strlen(name);

	for (uint32_t i = 0; i < m->nr_skipped; i++)
		if (!strncmp(m->skipped[i], name, n) && !strncmp(m->skipped[i] + n, ": ", 2) &&
		    strstr(m->skipped[i] + n, say))
			return true;
	return false;
}

/* A tensor's bytes from its file; to be freed. NULL: there is none. */
static inline void *from_file(const struct exl3_ckpt *ckpt, const char *module, const char *leaf,
			      uint64_t *bytes)
{
	const struct exl3_ckpt_tensor *t;
	struct exl3_error err;
	char name[700];
	void *p;

	snprintf(name, sizeof(name), "%s%s%s", module, leaf ? "." : "", leaf ? leaf : "");
	t = exl3_ckpt_find(ckpt, name);
	if (!t)
		return NULL;
	p = malloc(t->t->bytes + 1);
	assert_non_null(p);
	test_code(exl3_pread_all(ckpt->files[t->file].fd, name, p, t->t->bytes, t->t->begin, &err),
		  0, &err);
	*bytes = t->t->bytes;
	return p;
}

static inline void same_bytes(const struct exl3_ckpt *ckpt, const char *module, const char *leaf,
			      const void *got, uint64_t want)
{
	uint64_t bytes = 0;
	void *p = from_file(ckpt, module, leaf, &bytes);

	assert_non_null(p);
	assert_int_equal(bytes, want);
	assert_int_equal((uintptr_t)got % (leaf ? 256 : 64), 0);
	if (memcmp(p, got, bytes))
		fail_msg("%s.%s differs from its file", module, leaf ? leaf : "");
	free(p);
}

/* Every matrix and every other tensor of a model against the files that they came from. */
static inline void content(const struct exl3_model *m, const char *dir)
{
	struct exl3_ckpt ckpt;
	struct exl3_error err;
	struct stat st;
	char *tensors;
	int fd;

	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	for (uint32_t i = 0; i < m->nr_matrices; i++) {
		const struct exl3_named_matrix *mat = &m->matrices[i];

		assert_null(mat->unsupported);
		same_bytes(&ckpt, mat->name, "trellis", mat->m.trellis,
			   exl3_trellis_bytes(mat->m.k, mat->m.n, mat->m.rate2));
		same_bytes(&ckpt, mat->name, "suh", mat->m.suh, 2ull * mat->m.k);
		same_bytes(&ckpt, mat->name, "svh", mat->m.svh, 2ull * mat->m.n);
	}
	test_code(exl3_model_tensor_fd(m, &fd, &err), 0, &err);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_size, m->tensor_bytes);
	/* Nobody can change what all of them share, whatever is tried. */
	assert_int_equal(write(fd, "x", 1), -1);
	assert_ptr_equal(mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
	assert_ptr_equal(mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, m->tensor_fd, 0),
			 MAP_FAILED);
	assert_int_equal(ftruncate(m->tensor_fd, 0), -1);
	tensors = mmap(NULL, m->tensor_bytes, PROT_READ, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(tensors, MAP_FAILED);
	close(fd);
	for (uint32_t i = 0; i < m->nr_tensors; i++)
		same_bytes(&ckpt, m->tensors[i].name, NULL, tensors + m->tensors[i].offset,
			   m->tensors[i].bytes);
	munmap(tensors, m->tensor_bytes);
	exl3_ckpt_fini(&ckpt);
}

#endif
