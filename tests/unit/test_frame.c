/* SPDX-License-Identifier: Apache-2.0 */
/* test_frame.c - packets with descriptors: limits, surplus, truncation, hang-up; nothing leaks. */
#include "tests/test.h"

#include "proto/frame.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

static void open_pair(int s[2])
{
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s), 0);
}

static void close_pair(int s[2])
{
	exl3_closep(&s[0]);
	exl3_closep(&s[1]);
}

/* Every number of descriptors against every limit of the receiver. */
static void fds_up_to_the_limit(void **state)
{
	(void)state;
	for (unsigned sent = 0; sent <= EXL3_FDS_MAX + 1; sent++) {
		for (unsigned room = 0; room <= EXL3_FDS_MAX; room++) {
			int s[2], in[EXL3_FDS_MAX + 1], out[EXL3_FDS_MAX], e;
			struct exl3_error err;
			char buf[8] = "";
			unsigned n = 99;

			open_pair(s);
			for (unsigned i = 0; i <= EXL3_FDS_MAX; i++)
				in[i] = s[1];
			e = exl3_frame_send(s[0], "abc", 3, in, sent, 0, &err);
			test_code(e, sent > EXL3_FDS_MAX ? -EINVAL : 0, &err);
			if (e == 0) {
				int before = test_count_fds();

				e = exl3_frame_recv(s[1], buf, sizeof(buf), out, room, &n, 0, &err);
				test_code(e, sent > room ? -EPROTO : 3, &err);
				assert_int_equal(n, e < 0 ? 0 : sent);
				assert_int_equal(test_count_fds(), before + (int)n);
				for (unsigned i = 0; i < n; i++) {
					assert_int_equal(fcntl(out[i], F_GETFD) & FD_CLOEXEC,
							 FD_CLOEXEC);
					close(out[i]);
				}
			}
			close_pair(s);
		}
	}
}

/* A peer that does not use our sender may attach more than a packet of ours can. */
static void surplus_is_closed(void **state)
{
	enum { MANY = 20 };
	char control[CMSG_SPACE(MANY * sizeof(int))] __attribute__((aligned(8))) = {0};
	struct iovec iov = {.iov_base = (char[]){"x"}, .iov_len = 1};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = control,
			     .msg_controllen = sizeof(control)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
	int s[2], out[EXL3_FDS_MAX], before;
	struct exl3_error err;
	unsigned n;
	char buf[8];

	(void)state;
	open_pair(s);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(MANY * sizeof(int));
	for (int i = 0; i < MANY; i++)
		memcpy(CMSG_DATA(c) + (size_t)i * sizeof(int), &s[0], sizeof(int));
	assert_int_equal(sendmsg(s[0], &msg, 0), 1);
	before = test_count_fds();
	test_code(exl3_frame_recv(s[1], buf, sizeof(buf), out, EXL3_FDS_MAX, &n, 0, &err), -EPROTO,
		  &err);
	assert_int_equal(n, 0);
	assert_int_equal(test_count_fds(), before);
	close_pair(s);
}

/* The receiver's descriptor table is full: refused, nothing half received. */
static void no_room_for_fds(void **state)
{
	int s[2], out[EXL3_FDS_MAX], before;
	struct rlimit old, low;
	struct exl3_error err;
	unsigned n;
	char buf[8];

	(void)state;
	open_pair(s);
	test_code(exl3_frame_send(s[0], "a", 1, (int[]){s[0], s[0], s[0]}, 3, 0, &err), 0, &err);
	before = test_count_fds();
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	low = old;
	low.rlim_cur = (rlim_t)s[1] + 2; /* room for one more */
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	test_code(exl3_frame_recv(s[1], buf, sizeof(buf), out, EXL3_FDS_MAX, &n, 0, &err), -EPROTO,
		  &err);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	assert_int_equal(test_count_fds(), before);
	close_pair(s);
}

static void sizes(void **state)
{
	static const struct {
		size_t sent, room;
		int send, recv;
	} rows[] = {
		{0, 16, -EMSGSIZE, 0},
		{1, 16, 0, 1},
		{16, 16, 0, 16},
		{17, 16, 0, -EMSGSIZE},
		{EXL3_PACKET_MAX, EXL3_PACKET_MAX, 0, EXL3_PACKET_MAX},
		{EXL3_PACKET_MAX + 1, EXL3_PACKET_MAX, -EMSGSIZE, 0},
	};
	static char data[EXL3_PACKET_MAX + 1], buf[EXL3_PACKET_MAX];

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		struct exl3_error err;
		int s[2], out[1];
		unsigned n;

		open_pair(s);
		memset(data, (int)i + 1, sizeof(data));
		test_code(exl3_frame_send(s[0], data, rows[i].sent, &s[0], 1, 0, &err),
			  rows[i].send, &err);
		if (rows[i].send == 0) {
			int before = test_count_fds();

			test_code(exl3_frame_recv(s[1], buf, rows[i].room, out, 1, &n, 0, &err),
				  rows[i].recv, &err);
			if (n) {
				assert_memory_equal(buf, data, rows[i].sent);
				close(out[0]);
			}
			assert_int_equal(test_count_fds(), before);
			/* The packet is used up either way. */
			test_code(
				exl3_frame_recv(s[1], buf, 1, out, 1, &n, EXL3_FRAME_NOWAIT, &err),
				-EAGAIN, &err);
		}
		close_pair(s);
	}
}

static void nowait_on_a_full_socket(void **state)
{
	static char data[4096];
	struct exl3_error err;
	int s[2], e = 0, sent = 0;

	(void)state;
	open_pair(s);
	while (e == 0 && sent++ < 100000)
		e = exl3_frame_send(s[0], data, sizeof(data), NULL, 0, EXL3_FRAME_NOWAIT, &err);
	test_code(e, -EAGAIN, &err);
	close_pair(s);
}

static void hang_up(void **state)
{
	struct exl3_error err;
	int s[2], out[1];
	unsigned n;
	char buf[8];

	(void)state;
	open_pair(s);
	exl3_closep(&s[0]);
	test_code(exl3_frame_recv(s[1], buf, sizeof(buf), out, 1, &n, 0, &err), -ECONNRESET, &err);
	test_code(exl3_frame_send(s[1], "a", 1, NULL, 0, 0, &err), -EPIPE, &err);
	close_pair(s);

	open_pair(s); /* an empty packet cannot be told from a hang-up and is taken for one */
	assert_int_equal(send(s[0], "", 0, 0), 0);
	test_code(exl3_frame_recv(s[1], buf, sizeof(buf), out, 1, &n, 0, &err), -ECONNRESET, &err);
	close_pair(s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(fds_up_to_the_limit),     test_case(surplus_is_closed),
		test_case(no_room_for_fds),         test_case(sizes),
		test_case(nowait_on_a_full_socket), test_case(hang_up),
	};

	return cmocka_run_group_tests_name("frame", tests, NULL, NULL);
}
