/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - a submission entry against everything that it may ask for: checked once, then trusted.
 *
 * The entry is a private copy. What comes out has daemon addresses and only values in range; the
 * integers that lie in client memory (ids, slots) are the backend's to copy and check.
 */
#ifndef EXL3_DAEMON_CHECK_H
#define EXL3_DAEMON_CHECK_H

#include "daemon/devices.h"
#include "daemon/weights.h"

#define EXL3_PINS_MAX 6u /* operands of one request: q, cache, indices, lengths, o, lse */

/* Memory that a client maps too. Loop thread. */
struct exl3_buffer {
	char *base[EXL3_DEVICES_MAX]; /* address on each device, page aligned; NULL: it cannot use it */
	uint64_t bytes;
	uint32_t refs; /* its owner, and one per pinned operand */
	void *owner;   /* for whoever frees it */
	struct exl3_tenant *tenant; /* counted; whose bytes these are, NULL: nobody's */
	uint64_t charged;           /* to it, as: */
	uint8_t kind;               /* enum exl3_metric_kind */
	struct exl3_arena *arena;
	bool device; /* in the memory of its maker */
	const struct exl3_device *maker; /* of the arena */
};

struct exl3_registered;

/* What sqe.module names. Borrowed until the request is done: the model is pinned by the caller. */
struct exl3_target {
	const struct exl3_module_desc *desc;
	const struct exl3_mla_geometry *mla; /* until the check returns: it copies it */
	struct exl3_registered *model;       /* of desc */
	uint32_t device;                     /* where it runs */
};

struct exl3_check_env {
	/* NULL: no such buffer. */
	struct exl3_buffer *(*buffer)(void *arg, uint32_t id);
	/* 0; -ENOENT: no such handle; -ESTALE: its model was unloaded. */
	int (*target)(void *arg, uint32_t handle, struct exl3_target *ret);
	void *arg;
	/* Of each device. */
	struct exl3_check_kernels {
		const struct exl3_kernel *list;
		uint32_t nr;
	} kernels[EXL3_DEVICES_MAX];
	bool deterministic; /* for all requests */
	bool stream;        /* the channel has words for stream calls */
};

/* A request that may run. */
struct exl3_checked {
	uint8_t op;
	bool deterministic;
	uint8_t act; /* MOE, MLP */
	float limit, routed_scale;
	struct exl3_rows rows;
	const struct exl3_kernel *kernel; /* NULL: the backend chooses */
	struct exl3_target target;
	struct exl3_buffer *pins[EXL3_PINS_MAX]; /* borrowed; the caller takes the references */
	uint32_t nr_pins;
	union {
		struct exl3_route route;
		struct {
			struct exl3_mla_cache cache;
			struct exl3_mla_geometry geometry;
		} mla;
	} u;
};

/**
 * exl3_check_sqe() - check an entry with op LINEAR, MOE, MLP, MLA_DECODE, NOP or CANCEL.
 * @sqe: private copy.
 * @ret: filled in on success; for NOP and CANCEL only op counts.
 * @detail: enum exl3_detail on failure.
 * Returns 0, -EINVAL, -ENOENT or -EOPNOTSUPP. Pure, but for the environment's look-ups.
 */
int exl3_check_sqe(const struct exl3_sqe *sqe, const struct exl3_check_env *env,
		   struct exl3_checked *ret, enum exl3_detail *detail);

/* A geometry as a client wants to register it; fills in strides that are 0. -EINVAL, -EOPNOTSUPP. */
int exl3_check_geometry(struct exl3_mla_geometry *g, struct exl3_error *err);

#endif
