/* SPDX-License-Identifier: Apache-2.0 */
/* test_dispatch_long.c - long requests, several devices, launches that never end, tenants at their limits. */
#include "tests/unit/dispatch_rig.h"

static struct exl3_sqe *get_long(struct rig *r, unsigned ch, uint64_t user_data)
{
	struct exl3_sqe *sqe = get(r, ch, EXL3_OP_LINEAR, user_data);

	sqe->rows = 100;
	sqe->x_stride = 528;
	sqe->y = EXL3_REF(1, 524288);
	sqe->y_stride = 544;
	return sqe;
}

/* The slice that runs; its operands must be those of row @first. */
static uint32_t slice(struct rig *r, uint32_t first)
{
	const struct exl3_rows *rows = &device.running[0]->rows[0];

	assert_int_equal(device.running[0]->nr_rows, 1);
	assert_ptr_equal(rows->x, r->buf.base[0] + (size_t)first * 528);
	assert_ptr_equal(rows->y, r->buf.base[0] + 524288 + (size_t)first * 544);
	return rows->m;
}

/* Others run between its slices, what is behind it in its channel after them; sums of all come back. */
static void long_requests_run_in_slices(void **state)
{
	uint32_t first = 0, nr = 0, others = 0;
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	device.slow_ns = 10;
	exl3_dispatch_set_chunk(r.d, 100);
	get_long(&r, 0, 1);
	get(&r, 0, EXL3_OP_LINEAR, 2);
	submit(&r, 0);
	linear(&r, 1, 10);
	while (first < 100) {
		if (device.running[0]->rows[0].x_stride == 528) {
			uint32_t m = slice(&r, first);

			if (nr++ >
			    1) { /* the first ones of a shape that nobody knows may be longer */
				assert_in_range(m, 1, 10);
				assert_true(device.nr == 1 ||
					    m < 10); /* no more than a chunk ahead */
			}
			device.running[0]->skipped[0] = 1;
			first += m;
			dev_finish(0);
			turn(&r);
			if (first < 100)
				expect_none(&r, 0);
		} else {
			dev_finish(0);
			turn(&r);
			expect(&r, 1, 10, 0);
			others++;
			linear(&r, 1, 10);
		}
	}
	assert_in_range(nr, 6, 100);
	assert_in_range(others, nr / 2 - 1, nr + 1); /* how many is the scheduler's business */
	while (device.nr) {
		dev_finish(0);
		turn(&r);
	}
	expect(&r, 1, 10, 0);
	cqe = expect(&r, 0, 1, 0);
	assert_int_equal(cqe.detail, nr);
	assert_int_equal(cqe.exec_ns, 1000);
	expect(&r, 0, 2, 0);
	rig_close(&r);
}

static void a_long_request_ends_between_slices(void **state)
{
	struct rig r;
	uint32_t m;

	(void)state;
	rig_open(&r, 1, 1);
	device.slow_ns = 10;
	exl3_dispatch_set_chunk(r.d, 100);
	/* Cancelled while a slice runs: nothing follows it. */
	get_long(&r, 0, 1);
	submit(&r, 0);
	get(&r, 0, EXL3_OP_CANCEL, 2)->u.cancel.user_data = 1;
	submit(&r, 0);
	expect(&r, 0, 2, 0);
	get(&r, 0, EXL3_OP_CANCEL, 3)->u.cancel.user_data = 1;
	submit(&r, 0);
	expect(&r, 0, 3, -EALREADY); /* that was said already */
	expect_none(&r, 0);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, -ECANCELED);
	assert_int_equal(device.nr, 0);
	/* Its deadline passes while a slice runs. */
	get_long(&r, 0, 4)->deadline_ns = r.now + 100;
	submit(&r, 0);
	m = slice(&r, 0);
	r.now += 50;
	dev_finish(0);
	turn(&r);
	slice(&r, m);
	r.now += 50;
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 4, -ETIME);
	assert_int_equal(device.nr, 0);
	/* A slice fails. */
	get_long(&r, 0, 5);
	submit(&r, 0);
	dev_finish(-ENOMEM);
	turn(&r);
	expect(&r, 0, 5, -ENOMEM);
	/* The channel is closed. */
	get_long(&r, 0, 6);
	submit(&r, 0);
	r.ch[0] = exl3_channel_close(r.ch[0]);
	dev_finish(0);
	turn(&r);
	assert_int_equal(device.nr, 0);
	assert_int_equal(exl3_dispatch_channels(r.d), 1);
	rig_close(&r);
}

/* A channel's requests keep their order across devices; another channel's run meanwhile. */
static void order_holds_across_devices(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	linear(&r, 0, 1);
	linear(&r, 0, 2);
	linear_on_second(&r, 0, 3);
	linear_on_second(&r, 0, 4);
	get(&r, 0, EXL3_OP_NOP, 5);
	submit(&r, 0);
	linear(&r, 0, 6);
	linear_on_second(&r, 1, 7);
	assert_int_equal(device.nr, 2); /* 1 and 2: one device may have several of a channel */
	assert_int_equal(second.nr, 1); /* 7: the other channel waits for nobody */
	assert_ptr_equal(second.running[0]->rows[0].x, r.buf.base[1]);
	dev_finish_on(&second, 0);
	dev_finish(0);
	turn(&r);
	expect(&r, 1, 7, 0);
	expect(&r, 0, 1, 0);
	assert_int_equal(second.nr, 0); /* 3 waits for 2 */
	assert_true(exl3_dispatch_busy(r.d));
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 2, 0);
	assert_int_equal(device.nr, 0); /* 6 waits for 3 and 4 */
	assert_int_equal(second.nr, 2);
	dev_finish_on(&second, 0);
	turn(&r);
	expect(&r, 0, 3, 0);
	expect_none(&r, 0);
	dev_finish_on(&second, -ENOMEM); /* failing is an end too */
	turn(&r);
	expect(&r, 0, 4, -ENOMEM);
	expect(&r, 0, 5, 0);
	assert_int_equal(device.nr, 1);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 6, 0);
	assert_false(exl3_dispatch_busy(r.d));
	rig_close(&r);
}

/* What is held back can be cancelled, can expire, and goes with its channel. */
static void held_requests_end_too(void **state)
{
	uint64_t until = 0;
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	linear(&r, 0, 1);
	linear_on_second(&r, 0, 2);
	get(&r, 0, EXL3_OP_LINEAR, 3)->deadline_ns =
		r.now + 1000; /* behind 2, though its device is idle */
	submit(&r, 0);
	get(&r, 0, EXL3_OP_NOP, 4);
	submit(&r, 0);
	expect_none(&r, 0);
	r.now += 500;
	turn(&r);
	assert_true(exl3_dispatch_may_sleep(r.d, r.now, &until));
	assert_int_equal(until, r.now + 500);
	r.now += 500;
	turn(&r);
	expect(&r, 0, 3, -ETIME);
	get(&r, 0, EXL3_OP_CANCEL, 5)->u.cancel.user_data = 2;
	submit(&r, 0);
	expect(&r, 0, 2, -ECANCELED);
	expect(&r, 0, 5, 0);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, 0);
	expect(&r, 0, 4, 0);
	linear(&r, 0, 6);
	linear_on_second(&r, 0, 7);
	linear(&r, 0, 8);
	r.ch[0] = exl3_channel_close(r.ch[0]);
	assert_int_equal(r.model.inflight, 1);
	dev_finish(0);
	turn(&r);
	assert_int_equal(second.nr, 0);
	assert_int_equal(exl3_dispatch_channels(r.d), 1);
	rig_close(&r);
}

#define S 1000000000ull

/* A launch that never ends is found when it is longer than its size and the slack explain; it is not
 * answered. Launches that go on ending, and time in which the loop did not turn either, are no hang. */
static void a_launch_that_never_ends(void **state)
{
	const char *why = NULL;
	uint64_t until = 0;
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	exl3_dispatch_set_slack(r.d, 10 * S);
	linear(&r, 0, 1);
	linear(&r, 0, 2);
	linear(&r, 1, 3);
	assert_true(device.nr >= 2);
	for (unsigned i = 0; i < 9; i++, r.now += S)
		turn(&r);
	dev_finish(0); /* it goes on */
	turn(&r);
	expect(&r, 0, 1, 0);
	for (unsigned i = 0; i < 10; i++, r.now += S)
		turn(&r);
	assert_true(exl3_dispatch_may_sleep(r.d, r.now, &until));
	assert_true(until <= r.now + S); /* it is looked at in time */
	r.now += 100 * S;                /* stopped, as by a debugger */
	turn(&r);
	assert_false(exl3_dispatch_lost(r.d, NULL));
	exl3_dispatch_set_slack(r.d, 0); /* never */
	for (unsigned i = 0; i < 100; i++, r.now += S)
		turn(&r);
	assert_false(exl3_dispatch_lost(r.d, NULL));
	exl3_dispatch_set_slack(r.d, 10 * S);
	turn(&r);
	assert_true(exl3_dispatch_lost(r.d, &why));
	assert_non_null(strstr(why, "a launch does not end"));
	assert_int_equal(r.counters.requests, 1); /* the others were not answered */
	rig_close(&r);
}

/* A large launch has longer than a small one. */
static void a_large_launch_has_its_time(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	exl3_dispatch_set_slack(r.d, S);
	/* 2 rows of 2^40 multiply-adds: 1.8 s. */
	r.desc.k = r.desc.k_log = r.desc.n = r.desc.n_log = 1u << 20;
	r.buf.bytes = 1u << 30;
	get(&r, 0, EXL3_OP_LINEAR, 1)->y = EXL3_REF(1, 1u << 29);
	submit(&r, 0);
	assert_int_equal(device.nr, 1);
	for (unsigned i = 0; i < 6; i++, r.now += S / 2)
		turn(&r); /* at 0 to 2.5 s */
	assert_false(exl3_dispatch_lost(r.d, NULL));
	for (unsigned i = 0; i < 2; i++, r.now += S / 2)
		turn(&r);
	assert_true(exl3_dispatch_lost(r.d, NULL));
	rig_close(&r);
}

/* A lost device answers for what it had and what was held back for it; the others finish theirs. */
static void one_of_two_devices_is_lost(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	linear_on_second(&r, 0, 1);
	linear(&r, 0, 2);
	linear_on_second(&r, 0, 3);
	linear(&r, 1, 4);
	second.lost = true;
	second.nr = 0;
	turn(&r);
	assert_true(exl3_dispatch_lost(r.d, NULL));
	expect(&r, 0, 1, -EIO);
	assert_int_equal(device.nr, 2);
	dev_finish(0);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 2, 0);
	expect(&r, 0, 3, -EIO);
	expect(&r, 1, 4, 0);
	assert_false(exl3_dispatch_busy(r.d));
	rig_close(&r);
}

/* A buffer that a device cannot address is none for its requests. */
static void a_buffer_of_the_other_device(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r, 4, 1);
	r.buf.base[1] = NULL;
	linear_on_second(&r, 0, 1);
	assert_int_equal(expect(&r, 0, 1, -EINVAL).detail, EXL3_DETAIL_BUFFER);
	linear(&r, 0, 2);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 2, 0);
	rig_close(&r);
}

/* ---- tenants at their limits ---- */

static struct exl3_tenant *rig_tenant(struct exl3_policy *p, const char *conf)
{
	struct exl3_identity who = {.uid = 1};
	struct exl3_config cfg;
	struct exl3_error err;

	test_code(exl3_config_parse_string(conf, &cfg, &err), 0, &err);
	test_code(exl3_policy_apply(p, &cfg, exl3_now_ns(), &err), 0, &err);
	exl3_config_fini(&cfg);
	return exl3_policy_match(p, &who);
}

static void requests_beyond_a_rate_wait(void **state)
{
	struct exl3_policy p = {0};
	struct exl3_tenant *t = rig_tenant(&p, "[tenant a]\nusers = 1\nrequests-per-second = 1000\nburst = 3\n");
	uint64_t until = 0;
	struct rig r;

	(void)state;
	rig_open(&r, 8, 1);
	exl3_channel_set_tenant(r.ch[0], t);
	for (uint64_t i = 0; i < 6; i++)
		get(&r, 0, EXL3_OP_NOP, i);
	submit(&r, 0);
	for (uint64_t i = 0; i < 3; i++)
		expect(&r, 0, i, 0);
	expect_none(&r, 0);
	/* Nobody else waits, and the loop may sleep until the next token. */
	get(&r, 1, EXL3_OP_NOP, 9);
	submit(&r, 1);
	expect(&r, 1, 9, 0);
	turn(&r);
	if (exl3_dispatch_may_sleep(r.d, r.now, &until))
		assert_int_equal(until, r.now + 1000000);
	r.now += 1000000;
	turn(&r);
	expect(&r, 0, 3, 0);
	expect_none(&r, 0);
	r.now += 5000000;
	turn(&r);
	expect(&r, 0, 4, 0);
	expect(&r, 0, 5, 0);
	rig_close(&r);
	assert_int_equal(t->refs, 0);
	exl3_policy_fini(&p);
}

static void rows_beyond_a_limit_wait(void **state)
{
	struct exl3_policy p = {0};
	struct exl3_tenant *t = rig_tenant(&p, "[tenant a]\nusers = 1\nrows = 5\n");
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	rig_open(&r, 8, 1);
	exl3_channel_set_tenant(r.ch[0], t);
	exl3_channel_set_tenant(r.ch[1], t);
	linear(&r, 0, 1); /* two rows each */
	linear(&r, 0, 2);
	linear(&r, 0, 3); /* the stash */
	linear(&r, 0, 4);
	linear(&r, 1, 5);
	get(&r, 1, EXL3_OP_NOP, 6); /* behind what waits */
	submit(&r, 1);
	assert_int_equal(device.nr, 2);
	assert_int_equal(t->rows, 4);
	assert_ptr_equal(t->waiting, r.ch[0]);
	expect_none(&r, 1);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, 0);
	assert_int_equal(device.nr, 2); /* the first in the line went on */
	expect_none(&r, 1);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 2, 0);
	assert_int_equal(device.nr, 2); /* then the other channel, not 4 */
	assert_int_equal(t->rows, 4);
	dev_finish(0);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 3, 0);
	expect(&r, 1, 5, 0);
	expect(&r, 1, 6, 0);
	assert_int_equal(device.nr, 1);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 4, 0);
	assert_null(t->waiting);
	assert_int_equal(t->rows, 0);
	/* One that can never fit is refused, an illegal one is illegal. */
	get(&r, 0, EXL3_OP_LINEAR, 7)->rows = 6;
	get(&r, 0, EXL3_OP_LINEAR, 8)->rows = EXL3_M_MAX + 1;
	submit(&r, 0);
	cqe = expect(&r, 0, 7, -EDQUOT);
	assert_int_equal(cqe.detail, EXL3_DETAIL_LIMIT);
	expect(&r, 0, 8, -EINVAL);
	rig_close(&r);
	exl3_policy_fini(&p);
}

/* A channel that waits is closed, moved to another tenant, or drained. */
static void the_end_of_waiting(void **state)
{
	struct exl3_policy p = {0};
	struct exl3_tenant *t = rig_tenant(&p, "[tenant a]\nusers = 1\nrows = 2\n[tenant b]\nusers = 2\n"), *b;
	const struct exl3_identity who = {.uid = 2};
	struct rig r;

	(void)state;
	b = exl3_policy_match(&p, &who);
	rig_open(&r, 8, 1);
	exl3_channel_set_tenant(r.ch[0], t);
	linear(&r, 0, 1);
	linear(&r, 0, 2);
	assert_ptr_equal(t->waiting, r.ch[0]);
	exl3_channel_set_tenant(r.ch[0], b);
	turn(&r);
	assert_int_equal(device.nr, 2);
	assert_null(t->waiting);
	assert_int_equal(t->rows + t->refs + t->channels + t->bytes, 0);
	assert_int_equal(b->rows, 4);
	dev_finish(0);
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, 0);
	expect(&r, 0, 2, 0);
	exl3_channel_set_tenant(r.ch[0], t);
	exl3_channel_set_tenant(r.ch[1], t);
	linear(&r, 0, 3);
	linear(&r, 0, 4);
	linear(&r, 1, 5);
	r.ch[0] = exl3_channel_close(r.ch[0]);
	assert_ptr_equal(t->waiting, r.ch[1]);
	assert_int_equal(t->rows, 2); /* of what still runs */
	exl3_dispatch_drain(r.d);
	turn(&r);
	expect(&r, 1, 5, -ESHUTDOWN);
	dev_finish(0);
	turn(&r);
	assert_int_equal(t->rows, 0);
	rig_close(&r);
	assert_int_equal(t->refs + b->refs, 0);
	exl3_policy_fini(&p);
}

/* Anything at any time: what tenants hold adds up, everybody goes on in the end, in order within a channel. */
static void tenants_random_walk(void **state)
{
	static const char conf[] = "[tenant a]\nusers = 1\nrows = 7\n"
				   "[tenant b]\nusers = 2\nrequests-per-second = 100000\nburst = 2\n"
				   "[tenant c]\nusers = 3\nrows = 4\nrequests-per-second = 1000\n";
	struct exl3_tenant *t[4];
	struct exl3_policy p = {0};
	uint64_t sent[2] = {0}, answered[2] = {0}, seed = exl3_now_ns();
	struct exl3_cqe cqe;
	struct rig r;

	(void)state;
	print_message("seed %llu\n", (unsigned long long)seed);
	srand48((long)seed);
	for (unsigned i = 0; i < 4; i++) {
		const struct exl3_identity who = {.uid = i + 1};

		rig_tenant(&p, conf);
		t[i] = exl3_policy_match(&p, &who);
	}
	rig_open(&r, 3, 8);
	device.slow_ns = 10;
	for (unsigned i = 0; i < 2; i++)
		exl3_channel_set_tenant(r.ch[i], t[i]);
	for (unsigned step = 0; step < 20000; step++) {
		unsigned ch = (unsigned)(lrand48() & 1);
		struct exl3_sqe *sqe;
		uint64_t rows = 0;

		switch (lrand48() % 6) {
		case 0:
		case 1:
			if (exl3_ring_get(&r.ring[ch], &sqe) < 0)
				break;
			sqe->op = EXL3_OP_LINEAR;
			sqe->x_dtype = sqe->y_dtype = EXL3_F32;
			sqe->module = 7;
			sqe->rows = 1 + (uint32_t)(lrand48() % 4);
			sqe->x = EXL3_REF(1, 0);
			sqe->y = EXL3_REF(1, 65536);
			sqe->user_data = sent[ch]++;
			submit(&r, ch);
			break;
		case 2:
			if (device.nr)
				dev_finish(0);
			turn(&r);
			break;
		case 3:
			r.now += (uint64_t)(lrand48() % 300000);
			turn(&r);
			break;
		case 4:
			if (lrand48() % 8 == 0)
				exl3_channel_set_tenant(r.ch[ch], t[lrand48() & 3]);
			break;
		default:
			exl3_dispatch_set_chunk(r.d, lrand48() & 1 ? 25 : 0);
			break;
		}
		for (ch = 0; ch < 2; ch++) {
			while (exl3_ring_take(&r.ring[ch], &cqe) == 1) {
				assert_int_equal(cqe.result, 0);
				assert_int_equal(cqe.user_data, answered[ch]);
				answered[ch]++;
			}
		}
		assert_int_equal(t[0]->channels + t[1]->channels + t[2]->channels + t[3]->channels, 2);
		for (unsigned i = 0; i < 4; i++)
			rows += t[i]->rows;
		assert_true(rows <= 4 * (sent[0] + sent[1] - answered[0] - answered[1]));
	}
	for (unsigned i = 0; answered[0] + answered[1] < sent[0] + sent[1] && i < 10000; i++) {
		r.now += 1000000;
		while (device.nr)
			dev_finish(0);
		turn(&r);
		for (unsigned ch = 0; ch < 2; ch++) {
			while (exl3_ring_take(&r.ring[ch], &cqe) == 1)
				assert_int_equal(cqe.user_data, answered[ch]++);
		}
	}
	assert_int_equal(answered[0] + answered[1], sent[0] + sent[1]);
	for (unsigned i = 0; i < 4; i++) {
		assert_int_equal(t[i]->rows + t[i]->requests, 0);
		assert_null(t[i]->waiting);
	}
	rig_close(&r);
	for (unsigned i = 0; i < 4; i++)
		assert_int_equal(t[i]->refs + t[i]->bytes + t[i]->credits, 0);
	exl3_policy_fini(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(long_requests_run_in_slices),
		test_case(a_long_request_ends_between_slices),
		test_case(requests_beyond_a_rate_wait),
		test_case(rows_beyond_a_limit_wait),
		test_case(the_end_of_waiting),
		test_case(tenants_random_walk),
		test_case(order_holds_across_devices),
		test_case(held_requests_end_too),
		test_case(one_of_two_devices_is_lost),
		test_case(a_launch_that_never_ends),
		test_case(a_large_launch_has_its_time),
		test_case(a_buffer_of_the_other_device),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
