/* SPDX-License-Identifier: Apache-2.0 */
/*
 * async.c - a well-behaved client of libexl3 that has many requests in flight.
 *
 * usage: async SOCKET MODEL MODULE COMMAND; exit status 0: all went as exl3.h says.
 *   order     pipelined requests complete in order; the same with poll() and exl3_fd()
 *   full      a full ring says so and works again after reaping
 *   deadline  a request whose time passes while it waits ends with -ETIME, others do not
 *   cancel    a request that has not started ends with -ECANCELED
 *   closed    a module that is closed with requests in flight
 *   greedy    sends 60 long requests, prints "holding", tells when its stdin ends how many were done by then
 *   small     three short requests, one after the other
 *   stale     prints "ready" and waits for its worker to be killed: one completion for each request
 */
#include "tests/integration/client.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#define WAIT_NS   100000000000u
#define FAR_NS    3600000000000u /* what no machine needs for it */
#define LONG_ROWS 1024u /* takes the device some time */
#define MOST_ROWS 4096u /* takes it more */
#define ENTRIES   64u

struct session {
	char **argv;
	struct exl3_client *client;
	struct exl3_model *model;
	struct exl3_module *mod;
	struct exl3_arena *arena;
	struct exl3_channel *ch;
	struct exl3_module_info info;
	exl3_ref x, y;
};

static void set_up(struct session *s)
{
	size_t x_bytes;

	if (exl3_connect(s->argv[1], "async", &s->client) < 0)
		die("connect");
	open_linear(s->client, s->argv, &s->model, &s->mod, &s->info);
	x_bytes = 4ull * MOST_ROWS * s->info.k_logical;
	if (exl3_arena_new(s->client, x_bytes + 4ull * MOST_ROWS * s->info.n_logical, &s->arena) <
		    0 ||
	    exl3_channel_new(s->client, ENTRIES, &s->ch) < 0)
		die("no arena or channel");
	s->x = exl3_arena_ref(s->arena, exl3_arena_ptr(s->arena));
	s->y = exl3_arena_ref(s->arena, (char *)exl3_arena_ptr(s->arena) + x_bytes);
}

static struct exl3_sqe *request(struct session *s, uint32_t rows, uint64_t user_data)
{
	struct exl3_sqe *sqe = exl3_sq_get(s->ch);

	if (!sqe)
		die("no entry for request %llu", (unsigned long long)user_data);
	exl3_prep_linear(sqe, s->mod, s->x, EXL3_F32, s->y, EXL3_F32, rows);
	sqe->user_data = user_data;
	return sqe;
}

static struct exl3_cqe take(struct session *s)
{
	struct exl3_cqe cqe;
	int r = exl3_wait(s->ch, &cqe, WAIT_NS);

	if (r != 1)
		die("exl3_wait: %d", r);
	return cqe;
}

static void expect(const struct exl3_cqe *cqe, uint64_t user_data, int result, const char *what)
{
	if (cqe->user_data != user_data || cqe->result != result)
		die("%s: completion %llu with result %d, expected %llu with %d", what,
		    (unsigned long long)cqe->user_data, cqe->result, (unsigned long long)user_data,
		    result);
}

static void submit(struct session *s, int count)
{
	int r = exl3_submit(s->ch);

	if (r != count)
		die("exl3_submit: %d, expected %d", r, count);
}

static void cmd_order(struct session *s)
{
	struct pollfd p = {.fd = exl3_fd(s->ch), .events = POLLIN};
	struct exl3_cqe cqe;
	uint64_t sent = 0, done = 0;

	if (p.fd < 0)
		die("no descriptor to poll");
	/* With exl3_wait(). */
	for (; done < 500; done++) {
		int n = 0;

		for (; sent < 500 && sent - done < 40; sent++, n++)
			request(s, 1 + sent % 7, sent);
		submit(s, n);
		cqe = take(s);
		expect(&cqe, done, 0, "order");
	}
	/* With poll(): the descriptor must become readable whenever something is there. */
	for (sent = done = 0; done < 300;) {
		int n = 0, r;

		for (; sent < 300 && sent - done < 3; sent++, n++)
			request(s, 1, sent);
		submit(s, n);
		if (poll(&p, 1, 60000) != 1)
			die("poll: nothing became readable, %llu of %llu done",
			    (unsigned long long)done, (unsigned long long)sent);
		exl3_fd_clear(s->ch);
		while ((r = exl3_peek(s->ch, &cqe)) == 1)
			expect(&cqe, done++, 0, "poll");
		if (r < 0)
			die("exl3_peek: %d", r);
	}
	if (exl3_wait(s->ch, &cqe, 0) != 0 || exl3_wait(s->ch, &cqe, 1000000) != 0)
		die("a completion that nobody asked for");
}

static void cmd_full(struct session *s)
{
	unsigned got = 0;
	struct exl3_sqe *sqe;
	struct exl3_cqe cqe;

	while (got <= 4 * ENTRIES && (sqe = exl3_sq_get(s->ch))) {
		exl3_prep_nop(sqe);
		sqe->user_data = got++;
	}
	if (got < ENTRIES || got > 2 * ENTRIES)
		die("a ring of %u gave %u entries", ENTRIES, got);
	if (strlen(exl3_last_error()) < 10)
		die("a full ring has no explanation");
	submit(s, (int)got);
	for (unsigned i = 0; i < got; i++) {
		cqe = take(s);
		expect(&cqe, i, 0, "full ring");
	}
	request(s, 1, 5);
	submit(s, 1);
	cqe = take(s);
	expect(&cqe, 5, 0, "after a full ring");
}

/* Completions of requests 0..n-1 in any order: refused, expired and cancelled ones overtake. */
static void take_all(struct session *s, unsigned n, int *results)
{
	bool seen[128] = {false};

	for (unsigned i = 0; i < n; i++) {
		struct exl3_cqe cqe = take(s);

		if (cqe.user_data >= n || seen[cqe.user_data])
			die("completion %llu, twice or never asked for",
			    (unsigned long long)cqe.user_data);
		seen[cqe.user_data] = true;
		results[cqe.user_data] = cqe.result;
	}
}

static void cmd_deadline(struct session *s)
{
	int results[23];

	/* The device is busy long enough that the short deadline passes while 20 wait. */
	for (unsigned i = 0; i < 20; i++)
		request(s, LONG_ROWS, i);
	request(s, 1, 20)->deadline_ns = now_ns() + 50000;
	request(s, 1, 21)->deadline_ns = now_ns() + FAR_NS;
	request(s, 1, 22)->deadline_ns = 1;
	submit(s, 23);
	take_all(s, 23, results);
	for (unsigned i = 0; i < 23; i++)
		if (results[i] != (i == 20 || i == 22 ? -ETIME : 0))
			die("request %u of 23: result %d", i, results[i]);
}

static void cmd_cancel(struct session *s)
{
	struct exl3_sqe *sqe;
	int results[22];

	for (unsigned i = 0; i < 20; i++)
		request(s, LONG_ROWS, i);
	sqe = exl3_sq_get(s->ch);
	exl3_prep_cancel(sqe, 19);
	sqe->user_data = 20;
	sqe = exl3_sq_get(s->ch);
	exl3_prep_cancel(sqe, 7777);
	sqe->user_data = 21;
	submit(s, 22);
	take_all(s, 22, results);
	for (unsigned i = 0; i < 22; i++) {
		int want = i == 19 ? -ECANCELED : i == 21 ? -ENOENT : 0;

		if (results[i] != want)
			die("request %u of 22: result %d, expected %d", i, results[i], want);
	}
}

static void cmd_closed(struct session *s)
{
	struct exl3_module *again;
	uint32_t old = exl3_module_handle(s->mod);
	struct exl3_sqe *sqe;
	int results[11];

	for (unsigned i = 0; i < 10; i++)
		request(s, LONG_ROWS, i);
	submit(s, 10);
	s->mod = exl3_module_close(s->mod);
	/* The handle of a closed module is not that of a module opened later. */
	if (exl3_module_open(s->model, "lm_head", EXL3_KIND_LINEAR, &again) < 0)
		die("lm_head");
	sqe = exl3_sq_get(s->ch);
	exl3_prep_linear(sqe, again, s->x, EXL3_F32, s->y, EXL3_F32, 1);
	sqe->user_data = 10;
	sqe->module = old;
	submit(s, 1);
	take_all(s, 11, results);
	for (unsigned i = 0; i < 10; i++)
		if (results[i] != 0 && results[i] != -ENOENT)
			die("request %u of a module that was closed: result %d", i, results[i]);
	if (results[10] != -ENOENT)
		die("a closed handle: result %d", results[10]);
}

static void cmd_greedy(struct session *s)
{
	unsigned done = 0;
	struct exl3_cqe cqe;
	char byte;

	for (unsigned i = 0; i < 60; i++)
		request(s, MOST_ROWS, i);
	submit(s, 60);
	announce("holding");
	while (read(STDIN_FILENO, &byte, 1) > 0)
		;
	while (exl3_peek(s->ch, &cqe) == 1)
		expect(&cqe, done++, 0, "greedy");
	printf("done=%u\n", done);
	for (; done < 60; done++) {
		cqe = take(s);
		expect(&cqe, done, 0, "greedy");
	}
}

static void cmd_small(struct session *s)
{
	for (unsigned i = 0; i < 3; i++) {
		struct exl3_cqe cqe;

		request(s, 1, i);
		submit(s, 1);
		cqe = take(s);
		expect(&cqe, i, 0, "small");
	}
}

static void reconnect(char **argv)
{
	uint64_t until = now_ns() + WAIT_NS;
	struct exl3_client *c;
	struct exl3_model *m;

	for (;;) {
		if (exl3_connect(argv[1], "async again", &c) == 0) {
			if (exl3_model_open(c, argv[2], &m) == 0)
				break;
			exl3_close(c);
		}
		if (now_ns() > until)
			die("no new worker");
		usleep(20000);
	}
	exl3_close(c);
}

static void cmd_stale(struct session *s)
{
	uint64_t sent = 0, done = 0, stale = 0, until;
	struct exl3_cqe cqe;
	int r;

	/* Always 40 in flight, until the first one ends with -ESTALE. */
	while (!stale) {
		int n = 0;

		for (; sent - done < 40; sent++, n++)
			request(s, LONG_ROWS, sent);
		r = exl3_submit(s->ch);
		if (r == -ESTALE) {
			sent -= (unsigned)n; /* these were never published */
			break;
		}
		if (r != n)
			die("exl3_submit: %d, expected %d", r, n);
		cqe = take(s);
		stale = cqe.result == -ESTALE;
		expect(&cqe, done++, stale ? -ESTALE : 0, "while the worker lives");
		if (done == 1) {
			announce("ready");
		}
	}
	/* In order, each once, and no result after the first -ESTALE. */
	while (done < sent) {
		cqe = take(s);
		stale += cqe.result == -ESTALE;
		expect(&cqe, done++, stale ? -ESTALE : 0, "when the worker dies");
	}
	if (!stale)
		die("no request ended with -ESTALE");
	r = exl3_wait(s->ch, &cqe, WAIT_NS);
	if (r != -ESTALE)
		die("exl3_wait after the end: %d", r);
	if (exl3_peek(s->ch, &cqe) != -ESTALE)
		die("exl3_peek after the end is not -ESTALE");
	r = exl3_module_open(s->model, s->argv[3], EXL3_KIND_ANY, &s->mod);
	if (r != -ESTALE)
		die("exl3_module_open after the end: %d", r);
	/* The channel may have ended a moment before the connection. */
	for (until = now_ns() + WAIT_NS; exl3_alive(s->client); usleep(1000))
		if (now_ns() > until)
			die("exl3_alive() after the end");
	reconnect(s->argv);
}

int main(int argc, char **argv)
{
	static const struct command commands[] = {
		{"order", cmd_order},	{"full", cmd_full},	{"deadline", cmd_deadline},
		{"cancel", cmd_cancel}, {"closed", cmd_closed}, {"greedy", cmd_greedy},
		{"small", cmd_small},	{"stale", cmd_stale},
	};
	struct session s = {.argv = argv};

	if (argc != 5) {
		fprintf(stderr, "usage: async SOCKET MODEL MODULE COMMAND\n");
		return 2;
	}
	set_up(&s);
	run_command(commands, sizeof(commands) / sizeof(commands[0]), argv[4], &s);
	exl3_close(s.client);
	return 0;
}
