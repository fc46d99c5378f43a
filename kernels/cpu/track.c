/* SPDX-License-Identifier: Apache-2.0 */
/*
 * track.c - works that run on their caller's thread, beside the executor's and each other.
 *
 * Kernels know a device by its instruction set, its team and its workspace, so a track is one more of those,
 * without an executor and without memory to give away.
 */
#include "kernels/cpu/cpu.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

struct exl3_track {
	struct exl3_dev place; /* what kernels see */
	struct exl3_dev *dev;  /* borrowed, outlives us */
	uint64_t skipped;
};

/* opt->deterministic is nothing to do: every row is computed by itself, in its own order. */

int cpu_track_new(struct exl3_dev *dev, const struct exl3_track_options *opt, struct exl3_track **ret,
		  struct exl3_error *err)
{
	exl3_auto(exl3_freep) struct exl3_track *track = calloc(1, sizeof(*track));
	int code;

	if (!track)
		return exl3_errf(err, -ENOMEM, "cpu: out of memory");
	track->dev = dev;
	track->place.isa = dev->isa;
	track->place.node = dev->node;
	track->place.ordinal = dev->ordinal;
	track->place.nr_threads = opt->threads ? opt->threads : dev->nr_threads;
	if (track->place.nr_threads > CPU_THREADS_MAX)
		track->place.nr_threads = CPU_THREADS_MAX;
	code = cpu_workspace(&track->place, opt->workspace_bytes, err);
	if (code)
		return code;
	atomic_fetch_add(&dev->track_bytes, track->place.map_bytes);
	*ret = exl3_take_ptr(&track);
	return 0;
}

struct exl3_track *cpu_track_free(struct exl3_track *track)
{
	if (!track)
		return NULL;
	munmap(track->place.ws, track->place.map_bytes);
	atomic_fetch_sub(&track->dev->track_bytes, track->place.map_bytes);
	free(track);
	return NULL;
}

int cpu_track_run(struct exl3_track *track, const struct exl3_work *work, void *stream)
{
	int ret;

	if (work->nr_signals || stream)
		return -EINVAL;
	ret = cpu_run(&track->place, work);
	for (uint32_t i = 0; !ret && work->skipped && i < work->nr_rows; i++)
		track->skipped += work->skipped[i];
	return ret;
}

int cpu_track_skipped(struct exl3_track *track, uint64_t *ret)
{
	*ret = track->skipped;
	return 0;
}
