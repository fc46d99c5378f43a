/* SPDX-License-Identifier: Apache-2.0 */
/* admin.c - the supervisor's own socket: what is kept, and the hand-over to another daemon. */
#include "daemon/admin.h"

#include "daemon/log.h"
#include "daemon/takeover.h"
#include "proto/frame.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define LINE_MAX_BYTES  1024u  /* of a request */
#define PACKET_MAX      16384u /* of an answer */
#define REQUESTS_MAX    16     /* of one connection per turn of the loop */
#define REST_NS         100000000ull

struct conn {
	struct exl3_admin *admin;
	int fd; /* owned, -1: free */
	struct exl3_watch *watch;
	struct exl3_takeover takeover;
};

struct exl3_admin {
	struct exl3_loop *loop; /* borrowed, as the next two */
	const struct exl3_listener *listener;
	struct exl3_share *share;
	struct exl3_admin_ops ops;
	int fd; /* owned; listening */
	struct exl3_watch *watch;
	struct exl3_timer rest; /* armed: out of descriptors, nobody is taken */
	struct conn conns[EXL3_ADMIN_MAX];
	char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
};

int exl3_admin_path(const char *socket, char *path, size_t size, struct exl3_error *err)
{
	int n = snprintf(path, size, "%s.admin", socket);

	if (n < 0 || (size_t)n >= size)
		return exl3_errf(err, -ENAMETOOLONG, "socket path '%s' is too long", socket);
	return 0;
}

static void hang_up(struct conn *c)
{
	if (c->takeover.state == EXL3_TAKEOVER_GOING)
		exl3_warn("the daemon that was to take over has gone: going on");
	c->watch = exl3_watch_drop(c->admin->loop, c->watch);
	exl3_loop_close(c->admin->loop, &c->fd);
	c->takeover = (struct exl3_takeover){0};
}

static bool say(struct conn *c, const char *text)
{
	if (c->fd < 0)
		return false;
	if (exl3_frame_send(c->fd, text, strlen(text), NULL, 0, EXL3_FRAME_NOWAIT, NULL) == 0)
		return true;
	hang_up(c);
	return false;
}

static void say_error(struct conn *c, const struct exl3_error *err)
{
	char text[EXL3_ERROR_TEXT_MAX + 16];

	snprintf(text, sizeof(text), "error %s", err->text);
	say(c, text);
}

/* ---- verbs ---- */

/* One line per descriptor of a set. */
static void describe(const struct exl3_share *share, const struct exl3_keep_set *set, char *text,
		     size_t size)
{
	char users[EXL3_DOMAINS_MAX * (EXL3_DOMAIN_NAME_MAX + 1)];
	size_t len = 0;

	exl3_share_users(share, set, users, sizeof(users));
	for (unsigned i = 0; i < set->nr_fds && len < size; i++) {
		bool tensors = i > set->head.nr_slabs;
		uint64_t bytes = !i        ? set->head.bytes
				 : tensors ? set->head.tensor_bytes
					   : set->head.slab_bytes;

		len += (size_t)snprintf(text + len, size - len,
					"%s\t%s\t%" PRIu64 "\t%s\t%u\t%s\t%s\t%s\n", set->head.name,
					!i ? "manifest" : tensors ? "tensors" : "slab", bytes,
					!i || tensors ? "host" : set->head.device,
					set->head.generation, set->in_store ? "systemd" : "-",
					set->mapped ? "mapped" : "-", users);
	}
}

static void list(struct conn *c)
{
	const struct exl3_share *share = c->admin->share;
	static char packet[PACKET_MAX + 8192]; /* loop thread only */
	char lines[8192];
	size_t len = 0;

	for (const struct exl3_keep_set *set = share->keep.sets; set; set = set->next) {
		describe(share, set, lines, sizeof(lines));
		len += (size_t)snprintf(packet + len, sizeof(packet) - len, "%s", lines);
		if (len < PACKET_MAX)
			continue;
		if (!say(c, packet))
			return;
		len = 0;
	}
	if (!len || say(c, packet))
		say(c, "ok");
}

static void list_domains(struct conn *c)
{
	static const char *const words[] = {[EXL3_DOMAIN_STARTING] = "starting",
					    [EXL3_DOMAIN_SERVING] = "serving",
					    [EXL3_DOMAIN_BACKOFF] = "restarting",
					    [EXL3_DOMAIN_FAILED] = "given-up",
					    [EXL3_DOMAIN_ENDED] = "ended"};
	const struct exl3_domains *all = c->admin->share->domains[0].all;
	char text[1024];

	for (uint32_t i = 0; i < all->nr; i++) {
		const struct exl3_domain *d = &all->list[i];
		const char *pipe = exl3_mps_pipe(&d->mps);

		snprintf(text, sizeof(text), "%s\t%s\t%u\t%d\t%u\t%u\t%s\t%s\n", d->name,
			 d->draining && d->worker ? "draining" : words[d->state], d->generation,
			 (int)d->worker, d->restarts, d->nr_waiting, pipe ? pipe : "-", d->says);
		if (!say(c, text))
			return;
	}
	say(c, "ok");
}

static void list_events(struct conn *c)
{
	const struct exl3_events *events = &c->admin->share->domains[0].all->events;
	static char packet[PACKET_MAX + EXL3_EVENT_LINE_MAX + 2]; /* loop thread only */
	const struct exl3_event *e;
	size_t len = 0;

	for (e = exl3_events_from(events, 0); e; e = exl3_events_from(events, e->id + 1)) {
		exl3_event_format(e, packet + len);
		len += strlen(packet + len);
		packet[len++] = '\n';
		packet[len] = 0;
		if (len < PACKET_MAX)
			continue;
		if (!say(c, packet))
			return;
		len = 0;
	}
	if (!len || say(c, packet))
		say(c, "ok");
}

static void drop(struct conn *c, const char *name)
{
	struct exl3_error err;

	if (exl3_keep_drop(&c->admin->share->keep, name)) {
		exl3_info("model %s: its weights are not kept any more, an administrator says", name);
		say(c, "ok");
		return;
	}
	exl3_errf(&err, -ENOENT, "nothing is kept of a model '%.100s'", name);
	say_error(c, &err);
}

bool exl3_admin_hands_over(const struct exl3_admin *admin)
{
	for (unsigned i = 0; admin && i < EXL3_ADMIN_MAX; i++) {
		if (admin->conns[i].takeover.state != EXL3_TAKEOVER_NONE)
			return true;
	}
	return false;
}

static void takeover(struct conn *c, const char *version)
{
	struct exl3_error err;

	/* Whoever takes over serves as soon as we are gone: one, or there would be two. */
	if (c->admin->ops.leaving(c->admin->ops.arg) || exl3_admin_hands_over(c->admin)) {
		exl3_errf(&err, -EBUSY, "%s",
			  exl3_admin_hands_over(c->admin) ? "another daemon is taking over already"
							  : "this daemon is about to end: start without "
							    "--takeover when it has");
		say_error(c, &err);
		return;
	}
	if (strcmp(version, EXL3_TAKEOVER_VERSION) != 0) {
		exl3_errf(&err, -EOPNOTSUPP,
			  "this daemon hands over in version " EXL3_TAKEOVER_VERSION
			  ", not %.20s: stop it and start the new one", version);
		say_error(c, &err);
		return;
	}
	exl3_info("another daemon asks for the weights, to take over");
	exl3_takeover_begin(&c->takeover);
}

static void ready(struct conn *c)
{
	if (c->takeover.state == EXL3_TAKEOVER_SENT && c->admin->ops.may_hand_over(c->admin->ops.arg)) {
		if (say(c, "go"))
			c->takeover.state = EXL3_TAKEOVER_GOING;
	} else {
		say(c, "wait");
	}
}

static void serving(struct conn *c)
{
	if (c->takeover.state != EXL3_TAKEOVER_GOING) {
		say(c, "error 'serving' is of use after 'go' only");
		return;
	}
	c->takeover.state = EXL3_TAKEOVER_DONE;
	c->admin->ops.hand_over(c->admin->ops.arg);
}

static void request(struct conn *c, const char *line)
{
	struct exl3_error err;

	if (strcmp(line, "fds") == 0) {
		list(c);
	} else if (strcmp(line, "domains") == 0) {
		list_domains(c);
	} else if (strcmp(line, "events") == 0) {
		list_events(c);
	} else if (strncmp(line, "drop ", 5) == 0) {
		drop(c, line + 5);
	} else if (strncmp(line, "takeover ", 9) == 0) {
		takeover(c, line + 9);
	} else if (strcmp(line, "ready") == 0) {
		ready(c);
	} else if (strcmp(line, "serving") == 0) {
		serving(c);
	} else {
		exl3_errf(&err, -EOPNOTSUPP, "this daemon does not know '%.40s'", line);
		say_error(c, &err);
	}
}

/* ---- connections ---- */

static void feed(struct conn *c)
{
	int rc = exl3_takeover_feed(&c->takeover, c->fd, c->admin->listener, c->admin->share);

	if (rc == -EAGAIN)
		exl3_watch_set(c->admin->loop, c->watch, POLLIN | POLLOUT);
	else if (rc < 0)
		hang_up(c);
	else
		exl3_watch_set(c->admin->loop, c->watch, POLLIN);
}

static void on_conn(void *arg, uint32_t events)
{
	struct conn *c = arg;
	char line[LINE_MAX_BYTES + 1];
	unsigned nr_fds;
	int n;

	(void)events;
	for (int i = 0; i < REQUESTS_MAX && c->fd >= 0; i++) {
		n = exl3_frame_recv(c->fd, line, LINE_MAX_BYTES, NULL, 0, &nr_fds, EXL3_FRAME_NOWAIT,
				    NULL);
		if (n == -EAGAIN)
			break;
		if (n < 0 && n != -EINTR) {
			hang_up(c);
			return;
		}
		if (n > 0) {
			line[n] = 0;
			request(c, line);
		}
	}
	if (c->fd >= 0 && c->takeover.state == EXL3_TAKEOVER_SENDING)
		feed(c);
}

static bool allowed(int fd)
{
	socklen_t len = sizeof(struct ucred);
	struct ucred cred;

	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0 &&
	       (cred.uid == 0 || cred.uid == geteuid());
}

static void on_listen(void *arg, uint32_t events)
{
	struct exl3_admin *admin = arg;
	struct conn *c = NULL;
	int fd = accept4(admin->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	(void)events;
	if (fd < 0) {
		if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
			exl3_watch_set(admin->loop, admin->watch, 0);
			exl3_timer_set(admin->loop, &admin->rest, exl3_now_ns() + REST_NS);
		}
		return;
	}
	for (unsigned i = 0; i < EXL3_ADMIN_MAX && !c; i++) {
		if (admin->conns[i].fd < 0)
			c = &admin->conns[i];
	}
	if (!c || !allowed(fd) ||
	    exl3_watch_add(admin->loop, fd, POLLIN, EXL3_WATCH_LEVEL, on_conn, c, &c->watch) < 0) {
		exl3_loop_close(admin->loop, &fd);
		return;
	}
	c->fd = fd;
}

static void on_rested(void *arg)
{
	struct exl3_admin *admin = arg;

	exl3_watch_set(admin->loop, admin->watch, POLLIN);
}

static int make_socket(struct exl3_admin *admin, struct exl3_error *err)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	mode_t old;
	int rc;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", admin->path);
	unlink(admin->path);
	admin->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (admin->fd < 0)
		return exl3_errf(err, -errno, "socket: %m");
	old = umask(0177); /* 0600 from its first moment on */
	rc = bind(admin->fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0 ||
	     listen(admin->fd, (int)EXL3_ADMIN_MAX) < 0;
	umask(old);
	return rc ? exl3_errf(err, -errno, "%s: %m", admin->path) : 0;
}

int exl3_admin_new(struct exl3_loop *loop, const struct exl3_listener *listener,
		   struct exl3_share *share, const struct exl3_admin_ops *ops,
		   struct exl3_admin **ret, struct exl3_error *err)
{
	struct exl3_admin *admin = calloc(1, sizeof(*admin));
	int rc;

	if (!admin)
		return exl3_errf(err, -ENOMEM, "out of memory");
	admin->loop = loop;
	admin->listener = listener;
	admin->share = share;
	admin->ops = *ops;
	admin->fd = -1;
	admin->rest.fn = on_rested;
	admin->rest.arg = admin;
	for (unsigned i = 0; i < EXL3_ADMIN_MAX; i++) {
		admin->conns[i].admin = admin;
		admin->conns[i].fd = -1;
	}
	rc = exl3_admin_path(listener->path, admin->path, sizeof(admin->path), err);
	if (rc == 0)
		rc = make_socket(admin, err);
	if (rc == 0 && exl3_watch_add(loop, admin->fd, POLLIN, EXL3_WATCH_LEVEL, on_listen, admin,
				      &admin->watch) < 0)
		rc = exl3_errf(err, -ENOMEM, "out of memory");
	if (rc < 0) {
		exl3_admin_free(admin, true);
		return rc;
	}
	*ret = admin;
	return 0;
}

struct exl3_admin *exl3_admin_free(struct exl3_admin *admin, bool remove)
{
	if (!admin)
		return NULL;
	for (unsigned i = 0; i < EXL3_ADMIN_MAX; i++)
		hang_up(&admin->conns[i]);
	exl3_timer_cancel(admin->loop, &admin->rest);
	admin->watch = exl3_watch_drop(admin->loop, admin->watch);
	if (remove && admin->fd >= 0)
		unlink(admin->path);
	exl3_closep(&admin->fd);
	free(admin);
	return NULL;
}
