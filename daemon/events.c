/* SPDX-License-Identifier: Apache-2.0 */
/* events.c - what happened to the domains lately: the last so many events, oldest first. */
#include "daemon/events.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static void printable(char *text)
{
	for (; *text; text++) {
		if ((unsigned char)*text < ' ' || *text == 0x7f)
			*text = '?';
	}
}

const struct exl3_event *exl3_events_add(struct exl3_events *events, const char *domain,
					 uint32_t generation, const char *kind, const char *fmt,
					 ...)
{
	struct exl3_event *e = &events->ring[++events->last_id % EXL3_EVENTS_MAX];
	struct timespec now;
	va_list ap;

	clock_gettime(CLOCK_REALTIME, &now);
	memset(e, 0, sizeof(*e));
	e->id = events->last_id;
	e->time_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
	e->generation = generation;
	snprintf(e->domain, sizeof(e->domain), "%s", domain);
	snprintf(e->kind, sizeof(e->kind), "%s", kind);
	va_start(ap, fmt);
	vsnprintf(e->text, sizeof(e->text), fmt, ap);
	va_end(ap);
	printable(e->text);
	return e;
}

int exl3_events_put(struct exl3_events *events, const struct exl3_event *event)
{
	if (event->id <= events->last_id)
		return -EINVAL;
	/* What lies between is not known here: not to be found under the ids of the new ones. */
	for (uint64_t id = events->last_id + 1; id < event->id; id++) {
		if (event->id - id < EXL3_EVENTS_MAX)
			events->ring[id % EXL3_EVENTS_MAX].id = 0;
	}
	events->ring[event->id % EXL3_EVENTS_MAX] = *event;
	events->last_id = event->id;
	return 0;
}

const struct exl3_event *exl3_events_from(const struct exl3_events *events, uint64_t id)
{
	if (events->last_id >= EXL3_EVENTS_MAX && id <= events->last_id - EXL3_EVENTS_MAX)
		id = events->last_id - EXL3_EVENTS_MAX + 1;
	for (; id <= events->last_id; id++) {
		const struct exl3_event *e = &events->ring[id % EXL3_EVENTS_MAX];

		if (id && e->id == id)
			return e;
	}
	return NULL;
}
