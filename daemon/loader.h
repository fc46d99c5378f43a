/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loader.h - the bytes of a checkpoint, in order, with several reads in flight.
 *
 * A file's data section is cut into spans of at most EXL3_SPAN bytes. Reads run ahead of the sink:
 *
 *   span      0     1     2     3     4     5     6     7     8 ...
 *   buffer    0     1     2     3     4     5     6     7     0
 *           held  held  sink  read  read  read  read  read    -      held: until the sink has synced
 *
 * A span whose pages are resident is read through the page cache, every other one past it
 * (O_DIRECT), so that a load neither waits for a disk that it need not touch nor pushes out what
 * others use. Where io_uring or O_DIRECT are refused, plain preads do the same, one at a time.
 */
#ifndef EXL3_DAEMON_LOADER_H
#define EXL3_DAEMON_LOADER_H

#include "daemon/checkpoint.h"

#include <stdatomic.h>

#define EXL3_SPAN         (2u << 20)
#define EXL3_SPAN_BUFFERS 8u
#define EXL3_WHOLE_MAX    EXL3_SPAN /* a tensor of at most this many bytes comes in one piece */

struct exl3_loader_stats {
	uint64_t bytes_cached, bytes_direct; /* read through the page cache, past it */
	uint64_t reads;
	bool uring;
};

struct exl3_loader {
	const struct exl3_ckpt *ckpt;
	void *arg; /* of the functions below; all run in the caller's thread */
	/* Bytes @off.. of tensor @index of @file; tensors and bytes come in the order of the files.
	 * @p stays valid until the next sync(). Empty tensors do not come. */
	int (*data)(void *arg, uint32_t file, uint32_t index, uint64_t off, const void *p,
		    size_t bytes, struct exl3_error *err);
	int (*sync)(void *arg, struct exl3_error *err); /* done with everything it got so far */
	void *(*buffer_new)(void *arg, size_t bytes);   /* page aligned, or NULL */
	void (*buffer_free)(void *arg, void *p, size_t bytes);
	const _Atomic bool *cancel;      /* or NULL; looked at between spans */
	_Atomic uint64_t *loaded;        /* or NULL; bytes given to data() so far */
	bool no_uring, no_direct;        /* for tests and comparisons */
	struct exl3_loader_stats *stats; /* or NULL */
};

/**
 * exl3_loader_run() - read everything once.
 * Returns 0, -ECANCELED, -ENOMEM, -EINVAL (a file was cut or changed meanwhile), what the sink
 * returned, or what the file system says.
 */
int exl3_loader_run(const struct exl3_loader *loader, struct exl3_error *err);

#endif
