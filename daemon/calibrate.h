/* SPDX-License-Identifier: Apache-2.0 */
/*
 * calibrate.h - measures which variant of a linear's kernel is the fastest, by shape and rows, beside the clients.
 *
 * An administrator starts it; one at a time. For every distinct shape (k, n, bits, codebook, shards) of the chosen models
 * and for row counts 1, 2, 4, ... every variant that can run it is launched with the model's own weights as a guest of
 * the dispatcher (dispatch.h): a client waits for one short launch at most. Row counts for which a launch would take
 * longer than EXL3_CALIBRATE_NS are not measured; no such launch is made for a client either, if chunk-us is ordinary.
 *
 * Weights are cold: launches take the shape's modules in turn, and if those fit into the last-level cache, others of the
 * device's measured models in between. What all of that does not push out of the cache is warm in service too.
 *
 *   IDLE -> PREPARING (operands are made, a thread) -> MEASURING -> ENDING (operands are freed) -> DONE or FAILED
 *   MEASURING -> the next device -> PREPARING       DONE, FAILED: the table or the reason can be asked for, until the next
 */
#ifndef EXL3_DAEMON_CALIBRATE_H
#define EXL3_DAEMON_CALIBRATE_H

#include "shm/util.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct exl3_worker;
struct exl3_calibration;
struct exl3_peer;

#define EXL3_CALIBRATE_NS 10000000ull

enum exl3_calibrate_state {
	EXL3_CALIBRATE_IDLE,
	EXL3_CALIBRATE_PREPARING,
	EXL3_CALIBRATE_MEASURING,
	EXL3_CALIBRATE_ENDING,
	EXL3_CALIBRATE_DONE,
	EXL3_CALIBRATE_FAILED
};

struct exl3_calibrate_progress {
	enum exl3_calibrate_state state;
	uint32_t shapes_done, shapes; /* of all devices */
	uint32_t rows;                /* now */
	uint64_t launches;            /* so far */
	char what[320];               /* device and shape */
	const char *error;            /* FAILED: why */
	const char *table;            /* DONE: the file's text; valid until the next call of the loop */
	size_t table_bytes;
};

/**
 * exl3_calibrate_start() - begins; loop thread, as all of these.
 * @models: names of READY models; none: all that are READY.
 * @apply:  the worker's devices take the table at the end.
 * @owner:  it is cancelled when this client leaves.
 * Returns 0, -EBUSY (one is under way), -ENOENT, -EAGAIN (a model is loading), -EOPNOTSUPP (nothing to measure), -ENOMEM.
 */
int exl3_calibrate_start(struct exl3_worker *w, char *const *models, size_t nr_models, bool apply,
			 struct exl3_peer *owner, struct exl3_error *err);
void exl3_calibrate_progress(const struct exl3_worker *w, struct exl3_calibrate_progress *ret);
/* Nothing new is started; what runs ends, then it is FAILED with this reason. */
void exl3_calibrate_cancel(struct exl3_worker *w, const char *why);
/* The same if it is the client's. */
void exl3_calibrate_forget(struct exl3_worker *w, const struct exl3_peer *owner);
/* When neither the dispatcher runs nor the worker's threads any more: what was cancelled before has ended. */
void exl3_calibrate_free(struct exl3_worker *w);

#endif
