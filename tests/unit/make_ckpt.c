/* SPDX-License-Identifier: Apache-2.0 */
/* make_ckpt.c - writes small checkpoints for tests, right ones and wrong ones. */
#include "tests/unit/make_ckpt.h"

#include <assert.h>
#include <dirent.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct mk {
	char *header, *data;
	size_t header_len, data_len;
	FILE *h, *d;
	bool first;
	uint64_t at;
};

struct mk *mk_new(void)
{
	struct mk *f = calloc(1, sizeof(*f));

	assert(f);
	f->h = open_memstream(&f->header, &f->header_len);
	f->d = open_memstream(&f->data, &f->data_len);
	assert(f->h && f->d);
	fputc('{', f->h);
	f->first = true;
	return f;
}

void mk_fill(const char *name, void *data, size_t bytes)
{
	uint64_t s = 0x9e3779b97f4a7c15u;

	for (; *name; name++)
		s = (s ^ (unsigned char)*name) * 0x100000001b3u;
	for (size_t i = 0; i < bytes; i++) {
		s = s * 6364136223846793005u + 1442695040888963407u;
		((unsigned char *)data)[i] = (unsigned char)(s >> 56);
	}
}

void mk_tensor(struct mk *f, const char *name, const char *dtype, const int64_t *dims,
	       const void *data, size_t bytes)
{
	void *made = NULL;

	fprintf(f->h, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", f->first ? "" : ",", name, dtype);
	for (int i = 0; dims[i] >= 0; i++)
		fprintf(f->h, "%s%" PRId64, i ? "," : "", dims[i]);
	fprintf(f->h, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", f->at, f->at + bytes);
	f->first = false;
	f->at += bytes;
	if (!data) {
		made = malloc(bytes + 1);
		assert(made);
		mk_fill(name, made, bytes);
	}
	fwrite(data ? data : made, 1, bytes, f->d);
	free(made);
}

static const char *sub(const char *name, const char *leaf)
{
	static char out[700];

	snprintf(out, sizeof(out), "%s.%s", name, leaf);
	return out;
}

/* f16 values around 1 and -1: any bits with a small exponent would do. */
static void mk_scale(struct mk *f, const char *name, const char *leaf, uint32_t n)
{
	uint16_t *v = malloc(2 * n);

	assert(v);
	mk_fill(sub(name, leaf), v, 2 * n);
	for (uint32_t i = 0; i < n; i++)
		v[i] = (uint16_t)(0x3c00 | (v[i] & 0x83ff));
	mk_tensor(f, sub(name, leaf), "F16", MK_DIMS(n), v, 2 * n);
	free(v);
}

void mk_matrix(struct mk *f, const char *name, uint32_t k, uint32_t n, uint32_t rate2,
	       uint32_t codebook, unsigned flags)
{
	static const uint32_t multipliers[] = {0, 0xCBAC1FED, 0x83DCD12D};
	uint32_t marker = multipliers[codebook] + (flags & MK_UNKNOWN ? 2 : 0);
	const int64_t *dims = flags & MK_ONE_DIM ? MK_DIMS(1) : MK_SCALAR;

	mk_tensor(f, sub(name, "trellis"), "I16", MK_DIMS(k / 16, n / 16, 8 * rate2), NULL,
		  (size_t)k * n / 16 * rate2);
	if (flags & MK_SIGNS) {
		mk_tensor(f, sub(name, "su"), "I16", MK_DIMS(k / 16), NULL, k / 8);
		mk_tensor(f, sub(name, "sv"), "I16", MK_DIMS(n / 16), NULL, n / 8);
	} else {
		mk_scale(f, name, "suh", k);
		mk_scale(f, name, "svh", n);
	}
	if (codebook == 1 || flags & MK_BOTH)
		mk_tensor(f, sub(name, "mcg"), "I32", dims, &marker, 4);
	if (codebook == 2 || flags & MK_BOTH)
		mk_tensor(f, sub(name, "mul1"), "I32", dims, &marker, 4);
	if (flags & MK_BIAS)
		mk_scale(f, name, "bias", n);
}

void mk_bytes(const char *dir, const char *name, const void *data, size_t bytes)
{
	char path[4096];
	FILE *out;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	out = fopen(path, "we");
	assert(out);
	assert(fwrite(data, 1, bytes, out) == bytes);
	assert(fclose(out) == 0);
}

void mk_text(const char *dir, const char *name, const char *text)
{
	mk_bytes(dir, name, text, strlen(text));
}

void mk_save(struct mk *f, const char *dir, const char *name, unsigned pad)
{
	char *all;
	uint64_t n;

	fprintf(f->h, "}%*s", (int)pad, "");
	fclose(f->h);
	fclose(f->d);
	n = f->header_len;
	all = malloc(8 + n + f->data_len);
	assert(all);
	memcpy(all, &n, 8);
	memcpy(all + 8, f->header, n);
	memcpy(all + 8 + n, f->data, f->data_len);
	mk_bytes(dir, name, all, 8 + n + f->data_len);
	free(all);
	free(f->header);
	free(f->data);
	free(f);
}

char *mk_dir(void)
{
	const char *tmp = getenv("TMPDIR");
	char path[4096];
	char *made;

	snprintf(path, sizeof(path), "%s/exl3-test-XXXXXX", tmp ? tmp : "/tmp");
	made = mkdtemp(path);
	assert(made);
	return strdup(made);
}

void mk_rmdir(char *dir)
{
	DIR *d = opendir(dir);
	struct dirent *e;

	assert(d);
	while ((e = readdir(d)))
		unlinkat(dirfd(d), e->d_name, 0);
	closedir(d);
	assert(rmdir(dir) == 0);
	free(dir);
}
