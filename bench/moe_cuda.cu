/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_cuda.cu - times the routed block on a GPU: graph replays, cold weights, fresh routing each call.
 *
 * moe_cuda [--csv FILE] [--commit TEXT] [--quick] [--shape 0|1] [--tokens N,N..] [--workspace MiB] [--steps]
 *          [--variants | --variant NAME]
 *   --steps: also with only the first launches; --variants: also every variant that supports a cell, or the one (printed,
 *   not in FILE)
 * Two shapes: 256 experts top-8 hidden 2048 inter 512, and 288 experts top-8 hidden 4096 inter 1536; 4 bits,
 * mcg. Layers rotate so that a weight read once is out of the L2 when it is read again. The bound counts
 * the touched experts' trellis at this run's own read rate.
 */
#include "kernels/cuda/moe.h"
#include "kernels/format.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#define CUDA(call)                                                                                 \
	do {                                                                                       \
		cudaError_t e_ = (call);                                                           \
		if (e_ != cudaSuccess) {                                                           \
			printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

static uint64_t g_seed = 7;

static uint64_t rnd()
{
	uint64_t z = g_seed += 0x9E3779B97F4A7C15ull;

	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
	z = (z ^ z >> 27) * 0x94D049BB133111EBull;
	return z ^ z >> 31;
}

__global__ static void fill_random(uint32_t *p, size_t n, uint32_t seed)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
		uint32_t v = (uint32_t)i * 2654435761u ^ seed;

		v ^= v >> 16;
		v *= 0x7feb352du;
		v ^= v >> 15;
		v *= 0x846ca68bu;
		p[i] = v ^ v >> 16;
	}
}

/* f16 of sign-like scales around @mag. */
__global__ static void fill_scales(__half *p, size_t n, float mag, uint32_t seed)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
		p[i] = __float2half(((((uint32_t)i * 2654435761u ^ seed) >> 13) & 1 ? mag : -mag));
}

__global__ static void read_all(const uint4 *p, size_t n, uint32_t *out)
{
	uint32_t v = 0;

	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
		uint4 w = p[i];

		v ^= w.x ^ w.y ^ w.z ^ w.w;
	}
	if (v == 0x12345678)
		*out = v;
}

static double read_rate() /* bytes per second */
{
	const size_t bytes = (size_t)4 << 30;
	cudaEvent_t a, b;
	uint4 *p;
	uint32_t *out;
	float best = 1e9f;

	CUDA(cudaMalloc((void **)&p, bytes));
	CUDA(cudaMalloc((void **)&out, 4));
	fill_random<<<1024, 256>>>((uint32_t *)p, bytes / 4, 1);
	cudaEventCreate(&a);
	cudaEventCreate(&b);
	for (int i = 0; i < 6; i++) {
		float ms;

		cudaEventRecord(a);
		read_all<<<132 * 4, 512>>>(p, bytes / 16, out);
		cudaEventRecord(b);
		CUDA(cudaEventSynchronize(b));
		cudaEventElapsedTime(&ms, a, b);
		best = std::min(best, ms);
	}
	cudaFree(p);
	cudaFree(out);
	return bytes / (best * 1e-3);
}

struct shape {
	uint32_t experts, hidden, inter;
};

struct layer {
	char *mem;
	struct exl3_cuda_moe_plan *plan;
};

/* All matrices of a layer in one allocation. */
static layer make_layer(const shape &s, int rate2, int cb, uint32_t seed)
{
	const size_t tw = exl3_trellis_bytes(s.hidden, s.inter, rate2);
	const size_t scales = (size_t)(s.hidden + s.inter) * 2;
	const size_t per = 3 * (tw + scales);
	std::vector<exl3_matrix> mats(s.experts * 3);
	std::vector<exl3_expert> experts(s.experts);
	struct exl3_error err = {};
	layer l;

	CUDA(cudaMalloc((void **)&l.mem, per * s.experts));
	fill_random<<<2048, 256>>>((uint32_t *)l.mem, tw * 3 * s.experts / 4, seed);
	char *sc = l.mem + tw * 3 * s.experts;

	fill_scales<<<256, 256>>>((__half *)sc, scales * 3 * s.experts / 2, 1.0f / sqrtf((float)s.hidden), seed);
	for (uint32_t i = 0; i < s.experts * 3; i++) {
		exl3_matrix &m = mats[i];

		memset(&m, 0, sizeof(m));
		m.k = m.k_log = i % 3 == 2 ? s.inter : s.hidden;
		m.n = m.n_log = i % 3 == 2 ? s.hidden : s.inter;
		m.rate2 = (uint8_t)rate2;
		m.codebook = (uint8_t)cb;
		m.trellis = l.mem + tw * i;
		m.suh = sc + scales * i;
		m.svh = sc + scales * i + m.k * 2;
	}
	for (uint32_t e = 0; e < s.experts; e++)
		experts[e] = {&mats[e * 3], &mats[e * 3 + 1], &mats[e * 3 + 2]};
	if (exl3_cuda_moe_plan_new(experts.data(), s.experts, &l.plan, &err)) {
		printf("%s\n", err.text);
		exit(1);
	}
	CUDA(cudaDeviceSynchronize());
	return l;
}

int main(int argc, char **argv)
{
	const char *csv = NULL, *commit = getenv("EXL3_COMMIT") ? getenv("EXL3_COMMIT") : "unknown";
	const char *tokens = NULL, *one = NULL;
	size_t ws_bytes = (size_t)3 << 30;
	bool quick = false, variants = false;
	int steps = 0, only = -1;

	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--csv") && i + 1 < argc)
			csv = argv[++i];
		else if (!strcmp(argv[i], "--commit") && i + 1 < argc)
			commit = argv[++i];
		else if (!strcmp(argv[i], "--quick"))
			quick = true;
		else if (!strcmp(argv[i], "--steps"))
			steps = 4;
		else if (!strcmp(argv[i], "--variants"))
			variants = true;
		else if (!strcmp(argv[i], "--variant") && i + 1 < argc)
			variants = true, one = argv[++i];
		else if (!strcmp(argv[i], "--shape") && i + 1 < argc)
			only = atoi(argv[++i]);
		else if (!strcmp(argv[i], "--tokens") && i + 1 < argc)
			tokens = argv[++i];
		else if (!strcmp(argv[i], "--workspace") && i + 1 < argc)
			ws_bytes = (size_t)atoi(argv[++i]) << 20;
		else
			return fprintf(stderr, "moe_cuda: unknown option %s\n", argv[i]), 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	cudaDeviceProp prop;
	CUDA(cudaGetDeviceProperties(&prop, 0));
	const double rate = read_rate();
	char *ws;
	FILE *f = csv ? fopen(csv, "w") : NULL;
	static const shape shapes[] = {{256, 2048, 512}, {288, 4096, 1536}};
	std::vector<uint32_t> counts = {1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192};
	const uint32_t topk = 8;

	if (tokens) {
		counts.clear();
		for (const char *at = tokens; *at; at += *at == ',') {
			char *end;

			counts.push_back((uint32_t)strtoul(at, &end, 10));
			if (end == at || !counts.back())
				return fprintf(stderr, "moe_cuda: --tokens takes numbers with commas\n"), 2;
			at = end;
		}
	}

	CUDA(cudaMalloc((void **)&ws, ws_bytes));
	CUDA(cudaMemset(ws, 0, EXL3_CUDA_WS_ZERO));
	printf("%s, read %.2f TB/s\n", prop.name, rate * 1e-12);
	if (f) {
		fprintf(f, "# %s", argv[0]);
		for (int i = 1; i < argc; i++)
			fprintf(f, " %s", argv[i]);
		fprintf(f, "; commit %s; %s; read %.3f TB/s\n", commit, prop.name, rate * 1e-12);
		fprintf(f, "experts,topk,hidden,inter,bits,codebook,tokens,us,bound_us,max_err\n");
	}
	for (const shape &s : shapes) {
		if (only >= 0 && &s != &shapes[only ? 1 : 0])
			continue;
		const int nr_layers = 3;
		std::vector<layer> layers;
		const size_t expert_bytes = 3 * exl3_trellis_bytes(s.hidden, s.inter, 8);

		for (int i = 0; i < nr_layers; i++)
			layers.push_back(make_layer(s, 8, 1, 100 + i));
		printf("%u experts top-%u, hidden %u, inter %u, 4 bits mcg\n  tokens       us    bound\n",
		       s.experts, topk, s.hidden, s.inter);
		for (uint32_t t : counts) {
			/* Calls of one graph; each has its own routing and the next layer. */
			const int calls = t <= 64 ? 24 : t <= 512 ? 9 : 3;
			std::vector<int32_t> ids((size_t)calls * t * topk);
			double touched = 0;
			cudaStream_t stream;
			cudaGraph_t graph;
			cudaGraphExec_t exec;
			cudaEvent_t a, b;
			char *x, *y, *w;
			int32_t *ids_dev;

			if (quick && t > 128)
				break;
			for (int c = 0; c < calls; c++) {
				std::vector<char> seen(s.experts, 0);

				for (uint32_t i = 0; i < t; i++)
					for (uint32_t j = 0; j < topk; j++) {
						int32_t *row = &ids[((size_t)c * t + i) * topk], id;

						do
							id = (int32_t)(rnd() % s.experts);
						while (std::find(row, row + j, id) != row + j);
						row[j] = id;
						seen[id] = 1;
					}
				touched += std::count(seen.begin(), seen.end(), 1) / (double)calls;
			}
			CUDA(cudaMalloc((void **)&ids_dev, ids.size() * 4));
			CUDA(cudaMemcpy(ids_dev, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
			CUDA(cudaMalloc((void **)&x, (size_t)t * s.hidden * 2));
			CUDA(cudaMalloc((void **)&y, (size_t)t * s.hidden * 4));
			CUDA(cudaMalloc((void **)&w, (size_t)t * topk * 4));
			fill_scales<<<256, 256>>>((__half *)x, (size_t)t * s.hidden, 1.0f, 5);
			std::vector<float> wh((size_t)t * topk, 1.0f / topk);
			CUDA(cudaMemcpy(w, wh.data(), wh.size() * 4, cudaMemcpyHostToDevice));
			CUDA(cudaStreamCreate(&stream));
			cudaEventCreate(&a);
			cudaEventCreate(&b);
			int stop = 0;
			unsigned variant = 0;
			auto enqueue = [&](int c) {
				exl3_cuda_moe_entry e = {};
				struct exl3_cuda_moe m = {};

				e.x = x;
				e.y = y;
				e.ids = ids_dev + (size_t)c * t * topk;
				e.weights = w;
				e.x_stride = s.hidden * 2;
				e.y_stride = s.hidden * 4;
				e.m = t;
				e.topk = topk;
				e.x_dtype = EXL3_F16;
				e.y_dtype = EXL3_F32;
				e.ids_dtype = EXL3_I32;
				e.weights_dtype = EXL3_F32;
				m.plan = layers[c % nr_layers].plan;
				m.entries = &e;
				m.nr_entries = 1;
				m.act = EXL3_ACT_SILU;
				m.routed_scale = 1.0f;
				m.steps = (uint8_t)stop;
				m.ws = ws;
				m.ws_bytes = ws_bytes;
				m.device_sms = prop.multiProcessorCount;
				m.device_cc = prop.major * 10 + prop.minor;
				m.variant = (uint8_t)variant;
				if (!exl3_cuda_moe_variants[variant].supports(&m))
					return false;
				if (exl3_cuda_moe_launch(&m, stream)) {
					printf("launch failed\n");
					exit(1);
				}
				return true;
			};
			std::vector<float> times;
			double part[5] = {};
			const double flops = 6.0 * t * topk * s.hidden * s.inter;
			const double bytes = touched * expert_bytes + (double)t * s.hidden * 6;
			const double bound = std::max(bytes / rate, flops / 800e12) * 1e6;

			for (variant = 0; variant < (variants ? EXL3_CUDA_MOE_VARIANTS_NR : 1); variant++) {
				if (variant && one && strcmp(one, exl3_cuda_moe_variants[variant].name))
					continue;
				/* Outside of the capture: sets the kernels' attributes. */
				if (!enqueue(0))
					continue;
				CUDA(cudaStreamSynchronize(stream));
				for (stop = steps; stop >= 0; stop--) {
					times.clear();
					CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
					for (int c = 0; c < calls; c++)
						enqueue(c);
					CUDA(cudaStreamEndCapture(stream, &graph));
					CUDA(cudaGraphInstantiate(&exec, graph, 0));
					for (int i = 0; i < (stop ? 8 : 24); i++) {
						float ms;

						cudaEventRecord(a, stream);
						CUDA(cudaGraphLaunch(exec, stream));
						cudaEventRecord(b, stream);
						CUDA(cudaEventSynchronize(b));
						cudaEventElapsedTime(&ms, a, b);
						if (i >= 3)
							times.push_back(ms * 1e3f / calls);
					}
					std::sort(times.begin(), times.end());
					part[stop] = times[times.size() / 2];
					cudaGraphExecDestroy(exec);
					cudaGraphDestroy(graph);
				}
				const double us = times[times.size() / 2];

				printf("  %6u %8.1f %8.1f", t, us, bound);
				for (int i = 1; i <= steps; i++)
					printf(" %8.1f", part[i]);
				if (variant)
					printf("   %s", exl3_cuda_moe_variants[variant].name);
				printf("\n");
				stop = 0;
				if (f && !variant)
					fprintf(f, "%u,%u,%u,%u,4,mcg,%u,%.2f,%.2f,\n", s.experts, topk, s.hidden, s.inter,
						t, us, bound);
			}
			cudaStreamDestroy(stream);
			cudaFree(ids_dev);
			cudaFree(x);
			cudaFree(y);
			cudaFree(w);
		}
		for (layer &l : layers) {
			exl3_cuda_moe_plan_free(l.plan);
			cudaFree(l.mem);
		}
	}
	if (f)
		fclose(f);
	return 0;
}
