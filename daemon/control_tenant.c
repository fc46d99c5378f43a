/* SPDX-License-Identifier: Apache-2.0 */
/* control_tenant.c - the verb that lists tenants: their limits, what they hold and what they have done. */
#include "daemon/control.h"

static void count_requests(const struct exl3_metrics_tenant *m, Exl3__Tenant *t)
{
	for (unsigned op = 0; op < EXL3_METRIC_OPS; op++) {
		for (unsigned code = 0; code < EXL3_METRIC_CODES; code++) {
			t->requests += m->requests[op][code];
			t->errors += code ? m->requests[op][code] : 0;
		}
	}
}

static Exl3__Tenant *message(const struct exl3_tenant *tenant)
{
	Exl3__Tenant *t = exl3_call_alloc(sizeof(*t));
	const struct exl3_metrics_tenant *m = tenant->metrics;

	if (!t)
		return NULL;
	exl3__tenant__init(t);
	t->name = tenant->conf.name;
	t->retired = tenant->retired;
	t->weight = (uint32_t)tenant->conf.weight;
	t->priority = (uint32_t)tenant->conf.priority;
	t->models = tenant->conf.models.text ? tenant->conf.models.text : (char *)"";
	t->clients = tenant->clients;
	t->clients_max = tenant->conf.clients;
	t->channels = tenant->channels;
	t->channels_max = tenant->conf.channels;
	t->rows_in_flight = tenant->rows;
	t->rows_max = tenant->conf.rows;
	t->bytes = tenant->bytes;
	t->bytes_max = tenant->conf.bytes;
	t->import_bytes = tenant->by_kind[EXL3_BYTES_IMPORT];
	t->requests_per_second = tenant->conf.per_second;
	t->queued = tenant->requests;
	if (m) {
		count_requests(m, t);
		t->rows = m->rows;
		t->device_ns = m->device_ns;
		t->delayed = m->delayed_rate + m->delayed_rows;
	}
	return t;
}

int exl3_verb_list_tenants(struct exl3_call *c)
{
	const struct exl3_policy *policy = &c->w->policy;
	Exl3__Tenants *reply = exl3_call_alloc(sizeof(*reply));

	if (!reply)
		return exl3_call_nomem(c);
	exl3__tenants__init(reply);
	reply->tenants = exl3_call_alloc(policy->nr * sizeof(reply->tenants[0]));
	for (const struct exl3_tenant *t = policy->list; t; t = t->next) {
		Exl3__Tenant *m;

		if (t != c->peer->tenant && !exl3_peer_admin(c->peer))
			continue;
		m = message(t);
		if (!m || !reply->tenants)
			return exl3_call_nomem(c);
		reply->tenants[reply->n_tenants++] = m;
	}
	c->reply->body_case = EXL3__REPLY__BODY_TENANTS;
	c->reply->tenants = reply;
	return 0;
}
