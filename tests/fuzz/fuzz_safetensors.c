/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_safetensors.c - any bytes as a checkpoint's only file: refused, or loaded and taken down. */
#include "daemon/weights.h"
#include "tests/unit/fake_backend.c" /* a fuzz target is one compilation unit of ours */

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A folder with two links: the file is the memfd that each input is written to. */
static char dir[] = "/tmp/exl3-fuzz-XXXXXX";
static int fd = -1;

static void remove_dir(void)
{
	char path[64];

	snprintf(path, sizeof(path), "%s/x.safetensors", dir);
	unlink(path);
	snprintf(path, sizeof(path), "%s/config.json", dir);
	unlink(path);
	rmdir(dir);
}

static void setup(void)
{
	static const char config[] =
		"{\"hidden_size\":100,\"vocab_size\":200,\"hidden_act\":\"silu\"}";
	char path[64], target[64];
	FILE *f;

	fd = memfd_create("fuzz", MFD_CLOEXEC);
	assert(fd >= 0 && mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/x.safetensors", dir);
	snprintf(target, sizeof(target), "/proc/self/fd/%d", fd);
	assert(symlink(target, path) == 0);
	snprintf(path, sizeof(path), "%s/config.json", dir);
	f = fopen(path, "we");
	assert(f && fputs(config, f) >= 0 && fclose(f) == 0);
	atexit(remove_dir);
}

/* What a loaded model claims must hold: addresses in its slab, names that lead to it. */
static void check_ready(const struct exl3_model *m)
{
	const char *slab = m->slab->ptr;

	for (uint32_t i = 0; i < m->nr_modules; i++) {
		const struct exl3_module_desc *d = &m->modules[i], *found = NULL;

		assert(exl3_model_find(m, d->name, d->kind, &found, NULL, NULL, NULL) == 0);
		assert(found == d);
		for (uint32_t s = 0; s < d->nr_shards; s++) {
			const struct exl3_matrix *mat = d->shards[s];
			const char *end = (const char *)mat->svh + 2ull * mat->n;

			assert((const char *)mat->trellis >= slab && end <= slab + m->slab->bytes);
			assert(mat->k % 128 == 0 && mat->n % 128 == 0 && mat->k && mat->n);
			assert(mat->k_log <= mat->k && mat->k - mat->k_log < 128);
			assert(mat->n_log <= mat->n && mat->n - mat->n_log < 128);
		}
	}
	for (uint32_t i = 0; i < m->nr_left_out; i++) {
		const struct exl3_left_out *v = &m->left_out[i];
		const struct exl3_module_desc *found;

		assert(exl3_model_find(m, v->name, v->kind, &found, NULL, NULL, NULL) ==
		       -EOPNOTSUPP);
	}
	for (uint32_t i = 0; i < m->nr_tensors; i++)
		assert(exl3_model_find_tensor(m, m->tensors[i].name) == &m->tensors[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct exl3_model *m;
	int rc;

	if (fd < 0)
		setup();
	assert(ftruncate(fd, 0) == 0);
	assert(pwrite(fd, data, size, 0) == (ssize_t)size);
	fake_reset();
	rc = exl3_model_new("fuzz", dir, &fake_ops, fake_dev(), &m, NULL);
	assert(rc == 0);
	rc = exl3_model_load(m);
	assert((rc == 0) == (m->state == EXL3_MODEL_READY));
	if (rc == 0)
		check_ready(m);
	else
		assert(m->error.code == rc && m->error.text[0]);
	exl3_model_put(m);
	return 0;
}
