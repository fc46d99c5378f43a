/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emulate.h - runs a CUDA kernel on the CPU, so that its logic is tested on machines without a GPU.
 *
 * Every CUDA thread is a fiber; warp and block barriers, shuffles and tensor instructions are meeting
 * points. Blocks run one after another in ascending order, so a block may wait for lower ones only.
 * Asynchronous copies happen when they are waited for, never earlier, and shared memory starts as NaN, so
 * a missing wait or barrier shows as a wrong result; with emu::eager they happen at once, so a copy into a place that is
 * still read shows. Include before any kernel header, with -DEXL3_EMULATE.
 */
#ifndef EXL3_TESTS_EMULATE_H
#define EXL3_TESTS_EMULATE_H

#include "kernels/format.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <math.h>
#include <map>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
#include <vector>

#ifndef __CUDACC__
#define __CUDACC__ 1
#endif

namespace emu
{

struct copy {
	char *dst;
	const void *src;
};

struct thread {
	ucontext_t context;
	std::vector<char> stack;
	dim3 index;
	bool ended;
	std::vector<copy> open;               /* copies of the group that is not closed */
	std::deque<std::vector<copy>> groups; /* closed, oldest first */
};

struct warp {
	unsigned arrived, phase;
	uint32_t value[32], a[32][4], b[32][2];
};

static ucontext_t scheduler;
static std::vector<thread> threads;
static std::vector<warp> warps;
static thread *now;
static unsigned block_arrived, block_phase;
static dim3 block_index, block_dim, grid_dim;
static bool eager;

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

/* What the kernels call their dynamic shared memory. */
namespace exl3
{
alignas(1024) char gemv_smem[256 * 1024];
}
#define unpack_smem gemv_smem
namespace exl3
{
extern uint8_t stages[] __asm__("_ZN4exl39gemv_smemE"); /* the same memory, as gemm_sm90.cuh declares it */
}

namespace emu
{

static char *const shared = exl3::gemv_smem;

static unsigned lane()
{
	return now->index.x & 31;
}
static warp &mine()
{
	return warps[now->index.x >> 5];
}
static void yield()
{
	swapcontext(&now->context, &scheduler);
}

static void meet_warp()
{
	warp &w = mine();
	const unsigned phase = w.phase;

	if (++w.arrived == 32) {
		w.arrived = 0;
		w.phase++;
		return;
	}
	while (w.phase == phase)
		yield();
}

static void meet_block()
{
	const unsigned phase = block_phase;

	if (++block_arrived == threads.size()) {
		block_arrived = 0;
		block_phase++;
		return;
	}
	while (block_phase == phase)
		yield();
}

static unsigned team_arrived[16], team_phase[16];

static void meet_team(unsigned id, unsigned size)
{
	const unsigned phase = team_phase[id];

	if (++team_arrived[id] == size) {
		team_arrived[id] = 0;
		team_phase[id]++;
		return;
	}
	while (team_phase[id] == phase)
		yield();
}

static std::function<void()> body;

static void enter()
{
	body();
	now->ended = true;
	yield();
}

/* One launch: @run is the kernel call with its arguments. */
static void launch(unsigned blocks, unsigned nr_threads, std::function<void()> run)
{
	body = run;
	grid_dim = dim3(blocks);
	block_dim = dim3(nr_threads);
	threads.resize(nr_threads);
	for (unsigned b = 0; b < blocks; b++) {
		block_index = dim3(b, 0, 0);
		memset(shared, 0xff, sizeof(exl3::gemv_smem));
		warps.assign(nr_threads / 32, warp());
		block_arrived = 0;
		for (unsigned t = 0; t < nr_threads; t++) {
			thread &f = threads[t];

			f.stack.resize(128 * 1024);
			f.index = dim3(t, 0, 0);
			f.ended = false;
			f.open.clear();
			f.groups.clear();
			getcontext(&f.context);
			f.context.uc_stack.ss_sp = f.stack.data();
			f.context.uc_stack.ss_size = f.stack.size();
			f.context.uc_link = NULL;
			makecontext(&f.context, enter, 0);
		}
		for (unsigned left = nr_threads; left;) {
			left = 0;
			for (thread &f : threads)
				if (!f.ended) {
					now = &f;
					swapcontext(&scheduler, &f.context);
					left += !f.ended;
				}
		}
	}
}

} /* namespace emu */

#define threadIdx (emu::now->index)
#define blockIdx  (emu::block_index)
#define blockDim  (emu::block_dim)
#define gridDim   (emu::grid_dim)
#undef __shared__
#define __shared__
#undef __global__
#define __global__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

using std::max;
using std::min;

static inline void __syncwarp()
{
	emu::meet_warp();
}
static inline void __syncthreads()
{
	emu::meet_block();
}

template <class T> static T shuffle(T v, unsigned from)
{
	T r;

	memcpy(&emu::mine().value[emu::lane()], &v, 4);
	emu::meet_warp();
	memcpy(&r, &emu::mine().value[from & 31], 4);
	emu::meet_warp();
	return r;
}

template <class T> static T __shfl_xor_sync(unsigned, T v, int mask)
{
	return shuffle(v, emu::lane() ^ (unsigned)mask);
}

template <class T> static T __shfl_sync(unsigned, T v, int from)
{
	return shuffle(v, (unsigned)from);
}

template <class T> static T __ldcg(const T *p)
{
	return *p;
}
template <class T> static void __stcg(T *p, T v)
{
	*p = v;
}

static inline uint32_t atomicAdd(uint32_t *p, uint32_t v)
{
	const uint32_t old = *p;

	*p = old + v;
	return old;
}

static inline uint32_t atomicMax(uint32_t *p, uint32_t v)
{
	const uint32_t old = *p;

	*p = std::max(old, v);
	return old;
}

static inline uint32_t __float_as_uint(float f)
{
	uint32_t u;

	memcpy(&u, &f, 4);
	return u;
}

static inline float __uint_as_float(uint32_t u)
{
	float f;

	memcpy(&f, &u, 4);
	return f;
}

static inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
	return (uint32_t)((uint64_t)a * b >> 32);
}
static inline int __float2int_rn(float f)
{
	return f != f ? 0 : (int)__builtin_rintf(f);
}

#define EXL3_DEV        static inline
#define EXL3_DEV_MEMBER inline

namespace exl3
{

static inline void keep(uint32_t &)
{
}
static inline void keep(int &)
{
}
static inline uint32_t smem_addr(const void *p)
{
	return (uint32_t)((const char *)p - emu::shared);
}

/* Documented register maps of m16n8k16: lane 4g + q holds rows g, g + 8 and columns 2q, 2q + 1 (+ 8). */
template <class D, class F>
static void mma(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int slots, F multiply)
{
	emu::warp &w = emu::mine();
	const unsigned l = emu::lane();

	memcpy(w.a[l], a, 16);
	memcpy(w.b[l], b, 8);
	emu::meet_warp();
	for (int j = 0; j < 4; j++) {
		const unsigned row = (l >> 2) + 8 * (j >> 1), col = 2 * (l & 3) + (j & 1);
		D sum = d[j];

		for (int half = 0; half < 2; half++)
			for (unsigned q = 0; q < 4; q++)
				for (int s = 0; s < slots; s++)
					sum += multiply(
						w.a[4 * (row & 7) + q][2 * half + (row >> 3)],
						w.b[4 * col + q][half], s);
		d[j] = sum;
	}
	emu::meet_warp();
}

static inline void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
			   uint32_t b0, uint32_t b1)
{
	mma(d, {a0, a1, a2, a3}, {b0, b1}, 2, [](uint32_t x, uint32_t y, int s) {
		return exl3_f16_to_f32((uint16_t)(x >> (16 * s))) *
		       exl3_f16_to_f32((uint16_t)(y >> (16 * s)));
	});
}

static inline void mma_u8s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
			    uint32_t b0, uint32_t b1)
{
	mma(d, {a0, a1, a2, a3}, {b0, b1}, 4, [](uint32_t x, uint32_t y, int s) {
		return (int)(x >> (8 * s) & 255) * (int)(int8_t)(y >> (8 * s));
	});
}

static inline int dp4a_signed(uint32_t a, uint32_t b, int c)
{
	for (int i = 0; i < 32; i += 8)
		c += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
	return c;
}

static inline uint4 load_relaxed(const void *p)
{
	return *(const uint4 *)p;
}
static inline void store_relaxed(void *p, uint4 v)
{
	*(uint4 *)p = v;
}

static inline void prefetch_l2(const void *)
{
}
static inline uint32_t lds32(uint32_t addr)
{
	return *(const uint32_t *)(emu::shared + addr);
}
static inline uint2 lds64(uint32_t addr)
{
	return *(const uint2 *)(emu::shared + addr);
}

static inline void cp_async16(uint32_t dst, const void *src)
{
	if (emu::eager)
		memcpy(emu::shared + dst, src, 16);
	else
		emu::now->open.push_back({emu::shared + dst, src});
}

static inline void cp_async_commit()
{
	emu::now->groups.push_back(emu::now->open);
	emu::now->open.clear();
}

template <int N> static inline void cp_async_wait()
{
	while (emu::now->groups.size() > N) {
		for (const emu::copy &c : emu::now->groups.front())
			memcpy(c.dst, c.src, 16);
		emu::now->groups.pop_front();
	}
}

/* A bulk copy lands when somebody waits for its mbarrier, or at once with emu::eager. */
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

static inline bool elect_one()
{
	return emu::lane() == 0;
}
template <int REGS> static inline void registers_less()
{
}
template <int REGS> static inline void registers_more()
{
}
template <int THREADS> static inline void epilogue_sync()
{
	emu::meet_team(1, THREADS);
}
static inline void add_release(uint32_t *p)
{
	++*p;
}
static inline uint32_t load_acquire(const uint32_t *p)
{
	return *p;
}

static inline void team_sync(uint32_t id, int threads)
{
	emu::meet_team(id, (unsigned)threads);
}
static inline void proxy_fence()
{
}

/* wgmma: what it reads must be there when it is issued, what it writes is there at once. */
static inline void wgmma_fence()
{
}
static inline void wgmma_commit()
{
}
template <int N> static inline void wgmma_wait()
{
}
template <int N> static inline void wgmma_hold(float (&)[N])
{
}
static inline uint64_t wgmma_desc(uint32_t addr)
{
	return addr / 16;
}

/* Warp w's 16 rows; B: rows of 128 bytes, the 16-byte chunks of row r at chunk ^ (r & 7). */
template <int N> struct wgmma {
	static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t desc)
	{
		emu::warp &w = emu::mine();
		const unsigned l = emu::lane();
		const uint32_t addr = (uint32_t)desc * 16, base = addr & ~127u, k0 = (addr & 127) / 2;

		memcpy(w.a[l], a, 16);
		emu::meet_warp();
		for (int i = 0; i < N / 2; i++) {
			const unsigned row = (l >> 2) + 8 * (i >> 1 & 1);
			const unsigned col = 8 * (unsigned)(i >> 2) + 2 * (l & 3) + (i & 1);
			float sum = d[i];

			for (unsigned k = 0; k < 16; k++) {
				const uint32_t x = w.a[4 * (row & 7) + (k >> 1 & 3)]
						      [2 * (k >> 3) + (row >> 3)];
				const uint32_t at = (k0 + k) / 8 ^ (col & 7);
				uint16_t b;

				memcpy(&b, emu::shared + base + col * 128 + at * 16 + k % 8 * 2, 2);
				sum += exl3_f16_to_f32((uint16_t)(x >> (16 * (k & 1)))) *
				       exl3_f16_to_f32(b);
			}
			d[i] = sum;
		}
		emu::meet_warp();
	}
};

/* The same from nothing where FIRST. */
template <int N, bool FIRST> struct wgmma_from {
	static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t desc)
	{
		if (FIRST)
			for (float &v : d)
				v = 0.0f;
		wgmma<N>::rs(d, a, desc);
	}
};

/* Column c of matrix i goes where lane 8i + c says. */
static inline void store_transposed(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
	emu::warp &w = emu::mine();
	const unsigned l = emu::lane();
	const uint32_t r[4] = {r0, r1, r2, r3};

	memcpy(w.a[l], r, 16);
	emu::meet_warp();
	for (unsigned row = 0; row < 8; row++) {
		const uint32_t two = w.a[4 * row + (l & 7) / 2][l >> 3];
		const uint16_t v = (uint16_t)(two >> (16 * (l & 1)));

		memcpy(emu::shared + at + 2 * row, &v, 2);
	}
	emu::meet_warp();
}

static inline void store_straight(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
	emu::warp &w = emu::mine();
	const unsigned l = emu::lane();
	const uint32_t r[4] = {r0, r1, r2, r3};

	memcpy(w.a[l], r, 16);
	emu::meet_warp();
	for (unsigned two = 0; two < 4; two++)
		memcpy(emu::shared + at + 4 * two, &w.a[4 * (l & 7) + two][l >> 3], 4);
	emu::meet_warp();
}

static inline void load_transposed(uint32_t at, uint32_t (&r)[4])
{
	emu::warp &w = emu::mine();
	const unsigned l = emu::lane();

	w.value[l] = at;
	emu::meet_warp();
	for (unsigned i = 0; i < 4; i++) {
		uint16_t v[2];

		for (unsigned e = 0; e < 2; e++)
			memcpy(&v[e], emu::shared + w.value[8 * i + 2 * (l & 3) + e] + 2 * (l >> 2), 2);
		r[i] = v[0] | (uint32_t)v[1] << 16;
	}
	emu::meet_warp();
}

static inline void border(uint32_t)
{
}

static inline void sts32(uint32_t addr, uint32_t v)
{
	*(uint32_t *)(emu::shared + addr) = v;
}

static inline uint4 lds128(uint32_t addr)
{
	return *(const uint4 *)(emu::shared + addr);
}
static inline void sts128(uint32_t addr, uint4 v)
{
	*(uint4 *)(emu::shared + addr) = v;
}

static inline uint32_t clock32()
{
	return 0;
}

static inline void do_nothing()
{
}
static inline uint32_t nanoseconds32()
{
	return 0;
}

static inline void grid_launch_dependents()
{
}
static inline void grid_wait()
{
}

} /* namespace exl3 */
#endif
