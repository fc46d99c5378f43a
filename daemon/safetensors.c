/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.c - the header of one file: which tensor lies where, every claim checked. */
#include "daemon/safetensors.h"

#include "daemon/json.h"
#include "shm/exl3_abi.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct exl3_st_dtype dtypes[] = {
	{"BOOL", 8},    {"U8", 8},      {"I8", 8},      {"F8_E4M3", 8}, {"F8_E5M2", 8},
	{"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},      {"I16", 16},
	{"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},    {"U32", 32},
	{"F32", 32},    {"I64", 64},    {"U64", 64},    {"F64", 64},    {"C64", 64},
};

const struct exl3_st_dtype *exl3_st_dtype_find(const char *name)
{
	for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
		if (!strcmp(dtypes[i].name, name))
			return &dtypes[i];
	return NULL;
}

/* Names go into messages, logs and listings: printable UTF-8 of bounded length, or the file is broken. */
static const char *name_fault(const char *name)
{
	const unsigned char *p = (const unsigned char *)name;

	if (!*name)
		return "empty name";
	if (strlen(name) > EXL3_NAME_MAX)
		return "name too long";
	while (*p) {
		int more = *p < 0x80                 ? 0
			   : *p >= 0xc2 && *p < 0xe0 ? 1
			   : *p >= 0xe0 && *p < 0xf0 ? 2
			   : *p >= 0xf0 && *p < 0xf5 ? 3
						     : -1;

		if (*p < 0x20 || *p == 0x7f || more < 0)
			return "name is not printable UTF-8";
		for (p++; more; more--, p++)
			if ((*p & 0xc0) != 0x80)
				return "name is not printable UTF-8";
	}
	return NULL;
}

#define TENSOR_ERR(fmt, ...) \
	exl3_errf(err, -EINVAL, "%s: tensor '%.160s': " fmt, file, t->name, ##__VA_ARGS__)

static int parse_shape(const char *file, const cJSON *shape, struct exl3_st_tensor *t,
		       struct exl3_error *err)
{
	const cJSON *dim;
	uint64_t bits;

	t->count = 1;
	cJSON_ArrayForEach(dim, shape)
	{
		uint64_t v;

		if (t->nr_dims == EXL3_ST_DIMS_MAX)
			return TENSOR_ERR("more than %d dimensions", EXL3_ST_DIMS_MAX);
		if (!exl3_json_u64(dim, &v))
			return TENSOR_ERR("shape holds something that is not a size");
		if (__builtin_mul_overflow(t->count, v, &t->count))
			return TENSOR_ERR("shape overflows");
		t->shape[t->nr_dims++] = v;
	}
	if (__builtin_mul_overflow(t->count, (uint64_t)t->dtype->bits, &bits))
		return TENSOR_ERR("shape overflows");
	if (bits % 8)
		return TENSOR_ERR("shape does not fill whole bytes");
	if (bits / 8 != t->bytes)
		return TENSOR_ERR("shape and dtype %s need %" PRIu64
				  " bytes, data_offsets hold %" PRIu64,
				  t->dtype->name, bits / 8, t->bytes);
	return 0;
}

/* One entry of the header. @t->name is set; the data section has @data bytes. */
static int parse_tensor(const char *file, const cJSON *entry, uint64_t data,
			struct exl3_st_tensor *t, struct exl3_error *err)
{
	const cJSON *dtype = NULL, *shape = NULL, *offsets = NULL, *item;
	uint64_t begin, end;

	if (!cJSON_IsObject(entry))
		return TENSOR_ERR("its entry is not an object");
	cJSON_ArrayForEach(item, entry)
	{
		const cJSON **slot = !strcmp(item->string, "dtype")          ? &dtype
				     : !strcmp(item->string, "shape")        ? &shape
				     : !strcmp(item->string, "data_offsets") ? &offsets
									     : NULL;

		if (!slot)
			continue;
		if (*slot)
			return TENSOR_ERR("%s is given twice", item->string);
		*slot = item;
	}
	if (!cJSON_IsString(dtype))
		return TENSOR_ERR("no dtype");
	if (!cJSON_IsArray(shape))
		return TENSOR_ERR("no shape");
	if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2)
		return TENSOR_ERR("no pair of data_offsets");
	t->dtype = exl3_st_dtype_find(dtype->valuestring);
	if (!t->dtype)
		return TENSOR_ERR("unknown dtype '%.20s'", dtype->valuestring);
	if (!exl3_json_u64(offsets->child, &begin) || !exl3_json_u64(offsets->child->next, &end))
		return TENSOR_ERR("data_offsets are not whole numbers");
	if (begin > end || end > data)
		return TENSOR_ERR("data_offsets [%" PRIu64 ", %" PRIu64 "] lie outside the %" PRIu64
				  " data bytes of the file (truncated?)",
				  begin, end, data);
	t->begin = begin;
	t->bytes = end - begin;
	return parse_shape(file, shape, t, err);
}

static int cmp_begin(const void *a, const void *b)
{
	const struct exl3_st_tensor *x = a, *y = b;

	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	if (x->bytes != y->bytes) /* empty tensors come before the one that starts there too */
		return x->bytes < y->bytes ? -1 : 1;
	return strcmp(x->name, y->name);
}

static int cmp_name(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static int check_names(const struct exl3_st_file *file, struct exl3_error *err)
{
	exl3_auto(exl3_freep) char **names = malloc((file->nr_tensors + 1) * sizeof(*names));

	if (!names)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", file->name);
	for (uint32_t i = 0; i < file->nr_tensors; i++)
		names[i] = file->tensors[i].name;
	qsort(names, file->nr_tensors, sizeof(*names), cmp_name);
	for (uint32_t i = 1; i < file->nr_tensors; i++)
		if (!strcmp(names[i - 1], names[i]))
			return exl3_errf(err, -EINVAL, "%s: tensor '%.160s': the name occurs twice",
					 file->name, names[i]);
	return 0;
}

/* The tensors must cover the data section from end to end; makes their places absolute. */
static int check_cover(struct exl3_st_file *file, struct exl3_error *err)
{
	uint64_t at = 0, data = file->bytes - file->data;

	if (file->nr_tensors)
		qsort(file->tensors, file->nr_tensors, sizeof(*file->tensors), cmp_begin);
	for (uint32_t i = 0; i < file->nr_tensors; i++) {
		struct exl3_st_tensor *t = &file->tensors[i];

		if (t->begin != at)
			return exl3_errf(err, -EINVAL,
					 "%s: tensor '%.160s': starts at data byte %" PRIu64
					 ", which %s at %" PRIu64,
					 file->name, t->name, t->begin,
					 t->begin < at ? "overlaps the one that ends"
						       : "leaves a gap after the one that ends",
					 at);
		at += t->bytes;
		t->begin += file->data;
	}
	if (at != data)
		return exl3_errf(err, -EINVAL,
				 "%s: %" PRIu64 " of its %" PRIu64
				 " data bytes belong to no tensor",
				 file->name, data - at, data);
	return 0;
}

int exl3_st_parse(struct exl3_st_file *file, const char *header, struct exl3_error *err)
{
	exl3_auto(exl3_json_freep) cJSON *json = NULL;
	const cJSON *entry;
	uint32_t nr = 0;
	int rc;

	rc = exl3_json_parse(file->name, header, (size_t)(file->data - 8), &json, err);
	if (rc < 0)
		return exl3_err_prefix(err, "header");
	if (!cJSON_IsObject(json))
		return exl3_errf(err, -EINVAL, "%s: the header is not a JSON object", file->name);
	cJSON_ArrayForEach(entry, json)
	{
		if (++nr > EXL3_ST_TENSORS_MAX)
			return exl3_errf(err, -EINVAL, "%s: more than %u tensors", file->name,
					 EXL3_ST_TENSORS_MAX);
	}
	file->tensors = calloc((size_t)nr + 1, sizeof(*file->tensors));
	if (!file->tensors)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", file->name);
	cJSON_ArrayForEach(entry, json)
	{
		struct exl3_st_tensor *t = &file->tensors[file->nr_tensors];
		const char *fault;

		if (!strcmp(entry->string, "__metadata__")) {
			if (!cJSON_IsObject(entry))
				return exl3_errf(err, -EINVAL, "%s: __metadata__ is not an object",
						 file->name);
			continue;
		}
		fault = name_fault(entry->string);
		if (fault)
			return exl3_errf(err, -EINVAL, "%s: tensor %u of the header: %s",
					 file->name, file->nr_tensors, fault);
		t->name = strdup(entry->string);
		if (!t->name)
			return exl3_errf(err, -ENOMEM, "%s: out of memory", file->name);
		file->nr_tensors++;
		rc = parse_tensor(file->name, entry, file->bytes - file->data, t, err);
		if (rc < 0)
			return rc;
	}
	rc = check_names(file, err);
	if (rc < 0)
		return rc;
	return check_cover(file, err);
}

static int read_header(struct exl3_st_file *file, struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *text = NULL;
	unsigned char raw[8];
	uint64_t n = 0;
	int rc;

	if (file->bytes < 8)
		return exl3_errf(err, -EINVAL, "%s: %" PRIu64 " bytes are too few for a header",
				 file->name, file->bytes);
	rc = exl3_pread_all(file->fd, file->name, raw, 8, 0, err);
	if (rc < 0)
		return rc;
	for (int i = 0; i < 8; i++)
		n |= (uint64_t)raw[i] << (8 * i);
	if (n > file->bytes - 8)
		return exl3_errf(err, -EINVAL,
				 "%s: the header claims %" PRIu64 " bytes, the file has %" PRIu64
				 " (truncated?)",
				 file->name, n, file->bytes);
	if (n > EXL3_ST_HEADER_MAX)
		return exl3_errf(err, -EINVAL,
				 "%s: the header claims %" PRIu64
				 " bytes, more than the limit of %u",
				 file->name, n, EXL3_ST_HEADER_MAX);
	text = malloc(n + 1);
	if (!text)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", file->name);
	rc = exl3_pread_all(file->fd, file->name, text, n, 8, err);
	if (rc < 0)
		return rc;
	text[n] = 0;
	file->data = 8 + n;
	return exl3_st_parse(file, text, err);
}

int exl3_st_open(int dirfd, const char *name, struct exl3_st_file *ret, struct exl3_error *err)
{
	struct exl3_st_file file = {.fd = -1};
	struct stat st;
	int rc;

	file.name = strdup(name);
	if (!file.name)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", name);
	rc = exl3_open_regular(dirfd, name, &file.fd, &file.bytes, err);
	if (rc == 0 && fstat(file.fd, &st) < 0)
		rc = exl3_errf(err, -errno, "%s: fstat: %m", name);
	if (rc == 0) {
		file.bytes = (uint64_t)st.st_size;
		file.mtime = st.st_mtim;
		rc = read_header(&file, err);
	}
	if (rc < 0) {
		exl3_st_fini(&file);
		return rc;
	}
	*ret = file;
	return 0;
}

void exl3_st_fini(struct exl3_st_file *file)
{
	for (uint32_t i = 0; i < file->nr_tensors; i++)
		free(file->tensors[i].name);
	free(file->tensors);
	free(file->name);
	exl3_closep(&file->fd);
	*file = (struct exl3_st_file){.fd = -1};
}

int exl3_st_unchanged(const struct exl3_st_file *file, struct exl3_error *err)
{
	struct stat st;

	if (fstat(file->fd, &st) < 0)
		return exl3_errf(err, -errno, "%s: fstat: %m", file->name);
	/* Not ctime: a new hard link or a chmod changes it, the content not. */
	if ((uint64_t)st.st_size != file->bytes || st.st_mtim.tv_sec != file->mtime.tv_sec ||
	    st.st_mtim.tv_nsec != file->mtime.tv_nsec)
		return exl3_errf(err, -EINVAL, "%s: changed while it was being loaded", file->name);
	return 0;
}
