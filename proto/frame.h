/* SPDX-License-Identifier: Apache-2.0 */
/* frame.h - one message per SOCK_SEQPACKET packet, file descriptors attached; no policy. */
#ifndef EXL3_PROTO_FRAME_H
#define EXL3_PROTO_FRAME_H

#include "shm/exl3_abi.h"
#include "shm/util.h"

#include <stddef.h>

/* Bits of Hello.features. Unknown ones are ignored. */
#define EXL3_FEATURE_MAPPED (1ull << 0) /* MapModel, MapFailed */
#define EXL3_FEATURES       EXL3_FEATURE_MAPPED /* all that this version has */

#define EXL3_FRAME_NOWAIT  (1u << 0) /* -EAGAIN instead of sleeping */
#define EXL3_FRAME_KEEP    (1u << 1) /* descriptors that came are the caller's on errors too */
#define EXL3_FRAME_FDS_MAX 253u      /* what the kernel lets one packet carry */

/**
 * exl3_frame_send() - send one packet.
 * @data:  @bytes of it, 1..EXL3_PACKET_MAX.
 * @fds:   @nr_fds, 0..EXL3_FDS_MAX; stay the caller's, the packet carries duplicates.
 * @flags: EXL3_FRAME_NOWAIT or 0.
 * Returns 0, -EAGAIN, -EPIPE or -ECONNRESET (peer gone; never SIGPIPE), -EMSGSIZE, -EINVAL,
 * -ETOOMANYREFS (too many descriptors on their way). All or nothing.
 */
int exl3_frame_send(int sock, const void *data, size_t bytes, const int *fds, unsigned nr_fds,
		    unsigned flags, struct exl3_error *err);

/**
 * exl3_frame_recv() - receive one packet.
 * @buf:    room for @size bytes; give one more than the largest legal message or EXL3_PACKET_MAX.
 * @fds:    room for @max_fds, <= EXL3_FRAME_FDS_MAX; those received are the caller's, close-on-exec.
 * @nr_fds: count of them, 0 on any error: nothing is left open then, unless EXL3_FRAME_KEEP.
 * Returns the packet's length >= 1, -EAGAIN (nothing there), -ECONNRESET (the peer has closed, or sent an
 * empty packet), -EMSGSIZE (longer than @size), -EPROTO (more descriptors than @max_fds, or they did
 * not fit into this process). The packet is used up in every case but -EAGAIN and -EINTR.
 */
int exl3_frame_recv(int sock, void *buf, size_t size, int *fds, unsigned max_fds, unsigned *nr_fds,
		    unsigned flags, struct exl3_error *err);

#endif
