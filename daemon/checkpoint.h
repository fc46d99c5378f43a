/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint.h - a directory of safetensors files as one table of tensors. */
#ifndef EXL3_DAEMON_CHECKPOINT_H
#define EXL3_DAEMON_CHECKPOINT_H

#include "daemon/json.h"
#include "daemon/safetensors.h"

#define EXL3_SHARDS_MAX 4096u /* files of one checkpoint */

struct exl3_ckpt_tensor {
	const struct exl3_st_tensor *t; /* borrowed from its file */
	uint32_t file;
};

struct exl3_ckpt {
	struct exl3_st_file *files; /* owned, sorted by name */
	uint32_t nr_files;
	struct exl3_ckpt_tensor *tensors; /* owned, of all files, sorted by name */
	uint32_t nr_tensors;
	uint64_t data_bytes; /* of all tensors */
	cJSON *config;       /* owned; config.json, or NULL: there is none */
};

/**
 * exl3_ckpt_open() - open a checkpoint and check all of its headers.
 * @path: directory. Files: every *.safetensors in it, those of an index first of all; the headers
 *        say what is in them. Without config.json sizes and activations are what the files tell.
 * Returns 0, -ENOENT (no such directory, or nothing in it), -EINVAL (file, tensor and reason),
 * -ENOMEM, or what the file system says.
 */
int exl3_ckpt_open(const char *path, struct exl3_ckpt *ret, struct exl3_error *err);
void exl3_ckpt_fini(struct exl3_ckpt *ckpt); /* zeroed ones too */

/* NULL: no such tensor. */
const struct exl3_ckpt_tensor *exl3_ckpt_find(const struct exl3_ckpt *ckpt, const char *name);

#endif
