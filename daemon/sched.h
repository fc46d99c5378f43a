/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sched.h - which request runs next: fairness between tenants, order within a channel, rows of one
 * module together. Pure: no I/O, no clock (time is passed in), no allocation.
 *
 * A flow is one channel's queue. Its items start in order. A launch may carry the heads of several flows
 * that have the same key (rows of one module are multiplied by one read of its weights). The device
 * executes launches in the order in which they were picked.
 *
 * A long item runs as several launches, one slice of its rows each: others get their turn in between, and
 * what is behind it in its flow waits until its last slice has started.
 *
 *   item:  IDLE -> QUEUED -> RUNNING -> IDLE           exl3_sched_push, _pick, _done
 *                  QUEUED -> IDLE                      _remove, _expire, and fences in _pick
 *          IDLE -> QUEUED, in front                    _again: the next slice
 *
 * Who is next: the highest priority; among equals whose tenant has used the least device time for its
 * weight. A launch counts for each tenant in it by its rows. No tenant saves up time while it is away. Of
 * 16 launches one goes to somebody of a lower priority who waits.
 *
 * Decoders walk the same modules over and over, each at its own place, so equal requests hardly ever meet.
 * trains.c (with steps.c, which learns what a step is) brings them into step; what waits for company does so for a bounded time, see there.
 */
#ifndef EXL3_DAEMON_SCHED_H
#define EXL3_DAEMON_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#define EXL3_LAUNCH_ITEMS_MAX 32u /* requests that one launch may carry */
#define EXL3_TRAINS_MAX       64u /* groups of decoders at one place; more run one by one */
#define EXL3_SCHED_KEYS       2048u /* modules with a history; the least lately used one is forgotten */
#define EXL3_TRAIN_ROWS_MAX   64u /* an item with more rows is no decoding step */
#define EXL3_TRAIN_SIZES      6u  /* classes of the number of items of a launch */
#define EXL3_PASSED_OVER_MAX  15u /* launches in a row of higher priority while others wait */

struct exl3_sched_flow;
struct exl3_train;

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
	uint64_t
		cost_ns; /* device time that the launch is expected to take, for this slice alone */
	uint32_t rows;   /* of the slice that is next */
	uint32_t merge_class; /* only items of equal class share a launch */
	bool more;            /* rows are left after that slice: exl3_sched_again() follows */
	bool fence;           /* no launch: done as soon as everything before it is done */
	uint8_t state;        /* enum exl3_item_state */
	struct exl3_sched_key *known; /* the scheduler's: of its key, or of another one that took its place */
	/* The scheduler's, while RUNNING. */
	uint32_t launch_rows, launch_items; /* of its whole launch */
	uint64_t flight_ns, charged_ns; /* its part of exl3_sched.cost_ns; what its tenant paid */
};

#define EXL3_WEIGHT_MAX     10000u
#define EXL3_WEIGHT_DEFAULT 100u
#define EXL3_PRIORITY_MAX   7u

/* Whose share of the device a flow uses: part of a tenant of the policy, which owns it and outlives its
 * flows. Weight and priority may change at any time; the rest is the scheduler's, zero at first. */
struct exl3_sched_tenant {
	uint32_t
		weight; /* 1..EXL3_WEIGHT_MAX: device time in proportion to it, among those that want it */
	uint32_t priority; /* 0..EXL3_PRIORITY_MAX: higher ones first */
	uint64_t
		used_ns; /* device time, by weight: what was used times default weight over weight */
	uint64_t turn_used_ns; /* of its flow that was picked last: own.used_ns before it paid */
	uint32_t items;        /* queued or running */
	struct exl3_sched_flow *turn; /* ring of its flows that may start something; NULL: none */
	struct exl3_sched_tenant *next, *prev; /* in exl3_sched.turn while it has such flows */
};

/* What is known of a module, or of anything else that has a key. */
struct exl3_sched_key {
	const void *key;
	uint32_t merge_class;
	uint64_t seen_ns;
	uint64_t
		think; /* mean time that its clients take before it, in 64ths of what they take on average */
	bool board; /* a step of a decoder begins here: trains are put together here */
	/* Of a board key: means over a step (a launch of 1, 2, 3..4, 5..8, 9..16, 17..32 items; 0: unknown),
	 * then who is about to come. */
	uint64_t launch_ns[EXL3_TRAIN_SIZES], overlap_ns[EXL3_TRAIN_SIZES], gap_ns, step_ns;
	uint32_t cycle;                      /* items of a step */
	uint64_t alone_ns;      /* when a flow last closed a cycle with it that had no other board key */
	const struct exl3_sched_key *before; /* the last of them, before the next step */
	uint64_t tail_until_ns;              /* when the last of those is expected */
	uint32_t tail, tail_epoch;
};

enum exl3_flow_place { EXL3_FLOW_NOWHERE, EXL3_FLOW_FREE, EXL3_FLOW_FENCE, EXL3_FLOW_TRAIN };

/* Part of a channel, which owns it, zeroed at first. */
struct exl3_sched_flow {
	struct exl3_sched_item *head, *tail;
	struct exl3_sched_tenant *tenant; /* borrowed; NULL: @own */
	uint32_t queued, running;
	uint32_t partial; /* running items with rows left: 0 or 1 */

	/* The scheduler's. */
	struct exl3_sched_tenant own;
	uint8_t place;                       /* enum exl3_flow_place */
	struct exl3_sched_flow *next, *prev; /* in the list of its place */
	struct exl3_sched_flow *all_next,
		*all_prev;        /* in exl3_sched.all while it has items queued */
	struct exl3_train *train; /* it is a member of; has its head if place is TRAIN */
	struct exl3_sched_flow *train_next, *train_prev;
	uint64_t ready_ns; /* when its head could have started */
	uint64_t done_ns;  /* its last completion */
	/* Its steps, as far as they are known. */
	struct exl3_sched_key *board, *best,
		*last;                 /* where one begins; longest think; last one pushed */
	const void *anchor;            /* until @board is known: the key that would close a cycle */
	uint64_t gap_ns, gap_dev_ns;   /* from an answer to the next request, within a step */
	uint64_t tail_ns, tail_dev_ns; /* the same from a step to the next */
	uint64_t step_start_ns, step_gap_ns, step_launch_ns, step_overlap_ns, step_company;
	uint32_t step_items, steps,
		cycle;       /* of this step; whole ones seen; items of the last one */
	uint32_t tail_epoch; /* of @board, when it was counted there; 0: is not */
	uint64_t late_ns;    /* time of others that was spent waiting for it, this step */
	uint32_t level, ban; /* rides with flows of its level only; steps until it is lower */
};

/* Flows at one place of their step, see trains.c. */
struct exl3_train {
	struct exl3_sched_flow *members;
	struct exl3_sched_flow *ready;  /* those of them with a head that may start */
	uint32_t nr, nr_ready, nr_busy; /* members; ready; with something on the device */
	bool boarding;                  /* waits for others; else it rides */
	const void *key;                /* BOARDING: of all heads */
	uint32_t merge_class, level;
	struct exl3_sched_key *board; /* of its members */
	uint64_t since_ns;            /* of the first head that is ready */
	/* RIDING, after its last launch: when its members are expected back, when the last of them is due, and
	 * until when it waits for them. */
	uint64_t expected_ns, due_ns, grace_ns;
};

/* Counted since the start. */
struct exl3_sched_stats {
	uint64_t launches, items; /* picked: items over launches is the mean merge */
	uint64_t merged;          /* items that shared a launch */
	uint64_t trains;          /* departed with two members or more */
	uint64_t late;            /* members that missed their train */
	uint64_t joined;          /* flows that got on between stations */
	uint64_t expelled;        /* members that made the others wait too much */
	uint64_t held_ns;         /* time that heads waited for company while the device had room */
};

struct exl3_sched {
	uint64_t now_ns;
	uint64_t wake_ns; /* pick again then, even if nothing happens before; UINT64_MAX */
	struct exl3_sched_tenant *turn; /* ring of those with flows that may start something */
	struct exl3_sched_flow *fences; /* flows whose head is a fence with nothing before it */
	struct exl3_sched_flow *all, *all_tail; /* flows with items queued */
	uint32_t launches, launches_max;
	uint32_t merge_max, rows_max; /* items and rows of one launch */
	uint64_t cost_ns,
		cost_max_ns;    /* of the launches running; beyond it none is added to others */
	uint64_t next_deadline; /* of the queued ones; UINT64_MAX: none */
	struct exl3_sched_item *deadlines; /* pairing heap, the earliest on top */
	uint32_t queued, running;          /* items */
	uint64_t used_ns;                  /* of the tenant that was picked last, before it paid */
	uint32_t passed_over;              /* launches in a row while a lower priority waited */
	uint64_t idle_ns;                  /* since when nothing runs, if nothing does */
	bool trains_on;
	uint32_t nr_trains;
	struct exl3_sched_stats stats;
	struct exl3_train trains[EXL3_TRAINS_MAX];
	struct exl3_sched_key keys[EXL3_SCHED_KEYS];
};

/* @merge_max: items of one launch, 1: no merging, and so no trains. */
void exl3_sched_init(struct exl3_sched *s, uint32_t launches_max, uint32_t merge_max,
		     uint32_t rows_max);
/* On at first. May change at any time. */
void exl3_sched_set_trains(struct exl3_sched *s, bool on);

/* What time it is: CLOCK_MONOTONIC or any other that never goes back. Before the calls of a turn. */
void exl3_sched_tick(struct exl3_sched *s, uint64_t now_ns);

/* Work is handed to the device ahead of its turn only up to that much of its time, so that nobody waits
 * behind more; one launch is always allowed. 0: no limit. */
void exl3_sched_set_cost_max(struct exl3_sched *s, uint64_t cost_max_ns);
/* A flow's account is another one from now on; it may have items queued and running. */
void exl3_sched_set_tenant(struct exl3_sched *s, struct exl3_sched_flow *flow,
			   struct exl3_sched_tenant *tenant);
/* The flow is about to be freed or to move to another scheduler: nothing of it is queued or running. */
void exl3_sched_leave(struct exl3_sched *s, struct exl3_sched_flow *flow);

/* @item: IDLE, with deadline_ns, key, merge_class, cost_ns, rows, more and fence filled in. */
void exl3_sched_push(struct exl3_sched *s, struct exl3_sched_flow *flow,
		     struct exl3_sched_item *item);
/* After exl3_sched_done() of a launch that was not its last: the item is queued again, in front of its
 * flow, with cost_ns, rows and more of its next slice. */
void exl3_sched_again(struct exl3_sched *s, struct exl3_sched_item *item);

/**
 * exl3_sched_pick() - what to start now.
 * @items: room for EXL3_LAUNCH_ITEMS_MAX.
 * Returns how many items the next launch has, now RUNNING; or 1 with a fence, now IDLE: it is done; or 0:
 * nothing can start before the next push or done, or before wake_ns.
 */
uint32_t exl3_sched_pick(struct exl3_sched *s, struct exl3_sched_item **items);

/* A launch has ended: its items are IDLE again. @exec_ns: the device's time for it; 0: it did not run. */
void exl3_sched_done(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr,
		     uint64_t exec_ns);
/* The last launch picked could not start (device queue full): its items are queued again, in front. */
void exl3_sched_unpick(struct exl3_sched *s, struct exl3_sched_item *const *items, uint32_t nr);

/* Takes a QUEUED item out of its flow; it is IDLE then. */
void exl3_sched_remove(struct exl3_sched *s, struct exl3_sched_item *item);
/* The queued item whose deadline passed first, taken out; NULL: none has. */
struct exl3_sched_item *exl3_sched_expire(struct exl3_sched *s, uint64_t now_ns);
/* Any queued item, for whoever has to end them all; NULL: there is none. */
struct exl3_sched_item *exl3_sched_any(const struct exl3_sched *s);

/* Longest time that an item at the head of its flow waits for company, whatever clients do. */
#define EXL3_HOLD_NS_MAX 100000000ull

#endif
