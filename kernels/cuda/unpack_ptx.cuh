/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unpack_ptx.cuh - what only the rebuild of weights by wgmma needs beside ptx.cuh and wgmma.cuh; PTX ISA sections as there.
 *
 * tests/gpu/emulate.h has the same for the host.
 */
#ifndef EXL3_CUDA_UNPACK_PTX_CUH
#define EXL3_CUDA_UNPACK_PTX_CUH

#include "kernels/cuda/ptx.cuh"

#if defined(__CUDACC__) && !defined(EXL3_EMULATE)
#include "kernels/cuda/wgmma.cuh"

namespace exl3
{

/*
 * Four 8x8 matrices of 16-bit values, each stored transposed (9.7.14.5.16): of matrix i, lane 4g+q holds row g,
 * columns 2q, 2q+1 in r[i], and lane 8i+c gives where column c goes, 16 bytes.
 */
EXL3_DEV void store_transposed(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
		     "r"(r0), "r"(r1), "r"(r2), "r"(r3)
		     : "memory");
#endif
}

/* Four 8x8 matrices as they are: lane 8i+c gives where row c of matrix i goes. */
EXL3_DEV void store_straight(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r0),
		     "r"(r1), "r"(r2), "r"(r3)
		     : "memory");
#else
	const uint32_t r[4] = {r0, r1, r2, r3}, lane = threadIdx.x & 31;

#pragma unroll
	for (uint32_t i = 0; i < 4; i++) {
		const uint32_t row = __shfl_sync(~0u, at, (int)(8 * i + lane / 4));

		asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + 4 * (lane & 3)), "r"(r[i]) : "memory");
	}
#endif
}

/* Four 8x8 matrices transposed: lane 8i+c gives row c of matrix i; r[i] holds rows 2q, 2q+1 of column g. */
EXL3_DEV void load_transposed(uint32_t at, uint32_t (&r)[4])
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		     : "r"(at)
		     : "memory");
}

/*
 * A border for ptxas, which else moves each use of a product up to the product: a branch that is never taken, as @v, an
 * argument of the kernel, is not 0.
 */
EXL3_DEV void border(uint32_t v)
{
	while (v == 0)
		v = clock32();
}

EXL3_DEV void sts32(uint32_t addr, uint32_t v)
{
	asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}

EXL3_DEV uint4 lds128(uint32_t addr)
{
	uint4 v;

	asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "r"(addr));
	return v;
}

EXL3_DEV void sts128(uint32_t addr, uint4 v)
{
	asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z),
		     "r"(v.w)
		     : "memory");
}

/* As wgmma<N>::rs(), but D = A B instead of D += A B where FIRST: no registers to clear before. */
template <int N, bool FIRST> struct wgmma_from;

template <bool FIRST> struct wgmma_from<64, FIRST> {
	static EXL3_DEV_MEMBER void rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
	{
		asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
			     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
			     "%0, %1, %2, %3, %4, %5, %6, %7, "
			     "%8, %9, %10, %11, %12, %13, %14, %15, "
			     "%16, %17, %18, %19, %20, %21, %22, %23, "
			     "%24, %25, %26, %27, %28, %29, %30, %31}, "
			     "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
			     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),
			       "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
			       "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
			       "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
			       "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
			       "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
			       "+f"(d[30]), "+f"(d[31])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(!FIRST));
	}
};

template <bool FIRST> struct wgmma_from<128, FIRST> {
	static EXL3_DEV_MEMBER void rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
	{
		asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
			     "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
			     "%0, %1, %2, %3, %4, %5, %6, %7, "
			     "%8, %9, %10, %11, %12, %13, %14, %15, "
			     "%16, %17, %18, %19, %20, %21, %22, %23, "
			     "%24, %25, %26, %27, %28, %29, %30, %31, "
			     "%32, %33, %34, %35, %36, %37, %38, %39, "
			     "%40, %41, %42, %43, %44, %45, %46, %47, "
			     "%48, %49, %50, %51, %52, %53, %54, %55, "
			     "%56, %57, %58, %59, %60, %61, %62, %63}, "
			     "{%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
			     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),
			       "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
			       "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
			       "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
			       "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
			       "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
			       "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
			       "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
			       "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]),
			       "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
			       "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
			       "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
			       "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(!FIRST));
	}
};

} // namespace exl3
#endif
#endif
