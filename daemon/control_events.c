/* SPDX-License-Identifier: Apache-2.0 */
/* control_events.c - the verb that lists what happened to the fault domains. */
#include "daemon/control.h"

#include <string.h>

static Exl3__Event *message(const struct exl3_event *e)
{
	Exl3__Event *m = exl3_call_alloc(sizeof(*m));

	if (!m)
		return NULL;
	exl3__event__init(m);
	m->id = e->id;
	m->time_ms = e->time_ms;
	m->generation = e->generation;
	m->domain = (char *)(uintptr_t)e->domain;
	m->kind = (char *)(uintptr_t)e->kind;
	m->text = (char *)(uintptr_t)e->text;
	return m;
}

int exl3_verb_list_events(struct exl3_call *c)
{
	const struct exl3_events *events = &c->w->events;
	Exl3__Events *reply = exl3_call_alloc(sizeof(*reply));
	const struct exl3_event *e;
	size_t bytes = 0;

	if (!reply)
		return exl3_call_nomem(c);
	exl3__events__init(reply);
	reply->events = exl3_call_alloc(EXL3_EVENTS_MAX * sizeof(reply->events[0]));
	if (!reply->events)
		return exl3_call_nomem(c);
	for (e = exl3_events_from(events, c->req->list_events->start); e;
	     e = exl3_events_from(events, e->id + 1)) {
		Exl3__Event *m;

		/* What others did to theirs is not everybody's business. */
		if (!exl3_peer_admin(c->peer) && strcmp(e->domain, c->w->domain) != 0)
			continue;
		m = message(e);
		if (!m)
			return exl3_call_nomem(c);
		bytes += exl3__event__get_packed_size(m) + 8;
		if (bytes > EXL3_PAGE_BYTES) {
			reply->next = e->id;
			break;
		}
		reply->events[reply->n_events++] = m;
	}
	c->reply->body_case = EXL3__REPLY__BODY_EVENTS;
	c->reply->events = reply;
	return 0;
}
