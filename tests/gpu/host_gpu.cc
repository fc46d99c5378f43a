/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_gpu.cc - libexl3-gpu (client/cuda/gpu.cu) on the host: what it refuses, its epochs, its errors.
 *
 * A launch runs the kernel's thread at once; a thread of the test is the daemon. Memory is the host's.
 */
#include "client/cuda/gpu.cu"

#include <stdio.h>
#include <thread>
#include <unistd.h>

namespace
{

int failed, allocations, streams, refuse;

#define CHECK(what)                                                       \
	do {                                                              \
		if (!(what)) {                                            \
			printf("%s:%d: %s\n", __FILE__, __LINE__, #what); \
			failed++;                                         \
		}                                                         \
	} while (0)

/* The @refuse-th call from now on is refused; 0: none. */
cudaError_t maybe(cudaError_t e)
{
	return refuse && --refuse == 0 ? e : cudaSuccess;
}

cudaError_t give(void **ret, size_t bytes)
{
	const cudaError_t e = maybe(cudaErrorMemoryAllocation);

	if (e != cudaSuccess)
		return e;
	*ret = malloc(bytes);
	memset(*ret, 0xa5, bytes);
	allocations++;
	return cudaSuccess;
}

} /* namespace */

extern "C" {
cudaError_t cudaHostAlloc(void **ret, size_t bytes, unsigned)
{
	return give(ret, bytes);
}
cudaError_t cudaMalloc(void **ret, size_t bytes)
{
	return give(ret, bytes);
}
cudaError_t cudaFree(void *p)
{
	allocations -= p != nullptr;
	free(p);
	return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p)
{
	return cudaFree(p);
}
cudaError_t cudaHostGetDevicePointer(void **ret, void *p, unsigned)
{
	*ret = p;
	return maybe(cudaErrorInvalidValue);
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int)
{
	return maybe(cudaErrorInvalidValue);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *)
{
	return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned)
{
	const cudaError_t e = maybe(cudaErrorMemoryAllocation);

	if (e == cudaSuccess) {
		*ret = reinterpret_cast<cudaStream_t>(&streams);
		streams++;
	}
	return e;
}
cudaError_t cudaStreamDestroy(cudaStream_t)
{
	streams--;
	return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t)
{
	return maybe(cudaErrorIllegalAddress);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t)
{
	memcpy(to, from, bytes);
	return maybe(cudaErrorIllegalAddress);
}
cudaError_t cudaGetLastError(void)
{
	return cudaErrorMemoryAllocation;
}
}

int exl3_emulate_signal_wait(const struct exl3_device_call *c, void *)
{
	exl3_device_signal(c);
	(void)exl3_device_wait(c);
	return 0;
}

namespace
{

constexpr uint32_t CALLS = 3;

struct words {
	uint32_t ready, done;
	int32_t result;
};

/* The daemon's side of @calls of one replay. */
void serve(words *w, uint32_t epoch, uint32_t calls, int32_t result)
{
	for (uint32_t i = 0; i < calls; i++) {
		while (__atomic_load_n(&w[i].ready, __ATOMIC_ACQUIRE) != epoch)
			std::this_thread::yield();
		w[i].result = i == 1 ? result : 0;
		__atomic_store_n(&w[i].done, epoch, __ATOMIC_RELEASE);
	}
}

void replay(struct exl3_gpu *g)
{
	for (uint32_t i = 0; i < CALLS; i++)
		CHECK(!exl3_gpu_enqueue(g, i, nullptr));
}

void refusals(struct exl3_gpu_words *to)
{
	struct exl3_gpu *g = nullptr;
	struct exl3_gpu_words odd[1] = {to[0]};
	struct exl3_device_call c;

	CHECK(exl3_gpu_new(to, 0, 1, &g) == -EINVAL && exl3_gpu_new(to, EXL3_GPU_CALLS_MAX + 1, 1, &g) == -EINVAL);
	odd[0].ready = nullptr;
	CHECK(exl3_gpu_new(odd, 1, 1, &g) == -EINVAL);
	odd[0].ready = (uint32_t *)((char *)to[0].ready + 2);
	CHECK(exl3_gpu_new(odd, 1, 1, &g) == -EINVAL);
	/* Each call that CUDA may refuse, until a run meets none. */
	for (int n = 1;; n++) {
		refuse = n;
		const int ret = exl3_gpu_new(to, CALLS, 1, &g);

		if (!ret)
			break;
		CHECK(ret == -ENOMEM || ret == -EIO);
		CHECK(!g && !allocations && !streams && n < 100);
	}
	refuse = 0;
	CHECK(exl3_gpu_call(g, CALLS, &c) == -EINVAL && exl3_gpu_enqueue(g, CALLS, nullptr) == -EINVAL);
	CHECK(!exl3_gpu_call(g, 1, &c) && c.ready == to[1].ready && c.done == to[1].done && c.call == 1);
	CHECK(!exl3_gpu_free(g) && !exl3_gpu_free(nullptr) && !allocations);
}

void ends(words *w, struct exl3_gpu_words *to)
{
	struct exl3_gpu *g = nullptr;
	uint32_t call = 99;

	CHECK(!exl3_gpu_new(to, CALLS, 20000000000ull, &g));
	for (uint32_t epoch = 1; epoch <= 50; epoch++) {
		std::thread daemon(serve, w, epoch, CALLS, 0);

		replay(g);
		daemon.join();
		CHECK(!exl3_gpu_error(g, &call) && call == 99);
	}
	/* A call's own error, in the middle. */
	std::thread bad(serve, w, 51u, CALLS, -EINVAL);

	replay(g);
	bad.join();
	CHECK(exl3_gpu_error(g, &call) == -EINVAL && call == 1 && !exl3_gpu_error(g, nullptr));
	/* The daemon stops after one; the client gives up. */
	std::thread some(serve, w, 52u, 1u, 0);
	std::thread stop([&] {
		some.join();
		exl3_gpu_abort(g);
	});

	replay(g);
	stop.join();
	CHECK(exl3_gpu_error(g, &call) == -ECANCELED && call == 1 && !exl3_gpu_error(g, nullptr));
	exl3_gpu_free(g);
	/* Nobody is there; then somebody is, from another epoch on. */
	CHECK(!exl3_gpu_new(to, CALLS, 30000000, &g) && !exl3_gpu_set_epoch(g, 52));
	replay(g);
	CHECK(exl3_gpu_error(g, &call) == -ETIMEDOUT && call == 0 && w[2].ready == 53);
	CHECK(!exl3_gpu_set_epoch(g, 0xffffffffu));
	for (uint32_t i = 0; i < CALLS; i++)
		w[i].done = 0xffffffffu;
	exl3_gpu_free(g);
	CHECK(!exl3_gpu_new(to, CALLS, 20000000000ull, &g) && !exl3_gpu_set_epoch(g, 0xffffffffu));
	std::thread wrap(serve, w, 0u, CALLS, 0);

	replay(g);
	wrap.join();
	CHECK(!exl3_gpu_error(g, nullptr));
	exl3_gpu_free(g);
	CHECK(!allocations && !streams);
}

} /* namespace */

int main()
{
	static words w[CALLS];
	struct exl3_gpu_words to[CALLS];

	for (uint32_t i = 0; i < CALLS; i++)
		to[i] = {&w[i].ready, &w[i].done, &w[i].result};
	refusals(to);
	ends(w, to);
	printf("host_gpu: %d failed\n", failed);
	return failed != 0;
}
