/* SPDX-License-Identifier: Apache-2.0 */
/* config_priv.h - what config.c, which has the table of keys, and config_file.c, which reads, share. */
#ifndef EXL3_DAEMON_CONFIG_PRIV_H
#define EXL3_DAEMON_CONFIG_PRIV_H

#include "daemon/config.h"

enum key_type {
	KEY_STRING, /* char * */
	KEY_ENUM,   /* char *, one of a list */
	KEY_INT,    /* int64_t in min..max */
	KEY_UINT,   /* uint64_t in min..max */
	KEY_BYTES,  /* uint64_t in min..max, with K, M, G or T (powers of 1024) */
	KEY_BOOL,
	KEY_MODEL,  /* repeatable, exl3_config_add_model() */
	KEY_DOMAIN, /* repeatable, exl3_config_add_domain() */
	KEY_TENANT, /* repeatable, exl3_config_add_tenant() */
};

struct key {
	const char *name;
	enum key_type type;
	size_t offset;
	const char *fallback; /* default, in the words of a file; NULL: none */
	int64_t min, max;
	const char *choices; /* KEY_ENUM: separated by '|' */
	bool reload;         /* taken over by a running daemon */
	const char *help;
};

/* The row of that name, or NULL. */
const struct key *exl3_config_find_key(const char *name, size_t len);
/* The key that was most likely meant, or NULL. */
const char *exl3_config_nearest_key(const char *name);
/* One value, in the words of a file. -EINVAL (what is wrong with it) or -ENOMEM. */
int exl3_config_set_key(struct exl3_config *cfg, const struct key *key, const char *value,
			struct exl3_error *err);
/* A copy of @value instead of what *@at owns. -ENOMEM. */
int exl3_config_set_string(char **at, const char *value);
/* Nothing but the defaults of the table; what @cfg had is not freed. */
int exl3_config_set_defaults(struct exl3_config *cfg, struct exl3_error *err);

#endif
