/* SPDX-License-Identifier: Apache-2.0 */
/* map.h - reads the table of a mapped model (shm/exl3_map.h) and makes what kernels want of it. */
#ifndef EXL3_KERNELS_MAP_H
#define EXL3_KERNELS_MAP_H

#include "kernels/module.h"
#include "shm/exl3_map.h"

/* A table that was checked, mapped read-only; it cannot change. */
struct exl3_map {
	const struct exl3_map_head *head; /* the mapping's beginning */
	const struct exl3_map_matrix *matrices;
	const struct exl3_map_module *modules;
	const uint32_t *shards;
	const struct exl3_map_expert *experts;
	const char *names;
};

/**
 * exl3_map_read() - map a table and check all of it.
 * @fd: stays the caller's; may come from anybody.
 * Returns 0 (exl3_map_fini()), -EINVAL (not sealed, broken, contradicts itself; the sentence says where),
 * -EOPNOTSUPP (another version), -ENOMEM. Any thread.
 */
int exl3_map_read(int fd, struct exl3_map *ret, struct exl3_error *err);
void exl3_map_fini(struct exl3_map *map); /* zeroed ones too */

/* Its modules, on a device. */
struct exl3_map_modules {
	const struct exl3_backend_ops *ops; /* borrowed, as the next */
	struct exl3_dev *dev;
	struct exl3_matrix *matrices;       /* owned, as everything below */
	const struct exl3_matrix **shards;
	struct exl3_expert *experts;
	struct exl3_module_desc *list;      /* sorted as in the table */
	uint32_t nr;
};

/**
 * exl3_map_build() - matrices and modules with addresses in @slab.
 * @map: from exl3_map_read(); names are borrowed from it.
 * @slab: of at least head->slab_bytes, on @dev; borrowed.
 * Returns 0 (exl3_map_modules_fini()), -ENOMEM, or what the backend says. A block that this device cannot run is
 * left out, as the daemon does.
 */
int exl3_map_build(const struct exl3_map *map, const struct exl3_slab *slab, const struct exl3_backend_ops *ops,
		   struct exl3_dev *dev, struct exl3_map_modules *ret, struct exl3_error *err);
void exl3_map_modules_fini(struct exl3_map_modules *m); /* zeroed ones too; nothing of it runs any more */

/* By the daemon's canonical name; NULL: there is none. Any thread. */
const struct exl3_module_desc *exl3_map_find(const struct exl3_map_modules *m, const char *name,
					     enum exl3_module_kind kind);

#endif
