/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map_channel.c - a channel of mapped mode: a ring like any other, whose other end is here too.
 *
 * exl3_submit() publishes entries as always; then, instead of a kick, exl3_map_serve() takes them and runs
 * them in their order. On a processor each has ended when the next begins. On a GPU they are enqueued on a stream of the
 * channel, and a callback of the driver's posts their completions; so the completion side has a lock.
 */
#include "client/map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* What is on a GPU. */
struct flying {
	struct exl3_cqe cqe;
	struct exl3_mapping *on;
	bool stream; /* a stream call */
};

struct exl3_map_channel {
	struct exl3_client *c;         /* borrowed */
	struct exl3_channel *ch;       /* likewise */
	struct exl3_mapped_lane *lane; /* owned */
	struct exl3_mapped_lane *caller_lane; /* owned; for calls on the caller's stream: another workspace; NULL: none yet */
	int notify_fd;                 /* owned; our end */
	/* Entries that were taken and have not begun; [first, last) free-running, masked as the SQ. */
	struct exl3_sqe *queue;        /* owned */
	bool *cancelled;               /* owned */
	uint32_t first, last;

	/* Of the entry that is run. */
	struct exl3_mapping *pinned;
	int why;
	bool on_caller;                /* its stream is: */
	void *caller;

	void *streams[EXL3_MAPPED_GPUS]; /* owned; by the GPU's number */
	int gpu;                       /* of the last target, -1: none */

	pthread_mutex_t post; /* the ring's completion side, and: */
	struct exl3_ring_server ring;
	struct flying *flying; /* owned; by cq_mask; in order */
	uint32_t flying_first, flying_last;
};

/* ---- completions ---- */

/* The word of a stream call, as the daemon would write it. */
static void write_word(struct exl3_map_channel *m, const struct exl3_cqe *cqe)
{
	struct exl3_stream *s = __atomic_load_n(&m->ch->stream, __ATOMIC_ACQUIRE);
	uint32_t call = (uint32_t)cqe->user_data;

	if (!s)
		return;
	if (cqe->result < 0)
		__atomic_store_n(&s->slots[call & s->mask].result, cqe->result, __ATOMIC_RELAXED);
	__atomic_store_n(&s->slots[call & s->mask].done, call, __ATOMIC_RELEASE);
}

static void post(struct exl3_map_channel *m, const struct exl3_cqe *cqe, bool stream)
{
	const char byte = 0;
	uint32_t how;

	if (stream)
		write_word(m, cqe);
	pthread_mutex_lock(&m->post);
	exl3_cq_post(&m->ring, cqe);
	how = exl3_cq_publish(&m->ring);
	if (how & EXL3_CQ_NEED_WAKEUP)
		exl3_cq_wake(&m->ring);
	if (how & EXL3_CQ_WANT_MSG)
		(void)!send(m->notify_fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
	pthread_mutex_unlock(&m->post);
}

/* The oldest request on the GPU has ended. */
static void landed(struct exl3_map_channel *m, int result, void (*unpin)(struct exl3_client *c, struct exl3_mapping *m))
{
	struct flying f;

	pthread_mutex_lock(&m->post);
	f = m->flying[m->flying_first++ & m->ring.cq_mask];
	pthread_mutex_unlock(&m->post);
	if (result < 0)
		f.cqe.result = result;
	post(m, &f.cqe, f.stream);
	unpin(m->c, f.on);
}

/* On a thread of the driver's, which no call of the driver may be made on: nothing here does. */
static void on_landed(void *arg)
{
	landed(arg, 0, exl3_map_unpin_later);
}

static bool flying(struct exl3_map_channel *m)
{
	bool ret;

	pthread_mutex_lock(&m->post);
	ret = m->flying_first != m->flying_last;
	pthread_mutex_unlock(&m->post);
	return ret;
}

static int take_off(struct exl3_map_channel *m, const struct exl3_cqe *cqe, bool stream)
{
	int e;

	pthread_mutex_lock(&m->post);
	m->flying[m->flying_last++ & m->ring.cq_mask] = (struct flying){*cqe, m->pinned, stream};
	pthread_mutex_unlock(&m->post);
	e = exl3_map_cuda_after(m->streams[m->gpu], m->gpu, on_landed, m);
	if (e == 0)
		return 0;
	pthread_mutex_lock(&m->post);
	m->flying_last--;
	pthread_mutex_unlock(&m->post);
	return e;
}

/* After an error of the context no callback comes. */
static void look_for_failure(struct exl3_map_channel *m)
{
	if (m->gpu < 0 || !flying(m) || exl3_map_cuda_idle(m->streams[m->gpu]) >= 0)
		return;
	while (flying(m))
		landed(m, -EIO, exl3_map_unpin);
}

/* ---- what a request needs ---- */

static int on_target(void *arg, uint32_t handle, struct exl3_mapped_target *ret)
{
	struct exl3_map_channel *m = arg;
	int e = exl3_map_target(m->c, handle, ret, &m->pinned, &m->why), before = m->gpu;

	if (e < 0)
		return e;
	if (m->on_caller) {
		ret->stream = m->caller;
		if (m->pinned->gpu >= 0)
			return 0;
		m->why = -EOPNOTSUPP; /* a processor has no streams */
	} else if (m->pinned->gpu < 0) {
		/* What an earlier one computes on a GPU may be what this one reads. */
		if (before >= 0 && flying(m))
			exl3_map_cuda_wait(before);
		return 0;
	} else {
		if (before >= 0 && before != m->pinned->gpu && flying(m))
			exl3_map_cuda_wait(before);
		m->why = exl3_map_cuda_stream(m->streams, m->pinned->gpu, &ret->stream);
		m->gpu = m->pinned->gpu;
		if (m->why == 0)
			return 0;
	}
	exl3_map_unpin(m->c, m->pinned);
	m->pinned = NULL;
	return -ENOENT;
}

static bool on_extent(void *arg, uint32_t buffer, bool gpu, struct exl3_mapped_extent *ret)
{
	struct exl3_map_channel *m = arg;

	return exl3_map_extent(m->c, buffer, gpu, ret);
}

/* As the lane's run(), with the reasons that only libexl3 knows. */
static int run(struct exl3_map_channel *m, struct exl3_mapped_lane *lane, const struct exl3_sqe *sqe,
	       struct exl3_cqe *cqe)
{
	int enqueued;

	m->pinned = NULL;
	m->why = 0;
	enqueued = m->c->maps->ops->run(lane, sqe, cqe);
	if (m->why) {
		cqe->result = m->why;
		cqe->detail = m->why == -ESTALE ? EXL3_DETAIL_MODEL : EXL3_DETAIL_NONE;
	}
	return enqueued;
}

static void run_one(struct exl3_map_channel *m, const struct exl3_sqe *sqe)
{
	bool stream = sqe->flags & EXL3_STREAM;
	struct exl3_cqe cqe;
	int e;

	if (run(m, m->lane, sqe, &cqe) == 1) {
		e = take_off(m, &cqe, stream);
		if (e == 0)
			return; /* the pin is the flying one's */
		exl3_map_cuda_wait(m->gpu);
		cqe.result = e;
		cqe.detail = 0;
	}
	if (m->pinned)
		exl3_map_unpin(m->c, m->pinned);
	/* An empty request ends in its turn. */
	if (sqe->op == EXL3_OP_NOP && m->gpu >= 0 && flying(m))
		exl3_map_cuda_wait(m->gpu);
	post(m, &cqe, stream);
}

/* ---- the queue ---- */

static void end(struct exl3_map_channel *m, const struct exl3_sqe *sqe, int result)
{
	post(m, &(struct exl3_cqe){.user_data = sqe->user_data, .result = result}, sqe->flags & EXL3_STREAM);
}

/* Takes no turn. The oldest request of that name that has not begun ends with -ECANCELED. */
static void cancel(struct exl3_map_channel *m, const struct exl3_sqe *sqe)
{
	uint32_t mask = m->ring.sq_mask;
	struct exl3_cqe cqe;

	m->c->maps->ops->check(m->lane, sqe, &cqe);
	if (cqe.result == 0)
		cqe.result = -ENOENT;
	for (uint32_t i = m->first; i != m->last && cqe.result == -ENOENT; i++) {
		if (m->queue[i & mask].user_data != sqe->u.cancel.user_data || m->cancelled[i & mask])
			continue;
		m->cancelled[i & mask] = true;
		end(m, &m->queue[i & mask], -ECANCELED);
		cqe.result = 0;
	}
	pthread_mutex_lock(&m->post);
	for (uint32_t i = m->flying_first; i != m->flying_last && cqe.result == -ENOENT; i++)
		if (m->flying[i & m->ring.cq_mask].cqe.user_data == sqe->u.cancel.user_data)
			cqe.result = -EALREADY;
	pthread_mutex_unlock(&m->post);
	post(m, &cqe, sqe->flags & EXL3_STREAM);
}

static bool ready(const struct exl3_map_channel *m, const struct exl3_sqe *sqe)
{
	const struct exl3_stream *s = m->ch->stream;

	if (!(sqe->flags & EXL3_STREAM) || !s)
		return true;
	return (int32_t)(__atomic_load_n(&s->slots[sqe->stream_seq & s->mask].ready, __ATOMIC_ACQUIRE) -
			 sqe->stream_seq) >= 0;
}

/* What would be refused anyway is refused now, not when it is ready. */
static bool refused(struct exl3_map_channel *m, const struct exl3_sqe *sqe)
{
	struct exl3_cqe cqe;

	m->pinned = NULL;
	m->why = 0;
	m->c->maps->ops->check(m->lane, sqe, &cqe);
	if (m->pinned)
		exl3_map_unpin(m->c, m->pinned);
	if (m->why)
		cqe = (struct exl3_cqe){.user_data = sqe->user_data, .result = m->why};
	if (cqe.result < 0)
		post(m, &cqe, true);
	return cqe.result < 0;
}

static void take_in(struct exl3_map_channel *m)
{
	struct exl3_sqe sqe;

	/* Never more than fit: they are no more than the ring holds. */
	while (m->last - m->first <= m->ring.sq_mask) {
		int n;

		pthread_mutex_lock(&m->post);
		n = exl3_sq_take(&m->ring, &sqe, 1);
		pthread_mutex_unlock(&m->post);
		if (n <= 0)
			return;
		if (sqe.op == EXL3_OP_CANCEL) {
			cancel(m, &sqe);
			continue;
		}
		if (!ready(m, &sqe) && refused(m, &sqe))
			continue;
		m->cancelled[m->last & m->ring.sq_mask] = false;
		m->queue[m->last++ & m->ring.sq_mask] = sqe;
	}
}

void exl3_map_serve(struct exl3_channel *ch)
{
	struct exl3_map_channel *m = ch->map;

	look_for_failure(m);
	do {
		take_in(m);
		while (m->first != m->last) {
			uint32_t at = m->first & m->ring.sq_mask;
			const struct exl3_sqe *sqe = &m->queue[at];

			if (!m->cancelled[at]) {
				bool late = sqe->deadline_ns && exl3_now_ns() >= sqe->deadline_ns;

				if (!late && !ready(m, sqe))
					return;
				if (late)
					end(m, sqe, -ETIME);
				else
					run_one(m, sqe);
			}
			m->first++;
		}
	} while (exl3_sq_pending(&m->ring));
}

bool exl3_map_stalled(const struct exl3_channel *ch)
{
	return ch->map && (ch->map->first != ch->map->last || ch->map->gpu >= 0);
}

/* ---- streams of the caller's ---- */

int exl3_map_stream(struct exl3_channel *ch, const struct exl3_sqe *sqe, void *stream)
{
	struct exl3_map_channel *m = ch->map;
	const struct exl3_mapped_env env = {.target = on_target, .extent = on_extent, .arg = m};
	bool capturing, before = m->on_caller;
	struct exl3_cqe cqe;
	int e = exl3_map_cuda_capturing(stream, &capturing);

	if (e == 0 && !m->caller_lane)
		e = m->c->maps->ops->lane_new(&env, &m->caller_lane, exl3_client_err());
	if (e < 0)
		return e;
	/* One workspace, one stream at a time; and this channel's other requests come first. */
	if ((before && m->caller != stream) || m->first != m->last || flying(m)) {
		if (capturing)
			return exl3_errf(exl3_client_err(), -EBUSY,
					 "stream: earlier calls of this channel may still run beside what is captured now: "
					 "wait for their end first");
		exl3_map_serve(ch);
		if (before && m->caller != stream && exl3_map_stream_wait(ch, UINT64_MAX) < 0)
			return exl3_errf(exl3_client_err(), -EIO, "stream: an earlier call of this channel has failed");
		if (m->gpu >= 0)
			exl3_map_cuda_wait(m->gpu);
		if (m->first != m->last)
			return exl3_errf(exl3_client_err(), -EBUSY,
					 "stream: an earlier call of this channel waits for exl3_stream_ready()");
	}
	m->on_caller = true;
	m->caller = stream;
	run(m, m->caller_lane, sqe, &cqe);
	m->on_caller = false;
	if (m->pinned) {
		/* The stream runs on; who lets go of the weights waits for all of the GPU, which is not enough for a graph. */
		if (capturing)
			__atomic_store_n(&m->pinned->captured, true, __ATOMIC_SEQ_CST);
		exl3_map_unpin(m->c, m->pinned);
	}
	m->on_caller = cqe.result == 0;
	if (cqe.result < 0)
		return exl3_errf(exl3_client_err(), cqe.result, "stream: %s", exl3_result_text(&cqe));
	return 0;
}

int exl3_map_stream_wait(struct exl3_channel *ch, uint64_t end_ns)
{
	struct timespec ts = {.tv_nsec = 20000};
	int e = 1;

	while (ch->map->on_caller && (e = exl3_map_cuda_idle(ch->map->caller)) == 0) {
		if (exl3_now_ns() >= end_ns)
			return 0;
		nanosleep(&ts, NULL);
	}
	return e;
}

/* ---- life ---- */

void exl3_map_channel_free(struct exl3_channel *ch)
{
	struct exl3_map_channel *m = ch->map;

	ch->map = NULL;
	if (!m)
		return;
	if (!exl3_client_forked(m->c)) {
		for (int gpu = 0; gpu < EXL3_MAPPED_GPUS; gpu++)
			exl3_map_cuda_stream_free(m->streams[gpu], gpu);
		if (m->on_caller)
			exl3_map_stream_wait(&(struct exl3_channel){.map = m}, UINT64_MAX);
		while (m->flying_first != m->flying_last) /* a context that failed */
			landed(m, -EIO, exl3_map_unpin);
		m->c->maps->ops->lane_free(m->lane);
		m->c->maps->ops->lane_free(m->caller_lane);
		pthread_mutex_destroy(&m->post);
	}
	exl3_closep(&m->notify_fd);
	free(m->queue);
	free(m->cancelled);
	free(m->flying);
	free(m);
}

static int alloc(struct exl3_map_channel *m, uint32_t entries)
{
	m->queue = calloc(entries, sizeof(*m->queue));
	m->cancelled = calloc(entries, sizeof(*m->cancelled));
	m->flying = calloc(2ul * entries, sizeof(*m->flying));
	return m->queue && m->cancelled && m->flying
		       ? 0
		       : exl3_errf(exl3_client_err(), -ENOMEM, "channel: out of memory");
}

int exl3_map_channel_new(struct exl3_channel *ch, struct exl3_client *c, uint32_t entries)
{
	const struct exl3_ring_params params = {
		.sq_entries = entries, .generation = c->generation, .instance = c->instance};
	struct exl3_map_channel *m = calloc(1, sizeof(*m));
	int pair[2], e;

	if (!m)
		return exl3_errf(exl3_client_err(), -ENOMEM, "channel: out of memory");
	m->c = c;
	m->ch = ch;
	m->gpu = -1;
	m->notify_fd = -1;
	pthread_mutex_init(&m->post, NULL);
	ch->map = m;
	e = exl3_ring_create(&params, &ch->seg, &m->ring, exl3_client_err());
	if (e == 0)
		e = exl3_ring_attach(ch->seg, &ch->ring, exl3_client_err());
	if (e == 0)
		e = alloc(m, entries);
	if (e == 0 && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
		e = exl3_errf(exl3_client_err(), -errno, "channel: socketpair: %m");
	if (e == 0) {
		const struct exl3_mapped_env env = {.target = on_target, .extent = on_extent, .arg = m};

		ch->notify_fd = pair[0];
		m->notify_fd = pair[1];
		e = c->maps->ops->lane_new(&env, &m->lane, exl3_client_err());
	}
	if (e < 0) {
		exl3_map_channel_free(ch);
		ch->seg = exl3_segment_free(ch->seg);
		exl3_closep(&ch->notify_fd);
	}
	return e;
}
