/* SPDX-License-Identifier: Apache-2.0 */
/* numa.c - bind this process, its threads and its memory to one NUMA node. */
#include "daemon/numa.h"

#include <errno.h>
#include <numa.h>

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
	if (numa_run_on_node(node) < 0)
		return exl3_errf(err, -errno,
				 "node %d: cannot run there (no cores, or none that are allowed): %m",
				 node);
	numa_set_preferred(node);
	return 0;
}
