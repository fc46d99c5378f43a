/* SPDX-License-Identifier: Apache-2.0 */
/* util.h - errors as code and sentence, and owners that clean up after themselves. */
#ifndef EXL3_SHM_UTIL_H
#define EXL3_SHM_UTIL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXL3_ERROR_TEXT_MAX 512

/* What went wrong: a negative errno for programs and one sentence for people. */
struct exl3_error {
	int code;
	char text[EXL3_ERROR_TEXT_MAX];
};

/**
 * exl3_errf() - fill @err and return @code, so that a failure is one statement.
 * @err:  may be NULL, then only the code is returned.
 * @code: negative errno.
 * @fmt:  printf format; %m prints the errno that was current at the call.
 * Thread safety: any thread; @err is the caller's own.
 */
int exl3_errf(struct exl3_error *err, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the sentence that is already in @err; returns its code. */
int exl3_err_prefix(struct exl3_error *err, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

/* Runs @fn on the variable's address when it leaves its scope. */
#define exl3_auto(fn) __attribute__((cleanup(fn)))

/* Hands ownership over: returns the old value and leaves NULL (or -1) behind. */
#define exl3_take_ptr(p)                                                                           \
	({                                                                                         \
		__typeof__(*(p)) taken_ = *(p);                                                    \
		*(p) = NULL;                                                                       \
		taken_;                                                                            \
	})

static inline int exl3_take_fd(int *fd)
{
	int taken = *fd;

	*fd = -1;
	return taken;
}

void exl3_closep(int *fd);  /* closes an fd >= 0 and keeps errno */
void exl3_freep(void *ptr); /* free() for exl3_auto: takes the address of the pointer */

/**
 * exl3_nearest() - the name of a table that @word was most likely meant to be.
 * @word:   what somebody typed.
 * @first:  the name of the first row; the others follow every @stride bytes.
 * @nr:     rows.
 * @stride: bytes from one row to the next.
 * Returns one of the names, or NULL: none is within a third of its length in letters that are missing, surplus,
 * swapped or wrong. Any thread.
 */
const char *exl3_nearest(const char *word, const char *const *first, size_t nr, size_t stride);

/* What enum exl3_detail means, as part of a sentence. Static text; NULL: none of its values. */
const char *exl3_detail_text(uint32_t detail);

/* Monotonic time in nanoseconds (CLOCK_MONOTONIC, through the vDSO). */
uint64_t exl3_now_ns(void);

#ifdef __cplusplus
}
#endif
#endif
