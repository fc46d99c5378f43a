/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_ptx.cuh - what only the kernels for many rows need beside ptx.cuh and wgmma.cuh; PTX ISA sections as there.
 *
 * tests/gpu/emulate.h has the same for the host.
 */
#ifndef EXL3_CUDA_GEMM_PTX_CUH
#define EXL3_CUDA_GEMM_PTX_CUH

#include "kernels/cuda/ptx.cuh"

#if defined(__CUDACC__) && !defined(EXL3_EMULATE)
#include "kernels/cuda/wgmma.cuh"

namespace exl3
{

/* One lane of a converged warp, always the same; the compiler knows that it is only one. */
static __device__ __forceinline__ bool elect_one()
{
	uint32_t p;

	asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
		     : "=r"(p));
	return p;
}

/* Registers per thread of this warpgroup, fewer or more than at entry (9.7.20.5). */
template <int REGS> static __device__ __forceinline__ void registers_less()
{
	asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGS));
}

template <int REGS> static __device__ __forceinline__ void registers_more()
{
	asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGS));
}

/* Named barrier 1: all threads that hold accumulators. */
template <int THREADS> static __device__ __forceinline__ void epilogue_sync()
{
	asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

/* Counts up: what was written before is seen by who reads the count with load_acquire(). */
static __device__ __forceinline__ void add_release(uint32_t *p)
{
	asm volatile("red.add.release.gpu.global.u32 [%0], 1;" ::"l"(p) : "memory");
}

static __device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
	uint32_t v;

	asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

} // namespace exl3
#endif
#endif
