/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemv_ptx.cuh - what only the few-row kernels need beside ptx.cuh and wgmma.cuh; PTX ISA sections as there.
 */
#ifndef EXL3_CUDA_GEMV_PTX_CUH
#define EXL3_CUDA_GEMV_PTX_CUH

#include "kernels/cuda/ptx.cuh"

#if defined(__CUDACC__) && !defined(EXL3_EMULATE)
#include "kernels/cuda/wgmma.cuh"

namespace exl3
{

/* An instruction that does nothing and is not optimised away (9.7.19). */
EXL3_DEV void do_nothing()
{
	asm volatile("nanosleep.u32 0;" ::: "memory");
}

/* Nanoseconds of the device's timer, coarse (10.26). */
EXL3_DEV uint32_t nanoseconds32()
{
	uint32_t t;

	asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t)::"memory");
	return t;
}

/* Barrier @id of @threads threads of the block (9.7.13.1). */
EXL3_DEV void team_sync(uint32_t id, int threads)
{
	asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <> struct wgmma<16> {
	static __device__ __forceinline__ void rs(float (&d)[8], const uint32_t (&a)[4], uint64_t b)
	{
		asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
			     "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
			     "%0, %1, %2, %3, %4, %5, %6, %7}, "
			     "{%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
			     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),
			       "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
	}
};

} /* namespace exl3 */
#endif
#endif
