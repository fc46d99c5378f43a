/* SPDX-License-Identifier: Apache-2.0 */
/* dev.h - one GPU as the CUDA backend holds it; shared by memory.cu, lower.cu and backend_cuda.cu. */
#ifndef EXL3_KERNELS_CUDA_DEV_H
#define EXL3_KERNELS_CUDA_DEV_H

#include "kernels/backend.h"
#include "kernels/cuda/launch.h"
#include "kernels/executor.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

/* Work that the executor may have in flight on the stream at once. */
#define EXL3_CUDA_SLOTS 64

/* Rows of merged requests in one launch; a longer table is -EOPNOTSUPP (the scheduler never makes one). */
#define EXL3_CUDA_TABLE_ROWS EXL3_M_MAX

/* Entries (requests) of one merged launch whose skip counters fit a slot. */
#define EXL3_CUDA_ENTRIES 256

/* The driver API, found through the runtime: no link-time need for libcuda. */
struct exl3_cuda_driver {
	CUresult (*MemGetAllocationGranularity)(size_t *, const CUmemAllocationProp *,
						CUmemAllocationGranularity_flags);
	CUresult (*MemCreate)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
			      unsigned long long);
	CUresult (*MemRelease)(CUmemGenericAllocationHandle);
	CUresult (*MemAddressReserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
	CUresult (*MemAddressFree)(CUdeviceptr, size_t);
	CUresult (*MemMap)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
			   unsigned long long);
	CUresult (*MemUnmap)(CUdeviceptr, size_t);
	CUresult (*MemSetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
	CUresult (*MemExportToShareableHandle)(void *, CUmemGenericAllocationHandle,
					       CUmemAllocationHandleType, unsigned long long);
	CUresult (*MemImportFromShareableHandle)(CUmemGenericAllocationHandle *, void *,
						 CUmemAllocationHandleType);
	CUresult (*MemGetAllocationPropertiesFromHandle)(CUmemAllocationProp *,
							 CUmemGenericAllocationHandle);
	CUresult (*StreamBatchMemOp)(CUstream, unsigned int, CUstreamBatchMemOpParams *, unsigned int);
	CUresult (*MemGetAddressRange)(CUdeviceptr *, size_t *, CUdeviceptr);
	CUresult (*PointerGetAttribute)(void *, CUpointer_attribute, CUdeviceptr);
	CUresult (*GetErrorString)(CUresult, const char **);
};

/* What one work in flight needs beside its arguments; pinned and device parts made at open. */
struct exl3_cuda_slot {
	const struct exl3_work *work;
	uint32_t *done;             /* pinned word, borrowed from dev->pinned: the stream writes seq there */
	CUdeviceptr done_dev;       /* the same, as the stream addresses it */
	uint32_t seq;
	bool unsaid;                /* no word is written for it: it has ended when the next one has */
	uint64_t launched_ns;
	uint64_t *skipped;          /* [EXL3_CUDA_ENTRIES], pinned; kernels add to it */
	uint64_t *skipped_dev;      /* the same, as kernels address it */
	struct exl3_cuda_row *table; /* [EXL3_CUDA_TABLE_ROWS], pinned; copied to table_dev on the stream */
	struct exl3_cuda_row *table_dev;
	struct exl3_rows *rows;     /* [EXL3_CUDA_ENTRIES], host: the work's rows with staged x */
	int result;                 /* of the launch; a failed one completes at once */
};

/* A row table that was used, and may be used again: lower_table.cu. */
#define EXL3_CUDA_KEPT      64u /* tables */
#define EXL3_CUDA_KEPT_ROWS 64u /* rows of one; longer ones are copied for each launch */
struct exl3_cuda_kept {
	struct exl3_cuda_row *table, *table_dev; /* [EXL3_CUDA_KEPT_ROWS], in dev->pinned and dev->tables */
	uint64_t hash, used;
	uint32_t rows; /* 0: none */
	uint32_t seq;  /* of the launch that it was copied for */
};

/* A slab that is mapped, for import.cu: its end carries a mark by which it is known again. */
#define EXL3_CUDA_SLAB_MARK 32
struct exl3_cuda_slab_entry {
	struct exl3_cuda_slab_entry *next;
	const void *ptr;
	size_t size;
};

struct ipc_open; /* import.cu */
struct exl3_cuda_plans; /* plan.cu */

/*
 * Where works run: what they take from a stream. submit() has one, the device's own, for all its works, and each
 * track another (track.cu).
 */
struct exl3_cuda_place {
	struct exl3_dev *dev;  /* borrowed */
	cudaStream_t stream;
	char *ws;              /* device workspace of the stream; first EXL3_CUDA_WS_ZERO bytes stay zero */
	size_t ws_bytes;
	bool deterministic;
	struct exl3_cuda_row *table; /* a track's row table in device memory, or NULL: slots and kept tables */
};

struct exl3_dev {
	int ordinal;
	int cc;                /* 90 for compute capability 9.0 */
	int sms;
	uint64_t cache_bytes;  /* L2 */
	struct exl3_tuned *builtin; /* owned; builtin.cu; NULL: nothing was measured on its kind */
	char name[128], isa[64], uuid[48], driver[64];
	struct exl3_cuda_driver cu;
	struct exl3_cuda_place place; /* of submit(): all its requests, in order */
	cudaStream_t copy;     /* the loader's */
	char *pinned;          /* done words, skip counters, row tables */
	size_t pinned_bytes;
	char *tables;          /* device copies of the row tables */
	struct exl3_cuda_kept kept[EXL3_CUDA_KEPT]; /* executor thread only, with the next */
	uint64_t kept_clock;
	struct exl3_rows *rows; /* all slots' rows */
	struct exl3_cuda_slot slot[EXL3_CUDA_SLOTS];
	uint64_t memory_max;   /* of slabs; 0 = none */
	uint64_t host_memory_max; /* of arenas; 0 = none */
	uint64_t plan_bytes;              /* atomic; expert tables */
	uint64_t track_bytes;             /* atomic; workspaces of the tracks */
	uint64_t slab_bytes, arena_bytes; /* atomics, as the next three */
	uint64_t device_arena_bytes, import_bytes;
	uint32_t nr_imports;
	pthread_mutex_t memory_lock; /* for the next three: threads that load, import and free */
	cudaStream_t side;           /* small copies of import.cu, made when first needed, or NULL */
	struct ipc_open *ipc;
	struct exl3_cuda_slab_entry *slabs;
	struct exl3_executor *exec; /* owned */
	struct exl3_cuda_plans *plans; /* owned, atomic, or NULL: plan.cu */
	bool lost;             /* executor thread only: a device error was seen */
	uint32_t head, tail;   /* executor thread only: slots in flight, oldest at head */
	uint32_t seq;          /* executor thread only: of the last work begun */
	unsigned unsaid;       /* executor thread only: works in a row without a word */
	uint64_t looked_ns;    /* executor thread only: when the device was last asked for errors */
};

/* memory.cu; contracts in kernels/backend.h */
int exl3_cuda_driver_load(struct exl3_cuda_driver *cu, struct exl3_error *err);
int exl3_cuda_slab_new(struct exl3_dev *dev, size_t bytes, struct exl3_slab **ret,
		       struct exl3_error *err);
int exl3_cuda_slab_adopt(struct exl3_dev *dev, int fd, size_t bytes, struct exl3_slab **ret,
			 struct exl3_error *err);
struct exl3_slab *exl3_cuda_slab_free(struct exl3_slab *slab);
int exl3_cuda_slab_write(struct exl3_slab *slab, size_t offset, const void *src, size_t bytes,
			 struct exl3_error *err);
int exl3_cuda_slab_sync(struct exl3_slab *slab, struct exl3_error *err);
int exl3_cuda_slab_read(struct exl3_slab *slab, size_t offset, void *dst, size_t bytes,
			struct exl3_error *err);
void *exl3_cuda_staging_new(struct exl3_dev *dev, size_t bytes);
void exl3_cuda_staging_free(struct exl3_dev *dev, void *ptr, size_t bytes);
int exl3_cuda_arena_new(struct exl3_dev *dev, size_t bytes, struct exl3_arena **ret,
			struct exl3_error *err);
int exl3_cuda_arena_adopt(struct exl3_dev *dev, int fd, size_t bytes, struct exl3_arena **ret,
			  struct exl3_error *err);
struct exl3_arena *exl3_cuda_arena_free(struct exl3_arena *arena);
CUmemAllocationProp exl3_cuda_vmm_prop(const struct exl3_dev *dev);
/* @bytes rounded up to the granularity of exportable memory. */
int exl3_cuda_vmm_size(struct exl3_dev *dev, size_t bytes, size_t *ret, struct exl3_error *err);

/* import.cu; contracts in kernels/backend.h */
int exl3_cuda_device_arena_new(struct exl3_dev *dev, size_t bytes, struct exl3_arena **ret,
			       struct exl3_error *err);
int exl3_cuda_import(struct exl3_dev *dev, const struct exl3_import *im, struct exl3_arena **ret,
		     struct exl3_error *err);
/* Frees an arena that one of the two made. */
struct exl3_arena *exl3_cuda_memory_free(struct exl3_arena *arena);
/* The last bytes of a new slab that is mapped with @size. */
int exl3_cuda_slab_mark(struct exl3_slab *slab, size_t size, struct exl3_error *err);
void exl3_cuda_slab_list(struct exl3_dev *dev, struct exl3_cuda_slab_entry *entry, bool add);

/* lower.cu: enqueues @slot->work on @p's stream. 0, -EOPNOTSUPP, -ENOMEM (workspace), -EIO. Of the slot a track sets
 * only work, rows and skipped_dev. */
int exl3_cuda_lower(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot);
/* All variants as backend kernels (run through submit() only); ends with a NULL name. */
extern struct exl3_kernel exl3_cuda_kernel_table[];
const struct exl3_kernel *exl3_cuda_select(const struct exl3_dev *dev, const struct exl3_work *work);

/* track.cu; contracts in kernels/backend.h */
int exl3_cuda_track_new(struct exl3_dev *dev, const struct exl3_track_options *opt, struct exl3_track **ret,
			struct exl3_error *err);
struct exl3_track *exl3_cuda_track_free(struct exl3_track *track);
int exl3_cuda_track_run(struct exl3_track *track, const struct exl3_work *work, void *stream);
int exl3_cuda_track_skipped(struct exl3_track *track, uint64_t *ret);
/* [EXL3_CUDA_ENTRIES] in device memory, borrowed: kernels of the track's works add to entry i's. */
uint64_t *exl3_cuda_track_counters(struct exl3_track *track);
/* EXL3_CUDA_TRACK_EXTRA bytes of device memory behind them, for the track's owner. */
#define EXL3_CUDA_TRACK_EXTRA 256u
void *exl3_cuda_track_extra(struct exl3_track *track);

/* plan.cu; contracts in kernels/backend.h */
int exl3_cuda_plan_new(struct exl3_dev *dev, const struct exl3_dev_plan_call *calls, uint32_t nr,
		       const struct exl3_dev_plan_options *opt, struct exl3_dev_plan **ret, struct exl3_error *err);
struct exl3_dev_plan *exl3_cuda_plan_free(struct exl3_dev_plan *plan);
int exl3_cuda_plan_submit(struct exl3_dev_plan *plan, uint32_t epoch, uint64_t wait_ns, void *tag);
void exl3_cuda_plan_abort(struct exl3_dev_plan *plan);
uint32_t exl3_cuda_plan_failed_call(const struct exl3_dev_plan *plan);
/* Results of plans, as exl3_executor_poll(). */
int exl3_cuda_plans_poll(struct exl3_dev *dev, struct exl3_done *done, unsigned max);
/* Ends the plans' executor: before dev->exec is freed. */
void exl3_cuda_plans_close(struct exl3_dev *dev);

/* -EIO with the CUDA error's name and text, or 0. */
int exl3_cuda_err(struct exl3_error *err, cudaError_t e, const char *what);
/* The same for the driver's interface; -ENOMEM where it is that. */
int exl3_cuda_driver_err(const struct exl3_cuda_driver *cu, struct exl3_error *err, CUresult r, const char *what);

#endif
