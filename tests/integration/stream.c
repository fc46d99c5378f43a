/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.c - stream calls of libexl3 whose stream is the host: ready and done words without CUDA.
 *
 * usage: stream SOCKET MODEL MODULE COMMAND; exit status 0: all went as exl3.h says.
 *   calls     a call starts when it is ready, its words and its result are right, other requests in between
 *   order     calls of a channel run in order, whichever is ready first; two channels do not wait for each other
 *   late      a call with a deadline that is never ready, and behind it one that is
 *   never     no deadline: the daemon's ready-timeout (1 s) ends it; another client's requests go on meanwhile
 *   wrap      numbers across 2^32, more calls than the channel has slots
 *   many      64 channels with calls outstanding at once; half are closed so
 *   refused   calls that the daemon refuses let their stream go on
 *   silent    prints "ready" with calls outstanding that are never ready, and waits to be killed
 *   stale     prints "ready", waits for its worker to be killed: calls end, and go on at the next worker
 */
#include "client/internal.h"
#include "tests/integration/client.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#define WAIT_NS 100000000000u
#define SOON_NS 30000000u
#define ENTRIES 8u

struct session {
	char **argv;
	struct exl3_client *client;
	struct exl3_module *mod;
	struct exl3_arena *arena;
	struct exl3_channel *ch;
	struct exl3_module_info info;
	float *x, *y, *want;
	exl3_ref xr, yr;
};

static void set_up(struct session *s)
{
	size_t nx, ny;

	if (exl3_connect(s->argv[1], "stream", &s->client) < 0)
		die("connect");
	open_linear(s->client, s->argv, NULL, &s->mod, &s->info);
	nx = s->info.k_logical;
	ny = s->info.n_logical;
	if (exl3_arena_new(s->client, 4 * (nx + ny) + 4096, &s->arena) < 0 ||
	    exl3_channel_new(s->client, ENTRIES, &s->ch) < 0)
		die("no arena or channel");
	s->x = exl3_arena_alloc(s->arena, 4 * nx);
	s->y = exl3_arena_alloc(s->arena, 4 * ny);
	s->want = malloc(4 * ny);
	for (size_t i = 0; i < nx; i++)
		s->x[i] = (float)(i % 13) / 13 - 0.5f;
	if (!s->want || exl3_linear(s->ch, s->mod, s->arena, s->x, EXL3_F32, s->y, EXL3_F32, 1) < 0)
		die("linear");
	memcpy(s->want, s->y, 4 * ny);
	s->xr = exl3_arena_ref(s->arena, s->x);
	s->yr = exl3_arena_ref(s->arena, s->y);
}

static uint32_t linear(struct session *s, struct exl3_channel *ch)
{
	uint32_t call;
	int e = exl3_linear_stream(ch, s->mod, s->xr, EXL3_F32, s->yr, EXL3_F32, 1, EXL3_STREAM_HOST, &call);

	if (e < 0)
		die("linear_stream: %d", e);
	return call;
}

static uint32_t nop(struct exl3_channel *ch)
{
	uint32_t call;
	int e = exl3_nop_stream(ch, EXL3_STREAM_HOST, &call);

	if (e < 0)
		die("nop_stream: %d", e);
	return call;
}

static const struct exl3_stream_slot *words(const struct exl3_channel *ch, uint32_t call)
{
	return &ch->stream->slots[call & ch->stream->mask];
}

static bool is_done(const struct exl3_channel *ch, uint32_t call)
{
	return (int32_t)(__atomic_load_n(&words(ch, call)->done, __ATOMIC_ACQUIRE) - call) >= 0;
}

/* What a stream would see: the done word, then the result beside it. */
static void expect(struct exl3_channel *ch, uint32_t call, int result, const char *what)
{
	struct exl3_cqe cqe;
	int e = exl3_stream_result(ch, call, &cqe, WAIT_NS);

	if (e < 0 || cqe.result != result)
		die("%s: call %u: %d, result %d, expected %d", what, call, e, e < 0 ? 0 : cqe.result, result);
	if (!is_done(ch, call))
		die("%s: call %u has ended, its done word says %u", what, call, words(ch, call)->done);
	if (words(ch, call)->result != result)
		die("%s: call %u: %d beside its done word, expected %d", what, call,
		    words(ch, call)->result, result);
}

static void expect_waiting(struct exl3_channel *ch, uint32_t call, const char *what)
{
	struct exl3_cqe cqe;
	int e = exl3_stream_result(ch, call, &cqe, SOON_NS);

	if (e != -EAGAIN || is_done(ch, call))
		die("%s: call %u has ended (%d) before it was ready", what, call, e);
}

static void expect_y(struct session *s, const char *what)
{
	if (memcmp(s->y, s->want, 4 * s->info.n_logical))
		die("%s: y differs", what);
	memset(s->y, 0x7f, 4 * s->info.n_logical);
}

static void calls(struct session *s)
{
	struct exl3_cqe cqe;
	struct exl3_sqe *sqe;
	uint32_t call;

	memset(s->y, 0x7f, 4 * s->info.n_logical);
	for (int i = 0; i < 3; i++) {
		call = linear(s, s->ch);
		expect_waiting(s->ch, call, "linear");
		exl3_stream_ready(s->ch, call);
		expect(s->ch, call, 0, "linear");
		expect_y(s, "linear");
	}
	/* The stream may be ahead of the daemon. */
	call = nop(s->ch);
	exl3_stream_ready(s->ch, call);
	expect(s->ch, call, 0, "nop");
	if (exl3_stream_error(s->ch, NULL) != 0)
		die("an error, and nothing failed");
	/* A plain request behind a call that waits; its completion is exl3_wait()'s alone. */
	call = linear(s, s->ch);
	sqe = exl3_sq_get(s->ch);
	exl3_prep_nop(sqe);
	sqe->user_data = 77;
	if (exl3_submit(s->ch) != 1 || exl3_wait(s->ch, &cqe, SOON_NS) != 0)
		die("a request came before the call in front of it");
	exl3_stream_ready(s->ch, call);
	expect(s->ch, call, 0, "linear with a request behind it");
	if (exl3_wait(s->ch, &cqe, WAIT_NS) != 1 || cqe.user_data != 77 || cqe.result != 0 ||
	    exl3_wait(s->ch, &cqe, UINT64_MAX) != 0)
		die("the request behind the call");
	if (exl3_stream_result(s->ch, call + 1, &cqe, 0) != -ENOENT ||
	    exl3_stream_result(s->ch, call - 100, &cqe, 0) != -ENOENT)
		die("results of calls that never were");
}

static void order(struct session *s)
{
	struct exl3_channel *other;
	uint32_t a = linear(s, s->ch), b = nop(s->ch), c;

	exl3_stream_ready(s->ch, b);
	expect_waiting(s->ch, b, "ready behind one that is not");
	if (exl3_channel_new(s->client, ENTRIES, &other) < 0)
		die("second channel");
	c = nop(other);
	exl3_stream_ready(other, c);
	expect(other, c, 0, "another channel");
	exl3_stream_ready(s->ch, a);
	expect(s->ch, a, 0, "first");
	expect(s->ch, b, 0, "second");
	exl3_channel_free(other);
}

static void late(struct session *s)
{
	uint64_t start = exl3_now_ns(), took;
	struct exl3_sqe *sqe = exl3_sq_get(s->ch);
	uint32_t a, b, which = 0;

	exl3_prep_linear(sqe, s->mod, s->xr, EXL3_F32, s->yr, EXL3_F32, 1);
	sqe->deadline_ns = start + 100000000u;
	if (exl3_stream_call(s->ch, EXL3_STREAM_HOST, &a) < 0)
		die("stream_call");
	b = linear(s, s->ch);
	exl3_stream_ready(s->ch, b);
	expect(s->ch, a, -ETIME, "never ready");
	took = exl3_now_ns() - start;
	if (took < 100000000u)
		die("a deadline of 100 ms ended it after %llu us", (unsigned long long)took / 1000);
	expect(s->ch, b, 0, "behind it");
	if (exl3_stream_error(s->ch, &which) != -ETIME || which != a || exl3_stream_error(s->ch, NULL) != 0)
		die("exl3_stream_error() does not tell about call %u (%u)", a, which);
	/* Too late: the number means nothing any more. */
	exl3_stream_ready(s->ch, a);
	a = linear(s, s->ch);
	expect_waiting(s->ch, a, "after a late word");
	exl3_stream_ready(s->ch, a);
	expect(s->ch, a, 0, "after a late word");
}

static void never(struct session *s)
{
	struct session other = {0};
	uint64_t start, took;
	uint32_t a, b;

	other.argv = s->argv;
	set_up(&other);
	start = exl3_now_ns();
	a = linear(s, s->ch);
	b = nop(s->ch);
	exl3_stream_ready(s->ch, b);
	for (int i = 0; i < 50; i++) {
		if (exl3_linear(other.ch, other.mod, other.arena, other.x, EXL3_F32, other.y, EXL3_F32, 1) < 0)
			die("another client");
	}
	if (exl3_now_ns() - start < 500000000u)
		expect_waiting(s->ch, a, "never ready");
	expect(s->ch, a, -ETIME, "never ready");
	took = exl3_now_ns() - start;
	if (took < 900000000u)
		die("ready-timeout of 1 s ended it after %llu ms", (unsigned long long)took / 1000000);
	expect(s->ch, b, 0, "behind it");
	exl3_close(other.client);
	free(other.want);
}

static void wrap(struct session *s)
{
	uint32_t first = UINT32_MAX - 2 * ENTRIES, call, last;

	if (exl3_stream_make(s->ch, first) < 0)
		die("stream_make");
	for (uint32_t i = 0; i < 8 * ENTRIES; i++) {
		call = i % 3 ? nop(s->ch) : linear(s, s->ch);
		if (call != first + i)
			die("call %u has number %u", first + i, call);
		if (i % 5 == 0)
			expect_waiting(s->ch, call, "wrap");
		exl3_stream_ready(s->ch, call);
		expect(s->ch, call, 0, "wrap");
	}
	/* As many at once as the ring takes, with the wrap of the slots in between. */
	last = call;
	for (uint32_t i = 1; i <= ENTRIES; i++)
		nop(s->ch);
	for (uint32_t i = ENTRIES; i >= 1; i--)
		exl3_stream_ready(s->ch, last + i);
	for (uint32_t i = 1; i <= ENTRIES; i++)
		expect(s->ch, last + i, 0, "many at once");
	/* Far more than fit: a call waits for room as the earlier ones end. */
	for (uint32_t i = 0; i < 40 * ENTRIES; i++) {
		call = nop(s->ch);
		exl3_stream_ready(s->ch, call);
	}
	expect(s->ch, call, 0, "without looking at results");
	expect_y(s, "wrap");
}

static void many(struct session *s)
{
	struct exl3_channel *ch[EXL3_CHANNELS_MAX - 1];
	uint32_t calls_of[EXL3_CHANNELS_MAX - 1][2];
	uint32_t nr = EXL3_CHANNELS_MAX - 1;

	for (uint32_t i = 0; i < nr; i++) {
		if (exl3_channel_new(s->client, ENTRIES, &ch[i]) < 0)
			die("channel %u", i);
		calls_of[i][0] = linear(s, ch[i]);
		calls_of[i][1] = nop(ch[i]);
	}
	for (uint32_t i = 0; i < nr; i++) {
		exl3_stream_ready(ch[i], calls_of[i][1]);
		if (i % 2)
			exl3_stream_ready(ch[i], calls_of[i][0]);
	}
	for (uint32_t i = 0; i < nr; i++) {
		if (i % 2) {
			expect(ch[i], calls_of[i][0], 0, "many");
			expect(ch[i], calls_of[i][1], 0, "many");
		} else if (is_done(ch[i], calls_of[i][0]) || is_done(ch[i], calls_of[i][1])) {
			die("channel %u: ended before it was ready", i);
		}
		exl3_channel_free(ch[i]);
	}
	expect_y(s, "many");
}

static int bind(struct session *s, uint32_t channel, uint32_t buffer)
{
	Exl3__BindStream body = EXL3__BIND_STREAM__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	body.channel = channel;
	body.buffer = buffer;
	req.body_case = EXL3__REQUEST__BODY_BIND_STREAM;
	req.bind_stream = &body;
	return exl3_client_call(s->client, &req, EXL3__REPLY__BODY__NOT_SET, WAIT_NS, NULL, NULL, 0);
}

/* Words that cannot be; GPU memory where the device has none of its own. */
static void no_words(struct session *s)
{
	Exl3__CreateArena arena = EXL3__CREATE_ARENA__INIT;
	Exl3__RegisterBuffer buffer = EXL3__REGISTER_BUFFER__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	struct exl3_channel *big;
	struct exl3_arena *none;
	uint32_t call;
	uint8_t handle[64] = {0};
	int e;

	if (exl3_channel_new(s->client, 4096, &big) < 0)
		die("channel");
	e = bind(s, big->id, s->arena->buffer);
	if (e != -EINVAL)
		die("words in an arena of %zu bytes: %d", s->arena->bytes, e);
	if (bind(s, 63, s->arena->buffer) != -ENOENT || bind(s, 0, s->arena->buffer) != -ENOENT ||
	    bind(s, UINT32_MAX, s->arena->buffer) != -ENOENT || bind(s, s->ch->id, 7777) != -ENOENT ||
	    bind(s, s->ch->id, UINT32_MAX) != -ENOENT)
		die("words of a channel or in a buffer that is none");
	if (bind(s, s->ch->id, s->arena->buffer) != -EBUSY)
		die("words twice");
	exl3_channel_free(big);
	if (strcmp(s->client->backend, "cpu"))
		return;
	arena.bytes = 4096;
	arena.where = EXL3__WHERE__WHERE_DEVICE;
	req.body_case = EXL3__REQUEST__BODY_CREATE_ARENA;
	req.create_arena = &arena;
	e = exl3_client_call(s->client, &req, EXL3__REPLY__BODY_ARENA, WAIT_NS, NULL, NULL, 0);
	if (e != -EOPNOTSUPP || !strstr(exl3_last_error(), "host memory"))
		die("an arena in the memory of a cpu: %d", e);
	buffer.ipc.data = handle;
	buffer.ipc.len = sizeof(handle);
	buffer.bytes = 4096;
	req.body_case = EXL3__REQUEST__BODY_REGISTER_BUFFER;
	req.register_buffer = &buffer;
	e = exl3_client_call(s->client, &req, EXL3__REPLY__BODY_ARENA, WAIT_NS, NULL, NULL, 0);
	if (e != -EOPNOTSUPP || !strstr(exl3_last_error(), "take an arena"))
		die("GPU memory registered with a cpu: %d", e);
	/* No driver here, or no context in this thread: nothing of it is left behind. */
	if (exl3_arena_new_device(s->client, 4096, &none) >= 0 ||
	    exl3_memory_register(s->client, s->x, 4096, &none) >= 0)
		die("GPU memory without CUDA");
	if (exl3_nop_stream(s->ch, NULL, &call) >= 0)
		die("a CUDA stream without CUDA");
	call = nop(s->ch);
	exl3_stream_ready(s->ch, call);
	expect(s->ch, call, 0, "after a stream that is none");
}

static void refused(struct session *s)
{
	struct exl3_sqe *sqe;
	uint32_t call;
	int e = exl3_linear_stream(s->ch, s->mod, s->xr, EXL3_F32, EXL3_REF(999, 0), EXL3_F32, 1,
				   EXL3_STREAM_HOST, &call);

	if (e < 0)
		die("linear_stream: %d", e);
	expect(s->ch, call, -EINVAL, "no such buffer");
	sqe = exl3_sq_get(s->ch);
	exl3_prep_cancel(sqe, 5);
	if (exl3_stream_call(s->ch, EXL3_STREAM_HOST, &call) < 0)
		die("stream_call");
	expect(s->ch, call, -EINVAL, "cancel in a stream");
	if (exl3_stream_error(s->ch, NULL) != -EINVAL)
		die("exl3_stream_error()");
	/* Nothing prepared; two prepared; a stream of CUDA where there is none. */
	if (exl3_stream_call(s->ch, EXL3_STREAM_HOST, &call) != -EINVAL)
		die("a call without an entry");
	exl3_prep_nop(exl3_sq_get(s->ch));
	exl3_prep_nop(exl3_sq_get(s->ch));
	if (exl3_stream_call(s->ch, EXL3_STREAM_HOST, &call) != -EINVAL || exl3_submit(s->ch) != 2)
		die("a call with two entries");
	call = nop(s->ch);
	exl3_stream_ready(s->ch, call);
	expect(s->ch, call, 0, "after refused ones");
	no_words(s);
}

static void say_ready(void)
{
	announce("ready");
}

static void silent(struct session *s)
{
	for (uint32_t i = 0; i < ENTRIES; i++)
		linear(s, s->ch);
	say_ready();
	pause();
}

static void stale(struct session *s)
{
	uint32_t a = linear(s, s->ch), b = nop(s->ch), c, which = 0;
	uint64_t end = exl3_now_ns() + WAIT_NS;

	say_ready();
	/* As a stream does: it looks at the word alone, no function of the library is called. */
	while (!is_done(s->ch, a) || !is_done(s->ch, b)) {
		if (exl3_now_ns() > end)
			die("nobody let the stream go on");
		poll(NULL, 0, 1);
	}
	if (words(s->ch, a)->result != -ESTALE)
		die("%d beside the done word", words(s->ch, a)->result);
	if (exl3_stream_error(s->ch, &which) != -ESTALE || which != a)
		die("exl3_stream_error() does not tell about call %u (%u)", a, which);
	if (exl3_reconnect(s->client, WAIT_NS) < 0)
		die("reconnect");
	/* The channel moves to the next worker with its first entry, the words with its first call. */
	c = linear(s, s->ch);
	expect_waiting(s->ch, c, "at the next worker");
	exl3_stream_ready(s->ch, c);
	expect(s->ch, c, 0, "at the next worker");
	expect_y(s, "at the next worker");
}

int main(int argc, char **argv)
{
	static const struct command commands[] = {
		{"calls", calls}, {"order", order}, {"late", late},	  {"never", never},   {"wrap", wrap},
		{"many", many},	  {"refused", refused}, {"silent", silent}, {"stale", stale},
	};
	struct session s = {.argv = argv};

	if (argc != 5) {
		fprintf(stderr, "usage: stream SOCKET MODEL MODULE COMMAND\n");
		return 2;
	}
	set_up(&s);
	run_command(commands, sizeof(commands) / sizeof(commands[0]), argv[4], &s);
	exl3_close(s.client);
	free(s.want);
	return 0;
}
