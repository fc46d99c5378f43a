/* SPDX-License-Identifier: Apache-2.0 */
/* test_words.c - stream calls: what the device is told to write, what the loop writes, how long it looks. */
#include "tests/test.h"

#include "daemon/config.h"
#include "daemon/dispatch.h"
#include "daemon/tenant.h"

#include <fcntl.h>

/* ---- a device that finishes when the test says so ---- */

struct exl3_dev {
	const struct exl3_work *running[16];
	unsigned nr, nr_done;
	struct exl3_done done[16];
};
static struct exl3_dev device;

static int dev_submit(struct exl3_dev *dev, const struct exl3_work *work)
{
	dev->running[dev->nr++] = work;
	return 0;
}

static int dev_poll(struct exl3_dev *dev, struct exl3_done *done, unsigned max)
{
	unsigned n = dev->nr_done < max ? dev->nr_done : max;

	memcpy(done, dev->done, n * sizeof(done[0]));
	memmove(dev->done, dev->done + n, (dev->nr_done - n) * sizeof(done[0]));
	dev->nr_done -= n;
	return (int)n;
}

static int dev_event_fd(struct exl3_dev *dev)
{
	(void)dev;
	return -1;
}

static bool dev_wake_arm(struct exl3_dev *dev)
{
	return dev->nr_done == 0;
}

static const struct exl3_kernel dev_kernels[] = {{.name = "only", .op = EXL3_OP_LINEAR}, {0}};
static const struct exl3_backend_ops dev_ops = {.name = "strings",
						.submit = dev_submit,
						.poll = dev_poll,
						.event_fd = dev_event_fd,
						.wake_arm = dev_wake_arm,
						.kernels = dev_kernels};

/* ---- one channel with words ---- */

#define ENTRIES 8u /* and twice as many slots */
#define DEV_BASE 0x10000 /* where the device has the buffer of operands, and 0x900000 that of the words */

struct rig {
	struct exl3_loop *loop;
	struct exl3_dispatch *d;
	struct exl3_channel *ch;
	struct exl3_segment *seg;
	struct exl3_ring_client ring;
	int notify, kick;
	struct exl3_counters counters;
	struct exl3_buffer buf, words_buf;
	struct exl3_arena arena, words_arena;
	struct exl3_stream_slot slots[2 * ENTRIES];
	struct exl3_registered model;
	struct exl3_module_desc desc;
	uint64_t now;
};

static struct exl3_buffer *rig_buffer(void *arg, uint32_t id)
{
	struct rig *r = arg;

	return id == 1 ? &r->buf : NULL;
}

static int rig_target(void *arg, uint32_t handle, struct exl3_target *ret)
{
	struct rig *r = arg;

	*ret = (struct exl3_target){.desc = &r->desc, .model = &r->model};
	return handle == 7 ? 0 : -ENOENT;
}

static void rig_buffer_free(void *arg, struct exl3_buffer *buf)
{
	(void)arg;
	fail_msg("buffer of %llu bytes was freed", (unsigned long long)buf->bytes);
}

/* With the loop and the dispatcher that it has. */
static void channel_open(struct rig *r)
{
	struct exl3_channel_options co = {.entries = ENTRIES, .channel = 1, .counters = &r->counters,
					  .buffer = rig_buffer, .target = rig_target, .arg = r, .who = "test"};
	struct exl3_error err;
	int fds[3];

	r->buf = (struct exl3_buffer){
		.base = {(char *)DEV_BASE}, .bytes = 1 << 20, .refs = 1, .arena = &r->arena};
	r->words_arena = (struct exl3_arena){.host_ptr = r->slots, .bytes = sizeof(r->slots)};
	r->words_buf = (struct exl3_buffer){
		.base = {(char *)0x900000}, .bytes = sizeof(r->slots), .refs = 1, .arena = &r->words_arena};
	r->model.state = EXL3_MODEL_READY;
	r->desc = (struct exl3_module_desc){
		.kind = EXL3_MOD_LINEAR, .k = 128, .n = 128, .k_log = 128, .n_log = 128};
	test_code(exl3_channel_open(r->d, &co, &r->ch, fds, &err), 0, &err);
	test_code(exl3_segment_map(fcntl(fds[0], F_DUPFD_CLOEXEC, 0), exl3_channel_bytes(r->ch), &r->seg, &err),
		  0, &err);
	test_code(exl3_ring_attach(r->seg, &r->ring, &err), 0, &err);
	r->notify = fds[2];
	r->kick = fcntl(fds[1], F_DUPFD_CLOEXEC, 0);
	test_code(exl3_channel_bind_stream(r->ch, &r->words_buf, &err), 0, &err);
}

static void rig_open(struct rig *r)
{
	struct exl3_dispatch_options opt = {
		.buffer_free = rig_buffer_free, .arg = r, .queue_depth = 4, .merge_max = 1};
	struct exl3_error err;

	memset(r, 0, sizeof(*r));
	memset(&device, 0, sizeof(device));
	r->now = exl3_now_ns() + 1000000000000; /* later than what the daemon's own clock says */
	test_code(exl3_loop_new(&r->loop, &err), 0, &err);
	opt.loop = r->loop;
	test_code(exl3_dispatch_new(&opt, &r->d, &err), 0, &err);
	test_code(exl3_dispatch_add_device(r->d, &dev_ops, &device, true, &err), 0, &err);
	channel_open(r);
}

/* Another channel of the same dispatcher. */
static void rig_beside(struct rig *b, const struct rig *r)
{
	memset(b, 0, sizeof(*b));
	b->now = r->now;
	b->loop = r->loop;
	b->d = r->d;
	channel_open(b);
}

static void turn(struct rig *r)
{
	exl3_loop_poll(r->loop, r->now);
	while (exl3_dispatch_turn(r->d, r->now))
		;
}

static void finish(struct rig *r, int result)
{
	assert_true(device.nr > 0);
	device.done[device.nr_done++] =
		(struct exl3_done){.tag = device.running[0]->tag, .result = result, .exec_ns = 5};
	memmove(device.running, device.running + 1, --device.nr * sizeof(device.running[0]));
	turn(r);
}

static void channel_close(struct rig *r)
{
	r->ch = exl3_channel_close(r->ch);
	while (device.nr)
		finish(r, 0);
	turn(r);
	assert_int_equal(r->words_buf.refs, 1);
	assert_int_equal(r->buf.refs, 1);
	exl3_segment_free(r->seg);
	exl3_closep(&r->notify);
	exl3_closep(&r->kick);
}

static void rig_close(struct rig *r)
{
	channel_close(r);
	assert_int_equal(exl3_dispatch_channels(r->d), 0);
	r->d = exl3_dispatch_free(r->d);
	exl3_loop_free(r->loop);
}

/* A stream call in the ring, not published; user_data is its number. */
static struct exl3_sqe *call(struct rig *r, uint8_t op, uint32_t seq)
{
	struct exl3_sqe *sqe = NULL;

	assert_int_equal(exl3_ring_get(&r->ring, &sqe), 0);
	sqe->op = op;
	sqe->user_data = seq;
	sqe->flags = EXL3_STREAM;
	sqe->stream_seq = seq;
	if (op == EXL3_OP_LINEAR) {
		sqe->x_dtype = sqe->y_dtype = EXL3_F32;
		sqe->module = 7;
		sqe->rows = 2;
		sqe->x = EXL3_REF(1, 0);
		sqe->y = EXL3_REF(1, 262144);
	}
	return sqe;
}

static void submit(struct rig *r)
{
	const uint64_t one = 1;

	if (exl3_ring_publish(&r->ring))
		assert_int_equal(write(r->kick, &one, sizeof(one)), sizeof(one));
	turn(r);
}

static struct exl3_stream_slot *slot(struct rig *r, uint32_t seq)
{
	return &r->slots[seq % (2 * ENTRIES)];
}

static void ready(struct rig *r, uint32_t seq)
{
	slot(r, seq)->ready = seq;
	turn(r);
}

static void expect(struct rig *r, uint32_t seq, int result)
{
	struct exl3_cqe cqe = {0};

	assert_int_equal(exl3_ring_take(&r->ring, &cqe), 1);
	if (cqe.user_data != seq || cqe.result != result)
		fail_msg("completion %llu with %d, wanted %u with %d", (unsigned long long)cqe.user_data,
			 cqe.result, seq, result);
	assert_int_equal(slot(r, seq)->done, seq);
	assert_int_equal(slot(r, seq)->result, result);
}

static void expect_none(struct rig *r)
{
	struct exl3_cqe cqe;

	assert_int_equal(exl3_ring_take(&r->ring, &cqe), 0);
}

static void expect_signal(const struct exl3_work *work, uint32_t seq)
{
	assert_int_equal(work->nr_signals, 1);
	assert_ptr_equal(work->signals[0].word,
			 (char *)0x900000 + seq % (2 * ENTRIES) * 128 + offsetof(struct exl3_stream_slot, done));
	assert_int_equal(work->signals[0].value, seq);
}

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

static void linear(struct rig *r, uint32_t rows, uint64_t user_data)
{
	struct exl3_sqe *sqe = call(r, EXL3_OP_LINEAR, 0);

	sqe->flags = 0;
	sqe->rows = rows;
	sqe->user_data = user_data;
	submit(r);
}

static void result(struct rig *r, uint64_t user_data, int want)
{
	struct exl3_cqe cqe = {0};

	assert_int_equal(exl3_ring_take(&r->ring, &cqe), 1);
	assert_int_equal(cqe.user_data, user_data);
	assert_int_equal(cqe.result, want);
}

/* ---- cases ---- */

static void starts_when_ready(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r);
	call(&r, EXL3_OP_LINEAR, 1);
	call(&r, EXL3_OP_NOP, 2);
	submit(&r);
	assert_int_equal(device.nr, 0);
	ready(&r, 2); /* in order: it is behind the first */
	assert_int_equal(device.nr, 0);
	ready(&r, 1);
	assert_int_equal(device.nr, 2);
	assert_int_equal(device.running[0]->op, EXL3_OP_LINEAR);
	assert_int_equal(device.running[1]->op, EXL3_OP_NOP);
	expect_signal(device.running[0], 1);
	expect_signal(device.running[1], 2);
	finish(&r, 0);
	expect(&r, 1, 0);
	expect_none(&r);
	finish(&r, 0);
	expect(&r, 2, 0);
	/* Ready before it came. */
	slot(&r, 3)->ready = 3;
	call(&r, EXL3_OP_NOP, 3);
	submit(&r);
	assert_int_equal(device.nr, 1);
	finish(&r, -EOPNOTSUPP);
	expect(&r, 3, -EOPNOTSUPP);
	rig_close(&r);
}

static void words_of_refused_and_cancelled_calls(void **state)
{
	struct exl3_sqe *sqe = NULL;
	struct rig r;

	(void)state;
	rig_open(&r);
	call(&r, EXL3_OP_LINEAR, 5)->module = 9;
	submit(&r);
	expect(&r, 5, -ENOENT);
	call(&r, EXL3_OP_LINEAR, 6);
	submit(&r);
	assert_int_equal(exl3_ring_get(&r.ring, &sqe), 0);
	sqe->op = EXL3_OP_CANCEL;
	sqe->u.cancel.user_data = 6;
	submit(&r);
	expect(&r, 6, -ECANCELED);
	/* Closed while it is held back: its stream goes on. */
	call(&r, EXL3_OP_LINEAR, 7);
	submit(&r);
	assert_int_equal(slot(&r, 7)->done, 0);
	r.ch = exl3_channel_close(r.ch);
	assert_int_equal(slot(&r, 7)->done, 7);
	assert_int_equal(slot(&r, 7)->result, -ECANCELED);
	rig_close(&r);
}

static void numbers_wrap(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r);
	for (uint32_t i = 0; i < 2 * ENTRIES; i++)
		r.slots[i].ready = r.slots[i].done = UINT32_MAX - 20;
	for (uint32_t seq = UINT32_MAX - 19; seq != 25; seq++) {
		slot(&r, seq)->result = 0;
		call(&r, EXL3_OP_NOP, seq);
		submit(&r);
		assert_int_equal(device.nr, 0);
		slot(&r, seq)->ready = seq - 1;
		turn(&r);
		assert_int_equal(device.nr, 0);
		ready(&r, seq);
		assert_int_equal(device.nr, 1);
		expect_signal(device.running[0], seq);
		finish(&r, 0);
		expect(&r, seq, 0);
	}
	rig_close(&r);
}

static void late_ones_end(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r);
	exl3_dispatch_set_ready(r.d, 0, 1000000);
	call(&r, EXL3_OP_LINEAR, 1);
	call(&r, EXL3_OP_LINEAR, 2);
	call(&r, EXL3_OP_LINEAR, 3)->deadline_ns = r.now + 500000;
	submit(&r);
	r.now += 499999;
	turn(&r);
	expect_none(&r);
	r.now += 1;
	turn(&r);
	expect(&r, 3, -ETIME); /* its own deadline, wherever it stands */
	r.now += 499999;
	turn(&r);
	expect_none(&r);
	r.now += 1;
	turn(&r);
	expect(&r, 1, -ETIME);
	expect_none(&r); /* the second one's time begins when it is the first */
	r.now += 999999;
	turn(&r);
	expect_none(&r);
	r.now += 1;
	turn(&r);
	expect(&r, 2, -ETIME);
	assert_int_equal(device.nr, 0);
	rig_close(&r);
}

static void looks_less_and_less(void **state)
{
	uint64_t until, start;
	struct rig r;

	(void)state;
	rig_open(&r);
	exl3_dispatch_set_ready(r.d, 1000000, 0);
	call(&r, EXL3_OP_NOP, 1);
	submit(&r);
	/* The client's ring goes to sleep first. */
	r.now = start = exl3_now_ns() + 10000;
	turn(&r);
	assert_false(exl3_dispatch_may_sleep(r.d, r.now, &until));
	r.now = start + 900000;
	turn(&r);
	assert_false(exl3_dispatch_may_sleep(r.d, r.now, &until));
	r.now = start + 1600000;
	turn(&r);
	assert_true(exl3_dispatch_may_sleep(r.d, r.now, &until));
	assert_in_range(until - r.now, 200000, 210000); /* an eighth */
	r.now = start + 100000000;
	turn(&r);
	assert_true(exl3_dispatch_may_sleep(r.d, r.now, &until));
	assert_int_equal(until - r.now, 1000000);
	ready(&r, 1);
	finish(&r, 0);
	expect(&r, 1, 0);
	r.now += 1000000000;
	turn(&r);
	assert_true(exl3_dispatch_may_sleep(r.d, r.now, &until));
	assert_int_equal(until, UINT64_MAX);
	rig_close(&r);
}

static void slices_signal_once(void **state)
{
	struct exl3_sqe *sqe;
	uint32_t signals = 0, launches = 0;
	struct rig r;

	(void)state;
	rig_open(&r);
	exl3_dispatch_set_chunk(r.d, 1);
	sqe = call(&r, EXL3_OP_LINEAR, 9);
	sqe->rows = 200;
	slot(&r, 9)->ready = 9;
	submit(&r);
	while (device.nr) {
		launches++;
		if (device.running[0]->nr_signals) {
			expect_signal(device.running[0], 9);
			signals++;
		} else {
			assert_int_equal(slot(&r, 9)->done, 0);
		}
		finish(&r, 0);
	}
	assert_true(launches > 1);
	assert_int_equal(signals, 1);
	expect(&r, 9, 0);
	rig_close(&r);
}

/* Rows of a call that is not ready, and of what is behind it, are nobody's: others of the tenant have all of them. */
static void rows_count_when_ready(void **state)
{
	struct exl3_policy p = {0};
	struct exl3_tenant *t = rig_tenant(&p, "[tenant a]\nusers = 1\nrows = 5\n");
	struct rig r, other;

	(void)state;
	rig_open(&r);
	rig_beside(&other, &r);
	exl3_channel_set_tenant(r.ch, t);
	exl3_channel_set_tenant(other.ch, t);
	call(&r, EXL3_OP_LINEAR, 1)->deadline_ns = r.now + 3600000000000u;
	submit(&r);
	linear(&r, 4, 100); /* behind it */
	assert_int_equal(t->rows, 0);
	assert_int_equal(device.nr, 0);
	linear(&other, 5, 200);
	assert_int_equal(t->rows, 5);
	assert_int_equal(device.nr, 1);
	/* Ready, but there is no room: it is the next one, before any that comes later. */
	ready(&r, 1);
	assert_int_equal(device.nr, 1);
	assert_ptr_equal(t->next_rows, r.ch);
	linear(&other, 1, 201);
	finish(&r, 0);
	result(&other, 200, 0);
	assert_int_equal(device.nr, 1); /* the four rows behind it do not fit beside it */
	expect_signal(device.running[0], 1);
	assert_int_equal(t->rows, 2);
	assert_ptr_equal(t->next_rows, r.ch);
	finish(&r, 0);
	expect(&r, 1, 0);
	assert_null(t->next_rows);
	assert_int_equal(t->rows, 5); /* now they do, and so does the other's */
	assert_int_equal(device.nr, 2);
	finish(&r, 0);
	finish(&r, 0);
	result(&r, 100, 0);
	result(&other, 201, 0);
	assert_int_equal(t->rows, 0);
	channel_close(&other);
	rig_close(&r);
	assert_int_equal(t->refs, 0);
	exl3_policy_fini(&p);
}

/* The first in the line may change its word, be cancelled or leave: the others go on. */
static void the_next_for_rows_is_gone(void **state)
{
	struct exl3_policy p = {0};
	struct exl3_tenant *t = rig_tenant(&p, "[tenant a]\nusers = 1\nrows = 3\n");
	struct exl3_sqe *sqe = NULL;
	struct rig r, other;

	(void)state;
	for (int how = 0; how < 4; how++) {
		rig_open(&r);
		rig_beside(&other, &r);
		exl3_channel_set_tenant(r.ch, t);
		exl3_channel_set_tenant(other.ch, t);
		linear(&other, 3, 200);
		slot(&r, 1)->ready = 1;
		call(&r, EXL3_OP_LINEAR, 1)->deadline_ns = r.now + 1000;
		submit(&r);
		assert_ptr_equal(t->next_rows, r.ch);
		linear(&other, 2, 201);
		if (how == 0) {
			slot(&r, 1)->ready = 0;
		} else if (how == 1) {
			assert_int_equal(exl3_ring_get(&r.ring, &sqe), 0);
			sqe->op = EXL3_OP_CANCEL;
			sqe->u.cancel.user_data = 1;
			submit(&r);
		} else if (how == 2) {
			r.now += 2000;
		} else {
			r.ch = exl3_channel_close(r.ch);
		}
		turn(&r);
		assert_null(t->next_rows);
		finish(&r, 0);
		assert_int_equal(device.nr, 1);
		assert_int_equal(t->rows, 2);
		finish(&r, 0);
		result(&other, 200, 0);
		result(&other, 201, 0);
		channel_close(&other);
		rig_close(&r);
		assert_int_equal(t->rows, 0);
		assert_int_equal(t->refs, 0);
	}
	exl3_policy_fini(&p);
}

/* A limit below what was accepted before: it runs when it is alone. */
static void a_lowered_limit(void **state)
{
	struct exl3_policy p = {0};
	struct exl3_tenant *t = rig_tenant(&p, "[tenant a]\nusers = 1\nrows = 5\n");
	struct rig r, other;

	(void)state;
	rig_open(&r);
	rig_beside(&other, &r);
	exl3_channel_set_tenant(r.ch, t);
	exl3_channel_set_tenant(other.ch, t);
	call(&r, EXL3_OP_LINEAR, 1);
	submit(&r);
	assert_ptr_equal(rig_tenant(&p, "[tenant a]\nusers = 1\nrows = 1\n"), t);
	linear(&other, 1, 200);
	ready(&r, 1);
	assert_int_equal(device.nr, 1);
	finish(&r, 0);
	assert_int_equal(device.nr, 1);
	assert_int_equal(t->rows, 2);
	finish(&r, 0);
	expect(&r, 1, 0);
	result(&other, 200, 0);
	channel_close(&other);
	rig_close(&r);
	exl3_policy_fini(&p);
}

static void a_drain_waits_a_moment(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r);
	exl3_dispatch_set_ready(r.d, 0, 3600000000000u);
	call(&r, EXL3_OP_LINEAR, 1)->deadline_ns = r.now + 3600000000000u;
	call(&r, EXL3_OP_LINEAR, 2);
	call(&r, EXL3_OP_LINEAR, 3);
	slot(&r, 3)->ready = 3;
	submit(&r);
	r.now = exl3_now_ns();
	exl3_dispatch_drain(r.d);
	turn(&r);
	expect_none(&r);
	ready(&r, 1); /* in time */
	assert_int_equal(device.nr, 1);
	r.now += EXL3_DRAIN_READY_NS / 2;
	turn(&r);
	assert_true(exl3_dispatch_busy(r.d));
	assert_int_equal(device.nr, 1);
	r.now = exl3_now_ns() + EXL3_DRAIN_READY_NS;
	turn(&r);
	expect(&r, 2, -ESHUTDOWN);
	assert_int_equal(device.nr, 2); /* the third one was ready, behind it */
	finish(&r, 0);
	finish(&r, 0);
	expect(&r, 1, 0);
	expect(&r, 3, 0);
	assert_false(exl3_dispatch_busy(r.d));
	rig_close(&r);
}

static void what_can_be_bound(void **state)
{
	struct exl3_error err;
	struct rig r;

	(void)state;
	rig_open(&r);
	assert_int_equal(exl3_channel_bind_stream(r.ch, &r.words_buf, &err), -EBUSY);
	assert_int_equal(r.words_buf.refs, 2);
	rig_close(&r);
	rig_open(&r);
	exl3_channel_close(r.ch);
	r.ch = NULL;
	rig_close(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(starts_when_ready),   test_case(words_of_refused_and_cancelled_calls),
		test_case(numbers_wrap),        test_case(late_ones_end),
		test_case(looks_less_and_less), test_case(slices_signal_once),
		test_case(what_can_be_bound),   test_case(rows_count_when_ready),
		test_case(a_lowered_limit),     test_case(the_next_for_rows_is_gone),
		test_case(a_drain_waits_a_moment),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
