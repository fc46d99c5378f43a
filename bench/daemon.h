/* SPDX-License-Identifier: Apache-2.0 */
/* daemon.h - what benchmarks do with a daemon that they have started: wait for it, ask it, end it. */
#ifndef EXL3_BENCH_DAEMON_H
#define EXL3_BENCH_DAEMON_H

#include "bench/die.h"
#include "client/internal.h"

#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

/* Until it serves on @socket, and the model "bench" if it has one. The environment is left as it is. */
static inline void bench_daemon_wait(pid_t pid, const char *socket, bool model)
{
	struct exl3_client *c = NULL;
	struct exl3_model *m;
	int e = 0;

	for (int i = 0; exl3_connect_flags(socket, "bench", EXL3_CONNECT_NO_ENV, &c) < 0; i++) {
		if (i == 300 || waitpid(pid, NULL, WNOHANG) == pid)
			die("the daemon does not start: %s", exl3_last_error());
		usleep(100000);
	}
	for (int i = 0; model && (e = exl3_model_open(c, "bench", &m)) < 0; i++) {
		if (e != -EAGAIN || i == 600)
			die("model bench: %s", exl3_last_error());
		usleep(100000);
	}
	exl3_close(c);
}

static inline void bench_daemon_stop(pid_t pid)
{
	kill(pid, SIGTERM);
	waitpid(pid, NULL, 0);
}

/* Free it with exl3_reply_freep(). */
static inline Exl3__Reply *bench_daemon_status(struct exl3_client *c)
{
	Exl3__Status body = EXL3__STATUS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	Exl3__Reply *reply = NULL;

	req.body_case = EXL3__REQUEST__BODY_STATUS;
	req.status = &body;
	if (exl3_client_call(c, &req, EXL3__REPLY__BODY_STATUS, EXL3_CALL_TIMEOUT_NS, &reply, NULL, 0) < 0)
		die("status: %s", exl3_last_error());
	return reply;
}

static inline uint64_t bench_daemon_syscalls(struct exl3_client *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = bench_daemon_status(c);

	return reply->status->syscalls;
}

#endif
