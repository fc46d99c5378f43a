/* SPDX-License-Identifier: Apache-2.0 */
/* queue.c - channels: get an entry, submit, wait for completions. */
#include "client/map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

/* Turns of the spin loop between two looks at the clock: some 2 us. */
#define SPINS_PER_LOOK 64
#define STALLED_NS     200000

struct exl3_channel_life *exl3_channel_life_free(struct exl3_channel_life *life)
{
	if (!life)
		return NULL;
	exl3_segment_free(life->seg);
	exl3_closep(&life->kick_fd);
	exl3_closep(&life->notify_fd);
	free(life);
	return NULL;
}

static void channel_drop(struct exl3_object *o)
{
	struct exl3_channel *ch = (struct exl3_channel *)o;

	exl3_map_channel_free(ch);
	exl3_segment_free(ch->seg);
	exl3_closep(&ch->kick_fd);
	exl3_closep(&ch->notify_fd);
	exl3_channel_life_free(ch->next_life);
	free(ch->pending);
	free(ch->kept);
	exl3_plan_discard(ch);
	free(ch);
}

static void life_freep(struct exl3_channel_life **life)
{
	*life = exl3_channel_life_free(*life);
}

static void tell_close(struct exl3_client *c, uint32_t id, uint64_t epoch)
{
	Exl3__CloseChannel body = EXL3__CLOSE_CHANNEL__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	body.channel = id;
	req.body_case = EXL3__REQUEST__BODY_CLOSE_CHANNEL;
	req.close_channel = &body;
	exl3_client_tell(c, &req, epoch);
}

static int life_map(struct exl3_channel_life *life, const Exl3__ChannelReply *reply, int *fd,
		    uint32_t entries)
{
	int e = exl3_segment_map(*fd, reply->bytes, &life->seg, exl3_client_err());

	if (e < 0)
		return e;
	exl3_take_fd(fd);
	e = exl3_ring_attach(life->seg, &life->ring, exl3_client_err());
	if (e < 0)
		return e;
	if (life->ring.sq_mask != entries - 1)
		return exl3_errf(exl3_client_err(), -EPROTO, "channel: %u entries, asked for %u",
				 life->ring.sq_mask + 1, entries);
	return 0;
}

int exl3_channel_life_new(struct exl3_client *c, uint32_t entries, struct exl3_channel_life **ret)
{
	Exl3__CreateChannel body = EXL3__CREATE_CHANNEL__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	exl3_auto(life_freep) struct exl3_channel_life *life = calloc(1, sizeof(*life));
	exl3_auto(exl3_closep) int ring_fd = -1;
	int fds[3], e;

	if (!life)
		return exl3_errf(exl3_client_err(), -ENOMEM, "channel: out of memory");
	life->kick_fd = life->notify_fd = -1;
	body.entries = entries;
	req.body_case = EXL3__REQUEST__BODY_CREATE_CHANNEL;
	req.create_channel = &body;
	e = exl3_client_call_locked(c, &req, EXL3__REPLY__BODY_CHANNEL, EXL3_CALL_TIMEOUT_NS,
				    &reply, fds, 3, NULL, 0);
	if (e < 0)
		return e;
	ring_fd = fds[0];
	life->kick_fd = fds[1];
	life->notify_fd = fds[2];
	life->id = reply->channel->channel;
	life->epoch = c->epoch;
	e = life_map(life, reply->channel, &ring_fd, entries);
	if (e == 0)
		*ret = exl3_take_ptr(&life);
	else
		*ret = NULL;
	return e;
}

/* A ring at the daemon. */
static int direct_new(struct exl3_client *c, uint32_t entries, struct exl3_channel *ch)
{
	exl3_auto(life_freep) struct exl3_channel_life *life = NULL;
	int e;

	pthread_mutex_lock(&c->call);
	e = exl3_client_check(c);
	if (e == 0)
		e = exl3_channel_life_new(c, entries, &life);
	pthread_mutex_unlock(&c->call);
	if (e < 0)
		return e;
	ch->pending = calloc(life->ring.cq_mask + 1, sizeof(*ch->pending));
	if (!ch->pending) {
		tell_close(c, life->id, life->epoch);
		return exl3_errf(exl3_client_err(), -ENOMEM, "channel: out of memory");
	}
	ch->id = life->id;
	ch->epoch = life->epoch;
	ch->seg = exl3_take_ptr(&life->seg);
	ch->ring = life->ring;
	ch->kick_fd = exl3_take_fd(&life->kick_fd);
	ch->notify_fd = exl3_take_fd(&life->notify_fd);
	return 0;
}

static int mapped_new(struct exl3_client *c, uint32_t entries, struct exl3_channel *ch)
{
	int e = exl3_map_channel_new(ch, c, entries);

	if (e < 0)
		return e;
	ch->pending = calloc(ch->ring.cq_mask + 1, sizeof(*ch->pending));
	if (ch->pending)
		return 0;
	exl3_map_channel_free(ch);
	ch->seg = exl3_segment_free(ch->seg);
	exl3_closep(&ch->notify_fd);
	return exl3_errf(exl3_client_err(), -ENOMEM, "channel: out of memory");
}

int exl3_channel_new(struct exl3_client *c, uint32_t entries, struct exl3_channel **ret)
{
	return exl3_channel_new_flags(c, entries, 0, ret);
}

int exl3_channel_new_flags(struct exl3_client *c, uint32_t entries, unsigned flags, struct exl3_channel **ret)
{
	exl3_auto(exl3_freep) struct exl3_channel *ch = calloc(1, sizeof(*ch));
	int e = exl3_client_check(c), mode;

	if (e < 0)
		return e;
	if (flags & ~(EXL3_CHANNEL_MAPPED | EXL3_CHANNEL_DIRECT) ||
	    flags == (EXL3_CHANNEL_MAPPED | EXL3_CHANNEL_DIRECT))
		return exl3_errf(exl3_client_err(), -EINVAL, "channel: there is no flag 0x%x, or it contradicts another one",
				 flags);
	if (!ch)
		return exl3_errf(exl3_client_err(), -ENOMEM, "channel: out of memory");
	ch->kick_fd = ch->notify_fd = -1;
	ch->spin_ns = EXL3_SPIN_DEFAULT_NS;
	mode = flags & EXL3_CHANNEL_MAPPED ? EXL3_MODE_MAPPED : flags ? EXL3_MODE_DIRECT : c->maps->mode;
	if (mode == EXL3_MODE_MAPPED || (mode < 0 && c->map_policy == 2)) {
		e = exl3_map_ready(c);
		if (e == 0)
			e = mapped_new(c, entries, ch);
		if (e < 0 && mode == EXL3_MODE_MAPPED)
			return e;
		if (e < 0)
			snprintf(ch->why, sizeof(ch->why), "%.127s", exl3_client_err()->text);
	}
	e = ch->map ? 0 : direct_new(c, entries, ch);
	if (e < 0)
		return e;
	if (ch->why[0])
		exl3_map_tell(c, ch->why);
	exl3_object_add(c, &ch->obj, EXL3_OBJECT_CHANNEL, channel_drop);
	exl3_watcher_add(ch);
	*ret = exl3_take_ptr(&ch);
	return 0;
}

int exl3_channel_mode(const struct exl3_channel *ch, const char **why)
{
	if (why)
		*why = ch->why;
	return ch->map ? EXL3_MODE_MAPPED : EXL3_MODE_DIRECT;
}

struct exl3_channel *exl3_channel_free(struct exl3_channel *ch)
{
	struct exl3_arena *words;

	if (!ch || exl3_client_forked(ch->obj.client))
		return NULL;
	words = ch->stream ? ch->stream->words : NULL;
	exl3_plans_forget(ch);
	exl3_watcher_remove(ch);
	exl3_object_remove(&ch->obj);
	exl3_stream_release(ch, -ECANCELED);
	exl3_stream_free(ch, false);
	exl3_arena_free(words);
	/* At the worker that it lives at; at the next one if it has not moved yet. */
	if (ch->map)
		; /* it is served here */
	else if (ch->next_life)
		tell_close(ch->obj.client, ch->next_life->id, ch->next_life->epoch);
	else
		tell_close(ch->obj.client, ch->id, ch->epoch);
	channel_drop(&ch->obj);
	return NULL;
}

/* ---- is there still anybody on the other side? ---- */

static int stale_error(const struct exl3_channel *ch)
{
	if (ch->pending_first != ch->pending_last || ch->ring.sq_next != ch->ring.sq_published)
		return exl3_errf(exl3_client_err(), -ESTALE,
				 "the daemon's worker has gone: take the completions of what was outstanding");
	if (!__atomic_load_n(&ch->obj.client->dead, __ATOMIC_RELAXED))
		return exl3_errf(exl3_client_err(), -ESTALE,
				 "the daemon has closed this channel, or has gone: make a new one, or wait "
				 "with exl3_reconnect()");
	return exl3_errf(exl3_client_err(), -ESTALE, "the daemon's worker has gone: wait for the next one with exl3_reconnect()");
}

/* Looks when the ring is empty only, so it costs the data path nothing. */
static bool gone(struct exl3_channel *ch)
{
	if (ch->map) /* whatever becomes of the daemon */
		return ch->stale;
	return ch->stale || __atomic_load_n(&ch->obj.client->dead, __ATOMIC_SEQ_CST) ||
	       __atomic_load_n(&ch->ended, __ATOMIC_SEQ_CST) ||
	       exl3_ring_state(&ch->ring) != EXL3_CHANNEL_OPEN;
}

/* Drops what was handed out and not submitted: nobody will ever see it. */
static void forget_unpublished(struct exl3_channel *ch)
{
	ch->ring.outstanding -= ch->ring.sq_next - ch->ring.sq_published;
	ch->ring.sq_next = ch->ring.sq_published;
	ch->last = NULL;
}

/* Moves to the ring of the next worker, if there is one and nothing of the old ring is in use any more:
 * neither an entry that was handed out nor a request whose completion is still to be taken. */
static bool revive(struct exl3_channel *ch)
{
	struct exl3_client *c = ch->obj.client;
	struct exl3_channel_life *life = NULL;
	struct exl3_segment *old;

	if (ch->pending_first != ch->pending_last || ch->ring.sq_next != ch->ring.sq_published)
		return false;
	pthread_mutex_lock(&c->list);
	if (!__atomic_load_n(&c->dead, __ATOMIC_SEQ_CST))
		life = exl3_take_ptr(&ch->next_life);
	if (life) {
		/* The number of the pollable fd stays. */
		while (dup3(life->notify_fd, ch->notify_fd, O_CLOEXEC) < 0 && errno == EINTR)
			;
		old = ch->seg;
		ch->seg = life->seg;
		life->seg = old;
		ch->ring = life->ring;
		ch->id = life->id;
		ch->epoch = life->epoch;
		exl3_closep(&ch->kick_fd);
		ch->kick_fd = exl3_take_fd(&life->kick_fd);
		ch->last = NULL;
		ch->stale = false;
		__atomic_store_n(&ch->ended, 0, __ATOMIC_SEQ_CST);
	}
	pthread_mutex_unlock(&c->list);
	if (!life)
		return false;
	exl3_channel_life_free(life);
	if (ch->cq_flags)
		exl3_ring_arm(&ch->ring, ch->cq_flags);
	exl3_watcher_poke(c);
	return true;
}

/* ---- requests ---- */

int exl3_channel_live(struct exl3_channel *ch)
{
	if ((ch->stale || __atomic_load_n(&ch->ended, __ATOMIC_RELAXED)) && !revive(ch))
		return stale_error(ch);
	return 0;
}

struct exl3_sqe *exl3_sq_get(struct exl3_channel *ch)
{
	struct exl3_sqe *sqe;
	int e;

	if (exl3_client_forked(ch->obj.client)) {
		exl3_client_check(ch->obj.client);
		return NULL;
	}
	if (ch->recording)
		return exl3_plan_next(ch);
	if (exl3_channel_live(ch) < 0)
		return NULL;
	/* Requests that were cancelled out of order keep their place in the table of pending ones. */
	if (ch->pending_last - ch->pending_first + (ch->ring.sq_next - ch->ring.sq_published) >
	    ch->ring.cq_mask)
		e = -EAGAIN;
	else
		e = exl3_ring_get(&ch->ring, &sqe);
	if (e == -EAGAIN) {
		exl3_errf(exl3_client_err(), e,
			  "the ring of %u entries is full: take completions first",
			  ch->ring.sq_mask + 1);
		return NULL;
	}
	if (e < 0) {
		ch->stale = true;
		exl3_errf(exl3_client_err(), e, "the daemon has broken the ring protocol");
		return NULL;
	}
	ch->last = sqe;
	return sqe;
}

static void kick(struct exl3_channel *ch)
{
	uint64_t one = 1;
	ssize_t n;

	do {
		n = write(ch->kick_fd, &one, sizeof(one));
		ch->syscalls++;
	} while (n < 0 && errno == EINTR);
	/* EAGAIN: the counter is full, so kicks are pending already. */
}

int exl3_submit(struct exl3_channel *ch)
{
	struct exl3_ring_client *r = &ch->ring;
	uint32_t n = r->sq_next - r->sq_published;

	if (exl3_client_forked(ch->obj.client))
		return exl3_client_check(ch->obj.client);
	if (ch->recording)
		return 0;
	if (ch->stale || (!ch->map && (__atomic_load_n(&ch->ended, __ATOMIC_RELAXED) ||
				       __atomic_load_n(&ch->obj.client->dead, __ATOMIC_RELAXED)))) {
		forget_unpublished(ch);
		return stale_error(ch);
	}
	for (uint32_t i = r->sq_published; i != r->sq_next; i++)
		ch->pending[ch->pending_last++ & r->cq_mask] =
			(struct exl3_pending){.user_data = r->sqes[i & r->sq_mask].user_data,
					      .stream = ch->last_is_stream};
	if (!ch->last_is_stream)
		ch->nr_plain += n;
	ch->last = NULL;
	if (exl3_ring_publish(r))
		kick(ch);
	if (ch->map)
		exl3_map_serve(ch);
	return (int)n;
}

/* Notes that a request has ended; NULL: there is no such one. Completions come in order, unless
 * somebody cancels, so the first look finds it. Valid until the next one is noted. */
static const struct exl3_pending *pending_done(struct exl3_channel *ch, uint64_t user_data)
{
	struct exl3_pending *p = ch->pending, *found;
	uint32_t mask = ch->ring.cq_mask;

	for (uint32_t i = ch->pending_first; i != ch->pending_last; i++) {
		found = &p[i & mask];
		if (found->done || found->user_data != user_data)
			continue;
		found->done = true;
		while (ch->pending_first != ch->pending_last && p[ch->pending_first & mask].done)
			ch->pending_first++;
		return found;
	}
	return NULL;
}

/* A made-up completion for the oldest request that will never get a real one; NULL: none left. */
static const struct exl3_pending *take_stale(struct exl3_channel *ch, struct exl3_cqe *ret)
{
	uint32_t mask = ch->ring.cq_mask;

	while (ch->pending_first != ch->pending_last) {
		const struct exl3_pending *p = &ch->pending[ch->pending_first++ & mask];

		if (p->done)
			continue;
		ch->ring.outstanding--;
		*ret = (struct exl3_cqe){.user_data = p->user_data, .result = -ESTALE};
		return p;
	}
	return NULL;
}

/* One completion of whatever kind; *@of: its request. 1, 0, -ESTALE. */
static int take(struct exl3_channel *ch, struct exl3_cqe *ret, const struct exl3_pending **of)
{
	int e;

	if (ch->map && exl3_map_stalled(ch))
		exl3_map_serve(ch);
	if (!ch->stale) {
		bool over;

		e = exl3_ring_take(&ch->ring, ret);
		if (e == 1 && (*of = pending_done(ch, ret->user_data)))
			return 1;
		if (e == 1) {
			/* A completion of a request that was never made: it counts for none. */
			ch->ring.outstanding++;
			e = -EPROTO;
		}
		over = e == 0 && gone(ch);
		if (e == 0 && !over)
			return 0;
		/* What was posted before the end is still good: look once more, after having seen it. */
		if (over && exl3_ring_take(&ch->ring, ret) == 1) {
			if ((*of = pending_done(ch, ret->user_data)))
				return 1;
			ch->ring.outstanding++;
		}
		ch->stale = true; /* from here on the ring is not looked at any more */
	}
	if ((*of = take_stale(ch, ret)))
		return 1;
	return revive(ch) ? 0 : stale_error(ch);
}

/* True: it is none of a stream call. */
static bool is_plain(struct exl3_channel *ch, const struct exl3_pending *of, const struct exl3_cqe *cqe)
{
	if (of->stream) {
		exl3_stream_ended(ch, cqe);
		return false;
	}
	ch->nr_plain--;
	return true;
}

int exl3_peek(struct exl3_channel *ch, struct exl3_cqe *ret)
{
	const struct exl3_pending *of;
	int e;

	if (exl3_client_forked(ch->obj.client))
		return exl3_client_check(ch->obj.client);
	if (ch->kept_first != ch->kept_last) {
		*ret = ch->kept[ch->kept_first++ & ch->ring.cq_mask];
		return 1;
	}
	do
		e = take(ch, ret, &of);
	while (e == 1 && !is_plain(ch, of, ret));
	return e;
}

int exl3_channel_take(struct exl3_channel *ch)
{
	const struct exl3_pending *of;
	struct exl3_cqe cqe;
	int e;

	if (ch->kept_last - ch->kept_first > ch->ring.cq_mask)
		return exl3_errf(exl3_client_err(), -EAGAIN,
				 "the completions of other requests must be taken first");
	e = take(ch, &cqe, &of);
	if (e == 1 && is_plain(ch, of, &cqe))
		ch->kept[ch->kept_last++ & ch->ring.cq_mask] = cqe;
	return e;
}

void exl3_channel_forget(struct exl3_channel *ch)
{
	forget_unpublished(ch);
}

/* ---- waiting ---- */

/* True: something may be there. */
static bool spin(struct exl3_channel *ch, uint64_t until_ns)
{
	const uint32_t *tail = &ch->ring.hdr->cq_tail.v;

	do {
		for (int i = 0; i < SPINS_PER_LOOK; i++) {
			if (__atomic_load_n(tail, __ATOMIC_RELAXED) != ch->ring.cq_next)
				return true;
			exl3_ring_relax();
		}
		if (gone(ch))
			return true;
	} while (exl3_now_ns() < until_ns);
	return false;
}

static void sleep_on_ring(struct exl3_channel *ch, uint64_t ns)
{
	struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000),
			      .tv_nsec = (long)(ns % 1000000000)};

	/* What such a channel waits for wakes nobody. */
	if (exl3_map_stalled(ch) && ns > STALLED_NS)
		ts = (struct timespec){.tv_nsec = STALLED_NS};
	/* Before the last look at gone(): whoever sets that after our look sees this flag, see watch.c. */
	__atomic_store_n(&ch->sleeping, 1, __ATOMIC_SEQ_CST);
	if (exl3_ring_arm(&ch->ring, ch->cq_flags | EXL3_CQ_NEED_WAKEUP) && !gone(ch)) {
		exl3_ring_futex_wait(&ch->ring.hdr->cq_tail.v, ch->ring.cq_next,
				     ns == UINT64_MAX && !exl3_map_stalled(ch) ? NULL : &ts);
		ch->syscalls++;
	}
	exl3_ring_disarm(&ch->ring, ch->cq_flags);
	__atomic_store_n(&ch->sleeping, 0, __ATOMIC_SEQ_CST);
}

bool exl3_channel_sleep(struct exl3_channel *ch, uint64_t end_ns)
{
	uint64_t now = exl3_now_ns();

	if (now >= end_ns)
		return false;
	if (ch->spin_ns && spin(ch, ch->spin_ns > end_ns - now ? end_ns : now + ch->spin_ns))
		return true;
	now = exl3_now_ns();
	if (now < end_ns)
		sleep_on_ring(ch, end_ns == UINT64_MAX ? UINT64_MAX : end_ns - now);
	return true;
}

int exl3_wait(struct exl3_channel *ch, struct exl3_cqe *ret, uint64_t timeout_ns)
{
	uint64_t now, end, spin_end;
	int e = exl3_peek(ch, ret);

	if (e != 0 || timeout_ns == 0 || ch->nr_plain == 0)
		return e;
	now = exl3_now_ns();
	end = timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
	spin_end = ch->spin_ns > end - now ? end : now + ch->spin_ns;
	if (ch->spin_ns)
		spin(ch, spin_end);
	for (;;) {
		e = exl3_peek(ch, ret);
		if (e != 0)
			return e;
		now = end == UINT64_MAX ? 0 : exl3_now_ns();
		if (now >= end)
			return 0;
		sleep_on_ring(ch, end == UINT64_MAX ? UINT64_MAX : end - now);
	}
}

int exl3_fd(struct exl3_channel *ch)
{
	ch->cq_flags = EXL3_CQ_WANT_MSG;
	/* W3: a completion that came before is found by the peek that has to come before poll(). */
	exl3_ring_arm(&ch->ring, ch->cq_flags);
	return ch->notify_fd;
}

void exl3_fd_clear(struct exl3_channel *ch)
{
	char drop[64];

	do
		ch->syscalls++;
	while (recv(ch->notify_fd, drop, sizeof(drop), MSG_DONTWAIT) > 0);
}

void exl3_channel_set_spin(struct exl3_channel *ch, uint64_t ns)
{
	ch->spin_ns = ns;
}

uint64_t exl3_channel_syscalls(const struct exl3_channel *ch)
{
	return ch->syscalls;
}
