/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch_priv.h - what dispatch.c and channel.c share: requests, launches, channels. */
#ifndef EXL3_DAEMON_DISPATCH_PRIV_H
#define EXL3_DAEMON_DISPATCH_PRIV_H

#include "daemon/chunk.h"
#include "daemon/dispatch.h"
#include "daemon/tenant.h"
#include "kernels/tuned.h"

#define EXL3_TAKE_MAX  16u /* entries of one channel per turn, so that none starves the others */
#define EXL3_DONE_MAX  16u
#define EXL3_ENDS_MAX  256u /* requests that end without a launch, per turn, for the same reason */
#define EXL3_KICKS_MAX 64u  /* kicks without work until a channel is muted */
#define EXL3_MUTED_NS  10000000ull /* how often a muted channel is looked at */

/* A slot of its channel. */
struct exl3_request {
	struct exl3_sched_item item; /* first: the scheduler hands it back */
	struct exl3_channel *ch;     /* owner */
	struct exl3_lane *lane;      /* that it is for; NULL: a fence, which any can end */
	struct exl3_request *next;   /* in ch->free; in its bucket of ch->named */
	struct exl3_request *prev;   /* in its bucket */
	uint64_t user_data;
	/* Its slices: rows that have run, and the sums of those that have ended. */
	uint32_t first;
	uint64_t accepted_ns;
	bool cancelled; /* while a slice runs: no other one follows */
	bool stream;    /* a stream call, of number seq */
	bool counted;   /* its rows are its tenant's */
	uint32_t seq;
	uint64_t skipped, exec_ns;
	struct exl3_recorded *plan;  /* op PLAN: that it replays, counted; else that it is a call of, or NULL */
	struct exl3_shared_geometry *geometry; /* of an MLA request that may share a launch, else NULL */
	struct exl3_checked c; /* pins buffers and model while queued or running */
};

/* One piece of work for the device, with room for all that it points to. */
struct exl3_launch {
	struct exl3_work work;
	struct exl3_rows rows[EXL3_LAUNCH_ITEMS_MAX];
	union {
		struct exl3_route routes[EXL3_LAUNCH_ITEMS_MAX];
		struct exl3_mla_cache caches[EXL3_LAUNCH_ITEMS_MAX];
	} u;
	uint64_t skipped[EXL3_LAUNCH_ITEMS_MAX];
	struct exl3_signal signals[EXL3_LAUNCH_ITEMS_MAX];
	struct exl3_sched_item *items[EXL3_LAUNCH_ITEMS_MAX];
	uint32_t nr;              /* items; 0: free */
	struct exl3_tuned *tuned; /* counted; the work's */
	uint64_t bound_ns;        /* it ends within, or never */
	struct exl3_launch *next; /* in lane->free */
};

/* Requests that have not ended, by a hash of their user_data; the oldest first. */
struct exl3_bucket {
	struct exl3_request *head, *tail;
};

enum exl3_channel_where {
	EXL3_CH_POLLED,
	EXL3_CH_DORMANT,
	EXL3_CH_MUTED,
	EXL3_CH_WAITING,
	EXL3_CH_DEAD
};

struct exl3_channel {
	struct exl3_dispatch *d;
	struct exl3_channel *next, *prev; /* in the list that @where says; WAITING: tenant's; DEAD: none */
	enum exl3_channel_where where;
	struct exl3_segment *segment; /* owned */
	struct exl3_ring_server ring; /* borrows from segment */
	int kick_fd;                  /* owned; polled, never read or written */
	int notify_fd;                /* owned; our end of the socket pair, -1 once ended */
	struct exl3_watch *watch;     /* of kick_fd; NULL while muted */
	struct exl3_lane *lane;      /* where flow is; changes only while nothing is in it */
	struct exl3_sched_flow flow; /* requests of that lane */
	struct exl3_sched_flow held; /* in d->held: behind them, the first one for another lane */
	struct exl3_request *slots; /* owned; as many as there is credit */
	struct exl3_request *free;
	struct exl3_bucket *named; /* owned; as many */
	/* words.c; words_buf NULL: none */
	struct exl3_buffer *words_buf;                /* counted */
	struct exl3_stream_slot *words;               /* in it, as we map it; [cq_mask + 1] */
	struct exl3_channel *wait_next, *wait_prev;   /* in d->listening, if waits */
	const struct exl3_request *wait_head;         /* the first that is held back, since wait_ns */
	uint32_t wait_seq;
	uint64_t wait_ns;
	bool waits;
	struct exl3_channel *next_dirty;
	bool dirty; /* has completions that were not published */
	bool closed, failed;
	uint32_t idle_kicks;
	uint64_t last_ns;               /* last work or completion */
	uint64_t gap_ns;                /* running mean of the time from there to the next work */
	struct exl3_counters *counters; /* NULL once closed */
	struct exl3_tenant *tenant;     /* counted; NULL: no limits */
	uint64_t rows, requests;        /* that count against it */
	struct exl3_sqe stash;          /* taken, waits for rows of its tenant to end */
	bool stashed;
	struct exl3_check_env env;
	struct exl3_recorded *(*plan_of)(void *arg, uint32_t handle); /* with env.arg; NULL: has none */
	struct exl3_recorded *replaying; /* that has calls to queue yet, or NULL */
	struct exl3_recorded *plans; /* list of those whose replays are its requests */
	char who[96];
	uint32_t id;
};

struct exl3_list {
	struct exl3_channel *head;
	uint32_t nr;
};

#define EXL3_GEOMETRIES_MAX 32u /* different ones whose requests are merged */

struct exl3_shared_geometry {
	struct exl3_mla_geometry g;
	uint64_t used_ns;
	uint32_t users; /* requests queued or running */
};

/* What one device has to do. */
struct exl3_lane {
	struct exl3_dispatch *d;
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev;
	struct exl3_sched sched;
	struct exl3_pace pace;
	struct exl3_shared_geometry geometries[EXL3_GEOMETRIES_MAX];
	struct exl3_launch *launches; /* owned, [sched.launches_max] */
	struct exl3_launch *free;
	struct exl3_watch *watch;
	uint32_t nr_kernels;
	bool spin_beside, lost;
	struct exl3_tuned *tuned; /* counted; measured choices for what it launches, or NULL */
	/* of guest.c */
	struct exl3_guest *guest; /* borrowed, or NULL */
	uint32_t guests;          /* works of it on the device */
	uint64_t guest_ns;        /* what those that have ended took */
	int guest_result;
	uint64_t guest_after_ns;  /* not before, unless nobody else wants the device */
	/* of watchdog.c */
	uint32_t nr_watched;
	uint64_t moved_ns;  /* when a launch ended last, or the first of those that run began */
	uint64_t bounds_ns; /* of those that run */
};

struct exl3_dispatch {
	struct exl3_loop *loop;
	struct exl3_lane lanes[EXL3_DEVICES_MAX];
	uint32_t nr_lanes;
	struct exl3_sched held; /* nothing is ever picked from it: order, deadlines and counts only */
	struct exl3_list polled, dormant, muted;
	struct exl3_tenant *waiting; /* those with channels that wait */
	struct exl3_channel *dirty;
	struct exl3_channel *listening; /* list of channels that hold back stream calls */
	uint64_t ready_ns;            /* when the last word came, or the first such call */
	uint64_t ready_spin_ns, ready_timeout_ns;
	struct exl3_timer muted_timer;
	uint32_t queue_depth, merge_max;
	uint64_t spin_ns, last_ns;
	uint64_t turn_ns;  /* of the loop, now */
	uint64_t slack_ns; /* beyond a launch's bound; 0: no launch is overdue */
	struct exl3_error lost; /* code < 0: why a device cannot be used any more */
	uint64_t chunk_ns; /* of the device, that one launch should take at most; 0: no limit */
	uint64_t syscalls;    /* made to wake clients */
	uint32_t nr_channels; /* not freed yet */
	uint64_t hash_key[2]; /* the clients do not know it */
	bool deterministic, draining, trains;
	uint64_t drain_ns; /* when that began */
	bool leaving; /* takes no more entries */
	struct exl3_counters counters;
	struct exl3_metrics *metrics; /* borrowed; NULL: none */
	void (*buffer_free)(void *arg, struct exl3_buffer *buf);
	void *arg;
};

/* channel.c */
bool exl3_channels_turn(struct exl3_dispatch *d, uint64_t now_ns);
void exl3_channel_touch(struct exl3_channel *ch);
/* A completion that the client shall see at once. The channel is neither closed nor failed. */
void exl3_channel_answer(struct exl3_channel *ch, const struct exl3_cqe *cqe);
/* It was: perhaps the channel is looked at again now. After all that the completion means for others. */
void exl3_channel_answered(struct exl3_channel *ch, uint64_t now_ns);
void exl3_channel_try_free(struct exl3_channel *ch);
void exl3_channels_publish(struct exl3_dispatch *d);
void exl3_channels_on_muted(void *arg);
void exl3_channel_poll(struct exl3_channel *ch); /* it is looked at in the next turn */
/* Its requests are its tenant's, at the scheduler of its lane. */
void exl3_channel_account(struct exl3_channel *ch);

/* account.c */
void exl3_account_answer(const struct exl3_channel *ch, uint8_t op, int result);
void exl3_account_success(const struct exl3_request *req);
void exl3_account_launched(const struct exl3_launch *l, uint64_t now_ns);
void exl3_account_ended(struct exl3_dispatch *d, const struct exl3_launch *l, uint64_t exec_ns);

/* gate.c */
/* Entries that may be taken from its ring now. */
uint32_t exl3_gate_max(const struct exl3_channel *ch, uint64_t now_ns);
void exl3_gate_took(struct exl3_channel *ch, uint32_t nr, uint64_t now_ns);
/* A copied entry, and the one in the stash if there is one: false: it has to wait, in the stash. */
bool exl3_gate_entry(struct exl3_channel *ch, const struct exl3_sqe *sqe);
bool exl3_gate_unstash(struct exl3_channel *ch);
/* The rows of a request begin to count. */
void exl3_gate_count(struct exl3_channel *ch, struct exl3_request *req);
/* The same as soon as there is room: false: not yet. It holds back whatever is behind it. */
bool exl3_gate_rows(struct exl3_channel *ch, struct exl3_request *req);
/* It is not the first any more that gets rows, if it was. */
void exl3_gate_unready(struct exl3_channel *ch);
/* Its rows, if they count, end; and if it was the first to get some, another one is. */
void exl3_gate_ended(struct exl3_channel *ch, struct exl3_request *req);
/* The line of its tenant: for a move to WAITING and away from it. */
void exl3_gate_enter(struct exl3_channel *ch);
void exl3_gate_leave(struct exl3_channel *ch);
/* Lets go whoever can go on; true: somebody was. */
bool exl3_gates_turn(struct exl3_dispatch *d, uint64_t now_ns);
/* When the next one can because time has passed. */
uint64_t exl3_gates_until(const struct exl3_dispatch *d, uint64_t now_ns);

/* slice.c: which rows of the request the next launch has. */
void exl3_slice_plan(struct exl3_request *req, struct exl3_pace *pace, uint64_t chunk_ns);
/* Entry @i of a launch: the operands of these rows. */
void exl3_slice_operands(const struct exl3_request *req, struct exl3_launch *l, uint32_t i);
/* A launch with a slice of it has ended. True: another one follows, to be planned. */
bool exl3_slice_ended(struct exl3_request *req, int result, uint64_t skipped, uint64_t exec_ns);

/* watchdog.c: a launch was handed to the device; it has ended. */
void exl3_lane_launched(struct exl3_lane *lane, struct exl3_launch *l);
void exl3_lane_ended(struct exl3_lane *lane, struct exl3_launch *l);
/* A turn of the loop begins. */
void exl3_lanes_turn(struct exl3_dispatch *d, uint64_t now_ns);
/* True: a launch does not end; d->lost says which. */
bool exl3_lane_overdue(struct exl3_lane *lane);
/* When the loop must look again. */
uint64_t exl3_lanes_until(const struct exl3_dispatch *d, uint64_t now_ns);

/* guest.c: starts the guest's works if this is a moment for them; true: it did. */
bool exl3_guest_turn(struct exl3_lane *lane, uint64_t now_ns);
/* Is it one of the guest's? Then it is dealt with. */
bool exl3_guest_ended(struct exl3_lane *lane, const struct exl3_done *done);
/* The device is lost: none of them comes back. */
void exl3_guest_lost(struct exl3_lane *lane);
/* When to look again; UINT64_MAX: something else will happen first. */
uint64_t exl3_guest_until(const struct exl3_lane *lane, uint64_t now_ns);

/* merge.c: fills in key and class of the request's item; again when it has ended. */
void exl3_merge_enter(struct exl3_request *req);
void exl3_merge_leave(struct exl3_request *req);

/* words.c */
bool exl3_words_ready(const struct exl3_request *req); /* true for any that is no stream call */
/* The words of a call that has ended, however. */
void exl3_words_end(struct exl3_channel *ch, uint32_t seq, int result);
/* What the device is to write when it has run the last slice; false: nothing. */
bool exl3_words_signal(const struct exl3_request *req, struct exl3_signal *ret);
/* A stream call of it is held back. */
void exl3_words_hold(struct exl3_channel *ch, uint64_t now_ns);
void exl3_words_unhold(struct exl3_channel *ch);
bool exl3_words_turn(struct exl3_dispatch *d, uint64_t now_ns);
bool exl3_words_may_sleep(const struct exl3_dispatch *d, uint64_t now_ns, uint64_t *until_ns);
void exl3_words_fini(struct exl3_channel *ch);

/* replay.c */
/* A checked entry: 0, with the request's plan, models and rows filled in; or why not. */
int exl3_replay_enter(struct exl3_request *req, uint32_t handle, enum exl3_detail *detail);
uint32_t exl3_replay_rows(const struct exl3_channel *ch, uint32_t handle); /* of its longest call; 0: no such plan */
bool exl3_replay_may_start(const struct exl3_request *req); /* the plan is free */
/* Its calls are queued, a few at a time, in the lane of its channel. */
void exl3_replay_start(struct exl3_request *req);
/* A call of it has ended, IDLE; with the last one the replay does. */
void exl3_replay_call_ended(struct exl3_request *call, int result, uint64_t detail);
/* The calls that have not started are taken out: 0, or -EALREADY: there are none. */
int exl3_replay_cancel(struct exl3_request *req);
bool exl3_replay_runs(const struct exl3_request *req);
/* The replay has ended, however: it lets go of plan and models. */
void exl3_replay_leave(struct exl3_request *req);
void exl3_plans_orphan(struct exl3_channel *ch);

/* dispatch.c: checked, with channel and lane: its key, its first slice. */
void exl3_dispatch_fresh(struct exl3_request *req);
/* dispatch.c: a request that is IDLE has ended. */
void exl3_dispatch_finish(struct exl3_request *req, int result, uint64_t detail, uint64_t exec_ns);
/* dispatch.c: what a channel holds back may go, as far as it may. */
void exl3_dispatch_release(struct exl3_channel *ch);
/* A QUEUED request ends. */
void exl3_dispatch_end(struct exl3_request *req, int result);
/* dispatch.c: one copied entry of a channel; posts completions, queues requests. */
void exl3_dispatch_entry(struct exl3_channel *ch, const struct exl3_sqe *sqe);
/* Answers an entry that is not looked at any further. */
void exl3_dispatch_refuse(struct exl3_channel *ch, const struct exl3_sqe *sqe, int code,
			  enum exl3_detail detail);
void exl3_dispatch_drop_queued(struct exl3_channel *ch);
/* Does a device work beside which the loop should not spin? */
bool exl3_dispatch_needs_cpu(const struct exl3_dispatch *d);

#endif
