/* SPDX-License-Identifier: Apache-2.0 */
/*
 * facts.h - what the fact programs share: reports, child processes with limits, the driver by dlopen.
 *
 * A fact program checks one behaviour of the driver that exl3-daemon builds on and prints one line
 * per statement: name, what docs/architecture.md says, what was seen, "holds" or "DOES NOT HOLD".
 * Exit: 0 all hold, 1 some do not, 2 the program itself failed, 77 skipped. The parent of every
 * program never touches CUDA, so that it can fork; every wait has a limit.
 */
#ifndef EXL3_TESTS_GPU_FACTS_H
#define EXL3_TESTS_GPU_FACTS_H

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int facts_failed;

/* One line of the report. */
__attribute__((format(printf, 4, 5))) static inline void fact(const char *name, const char *says,
							      bool holds, const char *fmt, ...)
{
	char seen[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(seen, sizeof(seen), fmt, ap);
	va_end(ap);
	printf("%-22s | says: %s | seen: %s | %s\n", name, says, seen,
	       holds ? "holds" : "DOES NOT HOLD");
	fflush(stdout);
	if (!holds)
		facts_failed = 1;
}

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	_exit(2);
}

#define CU(call)                                                                  \
	do {                                                                      \
		const CUresult r_ = (call);                                       \
		if (r_ != CUDA_SUCCESS)                                           \
			die("%s:%d: %s: %d", __FILE__, __LINE__, #call, (int)r_); \
	} while (0)
#define RT(call)                                                                                 \
	do {                                                                                     \
		const cudaError_t r_ = (call);                                                   \
		if (r_ != cudaSuccess)                                                           \
			die("%s:%d: %s: %s", __FILE__, __LINE__, #call, cudaGetErrorString(r_)); \
	} while (0)

static inline double now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1e3 + ts.tv_nsec * 1e-6;
}

static inline void sleep_ms(int ms)
{
	poll(NULL, 0, ms);
}

/* A child and the socket to it; it runs @fn, ends with its result, at the latest after @limit_s. */
struct child {
	pid_t pid;
	int fd;
};

static inline struct child start(int (*fn)(int fd, const void *arg), const void *arg,
				 unsigned limit_s)
{
	struct child c;
	int sv[2];

	fflush(stdout);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) < 0)
		die("socketpair: %s", strerror(errno));
	c.pid = fork();
	if (c.pid < 0)
		die("fork: %s", strerror(errno));
	if (c.pid == 0) {
		close(sv[0]);
		alarm(limit_s);
		_exit(fn(sv[1], arg));
	}
	close(sv[1]);
	c.fd = sv[0];
	return c;
}

/* Bytes, and one fd if @fd >= 0. */
static inline bool send_msg(int sock, const void *data, size_t bytes, int fd)
{
	struct iovec iov = {(void *)data, bytes};
	union {
		char buf[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} u = {};
	struct msghdr m = {};

	m.msg_iov = &iov;
	m.msg_iovlen = 1;
	if (fd >= 0) {
		m.msg_control = u.buf;
		m.msg_controllen = sizeof(u.buf);
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);

		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &fd, sizeof(int));
	}
	return sendmsg(sock, &m, MSG_NOSIGNAL) == (ssize_t)bytes;
}

/* Waits @limit_ms for a message of exactly @bytes; *fd is -1 if none came along. */
static inline bool recv_msg(int sock, void *data, size_t bytes, int *fd, int limit_ms)
{
	struct pollfd p = {sock, POLLIN, 0};
	struct iovec iov = {data, bytes};
	union {
		char buf[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} u = {};
	struct msghdr m = {};

	if (fd)
		*fd = -1;
	if (poll(&p, 1, limit_ms) <= 0)
		return false;
	m.msg_iov = &iov;
	m.msg_iovlen = 1;
	m.msg_control = u.buf;
	m.msg_controllen = sizeof(u.buf);
	if (recvmsg(sock, &m, MSG_CMSG_CLOEXEC) != (ssize_t)bytes)
		return false;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && fd)
			memcpy(fd, CMSG_DATA(c), sizeof(int));
	return true;
}

/* Exit status, or -signal; kills the child after @limit_ms and returns -SIGALRM. */
static inline int finish(struct child *c, int limit_ms)
{
	const double end = now_ms() + limit_ms;
	bool late = false;
	int status;

	while (waitpid(c->pid, &status, WNOHANG) == 0) {
		if (!late && now_ms() > end) {
			kill(c->pid, SIGKILL);
			late = true;
		}
		sleep_ms(1);
	}
	close(c->fd);
	c->pid = -1;
	if (late)
		return -SIGALRM;
	return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static inline void kill_now(struct child *c)
{
	kill(c->pid, SIGKILL);
	waitpid(c->pid, NULL, 0);
	close(c->fd);
	c->pid = -1;
}

/* Device nodes tell without CUDA whether to try at all. */
static inline void skip_without_gpu(const char *name)
{
	if (access("/dev/nvidiactl", F_OK) != 0) {
		printf("%-22s | skipped: no NVIDIA driver\n", name);
		exit(77);
	}
}

/* The driver API, opened at run time like the daemon does. */
struct driver {
	CUresult (*memCreate)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
			      unsigned long long);
	CUresult (*memRelease)(CUmemGenericAllocationHandle);
	CUresult (*memAddressReserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr,
				      unsigned long long);
	CUresult (*memAddressFree)(CUdeviceptr, size_t);
	CUresult (*memMap)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
			   unsigned long long);
	CUresult (*memUnmap)(CUdeviceptr, size_t);
	CUresult (*memSetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
	CUresult (*memExport)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
			      unsigned long long);
	CUresult (*memImport)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
	CUresult (*streamWait32)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
	CUresult (*streamWrite32)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
};

static inline struct driver driver_open(void)
{
	struct driver d;
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

	if (!lib)
		die("dlopen libcuda.so.1: %s", dlerror());
#define SYM(field, name)                                \
	do {                                            \
		*(void **)&d.field = dlsym(lib, name);  \
		if (!d.field)                           \
			die("libcuda has no %s", name); \
	} while (0)
	SYM(memCreate, "cuMemCreate");
	SYM(memRelease, "cuMemRelease");
	SYM(memAddressReserve, "cuMemAddressReserve");
	SYM(memAddressFree, "cuMemAddressFree");
	SYM(memMap, "cuMemMap");
	SYM(memUnmap, "cuMemUnmap");
	SYM(memSetAccess, "cuMemSetAccess");
	SYM(memExport, "cuMemExportToShareableHandle");
	SYM(memImport, "cuMemImportFromShareableHandle");
	SYM(streamWait32, "cuStreamWaitValue32_v2");
	SYM(streamWrite32, "cuStreamWriteValue32_v2");
#undef SYM
	return d;
}

static inline CUmemAllocationProp vmm_prop(void)
{
	CUmemAllocationProp p = {};

	p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	p.location.id = 0;
	return p;
}

static inline CUmemAccessDesc vmm_access(CUmemAccess_flags flags)
{
	CUmemAccessDesc a = {};

	a.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	a.location.id = 0;
	a.flags = flags;
	return a;
}

/* Maps @h; the address range and the mapping live as long as the process. */
static inline CUdeviceptr vmm_map(const struct driver *d, CUmemGenericAllocationHandle h,
				  size_t bytes, CUmemAccess_flags flags)
{
	const CUmemAccessDesc a = vmm_access(flags);
	CUdeviceptr p;

	CU(d->memAddressReserve(&p, bytes, 0, 0, 0));
	CU(d->memMap(p, bytes, 0, h, 0));
	CU(d->memSetAccess(p, bytes, &a, 1));
	return p;
}

#ifdef __CUDACC__
__device__ static inline uint64_t word_of(uint64_t i)
{
	uint64_t z = i * 0x9e3779b97f4a7c15ull + 0x1234567;

	return z ^ (z >> 29);
}

__global__ static void fill_words(uint64_t *p, uint64_t n)
{
	for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n;
	     i += (uint64_t)gridDim.x * blockDim.x)
		p[i] = word_of(i);
}

__global__ static void count_wrong(const uint64_t *p, uint64_t n, unsigned long long *wrong)
{
	unsigned long long bad = 0;

	for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n;
	     i += (uint64_t)gridDim.x * blockDim.x)
		bad += p[i] != word_of(i);
	if (bad)
		atomicAdd(wrong, bad);
}

__device__ static inline uint64_t device_ns(void)
{
	uint64_t t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}

/* Waits for *flag >= value, at most @limit_ms. The timer is slow: it is read now and then. */
__device__ static inline void wait_word(const volatile uint32_t *flag, uint32_t value,
					uint32_t limit_ms)
{
	const uint64_t end = device_ns() + limit_ms * 1000000ull;
	uint32_t spins = 0;

	while ((int32_t)(*flag - value) < 0)
		if (++spins % 256 == 0 && device_ns() > end)
			break;
}

__global__ static void wait_flag(const volatile uint32_t *flag, uint32_t value, uint32_t limit_ms)
{
	wait_word(flag, value, limit_ms);
}

__global__ static void illegal_access(void)
{
	*(volatile uint32_t *)0x10 = 1;
}

__global__ static void nothing(void)
{
}
#endif

#endif
