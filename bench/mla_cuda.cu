/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla_cuda.cu - times of sparse MLA decode on one GPU, as mla_<gpu>.csv.
 *
 * usage: mla_cuda [-o FILE] [-r COMMIT] [-s] [-1]   -s: also sweep splits (to stderr); -1: 16 heads only
 * "pages" is a block table with pages of 64 rows.
 *
 * Each cell: a CUDA graph of several launches, each with its own selection of rows of a cache of at
 * least 1 GiB, so no row is in L2; the graph is replayed and the median of all replays is divided by
 * the launches. The read ceiling is measured first, in the same run. Errors are against a double
 * computation of one query of the first launch.
 */
#include "kernels/cuda/mla_common.cuh"
#include "kernels/cuda/mla_wgmma.cuh"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace
{

constexpr int REPLAYS = 21;
constexpr size_t CACHE_BYTES = (size_t)5 << 28; /* 1.25 GiB */
constexpr uint32_t TOPK = 2048, PAGE = 64;

int sms, cc;
void *ws;
constexpr size_t WS_BYTES = (size_t)512 << 20;
FILE *csv;
double read_bytes_per_us, flops_per_us;

void must(cudaError_t e, const char *what)
{
	if (e != cudaSuccess) {
		fprintf(stderr, "mla_cuda: %s: %s\n", what, cudaGetErrorString(e));
		exit(2);
	}
}

__device__ uint32_t mix(uint32_t x)
{
	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x *= 0x846ca68bu;
	return x ^ (x >> 16);
}

/* About normal: sum of four uniform values. */
__device__ float noise(uint32_t i, uint32_t seed)
{
	const uint32_t a = mix(i ^ seed), b = mix(a + 0x9e3779b9u);

	return ((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16)) * (1.0f / 37837.0f) - 3.464f;
}

__global__ void fill(void *dst, uint32_t dtype, size_t n, uint32_t seed)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x) {
		const float v = noise((uint32_t)i, seed + (uint32_t)(i >> 32));

		if (dtype == EXL3_E4M3_656) { /* @n: bytes */
			const uint32_t at = (uint32_t)(i % EXL3_RECORD_BYTES);

			if (at < 512)
				((__nv_fp8_storage_t *)dst)[i] =
					__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
			else if (at < 528 && at % 4 == 0)
				*(float *)((uint8_t *)dst + i) = 0.75f + 0.25f * fabsf(v);
			else if (at >= 528 && at % 2 == 0)
				*(__nv_bfloat16 *)((uint8_t *)dst + i) = __float2bfloat16(v);
		} else if (dtype == EXL3_E4M3)
			((__nv_fp8_storage_t *)dst)[i] =
				__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
		else
			((__nv_bfloat16 *)dst)[i] = __float2bfloat16(v);
	}
}

/* Random rows, or pages of 64 rows each: @slots is the number of either. */
__global__ void select_rows(int32_t *dst, size_t n, uint32_t slots, uint32_t seed)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x)
		dst[i] = (int32_t)(mix((uint32_t)i * 2654435761u + seed) % slots);
}

__global__ void read_all(const uint4 *src, size_t n, uint32_t *sink)
{
	uint32_t acc = 0;
	size_t i = blockIdx.x * (size_t)blockDim.x * 4 + threadIdx.x;

	for (; i + 3 * blockDim.x < n; i += (size_t)gridDim.x * blockDim.x * 4) {
		uint4 v[4];

#pragma unroll
		for (int k = 0; k < 4; k++)
			v[k] = __ldcs(src + i + k * blockDim.x);
#pragma unroll
		for (int k = 0; k < 4; k++)
			acc ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
	}
	if (acc == 0x12345678)
		*sink = acc;
}

/* Rows gathered with plain 16-byte loads and nothing else: what the memory gives for this pattern. */
__global__ void __launch_bounds__(256) gather(const uint8_t *cache, const int32_t *idx,
					      uint32_t page, uint32_t keys, uint32_t row_bytes, uint32_t *sink)
{
	const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	const uint32_t nr_warps = gridDim.x * 8, w = blockIdx.x * 8 + warp,
		       per = (keys + nr_warps - 1) / nr_warps;
	uint32_t acc = 0;

	for (uint32_t k = w * per; k < min(w * per + per, keys); k += 4) {
		uint4 v[4][3] = {};

#pragma unroll
		for (int j = 0; j < 4; j++) {
			if (k + j >= keys)
				break;
			const uint32_t slot = page == 1 ? idx[k + j] : idx[(k + j) / page] * page + (k + j) % page;
			const uint8_t *row = cache + (size_t)slot * row_bytes;

#pragma unroll
			for (int c = 0; c < 3; c++)
				if ((uint32_t)(c * 32 + lane) * 16 < row_bytes)
					v[j][c] = __ldcs((const uint4 *)row + c * 32 + lane);
		}
#pragma unroll
		for (int j = 0; j < 4; j++)
#pragma unroll
			for (int c = 0; c < 3; c++)
				acc ^= v[j][c].x ^ v[j][c].y ^ v[j][c].z ^ v[j][c].w;
	}
	if (acc == 0x12345678)
		*sink = acc;
}

/* Two warpgroups a CTA, m64n256k16 from shared memory without a pause: the tensor cores' own ceiling. */
constexpr int TENSOR_STEPS = 4096;
constexpr size_t TENSOR_SMEM = 48 << 10;

__global__ void __launch_bounds__(256, 1) tensor_rate(float *sink)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	extern __shared__ __align__(1024) uint8_t smem_rate[];
	float d[128] = {};

	for (uint32_t i = threadIdx.x; i < TENSOR_SMEM / 2; i += blockDim.x)
		((__nv_bfloat16 *)smem_rate)[i] = __float2bfloat16(noise(i, 5));
	exl3_mla::fence_async_proxy();
	__syncthreads();
	const uint32_t base = exl3_mla::smem_addr(smem_rate);

	exl3_mla::wgmma_hold(d);
	for (int i = 0; i < TENSOR_STEPS / 4; i++) {
		exl3_mla::wgmma_fence();
#pragma unroll
		for (int k = 0; k < 4; k++)
			exl3_mla::wgmma_values<true>(
				d, exl3_mla::desc_k_major(base) + k * 2,
				exl3_mla::desc_mn_major(base + 8192, 8192) + k * 128, true);
		exl3_mla::wgmma_commit();
		exl3_mla::wgmma_wait<0>();
	}
	exl3_mla::wgmma_hold(d);
	for (float v : d)
		if (v == 12345.678f)
			*sink = v;
#endif
}

/* Median microseconds of one of @calls launches that @enqueue captures. */
template <class F> double time_graph(int calls, F enqueue, int replays = REPLAYS)
{
	cudaStream_t st;
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	cudaEvent_t a, b;
	std::vector<float> ms(replays);

	must(cudaStreamCreate(&st), "stream");
	must(cudaEventCreate(&a), "event");
	must(cudaEventCreate(&b), "event");
	must(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal), "capture");
	for (int i = 0; i < calls; i++)
		enqueue(i, st);
	must(cudaStreamEndCapture(st, &graph), "capture");
	must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
	for (int i = 0; i < 2; i++)
		must(cudaGraphLaunch(exec, st), "launch");
	for (int i = 0; i < replays; i++) {
		must(cudaEventRecord(a, st), "record");
		must(cudaGraphLaunch(exec, st), "launch");
		must(cudaEventRecord(b, st), "record");
		must(cudaStreamSynchronize(st), "replay");
		must(cudaEventElapsedTime(&ms[i], a, b), "elapsed");
	}
	must(cudaGraphExecDestroy(exec), "destroy");
	must(cudaGraphDestroy(graph), "destroy");
	must(cudaEventDestroy(a), "destroy");
	must(cudaEventDestroy(b), "destroy");
	must(cudaStreamDestroy(st), "destroy");
	std::sort(ms.begin(), ms.end());
	return ms[replays / 2] * 1000.0 / calls;
}

struct cell {
	uint32_t heads, dim, value_dim;
	uint8_t cache;
	bool pages;
	uint32_t topk;
	uint64_t slots; /* rows of the cache, 0: CACHE_BYTES of them */

	uint32_t page() const /* rows that an index names */
	{
		return pages ? PAGE : 1;
	}
};

const char *layout(const cell &c)
{
	return c.pages ? "pages" : c.slots ? "prefill" : "random";
}

struct operands {
	void *cache, *q, *o;
	int32_t *indices;
	uint64_t slots;
	size_t row_bytes, q_bytes, o_bytes; /* per query: q and o */
	int calls;
};

double max_error(const cell &c, const operands &op)
{
	const size_t dim = c.dim;
	std::vector<uint16_t> q(c.heads * dim);
	std::vector<float> o((size_t)c.heads * c.value_dim);
	std::vector<int32_t> idx(c.topk / c.page());
	std::vector<uint8_t> row(op.row_bytes);
	std::vector<float> kv(c.topk * dim);
	double sq = 0, worst = 0;

	must(cudaMemcpy(q.data(), op.q, q.size() * 2, cudaMemcpyDeviceToHost), "copy");
	must(cudaMemcpy(o.data(), op.o, o.size() * 4, cudaMemcpyDeviceToHost), "copy");
	must(cudaMemcpy(idx.data(), op.indices, idx.size() * 4, cudaMemcpyDeviceToHost), "copy");
	for (uint32_t i = 0; i < c.topk; i++) {
		const size_t slot = (size_t)idx[i / c.page()] * c.page() + i % c.page();

		must(cudaMemcpy(row.data(), (uint8_t *)op.cache + slot * op.row_bytes, op.row_bytes,
				 cudaMemcpyDeviceToHost),
		     "copy");
		const bool record = c.cache == EXL3_E4M3_656;
		const uint8_t *wide = row.data() + (record ? 528 - 512 * 2 : 0); /* of bf16 values */

		for (size_t d = 0; d < dim; d++) {
			const bool fp8 = c.cache == EXL3_E4M3 || (record && d < 512);
			float f = 1.0f, &v = kv[i * dim + d];

			if (record && fp8)
				memcpy(&f, row.data() + 512 + d / 128 * 4, 4);
			v = fp8 ? f * __half2float(__half(__nv_cvt_fp8_to_halfraw(row[d], __NV_E4M3)))
				: __bfloat162float(((const __nv_bfloat16 *)wide)[d]);
		}
	}
	for (uint32_t h = 0; h < std::min(c.heads, 4u); h++) {
		std::vector<double> p(c.topk), ref(c.value_dim);
		double top = -INFINITY, sum = 0;

		for (uint32_t i = 0; i < c.topk; i++) {
			for (size_t d = 0; d < dim; d++)
				p[i] += (double)__bfloat162float(
						((const __nv_bfloat16 *)q.data())[h * dim + d]) *
					kv[i * dim + d];
			p[i] /= sqrt((double)dim);
			top = fmax(top, p[i]);
		}
		for (uint32_t i = 0; i < c.topk; i++)
			sum += p[i] = exp(p[i] - top);
		for (uint32_t i = 0; i < c.topk; i++)
			for (uint32_t d = 0; d < c.value_dim; d++)
				ref[d] += p[i] / sum * kv[i * dim + d];
		for (uint32_t d = 0; d < c.value_dim; d++) {
			sq += ref[d] * ref[d];
			worst = fmax(worst, fabs(ref[d] - o[(size_t)h * c.value_dim + d]));
		}
	}
	return worst / sqrt(sq / (std::min(c.heads, 4u) * c.value_dim));
}

struct exl3_cuda_mla_entry entry_of(const cell &c, const operands &op, uint32_t batch, int call)
{
	struct exl3_cuda_mla_entry e = {};

	e.q = (uint8_t *)op.q + op.q_bytes * batch * call;
	e.cache = op.cache;
	e.indices = op.indices + (size_t)c.topk / c.page() * batch * call;
	e.table_queries = 1;
	e.page_shift = c.pages ? __builtin_ctz(PAGE) : 0;
	e.o = (uint8_t *)op.o + op.o_bytes * batch * call;
	e.slots = op.slots;
	e.cache_stride = op.row_bytes;
	e.q_stride = (uint32_t)op.q_bytes;
	e.o_stride = (uint32_t)op.o_bytes;
	e.indices_stride = c.topk / c.page() * 4;
	e.topk = c.topk;
	e.m = batch;
	e.scale = 1.0f / sqrtf((float)c.dim);
	e.kv_scale = 1.0f;
	e.q_dtype = EXL3_BF16;
	e.o_dtype = EXL3_F32;
	e.indices_dtype = EXL3_I32;
	return e;
}

struct exl3_cuda_mla args_of(const cell &c, const struct exl3_cuda_mla_entry *e, uint32_t cluster,
			     uint32_t groups)
{
	struct exl3_cuda_mla a = {};

	a.entries = e;
	a.nr_entries = 1;
	a.heads = c.heads;
	a.dim = c.dim;
	a.value_dim = c.value_dim;
	a.cache_dtype = c.cache;
	a.cluster = (uint16_t)cluster;
	a.groups = (uint16_t)groups;
	a.ws = ws;
	a.ws_bytes = WS_BYTES;
	a.device_sms = sms;
	a.device_cc = cc;
	return a;
}

template <class LAUNCH>
double time_kernel(const char *name, LAUNCH launch, const cell &c, const operands &op,
		   uint32_t batch, uint32_t cluster, uint32_t groups, int replays = REPLAYS)
{
	const auto enqueue = [&](int i, cudaStream_t st) {
		const struct exl3_cuda_mla_entry e = entry_of(c, op, batch, i);
		const struct exl3_cuda_mla a = args_of(c, &e, cluster, groups);
		const int r = launch(&a, st);

		if (r) {
			fprintf(stderr, "mla_cuda: %s: launch: %d\n", name, r);
			exit(2);
		}
	};

	return time_graph(op.calls, enqueue, replays);
}

/* Variants for any size are timed only where they are chosen. */
bool is_general(const struct exl3_cuda_mla_kernel *k)
{
	return strstr(k->name, "_any") || strstr(k->name, "_small");
}

/* What exl3_cuda_mla_select() says. */
const struct exl3_cuda_mla_kernel *chosen(const cell &c, const operands &op, uint32_t batch)
{
	const struct exl3_cuda_mla_entry e = entry_of(c, op, batch, 0);
	const struct exl3_cuda_mla a = args_of(c, &e, 0, 0);

	return exl3_cuda_mla_select(&a);
}

bool takes(const struct exl3_cuda_mla_kernel *k, const cell &c, const operands &op, uint32_t batch)
{
	const struct exl3_cuda_mla_entry e = entry_of(c, op, batch, 0);
	const struct exl3_cuda_mla a = args_of(c, &e, 0, 0);

	return k->supports(&a);
}

void bench(const cell &c, const std::vector<uint32_t> &batches, bool sweep)
{
	operands op;
	const uint32_t most = *std::max_element(batches.begin(), batches.end());
	const bool record = c.cache == EXL3_E4M3_656;
	const char *cache_name = record ? "e4m3_656" : c.cache == EXL3_E4M3 ? "e4m3" : "bf16";

	op.row_bytes = exl3_cache_row_bytes(c.cache, c.dim);
	op.slots = c.slots ? c.slots : CACHE_BYTES / op.row_bytes / PAGE * PAGE;
	op.q_bytes = (size_t)c.heads * c.dim * 2;
	op.o_bytes = (size_t)c.heads * c.value_dim * 4;
	/* Queries of all calls of a graph: their rows are several times the L2. */
	const size_t nr = most >= 1024 ? most : std::max<size_t>(most * 4, 128);

	must(cudaMalloc(&op.cache, CACHE_BYTES), "cudaMalloc");
	must(cudaMalloc(&op.q, nr * op.q_bytes), "cudaMalloc");
	must(cudaMalloc(&op.o, nr * op.o_bytes), "cudaMalloc");
	must(cudaMalloc((void **)&op.indices, nr * c.topk * 4), "cudaMalloc");
	fill<<<1024, 256>>>(op.cache, c.cache, op.slots * (record ? EXL3_RECORD_BYTES : c.dim), 1);
	fill<<<1024, 256>>>(op.q, EXL3_BF16, nr * c.heads * c.dim, 7);
	select_rows<<<256, 256>>>(op.indices, nr * c.topk / c.page(), (uint32_t)op.slots / c.page(), 99);
	must(cudaDeviceSynchronize(), "fill");
	for (uint32_t batch : batches) {
		const double bytes =
			std::min((double)batch * c.topk, (double)op.slots) * op.row_bytes;
		const double bound = std::max(bytes / read_bytes_per_us,
					      2.0 * batch * c.heads * c.topk *
						      (c.dim + c.value_dim) / flops_per_us);

		op.calls = (int)(nr / batch);
		const double plain = time_graph(op.calls, [&](int i, cudaStream_t st) {
			gather<<<sms * 2, 256, 0, st>>>(
				(uint8_t *)op.cache, op.indices + (size_t)c.topk / c.page() * batch * i,
				c.page(), c.topk * batch, (uint32_t)op.row_bytes, (uint32_t *)ws + 8);
		});
		for (const struct exl3_cuda_mla_kernel *k = exl3_cuda_mla_kernels; k->name; k++) {
			if (!takes(k, c, op, batch) || (is_general(k) && k != chosen(c, op, batch)))
				continue;
			const double us = time_kernel(k->name, k->launch, c, op, batch, 0, 0);
			const double err = max_error(c, op);

			fprintf(stderr,
				"%c %-17s %3u heads %u/%u %-7s B=%-4u %8.2f us  gather only %7.2f  "
				"bound %6.2f  err %.4f\n",
				k == chosen(c, op, batch) ? '*' : ' ', k->name, c.heads, c.dim,
				c.value_dim, layout(c), batch, us, plain, bound, err);
			/* The file holds what callers get. */
			if (csv && k == chosen(c, op, batch)) {
				fprintf(csv, "%u,%u,%u,%s,%s,%u,%u,%.2f,%.2f,%.5f\n", c.heads,
					c.dim, c.value_dim, cache_name, layout(c), c.topk, batch,
					us, bound, err);
			}
		}
		if (!sweep || batch == 2)
			continue;
		static const uint32_t splits[][2] = {
			{1, 1}, {2, 1}, {3, 1}, {4, 1},  {5, 1},  {6, 1},  {7, 1}, {8, 1},  {16, 1},
			{4, 2}, {7, 2}, {8, 2}, {4, 4},  {5, 4},  {7, 4},  {8, 4}, {16, 2}, {16, 4},
			{4, 8}, {7, 8}, {8, 8}, {4, 16}, {7, 16}, {8, 16}, {2, 16}};
		const uint64_t items = (uint64_t)batch * ((c.heads + 15) / 16);
		const auto sweep_one = [&](const char *name, auto launch) {
			fprintf(stderr, "  sweep %-18s", name);
			for (const auto &s : splits) {
				const uint64_t ctas = items * s[0] * s[1];

				if (ctas > (uint64_t)sms ||
				    (ctas < (uint64_t)sms / 4 && ctas < items * 16))
					continue;
				fprintf(stderr, " %ux%u:%.2f", s[0], s[1],
					time_kernel(name, launch, c, op, batch, s[0], s[1], 5));
			}
			fprintf(stderr, "\n");
		};

		for (const struct exl3_cuda_mla_kernel *k = exl3_cuda_mla_kernels; k->name; k++)
			if (takes(k, c, op, batch) && !is_general(k))
				sweep_one(k->name, k->launch);
	}
	must(cudaFree(op.cache), "free");
	must(cudaFree(op.q), "free");
	must(cudaFree(op.o), "free");
	must(cudaFree(op.indices), "free");
}

void measure_read(void)
{
	void *buf;
	const size_t bytes = (size_t)4 << 30;

	must(cudaMalloc(&buf, bytes), "cudaMalloc");
	must(cudaMemset(buf, 1, bytes), "memset");
	double best = 0;

	for (int per_sm = 4; per_sm <= 8; per_sm *= 2) {
		const double us = time_graph(2, [&](int, cudaStream_t st) {
			read_all<<<sms * per_sm, 256, 0, st>>>((const uint4 *)buf, bytes / 16,
							       (uint32_t *)ws + 8);
		});

		best = std::max(best, bytes / us);
	}
	read_bytes_per_us = best;
	must(cudaFree(buf), "free");
}

void measure_tensor(void)
{
	must(cudaFuncSetAttribute(tensor_rate, cudaFuncAttributeMaxDynamicSharedMemorySize,
				  (int)TENSOR_SMEM),
	     "attribute");
	const double us = time_graph(2, [&](int, cudaStream_t st) {
		tensor_rate<<<sms, 256, TENSOR_SMEM, st>>>((float *)ws + 8);
	});

	flops_per_us = cc == 90 ? 2.0 * 2 * 64 * 256 * 16 * TENSOR_STEPS * sms / us : INFINITY;
}

} // namespace

int main(int argc, char **argv)
{
	const char *file = nullptr, *commit = getenv("EXL3_COMMIT");
	bool sweep = false, few = false;
	std::string command = argv[0];
	int opt;

	while ((opt = getopt(argc, argv, "o:r:s1")) != -1) {
		switch (opt) {
		case 'o':
			file = optarg;
			break;
		case 'r':
			commit = optarg;
			break;
		case 's':
			sweep = true;
			break;
		case '1':
			few = true;
			break;
		default:
			fprintf(stderr,
				"usage: mla_cuda [-o FILE] [-r COMMIT] [-s] [-1]\n");
			return 2;
		}
	}
	for (int i = 1; i < argc; i++)
		command += std::string(" ") + argv[i];
	struct cudaDeviceProp prop;

	if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess) {
		printf("mla_cuda: no GPU: skipped\n");
		return 77;
	}
	sms = prop.multiProcessorCount;
	cc = prop.major * 10 + prop.minor;
	must(cudaMalloc(&ws, WS_BYTES), "cudaMalloc");
	must(cudaMemset(ws, 0, EXL3_CUDA_WS_ZERO), "memset");
	measure_read();
	const double tiny = time_graph(64, [&](int, cudaStream_t st) {
		select_rows<<<1, 32, 0, st>>>((int32_t *)ws + 8192, 0, 1, 1);
	});
	int driver = 0, runtime = 0;
	char date[32];
	const time_t now = time(nullptr);

	cudaDriverGetVersion(&driver);
	cudaRuntimeGetVersion(&runtime);
	strftime(date, sizeof(date), "%Y-%m-%d", gmtime(&now));
	measure_tensor();
	fprintf(stderr, "%s: read %.2f TB/s, bf16 %.0f TFLOP/s, tiny kernel in a graph %.2f us\n",
		prop.name, read_bytes_per_us / 1e6, flops_per_us / 1e6, tiny);
	if (file) {
		csv = fopen(file, "w");
		if (!csv) {
			perror(file);
			return 2;
		}
		setvbuf(csv, nullptr, _IOLBF, 0);
		fprintf(csv,
			"# %s; commit %s; %s; %s; driver CUDA %d.%d, runtime %d.%d; HBM read %.2f "
			"TB/s; bf16 %.0f "
			"TFLOP/s; tiny kernel in a graph %.2f us\n",
			command.c_str(), commit ? commit : "", date, prop.name, driver / 1000, driver % 1000 / 10,
			runtime / 1000, runtime % 1000 / 10, read_bytes_per_us / 1e6,
			flops_per_us / 1e6, tiny);
		fprintf(csv, "heads,dim,value_dim,cache,layout,topk,batch,us,bound_us,max_err\n");
	}
	const std::vector<uint32_t> batches = {1, 2, 4, 8, 16, 32, 64, 128};

	bench({16, 576, 512, EXL3_BF16, false, TOPK, 0}, batches, sweep);
	bench({16, 512, 512, EXL3_BF16, false, TOPK, 0}, batches, false);
	bench({16, 576, 512, EXL3_E4M3, false, TOPK, 0}, batches, false);
	bench({16, 512, 512, EXL3_E4M3, false, TOPK, 0}, batches, false);
	bench({16, 576, 512, EXL3_BF16, true, TOPK, 0}, batches, false);
	bench({16, 576, 512, EXL3_E4M3_656, false, TOPK, 0}, batches, false);
	if (few)
		return csv && fclose(csv) ? 2 : 0;
	bench({128, 576, 512, EXL3_BF16, false, TOPK, 0}, {1, 4, 16, 128}, sweep);
	bench({64, 576, 512, EXL3_E4M3_656, false, TOPK, 0}, {1, 4, 16, 32, 64, 128}, false);
	bench({64, 576, 512, EXL3_E4M3, false, TOPK, 0}, {1, 16, 64, 128}, false);
	bench({64, 576, 512, EXL3_BF16, false, TOPK, 0}, {1, 16, 64, 128}, false);
	bench({64, 576, 512, EXL3_BF16, false, TOPK, 16384}, {1024, 4096}, false);
	bench({16, 576, 512, EXL3_BF16, false, TOPK, 0}, {1, 128},
	      false); /* spread: first cells again */
	if (csv && fclose(csv)) {
		perror(file);
		return 2;
	}
	return 0;
}
