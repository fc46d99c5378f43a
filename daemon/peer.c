/* SPDX-License-Identifier: Apache-2.0 */
/* peer.c - one connected client and all that it holds. */
#include "daemon/peer.h"

#include "daemon/control.h"
#include "daemon/fault.h"
#include "daemon/log.h"
#include "daemon/mapper.h"
#include "daemon/replay.h"
#include "proto/frame.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define REFUSED_MAX      64u /* clients that are not served and still get an answer */
#define PACKETS_PER_TURN 4 /* then the rings and other clients get their turn */
#define HANDLES_STEP     64u
#define SLOT_BITS        16u
#define BUFFER_SLOT_BITS 10u

_Static_assert(EXL3_HANDLES_MAX <= 1u << SLOT_BITS, "a handle's slot has 16 bits");
_Static_assert(EXL3_BUFFERS_MAX <= 1u << BUFFER_SLOT_BITS, "a buffer id's slot has 10 of 16 bits");

struct exl3_reply_queued {
	struct exl3_reply_queued *next;
	int fds[EXL3_FDS_MAX]; /* owned duplicates */
	unsigned nr_fds;
	size_t bytes;
	char data[];
};

/* ---- handles ---- */

static int grow_handles(struct exl3_peer *peer)
{
	uint32_t nr = peer->nr_handles + HANDLES_STEP;
	struct exl3_handle *grown = realloc(peer->handles, nr * sizeof(*grown));

	if (!grown)
		return -ENOMEM;
	memset(grown + peer->nr_handles, 0, HANDLES_STEP * sizeof(*grown));
	peer->handles = grown;
	peer->nr_handles = nr;
	return 0;
}

static void handle_fill(struct exl3_peer *peer, uint32_t slot, const struct exl3_handle *h,
			uint16_t generation)
{
	peer->handles[slot] = *h;
	peer->handles[slot].generation = generation;
	if (h->model)
		exl3_registered_get(h->model);
	if (h->type == EXL3_HANDLE_MODEL)
		h->model->opened++;
	peer->nr_open[h->type]++;
}

int exl3_handle_add_as(struct exl3_peer *peer, const struct exl3_handle *h, uint32_t want,
		       uint32_t *ret, struct exl3_error *err)
{
	uint32_t slot = want & ((1u << SLOT_BITS) - 1);

	if (!want)
		return exl3_handle_add(peer, h, ret, err);
	if (!(want >> SLOT_BITS) || slot >= EXL3_HANDLES_MAX)
		return exl3_errf(err, -EINVAL, "%u is no handle", want);
	while (slot >= peer->nr_handles) {
		if (exl3_fault("peer.handles") || grow_handles(peer) < 0)
			return exl3_errf(err, -ENOMEM, "handles: out of memory");
	}
	if (peer->handles[slot].type != EXL3_HANDLE_NONE)
		return exl3_errf(err, -EEXIST, "handle %u: its place is taken", want);
	handle_fill(peer, slot, h, (uint16_t)(want >> SLOT_BITS));
	*ret = want;
	return 0;
}

int exl3_handle_add(struct exl3_peer *peer, const struct exl3_handle *h, uint32_t *ret,
		    struct exl3_error *err)
{
	uint32_t slot = peer->free_hint;
	uint16_t generation;

	while (slot < peer->nr_handles && peer->handles[slot].type != EXL3_HANDLE_NONE)
		slot++;
	peer->free_hint = slot; /* also if it is none: not to be looked for again */
	if (slot >= EXL3_HANDLES_MAX)
		return exl3_errf(err, -EDQUOT, "a client may have %u handles open",
				 EXL3_HANDLES_MAX);
	if (slot == peer->nr_handles && (exl3_fault("peer.handles") || grow_handles(peer) < 0))
		return exl3_errf(err, -ENOMEM, "handles: out of memory");
	generation = (uint16_t)(peer->handles[slot].generation + 1);
	if (!generation)
		generation = 1; /* so that no handle is 0 */
	handle_fill(peer, slot, h, generation);
	peer->free_hint = slot + 1;
	*ret = (uint32_t)generation << SLOT_BITS | slot;
	return 0;
}

struct exl3_handle *exl3_handle_find(struct exl3_peer *peer, uint32_t handle)
{
	uint32_t slot = handle & ((1u << SLOT_BITS) - 1);

	if (slot >= peer->nr_handles || peer->handles[slot].type == EXL3_HANDLE_NONE ||
	    peer->handles[slot].generation != handle >> SLOT_BITS)
		return NULL;
	return &peer->handles[slot];
}

void exl3_handle_close(struct exl3_peer *peer, struct exl3_handle *h)
{
	uint32_t slot = (uint32_t)(h - peer->handles);

	if (h->type == EXL3_HANDLE_MODEL)
		h->model->opened--;
	peer->nr_open[h->type]--;
	exl3_registered_put(h->model);
	exl3_recorded_put(h->plan);
	*h = (struct exl3_handle){.generation = h->generation};
	if (slot < peer->free_hint)
		peer->free_hint = slot;
}

int exl3_peer_target(void *arg, uint32_t handle, struct exl3_target *ret)
{
	struct exl3_handle *h = exl3_handle_find(arg, handle);

	*ret = (struct exl3_target){0};
	if (!h || h->type == EXL3_HANDLE_MODEL || h->type == EXL3_HANDLE_PLAN)
		return -ENOENT;
	if (h->type == EXL3_HANDLE_MLA) {
		ret->mla = &h->mla;
		ret->device = h->device;
		return 0;
	}
	if (h->model->state != EXL3_MODEL_READY)
		return -ESTALE; /* unloaded: what desc points to may be gone */
	ret->desc = h->desc;
	ret->model = h->model;
	ret->device = h->model->device->index;
	return 0;
}

struct exl3_recorded *exl3_peer_plan(void *arg, uint32_t handle)
{
	struct exl3_handle *h = exl3_handle_find(arg, handle);

	return h && h->type == EXL3_HANDLE_PLAN ? h->plan : NULL;
}

/* ---- buffers ---- */

static uint32_t add_buffer_as(struct exl3_peer *peer, struct exl3_buffer *buf, uint32_t want)
{
	uint32_t slot = want & ((1u << BUFFER_SLOT_BITS) - 1), generation = want >> BUFFER_SLOT_BITS;

	if (slot >= EXL3_BUFFERS_MAX || !generation || generation > 63 || peer->buffers[slot])
		return 0;
	peer->buffers[slot] = buf;
	peer->nr_buffers++;
	peer->buffer_generation[slot] = (uint8_t)generation;
	return want;
}

uint32_t exl3_peer_add_buffer(struct exl3_peer *peer, struct exl3_buffer *buf, uint32_t want)
{
	if (want)
		return add_buffer_as(peer, buf, want);
	for (uint32_t slot = 0; slot < EXL3_BUFFERS_MAX; slot++) {
		if (peer->buffers[slot])
			continue;
		peer->buffers[slot] = buf;
		peer->nr_buffers++;
		/* 1..63 in the upper six bits, so that an id is never 0. */
		peer->buffer_generation[slot] = (uint8_t)(peer->buffer_generation[slot] % 63 + 1);
		return (uint32_t)peer->buffer_generation[slot] << BUFFER_SLOT_BITS | slot;
	}
	return 0;
}

static uint32_t buffer_slot(const struct exl3_peer *peer, uint32_t id)
{
	uint32_t slot = id & ((1u << BUFFER_SLOT_BITS) - 1);

	if (slot >= EXL3_BUFFERS_MAX || !peer->buffers[slot] ||
	    peer->buffer_generation[slot] != id >> BUFFER_SLOT_BITS)
		return UINT32_MAX;
	return slot;
}

struct exl3_buffer *exl3_peer_buffer(void *arg, uint32_t id)
{
	struct exl3_peer *peer = arg;
	uint32_t slot = buffer_slot(peer, id);

	return slot == UINT32_MAX ? NULL : peer->buffers[slot];
}

struct exl3_buffer_job {
	struct exl3_job job;
	struct exl3_worker *w;
	struct exl3_arena *arena;
	const struct exl3_device *maker; /* of the arena */
	struct exl3_buffer *buf;
	/* Dropped by its client while requests use it: it goes on counting, or a client could have as much
	 * memory as it likes behind one long request. */
	struct exl3_peer *peer;              /* NULL: not dropped, or the client has left */
	struct exl3_buffer_job *next, *prev; /* in peer->dropped */
};

static void dropped_add(struct exl3_peer *peer, struct exl3_buffer_job *b)
{
	b->peer = peer;
	b->prev = NULL;
	b->next = peer->dropped;
	if (b->next)
		b->next->prev = b;
	peer->dropped = b;
}

static void dropped_del(struct exl3_buffer_job *b)
{
	b->peer->arena_bytes -= b->buf->bytes;
	if (b->prev)
		b->prev->next = b->next;
	else
		b->peer->dropped = b->next;
	if (b->next)
		b->next->prev = b->prev;
	b->peer = NULL;
}

static void run_buffer_free(struct exl3_job *job)
{
	struct exl3_buffer_job *b = (struct exl3_buffer_job *)job;

	b->maker->ops->arena_free(b->arena);
}

static void done_buffer_free(struct exl3_job *job)
{
	struct exl3_buffer_job *b = (struct exl3_buffer_job *)job;

	free(b->buf);
	free(b); /* its owner */
}

/* Unmapping a large arena takes long: off the loop, with the job that was kept ready for it. */
void exl3_buffer_free(void *arg, struct exl3_buffer *buf)
{
	struct exl3_worker *w = arg;
	struct exl3_buffer_job *b = buf->owner;

	if (b->peer)
		dropped_del(b);
	exl3_buffer_uncharge(buf);
	*b = (struct exl3_buffer_job){
		.w = w, .arena = buf->arena, .maker = buf->maker, .buf = buf};
	b->job.run = run_buffer_free;
	b->job.done = done_buffer_free;
	exl3_jobs_add(w->memory, &b->job);
}

struct exl3_buffer *exl3_buffer_new(void)
{
	struct exl3_buffer *buf = calloc(1, sizeof(*buf));
	struct exl3_buffer_job *b;

	if (!buf)
		return NULL;
	buf->owner = b = calloc(1, sizeof(*b));
	if (!b) {
		free(buf);
		return NULL;
	}
	b->buf = buf;
	buf->refs = 1;
	return buf;
}

int exl3_buffer_charge(struct exl3_buffer *buf, struct exl3_tenant *tenant,
		       enum exl3_metric_kind kind, uint64_t bytes, struct exl3_error *err)
{
	int rc = exl3_tenant_charge(tenant, kind, bytes, err);

	if (rc < 0)
		return rc;
	buf->tenant = exl3_tenant_get(tenant);
	buf->charged = bytes;
	buf->kind = (uint8_t)kind;
	return 0;
}

void exl3_buffer_recharge(struct exl3_buffer *buf, uint64_t bytes)
{
	if (!buf->tenant)
		return;
	/* It is there already, whatever the limit. */
	buf->tenant->bytes += bytes - buf->charged;
	buf->tenant->by_kind[buf->kind] += bytes - buf->charged;
	buf->charged = bytes;
}

void exl3_buffer_uncharge(struct exl3_buffer *buf)
{
	if (!buf->tenant)
		return;
	exl3_tenant_uncharge(buf->tenant, buf->kind, buf->charged);
	buf->tenant = exl3_tenant_put(buf->tenant);
	buf->charged = 0;
}

static void move_buffer(struct exl3_buffer *buf, struct exl3_tenant *to)
{
	uint64_t charged = buf->charged;

	if (!buf->tenant)
		return;
	exl3_buffer_uncharge(buf);
	buf->tenant = exl3_tenant_get(to);
	exl3_buffer_recharge(buf, charged);
}

int exl3_peer_drop_buffer(struct exl3_peer *peer, uint32_t id)
{
	uint32_t slot = buffer_slot(peer, id);
	struct exl3_buffer *buf;

	if (slot == UINT32_MAX)
		return -ENOENT;
	buf = peer->buffers[slot];
	peer->buffers[slot] = NULL;
	peer->nr_buffers--;
	dropped_add(peer, buf->owner);
	if (--buf->refs == 0)
		exl3_buffer_free(peer->w, buf);
	return 0;
}

/* ---- replies ---- */

static void reply_free(struct exl3_reply_queued *reply)
{
	for (unsigned i = 0; i < reply->nr_fds; i++)
		exl3_closep(&reply->fds[i]);
	free(reply);
}

static int reply_queue(struct exl3_peer *peer, const void *data, size_t bytes, const int *fds,
		       unsigned nr_fds)
{
	struct exl3_reply_queued *reply = malloc(sizeof(*reply) + bytes);

	if (!reply)
		return -ENOMEM;
	reply->next = NULL;
	reply->bytes = bytes;
	memcpy(reply->data, data, bytes);
	/* Duplicates: what they stand for may be closed before the client reads. */
	for (reply->nr_fds = 0; reply->nr_fds < nr_fds; reply->nr_fds++) {
		reply->fds[reply->nr_fds] = fcntl(fds[reply->nr_fds], F_DUPFD_CLOEXEC, 0);
		if (reply->fds[reply->nr_fds] < 0) {
			reply_free(reply);
			return -errno;
		}
	}
	*peer->replies_tail = reply;
	peer->replies_tail = &reply->next;
	peer->nr_replies++;
	return 0;
}

void exl3_peer_send(struct exl3_peer *peer, const void *data, size_t bytes, const int *fds,
		    unsigned nr_fds)
{
	int rc = -EAGAIN;

	if (peer->closing)
		return;
	if (!peer->replies)
		rc = exl3_frame_send(peer->fd, data, bytes, fds, nr_fds, EXL3_FRAME_NOWAIT, NULL);
	if (rc == 0)
		return;
	if (rc != -EAGAIN && rc != -ENOBUFS) {
		exl3_peer_disconnect(peer, strerror(-rc));
		return;
	}
	if (peer->nr_replies >= EXL3_REPLIES_MAX) {
		exl3_peer_disconnect(peer, "it does not read its replies");
		return;
	}
	rc = reply_queue(peer, data, bytes, fds, nr_fds);
	if (rc < 0)
		exl3_peer_disconnect(peer, strerror(-rc));
	exl3_peer_rewatch(peer);
}

static void flush_replies(struct exl3_peer *peer)
{
	struct exl3_reply_queued *reply;
	int rc;

	while ((reply = peer->replies)) {
		rc = exl3_frame_send(peer->fd, reply->data, reply->bytes, reply->fds, reply->nr_fds,
				     EXL3_FRAME_NOWAIT, NULL);
		if (rc == -EAGAIN || rc == -ENOBUFS)
			return;
		if (rc < 0) {
			exl3_peer_disconnect(peer, strerror(-rc));
			return;
		}
		peer->replies = reply->next;
		if (!peer->replies)
			peer->replies_tail = &peer->replies;
		peer->nr_replies--;
		reply_free(reply);
	}
}

void exl3_peer_rewatch(struct exl3_peer *peer)
{
	uint32_t events = POLLRDHUP;

	/* One reply per request, in order: while one is owed, the next request waits in the socket. */
	if (peer->waiting == EXL3_WAIT_NONE)
		events |= POLLIN;
	if (peer->replies)
		events |= POLLOUT;
	if (peer->watch)
		exl3_watch_set(peer->w->loop, peer->watch, events);
}

void exl3_peer_disconnect(struct exl3_peer *peer, const char *why)
{
	if (peer->closing)
		return;
	peer->closing = true;
	exl3_log_limited(EXL3_LOG_INFO, "%s: disconnected: %s", peer->who, why);
	/* Wakes our own watch, which frees the peer when nobody is using it. */
	shutdown(peer->fd, SHUT_RDWR);
}

/* ---- requests ---- */

static void read_requests(struct exl3_peer *peer)
{
	static char packet[EXL3_PACKET_MAX]; /* loop thread only */
	struct exl3_error err;
	int fds[EXL3_FRAME_FDS_MAX], n;
	unsigned nr_fds;

	for (int i = 0; i < PACKETS_PER_TURN && !peer->closing && !peer->waiting; i++) {
		n = exl3_frame_recv(peer->fd, packet, sizeof(packet), fds, EXL3_FRAME_FDS_MAX,
				    &nr_fds, EXL3_FRAME_NOWAIT | EXL3_FRAME_KEEP, &err);
		if (n >= 0 && nr_fds <= EXL3_FDS_MAX)
			exl3_control_request(peer, packet, (size_t)n, fds, nr_fds);
		/* Room for all that fit, so that none has its last close in the kernel's hands, which might
		 * wait for something. */
		for (unsigned j = 0; j < nr_fds; j++)
			if (fds[j] >= 0)
				exl3_loop_close(peer->w->loop, &fds[j]);
		if (n == -EAGAIN || n == -EINTR)
			return;
		if (n == -ECONNRESET) {
			peer->closing = true; /* it has left: nothing to report */
			return;
		}
		/* The packet is lost and with it the request's id: no reply could be matched. */
		if (n < 0)
			exl3_peer_disconnect(peer, err.text);
		else if (nr_fds > EXL3_FDS_MAX)
			exl3_peer_disconnect(peer, "it sends descriptors by the dozen");
	}
}

static void on_peer(void *arg, uint32_t events)
{
	struct exl3_peer *peer = arg;

	if (events & POLLOUT && !peer->closing)
		flush_replies(peer);
	/* The end of its side comes after what it has sent, unless it waits: then nobody wants the reply. */
	if (peer->waiting && events & (POLLRDHUP | POLLHUP | POLLERR))
		peer->closing = true;
	else if (events & ~(uint32_t)POLLOUT && !peer->closing)
		read_requests(peer);
	if (peer->closing) {
		exl3_peer_free(peer);
		return;
	}
	exl3_peer_rewatch(peer);
}

/* ---- life ---- */

static void set_who(struct exl3_peer *peer)
{
	snprintf(peer->who, sizeof(peer->who), "client %d (%s)", (int)peer->id.pid,
		 peer->name[0] ? peer->name : "unnamed");
}

void exl3_printable(char *to, size_t size, const char *text)
{
	snprintf(to, size, "%s", text ? text : "");
	for (char *p = to; *p; p++) {
		if ((unsigned char)*p < ' ' || *p == 0x7f)
			*p = '?';
	}
}

void exl3_peer_set_name(struct exl3_peer *peer, const char *name)
{
	exl3_printable(peer->name, sizeof(peer->name), name);
	set_who(peer);
}

bool exl3_peer_admin(const struct exl3_peer *peer)
{
	return peer->privileged || peer->tenant->conf.admin;
}

int exl3_peer_check_model(const struct exl3_peer *peer, const char *model, struct exl3_error *err)
{
	return peer->privileged ? 0 : exl3_tenant_check_model(peer->tenant, model, err);
}

/* Places are for many users: one alone cannot take all of them. */
static int check_places(const struct exl3_peer *peer, struct exl3_error *err)
{
	const struct exl3_config *cfg = peer->w->cfg;
	uint64_t max = cfg->clients_per_user, nr = 0;

	if (peer->w->nr_peers - peer->w->nr_refused >= cfg->clients_max)
		return exl3_errf(err, -EDQUOT,
				 "%llu clients are connected, more are not allowed (clients-max): "
				 "close one",
				 (unsigned long long)cfg->clients_max);
	if (!max)
		max = cfg->clients_max - cfg->clients_max / 8;
	if (peer->privileged)
		return 0;
	for (const struct exl3_peer *p = peer->w->peers; p; p = p->next)
		nr += p->id.uid == peer->id.uid && !p->refused;
	if (nr < max)
		return 0;
	return exl3_errf(err, -EDQUOT,
			 "client refused: one user may have %llu clients (clients-per-user), uid %u "
			 "has %llu",
			 (unsigned long long)max, (unsigned)peer->id.uid, (unsigned long long)nr);
}

static int check_connect(const struct exl3_peer *peer, struct exl3_error *err)
{
	if (peer->tenant->conf.connect || peer->privileged)
		return 0;
	return exl3_errf(err, -EPERM,
			 "client refused: uid %u is of tenant %s, which may not connect (connect)",
			 (unsigned)peer->id.uid, peer->tenant->conf.name);
}

/* Whether it is served, or only told why not. */
static void admit(struct exl3_peer *peer)
{
	int rc = check_connect(peer, &peer->refusal);

	if (rc == 0)
		rc = check_places(peer, &peer->refusal);
	if (rc == 0)
		rc = exl3_tenant_add_client(peer->tenant, &peer->refusal);
	peer->refused = rc < 0;
	peer->counted = rc == 0;
	if (rc < 0)
		exl3_log_limited(EXL3_LOG_INFO, "%s: %s", peer->who, peer->refusal.text);
}

int exl3_peer_new(struct exl3_worker *w, int fd, struct exl3_error *err)
{
	struct exl3_peer *peer = exl3_fault("peer.new") ? NULL : calloc(1, sizeof(*peer));
	int rc;

	if (!peer)
		return exl3_errf(err, -ENOMEM, "client: out of memory");
	rc = exl3_identity_read(fd, &peer->id, err);
	if (rc < 0) {
		free(peer);
		return rc;
	}
	peer->w = w;
	peer->fd = fd;
	peer->privileged = peer->id.uid == 0 || peer->id.uid == geteuid();
	peer->connected_ns = exl3_now_ns();
	peer->replies_tail = &peer->replies;
	set_who(peer);
	rc = exl3_watch_add(w->loop, fd, POLLIN | POLLRDHUP, EXL3_WATCH_LEVEL, on_peer, peer,
			    &peer->watch);
	if (rc < 0) {
		rc = exl3_errf(err, rc, "%s: out of memory", peer->who);
		exl3_identity_fini(&peer->id);
		free(peer);
		return rc;
	}
	peer->tenant = exl3_policy_match(&w->policy, &peer->id);
	admit(peer);
	if (peer->refused && w->nr_refused >= REFUSED_MAX) {
		rc = exl3_errf(err, -EDQUOT, "%s was turned away: many that are refused are "
			       "connected", peer->who);
		exl3_watch_drop(w->loop, peer->watch);
		exl3_identity_fini(&peer->id);
		free(peer);
		return rc;
	}
	exl3_tenant_get(peer->tenant);
	w->nr_refused += peer->refused;
	peer->next = w->peers;
	if (peer->next)
		peer->next->prev = peer;
	w->peers = peer;
	w->nr_peers++;
	exl3_dbg("%s: connected, tenant %s", peer->who, peer->tenant->conf.name);
	return 0;
}

/* All that it holds counts against another tenant from now on. */
static void move_peer(struct exl3_peer *peer, struct exl3_tenant *to)
{
	struct exl3_buffer *making = exl3_arena_job_buffer(peer);

	exl3_info("%s: is of tenant %s now", peer->who, to->conf.name);
	for (uint32_t i = 0; i < EXL3_CHANNELS_MAX; i++) {
		if (peer->channels[i])
			exl3_channel_set_tenant(peer->channels[i], to);
	}
	for (uint32_t i = 0; i < EXL3_BUFFERS_MAX; i++) {
		if (peer->buffers[i])
			move_buffer(peer->buffers[i], to);
	}
	for (struct exl3_buffer_job *b = peer->dropped; b; b = b->next)
		move_buffer(b->buf, to);
	if (making)
		move_buffer(making, to);
	peer->tenant->clients -= peer->counted;
	to->clients += peer->counted;
	exl3_tenant_put(peer->tenant);
	peer->tenant = exl3_tenant_get(to);
}

/* May it still use the models of it? */
static int check_handle(const struct exl3_peer *peer, const struct exl3_handle *h, struct exl3_error *err)
{
	const struct exl3_registered *model = h->model;
	uint32_t i = 0;

	if (h->plan)
		model = exl3_recorded_model(h->plan, i++);
	while (model) {
		int rc = exl3_peer_check_model(peer, model->name, err);

		if (rc < 0)
			return rc;
		model = h->plan ? exl3_recorded_model(h->plan, i++) : NULL;
	}
	return 0;
}

void exl3_peer_reconsider(struct exl3_peer *peer)
{
	struct exl3_tenant *t = exl3_policy_match(&peer->w->policy, &peer->id);
	struct exl3_error err;

	if (t != peer->tenant)
		move_peer(peer, t);
	if (!peer->tenant->conf.mapped)
		exl3_mappers_revoke(peer);
	if (check_connect(peer, &err) < 0) {
		exl3_mappers_revoke(peer); /* the end of the connection alone would be that of a worker */
		exl3_control_farewell(peer, &err);
		return;
	}
	for (uint32_t i = 0; i < peer->nr_handles; i++) {
		if (check_handle(peer, &peer->handles[i], &err) < 0) {
			exl3_mappers_revoke(peer);
			exl3_control_farewell(peer, &err);
			return;
		}
	}
}

struct exl3_peer *exl3_peer_free(struct exl3_peer *peer)
{
	struct exl3_worker *w;
	struct exl3_reply_queued *reply;

	if (!peer)
		return NULL;
	w = peer->w;
	exl3_dbg("%s: gone, %llu requests", peer->who, (unsigned long long)peer->counters.requests);
	/* Channels first: what they have queued lets go of handles and buffers. */
	for (uint32_t i = 0; i < EXL3_CHANNELS_MAX; i++)
		peer->channels[i] = exl3_channel_close(peer->channels[i]);
	exl3_mappers_free(peer);
	for (uint32_t i = 0; i < peer->nr_handles; i++) {
		if (peer->handles[i].type != EXL3_HANDLE_NONE)
			exl3_handle_close(peer, &peer->handles[i]);
	}
	free(peer->handles);
	exl3_plan_count_put(peer->plan_count);
	while (peer->dropped)
		dropped_del(peer->dropped);
	for (uint32_t i = 0; i < EXL3_BUFFERS_MAX; i++) {
		if (peer->buffers[i] && --peer->buffers[i]->refs == 0)
			exl3_buffer_free(w, peer->buffers[i]);
	}
	while ((reply = peer->replies)) {
		peer->replies = reply->next;
		reply_free(reply);
	}
	exl3_control_forget(peer);
	exl3_watch_drop(w->loop, peer->watch);
	if (!peer->passed)
		shutdown(peer->fd, SHUT_RDWR); /* its end is seen at once, whatever the close waits for */
	exl3_loop_close(w->loop, &peer->fd);
	if (peer->prev)
		peer->prev->next = peer->next;
	else
		w->peers = peer->next;
	if (peer->next)
		peer->next->prev = peer->prev;
	w->nr_peers--;
	w->nr_refused -= peer->refused;
	peer->tenant->clients -= peer->counted;
	exl3_tenant_put(peer->tenant);
	exl3_identity_fini(&peer->id);
	free(peer);
	return NULL;
}
