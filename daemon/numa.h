/* SPDX-License-Identifier: Apache-2.0 */
/* numa.h - bind this process, its threads and its memory to one NUMA node. */
#ifndef EXL3_DAEMON_NUMA_H
#define EXL3_DAEMON_NUMA_H

#include "shm/util.h"

/**
 * exl3_numa_bind() - run on, and allocate from, one node.
 * @node: -1: nothing is bound. Threads that are started later inherit it.
 * Memory comes from other nodes when that one is full: slow beats dead, and the log says so at start.
 * Returns 0, -EINVAL (no such node), -ENOSYS (a kernel without NUMA, and a node other than 0).
 */
int exl3_numa_bind(int node, struct exl3_error *err);
/* Cores of the node that this process may run on; @node -1: of the whole machine. At least 1. */
unsigned exl3_numa_cores(int node);

#endif
