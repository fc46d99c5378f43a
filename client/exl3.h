/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exl3.h - run EXL3-quantized layers that exl3-daemon keeps resident.
 *
 * Functions return 0 (or a count, where said) or a negative errno; exl3_last_error() then has one
 * sentence for a human, per thread. Objects come through the last argument and are set on success only.
 * close/free functions accept NULL and return NULL.
 *
 * Threads: a struct exl3_client and all that was opened from it may be used from any thread, calls are
 * serialised inside. A struct exl3_channel is one thread's at a time; different channels are independent.
 * Nothing here is safe to use in a child after fork(): connect again there.
 *
 * A completion's result: 0 or
 *   -EINVAL          the request is wrong (detail: enum exl3_detail)
 *   -ENOENT          no such module, or it was closed or unloaded
 *   -EOPNOTSUPP      no kernel for this, or the format is not supported
 *   -EPERM           not allowed
 *   -EAGAIN          the model is still loading (exl3_sq_get(): the ring is full)
 *   -EDQUOT          a limit of this client
 *   -ENOMEM          no memory for it
 *   -ECANCELED       cancelled
 *   -ETIME           its deadline passed before it started
 *   -ESHUTDOWN       the daemon is draining
 *   -EIO             the device failed
 *   -ESTALE          the daemon's worker is gone: see exl3_connect()
 *   -ENOTRECOVERABLE this process's CUDA context is lost: start a new process
 */
#ifndef EXL3_H
#define EXL3_H

#include "shm/exl3_abi.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXL3_VERSION "0.1.0"
#define EXL3_API     __attribute__((visibility("default")))

struct exl3_client;
struct exl3_model;
struct exl3_module;
struct exl3_arena;
struct exl3_channel;
struct exl3_plan;

/* The last failed call's sentence in this thread; never NULL. Valid until the next call here. */
EXL3_API const char *exl3_last_error(void);

/* And its negative errno; 0: none has failed. What exl3_sq_get() returned NULL for: -EAGAIN (the ring is full), -ESTALE. */
EXL3_API int exl3_last_code(void);

/* ---- connection ---- */

/**
 * exl3_connect() - connect and negotiate.
 * @path: socket; NULL: $EXL3_SOCKET, else /run/exl3-daemon/0.sock.
 * @name: shown by `exl3ctl ps`; NULL: the program's name.
 *
 * When the daemon's worker goes away (restart, upgrade, device fault), every outstanding request ends with
 * -ESTALE at once; none is ever sent again by itself. A thread of the library then connects to the next worker
 * and has all that was open again under the same handles: models and modules if their content is the same,
 * geometries, arenas with their contents, channels. Until then calls return -ESTALE; exl3_reconnect() waits for it.
 * Returns 0, -ENOENT, -ECONNREFUSED (no daemon), -EACCES, -EPROTO (other version), -ENOMEM.
 */
EXL3_API int exl3_connect(const char *path, const char *name, struct exl3_client **ret);
/* @flags: EXL3_CONNECT_MANUAL: connect again only while somebody is in exl3_reconnect(). EXL3_CONNECT_NO_ENV: leave
 * the environment alone, see exl3_mps(). -EINVAL: other bits. */
#define EXL3_CONNECT_MANUAL (1u << 0)
#define EXL3_CONNECT_NO_ENV (1u << 1)
/* How the calls of this client's channels run (see enum exl3_mode); neither: what $EXL3_MODE says, "mapped", "direct" or "auto";
 * without it auto: mapped where the tenant's policy prefers that and it is possible, else direct. */
#define EXL3_CONNECT_MAPPED (1u << 2)
#define EXL3_CONNECT_DIRECT (1u << 3)
EXL3_API int exl3_connect_flags(const char *path, const char *name, unsigned flags,
				struct exl3_client **ret);
/**
 * exl3_mps() - does CUDA in this process share the MPS server of the daemon's worker?
 * For programs with CUDA of their own: both sides then run on the GPU at the same time, else they take turns
 * in slices of milliseconds. exl3_connect() and this call set the environment variable CUDA_MPS_PIPE_DIRECTORY
 * as long as CUDA has not been started (cuInit) and nobody has chosen another server: so connect first, or
 * start the program with what "exl3ctl env" prints. Like every setenv() they must not run beside other
 * threads' use of the environment. After exl3_reconnect() the worker may be in another server.
 * Returns 1 (it does, or will when it is started), 0 (the daemon has no MPS server), -ESTALE (CUDA was started
 * outside of it, or in that of a worker that has died: only a new process can join), -ENOTCONN (another server
 * is chosen by the environment, or the driver has left it aside).
 */
EXL3_API int exl3_mps(struct exl3_client *c);
/**
 * exl3_reconnect() - wait until the client is connected and everything it has open is there again.
 * @timeout_ns: UINT64_MAX = for ever.
 * Returns 0 (also if nothing was wrong), -ETIMEDOUT (exl3_last_error() says why the last attempt failed), -ESTALE
 * (a model's content is another: connect anew). Any thread. A channel is of use again when its thread has taken the
 * -ESTALE completions of what was outstanding; entries that were not submitted are gone.
 */
EXL3_API int exl3_reconnect(struct exl3_client *c, uint64_t timeout_ns);
/* Closes everything that was opened from it: all other handles of it are gone then. */
EXL3_API struct exl3_client *exl3_close(struct exl3_client *c);
/* false from the end of the worker until everything is there again. */
EXL3_API bool exl3_alive(const struct exl3_client *c);

/* ---- models, modules, tensors ---- */

/* -ENOENT: no such model; -EAGAIN: still loading; -EIO: refused at load. */
EXL3_API int exl3_model_open(struct exl3_client *c, const char *name, struct exl3_model **ret);
EXL3_API struct exl3_model *exl3_model_close(struct exl3_model *m);
/* Hexadecimal content fingerprint, as long as the model is open. */
EXL3_API const char *exl3_model_fingerprint(const struct exl3_model *m);
/* Where it lives and its requests run, "cpu:0" or "cuda:1"; as long as the model is open. */
EXL3_API const char *exl3_model_device(const struct exl3_model *m);

enum exl3_kind { EXL3_KIND_ANY = 0, EXL3_KIND_LINEAR = 1, EXL3_KIND_MOE = 2, EXL3_KIND_MLP = 3 };

struct exl3_shard_info {
	uint32_t k, n, k_logical, n_logical;
	uint32_t rate2;    /* 2 * bits per weight */
	uint32_t codebook; /* enum exl3_codebook */
	bool bias;
};

struct exl3_module_info {
	uint32_t kind;                       /* enum exl3_kind */
	uint32_t k, n, k_logical, n_logical; /* of the whole module; n: sum over shards */
	uint32_t nr_shards;                  /* of a linear; MoE, MLP: matrices of one expert */
	uint32_t nr_experts, intermediate;
	uint32_t act; /* enum exl3_act */
	float limit, routed_scale;
	uint64_t bytes;
};

/**
 * exl3_module_open() - find a module by name.
 * @name: as in the checkpoint ("model.layers.0.self_attn.q_proj"), a fused group of it
 *        ("...self_attn.qkv_proj", "...mlp.gate_up_proj"), a layer's routed block ("...mlp.experts" or
 *        "...mlp", EXL3_KIND_MOE) or a dense MLP ("...mlp", EXL3_KIND_MLP).
 * @kind: enum exl3_kind; ANY: the first of linear, MoE, MLP that exists.
 * Returns -ENOENT (err says what is near), -EOPNOTSUPP (stored in a form that is not supported).
 */
EXL3_API int exl3_module_open(struct exl3_model *m, const char *name, unsigned kind,
			      struct exl3_module **ret);
EXL3_API struct exl3_module *exl3_module_close(struct exl3_module *mod);
EXL3_API void exl3_module_get_info(const struct exl3_module *mod, struct exl3_module_info *ret);
/* Shard @i, 0..nr_shards-1; -EINVAL past the end. */
EXL3_API int exl3_module_get_shard(const struct exl3_module *mod, uint32_t i,
				   struct exl3_shard_info *ret);
EXL3_API uint32_t exl3_module_handle(const struct exl3_module *mod); /* for sqe.module */

struct exl3_tensor {
	const void *data; /* read-only mapping, 64-byte aligned; valid until exl3_tensor_close() */
	uint64_t bytes;
	char dtype[8];    /* safetensors name: "F16", "BF16", "F32", ... */
	uint32_t nr_dims;
	uint64_t shape[8];
	int fd;           /* owned by this struct; the tensor starts at offset */
	uint64_t offset;
	void *map;        /* private */
	uint64_t map_bytes;
};

/* An unquantized tensor (embedding, norms, router) by its full name. */
EXL3_API int exl3_tensor_open(struct exl3_model *m, const char *name, struct exl3_tensor *ret);
EXL3_API void exl3_tensor_close(struct exl3_tensor *t); /* zeroed or closed ones too */

/* The same tensor where the model's requests run. */
struct exl3_device_tensor {
	int fd;              /* owned by the caller; on a GPU a VMM allocation for cuMemImportFromShareableHandle() */
	bool on_gpu;         /* false: a read-only memfd, as that of struct exl3_tensor */
	uint64_t offset;     /* of the tensor in what fd is; 64-byte aligned */
	uint64_t bytes;      /* of the tensor */
	uint64_t file_bytes; /* of what fd is: to be mapped as a whole */
	char device[32];     /* as exl3_model_device() */
	char dtype[8];
	uint32_t nr_dims;
	uint64_t shape[8];
};

/**
 * exl3_tensor_open_on_device() - an unquantized tensor in the memory of the model's device.
 * Nothing is mapped: a program with CUDA imports the descriptor. The content must not be written: other clients
 * map the same memory. Returns -ENOENT (no such tensor, or the model was loaded without unquantized = device),
 * -EPERM (the tenant may not map device memory).
 */
EXL3_API int exl3_tensor_open_on_device(struct exl3_model *m, const char *name, struct exl3_device_tensor *ret);

/* ---- memory that the daemon reads and writes in place ---- */

/* @bytes are rounded up to whole pages; zeroed. -EDQUOT, -ENOMEM. */
EXL3_API int exl3_arena_new(struct exl3_client *c, size_t bytes, struct exl3_arena **ret);
EXL3_API struct exl3_arena *exl3_arena_free(struct exl3_arena *a); /* after its last completion */
EXL3_API void *exl3_arena_ptr(const struct exl3_arena *a);
EXL3_API size_t exl3_arena_bytes(const struct exl3_arena *a);
/* Bump allocator for convenience: 64-byte aligned, never freed singly; NULL when full. */
EXL3_API void *exl3_arena_alloc(struct exl3_arena *a, size_t bytes);
/* Reference of a pointer into the arena; EXL3_REF_NONE if it does not lie inside. */
EXL3_API exl3_ref exl3_arena_ref(const struct exl3_arena *a, const void *ptr);

/*
 * GPU memory. libexl3 opens the CUDA driver at run time, and only for these and for stream calls. The calling
 * thread must have a context current, of the GPU that the daemon serves (cudaFree(0) or cuCtxSetCurrent() make
 * one). Under MPS both must be clients of one MPS server, or every call costs a switch of contexts: see
 * `exl3ctl doctor`. -ENODEV: no driver here; -EOPNOTSUPP: the daemon's device has no memory of its own (cpu).
 */

/**
 * exl3_arena_new_device() - an arena in GPU memory: the first choice for a process with CUDA.
 * The daemon makes it, zeroes it and maps it; exl3_arena_ptr() is a device address of the current context,
 * exl3_arena_alloc() and exl3_arena_ref() work as for any arena. @bytes are rounded up to 2 MiB.
 * The GPU must have finished with it before exl3_arena_free(). -EDQUOT, -ENOMEM, -EINVAL (other GPU).
 */
EXL3_API int exl3_arena_new_device(struct exl3_client *c, size_t bytes, struct exl3_arena **ret);
/**
 * exl3_memory_register() - let the daemon read and write GPU memory of this program in place.
 * @ptr: device address, anywhere in memory of cudaMalloc (shared by a CUDA IPC handle, which the daemon must
 *       allow: cuda-ipc) or of cuMemCreate with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, as PyTorch's expandable
 *       segments; up to 8 allocations side by side. Memory of a pool (cudaMallocAsync) cannot be shared.
 * The same memory may be registered more than once. Requests that use it must have ended before it is freed;
 * if it is freed early all the same, the daemon works on in the old memory until its last request has ended.
 * The result is an arena for exl3_arena_ref() and exl3_arena_free(), which ends the registration only; @ptr
 * stays the program's. -EDQUOT, -EPERM (not allowed, or memory of the daemon's weights), -EINVAL, -E2BIG.
 */
EXL3_API int exl3_memory_register(struct exl3_client *c, void *ptr, size_t bytes,
				  struct exl3_arena **ret);

/* ---- requests ---- */

/*
 * Who runs the requests of a channel.
 *   DIRECT  the daemon, as they come through the channel's ring; merged with those of others.
 *   MAPPED  this process, with the same kernels: it has the weights mapped, which the daemon's policy must allow (the
 *           tenant's mapped). No daemon, no MPS and no merging take part in a call. On a processor a request runs
 *           inside of exl3_submit(), on $EXL3_THREADS threads (all of them by default); on a GPU it is enqueued on a
 *           stream of the channel, or by exl3_*_stream() on the caller's, which may be capturing.
 * The same functions, checks and results in both, and the same bits where the kernels are the same. Different in MAPPED:
 * operands may lie anywhere in the process (exl3_memory_ref()); requests go on while the daemon restarts; a request whose
 * model was unloaded or loaded anew ends with -ESTALE: open the model again. Of stream calls on a GPU: a channel is used
 * with one stream at a time, launches of a captured graph must not run beside other calls of its channel, and bad ids and
 * slots are skipped without being counted. Models should be open before the channel is made.
 */
enum exl3_mode { EXL3_MODE_DIRECT = 0, EXL3_MODE_MAPPED = 1 };

/* @entries: SQ size, a power of two, 2..4096. Requests of a channel run in order, also across devices. */
EXL3_API int exl3_channel_new(struct exl3_client *c, uint32_t entries, struct exl3_channel **ret);
/* @flags: EXL3_CHANNEL_MAPPED: mapped, or an error that says why not (-EPERM: the policy; -EOPNOTSUPP: no
 * libexl3-mapped.so of this version, or no such device here). EXL3_CHANNEL_DIRECT. 0: as the client was connected. */
#define EXL3_CHANNEL_MAPPED (1u << 0)
#define EXL3_CHANNEL_DIRECT (1u << 1)
EXL3_API int exl3_channel_new_flags(struct exl3_client *c, uint32_t entries, unsigned flags, struct exl3_channel **ret);
/* enum exl3_mode. @why: NULL, or set to why it is not mapped although that was preferred, else to ""; valid until the
 * channel is freed. */
EXL3_API int exl3_channel_mode(const struct exl3_channel *ch, const char **why);
/* Reference of memory of this process, for channels of mapped mode only; on a GPU a device address. Nobody knows how
 * long it is: an operand that reaches past its end is undefined behaviour, as with any pointer. */
EXL3_API exl3_ref exl3_memory_ref(const void *ptr);
EXL3_API struct exl3_channel *exl3_channel_free(struct exl3_channel *ch);

/* Next free entry, zeroed, or NULL: the ring is full (reap completions first; credit counts). */
EXL3_API struct exl3_sqe *exl3_sq_get(struct exl3_channel *ch);
/* Publishes all entries got since the last call, wakes the daemon if it sleeps. Count, or -ESTALE. */
EXL3_API int exl3_submit(struct exl3_channel *ch);
/* Takes a completion if one is there: 1, 0, or -ESTALE (worker gone, nothing left to reap). */
EXL3_API int exl3_peek(struct exl3_channel *ch, struct exl3_cqe *ret);
/**
 * exl3_wait() - take a completion, wait for one if need be: spins a little, then sleeps.
 * @timeout_ns: 0 = do not wait, UINT64_MAX = for ever.
 * Returns 1, 0 (time is up, or nothing is outstanding), -ESTALE. When the worker goes away, each outstanding request ends with
 * one completion of result -ESTALE first.
 */
EXL3_API int exl3_wait(struct exl3_channel *ch, struct exl3_cqe *ret, uint64_t timeout_ns);
/* What a completion says, as a sentence: from detail if it has a reason, else from result. Static text. */
EXL3_API const char *exl3_result_text(const struct exl3_cqe *cqe);
/* An fd for poll(): readable when completions may be there. Then exl3_fd_clear() and exl3_peek() until 0. */
EXL3_API int exl3_fd(struct exl3_channel *ch);
EXL3_API void exl3_fd_clear(struct exl3_channel *ch);
/* Nanoseconds that exl3_wait() spins before it sleeps; default 20000. */
EXL3_API void exl3_channel_set_spin(struct exl3_channel *ch, uint64_t ns);
/* Counters since the channel was made: system calls made by submit and wait. */
EXL3_API uint64_t exl3_channel_syscalls(const struct exl3_channel *ch);

/**
 * exl3_prep_linear() - describe y = x W for one matrix or a fused group (shards side by side in y).
 * @sqe: from exl3_sq_get(); not to be touched after exl3_submit().
 * @x:   [m, k_logical] of @x_dtype (f16, bf16, f32), dense, 16-byte aligned; unchanged until completion.
 * @y:   [m, n_logical] of @y_dtype; fully written, never read; overlaps no input.
 * @m:   rows, 1..EXL3_M_MAX.
 * Then set flags, strides, deadline_ns or user_data in the entry as needed.
 * Accuracy: f32 accumulation, see docs/numerics.md.
 */
EXL3_API void exl3_prep_linear(struct exl3_sqe *sqe, const struct exl3_module *mod, exl3_ref x,
			       unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m);
/* @ids [m, topk] i32 or i64 (-1 = hole, other invalid ids are skipped and counted in detail),
 * @weights [m, topk] f16, bf16 or f32. Activation, limit and scale: the model's, unless set in the entry. */
EXL3_API void exl3_prep_moe(struct exl3_sqe *sqe, const struct exl3_module *mod, exl3_ref x,
			    unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m, exl3_ref ids,
			    unsigned ids_dtype, exl3_ref weights, unsigned weights_dtype,
			    uint32_t topk);
/* down(act(gate(x), up(x))) of a dense MLP in one request. */
EXL3_API void exl3_prep_mlp(struct exl3_sqe *sqe, const struct exl3_module *mod, exl3_ref x,
			    unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m);
EXL3_API void exl3_prep_nop(struct exl3_sqe *sqe);
/* Cancels the request of this channel with that user_data if it has not started, or before its next slice:
 * then a part of its output has been written. */
EXL3_API void exl3_prep_cancel(struct exl3_sqe *sqe, uint64_t user_data);

struct exl3_mla_shape {
	uint32_t heads, dim, value_dim, topk;
	uint64_t slots;
	uint64_t cache_stride;   /* bytes, 0 = dense */
	uint32_t indices_stride; /* bytes, 0 = dense */
	uint32_t cache_dtype;    /* f16, bf16, e4m3, e4m3_656 (records: dim 576, value_dim 512) */
	uint32_t indices_dtype;  /* i32, i64 */
	uint32_t page_rows;      /* 0 or 1: an index names a row; else a page of so many (a power of two to
	                          * 4096), so indices are a block table [.., ceil(topk / page_rows)] */
	uint32_t table_queries;  /* so many consecutive queries share a row of indices, 0 = 1 */
	const char *device;      /* where its requests run, as exl3_model_device() says; NULL: the default one */
};
/* Checks and registers a geometry; *ret is the handle for exl3_prep_mla(). -EINVAL, -EOPNOTSUPP. */
EXL3_API int exl3_mla_register(struct exl3_client *c, const struct exl3_mla_shape *shape,
			       uint32_t *ret);
/* q [batch, heads, dim]; cache [slots, dim]; indices [ceil(batch / table_queries), columns] (-1 = hole,
 * other invalid ones are skipped and counted in detail, once per query); o [batch, heads, value_dim]; lse [batch, heads] f32 or EXL3_REF_NONE:
 * log of the sum of exp(scale q.k), -inf when every entry is a hole (o is zero then). */
EXL3_API void exl3_prep_mla(struct exl3_sqe *sqe, uint32_t geometry, exl3_ref q, unsigned q_dtype,
			    exl3_ref cache, exl3_ref indices, exl3_ref o, unsigned o_dtype,
			    exl3_ref lse, uint32_t batch, float scale, float kv_scale);
/* After exl3_prep_mla(): lengths [batch] i32, keys that each query looks at, 0..topk. Without it: topk. For
 * several queries of one sequence give each the number of keys that it may see. */
EXL3_API void exl3_prep_mla_lengths(struct exl3_sqe *sqe, exl3_ref lengths);

/* ---- synchronous calls: submit one entry and wait; the channel must have nothing outstanding ---- */

/* Pointers must lie in @a. Return the completion's result; @detail may be NULL. */
EXL3_API int exl3_linear(struct exl3_channel *ch, const struct exl3_module *mod,
			 const struct exl3_arena *a, const void *x, unsigned x_dtype, void *y,
			 unsigned y_dtype, uint32_t m);
EXL3_API int exl3_mlp(struct exl3_channel *ch, const struct exl3_module *mod,
		      const struct exl3_arena *a, const void *x, unsigned x_dtype, void *y,
		      unsigned y_dtype, uint32_t m);
EXL3_API int exl3_moe(struct exl3_channel *ch, const struct exl3_module *mod,
		      const struct exl3_arena *a, const void *x, unsigned x_dtype, void *y,
		      unsigned y_dtype, uint32_t m, const void *ids, unsigned ids_dtype,
		      const void *weights, unsigned weights_dtype, uint32_t topk, uint64_t *detail);
/* Submits what was prepared last and waits for its completion. -EBUSY: others are outstanding. */
EXL3_API int exl3_call(struct exl3_channel *ch, struct exl3_cqe *ret);

/*
 * ---- plans: the calls of a step, recorded once ----
 *
 * Between exl3_plan_begin() and exl3_plan_end() what is prepared in the channel's entries is recorded instead of
 * submitted; exl3_submit() then returns 0, and exl3_linear() and the others return 0 without having run. The daemon checks all of it once. A
 * replay is one entry with one completion, whatever the number of calls: they run in the order in which they were
 * recorded, on the operands as they are then, and share launches with other clients as single calls do.
 *
 * A completion's result is 0, with the calls' invalid ids and slots summed up in detail; or that of the first call that failed:
 * EXL3_PLAN_CALL(detail) is its number, counted from 0, and those behind it did not run, or in vain. The
 * replay's deadline counts for each call's start; CANCEL takes out the calls that have not started. Replays of one
 * plan run one after the other. -ENOENT: a model of it was unloaded, or its channel freed.
 */

/* -EBUSY: it records already, or has entries that are not submitted. -EOPNOTSUPP: a channel of mapped mode. */
EXL3_API int exl3_plan_begin(struct exl3_channel *ch);
/**
 * exl3_plan_end() - the calls since exl3_plan_begin() as a plan of this channel.
 * @ret: NULL: they are forgotten.
 * Not in a plan: CANCEL, other plans, stream calls, deadlines; calls for another device than the first one's.
 * The plan keeps the memory of its operands: what is freed meanwhile goes with it. A model is not kept. After a
 * restart of the daemon's worker it is recorded again like all that was open.
 * Returns 0, -EINVAL (nothing was recorded; a call is wrong: exl3_last_error() says which and why), -ENOENT,
 * -EOPNOTSUPP, -E2BIG (more than EXL3_PLAN_CALLS_MAX), -EDQUOT, -ENOMEM, -ESTALE. The channel records no more.
 */
EXL3_API int exl3_plan_end(struct exl3_channel *ch, struct exl3_plan **ret);
/* After its last replay's completion. */
EXL3_API struct exl3_plan *exl3_plan_free(struct exl3_plan *plan);
EXL3_API uint32_t exl3_plan_calls(const struct exl3_plan *plan);
/* Describes a replay; for exl3_submit() or exl3_stream_call() of the plan's channel. */
EXL3_API void exl3_prep_plan(struct exl3_sqe *sqe, const struct exl3_plan *plan);
/* One replay, and waits for it, as exl3_call(). */
EXL3_API int exl3_plan_run(struct exl3_plan *plan, struct exl3_cqe *ret);
/* One replay in the order of a stream, see below. */
EXL3_API int exl3_plan_stream(struct exl3_plan *plan, void *stream, uint32_t *call);

/*
 * ---- stream calls: requests in the order of a CUDA stream ----
 *
 * Each enqueues three things and returns: @stream writes a *ready* word when it has come so far, the daemon runs
 * the request once its host has seen that, and @stream waits for its *done* word before it goes on. No thread
 * waits, on neither side; calls can be queued ahead as far as the channel has entries, then a call waits for the
 * first of them to end, as a kernel launch does when the driver's queue is full. Calls of a channel run in the
 * order in which they were made, also those of several streams: give each stream a channel of its own.
 *
 * @stream: CUstream or cudaStream_t, NULL = the default stream, of the context that is current; or
 *          EXL3_STREAM_HOST: exl3_stream_ready() takes the place of the stream, and nothing waits for the end.
 * @call:   number of the call for exl3_stream_result(); may be NULL. Numbers run freely over 2^32.
 * A call whose stream has not come so far when its deadline passes (deadline_ns of the entry; else the daemon's
 * ready-timeout) ends with -ETIME; with -ESHUTDOWN a second after the daemon was told to end. If the daemon or the
 * call fails, the stream goes on all the same, y is not to be used: exl3_stream_error() after synchronising says so.
 * Returns 0, -EOPNOTSUPP (the stream is being captured into a graph; in mapped mode it may be), -ESTALE, -EINVAL, -EIO
 * (CUDA refused), -ENOTRECOVERABLE, -ENODEV. Threads as for the channel. A stream that waits takes a hardware
 * queue, of which a process has 8 (2 under MPS): streams that share one wait for each other.
 * CUDA_DEVICE_MAX_CONNECTIONS=32, set before CUDA is started, gives a program with many such streams more; the
 * clients of an MPS server together have some 128, and who wants more than are left gets no context.
 * exl3_channel_free() and exl3_close() let waiting streams go on and then wait for the context's work to end.
 */
#define EXL3_STREAM_HOST ((void *)-1)

/* Runs the entry that exl3_sq_get() handed out last, prepared by any exl3_prep_*() but CANCEL, as a stream call.
 * The only one that is not submitted yet. A flag, stride, kernel or deadline may be set in it, user_data not. */
EXL3_API int exl3_stream_call(struct exl3_channel *ch, void *stream, uint32_t *call);
/* For EXL3_STREAM_HOST: the operands of @call are ready. Any thread. */
EXL3_API void exl3_stream_ready(struct exl3_channel *ch, uint32_t call);
/* How a call ended, in *@ret. 0; -EAGAIN: not ended within @timeout_ns; -ENOENT: not one of the channel's last
 * calls, as many as twice its entries; -ESTALE. */
EXL3_API int exl3_stream_result(struct exl3_channel *ch, uint32_t call, struct exl3_cqe *ret,
				uint64_t timeout_ns);
/* The first error of a call since the last time this was asked: 0, or the negative result and in *@call (may be
 * NULL) which one. Does not wait: synchronise the stream first. */
EXL3_API int exl3_stream_error(struct exl3_channel *ch, uint32_t *call);
/* Operands as for exl3_prep_linear() and so on. */
EXL3_API int exl3_linear_stream(struct exl3_channel *ch, const struct exl3_module *mod, exl3_ref x,
				unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m,
				void *stream, uint32_t *call);
EXL3_API int exl3_mlp_stream(struct exl3_channel *ch, const struct exl3_module *mod, exl3_ref x,
			     unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m,
			     void *stream, uint32_t *call);
EXL3_API int exl3_moe_stream(struct exl3_channel *ch, const struct exl3_module *mod, exl3_ref x,
			     unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m,
			     exl3_ref ids, unsigned ids_dtype, exl3_ref weights,
			     unsigned weights_dtype, uint32_t topk, void *stream, uint32_t *call);
EXL3_API int exl3_mla_stream(struct exl3_channel *ch, uint32_t geometry, exl3_ref q,
			     unsigned q_dtype, exl3_ref cache, exl3_ref indices, exl3_ref o,
			     unsigned o_dtype, exl3_ref lse, uint32_t batch, float scale,
			     float kv_scale, void *stream, uint32_t *call);
/* An empty kernel in its turn on the daemon's device. */
EXL3_API int exl3_nop_stream(struct exl3_channel *ch, void *stream, uint32_t *call);

#ifdef __cplusplus
}
#endif
#endif
