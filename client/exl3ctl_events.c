/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_events.c - the verb events: what happened to the fault domains, and why. */
#include "client/exl3ctl.h"

#include <cjson/cJSON.h>
#include <time.h>

void ctl_print_event(const Exl3__Event *e)
{
	time_t seconds = (time_t)(e->time_ms / 1000);
	char when[32] = "";
	struct tm tm;

	if (localtime_r(&seconds, &tm))
		strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S", &tm);
	printf("%s.%03u  %s %u  %-8s  %s\n", when, (unsigned)(e->time_ms % 1000),
	       ctl_safe(e->domain), e->generation, ctl_safe(e->kind), ctl_safe(e->text));
}

static int one_page(struct ctl *c, cJSON *array, uint64_t *start)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__ListEvents body = EXL3__LIST_EVENTS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	int e;

	body.start = *start;
	req.body_case = EXL3__REQUEST__BODY_LIST_EVENTS;
	req.list_events = &body;
	e = ctl_call(c, &req, EXL3__REPLY__BODY_EVENTS, EXL3_CALL_TIMEOUT_NS, &reply);
	if (e != CTL_OK)
		return e;
	for (size_t i = 0; i < reply->events->n_events; i++) {
		if (array)
			cJSON_AddItemToArray(array, ctl_json(&reply->events->events[i]->base, NULL));
		else
			ctl_print_event(reply->events->events[i]);
	}
	if (reply->events->next && reply->events->next <= *start)
		return ctl_error(CTL_REFUSED, "the daemon's pages do not end");
	*start = reply->events->next;
	return CTL_OK;
}

int ctl_events(struct ctl *c)
{
	cJSON *array = c->json ? cJSON_CreateArray() : NULL, *json;
	uint64_t start = 0;
	int e;

	/* The supervisor answers also when the caller's domain has no worker. */
	if (exl3_connect_flags(c->socket, "exl3ctl", EXL3_CONNECT_NO_ENV, &c->client) < 0 &&
	    ctl_may_ask_supervisor(c)) {
		e = ctl_events_of_supervisor(c, array);
	} else {
		do {
			e = one_page(c, array, &start);
		} while (e == CTL_OK && start);
	}
	if (e != CTL_OK || !array) {
		cJSON_Delete(array);
		return e;
	}
	json = cJSON_CreateObject();
	cJSON_AddItemToObject(json, "events", array);
	return ctl_print_cjson(json);
}
