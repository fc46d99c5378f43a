/* SPDX-License-Identifier: Apache-2.0 */
/* listen.c - the control socket: inherited from systemd, or made here and guarded by a lock. */
#include "daemon/listen.h"

#include "daemon/config.h"
#include "daemon/keep.h"
#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#define BACKLOG   128
#define ORPHAN_NS 2000000000ull /* in which a worker without a supervisor has left */

/* Those of systemd's store are not ours to look at. Number of sockets, @fd is the first. */
static int count_sockets(int *fd)
{
	char **names = NULL;
	int nr = sd_listen_fds_with_names(1, &names), sockets = 0;

	for (int i = 0; i < nr; i++) {
		if (!exl3_keep_is_ours(names[i]) && sockets++ == 0)
			*fd = SD_LISTEN_FDS_START + i;
		free(names[i]);
	}
	free(names);
	return sockets;
}

static int inherit(struct exl3_listener *l, int nr, int fd, struct exl3_error *err)
{
	if (nr != 1)
		return exl3_errf(err, -EINVAL, "systemd passed %d sockets, one is wanted", nr);
	if (sd_is_socket_unix(fd, SOCK_SEQPACKET, 1, NULL, 0) <= 0)
		return exl3_errf(
			err, -EINVAL,
			"systemd passed something else than a listening SOCK_SEQPACKET socket "
			"(ListenSequentialPacket=)");
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
	l->fd = fd;
	l->inherited = true;
	return 0;
}

/* The folder of the default path may be missing where nobody installed tmpfiles.d; any other is a slip of
 * the pen if it is missing. */
static int need_folder(const char *path, struct exl3_error *err)
{
	char dir[112];
	char *slash;
	struct stat st;

	snprintf(dir, sizeof(dir), "%s", path);
	slash = strrchr(dir, '/');
	if (!slash || slash == dir)
		return 0;
	*slash = 0;
	if (strcmp(dir, EXL3_RUN_DIR) == 0) {
		mkdir(dir, 0755); /* if it fails, the lock says why */
		return 0;
	}
	if (stat(dir, &st) < 0)
		return exl3_errf(err, -errno, "socket %s: folder %s: %m", path, dir);
	return 0;
}

/* Whoever holds the lock owns the path. The file may have been removed by its last owner between our
 * open and our lock: then it is another file than the one at the path, and we try again. */
static int take_lock(struct exl3_listener *l, struct exl3_error *err)
{
	struct stat ours, there;

	for (int tries = 0; tries < 100; tries++) {
		exl3_auto(exl3_closep) int fd =
			open(l->lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

		if (fd < 0)
			return exl3_errf(err, -errno, "%s: %m", l->lock);
		if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
			if (errno != EWOULDBLOCK)
				return exl3_errf(err, -errno, "%s: flock: %m", l->lock);
			return exl3_errf(err, -EADDRINUSE, "another daemon serves on %s", l->path);
		}
		if (fstat(fd, &ours) == 0 && stat(l->lock, &there) == 0 &&
		    ours.st_ino == there.st_ino && ours.st_dev == there.st_dev) {
			l->lock_fd = exl3_take_fd(&fd);
			return 0;
		}
	}
	return exl3_errf(err, -EADDRINUSE, "%s comes and goes", l->lock);
}

/* 1, 0, or -errno. */
static int answers(const struct sockaddr_un *addr, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int fd =
		socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return exl3_errf(err, -errno, "socket: %m");
	return connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) == 0 || errno == EAGAIN;
}

/* With the lock held: a socket that still answers belongs to a worker that is about to follow its killed
 * supervisor, or to somebody without a lock (systemd's). */
static int remove_stale(const struct exl3_listener *l, const struct sockaddr_un *addr,
			struct exl3_error *err)
{
	uint64_t until = exl3_now_ns() + ORPHAN_NS;
	struct stat st;
	int rc;

	if (lstat(l->path, &st) < 0)
		return errno == ENOENT ? 0 : exl3_errf(err, -errno, "%s: %m", l->path);
	if (!S_ISSOCK(st.st_mode))
		return exl3_errf(err, -EEXIST, "%s is there and is no socket", l->path);
	while ((rc = answers(addr, err)) > 0 && exl3_now_ns() < until)
		poll(NULL, 0, 20);
	if (rc < 0)
		return rc;
	if (rc > 0)
		return exl3_errf(err, -EADDRINUSE, "another daemon serves on %s", l->path);
	if (unlink(l->path) < 0 && errno != ENOENT)
		return exl3_errf(err, -errno, "%s: cannot remove the stale socket: %m", l->path);
	exl3_info("stale socket %s replaced", l->path);
	return 0;
}

static int make(struct exl3_listener *l, struct exl3_error *err)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	mode_t old;
	int rc;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", l->path);
	rc = need_folder(l->path, err);
	if (rc == 0)
		rc = take_lock(l, err);
	if (rc == 0)
		rc = remove_stale(l, &addr, err);
	if (rc < 0)
		return rc;
	l->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (l->fd < 0)
		return exl3_errf(err, -errno, "socket: %m");
	old = umask(0117); /* 0660 from its first moment on */
	rc = bind(l->fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0 ? -errno : 0;
	umask(old);
	if (rc < 0) {
		errno = -rc;
		return exl3_errf(err, rc, "%s: %m", l->path);
	}
	if (listen(l->fd, BACKLOG) < 0)
		return exl3_errf(err, -errno, "%s: listen: %m", l->path);
	return 0;
}

int exl3_listener_open(const char *path, struct exl3_listener *ret, struct exl3_error *err)
{
	struct exl3_listener l = {.fd = -1, .lock_fd = -1};
	int fd = -1, nr = count_sockets(&fd), rc;

	if (strlen(path) >= sizeof(l.path))
		return exl3_errf(err, -ENAMETOOLONG, "socket path '%s' is too long", path);
	snprintf(l.path, sizeof(l.path), "%s", path);
	snprintf(l.lock, sizeof(l.lock), "%s.lock", l.path);
	rc = nr > 0 ? inherit(&l, nr, fd, err) : make(&l, err);
	if (rc < 0) {
		exl3_closep(&l.fd);
		exl3_closep(&l.lock_fd);
		return rc;
	}
	*ret = l;
	return 0;
}

void exl3_listener_close(struct exl3_listener *l)
{
	if (!l->inherited && l->fd >= 0) {
		unlink(l->path);
		unlink(l->lock); /* while we hold it, see take_lock() */
	}
	exl3_closep(&l->fd);
	exl3_closep(&l->lock_fd);
}
