/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_fds.c - fds: what the daemon keeps of its models for later workers, asked of its admin socket. */
#include "client/exl3ctl.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define FIELDS 8

static void print_line(char *const field[FIELDS])
{
	printf("%-24s %-9s %12s  %-42s %6s  %-8s %-8s %s\n", ctl_safe(field[0]), ctl_safe(field[1]),
	       ctl_bytes(strtoull(field[2], NULL, 10)), ctl_safe(field[3]), ctl_safe(field[4]),
	       ctl_safe(field[5]), ctl_safe(field[6]), ctl_safe(field[7]));
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
	cJSON_AddBoolToObject(o, "mapped", strcmp(field[6], "mapped") == 0);
	cJSON_AddStringToObject(o, "domains", field[7]);
	cJSON_AddItemToArray(list, o);
}

/* @arg: a cJSON array, or NULL: print a table. */
static int one_line(void *arg, char *line)
{
	char *field[FIELDS];

	if (!ctl_split(line, field, FIELDS))
		return ctl_error(CTL_LOST, "the daemon's answer makes no sense");
	if (arg)
		add_json(arg, field);
	else
		print_line(field);
	return CTL_OK;
}

int ctl_fds(struct ctl *c)
{
	char request[EXL3_NAME_MAX + 8];
	cJSON *list = NULL, *root = NULL;
	int e;

	if (c->nr_args && (c->nr_args != 2 || strcmp(c->args[0], "drop") != 0))
		return ctl_error(CTL_USAGE, "usage: exl3ctl fds [drop NAME]");
	if (c->nr_args && strlen(c->args[1]) > EXL3_NAME_MAX)
		return ctl_error(CTL_USAGE, "the name is longer than %u bytes", EXL3_NAME_MAX);
	snprintf(request, sizeof(request), "%s%s", c->nr_args ? "drop " : "fds",
		 c->nr_args ? c->args[1] : "");
	if (c->json && !c->nr_args) {
		root = cJSON_CreateObject();
		list = cJSON_AddArrayToObject(root, "fds");
	} else if (!c->nr_args) {
		printf("%-24s %-9s %12s  %-42s %6s  %-8s %-8s %s\n", "MODEL", "PART", "BYTES", "DEVICE",
		       "LOADED", "STORE", "WRITABLE", "DOMAINS");
	}
	e = ctl_ask_supervisor(c, request, one_line, list);
	if (root && e == CTL_OK)
		return ctl_print_cjson(root);
	cJSON_Delete(root);
	return e;
}
