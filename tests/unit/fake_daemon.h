/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_daemon.h - a daemon of one client in a thread, which answers as told: also wrongly, late, or never.
 *
 * It knows one model, "m", whose modules take any name; a linear request fills no memory, it just
 * completes. For tests of libexl3 only.
 */
#ifndef EXL3_TESTS_FAKE_DAEMON_H
#define EXL3_TESTS_FAKE_DAEMON_H

#include "shm/segment.h"

#include <pthread.h>

#define FAKE_CHANNELS 4

/* What is wrong with the answer to the next request; good again after it. */
enum fake_fault {
	FAKE_GOOD,
	FAKE_REFUSE, /* -EDQUOT and a sentence */
	FAKE_POSITIVE_CODE,
	FAKE_WRONG_ID,
	FAKE_GARBAGE,
	FAKE_NO_BODY,
	FAKE_OTHER_INSTANCE,
	FAKE_OTHER_VERSION, /* Hello */
	FAKE_NO_FDS,
	FAKE_SURPLUS_FD,
	FAKE_WRONG_SIZE, /* of the segment */
	FAKE_UNSEALED,
	FAKE_BAD_HEADER, /* of the ring */
	FAKE_OTHER_ENTRIES,
	FAKE_OTHER_FINGERPRINT,
	FAKE_HANG_UP, /* instead of an answer */
	FAKE_TURN_AWAY,        /* a reply with id 0, then the end */
	FAKE_TURN_AWAY_UNREAD, /* the next connection: the same, and nothing of it is read */
};

/* What happens to ring requests. */
enum fake_mode {
	FAKE_ANSWER,
	FAKE_HOLD,       /* taken, and answered when the mode changes */
	FAKE_REVERSE,    /* taken in groups of three, answered the last one first */
	FAKE_WRONG_USER, /* answered with a user_data that nobody sent */
	FAKE_TOO_MANY,   /* the tail runs ahead of what was asked */
};

struct fake_daemon {
	char dir[32], path[64];
	int listen_fd, conn, wake_fd;
	pthread_t thread;
	uint32_t fault, mode, die, end_channels, stop; /* atomic */
	uint32_t taken;                                /* atomic; ring requests seen so far */
	struct fake_channel {
		struct exl3_segment *seg;
		struct exl3_ring_server ring;
		int kick_fd, notify_fd;
		struct exl3_sqe held[64];
		uint32_t nr_held;
	} channels[FAKE_CHANNELS];
	unsigned nr_channels;
};

void fake_start(struct fake_daemon *d);
void fake_stop(struct fake_daemon *d); /* also after fake_die() */
void fake_fault(struct fake_daemon *d, enum fake_fault fault);
void fake_mode(struct fake_daemon *d, enum fake_mode mode);
/* As if killed: all its descriptors close, it answers nothing any more. Returns when that has happened. */
void fake_die(struct fake_daemon *d);
/* Fails all channels and keeps the connection. */
void fake_end_channels(struct fake_daemon *d);
/* Waits until so many ring requests have been taken. */
void fake_wait_taken(struct fake_daemon *d, uint32_t n);

#endif
