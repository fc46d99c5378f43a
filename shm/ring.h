/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring.h - the two rings of a channel: publish, take, sleep, wake. The only file with atomics on them.
 *
 * Every ordering that the rings rely on, by the name that both ends carry in their comments:
 *
 *   R0 client stores sq_tail -> A0 daemon loads sq_tail   entry contents before the index
 *   R1 daemon stores sq_head -> A1 client loads sq_head   entry copied out before its slot is reused
 *   R2 daemon stores cq_tail -> A2 client loads cq_tail   completion contents before the index
 *   W0 client: store sq_tail,  then load sq_flags  }  all four accesses seq_cst: one side sees the
 *   W1 daemon: store sq_flags, then load sq_tail   }  other, so no wake-up of the daemon is lost
 *   W2 daemon: store cq_tail,  then load cq_flags  }  likewise for a wake-up of the client
 *   W3 client: store cq_flags, then load cq_tail   }
 *   S0 daemon stores state   -> S1 client loads state     entries posted before the channel ended
 *
 * Each side trusts its own copies (indices, masks, pointers) and nothing that it reads: a foreign index
 * is checked against the ring size, an entry is copied to private memory before anybody looks at it.
 *
 * Credit: a request is outstanding from exl3_ring_get() until its completion is taken, and no more may
 * be outstanding than the CQ has entries. So the CQ never overflows, and cq_head needs no order of its
 * own: a CQ slot is reused for a request that was submitted after the slot had been read, and R0/A0
 * stands between the two. For the same reason the daemon, which loads sq_tail first, sees all the credit
 * that an honest client used; a request without credit is a broken protocol.
 */
#ifndef EXL3_SHM_RING_H
#define EXL3_SHM_RING_H

#include "shm/exl3_abi.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The daemon's end of a channel; one thread at a time. */
struct exl3_ring_server {
	struct exl3_ring_hdr *hdr; /* borrowed from the channel's segment, as the two arrays are */
	const struct exl3_sqe *sqes; /* a slot is the client's until R0, ours until R1 */
	struct exl3_cqe *cqes;       /* a slot is ours until R2, then the client's while credit counts it */
	uint32_t sq_mask, cq_mask;   /* our own copies of entries - 1 */
	uint32_t sq_next;            /* next entry to take; *sq_head as we last stored it */
	uint32_t cq_next;            /* next completion to post */
	uint32_t cq_published;       /* *cq_tail as we last stored it */
	uint32_t outstanding;        /* taken, completion not posted yet */
};

/* The client's end; one thread at a time. */
struct exl3_ring_client {
	struct exl3_ring_hdr *hdr;
	struct exl3_sqe *sqes;
	const struct exl3_cqe *cqes;
	uint32_t sq_mask, cq_mask;
	uint32_t sq_next;      /* next entry to hand out */
	uint32_t sq_published; /* *sq_tail as we last stored it */
	uint32_t sq_head;      /* last seen value of the daemon's word, checked */
	uint32_t cq_next;      /* next completion to take */
	uint32_t outstanding;  /* handed out, completion not taken yet */
};

/* Entries are structs of smaller fields: tell the compiler that a copy by words touches those. */
typedef uint64_t __attribute__((may_alias)) exl3_ring_u64;

/* Copies 64-bit word by word with single loads: the peer may write at the same time, and the compiler
 * may not go back to the shared memory for a value that has been checked. */
static inline void exl3_ring_copy(void *to, const void *from, size_t bytes)
{
	exl3_ring_u64 *dst = to;
	const exl3_ring_u64 *src = from;

	for (size_t i = 0; i < bytes / sizeof(uint64_t); i++)
		dst[i] = __atomic_load_n(src + i, __ATOMIC_RELAXED);
}

static inline void exl3_ring_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

/* ---- futex on a ring word; shared, because the two sides are different processes ---- */

/* Sleeps while *@word is @seen. @timeout: relative, NULL = for ever. 0, or -EAGAIN (it had changed),
 * -EINTR, -ETIMEDOUT. May return for no reason: look at the ring again. */
static inline int exl3_ring_futex_wait(uint32_t *word, uint32_t seen,
				       const struct timespec *timeout)
{
	return syscall(SYS_futex, word, FUTEX_WAIT, seen, timeout, NULL, 0) < 0 ? -errno : 0;
}

static inline void exl3_ring_futex_wake(uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* ---- daemon ---- */

/* Is there something to take? A hint for spinning: exl3_sq_take() decides. */
static inline bool exl3_sq_pending(const struct exl3_ring_server *r)
{
	return __atomic_load_n(&r->hdr->sq_tail.v, __ATOMIC_RELAXED) != r->sq_next;
}

/* Fetches what exl3_sq_pending() reads, and what exl3_sq_take() does if something is pending: with many rings their ways
 * between processors overlap then. */
static inline void exl3_sq_prefetch(const struct exl3_ring_server *r)
{
	__builtin_prefetch(&r->hdr->sq_tail.v);
}
static inline void exl3_sq_prefetch_entry(const struct exl3_ring_server *r)
{
	const char *entry = (const char *)(r->sqes + (r->sq_next & r->sq_mask));

	if (!exl3_sq_pending(r))
		return; /* the client may be writing it */
	__builtin_prefetch(entry);
	__builtin_prefetch(entry + 64);
	__builtin_prefetch(&r->hdr->cq_head.v);
}

/**
 * exl3_sq_take() - copy up to @max entries out of the ring, free their slots.
 * Each taken entry must be answered by exactly one exl3_cq_post().
 * Returns the count, 0 when empty, or -EPROTO: the client's indices make no sense or it has more
 * outstanding than it has credit; nothing was taken and the channel must be failed.
 */
static inline int exl3_sq_take(struct exl3_ring_server *r, struct exl3_sqe *out, uint32_t max)
{
	uint32_t n = __atomic_load_n(&r->hdr->sq_tail.v, __ATOMIC_ACQUIRE) - r->sq_next; /* A0 */
	uint32_t unread;

	if (!n)
		return 0;
	if (n > r->sq_mask + 1)
		return -EPROTO; /* the tail is the client's word; mask and next are our own copies */
	/* After A0, so that we see every completion whose credit these entries use. */
	unread = r->cq_next - __atomic_load_n(&r->hdr->cq_head.v, __ATOMIC_RELAXED);
	if (unread > r->cq_mask + 1 || r->outstanding + unread + n > r->cq_mask + 1)
		return -EPROTO;
	if (n > max)
		n = max;
	for (uint32_t i = 0; i < n; i++)
		exl3_ring_copy(out + i, r->sqes + ((r->sq_next + i) & r->sq_mask), sizeof(*out));
	r->sq_next += n;
	r->outstanding += n;
	__atomic_store_n(&r->hdr->sq_head.v, r->sq_next, __ATOMIC_RELEASE); /* R1 */
	return (int)n;
}

/* Writes a completion of one taken entry; the client sees it after exl3_cq_publish(). The credit that
 * was checked when the entry was taken makes sure that there is room. */
static inline void exl3_cq_post(struct exl3_ring_server *r, const struct exl3_cqe *cqe)
{
	if (!r->outstanding)
		__builtin_trap(); /* answered twice: our own error, and it would overrun the CQ */
	r->cqes[r->cq_next & r->cq_mask] = *cqe;
	r->cq_next++;
	r->outstanding--;
}

/**
 * exl3_cq_publish() - show what was posted to the client.
 * Returns how it wants to be woken: 0, or EXL3_CQ_NEED_WAKEUP (then call exl3_cq_wake()) and
 * EXL3_CQ_WANT_MSG (then send one byte to the notification socket, without blocking).
 */
static inline uint32_t exl3_cq_publish(struct exl3_ring_server *r)
{
	if (r->cq_next == r->cq_published)
		return 0;
	r->cq_published = r->cq_next;
	__atomic_store_n(&r->hdr->cq_tail.v, r->cq_next, __ATOMIC_SEQ_CST); /* R2, W2 */
	return __atomic_load_n(&r->hdr->cq_flags.v, __ATOMIC_SEQ_CST) &     /* W2 */
	       (EXL3_CQ_NEED_WAKEUP | EXL3_CQ_WANT_MSG);
}

static inline void exl3_cq_wake(struct exl3_ring_server *r)
{
	exl3_ring_futex_wake(&r->hdr->cq_tail.v);
}

/* Before the daemon sleeps: asks for a kick. True: it may sleep; false: something came in, take it
 * (the flag is down again). */
static inline bool exl3_sq_arm(struct exl3_ring_server *r)
{
	__atomic_store_n(&r->hdr->sq_flags.v, EXL3_SQ_NEED_WAKEUP, __ATOMIC_SEQ_CST); /* W1 */
	if (__atomic_load_n(&r->hdr->sq_tail.v, __ATOMIC_SEQ_CST) == r->sq_next)      /* W1 */
		return true;
	__atomic_store_n(&r->hdr->sq_flags.v, 0, __ATOMIC_RELAXED);
	return false;
}

/* When it is awake again: no more kicks. */
static inline void exl3_sq_disarm(struct exl3_ring_server *r)
{
	__atomic_store_n(&r->hdr->sq_flags.v, 0, __ATOMIC_RELAXED);
}

/* The channel has ended. Close its notification socket next: the client's watcher sees that and wakes
 * whoever sleeps, as a futex on cq_tail alone cannot announce a word that did not change. */
static inline void exl3_ring_end(struct exl3_ring_server *r, enum exl3_channel_state state)
{
	__atomic_store_n(&r->hdr->state.v, (uint32_t)state, __ATOMIC_RELEASE); /* S0 */
	exl3_ring_futex_wake(&r->hdr->cq_tail.v);
}

/* ---- client ---- */

/**
 * exl3_ring_get() - next free submission slot, zeroed.
 * Returns 0 and *@ret, -EAGAIN (no slot or no credit: take completions first), or -EPROTO (the daemon's
 * index makes no sense).
 */
static inline int exl3_ring_get(struct exl3_ring_client *r, struct exl3_sqe **ret)
{
	if (r->outstanding > r->cq_mask)
		return -EAGAIN;
	if (r->sq_next - r->sq_head > r->sq_mask) {
		uint32_t head = __atomic_load_n(&r->hdr->sq_head.v, __ATOMIC_ACQUIRE); /* A1 */

		if (r->sq_published - head > r->sq_mask + 1)
			return -EPROTO;
		r->sq_head = head;
		if (r->sq_next - head > r->sq_mask)
			return -EAGAIN;
	}
	*ret = r->sqes + (r->sq_next & r->sq_mask);
	memset(*ret, 0, sizeof(**ret));
	r->sq_next++;
	r->outstanding++;
	return 0;
}

/* Shows all entries got so far to the daemon; true: it sleeps, kick it. */
static inline bool exl3_ring_publish(struct exl3_ring_client *r)
{
	if (r->sq_next == r->sq_published)
		return false;
	r->sq_published = r->sq_next;
	__atomic_store_n(&r->hdr->sq_tail.v, r->sq_next, __ATOMIC_SEQ_CST); /* R0, W0 */
	return __atomic_load_n(&r->hdr->sq_flags.v, __ATOMIC_SEQ_CST) &     /* W0 */
	       EXL3_SQ_NEED_WAKEUP;
}

/* Takes one completion: 1, 0 (none there), or -EPROTO (index makes no sense, or more completions than
 * requests). */
static inline int exl3_ring_take(struct exl3_ring_client *r, struct exl3_cqe *ret)
{
	uint32_t n = __atomic_load_n(&r->hdr->cq_tail.v, __ATOMIC_ACQUIRE) - r->cq_next; /* A2 */

	if (!n)
		return 0;
	/* What was not published cannot be complete. */
	if (n > r->outstanding - (r->sq_next - r->sq_published))
		return -EPROTO;
	exl3_ring_copy(ret, r->cqes + (r->cq_next & r->cq_mask), sizeof(*ret));
	r->cq_next++;
	r->outstanding--;
	__atomic_store_n(&r->hdr->cq_head.v, r->cq_next, __ATOMIC_RELAXED);
	return 1;
}

/* Before the client sleeps, @flags being how it wants to be woken. True: sleep on cq_tail while it is
 * cq_next; false: a completion is there (the flags stay as set: exl3_ring_disarm()). */
static inline bool exl3_ring_arm(struct exl3_ring_client *r, uint32_t flags)
{
	__atomic_store_n(&r->hdr->cq_flags.v, flags, __ATOMIC_SEQ_CST);             /* W3 */
	return __atomic_load_n(&r->hdr->cq_tail.v, __ATOMIC_SEQ_CST) == r->cq_next; /* W3 */
}

static inline void exl3_ring_disarm(struct exl3_ring_client *r, uint32_t flags)
{
	__atomic_store_n(&r->hdr->cq_flags.v, flags, __ATOMIC_RELAXED);
}

static inline enum exl3_channel_state exl3_ring_state(const struct exl3_ring_client *r)
{
	return (enum exl3_channel_state)__atomic_load_n(&r->hdr->state.v,
							__ATOMIC_ACQUIRE); /* S1 */
}

#endif
