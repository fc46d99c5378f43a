/* SPDX-License-Identifier: Apache-2.0 */
/* mps.h - starts and stops MPS control daemons with directories of their own, for the fact programs. */
#ifndef EXL3_TESTS_GPU_MPS_H
#define EXL3_TESTS_GPU_MPS_H

#include "facts.h"

#include <sys/stat.h>

struct mps {
	char dir[64]; /* pipe and log directory */
};

static inline void mps_env(const char *dir)
{
	setenv("CUDA_MPS_PIPE_DIRECTORY", dir, 1);
	setenv("CUDA_MPS_LOG_DIRECTORY", dir, 1);
}

/* Runs a shell command with @dir as MPS directory, at most 10 s; exit status. */
static inline int mps_shell(const char *dir, const char *command)
{
	char line[256];

	snprintf(line, sizeof(line),
		 "CUDA_MPS_PIPE_DIRECTORY=%s CUDA_MPS_LOG_DIRECTORY=%s timeout 10 sh -c '%s' "
		 "</dev/null >/dev/null 2>&1",
		 dir, dir, command);
	const int status = system(line);

	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static inline bool mps_start(struct mps *m, bool multiuser)
{
	strcpy(m->dir, "/tmp/exl3-facts-mps-XXXXXX");
	if (!mkdtemp(m->dir) || chmod(m->dir, 0777) < 0)
		die("mkdtemp: %s", strerror(errno));
	return mps_shell(m->dir, multiuser ? "nvidia-cuda-mps-control -d -multiuser-server"
					   : "nvidia-cuda-mps-control -d") == 0;
}

static inline void mps_stop(struct mps *m)
{
	char line[128];

	mps_shell(m->dir, "echo quit | nvidia-cuda-mps-control");
	snprintf(line, sizeof(line), "rm -rf %s", m->dir);
	if (system(line) != 0)
		fprintf(stderr, "mps: cannot remove %s\n", m->dir);
}

static inline void skip_without_mps(const char *name)
{
	skip_without_gpu(name);
	unsetenv("CUDA_MPS_PIPE_DIRECTORY");
	unsetenv("CUDA_MPS_LOG_DIRECTORY");
	if (system("command -v nvidia-cuda-mps-control >/dev/null 2>&1") != 0) {
		printf("%-22s | skipped: no nvidia-cuda-mps-control\n", name);
		exit(77);
	}
}

#endif
