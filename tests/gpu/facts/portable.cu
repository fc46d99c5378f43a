/* SPDX-License-Identifier: Apache-2.0 */
/*
 * portable.cu - host memory that one device registered as portable is good, at the same address, for all devices:
 * an arena of a worker with several GPUs. Needs two GPUs for what matters.
 */
#include "facts.h"

#include <sys/mman.h>

static const size_t BYTES = 4u << 20;

__global__ static void add_one(uint32_t *p, size_t n)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
		p[i] = p[i] + 1;
}

static int body(int sock, const void *arg)
{
	const size_t words = BYTES / 4;
	uint32_t *host, *at[16];
	int devices = 0;
	size_t wrong = 0;
	bool same = true;

	(void)sock;
	(void)arg;
	RT(cudaGetDeviceCount(&devices));
	devices = devices < 16 ? devices : 16;
	RT(cudaSetDevice(0));
	host = (uint32_t *)mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (host == MAP_FAILED)
		die("mmap");
	RT(cudaHostRegister(host, BYTES, cudaHostRegisterMapped | cudaHostRegisterPortable));
	for (size_t i = 0; i < words; i++)
		host[i] = (uint32_t)i;
	for (int d = 0; d < devices; d++) {
		RT(cudaSetDevice(d));
		RT(cudaHostGetDevicePointer((void **)&at[d], host, 0));
		same &= at[d] == at[0];
		/* With the first device's address, as the daemon does. */
		add_one<<<64, 256>>>(at[0], words);
		RT(cudaDeviceSynchronize());
	}
	for (size_t i = 0; i < words; i++)
		wrong += host[i] != (uint32_t)i + (uint32_t)devices;
	if (devices < 2) {
		printf("%-22s | one GPU here: another one's view of registered memory is not checked\n", "portable");
		return wrong ? 2 : 0;
	}
	fact("portable_address", "portable host memory has one address on all devices", same, "%d devices", devices);
	fact("portable_use", "every device reads and writes it there", !wrong, "%zu wrong words", wrong);
	return facts_failed;
}

int main(void)
{
	skip_without_gpu("portable");
	struct child c = start(body, NULL, 30);
	const int status = finish(&c, 30000);

	if (status != 0 && status != 1)
		die("portable: child ended with %d", status);
	return status;
}
