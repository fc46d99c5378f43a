/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault.h - named places where a test can make an allocation or a system call fail.
 *
 * EXL3_FAULT=name:n[:count] makes the n-th hit of that point fail (from 1), and the count - 1 hits
 * after it; count 0 means for good. Without the variable a point costs one load and one branch.
 */
#ifndef EXL3_DAEMON_FAULT_H
#define EXL3_DAEMON_FAULT_H

#include <stdbool.h>

/* Reads $EXL3_FAULT; a value that cannot be understood is logged and ignored. */
void exl3_fault_init(void);
bool exl3_fault_hit(const char *name);

extern bool exl3_fault_active;

/* True: behave as if the call that follows had failed. Any thread. */
static inline bool exl3_fault(const char *name)
{
	return __builtin_expect(exl3_fault_active, 0) && exl3_fault_hit(name);
}

#endif
