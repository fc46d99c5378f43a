/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events.h - what happened to the domains lately: the last so many events, oldest first.
 *
 * The supervisor adds them and tells every worker, also those that start later; so a worker can answer
 * `exl3ctl events` by itself, and why the one before it died is known to the next.
 */
#ifndef EXL3_DAEMON_EVENTS_H
#define EXL3_DAEMON_EVENTS_H

#include "daemon/config.h"
#include "proto/event.h"

#define EXL3_EVENTS_MAX 256u

struct exl3_events {
	struct exl3_event ring[EXL3_EVENTS_MAX];
	uint64_t last_id; /* 0: none; the ring holds those after last_id - EXL3_EVENTS_MAX */
};

/* Numbers and dates a new one. It is valid until EXL3_EVENTS_MAX others were added. */
const struct exl3_event *exl3_events_add(struct exl3_events *events, const char *domain,
					 uint32_t generation, const char *kind, const char *fmt,
					 ...) __attribute__((format(printf, 5, 6)));
/* One that another process has numbered; it must be newer than all that are there. -EINVAL. */
int exl3_events_put(struct exl3_events *events, const struct exl3_event *event);
/* The first with an id of at least @id, or NULL. */
const struct exl3_event *exl3_events_from(const struct exl3_events *events, uint64_t id);

#endif
