/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sched.h - which request runs next: fairness between channels, order within one. Pure: no I/O, no
 * clock (time is passed in), no allocation.
 *
 * A flow is one channel's queue. Its items start in order; flows take turns, one launch each. A launch
 * may carry the heads of other flows that have the same key (rows of one module are multiplied by one
 * read of its weights). The device executes launches in the order in which they were picked.
 *
 * A long item runs as several launches, one slice of its rows each: others get their turn in between, and
 * what is behind it in its flow waits until its last slice has started.
 *
 *   item:  IDLE -> QUEUED -> RUNNING -> IDLE           exl3_sched_push, _pick, _done
 *                  QUEUED -> IDLE                      _remove, _expire, and fences in _pick
 *          IDLE -> QUEUED, in front                    _again: the next slice
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
	uint64_t cost_ns;     /* device time that the launch is expected to take, for this slice alone */
	uint32_t rows;        /* of the slice that is next */
	bool more;     /* rows are left after that slice: exl3_sched_again() follows */
	bool fence;    /* no launch: done as soon as everything before it is done */
	uint8_t state; /* enum exl3_item_state */
};

#define EXL3_WEIGHT_MAX     10000u
#define EXL3_WEIGHT_DEFAULT 100u
#define EXL3_PRIORITY_MAX   7u

/* Whose share of the device a flow uses: part of a tenant of the policy, which owns it and outlives its
 * flows. Weight and priority may change at any time. */
struct exl3_sched_tenant {
	uint32_t weight;   /* 1..EXL3_WEIGHT_MAX: device time in proportion to it, among those that want it */
	uint32_t priority; /* 0..EXL3_PRIORITY_MAX: higher ones first */
};

/* Part of a channel, which owns it; in the scheduler's ring while it has items queued. */
struct exl3_sched_flow {
	struct exl3_sched_item *head, *tail;
	struct exl3_sched_flow *next, *prev;
	struct exl3_sched_tenant *tenant; /* borrowed; NULL: one of its own, of default weight */
	uint32_t queued, running;
	uint32_t partial; /* running items with rows left: 0 or 1 */
};

struct exl3_sched {
	struct exl3_sched_flow *turn; /* whose turn it is; NULL: nothing is queued */
	uint32_t launches, launches_max;
	uint32_t merge_max, rows_max;      /* items and rows of one launch */
	uint64_t cost_ns, cost_max_ns;     /* of the launches running; beyond it none is added to others */
	uint64_t next_deadline;            /* of the queued ones; UINT64_MAX: none */
	struct exl3_sched_item *deadlines; /* pairing heap, the earliest on top */
	uint32_t flows;                    /* in the ring */
	uint32_t queued, running;          /* items */
};

void exl3_sched_init(struct exl3_sched *s, uint32_t launches_max, uint32_t merge_max,
		     uint32_t rows_max);

/* Work is handed to the device ahead of its turn only up to that much of its time, so that nobody waits
 * behind more; one launch is always allowed. 0: no limit. */
void exl3_sched_set_cost_max(struct exl3_sched *s, uint64_t cost_max_ns);
/* A flow's account is another one from now on; it may have items queued and running. */
void exl3_sched_set_tenant(struct exl3_sched *s, struct exl3_sched_flow *flow,
			   struct exl3_sched_tenant *tenant);

/* @item: IDLE, with deadline_ns, key, cost_ns, rows, more and fence filled in. */
void exl3_sched_push(struct exl3_sched *s, struct exl3_sched_flow *flow,
		     struct exl3_sched_item *item);
/* After exl3_sched_done() of a launch that was not its last: the item is queued again, in front of its
 * flow, with cost_ns, rows and more of its next slice. */
void exl3_sched_again(struct exl3_sched *s, struct exl3_sched_item *item);

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
