/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ptx.cuh - one wrapper per machine instruction that the kernels need and CUDA C++ does not name.
 *
 * Source: the PTX ISA manual, docs.nvidia.com/cuda/parallel-thread-execution; each group names its
 * section. The integer ones (used by trellis.cuh) also have a plain C++ body for the host, so that
 * the decoder is checked without a GPU (tests/gpu/host_decode.cu).
 */
#ifndef EXL3_CUDA_PTX_CUH
#define EXL3_CUDA_PTX_CUH

#include "kernels/format.h"

#include <cuda_fp16.h>
#include <stdint.h>

#ifndef EXL3_EMULATE
#define EXL3_DEV        static __device__ __forceinline__
#define EXL3_DEV_MEMBER __device__ __forceinline__
#endif

namespace exl3
{

/* ---- integer instructions, host and device (9.7.1, 9.7.4, 9.7.8) ---- */

/* PRMT: four bytes picked from b:a by the nibbles of @s. */
static EXL3_HD uint32_t prmt(uint32_t a, uint32_t b, uint32_t s)
{
#ifdef __CUDA_ARCH__
	return __byte_perm(a, b, s);
#else
	uint64_t v = (uint64_t)b << 32 | a;
	uint32_t r = 0;

	for (int i = 0; i < 4; i++)
		r |= (uint32_t)(v >> (8 * (s >> (4 * i) & 7)) & 0xff) << (8 * i);
	return r;
#endif
}

/* SHF: low word of (hi:lo) >> s, 0 <= s < 32. */
static EXL3_HD uint32_t funnel(uint32_t lo, uint32_t hi, int s)
{
#ifdef __CUDA_ARCH__
	return __funnelshift_r(lo, hi, s);
#else
	return s ? lo >> s | hi << (32 - s) : lo;
#endif
}

/* IDP.2A: a.h0 * b.b0 + a.h1 * b.b1; a 16-bit extract on the multiplier's pipe. */
static EXL3_HD uint32_t dp2a(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
	uint32_t d;

	asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0u));
	return d;
#else
	return (a & 0xffff) * (b & 0xff) + (a >> 16) * (b >> 8 & 0xff);
#endif
}

/* IDP.4A, unsigned: c + sum of byte products. */
static EXL3_HD uint32_t dp4a(uint32_t a, uint32_t b, uint32_t c)
{
#ifdef __CUDA_ARCH__
	return __dp4a(a, b, c);
#else
	for (int i = 0; i < 32; i += 8)
		c += (a >> i & 0xff) * (b >> i & 0xff);
	return c;
#endif
}

/* LOP3: the codebook's mask and flip in one instruction. */
static EXL3_HD uint32_t code_halves(uint32_t x)
{
#ifdef __CUDA_ARCH__
	uint32_t r;

	asm("lop3.b32 %0, %1, %2, %3, 0x6a;"
	    : "=r"(r)
	    : "r"(x), "r"(0x8fff8fffu), "r"(0x3b603b60u));
	return r;
#else
	return exl3_code_halves(x);
#endif
}

/* MULx2: both fp16 lanes. */
static EXL3_HD uint32_t mul_f16x2(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
	uint32_t d;

	asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
	return d;
#else
	uint32_t d = 0;

	for (int i = 0; i < 32; i += 16)
		d |= (uint32_t)exl3_f64_to_f16((double)exl3_f16_to_f32((uint16_t)(a >> i)) *
					       (double)exl3_f16_to_f32((uint16_t)(b >> i)))
		     << i;
	return d;
#endif
}

/* tests/gpu/emulate.h runs device code on the CPU and brings its own versions of what follows. */
#if defined(__CUDACC__) && !defined(EXL3_EMULATE)

/* Hides where a value comes from, so that the compiler keeps it in a register instead of making it again. */
EXL3_DEV void keep(uint32_t &v)
{
	asm volatile("" : "+r"(v));
}
EXL3_DEV void keep(int &v)
{
	asm volatile("" : "+r"(v));
}

EXL3_DEV uint32_t smem_addr(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* Clocks of this SM, for differences (10.24). */
EXL3_DEV uint32_t clock32()
{
	uint32_t c;

	asm volatile("mov.u32 %0, %%clock;" : "=r"(c)::"memory");
	return c;
}

/* ---- tensor cores (9.7.14) ---- */

/* d[16 x 8] += a[16 x 16] b[16 x 8], f16 in, f32 out. */
EXL3_DEV void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
		      uint32_t b0, uint32_t b1)
{
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
		     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* d[16 x 8] += a[16 x 32] b[32 x 8], u8 times s8, s32 out. */
EXL3_DEV void mma_u8s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
		       uint32_t b1)
{
	asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, "
		     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
		     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* IDP.4A, signed: c + sum of byte products. */
EXL3_DEV int dp4a_signed(uint32_t a, uint32_t b, int c)
{
	return __dp4a((int)a, (int)b, c);
}

/* ---- global and shared memory ---- */

/* Global loads and stores that meet at the L2, for words that another block polls (9.7.9.8, 9.7.9.11). */
EXL3_DEV uint4 load_relaxed(const void *p)
{
	uint4 v;

	asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "l"(p)
		     : "memory");
	return v;
}

EXL3_DEV void store_relaxed(void *p, uint4 v)
{
	asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x),
		     "r"(v.y), "r"(v.z), "r"(v.w)
		     : "memory");
}

/* A 64-bit L2 policy: lines of the weights leave first (9.7.9.18). */
EXL3_DEV uint64_t policy_evict_first()
{
	uint64_t p;

	asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
	return p;
}

/* Asks for the line of @p to be brought into the L2 (9.7.9.16). */
EXL3_DEV void prefetch_l2(const void *p)
{
	asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

EXL3_DEV uint32_t lds32(uint32_t addr)
{
	uint32_t v;

	asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr));
	return v;
}

EXL3_DEV uint2 lds64(uint32_t addr)
{
	uint2 v;

	asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(addr));
	return v;
}

/* cp.async: 16 bytes global to shared, past the L1 (9.7.9.25.3). */
EXL3_DEV void cp_async16(uint32_t dst, const void *src)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

EXL3_DEV void cp_async16_hint(uint32_t dst, const void *src, uint64_t policy)
{
	asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst),
		     "l"(src), "l"(policy)
		     : "memory");
}

EXL3_DEV void cp_async_commit()
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> EXL3_DEV void cp_async_wait()
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- sm_90: bulk copies, mbarriers (9.7.9.25, 9.7.13.15), programmatic launch (9.7.13.13) ---- */

EXL3_DEV void mbar_init(uint32_t bar, uint32_t count)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

EXL3_DEV void mbar_init_fence()
{
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

EXL3_DEV void mbar_expect(uint32_t bar, uint32_t bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
		     : "memory");
}

EXL3_DEV void mbar_arrive(uint32_t bar)
{
	asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* Waits for the end of the phase with parity @phase. */
EXL3_DEV void mbar_wait(uint32_t bar, uint32_t phase)
{
	uint32_t done = 0;

	while (!done)
		asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
			     "selp.u32 %0, 1, 0, p;}"
			     : "=r"(done)
			     : "r"(bar), "r"(phase)
			     : "memory");
}

/* 1-D bulk copy, global to shared; addresses and bytes multiples of 16. */
EXL3_DEV void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
		     "[%0], [%1], %2, [%3];" ::"r"(dst),
		     "l"(src), "r"(bytes), "r"(bar)
		     : "memory");
}

/* Orders ordinary writes of shared memory before reads by wgmma and bulk copies. */
EXL3_DEV void proxy_fence()
{
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

EXL3_DEV void grid_launch_dependents()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Returns when the kernels that this one depends on have ended; at once without the launch attribute. */
EXL3_DEV void grid_wait()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif /* __CUDACC__ && !EXL3_EMULATE */
} /* namespace exl3 */
#endif
