/* SPDX-License-Identifier: Apache-2.0 */
/* test_backend_cpu.c - the CPU as a device: memory that is sealed, bounded and adopted; work in order. */
#include "tests/test.h"

#include "kernels/cpu/cpu.h"
#include "kernels/format.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

static const struct exl3_backend_ops *const ops = &exl3_backend_cpu;

static struct exl3_dev *open_device(unsigned threads, uint64_t memory_max)
{
	struct exl3_dev_options opt = {
		.numa_node = -1, .threads = threads, .memory_max = memory_max};
	struct exl3_dev *dev = NULL;
	struct exl3_error err;

	test_code(ops->open(&opt, &dev, &err), 0, &err);
	return dev;
}

static void options(void **state)
{
	struct exl3_dev_options opt = {.ordinal = EXL3_CPU_DEVICES_MAX, .numa_node = -1};
	struct exl3_dev *dev = NULL, *other = NULL;
	struct exl3_arena *arena;
	struct exl3_slab *slab;
	struct exl3_dev_info info;
	struct exl3_error err;

	(void)state;
	test_code(ops->open(&opt, &dev, &err), -ENODEV, &err);
	opt = (struct exl3_dev_options){.numa_node = 1000};
	test_code(ops->open(&opt, &dev, &err), -ENODEV, &err);
	assert_null(dev);
	opt = (struct exl3_dev_options){.numa_node = 0, .threads = 3, .workspace_bytes = 1};
	test_code(ops->open(&opt, &dev, &err), 0, &err);
	ops->info(dev, &info);
	assert_int_equal(info.threads, 3);
	assert_true(info.workspace_bytes >= 1 << 20);
	assert_true(info.memory_total > 0 && *info.name && *info.isa);
	assert_int_equal(info.ordinal, 0);
	/* Devices that share a machine have their part of its threads and one limit together. */
	opt = (struct exl3_dev_options){
		.ordinal = 1, .numa_node = -1, .threads = 6, .shares = 2, .memory_max = 1 << 20};
	test_code(ops->open(&opt, &other, &err), 0, &err);
	ops->info(other, &info);
	assert_int_equal(info.threads, 3);
	assert_int_equal(info.ordinal, 1);
	test_code(ops->slab_new(dev, 1 << 20, &slab, &err), 0, &err);
	test_code(ops->arena_new(other, 4096, &arena, &err), -ENOMEM, &err);
	assert_null(ops->slab_free(slab));
	test_code(ops->arena_new(other, 4096, &arena, &err), 0, &err);
	assert_null(ops->arena_free(arena));
	assert_null(ops->close(other));
	assert_null(ops->close(dev));
	assert_null(ops->close(NULL));
}

static void slabs(void **state)
{
	struct exl3_dev *dev = open_device(1, 0);
	struct exl3_slab *slab, *again;
	struct exl3_dev_info info;
	struct exl3_error err;
	char text[32] = "";
	size_t bytes = 3 * 4096 + 5;

	(void)state;
	test_code(ops->slab_new(dev, bytes, &slab, &err), 0, &err);
	assert_true(slab->bytes >= bytes);
	for (size_t i = 0; i < slab->bytes; i++)
		assert_int_equal(((char *)slab->ptr)[i], 0);
	test_code(ops->slab_write(slab, 4094, "weights", 8, &err), 0, &err);
	test_code(ops->slab_sync(slab, &err), 0, &err);
	test_code(ops->slab_write(slab, slab->bytes - 7, "weights", 8, &err), -EINVAL, &err);
	test_code(ops->slab_write(slab, SIZE_MAX, "weights", 8, &err), -EINVAL, &err);
	test_code(ops->slab_read(slab, slab->bytes, text, 1, &err), -EINVAL, &err);

	/* Another holder of the fd keeps the pages; nobody can change their number. */
	assert_int_equal(ftruncate(slab->fd, 0), -1);
	assert_int_equal(ftruncate(slab->fd, 1 << 20), -1);
	bytes = slab->bytes;
	int fd = fcntl(slab->fd, F_DUPFD_CLOEXEC, 0);

	/* One that could still be written is refused; once sealed, nobody can change a byte of it. */
	test_code(ops->slab_adopt(dev, fd, bytes, &again, &err), -EINVAL, &err);
	assert_non_null(strstr(err.text, "against writes"));
	test_code(ops->slab_seal(slab, &err), 0, &err);
	test_code(ops->slab_write(slab, 0, "weights", 8, &err), -EPERM, &err);
	assert_ptr_equal(mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
	assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
	assert_int_equal(mprotect(slab->ptr, slab->bytes, PROT_READ), 0);
	assert_null(ops->slab_free(slab));
	assert_null(ops->slab_free(NULL));
	test_code(ops->slab_adopt(dev, fd, bytes + 4096, &again, &err), -EINVAL, &err);
	test_code(ops->slab_adopt(dev, fd, bytes, &again, &err), 0, &err);
	test_code(ops->slab_read(again, 4094, text, 8, &err), 0, &err);
	assert_string_equal(text, "weights");
	assert_int_equal(mprotect(again->ptr, again->bytes, PROT_READ | PROT_WRITE), -1);
	ops->info(dev, &info);
	assert_int_equal(info.slab_bytes, bytes);
	assert_string_equal(info.uuid, "cpu");
	ops->slab_free(again);
	ops->info(dev, &info);
	assert_int_equal(info.slab_bytes, 0);

	/* A file that its owner could shrink under us is refused. */
	fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_int_equal(ftruncate(fd, 4096), 0);
	test_code(ops->slab_adopt(dev, fd, 4096, &again, &err), -EINVAL, &err);
	close(fd);
	ops->close(dev);
}

static void arenas(void **state)
{
	struct exl3_dev *dev = open_device(1, 1 << 20);
	struct exl3_arena *arena, *second;
	struct exl3_error err;
	struct stat st;
	char *client;

	(void)state;
	test_code(ops->arena_new(dev, 512 << 10, &arena, &err), 0, &err);
	assert_ptr_equal(arena->dev_ptr, arena->host_ptr);
	assert_int_equal(fcntl(arena->fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
	assert_int_equal(fstat(arena->fd, &st), 0);
	assert_int_equal(st.st_size, arena->bytes);
	assert_true((size_t)st.st_blocks * 512 >= arena->bytes); /* its pages are there already */
	client = mmap(NULL, arena->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fd, 0);
	assert_ptr_not_equal(client, MAP_FAILED);
	client[12345] = 7;
	assert_int_equal(((char *)arena->host_ptr)[12345], 7);
	munmap(client, arena->bytes);

	/* The limit counts arenas and slabs together; what is refused changes nothing. */
	test_code(ops->arena_new(dev, (512 << 10) + 1, &second, &err), -ENOMEM, &err);
	assert_non_null(strstr(err.text, "524288"));
	test_code(ops->arena_new(dev, 512 << 10, &second, &err), 0, &err);
	ops->arena_free(second);
	ops->arena_free(arena);
	test_code(ops->arena_new(dev, 1 << 20, &arena, &err), 0, &err);
	ops->arena_free(arena);
	assert_null(ops->arena_free(NULL));
	ops->close(dev);

	dev = open_device(1, 0);
	test_code(ops->arena_new(dev, 1ull << 50, &arena, &err), -ENOMEM, &err);
	ops->close(dev);
}

/* ---- work ---- */

enum { K = 256, N = 384, M = 300 };

struct layer {
	struct exl3_matrix w;
	const struct exl3_matrix *shard;
	uint16_t *trellis, suh[K], svh[N];
	float *x, *y;
	struct exl3_rows rows;
	struct exl3_work work;
};

static struct layer *layer_new(void)
{
	struct layer *l = calloc(1, sizeof(*l));
	size_t words = exl3_trellis_bytes(K, N, 8) / 2;
	uint32_t v = 7;

	assert_non_null(l);
	l->trellis = malloc(2 * words);
	l->x = malloc(sizeof(float) * M * K);
	l->y = malloc(sizeof(float) * M * N);
	assert_true(l->trellis && l->x && l->y);
	for (size_t i = 0; i < words; i++)
		l->trellis[i] = (uint16_t)((v = v * 1664525u + 1013904223u) >> 16);
	for (int i = 0; i < K; i++)
		l->suh[i] = i % 3 ? 0x2c00 : 0xac66;
	for (int i = 0; i < N; i++)
		l->svh[i] = i % 5 ? 0x3c00 : 0xb900;
	for (int i = 0; i < M * K; i++)
		l->x[i] = (float)(int)((v = v * 1664525u + 1013904223u) >> 16) / 65536 - 0.5f;
	l->w = (struct exl3_matrix){.k = K,
				    .n = N,
				    .k_log = K,
				    .n_log = N,
				    .rate2 = 8,
				    .codebook = EXL3_CB_MUL1,
				    .trellis = l->trellis,
				    .suh = l->suh,
				    .svh = l->svh};
	l->shard = &l->w;
	l->rows = (struct exl3_rows){.x = l->x,
				     .y = l->y,
				     .x_stride = 4 * K,
				     .y_stride = 4 * N,
				     .m = 1,
				     .x_dtype = EXL3_F32,
				     .y_dtype = EXL3_F32};
	l->work = (struct exl3_work){
		.op = EXL3_OP_LINEAR, .rows = &l->rows, .nr_rows = 1, .u.linear = {&l->shard, 1}};
	return l;
}

static void layer_free(struct layer *l)
{
	free(l->trellis);
	free(l->x);
	free(l->y);
	free(l);
}

/* Waits for @want results as the daemon's loop does, and checks that they come in order. */
static void reap(struct exl3_dev *dev, const struct exl3_work *works, unsigned want)
{
	struct exl3_done done[7];
	unsigned got = 0;

	while (got < want) {
		struct pollfd p = {.fd = ops->event_fd(dev), .events = POLLIN};
		int n = ops->poll(dev, done, 7);

		assert_in_range(n, 0, 7);
		for (int i = 0; i < n; i++, got++) {
			assert_ptr_equal(done[i].tag, &works[got]);
			assert_int_equal(done[i].result, 0);
		}
		if (!n && ops->wake_arm(dev))
			assert_int_equal(poll(&p, 1, 20000), 1);
	}
	assert_int_equal(ops->poll(dev, done, 7), 0);
}

static void queue(void **state)
{
	enum { WORKS = EXL3_EXECUTOR_QUEUE + 1 };
	struct exl3_dev *dev = open_device(1, 0);
	struct layer *l = layer_new();
	struct exl3_work *works = calloc(WORKS, sizeof(*works));

	(void)state;
	assert_non_null(works);
	for (int round = 0; round < 3; round++) {
		int accepted = 0;

		for (int i = 0; i < WORKS; i++) {
			works[i] = l->work;
			works[i].tag = &works[i];
			accepted += ops->submit(dev, &works[i]) == 0;
		}
		/* Nothing was reaped in between, so the last one found the queue full. */
		assert_int_equal(accepted, WORKS - 1);
		assert_int_equal(ops->submit(dev, &works[WORKS - 1]), -EAGAIN);
		reap(dev, works, WORKS - 1);
	}
	/* One at a time: each has to wake a sleeping executor and a sleeping loop. */
	for (int i = 0; i < 200; i++) {
		assert_int_equal(ops->submit(dev, &works[0]), 0);
		reap(dev, works, 1);
	}
	/* Closing waits for what was submitted. */
	memset(l->y, 0, sizeof(float) * N);
	assert_int_equal(ops->submit(dev, &works[0]), 0);
	ops->close(dev);
	assert_true(l->y[0] != 0 && l->y[N - 1] != 0);
	free(works);
	layer_free(l);
}

static void run(struct exl3_dev *dev, struct exl3_work *work, int want)
{
	struct exl3_done done;
	int n;

	work->tag = work;
	assert_int_equal(ops->submit(dev, work), 0);
	while ((n = ops->poll(dev, &done, 1)) == 0)
		sched_yield();
	assert_int_equal(n, 1);
	assert_ptr_equal(done.tag, work);
	assert_int_equal(done.result, want);
}

/* Bits of a row depend neither on the number of threads nor on the rows beside it. */
static void same_bits(void **state)
{
	struct layer *l = layer_new();
	float *alone = malloc(sizeof(float) * M * N);

	(void)state;
	assert_non_null(alone);
	for (const struct exl3_kernel *k = ops->kernels; k->name; k++)
		for (unsigned threads = 1; threads <= 3; threads++) {
			struct exl3_dev *dev = open_device(threads, 0);

			l->work.kernel = k;
			if (k->op != EXL3_OP_LINEAR || !strcmp(k->name, "linear_ref") ||
			    !k->supports(dev, &l->work)) {
				ops->close(dev);
				continue;
			}
			for (int r = 0; threads == 1 && r < M; r++) {
				l->rows.m = 1;
				l->rows.x = l->x + (size_t)r * K;
				l->rows.y = alone + (size_t)r * N;
				run(dev, &l->work, 0);
			}
			for (uint32_t m = 2; m <= M; m = m < 40 ? m + 1 : m * 2 - 20) {
				l->rows.m = m;
				l->rows.x = l->x;
				l->rows.y = l->y;
				memset(l->y, 0xff, sizeof(float) * M * N);
				run(dev, &l->work, 0);
				assert_memory_equal(l->y, alone, sizeof(float) * m * N);
			}
			ops->close(dev);
		}
	free(alone);
	layer_free(l);
}

/* What no kernel can do is refused, not computed. */
static void unsupported(void **state)
{
	struct exl3_dev *dev = open_device(1, 0);
	struct layer *l = layer_new();
	struct exl3_work work = l->work;

	(void)state;
	assert_non_null(ops->select(dev, &work));
	work.op = EXL3_OP_CANCEL;
	assert_null(ops->select(dev, &work));
	run(dev, &work, -EOPNOTSUPP);
	work.op = EXL3_OP_MLA_DECODE;
	work.u.mla = (struct exl3_mla_args){.geometry = {.heads = 1, .dim = 24, .value_dim = 16}};
	work.kernel = ops->kernels;
	run(dev, &work, -EOPNOTSUPP); /* a kernel of another operation */
	/* A row that does not fit into the workspace. */
	work = l->work;
	l->w.k = l->w.k_log = 1u << 31;
	assert_null(ops->select(dev, &work));
	run(dev, &work, -EOPNOTSUPP);
	ops->close(dev);
	layer_free(l);
}

static void *leave(void *arg)
{
	pthread_exit(arg);
}

/*
 * Threads of a team leave by pthread_exit() some time after their device is closed; the first one in a
 * process loads the unwinder, and the descriptor of that file would be counted. So one leaves now.
 */
static int load_unwinder(void **state)
{
	pthread_t thread;

	(void)state;
	return pthread_create(&thread, NULL, leave, NULL) || pthread_join(thread, NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(options), test_case(slabs),     test_case(arenas),
		test_case(queue),   test_case(same_bits), test_case(unsupported),
	};

	return cmocka_run_group_tests(tests, load_unwinder, NULL);
}
