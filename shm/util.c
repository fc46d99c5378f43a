/* SPDX-License-Identifier: Apache-2.0 */
/* util.c - errors as code and sentence, and owners that clean up after themselves. */
#include "shm/util.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int exl3_errf(struct exl3_error *err, int code, const char *fmt, ...)
{
	int saved = errno;
	va_list ap;

	if (!err)
		return code;
	err->code = code;
	va_start(ap, fmt);
	errno = saved; /* for %m */
	vsnprintf(err->text, sizeof(err->text), fmt, ap);
	va_end(ap);
	errno = saved;
	return code;
}

int exl3_err_prefix(struct exl3_error *err, const char *fmt, ...)
{
	char old[EXL3_ERROR_TEXT_MAX];
	va_list ap;
	int n;

	if (!err)
		return 0;
	memcpy(old, err->text, sizeof(old));
	old[sizeof(old) - 1] = 0;
	va_start(ap, fmt);
	n = vsnprintf(err->text, sizeof(err->text), fmt, ap);
	va_end(ap);
	/* A prefix that fills the whole text leaves no room for the sentence: keep what fits. */
	if (n >= 0 && (size_t)n < sizeof(err->text))
		snprintf(err->text + n, sizeof(err->text) - (size_t)n, ": %s", old);
	return err->code;
}

void exl3_closep(int *fd)
{
	int saved = errno;

	if (*fd >= 0)
		close(*fd);
	*fd = -1;
	errno = saved;
}

void exl3_freep(void *ptr)
{
	void **p = ptr;

	free(*p);
	*p = NULL;
}

uint64_t exl3_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}
