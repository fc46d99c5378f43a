/* SPDX-License-Identifier: Apache-2.0 */
/* json.h - JSON of a checkpoint directory, read with limits; numbers checked before they are used. */
#ifndef EXL3_DAEMON_JSON_H
#define EXL3_DAEMON_JSON_H

#include "shm/util.h"

#include <cjson/cJSON.h>
#include <stdbool.h>

#define EXL3_JSON_CONFIG_MAX (16u << 20)  /* bytes of config.json */
#define EXL3_JSON_INDEX_MAX  (256u << 20) /* bytes of model.safetensors.index.json */
#define EXL3_JSON_DEPTH_MAX  64           /* levels of [ and { */
#define EXL3_JSON_VALUES_MAX (8u << 20)

/**
 * exl3_json_parse() - parse a whole text; only blanks may follow the value.
 * @what: where it comes from, for the sentence.
 * Returns 0 (*ret is the caller's, cJSON_Delete()), -EINVAL, -ENOMEM.
 */
int exl3_json_parse(const char *what, const char *text, size_t bytes, cJSON **ret,
		    struct exl3_error *err);

/* Reads and parses @dirfd/@name, a regular file of at most @max bytes. -ENOENT: there is none. */
int exl3_json_read(int dirfd, const char *name, size_t max, cJSON **ret, struct exl3_error *err);

/* A whole number 0..2^53, which is what a JSON number holds exactly. */
bool exl3_json_u64(const cJSON *item, uint64_t *ret);

/* Opens a regular file of a checkpoint, never blocking on a FIFO; errors as sentences. */
int exl3_open_regular(int dirfd, const char *name, int *fd, uint64_t *bytes,
		      struct exl3_error *err);
/* Reads exactly @bytes at @offset, or fails: -EINVAL when the file ends before that. */
int exl3_pread_all(int fd, const char *name, void *dst, size_t bytes, uint64_t offset,
		   struct exl3_error *err);

void exl3_json_freep(cJSON **json);

#endif
