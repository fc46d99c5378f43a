/* SPDX-License-Identifier: Apache-2.0 */
/* model.c - models, their modules, and unquantized tensors, by name. */
#include "client/map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* Shards of one module: more is taken for a broken answer. */
#define SHARDS_MAX 64u

static int check_name(const char *what, const char *name)
{
	size_t n = name ? strlen(name) : 0;

	if (!n || n > EXL3_NAME_MAX)
		return exl3_errf(exl3_client_err(), -EINVAL,
				 "%s name of %zu bytes; 1 to %u allowed", what, n, EXL3_NAME_MAX);
	return 0;
}

/* ---- models ---- */

static void model_drop(struct exl3_object *o)
{
	struct exl3_model *m = (struct exl3_model *)o;

	free(m->name);
	free(m->fingerprint);
	free(m->device);
	free(m);
}

static void tell_close_model(struct exl3_client *c, uint32_t handle)
{
	Exl3__CloseModel body = EXL3__CLOSE_MODEL__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	body.handle = handle;
	req.body_case = EXL3__REQUEST__BODY_CLOSE_MODEL;
	req.close_model = &body;
	exl3_client_tell(c, &req, UINT64_MAX);
}

int exl3_model_open(struct exl3_client *c, const char *name, struct exl3_model **ret)
{
	Exl3__OpenModel body = EXL3__OPEN_MODEL__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	struct exl3_model *m;
	int e = check_name("model", name);

	if (e < 0)
		return e;
	body.name = (char *)(uintptr_t)name;
	req.body_case = EXL3__REQUEST__BODY_OPEN_MODEL;
	req.open_model = &body;
	e = exl3_client_call(c, &req, EXL3__REPLY__BODY_MODELS, EXL3_CALL_TIMEOUT_NS, &reply, NULL,
			     0);
	if (e < 0)
		return e;
	if (reply->models->n_models != 1)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "%s: the daemon answered with %zu models", name,
				 reply->models->n_models);
	m = calloc(1, sizeof(*m));
	if (m) {
		m->handle = reply->models->models[0]->handle;
		m->name = strdup(name);
		m->fingerprint = strdup(reply->models->models[0]->fingerprint);
		m->device = strdup(reply->models->models[0]->device);
	}
	if (!m || !m->name || !m->fingerprint || !m->device) {
		if (m)
			model_drop(&m->obj);
		tell_close_model(c, reply->models->models[0]->handle);
		return exl3_errf(exl3_client_err(), -ENOMEM, "%s: out of memory", name);
	}
	exl3_object_add(c, &m->obj, EXL3_OBJECT_MODEL, model_drop);
	exl3_map_model(m);
	*ret = m;
	return 0;
}

struct exl3_model *exl3_model_close(struct exl3_model *m)
{
	if (!m || exl3_client_forked(m->obj.client))
		return NULL;
	exl3_object_remove(&m->obj);
	exl3_map_leave(&m->obj);
	tell_close_model(m->obj.client, m->handle);
	model_drop(&m->obj);
	return NULL;
}

const char *exl3_model_fingerprint(const struct exl3_model *m)
{
	return m->fingerprint;
}

const char *exl3_model_device(const struct exl3_model *m)
{
	return m->device;
}

/* ---- modules ---- */

static void module_drop(struct exl3_object *o)
{
	struct exl3_module *mod = (struct exl3_module *)o;

	free(mod->shards);
	free(mod->model);
	free(mod->fingerprint);
	free(mod->name);
	free(mod->canonical);
	free(mod);
}

static void tell_close_module(struct exl3_client *c, uint32_t handle)
{
	Exl3__CloseModule body = EXL3__CLOSE_MODULE__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	body.handle = handle;
	req.body_case = EXL3__REQUEST__BODY_CLOSE_MODULE;
	req.close_module = &body;
	exl3_client_tell(c, &req, UINT64_MAX);
}

static int module_make(const struct exl3_model *m, const Exl3__Module *in, const char *name,
		       unsigned kind, struct exl3_module **ret)
{
	struct exl3_module *mod;

	if (in->kind < EXL3__MODULE_KIND__MODULE_LINEAR ||
	    in->kind > EXL3__MODULE_KIND__MODULE_MLP || !in->k_logical || !in->n_logical ||
	    in->n_shards > SHARDS_MAX)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "%s: the daemon describes it as kind %d, [%u, %u], %zu shards",
				 in->name, (int)in->kind, in->k_logical, in->n_logical,
				 in->n_shards);
	if (strcmp(in->fingerprint, m->fingerprint))
		return exl3_errf(
			exl3_client_err(), -ESTALE,
			"%s: the model has been loaded anew with other content; open it again",
			m->name);
	mod = calloc(1, sizeof(*mod));
	if (mod)
		mod->shards = calloc(in->n_shards ? in->n_shards : 1, sizeof(*mod->shards));
	if (mod) {
		mod->model = strdup(m->name);
		mod->fingerprint = strdup(m->fingerprint);
		mod->name = strdup(name);
		mod->canonical = strdup(in->name);
	}
	if (!mod || !mod->shards || !mod->model || !mod->fingerprint || !mod->name || !mod->canonical) {
		if (mod)
			module_drop(&mod->obj);
		return exl3_errf(exl3_client_err(), -ENOMEM, "%s: out of memory", in->name);
	}
	mod->handle = in->handle;
	mod->kind = kind;
	mod->info = (struct exl3_module_info){
		.kind = (uint32_t)in->kind,
		.k = in->k,
		.n = in->n,
		.k_logical = in->k_logical,
		.n_logical = in->n_logical,
		.nr_shards = (uint32_t)in->n_shards,
		.nr_experts = in->experts,
		.intermediate = in->intermediate,
		.act = in->act,
		.limit = in->limit,
		.routed_scale = in->routed_scale,
		.bytes = in->bytes,
	};
	for (size_t i = 0; i < in->n_shards; i++)
		mod->shards[i] = (struct exl3_shard_info){
			.k = in->shards[i]->k,
			.n = in->shards[i]->n,
			.k_logical = in->shards[i]->k_logical,
			.n_logical = in->shards[i]->n_logical,
			.rate2 = in->shards[i]->rate2,
			.codebook = in->shards[i]->codebook,
			.bias = in->shards[i]->bias,
		};
	*ret = mod;
	return 0;
}

int exl3_module_open(struct exl3_model *m, const char *name, unsigned kind,
		     struct exl3_module **ret)
{
	Exl3__OpenModule body = EXL3__OPEN_MODULE__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	struct exl3_module *mod = NULL;
	int e = check_name("module", name);

	if (e < 0)
		return e;
	if (kind > EXL3_KIND_MLP)
		return exl3_errf(exl3_client_err(), -EINVAL, "%s: there is no module kind %u", name,
				 kind);
	body.model = m->handle;
	body.name = (char *)(uintptr_t)name;
	body.kind = (Exl3__ModuleKind)kind;
	req.body_case = EXL3__REQUEST__BODY_OPEN_MODULE;
	req.open_module = &body;
	e = exl3_client_call(m->obj.client, &req, EXL3__REPLY__BODY_MODULES, EXL3_CALL_TIMEOUT_NS,
			     &reply, NULL, 0);
	if (e < 0)
		return e;
	if (reply->modules->n_modules != 1)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "%s: the daemon answered with %zu modules", name,
				 reply->modules->n_modules);
	e = module_make(m, reply->modules->modules[0], name, kind, &mod);
	if (e < 0) {
		tell_close_module(m->obj.client, reply->modules->modules[0]->handle);
		return e;
	}
	exl3_object_add(m->obj.client, &mod->obj, EXL3_OBJECT_MODULE, module_drop);
	e = exl3_map_enter(&mod->obj);
	if (e < 0) {
		exl3_module_close(mod);
		return e;
	}
	*ret = mod;
	return 0;
}

struct exl3_module *exl3_module_close(struct exl3_module *mod)
{
	if (!mod || exl3_client_forked(mod->obj.client))
		return NULL;
	exl3_object_remove(&mod->obj);
	exl3_map_leave(&mod->obj);
	tell_close_module(mod->obj.client, mod->handle);
	module_drop(&mod->obj);
	return NULL;
}

void exl3_module_get_info(const struct exl3_module *mod, struct exl3_module_info *ret)
{
	*ret = mod->info;
}

int exl3_module_get_shard(const struct exl3_module *mod, uint32_t i, struct exl3_shard_info *ret)
{
	if (i >= mod->info.nr_shards)
		return exl3_errf(exl3_client_err(), -EINVAL, "shard %u of %u", i,
				 mod->info.nr_shards);
	*ret = mod->shards[i];
	return 0;
}

uint32_t exl3_module_handle(const struct exl3_module *mod)
{
	return mod->handle;
}

/* ---- unquantized tensors ---- */

/* Maps the whole file: the tensors of a model lie in one memfd, and mmap wants page boundaries. */
static int tensor_map(const Exl3__Tensor *in, int fd, struct exl3_tensor *t)
{
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);
	void *map;

	if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) < 0)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "%s: what the daemon sent is not a sealed memfd", in->name);
	if (in->n_shape > 8 || strlen(in->dtype) >= sizeof(t->dtype) || in->offset % 64 ||
	    (uint64_t)st.st_size != in->file_bytes || in->offset > in->file_bytes ||
	    in->bytes > in->file_bytes - in->offset)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "%s: %llu bytes at %llu do not lie in the file of %lld bytes",
				 in->name, (unsigned long long)in->bytes,
				 (unsigned long long)in->offset, (long long)st.st_size);
	map = mmap(NULL, in->file_bytes, PROT_READ, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return exl3_errf(exl3_client_err(), -errno, "%s: cannot map: %m", in->name);
	*t = (struct exl3_tensor){
		.data = (const char *)map + in->offset,
		.bytes = in->bytes,
		.nr_dims = (uint32_t)in->n_shape,
		.fd = fd,
		.offset = in->offset,
		.map = map,
		.map_bytes = in->file_bytes,
	};
	memcpy(t->dtype, in->dtype, strlen(in->dtype));
	for (size_t i = 0; i < in->n_shape; i++)
		t->shape[i] = in->shape[i];
	return 0;
}

static int ask_tensor(struct exl3_model *m, const char *name, bool on_device, Exl3__Reply **reply, int *fd)
{
	Exl3__OpenTensor body = EXL3__OPEN_TENSOR__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	int e = check_name("tensor", name);

	if (e < 0)
		return e;
	body.model = m->handle;
	body.name = (char *)(uintptr_t)name;
	body.on_device = on_device;
	req.body_case = EXL3__REQUEST__BODY_OPEN_TENSOR;
	req.open_tensor = &body;
	e = exl3_client_call(m->obj.client, &req, EXL3__REPLY__BODY_TENSORS, EXL3_CALL_TIMEOUT_NS, reply, fd,
			     1);
	if (e == 0 && (*reply)->tensors->n_tensors != 1)
		e = exl3_errf(exl3_client_err(), -EPROTO, "%s: the daemon answered with %zu tensors", name,
			      (*reply)->tensors->n_tensors);
	return e;
}

int exl3_tensor_open(struct exl3_model *m, const char *name, struct exl3_tensor *ret)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	exl3_auto(exl3_closep) int fd = -1;
	int e = ask_tensor(m, name, false, &reply, &fd);

	if (e == 0)
		e = tensor_map(reply->tensors->tensors[0], fd, ret);
	if (e == 0)
		exl3_take_fd(&fd);
	return e;
}

int exl3_tensor_open_on_device(struct exl3_model *m, const char *name, struct exl3_device_tensor *ret)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	exl3_auto(exl3_closep) int fd = -1;
	const Exl3__Tensor *in;
	int e = ask_tensor(m, name, true, &reply, &fd);

	if (e < 0)
		return e;
	in = reply->tensors->tensors[0];
	if (fd < 0 || in->n_shape > 8 || strlen(in->dtype) >= sizeof(ret->dtype) || in->offset > in->file_bytes ||
	    in->bytes > in->file_bytes - in->offset)
		return exl3_errf(exl3_client_err(), -EPROTO, "%s: what the daemon says makes no sense", name);
	*ret = (struct exl3_device_tensor){
		.on_gpu = in->where == EXL3__WHERE__WHERE_DEVICE,
		.offset = in->offset,
		.bytes = in->bytes,
		.file_bytes = in->file_bytes,
		.nr_dims = (uint32_t)in->n_shape,
	};
	snprintf(ret->device, sizeof(ret->device), "%s", in->device);
	memcpy(ret->dtype, in->dtype, strlen(in->dtype));
	for (size_t i = 0; i < in->n_shape; i++)
		ret->shape[i] = in->shape[i];
	ret->fd = exl3_take_fd(&fd);
	return 0;
}

void exl3_tensor_close(struct exl3_tensor *t)
{
	if (!t || !t->map)
		return;
	munmap(t->map, t->map_bytes);
	exl3_closep(&t->fd);
	*t = (struct exl3_tensor){.fd = -1};
}

/* ---- geometries ---- */

static void mla_drop(struct exl3_object *o)
{
	struct exl3_mla *mla = (struct exl3_mla *)o;

	free(mla->device);
	free(mla);
}

void exl3_mla_fill(const struct exl3_mla_shape *shape, Exl3__RegisterMla *body)
{
	body->heads = shape->heads;
	body->dim = shape->dim;
	body->value_dim = shape->value_dim;
	body->topk = shape->topk;
	body->slots = shape->slots;
	body->cache_stride = shape->cache_stride;
	body->indices_stride = shape->indices_stride;
	body->cache_dtype = shape->cache_dtype;
	body->indices_dtype = shape->indices_dtype;
	body->page_rows = shape->page_rows;
	body->table_queries = shape->table_queries;
	body->device = (char *)(uintptr_t)(shape->device ? shape->device : "");
}

int exl3_mla_register(struct exl3_client *c, const struct exl3_mla_shape *shape, uint32_t *ret)
{
	Exl3__RegisterMla body = EXL3__REGISTER_MLA__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	exl3_auto(exl3_freep) struct exl3_mla *mla = calloc(1, sizeof(*mla));
	exl3_auto(exl3_freep) char *device = strdup(shape->device ? shape->device : "");
	int e;

	if (!mla || !device)
		return exl3_errf(exl3_client_err(), -ENOMEM, "geometry: out of memory");
	exl3_mla_fill(shape, &body);
	req.body_case = EXL3__REQUEST__BODY_REGISTER_MLA;
	req.register_mla = &body;
	e = exl3_client_call(c, &req, EXL3__REPLY__BODY_HANDLE, EXL3_CALL_TIMEOUT_NS, &reply, NULL,
			     0);
	if (e < 0)
		return e;
	mla->shape = *shape;
	mla->shape.device = mla->device = exl3_take_ptr(&device);
	mla->handle = *ret = reply->handle->handle;
	exl3_object_add(c, &mla->obj, EXL3_OBJECT_MLA, mla_drop);
	return exl3_map_enter(&exl3_take_ptr(&mla)->obj);
}
