/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reconnect.c - everything that a client has open, once more at the next worker.
 *
 * The watcher's thread connects again and asks for all of it under the numbers that it had: models and
 * modules (only with the same content), geometries, arenas (whose memory the client still holds and sends
 * back), channels. So requests that a program has prepared, and references into its arenas, keep their
 * meaning. It is all or nothing: what cannot be had again leaves the client lost, for another attempt or,
 * when the content is another one, for good. Nothing is ever sent again by itself: what was outstanding has
 * ended with -ESTALE.
 */
#include "client/map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define RESTORE_TIMEOUT_NS (10ull * 1000000000u) /* for one request */

/* A model that is open at the new worker. */
struct opened {
	struct opened *next;
	char *name, *fingerprint; /* owned */
	uint32_t handle;
	bool temporary; /* for modules whose model was closed before them */
};

struct restore {
	struct exl3_client *c;
	uint64_t places[EXL3_HANDLES_MAX / 64]; /* bit: of a handle that the client has, or a temporary one */
	struct opened *opened; /* owned list */
	bool other_content;
};

static int call(struct exl3_client *c, Exl3__Request *req, Exl3__Reply__BodyCase want,
		Exl3__Reply **ret, const int *send, unsigned nr_send)
{
	if (__atomic_load_n(&c->stop, __ATOMIC_ACQUIRE))
		return exl3_errf(exl3_client_err(), -ECANCELED, "the connection is being closed");
	return exl3_client_call_locked(c, req, want, RESTORE_TIMEOUT_NS, ret, NULL, 0, send, nr_send);
}

static int other_number(const char *what)
{
	return exl3_errf(exl3_client_err(), -EPROTO, "the daemon gave another number to %s", what);
}

/* @handle: the number wanted, 0 = any. */
static int open_model(struct restore *r, const char *name, const char *fingerprint, uint32_t handle,
		      bool temporary)
{
	Exl3__OpenModel body = EXL3__OPEN_MODEL__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	struct opened *o;
	int e;

	body.name = (char *)(uintptr_t)name;
	body.handle = handle;
	req.body_case = EXL3__REQUEST__BODY_OPEN_MODEL;
	req.open_model = &body;
	e = call(r->c, &req, EXL3__REPLY__BODY_MODELS, &reply, NULL, 0);
	if (e < 0)
		return e;
	if (reply->models->n_models == 1 &&
	    strcmp(reply->models->models[0]->fingerprint, fingerprint)) {
		r->other_content = true;
		return exl3_errf(exl3_client_err(), -ESTALE,
				 "model %s has been loaded anew with other content: connect again", name);
	}
	if (reply->models->n_models != 1 || (handle && reply->models->models[0]->handle != handle))
		return other_number(name);
	o = calloc(1, sizeof(*o));
	if (o) {
		o->name = strdup(name);
		o->fingerprint = strdup(fingerprint);
		o->handle = reply->models->models[0]->handle;
		o->temporary = temporary;
		o->next = r->opened;
		r->opened = o;
	}
	if (!o || !o->name || !o->fingerprint)
		return exl3_errf(exl3_client_err(), -ENOMEM, "out of memory");
	return 0;
}

static int restore_model(struct restore *r, struct exl3_object *o)
{
	struct exl3_model *m = (struct exl3_model *)o;

	return open_model(r, m->name, m->fingerprint, m->handle, false);
}

static const struct opened *find_model(const struct restore *r, const struct exl3_module *mod)
{
	const struct opened *o = r->opened;

	while (o && (strcmp(o->name, mod->model) ||
		     strcmp(o->fingerprint, mod->fingerprint)))
		o = o->next;
	return o;
}

static void take_place(struct restore *r, uint32_t handle)
{
	uint32_t place = handle % EXL3_HANDLES_MAX;

	r->places[place / 64] |= 1ull << place % 64;
}

/* Of all that is to be restored. */
static void take_places(struct restore *r)
{
	pthread_mutex_lock(&r->c->list);
	for (const struct exl3_object *o = r->c->objects; o; o = o->next) {
		if (o->type == EXL3_OBJECT_MODEL)
			take_place(r, ((const struct exl3_model *)o)->handle);
		else if (o->type == EXL3_OBJECT_MODULE)
			take_place(r, ((const struct exl3_module *)o)->handle);
		else if (o->type == EXL3_OBJECT_MLA)
			take_place(r, ((const struct exl3_mla *)o)->handle);
		else if (o->type == EXL3_OBJECT_PLAN && ((const struct exl3_plan *)o)->handle)
			take_place(r, ((const struct exl3_plan *)o)->handle);
	}
	pthread_mutex_unlock(&r->c->list);
}

/* A number for a temporary handle: one that the daemon chose could be that of a module that is still to come. */
static uint32_t spare_handle(struct restore *r)
{
	for (uint32_t i = 0; i < EXL3_HANDLES_MAX / 64; i++) {
		if (~r->places[i]) {
			uint32_t place = i * 64 + (uint32_t)__builtin_ctzll(~r->places[i]);

			take_place(r, place);
			return 1u << 16 | place;
		}
	}
	return 0; /* the client has all there are */
}

static int restore_module(struct restore *r, struct exl3_object *obj)
{
	struct exl3_module *mod = (struct exl3_module *)obj;
	Exl3__OpenModule body = EXL3__OPEN_MODULE__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	const struct opened *model = find_model(r, mod);
	int e = 0;

	if (!model) {
		e = open_model(r, mod->model, mod->fingerprint, spare_handle(r), true);
		model = r->opened;
	}
	if (e < 0)
		return e;
	body.model = model->handle;
	body.name = mod->name;
	body.kind = (Exl3__ModuleKind)mod->kind;
	body.handle = mod->handle;
	req.body_case = EXL3__REQUEST__BODY_OPEN_MODULE;
	req.open_module = &body;
	e = call(r->c, &req, EXL3__REPLY__BODY_MODULES, &reply, NULL, 0);
	if (e < 0)
		return e;
	if (reply->modules->n_modules != 1 || reply->modules->modules[0]->handle != mod->handle)
		return other_number(mod->name);
	return 0;
}

static int restore_mla(struct restore *r, struct exl3_object *obj)
{
	struct exl3_mla *mla = (struct exl3_mla *)obj;
	Exl3__RegisterMla body = EXL3__REGISTER_MLA__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e;

	exl3_mla_fill(&mla->shape, &body);
	body.handle = mla->handle;
	req.body_case = EXL3__REQUEST__BODY_REGISTER_MLA;
	req.register_mla = &body;
	e = call(r->c, &req, EXL3__REPLY__BODY_HANDLE, &reply, NULL, 0);
	if (e < 0)
		return e;
	return reply->handle->handle == mla->handle ? 0 : other_number("a geometry");
}

/* GPU memory: the client still holds it, whoever made it. */
static int restore_offer(struct restore *r, const struct exl3_arena *a)
{
	Exl3__RegisterBuffer body = EXL3__REGISTER_BUFFER__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e;

	exl3_offer_fill(a, &body);
	body.buffer = a->buffer;
	req.body_case = EXL3__REQUEST__BODY_REGISTER_BUFFER;
	req.register_buffer = &body;
	e = call(r->c, &req, EXL3__REPLY__BODY_ARENA, &reply, a->offer->fds, a->offer->nr_fds);
	if (e < 0)
		return e;
	return reply->arena->buffer == a->buffer ? 0 : other_number("registered memory");
}

static int restore_arena(struct restore *r, struct exl3_object *obj)
{
	struct exl3_arena *a = (struct exl3_arena *)obj;
	Exl3__AdoptArena body = EXL3__ADOPT_ARENA__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e;

	if (a->kind != EXL3_ARENA_HOST)
		return restore_offer(r, a);
	body.bytes = a->seg->bytes;
	body.buffer = a->buffer;
	req.body_case = EXL3__REQUEST__BODY_ADOPT_ARENA;
	req.adopt_arena = &body;
	e = call(r->c, &req, EXL3__REPLY__BODY_ARENA, &reply, &a->seg->fd, 1);
	if (e < 0)
		return e;
	return reply->arena->buffer == a->buffer ? 0 : other_number("an arena");
}

/* Its thread moves over when it is done with the old ring. */
static int restore_channel(struct restore *r, struct exl3_object *obj)
{
	struct exl3_channel *ch = (struct exl3_channel *)obj;
	struct exl3_channel_life *life = NULL, *old;
	uint32_t entries;
	int e;

	if (__atomic_load_n(&r->c->stop, __ATOMIC_ACQUIRE))
		return exl3_errf(exl3_client_err(), -ECANCELED, "the connection is being closed");
	if (ch->map)
		return 0; /* it has never ended */
	pthread_mutex_lock(&r->c->list);
	entries = ch->ring.sq_mask + 1;
	pthread_mutex_unlock(&r->c->list);
	e = exl3_channel_life_new(r->c, entries, &life);
	if (e < 0)
		return e;
	pthread_mutex_lock(&r->c->list);
	old = ch->next_life;
	ch->next_life = life;
	pthread_mutex_unlock(&r->c->list);
	exl3_channel_life_free(old);
	return 0;
}

static int send_plan(void *arg, Exl3__Request *req, Exl3__Reply **reply)
{
	struct restore *r = arg;

	return call(r->c, req, EXL3__REPLY__BODY_HANDLE, reply, NULL, 0);
}

/* For the ring that its channel will move to. */
static int restore_plan(struct restore *r, struct exl3_object *obj)
{
	struct exl3_plan *plan = (struct exl3_plan *)obj;
	uint32_t channel = 0, handle;
	int e;

	pthread_mutex_lock(&r->c->list);
	if (plan->ch && plan->ch->next_life)
		channel = plan->ch->next_life->id;
	pthread_mutex_unlock(&r->c->list);
	if (!channel || !plan->handle) {
		__atomic_store_n(&plan->handle, 0, __ATOMIC_RELAXED); /* the number is another one's by and by */
		return 0;
	}
	e = exl3_plan_record(plan, channel, send_plan, r, plan->handle, &handle);
	/* What it needs may have been closed since, or there is a smaller limit now. It is of no use then (-ENOENT),
	 * and everything else is. */
	if (e == -ENOENT || e == -EINVAL || e == -EDQUOT || e == -EOPNOTSUPP) {
		__atomic_store_n(&plan->handle, 0, __ATOMIC_RELAXED);
		return 0;
	}
	if (e < 0)
		return e;
	return handle == plan->handle ? 0 : other_number("a plan");
}

/* All objects of one type, one after the other; each is pinned, so that nobody frees it meanwhile. */
static int restore_type(struct restore *r, enum exl3_object_type type)
{
	static int (*const fn[EXL3_OBJECT_NR])(struct restore *r, struct exl3_object *o) = {
		[EXL3_OBJECT_MODEL] = restore_model, [EXL3_OBJECT_MODULE] = restore_module,
		[EXL3_OBJECT_MLA] = restore_mla,     [EXL3_OBJECT_ARENA] = restore_arena,
		[EXL3_OBJECT_CHANNEL] = restore_channel, [EXL3_OBJECT_PLAN] = restore_plan,
	};
	struct exl3_client *c = r->c;
	struct exl3_object *o, *next;
	int e = 0;

	pthread_mutex_lock(&c->list);
	for (o = c->objects; o && e == 0; o = next) {
		if (o->type == type) {
			o->pinned = true;
			pthread_mutex_unlock(&c->list);
			e = fn[type](r, o);
			pthread_mutex_lock(&c->list);
			o->pinned = false;
			pthread_cond_broadcast(&c->changed);
		}
		next = o->next; /* nobody can have removed it while it was pinned */
	}
	pthread_mutex_unlock(&c->list);
	return e;
}

/* The handle of a model at the new worker; 0: it cannot be had. */
static uint32_t handle_for_mapping(void *arg, const char *name, const char *fingerprint)
{
	struct restore *r = arg;
	const struct opened *o = r->opened;

	while (o && (strcmp(o->name, name) || strcmp(o->fingerprint, fingerprint)))
		o = o->next;
	if (o)
		return o->handle;
	/* Only modules of it are open: those have opened it too, if there are any. */
	return open_model(r, name, fingerprint, spare_handle(r), true) == 0 ? r->opened->handle : 0;
}

static void close_temporary(struct restore *r)
{
	for (struct opened *o = r->opened; o; o = o->next) {
		Exl3__CloseModel body = EXL3__CLOSE_MODEL__INIT;
		Exl3__Request req = EXL3__REQUEST__INIT;

		body.handle = o->handle;
		req.body_case = EXL3__REQUEST__BODY_CLOSE_MODEL;
		req.close_model = &body;
		if (o->temporary)
			call(r->c, &req, EXL3__REPLY__BODY__NOT_SET, NULL, NULL, 0);
	}
}

static void free_opened(struct restore *r)
{
	struct opened *o;

	while ((o = r->opened)) {
		r->opened = o->next;
		free(o->name);
		free(o->fingerprint);
		free(o);
	}
}

/* The caller holds call. */
static int restore_all(struct restore *r)
{
	struct exl3_client *c = r->c;
	int fd = -1, old, e = exl3_client_dial(c->path, &fd);

	if (e < 0)
		return e;
	pthread_mutex_lock(&c->list);
	old = c->sock;
	c->sock = fd;
	pthread_mutex_unlock(&c->list);
	close(old);
	c->epoch++;
	take_places(r);
	e = exl3_client_hello(c);
	for (unsigned type = 0; type < EXL3_OBJECT_NR && e == 0; type++)
		e = restore_type(r, (enum exl3_object_type)type);
	if (e == 0)
		exl3_map_restore(c, handle_for_mapping, r);
	if (e == 0)
		close_temporary(r);
	return e;
}

int exl3_client_restore(struct exl3_client *c)
{
	struct restore r = {.c = c};
	int e;

	pthread_mutex_lock(&c->call);
	e = restore_all(&r);
	free_opened(&r);
	if (e < 0 && r.other_content)
		exl3_map_lost(c); /* before anybody is told */
	pthread_mutex_lock(&c->list);
	if (e == 0) {
		/* Channels whose threads have not noticed yet: their rings are of the past as well. */
		for (struct exl3_channel *ch = c->channels; ch; ch = ch->next)
			if (!ch->map)
				__atomic_store_n(&ch->ended, 1, __ATOMIC_SEQ_CST);
		__atomic_store_n(&c->dead, 0, __ATOMIC_SEQ_CST);
	} else {
		c->last_try = *exl3_client_err();
		c->gone = r.other_content;
		/* So that the daemon gives back what was restored so far. */
		shutdown(c->sock, SHUT_RDWR);
	}
	pthread_cond_broadcast(&c->changed);
	pthread_mutex_unlock(&c->list);
	pthread_mutex_unlock(&c->call);
	return e;
}

int exl3_reconnect(struct exl3_client *c, uint64_t timeout_ns)
{
	struct exl3_error *err = exl3_client_err();
	uint64_t now = exl3_now_ns(), end = timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
	struct timespec until = {.tv_sec = (time_t)(end / 1000000000),
				 .tv_nsec = (long)(end % 1000000000)};
	int e = 0;

	if (exl3_client_forked(c))
		return exl3_client_check(c);
	pthread_mutex_lock(&c->list);
	c->waiters++;
	exl3_watcher_poke(c);
	while (__atomic_load_n(&c->dead, __ATOMIC_SEQ_CST) && !c->gone && e != ETIMEDOUT) {
		if (end == UINT64_MAX)
			pthread_cond_wait(&c->changed, &c->list);
		else
			e = pthread_cond_timedwait(&c->changed, &c->list, &until);
	}
	c->waiters--;
	if (!__atomic_load_n(&c->dead, __ATOMIC_SEQ_CST))
		e = 0;
	else if (c->gone)
		e = exl3_errf(err, -ESTALE, "%s", c->last_try.text);
	else
		e = exl3_errf(err, -ETIMEDOUT, "the daemon is not back yet: %s",
			      c->last_try.text[0] ? c->last_try.text : "no attempt has ended");
	pthread_mutex_unlock(&c->list);
	return e;
}
