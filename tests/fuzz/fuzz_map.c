/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_map.c - any bytes as the table of a mapped model, with sizes that are right: refused, or sound. */
#include "kernels/format.h"
#include "kernels/map.h"

#include <assert.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_matrix(const struct exl3_matrix *m, uint64_t base, uint64_t bytes)
{
	uint64_t at = (uint64_t)(uintptr_t)m->trellis - base;

	assert(at <= bytes && exl3_trellis_bytes(m->k, m->n, m->rate2) <= bytes - at);
	at = (uint64_t)(uintptr_t)m->suh - base;
	assert(at <= bytes && 2ull * m->k <= bytes - at);
	at = (uint64_t)(uintptr_t)m->svh - base;
	assert(at <= bytes && 2ull * m->n <= bytes - at);
	assert(m->k_log <= m->k && m->n_log <= m->n);
}

/* What a reader accepts must hold: every weight inside the slab, sizes that fit each other. */
static void check(const struct exl3_map *map)
{
	const uint64_t base = 1ull << 40;
	const struct exl3_slab slab = {.ptr = (void *)(uintptr_t)base, .bytes = map->head->slab_bytes};
	struct exl3_map_modules m;
	struct exl3_error err;

	if (exl3_map_build(map, &slab, &exl3_backend_cpu, NULL, &m, &err) < 0)
		return;
	for (uint32_t i = 0; i < m.nr; i++) {
		const struct exl3_module_desc *d = &m.list[i];

		assert(strlen(d->name) < map->head->names_bytes);
		for (uint32_t k = 0; k < d->nr_shards; k++) {
			check_matrix(d->shards[k], base, slab.bytes);
			assert(d->shards[k]->k == d->k);
		}
		for (uint32_t k = 0; k < d->nr_experts; k++) {
			const struct exl3_expert *e = &d->experts[k];

			check_matrix(e->up, base, slab.bytes);
			check_matrix(e->down, base, slab.bytes);
			if (e->gate)
				check_matrix(e->gate, base, slab.bytes);
			assert(e->gate || d->act == EXL3_ACT_RELU2);
			assert(e->up->k == d->k && e->down->n == d->n && e->down->k == e->up->n);
		}
	}
	exl3_map_modules_fini(&m);
}

/* Magic, version and sizes are made right, so that the rest is looked at. */
static int file_of(const uint8_t *data, size_t size)
{
	struct exl3_map_head head = {0};
	size_t bytes = size < sizeof(head) ? sizeof(head) : size;
	int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	uint8_t *p = calloc(1, bytes);
	struct exl3_map_layout l;

	assert(fd >= 0 && p);
	memcpy(p, data, size);
	memcpy(&head, p, sizeof(head));
	memcpy(head.magic, EXL3_MAP_MAGIC, sizeof(head.magic));
	head.version = EXL3_MAP_VERSION;
	head.bytes = bytes;
	head.names_bytes = 0;
	head.nr_matrices %= 64;
	head.nr_modules %= 64;
	head.nr_shards %= 64;
	head.nr_experts %= 64;
	exl3_map_layout(&head, &l);
	if (l.names <= bytes)
		head.names_bytes = bytes - l.names;
	memcpy(p, &head, sizeof(head));
	assert(write(fd, p, bytes) == (ssize_t)bytes);
	assert(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) == 0);
	free(p);
	return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct exl3_error err = {0};
	struct exl3_map map;
	int fd = file_of(data, size);

	if (exl3_map_read(fd, &map, &err) == 0) {
		check(&map);
		exl3_map_fini(&map);
	} else {
		assert(err.code < 0 && err.text[0]);
	}
	close(fd);
	return 0;
}
