/* SPDX-License-Identifier: Apache-2.0 */
/*
 * words.c - stream calls: requests that wait for a word of their client, and announce their end by one.
 *
 * Such a request stays among those that its channel holds back until the loop has seen its *ready* word, so
 * nothing on the device ever waits for a client, and a client that never signals keeps up its own channel
 * alone, for ready-timeout at most, and a drain for a moment. The loop looks at the words as long as it spins; later it sleeps for an
 * eighth of the time that has passed since the last one came, so that looking costs little, and a word that
 * comes late is found only a little later still.
 */
#include "daemon/dispatch_priv.h"

#include <errno.h>

#define SLEEP_MIN_NS 20000u
#define SLEEP_MAX_NS 1000000u

static struct exl3_stream_slot *slot_of(const struct exl3_channel *ch, uint32_t seq)
{
	return &ch->words[seq & ch->ring.cq_mask];
}

bool exl3_words_ready(const struct exl3_request *req)
{
	const struct exl3_stream_slot *slot;

	if (!req->stream)
		return true;
	/* The client's word: whatever it says, it decides about the client's own request only. */
	slot = slot_of(req->ch, req->seq);
	return (int32_t)(__atomic_load_n(&slot->ready, __ATOMIC_ACQUIRE) - req->seq) >= 0;
}

void exl3_words_end(struct exl3_channel *ch, uint32_t seq, int result)
{
	struct exl3_stream_slot *slot = slot_of(ch, seq);

	if (result < 0)
		__atomic_store_n(&slot->result, result, __ATOMIC_RELAXED);
	/* The device may have done so already. */
	__atomic_store_n(&slot->done, seq, __ATOMIC_RELEASE);
}

bool exl3_words_signal(const struct exl3_request *req, struct exl3_signal *ret)
{
	const struct exl3_channel *ch = req->ch;
	char *base;

	if (!req->stream || req->item.more)
		return false;
	base = ch->words_buf->base[ch->lane - ch->d->lanes];
	if (!base)
		return false; /* this device cannot write there: the loop does */
	base += (size_t)(req->seq & ch->ring.cq_mask) * sizeof(struct exl3_stream_slot);
	ret->word = (uint32_t *)(base + offsetof(struct exl3_stream_slot, done));
	ret->value = req->seq;
	return true;
}

/* ---- channels that hold back stream calls ---- */

void exl3_words_hold(struct exl3_channel *ch, uint64_t now_ns)
{
	struct exl3_dispatch *d = ch->d;

	if (ch->waits)
		return;
	ch->waits = true;
	ch->wait_prev = NULL;
	ch->wait_next = d->listening;
	if (ch->wait_next)
		ch->wait_next->wait_prev = ch;
	d->listening = ch;
	ch->wait_head = NULL;
	d->ready_ns = now_ns;
}

void exl3_words_unhold(struct exl3_channel *ch)
{
	if (!ch->waits)
		return;
	ch->waits = false;
	if (ch->wait_prev)
		ch->wait_prev->wait_next = ch->wait_next;
	else
		ch->d->listening = ch->wait_next;
	if (ch->wait_next)
		ch->wait_next->wait_prev = ch->wait_prev;
}

/* The first one that is held back has its time from when it became the first. True: it ended. */
static bool look_at_head(struct exl3_channel *ch, uint64_t now_ns)
{
	struct exl3_request *req = (struct exl3_request *)ch->held.head;

	if (!req->stream || exl3_words_ready(req))
		return false; /* it waits for the device, not for its client */
	if (ch->d->draining && !ch->d->leaving && now_ns > ch->d->drain_ns &&
	    now_ns - ch->d->drain_ns >= EXL3_DRAIN_READY_NS) {
		exl3_dispatch_end(req, -ESHUTDOWN);
		return true;
	}
	if (req != ch->wait_head || req->seq != ch->wait_seq) {
		ch->wait_head = req;
		ch->wait_seq = req->seq;
		ch->wait_ns = now_ns;
	}
	if (req->item.deadline_ns || !ch->d->ready_timeout_ns ||
	    now_ns - ch->wait_ns < ch->d->ready_timeout_ns)
		return false;
	exl3_dispatch_end(req, -ETIME);
	return true;
}

bool exl3_words_turn(struct exl3_dispatch *d, uint64_t now_ns)
{
	struct exl3_channel *next;
	bool any = false;

	for (struct exl3_channel *ch = d->listening; ch; ch = next) {
		uint32_t before = ch->held.queued;

		next = ch->wait_next;
		exl3_dispatch_release(ch);
		if (ch->held.queued != before)
			d->ready_ns = now_ns;
		while (ch->held.queued && look_at_head(ch, now_ns))
			;
		any |= ch->held.queued != before;
		if (!ch->held.queued)
			exl3_words_unhold(ch);
	}
	return any;
}

bool exl3_words_may_sleep(const struct exl3_dispatch *d, uint64_t now_ns, uint64_t *until_ns)
{
	uint64_t idle = now_ns > d->ready_ns ? now_ns - d->ready_ns : 0, pause = idle / 8;

	if (!d->listening)
		return true;
	if (idle < d->ready_spin_ns && !exl3_dispatch_needs_cpu(d))
		return false;
	if (pause < SLEEP_MIN_NS)
		pause = SLEEP_MIN_NS;
	if (pause > SLEEP_MAX_NS)
		pause = SLEEP_MAX_NS;
	if (now_ns + pause < *until_ns)
		*until_ns = now_ns + pause;
	return true;
}

int exl3_channel_bind_stream(struct exl3_channel *ch, struct exl3_buffer *buf,
			     struct exl3_error *err)
{
	uint64_t bytes = (ch->ring.cq_mask + 1ull) * sizeof(struct exl3_stream_slot);

	if (ch->words_buf)
		return exl3_errf(err, -EBUSY, "stream: the channel has its words already");
	if (!buf->arena || !buf->arena->host_ptr)
		return exl3_errf(err, -EINVAL, "stream: the words must lie in a host arena");
	if (buf->bytes < bytes)
		return exl3_errf(err, -EINVAL, "stream: the words of this channel need %llu bytes",
				 (unsigned long long)bytes);
	buf->refs++;
	ch->words_buf = buf;
	ch->words = buf->arena->host_ptr;
	ch->env.stream = true;
	return 0;
}

void exl3_words_fini(struct exl3_channel *ch)
{
	exl3_words_unhold(ch);
	if (ch->words_buf && --ch->words_buf->refs == 0)
		ch->d->buffer_free(ch->d->arg, ch->words_buf);
	ch->words_buf = NULL;
	ch->words = NULL;
}
