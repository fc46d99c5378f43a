/* SPDX-License-Identifier: Apache-2.0 */
/* map_cuda.c - mapped mode on a GPU: streams of channels, their ends, and host arenas that kernels read. */
#include "client/map.h"

#include <errno.h>

/* The GPU's primary context, current in this thread until leave(). */
struct entered {
	const struct exl3_cuda *cu;
	exl3_cu_device dev;
	void *before;
};

static int enter(int gpu, struct entered *in)
{
	void *ctx = NULL;
	int e = exl3_cuda_get(&in->cu);

	if (e < 0)
		return e;
	e = exl3_cuda_errf(in->cu->device_get(&in->dev, gpu), "mapped: cuDeviceGet");
	if (e == 0)
		e = exl3_cuda_errf(in->cu->primary_retain(&ctx, in->dev), "mapped: cuDevicePrimaryCtxRetain");
	if (e < 0)
		return e;
	in->cu->ctx_get_current(&in->before);
	in->cu->ctx_set_current(ctx);
	return 0;
}

static void leave(struct entered *in)
{
	in->cu->ctx_set_current(in->before);
	in->cu->primary_release(in->dev); /* the backend holds it as long as a model is there */
}

int exl3_map_cuda_stream(void **streams, int gpu, void **ret)
{
	struct entered in;
	int e = 0;

	if (gpu < 0 || gpu >= EXL3_MAPPED_GPUS)
		return -ENODEV;
	if (!streams[gpu]) {
		e = enter(gpu, &in);
		if (e < 0)
			return e;
		e = exl3_cuda_errf(in.cu->stream_create(&streams[gpu], EXL3_CU_STREAM_NON_BLOCKING),
				   "mapped: cuStreamCreate");
		leave(&in);
	}
	*ret = streams[gpu];
	return e;
}

void exl3_map_cuda_stream_free(void *stream, int gpu)
{
	struct entered in;

	if (!stream || enter(gpu, &in) < 0)
		return;
	in.cu->stream_synchronize(stream);
	in.cu->stream_destroy(stream);
	leave(&in);
}

int exl3_map_cuda_host(struct exl3_arena *a, int gpu)
{
	struct entered in;
	int e = enter(gpu, &in);

	if (e < 0)
		return e;
	e = exl3_cuda_errf(in.cu->host_register(a->base, a->bytes, EXL3_CU_HOST_PORTABLE | EXL3_CU_HOST_DEVICEMAP),
			   "mapped: cuMemHostRegister");
	if (e == 0) {
		e = exl3_cuda_errf(in.cu->host_device_pointer(&a->gpu_base, a->base, 0),
				   "mapped: cuMemHostGetDevicePointer");
		if (e < 0) {
			a->gpu_base = 0;
			in.cu->host_unregister(a->base);
		}
	}
	leave(&in);
	a->gpu = gpu;
	return e;
}

void exl3_map_cuda_unhost(struct exl3_arena *a)
{
	struct entered in;

	a->gpu_base = 0;
	if (enter(a->gpu, &in) < 0)
		return;
	in.cu->host_unregister(a->base);
	leave(&in);
}

void exl3_map_cuda_wait(int gpu)
{
	int mode = EXL3_CU_CAPTURE_MODE_RELAXED;
	struct entered in;

	if (enter(gpu, &in) < 0)
		return;
	/* A capture of another thread has no part in this. */
	in.cu->exchange_capture_mode(&mode);
	in.cu->ctx_synchronize();
	in.cu->exchange_capture_mode(&mode);
	leave(&in);
}

int exl3_map_cuda_after(void *stream, int gpu, void (*fn)(void *arg), void *arg)
{
	struct entered in;
	int e = enter(gpu, &in);

	if (e < 0)
		return e;
	e = exl3_cuda_errf(in.cu->launch_host(stream, fn, arg), "mapped: cuLaunchHostFunc");
	leave(&in);
	return e;
}

int exl3_map_cuda_idle(void *stream)
{
	const struct exl3_cuda *cu;
	exl3_cu_result r;

	if (exl3_cuda_get(&cu) < 0)
		return -EIO;
	r = cu->stream_query(stream);
	return r == EXL3_CU_ERROR_NOT_READY ? 0 : r ? -EIO : 1;
}

int exl3_map_cuda_capturing(void *stream, bool *ret)
{
	int status = EXL3_CU_CAPTURE_NONE, e;
	const struct exl3_cuda *cu;
	void *ctx;

	e = exl3_cuda_context(&cu, &ctx);
	if (e == 0)
		e = exl3_cuda_errf(cu->stream_capturing(stream, &status), "mapped: cuStreamIsCapturing");
	*ret = status != EXL3_CU_CAPTURE_NONE;
	return e;
}
