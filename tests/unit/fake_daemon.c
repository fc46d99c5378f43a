/* SPDX-License-Identifier: Apache-2.0 */
/* fake_daemon.c - a daemon of one client in a thread, which answers as told: also wrongly, late, or never. */
#include "tests/unit/fake_daemon.h"

#include "proto/exl3.pb-c.h"
#include "proto/frame.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

static void must(bool ok, const char *what)
{
	if (ok)
		return;
	perror(what);
	abort();
}

static void poke(struct fake_daemon *d)
{
	must(eventfd_write(d->wake_fd, 1) == 0, "eventfd");
}

/* ---- control ---- */

struct answer {
	Exl3__Reply reply;
	int fds[EXL3_FDS_MAX];
	unsigned nr_fds;
	Exl3__HelloReply hello;
	Exl3__Models models;
	Exl3__Model model, *model_p;
	Exl3__Modules modules;
	Exl3__Module module, *module_p;
	Exl3__Shard shard, *shard_p;
	Exl3__ChannelReply channel;
	Exl3__ArenaReply arena;
};

static void answer_models(struct answer *a)
{
	exl3__models__init(&a->models);
	exl3__model__init(&a->model);
	a->model.name = (char *)"m";
	a->model.handle = 7;
	a->model.fingerprint = (char *)"cafe";
	a->model_p = &a->model;
	a->models.models = &a->model_p;
	a->models.n_models = 1;
	a->reply.body_case = EXL3__REPLY__BODY_MODELS;
	a->reply.models = &a->models;
}

static void answer_modules(struct answer *a, enum fake_fault fault)
{
	exl3__modules__init(&a->modules);
	exl3__module__init(&a->module);
	exl3__shard__init(&a->shard);
	a->shard.k = a->shard.n = 256;
	a->shard.k_logical = 192;
	a->shard.n_logical = 160;
	a->shard.rate2 = 7;
	a->shard.codebook = 2;
	a->shard_p = &a->shard;
	a->module.name = (char *)"x";
	a->module.kind = EXL3__MODULE_KIND__MODULE_LINEAR;
	a->module.k = a->module.n = 256;
	a->module.k_logical = 192;
	a->module.n_logical = 160;
	a->module.shards = &a->shard_p;
	a->module.n_shards = 1;
	a->module.handle = 9;
	a->module.fingerprint = (char *)(fault == FAKE_OTHER_FINGERPRINT ? "beef" : "cafe");
	a->module_p = &a->module;
	a->modules.modules = &a->module_p;
	a->modules.n_modules = 1;
	a->reply.body_case = EXL3__REPLY__BODY_MODULES;
	a->reply.modules = &a->modules;
}

static int unsealed_memfd(size_t bytes)
{
	int fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	must(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "memfd");
	return fd;
}

static void answer_arena(struct answer *a, uint64_t bytes, enum fake_fault fault)
{
	struct exl3_segment *seg;

	must(exl3_segment_new("arena", bytes, &seg, NULL) == 0, "arena");
	exl3__arena_reply__init(&a->arena);
	a->arena.buffer = 3;
	a->arena.bytes = seg->bytes + (fault == FAKE_WRONG_SIZE ? 4096 : 0);
	a->fds[a->nr_fds++] = fault == FAKE_UNSEALED ? unsealed_memfd(seg->bytes) : dup(seg->fd);
	exl3_segment_free(seg);
	a->reply.body_case = EXL3__REPLY__BODY_ARENA;
	a->reply.arena = &a->arena;
}

static void answer_channel(struct fake_daemon *d, struct answer *a, uint32_t entries,
			   enum fake_fault fault)
{
	struct exl3_ring_params p = {.sq_entries =
					     fault == FAKE_OTHER_ENTRIES ? 2 * entries : entries,
				     .first = UINT32_MAX - 3};
	struct fake_channel *ch = &d->channels[d->nr_channels];
	int pair[2];

	must(d->nr_channels < FAKE_CHANNELS, "too many channels");
	must(exl3_ring_create(&p, &ch->seg, &ch->ring, NULL) == 0, "ring");
	must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0,
	     "socketpair");
	ch->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	ch->notify_fd = pair[0];
	ch->nr_held = 0;
	d->nr_channels++;
	if (fault == FAKE_BAD_HEADER)
		ch->ring.hdr->sqe_offset = 8;
	exl3__channel_reply__init(&a->channel);
	a->channel.channel = d->nr_channels;
	a->channel.bytes = ch->seg->bytes + (fault == FAKE_WRONG_SIZE ? 4096 : 0);
	a->fds[a->nr_fds++] = dup(ch->seg->fd);
	a->fds[a->nr_fds++] = dup(ch->kick_fd);
	a->fds[a->nr_fds++] = pair[1];
	a->reply.body_case = EXL3__REPLY__BODY_CHANNEL;
	a->reply.channel = &a->channel;
}

static void fill_answer(struct fake_daemon *d, const Exl3__Request *req, struct answer *a,
			enum fake_fault fault)
{
	switch (req->body_case) {
	case EXL3__REQUEST__BODY_HELLO:
		exl3__hello_reply__init(&a->hello);
		a->hello.version = fault == FAKE_OTHER_VERSION ? 2 : 1;
		a->reply.body_case = EXL3__REPLY__BODY_HELLO;
		a->reply.hello = &a->hello;
		break;
	case EXL3__REQUEST__BODY_OPEN_MODEL:
		answer_models(a);
		break;
	case EXL3__REQUEST__BODY_OPEN_MODULE:
		answer_modules(a, fault);
		break;
	case EXL3__REQUEST__BODY_CREATE_ARENA:
		answer_arena(a, req->create_arena->bytes, fault);
		break;
	case EXL3__REQUEST__BODY_CREATE_CHANNEL:
		answer_channel(d, a, req->create_channel->entries, fault);
		break;
	default:
		break; /* the closing ones: an empty reply */
	}
}

/* Makes the answer wrong as told. */
static void spoil(struct answer *a, enum fake_fault fault)
{
	switch (fault) {
	case FAKE_REFUSE:
		a->reply.code = -EDQUOT;
		a->reply.error = (char *)"no more of that";
		a->reply.body_case = EXL3__REPLY__BODY__NOT_SET;
		break;
	case FAKE_POSITIVE_CODE:
		a->reply.code = 5;
		break;
	case FAKE_WRONG_ID:
		a->reply.id++;
		break;
	case FAKE_NO_BODY:
		a->reply.body_case = EXL3__REPLY__BODY__NOT_SET;
		break;
	case FAKE_OTHER_INSTANCE:
		a->reply.instance++;
		break;
	case FAKE_NO_FDS:
		while (a->nr_fds)
			close(a->fds[--a->nr_fds]);
		break;
	case FAKE_SURPLUS_FD:
		a->fds[a->nr_fds++] = dup(STDIN_FILENO);
		break;
	default:
		break;
	}
}

static void hang_up(struct fake_daemon *d)
{
	for (unsigned i = 0; i < d->nr_channels; i++) {
		exl3_segment_free(d->channels[i].seg);
		exl3_closep(&d->channels[i].kick_fd);
		exl3_closep(&d->channels[i].notify_fd);
	}
	d->nr_channels = 0;
	exl3_closep(&d->conn);
}

/* Nobody will serve this connection. */
static void turn_away(struct fake_daemon *d)
{
	Exl3__Reply reply = EXL3__REPLY__INIT;
	uint8_t buf[256];

	reply.code = -EAGAIN;
	reply.error = (char *)"come back later";
	reply.instance = 77;
	exl3_frame_send(d->conn, buf, exl3__reply__pack(&reply, buf), NULL, 0, 0, NULL);
	hang_up(d);
}

static void serve_control(struct fake_daemon *d)
{
	static uint8_t buf[EXL3_PACKET_MAX];
	struct answer a = {0};
	Exl3__Request *req;
	enum fake_fault fault;
	unsigned n;
	int e = exl3_frame_recv(d->conn, buf, sizeof(buf), a.fds, 0, &n, 0, NULL);

	if (e < 0) {
		hang_up(d);
		return;
	}
	fault = __atomic_exchange_n(&d->fault, FAKE_GOOD, __ATOMIC_SEQ_CST);
	if (fault == FAKE_HANG_UP) {
		hang_up(d);
		return;
	}
	if (fault == FAKE_TURN_AWAY) {
		turn_away(d);
		return;
	}
	req = exl3__request__unpack(NULL, (size_t)e, buf);
	must(req, "request");
	exl3__reply__init(&a.reply);
	a.reply.id = req->id;
	a.reply.instance = 77;
	a.reply.generation = 1;
	fill_answer(d, req, &a, fault);
	spoil(&a, fault);
	exl3__request__free_unpacked(req, NULL);
	n = (unsigned)exl3__reply__pack(&a.reply, buf);
	if (fault == FAKE_GARBAGE)
		memset(buf, 0xff, n);
	exl3_frame_send(d->conn, buf, n, a.fds, a.nr_fds, 0, NULL);
	while (a.nr_fds)
		close(a.fds[--a.nr_fds]);
}

/* ---- rings ---- */

static void post(struct fake_channel *ch, uint64_t user_data)
{
	struct exl3_cqe cqe = {.user_data = user_data, .exec_ns = 1};

	exl3_cq_post(&ch->ring, &cqe);
}

static void publish(struct fake_channel *ch)
{
	uint32_t how = exl3_cq_publish(&ch->ring);

	if (how & EXL3_CQ_NEED_WAKEUP)
		exl3_cq_wake(&ch->ring);
	if (how & EXL3_CQ_WANT_MSG)
		(void)!send(ch->notify_fd, "x", 1, MSG_NOSIGNAL);
}

static void answer_held(struct fake_channel *ch, enum fake_mode mode)
{
	if (mode == FAKE_HOLD || (mode == FAKE_REVERSE && ch->nr_held < 3))
		return;
	if (mode == FAKE_TOO_MANY) {
		__atomic_store_n(&ch->ring.hdr->cq_tail.v, ch->ring.cq_next + 1000,
				 __ATOMIC_SEQ_CST);
		exl3_cq_wake(&ch->ring);
		ch->nr_held = 0;
		return;
	}
	for (uint32_t i = 0; i < ch->nr_held; i++) {
		uint32_t at = mode == FAKE_REVERSE ? ch->nr_held - 1 - i : i;

		post(ch, ch->held[at].user_data + (mode == FAKE_WRONG_USER ? 1000000 : 0));
	}
	ch->nr_held = 0;
	publish(ch);
}

/* True: there may be more. */
static bool serve_ring(struct fake_daemon *d, struct fake_channel *ch)
{
	enum fake_mode mode = __atomic_load_n(&d->mode, __ATOMIC_SEQ_CST);
	int n = exl3_sq_take(&ch->ring, ch->held + ch->nr_held,
			     mode == FAKE_REVERSE ? 3 - ch->nr_held : 64 - ch->nr_held);

	must(n >= 0, "exl3_sq_take");
	ch->nr_held += (uint32_t)n;
	__atomic_fetch_add(&d->taken, (uint32_t)n, __ATOMIC_SEQ_CST);
	answer_held(ch, mode);
	return n > 0 || (exl3_sq_pending(&ch->ring) && ch->nr_held < 64) || !exl3_sq_arm(&ch->ring);
}

static void end_channels(struct fake_daemon *d)
{
	for (unsigned i = 0; i < d->nr_channels; i++) {
		exl3_ring_end(&d->channels[i].ring, EXL3_CHANNEL_FAILED);
		exl3_closep(&d->channels[i].notify_fd);
	}
}

static void *serve(void *arg)
{
	struct fake_daemon *d = arg;

	while (!__atomic_load_n(&d->stop, __ATOMIC_SEQ_CST)) {
		struct pollfd p[3 + FAKE_CHANNELS];
		bool busy = false;
		eventfd_t v;

		if (__atomic_exchange_n(&d->end_channels, 0, __ATOMIC_SEQ_CST))
			end_channels(d);
		for (unsigned i = 0; i < d->nr_channels; i++)
			if (d->channels[i].notify_fd >= 0)
				busy |= serve_ring(d, &d->channels[i]);
		p[0] = (struct pollfd){.fd = d->wake_fd, .events = POLLIN};
		p[1] = (struct pollfd){.fd = d->conn < 0 ? d->listen_fd : -1, .events = POLLIN};
		p[2] = (struct pollfd){.fd = d->conn, .events = POLLIN};
		for (unsigned i = 0; i < d->nr_channels; i++)
			p[3 + i] = (struct pollfd){.fd = d->channels[i].kick_fd, .events = POLLIN};
		poll(p, 3 + d->nr_channels, busy ? 0 : -1);
		for (unsigned i = 0; i < d->nr_channels; i++)
			if (p[3 + i].revents)
				eventfd_read(d->channels[i].kick_fd, &v);
		if (p[0].revents)
			eventfd_read(d->wake_fd, &v);
		if (p[1].revents)
			d->conn = accept4(d->listen_fd, NULL, NULL, SOCK_CLOEXEC);
		if (p[1].revents && d->conn >= 0 &&
		    __atomic_load_n(&d->fault, __ATOMIC_SEQ_CST) == FAKE_TURN_AWAY_UNREAD) {
			__atomic_store_n(&d->fault, FAKE_GOOD, __ATOMIC_SEQ_CST);
			turn_away(d);
			continue;
		}
		if (__atomic_load_n(&d->die, __ATOMIC_SEQ_CST)) {
			hang_up(d);
			exl3_closep(&d->listen_fd);
			__atomic_store_n(&d->die, 0, __ATOMIC_SEQ_CST);
		} else if (p[2].revents) {
			serve_control(d);
		}
	}
	hang_up(d);
	return NULL;
}

/* ---- for tests ---- */

void fake_start(struct fake_daemon *d)
{
	struct sockaddr_un sa = {.sun_family = AF_UNIX};

	memset(d, 0, sizeof(*d));
	d->conn = -1;
	strcpy(d->dir, "/tmp/exl3-fake-XXXXXX");
	must(mkdtemp(d->dir), "mkdtemp");
	snprintf(d->path, sizeof(d->path), "%s/s", d->dir);
	strcpy(sa.sun_path, d->path);
	d->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	must(bind(d->listen_fd, (struct sockaddr *)&sa, sizeof(sa)) == 0, "bind");
	must(listen(d->listen_fd, 4) == 0, "listen");
	d->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	must(pthread_create(&d->thread, NULL, serve, d) == 0, "pthread_create");
}

void fake_stop(struct fake_daemon *d)
{
	__atomic_store_n(&d->stop, 1, __ATOMIC_SEQ_CST);
	poke(d);
	pthread_join(d->thread, NULL);
	exl3_closep(&d->listen_fd);
	exl3_closep(&d->wake_fd);
	unlink(d->path);
	rmdir(d->dir);
}

void fake_fault(struct fake_daemon *d, enum fake_fault fault)
{
	__atomic_store_n(&d->fault, fault, __ATOMIC_SEQ_CST);
}

void fake_mode(struct fake_daemon *d, enum fake_mode mode)
{
	__atomic_store_n(&d->mode, mode, __ATOMIC_SEQ_CST);
	poke(d);
}

void fake_die(struct fake_daemon *d)
{
	__atomic_store_n(&d->die, 1, __ATOMIC_SEQ_CST);
	poke(d);
	while (__atomic_load_n(&d->die, __ATOMIC_SEQ_CST))
		usleep(100);
}

void fake_end_channels(struct fake_daemon *d)
{
	__atomic_store_n(&d->end_channels, 1, __ATOMIC_SEQ_CST);
	poke(d);
	while (__atomic_load_n(&d->end_channels, __ATOMIC_SEQ_CST))
		usleep(100);
}

void fake_wait_taken(struct fake_daemon *d, uint32_t n)
{
	while (__atomic_load_n(&d->taken, __ATOMIC_SEQ_CST) < n)
		usleep(100);
}
