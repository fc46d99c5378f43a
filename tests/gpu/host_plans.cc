/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_plans.cc - the backend's side of plans (kernels/cuda/plan.cu) on the host: submitting, refusing, aborting, ends.
 *
 * The part of the CUDA runtime that it uses is imitated: a stream is a thread that runs what it is given in order, a
 * graph is a list of steps and works, a work adds the values of its row. So the executors, the loop's waiting and
 * all that goes on between threads is the real thing.
 */
#include "kernels/cuda/plan.cu"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <poll.h>
#include <stdio.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace
{

int failed;

#define CHECK(what)                                                       \
	do {                                                              \
		if (!(what)) {                                            \
			printf("%s:%d: %s\n", __FILE__, __LINE__, #what); \
			failed++;                                         \
		}                                                         \
	} while (0)

/* ---- the imitation ---- */

typedef std::vector<std::function<void()>> list;

struct stream {
	std::mutex lock;
	std::condition_variable wake;
	std::deque<std::shared_ptr<list>> queue;
	bool capturing = false, stop = false, running = false;
	list captured;
	std::thread thread;

	stream() : thread([this] { run(); }) {}
	void run()
	{
		std::unique_lock<std::mutex> l(lock);

		for (;;) {
			wake.wait(l, [this] { return stop || !queue.empty(); });
			if (queue.empty())
				return;
			std::shared_ptr<list> next = queue.front();

			running = true;
			queue.pop_front();
			l.unlock();
			for (auto &f : *next)
				f();
			l.lock();
			running = false;
		}
	}
};

struct {
	int streams, graphs, tracks, pinned, mps;
	bool device_lost, launch_fails;
} fake;

stream *of(cudaStream_t s)
{
	return reinterpret_cast<stream *>(s);
}

} /* namespace */

struct exl3_track {
	uint64_t counters[EXL3_CUDA_ENTRIES];
	alignas(16) char extra[EXL3_CUDA_TRACK_EXTRA];
};

extern "C" {
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned)
{
	*ret = reinterpret_cast<cudaStream_t>(new stream);
	fake.streams++;
	return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
	of(s)->lock.lock();
	of(s)->stop = true;
	of(s)->wake.notify_all();
	of(s)->lock.unlock();
	of(s)->thread.join();
	delete of(s);
	fake.streams--;
	return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s)
{
	std::lock_guard<std::mutex> l(of(s)->lock);

	if (__atomic_load_n(&fake.device_lost, __ATOMIC_ACQUIRE))
		return cudaErrorIllegalAddress;
	return of(s)->running || !of(s)->queue.empty() ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode)
{
	of(s)->capturing = true;
	return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *ret)
{
	*ret = reinterpret_cast<cudaGraph_t>(new list(of(s)->captured));
	fake.graphs++;
	of(s)->captured.clear();
	of(s)->capturing = false;
	return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t g, unsigned long long)
{
	*ret = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<list>(new list(*reinterpret_cast<list *>(g))));
	fake.graphs++;
	return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
	delete reinterpret_cast<list *>(g);
	fake.graphs--;
	return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g)
{
	delete reinterpret_cast<std::shared_ptr<list> *>(g);
	fake.graphs--;
	return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s)
{
	std::lock_guard<std::mutex> l(of(s)->lock);

	if (fake.launch_fails)
		return cudaErrorLaunchFailure;
	of(s)->queue.push_back(*reinterpret_cast<std::shared_ptr<list> *>(g));
	of(s)->wake.notify_all();
	return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **ret, size_t bytes, unsigned)
{
	*ret = calloc(1, bytes);
	fake.pinned++;
	return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p)
{
	fake.pinned -= p != nullptr;
	free(p);
	return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **ret, void *p, unsigned)
{
	*ret = p;
	return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int)
{
	return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *ret, cudaDeviceAttr, int)
{
	*ret = fake.mps;
	return cudaSuccess;
}
cudaError_t cudaSetDevice(int)
{
	return cudaSuccess;
}
cudaError_t cudaGetLastError(void)
{
	return cudaSuccess;
}
}

int exl3_cuda_err(struct exl3_error *err, cudaError_t e, const char *what)
{
	return e == cudaSuccess ? 0 : exl3_errf(err, -EIO, "%s: %d", what, (int)e);
}
int exl3_cuda_track_new(struct exl3_dev *, const struct exl3_track_options *, struct exl3_track **ret, struct exl3_error *)
{
	*ret = (struct exl3_track *)calloc(1, sizeof(**ret));
	fake.tracks++;
	return 0;
}
struct exl3_track *exl3_cuda_track_free(struct exl3_track *t)
{
	fake.tracks -= t != nullptr;
	free(t);
	return nullptr;
}
uint64_t *exl3_cuda_track_counters(struct exl3_track *t)
{
	return t->counters;
}
void *exl3_cuda_track_extra(struct exl3_track *t)
{
	return t->extra;
}
int exl3_emulate_step(const struct exl3::plan_step *s, cudaStream_t st)
{
	const struct exl3::plan_step step = *s;

	of(st)->captured.push_back([step] { exl3::plan_run_step(&step); });
	return 0;
}
/* y = 3 x + 1 of each entry; experts also count an invalid id for each. */
int exl3_cuda_track_run(struct exl3_track *t, const struct exl3_work *work, void *st)
{
	const bool counts = work->op == EXL3_OP_MOE;

	if (work->op == EXL3_OP_CANCEL)
		return -EOPNOTSUPP;
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		const uint32_t *x = (const uint32_t *)work->rows[i].x;
		uint32_t *y = (uint32_t *)work->rows[i].y;

		of((cudaStream_t)st)->captured.push_back([=] {
			*y = *x * 3 + 1;
			t->counters[i] += counts * (i + 1);
		});
	}
	return 0;
}

namespace
{

/* ---- a device, plans, and a loop that sleeps as the daemon's does ---- */

bool begin_nothing(void *, const struct exl3_work *)
{
	return true;
}

const struct exl3_executor_ops main_ops = {nullptr, begin_nothing, nullptr};

struct exl3_dev *device()
{
	struct exl3_dev *dev = (struct exl3_dev *)calloc(1, sizeof(*dev));
	struct exl3_error err;

	pthread_mutex_init(&dev->memory_lock, nullptr);
	CHECK(!exl3_executor_new(&main_ops, dev, 0, &dev->exec, &err));
	return dev;
}

void device_free(struct exl3_dev *dev)
{
	exl3_cuda_plans_close(dev);
	exl3_executor_free(dev->exec);
	pthread_mutex_destroy(&dev->memory_lock);
	free(dev);
	CHECK(!fake.streams && !fake.graphs && !fake.tracks && !fake.pinned);
}

/* The next end; sleeps until the executor says so. */
struct exl3_done next(struct exl3_dev *dev)
{
	struct exl3_done done = {nullptr, 12345, 0};

	for (;;) {
		struct pollfd p = {exl3_executor_event_fd(dev->exec), POLLIN, 0};

		if (exl3_cuda_plans_poll(dev, &done, 1))
			return done;
		if (exl3_executor_arm(dev->exec) && poll(&p, 1, 20000) != 1) {
			CHECK(!"an end that nobody told of");
			return done;
		}
	}
}

constexpr uint32_t CALLS = 4;

struct made {
	struct exl3_rows rows[CALLS][2];
	struct exl3_work work[CALLS];
	struct exl3_dev_plan_call call[CALLS];
	uint32_t x[CALLS][2], y[CALLS][2], ready[CALLS], done[CALLS];
	int32_t result[CALLS];
	uint64_t skipped[CALLS][2];
	struct exl3_dev_plan *plan;
	uint32_t epoch;
	std::thread client;
};

/* Call 1 has two entries, call 2 counts invalid ids of two. */
int make(struct exl3_dev *dev, made *m, bool one_process = true)
{
	struct exl3_dev_plan_options opt = {};
	struct exl3_error err;

	opt.one_process = one_process;
	for (uint32_t i = 0; i < CALLS; i++) {
		for (int e = 0; e < 2; e++) {
			m->rows[i][e] = {};
			m->rows[i][e].x = &m->x[i][e];
			m->rows[i][e].y = &m->y[i][e];
		}
		m->work[i] = {};
		m->work[i].op = i == 2 ? EXL3_OP_MOE : EXL3_OP_LINEAR;
		m->work[i].rows = m->rows[i];
		m->work[i].nr_rows = i == 1 || i == 2 ? 2 : 1;
		m->call[i] = {&m->work[i], m->skipped[i], &m->ready[i], &m->result[i], &m->done[i]};
	}
	return exl3_cuda_plan_new(dev, m->call, CALLS, &opt, &m->plan, &err);
}

/* The client's side of one replay. */
void signal_all(made *m, uint32_t calls)
{
	for (uint32_t i = 0; i < calls; i++) {
		m->x[i][0] = m->epoch * 100 + i;
		m->x[i][1] = m->x[i][0] + 50;
		__atomic_store_n(&m->ready[i], m->epoch, __ATOMIC_RELEASE);
		while (__atomic_load_n(&m->done[i], __ATOMIC_ACQUIRE) != m->epoch)
			std::this_thread::yield();
		CHECK(m->result[i] == 0 && m->y[i][0] == m->x[i][0] * 3 + 1);
		CHECK(m->work[i].nr_rows == 1 || m->y[i][1] == m->x[i][1] * 3 + 1);
	}
}

void several_at_once()
{
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
	struct exl3_dev *dev = device();
	made m[6] = {};
	int running = 0, ended[6] = {}, refused = 0;

	for (auto &p : m)
		CHECK(!make(dev, &p));
	for (int total = 0; total < 6 * 40;) {
		for (auto &p : m) {
			if (p.client.joinable() || ended[&p - m] >= 40)
				continue;
			const int ret = exl3_cuda_plan_submit(p.plan, p.epoch + 1, 20000000000ull, &p);

			if (ret == -EAGAIN) { /* four may run; one that has ended and is not polled yet does not */
				CHECK(running >= 4);
				refused++;
				continue;
			}
			CHECK(!ret);
			/* It has not ended: nobody has signalled. */
			CHECK(exl3_cuda_plan_submit(p.plan, 7, 1, &p) == -EBUSY);
			running++;
			p.epoch++;
			p.client = std::thread(signal_all, &p, CALLS);
		}
		const struct exl3_done done = next(dev);
		made *p = (made *)done.tag;

		p->client.join();
		CHECK(done.result == 0);
		CHECK(p->skipped[2][0] == 1 && p->skipped[2][1] == 2 && p->skipped[0][0] == 0);
		ended[p - m]++;
		running--;
		total++;
	}
	CHECK(refused > 0);
	for (auto &p : m)
		exl3_cuda_plan_free(p.plan);
	device_free(dev);
}

void ends()
{
	struct exl3_dev *dev = device();
	struct exl3_done done;
	made m = {};

	CHECK(!make(dev, &m));
	m.epoch = 1;
	/* Nobody signals: nothing was written, and the same epoch may come again. */
	CHECK(!exl3_cuda_plan_submit(m.plan, 1, 20000000, &m));
	done = next(dev);
	CHECK(done.tag == &m && done.result == -EAGAIN && m.done[0] == 0 && m.result[0] == 0);
	/* Two calls, then time is up. */
	CHECK(!exl3_cuda_plan_submit(m.plan, 1, 300000000, &m));
	signal_all(&m, 2);
	done = next(dev);
	CHECK(done.result == -ETIMEDOUT && exl3_cuda_plan_failed_call(m.plan) == 2);
	CHECK(m.done[3] == 1 && m.result[1] == 0 && m.result[2] == -ETIMEDOUT && m.result[3] == -ETIMEDOUT);
	/* One, then an abort. An abort without a replay means nothing. */
	exl3_cuda_plan_abort(m.plan);
	m.epoch = 2;
	CHECK(!exl3_cuda_plan_submit(m.plan, 2, 20000000000ull, &m));
	signal_all(&m, 1);
	exl3_cuda_plan_abort(m.plan);
	done = next(dev);
	CHECK(done.result == -ECANCELED && exl3_cuda_plan_failed_call(m.plan) == 1 && m.result[3] == -ECANCELED);
	/* And all is well again. */
	m.epoch = 3;
	CHECK(!exl3_cuda_plan_submit(m.plan, 3, 20000000000ull, &m));
	signal_all(&m, CALLS);
	CHECK(next(dev).result == 0);
	exl3_cuda_plan_free(m.plan);
	/* A call without words is told by the next one's: only the last of these has some. */
	made quiet = {};
	struct exl3_dev_plan_options opt = {};
	struct exl3_error err;

	opt.one_process = true;
	CHECK(!make(dev, &quiet));
	exl3_cuda_plan_free(quiet.plan);
	for (uint32_t i = 0; i < CALLS; i++)
		quiet.call[i] = {&quiet.work[i], i == 2 ? quiet.skipped[2] : nullptr, nullptr, nullptr,
				 i == CALLS - 1 ? &quiet.done[i] : nullptr};
	CHECK(!exl3_cuda_plan_new(dev, quiet.call, CALLS, &opt, &quiet.plan, &err));
	quiet.x[3][0] = 5;
	CHECK(!exl3_cuda_plan_submit(quiet.plan, 9, 20000000000ull, &quiet));
	CHECK(next(dev).result == 0 && quiet.done[3] == 9 && quiet.y[3][0] == 16 && quiet.skipped[2][1] == 2);
	exl3_cuda_plan_free(quiet.plan);
	device_free(dev);
}

void refusals()
{
	struct exl3_dev *dev = device();
	static made m[PLANS_MAX + 1];
	struct exl3_dev_plan_options opt = {};
	struct exl3_error err;
	made one = {};

	CHECK(make(dev, &one, false) == -EPERM);
	/* Under MPS a process has two queues unless it asks for more. */
	fake.mps = 1;
	unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
	CHECK(make(dev, &one, false) == -EOPNOTSUPP);
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "5", 1);
	CHECK(!make(dev, &one, false));
	fake.mps = 0;
	exl3_cuda_plan_free(one.plan);
	opt.one_process = true;
	CHECK(exl3_cuda_plan_new(dev, one.call, 0, &opt, &one.plan, &err) == -EINVAL);
	CHECK(exl3_cuda_plan_new(dev, one.call, EXL3_DEV_PLAN_CALLS + 1, &opt, &one.plan, &err) == -EINVAL);
	one.call[1].done = (uint32_t *)((char *)one.call[1].done + 2);
	CHECK(exl3_cuda_plan_new(dev, one.call, CALLS, &opt, &one.plan, &err) == -EINVAL);
	one.call[1].done = nullptr;
	one.work[3].op = EXL3_OP_CANCEL;
	CHECK(exl3_cuda_plan_new(dev, one.call, CALLS, &opt, &one.plan, &err) == -EOPNOTSUPP);
	one.work[3].op = EXL3_OP_LINEAR;
	one.work[3].nr_rows = EXL3_DEV_PLAN_CALLS;
	CHECK(exl3_cuda_plan_new(dev, one.call, CALLS, &opt, &one.plan, &err) == -EINVAL);
	for (uint32_t i = 0; i < PLANS_MAX; i++)
		CHECK(!make(dev, &m[i]));
	CHECK(make(dev, &m[PLANS_MAX]) == -ENOSPC);
	exl3_cuda_plan_free(m[17].plan);
	CHECK(!make(dev, &m[17]));
	for (uint32_t i = 0; i < PLANS_MAX; i++)
		exl3_cuda_plan_free(m[i].plan);
	CHECK(!exl3_cuda_plan_free(nullptr));
	device_free(dev);
}

/* The device is lost while one waits and as one is launched: all end with -EIO, and so does what comes later. */
void losses()
{
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
	for (int how = 0; how < 2; how++) {
		struct exl3_dev *dev = device();
		made m[2] = {};

		CHECK(!make(dev, &m[0]) && !make(dev, &m[1]));
		CHECK(!exl3_cuda_plan_submit(m[0].plan, 1, 20000000000ull, &m[0]));
		if (how == 0) {
			usleep(20000);
			__atomic_store_n(&fake.device_lost, true, __ATOMIC_RELEASE);
		} else {
			exl3_cuda_plan_abort(m[0].plan);
			CHECK(next(dev).result == -EAGAIN);
			fake.launch_fails = true;
			CHECK(!exl3_cuda_plan_submit(m[0].plan, 2, 20000000000ull, &m[0]));
		}
		CHECK(next(dev).result == -EIO);
		CHECK(!exl3_cuda_plan_submit(m[1].plan, 1, 20000000000ull, &m[1]));
		CHECK(next(dev).result == -EIO);
		fake.device_lost = fake.launch_fails = false;
		/* The imitated device goes on waiting: it is let go. */
		__atomic_store_n(&ctl_of(m[0].plan)->abort, m[0].plan->seq, __ATOMIC_RELEASE);
		for (unsigned s = 0; s < dev->plans->nr_streams; s++)
			while (cudaStreamQuery(dev->plans->stream[s]) != cudaSuccess)
				usleep(1000);
		exl3_cuda_plan_free(m[0].plan);
		exl3_cuda_plan_free(m[1].plan);
		device_free(dev);
	}
}

/* A device is closed while replays wait: they are told to give up. */
void closing()
{
	struct exl3_dev *dev = device();
	made m[5] = {};
	const uint64_t begin = exl3_now_ns();

	for (auto &p : m)
		CHECK(!make(dev, &p));
	for (int i = 0; i < 4; i++)
		CHECK(!exl3_cuda_plan_submit(m[i].plan, 1, 3000000000000ull, &m[i]));
	CHECK(exl3_cuda_plan_submit(m[4].plan, 1, 1, &m[4]) == -EAGAIN);
	usleep(20000);
	exl3_cuda_plan_abort(m[2].plan);
	CHECK(next(dev).tag == &m[2]);
	CHECK(!exl3_cuda_plan_submit(m[4].plan, 1, 3000000000000ull, &m[4]));
	__atomic_store_n(&dev->plans->closing, 1, __ATOMIC_RELEASE);
	for (int i = 0; i < 4; i++)
		CHECK(next(dev).result == -EAGAIN);
	CHECK(exl3_now_ns() - begin < 10000000000ull);
	for (auto &p : m)
		exl3_cuda_plan_free(p.plan);
	device_free(dev);
}

} /* namespace */

int main()
{
	several_at_once();
	ends();
	refusals();
	losses();
	closing();
	printf("host_plans: %d failed\n", failed);
	return failed != 0;
}
