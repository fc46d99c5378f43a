/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla_ptx.cuh - the instructions that the MLA kernels use, one wrapper each.
 *
 * References: PTX ISA, sections "Asynchronous Data Movement" (cp.async), "Warp-level Matrix
 * Instructions" (ldmatrix, mma), "Parallel Synchronization" (barrier.cluster), "Data Movement" (mapa).
 */
#ifndef EXL3_KERNELS_CUDA_MLA_PTX_CUH
#define EXL3_KERNELS_CUDA_MLA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace exl3_mla
{

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EXL3_MLA_CLUSTERS 1
#else
#define EXL3_MLA_CLUSTERS 0
#endif

__device__ __forceinline__ uint32_t smem_addr(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes to shared memory past L1; @bytes 0 writes zeros and reads nothing. */
__device__ __forceinline__ void cp_async16(uint32_t dst, const void *src, uint32_t bytes)
{
	asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
		     "r"(bytes)
		     : "memory");
}

__device__ __forceinline__ void cp_async_commit()
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ __forceinline__ void cp_async_wait()
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t addr)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		     : "r"(addr)
		     : "memory");
}

__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t addr)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		     : "r"(addr)
		     : "memory");
}

/* c[16 x 8] += a[16 x 16] b[16 x 8], f32 accumulators. */
template <bool BF16>
__device__ __forceinline__ void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
					 uint32_t b1)
{
	if constexpr (BF16)
		asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
		    "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
		    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	else
		asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
		    "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
		    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two e4m3 values (low 16 bits) as f16x2; exact. */
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint32_t v)
{
	const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)v, __NV_E4M3);

	return (uint32_t)h.x | ((uint32_t)h.y << 16);
}

/* Four of them: the low and the high two. */
__device__ __forceinline__ void e4m3x4_to_f16x2(uint32_t v, uint32_t &lo, uint32_t &hi)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
	asm("{ .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h; }"
	    : "=r"(lo), "=r"(hi)
	    : "r"(v));
#else
	lo = e4m3x2_to_f16x2(v & 0xffff);
	hi = e4m3x2_to_f16x2(v >> 16);
#endif
}

/* Loaded exactly once: the owner may change the word at any time. */
__device__ __forceinline__ int64_t load_index(const void *p, bool wide)
{
	int64_t v;
	int32_t w;

	if (wide) {
		asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(p));
		return v;
	}
	asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(w) : "l"(p));
	return w;
}

/* Orders nothing by itself: only for "everybody is here". */
__device__ __forceinline__ void cluster_arrive()
{
#if EXL3_MLA_CLUSTERS
	asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait()
{
#if EXL3_MLA_CLUSTERS
	asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t cluster_rank()
{
#if EXL3_MLA_CLUSTERS
	uint32_t r;

	asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
	return r;
#else
	return 0;
#endif
}

/* Address of the same shared variable in CTA @rank of the cluster. */
__device__ __forceinline__ uint32_t cluster_map(uint32_t addr, uint32_t rank)
{
#if EXL3_MLA_CLUSTERS
	uint32_t ret;

	asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(ret) : "r"(addr), "r"(rank));
	return ret;
#else
	(void)rank;
	return addr;
#endif
}

/*
 * Stores to a CTA of the cluster that count their bytes at an mbarrier there (st.async); without
 * clusters ordinary stores to this CTA.
 */
__device__ __forceinline__ void push1(uint32_t addr, uint32_t bar, float x)
{
#if EXL3_MLA_CLUSTERS
	asm volatile(
		"st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
			addr),
		"r"(__float_as_uint(x)), "r"(bar)
		: "memory");
#else
	(void)bar;
	asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(x) : "memory");
#endif
}

__device__ __forceinline__ void push2(uint32_t addr, uint32_t bar, float x, float y)
{
#if EXL3_MLA_CLUSTERS
	asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, "
		     "[%3];" ::"r"(addr),
		     "r"(__float_as_uint(x)), "r"(__float_as_uint(y)), "r"(bar)
		     : "memory");
#else
	(void)bar;
	asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(x), "f"(y) : "memory");
#endif
}

__device__ __forceinline__ void push4(uint32_t addr, uint32_t bar, float x, float y, float z,
				      float w)
{
#if EXL3_MLA_CLUSTERS
	asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, "
		     "%3, %4}, "
		     "[%5];" ::"r"(addr),
		     "r"(__float_as_uint(x)), "r"(__float_as_uint(y)), "r"(__float_as_uint(z)),
		     "r"(__float_as_uint(w)), "r"(bar)
		     : "memory");
#else
	(void)bar;
	asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "f"(x), "f"(y), "f"(z),
		     "f"(w)
		     : "memory");
#endif
}

/* mbarriers (sm_80 and later) in this CTA's shared memory. */
__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count)
{
	asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbar_arrive(uint32_t bar)
{
	asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(bar) : "memory");
}

/* One arrival, and @bytes that pushes will bring. */
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes)
{
#if EXL3_MLA_CLUSTERS
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
		     : "memory");
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
	(void)bytes;
	mbar_arrive(bar);
#endif
}

/* Arrives when all earlier cp.async of this thread have landed; one of the expected arrivals. */
__device__ __forceinline__ void mbar_arrive_copies(uint32_t bar)
{
	asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity)
{
#if EXL3_MLA_CLUSTERS
	asm volatile("{\n .reg .pred p;\n"
		     "again_%=:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, "
		     "[%0], %1;\n"
		     " @p bra done_%=;\n bra again_%=;\n done_%=:\n}" ::"r"(bar),
		     "r"(parity)
		     : "memory");
#else
	asm volatile("{\n .reg .pred p;\n"
		     "again_%=:\n mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
		     " @p bra done_%=;\n bra again_%=;\n done_%=:\n}" ::"r"(bar),
		     "r"(parity)
		     : "memory");
#endif
}

} // namespace exl3_mla

#endif
