/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_admin.c - verbs that change or explain: load, unload, drain, version, resolve. */
#include "client/exl3ctl.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The daemon has another working directory. Not realpath(): whether DIR is there is for the daemon to
 * say, which may see another file system. */
static int absolute(const char *dir, char *buf, size_t size)
{
	size_t n = 0;

	if (*dir != '/') {
		if (!getcwd(buf, size))
			return ctl_error(CTL_LOCAL, "working directory: %m");
		n = strlen(buf);
		if (n + 1 < size)
			buf[n++] = '/';
	}
	if (n + strlen(dir) >= size)
		return ctl_error(CTL_LOCAL, "path is too long: %s", dir);
	strcpy(buf + n, dir);
	return CTL_OK;
}

int ctl_load(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	exl3_auto(exl3_freep) char *name = NULL;
	Exl3__Load body = EXL3__LOAD__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	const char *equals = strchr(c->args[0], '=');
	char path[PATH_MAX];
	int e;

	if (!equals || equals == c->args[0] || !equals[1])
		return ctl_error(CTL_USAGE, "usage: exl3ctl load NAME=DIR");
	name = strndup(c->args[0], (size_t)(equals - c->args[0]));
	if (!name)
		return ctl_error(CTL_LOCAL, "out of memory");
	e = absolute(equals + 1, path, sizeof(path));
	if (e != CTL_OK)
		return e;
	body.name = name;
	body.path = path;
	body.device = (char *)(uintptr_t)(c->device ? c->device : "");
	if (c->unquantized && strcmp(c->unquantized, "host") && strcmp(c->unquantized, "device"))
		return ctl_error(CTL_USAGE, "--unquantized takes host or device");
	body.device_tensors = c->unquantized && !strcmp(c->unquantized, "device");
	body.wait = !c->no_wait;
	req.body_case = EXL3__REQUEST__BODY_LOAD;
	req.load = &body;
	return ctl_call(c, &req, EXL3__REPLY__BODY__NOT_SET, UINT64_MAX, &reply);
}

int ctl_unload(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__Unload body = EXL3__UNLOAD__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	body.name = (char *)(uintptr_t)c->args[0];
	body.wait = !c->no_wait;
	body.patient = c->wait;
	req.body_case = EXL3__REQUEST__BODY_UNLOAD;
	req.unload = &body;
	return ctl_call(c, &req, EXL3__REPLY__BODY__NOT_SET, UINT64_MAX, &reply);
}

int ctl_drain(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__Drain body = EXL3__DRAIN__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	req.body_case = EXL3__REQUEST__BODY_DRAIN;
	req.drain = &body;
	return ctl_call(c, &req, EXL3__REPLY__BODY__NOT_SET, EXL3_CALL_TIMEOUT_NS, &reply);
}

int ctl_version(struct ctl *c)
{
	int e;

	printf("exl3ctl %s, ABI %u\n", EXL3_VERSION, EXL3_ABI_VERSION);
	if (c->client_only)
		return CTL_OK;
	fflush(stdout);
	e = ctl_connect(c);
	if (e != CTL_OK)
		return e;
	printf("exl3-daemon %s, backend %s, instance %016llx, generation %u\n",
	       ctl_safe(c->client->daemon_version), ctl_safe(c->client->backend),
	       (unsigned long long)c->client->instance, c->client->generation);
	return CTL_OK;
}

int ctl_resolve(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__Resolve body = EXL3__RESOLVE__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	int e;

	body.model = (char *)(uintptr_t)c->args[0];
	body.name = (char *)(uintptr_t)c->args[1];
	req.body_case = EXL3__REQUEST__BODY_RESOLVE;
	req.resolve = &body;
	e = ctl_call(c, &req, EXL3__REPLY__BODY_RESOLVE, EXL3_CALL_TIMEOUT_NS, &reply);
	if (e != CTL_OK)
		return e;
	if (c->json)
		return ctl_print_json(&reply->resolve->base, NULL);
	for (size_t i = 0; i < reply->resolve->n_lines; i++)
		printf("%s\n", ctl_safe(reply->resolve->lines[i]));
	return CTL_OK;
}

/* For a shell: quoted, so that no path of the daemon's can be more than a value. */
int ctl_env(struct ctl *c)
{
	int e = ctl_connect(c);

	if (e != CTL_OK)
		return e;
	if (!c->client->mps_pipe[0]) {
		printf("# the daemon has no MPS server here\n");
		return CTL_OK;
	}
	if (strspn(c->client->mps_pipe,
		   "/._-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") !=
	    strlen(c->client->mps_pipe))
		return ctl_error(CTL_REFUSED, "the daemon's MPS folder has characters that a shell may take amiss: %s",
				 c->client->mps_pipe);
	printf("export CUDA_MPS_PIPE_DIRECTORY='%s'\n", c->client->mps_pipe);
	return CTL_OK;
}
