/* SPDX-License-Identifier: Apache-2.0 */
/*
 * imports.cu - what a process can learn about memory that another one offers it: wrong handles, lengths,
 * the same memory twice, memory that was freed meanwhile.
 */
#include "facts.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

static const size_t BYTES = 8u << 20;

/* What the exporter sends: an IPC handle, the state of its memory, and a VMM fd beside the message. */
struct offer {
	cudaIpcMemHandle_t ipc;
	int vmm_ipc_error;     /* of cudaIpcGetMemHandle() on VMM memory */
	int pool_ipc_error;    /* and on memory of cudaMallocAsync() */
	int legacy[3];         /* CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: malloc, VMM, pool */
	int retain_error;      /* cuMemRetainAllocationHandle() on VMM memory */
	int reexport_error;    /* of what it gave */
	int private_export;    /* export of VMM memory that was made without a handle type */
	size_t range;          /* cuMemGetAddressRange() of an interior VMM pointer: bytes */
	size_t offset;         /* and how far behind its base */
};

typedef CUresult (*attr_fn)(void *, CUpointer_attribute, CUdeviceptr);
typedef CUresult (*range_fn)(CUdeviceptr *, size_t *, CUdeviceptr);
typedef CUresult (*retain_fn)(CUmemGenericAllocationHandle *, void *);

static void *sym(const char *name)
{
	return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
}

static int exporter(int sock, const void *arg)
{
	const struct driver d = driver_open();
	const attr_fn attr = (attr_fn)sym("cuPointerGetAttribute");
	const range_fn range = (range_fn)sym("cuMemGetAddressRange_v2");
	const retain_fn retain = (retain_fn)sym("cuMemRetainAllocationHandle");
	CUmemAllocationProp prop = vmm_prop();
	CUmemGenericAllocationHandle h, h2 = 0, h3;
	cudaIpcMemHandle_t drop;
	struct offer o = {};
	CUdeviceptr base = 0;
	char go;
	int fd = -1, fd2 = -1, fd3 = -1;
	void *p, *pool;

	(void)arg;
	RT(cudaMalloc(&p, BYTES));
	fill_words<<<64, 256>>>((uint64_t *)p, BYTES / 8);
	RT(cudaMallocAsync(&pool, BYTES, 0));
	CU(d.memCreate(&h, BYTES, &prop, 0));
	const CUdeviceptr v = vmm_map(&d, h, BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	fill_words<<<64, 256>>>((uint64_t *)v, BYTES / 8);
	RT(cudaDeviceSynchronize());
	RT(cudaIpcGetMemHandle(&o.ipc, p));
	o.vmm_ipc_error = cudaIpcGetMemHandle(&drop, (void *)v);
	o.pool_ipc_error = cudaIpcGetMemHandle(&drop, pool);
	cudaGetLastError();
	o.legacy[0] = o.legacy[1] = o.legacy[2] = 0;
	attr(&o.legacy[0], CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, (CUdeviceptr)p);
	attr(&o.legacy[1], CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, v);
	attr(&o.legacy[2], CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, (CUdeviceptr)pool);
	CU(d.memExport(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	o.retain_error = retain(&h2, (void *)(v + 4096));
	o.reexport_error = d.memExport(&fd2, h2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	if (range(&base, &o.range, v + 4096) == CUDA_SUCCESS)
		o.offset = (size_t)(v + 4096 - base);
	prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
	CU(d.memCreate(&h3, BYTES, &prop, 0));
	o.private_export = d.memExport(&fd3, h3, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	if (!send_msg(sock, &o, sizeof(o), fd2 >= 0 ? fd2 : fd))
		return 2;
	if (!recv_msg(sock, &go, 1, NULL, 15000))
		return 2;
	/* Early free, and somebody else's data where it was. */
	RT(cudaFree(p));
	CU(d.memUnmap(v, BYTES));
	CU(d.memRelease(h));
	for (int i = 0; i < 16; i++) {
		RT(cudaMalloc(&p, BYTES));
		RT(cudaMemset(p, 0x55, BYTES));
	}
	RT(cudaDeviceSynchronize());
	if (!send_msg(sock, "f", 1, -1))
		return 2;
	pause();
	return 0;
}

static unsigned long long wrong_words(const void *p)
{
	static unsigned long long *wrong;
	unsigned long long n = ~0ull;

	if (!wrong)
		RT(cudaMalloc((void **)&wrong, 8));
	RT(cudaMemset(wrong, 0, 8));
	count_wrong<<<64, 256>>>((const uint64_t *)p, BYTES / 8, wrong);
	if (cudaMemcpy(&n, wrong, 8, cudaMemcpyDeviceToHost) != cudaSuccess)
		return ~0ull;
	return n;
}

static int open_error(const cudaIpcMemHandle_t *h)
{
	void *p;
	const cudaError_t e = cudaIpcOpenMemHandle(&p, *h, cudaIpcMemLazyEnablePeerAccess);

	if (e == cudaSuccess)
		cudaIpcCloseMemHandle(p);
	cudaGetLastError();
	return e;
}

static int import_error(const struct driver *d, int fd)
{
	CUmemGenericAllocationHandle h;
	const CUresult r = d->memImport(&h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

	if (r == CUDA_SUCCESS)
		d->memRelease(h);
	return r;
}

static int importer(int sock, const void *arg)
{
	const struct driver d = driver_open();
	const range_fn range = (range_fn)sym("cuMemGetAddressRange_v2");
	const CUmemAllocationProp prop = vmm_prop();
	CUmemGenericAllocationHandle h, mine, again;
	const CUmemAccessDesc access = vmm_access(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	CUdeviceptr base = 0, at;
	cudaIpcMemHandle_t bad, own;
	struct offer o;
	size_t bytes = 0;
	char link[128] = "", path[64];
	struct stat st;
	void *p, *p2 = NULL, *q;
	uint64_t word = 0;
	int fd, own_fd;

	(void)arg;
	RT(cudaFree(0));
	if (!recv_msg(sock, &o, sizeof(o), &fd, 15000))
		return 2;

	/* IPC */
	memset(&bad, 0x5a, sizeof(bad));
	const int garbage = open_error(&bad);
	memset(&bad, 0, sizeof(bad));
	const int zero = open_error(&bad);
	bad = o.ipc;
	for (unsigned i = 0; i < sizeof(bad); i += 7)
		bad.reserved[i] ^= 0x41;
	const int bent = open_error(&bad);

	fact("ipc_wrong_handle", "a handle that is none is refused, and harms nothing",
	     garbage && zero && bent && cudaDeviceSynchronize() == cudaSuccess, "0x5a..: %s, zeroes: %s, changed: %s",
	     cudaGetErrorName((cudaError_t)garbage), cudaGetErrorName((cudaError_t)zero),
	     cudaGetErrorName((cudaError_t)bent));
	RT(cudaMalloc(&q, BYTES));
	RT(cudaIpcGetMemHandle(&own, q));
	const int self = open_error(&own);

	fact("ipc_own_handle", "a process cannot open its own handle", self != 0, "%s",
	     cudaGetErrorName((cudaError_t)self));
	RT(cudaIpcOpenMemHandle(&p, o.ipc, cudaIpcMemLazyEnablePeerAccess));
	const cudaError_t twice = cudaIpcOpenMemHandle(&p2, o.ipc, cudaIpcMemLazyEnablePeerAccess);

	fact("ipc_twice", "the same handle opens a second time at the same address, counted",
	     twice == cudaSuccess && p2 == p, "%s, %p and %p", cudaGetErrorName(twice), p, p2);
	if (twice == cudaSuccess)
		RT(cudaIpcCloseMemHandle(p2));
	const CUresult ranged = range(&base, &bytes, (CUdeviceptr)p);

	fact("ipc_range", "the importer can ask for base and length of what it opened",
	     ranged == CUDA_SUCCESS && base == (CUdeviceptr)p && bytes == BYTES, "%d: %zu bytes of %zu, %zd behind the base",
	     (int)ranged, bytes, BYTES, (ssize_t)((CUdeviceptr)p - base));
	fact("ipc_kinds", "only cudaMalloc memory has IPC handles, an attribute says so",
	     o.vmm_ipc_error && o.pool_ipc_error && o.legacy[0] && !o.legacy[1] && !o.legacy[2],
	     "VMM: %s, pool: %s; attribute %d %d %d", cudaGetErrorName((cudaError_t)o.vmm_ipc_error),
	     cudaGetErrorName((cudaError_t)o.pool_ipc_error), o.legacy[0], o.legacy[1], o.legacy[2]);

	/* VMM */
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (readlink(path, link, sizeof(link) - 1) < 0)
		strcpy(link, "?");
	fstat(fd, &st);
	fact("vmm_fd_kind", "an exported fd is a character device", S_ISCHR(st.st_mode), "%s, mode %o, device %u:%u",
	     link, (unsigned)st.st_mode, (unsigned)(st.st_rdev >> 8), (unsigned)(st.st_rdev & 255));
	fact("vmm_retain", "VMM memory can be exported from a pointer into it, if it was made for that",
	     !o.retain_error && !o.reexport_error && o.private_export, "retain %d, export %d; made without: %d",
	     o.retain_error, o.reexport_error, o.private_export);
	fact("vmm_range", "cuMemGetAddressRange of an interior pointer finds the mapping", o.range == BYTES && o.offset == 4096,
	     "%zu bytes, pointer %zu behind its base", o.range, o.offset);
	const int null_fd = open("/dev/null", O_RDWR), mem_fd = memfd_create("x", 0),
		  ctl_fd = open("/dev/nvidiactl", O_RDWR);

	if (ftruncate(mem_fd, BYTES) < 0)
		return 2;
	const int e0 = import_error(&d, null_fd), e1 = import_error(&d, mem_fd), e2 = import_error(&d, sock),
		  e3 = import_error(&d, ctl_fd), e4 = import_error(&d, 9999);

	fact("vmm_wrong_fd", "an fd that is none is refused, and harms nothing",
	     e0 && e1 && e2 && e3 && e4 && cudaDeviceSynchronize() == cudaSuccess,
	     "null %d, memfd %d, socket %d, nvidiactl %d, closed %d", e0, e1, e2, e3, e4);
	CU(d.memImport(&h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	CU(d.memAddressReserve(&at, 2 * BYTES, 0, 0, 0));
	CUresult longer = d.memMap(at, 2 * BYTES, 0, h, 0);

	if (longer == CUDA_SUCCESS) {
		longer = d.memSetAccess(at, 2 * BYTES, &access, 1);
		d.memUnmap(at, 2 * BYTES);
	}
	const CUresult behind = d.memMap(at, BYTES, BYTES, h, 0);

	const CUresult shorter = d.memMap(at, BYTES / 2, 0, h, 0);

	fact("vmm_length", "a mapping of another length than the allocation's is refused",
	     longer != CUDA_SUCCESS && behind != CUDA_SUCCESS && shorter != CUDA_SUCCESS,
	     "twice: %d, behind the end: %d, half: %d", (int)longer, (int)behind, (int)shorter);
	const CUdeviceptr v = vmm_map(&d, h, BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

	/* One's own memory, offered back. */
	CU(d.memCreate(&mine, BYTES, &prop, 0));
	const CUdeviceptr first = vmm_map(&d, mine, BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

	CU(d.memExport(&own_fd, mine, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	CU(d.memImport(&again, (void *)(uintptr_t)own_fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	const CUdeviceptr second = vmm_map(&d, again, BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

	word = 0x1234567890abcdefull;
	RT(cudaMemcpy((void *)(first + BYTES - 16), &word, 8, cudaMemcpyHostToDevice));
	word = 0;
	RT(cudaMemcpy(&word, (void *)(second + BYTES - 16), 8, cudaMemcpyDeviceToHost));
	fact("vmm_own", "one's own memory imports again as another handle; a word written here is read there",
	     word == 0x1234567890abcdefull, "handle %s, word %llx", again == mine ? "the same" : "another",
	     (unsigned long long)word);

	const unsigned long long before = wrong_words(p), vbefore = wrong_words((void *)v);

	if (!send_msg(sock, "r", 1, -1) || !recv_msg(sock, link, 1, NULL, 15000))
		return 2;
	const unsigned long long after = wrong_words(p), vafter = wrong_words((void *)v);

	fact("freed_early", "what the exporter frees stays as it was for who has it open", !before && !after && !vbefore && !vafter,
	     "wrong words: cudaMalloc %lld then %lld, VMM %lld then %lld", (long long)before, (long long)after,
	     (long long)vbefore, (long long)vafter);
	cudaIpcCloseMemHandle(p);
	const int reopened = open_error(&o.ipc);

	fact("freed_handle", "its handle does not open any more once it is closed", reopened != 0, "%s",
	     cudaGetErrorName((cudaError_t)reopened));
	return facts_failed;
}

int main(void)
{
	char byte;
	struct offer o;
	int fd;

	skip_without_gpu("imports");
	struct child e = start(exporter, NULL, 40), i = start(importer, NULL, 40);

	if (!recv_msg(e.fd, &o, sizeof(o), &fd, 20000) || !send_msg(i.fd, &o, sizeof(o), fd))
		die("imports: nothing from the exporter");
	if (recv_msg(i.fd, &byte, 1, NULL, 20000) && send_msg(e.fd, &byte, 1, -1) && recv_msg(e.fd, &byte, 1, NULL, 20000))
		send_msg(i.fd, &byte, 1, -1);
	const int status = finish(&i, 20000);

	kill_now(&e);
	if (status != 0 && status != 1)
		die("imports: the importer ended with %d", status);
	return status;
}
