/* SPDX-License-Identifier: Apache-2.0 */
/* share.c - one copy of a model's weights for the workers of all domains: who loads it, who adopts it. */
#include "daemon/share.h"

#include "daemon/fault.h"
#include "daemon/log.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A load that others wait for, or might. */
struct exl3_share_load {
	struct exl3_share_load *next;
	struct exl3_domain *loader; /* borrowed */
	uint32_t waiting;           /* a bit per domain */
	char name[EXL3_NAME_MAX + 1];
};

_Static_assert(EXL3_DOMAINS_MAX <= 32, "a bit for each domain");

void exl3_share_init(struct exl3_share *share, const struct exl3_config *cfg,
		     struct exl3_domain *domains, const uint32_t *nr_domains,
		     struct exl3_loop *loop)
{
	*share = (struct exl3_share){.cfg = cfg, .domains = domains, .nr_domains = nr_domains};
	exl3_keep_init(&share->keep, loop);
}

void exl3_share_fini(struct exl3_share *share)
{
	struct exl3_share_load *load;

	while ((load = share->loads)) {
		share->loads = load->next;
		free(load);
	}
	exl3_keep_fini(&share->keep);
}

static uint32_t bit(const struct exl3_share *share, const struct exl3_domain *d)
{
	return 1u << (d - share->domains);
}

static bool never(const struct exl3_share *share)
{
	return strcmp(share->cfg->adopt, "never") == 0;
}

static bool configured(const struct exl3_share *share, const char *name)
{
	for (size_t i = 0; i < share->cfg->nr_models; i++) {
		if (strcmp(share->cfg->models[i].name, name) == 0)
			return true;
	}
	return false;
}

/* ---- answers ---- */

static void alone(struct exl3_domain *d, const char *name)
{
	exl3_domain_tell(d, EXL3_SUP_ALONE, 0, name);
}

static void give(struct exl3_share *share, struct exl3_domain *d, struct exl3_keep_set *set)
{
	bool all = set->mapped || strcmp(share->cfg->adopt, "verify") == 0;
	unsigned flags = all ? EXL3_SUP_VERIFY_ALL : 0;

	if (exl3_fault("share.give") || !exl3_domain_send(d, EXL3_SUP_KEPT, flags, set->id, set->head.name, set->fds,
			      set->nr_fds)) {
		exl3_warn("model %s: its kept weights cannot be handed on: no descriptors left",
			  set->head.name);
		alone(d, set->head.name);
	}
}

/* ---- loads ---- */

static struct exl3_share_load **find(struct exl3_share *share, const char *name)
{
	struct exl3_share_load **p = &share->loads;

	while (*p && strcmp((*p)->name, name) != 0)
		p = &(*p)->next;
	return p;
}

static void forget(struct exl3_share_load **p)
{
	struct exl3_share_load *load = *p;

	*p = load->next;
	free(load);
}

/* The loader is none any more: the next one, if somebody waits. False: nobody, the entry is gone. */
static bool next_loader(struct exl3_share *share, struct exl3_share_load **p)
{
	struct exl3_share_load *load = *p;

	for (uint32_t i = 0; i < *share->nr_domains; i++) {
		if (!(load->waiting & 1u << i))
			continue;
		load->waiting &= ~(1u << i);
		load->loader = &share->domains[i];
		alone(load->loader, load->name);
		return true;
	}
	forget(p);
	return false;
}

/* @not_id: the set that it has had already, 0: none. */
static void want(struct exl3_share *share, struct exl3_domain *d, const char *name, uint64_t not_id)
{
	struct exl3_share_load **p = find(share, name), *load = *p;
	struct exl3_keep_set *set = exl3_keep_find(&share->keep, name);

	if (never(share)) {
		exl3_keep_drop(&share->keep, name); /* of before a SIGHUP, or from systemd's store */
		alone(d, name);
		return;
	}
	if (set && (set->id | EXL3_KEEP_MAPPED_ID) != (not_id | EXL3_KEEP_MAPPED_ID)) {
		give(share, d, set);
		return;
	}
	if (load && load->loader != d) {
		load->waiting |= bit(share, d);
		return;
	}
	if (!load) {
		/* Without memory for an entry the others load too. */
		load = calloc(1, sizeof(*load));
		if (load) {
			load->loader = d;
			snprintf(load->name, sizeof(load->name), "%.*s", (int)EXL3_NAME_MAX, name);
			*p = load;
		}
	}
	alone(d, name);
}

static void over(struct exl3_share *share, struct exl3_domain *d, const char *name)
{
	struct exl3_share_load **p = find(share, name);

	if (*p && (*p)->loader == d)
		next_loader(share, p);
}

static void keep(struct exl3_share *share, struct exl3_domain *d, const char *name,
		 const char *why, int *fds, unsigned nr_fds)
{
	struct exl3_share_load **p = find(share, name);
	struct exl3_keep_set *set;
	struct exl3_error err;

	if (never(share) || !configured(share, name)) { /* unloaded while this was under way */
		for (unsigned i = 0; i < nr_fds; i++)
			exl3_loop_close(share->keep.loop, &fds[i]);
		over(share, d, name);
		return;
	}
	if (exl3_keep_put(&share->keep, name, fds, nr_fds, &err) < 0) {
		exl3_warn("domain %s: weights cannot be kept: %s", d->name, err.text);
		over(share, d, name);
		return;
	}
	exl3_domain_event(d, "loaded", "model %s%s%s", name, why ? ", not adopted: " : "",
			  why ? why : "");
	set = exl3_keep_find(&share->keep, name);
	set->users = bit(share, d);
	if (!*p)
		return;
	for (uint32_t i = 0; i < *share->nr_domains; i++) {
		if ((*p)->waiting & 1u << i)
			give(share, &share->domains[i], set);
	}
	forget(p);
}

/* Whoever maps damaged weights computes wrong results: better none. */
static void end_users(struct exl3_share *share, const struct exl3_keep_set *set,
		      const struct exl3_domain *but)
{
	for (uint32_t i = 0; i < *share->nr_domains; i++) {
		struct exl3_domain *d = &share->domains[i];

		if (!(set->users & 1u << i) || d == but || !d->worker)
			continue;
		exl3_err("domain %s: its worker is killed: the weights of model %s that it uses are "
			 "damaged", d->name, set->head.name);
		kill(d->worker, SIGKILL);
	}
}

static void useless(struct exl3_share *share, struct exl3_domain *d, const char *name,
		    const char *why, uint64_t id, bool damaged)
{
	struct exl3_keep_set *set = exl3_keep_find(&share->keep, name);

	exl3_domain_event(d, "refused", "model %s: kept weights are not used: %s", name,
			  why ? why : "no reason given");
	/* Another worker may have been quicker: then there are others by now. */
	if (set && (set->id | EXL3_KEEP_MAPPED_ID) == (id | EXL3_KEEP_MAPPED_ID)) {
		if (damaged)
			end_users(share, set, d);
		exl3_keep_drop(&share->keep, name);
	}
	want(share, d, name, id);
}

static void adopted(struct exl3_share *share, struct exl3_domain *d, const char *name,
		    const char *why)
{
	struct exl3_keep_set *set = exl3_keep_find(&share->keep, name);

	exl3_domain_event(d, "adopted", "model %s%s%s%s", name,
			  set && set->mapped ? ", after all its hashes" : "",
			  why ? "; the files have changed and are refused: " : "", why ? why : "");
	if (set)
		set->users |= bit(share, d);
	over(share, d, name); /* it was to load other files, and could not */
}

/* Whoever has memory of the device mapped can make his mapping writable, and keep it when its worker has gone. */
static void mapped(struct exl3_share *share, const char *name)
{
	struct exl3_keep_set *set = exl3_keep_find(&share->keep, name);

	if (set)
		exl3_keep_mark_mapped(set);
}

bool exl3_share_message(struct exl3_share *share, struct exl3_domain *d,
			const struct exl3_sup_msg *msg, int *fds, unsigned nr_fds)
{
	static char name[EXL3_SUP_TEXT_MAX]; /* loop thread only: there must be memory, the worker waits for an answer */
	const char *why = strchr(msg->text, '\n');

	snprintf(name, sizeof(name), "%.*s", (int)strcspn(msg->text, "\n"), msg->text);
	if (why)
		why++;
	switch (msg->type) {
	case EXL3_SUP_WANT:
		want(share, d, name, 0);
		return true;
	case EXL3_SUP_STALE:
		want(share, d, name, msg->id);
		return true;
	case EXL3_SUP_KEEP:
		keep(share, d, name, why, fds, nr_fds);
		return true;
	case EXL3_SUP_ADOPTED:
		adopted(share, d, name, why);
		return true;
	case EXL3_SUP_USELESS:
		useless(share, d, name, why, msg->id, msg->flags & EXL3_SUP_DAMAGED);
		return true;
	case EXL3_SUP_OVER:
		over(share, d, name);
		return true;
	case EXL3_SUP_MAPPED:
		mapped(share, name);
		return true;
	default:
		return false;
	}
}

void exl3_share_removed(struct exl3_share *share, const char *name)
{
	struct exl3_share_load **p = find(share, name);

	exl3_keep_drop(&share->keep, name);
	if (*p)
		forget(p);
}

void exl3_share_ended(struct exl3_share *share, struct exl3_domain *d)
{
	struct exl3_share_load **p = &share->loads;

	for (struct exl3_keep_set *set = share->keep.sets; set; set = set->next)
		set->users &= ~bit(share, d);
	while (*p) {
		(*p)->waiting &= ~bit(share, d);
		if ((*p)->loader != d || next_loader(share, p))
			p = &(*p)->next;
	}
}

void exl3_share_users(const struct exl3_share *share, const struct exl3_keep_set *set, char *text,
		      size_t size)
{
	size_t len = 0;

	text[0] = 0;
	for (uint32_t i = 0; i < *share->nr_domains && len < size; i++) {
		if (set->users & 1u << i)
			len += (size_t)snprintf(text + len, size - len, "%s%s", len ? " " : "",
						share->domains[i].name);
	}
}
