/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt.c - a model from weights that are in the device's memory already, instead of from its files.
 *
 * Order: manifest (all of it checked), whose weights they are, files, slab and tensor file mapped, hashes,
 * then the same tables as after a load. A worker that finds anything wrong says what, and loads.
 */
#include "daemon/fault.h"
#include "daemon/manifest.h"
#include "daemon/modules.h"
#include "daemon/weights.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define SAMPLES      64u /* pieces that are hashed where not all of them are */
#define VERIFIERS    4u  /* threads, where all of them are */
#define BATCH        16u /* pieces that one of these reads at a time */
#define TENSOR_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

/* ---- hashes ---- */

struct piece {
	const char *name;    /* borrowed from the manifest */
	bool in_slab;
	uint64_t offset;     /* in slab or tensor file */
	uint64_t into;       /* in the part or tensor, for the sentence */
	uint64_t number;
	size_t bytes;
};

/* Several threads take piece after piece: reading is one at a time, as the device wants it, hashing is not. */
struct verify {
	struct exl3_model *m; /* borrowed, with slab and tensor file; as the next one */
	const struct exl3_manifest *man;
	uint64_t pick[SAMPLES];
	uint32_t nr_picks; /* 0: every piece */
	uint32_t batch;    /* pieces that are taken at a time */

	pthread_mutex_t lock; /* all that follows */
	uint32_t next_pick;
	uint64_t number; /* of the next piece */
	/* The part or tensor that it is in: [0, nr_matrices * EXL3_PARTS) are parts, then tensors. */
	uint64_t range, range_done, range_offset, range_bytes;
	int rc; /* the first failure */
	struct exl3_error err;
};

struct verifier {
	struct verify *v;
	char *buf; /* owned; staging memory for a batch */
	pthread_t thread;
	bool started;
};

/* One out of each of SAMPLES equal parts. */
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

/* Where the part or tensor number v->range lies; false: there are no more. */
static bool look_at_range(struct verify *v)
{
	const struct exl3_manifest *man = v->man;
	uint64_t parts = (uint64_t)man->nr_matrices * EXL3_PARTS;

	v->range_done = v->range_bytes = 0; /* also at the end: whoever asks again gets the same answer */
	if (v->range >= parts + man->nr_tensors)
		return false;
	if (v->range < parts) {
		const struct exl3_named_matrix *mat = &man->matrices[v->range / EXL3_PARTS];

		v->range_bytes = exl3_part_bytes(mat, (enum exl3_part)(v->range % EXL3_PARTS),
						 &v->range_offset);
		if (!mat->placed)
			v->range_bytes = 0;
	} else {
		v->range_offset = man->tensors[v->range - parts].offset;
		v->range_bytes = man->tensors[v->range - parts].bytes;
	}
	return true;
}

/* The next one in the order of the manifest's hashes; false: there are no more. */
static bool next_piece(struct verify *v, struct piece *p)
{
	const struct exl3_manifest *man = v->man;
	uint64_t parts = (uint64_t)man->nr_matrices * EXL3_PARTS, left;

	while (v->range_done == v->range_bytes) {
		v->range++;
		if (!look_at_range(v))
			return false;
	}
	left = v->range_bytes - v->range_done;
	p->in_slab = v->range < parts;
	p->name = p->in_slab ? man->matrices[v->range / EXL3_PARTS].name
			     : man->tensors[v->range - parts].name;
	p->offset = v->range_offset + v->range_done;
	p->into = v->range_done;
	p->number = v->number++;
	p->bytes = left < EXL3_PIECE ? (size_t)left : EXL3_PIECE;
	v->range_done += p->bytes;
	return true;
}

static bool next_wanted(struct verify *v, struct piece *p)
{
	while (next_piece(v, p)) {
		if (!v->nr_picks)
			return true;
		if (v->next_pick < v->nr_picks && p->number == v->pick[v->next_pick]) {
			v->next_pick++;
			return true;
		}
	}
	return false;
}

static int check_hash(const struct verify *v, const struct piece *p, const char *bytes,
		      struct exl3_error *err)
{
	XXH128_canonical_t c;

	XXH128_canonicalFromHash(&c, XXH3_128bits(bytes, p->bytes));
	if (memcmp(c.digest, v->man->pieces[p->number], EXL3_PIECE_HASH) == 0)
		return 0;
	return exl3_errf(err, -EBADMSG, "'%.160s' is not what was loaded, at byte %llu", p->name,
			 (unsigned long long)p->into);
}

/* Reads pieces [0, nr) into @buf, one behind the other. Those of the slab lie so too: one read for a run of them. */
static int read_batch(struct verify *v, const struct piece *p, uint32_t nr, char *buf,
		      struct exl3_error *err)
{
	const struct exl3_model *m = v->m;
	int rc = 0;

	for (uint32_t i = 0, n; rc == 0 && i < nr; i += n) {
		size_t bytes = p[i].bytes;

		for (n = 1; i + n < nr && p[i + n].in_slab == p[i].in_slab &&
			    p[i + n].offset == p[i].offset + bytes;
		     n++)
			bytes += p[i + n].bytes;
		if (exl3_fault("adopt.read"))
			rc = exl3_errf(err, -EIO, "reading what was kept (fault injection)");
		else if (p[i].in_slab)
			rc = m->ops->slab_read(m->slab, p[i].offset, buf, bytes, err);
		else
			rc = exl3_pread_all(m->tensor_fd, p[i].name, buf, bytes, p[i].offset, err);
		buf += bytes;
	}
	return rc;
}

/* Some pieces; false: that was all, or somebody has failed. */
static bool verify_next(struct verify *v, char *buf)
{
	struct piece p[BATCH];
	struct exl3_error err;
	uint32_t nr = 0;
	int rc = 0;

	pthread_mutex_lock(&v->lock);
	while (v->rc == 0 && nr < v->batch && next_wanted(v, &p[nr]))
		nr++;
	if (nr && v->m->cancel)
		rc = exl3_errf(&err, -ECANCELED, "it was cancelled");
	if (rc == 0)
		rc = read_batch(v, p, nr, buf, &err);
	pthread_mutex_unlock(&v->lock);
	for (uint32_t i = 0; rc == 0 && i < nr; i++) {
		rc = check_hash(v, &p[i], buf, &err);
		buf += p[i].bytes;
	}
	if (rc == 0)
		return nr > 0;
	pthread_mutex_lock(&v->lock);
	if (v->rc == 0) {
		v->rc = rc;
		v->err = err;
	}
	pthread_mutex_unlock(&v->lock);
	return false;
}

static void *verifier_main(void *arg)
{
	struct verifier *t = arg;

	while (verify_next(t->v, t->buf))
		;
	return NULL;
}

/* The first is this thread; those that cannot be had are done without. */
static int run_verifiers(struct verify *v, struct verifier *threads, struct exl3_error *err)
{
	struct exl3_model *m = v->m;
	unsigned nr = v->nr_picks ? 1 : VERIFIERS;

	for (unsigned i = 0; i < nr; i++) {
		threads[i].v = v;
		threads[i].buf = m->ops->staging_new(m->dev, v->batch * (size_t)EXL3_PIECE);
		if (!threads[i].buf && !i)
			return exl3_errf(err, -ENOMEM, "no memory to verify them");
	}
	for (unsigned i = 1; i < nr; i++)
		threads[i].started = threads[i].buf && pthread_create(&threads[i].thread, NULL,
								      verifier_main,
								      &threads[i]) == 0;
	verifier_main(&threads[0]);
	for (unsigned i = 1; i < nr; i++) {
		if (threads[i].started)
			pthread_join(threads[i].thread, NULL);
	}
	if (v->rc < 0)
		*err = v->err;
	return v->rc;
}

static int verify(struct exl3_model *m, const struct exl3_manifest *man, bool all,
		  struct exl3_error *err)
{
	struct verifier threads[VERIFIERS] = {0};
	struct verify v = {.m = m, .man = man, .lock = PTHREAD_MUTEX_INITIALIZER};
	int rc;

	if (!all)
		pick_samples(&v);
	v.batch = v.nr_picks ? 1 : BATCH;
	look_at_range(&v);
	rc = run_verifiers(&v, threads, err);
	for (unsigned i = 0; i < VERIFIERS; i++) {
		if (threads[i].buf)
			m->ops->staging_free(m->dev, threads[i].buf,
					     v.batch * (size_t)EXL3_PIECE);
	}
	pthread_mutex_destroy(&v.lock);
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
	if (exl3_fault("adopt.slab"))
		return exl3_errf(err, -EIO, "mapping a slab (fault injection)");
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
		rc = exl3_model_place_tensors(m, err);
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
