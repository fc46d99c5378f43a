/* SPDX-License-Identifier: Apache-2.0 */
/* numa.h - bind this process, its threads and its memory to one NUMA node. */
#ifndef EXL3_DAEMON_NUMA_H
#define EXL3_DAEMON_NUMA_H

#include "shm/util.h"

/**
 * exl3_numa_bind() - run on, and allocate from, one node.
 * @node: -1: nothing is bound. Threads that are started later inherit it.
 * Memory comes from other nodes when that one is full: slow beats dead.
 * Returns 0, -EINVAL (no such node, or one without cores), -ENOSYS (a kernel without NUMA, and a node
 * other than 0).
 */
int exl3_numa_bind(int node, struct exl3_error *err);

#endif
