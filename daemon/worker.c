/* SPDX-License-Identifier: Apache-2.0 */
/* worker.c - the process that serves: one loop, its devices, all clients; started by the supervisor. */
#include "daemon/worker.h"

#include "daemon/calibrate.h"
#include "daemon/control.h"
#include "daemon/fault.h"
#include "daemon/kernel_table.h"
#include "daemon/log.h"
#include "daemon/mapper.h"
#include "daemon/numa.h"
#include "daemon/peer.h"
#include "shm/cuda_state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define MESSAGES_PER_TURN 16  /* of the supervisor, then clients get their turn */
#define RELAX             4  /* pauses between two looks of a spinning loop */

/* ---- supervisor ---- */

void exl3_worker_tell(struct exl3_worker *w, enum exl3_sup_type type, const char *text)
{
	struct exl3_sup_msg msg = {.type = type, .generation = w->generation};
	/* A supervisor that is busy loses a status line or a beat, never the worker's time. What changes its
	 * mind must arrive; it reads all the time. */
	bool wait = type != EXL3_SUP_STATUS && type != EXL3_SUP_BEAT;
	int rc = exl3_sup_send(w->control_fd, &msg, text, NULL, 0, wait);

	if (rc < 0 && rc != -EAGAIN)
		exl3_dbg("supervisor: %s", strerror(-rc));
}

void exl3_worker_keep_model(struct exl3_worker *w, const struct exl3_registered *reg)
{
	char spec[EXL3_SUP_TEXT_MAX];

	exl3_config_model_spec(spec, sizeof(spec), reg->name, reg->path, reg->model->device_tensors,
			       reg->device->spec);
	exl3_worker_tell(w, EXL3_SUP_ADDED, spec);
}

static void tell_status(struct exl3_worker *w)
{
	uint64_t weights = 0;
	uint32_t ready = 0;
	char text[192];

	for (struct exl3_registered *reg = w->models.list; reg; reg = reg->next) {
		if (reg->state != EXL3_MODEL_READY)
			continue;
		ready++;
		weights += reg->model->weight_bytes;
	}
	snprintf(text, sizeof(text), "%s on %s: %u model%s ready, %u loading, %.1f MiB of weights",
		 w->draining ? "draining"
		 : w->ready  ? "serving"
			     : "starting",
		 w->devices.list[0].name, ready, ready == 1 ? "" : "s", w->models.nr_loading,
		 (double)weights / 1048576.0);
	exl3_worker_tell(w, EXL3_SUP_STATUS, text);
}

static void check_ready(struct exl3_worker *w)
{
	if (!w->ready && !w->models.nr_loading && !w->stop) {
		w->ready = true;
		exl3_worker_tell(w, EXL3_SUP_READY, NULL);
		exl3_info("worker %d serves on %s, domain %s, generation %u", (int)getpid(),
			  w->cfg->socket, w->domain, w->generation);
	}
	tell_status(w);
}

static void on_model(void *arg, struct exl3_registered *reg, enum exl3_models_event event)
{
	struct exl3_worker *w = arg;

	exl3_worker_metrics_model(w, reg, event);
	exl3_worker_tell_way(w, reg, event);
	if (event == EXL3_MODELS_REFUSED || event == EXL3_MODELS_STALE)
		return;
	if (event == EXL3_MODELS_FAILED && reg->at_start && w->generation == 1 && !w->ready) {
		/* Whoever started us asked for this model: no service without it. */
		w->status = EXL3_WORKER_REFUSED;
		w->stop = true;
	} else if (event == EXL3_MODELS_FAILED && !reg->at_start) {
		exl3_worker_tell(w, EXL3_SUP_FAILED, reg->name); /* not to be tried again */
	} else if (event == EXL3_MODELS_LOADED && !reg->at_start) {
		exl3_worker_tell(w, EXL3_SUP_LOADED, reg->name);
	}
	exl3_control_model_event(w, reg, event);
	check_ready(w);
}

static void on_drain_timeout(void *arg)
{
	struct exl3_worker *w = arg;

	exl3_warn("drain: requests were still running after %llu s, leaving",
		  (unsigned long long)w->cfg->drain_timeout_s);
	w->stop = true;
}

void exl3_worker_drain(struct exl3_worker *w, const char *why)
{
	if (w->draining)
		return;
	exl3_info("draining (%s)", why);
	w->draining = true;
	if (w->leaving)
		exl3_dispatch_leave(w->dispatch);
	else
		exl3_dispatch_drain(w->dispatch);
	exl3_timer_set(w->loop, &w->drain_timer,
		       exl3_now_ns() + w->cfg->drain_timeout_s * 1000000000u);
	tell_status(w);
}

static void on_leave(void *arg)
{
	exl3_worker_drain(arg, "another daemon serves from now on");
}

static void on_beat(void *arg)
{
	struct exl3_worker *w = arg;

	exl3_worker_tell(w, EXL3_SUP_BEAT, NULL);
	exl3_timer_set(w->loop, &w->beat, exl3_now_ns() + w->beat_ns);
}

/* ---- reload ---- */

static void drop_fresh(struct exl3_worker *w)
{
	if (w->fresh)
		exl3_config_fini(w->fresh);
	free(w->fresh);
	w->fresh = NULL;
}

static void reload_policy(struct exl3_worker *w)
{
	struct exl3_peer *next;
	struct exl3_error err;

	if (exl3_policy_apply(&w->policy, w->cfg, exl3_now_ns(), &err) < 0) {
		exl3_err("reload: %s; the policy is as before", err.text);
		return;
	}
	for (struct exl3_peer *peer = w->peers; peer; peer = next) {
		next = peer->next;
		exl3_peer_reconsider(peer);
	}
}

/* Where spinning keeps the processor from the work, stream calls get no more of it than others. */
static void set_ready(struct exl3_worker *w)
{
	uint64_t spin_us = w->cfg->ready_spin_us;

	if (sysconf(_SC_NPROCESSORS_ONLN) < 4 && spin_us > w->cfg->spin_us)
		spin_us = w->cfg->spin_us;
	exl3_dispatch_set_ready(w->dispatch, spin_us * 1000, w->cfg->ready_timeout_s * 1000000000);
}

/* Each device's section of the file. What cannot be used is as if it were not there: another choice is slower, not
 * wrong. */
static void set_tables(struct exl3_worker *w)
{
	const char *path = w->cfg->kernel_table;

	for (uint32_t i = 0; i < w->devices.nr; i++) {
		const struct exl3_device *d = &w->devices.list[i];
		struct exl3_table_device_info who;
		struct exl3_tuned *table = NULL;
		struct exl3_error err;

		if (!path || strcmp(path, "none") == 0) {
			exl3_dispatch_set_tuned(w->dispatch, i, NULL);
			continue;
		}
		exl3_table_device(d, &who);
		if (exl3_kernel_table_read(path, &who.is, &table, &err) < 0) {
			exl3_err("kernel table: %s; %s", err.text,
				 exl3_dispatch_tuned(w->dispatch, i) ? "the one before still counts"
								      : "kernels are chosen without it");
			continue;
		}
		if (!table) {
			exl3_warn("kernel table: %s; on %s kernels are chosen without it", err.text, d->name);
		} else {
			exl3_info("kernel table %s: %u lines for %s", path, table->nr, d->name);
			exl3_kernel_table_check(table, d);
		}
		exl3_dispatch_set_tuned(w->dispatch, i, table);
		exl3_tuned_put(table);
	}
}

static void reload_go(struct exl3_worker *w)
{
	const struct exl3_device *device;
	struct exl3_registered *reg;
	struct exl3_error err;

	exl3_config_reload(w->cfg, w->fresh);
	exl3_log_set_level(exl3_config_log_level(w->cfg));
	exl3_dispatch_set_spin(w->dispatch, w->cfg->spin_us * 1000);
	exl3_dispatch_set_trains(w->dispatch, !strcmp(w->cfg->trains, "auto"));
	exl3_dispatch_set_slack(w->dispatch, w->cfg->launch_timeout_s * 1000000000u);
	exl3_dispatch_set_chunk(w->dispatch, w->cfg->chunk_us * 1000);
	reload_policy(w);
	set_ready(w);
	set_tables(w);
	for (size_t i = 0; i < w->fresh->nr_models && !w->draining; i++) {
		const struct exl3_config_model *m = &w->fresh->models[i];

		reg = exl3_models_find(&w->models, m->name);
		if (reg && reg->state != EXL3_MODEL_FAILED)
			continue;
		device = exl3_devices_find(&w->devices, m->device, &err);
		if (!device ||
		    exl3_models_load(&w->models, m->name, m->path, device, m->device_tensors, false, &reg,
				     &err) < 0) {
			exl3_err("reload: %s", err.text);
			exl3_worker_tell(w, EXL3_SUP_FAILED, m->name);
		} else {
			exl3_worker_keep_model(w, reg);
		}
	}
	drop_fresh(w);
	exl3_info("configuration read again");
}

/* One step of it. */
static void reload(struct exl3_worker *w, const struct exl3_sup_msg *msg)
{
	struct exl3_error err = {0};
	int rc = 0;

	if (msg->type == EXL3_SUP_RELOAD) {
		drop_fresh(w); /* one that was broken off */
		w->fresh = calloc(1, sizeof(*w->fresh));
		if (!w->fresh)
			exl3_err("reload: out of memory; nothing was changed");
		return;
	}
	if (!w->fresh)
		return;
	if (msg->type == EXL3_SUP_GO) {
		reload_go(w);
		return;
	}
	if (msg->type == EXL3_SUP_KEY)
		rc = exl3_config_set(w->fresh, msg->text, &err);
	else if (msg->type == EXL3_SUP_MODEL)
		rc = exl3_config_add_model(w->fresh, msg->text, true, &err);
	if (rc < 0) {
		exl3_err("reload: %s; nothing was changed", err.text);
		drop_fresh(w);
	}
}

/* ---- clients and models that the supervisor hands on ---- */

static void take_client(struct exl3_worker *w, const struct exl3_sup_msg *msg, int fd)
{
	struct exl3_error err;

	if (exl3_peer_new(w, fd, &err) < 0) {
		exl3_log_limited(EXL3_LOG_WARN, "%s", err.text);
		exl3_loop_close(w->loop, &fd);
	} else if (msg->flags & EXL3_SUP_GREETED) {
		exl3_control_greet(w->peers, msg->request_id, msg->text);
	}
}

int exl3_worker_pass(struct exl3_worker *w, int fd, const char *domain, uint64_t id,
		     const char *name)
{
	struct exl3_sup_msg msg = {.type = EXL3_SUP_PASS,
				   .generation = w->generation,
				   .request_id = id};
	char text[EXL3_DOMAIN_NAME_MAX + 128];

	snprintf(text, sizeof(text), "%.*s\n%.63s", (int)EXL3_DOMAIN_NAME_MAX, domain, name);
	return exl3_sup_send(w->control_fd, &msg, text, &fd, 1, true);
}

/* Another domain has loaded it, so that all have the same models. */
static void follow_load(struct exl3_worker *w, const char *spec)
{
	struct exl3_config one = {0};
	struct exl3_registered *reg;
	struct exl3_error err;
	int rc = exl3_config_add_model(&one, spec, true, &err);

	if (rc == 0) {
		reg = exl3_models_find(&w->models, one.models[0].name);
		if (!w->draining && (!reg || reg->state == EXL3_MODEL_FAILED)) {
			const struct exl3_device *device =
				exl3_devices_find(&w->devices, one.models[0].device, &err);

			rc = device ? exl3_models_load(&w->models, one.models[0].name,
						       one.models[0].path, device,
						       one.models[0].device_tensors, false, &reg, &err)
				    : err.code;
		} else if (reg && strcmp(reg->path, one.models[0].path) != 0) {
			exl3_warn("model %s: this domain has loaded it from %s, another one from %s",
				  reg->name, reg->path, one.models[0].path);
		}
	}
	if (rc < 0)
		exl3_err("%s", err.text);
	exl3_config_fini(&one);
}

static void follow_unload(struct exl3_worker *w, const char *name, uint32_t how)
{
	struct exl3_registered *reg = how == EXL3_SUP_REVOKE ? exl3_models_find_leaving(&w->models, name)
							     : exl3_models_find(&w->models, name);

	if (reg && how == EXL3_SUP_LEAVING)
		exl3_models_unload_patiently(reg);
	else if (reg)
		exl3_models_unload(reg);
}

static void take_event(struct exl3_worker *w, const char *line)
{
	struct exl3_event event;

	if (exl3_event_parse(line, &event) < 0 || exl3_events_put(&w->events, &event) < 0)
		exl3_dbg("not an event: %s", line);
}

static void on_message(struct exl3_worker *w, const struct exl3_sup_msg *msg, int *fds,
		       unsigned nr_fds)
{
	switch (msg->type) {
	case EXL3_SUP_CLIENT:
		if (nr_fds == 1)
			take_client(w, msg, exl3_take_fd(&fds[0]));
		else
			exl3_log_limited(EXL3_LOG_WARN,
					 "a client was turned away: no file descriptors left");
		break;
	case EXL3_SUP_KEPT:
		exl3_worker_take_kept(w, msg, fds, nr_fds);
		break;
	case EXL3_SUP_ALONE:
		exl3_models_answer(&w->models, msg->text, NULL, 0);
		break;
	case EXL3_SUP_LOAD:
		follow_load(w, msg->text);
		break;
	case EXL3_SUP_UNLOAD:
	case EXL3_SUP_LEAVING:
	case EXL3_SUP_REVOKE:
		follow_unload(w, msg->text, msg->type);
		break;
	case EXL3_SUP_EVENT:
		take_event(w, msg->text);
		break;
	case EXL3_SUP_LEAVE:
		w->leaving = true;
		exl3_timer_set(w->loop, &w->leave_timer, exl3_now_ns() + EXL3_LEAVE_NS);
		break;
	case EXL3_SUP_DRAIN:
		exl3_worker_drain(w, "asked by the supervisor");
		break;
	default:
		reload(w, msg);
		break;
	}
	for (unsigned i = 0; i < nr_fds; i++)
		exl3_loop_close(w->loop, &fds[i]);
}

static void on_control(void *arg, uint32_t events)
{
	static struct exl3_sup_msg msg; /* loop thread only */
	struct exl3_worker *w = arg;
	int fds[EXL3_FDS_MAX], rc = 0;
	unsigned nr_fds;

	(void)events;
	for (int i = 0; i < MESSAGES_PER_TURN; i++) {
		rc = exl3_sup_recv(w->control_fd, &msg, fds, &nr_fds, false);
		if (rc == 0 || rc == -ECONNRESET)
			break;
		on_message(w, &msg, fds, nr_fds);
	}
	if (rc == -ECONNRESET) {
		exl3_err("the supervisor is gone, leaving");
		w->status = 1;
		w->stop = true;
	}
}

static void on_signal(void *arg, uint32_t events)
{
	struct exl3_worker *w = arg;
	struct signalfd_siginfo info;

	(void)events;
	while (read(w->signal_fd, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo == SIGTERM)
			exl3_worker_drain(w, "SIGTERM");
	}
}

/* ---- start ---- */

static void backend_line(struct exl3_worker *w, const char *name, const char *what)
{
	if (w->nr_backends < sizeof(w->backends) / sizeof(w->backends[0]))
		snprintf(w->backends[w->nr_backends++], sizeof(w->backends[0]), "%s: %.300s", name,
			 what);
}

static void probe_backends(struct exl3_worker *w)
{
	const char *missing = exl3_backend_plugin_error(); /* looks for the plugin first */
	struct exl3_error err;

	for (size_t i = 0; exl3_backends[i]; i++) {
		int n;

		exl3_errf(&err, 0, "no device");
		n = exl3_backends[i]->probe(&err);
		if (n > 0)
			exl3_errf(&err, 0, "%d device%s", n, n == 1 ? "" : "s");
		backend_line(w, exl3_backends[i]->name, err.text);
	}
	if (missing)
		backend_line(w, "cuda", missing);
}

static void raise_fd_limit(void)
{
	struct rlimit lim;

	if (getrlimit(RLIMIT_NOFILE, &lim) == 0 && lim.rlim_cur < lim.rlim_max) {
		lim.rlim_cur = lim.rlim_max;
		setrlimit(RLIMIT_NOFILE, &lim);
	}
}

/* SIGINT of a terminal reaches us too: the supervisor decides what it means. */
static int block_signals(struct exl3_error *err)
{
	sigset_t all, ours;
	int fd;

	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&all);
	sigaddset(&all, SIGTERM);
	sigaddset(&all, SIGINT);
	sigaddset(&all, SIGHUP);
	sigprocmask(SIG_BLOCK, &all, NULL);
	sigemptyset(&ours);
	sigaddset(&ours, SIGTERM);
	fd = signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK);
	return fd < 0 ? exl3_errf(err, -errno, "signalfd: %m") : fd;
}

/* What the supervisor says first. */
static int meet_supervisor(struct exl3_worker *w, struct exl3_error *err)
{
	int fds[EXL3_FDS_MAX], rc;
	struct exl3_sup_msg msg;
	unsigned nr_fds;

	/* Not the files: they may have been edited since, and nobody has asked for that to count. */
	while (exl3_sup_recv(w->control_fd, &msg, fds, &nr_fds, true) > 0) {
		for (unsigned i = 0; i < nr_fds; i++)
			exl3_closep(&fds[i]);
		rc = 0;
		switch (msg.type) {
		case EXL3_SUP_HELLO:
			w->instance = msg.instance;
			w->generation = msg.generation;
			w->supervisor = msg.pid;
			w->beat_ns = msg.interval_ns;
			snprintf(w->domain, sizeof(w->domain), "%.*s", (int)EXL3_DOMAIN_NAME_MAX,
				 msg.text);
			break;
		case EXL3_SUP_EVENT:
			take_event(w, msg.text);
			break;
		case EXL3_SUP_MPS:
			snprintf(w->mps_pipe, sizeof(w->mps_pipe), "%.*s",
				 (int)sizeof(w->mps_pipe) - 1, msg.text);
			break;
		case EXL3_SUP_KEY:
			rc = exl3_config_set(w->cfg, msg.text, err);
			break;
		case EXL3_SUP_MODEL:
			rc = exl3_config_add_model(w->cfg, msg.text, msg.flags & EXL3_SUP_BY_CLIENT,
						   err);
			break;
		case EXL3_SUP_GO:
			exl3_log_set_level(exl3_config_log_level(w->cfg));
			return 0;
		default:
			break;
		}
		if (rc < 0)
			return rc;
	}
	return exl3_errf(err, -EPIPE, "the supervisor went away during the start");
}

static int start_loads(struct exl3_worker *w, struct exl3_error *err)
{
	for (size_t i = 0; i < w->cfg->nr_models; i++) {
		const struct exl3_config_model *m = &w->cfg->models[i];
		const struct exl3_device *device = exl3_devices_find(&w->devices, m->device, err);
		struct exl3_registered *reg;
		int rc = device ? exl3_models_load(&w->models, m->name, m->path, device,
						   m->device_tensors, !m->by_client, &reg, err)
				: err->code;

		if (rc < 0 && !m->by_client)
			return rc;
		if (rc < 0)
			exl3_err("%s", err->text);
	}
	return 0;
}

static void on_device_lost(void *arg, uint32_t device)
{
	struct exl3_worker *w = arg;

	exl3_dispatch_fail(w->dispatch, device);
}

/* Devices are open, or could not be opened: is it as the supervisor wants it? */
static int check_mps(struct exl3_worker *w, int rc, struct exl3_error *err)
{
	if (!w->mps_pipe[0]) {
		/* One that the administrator runs: clients are told of it too. */
		const char *theirs = getenv("CUDA_MPS_PIPE_DIRECTORY");

		if (rc == 0 && theirs && strlen(theirs) < sizeof(w->mps_pipe) &&
		    exl3_cuda_in_mps() == 1)
			strcpy(w->mps_pipe, theirs);
		return rc;
	}
	if (rc == 0 && exl3_cuda_in_mps() != 0)
		return 0; /* -1: nothing here that MPS is for, or a driver that cannot tell */
	w->status = EXL3_WORKER_NO_MPS;
	if (rc < 0)
		return exl3_err_prefix(err, "in an MPS server");
	return exl3_errf(err, -ENOTCONN,
			 "MPS: the driver has left the server in %s aside; its log is there too",
			 w->mps_pipe);
}

static int worker_init(struct exl3_worker *w, struct exl3_error *err)
{
	struct exl3_dispatch_options opt;
	int rc;

	w->signal_fd = block_signals(err);
	if (w->signal_fd < 0)
		return w->signal_fd;
	rc = meet_supervisor(w, err);
	if (rc == 0)
		rc = exl3_numa_bind((int)w->cfg->node, err);
	if (rc < 0)
		return rc;
	raise_fd_limit();
	if (exl3_fault("worker.start"))
		pause(); /* as a driver may */
	probe_backends(w);
	rc = check_mps(w, exl3_devices_open(&w->devices, w->cfg, err), err);
	if (rc == 0)
		rc = exl3_loop_new(&w->loop, err);
	if (rc == 0)
		rc = exl3_jobs_new(w->loop, "exl3-load", &w->loads, err);
	if (rc == 0)
		rc = exl3_jobs_new(w->loop, "exl3-memory", &w->memory, err);
	if (rc < 0)
		return rc;
	opt = (struct exl3_dispatch_options){
		.loop = w->loop,
		.buffer_free = exl3_buffer_free,
		.arg = w,
		.queue_depth = (uint32_t)w->cfg->queue_depth,
		.merge_max = (uint32_t)w->cfg->merge_max,
		.trains = !strcmp(w->cfg->trains, "auto"),
		.spin_ns = w->cfg->spin_us * 1000,
		.chunk_ns = w->cfg->chunk_us * 1000,
		.slack_ns = w->cfg->launch_timeout_s * 1000000000u,
		.deterministic = w->cfg->deterministic,
		.metrics = &w->metrics,
	};
	rc = exl3_dispatch_new(&opt, &w->dispatch, err);
	for (uint32_t i = 0; i < w->devices.nr && rc == 0; i++) {
		const struct exl3_device *d = &w->devices.list[i];
		/* On few processors a loop that spins keeps the CPU backend's threads from theirs. */
		bool spin = strcmp(d->ops->name, "cpu") != 0 || sysconf(_SC_NPROCESSORS_ONLN) >= 4;

		rc = exl3_dispatch_add_device(w->dispatch, d->ops, d->dev, spin, err);
	}
	if (rc < 0)
		return rc;
	exl3_worker_metrics_start(w);
	rc = exl3_policy_apply(&w->policy, w->cfg, exl3_now_ns(), err);
	if (rc < 0)
		return rc;
	set_ready(w);
	set_tables(w);
	exl3_models_init(&w->models, w->loop, w->loads);
	w->models.event = on_model;
	w->models.want = exl3_worker_want_kept;
	w->models.revoke = exl3_mappers_revoke_model;
	w->models.instance = w->instance;
	w->models.generation = w->generation;
	w->models.arg = w;
	w->drain_timer.fn = on_drain_timeout;
	w->drain_timer.arg = w;
	w->leave_timer.fn = on_leave;
	w->leave_timer.arg = w;
	w->beat.fn = on_beat;
	w->beat.arg = w;
	if (exl3_watch_add(w->loop, w->control_fd, POLLIN, EXL3_WATCH_LEVEL, on_control, w,
			   &w->control_watch) < 0 ||
	    exl3_watch_add(w->loop, w->signal_fd, POLLIN, EXL3_WATCH_LEVEL, on_signal, w,
			   &w->signal_watch) < 0)
		return exl3_errf(err, -ENOMEM, "worker: out of memory");
	if (w->mps_pipe[0]) {
		w->health.loop = w->loop;
		w->health.jobs = w->memory;
		w->health.devices = &w->devices;
		w->health.lost = on_device_lost;
		w->health.arg = w;
		exl3_health_start(&w->health);
	}
	exl3_worker_tell(w, EXL3_SUP_OPEN, NULL);
	return start_loads(w, err);
}

/* ---- serve ---- */

/* To another daemon: each client goes as soon as what the device has of it has ended, whatever others do, and
 * whatever words of its own it waits for. */
static void part(struct exl3_worker *w)
{
	for (struct exl3_peer *peer = w->peers; peer; peer = peer->next) {
		bool idle = !peer->closing;

		for (uint32_t i = 0; idle && i < EXL3_CHANNELS_MAX; i++)
			idle = !peer->channels[i] || exl3_channel_idle(peer->channels[i]);
		if (idle)
			exl3_peer_disconnect(peer, "another daemon serves from now on");
	}
}

static void serve(struct exl3_worker *w)
{
	while (!w->stop) {
		uint64_t now = exl3_now_ns(), until;
		bool any = exl3_loop_poll(w->loop, now) > 0;
		const char *why;

		any |= exl3_dispatch_turn(w->dispatch, now);
		if (exl3_dispatch_lost(w->dispatch, &why)) {
			/* Its memory is not to be touched any more, not even to free it; a new process
			 * starts with a new context. Clients have their -EIO, or see our end, and connect
			 * again. */
			exl3_err("leaving, so that another worker can take over");
			exl3_worker_tell(w, EXL3_SUP_REASON, why);
			_exit(1);
		}
		if (w->leaving && w->draining)
			part(w);
		if (any) {
			exl3_worker_metrics_publish(w);
			continue;
		}
		if (w->leaving && !w->nr_peers)
			on_leave(w);
		if (w->draining && !exl3_dispatch_busy(w->dispatch))
			break;
		if (exl3_dispatch_may_sleep(w->dispatch, now, &until)) {
			exl3_loop_wait(w->loop, until);
			continue;
		}
		for (int i = 0; i < RELAX; i++)
			exl3_ring_relax();
	}
}

static void worker_fini(struct exl3_worker *w)
{
	w->http = exl3_metrics_http_free(w->http);
	while (w->peers)
		exl3_peer_free(w->peers);
	exl3_calibrate_cancel(w, "the daemon ends");
	/* What is on the device reads and writes arenas and weights: they go after it. */
	while (w->dispatch &&
	       (exl3_dispatch_busy(w->dispatch) || exl3_dispatch_channels(w->dispatch))) {
		if (!exl3_dispatch_turn(w->dispatch, exl3_now_ns()))
			poll(NULL, 0, 1);
	}
	exl3_health_stop(&w->health);
	if (w->loads)
		exl3_models_unload_all(&w->models);
	w->models.event = NULL;
	w->loads = exl3_jobs_free(w->loads);
	w->memory = exl3_jobs_free(w->memory);
	exl3_calibrate_free(w);
	w->dispatch = exl3_dispatch_free(w->dispatch);
	if (w->loop) {
		exl3_timer_cancel(w->loop, &w->beat);
		exl3_timer_cancel(w->loop, &w->drain_timer);
		exl3_timer_cancel(w->loop, &w->leave_timer);
		w->control_watch = exl3_watch_drop(w->loop, w->control_watch);
		w->signal_watch = exl3_watch_drop(w->loop, w->signal_watch);
	}
	w->loop = exl3_loop_free(w->loop);
	exl3_policy_fini(&w->policy);
	drop_fresh(w);
	exl3_devices_close(&w->devices);
	exl3_closep(&w->signal_fd);
	exl3_closep(&w->control_fd);
}

int exl3_worker_main(struct exl3_config *cfg)
{
	static struct exl3_worker worker; /* large, one per process */
	struct exl3_worker *w = &worker;
	struct exl3_error err;
	int rc;

	prctl(PR_SET_NAME, "exl3-worker");
	w->cfg = cfg;
	w->control_fd = EXL3_WORKER_CONTROL_FD;
	w->signal_fd = -1;
	fcntl(w->control_fd, F_SETFD, FD_CLOEXEC);
	w->start_ns = exl3_now_ns();
	rc = worker_init(w, &err);
	if (rc < 0) {
		exl3_err("%s", err.text);
		exl3_worker_tell(w, EXL3_SUP_REASON, err.text);
		/* A first start that fails would fail again; later ones may have met bad luck. */
		if (w->status != EXL3_WORKER_NO_MPS)
			w->status = w->generation <= 1 ? EXL3_WORKER_REFUSED : 1;
	} else {
		if (w->beat_ns)
			on_beat(w);
		check_ready(w);
		serve(w);
	}
	w->stop = true;
	worker_fini(w);
	return w->status;
}
