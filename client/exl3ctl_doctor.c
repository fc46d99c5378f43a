/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_doctor.c - looks for what is wrong, from this process to the daemon's models. */
#include "client/exl3ctl.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>

enum verdict { OK, NOTE, BAD };

struct doctor {
	struct ctl *c;
	cJSON *list; /* owned; --json */
	bool bad;
};

static void say(struct doctor *d, enum verdict v, const char *what, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));

static void say(struct doctor *d, enum verdict v, const char *what, const char *fmt, ...)
{
	static const char *const words[] = {[OK] = "ok", [NOTE] = "note", [BAD] = "BAD"};
	char text[1024];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	d->bad |= v == BAD;
	if (d->list) {
		cJSON *item = cJSON_CreateObject();

		cJSON_AddStringToObject(item, "verdict", v == BAD ? "bad" : words[v]);
		cJSON_AddStringToObject(item, "check", what);
		cJSON_AddStringToObject(item, "text", ctl_safe(text));
		cJSON_AddItemToArray(d->list, item);
	} else {
		printf("%-5s %-10s %s\n", words[v], what, ctl_safe(text));
	}
}

/* ---- this machine and process ---- */

static void check_kernel(struct doctor *d)
{
	struct utsname u;
	unsigned major = 0, minor = 0;

	if (uname(&u) < 0 || sscanf(u.release, "%u.%u", &major, &minor) != 2) {
		say(d, NOTE, "kernel", "cannot tell its version");
		return;
	}
	if (major > 6 || (major == 6 && minor >= 1))
		say(d, OK, "kernel", "Linux %s", u.release);
	else
		say(d, NOTE, "kernel", "Linux %s; the daemon is made for 6.1 and later", u.release);
}

static void check_limits(struct doctor *d)
{
	struct rlimit r;

	if (getrlimit(RLIMIT_NOFILE, &r) < 0)
		return;
	if (r.rlim_cur < 256)
		say(d, NOTE, "limits", "%llu open files allowed (ulimit -n); a channel takes three",
		    (unsigned long long)r.rlim_cur);
	else
		say(d, OK, "limits", "%llu open files allowed", (unsigned long long)r.rlim_cur);
}

static void check_io_uring(struct doctor *d)
{
	FILE *f = fopen("/proc/sys/kernel/io_uring_disabled", "re");
	int v = 0;

	if (f && fscanf(f, "%d", &v) == 1 && v)
		say(d, NOTE, "io_uring",
		    "kernel.io_uring_disabled is %d: the daemon cannot start%s here", v,
		    v == 1 ? " without privileges" : "");
	else
		say(d, OK, "io_uring", "not disabled by sysctl");
	if (f)
		fclose(f);
}

static void check_socket(struct doctor *d, const char *path)
{
	const struct passwd *pw;
	const struct group *gr;
	struct stat st;

	if (stat(path, &st) < 0) {
		say(d, BAD, "socket", "%s: %s; the daemon is not running, or has another socket",
		    path, strerror(errno));
		return;
	}
	if (!S_ISSOCK(st.st_mode)) {
		say(d, BAD, "socket", "%s is not a socket", path);
		return;
	}
	pw = getpwuid(st.st_uid);
	gr = getgrgid(st.st_gid);
	say(d, access(path, W_OK) == 0 ? OK : BAD, "socket", "%s, mode %04o, owner %s, group %s%s",
	    path, st.st_mode & 07777, pw ? pw->pw_name : "?", gr ? gr->gr_name : "?",
	    access(path, W_OK) == 0 ? "" : ": this user may not connect");
}

/* ---- the daemon ---- */

static void check_models(struct doctor *d, const Exl3__StatusReply *s)
{
	if (!s->n_models)
		say(d, NOTE, "models", "none loaded: exl3ctl load NAME=DIR, or --model at start");
	for (size_t i = 0; i < s->n_models; i++) {
		const Exl3__Model *m = s->models[i];

		if (m->state == EXL3__MODEL_STATE__MODEL_FAILED)
			say(d, BAD, "model", "%s: %s", m->name, m->error);
		else if (m->state == EXL3__MODEL_STATE__MODEL_READY)
			say(d, OK, "model", "%s: ready, %u modules", m->name, m->nr_modules);
		else
			say(d, NOTE, "model", "%s: %s", m->name,
			    ctl_enum(&exl3__model_state__descriptor, (int)m->state));
		for (size_t k = 0; k < m->n_skipped; k++)
			say(d, NOTE, "model", "%s: left out: %s", m->name, m->skipped[k]);
	}
}

/* Programs that this shell would start and that have CUDA of their own: do they share the worker's server? */
static void check_mps(struct doctor *d, const Exl3__StatusReply *s)
{
	const char *ours = getenv("CUDA_MPS_PIPE_DIRECTORY");
	char path[256];

	if (strcmp(s->backend, "cuda") != 0 && !*s->mps_pipe)
		return;
	if (!*s->mps_pipe) {
		say(d, NOTE, "MPS",
		    "the daemon has no MPS server: a program with CUDA of its own and the daemon take turns on the GPU, "
		    "and one request after the other costs about 290 us each instead of 16; see mps in "
		    "exl3-daemon.conf(5)");
		return;
	}
	snprintf(path, sizeof(path), "%s/control", s->mps_pipe);
	if (access(path, F_OK) < 0)
		say(d, BAD, "MPS", "%s: %s: programs with CUDA of their own cannot join the worker's server", path,
		    strerror(errno));
	else if (ours && strcmp(ours, s->mps_pipe) == 0)
		say(d, OK, "MPS", "programs started here share the worker's server in %s", s->mps_pipe);
	else if (ours && *ours)
		say(d, NOTE, "MPS",
		    "CUDA_MPS_PIPE_DIRECTORY is %s here, the worker's server is in %s: a program started from here takes "
		    "turns with it, about 290 us for one request after the other instead of 16; eval \"$(exl3ctl env)\"",
		    ours, s->mps_pipe);
	else
		say(d, OK, "MPS",
		    "server in %s; programs join it by connecting before they start CUDA, or by eval \"$(exl3ctl env)\"",
		    s->mps_pipe);
}

static void check_status(struct doctor *d)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__Status body = EXL3__STATUS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	const Exl3__StatusReply *s;

	req.body_case = EXL3__REQUEST__BODY_STATUS;
	req.status = &body;
	if (exl3_client_call(d->c->client, &req, EXL3__REPLY__BODY_STATUS, EXL3_CALL_TIMEOUT_NS,
			     &reply, NULL, 0) < 0) {
		say(d, BAD, "status", "%s", exl3_last_error());
		return;
	}
	s = reply->status;
	say(d, strcmp(s->daemon_version, EXL3_VERSION) ? NOTE : OK, "version",
	    "daemon %s, exl3ctl %s", s->daemon_version, EXL3_VERSION);
	say(d, strcmp(s->state, "serving") ? NOTE : OK, "state", "%s", s->state);
	say(d, OK, "backend", "%s: %s (%s), %u threads", s->backend, s->device_name, s->isa,
	    s->threads);
	for (size_t i = 0; i < s->n_backends; i++)
		say(d, OK, "backend", "%s", s->backends[i]);
	say(d, d->c->client->generation > 1 ? NOTE : OK, "worker", "generation %u%s",
	    d->c->client->generation,
	    d->c->client->generation > 1 ? ": it has been restarted, see the daemon's log" : "");
	if (s->errors)
		say(d, NOTE, "requests", "%llu of %llu failed", (unsigned long long)s->errors,
		    (unsigned long long)s->requests);
	if (s->memory_total && s->memory_free < s->memory_total / 20)
		say(d, NOTE, "memory", "only %s of %s free", ctl_bytes(s->memory_free),
		    ctl_bytes(s->memory_total));
	check_mps(d, s);
	check_models(d, s);
}

/* An arena, a channel, and a request that does nothing: the whole way there and back. */
static void check_round_trip(struct doctor *d)
{
	struct exl3_arena *arena = NULL;
	struct exl3_channel *ch = NULL;
	uint64_t best = UINT64_MAX;

	if (exl3_arena_new(d->c->client, 4096, &arena) < 0 ||
	    exl3_channel_new(d->c->client, EXL3_SQ_ENTRIES_MIN, &ch) < 0) {
		say(d, BAD, "channel", "%s", exl3_last_error());
		exl3_arena_free(arena);
		return;
	}
	for (int i = 0; i < 100; i++) {
		uint64_t start = exl3_now_ns(), took;
		struct exl3_sqe *sqe = exl3_sq_get(ch);

		if (sqe)
			exl3_prep_nop(sqe);
		if (!sqe || exl3_call(ch, NULL) < 0) {
			say(d, BAD, "channel", "%s", exl3_last_error());
			best = UINT64_MAX;
			break;
		}
		took = exl3_now_ns() - start;
		if (took < best)
			best = took;
	}
	if (best != UINT64_MAX)
		say(d, OK, "channel", "a request that does nothing takes %.1f us at best",
		    (double)best / 1000);
	exl3_channel_free(ch);
	exl3_arena_free(arena);
}

int ctl_doctor(struct ctl *c)
{
	struct doctor d = {.c = c, .list = c->json ? cJSON_CreateArray() : NULL};
	const char *path = exl3_client_path(c->socket);
	bool reached;

	check_kernel(&d);
	check_limits(&d);
	check_io_uring(&d);
	check_socket(&d, path);
	reached = exl3_client_connect(c->socket, "exl3ctl", EXL3_CONNECT_NO_ENV, c->domain, &c->client) == 0;
	if (!reached) {
		say(&d, BAD, "connect", "%s", exl3_last_error());
	} else {
		say(&d, OK, "connect", "process %d answers%s", c->client->daemon_pid,
		    c->client->admin ? ", this user may load and unload"
				     : ", this user may not load and unload");
		check_status(&d);
		check_round_trip(&d);
	}
	if (d.list) {
		cJSON *json = cJSON_CreateObject();

		cJSON_AddItemToObject(json, "checks", d.list);
		ctl_print_cjson(json);
	}
	if (!reached)
		return CTL_UNREACHABLE;
	return d.bad ? CTL_REFUSED : CTL_OK;
}
