/* SPDX-License-Identifier: Apache-2.0 */
/* domain.c - a fault domain: some users' worker through all its generations, and the clients that wait. */
#include "daemon/domain_priv.h"

#include "daemon/fault.h"
#include "daemon/log.h"
#include "proto/exl3.pb-c.h"
#include "proto/frame.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define BACKOFF_MIN_NS 10000000ull
#define BACKOFF_MAX_NS 5000000000ull
#define KILL_AFTER_NS  5000000000ull /* what a draining worker has beyond its drain-timeout */
#define REST_NS        100000000ull  /* until the next try to hand on a client */
#define OUT_MAX        4096u         /* messages that a worker may leave unread */
#define MESSAGES_MAX   64            /* of one worker per turn of the loop */
#define STARTING_TIMES 4             /* hang-timeout until a worker's loop must turn; a driver may take long */

/* Exit status, unlike 1 for what a new start would meet again: systemd's unit tells them apart. */
#define GAVE_UP 3

/* A message that did not fit into the socket yet. */
struct exl3_domain_packet {
	struct exl3_domain_packet *next;
	int fds[EXL3_FDS_MAX]; /* owned */
	unsigned nr_fds;
	size_t bytes;
	_Alignas(struct exl3_sup_msg) char data[];
};

struct exl3_domain_client {
	struct exl3_domain_client *next;
	int fd; /* owned */
	bool greeted;
	char name[64]; /* with the next: see exl3_domain_connected() */
	uint64_t id;
	uint64_t since_ns;
};

const char *exl3_domain_label(const struct exl3_domain *d)
{
	static char text[2][EXL3_DOMAIN_NAME_MAX + 16];
	static unsigned turn;

	if (d->all->nr <= 1)
		return "";
	snprintf(text[turn %= 2], sizeof(text[0]), "domain %s: ", d->name);
	return text[turn++];
}

static void set_state(struct exl3_domain *d, enum exl3_domain_state state)
{
	d->state = state;
	d->all->changed(d);
}

/* ---- events ---- */

void exl3_domain_event(struct exl3_domain *d, const char *kind, const char *fmt, ...)
{
	char text[EXL3_EVENT_TEXT_MAX], line[EXL3_EVENT_LINE_MAX];
	const struct exl3_event *e;
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	e = exl3_events_add(&d->all->events, d->name, d->generation, kind, "%s", text);
	exl3_event_format(e, line);
	for (uint32_t i = 0; i < d->all->nr; i++)
		exl3_domain_tell(&d->all->list[i], EXL3_SUP_EVENT, 0, line);
}

/* ---- clients that wait ---- */

void exl3_domains_refuse(const struct exl3_domains *all, int fd, int code, const char *fmt, ...)
{
	Exl3__Reply reply = EXL3__REPLY__INIT;
	uint8_t packet[EXL3_ERROR_TEXT_MAX + 64];
	char text[EXL3_ERROR_TEXT_MAX];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	/* Id 0: it answers no request; those are not read here. */
	reply.code = code;
	reply.error = text;
	reply.instance = all->instance;
	if (exl3__reply__get_packed_size(&reply) <= sizeof(packet))
		exl3_frame_send(fd, packet, exl3__reply__pack(&reply, packet), NULL, 0,
				EXL3_FRAME_NOWAIT, NULL);
	exl3_log_limited(EXL3_LOG_WARN, "a client was turned away: %s", text);
	exl3_loop_close(all->loop, &fd);
}

static void waiting_refuse(struct exl3_domain *d, int code, const char *why)
{
	struct exl3_domain_client *c = d->waiting;

	d->waiting = c->next;
	if (!d->waiting)
		d->waiting_tail = &d->waiting;
	d->nr_waiting--;
	exl3_domains_refuse(d->all, c->fd, code, "%s%s", exl3_domain_label(d), why);
	free(c);
}

static void waiting_refuse_all(struct exl3_domain *d)
{
	while (d->waiting) {
		if (d->state == EXL3_DOMAIN_FAILED)
			waiting_refuse(d, -EHOSTDOWN,
				       "its worker died too often and is not started any more; the "
				       "daemon's log says why");
		else
			waiting_refuse(d, -ESHUTDOWN, "the daemon is draining");
	}
}

static void set_patience(struct exl3_domain *d)
{
	if (d->waiting)
		exl3_timer_set(d->all->loop, &d->patience,
			       d->waiting->since_ns + EXL3_WAITING_NS);
	else
		exl3_timer_cancel(d->all->loop, &d->patience);
}

/* 0, or why the first one has to wait on. */
static int hand_on(struct exl3_domain *d)
{
	struct exl3_domain_client *c = d->waiting;
	struct exl3_sup_msg msg = {.type = EXL3_SUP_CLIENT,
				   .flags = c->greeted ? EXL3_SUP_GREETED : 0,
				   .request_id = c->id};
	int rc = exl3_fault("domain.hand_on")
			 ? -EAGAIN
			 : exl3_sup_send(d->control_fd, &msg, c->name, &c->fd, 1, false);

	if (rc < 0)
		return rc;
	d->waiting = c->next;
	if (!d->waiting)
		d->waiting_tail = &d->waiting;
	d->nr_waiting--;
	/* Ours may be the last close, if the worker was quick: never here, see exl3_loop_close(). */
	exl3_loop_close(d->all->loop, &c->fd);
	free(c);
	return 0;
}

static void packet_free(struct exl3_domain *d, struct exl3_domain_packet *p)
{
	for (unsigned i = 0; i < p->nr_fds; i++)
		exl3_loop_close(d->all->loop, &p->fds[i]);
	free(p);
}

static void out_drop(struct exl3_domain *d)
{
	struct exl3_domain_packet *p;

	while ((p = d->out)) {
		d->out = p->next;
		packet_free(d, p);
	}
	d->out_tail = &d->out;
	d->nr_out = 0;
}

/* Sends what the worker's socket takes, messages first, then clients if it takes any. */
static void flush(struct exl3_domain *d)
{
	struct exl3_domain_packet *p;
	int rc = 0;

	set_patience(d);
	if (d->control_fd < 0)
		return;
	while (rc == 0 && (p = d->out)) {
		rc = exl3_frame_send(d->control_fd, p->data, p->bytes, p->fds, p->nr_fds,
				     EXL3_FRAME_NOWAIT, NULL);
		if (rc < 0)
			break;
		d->out = p->next;
		if (!d->out)
			d->out_tail = &d->out;
		d->nr_out--;
		packet_free(d, p);
	}
	while (rc == 0 && d->waiting && d->state == EXL3_DOMAIN_SERVING)
		rc = hand_on(d);
	set_patience(d);
	if (rc == -ETOOMANYREFS || rc == -ENOBUFS || rc == -ENOMEM)
		exl3_timer_set(d->all->loop, &d->patience, exl3_now_ns() + REST_NS);
	else if (rc < 0 && rc != -EAGAIN)
		out_drop(d); /* its end is seen by SIGCHLD */
	exl3_watch_set(d->all->loop, d->watch, rc == -EAGAIN ? POLLIN | POLLOUT : POLLIN);
}

static void on_patience(void *arg)
{
	struct exl3_domain *d = arg;
	uint64_t now = exl3_now_ns();

	while (d->waiting && now - d->waiting->since_ns >= EXL3_WAITING_NS)
		waiting_refuse(d, -EAGAIN,
			       "no worker has taken the connection for a while: try again later; "
			       "the daemon's log says why");
	flush(d);
}

void exl3_domain_connected(struct exl3_domain *d, int fd, uint64_t id, const char *name)
{
	struct exl3_domain_client *c;

	if (d->state == EXL3_DOMAIN_FAILED || d->state == EXL3_DOMAIN_ENDED) {
		exl3_domains_refuse(
			d->all, fd, d->state == EXL3_DOMAIN_FAILED ? -EHOSTDOWN : -ESHUTDOWN,
			"%s%s", exl3_domain_label(d),
			d->state == EXL3_DOMAIN_FAILED
				? "its worker died too often and is not started any more; the "
				  "daemon's log says why"
				: "the daemon is draining");
		return;
	}
	if (d->nr_waiting >= EXL3_WAITING_MAX) {
		exl3_domains_refuse(d->all, fd, -EAGAIN,
				    "%s%u clients wait for its worker already: try again later",
				    exl3_domain_label(d), d->nr_waiting);
		return;
	}
	c = exl3_fault("domain.client") ? NULL : malloc(sizeof(*c));
	if (!c) {
		exl3_domains_refuse(d->all, fd, -ENOMEM, "out of memory");
		return;
	}
	*c = (struct exl3_domain_client){
		.fd = fd, .greeted = name != NULL, .id = id, .since_ns = exl3_now_ns()};
	snprintf(c->name, sizeof(c->name), "%s", name ? name : "");
	*d->waiting_tail = c;
	d->waiting_tail = &c->next;
	d->nr_waiting++;
	flush(d);
}

/* ---- messages ---- */

bool exl3_domain_tell(struct exl3_domain *d, enum exl3_sup_type type, unsigned flags,
		      const char *text)
{
	return exl3_domain_send(d, type, flags, 0, text, NULL, 0);
}

/* Without memory for a packet that could wait: somebody may wait for this answer. */
static bool send_now(struct exl3_domain *d, enum exl3_sup_type type, unsigned flags, uint64_t id,
		     const char *text, const int *fds, unsigned nr_fds)
{
	static struct exl3_sup_msg msg; /* loop thread only */

	if (d->out)
		return false; /* it would overtake */
	memset(&msg, 0, offsetof(struct exl3_sup_msg, text));
	msg.type = type;
	msg.flags = flags;
	msg.generation = d->generation;
	msg.pid = getpid();
	msg.instance = d->all->instance;
	msg.id = id;
	msg.interval_ns = d->all->beat_ns;
	return exl3_sup_send(d->control_fd, &msg, text, fds, nr_fds, false) == 0;
}

bool exl3_domain_send(struct exl3_domain *d, enum exl3_sup_type type, unsigned flags, uint64_t id,
		      const char *text, const int *fds, unsigned nr_fds)
{
	const size_t head = offsetof(struct exl3_sup_msg, text);
	size_t len = strlen(text ? text : "");
	struct exl3_domain_packet *p;
	struct exl3_sup_msg *msg;

	if (d->control_fd < 0 || d->nr_out >= OUT_MAX)
		return false;
	if (len >= EXL3_SUP_TEXT_MAX)
		len = EXL3_SUP_TEXT_MAX - 1;
	p = calloc(1, sizeof(*p) + head + len + 1);
	if (!p)
		return send_now(d, type, flags, id, text, fds, nr_fds);
	p->bytes = head + len + 1;
	msg = (struct exl3_sup_msg *)(void *)p->data;
	msg->type = type;
	msg->flags = flags;
	msg->generation = d->generation;
	msg->pid = getpid();
	msg->instance = d->all->instance;
	msg->id = id;
	msg->interval_ns = d->all->beat_ns;
	memcpy(p->data + head, text ? text : "", len);
	for (; p->nr_fds < nr_fds; p->nr_fds++) {
		p->fds[p->nr_fds] = fcntl(fds[p->nr_fds], F_DUPFD_CLOEXEC, 3);
		if (p->fds[p->nr_fds] < 0) {
			packet_free(d, p);
			return false;
		}
	}
	*d->out_tail = p;
	d->out_tail = &p->next;
	d->nr_out++;
	flush(d);
	return true;
}

void exl3_domains_model_spec(const struct exl3_domains *all, const struct exl3_config_model *m,
			     char text[EXL3_SUP_TEXT_MAX])
{
	exl3_config_model_spec(text, EXL3_SUP_TEXT_MAX, m->name, m->path, m->device_tensors,
			       m->device          ? m->device
			       : all->cfg->device ? all->cfg->device
						  : "0");
}

static void hear_all(struct exl3_domain *d, bool all);

static void hang_up(struct exl3_domain *d)
{
	d->watch = exl3_watch_drop(d->all->loop, d->watch);
	exl3_closep(&d->control_fd);
	out_drop(d);
}

/* How long the worker may say nothing; 0: for ever. While it starts it says nothing at all. */
static uint64_t silence_ns(const struct exl3_domain *d)
{
	uint64_t ns = d->all->cfg->hang_timeout_s * 1000000000u;

	return d->state == EXL3_DOMAIN_STARTING ? STARTING_TIMES * ns : ns;
}

static void listen_for(struct exl3_domain *d)
{
	if (d->worker && silence_ns(d))
		exl3_timer_set(d->all->loop, &d->silence, d->heard_ns + silence_ns(d));
	else
		exl3_timer_cancel(d->all->loop, &d->silence);
}

static void on_silence(void *arg)
{
	struct exl3_domain *d = arg;
	uint64_t now = exl3_now_ns();

	if (!d->worker)
		return;
	/* What it has said may not have been read yet. */
	if (now - d->heard_ns >= silence_ns(d))
		hear_all(d, true);
	if (now - d->heard_ns >= silence_ns(d) && now >= d->heard_ns) {
		snprintf(d->reason, sizeof(d->reason),
			 "its loop has not turned for %llu s (hang-timeout)",
			 (unsigned long long)(silence_ns(d) / 1000000000u));
		exl3_err("%sworker %d hangs: %s; it is killed", exl3_domain_label(d), (int)d->worker,
			 d->reason);
		/* A driver may wait for an MPS server for ever: not twice. */
		if (d->state == EXL3_DOMAIN_STARTING && exl3_mps_pipe(&d->mps))
			exl3_domain_mps_refused(d);
		kill(d->worker, SIGKILL);
		d->heard_ns = now; /* once more, should it not go */
	}
	listen_for(d);
}

static void hear(struct exl3_domain *d, const struct exl3_sup_msg *msg, int *fds, unsigned nr_fds)
{
	d->heard_ns = exl3_now_ns();
	if (msg->type == EXL3_SUP_OPEN && d->state == EXL3_DOMAIN_STARTING) {
		set_state(d, EXL3_DOMAIN_SERVING);
		listen_for(d);
		flush(d);
	} else if (msg->type == EXL3_SUP_READY) {
		d->ready = true;
		exl3_domain_event(d, "ready", "worker %d has its models", (int)d->worker);
	} else if (msg->type == EXL3_SUP_REASON) {
		snprintf(d->reason, sizeof(d->reason), "%.255s", msg->text);
	} else if (msg->type == EXL3_SUP_STATUS) {
		snprintf(d->says, sizeof(d->says), "%.255s", msg->text);
	}
	d->all->message(d, msg, fds, nr_fds);
}

/* @all: the worker has ended, nothing else will come. */
static void hear_all(struct exl3_domain *d, bool all)
{
	static struct exl3_sup_msg msg; /* one thread */
	int fds[EXL3_FDS_MAX], rc;
	unsigned nr_fds;

	for (int i = 0; (all || i < MESSAGES_MAX) && d->control_fd >= 0; i++) {
		rc = exl3_sup_recv(d->control_fd, &msg, fds, &nr_fds, false);
		if (rc == 0)
			return;
		if (rc == -ECONNRESET) {
			hang_up(d); /* SIGCHLD follows */
			return;
		}
		hear(d, &msg, fds, nr_fds);
	}
}

static void on_control(void *arg, uint32_t events)
{
	struct exl3_domain *d = arg;

	if (events & ~(uint32_t)POLLOUT)
		hear_all(d, false);
	if (events & POLLOUT)
		flush(d);
}

/* ---- start ---- */

/* In the child: only one descriptor goes on. */
static void become_worker(const struct exl3_domain *d, int control, pid_t supervisor)
{
	/* No flags and no files: the configuration comes from the supervisor, see greet(). */
	char *const argv[] = {(char *)(uintptr_t)d->all->program, (char *)"--worker", (char *)"3",
			      NULL};
	int high = fcntl(control, F_DUPFD, 16);

	if (high < 0 || dup2(high, EXL3_WORKER_CONTROL_FD) < 0)
		_exit(1);
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != supervisor)
		_exit(1);
	close_range(EXL3_WORKER_CONTROL_FD + 1, ~0u, 0);
	unsetenv("NOTIFY_SOCKET"); /* the supervisor alone speaks to systemd */
	unsetenv("WATCHDOG_USEC");
	unsetenv("WATCHDOG_PID");
	/* libgomp reads this when it is loaded. Its own default keeps an idle team spinning for
	 * milliseconds, on cores that clients could use. */
	setenv("GOMP_SPINCOUNT", "2000", 0);
	if (exl3_mps_pipe(&d->mps)) {
		char log[EXL3_MPS_DIR_MAX + 8];

		exl3_mps_log_dir(exl3_mps_pipe(&d->mps), log);
		setenv("CUDA_MPS_PIPE_DIRECTORY", exl3_mps_pipe(&d->mps), 1);
		setenv("CUDA_MPS_LOG_DIRECTORY", log, 1);
	}
	sigprocmask(SIG_SETMASK, d->all->worker_mask, NULL);
	/* Not by name: an upgrade may have put another version there, which the fds are not meant for. */
	execv("/proc/self/exe", argv);
	_exit(1);
}

static void greet(struct exl3_domain *d)
{
	const struct exl3_config *cfg = d->all->cfg;
	char text[EXL3_SUP_TEXT_MAX];

	exl3_domain_tell(d, EXL3_SUP_HELLO, 0, d->name);
	for (const struct exl3_event *e = exl3_events_from(&d->all->events, 0); e;
	     e = exl3_events_from(&d->all->events, e->id + 1)) {
		exl3_event_format(e, text);
		exl3_domain_tell(d, EXL3_SUP_EVENT, 0, text);
	}
	for (size_t i = 0; exl3_config_setting(cfg, &i, text, sizeof(text));)
		exl3_domain_tell(d, EXL3_SUP_KEY, 0, text);
	for (size_t i = 0; i < cfg->nr_models; i++) {
		exl3_domains_model_spec(d->all, &cfg->models[i], text);
		exl3_domain_tell(d, EXL3_SUP_MODEL,
				 cfg->models[i].by_client ? EXL3_SUP_BY_CLIENT : 0, text);
	}
	if (exl3_mps_pipe(&d->mps))
		exl3_domain_tell(d, EXL3_SUP_MPS, 0, exl3_mps_pipe(&d->mps));
	exl3_domain_tell(d, EXL3_SUP_GO, 0, NULL);
}

int exl3_domain_start_worker(struct exl3_domain *d, struct exl3_error *err)
{
	pid_t supervisor = getpid(), pid;
	int pair[2], rc;

	if (exl3_fault("domain.start") || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return exl3_errf(err, -errno, "socketpair: %m");
	rc = exl3_watch_add(d->all->loop, pair[0], POLLIN, EXL3_WATCH_LEVEL, on_control, d,
			    &d->watch);
	pid = rc < 0 ? -1 : fork();
	if (pid < 0) {
		rc = rc < 0 ? exl3_errf(err, rc, "worker: out of memory")
			    : exl3_errf(err, -errno, "fork: %m");
		d->watch = exl3_watch_drop(d->all->loop, d->watch);
		close(pair[0]);
		close(pair[1]);
		return rc;
	}
	if (pid == 0)
		become_worker(d, pair[1], supervisor);
	close(pair[1]);
	d->control_fd = pair[0];
	d->worker = pid;
	d->generation++;
	d->heard_ns = exl3_now_ns();
	d->reason[0] = 0;
	listen_for(d);
	greet(d);
	exl3_domain_event(d, "started", "worker %d", (int)pid);
	return 0;
}

int exl3_domain_start(struct exl3_domain *d, struct exl3_error *err)
{
	int rc;

	set_state(d, EXL3_DOMAIN_STARTING);
	rc = exl3_domain_mps_start(d, err);
	return rc == 0 ? exl3_domain_start_worker(d, err) : rc < 0 ? rc : 0;
}

/* ---- the worker's end ---- */

void exl3_domain_back_off(struct exl3_domain *d)
{
	const struct exl3_config *cfg = d->all->cfg;
	uint64_t now = exl3_now_ns(), delay = BACKOFF_MIN_NS;

	if (now - d->window_start_ns > cfg->restart_window_s * 1000000000u) {
		d->window_start_ns = now;
		d->restarts = 0;
	}
	if (d->restarts >= cfg->restart_limit) {
		exl3_err("%sthe worker died %u times within %llu s: giving up", exl3_domain_label(d),
			 d->restarts + 1, (unsigned long long)cfg->restart_window_s);
		exl3_domain_event(d, "given-up", "its worker died %u times within %llu s",
				  d->restarts + 1, (unsigned long long)cfg->restart_window_s);
		d->status = GAVE_UP;
		set_state(d, EXL3_DOMAIN_FAILED);
		waiting_refuse_all(d);
		set_patience(d);
		return;
	}
	for (uint32_t i = 0; i < d->restarts && delay < BACKOFF_MAX_NS; i++)
		delay *= 4;
	d->restarts++;
	exl3_timer_set(d->all->loop, &d->timer,
		       now + (delay < BACKOFF_MAX_NS ? delay : BACKOFF_MAX_NS));
	snprintf(d->says, sizeof(d->says), "worker died, restarting (%u of %llu)", d->restarts,
		 (unsigned long long)cfg->restart_limit);
	set_state(d, EXL3_DOMAIN_BACKOFF);
}

static void end(struct exl3_domain *d, int status)
{
	d->status = status;
	exl3_timer_cancel(d->all->loop, &d->timer);
	exl3_mps_stop(&d->mps);
	set_state(d, EXL3_DOMAIN_ENDED);
	waiting_refuse_all(d);
	set_patience(d);
}

/* For the log and the events. */
static void tell_end(struct exl3_domain *d, pid_t pid, int wstatus)
{
	char how[96];

	if (WIFSIGNALED(wstatus))
		snprintf(how, sizeof(how), "was killed by signal %d (%s)", WTERMSIG(wstatus),
			 strsignal(WTERMSIG(wstatus)));
	else
		snprintf(how, sizeof(how), "ended with status %d", WEXITSTATUS(wstatus));
	if (!WIFEXITED(wstatus) || (WEXITSTATUS(wstatus) && WEXITSTATUS(wstatus) != EXL3_WORKER_REFUSED))
		exl3_err("%sworker %d %s%s%s", exl3_domain_label(d), (int)pid, how, d->reason[0] ? ": " : "",
			 d->reason);
	exl3_domain_event(d, WIFEXITED(wstatus) && !WEXITSTATUS(wstatus) ? "ended" : "died",
			  "worker %d %s%s%s", (int)pid, how, d->reason[0] ? ": " : "", d->reason);
}

/* Whatever the worker died of may have ended the contexts of all clients of its MPS server. */
static void next_generation(struct exl3_domain *d, bool no_mps)
{
	struct exl3_error err;

	exl3_mps_retire(&d->mps);
	if (!no_mps || !exl3_domain_mps_refused(d)) {
		if (no_mps && d->generation == 1)
			end(d, 1); /* the worker has said why */
		else
			exl3_domain_back_off(d);
		return;
	}
	d->generation--; /* that one never was */
	if (exl3_domain_start(d, &err) < 0) {
		exl3_err("%s%s", exl3_domain_label(d), err.text);
		exl3_domain_back_off(d);
	}
}

void exl3_domain_ended(struct exl3_domain *d, int wstatus)
{
	pid_t pid = d->worker;

	hear_all(d, true); /* its last words */
	hang_up(d);
	d->worker = 0;
	exl3_timer_cancel(d->all->loop, &d->timer);
	exl3_timer_cancel(d->all->loop, &d->silence);
	tell_end(d, pid, wstatus);
	if (WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == 0)
		end(d, 0); /* drained */
	else if (WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == EXL3_WORKER_REFUSED)
		end(d, 1); /* the worker has said why */
	else if (d->draining)
		end(d, 1);
	else
		next_generation(d, WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == EXL3_WORKER_NO_MPS);
}

static void on_due(void *arg)
{
	struct exl3_domain *d = arg;
	struct exl3_error err;

	if (d->worker) {
		exl3_warn("%sthe worker did not drain in time and is killed", exl3_domain_label(d));
		kill(d->worker, SIGKILL);
		exl3_timer_set(d->all->loop, &d->timer, exl3_now_ns() + KILL_AFTER_NS);
		return;
	}
	exl3_info("%srestarting the worker (%u of %llu)", exl3_domain_label(d), d->restarts,
		  (unsigned long long)d->all->cfg->restart_limit);
	if (exl3_domain_start(d, &err) < 0) {
		exl3_err("%s%s", exl3_domain_label(d), err.text);
		exl3_domain_back_off(d);
	}
}

void exl3_domain_drain(struct exl3_domain *d)
{
	if (d->draining && d->worker) {
		exl3_warn("%sto be ended again: the worker is killed", exl3_domain_label(d));
		kill(d->worker, SIGKILL);
		return;
	}
	d->draining = true;
	if (d->state == EXL3_DOMAIN_ENDED)
		return;
	if (!d->worker) {
		end(d, 0);
		return;
	}
	exl3_timer_set(d->all->loop, &d->timer,
		       exl3_now_ns() + d->all->cfg->drain_timeout_s * 1000000000u + KILL_AFTER_NS);
	exl3_domain_tell(d, EXL3_SUP_DRAIN, 0, NULL);
}

void exl3_domain_leave(struct exl3_domain *d)
{
	d->draining = true;
	if (!d->worker) {
		end(d, 0);
		return;
	}
	exl3_timer_set(d->all->loop, &d->timer,
		       exl3_now_ns() + EXL3_LEAVE_NS +
			       d->all->cfg->drain_timeout_s * 1000000000u + KILL_AFTER_NS);
	exl3_domain_tell(d, EXL3_SUP_LEAVE, 0, NULL);
}

void exl3_domain_retry(struct exl3_domain *d)
{
	struct exl3_error err;

	if (d->state != EXL3_DOMAIN_FAILED || d->draining)
		return;
	exl3_info("%strying again", exl3_domain_label(d));
	d->restarts = 0;
	d->mps_failed_ns = 0;
	d->window_start_ns = exl3_now_ns();
	if (exl3_domain_start(d, &err) < 0) {
		exl3_err("%s%s", exl3_domain_label(d), err.text);
		exl3_domain_back_off(d);
	}
}

void exl3_domain_init(struct exl3_domain *d, struct exl3_domains *all, const char *name)
{
	*d = (struct exl3_domain){.all = all, .control_fd = -1};
	snprintf(d->name, sizeof(d->name), "%s", name);
	d->out_tail = &d->out;
	d->waiting_tail = &d->waiting;
	d->window_start_ns = exl3_now_ns();
	d->timer.fn = on_due;
	d->timer.arg = d;
	d->patience.fn = on_patience;
	d->patience.arg = d;
	d->silence.fn = on_silence;
	d->silence.arg = d;
}

void exl3_domain_fini(struct exl3_domain *d)
{
	waiting_refuse_all(d);
	exl3_timer_cancel(d->all->loop, &d->timer);
	exl3_timer_cancel(d->all->loop, &d->patience);
	exl3_timer_cancel(d->all->loop, &d->silence);
	exl3_mps_fini(&d->mps);
	hang_up(d);
}
