/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_cuda.cu - what a call costs in a recorded plan, over the same kernels in one process's graph.
 *
 *       plan_cuda [--quick] [--csv FILE]
 *
 * A step is 64 layers of 4 linear calls with one row, each between two small kernels of the client. Ways to run it:
 *
 *   mapped       client's and our kernels captured into one graph, by a track: what a client with mapped weights has,
 *                and what the others are compared with
 *   plan         two graphs; the client's has one kernel of one thread for each call that signals and waits
 *   plan-fused   two graphs; the client's own kernels wait and signal
 *
 * plan and plan-fused with both graphs in one process, and (MPS) in two; the words of the calls in host memory or in the
 * GPU's. Models: "27b", shapes of a dense model of that size in 4 bits (weights of 4 layers, which is more than the L2
 * holds), and "small", where the calls cost next to nothing.
 */
#include "tests/gpu/plan_rig.h"

#include "client/cuda/exl3_device.cuh"
#include "client/cuda/exl3_gpu.h"

#include "bench/bench.h"

#include <pthread.h>
#include <sys/mman.h>

#define LAYERS 64u
#define CALLS  (4 * LAYERS)
#define REAL   4u /* layers with weights of their own */
#define MIB    ((size_t)1 << 20)

struct shape {
	uint32_t k, n;
};
static const struct model {
	const char *name;
	struct shape call[4];
} models[] = {
	{"27b", {{5120, 7168}, {5120, 5120}, {5120, 34816}, {17408, 5120}}},
	{"small", {{1024, 1024}, {1024, 1024}, {1024, 2048}, {2048, 1024}}},
};

enum mode { MAPPED, PLAN, FUSED };
static const char *const mode_names[] = {"mapped", "plan", "plan-fused"};

/* What the client needs of the daemon's memory: offsets in the GPU's arena, and in the one in host memory. */
struct layout {
	size_t dev_bytes, host_bytes;
	struct {
		size_t x, y;
		uint32_t x_len, y_len;
	} call[CALLS];
	size_t words[2]; /* in host memory, in the GPU's */
};

struct words {
	uint32_t ready, pad0[15];
	uint32_t done;
	int32_t result;
	uint32_t pad1[14];
};

struct order {
	enum mode mode;
	bool dev_words;
	uint32_t epoch; /* of the last replay of this plan */
	int replays;
};

struct answer {
	double us; /* median of a step */
	int failed;
};

/* ---- the client ---- */

struct client {
	char *base[2]; /* device addresses: host memory, GPU memory */
	const struct layout *l;
};

static __device__ void small_work(uint16_t *x, uint32_t x_len, const uint16_t *y, uint32_t y_len)
{
	for (uint32_t i = threadIdx.x; i < x_len; i += blockDim.x)
		x[i] = (uint16_t)((y ? y[i < y_len ? i : i - y_len] : i * 40503u) & 0x87ff) | 0x3000;
}

__global__ static void client_kernel(uint16_t *x, uint32_t x_len, const uint16_t *y, uint32_t y_len)
{
	small_work(x, x_len, y, y_len);
}

/* Waits for the call before, works, signals the next. */
__global__ static void fused_kernel(const __grid_constant__ struct exl3_device_call before,
				    const __grid_constant__ struct exl3_device_call next, uint16_t *x, uint32_t x_len,
				    const uint16_t *y, uint32_t y_len)
{
	if (threadIdx.x == 0 && before.ready)
		exl3_device_wait(&before);
	__syncthreads();
	if (x)
		small_work(x, x_len, y, y_len);
	__syncthreads();
	if (threadIdx.x == 0 && next.ready)
		exl3_device_signal(&next);
}

static uint16_t *x_of(const struct client *c, uint32_t i)
{
	return (uint16_t *)(c->base[1] + c->l->call[i].x);
}

static const uint16_t *y_before(const struct client *c, uint32_t i)
{
	return i ? (const uint16_t *)(c->base[1] + c->l->call[i - 1].y) : NULL;
}

static uint32_t y_len(const struct client *c, uint32_t i)
{
	return i ? c->l->call[i - 1].y_len : 1;
}

static void enqueue_client(const struct client *c, uint32_t i, cudaStream_t stream)
{
	client_kernel<<<1, 256, 0, stream>>>(x_of(c, i), c->l->call[i].x_len, y_before(c, i), y_len(c, i));
}

static cudaGraphExec_t end_capture(cudaStream_t stream)
{
	cudaGraphExec_t exec;
	cudaGraph_t graph;

	RT(cudaStreamEndCapture(stream, &graph));
	RT(cudaGraphInstantiate(&exec, graph, 0));
	RT(cudaGraphDestroy(graph));
	RT(cudaGraphUpload(exec, stream));
	RT(cudaStreamSynchronize(stream));
	return exec;
}

/* Median time of a launch from call to end. */
static double time_steps(cudaGraphExec_t exec, cudaStream_t stream, int replays, int *failed, struct exl3_gpu *g)
{
	double *us = (double *)malloc(sizeof(*us) * (size_t)replays);
	double median;

	for (int t = -3; t < replays; t++) {
		const double begin = now_ms();

		RT(cudaGraphLaunch(exec, stream));
		RT(cudaStreamSynchronize(stream));
		if (t >= 0)
			us[t] = (now_ms() - begin) * 1e3;
		if (g && exl3_gpu_error(g, NULL))
			++*failed;
		/* The plan's host sees its end, and launches it again, meanwhile; a decoder has its sampling here. */
		usleep(200);
	}
	median = bench_median(us, (size_t)replays);
	free(us);
	return median;
}

static struct answer run_client(const struct client *c, const struct order *o)
{
	struct exl3_gpu_words *w = (struct exl3_gpu_words *)malloc(CALLS * sizeof(*w));
	struct exl3_device_call none = {}, call[2];
	struct answer a = {};
	struct exl3_gpu *g;
	cudaStream_t stream;

	for (uint32_t i = 0; i < CALLS; i++) {
		struct words *at = (struct words *)(c->base[o->dev_words] + c->l->words[o->dev_words]) + i;

		w[i] = {&at->ready, &at->done, NULL};
	}
	if (exl3_gpu_new(w, CALLS, 5000000000ull, &g) || exl3_gpu_set_epoch(g, o->epoch))
		die("exl3_gpu_new");
	RT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	RT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
	for (uint32_t i = 0; i < CALLS && o->mode == PLAN; i++) {
		enqueue_client(c, i, stream);
		if (exl3_gpu_enqueue(g, i, stream))
			die("exl3_gpu_enqueue");
	}
	for (uint32_t i = 0; i <= CALLS && o->mode == FUSED; i++) {
		call[0] = call[1] = none;
		if (i)
			exl3_gpu_call(g, i - 1, &call[0]);
		if (i < CALLS)
			exl3_gpu_call(g, i, &call[1]);
		fused_kernel<<<1, 256, 0, stream>>>(call[0], call[1], i < CALLS ? x_of(c, i) : NULL,
						    i < CALLS ? c->l->call[i].x_len : 0, y_before(c, i), y_len(c, i));
	}
	cudaGraphExec_t exec = end_capture(stream);

	a.us = time_steps(exec, stream, o->replays, &a.failed, g);
	RT(cudaGraphExecDestroy(exec));
	RT(cudaStreamDestroy(stream));
	exl3_gpu_free(g);
	free(w);
	return a;
}

/* In a process of its own: orders come by socket. */
struct pair {
	const char *dir; /* of MPS */
	int to_client, to_server;
	const struct model *model;
	int replays;
};

static int client_process(int sock, const void *arg)
{
	const struct pair *p = (const struct pair *)arg;
	static struct layout l;
	struct client c = {{NULL, NULL}, &l};
	CUmemGenericAllocationHandle h;
	struct order o;
	int fd[2] = {-1, -1}, nothing;

	(void)sock;
	mps_env(p->dir);
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
	const struct driver d = driver_open();

	RT(cudaFree(0));
	if (!recv_msg(p->to_server, &l, sizeof(l), &fd[0], 60000) ||
	    !recv_msg(p->to_server, &nothing, sizeof(nothing), &fd[1], 60000))
		die("client: no arenas");
	char *host = (char *)mmap(NULL, l.host_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd[0], 0);

	if (host == MAP_FAILED)
		die("client: mmap");
	RT(cudaHostRegister(host, l.host_bytes, cudaHostRegisterMapped));
	RT(cudaHostGetDevicePointer((void **)&c.base[0], host, 0));
	CU(d.memImport(&h, (void *)(uintptr_t)fd[1], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	c.base[1] = (char *)vmm_map(&d, h, l.dev_bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	while (recv_msg(p->to_server, &o, sizeof(o), NULL, 60000) && o.replays) {
		const struct answer a = run_client(&c, &o);

		send_msg(p->to_server, &a, sizeof(a), -1);
	}
	return 0;
}

/* ---- the daemon ---- */

struct server {
	struct rig r;
	struct exl3_slab *slab;
	struct exl3_arena *dev, *host;
	struct exl3_matrix w[4 * REAL];
	const struct exl3_matrix *shard[CALLS];
	struct exl3_rows rows[CALLS];
	struct exl3_work work[CALLS];
	struct layout l;
	struct client client;
};

static size_t matrix_bytes(const struct shape *s)
{
	return (exl3_trellis_bytes(s->k, s->n, 8) + 2ull * s->k + 2ull * s->n + 1023) / 256 * 256;
}

/* Any bits are weights; scales are small numbers. */
static void make_weights(struct server *s, const struct model *m)
{
	const size_t piece = 16 * MIB;
	uint16_t *random = (uint16_t *)malloc(piece), *scales = (uint16_t *)malloc(1 << 17);
	size_t bytes = 0, at = 0;
	struct exl3_error err;

	for (uint32_t i = 0; i < 4 * REAL; i++)
		bytes += matrix_bytes(&m->call[i % 4]);
	if (!random || !scales || s->r.ops->slab_new(s->r.dev, bytes, &s->slab, &err))
		die("weights: %s", err.text);
	for (size_t i = 0; i < piece / 2; i++)
		random[i] = (uint16_t)rig_random(&s->r);
	for (size_t i = 0; i < (1 << 16); i++)
		scales[i] = (uint16_t)(0x2c00 ^ (rig_random(&s->r) & 0x8000));
	for (uint32_t i = 0; i < 4 * REAL; i++) {
		const struct shape *sh = &m->call[i % 4];
		const size_t trellis = exl3_trellis_bytes(sh->k, sh->n, 8), su = at + trellis, sv = su + 2ull * sh->k;
		struct exl3_matrix *w = &s->w[i];

		w->k = w->k_log = sh->k;
		w->n = w->n_log = sh->n;
		w->rate2 = 8;
		w->codebook = EXL3_CB_MCG;
		w->trellis = (char *)s->slab->ptr + at;
		w->suh = (char *)s->slab->ptr + su;
		w->svh = (char *)s->slab->ptr + sv;
		for (size_t done = 0; done < trellis; done += piece)
			if (s->r.ops->slab_write(s->slab, at + done, random, trellis - done < piece ? trellis - done : piece, &err))
				die("weights: %s", err.text);
		if (s->r.ops->slab_write(s->slab, su, scales, 2ull * sh->k, &err) ||
		    s->r.ops->slab_write(s->slab, sv, scales, 2ull * sh->n, &err))
			die("weights: %s", err.text);
		at += matrix_bytes(sh);
	}
	if (s->r.ops->slab_sync(s->slab, &err))
		die("weights: %s", err.text);
	free(random);
	free(scales);
}

static void make_calls(struct server *s, const struct model *m)
{
	struct exl3_error err;
	size_t at = 0;

	for (uint32_t i = 0; i < CALLS; i++) {
		const struct shape *sh = &m->call[i % 4];

		s->l.call[i].x = at;
		s->l.call[i].y = at += (2ull * sh->k + 255) / 256 * 256;
		at += (2ull * sh->n + 255) / 256 * 256;
		s->l.call[i].x_len = sh->k;
		s->l.call[i].y_len = sh->n;
	}
	s->l.words[0] = 0;
	s->l.words[1] = at;
	if (s->r.ops->device_arena_new(s->r.dev, at + CALLS * sizeof(struct words), &s->dev, &err) ||
	    s->r.ops->arena_new(s->r.dev, CALLS * sizeof(struct words), &s->host, &err))
		die("arenas: %s", err.text);
	s->l.dev_bytes = s->dev->bytes;
	s->l.host_bytes = s->host->bytes;
	s->client.base[0] = (char *)s->host->dev_ptr;
	s->client.base[1] = (char *)s->dev->dev_ptr;
	s->client.l = &s->l;
	for (uint32_t i = 0; i < CALLS; i++) {
		struct exl3_rows *r = &s->rows[i];

		s->shard[i] = &s->w[(i / 4 % REAL) * 4 + i % 4];
		r->x = s->client.base[1] + s->l.call[i].x;
		r->y = s->client.base[1] + s->l.call[i].y;
		r->x_stride = s->l.call[i].x_len * 2;
		r->y_stride = s->l.call[i].y_len * 2;
		r->m = 1;
		r->x_dtype = r->y_dtype = EXL3_F16;
		r->x_device = true;
		s->work[i].op = EXL3_OP_LINEAR;
		s->work[i].rows = r;
		s->work[i].nr_rows = 1;
		s->work[i].u.linear.shards = &s->shard[i];
		s->work[i].u.linear.nr_shards = 1;
	}
}

static double run_mapped(struct server *s, int replays)
{
	struct exl3_track_options opt = {};
	struct exl3_track *track;
	struct exl3_error err;
	cudaStream_t stream;
	double us;

	if (s->r.ops->track_new(s->r.dev, &opt, &track, &err))
		die("track: %s", err.text);
	RT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	RT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
	for (uint32_t i = 0; i < CALLS; i++) {
		enqueue_client(&s->client, i, stream);
		if (s->r.ops->track_run(track, &s->work[i], stream))
			die("track_run");
	}
	cudaGraphExec_t exec = end_capture(stream);

	us = time_steps(exec, stream, replays, NULL, NULL);
	RT(cudaGraphExecDestroy(exec));
	RT(cudaStreamDestroy(stream));
	s->r.ops->track_free(track);
	return us;
}

/* The client of the same process, in a thread. */
struct runner {
	struct server *s;
	struct order o;
	struct answer a;
	uint32_t ended; /* atomic */
};

static void *run_here(void *arg)
{
	struct runner *r = (struct runner *)arg;

	cudaSetDevice(0);
	r->a = run_client(&r->s->client, &r->o);
	__atomic_store_n(&r->ended, 1, __ATOMIC_RELEASE);
	return NULL;
}

/* Keeps the plan launched and waiting, one epoch after the other, while the client replays its graph. */
static struct answer run_plan(struct server *s, enum mode mode, bool dev_words, int replays, const struct pair *other)
{
	struct exl3_dev_plan_call *calls = (struct exl3_dev_plan_call *)calloc(CALLS, sizeof(*calls));
	struct exl3_dev_plan_options opt = {};
	struct exl3_dev_plan *plan;
	struct runner here = {s, {mode, dev_words, 0, replays}, {}, 0};
	struct exl3_error err;
	struct answer a = {};
	pthread_t thread;
	uint32_t epoch = 1;
	bool ended = false;

	for (uint32_t i = 0; i < CALLS; i++) {
		struct words *w = (struct words *)(s->client.base[dev_words] + s->l.words[dev_words]) + i;

		calls[i].work = &s->work[i];
		calls[i].ready = &w->ready;
		calls[i].done = &w->done;
	}
	/* From 0 on again. */
	RT(cudaMemset(s->client.base[1] + s->l.words[1], 0, CALLS * sizeof(struct words)));
	memset(s->host->host_ptr, 0, CALLS * sizeof(struct words));
	RT(cudaDeviceSynchronize());
	opt.one_process = !other;
	if (s->r.ops->plan_new(s->r.dev, calls, CALLS, &opt, &plan, &err))
		die("plan_new: %s", err.text);
	if (s->r.ops->plan_submit(plan, epoch, 60000000000ull, s))
		die("plan_submit");
	if (other)
		send_msg(other->to_client, &here.o, sizeof(here.o), -1);
	else if (pthread_create(&thread, NULL, run_here, &here))
		die("thread");
	while (!ended) {
		struct exl3_done done;

		if (s->r.ops->poll(s->r.dev, &done, 1) == 1) {
			if (done.result)
				die("a replay ended with %d", done.result);
			if (s->r.ops->plan_submit(plan, ++epoch, 60000000000ull, s))
				die("plan_submit");
		}
		ended = other ? recv_msg(other->to_client, &a, sizeof(a), NULL, 0)
			      : __atomic_load_n(&here.ended, __ATOMIC_ACQUIRE) != 0;
	}
	if (!other) {
		pthread_join(thread, NULL);
		a = here.a;
	}
	s->r.ops->plan_abort(plan);
	if (rig_wait(&s->r, s, 5000) != -EAGAIN)
		die("the last one had begun");
	s->r.ops->plan_free(plan);
	free(calls);
	return a;
}

/* What a server process sends for each cell. */
struct cell {
	enum mode mode;
	bool dev_words;
	double us;
	int failed;
};

static int server_process(int sock, const void *arg)
{
	const struct pair *p = (const struct pair *)arg;
	const struct order stop = {};
	static struct server s;
	struct cell cell;
	int nothing = 0;

	if (p->dir)
		mps_env(p->dir);
	rig_open(&s.r, 4 * MIB);
	make_weights(&s, p->model);
	make_calls(&s, p->model);
	if (p->dir && (!send_msg(p->to_client, &s.l, sizeof(s.l), s.host->fd) ||
		       !send_msg(p->to_client, &nothing, sizeof(nothing), s.dev->fd)))
		die("cannot send arenas");
	cell = {MAPPED, true, run_mapped(&s, p->replays), 0};
	send_msg(sock, &cell, sizeof(cell), -1);
	for (const enum mode mode : {PLAN, FUSED})
		for (const bool dev_words : {false, true}) {
			const struct answer a = run_plan(&s, mode, dev_words, p->replays, p->dir ? p : NULL);

			cell = {mode, dev_words, a.us, a.failed};
			send_msg(sock, &cell, sizeof(cell), -1);
		}
	if (p->dir)
		send_msg(p->to_client, &stop, sizeof(stop), -1);
	return 0;
}

/* ---- */

static struct bench_file g_csv;
static bool g_to_file;

/* All cells of one model with both graphs in one process (@dir NULL) or in two under MPS. */
static int measure(const struct model *m, const char *dir, int replays)
{
	int sv[2] = {-1, -1}, status = 0;
	struct cell cell;
	double mapped = 0;

	if (dir && socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sv) < 0)
		die("socketpair");
	const struct pair p = {dir, sv[0], sv[1], m, replays};
	struct child s = start(server_process, &p, 120), c = {};

	if (dir)
		c = start(client_process, &p, 120);
	while (recv_msg(s.fd, &cell, sizeof(cell), NULL, 60000)) {
		char row[256];

		if (cell.mode == MAPPED)
			mapped = cell.us;
		snprintf(row, sizeof(row), "%s,%s,%d,%d,%s,%u,%.1f,%.3f,%.3f,%.4f", m->name, mode_names[cell.mode], dir ? 2 : 1,
			 dir != NULL, cell.mode == MAPPED ? "" : cell.dev_words ? "device" : "host", CALLS, cell.us,
			 cell.us / CALLS, (cell.us - mapped) / CALLS, cell.us / mapped);
		printf("%s%s\n", row, cell.failed ? "  FAILED" : "");
		fflush(stdout);
		status |= cell.failed != 0;
		if (g_to_file && !cell.failed)
			bench_row(&g_csv, "%s", row);
	}
	if (dir)
		status |= finish(&c, 10000);
	return status | finish(&s, 10000);
}

int main(int argc, char **argv)
{
	const char *columns = "model,mode,processes,mps,words,calls,step_us,us_per_call,added_us,ratio", *csv = NULL;
	int replays = 100, status = 0;
	char gpu[128];
	struct mps m;

	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], "--quick"))
			replays = 20;
		else if (!strcmp(argv[i], "--csv") && i + 1 < argc)
			csv = argv[++i];
	skip_without_gpu("plan_cuda");
	bench_ask("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader", gpu, sizeof(gpu));
	if (csv)
		g_csv = bench_open(csv, argc, argv, gpu, "each model's mapped step, which the others are compared with", columns);
	g_to_file = csv != NULL;
	printf("%s\n", columns);
	for (const auto &model : models)
		status |= measure(&model, NULL, replays);
	if (system("command -v nvidia-cuda-mps-control >/dev/null 2>&1") == 0 && mps_start(&m, true)) {
		for (const auto &model : models)
			status |= measure(&model, m.dir, replays);
		mps_stop(&m);
	}
	if (csv)
		bench_close(&g_csv);
	return status != 0;
}
