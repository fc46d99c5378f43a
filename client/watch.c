/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watch.c - a thread that notices that the worker, or one channel, is gone, and wakes who waits for it.
 *
 * It polls the control socket and the notification sockets for hang-up only and never reads, so it
 * steals neither replies nor notifications. A futex on cq_tail does not announce by itself that no
 * completion will ever come: so the watcher sets a flag that a sleeper checks after it has said that it
 * is about to sleep, and wakes it again and again until it says that it is awake. A CUDA stream that waits
 * for a word would not wake up either: it is let go, see stream.c.
 */
#include "client/map.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#define RETRY_MIN_MS 2
#define RETRY_MAX_MS 100

enum { SLOT_SOCK, SLOT_EVENT, SLOT_MAPS, SLOT_CHANNELS = SLOT_MAPS + EXL3_MAPPINGS_MAX };

struct watch_set {
	struct pollfd fds[SLOT_CHANNELS + EXL3_CHANNELS_MAX];
	uint64_t serials[EXL3_CHANNELS_MAX]; /* of the channels; they may be freed while we poll */
	unsigned nr_channels;
	uint64_t maps[EXL3_MAPPINGS_MAX]; /* serials of the mappings */
	unsigned nr_maps;
};

void exl3_watcher_poke(struct exl3_client *c)
{
	uint64_t one = 1;
	ssize_t n;

	do
		n = write(c->watch_fd, &one, sizeof(one));
	while (n < 0 && errno == EINTR);
}

/* True: somebody still sleeps, call again. */
static bool wake_sleeper(struct exl3_channel *ch)
{
	if (!__atomic_load_n(&ch->sleeping, __ATOMIC_SEQ_CST))
		return false;
	exl3_ring_futex_wake(&ch->ring.hdr->cq_tail.v);
	return true;
}

static void pause_briefly(void)
{
	struct timespec ts = {.tv_nsec = 100000};

	nanosleep(&ts, NULL);
}

static void wake_all(struct exl3_client *c)
{
	bool again;

	do {
		again = false;
		pthread_mutex_lock(&c->list);
		for (struct exl3_channel *ch = c->channels; ch; ch = ch->next)
			if (!ch->map && (__atomic_load_n(&c->dead, __ATOMIC_SEQ_CST) ||
					 __atomic_load_n(&ch->ended, __ATOMIC_SEQ_CST))) {
				exl3_stream_release(ch, -ESTALE);
				again |= wake_sleeper(ch);
			}
		pthread_mutex_unlock(&c->list);
		if (again)
			pause_briefly();
	} while (again);
}

void exl3_client_lost(struct exl3_client *c)
{
	__atomic_store_n(&c->dead, 1, __ATOMIC_SEQ_CST);
	/* Also the way to the watcher: it sees the hang-up of its own socket. */
	shutdown(c->sock, SHUT_RDWR);
}

static void fill(struct exl3_client *c, struct watch_set *w, bool dead)
{
	int fds[EXL3_MAPPINGS_MAX];

	w->nr_maps = exl3_map_fds(c, fds, w->maps);
	for (unsigned i = 0; i < EXL3_MAPPINGS_MAX; i++)
		w->fds[SLOT_MAPS + i] =
			(struct pollfd){.fd = i < w->nr_maps ? fds[i] : -1, .events = POLLRDHUP};
	/* A hang-up is reported for ever; once it is known there is nothing more to learn. */
	w->fds[SLOT_SOCK] = (struct pollfd){.fd = dead ? -1 : c->sock, .events = POLLRDHUP};
	w->fds[SLOT_EVENT] = (struct pollfd){.fd = c->watch_fd, .events = POLLIN};
	w->nr_channels = 0;
	pthread_mutex_lock(&c->list);
	for (struct exl3_channel *ch = c->channels; ch && w->nr_channels < EXL3_CHANNELS_MAX;
	     ch = ch->next) {
		if (dead || ch->map || __atomic_load_n(&ch->ended, __ATOMIC_RELAXED))
			continue;
		w->fds[SLOT_CHANNELS + w->nr_channels] =
			(struct pollfd){.fd = ch->notify_fd, .events = POLLRDHUP};
		w->serials[w->nr_channels++] = ch->serial;
	}
	pthread_mutex_unlock(&c->list);
}

/* Marks the channels that hung up. One may have been freed since fill(): look it up first. A worker that ends
 * a channel says so in its ring; one that is killed does not, and may take its time to close the other sockets. */
static void mark_ended(struct exl3_client *c, const struct watch_set *w)
{
	bool killed = false;

	for (unsigned i = 0; i < w->nr_channels; i++) {
		if (!(w->fds[SLOT_CHANNELS + i].revents & (POLLRDHUP | POLLHUP | POLLERR)))
			continue;
		pthread_mutex_lock(&c->list);
		for (struct exl3_channel *ch = c->channels; ch; ch = ch->next) {
			if (ch->serial != w->serials[i])
				continue;
			killed |= exl3_ring_state(&ch->ring) == EXL3_CHANNEL_OPEN;
			__atomic_store_n(&ch->ended, 1, __ATOMIC_SEQ_CST);
		}
		pthread_mutex_unlock(&c->list);
	}
	if (killed)
		exl3_client_lost(c);
}

/* True: an attempt to connect again is wanted. */
static bool wanted(struct exl3_client *c)
{
	bool ret;

	pthread_mutex_lock(&c->list);
	ret = !c->gone && (!(c->flags & EXL3_CONNECT_MANUAL) || c->waiters);
	pthread_mutex_unlock(&c->list);
	return ret;
}

/* Milliseconds until the next attempt, < 0: none. The first one comes at once: the daemon's socket outlives
 * the worker, and a connection waits there until the next worker is ready. */
static int reconnect(struct exl3_client *c, int pause_ms)
{
	wake_all(c);
	if (!wanted(c) || exl3_client_restore(c) == 0)
		return -1;
	if (pause_ms < 0)
		return RETRY_MIN_MS;
	return 2 * pause_ms < RETRY_MAX_MS ? 2 * pause_ms : RETRY_MAX_MS;
}

static void *watch(void *arg)
{
	struct exl3_client *c = arg;
	struct watch_set w;
	uint64_t drop, retry_ns = 0;
	int pause_ms = -1; /* < 0: no attempt is due */

	while (!__atomic_load_n(&c->stop, __ATOMIC_ACQUIRE)) {
		bool dead = __atomic_load_n(&c->dead, __ATOMIC_ACQUIRE);

		if (dead && exl3_now_ns() >= retry_ns) {
			pause_ms = reconnect(c, pause_ms);
			retry_ns = exl3_now_ns() + (pause_ms < 0 ? 0 : (uint64_t)pause_ms * 1000000);
			dead = __atomic_load_n(&c->dead, __ATOMIC_ACQUIRE);
		}
		fill(c, &w, dead);
		if (poll(w.fds, SLOT_CHANNELS + w.nr_channels, dead ? pause_ms : -1) < 0)
			continue; /* EINTR, or ENOMEM for a moment */
		if (w.fds[SLOT_EVENT].revents & POLLIN &&
		    read(c->watch_fd, &drop, sizeof(drop)) < 0)
			continue;
		if (w.fds[SLOT_SOCK].revents)
			__atomic_store_n(&c->dead, 1, __ATOMIC_SEQ_CST);
		mark_ended(c, &w);
		for (unsigned i = 0; i < w.nr_maps; i++)
			if (w.fds[SLOT_MAPS + i].revents)
				exl3_map_hangup(c, w.maps[i]);
		exl3_map_reap(c);
		wake_all(c);
	}
	return NULL;
}

int exl3_watcher_start(struct exl3_client *c)
{
	sigset_t all, old;
	int e;

	c->watch_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (c->watch_fd < 0)
		return exl3_errf(exl3_client_err(), -errno, "eventfd: %m");
	/* The program's signals are none of this thread's business. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	e = pthread_create(&c->watcher, NULL, watch, c);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (e)
		return exl3_errf(exl3_client_err(), -e, "cannot start a thread");
	c->watching = true;
	return 0;
}

void exl3_watcher_stop(struct exl3_client *c)
{
	if (!c->watching)
		return;
	__atomic_store_n(&c->stop, 1, __ATOMIC_RELEASE);
	exl3_watcher_poke(c);
	/* It may be in the middle of an attempt, waiting for a reply. */
	pthread_mutex_lock(&c->list);
	shutdown(c->sock, SHUT_RDWR);
	pthread_mutex_unlock(&c->list);
	pthread_join(c->watcher, NULL);
	c->watching = false;
}

void exl3_watcher_add(struct exl3_channel *ch)
{
	struct exl3_client *c = ch->obj.client;

	pthread_mutex_lock(&c->list);
	ch->serial = ++c->next_serial;
	ch->prev = NULL;
	ch->next = c->channels;
	if (ch->next)
		ch->next->prev = ch;
	c->channels = ch;
	pthread_mutex_unlock(&c->list);
	exl3_watcher_poke(c);
}

void exl3_watcher_remove(struct exl3_channel *ch)
{
	struct exl3_client *c = ch->obj.client;

	pthread_mutex_lock(&c->list);
	if (ch->prev)
		ch->prev->next = ch->next;
	else
		c->channels = ch->next;
	if (ch->next)
		ch->next->prev = ch->prev;
	pthread_mutex_unlock(&c->list);
	exl3_watcher_poke(c);
}
