/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mps_client.cu - no fact, but the client that tests need: one with CUDA of its own, in whatever MPS server its
 * environment names. Prints "joined N" (1: in a server, 0: outside, -1: cannot tell) or "refused ERROR"; then
 * for each line of its standard input: "work" runs a kernel, "fault" makes an illegal access, "spin" enters a
 * kernel of two seconds; each is answered by a line with the CUDA error, 0 for none. Ends with its input.
 */
#include "facts.h"

#include "shm/cuda_state.c"

static int answer(const char *line)
{
	static uint32_t *flag;

	if (!flag && cudaMalloc((void **)&flag, 4) != cudaSuccess)
		return (int)cudaGetLastError();
	if (!strncmp(line, "fault", 5))
		illegal_access<<<1, 1>>>();
	else if (!strncmp(line, "spin", 4))
		wait_flag<<<1, 1>>>(flag, 1, 2000);
	else
		nothing<<<1, 1>>>();
	return (int)cudaDeviceSynchronize();
}

int main(void)
{
	char line[64];
	const cudaError_t e = cudaFree(0);

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (e != cudaSuccess) {
		printf("refused %d\n", (int)e);
		return 1;
	}
	printf("joined %d\n", exl3_cuda_in_mps());
	while (fgets(line, sizeof(line), stdin)) {
		if (!strncmp(line, "spin", 4))
			printf("spinning\n");
		printf("%d\n", answer(line));
	}
	return 0;
}
