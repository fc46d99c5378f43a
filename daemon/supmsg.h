/* SPDX-License-Identifier: Apache-2.0 */
/*
 * supmsg.h - what supervisor and worker tell each other: one packet each, a header, a text, descriptors.
 *
 * The supervisor never waits for a worker: what does not fit into the socket waits in the domain's queue
 * (domain.c). A worker may wait for the supervisor, which reads all the time.
 */
#ifndef EXL3_DAEMON_SUPMSG_H
#define EXL3_DAEMON_SUPMSG_H

#include "shm/exl3_abi.h"
#include "shm/util.h"

#include <limits.h>
#include <stdbool.h>

/* The descriptor that a worker is started with, and its exit statuses. */
#define EXL3_WORKER_CONTROL_FD 3
#define EXL3_WORKER_REFUSED    78 /* cannot serve as configured: a restart would not help */
#define EXL3_WORKER_NO_MPS     79 /* cannot serve inside of the MPS server that it was given */

#define EXL3_SUP_TEXT_MAX (PATH_MAX + EXL3_NAME_MAX + 128) /* NAME=DIR,device=D */

enum exl3_sup_type {
	/* to the worker, at its start, in this order */
	EXL3_SUP_HELLO, /* instance, generation, pid, interval_ns: how often a BEAT is wanted; text: the
			   domain's name */
	EXL3_SUP_KEY,   /* text KEY=VALUE */
	EXL3_SUP_MODEL, /* text NAME=DIR; flag BY_CLIENT: loaded since the start */
	EXL3_SUP_MPS,   /* text: pipe folder of the MPS server that it is in; none: no such message */
	EXL3_SUP_GO,
	/* to the worker, later */
	EXL3_SUP_DRAIN,
	EXL3_SUP_LEAVE,  /* drain once all clients have gone, or after EXL3_LEAVE_NS */
	EXL3_SUP_RELOAD, /* KEY, MODEL and GO follow; without GO nothing counts */
	EXL3_SUP_CLIENT, /* one descriptor: a client that has connected; flag GREETED: its Hello of request
			    request_id came to another domain's worker, the answer is still owed; text: its name */
	EXL3_SUP_LOAD,   /* text NAME=DIR: another domain has loaded it */
	EXL3_SUP_UNLOAD, /* text NAME: another domain was told to */
	EXL3_SUP_KEPT,   /* text NAME, id; descriptors: manifest, slab and, if it has one, tensor file: adopt
			    them; flag VERIFY_ALL */
	EXL3_SUP_ALONE,  /* text NAME: nothing is kept of it: read its files */
	EXL3_SUP_EVENT,  /* text of exl3_event_format(); also at the start, after HELLO */
	/* from the worker */
	EXL3_SUP_OPEN,    /* its loop turns: clients may come */
	EXL3_SUP_READY,   /* all models of the start are loaded */
	EXL3_SUP_STATUS,  /* text for systemctl status */
	EXL3_SUP_BEAT,    /* the loop turns */
	EXL3_SUP_ADDED,   /* text NAME=DIR: it is being loaded; load it after a restart too */
	EXL3_SUP_LOADED,  /* text NAME: one that was ADDED is ready */
	EXL3_SUP_FAILED,  /* text NAME: one that was ADDED, or came with LOAD, is not */
	EXL3_SUP_REMOVED, /* text NAME: a client unloads it */
	EXL3_SUP_PASS,     /* one descriptor: a client that wants another domain; text DOMAIN and, behind a
			      newline, its name; request_id of its Hello */
	EXL3_SUP_DRAINING, /* a client asks for the end of the daemon */
	EXL3_SUP_WANT,     /* text NAME: about to load it; KEPT or ALONE is the answer, maybe after another
			      worker's load */
	EXL3_SUP_KEEP,     /* text NAME, descriptors as for KEPT: it is loaded, keep them for others; maybe a
			      second line: why those that were KEPT were not adopted */
	EXL3_SUP_ADOPTED,  /* text NAME: KEPT ones are in use; maybe a second line: why no new ones */
	EXL3_SUP_USELESS,  /* text NAME and a second line, why; id: the KEPT ones were refused, drop them; also a
			      WANT; flag DAMAGED */
	EXL3_SUP_STALE,    /* text NAME; id: the files are others than those of the KEPT ones; a WANT of newer
			      ones */
	EXL3_SUP_OVER,     /* text NAME: its load is over and there is nothing to keep */
	EXL3_SUP_REASON,   /* text: why it is about to end */
	EXL3_SUP_MAPPED,   /* text NAME: a client is about to map its weights, and could write into them */
	/* both ways, as REMOVED and UNLOAD */
	EXL3_SUP_LEAVING,  /* text NAME: as REMOVED, but clients that map it are waited for */
	EXL3_SUP_REVOKE    /* text NAME: one that was LEAVING: they are not waited for any more */
};

#define EXL3_LEAVE_NS 2000000000ull

#define EXL3_SUP_BY_CLIENT  (1u << 0)
#define EXL3_SUP_GREETED    (1u << 3)
#define EXL3_SUP_VERIFY_ALL (1u << 1) /* hash all of it, not samples */
#define EXL3_SUP_DAMAGED    (1u << 2) /* a hash is wrong: whoever else uses them has wrong weights too */

struct exl3_sup_msg {
	uint32_t type;
	uint32_t flags;
	uint32_t generation;
	int32_t pid;
	uint64_t instance;
	uint64_t interval_ns;
	uint64_t request_id;
	uint64_t id; /* of kept weights */
	char text[EXL3_SUP_TEXT_MAX]; /* as long as the packet says, ends with a zero */
};

/**
 * exl3_sup_send() - send a message, all of it or nothing.
 * @text: cut to what fits; NULL: none.
 * @fds:  @nr_fds of them, at most EXL3_FDS_MAX; stay the caller's.
 * @wait: false: -EAGAIN instead of waiting for room.
 * Returns 0 or a negative errno.
 */
int exl3_sup_send(int sock, struct exl3_sup_msg *msg, const char *text, const int *fds,
		  unsigned nr_fds, bool wait);

/**
 * exl3_sup_recv() - take the next message.
 * @fds: room for EXL3_FDS_MAX; those that came are the caller's.
 * Returns 1, 0 (none now), -EPROTO (a descriptor did not fit into this process: the message counts, its
 * descriptors are lost) or -ECONNRESET (the other side is gone, or speaks something else).
 */
int exl3_sup_recv(int sock, struct exl3_sup_msg *msg, int *fds, unsigned *nr_fds, bool wait);

#endif
