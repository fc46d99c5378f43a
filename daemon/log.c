/* SPDX-License-Identifier: Apache-2.0 */
/* log.c - one line per event on stderr, with sd-daemon priorities under systemd. */
#include "daemon/log.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define LINE_BYTES  1024
#define LIMIT_LINES 20u
#define LIMIT_NS    10000000000ull

static struct {
	const char *who;
	_Atomic int level;
	bool journal; /* stderr is the journal's stream: priorities in front, no name */
} state = {.who = "exl3-daemon", .level = EXL3_LOG_INFO};

/* The journal tells its readers' stream in $JOURNAL_STREAM; it counts only if stderr is that stream. */
static bool stderr_is_journal(void)
{
	const char *env = getenv("JOURNAL_STREAM");
	unsigned long long dev, ino;
	struct stat st;

	if (!env || sscanf(env, "%llu:%llu", &dev, &ino) != 2)
		return false;
	return fstat(STDERR_FILENO, &st) == 0 && st.st_dev == dev && st.st_ino == ino;
}

void exl3_log_init(const char *who)
{
	state.who = who;
	state.journal = stderr_is_journal();
}

void exl3_log_set_level(enum exl3_log_level level)
{
	atomic_store_explicit(&state.level, (int)level, memory_order_relaxed);
}

bool exl3_log_wanted(enum exl3_log_level level)
{
	return (int)level <= atomic_load_explicit(&state.level, memory_order_relaxed);
}

static const char *level_word(enum exl3_log_level level)
{
	switch (level) {
	case EXL3_LOG_ERROR:
		return "error: ";
	case EXL3_LOG_WARN:
		return "warning: ";
	case EXL3_LOG_DEBUG:
		return "debug: ";
	default:
		return "";
	}
}

void exl3_log(enum exl3_log_level level, const char *fmt, ...)
{
	struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
	int saved = errno, head, body;
	char line[LINE_BYTES];
	va_list ap;
	size_t len;
	ssize_t done;

	if (!exl3_log_wanted(level))
		return;
	if (state.journal)
		head = snprintf(line, sizeof(line), "<%d>", (int)level);
	else
		head = snprintf(line, sizeof(line), "%s: %s", state.who, level_word(level));
	va_start(ap, fmt);
	errno = saved; /* for %m */
	body = vsnprintf(line + head, sizeof(line) - (size_t)head, fmt, ap);
	va_end(ap);
	if (body < 0)
		body = 0;
	len = (size_t)head + (size_t)body;
	if (len > sizeof(line) - 2)
		len = sizeof(line) - 2;
	/* Names come from clients and checkpoints: they must not forge a line or move a cursor. */
	for (size_t i = (size_t)head; i < len; i++) {
		if ((unsigned char)line[i] < ' ' || line[i] == 0x7f)
			line[i] = '?';
	}
	line[len++] = '\n';
	/* One write, so that lines of supervisor and worker never mix. Whoever reads them may have stopped:
	 * a full pipe loses the line, for the loop must not wait for room in it. */
	if (poll(&out, 1, 0) != 0) {
		do {
			done = write(STDERR_FILENO, line, len);
		} while (done < 0 && errno == EINTR);
	}
	errno = saved;
}

bool exl3_log_may(struct exl3_log_limit *limit, uint64_t now_ns)
{
	if (!limit->since_ns || now_ns - limit->since_ns >= LIMIT_NS) {
		if (limit->left_out)
			exl3_warn("%u lines like the next one were left out", limit->left_out);
		*limit = (struct exl3_log_limit){.since_ns = now_ns};
	}
	if (limit->lines < LIMIT_LINES) {
		limit->lines++;
		return true;
	}
	limit->left_out++;
	return false;
}
