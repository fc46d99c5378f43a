/* SPDX-License-Identifier: Apache-2.0 */
/* test_loader.c - every byte once, in order, whichever way it is read; files that change under it. */
#include "tests/test.h"

#include "daemon/fault.h"
#include "daemon/loader.h"
#include "tests/unit/make_ckpt.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define MIB (1u << 20)

/* Checks what comes in against what mk_tensor() wrote. */
struct check {
	const struct exl3_ckpt *ckpt;
	uint32_t file, index; /* of the next tensor */
	uint64_t off;         /* in it */
	char *want;           /* its content, owned */
	uint64_t bytes, pieces;
	unsigned buffers, syncs;
	unsigned fail_at;   /* the n-th piece is refused */
	const char *cut;    /* cut this file while its second piece is looked at */
	_Atomic bool *stop; /* set at the second piece */
};

static int take(void *arg, uint32_t file, uint32_t index, uint64_t off, const void *p, size_t bytes,
		struct exl3_error *err)
{
	struct check *c = arg;
	const struct exl3_st_tensor *t;

	while (c->ckpt->files[c->file].nr_tensors == c->index ||
	       !c->ckpt->files[c->file].tensors[c->index].bytes) {
		if (c->ckpt->files[c->file].nr_tensors == c->index++) {
			c->file++;
			c->index = 0;
		}
	}
	t = &c->ckpt->files[c->file].tensors[c->index];
	assert_int_equal(file, c->file);
	assert_int_equal(index, c->index);
	assert_int_equal(off, c->off);
	assert_true(bytes > 0 && off + bytes <= t->bytes);
	if (t->bytes <= EXL3_WHOLE_MAX)
		assert_int_equal(bytes, t->bytes);
	if (off == 0) {
		c->want = malloc(t->bytes);
		assert_non_null(c->want);
		mk_fill(t->name, c->want, t->bytes);
	}
	if (memcmp(c->want + off, p, bytes))
		fail_msg("tensor '%s': bytes from %llu differ", t->name, (unsigned long long)off);
	c->off += bytes;
	c->bytes += bytes;
	if (c->off == t->bytes) {
		free(c->want);
		c->want = NULL;
		c->off = 0;
		c->index++;
	}
	if (++c->pieces == c->fail_at)
		return exl3_errf(err, -EIO, "as the test wants it");
	if (c->pieces == 2 && c->cut)
		assert_int_equal(truncate(c->cut, 5 * MIB), 0);
	if (c->pieces == 2 && c->stop)
		atomic_store(c->stop, true);
	return 0;
}

static int synced(void *arg, struct exl3_error *err)
{
	struct check *c = arg;

	(void)err;
	c->syncs++;
	return 0;
}

static void *buffer_new(void *arg, size_t bytes)
{
	struct check *c = arg;

	c->buffers++;
	return aligned_alloc(4096, bytes);
}

static void buffer_free(void *arg, void *p, size_t bytes)
{
	struct check *c = arg;

	memset(p, 0xee, bytes); /* a read that is still under way would show under ASan */
	free(p);
	c->buffers--;
}

static struct exl3_loader loader_for(struct check *c)
{
	return (struct exl3_loader){
		.ckpt = c->ckpt,
		.arg = c,
		.data = take,
		.sync = synced,
		.buffer_new = buffer_new,
		.buffer_free = buffer_free,
	};
}

/* Two files: sizes around the span, around a page, empty tensors, data at an odd byte. */
static void make(const char *dir)
{
	static const size_t sizes[] = {1,           3,
				       0,           4095,
				       4096,        4097,
				       100000,      EXL3_SPAN - 1,
				       EXL3_SPAN,   EXL3_SPAN + 1,
				       7,           3 * MIB,
				       2 * MIB,     0,
				       9 * MIB + 5, 11};
	char name[32];
	struct mk *f = mk_new();

	for (size_t i = 0; i < TEST_NR(sizes); i++) {
		snprintf(name, sizeof(name), "t%zu", i);
		mk_tensor(f, name, "U8", MK_DIMS((int64_t)sizes[i]), NULL, sizes[i]);
	}
	mk_save(f, dir, "a.safetensors", 1);
	f = mk_new();
	mk_tensor(f, "empty", "F32", MK_DIMS(0, 3), NULL, 0);
	mk_save(f, dir, "b.safetensors", 0);
	f = mk_new();
	mk_tensor(f, "last", "U8", MK_DIMS(5), NULL, 5);
	mk_tensor(f, "end", "U8", MK_DIMS(0), NULL, 0);
	mk_save(f, dir, "c.safetensors", 2);
}

/* Drops the pages, so that the loader finds them absent. */
static void drop(const struct exl3_ckpt *ckpt)
{
	for (uint32_t f = 0; f < ckpt->nr_files; f++) {
		assert_int_equal(fsync(ckpt->files[f].fd), 0);
		assert_int_equal(posix_fadvise(ckpt->files[f].fd, 0, 0, POSIX_FADV_DONTNEED), 0);
	}
}

static void all_ways(void **state)
{
	char *dir = mk_dir();
	struct exl3_ckpt ckpt;
	struct exl3_error err;

	(void)state;
	make(dir);
	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	for (int way = 0; way < 8; way++) {
		struct check c = {.ckpt = &ckpt};
		struct exl3_loader l = loader_for(&c);
		struct exl3_loader_stats stats;
		_Atomic uint64_t loaded = 0;

		l.no_uring = way & 1;
		l.no_direct = way & 2;
		l.stats = &stats;
		l.loaded = &loaded;
		if (way & 4)
			drop(&ckpt);
		test_code(exl3_loader_run(&l, &err), 0, &err);
		assert_int_equal(c.bytes, ckpt.data_bytes);
		assert_int_equal(loaded, ckpt.data_bytes);
		assert_int_equal(c.buffers, 0);
		if (l.no_uring)
			assert_false(stats.uring);
		if (l.no_direct)
			assert_int_equal(stats.bytes_direct, 0);
		assert_true(stats.bytes_direct + stats.bytes_cached >= ckpt.data_bytes);
		print_message("way %d: io_uring %d, %llu bytes past the cache, %llu through it, "
			      "%llu reads\n",
			      way, stats.uring, (unsigned long long)stats.bytes_direct,
			      (unsigned long long)stats.bytes_cached,
			      (unsigned long long)stats.reads);
	}
	exl3_ckpt_fini(&ckpt);
	mk_rmdir(dir);
}

/* Reads that come back short, O_DIRECT that is refused after all, a ring that is not to be had. */
static void faults_that_do_not_matter(void **state)
{
	static const char *const faults[] = {
		"loader.short:1:0",  "loader.short:2:1",  "loader.short:3:4",
		"loader.direct:1:1", "loader.direct:3:0", "loader.uring:1:0",
	};
	char *dir = mk_dir();
	struct exl3_ckpt ckpt;
	struct exl3_error err;

	(void)state;
	make(dir);
	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	for (size_t i = 0; i < TEST_NR(faults); i++)
		for (int way = 0; way < 4; way++) {
			struct check c = {.ckpt = &ckpt};
			struct exl3_loader l = loader_for(&c);
			struct exl3_loader_stats stats;

			l.no_uring = way & 1;
			l.stats = &stats;
			if (way & 2)
				drop(&ckpt);
			assert_int_equal(setenv("EXL3_FAULT", faults[i], 1), 0);
			exl3_fault_init();
			test_code(exl3_loader_run(&l, &err), 0, &err);
			assert_int_equal(c.bytes, ckpt.data_bytes);
			assert_int_equal(c.buffers, 0);
			if (strstr(faults[i], "uring"))
				assert_false(stats.uring);
		}
	assert_int_equal(unsetenv("EXL3_FAULT"), 0);
	exl3_fault_init();
	exl3_ckpt_fini(&ckpt);
	mk_rmdir(dir);
}

static void reads_that_fail(void **state)
{
	char *dir = mk_dir(), fault[32];
	struct exl3_ckpt ckpt;
	struct exl3_error err;

	(void)state;
	make(dir);
	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	for (int n = 1; n <= 9; n++)
		for (int no_uring = 0; no_uring < 2; no_uring++) {
			struct check c = {.ckpt = &ckpt};
			struct exl3_loader l = loader_for(&c);

			l.no_uring = no_uring;
			snprintf(fault, sizeof(fault), "loader.read:%d:1", n);
			assert_int_equal(setenv("EXL3_FAULT", fault, 1), 0);
			exl3_fault_init();
			test_code(exl3_loader_run(&l, &err), -EIO, &err);
			assert_non_null(strstr(err.text, ".safetensors: read at byte"));
			assert_int_equal(c.buffers, 0);
			free(c.want);
		}
	assert_int_equal(unsetenv("EXL3_FAULT"), 0);
	exl3_fault_init();
	exl3_ckpt_fini(&ckpt);
	mk_rmdir(dir);
}

static void a_sink_that_fails(void **state)
{
	char *dir = mk_dir();
	struct exl3_ckpt ckpt;
	struct exl3_error err;

	(void)state;
	make(dir);
	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	for (unsigned at = 1; at < 30; at++) {
		struct check c = {.ckpt = &ckpt, .fail_at = at};
		struct exl3_loader l = loader_for(&c);
		int rc;

		l.no_uring = at & 1;
		rc = exl3_loader_run(&l, &err);
		assert_int_equal(c.buffers, 0);
		free(c.want);
		if (rc == 0) {
			assert_true(at > c.pieces);
			break;
		}
		test_code(rc, -EIO, &err);
	}
	exl3_ckpt_fini(&ckpt);
	mk_rmdir(dir);
}

static void cancelled(void **state)
{
	_Atomic bool stop = false;
	char *dir = mk_dir();
	struct exl3_ckpt ckpt;
	struct exl3_error err;
	struct check c = {.ckpt = &ckpt, .stop = &stop};
	struct exl3_loader l = loader_for(&c);

	(void)state;
	make(dir);
	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	l.cancel = &stop;
	test_code(exl3_loader_run(&l, &err), -ECANCELED, &err);
	assert_true(c.bytes < ckpt.data_bytes);
	assert_int_equal(c.buffers, 0);
	free(c.want);
	exl3_ckpt_fini(&ckpt);
	mk_rmdir(dir);
}

/* 80 MiB, so that reads beyond the cut have not been issued when it happens. */
static void cut_while_loading(void **state)
{
	static const size_t bytes = 80 * MIB;

	(void)state;
	for (int no_uring = 0; no_uring < 2; no_uring++) {
		char *dir = mk_dir(), path[5000];
		struct exl3_ckpt ckpt;
		struct exl3_error err;
		struct check c = {.ckpt = &ckpt, .cut = path};
		struct exl3_loader l = loader_for(&c);
		struct mk *f = mk_new();

		mk_tensor(f, "big", "U8", MK_DIMS((int64_t)bytes), NULL, bytes);
		mk_save(f, dir, "a.safetensors", 0);
		snprintf(path, sizeof(path), "%s/a.safetensors", dir);
		test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
		l.no_uring = no_uring;
		test_code(exl3_loader_run(&l, &err), -EINVAL, &err);
		assert_non_null(strstr(err.text, "a.safetensors: was cut"));
		assert_int_equal(c.buffers, 0);
		free(c.want);
		exl3_ckpt_fini(&ckpt);
		mk_rmdir(dir);
	}
}

static void touched_while_loading(void **state)
{
	struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1}};
	char *dir = mk_dir();
	struct exl3_ckpt ckpt;
	struct exl3_error err;
	struct check c = {.ckpt = &ckpt};
	struct exl3_loader l = loader_for(&c);

	(void)state;
	make(dir);
	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	assert_int_equal(futimens(ckpt.files[2].fd, times), 0);
	test_code(exl3_loader_run(&l, &err), -EINVAL, &err);
	assert_non_null(strstr(err.text, "c.safetensors: changed while"));
	exl3_ckpt_fini(&ckpt);
	mk_rmdir(dir);
}

static void no_descriptors(void **state)
{
	char *dir = mk_dir();
	struct exl3_ckpt ckpt;
	struct exl3_error err;
	struct check c = {.ckpt = &ckpt};
	struct exl3_loader l = loader_for(&c);
	struct rlimit old, none;

	(void)state;
	make(dir);
	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	/* No descriptor left: neither a ring nor a second fd per file, and it still loads. */
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	none = old;
	none.rlim_cur = (rlim_t)dup(0);
	close((int)none.rlim_cur);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
	test_code(exl3_loader_run(&l, &err), 0, &err);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	assert_int_equal(c.bytes, ckpt.data_bytes);
	exl3_ckpt_fini(&ckpt);
	mk_rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(all_ways),
		test_case(faults_that_do_not_matter),
		test_case(reads_that_fail),
		test_case(a_sink_that_fails),
		test_case(cancelled),
		test_case(cut_while_loading),
		test_case(touched_while_loading),
		test_case(no_descriptors),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
