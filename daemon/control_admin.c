/* SPDX-License-Identifier: Apache-2.0 */
/* control_admin.c - verbs about the daemon itself: load, unload, drain, status, clients. */
#include "daemon/control.h"

#include "daemon/log.h"
#include "daemon/mapper.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int exl3_verb_load(struct exl3_call *c)
{
	const Exl3__Load *req = c->req->load;
	const struct exl3_device *device;
	struct exl3_registered *reg;
	int rc;

	if (strlen(req->path) >= PATH_MAX)
		return exl3_errf(&c->err, -ENAMETOOLONG, "load: the path is longer than %d bytes",
				 PATH_MAX - 1);
	device = exl3_devices_find(&c->w->devices, req->device, &c->err);
	if (!device)
		return c->err.code;
	rc = exl3_models_load(&c->w->models, req->name, req->path, device, req->device_tensors, false,
			      &reg, &c->err);
	if (rc < 0)
		return rc;
	exl3_worker_keep_model(c->w, reg);
	if (req->wait) {
		c->peer->waiting = EXL3_WAIT_LOADED;
		c->peer->wait_for = reg;
	}
	return 0;
}

int exl3_verb_unload(struct exl3_call *c)
{
	const char *name = c->req->unload->name;
	struct exl3_registered *reg = exl3_models_find(&c->w->models, name), *leaving = NULL;
	bool patient = c->req->unload->patient;

	if (!reg)
		reg = leaving = exl3_models_find_leaving(&c->w->models, name);
	if (!reg)
		return exl3_errf(&c->err, -ENOENT,
				 "there is no model '%.100s': see 'exl3ctl models'", name);
	exl3_info("%s: unloads model %s%s", c->peer->who, reg->name,
		  patient && reg->mappers ? ", when its mappers have gone" : "");
	if (!leaving)
		exl3_worker_tell(c->w, patient ? EXL3_SUP_LEAVING : EXL3_SUP_REMOVED, reg->name);
	else if (!patient)
		exl3_worker_tell(c->w, EXL3_SUP_REVOKE, reg->name);
	if (c->req->unload->wait) {
		c->peer->waiting = EXL3_WAIT_GONE;
		c->peer->wait_for = reg;
	}
	if (patient)
		exl3_models_unload_patiently(reg);
	else
		exl3_models_unload(reg);
	return 0;
}

int exl3_verb_drain(struct exl3_call *c)
{
	exl3_worker_drain(c->w, c->peer->who);
	exl3_worker_tell(c->w, EXL3_SUP_DRAINING, NULL); /* the other domains too */
	return 0;
}

/* ---- status ---- */

#define SKIPPED_SHOWN 16u /* reasons per model of what was left out */

static int fill_backends(const struct exl3_worker *w, Exl3__StatusReply *s)
{
	s->backends = exl3_call_alloc(w->nr_backends * sizeof(s->backends[0]));
	if (!s->backends)
		return -ENOMEM;
	for (uint32_t i = 0; i < w->nr_backends; i++)
		s->backends[s->n_backends++] = (char *)(uintptr_t)w->backends[i];
	return 0;
}

static int fill_device(const struct exl3_worker *w, const struct exl3_device *device,
		       Exl3__Device **ret)
{
	Exl3__Device *d = exl3_call_alloc(sizeof(*d));
	struct exl3_dev_info info;

	if (!d)
		return -ENOMEM;
	exl3__device__init(d);
	memset(&info, 0, sizeof(info));
	device->ops->info(device->dev, &info);
	d->name = (char *)(uintptr_t)device->name;
	d->backend = (char *)(uintptr_t)device->ops->name;
	d->device_name = exl3_call_strdup(info.name);
	d->isa = exl3_call_strdup(info.isa);
	d->uuid = exl3_call_strdup(info.uuid);
	d->memory_total = info.memory_total;
	d->memory_free = info.memory_free;
	d->slab_bytes = info.slab_bytes;
	d->arena_bytes = info.arena_bytes;
	d->device_arena_bytes = info.device_arena_bytes;
	d->import_bytes = info.import_bytes;
	d->imports = info.nr_imports;
	d->workspace_bytes = info.workspace_bytes;
	d->threads = info.threads;
	for (const struct exl3_registered *reg = w->models.list; reg; reg = reg->next) {
		if (reg->device != device || reg->state != EXL3_MODEL_READY)
			continue;
		d->models++;
		d->weight_bytes += reg->model->weight_bytes;
		if (reg->model->tensor_slab)
			d->tensor_bytes += reg->model->tensor_slab->bytes;
	}
	*ret = d;
	return d->device_name && d->isa && d->uuid ? 0 : -ENOMEM;
}

/* All of them, and of the whole: what the first is, and how much all hold. */
static int fill_devices(const struct exl3_worker *w, Exl3__StatusReply *s)
{
	s->devices = exl3_call_alloc(w->devices.nr * sizeof(s->devices[0]));
	if (!s->devices)
		return -ENOMEM;
	for (uint32_t i = 0; i < w->devices.nr; i++) {
		Exl3__Device *d;

		if (fill_device(w, &w->devices.list[i], &d) < 0)
			return -ENOMEM;
		s->devices[s->n_devices++] = d;
		s->arena_bytes += d->arena_bytes;
		s->workspace_bytes += d->workspace_bytes;
		s->threads += d->threads;
	}
	s->backend = s->devices[0]->backend;
	s->device_name = s->devices[0]->device_name;
	s->isa = s->devices[0]->isa;
	s->memory_total = s->devices[0]->memory_total;
	s->memory_free = s->devices[0]->memory_free;
	return 0;
}

static int fill_models(const struct exl3_worker *w, const struct exl3_peer *peer,
		       Exl3__StatusReply *s)
{
	size_t bytes = 0;

	s->models = exl3_call_alloc((w->models.nr + 1) * sizeof(s->models[0]));
	if (!s->models)
		return -ENOMEM;
	for (struct exl3_registered *reg = w->models.list; reg; reg = reg->next) {
		Exl3__Model *m;

		if (exl3_peer_check_model(peer, reg->name, NULL) < 0)
			continue;
		if (exl3_model_message(reg, SKIPPED_SHOWN, &m) < 0)
			return -ENOMEM;
		s->weight_bytes += m->weight_bytes;
		/* The list of models is paged, this one ends early when there are very many. */
		bytes += exl3__model__get_packed_size(m) + 8;
		if (bytes < EXL3_PAGE_BYTES)
			s->models[s->n_models++] = m;
	}
	return 0;
}

static int fill_merging(const struct exl3_worker *w, Exl3__StatusReply *s)
{
	Exl3__Merging *m = exl3_call_alloc(sizeof(*m));
	struct exl3_sched_stats stats;

	if (!m)
		return -ENOMEM;
	exl3__merging__init(m);
	exl3_dispatch_merging(w->dispatch, &stats);
	m->launches = stats.launches;
	m->requests = stats.items;
	m->merged = stats.merged;
	m->trains = stats.trains;
	m->late = stats.late;
	m->joined = stats.joined;
	m->expelled = stats.expelled;
	m->held_us = stats.held_ns / 1000;
	s->merging = m;
	return 0;
}

int exl3_verb_status(struct exl3_call *c)
{
	const struct exl3_worker *w = c->w;
	const struct exl3_counters *counters = exl3_dispatch_counters(w->dispatch);
	Exl3__StatusReply *s = exl3_call_alloc(sizeof(*s));

	if (!s)
		return exl3_call_nomem(c);
	exl3__status_reply__init(s);
	s->daemon_version = (char *)EXL3_DAEMON_VERSION;
	s->state = (char *)(w->draining ? "draining" : w->ready ? "serving" : "starting");
	s->uptime_ms = (exl3_now_ns() - w->start_ns) / 1000000;
	s->numa_node = (int32_t)w->cfg->node;
	s->domain = (char *)(uintptr_t)w->domain;
	s->generation = w->generation;
	s->mps_pipe = exl3_call_mps_pipe(c);
	s->clients = w->nr_peers;
	s->channels = exl3_dispatch_channels(w->dispatch);
	s->requests = counters->requests;
	s->errors = counters->errors;
	s->launches = counters->launches;
	s->launch_ns = counters->launch_ns;
	s->supervisor_pid = (int32_t)w->supervisor;
	s->worker_pid = (int32_t)getpid();
	s->syscalls = exl3_loop_syscalls(w->loop) + exl3_dispatch_syscalls(w->dispatch);
	if (fill_devices(w, s) < 0 || fill_backends(w, s) < 0 ||
	    fill_models(w, c->peer, s) < 0 || fill_merging(w, s) < 0)
		return exl3_call_nomem(c);
	c->reply->body_case = EXL3__REPLY__BODY_STATUS;
	c->reply->status = s;
	return 0;
}

/* ---- clients ---- */

/* Those of its handles, with commas. */
static char *devices_of(const struct exl3_worker *w, const struct exl3_peer *peer)
{
	char text[EXL3_DEVICES_MAX * 34] = "";
	bool uses[EXL3_DEVICES_MAX] = {false};
	size_t n = 0;

	for (uint32_t i = 0; i < peer->nr_handles; i++) {
		const struct exl3_handle *h = &peer->handles[i];

		if (h->type != EXL3_HANDLE_NONE && h->type != EXL3_HANDLE_PLAN)
			uses[h->model ? h->model->device->index : h->device] = true;
	}
	for (uint32_t i = 0; i < w->devices.nr; i++) {
		if (uses[i])
			n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%s", n ? "," : "",
					      w->devices.list[i].name);
	}
	return exl3_call_strdup(text);
}

int exl3_verb_ps(struct exl3_call *c)
{
	Exl3__PsReply *reply = exl3_call_alloc(sizeof(*reply));
	uint64_t now = exl3_now_ns();
	size_t bytes = 0;

	if (!reply)
		return exl3_call_nomem(c);
	exl3__ps_reply__init(reply);
	reply->clients = exl3_call_alloc((c->w->nr_peers + 1) * sizeof(reply->clients[0]));
	for (struct exl3_peer *peer = c->w->peers; peer; peer = peer->next) {
		Exl3__PsClient *p = exl3_call_alloc(sizeof(*p));

		if (!p || !reply->clients)
			return exl3_call_nomem(c);
		exl3__ps_client__init(p);
		p->pid = (int32_t)peer->id.pid;
		p->uid = peer->id.uid;
		p->gid = peer->id.gid;
		p->name = peer->name;
		p->tenant = peer->tenant->conf.name;
		p->channels = peer->nr_channels;
		p->modules = peer->nr_open[EXL3_HANDLE_MODULE];
		p->devices = devices_of(c->w, peer);
		p->arena_bytes = peer->arena_bytes;
		p->requests = peer->counters.requests;
		p->errors = peer->counters.errors;
		p->rows = peer->counters.rows;
		p->mapped = exl3_mapper_count(peer, &p->revoked);
		p->plans = peer->nr_open[EXL3_HANDLE_PLAN];
		p->mode = (char *)(p->mapped ? "mapped" : p->plans ? "plan" : "direct");
		p->mode_note = peer->mode_note;
		p->connected_ms = (now - peer->connected_ns) / 1000000;
		bytes += exl3__ps_client__get_packed_size(p) + 8;
		if (bytes > EXL3_PAGE_BYTES)
			break; /* the newest clients come first: the oldest of very many are left out */
		reply->clients[reply->n_clients++] = p;
	}
	c->reply->body_case = EXL3__REPLY__BODY_PS;
	c->reply->ps = reply;
	return 0;
}
