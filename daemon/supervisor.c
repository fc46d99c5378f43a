/* SPDX-License-Identifier: Apache-2.0 */
/*
 * supervisor.c - owns the listening socket, hands each client to its fault domain, keeps the domains'
 * workers alive and their models the same.
 *
 * No CUDA, no threads, and nothing here waits for a worker or a client.
 */
#include "daemon/supervisor.h"

#include "daemon/admin.h"
#include "daemon/domain.h"
#include "daemon/driver.h"
#include "daemon/listen.h"
#include "daemon/log.h"
#include "daemon/share.h"
#include "daemon/takeover.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#define ACCEPTS_PER_TURN 16
#define LISTEN_REST_NS   100000000ull
#define TAKEOVER_REST_NS 50000000ull
#define GROUPS_MAX       65536u /* of one process, NGROUPS_MAX of the kernel */

struct supervisor {
	struct exl3_config *cfg; /* the one that was accepted last */
	int argc;
	char *const *argv;
	struct exl3_listener listener;
	struct exl3_loop *loop;
	int signal_fd, spare_fd; /* owned */
	struct exl3_watch *signal_watch, *listen_watch;
	struct exl3_timer listen_timer, beat;
	struct exl3_domains all;
	struct exl3_domain domains[EXL3_DOMAINS_MAX]; /* "default", then as in cfg->domains at the start */
	uint32_t nr_domains;
	struct exl3_share share;
	struct exl3_driver driver;
	struct exl3_admin *admin; /* owned; NULL: none, or not yet */
	int takeover_sock;        /* owned; to the daemon whose place we take; -1: none */
	struct exl3_timer takeover_timer;
	bool listening, handed_over;
	uint64_t watchdog_ns;
	sigset_t old_mask;
	int status;
	bool draining, end;
};

/* ---- systemd ---- */

static void tell_systemd_status(const struct supervisor *s)
{
	char text[1024];
	size_t len = 0;

	for (uint32_t i = 0; i < s->nr_domains; i++) {
		const struct exl3_domain *d = &s->domains[i];

		if (!d->says[0] || len >= sizeof(text))
			continue;
		len += (size_t)snprintf(text + len, sizeof(text) - len, "%s%s%s%s",
					len ? "; " : "", s->all.nr > 1 ? d->name : "",
					s->all.nr > 1 ? ": " : "", d->says);
	}
	if (len)
		sd_notifyf(0, "STATUS=%s", text);
}

/* ---- from one daemon to the next ---- */

static bool may_hand_over(void *arg);
static void hand_over(void *arg);

static bool leaving(void *arg)
{
	const struct supervisor *s = arg;

	return s->draining || s->handed_over;
}

static void open_admin(struct supervisor *s)
{
	const struct exl3_admin_ops ops = {.may_hand_over = may_hand_over,
					   .hand_over = hand_over,
					   .leaving = leaving,
					   .arg = s};
	struct exl3_error err;

	if (exl3_admin_new(s->loop, &s->listener, &s->share, &ops, &s->admin, &err) < 0)
		exl3_warn("no admin socket: %s; 'exl3ctl fds' and --takeover will not work", err.text);
}

static void listen_now(struct supervisor *s)
{
	s->listening = true;
	exl3_watch_set(s->loop, s->listen_watch, POLLIN);
	open_admin(s);
}

/* Our workers have their models: clients are ours as soon as the other daemon lets us. */
static void take_over(struct supervisor *s)
{
	if (!exl3_takeover_ready(s->takeover_sock)) {
		exl3_timer_set(s->loop, &s->takeover_timer, exl3_now_ns() + TAKEOVER_REST_NS);
		return;
	}
	/* Clients first: if we die before it hears of us, the other daemon still has them and its paths. */
	s->listening = true;
	exl3_watch_set(s->loop, s->listen_watch, POLLIN);
	exl3_takeover_serving(s->takeover_sock);
	exl3_closep(&s->takeover_sock);
	exl3_info("taken over from the other daemon");
	open_admin(s);
}

/* No clients wait for a worker of ours: they could only be turned away. */
static bool nobody_waits(const struct supervisor *s)
{
	for (uint32_t i = 0; i < s->nr_domains; i++) {
		const struct exl3_domain *d = &s->domains[i];

		if (d->nr_waiting ||
		    (d->state != EXL3_DOMAIN_SERVING && d->state != EXL3_DOMAIN_FAILED))
			return false;
	}
	return true;
}

static bool may_hand_over(void *arg)
{
	const struct supervisor *s = arg;

	return !s->draining && nobody_waits(s);
}

static void leave(struct supervisor *s)
{
	if (s->draining)
		return; /* somebody else was faster */
	if (!nobody_waits(s)) {
		exl3_timer_set(s->loop, &s->takeover_timer, exl3_now_ns() + TAKEOVER_REST_NS);
		return;
	}
	s->draining = true;
	for (uint32_t i = 0; i < s->nr_domains; i++)
		exl3_domain_leave(&s->domains[i]);
}

/* The other daemon accepts clients. Those that we have accepted meanwhile may still wait for a worker. */
static void hand_over(void *arg)
{
	struct supervisor *s = arg;

	exl3_info("another daemon has taken over: leaving");
	exl3_watch_set(s->loop, s->listen_watch, 0);
	exl3_timer_cancel(s->loop, &s->listen_timer);
	s->listening = false;
	s->handed_over = true;
	leave(s);
}

static void on_takeover(void *arg)
{
	struct supervisor *s = arg;

	if (s->handed_over)
		leave(s);
	else
		take_over(s);
}

/* Once every domain has had its models, or will not have them. */
static void check_ready(struct supervisor *s)
{
	for (uint32_t i = 0; i < s->nr_domains; i++) {
		if (!s->domains[i].ready && s->domains[i].state != EXL3_DOMAIN_FAILED)
			return;
	}
	sd_notify(0, "READY=1");
	if (s->takeover_sock >= 0)
		take_over(s);
}

/* A domain whose worker is away is on its way back; one whose worker serves must say something now and then. */
static void on_beat(void *arg)
{
	struct supervisor *s = arg;
	uint64_t now = exl3_now_ns();
	bool well = true;

	for (uint32_t i = 0; i < s->nr_domains; i++) {
		const struct exl3_domain *d = &s->domains[i];

		if (d->state == EXL3_DOMAIN_SERVING && now - d->heard_ns > s->watchdog_ns / 2)
			well = false;
	}
	if (well)
		sd_notify(0, "WATCHDOG=1");
	exl3_timer_set(s->loop, &s->beat, now + s->watchdog_ns / 4);
}

/* ---- models: every domain has the same ---- */

static struct exl3_config_model *find_model(const struct supervisor *s, const char *name)
{
	for (size_t i = 0; i < s->cfg->nr_models; i++) {
		if (strcmp(s->cfg->models[i].name, name) == 0)
			return &s->cfg->models[i];
	}
	return NULL;
}

static void tell_others(struct supervisor *s, const struct exl3_domain *from,
			enum exl3_sup_type type, const char *text)
{
	for (uint32_t i = 0; i < s->nr_domains; i++) {
		if (&s->domains[i] != from)
			exl3_domain_tell(&s->domains[i], type, 0, text);
	}
}

static void model_added(struct supervisor *s, const struct exl3_domain *d, const char *spec)
{
	exl3_auto(exl3_freep) char *name = strndup(spec, strcspn(spec, "="));
	struct exl3_config_model *m;
	struct exl3_error err;

	if (exl3_config_add_model(s->cfg, spec, true, &err) < 0) {
		exl3_warn("it will not be there after a restart: %s", err.text);
		return;
	}
	m = name ? find_model(s, name) : NULL;
	if (m)
		m->asked = d;
}

/* The domain that was asked has it: now the others, which need not read the files if they can take over its
 * weights. */
static void model_loaded(struct supervisor *s, const struct exl3_domain *d, const char *name)
{
	struct exl3_config_model *m = find_model(s, name);
	char text[EXL3_SUP_TEXT_MAX];

	if (!m || m->asked != d)
		return;
	m->asked = NULL;
	exl3_domains_model_spec(&s->all, m, text);
	tell_others(s, d, EXL3_SUP_LOAD, text);
}

/* Not to be tried again; unless others have it. */
static void model_failed(struct supervisor *s, struct exl3_domain *d, const char *name)
{
	const struct exl3_config_model *m = find_model(s, name);

	if (!m)
		return;
	if (m->asked == d || s->all.nr <= 1)
		exl3_config_remove_model(s->cfg, name);
	else
		exl3_domain_event(d, "model", "model %s could not be loaded here", name);
}

/* ---- end ---- */

static void check_end(struct supervisor *s)
{
	bool failed = true;

	for (uint32_t i = 0; i < s->nr_domains; i++) {
		const struct exl3_domain *d = &s->domains[i];

		if (d->state != EXL3_DOMAIN_ENDED && d->state != EXL3_DOMAIN_FAILED)
			return;
		failed &= d->state == EXL3_DOMAIN_FAILED;
		if (d->status && !s->status && d->state == EXL3_DOMAIN_ENDED)
			s->status = d->status;
	}
	for (uint32_t i = 0; i < s->nr_domains; i++)
		exl3_mps_stop(&s->domains[i].mps);
	for (uint32_t i = 0; i < s->nr_domains; i++) {
		if (exl3_mps_busy(&s->domains[i].mps))
			return; /* the end of each brings us back here */
	}
	if (failed)
		s->status = s->domains[0].status;
	s->end = true;
}

static void drain(struct supervisor *s)
{
	if (!s->draining)
		sd_notify(0, "STOPPING=1\nSTATUS=draining");
	s->draining = true;
	for (uint32_t i = 0; i < s->nr_domains; i++)
		exl3_domain_drain(&s->domains[i]);
	check_end(s);
}

/* ---- what domains report ---- */

static void on_changed(struct exl3_domain *d)
{
	struct supervisor *s = d->all->arg;

	if (d->state == EXL3_DOMAIN_ENDED && !s->draining)
		drain(s); /* its worker was told to end, or cannot serve as configured */
	if (d->state == EXL3_DOMAIN_FAILED)
		check_ready(s);
	if (d->state == EXL3_DOMAIN_ENDED || d->state == EXL3_DOMAIN_FAILED)
		check_end(s);
	else if (d->state == EXL3_DOMAIN_BACKOFF)
		tell_systemd_status(s);
}

/* A worker that an administrator has reached says that he wants another one. */
static void pass_on(struct supervisor *s, const struct exl3_sup_msg *msg, int fd)
{
	size_t len = strcspn(msg->text, "\n");
	const char *name = msg->text + len + (msg->text[len] == '\n');

	for (uint32_t i = 0; i < s->nr_domains; i++) {
		struct exl3_domain *d = &s->domains[i];

		if (strlen(d->name) == len && memcmp(d->name, msg->text, len) == 0) {
			exl3_domain_connected(d, fd, msg->request_id, name);
			return;
		}
	}
	exl3_domains_refuse(&s->all, fd, -ENOENT, "there is no fault domain '%.*s': see 'exl3ctl domains'",
			    (int)len, msg->text);
}

static void on_message(struct exl3_domain *d, const struct exl3_sup_msg *msg, int *fds,
		       unsigned nr_fds)
{
	struct supervisor *s = d->all->arg;

	if (exl3_share_message(&s->share, d, msg, fds, nr_fds))
		nr_fds = msg->type == EXL3_SUP_KEEP ? 0 : nr_fds;
	switch (msg->type) {
	case EXL3_SUP_READY:
		check_ready(s);
		break;
	case EXL3_SUP_STATUS:
		tell_systemd_status(s);
		break;
	case EXL3_SUP_ADDED:
		model_added(s, d, msg->text);
		break;
	case EXL3_SUP_LOADED:
		model_loaded(s, d, msg->text);
		break;
	case EXL3_SUP_FAILED:
		model_failed(s, d, msg->text);
		break;
	case EXL3_SUP_REMOVED:
	case EXL3_SUP_LEAVING:
		exl3_config_remove_model(s->cfg, msg->text);
		exl3_share_removed(&s->share, msg->text);
		tell_others(s, d, msg->type == EXL3_SUP_LEAVING ? EXL3_SUP_LEAVING : EXL3_SUP_UNLOAD, msg->text);
		break;
	case EXL3_SUP_REVOKE:
		tell_others(s, d, EXL3_SUP_REVOKE, msg->text);
		break;
	case EXL3_SUP_PASS:
		if (nr_fds == 1)
			pass_on(s, msg, exl3_take_fd(&fds[0]));
		break;
	case EXL3_SUP_DRAINING:
		if (!s->draining) {
			exl3_info("a client asks for the end: draining");
			drain(s);
		}
		break;
	default:
		break;
	}
	for (unsigned i = 0; i < nr_fds; i++)
		exl3_loop_close(s->loop, &fds[i]);
}

/* ---- signals ---- */

static void reap(struct supervisor *s)
{
	int wstatus;
	pid_t pid;

	while ((pid = waitpid(-1, &wstatus, WNOHANG)) > 0) {
		for (uint32_t i = 0; i < s->nr_domains; i++) {
			if (s->domains[i].worker != pid)
				continue;
			exl3_domain_ended(&s->domains[i], wstatus);
			exl3_share_ended(&s->share, &s->domains[i]);
			break;
		}
		for (uint32_t i = 0; i < s->nr_domains; i++) {
			if (exl3_domain_mps_ended(&s->domains[i], pid, wstatus)) {
				check_end(s);
				break;
			}
		}
	}
}

/* The worker takes all of it or, if it does not hear the end, nothing. It knows which models are new. */
static void tell_reload(struct supervisor *s, struct exl3_domain *d,
			const struct exl3_config *fresh)
{
	char text[EXL3_SUP_TEXT_MAX];
	bool heard = exl3_domain_tell(d, EXL3_SUP_RELOAD, 0, NULL);

	for (size_t i = 0; heard && exl3_config_setting(s->cfg, &i, text, sizeof(text));)
		heard = exl3_domain_tell(d, EXL3_SUP_KEY, 0, text);
	for (size_t i = 0; heard && i < fresh->nr_models; i++) {
		exl3_domains_model_spec(&s->all, &fresh->models[i], text);
		heard = exl3_domain_tell(d, EXL3_SUP_MODEL, EXL3_SUP_BY_CLIENT, text);
	}
	if (!heard || !exl3_domain_tell(d, EXL3_SUP_GO, 0, NULL))
		exl3_warn("reload: no worker listens now; the next one has the new values");
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
	if (!exl3_config_reload_domains(s->cfg, &fresh))
		exl3_warn("the domains of the configuration are others: needs a restart of the "
			  "daemon");
	for (uint32_t i = 0; i < s->nr_domains; i++)
		exl3_mps_protect(&s->domains[i].mps);
	/* New models are loaded; those that are no longer named stay until they are unloaded. */
	for (size_t i = 0; i < fresh.nr_models; i++) {
		if (find_model(s, fresh.models[i].name))
			continue;
		exl3_domains_model_spec(&s->all, &fresh.models[i], text);
		if (exl3_config_add_model(s->cfg, text, true, &err) < 0)
			exl3_err("reload: %s", err.text);
	}
	for (uint32_t i = 0; i < s->nr_domains; i++) {
		if (s->domains[i].state == EXL3_DOMAIN_FAILED)
			exl3_domain_retry(&s->domains[i]);
		else
			tell_reload(s, &s->domains[i], &fresh);
	}
	exl3_config_fini(&fresh);
}

static void on_signals(void *arg, uint32_t events)
{
	struct supervisor *s = arg;
	struct signalfd_siginfo info;

	(void)events;
	while (read(s->signal_fd, &info, sizeof(info)) == sizeof(info)) {
		switch (info.ssi_signo) {
		case SIGCHLD:
			reap(s);
			break;
		case SIGHUP:
			reload(s);
			break;
		default:
			exl3_info("%s: draining", strsignal((int)info.ssi_signo));
			drain(s);
			break;
		}
	}
}

/* ---- clients ---- */

/* The domain of whoever was at the other end when it connected. */
static struct exl3_domain *domain_of(struct supervisor *s, int fd)
{
	static uint32_t gids[GROUPS_MAX + 1];
	socklen_t len = sizeof(struct ucred);
	struct ucred cred;
	size_t nr = 0;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		return &s->domains[0]; /* the worker will say so */
	if (s->cfg->nr_domains) {
		gids[nr++] = cred.gid;
		len = sizeof(gids) - sizeof(gids[0]);
		if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, gids + nr, &len) == 0)
			nr += len / sizeof(gids[0]);
	}
	nr = exl3_config_domain_of(s->cfg, cred.uid, gids, nr);
	/* The configuration may name them in another order by now. */
	for (uint32_t i = 1; nr && i < s->nr_domains; i++) {
		if (strcmp(s->domains[i].name, s->cfg->domains[nr - 1].name) == 0)
			return &s->domains[i];
	}
	return &s->domains[0];
}

static void rest_from_listening(struct supervisor *s)
{
	exl3_watch_set(s->loop, s->listen_watch, 0);
	exl3_timer_set(s->loop, &s->listen_timer, exl3_now_ns() + LISTEN_REST_NS);
}

static void on_listen_again(void *arg)
{
	struct supervisor *s = arg;

	if (s->spare_fd < 0)
		s->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	exl3_watch_set(s->loop, s->listen_watch, POLLIN);
}

/* Out of descriptors: the spare one lets us take the client off the queue and turn it away, or the
 * listening socket would stay ready for ever. */
static void turn_away(struct supervisor *s)
{
	int fd;

	exl3_closep(&s->spare_fd);
	fd = accept4(s->listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd >= 0)
		exl3_domains_refuse(&s->all, fd, -EMFILE, "no file descriptors left");
}

static void on_listen(void *arg, uint32_t events)
{
	struct supervisor *s = arg;

	(void)events;
	for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
		int fd = accept4(s->listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
			continue;
		if (fd < 0) {
			if (errno == EAGAIN || errno == EWOULDBLOCK)
				return;
			if (errno == EMFILE || errno == ENFILE)
				turn_away(s);
			rest_from_listening(s);
			return;
		}
		exl3_domain_connected(domain_of(s, fd), fd, 0, NULL);
	}
}

/* ---- start ---- */

static void raise_fd_limit(void)
{
	struct rlimit lim;

	if (getrlimit(RLIMIT_NOFILE, &lim) == 0 && lim.rlim_cur < lim.rlim_max) {
		lim.rlim_cur = lim.rlim_max;
		setrlimit(RLIMIT_NOFILE, &lim);
	}
}

static int catch_signals(struct supervisor *s, struct exl3_error *err)
{
	sigset_t mask;

	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&mask);
	sigaddset(&mask, SIGCHLD);
	sigaddset(&mask, SIGTERM);
	sigaddset(&mask, SIGINT);
	sigaddset(&mask, SIGHUP);
	sigprocmask(SIG_BLOCK, &mask, &s->old_mask);
	s->signal_fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
	return s->signal_fd < 0 ? exl3_errf(err, -errno, "signalfd: %m") : 0;
}

static int start(struct supervisor *s, bool takeover, struct exl3_error *err)
{
	uint64_t watchdog_us = 0;
	int rc = catch_signals(s, err);

	if (rc == 0)
		rc = exl3_loop_new(&s->loop, err);
	if (rc < 0)
		return rc;
	raise_fd_limit();
	s->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (getrandom(&s->all.instance, sizeof(s->all.instance), 0) != sizeof(s->all.instance))
		s->all.instance = exl3_now_ns();
	if (sd_watchdog_enabled(0, &watchdog_us) > 0)
		s->watchdog_ns = watchdog_us * 1000;
	s->all.loop = s->loop;
	s->all.cfg = s->cfg;
	s->all.program = s->argv[0];
	s->all.worker_mask = &s->old_mask;
	s->all.beat_ns = s->cfg->hang_timeout_s * 1000000000u / 4;
	if (s->watchdog_ns && (!s->all.beat_ns || s->all.beat_ns > s->watchdog_ns / 4))
		s->all.beat_ns = s->watchdog_ns / 4;
	s->all.list = s->domains;
	s->all.message = on_message;
	s->all.changed = on_changed;
	s->all.arg = s;
	s->listen_timer.fn = on_listen_again;
	s->beat.fn = on_beat;
	s->listen_timer.arg = s->beat.arg = s->takeover_timer.arg = s;
	s->takeover_timer.fn = on_takeover;
	exl3_share_init(&s->share, s->cfg, s->domains, &s->nr_domains, s->loop);
	exl3_keep_inherit(&s->share.keep);
	rc = takeover ? exl3_takeover_fetch(s->cfg, &s->share.keep, &s->listener,
					    &s->takeover_sock, err)
		      : exl3_listener_open(s->cfg->socket, &s->listener, err);
	if (rc < 0)
		return rc;
	exl3_keep_settle(&s->share.keep, s->cfg);
	exl3_domain_init(&s->domains[s->nr_domains++], &s->all, EXL3_DOMAIN_DEFAULT);
	for (size_t i = 0; i < s->cfg->nr_domains; i++)
		exl3_domain_init(&s->domains[s->nr_domains++], &s->all, s->cfg->domains[i].name);
	s->all.nr = s->nr_domains;
	if (exl3_watch_add(s->loop, s->signal_fd, POLLIN, EXL3_WATCH_LEVEL, on_signals, s,
			   &s->signal_watch) < 0 ||
	    exl3_watch_add(s->loop, s->listener.fd, 0, EXL3_WATCH_LEVEL, on_listen, s,
			   &s->listen_watch) < 0)
		return exl3_errf(err, -ENOMEM, "supervisor: out of memory");
	rc = exl3_domains_mps_init(&s->all, err);
	if (s->takeover_sock < 0)
		listen_now(s);
	for (uint32_t i = 0; rc == 0 && i < s->nr_domains; i++)
		rc = exl3_domain_start(&s->domains[i], err);
	if (strcmp(s->cfg->backend, "cpu") != 0)
		exl3_driver_hold(&s->driver, "/dev");
	if (s->watchdog_ns)
		exl3_timer_set(s->loop, &s->beat, exl3_now_ns() + s->watchdog_ns / 4);
	return rc;
}

static void finish(struct supervisor *s)
{
	/* A socket that we have handed over or are about to, or have not been given yet, is another daemon's:
	 * its paths stay. */
	bool others = s->handed_over || s->takeover_sock >= 0 || exl3_admin_hands_over(s->admin);

	for (uint32_t i = 0; i < s->nr_domains; i++) {
		if (s->domains[i].worker) /* only if the start has failed */
			kill(s->domains[i].worker, SIGKILL);
		exl3_domain_fini(&s->domains[i]);
	}
	exl3_domains_mps_fini(&s->all);
	s->listener.inherited |= others;
	if (s->loop) {
		s->admin = exl3_admin_free(s->admin, !others);
		exl3_timer_cancel(s->loop, &s->takeover_timer);
		exl3_timer_cancel(s->loop, &s->listen_timer);
		exl3_timer_cancel(s->loop, &s->beat);
		s->signal_watch = exl3_watch_drop(s->loop, s->signal_watch);
		s->listen_watch = exl3_watch_drop(s->loop, s->listen_watch);
	}
	exl3_listener_close(&s->listener);
	exl3_share_fini(&s->share);
	s->loop = exl3_loop_free(s->loop);
	exl3_driver_release(&s->driver);
	exl3_closep(&s->takeover_sock);
	exl3_closep(&s->signal_fd);
	exl3_closep(&s->spare_fd);
}

int exl3_supervisor_main(struct exl3_config *cfg, int argc, char *const argv[], bool takeover)
{
	static struct supervisor supervisor; /* one per process */
	struct supervisor *s = &supervisor;
	struct exl3_error err;

	s->cfg = cfg;
	s->argc = argc;
	s->argv = argv;
	s->signal_fd = s->spare_fd = s->takeover_sock = -1;
	s->listener.fd = s->listener.lock_fd = -1;
	if (start(s, takeover, &err) < 0) {
		exl3_err("%s", err.text);
		s->status = 1;
		s->end = true;
	}
	while (!s->end) {
		if (!exl3_loop_poll(s->loop, exl3_now_ns()))
			exl3_loop_wait(s->loop, UINT64_MAX);
	}
	finish(s);
	return s->status;
}
