/* SPDX-License-Identifier: Apache-2.0 */
/* vmm_readonly.cu - an importer can make its read-only mapping writable, and then write for all. */
#include "facts.h"

static const size_t BYTES = 2u << 20;

static int owner(int sock, const void *arg)
{
	const struct driver d = driver_open();
	const CUmemAllocationProp prop = vmm_prop();
	CUmemGenericAllocationHandle h;
	uint32_t word;
	char go;
	int fd;

	(void)arg;
	RT(cudaFree(0));
	CU(d.memCreate(&h, BYTES, &prop, 0));
	const CUdeviceptr p = vmm_map(&d, h, BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

	RT(cudaMemset((void *)p, 0x11, BYTES));
	RT(cudaDeviceSynchronize());
	CU(d.memExport(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	if (!send_msg(sock, "f", 1, fd) || !recv_msg(sock, &go, 1, NULL, 15000))
		return 2;
	RT(cudaMemcpy(&word, (void *)p, 4, cudaMemcpyDeviceToHost));
	return send_msg(sock, &word, 4, -1) ? 0 : 2;
}

static int importer(int sock, const void *arg)
{
	const int fd = *(const int *)arg;
	const struct driver d = driver_open();
	const CUmemAccessDesc rw = vmm_access(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	CUmemGenericAllocationHandle h;

	RT(cudaFree(0));
	CU(d.memImport(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	const CUdeviceptr p = vmm_map(&d, h, BYTES, CU_MEM_ACCESS_FLAGS_PROT_READ);
	const CUresult r = d.memSetAccess(p, BYTES, &rw, 1);

	if (r == CUDA_SUCCESS) {
		RT(cudaMemset((void *)p, 0x22, 64));
		RT(cudaDeviceSynchronize());
	}
	return send_msg(sock, &r, sizeof(r), -1) ? 0 : 2;
}

int main(void)
{
	const char *says = "a read-only import can be made writable";
	CUresult r = CUDA_SUCCESS;
	uint32_t word = 0;
	char tag;
	int fd;

	skip_without_gpu("vmm_readonly");
	struct child o = start(owner, NULL, 30);

	if (!recv_msg(o.fd, &tag, 1, &fd, 15000) || fd < 0)
		die("no fd from the owner");
	struct child i = start(importer, &fd, 20);
	const bool ok = recv_msg(i.fd, &r, sizeof(r), NULL, 15000);

	finish(&i, 5000);
	send_msg(o.fd, "g", 1, -1);
	const bool ok2 = recv_msg(o.fd, &word, 4, NULL, 10000);

	finish(&o, 5000);
	fact("vmm_readonly", says, ok && ok2 && r == CUDA_SUCCESS && word == 0x22222222,
	     "cuMemSetAccess %d, owner then reads 0x%08x", ok ? (int)r : -1, word);
	return facts_failed;
}
