/* SPDX-License-Identifier: Apache-2.0 */
/* map_write.h - the table of a model's modules for clients that map its weights (shm/exl3_map.h). */
#ifndef EXL3_DAEMON_MAP_WRITE_H
#define EXL3_DAEMON_MAP_WRITE_H

#include "daemon/weights.h"

/**
 * exl3_map_write() - a new memfd with everything that can be asked for in @model, sealed against every change.
 * @model:  READY.
 * @device: the worker's name for its device.
 * @flags:  EXL3_MAP_...
 * Returns 0 (*ret is the caller's), -ENOMEM, -EFBIG, or what the kernel says. Any thread.
 */
int exl3_map_write(const struct exl3_model *model, const char *device, uint32_t flags, int *ret,
		   struct exl3_error *err);

#endif
