/* SPDX-License-Identifier: Apache-2.0 */
/* identity.h - who the process at the other end of a socket is, by what the kernel says. */
#ifndef EXL3_DAEMON_IDENTITY_H
#define EXL3_DAEMON_IDENTITY_H

#include "shm/util.h"

#include <stdint.h>
#include <sys/types.h>

struct exl3_identity {
	pid_t pid; /* when it connected; only to be shown: it may be another process by now */
	uid_t uid;
	gid_t gid;
	gid_t *groups; /* owned; supplementary ones */
	uint32_t nr_groups;
	char *cgroup; /* owned; path in the cgroup v2 hierarchy, begins with '/'; NULL: not known */
};

/**
 * exl3_identity_read() - of the process that connected a Unix socket.
 * uid, gid and groups are those of the moment of its connect(). The cgroup is that of now: the process is held
 * by a pidfd meanwhile, so that no other one of the same number is read; with kernels before 6.5, which have
 * no SO_PEERPIDFD, a process that has passed its socket on and died may be mistaken for one of the same user.
 * Returns 0, -ENOMEM, or what SO_PEERCRED says.
 */
int exl3_identity_read(int fd, struct exl3_identity *ret, struct exl3_error *err);
void exl3_identity_fini(struct exl3_identity *id);

/* The line "0::/path" of a /proc/PID/cgroup, as a new string; NULL: there is none, or no memory. */
char *exl3_identity_cgroup(const char *text);

#endif
