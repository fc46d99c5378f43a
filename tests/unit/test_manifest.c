/* SPDX-License-Identifier: Apache-2.0 */
/* test_manifest.c - weights that a second worker adopts: the same model as after a load, or refused. */
#include "tests/test.h"

#include "daemon/manifest.h"
#include "daemon/weights.h"
#include "kernels/backend.h"
#include "tests/unit/make_ckpt.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

static const struct exl3_backend_ops *const ops = &exl3_backend_cpu;

/* One checkpoint with all that a manifest has to know about, loaded once. */
struct rig {
	struct exl3_dev *dev;
	char *dir;
	struct exl3_model *m; /* loaded */
	struct exl3_kept_fds fds; /* borrowed from it */
};

static struct exl3_dev *open_device(uint64_t memory_max)
{
	struct exl3_dev_options opt = {.numa_node = -1, .threads = 1, .memory_max = memory_max};
	struct exl3_dev *dev = NULL;
	struct exl3_error err;

	test_code(ops->open(&opt, &dev, &err), 0, &err);
	return dev;
}

static struct exl3_model *new_model(struct exl3_dev *dev, const char *name, const char *dir)
{
	struct exl3_model *m;
	struct exl3_error err;

	test_code(exl3_model_new(name, dir, ops, dev, &m, &err), 0, &err);
	return m;
}

static struct exl3_kept_fds fds_of(const struct exl3_model *m)
{
	return (struct exl3_kept_fds){m->manifest_fd, m->slab->fd, m->tensor_fd, 0};
}

static void rig_open(struct rig *r)
{
	struct mk *f = mk_new();

	memset(r, 0, sizeof(*r));
	r->dir = mk_dir();
	mk_text(r->dir, "config.json",
		"{\"model_type\":\"llama\",\"hidden_size\":256,\"intermediate_size\":500,"
		"\"hidden_act\":\"silu\",\"tie_word_embeddings\":true}");
	mk_matrix(f, "model.layers.0.mlp.gate_proj", 256, 512, 8, 2, 0);
	mk_matrix(f, "model.layers.0.mlp.up_proj", 256, 512, 5, 2, MK_SIGNS);
	mk_matrix(f, "model.layers.0.mlp.down_proj", 512, 256, 6, 1, MK_BIAS);
	mk_matrix(f, "b.large", 2048, 2048 + 128, 8, 0, 0); /* more pieces than one */
	mk_matrix(f, "c.unknown", 128, 128, 8, 2, MK_UNKNOWN); /* left out once it has a place */
	mk_tensor(f, "d.pack.trellis", "I16", MK_DIMS(4, 4), NULL, 32); /* left out before that */
	mk_tensor(f, "e.suh", "F16", MK_DIMS(4), NULL, 8);		/* a stray */
	mk_tensor(f, "model.embed_tokens.weight", "BF16", MK_DIMS(3000, 256), NULL, 2 * 3000 * 256);
	mk_tensor(f, "model.norm.weight", "F16", MK_DIMS(256), NULL, 512);
	mk_tensor(f, "a.nothing", "F32", MK_DIMS(0), NULL, 0); /* not the last one: that has bytes */
	mk_save(f, r->dir, "model.safetensors", 3);
	r->dev = open_device(0);
	r->m = new_model(r->dev, "m", r->dir);
	r->m->origin = (struct exl3_origin){77, 5, true};
	test_code(exl3_model_load(r->m), 0, &r->m->error);
	assert_true(r->m->manifest_fd >= 0);
	r->fds = fds_of(r->m);
}

static void rig_close(struct rig *r)
{
	struct exl3_dev_info info;

	exl3_model_put(r->m);
	ops->info(r->dev, &info);
	assert_int_equal(info.slab_bytes, 0);
	ops->close(r->dev);
	mk_rmdir(r->dir);
}

/* ---- the same model ---- */

static void same_modules(const struct exl3_model *a, const struct exl3_model *b)
{
	assert_int_equal(a->nr_modules, b->nr_modules);
	for (uint32_t i = 0; i < a->nr_modules; i++) {
		const struct exl3_module_desc *x = &a->modules[i], *y = &b->modules[i];

		assert_string_equal(x->name, y->name);
		assert_int_equal(x->kind, y->kind);
		assert_int_equal(x->k_log, y->k_log);
		assert_int_equal(x->n_log, y->n_log);
		assert_int_equal(x->intermediate, y->intermediate);
		assert_int_equal(x->act, y->act);
		assert_int_equal(x->bytes, y->bytes);
		assert_int_equal(x->rate2_max, y->rate2_max);
	}
	assert_int_equal(a->nr_skipped, b->nr_skipped);
	for (uint32_t i = 0; i < a->nr_skipped; i++)
		assert_string_equal(a->skipped[i], b->skipped[i]);
	assert_int_equal(a->nr_names, b->nr_names);
}

static void same_part(const void *a, const void *b, size_t bytes)
{
	if ((a == NULL) != (b == NULL) || (a && memcmp(a, b, bytes)))
		fail_msg("weights differ");
}

static void same(const struct exl3_model *a, const struct exl3_model *b)
{
	assert_string_equal(a->fingerprint, b->fingerprint);
	assert_string_equal(a->model_type, b->model_type);
	assert_int_equal(a->tied, b->tied);
	assert_int_equal(a->weight_bytes, b->weight_bytes);
	assert_int_equal(a->tensor_bytes, b->tensor_bytes);
	assert_int_equal(a->overhead_bytes, b->overhead_bytes);
	assert_int_equal(a->nr_matrices, b->nr_matrices);
	for (uint32_t i = 0; i < a->nr_matrices; i++) {
		const struct exl3_named_matrix *x = &a->matrices[i], *y = &b->matrices[i];

		assert_string_equal(x->name, y->name);
		assert_int_equal(x->unsupported == NULL, y->unsupported == NULL);
		if (!x->placed)
			continue;
		assert_int_equal(x->m.k, y->m.k);
		assert_int_equal(x->m.n, y->m.n);
		assert_int_equal(x->m.k_log, y->m.k_log);
		assert_int_equal(x->m.n_log, y->m.n_log);
		assert_int_equal(x->m.rate2, y->m.rate2);
		assert_int_equal(x->m.codebook, y->m.codebook);
		same_part(x->m.trellis, y->m.trellis, (size_t)x->m.k * x->m.n / 16 * x->m.rate2);
		same_part(x->m.suh, y->m.suh, 2 * x->m.k);
		same_part(x->m.svh, y->m.svh, 2 * x->m.n);
		same_part(x->m.bias, y->m.bias, 4 * x->m.n);
	}
	assert_int_equal(a->nr_tensors, b->nr_tensors);
	for (uint32_t i = 0; i < a->nr_tensors; i++) {
		assert_string_equal(a->tensors[i].name, b->tensors[i].name);
		assert_string_equal(a->tensors[i].dtype, b->tensors[i].dtype);
		assert_int_equal(a->tensors[i].offset, b->tensors[i].offset);
		assert_memory_equal(a->tensors[i].shape, b->tensors[i].shape,
				    sizeof(a->tensors[i].shape));
	}
	same_modules(a, b);
}

static void adopted(void **state)
{
	struct exl3_manifest_head head;
	struct exl3_manifest man;
	struct exl3_kept_fds fds;
	struct exl3_model *again;
	struct exl3_error err;
	struct rig r;

	(void)state;
	rig_open(&r);
	test_code(exl3_manifest_peek(r.fds.manifest, &head, &err), 0, &err);
	assert_string_equal(head.name, "m");
	assert_string_equal(head.device, "cpu");
	assert_int_equal(head.instance, 77);
	assert_int_equal(head.generation, 5);
	assert_int_equal(head.flags, EXL3_MANIFEST_BY_CLIENT);
	assert_int_equal(head.tensor_bytes, r.m->tensor_bytes);
	test_code(exl3_manifest_read(r.fds.manifest, &man, &err), 0, &err);
	assert_string_equal(man.fingerprint, r.m->fingerprint);
	assert_int_equal(man.nr_files, 2);
	assert_true(man.layout.nr_pieces > man.nr_matrices + 4);
	assert_true(man.layout.nr_pieces < 64); /* so that every piece is verified below */
	exl3_manifest_fini(&man);

	for (unsigned flags = 0; flags < 4; flags++) {
		again = new_model(r.dev, "m", r.dir);
		test_code(exl3_model_adopt(again, &r.fds, flags, &err), 0, &err);
		assert_int_equal(again->state, EXL3_MODEL_READY);
		assert_ptr_not_equal(again->slab->ptr, r.m->slab->ptr);
		same(r.m, again);
		exl3_model_put(again);
	}
	/* Its loader is gone: the descriptors alone keep the pages. And a third one adopts from the second. */
	fds = (struct exl3_kept_fds){dup(r.fds.manifest), dup(r.fds.slab), dup(r.fds.tensors), 0};
	exl3_model_put(r.m);
	r.m = new_model(r.dev, "m", r.dir);
	test_code(exl3_model_adopt(r.m, &fds, 0, &err), 0, &err);
	close(fds.manifest);
	close(fds.slab);
	close(fds.tensors);
	again = new_model(r.dev, "m", r.dir);
	fds = fds_of(r.m);
	test_code(exl3_model_adopt(again, &fds, EXL3_ADOPT_VERIFY_ALL, &err), 0, &err);
	same(r.m, again);
	exl3_model_put(again);
	again = new_model(r.dev, "m", r.dir);
	test_code(exl3_model_load(again), 0, &again->error);
	same(r.m, again);
	exl3_model_put(again);
	rig_close(&r);
}

/* ---- refusals ---- */

/* Refused with @want and @say, and a load of the same object still works. */
static void refused(struct rig *r, const char *name, const struct exl3_kept_fds *fds,
		    unsigned flags, int want, const char *say)
{
	struct exl3_model *m = new_model(r->dev, name, r->dir);
	struct exl3_error err = {0};
	int rc = exl3_model_adopt(m, fds, flags, &err);

	if (rc != want || !strstr(err.text, say))
		fail_msg("returned %d, '%s'; wanted %d, '%s'", rc, err.text, want, say);
	assert_int_equal(m->state, EXL3_MODEL_NEW);
	assert_null(m->slab);
	assert_int_equal(m->tensor_fd, -1);
	assert_int_equal(m->manifest_fd, -1);
	exl3_model_put(m);
}

static int memfd_of(const void *p, size_t bytes, int seals)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, p, bytes), (ssize_t)bytes);
	if (seals)
		assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

/* All of a memfd, to be freed. */
static char *bytes_of(int fd, size_t *bytes)
{
	struct stat st;
	char *p;

	assert_int_equal(fstat(fd, &st), 0);
	*bytes = (size_t)st.st_size;
	p = malloc(*bytes);
	assert_non_null(p);
	assert_int_equal(pread(fd, p, *bytes, 0), st.st_size);
	return p;
}

#define ALL_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)

/* Any byte of the file: its hash says so, or what it tells about itself. */
static void any_byte(void **state)
{
	struct exl3_error err;
	struct rig r;
	size_t bytes;
	char *p;

	(void)state;
	rig_open(&r);
	p = bytes_of(r.fds.manifest, &bytes);
	for (size_t i = 0; i < bytes; i++) {
		struct exl3_manifest man;
		int fd, rc;

		p[i] ^= 1 << (i % 8);
		fd = memfd_of(p, bytes, ALL_SEALS);
		rc = exl3_manifest_read(fd, &man, &err);
		if (rc == 0)
			fail_msg("byte %zu of %zu may be anything", i, bytes);
		assert_true(strncmp(err.text, "manifest: ", 10) == 0);
		close(fd);
		p[i] ^= 1 << (i % 8);
	}
	for (size_t cut = 0; cut < bytes; cut += cut < 2000 ? 13 : 997) {
		struct exl3_manifest man;
		int fd = memfd_of(p, cut, ALL_SEALS);

		assert_true(exl3_manifest_read(fd, &man, &err) < 0);
		close(fd);
	}
	free(p);
	rig_close(&r);
}

/* What a broken or foreign program could have written, with a hash that is right. */
enum change {
	PATH, PATH_RELATIVE, ASKED, ASKED_RELATIVE, FINGERPRINT, BACKEND, DEVICE, DRIVER, NAME, NAME_BAD,
	FILE_BYTES, FILE_MTIME, FILE_NS, FILE_INODE, FILE_DEV, FILE_NAME, FILE_SLASH, FILE_LESS,
	CONFIG_SIZES, CONFIG_LIST, M_K, M_N, M_K_ZERO, M_HUGE, M_KLOG, M_NLOG, M_RATE, M_CODEBOOK,
	M_HALF, M_BIAS, M_BIAS_GONE, M_TRELLIS, M_SUH, M_SVH, M_BIAS_OFF, M_NAME, M_ORDER, M_TWICE,
	M_LESS, M_NOWHERE, M_UNPLACED, T_DTYPE, T_SHAPE, T_DIMS, T_BYTES, T_OFFSET, T_ORDER, T_WRAP,
	T_LESS, SLAB_BYTES, PIECE, PIECES, PIECE_ORDER,
	CHANGES
};

static const struct {
	int want;
	const char *say;
} outcome[CHANGES] = {
	[PATH] = {-ESTALE, "led to /elsewhere"},
	[ASKED] = {-EINVAL, "they are of /elsewhere"},
	[ASKED_RELATIVE] = {-EINVAL, "not absolute"},
	[PATH_RELATIVE] = {-EINVAL, "no path"},
	[FINGERPRINT] = {-EINVAL, "fingerprint"},
	[BACKEND] = {-EINVAL, "this worker has cpu"},
	[DEVICE] = {-EINVAL, "this worker has cpu"},
	[DRIVER] = {-EINVAL, "driver"},
	[NAME] = {-EINVAL, "those of model 'other'"},
	[NAME_BAD] = {-EINVAL, "name"},
	[FILE_BYTES] = {-ESTALE, "it had"},
	[FILE_MTIME] = {-ESTALE, "written since"},
	[FILE_NS] = {-ESTALE, "written since"},
	[FILE_INODE] = {-ESTALE, "another file"},
	[FILE_DEV] = {-ESTALE, "another file"},
	[FILE_NAME] = {-ESTALE, "gone.safetensors"},
	[FILE_SLASH] = {-EINVAL, "no proper name"},
	[FILE_LESS] = {-ESTALE, "was not there"},
	[CONFIG_SIZES] = {-EINVAL, "config.json has"},
	[CONFIG_LIST] = {-EINVAL, "not a JSON object"},
	[M_K] = {-EINVAL, "not where its sizes put it"},
	[M_N] = {-EINVAL, "[2048, 2177]"},
	[M_K_ZERO] = {-EINVAL, "[0, 2176]"},
	[M_HUGE] = {-EINVAL, "[1048576, 2176]"},
	[M_KLOG] = {-EINVAL, "logical sizes"},
	[M_NLOG] = {-EINVAL, "logical sizes"},
	[M_RATE] = {-EINVAL, "bitrate 17/2"},
	[M_CODEBOOK] = {-EINVAL, "codebook 3"},
	[M_HALF] = {-EINVAL, "bitrate 7/2 with codebook 0"},
	[M_BIAS] = {-EINVAL, "not where its sizes put it"},
	[M_BIAS_GONE] = {-EINVAL, "not where its sizes put it"},
	[M_TRELLIS] = {-EINVAL, "not where its sizes put it"},
	[M_SUH] = {-EINVAL, "not where its sizes put it"},
	[M_SVH] = {-EINVAL, "not where its sizes put it"},
	[M_BIAS_OFF] = {-EINVAL, "not where its sizes put it"},
	[M_NAME] = {-EINVAL, "no name"},
	[M_ORDER] = {-EINVAL, "not where its sizes put it"},
	[M_TWICE] = {-EINVAL, "order of their names"},
	[M_LESS] = {-EINVAL, "pieces where"},
	[M_NOWHERE] = {-EINVAL, "is nowhere"},
	[M_UNPLACED] = {-EINVAL, "not where its sizes put it"},
	[T_DTYPE] = {-EINVAL, "dtype"},
	[T_SHAPE] = {-EINVAL, "do not fit its shape"},
	[T_DIMS] = {-EINVAL, "too many dimensions"},
	[T_BYTES] = {-EINVAL, "do not fit its shape"},
	[T_OFFSET] = {-EINVAL, "not where its size puts it"},
	[T_ORDER] = {-EINVAL, "not where its size puts it"},
	[T_WRAP] = {-EINVAL, "too large"},
	[T_LESS] = {-EINVAL, "pieces where"},
	[SLAB_BYTES] = {-EINVAL, "bytes where its tables make"},
	[PIECE] = {-EBADMSG, "is not what was loaded"},
	[PIECES] = {-EINVAL, "pieces where"},
	[PIECE_ORDER] = {-EBADMSG, "is not what was loaded"},
};

static void set_text(char **at, const char *text)
{
	free(*at);
	*at = strdup(text);
	assert_non_null(*at);
}

static void swap(void *a, void *b, size_t bytes)
{
	char t[512];

	assert_true(bytes <= sizeof(t));
	memcpy(t, a, bytes);
	memcpy(a, b, bytes);
	memcpy(b, t, bytes);
}

static void change_matrix(struct exl3_manifest *man, int what)
{
	struct exl3_named_matrix *m = man->matrices; /* b.large, of codebook 0 */

	switch (what) {
	case M_K: m->m.k += 128; m->m.k_log += 128; break;
	case M_N: m->m.n++; break;
	case M_K_ZERO: m->m.k = 0; break;
	case M_HUGE: m->m.k = 1 << 20; break;
	case M_KLOG: m->m.k_log--; break;
	case M_NLOG: m->m.n_log--; break;
	case M_RATE: m->m.rate2 = 17; break;
	case M_CODEBOOK: m->m.codebook = 3; break;
	case M_HALF: m->m.rate2 = 7; break;
	case M_BIAS: m->has_bias = true; break;
	case M_BIAS_GONE: m[3].has_bias = false; break; /* down_proj */
	case M_TRELLIS: m[1].trellis_off = 0; break;
	case M_SUH: m->suh_off += 256; break;
	case M_SVH: m->svh_off = UINT64_MAX; break;
	case M_BIAS_OFF: m->bias_off = m->suh_off; break;
	case M_NAME: set_text(&m->name, ""); break;
	case M_ORDER: swap(&m[3], &m[4], sizeof(*m)); break;
	case M_TWICE: set_text(&m[1].name, m[0].name); break;
	case M_LESS: free(m[5].name); man->nr_matrices--; break;
	case M_NOWHERE: m->placed = false; break;
	case M_UNPLACED: m[1].placed = false; break; /* c.unknown */
	default: break;
	}
}

static void change_tensor(struct exl3_manifest *man, int what)
{
	struct exl3_tensor_desc *t = man->tensors;

	switch (what) {
	case T_DTYPE: strcpy(t->dtype, "F17"); break;
	case T_SHAPE: t->shape[0]++; break;
	case T_DIMS: t->nr_dims = 9; break;
	case T_BYTES: t->bytes++; break;
	case T_OFFSET: t[2].offset = 0; break;
	case T_ORDER: swap(&t[1], &t[2], sizeof(*t)); break;
	case T_WRAP: t[1].nr_dims = 3; t[1].shape[2] = UINT64_MAX / 2; break;
	case T_LESS: free(t[2].name), free(t[1].name); man->nr_tensors -= 2; break;
	default: break;
	}
}

static void change_file(struct exl3_manifest *man, int what)
{
	struct exl3_manifest_file *f = man->files;

	switch (what) {
	case FILE_BYTES: f->bytes++; break;
	case FILE_MTIME: f->mtime_s--; break;
	case FILE_NS: f->mtime_ns ^= 1; break;
	case FILE_INODE: f->inode++; break;
	case FILE_DEV: f->dev++; break;
	case FILE_NAME: set_text(&f->name, "gone.safetensors"); break;
	case FILE_SLASH: set_text(&f->name, "../model.safetensors"); break;
	case FILE_LESS: free(f[--man->nr_files].name); break;
	default: break;
	}
}

static void change(struct exl3_manifest *man, int what)
{
	change_matrix(man, what);
	change_tensor(man, what);
	change_file(man, what);
	switch (what) {
	case PATH: set_text(&man->path, "/elsewhere"); break;
	case ASKED: strcpy(man->head.path, "/elsewhere"); break;
	case ASKED_RELATIVE: strcpy(man->head.path, "here"); break;
	case PATH_RELATIVE: set_text(&man->path, "here"); break;
	case FINGERPRINT: man->fingerprint[7] = 'x'; break;
	case BACKEND: strcpy(man->backend, "cuda"); break;
	case DEVICE: strcpy(man->head.device, "cpu-node3"); break;
	case DRIVER: strcpy(man->driver, "580.1"); break;
	case NAME: strcpy(man->head.name, "other"); break;
	case NAME_BAD: strcpy(man->head.name, "a=b"); break;
	case CONFIG_SIZES:
		cJSON_SetNumberValue(cJSON_GetObjectItem(man->config, "intermediate_size"), 501);
		break;
	case CONFIG_LIST:
		cJSON_Delete(man->config);
		man->config = cJSON_CreateArray();
		break;
	case SLAB_BYTES: man->layout.slab_bytes += 256; break;
	case PIECE: man->pieces[2][0] ^= 1; break;
	case PIECES: man->layout.nr_pieces--; break;
	case PIECE_ORDER: swap(man->pieces[0], man->pieces[1], sizeof(*man->pieces)); break;
	default: break;
	}
}

static void every_field(void **state)
{
	struct exl3_manifest man;
	struct exl3_error err;
	struct rig r;

	(void)state;
	rig_open(&r);
	for (int what = 0; what < CHANGES; what++) {
		struct exl3_kept_fds fds = r.fds;

		test_code(exl3_manifest_read(r.fds.manifest, &man, &err), 0, &err);
		change(&man, what);
		test_code(exl3_manifest_write(&man, &fds.manifest, &err), 0, &err);
		exl3_manifest_fini(&man);
		refused(&r, "m", &fds, 0, outcome[what].want, outcome[what].say);
		close(fds.manifest);
	}
	rig_close(&r);
}

static void other_versions(void **state)
{
	struct exl3_manifest_head head;
	struct exl3_kept_fds fds;
	struct rig r;
	size_t bytes;
	char *p;

	(void)state;
	rig_open(&r);
	fds = r.fds;
	p = bytes_of(r.fds.manifest, &bytes);
	memcpy(&head, p, sizeof(head));
	head.version++;
	memcpy(p, &head, sizeof(head));
	fds.manifest = memfd_of(p, bytes, ALL_SEALS);
	refused(&r, "m", &fds, 0, -EOPNOTSUPP, "version 2, this program reads version 1");
	close(fds.manifest);
	head.version--;
	head.nr_slabs = 2;
	memcpy(p, &head, sizeof(head));
	fds.manifest = memfd_of(p, bytes, ALL_SEALS);
	refused(&r, "m", &fds, 0, -EINVAL, "2 slabs");
	close(fds.manifest);
	free(p);
	rig_close(&r);
}

/* Descriptors that are not what they should be. */
static void descriptors(void **state)
{
	struct exl3_kept_fds fds;
	struct exl3_dev *all;
	struct rig r;
	size_t bytes;
	int pipe_fds[2];
	char *p;

	(void)state;
	rig_open(&r);
	all = r.dev;
	refused(&r, "other", &r.fds, 0, -EINVAL, "those of model 'm'");
	assert_int_equal(pipe(pipe_fds), 0);
	fds = (struct exl3_kept_fds){pipe_fds[0], r.fds.slab, r.fds.tensors, 0};
	refused(&r, "m", &fds, 0, -EINVAL, "not a sealed memfd");
	fds.manifest = -1;
	refused(&r, "m", &fds, 0, -EINVAL, "not a sealed memfd");
	p = bytes_of(r.fds.manifest, &bytes);
	fds.manifest = memfd_of(p, bytes, ALL_SEALS & ~F_SEAL_WRITE);
	refused(&r, "m", &fds, 0, -EINVAL, "not a sealed memfd");
	close(fds.manifest);
	free(p);

	fds = (struct exl3_kept_fds){r.fds.manifest, -1, r.fds.tensors, 0};
	refused(&r, "m", &fds, 0, -EINVAL, "slab is missing");
	fds.slab = pipe_fds[0];
	refused(&r, "m", &fds, 0, -EINVAL, "adopted slab");
	fds.slab = r.fds.tensors;
	refused(&r, "m", &fds, 0, -EINVAL, "adopted slab has");
	p = bytes_of(r.fds.slab, &bytes);
	fds.slab = memfd_of(p, bytes, F_SEAL_SHRINK | F_SEAL_GROW);
	refused(&r, "m", &fds, 0, -EINVAL, "not sealed against writes");
	close(fds.slab);
	/* One bit of a weight, wherever it is. */
	for (size_t i = 1; i < r.m->weight_bytes; i += bytes / 9) {
		p[i] ^= 16;
		fds.slab = memfd_of(p, bytes, ALL_SEALS);
		refused(&r, "m", &fds, 0, -EBADMSG, "is not what was loaded");
		close(fds.slab);
		p[i] ^= 16;
	}
	free(p);

	fds = (struct exl3_kept_fds){r.fds.manifest, r.fds.slab, -1, 0};
	refused(&r, "m", &fds, 0, -EINVAL, "tensor file is missing");
	fds.tensors = r.fds.slab;
	refused(&r, "m", &fds, 0, -EINVAL, "tensor file");
	p = bytes_of(r.fds.tensors, &bytes);
	fds.tensors = memfd_of(p, bytes, F_SEAL_SHRINK | F_SEAL_GROW);
	refused(&r, "m", &fds, 0, -EINVAL, "not sealed");
	close(fds.tensors);
	p[100000] ^= 1;
	fds.tensors = memfd_of(p, bytes, ALL_SEALS);
	refused(&r, "m", &fds, 0, -EBADMSG, "'model.embed_tokens.weight' is not what was loaded");
	close(fds.tensors);
	fds.tensors = memfd_of(p, bytes - 64, ALL_SEALS);
	refused(&r, "m", &fds, 0, -EINVAL, "bytes instead of");
	close(fds.tensors);
	free(p);
	close(pipe_fds[0]);
	close(pipe_fds[1]);

	r.dev = open_device(1 << 20);
	refused(&r, "m", &r.fds, 0, -ENOMEM, "the limit is");
	ops->close(r.dev);
	r.dev = all;
	rig_close(&r);
}

/* The checkpoint is another one by now: said, and adopted only if that is wanted. */
static void changed_files(void **state)
{
	struct exl3_model *m;
	struct exl3_error err;
	char path[4200];
	struct rig r;

	(void)state;
	rig_open(&r);
	mk_text(r.dir, "extra.safetensors", "x");
	refused(&r, "m", &r.fds, 0, -ESTALE, "extra.safetensors was not there");
	snprintf(path, sizeof(path), "%s/extra.safetensors", r.dir);
	unlink(path);
	mk_text(r.dir, "notes.txt", "x"); /* nobody reads that */
	m = new_model(r.dev, "m", r.dir);
	test_code(exl3_model_adopt(m, &r.fds, 0, &err), 0, &err);
	exl3_model_put(m);
	snprintf(path, sizeof(path), "%s/config.json", r.dir);
	unlink(path);
	refused(&r, "m", &r.fds, 0, -ESTALE, "config.json: No such file");
	m = new_model(r.dev, "m", r.dir);
	test_code(exl3_model_adopt(m, &r.fds, EXL3_ADOPT_ANY_FILES, &err), 0, &err);
	same(r.m, m);
	exl3_model_put(m);
	/* After a load that failed, too. */
	mk_text(r.dir, "model.safetensors", "broken");
	m = new_model(r.dev, "m", r.dir);
	assert_int_equal(exl3_model_adopt(m, &r.fds, 0, &err), -ESTALE);
	assert_int_equal(exl3_model_load(m), -EINVAL);
	assert_int_equal(m->state, EXL3_MODEL_FAILED);
	test_code(exl3_model_adopt(m, &r.fds, EXL3_ADOPT_ANY_FILES, &err), 0, &err);
	same(r.m, m);
	exl3_model_put(m);
	rig_close(&r);
}

/* More pieces than samples: every piece has its turn, and all are looked at when that is asked for. */
static void samples(void **state)
{
	struct exl3_dev *dev = open_device(0);
	unsigned found = 0, tries = 200;
	struct exl3_kept_fds fds;
	struct mk *f = mk_new();
	char *dir = mk_dir(), *p;
	struct exl3_model *m, *again;
	struct exl3_error err;
	size_t bytes;

	(void)state;
	for (int i = 0; i < 100; i++) {
		char name[16];

		snprintf(name, sizeof(name), "m%02d", i);
		mk_matrix(f, name, 128, 128, 8, 2, 0);
	}
	mk_save(f, dir, "model.safetensors", 0);
	m = new_model(dev, "m", dir);
	test_code(exl3_model_load(m), 0, &m->error);
	fds = fds_of(m);
	p = bytes_of(fds.slab, &bytes);
	p[bytes / 2] ^= 1; /* in one of 300 pieces */
	fds.slab = memfd_of(p, bytes, ALL_SEALS);
	free(p);
	for (unsigned i = 0; i < tries; i++) {
		again = new_model(dev, "m", dir);
		found += exl3_model_adopt(again, &fds, 0, &err) < 0;
		exl3_model_put(again);
	}
	if (found < tries / 20 || found > tries / 2)
		fail_msg("a bad piece was found %u times out of %u", found, tries);
	again = new_model(dev, "m", dir);
	assert_int_equal(exl3_model_adopt(again, &fds, EXL3_ADOPT_VERIFY_ALL, &err), -EBADMSG);
	exl3_model_put(again);
	close(fds.slab);
	exl3_model_put(m);
	ops->close(dev);
	mk_rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(adopted),	  test_case(any_byte),	    test_case(every_field),
		test_case(other_versions), test_case(descriptors), test_case(changed_files),
		test_case(samples),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
