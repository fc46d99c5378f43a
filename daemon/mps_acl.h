/* SPDX-License-Identifier: Apache-2.0 */
/* mps_acl.h - who may enter the folder of a domain's MPS server: the domain's users, nobody else. */
#ifndef EXL3_DAEMON_MPS_ACL_H
#define EXL3_DAEMON_MPS_ACL_H

#include "daemon/config.h"

/**
 * exl3_mps_acl_make() - what a folder's access list has to be, as the kernel takes it.
 * @domain: 0 "default", else index in cfg->domains plus 1.
 * @ret: owned by the caller (free()); NULL: everybody may, a mode says that.
 * Returns its bytes or -ENOMEM.
 */
int exl3_mps_acl_make(const struct exl3_config *cfg, size_t domain, void **ret);

/* Sets mode or access list of a folder of ours. -EOPNOTSUPP: its file system has no such lists. */
int exl3_mps_acl_set(const char *dir, const struct exl3_config *cfg, size_t domain,
		     struct exl3_error *err);

#endif
