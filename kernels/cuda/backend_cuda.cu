/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend_cuda.cu - the backend's table: devices, the executor's turn of work on one stream, errors.
 *
 * The executor thread launches and looks for ends; nothing of it waits for the GPU. Each work ends with
 * a stream write of its sequence number into a pinned word, so looking costs a load, not a driver call.
 * A device error ends everything in flight, and all later work, with -EIO: no result after a fault is
 * ever delivered.
 *
 * Moves of a slot:  free -> launched (dev->tail) -> word seen (dev->head) -> free
 */
#include "kernels/cuda/dev.h"
#include "kernels/cuda/lower.h"
#include "kernels/cuda/moe.h"
#include "kernels/tuned.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WS_DEFAULT       ((size_t)512 << 20)
#define EXECUTOR_SPIN_NS 50000ull   /* between requests of a decoder there are tens of microseconds */
#define LOOK_ERRORS_NS   2000000ull /* a driver call to see whether the device is well */
#define UNSAID_MAX       7 /* works in a row whose end the next one's word tells */
#define SLEEP_AFTER_NS   500000ull  /* a launch that takes longer is looked at every 20 us */

/*
 * All kernels are loaded when a device is opened. Lazily, each would be at its first launch, which waits until
 * the kernels that run have ended (tests/gpu/facts/eager.cu): a client's new shape would stop everybody.
 * The driver reads this when it is initialised, so it is said when the plugin is opened, whatever the
 * environment says; the worker has one thread then.
 */
__attribute__((constructor)) static void load_kernels_at_start(void)
{
	setenv("CUDA_MODULE_LOADING", "EAGER", 1);
}

static int cuda_probe(struct exl3_error *err)
{
	int n = 0;
	cudaError_t e = cudaGetDeviceCount(&n);

	if (e == cudaSuccess && n > 0)
		return n;
	cudaGetLastError();
	if (e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver || n == 0) {
		exl3_errf(err, 0, "%s", e == cudaErrorInsufficientDriver ?
						"no NVIDIA driver, or one older than this build needs" :
						"no NVIDIA GPU");
		return 0;
	}
	return exl3_errf(err, -EIO, "cuda: %s", cudaGetErrorString(e));
}

/* "GPU-xxxxxxxx-xxxx-..." of a device; @text holds 41 bytes. */
static void uuid_text(const cudaUUID_t *uuid, char *text)
{
	const unsigned char *b = (const unsigned char *)uuid->bytes;
	char *p = text + sprintf(text, "GPU-");

	for (int i = 0; i < 16; i++)
		p += sprintf(p, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
}

/* The kernel module's version: memory that it holds does not outlive it. */
static void driver_text(char *text, size_t size)
{
	FILE *f = fopen("/sys/module/nvidia/version", "re");
	int version = 0;

	cudaDriverGetVersion(&version);
	snprintf(text, size, "cuda-%d", version);
	if (f && fgets(text, (int)size, f))
		text[strcspn(text, "\n")] = 0;
	if (f)
		fclose(f);
}

static int find_device(const struct exl3_dev_options *opt, int *ret, struct exl3_error *err)
{
	int n = cuda_probe(err);

	if (n < 0)
		return n;
	if (n == 0)
		return -ENODEV;
	if (!opt->uuid) {
		if (opt->ordinal < 0 || opt->ordinal >= n)
			return exl3_errf(err, -ENODEV, "cuda: there is no device %d, only 0..%d",
					 opt->ordinal, n - 1);
		*ret = opt->ordinal;
		return 0;
	}
	for (int i = 0; i < n; i++) {
		cudaDeviceProp prop;
		char text[48];

		if (cudaGetDeviceProperties(&prop, i) != cudaSuccess)
			continue;
		uuid_text(&prop.uuid, text);
		if (!strcasecmp(text, opt->uuid)) {
			*ret = i;
			return 0;
		}
	}
	return exl3_errf(err, -ENODEV, "cuda: no device has the UUID %s", opt->uuid);
}

/* ---- the executor's side ---- */

static void executor_start(void *arg)
{
	struct exl3_dev *dev = (struct exl3_dev *)arg;

	cudaSetDevice(dev->ordinal);
}

static uint32_t in_flight(const struct exl3_dev *dev)
{
	return dev->tail - dev->head;
}

/* Hands the oldest slot's result to the loop and frees the slot. */
static void finish(struct exl3_dev *dev, int result, uint64_t now)
{
	struct exl3_cuda_slot *slot = &dev->slot[dev->head % EXL3_CUDA_SLOTS];
	const struct exl3_work *work = slot->work;

	for (uint32_t i = 0; work->skipped && i < work->nr_rows && i < EXL3_CUDA_ENTRIES; i++)
		work->skipped[i] = slot->skipped[i];
	dev->head++;
	/* The next one could not start before this one ended. */
	if (in_flight(dev) && dev->slot[dev->head % EXL3_CUDA_SLOTS].launched_ns < now)
		dev->slot[dev->head % EXL3_CUDA_SLOTS].launched_ns = now;
	exl3_executor_done(dev->exec, work->tag, result,
			   now > slot->launched_ns ? now - slot->launched_ns : 0);
}

static void write_value(CUstreamBatchMemOpParams *op, CUdeviceptr word, uint32_t value)
{
	memset(op, 0, sizeof(*op));
	op->operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
	op->writeValue.address = word;
	op->writeValue.value = value;
}

/*
 * One driver call: the words of those who wait in streams of theirs, and ours. Each word costs the GPU a
 * fence over PCIe, so while more work waits ours is left to the next one: whom this one was for knows already.
 */
static bool signal_end(struct exl3_dev *dev, struct exl3_cuda_slot *slot)
{
	CUstreamBatchMemOpParams ops[EXL3_SIGNALS_MAX + 1];
	const struct exl3_work *work = slot->work;
	unsigned n = 0;

	for (uint32_t i = 0; !slot->result && i < work->nr_signals && i < EXL3_SIGNALS_MAX; i++)
		write_value(&ops[n++], (CUdeviceptr)work->signals[i].word, work->signals[i].value);
	slot->unsaid = n && dev->unsaid < UNSAID_MAX && exl3_executor_more(dev->exec);
	dev->unsaid = slot->unsaid ? dev->unsaid + 1 : 0;
	if (slot->unsaid)
		return dev->cu.StreamBatchMemOp(dev->place.stream, n, ops, 0) == CUDA_SUCCESS;
	/* Written also behind a refused request: slots end in order. */
	write_value(&ops[n++], slot->done_dev, slot->seq);
	return dev->cu.StreamBatchMemOp(dev->place.stream, n, ops, 0) == CUDA_SUCCESS;
}

static bool executor_begin(void *arg, const struct exl3_work *work)
{
	struct exl3_dev *dev = (struct exl3_dev *)arg;
	struct exl3_cuda_slot *slot = &dev->slot[dev->tail % EXL3_CUDA_SLOTS];

	if (in_flight(dev) == EXL3_CUDA_SLOTS)
		return false;
	slot->work = work;
	slot->launched_ns = exl3_now_ns();
	slot->seq = ++dev->seq;
	memset(slot->skipped, 0, sizeof(uint64_t) * EXL3_CUDA_ENTRIES);
	if (work->nr_rows == 0 || work->nr_rows > EXL3_CUDA_ENTRIES)
		slot->result = -EOPNOTSUPP;
	else
		slot->result = dev->lost ? -EIO : exl3_cuda_lower(&dev->place, slot);
	if (!dev->lost && slot->result != -EIO && !signal_end(dev, slot))
		slot->result = -EIO;
	if (slot->result == -EIO)
		dev->lost = true;
	dev->tail++;
	return true;
}

/* Everything in flight ends with -EIO, whatever its words say. */
static void fail_all(struct exl3_dev *dev)
{
	uint64_t now = exl3_now_ns();

	dev->lost = true;
	while (in_flight(dev))
		finish(dev, -EIO, now);
}

/* Has the oldest work ended? Its word says so, or that of the next one that has a word. */
static bool said(const struct exl3_dev *dev)
{
	uint32_t i = dev->head;

	while (i != dev->tail && dev->slot[i % EXL3_CUDA_SLOTS].unsaid)
		i++;
	if (i == dev->tail)
		return false;
	return __atomic_load_n(dev->slot[i % EXL3_CUDA_SLOTS].done, __ATOMIC_ACQUIRE) ==
	       dev->slot[i % EXL3_CUDA_SLOTS].seq;
}

static unsigned executor_progress(void *arg)
{
	struct exl3_dev *dev = (struct exl3_dev *)arg;
	uint64_t now;

	if (!in_flight(dev))
		return 0;
	if (dev->lost) {
		fail_all(dev);
		return 0;
	}
	while (in_flight(dev) && said(dev))
		finish(dev, dev->slot[dev->head % EXL3_CUDA_SLOTS].result, exl3_now_ns());
	if (!in_flight(dev))
		return 0;
	now = exl3_now_ns();
	if (now - dev->looked_ns > LOOK_ERRORS_NS) {
		cudaError_t e = cudaStreamQuery(dev->place.stream);

		dev->looked_ns = now;
		if (e != cudaSuccess && e != cudaErrorNotReady) {
			fail_all(dev);
			return 0;
		}
	}
	if (now - dev->slot[dev->head % EXL3_CUDA_SLOTS].launched_ns > SLEEP_AFTER_NS) {
		const struct timespec ts = {0, 20000};

		nanosleep(&ts, NULL);
	}
	return in_flight(dev);
}

static const struct exl3_executor_ops executor_ops = {executor_start, executor_begin,
						      executor_progress};

/* ---- devices ---- */

static struct exl3_dev *cuda_close(struct exl3_dev *dev)
{
	if (!dev)
		return NULL;
	exl3_cuda_plans_close(dev);
	dev->exec = exl3_executor_free(dev->exec);
	cudaSetDevice(dev->ordinal);
	if (dev->place.stream)
		cudaStreamDestroy(dev->place.stream);
	if (dev->copy)
		cudaStreamDestroy(dev->copy);
	if (dev->side)
		cudaStreamDestroy(dev->side);
	pthread_mutex_destroy(&dev->memory_lock);
	cudaFree(dev->place.ws);
	cudaFree(dev->tables);
	cudaFreeHost(dev->pinned);
	free(dev->rows);
	exl3_tuned_put(dev->builtin);
	free(dev);
	return NULL;
}

/* Pinned and device parts of the slots. */
static int make_slots(struct exl3_dev *dev, struct exl3_error *err)
{
	const size_t words = 4096, skips = EXL3_CUDA_ENTRIES * sizeof(uint64_t);
	const size_t table = EXL3_CUDA_TABLE_ROWS * sizeof(struct exl3_cuda_row);
	const size_t kept = EXL3_CUDA_KEPT_ROWS * sizeof(struct exl3_cuda_row);
	char *dev_base = NULL;
	int ret;

	dev->pinned_bytes = words + EXL3_CUDA_SLOTS * (skips + table) + EXL3_CUDA_KEPT * kept;
	ret = exl3_cuda_err(err,
			    cudaHostAlloc((void **)&dev->pinned, dev->pinned_bytes, cudaHostAllocMapped),
			    "cuda: cudaHostAlloc");
	if (!ret)
		ret = exl3_cuda_err(err, cudaHostGetDevicePointer((void **)&dev_base, dev->pinned, 0),
				    "cuda: cudaHostGetDevicePointer");
	if (!ret)
		ret = exl3_cuda_err(err,
				    cudaMalloc((void **)&dev->tables,
					       EXL3_CUDA_SLOTS * table + EXL3_CUDA_KEPT * kept),
				    "cuda: row tables");
	if (ret)
		return ret;
	dev->rows = (struct exl3_rows *)calloc((size_t)EXL3_CUDA_SLOTS * EXL3_CUDA_ENTRIES, sizeof(*dev->rows));
	if (!dev->rows)
		return exl3_errf(err, -ENOMEM, "cuda: out of memory");
	memset(dev->pinned, 0, words);
	for (unsigned i = 0; i < EXL3_CUDA_SLOTS; i++) {
		struct exl3_cuda_slot *slot = &dev->slot[i];

		slot->done = (uint32_t *)dev->pinned + i * 16; /* a cache line each */
		slot->done_dev = (CUdeviceptr)(dev_base + i * 64);
		slot->skipped = (uint64_t *)(dev->pinned + words + i * skips);
		slot->skipped_dev = (uint64_t *)(dev_base + words + i * skips);
		slot->table = (struct exl3_cuda_row *)(dev->pinned + words + EXL3_CUDA_SLOTS * skips +
						       i * table);
		slot->table_dev = (struct exl3_cuda_row *)(dev->tables + i * table);
		slot->rows = dev->rows + (size_t)i * EXL3_CUDA_ENTRIES;
	}
	for (unsigned i = 0; i < EXL3_CUDA_KEPT; i++) {
		dev->kept[i].table = (struct exl3_cuda_row *)(dev->pinned + words +
							      EXL3_CUDA_SLOTS * (skips + table) + i * kept);
		dev->kept[i].table_dev =
			(struct exl3_cuda_row *)(dev->tables + EXL3_CUDA_SLOTS * table + i * kept);
	}
	return 0;
}

static int cuda_open(const struct exl3_dev_options *opt, struct exl3_dev **ret, struct exl3_error *err)
{
	cudaDeviceProp prop;
	struct exl3_dev *dev;
	int ordinal = 0, code = find_device(opt, &ordinal, err);

	if (code)
		return code;
	dev = (struct exl3_dev *)calloc(1, sizeof(*dev));
	if (!dev)
		return exl3_errf(err, -ENOMEM, "cuda: out of memory");
	dev->ordinal = ordinal;
	dev->place.dev = dev;
	pthread_mutex_init(&dev->memory_lock, NULL);
	dev->memory_max = opt->memory_max;
	dev->host_memory_max = opt->host_memory_max;
	dev->place.deterministic = opt->deterministic;
	dev->place.ws_bytes = opt->workspace_bytes ? opt->workspace_bytes : WS_DEFAULT;
	if (dev->place.ws_bytes < 4 * (size_t)EXL3_CUDA_WS_ZERO)
		dev->place.ws_bytes = 4 * (size_t)EXL3_CUDA_WS_ZERO;
	code = exl3_cuda_err(err, cudaSetDevice(ordinal), "cuda: cudaSetDevice");
	if (!code)
		code = exl3_cuda_err(err, cudaGetDeviceProperties(&prop, ordinal),
				     "cuda: cudaGetDeviceProperties");
	if (!code)
		code = exl3_cuda_driver_load(&dev->cu, err);
	if (code)
		goto fail;
	dev->cc = prop.major * 10 + prop.minor;
	dev->sms = prop.multiProcessorCount;
	dev->cache_bytes = prop.l2CacheSize > 0 ? (uint64_t)prop.l2CacheSize : 0;
	snprintf(dev->name, sizeof(dev->name), "%.127s", prop.name);
	uuid_text(&prop.uuid, dev->uuid);
	driver_text(dev->driver, sizeof(dev->driver));
	snprintf(dev->isa, sizeof(dev->isa), "sm_%d%s", dev->cc, dev->cc == 90 ? "a" : "");
	code = exl3_cuda_err(err, cudaStreamCreateWithFlags(&dev->place.stream, cudaStreamNonBlocking),
			     "cuda: stream");
	if (!code)
		code = exl3_cuda_err(err, cudaStreamCreateWithFlags(&dev->copy, cudaStreamNonBlocking),
				     "cuda: stream");
	if (!code)
		code = exl3_cuda_err(err, cudaMalloc((void **)&dev->place.ws, dev->place.ws_bytes),
				     "cuda: workspace");
	if (!code)
		code = exl3_cuda_err(err, cudaMemsetAsync(dev->place.ws, 0, EXL3_CUDA_WS_ZERO, dev->place.stream),
				     "cuda: workspace");
	if (!code)
		code = exl3_cuda_builtin_open(dev, err);
	if (!code)
		code = make_slots(dev, err);
	if (!code)
		code = exl3_executor_new(&executor_ops, dev, EXECUTOR_SPIN_NS, &dev->exec, err);
	if (code)
		goto fail;
	*ret = dev;
	return 0;
fail:
	cuda_close(dev);
	return code;
}

static void cuda_info(struct exl3_dev *dev, struct exl3_dev_info *ret)
{
	size_t free_bytes = 0, total = 0;

	memset(ret, 0, sizeof(*ret));
	cudaSetDevice(dev->ordinal);
	cudaMemGetInfo(&free_bytes, &total);
	snprintf(ret->name, sizeof(ret->name), "%s", dev->name);
	snprintf(ret->isa, sizeof(ret->isa), "%s", dev->isa);
	snprintf(ret->uuid, sizeof(ret->uuid), "%s", dev->uuid);
	snprintf(ret->driver, sizeof(ret->driver), "%s", dev->driver);
	ret->memory_total = total;
	ret->memory_free = free_bytes;
	ret->slab_bytes = __atomic_load_n(&dev->slab_bytes, __ATOMIC_RELAXED) +
			  __atomic_load_n(&dev->plan_bytes, __ATOMIC_RELAXED);
	ret->arena_bytes = __atomic_load_n(&dev->arena_bytes, __ATOMIC_RELAXED);
	ret->device_arena_bytes = __atomic_load_n(&dev->device_arena_bytes, __ATOMIC_RELAXED);
	ret->import_bytes = __atomic_load_n(&dev->import_bytes, __ATOMIC_RELAXED);
	ret->nr_imports = __atomic_load_n(&dev->nr_imports, __ATOMIC_RELAXED);
	ret->workspace_bytes = dev->place.ws_bytes + EXL3_CUDA_SLOTS * EXL3_CUDA_TABLE_ROWS *
						       sizeof(struct exl3_cuda_row) +
			       __atomic_load_n(&dev->track_bytes, __ATOMIC_RELAXED);
	ret->threads = 1;
	ret->ordinal = dev->ordinal;
	ret->cache_bytes = dev->cache_bytes;
}

static int cuda_submit(struct exl3_dev *dev, const struct exl3_work *work)
{
	return exl3_executor_submit(dev->exec, work);
}

static int cuda_poll(struct exl3_dev *dev, struct exl3_done *done, unsigned max)
{
	int n = exl3_executor_poll(dev->exec, done, max);

	return n < (int)max ? n + exl3_cuda_plans_poll(dev, done + n, max - (unsigned)n) : n;
}

static int cuda_event_fd(struct exl3_dev *dev)
{
	return exl3_executor_event_fd(dev->exec);
}

static bool cuda_wake_arm(struct exl3_dev *dev)
{
	return exl3_executor_arm(dev->exec);
}

static int cuda_moe_plan(struct exl3_dev *dev, const struct exl3_expert *experts, uint32_t nr_experts,
			 void **ret, struct exl3_error *err)
{
	struct exl3_cuda_moe_plan *plan;
	int code;

	cudaSetDevice(dev->ordinal);
	code = exl3_cuda_moe_plan_new(experts, nr_experts, &plan, err);
	if (!code) {
		__atomic_add_fetch(&dev->plan_bytes, exl3_cuda_moe_plan_bytes(plan), __ATOMIC_RELAXED);
		*ret = plan;
	}
	return code;
}

static void cuda_moe_plan_free(struct exl3_dev *dev, void *plan)
{
	cudaSetDevice(dev->ordinal);
	if (plan)
		__atomic_sub_fetch(&dev->plan_bytes,
				   exl3_cuda_moe_plan_bytes((struct exl3_cuda_moe_plan *)plan), __ATOMIC_RELAXED);
	exl3_cuda_moe_plan_free((struct exl3_cuda_moe_plan *)plan);
}

#define EXPORTED __attribute__((visibility("default")))

extern "C" EXPORTED const uint32_t exl3_backend_cuda_abi;
extern "C" EXPORTED const struct exl3_backend_ops exl3_backend_cuda;

const uint32_t exl3_backend_cuda_abi = EXL3_BACKEND_ABI;
const struct exl3_backend_ops exl3_backend_cuda = {
	"cuda",
	cuda_probe,
	cuda_open,
	cuda_close,
	cuda_info,
	exl3_cuda_slab_new,
	exl3_cuda_slab_adopt,
	exl3_cuda_slab_free,
	exl3_cuda_slab_write,
	exl3_cuda_slab_sync,
	NULL, /* slab_seal: an importer can always make its mapping writable */
	exl3_cuda_slab_read,
	exl3_cuda_staging_new,
	exl3_cuda_staging_free,
	exl3_cuda_arena_new,
	exl3_cuda_arena_adopt,
	exl3_cuda_arena_free,
	exl3_cuda_device_arena_new,
	exl3_cuda_import,
	cuda_moe_plan,
	cuda_moe_plan_free,
	exl3_cuda_select,
	exl3_cuda_merge_class,
	cuda_submit,
	cuda_poll,
	cuda_event_fd,
	cuda_wake_arm,
	exl3_cuda_track_new,
	exl3_cuda_track_free,
	exl3_cuda_track_run,
	exl3_cuda_track_skipped,
	exl3_cuda_plan_new,
	exl3_cuda_plan_free,
	exl3_cuda_plan_submit,
	exl3_cuda_plan_abort,
	exl3_cuda_plan_failed_call,
	exl3_cuda_kernel_table,
	exl3_cuda_builtin,
};
