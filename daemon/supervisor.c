/* SPDX-License-Identifier: Apache-2.0 */
/*
 * supervisor.c - owns the listening socket, starts the worker and starts it again when it dies.
 *
 *   STARTING -> RUNNING (the worker is ready) -> DRAINING -> end
 *   any but DRAINING -> BACKOFF (it died) -> STARTING, or end after too many
 */
#include "daemon/supervisor.h"

#include "daemon/listen.h"
#include "daemon/log.h"
#include "daemon/worker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#define BACKOFF_MIN_NS 10000000ull
#define BACKOFF_MAX_NS 5000000000ull
#define KILL_AFTER_NS  5000000000ull /* what a draining worker has beyond its drain-timeout */
#define HEAR_MS        1000          /* in which a worker that is well reads what it is sent */

/* Exit status, unlike 1 for what a new start would meet again: systemd's unit tells them apart. */
#define GAVE_UP 3

enum state { STARTING, RUNNING, DRAINING, BACKOFF };

struct supervisor {
	struct exl3_config *cfg; /* the one that was accepted last: what a new worker gets */
	int argc;
	char *const *argv;
	struct exl3_listener listener;
	int signal_fd, control_fd; /* owned */
	enum state state;
	pid_t worker; /* 0: none */
	uint64_t instance, watchdog_ns;
	uint32_t generation;
	uint64_t due_ns; /* BACKOFF: when to start; DRAINING: when to kill; else unused */
	uint64_t window_start_ns;
	uint32_t restarts; /* in the window */
	sigset_t old_mask;
	int status;
	bool end;
};

/* @flags: MSG_DONTWAIT for a worker that may hang; one that starts reads what it is sent. */
static bool tell(struct supervisor *s, struct exl3_sup_msg *msg, const char *text, int flags)
{
	size_t len = strlen(text);
	ssize_t n;

	if (len >= sizeof(msg->text))
		len = sizeof(msg->text) - 1;
	memcpy(msg->text, text, len);
	msg->text[len] = 0;
	n = send(s->control_fd, msg, offsetof(struct exl3_sup_msg, text) + len + 1,
		 MSG_NOSIGNAL | flags);
	if (n < 0)
		exl3_dbg("worker: %m"); /* its end is seen by SIGCHLD */
	return n >= 0;
}

/* To a worker that serves: false if it does not read until @until. */
static bool tell_until(struct supervisor *s, struct exl3_sup_msg *msg, const char *text,
		       uint64_t until)
{
	struct pollfd fd = {.fd = s->control_fd, .events = POLLOUT};
	uint64_t now = exl3_now_ns();

	if (poll(&fd, 1, now < until ? (int)((until - now) / 1000000 + 1) : 0) <= 0)
		return false;
	return tell(s, msg, text, MSG_DONTWAIT);
}

/* NAME=DIR,device=D: always with a device, so that nothing in the path is taken for one. */
static void model_spec(const struct supervisor *s, const struct exl3_config_model *m,
		       char text[EXL3_SUP_TEXT_MAX])
{
	snprintf(text, EXL3_SUP_TEXT_MAX, "%s=%s,device=%s", m->name, m->path,
		 m->device        ? m->device
		 : s->cfg->device ? s->cfg->device
				  : "0");
}

/* ---- start ---- */

/* In the child: only the two descriptors go on. */
static void become_worker(struct supervisor *s, int control, pid_t supervisor)
{
	/* No flags and no files: the configuration comes from us, see greet_worker(). */
	char *const argv[] = {s->argv[0], (char *)"--worker", (char *)"3", NULL};
	int listen_high = fcntl(s->listener.fd, F_DUPFD, 16),
	    control_high = fcntl(control, F_DUPFD, 16);

	if (listen_high < 0 || control_high < 0 || dup2(listen_high, EXL3_WORKER_LISTEN_FD) < 0 ||
	    dup2(control_high, EXL3_WORKER_CONTROL_FD) < 0)
		_exit(1);
	/* A worker that outlives its supervisor would keep the socket from the next daemon. */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != supervisor)
		_exit(1);
	close_range(EXL3_WORKER_CONTROL_FD + 1, ~0u, 0);
	unsetenv("NOTIFY_SOCKET"); /* the supervisor alone speaks to systemd */
	unsetenv("WATCHDOG_USEC");
	unsetenv("WATCHDOG_PID");
	/* libgomp reads this when it is loaded. Its own default keeps an idle team spinning for
	 * milliseconds, on cores that clients could use. */
	setenv("GOMP_SPINCOUNT", "2000", 0);
	sigprocmask(SIG_SETMASK, &s->old_mask, NULL);
	/* Not by name: an upgrade may have put another version there, which the fds are not meant for. */
	execv("/proc/self/exe", argv);
	_exit(1);
}

static void greet_worker(struct supervisor *s)
{
	struct exl3_sup_msg msg = {
		.type = EXL3_SUP_HELLO,
		.generation = s->generation,
		.instance = s->instance,
		.watchdog_ns = s->watchdog_ns / 4,
		.pid = getpid(),
	};
	char text[EXL3_SUP_TEXT_MAX];

	tell(s, &msg, "", 0);
	msg.type = EXL3_SUP_KEY;
	for (size_t i = 0; exl3_config_setting(s->cfg, &i, text, sizeof(text));)
		tell(s, &msg, text, 0);
	for (size_t i = 0; i < s->cfg->nr_models; i++) {
		const struct exl3_config_model *m = &s->cfg->models[i];

		msg.type = EXL3_SUP_MODEL;
		msg.generation = m->by_client;
		model_spec(s, m, text);
		tell(s, &msg, text, 0);
	}
	msg.type = EXL3_SUP_GO;
	tell(s, &msg, "", 0);
}

static int start_worker(struct supervisor *s, struct exl3_error *err)
{
	pid_t supervisor = getpid(), pid;
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return exl3_errf(err, -errno, "socketpair: %m");
	pid = fork();
	if (pid < 0) {
		int rc = exl3_errf(err, -errno, "fork: %m");

		close(pair[0]);
		close(pair[1]);
		return rc;
	}
	if (pid == 0)
		become_worker(s, pair[1], supervisor);
	close(pair[1]);
	exl3_closep(&s->control_fd);
	s->control_fd = pair[0];
	s->worker = pid;
	s->generation++;
	s->state = STARTING;
	greet_worker(s);
	return 0;
}

/* ---- the worker's end ---- */

static void back_off(struct supervisor *s)
{
	uint64_t now = exl3_now_ns(), delay = BACKOFF_MIN_NS;

	if (now - s->window_start_ns > s->cfg->restart_window_s * 1000000000u) {
		s->window_start_ns = now;
		s->restarts = 0;
	}
	if (s->restarts >= s->cfg->restart_limit) {
		exl3_err("the worker died %u times within %llu s: giving up", s->restarts + 1,
			 (unsigned long long)s->cfg->restart_window_s);
		s->status = GAVE_UP;
		s->end = true;
		return;
	}
	for (uint32_t i = 0; i < s->restarts && delay < BACKOFF_MAX_NS; i++)
		delay *= 4;
	s->restarts++;
	s->state = BACKOFF;
	s->due_ns = now + (delay < BACKOFF_MAX_NS ? delay : BACKOFF_MAX_NS);
	sd_notifyf(0, "STATUS=worker died, restarting (%u of %llu)", s->restarts,
		   (unsigned long long)s->cfg->restart_limit);
}

static void worker_ended(struct supervisor *s, int wstatus)
{
	pid_t pid = s->worker;

	s->worker = 0;
	exl3_closep(&s->control_fd);
	if (WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == 0) {
		s->end = true; /* drained */
		return;
	}
	if (WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == EXL3_WORKER_REFUSED) {
		s->status = 1; /* the worker has said why */
		s->end = true;
		return;
	}
	if (WIFSIGNALED(wstatus))
		exl3_err("worker %d was killed by signal %d (%s)", (int)pid, WTERMSIG(wstatus),
			 strsignal(WTERMSIG(wstatus)));
	else
		exl3_err("worker %d ended with status %d", (int)pid, WEXITSTATUS(wstatus));
	if (s->state == DRAINING) {
		s->status = 1;
		s->end = true;
		return;
	}
	back_off(s);
}

static void reap(struct supervisor *s)
{
	int wstatus;
	pid_t pid;

	while ((pid = waitpid(-1, &wstatus, WNOHANG)) > 0) {
		if (pid == s->worker)
			worker_ended(s, wstatus);
	}
}

/* ---- events ---- */

static void drain(struct supervisor *s, int signo)
{
	struct exl3_sup_msg msg = {.type = EXL3_SUP_DRAIN};

	if (!s->worker) {
		s->end = true;
		return;
	}
	if (s->state == DRAINING) {
		exl3_warn("%s again: the worker is killed", strsignal(signo));
		kill(s->worker, SIGKILL);
		return;
	}
	exl3_info("%s: draining", strsignal(signo));
	sd_notify(0, "STOPPING=1\nSTATUS=draining");
	s->state = DRAINING;
	s->due_ns = exl3_now_ns() + s->cfg->drain_timeout_s * 1000000000u + KILL_AFTER_NS;
	tell(s, &msg, "", MSG_DONTWAIT);
}

/* The worker takes all of it or, if it does not hear the end, nothing. It knows which models are new. */
static bool tell_reload(struct supervisor *s, const struct exl3_config *fresh)
{
	struct exl3_sup_msg msg = {.type = EXL3_SUP_RELOAD};
	uint64_t until = exl3_now_ns() + HEAR_MS * 1000000ull;
	char text[EXL3_SUP_TEXT_MAX];
	bool heard;

	heard = tell_until(s, &msg, "", until);
	msg.type = EXL3_SUP_KEY;
	for (size_t i = 0; heard && exl3_config_setting(s->cfg, &i, text, sizeof(text));)
		heard = tell_until(s, &msg, text, until);
	msg.type = EXL3_SUP_MODEL;
	for (size_t i = 0; heard && i < fresh->nr_models; i++) {
		model_spec(s, &fresh->models[i], text);
		heard = tell_until(s, &msg, text, until);
	}
	msg.type = EXL3_SUP_GO;
	return heard && tell_until(s, &msg, "", until);
}

static bool has_model(const struct exl3_config *cfg, const char *name)
{
	for (size_t i = 0; i < cfg->nr_models; i++) {
		if (strcmp(cfg->models[i].name, name) == 0)
			return true;
	}
	return false;
}

/* We alone read the files: a worker, also a later one, has what we have accepted. */
static void reload(struct supervisor *s)
{
	struct exl3_config_args args;
	char text[EXL3_SUP_TEXT_MAX];
	struct exl3_config fresh;
	struct exl3_error err;

	if (exl3_config_read(s->argc, s->argv, &fresh, &args, &err) < 0) {
		exl3_err("reload: %s; nothing was changed", err.text);
		return;
	}
	exl3_config_reload(s->cfg, &fresh);
	exl3_log_set_level(exl3_config_log_level(s->cfg));
	/* New models are loaded; those that are no longer named stay until they are unloaded. */
	for (size_t i = 0; i < fresh.nr_models; i++) {
		if (has_model(s->cfg, fresh.models[i].name))
			continue;
		model_spec(s, &fresh.models[i], text);
		if (exl3_config_add_model(s->cfg, text, true, &err) < 0)
			exl3_err("reload: %s", err.text);
	}
	if (!s->worker || !tell_reload(s, &fresh))
		exl3_warn("reload: no worker listens now; the next one has the new values");
	exl3_config_fini(&fresh);
}

static void on_signals(struct supervisor *s)
{
	struct signalfd_siginfo info;

	while (read(s->signal_fd, &info, sizeof(info)) == sizeof(info)) {
		switch (info.ssi_signo) {
		case SIGCHLD:
			reap(s);
			break;
		case SIGHUP:
			reload(s);
			break;
		default:
			drain(s, (int)info.ssi_signo);
			break;
		}
	}
}

static void on_worker_message(struct supervisor *s, const struct exl3_sup_msg *msg)
{
	struct exl3_error err;

	switch (msg->type) {
	case EXL3_SUP_READY:
		if (s->state == STARTING)
			s->state = RUNNING;
		sd_notify(0, "READY=1");
		break;
	case EXL3_SUP_STATUS:
		sd_notifyf(0, "STATUS=%s", msg->text);
		break;
	case EXL3_SUP_BEAT:
		sd_notify(0, "WATCHDOG=1");
		break;
	case EXL3_SUP_ADDED:
		if (exl3_config_add_model(s->cfg, msg->text, true, &err) < 0)
			exl3_warn("it will not be there after a restart: %s", err.text);
		break;
	case EXL3_SUP_REMOVED:
		exl3_config_remove_model(s->cfg, msg->text);
		break;
	default:
		break;
	}
}

static void on_control(struct supervisor *s)
{
	struct exl3_sup_msg msg;
	ssize_t n;

	while (s->control_fd >= 0) {
		n = recv(s->control_fd, &msg, sizeof(msg), MSG_DONTWAIT);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			return;
		if (n <= (ssize_t)offsetof(struct exl3_sup_msg, text)) {
			exl3_closep(&s->control_fd); /* SIGCHLD follows */
			return;
		}
		((char *)&msg)[n - 1] = 0;
		on_worker_message(s, &msg);
	}
}

static void on_due(struct supervisor *s)
{
	struct exl3_error err;

	if (s->state == DRAINING) {
		exl3_warn("the worker did not drain in time and is killed");
		kill(s->worker, SIGKILL);
		s->due_ns += KILL_AFTER_NS;
		return;
	}
	exl3_info("restarting the worker (%u of %llu)", s->restarts,
		  (unsigned long long)s->cfg->restart_limit);
	if (start_worker(s, &err) < 0) {
		exl3_err("%s", err.text);
		back_off(s);
	}
}

static void supervise(struct supervisor *s)
{
	while (!s->end) {
		struct pollfd fds[2] = {{.fd = s->signal_fd, .events = POLLIN},
					{.fd = s->control_fd, .events = POLLIN}};
		bool timed = s->state == BACKOFF || s->state == DRAINING;
		uint64_t now = exl3_now_ns();
		int timeout = -1;

		if (timed)
			timeout = s->due_ns <= now ? 0 : (int)((s->due_ns - now) / 1000000 + 1);
		if (poll(fds, 2, timeout) < 0 && errno != EINTR)
			break;
		/* Messages first: a worker that ended may have left some. */
		if (fds[1].revents)
			on_control(s);
		if (fds[0].revents)
			on_signals(s);
		if (timed && !s->end && (s->state == BACKOFF || s->state == DRAINING) &&
		    exl3_now_ns() >= s->due_ns)
			on_due(s);
	}
}

int exl3_supervisor_main(struct exl3_config *cfg, int argc, char *const argv[])
{
	struct supervisor s = {
		.cfg = cfg, .argc = argc, .argv = argv, .signal_fd = -1, .control_fd = -1};
	uint64_t watchdog_us = 0;
	struct exl3_error err;
	sigset_t mask;

	if (exl3_listener_open(cfg->socket, &s.listener, &err) < 0) {
		exl3_err("%s", err.text);
		return 1;
	}
	if (getrandom(&s.instance, sizeof(s.instance), 0) != sizeof(s.instance))
		s.instance = exl3_now_ns();
	if (sd_watchdog_enabled(0, &watchdog_us) > 0)
		s.watchdog_ns = watchdog_us * 1000;
	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&mask);
	sigaddset(&mask, SIGCHLD);
	sigaddset(&mask, SIGTERM);
	sigaddset(&mask, SIGINT);
	sigaddset(&mask, SIGHUP);
	sigprocmask(SIG_BLOCK, &mask, &s.old_mask);
	s.signal_fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
	s.window_start_ns = exl3_now_ns();
	if (s.signal_fd < 0) {
		exl3_err("signalfd: %m");
		s.status = 1;
	} else if (start_worker(&s, &err) < 0) {
		exl3_err("%s", err.text);
		s.status = 1;
	} else {
		supervise(&s);
	}
	exl3_listener_close(&s.listener);
	exl3_closep(&s.control_fd);
	exl3_closep(&s.signal_fd);
	return s.status;
}
