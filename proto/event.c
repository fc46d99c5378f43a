/* SPDX-License-Identifier: Apache-2.0 */
/* event.c - something that happened to a fault domain, as one line of text between processes. */
#include "proto/event.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

void exl3_event_format(const struct exl3_event *e, char *text)
{
	snprintf(text, EXL3_EVENT_LINE_MAX, "%" PRIu64 " %" PRIu64 " %" PRIu32 " %s %s %s", e->id,
		 e->time_ms, e->generation, e->domain, e->kind, e->text);
}

int exl3_event_parse(const char *text, struct exl3_event *ret)
{
	struct exl3_event e = {0};
	int at = 0;

	_Static_assert(EXL3_DOMAIN_NAME_MAX == 32 && EXL3_EVENT_KIND_MAX == 16,
		       "the widths of the format below");
	if (sscanf(text, "%" SCNu64 " %" SCNu64 " %" SCNu32 " %32[^ ] %15[^ ]%n", &e.id, &e.time_ms,
		   &e.generation, e.domain, e.kind, &at) != 5 ||
	    text[at] != ' ')
		return -EINVAL;
	snprintf(e.text, sizeof(e.text), "%s", text + at + 1);
	*ret = e;
	return 0;
}
