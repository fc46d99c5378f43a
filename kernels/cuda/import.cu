/* SPDX-License-Identifier: Apache-2.0 */
/*
 * import.cu - memory of the GPU that a client works in: arenas that we make, allocations that it offers.
 *
 * An arena is a VMM allocation of ours, zeroed before anybody gets its fd; a dead client leaves nothing
 * behind but our own mapping. What a client offers is either an IPC handle of its cudaMalloc memory (the
 * handle names a whole allocation, so base and length are asked of the driver, never taken from the
 * client) or fds of its VMM memory (a mapping of another length than the allocation's is refused by the driver). Both
 * stay as they are for us when their owner frees them or dies (tests/gpu/facts/imports.cu).
 *
 * Our own weights are never taken for a client's buffer. IPC handles of them do not exist; an fd can be
 * exported again by whoever has mapped it, so neither inode nor handle tells: each slab ends with a mark of
 * random bytes, and an import that has a slab's mark at the place where that slab has it is that slab.
 *
 * Closing an IPC import waits for running kernels: all this is for a thread that may wait.
 */
#include "kernels/cuda/dev.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* An IPC handle that is open, however often it was offered. */
struct ipc_open {
	struct ipc_open *next; /* in dev->ipc */
	cudaIpcMemHandle_t handle;
	char *base;
	size_t bytes;
	unsigned refs;
};

/* What an arena of this file keeps beside its public fields. */
struct exl3_cuda_memory {
	bool imported;
	struct ipc_open *ipc; /* counted, or NULL: VMM */
	CUmemGenericAllocationHandle parts[EXL3_FDS_MAX];
	size_t part_bytes[EXL3_FDS_MAX];
	unsigned nr_parts, nr_mapped;
	CUdeviceptr base; /* reserved range of all parts, or 0 */
	size_t size;
};

static int cu_err(const struct exl3_dev *dev, struct exl3_error *err, CUresult r, int code, const char *what)
{
	const char *text = NULL;

	if (r == CUDA_SUCCESS)
		return 0;
	dev->cu.GetErrorString(r, &text);
	return exl3_errf(err, r == CUDA_ERROR_OUT_OF_MEMORY ? -ENOMEM : code, "%s: %s", what,
			 text ? text : "unknown driver error");
}

/* A stream of its own: the loader's may have gigabytes queued. */
static int side_stream(struct exl3_dev *dev, struct exl3_error *err)
{
	if (dev->side)
		return 0;
	return exl3_cuda_err(err, cudaStreamCreateWithFlags(&dev->side, cudaStreamNonBlocking), "memory: stream");
}

/* ---- IPC handles ---- */

static void ipc_put(struct exl3_dev *dev, struct ipc_open *ipc)
{
	struct ipc_open **at = &dev->ipc;

	if (--ipc->refs)
		return;
	while (*at != ipc)
		at = &(*at)->next;
	*at = ipc->next;
	cudaIpcCloseMemHandle(ipc->base);
	cudaGetLastError();
	free(ipc);
}

static int ipc_get(struct exl3_dev *dev, const uint8_t *bytes, struct ipc_open **ret, struct exl3_error *err)
{
	struct ipc_open *ipc;
	CUdeviceptr base = 0;
	int ordinal = -1;
	void *ptr = NULL;
	cudaError_t e;

	for (ipc = dev->ipc; ipc; ipc = ipc->next) {
		if (memcmp(&ipc->handle, bytes, sizeof(ipc->handle)) == 0) {
			ipc->refs++;
			*ret = ipc;
			return 0;
		}
	}
	ipc = (struct ipc_open *)calloc(1, sizeof(*ipc));
	if (!ipc)
		return exl3_errf(err, -ENOMEM, "import: out of memory");
	memcpy(&ipc->handle, bytes, sizeof(ipc->handle));
	e = cudaIpcOpenMemHandle(&ptr, ipc->handle, cudaIpcMemLazyEnablePeerAccess);
	if (e != cudaSuccess) {
		cudaGetLastError();
		free(ipc);
		return exl3_errf(err, e == cudaErrorMemoryAllocation ? -ENOMEM : -EINVAL,
				 "import: this is no IPC handle of memory that is allocated on this machine: %s",
				 cudaGetErrorString(e));
	}
	ipc->base = (char *)ptr;
	ipc->refs = 1;
	ipc->next = dev->ipc;
	dev->ipc = ipc;
	if (dev->cu.MemGetAddressRange(&base, &ipc->bytes, (CUdeviceptr)ptr) != CUDA_SUCCESS ||
	    base != (CUdeviceptr)ptr ||
	    dev->cu.PointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (CUdeviceptr)ptr) !=
		    CUDA_SUCCESS ||
	    ordinal != dev->ordinal) {
		ipc_put(dev, ipc);
		return exl3_errf(err, -EINVAL, "import: the handle's memory is not on GPU %d", dev->ordinal);
	}
	*ret = ipc;
	return 0;
}

/* ---- VMM ---- */

static void unmap_parts(struct exl3_dev *dev, struct exl3_cuda_memory *m)
{
	size_t at = 0;

	for (unsigned i = 0; i < m->nr_parts; i++) {
		if (i < m->nr_mapped)
			dev->cu.MemUnmap(m->base + at, m->part_bytes[i]);
		dev->cu.MemRelease(m->parts[i]);
		at += m->part_bytes[i];
	}
	if (m->base)
		dev->cu.MemAddressFree(m->base, m->size);
}

/* Side by side, in one range of addresses. */
static int map_parts(struct exl3_dev *dev, struct exl3_cuda_memory *m, struct exl3_error *err)
{
	CUmemAccessDesc access;
	size_t at = 0;
	int code;

	for (unsigned i = 0; i < m->nr_parts; i++)
		m->size += m->part_bytes[i];
	code = cu_err(dev, err, dev->cu.MemAddressReserve(&m->base, m->size, 0, 0, 0), -EIO,
		      "memory: cuMemAddressReserve");
	for (; !code && m->nr_mapped < m->nr_parts; m->nr_mapped++) {
		code = cu_err(dev, err,
			      dev->cu.MemMap(m->base + at, m->part_bytes[m->nr_mapped], 0,
					     m->parts[m->nr_mapped], 0),
			      -EINVAL, "memory: it cannot be mapped with the length that was given (cuMemMap)");
		if (code)
			return code;
		at += m->part_bytes[m->nr_mapped];
	}
	if (code)
		return code;
	memset(&access, 0, sizeof(access));
	access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	access.location.id = dev->ordinal;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return cu_err(dev, err, dev->cu.MemSetAccess(m->base, m->size, &access, 1), -EINVAL,
		      "memory: cuMemSetAccess");
}

static int import_part(struct exl3_dev *dev, struct exl3_cuda_memory *m, int fd, uint64_t bytes, size_t gran,
		       struct exl3_error *err)
{
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp prop;
	struct stat st;
	int code;

	if (bytes == 0 || bytes % gran)
		return exl3_errf(err, -EINVAL, "import: %llu bytes are no multiple of the GPU's %zu",
				 (unsigned long long)bytes, gran);
	/* The driver looks at what it is given, but need not see a pipe. */
	if (fstat(fd, &st) < 0 || !S_ISCHR(st.st_mode))
		return exl3_errf(err, -EINVAL, "import: the descriptor is not of GPU memory");
	code = cu_err(dev, err,
		      dev->cu.MemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
							   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
		      -EINVAL, "import: the descriptor is not of GPU memory");
	if (code)
		return code;
	m->parts[m->nr_parts] = handle;
	m->part_bytes[m->nr_parts++] = bytes;
	code = cu_err(dev, err, dev->cu.MemGetAllocationPropertiesFromHandle(&prop, handle), -EINVAL,
		      "import: cuMemGetAllocationPropertiesFromHandle");
	if (code)
		return code;
	if (prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop.location.id != dev->ordinal)
		return exl3_errf(err, -EINVAL, "import: the memory is not on GPU %d", dev->ordinal);
	return 0;
}

/* ---- the marks of our slabs ---- */

/* Writes it when a slab is made; an adopted one has it. */
int exl3_cuda_slab_mark(struct exl3_slab *slab, size_t size, struct exl3_error *err)
{
	unsigned char mark[EXL3_CUDA_SLAB_MARK];

	if (getrandom(mark, sizeof(mark), 0) != (ssize_t)sizeof(mark))
		return exl3_errf(err, -EIO, "weights: no random bytes: %m");
	/* Behind the zeroes on the loader's stream, which has copied these bytes when the call returns. */
	return exl3_cuda_err(err,
			     cudaMemcpyAsync((char *)slab->ptr + size - sizeof(mark), mark, sizeof(mark),
					     cudaMemcpyHostToDevice, slab->dev->copy),
			     "weights: mark");
}

void exl3_cuda_slab_list(struct exl3_dev *dev, struct exl3_cuda_slab_entry *entry, bool add)
{
	struct exl3_cuda_slab_entry **at = &dev->slabs;

	pthread_mutex_lock(&dev->memory_lock);
	if (add) {
		entry->next = dev->slabs;
		dev->slabs = entry;
	} else {
		while (*at && *at != entry)
			at = &(*at)->next;
		if (*at)
			*at = entry->next;
	}
	pthread_mutex_unlock(&dev->memory_lock);
}

static int read_mark(struct exl3_dev *dev, CUdeviceptr end, unsigned char *mark, struct exl3_error *err)
{
	int code = exl3_cuda_err(err,
				 cudaMemcpyAsync(mark, (void *)(end - EXL3_CUDA_SLAB_MARK), EXL3_CUDA_SLAB_MARK,
						 cudaMemcpyDeviceToHost, dev->side),
				 "import: copy");

	return code ? code : exl3_cuda_err(err, cudaStreamSynchronize(dev->side), "import: copy");
}

/* With memory_lock held. A mapping is as long as its allocation, so only a part of a slab's size can be it. */
static int check_not_ours(struct exl3_dev *dev, const struct exl3_cuda_memory *m, struct exl3_error *err)
{
	unsigned char ours[EXL3_CUDA_SLAB_MARK], theirs[EXL3_CUDA_SLAB_MARK];
	CUdeviceptr end = m->base;

	for (unsigned i = 0; i < m->nr_parts; i++) {
		end += m->part_bytes[i];
		for (const struct exl3_cuda_slab_entry *s = dev->slabs; s; s = s->next) {
			int code;

			if (s->size != m->part_bytes[i])
				continue;
			code = read_mark(dev, (CUdeviceptr)s->ptr + s->size, ours, err);
			if (!code)
				code = read_mark(dev, end, theirs, err);
			if (code)
				return code;
			if (memcmp(ours, theirs, sizeof(ours)) == 0)
				return exl3_errf(err, -EPERM, "import: this is the memory of a model's weights");
		}
	}
	return 0;
}

/* ---- the backend's functions ---- */

struct exl3_arena *exl3_cuda_memory_free(struct exl3_arena *arena)
{
	struct exl3_cuda_memory *m = (struct exl3_cuda_memory *)arena->priv;
	struct exl3_dev *dev = arena->dev;

	cudaSetDevice(dev->ordinal);
	pthread_mutex_lock(&dev->memory_lock);
	if (arena->dev_ptr && m->imported) {
		__atomic_sub_fetch(&dev->import_bytes, arena->bytes, __ATOMIC_RELAXED);
		__atomic_sub_fetch(&dev->nr_imports, 1, __ATOMIC_RELAXED);
	} else if (arena->dev_ptr) {
		__atomic_sub_fetch(&dev->device_arena_bytes, m->size, __ATOMIC_RELAXED);
	}
	if (m->ipc)
		ipc_put(dev, m->ipc);
	unmap_parts(dev, m);
	pthread_mutex_unlock(&dev->memory_lock);
	if (arena->fd >= 0)
		close(arena->fd);
	free(m);
	free(arena);
	return NULL;
}

static struct exl3_arena *memory_alloc(struct exl3_dev *dev, bool imported)
{
	struct exl3_arena *arena = (struct exl3_arena *)calloc(1, sizeof(*arena));
	struct exl3_cuda_memory *m = (struct exl3_cuda_memory *)calloc(1, sizeof(*m));

	if (!arena || !m) {
		free(arena);
		free(m);
		return NULL;
	}
	arena->dev = dev;
	arena->device = true;
	arena->fd = -1;
	arena->priv = m;
	m->imported = imported;
	return arena;
}

static int make_part(struct exl3_dev *dev, struct exl3_arena *arena, size_t bytes, struct exl3_error *err)
{
	struct exl3_cuda_memory *m = (struct exl3_cuda_memory *)arena->priv;
	CUmemAllocationProp prop = exl3_cuda_vmm_prop(dev);
	size_t size, free_bytes = 0, total = 0;
	int fd = -1, code = exl3_cuda_vmm_size(dev, bytes, &size, err);
	uint64_t held;

	if (!code)
		code = exl3_cuda_err(err, cudaMemGetInfo(&free_bytes, &total), "arena: cudaMemGetInfo");
	if (code)
		return code;
	held = __atomic_load_n(&dev->slab_bytes, __ATOMIC_RELAXED) +
	       __atomic_load_n(&dev->device_arena_bytes, __ATOMIC_RELAXED);
	if (size > free_bytes)
		return exl3_errf(err, -ENOMEM, "arena: %zu bytes of GPU memory; %zu of %zu are free", size,
				 free_bytes, total);
	if (dev->memory_max && (held > dev->memory_max || size > dev->memory_max - held))
		return exl3_errf(err, -ENOMEM, "arena: %zu bytes; gpu-memory-max allows %llu and %llu are held",
				 size, (unsigned long long)dev->memory_max, (unsigned long long)held);
	code = cu_err(dev, err, dev->cu.MemCreate(&m->parts[0], size, &prop, 0), -EIO, "arena: cuMemCreate");
	if (code)
		return code;
	m->part_bytes[0] = size;
	m->nr_parts = 1;
	code = cu_err(dev, err,
		      dev->cu.MemExportToShareableHandle(&fd, m->parts[0],
							 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
		      -EIO, "arena: cuMemExportToShareableHandle");
	if (code)
		return code;
	arena->fd = fd;
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	return 0;
}

int exl3_cuda_device_arena_new(struct exl3_dev *dev, size_t bytes, struct exl3_arena **ret,
			       struct exl3_error *err)
{
	struct exl3_arena *arena = memory_alloc(dev, false);
	struct exl3_cuda_memory *m;
	int code;

	if (!arena)
		return exl3_errf(err, -ENOMEM, "arena: out of memory");
	m = (struct exl3_cuda_memory *)arena->priv;
	cudaSetDevice(dev->ordinal);
	pthread_mutex_lock(&dev->memory_lock);
	code = side_stream(dev, err);
	if (!code)
		code = make_part(dev, arena, bytes, err);
	if (!code)
		code = map_parts(dev, m, err);
	/* Before the fd leaves us: it may hold what another process left there. */
	if (!code)
		code = exl3_cuda_err(err, cudaMemsetAsync((void *)m->base, 0, m->size, dev->side), "arena: zeroes");
	if (!code)
		code = exl3_cuda_err(err, cudaStreamSynchronize(dev->side), "arena: zeroes");
	pthread_mutex_unlock(&dev->memory_lock);
	if (code) {
		exl3_cuda_memory_free(arena);
		return code;
	}
	arena->dev_ptr = (void *)m->base;
	arena->bytes = m->size;
	__atomic_add_fetch(&dev->device_arena_bytes, m->size, __ATOMIC_RELAXED);
	*ret = arena;
	return 0;
}

static int import_ipc(struct exl3_dev *dev, const struct exl3_import *im, struct exl3_arena *arena,
		      struct exl3_error *err)
{
	struct exl3_cuda_memory *m = (struct exl3_cuda_memory *)arena->priv;
	int code = ipc_get(dev, im->ipc, &m->ipc, err);

	if (code)
		return code;
	if (im->offset > m->ipc->bytes || im->bytes > m->ipc->bytes - im->offset)
		return exl3_errf(err, -EINVAL, "import: %llu bytes at %llu reach past the allocation of %zu",
				 (unsigned long long)im->bytes, (unsigned long long)im->offset, m->ipc->bytes);
	arena->dev_ptr = m->ipc->base + im->offset;
	return 0;
}

static int import_vmm(struct exl3_dev *dev, const struct exl3_import *im, struct exl3_arena *arena,
		      struct exl3_error *err)
{
	struct exl3_cuda_memory *m = (struct exl3_cuda_memory *)arena->priv;
	CUmemAllocationProp prop = exl3_cuda_vmm_prop(dev);
	size_t gran = 0;
	int code = cu_err(dev, err,
			  dev->cu.MemGetAllocationGranularity(&gran, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
			  -EIO, "import: cuMemGetAllocationGranularity");

	for (unsigned i = 0; !code && i < im->nr_fds; i++)
		code = import_part(dev, m, im->fds[i], im->fd_bytes[i], gran, err);
	if (!code)
		code = map_parts(dev, m, err);
	if (!code)
		code = side_stream(dev, err);
	if (!code)
		code = check_not_ours(dev, m, err);
	if (code)
		return code;
	if (im->offset > m->size || im->bytes > m->size - im->offset)
		return exl3_errf(err, -EINVAL, "import: %llu bytes at %llu reach past the %zu that came",
				 (unsigned long long)im->bytes, (unsigned long long)im->offset, m->size);
	arena->dev_ptr = (void *)(m->base + im->offset);
	return 0;
}

int exl3_cuda_import(struct exl3_dev *dev, const struct exl3_import *im, struct exl3_arena **ret,
		     struct exl3_error *err)
{
	struct exl3_arena *arena;
	int code;

	if (im->nr_fds > EXL3_FDS_MAX)
		return exl3_errf(err, -EINVAL, "import: more than %u parts", EXL3_FDS_MAX);
	arena = memory_alloc(dev, true);
	if (!arena)
		return exl3_errf(err, -ENOMEM, "import: out of memory");
	cudaSetDevice(dev->ordinal);
	pthread_mutex_lock(&dev->memory_lock);
	code = im->nr_fds ? import_vmm(dev, im, arena, err) : import_ipc(dev, im, arena, err);
	if (!code) {
		arena->bytes = im->bytes;
		__atomic_add_fetch(&dev->import_bytes, im->bytes, __ATOMIC_RELAXED);
		__atomic_add_fetch(&dev->nr_imports, 1, __ATOMIC_RELAXED);
	}
	pthread_mutex_unlock(&dev->memory_lock);
	if (code) {
		exl3_cuda_memory_free(arena);
		return code;
	}
	*ret = arena;
	return 0;
}
