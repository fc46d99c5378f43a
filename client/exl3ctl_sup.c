/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_sup.c - questions to the supervisor itself, on its admin socket; domains, and events without a worker. */
#include "client/exl3ctl.h"

#include "proto/event.h"
#include "proto/frame.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define PACKET_SIZE 65536u
#define FIELDS      8 /* of a domain */

static int dial(const struct ctl *c, int *ret)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	const char *path = exl3_client_path(c->socket);
	exl3_auto(exl3_closep) int fd = -1;

	if (strlen(path) + sizeof(".admin") > sizeof(addr.sun_path))
		return ctl_error(CTL_USAGE, "socket path is too long: %s", path);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%.100s.admin", path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return ctl_error(CTL_LOCAL, "socket: %m");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){.tv_sec = 10}, sizeof(struct timeval));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){.tv_sec = 10}, sizeof(struct timeval));
	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
		return errno == EACCES
			       ? ctl_error(CTL_REFUSED,
					   "%s: only root and the daemon's own user may do that",
					   addr.sun_path)
			       : ctl_error(CTL_UNREACHABLE, "no daemon: %s: %m", addr.sun_path);
	*ret = exl3_take_fd(&fd);
	return CTL_OK;
}

/* Packets of lines until "ok". */
static int answer(int fd, int (*line)(void *arg, char *text), void *arg)
{
	exl3_auto(exl3_freep) char *packet = malloc(PACKET_SIZE + 1);
	unsigned nr_fds;
	int e = CTL_OK, n;

	if (!packet)
		return ctl_error(CTL_LOCAL, "out of memory");
	while (e == CTL_OK) {
		char *save = NULL;

		n = exl3_frame_recv(fd, packet, PACKET_SIZE, NULL, 0, &nr_fds, 0, NULL);
		if (n == -EINTR)
			continue;
		if (n < 0)
			return ctl_error(CTL_LOST, "the daemon has not answered: %s", strerror(-n));
		packet[n] = 0;
		if (strcmp(packet, "ok") == 0)
			return CTL_OK;
		if (strncmp(packet, "error ", 6) == 0)
			return ctl_error(CTL_REFUSED, "%s", ctl_safe(packet + 6));
		for (char *text = strtok_r(packet, "\n", &save); text && e == CTL_OK;
		     text = strtok_r(NULL, "\n", &save))
			e = line(arg, text);
	}
	return e;
}

bool ctl_may_ask_supervisor(const struct ctl *c)
{
	char path[sizeof(((struct sockaddr_un *)0)->sun_path)];

	snprintf(path, sizeof(path), "%.100s.admin", exl3_client_path(c->socket));
	return access(path, W_OK) == 0;
}

bool ctl_split(char *line, char **field, int nr)
{
	for (int i = 0; i < nr; i++) {
		if (!line)
			return false;
		field[i] = line;
		line = i + 1 < nr ? strchr(line, '\t') : NULL;
		if (line)
			*line++ = 0;
	}
	return true;
}

int ctl_ask_supervisor(struct ctl *c, const char *request, int (*line)(void *arg, char *text),
		       void *arg)
{
	exl3_auto(exl3_closep) int fd = -1;
	int e = dial(c, &fd);

	if (e != CTL_OK)
		return e;
	if (exl3_frame_send(fd, request, strlen(request), NULL, 0, 0, NULL) < 0)
		return ctl_error(CTL_REFUSED, "the daemon has hung up: only root and its own user may do that");
	return answer(fd, line, arg);
}

/* ---- domains ---- */

/* @arg: a cJSON array, or NULL: print a table. */
static int one_domain(void *arg, char *text)
{
	char *f[FIELDS];
	cJSON *o;

	if (!ctl_split(text, f, FIELDS))
		return ctl_error(CTL_LOST, "the daemon's answer makes no sense");
	if (!arg) {
		printf("%-16s %-10s %10s %8s %8s %7s  %s\n", ctl_safe(f[0]), ctl_safe(f[1]),
		       ctl_safe(f[2]), ctl_safe(f[3]), ctl_safe(f[4]), ctl_safe(f[5]),
		       ctl_safe(f[7]));
		return CTL_OK;
	}
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "name", f[0]);
	cJSON_AddStringToObject(o, "state", f[1]);
	cJSON_AddNumberToObject(o, "generation", (double)strtoul(f[2], NULL, 10));
	cJSON_AddNumberToObject(o, "worker_pid", (double)strtoul(f[3], NULL, 10));
	cJSON_AddNumberToObject(o, "restarts", (double)strtoul(f[4], NULL, 10));
	cJSON_AddNumberToObject(o, "waiting", (double)strtoul(f[5], NULL, 10));
	cJSON_AddStringToObject(o, "mps_pipe", strcmp(f[6], "-") ? f[6] : "");
	cJSON_AddStringToObject(o, "says", f[7]);
	cJSON_AddItemToArray(arg, o);
	return CTL_OK;
}

int ctl_domains(struct ctl *c)
{
	cJSON *root = c->json ? cJSON_CreateObject() : NULL;
	cJSON *list = root ? cJSON_AddArrayToObject(root, "domains") : NULL;
	int e;

	if (!root)
		printf("%-16s %-10s %10s %8s %8s %7s  %s\n", "DOMAIN", "STATE", "GENERATION", "WORKER",
		       "RESTARTS", "WAITING", "SAYS");
	e = ctl_ask_supervisor(c, "domains", one_domain, list);
	if (root && e == CTL_OK)
		return ctl_print_cjson(root);
	cJSON_Delete(root);
	return e;
}

/* ---- events ---- */

static int one_event(void *arg, char *text)
{
	Exl3__Event m = EXL3__EVENT__INIT;
	struct exl3_event e;

	if (exl3_event_parse(text, &e) < 0)
		return ctl_error(CTL_LOST, "the daemon's answer makes no sense");
	m.id = e.id;
	m.time_ms = e.time_ms;
	m.generation = e.generation;
	m.domain = e.domain;
	m.kind = e.kind;
	m.text = e.text;
	if (arg)
		cJSON_AddItemToArray(arg, ctl_json(&m.base, NULL));
	else
		ctl_print_event(&m);
	return CTL_OK;
}

int ctl_events_of_supervisor(struct ctl *c, struct cJSON *array)
{
	return ctl_ask_supervisor(c, "events", one_event, array);
}
