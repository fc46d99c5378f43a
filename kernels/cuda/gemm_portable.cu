/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_portable.cu - the mma.sync kernel for many rows: sm_80 and everything after it.
 *
 *       Y^T [128 x 64] += W^T [128 x k] X^T [k x 64]        (formula, tiles, schedule: gemm.cuh)
 *
 *   block   8 warps; warp v has columns 16v..16v+15 and all 64 tokens: eight m16n8k16 per k16 step
 *   stage   64 of k: X [64 rows x 128 bytes] swizzled, trellis [4 k-tiles][8 n-tiles]; cp.async, 3 stages
 *   warp    lane L decodes weights 8L..8L+7 of its tile: the A fragment; B by ldmatrix
 *
 *   time    | copy s+2 | wait s | 4 x (decode, 8 mma) | copy s+3 | wait s+1 | ...
 */
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemm_portable.h"
#include "kernels/cuda/gemm_variants.h"
#include "kernels/cuda/trellis.cuh"

namespace exl3
{

constexpr int PORTABLE_TN = 64;
constexpr int PORTABLE_WARPS = 8;
constexpr int PORTABLE_THREADS = 32 * PORTABLE_WARPS;
constexpr int PORTABLE_STAGES = 3;
constexpr int PORTABLE_STEP = 64;

template <int RATE2> struct portable_smem {
	static constexpr int X_BYTES = PORTABLE_TN * 128;
	static constexpr int ROW_BYTES = 8 * 16 * RATE2;
	uint8_t x[PORTABLE_STAGES][X_BYTES];
	uint8_t w[PORTABLE_STAGES][4 * ROW_BYTES];
	gemm_epilogue<PORTABLE_TN> e;
};

static_assert(sizeof(portable_smem<16>) <= 99 * 1024, "sm_86, 89 and 120 have 99 KB per block");
static_assert(PORTABLE_STEP * 2 == 128, "one row of a stage is one swizzled line");

static __device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t addr)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		     : "r"(addr));
}

/* Begins the copies of k step @step into stage @s; always commits, so that groups count steps. */
template <int RATE2>
static __device__ __forceinline__ void portable_copy(portable_smem<RATE2> &sm, int s,
						     const uint8_t *x, const char *w,
						     size_t row_bytes, uint32_t step, bool live)
{
	using S = portable_smem<RATE2>;

	if (live) {
		x += (size_t)step * S::X_BYTES;
		w += (size_t)step * 4 * row_bytes;
		for (int i = threadIdx.x; i < S::X_BYTES / 16; i += PORTABLE_THREADS)
			cp_async16(smem_addr(&sm.x[s][i * 16]), x + i * 16);
		for (int i = threadIdx.x; i < 4 * S::ROW_BYTES / 16; i += PORTABLE_THREADS) {
			const int row = i / (S::ROW_BYTES / 16), at = i % (S::ROW_BYTES / 16) * 16;

			cp_async16(smem_addr(&sm.w[s][row * S::ROW_BYTES + at]),
				   w + row * row_bytes + at);
		}
	}
	cp_async_commit();
}

template <int RATE2, int CB>
__global__ void __launch_bounds__(PORTABLE_THREADS)
	gemm_portable(const __grid_constant__ gemm_args a)
{
	extern __shared__ __align__(128) uint8_t raw[];
	portable_smem<RATE2> &sm = *(portable_smem<RATE2> *)raw;
	using S = portable_smem<RATE2>;
	const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	/* ldmatrix: this lane's row and the k half of its 8x8 matrix. */
	const int token = (lane & 7) + 8 * (lane >> 4), half = lane >> 3 & 1;
	gemm_walk walk = walk_begin(a, blockIdx.x);
	gemm_segment seg;
	float d[PORTABLE_TN / 2];

	while (walk_next(a, walk, seg)) {
		uint32_t strip, mt;

		const gemm_ahead ahead = gemm_look_ahead<PORTABLE_TN>(a, seg.tile, threadIdx.x);

		tile_place(a, seg.tile, strip, mt);
		const gemm_shard &sh = a.shard[shard_of(a, strip)];
		const size_t row_bytes = (size_t)sh.tiles_n * (S::ROW_BYTES / 8);
		const char *w =
			(const char *)sh.trellis + (size_t)(strip - sh.strip0) * S::ROW_BYTES;
		const uint8_t *x = a.image + sh.image * a.image_bytes +
				   (size_t)mt * (a.k / PORTABLE_STEP) * S::X_BYTES;

#pragma unroll
		for (int i = 0; i < PORTABLE_TN / 2; i++)
			d[i] = 0.0f;
		for (int i = 0; i < PORTABLE_STAGES - 1; i++)
			portable_copy(sm, i, x, w, row_bytes, seg.begin + i,
				      seg.begin + i < seg.end);
		int s = 0;

#pragma unroll 1
		for (uint32_t step = seg.begin; step < seg.end; step++) {
			cp_async_wait<PORTABLE_STAGES - 2>();
			__syncthreads(); /* stage s is there; the stage before it is free */
			const uint32_t ahead = step + PORTABLE_STAGES - 1;

			portable_copy(sm, (s + PORTABLE_STAGES - 1) % PORTABLE_STAGES, x, w,
				      row_bytes, ahead, ahead < seg.end);
			const uint32_t *tile = (const uint32_t *)sm.w[s] + warp * run<RATE2>::WORDS;
			const uint32_t xs = smem_addr(sm.x[s]);

#pragma unroll
			for (int ks = 0; ks < 4; ks++) {
				uint32_t v[run<RATE2>::NV], f[4];

				load_run<RATE2>(tile + ks * 8 * run<RATE2>::WORDS, lane, v);
				decode_packed<RATE2, CB, 1>(v, f);
#pragma unroll
				for (int t = 0; t < PORTABLE_TN / 16; t++) {
					const int row = 16 * t + token, chunk = 2 * ks + half;
					uint32_t b[4];

					ldmatrix4(b, xs + row * 128 + ((chunk ^ (row & 7)) << 4));
					float(&lo)[4] = *(float(*)[4]) & d[8 * t];
					float(&hi)[4] = *(float(*)[4]) & d[8 * t + 4];

					mma_f16(lo, f[0], f[1], f[2], f[3], b[0], b[1]);
					mma_f16(hi, f[0], f[1], f[2], f[3], b[2], b[3]);
				}
			}
			s = s + 1 == PORTABLE_STAGES ? 0 : s + 1;
		}
		__syncthreads(); /* the next segment's copies overwrite stages that others still read */
		gemm_finish<PORTABLE_TN, PORTABLE_WARPS>(a, sm.e, seg, ahead, d, warp, lane);
	}
	gemm_collect<PORTABLE_TN, PORTABLE_WARPS>(a, sm.e, warp, lane);
}

static const void *kernel_of(uint32_t rate2, uint32_t codebook, int &smem_bytes)
{
#define RATE(r, cb)                                         \
	if (rate2 == r && codebook == cb) {                 \
		smem_bytes = (int)sizeof(portable_smem<r>); \
		return (const void *)gemm_portable<r, cb>;  \
	}
	EXL3_GEMM_RATES(RATE)
#undef RATE
	return nullptr;
}

} // namespace exl3

bool exl3_gemm_portable_supports(const struct exl3_cuda_linear *a)
{
	if (a->device_cc < 80 || a->shard[0].k > exl3::GEMM_K_MAX)
		return false;
	for (uint32_t i = 0; i < a->nr_shards; i++)
		if (!exl3_rate_valid(a->shard[i].rate2, a->shard[i].codebook))
			return false;
	return true;
}

size_t exl3_gemm_portable_ws_bytes(const struct exl3_cuda_linear *a)
{
	exl3::gemm_plan p;

	exl3::gemm_make_plan(a, exl3::PORTABLE_TN, a->device_sms, p);
	return p.bytes;
}

int exl3_gemm_portable_launch(const struct exl3_cuda_linear *a, cudaStream_t stream)
{
	uint32_t done = 0, rate2 = 0, codebook = 0;
	exl3::gemm_plan p;
	exl3::gemm_args g;
	int r;

	exl3::gemm_make_plan(a, exl3::PORTABLE_TN, a->device_sms, p);
	r = exl3::gemm_start(a, p, stream);
	if (r < 0)
		return r;
	while (exl3::gemm_next_group(a, p, exl3::PORTABLE_STEP, done, g, rate2, codebook)) {
		int smem = 0;
		const void *kernel = exl3::kernel_of(rate2, codebook, smem);
		void *params[] = {&g};

		if (!kernel)
			return -EOPNOTSUPP;
		if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
					 smem) != cudaSuccess)
			return -EIO;
		if (cudaLaunchKernel(kernel, dim3(g.blocks), dim3(exl3::PORTABLE_THREADS), params,
				     smem, stream) != cudaSuccess)
			return -EIO;
	}
	return 0;
}
