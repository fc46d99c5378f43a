/* SPDX-License-Identifier: Apache-2.0 */
/* util.c - errors as code and sentence, and owners that clean up after themselves. */
#include "shm/util.h"

#include "shm/exl3_abi.h"

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

const char *exl3_detail_text(uint32_t detail)
{
	static const char *const text[EXL3_DETAIL_NR] = {
		[EXL3_DETAIL_OP] = "unknown operation or flag, or a reserved field is not zero",
		[EXL3_DETAIL_MODULE] = "no such module, or one of another kind",
		[EXL3_DETAIL_DTYPE] = "an element type that this operation does not take",
		[EXL3_DETAIL_ROWS] = "row count out of range",
		[EXL3_DETAIL_STRIDE] = "row stride too small or not a multiple of 16",
		[EXL3_DETAIL_ALIGN] = "an operand is not 16-byte aligned",
		[EXL3_DETAIL_BUFFER] = "no such buffer",
		[EXL3_DETAIL_BOUNDS] = "an operand reaches past the end of its buffer",
		[EXL3_DETAIL_TOPK] = "topk out of range",
		[EXL3_DETAIL_KERNEL] =
			"no kernel for this shape and type, or not the one asked for",
		[EXL3_DETAIL_MODEL] = "the module's model was unloaded",
		[EXL3_DETAIL_OVERLAP] = "the output overlaps an input",
		[EXL3_DETAIL_LIMIT] = "more rows than its tenant may have in flight (rows)",
		[EXL3_DETAIL_STREAM] = "the channel has no words for stream calls",
	};

	return detail < EXL3_DETAIL_NR ? text[detail] : NULL;
}
