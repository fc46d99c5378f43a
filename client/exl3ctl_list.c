/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_list.c - verbs that show: status, models, modules, tensors, ps. */
#include "client/exl3ctl.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *state_text(Exl3__ModelState state)
{
	return ctl_enum(&exl3__model_state__descriptor, (int)state);
}

/* ---- status ---- */

int ctl_get_status(struct ctl *c, Exl3__Reply **ret)
{
	Exl3__Status body = EXL3__STATUS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	req.body_case = EXL3__REQUEST__BODY_STATUS;
	req.status = &body;
	return ctl_call(c, &req, EXL3__REPLY__BODY_STATUS, EXL3_CALL_TIMEOUT_NS, ret);
}

static void print_model(const Exl3__Model *m)
{
	printf("  %-24s %-9s", ctl_safe(m->name), state_text(m->state));
	if (m->state == EXL3__MODEL_STATE__MODEL_LOADING)
		printf(" %s of %s", ctl_bytes(m->bytes_loaded), ctl_bytes(m->bytes_total));
	else
		printf(" %10s weights %10s tensors %4u modules, open in %u",
		       ctl_bytes(m->weight_bytes), ctl_bytes(m->tensor_bytes), m->nr_modules,
		       m->clients);
	if (m->device_tensor_bytes)
		printf(" (%s more on the device)", ctl_bytes(m->device_tensor_bytes));
	if (m->mappers)
		printf(", mapped by %u", m->mappers);
	printf("  %s  %s\n", ctl_safe(m->device), ctl_safe(m->path));
	if (m->error && *m->error)
		printf("    %s\n", ctl_safe(m->error));
	for (size_t i = 0; i < m->n_skipped; i++)
		printf("    left out: %s\n", ctl_safe(m->skipped[i]));
}

static void print_uptime(uint64_t ms)
{
	uint64_t s = ms / 1000;

	if (s >= 86400)
		printf("%llud ", (unsigned long long)(s / 86400));
	printf("%llu:%02llu:%02llu", (unsigned long long)(s / 3600 % 24),
	       (unsigned long long)(s / 60 % 60), (unsigned long long)(s % 60));
}

static void print_device(const Exl3__Device *d)
{
	uint64_t held = d->weight_bytes + d->tensor_bytes;
	uint64_t rest = d->slab_bytes > held ? d->slab_bytes - held : 0;

	printf("  device %s: %s (%s), %u thread%s, %u model%s\n", ctl_safe(d->name),
	       ctl_safe(d->device_name), ctl_safe(d->isa), d->threads, d->threads == 1 ? "" : "s",
	       d->models, d->models == 1 ? "" : "s");
	printf("    memory %s free of %s; weights %s, padding and tables %s (%.2f %%), tensors %s\n",
	       ctl_bytes(d->memory_free), ctl_bytes(d->memory_total), ctl_bytes(d->weight_bytes),
	       ctl_bytes(rest), held ? 100.0 * (double)rest / (double)held : 0.0, ctl_bytes(d->tensor_bytes));
	printf("    arenas %s, workspaces %s\n", ctl_bytes(d->arena_bytes), ctl_bytes(d->workspace_bytes));
	if (d->device_arena_bytes || d->imports)
		printf("    arenas in its memory %s; of clients %s in %u piece%s\n",
		       ctl_bytes(d->device_arena_bytes), ctl_bytes(d->import_bytes), d->imports,
		       d->imports == 1 ? "" : "s");
}

static void print_merging(const Exl3__Merging *m)
{
	if (!m || !m->launches) /* an older daemon says nothing */
		return;
	printf("  launches %llu with %.2f requests each, %llu of them together; trains %llu, late "
	       "%llu\n",
	       (unsigned long long)m->launches, (double)m->requests / (double)m->launches,
	       (unsigned long long)m->merged, (unsigned long long)m->trains,
	       (unsigned long long)m->late);
}

static void print_status(const Exl3__StatusReply *s)
{
	printf("exl3-daemon %s, %s, up ", ctl_safe(s->daemon_version), ctl_safe(s->state));
	print_uptime(s->uptime_ms);
	printf("\n  supervisor %d, worker %d, node %d, %u threads\n", s->supervisor_pid,
	       s->worker_pid, s->numa_node, s->threads);
	printf("  domain %s, generation %u%s%s\n", ctl_safe(s->domain), s->generation,
	       *s->mps_pipe ? ", MPS server in " : "", ctl_safe(s->mps_pipe));
	printf("  backend %s: %s (%s)\n", ctl_safe(s->backend), ctl_safe(s->device_name),
	       ctl_safe(s->isa));
	for (size_t i = 0; i < s->n_backends; i++)
		printf("    %s\n", ctl_safe(s->backends[i]));
	for (size_t i = 0; i < s->n_devices; i++)
		print_device(s->devices[i]);
	printf("  clients %u, channels %u, requests %llu, failed %llu\n", s->clients, s->channels,
	       (unsigned long long)s->requests, (unsigned long long)s->errors);
	print_merging(s->merging);
	if (s->n_models)
		printf("models\n");
	for (size_t i = 0; i < s->n_models; i++)
		print_model(s->models[i]);
}

int ctl_status(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e = ctl_get_status(c, &reply);

	if (e != CTL_OK)
		return e;
	if (c->json)
		return ctl_print_json(&reply->status->base, NULL);
	print_status(reply->status);
	return CTL_OK;
}

/* ---- lists that come in pages ---- */

/* Fills in the request for a page, finds list and next in the reply, prints one row. */
struct list {
	const char *name; /* JSON key */
	Exl3__Reply__BodyCase want;
	void (*ask)(struct ctl *c, Exl3__Request *req, uint32_t start);
	size_t (*page)(const Exl3__Reply *reply, const ProtobufCMessage *const **items,
		       uint32_t *next);
	void (*header)(void);
	void (*row)(const ProtobufCMessage *item);
};

static int show_list(struct ctl *c, const struct list *l)
{
	cJSON *array = c->json ? cJSON_CreateArray() : NULL, *json;
	uint32_t start = 0, next;

	do {
		exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
		const ProtobufCMessage *const *items;
		Exl3__Request req = EXL3__REQUEST__INIT;
		size_t n;
		int e;

		l->ask(c, &req, start);
		e = ctl_call(c, &req, l->want, EXL3_CALL_TIMEOUT_NS, &reply);
		if (e != CTL_OK) {
			cJSON_Delete(array);
			return e;
		}
		if (!start && !c->json && l->header)
			l->header();
		n = l->page(reply, &items, &next);
		for (size_t i = 0; i < n; i++) {
			if (array)
				cJSON_AddItemToArray(array, ctl_json(items[i], NULL));
			else
				l->row(items[i]);
		}
		if (next && next <= start) {
			cJSON_Delete(array);
			return ctl_error(CTL_REFUSED, "the daemon's pages do not end");
		}
		start = next;
	} while (next);
	if (!array)
		return CTL_OK;
	json = cJSON_CreateObject();
	cJSON_AddItemToObject(json, l->name, array);
	return ctl_print_cjson(json);
}

/* ---- models ---- */

static void ask_models(struct ctl *c, Exl3__Request *req, uint32_t start)
{
	static Exl3__ListModels body;

	(void)c;
	exl3__list_models__init(&body);
	body.start = start;
	req->body_case = EXL3__REQUEST__BODY_LIST_MODELS;
	req->list_models = &body;
}

static size_t page_models(const Exl3__Reply *r, const ProtobufCMessage *const **items,
			  uint32_t *next)
{
	*items = (const ProtobufCMessage *const *)r->models->models;
	*next = r->models->next;
	return r->models->n_models;
}

static void row_model(const ProtobufCMessage *item)
{
	const Exl3__Model *m = (const Exl3__Model *)item;

	print_model(m);
	if (m->fingerprint && *m->fingerprint)
		printf("    %s on %s, fingerprint %s\n",
		       *m->model_type ? ctl_safe(m->model_type) : "unknown type",
		       ctl_safe(m->device), ctl_safe(m->fingerprint));
}

int ctl_models(struct ctl *c)
{
	static const struct list list = {
		"models", EXL3__REPLY__BODY_MODELS, ask_models, page_models, NULL, row_model};

	return show_list(c, &list);
}

/* ---- modules ---- */

static void ask_modules(struct ctl *c, Exl3__Request *req, uint32_t start)
{
	static Exl3__ListModules body;

	exl3__list_modules__init(&body);
	body.model = (char *)(uintptr_t)c->args[0];
	body.start = start;
	req->body_case = EXL3__REQUEST__BODY_LIST_MODULES;
	req->list_modules = &body;
}

static size_t page_modules(const Exl3__Reply *r, const ProtobufCMessage *const **items,
			   uint32_t *next)
{
	*items = (const ProtobufCMessage *const *)r->modules->modules;
	*next = r->modules->next;
	return r->modules->n_modules;
}

static void header_modules(void)
{
	printf("%-6s %7s %7s %-12s %-9s %-8s %10s %-7s %s\n", "KIND", "K", "N", "STORED", "BITS",
	       "CODEBOOK", "BYTES", "DEVICE", "NAME");
}

static void row_module(const ProtobufCMessage *item)
{
	const Exl3__Module *m = (const Exl3__Module *)item;
	const char *codebook = m->n_shards ? ctl_codebook(m->shards[0]->codebook) : "";
	char stored[32] = "";

	for (size_t i = 1; i < m->n_shards; i++)
		if (m->shards[i]->codebook != m->shards[0]->codebook)
			codebook = "mixed";
	if (m->k != m->k_logical || m->n != m->n_logical)
		snprintf(stored, sizeof(stored), "%ux%u", m->k, m->n);
	printf("%-6s %7u %7u %-12s %-9s %-8s %10s %-7s %s",
	       ctl_enum(&exl3__module_kind__descriptor, (int)m->kind), m->k_logical, m->n_logical,
	       stored, ctl_rate(m->rate2_min, m->rate2_max), codebook, ctl_bytes(m->bytes),
	       ctl_safe(m->device), ctl_safe(m->name));
	if (m->experts > 1)
		printf(" (%u experts, intermediate %u)", m->experts, m->intermediate);
	else if (m->n_shards > 1)
		printf(" (%zu matrices)", m->n_shards);
	printf("\n");
}

int ctl_modules(struct ctl *c)
{
	static const struct list list = {"modules",      EXL3__REPLY__BODY_MODULES,
					 ask_modules,    page_modules,
					 header_modules, row_module};

	return show_list(c, &list);
}

/* ---- tensors ---- */

static void ask_tensors(struct ctl *c, Exl3__Request *req, uint32_t start)
{
	static Exl3__ListTensors body;

	exl3__list_tensors__init(&body);
	body.model = (char *)(uintptr_t)c->args[0];
	body.start = start;
	req->body_case = EXL3__REQUEST__BODY_LIST_TENSORS;
	req->list_tensors = &body;
}

static size_t page_tensors(const Exl3__Reply *r, const ProtobufCMessage *const **items,
			   uint32_t *next)
{
	*items = (const ProtobufCMessage *const *)r->tensors->tensors;
	*next = r->tensors->next;
	return r->tensors->n_tensors;
}

static void row_tensor(const ProtobufCMessage *item)
{
	const Exl3__Tensor *t = (const Exl3__Tensor *)item;
	char shape[128] = "";
	size_t n = 0;

	for (size_t i = 0; i < t->n_shape && n + 24 < sizeof(shape); i++)
		n += (size_t)snprintf(shape + n, sizeof(shape) - n, i ? ", %llu" : "%llu",
				      (unsigned long long)t->shape[i]);
	printf("%-5s %-20s %10s  %s\n", ctl_safe(t->dtype), shape, ctl_bytes(t->bytes),
	       ctl_safe(t->name));
}

int ctl_tensors(struct ctl *c)
{
	static const struct list list = {
		"tensors", EXL3__REPLY__BODY_TENSORS, ask_tensors, page_tensors, NULL, row_tensor};

	return show_list(c, &list);
}

/* ---- ps ---- */

int ctl_get_ps(struct ctl *c, Exl3__Reply **ret)
{
	Exl3__Ps body = EXL3__PS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	req.body_case = EXL3__REQUEST__BODY_PS;
	req.ps = &body;
	return ctl_call(c, &req, EXL3__REPLY__BODY_PS, EXL3_CALL_TIMEOUT_NS, ret);
}

int ctl_ps(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e = ctl_get_ps(c, &reply);

	if (e != CTL_OK)
		return e;
	if (c->json)
		return ctl_print_json(&reply->ps->base, NULL);
	printf("%8s %6s %-12s %4s %7s %10s %12s %8s %12s %-12s %-9s %s\n", "PID", "UID", "TENANT", "CHAN",
	       "MODULES", "ARENAS", "REQUESTS", "ERRORS", "ROWS", "DEVICES", "MODE", "NAME");
	for (size_t i = 0; i < reply->ps->n_clients; i++) {
		const Exl3__PsClient *p = reply->ps->clients[i];

		char mode[24];

		snprintf(mode, sizeof(mode), p->mapped || p->plans ? "%s:%u" : "%s", ctl_safe(p->mode),
			 p->mapped ? p->mapped : p->plans);
		printf("%8d %6u %-12s %4u %7u %10s %12llu %8llu %12llu %-12s %-9s %s", p->pid, p->uid,
		       ctl_safe(p->tenant), p->channels, p->modules, ctl_bytes(p->arena_bytes),
		       (unsigned long long)p->requests, (unsigned long long)p->errors,
		       (unsigned long long)p->rows, ctl_safe(p->devices), mode, ctl_safe(p->name));
		if (p->revoked)
			printf(" (%u to be let go)", p->revoked);
		if (p->mode_note && *p->mode_note)
			printf(" (not mapped: %s)", ctl_safe(p->mode_note));
		printf("\n");
	}
	return CTL_OK;
}
