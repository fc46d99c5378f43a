/* SPDX-License-Identifier: Apache-2.0 */
/* supervisor.h - owns the listening socket, starts the worker and starts it again when it dies. */
#ifndef EXL3_DAEMON_SUPERVISOR_H
#define EXL3_DAEMON_SUPERVISOR_H

#include "daemon/config.h"

/* Until told to stop; exit status of the daemon. @takeover: in place of the one that serves on the socket. */
int exl3_supervisor_main(struct exl3_config *cfg, int argc, char *const argv[],
			 bool takeover);

#endif
