/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device_tensor.c - an unquantized tensor where the model's requests run, against its host file.
 *
 *       device_tensor SOCKET MODEL TENSOR
 *
 * Prints the device and whether the descriptor is memory of a GPU, which is imported then. Status 0: same bytes,
 * 3: refused (the sentence goes to standard error).
 */
#include "client/exl3.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The functions of the driver that are used here; each returns 0 if it is done. */
struct access {
	struct {
		int type, id;
	} location;
	int flags;
};
typedef unsigned long long address;
static struct {
	int (*init)(unsigned flags);
	int (*device)(int *dev, int ordinal);
	int (*retain)(void **ctx, int dev);
	int (*set_current)(void *ctx);
	int (*import)(address *handle, void *fd, int type);
	int (*reserve)(address *ptr, size_t bytes, size_t align, address at, address flags);
	int (*map)(address ptr, size_t bytes, size_t offset, address handle, address flags);
	int (*set_access)(address ptr, size_t bytes, const struct access *a, size_t nr);
	int (*copy)(void *to, address from, size_t bytes);
} cu;

static void open_driver(void)
{
	static const struct {
		const char *name;
		void *at;
	} want[] = {{"cuInit", &cu.init},
		    {"cuDeviceGet", &cu.device},
		    {"cuDevicePrimaryCtxRetain", &cu.retain},
		    {"cuCtxSetCurrent", &cu.set_current},
		    {"cuMemImportFromShareableHandle", &cu.import},
		    {"cuMemAddressReserve", &cu.reserve},
		    {"cuMemMap", &cu.map},
		    {"cuMemSetAccess", &cu.set_access},
		    {"cuMemcpyDtoH_v2", &cu.copy}};
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);

	for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
		void *fn = lib ? dlsym(lib, want[i].name) : NULL;

		if (!fn) {
			fprintf(stderr, "libcuda has no %s\n", want[i].name);
			exit(1);
		}
		memcpy(want[i].at, &fn, sizeof(fn));
	}
}

static void must(int r, const char *what)
{
	if (r) {
		fprintf(stderr, "%s: %d\n", what, r);
		exit(1);
	}
}

/* The whole allocation, copied to host memory. */
static unsigned char *import(int fd, size_t bytes, int ordinal)
{
	const struct access access = {{1, ordinal}, 1}; /* device memory; read only */
	unsigned char *copy = malloc(bytes);
	address handle, ptr = 0;
	void *ctx;
	int dev;

	open_driver();
	must(!copy || cu.init(0) || cu.device(&dev, ordinal) || cu.retain(&ctx, dev) || cu.set_current(ctx), "cuInit");
	must(cu.import(&handle, (void *)(intptr_t)fd, 1), "cuMemImportFromShareableHandle");
	must(cu.reserve(&ptr, bytes, 0, 0, 0), "cuMemAddressReserve");
	must(cu.map(ptr, bytes, 0, handle, 0), "cuMemMap");
	must(cu.set_access(ptr, bytes, &access, 1), "cuMemSetAccess");
	must(cu.copy(copy, ptr, bytes), "cuMemcpyDtoH");
	return copy;
}

int main(int argc, char **argv)
{
	struct exl3_device_tensor d;
	struct exl3_client *client;
	struct exl3_model *model;
	struct exl3_tensor host;
	unsigned char *bytes;

	if (argc != 4)
		return 2;
	if (exl3_connect(argv[1], "device_tensor", &client) < 0 || exl3_model_open(client, argv[2], &model) < 0 ||
	    exl3_tensor_open(model, argv[3], &host) < 0) {
		fprintf(stderr, "%s\n", exl3_last_error());
		return 1;
	}
	if (exl3_tensor_open_on_device(model, argv[3], &d) < 0) {
		fprintf(stderr, "%s\n", exl3_last_error());
		return 3;
	}
	printf("%s %s %llu of %llu bytes\n", d.device, d.on_gpu ? "gpu" : "host", (unsigned long long)d.bytes,
	       (unsigned long long)d.file_bytes);
	if (d.on_gpu)
		bytes = import(d.fd, d.file_bytes, atoi(strchr(d.device, ':') + 1));
	else
		bytes = mmap(NULL, d.file_bytes, PROT_READ, MAP_SHARED, d.fd, 0);
	if (bytes == MAP_FAILED || d.bytes != host.bytes || strcmp(d.dtype, host.dtype) || d.nr_dims != host.nr_dims ||
	    memcmp(d.shape, host.shape, sizeof(d.shape)) || memcmp(bytes + d.offset, host.data, d.bytes)) {
		fprintf(stderr, "it is not the same tensor\n");
		return 1;
	}
	if (!d.on_gpu && mmap(NULL, d.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, d.fd, 0) != MAP_FAILED) {
		fprintf(stderr, "it can be written\n");
		return 1;
	}
	close(d.fd);
	exl3_close(client);
	return 0;
}
