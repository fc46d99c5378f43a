/* SPDX-License-Identifier: Apache-2.0 */
/* executor.c - the work and done rings of one device and the thread between them. */
#include "kernels/executor.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

struct exl3_executor {
	const struct exl3_executor_ops *ops; /* borrowed, static */
	void *arg;                           /* borrowed from the device */
	pthread_t thread;
	bool started;
	uint64_t spin_ns;
	int event_fd; /* owned; written by the executor, read by the loop */
	struct exl3_executor *wake;   /* whose armed and event_fd count for what we finish: ourselves, or the one joined */
	struct exl3_executor *joined; /* atomic: the one that joined us, or NULL; borrowed */

	/* Work ring: the tail is the loop's, the head the executor's: @accepted tells the loop what it needs to
	 * know. */
	_Alignas(64) uint32_t work_tail;
	_Alignas(64) uint32_t work_head; /* executor thread only */
	uint32_t asleep; /* executor */
	uint32_t stop;                /* loop */
	/* Done ring: tail is the executor's, head the loop's. */
	_Alignas(64) uint32_t done_tail;
	_Alignas(64) uint32_t done_head;
	_Alignas(64) uint32_t armed;  /* loop */
	uint32_t accepted;            /* loop thread only: submitted and not yet polled */
	const struct exl3_work *work[EXL3_EXECUTOR_QUEUE];
	struct exl3_done done[EXL3_EXECUTOR_QUEUE];
};

static void futex_wait(uint32_t *word, uint32_t value, const struct timespec *limit)
{
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, limit, NULL, 0);
}

static void futex_wake(uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static inline void relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

/* Waits for the next work: its ring index is *head. false: stopped and empty. */
static bool next_work(struct exl3_executor *ex, uint32_t head)
{
	uint64_t until = exl3_now_ns() + ex->spin_ns;

	for (;;) {
		uint32_t tail = __atomic_load_n(&ex->work_tail, __ATOMIC_ACQUIRE);

		if (tail != head)
			return true;
		/* Stop is set after the last submit, so the tail has to be looked at once more. */
		if (__atomic_load_n(&ex->stop, __ATOMIC_ACQUIRE))
			return __atomic_load_n(&ex->work_tail, __ATOMIC_ACQUIRE) != head;
		if (exl3_now_ns() < until) {
			relax();
			continue;
		}
		__atomic_store_n(&ex->asleep, 1, __ATOMIC_SEQ_CST);             /* E0 */
		tail = __atomic_load_n(&ex->work_tail, __ATOMIC_SEQ_CST);
		if (tail == head && !__atomic_load_n(&ex->stop, __ATOMIC_SEQ_CST))
			futex_wait(&ex->asleep, 1, NULL);
		__atomic_store_n(&ex->asleep, 0, __ATOMIC_SEQ_CST);
		until = exl3_now_ns() + ex->spin_ns;
	}
}

static void *executor_main(void *arg)
{
	struct exl3_executor *ex = arg;
	unsigned in_flight = 0;

	if (ex->ops->start)
		ex->ops->start(ex->arg);
	for (;;) {
		bool begun = false;

		/* With something in flight only look; with nothing, wait. */
		if (in_flight ? __atomic_load_n(&ex->work_tail, __ATOMIC_ACQUIRE) != ex->work_head :
				next_work(ex, ex->work_head)) {
			begun = ex->ops->begin(ex->arg,
					       ex->work[ex->work_head & (EXL3_EXECUTOR_QUEUE - 1)]);
			ex->work_head += begun;
		} else if (!in_flight) {
			return NULL;
		}
		if (ex->ops->progress)
			in_flight = ex->ops->progress(ex->arg);
		if (in_flight && !begun)
			relax();
	}
}

void exl3_executor_nap(struct exl3_executor *ex, uint64_t ns)
{
	const struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};

	__atomic_store_n(&ex->asleep, 1, __ATOMIC_SEQ_CST);                     /* E0 */
	if (__atomic_load_n(&ex->work_tail, __ATOMIC_SEQ_CST) == ex->work_head &&
	    !__atomic_load_n(&ex->stop, __ATOMIC_SEQ_CST))
		futex_wait(&ex->asleep, 1, &limit);
	__atomic_store_n(&ex->asleep, 0, __ATOMIC_SEQ_CST);
}

bool exl3_executor_more(const struct exl3_executor *ex)
{
	return __atomic_load_n(&ex->work_tail, __ATOMIC_RELAXED) - ex->work_head > 1;
}

void exl3_executor_done(struct exl3_executor *ex, void *tag, int result, uint64_t exec_ns)
{
	struct exl3_executor *wake = ex->wake;
	uint32_t tail = ex->done_tail;
	const uint64_t one = 1;

	ex->done[tail & (EXL3_EXECUTOR_QUEUE - 1)] = (struct exl3_done){tag, result, exec_ns};
	__atomic_store_n(&ex->done_tail, tail + 1, __ATOMIC_SEQ_CST);           /* E1 */
	if (__atomic_load_n(&wake->armed, __ATOMIC_SEQ_CST) &&
	    __atomic_exchange_n(&wake->armed, 0, __ATOMIC_SEQ_CST)) {
		ssize_t n = write(wake->event_fd, &one, sizeof(one));

		(void)n; /* our own non-blocking eventfd: full means it is readable already */
	}
}

int exl3_executor_submit(struct exl3_executor *ex, const struct exl3_work *work)
{
	uint32_t tail = ex->work_tail;

	if (ex->accepted == EXL3_EXECUTOR_QUEUE)
		return -EAGAIN;
	ex->accepted++;
	ex->work[tail & (EXL3_EXECUTOR_QUEUE - 1)] = work;
	__atomic_store_n(&ex->work_tail, tail + 1, __ATOMIC_SEQ_CST);           /* E0 */
	if (__atomic_load_n(&ex->asleep, __ATOMIC_SEQ_CST) &&
	    __atomic_exchange_n(&ex->asleep, 0, __ATOMIC_SEQ_CST))
		futex_wake(&ex->asleep);
	return 0;
}

int exl3_executor_poll(struct exl3_executor *ex, struct exl3_done *done, unsigned max)
{
	uint32_t head = ex->done_head;
	uint32_t n = __atomic_load_n(&ex->done_tail, __ATOMIC_ACQUIRE) - head;

	if (n > max)
		n = max;
	for (uint32_t i = 0; i < n; i++)
		done[i] = ex->done[(head + i) & (EXL3_EXECUTOR_QUEUE - 1)];
	ex->done_head = head + n;
	ex->accepted -= n;
	return (int)n;
}

int exl3_executor_event_fd(struct exl3_executor *ex)
{
	return ex->event_fd;
}

void exl3_executor_join(struct exl3_executor *ex, struct exl3_executor *to)
{
	ex->wake = to;
	__atomic_store_n(&to->joined, ex, __ATOMIC_RELEASE);
}

bool exl3_executor_arm(struct exl3_executor *ex)
{
	const struct exl3_executor *joined = __atomic_load_n(&ex->joined, __ATOMIC_ACQUIRE);
	uint64_t count;
	ssize_t n = read(ex->event_fd, &count, sizeof(count)); /* leaves it unreadable */

	(void)n;
	__atomic_store_n(&ex->armed, 1, __ATOMIC_SEQ_CST);                      /* E1 */
	if (__atomic_load_n(&ex->done_tail, __ATOMIC_SEQ_CST) == ex->done_head &&
	    (!joined || __atomic_load_n(&joined->done_tail, __ATOMIC_SEQ_CST) == joined->done_head))
		return true;
	__atomic_store_n(&ex->armed, 0, __ATOMIC_SEQ_CST);
	return false;
}

struct exl3_executor *exl3_executor_free(struct exl3_executor *ex)
{
	if (!ex)
		return NULL;
	if (ex->started) {
		__atomic_store_n(&ex->stop, 1, __ATOMIC_SEQ_CST);
		if (__atomic_exchange_n(&ex->asleep, 0, __ATOMIC_SEQ_CST))
			futex_wake(&ex->asleep);
		pthread_join(ex->thread, NULL);
	}
	if (ex->event_fd >= 0)
		close(ex->event_fd);
	free(ex);
	return NULL;
}

int exl3_executor_new(const struct exl3_executor_ops *ops, void *arg, uint64_t spin_ns,
		      struct exl3_executor **ret, struct exl3_error *err)
{
	struct exl3_executor *ex = aligned_alloc(64, sizeof(*ex));
	int code;

	if (!ex)
		return exl3_errf(err, -ENOMEM, "executor: out of memory");
	*ex = (struct exl3_executor){.ops = ops, .arg = arg, .spin_ns = spin_ns, .event_fd = -1};
	ex->wake = ex;
	ex->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (ex->event_fd < 0) {
		code = exl3_errf(err, -errno, "executor: eventfd: %m");
		exl3_executor_free(ex);
		return code;
	}
	*ret = ex; /* the thread's start() may look at the device, which holds this pointer */
	code = pthread_create(&ex->thread, NULL, executor_main, ex);
	if (code) {
		*ret = NULL;
		exl3_executor_free(ex);
		return exl3_errf(err, -code, "executor: cannot start a thread");
	}
	ex->started = true;
	return 0;
}
