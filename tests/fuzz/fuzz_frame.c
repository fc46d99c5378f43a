/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_frame.c - any packets between two sockets, and any bytes as a message of either direction.
 *
 * Input: one byte, how many descriptors go along, one byte, how many the receiver takes, then the
 * packet. What comes through must be what was sent, no descriptor may be left open, and a message that
 * can be unpacked must survive being packed again.
 */
#include "proto/exl3.pb-c.h"
#include "proto/frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The lowest free descriptor: the same before and after, if nothing leaks. */
static int lowest_fd(void)
{
	int fd = dup(STDIN_FILENO);

	if (fd >= 0)
		close(fd);
	return fd;
}

static void through_a_socket(const uint8_t *data, size_t size, unsigned send_fds, unsigned room)
{
	static uint8_t buf[EXL3_PACKET_MAX];
	int s[2], in[EXL3_FDS_MAX], out[EXL3_FDS_MAX], before, e;
	struct exl3_error err = {0};
	unsigned n;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s) < 0)
		abort();
	for (unsigned i = 0; i < EXL3_FDS_MAX; i++)
		in[i] = s[i & 1];
	before = lowest_fd();
	e = exl3_frame_send(s[0], data, size, in, send_fds, EXL3_FRAME_NOWAIT, &err);
	if (e == 0) {
		/* A receiver's buffer that is too small in some runs. */
		size_t take = room & 8 ? size / 2 : sizeof(buf);

		e = exl3_frame_recv(s[1], buf, take, out, room & 7, &n, EXL3_FRAME_NOWAIT, &err);
		if (e > 0 && ((size_t)e != size || n != send_fds || memcmp(buf, data, size) != 0))
			abort();
		if (e <= 0 && (n != 0 || !err.text[0]))
			abort();
		for (unsigned i = 0; i < n; i++)
			close(out[i]);
	}
	if (lowest_fd() != before)
		abort();
	close(s[0]);
	close(s[1]);
}

static void as_message(const uint8_t *data, size_t size)
{
	Exl3__Request *req = exl3__request__unpack(NULL, size, data);
	Exl3__Reply *reply = exl3__reply__unpack(NULL, size, data);

	if (req) {
		size_t n = exl3__request__get_packed_size(req);
		uint8_t *again = malloc(n ? n : 1);

		if (!again || exl3__request__pack(req, again) != n)
			abort();
		free(again);
		exl3__request__free_unpacked(req, NULL);
	}
	if (reply) {
		size_t n = exl3__reply__get_packed_size(reply);
		uint8_t *again = malloc(n ? n : 1);

		if (!again || exl3__reply__pack(reply, again) != n)
			abort();
		free(again);
		exl3__reply__free_unpacked(reply, NULL);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 3 || size - 2 > EXL3_PACKET_MAX)
		return 0;
	through_a_socket(data + 2, size - 2, data[0] % (EXL3_FDS_MAX + 1), data[1] % 16);
	as_message(data + 2, size - 2);
	return 0;
}
