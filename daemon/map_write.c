/* SPDX-License-Identifier: Apache-2.0 */
/* map_write.c - the table of a model's modules for clients that map its weights. */
#include "daemon/map_write.h"

#include "daemon/fault.h"
#include "shm/exl3_map.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)

/* A table that is being written. */
struct table {
	const struct exl3_model *model;
	uint32_t *place; /* owned; of each of the model's matrices, EXL3_MAP_NONE: in no module */
	char *file;      /* owned */
	struct exl3_map_layout at;
	uint32_t nr_shards, nr_experts; /* written so far */
	uint64_t names;
};

static bool usable(const struct exl3_named_matrix *mat)
{
	return mat->placed && !mat->unsupported;
}

/* Modules point into the model's table of matrices. */
static uint32_t place_of(const struct table *t, const struct exl3_matrix *matrix)
{
	const char *at = (const char *)matrix - offsetof(struct exl3_named_matrix, m);

	if (!matrix)
		return EXL3_MAP_NONE;
	return t->place[(const struct exl3_named_matrix *)(const void *)at - t->model->matrices];
}

static int count(struct table *t, struct exl3_map_head *h, struct exl3_error *err)
{
	const struct exl3_model *m = t->model;

	t->place = malloc((m->nr_matrices + 1ul) * sizeof(*t->place));
	if (!t->place)
		return exl3_errf(err, -ENOMEM, "table of modules: out of memory");
	for (uint32_t i = 0; i < m->nr_matrices; i++)
		t->place[i] = usable(&m->matrices[i]) ? h->nr_matrices++ : EXL3_MAP_NONE;
	h->nr_modules = m->nr_modules;
	for (uint32_t i = 0; i < m->nr_modules; i++) {
		h->nr_shards += m->modules[i].nr_shards;
		h->nr_experts += m->modules[i].nr_experts;
		h->names_bytes += strlen(m->modules[i].name) + 1;
	}
	exl3_map_layout(h, &t->at);
	h->bytes = t->at.end;
	if (h->bytes > EXL3_MAP_BYTES_MAX || h->names_bytes > UINT32_MAX)
		return exl3_errf(err, -EFBIG, "its table of modules would have %llu bytes, more than %llu",
				 (unsigned long long)h->bytes, (unsigned long long)EXL3_MAP_BYTES_MAX);
	return 0;
}

static void put_matrices(struct table *t)
{
	struct exl3_map_matrix *out = (void *)(t->file + t->at.matrices);

	for (uint32_t i = 0; i < t->model->nr_matrices; i++) {
		const struct exl3_named_matrix *mat = &t->model->matrices[i];

		if (!usable(mat))
			continue;
		*out++ = (struct exl3_map_matrix){
			.k = mat->m.k,
			.n = mat->m.n,
			.k_log = mat->m.k_log,
			.n_log = mat->m.n_log,
			.rate2 = mat->m.rate2,
			.codebook = mat->m.codebook,
			.bias = mat->has_bias,
			.trellis = mat->trellis_off,
			.suh = mat->suh_off,
			.svh = mat->svh_off,
			.bias_at = mat->has_bias ? mat->bias_off : 0,
		};
	}
}

static void put_module(struct table *t, const struct exl3_module_desc *d, struct exl3_map_module *out)
{
	uint32_t *shards = (void *)(t->file + t->at.shards);
	struct exl3_map_expert *experts = (void *)(t->file + t->at.experts);
	size_t name = strlen(d->name) + 1;
	bool linear = d->kind == EXL3_MOD_LINEAR;

	*out = (struct exl3_map_module){
		.name = (uint32_t)t->names,
		.kind = (uint8_t)d->kind,
		.act = linear ? 0 : d->act,
		.first = linear ? t->nr_shards : t->nr_experts,
		.nr = linear ? d->nr_shards : d->nr_experts,
		.limit = d->limit,
		.routed_scale = d->routed_scale,
	};
	memcpy(t->file + t->at.names + t->names, d->name, name);
	t->names += name;
	for (uint32_t i = 0; i < d->nr_shards; i++)
		shards[t->nr_shards++] = place_of(t, d->shards[i]);
	for (uint32_t i = 0; i < d->nr_experts; i++)
		experts[t->nr_experts++] = (struct exl3_map_expert){place_of(t, d->experts[i].gate),
								    place_of(t, d->experts[i].up),
								    place_of(t, d->experts[i].down)};
}

static int to_memfd(const char *file, uint64_t bytes, int *ret, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int fd = -1;

	errno = ENOMEM; /* for the injected failure */
	if (!exl3_fault("map.table"))
		fd = memfd_create("exl3-map", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return exl3_errf(err, -errno, "table of modules: memfd_create: %m");
	for (uint64_t done = 0; done < bytes;) {
		ssize_t n = write(fd, file + done, bytes - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return exl3_errf(err, n < 0 && errno != ENOSPC ? -errno : -ENOMEM,
					 "table of modules: no memory for %llu bytes", (unsigned long long)bytes);
		done += (uint64_t)n;
	}
	if (fcntl(fd, F_ADD_SEALS, SEALS) < 0)
		return exl3_errf(err, -errno, "table of modules: cannot be sealed: %m");
	*ret = exl3_take_fd(&fd);
	return 0;
}

int exl3_map_write(const struct exl3_model *model, const char *device, uint32_t flags, int *ret,
		   struct exl3_error *err)
{
	struct exl3_map_head head = {
		.magic = EXL3_MAP_MAGIC, .version = EXL3_MAP_VERSION, .flags = flags, .slab_bytes = model->slab->bytes};
	struct table t = {.model = model};
	struct exl3_dev_info info = {0};
	int rc = count(&t, &head, err);

	model->ops->info(model->dev, &info);
	snprintf(head.backend, sizeof(head.backend), "%s", model->ops->name);
	snprintf(head.uuid, sizeof(head.uuid), "%s", info.uuid);
	snprintf(head.driver, sizeof(head.driver), "%s", info.driver);
	snprintf(head.device, sizeof(head.device), "%s", device);
	snprintf(head.fingerprint, sizeof(head.fingerprint), "%s", model->fingerprint);
	snprintf(head.model, sizeof(head.model), "%s", model->name);
	if (rc == 0) {
		t.file = calloc(1, head.bytes);
		if (!t.file)
			rc = exl3_errf(err, -ENOMEM, "table of modules: no memory for %llu bytes",
				       (unsigned long long)head.bytes);
	}
	if (rc == 0) {
		struct exl3_map_module *modules = (void *)(t.file + t.at.modules);

		memcpy(t.file, &head, sizeof(head));
		put_matrices(&t);
		for (uint32_t i = 0; i < model->nr_modules; i++)
			put_module(&t, &model->modules[i], &modules[i]);
		rc = to_memfd(t.file, head.bytes, ret, err);
	}
	free(t.file);
	free(t.place);
	return rc;
}
