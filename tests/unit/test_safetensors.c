/* SPDX-License-Identifier: Apache-2.0 */
/* test_safetensors.c - headers: what is believed, what is refused, and with which words. */
#include "tests/test.h"

#include "daemon/safetensors.h"
#include "tests/unit/make_ckpt.h"

#include <fcntl.h>
#include <sys/stat.h>

/* A header and how many data bytes stand behind it; @say: NULL, or what the refusal must contain. */
static const struct {
	const char *header;
	uint64_t data;
	const char *say;
} headers[] = {
	/* right ones */
	{"{}", 0, NULL},
	{"{\"__metadata__\":{\"format\":\"pt\"}}", 0, NULL},
	{"{\"a\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[0,12]}}", 12, NULL},
	{"{\"a\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[0,12]}} \n\t ", 12, NULL},
	{"{\"a\":{\"dtype\":\"I32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, NULL},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]}}", 0, NULL},
	{"{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,2]}}", 2, NULL},
	{"{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[0,3],\"x\":[1,2]}}", 3,
	 NULL},
	{"{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]},"
	 "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
	 3, NULL},
	/* an empty tensor between two others */
	{"{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]},"
	 "\"e\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]},"
	 "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
	 3, NULL},
	{"{\"\xc3\xa9\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, NULL},
	/* not JSON, or not what it should hold */
	{"", 0, "not valid JSON"},
	{"{", 0, "not valid JSON"},
	{"[]", 0, "not a JSON object"},
	{"{} x", 0, "follows the JSON"},
	{"{}{}", 0, "follows the JSON"},
	{"{\"__metadata__\":3}", 0, "__metadata__"},
	{"{\"a\":3}", 0, "'a': its entry is not an object"},
	{"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "'a': no dtype"},
	{"{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "no dtype"},
	{"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "no shape"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "no shape"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "no pair of data_offsets"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "no pair"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, "no pair"},
	{"{\"a\":{\"dtype\":\"U9\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
	 "unknown dtype 'U9'"},
	{"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
	 "dtype is given twice"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
	 "shape is given twice"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"data_offsets\":[0,1]}}",
	 1, "data_offsets is given twice"},
	/* names */
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
	 "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
	 2, "'a': the name occurs twice"},
	{"{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
	 "a string holds a zero character"},
	{"{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "empty name"},
	{"{\"a\\nb\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "not printable"},
	{"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "not printable"},
	{"{\"\xc3\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "not printable"},
	/* numbers */
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, "not a size"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1.5],\"data_offsets\":[0,1]}}", 1, "not a size"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[\"1\"],\"data_offsets\":[0,1]}}", 1, "not a size"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1e300],\"data_offsets\":[0,1]}}", 1, "not a size"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[9007199254740993],\"data_offsets\":[0,1]}}", 1,
	 "need 9007199254740992 bytes"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[9007199254740994],\"data_offsets\":[0,1]}}", 1,
	 "not a size"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,1]}}", 1,
	 "shape overflows"},
	{"{\"a\":{\"dtype\":\"F64\",\"shape\":[4294967296,2147483648],\"data_offsets\":[0,0]}}", 0,
	 "shape overflows"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
	 "more than 8 dimensions"},
	{"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, "whole bytes"},
	{"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2,
	 "dtype F16 need 4 bytes, data_offsets hold 2"},
	{"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,6]}}", 6, "need 4 bytes"},
	/* places */
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 1,
	 "outside the 1 data bytes"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,1]}}", 4, "outside"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]}}", 4,
	 "not whole numbers"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 2,
	 "1 of its 2 data bytes"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2,
	 "'a': starts at data byte 1"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
	 "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
	 3, "'b': starts at data byte 1, which overlaps"},
	{"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
	 "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
	 3, "'b': starts at data byte 2, which leaves a gap"},
};

static void header_table(void **state)
{
	(void)state;
	for (size_t i = 0; i < TEST_NR(headers); i++) {
		struct exl3_st_file f = {.name = strdup("f"), .fd = -1};
		struct exl3_error err = {0};
		int rc;

		f.data = 8 + strlen(headers[i].header);
		f.bytes = f.data + headers[i].data;
		rc = exl3_st_parse(&f, headers[i].header, &err);
		if (rc != (headers[i].say ? -EINVAL : 0) ||
		    (headers[i].say && !strstr(err.text, headers[i].say)))
			fail_msg("header %s: returned %d, '%s'; wanted '%s'", headers[i].header, rc,
				 err.text, headers[i].say ? headers[i].say : "(no error)");
		exl3_st_fini(&f);
	}
}

static void places_are_absolute_and_in_order(void **state)
{
	static const char header[] =
		"{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]},"
		"\"a\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
	struct exl3_st_file f = {.name = strdup("f"), .fd = -1, .data = 8 + sizeof(header) - 1};
	struct exl3_error err;

	(void)state;
	f.bytes = f.data + 3;
	test_code(exl3_st_parse(&f, header, &err), 0, &err);
	assert_int_equal(f.nr_tensors, 2);
	assert_string_equal(f.tensors[0].name, "a");
	assert_string_equal(f.tensors[0].dtype->name, "I8");
	assert_int_equal(f.tensors[0].begin, f.data);
	assert_string_equal(f.tensors[1].name, "b");
	assert_int_equal(f.tensors[1].begin, f.data + 1);
	assert_int_equal(f.tensors[1].bytes, 2);
	exl3_st_fini(&f);
}

static void nesting_and_long_names(void **state)
{
	static const char entry[] = "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
	char text[100000];
	struct exl3_error err;

	(void)state;
	/* The parser recurses: depth is bounded before it starts. */
	for (int depth = 63; depth <= 90000; depth = depth < 65 ? depth + 1 : depth * 10) {
		struct exl3_st_file f = {.name = strdup("f"), .fd = -1};

		memset(text, '[', (size_t)depth);
		text[depth] = 0;
		f.data = f.bytes = 8 + (uint64_t)depth;
		test_code(exl3_st_parse(&f, text, &err), -EINVAL, &err);
		assert_true(!strstr(err.text, "nested too deep") == (depth <= 64));
		exl3_st_fini(&f);
	}
	for (int len = 511; len <= 514; len++) {
		struct exl3_st_file f = {.name = strdup("f"), .fd = -1};

		snprintf(text, sizeof(text), "{\"%0*d%s", len, 0, entry);
		f.data = 8 + strlen(text);
		f.bytes = f.data + 1;
		test_code(exl3_st_parse(&f, text, &err), len <= 512 ? 0 : -EINVAL, &err);
		exl3_st_fini(&f);
	}
}

/* Whole files, by their first bytes and their size. */
static void files(void **state)
{
	static const struct {
		const char *bytes;
		size_t nr;
		const char *say;
	} rows[] = {
		{"", 0, "0 bytes are too few"},
		{"\2\0\0\0\0\0\0", 7, "7 bytes are too few"},
		{"\2\0\0\0\0\0\0\0{}", 10, NULL},
		{"\3\0\0\0\0\0\0\0{}", 10, "header claims 3 bytes"},
		{"\2\0\0\0\0\0\0\0{", 9, "header claims 2 bytes"},
		{"\377\377\377\377\377\377\377\377{}", 10,
		 "header claims 18446744073709551615 bytes"},
		{"\0\0\0\0\0\0\0\200{}", 10, "header claims 9223372036854775808 bytes"},
		{"\0\0\0\0\0\0\0\0", 8, "not valid JSON"},
		{"\2\0\0\0\0\0\0\0{}x", 11, "1 of its 1 data bytes belong to no tensor"},
	};
	char *dir = mk_dir();
	int dirfd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		struct exl3_st_file f;
		struct exl3_error err = {0};
		int rc;

		mk_bytes(dir, "x.safetensors", rows[i].bytes, rows[i].nr);
		rc = exl3_st_open(dirfd, "x.safetensors", &f, &err);
		if (rc != (rows[i].say ? -EINVAL : 0) ||
		    (rows[i].say &&
		     (!strstr(err.text, rows[i].say) || !strstr(err.text, "x.safetensors"))))
			fail_msg("file %zu: returned %d, '%s'; wanted '%s'", i, rc, err.text,
				 rows[i].say ? rows[i].say : "(no error)");
		if (rc == 0)
			exl3_st_fini(&f);
	}
	close(dirfd);
	mk_rmdir(dir);
}

static void absurd_header_of_a_sparse_file(void **state)
{
	static const unsigned char head[8] = {1, 0xe1, 0xf5, 5}; /* 100000001 */
	char *dir = mk_dir(), path[5000];
	int dirfd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct exl3_st_file f;
	struct exl3_error err;

	(void)state;
	mk_bytes(dir, "x", head, 8);
	snprintf(path, sizeof(path), "%s/x", dir);
	assert_int_equal(truncate(path, 200000000), 0);
	test_code(exl3_st_open(dirfd, "x", &f, &err), -EINVAL, &err);
	assert_non_null(strstr(err.text, "more than the limit of 100000000"));
	close(dirfd);
	mk_rmdir(dir);
}

static void not_files(void **state)
{
	char *dir = mk_dir(), path[5000];
	int dirfd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct exl3_st_file f;
	struct exl3_error err;

	(void)state;
	test_code(exl3_st_open(dirfd, "none", &f, &err), -ENOENT, &err);
	snprintf(path, sizeof(path), "%s/fifo", dir);
	assert_int_equal(mkfifo(path, 0600), 0);
	test_code(exl3_st_open(dirfd, "fifo", &f, &err), -EINVAL, &err);
	assert_non_null(strstr(err.text, "not a regular file"));
	test_code(exl3_st_open(dirfd, ".", &f, &err), -EINVAL, &err);
	assert_int_equal(symlinkat("loop", dirfd, "loop"), 0);
	test_code(exl3_st_open(dirfd, "loop", &f, &err), -EINVAL, &err);
	close(dirfd);
	mk_rmdir(dir);
}

static void notices_a_change(void **state)
{
	char *dir = mk_dir();
	int dirfd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1}};
	struct exl3_st_file f;
	struct exl3_error err;

	(void)state;
	mk_save(mk_new(), dir, "x", 0);
	test_code(exl3_st_open(dirfd, "x", &f, &err), 0, &err);
	test_code(exl3_st_unchanged(&f, &err), 0, &err);
	assert_int_equal(fchmodat(dirfd, "x", 0600, 0), 0);
	test_code(exl3_st_unchanged(&f, &err), 0, &err);
	assert_int_equal(utimensat(dirfd, "x", times, 0), 0);
	test_code(exl3_st_unchanged(&f, &err), -EINVAL, &err);
	assert_non_null(strstr(err.text, "changed while"));
	exl3_st_fini(&f);
	close(dirfd);
	mk_rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(header_table),
		test_case(places_are_absolute_and_in_order),
		test_case(nesting_and_long_names),
		test_case(files),
		test_case(absurd_header_of_a_sparse_file),
		test_case(not_files),
		test_case(notices_a_change),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
