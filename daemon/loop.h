/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loop.h - the worker's event loop on one io_uring: readiness of fds, and timers.
 *
 * Single-threaded. Callbacks may add and drop any watch or timer, their own too. A watch that is
 * dropped is forgotten by the kernel later than by us, so its memory is the loop's:
 *
 *   watch:  ARMED -> (event, one-shot) -> REARM -> ARMED ...
 *           any -> DROPPED (callback never runs again) -> freed at the poll's last completion
 */
#ifndef EXL3_DAEMON_LOOP_H
#define EXL3_DAEMON_LOOP_H

#include "shm/util.h"

#include <stdbool.h>
#include <stdint.h>

struct exl3_loop;
struct exl3_watch;

/* @events: poll() bits; POLLERR and POLLHUP come unasked. */
typedef void (*exl3_watch_fn)(void *arg, uint32_t events);

enum exl3_watch_mode {
	EXL3_WATCH_LEVEL, /* called again while the condition lasts; for sockets that are read */
	EXL3_WATCH_EDGE, /* called per wake-up, the fd is never read: eventfds shared with a client */
};

/* Owned by the caller, zeroed before first use; in the loop's list while armed. */
struct exl3_timer {
	uint64_t at_ns; /* CLOCK_MONOTONIC */
	void (*fn)(void *arg);
	void *arg;
	struct exl3_timer *next;
	bool armed;
};

/* -ENOSYS, -EPERM: io_uring is not there or forbidden (err says what to do). */
int exl3_loop_new(struct exl3_loop **ret, struct exl3_error *err);
struct exl3_loop *exl3_loop_free(struct exl3_loop *loop);

/**
 * exl3_watch_add() - call @fn when @fd is ready.
 * @fd: borrowed until exl3_watch_drop(); may be closed right after that.
 * Returns 0 or -ENOMEM.
 */
int exl3_watch_add(struct exl3_loop *loop, int fd, uint32_t events, enum exl3_watch_mode mode,
		   exl3_watch_fn fn, void *arg, struct exl3_watch **ret);
/* Changes what a LEVEL watch waits for. */
void exl3_watch_set(struct exl3_loop *loop, struct exl3_watch *watch, uint32_t events);
struct exl3_watch *exl3_watch_drop(struct exl3_loop *loop, struct exl3_watch *watch);

/* Closes a descriptor that came from a client, or its socket, off this thread: the last close of a file
 * that is not ours may block as long as its owner likes (a TCP socket that lingers, a FUSE file), and
 * so may that of a socket in which such files were left unread. -1 is nothing; *@fd is -1 afterwards. */
void exl3_loop_close(struct exl3_loop *loop, int *fd);

void exl3_timer_set(struct exl3_loop *loop, struct exl3_timer *timer, uint64_t at_ns);
void exl3_timer_cancel(struct exl3_loop *loop, struct exl3_timer *timer);
/* When the earliest timer is due; UINT64_MAX: none. */
uint64_t exl3_loop_next_timer(const struct exl3_loop *loop);

/* Runs what is ready and due without waiting; number of callbacks. No system call unless a watch
 * was added, changed or dropped. */
unsigned exl3_loop_poll(struct exl3_loop *loop, uint64_t now_ns);
/* Sleeps until something is ready or a timer is due; does not run it. @until_ns bounds the sleep too. */
void exl3_loop_wait(struct exl3_loop *loop, uint64_t until_ns);
/* System calls that the loop has made, sleeping among them: shown by status and tests. */
uint64_t exl3_loop_syscalls(const struct exl3_loop *loop);

#endif
