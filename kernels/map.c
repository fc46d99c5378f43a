/* SPDX-License-Identifier: Apache-2.0 */
/* map.c - reads the table of a mapped model, checks all of it, and makes what kernels want. */
#include "kernels/map.h"

#include "kernels/format.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define SEALS    (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)
#define SIDE_MAX (1u << 24) /* of a matrix: sizes below do not overflow */

/* ---- checks ---- */

static int broken(struct exl3_error *err, const char *what, uint32_t i)
{
	return exl3_errf(err, -EINVAL, "the table of modules is broken: %s %u", what, i);
}

static bool ends(const char *text, size_t size)
{
	return memchr(text, 0, size) != NULL;
}

static int check_head(const struct exl3_map_head *h, uint64_t bytes, struct exl3_error *err)
{
	struct exl3_map_layout l;

	if (bytes < sizeof(*h) || memcmp(h->magic, EXL3_MAP_MAGIC, sizeof(h->magic)))
		return exl3_errf(err, -EINVAL, "that is no table of modules");
	if (h->version != EXL3_MAP_VERSION)
		return exl3_errf(err, -EOPNOTSUPP, "the table of modules has version %u, this library reads %u: "
				 "update the older one of daemon and library", h->version, EXL3_MAP_VERSION);
	exl3_map_layout(h, &l);
	if (h->bytes != bytes || l.end != bytes || h->names_bytes >= EXL3_MAP_BYTES_MAX)
		return exl3_errf(err, -EINVAL, "the table of modules is broken: its sizes contradict each other");
	if (h->flags & ~EXL3_MAP_FLAGS || !h->slab_bytes || h->slab_bytes > 1ull << 47)
		return exl3_errf(err, -EINVAL, "the table of modules is broken: flags or the slab's size");
	if (!ends(h->backend, sizeof(h->backend)) || !ends(h->uuid, sizeof(h->uuid)) ||
	    !ends(h->driver, sizeof(h->driver)) || !ends(h->device, sizeof(h->device)) ||
	    !ends(h->fingerprint, sizeof(h->fingerprint)) || !ends(h->model, sizeof(h->model)))
		return exl3_errf(err, -EINVAL, "the table of modules is broken: a text has no end");
	return 0;
}

static bool inside(const struct exl3_map_head *h, uint64_t at, uint64_t bytes)
{
	return at % 16 == 0 && at <= h->slab_bytes && bytes <= h->slab_bytes - at;
}

static int check_matrices(const struct exl3_map *map, struct exl3_error *err)
{
	const struct exl3_map_head *h = map->head;

	for (uint32_t i = 0; i < h->nr_matrices; i++) {
		const struct exl3_map_matrix *m = &map->matrices[i];

		if (!m->k || !m->n || m->k > SIDE_MAX || m->n > SIDE_MAX || m->k % EXL3_HAD ||
		    m->n % EXL3_HAD || m->k_log > m->k || m->n_log > m->n || m->k - m->k_log >= EXL3_HAD ||
		    m->n - m->n_log >= EXL3_HAD)
			return broken(err, "sizes of matrix", i);
		if (!exl3_rate_valid(m->rate2, m->codebook) || m->bias > 1)
			return broken(err, "bitrate or codebook of matrix", i);
		if (!inside(h, m->trellis, exl3_trellis_bytes(m->k, m->n, m->rate2)) ||
		    !inside(h, m->suh, 2ull * m->k) || !inside(h, m->svh, 2ull * m->n) ||
		    (m->bias && !inside(h, m->bias_at, 4ull * m->n)))
			return broken(err, "weights outside of the slab, matrix", i);
	}
	return 0;
}

static bool same_input(const struct exl3_map_matrix *a, const struct exl3_map_matrix *b)
{
	return a->k == b->k && a->k_log == b->k_log;
}

static bool same_output(const struct exl3_map_matrix *a, const struct exl3_map_matrix *b)
{
	return a->n == b->n && a->n_log == b->n_log;
}

static bool check_linear(const struct exl3_map *map, const struct exl3_map_module *mod)
{
	const uint32_t *s = map->shards + mod->first;

	if (mod->nr > EXL3_MAP_SHARDS || mod->first > map->head->nr_shards ||
	    mod->nr > map->head->nr_shards - mod->first || mod->act)
		return false;
	for (uint32_t i = 0; i < mod->nr; i++) {
		if (s[i] >= map->head->nr_matrices ||
		    !same_input(&map->matrices[s[0]], &map->matrices[s[i]]))
			return false;
	}
	return true;
}

/* Sizes on both sides of the activation meet, and all experts of a routed block are of one size; slices of an
 * MLP may each have their own width. */
static bool check_experts(const struct exl3_map *map, const struct exl3_map_module *mod)
{
	const struct exl3_map_expert *e = map->experts + mod->first;
	uint32_t nr = map->head->nr_matrices;
	const struct exl3_map_matrix *m = map->matrices;

	if (mod->first > map->head->nr_experts || mod->nr > map->head->nr_experts - mod->first ||
	    mod->act == EXL3_ACT_DEFAULT || mod->act >= EXL3_ACT_NR)
		return false;
	for (uint32_t i = 0; i < mod->nr; i++) {
		bool gated = e[i].gate != EXL3_MAP_NONE;

		if (e[i].up >= nr || e[i].down >= nr || (gated && e[i].gate >= nr))
			return false;
		if (gated != (e[0].gate != EXL3_MAP_NONE) || (!gated && mod->act != EXL3_ACT_RELU2))
			return false;
		if (gated && (!same_input(&m[e[i].gate], &m[e[i].up]) || !same_output(&m[e[i].gate], &m[e[i].up])))
			return false;
		if (m[e[i].down].k != m[e[i].up].n || m[e[i].down].k_log != m[e[i].up].n_log)
			return false;
		if (!same_input(&m[e[0].up], &m[e[i].up]) || !same_output(&m[e[0].down], &m[e[i].down]) ||
		    (mod->kind == EXL3_MOD_MOE && !same_output(&m[e[0].up], &m[e[i].up])))
			return false;
	}
	return true;
}

static int check_modules(const struct exl3_map *map, struct exl3_error *err)
{
	const struct exl3_map_head *h = map->head;

	if (h->nr_modules && (!h->names_bytes || map->names[h->names_bytes - 1]))
		return exl3_errf(err, -EINVAL, "the table of modules is broken: a name has no end");
	for (uint32_t i = 0; i < h->nr_modules; i++) {
		const struct exl3_map_module *mod = &map->modules[i];
		int order = 0;

		if (mod->name >= h->names_bytes)
			return broken(err, "name of module", i);
		if (i)
			order = strcmp(map->names + mod[-1].name, map->names + mod->name);
		if (i && (order > 0 || (!order && mod[-1].kind >= mod->kind)))
			return broken(err, "order of module", i);
		if (!mod->nr || !isfinite(mod->limit) || mod->limit < 0 || !isfinite(mod->routed_scale) ||
		    !(mod->kind == EXL3_MOD_LINEAR ? check_linear(map, mod)
		      : mod->kind == EXL3_MOD_MOE || mod->kind == EXL3_MOD_MLP ? check_experts(map, mod)
									       : false))
			return broken(err, "module", i);
	}
	return 0;
}

int exl3_map_read(int fd, struct exl3_map *ret, struct exl3_error *err)
{
	int seals = fcntl(fd, F_GET_SEALS), rc;
	struct exl3_map map = {0};
	struct exl3_map_layout l;
	struct stat st;
	char *base;

	/* Without them it could change after the checks, or end under the mapping. */
	if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &st) < 0)
		return exl3_errf(err, -EINVAL, "the table of modules is not sealed");
	if (st.st_size < (off_t)sizeof(struct exl3_map_head) || (uint64_t)st.st_size > EXL3_MAP_BYTES_MAX)
		return exl3_errf(err, -EINVAL, "the table of modules has %lld bytes", (long long)st.st_size);
	base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return exl3_errf(err, -errno, "the table of modules: mmap: %m");
	map.head = (const void *)base;
	rc = check_head(map.head, (uint64_t)st.st_size, err);
	if (rc == 0) {
		exl3_map_layout(map.head, &l);
		map.matrices = (const void *)(base + l.matrices);
		map.modules = (const void *)(base + l.modules);
		map.shards = (const void *)(base + l.shards);
		map.experts = (const void *)(base + l.experts);
		map.names = base + l.names;
		rc = check_matrices(&map, err);
	}
	if (rc == 0)
		rc = check_modules(&map, err);
	if (rc < 0)
		munmap(base, (size_t)st.st_size);
	else
		*ret = map;
	return rc;
}

void exl3_map_fini(struct exl3_map *map)
{
	if (map->head)
		munmap((void *)(uintptr_t)map->head, map->head->bytes);
	memset(map, 0, sizeof(*map));
}

/* ---- what kernels want ---- */

static void fill_matrices(const struct exl3_map *map, const char *base, struct exl3_matrix *out)
{
	for (uint32_t i = 0; i < map->head->nr_matrices; i++) {
		const struct exl3_map_matrix *m = &map->matrices[i];

		out[i] = (struct exl3_matrix){
			.k = m->k,
			.n = m->n,
			.k_log = m->k_log,
			.n_log = m->n_log,
			.rate2 = m->rate2,
			.codebook = m->codebook,
			.trellis = base + m->trellis,
			.suh = base + m->suh,
			.svh = base + m->svh,
			.bias = m->bias ? base + m->bias_at : NULL,
		};
	}
}

static void fill_linear(const struct exl3_map_module *mod, struct exl3_map_modules *to, struct exl3_module_desc *d)
{
	d->shards = to->shards + mod->first;
	d->nr_shards = mod->nr;
	d->k = d->shards[0]->k;
	d->k_log = d->shards[0]->k_log;
	for (uint32_t i = 0; i < mod->nr; i++) {
		d->n += d->shards[i]->n;
		d->n_log += d->shards[i]->n_log;
	}
}

/* 0, 1: this device cannot run it, or a negative errno. */
static int fill_experts(const struct exl3_map_module *mod, struct exl3_map_modules *to,
			struct exl3_module_desc *d, struct exl3_error *err)
{
	struct exl3_error why = {0};
	int rc;

	d->experts = to->experts + mod->first;
	d->nr_experts = mod->nr;
	d->k = d->experts[0].up->k;
	d->k_log = d->experts[0].up->k_log;
	d->n = d->experts[0].down->n;
	d->n_log = d->experts[0].down->n_log;
	d->act = mod->act;
	d->limit = mod->limit;
	d->routed_scale = mod->routed_scale;
	for (uint32_t i = 0; i < mod->nr && (mod->kind == EXL3_MOD_MLP || !i); i++)
		d->intermediate += d->experts[i].up->n_log;
	rc = to->ops->moe_plan ? to->ops->moe_plan(to->dev, d->experts, d->nr_experts, &d->plan, &why) : 0;
	if (rc == -EOPNOTSUPP)
		return 1;
	return rc < 0 ? exl3_errf(err, rc, "%.160s: %.300s", d->name, why.text) : 0;
}

static int fill_modules(const struct exl3_map *map, struct exl3_map_modules *to, struct exl3_error *err)
{
	for (uint32_t i = 0; i < map->head->nr_modules; i++) {
		const struct exl3_map_module *mod = &map->modules[i];
		struct exl3_module_desc *d = &to->list[to->nr];
		int rc = 0;

		*d = (struct exl3_module_desc){
			.name = (char *)(uintptr_t)(map->names + mod->name),
			.kind = mod->kind,
			.routed_scale = 1,
		};
		if (mod->kind == EXL3_MOD_LINEAR)
			fill_linear(mod, to, d);
		else
			rc = fill_experts(mod, to, d, err);
		if (rc < 0)
			return rc;
		to->nr += rc == 0;
	}
	return 0;
}

int exl3_map_build(const struct exl3_map *map, const struct exl3_slab *slab, const struct exl3_backend_ops *ops,
		   struct exl3_dev *dev, struct exl3_map_modules *ret, struct exl3_error *err)
{
	const struct exl3_map_head *h = map->head;
	struct exl3_map_modules to = {.ops = ops, .dev = dev};
	int rc = 0;

	to.matrices = calloc(h->nr_matrices + 1ul, sizeof(*to.matrices));
	to.shards = calloc(h->nr_shards + 1ul, sizeof(*to.shards));
	to.experts = calloc(h->nr_experts + 1ul, sizeof(*to.experts));
	to.list = calloc(h->nr_modules + 1ul, sizeof(*to.list));
	if (!to.matrices || !to.shards || !to.experts || !to.list) {
		rc = exl3_errf(err, -ENOMEM, "no memory for the table of modules");
	} else {
		fill_matrices(map, slab->ptr, to.matrices);
		/* Only what modules refer to was checked. */
		for (uint32_t i = 0; i < h->nr_shards; i++)
			to.shards[i] = map->shards[i] < h->nr_matrices ? &to.matrices[map->shards[i]] : NULL;
		for (uint32_t i = 0; i < h->nr_experts; i++) {
			const struct exl3_map_expert *e = &map->experts[i];

			to.experts[i] = (struct exl3_expert){
				e->gate < h->nr_matrices ? &to.matrices[e->gate] : NULL,
				e->up < h->nr_matrices ? &to.matrices[e->up] : NULL,
				e->down < h->nr_matrices ? &to.matrices[e->down] : NULL,
			};
		}
		rc = fill_modules(map, &to, err);
	}
	if (rc < 0)
		exl3_map_modules_fini(&to);
	else
		*ret = to;
	return rc;
}

void exl3_map_modules_fini(struct exl3_map_modules *m)
{
	for (uint32_t i = 0; m->list && i < m->nr; i++) {
		if (m->list[i].plan)
			m->ops->moe_plan_free(m->dev, m->list[i].plan);
	}
	free(m->list);
	free(m->experts);
	free(m->shards);
	free(m->matrices);
	memset(m, 0, sizeof(*m));
}

const struct exl3_module_desc *exl3_map_find(const struct exl3_map_modules *m, const char *name,
					     enum exl3_module_kind kind)
{
	uint32_t lo = 0, hi = m->nr;

	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		const struct exl3_module_desc *d = &m->list[mid];
		int order = strcmp(d->name, name);

		if (!order && d->kind == kind)
			return d;
		if (order < 0 || (!order && d->kind < kind))
			lo = mid + 1;
		else
			hi = mid;
	}
	return NULL;
}
