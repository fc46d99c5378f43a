/* SPDX-License-Identifier: Apache-2.0 */
/* sched_priv.h - what sched.c and trains.c share. */
#ifndef EXL3_DAEMON_SCHED_PRIV_H
#define EXL3_DAEMON_SCHED_PRIV_H

#include "daemon/sched.h"

/* Who could be next: a train, or the flow whose turn it is in a tenant. */
struct exl3_choice {
	struct exl3_train *train;
	struct exl3_sched_flow *flow;
	uint32_t priority;
	uint64_t used_ns,
		own_used_ns; /* of its tenant, of its flow; the least of a train's members */
	uint64_t since_ns;
};

struct exl3_choices {
	struct exl3_choice top,
		low; /* the next; the one of lower priority that has waited longest */
	bool any, lower;
};

/* A running mean: @x counts for one in 2^@shift. 0: nothing was measured yet. */
static inline uint64_t exl3_mean(uint64_t old, uint64_t x, unsigned shift)
{
	if (!old)
		return x ? x : 1;
	return x > old ? old + ((x - old) >> shift) : old - ((old - x) >> shift);
}

static inline uint64_t exl3_distance(uint64_t a, uint64_t b)
{
	return a > b ? a - b : b - a;
}

static inline uint64_t exl3_least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static inline uint64_t exl3_most(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

static inline struct exl3_sched_tenant *exl3_flow_account(struct exl3_sched_flow *flow)
{
	return flow->tenant ? flow->tenant : &flow->own;
}

/* What a launch carries so far, and may carry at most. */
struct exl3_load {
	uint32_t nr, nr_max;
	uint64_t rows, rows_max;
	uint64_t max_ns, sum_ns, cost_max_ns; /* of their expected times */
	struct exl3_sched_flow *flows[EXL3_LAUNCH_ITEMS_MAX];
};

/* sched.c */
/* Does a head go with what is there? The first one always does. */
bool exl3_load_fits(const struct exl3_load *l, const struct exl3_sched_item *head);
/* @flow: without a place. */
void exl3_load_add(struct exl3_load *l, struct exl3_sched_flow *flow);
void exl3_flow_place(struct exl3_sched *s, struct exl3_sched_flow *flow);
void exl3_flow_unplace(struct exl3_sched *s, struct exl3_sched_flow *flow);
void exl3_flow_choice(struct exl3_sched_flow *flow, struct exl3_choice *c);
bool exl3_choice_before(const struct exl3_choice *a, const struct exl3_choice *b);
void exl3_choices_add(struct exl3_choices *all, const struct exl3_choice *c);

/* steps.c */

/* What is known of an item's key; made if need be. NULL: no key. */
struct exl3_sched_key *exl3_steps_key(struct exl3_sched *s, struct exl3_sched_item *item);
/* An item was queued: what it says about its flow's steps. Before it is placed. */
void exl3_steps_learn(struct exl3_sched *s, struct exl3_sched_flow *flow,
		      struct exl3_sched_item *item);
/* One of its items has ended. */
void exl3_steps_ended(struct exl3_sched *s, struct exl3_sched_flow *flow,
		      const struct exl3_sched_item *item, uint64_t exec_ns);
void exl3_steps_forget(struct exl3_sched_flow *flow);
/* Could it be of a decoding step? */
bool exl3_steps_is_step(const struct exl3_sched_item *item);
/* Has the flow walked a whole step, or come to where steps of others begin? */
bool exl3_steps_is_decoder(const struct exl3_sched_flow *flow);
/* Is an item of that key, the flow's last one, the last of its step? The flow is a decoder. */
bool exl3_steps_is_last(const struct exl3_sched_flow *flow, const struct exl3_sched_key *k);
/* The flow's step has ended; it is expected at its board key for a while. */
void exl3_steps_tail_enter(struct exl3_sched *s, struct exl3_sched_flow *flow);
/* Flows that are expected at a board key. */
uint32_t exl3_steps_expected(struct exl3_sched *s, struct exl3_sched_key *k);
/* Mean time of launches of so many items, or of the nearest number that is known; 0: none is. */
uint64_t exl3_steps_launch(const struct exl3_sched_key *board, uint32_t items);
/* Mean of the longer of such a launch and a client's pause. */
uint64_t exl3_steps_overlap(const struct exl3_sched_key *board, uint32_t items);

/* trains.c */

/* Its head is ready: does a train take it? */
bool exl3_trains_place(struct exl3_sched *s, struct exl3_sched_flow *flow);
void exl3_trains_unplace(struct exl3_sched *s, struct exl3_sched_flow *flow);
void exl3_trains_forget(struct exl3_sched *s, struct exl3_sched_flow *flow);
void exl3_trains_started(struct exl3_sched *s, struct exl3_sched_flow *flow);
/* An item of its has ended. */
void exl3_trains_ended(struct exl3_sched *s, struct exl3_sched_flow *flow,
		       struct exl3_sched_item *item, uint64_t exec_ns);
/* Adds the trains that may go. Drops members that are overdue; sets wake_ns to when it would add others. */
void exl3_trains_look(struct exl3_sched *s, struct exl3_choices *all);
/* Should a long launch leave the device to a train that is about to come and has used less? */
bool exl3_trains_reserve(struct exl3_sched *s, const struct exl3_choice *c);
/* A train goes: its ready members whose heads have one key are loaded, as far as they fit. */
void exl3_trains_depart(struct exl3_sched *s, struct exl3_train *t, struct exl3_load *l);
/* So are heads of other trains with that key. Who waited gets on, if @t is not NULL. */
void exl3_trains_join(struct exl3_sched *s, struct exl3_train *t, struct exl3_load *l);

#endif
