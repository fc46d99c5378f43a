/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_gemm.cuh - grouped product: rows sorted by expert times that expert's matrix.
 *
 *   out[proj][s, n] = Hn( image[proj][s, :] What_e ) * svh + bias        (s: sorted row, e: its expert)
 *
 * image f16 [rows, k] (already scaled, transformed), out f32 [rows, n_stored].
 *
 * A task is (unit, proj, strip): a unit is up to TN rows of one expert, a strip 128 columns, so that the
 * output Hadamard stays inside the block. Blocks walk the task list with a stride; units stand in expert
 * order, so blocks that read the same weights run together and meet in the L2.
 *
 *   strip 128 columns          k 64 per stage and k group        warps
 *   [w0|w1|..|w7] 16 each  x   KS groups of 4 tiles              8 * KS: warp = 8 * k group + column tile
 *
 * Product transposed, weights as the A operand (trellis.cuh), rows as the N dimension in groups of 8.
 *
 *   stage     t        t+1      ...
 *   copy      s+ST-1   s+ST          cp.async: trellis pieces and image rows, one group per stage
 *   compute   s        s+1           decode 4 tiles, TN/8 MMAs each
 */
#ifndef EXL3_CUDA_MOE_GEMM_CUH
#define EXL3_CUDA_MOE_GEMM_CUH

#include "kernels/cuda/hadamard.cuh"
#include "kernels/cuda/moe_int.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/trellis.cuh"

namespace exl3
{

template <int RATE2, int TN, int KS>
struct moe_shape {
	static constexpr int STAGES  = TN >= 64 ? 4 : 5;
	static constexpr int THREADS = 256 * KS;
	static constexpr int ROW     = 144;                 /* bytes of an image row in shared memory: 64 f16
	                                                     * and padding, conflict-free for ldmatrix */
	static constexpr int TILE    = 16 * RATE2;          /* bytes of a tile */
	static constexpr int WBYTES  = KS * 4 * 8 * TILE;   /* trellis of a stage */
	static constexpr int XBYTES  = KS * TN * ROW;
	static constexpr int STAGE   = WBYTES + XBYTES;
	static constexpr int OUT_ROW = 132;                 /* floats of a row in the epilogue's buffer */
	static constexpr int OUT     = KS * TN * OUT_ROW * 4;
	static constexpr int SMEM    = STAGES * STAGE > OUT ? STAGES * STAGE : OUT;
	static_assert(WBYTES % 16 == 0 && ROW % 16 == 0, "cp.async copies 16 bytes");
	static_assert(SMEM <= 227 * 1024, "a block's shared memory on sm_90");
};

/* Four 8x8 f16 matrices; lane l's row address belongs to matrix l / 8. */
EXL3_DEV void ldmatrix4(uint32_t (&r)[4], uint32_t addr)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		     : "r"(addr)
		     : "memory");
}

/* Enqueues the copies of stage @s: every k group its own 64 values of k. */
template <int RATE2, int TN, int KS>
EXL3_DEV void moe_copy(char *smem, const exl3_matrix &mat, const __half *image, uint32_t rows,
		       uint32_t strip, uint32_t s, uint32_t chunks)
{
	using S = moe_shape<RATE2, TN, KS>;
	const uint32_t dst = smem_addr(smem + (s % S::STAGES) * S::STAGE);
	const size_t tiles_n = mat.n / 16;

	/* KS * 4 runs of 8 neighbouring tiles. */
	constexpr int RUN = 8 * S::TILE / 16; /* 16-byte pieces of one */
	for (int i = threadIdx.x; i < KS * 4 * RUN; i += S::THREADS) {
		const uint32_t kt = (s * KS + i / (4 * RUN)) * 4 + i / RUN % 4;

		if (kt < chunks * 4)
			cp_async16(dst + i * 16, (const char *)mat.trellis +
							 (kt * tiles_n + strip * 8) * S::TILE +
							 i % RUN * 16);
	}
	for (int i = threadIdx.x; i < KS * TN * 8; i += S::THREADS) {
		const uint32_t kg = i / (TN * 8), row = i / 8 % TN, piece = i % 8;
		const uint32_t chunk = s * KS + kg;

		/* Rows past the unit's are not read by anybody who keeps the result. */
		if (chunk < chunks && row < rows)
			cp_async16(dst + S::WBYTES + (kg * TN + row) * S::ROW + piece * 16,
				   (const char *)(image + (size_t)row * mat.k + chunk * 64) + piece * 16);
	}
}

template <int RATE2, int CB, int TN, int KS>
__global__ void __launch_bounds__(moe_shape<RATE2, TN, KS>::THREADS)
	moe_gemm_kernel(const moe_gemm_args a)
{
	using S = moe_shape<RATE2, TN, KS>;
	extern __shared__ __align__(128) char smem[];
	const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
	const int kg = warp / 8, nt = warp % 8;
	grid_wait();
	const uint32_t strips = a.n / 128, unit0 = a.class_units[0], nr_units = a.class_units[a.cls] - unit0;
	const uint32_t tasks = nr_units * a.nr_proj * strips;

	for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
		const uint32_t strip = task % strips, proj = task / strips % a.nr_proj;
		const moe_unit u = a.units[task / strips / a.nr_proj];
		const exl3_matrix mat = a.mats[u.expert * 3 + a.first_proj + proj];

		/* Another launch of the same task list does experts of another bitrate or codebook. */
		if (mat.rate2 != RATE2 || mat.codebook != CB)
			continue;
		const uint32_t chunks = mat.k / 64, steps = (chunks + KS - 1) / KS;
		const __half *image = (const __half *)a.image + (size_t)proj * a.image_rows * mat.k + (size_t)u.first * mat.k;
		float acc[TN / 8][4] = {};

		for (int s = 0; s < S::STAGES - 1; s++) {
			if (s < (int)steps)
				moe_copy<RATE2, TN, KS>(smem, mat, image, u.rows, strip, s, chunks);
			cp_async_commit();
		}
		for (uint32_t s = 0; s < steps; s++) {
			cp_async_wait<S::STAGES - 2>();
			__syncthreads();
			if (s + S::STAGES - 1 < steps)
				moe_copy<RATE2, TN, KS>(smem, mat, image, u.rows, strip, s + S::STAGES - 1,
							chunks);
			cp_async_commit();
			if (s * KS + kg >= chunks)
				continue;
			const char *stage = smem + s % S::STAGES * S::STAGE;
			const uint32_t x = smem_addr(stage + S::WBYTES + kg * TN * S::ROW);
#pragma unroll
			for (int t = 0; t < 4; t++) {
				const uint32_t *tile = (const uint32_t *)(stage + ((kg * 4 + t) * 8 + nt) * S::TILE);
				uint32_t v[run<RATE2>::NV], w[4];

				load_run<RATE2>(tile, lane, v);
				decode_packed<RATE2, CB, 1>(v, w);
				if (TN == 8) {
					uint32_t b[4];

					/* Matrices: k 0-7, k 8-15; the other two lanes' rows repeat them. */
					ldmatrix4(b, x + (lane & 7) * S::ROW + t * 32 + (lane >> 3 & 1) * 16);
					mma_f16(acc[0], w[0], w[1], w[2], w[3], b[0], b[1]);
				} else {
#pragma unroll
					for (int g = 0; g < TN / 16; g++) {
						uint32_t b[4];

						ldmatrix4(b, x + (g * 16 + (lane >> 4) * 8 + (lane & 7)) * S::ROW +
								     t * 32 + (lane >> 3 & 1) * 16);
						mma_f16(acc[2 * g], w[0], w[1], w[2], w[3], b[0], b[1]);
						mma_f16(acc[2 * g + 1], w[0], w[1], w[2], w[3], b[2], b[3]);
					}
				}
			}
		}

		/* Epilogue: columns of a row come together in shared memory, k groups are added in order. */
		cp_async_wait<0>();
		__syncthreads();
		float *out = (float *)smem;
		const int gr = lane >> 2, q = lane & 3;
#pragma unroll
		for (int g = 0; g < TN / 8; g++)
#pragma unroll
			for (int j = 0; j < 4; j++)
				out[(kg * TN + g * 8 + 2 * q + (j & 1)) * S::OUT_ROW + nt * 16 + gr + 8 * (j >> 1)] =
					acc[g][j];
		__syncthreads();
		for (uint32_t row = warp; row < u.rows; row += 8 * KS) {
			const uint32_t col = strip * 128 + lane * 4;
			float v[4] = {};

#pragma unroll
			for (int k = 0; k < KS; k++)
#pragma unroll
				for (int j = 0; j < 4; j++)
					v[j] += out[(k * TN + row) * S::OUT_ROW + lane * 4 + j];
			had_warp(v);
			const float scale =
				a.row_scale[(size_t)proj * a.image_rows + u.first + row] * (float)EXL3_INV_SQRT128;
			const uint2 sv = *(const uint2 *)((const __half *)mat.svh + col);
			const float2 s01 = __half22float2(*(const __half2 *)&sv.x);
			const float2 s23 = __half22float2(*(const __half2 *)&sv.y);
			float4 r = make_float4(v[0] * scale * s01.x, v[1] * scale * s01.y,
					       v[2] * scale * s23.x, v[3] * scale * s23.y);

			if (mat.bias) {
				const float4 b = *(const float4 *)((const float *)mat.bias + col);

				r.x += b.x;
				r.y += b.y;
				r.z += b.z;
				r.w += b.w;
			}
			*(float4 *)(a.out + ((size_t)proj * a.image_rows + u.first + row) * a.n + col) = r;
		}
		__syncthreads(); /* the next task's copies overwrite the buffer */
	}
}

/* Enqueues one launch for experts of this bitrate and codebook. */
template <int RATE2, int CB, int TN, int KS>
int moe_gemm_start(const moe_gemm_args &a, int sms, cudaStream_t stream)
{
	using S = moe_shape<RATE2, TN, KS>;
	static int per_sm; /* the same value from every thread */
	auto *kernel = moe_gemm_kernel<RATE2, CB, TN, KS>;

	if (!per_sm) {
		int n = 0;

		if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SMEM) ||
		    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, S::THREADS, S::SMEM) || !n)
			return -EIO;
		per_sm = n;
	}
	const uint32_t most = (uint32_t)(sms * per_sm), tasks = a.tasks_max * a.nr_proj;

	return moe_start(kernel, a.programmatic, dim3(tasks < most ? tasks : most), S::THREADS, S::SMEM, stream, a);
}

template <int RATE2, int CB>
int moe_gemm_start_any(const moe_gemm_args &a, int sms, cudaStream_t stream)
{
	switch (a.tile) {
	case 16:
		return moe_gemm_start<RATE2, CB, 16, 2>(a, sms, stream);
	default:
		return moe_gemm_start<RATE2, CB, 64, 1>(a, sms, stream);
	}
}

} /* namespace exl3 */
#endif
