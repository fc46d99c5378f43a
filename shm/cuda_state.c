/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_state.c - what can be said about CUDA in this process without loading or starting it. */
#include "shm/cuda_state.h"

#include <dlfcn.h>
#include <stddef.h>

#define NOT_INITIALIZED 3   /* CUDA_ERROR_NOT_INITIALIZED */
#define MPS_ENABLED     133 /* CU_DEVICE_ATTRIBUTE_MPS_ENABLED */

/* Only if it is there already; the count that this takes is given back. */
static void *symbol(const char *name)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), *sym;

	if (!lib)
		return NULL;
	sym = dlsym(lib, name);
	dlclose(lib);
	return sym;
}

bool exl3_cuda_started(void)
{
	int (*get)(void **context);
	void *context = NULL;

	*(void **)&get = symbol("cuCtxGetCurrent");
	return get && get(&context) != NOT_INITIALIZED;
}

int exl3_cuda_in_mps(void)
{
	int (*get)(int *value, int attribute, int device);
	int value = 0;

	*(void **)&get = symbol("cuDeviceGetAttribute");
	return get && get(&value, MPS_ENABLED, 0) == 0 ? value != 0 : -1;
}
