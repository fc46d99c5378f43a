/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.h - settings of the daemon: one table of keys; from files, then from flags.
 *
 * Every key is a line "key = value" of the INI file and a flag "--key value". Files are read in this
 * order, a later value wins: the file, then NAME.conf.d/NN-xyz.conf beside it by name, then flags. A
 * section is only a heading, except [model NAME], whose keys are path and device, and [domain NAME],
 * whose key is users.
 */
#ifndef EXL3_DAEMON_CONFIG_H
#define EXL3_DAEMON_CONFIG_H

#include "shm/util.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXL3_MODELS_MAX      256
#define EXL3_DOMAINS_MAX     16u /* with the one that is always there: */
#define EXL3_DOMAIN_DEFAULT  "default"
#define EXL3_DOMAIN_NAME_MAX 32u
#ifndef EXL3_SYSCONFDIR /* of the Makefile */
#define EXL3_SYSCONFDIR "/etc"
#endif
#define EXL3_CONFIG_PATH EXL3_SYSCONFDIR "/exl3-daemon/exl3-daemon.conf"
#define EXL3_RUN_DIR     "/run/exl3-daemon"

struct exl3_config_model {
	char *name, *path; /* owned; path is absolute once finished */
	char *device;      /* owned or NULL: the daemon's */
	bool by_client; /* loaded at run time: a restarted worker goes on without it if it is refused */
	const void *asked; /* the supervisor's: domain that is loading it for a client; else NULL */
};

struct exl3_config_id {
	uint32_t id; /* of a user, or: */
	bool group;
};

/* A fault domain, see domain.h. */
struct exl3_config_domain {
	char *name, *users;         /* owned; users as it was written */
	struct exl3_config_id *ids; /* owned: what the names in it stand for */
	size_t nr_ids;
};

struct exl3_config {
	char *socket; /* owned */
	char *backend;
	char *device, *devices; /* owned or NULL */
	char *log_level;
	int64_t node; /* -1: not bound */
	uint64_t threads;
	uint64_t spin_us, chunk_us;
	uint64_t memory_max, gpu_memory_max, arena_max, workspace;
	uint64_t channels_max, clients_max;
	uint64_t queue_depth, merge_max;
	uint64_t drain_timeout_s, restart_limit, restart_window_s;
	uint64_t launch_timeout_s, hang_timeout_s;
	bool deterministic;
	char *adopt; /* owned; sample, verify or never */

	struct exl3_config_model *models; /* owned array */
	size_t nr_models;
	struct exl3_config_domain *domains; /* owned array, without "default"; the supervisor's only */
	size_t nr_domains;
};

struct exl3_config_args {
	bool help, version, check; /* what the command line asked for instead of a start */
	int worker_fd;             /* --worker FD, internal; else -1 */
};

/**
 * exl3_config_read() - defaults, files and flags, checked; for a worker only the defaults.
 * @argv: as main() got it.
 * Returns 0, -EINVAL (err names the file and line or the flag), -ENOENT (--config names no file),
 * -ENOMEM. A configuration that failed needs no exl3_config_fini().
 */
int exl3_config_read(int argc, char *const argv[], struct exl3_config *ret,
		     struct exl3_config_args *args, struct exl3_error *err);
/* Reads one file's text as if it had been the only file: for tests and the fuzzer. */
int exl3_config_parse_string(const char *text, struct exl3_config *ret, struct exl3_error *err);
void exl3_config_fini(struct exl3_config *cfg);

/* NAME=DIR[,device=D]; adds it or replaces the model of that name. */
int exl3_config_add_model(struct exl3_config *cfg, const char *spec, bool by_client,
			  struct exl3_error *err);
/* Forgets a model; nothing happens if there is none. */
void exl3_config_remove_model(struct exl3_config *cfg, const char *name);
/* 1..EXL3_NAME_MAX printable bytes without '=', ',', '/' or space; err says which is wrong. */
int exl3_config_check_name(const char *name, struct exl3_error *err);

/* Every key that has a value, one per call, as "key=value"; without the models. @i: 0 at first. False:
 * there are no more. */
bool exl3_config_setting(const struct exl3_config *cfg, size_t *i, char *text, size_t size);
/* Takes over one of them. */
int exl3_config_set(struct exl3_config *cfg, const char *text, struct exl3_error *err);

/* Keys that a running daemon takes over (SIGHUP); number of other keys that differ. */
unsigned exl3_config_reload(struct exl3_config *cfg, const struct exl3_config *fresh);

/* For config.c: the model of that name, made if there is none; NULL: @err. One value of it. Its end. */
struct exl3_config_model *exl3_config_model_get(struct exl3_config *cfg, const char *name,
						struct exl3_error *err);
int exl3_config_model_set(struct exl3_config_model *model, const char *key, const char *value,
			  struct exl3_error *err);
void exl3_config_model_fini(struct exl3_config_model *model);

/* NAME=USER,USER...: users by name or uid, groups as @NAME or @GID. -EINVAL: a name that is not known. */
int exl3_config_add_domain(struct exl3_config *cfg, const char *spec, struct exl3_error *err);
/* Whose connections these are: 0 "default", else the index in domains plus 1. A user counts before a group. */
size_t exl3_config_domain_of(const struct exl3_config *cfg, uint32_t uid, const uint32_t *gids,
			     size_t nr_gids);
/* Swaps the lists of users of both; false, and nothing happens, if they do not have the same domains. */
bool exl3_config_reload_domains(struct exl3_config *cfg, struct exl3_config *fresh);

/* For config.c, as for models. The last: once all are known. */
struct exl3_config_domain *exl3_config_domain_get(struct exl3_config *cfg, const char *name,
						  struct exl3_error *err);
int exl3_config_domain_set(struct exl3_config_domain *domain, const char *key, const char *value,
			   struct exl3_error *err);
void exl3_config_domain_fini(struct exl3_config_domain *domain);
int exl3_config_check_domains(const struct exl3_config *cfg, struct exl3_error *err);

void exl3_config_help(FILE *out);
/* Every key with the value that counts, as a file that could be read again. */
void exl3_config_print(const struct exl3_config *cfg, FILE *out);
int exl3_config_log_level(const struct exl3_config *cfg);

#endif
