/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hostile.c - clients that break the rules in one chosen way and check that only they suffer.
 *
 * usage: hostile SOCKET COMMAND [ARGS]; exit status 0: the daemon answered as it must, else 1 and a
 * sentence. The commands are listed in the table at the end. Those that hold a bad state print "holding"
 * and stay until their stdin ends, so that the test can look at the neighbours meanwhile.
 */
#include <fcntl.h>

#include "tests/integration/raw.h"

#ifndef F_ADD_SEALS
#define F_ADD_SEALS 1033
#endif

/* A connected client with everything that a request needs. */
struct victim {
	int sock;
	uint32_t model, module, k, n;
	struct raw_channel ch;
	struct raw_arena arena;
	uint64_t x, y; /* offsets in the arena, room for ROWS */
};

#define ROWS 4u

static uint64_t rng_state = 1;

static uint64_t rng(void)
{
	uint64_t z = rng_state += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static void random_bytes(void *to, size_t bytes)
{
	uint8_t *p = to;

	for (size_t i = 0; i < bytes; i++)
		p[i] = (uint8_t)(rng() >> 40);
}

static void hold(void)
{
	char byte;

	printf("holding\n");
	fflush(stdout);
	while (read(STDIN_FILENO, &byte, 1) > 0)
		;
}

static void set_up(struct victim *v, const char *path, const char *model, const char *module)
{
	float *x;

	v->sock = raw_connect(path);
	raw_hello(v->sock, "hostile");
	v->model = raw_open_model(v->sock, model);
	v->module = raw_open_module(v->sock, v->model, module, EXL3__MODULE_KIND__MODULE_LINEAR,
				    &v->k, &v->n);
	v->ch = raw_channel_new(v->sock, 64);
	v->x = 0;
	v->y = 4ull * ROWS * v->k;
	v->arena = raw_arena_new(v->sock, v->y + 4ull * ROWS * v->n);
	x = (float *)(void *)v->arena.ptr;
	for (uint32_t i = 0; i < ROWS * v->k; i++)
		x[i] = (float)(int)(i % 17) - 8.0f;
}

/* One request on @ch that must end with @want. */
static void expect(struct raw_channel *ch, int want, const char *what)
{
	struct exl3_cqe cqe;

	raw_submit(ch);
	if (!raw_take(ch, &cqe, RAW_TIMEOUT_MS))
		raw_die("%s: no completion", what);
	if (cqe.result != want)
		raw_die("%s: result %d (detail %llu), expected %d", what, cqe.result,
			(unsigned long long)cqe.detail, want);
}

/* The client itself still gets right results: y as before. */
static void still_works(struct victim *v, struct raw_channel *ch, const char *when)
{
	static float first[65536];
	static bool known;
	float *y = (float *)(void *)(v->arena.ptr + v->y);

	raw_linear(raw_get(ch), v->module, raw_ref(&v->arena, v->x), raw_ref(&v->arena, v->y), 1,
		   77);
	memset(y, 0xff, 4 * v->n);
	expect(ch, 0, when);
	if (v->n > sizeof(first) / sizeof(first[0]))
		raw_die("module is too wide for this test");
	if (known && memcmp(first, y, 4 * v->n))
		raw_die("%s: y differs from the first result", when);
	memcpy(first, y, 4 * v->n);
	known = true;
}

/* Has the daemon ended this channel within the time limit? */
static void must_fail(struct raw_channel *ch, const char *what)
{
	uint64_t until = exl3_now_ns() + RAW_TIMEOUT_MS * 1000000ull;

	raw_kick(ch);
	while (exl3_ring_state(&ch->ring) == EXL3_CHANNEL_OPEN) {
		if (exl3_now_ns() > until)
			raw_die("%s: the channel was not failed", what);
		usleep(1000);
	}
}

/* ---- ring entries: one broken field each ---- */

struct entry_case {
	const char *what;
	int result;      /* 0: any negative one */
	unsigned detail; /* EXL3_DETAIL_NONE: any */
	void (*spoil)(const struct victim *v, struct exl3_sqe *sqe);
};

#define SPOIL(name, ...)                                                     \
	static void spoil_##name(const struct victim *v, struct exl3_sqe *s) \
	{                                                                    \
		(void)v;                                                     \
		__VA_ARGS__;                                                 \
	}
SPOIL(op, s->op = 200)
SPOIL(op_nr, s->op = EXL3_OP_NR)
SPOIL(flags, s->flags = 1u << 17)
SPOIL(reserved0, s->reserved0 = 1)
SPOIL(stream_seq, s->stream_seq = 1)
SPOIL(unused, s->u.words[7] = 1)
SPOIL(module, s->module = 0xfffffff0u)
SPOIL(module_kind, s->op = EXL3_OP_MLA_DECODE)
SPOIL(x_dtype_none, s->x_dtype = 0)
SPOIL(x_dtype_i32, s->x_dtype = EXL3_I32)
SPOIL(y_dtype_e4m3, s->y_dtype = EXL3_E4M3)
SPOIL(y_dtype_large, s->y_dtype = 255)
SPOIL(rows_none, s->rows = 0)
SPOIL(rows_many, s->rows = EXL3_M_MAX + 1)
SPOIL(rows_huge, s->rows = UINT32_MAX)
SPOIL(x_stride_odd, s->x_stride = 4 * v->k + 4)
SPOIL(x_stride_short, s->x_stride = 16)
SPOIL(y_stride_short, s->y_stride = 16)
SPOIL(x_align, s->x += 4)
SPOIL(y_align, s->y += 8)
SPOIL(x_none, s->x = EXL3_REF_NONE)
SPOIL(y_none, s->y = EXL3_REF_NONE)
SPOIL(x_buffer, s->x = EXL3_REF(65535, 0))
SPOIL(x_end, s->x = raw_ref(&v->arena, v->arena.bytes))
SPOIL(x_past, s->x = raw_ref(&v->arena, v->arena.bytes - 16))
SPOIL(x_wrap, s->x = raw_ref(&v->arena, 0xfffffffffff0ull))
SPOIL(y_past, s->y = raw_ref(&v->arena, v->arena.bytes - 16))
SPOIL(stride_wrap, s->rows = 2; s->x_stride = 0xfffffff0u)
SPOIL(y_stride_wrap, s->rows = 2; s->y_stride = 0xfffffff0u)
SPOIL(rows_past, s->rows = EXL3_M_MAX)
SPOIL(overlap, s->y = s->x)
SPOIL(overlap_part, s->y = s->x + 16)
SPOIL(kernel, s->kernel = 60000)
SPOIL(deadline, s->deadline_ns = 1)

static const struct entry_case entry_cases[] = {
	{"unknown op", -EINVAL, EXL3_DETAIL_OP, spoil_op},
	{"op past the last", -EINVAL, EXL3_DETAIL_OP, spoil_op_nr},
	{"unknown flag", -EINVAL, EXL3_DETAIL_OP, spoil_flags},
	{"reserved0", -EINVAL, EXL3_DETAIL_OP, spoil_reserved0},
	{"stream_seq", -EINVAL, EXL3_DETAIL_OP, spoil_stream_seq},
	{"field of another op", -EINVAL, EXL3_DETAIL_OP, spoil_unused},
	{"no such module", -ENOENT, EXL3_DETAIL_MODULE, spoil_module},
	{"a linear as MLA geometry", 0, EXL3_DETAIL_MODULE, spoil_module_kind},
	{"x of no type", -EINVAL, EXL3_DETAIL_DTYPE, spoil_x_dtype_none},
	{"x of integers", -EINVAL, EXL3_DETAIL_DTYPE, spoil_x_dtype_i32},
	{"y of e4m3", -EINVAL, EXL3_DETAIL_DTYPE, spoil_y_dtype_e4m3},
	{"y of type 255", -EINVAL, EXL3_DETAIL_DTYPE, spoil_y_dtype_large},
	{"no rows", -EINVAL, EXL3_DETAIL_ROWS, spoil_rows_none},
	{"one row too many", -EINVAL, EXL3_DETAIL_ROWS, spoil_rows_many},
	{"2^32 - 1 rows", -EINVAL, EXL3_DETAIL_ROWS, spoil_rows_huge},
	{"x stride off 16", -EINVAL, EXL3_DETAIL_STRIDE, spoil_x_stride_odd},
	{"x stride below a row", -EINVAL, EXL3_DETAIL_STRIDE, spoil_x_stride_short},
	{"y stride below a row", -EINVAL, EXL3_DETAIL_STRIDE, spoil_y_stride_short},
	{"x off 16", -EINVAL, EXL3_DETAIL_ALIGN, spoil_x_align},
	{"y off 16", -EINVAL, EXL3_DETAIL_ALIGN, spoil_y_align},
	{"no x", -EINVAL, EXL3_DETAIL_BUFFER, spoil_x_none},
	{"no y", -EINVAL, EXL3_DETAIL_BUFFER, spoil_y_none},
	{"x in no buffer", -EINVAL, EXL3_DETAIL_BUFFER, spoil_x_buffer},
	{"x at the end", -EINVAL, EXL3_DETAIL_BOUNDS, spoil_x_end},
	{"x past the end", -EINVAL, EXL3_DETAIL_BOUNDS, spoil_x_past},
	{"x offset near 2^48", -EINVAL, EXL3_DETAIL_BOUNDS, spoil_x_wrap},
	{"y past the end", -EINVAL, EXL3_DETAIL_BOUNDS, spoil_y_past},
	{"x stride near 2^32", -EINVAL, EXL3_DETAIL_BOUNDS, spoil_stride_wrap},
	{"y stride near 2^32", -EINVAL, EXL3_DETAIL_BOUNDS, spoil_y_stride_wrap},
	{"more rows than the arena has", -EINVAL, EXL3_DETAIL_BOUNDS, spoil_rows_past},
	{"y is x", -EINVAL, EXL3_DETAIL_OVERLAP, spoil_overlap},
	{"y overlaps x", -EINVAL, EXL3_DETAIL_OVERLAP, spoil_overlap_part},
	{"no such kernel", 0, EXL3_DETAIL_KERNEL, spoil_kernel},
	{"deadline in the past", -ETIME, EXL3_DETAIL_NONE, spoil_deadline},
};

static int cmd_entries(const char *path, char **args)
{
	struct victim v;
	unsigned bad = 0;

	set_up(&v, path, args[0], args[1]);
	still_works(&v, &v.ch, "before");
	for (size_t i = 0; i < sizeof(entry_cases) / sizeof(entry_cases[0]); i++) {
		const struct entry_case *c = &entry_cases[i];
		struct exl3_sqe *sqe = raw_get(&v.ch);
		struct exl3_cqe cqe = {0};

		raw_linear(sqe, v.module, raw_ref(&v.arena, v.x), raw_ref(&v.arena, v.y), 1, i);
		c->spoil(&v, sqe);
		raw_submit(&v.ch);
		if (!raw_take(&v.ch, &cqe, RAW_TIMEOUT_MS))
			raw_die("%s: no completion", c->what);
		if (cqe.user_data == i && cqe.result < 0 &&
		    (!c->result || cqe.result == c->result) &&
		    (!c->detail || cqe.detail == c->detail))
			continue;
		printf("%s: result %d detail %llu, expected %d and %u\n", c->what, cqe.result,
		       (unsigned long long)cqe.detail, c->result, c->detail);
		bad++;
	}
	still_works(&v, &v.ch, "after broken entries");
	return bad ? 1 : 0;
}

/* Random entries, half of them a good one with some bytes changed: each gets one completion. */
static int cmd_garbage(const char *path, char **args)
{
	uint64_t count = strtoull(args[3], NULL, 10), sent = 0, done = 0;
	struct victim v;

	rng_state = strtoull(args[2], NULL, 10);
	printf("seed %s\n", args[2]);
	set_up(&v, path, args[0], args[1]);
	still_works(&v, &v.ch, "before");
	while (done < count) {
		struct exl3_sqe entry = {0}, *sqe;
		struct exl3_cqe cqe;

		while (sent < count && sent - done < 32) {
			raw_linear(&entry, v.module, raw_ref(&v.arena, v.x), raw_ref(&v.arena, v.y),
				   1, sent);
			if (rng() & 1)
				random_bytes(&entry, sizeof(entry));
			for (unsigned i = 0; i < 3; i++)
				((uint8_t *)&entry)[rng() % sizeof(entry)] = (uint8_t)rng();
			if (rng() & 1)
				entry.op = (uint8_t)(rng() % EXL3_OP_NR);
			sqe = raw_get(&v.ch);
			memcpy(sqe, &entry, sizeof(entry));
			sent++;
		}
		raw_submit(&v.ch);
		if (!raw_take(&v.ch, &cqe, RAW_TIMEOUT_MS))
			raw_die("entry %llu of %llu has no completion", (unsigned long long)done,
				(unsigned long long)sent);
		if (cqe.result > 0)
			raw_die("a completion has result %d", cqe.result);
		done++;
	}
	for (uint32_t i = 0; i < ROWS * v.k; i++)
		((float *)(void *)v.arena.ptr)[i] = (float)(int)(i % 17) - 8.0f;
	still_works(&v, &v.ch, "after garbage entries");
	return 0;
}

/* ---- ring words ---- */

static int cmd_words(const char *path, char **args)
{
	static const uint32_t lies[] = {65, 1000, 0x80000000u, 0xffffff00u};
	struct victim v;

	set_up(&v, path, args[0], args[1]);
	still_works(&v, &v.ch, "before");
	for (unsigned i = 0; i < 2 * sizeof(lies) / sizeof(lies[0]); i++) {
		struct raw_channel ch = raw_channel_new(v.sock, 64);
		uint32_t lie = lies[i / 2];

		if (i & 1) { /* more completions taken than there were */
			__atomic_store_n(&ch.ring.hdr->cq_head.v, lie, __ATOMIC_SEQ_CST);
			raw_get(&ch);
			exl3_ring_publish(&ch.ring);
		} else {
			__atomic_store_n(&ch.ring.hdr->sq_tail.v, lie, __ATOMIC_SEQ_CST);
		}
		must_fail(&ch, i & 1 ? "impossible cq_head" : "impossible sq_tail");
		still_works(&v, &v.ch, "beside a failed channel");
	}
	/* The header is the daemon's: what a client writes there changes nothing. */
	v.ch.ring.hdr->sq_entries = v.ch.ring.hdr->cq_entries = 0x40000000;
	v.ch.ring.hdr->sqe_offset = v.ch.ring.hdr->cqe_offset = 0xfffff000;
	v.ch.ring.hdr->sq_head.v += 12345;
	still_works(&v, &v.ch, "after its header was overwritten");
	return 0;
}

/* Takes no completion: the CQ fills, one request more is a broken protocol. */
static int cmd_nodrain(const char *path, char **args)
{
	struct victim v;
	struct exl3_cqe cqe;

	set_up(&v, path, args[0], args[1]);
	for (unsigned i = 0; i < 128; i++) {
		struct exl3_sqe *sqe;
		uint64_t until = exl3_now_ns() + RAW_TIMEOUT_MS * 1000000ull;

		while (exl3_ring_get(&v.ch.ring, &sqe) < 0) {
			if (exl3_now_ns() > until)
				raw_die("entry %u: the daemon takes nothing any more", i);
			usleep(100);
		}
		sqe->user_data = i;
		raw_submit(&v.ch);
	}
	hold();
	for (unsigned i = 0; i < 128; i++) {
		if (!raw_take(&v.ch, &cqe, RAW_TIMEOUT_MS) || cqe.result || cqe.user_data != i)
			raw_die("completion %u: result %d, user_data %llu", i, cqe.result,
				(unsigned long long)cqe.user_data);
	}
	/* Without credit: 129 outstanding in a CQ of 128. */
	for (unsigned i = 0; i < 129; i++) {
		uint32_t tail = v.ch.ring.sq_next + i + 1;
		uint64_t until = exl3_now_ns() + RAW_TIMEOUT_MS * 1000000ull;

		__atomic_store_n(&v.ch.ring.hdr->sq_tail.v, tail, __ATOMIC_SEQ_CST);
		raw_kick(&v.ch);
		while (__atomic_load_n(&v.ch.ring.hdr->sq_head.v, __ATOMIC_ACQUIRE) != tail &&
		       exl3_ring_state(&v.ch.ring) == EXL3_CHANNEL_OPEN && exl3_now_ns() < until)
			usleep(50);
	}
	must_fail(&v.ch, "a request without credit");
	return 0;
}

/* ---- wake-ups ---- */

static int cmd_kicks(const char *path, char **args)
{
	uint64_t full = UINT64_MAX - 1, until, kicks = 0;
	struct raw_channel flood;
	struct victim v;

	set_up(&v, path, args[0], args[1]);
	flood = raw_channel_new(v.sock, 16);
	/* The description is shared: blocking for us is blocking for the daemon. */
	fcntl(flood.kick_fd, F_SETFL, fcntl(flood.kick_fd, F_GETFL) | O_NONBLOCK);
	if (write(flood.kick_fd, &full, sizeof(full)) < 0 && errno != EAGAIN)
		raw_die("filling the eventfd: %s", strerror(errno));
	fcntl(flood.kick_fd, F_SETFL, fcntl(flood.kick_fd, F_GETFL) & ~O_NONBLOCK);
	still_works(&v, &v.ch, "beside a full eventfd");
	raw_get(&flood);
	exl3_ring_publish(&flood.ring);
	fcntl(flood.kick_fd, F_SETFL, fcntl(flood.kick_fd, F_GETFL) | O_NONBLOCK);
	raw_kick(&flood);

	/* Empty it and kick without work, as fast as possible for a second. */
	for (until = exl3_now_ns() + 1000000000u; exl3_now_ns() < until; kicks++) {
		uint64_t count;

		if (read(flood.kick_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
			raw_die("eventfd: %s", strerror(errno));
		raw_kick(&flood);
	}
	printf("%llu kicks\n", (unsigned long long)kicks);
	still_works(&v, &v.ch, "beside a flood of kicks");
	hold();
	return 0;
}

/* Asks for messages on its notification socket and never reads one. */
static int cmd_notify(const char *path, char **args)
{
	struct victim v;
	struct exl3_cqe cqe;

	set_up(&v, path, args[0], args[1]);
	exl3_ring_arm(&v.ch.ring, EXL3_CQ_WANT_MSG | EXL3_CQ_NEED_WAKEUP);
	for (unsigned i = 0; i < 2000; i++) {
		raw_get(&v.ch)->user_data = i;
		raw_submit(&v.ch);
		if (!raw_take(&v.ch, &cqe, RAW_TIMEOUT_MS) || cqe.result)
			raw_die("request %u: result %d", i, cqe.result);
	}
	hold();
	still_works(&v, &v.ch, "with a full notification socket");
	return 0;
}

/* ---- memory ---- */

static int cmd_seals(const char *path, char **args)
{
	RAW_REQUEST(req, open_tensor, OPEN_TENSOR, Exl3__OpenTensor body = EXL3__OPEN_TENSOR__INIT);
	struct victim v;
	int fds[EXL3_FDS_MAX];
	unsigned nr_fds;
	void *map;

	set_up(&v, path, args[0], args[1]);
	for (unsigned i = 0; i < 2; i++) {
		int fd = i ? v.ch.seg->fd : v.arena.fd;

		if (ftruncate(fd, 0) == 0 || ftruncate(fd, 1 << 24) == 0)
			raw_die("%s: its size can be changed", i ? "ring" : "arena");
		if (fcntl(fd, F_ADD_SEALS, 8 /* F_SEAL_WRITE */) == 0)
			raw_die("%s: seals can be added", i ? "ring" : "arena");
	}
	body.model = v.model;
	body.name = args[2];
	exl3__reply__free_unpacked(raw_call_ok(v.sock, &req, fds, &nr_fds), NULL);
	if (nr_fds != 1)
		raw_die("OpenTensor: %u descriptors", nr_fds);
	map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	if (map != MAP_FAILED)
		raw_die("tensor: can be mapped for writing");
	if (pwrite(fds[0], "x", 1, 0) == 1 || ftruncate(fds[0], 0) == 0)
		raw_die("tensor: can be written");
	still_works(&v, &v.ch, "after tampering with descriptors");
	return 0;
}

/* ---- control packets ---- */

/* Is a newcomer served? */
static void newcomer(const char *path)
{
	int sock = raw_connect(path);

	raw_hello(sock, "newcomer");
	close(sock);
}

static size_t make_packet(uint8_t *buf, size_t size)
{
	RAW_REQUEST(req, create_arena, CREATE_ARENA,
		    Exl3__CreateArena body = EXL3__CREATE_ARENA__INIT);
	size_t n;

	body.bytes = rng() & 1 ? rng() : 4096;
	req.id = rng();
	n = exl3__request__pack(&req, buf);
	switch (rng() % 4) {
	case 0: /* noise */
		n = 1 + rng() % 300;
		random_bytes(buf, n);
		break;
	case 1: /* cut off */
		n = 1 + rng() % n;
		break;
	case 2: /* some bytes changed */
		for (unsigned i = 0; i < 2; i++)
			buf[rng() % n] = (uint8_t)rng();
		break;
	default: /* a very long one of nothing */
		n = rng() % 8 ? n : size;
		memset(buf + n / 2, 0, n - n / 2);
	}
	return n;
}

static int cmd_packets(const char *path, char **args)
{
	static uint8_t buf[2 * EXL3_PACKET_MAX];
	uint64_t count = strtoull(args[1], NULL, 10), answered = 0, closed = 0;
	int sock = -1, greeted = 0;

	rng_state = strtoull(args[0], NULL, 10);
	printf("seed %s\n", args[0]);
	for (uint64_t i = 0; i < count; i++) {
		int fds[EXL3_FDS_MAX];
		unsigned nr_fds;
		Exl3__Reply *reply;
		bool late;
		size_t n;

		if (sock < 0) {
			sock = raw_connect(path);
			greeted = rng() & 1;
			if (greeted)
				raw_hello(sock, "noise");
		}
		n = make_packet(buf, rng() & 1 ? EXL3_PACKET_MAX : sizeof(buf));
		if (send(sock, buf, n, MSG_NOSIGNAL) < 0) {
			closed++;
			close(sock);
			sock = -1;
			continue;
		}
		reply = raw_recv(sock, fds, &nr_fds, 10000, &late);
		if (late)
			raw_die("packet %llu: neither answered nor refused", (unsigned long long)i);
		for (unsigned f = 0; f < nr_fds; f++)
			close(fds[f]);
		if (!reply) {
			closed++;
			close(sock);
			sock = -1;
			continue;
		}
		if (reply->code < 0 && (!reply->error || !reply->error[0]))
			raw_die("packet %llu: code %d without a sentence", (unsigned long long)i,
				reply->code);
		answered++;
		exl3__reply__free_unpacked(reply, NULL);
	}
	printf("%llu answered, %llu closed\n", (unsigned long long)answered,
	       (unsigned long long)closed);
	newcomer(path);
	return 0;
}

/* Descriptors that nobody asked for come along with a message. */
static int cmd_surplus(const char *path, char **args)
{
	RAW_REQUEST(req, hello, HELLO, Exl3__Hello body = EXL3__HELLO__INIT);
	unsigned nr = (unsigned)strtoul(args[0], NULL, 10);
	int fds[253], got[EXL3_FDS_MAX];
	char control[CMSG_SPACE(sizeof(fds))] = {0};
	uint8_t buf[64];
	struct iovec iov = {.iov_base = buf};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control};
	struct cmsghdr *c = (struct cmsghdr *)(void *)control;
	int sock = raw_connect(path);
	unsigned nr_got;

	if (nr < 1 || nr > 253)
		raw_die("1 to 253 descriptors");
	body.version_min = body.version_max = 1;
	iov.iov_len = exl3__request__pack(&req, buf);
	for (unsigned i = 0; i < nr; i++)
		fds[i] = STDERR_FILENO;
	msg.msg_controllen = CMSG_SPACE(nr * sizeof(int));
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(nr * sizeof(int));
	memcpy(CMSG_DATA(c), fds, nr * sizeof(int));
	for (unsigned i = 0; i < 10; i++) {
		Exl3__Reply *reply;

		if (sendmsg(sock, &msg, MSG_NOSIGNAL) < 0)
			break; /* closed after the first one: also an answer */
		reply = raw_recv(sock, got, &nr_got, RAW_TIMEOUT_MS, NULL);
		if (!reply)
			break;
		exl3__reply__free_unpacked(reply, NULL);
	}
	newcomer(path);
	hold();
	return 0;
}

/* Hello comes first and must offer a version that the daemon speaks. */
static int cmd_hello(const char *path, char **args)
{
	Exl3__Request req = EXL3__REQUEST__INIT;
	Exl3__Status status = EXL3__STATUS__INIT;
	Exl3__Hello hello = EXL3__HELLO__INIT;
	Exl3__Reply *reply;
	int sock = raw_connect(path);

	(void)args;
	req.body_case = EXL3__REQUEST__BODY_STATUS;
	req.status = &status;
	reply = raw_call(sock, &req, NULL, NULL);
	if (reply->code >= 0)
		raw_die("a request before Hello was granted");
	exl3__reply__free_unpacked(reply, NULL);
	close(sock);

	sock = raw_connect(path);
	hello.version_min = hello.version_max = 99;
	req.id = 7;
	req.body_case = EXL3__REQUEST__BODY_HELLO;
	req.hello = &hello;
	reply = raw_call(sock, &req, NULL, NULL);
	if (reply->code != -EPROTO || reply->id != 7 || !strchr(reply->error, '1'))
		raw_die("version 99: code %d id %llu, \"%s\"", reply->code,
			(unsigned long long)reply->id, reply->error);
	exl3__reply__free_unpacked(reply, NULL);
	close(sock);

	sock = raw_connect(path);
	raw_hello(sock, "no body");
	req.body_case = EXL3__REQUEST__BODY__NOT_SET;
	reply = raw_call(sock, &req, NULL, NULL);
	if (reply->code != -EOPNOTSUPP)
		raw_die("a request without a body: code %d", reply->code);
	exl3__reply__free_unpacked(reply, NULL);
	return 0;
}

/* Sends requests and reads no reply, until its socket is full. */
static int cmd_deaf(const char *path, char **args)
{
	RAW_REQUEST(req, list_modules, LIST_MODULES,
		    Exl3__ListModules body = EXL3__LIST_MODULES__INIT);
	uint8_t buf[EXL3_NAME_MAX + 64];
	int sock = raw_connect(path), sent;
	uint64_t next = 1000;

	raw_hello(sock, "deaf");
	body.model = args[0];
	for (sent = 0; sent < 100000; sent++) {
		struct pollfd p = {.fd = sock, .events = POLLOUT};
		size_t n;

		req.id = 1000 + (unsigned)sent;
		n = exl3__request__pack(&req, buf);
		if (poll(&p, 1, 500) <= 0 || p.revents & (POLLHUP | POLLERR) ||
		    send(sock, buf, n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
			break;
	}
	printf("%d requests unanswered\n", sent);
	if (sent == 100000)
		raw_die("the daemon buffers without a limit");
	hold();
	for (; next < 1000 + (unsigned)sent; next++) {
		int fds[EXL3_FDS_MAX];
		unsigned nr_fds;
		bool late;
		Exl3__Reply *reply = raw_recv(sock, fds, &nr_fds, 5000, &late);

		if (late)
			raw_die("reply %llu never came", (unsigned long long)next);
		if (!reply)
			break; /* thrown out: also an answer */
		if (reply->id != next)
			raw_die("reply %llu where %llu was due", (unsigned long long)reply->id,
				(unsigned long long)next);
		exl3__reply__free_unpacked(reply, NULL);
	}
	return 0;
}

struct command {
	const char *name, *args;
	int nr_args;
	int (*run)(const char *path, char **args);
};

static const struct command commands[] = {
	{"entries", "MODEL MODULE", 2, cmd_entries},
	{"garbage", "MODEL MODULE SEED COUNT", 4, cmd_garbage},
	{"words", "MODEL MODULE", 2, cmd_words},
	{"nodrain", "MODEL MODULE", 2, cmd_nodrain},
	{"kicks", "MODEL MODULE", 2, cmd_kicks},
	{"notify", "MODEL MODULE", 2, cmd_notify},
	{"seals", "MODEL MODULE TENSOR", 3, cmd_seals},
	{"packets", "SEED COUNT", 2, cmd_packets},
	{"surplus", "NR_FDS", 1, cmd_surplus},
	{"hello", "", 0, cmd_hello},
	{"deaf", "MODEL", 1, cmd_deaf},
};

int main(int argc, char **argv)
{
	const struct command *c = commands;
	const struct command *end = c + sizeof(commands) / sizeof(commands[0]);

	while (c < end && (argc < 3 || strcmp(c->name, argv[2]) || argc != 3 + c->nr_args))
		c++;
	if (c < end)
		raw_quit(c->run(argv[1], argv + 3));
	for (c = commands; c < end; c++)
		fprintf(stderr, "usage: hostile SOCKET %s %s\n", c->name, c->args);
	return 2;
}
