/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_f16.cu - for very many rows: W = diag(suh) H What H diag(svh) / 128 rebuilt, then y = x W by cuBLAS.
 *
 * The weights are rebuilt once per call, with both Hadamards in them, so x and y need no transform. This
 * costs about what writing and reading k n halves costs, whatever m is.
 *
 *   block   128 (k) x 128 (n), 8 warps; H128 = H8 (x) H16: H8 is three butterfly stages across the eight
 *           tiles that a warp holds in registers, H16 is one MMA with a +-1 operand behind them
 *   1       warp v: n-tile v, k-tiles 0..7: A = decoded weights (rows n), B = H16 / 4   -> [n][k], H over k
 *   2       * suh, f16, through shared memory; warp v: k 16v..16v+15, n-tiles 0..7: A = H16 / 32, B = [n][k]
 *   3       * svh, output type, through shared memory again, 16-byte stores to w[n][k]
 *
 *   time    | fetch i+1, store i-1, 1 of i | barrier | 2, 3 of i | barrier | fetch i+2, store i, ...
 *
 * The error of a product is that of rounding each weight to f16 or bf16 once, and up to eight f16 roundings before.
 */
#include "kernels/cuda/gemm_decode.cuh"
#include "kernels/cuda/gemm_f16.h"
#include "kernels/cuda/gemm_unpack.h"
#include "kernels/cuda/gemm_variants.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

namespace exl3
{

constexpr int UNPACK_THREADS = 256;
constexpr uint32_t M_MIN = 256; /* below, rebuilding costs more than the product */

/* Two entries of H16 times @scale (f16 bits): (r0, c0) in the low half, (r1, c1) in the high half. */
static __device__ __forceinline__ uint32_t hadamard_pair(uint32_t scale, int r0, int c0, int r1,
							 int c1)
{
	return scale | scale << 16 | (__popc(r0 & c0) & 1) << 15 |
	       (uint32_t)(__popc(r1 & c1) & 1) << 31;
}

/*
 * Buffers of 128 rows n x 256 bytes of k: 16-byte chunk c of row n stands at c ^ (n & 7). Callers keep
 * n & 7 fixed, so that everything but the exclusive or is an immediate offset.
 */
static __device__ __forceinline__ uint32_t chunk_at(uint32_t n, uint32_t c)
{
	return n * 256 + ((c ^ (n & 7)) << 4);
}

/*
 * Butterflies across eight tiles of four registers, two f16 each. Before the MMA that has H16, as the two
 * commute: half the instructions of doing it in f32 behind it.
 */
static __device__ __forceinline__ void hadamard8(uint32_t (&v)[8][4])
{
#pragma unroll
	for (int s = 1; s < 8; s <<= 1)
#pragma unroll
		for (int t = 0; t < 8; t++)
			if (!(t & s))
#pragma unroll
				for (int i = 0; i < 4; i++) {
					const __half2 x = *(__half2 *)&v[t][i];
					const __half2 z = *(__half2 *)&v[t + s][i];
					const __half2 sum = __hadd2(x, z), difference = __hsub2(x, z);

					v[t][i] = *(const uint32_t *)&sum;
					v[t + s][i] = *(const uint32_t *)&difference;
				}
}

/* Four 8x8 matrices of 16-bit values: lane l gives the address of row l & 7 of matrix l >> 3. */
static __device__ __forceinline__ void store_matrices(uint32_t at, uint32_t r0, uint32_t r1,
						      uint32_t r2, uint32_t r3)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
		     "r"(r0), "r"(r1), "r"(r2), "r"(r3)
		     : "memory");
#else
	/* The same by hand: a register holds elements 2 (l & 3), + 1 of row l / 4 of its matrix. */
	const uint32_t r[4] = {r0, r1, r2, r3}, lane = threadIdx.x & 31;

#pragma unroll
	for (uint32_t i = 0; i < 4; i++) {
		const uint32_t row = __shfl_sync(~0u, at, (int)(8 * i + lane / 4));

		asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + 4 * (lane & 3)), "r"(r[i]) : "memory");
	}
	__syncwarp();
#endif
}

static __device__ __forceinline__ void mma8(float (&d)[8], const uint32_t (&a)[4],
					    const uint32_t (&b)[4])
{
	float(&lo)[4] = *(float(*)[4]) & d[0];
	float(&hi)[4] = *(float(*)[4]) & d[4];

	mma_f16(lo, a[0], a[1], a[2], a[3], b[0], b[1]);
	mma_f16(hi, a[0], a[1], a[2], a[3], b[2], b[3]);
}

template <int RATE2> struct unpack_smem {
	static constexpr int ROW_BYTES = 8 * 16 * RATE2; /* trellis of one k-tile, 128 columns */
	uint8_t trellis[2][8 * ROW_BYTES];
	uint8_t half[128 * 256]; /* [n][k], Hadamard over k done */
	uint8_t out[128 * 256];
	float svh[128];
};

/* A block's place. */
struct unpack_at {
	uint32_t kb, nb;
};

static __device__ __forceinline__ void unpack_next(const unpack_args &a, unpack_at &at)
{
	if (++at.kb == a.blocks_k) {
		at.kb = 0;
		at.nb++;
	}
}

/* Begins the copy of a block's trellis. */
template <int RATE2>
static __device__ __forceinline__ void unpack_fetch(const unpack_args &a, unpack_smem<RATE2> &sm,
						    int to, unpack_at at)
{
	constexpr int ROW = unpack_smem<RATE2>::ROW_BYTES;
	const uint8_t *from = a.trellis + (size_t)at.kb * 8 * a.row_bytes + (size_t)at.nb * ROW;

	for (int i = threadIdx.x; i < 8 * ROW / 16; i += UNPACK_THREADS) {
		const int row = i / (ROW / 16), byte = i % (ROW / 16) * 16;

		cp_async16(smem_addr(&sm.trellis[to][row * ROW + byte]),
			   from + row * a.row_bytes + byte);
	}
}

/* Where a lane's row of the matrices of tile t lies in a buffer: at[t & 3] + 128 (t >> 2). @row: of the first. */
static __device__ __forceinline__ void matrix_rows(uint32_t buffer, int row, int chunk, int lane,
						   uint32_t (&at)[4])
{
	const uint32_t n = row + (lane & 7) + 8 * (lane >> 3 & 1);

#pragma unroll
	for (int t = 0; t < 4; t++)
		at[t] = buffer + chunk_at(n, chunk + 2 * t + (lane >> 4));
}

/* Steps 1 and, to shared memory, * suh: rows n = 16 warp + g (+ 8), columns k = 16 t + 2q (+ 1, 8, 9). */
template <int RATE2, int CB>
static __device__ __forceinline__ void unpack_over_k(const unpack_args &a, unpack_smem<RATE2> &sm,
						     int from, uint32_t kb, int warp, int lane)
{
	const int g = lane >> 2, q = lane & 3;
	const uint32_t quarter = 0x3400;
	const uint32_t h[4] = {hadamard_pair(quarter, 2 * q, g, 2 * q + 1, g),
			       hadamard_pair(quarter, 2 * q + 8, g, 2 * q + 9, g),
			       hadamard_pair(quarter, 2 * q, g + 8, 2 * q + 1, g + 8),
			       hadamard_pair(quarter, 2 * q + 8, g + 8, 2 * q + 9, g + 8)};
	const uint32_t *tile = (const uint32_t *)sm.trellis[from] + warp * run<RATE2>::WORDS;
	const __half2 *su = (const __half2 *)(a.suh + kb * 128 + 2 * q);
	uint32_t f[8][4], at[4];

	matrix_rows(smem_addr(sm.half), 16 * warp, 0, lane, at);
#pragma unroll
	for (int t = 0; t < 8; t++) {
		uint32_t r[run<RATE2>::NV];

		load_run<RATE2>(tile + t * 8 * run<RATE2>::WORDS, lane, r);
		decode_a<RATE2, CB>(r, f[t]);
	}
	hadamard8(f);
#pragma unroll
	for (int t = 0; t < 8; t++) {
		float d[8] = {};
		uint32_t o[4];

		mma8(d, f[t], h);
#pragma unroll
		for (int j = 0; j < 2; j++) {
			const __half2 u = __ldg(su + 8 * t + 4 * j);
#pragma unroll
			for (int e = 0; e < 2; e++) {
				const __half2 v = __hmul2(
					__floats2half2_rn(d[4 * j + 2 * e], d[4 * j + 2 * e + 1]), u);

				o[2 * j + e] = *(const uint32_t *)&v;
			}
		}
		store_matrices(at[t & 3] + 128 * (t >> 2), o[0], o[1], o[2], o[3]);
	}
}

/* Steps 2 and 3 up to shared memory: rows n = 16 t + g (+ 8), columns k = 16 warp + 2q (+ 1, 8, 9). */
template <int RATE2, bool BF16>
static __device__ __forceinline__ void unpack_over_n(unpack_smem<RATE2> &sm, int warp, int lane)
{
	const int g = lane >> 2, q = lane & 3;
	const uint32_t scale = 0x2800; /* 1/32: with the quarter of step 1, 1/128 */
	const uint32_t h[4] = {hadamard_pair(scale, g, 2 * q, g, 2 * q + 1),
			       hadamard_pair(scale, g + 8, 2 * q, g + 8, 2 * q + 1),
			       hadamard_pair(scale, g, 2 * q + 8, g, 2 * q + 9),
			       hadamard_pair(scale, g + 8, 2 * q + 8, g + 8, 2 * q + 9)};
	/* The same rows and chunks of both buffers: 16 columns k of this warp. */
	const uint32_t at = chunk_at((lane & 7) + 8 * (lane >> 3 & 1), 2 * warp + (lane >> 4));
	const uint32_t from = smem_addr(sm.half) + at, to = smem_addr(sm.out) + at;
	uint32_t b[8][4];

#pragma unroll
	for (int t = 0; t < 8; t++)
		asm volatile(
			"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
			: "=r"(b[t][0]), "=r"(b[t][1]), "=r"(b[t][2]), "=r"(b[t][3])
			: "r"(from + t * 16 * 256)
			: "memory");
	hadamard8(b);
#pragma unroll
	for (int t = 0; t < 8; t++) {
		float d[8] = {};
		uint32_t o[4];

		mma8(d, h, b[t]);
#pragma unroll
		for (int e = 0; e < 2; e++) {
			const float sv = sm.svh[16 * t + 8 * e + g];

#pragma unroll
			for (int j = 0; j < 2; j++) {
				const float x = d[4 * j + 2 * e] * sv, y = d[4 * j + 2 * e + 1] * sv;

				if (BF16) {
					const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);

					o[2 * j + e] = *(const uint32_t *)&v;
				} else {
					const __half2 v = __floats2half2_rn(x, y);

					o[2 * j + e] = *(const uint32_t *)&v;
				}
			}
		}
		store_matrices(to + t * 16 * 256, o[0], o[1], o[2], o[3]);
	}
}

template <int RATE2>
static __device__ __forceinline__ void unpack_store(const unpack_args &a,
						    const unpack_smem<RATE2> &sm, unpack_at at)
{
	const uint32_t n = threadIdx.x >> 4, c = threadIdx.x & 15;
	const uint8_t *from = sm.out + chunk_at(n, c);
	uint16_t *to = a.w + ((size_t)at.nb * 128 + n) * a.k + at.kb * 128 + c * 8;

#pragma unroll
	for (int i = 0; i < 8; i++, to += (size_t)16 * a.k)
		*(uint4 *)to = *(const uint4 *)(from + i * 16 * 256);
}

/* Each thread block has a run of consecutive 128 x 128 blocks. */
template <int RATE2, int CB, bool BF16>
__global__ void __launch_bounds__(UNPACK_THREADS, 2)
	unpack_dense(const __grid_constant__ unpack_args a)
{
	extern __shared__ __align__(128) uint8_t raw[];
	unpack_smem<RATE2> &sm = *(unpack_smem<RATE2> *)raw;
	const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	const uint32_t begin = (uint32_t)((uint64_t)a.blocks * blockIdx.x / gridDim.x);
	const uint32_t end = (uint32_t)((uint64_t)a.blocks * (blockIdx.x + 1) / gridDim.x);
	unpack_at at = {begin % a.blocks_k, begin / a.blocks_k}, ahead = at, behind = at;

	unpack_fetch(a, sm, 0, ahead);
	cp_async_commit();
	for (uint32_t b = begin; b < end; b++) {
		const int cur = (b - begin) & 1;

		cp_async_wait<0>();
		__syncthreads(); /* this block's trellis and the last block's output are there */
		unpack_next(a, ahead);
		if (b + 1 < end)
			unpack_fetch(a, sm, cur ^ 1, ahead);
		cp_async_commit();
		if (b > begin)
			unpack_store(a, sm, behind);
		if (threadIdx.x < 128 && (b == begin || at.kb == 0))
			sm.svh[threadIdx.x] = __half2float(a.svh[at.nb * 128 + threadIdx.x]);
		unpack_over_k<RATE2, CB>(a, sm, cur, at.kb, warp, lane);
		__syncthreads();
		unpack_over_n<RATE2, BF16>(sm, warp, lane);
		behind = at;
		unpack_next(a, at);
	}
	__syncthreads();
	unpack_store(a, sm, behind);
}

/* Which rebuild: the one above, or that of unpack_mma.cuh or unpack_sm90.cuh. */
enum unpack_kind { UNPACK_DENSE, UNPACK_MMA, UNPACK_WGMMA };

static unpack_entry unpack_find(unpack_kind kind, const struct exl3_matrix &m, bool bf16)
{
	if (kind == UNPACK_MMA)
		return unpack_mma_some(m.rate2, m.codebook, bf16);
	if (kind == UNPACK_WGMMA)
		return m.codebook == EXL3_CB_3INST ? unpack_wgmma_cb0(m.rate2, bf16)
		       : m.codebook == EXL3_CB_MCG ? unpack_wgmma_cb1(m.rate2, bf16)
						   : unpack_wgmma_cb2(m.rate2, bf16);
#define RATE(r, cb)                                                            \
	if (m.rate2 == r && m.codebook == cb)                                  \
		return {bf16 ? (const void *)unpack_dense<r, cb, true>         \
			     : (const void *)unpack_dense<r, cb, false>,       \
			(int)sizeof(unpack_smem<r>), UNPACK_THREADS, 2};
	EXL3_GEMM_RATES(RATE)
#undef RATE
	return {};
}

static int unpack(unpack_kind kind, const struct exl3_matrix &m, bool bf16, uint16_t *w, int sms,
		  cudaStream_t stream)
{
	const unpack_entry e = unpack_find(kind, m, bf16);
	unpack_args a = {};

	if (!e.kernel)
		return -EOPNOTSUPP;
	a.trellis = (const uint8_t *)m.trellis;
	a.suh = (const __half *)m.suh;
	a.svh = (const __half *)m.svh;
	a.k = m.k;
	a.blocks_k = m.k / 128;
	a.blocks = a.blocks_k * (m.n / 128);
	a.row_bytes = (size_t)(m.n / 16) * exl3_tile_bytes(m.rate2);
	a.w = w;
	void *params[] = {&a};
	const uint32_t most = (uint32_t)(e.per_sm * sms), grid = a.blocks < most ? a.blocks : most;

	if (cudaFuncSetAttribute(e.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
				 e.smem_bytes) != cudaSuccess ||
	    cudaLaunchKernel(e.kernel, dim3(grid), dim3((unsigned)e.threads), params,
			     (size_t)e.smem_bytes, stream) != cudaSuccess)
		return -EIO;
	return 0;
}

/*
 * The part of cuBLAS's interface that is used, declared here so that building needs neither its header
 * nor its library. Source: cuBLAS library documentation, cublasGemmEx; values from its public enums.
 */
enum { BLAS_OP_N = 0, BLAS_OP_T = 1, BLAS_COMPUTE_32F = 68, BLAS_GEMM_DEFAULT = -1 };
enum { BLAS_R_32F = 0, BLAS_R_16F = 2, BLAS_R_16BF = 14 };

struct blas {
	int (*create)(void **handle);
	int (*set_stream)(void *handle, cudaStream_t stream);
	int (*set_workspace)(void *handle, void *ws, size_t bytes);
	int (*gemm)(void *handle, int opa, int opb, int m, int n, int k, const void *alpha,
		    const void *a, int ta, int lda, const void *b, int tb, int ldb,
		    const void *beta, void *c, int tc, int ldc, int compute, int algo);
};

constexpr int DEVICES_MAX = 64;
static pthread_mutex_t blas_lock =
	PTHREAD_MUTEX_INITIALIZER; /* guards all below; handles are not thread-safe */
static struct blas lib;
static bool lib_tried, lib_found;
static void *handles[DEVICES_MAX]; /* one per device, made when first asked for, kept */

/* The current device's handle, or NULL: no library. Called with the lock held. */
static void *blas_handle()
{
	static const char *const names[] = {"libcublas.so.13", "libcublas.so.12",
					    "libcublas.so.11"};
	int dev;

	if (!lib_tried) {
		void *so = nullptr;

		lib_tried = true;
		for (const char *name : names)
			if (!so)
				so = dlopen(name, RTLD_NOW | RTLD_LOCAL);
		if (so) {
			lib.create = (decltype(lib.create))dlsym(so, "cublasCreate_v2");
			lib.set_stream = (decltype(lib.set_stream))dlsym(so, "cublasSetStream_v2");
			lib.set_workspace =
				(decltype(lib.set_workspace))dlsym(so, "cublasSetWorkspace_v2");
			lib.gemm = (decltype(lib.gemm))dlsym(so, "cublasGemmEx");
			lib_found = lib.create && lib.set_stream && lib.set_workspace && lib.gemm;
		}
	}
	if (!lib_found || cudaGetDevice(&dev) != cudaSuccess || dev < 0 || dev >= DEVICES_MAX)
		return nullptr;
	if (!handles[dev] && lib.create(&handles[dev]) != 0)
		handles[dev] = nullptr;
	return handles[dev];
}

static int blas_type(int dtype)
{
	return dtype == EXL3_F32 ? BLAS_R_32F : dtype == EXL3_F16 ? BLAS_R_16F : BLAS_R_16BF;
}

} // namespace exl3

int exl3_gemm_library(uint32_t m, uint32_t n, uint32_t k, const void *x, uint32_t x_stride,
		      const void *w, uint32_t w_stride, void *y, uint32_t y_stride, int dtype,
		      int y_dtype, void *ws, cudaStream_t stream)
{
	const float one = 1.0f, zero = 0.0f;
	int status = -1;
	void *h;

	pthread_mutex_lock(&exl3::blas_lock);
	h = exl3::blas_handle();
	/* Column-major view: y^T [n x m] = w [n x k] x^T [k x m]. Setting the stream drops the workspace. */
	if (h && exl3::lib.set_stream(h, stream) == 0 &&
	    exl3::lib.set_workspace(h, ws, EXL3_GEMM_LIBRARY_WS) == 0)
		status = exl3::lib.gemm(h, exl3::BLAS_OP_T, exl3::BLAS_OP_N, (int)n, (int)m, (int)k,
					&one, w, exl3::blas_type(dtype), (int)w_stride, x,
					exl3::blas_type(dtype), (int)x_stride, &zero, y,
					exl3::blas_type(y_dtype), (int)y_stride,
					exl3::BLAS_COMPUTE_32F, exl3::BLAS_GEMM_DEFAULT);
	pthread_mutex_unlock(&exl3::blas_lock);
	return !h ? -EOPNOTSUPP : status == 0 ? 0 : -EIO;
}

bool exl3_gemm_library_open(void)
{
	bool found;

	pthread_mutex_lock(&exl3::blas_lock);
	found = exl3::blas_handle() != nullptr;
	pthread_mutex_unlock(&exl3::blas_lock);
	return found;
}

bool exl3_gemm_f16_supports(const struct exl3_cuda_linear *a)
{
	const uint32_t es = a->y_dtype == EXL3_F32 ? 4 : 2;
	bool found;

	if (a->device_cc < 80 || a->m < exl3::M_MIN ||
	    (a->table && !(a->x_private && a->y_private)) || a->x_dtype == EXL3_F32 ||
	    (a->y_dtype != a->x_dtype && (a->y_dtype != EXL3_F32 || a->x_dtype != EXL3_F16)))
		return false; /* bf16 weights are only exact enough for a result that is rounded to bf16 too */
	if (a->x_stride % 2 || a->y_stride % es)
		return false;
	for (uint32_t i = 0; i < a->nr_shards; i++)
		if (a->shard[i].bias || !exl3_rate_valid(a->shard[i].rate2, a->shard[i].codebook))
			return false;
	pthread_mutex_lock(&exl3::blas_lock);
	found = exl3::blas_handle() != nullptr;
	pthread_mutex_unlock(&exl3::blas_lock);
	return found;
}

size_t exl3_gemm_f16_ws_bytes(const struct exl3_cuda_linear *a)
{
	size_t w = 0;

	for (uint32_t i = 0; i < a->nr_shards; i++) {
		const size_t bytes = (size_t)a->shard[i].k * a->shard[i].n * 2;

		w = bytes > w ? bytes : w;
	}
	return EXL3_CUDA_WS_ZERO + EXL3_GEMM_LIBRARY_WS + w;
}

static int f16_launch(exl3::unpack_kind kind, const struct exl3_cuda_linear *a, cudaStream_t stream)
{
	uint8_t *lib_ws = (uint8_t *)a->ws + EXL3_CUDA_WS_ZERO;
	uint16_t *w = (uint16_t *)(lib_ws + EXL3_GEMM_LIBRARY_WS);
	const uint32_t es = a->y_dtype == EXL3_F32 ? 4 : 2;
	uint32_t col = 0;

	if (a->ws_bytes < exl3_gemm_f16_ws_bytes(a))
		return -ENOMEM;
	for (uint32_t i = 0; i < a->nr_shards; i++) {
		const struct exl3_matrix &m = a->shard[i];
		const uint32_t n = a->stored || a->y_private ? m.n : m.n_log;
		const uint32_t k = a->stored || a->x_private ? m.k : m.k_log;
		int r = exl3::unpack(kind, m, a->x_dtype == EXL3_BF16, w, a->device_sms, stream);

		if (r < 0)
			return r;
		r = exl3_gemm_library(a->m, n, k, a->x, a->x_stride / 2, w, m.k,
				      (char *)a->y + (size_t)col * es, a->y_stride / es, a->x_dtype,
				      a->y_dtype, lib_ws, stream);
		if (r < 0)
			return r;
		col += n;
	}
	return 0;
}

int exl3_gemm_f16_launch(const struct exl3_cuda_linear *a, cudaStream_t stream)
{
	return f16_launch(exl3::UNPACK_DENSE, a, stream);
}

bool exl3_gemm_f16_wgmma_supports(const struct exl3_cuda_linear *a)
{
	return a->device_cc == 90 && exl3_gemm_f16_supports(a);
}

int exl3_gemm_f16_wgmma_launch(const struct exl3_cuda_linear *a, cudaStream_t stream)
{
	return f16_launch(exl3::UNPACK_WGMMA, a, stream);
}

bool exl3_gemm_f16_mma_supports(const struct exl3_cuda_linear *a)
{
	for (uint32_t i = 0; i < a->nr_shards; i++)
		if (!exl3::unpack_find(exl3::UNPACK_MMA, a->shard[i], false).kernel)
			return false;
	return exl3_gemm_f16_supports(a);
}

int exl3_gemm_f16_mma_launch(const struct exl3_cuda_linear *a, cudaStream_t stream)
{
	return f16_launch(exl3::UNPACK_MMA, a, stream);
}
