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

#define NEAREST_MAX 48u /* bytes of a word that is looked for */

/* Letters to insert, delete, change or swap with the next to make @b of @a; both at most NEAREST_MAX bytes. */
static unsigned distance(const char *a, const char *b)
{
	unsigned rows[3][NEAREST_MAX + 1], *before = rows[0], *last = rows[1], *row = rows[2];
	size_t len_a = strlen(a), len_b = strlen(b);

	for (unsigned j = 0; j <= len_b; j++)
		last[j] = j;
	for (size_t i = 1; i <= len_a; i++) {
		unsigned *free_row = before;

		row[0] = (unsigned)i;
		for (size_t j = 1; j <= len_b; j++) {
			unsigned best = last[j - 1] + (a[i - 1] != b[j - 1]);

			if (last[j] + 1 < best)
				best = last[j] + 1;
			if (row[j - 1] + 1 < best)
				best = row[j - 1] + 1;
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
			    before[j - 2] + 1 < best)
				best = before[j - 2] + 1;
			row[j] = best;
		}
		before = last;
		last = row;
		row = free_row;
	}
	return last[len_b];
}

const char *exl3_nearest(const char *word, const char *const *first, size_t nr, size_t stride)
{
	const char *ret = NULL;
	unsigned least = 0;

	if (strlen(word) > NEAREST_MAX)
		return NULL;
	for (size_t i = 0; i < nr; i++) {
		const char *name = *(const char *const *)((const char *)first + i * stride);
		unsigned d = strlen(name) > NEAREST_MAX ? NEAREST_MAX : distance(word, name);

		if (d > (strlen(name) + 2) / 3 || (ret && d >= least))
			continue;
		least = d;
		ret = name;
	}
	return ret;
}
