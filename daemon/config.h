/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.h - settings of the daemon: one table of keys; from files, then from flags.
 *
 * Every key is a line "key = value" of the INI file and a flag "--key value". Files are read in this
 * order, a later value wins: the file, then NAME.conf.d/NN-xyz.conf beside it by name, then flags. A
 * section is only a heading, except [model NAME], whose keys are path and device, [domain NAME],
 * whose key is users, and [tenant NAME], see config_tenant.c.
 */
#ifndef EXL3_DAEMON_CONFIG_H
#define EXL3_DAEMON_CONFIG_H

#include "shm/exl3_abi.h"
#include "shm/util.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXL3_MODELS_MAX      256
#define EXL3_DOMAINS_MAX     16u /* with the one that is always there: */
#define EXL3_DOMAIN_DEFAULT  "default"
#ifndef EXL3_SYSCONFDIR /* of the Makefile */
#define EXL3_SYSCONFDIR "/etc"
#endif
#define EXL3_CONFIG_PATH EXL3_SYSCONFDIR "/exl3-daemon/exl3-daemon.conf"
#define EXL3_RUN_DIR     "/run/exl3-daemon"

struct exl3_config_model {
	char *name, *path; /* owned; path is absolute once finished */
	char *device;      /* owned or NULL: the daemon's */
	bool device_tensors; /* a copy of the unquantized tensors in the device's memory */
	bool by_client; /* loaded at run time: a restarted worker goes on without it if it is refused */
	char *where; /* owned or NULL: FILE:LINE or the flag that names the path */
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

#define EXL3_TENANTS_MAX     64u /* with those that a reload dropped and that still hold something */
#define EXL3_TENANT_NAME_MAX 63u
#define EXL3_TENANT_DEFAULT  "default"

/* A range of uids or gids. */
struct exl3_config_ids {
	uint32_t first, last;
};

/* Words of a configuration, one space apart; users and groups as numbers too. */
struct exl3_config_list {
	char *text;                  /* owned or NULL */
	struct exl3_config_ids *ids; /* owned or NULL */
	size_t nr;                   /* words */
};

/* May a tenant's clients map the weights, and are they to without being asked? */
enum exl3_mapped_policy { EXL3_MAPPED_OFF, EXL3_MAPPED_ALLOW, EXL3_MAPPED_PREFER };

/* What a section [tenant NAME] says; every key of its table is a field. */
struct exl3_config_tenant {
	char *name; /* owned */
	struct exl3_config_list users, groups, cgroups, models;
	bool connect, admin;
	int64_t mapped; /* enum exl3_mapped_policy */
	int64_t cuda_ipc; /* -1: auto */
	uint64_t weight, priority;
	uint64_t clients, channels, rows, bytes, per_second, burst; /* limits; 0: none */
};

struct exl3_config {
	const char *reading; /* borrowed while it is read: FILE:LINE or a flag, for the models' where; else NULL */
	char *socket; /* owned */
	char *backend;
	char *device, *devices; /* owned or NULL */
	char *log_level;
	char *mps, *mps_control;
	int64_t node; /* -1: not bound */
	uint64_t threads;
	uint64_t spin_us, chunk_us, ready_spin_us, ready_timeout_s;
	uint64_t memory_max, gpu_memory_max, arena_max, workspace;
	char *kernel_table;   /* NULL or "none": none */
	char *metrics_socket; /* NULL: beside socket */
	uint64_t metrics_port;
	uint64_t channels_max, clients_max, clients_per_user;
	uint64_t queue_depth, merge_max;
	uint64_t drain_timeout_s, restart_limit, restart_window_s;
	uint64_t launch_timeout_s, hang_timeout_s;
	bool deterministic;
	char *adopt; /* owned; sample, verify or never */
	char *trains; /* owned; auto or off */

	struct exl3_config_model *models; /* owned array */
	size_t nr_models;
	struct exl3_config_domain *domains; /* owned array, without "default"; the supervisor's only */
	size_t nr_domains;
	struct exl3_config_tenant *tenants; /* owned array, in the order in which they match */
	size_t nr_tenants;
};

struct exl3_config_args {
	bool help, version, check; /* what the command line asked for instead of a start */
	bool takeover;             /* start in place of the daemon that serves on the socket */
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

/* NAME=DIR[,unquantized=U][,device=D] with all of it, so that nothing in the path is taken for an option. */
void exl3_config_model_spec(char *text, size_t size, const char *name, const char *path,
			    bool device_tensors, const char *device);
/* NAME=DIR[,device=D][,unquantized=U], in any order; adds it or replaces the model of that name. */
int exl3_config_add_model(struct exl3_config *cfg, const char *spec, bool by_client,
			  struct exl3_error *err);
/* Forgets a model; nothing happens if there is none. */
void exl3_config_remove_model(struct exl3_config *cfg, const char *name);
/* 1..EXL3_NAME_MAX printable bytes without '=', ',', '/' or space; err says which is wrong. */
int exl3_config_check_name(const char *name, struct exl3_error *err);

/* NAME:KEY=VALUE; makes the tenant if there is none of that name. */
int exl3_config_add_tenant(struct exl3_config *cfg, const char *spec, struct exl3_error *err);
int exl3_config_tenant_copy(struct exl3_config_tenant *ret, const struct exl3_config_tenant *t,
			    struct exl3_error *err);
/* A tenant with the defaults of all keys. */
int exl3_config_tenant_init(struct exl3_config_tenant *t, const char *name, struct exl3_error *err);
void exl3_config_tenant_fini(struct exl3_config_tenant *t);
/* (One of its users, or one of its groups, or it names neither) and one of its cgroups, or it names none.
 * @cgroup: NULL: not known, no pattern matches. */
bool exl3_config_tenant_matches(const struct exl3_config_tenant *t, uint32_t uid, uint32_t gid,
				const uint32_t *groups, size_t nr_groups, const char *cgroup);
/* Does a pattern of a list match? */
bool exl3_config_list_matches(const struct exl3_config_list *list, const char *text);

/* Every key that has a value, one per call, as "key=value", those of tenants too; without the models.
 * @i: 0 at first. False: there are no more. */
bool exl3_config_setting(const struct exl3_config *cfg, size_t *i, char *text, size_t size);
/* Takes over one of them. */
int exl3_config_set(struct exl3_config *cfg, const char *text, struct exl3_error *err);

/**
 * exl3_config_check_places() - what --check-config checks beyond the values: all that needs no device.
 * Every model's folder: config.json, the index, the headers of all files, and that its matrices fit together.
 * The folders of the sockets, except the one that the daemon makes.
 * @out:    a line of comment per model, with its sizes and what of it would be left out; or NULL.
 * @report: called with a sentence, FILE:LINE or the flag before it, for each thing that is wrong.
 * Returns how many those are. Reads no weights. Not while another thread changes @cfg.
 */
unsigned exl3_config_check_places(const struct exl3_config *cfg, FILE *out, void (*report)(const char *text));

/* Keys that a running daemon takes over (SIGHUP); number of other keys that differ. */
unsigned exl3_config_reload(struct exl3_config *cfg, const struct exl3_config *fresh);

/* For config.c: the model of that name, made if there is none; NULL: @err. One value of it. Its end. */
struct exl3_config_model *exl3_config_model_get(struct exl3_config *cfg, const char *name,
						struct exl3_error *err);
int exl3_config_model_set(struct exl3_config_model *model, const char *key, const char *value,
			  struct exl3_error *err);
/* Notes where the configuration names its path: cfg->reading. */
int exl3_config_model_note(const struct exl3_config *cfg, struct exl3_config_model *model, struct exl3_error *err);
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
/* Likewise for tenants. */
struct exl3_config_tenant *exl3_config_tenant_get(struct exl3_config *cfg, const char *name,
						  struct exl3_error *err);
int exl3_config_tenant_set(struct exl3_config_tenant *t, const char *key, const char *value,
			   struct exl3_error *err);
bool exl3_config_tenant_setting(const struct exl3_config *cfg, size_t *i, char *text, size_t size);
/* Those of @from instead of its own; -ENOMEM: nothing was changed. */
int exl3_config_copy_tenants(struct exl3_config *cfg, const struct exl3_config *from);
void exl3_config_fini_tenants(struct exl3_config *cfg);
void exl3_config_tenant_help(FILE *out);
/* A whole decimal number, with a binary suffix where @bytes allows one; yes or no. -EINVAL. */
int exl3_config_parse_number(const char *value, bool bytes, int64_t *ret);
int exl3_config_parse_bool(const char *value, bool *ret);

void exl3_config_help(FILE *out);
/* Every key with the value that counts, as a file that could be read again. */
void exl3_config_print(const struct exl3_config *cfg, FILE *out);
int exl3_config_log_level(const struct exl3_config *cfg);

#endif
