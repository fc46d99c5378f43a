/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_client.c - a client with CUDA, by libexl3 and the driver alone; exit 0: all went as exl3.h says, 77: no GPU.
 *
 * usage: gpu_client SOCKET MODEL MODULE COMMAND; with EXL3_TEST_MPS=1 in the environment it must find itself in
 * the MPS server of the daemon, else there must be none.
 *   arena ipc vmm   a request whose operands lie in such memory has the result of one in a host arena
 *   stream          calls in the order of a stream: copies before and after, long chains, a captured stream
 *   twice           the same memory registered twice, also beyond the life of one registration
 *   foreign         handles and descriptors that are none, wrong lengths, a handle of a process that has ended
 *   slab            every descriptor of the worker offered as a buffer: none that is its weights is taken
 *   freed           memory that is freed while requests use it
 *   never           a call whose stream does not come: others go on, the stream goes on after it
 *   many            64 channels, each with a stream, calls outstanding on all at once
 *   before in after prints "ready" and waits to be killed: calls queued behind a kernel that waits; that kernel
 *                   and one of the daemon's running; everything done
 *   stale           prints "ready", waits for its worker to be killed: the stream goes on, and at the next worker
 */
#include "client/internal.h"
#include "tests/integration/client.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAIT_NS 30000000000u
#define ENTRIES 64u
#define VMM     (2u << 20) /* granularity */

/* ---- the driver ---- */

struct cu_prop { /* CUmemAllocationProp */
	int type, handle_types, location_type, location_id;
	void *win32;
	unsigned char flags[8];
};

#define CU_FUNCTIONS(X)                                                                        \
	X(cuInit, (unsigned))                                                                  \
	X(cuDeviceGet, (int *, int))                                                           \
	X(cuDevicePrimaryCtxRetain, (void **, int))                                            \
	X(cuCtxSetCurrent, (void *))                                                           \
	X(cuMemAlloc_v2, (uint64_t *, size_t))                                                 \
	X(cuMemFree_v2, (uint64_t))                                                            \
	X(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *))                      \
	X(cuMemcpyDtoDAsync_v2, (uint64_t, uint64_t, size_t, void *))                          \
	X(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *))                            \
	X(cuStreamCreate, (void **, unsigned))                                                 \
	X(cuStreamSynchronize, (void *))                                                       \
	X(cuStreamQuery, (void *))                                                             \
	X(cuStreamBeginCapture_v2, (void *, int))                                              \
	X(cuStreamEndCapture, (void *, void **))                                               \
	X(cuModuleLoadData, (void **, const void *))                                           \
	X(cuModuleGetFunction, (void **, void *, const char *))                                \
	X(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
			   unsigned, void *, void **, void **))                                \
	X(cuMemCreate, (uint64_t *, size_t, const struct cu_prop *, unsigned long long))       \
	X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))     \
	X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))                  \
	X(cuMemSetAccess, (uint64_t, size_t, const struct exl3_cu_access *, size_t))           \
	X(cuIpcGetMemHandle, (struct exl3_cu_ipc *, uint64_t))

static struct {
#define MEMBER(name, params) int(*name) params;
	CU_FUNCTIONS(MEMBER)
} cu;

/* Waits @ms on the GPU. */
static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
			  ".visible .entry pause_ms(.param .u32 ms)\n{\n"
			  "	.reg .u64 %t<4>;\n	.reg .u32 %m;\n	.reg .pred %p;\n"
			  "	ld.param.u32 %m, [ms];\n	cvt.u64.u32 %t0, %m;\n"
			  "	mul.lo.u64 %t0, %t0, 1000000;\n	mov.u64 %t1, %globaltimer;\n"
			  "	add.u64 %t2, %t1, %t0;\n"
			  "again:\n	mov.u64 %t3, %globaltimer;\n	setp.lt.u64 %p, %t3, %t2;\n"
			  "	@%p bra again;\n	ret;\n}\n";
static void *pause_fn, *stream;

#define CU(call)                                                    \
	do {                                                        \
		int r_ = cu.call;                                   \
		if (r_)                                             \
			die("line %d: %s: %d", __LINE__, #call, r_); \
	} while (0)

static void open_cuda(void)
{
	void *lib, *mod, *ctx;
	int dev;

	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
	lib = dlopen("libcuda.so.1", RTLD_NOW);
	if (!lib) {
		printf("no CUDA driver\n");
		exit(77);
	}
#define LOAD(name, params)                                               \
	do {                                                             \
		void *fn_ = dlsym(lib, #name);                           \
		if (!fn_)                                                \
			die("libcuda has no %s", #name);                 \
		memcpy(&cu.name, &fn_, sizeof(fn_));                     \
	} while (0);
	CU_FUNCTIONS(LOAD)
	if (cu.cuInit(0)) {
		printf("no GPU\n");
		exit(77);
	}
	CU(cuDeviceGet(&dev, 0));
	CU(cuDevicePrimaryCtxRetain(&ctx, dev));
	CU(cuCtxSetCurrent(ctx));
	CU(cuStreamCreate(&stream, 1));
	CU(cuModuleLoadData(&mod, ptx));
	CU(cuModuleGetFunction(&pause_fn, mod, "pause_ms"));
}

static void pause_gpu(void *st, uint32_t ms)
{
	void *args[] = {&ms};

	CU(cuLaunchKernel(pause_fn, 1, 1, 1, 1, 1, 1, 0, st, args, NULL));
}

static uint64_t vmm_new(uint64_t at, size_t bytes)
{
	const struct cu_prop prop = {.type = 1, .handle_types = 1, .location_type = 1};
	const struct exl3_cu_access access = {.location_type = 1, .flags = 3};
	uint64_t h, p = at;

	CU(cuMemCreate(&h, bytes, &prop, 0));
	if (!at)
		CU(cuMemAddressReserve(&p, 2 * bytes, 0, 0, 0)); /* room for another one behind it */
	CU(cuMemMap(p, bytes, 0, h, 0));
	CU(cuMemSetAccess(p, bytes, &access, 1));
	return p;
}

/* ---- a session ---- */

struct session {
	char **argv;
	struct exl3_client *client;
	struct exl3_module *mod;
	struct exl3_channel *ch;
	struct exl3_module_info info;
	size_t nx, ny; /* bytes */
	float *x, *y, *want;
};

static void set_up(struct session *s)
{
	struct exl3_arena *arena;
	float *x, *y;

	open_linear(s->client, s->argv, NULL, &s->mod, &s->info);
	if (exl3_channel_new(s->client, ENTRIES, &s->ch) < 0)
		die("channel");
	s->nx = 4 * (size_t)s->info.k_logical;
	s->ny = 4 * (size_t)s->info.n_logical;
	if (exl3_arena_new(s->client, s->nx + s->ny + 4096, &arena) < 0)
		die("arena");
	x = exl3_arena_alloc(arena, s->nx);
	y = exl3_arena_alloc(arena, s->ny);
	s->x = malloc(s->nx);
	s->y = malloc(s->ny);
	s->want = malloc(s->ny);
	if (!x || !y || !s->x || !s->y || !s->want)
		die("out of memory");
	for (uint32_t i = 0; i < s->info.k_logical; i++)
		x[i] = s->x[i] = (float)(i % 13) / 13 - 0.5f;
	if (exl3_linear(s->ch, s->mod, arena, x, EXL3_F32, y, EXL3_F32, 1) < 0)
		die("linear in a host arena");
	memcpy(s->want, y, s->ny);
	exl3_arena_free(arena);
}

/* Puts x where it belongs and spoils y. */
static void put_x(struct session *s, uint64_t x, uint64_t y)
{
	memset(s->y, 0x7f, s->ny);
	CU(cuMemcpyHtoDAsync_v2(x, s->x, s->nx, stream));
	CU(cuMemcpyHtoDAsync_v2(y, s->y, s->ny, stream));
	CU(cuStreamSynchronize(stream));
}

static void expect_y(struct session *s, uint64_t y, const char *what)
{
	CU(cuMemcpyDtoHAsync_v2(s->y, y, s->ny, stream));
	CU(cuStreamSynchronize(stream));
	for (uint32_t i = 0; i < s->info.n_logical; i++) {
		float d = s->y[i] - s->want[i], scale = s->want[i] < 0 ? -s->want[i] : s->want[i];

		if (!(d <= 1e-3f * (scale + 1) && d >= -1e-3f * (scale + 1)))
			die("%s: y[%u] is %g, expected %g", what, i, (double)s->y[i], (double)s->want[i]);
	}
}

static void one_linear(struct session *s, exl3_ref x, exl3_ref y, const char *what)
{
	struct exl3_sqe *sqe = exl3_sq_get(s->ch);
	struct exl3_cqe cqe;
	int e;

	exl3_prep_linear(sqe, s->mod, x, EXL3_F32, y, EXL3_F32, 1);
	e = exl3_call(s->ch, &cqe);
	if (e < 0)
		die("%s: %d", what, e);
}

/* A request with x and y in @a, at the addresses @x and @y. */
static void check_memory(struct session *s, struct exl3_arena *a, uint64_t x, uint64_t y, const char *what)
{
	exl3_ref xr = exl3_arena_ref(a, (void *)x), yr = exl3_arena_ref(a, (void *)y);

	if (xr == EXL3_REF_NONE || yr == EXL3_REF_NONE)
		die("%s: no reference", what);
	put_x(s, x, y);
	one_linear(s, xr, yr, what);
	expect_y(s, y, what);
}

static struct exl3_arena *device_arena(struct session *s)
{
	struct exl3_arena *a;
	unsigned char *zero = malloc(1 << 20);

	if (exl3_arena_new_device(s->client, 3 << 20, &a) < 0)
		die("arena in GPU memory");
	if (exl3_arena_bytes(a) < 3 << 20)
		die("arena of %zu bytes", exl3_arena_bytes(a));
	CU(cuMemcpyDtoHAsync_v2(zero, (uint64_t)exl3_arena_ptr(a), 1 << 20, stream));
	CU(cuStreamSynchronize(stream));
	for (size_t i = 0; i < 1 << 20; i++)
		if (zero[i])
			die("byte %zu of a new arena is %u", i, zero[i]);
	free(zero);
	return a;
}

static void in_arena(struct session *s)
{
	struct exl3_arena *a = device_arena(s);
	uint64_t x = (uint64_t)exl3_arena_alloc(a, s->nx), y = (uint64_t)exl3_arena_alloc(a, s->ny);

	check_memory(s, a, x, y, "arena");
	exl3_arena_free(a);
}

static void in_ipc(struct session *s)
{
	struct exl3_arena *a;
	uint64_t p;

	CU(cuMemAlloc_v2(&p, 4 << 20));
	/* Interior, as PyTorch's allocator hands them out. */
	if (exl3_memory_register(s->client, (void *)(p + 1536), 1 << 20, &a) < 0)
		die("register cudaMalloc memory");
	check_memory(s, a, p + 2048, p + (512 << 10), "ipc");
	if (exl3_arena_ref(a, (void *)p) != EXL3_REF_NONE || exl3_arena_alloc(a, 16))
		die("more than was registered");
	exl3_arena_free(a);
	CU(cuMemFree_v2(p));
}

static void in_vmm(struct session *s)
{
	uint64_t p = vmm_new(0, VMM);
	struct exl3_arena *a;

	vmm_new(p + VMM, VMM);
	if (exl3_memory_register(s->client, (void *)(p + 4096), 2 * VMM - 8192, &a) < 0)
		die("register two VMM allocations");
	/* y lies across both. */
	check_memory(s, a, p + 8192, p + VMM - 512, "vmm");
	exl3_arena_free(a);
}

/* ---- streams ---- */

static void synchronize(const char *what)
{
	uint64_t end = exl3_now_ns() + WAIT_NS;
	int r;

	while ((r = cu.cuStreamQuery(stream)) == 600) /* not ready */
		if (exl3_now_ns() > end)
			die("%s: the stream does not go on", what);
	if (r)
		die("%s: the stream has failed: %d", what, r);
}

static void in_stream(struct session *s)
{
	struct exl3_arena *a = device_arena(s);
	uint64_t x = (uint64_t)exl3_arena_alloc(a, s->nx);
	uint64_t y = (uint64_t)exl3_arena_alloc(a, s->nx > s->ny ? s->nx : s->ny);
	exl3_ref xr = exl3_arena_ref(a, (void *)x), yr = exl3_arena_ref(a, (void *)y);
	struct exl3_cqe cqe;
	uint32_t call;
	void *graph;
	int e;

	/* The first call makes the words. */
	if (exl3_nop_stream(s->ch, stream, &call) < 0)
		die("nop_stream");
	synchronize("nop_stream");
	/* x arrives late, in the stream's order. */
	put_x(s, y, x);
	CU(cuMemcpyHtoDAsync_v2(y, s->x, s->nx, stream));
	pause_gpu(stream, 50);
	CU(cuMemcpyDtoDAsync_v2(x, y, s->nx, stream));
	if (exl3_linear_stream(s->ch, s->mod, xr, EXL3_F32, yr, EXL3_F32, 1, stream, &call) < 0)
		die("linear_stream");
	if (cu.cuStreamQuery(stream) != 600)
		die("linear_stream has waited for the stream");
	synchronize("linear_stream");
	expect_y(s, y, "linear_stream");
	if (exl3_stream_error(s->ch, NULL) || exl3_stream_result(s->ch, call, &cqe, WAIT_NS) < 0 || cqe.result)
		die("linear_stream has failed");
	/* Far more than the ring has room for. */
	for (uint32_t i = 0; i < 20 * ENTRIES; i++) {
		e = i % 2 ? exl3_nop_stream(s->ch, stream, &call) :
			    exl3_linear_stream(s->ch, s->mod, xr, EXL3_F32, yr, EXL3_F32, 1, stream, &call);
		if (e < 0)
			die("call %u of a chain: %d", i, e);
	}
	synchronize("a chain");
	expect_y(s, y, "a chain");
	if (exl3_stream_error(s->ch, NULL))
		die("a call of a chain has failed");
	/* A stream that is being captured. */
	CU(cuStreamBeginCapture_v2(stream, 2));
	e = exl3_nop_stream(s->ch, stream, &call);
	if (e != -EOPNOTSUPP || !strstr(exl3_last_error(), "plan"))
		die("a captured stream: %d", e);
	CU(cuStreamEndCapture(stream, &graph));
	if (exl3_nop_stream(s->ch, stream, &call) < 0)
		die("after a captured stream");
	synchronize("after a captured stream");
	exl3_arena_free(a);
}

static void never(struct session *s)
{
	struct exl3_channel *other;
	struct exl3_sqe *sqe = exl3_sq_get(s->ch);
	uint64_t start = exl3_now_ns();
	struct exl3_cqe cqe;
	uint32_t call;
	void *st;

	CU(cuStreamCreate(&st, 1));
	if (exl3_channel_new(s->client, ENTRIES, &other) < 0)
		die("channel");
	pause_gpu(stream, 1500);
	exl3_prep_nop(sqe);
	sqe->deadline_ns = start + 200000000u;
	if (exl3_stream_call(s->ch, stream, &call) < 0)
		die("stream_call");
	for (int i = 0; i < 20; i++) {
		uint32_t c;

		if (exl3_nop_stream(other, st, &c) < 0 || exl3_stream_result(other, c, &cqe, WAIT_NS) < 0 ||
		    cqe.result)
			die("another channel");
	}
	if (exl3_stream_result(s->ch, call, &cqe, WAIT_NS) < 0 || cqe.result != -ETIME)
		die("a call that is late ended with %d", cqe.result);
	if (exl3_now_ns() - start > 1300000000u)
		die("it ended when its stream had come, not at its deadline");
	synchronize("behind a call that was late");
	if (exl3_stream_error(s->ch, NULL) != -ETIME)
		die("exl3_stream_error()");
	if (exl3_nop_stream(s->ch, stream, &call) < 0 || exl3_stream_result(s->ch, call, &cqe, WAIT_NS) < 0 ||
	    cqe.result)
		die("the next call");
	exl3_channel_free(other);
}

static void many(struct session *s)
{
	enum { NR = EXL3_CHANNELS_MAX - 1 };
	struct exl3_arena *a = device_arena(s);
	uint64_t x = (uint64_t)exl3_arena_alloc(a, s->nx), y = (uint64_t)exl3_arena_alloc(a, NR * s->ny);
	exl3_ref xr = exl3_arena_ref(a, (void *)x);
	struct exl3_channel *ch[NR];
	void *st[NR];

	put_x(s, x, y);
	for (int i = 0; i < NR; i++) {
		CU(cuStreamCreate(&st[i], 1));
		if (exl3_channel_new(s->client, 16, &ch[i]) < 0)
			die("channel %d", i);
	}
	for (int round = 0; round < 4; round++)
		for (int i = 0; i < NR; i++) {
			exl3_ref yr = exl3_arena_ref(a, (void *)(y + (uint64_t)i * s->ny));

			if (exl3_nop_stream(ch[i], st[i], NULL) < 0 ||
			    exl3_linear_stream(ch[i], s->mod, xr, EXL3_F32, yr, EXL3_F32, 1, st[i], NULL) < 0)
				die("channel %d, round %d", i, round);
		}
	for (int i = 0; i < NR; i++) {
		CU(cuStreamSynchronize(st[i]));
		if (exl3_stream_error(ch[i], NULL))
			die("channel %d has failed", i);
		expect_y(s, y + (uint64_t)i * s->ny, "many");
		exl3_channel_free(ch[i]);
	}
	exl3_arena_free(a);
}

/* ---- what is refused ---- */

static int offer(struct session *s, const void *ipc, int fd, uint64_t fd_bytes, uint64_t offset, uint64_t bytes)
{
	Exl3__RegisterBuffer body = EXL3__REGISTER_BUFFER__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e;

	if (ipc) {
		body.ipc.data = (uint8_t *)(uintptr_t)ipc;
		body.ipc.len = 64;
	} else {
		body.fd_bytes = &fd_bytes;
		body.n_fd_bytes = 1;
	}
	body.offset = offset;
	body.bytes = bytes;
	req.body_case = EXL3__REQUEST__BODY_REGISTER_BUFFER;
	req.register_buffer = &body;
	e = exl3_client_call_send(s->client, &req, EXL3__REPLY__BODY_ARENA, EXL3_CALL_TIMEOUT_NS, &reply, &fd,
				  ipc ? 0 : 1);
	if (e < 0)
		return e;
	exl3_arena_tell_free(s->client, reply->arena->buffer);
	return 0;
}

static void refuse(int got, int want, const char *what)
{
	if (got != want)
		die("%s: %d, expected %d", what, got, want);
}

/* The handle of memory of a process that has ended. */
static void dead_handle(char *argv0, struct exl3_cu_ipc *ipc)
{
	int pipe_fd[2], status;
	pid_t pid;

	if (pipe(pipe_fd) < 0)
		die("pipe");
	pid = fork();
	if (pid == 0) {
		dup2(pipe_fd[1], 1);
		execl(argv0, argv0, "-", "-", "-", "handle", (char *)NULL);
		_exit(127);
	}
	if (pid < 0 || read(pipe_fd[0], ipc, sizeof(*ipc)) != (ssize_t)sizeof(*ipc) ||
	    waitpid(pid, &status, 0) != pid || status)
		die("no handle from another process");
	close(pipe_fd[0]);
	close(pipe_fd[1]);
}

static void print_handle(void)
{
	struct exl3_cu_ipc ipc;
	uint64_t p;

	CU(cuMemAlloc_v2(&p, 4 << 20));
	CU(cuIpcGetMemHandle(&ipc, p));
	if (write(1, &ipc, sizeof(ipc)) != (ssize_t)sizeof(ipc))
		die("write");
}

static void foreign(struct session *s)
{
	struct exl3_cu_ipc ipc, none;
	struct exl3_arena *a;
	uint64_t p, v = vmm_new(0, VMM);
	int fd = open("/dev/null", O_RDWR), ctl = open("/dev/nvidiactl", O_RDWR);

	memset(&none, 0x5a, sizeof(none));
	refuse(offer(s, &none, -1, 0, 0, 4096), -EINVAL, "bytes that are no handle");
	dead_handle(s->argv[0], &ipc);
	refuse(offer(s, &ipc, -1, 0, 0, 4096), -EINVAL, "a handle of a process that has ended");
	CU(cuMemAlloc_v2(&p, 4 << 20));
	CU(cuIpcGetMemHandle(&ipc, p));
	refuse(offer(s, &ipc, -1, 0, 0, 4 << 20), 0, "all of an allocation");
	refuse(offer(s, &ipc, -1, 0, 16, 4 << 20), -EINVAL, "past the end of an allocation");
	refuse(offer(s, &ipc, -1, 0, 1ull << 40, 16), -EINVAL, "far past the end");
	refuse(offer(s, &ipc, -1, 0, 8, 4096), -EINVAL, "an offset that is not aligned");
	refuse(offer(s, &ipc, -1, 0, 0, 0), -EINVAL, "nothing");
	refuse(offer(s, NULL, fd, VMM, 0, 4096), -EINVAL, "/dev/null");
	refuse(offer(s, NULL, ctl, VMM, 0, 4096), -EINVAL, "/dev/nvidiactl");
	refuse(offer(s, NULL, 0, VMM, 0, 4096), -EINVAL, "stdin");
	if (exl3_memory_register(s->client, (void *)v, VMM, &a) < 0)
		die("register VMM memory");
	refuse(offer(s, NULL, a->offer->fds[0], VMM, 0, VMM), 0, "a VMM allocation");
	refuse(offer(s, NULL, a->offer->fds[0], 2 * VMM, 0, 4096), -EINVAL, "twice the length of an allocation");
	refuse(offer(s, NULL, a->offer->fds[0], VMM, VMM, 4096), -EINVAL, "behind an allocation");
	refuse(offer(s, NULL, a->offer->fds[0], VMM - 4096, 0, 4096), -EINVAL, "a length that is none");
	exl3_arena_free(a);
	in_ipc(s);
	close(fd);
	close(ctl);
}

static void slab(struct session *s)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__Status body = EXL3__STATUS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	uint64_t bytes;
	int pidfd, found = 0;

	req.body_case = EXL3__REQUEST__BODY_STATUS;
	req.status = &body;
	if (exl3_client_call(s->client, &req, EXL3__REPLY__BODY_STATUS, EXL3_CALL_TIMEOUT_NS, &reply, NULL, 0) < 0)
		die("status");
	bytes = reply->status->devices[0]->slab_bytes; /* one model: one slab */
	pidfd = (int)syscall(SYS_pidfd_open, reply->status->worker_pid, 0);
	if (pidfd < 0)
		die("pidfd_open: %s", strerror(errno));
	for (int i = 0; i < 1024; i++) {
		int fd = (int)syscall(SYS_pidfd_getfd, pidfd, i, 0), e;

		if (fd < 0 && errno == EPERM) {
			printf("may not take the worker's descriptors\n");
			exit(77);
		}
		if (fd < 0)
			continue;
		e = offer(s, NULL, fd, bytes, 0, bytes);
		close(fd);
		if (e == 0)
			die("descriptor %d of the worker was taken as a buffer", i);
		if (e == -EPERM)
			found++;
	}
	if (!found)
		die("none of the worker's descriptors was known as its weights");
	close(pidfd);
}

/* ---- life and death of memory ---- */

static void twice(struct session *s)
{
	struct exl3_arena *a, *b;
	uint64_t p, x, y;

	CU(cuMemAlloc_v2(&p, 4 << 20));
	x = p + 4096;
	y = p + (1 << 20);
	if (exl3_memory_register(s->client, (void *)p, 4 << 20, &a) < 0 ||
	    exl3_memory_register(s->client, (void *)(p + 4096), 2 << 20, &b) < 0)
		die("register twice");
	check_memory(s, a, x, y, "first registration");
	check_memory(s, b, x, y, "second registration");
	exl3_arena_free(a);
	check_memory(s, b, x, y, "second registration without the first");
	if (exl3_memory_register(s->client, (void *)p, 4 << 20, &a) < 0)
		die("register again");
	exl3_arena_free(b);
	check_memory(s, a, x, y, "third registration without the second");
	exl3_arena_free(a);
	CU(cuMemFree_v2(p));
}

static void freed(struct session *s)
{
	const uint32_t rows = 2048, nr = 40;
	struct exl3_arena *a;
	struct exl3_cqe cqe;
	uint64_t p, bytes = rows * (uint64_t)(s->nx + s->ny);

	CU(cuMemAlloc_v2(&p, bytes));
	if (exl3_memory_register(s->client, (void *)p, bytes, &a) < 0)
		die("register");
	for (uint32_t i = 0; i < nr; i++) {
		struct exl3_sqe *sqe = exl3_sq_get(s->ch);

		exl3_prep_linear(sqe, s->mod, exl3_arena_ref(a, (void *)p), EXL3_F32,
				 exl3_arena_ref(a, (void *)(p + rows * s->nx)), EXL3_F32, rows);
	}
	if (exl3_submit(s->ch) != (int)nr)
		die("submit");
	/* The allocation first, then the registration, with most requests still to run. */
	CU(cuMemFree_v2(p));
	exl3_arena_free(a);
	for (uint32_t i = 0; i < nr; i++)
		if (exl3_wait(s->ch, &cqe, WAIT_NS) != 1 || cqe.result)
			die("request %u in memory that was freed: %d", i, cqe.result);
	in_ipc(s);
}

/* One of each kind of memory, and calls. */
static void killed(struct session *s)
{
	const char *when = s->argv[4];
	struct exl3_arena *a = device_arena(s), *ipc, *vmm;
	uint64_t x = (uint64_t)exl3_arena_alloc(a, s->nx), y = (uint64_t)exl3_arena_alloc(a, s->ny), p;
	exl3_ref xr = exl3_arena_ref(a, (void *)x), yr = exl3_arena_ref(a, (void *)y);

	CU(cuMemAlloc_v2(&p, 4 << 20));
	if (exl3_memory_register(s->client, (void *)p, 4 << 20, &ipc) < 0 ||
	    exl3_memory_register(s->client, (void *)vmm_new(0, VMM), VMM, &vmm) < 0)
		die("register");
	put_x(s, x, y);
	if (!strcmp(when, "before"))
		pause_gpu(stream, 20000); /* its calls never become ready */
	for (uint32_t i = 0; i < ENTRIES / 2; i++)
		if (exl3_linear_stream(s->ch, s->mod, xr, EXL3_F32, yr, EXL3_F32, 1, stream, NULL) < 0)
			die("linear_stream");
	if (strcmp(when, "before"))
		CU(cuStreamSynchronize(stream));
	if (!strcmp(when, "in"))
		pause_gpu(stream, 20000); /* a kernel of its own */
	announce("ready");
	pause();
}

static void stale(struct session *s)
{
	struct exl3_arena *a = device_arena(s);
	uint64_t x = (uint64_t)exl3_arena_alloc(a, s->nx), y = (uint64_t)exl3_arena_alloc(a, s->ny);
	exl3_ref xr = exl3_arena_ref(a, (void *)x), yr = exl3_arena_ref(a, (void *)y);
	uint32_t call;

	put_x(s, x, y);
	pause_gpu(stream, 1000);
	for (int i = 0; i < 8; i++)
		if (exl3_linear_stream(s->ch, s->mod, xr, EXL3_F32, yr, EXL3_F32, 1, stream, NULL) < 0)
			die("linear_stream");
	announce("ready");
	synchronize("without its worker");
	if (exl3_stream_error(s->ch, NULL) != -ESTALE)
		die("calls that no worker has run have no error");
	if (exl3_reconnect(s->client, WAIT_NS) < 0)
		die("reconnect");
	put_x(s, x, y);
	if (exl3_linear_stream(s->ch, s->mod, xr, EXL3_F32, yr, EXL3_F32, 1, stream, &call) < 0)
		die("at the next worker");
	synchronize("at the next worker");
	if (exl3_stream_error(s->ch, NULL))
		die("at the next worker");
	expect_y(s, y, "at the next worker");
}

int main(int argc, char **argv)
{
	static const struct command commands[] = {
		{"arena", in_arena}, {"ipc", in_ipc},	{"vmm", in_vmm},   {"stream", in_stream},
		{"twice", twice},    {"foreign", foreign}, {"slab", slab},    {"freed", freed},
		{"never", never},    {"many", many},	{"before", killed}, {"in", killed},
		{"after", killed},   {"stale", stale},
	};
	struct session s = {.argv = argv};

	if (argc != 5) {
		fprintf(stderr, "usage: gpu_client SOCKET MODEL MODULE COMMAND\n");
		return 2;
	}
	if (!strcmp(argv[4], "handle")) {
		open_cuda();
		print_handle();
		return 0;
	}
	/* In this order: connecting chooses the MPS server. */
	if (exl3_connect(argv[1], "gpu_client", &s.client) < 0)
		die("connect");
	if (exl3_mps(s.client) != (getenv("EXL3_TEST_MPS") != NULL))
		die("MPS: %d", exl3_mps(s.client));
	open_cuda();
	set_up(&s);
	run_command(commands, sizeof(commands) / sizeof(commands[0]), argv[4], &s);
	exl3_close(s.client);
	free(s.x);
	free(s.y);
	free(s.want);
	return 0;
}
