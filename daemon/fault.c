/* SPDX-License-Identifier: Apache-2.0 */
/* fault.c - named places where a test can make an allocation or a system call fail. */
#include "daemon/fault.h"

#include "daemon/log.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool exl3_fault_active;

static struct {
	char name[64];
	unsigned long first,
		count; /* hits first .. first + count - 1 fail; count 0: all from first */
	atomic_ulong hits;
} fault;

void exl3_fault_init(void)
{
	const char *env = getenv("EXL3_FAULT");
	unsigned long first = 0, count = 1;

	exl3_fault_active = false;
	if (!env || !*env)
		return;
	if (sscanf(env, "%63[^:]:%lu:%lu", fault.name, &first, &count) < 2 || first == 0) {
		exl3_warn("EXL3_FAULT=%s is not name:n[:count], ignored", env);
		return;
	}
	fault.first = first;
	fault.count = count;
	atomic_store(&fault.hits, 0);
	exl3_fault_active = true;
	exl3_warn("fault injection: %s fails at hit %lu", fault.name, first);
}

bool exl3_fault_hit(const char *name)
{
	unsigned long hit;

	if (strcmp(name, fault.name) != 0)
		return false;
	hit = atomic_fetch_add(&fault.hits, 1) + 1;
	return hit >= fault.first && (!fault.count || hit < fault.first + fault.count);
}
