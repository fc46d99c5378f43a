/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend_cpu.c - the CPU as a device: its memory for weights, arenas and staging, and its table.
 *
 * Weights and arenas are memfds mapped shared: the same pages serve the loader, the kernels, a
 * client that maps an arena, and a worker that adopts a slab after a restart.
 */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/isa.h"
#include "kernels/cpu/jobs.h"

#include <errno.h>
#include <fcntl.h>
#include <numa.h>
#include <numaif.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static size_t page_round(size_t bytes)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);

	return (bytes + page - 1) / page * page;
}

/* Value of a "Name:   123 kB" line of @file in bytes, or of the first "Name : text" as text. */
static bool proc_line(const char *file, const char *name, char *text, size_t size)
{
	FILE *f = fopen(file, "re");
	char line[512];
	bool found = false;

	if (!f)
		return false;
	while (!found && fgets(line, sizeof(line), f)) {
		char *colon = strchr(line, ':');

		if (strncmp(line, name, strlen(name)) || !colon)
			continue;
		colon++;
		colon += strspn(colon, " \t");
		colon[strcspn(colon, "\n")] = 0;
		snprintf(text, size, "%s", colon);
		found = true;
	}
	fclose(f);
	return found;
}

static void memory_state(const struct exl3_dev *dev, uint64_t *total, uint64_t *available)
{
	char text[64];
	long long node_free, node_total;

	*total = *available = 0;
	if (proc_line("/proc/meminfo", "MemTotal", text, sizeof(text)))
		*total = strtoull(text, NULL, 10) << 10;
	if (proc_line("/proc/meminfo", "MemAvailable", text, sizeof(text)))
		*available = strtoull(text, NULL, 10) << 10;
	if (dev->node < 0 || numa_max_node() == 0)
		return;
	/* Page cache of the node can be dropped, so what is free now is no limit; its size is. */
	node_total = numa_node_size64(dev->node, &node_free);
	if (node_total > 0) {
		*total = (uint64_t)node_total;
		*available = *available < *total ? *available : *total;
	}
}

/* Of all devices of this backend: the limit is one for the machine. */
static _Atomic uint64_t held_bytes;

/* Refuses before anything is moved: over the configured limit, or more than the machine has. @there: bytes of
 * it that are in memory already. */
static int check_memory(const struct exl3_dev *dev, const char *what, size_t bytes, size_t there,
			struct exl3_error *err)
{
	uint64_t held = atomic_load(&held_bytes), total, available;

	if (dev->memory_max && (held > dev->memory_max || bytes > dev->memory_max - held))
		return exl3_errf(
			err, -ENOMEM,
			"cpu: %s needs %zu bytes, but the limit leaves %llu of %llu free", what,
			bytes,
			(unsigned long long)(held > dev->memory_max ? 0 : dev->memory_max - held),
			(unsigned long long)dev->memory_max);
	memory_state(dev, &total, &available);
	if (available && bytes - there > available)
		return exl3_errf(err, -ENOMEM,
				 "cpu: %s needs %zu bytes, but the machine has %llu available",
				 what, bytes - there, (unsigned long long)available);
	return 0;
}

static void hold(_Atomic uint64_t *counter, uint64_t bytes)
{
	atomic_fetch_add(counter, bytes);
	atomic_fetch_add(&held_bytes, bytes);
}

static void let_go(_Atomic uint64_t *counter, uint64_t bytes)
{
	atomic_fetch_sub(counter, bytes);
	atomic_fetch_sub(&held_bytes, bytes);
}

static void bind_to_node(const struct exl3_dev *dev, void *ptr, size_t bytes)
{
	unsigned long mask[16] = {0};
	const unsigned bits = 8 * sizeof(mask[0]);

	if (dev->node < 0 || (size_t)dev->node >= bits * (sizeof(mask) / sizeof(mask[0])))
		return;
	mask[(unsigned)dev->node / bits] = 1ul << ((unsigned)dev->node % bits);
	/* Preferred, not forced: a full node makes us slower, not dead. */
	mbind(ptr, bytes, MPOL_PREFERRED, mask, sizeof(mask) * 8, 0);
}

static int map_shared(const struct exl3_dev *dev, int fd, size_t bytes, int prot, void **ret)
{
	void *ptr = mmap(NULL, bytes, prot, MAP_SHARED, fd, 0);

	if (ptr == MAP_FAILED)
		return -errno;
	bind_to_node(dev, ptr, bytes);
	madvise(ptr, bytes, MADV_HUGEPAGE);
	*ret = ptr;
	return 0;
}

#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)
/* Not F_SEAL_WRITE: it is refused while a mapping exists that was once writable, as that of the loader. */
#define SLAB_SEALS (SIZE_SEALS | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)

/* A zeroed memfd whose size can never change again, with all its pages, mapped. @seals: beside those. */
static int memfd_new(const struct exl3_dev *dev, const char *what, size_t bytes, int seals,
		     int *ret_fd, void **ret_ptr, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int fd = memfd_create(what, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	void *ptr = NULL;
	int ret;

	if (fd < 0)
		return exl3_errf(err, -errno, "cpu: memfd_create for %s: %m", what);
	if (ftruncate(fd, (off_t)bytes) < 0)
		return exl3_errf(err, -errno, "cpu: %s cannot grow to %zu bytes: %m", what, bytes);
	if (fcntl(fd, F_ADD_SEALS, SIZE_SEALS | seals) < 0)
		return exl3_errf(err, -errno, "cpu: cannot seal the size of %s: %m", what);
	ret = map_shared(dev, fd, bytes, PROT_READ | PROT_WRITE, &ptr);
	if (ret)
		return exl3_errf(err, ret, "cpu: cannot map %zu bytes of %s: %m", bytes, what);
	/* Pages now: later a lack of memory would be a SIGBUS in the middle of a kernel. */
	if (fallocate(fd, 0, 0, (off_t)bytes) < 0) {
		ret = -errno;
		munmap(ptr, bytes);
		return exl3_errf(err, ret, "cpu: no memory for %zu bytes of %s: %s", bytes, what,
				 strerror(-ret));
	}
	*ret_fd = exl3_take_fd(&fd);
	*ret_ptr = ptr;
	return 0;
}

/* ---- weights ---- */

static int cpu_slab_new(struct exl3_dev *dev, size_t bytes, struct exl3_slab **ret,
			struct exl3_error *err)
{
	exl3_auto(exl3_freep) struct exl3_slab *slab = calloc(1, sizeof(*slab));
	int code;

	bytes = page_round(bytes ? bytes : 1);
	if (!slab)
		return exl3_errf(err, -ENOMEM, "cpu: out of memory");
	code = check_memory(dev, "a model's weight slab", bytes, 0, err);
	if (code)
		return code;
	slab->dev = dev;
	slab->bytes = bytes;
	code = memfd_new(dev, "exl3-slab", bytes, 0, &slab->fd, &slab->ptr, err);
	if (code)
		return code;
	hold(&dev->slab_bytes, bytes);
	*ret = exl3_take_ptr(&slab);
	return 0;
}

static int cpu_slab_adopt(struct exl3_dev *dev, int fd, size_t bytes, struct exl3_slab **ret,
			  struct exl3_error *err)
{
	exl3_auto(exl3_freep) struct exl3_slab *slab = calloc(1, sizeof(*slab));
	struct stat st;
	int seals, code;

	bytes = page_round(bytes ? bytes : 1);
	if (!slab)
		return exl3_errf(err, -ENOMEM, "cpu: out of memory");
	if (fstat(fd, &st) < 0)
		return exl3_errf(err, -errno, "cpu: adopted slab: fstat: %m");
	if (st.st_size < 0 || (uint64_t)st.st_size != bytes)
		return exl3_errf(err, -EINVAL, "cpu: adopted slab has %lld bytes instead of %zu",
				 (long long)st.st_size, bytes);
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || (seals & SIZE_SEALS) != SIZE_SEALS)
		return exl3_errf(err, -EINVAL, "cpu: adopted slab's size is not sealed");
	if (!(seals & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE)))
		return exl3_errf(err, -EINVAL, "cpu: adopted slab is not sealed against writes");
	if (dev->memory_max && bytes > dev->memory_max)
		return exl3_errf(err, -ENOMEM,
				 "cpu: adopted slab has %zu bytes, the limit is %llu", bytes,
				 (unsigned long long)dev->memory_max);
	code = map_shared(dev, fd, bytes, PROT_READ, &slab->ptr);
	if (code)
		return exl3_errf(err, code, "cpu: cannot map an adopted slab: %m");
	slab->dev = dev;
	slab->bytes = bytes;
	slab->fd = fd;
	hold(&dev->slab_bytes, bytes);
	*ret = exl3_take_ptr(&slab);
	return 0;
}

static struct exl3_slab *cpu_slab_free(struct exl3_slab *slab)
{
	if (!slab)
		return NULL;
	let_go(&slab->dev->slab_bytes, slab->bytes);
	munmap(slab->ptr, slab->bytes);
	exl3_closep(&slab->fd);
	free(slab);
	return NULL;
}

static int check_range(const struct exl3_slab *slab, size_t offset, size_t bytes,
		       struct exl3_error *err)
{
	if (offset > slab->bytes || bytes > slab->bytes - offset)
		return exl3_errf(err, -EINVAL,
				 "cpu: %zu bytes at offset %zu reach past a slab of %zu bytes",
				 bytes, offset, slab->bytes);
	return 0;
}

static int cpu_slab_write(struct exl3_slab *slab, size_t offset, const void *src, size_t bytes,
			  struct exl3_error *err)
{
	int ret = check_range(slab, offset, bytes, err);

	/* Through the descriptor: the pages are there, but a store to each through the mapping would
	 * fault first, which costs three times as much as the copy itself. */
	for (size_t done = 0; !ret && done < bytes;) {
		ssize_t n = pwrite(slab->fd, (const char *)src + done, bytes - done,
				   (off_t)(offset + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return exl3_errf(err, n < 0 ? -errno : -EIO,
					 "cpu: writing %zu bytes of weights: %m", bytes);
		done += (size_t)n;
	}
	return ret;
}

static int cpu_slab_sync(struct exl3_slab *slab, struct exl3_error *err)
{
	(void)slab, (void)err; /* slab_write() is done when it returns */
	return 0;
}

static int cpu_slab_seal(struct exl3_slab *slab, struct exl3_error *err)
{
	/* Our own mapping too: a kernel that goes astray must not spoil what the next worker adopts. */
	if (mprotect(slab->ptr, slab->bytes, PROT_READ) < 0)
		return exl3_errf(err, -errno, "cpu: cannot make a slab read-only: %m");
	if (fcntl(slab->fd, F_ADD_SEALS, SLAB_SEALS) < 0)
		return exl3_errf(err, -errno, "cpu: cannot seal a slab: %m");
	return 0;
}

static int cpu_slab_read(struct exl3_slab *slab, size_t offset, void *dst, size_t bytes,
			 struct exl3_error *err)
{
	int ret = check_range(slab, offset, bytes, err);

	if (!ret)
		memcpy(dst, (const char *)slab->ptr + offset, bytes);
	return ret;
}

static void *cpu_staging_new(struct exl3_dev *dev, size_t bytes)
{
	void *ptr = mmap(NULL, page_round(bytes), PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (ptr == MAP_FAILED)
		return NULL;
	bind_to_node(dev, ptr, page_round(bytes));
	return ptr;
}

static void cpu_staging_free(struct exl3_dev *dev, void *ptr, size_t bytes)
{
	(void)dev;
	if (ptr)
		munmap(ptr, page_round(bytes));
}

/* ---- arenas ---- */

static int cpu_arena_new(struct exl3_dev *dev, size_t bytes, struct exl3_arena **ret,
			 struct exl3_error *err)
{
	exl3_auto(exl3_freep) struct exl3_arena *arena = calloc(1, sizeof(*arena));
	int code;

	bytes = page_round(bytes ? bytes : 1);
	if (!arena)
		return exl3_errf(err, -ENOMEM, "cpu: out of memory");
	code = check_memory(dev, "an arena", bytes, 0, err);
	if (code)
		return code;
	arena->dev = dev;
	arena->bytes = bytes;
	code = memfd_new(dev, "exl3-arena", bytes, F_SEAL_SEAL, &arena->fd, &arena->host_ptr, err);
	if (code)
		return code;
	arena->dev_ptr = arena->host_ptr;
	hold(&dev->arena_bytes, bytes);
	*ret = exl3_take_ptr(&arena);
	return 0;
}

static int cpu_arena_adopt(struct exl3_dev *dev, int fd, size_t bytes, struct exl3_arena **ret,
			   struct exl3_error *err)
{
	exl3_auto(exl3_freep) struct exl3_arena *arena = calloc(1, sizeof(*arena));
	struct stat st;
	size_t there;
	int code;

	if (!arena)
		return exl3_errf(err, -ENOMEM, "cpu: out of memory");
	if (fstat(fd, &st) < 0)
		return exl3_errf(err, -errno, "cpu: an adopted arena: %m");
	there = (uint64_t)st.st_blocks * 512 < bytes ? (size_t)st.st_blocks * 512 : bytes;
	code = check_memory(dev, "an arena", bytes, there, err);
	if (code)
		return code;
	/* Holes may have been punched; from here on it takes what it says. */
	do
		code = fallocate(fd, 0, 0, (off_t)bytes) < 0 ? errno : 0;
	while (code == EINTR);
	if (code) {
		errno = code;
		return exl3_errf(err, code == ENOSPC ? -ENOMEM : -code,
				 "cpu: no memory for an arena of %zu bytes: %m", bytes);
	}
	code = map_shared(dev, fd, bytes, PROT_READ | PROT_WRITE, &arena->host_ptr);
	if (code)
		return exl3_errf(err, code, "cpu: cannot map an adopted arena: %m");
	arena->dev = dev;
	arena->bytes = bytes;
	arena->fd = fd;
	arena->dev_ptr = arena->host_ptr;
	hold(&dev->arena_bytes, bytes);
	*ret = exl3_take_ptr(&arena);
	return 0;
}

static struct exl3_arena *cpu_arena_free(struct exl3_arena *arena)
{
	if (!arena)
		return NULL;
	let_go(&arena->dev->arena_bytes, arena->bytes);
	munmap(arena->host_ptr, arena->bytes);
	exl3_closep(&arena->fd);
	free(arena);
	return NULL;
}

static int cpu_probe(struct exl3_error *err)
{
	(void)err;
	return 1;
}

/*
 * Processors for the team: those of the node that this process may run on, one thread each. Devices that
 * share them have a part of the threads each, at least one, and not of the processors: while only one of
 * them works, the kernel can put its threads anywhere.
 */
static void choose_cpus(struct exl3_dev *dev, unsigned threads, unsigned shares)
{
	struct bitmask *node_cpus = NULL;
	int nr;

	CPU_ZERO(&dev->cpus);
	if (sched_getaffinity(0, sizeof(dev->cpus), &dev->cpus) < 0)
		CPU_ZERO(&dev->cpus);
	if (dev->node >= 0)
		node_cpus = numa_allocate_cpumask();
	if (node_cpus && numa_node_to_cpus(dev->node, node_cpus) == 0)
		for (unsigned cpu = 0; cpu < CPU_SETSIZE; cpu++)
			if (!numa_bitmask_isbitset(node_cpus, cpu))
				CPU_CLR(cpu, &dev->cpus);
	if (node_cpus)
		numa_free_cpumask(node_cpus);
	nr = CPU_COUNT(&dev->cpus);
	dev->nr_threads = threads ? threads : nr > 0 ? (unsigned)nr : 1;
	if (shares > 1)
		dev->nr_threads = dev->nr_threads > shares ? dev->nr_threads / shares : 1;
	if (dev->nr_threads > CPU_THREADS_MAX)
		dev->nr_threads = CPU_THREADS_MAX;
}

/* ---- work ---- */

/* Longer than the gap between two requests of a busy client, shorter than a futex round trip. */
#define CPU_SPIN_NS 5000

static int run_together(struct exl3_dev *dev, const struct exl3_work *work)
{
	const struct exl3_kernel *kernel = work->kernel ? work->kernel : cpu_select(dev, work);

	return kernel && kernel->supports(dev, work) ? kernel->run(dev, work) : -EOPNOTSUPP;
}

int cpu_run(struct exl3_dev *dev, const struct exl3_work *work)
{
	struct exl3_work one = *work;
	int ret = 0;

	for (uint32_t i = 0; work->skipped && i < work->nr_rows; i++)
		work->skipped[i] = 0;
	if (work->op == EXL3_OP_NOP)
		return 0;
	if (work->nr_rows < 2 || cpu_one_class(dev, work))
		return run_together(dev, work);
	/* Deterministic entries that may not meet (linear: nothing else is by entry). */
	one.nr_rows = 1;
	for (uint32_t i = 0; i < work->nr_rows && ret == 0; i++) {
		one.rows = &work->rows[i];
		ret = run_together(dev, &one);
	}
	return ret;
}

static bool begin(void *arg, const struct exl3_work *work)
{
	struct exl3_dev *dev = arg;
	uint64_t start = exl3_now_ns();
	int result = cpu_run(dev, work);

	for (uint32_t i = 0; result == 0 && i < work->nr_signals; i++)
		__atomic_store_n(work->signals[i].word, work->signals[i].value, __ATOMIC_RELEASE);
	exl3_executor_done(dev->executor, work->tag, result, exl3_now_ns() - start);
	return true;
}

/*
 * Binds the team to the processors of its node. Not each thread to one of them: clients run there too,
 * and a thread that must wait for its own core keeps the whole team waiting. libgomp keeps the team
 * of a thread, so this is done once.
 */
static void start(void *arg)
{
	struct exl3_dev *dev = arg;

	if (CPU_COUNT(&dev->cpus) == 0)
		return;
#pragma omp parallel num_threads(cpu_team(dev, UINT64_MAX))
	sched_setaffinity(0, sizeof(dev->cpus), &dev->cpus);
}

static const struct exl3_executor_ops executor_ops = {.start = start, .begin = begin};

static int cpu_submit(struct exl3_dev *dev, const struct exl3_work *work)
{
	return exl3_executor_submit(dev->executor, work);
}

static int cpu_poll(struct exl3_dev *dev, struct exl3_done *done, unsigned max)
{
	return exl3_executor_poll(dev->executor, done, max);
}

static int cpu_event_fd(struct exl3_dev *dev)
{
	return exl3_executor_event_fd(dev->executor);
}

static bool cpu_wake_arm(struct exl3_dev *dev)
{
	return exl3_executor_arm(dev->executor);
}

/* ---- the device ---- */

static struct exl3_dev *cpu_close(struct exl3_dev *dev)
{
	if (!dev)
		return NULL;
	exl3_executor_free(dev->executor);
	if (dev->ws)
		munmap(dev->ws, dev->map_bytes);
	free(dev);
	return NULL;
}

int cpu_workspace(struct exl3_dev *dev, uint64_t bytes, struct exl3_error *err)
{
	void *ws;

	dev->ws_bytes = bytes ? bytes : CPU_WORKSPACE_DEFAULT;
	if (dev->ws_bytes < CPU_WORKSPACE_MIN)
		dev->ws_bytes = CPU_WORKSPACE_MIN;
	dev->ws_bytes = page_round(dev->ws_bytes);
	dev->map_bytes = page_round(dev->ws_bytes + dev->nr_threads * sizeof(*dev->mla));
	ws = mmap(NULL, dev->map_bytes, PROT_READ | PROT_WRITE,
		  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (ws == MAP_FAILED)
		return exl3_errf(err, -errno, "cpu: cannot map a workspace of %zu bytes: %m",
				 dev->map_bytes);
	dev->ws = ws;
	dev->mla = (struct cpu_mla_state *)((char *)ws + dev->ws_bytes);
	bind_to_node(dev, ws, dev->map_bytes);
	madvise(ws, dev->map_bytes, MADV_HUGEPAGE);
	return 0;
}

static void closep(struct exl3_dev **dev)
{
	*dev = cpu_close(*dev);
}

static int cpu_open(const struct exl3_dev_options *opt, struct exl3_dev **ret,
		    struct exl3_error *err)
{
	exl3_auto(closep) struct exl3_dev *dev = NULL;
	int code;

	if (opt->ordinal < 0 || opt->ordinal >= EXL3_CPU_DEVICES_MAX)
		return exl3_errf(err, -ENODEV, "cpu: there is no device %d, only 0..%d", opt->ordinal,
				 EXL3_CPU_DEVICES_MAX - 1);
	dev = calloc(1, sizeof(*dev));
	if (!dev)
		return exl3_errf(err, -ENOMEM, "cpu: out of memory");
	dev->ordinal = opt->ordinal;
	dev->node = -1;
	if (opt->numa_node >= 0) {
		if (numa_available() < 0) {
			if (opt->numa_node > 0)
				return exl3_errf(
					err, -ENODEV,
					"cpu: node %d asked for, but this kernel has no NUMA",
					opt->numa_node);
		} else if (opt->numa_node > numa_max_node()) {
			return exl3_errf(err, -ENODEV,
					 "cpu: there is no node %d, the last one is %d",
					 opt->numa_node, numa_max_node());
		} else {
			dev->node = opt->numa_node;
		}
	}
	if (!proc_line("/proc/cpuinfo", "model name", dev->name, sizeof(dev->name)))
		snprintf(dev->name, sizeof(dev->name), "CPU");
	dev->isa = cpu_isa_best();
	dev->memory_max = opt->memory_max;
	choose_cpus(dev, opt->threads, opt->shares);

	code = cpu_workspace(dev, opt->workspace_bytes, err);
	if (code)
		return code;
	code = exl3_executor_new(&executor_ops, dev, CPU_SPIN_NS, &dev->executor, err);
	if (code)
		return code;
	*ret = exl3_take_ptr(&dev);
	return 0;
}

/* glibc knows four levels, each with size, associativity and line; 0: there is no such level, or nobody knows. */
static uint64_t cache_bytes(void)
{
	static const int levels[] = {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE};

	for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++) {
		long bytes = sysconf(levels[i]);

		if (bytes > 0)
			return (uint64_t)bytes;
	}
	return 0;
}

static void cpu_info(struct exl3_dev *dev, struct exl3_dev_info *ret)
{
	memset(ret, 0, sizeof(*ret));
	snprintf(ret->name, sizeof(ret->name), "%s", dev->name);
	snprintf(ret->isa, sizeof(ret->isa), "%s", dev->isa->name);
	if (dev->node >= 0)
		snprintf(ret->uuid, sizeof(ret->uuid), "cpu-node%d", dev->node);
	else
		snprintf(ret->uuid, sizeof(ret->uuid), "cpu");
	memory_state(dev, &ret->memory_total, &ret->memory_free);
	ret->slab_bytes = dev->slab_bytes;
	ret->arena_bytes = dev->arena_bytes;
	ret->workspace_bytes = dev->map_bytes + atomic_load(&dev->track_bytes);
	ret->threads = dev->nr_threads;
	ret->ordinal = dev->ordinal;
	ret->cache_bytes = cache_bytes();
}

const struct exl3_backend_ops exl3_backend_cpu = {
	.name = "cpu",
	.probe = cpu_probe,
	.open = cpu_open,
	.close = cpu_close,
	.info = cpu_info,
	.slab_new = cpu_slab_new,
	.slab_adopt = cpu_slab_adopt,
	.slab_free = cpu_slab_free,
	.slab_write = cpu_slab_write,
	.slab_sync = cpu_slab_sync,
	.slab_seal = cpu_slab_seal,
	.slab_read = cpu_slab_read,
	.staging_new = cpu_staging_new,
	.staging_free = cpu_staging_free,
	.arena_new = cpu_arena_new,
	.arena_adopt = cpu_arena_adopt,
	.arena_free = cpu_arena_free,
	.moe_plan = NULL,
	.moe_plan_free = NULL,
	.select = cpu_select,
	.merge_class = cpu_merge_class,
	.submit = cpu_submit,
	.poll = cpu_poll,
	.event_fd = cpu_event_fd,
	.wake_arm = cpu_wake_arm,
	.track_new = cpu_track_new,
	.track_free = cpu_track_free,
	.track_run = cpu_track_run,
	.track_skipped = cpu_track_skipped,
	.plan_new = NULL, /* the host is between two calls anyway */
	.kernels = cpu_kernels,
};
