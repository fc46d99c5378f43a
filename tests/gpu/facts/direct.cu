/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.cu - a call from one process's stream to another's, where the server's host looks for the request:
 * what the ways to signal cost, one call at a time and eight at once.
 *
 * The client's stream writes *ready* and waits for *done*; the server's host polls *ready*, launches an
 * empty kernel, and its stream (or that kernel) writes *done* and a word by which its own host knows.
 */
#include "mps.h"

#include <sys/mman.h>

#define STREAMS 8

enum server_way { KERNEL_2_WRITES, KERNEL_BATCH, KERNEL_WRITES, SERVER_WAYS };
enum client_way { TWO_CALLS, BATCH, KERNEL_THEN_WAIT, CLIENT_WAYS };

struct line {
	volatile uint32_t v;
	uint32_t pad[15];
};

struct words {
	struct line ready[STREAMS], done[STREAMS], own, hold;
	struct line client_up, server_up;
	cudaIpcMemHandle_t mem;
	double us;
};

struct job {
	struct words *w;
	const char *dir;
	enum server_way server;
	enum client_way client;
	bool device; /* done words in the server's device memory */
	uint32_t streams, rounds;
};

typedef CUresult (*batch_fn)(CUstream, unsigned int, CUstreamBatchMemOpParams *, unsigned int);

__global__ static void signal_words(volatile uint32_t *a, uint32_t av, volatile uint32_t *b, uint32_t bv)
{
	__threadfence_system();
	*a = av;
	if (b)
		*b = bv;
}

static void spin(const volatile uint32_t *p, uint32_t v)
{
	const double end = now_ms() + 6000;

	while ((int32_t)(*p - v) < 0)
		if (now_ms() > end)
			die("direct: no answer in 6 s");
}

static CUstreamBatchMemOpParams op(bool wait, CUdeviceptr at, uint32_t v)
{
	CUstreamBatchMemOpParams p;

	memset(&p, 0, sizeof(p));
	p.operation = wait ? CU_STREAM_MEM_OP_WAIT_VALUE_32 : CU_STREAM_MEM_OP_WRITE_VALUE_32;
	if (wait) {
		p.waitValue.address = at;
		p.waitValue.value = v;
		p.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
	} else {
		p.writeValue.address = at;
		p.writeValue.value = v;
	}
	return p;
}

static int server(int sock, const void *arg)
{
	const struct job *j = (const struct job *)arg;
	struct words *w = j->w;
	uint32_t next[STREAMS], left = j->rounds * j->streams, seq = 0;
	CUdeviceptr done[STREAMS];
	cudaStream_t st;
	char *dev;

	(void)sock;
	if (j->dir)
		mps_env(j->dir);
	const struct driver d = driver_open();
	const batch_fn batch = (batch_fn)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamBatchMemOp_v2");

	RT(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
	RT(cudaHostRegister(w, sizeof(*w), cudaHostRegisterMapped));
	RT(cudaMalloc((void **)&dev, 4096));
	RT(cudaMemset(dev, 0, 4096));
	nothing<<<1, 1, 0, st>>>();
	signal_words<<<1, 1, 0, st>>>(&w->own.v, 0, NULL, 0);
	RT(cudaDeviceSynchronize());
	RT(cudaIpcGetMemHandle(&w->mem, dev));
	for (uint32_t i = 0; i < j->streams; i++) {
		next[i] = 1;
		done[i] = j->device ? (CUdeviceptr)dev + i * 64 : (CUdeviceptr)&w->done[i].v;
	}
	__atomic_store_n(&w->server_up.v, 1, __ATOMIC_RELEASE);
	const double end = now_ms() + 8000;

	while (left) {
		for (uint32_t i = 0; i < j->streams; i++) {
			if (next[i] > j->rounds || (int32_t)(w->ready[i].v - next[i]) < 0)
				continue;
			seq++;
			left--;
			if (j->server == KERNEL_WRITES) {
				signal_words<<<1, 1, 0, st>>>((volatile uint32_t *)done[i], next[i]++, &w->own.v, seq);
				continue;
			}
			nothing<<<1, 1, 0, st>>>();
			if (j->server == KERNEL_2_WRITES) {
				CU(d.streamWrite32(st, done[i], next[i]++, 0));
				CU(d.streamWrite32(st, (CUdeviceptr)&w->own.v, seq, 0));
			} else {
				CUstreamBatchMemOpParams ops[2] = {op(false, done[i], next[i]++),
								   op(false, (CUdeviceptr)&w->own.v, seq)};

				CU(batch(st, 2, ops, 0));
			}
		}
		if (left && now_ms() > end)
			die("direct: server: no request in time");
	}
	RT(cudaStreamSynchronize(st));
	spin(&w->client_up.v, 2);
	return 0;
}

static int client(int sock, const void *arg)
{
	const struct job *j = (const struct job *)arg;
	struct words *w = j->w;
	cudaStream_t st[STREAMS];
	void *dev;

	(void)sock;
	if (j->dir)
		mps_env(j->dir);
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
	const struct driver d = driver_open();
	const batch_fn batch = (batch_fn)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamBatchMemOp_v2");

	for (uint32_t i = 0; i < j->streams; i++)
		RT(cudaStreamCreateWithFlags(&st[i], cudaStreamNonBlocking));
	RT(cudaHostRegister(w, sizeof(*w), cudaHostRegisterMapped));
	nothing<<<1, 1, 0, st[0]>>>();
	signal_words<<<1, 1, 0, st[0]>>>(&w->ready[0].v, 0, NULL, 0);
	RT(cudaDeviceSynchronize());
	spin(&w->server_up.v, 1);
	RT(cudaIpcOpenMemHandle(&dev, w->mem, cudaIpcMemLazyEnablePeerAccess));
	for (uint32_t i = 0; i < j->streams; i++)
		CU(d.streamWait32(st[i], (CUdeviceptr)&w->hold.v, 1, CU_STREAM_WAIT_VALUE_GEQ));
	for (uint32_t r = 1; r <= j->rounds; r++)
		for (uint32_t i = 0; i < j->streams; i++) {
			const CUdeviceptr ready = (CUdeviceptr)&w->ready[i].v;
			const CUdeviceptr done = j->device ? (CUdeviceptr)dev + i * 64 : (CUdeviceptr)&w->done[i].v;

			if (j->client == KERNEL_THEN_WAIT) {
				signal_words<<<1, 1, 0, st[i]>>>(&w->ready[i].v, r, NULL, 0);
				CU(d.streamWait32(st[i], done, r, CU_STREAM_WAIT_VALUE_GEQ));
			} else if (j->client == TWO_CALLS) {
				CU(d.streamWrite32(st[i], ready, r, 0));
				CU(d.streamWait32(st[i], done, r, CU_STREAM_WAIT_VALUE_GEQ));
			} else {
				CUstreamBatchMemOpParams ops[2] = {op(false, ready, r), op(true, done, r)};

				CU(batch(st[i], 2, ops, 0));
			}
		}
	const double t = now_ms();

	__atomic_store_n(&w->hold.v, 1, __ATOMIC_RELEASE);
	RT(cudaDeviceSynchronize());
	w->us = (now_ms() - t) * 1e3 / (j->rounds * j->streams);
	RT(cudaIpcCloseMemHandle(dev));
	__atomic_store_n(&w->client_up.v, 2, __ATOMIC_RELEASE);
	return 0;
}

/* Microseconds per call; -1: failed. */
static double measure(struct job j)
{
	struct words *w = (struct words *)mmap(NULL, sizeof(*w), PROT_READ | PROT_WRITE,
					       MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (w == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	j.w = w;
	struct child s = start(server, &j, 12), c = start(client, &j, 12);
	const int rc = finish(&c, 10000), rs = finish(&s, 2000);
	const double us = rc == 0 && rs == 0 ? w->us : -1;

	munmap(w, sizeof(*w));
	return us;
}

int main(int argc, char **argv)
{
	static const char *const server_names[] = {"kernel and two writes", "kernel and a batch of two writes",
						   "the kernel writes both"};
	static const char *const client_names[] = {"write, wait", "batch of write and wait", "kernel writes, wait"};
	const bool all = argc > 1 && !strcmp(argv[1], "all");
	struct mps m;
	double best = 1e9, best8 = 1e9, alone;

	skip_without_mps("direct");
	const bool up = mps_start(&m, true);

	for (int s = 0; up && s < SERVER_WAYS; s++)
		for (int c = 0; c < CLIENT_WAYS; c++)
			for (int dev = 0; dev < 2; dev++) {
				if (dev && (c != BATCH || s == KERNEL_2_WRITES))
					continue;
				if (!all && (dev || c == KERNEL_THEN_WAIT || s == KERNEL_2_WRITES))
					continue;
				const struct job one = {NULL, m.dir, (enum server_way)s, (enum client_way)c, dev != 0, 1, 200};
				struct job eight = one;

				eight.streams = STREAMS;
				eight.rounds = 60;
				const double us = measure(one), us8 = measure(eight);

				printf("  %-32s | %-24s | done in %s memory: %6.2f us, eight at once %6.2f us a call\n",
				       server_names[s], client_names[c], dev ? "device" : "host", us, us8);
				if (!dev && us > 0 && us < best)
					best = us;
				if (!dev && us8 > 0 && us8 < best8)
					best8 = us8;
			}
	alone = measure((struct job){NULL, NULL, KERNEL_BATCH, BATCH, false, 1, 40});
	fact("direct_chain", "a dependent call whose request the host looks for: at most 17 us with MPS", best < 17,
	     "%.2f us; %.0f us without MPS", best, alone);
	fact("direct_eight", "with eight at once at most 12 us a call", best8 < 12, "%.2f us", best8);
	mps_stop(&m);
	return facts_failed;
}
