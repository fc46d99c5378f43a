/* SPDX-License-Identifier: Apache-2.0 */
/* client.h - what the test clients of libexl3 share: an end with a sentence, the clock, their commands. */
#ifndef EXL3_TESTS_CLIENT_H
#define EXL3_TESTS_CLIENT_H

#include <exl3.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Status 1, with the sentence of the last call that failed. */
static inline _Noreturn void die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static inline void die(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, " (last error: %s)\n", exl3_last_error());
	exit(1);
}

static inline uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Tells the scenario how far we are. */
static inline void announce(const char *word)
{
	printf("%s\n", word);
	fflush(stdout);
}

/* Until the process is in that state of /proc/PID/stat. */
static inline void wait_for_state(pid_t pid, char want)
{
	char path[64], line[512];
	const char *end = NULL;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	do {
		FILE *f = fopen(path, "r");

		if (!f || !fgets(line, sizeof(line), f) || !(end = strrchr(line, ')')))
			die("%s", path);
		fclose(f);
	} while (end[2] != want);
}

/* Stops a worker while it sleeps, so that it looks at all channels when it goes on, not at those only that it had not
 * come to yet. The signal alone only says that it will stop. */
static inline void stop_asleep(pid_t worker)
{
	wait_for_state(worker, 'S');
	kill(worker, SIGSTOP);
	wait_for_state(worker, 'T');
}

/* The linear layer argv[3] of model argv[2]. @model: NULL, or takes the model. */
static inline void open_linear(struct exl3_client *client, char **argv, struct exl3_model **model,
			       struct exl3_module **mod, struct exl3_module_info *info)
{
	struct exl3_model *m;

	if (exl3_model_open(client, argv[2], &m) < 0 ||
	    exl3_module_open(m, argv[3], EXL3_KIND_LINEAR, mod) < 0)
		die("cannot open %s of %s", argv[3], argv[2]);
	exl3_module_get_info(*mod, info);
	if (model)
		*model = m;
}

struct session; /* of each client */
struct command {
	const char *name;
	void (*run)(struct session *s);
};

/* Runs the command of that name. Status 1 if there is none. */
static inline void run_command(const struct command *commands, size_t nr, const char *name,
			       struct session *s)
{
	for (size_t i = 0; i < nr; i++) {
		if (!strcmp(commands[i].name, name)) {
			commands[i].run(s);
			return;
		}
	}
	die("%s: unknown command", name);
}

#endif
