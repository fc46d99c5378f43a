/* SPDX-License-Identifier: Apache-2.0 */
/* keep.c - descriptors of loaded weights that outlive the worker that loaded them. */
#include "daemon/keep.h"

#include "daemon/fault.h"
#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <systemd/sd-daemon.h>

/* In the store: "exl3-<id>-<n>", n the place in exl3_keep_set.fds. */
#define PREFIX    "exl3-"
#define NAME_SIZE 40

void exl3_keep_init(struct exl3_keep *keep, struct exl3_loop *loop)
{
	*keep = (struct exl3_keep){.loop = loop};
}

static void close_all(struct exl3_keep *keep, int *fds, unsigned nr)
{
	for (unsigned i = 0; i < nr; i++)
		exl3_loop_close(keep->loop, &fds[i]);
}

void exl3_keep_fini(struct exl3_keep *keep)
{
	struct exl3_keep_set *set;

	while ((set = keep->sets)) {
		keep->sets = set->next;
		for (unsigned i = 0; i < set->nr_fds; i++)
			exl3_closep(&set->fds[i]);
		free(set);
	}
	keep->nr = 0;
}

/* ---- systemd ---- */

static void store_name(const struct exl3_keep_set *set, unsigned i, char name[NAME_SIZE])
{
	snprintf(name, NAME_SIZE, PREFIX "%016llx-%u", (unsigned long long)set->id, i);
}

static void store(struct exl3_keep_set *set)
{
	char name[NAME_SIZE], text[128];

	for (unsigned i = 0; i < set->nr_fds; i++) {
		store_name(set, i, name);
		/* Not to be polled: what a driver's descriptor reports must not end its stay. */
		snprintf(text, sizeof(text), "FDSTORE=1\nFDPOLL=0\nFDNAME=%s", name);
		set->in_store = sd_pid_notify_with_fds(0, 0, text, &set->fds[i], 1) > 0;
		if (!set->in_store)
			return; /* there is no systemd */
	}
}

static void unstore(const struct exl3_keep_set *set)
{
	char name[NAME_SIZE];

	for (unsigned i = 0; set->in_store && i < set->nr_fds; i++) {
		store_name(set, i, name);
		sd_notifyf(0, "FDSTOREREMOVE=1\nFDNAME=%s", name);
	}
}

bool exl3_keep_is_ours(const char *fd_name)
{
	return fd_name && strncmp(fd_name, PREFIX, strlen(PREFIX)) == 0;
}

void exl3_keep_mark_mapped(struct exl3_keep_set *set)
{
	if (set->mapped)
		return;
	unstore(set);
	set->mapped = true;
	set->id |= EXL3_KEEP_MAPPED_ID;
	if (set->in_store)
		store(set);
}

/* ---- sets ---- */

struct exl3_keep_set *exl3_keep_find(const struct exl3_keep *keep, const char *name)
{
	for (struct exl3_keep_set *set = keep->sets; set; set = set->next) {
		if (strcmp(set->head.name, name) == 0)
			return set;
	}
	return NULL;
}

bool exl3_keep_drop(struct exl3_keep *keep, const char *name)
{
	struct exl3_keep_set **p = &keep->sets, *set;

	while (*p && strcmp((*p)->head.name, name) != 0)
		p = &(*p)->next;
	set = *p;
	if (!set)
		return false;
	*p = set->next;
	keep->nr--;
	unstore(set);
	close_all(keep, set->fds, set->nr_fds);
	free(set);
	return true;
}

/* Does the head fit what came with it? */
static int check(const struct exl3_keep *keep, int *fds, unsigned nr_fds,
		 struct exl3_manifest_head *head, struct exl3_error *err)
{
	int rc = nr_fds ? exl3_manifest_peek(fds[0], head, err)
			: exl3_errf(err, -EINVAL, "manifest: it is missing");

	if (rc < 0)
		return rc;
	if (nr_fds != 1 + head->nr_slabs + (head->tensor_bytes ? 1u : 0u))
		return exl3_errf(err, -EINVAL, "model %s: %u descriptors do not make %u slabs%s",
				 head->name, nr_fds, head->nr_slabs,
				 head->tensor_bytes ? " and a tensor file" : "");
	if (keep->nr >= EXL3_MODELS_MAX && !exl3_keep_find(keep, head->name))
		return exl3_errf(err, -EDQUOT, "%u models are kept already", keep->nr);
	return 0;
}

/* Takes @fds, which fit @head. */
static void insert(struct exl3_keep *keep, struct exl3_keep_set *set,
		   const struct exl3_manifest_head *head, int *fds, unsigned nr_fds)
{
	struct exl3_keep_set **p = &keep->sets;

	exl3_keep_drop(keep, head->name);
	set->head = *head;
	set->nr_fds = nr_fds;
	for (unsigned i = 0; i < nr_fds; i++)
		set->fds[i] = exl3_take_fd(&fds[i]);
	while (*p && strcmp((*p)->head.name, head->name) < 0)
		p = &(*p)->next;
	set->next = *p;
	*p = set;
	keep->nr++;
}

int exl3_keep_put(struct exl3_keep *keep, const char *name, int *fds, unsigned nr_fds,
		  struct exl3_error *err)
{
	struct exl3_manifest_head head;
	struct exl3_keep_set *set = NULL;
	int rc = nr_fds > EXL3_KEPT_FDS ? exl3_errf(err, -EINVAL, "%u descriptors", nr_fds)
					: check(keep, fds, nr_fds, &head, err);

	if (rc == 0 && strcmp(head.name, name) != 0)
		rc = exl3_errf(err, -EINVAL, "the manifest of model '%s' came for '%.100s'",
			       head.name, name);
	if (rc == 0) {
		set = exl3_fault("keep.put") ? NULL : calloc(1, sizeof(*set));
		if (!set)
			rc = exl3_errf(err, -ENOMEM, "out of memory");
	}
	if (rc < 0) {
		close_all(keep, fds, nr_fds);
		return rc;
	}
	insert(keep, set, &head, fds, nr_fds);
	if (getrandom(&set->id, sizeof(set->id), 0) != (ssize_t)sizeof(set->id))
		set->id = exl3_now_ns();
	set->id &= ~EXL3_KEEP_MAPPED_ID;
	store(set);
	return 0;
}

/* ---- taking over ---- */

/* What came of one set, by the places of its descriptors. */
struct group {
	uint64_t id;
	int fds[EXL3_KEPT_FDS]; /* owned, -1: did not come */
};

/* -1: none of ours. */
static int parse_name(const char *name, uint64_t *id)
{
	unsigned long long v;
	unsigned place;
	int end = 0;

	if (sscanf(name, PREFIX "%16llx-%2u%n", &v, &place, &end) != 2 || name[end] ||
	    place >= EXL3_KEPT_FDS)
		return -1;
	*id = v;
	return (int)place;
}

static void take_group(struct exl3_keep *keep, struct group *g)
{
	struct exl3_keep_set *set = calloc(1, sizeof(*set)), ghost = {.id = g->id, .in_store = true};
	struct exl3_manifest_head head;
	struct exl3_error err;
	unsigned nr = 0;
	int rc;

	while (nr < EXL3_KEPT_FDS && g->fds[nr] >= 0)
		nr++;
	for (unsigned i = nr; i < EXL3_KEPT_FDS; i++)
		if (g->fds[i] >= 0)
			nr = 0; /* one in between is missing */
	rc = set ? check(keep, g->fds, nr, &head, &err)
		 : exl3_errf(&err, -ENOMEM, "out of memory");
	if (rc == 0 && exl3_keep_find(keep, head.name))
		rc = exl3_errf(&err, -EEXIST, "model %s is there twice", head.name);
	if (rc < 0) {
		exl3_warn("stored weights are dropped: %s", err.text);
		ghost.nr_fds = EXL3_KEPT_FDS;
		unstore(&ghost);
		close_all(keep, g->fds, EXL3_KEPT_FDS);
		free(set);
		return;
	}
	set->id = g->id;
	set->mapped = g->id & EXL3_KEEP_MAPPED_ID;
	insert(keep, set, &head, g->fds, nr);
	set->in_store = true;
	exl3_info("model %s: %.1f MiB of weights were stored by generation %u of an earlier daemon",
		  head.name, (double)head.slab_bytes / 1048576.0, head.generation);
}

void exl3_keep_inherit(struct exl3_keep *keep)
{
	char **names = NULL;
	int nr = sd_listen_fds_with_names(0, &names);
	struct group *groups = nr > 0 ? calloc((size_t)nr, sizeof(*groups)) : NULL;
	unsigned nr_groups = 0;

	for (int i = 0; i < nr; i++) {
		int fd = SD_LISTEN_FDS_START + i, place;
		uint64_t id = 0;
		unsigned g = 0;

		if (!exl3_keep_is_ours(names[i]))
			continue;
		fcntl(fd, F_SETFD, FD_CLOEXEC);
		place = parse_name(names[i], &id);
		if (!groups || place < 0) {
			exl3_loop_close(keep->loop, &fd);
			sd_notifyf(0, "FDSTOREREMOVE=1\nFDNAME=%s", names[i]);
			continue;
		}
		while (g < nr_groups && groups[g].id != id)
			g++;
		if (g == nr_groups) {
			groups[nr_groups++].id = id;
			for (unsigned k = 0; k < EXL3_KEPT_FDS; k++)
				groups[g].fds[k] = -1;
		}
		exl3_loop_close(keep->loop, &groups[g].fds[place]); /* one that came twice */
		groups[g].fds[place] = fd;
	}
	for (unsigned g = 0; g < nr_groups; g++)
		take_group(keep, &groups[g]);
	free(groups);
	for (int i = 0; i < nr; i++)
		free(names[i]);
	free(names);
}

static const struct exl3_config_model *configured(const struct exl3_config *cfg, const char *name)
{
	for (size_t i = 0; i < cfg->nr_models; i++) {
		if (strcmp(cfg->models[i].name, name) == 0)
			return &cfg->models[i];
	}
	return NULL;
}

static bool any_mapped(const struct exl3_config *cfg)
{
	for (size_t i = 0; i < cfg->nr_tenants; i++) {
		if (cfg->tenants[i].mapped)
			return true;
	}
	return false;
}

/* True: it is wanted still. */
static bool settle(struct exl3_keep_set *set, struct exl3_config *cfg)
{
	const struct exl3_config_model *m = configured(cfg, set->head.name);
	char spec[sizeof(set->head.name) + sizeof(set->head.path) + 256],
		device[sizeof(set->head.device) + 8];
	bool gpu = strncmp(set->head.device, "GPU-", 4) == 0;
	struct exl3_error err;

	if (gpu && any_mapped(cfg))
		exl3_keep_mark_mapped(set);
	if (m)
		return true; /* another path, another device: the worker sees that */
	if (!(set->head.flags & EXL3_MANIFEST_BY_CLIENT))
		return false;
	snprintf(device, sizeof(device), "%s%s", gpu ? "cuda:" : "cpu", gpu ? set->head.device : "");
	exl3_config_model_spec(spec, sizeof(spec), set->head.name, set->head.path,
			       set->head.flags & EXL3_MANIFEST_DEVICE_TENSORS, device);
	return exl3_config_add_model(cfg, spec, true, &err) == 0;
}

void exl3_keep_settle(struct exl3_keep *keep, struct exl3_config *cfg)
{
	struct exl3_keep_set *next;

	for (struct exl3_keep_set *set = keep->sets; set; set = next) {
		next = set->next;
		if (settle(set, cfg))
			continue;
		exl3_info("model %s: stored weights are dropped: it is not configured any more",
			  set->head.name);
		exl3_keep_drop(keep, set->head.name);
	}
}
