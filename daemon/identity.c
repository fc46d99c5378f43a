/* SPDX-License-Identifier: Apache-2.0 */
/* identity.c - who the process at the other end of a socket is, by what the kernel says. */
#include "daemon/identity.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

#define CGROUP_TEXT_MAX 8192 /* one line per hierarchy, one of them long */

char *exl3_identity_cgroup(const char *text)
{
	while (text && *text) {
		const char *end = strchrnul(text, '\n');

		if (strncmp(text, "0::/", 4) == 0)
			return strndup(text + 3, (size_t)(end - text) - 3);
		text = *end ? end + 1 : end;
	}
	return NULL;
}

static bool alive(int pidfd)
{
	struct pollfd p = {.fd = pidfd, .events = POLLIN};

	return poll(&p, 1, 0) == 0;
}

/* Is /proc/PID of that user? Only asked where the pidfd is one of a number. */
static bool of_user(int dir, uid_t uid)
{
	struct stat st;

	return fstat(dir, &st) == 0 && (st.st_uid == uid || st.st_uid == 0);
}

static char *read_cgroup(int fd, const struct ucred *cred)
{
	exl3_auto(exl3_closep) int pidfd = -1;
	exl3_auto(exl3_closep) int dir = -1;
	exl3_auto(exl3_closep) int file = -1;
	socklen_t len = sizeof(pidfd);
	char text[CGROUP_TEXT_MAX], path[32];
	bool exact = getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &len) == 0;
	ssize_t n;

	if (cred->pid <= 0) /* of another pid namespace */
		return NULL;
	if (!exact)
		pidfd = (int)syscall(SYS_pidfd_open, cred->pid, 0);
	snprintf(path, sizeof(path), "/proc/%d", (int)cred->pid);
	dir = pidfd < 0 ? -1 : open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0 || (!exact && !of_user(dir, cred->uid)))
		return NULL;
	file = openat(dir, "cgroup", O_RDONLY | O_CLOEXEC);
	n = file < 0 ? -1 : read(file, text, sizeof(text) - 1);
	/* Alive after we have read: the number was its own all the time. */
	if (n <= 0 || !alive(pidfd))
		return NULL;
	text[n] = 0;
	return exl3_identity_cgroup(text);
}

static int read_groups(int fd, struct exl3_identity *id, struct exl3_error *err)
{
	socklen_t len = 0;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, NULL, &len) == 0 || len == 0)
		return 0; /* none */
	if (errno != ERANGE)
		return 0; /* a kernel that does not say */
	id->groups = malloc(len);
	if (!id->groups)
		return exl3_errf(err, -ENOMEM, "client: out of memory");
	if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, id->groups, &len) < 0)
		return exl3_errf(err, -errno, "client: SO_PEERGROUPS: %m");
	id->nr_groups = len / sizeof(gid_t);
	return 0;
}

int exl3_identity_read(int fd, struct exl3_identity *ret, struct exl3_error *err)
{
	struct exl3_identity id = {0};
	struct ucred cred;
	socklen_t len = sizeof(cred);
	int rc;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		return exl3_errf(err, -errno, "client: SO_PEERCRED: %m");
	id.pid = cred.pid;
	id.uid = cred.uid;
	id.gid = cred.gid;
	rc = read_groups(fd, &id, err);
	if (rc < 0) {
		exl3_identity_fini(&id);
		return rc;
	}
	id.cgroup = read_cgroup(fd, &cred);
	*ret = id;
	return 0;
}

void exl3_identity_fini(struct exl3_identity *id)
{
	free(id->groups);
	free(id->cgroup);
	memset(id, 0, sizeof(*id));
}
