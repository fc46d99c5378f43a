/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dying.c - a client that kills itself with SIGKILL at a chosen step of the protocol.
 *
 * usage: dying SOCKET MODEL MODULE STEP [DELAY_US]; "dying steps" lists the steps. The test looks at
 * what the daemon still holds afterwards. DELAY_US: how long it waits at the step before it dies, so
 * that the daemon is caught at different moments.
 */
#include <signal.h>

#include "tests/integration/raw.h"

#define ROWS 256u

enum step {
	STEP_CONNECT, /* connected, said nothing */
	STEP_HELLO,   /* hello sent, reply not read */
	STEP_GREETED,
	STEP_MODEL,
	STEP_MODULE,
	STEP_LISTING,   /* long answers asked for, none read */
	STEP_CHANNEL,   /* CreateChannel sent, reply with its descriptors not read */
	STEP_MAPPED,    /* channel mapped */
	STEP_ARENA,     /* CreateArena sent, reply not read */
	STEP_MLA,       /* geometry registered */
	STEP_TENSOR,    /* read-only descriptor of a tensor asked for, not read */
	STEP_ENTRY,     /* entry written, not published */
	STEP_PUBLISHED, /* published, no kick */
	STEP_RUNNING,   /* published and kicked: many rows */
	STEP_QUEUED,    /* more requests than the device takes at once */
	STEP_DONE,      /* completion there, not taken */
	STEP_ASLEEP,    /* wants a futex wake-up and a message */
	STEP_TWO,       /* two channels, two arenas, both busy */
	STEP_FREED,     /* arena freed while a request uses it */
	STEP_CLOSED,    /* channel closed while a request runs */
	STEP_NR
};

static const char *const step_names[STEP_NR] = {
	"connect", "hello", "greeted", "model",  "module", "listing",   "channel",
	"mapped",  "arena", "mla",     "tensor", "entry",  "published", "running",
	"queued",  "done",  "asleep",  "two",    "freed",  "closed",
};

static enum step wanted;
static useconds_t delay_us;

static void reach(enum step step)
{
	if (step != wanted)
		return;
	printf("%s\n", step_names[step]);
	fflush(stdout);
	if (delay_us)
		usleep(delay_us);
	kill(getpid(), SIGKILL);
}

/* Sends a request whose reply nobody will read. */
static void send_only(int sock, Exl3__Request *req, enum step step)
{
	if (step == wanted)
		raw_send(sock, req);
	reach(step);
}

static void connect_steps(const char *path, int *sock)
{
	RAW_REQUEST(req, hello, HELLO, Exl3__Hello body = EXL3__HELLO__INIT);

	*sock = raw_connect(path);
	reach(STEP_CONNECT);
	body.version_min = body.version_max = 1;
	body.name = (char *)(uintptr_t) "dying";
	send_only(*sock, &req, STEP_HELLO);
	raw_hello(*sock, "dying");
	reach(STEP_GREETED);
}

static void listing_steps(int sock, const char *model, uint32_t handle)
{
	RAW_REQUEST(req, list_modules, LIST_MODULES,
		    Exl3__ListModules body = EXL3__LIST_MODULES__INIT);
	Exl3__OpenTensor tensor = EXL3__OPEN_TENSOR__INIT;
	Exl3__Request tensor_req = EXL3__REQUEST__INIT;

	body.model = (char *)(uintptr_t)model;
	for (unsigned i = 0; i < 8 && wanted == STEP_LISTING; i++)
		raw_send(sock, &req);
	reach(STEP_LISTING);
	tensor.model = handle;
	tensor.name = (char *)(uintptr_t) "model.embed_tokens.weight";
	tensor_req.body_case = EXL3__REQUEST__BODY_OPEN_TENSOR;
	tensor_req.open_tensor = &tensor;
	send_only(sock, &tensor_req, STEP_TENSOR);
}

static void memory_steps(int sock, size_t bytes, struct raw_channel *ch, struct raw_arena *arena)
{
	RAW_REQUEST(req, create_channel, CREATE_CHANNEL,
		    Exl3__CreateChannel body = EXL3__CREATE_CHANNEL__INIT);
	Exl3__CreateArena want_arena = EXL3__CREATE_ARENA__INIT;
	Exl3__RegisterMla mla = EXL3__REGISTER_MLA__INIT;
	Exl3__Request next = EXL3__REQUEST__INIT;

	body.entries = 64;
	send_only(sock, &req, STEP_CHANNEL);
	*ch = raw_channel_new(sock, 64);
	reach(STEP_MAPPED);
	want_arena.bytes = bytes;
	next.body_case = EXL3__REQUEST__BODY_CREATE_ARENA;
	next.create_arena = &want_arena;
	send_only(sock, &next, STEP_ARENA);
	*arena = raw_arena_new(sock, bytes);
	mla.heads = 4;
	mla.dim = mla.value_dim = 128;
	mla.topk = mla.slots = 64;
	mla.cache_dtype = EXL3_F16;
	mla.indices_dtype = EXL3_I32;
	next.body_case = EXL3__REQUEST__BODY_REGISTER_MLA;
	next.register_mla = &mla;
	exl3__reply__free_unpacked(raw_call_ok(sock, &next, NULL, NULL), NULL);
	reach(STEP_MLA);
}

static void leave_steps(int sock, const struct raw_channel *ch, const struct raw_arena *arena)
{
	Exl3__FreeBuffer buffer = EXL3__FREE_BUFFER__INIT;
	Exl3__CloseChannel channel = EXL3__CLOSE_CHANNEL__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	buffer.buffer = arena->buffer;
	channel.channel = ch->id;
	req.body_case = EXL3__REQUEST__BODY_FREE_BUFFER;
	req.free_buffer = &buffer;
	send_only(sock, &req, STEP_FREED);
	req.body_case = EXL3__REQUEST__BODY_CLOSE_CHANNEL;
	req.close_channel = &channel;
	send_only(sock, &req, STEP_CLOSED);
}

int main(int argc, char **argv)
{
	struct raw_channel ch, ch2;
	struct raw_arena arena, arena2;
	struct exl3_cqe cqe;
	uint32_t model, module, k, n;
	uint64_t y;
	int sock;

	if (argc == 2 && !strcmp(argv[1], "steps")) {
		for (unsigned i = 0; i < STEP_NR; i++)
			puts(step_names[i]);
		return 0;
	}
	if (argc < 5)
		raw_die("usage: dying SOCKET MODEL MODULE STEP [DELAY_US]");
	while (wanted < STEP_NR && strcmp(step_names[wanted], argv[4]))
		wanted++;
	if (wanted == STEP_NR)
		raw_die("no step is called %s", argv[4]);
	delay_us = argc > 5 ? (useconds_t)strtoul(argv[5], NULL, 10) : 0;

	connect_steps(argv[1], &sock);
	model = raw_open_model(sock, argv[2]);
	reach(STEP_MODEL);
	module = raw_open_module(sock, model, argv[3], EXL3__MODULE_KIND__MODULE_LINEAR, &k, &n);
	reach(STEP_MODULE);
	listing_steps(sock, argv[2], model);
	y = 4ull * ROWS * k;
	memory_steps(sock, y + 4ull * ROWS * n, &ch, &arena);

	raw_linear(raw_get(&ch), module, raw_ref(&arena, 0), raw_ref(&arena, y), ROWS, 1);
	reach(STEP_ENTRY);
	exl3_ring_publish(&ch.ring);
	reach(STEP_PUBLISHED);
	raw_kick(&ch);
	reach(STEP_RUNNING);
	for (unsigned i = 0; i < 40; i++)
		raw_linear(raw_get(&ch), module, raw_ref(&arena, 0), raw_ref(&arena, y), ROWS, 2);
	raw_submit(&ch);
	reach(STEP_QUEUED);
	leave_steps(sock, &ch, &arena);
	exl3_ring_arm(&ch.ring, EXL3_CQ_NEED_WAKEUP | EXL3_CQ_WANT_MSG);
	reach(STEP_ASLEEP);
	ch2 = raw_channel_new(sock, 16);
	arena2 = raw_arena_new(sock, y + 4ull * ROWS * n);
	raw_linear(raw_get(&ch2), module, raw_ref(&arena2, 0), raw_ref(&arena, y), 1, 3);
	raw_submit(&ch2);
	reach(STEP_TWO);
	if (!raw_take(&ch, &cqe, RAW_TIMEOUT_MS))
		raw_die("no completion");
	if (cqe.result || cqe.user_data != 1)
		raw_die("completion %llu has result %d", (unsigned long long)cqe.user_data,
			cqe.result);
	reach(STEP_DONE);
	raw_die("step %s was not reached", argv[4]);
}
