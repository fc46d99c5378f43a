/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_f16.cu - for very many rows: W = diag(suh) H What H diag(svh) / 128 rebuilt, then y = x W by cuBLAS.
 *
 * The weights are rebuilt once per call, with both Hadamards in them, so x and y need no transform. This
 * costs about what writing and reading k n halves costs, whatever m is.
 *
 *   block   128 (k) x 128 (n), 8 warps; H128 = H8 (x) H16: H16 is one MMA with a +-1 operand, H8 is
 *           three butterfly stages across the eight tiles that a warp holds in registers
 *   1       warp v: n-tile v, k-tiles 0..7: A = decoded weights (rows n), B = H16   -> [n][k], H over k
 *   2       through shared memory (f16), then warp v: k 16v..16v+15, n-tiles 0..7: A = H16, B = [n][k]
 *   3       scales, output type, through shared memory again, 16-byte stores to w[n][k]
 */
#include "kernels/cuda/gemm_f16.h"
#include "kernels/cuda/gemm_variants.h"
#include "kernels/cuda/trellis.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

namespace exl3
{

constexpr int UNPACK_THREADS = 256;
constexpr uint32_t M_MIN     = 256; /* below, rebuilding costs more than the product */

/* Two entries of H16, (r, c) and (r, c + 1) or (r + 1, c), as f16. */
static __device__ __forceinline__ uint32_t hadamard_pair(int r0, int c0, int r1, int c1)
{
	return 0x3c003c00u | (__popc(r0 & c0) & 1) << 15 | (uint32_t)(__popc(r1 & c1) & 1) << 31;
}

/* Position of the 16-byte chunk @c of row @n in the buffer of 128 rows x 256 bytes. */
static __device__ __forceinline__ uint32_t chunk_at(uint32_t n, uint32_t c)
{
	return n * 256 + ((c ^ (n & 7)) << 4);
}

/* Butterflies across eight tiles of eight values each. */
static __device__ __forceinline__ void hadamard8(float (&v)[8][8])
{
#pragma unroll
	for (int s = 1; s < 8; s <<= 1)
#pragma unroll
		for (int t = 0; t < 8; t++)
			if (!(t & s))
#pragma unroll
				for (int i = 0; i < 8; i++) {
					float x = v[t][i], z = v[t + s][i];

					v[t][i] = x + z;
					v[t + s][i] = x - z;
				}
}

static __device__ __forceinline__ void mma8(float (&d)[8], const uint32_t (&a)[4], const uint32_t (&b)[4])
{
	float(&lo)[4] = *(float(*)[4]) & d[0];
	float(&hi)[4] = *(float(*)[4]) & d[4];

	mma_f16(lo, a[0], a[1], a[2], a[3], b[0], b[1]);
	mma_f16(hi, a[0], a[1], a[2], a[3], b[2], b[3]);
}

template <int RATE2, int CB, bool BF16>
__global__ void __launch_bounds__(UNPACK_THREADS, 2)
	unpack_dense(const uint32_t *trellis, const __half *suh, const __half *svh, uint32_t k, uint32_t tiles_n,
		     uint16_t *w)
{
	__shared__ __align__(128) uint8_t buf[128 * 256];
	const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
	const uint32_t kb = blockIdx.x, nb = blockIdx.y;
	const uint32_t base = smem_addr(buf);
	float v[8][8];

#pragma unroll
	for (int t = 0; t < 8; t++)
#pragma unroll
		for (int i = 0; i < 8; i++)
			v[t][i] = 0.0f;
	{
		const uint32_t b[4] = { hadamard_pair(2 * q, g, 2 * q + 1, g),
					hadamard_pair(2 * q + 8, g, 2 * q + 9, g),
					hadamard_pair(2 * q, g + 8, 2 * q + 1, g + 8),
					hadamard_pair(2 * q + 8, g + 8, 2 * q + 9, g + 8) };
		const uint32_t *tile =
			trellis + ((size_t)kb * 8 * tiles_n + nb * 8 + warp) * run<RATE2>::WORDS;

#pragma unroll
		for (int t = 0; t < 8; t++) {
			uint32_t r[run<RATE2>::NV], a[4];

			load_run<RATE2>(tile + (size_t)t * tiles_n * run<RATE2>::WORDS, lane, r);
			decode_packed<RATE2, CB, 1>(r, a);
			mma8(v[t], a, b);
		}
	}
	hadamard8(v);
	/* [n][k]: rows 16 warp + g (+ 8), columns 16 t + 2q (+ 8). */
#pragma unroll
	for (int t = 0; t < 8; t++)
#pragma unroll
		for (int i = 0; i < 8; i += 2) {
			const uint32_t n = 16 * warp + g + (i & 2 ? 8 : 0), c = 2 * t + (i >> 2);
			const float f = (float)EXL3_INV_SQRT128;

			*(__half2 *)(buf + chunk_at(n, c) + 4 * q) = __floats2half2_rn(v[t][i] * f, v[t][i + 1] * f);
		}
	__syncthreads();

	{
		const uint32_t a[4] = { hadamard_pair(g, 2 * q, g, 2 * q + 1),
					hadamard_pair(g + 8, 2 * q, g + 8, 2 * q + 1),
					hadamard_pair(g, 2 * q + 8, g, 2 * q + 9),
					hadamard_pair(g + 8, 2 * q + 8, g + 8, 2 * q + 9) };

#pragma unroll
		for (int t = 0; t < 8; t++) {
			const uint32_t n = 16 * t + (lane & 7) + 8 * (lane >> 3 & 1);
			uint32_t b[4];

			asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
				     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
				     : "r"(base + chunk_at(n, 2 * warp + (lane >> 4))));
#pragma unroll
			for (int i = 0; i < 8; i++)
				v[t][i] = 0.0f;
			mma8(v[t], a, b);
		}
	}
	hadamard8(v);
	__syncthreads();
	/* Rows 16 t + g (+ 8), columns 16 warp + 2q (+ 8). */
	float su[4];

#pragma unroll
	for (int i = 0; i < 4; i++)
		su[i] = __half2float(suh[kb * 128 + 16 * warp + 2 * q + (i & 1) + 8 * (i >> 1)]) *
			(float)EXL3_INV_SQRT128;
#pragma unroll
	for (int t = 0; t < 8; t++)
#pragma unroll
		for (int h = 0; h < 2; h++) {
			const uint32_t n = 16 * t + g + 8 * h;
			const float sv = __half2float(svh[nb * 128 + n]);

#pragma unroll
			for (int j = 0; j < 2; j++) {
				const float x = v[t][4 * j + 2 * h] * sv * su[2 * j];
				const float y = v[t][4 * j + 2 * h + 1] * sv * su[2 * j + 1];
				uint8_t *to = buf + chunk_at(n, 2 * warp + j) + 4 * q;

				if (BF16)
					*(__nv_bfloat162 *)to = __floats2bfloat162_rn(x, y);
				else
					*(__half2 *)to = __floats2half2_rn(x, y);
			}
		}
	__syncthreads();
#pragma unroll
	for (int i = 0; i < 8; i++) {
		const uint32_t at = i * UNPACK_THREADS + threadIdx.x, n = at >> 4, c = at & 15;

		*(uint4 *)(w + ((size_t)nb * 128 + n) * k + kb * 128 + c * 8) = *(uint4 *)(buf + chunk_at(n, c));
	}
}

static int unpack(const struct exl3_matrix &m, bool bf16, uint16_t *w, cudaStream_t stream)
{
	const dim3 grid(m.k / 128, m.n / 128);
	const uint32_t *t = (const uint32_t *)m.trellis;
	const __half *su = (const __half *)m.suh, *sv = (const __half *)m.svh;

#define RATE(r, cb)                                                                                     \
	if (m.rate2 == r && m.codebook == cb) {                                                         \
		if (bf16)                                                                               \
			unpack_dense<r, cb, true><<<grid, UNPACK_THREADS, 0, stream>>>(t, su, sv, m.k,  \
										       m.n / 16, w);    \
		else                                                                                    \
			unpack_dense<r, cb, false><<<grid, UNPACK_THREADS, 0, stream>>>(t, su, sv, m.k, \
											m.n / 16, w);   \
		return cudaPeekAtLastError() == cudaSuccess ? 0 : -EIO;                                 \
	}
	EXL3_GEMM_RATES(RATE)
#undef RATE
	return -EOPNOTSUPP;
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
	int (*gemm)(void *handle, int opa, int opb, int m, int n, int k, const void *alpha, const void *a, int ta,
		    int lda, const void *b, int tb, int ldb, const void *beta, void *c, int tc, int ldc,
		    int compute, int algo);
};

constexpr int DEVICES_MAX = 64;
static pthread_mutex_t blas_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below; handles are not thread-safe */
static struct blas lib;
static bool lib_tried, lib_found;
static void *handles[DEVICES_MAX]; /* one per device, made when first asked for, kept */

/* The current device's handle, or NULL: no library. Called with the lock held. */
static void *blas_handle()
{
	static const char *const names[] = { "libcublas.so.13", "libcublas.so.12", "libcublas.so.11" };
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
			lib.set_workspace = (decltype(lib.set_workspace))dlsym(so, "cublasSetWorkspace_v2");
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

int exl3_gemm_library(uint32_t m, uint32_t n, uint32_t k, const void *x, uint32_t x_stride, const void *w,
		      uint32_t w_stride, void *y, uint32_t y_stride, int dtype, int y_dtype, void *ws,
		      cudaStream_t stream)
{
	const float one = 1.0f, zero = 0.0f;
	int status = -1;
	void *h;

	pthread_mutex_lock(&exl3::blas_lock);
	h = exl3::blas_handle();
	/* Column-major view: y^T [n x m] = w [n x k] x^T [k x m]. Setting the stream drops the workspace. */
	if (h && exl3::lib.set_stream(h, stream) == 0 &&
	    exl3::lib.set_workspace(h, ws, EXL3_GEMM_LIBRARY_WS) == 0)
		status = exl3::lib.gemm(h, exl3::BLAS_OP_T, exl3::BLAS_OP_N, (int)n, (int)m, (int)k, &one, w,
					exl3::blas_type(dtype), (int)w_stride, x, exl3::blas_type(dtype),
					(int)x_stride, &zero, y, exl3::blas_type(y_dtype), (int)y_stride,
					exl3::BLAS_COMPUTE_32F, exl3::BLAS_GEMM_DEFAULT);
	pthread_mutex_unlock(&exl3::blas_lock);
	return !h ? -EOPNOTSUPP : status == 0 ? 0 : -EIO;
}

bool exl3_gemm_f16_supports(const struct exl3_cuda_linear *a)
{
	const uint32_t es = a->y_dtype == EXL3_F32 ? 4 : 2;
	bool found;

	if (a->device_cc < 80 || a->m < exl3::M_MIN || (a->table && !(a->x_private && a->y_private)) || a->x_dtype == EXL3_F32 ||
	    (a->y_dtype != EXL3_F32 && a->y_dtype != a->x_dtype))
		return false;
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

int exl3_gemm_f16_launch(const struct exl3_cuda_linear *a, cudaStream_t stream)
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
		int r = exl3::unpack(m, a->x_dtype == EXL3_BF16, w, stream);

		if (r < 0)
			return r;
		r = exl3_gemm_library(a->m, n, k, a->x, a->x_stride / 2, w, m.k, (char *)a->y + (size_t)col * es,
				      a->y_stride / es, a->x_dtype, a->y_dtype, lib_ws, stream);
		if (r < 0)
			return r;
		col += n;
	}
	return 0;
}
