/* SPDX-License-Identifier: Apache-2.0 */
/* metrics_http.c - a thread that answers GET /metrics on a Unix socket and, if asked for, a loopback port. */
#include "daemon/metrics_http.h"

#include "daemon/fault.h"
#include "daemon/log.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define CONNECTIONS_MAX 8
#define REQUEST_MAX     4096         /* bytes of a request's head */
#define PATIENCE_NS     5000000000ull /* for a whole request and its answer */
#define BACKLOG         16
#define RETRY_MS        2000

/* READING -> WRITING -> closed; fd -1: free. */
struct connection {
	int fd;
	uint64_t since_ns;
	char request[REQUEST_MAX];
	size_t have;
	char *answer; /* owned; NULL while READING */
	size_t bytes, sent;
};

struct exl3_metrics_http {
	const struct exl3_metrics *m;
	int unix_fd, tcp_fd, stop_fd; /* owned; -1: none */
	char path[108];               /* "": none was made */
	struct stat made;             /* there */
	uint16_t port;                /* 0: none is wanted */
	pthread_t thread;
	struct connection connections[CONNECTIONS_MAX];
};

static void hang_up(struct connection *c)
{
	exl3_closep(&c->fd);
	free(c->answer);
	*c = (struct connection){.fd = -1};
}

static void respond(struct connection *c, const char *status, const char *body, size_t bytes,
		    bool body_too)
{
	FILE *f = open_memstream(&c->answer, &c->bytes);

	if (!f) {
		hang_up(c);
		return;
	}
	fprintf(f,
		"HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
		"Content-Length: %zu\r\nConnection: close\r\n\r\n",
		status, bytes);
	if (body_too)
		fwrite(body, 1, bytes, f);
	if (fclose(f) != 0)
		hang_up(c);
}

static void respond_metrics(const struct exl3_metrics *m, struct connection *c, bool body_too)
{
	exl3_auto(exl3_freep) char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);

	if (f)
		exl3_metrics_print(m, f);
	if (f && fclose(f) == 0)
		respond(c, "200 OK", text, bytes, body_too);
	else
		hang_up(c);
}

/* The head is complete. */
static void answer(const struct exl3_metrics *m, struct connection *c)
{
	static const char no_page[] = "the metrics are at /metrics\n", no_method[] = "only GET and HEAD\n";
	bool get = strncmp(c->request, "GET ", 4) == 0, only_head = strncmp(c->request, "HEAD ", 5) == 0;
	const char *target = c->request + (get ? 4 : 5);
	size_t len = strcspn(target, " ?\r\n");

	if (!get && !only_head)
		respond(c, "405 Method Not Allowed", no_method, sizeof(no_method) - 1, true);
	else if (len != 8 || memcmp(target, "/metrics", 8) != 0)
		respond(c, "404 Not Found", no_page, sizeof(no_page) - 1, get);
	else
		respond_metrics(m, c, get);
}

static void read_some(const struct exl3_metrics *m, struct connection *c)
{
	static const char too_long[] = "the request is too long\n";
	ssize_t n = recv(c->fd, c->request + c->have, sizeof(c->request) - 1 - c->have, MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		hang_up(c);
		return;
	}
	c->have += (size_t)n;
	c->request[c->have] = 0;
	if (strstr(c->request, "\r\n\r\n") || strstr(c->request, "\n\n"))
		answer(m, c);
	else if (c->have == sizeof(c->request) - 1)
		respond(c, "431 Request Header Fields Too Large", too_long, sizeof(too_long) - 1,
			true);
}

static void write_some(struct connection *c)
{
	ssize_t n = send(c->fd, c->answer + c->sent, c->bytes - c->sent, MSG_DONTWAIT | MSG_NOSIGNAL);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0)
		c->sent += (size_t)n;
	if (n < 0 || c->sent == c->bytes) {
		shutdown(c->fd, SHUT_WR);
		hang_up(c);
	}
}

/* False: it stays in the queue, there are no descriptors for it. */
static bool take(struct exl3_metrics_http *h, int listen_fd)
{
	struct connection *c = &h->connections[0];
	int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd < 0)
		return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
	/* A free place, or the one that has had the most time. */
	for (size_t i = 0; i < CONNECTIONS_MAX && c->fd >= 0; i++) {
		if (h->connections[i].fd < 0 || h->connections[i].since_ns < c->since_ns)
			c = &h->connections[i];
	}
	hang_up(c);
	c->fd = fd;
	c->since_ns = exl3_now_ns();
	return true;
}

/* Milliseconds until the patience with one of them ends; -1: there is none. */
static int end_the_slow(struct exl3_metrics_http *h)
{
	uint64_t now = exl3_now_ns(), oldest = UINT64_MAX;

	if (exl3_fault("metrics.patience"))
		return -1; /* it never ends */
	for (size_t i = 0; i < CONNECTIONS_MAX; i++) {
		struct connection *c = &h->connections[i];

		if (c->fd >= 0 && now - c->since_ns >= PATIENCE_NS)
			hang_up(c);
		if (c->fd >= 0 && c->since_ns < oldest)
			oldest = c->since_ns;
	}
	return oldest == UINT64_MAX ? -1 : (int)((oldest + PATIENCE_NS - now) / 1000000 + 1);
}

static int listen_tcp(struct exl3_metrics_http *h, struct exl3_error *err)
{
	struct sockaddr_in addr = {.sin_family = AF_INET,
				   .sin_port = htons(h->port),
				   .sin_addr = {htonl(INADDR_LOOPBACK)}};
	const int one = 1;
	int rc;

	h->tcp_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (h->tcp_fd < 0)
		return exl3_errf(err, -errno, "metrics port: socket: %m");
	setsockopt(h->tcp_fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(h->tcp_fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0 &&
	    listen(h->tcp_fd, BACKLOG) == 0)
		return 0;
	rc = exl3_errf(err, -errno, "metrics port %u: %m", h->port);
	exl3_closep(&h->tcp_fd);
	return rc;
}

static void *serve(void *arg)
{
	struct exl3_metrics_http *h = arg;

	for (;;) {
		struct pollfd fds[3 + CONNECTIONS_MAX] = {{.fd = h->stop_fd, .events = POLLIN},
							  {.fd = h->unix_fd, .events = POLLIN},
							  {.fd = h->tcp_fd, .events = POLLIN}};
		int timeout = end_the_slow(h);

		/* A worker before us may still have the port. */
		if (h->port && h->tcp_fd < 0 && listen_tcp(h, NULL) < 0 &&
		    (timeout < 0 || timeout > RETRY_MS))
			timeout = RETRY_MS;
		fds[2].fd = h->tcp_fd;

		for (size_t i = 0; i < CONNECTIONS_MAX; i++) {
			fds[3 + i].fd = h->connections[i].fd;
			fds[3 + i].events = h->connections[i].answer ? POLLOUT : POLLIN;
		}
		if (poll(fds, 3 + CONNECTIONS_MAX, timeout) < 0) {
			poll(NULL, 0, 100); /* no memory, or fewer descriptors are allowed than these: later */
			continue;
		}
		if (fds[0].revents)
			return NULL;
		for (size_t i = 0; i < CONNECTIONS_MAX; i++) {
			struct connection *c = &h->connections[i];

			if (c->fd < 0 || !fds[3 + i].revents)
				continue;
			if (c->answer)
				write_some(c);
			else
				read_some(h->m, c);
		}
		for (int i = 1; i <= 2; i++) {
			/* One that is broken, or that nobody can be taken from: not to be looked at all the time. */
			if (fds[i].revents && (!(fds[i].revents & POLLIN) || !take(h, fds[i].fd)))
				poll(NULL, 0, 100);
		}
	}
}

static int listen_unix(struct exl3_metrics_http *h, const char *path, struct exl3_error *err)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct stat st;

	if (strlen(path) >= sizeof(addr.sun_path))
		return exl3_errf(err, -ENAMETOOLONG, "metrics socket '%s' is too long", path);
	memcpy(addr.sun_path, path, strlen(path) + 1);
	if (lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode))
		return exl3_errf(err, -EEXIST, "%s is there and is no socket", path);
	h->unix_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (h->unix_fd < 0)
		return exl3_errf(err, -errno, "metrics: socket: %m");
	unlink(path); /* of a worker before us, which had the same control socket to itself */
	if (bind(h->unix_fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0)
		return exl3_errf(err, -errno, "metrics socket %s: %m", path);
	memcpy(h->path, addr.sun_path, sizeof(h->path));
	if (lstat(path, &h->made) < 0 || chmod(path, 0660) < 0 || listen(h->unix_fd, BACKLOG) < 0)
		return exl3_errf(err, -errno, "metrics socket %s: %m", path);
	return 0;
}

static void release(struct exl3_metrics_http *h)
{
	struct stat now;

	for (size_t i = 0; i < CONNECTIONS_MAX; i++)
		hang_up(&h->connections[i]);
	/* Another worker may have taken it over meanwhile. */
	if (h->path[0] && lstat(h->path, &now) == 0 && now.st_ino == h->made.st_ino &&
	    now.st_dev == h->made.st_dev)
		unlink(h->path);
	exl3_closep(&h->unix_fd);
	exl3_closep(&h->tcp_fd);
	exl3_closep(&h->stop_fd);
	free(h);
}

int exl3_metrics_http_new(const struct exl3_metrics *m, const char *path, uint16_t port,
			  struct exl3_metrics_http **ret, struct exl3_error *err)
{
	struct exl3_metrics_http *h = calloc(1, sizeof(*h));
	int rc = 0;

	if (!h)
		return exl3_errf(err, -ENOMEM, "metrics: out of memory");
	h->m = m;
	h->unix_fd = h->tcp_fd = -1;
	for (size_t i = 0; i < CONNECTIONS_MAX; i++)
		h->connections[i].fd = -1;
	h->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (h->stop_fd < 0)
		rc = exl3_errf(err, -errno, "metrics: eventfd: %m");
	if (rc == 0 && path)
		rc = listen_unix(h, path, err);
	h->port = port;
	if (rc == 0 && port && listen_tcp(h, err) < 0) {
		if (err->code != -EADDRINUSE)
			rc = err->code;
		else
			exl3_warn("%s; tried again every %d s", err->text, RETRY_MS / 1000);
	}
	if (rc == 0) {
		rc = -pthread_create(&h->thread, NULL, serve, h);
		if (rc < 0)
			exl3_errf(err, rc, "metrics: no thread");
	}
	if (rc < 0) {
		release(h);
		return rc;
	}
	pthread_setname_np(h->thread, "exl3-metrics");
	*ret = h;
	return 0;
}

struct exl3_metrics_http *exl3_metrics_http_free(struct exl3_metrics_http *h)
{
	const uint64_t one = 1;

	if (!h)
		return NULL;
	(void)!write(h->stop_fd, &one, sizeof(one));
	pthread_join(h->thread, NULL);
	release(h);
	return NULL;
}
