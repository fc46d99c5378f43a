/* SPDX-License-Identifier: Apache-2.0 */
/* config.c - settings of the daemon: the one table of keys, and what derives from it. config_file.c reads. */
#include "daemon/config_priv.h"

#include "daemon/log.h"
#include "shm/exl3_abi.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct exl3_config, field)
#define TIB       (1ll << 40)

#define STRING_MAX 1000 /* bytes of a KEY_STRING: with its key it is one message to a worker */

/* The one table: parser, flags, --help, --check-config and reload derive from it. */
static const struct key keys[] = {
	{"socket", KEY_STRING, AT(socket), NULL, 0, 0, NULL, false,
	 "control socket; default " EXL3_RUN_DIR "/N.sock, N the node or 0"},
	{"backend", KEY_ENUM, AT(backend), "auto", 0, 0, "auto|cpu|cuda", false,
	 "what computes; auto: cuda if there is a GPU, else cpu"},
	{"device", KEY_STRING, AT(device), NULL, 0, 0, NULL, false,
	 "default device: INDEX or UUID of the backend, or cpu:INDEX, cuda:INDEX, cuda:UUID; default: the first"},
	{"devices", KEY_STRING, AT(devices), NULL, 0, 0, NULL, false,
	 "more devices to open, with commas, as for device; those that models name are opened anyway"},
	{"node", KEY_INT, AT(node), "-1", -1, 1023, NULL, false,
	 "NUMA node that threads and memory are bound to; -1: none"},
	{"mps", KEY_ENUM, AT(mps), "auto", 0, 0, "auto|require|off", false,
	 "an MPS server for each fault domain, so that clients with CUDA of their own run beside it; "
	 "auto: where there is a GPU and MPS"},
	{"mps-control", KEY_STRING, AT(mps_control), "nvidia-cuda-mps-control", 0, 0, NULL, false,
	 "program that starts it"},
	{"model", KEY_MODEL, 0, NULL, 0, 0, NULL, false,
	 "NAME=DIR[,device=D][,unquantized=host|device], load this at start; repeatable; in a file "
	 "also [model NAME], path ="},
	{"domain", KEY_DOMAIN, 0, NULL, 0, 0, NULL, false,
	 "NAME=USER,@GROUP..., a fault domain of its own for them; repeatable; in a file also "
	 "[domain NAME], users ="},
	{"tenant", KEY_TENANT, 0, NULL, 0, 0, NULL, true,
	 "NAME:KEY=VALUE, who may do what and how much; repeatable; in a file also [tenant NAME], "
	 "see below"},
	{"threads", KEY_UINT, AT(threads), "0", 0, 4096, NULL, false,
	 "threads of the cpu backend; 0: cores of the node"},
	{"deterministic", KEY_BOOL, AT(deterministic), "no", 0, 0, NULL, false,
	 "result bits of a request depend on that request alone"},
	{"spin-us", KEY_UINT, AT(spin_us), "50", 0, 1000000, NULL, true,
	 "microseconds that the loop looks for work before it sleeps; 0: never"},
	{"chunk-us", KEY_UINT, AT(chunk_us), "1000", 0, 60000000, NULL, true,
	 "microseconds of the device that one launch should take: longer requests run in slices of "
	 "rows; 0: whole"},
	{"ready-spin-us", KEY_UINT, AT(ready_spin_us), "1000", 0, 1000000, NULL, true,
	 "microseconds that the loop looks without a pause for the next stream call to become ready"},
	{"ready-timeout", KEY_UINT, AT(ready_timeout_s), "60", 0, 86400, NULL, true,
	 "seconds that a stream call without deadline may wait for its stream; 0: for ever"},
	{"queue-depth", KEY_UINT, AT(queue_depth), "8", 1, 64, NULL, false,
	 "launches handed to the device ahead of their turn"},
	{"merge-max", KEY_UINT, AT(merge_max), "32", 1, 32, NULL, false,
	 "requests of several channels for one module that one launch may carry; 1: no merging"},
	{"trains", KEY_ENUM, AT(trains), "auto", 0, 0, "auto|off", true,
	 "bring decoders into step, so that their requests can be merged; auto: when the device "
	 "has too much to do for them one by one"},
	{"memory-max", KEY_BYTES, AT(memory_max), "0", 0, 64 * TIB, NULL, false,
	 "bytes of weights and arenas on the cpu backend; 0: no limit"},
	{"gpu-memory-max", KEY_BYTES, AT(gpu_memory_max), "0", 0, 64 * TIB, NULL, false,
	 "bytes of weights and arenas on the GPU; 0: no limit"},
	{"workspace", KEY_BYTES, AT(workspace), "0", 0, TIB, NULL, false,
	 "bytes of scratch memory of the device; 0: the backend's choice"},
	{"arena-max", KEY_BYTES, AT(arena_max), "4G", 0, 64 * TIB, NULL, true,
	 "arena bytes of one client; 0: no limit"},
	{"channels-max", KEY_UINT, AT(channels_max), "64", 1, EXL3_CHANNELS_MAX, NULL, true,
	 "channels of one client"},
	{"clients-max", KEY_UINT, AT(clients_max), "256", 1, 65536, NULL, true,
	 "connected clients"},
	{"clients-per-user", KEY_UINT, AT(clients_per_user), "0", 0, 65536, NULL, true,
	 "of them, of one user but root and the daemon's own; 0: seven eighths"},
	{"kernel-table", KEY_STRING, AT(kernel_table), NULL, 0, 0, NULL, true,
	 "file of exl3ctl calibrate: which variant is the fastest by shape and rows; none: none"},
	{"adopt", KEY_ENUM, AT(adopt), "sample", 0, 0, "sample|verify|never", true,
	 "weights that are loaded already serve a new worker: after some hashes, after all, or never"},
	{"metrics-socket", KEY_STRING, AT(metrics_socket), NULL, 0, 0, NULL, false,
	 "Unix socket that answers GET /metrics; default: socket with .metrics added; none: off"},
	{"metrics-port", KEY_UINT, AT(metrics_port), "0", 0, 65535, NULL, false,
	 "port of 127.0.0.1 that does so too; 0: none"},
	{"log-level", KEY_ENUM, AT(log_level), "info", 0, 0, "error|warning|info|debug", true,
	 "what is logged"},
	{"drain-timeout", KEY_UINT, AT(drain_timeout_s), "30", 0, 86400, NULL, true,
	 "seconds that accepted requests have to finish at shutdown"},
	{"restart-limit", KEY_UINT, AT(restart_limit), "5", 0, 1000, NULL, false,
	 "restarts of the worker within restart-window before the daemon gives up"},
	{"restart-window", KEY_UINT, AT(restart_window_s), "60", 1, 86400, NULL, false,
	 "seconds, see restart-limit"},
	{"launch-timeout", KEY_UINT, AT(launch_timeout_s), "10", 0, 86400, NULL, true,
	 "seconds that a launch may take beyond what its size explains, then the device is given up; "
	 "0: for ever"},
	{"hang-timeout", KEY_UINT, AT(hang_timeout_s), "30", 0, 86400, NULL, false,
	 "seconds that a worker may say nothing (while it starts four times that), then it is killed; "
	 "0: for ever"},
};

#define NR_KEYS (sizeof(keys) / sizeof(keys[0]))

static void *field(const struct exl3_config *cfg, const struct key *key)
{
	return (char *)(uintptr_t)cfg + key->offset;
}

const struct key *exl3_config_find_key(const char *name, size_t len)
{
	for (size_t i = 0; i < NR_KEYS; i++) {
		if (strlen(keys[i].name) == len && memcmp(keys[i].name, name, len) == 0)
			return &keys[i];
	}
	return NULL;
}

const char *exl3_config_nearest_key(const char *name)
{
	return exl3_nearest(name, &keys[0].name, NR_KEYS, sizeof(keys[0]));
}

int exl3_config_set_string(char **at, const char *value)
{
	char *copy = strdup(value);

	if (!copy)
		return -ENOMEM;
	free(*at);
	*at = copy;
	return 0;
}

static bool in_choices(const char *choices, const char *value)
{
	size_t len = strlen(value);

	while (*choices) {
		size_t word = strcspn(choices, "|");

		if (word == len && memcmp(choices, value, len) == 0)
			return true;
		choices += word + (choices[word] == '|');
	}
	return false;
}

int exl3_config_parse_number(const char *value, bool bytes, int64_t *ret)
{
	static const char suffixes[] = "KMGT";
	const char *suffix;
	unsigned shift = 0;
	long long n;
	char *end;

	if (!isdigit((unsigned char)value[value[0] == '-']))
		return -EINVAL;
	errno = 0;
	n = strtoll(value, &end, 10);
	if (errno || end == value)
		return -EINVAL;
	if (bytes && *end) {
		suffix = strchr(suffixes, toupper((unsigned char)*end));
		if (!suffix)
			return -EINVAL;
		shift = 10 * (unsigned)(suffix - suffixes + 1);
		end++;
		if (strcmp(end, "iB") == 0)
			end += 2;
	}
	if (*end || n > INT64_MAX >> shift || (n < 0 && shift))
		return -EINVAL;
	*ret = (int64_t)((uint64_t)n << shift);
	return 0;
}

int exl3_config_parse_bool(const char *value, bool *ret)
{
	static const char *const yes[] = {"yes", "true", "on", "1"}, *const no[] = {"no", "false",
										    "off", "0"};

	for (size_t i = 0; i < 4; i++) {
		if (strcasecmp(value, yes[i]) == 0 || strcasecmp(value, no[i]) == 0) {
			*ret = strcasecmp(value, yes[i]) == 0;
			return 0;
		}
	}
	return -EINVAL;
}

int exl3_config_set_key(struct exl3_config *cfg, const struct key *key, const char *value,
			struct exl3_error *err)
{
	int64_t n;
	bool b;

	switch (key->type) {
	case KEY_MODEL:
		return exl3_config_add_model(cfg, value, false, err);
	case KEY_DOMAIN:
		return exl3_config_add_domain(cfg, value, err);
	case KEY_TENANT:
		return exl3_config_add_tenant(cfg, value, err);
	case KEY_ENUM:
		if (!in_choices(key->choices, value))
			return exl3_errf(err, -EINVAL, "%s: '%s' is not one of %s", key->name,
					 value, key->choices);
		break;
	case KEY_STRING:
		if (!*value)
			return exl3_errf(err, -EINVAL, "%s: empty", key->name);
		if (strlen(value) > STRING_MAX)
			return exl3_errf(err, -EINVAL, "%s: longer than %d bytes", key->name,
					 STRING_MAX);
		break;
	case KEY_BOOL:
		if (exl3_config_parse_bool(value, &b) < 0)
			return exl3_errf(err, -EINVAL, "%s: '%s' is neither yes nor no", key->name,
					 value);
		*(bool *)field(cfg, key) = b;
		return 0;
	case KEY_INT:
	case KEY_UINT:
	case KEY_BYTES:
		if (exl3_config_parse_number(value, key->type == KEY_BYTES, &n) < 0)
			return exl3_errf(err, -EINVAL, "%s: '%s' is not a whole number%s",
					 key->name, value,
					 key->type == KEY_BYTES ? " with K, M, G or T" : "");
		if (n < key->min || n > key->max)
			return exl3_errf(err, -EINVAL, "%s: %s is not in %lld..%lld", key->name,
					 value, (long long)key->min, (long long)key->max);
		*(int64_t *)field(cfg, key) = n; /* int64_t and uint64_t may alias */
		return 0;
	}
	if (exl3_config_set_string(field(cfg, key), value) < 0)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", key->name);
	return 0;
}

int exl3_config_set_defaults(struct exl3_config *cfg, struct exl3_error *err)
{
	int rc;

	memset(cfg, 0, sizeof(*cfg));
	for (size_t i = 0; i < NR_KEYS; i++) {
		if (!keys[i].fallback)
			continue;
		rc = exl3_config_set_key(cfg, &keys[i], keys[i].fallback, err);
		if (rc < 0)
			return rc;
	}
	return 0;
}

void exl3_config_fini(struct exl3_config *cfg)
{
	for (size_t i = 0; i < NR_KEYS; i++) {
		if (keys[i].type == KEY_STRING || keys[i].type == KEY_ENUM)
			free(*(char **)field(cfg, &keys[i]));
	}
	for (size_t i = 0; i < cfg->nr_models; i++)
		exl3_config_model_fini(&cfg->models[i]);
	free(cfg->models);
	for (size_t i = 0; i < cfg->nr_domains; i++)
		exl3_config_domain_fini(&cfg->domains[i]);
	free(cfg->domains);
	exl3_config_fini_tenants(cfg);
	memset(cfg, 0, sizeof(*cfg));
}

static bool same_value(const struct exl3_config *a, const struct exl3_config *b,
		       const struct key *key)
{
	const char *s, *t;

	switch (key->type) {
	case KEY_STRING:
	case KEY_ENUM:
		s = *(char **)field(a, key);
		t = *(char **)field(b, key);
		return s && t ? strcmp(s, t) == 0 : s == t;
	case KEY_BOOL:
		return *(bool *)field(a, key) == *(bool *)field(b, key);
	case KEY_MODEL:
	case KEY_DOMAIN:
	case KEY_TENANT:
		return true; /* whoever has them compares them */
	default:
		return *(int64_t *)field(a, key) == *(int64_t *)field(b, key);
	}
}

unsigned exl3_config_reload(struct exl3_config *cfg, const struct exl3_config *fresh)
{
	unsigned others = 0;

	if (exl3_config_copy_tenants(cfg, fresh) < 0)
		exl3_err("tenants: out of memory; they are as before");
	for (size_t i = 0; i < NR_KEYS; i++) {
		if (same_value(cfg, fresh, &keys[i]))
			continue;
		if (!keys[i].reload) {
			exl3_warn("%s changed in the configuration: needs a restart of the daemon",
				  keys[i].name);
			others++;
		} else if (keys[i].type == KEY_ENUM || keys[i].type == KEY_STRING) {
			const char *now = *(char **)field(fresh, &keys[i]);
			char **at = field(cfg, &keys[i]);

			if (now) {
				exl3_config_set_string(at, now);
			} else {
				free(*at);
				*at = NULL;
			}
		} else {
			*(int64_t *)field(cfg, &keys[i]) = *(int64_t *)field(fresh, &keys[i]);
		}
	}
	return others;
}

static const char *type_word(const struct key *key)
{
	switch (key->type) {
	case KEY_ENUM:
		return key->choices;
	case KEY_INT:
	case KEY_UINT:
		return "N";
	case KEY_BYTES:
		return "BYTES";
	case KEY_BOOL:
		return "yes|no";
	default:
		return "TEXT";
	}
}

void exl3_config_help(FILE *out)
{
	fprintf(out, "usage: exl3-daemon [--config FILE] [--KEY VALUE]...\n"
		     "       exl3-daemon --takeover [the same]   in place of the one that serves there\n"
		     "       exl3-daemon --check-config [the same]   check files, flags and models, start nothing\n"
		     "       exl3-daemon --help | --version\n\n"
		     "Serves EXL3-quantized layers to the processes of this machine. Every key is "
		     "also a\n"
		     "line 'key = value' of the configuration file (default " EXL3_CONFIG_PATH
		     ",\nthen FILE.d/*.conf; flags win).\n"
		     "SIGHUP reads the files again and takes over the keys with a *, new models, and who is in which domain.\n\n");
	for (size_t i = 0; i < NR_KEYS; i++) {
		const struct key *key = &keys[i];
		char left[64];

		snprintf(left, sizeof(left), "--%s %s", key->name, type_word(key));
		fprintf(out, "  %-38s %c %s", left, key->reload ? '*' : ' ', key->help);
		if (key->fallback)
			fprintf(out, " [%s]", key->fallback);
		if (key->type == KEY_INT || key->type == KEY_UINT)
			fprintf(out, " (%lld..%lld)", (long long)key->min, (long long)key->max);
		fputc('\n', out);
	}
	exl3_config_tenant_help(out);
	fprintf(out,
		"\nSIGTERM finishes accepted requests and ends.\n"
		"Exit status: 0 ended by a drain, 1 it cannot serve, 2 flags or configuration are wrong, 3 the worker "
		"died\ntoo often.\n");
}

/* The value in the words of a file; NULL: it has none, or (models, domains) several. */
static const char *value_text(const struct exl3_config *cfg, const struct key *key, char number[24])
{
	switch (key->type) {
	case KEY_MODEL:
	case KEY_DOMAIN:
	case KEY_TENANT:
		return NULL;
	case KEY_BOOL:
		return *(bool *)field(cfg, key) ? "yes" : "no";
	case KEY_STRING:
	case KEY_ENUM:
		return *(char **)field(cfg, key);
	default:
		snprintf(number, 24, "%lld", (long long)*(int64_t *)field(cfg, key));
		return number;
	}
}

bool exl3_config_setting(const struct exl3_config *cfg, size_t *i, char *text, size_t size)
{
	while (*i < NR_KEYS) {
		const struct key *key = &keys[(*i)++];
		char number[24];
		const char *value = value_text(cfg, key, number);

		if (!value)
			continue;
		snprintf(text, size, "%s=%s", key->name, value);
		return true;
	}
	*i -= NR_KEYS;
	if (exl3_config_tenant_setting(cfg, i, text, size)) {
		*i += NR_KEYS;
		return true;
	}
	return false;
}

int exl3_config_set(struct exl3_config *cfg, const char *text, struct exl3_error *err)
{
	const char *eq = strchr(text, '=');
	const struct key *key = eq ? exl3_config_find_key(text, (size_t)(eq - text)) : NULL;

	if (!key)
		return exl3_errf(err, -EINVAL, "'%s' is not KEY=VALUE", text);
	return exl3_config_set_key(cfg, key, eq + 1, err);
}

void exl3_config_print(const struct exl3_config *cfg, FILE *out)
{
	char text[2048]; /* a tenant's list has 1000 bytes */

	for (size_t i = 0; i < NR_KEYS; i++) {
		char number[24];
		const char *value = value_text(cfg, &keys[i], number);

		if (value)
			fprintf(out, "%s = %s\n", keys[i].name, value);
	}
	for (size_t i = 0; exl3_config_tenant_setting(cfg, &i, text, sizeof(text));)
		fprintf(out, "%.6s = %s\n", text, text + 7);
	for (size_t i = 0; i < cfg->nr_models; i++) {
		const struct exl3_config_model *m = &cfg->models[i];

		fprintf(out, "model = %s=%s%s%s%s\n", m->name, m->path,
			m->device_tensors ? ",unquantized=device" : "", m->device ? ",device=" : "",
			m->device ? m->device : "");
	}
	for (size_t i = 0; i < cfg->nr_domains; i++)
		fprintf(out, "domain = %s=%s\n", cfg->domains[i].name, cfg->domains[i].users);
}

int exl3_config_log_level(const struct exl3_config *cfg)
{
	switch (cfg->log_level[0]) {
	case 'e':
		return EXL3_LOG_ERROR;
	case 'w':
		return EXL3_LOG_WARN;
	case 'd':
		return EXL3_LOG_DEBUG;
	default:
		return EXL3_LOG_INFO;
	}
}
