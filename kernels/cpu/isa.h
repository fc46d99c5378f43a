/* SPDX-License-Identifier: Apache-2.0 */
/* isa.h - what an instruction set contributes: the inner loops that drive.c and mla.c call. */
#ifndef EXL3_KERNELS_CPU_ISA_H
#define EXL3_KERNELS_CPU_ISA_H

#include <stdbool.h>

struct cpu_isa {
	const char *name;        /* "c", "avx2", "avx512" */
	bool (*available)(void); /* on this processor */
};

/* The fastest one that this processor has. */
const struct cpu_isa *cpu_isa_best(void);

#endif
