/* SPDX-License-Identifier: Apache-2.0 */
/* control.c - the control socket's verbs: decode, check, call, reply. */
#include "daemon/control.h"

#include "daemon/calibrate.h"
#include "daemon/fault.h"
#include "daemon/log.h"
#include "proto/frame.h"

#include <errno.h>
#include <string.h>

#define VERSION 1u /* of the protocol */

/*
 * Memory of the message that is being handled: decoded request and reply. A packet of 64 KiB cannot
 * decode to more than this (unknown fields of two bytes each take the most), and a message that tries is
 * refused. Loop thread only, empty between two messages.
 */
static struct {
	_Alignas(16) char mem[4u << 20];
	size_t used;
} pool;

static void *pool_alloc(void *arg, size_t bytes)
{
	void *p = pool.mem + pool.used;

	(void)arg;
	if (bytes > sizeof(pool.mem) - pool.used || exl3_fault("control.alloc"))
		return NULL;
	pool.used += (bytes + 15) & ~(size_t)15;
	if (pool.used > sizeof(pool.mem))
		pool.used = sizeof(pool.mem);
	return p;
}

static void pool_free(void *arg, void *p)
{
	(void)arg;
	(void)p; /* all at once, when the message has been handled */
}

static ProtobufCAllocator pool_allocator = {.alloc = pool_alloc, .free = pool_free};

void *exl3_call_alloc(size_t bytes)
{
	void *p = pool_alloc(NULL, bytes);

	return p ? memset(p, 0, bytes) : NULL;
}

char *exl3_call_strdup(const char *text)
{
	size_t bytes = strlen(text ? text : "") + 1;
	char *copy = exl3_call_alloc(bytes);

	return copy ? memcpy(copy, text ? text : "", bytes) : NULL;
}

int exl3_call_nomem(struct exl3_call *c)
{
	return exl3_errf(&c->err, -ENOMEM, "out of memory for the reply");
}

/* The server of a daemon that is not root's refuses other users, whose CUDA would not start in it. */
char *exl3_call_mps_pipe(const struct exl3_call *c)
{
	bool may = geteuid() == 0 || c->peer->id.uid == geteuid();

	return may ? (char *)(uintptr_t)c->w->mps_pipe : (char *)"";
}

/* ---- hello ---- */

/* To another domain's worker, which answers. */
static int pass_on(struct exl3_call *c, const char *domain)
{
	int rc;

	if (!exl3_peer_admin(c->peer))
		return exl3_errf(&c->err, -EPERM,
				 "only root and the daemon's own user (uid %d) may choose a fault domain; yours "
				 "is '%s'",
				 (int)geteuid(), c->w->domain);
	if (strlen(domain) > EXL3_DOMAIN_NAME_MAX)
		return exl3_errf(&c->err, -ENOENT, "there is no fault domain '%.40s...'", domain);
	rc = exl3_worker_pass(c->w, c->peer->fd, domain, c->req->id, c->peer->name);
	if (rc < 0)
		return exl3_errf(&c->err, rc, "the connection cannot be handed on: %s", strerror(-rc));
	c->peer->passed = c->peer->closing = true;
	return 0;
}

static int verb_hello(struct exl3_call *c)
{
	const Exl3__Hello *hello = c->req->hello;
	const struct exl3_worker *w = c->w;
	Exl3__HelloReply *reply = exl3_call_alloc(sizeof(*reply));

	if (!reply)
		return exl3_call_nomem(c);
	if (hello->version_min > VERSION || hello->version_max < VERSION)
		return exl3_errf(&c->err, -EPROTO,
				 "this daemon speaks protocol version %u, the client %u to %u: "
				 "update the older one",
				 VERSION, hello->version_min, hello->version_max);
	exl3_peer_set_name(c->peer, hello->name ? hello->name : "");
	if (hello->domain && *hello->domain && strcmp(hello->domain, w->domain) != 0)
		return pass_on(c, hello->domain);
	c->peer->hello = true;
	exl3__hello_reply__init(reply);
	reply->version = VERSION;
	reply->features = hello->features & EXL3_FEATURES;
	reply->mapped = (uint32_t)c->peer->tenant->conf.mapped;
	reply->daemon_version = (char *)EXL3_DAEMON_VERSION;
	reply->backend = (char *)(uintptr_t)w->devices.list[0].ops->name;
	reply->pid = (int32_t)getpid();
	reply->sq_entries_max = EXL3_SQ_ENTRIES_MAX;
	reply->arena_bytes_max = w->cfg->arena_max;
	reply->admin = exl3_peer_admin(c->peer);
	reply->domain = (char *)(uintptr_t)w->domain;
	reply->mps_pipe = exl3_call_mps_pipe(c);
	c->reply->body_case = EXL3__REPLY__BODY_HELLO;
	c->reply->hello = reply;
	return 0;
}

/* ---- verbs ---- */

#define ADMIN     (1u << 0) /* exl3_peer_admin() */
#define UNGREETED (1u << 1) /* also before Hello */
#define NOT_DRAIN (1u << 2) /* refused while the daemon drains */

static const struct verb {
	const char *name;
	int (*fn)(struct exl3_call *c);
	unsigned flags;
} verbs[] = {
	[EXL3__REQUEST__BODY_HELLO] = {"hello", verb_hello, UNGREETED},
	[EXL3__REQUEST__BODY_LIST_MODELS] = {"list models", exl3_verb_list_models, 0},
	[EXL3__REQUEST__BODY_OPEN_MODEL] = {"open model", exl3_verb_open_model, 0},
	[EXL3__REQUEST__BODY_CLOSE_MODEL] = {"close model", exl3_verb_close_model, 0},
	[EXL3__REQUEST__BODY_LIST_MODULES] = {"list modules", exl3_verb_list_modules, 0},
	[EXL3__REQUEST__BODY_OPEN_MODULE] = {"open module", exl3_verb_open_module, 0},
	[EXL3__REQUEST__BODY_CLOSE_MODULE] = {"close module", exl3_verb_close_module, 0},
	[EXL3__REQUEST__BODY_LIST_TENSORS] = {"list tensors", exl3_verb_list_tensors, 0},
	[EXL3__REQUEST__BODY_OPEN_TENSOR] = {"open tensor", exl3_verb_open_tensor, 0},
	[EXL3__REQUEST__BODY_RESOLVE] = {"resolve", exl3_verb_resolve, 0},
	[EXL3__REQUEST__BODY_CREATE_CHANNEL] = {"create channel", exl3_verb_create_channel,
						NOT_DRAIN},
	[EXL3__REQUEST__BODY_CLOSE_CHANNEL] = {"close channel", exl3_verb_close_channel, 0},
	[EXL3__REQUEST__BODY_CREATE_ARENA] = {"create arena", exl3_verb_create_arena, NOT_DRAIN},
	[EXL3__REQUEST__BODY_ADOPT_ARENA] = {"adopt arena", exl3_verb_adopt_arena, NOT_DRAIN},
	[EXL3__REQUEST__BODY_REGISTER_BUFFER] = {"register buffer", exl3_verb_register_buffer,
						 NOT_DRAIN},
	[EXL3__REQUEST__BODY_BIND_STREAM] = {"bind stream", exl3_verb_bind_stream, 0},
	[EXL3__REQUEST__BODY_FREE_BUFFER] = {"free buffer", exl3_verb_free_buffer, 0},
	[EXL3__REQUEST__BODY_MAP_MODEL] = {"map model", exl3_verb_map_model, NOT_DRAIN},
	[EXL3__REQUEST__BODY_MAP_FAILED] = {"map failed", exl3_verb_map_failed, 0},
	[EXL3__REQUEST__BODY_RECORD_PLAN] = {"record plan", exl3_verb_record_plan, NOT_DRAIN},
	[EXL3__REQUEST__BODY_FREE_PLAN] = {"free plan", exl3_verb_free_plan, 0},
	[EXL3__REQUEST__BODY_REGISTER_MLA] = {"register mla", exl3_verb_register_mla, 0},
	[EXL3__REQUEST__BODY_LOAD] = {"load", exl3_verb_load, ADMIN | NOT_DRAIN},
	[EXL3__REQUEST__BODY_UNLOAD] = {"unload", exl3_verb_unload, ADMIN | NOT_DRAIN},
	[EXL3__REQUEST__BODY_DRAIN] = {"drain", exl3_verb_drain, ADMIN},
	[EXL3__REQUEST__BODY_STATUS] = {"status", exl3_verb_status, 0},
	[EXL3__REQUEST__BODY_LIST_EVENTS] = {"list events", exl3_verb_list_events, 0},
	[EXL3__REQUEST__BODY_PS] = {"ps", exl3_verb_ps, 0},
	[EXL3__REQUEST__BODY_LIST_TENANTS] = {"list tenants", exl3_verb_list_tenants, 0},
	[EXL3__REQUEST__BODY_LIST_KERNELS] = {"list kernels", exl3_verb_list_kernels, 0},
	[EXL3__REQUEST__BODY_CALIBRATE] = {"calibrate", exl3_verb_calibrate, ADMIN | NOT_DRAIN},
	[EXL3__REQUEST__BODY_CALIBRATE_STATUS] = {"calibrate status", exl3_verb_calibrate_status, ADMIN},
};

static int call_verb(struct exl3_call *c)
{
	size_t n = (size_t)c->req->body_case;
	const struct verb *verb = n < sizeof(verbs) / sizeof(verbs[0]) ? &verbs[n] : NULL;

	if (!verb || !verb->fn)
		return exl3_errf(&c->err, -EOPNOTSUPP, "this daemon does not know that request");
	if (c->peer->refused)
		return exl3_errf(&c->err, c->peer->refusal.code, "%s", c->peer->refusal.text);
	if (!c->peer->hello && !(verb->flags & UNGREETED))
		return exl3_errf(&c->err, -EPROTO, "%s: the first request must be hello",
				 verb->name);
	if (verb->flags & ADMIN && !exl3_peer_admin(c->peer))
		return exl3_errf(&c->err, -EPERM,
				 "%s: only root, the daemon's own user (uid %d) and tenants with "
				 "admin = yes may do that, not %s",
				 verb->name, (int)geteuid(), c->peer->tenant->conf.name);
	/* Its next connection is the other daemon's. */
	if (verb->flags & NOT_DRAIN && c->w->draining && c->w->leaving)
		exl3_peer_disconnect(c->peer, "another daemon serves from now on");
	if (verb->flags & NOT_DRAIN && c->w->draining)
		return exl3_errf(&c->err, -ESHUTDOWN, "%s: the daemon is draining", verb->name);
	return verb->fn(c);
}

/* ---- replies ---- */

static void send_reply(struct exl3_call *c, uint64_t id, int code)
{
	static uint8_t packet[EXL3_PACKET_MAX]; /* loop thread only */
	Exl3__Reply *reply = c->reply;

	reply->id = id;
	reply->instance = c->w->instance;
	reply->generation = c->w->generation;
	if (code < 0) {
		reply->code = code;
		reply->error = c->err.text;
		reply->body_case = EXL3__REPLY__BODY__NOT_SET;
		c->nr_fds = 0;
	}
	if (exl3__reply__get_packed_size(reply) > sizeof(packet)) {
		/* Lists are paged below this: one entry alone is too long. */
		reply->body_case = EXL3__REPLY__BODY__NOT_SET;
		reply->code = -EMSGSIZE;
		reply->error = (char *)"the reply does not fit into a packet";
		c->nr_fds = 0;
	}
	exl3_peer_send(c->peer, packet, exl3__reply__pack(reply, packet), c->fds, c->nr_fds);
	exl3_closep(&c->close_fd);
}

void exl3_control_resume(struct exl3_peer *peer, int code, const char *text,
			 int (*fill)(struct exl3_call *c, void *arg), void *arg)
{
	Exl3__Reply reply = EXL3__REPLY__INIT;
	struct exl3_call c = {.w = peer->w, .peer = peer, .reply = &reply, .close_fd = -1};
	size_t used = pool.used; /* we may be inside of another client's call */

	if (code < 0)
		exl3_errf(&c.err, code, "%s", text);
	else if (fill)
		code = fill(&c, arg);
	send_reply(&c, peer->wait_id, code);
	pool.used = used;
	peer->waiting = EXL3_WAIT_NONE;
	peer->wait_for = NULL;
	exl3_peer_rewatch(peer);
}

void exl3_control_farewell(struct exl3_peer *peer, const struct exl3_error *why)
{
	Exl3__Reply reply = EXL3__REPLY__INIT;
	struct exl3_call c = {.w = peer->w, .peer = peer, .reply = &reply, .close_fd = -1, .err = *why};

	send_reply(&c, 0, why->code);
	exl3_peer_disconnect(peer, why->text);
}

void exl3_control_request(struct exl3_peer *peer, const void *packet, size_t bytes, int *fds,
			  unsigned nr_fds)
{
	Exl3__Reply reply = EXL3__REPLY__INIT;
	struct exl3_call c = {.w = peer->w,
			      .peer = peer,
			      .req_fds = fds,
			      .nr_req_fds = nr_fds,
			      .reply = &reply,
			      .close_fd = -1};
	uint64_t id = 0;
	int code;

	pool.used = 0;
	c.req = exl3__request__unpack(&pool_allocator, bytes, packet);
	if (c.req) {
		id = c.req->id;
		code = call_verb(&c);
	} else {
		code = exl3_errf(&c.err, -EPROTO, "the request cannot be decoded");
	}
	if (peer->waiting) {
		peer->wait_id = id; /* the reply is owed */
	} else if (!peer->passed) {
		if (code < 0)
			exl3_dbg("%s: %s", peer->who, c.err.text);
		send_reply(&c, id, code);
		if (peer->refused || (code == -EPROTO && !peer->hello))
			peer->closing =
				true; /* the reply is on its way; there is nothing more to say */
	}
	pool.used = 0;
}

void exl3_control_greet(struct exl3_peer *peer, uint64_t id, const char *name)
{
	Exl3__Request req = EXL3__REQUEST__INIT;
	Exl3__Hello hello = EXL3__HELLO__INIT;
	uint8_t packet[256];

	hello.version_min = hello.version_max = VERSION; /* that was settled */
	hello.name = (char *)(uintptr_t)name;
	req.id = id;
	req.body_case = EXL3__REQUEST__BODY_HELLO;
	req.hello = &hello;
	if (exl3__request__get_packed_size(&req) <= sizeof(packet))
		exl3_control_request(peer, packet, exl3__request__pack(&req, packet), NULL, 0);
}

/* ---- waiting ---- */

void exl3_control_model_event(struct exl3_worker *w, struct exl3_registered *reg,
			      enum exl3_models_event event)
{
	struct exl3_peer *next;

	for (struct exl3_peer *peer = w->peers; peer; peer = next) {
		next = peer->next;
		if (peer->wait_for != reg)
			continue;
		if (peer->waiting == EXL3_WAIT_GONE && event == EXL3_MODELS_GONE)
			exl3_control_resume(peer, 0, NULL, NULL, NULL);
		else if (peer->waiting == EXL3_WAIT_LOADED && event == EXL3_MODELS_LOADED)
			exl3_control_resume(peer, 0, NULL, NULL, NULL);
		else if (peer->waiting == EXL3_WAIT_LOADED && event == EXL3_MODELS_FAILED)
			exl3_control_resume(peer, reg->model->error.code, reg->model->error.text,
					    NULL, NULL);
		else if (peer->waiting == EXL3_WAIT_LOADED)
			exl3_control_resume(peer, -ECANCELED, "the model was unloaded meanwhile",
					    NULL, NULL);
	}
}

void exl3_control_forget(struct exl3_peer *peer)
{
	exl3_arena_job_forget(peer);
	exl3_calibrate_forget(peer->w, peer);
	peer->waiting = EXL3_WAIT_NONE;
	peer->wait_for = NULL;
}
