/* SPDX-License-Identifier: Apache-2.0 */
/*
 * takeover.h - one daemon gives everything that it keeps to another one, which serves in its place.
 *
 * Over the running daemon's admin socket (admin.h), one packet each:
 *
 *   new: "takeover 2"
 *   old: "listen 0|1", fds: listening socket, its lock unless 1: the socket is systemd's
 *        "model NAME=DIR,device=D"    for each that a client has loaded
 *        "kept NAME", fds             for each kept set; "mapped NAME": a client may be able to write it
 *        "end"
 *   new: "ready", once its workers have all models; again as long as the answer is "wait"
 *   old: "go"
 *   new: "serving", once it accepts clients
 *   old: accepts nobody any more, its clients have a moment, then it drains and leaves
 *
 * The listening socket is open in one of them at any time, and accepted from by one at least, between "go" and
 * "serving" by both, so nobody who connects is refused or waits. Until "serving" nothing has changed for the old
 * daemon: if the new one goes away, it goes on, and clients that the new one had are its again. If the old one
 * ends before "go", the new one serves in its place. So there is one new daemon at a time: others get
 * "error TEXT", as all do while the old one drains.
 */
#ifndef EXL3_DAEMON_TAKEOVER_H
#define EXL3_DAEMON_TAKEOVER_H

#include "daemon/listen.h"
#include "daemon/share.h"

#define EXL3_TAKEOVER_VERSION "2"

/* The old side's place in the list. NONE -> SENDING -> SENT -> GOING ("go" was said) -> DONE ("serving" was heard). */
struct exl3_takeover {
	enum {
		EXL3_TAKEOVER_NONE,
		EXL3_TAKEOVER_SENDING,
		EXL3_TAKEOVER_SENT,
		EXL3_TAKEOVER_GOING,
		EXL3_TAKEOVER_DONE
	} state;
	enum { EXL3_TAKEOVER_LISTEN, EXL3_TAKEOVER_MODELS, EXL3_TAKEOVER_KEPT, EXL3_TAKEOVER_END } part;
	size_t model;                 /* next one of the configuration */
	char last[EXL3_NAME_MAX + 1]; /* kept set that was sent last; they are in the order of their names */
};

void exl3_takeover_begin(struct exl3_takeover *t);
/* Sends what the socket takes: 0: all (SENT), -EAGAIN: call again when it can be written, or an error. */
int exl3_takeover_feed(struct exl3_takeover *t, int sock, const struct exl3_listener *listener,
		       struct exl3_share *share);

/**
 * exl3_takeover_fetch() - the new side, until "end". Waits, for some seconds at most.
 * @cfg: names the socket; gets the models that clients had loaded.
 * @ret: takes the place of exl3_listener_open(); not to be listened on before "go".
 * @sock: the connection, for exl3_takeover_ready().
 * Returns 0, -ENOENT (no daemon there), -EACCES, -EPROTO, -EOPNOTSUPP (another version), -ETIMEDOUT.
 */
int exl3_takeover_fetch(struct exl3_config *cfg, struct exl3_keep *keep, struct exl3_listener *ret,
			int *sock, struct exl3_error *err);
/* Says "ready": 1: "go" (or the old daemon has gone meanwhile), 0: "wait", try again a little later. Waits for
 * the answer, for a second at most. */
int exl3_takeover_ready(int sock);
/* After "go", and after the first client can be accepted: says "serving". Nobody may be there to hear it. */
void exl3_takeover_serving(int sock);

#endif
