/* SPDX-License-Identifier: Apache-2.0 */
/* config_domain.c - the fault domains of a configuration: their names and whose connections they serve. */
#include "daemon/config.h"

#include <ctype.h>
#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>

#define USERS_MAX 1000u /* bytes of a list of users, see STRING_MAX in config.c */

static int check_name(const char *name, struct exl3_error *err)
{
	size_t len = strlen(name);

	if (len == 0 || len > EXL3_DOMAIN_NAME_MAX)
		return exl3_errf(err, -EINVAL, "domain name: 1 to %u bytes, this has %zu",
				 EXL3_DOMAIN_NAME_MAX, len);
	/* It becomes part of a folder's name. */
	for (size_t i = 0; i < len; i++) {
		if (!isalnum((unsigned char)name[i]) && !strchr(i ? "._-" : "_", name[i]))
			return exl3_errf(
				err, -EINVAL,
				"domain name '%s': letters, digits and, not first, '.', '_', '-'",
				name);
	}
	if (strcmp(name, EXL3_DOMAIN_DEFAULT) == 0)
		return exl3_errf(err, -EINVAL,
				 "domain '%s' is there already: all users that no other names",
				 name);
	return 0;
}

struct exl3_config_domain *exl3_config_domain_get(struct exl3_config *cfg, const char *name,
						  struct exl3_error *err)
{
	struct exl3_config_domain *grown;

	if (check_name(name, err) < 0)
		return NULL;
	for (size_t i = 0; i < cfg->nr_domains; i++) {
		if (strcmp(cfg->domains[i].name, name) == 0)
			return &cfg->domains[i];
	}
	if (cfg->nr_domains == EXL3_DOMAINS_MAX - 1) {
		exl3_errf(err, -EINVAL, "more than %u domains, '%s' among them", EXL3_DOMAINS_MAX,
			  EXL3_DOMAIN_DEFAULT);
		return NULL;
	}
	grown = realloc(cfg->domains, (cfg->nr_domains + 1) * sizeof(*grown));
	if (!grown) {
		exl3_errf(err, -ENOMEM, "domain: out of memory");
		return NULL;
	}
	cfg->domains = grown;
	grown = &cfg->domains[cfg->nr_domains];
	memset(grown, 0, sizeof(*grown));
	grown->name = strdup(name);
	if (!grown->name) {
		exl3_errf(err, -ENOMEM, "domain: out of memory");
		return NULL;
	}
	cfg->nr_domains++;
	return grown;
}

/* A whole number that is no "nobody at all" (-1). */
static bool number(const char *word, uint32_t *ret)
{
	unsigned long n;
	char *end;

	if (!isdigit((unsigned char)*word))
		return false;
	errno = 0;
	n = strtoul(word, &end, 10);
	if (errno || *end || n >= UINT32_MAX)
		return false;
	*ret = (uint32_t)n;
	return true;
}

/* One word of the list: a uid, a user's name, @group or @gid. */
static int resolve(const char *domain, const char *word, struct exl3_config_id *ret,
		   struct exl3_error *err)
{
	ret->group = *word == '@';
	word += ret->group;
	if (number(word, &ret->id))
		return 0;
	if (ret->group) {
		const struct group *gr = getgrnam(word);

		if (!gr)
			return exl3_errf(err, -EINVAL, "domain %s: there is no group '%s'", domain,
					 word);
		ret->id = gr->gr_gid;
	} else {
		const struct passwd *pw = getpwnam(word);

		if (!pw)
			return exl3_errf(err, -EINVAL, "domain %s: there is no user '%s'", domain,
					 word);
		ret->id = pw->pw_uid;
	}
	return 0;
}

static int set_users(struct exl3_config_domain *domain, const char *value, struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *copy = strdup(value), *text = strdup(value);
	exl3_auto(exl3_freep) struct exl3_config_id *ids = calloc(strlen(value) + 1, sizeof(*ids));
	size_t nr = 0;
	char *save;

	if (!copy || !text || !ids)
		return exl3_errf(err, -ENOMEM, "domain %s: out of memory", domain->name);
	if (strlen(value) > USERS_MAX)
		return exl3_errf(err, -EINVAL, "domain %s: users is longer than %u bytes",
				 domain->name, USERS_MAX);
	for (char *word = strtok_r(copy, ", \t", &save); word; word = strtok_r(NULL, ", \t", &save)) {
		int rc = resolve(domain->name, word, &ids[nr++], err);

		if (rc < 0)
			return rc;
	}
	if (!nr)
		return exl3_errf(err, -EINVAL, "domain %s: users is empty", domain->name);
	free(domain->users);
	free(domain->ids);
	domain->users = exl3_take_ptr(&text);
	domain->ids = exl3_take_ptr(&ids);
	domain->nr_ids = nr;
	return 0;
}

int exl3_config_domain_set(struct exl3_config_domain *domain, const char *key, const char *value,
			   struct exl3_error *err)
{
	if (strcmp(key, "users") != 0)
		return exl3_errf(err, -EINVAL, "domain %s: unknown key '%s' (users)", domain->name,
				 key);
	return set_users(domain, value, err);
}

int exl3_config_add_domain(struct exl3_config *cfg, const char *spec, struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *copy = strdup(spec);
	struct exl3_config_domain *domain;
	char *users;

	if (!copy)
		return exl3_errf(err, -ENOMEM, "domain: out of memory");
	users = strchr(copy, '=');
	if (!users)
		return exl3_errf(err, -EINVAL, "domain: '%s' is not NAME=USER,USER...", spec);
	*users++ = 0;
	domain = exl3_config_domain_get(cfg, copy, err);
	return domain ? set_users(domain, users, err) : err->code;
}

/* A user or group belongs to one domain, or it would depend on their order. */
int exl3_config_check_domains(const struct exl3_config *cfg, struct exl3_error *err)
{
	for (size_t i = 0; i < cfg->nr_domains; i++) {
		const struct exl3_config_domain *a = &cfg->domains[i];

		if (!a->nr_ids)
			return exl3_errf(err, -EINVAL, "domain %s: no users", a->name);
		for (size_t j = 0; j < i; j++) {
			const struct exl3_config_domain *b = &cfg->domains[j];

			for (size_t k = 0; k < a->nr_ids * b->nr_ids; k++) {
				const struct exl3_config_id *x = &a->ids[k % a->nr_ids],
							    *y = &b->ids[k / a->nr_ids];

				if (x->id == y->id && x->group == y->group)
					return exl3_errf(err, -EINVAL,
							 "%s %u is in two domains, %s and %s",
							 x->group ? "group" : "user", x->id,
							 b->name, a->name);
			}
		}
	}
	return 0;
}

size_t exl3_config_domain_of(const struct exl3_config *cfg, uint32_t uid, const uint32_t *gids,
			     size_t nr_gids)
{
	for (size_t i = 0; i < cfg->nr_domains; i++) {
		for (size_t j = 0; j < cfg->domains[i].nr_ids; j++) {
			const struct exl3_config_id *id = &cfg->domains[i].ids[j];

			if (!id->group && id->id == uid)
				return i + 1;
		}
	}
	for (size_t i = 0; i < cfg->nr_domains; i++) {
		for (size_t j = 0; j < cfg->domains[i].nr_ids; j++) {
			const struct exl3_config_id *id = &cfg->domains[i].ids[j];

			for (size_t k = 0; id->group && k < nr_gids; k++) {
				if (gids[k] == id->id)
					return i + 1;
			}
		}
	}
	return 0;
}

void exl3_config_domain_fini(struct exl3_config_domain *domain)
{
	free(domain->name);
	free(domain->users);
	free(domain->ids);
}

static struct exl3_config_domain *find(struct exl3_config *cfg, const char *name)
{
	for (size_t i = 0; i < cfg->nr_domains; i++) {
		if (strcmp(cfg->domains[i].name, name) == 0)
			return &cfg->domains[i];
	}
	return NULL;
}

bool exl3_config_reload_domains(struct exl3_config *cfg, struct exl3_config *fresh)
{
	if (fresh->nr_domains != cfg->nr_domains)
		return false;
	for (size_t i = 0; i < fresh->nr_domains; i++) {
		if (!find(cfg, fresh->domains[i].name))
			return false;
	}
	for (size_t i = 0; i < fresh->nr_domains; i++) {
		struct exl3_config_domain *theirs = &fresh->domains[i],
					  *ours = find(cfg, theirs->name), old = *ours;

		*ours = *theirs;
		*theirs = old;
	}
	return true;
}
