/* SPDX-License-Identifier: Apache-2.0 */
/*
 * raw.h - the protocol by hand, for clients that do what libexl3 never would.
 *
 * A step that the daemon should have granted and did not ends the program with status 1 and a sentence.
 */
#ifndef EXL3_TESTS_INTEGRATION_RAW_H
#define EXL3_TESTS_INTEGRATION_RAW_H

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/exl3.pb-c.h"
#include "proto/frame.h"
#include "shm/segment.h"

#define RAW_TIMEOUT_MS 100000

struct raw_channel {
	uint32_t id;
	struct exl3_segment *seg;
	struct exl3_ring_client ring;
	int kick_fd, notify_fd;
};

struct raw_arena {
	uint32_t buffer;
	uint8_t *ptr;
	size_t bytes;
	int fd;
};

/* Ends like a client that cares for nothing: what it holds is left to the kernel and the daemon. */
static inline _Noreturn void raw_quit(int status)
{
	fflush(NULL);
	_exit(status);
}

static inline _Noreturn void raw_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static inline _Noreturn void raw_die(const char *fmt, ...)
{
	va_list ap;

	fflush(stdout);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	raw_quit(1);
}

/* A connected socket; nothing was said on it yet. */
static inline int raw_connect(const char *path)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (sock < 0 || strlen(path) >= sizeof(addr.sun_path))
		raw_die("%s: no socket: %s", path, strerror(errno));
	memcpy(addr.sun_path, path, strlen(path) + 1);
	if (connect(sock, (struct sockaddr *)&addr, sizeof(addr)) < 0)
		raw_die("%s: connect: %s", path, strerror(errno));
	return sock;
}

static inline void raw_send(int sock, Exl3__Request *req)
{
	static uint8_t buf[EXL3_PACKET_MAX];
	struct exl3_error err;

	if (exl3__request__get_packed_size(req) > sizeof(buf))
		raw_die("request is too long");
	if (exl3_frame_send(sock, buf, exl3__request__pack(req, buf), NULL, 0, 0, &err) < 0)
		raw_die("%s", err.text);
}

/* The next reply within @ms, or NULL: the daemon closed the connection, or (@late) said nothing. */
static inline Exl3__Reply *raw_recv(int sock, int *fds, unsigned *nr_fds, int ms, bool *late)
{
	static uint8_t buf[EXL3_PACKET_MAX];
	struct pollfd p = {.fd = sock, .events = POLLIN};
	struct exl3_error err;
	Exl3__Reply *reply;
	int n;

	*nr_fds = 0;
	if (late)
		*late = false;
	if (poll(&p, 1, ms) == 0) {
		if (!late)
			raw_die("no reply within %d ms", ms);
		*late = true;
		return NULL;
	}
	n = exl3_frame_recv(sock, buf, sizeof(buf), fds, EXL3_FDS_MAX, nr_fds, 0, &err);
	if (n == -ECONNRESET)
		return NULL;
	if (n < 0)
		raw_die("reply: %s", err.text);
	reply = exl3__reply__unpack(NULL, (size_t)n, buf);
	if (!reply)
		raw_die("reply of %d bytes is no message", n);
	return reply;
}

/* One request and its reply, which must come; its code may be anything. */
static inline Exl3__Reply *raw_call(int sock, Exl3__Request *req, int *fds, unsigned *nr_fds)
{
	int spare[EXL3_FDS_MAX];
	unsigned nr = 0;
	Exl3__Reply *reply;

	raw_send(sock, req);
	reply = raw_recv(sock, fds ? fds : spare, fds ? nr_fds : &nr, RAW_TIMEOUT_MS, NULL);
	if (!reply)
		raw_die("the daemon closed the connection on request %d", (int)req->body_case);
	for (unsigned i = 0; !fds && i < nr; i++)
		close(spare[i]);
	return reply;
}

static inline Exl3__Reply *raw_call_ok(int sock, Exl3__Request *req, int *fds, unsigned *nr_fds)
{
	Exl3__Reply *reply = raw_call(sock, req, fds, nr_fds);

	if (reply->code)
		raw_die("request %d: code %d, %s", (int)req->body_case, reply->code, reply->error);
	return reply;
}

#define RAW_REQUEST(req_, msg_, MSG_, ...)             \
	Exl3__Request req_ = EXL3__REQUEST__INIT;      \
	__VA_ARGS__;                                   \
	(req_).body_case = EXL3__REQUEST__BODY_##MSG_; \
	(req_).msg_ = &body

static inline void raw_hello(int sock, const char *name)
{
	RAW_REQUEST(req, hello, HELLO, Exl3__Hello body = EXL3__HELLO__INIT);

	body.version_min = body.version_max = 1;
	body.name = (char *)(uintptr_t)name;
	req.id = 1;
	exl3__reply__free_unpacked(raw_call_ok(sock, &req, NULL, NULL), NULL);
}

static inline uint32_t raw_open_model(int sock, const char *name)
{
	RAW_REQUEST(req, open_model, OPEN_MODEL, Exl3__OpenModel body = EXL3__OPEN_MODEL__INIT);
	Exl3__Reply *reply;
	uint32_t handle;

	body.name = (char *)(uintptr_t)name;
	reply = raw_call_ok(sock, &req, NULL, NULL);
	if (reply->body_case != EXL3__REPLY__BODY_MODELS || reply->models->n_models != 1)
		raw_die("OpenModel: wrong kind of reply");
	handle = reply->models->models[0]->handle;
	exl3__reply__free_unpacked(reply, NULL);
	return handle;
}

/* k and n are the logical sizes. */
static inline uint32_t raw_open_module(int sock, uint32_t model, const char *name,
				       Exl3__ModuleKind kind, uint32_t *k, uint32_t *n)
{
	RAW_REQUEST(req, open_module, OPEN_MODULE, Exl3__OpenModule body = EXL3__OPEN_MODULE__INIT);
	Exl3__Reply *reply;
	uint32_t handle;

	body.model = model;
	body.name = (char *)(uintptr_t)name;
	body.kind = kind;
	reply = raw_call_ok(sock, &req, NULL, NULL);
	if (reply->body_case != EXL3__REPLY__BODY_MODULES || reply->modules->n_modules != 1)
		raw_die("OpenModule: wrong kind of reply");
	handle = reply->modules->modules[0]->handle;
	if (k)
		*k = reply->modules->modules[0]->k_logical;
	if (n)
		*n = reply->modules->modules[0]->n_logical;
	exl3__reply__free_unpacked(reply, NULL);
	return handle;
}

static inline struct raw_channel raw_channel_new(int sock, uint32_t entries)
{
	RAW_REQUEST(req, create_channel, CREATE_CHANNEL,
		    Exl3__CreateChannel body = EXL3__CREATE_CHANNEL__INIT);
	struct raw_channel ch = {0};
	struct exl3_error err;
	int fds[EXL3_FDS_MAX];
	unsigned nr_fds;
	Exl3__Reply *reply;

	body.entries = entries;
	reply = raw_call_ok(sock, &req, fds, &nr_fds);
	if (reply->body_case != EXL3__REPLY__BODY_CHANNEL || nr_fds != 3)
		raw_die("CreateChannel: %u descriptors", nr_fds);
	ch.id = reply->channel->channel;
	ch.kick_fd = fds[1];
	ch.notify_fd = fds[2];
	if (exl3_segment_map(fds[0], reply->channel->bytes, &ch.seg, &err) < 0 ||
	    exl3_ring_attach(ch.seg, &ch.ring, &err) < 0)
		raw_die("%s", err.text);
	exl3__reply__free_unpacked(reply, NULL);
	return ch;
}

static inline struct raw_arena raw_arena_new(int sock, size_t bytes)
{
	RAW_REQUEST(req, create_arena, CREATE_ARENA,
		    Exl3__CreateArena body = EXL3__CREATE_ARENA__INIT);
	struct raw_arena a = {0};
	int fds[EXL3_FDS_MAX];
	unsigned nr_fds;
	Exl3__Reply *reply;

	body.bytes = bytes;
	reply = raw_call_ok(sock, &req, fds, &nr_fds);
	if (reply->body_case != EXL3__REPLY__BODY_ARENA || nr_fds != 1)
		raw_die("CreateArena: %u descriptors", nr_fds);
	a.buffer = reply->arena->buffer;
	a.bytes = reply->arena->bytes;
	a.fd = fds[0];
	a.ptr = mmap(NULL, a.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, a.fd, 0);
	if (a.ptr == MAP_FAILED)
		raw_die("arena: mmap: %s", strerror(errno));
	exl3__reply__free_unpacked(reply, NULL);
	return a;
}

static inline exl3_ref raw_ref(const struct raw_arena *a, uint64_t offset)
{
	return EXL3_REF(a->buffer, offset);
}

static inline struct exl3_sqe *raw_get(struct raw_channel *ch)
{
	struct exl3_sqe *sqe;

	if (exl3_ring_get(&ch->ring, &sqe) < 0)
		raw_die("the ring is full");
	return sqe;
}

static inline void raw_kick(const struct raw_channel *ch)
{
	uint64_t one = 1;

	if (write(ch->kick_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
		raw_die("kick: %s", strerror(errno));
}

static inline void raw_submit(struct raw_channel *ch)
{
	if (exl3_ring_publish(&ch->ring))
		raw_kick(ch);
}

/* Takes one completion within @ms: 1, or 0. Polls: it must not depend on any wake-up. */
static inline int raw_take(struct raw_channel *ch, struct exl3_cqe *cqe, int ms)
{
	uint64_t until = exl3_now_ns() + (uint64_t)ms * 1000000;
	int r;

	while ((r = exl3_ring_take(&ch->ring, cqe)) == 0 && exl3_now_ns() < until)
		usleep(200);
	if (r < 0)
		raw_die("completion queue makes no sense");
	return r;
}

static inline void raw_linear(struct exl3_sqe *sqe, uint32_t module, exl3_ref x, exl3_ref y,
			      uint32_t rows, uint64_t user_data)
{
	sqe->op = EXL3_OP_LINEAR;
	sqe->flags = EXL3_DETERMINISTIC; /* results are compared bit for bit */
	sqe->x_dtype = sqe->y_dtype = EXL3_F32;
	sqe->module = module;
	sqe->rows = rows;
	sqe->x = x;
	sqe->y = y;
	sqe->user_data = user_data;
}

#endif
