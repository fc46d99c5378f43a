/* SPDX-License-Identifier: Apache-2.0 */
/* fake_backend.c - a backend of plain memory for tests of the model store, with failures on demand. */
#include "tests/unit/fake_backend.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PENDING_MAX 65536

struct exl3_dev {
	int nothing;
};

struct fake fake;
static struct exl3_dev device;

/* Copies that a late backend owes. */
static struct {
	char *dst;
	const void *src;
	size_t bytes;
} pending[PENDING_MAX];
static unsigned nr_pending;

struct exl3_dev *fake_dev(void)
{
	return &device;
}

void fake_reset(void)
{
	assert(fake.slabs == 0 && fake.staging == 0 && fake.plans == 0);
	fake = (struct fake){.memory_free = UINT64_MAX};
	nr_pending = 0;
}

static void fake_info(struct exl3_dev *dev, struct exl3_dev_info *ret)
{
	(void)dev;
	*ret = (struct exl3_dev_info){.memory_total = 1u << 30, .memory_free = fake.memory_free};
}

static int fake_slab_new(struct exl3_dev *dev, size_t bytes, struct exl3_slab **ret,
			 struct exl3_error *err)
{
	struct exl3_slab *slab;

	if (fake.fail_slab)
		return exl3_errf(err, -ENOMEM, "slab: %zu bytes needed, 0 free", bytes);
	slab = calloc(1, sizeof(*slab));
	assert(slab && bytes);
	slab->dev = dev;
	slab->bytes = bytes;
	slab->fd = -1;
	slab->ptr = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
	assert(slab->ptr);
	memset(slab->ptr, 0, bytes);
	fake.slabs++;
	*ret = slab;
	return 0;
}

static struct exl3_slab *fake_slab_free(struct exl3_slab *slab)
{
	if (slab) {
		free(slab->ptr);
		free(slab);
		fake.slabs--;
	}
	return NULL;
}

static int fake_slab_write(struct exl3_slab *slab, size_t offset, const void *src, size_t bytes,
			   struct exl3_error *err)
{
	assert(offset <= slab->bytes && bytes <= slab->bytes - offset);
	if (++fake.writes == fake.fail_write)
		return exl3_errf(err, -EIO, "slab_write: as the test wants it");
	if (!fake.late) {
		memcpy((char *)slab->ptr + offset, src, bytes);
		return 0;
	}
	assert(nr_pending < PENDING_MAX);
	pending[nr_pending].dst = (char *)slab->ptr + offset;
	pending[nr_pending].src = src;
	pending[nr_pending++].bytes = bytes;
	return 0;
}

static int fake_slab_sync(struct exl3_slab *slab, struct exl3_error *err)
{
	(void)slab;
	for (unsigned i = 0; i < nr_pending; i++)
		memcpy(pending[i].dst, pending[i].src, pending[i].bytes);
	nr_pending = 0;
	if (++fake.syncs == fake.fail_sync)
		return exl3_errf(err, -EIO, "slab_sync: as the test wants it");
	return 0;
}

static void *fake_staging_new(struct exl3_dev *dev, size_t bytes)
{
	(void)dev;
	if (++fake.stagings == fake.fail_staging)
		return NULL;
	fake.staging++;
	return aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
}

static void fake_staging_free(struct exl3_dev *dev, void *ptr, size_t bytes)
{
	(void)dev;
	(void)bytes;
	/* A copy that is still owed would read freed memory. */
	assert(nr_pending == 0);
	free(ptr);
	fake.staging--;
}

static int fake_moe_plan(struct exl3_dev *dev, const struct exl3_expert *experts,
			 uint32_t nr_experts, void **ret, struct exl3_error *err)
{
	(void)dev;
	if (fake.refuse_plans)
		return exl3_errf(err, -EOPNOTSUPP, "no plan for %u experts", nr_experts);
	assert(experts && nr_experts);
	*ret = malloc(1);
	assert(*ret);
	fake.plans++;
	return 0;
}

static void fake_moe_plan_free(struct exl3_dev *dev, void *plan)
{
	(void)dev;
	free(plan);
	fake.plans--;
}

const struct exl3_backend_ops fake_ops = {
	.name = "fake",
	.info = fake_info,
	.slab_new = fake_slab_new,
	.slab_free = fake_slab_free,
	.slab_write = fake_slab_write,
	.slab_sync = fake_slab_sync,
	.staging_new = fake_staging_new,
	.staging_free = fake_staging_free,
	.moe_plan = fake_moe_plan,
	.moe_plan_free = fake_moe_plan_free,
};
