/* SPDX-License-Identifier: Apache-2.0 */
/* gpu.cu - libexl3-gpu: a kernel of one thread that signals a call of a plan and waits for its end. */
#include "client/cuda/exl3_device.cuh"
#include "client/cuda/exl3_gpu.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Pinned: read and written by both sides. */
struct host_words {
	uint64_t error;
	uint32_t abort;
};

/* Device memory, one line each: neighbours' counters are written by other kernels at the same time. */
#define EPOCH_STRIDE 8u /* words */

struct exl3_gpu {
	struct exl3_gpu_words *words; /* [nr], owned */
	uint32_t nr;
	uint64_t wait_ns;
	struct host_words *host, *host_dev; /* owned; the same as the device addresses it */
	uint32_t *dev;                /* owned: [0] failed, then the calls' epochs */
};

#ifdef EXL3_EMULATE /* tests/gpu/host_gpu.cc: this file on the host */
int exl3_emulate_signal_wait(const struct exl3_device_call *c, void *stream);
#define launch      exl3_emulate_signal_wait
#define signal_wait NULL
#else
__global__ static void __launch_bounds__(32) signal_wait(const __grid_constant__ struct exl3_device_call c)
{
	exl3_device_signal(&c);
	(void)exl3_device_wait(&c);
}

static int launch(const struct exl3_device_call *c, void *stream)
{
	signal_wait<<<1, 1, 0, (cudaStream_t)stream>>>(*c);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}
#endif

static size_t dev_bytes(const struct exl3_gpu *g)
{
	return ((size_t)g->nr + 1) * EPOCH_STRIDE * sizeof(uint32_t);
}

extern "C" int exl3_gpu_call(const struct exl3_gpu *g, uint32_t call, struct exl3_device_call *ret)
{
	if (call >= g->nr)
		return -EINVAL;
	memset(ret, 0, sizeof(*ret));
	ret->ready = g->words[call].ready;
	ret->done = g->words[call].done;
	ret->result = g->words[call].result;
	ret->failed = g->dev;
	ret->epoch = g->dev + ((size_t)call + 1) * EPOCH_STRIDE;
	ret->abort = &g->host_dev->abort;
	ret->error = &g->host_dev->error;
	ret->wait_ns = g->wait_ns;
	ret->call = call;
	return 0;
}

extern "C" int exl3_gpu_enqueue(struct exl3_gpu *g, uint32_t call, void *stream)
{
	struct exl3_device_call c;
	int ret = exl3_gpu_call(g, call, &c);

	return ret ? ret : launch(&c, stream);
}

/* A copy of its own stream, which no capture of another stream takes part in. */
static int write_dev(struct exl3_gpu *g, uint32_t *to, const uint32_t *from, size_t bytes)
{
	cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
	cudaStream_t stream = NULL;
	cudaError_t e;

	(void)g;
	cudaThreadExchangeStreamCaptureMode(&mode);
	e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
	if (e == cudaSuccess)
		e = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
	if (e == cudaSuccess)
		e = cudaStreamSynchronize(stream);
	if (stream)
		cudaStreamDestroy(stream);
	cudaThreadExchangeStreamCaptureMode(&mode);
	return e == cudaSuccess ? 0 : -EIO;
}

extern "C" int exl3_gpu_set_epoch(struct exl3_gpu *g, uint32_t epoch)
{
	uint32_t *words = (uint32_t *)calloc(1, dev_bytes(g));
	int ret;

	if (!words)
		return -ENOMEM;
	for (uint32_t i = 1; i <= g->nr; i++)
		words[(size_t)i * EPOCH_STRIDE] = epoch;
	ret = write_dev(g, g->dev + EPOCH_STRIDE, words + EPOCH_STRIDE, dev_bytes(g) - EPOCH_STRIDE * sizeof(uint32_t));
	free(words);
	return ret;
}

extern "C" struct exl3_gpu *exl3_gpu_free(struct exl3_gpu *g)
{
	if (g) {
		cudaFree(g->dev);
		cudaFreeHost(g->host);
		free(g->words);
		free(g);
	}
	return NULL;
}

extern "C" int exl3_gpu_new(const struct exl3_gpu_words *words, uint32_t nr, uint64_t wait_ns, struct exl3_gpu **ret)
{
	struct exl3_gpu *g;
	int code;

	if (!nr || nr > EXL3_GPU_CALLS_MAX)
		return -EINVAL;
	for (uint32_t i = 0; i < nr; i++)
		if (!words[i].ready || !words[i].done ||
		    ((uintptr_t)words[i].ready | (uintptr_t)words[i].done | (uintptr_t)words[i].result) & 3)
			return -EINVAL;
	g = (struct exl3_gpu *)calloc(1, sizeof(*g));
	if (!g)
		return -ENOMEM;
	g->nr = nr;
	g->wait_ns = wait_ns;
	g->words = (struct exl3_gpu_words *)malloc(nr * sizeof(*g->words));
	code = g->words ? 0 : -ENOMEM;
	if (!code && (cudaHostAlloc((void **)&g->host, sizeof(*g->host), cudaHostAllocMapped) != cudaSuccess ||
		      cudaHostGetDevicePointer((void **)&g->host_dev, g->host, 0) != cudaSuccess ||
		      cudaMalloc((void **)&g->dev, dev_bytes(g)) != cudaSuccess))
		code = cudaGetLastError() == cudaErrorMemoryAllocation ? -ENOMEM : -EIO;
	/* An SM where this waits is to be of use to kernels with much shared memory: it is divided anew only when empty. */
	if (!code && cudaFuncSetAttribute((const void *)signal_wait, cudaFuncAttributePreferredSharedMemoryCarveout,
					  cudaSharedmemCarveoutMaxShared) != cudaSuccess)
		code = -EIO;
	if (!code) {
		const uint32_t zero[EPOCH_STRIDE] = {};

		memcpy(g->words, words, nr * sizeof(*g->words));
		memset(g->host, 0, sizeof(*g->host));
		code = write_dev(g, g->dev, zero, sizeof(zero));
	}
	if (!code)
		code = exl3_gpu_set_epoch(g, 0);
	if (code)
		exl3_gpu_free(g);
	else
		*ret = g;
	return code;
}

extern "C" void exl3_gpu_abort(struct exl3_gpu *g)
{
	__atomic_store_n(&g->host->abort, 1, __ATOMIC_RELEASE);
}

extern "C" int exl3_gpu_error(struct exl3_gpu *g, uint32_t *call)
{
	const uint64_t word = __atomic_load_n(&g->host->error, __ATOMIC_ACQUIRE);
	const int error = (int32_t)(uint32_t)word;
	const uint32_t zero = 0;

	__atomic_store_n(&g->host->abort, 0, __ATOMIC_RELEASE);
	if (!error)
		return 0;
	__atomic_store_n(&g->host->error, 0, __ATOMIC_RELEASE);
	if (write_dev(g, g->dev, &zero, sizeof(zero)))
		return -EIO;
	if (call)
		*call = (uint32_t)(word >> 32);
	return error == EXL3_DEVICE_TIMEOUT ? -ETIMEDOUT : error < 0 ? error : -ECANCELED;
}
