/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mps_acl.c - who may enter the folder of a domain's MPS server: the domain's users, nobody else.
 *
 * The name of the folder is no secret (/proc/net/unix lists the sockets in it), so the kernel has to say no. A
 * mode knows one user and one group; POSIX access lists know many:
 *
 *   a domain of its own:  its users and groups may enter, all others may not
 *   "default":            users and groups of other domains may not, all others may
 *
 * As in exl3_config_domain_of(), a user counts before a group. Somebody who is in a group of one domain and in
 * another group of the folder's list may enter what either lets him.
 *
 * The server of a daemon that is not root's serves that user alone: mode 0700.
 */
#include "daemon/mps_acl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

/* As linux/posix_acl_xattr.h; little endian. */
#define VERSION 2u
enum { USER_OBJ = 1, USER = 2, GROUP_OBJ = 4, GROUP = 8, MASK = 16, OTHER = 32 };
#define ENTER 1u
#define ALL   7u
#define NO_ID UINT32_MAX

#define NOGROUP 65534u /* of Debian and most others */

struct entry {
	uint16_t tag, perm;
	uint32_t id;
};

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && sizeof(struct entry) == 8,
	       "the kernel's format, written as it lies in memory");

static int by_tag_and_id(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;

	if (x->tag != y->tag)
		return x->tag < y->tag ? -1 : 1;
	return x->id < y->id ? -1 : x->id > y->id;
}

int exl3_mps_acl_make(const struct exl3_config *cfg, size_t domain, void **ret)
{
	uint16_t others = domain ? 0 : ENTER;
	size_t nr = 4, kept = 0;
	struct entry *list;
	uint32_t *head;

	*ret = NULL;
	if (!cfg->nr_domains)
		return 0;
	for (size_t i = 0; i < cfg->nr_domains; i++)
		nr += cfg->domains[i].nr_ids;
	head = malloc(sizeof(*head) + nr * sizeof(*list));
	if (!head)
		return -ENOMEM;
	list = (struct entry *)(head + 1);
	nr = 0;
	list[nr++] = (struct entry){USER_OBJ, ALL, NO_ID};
	list[nr++] = (struct entry){GROUP_OBJ, others, NO_ID};
	list[nr++] = (struct entry){MASK, ALL, NO_ID};
	list[nr++] = (struct entry){OTHER, others, NO_ID};
	for (size_t i = 0; i < cfg->nr_domains; i++) {
		/* Users of third domains are among the others; only a user, who counts before a group, must be
		 * kept out by name of a domain whose group he is in. */
		for (size_t j = 0; j < cfg->domains[i].nr_ids; j++) {
			const struct exl3_config_id *id = &cfg->domains[i].ids[j];
			bool ours = domain == i + 1;

			if (domain && !ours && id->group)
				continue;
			list[nr++] = (struct entry){id->group ? GROUP : USER, ours ? ENTER : 0, id->id};
		}
	}
	qsort(list, nr, sizeof(*list), by_tag_and_id);
	for (size_t i = 0; i < nr; i++) { /* one that is named twice in a domain's list */
		if (!kept || by_tag_and_id(&list[kept - 1], &list[i]) != 0)
			list[kept++] = list[i];
	}
	*head = VERSION;
	*ret = head;
	return (int)(sizeof(*head) + kept * sizeof(*list));
}

int exl3_mps_acl_set(const char *dir, const struct exl3_config *cfg, size_t domain,
		     struct exl3_error *err)
{
	exl3_auto(exl3_freep) void *acl = NULL;
	int bytes;

	if (geteuid() != 0 || !cfg->nr_domains) {
		if (chmod(dir, geteuid() == 0 ? 0711 : 0700) < 0)
			return exl3_errf(err, -errno, "MPS: folder %s: %m", dir);
		return 0;
	}
	bytes = exl3_mps_acl_make(cfg, domain, &acl);
	if (bytes < 0)
		return exl3_errf(err, bytes, "MPS: out of memory");
	/* The owning group counts like those of the list; so it is one that nobody should be in. */
	if (chown(dir, (uid_t)-1, NOGROUP) < 0)
		return exl3_errf(err, -errno, "MPS: folder %s: %m", dir);
	if (setxattr(dir, "system.posix_acl_access", acl, (size_t)bytes, 0) < 0)
		return exl3_errf(err, -errno,
				 "MPS: folder %s cannot be kept for the domain's users: its file system takes no "
				 "access list: %m",
				 dir);
	return 0;
}
