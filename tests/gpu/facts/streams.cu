/* SPDX-License-Identifier: Apache-2.0 */
/* streams.cu - how many streams that wait for a word it takes until some other stream cannot run. */
#include "facts.h"

#define MOST   40
#define PROBES 8

/* Sends the smallest number of waiting streams that keeps one of 8 probe streams from running. */
static int body(int sock, const void *connections)
{
	cudaStream_t waiting[MOST], probe[PROBES];
	volatile uint32_t *flag;
	int n;

	if (connections)
		setenv("CUDA_DEVICE_MAX_CONNECTIONS", (const char *)connections, 1);
	else
		unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
	const struct driver d = driver_open();

	RT(cudaHostAlloc((void **)&flag, 64, cudaHostAllocMapped));
	*flag = 0;
	/* All streams first: making one may wait for those that wait. */
	for (int i = 0; i < PROBES; i++)
		RT(cudaStreamCreateWithFlags(&probe[i], cudaStreamNonBlocking));
	for (int i = 0; i < MOST; i++)
		RT(cudaStreamCreateWithFlags(&waiting[i], cudaStreamNonBlocking));
	nothing<<<1, 1, 0, probe[0]>>>();
	RT(cudaDeviceSynchronize());
	for (n = 1; n <= MOST; n++) {
		bool all = true;

		CU(d.streamWait32(waiting[n - 1], (CUdeviceptr)flag, 1, CU_STREAM_WAIT_VALUE_GEQ));
		for (int i = 0; i < PROBES; i++)
			nothing<<<1, 1, 0, probe[i]>>>();
		const double end = now_ms() + 60;

		for (int i = 0; i < PROBES; i++) {
			while (cudaStreamQuery(probe[i]) == cudaErrorNotReady && now_ms() < end)
				sleep_ms(1);
			all = all && cudaStreamQuery(probe[i]) == cudaSuccess;
		}
		if (!all)
			break;
	}
	*flag = 1;
	RT(cudaDeviceSynchronize());
	return send_msg(sock, &n, sizeof(n), -1) ? 0 : 2;
}

static void round(const char *name, const char *says, const char *connections, int most)
{
	struct child c = start(body, connections, 20);
	int n = -1;
	const bool ok = recv_msg(c.fd, &n, sizeof(n), NULL, 20000);
	const int status = finish(&c, 3000);

	if (!ok || status)
		fact(name, says, false, "child ended with %d", status);
	else
		fact(name, says, n <= most, "%d waiting streams block one of 8 others%s", n,
		     n > MOST ? " (none did)" : "");
}

int main(void)
{
	skip_without_gpu("streams");
	round("streams_default", "5 waiting streams block others", NULL, 8);
	round("streams_32", "28 waiting streams block others", "32", 32);
	return facts_failed;
}
