/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tenants.c - a client that does what its arguments say and prints what it is told, one line per step.
 *
 * usage: tenants SOCKET STEP...
 *   hello            says hello
 *   model:NAME       opens a model          module:NAME  and a module of it
 *   arena:BYTES      makes an arena         free         gives the last one back
 *   channel:ENTRIES  makes a channel        close        closes the last one
 *   linear:ROWS:NR   NR requests at once; waits for all: "result N, SECONDS s, outstanding at most M rows"
 *   submit:ROWS:NR   the same without waiting
 *   mla:HEADS:DIM:KEYS:QUERIES:MS   submits an MLA request on the last arena, with a deadline in MS ms (0: none)
 *   drop:ID          sends a cancel for request ID, the first being 0
 *   sleep:MS
 *   wait             for all that was submitted
 *   unload:NAME
 *   hold             prints "holding" and waits for a line on stdin
 *   again            says hello on a new connection
 * Each line: STEP CODE SENTENCE. Exit status 1 only if the daemon breaks the protocol.
 */
#include "tests/integration/raw.h"

static const char *path;
static int sock = -1;
static uint32_t model, module, k, n;
static struct raw_arena arenas[64];
static struct raw_channel channels[64];
static unsigned nr_arenas, nr_channels, submitted;
static uint64_t next_id;

static Exl3__Reply *call(const char *step, Exl3__Request *req, int *fds, unsigned *nr_fds)
{
	int spare[EXL3_FDS_MAX];
	uint8_t packet[4096];
	Exl3__Reply *reply = NULL;
	unsigned nr = 0;

	req->id = 7;
	if (exl3__request__get_packed_size(req) > sizeof(packet))
		raw_die("%s: too long", step);
	/* Also if it cannot be sent any more: there may be last words. */
	exl3_frame_send(sock, packet, exl3__request__pack(req, packet), NULL, 0, 0, NULL);
	reply = raw_recv(sock, fds ? fds : spare, fds ? nr_fds : &nr, RAW_TIMEOUT_MS, NULL);
	if (!reply) {
		printf("%s 0 gone\n", step);
		raw_quit(0);
	}
	printf("%s %d %s%s\n", step, reply->code, reply->id ? "" : "farewell: ", reply->error);
	fflush(stdout);
	if (!reply->id)
		raw_quit(0);
	return reply;
}

static int step_hello(const char *step)
{
	RAW_REQUEST(req, hello, HELLO, Exl3__Hello body = EXL3__HELLO__INIT);
	Exl3__Reply *reply;
	int code;

	if (sock >= 0)
		close(sock);
	sock = raw_connect(path);
	body.version_min = body.version_max = 1;
	body.name = (char *)(uintptr_t)"tenants";
	reply = call(step, &req, NULL, NULL);
	code = reply->code;
	exl3__reply__free_unpacked(reply, NULL);
	return code;
}

static void step_model(const char *step, const char *name)
{
	RAW_REQUEST(req, open_model, OPEN_MODEL, Exl3__OpenModel body = EXL3__OPEN_MODEL__INIT);
	Exl3__Reply *reply;

	body.name = (char *)(uintptr_t)name;
	reply = call(step, &req, NULL, NULL);
	if (!reply->code)
		model = reply->models->models[0]->handle;
	exl3__reply__free_unpacked(reply, NULL);
}

static void step_unload(const char *step, const char *name)
{
	RAW_REQUEST(req, unload, UNLOAD, Exl3__Unload body = EXL3__UNLOAD__INIT);

	body.name = (char *)(uintptr_t)name;
	exl3__reply__free_unpacked(call(step, &req, NULL, NULL), NULL);
}

static void step_arena(const char *step, uint64_t bytes)
{
	RAW_REQUEST(req, create_arena, CREATE_ARENA,
		    Exl3__CreateArena body = EXL3__CREATE_ARENA__INIT);
	struct raw_arena *a = &arenas[nr_arenas];
	int fds[EXL3_FDS_MAX];
	unsigned nr_fds;
	Exl3__Reply *reply;

	body.bytes = bytes;
	reply = call(step, &req, fds, &nr_fds);
	if (!reply->code) {
		*a = (struct raw_arena){.buffer = reply->arena->buffer, .bytes = bytes, .fd = fds[0]};
		nr_arenas++;
	}
	exl3__reply__free_unpacked(reply, NULL);
}

static void step_free(const char *step)
{
	RAW_REQUEST(req, free_buffer, FREE_BUFFER, Exl3__FreeBuffer body = EXL3__FREE_BUFFER__INIT);

	body.buffer = arenas[--nr_arenas].buffer;
	exl3__reply__free_unpacked(call(step, &req, NULL, NULL), NULL);
}

static void step_channel(const char *step, uint32_t entries)
{
	RAW_REQUEST(req, create_channel, CREATE_CHANNEL,
		    Exl3__CreateChannel body = EXL3__CREATE_CHANNEL__INIT);
	struct raw_channel *ch = &channels[nr_channels];
	struct exl3_error err;
	int fds[EXL3_FDS_MAX];
	unsigned nr_fds;
	Exl3__Reply *reply;

	body.entries = entries;
	reply = call(step, &req, fds, &nr_fds);
	if (!reply->code) {
		ch->id = reply->channel->channel;
		ch->kick_fd = fds[1];
		ch->notify_fd = fds[2];
		if (exl3_segment_map(fds[0], reply->channel->bytes, &ch->seg, &err) < 0 ||
		    exl3_ring_attach(ch->seg, &ch->ring, &err) < 0)
			raw_die("%s", err.text);
		nr_channels++;
	}
	exl3__reply__free_unpacked(reply, NULL);
}

static void step_close(const char *step)
{
	RAW_REQUEST(req, close_channel, CLOSE_CHANNEL,
		    Exl3__CloseChannel body = EXL3__CLOSE_CHANNEL__INIT);

	body.channel = channels[--nr_channels].id;
	exl3__reply__free_unpacked(call(step, &req, NULL, NULL), NULL);
	channels[nr_channels].seg = exl3_segment_free(channels[nr_channels].seg);
}

static void submit(uint32_t rows, uint32_t nr)
{
	struct raw_channel *ch = &channels[nr_channels - 1];
	const struct raw_arena *a = &arenas[nr_arenas - 1];

	if (!nr_channels || !nr_arenas || !module)
		raw_die("no channel, arena or module");
	for (uint32_t i = 0; i < nr; i++)
		raw_linear(raw_get(ch), module, raw_ref(a, 0), raw_ref(a, a->bytes / 2 & ~15ull), rows,
			   next_id++);
	raw_submit(ch);
	submitted += nr;
}

/* The codes of all of them, in the order of their completions. */
static void step_wait(const char *step)
{
	struct raw_channel *ch = &channels[nr_channels - 1];
	uint64_t start = exl3_now_ns();
	int last = 0, failed = 0;
	struct exl3_cqe cqe;

	for (; submitted; submitted--) {
		if (raw_take(ch, &cqe, RAW_TIMEOUT_MS) != 1)
			raw_die("%s: no completion", step);
		failed += cqe.result != 0;
		if (cqe.result)
			last = cqe.result;
	}
	printf("%s %d %d failed, detail %llu, %.3f s\n", step, last, failed,
	       (unsigned long long)cqe.detail, (double)(exl3_now_ns() - start) / 1e9);
	fflush(stdout);
}

/* Queries that all share one row of indices, in a cache of as many slots. */
static void submit_mla(uint32_t heads, uint32_t dim, uint32_t keys, uint32_t queries, uint64_t ms)
{
	RAW_REQUEST(req, register_mla, REGISTER_MLA,
		    Exl3__RegisterMla body = EXL3__REGISTER_MLA__INIT);
	struct raw_channel *ch = &channels[nr_channels - 1];
	const struct raw_arena *a = &arenas[nr_arenas - 1];
	uint64_t cache = 2ull * keys * dim, q = cache + 4ull * keys, bytes = 2ull * queries * heads * dim;
	Exl3__Reply *reply;
	struct exl3_sqe *sqe;

	body.heads = heads;
	body.dim = body.value_dim = dim;
	body.topk = keys;
	body.slots = keys;
	body.cache_dtype = EXL3_F16;
	body.indices_dtype = EXL3_I32;
	body.table_queries = queries;
	reply = raw_call_ok(sock, &req, NULL, NULL);
	if (q + 2 * bytes > a->bytes)
		raw_die("mla: %llu bytes do not fit into the arena",
			(unsigned long long)(q + 2 * bytes));
	sqe = raw_get(ch);
	sqe->op = EXL3_OP_MLA_DECODE;
	sqe->x_dtype = sqe->y_dtype = EXL3_F16;
	sqe->module = reply->handle->handle;
	sqe->rows = queries;
	sqe->x = raw_ref(a, q);
	sqe->y = raw_ref(a, q + bytes);
	sqe->u.mla.cache = raw_ref(a, 0);
	sqe->u.mla.indices = raw_ref(a, cache);
	sqe->u.mla.scale = 1;
	sqe->user_data = next_id++;
	sqe->deadline_ns = ms ? exl3_now_ns() + ms * 1000000 : 0;
	exl3__reply__free_unpacked(reply, NULL);
	raw_submit(ch);
	submitted++;
}

static void step_drop(uint64_t id)
{
	struct raw_channel *ch = &channels[nr_channels - 1];
	struct exl3_sqe *sqe = raw_get(ch);

	sqe->op = EXL3_OP_CANCEL;
	sqe->user_data = 1ull << 40;
	sqe->u.cancel.user_data = id;
	raw_submit(ch);
	submitted++;
}

static void run(const char *step)
{
	const char *arg = strchr(step, ':') ? strchr(step, ':') + 1 : "";
	char line[8];
	uint32_t rows = 0, nr = 0, dim, keys;
	unsigned ms;

	if (strncmp(step, "linear:", 7) == 0 || strncmp(step, "submit:", 7) == 0) {
		if (sscanf(arg, "%u:%u", &rows, &nr) != 2)
			raw_die("%s: ROWS:NR", step);
		submit(rows, nr);
		if (*step == 'l')
			step_wait(step);
	} else if (strcmp(step, "wait") == 0) {
		step_wait(step);
	} else if (strcmp(step, "hello") == 0 || strcmp(step, "again") == 0) {
		step_hello(step);
	} else if (strncmp(step, "model:", 6) == 0) {
		step_model(step, arg);
	} else if (strncmp(step, "module:", 7) == 0) {
		module = raw_open_module(sock, model, arg, EXL3__MODULE_KIND__MODULE_LINEAR, &k, &n);
	} else if (strncmp(step, "unload:", 7) == 0) {
		step_unload(step, arg);
	} else if (strncmp(step, "arena:", 6) == 0) {
		step_arena(step, strtoull(arg, NULL, 10));
	} else if (strcmp(step, "free") == 0) {
		step_free(step);
	} else if (strncmp(step, "channel:", 8) == 0) {
		step_channel(step, (uint32_t)strtoul(arg, NULL, 10));
	} else if (strcmp(step, "close") == 0) {
		step_close(step);
	} else if (strncmp(step, "mla:", 4) == 0) {
		if (sscanf(arg, "%u:%u:%u:%u:%u", &nr, &dim, &keys, &rows, &ms) != 5)
			raw_die("%s: HEADS:DIM:KEYS:QUERIES:MS", step);
		submit_mla(nr, dim, keys, rows, ms);
	} else if (strncmp(step, "sleep:", 6) == 0) {
		usleep((useconds_t)strtoul(arg, NULL, 10) * 1000);
	} else if (strncmp(step, "drop:", 5) == 0) {
		step_drop(strtoull(arg, NULL, 10));
	} else if (strcmp(step, "hold") == 0) {
		puts("holding");
		fflush(stdout);
		if (!fgets(line, sizeof(line), stdin))
			raw_quit(0);
	} else {
		raw_die("%s: no such step", step);
	}
}

int main(int argc, char **argv)
{
	if (argc < 3)
		raw_die("usage: tenants SOCKET STEP...");
	path = argv[1];
	for (int i = 2; i < argc; i++)
		run(argv[i]);
	return 0;
}
