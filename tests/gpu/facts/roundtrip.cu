/* SPDX-License-Identifier: Apache-2.0 */
/* roundtrip.cu - one request and its answer between two processes, each running a tiny kernel. */
#include "mps.h"

#include <sys/mman.h>

#define LIMIT_MS 2000

enum mode { EVENTS, QUEUED, HOST, GRAPH_MEMOPS, GRAPH_KERNELS, MODES };

/* Shared by fork; also registered with CUDA on both sides. */
struct words {
	volatile uint32_t a, b; /* request and answer, on lines of their own */
	uint32_t pad0[14];
	volatile uint32_t client_ready, server_ready, posted, answered;
	volatile uint32_t pad1[12];
	cudaIpcMemHandle_t mem;
	cudaIpcEventHandle_t event_c, event_s;
	double us;
};

struct job {
	struct words *w;
	const char *dir; /* MPS directory, or NULL */
	enum mode mode;
	uint32_t rounds;
};

__device__ static void signal_word(volatile uint32_t *p, uint32_t v)
{
	__threadfence();
	*p = v;
}

__global__ static void wait_then_signal(volatile uint32_t *wait, uint32_t wv,
					volatile uint32_t *sig, uint32_t sv)
{
	wait_word(wait, wv, LIMIT_MS);
	signal_word(sig, sv);
}

/* Host words, with a limit. */
static void spin(const volatile uint32_t *p, uint32_t v)
{
	const double end = now_ms() + 4000;

	while ((int32_t)(*p - v) < 0)
		if (now_ms() > end)
			die("roundtrip: no answer in 4 s");
}

static CUdeviceptr device_words(const struct job *j, bool server)
{
	void *p;

	if (server) {
		RT(cudaMalloc(&p, 4096));
		RT(cudaMemset(p, 0, 4096));
		RT(cudaDeviceSynchronize());
		RT(cudaIpcGetMemHandle(&j->w->mem, p));
	} else {
		RT(cudaIpcOpenMemHandle(&p, j->w->mem, cudaIpcMemLazyEnablePeerAccess));
	}
	return (CUdeviceptr)p;
}

static int server(int sock, const void *arg)
{
	const struct job *j = (const struct job *)arg;
	struct words *w = j->w;
	cudaEvent_t mine, theirs;
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	cudaStream_t st;

	(void)sock;
	if (j->dir)
		mps_env(j->dir);
	const struct driver d = driver_open();

	RT(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
	RT(cudaHostRegister(w, sizeof(*w), cudaHostRegisterMapped));
	nothing<<<1, 1, 0, st>>>();
	RT(cudaStreamSynchronize(st));
	const CUdeviceptr dev = device_words(j, true), a = dev, b = dev + 128;

	RT(cudaEventCreateWithFlags(&mine, cudaEventDisableTiming | cudaEventInterprocess));
	RT(cudaIpcGetEventHandle(&w->event_s, mine));
	__atomic_store_n(&w->server_ready, 1, __ATOMIC_RELEASE);
	spin(&w->client_ready, 1);
	switch (j->mode) {
	case EVENTS:
		RT(cudaIpcOpenEventHandle(&theirs, w->event_c));
		for (uint32_t i = 1; i <= j->rounds; i++) {
			spin(&w->posted, i);
			RT(cudaStreamWaitEvent(st, theirs, 0));
			nothing<<<1, 1, 0, st>>>();
			RT(cudaEventRecord(mine, st));
			__atomic_store_n(&w->answered, i, __ATOMIC_RELEASE);
		}
		break;
	case QUEUED:
		for (uint32_t i = 1; i <= j->rounds; i++) {
			CU(d.streamWait32(st, a, i, CU_STREAM_WAIT_VALUE_GEQ));
			nothing<<<1, 1, 0, st>>>();
			CU(d.streamWrite32(st, b, i, 0));
		}
		break;
	case HOST:
		for (uint32_t i = 1; i <= j->rounds; i++) {
			spin(&w->a, i);
			nothing<<<1, 1, 0, st>>>();
			CU(d.streamWrite32(st, b, i, 0));
		}
		break;
	default:
		RT(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
		for (uint32_t i = 1; i <= j->rounds; i++) {
			if (j->mode == GRAPH_MEMOPS) {
				CU(d.streamWait32(st, a, i, CU_STREAM_WAIT_VALUE_GEQ));
				nothing<<<1, 1, 0, st>>>();
				CU(d.streamWrite32(st, b, i, 0));
			} else {
				wait_then_signal<<<1, 1, 0, st>>>((volatile uint32_t *)a, i,
								  (volatile uint32_t *)b, i);
			}
		}
		RT(cudaStreamEndCapture(st, &graph));
		RT(cudaGraphInstantiate(&exec, graph, 0));
		RT(cudaGraphLaunch(exec, st));
		break;
	}
	__atomic_store_n(&w->server_ready, 2, __ATOMIC_RELEASE);
	RT(cudaStreamSynchronize(st));
	spin(&w->client_ready, 2); /* its mapping of our memory goes first */
	return 0;
}

static int client(int sock, const void *arg)
{
	const struct job *j = (const struct job *)arg;
	struct words *w = j->w;
	cudaEvent_t mine, theirs;
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	cudaStream_t st;
	double t = 0;

	(void)sock;
	if (j->dir)
		mps_env(j->dir);
	const struct driver d = driver_open();

	RT(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
	RT(cudaHostRegister(w, sizeof(*w), cudaHostRegisterMapped));
	nothing<<<1, 1, 0, st>>>();
	RT(cudaStreamSynchronize(st));
	spin(&w->server_ready, 1);
	const CUdeviceptr dev = device_words(j, false), a = dev, b = dev + 128;

	RT(cudaEventCreateWithFlags(&mine, cudaEventDisableTiming | cudaEventInterprocess));
	RT(cudaIpcGetEventHandle(&w->event_c, mine));
	RT(cudaIpcOpenEventHandle(&theirs, w->event_s));
	__atomic_store_n(&w->client_ready, 1, __ATOMIC_RELEASE);
	switch (j->mode) {
	case EVENTS:
		t = now_ms();
		for (uint32_t i = 1; i <= j->rounds; i++) {
			nothing<<<1, 1, 0, st>>>();
			RT(cudaEventRecord(mine, st));
			__atomic_store_n(&w->posted, i, __ATOMIC_RELEASE);
			spin(&w->answered, i);
			RT(cudaStreamWaitEvent(st, theirs, 0));
			RT(cudaStreamSynchronize(st));
		}
		break;
	case QUEUED:
	case HOST:
		/* The first round holds the stream until everything is queued. */
		CU(d.streamWait32(st, (CUdeviceptr)&w->pad1[0], 1, CU_STREAM_WAIT_VALUE_GEQ));
		for (uint32_t i = 1; i <= j->rounds; i++) {
			nothing<<<1, 1, 0, st>>>();
			CU(d.streamWrite32(st, j->mode == HOST ? (CUdeviceptr)&w->a : a, i, 0));
			CU(d.streamWait32(st, b, i, CU_STREAM_WAIT_VALUE_GEQ));
		}
		if (j->mode == QUEUED)
			spin(&w->server_ready, 2);
		t = now_ms();
		__atomic_store_n(&w->pad1[0], 1, __ATOMIC_RELEASE);
		RT(cudaStreamSynchronize(st));
		break;
	default:
		RT(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
		for (uint32_t i = 1; i <= j->rounds; i++) {
			if (j->mode == GRAPH_MEMOPS) {
				nothing<<<1, 1, 0, st>>>();
				CU(d.streamWrite32(st, a, i, 0));
				CU(d.streamWait32(st, b, i, CU_STREAM_WAIT_VALUE_GEQ));
			} else {
				wait_then_signal<<<1, 1, 0, st>>>((volatile uint32_t *)b, i - 1,
								  (volatile uint32_t *)a, i);
			}
		}
		RT(cudaStreamEndCapture(st, &graph));
		RT(cudaGraphInstantiate(&exec, graph, 0));
		spin(&w->server_ready, 2);
		t = now_ms();
		RT(cudaGraphLaunch(exec, st));
		RT(cudaStreamSynchronize(st));
		break;
	}
	w->us = (now_ms() - t) * 1e3 / j->rounds;
	RT(cudaIpcCloseMemHandle((void *)dev));
	__atomic_store_n(&w->client_ready, 2, __ATOMIC_RELEASE);
	return 0;
}

/* Microseconds per round trip, or a negative exit status. */
static double round(enum mode mode, const char *dir, uint32_t rounds)
{
	struct words *w = (struct words *)mmap(NULL, 4096, PROT_READ | PROT_WRITE,
					       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct job j = {w, dir, mode, rounds};

	if (w == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	struct child s = start(server, &j, 10), c = start(client, &j, 10);
	const int rc = finish(&c, 8000), rs = finish(&s, 2000);
	const double us = rc == 0 && rs == 0 ? w->us : -1;

	munmap(w, 4096);
	return us;
}

static const struct {
	enum mode mode;
	const char *name, *what;
	double alone_us, mps_us; /* what DESIGN says; 0: nothing */
} modes[] = {
	{EVENTS, "rt_events", "IPC events, one at a time", 285, 15.5},
	{QUEUED, "rt_queued", "stream memory operations queued ahead", 290, 11},
	{HOST, "rt_host", "client's stream rings, host thread launches", 290, 16},
	{GRAPH_MEMOPS, "rt_graph_memops", "both sides graphs, memory operations", 0, 7.4},
	{GRAPH_KERNELS, "rt_graph_kernels", "graphs, waiting and signalling in the kernels", 0,
	 1.85},
};

int main(void)
{
	struct mps m;
	char says[128];

	skip_without_mps("roundtrip");
	const bool up = mps_start(&m, true);

	for (const auto &r : modes) {
		const double with = up ? round(r.mode, m.dir, r.mode == EVENTS ? 200 : 300) : -1;
		const double without = r.alone_us > 0 ? round(r.mode, NULL, 60) : 0;

		if (r.alone_us > 0) {
			snprintf(says, sizeof(says), "%s: %.0f us without MPS, %.1f us with",
				 r.what, r.alone_us, r.mps_us);
			fact(r.name, says, with > 0 && with < 2 * r.mps_us && without > 5 * with,
			     "%.1f us without, %.2f us with (-1: failed)", without, with);
		} else {
			snprintf(says, sizeof(says), "%s: %.2f us with MPS", r.what, r.mps_us);
			fact(r.name, says, with > 0 && with < 2 * r.mps_us, "%.2f us (-1: failed)",
			     with);
		}
	}
	mps_stop(&m);
	return facts_failed;
}
