/* SPDX-License-Identifier: Apache-2.0 */
/* test_npy.c - NumPy files: versions, orders, byte orders, and what is refused. */
#include "tests/test.h"

#include "client/npy.h"

static size_t make(unsigned char *buf, int version, const char *header, const void *data,
		   size_t bytes)
{
	size_t n = strlen(header), at = version == 1 ? 10 : 12;

	memcpy(buf, "\x93NUMPY", 6);
	buf[6] = (unsigned char)version;
	buf[7] = 0;
	buf[8] = (unsigned char)n;
	buf[9] = (unsigned char)(n >> 8);
	if (version > 1)
		buf[10] = buf[11] = 0;
	memcpy(buf + at, header, n);
	memcpy(buf + at + n, data, bytes);
	return at + n + bytes;
}

static const uint16_t six[6] = {10, 11, 12, 20, 21, 22};

static void accepted(void **state)
{
	/* All of them hold the rows 10 11 12 and 20 21 22, or its column-major twin. */
	static const uint16_t columns[6] = {10, 20, 11, 21, 12, 22};
	static const unsigned char big[12] = {0, 10, 0, 11, 0, 12, 0, 20, 0, 21, 0, 22};
	static const struct {
		const char *header;
		int version;
		const void *data;
		char kind;
	} rows[] = {
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }\n", 1, six, 'u'},
		{"{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }\n", 2, six, 'i'},
		{"{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }\n", 3, six, 'f'},
		{"{'descr': '<u2', 'fortran_order': True, 'shape': (2, 3), }\n", 1, columns, 'u'},
		{"{'descr': '>u2', 'fortran_order': False, 'shape': (2, 3), }\n", 1, big, 'u'},
		{"{\"shape\":(2,3),\"fortran_order\":False,\"descr\":\"=u2\"}", 1, six, 'u'},
		{"  { 'shape' : ( 2L , 3L , ) , 'fortran_order' : False , 'descr' : 'u2' }  \n", 1,
		 six, 'u'},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		unsigned char buf[256];
		size_t n = make(buf, rows[i].version, rows[i].header, rows[i].data, 12);
		struct exl3_error err = {0};
		struct exl3_npy a;

		test_code(exl3_npy_parse(buf, n, &a, &err), 0, &err);
		assert_int_equal(a.kind, rows[i].kind);
		assert_int_equal(a.size, 2);
		assert_int_equal(a.nr_dims, 2);
		assert_int_equal(a.shape[0], 2);
		assert_int_equal(a.shape[1], 3);
		assert_int_equal(a.count, 6);
		assert_memory_equal(a.data, six, sizeof(six));
		exl3_npy_fini(&a);
	}
}

static void refused(void **state)
{
	static const struct {
		const char *header;
		int version;
		size_t bytes;
		int want;
	} rows[] = {
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }", 1, 10, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }", 1, 14, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }", 4, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }", 0, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, }", 1, 12, -EINVAL},
		{"{'fortran_order': False, 'shape': (2, 3), }", 1, 12, -EINVAL},
		{"{'descr': '<u2', 'shape': (2, 3), }", 1, 12, -EINVAL},
		{"{'descr': '<u2', 'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }", 1,
		 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': Maybe, 'shape': (2, 3), }", 1, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, -3), }", 1, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3", 1, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2 3), }", 1, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), } x", 1, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,6), }", 1, 12,
		 -EINVAL},
		/* Products that wrap to 12 bytes, and a number that wraps to 3. */
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (4611686018427387906, 6, ), }",
		 1, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 18446744073709551619), }",
		 1, 12, -EINVAL},
		{"{'descr': '<u2', 'fortran_order': False, 'shape': (9223372036854775814, 1), }", 1,
		 12, -EINVAL},
		{"{'descr': '<c8', 'fortran_order': False, 'shape': (2, 3), }", 1, 12, -EOPNOTSUPP},
		{"{'descr': '<f1', 'fortran_order': False, 'shape': (2, 3), }", 1, 6, -EOPNOTSUPP},
		{"{'descr': '<f16', 'fortran_order': False, 'shape': (2, 3), }", 1, 12,
		 -EOPNOTSUPP},
		{"{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }", 1, 12, -EOPNOTSUPP},
		{"{'descr': '', 'fortran_order': False, 'shape': (2, 3), }", 1, 12, -EOPNOTSUPP},
		{"", 1, 12, -EINVAL},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		unsigned char buf[256], data[16] = {0};
		size_t n = make(buf, rows[i].version, rows[i].header, data, rows[i].bytes);
		struct exl3_error err = {0};
		struct exl3_npy a;
		int e = exl3_npy_parse(buf, n, &a, &err);

		if (e != rows[i].want)
			fail_msg("%s: returned %d, wanted %d", rows[i].header, e, rows[i].want);
		assert_true(err.text[0]);
	}
}

/* Every shorter file is refused, wherever it is cut. */
static void cut_anywhere(void **state)
{
	static const char header[] =
		"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }\n";

	(void)state;
	for (int version = 1; version <= 3; version++) {
		unsigned char buf[256];
		size_t whole = make(buf, version, header, six, sizeof(six));

		for (size_t n = 0; n < whole; n++) {
			unsigned char *exact = malloc(n ? n : 1); /* a sanitizer sees the end */
			struct exl3_npy a;

			assert_non_null(exact);
			memcpy(exact, buf, n);
			assert_int_equal(exl3_npy_parse(exact, n, &a, NULL), -EINVAL);
			free(exact);
		}
	}
}

static void orders_of_three_dimensions(void **state)
{
	/* a[i][j][k] = 100 i + 10 j + k, first index fastest. */
	uint16_t columns[24], *got;
	unsigned char buf[256];
	struct exl3_npy a;
	size_t n = 0;

	(void)state;
	for (unsigned k = 0; k < 4; k++)
		for (unsigned j = 0; j < 3; j++)
			for (unsigned i = 0; i < 2; i++)
				columns[n++] = (uint16_t)(100 * i + 10 * j + k);
	n = make(buf, 1, "{'descr': '<u2', 'fortran_order': True, 'shape': (2, 3, 4), }", columns,
		 sizeof(columns));
	assert_int_equal(exl3_npy_parse(buf, n, &a, NULL), 0);
	got = a.data;
	for (unsigned i = 0; i < 2; i++)
		for (unsigned j = 0; j < 3; j++)
			for (unsigned k = 0; k < 4; k++)
				assert_int_equal(*got++, 100 * i + 10 * j + k);
	exl3_npy_fini(&a);
}

static void written_and_read(void **state)
{
	static const struct {
		unsigned nr_dims;
		uint64_t shape[3];
	} rows[] = {{0, {0}}, {1, {6}}, {2, {2, 3}}, {3, {3, 2, 1}}, {2, {0, 3}}, {1, {0}}};
	char dir[] = "/tmp/exl3-npy-XXXXXX", path[64];

	(void)state;
	assert_non_null(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/a.npy", dir);
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		struct exl3_error err;
		struct exl3_npy a;

		test_code(exl3_npy_save(path, "u2", rows[i].nr_dims, rows[i].shape, six, &err), 0,
			  &err);
		test_code(exl3_npy_load(path, &a, &err), 0, &err);
		assert_int_equal(a.nr_dims, rows[i].nr_dims);
		for (unsigned d = 0; d < a.nr_dims; d++)
			assert_int_equal(a.shape[d], rows[i].shape[d]);
		assert_memory_equal(a.data, six, a.count * 2);
		exl3_npy_fini(&a);
	}
	unlink(path);
	rmdir(dir);
}

static void files_that_fail(void **state)
{
	struct exl3_error err;
	struct exl3_npy a;

	(void)state;
	test_code(exl3_npy_load("/nonesuch/x.npy", &a, &err), -ENOENT, &err);
	assert_non_null(strstr(err.text, "/nonesuch/x.npy"));
	test_code(exl3_npy_load("/", &a, &err), -EISDIR, &err);
	test_code(exl3_npy_load("/dev/null", &a, &err), -EINVAL, &err);
	assert_non_null(strstr(err.text, "/dev/null"));
	test_code(exl3_npy_save("/nonesuch/x.npy", "f4", 0, NULL, "abcd", &err), -ENOENT, &err);
	test_code(exl3_npy_save("/dev/full", "f4", 0, NULL, "abcd", &err), -ENOSPC, &err);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(accepted),         test_case(refused),
		test_case(cut_anywhere),     test_case(orders_of_three_dimensions),
		test_case(written_and_read), test_case(files_that_fail),
	};

	return cmocka_run_group_tests_name("npy", tests, NULL, NULL);
}
