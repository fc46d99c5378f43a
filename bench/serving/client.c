/* SPDX-License-Identifier: Apache-2.0 */
/* client.c - a decoder that is a client of a daemon, and what the daemon says about all of them. */
#include "bench/serving/serving.h"

#include "client/internal.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct connection {
	struct exl3_client *c;
	struct exl3_channel *ch;
	struct exl3_module *modules[4 * SERVING_LAYERS_MAX + 1];
	bool moe[4 * SERVING_LAYERS_MAX + 1];
	exl3_ref x, y, ids, weights;
	int32_t *chosen; /* [SERVING_TOPK], where ids points; in host memory in any case */
};

struct client {
	struct connection to[3]; /* each daemon */
};

static int fail(struct serving_record *r)
{
	snprintf(r->error, sizeof(r->error), "%s", exl3_last_error());
	return -1;
}

/* Experts as a router might choose them: all different. */
static void route(struct serving_decoder *d, int32_t *chosen)
{
	for (uint32_t i = 0; i < SERVING_TOPK; i++) {
		d->rng = d->rng * 6364136223846793005u + 1442695040888963407u;
		chosen[i] = (int32_t)((d->rng >> 33) % (SERVING_EXPERTS / SERVING_TOPK) +
				      i * (SERVING_EXPERTS / SERVING_TOPK));
	}
}

static int call(struct serving_decoder *d, uint32_t module, uint64_t *exec_ns)
{
	struct connection *me = &((struct client *)d->arg)->to[d->mode];
	/* More clients than processors: waiting gives way to others. */
	const bool crowded = d->crowded;
	struct exl3_sqe *sqe = exl3_sq_get(me->ch);
	struct exl3_cqe cqe;
	int e;

	if (!sqe)
		return fail(d->record);
	if (me->moe[module]) {
		route(d, me->chosen);
		exl3_prep_moe(sqe, me->modules[module], me->x, EXL3_F16, me->y, EXL3_F16, 1,
			      me->ids, EXL3_I32, me->weights, EXL3_F32, SERVING_TOPK);
	} else {
		exl3_prep_linear(sqe, me->modules[module], me->x, EXL3_F16, me->y, EXL3_F16, 1);
	}
	if (exl3_submit(me->ch) < 0)
		return fail(d->record);
	for (unsigned i = 1; (e = exl3_peek(me->ch, &cqe)) == 0; i++) {
		if (crowded && i % 16 == 0)
			sched_yield();
		else
			exl3_ring_relax();
	}
	if (e < 0)
		return fail(d->record);
	if (cqe.result < 0) {
		snprintf(d->record->error, sizeof(d->record->error), "%s", exl3_result_text(&cqe));
		return -1;
	}
	*exec_ns = cqe.exec_ns;
	return 0;
}

/* Where experts and their weights stand. */
static int open_routes(struct connection *me)
{
	struct exl3_arena *arena;
	float *weights;

	if (exl3_arena_new(me->c, 4096, &arena) < 0)
		return -1;
	me->chosen = exl3_arena_alloc(arena, SERVING_TOPK * sizeof(int32_t));
	weights = exl3_arena_alloc(arena, SERVING_TOPK * sizeof(float));
	for (uint32_t i = 0; i < SERVING_TOPK; i++)
		weights[i] = 1.0f / SERVING_TOPK;
	me->ids = exl3_arena_ref(arena, me->chosen);
	me->weights = exl3_arena_ref(arena, weights);
	return 0;
}

static int open_modules(const struct serving_options *o, struct connection *me, uint32_t *nr)
{
	struct exl3_module_info info;
	struct exl3_arena *arena;
	struct exl3_model *m;
	uint32_t k = 0, n = 0;
	char name[96];

	if (exl3_model_open(me->c, "bench", &m) < 0)
		return -1;
	for (*nr = 0; serving_module(o, *nr, name, sizeof(name)); ++*nr) {
		me->moe[*nr] = strstr(name, ".experts") != NULL;
		if (exl3_module_open(m, name, me->moe[*nr] ? EXL3_KIND_MOE : EXL3_KIND_LINEAR,
				     &me->modules[*nr]) < 0)
			return -1;
		exl3_module_get_info(me->modules[*nr], &info);
		k = info.k_logical > k ? info.k_logical : k;
		n = info.n_logical > n ? info.n_logical : n;
	}
	if ((o->device_memory ? exl3_arena_new_device
			      : exl3_arena_new)(me->c, 2ull * k + 2ull * n + 8192, &arena) < 0)
		return -1;
	me->x = exl3_arena_ref(arena, exl3_arena_alloc(arena, 2ull * k));
	me->y = exl3_arena_ref(arena, exl3_arena_alloc(arena, 2ull * n));
	if (o->moe && open_routes(me) < 0)
		return -1;
	return exl3_channel_new(me->c, 8, &me->ch);
}

/* The process becomes one with CUDA of its own, as a framework is. */
static int start_cuda(struct serving_record *r)
{
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
	int (*init)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : NULL;
	int (*retain)(void **, int) =
		cuda ? (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain") : NULL;
	int (*current)(void *) = cuda ? (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent") : NULL;

	if (!init || !retain || !current || init(0) || retain(&context, 0) || current(context)) {
		snprintf(r->error, sizeof(r->error), "no CUDA in this process");
		return -1;
	}
	return 0;
}

static int client_open(const struct serving_options *o, struct serving_decoder *d)
{
	struct client *me = d->arg;

	for (int i = 0; i < 3; i++)
		if (exl3_connect_flags(o->sockets[i], "serving", EXL3_CONNECT_NO_ENV,
				       &me->to[i].c) < 0)
			return fail(d->record);
	if (o->device_memory && start_cuda(d->record) < 0)
		return -1;
	for (int i = 0; i < 3; i++)
		if (open_modules(o, &me->to[i], &d->modules) < 0)
			return fail(d->record);
	return 0;
}

int serving_client(const struct serving_options *o, struct serving_shared *shared, unsigned nth)
{
	struct client *me = calloc(1, sizeof(*me));
	struct serving_decoder d = {
		.o = o, .shared = shared, .record = &shared->client[nth], .call = call, .arg = me};

	if (!me)
		return 1;
	if (client_open(o, &d) < 0) {
		__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
		return 1;
	}
	return serving_decode(&d, nth);
}

void serving_status(const char *socket, struct serving_status *ret)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__Status body = EXL3__STATUS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	struct exl3_client *c;
	const Exl3__StatusReply *s;

	memset(ret, 0, sizeof(*ret));
	req.body_case = EXL3__REQUEST__BODY_STATUS;
	req.status = &body;
	if (exl3_connect(socket, "serving", &c) < 0 ||
	    exl3_client_call(c, &req, EXL3__REPLY__BODY_STATUS, EXL3_CALL_TIMEOUT_NS, &reply, NULL,
			     0) < 0) {
		fprintf(stderr, "serving: %s\n", exl3_last_error());
		exit(1);
	}
	s = reply->status;
	snprintf(ret->device, sizeof(ret->device), "%s", s->device_name);
	ret->bytes = s->weight_bytes + s->arena_bytes;
	if (s->merging) {
		ret->launches = s->merging->launches;
		ret->requests = s->merging->requests;
		ret->trains = s->merging->trains;
		ret->late = s->merging->late;
		ret->joined = s->merging->joined;
		ret->expelled = s->merging->expelled;
	}
	exl3_close(c);
}
