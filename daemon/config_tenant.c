/* SPDX-License-Identifier: Apache-2.0 */
/* config_tenant.c - the tenants of a configuration: who belongs to each, what they may, and how much of it. */
#include "daemon/config.h"

#include "daemon/sched.h"
#include "shm/exl3_abi.h"

#include <ctype.h>
#include <errno.h>
#include <fnmatch.h>
#include <grp.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_MAX 1000u /* bytes of a list: with name and key it is one message to a worker */
#define TIB      (1ll << 40)

enum type { T_BOOL, T_UINT, T_BYTES, T_AUTO, T_MAPPED, T_USERS, T_GROUPS, T_WORDS };

/* The one table: parser, messages to workers, --check-config and --help derive from it. */
static const struct tenant_key {
	const char *name;
	enum type type;
	size_t offset;
	const char *fallback;
	int64_t min, max;
	const char *help;
} keys[] = {
#define AT(field) offsetof(struct exl3_config_tenant, field)
	{"users", T_USERS, AT(users), NULL, 0, 0, "names, uids and ranges of uids; *: all"},
	{"groups", T_GROUPS, AT(groups), NULL, 0, 0, "likewise, groups; supplementary ones count"},
	{"cgroups", T_WORDS, AT(cgroups), NULL, 0, 0, "patterns of cgroup v2 paths"},
	{"connect", T_BOOL, AT(connect), "yes", 0, 0, "may its clients connect"},
	{"admin", T_BOOL, AT(admin), "no", 0, 0, "may load, unload and drain"},
	{"models", T_WORDS, AT(models), "*", 0, 0, "patterns of the models that it may use"},
	{"weight", T_UINT, AT(weight), "100", 1, EXL3_WEIGHT_MAX, "share of the device"},
	{"priority", T_UINT, AT(priority), "0", 0, EXL3_PRIORITY_MAX, "higher ones run first"},
	{"clients", T_UINT, AT(clients), "0", 0, 65536, "clients at a time; 0: no limit"},
	{"channels", T_UINT, AT(channels), "0", 0, 1000000, "of all its clients; 0: no limit"},
	{"rows", T_UINT, AT(rows), "0", 0, 1000000000, "rows in flight; 0: no limit"},
	{"bytes", T_BYTES, AT(bytes), "0", 0, 64 * TIB,
	 "registered bytes: arenas, imports, rings; 0: no limit"},
	{"requests-per-second", T_UINT, AT(per_second), "0", 0, 10000000, "0: no limit"},
	{"burst", T_UINT, AT(burst), "0", 0, 10000000,
	 "requests at once after a pause; 0: those of a tenth of a second"},
	{"cuda-ipc", T_AUTO, AT(cuda_ipc), "auto", 0, 0,
	 "may it register CUDA IPC memory; auto: only if it is the only tenant"},
	{"mapped", T_MAPPED, AT(mapped), "off", 0, 0,
	 "may it map the weights and run its requests itself: off, allow (if a client asks), prefer"},
#undef AT
};

#define NR_KEYS (sizeof(keys) / sizeof(keys[0]))

static void *field(const struct exl3_config_tenant *t, const struct tenant_key *key)
{
	return (char *)(uintptr_t)t + key->offset;
}

/* ---- lists ---- */

static int id_of(const char *word, bool group, uint32_t *ret)
{
	if (group) {
		const struct group *gr = getgrnam(word);

		if (!gr)
			return -ENOENT;
		*ret = gr->gr_gid;
	} else {
		const struct passwd *pw = getpwnam(word);

		if (!pw)
			return -ENOENT;
		*ret = pw->pw_uid;
	}
	return 0;
}

/* N, N-M, * or a name. */
static int parse_ids(const char *word, bool group, struct exl3_config_ids *ret)
{
	unsigned long long first, last;
	char *end;

	if (strcmp(word, "*") == 0) {
		*ret = (struct exl3_config_ids){0, UINT32_MAX};
		return 0;
	}
	if (!isdigit((unsigned char)*word)) {
		if (id_of(word, group, &ret->first) < 0)
			return -ENOENT;
		ret->last = ret->first;
		return 0;
	}
	errno = 0;
	first = last = strtoull(word, &end, 10);
	if (*end == '-' && isdigit((unsigned char)end[1]))
		last = strtoull(end + 1, &end, 10);
	if (errno || *end || last < first || last > UINT32_MAX)
		return -EINVAL;
	*ret = (struct exl3_config_ids){(uint32_t)first, (uint32_t)last};
	return 0;
}

/* A list in words, which replaces what was there. Numbers, not names, are kept: a worker asks nobody. */
static int set_list(struct exl3_config_tenant *t, const struct tenant_key *key, const char *value,
		    struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *copy = strdup(value), *text = calloc(1, TEXT_MAX + 64);
	exl3_auto(exl3_freep) struct exl3_config_ids *ids = calloc(strlen(value) + 1, sizeof(*ids));
	struct exl3_config_list *list = field(t, key);
	size_t nr = 0, len = 0;
	char *save;

	if (!copy || !text || !ids)
		return exl3_errf(err, -ENOMEM, "tenant %s: out of memory", t->name);
	for (char *word = strtok_r(copy, ", \t", &save); word; word = strtok_r(NULL, ", \t", &save)) {
		int rc = key->type == T_WORDS ? 0
					      : parse_ids(word, key->type == T_GROUPS, &ids[nr]);

		if (rc == -ENOENT)
			return exl3_errf(err, -EINVAL, "tenant %s: there is no %s '%s'", t->name,
					 key->type == T_GROUPS ? "group" : "user", word);
		if (rc < 0)
			return exl3_errf(err, -EINVAL,
					 "tenant %s: %s: '%s' is no name, number or range", t->name,
					 key->name, word);
		if (key->type == T_WORDS)
			len += (size_t)snprintf(text + len, TEXT_MAX + 64 - len, "%s%.*s",
						nr ? " " : "", (int)(TEXT_MAX + 1 - len), word);
		else if (ids[nr].last == UINT32_MAX && !ids[nr].first)
			len += (size_t)snprintf(text + len, TEXT_MAX + 64 - len, "%s*", nr ? " " : "");
		else if (ids[nr].first == ids[nr].last)
			len += (size_t)snprintf(text + len, TEXT_MAX + 64 - len, "%s%u",
						nr ? " " : "", ids[nr].first);
		else
			len += (size_t)snprintf(text + len, TEXT_MAX + 64 - len, "%s%u-%u",
						nr ? " " : "", ids[nr].first, ids[nr].last);
		if (len > TEXT_MAX)
			return exl3_errf(err, -EINVAL, "tenant %s: %s is longer than %u bytes",
					 t->name, key->name, TEXT_MAX);
		nr++;
	}
	free(list->text);
	free(list->ids);
	list->text = exl3_take_ptr(&text);
	list->ids = exl3_take_ptr(&ids);
	list->nr = nr;
	return 0;
}

static bool in_list(const struct exl3_config_list *list, uint32_t id)
{
	for (size_t i = 0; i < list->nr; i++) {
		if (id >= list->ids[i].first && id <= list->ids[i].last)
			return true;
	}
	return false;
}

bool exl3_config_list_matches(const struct exl3_config_list *list, const char *text)
{
	char word[TEXT_MAX + 1];

	for (const char *p = list->text; p && *p;) {
		size_t len = strcspn(p, " ");

		if (len < sizeof(word)) {
			memcpy(word, p, len);
			word[len] = 0;
			if (fnmatch(word, text, 0) == 0)
				return true;
		}
		p += len + (p[len] == ' ');
	}
	return false;
}

bool exl3_config_tenant_matches(const struct exl3_config_tenant *t, uint32_t uid, uint32_t gid,
				const uint32_t *groups, size_t nr_groups, const char *cgroup)
{
	bool who = !t->users.nr && !t->groups.nr;

	if (strcmp(t->name, EXL3_TENANT_DEFAULT) == 0)
		return true;
	if (who && !t->cgroups.nr)
		return false; /* a tenant that names nobody has nobody */
	who |= in_list(&t->users, uid) || in_list(&t->groups, gid);
	for (size_t i = 0; i < nr_groups && !who; i++)
		who = in_list(&t->groups, groups[i]);
	return who && (!t->cgroups.nr || (cgroup && exl3_config_list_matches(&t->cgroups, cgroup)));
}

/* ---- one tenant ---- */

static const char *const mapped_words[] = {
	[EXL3_MAPPED_OFF] = "off", [EXL3_MAPPED_ALLOW] = "allow", [EXL3_MAPPED_PREFER] = "prefer"};

/* Yes and no are how it was written first. */
static int64_t mapped_policy(const char *value)
{
	bool b;

	for (size_t i = 0; i < sizeof(mapped_words) / sizeof(mapped_words[0]); i++) {
		if (strcmp(value, mapped_words[i]) == 0)
			return (int64_t)i;
	}
	return exl3_config_parse_bool(value, &b) < 0 ? -EINVAL : b ? EXL3_MAPPED_ALLOW : EXL3_MAPPED_OFF;
}

int exl3_config_tenant_set(struct exl3_config_tenant *t, const char *name, const char *value,
			   struct exl3_error *err)
{
	const struct tenant_key *key = NULL;
	int64_t n;
	bool b;

	for (size_t i = 0; i < NR_KEYS; i++) {
		if (strcmp(keys[i].name, name) == 0)
			key = &keys[i];
	}
	if (!key) {
		const char *near = exl3_nearest(name, &keys[0].name, NR_KEYS, sizeof(keys[0]));

		return exl3_errf(err, -EINVAL, "tenant %s: unknown key '%s'%s%s%s; see exl3-daemon --help",
				 t->name, name, near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
	}
	switch (key->type) {
	case T_BOOL:
		if (exl3_config_parse_bool(value, &b) < 0)
			return exl3_errf(err, -EINVAL, "tenant %s: %s: '%s' is neither yes nor no",
					 t->name, name, value);
		*(bool *)field(t, key) = b;
		return 0;
	case T_AUTO:
		if (strcmp(value, "auto") != 0 && exl3_config_parse_bool(value, &b) < 0)
			return exl3_errf(err, -EINVAL, "tenant %s: %s: '%s' is not auto, yes or no",
					 t->name, name, value);
		*(int64_t *)field(t, key) = strcmp(value, "auto") == 0 ? -1 : b;
		return 0;
	case T_MAPPED:
		n = mapped_policy(value);
		if (n < 0)
			return exl3_errf(err, -EINVAL, "tenant %s: %s: '%s' is not off, allow or prefer", t->name,
					 name, value);
		*(int64_t *)field(t, key) = n;
		return 0;
	case T_UINT:
	case T_BYTES:
		if (exl3_config_parse_number(value, key->type == T_BYTES, &n) < 0)
			return exl3_errf(err, -EINVAL, "tenant %s: %s: '%s' is not a whole number%s",
					 t->name, name, value,
					 key->type == T_BYTES ? " with K, M, G or T" : "");
		if (n < key->min || n > key->max)
			return exl3_errf(err, -EINVAL, "tenant %s: %s: %s is not in %lld..%lld",
					 t->name, name, value, (long long)key->min,
					 (long long)key->max);
		*(uint64_t *)field(t, key) = (uint64_t)n;
		return 0;
	default:
		return set_list(t, key, value, err);
	}
}

void exl3_config_tenant_fini(struct exl3_config_tenant *t)
{
	for (size_t i = 0; i < NR_KEYS; i++) {
		struct exl3_config_list *list = field(t, &keys[i]);

		if (keys[i].type != T_USERS && keys[i].type != T_GROUPS && keys[i].type != T_WORDS)
			continue;
		free(list->text);
		free(list->ids);
	}
	free(t->name);
	memset(t, 0, sizeof(*t));
}

int exl3_config_tenant_init(struct exl3_config_tenant *t, const char *name, struct exl3_error *err)
{
	int rc = 0;

	memset(t, 0, sizeof(*t));
	t->name = strdup(name);
	if (!t->name)
		return exl3_errf(err, -ENOMEM, "tenant: out of memory");
	for (size_t i = 0; i < NR_KEYS && rc == 0; i++) {
		if (keys[i].fallback)
			rc = exl3_config_tenant_set(t, keys[i].name, keys[i].fallback, err);
	}
	if (rc < 0)
		exl3_config_tenant_fini(t);
	return rc;
}

/* The value in the words of a file; NULL: an empty list. */
static const char *value_text(const struct exl3_config_tenant *t, const struct tenant_key *key,
			      char number[24])
{
	int64_t n;

	switch (key->type) {
	case T_BOOL:
		return *(bool *)field(t, key) ? "yes" : "no";
	case T_AUTO:
		n = *(int64_t *)field(t, key);
		return n < 0 ? "auto" : n ? "yes" : "no";
	case T_MAPPED:
		return mapped_words[*(int64_t *)field(t, key)];
	case T_UINT:
	case T_BYTES:
		snprintf(number, 24, "%lld", (long long)*(int64_t *)field(t, key));
		return number;
	default:
		return ((struct exl3_config_list *)field(t, key))->text;
	}
}

int exl3_config_tenant_copy(struct exl3_config_tenant *ret, const struct exl3_config_tenant *t,
			    struct exl3_error *err)
{
	int rc = exl3_config_tenant_init(ret, t->name, err);

	for (size_t i = 0; i < NR_KEYS && rc == 0; i++) {
		char number[24];
		const char *value = value_text(t, &keys[i], number);

		if (value)
			rc = exl3_config_tenant_set(ret, keys[i].name, value, err);
		if (rc < 0)
			exl3_config_tenant_fini(ret);
	}
	return rc;
}

/* ---- all of them ---- */

static int check_name(const char *name, struct exl3_error *err)
{
	size_t len = strlen(name);

	if (len == 0 || len > EXL3_TENANT_NAME_MAX)
		return exl3_errf(err, -EINVAL, "tenant name: 1 to %u bytes, this has %zu",
				 EXL3_TENANT_NAME_MAX, len);
	for (size_t i = 0; i < len; i++) {
		/* It becomes the value of a label of the metrics. */
		if (!isalnum((unsigned char)name[i]) && !strchr("._-", name[i]))
			return exl3_errf(err, -EINVAL,
					 "tenant name '%s': letters, digits, '.', '_' and '-'", name);
	}
	return 0;
}

struct exl3_config_tenant *exl3_config_tenant_get(struct exl3_config *cfg, const char *name,
						  struct exl3_error *err)
{
	struct exl3_config_tenant *grown;

	if (check_name(name, err) < 0)
		return NULL;
	for (size_t i = 0; i < cfg->nr_tenants; i++) {
		if (strcmp(cfg->tenants[i].name, name) == 0)
			return &cfg->tenants[i];
	}
	if (cfg->nr_tenants == EXL3_TENANTS_MAX) {
		exl3_errf(err, -EINVAL, "more than %u tenants", EXL3_TENANTS_MAX);
		return NULL;
	}
	grown = realloc(cfg->tenants, (cfg->nr_tenants + 1) * sizeof(*grown));
	if (!grown) {
		exl3_errf(err, -ENOMEM, "tenant: out of memory");
		return NULL;
	}
	cfg->tenants = grown;
	if (exl3_config_tenant_init(&grown[cfg->nr_tenants], name, err) < 0)
		return NULL;
	return &grown[cfg->nr_tenants++];
}

int exl3_config_add_tenant(struct exl3_config *cfg, const char *spec, struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *copy = strdup(spec);
	struct exl3_config_tenant *t;
	char *key, *value;

	if (!copy)
		return exl3_errf(err, -ENOMEM, "tenant: out of memory");
	key = strchr(copy, ':');
	value = key ? strchr(key, '=') : NULL;
	if (!value)
		return exl3_errf(err, -EINVAL, "tenant: '%s' is not NAME:KEY=VALUE", spec);
	*key++ = 0;
	*value++ = 0;
	t = exl3_config_tenant_get(cfg, copy, err);
	return t ? exl3_config_tenant_set(t, key, value, err) : err ? err->code : -EINVAL;
}

bool exl3_config_tenant_setting(const struct exl3_config *cfg, size_t *i, char *text, size_t size)
{
	while (*i < cfg->nr_tenants * NR_KEYS) {
		const struct exl3_config_tenant *t = &cfg->tenants[*i / NR_KEYS];
		const struct tenant_key *key = &keys[(*i)++ % NR_KEYS];
		char number[24];
		const char *value = value_text(t, key, number);

		if (!value)
			continue;
		snprintf(text, size, "tenant=%s:%s=%s", t->name, key->name, value);
		return true;
	}
	return false;
}

int exl3_config_copy_tenants(struct exl3_config *cfg, const struct exl3_config *from)
{
	struct exl3_config_tenant *copy = calloc(from->nr_tenants + 1, sizeof(*copy));
	size_t nr = 0;
	int rc = copy ? 0 : -ENOMEM;

	for (; rc == 0 && nr < from->nr_tenants; nr++)
		rc = exl3_config_tenant_copy(&copy[nr], &from->tenants[nr], NULL);
	if (rc < 0) {
		for (size_t i = 0; copy && i + 1 < nr; i++)
			exl3_config_tenant_fini(&copy[i]);
		free(copy);
		return rc;
	}
	exl3_config_fini_tenants(cfg);
	cfg->tenants = copy;
	cfg->nr_tenants = nr;
	return 0;
}

void exl3_config_fini_tenants(struct exl3_config *cfg)
{
	for (size_t i = 0; i < cfg->nr_tenants; i++)
		exl3_config_tenant_fini(&cfg->tenants[i]);
	free(cfg->tenants);
	cfg->tenants = NULL;
	cfg->nr_tenants = 0;
}

void exl3_config_tenant_help(FILE *out)
{
	fputs("\nKeys of a section [tenant NAME], or --tenant NAME:KEY=VALUE:\n", out);
	for (size_t i = 0; i < NR_KEYS; i++) {
		fprintf(out, "  %-22s %s", keys[i].name, keys[i].help);
		if (keys[i].fallback)
			fprintf(out, " [%s]", keys[i].fallback);
		fputc('\n', out);
	}
}
