/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mapper.h - clients that have a model's weights in their own process: who they are, and how they are asked to
 * let go.
 *
 * A mapper is one client and one model. What ties both sides together is a socket pair and a page that both map:
 *
 *   MAPPED -> the client closes its end, or dies -> freed
 *   MAPPED -> REVOKED (the page says so, our half of the socket ends) -> the client closes its end -> freed
 *
 * While there is one the model stays: an unload waits for its mappers, which are told to go unless somebody
 * wants to wait for them. It ends with its client's connection at the latest. Loop thread.
 */
#ifndef EXL3_DAEMON_MAPPER_H
#define EXL3_DAEMON_MAPPER_H

#include "daemon/peer.h"

struct exl3_mapper;

#define EXL3_MAP_FDS 4u /* slab, table, page, socket */

/**
 * exl3_mapper_new() - one more for @reg, which is READY.
 * @fds: for the client: the first three are borrowed from the model and the mapper, the last is the caller's to close.
 * Returns 0, -EPERM (its tenant may not), -EBUSY (it has it mapped), -EOPNOTSUPP (the slab has no descriptor), -EIO (the
 * supervisor, which has to know, cannot be told), -ENOMEM, -EMFILE.
 */
int exl3_mapper_new(struct exl3_peer *peer, struct exl3_registered *reg, int fds[EXL3_MAP_FDS],
		    struct exl3_error *err);
/* Nobody waits for it: it is told, and stays until its client has let go. */
void exl3_mapper_revoke(struct exl3_mapper *m);
/* All of a client. */
void exl3_mappers_free(struct exl3_peer *peer);
void exl3_mappers_revoke(struct exl3_peer *peer);
/* For exl3_models.revoke: all of a model; @worker is a struct exl3_worker. */
void exl3_mappers_revoke_model(void *worker, struct exl3_registered *reg);

/* Of a client; and how many of them were told to go. */
uint32_t exl3_mapper_count(const struct exl3_peer *peer, uint32_t *revoked);

#endif
