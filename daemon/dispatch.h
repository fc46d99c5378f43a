/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dispatch.h - from ring entry to completion: copy, check once, queue, launch, complete.
 *
 * Loop thread only. Nothing here allocates once a channel exists.
 *
 *   entry -> FREE slot -> QUEUED -> RUNNING (part of a launch) -> completion posted, slot FREE
 *                                   RUNNING -> QUEUED (rows are left: the next slice)
 *                         QUEUED -> cancelled, expired -> completion posted, slot FREE
 *                         HELD -> QUEUED, cancelled, expired
 *
 * Each device has a lane: a scheduler and the launches that it runs. A channel's requests are in one lane at
 * a time: one for another device, and everything behind it, is HELD until all before it are complete. So a
 * channel's order holds across devices too, and a channel that keeps to one device never waits.
 *
 *   channel:  POLLED (looked at every turn) -> DORMANT (armed: the client kicks) -> POLLED
 *             POLLED -> WAITING (its tenant is at a limit, gate.c) -> POLLED
 *             any -> FAILED (the client broke the protocol); any -> closed, freed after its last launch
 */
#ifndef EXL3_DAEMON_DISPATCH_H
#define EXL3_DAEMON_DISPATCH_H

#include "daemon/check.h"
#include "daemon/loop.h"
#include "daemon/models.h"
#include "daemon/sched.h"
#include "shm/segment.h"

struct exl3_dispatch;
struct exl3_channel;
struct exl3_recorded;
struct exl3_tenant;
struct exl3_metrics;
struct exl3_tuned;

/* Counted per client and for the worker. */
struct exl3_counters {
	uint64_t requests, errors, rows;
	uint64_t launches, launch_ns; /* the worker's only */
};

struct exl3_dispatch_options {
	struct exl3_loop *loop; /* borrowed */
	void (*buffer_free)(void *arg, struct exl3_buffer *buf); /* its last reference is gone */
	void *arg;
	uint32_t queue_depth, merge_max;
	uint64_t spin_ns;
	uint64_t chunk_ns; /* see exl3_dispatch_set_chunk() */
	uint64_t slack_ns; /* see exl3_dispatch_set_slack() */
	bool deterministic;
	bool trains; /* with merge_max above 1: bring decoders into step */
	struct exl3_metrics *metrics; /* borrowed; NULL: nothing is counted there */
};

int exl3_dispatch_new(const struct exl3_dispatch_options *opt, struct exl3_dispatch **ret,
		      struct exl3_error *err);
/**
 * exl3_dispatch_add_device() - a lane for one more device, before the first channel is opened.
 * @ops, @dev: borrowed until exl3_dispatch_free(). The n-th call is for the device with index n - 1.
 * @spin_beside: the loop may look for work while the device works: false where its threads need the
 *               processor.
 */
int exl3_dispatch_add_device(struct exl3_dispatch *d, const struct exl3_backend_ops *ops,
			     struct exl3_dev *dev, bool spin_beside, struct exl3_error *err);
/* All channels closed, nothing running: exl3_dispatch_busy() is false. */
struct exl3_dispatch *exl3_dispatch_free(struct exl3_dispatch *d);
void exl3_dispatch_set_spin(struct exl3_dispatch *d, uint64_t spin_ns);
/* Stream calls: how long to look for *ready* words without a pause after the last one that came, and how long
 * the first call of a channel may wait for its word, 0: for ever. */
void exl3_dispatch_set_ready(struct exl3_dispatch *d, uint64_t spin_ns, uint64_t timeout_ns);
/* What one launch should take of the device's time at most: longer requests run in slices of their rows, and
 * no more than that is handed to the device ahead. 0: no limit. */
void exl3_dispatch_set_chunk(struct exl3_dispatch *d, uint64_t chunk_ns);
/* How long a launch may take beyond what its size explains, then the device is lost. 0: for ever. */
void exl3_dispatch_set_slack(struct exl3_dispatch *d, uint64_t slack_ns);
/* What launches of that device take from now on where it has a line for them (kernels/tuned.h); a reference is
 * taken, NULL: no table. Launches that run keep theirs. */
void exl3_dispatch_set_tuned(struct exl3_dispatch *d, uint32_t device, struct exl3_tuned *tuned);
const struct exl3_tuned *exl3_dispatch_tuned(const struct exl3_dispatch *d, uint32_t device);

#define EXL3_GUEST_WORKS 16u

/*
 * Works of our own beside those of clients, with less claim to the device than anybody: they start when no client
 * has wanted it for some milliseconds, or when they have had less than a twentieth of the time. So a request waits for
 * one start of them at most, and who starts them keeps it short.
 */
struct exl3_guest {
	struct exl3_work works[EXL3_GUEST_WORKS]; /* tag is ours */
	uint32_t nr;                              /* to be started together, 0: nothing yet */
	/* All have ended, nr is 0; sets it again, or not. @exec_ns: of all. Loop thread. */
	void (*done)(void *arg, int result, uint64_t exec_ns);
	void *arg;
};

/* Borrowed until another one or NULL is set, which must not happen while exl3_dispatch_guest_runs(). */
void exl3_dispatch_set_guest(struct exl3_dispatch *d, uint32_t device, struct exl3_guest *guest);
bool exl3_dispatch_guest_runs(const struct exl3_dispatch *d, uint32_t device);

#define EXL3_DRAIN_READY_NS 1000000000ull

/* From now on new requests complete with -ESHUTDOWN; accepted ones finish. Stream calls that are not ready within
 * EXL3_DRAIN_READY_NS do not: -ESHUTDOWN. */
void exl3_dispatch_drain(struct exl3_dispatch *d);
/* From now on new requests stay in their rings, for whoever their clients connect to next; accepted ones
 * finish. */
void exl3_dispatch_leave(struct exl3_dispatch *d);
/* Is anything accepted and not complete? */
bool exl3_dispatch_busy(const struct exl3_dispatch *d);

/* Has a device failed (every request for it was answered with -EIO), or does a launch never end (what runs
 * stays unanswered, the device may still write to it)? Only another process can go on. @why: NULL, or it is
 * set to a sentence. */
bool exl3_dispatch_lost(const struct exl3_dispatch *d, const char **why);

/* Somebody else has found out that a device is lost. */
void exl3_dispatch_fail(struct exl3_dispatch *d, uint32_t device);

/* One turn: rings, launches, completions. True: something was done. */
bool exl3_dispatch_turn(struct exl3_dispatch *d, uint64_t now_ns);
/* Nothing was done: may the loop sleep? Then every ring and all devices are armed, and *@until_ns is when
 * the earliest deadline is. */
bool exl3_dispatch_may_sleep(struct exl3_dispatch *d, uint64_t now_ns, uint64_t *until_ns);

/* What was merged on all devices. */
void exl3_dispatch_merging(const struct exl3_dispatch *d, struct exl3_sched_stats *ret);
void exl3_dispatch_set_trains(struct exl3_dispatch *d, bool on);
const struct exl3_counters *exl3_dispatch_counters(const struct exl3_dispatch *d);
/* System calls made to wake clients that sleep. */
uint64_t exl3_dispatch_syscalls(const struct exl3_dispatch *d);
/* Not freed yet: those that clients have, and closed ones with work on the device. */
uint32_t exl3_dispatch_channels(const struct exl3_dispatch *d);

struct exl3_channel_options {
	uint32_t entries, channel, generation;
	uint64_t instance;
	struct exl3_counters *counters; /* borrowed from the peer until exl3_channel_close() */
	/* Look-ups of the peer's handles and buffers; not used after exl3_channel_close(). */
	struct exl3_buffer *(*buffer)(void *arg, uint32_t id);
	int (*target)(void *arg, uint32_t handle, struct exl3_target *ret);
	struct exl3_recorded *(*plan)(void *arg, uint32_t handle); /* NULL: no such plan; optional */
	void *arg;
	const char *who; /* for the log */
	struct exl3_tenant *tenant; /* a reference is taken; NULL: none */
};

/**
 * exl3_channel_open() - a ring pair with its wake-ups.
 * @fds: the client's: segment (borrowed from the channel), kick eventfd (likewise), notification
 *       socket (the caller's to close once it was sent).
 * Returns 0, -EINVAL, -ENOMEM, -EMFILE, -EDQUOT (a limit of the tenant).
 */
int exl3_channel_open(struct exl3_dispatch *d, const struct exl3_channel_options *opt,
		      struct exl3_channel **ret, int fds[3], struct exl3_error *err);
/* Gives a channel the words of its stream calls, at the beginning of @buf, which it keeps. -EBUSY, -EINVAL. */
int exl3_channel_bind_stream(struct exl3_channel *ch, struct exl3_buffer *buf,
			     struct exl3_error *err);
/* Queued requests are dropped, running ones finish unseen; freed after the last of them. */
struct exl3_channel *exl3_channel_close(struct exl3_channel *ch);
/* It and what it has in flight count against another tenant from now on. */
void exl3_channel_set_tenant(struct exl3_channel *ch, struct exl3_tenant *tenant);
uint64_t exl3_channel_bytes(const struct exl3_channel *ch);
/* No device has or is about to get anything of it; what waits for a word of its client does not count. */
bool exl3_channel_idle(const struct exl3_channel *ch);

#endif
