/* SPDX-License-Identifier: Apache-2.0 */
/* control_memory.c - verbs for what a client's requests need: channels, arenas, MLA geometries. */
#include "daemon/control.h"

#include "daemon/fault.h"
#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#define ARENA_BYTES_MAX \
	(1ull << 46) /* a reference has 48 bits of offset; sums stay far from overflow */

/* ---- channels ---- */

int exl3_verb_create_channel(struct exl3_call *c)
{
	const struct exl3_worker *w = c->w;
	struct exl3_peer *peer = c->peer;
	uint32_t entries = c->req->create_channel->entries, slot = 0;
	Exl3__ChannelReply *reply = exl3_call_alloc(sizeof(*reply));
	struct exl3_channel_options opt = {
		.entries = entries,
		.generation = w->generation,
		.instance = w->instance,
		.counters = &peer->counters,
		.buffer = exl3_peer_buffer,
		.target = exl3_peer_target,
		.plan = exl3_peer_plan,
		.arg = peer,
		.who = peer->who,
		.tenant = peer->tenant,
	};
	int rc;

	if (!reply)
		return exl3_call_nomem(c);
	if (entries < EXL3_SQ_ENTRIES_MIN || entries > EXL3_SQ_ENTRIES_MAX ||
	    entries & (entries - 1))
		return exl3_errf(&c->err, -EINVAL,
				 "channel: %u entries is not a power of two, %u to %u", entries,
				 EXL3_SQ_ENTRIES_MIN, EXL3_SQ_ENTRIES_MAX);
	if (peer->nr_channels >= w->cfg->channels_max)
		return exl3_errf(&c->err, -EDQUOT, "channel: a client may have %llu (channels-max)",
				 (unsigned long long)w->cfg->channels_max);
	while (peer->channels[slot])
		slot++;
	opt.channel = slot + 1;
	rc = exl3_channel_open(w->dispatch, &opt, &peer->channels[slot], c->fds, &c->err);
	if (rc < 0)
		return rc;
	peer->nr_channels++;
	c->nr_fds = 3;
	c->close_fd = c->fds[2];
	exl3__channel_reply__init(reply);
	reply->channel = slot + 1;
	reply->bytes = exl3_channel_bytes(peer->channels[slot]);
	c->reply->body_case = EXL3__REPLY__BODY_CHANNEL;
	c->reply->channel = reply;
	return 0;
}

int exl3_verb_close_channel(struct exl3_call *c)
{
	struct exl3_peer *peer = c->peer;
	uint32_t slot = c->req->close_channel->channel - 1;

	if (slot >= EXL3_CHANNELS_MAX || !peer->channels[slot])
		return exl3_errf(&c->err, -ENOENT, "there is no channel %u",
				 c->req->close_channel->channel);
	peer->channels[slot] = exl3_channel_close(peer->channels[slot]);
	peer->nr_channels--;
	return 0;
}

/* ---- arenas ---- */

/* A descriptor that a client sends may be anything. Sealed, so that no access ends in a signal; of
 * ordinary pages, as huge ones come from a pool that can be empty when a page is touched. */
static int check_arena_fd(int fd, size_t bytes, struct exl3_error *err)
{
	const int size_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	struct stat st;
	struct statfs fs;
	int seals = fcntl(fd, F_GET_SEALS), flags = fcntl(fd, F_GETFL);

	if (seals < 0 || flags < 0 || fstat(fd, &st) < 0 || fstatfs(fd, &fs) < 0 ||
	    !S_ISREG(st.st_mode) || fs.f_type != TMPFS_MAGIC)
		return exl3_errf(err, -EINVAL, "arena: what was sent is no memfd of ordinary pages");
	if (seals != size_seals || (flags & O_ACCMODE) != O_RDWR)
		return exl3_errf(err, -EINVAL, "arena: what was sent is not sealed like an arena");
	if (st.st_size < 0 || (uint64_t)st.st_size != bytes)
		return exl3_errf(err, -EINVAL, "arena: %lld bytes were sent, announced were %zu",
				 (long long)st.st_size, bytes);
	return 0;
}

static int adopt(struct exl3_arena_job *a)
{
	const struct exl3_device *maker = a->buf->maker;
	int rc = check_arena_fd(a->fds[0], a->bytes, &a->err);

	if (rc == 0)
		rc = maker->ops->arena_adopt(maker->dev, a->fds[0], a->bytes, &a->buf->arena,
					     &a->err);
	if (rc == 0)
		a->fds[0] = -1;
	return rc;
}

static void run_arena(struct exl3_job *job)
{
	struct exl3_arena_job *a = (struct exl3_arena_job *)job;
	const struct exl3_device *maker = a->buf->maker;

	if (exl3_fault("arena.new")) {
		a->rc = exl3_errf(&a->err, -ENOMEM, "arena: out of memory");
		return;
	}
	switch (a->how) {
	case EXL3_ARENA_NEW:
		a->rc = maker->ops->arena_new(maker->dev, a->bytes, &a->buf->arena, &a->err);
		break;
	case EXL3_ARENA_NEW_DEVICE:
		a->rc = maker->ops->device_arena_new(maker->dev, a->bytes, &a->buf->arena, &a->err);
		break;
	case EXL3_ARENA_ADOPT:
		a->rc = adopt(a);
		break;
	case EXL3_ARENA_IMPORT:
		a->rc = maker->ops->import(maker->dev, &a->import, &a->buf->arena, &a->err);
		break;
	}
}

static int arena_reply(struct exl3_call *c, void *arg)
{
	struct exl3_arena_job *a = arg;
	Exl3__ArenaReply *reply = exl3_call_alloc(sizeof(*reply));
	uint32_t id = reply ? exl3_peer_add_buffer(c->peer, a->buf, a->want) : 0;

	if (!reply)
		return exl3_call_nomem(c);
	if (!id && a->want)
		return exl3_errf(&c->err, -EEXIST, "arena: the number %u is in use or none",
				 a->want);
	if (!id)
		return exl3_errf(&c->err, -EDQUOT, "a client may have %u buffers",
				 EXL3_BUFFERS_MAX);
	exl3__arena_reply__init(reply);
	reply->buffer = id;
	reply->bytes = a->buf->bytes;
	c->reply->body_case = EXL3__REPLY__BODY_ARENA;
	c->reply->arena = reply;
	if (a->how == EXL3_ARENA_NEW || a->how == EXL3_ARENA_NEW_DEVICE) {
		c->fds[0] = a->buf->arena->fd;
		c->nr_fds = 1;
	}
	a->buf = NULL;
	return 0;
}

static void set_addresses(struct exl3_buffer *buf, const struct exl3_devices *devices)
{
	buf->bytes = buf->arena->bytes;
	buf->device = buf->arena->device;
	for (uint32_t i = 0; i < devices->nr; i++)
		buf->base[i] = exl3_devices_address(&devices->list[i], buf->maker, buf->arena);
}

static void done_arena(struct exl3_job *job)
{
	struct exl3_arena_job *a = (struct exl3_arena_job *)job;
	struct exl3_peer *peer = a->peer;

	if (a->rc == 0)
		set_addresses(a->buf, &a->w->devices);
	if (a->rc == 0)
		exl3_buffer_recharge(a->buf, a->buf->bytes);
	if (peer) {
		peer->wait_arena = NULL;
		peer->arena_bytes -= a->bytes;
		if (a->rc == 0)
			peer->arena_bytes += a->buf->bytes;
		exl3_control_resume(peer, a->rc, a->err.text, arena_reply, a);
		if (a->rc == 0 && a->buf) /* it could not be given to the client */
			peer->arena_bytes -= a->buf->bytes;
	}
	if (a->buf && a->buf->arena) {
		exl3_buffer_free(a->w, a->buf);
	} else if (a->buf) {
		exl3_buffer_uncharge(a->buf);
		free(a->buf->owner);
		free(a->buf);
	}
	for (unsigned i = 0; i < a->nr_fds; i++)
		exl3_loop_close(a->w->loop, &a->fds[i]);
	free(a);
}

void exl3_arena_job_forget(struct exl3_peer *peer)
{
	if (peer->wait_arena)
		peer->wait_arena->peer = NULL;
	peer->wait_arena = NULL;
}

struct exl3_buffer *exl3_arena_job_buffer(const struct exl3_peer *peer)
{
	return peer->wait_arena ? peer->wait_arena->buf : NULL;
}

int exl3_arena_job_new(struct exl3_call *c, enum exl3_arena_how how, uint64_t bytes,
		       const struct exl3_device *maker, struct exl3_arena_job **ret)
{
	struct exl3_peer *peer = c->peer;
	uint64_t max = c->w->cfg->arena_max;
	struct exl3_arena_job *a;

	if (bytes == 0)
		return exl3_errf(&c->err, -EINVAL, "arena: it needs a size");
	if (max && (peer->arena_bytes > max || bytes > max - peer->arena_bytes))
		return exl3_errf(&c->err, -EDQUOT,
				 "arena: %llu bytes wanted, %llu held, %llu allowed (arena-max)",
				 (unsigned long long)bytes, (unsigned long long)peer->arena_bytes,
				 (unsigned long long)max);
	if (bytes > ARENA_BYTES_MAX)
		return exl3_errf(&c->err, -ENOMEM,
				 "arena: %llu bytes are more than any machine has",
				 (unsigned long long)bytes);
	if (how != EXL3_ARENA_IMPORT)
		bytes = (bytes + 4095) & ~4095ull;
	if (peer->nr_buffers >= EXL3_BUFFERS_MAX)
		return exl3_errf(&c->err, -EDQUOT, "a client may have %u buffers",
				 EXL3_BUFFERS_MAX);
	a = calloc(1, sizeof(*a));
	if (a)
		a->buf = exl3_buffer_new();
	if (!a || !a->buf) {
		free(a);
		return exl3_errf(&c->err, -ENOMEM, "arena: out of memory");
	}
	if (exl3_buffer_charge(a->buf, peer->tenant,
			       how == EXL3_ARENA_IMPORT ? EXL3_BYTES_IMPORT : EXL3_BYTES_ARENA,
			       bytes, &c->err) < 0) {
		free(a->buf->owner);
		free(a->buf);
		free(a);
		return c->err.code;
	}
	a->buf->maker = maker;
	a->w = c->w;
	a->peer = peer;
	a->how = how;
	a->bytes = bytes;
	a->job.run = run_arena;
	a->job.done = done_arena;
	*ret = a;
	return 0;
}

int exl3_arena_job_start(struct exl3_call *c, struct exl3_arena_job *a)
{
	for (; a->nr_fds < c->nr_req_fds; a->nr_fds++)
		a->fds[a->nr_fds] = exl3_take_fd(&c->req_fds[a->nr_fds]);
	c->peer->arena_bytes += a->bytes;
	c->peer->wait_arena = a;
	c->peer->waiting = EXL3_WAIT_ARENA;
	exl3_jobs_add(c->w->memory, &a->job);
	return 0;
}

static int no_descriptors(struct exl3_call *c)
{
	return c->nr_req_fds ? exl3_errf(&c->err, -EINVAL, "arena: %u descriptors, it takes none",
					 c->nr_req_fds)
			     : 0;
}

int exl3_verb_create_arena(struct exl3_call *c)
{
	const Exl3__CreateArena *req = c->req->create_arena;
	const struct exl3_device *maker = exl3_devices_for_arenas(&c->w->devices);
	enum exl3_arena_how how = EXL3_ARENA_NEW;
	struct exl3_arena_job *a;
	int rc = no_descriptors(c);

	if (rc == 0 && req->where == EXL3__WHERE__WHERE_DEVICE) {
		how = EXL3_ARENA_NEW_DEVICE;
		maker = exl3_devices_find(&c->w->devices, req->device, &c->err);
		if (!maker)
			return c->err.code;
		if (!maker->ops->device_arena_new)
			return exl3_errf(&c->err, -EOPNOTSUPP,
					 "arena: device %s has no memory of its own: take one in host "
					 "memory",
					 maker->name);
	} else if (rc == 0 && req->where != EXL3__WHERE__WHERE_HOST) {
		return exl3_errf(&c->err, -EINVAL, "arena: there is no place %d", (int)req->where);
	}
	if (rc == 0)
		rc = exl3_arena_job_new(c, how, req->bytes, maker, &a);
	return rc < 0 ? rc : exl3_arena_job_start(c, a);
}

int exl3_verb_adopt_arena(struct exl3_call *c)
{
	const Exl3__AdoptArena *req = c->req->adopt_arena;
	const struct exl3_device *maker = exl3_devices_for_arenas(&c->w->devices);
	struct exl3_arena_job *a;
	int rc;

	if (c->nr_req_fds != 1)
		return exl3_errf(&c->err, -EINVAL, "arena: %u descriptors, it takes one",
				 c->nr_req_fds);
	if (req->bytes % 4096)
		return exl3_errf(&c->err, -EINVAL, "arena: %llu bytes are not whole pages",
				 (unsigned long long)req->bytes);
	if (!maker->ops->arena_adopt)
		return exl3_errf(&c->err, -EOPNOTSUPP, "arena: this backend adopts none");
	rc = exl3_arena_job_new(c, EXL3_ARENA_ADOPT, req->bytes, maker, &a);
	if (rc < 0)
		return rc;
	a->want = req->buffer;
	return exl3_arena_job_start(c, a);
}

int exl3_verb_free_buffer(struct exl3_call *c)
{
	if (exl3_peer_drop_buffer(c->peer, c->req->free_buffer->buffer) < 0)
		return exl3_errf(&c->err, -ENOENT, "there is no buffer %u",
				 c->req->free_buffer->buffer);
	return 0;
}

/* ---- MLA geometries ---- */

int exl3_verb_register_mla(struct exl3_call *c)
{
	const Exl3__RegisterMla *m = c->req->register_mla;
	struct exl3_handle h = {.type = EXL3_HANDLE_MLA};
	Exl3__Handle *reply = exl3_call_alloc(sizeof(*reply));
	const struct exl3_device *device = exl3_devices_find(&c->w->devices, m->device, &c->err);
	int rc;

	if (!reply)
		return exl3_call_nomem(c);
	if (!device)
		return c->err.code;
	h.device = device->index;
	if (m->cache_dtype >= EXL3_DTYPE_NR || m->indices_dtype >= EXL3_DTYPE_NR)
		return exl3_errf(&c->err, -EINVAL, "mla: no such dtype");
	h.mla = (struct exl3_mla_geometry){
		.heads = m->heads,
		.dim = m->dim,
		.value_dim = m->value_dim,
		.topk = m->topk,
		.slots = m->slots,
		.cache_stride = m->cache_stride,
		.indices_stride = m->indices_stride,
		.cache_dtype = (uint8_t)m->cache_dtype,
		.indices_dtype = (uint8_t)m->indices_dtype,
		.page_rows = m->page_rows,
		.table_queries = m->table_queries,
	};
	rc = exl3_check_geometry(&h.mla, &c->err);
	if (rc < 0)
		return rc;
	exl3__handle__init(reply);
	rc = exl3_handle_add_as(c->peer, &h, m->handle, &reply->handle, &c->err);
	if (rc < 0)
		return rc;
	c->reply->body_case = EXL3__REPLY__BODY_HANDLE;
	c->reply->handle = reply;
	return 0;
}
