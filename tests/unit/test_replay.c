/* SPDX-License-Identifier: Apache-2.0 */
/* test_replay.c - replays of plans in the dispatcher: order, ends, and what is let go of. */
#include "tests/unit/dispatch_rig.h"

#include "daemon/replay.h"

#include <errno.h>

#define CALLS 20u

static struct exl3_plan_count *count;

/* Plan @i of channel @ch: @nr calls, the n-th with n + 1 rows. */
static void record(struct rig *r, unsigned i, unsigned ch, uint32_t nr)
{
	struct exl3_sqe sqes[CALLS];
	struct exl3_error err;

	if (!count) {
		count = calloc(1, sizeof(*count));
		assert_non_null(count);
		count->refs = 1;
	}
	for (uint32_t k = 0; k < nr; k++)
		sqes[k] = (struct exl3_sqe){.op = EXL3_OP_LINEAR,
					    .x_dtype = EXL3_F32,
					    .y_dtype = EXL3_F32,
					    .module = 7,
					    .rows = k + 1,
					    .x = EXL3_REF(1, 0),
					    .y = EXL3_REF(1, 65536)};
	test_code(exl3_recorded_new(r->ch[ch], count, &r->plans[i], &err), 0, &err);
	/* In two pieces, as from two packets. */
	test_code(exl3_recorded_add(r->plans[i], sqes, nr / 2, &err), 0, &err);
	test_code(exl3_recorded_add(r->plans[i], sqes + nr / 2, nr - nr / 2, &err), 0, &err);
	test_code(exl3_recorded_finish(r->plans[i], &err), 0, &err);
	assert_int_equal(exl3_recorded_add(r->plans[i], sqes, 1, &err), -EBUSY);
}

static void close_all(struct rig *r)
{
	for (unsigned i = 0; i < 4; i++)
		r->plans[i] = exl3_recorded_put(r->plans[i]);
	rig_close(r);
	assert_int_equal(count->plans, 0);
	assert_int_equal(count->calls, 0);
	assert_int_equal(r->model.refs, 1);
	count = exl3_plan_count_put(count);
}

static struct exl3_sqe *replay(struct rig *r, unsigned ch, unsigned i, uint64_t user_data)
{
	struct exl3_sqe *sqe = get(r, ch, EXL3_OP_PLAN, user_data);

	sqe->module = 30 + i;
	return sqe;
}

/* What the device runs now has so many rows; it ends. */
static void run_next(struct rig *r, uint32_t rows, int result)
{
	assert_true(device.nr > 0);
	assert_int_equal(device.running[0]->rows[0].m, rows);
	dev_finish(result);
	turn(r);
}

static void run_all(struct rig *r, uint32_t nr)
{
	for (uint32_t i = 0; i < nr; i++)
		run_next(r, i + 1, 0);
}

static void in_the_order_of_the_channel(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	record(&r, 0, 0, CALLS);
	record(&r, 1, 0, 3);
	replay(&r, 0, 0, 1);
	get(&r, 0, EXL3_OP_LINEAR, 2)->rows = 100;
	replay(&r, 0, 0, 3);
	replay(&r, 0, 1, 4);
	get(&r, 0, EXL3_OP_NOP, 5);
	get(&r, 0, EXL3_OP_LINEAR, 6)->rows = 101;
	submit(&r, 0);
	assert_int_equal(device.nr, 4); /* as many as the device takes ahead */
	run_all(&r, CALLS);
	assert_int_equal(expect(&r, 0, 1, 0).exec_ns, 5 * CALLS);
	run_next(&r, 100, 0);
	expect(&r, 0, 2, 0);
	run_all(&r, CALLS);
	expect(&r, 0, 3, 0);
	expect_none(&r, 0);
	run_all(&r, 3);
	expect(&r, 0, 4, 0);
	expect(&r, 0, 5, 0);
	run_next(&r, 101, 0);
	expect(&r, 0, 6, 0);
	assert_int_equal(device.nr, 0);
	close_all(&r);
}

/* Everything that had begun goes on to its end, nothing else begins. */
static void channel_closed(void **state)
{
	struct rig r;

	(void)state;
	for (uint32_t round = 0; round < 2 * CALLS; round++) {
		uint32_t ended = round / 2;

		/* With some calls queued, and with all that were queued on the device. */
		rig_open(&r, round % 2 ? 16 : 4, 1);
		record(&r, 0, 0, CALLS);
		record(&r, 1, 0, 5);
		replay(&r, 0, 0, 1);
		replay(&r, 0, 1, 2);
		get(&r, 0, EXL3_OP_LINEAR, 3);
		submit(&r, 0);
		run_all(&r, ended);
		r.ch[0] = exl3_channel_close(r.ch[0]);
		uint32_t left = device.nr;

		/* One by one, or all at once. */
		for (; left; left--) {
			dev_finish(0);
			if (round % 2 == 0 || left == 1)
				turn(&r);
		}
		assert_int_equal(device.nr, 0);
		assert_int_equal(exl3_dispatch_channels(r.d), 1);
		close_all(&r);
	}
}

static void device_refuses(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	record(&r, 0, 0, CALLS);
	replay(&r, 0, 0, 1);
	get(&r, 0, EXL3_OP_LINEAR, 2)->rows = 100;
	submit(&r, 0);
	run_all(&r, 2);
	run_next(&r, 3, -ENOMEM);
	/* Those that were on the device end; the call behind the replay is next. */
	run_next(&r, 4, 0);
	run_next(&r, 5, 0);
	run_next(&r, 6, 0);
	assert_int_equal(EXL3_PLAN_CALL(expect(&r, 0, 1, -ENOMEM).detail), 2);
	run_next(&r, 100, 0);
	expect(&r, 0, 2, 0);
	assert_int_equal(device.nr, 0);
	close_all(&r);
}

static void cancelled(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 2, 1);
	record(&r, 0, 0, CALLS);
	replay(&r, 0, 0, 1);
	replay(&r, 0, 0, 2);
	submit(&r, 0);
	run_next(&r, 1, 0);
	get(&r, 0, EXL3_OP_CANCEL, 9)->u.cancel.user_data = 1;
	submit(&r, 0);
	expect(&r, 0, 9, 0);
	get(&r, 0, EXL3_OP_CANCEL, 10)->u.cancel.user_data = 1;
	submit(&r, 0);
	expect(&r, 0, 10, -EALREADY);
	run_next(&r, 2, 0);
	run_next(&r, 3, 0);
	assert_int_equal(EXL3_PLAN_CALL(expect(&r, 0, 1, -ECANCELED).detail), UINT32_MAX);
	/* The second one, from its beginning. */
	run_all(&r, CALLS);
	expect(&r, 0, 2, 0);
	/* One that waits for another one goes at once. */
	replay(&r, 0, 0, 3);
	replay(&r, 0, 0, 4);
	get(&r, 0, EXL3_OP_CANCEL, 11)->u.cancel.user_data = 4;
	submit(&r, 0);
	expect(&r, 0, 4, -ECANCELED);
	expect(&r, 0, 11, 0);
	run_all(&r, CALLS);
	expect(&r, 0, 3, 0);
	close_all(&r);
}

static void deadline_on_the_way(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 2, 1);
	record(&r, 0, 0, CALLS);
	replay(&r, 0, 0, 1)->deadline_ns = r.now + 1000;
	get(&r, 0, EXL3_OP_LINEAR, 2)->rows = 100;
	submit(&r, 0);
	run_next(&r, 1, 0);
	r.now += 1001;
	turn(&r);
	run_next(&r, 2, 0);
	run_next(&r, 3, 0);
	assert_int_equal(EXL3_PLAN_CALL(expect(&r, 0, 1, -ETIME).detail), 3);
	run_next(&r, 100, 0);
	expect(&r, 0, 2, 0);
	close_all(&r);
}

static void let_go_of(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 2, 1);
	record(&r, 0, 0, 5);
	record(&r, 1, 1, 5);
	assert_int_equal(r.buf.refs, 1 + 2 * 5 * 2); /* x and y of each call */
	replay(&r, 0, 0, 1);
	submit(&r, 0);
	assert_int_equal(r.model.inflight, 1);
	/* Its handle is closed: it counts until its replay has ended, and takes no other one. */
	exl3_recorded_put(r.plans[0]);
	r.plans[0] = NULL;
	assert_int_equal(count->plans, 2);
	replay(&r, 0, 0, 2);
	submit(&r, 0);
	expect(&r, 0, 2, -ENOENT);
	run_all(&r, 5);
	expect(&r, 0, 1, 0);
	assert_int_equal(r.model.inflight, 0);
	assert_int_equal(count->plans, 1);
	assert_int_equal(count->calls, 5);
	assert_int_equal(r.buf.refs, 1 + 5 * 2);
	/* Another channel's; a model that was unloaded. */
	replay(&r, 0, 1, 3);
	submit(&r, 0);
	expect(&r, 0, 3, -ENOENT);
	r.model.state = EXL3_MODEL_UNLOADING;
	replay(&r, 1, 1, 4);
	submit(&r, 1);
	assert_int_equal(expect(&r, 1, 4, -ENOENT).detail, EXL3_DETAIL_MODEL);
	r.model.state = EXL3_MODEL_READY;
	/* Its channel goes first. */
	r.ch[1] = exl3_channel_close(r.ch[1]);
	turn(&r);
	assert_int_equal(count->plans, 1);
	close_all(&r);
}

static void device_lost(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 2, 1);
	record(&r, 0, 0, CALLS);
	replay(&r, 0, 0, 1);
	replay(&r, 0, 0, 2);
	submit(&r, 0);
	run_next(&r, 1, 0);
	device.lost = true;
	turn(&r);
	assert_int_equal(EXL3_PLAN_CALL(expect(&r, 0, 1, -EIO).detail) < CALLS, 1);
	assert_int_equal(expect(&r, 0, 2, -EIO).result, -EIO);
	replay(&r, 0, 0, 3);
	submit(&r, 0);
	expect(&r, 0, 3, -EIO);
	device.nr = 0;
	close_all(&r);
}

/* Calls of plans share launches with others as single ones do. */
static void in_company(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 1, 8);
	record(&r, 0, 0, 4);
	record(&r, 1, 1, 4);
	linear(&r, 0, 9); /* keeps the device busy until both are there */
	replay(&r, 0, 0, 1);
	submit(&r, 0);
	replay(&r, 1, 1, 2);
	submit(&r, 1);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 9, 0);
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(device.nr, 1);
		assert_int_equal(device.running[0]->nr_rows, 2);
		run_next(&r, i + 1, 0);
	}
	expect(&r, 0, 1, 0);
	expect(&r, 1, 2, 0);
	close_all(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(in_the_order_of_the_channel), test_case(channel_closed), test_case(device_refuses),
		test_case(cancelled), test_case(deadline_on_the_way), test_case(let_go_of), test_case(device_lost),
		test_case(in_company),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
