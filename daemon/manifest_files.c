/* SPDX-License-Identifier: Apache-2.0 */
/* manifest_files.c - which files a model was loaded from, and whether they are still the same ones. */
#include "daemon/manifest.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG "config.json"
#define SUFFIX ".safetensors"

static void describe(struct exl3_manifest_file *f, const struct stat *st)
{
	f->bytes = (uint64_t)st->st_size;
	f->inode = (uint64_t)st->st_ino;
	f->dev = (uint64_t)st->st_dev;
	f->mtime_s = st->st_mtim.tv_sec;
	f->mtime_ns = st->st_mtim.tv_nsec;
}

int exl3_manifest_list_files(const struct exl3_ckpt *ckpt, const char *path,
			     struct exl3_manifest_file **ret, uint32_t *nr, struct exl3_error *err)
{
	struct exl3_manifest_file *files = calloc((size_t)ckpt->nr_files + 1, sizeof(*files));
	uint32_t n = 0;
	bool ok = files != NULL;
	char name[4400];
	struct stat st;

	for (uint32_t i = 0; ok && i < ckpt->nr_files; i++, n++) {
		/* Of the open file, not of the name: it is the one that was read. */
		ok = fstat(ckpt->files[i].fd, &st) == 0 &&
		     (files[n].name = strdup(ckpt->files[i].name)) != NULL;
		if (ok)
			describe(&files[n], &st);
	}
	snprintf(name, sizeof(name), "%.4096s/" CONFIG, path);
	if (ok && ckpt->config && stat(name, &st) == 0) {
		files[n].name = strdup(CONFIG);
		ok = files[n].name != NULL;
		describe(&files[n++], &st);
	}
	if (!ok) {
		exl3_manifest_files_fini(files, n);
		return exl3_errf(err, -ENOMEM, "files of the checkpoint: out of memory");
	}
	*ret = files;
	*nr = n;
	return 0;
}

void exl3_manifest_files_fini(struct exl3_manifest_file *files, uint32_t nr)
{
	for (uint32_t i = 0; files && i < nr; i++)
		free(files[i].name);
	free(files);
}

static bool is_known(const struct exl3_manifest *man, const char *name)
{
	for (uint32_t i = 0; i < man->nr_files; i++)
		if (!strcmp(man->files[i].name, name))
			return true;
	return false;
}

/* Would a load now read this one? */
static bool counts(const char *name)
{
	size_t n = strlen(name), s = strlen(SUFFIX);

	return !strcmp(name, CONFIG) ||
	       (name[0] != '.' && n > s && !strcmp(name + n - s, SUFFIX));
}

static int check_new_files(const struct exl3_manifest *man, int dirfd, struct exl3_error *err)
{
	int fd = openat(dirfd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc = 0;
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *e;

	if (!dir) {
		exl3_closep(&fd);
		return exl3_errf(err, -ESTALE, "%.200s cannot be listed: %m", man->path);
	}
	while (rc == 0 && (e = readdir(dir)))
		if (counts(e->d_name) && !is_known(man, e->d_name))
			rc = exl3_errf(err, -ESTALE, "%.200s/%.100s was not there", man->path,
				       e->d_name);
	closedir(dir);
	return rc;
}

int exl3_manifest_check_files(const struct exl3_manifest *man, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int dirfd = open(man->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct stat st;

	if (dirfd < 0)
		return exl3_errf(err, -ESTALE, "%.200s: %m", man->path);
	for (uint32_t i = 0; i < man->nr_files; i++) {
		const struct exl3_manifest_file *f = &man->files[i];
		struct exl3_manifest_file now = {0};

		if (fstatat(dirfd, f->name, &st, 0) < 0)
			return exl3_errf(err, -ESTALE, "%.200s/%.100s: %m", man->path, f->name);
		describe(&now, &st);
		if (now.bytes != f->bytes)
			return exl3_errf(err, -ESTALE, "%.200s/%.100s has %llu bytes, it had %llu",
					 man->path, f->name, (unsigned long long)now.bytes,
					 (unsigned long long)f->bytes);
		if (now.mtime_s != f->mtime_s || now.mtime_ns != f->mtime_ns)
			return exl3_errf(err, -ESTALE, "%.200s/%.100s was written since", man->path,
					 f->name);
		if (now.inode != f->inode || now.dev != f->dev)
			return exl3_errf(err, -ESTALE, "%.200s/%.100s is another file", man->path,
					 f->name);
	}
	return check_new_files(man, dirfd, err);
}
