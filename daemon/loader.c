/* SPDX-License-Identifier: Apache-2.0 */
/* loader.c - the bytes of a checkpoint, in order, with several reads in flight. */
#include "daemon/loader.h"

#include "daemon/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define BLOCK        4096u                   /* what O_DIRECT wants offsets and lengths to be */
#define BUFFER_BYTES (EXL3_SPAN + 2 * BLOCK) /* a span, widened to blocks at both ends */

/* A run of data of one file. */
struct span {
	uint64_t begin, end;
	uint32_t file;
	uint32_t first; /* tensor that has its first byte */
};

/* A buffer and the read that fills it. IDLE -> READING -> FULL (then held until the next sync). */
struct slot {
	char *buf; /* owned, from the sink */
	const struct span *span;
	uint64_t at; /* file offset of buf[0] */
	size_t got;  /* bytes of it that are there */
	bool direct, reading;
	int error; /* of the read, negative errno */
};

/* A file's second descriptor. It stays open to the end: reads in flight name it by number. */
struct direct {
	int fd; /* owned, or -1 */
	bool tried, refused;
};

struct run {
	const struct exl3_loader *l;
	struct span *spans; /* owned */
	uint32_t nr_spans;
	struct direct *direct; /* owned; per file */
	struct slot slots[EXL3_SPAN_BUFFERS];
	struct io_uring ring;
	bool uring;
	unsigned in_flight;
	struct exl3_loader_stats stats;
};

static int add_span(struct run *r, size_t *room, struct span s, struct exl3_error *err)
{
	if (r->nr_spans == *room) {
		size_t more = *room ? 2 * *room : 64;
		struct span *v = realloc(r->spans, more * sizeof(*v));

		if (!v)
			return exl3_errf(err, -ENOMEM, "out of memory");
		r->spans = v;
		*room = more;
	}
	r->spans[r->nr_spans++] = s;
	return 0;
}

/* Cuts a file: small tensors stay whole, large ones fill what is left of a span. */
static int cut_file(struct run *r, uint32_t f, size_t *room, struct exl3_error *err)
{
	const struct exl3_st_file *file = &r->l->ckpt->files[f];
	struct span s = {.file = f, .begin = file->data, .end = file->data};
	int rc;

	for (uint32_t i = 0; i < file->nr_tensors; i++) {
		const struct exl3_st_tensor *t = &file->tensors[i];
		uint64_t end = t->begin + t->bytes;

		while (s.end < end) {
			uint64_t space = EXL3_SPAN - (s.end - s.begin), left = end - s.end;

			if (!space || (t->bytes <= EXL3_WHOLE_MAX && left > space)) {
				rc = add_span(r, room, s, err);
				if (rc < 0)
					return rc;
				s.begin = s.end;
				s.first = i;
				continue;
			}
			if (s.end == s.begin)
				s.first = i;
			s.end += left < space ? left : space;
		}
	}
	return s.end > s.begin ? add_span(r, room, s, err) : 0;
}

/* A page here and there tells: files are read front to back, so residency comes in long runs. */
static bool resident(int fd, const struct span *s)
{
	uint64_t at[3] = {s->begin, s->begin + (s->end - s->begin) / 2, s->end - 1};
	char byte;

	for (int i = 0; i < 3; i++) {
		struct iovec v = {&byte, 1};

		if (preadv2(fd, &v, 1, (off_t)at[i], RWF_NOWAIT) < 0 && errno == EAGAIN)
			return false;
	}
	return true;
}

/* Can this file be read past the page cache? */
static bool can_direct(struct run *r, uint32_t f)
{
	struct direct *d = &r->direct[f];
	char path[64];

	if (!d->tried) {
		/* Through /proc: the same inode, whatever the name means by now. */
		snprintf(path, sizeof(path), "/proc/self/fd/%d", r->l->ckpt->files[f].fd);
		d->fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
		d->tried = true;
	}
	return d->fd >= 0 && !d->refused;
}

static int slot_fd(struct run *r, const struct slot *s)
{
	return s->direct ? r->direct[s->span->file].fd : r->l->ckpt->files[s->span->file].fd;
}

static size_t slot_want(const struct slot *s)
{
	size_t want = (size_t)(s->span->end - s->at);

	return s->direct ? (want + BLOCK - 1) / BLOCK * BLOCK : want;
}

/* Is every byte of the span there? */
static bool slot_full(const struct slot *s)
{
	return s->at + s->got >= s->span->end;
}

/* Asks the ring for what is still missing. */
static void slot_issue(struct run *r, struct slot *s)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);

	/* One entry per buffer and as many entries as buffers: there is always one. */
	io_uring_prep_read(sqe, slot_fd(r, s), s->buf + s->got, (unsigned)(slot_want(s) - s->got),
			   s->at + s->got);
	/* Resident pages would be copied inside the submission, one span after the other. */
	if (!s->direct)
		sqe->flags |= IOSQE_ASYNC;
	io_uring_sqe_set_data(sqe, s);
	s->reading = true;
	r->in_flight++;
}

static void slot_start(struct run *r, struct slot *s, const struct span *span)
{
	const struct exl3_st_file *file = &r->l->ckpt->files[span->file];

	s->span = span;
	s->got = 0;
	s->error = 0;
	s->direct = !r->l->no_direct && !resident(file->fd, span) && can_direct(r, span->file);
	s->at = s->direct ? span->begin / BLOCK * BLOCK : span->begin;
	if (r->uring)
		slot_issue(r, s);
}

/* One read's result. True: the slot needs another one. */
static bool slot_result(struct run *r, struct slot *s, int res)
{
	r->stats.reads++;
	if (exl3_fault("loader.read"))
		res = -EIO;
	if (res > 1 && exl3_fault("loader.short"))
		res /= 2;
	if (s->direct && exl3_fault("loader.direct"))
		res = -EINVAL;
	if (res == -EINTR || res == -EAGAIN)
		return true;
	if (res < 0 && s->direct) {
		/* The file system promised O_DIRECT and did not keep it: the page cache it is. */
		s->direct = false;
		if (res == -EINVAL || res == -EOPNOTSUPP)
			r->direct[s->span->file].refused = true;
		return true;
	}
	if (res <= 0) {
		s->error = res < 0 ? res : -ENODATA;
		return false;
	}
	s->got += (size_t)res;
	if (s->direct)
		r->stats.bytes_direct += (uint64_t)res;
	else
		r->stats.bytes_cached += (uint64_t)res;
	/* Past an odd end (of the file as it was) only the page cache can go on. */
	if (s->got % BLOCK)
		s->direct = false;
	return !slot_full(s);
}

static int wait_ring(struct run *r, struct exl3_error *err)
{
	struct io_uring_cqe *cqe;
	int rc = io_uring_submit_and_wait(&r->ring, 1);

	if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY)
		return exl3_errf(err, rc, "io_uring: %s", strerror(-rc));
	while (io_uring_peek_cqe(&r->ring, &cqe) == 0) {
		struct slot *s = io_uring_cqe_get_data(cqe);
		int res = cqe->res;

		io_uring_cqe_seen(&r->ring, cqe);
		s->reading = false;
		r->in_flight--;
		if (slot_result(r, s, res))
			slot_issue(r, s);
	}
	return 0;
}

static int slot_wait(struct run *r, struct slot *s, struct exl3_error *err)
{
	const char *file = r->l->ckpt->files[s->span->file].name;
	int rc;

	while (r->uring && s->reading) {
		rc = wait_ring(r, err);
		if (rc < 0)
			return rc;
	}
	while (!r->uring) {
		ssize_t n = pread(slot_fd(r, s), s->buf + s->got, slot_want(s) - s->got,
				  (off_t)(s->at + s->got));

		if (!slot_result(r, s, n < 0 ? -errno : (int)n))
			break;
	}
	if (s->error == -ENODATA)
		return exl3_errf(err, -EINVAL,
				 "%s: was cut at byte %" PRIu64 " while it was being loaded", file,
				 s->at + s->got);
	if (s->error)
		return exl3_errf(err, s->error, "%s: read at byte %" PRIu64 ": %s", file,
				 s->at + s->got, strerror(-s->error));
	return 0;
}

/* Hands a full span over, tensor by tensor. */
static int deliver(struct run *r, const struct slot *s, struct exl3_error *err)
{
	const struct exl3_st_file *file = &r->l->ckpt->files[s->span->file];
	uint64_t pos = s->span->begin;

	for (uint32_t i = s->span->first; pos < s->span->end; i++) {
		const struct exl3_st_tensor *t = &file->tensors[i];
		uint64_t end = t->begin + t->bytes;
		size_t bytes;
		int rc;

		if (end <= pos)
			continue; /* an empty one */
		bytes = (size_t)((end < s->span->end ? end : s->span->end) - pos);
		rc = r->l->data(r->l->arg, s->span->file, i, pos - t->begin, s->buf + (pos - s->at),
				bytes, err);
		if (rc < 0)
			return rc;
		pos += bytes;
	}
	if (r->l->loaded)
		atomic_fetch_add_explicit(r->l->loaded, s->span->end - s->span->begin,
					  memory_order_relaxed);
	return 0;
}

static int stream(struct run *r, struct exl3_error *err)
{
	uint32_t started = 0, done = 0, released = 0;
	int rc;

	while (done < r->nr_spans) {
		struct slot *s = &r->slots[done % EXL3_SPAN_BUFFERS];

		if (r->l->cancel && atomic_load_explicit(r->l->cancel, memory_order_relaxed))
			return exl3_errf(err, -ECANCELED, "loading was cancelled");
		for (; started < r->nr_spans && started - released < EXL3_SPAN_BUFFERS; started++)
			slot_start(r, &r->slots[started % EXL3_SPAN_BUFFERS], &r->spans[started]);
		if (r->uring)
			io_uring_submit(
				&r->ring); /* what it cannot take now, wait_ring() repeats */
		rc = slot_wait(r, s, err);
		if (rc < 0)
			return rc;
		rc = deliver(r, s, err);
		if (rc < 0)
			return rc;
		/* Half of the buffers are read into while the other half is copied away. */
		if (++done - released >= EXL3_SPAN_BUFFERS / 2 || done == r->nr_spans) {
			rc = r->l->sync(r->l->arg, err);
			if (rc < 0)
				return rc;
			released = done;
		}
	}
	for (uint32_t f = 0; f < r->l->ckpt->nr_files; f++) {
		rc = exl3_st_unchanged(&r->l->ckpt->files[f], err);
		if (rc < 0)
			return rc;
	}
	return 0;
}

static int run_init(struct run *r, struct exl3_error *err)
{
	size_t room = 0;
	int rc;

	r->direct = calloc(r->l->ckpt->nr_files + 1, sizeof(*r->direct));
	if (!r->direct)
		return exl3_errf(err, -ENOMEM, "out of memory");
	for (uint32_t f = 0; f < r->l->ckpt->nr_files; f++)
		r->direct[f].fd = -1;
	for (uint32_t f = 0; f < r->l->ckpt->nr_files; f++) {
		rc = cut_file(r, f, &room, err);
		if (rc < 0)
			return rc;
	}
	for (uint32_t i = 0; i < EXL3_SPAN_BUFFERS && i < r->nr_spans; i++) {
		r->slots[i].buf = r->l->buffer_new(r->l->arg, BUFFER_BYTES);
		if (!r->slots[i].buf)
			return exl3_errf(err, -ENOMEM, "no memory for read buffers");
	}
	/* Refused by a seccomp filter, the sysctl or a memlock limit: then without. */
	r->uring = !r->l->no_uring && r->nr_spans && !exl3_fault("loader.uring") &&
		   io_uring_queue_init(EXL3_SPAN_BUFFERS, &r->ring, 0) == 0;
	return 0;
}

static void run_fini(struct run *r)
{
	/* The kernel writes into our buffers as long as a read is in flight. */
	while (r->uring && r->in_flight) {
		struct io_uring_cqe *cqe;
		int rc = io_uring_submit_and_wait(&r->ring, 1);

		if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY)
			break;
		while (io_uring_peek_cqe(&r->ring, &cqe) == 0) {
			io_uring_cqe_seen(&r->ring, cqe);
			r->in_flight--;
		}
	}
	if (r->uring)
		io_uring_queue_exit(&r->ring);
	/* Rather lost than written to by the kernel after they belong to somebody else. */
	for (uint32_t i = 0; i < EXL3_SPAN_BUFFERS && !r->in_flight; i++)
		if (r->slots[i].buf)
			r->l->buffer_free(r->l->arg, r->slots[i].buf, BUFFER_BYTES);
	for (uint32_t f = 0; r->direct && f < r->l->ckpt->nr_files; f++)
		exl3_closep(&r->direct[f].fd);
	free(r->direct);
	free(r->spans);
}

int exl3_loader_run(const struct exl3_loader *loader, struct exl3_error *err)
{
	struct run r = {.l = loader};
	int rc = run_init(&r, err);

	if (rc == 0)
		rc = stream(&r, err);
	if (rc < 0)
		loader->sync(loader->arg, NULL); /* copies under way read from our buffers */
	r.stats.uring = r.uring;
	run_fini(&r);
	if (loader->stats)
		*loader->stats = r.stats;
	return rc;
}
