/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mps_env.c - this process's CUDA and the daemon's MPS server: one and the same?
 *
 * CUDA reads CUDA_MPS_PIPE_DIRECTORY once, when it is started. So the variable is set as long as that has
 * not happened, by the thread that calls us; never by the watcher's, which nobody expects to change the
 * environment.
 */
#include "client/internal.h"

#include "shm/cuda_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VARIABLE "CUDA_MPS_PIPE_DIRECTORY"

/* In folders of one and the same daemon? */
static bool siblings(const char *a, const char *b)
{
	const char *slash = strrchr(a, '/');
	size_t len = slash ? (size_t)(slash - a) + 1 : 0;

	return len && strncmp(a, b, len) == 0;
}

void exl3_client_mps_learn(struct exl3_client *c, const char *pipe)
{
	pthread_mutex_lock(&c->list);
	snprintf(c->mps_pipe, sizeof(c->mps_pipe), "%s", pipe ? pipe : "");
	pthread_mutex_unlock(&c->list);
}

int exl3_client_mps_env(struct exl3_client *c)
{
	const char *now = getenv(VARIABLE);
	char pipe[sizeof(c->mps_pipe)];

	pthread_mutex_lock(&c->list);
	memcpy(pipe, c->mps_pipe, sizeof(pipe));
	pthread_mutex_unlock(&c->list);
	if (!pipe[0])
		return 0;
	if (now && strcmp(now, pipe) == 0)
		return exl3_cuda_started() && exl3_cuda_in_mps() == 0 ? -ENOTCONN : 1;
	if (exl3_cuda_started())
		return -ESTALE;
	/* Another server that somebody has chosen is left alone; one of ours is of the past. */
	if (c->flags & EXL3_CONNECT_NO_ENV || (now && *now && !siblings(pipe, now)))
		return -ENOTCONN;
	return setenv(VARIABLE, pipe, 1) < 0 ? -ENOMEM : 1;
}

int exl3_mps(struct exl3_client *c)
{
	struct exl3_error *err = exl3_client_err();
	int rc = exl3_client_check(c);

	if (rc < 0)
		return rc;
	rc = exl3_client_mps_env(c);
	switch (rc) {
	case -ESTALE:
		return exl3_errf(err, rc,
				 "CUDA was started in this process outside of the daemon's present MPS server, or in one that "
				 "has ended with a fault: start a new process (it connects before it starts CUDA, or has the "
				 "environment that 'exl3ctl env' prints)");
	case -ENOTCONN:
		return exl3_errf(err, rc,
				 "CUDA in this process is not in the daemon's MPS server: " VARIABLE
				 " is '%s', the daemon's is '%s'",
				 getenv(VARIABLE) ? getenv(VARIABLE) : "", c->mps_pipe);
	case -ENOMEM:
		return exl3_errf(err, rc, "out of memory");
	default:
		return rc;
	}
}
