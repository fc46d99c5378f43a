/* SPDX-License-Identifier: Apache-2.0 */
/* check.h - a client's memory, as requests are checked against it (kernels/check.h). */
#ifndef EXL3_DAEMON_CHECK_H
#define EXL3_DAEMON_CHECK_H

#include "daemon/devices.h"
#include "daemon/weights.h"
#include "kernels/check.h"

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

/* For exl3_check_env.extent. */
static inline bool exl3_buffer_extent(const struct exl3_buffer *buf, uint32_t device, struct exl3_extent *ret)
{
	*ret = (struct exl3_extent){.base = buf->base[device], .bytes = buf->bytes, .device = buf->device};
	return ret->base != NULL;
}

#endif
