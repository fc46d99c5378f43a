/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring_wrap.c - two threads drive a channel across the 2^32 wrap of its indices; every payload is checked.
 *
 * Made for ThreadSanitizer, which finds a weakened R or A of shm/ring.h: entries are plain memory, so
 * that only those pairs keep the two sides apart. Prints what went wrong and exits 1.
 */
#include "shm/segment.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define REQUESTS 200000u
#define BATCH    7u

static struct exl3_segment *seg;
static struct exl3_ring_server srv;
static struct exl3_ring_client cli;

/* A fixed mix, so that each word of each entry is another one. */
static uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
	return x ^ (x >> 29);
}

static void die(const char *what, uint64_t at, uint64_t got, uint64_t want)
{
	fprintf(stderr, "ring_wrap: %s at request %llu: %llx, wanted %llx\n", what,
		(unsigned long long)at, (unsigned long long)got, (unsigned long long)want);
	exit(1);
}

/* Answers in the order of arrival, a batch at a time; publishes at uneven moments. */
static void *serve(void *arg)
{
	struct exl3_sqe in[BATCH];
	uint64_t seen = 0;

	(void)arg;
	while (seen < REQUESTS) {
		int n = exl3_sq_take(&srv, in, 1 + (uint32_t)(mix(seen) % BATCH));

		if (n < 0)
			die("exl3_sq_take", seen, (uint64_t)-n, 0);
		if (n == 0)
			exl3_ring_relax();
		for (int i = 0; i < n; i++, seen++) {
			struct exl3_cqe cqe = {.user_data = in[i].user_data,
					       .result = (int32_t)(seen & 0xffff),
					       .detail = in[i].u.words[7],
					       .exec_ns = mix(in[i].user_data + 99)};

			if (in[i].user_data != seen)
				die("order", seen, in[i].user_data, seen);
			for (unsigned w = 0; w < 8; w++)
				if (in[i].u.words[w] != mix(seen * 8 + w))
					die("entry", seen, in[i].u.words[w], mix(seen * 8 + w));
			exl3_cq_post(&srv, &cqe);
			if (mix(seen) & 1)
				exl3_cq_publish(&srv);
		}
		exl3_cq_publish(&srv);
	}
	return NULL;
}

static void submit_some(uint64_t *sent)
{
	struct exl3_sqe *sqe;
	int e;

	while (*sent < REQUESTS && (e = exl3_ring_get(&cli, &sqe)) != -EAGAIN) {
		if (e < 0)
			die("exl3_ring_get", *sent, (uint64_t)-e, 0);
		sqe->user_data = *sent;
		for (unsigned w = 0; w < 8; w++)
			sqe->u.words[w] = mix(*sent * 8 + w);
		++*sent;
		if (mix(*sent) % 3 == 0)
			exl3_ring_publish(&cli);
	}
	exl3_ring_publish(&cli);
}

static void reap_some(uint64_t *got)
{
	struct exl3_cqe cqe;
	int e;

	/* Leaves some behind now and then, so that credit runs out as well. */
	while ((e = exl3_ring_take(&cli, &cqe)) == 1) {
		if (cqe.user_data != *got)
			die("completion order", *got, cqe.user_data, *got);
		if (cqe.result != (int32_t)(*got & 0xffff) || cqe.detail != mix(*got * 8 + 7) ||
		    cqe.exec_ns != mix(*got + 99))
			die("completion", *got, cqe.detail, mix(*got * 8 + 7));
		++*got;
		if (mix(*got) % 11 == 0)
			break;
	}
	if (e < 0)
		die("exl3_ring_take", *got, (uint64_t)-e, 0);
}

static void run(uint32_t entries)
{
	/* Wraps after 1000 requests, and once more than that never: 2^32 is far. */
	struct exl3_ring_params p = {.sq_entries = entries, .first = UINT32_MAX - 999};
	uint64_t sent = 0, got = 0;
	struct exl3_error err;
	pthread_t t;

	if (exl3_ring_create(&p, &seg, &srv, &err) < 0 || exl3_ring_attach(seg, &cli, &err) < 0) {
		fprintf(stderr, "ring_wrap: %s\n", err.text);
		exit(1);
	}
	if (pthread_create(&t, NULL, serve, NULL))
		die("pthread_create", 0, 0, 0);
	while (got < REQUESTS) {
		submit_some(&sent);
		reap_some(&got);
	}
	pthread_join(t, NULL);
	if (cli.cq_next != p.first + REQUESTS)
		die("index after the wrap", got, cli.cq_next, p.first + REQUESTS);
	exl3_segment_free(seg);
	printf("ring_wrap: %u requests through %u entries from index %u: ok\n", REQUESTS, entries,
	       p.first);
}

int main(void)
{
	run(2);
	run(64);
	run(EXL3_SQ_ENTRIES_MAX);
	return 0;
}
