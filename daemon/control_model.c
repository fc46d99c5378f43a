/* SPDX-License-Identifier: Apache-2.0 */
/* control_model.c - verbs that look at models: lists, modules and tensors by name. */
#include "daemon/control.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define SKIPPED_LISTED 64u /* reasons in a list of models; all of them are in the log */
#define TRACE_LINES    256u

/* ---- models ---- */

static int wire_state(const struct exl3_registered *reg)
{
	switch (reg->state) {
	case EXL3_MODEL_READY:
		return EXL3__MODEL_STATE__MODEL_READY;
	case EXL3_MODEL_FAILED:
		return EXL3__MODEL_STATE__MODEL_FAILED;
	case EXL3_MODEL_UNLOADING:
		return EXL3__MODEL_STATE__MODEL_UNLOADING;
	default:
		return EXL3__MODEL_STATE__MODEL_LOADING;
	}
}

/* What only a loaded model has; its tables do not change any more. */
static int fill_ready(const struct exl3_model *model, uint32_t skipped_max, Exl3__Model *m)
{
	uint32_t nr = model->nr_skipped < skipped_max ? model->nr_skipped : skipped_max;

	m->model_type = exl3_call_strdup(model->model_type);
	m->fingerprint = exl3_call_strdup(model->fingerprint);
	m->weight_bytes = model->weight_bytes;
	m->tensor_bytes = model->tensor_bytes;
	m->device_tensor_bytes = model->tensor_slab ? model->tensor_slab->bytes : 0;
	m->overhead_bytes = model->overhead_bytes;
	m->nr_modules = model->nr_modules;
	m->nr_tensors = model->nr_tensors;
	m->skipped = exl3_call_alloc((nr + 1) * sizeof(char *));
	if (!m->model_type || !m->fingerprint || !m->skipped)
		return -ENOMEM;
	for (uint32_t i = 0; i < nr; i++)
		m->skipped[m->n_skipped++] = model->skipped[i];
	if (model->nr_skipped > nr) {
		char *more = exl3_call_alloc(64);

		if (!more)
			return -ENOMEM;
		snprintf(more, 64, "and %u more", model->nr_skipped - nr);
		m->skipped[m->n_skipped++] = more;
	}
	return 0;
}

int exl3_model_message(const struct exl3_registered *reg, uint32_t skipped_max, Exl3__Model **ret)
{
	const struct exl3_model *model = reg->model;
	Exl3__Model *m = exl3_call_alloc(sizeof(*m));

	if (!m)
		return -ENOMEM;
	exl3__model__init(m);
	m->name = reg->name;
	m->path = reg->path;
	m->state = wire_state(reg);
	m->device = (char *)(uintptr_t)reg->device->name;
	m->clients = reg->opened;
	m->mappers = reg->mappers;
	if (reg->metrics) {
		m->requests = reg->metrics->requests;
		m->rows = reg->metrics->rows;
	}
	*ret = m;
	if (!model)
		return 0; /* its memory is being freed at this moment */
	m->bytes_total = atomic_load(&model->bytes_total);
	m->bytes_loaded = atomic_load(&model->bytes_loaded);
	if (reg->state == EXL3_MODEL_FAILED)
		m->error = (char *)(uintptr_t)model->error.text;
	return reg->state == EXL3_MODEL_READY ? fill_ready(model, skipped_max, m) : 0;
}

/* A page of entries: stops before it would not fit into a packet. */
struct page {
	size_t bytes, n, room;
	ProtobufCMessage **entries;
};

#define PAGE_ENTRIES 2048u

static int page_init(struct page *page)
{
	*page = (struct page){.room = EXL3_PAGE_BYTES};
	page->entries = exl3_call_alloc(PAGE_ENTRIES * sizeof(page->entries[0]));
	return page->entries ? 0 : -ENOMEM;
}

static bool page_add(struct page *page, void *message)
{
	size_t bytes = protobuf_c_message_get_packed_size(message) + 8; /* tag and length */

	/* A lone entry that is too long makes a page of its own; sending it says so. */
	if (page->n == PAGE_ENTRIES || (page->n && bytes > page->room - page->bytes))
		return false;
	page->bytes = bytes > page->room - page->bytes ? page->room : page->bytes + bytes;
	page->entries[page->n++] = message;
	return true;
}

static int models_body(struct exl3_call *c, struct page *page, uint32_t next)
{
	Exl3__Models *models = exl3_call_alloc(sizeof(*models));

	if (!models)
		return exl3_call_nomem(c);
	exl3__models__init(models);
	models->n_models = page->n;
	models->models = (Exl3__Model **)page->entries;
	models->next = next;
	c->reply->body_case = EXL3__REPLY__BODY_MODELS;
	c->reply->models = models;
	return 0;
}

int exl3_verb_list_models(struct exl3_call *c)
{
	uint32_t start = c->req->list_models->start, i = 0;
	struct page page;
	Exl3__Model *m;

	if (page_init(&page) < 0)
		return exl3_call_nomem(c);
	for (struct exl3_registered *reg = c->w->models.list; reg; reg = reg->next, i++) {
		if (i < start || exl3_peer_check_model(c->peer, reg->name, NULL) < 0)
			continue;
		if (exl3_model_message(reg, SKIPPED_LISTED, &m) < 0)
			return exl3_call_nomem(c);
		if (!page_add(&page, m))
			return models_body(c, &page, i);
	}
	return models_body(c, &page, 0);
}

int exl3_verb_open_model(struct exl3_call *c)
{
	const Exl3__OpenModel *req = c->req->open_model;
	const char *name = req->name;
	struct exl3_registered *reg = exl3_models_find(&c->w->models, name);
	struct exl3_handle h = {.type = EXL3_HANDLE_MODEL, .model = reg};
	struct page page;
	Exl3__Model *m;
	int rc;

	if (!reg)
		return exl3_errf(&c->err, -ENOENT,
				 "there is no model '%.100s': see 'exl3ctl models'", name);
	rc = exl3_peer_check_model(c->peer, reg->name, &c->err);
	if (rc == 0)
		rc = exl3_models_usable(reg, &c->err);
	if (rc < 0)
		return rc;
	if (page_init(&page) < 0 || exl3_model_message(reg, SKIPPED_LISTED, &m) < 0)
		return exl3_call_nomem(c);
	rc = exl3_handle_add_as(c->peer, &h, req->handle, &m->handle, &c->err);
	if (rc < 0)
		return rc;
	page_add(&page, m);
	return models_body(c, &page, 0);
}

int exl3_verb_close_model(struct exl3_call *c)
{
	struct exl3_handle *h = exl3_handle_find(c->peer, c->req->close_model->handle);

	if (!h || h->type != EXL3_HANDLE_MODEL)
		return exl3_errf(&c->err, -ENOENT, "no open model has handle %u",
				 c->req->close_model->handle);
	exl3_handle_close(c->peer, h);
	return 0;
}

/* ---- modules ---- */

static int fill_shard(const struct exl3_matrix *matrix, const char *name, Exl3__Shard **ret)
{
	Exl3__Shard *s = exl3_call_alloc(sizeof(*s));

	if (!s)
		return -ENOMEM;
	exl3__shard__init(s);
	s->name = (char *)(uintptr_t)(name ? name : "");
	s->k = matrix->k;
	s->n = matrix->n;
	s->k_logical = matrix->k_log;
	s->n_logical = matrix->n_log;
	s->rate2 = matrix->rate2;
	s->codebook = matrix->codebook;
	s->bias = matrix->bias != NULL;
	*ret = s;
	return 0;
}

/* Experts hold pointers into the model's table of matrices, which has their names. */
static const char *matrix_name(const struct exl3_matrix *matrix)
{
	return ((const struct exl3_named_matrix *)((const char *)matrix -
						   offsetof(struct exl3_named_matrix, m)))
		->name;
}

static int fill_shards(const struct exl3_module_desc *desc, Exl3__Module *m)
{
	const struct exl3_matrix *expert[3];
	uint32_t nr = 0;

	if (desc->kind == EXL3_MOD_LINEAR) {
		m->shards = exl3_call_alloc(desc->nr_shards * sizeof(m->shards[0]));
		if (!m->shards)
			return -ENOMEM;
		for (uint32_t i = 0; i < desc->nr_shards; i++) {
			if (fill_shard(desc->shards[i], desc->shard_names[i], &m->shards[i]) < 0)
				return -ENOMEM;
		}
		m->n_shards = desc->nr_shards;
		return 0;
	}
	if (!desc->nr_experts)
		return 0;
	if (desc->experts[0].gate)
		expert[nr++] = desc->experts[0].gate;
	expert[nr++] = desc->experts[0].up;
	expert[nr++] = desc->experts[0].down;
	m->shards = exl3_call_alloc(nr * sizeof(m->shards[0]));
	for (uint32_t i = 0; i < nr; i++) {
		if (!m->shards || fill_shard(expert[i], matrix_name(expert[i]), &m->shards[i]) < 0)
			return -ENOMEM;
	}
	m->n_shards = nr;
	return 0;
}

static int module_message(const struct exl3_registered *reg, const struct exl3_module_desc *desc,
			  Exl3__Module **ret)
{
	Exl3__Module *m = exl3_call_alloc(sizeof(*m));

	if (!m)
		return -ENOMEM;
	exl3__module__init(m);
	m->name = desc->name;
	m->kind = (Exl3__ModuleKind)desc->kind; /* same values */
	m->k = desc->k;
	m->n = desc->n;
	m->k_logical = desc->k_log;
	m->n_logical = desc->n_log;
	m->experts = desc->nr_experts;
	m->intermediate = desc->intermediate;
	m->act = desc->act;
	m->limit = desc->limit;
	m->routed_scale = desc->routed_scale;
	m->bytes = desc->bytes;
	m->rate2_min = desc->rate2_min;
	m->rate2_max = desc->rate2_max;
	m->fingerprint = reg->model->fingerprint;
	m->device = (char *)(uintptr_t)reg->device->name;
	*ret = m;
	return fill_shards(desc, m);
}

_Static_assert((int)EXL3_MOD_LINEAR == (int)EXL3__MODULE_KIND__MODULE_LINEAR &&
		       (int)EXL3_MOD_MOE == (int)EXL3__MODULE_KIND__MODULE_MOE &&
		       (int)EXL3_MOD_MLP == (int)EXL3__MODULE_KIND__MODULE_MLP,
	       "kinds have the same values on the wire");

static int modules_body(struct exl3_call *c, struct page *page, uint32_t next)
{
	Exl3__Modules *modules = exl3_call_alloc(sizeof(*modules));

	if (!modules)
		return exl3_call_nomem(c);
	exl3__modules__init(modules);
	modules->n_modules = page->n;
	modules->modules = (Exl3__Module **)page->entries;
	modules->next = next;
	c->reply->body_case = EXL3__REPLY__BODY_MODULES;
	c->reply->modules = modules;
	return 0;
}

/* A model by name that can be looked into. */
int exl3_call_model(struct exl3_call *c, const char *name, struct exl3_registered **ret)
{
	struct exl3_registered *reg = exl3_models_find(&c->w->models, name);

	if (!reg)
		return exl3_errf(&c->err, -ENOENT,
				 "there is no model '%.100s': see 'exl3ctl models'", name);
	*ret = reg;
	if (exl3_peer_check_model(c->peer, reg->name, &c->err) < 0)
		return c->err.code;
	return exl3_models_usable(reg, &c->err);
}

static int usable_by_handle(struct exl3_call *c, uint32_t handle, struct exl3_registered **ret)
{
	struct exl3_handle *h = exl3_handle_find(c->peer, handle);

	if (!h || h->type != EXL3_HANDLE_MODEL)
		return exl3_errf(&c->err, -ENOENT, "no open model has handle %u", handle);
	*ret = h->model;
	return exl3_models_usable(h->model, &c->err);
}

int exl3_verb_list_modules(struct exl3_call *c)
{
	const Exl3__ListModules *req = c->req->list_modules;
	struct exl3_registered *reg = NULL;
	struct page page;
	Exl3__Module *m;
	int rc = exl3_call_model(c, req->model, &reg);

	if (rc < 0)
		return rc;
	if (page_init(&page) < 0)
		return exl3_call_nomem(c);
	for (uint32_t i = req->start; i < reg->model->nr_modules; i++) {
		const struct exl3_module_desc *desc = &reg->model->modules[i];

		if (req->kind != EXL3__MODULE_KIND__MODULE_ANY && (int)req->kind != (int)desc->kind)
			continue;
		if (module_message(reg, desc, &m) < 0)
			return exl3_call_nomem(c);
		if (!page_add(&page, m))
			return modules_body(c, &page, i);
	}
	return modules_body(c, &page, 0);
}

int exl3_verb_open_module(struct exl3_call *c)
{
	const Exl3__OpenModule *req = c->req->open_module;
	struct exl3_handle h = {.type = EXL3_HANDLE_MODULE};
	struct page page;
	Exl3__Module *m;
	int rc = usable_by_handle(c, req->model, &h.model);

	if (rc < 0)
		return rc;
	if ((int)req->kind < 0 || (int)req->kind > (int)EXL3_MOD_MLP)
		return exl3_errf(&c->err, -EINVAL, "there is no module kind %d", (int)req->kind);
	rc = exl3_model_find(h.model->model, req->name, (enum exl3_module_kind)req->kind, &h.desc,
			     NULL, NULL, &c->err);
	if (rc < 0)
		return rc;
	if (page_init(&page) < 0 || module_message(h.model, h.desc, &m) < 0)
		return exl3_call_nomem(c);
	rc = exl3_handle_add_as(c->peer, &h, req->handle, &m->handle, &c->err);
	if (rc < 0)
		return rc;
	page_add(&page, m);
	return modules_body(c, &page, 0);
}

/* Closes an MLA geometry too. */
int exl3_verb_close_module(struct exl3_call *c)
{
	struct exl3_handle *h = exl3_handle_find(c->peer, c->req->close_module->handle);

	if (!h || h->type == EXL3_HANDLE_MODEL || h->type == EXL3_HANDLE_PLAN)
		return exl3_errf(&c->err, -ENOENT, "no open module or geometry has handle %u",
				 c->req->close_module->handle);
	exl3_handle_close(c->peer, h);
	return 0;
}

struct trace {
	char **lines;
	size_t n, bytes;
};

static void trace_line(void *arg, const char *line)
{
	struct trace *t = arg;
	char *copy;

	if (t->n == TRACE_LINES || t->bytes + strlen(line) > EXL3_PAGE_BYTES / 2)
		return;
	copy = exl3_call_strdup(line);
	if (!copy)
		return;
	t->lines[t->n++] = copy;
	t->bytes += strlen(line) + 8;
}

int exl3_verb_resolve(struct exl3_call *c)
{
	const Exl3__Resolve *req = c->req->resolve;
	Exl3__ResolveReply *reply = exl3_call_alloc(sizeof(*reply));
	struct trace trace = {.lines = exl3_call_alloc(TRACE_LINES * sizeof(char *))};
	const struct exl3_module_desc *desc;
	struct exl3_registered *reg = NULL;
	int rc = exl3_call_model(c, req->model, &reg);

	if (rc < 0)
		return rc;
	if (!reply || !trace.lines)
		return exl3_call_nomem(c);
	rc = exl3_model_find(reg->model, req->name, EXL3_MOD_ANY, &desc, trace_line, &trace,
			     &c->err);
	if (rc < 0)
		return rc;
	exl3__resolve_reply__init(reply);
	reply->n_lines = trace.n;
	reply->lines = trace.lines;
	c->reply->body_case = EXL3__REPLY__BODY_RESOLVE;
	c->reply->resolve = reply;
	return 0;
}

/* ---- tensors ---- */

static int tensor_message(const struct exl3_tensor_desc *desc, Exl3__Tensor **ret)
{
	Exl3__Tensor *t = exl3_call_alloc(sizeof(*t));

	if (!t)
		return -ENOMEM;
	exl3__tensor__init(t);
	t->name = desc->name;
	t->dtype = (char *)(uintptr_t)desc->dtype;
	t->n_shape = desc->nr_dims;
	t->shape = (uint64_t *)(uintptr_t)desc->shape;
	t->bytes = desc->bytes;
	t->offset = desc->offset;
	*ret = t;
	return 0;
}

static int tensors_body(struct exl3_call *c, struct page *page, uint32_t next)
{
	Exl3__Tensors *tensors = exl3_call_alloc(sizeof(*tensors));

	if (!tensors)
		return exl3_call_nomem(c);
	exl3__tensors__init(tensors);
	tensors->n_tensors = page->n;
	tensors->tensors = (Exl3__Tensor **)page->entries;
	tensors->next = next;
	c->reply->body_case = EXL3__REPLY__BODY_TENSORS;
	c->reply->tensors = tensors;
	return 0;
}

int exl3_verb_list_tensors(struct exl3_call *c)
{
	struct exl3_registered *reg = NULL;
	struct page page;
	Exl3__Tensor *t;
	int rc = exl3_call_model(c, c->req->list_tensors->model, &reg);

	if (rc < 0)
		return rc;
	if (page_init(&page) < 0)
		return exl3_call_nomem(c);
	for (uint32_t i = c->req->list_tensors->start; i < reg->model->nr_tensors; i++) {
		if (tensor_message(&reg->model->tensors[i], &t) < 0)
			return exl3_call_nomem(c);
		if (!page_add(&page, t))
			return tensors_body(c, &page, i);
	}
	return tensors_body(c, &page, 0);
}

int exl3_verb_open_tensor(struct exl3_call *c)
{
	const char *name = c->req->open_tensor->name;
	const struct exl3_tensor_desc *desc;
	struct exl3_registered *reg = NULL;
	struct page page;
	struct stat st;
	Exl3__Tensor *t;
	int rc = usable_by_handle(c, c->req->open_tensor->model, &reg);

	if (rc < 0)
		return rc;
	desc = exl3_model_find_tensor(reg->model, name);
	if (!desc)
		return exl3_errf(&c->err, -ENOENT, "model %s has no unquantized tensor '%.200s'",
				 reg->name, name);
	if (page_init(&page) < 0 || tensor_message(desc, &t) < 0)
		return exl3_call_nomem(c);
	t->device = (char *)(uintptr_t)reg->device->name;
	if (c->req->open_tensor->on_device && reg->device->ops->device_arena_new) {
		if (!c->peer->tenant->conf.mapped)
			return exl3_errf(&c->err, -EPERM,
					 "tenant %s may not map device memory of models (mapped): its importers could "
					 "write it",
					 c->peer->tenant->conf.name);
		rc = exl3_model_device_tensor_fd(reg->model, &c->close_fd, &t->file_bytes, &c->err);
		t->where = EXL3__WHERE__WHERE_DEVICE;
	} else {
		rc = exl3_model_tensor_fd(reg->model, &c->close_fd, &c->err);
		if (rc == 0 && fstat(c->close_fd, &st) < 0)
			rc = exl3_errf(&c->err, -errno, "tensor file of model %s: %m", reg->name);
		if (rc == 0)
			t->file_bytes = (uint64_t)st.st_size;
	}
	if (rc < 0)
		return rc;
	c->fds[0] = c->close_fd;
	c->nr_fds = 1;
	page_add(&page, t);
	return tensors_body(c, &page, 0);
}
