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

#define EXL3_EVENTS_MAX     256u
#define EXL3_EVENT_KIND_MAX 16u
#define EXL3_EVENT_TEXT_MAX 400u

struct exl3_event {
	uint64_t id;         /* 1, 2, ... since the daemon started */
	uint64_t time_ms;    /* CLOCK_REALTIME */
	uint32_t generation; /* of the domain then */
	char domain[EXL3_DOMAIN_NAME_MAX + 1];
	char kind[EXL3_EVENT_KIND_MAX]; /* one word: started, ready, died, hang, given-up, ... */
	char text[EXL3_EVENT_TEXT_MAX]; /* for people; printable */
};

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

/* As one line of text, and back. @text: EXL3_EVENT_LINE_MAX bytes. -EINVAL: not such a line. */
#define EXL3_EVENT_LINE_MAX (EXL3_EVENT_TEXT_MAX + 128u)
void exl3_event_format(const struct exl3_event *event, char *text);
int exl3_event_parse(const char *text, struct exl3_event *ret);

#endif
