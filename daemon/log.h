/* SPDX-License-Identifier: Apache-2.0 */
/* log.h - one line per event on stderr, with sd-daemon priorities under systemd. */
#ifndef EXL3_DAEMON_LOG_H
#define EXL3_DAEMON_LOG_H

#include "shm/util.h"

#include <stdbool.h>
#include <stdint.h>

/* Values are syslog priorities, which is what the journal expects. */
enum exl3_log_level {
	EXL3_LOG_ERROR = 3,
	EXL3_LOG_WARN = 4,
	EXL3_LOG_INFO = 6,
	EXL3_LOG_DEBUG = 7,
};

/**
 * exl3_log_init() - say who speaks; looks at $JOURNAL_STREAM once.
 * @who: "exl3-daemon" or the worker's name; a literal, never freed.
 */
void exl3_log_init(const char *who);
void exl3_log_set_level(enum exl3_log_level level);
bool exl3_log_wanted(enum exl3_log_level level);

/* One event, one line: control characters in it are replaced. Any thread, never waits for whoever reads
 * them; keeps errno. */
void exl3_log(enum exl3_log_level level, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

/* Zeroed; one for each place that a client can reach as often as it likes. One thread. */
struct exl3_log_limit {
	uint64_t since_ns;
	uint32_t lines, left_out;
};

/* May another line be written there? Some at once, then no more until the ten seconds are over; how many
 * were left out is said then. */
bool exl3_log_may(struct exl3_log_limit *limit, uint64_t now_ns);

/* What one client after another may cause without an end. */
#define exl3_log_limited(level, ...)                                                \
	do {                                                                        \
		static struct exl3_log_limit limit_;                                \
		if (exl3_log_wanted(level) && exl3_log_may(&limit_, exl3_now_ns())) \
			exl3_log(level, __VA_ARGS__);                               \
	} while (0)

#define exl3_err(...)  exl3_log(EXL3_LOG_ERROR, __VA_ARGS__)
#define exl3_warn(...) exl3_log(EXL3_LOG_WARN, __VA_ARGS__)
#define exl3_info(...) exl3_log(EXL3_LOG_INFO, __VA_ARGS__)
#define exl3_dbg(...)                                          \
	do {                                                   \
		if (exl3_log_wanted(EXL3_LOG_DEBUG))           \
			exl3_log(EXL3_LOG_DEBUG, __VA_ARGS__); \
	} while (0)

#endif
