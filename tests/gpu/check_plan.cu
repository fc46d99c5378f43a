/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_plan.cu - tracks and plans of the CUDA backend: bits, epochs, ends, neighbours, two processes.
 *
 *       check_plan [--quick] [PART...]      parts: track replay ends beside graph mps; all, in this order
 *
 * Results are compared bit by bit with those of submit(). Each part is a process of its own with a limit of time; the
 * backend comes from $EXL3_BACKEND_DIR/exl3-cuda.so. One line for each statement; exit 0, 1, or 77 without a GPU.
 */
#include "plan_rig.h"

#include "client/cuda/exl3_gpu.h"

#include <math.h>
#include <sys/mman.h>

#define CALLS_MAX 100u
#define MIB       ((size_t)1 << 20)

static int g_replays = 1000;

/* Words of a call, each in a line of its own. */
struct words {
	uint32_t ready, pad0[15];
	uint32_t done;
	int32_t result;
	uint32_t pad1[14];
};

struct plan_rig {
	struct rig r;
	uint32_t nr;
	struct rig_call call[CALLS_MAX];
	struct exl3_dev_plan_call calls[CALLS_MAX];
	uint64_t skipped[CALLS_MAX][2];
	size_t words; /* offset in the arena of [CALLS_MAX] */
	struct exl3_dev_plan *plan;
};

static volatile struct words *words_of(struct plan_rig *p, uint32_t i)
{
	return (volatile struct words *)rig_host(&p->r, p->words) + i;
}

/* The words are the client's: relaxed looks, and order where the protocol has it. */
static uint32_t look(const volatile uint32_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static void put(volatile uint32_t *p, uint32_t v)
{
	__atomic_store_n(p, v, __ATOMIC_RELEASE);
}

static void record(struct plan_rig *p, uint32_t nr, bool one_process)
{
	struct exl3_dev_plan_options opt = {};
	struct exl3_error err;

	opt.one_process = one_process;
	p->nr = nr;
	for (uint32_t i = 0; i < nr; i++) {
		struct words *w = (struct words *)rig_dev(&p->r, p->words) + i;

		p->calls[i].work = &p->call[i].work;
		p->calls[i].skipped = p->skipped[i];
		p->calls[i].ready = &w->ready;
		p->calls[i].result = &w->result;
		p->calls[i].done = &w->done;
	}
	if (p->r.ops->plan_new(p->r.dev, p->calls, nr, &opt, &p->plan, &err))
		die("plan_new: %s", err.text);
}

/* @nr calls; most are small linear ones, as a step of a decoder. */
static void calls_init(struct plan_rig *p, uint32_t nr)
{
	p->words = rig_take(&p->r, CALLS_MAX * sizeof(struct words));
	for (uint32_t i = 0; i < nr; i++)
		rig_call_init(&p->r, &p->call[i], i % 3 ? RIG_ONE : (enum rig_kind)(i / 3 % RIG_KINDS));
}

/* ---- tracks: eager and captured, the bits of submit() ---- */

static int part_track(int sock, const void *arg)
{
	struct exl3_track_options opt = {};
	struct exl3_track *track, *other;
	static struct rig_call call[RIG_KINDS];
	struct exl3_error err;
	cudaStream_t stream;
	struct rig r;
	uint64_t bad, all_bad = 0, counted;

	(void)sock, (void)arg;
	rig_open(&r, 64 * MIB);
	RT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	if (r.ops->track_new(r.dev, &opt, &track, &err) || r.ops->track_new(r.dev, &opt, &other, &err))
		die("track_new: %s", err.text);
	for (int k = 0; k < RIG_KINDS; k++) {
		struct rig_call *c = &call[k];
		cudaGraphExec_t exec;
		cudaGraph_t graph;
		int eager = 0, captured = 0;

		rig_call_init(&r, c, (enum rig_kind)k);
		for (int i = 0; i < 5; i++) {
			rig_fill(&r, c);
			memset(rig_host(&r, c->y), 0xee, c->y_bytes);
			if (r.ops->track_run(track, &c->work, stream))
				die("track_run: %s", rig_names[k]);
			RT(cudaStreamSynchronize(stream));
			eager += rig_same(&r, c, &bad);
			all_bad += bad;
		}
		RT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
		/* What track_run() was given may change then: a graph has its own. */
		struct exl3_rows rows[2] = {c->rows[0], c->rows[1]};
		struct exl3_work work = c->work;

		work.rows = rows;
		if (r.ops->track_run(track, &work, stream))
			die("captured track_run: %s", rig_names[k]);
		memset(rows, 0xff, sizeof(rows));
		memset(&work, 0xff, sizeof(work));
		RT(cudaStreamEndCapture(stream, &graph));
		RT(cudaGraphInstantiate(&exec, graph, 0));
		for (int i = 0; i < 50; i++) {
			rig_fill(&r, c);
			memset(rig_host(&r, c->y), 0xee, c->y_bytes);
			RT(cudaGraphLaunch(exec, stream));
			RT(cudaStreamSynchronize(stream));
			captured += rig_same(&r, c, &bad);
			all_bad += bad;
		}
		RT(cudaGraphExecDestroy(exec));
		RT(cudaGraphDestroy(graph));
		fact(rig_names[k], "a track's bits are those of submit()", eager == 5 && captured == 50,
		     "%d of 5 eager, %d of 50 captured", eager, captured);
	}
	if (r.ops->track_skipped(track, &counted))
		die("track_skipped");
	fact("skipped", "invalid ids are counted alike", counted == all_bad && all_bad > 0, "%llu, by submit() %llu",
	     (unsigned long long)counted, (unsigned long long)all_bad);
	/* All of them in one graph, beside another track and submit(). */
	cudaStream_t second;
	cudaGraphExec_t exec;
	cudaGraph_t graph;
	int right = 0;

	RT(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
	RT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	for (int k = 0; k < RIG_KINDS; k++)
		if (r.ops->track_run(track, &call[k].work, stream))
			die("captured track_run: %s", rig_names[k]);
	RT(cudaStreamEndCapture(stream, &graph));
	RT(cudaGraphInstantiate(&exec, graph, 0));
	for (int i = 0; i < 100; i++) {
		static struct rig_call twin;

		for (int k = 0; k < RIG_KINDS; k++) {
			rig_fill(&r, &call[k]);
			memset(rig_host(&r, call[k].y), 0xee, call[k].y_bytes);
		}
		if (i == 0)
			rig_call_init(&r, &twin, RIG_MOE);
		rig_fill(&r, &twin);
		RT(cudaGraphLaunch(exec, stream));
		if (r.ops->track_run(other, &twin.work, second))
			die("track_run beside");
		bool same;

		RT(cudaStreamSynchronize(second));
		same = rig_same(&r, &twin, NULL); /* by submit(), perhaps beside the graph */
		RT(cudaStreamSynchronize(stream));
		for (int k = 0; k < RIG_KINDS; k++)
			same = rig_same(&r, &call[k], NULL) && same;
		right += same;
	}
	fact("beside", "tracks run beside each other and submit()", right == 100, "%d of 100 right", right);
	r.ops->track_free(track);
	r.ops->track_free(other);
	rig_close(&r);
	return facts_failed;
}

/* ---- 100 calls, 1000 replays, new operands each time ---- */

static int part_replay(int sock, const void *arg)
{
	static struct plan_rig p;
	uint64_t wrong = 0, early = 0, counters = 0;
	double took = 0;

	(void)sock, (void)arg;
	rig_open(&p.r, 256 * MIB);
	calls_init(&p, CALLS_MAX);
	record(&p, CALLS_MAX, true);
	for (int t = 0; t < g_replays; t++) {
		/* Through 0. */
		const uint32_t epoch = (uint32_t)t - 400u;

		if (t == 0)
			for (uint32_t i = 0; i < p.nr; i++)
				put(&words_of(&p, i)->ready, epoch - 1), put(&words_of(&p, i)->done, epoch - 1);
		for (uint32_t i = 0; i < p.nr; i++)
			memset(rig_host(&p.r, p.call[i].y), 0xee, p.call[i].y_bytes);
		const double begin = now_ms();

		if (p.r.ops->plan_submit(p.plan, epoch, 10000000000ull, &p))
			die("plan_submit");
		for (uint32_t i = 0; i < p.nr; i++) {
			volatile struct words *w = words_of(&p, i);

			/* Until it is told so, nothing of the call may run. */
			if ((t + i) % 97 == 0)
				usleep(200);
			early += look(&w->done) == epoch || *(volatile uint16_t *)rig_host(&p.r, p.call[i].y) != 0xeeee;
			rig_fill(&p.r, &p.call[i]);
			put(&w->ready, epoch);
			while (look(&w->done) != epoch)
				if (now_ms() - begin > 10000)
					die("call %u of replay %d is never done", i, t);
			wrong += w->result != 0;
		}
		if (rig_wait(&p.r, &p, 10000))
			die("replay %d failed", t);
		took += now_ms() - begin;
		for (uint32_t i = 0; i < p.nr; i++) {
			uint64_t bad;

			wrong += !rig_same(&p.r, &p.call[i], &bad);
			counters += bad != p.skipped[i][0] + p.skipped[i][1];
		}
	}
	fact("replay", "100 calls, 1000 replays, new operands each time: all right", !wrong, "%llu wrong of %d",
	     (unsigned long long)wrong, g_replays * (int)CALLS_MAX);
	fact("replay_early", "nothing passes on an old value", !early, "%llu did", (unsigned long long)early);
	fact("replay_skipped", "invalid ids are counted for each call and replay", !counters, "%llu calls differ",
	     (unsigned long long)counters);
	printf("%-22s | %.1f us a call, the client's part of it on the host\n", "replay_time",
	       took * 1e3 / g_replays / CALLS_MAX);
	p.r.ops->plan_free(p.plan);
	rig_close(&p.r);
	return facts_failed;
}

/* ---- clients that stop, deadlines, aborts ---- */

/* Signals @calls, then stops; what the replay and the words say. */
static void stop_after(struct plan_rig *p, uint32_t calls, bool abort, const char *name)
{
	static uint32_t epoch;
	const int want = abort ? -ECANCELED : -ETIMEDOUT;
	bool right = true;
	int result;

	epoch++;
	for (uint32_t i = 0; i < p->nr; i++) {
		words_of(p, i)->ready = words_of(p, i)->done = epoch - 1;
		words_of(p, i)->result = 55;
	}
	const double begin = now_ms();

	if (p->r.ops->plan_submit(p->plan, epoch, abort ? 10000000000ull : 50000000ull, p))
		die("plan_submit");
	for (uint32_t i = 0; i < calls; i++) {
		rig_fill(&p->r, &p->call[i]);
		put(&words_of(p, i)->ready, epoch);
	}
	if (abort) {
		while (calls && look(&words_of(p, calls - 1)->done) != epoch)
			;
		sleep_ms(5);
		p->r.ops->plan_abort(p->plan);
	}
	result = rig_wait(&p->r, p, 10000);
	const double took = now_ms() - begin;

	for (uint32_t i = 0; i < p->nr; i++) {
		const volatile struct words *w = words_of(p, i);

		if (!calls)
			right = right && w->done == epoch - 1 && w->result == 55;
		else
			right = right && w->done == epoch && w->result == (i < calls ? 0 : want);
		if (i < calls)
			right = right && rig_same(&p->r, &p->call[i], NULL);
	}
	right = right && result == (calls ? want : -EAGAIN) && p->r.ops->plan_failed_call(p->plan) == calls;
	fact(name, "ends in time, with that error from there on", right && took < 1000, "%d at call %u after %.0f ms", result,
	     p->r.ops->plan_failed_call(p->plan), took);
	/* Then it goes on as if nothing had been. */
	epoch += calls != 0;
	right = true;
	if (p->r.ops->plan_submit(p->plan, epoch, 10000000000ull, p))
		die("plan_submit");
	for (uint32_t i = 0; i < p->nr; i++) {
		rig_fill(&p->r, &p->call[i]);
		put(&words_of(p, i)->ready, epoch);
	}
	result = rig_wait(&p->r, p, 10000);
	for (uint32_t i = 0; i < p->nr; i++)
		right = right && words_of(p, i)->result == 0 && rig_same(&p->r, &p->call[i], NULL);
	fact(name, "and the next replay is right", !result && right, "%d", result);
}

static int part_ends(int sock, const void *arg)
{
	static struct plan_rig p;
	struct exl3_dev_plan_options opt = {};
	struct exl3_dev_plan *refused = NULL;
	struct exl3_error err;

	(void)sock, (void)arg;
	rig_open(&p.r, 64 * MIB);
	calls_init(&p, 21);
	record(&p, 21, true);
	stop_after(&p, 0, false, "never_ready");
	stop_after(&p, 0, true, "abort_at_once");
	stop_after(&p, 7, false, "deadline");
	stop_after(&p, 7, true, "abort");
	stop_after(&p, 20, true, "abort_last");
	opt.one_process = false;
	fact("without_mps", "refused", p.r.ops->plan_new(p.r.dev, p.calls, 1, &opt, &refused, &err) == -EPERM, "%s",
	     err.text);
	fact("busy", "one replay at a time", !p.r.ops->plan_submit(p.plan, 1000, 10000000000ull, &p) &&
						      p.r.ops->plan_submit(p.plan, 1001, 1, &p) == -EBUSY,
	     "submitted twice");
	p.r.ops->plan_abort(p.plan);
	rig_wait(&p.r, &p, 10000);
	p.r.ops->plan_free(p.plan);
	/* Closing while nothing runs, and plans of other sizes before. */
	for (uint32_t nr = 1; nr < 5; nr++) {
		record(&p, nr, true);
		p.r.ops->plan_free(p.plan);
	}
	rig_close(&p.r);
	return facts_failed;
}

/* ---- what waits beside others ---- */

static int part_beside(int sock, const void *arg)
{
	enum { MOST = 40 };
	static struct plan_rig p;
	struct exl3_dev_plan *plan[MOST];
	struct exl3_dev_plan_options opt = {};
	struct exl3_error err;
	double alone = 1e9, beside = 1e9;
	uint32_t waiting = 0;
	int wrong = 0, last = 0;

	(void)sock, (void)arg;
	opt.one_process = true;
	opt.workspace_bytes = 32 * MIB;
	rig_open(&p.r, 64 * MIB);
	calls_init(&p, RIG_KINDS * 3);
	record(&p, RIG_KINDS * 3, true);
	for (uint32_t i = 0; i < MOST; i++)
		if (p.r.ops->plan_new(p.r.dev, p.calls, 3, &opt, &plan[i], &err))
			die("plan_new: %s", err.text);
	for (int t = 0; t < 20; t++) {
		const double begin = now_ms();

		for (uint32_t i = 0; i < p.nr; i++)
			wrong += rig_submit(&p.r, &p.call[i].work) != 0;
		alone = fmin(alone, now_ms() - begin);
	}
	/* Nobody signals these: epoch 5 while the words are at 0. */
	while (waiting < MOST && !(last = p.r.ops->plan_submit(plan[waiting], 5, 20000000000ull, &plan[waiting])))
		waiting++;
	fact("beside_most", "no more plans run than hardware queues allow; more are refused", waiting == 16 && last == -EAGAIN,
	     "%u wait, then %d", waiting, last);
	sleep_ms(20);
	for (int t = 0; t < 20; t++) {
		const double begin = now_ms();

		for (uint32_t i = 0; i < p.nr; i++) {
			rig_fill(&p.r, &p.call[i]);
			wrong += rig_submit(&p.r, &p.call[i].work) != 0;
		}
		beside = fmin(beside, now_ms() - begin);
		for (uint32_t i = 0; i < p.nr; i++)
			wrong += !rig_same(&p.r, &p.call[i], NULL);
	}
	fact("beside_submit", "submit() goes on beside the most waiting plans, every kind of call, all right",
	     !wrong && beside < 2 * alone + 1, "%.2f ms for %u calls, %.2f without them, %d wrong", beside, p.nr, alone, wrong);
	/* Making and freeing memory that the loop's threads do meanwhile. */
	double begin = now_ms();
	struct exl3_slab *slab;
	struct exl3_arena *arena;
	struct exl3_dev_plan *extra;

	if (p.r.ops->slab_new(p.r.dev, MIB, &slab, &err) || p.r.ops->arena_new(p.r.dev, MIB, &arena, &err))
		die("memory: %s", err.text);
	p.r.ops->slab_free(slab);
	const double memory_ms = now_ms() - begin;

	begin = now_ms();
	if (p.r.ops->plan_new(p.r.dev, p.calls, 3, &opt, &extra, &err))
		die("plan_new: %s", err.text);
	const double new_ms = now_ms() - begin;

	begin = now_ms();
	p.r.ops->plan_free(extra);
	const double free_ms = now_ms() - begin;

	fact("beside_memory", "slabs, arenas and plans are made, and slabs and plans freed, beside waiting plans",
	     memory_ms < 1000 && new_ms < 1000 && free_ms < 1000, "%.1f ms, plan %.1f ms, freed %.1f ms", memory_ms, new_ms,
	     free_ms);
	/* One of them ends; another takes its place. */
	p.r.ops->plan_abort(plan[3]);
	const int aborted = rig_wait(&p.r, &plan[3], 5000);

	for (uint32_t i = 0; i < p.nr; i++)
		words_of(&p, i)->ready = 0;
	if (p.r.ops->plan_submit(p.plan, 1, 10000000000ull, &p))
		die("plan_submit");
	wrong = 0;
	for (uint32_t i = 0; i < p.nr; i++) {
		rig_fill(&p.r, &p.call[i]);
		put(&words_of(&p, i)->ready, 1);
	}
	const int other = rig_wait(&p.r, &p, 10000);

	for (uint32_t i = 0; i < p.nr; i++)
		wrong += !rig_same(&p.r, &p.call[i], NULL);
	fact("beside_other", "an aborted plan makes room, and another runs beside those that wait",
	     aborted == -EAGAIN && !other && !wrong, "%d, then %d, %d wrong", aborted, other, wrong);
	for (uint32_t i = 0; i < waiting; i++)
		p.r.ops->plan_abort(plan[i]);
	for (uint32_t i = 1; i < waiting; i++) {
		const double limit = now_ms() + 5000;
		struct exl3_done done;

		while (!p.r.ops->poll(p.r.dev, &done, 1))
			if (now_ms() > limit)
				die("an aborted plan does not end");
	}
	for (uint32_t i = 0; i < MOST; i++)
		p.r.ops->plan_free(plan[i]);
	p.r.ops->plan_free(p.plan);
	p.r.ops->arena_free(arena);
	rig_close(&p.r);
	return facts_failed;
}

/* ---- both sides graphs ---- */

/* x of the next call from y of the one before, and for the first from the number of the launch. */
__global__ static void mix(uint16_t *x, const uint16_t *y, uint32_t nr, uint32_t *launches)
{
	__shared__ uint32_t number; /* one block: all threads see the same */

	if (threadIdx.x == 0)
		number = launches ? (*launches)++ : 0;
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < nr; i += blockDim.x) {
		const uint32_t v = y ? y[i] : (number * 2654435761u + i * 40503u) >> 8;

		x[i] = (uint16_t)((v & 0x87ff) | 0x3000);
	}
}

/* The client's graph: every call's operands, signal and wait, captured once. */
static cudaGraphExec_t client_graph(struct exl3_gpu *g, char *base, const struct rig_call *call, uint32_t nr,
				    uint32_t *launches, cudaStream_t stream)
{
	cudaGraphExec_t exec;
	cudaGraph_t graph;

	RT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	for (uint32_t i = 0; i < nr; i++) {
		mix<<<1, 256, 0, stream>>>((uint16_t *)(base + call[i].x), i ? (uint16_t *)(base + call[i - 1].y) : NULL,
					   (uint32_t)call[i].x_bytes / 2, i ? NULL : launches);
		if (exl3_gpu_enqueue(g, i, stream))
			die("exl3_gpu_enqueue");
	}
	RT(cudaStreamEndCapture(stream, &graph));
	RT(cudaGraphInstantiate(&exec, graph, 0));
	RT(cudaGraphDestroy(graph));
	return exec;
}

static void gpu_words(struct exl3_gpu_words *to, char *base, size_t words, uint32_t nr)
{
	for (uint32_t i = 0; i < nr; i++) {
		struct words *w = (struct words *)(base + words) + i;

		to[i] = {&w->ready, &w->done, &w->result};
	}
}

/* A chain of one-row calls, each k wide in and at least so wide out. */
static void chain_init(struct plan_rig *p, uint32_t nr)
{
	p->words = rig_take(&p->r, CALLS_MAX * sizeof(struct words));
	for (uint32_t i = 0; i < nr; i++)
		rig_call_init(&p->r, &p->call[i], i % 5 == 4 ? RIG_MLP : RIG_ONE);
	/* MLP here has several rows, and a call before it has only one row of results: make it one too. */
	for (uint32_t i = 0; i < nr; i++)
		if (p->call[i].kind == RIG_MLP) {
			p->call[i].rows[0].m = 1;
			p->call[i].x_bytes = p->call[i].rows[0].x_stride;
			p->call[i].y_bytes = p->call[i].rows[0].y_stride;
		}
}

static int part_graph(int sock, const void *arg)
{
	static struct plan_rig p;
	struct exl3_gpu_words words[CALLS_MAX];
	struct exl3_gpu *g;
	uint32_t *launches;
	cudaStream_t stream;
	int wrong = 0, failed = 0;

	(void)sock, (void)arg;
	rig_open(&p.r, 64 * MIB);
	chain_init(&p, CALLS_MAX);
	record(&p, CALLS_MAX, true);
	RT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	RT(cudaMalloc((void **)&launches, 4));
	RT(cudaMemset(launches, 0, 4));
	gpu_words(words, (char *)p.r.arena->dev_ptr, p.words, p.nr);
	if (exl3_gpu_new(words, p.nr, 10000000000ull, &g))
		die("exl3_gpu_new");
	cudaGraphExec_t exec = client_graph(g, (char *)p.r.arena->dev_ptr, p.call, p.nr, launches, stream);
	const double begin = now_ms();

	for (int t = 0; t < g_replays; t++) {
		if (p.r.ops->plan_submit(p.plan, (uint32_t)t + 1, 10000000000ull, &p))
			die("plan_submit");
		RT(cudaGraphLaunch(exec, stream));
		failed += rig_wait(&p.r, &p, 20000) != 0;
		RT(cudaStreamSynchronize(stream));
		failed += exl3_gpu_error(g, NULL) != 0;
		/* Each y is that of its own x, and each x comes from the y before: one comparison in each replay would do
		 * for the chain, all of them now and then. */
		for (uint32_t i = t % 50 ? p.nr - 1 : 0; i < p.nr; i++)
			wrong += !rig_same(&p.r, &p.call[i], NULL);
	}
	fact("graph", "both sides graphs, replayed: all right", !wrong && !failed, "%d wrong, %d failed of %d", wrong, failed,
	     g_replays);
	printf("%-22s | %.1f us a call with the comparisons\n", "graph_time", (now_ms() - begin) * 1e3 / g_replays / p.nr);
	/* Nobody runs the plan: the client's graph ends with an error, once, and then all is well again. */
	struct exl3_gpu *brief;
	uint32_t call = 77;

	if (exl3_gpu_new(words, p.nr, 20000000, &brief) || exl3_gpu_set_epoch(brief, (uint32_t)g_replays))
		die("exl3_gpu_new");
	cudaGraphExec_t lonely = client_graph(brief, (char *)p.r.arena->dev_ptr, p.call, p.nr, launches, stream);
	const double start_ms = now_ms();

	RT(cudaGraphLaunch(lonely, stream));
	RT(cudaStreamSynchronize(stream));
	const double took = now_ms() - start_ms;
	const int error = exl3_gpu_error(brief, &call);

	fact("graph_alone", "a client whose plan does not run goes on, with one timeout for all its calls",
	     error == -ETIMEDOUT && call == 0 && took < 500 && !exl3_gpu_error(brief, NULL), "%d at call %u after %.0f ms",
	     error, call, took);
	/* The words are an epoch ahead of the plan now: the next one is for both. */
	exl3_gpu_set_epoch(g, (uint32_t)g_replays + 1);
	if (p.r.ops->plan_submit(p.plan, (uint32_t)g_replays + 2, 10000000000ull, &p))
		die("plan_submit");
	RT(cudaGraphLaunch(exec, stream));
	const int after = rig_wait(&p.r, &p, 20000);

	RT(cudaStreamSynchronize(stream));
	wrong = exl3_gpu_error(g, NULL) != 0;
	for (uint32_t i = 0; i < p.nr; i++)
		wrong += !rig_same(&p.r, &p.call[i], NULL);
	fact("graph_after", "and the next replay is right", !after && !wrong, "%d, %d wrong", after, wrong);
	exl3_gpu_free(brief);
	exl3_gpu_free(g);
	p.r.ops->plan_free(p.plan);
	rig_close(&p.r);
	return facts_failed;
}

/* ---- the client in another process ---- */

/* What the daemon's process tells the client's, with the arena's descriptor. */
struct letter {
	size_t bytes, words, doorbell;
	uint32_t nr, replays;
	struct {
		size_t x, y, x_bytes;
	} call[CALLS_MAX];
};

struct mps_job {
	const char *dir;
	int sock; /* of the pair between both */
};

static int mps_client(int sock, const void *arg)
{
	const struct mps_job *job = (const struct mps_job *)arg;
	static struct rig_call call[CALLS_MAX];
	struct exl3_gpu_words words[CALLS_MAX];
	static struct letter l;
	struct exl3_gpu *g;
	uint32_t *launches;
	cudaStream_t stream;
	char *dev;
	int fd = -1, errors = 0;

	(void)sock;
	mps_env(job->dir);
	if (!recv_msg(job->sock, &l, sizeof(l), &fd, 20000) || fd < 0)
		die("client: no arena");
	char *host = (char *)mmap(NULL, l.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (host == MAP_FAILED)
		die("client: mmap: %s", strerror(errno));
	RT(cudaHostRegister(host, l.bytes, cudaHostRegisterMapped));
	RT(cudaHostGetDevicePointer((void **)&dev, host, 0));
	RT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	RT(cudaMalloc((void **)&launches, 4));
	RT(cudaMemset(launches, 0, 4));
	for (uint32_t i = 0; i < l.nr; i++) {
		call[i].x = l.call[i].x;
		call[i].y = l.call[i].y;
		call[i].x_bytes = l.call[i].x_bytes;
	}
	gpu_words(words, dev, l.words, l.nr);
	if (exl3_gpu_new(words, l.nr, 5000000000ull, &g))
		die("client: exl3_gpu_new");
	cudaGraphExec_t exec = client_graph(g, dev, call, l.nr, launches, stream);
	volatile uint32_t *bell = (volatile uint32_t *)(host + l.doorbell), *go = bell + 16;

	for (uint32_t t = 1; t <= l.replays; t++) {
		put(bell, t); /* the plan is launched by the daemon's host meanwhile */
		RT(cudaGraphLaunch(exec, stream));
		RT(cudaStreamSynchronize(stream));
		errors += exl3_gpu_error(g, NULL) != 0;
		/* The daemon's process compares. */
		for (const double limit = now_ms() + 10000; look(go) != t;)
			if (now_ms() > limit)
				die("client: the other side is gone");
	}
	exl3_gpu_free(g);
	return errors ? 1 : 0;
}

static int mps_daemon(int sock, const void *arg)
{
	const struct mps_job *job = (const struct mps_job *)arg;
	static struct plan_rig p;
	static struct letter l;
	uint32_t wrong = 0, failed = 0;
	double took = 0;

	(void)sock;
	mps_env(job->dir);
	rig_open(&p.r, 64 * MIB);
	chain_init(&p, 40);
	record(&p, 40, false);
	l.doorbell = rig_take(&p.r, 256);
	l.bytes = p.r.arena->bytes;
	l.words = p.words;
	l.nr = p.nr;
	l.replays = (uint32_t)g_replays / 2;
	for (uint32_t i = 0; i < p.nr; i++)
		l.call[i] = {p.call[i].x, p.call[i].y, p.call[i].x_bytes};
	if (!send_msg(job->sock, &l, sizeof(l), p.r.arena->fd))
		die("daemon: cannot send");
	volatile uint32_t *bell = (volatile uint32_t *)rig_host(&p.r, l.doorbell), *go = bell + 16;

	for (uint32_t t = 1; t <= l.replays; t++) {
		for (const double limit = now_ms() + 15000; look(bell) != t;)
			if (now_ms() > limit)
				die("daemon: the client is gone");
		const double begin = now_ms();

		if (p.r.ops->plan_submit(p.plan, t, 5000000000ull, &p))
			die("daemon: plan_submit");
		failed += rig_wait(&p.r, &p, 20000) != 0;
		took += now_ms() - begin;
		for (uint32_t i = t % 50 ? p.nr - 1 : 0; i < p.nr; i++)
			wrong += !rig_same(&p.r, &p.call[i], NULL);
		put(go, t);
	}
	fact("mps", "client graph and daemon graph in two processes under MPS: all right", !wrong && !failed,
	     "%u wrong, %u failed of %u", wrong, failed, l.replays);
	printf("%-22s | %.2f us a call of one row, both sides\n", "mps_time", took * 1e3 / l.replays / p.nr);
	p.r.ops->plan_free(p.plan);
	rig_close(&p.r);
	return facts_failed;
}

static int part_mps(int sock, const void *arg)
{
	struct mps m;
	int sv[2], daemon_rc, client_rc;

	(void)sock, (void)arg;
	if (system("command -v nvidia-cuda-mps-control >/dev/null 2>&1") != 0) {
		printf("%-22s | skipped: no nvidia-cuda-mps-control\n", "mps");
		return 0;
	}
	if (!mps_start(&m, true))
		die("MPS does not start");
	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sv) < 0)
		die("socketpair: %s", strerror(errno));
	const struct mps_job of_daemon = {m.dir, sv[0]}, of_client = {m.dir, sv[1]};
	struct child d = start(mps_daemon, &of_daemon, 60), c = start(mps_client, &of_client, 60);

	client_rc = finish(&c, 60000);
	daemon_rc = finish(&d, 10000);
	mps_stop(&m);
	fact("mps_ends", "both processes end well", !client_rc && (!daemon_rc || daemon_rc == 1), "client %d, daemon %d",
	     client_rc, daemon_rc);
	return facts_failed || daemon_rc == 1;
}

/* ---- */

static const struct {
	const char *name;
	int (*fn)(int, const void *);
	unsigned seconds;
} parts[] = {
	{"track", part_track, 60}, {"replay", part_replay, 60}, {"ends", part_ends, 30},
	{"beside", part_beside, 60}, {"graph", part_graph, 60}, {"mps", part_mps, 100},
};

int main(int argc, char **argv)
{
	int worst = 0, named = 0;

	skip_without_gpu("check_plan");
	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], "--quick"))
			g_replays = 100;
		else
			named++;
	for (const auto &p : parts) {
		bool wanted = !named;

		for (int i = 1; i < argc; i++)
			wanted = wanted || !strcmp(argv[i], p.name);
		if (!wanted)
			continue;
		struct child c = start(p.fn, NULL, p.seconds);
		const int status = finish(&c, (int)p.seconds * 1000);

		if (status == 77)
			return 77;
		if (status)
			printf("check_plan: %s: %s (%d)\n", p.name, status == 1 ? "failed" : "broke", status);
		worst = status ? 1 : worst;
	}
	printf("check_plan: %s\n", worst ? "failed" : "all holds");
	return worst;
}
