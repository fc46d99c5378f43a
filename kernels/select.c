/* SPDX-License-Identifier: Apache-2.0 */
/*
 * select.c - the backends of this installation, and which of them a name means.
 *
 * The CPU backend is part of the program. The CUDA backend is a plugin, exl3-cuda.so, so that one
 * binary serves machines with and without a GPU: it is looked for in $EXL3_BACKEND_DIR, beside the
 * program, and in ../lib/exl3-daemon from there; where this is part of a library, beside that and in exl3-daemon there.
 */
#include "kernels/backend.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PLUGIN "exl3-cuda.so"

/* In order of preference for "auto"; the plugin's place is filled by load_plugin(). */
const struct exl3_backend_ops *exl3_backends[3] = {&exl3_backend_cpu, NULL, NULL};

static struct exl3_error plugin_error;
static pthread_once_t plugin_once = PTHREAD_ONCE_INIT;

static bool try_plugin(const char *dir, const char *rest)
{
	char path[PATH_MAX + 64];
	const struct exl3_backend_ops *ops;
	const uint32_t *abi;
	void *so;

	if (snprintf(path, sizeof(path), "%s%s/" PLUGIN, dir, rest) >= (int)sizeof(path) ||
	    access(path, R_OK))
		return false;
	so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!so) {
		exl3_errf(&plugin_error, -ELIBBAD, "%s", dlerror());
		return true;
	}
	ops = dlsym(so, "exl3_backend_cuda");
	abi = dlsym(so, "exl3_backend_cuda_abi");
	if (!ops || !abi || *abi != EXL3_BACKEND_ABI) {
		exl3_errf(&plugin_error, -ELIBBAD, "%s was built for another version of this program", path);
		dlclose(so);
		return true;
	}
	exl3_backends[1] = exl3_backends[0];
	exl3_backends[0] = ops;
	return true;
}

/* A program that has us as a library may lie anywhere. */
static bool try_beside_library(void)
{
	char own[PATH_MAX];
	char *slash;
	Dl_info info;

	if (!dladdr(exl3_backends, &info) || !info.dli_fname || !realpath(info.dli_fname, own))
		return false;
	slash = strrchr(own, '/');
	if (slash)
		*slash = 0;
	return try_plugin(own, "") || try_plugin(own, "/exl3-daemon");
}

static void load_plugin(void)
{
	char exe[PATH_MAX];
	const char *dir = secure_getenv("EXL3_BACKEND_DIR");
	ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
	char *slash;

	exl3_errf(&plugin_error, -ENOENT, "not installed (" PLUGIN " was not found)");
	if ((dir && try_plugin(dir, "")) || try_beside_library())
		return;
	if (n < 0)
		return;
	exe[n] = 0;
	slash = strrchr(exe, '/');
	if (slash)
		*slash = 0;
	if (!try_plugin(exe, ""))
		try_plugin(exe, "/../lib/exl3-daemon");
}

const struct exl3_backend_ops *exl3_backend_find(const char *name)
{
	bool any = !name || !*name || !strcmp(name, "auto");

	pthread_once(&plugin_once, load_plugin);
	for (size_t i = 0; exl3_backends[i]; i++)
		if (any ? exl3_backends[i]->probe(NULL) > 0 : !strcmp(exl3_backends[i]->name, name))
			return exl3_backends[i];
	return NULL;
}

const char *exl3_backend_plugin_error(void)
{
	pthread_once(&plugin_once, load_plugin);
	return exl3_backends[1] ? NULL : plugin_error.text;
}
