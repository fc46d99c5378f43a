/* SPDX-License-Identifier: Apache-2.0 */
/* test_dispatch.c - requests through real rings to devices that finish when the test says so. */
#include "tests/test.h"

#include "daemon/dispatch.h"
#include "daemon/tenant.h"

#include <fcntl.h>

/* ---- devices on strings ---- */

struct exl3_dev {
	const struct exl3_work *running[64]; /* submitted, in order */
	unsigned nr;
	struct exl3_done done[64];
	unsigned nr_done;
	int submit_code;  /* what submit() returns, if not 0 */
	uint64_t slow_ns; /* time per row; 0: 5 ns in all */
	uint32_t class_rows; /* deterministic requests of so many rows at most may meet; 0: none */
	bool lost;
};
static struct exl3_dev device, second;

static int dev_submit(struct exl3_dev *dev, const struct exl3_work *work)
{
	if (dev->submit_code)
		return dev->submit_code;
	assert_true(dev->nr < TEST_NR(dev->running));
	dev->running[dev->nr++] = work;
	return 0;
}

static int dev_poll(struct exl3_dev *dev, struct exl3_done *done, unsigned max)
{
	unsigned n = dev->nr_done < max ? dev->nr_done : max;

	if (dev->lost)
		return -EIO;
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

static uint32_t dev_merge_class(const struct exl3_dev *dev, const struct exl3_work *work)
{
	assert_int_equal(work->nr_rows, 1);
	assert_true(work->deterministic);
	return work->rows[0].m <= dev->class_rows;
}

static const struct exl3_kernel dev_kernels[] = {{.name = "only", .op = EXL3_OP_LINEAR}, {0}};
static const struct exl3_backend_ops dev_ops = {.name = "strings",
						.merge_class = dev_merge_class,
						.submit = dev_submit,
						.poll = dev_poll,
						.event_fd = dev_event_fd,
						.wake_arm = dev_wake_arm,
						.kernels = dev_kernels};

/* The oldest running work of a device ends. */
static void dev_finish_on(struct exl3_dev *dev, int result)
{
	uint64_t ns = dev->slow_ns ? dev->slow_ns * dev->running[0]->rows[0].m : 5;

	assert_true(dev->nr > 0);
	dev->done[dev->nr_done++] =
		(struct exl3_done){.tag = dev->running[0]->tag, .result = result, .exec_ns = ns};
	memmove(dev->running, dev->running + 1, --dev->nr * sizeof(dev->running[0]));
}

static void dev_finish(int result)
{
	dev_finish_on(&device, result);
}

/* ---- one client with two channels ---- */

struct rig {
	struct exl3_loop *loop;
	struct exl3_dispatch *d;
	struct exl3_channel *ch[2];
	struct exl3_segment *seg[2];
	struct exl3_ring_client ring[2];
	int notify[2], kick[2];
	struct exl3_counters counters;
	struct exl3_buffer buf;
	bool buf_freed;
	struct exl3_registered model;
	struct exl3_module_desc desc;
	struct exl3_module_desc layers[8]; /* handles 20 to 27 */
	struct exl3_mla_geometry mla[3];   /* handles 10, 11, 12: the first two are equal */
	bool gone;                         /* the module's handle was closed */
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

	if (handle >= 10 && handle < 13) {
		*ret = (struct exl3_target){.mla = &r->mla[handle - 10]};
		return 0;
	}
	if (handle >= 20 && handle < 28) {
		*ret = (struct exl3_target){.desc = &r->layers[handle - 20], .model = &r->model};
		return 0;
	}
	/* 8 is the same module, as if it were of a model on the second device. */
	*ret = (struct exl3_target){.desc = &r->desc, .model = &r->model, .device = handle == 8};
	return (handle == 7 || handle == 8) && !r->gone ? 0 : -ENOENT;
}

static void rig_buffer_free(void *arg, struct exl3_buffer *buf)
{
	struct rig *r = arg;

	assert_ptr_equal(buf, &r->buf);
	r->buf_freed = true;
}

static void rig_open(struct rig *r, uint32_t depth, uint32_t merge)
{
	struct exl3_dispatch_options opt = {
		.buffer_free = rig_buffer_free, .arg = r, .queue_depth = depth, .merge_max = merge};
	struct exl3_error err;

	memset(r, 0, sizeof(*r));
	memset(&device, 0, sizeof(device));
	memset(&second, 0, sizeof(second));
	r->buf = (struct exl3_buffer){
		.base = {(char *)0x10000, (char *)0x20000}, .bytes = 1 << 20, .refs = 1};
	r->model.state = EXL3_MODEL_READY;
	r->desc = (struct exl3_module_desc){
		.kind = EXL3_MOD_LINEAR, .k = 128, .n = 128, .k_log = 128, .n_log = 128};
	for (unsigned i = 0; i < 8; i++)
		r->layers[i] = r->desc;
	for (unsigned i = 0; i < 3; i++)
		r->mla[i] = (struct exl3_mla_geometry){.heads = 1,
						       .dim = 16,
						       .value_dim = 16,
						       .topk = i == 2 ? 2 : 1,
						       .slots = 4,
						       .cache_stride = 32,
						       .indices_stride = i == 2 ? 8 : 4,
						       .cache_dtype = EXL3_F16,
						       .indices_dtype = EXL3_I32,
						       .page_rows = 1,
						       .table_queries = 1};
	r->now = exl3_now_ns() + 1000000000000; /* later than what the daemon's own clock says */
	test_code(exl3_loop_new(&r->loop, &err), 0, &err);
	opt.loop = r->loop;
	test_code(exl3_dispatch_new(&opt, &r->d, &err), 0, &err);
	test_code(exl3_dispatch_add_device(r->d, &dev_ops, &device, true, &err), 0, &err);
	test_code(exl3_dispatch_add_device(r->d, &dev_ops, &second, true, &err), 0, &err);
	for (unsigned i = 0; i < 2; i++) {
		struct exl3_channel_options co = {.entries = 8,
						  .channel = i + 1,
						  .counters = &r->counters,
						  .buffer = rig_buffer,
						  .target = rig_target,
						  .arg = r,
						  .who = "test"};
		int fds[3], fd;

		test_code(exl3_channel_open(r->d, &co, &r->ch[i], fds, &err), 0, &err);
		fd = fcntl(fds[0], F_DUPFD_CLOEXEC, 0);
		assert_true(fd >= 0);
		test_code(exl3_segment_map(fd, exl3_channel_bytes(r->ch[i]), &r->seg[i], &err), 0,
			  &err);
		test_code(exl3_ring_attach(r->seg[i], &r->ring[i], &err), 0, &err);
		r->notify[i] = fds[2];
		r->kick[i] = fcntl(fds[1], F_DUPFD_CLOEXEC, 0);
	}
}

static void turn(struct rig *r)
{
	exl3_loop_poll(r->loop, r->now);
	while (exl3_dispatch_turn(r->d, r->now))
		;
}

static void rig_close(struct rig *r)
{
	for (unsigned i = 0; i < 2; i++)
		r->ch[i] = exl3_channel_close(r->ch[i]);
	while (device.nr)
		dev_finish(0);
	while (second.nr)
		dev_finish_on(&second, 0);
	turn(r);
	assert_false(exl3_dispatch_busy(r->d));
	assert_int_equal(exl3_dispatch_channels(r->d), 0);
	assert_int_equal(r->model.inflight, 0);
	assert_int_equal(r->buf.refs, r->buf_freed ? 0 : 1);
	r->d = exl3_dispatch_free(r->d);
	for (unsigned i = 0; i < 2; i++) {
		exl3_segment_free(r->seg[i]);
		exl3_closep(&r->notify[i]);
		exl3_closep(&r->kick[i]);
	}
	exl3_loop_free(r->loop);
}

static struct exl3_sqe *get(struct rig *r, unsigned ch, uint8_t op, uint64_t user_data)
{
	struct exl3_sqe *sqe = NULL;

	assert_int_equal(exl3_ring_get(&r->ring[ch], &sqe), 0);
	sqe->op = op;
	sqe->user_data = user_data;
	if (op == EXL3_OP_LINEAR) {
		sqe->x_dtype = sqe->y_dtype = EXL3_F32;
		sqe->module = 7;
		sqe->rows = 2;
		sqe->x = EXL3_REF(1, 0);
		sqe->y = EXL3_REF(1, 65536);
	}
	return sqe;
}

static void submit(struct rig *r, unsigned ch)
{
	const uint64_t one = 1;

	if (exl3_ring_publish(&r->ring[ch]))
		assert_int_equal(write(r->kick[ch], &one, sizeof(one)), sizeof(one));
	turn(r);
}

static void linear(struct rig *r, unsigned ch, uint64_t user_data)
{
	get(r, ch, EXL3_OP_LINEAR, user_data);
	submit(r, ch);
}

static void linear_on_second(struct rig *r, unsigned ch, uint64_t user_data)
{
	get(r, ch, EXL3_OP_LINEAR, user_data)->module = 8;
	submit(r, ch);
}

/* The next completion of the channel. */
static struct exl3_cqe expect(struct rig *r, unsigned ch, uint64_t user_data, int result)
{
	struct exl3_cqe cqe = {0};

	assert_int_equal(exl3_ring_take(&r->ring[ch], &cqe), 1);
	if (cqe.user_data != user_data || cqe.result != result)
		fail_msg("completion %llu with %d, wanted %llu with %d",
			 (unsigned long long)cqe.user_data, cqe.result,
			 (unsigned long long)user_data, result);
	return cqe;
}

static void expect_none(struct rig *r, unsigned ch)
{
	struct exl3_cqe cqe;

	assert_int_equal(exl3_ring_take(&r->ring[ch], &cqe), 0);
}

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
		test_case(long_requests_run_in_slices),
		test_case(a_long_request_ends_between_slices),
		test_case(kicks_without_work),
		test_case(requests_beyond_a_rate_wait),
		test_case(rows_beyond_a_limit_wait),
		test_case(the_end_of_waiting),
		test_case(tenants_random_walk),
		test_case(credit_is_enough_for_every_completion),
		test_case(order_holds_across_devices),
		test_case(held_requests_end_too),
		test_case(one_of_two_devices_is_lost),
		test_case(a_launch_that_never_ends),
		test_case(a_large_launch_has_its_time),
		test_case(a_buffer_of_the_other_device),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
