/* SPDX-License-Identifier: Apache-2.0 */
/* listen.h - the control socket: inherited from systemd, or made here and guarded by a lock. */
#ifndef EXL3_DAEMON_LISTEN_H
#define EXL3_DAEMON_LISTEN_H

#include "shm/util.h"

#include <stdbool.h>

struct exl3_listener {
	int fd;         /* owned; SOCK_SEQPACKET, listening, non-blocking */
	int lock_fd;    /* owned; -1 if inherited */
	bool inherited; /* systemd's: the path stays when we go */
	char path[104], lock[112];
};

/**
 * exl3_listener_open() - the one socket that systemd passed, or a new one at @path, mode 0660.
 * A stale socket is replaced, after the lock beside it ("PATH.lock") has been taken.
 * Returns 0, -EADDRINUSE (a daemon serves there), -EINVAL (systemd passed something else), -EACCES, ...
 */
int exl3_listener_open(const char *path, struct exl3_listener *ret, struct exl3_error *err);
void exl3_listener_close(struct exl3_listener *l);

#endif
