/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate.c - requests beyond a tenant's limits wait in their rings: so many per second, so many rows in flight.
 *
 * They are delayed, not refused: a ring is not read while its tenant has no token left. How many rows an entry
 * has is known only once it has been copied, so one that does not fit yet stays in its channel's stash, and
 * nothing behind it is taken. Channels that wait stand in line, the first one goes first. An entry with more
 * rows than the tenant may ever have in flight is refused.
 *
 * A stream call that its client has not made ready, and what is behind it, might wait for ever: their rows
 * begin to count when they can start, so that one client that never signals takes nothing from the others of
 * its tenant. If there is no room by then, the first call that is ready comes before all others of the tenant;
 * what it waits for is on the device or about to be.
 */
#include "daemon/dispatch_priv.h"

#include <errno.h>

static uint32_t rows_of(const struct exl3_channel *ch, const struct exl3_sqe *sqe)
{
	if (sqe->op == EXL3_OP_NOP || sqe->op == EXL3_OP_CANCEL)
		return 0;
	if (sqe->op == EXL3_OP_PLAN)
		return exl3_replay_rows(ch, sqe->module);
	/* Other numbers are not legal: the check says so. */
	return sqe->rows <= EXL3_M_MAX ? sqe->rows : 0;
}

static bool fits(const struct exl3_channel *ch, const struct exl3_sqe *sqe)
{
	const struct exl3_tenant *t = ch->tenant;
	uint32_t rows = t->conf.rows ? rows_of(ch, sqe) : 0;

	if (!rows || rows > t->conf.rows)
		return true; /* more than all: it is refused at once */
	return !t->next_rows && t->rows + rows <= t->conf.rows;
}

/* Its rows count later. */
static bool held_back(const struct exl3_channel *ch, const struct exl3_sqe *sqe)
{
	return ch->waits || (sqe->flags & EXL3_STREAM && ch->words);
}

uint32_t exl3_gate_max(const struct exl3_channel *ch, uint64_t now_ns)
{
	uint32_t there;

	if (!ch->tenant || ch->d->draining)
		return EXL3_TAKE_MAX;
	there = exl3_tokens_there(&ch->tenant->tokens, now_ns);
	if (there > 1 && ch->tenant->conf.rows)
		return 1; /* the next one may not fit */
	return there < EXL3_TAKE_MAX ? there : EXL3_TAKE_MAX;
}

void exl3_gate_took(struct exl3_channel *ch, uint32_t nr, uint64_t now_ns)
{
	if (ch->tenant && !ch->d->draining)
		exl3_tokens_take(&ch->tenant->tokens, nr, now_ns);
}

bool exl3_gate_entry(struct exl3_channel *ch, const struct exl3_sqe *sqe)
{
	const struct exl3_tenant *t = ch->tenant;

	if (t && !ch->d->draining) {
		if (!held_back(ch, sqe) && !fits(ch, sqe)) {
			ch->stash = *sqe;
			ch->stashed = true;
			return false;
		}
		if (t->conf.rows && rows_of(ch, sqe) > t->conf.rows) {
			exl3_dispatch_refuse(ch, sqe, -EDQUOT, EXL3_DETAIL_LIMIT);
			return true;
		}
	}
	exl3_dispatch_entry(ch, sqe);
	return true;
}

bool exl3_gate_unstash(struct exl3_channel *ch)
{
	if (!ch->stashed)
		return true;
	ch->stashed = false;
	return exl3_gate_entry(ch, &ch->stash);
}

/* ---- rows of requests that were accepted ---- */

void exl3_gate_count(struct exl3_channel *ch, struct exl3_request *req)
{
	if (!ch->tenant)
		return;
	ch->tenant->rows += req->c.rows.m;
	ch->rows += req->c.rows.m;
	req->counted = true;
}

bool exl3_gate_rows(struct exl3_channel *ch, struct exl3_request *req)
{
	struct exl3_tenant *t = ch->tenant;

	if (!t || req->counted)
		return true;
	/* More than all, which the limit was lowered to since: alone. */
	if (t->conf.rows && !ch->d->draining && t->rows && t->rows + req->c.rows.m > t->conf.rows &&
	    req->c.rows.m) {
		if (!t->next_rows) {
			t->next_rows = ch;
			if (t->metrics)
				exl3_metric_add(&t->metrics->delayed_rows, 1);
		}
		return false;
	}
	if (t->next_rows && t->next_rows != ch && req->c.rows.m && !ch->d->draining)
		return false;
	if (t->next_rows == ch)
		t->next_rows = NULL;
	exl3_gate_count(ch, req);
	return true;
}

void exl3_gate_unready(struct exl3_channel *ch)
{
	if (ch->tenant && ch->tenant->next_rows == ch)
		ch->tenant->next_rows = NULL;
}

void exl3_gate_ended(struct exl3_channel *ch, struct exl3_request *req)
{
	struct exl3_tenant *t = ch->tenant;

	if (!t)
		return;
	if (req->counted) {
		t->rows -= req->c.rows.m;
		ch->rows -= req->c.rows.m;
	} else {
		exl3_gate_unready(ch);
	}
	req->counted = false;
}

/* ---- the line ---- */

void exl3_gate_enter(struct exl3_channel *ch)
{
	struct exl3_tenant *t = ch->tenant;

	ch->next = NULL;
	ch->prev = t->waiting_tail;
	if (t->waiting_tail) {
		t->waiting_tail->next = ch;
	} else {
		t->waiting = ch;
		t->next_waiting = ch->d->waiting;
		ch->d->waiting = t;
	}
	t->waiting_tail = ch;
}

void exl3_gate_leave(struct exl3_channel *ch)
{
	struct exl3_tenant *t = ch->tenant, **at = &ch->d->waiting;

	if (ch->prev)
		ch->prev->next = ch->next;
	else
		t->waiting = ch->next;
	if (ch->next)
		ch->next->prev = ch->prev;
	else
		t->waiting_tail = ch->prev;
	if (t->waiting)
		return;
	while (*at != t)
		at = &(*at)->next_waiting;
	*at = t->next_waiting;
}

bool exl3_gates_turn(struct exl3_dispatch *d, uint64_t now_ns)
{
	struct exl3_tenant *next;
	bool any = false;

	for (struct exl3_tenant *t = d->waiting; t; t = next) {
		uint32_t there = d->draining ? EXL3_TAKE_MAX : exl3_tokens_there(&t->tokens, now_ns);
		bool stashed = false;

		next = t->next_waiting;
		/* One with a stash a turn: its rows count once its channel has had its turn. */
		for (uint32_t i = 0; i < EXL3_TAKE_MAX && t->waiting && !stashed; i++) {
			stashed = t->waiting->stashed;
			if (stashed ? !d->draining && !held_back(t->waiting, &t->waiting->stash) &&
					      !fits(t->waiting, &t->waiting->stash)
				    : i >= there)
				break;
			exl3_channel_poll(t->waiting);
			any = true;
		}
	}
	return any;
}

uint64_t exl3_gates_until(const struct exl3_dispatch *d, uint64_t now_ns)
{
	uint64_t until = UINT64_MAX, when;

	for (const struct exl3_tenant *t = d->waiting; t; t = t->next_waiting) {
		if (t->waiting->stashed)
			continue; /* the end of others brings us back */
		when = exl3_tokens_when(&t->tokens, now_ns);
		if (when < until)
			until = when;
	}
	return until;
}
