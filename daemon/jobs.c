/* SPDX-License-Identifier: Apache-2.0 */
/* jobs.c - a thread for what would block the loop: loading weights, making and freeing memory. */
#include "daemon/jobs.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct list {
	struct exl3_job *head, **tail;
};

struct exl3_jobs {
	struct exl3_loop *loop; /* borrowed from the worker */
	struct exl3_watch *watch;
	pthread_t thread;
	pthread_mutex_t lock; /* for what follows */
	pthread_cond_t more;
	struct list queued, finished;
	unsigned pending; /* added, done() not called yet; loop thread */
	int event_fd;     /* owned; written when something is finished */
	bool stop, started;
};

static void list_init(struct list *l)
{
	l->head = NULL;
	l->tail = &l->head;
}

static void list_add(struct list *l, struct exl3_job *job)
{
	job->next = NULL;
	*l->tail = job;
	l->tail = &job->next;
}

static struct exl3_job *list_take(struct list *l)
{
	struct exl3_job *job = l->head;

	if (job) {
		l->head = job->next;
		if (!l->head)
			l->tail = &l->head;
	}
	return job;
}

static void *jobs_thread(void *arg)
{
	struct exl3_jobs *jobs = arg;
	const uint64_t one = 1;

	pthread_mutex_lock(&jobs->lock);
	for (;;) {
		struct exl3_job *job = list_take(&jobs->queued);

		if (!job) {
			if (jobs->stop)
				break;
			pthread_cond_wait(&jobs->more, &jobs->lock);
			continue;
		}
		pthread_mutex_unlock(&jobs->lock);
		job->run(job);
		pthread_mutex_lock(&jobs->lock);
		list_add(&jobs->finished, job);
		/* Cannot fail: the counter is ours alone and far from its limit. */
		if (write(jobs->event_fd, &one, sizeof(one)) < 0)
			abort();
	}
	pthread_mutex_unlock(&jobs->lock);
	return NULL;
}

static void reap(struct exl3_jobs *jobs)
{
	struct exl3_job *job;

	for (;;) {
		pthread_mutex_lock(&jobs->lock);
		job = list_take(&jobs->finished);
		pthread_mutex_unlock(&jobs->lock);
		if (!job)
			return;
		jobs->pending--;
		job->done(job);
	}
}

static void on_finished(void *arg, uint32_t events)
{
	struct exl3_jobs *jobs = arg;
	uint64_t count;

	(void)events;
	if (read(jobs->event_fd, &count, sizeof(count)) < 0)
		return; /* spurious */
	reap(jobs);
}

int exl3_jobs_new(struct exl3_loop *loop, const char *name, struct exl3_jobs **ret,
		  struct exl3_error *err)
{
	struct exl3_jobs *jobs = calloc(1, sizeof(*jobs));
	sigset_t all, old;
	int rc;

	if (!jobs)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", name);
	jobs->loop = loop;
	list_init(&jobs->queued);
	list_init(&jobs->finished);
	pthread_mutex_init(&jobs->lock, NULL);
	pthread_cond_init(&jobs->more, NULL);
	jobs->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (jobs->event_fd < 0) {
		rc = exl3_errf(err, -errno, "%s: eventfd: %m", name);
		exl3_jobs_free(jobs);
		return rc;
	}
	/* Signals are the loop's. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	rc = pthread_create(&jobs->thread, NULL, jobs_thread, jobs);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (rc) {
		errno = rc;
		rc = exl3_errf(err, -rc, "%s: cannot start a thread: %m", name);
		exl3_jobs_free(jobs);
		return rc;
	}
	jobs->started = true;
	pthread_setname_np(jobs->thread, name);
	rc = exl3_watch_add(loop, jobs->event_fd, POLLIN, EXL3_WATCH_LEVEL, on_finished, jobs,
			    &jobs->watch);
	if (rc < 0) {
		exl3_jobs_free(jobs);
		return exl3_errf(err, rc, "%s: out of memory", name);
	}
	*ret = jobs;
	return 0;
}

void exl3_jobs_add(struct exl3_jobs *jobs, struct exl3_job *job)
{
	jobs->pending++;
	pthread_mutex_lock(&jobs->lock);
	list_add(&jobs->queued, job);
	pthread_cond_signal(&jobs->more);
	pthread_mutex_unlock(&jobs->lock);
}

struct exl3_jobs *exl3_jobs_free(struct exl3_jobs *jobs)
{
	struct pollfd pfd;

	if (!jobs)
		return NULL;
	pfd = (struct pollfd){.fd = jobs->event_fd, .events = POLLIN};
	while (jobs->pending) {
		poll(&pfd, 1, 100);
		on_finished(jobs, POLLIN);
	}
	if (jobs->started) {
		pthread_mutex_lock(&jobs->lock);
		jobs->stop = true;
		pthread_cond_signal(&jobs->more);
		pthread_mutex_unlock(&jobs->lock);
		pthread_join(jobs->thread, NULL);
	}
	if (jobs->watch)
		exl3_watch_drop(jobs->loop, jobs->watch);
	exl3_closep(&jobs->event_fd);
	pthread_mutex_destroy(&jobs->lock);
	pthread_cond_destroy(&jobs->more);
	free(jobs);
	return NULL;
}
