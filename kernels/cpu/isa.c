/* SPDX-License-Identifier: Apache-2.0 */
/* isa.c - the instruction sets, and which of them this processor has. */
#include "kernels/cpu/isa.h"

const struct cpu_isa *cpu_isa_best(void)
{
	static const struct cpu_isa *const all[] = {&cpu_isa_avx512, &cpu_isa_avx2};

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		if (all[i]->available())
			return all[i];
	return &cpu_isa_c;
}
