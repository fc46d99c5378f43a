/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint.c - a directory of safetensors files as one table of tensors. */
#include "daemon/checkpoint.h"

#include "shm/exl3_abi.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INDEX_NAME "model.safetensors.index.json"
#define SUFFIX     ".safetensors"

/* File names, sorted; owned. */
struct names {
	char **v;
	uint32_t nr;
};

static void names_fini(struct names *n)
{
	for (uint32_t i = 0; i < n->nr; i++)
		free(n->v[i]);
	free(n->v);
	*n = (struct names){0};
}

static int cmp_str(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool names_has(const struct names *n, const char *name)
{
	return n->nr && bsearch(&name, n->v, n->nr, sizeof(*n->v), cmp_str);
}

static int names_add(struct names *n, const char *name, struct exl3_error *err)
{
	char **v;

	if (n->nr == EXL3_SHARDS_MAX)
		return exl3_errf(err, -EINVAL, "more than %u safetensors files", EXL3_SHARDS_MAX);
	v = realloc(n->v, (n->nr + 1) * sizeof(*v));
	if (!v)
		return exl3_errf(err, -ENOMEM, "out of memory");
	n->v = v;
	v[n->nr] = strdup(name);
	if (!v[n->nr])
		return exl3_errf(err, -ENOMEM, "out of memory");
	n->nr++;
	return 0;
}

static bool has_suffix(const char *name, const char *suffix)
{
	size_t a = strlen(name), b = strlen(suffix);

	return a > b && !strcmp(name + a - b, suffix);
}

static int list_files(int dirfd, struct names *n, struct exl3_error *err)
{
	int fd = openat(dirfd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *e;
	int rc = 0;

	if (!dir) {
		rc = exl3_errf(err, -errno, "cannot be listed: %m");
		exl3_closep(&fd);
		return rc;
	}
	while (rc == 0 && (errno = 0, e = readdir(dir)))
		if (e->d_name[0] != '.' && has_suffix(e->d_name, SUFFIX))
			rc = names_add(n, e->d_name, err);
	if (rc == 0 && errno)
		rc = exl3_errf(err, -errno, "cannot be listed: %m");
	closedir(dir);
	if (n->nr)
		qsort(n->v, n->nr, sizeof(*n->v), cmp_str);
	return rc;
}

/* "stem-00002-of-00005.safetensors": its siblings must be there too. */
static int check_siblings(const struct names *n, struct exl3_error *err)
{
	for (uint32_t i = 0; i < n->nr; i++) {
		size_t len = strlen(n->v[i]) - strlen(SUFFIX);
		char *tail, want[300];
		unsigned total, digits = 5;

		if (len < 15 || len > 200)
			continue;
		tail = n->v[i] + len - 15; /* -NNNNN-of-MMMMM */
		if (tail[0] != '-' || strncmp(tail + 6, "-of-", 4) ||
		    strspn(tail + 1, "0123456789") != digits ||
		    strspn(tail + 10, "0123456789") != digits)
			continue;
		total = (unsigned)strtoul(tail + 10, NULL, 10);
		for (unsigned s = 1; s <= total && s <= EXL3_SHARDS_MAX; s++) {
			snprintf(want, sizeof(want), "%.*s-%05u-of-%05u" SUFFIX,
				 (int)(tail - n->v[i]), n->v[i], s, total);
			if (!names_has(n, want))
				return exl3_errf(err, -EINVAL, "%s: its sibling %s is missing",
						 n->v[i], want);
		}
	}
	return 0;
}

/* The files that the index names must be there, as plain names in this directory. */
static int check_index_files(const cJSON *map, const struct names *files, struct exl3_error *err)
{
	const char *last = NULL;
	const cJSON *e;

	cJSON_ArrayForEach(e, map)
	{
		if (!cJSON_IsString(e))
			return exl3_errf(err, -EINVAL, INDEX_NAME ": tensor '%.160s': no file name",
					 e->string);
		if (last && !strcmp(last, e->valuestring))
			continue;
		last = e->valuestring;
		if (strchr(last, '/'))
			return exl3_errf(err, -EINVAL,
					 INDEX_NAME
					 ": tensor '%.160s': '%.100s' is not a plain file name",
					 e->string, last);
		if (!names_has(files, last))
			return exl3_errf(err, -EINVAL,
					 INDEX_NAME ": tensor '%.160s': its file %.100s is missing",
					 e->string, last);
	}
	return 0;
}

static int check_index_tensors(const cJSON *map, const struct exl3_ckpt *ckpt,
			       struct exl3_error *err)
{
	const cJSON *e;

	cJSON_ArrayForEach(e, map)
	{
		const struct exl3_ckpt_tensor *t = exl3_ckpt_find(ckpt, e->string);

		if (!t || strcmp(ckpt->files[t->file].name, e->valuestring))
			return exl3_errf(err, -EINVAL,
					 "%.100s: tensor '%.160s': named by " INDEX_NAME
					 ", but not in that file",
					 e->valuestring, e->string);
	}
	return 0;
}

static int cmp_tensor(const void *a, const void *b)
{
	const struct exl3_ckpt_tensor *x = a, *y = b;

	return strcmp(x->t->name, y->t->name);
}

static int merge(struct exl3_ckpt *ckpt, struct exl3_error *err)
{
	uint64_t nr = 0;

	for (uint32_t f = 0; f < ckpt->nr_files; f++)
		nr += ckpt->files[f].nr_tensors;
	if (nr > EXL3_ST_TENSORS_MAX)
		return exl3_errf(err, -EINVAL, "more than %u tensors", EXL3_ST_TENSORS_MAX);
	ckpt->tensors = malloc((nr + 1) * sizeof(*ckpt->tensors));
	if (!ckpt->tensors)
		return exl3_errf(err, -ENOMEM, "out of memory");
	for (uint32_t f = 0; f < ckpt->nr_files; f++)
		for (uint32_t i = 0; i < ckpt->files[f].nr_tensors; i++) {
			const struct exl3_st_tensor *t = &ckpt->files[f].tensors[i];

			ckpt->tensors[ckpt->nr_tensors++] = (struct exl3_ckpt_tensor){t, f};
			ckpt->data_bytes += t->bytes;
		}
	qsort(ckpt->tensors, ckpt->nr_tensors, sizeof(*ckpt->tensors), cmp_tensor);
	for (uint32_t i = 1; i < ckpt->nr_tensors; i++)
		if (!cmp_tensor(&ckpt->tensors[i - 1], &ckpt->tensors[i]))
			return exl3_errf(err, -EINVAL, "%.100s: tensor '%.160s': also in %.100s",
					 ckpt->files[ckpt->tensors[i].file].name,
					 ckpt->tensors[i].t->name,
					 ckpt->files[ckpt->tensors[i - 1].file].name);
	return 0;
}

static int read_all(int dirfd, struct exl3_ckpt *ckpt, struct names *names, struct exl3_error *err)
{
	exl3_auto(exl3_json_freep) cJSON *index = NULL;
	const cJSON *map = NULL;
	int rc;

	rc = exl3_json_read(dirfd, "config.json", EXL3_JSON_CONFIG_MAX, &ckpt->config, err);
	if (rc < 0 && rc != -ENOENT)
		return rc;
	if (ckpt->config && !cJSON_IsObject(ckpt->config))
		return exl3_errf(err, -EINVAL, "config.json: not a JSON object");
	rc = list_files(dirfd, names, err);
	if (rc < 0)
		return rc;
	rc = exl3_json_read(dirfd, INDEX_NAME, EXL3_JSON_INDEX_MAX, &index, err);
	if (rc < 0 && rc != -ENOENT)
		return rc;
	if (index) {
		map = cJSON_GetObjectItemCaseSensitive(index, "weight_map");
		if (!cJSON_IsObject(map))
			return exl3_errf(err, -EINVAL, INDEX_NAME ": no weight_map");
		rc = check_index_files(map, names, err);
		if (rc < 0)
			return rc;
	}
	if (!names->nr)
		return exl3_errf(err, -ENOENT, "no *" SUFFIX " in this directory");
	rc = check_siblings(names, err);
	if (rc < 0)
		return rc;
	ckpt->files = calloc(names->nr, sizeof(*ckpt->files));
	if (!ckpt->files)
		return exl3_errf(err, -ENOMEM, "out of memory");
	for (; ckpt->nr_files < names->nr; ckpt->nr_files++) {
		rc = exl3_st_open(dirfd, names->v[ckpt->nr_files], &ckpt->files[ckpt->nr_files],
				  err);
		if (rc < 0)
			return rc == -ENOENT ? exl3_errf(err, -EINVAL, "%s: a link to nowhere",
							 names->v[ckpt->nr_files])
					     : rc;
	}
	rc = merge(ckpt, err);
	if (rc < 0 || !map)
		return rc;
	return check_index_tensors(map, ckpt, err);
}

int exl3_ckpt_open(const char *path, struct exl3_ckpt *ret, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int dirfd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct exl3_ckpt ckpt = {0};
	struct names names = {0};
	int rc;

	if (dirfd < 0)
		return exl3_errf(err, errno == ENOTDIR || errno == ELOOP ? -EINVAL : -errno,
				 "%.200s: cannot be opened as a directory: %m", path);
	rc = read_all(dirfd, &ckpt, &names, err);
	names_fini(&names);
	if (rc < 0) {
		exl3_ckpt_fini(&ckpt);
		exl3_err_prefix(err, "%.200s", path);
		return rc;
	}
	*ret = ckpt;
	return 0;
}

void exl3_ckpt_fini(struct exl3_ckpt *ckpt)
{
	for (uint32_t f = 0; f < ckpt->nr_files; f++)
		exl3_st_fini(&ckpt->files[f]);
	free(ckpt->files);
	free(ckpt->tensors);
	cJSON_Delete(ckpt->config);
	*ckpt = (struct exl3_ckpt){0};
}

const struct exl3_ckpt_tensor *exl3_ckpt_find(const struct exl3_ckpt *ckpt, const char *name)
{
	struct exl3_st_tensor t = {.name = (char *)name};
	struct exl3_ckpt_tensor key = {.t = &t};

	if (!ckpt->nr_tensors)
		return NULL;
	return bsearch(&key, ckpt->tensors, ckpt->nr_tensors, sizeof(key), cmp_tensor);
}
