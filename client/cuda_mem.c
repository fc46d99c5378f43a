/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_mem.c - GPU memory that client and daemon share: arenas of the daemon, allocations of the program.
 *
 * The only file that opens libcuda, and only when a program asks for GPU memory or a stream.
 */
#include "client/internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct exl3_cuda cuda;
static pthread_once_t cuda_once = PTHREAD_ONCE_INIT;
static struct exl3_error cuda_missing; /* code 0: there is a driver */

static void cuda_open(void)
{
	static const struct {
		const char *name;
		size_t offset;
	} want[] = {
#define WANT(member, name, params) {name, offsetof(struct exl3_cuda, member)},
		EXL3_CU_FUNCTIONS(WANT)
#undef WANT
	};
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	exl3_cu_result r;

	if (!lib) {
		exl3_errf(&cuda_missing, -ENODEV, "no CUDA driver here: %s", dlerror());
		return;
	}
	for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
		void *fn = dlsym(lib, want[i].name);

		if (!fn) {
			exl3_errf(&cuda_missing, -ENODEV,
				  "the CUDA driver has no %s: a newer one is needed", want[i].name);
			return;
		}
		memcpy((char *)&cuda + want[i].offset, &fn, sizeof(fn));
	}
	r = cuda.init(0);
	if (r)
		exl3_errf(&cuda_missing, -ENODEV, "cuInit failed with %d: is there a GPU?", r);
}

int exl3_cuda_get(const struct exl3_cuda **ret)
{
	pthread_once(&cuda_once, cuda_open);
	if (cuda_missing.code)
		return exl3_errf(exl3_client_err(), cuda_missing.code, "%s", cuda_missing.text);
	*ret = &cuda;
	return 0;
}

/* Errors after which every call of this process's context fails: its own fault, or that of another client of
 * its MPS server, or that server's end. */
static bool context_lost(exl3_cu_result r)
{
	static const int lost[] = {700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 806, 810};

	for (size_t i = 0; i < sizeof(lost) / sizeof(lost[0]); i++) {
		if ((int)r == lost[i])
			return true;
	}
	return false;
}

int exl3_cuda_errf(exl3_cu_result r, const char *what)
{
	const char *text = NULL;

	if (!r)
		return 0;
	cuda.error_string(r, &text);
	if (context_lost(r))
		return exl3_errf(exl3_client_err(), -ENOTRECOVERABLE,
				 "%s: %s: CUDA is lost to this process, by a fault of its own or of another client of its "
				 "MPS server; a new process can go on",
				 what, text ? text : "unknown CUDA error");
	return exl3_errf(exl3_client_err(), r == EXL3_CU_ERROR_OUT_OF_MEMORY ? -ENOMEM : -EIO,
			 "%s: %s", what, text ? text : "unknown CUDA error");
}

int exl3_cuda_context(const struct exl3_cuda **ret, void **ctx)
{
	int e = exl3_cuda_get(ret);

	if (e < 0)
		return e;
	*ctx = NULL;
	if (cuda.ctx_get_current(ctx) || !*ctx)
		return exl3_errf(exl3_client_err(), -EINVAL,
				 "this thread has no CUDA context: make one current first, as "
				 "cudaFree(0) does");
	return 0;
}

/* "cuda:GPU-xxxxxxxx-xxxx-...", as the daemon wants a device named; @text holds 46 bytes. */
static int device_name(exl3_cu_device dev, char *text)
{
	struct exl3_cu_uuid uuid;
	char *p = text + sprintf(text, "cuda:GPU-");
	int e = exl3_cuda_errf(cuda.device_get_uuid(&uuid, dev), "cuDeviceGetUuid");

	for (int i = 0; e == 0 && i < 16; i++)
		p += sprintf(p, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
			     uuid.bytes[i]);
	return e;
}

/* ---- arenas in GPU memory ---- */

struct mapping {
	exl3_cu_handle handle;
	exl3_cu_ptr ptr;
	size_t bytes;
	bool imported, mapped;
};

static void mapping_fini(struct mapping *m)
{
	if (m->mapped)
		cuda.unmap(m->ptr, m->bytes);
	if (m->ptr)
		cuda.unreserve(m->ptr, m->bytes);
	if (m->imported)
		cuda.release(m->handle);
	*m = (struct mapping){0};
}

static int mapping_init(struct mapping *m, int fd, size_t bytes, exl3_cu_device dev)
{
	const struct exl3_cu_access access = {
		.location_type = EXL3_CU_LOCATION_DEVICE,
		.location_id = dev,
		.flags = EXL3_CU_ACCESS_READWRITE,
	};
	int e = exl3_cuda_errf(
		cuda.import_handle(&m->handle, (void *)(uintptr_t)fd, EXL3_CU_HANDLE_FD),
		"arena: cuMemImportFromShareableHandle");

	if (e < 0)
		return e;
	m->imported = true;
	m->bytes = bytes;
	e = exl3_cuda_errf(cuda.reserve(&m->ptr, bytes, 0, 0, 0), "arena: cuMemAddressReserve");
	if (e == 0)
		e = exl3_cuda_errf(cuda.map(m->ptr, bytes, 0, m->handle, 0), "arena: cuMemMap");
	if (e < 0)
		return e;
	m->mapped = true;
	return exl3_cuda_errf(cuda.set_access(m->ptr, bytes, &access, 1), "arena: cuMemSetAccess");
}

void exl3_offer_fini(struct exl3_arena *a)
{
	struct mapping m = {.handle = a->cu_handle,
			    .ptr = (exl3_cu_ptr)(uintptr_t)a->base,
			    .bytes = a->bytes,
			    .imported = true,
			    .mapped = true};

	if (a->kind == EXL3_ARENA_DEVICE)
		mapping_fini(&m);
	for (unsigned i = 0; a->offer && i < a->offer->nr_fds; i++)
		exl3_closep(&a->offer->fds[i]);
	free(a->offer);
	a->offer = NULL;
}

void exl3_offer_fill(const struct exl3_arena *a, Exl3__RegisterBuffer *body)
{
	struct exl3_offer *o = a->offer;

	if (o->nr_fds == 0) {
		body->ipc.data = (uint8_t *)o->ipc.reserved;
		body->ipc.len = sizeof(o->ipc);
	}
	body->fd_bytes = o->fd_bytes;
	body->n_fd_bytes = o->nr_fds;
	body->offset = o->offset;
	body->bytes = a->bytes;
	body->device = o->device;
}

static int check_arena_reply(const Exl3__ArenaReply *r, uint64_t bytes)
{
	if (!r->buffer || r->buffer > UINT16_MAX || r->bytes < bytes)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "arena: the daemon answered with buffer %u of %llu bytes", r->buffer,
				 (unsigned long long)r->bytes);
	return 0;
}

/* One that has only its offer yet. */
static struct exl3_arena *arena_alloc(void)
{
	struct exl3_arena *a = calloc(1, sizeof(*a));

	if (!a)
		return NULL;
	a->kind = EXL3_ARENA_REGISTERED;
	a->offer = calloc(1, sizeof(*a->offer));
	if (a->offer)
		return a;
	free(a);
	return NULL;
}

static void arena_dropp(struct exl3_arena **a)
{
	if (*a)
		exl3_offer_fini(*a);
	free(*a);
}

int exl3_arena_new_device(struct exl3_client *c, size_t bytes, struct exl3_arena **ret)
{
	Exl3__CreateArena body = EXL3__CREATE_ARENA__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	exl3_auto(arena_dropp) struct exl3_arena *a = arena_alloc();
	const struct exl3_cuda *cu;
	struct mapping m = {0};
	exl3_cu_device dev;
	void *ctx;
	int e;

	if (!a)
		return exl3_errf(exl3_client_err(), -ENOMEM, "arena: out of memory");
	e = exl3_cuda_context(&cu, &ctx);
	if (e == 0)
		e = exl3_cuda_errf(cu->ctx_get_device(&dev), "arena: cuCtxGetDevice");
	if (e == 0)
		e = device_name(dev, a->offer->device);
	if (e < 0)
		return e;
	body.bytes = bytes;
	body.where = EXL3__WHERE__WHERE_DEVICE;
	body.device = a->offer->device;
	req.body_case = EXL3__REQUEST__BODY_CREATE_ARENA;
	req.create_arena = &body;
	e = exl3_client_call(c, &req, EXL3__REPLY__BODY_ARENA, EXL3_CALL_TIMEOUT_NS, &reply,
			     a->offer->fds, 1);
	if (e < 0)
		return e;
	a->offer->nr_fds = 1;
	a->offer->fd_bytes[0] = reply->arena->bytes;
	e = check_arena_reply(reply->arena, bytes);
	if (e < 0)
		return e;
	e = mapping_init(&m, a->offer->fds[0], reply->arena->bytes, dev);
	if (e < 0) {
		mapping_fini(&m);
		exl3_arena_tell_free(c, reply->arena->buffer);
		return e;
	}
	a->kind = EXL3_ARENA_DEVICE;
	a->buffer = reply->arena->buffer;
	a->cu_handle = m.handle;
	a->base = (char *)(uintptr_t)m.ptr;
	a->bytes = m.bytes;
	exl3_arena_add(c, a);
	*ret = exl3_take_ptr(&a);
	return 0;
}

/* ---- memory of the program ---- */

/* @base: of what is offered. */
static int offer_ipc(struct exl3_offer *o, exl3_cu_ptr ptr, exl3_cu_ptr *base)
{
	size_t bytes;
	int e = exl3_cuda_errf(cuda.address_range(base, &bytes, ptr), "memory: cuMemGetAddressRange");

	return e < 0 ? e : exl3_cuda_errf(cuda.ipc_get(&o->ipc, *base), "memory: cuIpcGetMemHandle");
}

/* One fd per mapping: PyTorch's expandable segments are many of them side by side. */
static int offer_vmm(struct exl3_offer *o, exl3_cu_ptr ptr, size_t bytes, exl3_cu_ptr *base)
{
	exl3_cu_ptr at = ptr, start;
	exl3_cu_handle handle;
	size_t size;
	int e;

	while (at < ptr + bytes) {
		if (o->nr_fds == EXL3_FDS_MAX)
			return exl3_errf(exl3_client_err(), -E2BIG,
					 "memory: %zu bytes lie in more than %u allocations: use an "
					 "arena, or register them in parts",
					 bytes, EXL3_FDS_MAX);
		if (cuda.address_range(&start, &size, at) || cuda.retain(&handle, (void *)(uintptr_t)at))
			return exl3_errf(exl3_client_err(), -EINVAL,
					 "memory: %p is neither cudaMalloc nor VMM memory (a pool's?): "
					 "use exl3_arena_new_device()",
					 (void *)(uintptr_t)at);
		e = cuda.export_handle(&o->fds[o->nr_fds], handle, EXL3_CU_HANDLE_FD, 0);
		cuda.release(handle);
		if (e)
			return exl3_errf(exl3_client_err(), -EINVAL,
					 "memory: the allocation at %p was made without "
					 "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, so it cannot be "
					 "shared: use exl3_arena_new_device()",
					 (void *)(uintptr_t)at);
		if (o->nr_fds == 0)
			*base = start;
		o->fd_bytes[o->nr_fds++] = size;
		at = start + size;
	}
	return 0;
}

static int make_offer(struct exl3_arena *a, exl3_cu_ptr ptr)
{
	exl3_cu_ptr base = 0;
	exl3_cu_device dev;
	int legacy = 0, ordinal, e;

	/* Fail for a pointer that CUDA does not know at all. */
	if (cuda.pointer_attribute(&ordinal, EXL3_CU_POINTER_DEVICE_ORDINAL, ptr) ||
	    cuda.pointer_attribute(&legacy, EXL3_CU_POINTER_LEGACY_IPC, ptr) ||
	    cuda.device_get(&dev, ordinal))
		return exl3_errf(exl3_client_err(), -EINVAL, "memory: %p is no GPU memory",
				 (void *)(uintptr_t)ptr);
	e = device_name(dev, a->offer->device);
	if (e == 0)
		e = legacy ? offer_ipc(a->offer, ptr, &base) : offer_vmm(a->offer, ptr, a->bytes, &base);
	a->offer->offset = ptr - base;
	return e;
}

int exl3_memory_register(struct exl3_client *c, void *ptr, size_t bytes, struct exl3_arena **ret)
{
	exl3_auto(arena_dropp) struct exl3_arena *a = arena_alloc();
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__RegisterBuffer body = EXL3__REGISTER_BUFFER__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	/* The daemon wants 16-byte alignment; an operand that lies askew is refused when it is used. */
	exl3_cu_ptr at = (exl3_cu_ptr)(uintptr_t)ptr & ~(exl3_cu_ptr)15;
	const struct exl3_cuda *cu;
	void *ctx;
	int e;

	if (!a)
		return exl3_errf(exl3_client_err(), -ENOMEM, "memory: out of memory");
	if (!bytes || bytes > SIZE_MAX / 2)
		return exl3_errf(exl3_client_err(), -EINVAL, "memory: it needs a size");
	a->base = (char *)(uintptr_t)at;
	a->bytes = bytes + ((uintptr_t)ptr & 15);
	e = exl3_cuda_context(&cu, &ctx);
	if (e == 0)
		e = make_offer(a, at);
	if (e < 0)
		return e;
	exl3_offer_fill(a, &body);
	req.body_case = EXL3__REQUEST__BODY_REGISTER_BUFFER;
	req.register_buffer = &body;
	e = exl3_client_call_send(c, &req, EXL3__REPLY__BODY_ARENA, EXL3_CALL_TIMEOUT_NS, &reply,
				  a->offer->fds, a->offer->nr_fds);
	if (e == 0)
		e = check_arena_reply(reply->arena, a->bytes);
	if (e < 0)
		return e;
	a->buffer = reply->arena->buffer;
	exl3_arena_add(c, a);
	*ret = exl3_take_ptr(&a);
	return 0;
}
