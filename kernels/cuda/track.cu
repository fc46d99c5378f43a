/* SPDX-License-Identifier: Apache-2.0 */
/*
 * track.cu - works on a stream of the caller's, captured or not, beside those of submit().
 *
 * A captured work runs again whenever its graph is launched, long after track_run() has returned. So nothing that
 * it needs lies in memory that the host uses again: shapes and addresses are arguments of its kernels, row tables
 * are written by a kernel from its arguments (lower_table.cu), and the rest is the track's own device memory:
 *
 *   [ workspace: zero words | scratch, staged rows ]  [ one row table ]  [ counters of invalid ids ]  [ the owner's ]
 *
 * Device memory is VMM memory: to give it back waits for nobody, while cudaFree() would wait for kernels that
 * wait for a client (tests/gpu/facts/blocking.cu).
 */
#include "kernels/cuda/dev.h"
#include "kernels/cuda/gemm_f16.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define WS_DEFAULT ((size_t)64 << 20)

struct exl3_track {
	struct exl3_cuda_place place; /* its stream is that of the work that is being enqueued */
	struct exl3_cuda_slot slot;   /* work, skipped_dev and rows only */
	struct exl3_rows rows[EXL3_CUDA_ENTRIES];
	size_t size;                  /* of all its device memory, which begins at place.ws */
	CUmemGenericAllocationHandle handle;
	bool created, reserved, mapped;
};

/* The caller's current device comes back when it is done. */
static int enter(const struct exl3_dev *dev)
{
	int before = dev->ordinal;

	cudaGetDevice(&before);
	if (before != dev->ordinal)
		cudaSetDevice(dev->ordinal);
	return before;
}

static void leave(const struct exl3_dev *dev, int before)
{
	if (before != dev->ordinal)
		cudaSetDevice(before);
}

static void release(struct exl3_track *t)
{
	const struct exl3_cuda_driver *cu = &t->place.dev->cu;
	const CUdeviceptr at = (CUdeviceptr)t->place.ws;

	if (t->mapped) {
		cu->MemUnmap(at, t->size);
		__atomic_sub_fetch(&t->place.dev->track_bytes, t->size, __ATOMIC_RELAXED);
	}
	if (t->reserved)
		cu->MemAddressFree(at, t->size);
	if (t->created)
		cu->MemRelease(t->handle);
	free(t);
}

static int map(struct exl3_track *t, struct exl3_error *err)
{
	const struct exl3_cuda_driver *cu = &t->place.dev->cu;
	CUmemAllocationProp prop = exl3_cuda_vmm_prop(t->place.dev);
	CUmemAccessDesc access;
	CUdeviceptr at = 0;
	int code = exl3_cuda_driver_err(cu, err, cu->MemCreate(&t->handle, t->size, &prop, 0), "track: cuMemCreate");

	if (code)
		return code;
	t->created = true;
	code = exl3_cuda_driver_err(cu, err, cu->MemAddressReserve(&at, t->size, 0, 0, 0), "track: cuMemAddressReserve");
	if (code)
		return code;
	t->place.ws = (char *)at;
	t->reserved = true;
	code = exl3_cuda_driver_err(cu, err, cu->MemMap(at, t->size, 0, t->handle, 0), "track: cuMemMap");
	if (code)
		return code;
	t->mapped = true;
	__atomic_add_fetch(&t->place.dev->track_bytes, t->size, __ATOMIC_RELAXED);
	memset(&access, 0, sizeof(access));
	access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	access.location.id = t->place.dev->ordinal;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return exl3_cuda_driver_err(cu, err, cu->MemSetAccess(at, t->size, &access, 1), "track: cuMemSetAccess");
}

/* What must be zero before the first work. */
static int clear(struct exl3_track *t, struct exl3_error *err)
{
	cudaStream_t stream = t->place.dev->copy;
	int code = exl3_cuda_err(err, cudaMemsetAsync(t->place.ws, 0, EXL3_CUDA_WS_ZERO, stream), "track: memset");

	if (!code)
		code = exl3_cuda_err(err,
				     cudaMemsetAsync(t->slot.skipped_dev, 0, EXL3_CUDA_ENTRIES * sizeof(uint64_t),
						     stream),
				     "track: memset");
	return code ? code : exl3_cuda_err(err, cudaStreamSynchronize(stream), "track: memset");
}

int exl3_cuda_track_new(struct exl3_dev *dev, const struct exl3_track_options *opt, struct exl3_track **ret,
			struct exl3_error *err)
{
	const size_t table = EXL3_CUDA_TABLE_ROWS * sizeof(struct exl3_cuda_row);
	struct exl3_track *t = (struct exl3_track *)calloc(1, sizeof(*t));
	cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
	int before, code;

	if (!t)
		return exl3_errf(err, -ENOMEM, "track: out of memory");
	before = enter(dev);
	cudaThreadExchangeStreamCaptureMode(&mode); /* another thread of the program may be capturing */
	t->place.dev = dev;
	t->place.deterministic = opt->deterministic || dev->place.deterministic;
	t->place.ws_bytes = opt->workspace_bytes ? opt->workspace_bytes : WS_DEFAULT;
	if (t->place.ws_bytes < 4 * (size_t)EXL3_CUDA_WS_ZERO)
		t->place.ws_bytes = 4 * (size_t)EXL3_CUDA_WS_ZERO;
	t->place.ws_bytes = (t->place.ws_bytes + 255) / 256 * 256;
	code = exl3_cuda_vmm_size(dev, t->place.ws_bytes + table + EXL3_CUDA_ENTRIES * sizeof(uint64_t) + EXL3_CUDA_TRACK_EXTRA,
				   &t->size, err);
	if (!code)
		code = map(t, err);
	if (!code) {
		t->place.table = (struct exl3_cuda_row *)(t->place.ws + t->place.ws_bytes);
		t->slot.skipped_dev = (uint64_t *)((char *)t->place.table + table);
		t->slot.rows = t->rows;
		code = clear(t, err);
	}
	exl3_gemm_library_open(); /* without it there are other kernels */
	if (code)
		release(t);
	else
		*ret = t;
	cudaThreadExchangeStreamCaptureMode(&mode);
	leave(dev, before);
	return code;
}

struct exl3_track *exl3_cuda_track_free(struct exl3_track *t)
{
	struct exl3_dev *dev = t ? t->place.dev : NULL;
	int before;

	if (!t)
		return NULL;
	before = enter(dev);
	release(t);
	leave(dev, before);
	return NULL;
}

int exl3_cuda_track_run(struct exl3_track *t, const struct exl3_work *work, void *stream)
{
	int before, ret;

	if (work->nr_signals)
		return -EINVAL;
	if (work->nr_rows == 0 || work->nr_rows > EXL3_CUDA_ENTRIES)
		return -EOPNOTSUPP;
	before = enter(t->place.dev);
	t->place.stream = (cudaStream_t)stream;
	t->slot.work = work;
	ret = exl3_cuda_lower(&t->place, &t->slot);
	leave(t->place.dev, before);
	return ret;
}

int exl3_cuda_track_skipped(struct exl3_track *t, uint64_t *ret)
{
	cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
	uint64_t counters[EXL3_CUDA_ENTRIES];
	struct exl3_dev *dev = t->place.dev;
	const int before = enter(dev);
	int code;

	/* Another thread of the program may be capturing: this copy has no part in it. */
	cudaThreadExchangeStreamCaptureMode(&mode);
	code = cudaMemcpyAsync(counters, t->slot.skipped_dev, sizeof(counters), cudaMemcpyDeviceToHost, dev->copy) ==
					       cudaSuccess &&
			       cudaStreamSynchronize(dev->copy) == cudaSuccess ?
		       0 :
		       -EIO;
	cudaThreadExchangeStreamCaptureMode(&mode);
	leave(dev, before);
	*ret = 0;
	for (unsigned i = 0; !code && i < EXL3_CUDA_ENTRIES; i++)
		*ret += counters[i];
	return code;
}

uint64_t *exl3_cuda_track_counters(struct exl3_track *t)
{
	return t->slot.skipped_dev;
}

void *exl3_cuda_track_extra(struct exl3_track *t)
{
	return t->slot.skipped_dev + EXL3_CUDA_ENTRIES;
}
