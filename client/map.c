/* SPDX-License-Identifier: Apache-2.0 */
/* map.c - mapped mode: weights of the daemon in this process, from the first model that wants them to the last. */
#include "client/map.h"

#include "proto/frame.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define LIBRARY    "libexl3-mapped.so"
#define SLOT_MASK  0xffffu /* of a module's or geometry's number */
#define ARENA_MASK (EXL3_BUFFERS_MAX - 1)

/* ---- the library ---- */

static pthread_once_t library_once = PTHREAD_ONCE_INIT;
static const struct exl3_mapped_ops *library;
static struct exl3_error library_error;

static bool try_library(const char *dir, const char *rest)
{
	const struct exl3_mapped_ops *ops;
	char path[PATH_MAX + 64];
	void *so;

	if (snprintf(path, sizeof(path), "%s%s" LIBRARY, dir, rest) >= (int)sizeof(path))
		return false;
	so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!so)
		return false;
	ops = dlsym(so, "exl3_mapped");
	if (!ops || ops->abi != EXL3_MAPPED_ABI || strcmp(ops->version, EXL3_VERSION) != 0) {
		exl3_errf(&library_error, -EOPNOTSUPP, "%s is of another version than libexl3", path);
		dlclose(so);
		return true;
	}
	library = ops;
	library_error.code = 0;
	return true;
}

/* Beside this library or program, in lib beside its bin, or where the system looks. */
static void open_library(void)
{
	const char *dir = secure_getenv("EXL3_BACKEND_DIR");
	char own[PATH_MAX];
	char *slash;
	Dl_info info;

	exl3_errf(&library_error, -EOPNOTSUPP, LIBRARY " is not installed");
	if (dir && try_library(dir, "/"))
		return;
	if (dladdr((void *)(uintptr_t)open_library, &info) && info.dli_fname &&
	    realpath(info.dli_fname, own) && (slash = strrchr(own, '/'))) {
		*slash = 0;
		if (try_library(own, "/") || try_library(own, "/../") || try_library(own, "/../lib/"))
			return;
	}
	try_library("", "");
}

static int library_get(struct exl3_maps *maps)
{
	pthread_once(&library_once, open_library);
	if (!library)
		return exl3_errf(exl3_client_err(), library_error.code, "%s", library_error.text);
	maps->ops = library;
	return 0;
}

/* ---- life ---- */

static int mode_of(unsigned flags, int *ret)
{
	const char *env = getenv("EXL3_MODE");

	*ret = -1;
	if (flags & EXL3_CONNECT_MAPPED && flags & EXL3_CONNECT_DIRECT)
		return exl3_errf(exl3_client_err(), -EINVAL, "connect: mapped and direct contradict each other");
	if (flags & (EXL3_CONNECT_MAPPED | EXL3_CONNECT_DIRECT))
		*ret = flags & EXL3_CONNECT_MAPPED ? EXL3_MODE_MAPPED : EXL3_MODE_DIRECT;
	else if (env && strcmp(env, "mapped") == 0)
		*ret = EXL3_MODE_MAPPED;
	else if (env && strcmp(env, "direct") == 0)
		*ret = EXL3_MODE_DIRECT;
	else if (env && *env && strcmp(env, "auto") != 0)
		return exl3_errf(exl3_client_err(), -EINVAL, "EXL3_MODE is '%s': auto, mapped or direct", env);
	return 0;
}

int exl3_maps_new(struct exl3_client *c, unsigned flags)
{
	struct exl3_maps *maps = calloc(1, sizeof(*maps));
	int e;

	if (!maps)
		return exl3_errf(exl3_client_err(), -ENOMEM, "out of memory");
	e = mode_of(flags, &maps->mode);
	if (e < 0) {
		free(maps);
		return e;
	}
	pthread_mutex_init(&maps->lock, NULL);
	c->maps = maps;
	return 0;
}

/* Its weights are not used any more, but by what a GPU may still have in its queues. */
static void let_go(struct exl3_maps *maps, struct exl3_mapping *m)
{
	if (m->model && m->gpu >= 0)
		exl3_map_cuda_wait(m->gpu);
	m->model = m->model ? maps->ops->model_close(m->model) : NULL;
	m->page = exl3_segment_free(m->page);
	/* By this the daemon knows. A close alone would wait for the watcher, which may be polling it. */
	if (m->sock >= 0)
		shutdown(m->sock, SHUT_RDWR);
	exl3_closep(&m->sock);
}

static void mapping_free(struct exl3_maps *maps, struct exl3_mapping *m)
{
	let_go(maps, m);
	free(m->name);
	free(m->fingerprint);
	free(m);
}

void exl3_maps_free(struct exl3_client *c)
{
	struct exl3_maps *maps = c->maps;
	struct exl3_mapping *m;

	if (!maps)
		return;
	while ((m = maps->list)) {
		maps->list = m->next;
		if (exl3_client_forked(c)) {
			/* The parent's socket goes on, and the device's threads do not exist here: only our copies go. */
			exl3_closep(&m->sock);
			m->model = NULL;
		}
		mapping_free(maps, m);
	}
	free(maps->handles);
	if (!exl3_client_forked(c))
		pthread_mutex_destroy(&maps->lock);
	free(maps);
	c->maps = NULL;
}

/* ---- counts; under lock ---- */

static void try_release(struct exl3_maps *maps, struct exl3_mapping *m)
{
	struct exl3_mapping **p = &maps->list;

	if (__atomic_load_n(&m->pins, __ATOMIC_SEQ_CST))
		return;
	if (m->refs) {
		/* A graph that was captured would read what is no longer there. */
		if (m->revoked && !m->captured)
			let_go(maps, m);
		return;
	}
	while (*p != m)
		p = &(*p)->next;
	*p = m->next;
	mapping_free(maps, m);
}

static void put_mapping(struct exl3_maps *maps, struct exl3_mapping **m)
{
	struct exl3_mapping *was = *m;

	*m = NULL;
	if (!was)
		return;
	was->refs--;
	try_release(maps, was);
}

void exl3_map_unpin(struct exl3_client *c, struct exl3_mapping *m)
{
	pthread_mutex_lock(&c->maps->lock);
	__atomic_sub_fetch(&m->pins, 1, __ATOMIC_SEQ_CST);
	try_release(c->maps, m);
	pthread_mutex_unlock(&c->maps->lock);
}

/* Whoever holds the lock may be waiting for the GPU, and so for us. */
void exl3_map_unpin_later(struct exl3_client *c, struct exl3_mapping *m)
{
	/* From here on it may be gone: the last one always has the watcher look. */
	if (__atomic_sub_fetch(&m->pins, 1, __ATOMIC_SEQ_CST) == 0)
		exl3_watcher_poke(c);
}

void exl3_map_reap(struct exl3_client *c)
{
	struct exl3_mapping *m, *next;

	pthread_mutex_lock(&c->maps->lock);
	for (m = c->maps->list; m; m = next) {
		next = m->next;
		if (!m->refs || m->revoked)
			try_release(c->maps, m);
	}
	pthread_mutex_unlock(&c->maps->lock);
}

static bool revoked(struct exl3_mapping *m)
{
	const struct exl3_map_state *state = m->page ? m->page->base : NULL;

	if (state && __atomic_load_n(&state->revoked, __ATOMIC_SEQ_CST))
		m->revoked = true;
	return m->revoked;
}

/* The one that can be used; there may be older ones of the same content. */
static struct exl3_mapping *find_mapping(struct exl3_maps *maps, const char *name, const char *fingerprint)
{
	struct exl3_mapping *m = maps->list;

	while (m && (!m->model || revoked(m) || strcmp(m->name, name) || strcmp(m->fingerprint, fingerprint)))
		m = m->next;
	return m;
}

/* ---- what requests can name ---- */

static uint32_t number_of(const struct exl3_object *o)
{
	return o->type == EXL3_OBJECT_MODULE ? ((const struct exl3_module *)o)->handle
					     : ((const struct exl3_mla *)o)->handle;
}

static void attach_module(struct exl3_maps *maps, struct exl3_module *mod)
{
	struct exl3_mapping *m;

	if (mod->mapping)
		return;
	m = find_mapping(maps, mod->model, mod->fingerprint);
	if (!m)
		return;
	m->refs++;
	mod->mapping = m;
	mod->desc = maps->ops->find(m->model, mod->canonical, mod->info.kind);
}

static int grow(struct exl3_maps *maps, uint32_t slot)
{
	uint32_t nr = (slot | 63) + 1;
	struct exl3_object **grown;

	if (slot < maps->nr_handles)
		return 0;
	grown = realloc(maps->handles, nr * sizeof(*grown));
	if (!grown)
		return exl3_errf(exl3_client_err(), -ENOMEM, "out of memory");
	memset(grown + maps->nr_handles, 0, (nr - maps->nr_handles) * sizeof(*grown));
	maps->handles = grown;
	maps->nr_handles = nr;
	return 0;
}

int exl3_map_enter(struct exl3_object *o)
{
	struct exl3_maps *maps = o->client->maps;
	int e = 0;

	pthread_mutex_lock(&maps->lock);
	if (o->type == EXL3_OBJECT_ARENA) {
		maps->arenas[((struct exl3_arena *)o)->buffer & ARENA_MASK] = (struct exl3_arena *)o;
	} else {
		e = grow(maps, number_of(o) & SLOT_MASK);
		if (e == 0)
			maps->handles[number_of(o) & SLOT_MASK] = o;
		if (e == 0 && o->type == EXL3_OBJECT_MODULE)
			attach_module(maps, (struct exl3_module *)o);
	}
	pthread_mutex_unlock(&maps->lock);
	return e;
}

void exl3_map_leave(struct exl3_object *o)
{
	struct exl3_maps *maps = o->client->maps;

	pthread_mutex_lock(&maps->lock);
	if (o->type == EXL3_OBJECT_MODEL) {
		put_mapping(maps, &((struct exl3_model *)o)->mapping);
	} else if (o->type == EXL3_OBJECT_ARENA) {
		struct exl3_arena *a = (struct exl3_arena *)o;

		if (maps->arenas[a->buffer & ARENA_MASK] == a)
			maps->arenas[a->buffer & ARENA_MASK] = NULL;
		if (a->gpu_base)
			exl3_map_cuda_unhost(a);
	} else if (o->type == EXL3_OBJECT_MODULE || o->type == EXL3_OBJECT_MLA) {
		uint32_t slot = number_of(o) & SLOT_MASK;

		if (slot < maps->nr_handles && maps->handles[slot] == o)
			maps->handles[slot] = NULL;
		if (o->type == EXL3_OBJECT_MODULE)
			put_mapping(maps, &((struct exl3_module *)o)->mapping);
	}
	pthread_mutex_unlock(&maps->lock);
}

static struct exl3_mapping *mapping_on(struct exl3_maps *maps, const char *device)
{
	struct exl3_mapping *m = maps->list;

	while (m && (!m->model || revoked(m) || (device && *device && strcmp(m->device, device))))
		m = m->next;
	return m;
}

/* It runs on the device of a model that is mapped. */
static int mla_target(struct exl3_maps *maps, struct exl3_mla *mla, struct exl3_mapped_target *ret,
		      struct exl3_mapping **on, int *why)
{
	*on = mapping_on(maps, mla->shape.device);
	if (!*on) {
		*why = -EOPNOTSUPP;
		return exl3_errf(exl3_client_err(), -ENOENT, "no model is mapped on the device of this geometry");
	}
	ret->mla = &mla->shape;
	return 0;
}

static int module_target(struct exl3_module *mod, struct exl3_mapped_target *ret, struct exl3_mapping **on, int *why)
{
	*on = mod->mapping;
	if (!*on) {
		*why = -EOPNOTSUPP;
		return exl3_errf(exl3_client_err(), -ENOENT, "model %s is not mapped: open it before the channel is made",
				 mod->model);
	}
	if (revoked(*on) || !(*on)->model) {
		*why = -ESTALE;
		return exl3_errf(exl3_client_err(), -ESTALE, "model %s was unloaded, or may not be mapped any more: open "
				 "it again", mod->model);
	}
	if (!mod->desc) {
		*why = -EOPNOTSUPP;
		return exl3_errf(exl3_client_err(), -ENOENT, "%s cannot be run in this process", mod->name);
	}
	ret->desc = mod->desc;
	return 0;
}

int exl3_map_target(struct exl3_client *c, uint32_t handle, struct exl3_mapped_target *ret, struct exl3_mapping **pinned,
		    int *why)
{
	struct exl3_maps *maps = c->maps;
	uint32_t slot = handle & SLOT_MASK;
	struct exl3_mapping *on = NULL;
	struct exl3_object *o;
	int e = -ENOENT;

	pthread_mutex_lock(&maps->lock);
	o = slot < maps->nr_handles ? maps->handles[slot] : NULL;
	if (o && number_of(o) == handle)
		e = o->type == EXL3_OBJECT_MODULE ? module_target((struct exl3_module *)o, ret, &on, why)
						  : mla_target(maps, (struct exl3_mla *)o, ret, &on, why);
	if (e == 0) {
		__atomic_add_fetch(&on->pins, 1, __ATOMIC_SEQ_CST);
		ret->model = on->model;
		*pinned = on;
	}
	pthread_mutex_unlock(&maps->lock);
	return e;
}

static int any_gpu(const struct exl3_maps *maps)
{
	const struct exl3_mapping *m = maps->list;

	while (m && m->gpu < 0)
		m = m->next;
	return m ? m->gpu : 0;
}

bool exl3_map_extent(struct exl3_client *c, uint32_t buffer, bool gpu, struct exl3_mapped_extent *ret)
{
	struct exl3_maps *maps = c->maps;
	struct exl3_arena *a;
	bool ok = false;

	if (buffer == EXL3_BUF_PROCESS) {
		*ret = (struct exl3_mapped_extent){.base = (char *)(uintptr_t)EXL3_PROCESS_BASE,
					    .bytes = (1ull << 47) - EXL3_PROCESS_BASE,
					    .device = gpu};
		return true;
	}
	pthread_mutex_lock(&maps->lock);
	a = maps->arenas[buffer & ARENA_MASK];
	if (a && a->buffer == buffer && a->kind == EXL3_ARENA_HOST) {
		ok = !gpu || a->gpu_base || exl3_map_cuda_host(a, any_gpu(maps)) == 0;
		*ret = (struct exl3_mapped_extent){.base = gpu ? (char *)(uintptr_t)a->gpu_base : a->base, .bytes = a->bytes};
	} else if (a && a->buffer == buffer) {
		ok = gpu;
		*ret = (struct exl3_mapped_extent){.base = a->base, .bytes = a->bytes, .device = true};
	}
	pthread_mutex_unlock(&maps->lock);
	return ok;
}

/* ---- asking the daemon; the caller holds call ---- */

/* What came of a MapModel. */
struct offer {
	int fds[4]; /* owned: slab, table, page, socket */
	uint8_t slab_id[16];
	size_t slab_id_bytes;
};

static void offer_fini(struct offer *o)
{
	for (int i = 0; i < 4; i++)
		exl3_closep(&o->fds[i]);
}

static int ask(struct exl3_client *c, uint32_t handle, struct offer *o)
{
	Exl3__MapModel body = EXL3__MAP_MODEL__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e;

	*o = (struct offer){.fds = {-1, -1, -1, -1}};
	if (!c->map_policy)
		return exl3_errf(exl3_client_err(), -EPERM,
				 "this user's tenant may not map the weights of models (mapped), or the daemon is an older one");
	body.model = handle;
	req.body_case = EXL3__REQUEST__BODY_MAP_MODEL;
	req.map_model = &body;
	e = exl3_client_call_locked(c, &req, EXL3__REPLY__BODY_MAP, EXL3_CALL_TIMEOUT_NS, &reply, o->fds, 4, NULL, 0);
	if (e < 0)
		return e;
	if (reply->map->slab_id.len <= sizeof(o->slab_id)) {
		o->slab_id_bytes = reply->map->slab_id.len;
		memcpy(o->slab_id, reply->map->slab_id.data, o->slab_id_bytes);
	}
	return 0;
}

/* Page and socket are the mapping's from now on. */
static int take_page(struct exl3_mapping *m, struct offer *o)
{
	struct exl3_segment *page;
	int e = exl3_segment_map(o->fds[2], (sizeof(struct exl3_map_state) + 4095) & ~4095ul, &page, exl3_client_err());

	if (e < 0)
		return e;
	exl3_take_fd(&o->fds[2]);
	exl3_segment_free(m->page);
	exl3_closep(&m->sock);
	m->page = page;
	m->sock = exl3_take_fd(&o->fds[3]);
	memcpy(m->slab_id, o->slab_id, sizeof(m->slab_id));
	m->slab_id_bytes = o->slab_id_bytes;
	return 0;
}

static int open_weights(struct exl3_maps *maps, struct offer *o, const char *fingerprint,
			struct exl3_mapped_model **ret)
{
	int e = maps->ops->model_open(o->fds[0], o->fds[1], fingerprint, ret, exl3_client_err());

	if (e == 0)
		exl3_take_fd(&o->fds[0]);
	return e;
}

static int mapping_new(struct exl3_client *c, struct exl3_model *model, struct exl3_mapping **ret)
{
	struct exl3_maps *maps = c->maps;
	struct exl3_mapping *m = calloc(1, sizeof(*m));
	unsigned nr = 0;
	struct offer o;
	int e = 0;

	if (!m)
		return exl3_errf(exl3_client_err(), -ENOMEM, "mapping: out of memory");
	m->sock = m->gpu = -1;
	m->name = strdup(model->name);
	m->fingerprint = strdup(model->fingerprint);
	pthread_mutex_lock(&maps->lock);
	for (const struct exl3_mapping *other = maps->list; other; other = other->next)
		nr++;
	m->serial = ++maps->next_serial;
	pthread_mutex_unlock(&maps->lock);
	if (!m->name || !m->fingerprint)
		e = exl3_errf(exl3_client_err(), -ENOMEM, "mapping: out of memory");
	else if (nr >= EXL3_MAPPINGS_MAX)
		e = exl3_errf(exl3_client_err(), -EDQUOT, "%u models are mapped already", nr);
	o = (struct offer){.fds = {-1, -1, -1, -1}};
	if (e == 0)
		e = ask(c, model->handle, &o);
	if (e == 0)
		e = open_weights(maps, &o, m->fingerprint, &m->model);
	if (e == 0)
		e = take_page(m, &o);
	offer_fini(&o);
	if (e < 0) {
		mapping_free(maps, m);
		return exl3_err_prefix(exl3_client_err(), "model %.100s cannot be mapped", model->name);
	}
	m->device = maps->ops->device(m->model, &m->gpu);
	*ret = m;
	return 0;
}

static int map_model(struct exl3_client *c, struct exl3_model *model)
{
	struct exl3_maps *maps = c->maps;
	struct exl3_mapping *m;
	int e = library_get(maps);

	if (e < 0)
		return e;
	pthread_mutex_lock(&maps->lock);
	if (model->mapping && revoked(model->mapping)) /* the daemon may have changed its mind since */
		put_mapping(maps, &model->mapping);
	m = model->mapping ? model->mapping : find_mapping(maps, model->name, model->fingerprint);
	if (m && !model->mapping) {
		m->refs++;
		model->mapping = m;
	}
	pthread_mutex_unlock(&maps->lock);
	if (m)
		return 0;
	e = mapping_new(c, model, &m);
	if (e < 0)
		return e;
	pthread_mutex_lock(&maps->lock);
	m->next = maps->list;
	maps->list = m;
	m->refs = 1;
	model->mapping = m;
	pthread_mutex_unlock(&maps->lock);
	exl3_watcher_poke(c);
	return 0;
}

static bool wanted(const struct exl3_client *c)
{
	const struct exl3_maps *maps = c->maps;

	return maps->wanted || maps->mode == EXL3_MODE_MAPPED || (maps->mode < 0 && c->map_policy == 2);
}

void exl3_map_model(struct exl3_model *m)
{
	struct exl3_client *c = m->obj.client;
	struct exl3_error before = *exl3_client_err();

	if (!wanted(c))
		return;
	pthread_mutex_lock(&c->call);
	if (exl3_client_check(c) == 0)
		map_model(c, m);
	pthread_mutex_unlock(&c->call);
	*exl3_client_err() = before; /* the model is open all the same */
}

int exl3_map_ready(struct exl3_client *c)
{
	struct exl3_maps *maps = c->maps;
	struct exl3_object *o, *next;
	int e = 0;

	pthread_mutex_lock(&c->call);
	e = exl3_client_check(c);
	if (e == 0)
		e = library_get(maps);
	if (e == 0 && !c->map_policy)
		e = exl3_errf(exl3_client_err(), -EPERM,
			      "this user's tenant may not map the weights of models (mapped), or the daemon is an older one");
	maps->wanted |= e == 0;
	pthread_mutex_lock(&c->list);
	for (o = e == 0 ? c->objects : NULL; o && e == 0; o = next) {
		if (o->type == EXL3_OBJECT_MODEL) {
			o->pinned = true; /* call keeps the other one that does this away */
			pthread_mutex_unlock(&c->list);
			e = map_model(c, (struct exl3_model *)o);
			pthread_mutex_lock(&c->list);
			o->pinned = false;
			pthread_cond_broadcast(&c->changed);
		}
		next = o->next;
	}
	/* Modules that were open before. */
	pthread_mutex_lock(&maps->lock);
	for (uint32_t i = 0; i < maps->nr_handles; i++)
		if (maps->handles[i] && maps->handles[i]->type == EXL3_OBJECT_MODULE)
			attach_module(maps, (struct exl3_module *)maps->handles[i]);
	pthread_mutex_unlock(&maps->lock);
	pthread_mutex_unlock(&c->list);
	pthread_mutex_unlock(&c->call);
	return e;
}

void exl3_map_tell(struct exl3_client *c, const char *why)
{
	Exl3__MapFailed body = EXL3__MAP_FAILED__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	body.reason = (char *)(uintptr_t)why;
	req.body_case = EXL3__REQUEST__BODY_MAP_FAILED;
	req.map_failed = &body;
	if (c->features & EXL3_FEATURE_MAPPED)
		exl3_client_tell(c, &req, UINT64_MAX);
}

/* ---- the daemon wants them back, or is another one ---- */

unsigned exl3_map_fds(struct exl3_client *c, int *fds, uint64_t *serials)
{
	unsigned nr = 0;

	pthread_mutex_lock(&c->maps->lock);
	for (const struct exl3_mapping *m = c->maps->list; m && nr < EXL3_MAPPINGS_MAX; m = m->next) {
		if (m->sock < 0 || m->revoked)
			continue;
		fds[nr] = m->sock;
		serials[nr++] = m->serial;
	}
	pthread_mutex_unlock(&c->maps->lock);
	return nr;
}

void exl3_map_hangup(struct exl3_client *c, uint64_t serial)
{
	struct exl3_maps *maps = c->maps;
	struct exl3_mapping *m;

	pthread_mutex_lock(&maps->lock);
	for (m = maps->list; m && m->serial != serial; m = m->next)
		;
	if (m && revoked(m))
		try_release(maps, m);
	else if (m)
		exl3_closep(&m->sock); /* the worker has gone; what is mapped stays good */
	pthread_mutex_unlock(&maps->lock);
}

static void forsake(struct exl3_maps *maps, struct exl3_mapping *m)
{
	m->revoked = true;
	try_release(maps, m);
}

/* Other memory with the same content: from the next request on. Under lock. */
static void swap_weights(struct exl3_maps *maps, struct exl3_mapping *m, struct exl3_mapped_model *fresh)
{
	struct exl3_mapped_model *old;

	/* The watcher is in here itself: nobody announces what ends on a GPU. */
	while (__atomic_load_n(&m->pins, __ATOMIC_SEQ_CST)) {
		pthread_mutex_unlock(&maps->lock);
		nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
		pthread_mutex_lock(&maps->lock);
	}
	if (m->gpu >= 0)
		exl3_map_cuda_wait(m->gpu);
	old = m->model;
	m->model = fresh;
	m->device = maps->ops->device(fresh, &m->gpu);
	for (uint32_t i = 0; i < maps->nr_handles; i++) {
		struct exl3_module *mod = (struct exl3_module *)maps->handles[i];

		if (mod && mod->obj.type == EXL3_OBJECT_MODULE && mod->mapping == m)
			mod->desc = maps->ops->find(fresh, mod->canonical, mod->info.kind);
	}
	maps->ops->model_close(old);
}

static void renew(struct exl3_client *c, struct exl3_mapping *m, uint32_t handle)
{
	struct exl3_maps *maps = c->maps;
	struct exl3_mapped_model *fresh = NULL;
	struct offer o = {.fds = {-1, -1, -1, -1}};
	bool same;
	int e = handle ? ask(c, handle, &o) : -ENOENT;

	same = e == 0 && m->slab_id_bytes && o.slab_id_bytes == m->slab_id_bytes &&
	       memcmp(o.slab_id, m->slab_id, m->slab_id_bytes) == 0;
	if (e == 0 && !same)
		e = open_weights(maps, &o, m->fingerprint, &fresh);
	pthread_mutex_lock(&maps->lock);
	/* A captured graph knows the old addresses. */
	if (e == 0 && fresh && m->captured)
		e = -EINVAL;
	if (e == 0)
		e = take_page(m, &o);
	if (e < 0 && fresh)
		maps->ops->model_close(fresh);
	else if (e == 0 && fresh)
		swap_weights(maps, m, fresh);
	m->refs--; /* of exl3_map_restore() */
	/* If the connection has failed there is another attempt. */
	if (e < 0 && e != -ESTALE && e != -ETIMEDOUT && e != -EPROTO && e != -ECANCELED)
		m->revoked = true;
	try_release(maps, m);
	pthread_mutex_unlock(&maps->lock);
	offer_fini(&o);
}

void exl3_map_restore(struct exl3_client *c, uint32_t (*open)(void *arg, const char *name, const char *fingerprint),
		      void *arg)
{
	struct exl3_maps *maps = c->maps;
	uint64_t last = 0;

	/* One after the other, in the order of their numbers: the list may change while the daemon is asked. */
	for (;;) {
		struct exl3_mapping *m, *next = NULL;

		pthread_mutex_lock(&maps->lock);
		for (m = maps->list; m; m = m->next)
			if (m->serial > last && m->model && !revoked(m) && (!next || m->serial < next->serial))
				next = m;
		if (next) {
			last = next->serial;
			next->refs++;
		}
		pthread_mutex_unlock(&maps->lock);
		if (!next)
			return;
		renew(c, next, open(arg, next->name, next->fingerprint));
	}
}

void exl3_map_lost(struct exl3_client *c)
{
	struct exl3_mapping *m, *next;

	pthread_mutex_lock(&c->maps->lock);
	for (m = c->maps->list; m; m = next) {
		next = m->next;
		forsake(c->maps, m);
	}
	pthread_mutex_unlock(&c->maps->lock);
}
