/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep.h - descriptors of loaded weights that outlive the worker that loaded them: held by the supervisor
 * and, where there is systemd, in its store too, so that they outlive the supervisor.
 *
 * Of what is kept only the manifest's head is read (sizes, names): checking the rest is for the worker
 * that adopts it. Bounded: EXL3_MODELS_MAX sets of EXL3_KEPT_FDS descriptors. Supervisor's thread only.
 */
#ifndef EXL3_DAEMON_KEEP_H
#define EXL3_DAEMON_KEEP_H

#include "daemon/config.h"
#include "daemon/loop.h"
#include "daemon/manifest.h"

#define EXL3_KEEP_MAPPED_ID 1ull /* bit of a set's id: it is mapped; what else the id is stays the same */

/* What is kept of one model. */
struct exl3_keep_set {
	struct exl3_keep_set *next;
	struct exl3_manifest_head head;
	int fds[EXL3_KEPT_FDS]; /* owned: manifest, slabs, tensor file */
	unsigned nr_fds;
	uint64_t id;        /* in the names of systemd's store */
	uint32_t users;     /* a bit per domain whose worker uses it */
	bool in_store;
	/* A client has had it mapped where that cannot be kept from writing, and may have it still: whoever adopts it
	 * verifies all of it, for good. */
	bool mapped;
};

struct exl3_keep {
	struct exl3_loop *loop; /* borrowed; closing the last descriptor of a slab takes long */
	struct exl3_keep_set *sets; /* in the order of their names */
	unsigned nr;
};

void exl3_keep_init(struct exl3_keep *keep, struct exl3_loop *loop);
/* Closes all of them; systemd's stay in its store. */
void exl3_keep_fini(struct exl3_keep *keep);

/**
 * exl3_keep_put() - keep a set, in place of an older one of that model, and give it to systemd's store.
 * @fds: taken in any case.
 * Returns 0, -EINVAL (not what a manifest's head says), -EOPNOTSUPP (another version), -EDQUOT, -ENOMEM.
 */
int exl3_keep_put(struct exl3_keep *keep, const char *name, int *fds, unsigned nr_fds,
		  struct exl3_error *err);
/* A client maps it; systemd's store remembers that too. */
void exl3_keep_mark_mapped(struct exl3_keep_set *set);
struct exl3_keep_set *exl3_keep_find(const struct exl3_keep *keep, const char *name);
/* Lets go of it, in the store too; false: there was nothing. */
bool exl3_keep_drop(struct exl3_keep *keep, const char *name);

/**
 * exl3_keep_inherit() - take over what systemd has stored, as it comes with $LISTEN_FDS.
 * Sets that are not complete, or of another version, are dropped; each with a line in the log.
 */
void exl3_keep_inherit(struct exl3_keep *keep);
/* Is the descriptor of that name (as in $LISTEN_FDNAMES) one of ours? */
bool exl3_keep_is_ours(const char *fd_name);

/* After inherit or a takeover: drops what the configuration no longer names, and adds to it what clients had loaded.
 * Where tenants may map weights, those on a GPU count as mapped: clients of the earlier daemon may have them still. */
void exl3_keep_settle(struct exl3_keep *keep, struct exl3_config *cfg);

#endif
