/* SPDX-License-Identifier: Apache-2.0 */
/* segment.h - shared memory as a sealed memfd: create, map, check; and the ring segment of a channel. */
#ifndef EXL3_SHM_SEGMENT_H
#define EXL3_SHM_SEGMENT_H

#include "shm/ring.h"
#include "shm/util.h"

#include <stddef.h>
#include <stdint.h>

struct exl3_segment {
	int fd;       /* owned */
	void *base;   /* owned mapping of the whole file */
	size_t bytes; /* whole pages */
};

/**
 * exl3_segment_new() - make shared memory whose size nobody can change any more.
 * @name:  for /proc/PID/maps; "exl3-" is put before it.
 * @bytes: > 0, rounded up to whole pages. All pages are there and zero when it returns, so that no access
 *         can run out of memory later.
 * Returns 0, -EINVAL, -ENOMEM, -EMFILE, ... Any thread.
 */
int exl3_segment_new(const char *name, size_t bytes, struct exl3_segment **ret,
		     struct exl3_error *err);

/**
 * exl3_segment_map() - map a memfd that somebody sent.
 * @fd:    taken over on success only.
 * @bytes: what the sender says its size is: must be true, in whole pages.
 * Refuses (-EPROTO) what is no memfd, has another size, or could still shrink under the mapping.
 */
int exl3_segment_map(int fd, size_t bytes, struct exl3_segment **ret, struct exl3_error *err);

struct exl3_segment *exl3_segment_free(struct exl3_segment *seg);
void exl3_segment_freep(struct exl3_segment **seg);

/* Bytes that the machine could give without killing somebody for it. Any thread. */
uint64_t exl3_memory_available(void);

/* Bytes of a ring segment with that many SQ entries, in whole pages. */
size_t exl3_ring_bytes(uint32_t sq_entries);

struct exl3_ring_params {
	uint32_t
		sq_entries; /* a power of two, EXL3_SQ_ENTRIES_MIN..MAX; the CQ gets twice as many */
	uint32_t generation;
	uint64_t instance;
	uint32_t channel;
	uint32_t first; /* where all indices start: 0, tests: close to the wrap */
};

/* Daemon: makes a channel's segment, fills in the header, readies our end. @r borrows from @ret. */
int exl3_ring_create(const struct exl3_ring_params *p, struct exl3_segment **ret,
		     struct exl3_ring_server *r, struct exl3_error *err);

/* Client: checks the header of a mapped segment (-EPROTO) and readies our end. @r borrows from @seg. */
int exl3_ring_attach(const struct exl3_segment *seg, struct exl3_ring_client *r,
		     struct exl3_error *err);

#endif
