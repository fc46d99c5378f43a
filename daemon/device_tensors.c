/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device_tensors.c - a copy of a model's unquantized tensors in the device's own memory, for clients to map.
 *
 * The file in host memory stays: it is what CPU clients map and what the next worker makes its copy from. An
 * importer of device memory can make its mapping writable, so this copy is only given to tenants that may map
 * weights, and the daemon itself never reads it.
 */
#include "daemon/weights.h"

#include "daemon/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#define GRANULE (2ull << 20) /* of device memory: what is exported is mapped as a whole */
#define PIECE   (64ull << 20)

static uint64_t copy_bytes(const struct exl3_model *m)
{
	return (m->tensor_bytes + GRANULE - 1) & ~(GRANULE - 1);
}

uint64_t exl3_model_device_tensor_bytes(const struct exl3_model *m, uint64_t tensor_bytes)
{
	/* Host memory is the memory of a device that has none of its own. */
	if (!m->device_tensors || !m->ops->device_arena_new)
		return 0;
	return (tensor_bytes + GRANULE - 1) & ~(GRANULE - 1);
}

static int copy(struct exl3_slab *slab, const struct exl3_model *m, const char *from, struct exl3_error *err)
{
	int rc = 0;

	for (uint64_t at = 0; at < m->tensor_bytes && rc == 0; at += PIECE) {
		uint64_t n = m->tensor_bytes - at < PIECE ? m->tensor_bytes - at : PIECE;

		if (atomic_load(&m->cancel))
			return exl3_errf(err, -ECANCELED, "the load was cancelled");
		rc = m->ops->slab_write(slab, at, from + at, n, err);
		if (rc == 0)
			rc = m->ops->slab_sync(slab, err);
	}
	return rc;
}

int exl3_model_place_tensors(struct exl3_model *m, struct exl3_error *err)
{
	struct exl3_slab *slab = NULL;
	void *map;
	int rc;

	if (!m->tensor_bytes || !exl3_model_device_tensor_bytes(m, m->tensor_bytes))
		return 0;
	if (exl3_fault("weights.device_tensors"))
		return exl3_errf(err, -ENOMEM, "no device memory for unquantized tensors (fault injection)");
	map = mmap(NULL, m->tensor_bytes, PROT_READ, MAP_SHARED, m->tensor_fd, 0);
	if (map == MAP_FAILED)
		return exl3_errf(err, -errno, "mapping the unquantized tensors: %m");
	rc = m->ops->slab_new(m->dev, copy_bytes(m), &slab, err);
	if (rc == 0)
		rc = copy(slab, m, map, err);
	munmap(map, m->tensor_bytes);
	if (rc < 0) {
		exl3_err_prefix(err, "unquantized tensors on the device");
		m->ops->slab_free(slab);
		return rc;
	}
	m->tensor_slab = slab;
	return 0;
}

int exl3_model_device_tensor_fd(const struct exl3_model *m, int *ret, uint64_t *bytes, struct exl3_error *err)
{
	int fd;

	if (!m->tensor_slab)
		return exl3_errf(err, -ENOENT,
				 "model '%.100s' has its unquantized tensors in host memory only: load it with "
				 "unquantized = device",
				 m->name);
	fd = fcntl(m->tensor_slab->fd, F_DUPFD_CLOEXEC, 3);
	if (fd < 0)
		return exl3_errf(err, -errno, "model '%.100s': fd of its tensors: %m", m->name);
	*ret = fd;
	*bytes = m->tensor_slab->bytes;
	return 0;
}
