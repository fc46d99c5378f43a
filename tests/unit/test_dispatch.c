/* SPDX-License-Identifier: Apache-2.0 */
/* test_dispatch.c - requests through real rings to devices that finish when the test says so. */
#include "tests/unit/dispatch_rig.h"

static void requests_complete_in_order(void **state)
{
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 2, 1);
	for (uint64_t i = 1; i <= 3; i++)
		linear(&r, 0, i);
	assert_int_equal(device.nr, 2); /* queue_depth */
	assert_ptr_equal(device.running[0]->rows[0].x, r.buf.base[0]);
	assert_int_equal(device.running[0]->rows[0].m, 2);
	assert_int_equal(r.model.inflight, 3);
	assert_int_equal(r.buf.refs, 1 + 2 * 3);
	expect_none(&r, 0);
	device.running[0]->skipped[0] = 9;
	dev_finish(0);
	turn(&r);
	cqe = expect(&r, 0, 1, 0);
	assert_int_equal(cqe.detail, 9);
	assert_int_equal(cqe.exec_ns, 5);
	dev_finish(-ENOMEM);
	dev_finish(-EOPNOTSUPP);
	turn(&r);
	expect(&r, 0, 2, -ENOMEM);
	cqe = expect(&r, 0, 3, -EOPNOTSUPP);
	assert_int_equal(cqe.detail, EXL3_DETAIL_KERNEL);
	assert_int_equal(r.counters.requests, 3);
	assert_int_equal(r.counters.errors, 2);
	assert_int_equal(r.counters.rows, 2);
	rig_close(&r);
}

static void a_nop_waits_for_what_is_before_it(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 2, 1);
	get(&r, 0, EXL3_OP_NOP, 1);
	submit(&r, 0);
	expect(&r, 0, 1, 0); /* nothing before it */
	linear(&r, 0, 2);
	get(&r, 0, EXL3_OP_NOP, 3);
	submit(&r, 0);
	get(&r, 1, EXL3_OP_NOP, 4); /* another channel does not wait */
	submit(&r, 1);
	expect(&r, 1, 4, 0);
	expect_none(&r, 0);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 2, 0);
	expect(&r, 0, 3, 0);
	rig_close(&r);
}

static void wrong_entries_are_answered_at_once(void **state)
{
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 1, 1);
	linear(&r, 0, 1);
	get(&r, 0, EXL3_OP_LINEAR, 2)->rows = 0;
	submit(&r, 0);
	cqe = expect(&r, 0, 2, -EINVAL);
	assert_int_equal(cqe.detail, EXL3_DETAIL_ROWS);
	r.gone = true;
	linear(&r, 0, 3);
	expect(&r, 0, 3, -ENOENT);
	dev_finish(0); /* accepted before its handle was closed */
	turn(&r);
	expect(&r, 0, 1, 0);
	rig_close(&r);
}

static void cancel(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 1, 1);
	for (uint64_t i = 1; i <= 3; i++)
		linear(&r, 0, i);
	get(&r, 0, EXL3_OP_CANCEL, 10)->u.cancel.user_data = 3;
	submit(&r, 0);
	expect(&r, 0, 3, -ECANCELED);
	expect(&r, 0, 10, 0);
	get(&r, 0, EXL3_OP_CANCEL, 11)->u.cancel.user_data = 1;
	submit(&r, 0);
	expect(&r, 0, 11, -EALREADY); /* it runs */
	get(&r, 0, EXL3_OP_CANCEL, 12)->u.cancel.user_data = 3;
	submit(&r, 0);
	expect(&r, 0, 12, -ENOENT); /* it is complete */
	get(&r, 1, EXL3_OP_CANCEL, 13)->u.cancel.user_data = 2;
	submit(&r, 1);
	expect(&r, 1, 13, -ENOENT); /* of another channel */
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, 0);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 2, 0);
	expect_none(&r, 0);
	rig_close(&r);
}

static void deadlines(void **state)
{
	uint64_t until = 0;
	struct rig r;

	(void)state;
	rig_open(&r, 1, 1);
	linear(&r, 0, 1);
	get(&r, 0, EXL3_OP_LINEAR, 2)->deadline_ns = r.now + 1000;
	submit(&r, 0);
	expect_none(&r, 0);
	/* The loop is told when to look again. */
	r.now += 500;
	turn(&r);
	assert_true(exl3_dispatch_may_sleep(r.d, r.now, &until));
	assert_int_equal(until, r.now + 500);
	r.now += 500;
	turn(&r);
	expect(&r, 0, 2, -ETIME); /* while the first one still runs */
	get(&r, 0, EXL3_OP_NOP, 3)->deadline_ns = 1;
	submit(&r, 0);
	expect(&r, 0, 3, -ETIME);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, 0);
	rig_close(&r);
}

static void drain_finishes_what_was_accepted(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 1, 1);
	linear(&r, 0, 1);
	linear(&r, 0, 2);
	exl3_dispatch_drain(r.d);
	linear(&r, 0, 3);
	get(&r, 1, EXL3_OP_NOP, 4);
	submit(&r, 1);
	expect(&r, 0, 3, -ESHUTDOWN);
	expect(&r, 1, 4, -ESHUTDOWN);
	assert_true(exl3_dispatch_busy(r.d));
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, 0);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 2, 0);
	assert_false(exl3_dispatch_busy(r.d));
	rig_close(&r);
}

static void a_closed_channel_lives_until_its_last_launch(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 1, 1);
	linear(&r, 0, 1);
	linear(&r, 0, 2);
	r.ch[0] = exl3_channel_close(r.ch[0]);
	assert_int_equal(exl3_ring_state(&r.ring[0]), EXL3_CHANNEL_CLOSED);
	assert_int_equal(exl3_dispatch_channels(r.d), 2);
	assert_int_equal(r.model.inflight, 1); /* the queued one is gone, the running one is not */
	/* Its owner lets go of the buffer: it stays for the launch that writes it. */
	r.buf.refs--;
	assert_int_equal(r.buf.refs, 2);
	assert_false(r.buf_freed);
	dev_finish(0);
	turn(&r);
	assert_true(r.buf_freed);
	assert_int_equal(exl3_dispatch_channels(r.d), 1);
	expect_none(&r, 0);
	rig_close(&r);
}

static void a_broken_ring_ends_its_channel_only(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 2, 1);
	linear(&r, 0, 1);
	__atomic_store_n(&r.ring[0].hdr->sq_tail.v, 1000, __ATOMIC_SEQ_CST);
	assert_int_equal(write(r.kick[0], "01234567", 8), 8);
	turn(&r);
	assert_int_equal(exl3_ring_state(&r.ring[0]), EXL3_CHANNEL_FAILED);
	linear(&r, 1, 2);
	dev_finish(0);
	dev_finish(0);
	turn(&r);
	expect(&r, 1, 2, 0);
	rig_close(&r);
}

static void a_full_device_is_tried_again(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	linear(&r, 0, 1);
	device.submit_code = -EAGAIN;
	linear(&r, 0, 2);
	assert_int_equal(device.nr, 1);
	device.submit_code = 0;
	turn(&r);
	assert_int_equal(device.nr, 2);
	device.submit_code = -EIO; /* a launch that fails at once is answered like any other */
	linear(&r, 0, 3);
	expect(&r, 0, 3, -EIO);
	rig_close(&r);
}

static void a_lost_device_fails_everything(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 1, 1);
	linear(&r, 0, 1);
	linear(&r, 0, 2);
	device.lost = true;
	device.nr = 0;
	turn(&r);
	expect(&r, 0, 2, -EIO);
	expect(&r, 0, 1, -EIO);
	linear(&r, 1, 3);
	expect(&r, 1, 3, -EIO);
	get(&r, 1, EXL3_OP_NOP, 4);
	submit(&r, 1);
	expect(&r, 1, 4, 0);
	rig_close(&r);
}

static void rows_of_one_module_share_a_launch(void **state)
{
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 1, 8);
	linear(&r, 0, 1);
	linear(&r, 0, 2);
	linear(&r, 1, 3);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, 0);
	assert_int_equal(device.nr, 1);
	assert_int_equal(device.running[0]->nr_rows, 2);
	device.running[0]->skipped[0] = 5;
	device.running[0]->skipped[1] = 6;
	dev_finish(0);
	turn(&r);
	cqe = expect(&r, 0, 2, 0);
	assert_int_equal(cqe.detail + expect(&r, 1, 3, 0).detail, 11);
	/* Deterministic requests stay alone. */
	linear(&r, 0, 4);
	get(&r, 0, EXL3_OP_LINEAR, 5)->flags = EXL3_DETERMINISTIC;
	submit(&r, 0);
	linear(&r, 1, 6);
	dev_finish(0);
	turn(&r);
	assert_int_equal(device.running[0]->nr_rows, 1);
	rig_close(&r);
}

/* Of one class: together. Of another one, or of none, or beside a request that is not: each by itself. */
static void deterministic_requests_of_a_class_meet(void **state)
{
	static const struct {
		uint32_t class_rows, rows[2];
		bool plain; /* the second one is not deterministic */
		uint32_t want;
	} cases[] = {{4, {2, 2}, false, 2},  {4, {1, 4}, false, 2}, {4, {4, 5}, false, 1},
		     {4, {5, 5}, false, 1},  {0, {1, 1}, false, 1}, {4, {2, 2}, true, 1}};

	(void)state;
	for (size_t c = 0; c < TEST_NR(cases); c++) {
		struct rig r;

		rig_open(&r, 1, 8);
		device.class_rows = cases[c].class_rows;
		linear(&r, 0, 1); /* holds the device while the others come */
		for (unsigned i = 0; i < 2; i++) {
			struct exl3_sqe *sqe = get(&r, i, EXL3_OP_LINEAR, 2 + i);

			sqe->flags = i && cases[c].plain ? 0 : EXL3_DETERMINISTIC;
			sqe->rows = cases[c].rows[i];
			submit(&r, i);
		}
		dev_finish(0);
		turn(&r);
		if (device.running[0]->nr_rows != cases[c].want)
			fail_msg("case %zu: %u requests in the launch, wanted %u", c,
				 device.running[0]->nr_rows, cases[c].want);
		rig_close(&r);
	}
}

static void attention(struct rig *r, unsigned ch, uint64_t user_data, uint32_t geometry)
{
	struct exl3_sqe *sqe = get(r, ch, EXL3_OP_MLA_DECODE, user_data);

	sqe->x_dtype = sqe->y_dtype = EXL3_F32;
	sqe->module = geometry;
	sqe->rows = 1;
	sqe->x = EXL3_REF(1, 0);
	sqe->y = EXL3_REF(1, 4096);
	sqe->u.mla.cache = EXL3_REF(1, 8192);
	sqe->u.mla.indices = EXL3_REF(1, 12288);
	sqe->u.mla.lse = EXL3_REF_NONE;
	sqe->u.mla.scale = 1;
	submit(r, ch);
}

/* Entries of the launch that runs, which ends then. */
static uint32_t next_launch(struct rig *r)
{
	uint32_t nr;

	assert_int_equal(device.nr, 1);
	nr = device.running[0]->nr_rows;
	dev_finish(0);
	turn(r);
	return nr;
}

/* Each client registers a geometry of its own: what it says counts, not whose it is. */
static void equal_geometries_share_a_launch(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 1, 8);
	linear(&r, 0, 1); /* keeps the device busy */
	attention(&r, 0, 2, 10);
	attention(&r, 1, 3, 11);
	assert_int_equal(next_launch(&r), 1);
	assert_int_equal(device.running[0]->u.mla.geometry.topk, 1);
	assert_int_equal(next_launch(&r), 2);
	linear(&r, 0, 4);
	attention(&r, 0, 5, 10);
	attention(&r, 1, 6, 12);
	for (int i = 0; i < 3; i++)
		assert_int_equal(next_launch(&r), 1);
	rig_close(&r);
}

/* Nobody's request fails, or waits for another kernel, because of the types of another one's. */
static void other_types_stay_alone(void **state)
{
	struct rig r;

	(void)state;
	for (int what = 0; what < 3; what++) {
		struct exl3_sqe *sqe;

		rig_open(&r, 1, 8);
		linear(&r, 0, 1);
		linear(&r, 0, 2);
		sqe = get(&r, 1, EXL3_OP_LINEAR, 3);
		if (what == 0)
			sqe->x_dtype = EXL3_F16;
		else if (what == 1)
			sqe->y_dtype = EXL3_BF16;
		else
			sqe->flags = EXL3_STORED;
		submit(&r, 1);
		for (int i = 0; i < 3; i++)
			assert_int_equal(next_launch(&r), 1);
		rig_close(&r);
	}
}

/* Two channels that walk eight modules over and over, one half a step behind: they come together. */
static void decoders_come_into_step(void **state)
{
	struct exl3_sched_stats before, after;
	uint32_t module[2] = {0, 4};
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 2, 8);
	exl3_dispatch_set_trains(r.d, true);
	for (unsigned step = 0; step < 4000; step++) {
		if (step == 3000)
			exl3_dispatch_merging(r.d, &before);
		for (unsigned c = 0; c < 2; c++) {
			if (module[c] >= 100)
				continue; /* waits for its answer */
			get(&r, c, EXL3_OP_LINEAR, 1)->module = 20 + module[c];
			module[c] += 100;
			submit(&r, c);
		}
		r.now += 20000; /* a launch takes 20 us, a pause 1 us: alone they take turns */
		if (device.nr) {
			device.slow_ns = 10000; /* a row; there are two */
			dev_finish(0);
		}
		turn(&r);
		r.now += 1000;
		for (unsigned c = 0; c < 2; c++) {
			if (exl3_ring_take(&r.ring[c], &cqe) == 1)
				module[c] = (module[c] - 100 + 1) % 8;
		}
	}
	exl3_dispatch_merging(r.d, &after);
	/* Of the last quarter nearly all are for two. */
	if (after.items - before.items < (after.launches - before.launches) * 19 / 10)
		fail_msg("%llu requests in %llu launches",
			 (unsigned long long)(after.items - before.items),
			 (unsigned long long)(after.launches - before.launches));
	rig_close(&r);
}

/* A client that kicks without work is no longer listened to, but its work is still found. */
static void kicks_without_work(void **state)
{
	const uint64_t one = 1;
	uint64_t before;
	struct rig r;

	(void)state;
	rig_open(&r, 1, 1);
	turn(&r); /* dormant */
	for (int i = 0; i < 64; i++) {
		assert_int_equal(write(r.kick[0], &one, sizeof(one)), sizeof(one));
		exl3_loop_poll(r.loop, 0); /* time stands still: no timer */
		exl3_dispatch_turn(r.d, r.now);
	}
	before = exl3_loop_syscalls(r.loop);
	for (int i = 0; i < 1000; i++) {
		assert_int_equal(write(r.kick[0], &one, sizeof(one)), sizeof(one));
		assert_int_equal(exl3_loop_poll(r.loop, 0), 0);
	}
	assert_int_equal(exl3_loop_syscalls(r.loop), before);
	get(&r, 0, EXL3_OP_NOP, 1);
	exl3_ring_publish(&r.ring[0]);
	turn(&r); /* the timer is due */
	expect(&r, 0, 1, 0);
	/* Forgiven: kicks count again. */
	exl3_loop_poll(r.loop, 0);
	get(&r, 0, EXL3_OP_NOP, 2);
	assert_true(exl3_ring_publish(&r.ring[0]));
	assert_int_equal(write(r.kick[0], &one, sizeof(one)), sizeof(one));
	exl3_loop_poll(r.loop, 0);
	exl3_dispatch_turn(r.d, r.now);
	expect(&r, 0, 2, 0);
	rig_close(&r);
}

/* All credit in use: nothing is lost, and the ring goes on after it. */
static void credit_is_enough_for_every_completion(void **state)
{
	struct exl3_sqe *sqe;
	struct rig r;

	(void)state;
	rig_open(&r, 1, 1);
	for (uint64_t i = 0; i < 16; i++) /* the CQ has twice the 8 entries of the SQ */
		linear(&r, 0, i);
	assert_int_equal(exl3_ring_get(&r.ring[0], &sqe), -EAGAIN);
	for (uint64_t i = 0; i < 16; i++) {
		dev_finish(0);
		turn(&r);
	}
	for (uint64_t i = 0; i < 16; i++)
		expect(&r, 0, i, 0);
	linear(&r, 0, 99);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 99, 0);
	rig_close(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(requests_complete_in_order),
		test_case(a_nop_waits_for_what_is_before_it),
		test_case(wrong_entries_are_answered_at_once),
		test_case(cancel),
		test_case(deadlines),
		test_case(drain_finishes_what_was_accepted),
		test_case(a_closed_channel_lives_until_its_last_launch),
		test_case(a_broken_ring_ends_its_channel_only),
		test_case(a_full_device_is_tried_again),
		test_case(a_lost_device_fails_everything),
		test_case(rows_of_one_module_share_a_launch),
		test_case(deterministic_requests_of_a_class_meet),
		test_case(equal_geometries_share_a_launch),
		test_case(other_types_stay_alone),
		test_case(decoders_come_into_step),
		test_case(kicks_without_work),
		test_case(credit_is_enough_for_every_completion),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
