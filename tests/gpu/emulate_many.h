/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emulate_many.h - what the routed block's kernels need beside emulate.h.
 */
#ifndef EXL3_TESTS_EMULATE_MANY_H
#define EXL3_TESTS_EMULATE_MANY_H

#include "tests/gpu/emulate.h"

#define EXL3_CUDA_WGMMA_CUH /* emulate.h has its own */

template <class T> static T __shfl_up_sync(unsigned, T v, int by)
{
	const int from = (int)emu::lane() - by;

	return shuffle(v, from < 0 ? emu::lane() : (unsigned)from);
}

static inline bool __any_sync(unsigned, bool v)
{
	unsigned any = v;

	for (int s = 1; s < 32; s *= 2)
		any |= __shfl_xor_sync(~0u, any, s);
	return any;
}

static inline unsigned long long atomicAdd_system(unsigned long long *p, unsigned long long v)
{
	const unsigned long long old = *p;

	*p = old + v;
	return old;
}

#endif
