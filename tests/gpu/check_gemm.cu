/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_gemm.cu - the kernels for many rows against the format's definition, computed in double on the GPU;
 * with "bench" as first argument, their times with cold weights.
 *
 *       check_gemm [check [NAME | candidates]] | bench [SUBSTRING [M ...]]
 */
#include "kernels/cuda/gemm_f16.h"
#include "kernels/cuda/launch.h"
#include "kernels/format.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUDA(call)                                                                           \
	do {                                                                                 \
		cudaError_t err_ = (call);                                                   \
		if (err_ != cudaSuccess) {                                                   \
			printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(err_)); \
			exit(1);                                                             \
		}                                                                            \
	} while (0)

static int sms, cc;

/* ---- reference ---- */

static __device__ uint32_t hash32(uint32_t x)
{
	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x *= 0x846ca68bu;
	return x ^ x >> 16;
}

/* -1..1, the sum of two uniform values. */
static __device__ float noise(uint32_t seed, uint32_t i)
{
	uint32_t h = hash32(seed * 0x9e3779b9u + i);

	return ((float)(h & 0xffff) + (float)(h >> 16)) / 65536.0f - 1.0f;
}

__global__ void fill_words(uint32_t *p, size_t n, uint32_t seed)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x)
		p[i] = hash32((uint32_t)i * 2654435761u + seed);
}

/* Scales as checkpoints have them: random signs, magnitudes around one. */
__global__ void fill_scale(__half *p, uint32_t n, uint32_t seed)
{
	for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n;
	     i += gridDim.x * blockDim.x) {
		float v = 1.0f + 0.5f * noise(seed, i);

		p[i] = __float2half(hash32(i ^ seed) & 1 ? v : -v);
	}
}

__global__ void fill_f32(float *p, uint32_t n, uint32_t seed)
{
	for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		p[i] = noise(seed, i);
}

static __device__ double load_any(const void *p, int dtype, size_t i)
{
	if (dtype == EXL3_F32)
		return ((const float *)p)[i];
	if (dtype == EXL3_BF16)
		return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
	return __half2float(((const __half *)p)[i]);
}

static __device__ void store_any(void *p, int dtype, size_t i, float v)
{
	if (dtype == EXL3_F32)
		((float *)p)[i] = v;
	else if (dtype == EXL3_BF16)
		((__nv_bfloat16 *)p)[i] = __float2bfloat16(v);
	else
		((__half *)p)[i] = __float2half(v);
}

__global__ void fill_x(void *p, int dtype, uint32_t m, uint32_t k, uint32_t pitch, float scale,
		       uint32_t seed)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)m * k;
	     i += (size_t)gridDim.x * blockDim.x) {
		uint32_t row = (uint32_t)(i / k), col = (uint32_t)(i % k);
		/* Rows of different size, so that a scale applied to the wrong row shows. */
		float s = scale * (1.0f + (row & 3));

		store_any((char *)p + (size_t)row * pitch, dtype, col,
			  s * noise(seed, (uint32_t)i));
	}
}

static __device__ double code_value(uint32_t window, int codebook)
{
	uint32_t x = exl3_code_product(window, codebook);

	if (codebook == 2)
		return __half2float(
			__double2half((1774.0 * exl3_code_bytesum(x) - 905216.0) / 262144.0));
	x = exl3_code_halves(x);
	return __half2float(__hadd(__ushort_as_half((unsigned short)x),
				   __ushort_as_half((unsigned short)(x >> 16))));
}

__global__ void ref_input(const void *x, int dtype, uint32_t pitch, uint32_t m, uint32_t k,
			  uint32_t k_log, const __half *suh, double *out)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)m * k;
	     i += (size_t)gridDim.x * blockDim.x) {
		uint32_t row = (uint32_t)(i / k), col = (uint32_t)(i % k), b = col & ~127u;
		double sum = 0;

		for (uint32_t j = 0; j < 128 && b + j < k_log; j++) {
			double v = load_any((const char *)x + (size_t)row * pitch, dtype, b + j) *
				   (double)__half2float(suh[b + j]);

			sum += __popc(j & (col & 127)) & 1 ? -v : v;
		}
		out[i] = sum * EXL3_INV_SQRT128;
	}
}

/* One block per 16 columns and 16 rows; a thread sums one output. */
__global__ void ref_product(const double *x, const uint32_t *trellis, int rate2, int codebook,
			    uint32_t m, uint32_t k, uint32_t n, double *out)
{
	__shared__ double w[16][16];
	const uint32_t col = threadIdx.x & 15, r = threadIdx.x >> 4, row = blockIdx.y * 16 + r;
	double sum = 0;

	for (uint32_t kt = 0; kt < k / 16; kt++) {
		const uint32_t *tile = trellis + ((size_t)kt * (n / 16) + blockIdx.x) * (4 * rate2);

		__syncthreads();
		w[exl3_tile_row(threadIdx.x)][exl3_tile_col(threadIdx.x)] =
			code_value(exl3_window(tile, rate2, threadIdx.x), codebook);
		__syncthreads();
		if (row < m)
			for (int i = 0; i < 16; i++)
				sum += x[(size_t)row * k + kt * 16 + i] * w[i][col];
	}
	if (row < m)
		out[(size_t)row * n + blockIdx.x * 16 + col] = sum;
}

__global__ void ref_output(const double *d, const __half *svh, const float *bias, uint32_t m,
			   uint32_t n, double *out)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)m * n;
	     i += (size_t)gridDim.x * blockDim.x) {
		uint32_t row = (uint32_t)(i / n), col = (uint32_t)(i % n), b = col & ~127u;
		double sum = 0;

		for (uint32_t j = 0; j < 128; j++) {
			double v = d[(size_t)row * n + b + j];

			sum += __popc(j & (col & 127)) & 1 ? -v : v;
		}
		out[i] = sum * EXL3_INV_SQRT128 * (double)__half2float(svh[col]) +
			 (bias ? bias[col] : 0.0);
	}
}

/* stat: sum of squared error, of squares, largest error beyond half an ulp of the output, wrong non-finite. */
__global__ void compare(const void *y, int dtype, uint32_t pitch, uint32_t col0, const double *ref,
			uint32_t m, uint32_t n_log, uint32_t n, double *stat)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)m * n_log;
	     i += (size_t)gridDim.x * blockDim.x) {
		uint32_t row = (uint32_t)(i / n_log), col = (uint32_t)(i % n_log);
		double got = load_any((const char *)y + (size_t)row * pitch, dtype, col0 + col);
		double want = ref[(size_t)row * n + col];
		double ulp = dtype == EXL3_F32 ? 0x1p-24 : dtype == EXL3_F16 ? 0x1p-11 : 0x1p-8;
		double err = fmax(fabs(got - want) - fabs(want) * ulp, 0.0);

		if (!isfinite(got))
			atomicAdd(&stat[3], 1.0);
		else {
			double s = row & 3; /* rows differ in size; judge each in its own */

			s = 1.0 / (1.0 + s);
			atomicAdd(&stat[0], err * err * s * s);
			atomicAdd(&stat[1], want * want * s * s);
			atomicMax((unsigned long long *)&stat[2],
				  (unsigned long long)__double_as_longlong(err * s));
		}
	}
}

/* ---- check ---- */

struct test_case {
	uint32_t m, k_log, n_log, shards;
	int rate2, codebook, rate2_b, codebook_b; /* of every second shard */
	int x_dtype, y_dtype;
	float scale;
	bool table, bias;
};

static const void *device_alloc(size_t bytes)
{
	void *p;

	CUDA(cudaMalloc(&p, bytes));
	return p;
}

static uint32_t elem(int dtype)
{
	return dtype == EXL3_F32 ? 4 : 2;
}

static struct exl3_matrix make_matrix(uint32_t k_log, uint32_t n_log, int rate2, int codebook,
				      bool bias, uint32_t seed)
{
	struct exl3_matrix w = {};

	w.k_log = k_log;
	w.n_log = n_log;
	w.k = (k_log + 127) / 128 * 128;
	w.n = (n_log + 127) / 128 * 128;
	w.rate2 = (uint8_t)rate2;
	w.codebook = (uint8_t)codebook;
	const size_t bytes = exl3_trellis_bytes(w.k, w.n, rate2);

	w.trellis = device_alloc(bytes);
	w.suh = device_alloc(w.k * 2);
	w.svh = device_alloc(w.n * 2);
	fill_words<<<sms * 4, 256>>>((uint32_t *)w.trellis, bytes / 4, seed);
	fill_scale<<<64, 256>>>((__half *)w.suh, w.k, seed + 1);
	fill_scale<<<64, 256>>>((__half *)w.svh, w.n, seed + 2);
	if (bias) {
		w.bias = device_alloc(w.n * 4);
		fill_f32<<<64, 256>>>((float *)w.bias, w.n, seed + 3);
	}
	return w;
}

static void free_matrix(struct exl3_matrix *w)
{
	cudaFree((void *)w->trellis);
	cudaFree((void *)w->suh);
	cudaFree((void *)w->svh);
	cudaFree((void *)w->bias);
}

static int run_case(const test_case &t, const char *only)
{
	struct exl3_cuda_linear a = {};
	const uint32_t x_pitch = (t.k_log * elem(t.x_dtype) + 15) / 16 * 16;
	uint32_t cols = 0;
	int failed = 0;

	for (uint32_t i = 0; i < t.shards; i++) {
		a.shard[i] = make_matrix(t.k_log, t.n_log, i & 1 ? t.rate2_b : t.rate2,
					 i & 1 ? t.codebook_b : t.codebook, t.bias, 100 * i + 7);
		cols += t.n_log;
	}
	const uint32_t k = a.shard[0].k, n = a.shard[0].n;
	const uint32_t y_pitch =
		(cols * elem(t.y_dtype) + 15) / 16 * 16 + 32; /* 32 bytes of canary */
	const size_t y_bytes = (size_t)t.m * y_pitch;
	void *x = (void *)device_alloc((size_t)t.m * x_pitch), *y = (void *)device_alloc(y_bytes);
	double *xr = (double *)device_alloc((size_t)t.m * k * 8),
	       *d = (double *)device_alloc((size_t)t.m * n * 8);
	double *ref[EXL3_CUDA_SHARDS_MAX] = {};
	double *stat = (double *)device_alloc(32);
	struct exl3_cuda_row *rows = NULL;
	uint8_t *host = (uint8_t *)malloc(y_bytes), *again = (uint8_t *)malloc(y_bytes);

	fill_x<<<sms * 4, 256>>>(x, t.x_dtype, t.m, t.k_log, x_pitch, t.scale, 5);
	for (uint32_t i = 0; i < t.shards; i++) {
		ref[i] = (double *)device_alloc((size_t)t.m * n * 8);
		ref_input<<<sms * 8, 256>>>(x, t.x_dtype, x_pitch, t.m, k, t.k_log,
					    (const __half *)a.shard[i].suh, xr);
		ref_product<<<dim3(n / 16, (t.m + 15) / 16), 256>>>(
			xr, (const uint32_t *)a.shard[i].trellis, a.shard[i].rate2,
			a.shard[i].codebook, t.m, k, n, d);
		ref_output<<<sms * 8, 256>>>(d, (const __half *)a.shard[i].svh,
					     (const float *)a.shard[i].bias, t.m, n, ref[i]);
	}
	CUDA(cudaDeviceSynchronize());

	a.nr_shards = t.shards;
	a.m = t.m;
	a.x = x;
	a.y = y;
	a.x_stride = x_pitch;
	a.y_stride = y_pitch;
	a.x_dtype = (uint8_t)t.x_dtype;
	a.y_dtype = (uint8_t)t.y_dtype;
	a.deterministic = true;
	a.device_sms = sms;
	a.device_cc = cc;
	if (t.table) {
		struct exl3_cuda_row *h = (struct exl3_cuda_row *)calloc(t.m, sizeof(*h));

		for (uint32_t i = 0; i < t.m; i++) {
			h[i].x = (char *)x + (size_t)i * x_pitch;
			h[i].y = (char *)y + (size_t)i * y_pitch;
			h[i].x_dtype = (uint8_t)t.x_dtype;
			h[i].y_dtype = (uint8_t)t.y_dtype;
		}
		rows = (struct exl3_cuda_row *)device_alloc(t.m * sizeof(*rows));
		CUDA(cudaMemcpy(rows, h, t.m * sizeof(*h), cudaMemcpyHostToDevice));
		free(h);
		a.table = rows;
		a.x = a.y = NULL;
	}
	for (const struct exl3_cuda_linear_kernel *kn = exl3_cuda_gemm_kernels; kn->name; kn++) {
		double s[4], worst = 0, rms = 0, bad = 0;
		const char *why = NULL;

		const bool wanted = !only                        ? !kn->candidate
				    : strcmp(only, "candidates") ? !strcmp(only, kn->name)
								 : kn->candidate;

		if (!wanted || !kn->supports(&a))
			continue;
		a.ws_bytes = kn->ws_bytes(&a);
		CUDA(cudaMalloc(&a.ws, a.ws_bytes));
		CUDA(cudaMemset(a.ws, 0xff,
				a.ws_bytes)); /* workspace needs zeros at its beginning only */
		CUDA(cudaMemset(a.ws, 0, EXL3_CUDA_WS_ZERO));
		for (int pass = 0; pass < 2; pass++) {
			CUDA(cudaMemset(y, 0x5a, y_bytes));
			int r = kn->launch(&a, 0);

			if (r)
				why = "launch failed";
			cudaError_t err = cudaDeviceSynchronize();

			if (err != cudaSuccess) {
				printf("FAIL %s m %u: %s\n", kn->name, t.m,
				       cudaGetErrorString(err));
				exit(1);
			}
			CUDA(cudaMemcpy(pass ? again : host, y, y_bytes, cudaMemcpyDeviceToHost));
		}
		if (memcmp(host, again, y_bytes))
			why = "two runs differ";
		for (uint32_t row = 0; row < t.m && !why; row++)
			for (uint32_t i = cols * elem(t.y_dtype); i < y_pitch; i++)
				if (host[(size_t)row * y_pitch + i] != 0x5a)
					why = "wrote beyond the row";
		for (uint32_t i = 0; i < t.shards; i++) {
			CUDA(cudaMemset(stat, 0, 32));
			compare<<<sms * 4, 256>>>(y, t.y_dtype, y_pitch, i * t.n_log, ref[i], t.m,
						  t.n_log, n, stat);
			CUDA(cudaMemcpy(s, stat, 32, cudaMemcpyDeviceToHost));
			const double scale = sqrt(s[1] / ((double)t.m * t.n_log));

			rms = fmax(rms, sqrt(s[0] / s[1]));
			worst = fmax(worst, s[2] / scale);
			bad += s[3];
		}
		uint8_t *zero = (uint8_t *)malloc(EXL3_CUDA_WS_ZERO);

		CUDA(cudaMemcpy(zero, a.ws, EXL3_CUDA_WS_ZERO, cudaMemcpyDeviceToHost));
		for (size_t i = 0; i < EXL3_CUDA_WS_ZERO; i++)
			if (zero[i])
				why = "counters left behind";
		free(zero);
		if (!why && (!(rms <= 1e-3) || !(worst <= 5e-3) || bad > 0))
			why = "inexact";
		if (why)
			failed++;
		printf("%s %-13s r2 %2d/%2d cb %d/%d m %4u k %5u n %5u x%u dtypes %d %d%s: max "
		       "%.1e rms %.1e%s%s\n",
		       why ? "FAIL" : "ok  ", kn->name, t.rate2, t.rate2_b, t.codebook,
		       t.codebook_b, t.m, t.k_log, t.n_log, t.shards, t.x_dtype, t.y_dtype,
		       t.table ? " table" : "", worst, rms, why ? "  " : "", why ? why : "");
		CUDA(cudaFree(a.ws));
	}
	for (uint32_t i = 0; i < t.shards; i++) {
		free_matrix(&a.shard[i]);
		cudaFree(ref[i]);
	}
	cudaFree(x);
	cudaFree(y);
	cudaFree(xr);
	cudaFree(d);
	cudaFree(stat);
	cudaFree(rows);
	free(host);
	free(again);
	return failed;
}

static int check(const char *only)
{
	static const uint32_t ms[] = {1, 7, 32, 33, 64, 100, 129, 257, 600};
	int failed = 0;

	/* Every bitrate and codebook. */
	for (int cb = 0; cb < 3; cb++)
		for (int r2 = EXL3_RATE2_MIN; r2 <= EXL3_RATE2_MAX; r2++)
			if (exl3_rate_valid(r2, cb)) {
				test_case t = {70, 512,      256,      1,    r2,    cb,   r2,
					       cb, EXL3_F16, EXL3_F32, 1.0f, false, false};

				failed += run_case(t, only);
			}
	/* Row counts around tile edges; ragged sizes, bias, all types. */
	for (size_t i = 0; i < sizeof(ms) / sizeof(ms[0]); i++) {
		test_case t = {ms[i], 1024,      640,       1,    8,     1,   8,
			       1,     EXL3_BF16, EXL3_BF16, 1.0f, false, true};

		failed += run_case(t, only);
		t.k_log = 1000;
		t.n_log = 333;
		t.x_dtype = EXL3_F32;
		t.y_dtype = EXL3_F16;
		failed += run_case(t, only);
	}
	/* Mixed shards, row table. */
	test_case mixed = {50, 384, 200, 3, 8, 1, 7, 2, EXL3_F16, EXL3_F32, 1.0f, true, true};

	failed += run_case(mixed, only);
	/* Many tiles per block; values beyond the range of f16 and far below it. */
	test_case large = {1500, 256, 6400, 1, 8, 1, 8, 1, EXL3_F16, EXL3_F16, 1.0f, false, false};

	failed += run_case(large, only);
	test_case huge = {40, 2048, 256, 1, 8, 2, 8, 2, EXL3_BF16, EXL3_F32, 1e6f, false, false};

	failed += run_case(huge, only);
	huge.scale = 1e-8f;
	failed += run_case(huge, only);
	/* A long k that many blocks share. */
	test_case deep = {130, 17408, 128, 1, 12, 1, 12, 1, EXL3_F16, EXL3_F32, 1.0f, false, false};

	failed += run_case(deep, only);
	printf("%d failed\n", failed);
	return failed != 0;
}

/* ---- bench ---- */

/* The time of an unquantized product in bf16, us; -1 without cuBLAS. */
static float library_time(uint32_t m, uint32_t n, uint32_t k, const void *x, void *y,
			  cudaStream_t stream)
{
	const size_t bytes = (size_t)n * k * 2;
	const int copies = (int)(200000000 / bytes + 2), launches = 2 * copies;
	uint16_t *w = (uint16_t *)device_alloc(bytes * copies);
	void *ws = (void *)device_alloc(EXL3_GEMM_LIBRARY_WS);
	cudaEvent_t from, to;
	float best = 1e30f, ms;
	int r = 0;

	fill_x<<<sms * 4, 256>>>(w, EXL3_BF16, n * copies, k, k * 2, 0.02f, 9);
	CUDA(cudaDeviceSynchronize());
	CUDA(cudaEventCreate(&from));
	CUDA(cudaEventCreate(&to));
	for (int rep = 0; rep < 4 && !r; rep++) {
		CUDA(cudaEventRecord(from, stream));
		for (int i = 0; i < launches && !r; i++)
			r = exl3_gemm_library(m, n, k, x, k, w + (size_t)(i % copies) * n * k, k, y,
					      n, EXL3_BF16, EXL3_BF16, ws, stream);
		CUDA(cudaEventRecord(to, stream));
		CUDA(cudaStreamSynchronize(stream));
		CUDA(cudaEventElapsedTime(&ms, from, to));
		if (rep && ms < best)
			best = ms;
	}
	CUDA(cudaEventDestroy(from));
	CUDA(cudaEventDestroy(to));
	CUDA(cudaFree(w));
	CUDA(cudaFree(ws));
	return r ? -1.0f : best * 1e3f / launches;
}

struct bench_shape {
	uint32_t k, n, shards;
	int rate2, codebook;
};

static int bench(const char *part, int nr_m, char **m_args)
{
	static const bench_shape shapes[] = {
		{4096, 4096, 1, 8, 1},  {5120, 5120, 1, 8, 1},  {5120, 17408, 1, 8, 1},
		{17408, 5120, 1, 8, 1}, {5120, 17408, 2, 8, 1}, {5120, 17408, 1, 12, 1},
		{5120, 17408, 1, 8, 2},
	};
	static const uint32_t default_m[] = {32, 64, 128, 256, 512, 1024, 2048, 8192};
	const uint32_t count = nr_m ? (uint32_t)nr_m : sizeof(default_m) / sizeof(default_m[0]);
	cudaStream_t stream;
	cudaEvent_t from, to;

	CUDA(cudaStreamCreate(&stream));
	CUDA(cudaEventCreate(&from));
	CUDA(cudaEventCreate(&to));
	for (const bench_shape &s : shapes) {
		/* Copies of the weights, so that no launch finds its own in the L2. */
		const size_t bytes = exl3_trellis_bytes(s.k, s.n, s.rate2) * s.shards;
		const uint32_t copies = (uint32_t)(200000000 / bytes + 2);
		struct exl3_cuda_linear *a = (struct exl3_cuda_linear *)calloc(copies, sizeof(*a));
		const uint32_t m_max = 8192;
		void *x = (void *)device_alloc((size_t)m_max * s.k * 2);
		void *y = (void *)device_alloc((size_t)m_max * s.n * s.shards * 2);

		fill_x<<<sms * 4, 256>>>(x, EXL3_BF16, m_max, s.k, s.k * 2, 1.0f, 5);
		for (uint32_t c = 0; c < copies; c++) {
			for (uint32_t i = 0; i < s.shards; i++)
				a[c].shard[i] = make_matrix(s.k, s.n, s.rate2, s.codebook, false,
							    31 * c + i);
			a[c].nr_shards = s.shards;
			a[c].x = x;
			a[c].y = y;
			a[c].x_stride = s.k * 2;
			a[c].y_stride = s.n * s.shards * 2;
			a[c].x_dtype = a[c].y_dtype = EXL3_BF16;
			a[c].device_sms = sms;
			a[c].device_cc = cc;
		}
		for (uint32_t mi = 0; mi < count; mi++) {
			const uint32_t m = nr_m ? (uint32_t)atoi(m_args[mi]) : default_m[mi];

			printf("%5ux%-5u x%u r2 %2d cb %d m %4u:", s.k, s.n, s.shards, s.rate2,
			       s.codebook, m);
			printf("  bf16 %.1f", library_time(m, s.n * s.shards, s.k, x, y, stream));
			for (const struct exl3_cuda_linear_kernel *kn = exl3_cuda_gemm_kernels;
			     kn->name; kn++) {
				const uint32_t launches = m <= 512 ? 4 * copies : copies;
				cudaGraph_t graph;
				cudaGraphExec_t exec;
				float best = 1e30f, ms;
				void *ws;
				int r = 0;

				for (uint32_t c = 0; c < copies; c++)
					a[c].m = m;
				/* Tiles far smaller than m: slow and of no interest. */
				const char *tokens = strstr(kn->name, "_n");

				if ((part && !strstr(kn->name, part)) || (!part && kn->candidate) ||
				    !kn->supports(&a[0]) ||
				    (tokens && (uint32_t)atoi(tokens + 2) * 8 < m))
					continue;
				const size_t ws_bytes = kn->ws_bytes(&a[0]);

				CUDA(cudaMalloc(&ws, ws_bytes));
				CUDA(cudaMemset(ws, 0, EXL3_CUDA_WS_ZERO));
				for (uint32_t c = 0; c < copies; c++) {
					a[c].ws = ws;
					a[c].ws_bytes = ws_bytes;
				}
				CUDA(cudaStreamBeginCapture(stream,
							    cudaStreamCaptureModeThreadLocal));
				for (uint32_t i = 0; i < launches && !r; i++)
					r = kn->launch(&a[i % copies], stream);
				CUDA(cudaStreamEndCapture(stream, &graph));
				CUDA(cudaGraphInstantiate(&exec, graph, 0));
				for (int rep = 0; rep < 4; rep++) {
					CUDA(cudaEventRecord(from, stream));
					CUDA(cudaGraphLaunch(exec, stream));
					CUDA(cudaEventRecord(to, stream));
					CUDA(cudaStreamSynchronize(stream));
					CUDA(cudaEventElapsedTime(&ms, from, to));
					if (rep && ms < best)
						best = ms;
				}
				printf("  %s %.1f", kn->name, r ? -1.0 : best * 1e3 / launches);
				fflush(stdout);
				CUDA(cudaGraphExecDestroy(exec));
				CUDA(cudaGraphDestroy(graph));
				CUDA(cudaFree(ws));
			}
			printf("\n");
		}
		for (uint32_t c = 0; c < copies; c++)
			for (uint32_t i = 0; i < s.shards; i++)
				free_matrix(&a[c].shard[i]);
		cudaFree(x);
		cudaFree(y);
		free(a);
	}
	return 0;
}

int main(int argc, char **argv)
{
	cudaDeviceProp prop;

	if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess) {
		printf("skipped: no CUDA device\n");
		return 77;
	}
	sms = prop.multiProcessorCount;
	cc = prop.major * 10 + prop.minor;
	if (argc > 1 && !strcmp(argv[1], "bench"))
		return bench(argc > 2 && strcmp(argv[2], "all") ? argv[2] : NULL,
			     argc > 3 ? argc - 3 : 0, argv + 3);
	return check(argc > 2 ? argv[2] : NULL);
}
