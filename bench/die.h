/* SPDX-License-Identifier: Apache-2.0 */
/* die.h - the end of a benchmark that cannot go on: its name, a sentence, status 1. */
#ifndef EXL3_BENCH_DIE_H
#define EXL3_BENCH_DIE_H

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static inline _Noreturn void die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static inline void die(const char *fmt, ...)
{
	int saved = errno;
	va_list ap;

	fprintf(stderr, "%s: ", program_invocation_short_name);
	va_start(ap, fmt);
	errno = saved; /* for %m */
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(1);
}

#endif
