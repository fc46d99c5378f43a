/* SPDX-License-Identifier: Apache-2.0 */
/* fake_backend.h - a backend of plain memory for tests of the model store, with failures on demand. */
#ifndef EXL3_TESTS_FAKE_BACKEND_H
#define EXL3_TESTS_FAKE_BACKEND_H

#include "kernels/backend.h"

/* What it does and what it counted. Set fields before a load, look at them after it. */
struct fake {
	uint64_t memory_free;    /* what info() says; UINT64_MAX by fake_reset() */
	bool fail_slab;          /* slab_new() returns -ENOMEM */
	unsigned fail_write;     /* the n-th slab_write() fails, from 1; 0 = none */
	unsigned fail_sync;      /* the n-th slab_sync() */
	unsigned fail_staging;   /* the n-th staging_new() */
	bool refuse_plans;       /* moe_plan() returns -EOPNOTSUPP */
	bool late;               /* slab_write() only notes; slab_sync() copies, as a GPU may */
	unsigned slabs, staging; /* alive now */
	unsigned writes, syncs, stagings;
	unsigned plans; /* alive now */
};
extern struct fake fake;

extern const struct exl3_backend_ops fake_ops;
struct exl3_dev *fake_dev(void);
void fake_reset(void); /* no failures; asserts that nothing of an earlier test is alive */

#endif
