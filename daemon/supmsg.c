/* SPDX-License-Identifier: Apache-2.0 */
/* supmsg.c - what supervisor and worker tell each other: one packet each, a header, a text, descriptors. */
#include "daemon/supmsg.h"

#include "proto/frame.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

#define TRIES   100
#define REST_MS 10

int exl3_sup_send(int sock, struct exl3_sup_msg *msg, const char *text, const int *fds,
		  unsigned nr_fds, bool wait)
{
	size_t len = text ? strlen(text) : 0;
	int rc;

	if (len >= sizeof(msg->text))
		len = sizeof(msg->text) - 1;
	if (text != msg->text)
		memcpy(msg->text, text ? text : "", len);
	msg->text[len] = 0;
	/* The kernel may have no memory for it just now, or too many descriptors under way: who waits for an
	 * answer must not wait for ever. */
	for (int tries = wait ? TRIES : 1;; poll(NULL, 0, REST_MS)) {
		rc = exl3_frame_send(sock, msg, offsetof(struct exl3_sup_msg, text) + len + 1, fds, nr_fds,
				     wait ? 0 : EXL3_FRAME_NOWAIT, NULL);
		if ((rc != -ENOBUFS && rc != -ENOMEM && rc != -ETOOMANYREFS) || !--tries)
			return rc;
	}
}

int exl3_sup_recv(int sock, struct exl3_sup_msg *msg, int *fds, unsigned *nr_fds, bool wait)
{
	const size_t least = offsetof(struct exl3_sup_msg, text) + 1;
	int n;

	/* Cleared, so that the length of a packet whose descriptors were cut off need not be known: whoever
	 * waits for it is named in its text. */
	memset(msg, 0, sizeof(*msg));
	do {
		n = exl3_frame_recv(sock, msg, sizeof(*msg), fds, EXL3_FDS_MAX, nr_fds,
				    wait ? 0 : EXL3_FRAME_NOWAIT, NULL);
	} while (n == -EINTR);
	if (n == -EAGAIN)
		return 0;
	if (n == -EPROTO) {
		msg->text[sizeof(msg->text) - 1] = 0;
		return n;
	}
	if (n < (int)least) {
		for (unsigned i = 0; i < *nr_fds; i++)
			exl3_closep(&fds[i]);
		*nr_fds = 0;
		return -ECONNRESET;
	}
	((char *)msg)[n - 1] = 0;
	return 1;
}
