/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt.c - a model from weights that are in the device's memory already, instead of from its files.
 *
 * Order: manifest (all of it checked), whose weights they are, files, slab and tensor file mapped, hashes,
 * then the same tables as after a load. A worker that finds anything wrong says what, and loads.
 */
#include "daemon/manifest.h"
#include "daemon/modules.h"
#include "daemon/weights.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define SAMPLES      64u /* pieces that are hashed where not all of them are */
#define TENSOR_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

/* ---- hashes ---- */

/* Goes through all pieces in their order. */
struct verify {
	struct exl3_model *m; /* with slab and tensor file */
	const struct exl3_manifest *man;
	char *buf; /* owned; EXL3_PIECE bytes of staging memory */
	uint64_t pick[SAMPLES];
	uint32_t nr_picks, next; /* 0 picks: every piece */
	uint64_t at;             /* number of the next piece */
};

/* One out of each of SAMPLES equal parts, never the same ones twice in a row. */
static void pick_samples(struct verify *v)
{
	uint64_t nr = v->man->layout.nr_pieces, random[SAMPLES];

	if (nr <= SAMPLES)
		return;
	if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random))
		return; /* then all of them */
	v->nr_picks = SAMPLES;
	for (uint32_t i = 0; i < SAMPLES; i++) {
		uint64_t from = nr * i / SAMPLES, to = nr * (i + 1) / SAMPLES;

		v->pick[i] = from + random[i] % (to - from);
	}
}

static bool wanted(struct verify *v)
{
	if (!v->nr_picks)
		return true;
	if (v->next == v->nr_picks || v->at != v->pick[v->next])
		return false;
	v->next++;
	return true;
}

static int check_hash(const struct verify *v, size_t bytes)
{
	XXH128_canonical_t c;

	XXH128_canonicalFromHash(&c, XXH3_128bits(v->buf, bytes));
	return memcmp(c.digest, v->man->pieces[v->at], EXL3_PIECE_HASH) ? -EINVAL : 0;
}

/* The pieces of one part, or of one tensor (@mat NULL). */
static int verify_range(struct verify *v, const char *name, bool in_slab, uint64_t offset,
			uint64_t bytes, struct exl3_error *err)
{
	for (uint64_t done = 0; done < bytes; v->at++) {
		size_t n = bytes - done < EXL3_PIECE ? (size_t)(bytes - done) : EXL3_PIECE;
		int rc;

		if (wanted(v)) {
			if (v->m->cancel)
				return exl3_errf(err, -ECANCELED, "it was cancelled");
			rc = in_slab ? v->m->ops->slab_read(v->m->slab, offset + done, v->buf, n, err)
				     : exl3_pread_all(v->m->tensor_fd, name, v->buf, n,
						      offset + done, err);
			if (rc < 0)
				return rc;
			if (check_hash(v, n) < 0)
				return exl3_errf(err, -EBADMSG,
						 "'%.160s' is not what was loaded, at byte %llu", name,
						 (unsigned long long)done);
		}
		done += n;
	}
	return 0;
}

static int verify(struct exl3_model *m, const struct exl3_manifest *man, bool all,
		  struct exl3_error *err)
{
	struct verify v = {.m = m, .man = man};
	int rc = 0;

	v.buf = m->ops->staging_new(m->dev, EXL3_PIECE);
	if (!v.buf)
		return exl3_errf(err, -ENOMEM, "no memory to verify them");
	if (!all)
		pick_samples(&v);
	for (uint32_t i = 0; rc == 0 && i < man->nr_matrices; i++) {
		const struct exl3_named_matrix *mat = &man->matrices[i];

		for (int part = 0; rc == 0 && mat->placed && part < EXL3_PARTS; part++) {
			uint64_t offset, bytes = exl3_part_bytes(mat, (enum exl3_part)part, &offset);

			rc = verify_range(&v, mat->name, true, offset, bytes, err);
		}
	}
	for (uint32_t i = 0; rc == 0 && i < man->nr_tensors; i++)
		rc = verify_range(&v, man->tensors[i].name, false, man->tensors[i].offset,
				  man->tensors[i].bytes, err);
	m->ops->staging_free(m->dev, v.buf, EXL3_PIECE);
	return rc;
}

/* ---- whose they are ---- */

static int check_origin(const struct exl3_model *m, const struct exl3_manifest *man,
			struct exl3_error *err)
{
	struct exl3_dev_info info = {0};

	m->ops->info(m->dev, &info);
	if (strcmp(man->head.name, m->name) != 0)
		return exl3_errf(err, -EINVAL, "they are those of model '%.100s'", man->head.name);
	if (strcmp(man->head.path, m->asked) != 0)
		return exl3_errf(err, -EINVAL, "they are of %.200s", man->head.path);
	if (strcmp(man->backend, m->ops->name) != 0 || strcmp(man->head.device, info.uuid) != 0)
		return exl3_errf(err, -EINVAL, "they are on %s %s, this worker has %s %s",
				 man->backend, man->head.device, m->ops->name, info.uuid);
	if (strcmp(man->driver, info.driver) != 0)
		return exl3_errf(err, -EINVAL, "they were made with driver %s, this one is %s",
				 man->driver, info.driver);
	return 0;
}

static int check_files(const struct exl3_model *m, const struct exl3_manifest *man,
		       struct exl3_error *err)
{
	/* A link that leads to another folder by now is how checkpoints are exchanged. */
	if (strcmp(man->path, m->path) != 0)
		return exl3_errf(err, -ESTALE, "%.200s led to %.200s", m->asked, man->path);
	return exl3_manifest_check_files(man, err);
}

/* ---- mapping ---- */

static int dup_fd(int fd, int *ret, struct exl3_error *err)
{
	*ret = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	return *ret < 0 ? exl3_errf(err, -errno, "descriptor: %m") : 0;
}

static int adopt_slab(struct exl3_model *m, const struct exl3_manifest *man, int fd,
		      struct exl3_error *err)
{
	exl3_auto(exl3_closep) int own = -1;
	uint64_t bytes = man->layout.slab_bytes;
	int rc = fd < 0 ? exl3_errf(err, -EINVAL, "their slab is missing") : dup_fd(fd, &own, err);

	if (rc < 0)
		return rc;
	if (!m->ops->slab_adopt)
		return exl3_errf(err, -EOPNOTSUPP, "this backend cannot");
	rc = m->ops->slab_adopt(m->dev, own, bytes ? bytes : EXL3_SLAB_ALIGN, &m->slab, err);
	if (rc == 0)
		exl3_take_fd(&own);
	return rc;
}

static int adopt_tensors(struct exl3_model *m, const struct exl3_manifest *man, int fd,
			 struct exl3_error *err)
{
	uint64_t want = man->layout.tensor_bytes;
	struct stat st;
	int seals;

	if (!want)
		return fd < 0 ? 0 : exl3_errf(err, -EINVAL, "a tensor file that they do not have");
	if (fd < 0)
		return exl3_errf(err, -EINVAL, "their tensor file is missing");
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || (seals & TENSOR_SEALS) != TENSOR_SEALS || fstat(fd, &st) < 0)
		return exl3_errf(err, -EINVAL, "their tensor file is not sealed");
	if ((uint64_t)st.st_size != want)
		return exl3_errf(err, -EINVAL, "their tensor file has %lld bytes instead of %llu",
				 (long long)st.st_size, (unsigned long long)want);
	return dup_fd(fd, &m->tensor_fd, err);
}

/* ---- the model ---- */

/* Takes over the tables, as load_plan() does. */
static int make_modules(struct exl3_model *m, struct exl3_manifest *man, struct exl3_error *err)
{
	struct exl3_modelconf conf;
	char *type;

	exl3_modelconf_init(&conf, man->config);
	type = strdup(conf.model_type);
	if (!type)
		return exl3_errf(err, -ENOMEM, "out of memory");
	free(m->model_type);
	m->model_type = type;
	m->tied = conf.tied;
	m->weight_bytes = man->layout.weight_bytes;
	m->tensor_bytes = man->layout.tensor_bytes;
	m->overhead_bytes = m->slab->bytes - man->layout.weight_bytes;
	m->matrices = exl3_take_ptr(&man->matrices);
	m->nr_matrices = man->nr_matrices;
	m->tensors = exl3_take_ptr(&man->tensors);
	m->nr_tensors = man->nr_tensors;
	man->nr_matrices = man->nr_tensors = 0;
	memcpy(m->fingerprint, man->fingerprint, sizeof(m->fingerprint));
	atomic_store(&m->bytes_total, man->data_bytes);
	atomic_store(&m->bytes_loaded, man->data_bytes);
	exl3_model_set_addresses(m);
	return exl3_modules_make(m, &conf, man->strays, man->nr_strays, err);
}

static int adopt(struct exl3_model *m, const struct exl3_kept_fds *fds, unsigned flags,
		 struct exl3_manifest *man, struct exl3_error *err)
{
	int rc = check_origin(m, man, err), stale = 0;
	struct exl3_error why = {0};

	if (rc == 0 && !(flags & EXL3_ADOPT_ANY_FILES))
		stale = check_files(m, man, &why);
	if (rc == 0)
		rc = adopt_slab(m, man, fds->slab, err);
	if (rc == 0)
		rc = adopt_tensors(m, man, fds->tensors, err);
	if (rc == 0)
		rc = verify(m, man, flags & EXL3_ADOPT_VERIFY_ALL, err);
	/* Only now: they may have to be used all the same, so they must be sound. */
	if (rc == 0 && stale < 0) {
		*err = why;
		return stale;
	}
	if (rc == 0)
		rc = make_modules(m, man, err);
	if (rc == 0)
		rc = dup_fd(fds->manifest, &m->manifest_fd, err);
	/* Whatever a part of it calls -ESTALE is not what this function means by it. */
	return rc == -ESTALE ? -EINVAL : rc;
}

int exl3_model_adopt(struct exl3_model *m, const struct exl3_kept_fds *fds, unsigned flags,
		     struct exl3_error *err)
{
	struct exl3_manifest man;
	int rc;

	atomic_store(&m->state, EXL3_MODEL_LOADING);
	rc = exl3_manifest_read(fds->manifest, &man, err);
	if (rc == 0) {
		rc = adopt(m, fds, flags, &man, err);
		exl3_manifest_fini(&man);
	}
	if (rc < 0) {
		exl3_model_unload_parts(m);
		atomic_store(&m->bytes_total, 0);
		atomic_store(&m->bytes_loaded, 0);
		atomic_store(&m->state, EXL3_MODEL_NEW);
		return rc;
	}
	m->error = (struct exl3_error){0};
	atomic_store_explicit(&m->state, EXL3_MODEL_READY, memory_order_release);
	return 0;
}
