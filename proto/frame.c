/* SPDX-License-Identifier: Apache-2.0 */
/* frame.c - one message per SOCK_SEQPACKET packet, file descriptors attached; no policy. */
#include "proto/frame.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

union control {
	struct cmsghdr align;
	char bytes[CMSG_SPACE(EXL3_FRAME_FDS_MAX * sizeof(int))];
};

int exl3_frame_send(int sock, const void *data, size_t bytes, const int *fds, unsigned nr_fds,
		    unsigned flags, struct exl3_error *err)
{
	struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	int how = MSG_NOSIGNAL | (flags & EXL3_FRAME_NOWAIT ? MSG_DONTWAIT : 0);
	union control control;
	ssize_t n;

	if (!bytes || bytes > EXL3_PACKET_MAX)
		return exl3_errf(err, -EMSGSIZE, "message of %zu bytes; 1 to %u fit into a packet",
				 bytes, EXL3_PACKET_MAX);
	if (nr_fds > EXL3_FDS_MAX)
		return exl3_errf(err, -EINVAL, "%u descriptors; a packet carries up to %u", nr_fds,
				 EXL3_FDS_MAX);
	if (nr_fds) {
		struct cmsghdr *c;

		memset(&control, 0, CMSG_SPACE(EXL3_FDS_MAX * sizeof(int)));
		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(nr_fds * sizeof(int));
		c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(nr_fds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, nr_fds * sizeof(int));
	}
	do
		n = sendmsg(sock, &msg, how);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return exl3_errf(err, errno == EWOULDBLOCK ? -EAGAIN : -errno,
				 "cannot send a message of %zu bytes: %m", bytes);
	return 0;
}

/* Moves what came with the packet to @fds; a surplus is closed. Returns how many came in all. */
static unsigned collect_fds(struct msghdr *msg, int *fds, unsigned max_fds)
{
	unsigned nr = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		size_t n;

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS ||
		    c->cmsg_len < CMSG_LEN(0))
			continue;
		n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			if (nr < max_fds)
				fds[nr] = fd;
			else
				close(fd);
			nr++;
		}
	}
	return nr;
}

int exl3_frame_recv(int sock, void *buf, size_t size, int *fds, unsigned max_fds, unsigned *nr_fds,
		    unsigned flags, struct exl3_error *err)
{
	union control control;
	struct iovec iov = {.iov_base = buf, .iov_len = size};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = control.bytes,
			     .msg_controllen = sizeof(control.bytes)};
	int how = MSG_CMSG_CLOEXEC | (flags & EXL3_FRAME_NOWAIT ? MSG_DONTWAIT : 0);
	unsigned nr, kept;
	ssize_t n;
	int e = 0;

	*nr_fds = 0;
	if (max_fds > EXL3_FRAME_FDS_MAX)
		max_fds = EXL3_FRAME_FDS_MAX;
	n = recvmsg(sock, &msg, how);
	if (n < 0)
		return exl3_errf(err, errno == EWOULDBLOCK ? -EAGAIN : -errno,
				 "cannot receive a message: %m");
	nr = collect_fds(&msg, fds, max_fds);
	kept = nr < max_fds ? nr : max_fds;
	if (n == 0)
		e = exl3_errf(err, -ECONNRESET, "the peer has closed the connection");
	else if (msg.msg_flags & MSG_TRUNC)
		e = exl3_errf(err, -EMSGSIZE, "message is longer than %zu bytes", size);
	else if (msg.msg_flags & MSG_CTRUNC)
		e = exl3_errf(err, -EPROTO, "descriptors were cut off: no room for them here");
	else if (nr > max_fds)
		e = exl3_errf(err, -EPROTO, "message carries %u descriptors, %u are allowed", nr,
			      max_fds);
	if (e < 0 && !(flags & EXL3_FRAME_KEEP)) {
		for (unsigned i = 0; i < kept; i++)
			exl3_closep(&fds[i]);
		return e;
	}
	*nr_fds = kept;
	return e < 0 ? e : (int)n;
}
