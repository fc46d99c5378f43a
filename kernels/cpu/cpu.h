/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu.h - what the files of the CPU backend share: the device and its workspace.
 *
 * backend_cpu.c owns the device, its memory and the thread that runs work (kernels/executor.h);
 * linear.c, moe.c and mla.c turn work into loops over an instruction set (isa.h); ref.c is the oracle.
 */
#ifndef EXL3_KERNELS_CPU_H
#define EXL3_KERNELS_CPU_H

#include "kernels/backend.h"
#include "kernels/executor.h"

#include <sched.h>
#include <stdatomic.h>

#define CPU_THREADS_MAX       256u
#define CPU_WORKSPACE_DEFAULT (256ull << 20)
#define CPU_WORKSPACE_MIN     (16ull << 20)

struct cpu_isa;
struct cpu_mla_state;

struct exl3_dev {
	const struct cpu_isa *isa; /* the best one this processor has */
	unsigned nr_threads;       /* of the OpenMP team, the executor included */
	cpu_set_t cpus;            /* those they may run on */
	int ordinal;
	int node;                  /* memory is bound to it; -1: not bound */
	char name[128];
	uint64_t memory_max;
	_Atomic uint64_t slab_bytes, arena_bytes;

	/* Workspace of the request path, executor thread and its team only; of a track: its caller's. */
	void *ws; /* owned mapping */
	size_t ws_bytes;
	struct cpu_mla_state *mla; /* [nr_threads], at the end of the same mapping */
	size_t map_bytes;

	struct exl3_executor *executor; /* owned */
	_Atomic uint64_t track_bytes;   /* workspaces of the tracks */
};

/* backend_cpu.c: maps ws (0: the default) for nr_threads on its node. Runs a work to its end in dev->ws. */
int cpu_workspace(struct exl3_dev *dev, uint64_t bytes, struct exl3_error *err);
int cpu_run(struct exl3_dev *dev, const struct exl3_work *work);

/* track.c; contracts in kernels/backend.h */
int cpu_track_new(struct exl3_dev *dev, const struct exl3_track_options *opt, struct exl3_track **ret,
		  struct exl3_error *err);
struct exl3_track *cpu_track_free(struct exl3_track *track);
int cpu_track_run(struct exl3_track *track, const struct exl3_work *work, void *stream);
int cpu_track_skipped(struct exl3_track *track, uint64_t *ret);

/* kernel_table.c */
extern const struct exl3_kernel cpu_kernels[];
const struct exl3_kernel *cpu_select(const struct exl3_dev *dev, const struct exl3_work *work);
uint32_t cpu_merge_class(const struct exl3_dev *dev, const struct exl3_work *work);
/* May the entries of a work run in one launch? Not deterministic ones that get different variants. */
bool cpu_one_class(const struct exl3_dev *dev, const struct exl3_work *work);

#endif
