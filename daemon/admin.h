/* SPDX-License-Identifier: Apache-2.0 */
/*
 * admin.h - the supervisor's own socket, SOCKET.admin: what is kept, the domains, and the hand-over to another daemon.
 *
 * For root and the daemon's own user (mode 0600, and the kernel is asked who connects). The supervisor
 * serves it itself, so it answers whatever the workers do, and little can be said: one line of text per
 * packet, at most EXL3_ADMIN_MAX connections, one that does not read its answers is closed.
 *
 *   "fds"          -> packets of lines, a line per kept descriptor:
 *                     MODEL, part, bytes, device, generation, users; tabs between; last packet: "ok"
 *   "domains"      -> a line per fault domain: name, state, generation, process, restarts, clients that wait,
 *                     MPS folder or -, what it says; tabs between; last packet: "ok"
 *   "events"       -> packets of lines as in proto/event.h; last packet: "ok"
 *   "drop NAME"    -> the daemon forgets what it keeps of that model: "ok", or "error TEXT"
 *   "takeover 2"   -> see takeover.h
 *   anything else  -> "error TEXT"
 */
#ifndef EXL3_DAEMON_ADMIN_H
#define EXL3_DAEMON_ADMIN_H

#include "daemon/listen.h"
#include "daemon/share.h"

#define EXL3_ADMIN_MAX 4u

struct exl3_admin;

/* What the supervisor does for it. */
struct exl3_admin_ops {
	/* Another daemon has everything and its workers are ready: may clients be its? */
	bool (*may_hand_over)(void *arg);
	/* It accepts them: they are its from now on. */
	void (*hand_over)(void *arg);
	/* Is this daemon on its way out, so that there is nothing to take over any more? */
	bool (*leaving)(void *arg);
	void *arg;
};

/* Makes the socket; all but @ret and @err are borrowed. Whoever has the listening socket owns the path, so
 * what is at it is stale. */
int exl3_admin_new(struct exl3_loop *loop, const struct exl3_listener *listener,
		   struct exl3_share *share, const struct exl3_admin_ops *ops,
		   struct exl3_admin **ret, struct exl3_error *err);
/* Another daemon has our listening socket, or is about to get it: the paths are not ours alone. */
bool exl3_admin_hands_over(const struct exl3_admin *admin);
/* @remove: its path too; not if that is another daemon's by now. NULL allowed. */
struct exl3_admin *exl3_admin_free(struct exl3_admin *admin, bool remove);

/* "SOCKET.admin"; -ENAMETOOLONG. */
int exl3_admin_path(const char *socket, char *path, size_t size, struct exl3_error *err);

#endif
