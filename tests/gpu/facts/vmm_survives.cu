/* SPDX-License-Identifier: Apache-2.0 */
/* vmm_survives.cu - an exported VMM allocation outlives its exporter while a CUDA-free process holds the fd. */
#include "facts.h"

static const uint64_t BYTES = 4ull << 30;

static int exporter(int sock, const void *fault)
{
	const struct driver d = driver_open();
	const CUmemAllocationProp prop = vmm_prop();
	CUmemGenericAllocationHandle h;
	int fd;

	RT(cudaFree(0));
	CU(d.memCreate(&h, BYTES, &prop, 0));
	const CUdeviceptr p = vmm_map(&d, h, BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

	fill_words<<<1024, 256>>>((uint64_t *)p, BYTES / 8);
	RT(cudaDeviceSynchronize());
	CU(d.memExport(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	if (!send_msg(sock, "f", 1, fd))
		return 2;
	if (fault) {
		illegal_access<<<1, 1>>>();
		const cudaError_t e = cudaDeviceSynchronize();

		send_msg(sock, &e, sizeof(e), -1);
	}
	pause();
	return 0;
}

struct outcome {
	double context_ms, map_ms;
	unsigned long long wrong;
};

static int importer(int sock, const void *arg)
{
	const int fd = *(const int *)arg;
	const struct driver d = driver_open();
	CUmemGenericAllocationHandle h;
	unsigned long long *wrong;
	struct outcome o;
	double t = now_ms();

	RT(cudaFree(0));
	o.context_ms = now_ms() - t;
	t = now_ms();
	CU(d.memImport(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	const CUdeviceptr p = vmm_map(&d, h, BYTES, CU_MEM_ACCESS_FLAGS_PROT_READ);

	o.map_ms = now_ms() - t;
	RT(cudaMalloc((void **)&wrong, 8));
	RT(cudaMemset(wrong, 0, 8));
	count_wrong<<<1024, 256>>>((const uint64_t *)p, BYTES / 8, wrong);
	RT(cudaMemcpy(&o.wrong, wrong, 8, cudaMemcpyDeviceToHost));
	send_msg(sock, &o, sizeof(o), -1);
	return 0;
}

static void round(const char *name, const char *says, bool fault)
{
	struct child c = start(exporter, fault ? "" : NULL, 30);
	cudaError_t e = cudaSuccess;
	struct outcome o;
	char tag;
	int fd;

	if (!recv_msg(c.fd, &tag, 1, &fd, 15000) || fd < 0) {
		kill_now(&c);
		fact(name, says, false, "no fd from the exporter");
		return;
	}
	if (fault && (!recv_msg(c.fd, &e, sizeof(e), NULL, 10000) || e == cudaSuccess))
		fprintf(stderr, "%s: the planted fault was not reported\n", name);
	kill_now(&c);
	struct child i = start(importer, &fd, 30);
	const bool ok = recv_msg(i.fd, &o, sizeof(o), NULL, 15000);
	const int status = finish(&i, 5000);

	close(fd);
	if (!ok || status)
		fact(name, says, false, "importer ended with %d", status);
	else
		fact(name, says, o.wrong == 0 && o.map_ms < 10,
		     "context %.0f ms, import and map of 4 GiB %.2f ms, %llu wrong words",
		     o.context_ms, o.map_ms, o.wrong);
}

int main(void)
{
	skip_without_gpu("vmm_survives");
	round("vmm_survives_kill",
	      "import and map 4 GiB in 0.3 to 4 ms, no word wrong, context 100 to 230 ms", false);
	round("vmm_survives_fault", "the same after a GPU fault of the exporter", true);
	return facts_failed;
}
