/* SPDX-License-Identifier: Apache-2.0 */
/*
 * share.h - one copy of a model's weights for the workers of all domains: who loads it, who adopts it.
 *
 * A worker that is about to load a model asks first (WANT). What is kept is handed to it (KEPT); if
 * another domain's worker loads it at this moment, the answer waits for that; else it is told to read the
 * files (ALONE) and others wait for it. A loader that dies or gives up makes the next one the loader.
 */
#ifndef EXL3_DAEMON_SHARE_H
#define EXL3_DAEMON_SHARE_H

#include "daemon/domain.h"
#include "daemon/keep.h"

struct exl3_share_load;

struct exl3_share {
	const struct exl3_config *cfg; /* borrowed, as the next two */
	struct exl3_domain *domains;
	const uint32_t *nr_domains;
	struct exl3_keep keep;
	struct exl3_share_load *loads; /* owned */
};

void exl3_share_init(struct exl3_share *share, const struct exl3_config *cfg,
		     struct exl3_domain *domains, const uint32_t *nr_domains,
		     struct exl3_loop *loop);
void exl3_share_fini(struct exl3_share *share);

/* What a worker says: WANT, KEEP (takes @fds), ADOPTED, USELESS, STALE, OVER, MAPPED; true if it was one of these. */
bool exl3_share_message(struct exl3_share *share, struct exl3_domain *d,
			const struct exl3_sup_msg *msg, int *fds, unsigned nr_fds);
/* A model is not wanted any more, by any domain. */
void exl3_share_removed(struct exl3_share *share, const char *name);
/* A domain's worker has ended. */
void exl3_share_ended(struct exl3_share *share, struct exl3_domain *d);
/* Names of the domains that use a set, with spaces between. */
void exl3_share_users(const struct exl3_share *share, const struct exl3_keep_set *set, char *text,
		      size_t size);

#endif
