/* SPDX-License-Identifier: Apache-2.0 */
/* inproc.c - what rpc_stream's calls take without a client: the backend in this process. */
#include "bench/rpc_stream/inproc.h"

#include "bench/bench.h"
#include "kernels/backend.h"
#include "kernels/format.h"

/* Microseconds per work; negative: errno. */
static double inproc(const struct exl3_backend_ops *ops, struct exl3_dev *dev, const struct exl3_work *work)
{
	enum { CALLS = 200, ROUNDS = 30, AHEAD = 8 };
	struct exl3_work works[AHEAD];
	struct exl3_done done[AHEAD];
	double us[ROUNDS];

	for (int r = -3; r < ROUNDS; r++) {
		uint64_t start = exl3_now_ns();
		int begun = 0, ended = 0;

		while (ended < CALLS) {
			int n;

			while (begun < CALLS && begun - ended < AHEAD) {
				works[begun % AHEAD] = *work;
				if (ops->submit(dev, &works[begun % AHEAD]) < 0)
					break;
				begun++;
			}
			n = ops->poll(dev, done, AHEAD);
			for (int i = 0; i < n; i++)
				if (done[i].result)
					return done[i].result;
			if (n < 0)
				return n;
			ended += n;
		}
		if (r >= 0)
			us[r] = (double)(exl3_now_ns() - start) / 1000 / CALLS;
	}
	return bench_median(us, ROUNDS);
}

int rpc_inproc(double us[2])
{
	const struct exl3_backend_ops *ops = exl3_backend_find("cuda");
	struct exl3_dev_options opt = {.numa_node = -1};
	struct exl3_error err = {0};
	struct exl3_dev *dev;
	struct exl3_slab *slab;
	struct exl3_arena *arena;
	uint64_t skipped[1];
	struct exl3_matrix m = {
		.k = RPC_SIZE, .n = RPC_SIZE, .k_log = RPC_SIZE, .n_log = RPC_SIZE, .rate2 = 8, .codebook = EXL3_CB_MCG};
	const struct exl3_matrix *shards[1] = {&m};
	struct exl3_rows rows = {.x_stride = 2 * RPC_SIZE, .y_stride = 4 * RPC_SIZE, .m = 1,
				 .x_dtype = EXL3_F16, .y_dtype = EXL3_F32, .x_device = true};
	struct exl3_work work = {.op = EXL3_OP_NOP, .rows = &rows, .nr_rows = 1, .skipped = skipped};
	static uint16_t ones[RPC_SIZE * RPC_SIZE];

	if (!ops || ops->open(&opt, &dev, &err) < 0) {
		fprintf(stderr, "inproc: %s\n", ops ? err.text : "no CUDA backend");
		return 1;
	}
	for (size_t i = 0; i < RPC_SIZE * RPC_SIZE; i++)
		ones[i] = 0x3c00;
	if (ops->slab_new(dev, 1 << 20, &slab, &err) < 0 ||
	    ops->slab_write(slab, 0, ones, sizeof(ones), &err) < 0 || ops->slab_sync(slab, &err) < 0 ||
	    ops->device_arena_new(dev, 1 << 20, &arena, &err) < 0) {
		fprintf(stderr, "inproc: %s\n", err.text);
		return 1;
	}
	m.suh = slab->ptr;
	m.svh = slab->ptr;
	m.trellis = (char *)slab->ptr + 4096;
	rows.x = arena->dev_ptr;
	rows.y = (char *)arena->dev_ptr + 65536;
	us[0] = inproc(ops, dev, &work);
	work.op = EXL3_OP_LINEAR;
	work.u.linear.shards = shards;
	work.u.linear.nr_shards = 1;
	us[1] = inproc(ops, dev, &work);
	ops->arena_free(arena);
	ops->slab_free(slab);
	ops->close(dev);
	return us[0] > 0 && us[1] > 0 ? 0 : 1;
}
