/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eager.cu - with eager loading, set by the process itself before its first CUDA call, the first launch of a
 * kernel does not wait for a kernel that runs; and so it is for the CUDA backend's kernels.
 *
 *       eager [exl3-cuda.so]       the plugin; else it is looked for in $EXL3_BACKEND_DIR
 */
#include "facts.h"

#include "kernels/backend.h"

static const char *plugin;
static volatile uint32_t *flag;
static uint32_t turn;
static cudaStream_t waiting;

__global__ static void never_launched_before(uint32_t *p)
{
	*p = 7;
}

static void make_flag(void)
{
	RT(cudaHostAlloc((void **)&flag, 64, cudaHostAllocMapped));
	*flag = 0;
	RT(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
	wait_flag<<<1, 1, 0, waiting>>>((const volatile uint32_t *)flag, 0, 1);
	RT(cudaStreamSynchronize(waiting));
}

/* A kernel that waits for at most 400 ms from now on. */
static void begin_waiting(void)
{
	turn++;
	wait_flag<<<1, 1, 0, waiting>>>((const volatile uint32_t *)flag, turn, 400);
	RT(cudaGetLastError());
	sleep_ms(5);
}

static void end_waiting(void)
{
	*flag = turn;
	RT(cudaStreamSynchronize(waiting));
}

/* Ms until a kernel that was never launched is done beside one that waits. */
static double first_launch(void)
{
	cudaStream_t other;
	uint32_t *word;

	make_flag();
	RT(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
	RT(cudaMalloc((void **)&word, 4));
	begin_waiting();
	const double t = now_ms();

	never_launched_before<<<1, 1, 0, other>>>(word);
	RT(cudaStreamSynchronize(other));
	const double took = now_ms() - t;

	end_waiting();
	return took;
}

static int lazy(int sock, const void *arg)
{
	(void)sock;
	(void)arg;
	setenv("CUDA_MODULE_LOADING", "LAZY", 1);
	const double ms = first_launch();

	fact("eager_lazy", "a first launch waits if kernels are loaded lazily", ms > 200, "%.1f ms", ms);
	return facts_failed;
}

static int eager(int sock, const void *arg)
{
	(void)sock;
	(void)arg;
	setenv("CUDA_MODULE_LOADING", "EAGER", 1); /* nothing has called CUDA in this process */
	const double ms = first_launch();

	fact("eager_eager", "set by the process itself, EAGER makes it not wait", ms < 200, "%.1f ms", ms);
	return facts_failed;
}

/* ---- the backend ---- */

struct rig {
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev;
	struct exl3_slab *slab;
	struct exl3_arena *arena;
};

static struct exl3_matrix matrix(const struct rig *r, uint32_t k, uint32_t n, int rate2, int codebook)
{
	struct exl3_matrix w = {};

	w.k = w.k_log = k;
	w.n = w.n_log = n;
	w.rate2 = (uint8_t)rate2;
	w.codebook = (uint8_t)codebook;
	w.trellis = w.suh = w.svh = r->slab->ptr; /* zeros will do */
	return w;
}

/* Ms from submit to done, beside a kernel that waits. */
static double run_beside(struct rig *r, struct exl3_work *work)
{
	struct exl3_done done;
	uint64_t skipped[1];
	int n;

	work->skipped = skipped;
	begin_waiting();
	const double t = now_ms();

	if (r->ops->submit(r->dev, work))
		die("submit");
	while ((n = r->ops->poll(r->dev, &done, 1)) == 0 && now_ms() - t < 5000)
		;
	const double took = now_ms() - t;

	end_waiting();
	if (n != 1 || done.result)
		die("the work ended with %d", n == 1 ? done.result : n);
	return took;
}

static void say(const char *name, double ms)
{
	fact(name, "the backend's first launch does not wait", ms < 200, "%.1f ms", ms);
}

static int backend(int sock, const void *arg)
{
	struct exl3_dev_options opt = {};
	struct exl3_error err;
	struct exl3_rows rows = {};
	struct exl3_work work = {};
	struct rig r = {};
	void *so = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);

	(void)sock;
	(void)arg;
	if (!so)
		die("%s", dlerror());
	r.ops = (const struct exl3_backend_ops *)dlsym(so, "exl3_backend_cuda");
	const uint32_t *abi = (const uint32_t *)dlsym(so, "exl3_backend_cuda_abi");

	if (!r.ops || !abi || *abi != EXL3_BACKEND_ABI)
		die("%s is of another version", plugin);
	opt.numa_node = -1;
	const double t = now_ms();

	if (r.ops->open(&opt, &r.dev, &err))
		die("open: %s", err.text);
	const double opened = now_ms() - t;

	make_flag();
	if (r.ops->slab_new(r.dev, 8u << 20, &r.slab, &err) || r.ops->arena_new(r.dev, 8u << 20, &r.arena, &err))
		die("memory: %s", err.text);

	const struct exl3_matrix mcg = matrix(&r, 512, 512, 8, 1), mul1 = matrix(&r, 512, 512, 6, 2);
	const struct exl3_matrix *shard[1] = {&mcg};
	const struct exl3_expert expert = {&mul1, &mul1, &mul1};

	rows.x = r.arena->dev_ptr;
	rows.y = (char *)r.arena->dev_ptr + (4u << 20);
	rows.x_stride = rows.y_stride = 1024;
	rows.x_dtype = rows.y_dtype = EXL3_F16;
	rows.m = 1;
	work.op = EXL3_OP_LINEAR;
	work.rows = &rows;
	work.nr_rows = 1;
	work.u.linear.shards = shard;
	work.u.linear.nr_shards = 1;
	say("eager_linear_1", run_beside(&r, &work));
	rows.m = 300;
	say("eager_linear_300", run_beside(&r, &work));
	rows.m = 7;
	work.op = EXL3_OP_MLP;
	work.u.moe = {};
	work.u.moe.experts = &expert;
	work.u.moe.nr_experts = 1;
	work.u.moe.act = EXL3_ACT_SILU;
	work.u.moe.routed_scale = 1;
	say("eager_mlp_7", run_beside(&r, &work));

	struct exl3_dev_info info;

	memset(&info, 0, sizeof(info));
	r.ops->info(r.dev, &info);
	printf("%-22s | opening took %.0f ms; %.0f MiB of the GPU in use (workspace %.0f)\n", "eager_price", opened,
	       (double)(info.memory_total - info.memory_free) / 1048576.0,
	       (double)info.workspace_bytes / 1048576.0);
	fflush(stdout);
	return facts_failed;
}

int main(int argc, char **argv)
{
	int (*const parts[])(int, const void *) = {lazy, eager, backend};
	const char *dir = getenv("EXL3_BACKEND_DIR");
	static char path[4096];
	int worst = 0;

	skip_without_gpu("eager");
	if (argc > 1)
		snprintf(path, sizeof(path), "%s", argv[1]);
	else if (dir)
		snprintf(path, sizeof(path), "%s/exl3-cuda.so", dir);
	plugin = path;
	for (int i = 0; i < 3; i++) {
		if (i == 2 && (!*path || access(path, R_OK))) {
			printf("%-22s | the backend is not checked: no exl3-cuda.so\n", "eager");
			break;
		}
		struct child c = start(parts[i], NULL, 30);
		const int status = finish(&c, 30000);

		if (status != 0 && status != 1)
			die("eager: part %d ended with %d", i, status);
		worst = status > worst ? status : worst;
	}
	return worst;
}
