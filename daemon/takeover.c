/* SPDX-License-Identifier: Apache-2.0 */
/* takeover.c - one daemon gives everything that it keeps to another one, which serves in its place. */
#include "daemon/takeover.h"

#include "daemon/admin.h"
#include "daemon/domain.h"
#include "daemon/log.h"
#include "proto/frame.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#define WAIT_MS       10000 /* for one packet of the old daemon */
#define READY_WAIT_MS 1000
#define TEXT_MAX      (EXL3_SUP_TEXT_MAX + 16)

/* ---- the old side ---- */

void exl3_takeover_begin(struct exl3_takeover *t)
{
	*t = (struct exl3_takeover){.state = EXL3_TAKEOVER_SENDING};
}

static int say(int sock, const char *text, const int *fds, unsigned nr_fds)
{
	return exl3_frame_send(sock, text, strlen(text), fds, nr_fds, EXL3_FRAME_NOWAIT, NULL);
}

static int send_listener(int sock, const struct exl3_listener *l)
{
	int fds[2] = {l->fd, l->lock_fd};

	return say(sock, l->inherited ? "listen 1" : "listen 0", fds, l->lock_fd < 0 ? 1 : 2);
}

/* 1: there are no more. */
static int send_model(struct exl3_takeover *t, int sock, const struct exl3_share *share)
{
	const struct exl3_config *cfg = share->cfg;
	char text[TEXT_MAX] = "model ";
	int rc;

	while (t->model < cfg->nr_models && !cfg->models[t->model].by_client)
		t->model++;
	if (t->model >= cfg->nr_models)
		return 1;
	exl3_domains_model_spec(share->domains[0].all, &cfg->models[t->model], text + strlen(text));
	rc = say(sock, text, NULL, 0);
	if (rc == 0)
		t->model++;
	return rc;
}

static int send_set(struct exl3_takeover *t, int sock, const struct exl3_share *share)
{
	const struct exl3_keep_set *set = share->keep.sets;
	char text[EXL3_NAME_MAX + 16];
	int rc;

	while (set && strcmp(set->head.name, t->last) <= 0)
		set = set->next;
	if (!set)
		return 1;
	snprintf(text, sizeof(text), "%s %s", set->mapped ? "mapped" : "kept", set->head.name);
	rc = say(sock, text, set->fds, set->nr_fds);
	if (rc == 0)
		snprintf(t->last, sizeof(t->last), "%s", set->head.name);
	return rc;
}

int exl3_takeover_feed(struct exl3_takeover *t, int sock, const struct exl3_listener *listener,
		       struct exl3_share *share)
{
	int rc = 0;

	while (rc >= 0 && t->state == EXL3_TAKEOVER_SENDING) {
		switch (t->part) {
		case EXL3_TAKEOVER_LISTEN:
			rc = send_listener(sock, listener);
			if (rc == 0)
				t->part = EXL3_TAKEOVER_MODELS;
			break;
		case EXL3_TAKEOVER_MODELS:
			rc = send_model(t, sock, share);
			if (rc > 0)
				t->part = EXL3_TAKEOVER_KEPT;
			break;
		case EXL3_TAKEOVER_KEPT:
			rc = send_set(t, sock, share);
			if (rc > 0)
				t->part = EXL3_TAKEOVER_END;
			break;
		default:
			rc = say(sock, "end", NULL, 0);
			if (rc == 0)
				t->state = EXL3_TAKEOVER_SENT;
			break;
		}
	}
	return rc < 0 ? rc : 0;
}

/* ---- the new side ---- */

static int dial(const char *socket_path, int *ret, struct exl3_error *err)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	exl3_auto(exl3_closep) int fd = -1;
	int rc = exl3_admin_path(socket_path, addr.sun_path, sizeof(addr.sun_path), err);

	if (rc < 0)
		return rc;
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return exl3_errf(err, -errno, "socket: %m");
	if (connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0)
		return exl3_errf(err, -errno, "there is no daemon to take over from: %s: %m",
				 addr.sun_path);
	*ret = exl3_take_fd(&fd);
	return 0;
}

/* The next packet of the old daemon. */
static int hear(int sock, char *text, size_t size, int *fds, unsigned *nr_fds, int wait_ms,
		struct exl3_error *err)
{
	struct pollfd p = {.fd = sock, .events = POLLIN};
	int n;

	*nr_fds = 0;
	do {
		n = poll(&p, 1, wait_ms);
	} while (n < 0 && errno == EINTR);
	if (n == 0)
		return exl3_errf(err, -ETIMEDOUT, "the other daemon says nothing");
	n = exl3_frame_recv(sock, text, size - 1, fds, EXL3_FDS_MAX, nr_fds, 0, err);
	if (n < 0)
		return n == -ECONNRESET ? exl3_errf(err, -EPIPE, "the other daemon has gone") : n;
	text[n] = 0;
	return 0;
}

static int take_listener(struct exl3_listener *l, const char *path, bool inherited, int *fds,
			 unsigned nr_fds, struct exl3_error *err)
{
	if (nr_fds != (inherited ? 1u : 2u) || l->fd >= 0)
		return exl3_errf(err, -EPROTO, "%u descriptors came with the listening socket", nr_fds);
	if (sd_is_socket_unix(fds[0], SOCK_SEQPACKET, 1, NULL, 0) <= 0)
		return exl3_errf(err, -EPROTO, "what came is no listening socket");
	l->inherited = inherited;
	l->fd = exl3_take_fd(&fds[0]);
	if (!inherited)
		l->lock_fd = exl3_take_fd(&fds[1]);
	snprintf(l->path, sizeof(l->path), "%s", path);
	snprintf(l->lock, sizeof(l->lock), "%s.lock", l->path);
	return 0;
}

/* 1: that was the last one. */
static int take(struct exl3_config *cfg, struct exl3_keep *keep, struct exl3_listener *l,
		const char *text, int *fds, unsigned nr_fds, struct exl3_error *err)
{
	struct exl3_error why;
	const char *name;
	bool mapped;

	if (strcmp(text, "end") == 0)
		return l->fd < 0 ? exl3_errf(err, -EPROTO, "no listening socket came") : 1;
	if (strncmp(text, "error ", 6) == 0)
		return exl3_errf(err, -EOPNOTSUPP, "the other daemon: %s", text + 6);
	if (strncmp(text, "listen ", 7) == 0)
		return take_listener(l, cfg->socket, text[7] == '1', fds, nr_fds, err);
	if (strncmp(text, "model ", 6) == 0)
		return exl3_config_add_model(cfg, text + 6, true, err);
	mapped = strncmp(text, "mapped ", 7) == 0;
	if (!mapped && strncmp(text, "kept ", 5) != 0)
		return exl3_errf(err, -EPROTO, "'%.40s' is not understood", text);
	/* What cannot be kept, of another version maybe, is loaded anew. */
	name = text + (mapped ? 7 : 5);
	if (exl3_keep_put(keep, name, fds, nr_fds, &why) < 0)
		exl3_warn("model %.100s will be loaded anew: %s", name, why.text);
	else if (mapped)
		exl3_keep_mark_mapped(exl3_keep_find(keep, name));
	return 0;
}

int exl3_takeover_fetch(struct exl3_config *cfg, struct exl3_keep *keep, struct exl3_listener *ret,
			int *ret_sock, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int sock = -1;
	struct exl3_listener l = {.fd = -1, .lock_fd = -1};
	int fds[EXL3_FDS_MAX], rc = dial(cfg->socket, &sock, err);
	char text[TEXT_MAX];
	unsigned nr_fds;

	if (rc == 0)
		rc = exl3_frame_send(sock, "takeover " EXL3_TAKEOVER_VERSION,
				     strlen("takeover " EXL3_TAKEOVER_VERSION), NULL, 0, 0, err);
	while (rc == 0) {
		rc = hear(sock, text, sizeof(text), fds, &nr_fds, WAIT_MS, err);
		if (rc < 0)
			break;
		rc = take(cfg, keep, &l, text, fds, nr_fds, err);
		for (unsigned i = 0; i < nr_fds; i++)
			exl3_closep(&fds[i]);
	}
	if (rc < 0) {
		exl3_closep(&l.fd);
		exl3_closep(&l.lock_fd);
		return rc;
	}
	*ret = l;
	*ret_sock = exl3_take_fd(&sock);
	return 0;
}

int exl3_takeover_ready(int sock)
{
	int fds[EXL3_FDS_MAX], rc = exl3_frame_send(sock, "ready", 5, NULL, 0, 0, NULL);
	char text[64];
	unsigned nr_fds = 0;

	if (rc == 0)
		rc = hear(sock, text, sizeof(text), fds, &nr_fds, READY_WAIT_MS, NULL);
	for (unsigned i = 0; i < nr_fds; i++)
		exl3_closep(&fds[i]);
	if (rc == -ETIMEDOUT)
		return 0;
	return rc < 0 || strcmp(text, "go") == 0;
}

void exl3_takeover_serving(int sock)
{
	exl3_frame_send(sock, "serving", 7, NULL, 0, EXL3_FRAME_NOWAIT, NULL);
}
