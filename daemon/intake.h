/* SPDX-License-Identifier: Apache-2.0 */
/*
 * intake.h - takes a checkpoint's bytes as they stream by: hashes, checks, converts, and puts them
 * into the slab and the tensor file.
 */
#ifndef EXL3_DAEMON_INTAKE_H
#define EXL3_DAEMON_INTAKE_H

#include "daemon/plan.h"

struct exl3_intake;

/* @slab and @tensor_fd (-1: none) have the sizes that @plan asks for; all are borrowed. */
int exl3_intake_new(struct exl3_plan *plan, const struct exl3_backend_ops *ops,
		    struct exl3_dev *dev, struct exl3_slab *slab, int tensor_fd,
		    struct exl3_intake **ret, struct exl3_error *err);
struct exl3_intake *exl3_intake_free(struct exl3_intake *in); /* after the last sync */

/* The loader's functions; @arg is a struct exl3_intake. */
int exl3_intake_data(void *arg, uint32_t file, uint32_t index, uint64_t off, const void *p,
		     size_t bytes, struct exl3_error *err);
int exl3_intake_sync(void *arg, struct exl3_error *err);
void *exl3_intake_buffer_new(void *arg, size_t bytes);
void exl3_intake_buffer_free(void *arg, void *p, size_t bytes);

/*
 * After everything came: 128 bits over the names, dtypes, shapes and bytes of all tensors, sorted by
 * name, so that it does not matter how they are spread over files. 32 hexadecimal digits.
 */
void exl3_intake_fingerprint(const struct exl3_intake *in, char ret[33]);

#endif
