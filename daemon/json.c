/* SPDX-License-Identifier: Apache-2.0 */
/* json.c - JSON of a checkpoint directory, read with limits; numbers checked before they are used. */
#include "daemon/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void exl3_json_freep(cJSON **json)
{
	cJSON_Delete(*json);
	*json = NULL;
}

/*
 * What our parser should not meet, found without parsing: it recurses, takes some 80 bytes for each
 * value, and ends a string at a zero character. NULL: nothing of that.
 */
static const char *json_fault(const char *text, size_t bytes)
{
	size_t depth = 0, values = 0;
	bool quoted = false;

	for (size_t i = 0; i < bytes; i++) {
		char c = text[i];

		if (quoted && c == '\\') {
			if (bytes - i > 5 && !memcmp(text + i + 1, "u0000", 5))
				return "a string holds a zero character";
			i++;
		} else if (c == '"') {
			quoted = !quoted;
		} else if (quoted) {
			continue;
		} else if (c == '{' || c == '[') {
			values++;
			if (++depth > EXL3_JSON_DEPTH_MAX)
				return "JSON is nested too deep";
		} else if (c == '}' || c == ']') {
			depth -= depth > 0;
		} else if (c == ',') {
			values++;
		}
	}
	return values > EXL3_JSON_VALUES_MAX ? "too many values in the JSON" : NULL;
}

int exl3_json_parse(const char *what, const char *text, size_t bytes, cJSON **ret,
		    struct exl3_error *err)
{
	const char *end = NULL, *fault = json_fault(text, bytes);
	cJSON *json;

	if (fault)
		return exl3_errf(err, -EINVAL, "%s: %s", what, fault);
	json = cJSON_ParseWithLengthOpts(text, bytes, &end, 0);
	if (!json)
		return exl3_errf(err, -EINVAL, "%s: not valid JSON near byte %zu", what,
				 end && end >= text ? (size_t)(end - text) : (size_t)0);
	while (end < text + bytes && (*end == ' ' || *end == '\t' || *end == '\n' || *end == '\r'))
		end++;
	if (end != text + bytes) {
		cJSON_Delete(json);
		return exl3_errf(err, -EINVAL, "%s: something follows the JSON at byte %zu", what,
				 (size_t)(end - text));
	}
	*ret = json;
	return 0;
}

int exl3_open_regular(int dirfd, const char *name, int *ret, uint64_t *bytes,
		      struct exl3_error *err)
{
	exl3_auto(exl3_closep) int fd = -1;
	struct stat st;

	/* O_NONBLOCK: a FIFO or a device of that name must not hold the loader up. */
	fd = openat(dirfd, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	if (fd < 0) {
		int code = errno == ENOENT ? -ENOENT : errno == ELOOP ? -EINVAL : -errno;

		return exl3_errf(err, code, "%s: cannot be opened: %m", name);
	}
	if (fstat(fd, &st) < 0)
		return exl3_errf(err, -errno, "%s: fstat: %m", name);
	if (!S_ISREG(st.st_mode))
		return exl3_errf(err, -EINVAL, "%s: not a regular file", name);
	/* Past this point waiting is right, and io_uring would answer EAGAIN instead. */
	if (fcntl(fd, F_SETFL, 0) < 0)
		return exl3_errf(err, -errno, "%s: fcntl: %m", name);
	*bytes = (uint64_t)st.st_size;
	*ret = exl3_take_fd(&fd);
	return 0;
}

int exl3_pread_all(int fd, const char *name, void *dst, size_t bytes, uint64_t offset,
		   struct exl3_error *err)
{
	char *p = dst;
	size_t done = 0;

	while (done < bytes) {
		ssize_t n = pread(fd, p + done, bytes - done, (off_t)(offset + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return exl3_errf(err, -errno, "%s: read at byte %llu: %m", name,
					 (unsigned long long)(offset + done));
		if (n == 0)
			return exl3_errf(err, -EINVAL, "%s: ends at byte %llu, %zu bytes short",
					 name, (unsigned long long)(offset + done), bytes - done);
		done += (size_t)n;
	}
	return 0;
}

int exl3_json_read(int dirfd, const char *name, size_t max, cJSON **ret, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int fd = -1;
	exl3_auto(exl3_freep) char *text = NULL;
	uint64_t bytes;
	int rc;

	rc = exl3_open_regular(dirfd, name, &fd, &bytes, err);
	if (rc < 0)
		return rc;
	if (bytes > max)
		return exl3_errf(err, -EINVAL, "%s: %llu bytes, more than the limit of %zu", name,
				 (unsigned long long)bytes, max);
	text = malloc(bytes + 1);
	if (!text)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", name);
	rc = exl3_pread_all(fd, name, text, bytes, 0, err);
	if (rc < 0)
		return rc;
	text[bytes] = 0;
	return exl3_json_parse(name, text, bytes, ret, err);
}

bool exl3_json_u64(const cJSON *item, uint64_t *ret)
{
	double v;

	if (!cJSON_IsNumber(item))
		return false;
	v = item->valuedouble;
	if (!(v >= 0 && v <= 0x1p53) || v != (double)(uint64_t)v)
		return false;
	*ret = (uint64_t)v;
	return true;
}
