/* SPDX-License-Identifier: Apache-2.0 */
/* test_segment.c - sealed shared memory: what may be mapped, and which ring headers are believed. */
#include "tests/test.h"

#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define PAGE 4096u

static void new_is_zero_sealed_and_there(void **state)
{
	static const size_t sizes[] = {1, PAGE, PAGE + 1, 1u << 20};

	(void)state;
	for (size_t i = 0; i < TEST_NR(sizes); i++) {
		struct exl3_segment *seg;
		struct exl3_error err;
		struct stat st;

		test_code(exl3_segment_new("test", sizes[i], &seg, &err), 0, &err);
		assert_int_equal(seg->bytes, (sizes[i] + PAGE - 1) / PAGE * PAGE);
		assert_int_equal(fstat(seg->fd, &st), 0);
		assert_int_equal(st.st_size, seg->bytes);
		assert_int_equal(st.st_blocks * 512, seg->bytes); /* no page left to fail later */
		for (size_t j = 0; j < seg->bytes; j++)
			assert_int_equal(((char *)seg->base)[j], 0);
		assert_int_equal(ftruncate(seg->fd, 0), -1);
		assert_int_equal(errno, EPERM);
		assert_int_equal(ftruncate(seg->fd, (off_t)seg->bytes + PAGE), -1);
		assert_int_equal(fcntl(seg->fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
		assert_int_equal(fcntl(seg->fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
		assert_null(exl3_segment_free(seg));
	}
	assert_null(exl3_segment_free(NULL));
}

static void impossible_sizes(void **state)
{
	static const struct {
		size_t bytes;
		int want;
	} rows[] = {
		{0, -EINVAL},
		{SIZE_MAX, -ENOMEM},
		{SIZE_MAX / 2, -ENOMEM},
		{(size_t)1 << 50, -ENOMEM},
	};
	struct exl3_segment *seg;
	struct exl3_error err;

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++)
		test_code(exl3_segment_new("test", rows[i].bytes, &seg, &err), rows[i].want, &err);
}

static void map_checks_what_was_sent(void **state)
{
	enum { SEALED = F_SEAL_SHRINK | F_SEAL_GROW };
	static const struct {
		const char *what;
		off_t size;
		int seals;
		size_t announced;
		int want;
	} rows[] = {
		{"as announced", PAGE, SEALED, PAGE, 0},
		{"sealed further", PAGE, SEALED | F_SEAL_SEAL, PAGE, 0},
		{"larger than announced", 2 * PAGE, SEALED, PAGE, -EPROTO},
		{"smaller than announced", PAGE, SEALED, 2 * PAGE, -EPROTO},
		{"not whole pages", PAGE - 1, SEALED, PAGE - 1, -EPROTO},
		{"empty", 0, SEALED, 0, -EPROTO},
		{"may shrink", PAGE, F_SEAL_GROW, PAGE, -EPROTO},
		{"may grow", PAGE, F_SEAL_SHRINK, PAGE, -EPROTO},
		{"not sealed", PAGE, 0, PAGE, -EPROTO},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING), e;
		struct exl3_segment *seg = NULL;
		struct exl3_error err;

		assert_int_equal(ftruncate(fd, rows[i].size), 0);
		if (rows[i].seals)
			assert_int_equal(fcntl(fd, F_ADD_SEALS, rows[i].seals), 0);
		e = exl3_segment_map(fd, rows[i].announced, &seg, &err);
		if (e != rows[i].want)
			fail_msg("%s: returned %d, wanted %d", rows[i].what, e, rows[i].want);
		if (e == 0)
			exl3_segment_free(seg);
		else
			assert_int_equal(close(fd), 0); /* still ours when it was refused */
	}
}

static void map_refuses_other_files(void **state)
{
	struct exl3_segment *seg;
	struct exl3_error err;
	int fds[2];

	(void)state;
	assert_int_equal(pipe(fds), 0);
	test_code(exl3_segment_map(fds[0], PAGE, &seg, &err), -EPROTO, &err);
	test_code(exl3_segment_map(-1, PAGE, &seg, &err), -EPROTO, &err);
	close(fds[0]);
	close(fds[1]);
}

static void ring_sizes(void **state)
{
	static const struct {
		uint32_t entries;
		int want;
	} rows[] = {
		{0, -EINVAL},
		{1, -EINVAL},
		{2, 0},
		{3, -EINVAL},
		{4, 0},
		{EXL3_SQ_ENTRIES_MAX, 0},
		{EXL3_SQ_ENTRIES_MAX + 1, -EINVAL},
		{2 * EXL3_SQ_ENTRIES_MAX, -EINVAL},
		{1u << 31, -EINVAL},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		struct exl3_ring_params p = {.sq_entries = rows[i].entries};
		struct exl3_segment *seg = NULL;
		struct exl3_ring_server srv;
		struct exl3_error err;

		test_code(exl3_ring_create(&p, &seg, &srv, &err), rows[i].want, &err);
		exl3_segment_free(seg);
	}
}

/* One word of the header wrong at a time: the client must not believe it. */
static void attach_checks_the_header(void **state)
{
#define WORD(field, value)                                           \
	{                                                            \
#field, offsetof(struct exl3_ring_hdr, field), value \
	}
	static const struct {
		const char *field;
		size_t at;
		uint32_t value;
	} rows[] = {
		WORD(magic, 0),
		WORD(version, EXL3_ABI_VERSION + 1),
		WORD(sq_entries, 0),
		WORD(sq_entries, 3),
		WORD(sq_entries, 8),
		WORD(sq_entries, 1u << 31),
		WORD(cq_entries, 4),
		WORD(cq_entries, 0),
		WORD(sqe_offset, 0),
		WORD(sqe_offset, 513),
		WORD(sqe_offset, UINT32_MAX - 63),
		WORD(cqe_offset, 512),
		WORD(cqe_offset, 1025),
		WORD(cqe_offset, 4096 - 64),
		WORD(cqe_offset, UINT32_MAX - 63),
		WORD(bytes, 8192),
		WORD(bytes, 0),
	};
#undef WORD
	struct exl3_ring_params p = {.sq_entries = 4};
	struct exl3_segment *seg;
	struct exl3_ring_server srv;
	struct exl3_ring_client cli;
	struct exl3_error err;

	(void)state;
	test_code(exl3_ring_create(&p, &seg, &srv, &err), 0, &err);
	assert_int_equal(seg->bytes, PAGE);
	test_code(exl3_ring_attach(seg, &cli, &err), 0, &err);
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		uint32_t *word = (uint32_t *)((char *)seg->base + rows[i].at), saved = *word;
		int e;

		*word = rows[i].value;
		e = exl3_ring_attach(seg, &cli, &err);
		if (e != -EPROTO)
			fail_msg("%s = %u: returned %d", rows[i].field, rows[i].value, e);
		*word = saved;
	}
	test_code(exl3_ring_attach(seg, &cli, &err), 0, &err);
	exl3_segment_free(seg);
}

static void error_texts(void **state)
{
	struct exl3_error err;
	char longer[2 * EXL3_ERROR_TEXT_MAX];

	(void)state;
	errno = ENOENT;
	assert_int_equal(exl3_errf(&err, -ENOENT, "open %s: %m", "x"), -ENOENT);
	assert_string_equal(err.text, "open x: No such file or directory");
	assert_int_equal(exl3_err_prefix(&err, "model %d", 3), -ENOENT);
	assert_string_equal(err.text, "model 3: open x: No such file or directory");
	assert_int_equal(exl3_errf(NULL, -EIO, "nobody listens"), -EIO);
	memset(longer, 'a', sizeof(longer));
	longer[sizeof(longer) - 1] = 0;
	exl3_errf(&err, -EIO, "%s", longer);
	assert_int_equal(strlen(err.text), EXL3_ERROR_TEXT_MAX - 1);
	exl3_err_prefix(&err, "%s", longer);
	assert_int_equal(strlen(err.text), EXL3_ERROR_TEXT_MAX - 1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(new_is_zero_sealed_and_there),
		test_case(impossible_sizes),
		test_case(map_checks_what_was_sent),
		test_case(map_refuses_other_files),
		test_case(ring_sizes),
		test_case(attach_checks_the_header),
		test_case(error_texts),
	};

	return cmocka_run_group_tests_name("segment", tests, NULL, NULL);
}
