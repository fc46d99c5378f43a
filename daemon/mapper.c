/* SPDX-License-Identifier: Apache-2.0 */
/* mapper.c - clients that have a model's weights in their own process. */
#include "daemon/mapper.h"

#include "daemon/fault.h"
#include "daemon/log.h"
#include "daemon/map_write.h"
#include "shm/exl3_map.h"
#include "shm/segment.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

struct exl3_mapper {
	struct exl3_mapper *next, *prev; /* in peer->mappers */
	struct exl3_peer *peer;
	struct exl3_registered *reg; /* counted, twice: as a handle is, and in its mappers */
	struct exl3_segment *page;   /* owned; struct exl3_map_state */
	int fd;                      /* owned; our end: watched for the end of the other one, never read */
	struct exl3_watch *watch;
	bool revoked;
};

static void mapper_free(struct exl3_mapper *m)
{
	struct exl3_loop *loop = m->peer->w->loop;

	if (m->watch)
		exl3_watch_drop(loop, m->watch);
	exl3_closep(&m->fd);
	exl3_segment_free(m->page);
	if (m->prev)
		m->prev->next = m->next;
	else
		m->peer->mappers = m->next;
	if (m->next)
		m->next->prev = m->prev;
	exl3_registered_unmap(m->reg);
	exl3_registered_put(m->reg);
	free(m);
}

static void on_end(void *arg, uint32_t events)
{
	struct exl3_mapper *m = arg;

	if (!(events & (POLLRDHUP | POLLHUP | POLLERR)))
		return;
	exl3_dbg("%s: no longer maps model %s", m->peer->who, m->reg->name);
	mapper_free(m);
}

/* The table is made when the first one wants it, and kept. */
static int table_of(const struct exl3_worker *w, struct exl3_registered *reg, struct exl3_error *err)
{
	uint32_t flags = w->cfg->deterministic ? EXL3_MAP_DETERMINISTIC : 0;

	if (reg->map_fd >= 0)
		return 0;
	return exl3_map_write(reg->model, reg->device->name, flags, &reg->map_fd, err);
}

/*
 * Whoever has memory of a device mapped can make his mapping writable, even after we are gone: whoever adopts the
 * weights must know before the client has them. A memfd is sealed against that.
 */
static int tell_supervisor(struct exl3_worker *w, struct exl3_registered *reg, struct exl3_error *err)
{
	struct exl3_sup_msg msg = {.type = EXL3_SUP_MAPPED, .generation = w->generation};
	int rc;

	if (reg->map_told || reg->model->ops->slab_seal)
		return 0;
	rc = exl3_fault("map.tell") ? -EPIPE : exl3_sup_send(w->control_fd, &msg, reg->name, NULL, 0, true);
	if (rc < 0)
		return exl3_errf(err, -EIO, "model %s: it cannot be noted that its weights are mapped: %s", reg->name,
				 strerror(-rc));
	reg->map_told = true;
	return 0;
}

static int check(const struct exl3_peer *peer, const struct exl3_registered *reg, struct exl3_error *err)
{
	if (!peer->tenant->conf.mapped)
		return exl3_errf(err, -EPERM,
				 "tenant %s may not map the weights of models (mapped): calls go through rings",
				 peer->tenant->conf.name);
	for (const struct exl3_mapper *m = peer->mappers; m; m = m->next) {
		if (m->reg == reg)
			return exl3_errf(err, -EBUSY, "this client has model %s mapped already", reg->name);
	}
	if (reg->model->slab->fd < 0)
		return exl3_errf(err, -EOPNOTSUPP, "the weights of model %s cannot be mapped by others", reg->name);
	return 0;
}

static void mapper_freep(struct exl3_mapper **m)
{
	if (!*m)
		return;
	exl3_closep(&(*m)->fd);
	exl3_segment_free((*m)->page);
	free(*m);
}

int exl3_mapper_new(struct exl3_peer *peer, struct exl3_registered *reg, int fds[EXL3_MAP_FDS],
		    struct exl3_error *err)
{
	exl3_auto(mapper_freep) struct exl3_mapper *m = NULL;
	exl3_auto(exl3_closep) int theirs = -1;
	int pair[2], rc = check(peer, reg, err);

	if (rc == 0)
		rc = table_of(peer->w, reg, err);
	if (rc < 0)
		return rc;
	m = exl3_fault("map.new") ? NULL : calloc(1, sizeof(*m));
	if (!m)
		return exl3_errf(err, -ENOMEM, "mapping: out of memory");
	m->fd = -1;
	rc = exl3_segment_new("map-state", sizeof(struct exl3_map_state), &m->page, err);
	if (rc < 0)
		return rc;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
		return exl3_errf(err, -errno, "mapping: socketpair: %m");
	m->fd = pair[0];
	theirs = pair[1];
	rc = tell_supervisor(peer->w, reg, err);
	if (rc < 0)
		return rc;
	if (exl3_watch_add(peer->w->loop, m->fd, POLLRDHUP, EXL3_WATCH_LEVEL, on_end, m, &m->watch) < 0)
		return exl3_errf(err, -ENOMEM, "mapping: out of memory");
	fds[0] = reg->model->slab->fd;
	fds[1] = reg->map_fd;
	fds[2] = m->page->fd;
	fds[3] = exl3_take_fd(&theirs);
	m->peer = peer;
	m->reg = exl3_registered_get(reg);
	exl3_registered_map(reg);
	m->next = peer->mappers;
	if (m->next)
		m->next->prev = m;
	peer->mappers = exl3_take_ptr(&m);
	exl3_info("%s: maps the weights of model %s", peer->who, reg->name);
	return 0;
}

void exl3_mapper_revoke(struct exl3_mapper *m)
{
	struct exl3_map_state *state = m->page->base;

	if (m->revoked)
		return;
	exl3_info("%s: is to let go of the weights of model %s", m->peer->who, m->reg->name);
	m->revoked = true;
	__atomic_store_n(&state->revoked, 1, __ATOMIC_SEQ_CST); /* before the end of the socket, which tells */
	shutdown(m->fd, SHUT_WR);
}

void exl3_mappers_revoke(struct exl3_peer *peer)
{
	for (struct exl3_mapper *m = peer->mappers; m; m = m->next)
		exl3_mapper_revoke(m);
}

void exl3_mappers_revoke_model(void *worker, struct exl3_registered *reg)
{
	struct exl3_worker *w = worker;

	for (struct exl3_peer *peer = w->peers; peer; peer = peer->next) {
		for (struct exl3_mapper *m = peer->mappers; m; m = m->next) {
			if (m->reg == reg)
				exl3_mapper_revoke(m);
		}
	}
}

void exl3_mappers_free(struct exl3_peer *peer)
{
	while (peer->mappers)
		mapper_free(peer->mappers);
}

uint32_t exl3_mapper_count(const struct exl3_peer *peer, uint32_t *revoked)
{
	uint32_t nr = 0;

	*revoked = 0;
	for (const struct exl3_mapper *m = peer->mappers; m; m = m->next) {
		nr++;
		*revoked += m->revoked;
	}
	return nr;
}
