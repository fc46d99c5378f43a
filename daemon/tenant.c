/* SPDX-License-Identifier: Apache-2.0 */
/* tenant.c - whose a client is and what it may: policy, limits and what is held against them. */
#include "daemon/tenant.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- tokens ---- */

/* Time that the missing tokens need. */
static uint64_t owed_ns(const struct exl3_tokens *t, uint64_t now_ns)
{
	return t->until_ns > now_ns ? t->until_ns - now_ns : 0;
}

void exl3_tokens_set(struct exl3_tokens *t, uint64_t per_second, uint64_t burst, uint64_t now_ns)
{
	uint64_t missing = t->interval_ns ? (owed_ns(t, now_ns) + t->interval_ns - 1) / t->interval_ns : 0;

	t->interval_ns = per_second ? 1000000000u / per_second : 0;
	t->burst = burst ? burst : (per_second + 9) / 10;
	t->until_ns = now_ns + (missing < t->burst ? missing : t->burst) * t->interval_ns;
}

uint32_t exl3_tokens_there(const struct exl3_tokens *t, uint64_t now_ns)
{
	uint64_t full = t->burst * t->interval_ns, owed = owed_ns(t, now_ns);

	if (!t->interval_ns)
		return UINT32_MAX;
	return owed >= full ? 0 : (uint32_t)((full - owed) / t->interval_ns);
}

void exl3_tokens_take(struct exl3_tokens *t, uint32_t nr, uint64_t now_ns)
{
	if (!t->interval_ns)
		return;
	assert(nr <= exl3_tokens_there(t, now_ns));
	t->until_ns = now_ns + owed_ns(t, now_ns) + nr * t->interval_ns;
}

uint64_t exl3_tokens_when(const struct exl3_tokens *t, uint64_t now_ns)
{
	uint64_t full = t->burst * t->interval_ns, owed = owed_ns(t, now_ns);

	/* One is there as soon as no more than all but one are missing. */
	if (!t->interval_ns || owed + t->interval_ns <= full)
		return now_ns;
	return now_ns + owed + t->interval_ns - full;
}

/* ---- policy ---- */

static void use_conf(struct exl3_tenant *t, uint64_t now_ns)
{
	for (uint32_t i = 0; i < EXL3_DEVICES_MAX; i++) {
		t->sched[i].weight = (uint32_t)t->conf.weight;
		t->sched[i].priority = (uint32_t)t->conf.priority;
	}
	exl3_tokens_set(&t->tokens, t->conf.per_second, t->conf.burst, now_ns);
}

static struct exl3_tenant *find(const struct exl3_policy *p, const char *name)
{
	for (struct exl3_tenant *t = p->list; t; t = t->next) {
		if (strcmp(t->conf.name, name) == 0)
			return t;
	}
	return NULL;
}

static void tenant_free(struct exl3_policy *p, struct exl3_tenant *t)
{
	struct exl3_tenant **at = &p->list;

	while (*at && *at != t)
		at = &(*at)->next;
	if (*at)
		*at = t->next;
	p->nr--;
	p->slots &= ~(1ull << t->slot);
	if (t->metrics)
		exl3_metric_label_drop(&t->metrics->label);
	exl3_config_tenant_fini(&t->conf);
	free(t);
}

/* What apply() makes before it changes anything: the new conf of each tenant, and those that are new. */
struct staged {
	struct exl3_config_tenant conf;
	struct exl3_tenant *tenant;
	bool made;
};

static void unstage(struct staged *staged, size_t nr)
{
	for (size_t i = 0; i < nr; i++) {
		exl3_config_tenant_fini(&staged[i].conf);
		if (staged[i].made)
			free(staged[i].tenant);
	}
	free(staged);
}

static int stage(const struct exl3_policy *p, const struct exl3_config_tenant *conf,
		 struct staged *ret, struct exl3_error *err)
{
	int rc = conf->name ? exl3_config_tenant_copy(&ret->conf, conf, err)
			    : exl3_config_tenant_init(&ret->conf, EXL3_TENANT_DEFAULT, err);

	if (rc < 0)
		return rc;
	ret->tenant = find(p, ret->conf.name);
	if (ret->tenant)
		return 0;
	ret->tenant = calloc(1, sizeof(*ret->tenant));
	if (!ret->tenant) {
		exl3_config_tenant_fini(&ret->conf);
		return exl3_errf(err, -ENOMEM, "tenants: out of memory");
	}
	ret->made = true;
	return 0;
}

/* What is no longer named is retired, and freed if nothing refers to it. */
static void retire(struct exl3_policy *p, const struct staged *staged, size_t nr)
{
	struct exl3_tenant *next;

	for (struct exl3_tenant *t = p->list; t; t = next) {
		next = t->next;
		t->retired = true;
		for (size_t i = 0; i < nr; i++)
			t->retired &= staged[i].tenant != t;
		if (t->retired && !t->refs)
			tenant_free(p, t);
	}
}

/* All are there: they become the list, in their order, before those that are retired. */
static void commit(struct exl3_policy *p, struct staged *staged, size_t nr, uint64_t now_ns)
{
	struct exl3_tenant **tail, *old, *t;

	retire(p, staged, nr);
	old = p->list;
	tail = &p->list;
	for (size_t i = 0; i < nr; i++) {
		t = staged[i].tenant;
		if (staged[i].made) {
			t->slot = (uint32_t)__builtin_ctzll(~p->slots);
			p->slots |= 1ull << t->slot;
			p->nr++;
			t->policy = p;
			if (p->metrics) {
				t->metrics = &p->metrics->tenant[t->slot];
				exl3_metric_label_set(&t->metrics->label, sizeof(*t->metrics),
						      staged[i].conf.name);
			}
		} else {
			struct exl3_tenant **at = &old;

			while (*at != t)
				at = &(*at)->next;
			*at = t->next;
			exl3_config_tenant_fini(&t->conf);
		}
		t->conf = staged[i].conf;
		use_conf(t, now_ns);
		*tail = t;
		tail = &t->next;
		p->fallback = t; /* the last one */
	}
	*tail = old;
	p->nr_configured = (uint32_t)nr;
	free(staged);
}

/* Tenants that will still be there: those named, and others that something refers to. */
static uint32_t survivors(const struct exl3_policy *p, const struct staged *staged, size_t nr)
{
	uint32_t n = (uint32_t)nr;

	for (const struct exl3_tenant *t = p->list; t; t = t->next) {
		bool named = false;

		for (size_t i = 0; i < nr; i++)
			named |= staged[i].tenant == t;
		n += !named && t->refs;
	}
	return n;
}

int exl3_policy_apply(struct exl3_policy *p, const struct exl3_config *cfg, uint64_t now_ns,
		      struct exl3_error *err)
{
	static const struct exl3_config_tenant nothing; /* without a name: the default one */
	const struct exl3_config_tenant *fallback = &nothing;
	struct staged *staged = calloc(cfg->nr_tenants + 1, sizeof(*staged));
	size_t nr = 0;
	int rc = 0;

	if (!staged)
		return exl3_errf(err, -ENOMEM, "tenants: out of memory");
	for (size_t i = 0; i < cfg->nr_tenants && rc == 0; i++) {
		/* It matches everybody, so it is the last wherever it stands. */
		if (strcmp(cfg->tenants[i].name, EXL3_TENANT_DEFAULT) == 0) {
			fallback = &cfg->tenants[i];
			continue;
		}
		rc = stage(p, &cfg->tenants[i], &staged[nr], err);
		nr += rc == 0;
	}
	if (rc == 0) {
		rc = stage(p, fallback, &staged[nr], err);
		nr += rc == 0;
	}
	if (rc == 0 && survivors(p, staged, nr) > EXL3_TENANTS_MAX)
		rc = exl3_errf(err, -EDQUOT,
			       "more than %u tenants, with those that are no longer named and whose "
			       "clients are still there",
			       EXL3_TENANTS_MAX);
	if (rc < 0) {
		unstage(staged, nr);
		return rc;
	}
	commit(p, staged, nr, now_ns);
	return 0;
}

void exl3_policy_fini(struct exl3_policy *p)
{
	while (p->list) {
		assert(!p->list->refs);
		tenant_free(p, p->list);
	}
}

struct exl3_tenant *exl3_policy_match(const struct exl3_policy *p, const struct exl3_identity *who)
{
	for (struct exl3_tenant *t = p->list; t && !t->retired; t = t->next) {
		if (exl3_config_tenant_matches(&t->conf, who->uid, who->gid, who->groups,
					       who->nr_groups, who->cgroup))
			return t;
	}
	return p->fallback;
}

bool exl3_tenant_cuda_ipc(const struct exl3_tenant *t)
{
	return t->conf.cuda_ipc < 0 ? t->policy->nr_configured == 1 : t->conf.cuda_ipc;
}

bool exl3_tenant_model(const struct exl3_tenant *t, const char *model)
{
	return exl3_config_list_matches(&t->conf.models, model);
}

struct exl3_tenant *exl3_tenant_get(struct exl3_tenant *t)
{
	t->refs++;
	return t;
}

struct exl3_tenant *exl3_tenant_put(struct exl3_tenant *t)
{
	if (t && --t->refs == 0 && t->retired)
		tenant_free(t->policy, t);
	return NULL;
}

/* ---- limits ---- */

int exl3_tenant_add_client(struct exl3_tenant *t, struct exl3_error *err)
{
	if (t->conf.clients && t->clients >= t->conf.clients)
		return exl3_errf(err, -EDQUOT,
				 "client refused: tenant %s may have %llu clients (clients), has %u",
				 t->conf.name, (unsigned long long)t->conf.clients, t->clients);
	t->clients++;
	return 0;
}

int exl3_tenant_add_channel(struct exl3_tenant *t, struct exl3_error *err)
{
	if (t->conf.channels && t->channels >= t->conf.channels)
		return exl3_errf(err, -EDQUOT,
				 "channel refused: tenant %s may have %llu channels (channels), has %u",
				 t->conf.name, (unsigned long long)t->conf.channels, t->channels);
	t->channels++;
	return 0;
}

int exl3_tenant_charge(struct exl3_tenant *t, enum exl3_metric_kind kind, uint64_t bytes,
		       struct exl3_error *err)
{
	static const char *const what[EXL3_BYTES_NR] = {"arena", "import", "channel"};
	uint64_t max = t->conf.bytes;

	if (max && (t->bytes > max || bytes > max - t->bytes))
		return exl3_errf(err, -EDQUOT,
				 "%s of %llu bytes refused: tenant %s may register %llu bytes (bytes), "
				 "holds %llu",
				 what[kind], (unsigned long long)bytes, t->conf.name,
				 (unsigned long long)max, (unsigned long long)t->bytes);
	t->bytes += bytes;
	t->by_kind[kind] += bytes;
	return 0;
}

void exl3_tenant_uncharge(struct exl3_tenant *t, enum exl3_metric_kind kind, uint64_t bytes)
{
	assert(bytes <= t->by_kind[kind]);
	t->bytes -= bytes;
	t->by_kind[kind] -= bytes;
}

/* Requests of them that were taken and not answered are those that were accepted and not answered: others are
 * answered at once. */
void exl3_policy_publish(const struct exl3_policy *p)
{
	for (const struct exl3_tenant *t = p->list; t; t = t->next) {
		struct exl3_metrics_tenant *m = t->metrics;

		if (!m)
			continue;
		exl3_metric_set(&m->clients, t->clients);
		exl3_metric_set(&m->channels, t->channels);
		exl3_metric_set(&m->rows_now, t->rows);
		exl3_metric_set(&m->credits, t->credits);
		exl3_metric_set(&m->credits_used, t->requests);
		for (unsigned k = 0; k < EXL3_BYTES_NR; k++)
			exl3_metric_set(&m->bytes[k], t->by_kind[k]);
	}
}

int exl3_tenant_check_model(const struct exl3_tenant *t, const char *model, struct exl3_error *err)
{
	if (exl3_tenant_model(t, model))
		return 0;
	return exl3_errf(err, -EPERM, "model '%.100s' refused: tenant %s may use %.200s (models)",
			 model, t->conf.name,
			 t->conf.models.nr ? t->conf.models.text : "none");
}
