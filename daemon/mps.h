/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mps.h - MPS control daemons of a fault domain: one per generation, children of the supervisor.
 *
 * A fault in one client of an MPS server ends the contexts of all of its clients, and the server takes no
 * newcomers while one of them is left. So each generation of a domain has a server of its own, with folders
 * of its own. One whose worker has died is retired: told to quit, it ends when its last client has left.
 *
 * Nothing here waits: the control program runs as a child, its socket is looked for by a timer, its end
 * comes by SIGCHLD. It may crash, hang or be missing; each ends in one of the two calls below.
 *
 *   STARTING -> UP (its socket is there) -> RETIRED (quit was sent) -> gone
 *   STARTING -> gone (too slow, or it ended): up() with a reason     UP -> gone (it ended): lost()
 *
 * Who may join: only root's server takes other users (tests/gpu/facts/mps_control.cu), and only the domain's
 * users can enter its folder (mps_acl.h).
 */
#ifndef EXL3_DAEMON_MPS_H
#define EXL3_DAEMON_MPS_H

#include "daemon/loop.h"

#include <sys/types.h>

#define EXL3_MPS_OLD_MAX  4u /* retired ones of a domain; the oldest of more is killed, with its clients' contexts */
#define EXL3_MPS_START_NS 10000000000ull /* until the control daemon's socket must be there */
#define EXL3_MPS_DIR_MAX  88u /* of a pipe folder: the sockets in it have 20 bytes more, and 108 at most */

struct exl3_mps_server;

struct exl3_mps {
	struct exl3_loop *loop; /* borrowed, as the next three */
	const char *program;    /* nvidia-cuda-mps-control, or its path */
	const char *base;       /* folder of exl3_mps_base() */
	unsigned index;         /* of the domain */
	/* Makes a folder that was just made one of the domain's users; or again, when they are others. */
	int (*protect)(void *arg, const char *dir, struct exl3_error *err);
	/* The start has ended: 0, or a negative errno and why. Not called after exl3_mps_stop(). */
	void (*up)(void *arg, int code, const char *why);
	/* The one that was up has ended by itself: its clients' contexts are lost. */
	void (*lost)(void *arg, const char *why);
	void *arg;

	struct exl3_mps_server *now; /* owned; STARTING or UP, or NULL */
	struct exl3_mps_server *old; /* owned list, the newest first */
	unsigned nr_old;
};

/**
 * exl3_mps_base() - make the folder that all control daemons of this socket have theirs in, and remove what dead
 * supervisors have left there.
 * @socket: path of the daemon's socket; the folder is beside it, with .mps in place of .sock.
 * @ret: 104 bytes.
 * Returns 0, -EEXIST (something else is there, or somebody else's), -ENAMETOOLONG, ...
 */
int exl3_mps_base(const char *socket, char *ret, struct exl3_error *err);

/* Is there such a program? Looks into $PATH as the start would. */
bool exl3_mps_program_exists(const char *program);

/* Starts the control daemon of @generation; there must be none now. */
int exl3_mps_start(struct exl3_mps *mps, uint32_t generation, struct exl3_error *err);
/* The pipe folder of the one that is up; NULL: there is none. */
const char *exl3_mps_pipe(const struct exl3_mps *mps);
/* The log folder belonging to a pipe folder. @ret: EXL3_MPS_DIR_MAX + 8 bytes. */
void exl3_mps_log_dir(const char *pipe, char *ret);
/* The domain's users are others: so are those who may enter its folders. */
void exl3_mps_protect(struct exl3_mps *mps);
/* Its worker has died: it takes no newcomers and ends with its last client. */
void exl3_mps_retire(struct exl3_mps *mps);
/* waitpid() has returned @pid; false: it is none of these. */
bool exl3_mps_ended(struct exl3_mps *mps, pid_t pid, int wstatus);
/* All of them end, those with clients after a second. */
void exl3_mps_stop(struct exl3_mps *mps);
/* Are there processes of it? */
bool exl3_mps_busy(const struct exl3_mps *mps);
/* Without waiting: kills what is left and forgets it. */
void exl3_mps_fini(struct exl3_mps *mps);

#endif
