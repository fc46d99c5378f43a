/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.cu - what plans build on: replayed graphs that wait inside see new values and new operands, hold up neither
 * other streams nor launches nor the making and freeing of memory, and leave the SMs to kernels of any size.
 */
#include "mps.h"

#define WAITING 16
#define ROUNDS  500
#define WORDS   4096u

/* Host memory of both sides. */
struct page {
	volatile uint32_t epoch, ready, done, pad[13];
	uint32_t data[WORDS];
};

struct rig {
	struct driver d;
	struct page *page, *page_dev;
	uint32_t *sum;          /* device: of the data that a replay saw */
	volatile uint32_t *hold; /* host: what waiting graphs wait for */
	cudaStream_t probe[3], wait[WAITING]; /* others first: see streams.cu */
	cudaStream_t client;
};

__device__ static uint32_t load_acquire(const volatile uint32_t *p)
{
	uint32_t v;

	asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"((const uint32_t *)p) : "memory");
	return v;
}

/* One thread; the epoch is read anew in each replay. */
__global__ static void gate(struct page *page, uint32_t limit_ms)
{
	const uint32_t epoch = page->epoch;
	const uint64_t end = device_ns() + limit_ms * 1000000ull;

	while ((int32_t)(load_acquire(&page->ready) - epoch) < 0 && device_ns() < end)
		;
}

/* By the read-only path, as kernels read operands. */
__global__ static void add_up(const uint32_t *__restrict__ data, uint32_t *sum)
{
	uint32_t s = 0;

	for (uint32_t i = threadIdx.x; i < WORDS; i += blockDim.x)
		s += __ldg(data + i) * (i + 1);
	atomicAdd(sum, s);
}

__global__ static void tell(struct page *page)
{
	__threadfence_system();
	asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"((uint32_t *)&page->done), "r"(page->epoch) : "memory");
}

/* A block for each SM; all wait until all are there, at most 200 ms. */
__global__ static void meet(uint32_t *arrived, uint32_t *most)
{
	const uint64_t end = device_ns() + 200000000ull;

	if (threadIdx.x)
		return;
	atomicAdd(arrived, 1);
	while (*(volatile uint32_t *)arrived < gridDim.x && device_ns() < end)
		;
	atomicMax(most, *(volatile uint32_t *)arrived);
}

__global__ static void fill(uint32_t *data, uint32_t *turn)
{
	for (uint32_t i = threadIdx.x; i < WORDS; i += blockDim.x)
		data[i] = *turn * 7 + i;
	__syncthreads();
	if (threadIdx.x == 0)
		++*turn;
}

static uint32_t sum_of(const uint32_t *data)
{
	uint32_t s = 0;

	for (uint32_t i = 0; i < WORDS; i++)
		s += data[i] * (i + 1);
	return s;
}

static cudaGraphExec_t end_capture(cudaStream_t stream)
{
	cudaGraphExec_t exec;
	cudaGraph_t graph;

	RT(cudaStreamEndCapture(stream, &graph));
	RT(cudaGraphInstantiate(&exec, graph, 0));
	RT(cudaGraphDestroy(graph));
	return exec;
}

static void rig_make(struct rig *r)
{
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
	r->d = driver_open();
	for (auto &s : r->probe)
		RT(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	RT(cudaStreamCreateWithFlags(&r->client, cudaStreamNonBlocking));
	for (auto &s : r->wait)
		RT(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	RT(cudaHostAlloc((void **)&r->page, sizeof(*r->page), cudaHostAllocMapped));
	memset(r->page, 0, sizeof(*r->page));
	RT(cudaHostGetDevicePointer((void **)&r->page_dev, r->page, 0));
	RT(cudaHostAlloc((void **)&r->hold, 64, cudaHostAllocMapped));
	*r->hold = 0;
	RT(cudaMalloc((void **)&r->sum, 64));
	RT(cudaMemset(r->sum, 0, 64));
	RT(cudaFuncSetAttribute((const void *)gate, cudaFuncAttributePreferredSharedMemoryCarveout,
				cudaSharedmemCarveoutMaxShared));
	RT(cudaFuncSetAttribute((const void *)wait_flag, cudaFuncAttributePreferredSharedMemoryCarveout,
				cudaSharedmemCarveoutMaxShared));
	nothing<<<1, 1, 0, r->probe[0]>>>();
	RT(cudaDeviceSynchronize());
}

/* Operands written while the graph waits in its gate, the epoch before its launch: both seen, in every replay. */
static void values(struct rig *r)
{
	int wrong = 0, late = 0;

	RT(cudaStreamBeginCapture(r->wait[0], cudaStreamCaptureModeRelaxed));
	RT(cudaMemsetAsync(r->sum, 0, 4, r->wait[0]));
	gate<<<1, 1, 0, r->wait[0]>>>(r->page_dev, 2000);
	add_up<<<1, 256, 0, r->wait[0]>>>(r->page_dev->data, r->sum);
	tell<<<1, 1, 0, r->wait[0]>>>(r->page_dev);
	cudaGraphExec_t exec = end_capture(r->wait[0]);

	for (uint32_t t = 1; t <= ROUNDS; t++) {
		uint32_t sum = 0;

		r->page->epoch = t;
		RT(cudaGraphLaunch(exec, r->wait[0]));
		if (t % 10 == 0)
			sleep_ms(1);
		for (uint32_t i = 0; i < WORDS; i++)
			r->page->data[i] = t * 31 + i;
		late += r->page->done == t; /* before its time */
		__atomic_store_n((uint32_t *)&r->page->ready, t, __ATOMIC_RELEASE);
		RT(cudaStreamSynchronize(r->wait[0]));
		RT(cudaMemcpy(&sum, r->sum, 4, cudaMemcpyDeviceToHost));
		wrong += sum != sum_of(r->page->data) || r->page->done != t;
	}
	fact("plan_values", "a replayed graph sees a new epoch, and operands written while it waits", !wrong && !late,
	     "%d of %d wrong, %d early", wrong, ROUNDS, late);
	RT(cudaGraphExecDestroy(exec));
}

/* A client's graph: a kernel writes operands in host memory, a memory operation says so, another waits. */
static void memory_operations(struct rig *r)
{
	uint32_t *turn;
	int wrong = 0;

	r->page->ready = r->page->done = 0;
	RT(cudaMalloc((void **)&turn, 4));
	RT(cudaMemset(turn, 0, 4));
	for (uint32_t t = 1; t <= 100; t++) {
		uint32_t sum = 0;

		RT(cudaStreamBeginCapture(r->wait[0], cudaStreamCaptureModeRelaxed));
		RT(cudaMemsetAsync(r->sum, 0, 4, r->wait[0]));
		gate<<<1, 1, 0, r->wait[0]>>>(r->page_dev, 2000);
		add_up<<<1, 256, 0, r->wait[0]>>>(r->page_dev->data, r->sum);
		tell<<<1, 1, 0, r->wait[0]>>>(r->page_dev);
		cudaGraphExec_t daemon = end_capture(r->wait[0]);

		RT(cudaStreamBeginCapture(r->client, cudaStreamCaptureModeRelaxed));
		fill<<<1, 256, 0, r->client>>>(r->page_dev->data, turn);
		CU(r->d.streamWrite32(r->client, (CUdeviceptr)&r->page_dev->ready, t, 0));
		CU(r->d.streamWait32(r->client, (CUdeviceptr)&r->page_dev->done, t, CU_STREAM_WAIT_VALUE_GEQ));
		cudaGraphExec_t client = end_capture(r->client);

		r->page->epoch = t;
		RT(cudaGraphLaunch(daemon, r->wait[0]));
		RT(cudaGraphLaunch(client, r->client));
		RT(cudaStreamSynchronize(r->wait[0]));
		if (r->page->done != t)
			r->page->done = t; /* do not hang */
		RT(cudaStreamSynchronize(r->client));
		RT(cudaMemcpy(&sum, r->sum, 4, cudaMemcpyDeviceToHost));
		wrong += sum != sum_of(r->page->data) || r->page->data[1] != (t - 1) * 7 + 1;
		RT(cudaGraphExecDestroy(daemon));
		RT(cudaGraphExecDestroy(client));
	}
	fact("plan_memops", "captured memory operations keep their order with kernels of both sides", !wrong, "%d of 100 wrong",
	     wrong);
}

static cudaGraphExec_t waiting_graph(struct rig *r, uint32_t value)
{
	RT(cudaStreamBeginCapture(r->client, cudaStreamCaptureModeRelaxed));
	wait_flag<<<1, 1, 0, r->client>>>((const volatile uint32_t *)r->hold, value, 15000);
	return end_capture(r->client);
}

/* How many blocks of @smem bytes and @threads are there at once, one for each SM. */
static uint32_t resident(struct rig *r, uint32_t smem, unsigned threads, int sms, unsigned cluster)
{
	uint32_t zero[2] = {}, seen[2];
	cudaLaunchConfig_t cfg = {};
	cudaLaunchAttribute attr = {};

	RT(cudaFuncSetAttribute((const void *)meet, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem));
	RT(cudaFuncSetAttribute((const void *)meet, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
	RT(cudaMemcpyAsync(r->sum + 4, zero, 8, cudaMemcpyHostToDevice, r->probe[0]));
	cfg.gridDim = dim3((unsigned)sms);
	cfg.blockDim = dim3(threads);
	cfg.dynamicSmemBytes = smem;
	cfg.stream = r->probe[0];
	attr.id = cudaLaunchAttributeClusterDimension;
	attr.val.clusterDim.x = cluster;
	attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
	cfg.attrs = &attr;
	cfg.numAttrs = cluster > 1;
	RT(cudaLaunchKernelEx(&cfg, meet, r->sum + 4, r->sum + 5));
	RT(cudaMemcpyAsync(seen, r->sum + 4, 8, cudaMemcpyDeviceToHost, r->probe[0]));
	RT(cudaStreamSynchronize(r->probe[0]));
	return seen[1];
}

static void beside(struct rig *r)
{
	cudaGraphExec_t exec[WAITING], spare = waiting_graph(r, 1), extra;
	cudaDeviceProp prop;
	double launch_us = 0, begin, slowest = 0;
	const unsigned threads[] = {128, 384, 512, 1024};

	RT(cudaGetDeviceProperties(&prop, 0));
	const uint32_t most_smem = (uint32_t)prop.sharedMemPerBlockOptin;
	const uint32_t alone16 = resident(r, 100 << 10, 128, 16, 16);

	for (auto &e : exec)
		e = waiting_graph(r, 1);
	for (int i = 0; i < WAITING; i++) {
		begin = now_ms();
		RT(cudaGraphLaunch(exec[i], r->wait[i]));
		launch_us = (now_ms() - begin) * 1e3 > launch_us && i ? (now_ms() - begin) * 1e3 : launch_us;
	}
	sleep_ms(20);
	fact("plan_launch", "launching a graph while others wait costs the host as ever", launch_us < 200, "%.0f us at most",
	     launch_us);
	for (auto &s : r->probe)
		for (int i = 0; i < 20; i++) {
			begin = now_ms();
			nothing<<<1, 1, 0, s>>>();
			RT(cudaStreamSynchronize(s));
			slowest = now_ms() - begin > slowest ? now_ms() - begin : slowest;
		}
	fact("plan_queues", "16 graphs that wait hold up no stream made before them (32 connections)", slowest < 100,
	     "%.2f ms at most", slowest);
	for (const unsigned n : threads) {
		const uint32_t all = resident(r, most_smem - 1024, n, prop.multiProcessorCount, 1);
		const uint32_t full = resident(r, most_smem, n, prop.multiProcessorCount, 1);
		char name[32], says[128];

		snprintf(name, sizeof(name), "plan_sms_%u", n);
		snprintf(says, sizeof(says), "a block of %u threads and all shared memory but 1 KB on every SM beside 16 waiting threads",
			 n);
		fact(name, says, all == (uint32_t)prop.multiProcessorCount, "%u of %d; with all of it %u", all,
		     prop.multiProcessorCount, full);
	}
	begin = now_ms();
	const uint32_t big = resident(r, most_smem - 1024, 128, 16, 16);

	fact("plan_clusters", "a cluster of 16 large blocks starts beside them", big == 16 && alone16 == 16 && now_ms() - begin < 150,
	     "%u of 16 after %.1f ms; %u alone", big, now_ms() - begin, alone16);
	/* Things that a daemon does meanwhile. */
	begin = now_ms();
	extra = waiting_graph(r, 0);
	const double made = now_ms() - begin;

	begin = now_ms();
	RT(cudaGraphExecDestroy(extra));
	RT(cudaGraphExecDestroy(spare));
	const double destroyed = now_ms() - begin;
	const CUmemAllocationProp vmm = vmm_prop();
	CUmemGenericAllocationHandle h;

	begin = now_ms();
	CU(r->d.memCreate(&h, 2u << 20, &vmm, 0));
	const CUdeviceptr at = vmm_map(&r->d, h, 2u << 20, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

	CU(r->d.memUnmap(at, 2u << 20));
	CU(r->d.memRelease(h));
	const double memory = now_ms() - begin;

	fact("plan_beside", "graphs are made and destroyed, VMM memory mapped and unmapped, while others wait",
	     made < 500 && destroyed < 500 && memory < 500, "%.1f, %.1f, %.1f ms", made, destroyed, memory);
	*r->hold = 1;
	for (auto &s : r->wait)
		RT(cudaStreamSynchronize(s));
	for (auto &e : exec)
		RT(cudaGraphExecDestroy(e));
}

static int body(int sock, const void *arg)
{
	static struct rig r;

	(void)sock, (void)arg;
	rig_make(&r);
	values(&r);
	memory_operations(&r);
	beside(&r);
	return facts_failed;
}

static int attribute(int sock, const void *arg)
{
	int mps = -1;

	unsetenv("CUDA_MPS_PIPE_DIRECTORY");
	if (arg)
		mps_env((const char *)arg);
	RT(cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, 0));
	RT(cudaFree(0));
	return send_msg(sock, &mps, sizeof(mps), -1) ? 0 : 2;
}

static int attribute_seen(const char *dir)
{
	struct child c = start(attribute, dir, 20);
	int mps = -1;

	recv_msg(c.fd, &mps, sizeof(mps), NULL, 20000);
	return finish(&c, 5000) ? -2 : mps;
}

int main(void)
{
	struct mps m;

	skip_without_gpu("plan");
	struct child c = start(body, NULL, 35);
	const int status = finish(&c, 35000);

	if (status != 0 && status != 1)
		die("plan: ended with %d", status);
	if (status)
		facts_failed = 1;
	if (system("command -v nvidia-cuda-mps-control >/dev/null 2>&1") == 0) {
		const int without = attribute_seen(NULL);
		const bool up = mps_start(&m, true);
		const int with = up ? attribute_seen(m.dir) : -3;

		mps_stop(&m);
		fact("plan_mps", "a process can ask whether it is a client of an MPS server", without == 0 && with == 1,
		     "%d without, %d with", without, with);
	}
	return facts_failed;
}
