/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch_rig.h - for tests of the dispatcher: devices on strings, and a client with two channels. */
#ifndef EXL3_TESTS_DISPATCH_RIG_H
#define EXL3_TESTS_DISPATCH_RIG_H

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

static inline int dev_submit(struct exl3_dev *dev, const struct exl3_work *work)
{
	if (dev->submit_code)
		return dev->submit_code;
	assert_true(dev->nr < TEST_NR(dev->running));
	dev->running[dev->nr++] = work;
	return 0;
}

static inline int dev_poll(struct exl3_dev *dev, struct exl3_done *done, unsigned max)
{
	unsigned n = dev->nr_done < max ? dev->nr_done : max;

	if (dev->lost)
		return -EIO;
	memcpy(done, dev->done, n * sizeof(done[0]));
	memmove(dev->done, dev->done + n, (dev->nr_done - n) * sizeof(done[0]));
	dev->nr_done -= n;
	return (int)n;
}

static inline int dev_event_fd(struct exl3_dev *dev)
{
	(void)dev;
	return -1;
}

static inline bool dev_wake_arm(struct exl3_dev *dev)
{
	return dev->nr_done == 0;
}

static inline uint32_t dev_merge_class(const struct exl3_dev *dev, const struct exl3_work *work)
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
static inline void dev_finish_on(struct exl3_dev *dev, int result)
{
	uint64_t ns = dev->slow_ns ? dev->slow_ns * dev->running[0]->rows[0].m : 5;

	assert_true(dev->nr > 0);
	dev->done[dev->nr_done++] =
		(struct exl3_done){.tag = dev->running[0]->tag, .result = result, .exec_ns = ns};
	memmove(dev->running, dev->running + 1, --dev->nr * sizeof(dev->running[0]));
}

static inline void dev_finish(int result)
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
	struct exl3_recorded *plans[4];    /* handles 30 to 33 */
	uint64_t now;
};

static inline struct exl3_buffer *rig_buffer(void *arg, uint32_t id)
{
	struct rig *r = arg;

	return id == 1 ? &r->buf : NULL;
}

static inline int rig_target(void *arg, uint32_t handle, struct exl3_target *ret)
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

static inline struct exl3_recorded *rig_plan(void *arg, uint32_t handle)
{
	struct rig *r = arg;

	return handle >= 30 && handle < 34 ? r->plans[handle - 30] : NULL;
}

static inline void rig_buffer_free(void *arg, struct exl3_buffer *buf)
{
	struct rig *r = arg;

	assert_ptr_equal(buf, &r->buf);
	r->buf_freed = true;
}

static inline void rig_open(struct rig *r, uint32_t depth, uint32_t merge)
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
	r->model.refs = 1;
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
						  .plan = rig_plan,
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

static inline void turn(struct rig *r)
{
	exl3_loop_poll(r->loop, r->now);
	while (exl3_dispatch_turn(r->d, r->now))
		;
}

static inline void rig_close(struct rig *r)
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

static inline struct exl3_sqe *get(struct rig *r, unsigned ch, uint8_t op, uint64_t user_data)
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

static inline void submit(struct rig *r, unsigned ch)
{
	const uint64_t one = 1;

	if (exl3_ring_publish(&r->ring[ch]))
		assert_int_equal(write(r->kick[ch], &one, sizeof(one)), sizeof(one));
	turn(r);
}

static inline void linear(struct rig *r, unsigned ch, uint64_t user_data)
{
	get(r, ch, EXL3_OP_LINEAR, user_data);
	submit(r, ch);
}

static inline void linear_on_second(struct rig *r, unsigned ch, uint64_t user_data)
{
	get(r, ch, EXL3_OP_LINEAR, user_data)->module = 8;
	submit(r, ch);
}

/* The next completion of the channel. */
static inline struct exl3_cqe expect(struct rig *r, unsigned ch, uint64_t user_data, int result)
{
	struct exl3_cqe cqe = {0};

	assert_int_equal(exl3_ring_take(&r->ring[ch], &cqe), 1);
	if (cqe.user_data != user_data || cqe.result != result)
		fail_msg("completion %llu with %d, wanted %llu with %d",
			 (unsigned long long)cqe.user_data, cqe.result,
			 (unsigned long long)user_data, result);
	return cqe;
}

static inline void expect_none(struct rig *r, unsigned ch)
{
	struct exl3_cqe cqe;

	assert_int_equal(exl3_ring_take(&r->ring[ch], &cqe), 0);
}

#endif
