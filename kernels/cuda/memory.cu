/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.cu - weights in VMM slabs with exportable fds, pinned staging, arenas that host and GPU map.
 *
 * A slab is one cuMemCreate allocation: its fd keeps the memory alive when this process is gone, so a
 * restarted worker maps it again (slab_adopt). An arena is a sealed memfd, registered with the driver:
 * clients without CUDA write it, kernels read it over PCIe. cudaHostUnregister waits for running
 * kernels, so arenas are freed by a thread that may wait, never by the loop.
 */
#include "kernels/cuda/dev.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int exl3_cuda_err(struct exl3_error *err, cudaError_t e, const char *what)
{
	if (e == cudaSuccess)
		return 0;
	return exl3_errf(err, e == cudaErrorMemoryAllocation ? -ENOMEM : -EIO, "%s: %s (%s)", what,
			 cudaGetErrorString(e), cudaGetErrorName(e));
}

int exl3_cuda_driver_err(const struct exl3_cuda_driver *cu, struct exl3_error *err, CUresult r,
			 const char *what)
{
	const char *text = NULL;

	if (r == CUDA_SUCCESS)
		return 0;
	cu->GetErrorString(r, &text);
	return exl3_errf(err, r == CUDA_ERROR_OUT_OF_MEMORY ? -ENOMEM : -EIO, "%s: %s", what,
			 text ? text : "unknown driver error");
}

/* Every entry point by name and the version whose signature dev.h declares. */
int exl3_cuda_driver_load(struct exl3_cuda_driver *cu, struct exl3_error *err)
{
	const struct {
		const char *name;
		unsigned version;
		void **fn;
	} want[] = {
		{"cuMemGetAllocationGranularity", 10020, (void **)&cu->MemGetAllocationGranularity},
		{"cuMemCreate", 10020, (void **)&cu->MemCreate},
		{"cuMemRelease", 10020, (void **)&cu->MemRelease},
		{"cuMemAddressReserve", 10020, (void **)&cu->MemAddressReserve},
		{"cuMemAddressFree", 10020, (void **)&cu->MemAddressFree},
		{"cuMemMap", 10020, (void **)&cu->MemMap},
		{"cuMemUnmap", 10020, (void **)&cu->MemUnmap},
		{"cuMemSetAccess", 10020, (void **)&cu->MemSetAccess},
		{"cuMemExportToShareableHandle", 10020, (void **)&cu->MemExportToShareableHandle},
		{"cuMemImportFromShareableHandle", 10020, (void **)&cu->MemImportFromShareableHandle},
		{"cuMemGetAllocationPropertiesFromHandle", 10020,
		 (void **)&cu->MemGetAllocationPropertiesFromHandle},
		{"cuStreamBatchMemOp", 11070, (void **)&cu->StreamBatchMemOp},
		{"cuMemGetAddressRange", 3020, (void **)&cu->MemGetAddressRange},
		{"cuPointerGetAttribute", 4000, (void **)&cu->PointerGetAttribute},
		{"cuGetErrorString", 6000, (void **)&cu->GetErrorString},
	};

	for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
		cudaDriverEntryPointQueryResult found;
		cudaError_t e = cudaGetDriverEntryPointByVersion(
			want[i].name, want[i].fn, want[i].version, cudaEnableDefault, &found);

		if (e != cudaSuccess || found != cudaDriverEntryPointSuccess || !*want[i].fn)
			return exl3_errf(err, -EOPNOTSUPP, "the driver has no %s: a newer one is needed",
					 want[i].name);
	}
	return 0;
}

/* What a slab keeps beside its public fields. */
struct slab_vmm {
	CUmemGenericAllocationHandle handle;
	size_t size; /* rounded up to the granularity */
	bool created, reserved, mapped;
	struct exl3_cuda_slab_entry entry; /* in dev->slabs while mapped */
};

CUmemAllocationProp exl3_cuda_vmm_prop(const struct exl3_dev *dev)
{
	CUmemAllocationProp prop;

	memset(&prop, 0, sizeof(prop));
	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	prop.location.id = dev->ordinal;
	prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	return prop;
}

struct exl3_slab *exl3_cuda_slab_free(struct exl3_slab *slab)
{
	if (!slab)
		return NULL;
	struct slab_vmm *vmm = (struct slab_vmm *)slab->priv;
	const struct exl3_cuda_driver *cu = &slab->dev->cu;

	cudaSetDevice(slab->dev->ordinal);
	if (vmm) {
		if (vmm->mapped) {
			exl3_cuda_slab_list(slab->dev, &vmm->entry, false);
			cu->MemUnmap((CUdeviceptr)slab->ptr, vmm->size);
			__atomic_sub_fetch(&slab->dev->slab_bytes, vmm->size, __ATOMIC_RELAXED);
		}
		if (vmm->reserved)
			cu->MemAddressFree((CUdeviceptr)slab->ptr, vmm->size);
		if (vmm->created)
			cu->MemRelease(vmm->handle);
		free(vmm);
	}
	if (slab->fd >= 0)
		close(slab->fd);
	free(slab);
	return NULL;
}

/* Reserves, maps and opens a created or imported allocation. */
static int slab_map(struct exl3_slab *slab, struct exl3_error *err)
{
	struct slab_vmm *vmm = (struct slab_vmm *)slab->priv;
	const struct exl3_cuda_driver *cu = &slab->dev->cu;
	CUmemAccessDesc access;
	CUdeviceptr ptr = 0;
	int ret = exl3_cuda_driver_err(cu, err, cu->MemAddressReserve(&ptr, vmm->size, 0, 0, 0),
			     "weights: cuMemAddressReserve");

	if (ret)
		return ret;
	slab->ptr = (void *)ptr;
	vmm->reserved = true;
	ret = exl3_cuda_driver_err(cu, err, cu->MemMap(ptr, vmm->size, 0, vmm->handle, 0), "weights: cuMemMap");
	if (ret)
		return ret;
	vmm->mapped = true;
	__atomic_add_fetch(&slab->dev->slab_bytes, vmm->size, __ATOMIC_RELAXED);
	memset(&access, 0, sizeof(access));
	access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	access.location.id = slab->dev->ordinal;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	ret = exl3_cuda_driver_err(cu, err, cu->MemSetAccess(ptr, vmm->size, &access, 1),
			 "weights: cuMemSetAccess");
	if (ret)
		return ret;
	vmm->entry.ptr = slab->ptr;
	vmm->entry.size = vmm->size;
	exl3_cuda_slab_list(slab->dev, &vmm->entry, true);
	return 0;
}

static struct exl3_slab *slab_alloc(struct exl3_dev *dev, size_t bytes)
{
	struct exl3_slab *slab = (struct exl3_slab *)calloc(1, sizeof(*slab));

	if (!slab)
		return NULL;
	slab->dev = dev;
	slab->bytes = bytes;
	slab->fd = -1;
	slab->priv = calloc(1, sizeof(struct slab_vmm));
	return slab->priv ? slab : exl3_cuda_slab_free(slab);
}

int exl3_cuda_vmm_size(struct exl3_dev *dev, size_t bytes, size_t *ret, struct exl3_error *err)
{
	CUmemAllocationProp prop = exl3_cuda_vmm_prop(dev);
	size_t gran = 0;
	int code = exl3_cuda_driver_err(&dev->cu, err,
			      dev->cu.MemGetAllocationGranularity(
				      &gran, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
			      "weights: cuMemGetAllocationGranularity");

	if (code)
		return code;
	if (!gran || bytes > SIZE_MAX - gran)
		return exl3_errf(err, -ENOMEM, "weights: %zu bytes cannot be allocated", bytes);
	*ret = (bytes + gran - 1) / gran * gran;
	return 0;
}

int exl3_cuda_slab_new(struct exl3_dev *dev, size_t bytes, struct exl3_slab **ret,
		       struct exl3_error *err)
{
	CUmemAllocationProp prop = exl3_cuda_vmm_prop(dev);
	struct exl3_slab *slab;
	struct slab_vmm *vmm;
	size_t size, free_bytes = 0, total = 0;
	int code, fd = -1;

	cudaSetDevice(dev->ordinal);
	code = exl3_cuda_vmm_size(dev, bytes + EXL3_CUDA_SLAB_MARK, &size, err);
	if (code)
		return code;
	code = exl3_cuda_err(err, cudaMemGetInfo(&free_bytes, &total), "weights: cudaMemGetInfo");
	if (code)
		return code;
	if (size > free_bytes)
		return exl3_errf(err, -ENOMEM,
				 "weights need %zu bytes of GPU memory; %zu of %zu are free (this daemon "
				 "holds %llu for other weights)",
				 size, free_bytes, total,
				 (unsigned long long)__atomic_load_n(&dev->slab_bytes, __ATOMIC_RELAXED));
	if (dev->memory_max && size > dev->memory_max - __atomic_load_n(&dev->slab_bytes, __ATOMIC_RELAXED))
		return exl3_errf(err, -ENOMEM,
				 "weights need %zu bytes; gpu-memory-max allows %llu and %llu are held", size,
				 (unsigned long long)dev->memory_max,
				 (unsigned long long)__atomic_load_n(&dev->slab_bytes, __ATOMIC_RELAXED));
	slab = slab_alloc(dev, bytes);
	if (!slab)
		return exl3_errf(err, -ENOMEM, "weights: out of memory");
	vmm = (struct slab_vmm *)slab->priv;
	vmm->size = size;
	code = exl3_cuda_driver_err(&dev->cu, err, dev->cu.MemCreate(&vmm->handle, size, &prop, 0),
			  "weights: cuMemCreate");
	if (code)
		goto fail;
	vmm->created = true;
	code = exl3_cuda_driver_err(&dev->cu, err,
			  dev->cu.MemExportToShareableHandle(
				  &fd, vmm->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
			  "weights: cuMemExportToShareableHandle");
	if (code)
		goto fail;
	slab->fd = fd;
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	code = slab_map(slab, err);
	if (code)
		goto fail;
	/* Padding between tensors is sent to nobody, but a slab must not hold what another process left. */
	code = exl3_cuda_err(err, cudaMemsetAsync(slab->ptr, 0, vmm->size, dev->copy),
			     "weights: cudaMemset");
	if (!code)
		code = exl3_cuda_slab_mark(slab, vmm->size, err);
	if (code)
		goto fail;
	*ret = slab;
	return 0;
fail:
	exl3_cuda_slab_free(slab);
	return code;
}

/* Another GPU's memory could be mapped too, and read slowly over the bus. */
static int check_adopted(const struct exl3_slab *slab, struct exl3_error *err)
{
	const struct slab_vmm *vmm = (const struct slab_vmm *)slab->priv;
	const struct exl3_dev *dev = slab->dev;
	CUmemAllocationProp prop;
	int code = exl3_cuda_driver_err(&dev->cu, err,
			      dev->cu.MemGetAllocationPropertiesFromHandle(&prop, vmm->handle),
			      "adopted weights: cuMemGetAllocationPropertiesFromHandle");

	if (code)
		return code;
	if (prop.type != CU_MEM_ALLOCATION_TYPE_PINNED || prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
	    prop.location.id != dev->ordinal)
		return exl3_errf(err, -EINVAL, "adopted weights are not in the memory of device %d",
				 dev->ordinal);
	if (dev->memory_max && vmm->size > dev->memory_max)
		return exl3_errf(err, -ENOMEM, "adopted weights have %zu bytes; gpu-memory-max allows %llu",
				 vmm->size, (unsigned long long)dev->memory_max);
	return 0;
}

int exl3_cuda_slab_adopt(struct exl3_dev *dev, int fd, size_t bytes, struct exl3_slab **ret,
			 struct exl3_error *err)
{
	struct exl3_slab *slab;
	struct slab_vmm *vmm;
	size_t size;
	int code;

	cudaSetDevice(dev->ordinal);
	code = exl3_cuda_vmm_size(dev, bytes + EXL3_CUDA_SLAB_MARK, &size, err);
	if (code)
		return code;
	slab = slab_alloc(dev, bytes);
	if (!slab)
		return exl3_errf(err, -ENOMEM, "weights: out of memory");
	vmm = (struct slab_vmm *)slab->priv;
	vmm->size = size;
	code = exl3_cuda_driver_err(&dev->cu, err,
			  dev->cu.MemImportFromShareableHandle(
				  &vmm->handle, (void *)(uintptr_t)fd,
				  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
			  "weights: cuMemImportFromShareableHandle");
	if (!code) {
		vmm->created = true;
		code = check_adopted(slab, err);
	}
	/* A smaller allocation than it should be cannot be mapped at that size. */
	if (!code)
		code = slab_map(slab, err);
	if (code) {
		exl3_cuda_slab_free(slab);
		return code;
	}
	slab->fd = fd;
	*ret = slab;
	return 0;
}

int exl3_cuda_slab_write(struct exl3_slab *slab, size_t offset, const void *src, size_t bytes,
			 struct exl3_error *err)
{
	if (offset > slab->bytes || bytes > slab->bytes - offset)
		return exl3_errf(err, -EINVAL, "weights: %zu bytes at %zu are outside the slab of %zu",
				 bytes, offset, slab->bytes);
	cudaSetDevice(slab->dev->ordinal);
	return exl3_cuda_err(err,
			     cudaMemcpyAsync((char *)slab->ptr + offset, src, bytes,
					     cudaMemcpyHostToDevice, slab->dev->copy),
			     "weights: copy to the GPU");
}

int exl3_cuda_slab_sync(struct exl3_slab *slab, struct exl3_error *err)
{
	cudaSetDevice(slab->dev->ordinal);
	return exl3_cuda_err(err, cudaStreamSynchronize(slab->dev->copy), "weights: copy to the GPU");
}

int exl3_cuda_slab_read(struct exl3_slab *slab, size_t offset, void *dst, size_t bytes,
			struct exl3_error *err)
{
	int code;

	if (offset > slab->bytes || bytes > slab->bytes - offset)
		return exl3_errf(err, -EINVAL, "weights: %zu bytes at %zu are outside the slab of %zu",
				 bytes, offset, slab->bytes);
	cudaSetDevice(slab->dev->ordinal);
	code = exl3_cuda_err(err,
			     cudaMemcpyAsync(dst, (char *)slab->ptr + offset, bytes,
					     cudaMemcpyDeviceToHost, slab->dev->copy),
			     "weights: copy from the GPU");
	return code ? code : exl3_cuda_slab_sync(slab, err);
}

/* Pinned; pages are touched by the calling thread first, so they lie on its NUMA node. */
void *exl3_cuda_staging_new(struct exl3_dev *dev, size_t bytes)
{
	void *ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (ptr == MAP_FAILED)
		return NULL;
	cudaSetDevice(dev->ordinal);
	if (cudaHostRegister(ptr, bytes, cudaHostRegisterDefault) != cudaSuccess) {
		cudaGetLastError();
		munmap(ptr, bytes);
		return NULL;
	}
	return ptr;
}

void exl3_cuda_staging_free(struct exl3_dev *dev, void *ptr, size_t bytes)
{
	if (!ptr)
		return;
	cudaSetDevice(dev->ordinal);
	cudaHostUnregister(ptr);
	munmap(ptr, bytes);
}

struct exl3_arena *exl3_cuda_arena_free(struct exl3_arena *arena)
{
	if (!arena)
		return NULL;
	if (arena->device)
		return exl3_cuda_memory_free(arena);
	cudaSetDevice(arena->dev->ordinal);
	if (arena->dev_ptr) {
		cudaHostUnregister(arena->host_ptr);
		__atomic_sub_fetch(&arena->dev->arena_bytes, arena->bytes, __ATOMIC_RELAXED);
	}
	if (arena->host_ptr)
		munmap(arena->host_ptr, arena->bytes);
	if (arena->fd >= 0)
		close(arena->fd);
	free(arena);
	return NULL;
}

/* Maps arena->fd and registers it with the driver; on failure the caller frees @arena. */
static int arena_register(struct exl3_arena *arena, struct exl3_error *err)
{
	void *dev_ptr = NULL;
	int code;

	arena->host_ptr = mmap(NULL, arena->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fd, 0);
	if (arena->host_ptr == MAP_FAILED) {
		arena->host_ptr = NULL;
		return exl3_errf(err, -errno, "arena: mmap: %m");
	}
	cudaSetDevice(arena->dev->ordinal);
	code = exl3_cuda_err(err,
			     cudaHostRegister(arena->host_ptr, arena->bytes,
					      cudaHostRegisterMapped | cudaHostRegisterPortable),
			     "arena: cudaHostRegister");
	if (code)
		return code;
	code = exl3_cuda_err(err, cudaHostGetDevicePointer(&dev_ptr, arena->host_ptr, 0),
			     "arena: cudaHostGetDevicePointer");
	if (code) {
		cudaHostUnregister(arena->host_ptr);
		return code;
	}
	arena->dev_ptr = dev_ptr;
	__atomic_add_fetch(&arena->dev->arena_bytes, arena->bytes, __ATOMIC_RELAXED);
	return 0;
}

static int check_host_memory(struct exl3_dev *dev, size_t bytes, struct exl3_error *err)
{
	uint64_t held = __atomic_load_n(&dev->arena_bytes, __ATOMIC_RELAXED);

	if (!dev->host_memory_max || (held <= dev->host_memory_max && bytes <= dev->host_memory_max - held))
		return 0;
	return exl3_errf(err, -ENOMEM, "arena: %zu bytes, but memory-max allows %llu and %llu are held",
			 bytes, (unsigned long long)dev->host_memory_max, (unsigned long long)held);
}

int exl3_cuda_arena_adopt(struct exl3_dev *dev, int fd, size_t bytes, struct exl3_arena **ret,
			  struct exl3_error *err)
{
	struct exl3_arena *arena;
	int code = check_host_memory(dev, bytes, err);

	if (code)
		return code;
	do
		code = fallocate(fd, 0, 0, (off_t)bytes) < 0 ? -errno : 0;
	while (code == -EINTR);
	if (code)
		return exl3_errf(err, code == -ENOSPC ? -ENOMEM : code, "arena: no memory for %zu bytes",
				 bytes);
	arena = (struct exl3_arena *)calloc(1, sizeof(*arena));
	if (!arena)
		return exl3_errf(err, -ENOMEM, "arena: out of memory");
	arena->dev = dev;
	arena->bytes = bytes;
	arena->fd = fd;
	code = arena_register(arena, err);
	if (code) {
		arena->fd = -1; /* still the caller's */
		exl3_cuda_arena_free(arena);
		return code;
	}
	*ret = arena;
	return 0;
}

int exl3_cuda_arena_new(struct exl3_dev *dev, size_t bytes, struct exl3_arena **ret,
			struct exl3_error *err)
{
	struct exl3_arena *arena = (struct exl3_arena *)calloc(1, sizeof(*arena));
	int code;

	if (!arena)
		return exl3_errf(err, -ENOMEM, "arena: out of memory");
	arena->dev = dev;
	arena->bytes = bytes;
	arena->fd = -1;
	code = check_host_memory(dev, bytes, err);
	if (code)
		goto fail;
	arena->fd = memfd_create("exl3-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (arena->fd < 0) {
		code = exl3_errf(err, -errno, "arena: memfd_create: %m");
		goto fail;
	}
	/* Preallocated: memory that runs out is an error now, not a signal in a kernel's copy later. */
	code = posix_fallocate(arena->fd, 0, (off_t)bytes);
	if (code) {
		code = exl3_errf(err, -ENOMEM, "arena: cannot get %zu bytes: %s", bytes, strerror(code));
		goto fail;
	}
	if (fcntl(arena->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
		code = exl3_errf(err, -errno, "arena: cannot seal: %m");
		goto fail;
	}
	code = arena_register(arena, err);
	if (code)
		goto fail;
	*ret = arena;
	return 0;
fail:
	exl3_cuda_arena_free(arena);
	return code;
}
