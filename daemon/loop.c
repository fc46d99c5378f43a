/* SPDX-License-Identifier: Apache-2.0 */
/* loop.c - the worker's event loop on one io_uring: readiness of fds, and timers. */
#include "daemon/loop.h"

#include "daemon/log.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef __SANITIZE_THREAD__
/* Of its runtime; gcc has no header for it. */
void __sanitizer_syscall_pre_impl_close(long fd);
#endif

#define RING_ENTRIES 256
#define BATCH        64         /* completions handled before rings and timers get their turn */
#define CLOSERS_MAX  256u       /* threads of the kernel that closes may keep busy */
#define CLOSE_NS     1000000000 /* what closes under way have when the loop ends */

struct exl3_watch {
	int fd; /* borrowed from the caller */
	uint32_t events;
	enum exl3_watch_mode mode;
	exl3_watch_fn fn;
	void *arg;
	struct exl3_watch *next; /* in loop->rearm */
	unsigned polls;          /* in the kernel: each has a last completion to come */
	bool queued;             /* in loop->rearm */
	bool dropped;
};

struct exl3_loop {
	struct io_uring ring;
	struct exl3_watch
		*rearm; /* watches whose poll must be (re)submitted; freed there if dropped */
	struct exl3_timer *timers; /* sorted by time */
	unsigned unsubmitted;
	unsigned nr_watches;
	unsigned closing; /* closes that the kernel has not completed */
	uint64_t syscalls;
};

static const char close_mark; /* its address is the user data of a close */

int exl3_loop_new(struct exl3_loop **ret, struct exl3_error *err)
{
	struct exl3_loop *loop = calloc(1, sizeof(*loop));
	struct io_uring_params params = {.flags = IORING_SETUP_CQSIZE, .cq_entries = 4096};
	int rc;

	if (!loop)
		return exl3_errf(err, -ENOMEM, "event loop: out of memory");
	rc = io_uring_queue_init_params(RING_ENTRIES, &loop->ring, &params);
	if (rc < 0) {
		free(loop);
		errno = -rc;
		return exl3_errf(
			err, rc,
			"io_uring_setup: %m; the worker needs io_uring (Linux 6.1 or later; see "
			"/proc/sys/kernel/io_uring_disabled, seccomp and container profiles)");
	}
	/* Without NODROP a burst of wake-ups could lose completions; with EXT_ARG a wait has its limit. */
	if (!(params.features & IORING_FEAT_NODROP) || !(params.features & IORING_FEAT_EXT_ARG)) {
		io_uring_queue_exit(&loop->ring);
		free(loop);
		return exl3_errf(err, -ENOSYS,
				 "io_uring of this kernel is too old: Linux 6.1 is needed");
	}
	/* By default a few closes that hang would keep all others waiting. */
	io_uring_register_iowq_max_workers(&loop->ring, (unsigned[2]){CLOSERS_MAX, 0});
	*ret = loop;
	return 0;
}

/* What completes while the loop ends; no callback runs any more. */
static void reap_last(struct exl3_loop *loop)
{
	struct exl3_watch *watch;
	struct io_uring_cqe *cqe;

	while (io_uring_peek_cqe(&loop->ring, &cqe) == 0) {
		watch = io_uring_cqe_get_data(cqe);
		if ((const void *)watch == &close_mark) {
			loop->closing--;
		} else if (watch && !(cqe->flags & IORING_CQE_F_MORE) && --watch->polls == 0 &&
			   !watch->queued) {
			loop->nr_watches--;
			free(watch);
		}
		io_uring_cqe_seen(&loop->ring, cqe);
	}
}

struct exl3_loop *exl3_loop_free(struct exl3_loop *loop)
{
	struct __kernel_timespec ts = {.tv_nsec = CLOSE_NS / 100};
	struct exl3_watch *watch;
	struct io_uring_cqe *cqe;

	if (!loop)
		return NULL;
	/* Whoever added a watch has dropped it; what the kernel still holds ends with the cancellations. */
	while (loop->nr_watches) {
		while ((watch = loop->rearm)) {
			loop->rearm = watch->next;
			watch->queued = false;
			if (!watch->polls) {
				loop->nr_watches--;
				free(watch);
			}
		}
		if (!loop->nr_watches)
			break;
		if (io_uring_submit_and_wait(&loop->ring, 1) < 0)
			break;
		reap_last(loop);
	}
	/* A close that hangs is left to the end of the process. */
	for (int i = 0; loop->closing && i < 100; i++) {
		io_uring_submit_and_wait_timeout(&loop->ring, &cqe, 1, &ts, NULL);
		reap_last(loop);
	}
	io_uring_queue_exit(&loop->ring);
	free(loop);
	return NULL;
}

static void loop_submit(struct exl3_loop *loop)
{
	int rc;

	if (!loop->unsubmitted)
		return;
	loop->syscalls++;
	rc = io_uring_submit(&loop->ring);
	if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
		errno = -rc;
		exl3_log_limited(EXL3_LOG_WARN, "io_uring_submit: %m");
	}
	loop->unsubmitted = io_uring_sq_ready(&loop->ring);
}

/* A free entry; NULL only if the kernel takes none, then the caller tries again in its next turn. */
static struct io_uring_sqe *loop_sqe(struct exl3_loop *loop)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&loop->ring);

	if (!sqe) {
		loop_submit(loop);
		sqe = io_uring_get_sqe(&loop->ring);
	}
	if (sqe)
		loop->unsubmitted++;
	return sqe;
}

static void queue_rearm(struct exl3_loop *loop, struct exl3_watch *watch)
{
	if (watch->queued)
		return;
	watch->queued = true;
	watch->next = loop->rearm;
	loop->rearm = watch;
}

/* Brings the kernel's polls in line with our watches. */
static void flush_rearm(struct exl3_loop *loop)
{
	struct exl3_watch *watch;
	struct io_uring_sqe *sqe;

	while ((watch = loop->rearm)) {
		if (watch->dropped && !watch->polls) {
			loop->rearm = watch->next;
			loop->nr_watches--;
			free(watch);
			continue;
		}
		sqe = loop_sqe(loop);
		if (!sqe)
			return;
		loop->rearm = watch->next;
		watch->queued = false;
		if (watch->polls) {
			/* Its completion comes back here: to be freed, or armed with its new events. Not
			 * POLL_REMOVE, which gives up (-EALREADY) while somebody is waking the poll: whoever
			 * writes to its eventfd all the time could keep it for ever. */
			io_uring_prep_cancel(sqe, watch, 0);
			io_uring_sqe_set_data(sqe, NULL);
			continue;
		}
		if (watch->mode == EXL3_WATCH_EDGE)
			io_uring_prep_poll_multishot(sqe, watch->fd, watch->events);
		else
			io_uring_prep_poll_add(sqe, watch->fd, watch->events);
		io_uring_sqe_set_data(sqe, watch);
		watch->polls++;
	}
}

int exl3_watch_add(struct exl3_loop *loop, int fd, uint32_t events, enum exl3_watch_mode mode,
		   exl3_watch_fn fn, void *arg, struct exl3_watch **ret)
{
	struct exl3_watch *watch = calloc(1, sizeof(*watch));

	if (!watch)
		return -ENOMEM;
	watch->fd = fd;
	watch->events = events;
	watch->mode = mode;
	watch->fn = fn;
	watch->arg = arg;
	loop->nr_watches++;
	queue_rearm(loop, watch);
	*ret = watch;
	return 0;
}

void exl3_watch_set(struct exl3_loop *loop, struct exl3_watch *watch, uint32_t events)
{
	if (watch->events == events)
		return;
	watch->events = events;
	queue_rearm(loop, watch);
}

struct exl3_watch *exl3_watch_drop(struct exl3_loop *loop, struct exl3_watch *watch)
{
	if (!watch)
		return NULL;
	watch->dropped = true;
	queue_rearm(loop, watch);
	/* The caller may close the fd next: the poll that names it must be known to the kernel, or the
	 * number could be taken for another file. Polls hold their own reference once submitted. */
	flush_rearm(loop);
	loop_submit(loop);
	return NULL;
}

void exl3_loop_close(struct exl3_loop *loop, int *fd)
{
	struct io_uring_sqe *sqe;

	if (*fd < 0)
		return;
	sqe = loop_sqe(loop);
	if (!sqe) {
		exl3_closep(fd); /* better late than never */
		return;
	}
#ifdef __SANITIZE_THREAD__
	/* ThreadSanitizer follows descriptors but does not see io_uring close them, and takes the number's
	 * next owner for a race. A duplicate for io_uring would do as well, but where descriptors have run out
	 * there is none. */
	__sanitizer_syscall_pre_impl_close(*fd);
#endif
	io_uring_prep_close(sqe, *fd);
	io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
	io_uring_sqe_set_data(sqe, (void *)(uintptr_t)&close_mark);
	loop->closing++;
	*fd = -1;
}

void exl3_timer_cancel(struct exl3_loop *loop, struct exl3_timer *timer)
{
	struct exl3_timer **p;

	if (!timer->armed)
		return;
	for (p = &loop->timers; *p != timer; p = &(*p)->next)
		assert(*p);
	*p = timer->next;
	timer->armed = false;
}

void exl3_timer_set(struct exl3_loop *loop, struct exl3_timer *timer, uint64_t at_ns)
{
	struct exl3_timer **p;

	exl3_timer_cancel(loop, timer);
	timer->at_ns = at_ns;
	for (p = &loop->timers; *p && (*p)->at_ns <= at_ns; p = &(*p)->next)
		;
	timer->next = *p;
	*p = timer;
	timer->armed = true;
}

uint64_t exl3_loop_next_timer(const struct exl3_loop *loop)
{
	return loop->timers ? loop->timers->at_ns : UINT64_MAX;
}

/* One completion of a watch's poll. */
static unsigned watch_event(struct exl3_loop *loop, struct exl3_watch *watch, int res,
			    uint32_t flags)
{
	if (!(flags & IORING_CQE_F_MORE)) {
		watch->polls--;
		/* Level watches are one-shot; a multishot poll ends when the ring overflows. */
		if (!watch->polls)
			queue_rearm(loop, watch);
	}
	if (watch->dropped || res == -ECANCELED)
		return 0;
	watch->fn(watch->arg, res < 0 ? POLLERR : (uint32_t)res);
	return 1;
}

unsigned exl3_loop_poll(struct exl3_loop *loop, uint64_t now_ns)
{
	struct io_uring_cqe *cqe;
	unsigned done = 0;

	if (loop->rearm)
		flush_rearm(loop);
	if (loop->unsubmitted)
		loop_submit(loop);
	/* A burst that did not fit waits in the kernel until somebody asks. */
	if (io_uring_cq_has_overflow(&loop->ring)) {
		loop->syscalls++;
		io_uring_get_events(&loop->ring);
	}
	for (unsigned i = 0; i < BATCH && io_uring_cq_ready(&loop->ring); i++) {
		struct exl3_watch *watch;
		uint32_t flags;
		int res;

		if (io_uring_peek_cqe(&loop->ring, &cqe) < 0)
			break;
		watch = io_uring_cqe_get_data(cqe);
		res = cqe->res;
		flags = cqe->flags;
		io_uring_cqe_seen(&loop->ring, cqe);
		if ((const void *)watch == &close_mark)
			loop->closing--;
		else if (watch)
			done += watch_event(loop, watch, res, flags);
	}
	while (loop->timers && loop->timers->at_ns <= now_ns) {
		struct exl3_timer *timer = loop->timers;

		exl3_timer_cancel(loop, timer);
		timer->fn(timer->arg);
		done++;
	}
	return done;
}

void exl3_loop_wait(struct exl3_loop *loop, uint64_t until_ns)
{
	uint64_t timer = exl3_loop_next_timer(loop), now = exl3_now_ns();
	struct __kernel_timespec ts;
	struct io_uring_cqe *cqe;

	if (timer < until_ns)
		until_ns = timer;
	flush_rearm(loop);
	if (until_ns <= now)
		return;
	loop->syscalls++;
	if (until_ns == UINT64_MAX) {
		io_uring_submit_and_wait(&loop->ring, 1);
	} else {
		ts.tv_sec = (int64_t)((until_ns - now) / 1000000000u);
		ts.tv_nsec = (int64_t)((until_ns - now) % 1000000000u);
		io_uring_submit_and_wait_timeout(&loop->ring, &cqe, 1, &ts, NULL);
	}
	loop->unsubmitted = io_uring_sq_ready(&loop->ring);
}

uint64_t exl3_loop_syscalls(const struct exl3_loop *loop)
{
	return loop->syscalls;
}
