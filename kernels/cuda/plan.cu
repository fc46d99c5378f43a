/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.cu - calls that were recorded once, as a CUDA graph that waits for its client inside (plan.cuh).
 *
 * A plan has a track, so its kernels share nothing with submit(), and a graph. The graph runs on one of a few streams
 * that are made before the first plan waits: streams share hardware queues, and what is behind a waiting one in a queue
 * waits with it (tests/gpu/facts/streams.cu). So no more plans run at a time than there are queues left, and others
 * are refused until one has ended. A step is one thread without shared memory: it takes a fraction of one SM.
 *
 * An executor of its own launches them and looks for their ends, because they end in any order and may wait long. It
 * sleeps between two looks, and a new plan wakes it.
 *
 *   idle -> busy (submit; loop) -> launched (executor) -> ended word seen, stream empty -> idle, exl3_done
 */
#include "kernels/cuda/dev.h"
#include "kernels/cuda/plan.cuh"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PLANS_MAX      64u
#define STREAMS_MAX    16u
#define QUEUES_OTHERS  4u             /* work, copies, small copies, and the default stream */
#define QUEUES_DEFAULT 8u             /* CUDA_DEVICE_MAX_CONNECTIONS, where it is not set, */
#define QUEUES_MPS     2u             /* and under MPS */
#define SPIN_NS        50000ull
#define EAGER_NS       500000ull      /* looks without a pause after a launch */
#define NAP_NS         50000ull
#define LOOK_ERRORS_NS 2000000ull
#define LATE_NS        1000000000ull  /* after its time is up by our clock a replay is told to give up */
#define WAIT_NS_MAX    3600000000000ull

/* Host memory of one plan. */
struct plan_page {
	struct exl3::plan_ctl ctl;
	uint8_t pad[64 - sizeof(struct exl3::plan_ctl) % 64];
	uint64_t skipped[EXL3_DEV_PLAN_CALLS];
};

struct exl3_cuda_plans {
	struct exl3_dev *dev; /* borrowed */
	pthread_mutex_t lock; /* plan_new() and plan_free(): capture and used */
	cudaStream_t capture; /* nothing runs on it */
	uint64_t used;        /* pages */
	struct plan_page *pages, *pages_dev; /* [PLANS_MAX], pinned */
	cudaStream_t stream[STREAMS_MAX];
	unsigned nr_streams;
	uint32_t nr_running; /* atomic */
	uint32_t closing;    /* atomic */
	struct exl3_executor *exec; /* owned */
	/* Its thread only: */
	struct exl3_dev_plan *running[STREAMS_MAX];
	bool lost;
	uint64_t moved_ns, looked_ns;
};

struct plan_skips {
	uint64_t *to; /* the caller's, or NULL */
	uint32_t first, nr;
};

struct exl3_dev_plan {
	struct exl3_cuda_plans *plans; /* borrowed */
	struct exl3_track *track;      /* owned, with the next */
	cudaGraphExec_t graph;
	struct plan_skips *skips;      /* [nr_skips] */
	uint32_t nr_skips;
	unsigned page;                 /* PLANS_MAX: none */
	struct exl3_work work;         /* what the executor is given; only its tag counts */
	uint32_t busy;                 /* atomic: from submit() until the end */
	uint32_t seq;                  /* loop thread; read by the executor while busy */
	uint64_t wait_ns, launched_ns;
};

#ifdef EXL3_EMULATE /* tests/gpu/host_plans.cc: this file on the host, over a small imitation of the runtime */
int exl3_emulate_step(const struct exl3::plan_step *s, cudaStream_t stream);
#define launch_step exl3_emulate_step
#define plan_step_kernel NULL
#else
/* 32 registers: then it fits on an SM beside 384 threads of 168 (MLA, whose clusters of 16 need all SMs of a GPC). */
__global__ static void __maxnreg__(32) plan_step_kernel(const __grid_constant__ struct exl3::plan_step s)
{
	exl3::plan_run_step(&s);
}

static int launch_step(const struct exl3::plan_step *s, cudaStream_t stream)
{
	plan_step_kernel<<<1, 1, 0, stream>>>(*s);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}
#endif

static struct exl3::plan_ctl *ctl_of(const struct exl3_dev_plan *plan)
{
	return &plan->plans->pages[plan->page].ctl;
}

/* ---- the executor's side ---- */

static void plans_start(void *arg)
{
	cudaSetDevice(((struct exl3_cuda_plans *)arg)->dev->ordinal);
}

static void finish(struct exl3_cuda_plans *p, unsigned stream, int result)
{
	struct exl3_dev_plan *plan = p->running[stream];
	const struct plan_page *page = &p->pages[plan->page];
	const uint64_t took = exl3_now_ns() - plan->launched_ns;
	void *tag = plan->work.tag;

	for (uint32_t i = 0; i < plan->nr_skips; i++)
		for (uint32_t j = 0; plan->skips[i].to && j < plan->skips[i].nr; j++)
			plan->skips[i].to[j] = result == -EIO ? 0 : page->skipped[plan->skips[i].first + j];
	p->running[stream] = NULL;
	p->moved_ns = exl3_now_ns();
	__atomic_store_n(&plan->busy, 0, __ATOMIC_RELEASE);
	__atomic_sub_fetch(&p->nr_running, 1, __ATOMIC_RELEASE);
	exl3_executor_done(p->exec, tag, result, took);
}

static bool plans_begin(void *arg, const struct exl3_work *work)
{
	struct exl3_cuda_plans *p = (struct exl3_cuda_plans *)arg;
	struct exl3_dev_plan *plan = (struct exl3_dev_plan *)((char *)work - offsetof(struct exl3_dev_plan, work));
	unsigned s = 0;

	while (s < p->nr_streams && p->running[s])
		s++;
	if (s == p->nr_streams)
		return false;
	p->running[s] = plan;
	plan->launched_ns = p->moved_ns = exl3_now_ns();
	if (!p->lost && cudaGraphLaunch(plan->graph, p->stream[s]) != cudaSuccess)
		p->lost = true;
	if (p->lost)
		finish(p, s, -EIO);
	return true;
}

static unsigned fail_all(struct exl3_cuda_plans *p)
{
	p->lost = true;
	for (unsigned s = 0; s < p->nr_streams; s++)
		if (p->running[s])
			finish(p, s, -EIO);
	return 0;
}

/* One that should have ended, or that nobody wants any more, waits no longer. */
static void give_up(struct exl3_cuda_plans *p, struct exl3_dev_plan *plan, uint64_t now)
{
	if (__atomic_load_n(&p->closing, __ATOMIC_ACQUIRE) || now - plan->launched_ns > plan->wait_ns + LATE_NS)
		__atomic_store_n(&ctl_of(plan)->abort, plan->seq, __ATOMIC_RELEASE);
}

static unsigned plans_progress(void *arg)
{
	struct exl3_cuda_plans *p = (struct exl3_cuda_plans *)arg;
	const uint64_t now = exl3_now_ns();
	const bool look = now - p->looked_ns > LOOK_ERRORS_NS;
	unsigned left = 0;

	if (look)
		p->looked_ns = now;
	for (unsigned s = 0; s < p->nr_streams; s++) {
		struct exl3_dev_plan *plan = p->running[s];
		struct exl3::plan_ctl *ctl = plan ? ctl_of(plan) : NULL;
		bool said;

		if (!plan)
			continue;
		left++;
		said = __atomic_load_n(&ctl->ended, __ATOMIC_ACQUIRE) == plan->seq;
		if (!said)
			give_up(p, plan, now);
		if (!said && !look)
			continue;
		/* Its last kernel has told us, and is about to end. */
		const cudaError_t e = cudaStreamQuery(p->stream[s]);

		if (e != cudaSuccess && e != cudaErrorNotReady)
			return fail_all(p);
		if (!said || e == cudaErrorNotReady)
			continue;
		finish(p, s, ctl->result);
		left--;
	}
	if (left && now - p->moved_ns > EAGER_NS)
		exl3_executor_nap(p->exec, NAP_NS);
	return left;
}

static const struct exl3_executor_ops plans_ops = {plans_start, plans_begin, plans_progress};

/* ---- what all plans of a device share ---- */

static void plans_free(struct exl3_cuda_plans *p)
{
	if (!p)
		return;
	p->exec = exl3_executor_free(p->exec);
	for (unsigned s = 0; s < p->nr_streams; s++)
		cudaStreamDestroy(p->stream[s]);
	if (p->capture)
		cudaStreamDestroy(p->capture);
	cudaFreeHost(p->pages);
	pthread_mutex_destroy(&p->lock);
	free(p);
}

static bool under_mps(const struct exl3_dev *dev)
{
	int mps = 0;

	if (cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, dev->ordinal) == cudaSuccess)
		return mps != 0;
	(void)cudaGetLastError();
	return false;
}

/* How many may wait without holding up our other streams. */
static unsigned streams_allowed(const struct exl3_dev *dev, struct exl3_error *err)
{
	const char *text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
	const long queues = text && *text  ? strtol(text, NULL, 10) :
			    under_mps(dev) ? (long)QUEUES_MPS :
					     (long)QUEUES_DEFAULT;

	if (queues <= (long)QUEUES_OTHERS) {
		exl3_errf(err, -EOPNOTSUPP,
			  "plan: CUDA gives this process %ld hardware queues, so a waiting plan would hold up other "
			  "streams: set CUDA_DEVICE_MAX_CONNECTIONS to %u and one for each plan that may wait",
			  queues, QUEUES_OTHERS);
		return 0;
	}
	return queues - QUEUES_OTHERS < STREAMS_MAX ? (unsigned)queues - QUEUES_OTHERS : STREAMS_MAX;
}

static int plans_new(struct exl3_dev *dev, struct exl3_cuda_plans **ret, struct exl3_error *err)
{
	const unsigned streams = streams_allowed(dev, err);
	struct exl3_cuda_plans *p = streams ? (struct exl3_cuda_plans *)calloc(1, sizeof(*p)) : NULL;
	int code;

	if (!p)
		return streams ? exl3_errf(err, -ENOMEM, "plan: out of memory") : -EOPNOTSUPP;
	p->dev = dev;
	pthread_mutex_init(&p->lock, NULL);
	code = exl3_cuda_err(err,
			     cudaHostAlloc((void **)&p->pages, PLANS_MAX * sizeof(*p->pages), cudaHostAllocMapped),
			     "plan: cudaHostAlloc");
	if (!code) {
		memset(p->pages, 0, PLANS_MAX * sizeof(*p->pages));
		code = exl3_cuda_err(err, cudaHostGetDevicePointer((void **)&p->pages_dev, p->pages, 0),
				     "plan: cudaHostGetDevicePointer");
	}
	/* A step beside a kernel that wants all shared memory: an SM is divided anew only while it is empty. */
	if (!code)
		code = exl3_cuda_err(err,
				     cudaFuncSetAttribute((const void *)plan_step_kernel,
							  cudaFuncAttributePreferredSharedMemoryCarveout,
							  cudaSharedmemCarveoutMaxShared),
				     "plan: cudaFuncSetAttribute");
	if (!code)
		code = exl3_cuda_err(err, cudaStreamCreateWithFlags(&p->capture, cudaStreamNonBlocking),
				     "plan: stream");
	for (; !code && p->nr_streams < streams; p->nr_streams++) {
		code = exl3_cuda_err(err, cudaStreamCreateWithFlags(&p->stream[p->nr_streams], cudaStreamNonBlocking),
				     "plan: stream");
		if (code)
			break;
	}
	if (!code)
		code = exl3_executor_new(&plans_ops, p, SPIN_NS, &p->exec, err);
	if (code) {
		plans_free(p);
		return code;
	}
	exl3_executor_join(p->exec, dev->exec);
	*ret = p;
	return 0;
}

static int plans_get(struct exl3_dev *dev, struct exl3_cuda_plans **ret, struct exl3_error *err)
{
	struct exl3_cuda_plans *p;
	int code = 0;

	pthread_mutex_lock(&dev->memory_lock);
	p = dev->plans;
	if (!p)
		code = plans_new(dev, &p, err);
	if (!code)
		__atomic_store_n(&dev->plans, p, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&dev->memory_lock);
	*ret = p;
	return code;
}

int exl3_cuda_plans_poll(struct exl3_dev *dev, struct exl3_done *done, unsigned max)
{
	struct exl3_cuda_plans *p = __atomic_load_n(&dev->plans, __ATOMIC_ACQUIRE);

	return p ? exl3_executor_poll(p->exec, done, max) : 0;
}

void exl3_cuda_plans_close(struct exl3_dev *dev)
{
	if (!dev->plans)
		return;
	__atomic_store_n(&dev->plans->closing, 1, __ATOMIC_RELEASE);
	cudaSetDevice(dev->ordinal);
	plans_free(dev->plans);
	dev->plans = NULL;
}

/* ---- one plan ---- */

/* Kernels that count invalid ids. */
static bool counts(const struct exl3_work *work)
{
	return work->op == EXL3_OP_MOE || work->op == EXL3_OP_MLA_DECODE;
}

/* What the step behind call @c has to tell. */
static void tell(struct exl3_dev_plan *plan, const struct exl3_dev_plan_call *c, uint32_t *entries,
		 struct exl3::plan_step *step)
{
	step->done = c->done;
	step->result = c->result;
	if (!counts(c->work))
		return;
	step->counters = (unsigned long long *)exl3_cuda_track_counters(plan->track);
	step->skipped = &plan->plans->pages_dev[plan->page].skipped[*entries];
	step->nr_counters = c->work->nr_rows;
	plan->skips[plan->nr_skips++] = (struct plan_skips){c->skipped, *entries, c->work->nr_rows};
	*entries += c->work->nr_rows;
}

static int record(struct exl3_dev_plan *plan, const struct exl3_dev_plan_call *calls, uint32_t nr, cudaStream_t stream)
{
	struct exl3::plan_step blank = {}, step;
	uint32_t entries = 0;

	blank.ctl = &plan->plans->pages_dev[plan->page].ctl;
	blank.state = (struct exl3::plan_state *)exl3_cuda_track_extra(plan->track);
	static_assert(sizeof(struct exl3::plan_state) <= EXL3_CUDA_TRACK_EXTRA, "the track has room for it");
	step = blank;
	step.first = 1;
	for (uint32_t i = 0; i < nr; i++) {
		int ret = 0;

		step.ready = calls[i].ready;
		step.call = i;
		/* Between two calls without words there is nothing to do. */
		if (step.first || step.ready || step.done || step.result || step.nr_counters)
			ret = launch_step(&step, stream);
		if (!ret)
			ret = exl3_cuda_track_run(plan->track, calls[i].work, stream);
		if (ret)
			return ret;
		step = blank;
		tell(plan, &calls[i], &entries, &step);
	}
	step.last = 1;
	step.call = nr;
	return launch_step(&step, stream);
}

static int make_graph(struct exl3_dev_plan *plan, const struct exl3_dev_plan_call *calls, uint32_t nr,
		      struct exl3_error *err)
{
	cudaStream_t stream = plan->plans->capture;
	cudaGraph_t graph = NULL;
	int code = exl3_cuda_err(err, cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "plan: capture");
	cudaError_t e;

	if (code)
		return code;
	code = record(plan, calls, nr, stream);
	e = cudaStreamEndCapture(stream, &graph); /* also ends one that failed */
	if (code)
		exl3_errf(err, code, code == -EOPNOTSUPP ? "plan: no kernel for one of the calls" :
				     code == -ENOMEM     ? "plan: a call does not fit in the workspace" :
							   "plan: a call cannot be captured");
	else
		code = exl3_cuda_err(err, e, "plan: capture");
	if (!code)
		code = exl3_cuda_err(err, cudaGraphInstantiate(&plan->graph, graph, 0), "plan: cudaGraphInstantiate");
	if (graph)
		cudaGraphDestroy(graph);
	return code;
}

static int check_calls(const struct exl3_dev_plan_call *calls, uint32_t nr, struct exl3_error *err)
{
	uint64_t entries = 0;

	if (!nr || nr > EXL3_DEV_PLAN_CALLS)
		return exl3_errf(err, -EINVAL, "plan: %u calls; it has 1 to %u", nr, EXL3_DEV_PLAN_CALLS);
	for (uint32_t i = 0; i < nr; i++) {
		entries += calls[i].work->nr_rows;
		if (((uintptr_t)calls[i].ready | (uintptr_t)calls[i].done | (uintptr_t)calls[i].result) & 3)
			return exl3_errf(err, -EINVAL, "plan: a word of call %u is not aligned to 4 bytes", i);
	}
	if (entries > EXL3_DEV_PLAN_CALLS)
		return exl3_errf(err, -EINVAL, "plan: its calls have %llu entries together; %u is the most",
				 (unsigned long long)entries, EXL3_DEV_PLAN_CALLS);
	return 0;
}

static int check_device(struct exl3_dev *dev, const struct exl3_dev_plan_options *opt, struct exl3_error *err)
{
	if (opt->one_process || under_mps(dev))
		return 0;
	return exl3_errf(err, -EPERM, "plan: this process is no client of an MPS server, and without MPS a client's "
				      "kernels cannot run beside one that waits for them");
}

static int take_page(struct exl3_cuda_plans *p, unsigned *ret, struct exl3_error *err)
{
	static_assert(PLANS_MAX == 64, "a bit each");
	if (!~p->used)
		return exl3_errf(err, -ENOSPC, "plan: the device has %u already", PLANS_MAX);
	*ret = (unsigned)__builtin_ctzll(~p->used);
	p->used |= 1ull << *ret;
	return 0;
}

struct exl3_dev_plan *exl3_cuda_plan_free(struct exl3_dev_plan *plan)
{
	if (!plan)
		return NULL;
	assert(!__atomic_load_n(&plan->busy, __ATOMIC_ACQUIRE));
	cudaSetDevice(plan->plans->dev->ordinal);
	if (plan->graph)
		cudaGraphExecDestroy(plan->graph);
	exl3_cuda_track_free(plan->track);
	if (plan->page < PLANS_MAX) {
		pthread_mutex_lock(&plan->plans->lock);
		plan->plans->used &= ~(1ull << plan->page);
		pthread_mutex_unlock(&plan->plans->lock);
	}
	free(plan->skips);
	free(plan);
	return NULL;
}

int exl3_cuda_plan_new(struct exl3_dev *dev, const struct exl3_dev_plan_call *calls, uint32_t nr,
		       const struct exl3_dev_plan_options *opt, struct exl3_dev_plan **ret, struct exl3_error *err)
{
	const struct exl3_track_options track = {opt->workspace_bytes, 0, opt->deterministic};
	struct exl3_cuda_plans *p = NULL;
	struct exl3_dev_plan *plan;
	int code;

	cudaSetDevice(dev->ordinal);
	code = check_calls(calls, nr, err);
	if (!code)
		code = check_device(dev, opt, err);
	if (!code)
		code = plans_get(dev, &p, err);
	if (code)
		return code;
	plan = (struct exl3_dev_plan *)calloc(1, sizeof(*plan));
	if (!plan)
		return exl3_errf(err, -ENOMEM, "plan: out of memory");
	plan->plans = p;
	plan->page = PLANS_MAX;
	plan->work.op = EXL3_OP_NOP;
	plan->skips = (struct plan_skips *)calloc(nr, sizeof(*plan->skips));
	if (!plan->skips)
		code = exl3_errf(err, -ENOMEM, "plan: out of memory");
	if (!code)
		code = exl3_cuda_track_new(dev, &track, &plan->track, err);
	pthread_mutex_lock(&p->lock);
	if (!code)
		code = take_page(p, &plan->page, err);
	if (!code) {
		memset(&p->pages[plan->page], 0, sizeof(p->pages[plan->page]));
		code = make_graph(plan, calls, nr, err);
	}
	pthread_mutex_unlock(&p->lock);
	if (code) {
		exl3_cuda_plan_free(plan);
		return code;
	}
	*ret = plan;
	return 0;
}

int exl3_cuda_plan_submit(struct exl3_dev_plan *plan, uint32_t epoch, uint64_t wait_ns, void *tag)
{
	struct exl3_cuda_plans *p = plan->plans;
	struct exl3::plan_ctl *ctl = ctl_of(plan);

	if (__atomic_load_n(&plan->busy, __ATOMIC_ACQUIRE))
		return -EBUSY;
	/* Only we count up. */
	if (__atomic_load_n(&p->nr_running, __ATOMIC_ACQUIRE) >= p->nr_streams)
		return -EAGAIN;
	plan->seq += plan->seq == UINT32_MAX ? 2 : 1;
	plan->wait_ns = wait_ns < WAIT_NS_MAX ? wait_ns : WAIT_NS_MAX;
	plan->work.tag = tag;
	ctl->seq = plan->seq;
	ctl->epoch = epoch;
	ctl->wait_ns = plan->wait_ns;
	__atomic_add_fetch(&p->nr_running, 1, __ATOMIC_RELAXED);
	__atomic_store_n(&plan->busy, 1, __ATOMIC_RELAXED);
	if (!exl3_executor_submit(p->exec, &plan->work))
		return 0;
	__atomic_store_n(&plan->busy, 0, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&p->nr_running, 1, __ATOMIC_RELAXED);
	return -EAGAIN;
}

void exl3_cuda_plan_abort(struct exl3_dev_plan *plan)
{
	if (__atomic_load_n(&plan->busy, __ATOMIC_ACQUIRE))
		__atomic_store_n(&ctl_of(plan)->abort, plan->seq, __ATOMIC_RELEASE);
}

uint32_t exl3_cuda_plan_failed_call(const struct exl3_dev_plan *plan)
{
	return ctl_of(plan)->call;
}
