/* SPDX-License-Identifier: Apache-2.0 */
/* connect.c - connect, agree on a version, and close what was opened. */
#include "client/internal.h"

#include "client/map.h"
#include "proto/frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#define DEFAULT_SOCKET "/run/exl3-daemon/0.sock"
#define PROTOCOL_MIN   1
#define CONNECT_FLAGS  (EXL3_CONNECT_MANUAL | EXL3_CONNECT_NO_ENV | EXL3_CONNECT_MAPPED | EXL3_CONNECT_DIRECT)
#define PROTOCOL_MAX   1

_Static_assert(__builtin_strcmp(EXL3_VERSION, EXL3_DAEMON_VERSION) == 0,
	       "exl3.h and the Makefile name the same version");

static __thread struct exl3_error last_error;

/* Counts fork()s up to this process, in the child: a struct exl3_client remembers the count that it was
 * made under. Cheaper than asking for the process id, so even the data path can afford it. */
static unsigned fork_epoch;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void count_fork(void)
{
	fork_epoch++;
}

static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, count_fork);
}

struct exl3_error *exl3_client_err(void)
{
	return &last_error;
}

const char *exl3_last_error(void)
{
	return last_error.text;
}

int exl3_last_code(void)
{
	return last_error.code;
}

bool exl3_client_forked(const struct exl3_client *c)
{
	return c->fork_epoch != fork_epoch;
}

int exl3_client_check(const struct exl3_client *c)
{
	if (exl3_client_forked(c))
		return exl3_errf(&last_error, -EPERM,
				 "this connection belongs to the parent process: connect again "
				 "after fork()");
	if (__atomic_load_n(&c->dead, __ATOMIC_ACQUIRE))
		return exl3_errf(&last_error, -ESTALE, "the daemon's worker has gone: wait for the next one with exl3_reconnect()");
	return 0;
}

bool exl3_alive(const struct exl3_client *c)
{
	return c && !exl3_client_forked(c) && !__atomic_load_n(&c->dead, __ATOMIC_ACQUIRE);
}

void exl3_object_add(struct exl3_client *c, struct exl3_object *o, enum exl3_object_type type,
		     void (*drop)(struct exl3_object *self))
{
	o->type = type;
	o->client = c;
	o->drop = drop;
	o->prev = NULL;
	pthread_mutex_lock(&c->list);
	o->next = c->objects;
	if (o->next)
		o->next->prev = o;
	c->objects = o;
	pthread_mutex_unlock(&c->list);
}

void exl3_object_remove(struct exl3_object *o)
{
	struct exl3_client *c = o->client;

	pthread_mutex_lock(&c->list);
	while (o->pinned)
		pthread_cond_wait(&c->changed, &c->list);
	if (o->prev)
		o->prev->next = o->next;
	else
		c->objects = o->next;
	if (o->next)
		o->next->prev = o->prev;
	pthread_mutex_unlock(&c->list);
}

const char *exl3_client_path(const char *path)
{
	if (!path || !*path)
		path = getenv("EXL3_SOCKET");
	return path && *path ? path : DEFAULT_SOCKET;
}

int exl3_client_dial(const char *path, int *ret)
{
	exl3_auto(exl3_closep) int fd = -1;
	struct sockaddr_un sa = {.sun_family = AF_UNIX};

	if (strlen(path) >= sizeof(sa.sun_path))
		return exl3_errf(&last_error, -ENAMETOOLONG,
				 "socket path is longer than %zu bytes: %s",
				 sizeof(sa.sun_path) - 1, path);
	strcpy(sa.sun_path, path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return exl3_errf(&last_error, -errno, "socket: %m");
	/* Only against a daemon that accepts nobody: connect() would wait for ever. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){.tv_sec = 5}, sizeof(struct timeval));
	while (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0) {
		if (errno == EINTR)
			continue;
		switch (errno) {
		case ENOENT:
			return exl3_errf(&last_error, -ENOENT, "no daemon: there is no socket %s",
					 path);
		case ECONNREFUSED:
			return exl3_errf(&last_error, -ECONNREFUSED,
					 "no daemon: nobody listens on %s", path);
		case EAGAIN:
			return exl3_errf(&last_error, -ETIMEDOUT,
					 "the daemon accepts no connection on %s", path);
		case EACCES:
			return exl3_errf(&last_error, -EACCES,
					 "not allowed to connect to %s: its owner or group may",
					 path);
		default:
			return exl3_errf(&last_error, -errno, "cannot connect to %s: %m", path);
		}
	}
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){0}, sizeof(struct timeval));
	*ret = exl3_take_fd(&fd);
	return 0;
}

int exl3_client_hello(struct exl3_client *c)
{
	Exl3__Hello body = EXL3__HELLO__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e;

	body.version_min = PROTOCOL_MIN;
	body.version_max = PROTOCOL_MAX;
	body.name = c->name;
	body.features = EXL3_FEATURES;
	if (c->domain)
		body.domain = (char *)(uintptr_t)c->domain;
	req.body_case = EXL3__REQUEST__BODY_HELLO;
	req.hello = &body;
	c->instance = 0;
	c->generation = 0; /* the answer says both */
	e = exl3_client_call_locked(c, &req, EXL3__REPLY__BODY_HELLO, EXL3_CALL_TIMEOUT_NS, &reply,
				    NULL, 0, NULL, 0);
	if (e < 0)
		return e;
	if (reply->hello->version < PROTOCOL_MIN || reply->hello->version > PROTOCOL_MAX)
		return exl3_errf(&last_error, -EPROTO,
				 "the daemon speaks protocol version %u, this library %d to %d",
				 reply->hello->version, PROTOCOL_MIN, PROTOCOL_MAX);
	c->admin = reply->hello->admin;
	c->features = reply->hello->features;
	c->map_policy = c->features & EXL3_FEATURE_MAPPED ? reply->hello->mapped : 0;
	c->daemon_pid = reply->hello->pid;
	exl3_client_mps_learn(c, reply->hello->mps_pipe);
	if (c->daemon_version)
		return 0; /* of the first daemon: somebody may be reading it */
	c->daemon_version = strdup(reply->hello->daemon_version);
	c->backend = strdup(reply->hello->backend);
	if (!c->daemon_version || !c->backend)
		return exl3_errf(&last_error, -ENOMEM, "out of memory");
	return 0;
}

static struct exl3_client *client_alloc(void)
{
	struct exl3_client *c = calloc(1, sizeof(*c));

	pthread_condattr_t monotonic;

	if (!c)
		return NULL;
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	c->sock = c->watch_fd = -1;
	pthread_mutex_init(&c->call, NULL);
	pthread_mutex_init(&c->list, NULL);
	pthread_cond_init(&c->changed, &monotonic);
	c->packet = malloc(EXL3_PACKET_MAX);
	return c->packet ? c : exl3_close(c);
}

static void client_freep(struct exl3_client **c)
{
	*c = exl3_close(*c);
}

int exl3_connect(const char *path, const char *name, struct exl3_client **ret)
{
	return exl3_connect_flags(path, name, 0, ret);
}

int exl3_connect_flags(const char *path, const char *name, unsigned flags, struct exl3_client **ret)
{
	return exl3_client_connect(path, name, flags, NULL, ret);
}

int exl3_client_connect(const char *path, const char *name, unsigned flags, const char *domain,
			struct exl3_client **ret)
{
	exl3_auto(client_freep) struct exl3_client *c = NULL;
	int e;

	if (flags & ~CONNECT_FLAGS)
		return exl3_errf(&last_error, -EINVAL, "connect: there is no flag 0x%x", flags & ~CONNECT_FLAGS);
	pthread_once(&fork_once, watch_forks);
	c = client_alloc();
	if (!c)
		return exl3_errf(&last_error, -ENOMEM, "out of memory");
	c->fork_epoch = fork_epoch;
	c->flags = flags;
	c->domain = domain;
	c->path = strdup(exl3_client_path(path));
	c->name = strdup(name ? name : program_invocation_short_name);
	if (!c->path || !c->name)
		return exl3_errf(&last_error, -ENOMEM, "out of memory");
	e = exl3_maps_new(c, flags);
	if (e < 0)
		return e;
	e = exl3_client_dial(c->path, &c->sock);
	if (e < 0)
		return e;
	e = exl3_client_hello(c);
	if (e < 0)
		return e;
	e = exl3_watcher_start(c);
	if (e < 0)
		return e;
	exl3_client_mps_env(c); /* what comes of it is for exl3_mps() to say */
	*ret = exl3_take_ptr(&c);
	return 0;
}

struct exl3_client *exl3_close(struct exl3_client *c)
{
	struct exl3_object *o, *next;

	if (!c)
		return NULL;
	/* In a child the watcher does not exist and a lock may be held for ever: close our copies of the
	 * fds, which the parent does not notice, and let go of the memory. */
	if (!exl3_client_forked(c))
		exl3_watcher_stop(c);
	/* Streams first, while the memory of their words is there. */
	for (struct exl3_channel *ch = c->channels; ch; ch = ch->next) {
		if (!exl3_client_forked(c))
			exl3_stream_release(ch, -ESTALE);
		exl3_stream_free(ch, exl3_client_forked(c));
	}
	for (o = c->objects; o; o = next) {
		next = o->next;
		o->drop(o);
	}
	exl3_maps_free(c);
	exl3_closep(&c->sock); /* the daemon frees its side of everything */
	exl3_closep(&c->watch_fd);
	if (!exl3_client_forked(c)) {
		pthread_mutex_destroy(&c->call);
		pthread_mutex_destroy(&c->list);
		pthread_cond_destroy(&c->changed);
	}
	free(c->path);
	free(c->name);
	free(c->packet);
	free(c->daemon_version);
	free(c->backend);
	free(c);
	return NULL;
}
