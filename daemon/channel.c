/* SPDX-License-Identifier: Apache-2.0 */
/* channel.c - a client's ring pair: when it is looked at, when its client must kick, and its end. */
#include "daemon/dispatch_priv.h"

#include "daemon/fault.h"
#include "daemon/log.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

static struct exl3_list *list_of(struct exl3_channel *ch)
{
	switch (ch->where) {
	case EXL3_CH_POLLED:
		return &ch->d->polled;
	case EXL3_CH_DORMANT:
		return &ch->d->dormant;
	case EXL3_CH_MUTED:
		return &ch->d->muted;
	default:
		return NULL;
	}
}

static void move(struct exl3_channel *ch, enum exl3_channel_where where)
{
	struct exl3_list *list = list_of(ch);

	if (ch->where == EXL3_CH_WAITING)
		exl3_gate_leave(ch);
	if (list) {
		if (ch->prev)
			ch->prev->next = ch->next;
		else
			list->head = ch->next;
		if (ch->next)
			ch->next->prev = ch->prev;
		list->nr--;
	}
	ch->where = where;
	ch->next = ch->prev = NULL;
	if (where == EXL3_CH_WAITING)
		exl3_gate_enter(ch);
	list = list_of(ch);
	if (!list)
		return;
	ch->next = list->head;
	if (ch->next)
		ch->next->prev = ch;
	list->head = ch;
	list->nr++;
}

/* ---- waking and sleeping ---- */

static void poll_again(struct exl3_channel *ch)
{
	exl3_sq_disarm(&ch->ring);
	move(ch, EXL3_CH_POLLED);
}

static void start_muted_timer(struct exl3_dispatch *d)
{
	if (!d->muted_timer.armed)
		exl3_timer_set(d->loop, &d->muted_timer, exl3_now_ns() + EXL3_MUTED_NS);
}

static void on_kick(void *arg, uint32_t events)
{
	struct exl3_channel *ch = arg;

	(void)events;
	if (exl3_sq_pending(&ch->ring)) {
		if (ch->where == EXL3_CH_DORMANT)
			poll_again(ch);
		return;
	}
	/* A late kick for what was already taken is normal, a stream of them is not. */
	if (++ch->idle_kicks < EXL3_KICKS_MAX)
		return;
	exl3_dbg("%s: channel %u kicks without work, looked at every %llu ms now", ch->who, ch->id,
		 EXL3_MUTED_NS / 1000000);
	ch->watch = exl3_watch_drop(ch->d->loop, ch->watch);
	if (ch->where != EXL3_CH_DORMANT)
		return; /* it goes to the muted ones when it would become dormant */
	move(ch, EXL3_CH_MUTED);
	start_muted_timer(ch->d);
}

/* Whoever has work is polled again, and may kick again once it has been taken. */
void exl3_channels_on_muted(void *arg)
{
	struct exl3_dispatch *d = arg;
	struct exl3_channel *next;

	for (struct exl3_channel *ch = d->muted.head; ch; ch = next) {
		next = ch->next;
		if (exl3_sq_pending(&ch->ring))
			poll_again(ch);
	}
	if (d->muted.head)
		start_muted_timer(d);
}

/* How long to look for more before the client has to kick: the whole time for a client that answers at
 * once, not at all for one that comes rarely. */
static uint64_t spin_budget(const struct exl3_channel *ch)
{
	uint64_t spin = ch->d->spin_ns;

	if (exl3_dispatch_needs_cpu(ch->d))
		return 0;
	return ch->gap_ns <= 2 * spin ? spin : 0;
}

static void go_dormant(struct exl3_channel *ch)
{
	if (!exl3_sq_arm(&ch->ring))
		return; /* something came in between */
	if (!ch->watch && ch->idle_kicks < EXL3_KICKS_MAX &&
	    exl3_watch_add(ch->d->loop, ch->kick_fd, POLLIN, EXL3_WATCH_EDGE, on_kick, ch,
			   &ch->watch) < 0)
		ch->watch = NULL;
	if (ch->watch) {
		move(ch, EXL3_CH_DORMANT);
		return;
	}
	/* Muted, or no memory for a watch: the timer looks after it. */
	move(ch, EXL3_CH_MUTED);
	start_muted_timer(ch->d);
}

/* Takes it off every list; what is running goes on. */
static void detach(struct exl3_channel *ch, enum exl3_channel_state state)
{
	ch->stashed = false;
	exl3_dispatch_drop_queued(ch);
	move(ch, EXL3_CH_DEAD);
	ch->watch = exl3_watch_drop(ch->d->loop, ch->watch);
	exl3_ring_end(&ch->ring, state);
	exl3_closep(&ch->notify_fd); /* the client's watcher sees the end of it */
}

static void channel_fail(struct exl3_channel *ch, const char *why)
{
	exl3_log_limited(EXL3_LOG_WARN, "%s: channel %u failed: %s", ch->who, ch->id, why);
	ch->failed = true;
	if (ch->d->metrics)
		exl3_metric_add(&ch->d->metrics->channel_faults, 1);
	detach(ch, EXL3_CHANNEL_FAILED);
}

void exl3_channel_poll(struct exl3_channel *ch)
{
	move(ch, EXL3_CH_POLLED);
}

static void wait_in_line(struct exl3_channel *ch)
{
	struct exl3_metrics_tenant *m = ch->tenant->metrics;

	if (m)
		exl3_metric_add(ch->stashed ? &m->delayed_rows : &m->delayed_rate, 1);
	move(ch, EXL3_CH_WAITING);
}

static bool channel_turn(struct exl3_channel *ch, uint64_t now_ns)
{
	struct exl3_sqe sqes[EXL3_TAKE_MAX];
	uint32_t max;
	uint64_t gap;
	int n;

	if (!exl3_gate_unstash(ch)) {
		wait_in_line(ch);
		return false;
	}
	if (!exl3_sq_pending(&ch->ring)) {
		if ((int64_t)(now_ns - ch->last_ns) >= (int64_t)spin_budget(ch))
			go_dormant(ch);
		return false;
	}
	max = exl3_gate_max(ch, now_ns);
	if (!max) {
		wait_in_line(ch);
		return false;
	}
	n = exl3_sq_take(&ch->ring, sqes, max);
	if (n < 0) {
		channel_fail(ch, "its indices make no sense, or it uses more than its credit");
		return true;
	}
	gap = now_ns > ch->last_ns ? now_ns - ch->last_ns : 0;
	ch->gap_ns = ch->gap_ns - (ch->gap_ns >> 3) + (gap >> 3);
	ch->last_ns = now_ns;
	ch->idle_kicks = 0;
	exl3_gate_took(ch, (uint32_t)n, now_ns);
	/* One that has to wait is alone, see exl3_gate_max(). */
	for (int i = 0; i < n; i++) {
		if (!exl3_gate_entry(ch, &sqes[i]))
			wait_in_line(ch);
	}
	return n > 0;
}

bool exl3_channels_turn(struct exl3_dispatch *d, uint64_t now_ns)
{
	struct exl3_channel *next;
	bool any = false;

	for (struct exl3_channel *ch = d->polled.head; ch; ch = next) {
		next = ch->next;
		if (next) {
			exl3_sq_prefetch_entry(&next->ring);
			if (next->next)
				exl3_sq_prefetch(&next->next->ring);
		}
		any |= channel_turn(ch, now_ns);
	}
	return any;
}

/* ---- completions ---- */

void exl3_channel_touch(struct exl3_channel *ch)
{
	if (ch->dirty)
		return;
	ch->dirty = true;
	ch->next_dirty = ch->d->dirty;
	ch->d->dirty = ch;
}

static void publish(struct exl3_channel *ch)
{
	uint32_t how = exl3_cq_publish(&ch->ring);
	const char byte = 0;

	if (how & EXL3_CQ_NEED_WAKEUP) {
		exl3_cq_wake(&ch->ring);
		ch->d->syscalls++;
	}
	/* A full socket is readable already, which is all that the byte is for. */
	if (how & EXL3_CQ_WANT_MSG) {
		(void)!send(ch->notify_fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
		ch->d->syscalls++;
	}
}

/* An answer often brings the next request: the wait for it begins now. */
void exl3_channel_answered(struct exl3_channel *ch, uint64_t now_ns)
{
	ch->last_ns = now_ns;
	if (ch->where == EXL3_CH_DORMANT && spin_budget(ch))
		poll_again(ch);
}

void exl3_channel_answer(struct exl3_channel *ch, const struct exl3_cqe *cqe)
{
	exl3_cq_post(&ch->ring, cqe);
	publish(ch);
}

void exl3_channels_publish(struct exl3_dispatch *d)
{
	uint64_t now = exl3_now_ns();
	struct exl3_channel *ch;

	while ((ch = d->dirty)) {
		d->dirty = ch->next_dirty;
		ch->dirty = false;
		if (ch->failed || ch->closed) {
			exl3_channel_try_free(ch);
			continue;
		}
		publish(ch);
		exl3_channel_answered(ch, now);
	}
}

/* ---- life ---- */

void exl3_channel_account(struct exl3_channel *ch)
{
	if (ch->tenant)
		exl3_sched_set_tenant(&ch->lane->sched, &ch->flow,
				      &ch->tenant->sched[ch->lane - ch->d->lanes]);
}

static void leave_tenant(struct exl3_channel *ch)
{
	if (!ch->tenant)
		return;
	exl3_gate_unready(ch);
	exl3_tenant_uncharge(ch->tenant, EXL3_BYTES_RING, ch->segment->bytes);
	ch->tenant->credits -= ch->ring.cq_mask + 1;
	ch->tenant->rows -= ch->rows;
	ch->tenant->requests -= ch->requests;
	ch->tenant->channels--;
	ch->tenant = exl3_tenant_put(ch->tenant);
}

static int join_tenant(struct exl3_channel *ch, struct exl3_tenant *t, struct exl3_error *err)
{
	int rc = exl3_tenant_add_channel(t, err);

	if (rc < 0)
		return rc;
	rc = exl3_tenant_charge(t, EXL3_BYTES_RING, ch->segment->bytes, err);
	if (rc < 0) {
		t->channels--;
		return rc;
	}
	ch->tenant = exl3_tenant_get(t);
	t->credits += ch->ring.cq_mask + 1;
	exl3_channel_account(ch);
	return 0;
}

void exl3_channel_set_tenant(struct exl3_channel *ch, struct exl3_tenant *t)
{
	if (ch->where == EXL3_CH_WAITING)
		move(ch, EXL3_CH_POLLED);
	exl3_sched_set_tenant(&ch->lane->sched, &ch->flow, &t->sched[ch->lane - ch->d->lanes]);
	leave_tenant(ch); /* it may go with this reference */
	ch->tenant = exl3_tenant_get(t);
	t->channels++;
	t->bytes += ch->segment->bytes;
	t->by_kind[EXL3_BYTES_RING] += ch->segment->bytes;
	t->credits += ch->ring.cq_mask + 1;
	t->rows += ch->rows;
	t->requests += ch->requests;
}

static int channel_init(struct exl3_channel *ch, const struct exl3_channel_options *opt,
			int pair[2], struct exl3_error *err)
{
	const struct exl3_ring_params params = {
		.sq_entries = opt->entries,
		.generation = opt->generation,
		.instance = opt->instance,
		.channel = opt->channel,
	};
	int rc;

	if (exl3_fault("channel.ring"))
		return exl3_errf(err, -ENOMEM, "channel: out of memory");
	rc = exl3_ring_create(&params, &ch->segment, &ch->ring, err);
	if (rc == 0 && opt->tenant)
		rc = join_tenant(ch, opt->tenant, err);
	if (rc < 0)
		return rc;
	ch->slots = calloc(ch->ring.cq_mask + 1, sizeof(*ch->slots));
	ch->named = calloc(ch->ring.cq_mask + 1, sizeof(*ch->named));
	if (!ch->slots || !ch->named)
		return exl3_errf(err, -ENOMEM, "channel: out of memory");
	for (uint32_t i = 0; i <= ch->ring.cq_mask; i++) {
		ch->slots[i].ch = ch;
		ch->slots[i].next = ch->free;
		ch->free = &ch->slots[i];
	}
	ch->kick_fd = exl3_fault("channel.eventfd") ? (errno = EMFILE, -1)
						    : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (ch->kick_fd < 0 ||
	    socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
		return exl3_errf(err, -errno, "channel: no descriptors for its wake-ups: %m");
	ch->notify_fd = exl3_take_fd(&pair[0]);
	/* One way: what a client could send back, descriptors among it, nobody would ever read. */
	shutdown(ch->notify_fd, SHUT_RD);
	rc = exl3_watch_add(ch->d->loop, ch->kick_fd, POLLIN, EXL3_WATCH_EDGE, on_kick, ch,
			    &ch->watch);
	return rc < 0 ? exl3_errf(err, rc, "channel: out of memory") : 0;
}

int exl3_channel_open(struct exl3_dispatch *d, const struct exl3_channel_options *opt,
		      struct exl3_channel **ret, int fds[3], struct exl3_error *err)
{
	struct exl3_channel *ch = calloc(1, sizeof(*ch));
	int pair[2] = {-1, -1}, rc;

	if (!ch)
		return exl3_errf(err, -ENOMEM, "channel: out of memory");
	ch->d = d;
	ch->lane = &d->lanes[0];
	ch->where = EXL3_CH_DEAD;
	ch->kick_fd = ch->notify_fd = -1;
	ch->id = opt->channel;
	snprintf(ch->who, sizeof(ch->who), "%s", opt->who);
	d->nr_channels++;
	rc = channel_init(ch, opt, pair, err);
	if (rc < 0) {
		exl3_closep(&pair[0]);
		exl3_closep(&pair[1]);
		ch->closed = true;
		exl3_channel_try_free(ch);
		return rc;
	}
	ch->counters = opt->counters;
	ch->env = (struct exl3_check_env){
		.buffer = opt->buffer,
		.extent = exl3_buffer_extent,
		.target = opt->target,
		.arg = opt->arg,
		.deterministic = d->deterministic,
		.plans = opt->plan,
	};
	ch->plan_of = opt->plan;
	for (uint32_t i = 0; i < d->nr_lanes; i++)
		ch->env.kernels[i] = (struct exl3_check_kernels){d->lanes[i].ops->kernels,
								 d->lanes[i].nr_kernels};
	ch->last_ns = exl3_now_ns();
	move(ch, EXL3_CH_POLLED);
	fds[0] = ch->segment->fd;
	fds[1] = ch->kick_fd;
	fds[2] = pair[1];
	*ret = ch;
	return 0;
}

struct exl3_channel *exl3_channel_close(struct exl3_channel *ch)
{
	if (!ch)
		return NULL;
	ch->closed = true;
	ch->counters = NULL;
	if (!ch->failed)
		detach(ch, EXL3_CHANNEL_CLOSED);
	exl3_channel_try_free(ch);
	return NULL;
}

void exl3_channel_try_free(struct exl3_channel *ch)
{
	if (!ch->closed || ch->flow.running || ch->dirty)
		return;
	assert(!ch->flow.queued && !ch->held.queued && !ch->watch);
	if (ch->lane)
		exl3_sched_leave(&ch->lane->sched, &ch->flow);
	ch->d->nr_channels--;
	leave_tenant(ch);
	exl3_plans_orphan(ch);
	exl3_words_fini(ch);
	exl3_segment_free(ch->segment);
	exl3_closep(&ch->kick_fd);
	exl3_closep(&ch->notify_fd);
	free(ch->slots);
	free(ch->named);
	free(ch);
}

bool exl3_channel_idle(const struct exl3_channel *ch)
{
	return !ch->flow.queued && !ch->flow.running && !ch->dirty;
}

uint64_t exl3_channel_bytes(const struct exl3_channel *ch)
{
	return ch->segment->bytes;
}
