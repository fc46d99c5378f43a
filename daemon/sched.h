/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sched.h - which request runs next: fairness between channels, order within one. Pure: no I/O, no
 * clock (time is passed in), no allocation.
 *
 * A flow is one channel's queue. Its items start in order; flows take turns, one launch each. A launch
 * may carry the heads of other flows that have the same key (rows of one module are multiplied by one
 * read of its weights). The device executes launches in the order in which they were picked.
 *
 *   item:  IDLE -> QUEUED -> RUNNING -> IDLE           exl3_sched_push, _pick, _done
 *                  QUEUED -> IDLE                      _remove, _expire, and fences in _pick
 */
#ifndef EXL3_DAEMON_SCHED_H
#define EXL3_DAEMON_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#define EXL3_LAUNCH_ITEMS_MAX 32u /* requests that one launch may carry */

struct exl3_sched_flow;

enum exl3_item_state { EXL3_ITEM_IDLE, EXL3_ITEM_QUEUED, EXL3_ITEM_RUNNING };

/* Part of a request, which owns it; in its flow's list while QUEUED. */
struct exl3_sched_item {
	struct exl3_sched_item *next, *prev;
	struct exl3_sched_flow *flow;
	/* In exl3_sched.deadlines while QUEUED with one: first child, next sibling, and the one before it:
	 * the sibling on its left, or the parent of the first. */
	struct exl3_sched_item *heap_child, *heap_next, *heap_prev;
	uint64_t deadline_ns; /* 0: none */
	const void *key;      /* items with equal keys may share a launch; NULL: never shares */
	uint32_t rows;
	bool fence;    /* no launch: done as soon as everything before it is done */
	uint8_t state; /* enum exl3_item_state */
};

/* Part of a channel, which owns it; in the scheduler's ring while it has items queued. */
struct exl3_sched_flow {
	struct exl3_sched_item *head, *tail;
	struct exl3_sched_flow *next, *prev;
	uint32_t queued, running;
};

struct exl3_sched {
	struct exl3_sched_flow *turn; /* whose turn it is; NULL: nothing is queued */
	uint32_t launches, launches_max;
	uint32_t merge_max, rows_max;      /* items and rows of one launch */
	uint64_t next_deadline;            /* of the queued ones; UINT64_MAX: none */
	struct exl3_sched_item *deadlines; /* pairing heap, the earliest on top */
	uint32_t flows;                    /* in the ring */
	uint32_t queued, running;          /* items */
};

void exl3_sched_init(struct exl3_sched *s, uint32_t launches_max, uint32_t merge_max,
		     uint32_t rows_max);

/* @item: IDLE, with deadline_ns, key, rows and fence filled in. */
void exl3_sched_push(struct exl3_sched *s, struct exl3_sched_flow *flow,
		     struct exl3_sched_item *item);

/**
 * exl3_sched_pick() - what to start now.
 * @items: room for EXL3_LAUNCH_ITEMS_MAX.
 * Returns how many items the next launch has, now RUNNING, the first one's flow took its turn; or 1
 * with a fence, now IDLE: it is done; or 0: nothing can start.
 */
uint32_t exl3_sched_pick(struct exl3_sched *s, struct exl3_sched_item **items);

/* A launch has ended: its items are IDLE again. */
void exl3_sched_done(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr);
/* The last launch picked could not start (device queue full): its items are queued again, in front. */
void exl3_sched_unpick(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr);

/* Takes a QUEUED item out of its flow; it is IDLE then. */
void exl3_sched_remove(struct exl3_sched *s, struct exl3_sched_item *item);
/* The queued item whose deadline passed first, taken out; NULL: none has. */
struct exl3_sched_item *exl3_sched_expire(struct exl3_sched *s, uint64_t now_ns);

#endif
