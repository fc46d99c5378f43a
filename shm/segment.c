/* SPDX-License-Identifier: Apache-2.0 */
/* segment.c - shared memory as a sealed memfd: create, map, check; and the ring segment of a channel. */
#include "shm/segment.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static size_t round_to_pages(size_t bytes)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	return (bytes + page - 1) & ~(page - 1);
}

static struct exl3_segment *segment_alloc(void)
{
	struct exl3_segment *seg = calloc(1, sizeof(*seg));

	if (seg)
		seg->fd = -1;
	return seg;
}

struct exl3_segment *exl3_segment_free(struct exl3_segment *seg)
{
	if (!seg)
		return NULL;
	if (seg->base)
		munmap(seg->base, seg->bytes);
	exl3_closep(&seg->fd);
	free(seg);
	return NULL;
}

void exl3_segment_freep(struct exl3_segment **seg)
{
	*seg = exl3_segment_free(*seg);
}

static int segment_mmap(struct exl3_segment *seg, struct exl3_error *err)
{
	void *base = mmap(NULL, seg->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, seg->fd, 0);

	if (base == MAP_FAILED)
		return exl3_errf(err, -errno, "shared memory: cannot map %zu bytes: %m",
				 seg->bytes);
	seg->base = base;
	return 0;
}

uint64_t exl3_memory_available(void)
{
	unsigned long long kib = 0;
	char line[128];
	FILE *f = fopen("/proc/meminfo", "re");

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
			break;
	if (f)
		fclose(f);
	if (kib)
		return kib * 1024;
	return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

int exl3_segment_new(const char *name, size_t bytes, struct exl3_segment **ret,
		     struct exl3_error *err)
{
	exl3_auto(exl3_segment_freep) struct exl3_segment *seg = segment_alloc();
	char full[64];
	int e;

	if (!seg)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", name);
	if (!bytes)
		return exl3_errf(err, -EINVAL, "%s: no bytes asked for", name);
	/* Nothing limits the size of a memfd: the kernel would fill it until it has to kill somebody. */
	if (bytes > exl3_memory_available())
		return exl3_errf(err, -ENOMEM, "%s: %zu bytes do not fit into %llu bytes of memory",
				 name, bytes, (unsigned long long)exl3_memory_available());
	snprintf(full, sizeof(full), "exl3-%s", name);
	seg->bytes = round_to_pages(bytes);
	seg->fd = memfd_create(full, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (seg->fd < 0)
		return exl3_errf(err, -errno, "%s: memfd_create: %m", name);
	/* fallocate sizes the file and gives it its pages: a sparse one would end in SIGBUS when memory
	 * runs out, in whichever process touches it first. It can be interrupted half-way. */
	do
		e = fallocate(seg->fd, 0, 0, (off_t)seg->bytes) < 0 ? errno : 0;
	while (e == EINTR);
	if (e) {
		errno = e;
		return exl3_errf(err, e == ENOSPC ? -ENOMEM : -e,
				 "%s: cannot grow to %zu bytes: %m", name, seg->bytes);
	}
	if (fcntl(seg->fd, F_ADD_SEALS, SEALS) < 0)
		return exl3_errf(err, -errno, "%s: cannot seal: %m", name);
	e = segment_mmap(seg, err);
	if (e < 0)
		return e;
	*ret = exl3_take_ptr(&seg);
	return 0;
}

int exl3_segment_map(int fd, size_t bytes, struct exl3_segment **ret, struct exl3_error *err)
{
	exl3_auto(exl3_segment_freep) struct exl3_segment *seg = NULL;
	struct stat st;
	int seals, e;

	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || fstat(fd, &st) < 0)
		return exl3_errf(err, -EPROTO, "shared memory: not a memfd: %m");
	if ((seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
		return exl3_errf(err, -EPROTO, "shared memory: its size is not sealed");
	if (!bytes || bytes != round_to_pages(bytes) || (uint64_t)st.st_size != bytes)
		return exl3_errf(err, -EPROTO, "shared memory: %lld bytes, announced were %zu",
				 (long long)st.st_size, bytes);
	seg = segment_alloc();
	if (!seg)
		return exl3_errf(err, -ENOMEM, "shared memory: out of memory");
	seg->bytes = bytes;
	seg->fd = fd;
	e = segment_mmap(seg, err);
	if (e < 0) {
		seg->fd = -1; /* still the caller's */
		return e;
	}
	*ret = exl3_take_ptr(&seg);
	return 0;
}

static bool entries_ok(uint32_t n)
{
	return n >= EXL3_SQ_ENTRIES_MIN && n <= EXL3_SQ_ENTRIES_MAX && !(n & (n - 1));
}

size_t exl3_ring_bytes(uint32_t sq_entries)
{
	return round_to_pages(sizeof(struct exl3_ring_hdr) +
			      sq_entries * (sizeof(struct exl3_sqe) + 2 * sizeof(struct exl3_cqe)));
}

int exl3_ring_create(const struct exl3_ring_params *p, struct exl3_segment **ret,
		     struct exl3_ring_server *r, struct exl3_error *err)
{
	struct exl3_segment *seg;
	struct exl3_ring_hdr *h;
	int e;

	if (!entries_ok(p->sq_entries))
		return exl3_errf(err, -EINVAL,
				 "channel: %u entries; must be a power of two from %u to %u",
				 p->sq_entries, EXL3_SQ_ENTRIES_MIN, EXL3_SQ_ENTRIES_MAX);
	e = exl3_segment_new("channel", exl3_ring_bytes(p->sq_entries), &seg, err);
	if (e < 0)
		return e;
	h = seg->base;
	h->magic = EXL3_ABI_MAGIC;
	h->version = EXL3_ABI_VERSION;
	h->sq_entries = p->sq_entries;
	h->cq_entries = 2 * p->sq_entries;
	h->sqe_offset = sizeof(*h);
	h->cqe_offset = h->sqe_offset + p->sq_entries * (uint32_t)sizeof(struct exl3_sqe);
	h->bytes = seg->bytes;
	h->instance = p->instance;
	h->generation = p->generation;
	h->channel = p->channel;
	h->sq_tail.v = h->sq_head.v = h->cq_tail.v = h->cq_head.v = p->first;
	*r = (struct exl3_ring_server){
		.hdr = h,
		.sqes = (const void *)((char *)seg->base + h->sqe_offset),
		.cqes = (void *)((char *)seg->base + h->cqe_offset),
		.sq_mask = p->sq_entries - 1,
		.cq_mask = 2 * p->sq_entries - 1,
		.sq_next = p->first,
		.cq_next = p->first,
		.cq_published = p->first,
	};
	*ret = seg;
	return 0;
}

int exl3_ring_attach(const struct exl3_segment *seg, struct exl3_ring_client *r,
		     struct exl3_error *err)
{
	struct exl3_ring_hdr *h = seg->base;
	struct exl3_ring_hdr c; /* our copy: checked and used, the original is not read again */
	uint64_t sqe_end, cqe_end;

	if (seg->bytes < sizeof(c))
		return exl3_errf(err, -EPROTO, "channel: segment of %zu bytes is too small",
				 seg->bytes);
	exl3_ring_copy(&c, h, sizeof(c));
	if (c.magic != EXL3_ABI_MAGIC || c.version != EXL3_ABI_VERSION)
		return exl3_errf(err, -EPROTO,
				 "channel: magic %08x version %u, expected %08x and %u", c.magic,
				 c.version, EXL3_ABI_MAGIC, EXL3_ABI_VERSION);
	if (!entries_ok(c.sq_entries) || c.cq_entries != 2 * c.sq_entries)
		return exl3_errf(err, -EPROTO, "channel: ring sizes %u and %u", c.sq_entries,
				 c.cq_entries);
	sqe_end = (uint64_t)c.sqe_offset + (uint64_t)c.sq_entries * sizeof(struct exl3_sqe);
	cqe_end = (uint64_t)c.cqe_offset + (uint64_t)c.cq_entries * sizeof(struct exl3_cqe);
	if (c.bytes != seg->bytes || c.sqe_offset < sizeof(c) || c.sqe_offset % 64 ||
	    c.cqe_offset % 64 || sqe_end > c.cqe_offset || cqe_end > c.bytes)
		return exl3_errf(err, -EPROTO,
				 "channel: rings at %u and %u do not fit into %zu bytes",
				 c.sqe_offset, c.cqe_offset, seg->bytes);
	*r = (struct exl3_ring_client){
		.hdr = h,
		.sqes = (void *)((char *)seg->base + c.sqe_offset),
		.cqes = (const void *)((const char *)seg->base + c.cqe_offset),
		.sq_mask = c.sq_entries - 1,
		.cq_mask = c.cq_entries - 1,
		.sq_next = c.sq_tail.v,
		.sq_published = c.sq_tail.v,
		.sq_head = c.sq_tail.v,
		.cq_next = c.cq_tail.v,
	};
	return 0;
}
