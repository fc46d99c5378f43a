/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - arguments of exl3-daemon; then the supervisor, or the worker that it starts. */
#include "daemon/config.h"
#include "daemon/fault.h"
#include "daemon/log.h"
#include "daemon/supervisor.h"
#include "daemon/worker.h"

#include <stdio.h>

/* Something that --check-config found. */
static void report(const char *text)
{
	exl3_err("%s", text);
}

int main(int argc, char **argv)
{
	struct exl3_config_args args;
	struct exl3_config cfg;
	struct exl3_error err;
	int status;

	exl3_log_init("exl3-daemon");
	if (exl3_config_read(argc, argv, &cfg, &args, &err) < 0) {
		/* Help does not depend on a configuration that is right. */
		if (args.help) {
			exl3_config_help(stdout);
			return 0;
		}
		exl3_err("%s", err.text);
		return 2;
	}
	if (args.help) {
		exl3_config_help(stdout);
		status = 0;
	} else if (args.version) {
		printf("exl3-daemon %s\n", EXL3_DAEMON_VERSION);
		status = 0;
	} else if (args.check) {
		exl3_config_print(&cfg, stdout);
		status = exl3_config_check_places(&cfg, stdout, report) ? 2 : 0;
	} else {
		exl3_log_set_level(exl3_config_log_level(&cfg));
		exl3_fault_init();
		if (args.worker_fd >= 0)
			status = exl3_worker_main(&cfg);
		else
			status = exl3_supervisor_main(&cfg, argc, argv, args.takeover);
	}
	exl3_config_fini(&cfg);
	return status;
}
