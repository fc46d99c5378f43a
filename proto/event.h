/* SPDX-License-Identifier: Apache-2.0 */
/* event.h - something that happened to a fault domain, as one line of text between processes. */
#ifndef EXL3_PROTO_EVENT_H
#define EXL3_PROTO_EVENT_H

#include "shm/exl3_abi.h"

#include <stdint.h>

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

/* As one line of text, and back. @text: EXL3_EVENT_LINE_MAX bytes. -EINVAL: not such a line. */
#define EXL3_EVENT_LINE_MAX (EXL3_EVENT_TEXT_MAX + 128u)
void exl3_event_format(const struct exl3_event *event, char *text);
int exl3_event_parse(const char *text, struct exl3_event *ret);

#endif
