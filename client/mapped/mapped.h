/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mapped.h - between libexl3 and libexl3-mapped.so, which has the kernels: opened when a client maps weights first.
 *
 * libexl3 asks the daemon, keeps handles and rings, and decides what runs; this library knows devices, weights and
 * kernels, and nothing of daemons. Both are of one version: exl3_mapped_ops.abi and version are compared. (Nothing of
 * kernels/ is included here: libexl3 has other structs of the same names.)
 */
#ifndef EXL3_CLIENT_MAPPED_H
#define EXL3_CLIENT_MAPPED_H

#include "client/exl3.h"
#include "shm/util.h"

#define EXL3_MAPPED_ABI  1u
#define EXL3_MAPPED_GPUS 16 /* numbers of GPUs are below */

struct exl3_module_desc;  /* of kernels/module.h */

struct exl3_mapped_model; /* weights and modules on a device */
struct exl3_mapped_lane;  /* where a channel's requests run; one thread at a time, as the channel */

struct exl3_mapped_target {
	struct exl3_mapped_model *model;     /* whose weights; with mla: on whose device. Stays until the work has ended */
	const struct exl3_module_desc *desc; /* of it, or */
	const struct exl3_mla_shape *mla;    /* until run() returns */
	void *stream;                        /* if it is on a GPU: of that GPU's context, NULL is the default one */
};

/* As struct exl3_extent of kernels/check.h. */
struct exl3_mapped_extent {
	char *base;
	uint64_t bytes;
	bool device;
};

/* Who answers for a channel: as exl3_check_env. */
struct exl3_mapped_env {
	/* 0; -ENOENT: no such handle; -ESTALE: its model is not to be used any more. */
	int (*target)(void *arg, uint32_t handle, struct exl3_mapped_target *ret);
	/* @gpu: as the GPU addresses it. False: no such buffer, or it cannot. */
	bool (*extent)(void *arg, uint32_t buffer, bool gpu, struct exl3_mapped_extent *ret);
	void *arg;
};

struct exl3_mapped_ops {
	uint32_t abi;        /* EXL3_MAPPED_ABI */
	const char *version; /* EXL3_VERSION */

	/**
	 * model_open() - weights and the table of their modules, as the daemon sent them.
	 * @slab_fd: taken on success. @table_fd: stays the caller's.
	 * @fingerprint: what the content has to be.
	 * Opens the device if this process has not. Returns 0, -EINVAL (they are not what they should be, or for another
	 * device or driver), -EOPNOTSUPP (another version, no such backend here), -ENODEV, -ENOMEM, -EIO. Any thread.
	 */
	int (*model_open)(int slab_fd, int table_fd, const char *fingerprint, struct exl3_mapped_model **ret,
			  struct exl3_error *err);
	/* Nothing runs with it any more. NULL allowed; returns NULL. */
	struct exl3_mapped_model *(*model_close)(struct exl3_mapped_model *model);
	/* By the daemon's canonical name; NULL: there is none. Any thread. */
	const struct exl3_module_desc *(*find)(const struct exl3_mapped_model *model, const char *name, unsigned kind);
	/* The daemon's name for its device; and the GPU's number for CUDA here, or -1: the processor. */
	const char *(*device)(const struct exl3_mapped_model *model, int *gpu);

	int (*lane_new)(const struct exl3_mapped_env *env, struct exl3_mapped_lane **ret, struct exl3_error *err);
	struct exl3_mapped_lane *(*lane_free)(struct exl3_mapped_lane *lane); /* nothing of it runs any more */
	/* What run() would refuse without looking at anything that may change: result and detail are set. */
	void (*check)(struct exl3_mapped_lane *lane, const struct exl3_sqe *sqe, struct exl3_cqe *ret);
	/**
	 * run() - check an entry as the daemon does, and run it.
	 * @ret: result, detail and exec_ns are set.
	 * Returns 0: it has ended; 1: enqueued, *@ret is how it ends unless the stream reports an error.
	 */
	int (*run)(struct exl3_mapped_lane *lane, const struct exl3_sqe *sqe, struct exl3_cqe *ret);
};

#endif
