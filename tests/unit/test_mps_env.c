/* SPDX-License-Identifier: Apache-2.0 */
/* test_mps_env.c - when libexl3 sets CUDA_MPS_PIPE_DIRECTORY, and what it says of a CUDA that is elsewhere. */
#include "tests/test.h"

#include "client/internal.h"
#include "shm/cuda_state.h"

/* In place of shm/cuda_state.c. */
static bool started;
static int in_mps = -1;

bool exl3_cuda_started(void)
{
	return started;
}

int exl3_cuda_in_mps(void)
{
	return in_mps;
}

#define OURS "/run/exl3-daemon/0.mps/7.0.2.0123456789abcdef"
#define OLD  "/run/exl3-daemon/0.mps/7.0.1.fedcba9876543210"

static const struct env_case {
	const char *pipe; /* the daemon's */
	const char *env;  /* before; NULL: not set */
	bool started;
	int in_mps;
	unsigned flags;
	int want;
	const char *after; /* NULL: not set */
} cases[] = {
	/* no server: nothing is touched */
	{"", NULL, false, -1, 0, 0, NULL},
	{"", "/elsewhere", false, -1, 0, 0, "/elsewhere"},
	{"", NULL, true, 0, 0, 0, NULL},
	/* CUDA not started: set, unless somebody has chosen */
	{OURS, NULL, false, -1, 0, 1, OURS},
	{OURS, "", false, -1, 0, 1, OURS},
	{OURS, OURS, false, -1, 0, 1, OURS},
	{OURS, OLD, false, -1, 0, 1, OURS},
	{OURS, "/elsewhere", false, -1, 0, -ENOTCONN, "/elsewhere"},
	{OURS, "/run/exl3-daemon/1.mps/7.0.1.1", false, -1, 0, -ENOTCONN, "/run/exl3-daemon/1.mps/7.0.1.1"},
	{OURS, NULL, false, -1, EXL3_CONNECT_NO_ENV, -ENOTCONN, NULL},
	{OURS, OLD, false, -1, EXL3_CONNECT_NO_ENV, -ENOTCONN, OLD},
	/* CUDA started: too late for anything */
	{OURS, OURS, true, 1, 0, 1, OURS},
	{OURS, OURS, true, -1, 0, 1, OURS},
	{OURS, OURS, true, 0, 0, -ENOTCONN, OURS},
	{OURS, OLD, true, 1, 0, -ESTALE, OLD},
	{OURS, NULL, true, 0, 0, -ESTALE, NULL},
};

static void variable(void **state)
{
	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		const struct env_case *t = &cases[i];
		struct exl3_client c = {.flags = t->flags};
		const char *after;
		int rc;

		pthread_mutex_init(&c.list, NULL);
		unsetenv("CUDA_MPS_PIPE_DIRECTORY");
		if (t->env)
			setenv("CUDA_MPS_PIPE_DIRECTORY", t->env, 1);
		started = t->started;
		in_mps = t->in_mps;
		exl3_client_mps_learn(&c, t->pipe);
		rc = exl3_client_mps_env(&c);
		after = getenv("CUDA_MPS_PIPE_DIRECTORY");
		if (rc != t->want || !after != !t->after || (after && strcmp(after, t->after) != 0))
			fail_msg("case %zu: %d and '%s', wanted %d and '%s'", i, rc,
				 after ? after : "(not set)", t->want, t->after ? t->after : "(not set)");
		pthread_mutex_destroy(&c.list);
	}
}

/* The daemon's next worker is in another server. */
static void next_generation(void **state)
{
	struct exl3_client c = {0};

	(void)state;
	pthread_mutex_init(&c.list, NULL);
	unsetenv("CUDA_MPS_PIPE_DIRECTORY");
	started = false;
	exl3_client_mps_learn(&c, OLD);
	assert_int_equal(exl3_client_mps_env(&c), 1);
	exl3_client_mps_learn(&c, OURS); /* the watcher: it leaves the environment alone */
	assert_string_equal(getenv("CUDA_MPS_PIPE_DIRECTORY"), OLD);
	assert_int_equal(exl3_mps(&c), 1);
	assert_string_equal(getenv("CUDA_MPS_PIPE_DIRECTORY"), OURS);
	started = true;
	in_mps = 1;
	exl3_client_mps_learn(&c, OLD);
	assert_int_equal(exl3_mps(&c), -ESTALE);
	assert_non_null(strstr(exl3_last_error(), "new process"));
	exl3_client_mps_learn(&c, NULL); /* a daemon of before */
	assert_int_equal(exl3_mps(&c), 0);
	pthread_mutex_destroy(&c.list);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(variable),
		test_case(next_generation),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
