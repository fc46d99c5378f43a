/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_fds.c - fds: what the daemon keeps of its models for later workers, asked of its admin socket. */
#include "client/exl3ctl.h"

#include "proto/frame.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define PACKET_SIZE 65536u
#define FIELDS      7

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

/* Splits a line at its tabs; false: it is not what was agreed on. */
static bool split(char *line, char *field[FIELDS])
{
	for (int i = 0; i < FIELDS; i++) {
		if (!line)
			return false;
		field[i] = line;
		line = i + 1 < FIELDS ? strchr(line, '\t') : NULL;
		if (line)
			*line++ = 0;
	}
	return true;
}

static void print_line(char *const field[FIELDS])
{
	printf("%-24s %-9s %12s  %-42s %6s  %-8s %s\n", ctl_safe(field[0]), ctl_safe(field[1]),
	       ctl_bytes(strtoull(field[2], NULL, 10)), ctl_safe(field[3]), ctl_safe(field[4]),
	       ctl_safe(field[5]), ctl_safe(field[6]));
}

static void add_json(cJSON *list, char *const field[FIELDS])
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "model", field[0]);
	cJSON_AddStringToObject(o, "part", field[1]);
	cJSON_AddNumberToObject(o, "bytes", (double)strtoull(field[2], NULL, 10));
	cJSON_AddStringToObject(o, "device", field[3]);
	cJSON_AddNumberToObject(o, "generation", (double)strtoull(field[4], NULL, 10));
	cJSON_AddBoolToObject(o, "systemd", strcmp(field[5], "systemd") == 0);
	cJSON_AddStringToObject(o, "domains", field[6]);
	cJSON_AddItemToArray(list, o);
}

/* One packet's lines. @list: NULL prints a table. */
static int show(char *text, cJSON *list)
{
	char *field[FIELDS], *save = NULL;

	for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
		if (!split(line, field))
			return ctl_error(CTL_LOST, "the daemon's answer makes no sense");
		if (list)
			add_json(list, field);
		else
			print_line(field);
	}
	return CTL_OK;
}

/* Packets until "ok". */
static int answer(int fd, cJSON *list)
{
	exl3_auto(exl3_freep) char *packet = malloc(PACKET_SIZE + 1);
	unsigned nr_fds;
	int e = CTL_OK, n;

	if (!packet)
		return ctl_error(CTL_LOCAL, "out of memory");
	while (e == CTL_OK) {
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
		e = show(packet, list);
	}
	return e;
}

int ctl_fds(struct ctl *c)
{
	exl3_auto(exl3_closep) int fd = -1;
	char request[EXL3_NAME_MAX + 8];
	cJSON *list = NULL, *root = NULL;
	int e;

	if (c->nr_args && (c->nr_args != 2 || strcmp(c->args[0], "drop") != 0))
		return ctl_error(CTL_USAGE, "usage: exl3ctl fds [drop NAME]");
	if (c->nr_args && strlen(c->args[1]) > EXL3_NAME_MAX)
		return ctl_error(CTL_USAGE, "the name is longer than %u bytes", EXL3_NAME_MAX);
	snprintf(request, sizeof(request), "%s%s", c->nr_args ? "drop " : "fds",
		 c->nr_args ? c->args[1] : "");
	e = dial(c, &fd);
	if (e != CTL_OK)
		return e;
	if (exl3_frame_send(fd, request, strlen(request), NULL, 0, 0, NULL) < 0)
		return ctl_error(CTL_REFUSED, "the daemon has hung up: only root and its own user may do that");
	if (c->json && !c->nr_args) {
		root = cJSON_CreateObject();
		list = cJSON_AddArrayToObject(root, "fds");
	} else if (!c->nr_args) {
		printf("%-24s %-9s %12s  %-42s %6s  %-8s %s\n", "MODEL", "PART", "BYTES", "DEVICE",
		       "LOADED", "STORE", "DOMAINS");
	}
	e = answer(fd, list);
	if (root && e == CTL_OK)
		return ctl_print_cjson(root);
	cJSON_Delete(root);
	return e;
}
