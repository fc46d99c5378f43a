/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm_input.cu - the input transform: X = H(x * suh) / sqrt(128), as the f16 image that gemm.cuh describes.
 *
 * One block per row and image (an image per distinct suh). Eight lanes share a Hadamard block of 128:
 * lane c has elements 8c..8c+7 and 64+8c..64+8c+7, so index bits 0, 1, 2, 6 are registers, 3..5 lanes.
 *
 * f16 has five exponent bits, bf16 and f32 eight: a row whose largest transformed value would overflow,
 * or is so small that its values would be subnormal, is divided by a power of two that the epilogue
 * multiplies back. The choice looks at its own row only, so a row's result never depends on others.
 */
#include "kernels/cuda/gemm.cuh"

namespace exl3
{

constexpr float INPUT_MAX = 60000.0f, INPUT_MIN = 0.0625f;

/* Eight consecutive elements of a row, as f32; beyond @limit they are zero and not read. */
static __device__ __forceinline__ void load8(const void *row, uint8_t dtype, uint32_t i,
					     uint32_t limit, float (&v)[8])
{
	if (dtype == EXL3_F32) {
		const float *p = (const float *)row + i;

		if (i + 8 <= limit && !((uintptr_t)p & 15)) {
			float4 a = *(const float4 *)p, b = *((const float4 *)p + 1);

			v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
			v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
			return;
		}
#pragma unroll
		for (int j = 0; j < 8; j++)
			v[j] = i + j < limit ? p[j] : 0.0f;
		return;
	}
	const uint16_t *p = (const uint16_t *)row + i;
	uint32_t w[4];

	if (i + 8 <= limit && !((uintptr_t)p & 15)) {
		uint4 a = *(const uint4 *)p;

		w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
	} else {
#pragma unroll
		for (int j = 0; j < 4; j++)
			w[j] = (i + 2 * j < limit ? p[2 * j] : 0u) |
			       (i + 2 * j + 1 < limit ? (uint32_t)p[2 * j + 1] << 16 : 0u);
	}
#pragma unroll
	for (int j = 0; j < 4; j++) {
		if (dtype == EXL3_BF16) {
			v[2 * j] = __uint_as_float(w[j] << 16);
			v[2 * j + 1] = __uint_as_float(w[j] & 0xffff0000u);
		} else {
			float2 f = __half22float2(*(__half2 *)&w[j]);

			v[2 * j] = f.x;
			v[2 * j + 1] = f.y;
		}
	}
}

/* Transforms this lane's 16 elements of a block. All 32 lanes of the warp take part. */
static __device__ __forceinline__ void transform16(const void *row, uint8_t dtype, uint32_t limit,
						   const __half *suh, uint32_t block, int c,
						   float (&v)[16])
{
#pragma unroll
	for (int h = 0; h < 2; h++) {
		const uint32_t i = block * 128 + 64 * h + 8 * c;
		const uint4 s = __ldg((const uint4 *)(suh + i));
		const uint32_t sw[4] = {s.x, s.y, s.z, s.w};
		float x[8];

		load8(row, dtype, i, limit, x);
#pragma unroll
		for (int j = 0; j < 4; j++) {
			float2 f = __half22float2(*(const __half2 *)&sw[j]);

			v[8 * h + 2 * j] = x[2 * j] * f.x;
			v[8 * h + 2 * j + 1] = x[2 * j + 1] * f.y;
		}
	}
#pragma unroll
	for (int s = 1; s < 16; s <<= 1)
#pragma unroll
		for (int i = 0; i < 16; i++)
			if (!(i & s)) {
				float x = v[i], z = v[i + s];

				v[i] = x + z;
				v[i + s] = x - z;
			}
#pragma unroll
	for (int s = 1; s < 8; s <<= 1) {
		const float sign = c & s ? -1.0f : 1.0f;

#pragma unroll
		for (int i = 0; i < 16; i++)
			v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], s));
	}
#pragma unroll
	for (int i = 0; i < 16; i++)
		v[i] *= (float)EXL3_INV_SQRT128;
}

/* The largest magnitude of the block's threads, in all of them. */
static __device__ __forceinline__ float block_max(float v, float *warp_max)
{
	const int lane = threadIdx.x & 31;

#pragma unroll
	for (int s = 16; s; s >>= 1)
		v = fmaxf(v, __shfl_xor_sync(~0u, v, s));
	if (lane == 0)
		warp_max[threadIdx.x >> 5] = v;
	__syncthreads();
	v = warp_max[lane < blockDim.x / 32 ? lane : 0];
#pragma unroll
	for (int s = 16; s; s >>= 1)
		v = fmaxf(v, __shfl_xor_sync(~0u, v, s));
	return v;
}

/* ITER: Hadamard blocks per eight lanes, kept in registers between the row's maximum and the store. */
template <int ITER>
__global__ void __launch_bounds__(1024) gemm_input_kernel(const __grid_constant__ gemm_input in)
{
	__shared__ float warp_max[32];
	const uint32_t row = blockIdx.x, image = blockIdx.y;
	const uint32_t tile = row / in.tn, r = row % in.tn;
	const uint32_t blocks = in.k / 128, groups = blockDim.x / 8;
	const uint32_t group = threadIdx.x / 8;
	const int c = threadIdx.x & 7;
	float v[ITER][16] = {};
	float largest = 0.0f;

	grid_wait();
	grid_launch_dependents();
	if (row < in.m) {
		const void *x;
		uint8_t dtype = in.x_dtype;
		bool stored = in.stored;

		if (in.table) {
			x = in.table[row].x;
			dtype = in.table[row].x_dtype;
			stored = in.table[row].stored;
		} else {
			x = (const char *)in.x + (size_t)row * in.x_stride;
		}
#pragma unroll
		for (int it = 0; it < ITER; it++) {
			const uint32_t block = it * groups + group;
			const uint32_t safe = block < blocks ? block : blocks - 1;

			transform16(x, dtype, stored ? in.k : in.k_log, in.suh[image], safe, c,
				    v[it]);
#pragma unroll
			for (int i = 0; i < 16; i++)
				largest = fmaxf(largest, fabsf(v[it][i]));
		}
	}
	largest = block_max(largest, warp_max);

	/* Powers of two only: both factors are exact. Infinite rows stay infinite. */
	float down = 1.0f, up = 1.0f;

	if ((largest > INPUT_MAX || largest < INPUT_MIN) && largest > 1e-30f && largest < 1e37f) {
		const int e = ilogbf(largest) - 10;

		down = ldexpf(1.0f, -e);
		up = ldexpf(1.0f, e);
	}
	if (threadIdx.x == 0)
		in.row_scale[(size_t)image * in.m_pad + row] = up;

	uint8_t *to = in.image + image * in.image_bytes + (size_t)tile * (in.k / 64) * in.tn * 128 +
		      r * 128;
#pragma unroll
	for (int it = 0; it < ITER; it++) {
		const uint32_t block = it * groups + group;

		if (block >= blocks)
			break;
#pragma unroll
		for (int h = 0; h < 2; h++) {
			uint32_t w[4];

#pragma unroll
			for (int j = 0; j < 4; j++) {
				__half2 f = __floats2half2_rn(v[it][8 * h + 2 * j] * down,
							      v[it][8 * h + 2 * j + 1] * down);

				w[j] = *(uint32_t *)&f;
			}
			*(uint4 *)(to + (size_t)(2 * block + h) * in.tn * 128 +
				   ((c ^ (r & 7)) << 4)) = make_uint4(w[0], w[1], w[2], w[3]);
		}
	}
}

int gemm_input_launch(const gemm_input &in, cudaStream_t stream)
{
	const uint32_t lanes = in.k / 16; /* 8 per block of 128 */
	const uint32_t iter = lanes <= 1024 ? 1 : lanes <= 2048 ? 2 : 4;
	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};
	cudaError_t err;

	if (in.k > GEMM_K_MAX)
		return -EOPNOTSUPP;
	attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr.val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(in.m_pad, in.nr_images);
	cfg.blockDim = dim3((lanes / iter + 31) / 32 * 32);
	cfg.stream = stream;
	cfg.attrs = &attr;
	cfg.numAttrs = in.programmatic ? 1 : 0;
	if (iter == 1)
		err = cudaLaunchKernelEx(&cfg, gemm_input_kernel<1>, in);
	else if (iter == 2)
		err = cudaLaunchKernelEx(&cfg, gemm_input_kernel<2>, in);
	else
		err = cudaLaunchKernelEx(&cfg, gemm_input_kernel<4>, in);
	return err == cudaSuccess ? 0 : -EIO;
}

} // namespace exl3
