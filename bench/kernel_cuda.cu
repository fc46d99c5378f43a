/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_cuda.cu - dense linear kernels on a GPU: cold weights, CUDA graph, each call waits for the last.
 *
 * Calls of one graph form a chain: the x of a call is the y of the call before. Weights rotate over
 * copies of at least 256 MB together, several times the L2. A cell is the median of the replays divided
 * by the calls of the graph; chain_us is the same chain with programmatic launches. The read rate, an
 * almost empty kernel and (if libcublas is there) bf16 GEMM are measured first; a cell that moves bytes
 * faster than the read rate has a warm cache and fails. Small cells come first, and one is repeated last.
 *
 *       kernel_cuda [--m 1,8] [--shapes 0,1] [--bits 4,6] [--codebooks mcg,mul1] [--dtype f16|bf16] [--kernels A,B]
 *                   [--ablate] [--trace] [--all] [--candidates] [--more] [--csv FILE] [--replays N] [--no-cublas]
 *
 * Kernels that are named take turns (A B B A); us is the fastest kernel's time, auto_us that of the kernel
 * which the daemon would choose. max_err and rms_err: the first 128 columns of up to 8 rows of the last call
 * against double, relative to the rms of y. --more adds other bitrates and codebooks at few rows.
 * Candidates (launch.h) take part where they are named, or all of them with --candidates.
 * --all prints every kernel of a cell, not only the fastest; --ablate leaves parts of the work out
 * (t: input transform, r: sums across blocks and output, all: everything) to place the time; --trace prints how many
 * clocks blocks spend from point to point, mean and largest.
 */
#include "kernels/cuda/launch.h"
#include "kernels/format.h"

#include <algorithm>
#include <cuda_fp16.h>
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <time.h>
#include <vector>

#define CK(x)                                                                              \
	do {                                                                               \
		cudaError_t e_ = (x);                                                      \
		if (e_ != cudaSuccess) {                                                   \
			printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); \
			exit(1);                                                           \
		}                                                                          \
	} while (0)

struct shape {
	uint32_t k, n, shards;
};

static const shape shapes[] = {
	{4096, 4096, 1}, {5120, 5120, 1}, {5120, 17408, 1}, {17408, 5120, 1}, {5120, 34816, 2},
};
static const char *const codebooks[] = {"3inst", "mcg", "mul1"};

static const size_t COLD_BYTES = 256u << 20;
static const size_t POOL_BYTES = 512u << 20;
static const int CALLS_MIN = 4, CALLS_MAX = 64, SHARDS = 2;

static cudaDeviceProp prop;
static cudaStream_t stream;
static uint32_t *pool;
static uint16_t *dense; /* bf16 weights for cuBLAS, POOL_BYTES */
static uint8_t dtype = EXL3_F16;
static char *buffers[2], *ws;
static size_t buffer_bytes, ws_bytes = 1u << 30;
static __half *scales;
static int replays = 25;
static double read_tbs, tiny_us, bf16_tflops;
static bool failed_cell;

/* ---- timing ---- */

template <class F> static double graph_us(int calls, F enqueue, int nr_replays = 0)
{
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	cudaEvent_t from, to;
	std::vector<float> times;

	CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
	int r = enqueue();
	CK(cudaStreamEndCapture(stream, &graph));
	if (r) {
		CK(cudaGraphDestroy(graph));
		return NAN;
	}
	CK(cudaGraphInstantiate(&exec, graph, 0));
	CK(cudaEventCreate(&from));
	CK(cudaEventCreate(&to));
	for (int i = 0; i < (nr_replays ? nr_replays : replays) + 2; i++) {
		float ms;

		CK(cudaEventRecord(from, stream));
		CK(cudaGraphLaunch(exec, stream));
		CK(cudaEventRecord(to, stream));
		CK(cudaEventSynchronize(to));
		CK(cudaEventElapsedTime(&ms, from, to));
		if (i >= 2)
			times.push_back(ms);
	}
	CK(cudaEventDestroy(from));
	CK(cudaEventDestroy(to));
	CK(cudaGraphExecDestroy(exec));
	CK(cudaGraphDestroy(graph));
	std::sort(times.begin(), times.end());
	return (double)times[times.size() / 2] * 1e3 / calls;
}

/* ---- ceilings ---- */

__global__ void fill(uint32_t *p, size_t n, uint32_t salt)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x) {
		uint32_t x = (uint32_t)i * 2654435761u + salt;

		x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
		p[i] = x;
	}
}

/* fp16: +-magnitude, sign at random. */
__global__ void fill_half(__half *p, size_t n, float magnitude)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x) {
		uint32_t x = (uint32_t)i * 2654435761u;

		p[i] = __float2half((x ^ x >> 15) & 64 ? magnitude : -magnitude);
	}
}

/* The same in bf16, magnitudes spread over a factor of four: what a layer's weights and activations are like. Random bits
 * would do for bytes moved, but a product of them is NaN, which costs the tensor cores so little power that they clock up. */
__global__ void fill_bf16(uint16_t *p, size_t n, float magnitude)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x) {
		uint32_t x = (uint32_t)i * 2654435761u;

		x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15;
		const float v = magnitude * (0.5f + (float)(x & 0xffff) / 43690.0f);

		p[i] = (uint16_t)(__float_as_uint(x & 0x80000000u ? -v : v) >> 16);
	}
}

/* [copy][65536 suh, 65536 svh] */
__global__ void fill_scales(__half *p, float svh)
{
	for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < CALLS_MAX * SHARDS * 131072u;
	     i += gridDim.x * blockDim.x) {
		const float v = i & 65536 ? svh : 1.0f;

		p[i] = __float2half((i * 2654435761u >> 16) & 64 ? v : -v);
	}
}

__global__ void __launch_bounds__(512) read_all(const uint4 *p, size_t n, uint32_t *out)
{
	const size_t step = (size_t)gridDim.x * blockDim.x;
	uint32_t s = 0;

	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i + 7 * step < n;
	     i += 8 * step) {
		uint4 v[8];

#pragma unroll
		for (int u = 0; u < 8; u++)
			v[u] = __ldcs(p + i + u * step);
#pragma unroll
		for (int u = 0; u < 8; u++)
			s ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
	}
	if (s == 0x12345678u)
		*out = s;
}

__global__ void tiny(uint32_t *p)
{
	if (p[0] == 0x12345u)
		p[1] = 1;
}

/* cuBLAS, opened at run time: C ABI of the three calls that are used (cublas_v2.h). */
struct blas {
	void *handle = NULL;
	int (*gemm)(void *, int, int, int, int, int, const void *, const void *, int, int,
		    const void *, int, int, const void *, void *, int, int, int, int) = NULL;
};

static blas open_blas(void)
{
	blas b;
	void *lib = NULL;
	int (*create)(void **), (*set_stream)(void *, cudaStream_t),
		(*set_ws)(void *, void *, size_t);

	for (const char *name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"})
		if (!lib)
			lib = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
	if (!lib)
		return b;
	create = (int (*)(void **))dlsym(lib, "cublasCreate_v2");
	set_stream = (int (*)(void *, cudaStream_t))dlsym(lib, "cublasSetStream_v2");
	set_ws = (int (*)(void *, void *, size_t))dlsym(lib, "cublasSetWorkspace_v2");
	*(void **)&b.gemm = dlsym(lib, "cublasGemmEx");
	if (!create || !set_stream || !set_ws || !b.gemm || create(&b.handle))
		return blas();
	if (set_stream(b.handle, stream) ||
	    set_ws(b.handle, ws + ws_bytes - (64u << 20), 64u << 20))
		return blas();
	return b;
}

static double blas_us(const blas &b, uint32_t k, uint32_t n, uint32_t m)
{
	const size_t bytes = (size_t)k * n * 2;
	const int copies = (int)std::max<size_t>(1, POOL_BYTES / bytes);
	const int calls = std::max(CALLS_MIN, std::min(copies, 16));
	const float one = 1.0f, zero = 0.0f;

	if (!b.handle || bytes > POOL_BYTES)
		return NAN;
	/* Outputs are the next call's inputs: weights of 1/sqrt(k) keep them at unit size. */
	fill_bf16<<<1024, 256, 0, stream>>>(dense, POOL_BYTES / 2, 0.8f / sqrtf((float)k));
	for (char *x : buffers)
		fill_bf16<<<1024, 256, 0, stream>>>((uint16_t *)x, buffer_bytes / 2, 0.8f);
	/* y[m, n] row-major = columns of n: C[n, m] = W[n, k] (row-major [k, n] read as column-major [n, k]) x. */
	auto enqueue = [&] {
		for (int i = 0; i < calls; i++)
			if (b.gemm(b.handle, 0, 0, (int)n, (int)m, (int)k, &one,
				   (char *)dense + (i % copies) * bytes, 14, (int)n, buffers[i & 1],
				   14, (int)std::max(k, n), &zero, buffers[~i & 1], 14,
				   (int)std::max(k, n), 68, -1))
				return 1;
		return 0;
	};
	enqueue(); /* chooses and loads kernels outside of the capture */
	CK(cudaStreamSynchronize(stream));
	return graph_us(calls, enqueue);
}

static void ceilings(const blas &b)
{
	/* Two passes over the pool: the second never finds the first in the L2. */
	const double us = graph_us(2, [&] {
		for (int i = 0; i < 2; i++)
			read_all<<<prop.multiProcessorCount * 4, 512, 0, stream>>>(
				(const uint4 *)pool, POOL_BYTES / 16, (uint32_t *)ws + (2 << 20));
		return 0;
	});

	read_tbs = POOL_BYTES / us * 1e-6;
	tiny_us = graph_us(64, [&] {
		for (int i = 0; i < 64; i++)
			tiny<<<1, 32, 0, stream>>>(pool);
		return 0;
	});
	printf("%s: HBM read %.2f TB/s, tiny kernel in a graph %.2f us", prop.name, read_tbs,
	       tiny_us);
	if (b.handle) {
		const double t = blas_us(b, 8192, 8192, 4096);

		bf16_tflops = 2.0 * 8192 * 8192 * 4096 / t * 1e-6;
		printf(", cuBLAS bf16 %.0f TFLOP/s", bf16_tflops);
	}
	printf("\n");
}

/* ---- a cell ---- */

struct cell {
	shape s;
	int rate2, codebook;
	uint32_t m;
};

static size_t weight_bytes(const cell &c)
{
	return exl3_trellis_bytes(c.s.k, c.s.n, c.rate2);
}

/* The last call of the cell that was measured last; its x and y are still there. */
static struct {
	exl3_cuda_linear a;
	int rate2, codebook;
} last;

static double run_cell(const exl3_cuda_linear_kernel *kern, const cell &c, bool programmatic,
		       int ablate)
{
	const size_t bytes = weight_bytes(c), part = bytes / c.s.shards;
	const int copies = (int)((COLD_BYTES + bytes - 1) / bytes) + 1;
	const int calls = std::max(CALLS_MIN, std::min(copies, CALLS_MAX));
	const size_t stride = (size_t)std::max(c.s.k, c.s.n) * 2;
	exl3_cuda_linear a = {};

	a.nr_shards = c.s.shards;
	a.m = c.m;
	a.x_stride = a.y_stride = (uint32_t)stride;
	a.x_dtype = a.y_dtype = dtype;
	a.stored = true;
	a.ws = ws;
	a.ws_bytes = ws_bytes - (64u << 20);
	a.device_sms = prop.multiProcessorCount;
	a.device_cc = prop.major * 10 + prop.minor;
	a.programmatic = programmatic;
	a.ablate = (uint8_t)ablate;
	auto prepare = [&](int i) {
		for (uint32_t s = 0; s < c.s.shards; s++) {
			exl3_matrix &w = a.shard[s];

			w.k = w.k_log = c.s.k;
			w.n = w.n_log = c.s.n / c.s.shards;
			w.rate2 = (uint8_t)c.rate2;
			w.codebook = (uint8_t)c.codebook;
			w.trellis = (char *)pool +
				    ((size_t)i * bytes + s * part) % (POOL_BYTES - part) / 16 * 16;
			/* Cold like the weights: each copy has its own. */
			w.suh = scales + (size_t)(i * c.s.shards + s) * 131072;
			w.svh = scales + (size_t)(i * c.s.shards + s) * 131072 + 65536;
			w.bias = NULL;
		}
		a.x = buffers[i & 1];
		a.y = buffers[~i & 1];
	};

	prepare(0);
	if (c.m * stride > buffer_bytes || !kern->supports(&a) || kern->ws_bytes(&a) > a.ws_bytes)
		return NAN;
	/* x of unit size; svh keeps the outputs there. */
	for (char *x : buffers) {
		if (dtype == EXL3_F16)
			fill_half<<<256, 256, 0, stream>>>((__half *)x, buffer_bytes / 2, 1.0f);
		else
			fill_bf16<<<256, 256, 0, stream>>>((uint16_t *)x, buffer_bytes / 2, 0.8f);
	}
	fill_scales<<<1024, 256, 0, stream>>>(scales, 0.8f / sqrtf((float)c.s.k));
	const double us = graph_us(calls, [&] {
		for (int i = 0; i < calls; i++) {
			prepare(i);
			int r = kern->launch(&a, stream);

			if (r)
				return r;
		}
		return 0;
	});

	if (ablate)
		CK(cudaMemsetAsync(ws, 0, EXL3_CUDA_WS_ZERO, stream));
	last.a = a;
	last.rate2 = c.rate2;
	last.codebook = c.codebook;
	return us;
}

/* ---- errors: the first 128 columns of the last call against double ---- */

static const uint32_t ERROR_ROWS = 8;

__device__ static double had128(double v, double *part)
{
	double sum = 0;

	__syncthreads();
	part[threadIdx.x] = v;
	__syncthreads();
	for (int j = 0; j < 128; j++)
		sum += __popc(threadIdx.x & j) & 1 ? -part[j] : part[j];
	return sum * EXL3_INV_SQRT128;
}

__device__ static double element(const void *row, uint32_t i, int type)
{
	return type == EXL3_F16 ? (double)__half2float(((const __half *)row)[i])
				: (double)__uint_as_float((uint32_t)((const uint16_t *)row)[i] << 16);
}

/* One row per block, one column per thread; @value: the codebook; @out: [row] sums of squares, largest error. */
__global__ void __launch_bounds__(128)
	errors(const char *x, const char *y, uint32_t stride, int type, const uint32_t *trellis,
	       const __half *suh, const __half *svh, uint32_t k, uint32_t nt, int rate2, const float *value,
	       double *out)
{
	__shared__ double part[128], xh[128];
	const uint32_t col = threadIdx.x;
	double sum = 0;

	for (uint32_t base = 0; base < k; base += 128) {
		const double v = had128(element(x + (size_t)blockIdx.x * stride, base + col, type) *
						(double)__half2float(suh[base + col]),
					part);

		__syncthreads();
		xh[col] = v;
		__syncthreads();
		for (uint32_t i = 0; i < 128; i++) {
			const uint32_t *tile = trellis + ((size_t)((base + i) / 16) * nt + col / 16) *
								 exl3_tile_words32(rate2);

			sum += xh[i] *
			       value[exl3_window(tile, rate2, exl3_tile_index(i % 16, col % 16))];
		}
	}
	const double want = had128(sum, part) * (double)__half2float(svh[col]);
	const double off = element(y + (size_t)blockIdx.x * stride, col, type) - want;

	atomicAdd(out, want * want);
	atomicAdd(out + 1, off * off);
	atomicMax((unsigned long long *)out + 2, (unsigned long long)__double_as_longlong(fabs(off)));
}

/* Relative to the rms of y. */
static void last_errors(double *top, double *rms)
{
	static float *value[3];
	static double *sums;
	const exl3_cuda_linear &a = last.a;
	const uint32_t rows = std::min(a.m, ERROR_ROWS);
	double h[3];

	if (!sums)
		CK(cudaMalloc(&sums, sizeof(h)));
	if (!value[last.codebook]) {
		std::vector<float> v(65536);

		for (uint32_t w = 0; w < 65536; w++)
			v[w] = exl3_f16_to_f32(exl3_code_f16(w, last.codebook));
		CK(cudaMalloc(&value[last.codebook], v.size() * 4));
		CK(cudaMemcpy(value[last.codebook], v.data(), v.size() * 4, cudaMemcpyHostToDevice));
	}
	CK(cudaMemsetAsync(sums, 0, sizeof(h), stream));
	errors<<<rows, 128, 0, stream>>>((const char *)a.x, (const char *)a.y, a.x_stride, a.x_dtype,
					 (const uint32_t *)a.shard[0].trellis,
					 (const __half *)a.shard[0].suh, (const __half *)a.shard[0].svh,
					 a.shard[0].k, a.shard[0].n / 16, last.rate2,
					 value[last.codebook], sums);
	CK(cudaStreamSynchronize(stream));
	CK(cudaMemcpy(h, sums, sizeof(h), cudaMemcpyDeviceToHost));
	const double scale = sqrt(h[0] / (rows * 128.0));

	*top = h[2] / scale;
	*rms = sqrt(h[1] / h[0]);
}

static double bound_us(const cell &c)
{
	const double bytes = weight_bytes(c) + 2.0 * c.m * (c.s.k + c.s.n);
	const double flops = 2.0 * c.m * c.s.k * c.s.n;

	return std::max(bytes / (read_tbs * 1e6),
			bf16_tflops > 0 ? flops / (bf16_tflops * 1e6) : 0.0);
}

static std::vector<std::string> split(const char *s)
{
	std::vector<std::string> v;

	for (const char *p = s; p && *p;) {
		const char *e = strchr(p, ',');

		v.push_back(e ? std::string(p, e) : std::string(p));
		p = e ? e + 1 : NULL;
	}
	return v;
}

struct options {
	std::vector<std::string> kernels;
	bool all = false, ablate = false, trace = false, candidates = false;
	FILE *csv = NULL;
};

static std::string cell_name(const cell &c)
{
	char t[96];

	snprintf(t, sizeof(t), "%ux%u%s %g bits %s", c.s.k, c.s.n,
		 c.s.shards > 1 ? " (2 shards)" : "", c.rate2 / 2.0, codebooks[c.codebook]);
	return t;
}

/* The last blocks' points in time (gemv.cuh, enum gemv_point); they lie at the end of the workspace. */
static void print_trace(const exl3_cuda_linear_kernel *kern, const cell &c)
{
	static const char *const steps[] = {"ask", "x", "image", "main", "flush", "sums"};
	const int blocks = 96;
	std::vector<uint32_t> t(blocks * 16);

	run_cell(kern, c, false, 8);
	CK(cudaStreamSynchronize(stream));
	CK(cudaMemcpy(t.data(), ws + ws_bytes - (64u << 20) - t.size() * 4, t.size() * 4,
		      cudaMemcpyDeviceToHost));
	printf("    %-32s m %4u %-20s clocks:", cell_name(c).c_str(), c.m, kern->name);
	for (int p = 0; p < 6; p++) {
		double sum = 0, top = 0;

		for (int i = 0; i < blocks; i++) {
			const double d = (double)(int)(t[i * 16 + p + 1] - t[i * 16 + p]);

			sum += d;
			top = std::max(top, d);
		}
		printf("  %s %.0f (%.0f)", steps[p], sum / blocks, top);
	}
	double whole = 0, clocks = 0, ns = 0;
	int spread = 0, span = 0;

	for (int i = 0; i < blocks; i++) {
		whole = std::max(whole, (double)(t[i * 16 + 6] - t[i * 16]));
		clocks += t[i * 16 + 6] - t[i * 16];
		ns += t[i * 16 + 8] - t[i * 16 + 7];
		for (int j = 0; j < blocks; j++) {
			spread = std::max(spread, (int)(t[i * 16 + 7] - t[j * 16 + 7]));
			span = std::max(span, (int)(t[i * 16 + 8] - t[j * 16 + 7]));
		}
	}
	printf("; longest block %.0f, starts within %d ns, first start to last end %d ns, %.2f GHz\n",
	       whole, spread, span, clocks / ns);
}

static double measure(const cell &c, const options &o, const blas &b)
{
	const exl3_cuda_linear_kernel *best = NULL;
	double best_us = INFINITY, auto_us = NAN;

	std::vector<const exl3_cuda_linear_kernel *> list;
	std::vector<double> times;

	for (const exl3_cuda_linear_kernel *table :
	     {exl3_cuda_gemv_kernels, exl3_cuda_gemm_kernels})
		for (const exl3_cuda_linear_kernel *k = table; k->name; k++) {
			const bool named = std::find(o.kernels.begin(), o.kernels.end(), k->name) !=
					   o.kernels.end();

			if (named || (o.kernels.empty() && (!k->candidate || o.candidates)))
				list.push_back(k);
		}
	for (const exl3_cuda_linear_kernel *k : list)
		times.push_back(run_cell(k, c, false, 0));
	/* Kernels that were named are compared: A B B A, so that a drift of clocks is in both. */
	if (o.kernels.size() > 1)
		for (size_t i = list.size(); i--;)
			if (!isnan(times[i]))
				times[i] = (times[i] + run_cell(list[i], c, false, 0)) / 2;
	for (size_t i = 0; i < list.size(); i++) {
		const exl3_cuda_linear_kernel *k = list[i];
		const bool few = !strncmp(k->name, "gemv", 4);
		const double us = times[i];

		if (isnan(us))
			continue;
		if (isnan(auto_us))
			auto_us = us; /* the first that can is the daemon's choice */
		if (weight_bytes(c) / us * 1e-6 > read_tbs * 1.02) {
			printf("FAILED %s m %u %s: %.2f us is above the read ceiling\n",
			       cell_name(c).c_str(), c.m, k->name, us);
			failed_cell = true;
		}
		if (o.all)
			printf("    %-32s m %4u %-20s %8.2f us, programmatic %8.2f\n",
			       cell_name(c).c_str(), c.m, k->name, us, run_cell(k, c, true, 0));
		if (o.ablate && few) {
			static const char *const what[] = {"-", "t", "r", "tr", "all"};

			printf("    %-32s m %4u %-20s without:", cell_name(c).c_str(), c.m,
			       k->name);
			for (int f = 1; f < 5; f++)
				printf("  %s %.2f", what[f], run_cell(k, c, false, f));
			printf("\n");
		}
		if (o.trace && few)
			print_trace(k, c);
		if (us < best_us) {
			best_us = us;
			best = k;
		}
	}
	fflush(stdout);
	if (!best)
		return NAN;
	if (o.csv) {
		double top, rms;
		const double chain = run_cell(best, c, true, 0);

		last_errors(&top, &rms);
		const double cublas = blas_us(b, c.s.k, c.s.n, c.m);

		fprintf(o.csv, "%u,%u,%u,%g,%s,%s,%u,%.2f,%.2f,", c.s.k, c.s.n, c.s.shards,
			c.rate2 / 2.0, codebooks[c.codebook], dtype == EXL3_F16 ? "f16" : "bf16", c.m, best_us, chain);
		if (!isnan(cublas))
			fprintf(o.csv, "%.2f", cublas);
		fprintf(o.csv, ",%s,%.0f,%.1f,%.2f,%.2e,%.2e,", best->name,
			weight_bytes(c) / best_us * 1e-3,
			2.0 * c.m * c.s.k * c.s.n / best_us * 1e-6, bound_us(c), top, rms);
		if (o.kernels.empty())
			fprintf(o.csv, "%.2f", auto_us);
		fprintf(o.csv, "\n");
		fflush(o.csv);
	}
	return best_us;
}

/* --more: what other bitrates and codebooks cost beside 4 bits, one shape, few rows. */
static std::vector<cell> other_cells(const std::vector<uint32_t> &ms)
{
	static const struct {
		int rate2, codebook;
	} kinds[] = {{2, 1}, {4, 1}, {6, 1}, {10, 1}, {12, 1}, {16, 1}, {8, 0},
		     {8, 2}, {3, 2}, {4, 2}, {5, 2},  {6, 2},  {7, 2}};
	std::vector<cell> v;

	for (uint32_t m : ms)
		for (const auto &kind : kinds)
			if (m <= 32 && m != 2)
				v.push_back({shapes[2], kind.rate2, kind.codebook, m});
	return v;
}

int main(int argc, char **argv)
{
	options o;
	std::vector<uint32_t> ms = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
	std::vector<std::string> which = {"0", "1", "2", "3", "4"}, cbs = {"mcg"}, bits = {"4"};
	const char *csv = NULL;
	bool use_blas = true, more = false;

	for (int i = 1; i < argc; i++) {
		const std::string opt = argv[i];
		const char *val = i + 1 < argc ? argv[i + 1] : "";

		if (opt == "--all" || opt == "--ablate" || opt == "--no-cublas" ||
		    opt == "--trace" || opt == "--more" || opt == "--candidates") {
			more |= opt == "--more";
			o.candidates |= opt == "--candidates";
			o.trace |= opt == "--trace";
			o.all |= opt == "--all";
			o.ablate |= opt == "--ablate";
			use_blas &= opt != "--no-cublas";
			continue;
		}
		i++;
		if (opt == "--m") {
			ms.clear();
			for (const std::string &s : split(val))
				ms.push_back((uint32_t)atoi(s.c_str()));
		} else if (opt == "--shapes") {
			which = split(val);
		} else if (opt == "--bits") {
			bits = split(val);
		} else if (opt == "--codebooks") {
			cbs = split(val);
		} else if (opt == "--kernels") {
			o.kernels = split(val);
		} else if (opt == "--dtype" && (!strcmp(val, "f16") || !strcmp(val, "bf16"))) {
			dtype = val[0] == 'f' ? EXL3_F16 : EXL3_BF16;
		} else if (opt == "--csv") {
			csv = val;
		} else if (opt == "--replays") {
			replays = std::max(20, atoi(val));
		} else {
			printf("unknown option %s; see the head of bench/kernel_cuda.cu\n",
			       opt.c_str());
			return 2;
		}
	}
	int devices = 0;

	if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) {
		printf("no CUDA device\n");
		return 77;
	}
	std::vector<cell> cells;
	std::sort(ms.begin(), ms.end());
	for (uint32_t m : ms)
		for (const std::string &w : which)
			for (const std::string &bit : bits)
				for (const std::string &cb : cbs) {
					const size_t s = (size_t)atoi(w.c_str());
					int id = 0;

					while (id < 3 && cb != codebooks[id])
						id++;
					const int rate2 = (int)lround(atof(bit.c_str()) * 2);

					if (s < sizeof(shapes) / sizeof(shapes[0]) &&
					    exl3_rate_valid(rate2, id) && m && m <= EXL3_M_MAX)
						cells.push_back({shapes[s], rate2, id, m});
				}
	CK(cudaGetDeviceProperties(&prop, 0));
	CK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	CK(cudaMalloc(&pool, POOL_BYTES));
	CK(cudaMalloc(&dense, POOL_BYTES));
	buffer_bytes =
		std::max((size_t)ms.back() * 34816 * 2, (size_t)4096 * 8192 * 2); /* cuBLAS below */
	CK(cudaMalloc(&buffers[0], buffer_bytes));
	CK(cudaMalloc(&buffers[1], buffer_bytes));
	CK(cudaMalloc(&ws, ws_bytes));
	CK(cudaMalloc(&scales, (size_t)CALLS_MAX * SHARDS * 131072 * sizeof(__half)));
	CK(cudaMemset(ws, 0, EXL3_CUDA_WS_ZERO));
	fill<<<1024, 256, 0, stream>>>(pool, POOL_BYTES / 4, 77);
	CK(cudaStreamSynchronize(stream));
	const blas b = use_blas ? open_blas() : blas();

	ceilings(b);
	if (csv) {
		char date[32];
		const time_t now = time(NULL);

		o.csv = fopen(csv, "w");
		if (!o.csv)
			return printf("cannot write %s\n", csv), 1;
		strftime(date, sizeof(date), "%Y-%m-%d", gmtime(&now));
		fprintf(o.csv, "# %s", argv[0]);
		for (int i = 1; i < argc; i++)
			fprintf(o.csv, " %s", argv[i]);
		fprintf(o.csv,
			"; commit %s; %s; %s; HBM read %.2f TB/s, bf16 %.0f TFLOP/s, tiny kernel %.2f us\n",
			getenv("EXL3_COMMIT") ? getenv("EXL3_COMMIT") : "unknown", date, prop.name,
			read_tbs, bf16_tflops, tiny_us);
		fprintf(o.csv, "k,n,shards,bits,codebook,dtype,m,us,chain_us,cublas_us,kernel,gbps,"
			       "tflops,bound_us,max_err,rms_err,auto_us\n");
	}
	std::vector<double> results;
	for (const cell &c : cells)
		results.push_back(measure(c, o, b));
	options quiet = o;

	quiet.csv = NULL;
	quiet.all = quiet.ablate = quiet.trace = false;
	if (more)
		for (const cell &c : other_cells(ms)) {
			const double us = measure(c, o, b);

			printf("%-36s m %-4u %8.2f\n", cell_name(c).c_str(), c.m, us);
		}
	const double again = cells.empty() ? NAN : measure(cells[0], quiet, b);

	printf("%-36s", "us (fastest kernel)");
	for (uint32_t m : ms)
		printf(" m=%-6u", m);
	printf("\n");
	for (size_t i = 0; i < cells.size() / ms.size(); i++) {
		printf("%-36s", cell_name(cells[i]).c_str());
		for (size_t j = 0; j < ms.size(); j++)
			printf(" %8.2f", results[j * (cells.size() / ms.size()) + i]);
		printf("\n");
	}
	if (!cells.empty())
		printf("repeated at the end: %s m %u: %.2f us, first %.2f\n",
		       cell_name(cells[0]).c_str(), cells[0].m, again, results[0]);
	if (o.csv)
		fclose(o.csv);
	return failed_cell;
}
