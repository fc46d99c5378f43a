/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emulate_many.h - what the routed block's kernels need beside emulate.h: mbarriers, bulk copies, atomics.
 *
 * A bulk copy lands when somebody waits for its mbarrier, or at once with emu::eager.
 */
#ifndef EXL3_TESTS_EMULATE_MANY_H
#define EXL3_TESTS_EMULATE_MANY_H

#define EXL3_EMULATE_BARRIERS
#include "tests/gpu/emulate.h"

#include <map>

#define EXL3_CUDA_WGMMA_CUH /* emulate.h has its own */

namespace emu
{

struct bulk {
	char *dst;
	const void *src;
	uint32_t bytes;
};

struct barrier {
	uint32_t count, arrived, phase;
	int64_t bytes; /* still to come */
	std::vector<bulk> open;
};

static std::map<uint32_t, barrier> barriers;

static void complete(barrier &b)
{
	if (b.arrived == b.count && b.bytes == 0) {
		b.arrived = 0;
		b.phase++;
	}
}

static void land(barrier &b)
{
	for (const bulk &c : b.open) {
		memcpy(c.dst, c.src, c.bytes);
		b.bytes -= c.bytes;
	}
	b.open.clear();
	complete(b);
}

} /* namespace emu */

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

static inline uint32_t atomicAdd(uint32_t *p, uint32_t v)
{
	const uint32_t old = *p;

	*p = old + v;
	return old;
}

static inline unsigned long long atomicAdd_system(unsigned long long *p, unsigned long long v)
{
	const unsigned long long old = *p;

	*p = old + v;
	return old;
}

namespace exl3
{

static inline void sts32(uint32_t addr, uint32_t v)
{
	memcpy(emu::shared + addr, &v, 4);
}

static inline void mbar_init(uint32_t bar, uint32_t count)
{
	emu::barriers[bar] = {count, 0, 0, 0, {}};
}

static inline void mbar_init_fence()
{
}

static inline void mbar_arrive(uint32_t bar)
{
	emu::barrier &b = emu::barriers[bar];

	b.arrived++;
	emu::complete(b);
}

static inline void mbar_expect(uint32_t bar, uint32_t bytes)
{
	emu::barriers[bar].bytes += bytes;
	mbar_arrive(bar);
}

static inline void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	emu::barrier &b = emu::barriers[bar];

	if (dst % 16 || (uintptr_t)src % 16 || bytes % 16) {
		printf("a bulk copy off its alignment\n");
		exit(1);
	}
	b.open.push_back({emu::shared + dst, src, bytes});
	if (emu::eager)
		emu::land(b);
}

static inline void mbar_wait(uint32_t bar, uint32_t parity)
{
	emu::barrier &b = emu::barriers[bar];

	while ((b.phase & 1) == parity) {
		emu::land(b);
		if ((b.phase & 1) == parity)
			emu::yield();
	}
}

template <int REGS> static inline void registers_more()
{
}
template <int REGS> static inline void registers_less()
{
}

} /* namespace exl3 */
#endif
