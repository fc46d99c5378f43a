/* SPDX-License-Identifier: Apache-2.0 */
/* numa.c - bind this process, its threads and its memory to one NUMA node. */
#include "daemon/numa.h"

#include <errno.h>
#include <numa.h>
#include <sched.h>

int exl3_numa_bind(int node, struct exl3_error *err)
{
	if (node < 0)
		return 0;
	if (numa_available() < 0) {
		if (node == 0)
			return 0; /* a machine without NUMA is one node */
		return exl3_errf(err, -ENOSYS, "node %d: this machine has no NUMA", node);
	}
	if (node > numa_max_node() || !numa_bitmask_isbitset(numa_all_nodes_ptr, (unsigned)node))
		return exl3_errf(err, -EINVAL, "node %d: this machine has no such node (0..%d)",
				 node, numa_max_node());
	/* A node may have memory only: then the threads stay where they are. */
	if (numa_run_on_node(node) < 0)
		return exl3_errf(err, -errno, "node %d: cannot run there: %m", node);
	numa_set_preferred(node);
	return 0;
}

unsigned exl3_numa_cores(int node)
{
	struct bitmask *cpus;
	unsigned n = 0;
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set) < 0)
		return 1;
	if (node < 0 || numa_available() < 0) {
		n = (unsigned)CPU_COUNT(&set);
		return n ? n : 1;
	}
	cpus = numa_allocate_cpumask();
	if (numa_node_to_cpus(node, cpus) == 0) {
		for (unsigned i = 0; i < CPU_SETSIZE && i < cpus->size; i++)
			n += CPU_ISSET(i, &set) && numa_bitmask_isbitset(cpus, i);
	}
	numa_free_cpumask(cpus);
	return n ? n : 1;
}
