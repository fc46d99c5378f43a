/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend.h - what a device can do: memory for weights and arenas, checked work in, results out.
 *
 * One const table per backend (exl3_backend_cpu, exl3_backend_cuda). The caller (daemon/dispatch.c)
 * has copied and checked everything that a client controls, geometry and bounds, before submit();
 * only the *values* of ids, slots and activations are still unchecked, and a backend copies those
 * integers once to private memory and checks them there. A row of NaN stays in its row.
 *
 * Thread safety: open, close, slab and arena calls from any thread, one at a time per device;
 * submit and poll from one thread (the worker's loop), never blocking. A track is used by one thread at a
 * time; different tracks at once, and beside submit(). Plans are made and freed as slabs are, and submitted and
 * aborted by the thread of submit().
 */
#ifndef EXL3_KERNELS_BACKEND_H
#define EXL3_KERNELS_BACKEND_H

#include "shm/exl3_abi.h"
#include "shm/util.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct exl3_dev;
struct exl3_track;
struct exl3_dev_plan;
struct exl3_tuned;

#define EXL3_CPU_DEVICES_MAX 8 /* ordinals of the cpu backend: parts of one machine */

/*
 * One quantized matrix: y[m, n] = x[m, k] W[k, n]. Pointers are device addresses (borrowed from the
 * model's slabs, which outlive all work), 16-byte aligned.
 */
struct exl3_matrix {
	uint32_t k, n;         /* stored sizes, multiples of 128 */
	uint32_t k_log, n_log; /* logical sizes: stored = ceil128(logical) */
	uint8_t rate2;         /* 2 * bits per weight, see format.h */
	uint8_t codebook;      /* enum exl3_codebook */
	uint16_t reserved;
	const void *trellis;   /* [k/16, n/16, 8 * rate2] u16 */
	const void *suh;       /* [k] f16 */
	const void *svh;       /* [n] f16 */
	const void *bias;      /* [n] f32, zero in padded columns, or NULL */
};

/*
 * Some rows of one request (or of one of several merged requests): the unit of the row table.
 * Strides in bytes. Padded columns are neither read (x, logical sizes) nor written (y).
 */
struct exl3_rows {
	const void *x;
	void *y;
	uint32_t x_stride, y_stride;
	uint32_t m;
	uint8_t x_dtype, y_dtype; /* f16, bf16, f32 */
	bool stored;              /* x and y have stored sizes; for fused shards: each n stored */
	bool x_device;            /* x lies in the device's own memory: reading it again costs little */
};

/* Shards side by side: y = [x W0 | x W1 | ...], each with its own suh, svh, bitrate, codebook. */
struct exl3_linear_args {
	const struct exl3_matrix *const *shards; /* [nr_shards], host array, equal k and k_log */
	uint32_t nr_shards;
};

/* One expert, or a dense MLP: y = down(act(gate(x), up(x))). gate is NULL for EXL3_ACT_RELU2. */
struct exl3_expert {
	const struct exl3_matrix *gate, *up, *down;
};

/*
 * A dense MLP that is wider than the writer's limit is stored as nr_experts slices that all see every
 * row, and whose outputs add up (op MLP); their widths may differ, unless moe_plan() refuses that with
 * -EOPNOTSUPP. For op MOE each token goes to its topk experts, which are all of one size.
 */
struct exl3_moe_args {
	const struct exl3_expert *experts; /* [nr_experts] host array */
	uint32_t nr_experts;
	void *plan;             /* device copy of the expert table, made by moe_plan(), or NULL */
	uint8_t act;            /* enum exl3_act, never DEFAULT */
	float limit;            /* 0 = none */
	float routed_scale;     /* factor of the routed sum, 1 = none */
	/* per rows entry (op MOE), index i of the work's rows array: */
	const struct exl3_route {
		const void *ids;     /* [m, topk] */
		const void *weights; /* [m, topk] */
		uint32_t topk;
		uint8_t ids_dtype, weights_dtype;
	} *routes;
};

struct exl3_mla_geometry {
	uint32_t heads, dim, value_dim; /* dim, value_dim multiples of 16; value = first value_dim of a row */
	uint32_t topk;                  /* keys per query at most */
	uint64_t slots;                 /* rows of the cache */
	uint64_t cache_stride;          /* bytes from slot to slot */
	uint32_t indices_stride;        /* bytes from query to query */
	uint8_t cache_dtype;            /* f16, bf16, e4m3, e4m3_656 (a record: dim 576, value_dim 512) */
	uint8_t indices_dtype;          /* i32, i64 */
	uint16_t reserved;
	/* Key j of a query is row index[j / page_rows] * page_rows + j % page_rows. 1: indices name rows. */
	uint32_t page_rows;     /* a power of two; slots is a multiple of it */
	uint32_t table_queries; /* so many consecutive queries share a row of indices */
};

/* Columns of a row of indices. */
static inline uint32_t exl3_mla_columns(const struct exl3_mla_geometry *g)
{
	return (g->topk + g->page_rows - 1) / g->page_rows;
}

/* @skipped counts bad indices per query that reads them, and bad lengths.
 * rows[i].x = q [m, heads, dim], rows[i].y = o [m, heads, value_dim], x_stride and y_stride per query. */
struct exl3_mla_args {
	const struct exl3_mla_cache {
		const void *cache;
		const void *indices; /* [ceil((table_first + m) / table_queries), exl3_mla_columns()] */
		const int32_t *lengths; /* [m] keys of a query; outside 0..topk: clamped, counted; or NULL: topk */
		uint32_t table_first; /* queries before rows[i]'s first that share its row of indices */
		float *lse;          /* [m, heads] natural log, or NULL */
		float scale, kv_scale; /* kv_scale is 1 unless the cache is e4m3 */
	} *caches; /* per rows entry */
	struct exl3_mla_geometry geometry;
};

#define EXL3_SIGNALS_MAX 64u

/* A word by which somebody who waits elsewhere learns that a work has ended well. */
struct exl3_signal {
	uint32_t *word; /* device address, in an arena in host memory */
	uint32_t value;
};

/* One launch. Everything it points to stays valid and unchanged until its exl3_done came. */
struct exl3_work {
	uint8_t op;          /* LINEAR, MOE, MLP, MLA_DECODE; NOP: an empty kernel in its turn */
	bool deterministic;
	const struct exl3_kernel *kernel; /* NULL: the backend's select() chooses */
	const struct exl3_tuned *tuned;   /* what was measured to be the best here (tuned.h), or NULL: nothing was */
	const struct exl3_rows *rows;     /* [nr_rows] */
	uint32_t nr_rows;                 /* entries of rows: 1, or one per merged request */
	union {
		struct exl3_linear_args linear;
		struct exl3_moe_args moe;
		struct exl3_mla_args mla;
	} u;
	/* Written with release order behind the results, by the device where it can, and only if the work
	 * succeeds: before its exl3_done or not at all. At most EXL3_SIGNALS_MAX. */
	const struct exl3_signal *signals;
	uint32_t nr_signals;
	uint64_t *skipped; /* [nr_rows] host: invalid ids or slots per entry, set before done */
	void *tag;         /* comes back in exl3_done */
};

struct exl3_done {
	void *tag;
	int result; /* 0, -EOPNOTSUPP (no kernel), -ENOMEM (workspace), -EIO (device lost) */
	uint64_t exec_ns;
};

/* A compiled variant. checkkernel and the bench walk all of them. */
struct exl3_kernel {
	const char *name;  /* unique in its table, [a-z0-9_]+; *_ref: to compare with, never the fastest */
	uint8_t op;
	/* Can it run this? Also false where the device lacks what it needs (AVX-512, sm_90a). */
	bool (*supports)(const struct exl3_dev *dev, const struct exl3_work *work);
	/* Runs it (cpu: to the end; cuda: enqueues). 0 or a negative errno. */
	int (*run)(struct exl3_dev *dev, const struct exl3_work *work);
	/* To be compared with what is in use: tests and benchmarks may name it, requests and tables may not. */
	bool candidate;
};

/* Memory for weights: one per model and device, exportable, so that it can outlive the worker. */
struct exl3_slab {
	struct exl3_dev *dev; /* borrowed */
	void *ptr;            /* device address; cpu: also the host address */
	size_t bytes;
	int fd;               /* owned; memfd (cpu) or VMM handle (cuda) */
	void *priv;
};

/* Memory that a client maps too. */
struct exl3_arena {
	struct exl3_dev *dev;
	void *dev_ptr;  /* what kernels use; in host memory: on every device of this backend */
	void *host_ptr; /* daemon's own mapping, or NULL */
	size_t bytes;
	int fd;         /* owned; sent to the client; -1: imported */
	bool device;    /* in the device's own memory; host_ptr is NULL then */
	void *priv;
};

/* Memory of a client in the device's own memory, as the client names it: nothing of it is trusted. */
struct exl3_import {
	uint8_t ipc[64];         /* handle of cudaIpcGetMemHandle(), if nr_fds is 0; of a whole allocation */
	const int *fds;          /* borrowed; VMM allocations that lie side by side */
	const uint64_t *fd_bytes; /* how much of each */
	unsigned nr_fds;         /* 0..EXL3_FDS_MAX */
	uint64_t offset, bytes;  /* the part of it that is meant; bytes is not 0 */
};

struct exl3_dev_options {
	int ordinal;
	const char *uuid;        /* cuda; NULL: ordinal counts */
	int numa_node;           /* -1: not bound */
	unsigned threads;        /* cpu: OpenMP threads, 0 = cores of the node */
	unsigned shares;         /* cpu: devices that share those cores; 0 is 1 */
	uint64_t memory_max;      /* bytes on the device: weights; cpu: arenas too. 0 = no limit */
	uint64_t host_memory_max; /* cuda: bytes of arenas in host memory, 0 = no limit */
	uint64_t workspace_bytes; /* 0 = default */
	bool deterministic;
};

struct exl3_dev_info {
	char name[128];   /* "NVIDIA H200", or the CPU's model name */
	char isa[64];     /* "sm_90a", "avx512" */
	char uuid[64];    /* "GPU-...", or "cpu" and the node that its memory is bound to: whose slabs it can adopt */
	char driver[64];  /* version that slabs depend on; cpu: empty */
	uint64_t memory_total, memory_free; /* bytes */
	uint64_t slab_bytes, arena_bytes, workspace_bytes; /* held now (slabs with the models' tables); arenas in host memory */
	uint64_t device_arena_bytes, import_bytes;         /* arenas in the device's memory; of clients */
	uint32_t nr_imports;
	unsigned threads;
	int ordinal; /* what options.ordinal would have to be for this device */
	uint64_t cache_bytes; /* of the last level, weights that are used again within so much are in it; 0: unknown */
};

struct exl3_track_options {
	uint64_t workspace_bytes; /* 0 = default */
	unsigned threads;         /* cpu: of the team that runs its works, 0 = as the device */
	bool deterministic;
};

/*
 * A call of a plan. Words are device addresses in memory that the daemon made for the client (an arena), 4-byte
 * aligned; their values are epochs, which a client may write as it likes without harm to anybody else.
 */
struct exl3_dev_plan_call {
	const struct exl3_work *work; /* as for track_run(); with all it points to read by plan_new() only */
	uint64_t *skipped;     /* [work->nr_rows] host or NULL, MoE and MLA: invalid ids, set before a replay's exl3_done */
	const uint32_t *ready; /* the call begins when (int32_t)(*ready - epoch) >= 0; NULL: after the call before it */
	int32_t *result;       /* then written before done: 0, -ETIMEDOUT, -ECANCELED; or NULL: a failed call writes no done */
	uint32_t *done;        /* epoch, with release order behind the results; or NULL */
};

#define EXL3_DEV_PLAN_CALLS 2048u /* calls, and entries of all their works */

struct exl3_dev_plan_options {
	uint64_t workspace_bytes; /* 0 = default */
	bool deterministic;
	bool one_process;         /* cuda, also without MPS: who signals is in this process */
};

struct exl3_backend_ops {
	const char *name; /* also the config key: "cpu", "cuda" */
	/* Devices here, 0 if none (err says why), or a negative errno. Opens libraries, no context. The cpu
	 * backend says 1 and opens up to EXL3_CPU_DEVICES_MAX, which share the processors. */
	int (*probe)(struct exl3_error *err);
	int (*open)(const struct exl3_dev_options *opt, struct exl3_dev **ret, struct exl3_error *err);
	struct exl3_dev *(*close)(struct exl3_dev *dev); /* waits for running work; NULL allowed */
	void (*info)(struct exl3_dev *dev, struct exl3_dev_info *ret);

	/* Zeroed memory of at least @bytes, 2 MiB granularity on cuda. -ENOMEM says needed and free. */
	int (*slab_new)(struct exl3_dev *dev, size_t bytes, struct exl3_slab **ret,
			struct exl3_error *err);
	/* Maps a slab again from its fd (takes the fd on success). @bytes: as slab_new() was asked for. The fd is
	 * not trusted: another size, another device's memory, or pages that somebody could still change under us
	 * (where the kernel can tell) are -EINVAL. Maps for reading, where the device makes a difference. */
	int (*slab_adopt)(struct exl3_dev *dev, int fd, size_t bytes, struct exl3_slab **ret,
			  struct exl3_error *err);
	struct exl3_slab *(*slab_free)(struct exl3_slab *slab);
	/* Copies host bytes into the slab; @src may be reused after slab_sync(). Loader thread. */
	int (*slab_write)(struct exl3_slab *slab, size_t offset, const void *src, size_t bytes,
			  struct exl3_error *err);
	int (*slab_sync)(struct exl3_slab *slab, struct exl3_error *err);
	/* After the last write: nobody, this process included, can change the slab any more through its fd or a
	 * new mapping. Optional (NULL): the device's memory has no such thing. */
	int (*slab_seal)(struct exl3_slab *slab, struct exl3_error *err);
	int (*slab_read)(struct exl3_slab *slab, size_t offset, void *dst, size_t bytes,
			 struct exl3_error *err);
	/* Staging memory that slab_write() copies from fastest (pinned, NUMA-local), page aligned. */
	void *(*staging_new)(struct exl3_dev *dev, size_t bytes);
	void (*staging_free)(struct exl3_dev *dev, void *ptr, size_t bytes);

	/* Zeroed, size sealed, mapped on both sides. */
	int (*arena_new)(struct exl3_dev *dev, size_t bytes, struct exl3_arena **ret,
			 struct exl3_error *err);
	/* Maps an arena that an earlier worker made, from its fd (takes the fd on success). @fd is checked:
	 * a memfd of @bytes, whole pages, sealed in size. It may have holes: they are filled, but only if all of
	 * it is allowed. Optional. */
	int (*arena_adopt)(struct exl3_dev *dev, int fd, size_t bytes, struct exl3_arena **ret,
			   struct exl3_error *err);
	struct exl3_arena *(*arena_free)(struct exl3_arena *arena); /* after the last work on it */
	/* Optional (NULL): the device has no memory of its own. Zeroed memory of the device, for both sides. */
	int (*device_arena_new)(struct exl3_dev *dev, size_t bytes, struct exl3_arena **ret,
				struct exl3_error *err);
	/* Likewise. Maps a client's memory of the device; ended by arena_free(). What it names more than once
	 * is opened once. -EINVAL: it is none, or shorter; -EPERM: a slab of ours. May wait for running work. */
	int (*import)(struct exl3_dev *dev, const struct exl3_import *im, struct exl3_arena **ret,
		      struct exl3_error *err);

	/* Device copy of an expert table for exl3_moe_args.plan; optional (NULL). */
	int (*moe_plan)(struct exl3_dev *dev, const struct exl3_expert *experts, uint32_t nr_experts,
			void **ret, struct exl3_error *err);
	void (*moe_plan_free)(struct exl3_dev *dev, void *plan);

	/* Table entry for this work, or NULL: no kernel. The work's own table of measured choices counts first, for all
	 * its rows together, then builtin(), then the order of preference. Pure. */
	const struct exl3_kernel *(*select)(const struct exl3_dev *dev, const struct exl3_work *work);
	/*
	 * Which deterministic works of one module may share a launch: those for which this is the same, and not 0.
	 * @work: one request's (nr_rows 1). A row's kernel, split and order of summation then follow from its
	 * own request's row count and the module, and its bits are those of a launch without neighbours.
	 * A deterministic launch of works that differ in it runs them one after the other. Pure; NULL: none may.
	 */
	uint32_t (*merge_class)(const struct exl3_dev *dev, const struct exl3_work *work);
	/* -EAGAIN: queue full, nothing happened. */
	int (*submit)(struct exl3_dev *dev, const struct exl3_work *work);
	/* Finished work, in any order; never blocks. Count, or -EIO: device lost, all work failed. */
	int (*poll)(struct exl3_dev *dev, struct exl3_done *done, unsigned max);
	/* eventfd that becomes readable after work finished while the loop slept; see wake_arm. */
	int (*event_fd)(struct exl3_dev *dev);
	/* Before the loop sleeps: true if it may (the next completion writes event_fd). */
	bool (*wake_arm)(struct exl3_dev *dev);

	/*
	 * A track: a place outside of submit() in which works run, one after the other, with a workspace of its own.
	 * Freed before its device and after its last work has ended; NULL allowed, returns NULL. -ENOMEM.
	 */
	int (*track_new)(struct exl3_dev *dev, const struct exl3_track_options *opt, struct exl3_track **ret,
			 struct exl3_error *err);
	struct exl3_track *(*track_free)(struct exl3_track *track);
	/*
	 * Runs @work; @work and what it points to may change afterwards, except operands and weights. No signals, no tag.
	 *   cpu    to its end, on the caller's thread and a team of its own; work->skipped is set. @stream: NULL.
	 *   cuda   enqueues its kernels on @stream (a cudaStream_t of the device's context), which may be capturing:
	 *          nothing that is illegal then is called, and what a captured work needs beside its operands travels
	 *          with it or lies in the workspace, so that the graph may be launched as long as the track lives.
	 *          work->skipped is left alone. The caller sees to it that no two works of a track run at the same
	 *          time, launches of captured ones included: they share the workspace.
	 * 0, -EINVAL (signals), -EOPNOTSUPP (no kernel), -ENOMEM (workspace), -EIO. After an error some of the work's
	 * kernels may have been enqueued: y is undefined then, and a capture is to be thrown away.
	 */
	int (*track_run)(struct exl3_track *track, const struct exl3_work *work, void *stream);
	/* Invalid ids and slots of all works so far whose kernels have ended (cpu: of those with work->skipped). May
	 * wait for a copy, never for works. 0 or -EIO. */
	int (*track_skipped)(struct exl3_track *track, uint64_t *ret);

	/*
	 * A plan: calls in a row that the device runs again and again without the host between them. Optional (NULL):
	 * then the caller submits them one after the other. Waits are the device's; each is for the client's word, the
	 * replay's deadline or plan_abort(), and holds up neither submit() nor another plan.
	 * plan_new() takes milliseconds: not on the loop. -EINVAL (too many calls), -EPERM (no MPS: a client's
	 * kernels would not run beside the waiting one), -ENOSPC (too many plans), -EOPNOTSUPP (no kernel, or too few
	 * hardware queues: CUDA_DEVICE_MAX_CONNECTIONS, set before the device is opened, has to be 4 and one for each
	 * plan that may run at a time; under MPS it is 2 where nobody sets it), -ENOMEM, -EIO.
	 */
	int (*plan_new)(struct exl3_dev *dev, const struct exl3_dev_plan_call *calls, uint32_t nr,
			const struct exl3_dev_plan_options *opt, struct exl3_dev_plan **ret, struct exl3_error *err);
	struct exl3_dev_plan *(*plan_free)(struct exl3_dev_plan *plan); /* not while it runs; NULL allowed */
	/*
	 * Begins a replay, with @wait_ns for all its waits together, from when the device has come to it. One at a time
	 * for each plan: -EBUSY. -EAGAIN: as many as the device can have waiting run already; nothing happened. Ends
	 * as a work does, through poll() with @tag: 0, -ETIMEDOUT or -ECANCELED (from where it failed every call has that
	 * result, and its y is undefined), -EAGAIN (time was up, or it was aborted, before the first call's word was there:
	 * no word of the client was written, the same epoch may be submitted again), -EIO (device lost: words may say
	 * anything).
	 */
	int (*plan_submit)(struct exl3_dev_plan *plan, uint32_t epoch, uint64_t wait_ns, void *tag);
	/* The replay that runs, if one does, waits no more. It still ends through poll(), perhaps well. */
	void (*plan_abort)(struct exl3_dev_plan *plan);
	/* The call at which the last replay failed, once it has ended. */
	uint32_t (*plan_failed_call)(const struct exl3_dev_plan *plan);

	const struct exl3_kernel *kernels; /* ends with a NULL name */
	/* Measured choices that came with the backend for this kind of device, or NULL. Optional. */
	const struct exl3_tuned *(*builtin)(const struct exl3_dev *dev);
};

/* Grows with every change of the structs above: a plugin of another version is not used. */
#define EXL3_BACKEND_ABI 8u

extern const struct exl3_backend_ops exl3_backend_cpu;

/*
 * Backend by name, or NULL; "" or "auto": cuda if it has a device, else cpu. Looks for the CUDA plugin
 * at the first call; any thread. kernels/select.c
 */
const struct exl3_backend_ops *exl3_backend_find(const char *name);
/* All backends of this installation, after the first exl3_backend_find(); ends with NULL. */
extern const struct exl3_backend_ops *exl3_backends[];
/* Why there is no CUDA backend, or NULL: there is one. */
const char *exl3_backend_plugin_error(void);

#ifdef __cplusplus
}
#endif
#endif
