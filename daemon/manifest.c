/* SPDX-License-Identifier: Apache-2.0 */
/* manifest.c - a loaded model as a sealed file: written once, checked by whoever reads it. */
#include "daemon/manifest.h"

#include "daemon/config.h"
#include "daemon/loader.h"
#include "daemon/manifest_io.h"
#include "kernels/format.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

_Static_assert(sizeof(struct exl3_manifest_head) == 8 + 4 * 2 + 8 * 4 + 4 * 2 + 16 + 64 + 513 + 4096 + 7,
	       "the head has no gaps that would hold anything");

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)

/* Of the whole file, the place of the hash itself as zeros. */
static void hash_of(const char *file, size_t bytes, uint8_t ret[EXL3_PIECE_HASH])
{
	XXH3_state_t *state = XXH3_createState();
	struct exl3_manifest_head head;
	XXH128_canonical_t c;

	memset(ret, 0, EXL3_PIECE_HASH); /* without memory: a hash that nothing has */
	if (!state)
		return;
	memcpy(&head, file, sizeof(head));
	memset(head.hash, 0, sizeof(head.hash));
	XXH3_128bits_reset(state);
	XXH3_128bits_update(state, &head, sizeof(head));
	XXH3_128bits_update(state, file + sizeof(head), bytes - sizeof(head));
	XXH128_canonicalFromHash(&c, XXH3_128bits_digest(state));
	XXH3_freeState(state);
	memcpy(ret, c.digest, EXL3_PIECE_HASH);
}

/* ---- writing ---- */

static void put_matrix(struct exl3_out *o, const struct exl3_named_matrix *mat)
{
	exl3_put_text(o, mat->name);
	exl3_put_text(o, mat->unsupported ? mat->unsupported : "");
	exl3_put_u32(o, mat->placed);
	if (!mat->placed)
		return;
	exl3_put_u32(o, mat->m.k);
	exl3_put_u32(o, mat->m.n);
	exl3_put_u32(o, mat->m.k_log);
	exl3_put_u32(o, mat->m.n_log);
	exl3_put_u32(o, mat->m.rate2);
	exl3_put_u32(o, mat->m.codebook);
	exl3_put_u32(o, mat->has_bias);
	exl3_put_u64(o, mat->trellis_off);
	exl3_put_u64(o, mat->suh_off);
	exl3_put_u64(o, mat->svh_off);
	exl3_put_u64(o, mat->bias_off);
}

static void put_tensor(struct exl3_out *o, const struct exl3_tensor_desc *t)
{
	exl3_put_text(o, t->name);
	exl3_put_text(o, t->dtype);
	exl3_put_u32(o, t->nr_dims);
	for (uint32_t d = 0; d < t->nr_dims && d < EXL3_ST_DIMS_MAX; d++)
		exl3_put_u64(o, t->shape[d]);
	exl3_put_u64(o, t->bytes);
	exl3_put_u64(o, t->offset);
}

static void put_body(struct exl3_out *o, const struct exl3_manifest *man, const char *config)
{
	exl3_put_text(o, man->path);
	exl3_put_text(o, man->fingerprint);
	exl3_put_text(o, man->backend);
	exl3_put_text(o, man->driver);
	exl3_put_u64(o, man->data_bytes);
	exl3_put_u32(o, man->nr_files);
	for (uint32_t i = 0; i < man->nr_files; i++) {
		const struct exl3_manifest_file *f = &man->files[i];

		exl3_put_text(o, f->name);
		exl3_put_u64(o, f->bytes);
		exl3_put_u64(o, f->inode);
		exl3_put_u64(o, f->dev);
		exl3_put_u64(o, (uint64_t)f->mtime_s);
		exl3_put_u64(o, (uint64_t)f->mtime_ns);
	}
	exl3_put_text(o, config);
	exl3_put_u32(o, man->nr_matrices);
	for (uint32_t i = 0; i < man->nr_matrices; i++)
		put_matrix(o, &man->matrices[i]);
	exl3_put_u32(o, man->nr_tensors);
	for (uint32_t i = 0; i < man->nr_tensors; i++)
		put_tensor(o, &man->tensors[i]);
	exl3_put_u32(o, man->nr_strays);
	for (uint32_t i = 0; i < man->nr_strays; i++)
		exl3_put_text(o, man->strays[i]);
	exl3_put_u64(o, man->layout.nr_pieces);
	exl3_put_bytes(o, man->pieces, man->layout.nr_pieces * sizeof(*man->pieces));
}

static int to_memfd(const char *p, size_t bytes, int *ret, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int fd =
		memfd_create("exl3-manifest", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return exl3_errf(err, -errno, "manifest: memfd_create: %m");
	for (size_t done = 0; done < bytes;) {
		ssize_t n = write(fd, p + done, bytes - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return exl3_errf(err, n < 0 && errno != ENOSPC ? -errno : -ENOMEM,
					 "manifest: no memory for %zu bytes: %m", bytes);
		done += (size_t)n;
	}
	if (fcntl(fd, F_ADD_SEALS, SEALS) < 0)
		return exl3_errf(err, -errno, "manifest: cannot be sealed: %m");
	*ret = exl3_take_fd(&fd);
	return 0;
}

int exl3_manifest_write(const struct exl3_manifest *man, int *ret, struct exl3_error *err)
{
	struct exl3_manifest_head head = man->head;
	char *config = man->config ? cJSON_PrintUnformatted(man->config) : strdup("");
	struct exl3_out o = {0};
	int rc;

	if (!config)
		return exl3_errf(err, -ENOMEM, "manifest: out of memory");
	exl3_put_bytes(&o, &head, sizeof(head)); /* its place */
	put_body(&o, man, config);
	free(config);
	if (o.failed || o.bytes > EXL3_MANIFEST_MAX) {
		rc = o.failed ? exl3_errf(err, -ENOMEM, "manifest: out of memory")
			      : exl3_errf(err, -EFBIG, "manifest: %zu bytes are too many", o.bytes);
		free(o.p);
		return rc;
	}
	memcpy(head.magic, EXL3_MANIFEST_MAGIC, sizeof(head.magic));
	head.version = EXL3_MANIFEST_VERSION;
	head.bytes = o.bytes;
	head.slab_bytes = man->layout.slab_bytes;
	head.tensor_bytes = man->layout.tensor_bytes;
	memcpy(o.p, &head, sizeof(head));
	hash_of(o.p, o.bytes, head.hash);
	memcpy(o.p, &head, sizeof(head));
	rc = to_memfd(o.p, o.bytes, ret, err);
	free(o.p);
	return rc;
}

/* ---- reading: the head ---- */

int exl3_manifest_peek(int fd, struct exl3_manifest_head *ret, struct exl3_error *err)
{
	struct exl3_manifest_head h;
	int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;

	/* Asked first: only a memfd has seals, and reading one never waits for anybody. */
	if (seals < 0 || (seals & SEALS) != SEALS)
		return exl3_errf(err, -EINVAL, "manifest: not a sealed memfd");
	if (fstat(fd, &st) < 0)
		return exl3_errf(err, -errno, "manifest: fstat: %m");
	if (st.st_size < (off_t)sizeof(h) || st.st_size > (off_t)EXL3_MANIFEST_MAX ||
	    pread(fd, &h, sizeof(h), 0) != (ssize_t)sizeof(h))
		return exl3_errf(err, -EINVAL, "manifest: %lld bytes", (long long)st.st_size);
	if (memcmp(h.magic, EXL3_MANIFEST_MAGIC, sizeof(h.magic)) != 0)
		return exl3_errf(err, -EINVAL, "manifest: not one of ours");
	if (h.version != EXL3_MANIFEST_VERSION)
		return exl3_errf(err, -EOPNOTSUPP,
				 "manifest: version %u, this program reads version %u", h.version,
				 EXL3_MANIFEST_VERSION);
	if (h.bytes != (uint64_t)st.st_size)
		return exl3_errf(err, -EINVAL, "manifest: %lld bytes instead of %llu",
				 (long long)st.st_size, (unsigned long long)h.bytes);
	if (!h.nr_slabs || h.nr_slabs > EXL3_MANIFEST_SLABS)
		return exl3_errf(err, -EINVAL, "manifest: %u slabs", h.nr_slabs);
	if (h.flags & ~EXL3_MANIFEST_FLAGS)
		return exl3_errf(err, -EINVAL, "manifest: flags %#x", h.flags);
	if (!memchr(h.device, 0, sizeof(h.device)) || !memchr(h.name, 0, sizeof(h.name)) ||
	    !memchr(h.path, 0, sizeof(h.path)))
		return exl3_errf(err, -EINVAL, "manifest: a name without an end");
	if (h.path[0] != '/')
		return exl3_errf(err, -EINVAL, "manifest: its path is not absolute");
	if (exl3_config_check_name(h.name, err) < 0)
		return exl3_err_prefix(err, "manifest");
	*ret = h;
	return 0;
}

/* ---- reading: the body ---- */

/* Reads a table's size: no more entries than could be there, so that what is allocated is bounded. */
static uint32_t get_count(struct exl3_in *in, size_t entry_bytes)
{
	uint32_t n = exl3_get_u32(in);

	if (n > in->left / entry_bytes)
		in->failed = true;
	return in->failed ? 0 : n;
}

static int check_matrix(const struct exl3_named_matrix *mat, const struct exl3_modelconf *conf,
			struct exl3_layout *layout, struct exl3_error *err)
{
	struct exl3_named_matrix again = *mat;
	const struct exl3_matrix *m = &mat->m;
	uint32_t k_log, n_log;

	if (!m->k || !m->n || m->k % EXL3_HAD || m->n % EXL3_HAD ||
	    m->k > EXL3_WHOLE_MAX / 64 * EXL3_TILE || m->n > EXL3_WHOLE_MAX / 64 * EXL3_TILE)
		return exl3_errf(err, -EINVAL, "matrix '%.160s': [%u, %u]", mat->name, m->k, m->n);
	if (m->codebook > EXL3_CB_MUL1 || !exl3_rate_valid(m->rate2, m->codebook))
		return exl3_errf(err, -EINVAL, "matrix '%.160s': bitrate %u/2 with codebook %u",
				 mat->name, m->rate2, m->codebook);
	if (layout->slab_bytes >> 48)
		return exl3_errf(err, -EINVAL, "its matrices are larger than any memory");
	exl3_modelconf_logical(conf, mat->name, m->k, m->n, &k_log, &n_log);
	if (k_log != m->k_log || n_log != m->n_log)
		return exl3_errf(err, -EINVAL,
				 "matrix '%.160s': logical sizes [%u, %u], config.json has [%u, %u]",
				 mat->name, m->k_log, m->n_log, k_log, n_log);
	exl3_layout_matrix(layout, &again, NULL);
	if (again.trellis_off != mat->trellis_off || again.suh_off != mat->suh_off ||
	    again.svh_off != mat->svh_off || again.bias_off != mat->bias_off)
		return exl3_errf(err, -EINVAL, "matrix '%.160s': not where its sizes put it",
				 mat->name);
	return 0;
}

static bool flag(struct exl3_in *in)
{
	uint32_t v = exl3_get_u32(in);

	in->failed |= v > 1;
	return v == 1;
}

/* One byte's worth. */
static uint8_t small(struct exl3_in *in)
{
	uint32_t v = exl3_get_u32(in);

	in->failed |= v > UINT8_MAX;
	return (uint8_t)v;
}

static int get_matrix(struct exl3_in *in, struct exl3_named_matrix *mat,
		      const struct exl3_modelconf *conf, struct exl3_layout *layout,
		      struct exl3_error *err)
{
	mat->name = exl3_get_text(in, EXL3_NAME_MAX);
	mat->unsupported = exl3_get_text(in, 4096);
	mat->placed = flag(in);
	if (mat->unsupported && !*mat->unsupported) {
		free(mat->unsupported);
		mat->unsupported = NULL;
	}
	if (in->failed || !*mat->name)
		return exl3_errf(err, -EINVAL, "a matrix is cut or has no name");
	if (!mat->placed)
		return mat->unsupported ? 0
					: exl3_errf(err, -EINVAL, "matrix '%.160s' is nowhere",
						    mat->name);
	mat->m.k = exl3_get_u32(in);
	mat->m.n = exl3_get_u32(in);
	mat->m.k_log = exl3_get_u32(in);
	mat->m.n_log = exl3_get_u32(in);
	mat->m.rate2 = small(in);
	mat->m.codebook = small(in);
	mat->has_bias = flag(in);
	mat->trellis_off = exl3_get_u64(in);
	mat->suh_off = exl3_get_u64(in);
	mat->svh_off = exl3_get_u64(in);
	mat->bias_off = exl3_get_u64(in);
	if (in->failed)
		return exl3_errf(err, -EINVAL, "matrix '%.160s' is cut or has a wrong value",
				 mat->name);
	return check_matrix(mat, conf, layout, err);
}

/* Elements times size, against what is said. */
static int check_tensor(const struct exl3_tensor_desc *t, struct exl3_error *err)
{
	const struct exl3_st_dtype *dtype = exl3_st_dtype_find(t->dtype);
	uint64_t count = 1;

	if (!dtype)
		return exl3_errf(err, -EINVAL, "tensor '%.160s': dtype", t->name);
	for (uint32_t d = 0; d < t->nr_dims; d++)
		if (__builtin_mul_overflow(count, t->shape[d], &count))
			return exl3_errf(err, -EINVAL, "tensor '%.160s': too large", t->name);
	if (count > UINT64_MAX / 64 || (count * dtype->bits + 7) / 8 != t->bytes)
		return exl3_errf(err, -EINVAL, "tensor '%.160s': %llu bytes do not fit its shape",
				 t->name, (unsigned long long)t->bytes);
	return 0;
}

static int get_tensor(struct exl3_in *in, struct exl3_tensor_desc *t, struct exl3_layout *layout,
		      struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *dtype = NULL;
	uint64_t piece;
	int rc;

	t->name = exl3_get_text(in, EXL3_NAME_MAX);
	dtype = exl3_get_text(in, sizeof(t->dtype) - 1);
	t->nr_dims = exl3_get_u32(in);
	if (in->failed || t->nr_dims > EXL3_ST_DIMS_MAX)
		return exl3_errf(err, -EINVAL, "a tensor is cut, or has too many dimensions");
	memcpy(t->dtype, dtype, strlen(dtype));
	for (uint32_t d = 0; d < t->nr_dims; d++)
		t->shape[d] = exl3_get_u64(in);
	t->bytes = exl3_get_u64(in);
	t->offset = exl3_get_u64(in);
	if (in->failed)
		return exl3_errf(err, -EINVAL, "tensor '%.160s' is cut", t->name);
	rc = check_tensor(t, err);
	if (rc < 0)
		return rc;
	/* Before it is added up: a sum that wraps could meet any figure. */
	if (t->bytes > (1ull << 48) - layout->tensor_bytes ||
	    exl3_layout_tensor(layout, t->bytes, &piece) != t->offset)
		return exl3_errf(err, -EINVAL, "tensor '%.160s': not where its size puts it",
				 t->name);
	return 0;
}

static int get_file(struct exl3_in *in, struct exl3_manifest_file *f, struct exl3_error *err)
{
	f->name = exl3_get_text(in, 255);
	f->bytes = exl3_get_u64(in);
	f->inode = exl3_get_u64(in);
	f->dev = exl3_get_u64(in);
	f->mtime_s = (int64_t)exl3_get_u64(in);
	f->mtime_ns = (int64_t)exl3_get_u64(in);
	if (in->failed || !*f->name || strchr(f->name, '/'))
		return exl3_errf(err, -EINVAL, "a file of the checkpoint has no proper name");
	return 0;
}

static int get_tables(struct exl3_in *in, struct exl3_manifest *man, struct exl3_error *err)
{
	struct exl3_modelconf conf;
	int rc = 0;

	exl3_modelconf_init(&conf, man->config);
	man->nr_matrices = get_count(in, 12);
	man->matrices = calloc((size_t)man->nr_matrices + 1, sizeof(*man->matrices));
	if (!man->matrices) {
		man->nr_matrices = 0;
		return exl3_errf(err, -ENOMEM, "out of memory");
	}
	for (uint32_t i = 0; rc == 0 && i < man->nr_matrices; i++) {
		rc = get_matrix(in, &man->matrices[i], &conf, &man->layout, err);
		if (rc == 0 && i && strcmp(man->matrices[i - 1].name, man->matrices[i].name) >= 0)
			rc = exl3_errf(err, -EINVAL, "matrices are not in the order of their names");
	}
	if (rc < 0)
		return rc;
	man->nr_tensors = get_count(in, 28);
	man->tensors = calloc((size_t)man->nr_tensors + 1, sizeof(*man->tensors));
	if (!man->tensors) {
		man->nr_tensors = 0;
		return exl3_errf(err, -ENOMEM, "out of memory");
	}
	for (uint32_t i = 0; rc == 0 && i < man->nr_tensors; i++) {
		rc = get_tensor(in, &man->tensors[i], &man->layout, err);
		if (rc == 0 && i && strcmp(man->tensors[i - 1].name, man->tensors[i].name) >= 0)
			rc = exl3_errf(err, -EINVAL, "tensors are not in the order of their names");
	}
	if (rc < 0)
		return rc;
	man->nr_strays = get_count(in, 4);
	man->strays = calloc((size_t)man->nr_strays + 1, sizeof(*man->strays));
	if (!man->strays) {
		man->nr_strays = 0;
		return exl3_errf(err, -ENOMEM, "out of memory");
	}
	for (uint32_t i = 0; i < man->nr_strays; i++)
		man->strays[i] = exl3_get_text(in, EXL3_NAME_MAX + 16);
	return in->failed ? exl3_errf(err, -EINVAL, "its tables are cut") : 0;
}

static int get_files(struct exl3_in *in, struct exl3_manifest *man, struct exl3_error *err)
{
	int rc = 0;

	man->nr_files = get_count(in, 44);
	if (in->failed || man->nr_files > EXL3_SHARDS_MAX + 1) {
		man->nr_files = 0;
		return exl3_errf(err, -EINVAL, "it is cut, or has too many files");
	}
	man->files = calloc((size_t)man->nr_files + 1, sizeof(*man->files));
	if (!man->files) {
		man->nr_files = 0;
		return exl3_errf(err, -ENOMEM, "out of memory");
	}
	for (uint32_t i = 0; rc == 0 && i < man->nr_files; i++)
		rc = get_file(in, &man->files[i], err);
	return rc;
}

static int get_pieces(struct exl3_in *in, struct exl3_manifest *man, struct exl3_error *err)
{
	uint64_t nr = exl3_get_u64(in);

	if (in->failed || nr != man->layout.nr_pieces || in->left != nr * sizeof(*man->pieces))
		return exl3_errf(err, -EINVAL, "%llu pieces where its tables make %llu",
				 (unsigned long long)nr, (unsigned long long)man->layout.nr_pieces);
	man->pieces = calloc(nr + 1, sizeof(*man->pieces));
	if (!man->pieces)
		return exl3_errf(err, -ENOMEM, "out of memory");
	exl3_get_bytes(in, man->pieces, nr * sizeof(*man->pieces));
	return 0;
}

static int get_config(struct exl3_in *in, struct exl3_manifest *man, struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *text = exl3_get_text(in, EXL3_JSON_CONFIG_MAX);
	int rc;

	if (in->failed)
		return exl3_errf(err, -EINVAL, "it is cut");
	if (!*text)
		return 0;
	rc = exl3_json_parse("config.json", text, strlen(text), &man->config, err);
	if (rc == 0 && !cJSON_IsObject(man->config))
		rc = exl3_errf(err, -EINVAL, "config.json: not a JSON object");
	return rc;
}

/* A short text into an array. */
static void get_into(struct exl3_in *in, char *to, size_t size)
{
	char *text = exl3_get_text(in, size - 1);

	if (text)
		memcpy(to, text, strlen(text) + 1);
	free(text);
}

static int get_body(struct exl3_in *in, struct exl3_manifest *man, struct exl3_error *err)
{
	int rc;

	man->path = exl3_get_text(in, PATH_MAX);
	get_into(in, man->fingerprint, sizeof(man->fingerprint));
	get_into(in, man->backend, sizeof(man->backend));
	get_into(in, man->driver, sizeof(man->driver));
	man->data_bytes = exl3_get_u64(in);
	if (in->failed || man->path[0] != '/')
		return exl3_errf(err, -EINVAL, "it has no path, or a text that is too long");
	if (strlen(man->fingerprint) != 32 ||
	    strspn(man->fingerprint, "0123456789abcdef") != 32)
		return exl3_errf(err, -EINVAL, "its fingerprint is none");
	rc = get_files(in, man, err);
	if (rc == 0)
		rc = get_config(in, man, err);
	if (rc == 0)
		rc = get_tables(in, man, err);
	if (rc == 0)
		rc = get_pieces(in, man, err);
	if (rc < 0)
		return rc;
	if (man->layout.slab_bytes != man->head.slab_bytes ||
	    man->layout.tensor_bytes != man->head.tensor_bytes)
		return exl3_errf(err, -EINVAL, "%llu and %llu bytes where its tables make %llu and %llu",
				 (unsigned long long)man->head.slab_bytes,
				 (unsigned long long)man->head.tensor_bytes,
				 (unsigned long long)man->layout.slab_bytes,
				 (unsigned long long)man->layout.tensor_bytes);
	return 0;
}

int exl3_manifest_read(int fd, struct exl3_manifest *ret, struct exl3_error *err)
{
	struct exl3_manifest man = {0};
	exl3_auto(exl3_freep) char *p = NULL;
	uint8_t hash[EXL3_PIECE_HASH];
	struct exl3_in in;
	int rc;

	rc = exl3_manifest_peek(fd, &man.head, err);
	if (rc < 0)
		return rc;
	p = malloc(man.head.bytes);
	if (!p)
		return exl3_errf(err, -ENOMEM, "manifest: out of memory");
	rc = exl3_pread_all(fd, "manifest", p, man.head.bytes, 0, err);
	if (rc < 0)
		return rc;
	hash_of(p, man.head.bytes, hash);
	if (memcmp(hash, man.head.hash, sizeof(hash)) != 0)
		return exl3_errf(err, -EINVAL, "manifest: its hash is not that of its content");
	in = (struct exl3_in){p + sizeof(man.head), man.head.bytes - sizeof(man.head), false};
	rc = get_body(&in, &man, err);
	if (rc < 0) {
		exl3_manifest_fini(&man);
		exl3_err_prefix(err, "manifest");
		return rc;
	}
	*ret = man;
	return 0;
}

void exl3_manifest_fini(struct exl3_manifest *man)
{
	exl3_manifest_files_fini(man->files, man->nr_files);
	exl3_matrices_fini(man->matrices, man->nr_matrices);
	exl3_tensors_fini(man->tensors, man->nr_tensors);
	for (uint32_t i = 0; i < man->nr_strays; i++)
		free(man->strays[i]);
	cJSON_Delete(man->config);
	free(man->matrices);
	free(man->tensors);
	free(man->strays);
	free(man->pieces);
	free(man->path);
	*man = (struct exl3_manifest){0};
}
