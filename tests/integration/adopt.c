/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt.c - a client that claims to come back, with descriptors and numbers that no worker gave it.
 *
 * usage: adopt SOCKET MODEL MODULE
 *        adopt SOCKET BYTES          more than memory-max
 * Exit status 0: what is no arena was refused, what is one keeps its contents and its number.
 */
#include "tests/integration/raw.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BYTES 65536u
#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int sock;

/* The reply's code; @fds stay ours. */
static int adopt(const int *fds, unsigned nr_fds, uint64_t bytes, uint32_t buffer, uint32_t *ret)
{
	RAW_REQUEST(req, adopt_arena, ADOPT_ARENA, Exl3__AdoptArena body = EXL3__ADOPT_ARENA__INIT);
	static uint8_t buf[EXL3_PACKET_MAX];
	struct exl3_error err;
	int got[EXL3_FDS_MAX], code;
	unsigned nr_got;
	Exl3__Reply *reply;

	body.bytes = bytes;
	body.buffer = buffer;
	if (exl3_frame_send(sock, buf, exl3__request__pack(&req, buf), fds, nr_fds, 0, &err) < 0)
		raw_die("%s", err.text);
	reply = raw_recv(sock, got, &nr_got, RAW_TIMEOUT_MS, NULL);
	if (!reply)
		raw_die("the daemon closed the connection");
	if (nr_got)
		raw_die("%u descriptors came back", nr_got);
	code = reply->code;
	if (code && !reply->error[0])
		raw_die("code %d without a sentence", code);
	if (!code && ret)
		*ret = reply->arena->buffer;
	exl3__reply__free_unpacked(reply, NULL);
	return code;
}

static int memfd(unsigned flags, size_t bytes, int seals)
{
	int fd = memfd_create("adopt", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0 || (seals && fcntl(fd, F_ADD_SEALS, seals) < 0))
		raw_die("memfd: %s", strerror(errno));
	return fd;
}

static void refused(int fd, uint64_t bytes, int want, const char *what)
{
	int code = adopt(&fd, 1, bytes, 0, NULL);

	if (code != want)
		raw_die("%s: code %d, expected %d", what, code, want);
	close(fd);
}

static void bad_descriptors(void)
{
	char path[64];
	int fd, pair[2], two[2];

	refused(open("/dev/zero", O_RDWR | O_CLOEXEC), BYTES, -EINVAL, "a device");
	refused(open("/proc/self/mem", O_RDWR | O_CLOEXEC), BYTES, -EINVAL, "memory of a process");
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		raw_die("socketpair: %s", strerror(errno));
	refused(pair[0], BYTES, -EINVAL, "a socket");
	close(pair[1]);
	refused(memfd(0, BYTES, 0), BYTES, -EINVAL, "a memfd that can shrink");
	refused(memfd(0, BYTES, F_SEAL_SHRINK | F_SEAL_GROW), BYTES, -EINVAL, "one that can be sealed further");
	refused(memfd(0, BYTES, SIZE_SEALS | F_SEAL_WRITE), BYTES, -EINVAL, "one that cannot be written");
	refused(memfd(0, BYTES, SIZE_SEALS), 2 * BYTES, -EINVAL, "one that is smaller than announced");
	refused(memfd(0, BYTES, SIZE_SEALS), BYTES - 4096, -EINVAL, "one that is larger");
	refused(memfd(0, BYTES, SIZE_SEALS), BYTES - 1, -EINVAL, "half a page");
	refused(memfd(0, BYTES, SIZE_SEALS), 0, -EINVAL, "no bytes");
	fd = memfd(0, BYTES, SIZE_SEALS);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	refused(open(path, O_RDONLY | O_CLOEXEC), BYTES, -EINVAL, "one that is open for reading only");
	two[0] = two[1] = fd;
	if (adopt(two, 2, BYTES, 0, NULL) != -EINVAL || adopt(NULL, 0, BYTES, 0, NULL) != -EINVAL)
		raw_die("two or no descriptors were taken");
	close(fd);
	/* Huge pages, where the machine has some: they can be missing when they are touched. */
	fd = memfd_create("adopt", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
	if (fd >= 0 && ftruncate(fd, 2 << 20) == 0 && fcntl(fd, F_ADD_SEALS, SIZE_SEALS) == 0)
		refused(fd, 2 << 20, -EINVAL, "huge pages");
	else if (fd >= 0)
		close(fd);
}

static void good_one(const char *model, const char *module)
{
	int fd = memfd(0, BYTES, SIZE_SEALS), i;
	uint32_t id = 0, k, n, handle;
	struct raw_channel ch;
	struct raw_arena a = {.bytes = BYTES, .fd = fd};
	struct exl3_cqe cqe;
	float *x, *y;

	a.ptr = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (a.ptr == MAP_FAILED)
		raw_die("mmap: %s", strerror(errno));
	i = adopt(&fd, 1, BYTES, 5u << 10 | 7, &id);
	if (i || id != (5u << 10 | 7))
		raw_die("a good one: code %d, number %u", i, id);
	if (adopt(&fd, 1, BYTES, 6u << 10 | 7, &id) != -EEXIST ||
	    adopt(&fd, 1, BYTES, 1024u, &id) != 0 || adopt(&fd, 1, BYTES, 7u, &id) != -EEXIST ||
	    adopt(&fd, 1, BYTES, UINT32_MAX, &id) != -EEXIST)
		raw_die("a number that is in use or impossible was given");
	a.buffer = 5u << 10 | 7;
	handle = raw_open_module(sock, raw_open_model(sock, model), module,
				 EXL3__MODULE_KIND__MODULE_LINEAR, &k, &n);
	x = (float *)(void *)a.ptr;
	y = (float *)(void *)((char *)a.ptr + BYTES / 2);
	for (uint32_t j = 0; j < k; j++)
		x[j] = (float)(j % 7) - 3;
	memset(y, 0, BYTES / 2);
	/* Its pages are there again after the client has punched them out. */
	if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, BYTES / 2, BYTES / 2) < 0)
		raw_die("fallocate: %s", strerror(errno));
	ch = raw_channel_new(sock, 4);
	raw_linear(raw_get(&ch), handle, raw_ref(&a, 0), raw_ref(&a, BYTES / 2), 1, 1);
	raw_submit(&ch);
	if (raw_take(&ch, &cqe, RAW_TIMEOUT_MS) != 1 || cqe.result)
		raw_die("a request on adopted memory: result %d", cqe.result);
	exl3_segment_free(ch.seg);
	for (uint32_t j = 0; j < n; j++)
		if (y[j] != 0)
			return;
	raw_die("the result has not arrived");
}

static void handles(const char *model)
{
	RAW_REQUEST(req, open_model, OPEN_MODEL, Exl3__OpenModel body = EXL3__OPEN_MODEL__INIT);
	static const struct {
		uint32_t handle;
		int code;
	} rows[] = {
		{3u << 16 | 200, 0}, {4u << 16 | 200, -EEXIST}, {1, -EINVAL}, {0xffffffffu, 0}, {0, 0},
	};

	body.name = (char *)(uintptr_t)model;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		Exl3__Reply *reply;

		body.handle = rows[i].handle;
		reply = raw_call(sock, &req, NULL, NULL);
		if (reply->code != rows[i].code ||
		    (!reply->code && rows[i].handle &&
		     reply->models->models[0]->handle != rows[i].handle))
			raw_die("handle 0x%x: code %d (%s), expected %d", rows[i].handle, reply->code,
				reply->error, rows[i].code);
		exl3__reply__free_unpacked(reply, NULL);
	}
}

static void free_buffer(uint32_t id)
{
	RAW_REQUEST(req, free_buffer, FREE_BUFFER, Exl3__FreeBuffer body = EXL3__FREE_BUFFER__INIT);

	body.buffer = id;
	exl3__reply__free_unpacked(raw_call_ok(sock, &req, NULL, NULL), NULL);
}

/* What the daemon may not hold is refused before it takes any memory, and what came and went counts no more. */
static int limits(const char *path, uint64_t too_much)
{
	struct stat st;
	uint32_t id;
	int fd, code;

	sock = raw_connect(path);
	raw_hello(sock, "adopt");
	fd = memfd(0, too_much, SIZE_SEALS);
	code = adopt(&fd, 1, too_much, 0, NULL);
	if (code != -ENOMEM)
		raw_die("more than memory-max: code %d", code);
	if (fstat(fd, &st) < 0 || st.st_blocks)
		raw_die("what was refused takes %lld blocks", (long long)st.st_blocks);
	close(fd);
	for (int i = 0; i < 20; i++) {
		fd = memfd(0, BYTES, SIZE_SEALS);
		code = adopt(&fd, 1, BYTES, 1u << 10 | 3, &id);
		if (code)
			raw_die("arena %d that was let go again: code %d", i, code);
		close(fd);
		free_buffer(id);
	}
	close(sock);
	return 0;
}

static int register_mla(uint32_t want, uint32_t *ret)
{
	RAW_REQUEST(req, register_mla, REGISTER_MLA, Exl3__RegisterMla body = EXL3__REGISTER_MLA__INIT);
	Exl3__Reply *reply;
	int code;

	body.heads = 1;
	body.dim = body.value_dim = 64;
	body.topk = body.slots = 1;
	body.cache_dtype = EXL3_F16;
	body.indices_dtype = EXL3_I32;
	body.handle = want;
	reply = raw_call(sock, &req, NULL, NULL);
	code = reply->code;
	if (!code)
		*ret = reply->handle->handle;
	exl3__reply__free_unpacked(reply, NULL);
	return code;
}

/* What a refusal takes. */
static uint64_t refusal_ns(uint32_t want, int expected)
{
	uint64_t start = exl3_now_ns();
	uint32_t id;
	int code = register_mla(want, &id);

	if (code != expected)
		raw_die("handle %u: code %d, expected %d", want, code, expected);
	return exl3_now_ns() - start;
}

/* All handles there are, under numbers of our choice: to be told that there are no more takes the daemon no search
 * through all of them each time. */
static void all_handles(void)
{
	uint64_t wrong = UINT64_MAX, full = UINT64_MAX, ns;
	uint32_t id;

	for (uint32_t i = EXL3_HANDLES_MAX; i-- > 0;) {
		int code = register_mla(9u << 16 | i, &id);

		if (code && code != -EEXIST) /* those that are open already */
			raw_die("handle %u: code %d", i, code);
	}
	/* The shortest of many: the machine may do other things. */
	for (int i = 0; i < 1000; i++) {
		ns = refusal_ns(1, -EINVAL);
		wrong = ns < wrong ? ns : wrong;
		ns = refusal_ns(0, -EDQUOT);
		full = ns < full ? ns : full;
	}
	if (full > 4 * wrong)
		raw_die("a refusal takes %llu us because all handles are open, %llu us for another reason",
			(unsigned long long)full / 1000, (unsigned long long)wrong / 1000);
}

int main(int argc, char **argv)
{
	if (argc == 3)
		return limits(argv[1], strtoull(argv[2], NULL, 10));
	if (argc != 4) {
		fprintf(stderr, "usage: adopt SOCKET MODEL MODULE | SOCKET BYTES\n");
		return 2;
	}
	sock = raw_connect(argv[1]);
	raw_hello(sock, "adopt");
	bad_descriptors();
	good_one(argv[2], argv[3]);
	handles(argv[2]);
	all_handles();
	close(sock);
	return 0;
}
