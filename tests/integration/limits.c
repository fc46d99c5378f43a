/* SPDX-License-Identifier: Apache-2.0 */
/*
 * limits.c - a client that asks for one more than it may, and for things that make no sense.
 *
 * usage: limits SOCKET ARENA_MAX CHANNELS_MAX MODEL MODULE
 *        limits SOCKET idle              says hello, prints "holding" and stays until stdin ends
 * Exit status 0: everything was refused as it must be, and a sensible request is granted afterwards.
 */
#include "tests/integration/raw.h"

static void expect_code(int sock, Exl3__Request *req, int want, const char *what)
{
	Exl3__Reply *reply = raw_call(sock, req, NULL, NULL);

	if (reply->code != want)
		raw_die("%s: code %d (%s), expected %d", what, reply->code, reply->error, want);
	if (want < 0 && (!reply->error || !reply->error[0]))
		raw_die("%s: refused without a sentence", what);
	exl3__reply__free_unpacked(reply, NULL);
}

/* More than a 64-bit sum can hold: the limit or the number itself may be the reason. */
static void absurd_arena(int sock, uint64_t bytes)
{
	RAW_REQUEST(req, create_arena, CREATE_ARENA,
		    Exl3__CreateArena body = EXL3__CREATE_ARENA__INIT);
	Exl3__Reply *reply;

	body.bytes = bytes;
	reply = raw_call(sock, &req, NULL, NULL);
	if ((reply->code != -EDQUOT && reply->code != -EINVAL) || !reply->error[0])
		raw_die("an arena of %llu bytes: code %d", (unsigned long long)bytes, reply->code);
	exl3__reply__free_unpacked(reply, NULL);
}

static void arena(int sock, uint64_t bytes, int want, const char *what)
{
	RAW_REQUEST(req, create_arena, CREATE_ARENA,
		    Exl3__CreateArena body = EXL3__CREATE_ARENA__INIT);

	body.bytes = bytes;
	expect_code(sock, &req, want, what);
}

static void channel(int sock, uint32_t entries, int want, const char *what)
{
	RAW_REQUEST(req, create_channel, CREATE_CHANNEL,
		    Exl3__CreateChannel body = EXL3__CREATE_CHANNEL__INIT);

	body.entries = entries;
	expect_code(sock, &req, want, what);
}

static void free_buffer(int sock, uint32_t id, int want)
{
	RAW_REQUEST(req, free_buffer, FREE_BUFFER, Exl3__FreeBuffer body = EXL3__FREE_BUFFER__INIT);

	body.buffer = id;
	expect_code(sock, &req, want, "FreeBuffer");
}

static void memory(const char *path, uint64_t arena_max)
{
	int sock = raw_connect(path);
	struct raw_arena a;

	raw_hello(sock, "limits");
	arena(sock, 0, -EINVAL, "an arena of no bytes");
	arena(sock, arena_max + 1, -EDQUOT, "an arena above the limit");
	absurd_arena(sock, UINT64_MAX);
	absurd_arena(sock, UINT64_MAX - 4096);
	absurd_arena(sock, 1ull << 63);
	a = raw_arena_new(sock, arena_max);
	arena(sock, 4096, -EDQUOT, "a second arena above the limit");
	free_buffer(sock, a.buffer + 1, -ENOENT);
	free_buffer(sock, 0, -ENOENT);
	free_buffer(sock, a.buffer, 0);
	free_buffer(sock, a.buffer, -ENOENT);
	for (unsigned i = 0; i < EXL3_BUFFERS_MAX; i++)
		arena(sock, 4096, 0, "one of many arenas");
	arena(sock, 4096, -EDQUOT, "one arena too many");
	close(sock);
}

/* Memory that was given back counts as long as requests that were accepted use it. */
static void memory_in_use(const char *path, uint64_t arena_max, const char *model,
			  const char *module)
{
	enum { REQUESTS = 8 };
	int sock = raw_connect(path);
	struct raw_channel ch;
	struct raw_arena a;
	struct exl3_cqe cqe;
	uint32_t handle, k, n, rows;

	raw_hello(sock, "limits");
	a = raw_arena_new(sock, arena_max);
	ch = raw_channel_new(sock, REQUESTS);
	handle = raw_open_module(sock, raw_open_model(sock, model), module,
				 EXL3__MODULE_KIND__MODULE_LINEAR, &k, &n);
	rows = (uint32_t)(arena_max / (4 * (uint64_t)(k + n)));
	if (rows > EXL3_M_MAX)
		rows = EXL3_M_MAX;
	for (unsigned i = 0; i < REQUESTS; i++)
		raw_linear(raw_get(&ch), handle, raw_ref(&a, 0),
			   raw_ref(&a, (4ull * rows * k + 15) / 16 * 16), rows, i);
	raw_submit(&ch);
	while (__atomic_load_n(&ch.ring.hdr->sq_head.v, __ATOMIC_ACQUIRE) != ch.ring.sq_next)
		usleep(100);
	free_buffer(sock, a.buffer, 0);
	arena(sock, arena_max, -EDQUOT, "an arena beside one that requests use");
	for (unsigned i = 0; i < REQUESTS; i++)
		if (raw_take(&ch, &cqe, RAW_TIMEOUT_MS) != 1 || cqe.result)
			raw_die("request %u on memory that was given back: result %d", i,
				cqe.result);
	arena(sock, arena_max, 0, "an arena after the requests");
	close(sock);
}

static void channels(const char *path, unsigned channels_max)
{
	RAW_REQUEST(req, close_channel, CLOSE_CHANNEL,
		    Exl3__CloseChannel body = EXL3__CLOSE_CHANNEL__INIT);
	int sock = raw_connect(path);

	raw_hello(sock, "limits");
	channel(sock, 0, -EINVAL, "a channel of no entries");
	channel(sock, 3, -EINVAL, "a channel of 3 entries");
	channel(sock, 2 * EXL3_SQ_ENTRIES_MAX, -EINVAL, "a channel of too many entries");
	channel(sock, UINT32_MAX, -EINVAL, "a channel of 2^32 - 1 entries");
	for (unsigned i = 0; i < channels_max; i++)
		channel(sock, EXL3_SQ_ENTRIES_MAX, 0, "one of several channels");
	channel(sock, 16, -EDQUOT, "one channel too many");
	body.channel = 0xffffff;
	expect_code(sock, &req, -ENOENT, "closing what is not there");
	close(sock);
}

/* Names and lengths that nobody has. */
static void names(const char *path, const char *model, const char *module)
{
	static char huge[EXL3_NAME_MAX + 2];
	Exl3__OpenModel open_model = EXL3__OPEN_MODEL__INIT;
	Exl3__OpenModule open_module = EXL3__OPEN_MODULE__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	int sock = raw_connect(path);
	uint32_t handle;

	raw_hello(sock, "limits");
	memset(huge, 'a', sizeof(huge) - 1);
	req.body_case = EXL3__REQUEST__BODY_OPEN_MODEL;
	req.open_model = &open_model;
	open_model.name = (char *)(uintptr_t) "";
	expect_code(sock, &req, -ENOENT, "a model without a name");
	open_model.name = (char *)(uintptr_t) "../../etc/passwd";
	expect_code(sock, &req, -ENOENT, "a model with a path as its name");
	open_model.name = (char *)(uintptr_t) "%s%n%s\n\033[2J";
	expect_code(sock, &req, -ENOENT, "a model with control characters");
	handle = raw_open_model(sock, model);
	req.body_case = EXL3__REQUEST__BODY_OPEN_MODULE;
	req.open_module = &open_module;
	open_module.model = handle + 77;
	open_module.name = (char *)(uintptr_t)module;
	expect_code(sock, &req, -ENOENT, "a module of no model");
	open_module.model = handle;
	open_module.kind = (Exl3__ModuleKind)99;
	expect_code(sock, &req, -EINVAL, "a module of kind 99");
	open_module.kind = EXL3__MODULE_KIND__MODULE_ANY;
	open_module.name = (char *)(uintptr_t) "";
	expect_code(sock, &req, -ENOENT, "a module without a name");
	open_module.name = huge;
	raw_send(sock, &req);
	{
		int fds[EXL3_FDS_MAX];
		unsigned nr_fds;
		Exl3__Reply *reply = raw_recv(sock, fds, &nr_fds, RAW_TIMEOUT_MS, NULL);

		if (!reply || (reply->code != -EINVAL && reply->code != -ENOENT))
			raw_die("a name that is too long: code %d", reply ? reply->code : 0);
		exl3__reply__free_unpacked(reply, NULL);
	}
	/* Handles: every one more than the limit is refused, and nothing else breaks. */
	open_module.name = (char *)(uintptr_t)module;
	for (unsigned i = 0;; i++) {
		Exl3__Reply *reply = raw_call(sock, &req, NULL, NULL);
		int code = reply->code;

		exl3__reply__free_unpacked(reply, NULL);
		if (code == -EDQUOT)
			break;
		if (code < 0 || i > EXL3_HANDLES_MAX)
			raw_die("handle %u: code %d", i, code);
	}
	close(sock);
}

static int idle(const char *path)
{
	int sock = raw_connect(path);
	char byte;

	raw_hello(sock, "idle");
	printf("holding\n");
	fflush(stdout);
	while (read(STDIN_FILENO, &byte, 1) > 0)
		;
	close(sock);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[2], "idle"))
		return idle(argv[1]);
	if (argc != 6)
		raw_die("usage: limits SOCKET ARENA_MAX CHANNELS_MAX MODEL MODULE | SOCKET idle");
	memory(argv[1], strtoull(argv[2], NULL, 10));
	memory_in_use(argv[1], strtoull(argv[2], NULL, 10), argv[4], argv[5]);
	channels(argv[1], (unsigned)strtoul(argv[3], NULL, 10));
	names(argv[1], argv[4], argv[5]);
	raw_quit(0);
}
