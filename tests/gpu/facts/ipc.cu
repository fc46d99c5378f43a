/* SPDX-License-Identifier: Apache-2.0 */
/* ipc.cu - an IPC handle names the base allocation; memory of a killed exporter stays readable. */
#include "facts.h"

static const size_t BYTES = 64u << 20, INSIDE = 20u << 20;

static int exporter(int sock, const void *arg)
{
	cudaIpcMemHandle_t h;
	uint8_t *p;

	(void)arg;
	RT(cudaMalloc((void **)&p, BYTES));
	fill_words<<<256, 256>>>((uint64_t *)p, BYTES / 8);
	RT(cudaDeviceSynchronize());
	RT(cudaIpcGetMemHandle(&h, p + INSIDE));
	if (!send_msg(sock, &h, sizeof(h), -1))
		return 2;
	pause();
	return 0;
}

static int importer(int sock, const void *arg)
{
	unsigned long long *wrong, result[2];
	uint64_t *p;
	char go;

	RT(cudaMalloc((void **)&wrong, 8));
	RT(cudaIpcOpenMemHandle((void **)&p, *(const cudaIpcMemHandle_t *)arg,
				cudaIpcMemLazyEnablePeerAccess));
	for (int i = 0; i < 2; i++) {
		RT(cudaMemset(wrong, 0, 8));
		count_wrong<<<256, 256>>>(p, BYTES / 8, wrong);
		RT(cudaMemcpy(&result[i], wrong, 8, cudaMemcpyDeviceToHost));
		if (!send_msg(sock, &result[i], 8, -1))
			return 2;
		if (i == 0 && !recv_msg(sock, &go, 1, NULL, 15000))
			return 2;
	}
	RT(cudaIpcCloseMemHandle(p));
	return 0;
}

int main(void)
{
	unsigned long long alive = 1, dead = 1;
	cudaIpcMemHandle_t h;

	skip_without_gpu("ipc");
	struct child e = start(exporter, NULL, 40);

	if (!recv_msg(e.fd, &h, sizeof(h), NULL, 15000))
		die("no handle from the exporter");
	struct child i = start(importer, &h, 40);
	const bool ok = recv_msg(i.fd, &alive, 8, NULL, 15000);

	kill_now(&e);
	sleep_ms(300);
	send_msg(i.fd, "g", 1, -1);
	const bool ok2 = recv_msg(i.fd, &dead, 8, NULL, 15000);
	const int status = finish(&i, 5000);

	fact("ipc_base", "a handle of an interior pointer opens at the base", ok && alive == 0,
	     "%llu of %zu words differ from the base's", ok ? alive : BYTES / 8, BYTES / 8);
	fact("ipc_killed", "memory of a killed exporter stays readable in the importer",
	     ok2 && dead == 0 && status == 0,
	     "%llu wrong words after SIGKILL, importer ended with %d", ok2 ? dead : BYTES / 8,
	     status);
	return facts_failed;
}
