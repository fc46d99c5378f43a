/* SPDX-License-Identifier: Apache-2.0 */
/* dlopen.c - a program without CUDA in its link line finds the driver at run time, or its absence. */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
	const char *says =
		"libcuda opened by dlopen alone counts devices; without it the program runs on";
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	int (*init)(unsigned), (*count)(int *), (*version)(int *);
	int n = 0, v = 0, r;

	if (!lib) {
		printf("%-22s | says: %s | seen: %s | holds\n", "dlopen", says, dlerror());
		return 0;
	}
	*(void **)&init = dlsym(lib, "cuInit");
	*(void **)&count = dlsym(lib, "cuDeviceGetCount");
	*(void **)&version = dlsym(lib, "cuDriverGetVersion");
	if (!init || !count || !version) {
		printf("%-22s | says: %s | seen: symbols missing | DOES NOT HOLD\n", "dlopen",
		       says);
		return 1;
	}
	r = init(0);
	if (!r)
		r = count(&n);
	if (!r)
		r = version(&v);
	printf("%-22s | says: %s | seen: result %d, %d devices, CUDA %d.%d | %s\n", "dlopen", says,
	       r, n, v / 1000, v % 1000 / 10, r == 0 && n > 0 ? "holds" : "DOES NOT HOLD");
	return !(r == 0 && n > 0);
}
