/* SPDX-License-Identifier: Apache-2.0 */
/* test_ring.c - the rings step by step: limits, credit, wrap, sleep flags, and hostile indices. */
#include "tests/test.h"

#include "shm/segment.h"

struct pair {
	struct exl3_segment *seg;
	struct exl3_ring_server srv;
	struct exl3_ring_client cli;
};

static void pair_open(struct pair *p, uint32_t entries, uint32_t first)
{
	struct exl3_ring_params params = {.sq_entries = entries, .first = first, .instance = 7};
	struct exl3_error err;

	test_code(exl3_ring_create(&params, &p->seg, &p->srv, &err), 0, &err);
	test_code(exl3_ring_attach(p->seg, &p->cli, &err), 0, &err);
}

static void pair_close(struct pair *p)
{
	p->seg = exl3_segment_free(p->seg);
}

static void put(struct pair *p, uint64_t user_data)
{
	struct exl3_sqe *sqe = NULL;

	assert_int_equal(exl3_ring_get(&p->cli, &sqe), 0);
	assert_non_null(sqe);
	assert_int_equal(sqe->user_data, 0); /* a slot comes zeroed, whatever it held before */
	sqe->user_data = user_data;
	sqe->u.words[7] = ~user_data;
}

static void answer(struct pair *p, const struct exl3_sqe *sqe)
{
	struct exl3_cqe cqe = {.user_data = sqe->user_data, .detail = sqe->u.words[7]};

	exl3_cq_post(&p->srv, &cqe);
}

static void take(struct pair *p, uint64_t user_data)
{
	struct exl3_cqe cqe;

	assert_int_equal(exl3_ring_take(&p->cli, &cqe), 1);
	assert_int_equal(cqe.user_data, user_data);
	assert_int_equal(cqe.detail, ~user_data);
}

/* From far below to far above the wrap of the 32-bit indices, and every ring size. */
static void in_order_across_the_wrap(void **state)
{
	static const uint32_t sizes[] = {EXL3_SQ_ENTRIES_MIN, 4, 64, EXL3_SQ_ENTRIES_MAX};
	static const uint32_t firsts[] = {0, 1, UINT32_MAX - 100, UINT32_MAX};

	(void)state;
	for (size_t s = 0; s < TEST_NR(sizes); s++) {
		for (size_t f = 0; f < TEST_NR(firsts); f++) {
			uint64_t sent = 0, got = 0;
			struct exl3_sqe out[3];
			struct pair p;

			pair_open(&p, sizes[s], firsts[f]);
			while (got < 2 * (uint64_t)sizes[s] + 300) {
				int n;

				while (sent - got < sizes[s])
					put(&p, ++sent);
				exl3_ring_publish(&p.cli);
				n = exl3_sq_take(&p.srv, out, TEST_NR(out));
				assert_in_range(n, 1, TEST_NR(out));
				for (int i = 0; i < n; i++)
					answer(&p, &out[i]);
				exl3_cq_publish(&p.srv);
				for (int i = 0; i < n; i++)
					take(&p, ++got);
			}
			pair_close(&p);
		}
	}
}

static void sq_full_at_its_size(void **state)
{
	struct exl3_sqe *sqe, out[8];
	struct pair p;

	(void)state;
	pair_open(&p, 4, UINT32_MAX - 1);
	for (uint64_t i = 1; i <= 4; i++)
		put(&p, i);
	assert_int_equal(exl3_ring_get(&p.cli, &sqe), -EAGAIN);
	exl3_ring_publish(&p.cli);
	assert_int_equal(exl3_ring_get(&p.cli, &sqe), -EAGAIN);
	/* One slot is free as soon as the daemon has copied one entry. */
	assert_int_equal(exl3_sq_take(&p.srv, out, 1), 1);
	put(&p, 5);
	assert_int_equal(exl3_ring_get(&p.cli, &sqe), -EAGAIN);
	pair_close(&p);
}

static void credit_ends_at_the_cq_size(void **state)
{
	struct exl3_sqe *sqe, out[8];
	struct pair p;

	(void)state;
	pair_open(&p, 4, UINT32_MAX - 5);
	for (uint64_t i = 1; i <= 8; i++) {
		put(&p, i);
		exl3_ring_publish(&p.cli);
		assert_int_equal(exl3_sq_take(&p.srv, out, 8), 1);
		answer(&p, out);
	}
	exl3_cq_publish(&p.srv);
	/* Eight completions lie in the CQ: the SQ is empty, but there is no credit. */
	assert_int_equal(exl3_ring_get(&p.cli, &sqe), -EAGAIN);
	take(&p, 1);
	put(&p, 9);
	exl3_ring_publish(&p.cli);
	assert_int_equal(exl3_sq_take(&p.srv, out, 8), 1);
	pair_close(&p);
}

static void posted_is_not_published(void **state)
{
	struct exl3_sqe out[2];
	struct exl3_cqe cqe;
	struct pair p;

	(void)state;
	pair_open(&p, 2, 0);
	put(&p, 1);
	assert_int_equal(exl3_sq_take(&p.srv, out, 2), 0);
	assert_false(exl3_sq_pending(&p.srv));
	exl3_ring_publish(&p.cli);
	assert_true(exl3_sq_pending(&p.srv));
	assert_int_equal(exl3_sq_take(&p.srv, out, 2), 1);
	answer(&p, out);
	assert_int_equal(exl3_ring_take(&p.cli, &cqe), 0);
	assert_int_equal(exl3_cq_publish(&p.srv), 0);
	take(&p, 1);
	pair_close(&p);
}

static void hostile_tail(void **state)
{
	/* Distance from the daemon's index, with a ring of 4: fits or not. */
	static const struct {
		uint32_t ahead;
		int want;
	} rows[] = {
		{0, 0}, {1, 1}, {4, 4}, {5, -EPROTO}, {1u << 31, -EPROTO}, {UINT32_MAX, -EPROTO}};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		struct exl3_sqe out[8];
		struct pair p;

		pair_open(&p, 4, UINT32_MAX - 2);
		p.cli.hdr->sq_tail.v = p.srv.sq_next + rows[i].ahead;
		assert_int_equal(exl3_sq_take(&p.srv, out, 8), rows[i].want);
		pair_close(&p);
	}
}

/* A client that submits without credit, or lies about what it has read. */
static void hostile_cq_head(void **state)
{
	static const struct {
		int32_t head; /* relative to the daemon's tail, which is 4 after four answers */
		uint32_t submit;
		int want;
	} rows[] = {
		{-4, 4, 4},       {0, 4, 4},        {1, 1, -EPROTO},
		{-8, 1, -EPROTO}, {-5, 4, -EPROTO}, {-9, 1, -EPROTO},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		struct exl3_sqe out[4];
		struct pair p;

		pair_open(&p, 4, UINT32_MAX - 2);
		for (uint64_t j = 1; j <= 4; j++)
			put(&p, j);
		exl3_ring_publish(&p.cli);
		assert_int_equal(exl3_sq_take(&p.srv, out, 4), 4);
		for (int j = 0; j < 4; j++)
			answer(&p, &out[j]);
		exl3_cq_publish(&p.srv);
		p.cli.hdr->cq_head.v = p.srv.cq_next + (uint32_t)rows[i].head;
		p.cli.hdr->sq_tail.v = p.srv.sq_next + rows[i].submit;
		assert_int_equal(exl3_sq_take(&p.srv, out, 4), rows[i].want);
		pair_close(&p);
	}
}

static void hostile_daemon_words(void **state)
{
	struct exl3_sqe *sqe;
	struct exl3_cqe cqe;
	struct pair p;

	(void)state;
	pair_open(&p, 2, 0);
	put(&p, 1);
	put(&p, 2);
	exl3_ring_publish(&p.cli);
	p.cli.hdr->cq_tail.v = 3; /* more completions than requests */
	assert_int_equal(exl3_ring_take(&p.cli, &cqe), -EPROTO);
	p.cli.hdr->cq_tail.v = UINT32_MAX;
	assert_int_equal(exl3_ring_take(&p.cli, &cqe), -EPROTO);
	p.cli.hdr->sq_head.v = 3; /* has taken what was never there */
	assert_int_equal(exl3_ring_get(&p.cli, &sqe), -EPROTO);
	pair_close(&p);
}

static void sleep_flags(void **state)
{
	struct exl3_sqe out[2];
	struct pair p;

	(void)state;
	pair_open(&p, 2, 0);
	put(&p, 1);
	assert_false(exl3_ring_publish(&p.cli)); /* awake: no kick */
	assert_false(exl3_sq_arm(&p.srv)); /* something is there: no sleep, and the flag is down */
	assert_int_equal(p.srv.hdr->sq_flags.v, 0);
	assert_int_equal(exl3_sq_take(&p.srv, out, 2), 1);
	assert_true(exl3_sq_arm(&p.srv));
	put(&p, 2);
	assert_true(exl3_ring_publish(&p.cli));  /* sleeps: kick */
	assert_false(exl3_ring_publish(&p.cli)); /* nothing new: no second kick */
	exl3_sq_disarm(&p.srv);
	assert_int_equal(exl3_sq_take(&p.srv, out + 1, 1), 1);

	assert_true(exl3_ring_arm(&p.cli, EXL3_CQ_NEED_WAKEUP | EXL3_CQ_WANT_MSG));
	answer(&p, out);
	assert_int_equal(exl3_cq_publish(&p.srv), EXL3_CQ_NEED_WAKEUP | EXL3_CQ_WANT_MSG);
	exl3_cq_wake(&p.srv);
	assert_int_equal(exl3_cq_publish(&p.srv), 0); /* nothing new */
	assert_false(exl3_ring_arm(&p.cli, 0));
	answer(&p, out + 1);
	p.cli.hdr->cq_flags.v = ~3u; /* flags that do not exist say nothing */
	assert_int_equal(exl3_cq_publish(&p.srv), 0);
	pair_close(&p);
}

static void futex_sees_a_change(void **state)
{
	struct timespec ts = {.tv_nsec = 1000000};
	uint32_t word = 5;

	(void)state;
	assert_int_equal(exl3_ring_futex_wait(&word, 4, NULL), -EAGAIN);
	assert_int_equal(exl3_ring_futex_wait(&word, 5, &ts), -ETIMEDOUT);
}

static void end_is_seen(void **state)
{
	struct pair p;

	(void)state;
	pair_open(&p, 2, 0);
	assert_int_equal(exl3_ring_state(&p.cli), EXL3_CHANNEL_OPEN);
	exl3_ring_end(&p.srv, EXL3_CHANNEL_FAILED);
	assert_int_equal(exl3_ring_state(&p.cli), EXL3_CHANNEL_FAILED);
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(in_order_across_the_wrap),
		test_case(sq_full_at_its_size),
		test_case(credit_ends_at_the_cq_size),
		test_case(posted_is_not_published),
		test_case(hostile_tail),
		test_case(hostile_cq_head),
		test_case(hostile_daemon_words),
		test_case(sleep_flags),
		test_case(futex_sees_a_change),
		test_case(end_is_seen),
	};

	return cmocka_run_group_tests_name("ring", tests, NULL, NULL);
}
