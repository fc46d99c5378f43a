/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - a submission entry against everything that it may ask for: checked once, then trusted.
 *
 * The entry is a private copy. What comes out has addresses and only values in range; the integers that
 * lie in client memory (ids, slots) are the backend's to copy and check. The daemon checks what comes
 * through its rings with it, a client of mapped mode what it runs itself: so both say the same.
 */
#ifndef EXL3_KERNELS_CHECK_H
#define EXL3_KERNELS_CHECK_H

#include "kernels/module.h"

#define EXL3_DEVICES_MAX 16u /* of one process */
#define EXL3_PINS_MAX    6u  /* operands of one request: q, cache, indices, lengths, o, lse */

struct exl3_buffer;     /* memory that operands may lie in: the caller's */
struct exl3_registered; /* a model: likewise */

/* Of a buffer, on one device. */
struct exl3_extent {
	char *base;     /* where the device finds it, 16-byte aligned */
	uint64_t bytes;
	bool device;    /* in the device's own memory */
};

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
	/* false: that device cannot use it. */
	bool (*extent)(const struct exl3_buffer *buf, uint32_t device, struct exl3_extent *ret);
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
	bool plans;         /* entries may replay plans */
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
 * exl3_check_sqe() - check an entry.
 * @sqe: private copy.
 * @ret: filled in on success; for NOP, CANCEL and PLAN only op counts.
 * @detail: enum exl3_detail on failure.
 * Returns 0, -EINVAL, -ENOENT or -EOPNOTSUPP. Pure, but for the environment's look-ups.
 */
int exl3_check_sqe(const struct exl3_sqe *sqe, const struct exl3_check_env *env,
		   struct exl3_checked *ret, enum exl3_detail *detail);

/* What a request wants of the device, without its rows and what belongs to them. */
void exl3_work_describe(struct exl3_work *work, const struct exl3_checked *c);

/* A geometry as a client wants to register it; fills in strides that are 0. -EINVAL, -EOPNOTSUPP. */
int exl3_check_geometry(struct exl3_mla_geometry *g, struct exl3_error *err);

#endif
