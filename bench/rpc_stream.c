/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rpc_stream.c - what a call costs in the order of a CUDA stream: client processes with streams of their own.
 *
 *   build/bench/rpc_stream [--daemon build/exl3-daemon] [--seconds S] [-o FILE]
 *
 * Starts daemons of its own on the first GPU, with and without an MPS server, and 1, 4, 16 and 48 clients whose
 * operands lie in arenas in GPU memory. Calls are queued ahead of the GPU; no host waits but for the end of a
 * batch. Modes:
 *   inproc                 the backend in this process, works queued ahead: a kernel and its word, no client
 *   direct                 one stream: each call is an empty kernel that depends on the one before
 *   direct-queued          eight streams with a channel each, so eight calls are in flight
 *   ...-linear             likewise, one row of a 128x128 matrix of 4 bits
 * us_per_call is the median over batches of the time of a batch by its calls; a client's own, so what others
 * take is in it. added_us is that less the same work inproc. System calls: libexl3's and the daemon's loop's.
 */
#include "bench/bench.h"
#include "bench/daemon.h"
#include "bench/die.h"
#include "bench/ckpt.h"
#include "bench/rpc_stream/inproc.h"
#include "client/internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define CLIENTS_MAX 48u
#define STREAMS     8u
#define BATCHES_MAX 20000u
#define SIZE        RPC_SIZE
#define PHASES      4u

static const char *const modes[PHASES] = {"direct", "direct-queued", "direct-linear", "direct-queued-linear"};

struct options {
	const char *daemon, *output;
	double seconds; /* of each cell */
	char dir[64], socket[96], model[160];
};

/* In memory that all processes share. */
struct shared {
	uint32_t ready, go, stop, done; /* atomic; go and stop: number of a phase, from 1 */
	double inproc_us[2];            /* NOP, linear */
	struct per_client {
		uint32_t batches[PHASES];
		uint64_t calls[PHASES], syscalls[PHASES];
		float us[PHASES][BATCHES_MAX];
		char error[256];
	} client[CLIENTS_MAX];
};

static struct shared *shared;
static struct bench_file file;

static uint32_t get(const uint32_t *word)
{
	return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

/* ---- a daemon of ours ---- */

static pid_t daemon_start(const struct options *o, bool mps)
{
	pid_t pid = fork();

	if (pid < 0)
		die("fork: %m");
	if (pid == 0) {
		signal(SIGTERM, SIG_DFL);
		prctl(PR_SET_PDEATHSIG, SIGTERM); /* it spins: must not outlive us */
		execl(o->daemon, o->daemon, "--socket", o->socket, "--backend", "cuda", "--mps",
		      mps ? "require" : "off", "--log-level", "warning", "--channels-max", "64", "--model",
		      o->model, (char *)NULL);
		fprintf(stderr, "rpc_stream: %s: %m\n", o->daemon);
		_exit(127);
	}
	bench_daemon_wait(pid, o->socket, true);
	return pid;
}

/* ---- client processes ---- */

/* The few functions of the driver that a client of this kind calls itself. */
static struct {
	int (*init)(unsigned flags);
	int (*device_get)(int *dev, int ordinal);
	int (*ctx_retain)(void **ctx, int dev);
	int (*ctx_set)(void *ctx);
	int (*stream_new)(void **stream, unsigned flags);
	int (*stream_sync)(void *stream);
} cu;

struct work {
	struct exl3_client *c;
	struct exl3_module *mod;
	struct exl3_channel *ch[STREAMS];
	void *stream[STREAMS];
	exl3_ref x, y[STREAMS];
};

/* The clients of an MPS server share some 128 hardware queues; who wants more than are left gets no context. */
static int start_cuda(struct work *w, unsigned nr)
{
	const char *queues = nr == 1 ? "32" : nr == 4 ? "16" : nr == 16 ? "6" : "2";
	static const char *const names[] = {"cuInit",          "cuDeviceGet",    "cuDevicePrimaryCtxRetain",
					    "cuCtxSetCurrent", "cuStreamCreate", "cuStreamSynchronize"};
	void *lib, *ctx, *fn;
	int dev;

	setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues, 1);
	lib = dlopen("libcuda.so.1", RTLD_NOW);
	for (size_t i = 0; lib && i < 6; i++) {
		fn = dlsym(lib, names[i]);
		memcpy((char *)&cu + i * sizeof(fn), &fn, sizeof(fn));
	}
	if (!lib || cu.init(0) || cu.device_get(&dev, 0) || cu.ctx_retain(&ctx, dev) || cu.ctx_set(ctx))
		return -1;
	for (unsigned i = 0; i < STREAMS; i++)
		if (cu.stream_new(&w->stream[i], 1))
			return -1;
	return 0;
}

static int open_all(const struct options *o, bool mps, unsigned nr, struct work *w, char *error, size_t size)
{
	struct exl3_arena *arena;
	struct exl3_model *m;

	if (exl3_connect(o->socket, "rpc_stream", &w->c) < 0)
		return -1;
	if (exl3_mps(w->c) != mps) {
		snprintf(error, size, "the client is %sin the MPS server: %.200s", mps ? "not " : "", exl3_last_error());
		return -1;
	}
	if (start_cuda(w, nr) < 0) {
		snprintf(error, size, "CUDA does not start");
		return -1;
	}
	if (exl3_model_open(w->c, "bench", &m) < 0 || exl3_module_open(m, "l", EXL3_KIND_LINEAR, &w->mod) < 0 ||
	    exl3_arena_new_device(w->c, 1 << 20, &arena) < 0)
		return -1;
	w->x = exl3_arena_ref(arena, exl3_arena_alloc(arena, 2 * SIZE));
	for (unsigned i = 0; i < STREAMS; i++) {
		if (exl3_channel_new(w->c, 256, &w->ch[i]) < 0)
			return -1;
		w->y[i] = exl3_arena_ref(arena, exl3_arena_alloc(arena, 4 * SIZE));
	}
	return 0;
}

static int batch(struct work *w, bool linear, unsigned streams, unsigned calls)
{
	int e = 0;

	for (unsigned k = 0; k < calls; k++)
		for (unsigned i = 0; i < streams && e >= 0; i++)
			e = linear ? exl3_linear_stream(w->ch[i], w->mod, w->x, EXL3_F16, w->y[i], EXL3_F32, 1,
							w->stream[i], NULL) :
				     exl3_nop_stream(w->ch[i], w->stream[i], NULL);
	for (unsigned i = 0; i < streams && e >= 0; i++)
		e = cu.stream_sync(w->stream[i]) ? -EIO : exl3_stream_error(w->ch[i], NULL);
	return e;
}

static uint64_t syscalls(const struct work *w)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < STREAMS; i++)
		n += exl3_channel_syscalls(w->ch[i]);
	return n;
}

static int run_phase(struct work *w, struct per_client *me, unsigned phase, unsigned calls)
{
	unsigned streams = phase % 2 ? STREAMS : 1;
	bool linear = phase >= 2;
	uint64_t before;

	if (batch(w, linear, streams, calls) < 0)
		return -1;
	__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
	while (get(&shared->go) <= phase)
		usleep(200);
	before = syscalls(w);
	while (get(&shared->stop) <= phase && me->batches[phase] < BATCHES_MAX) {
		uint64_t start = exl3_now_ns();

		if (batch(w, linear, streams, calls) < 0)
			return -1;
		me->us[phase][me->batches[phase]++] =
			(float)((double)(exl3_now_ns() - start) / 1000 / (calls * streams));
		me->calls[phase] += calls * streams;
	}
	me->syscalls[phase] = syscalls(w) - before;
	__atomic_fetch_add(&shared->done, 1, __ATOMIC_SEQ_CST);
	return 0;
}

/* Runs in a child. */
static int client_main(const struct options *o, unsigned nth, unsigned nr, bool mps)
{
	struct per_client *me = &shared->client[nth];
	struct work w = {0};

	if (open_all(o, mps, nr, &w, me->error, sizeof(me->error)) == 0) {
		unsigned phase = 0;

		/* Without MPS each call may be a turn of the GPU: short batches, or they would never end. */
		while (phase < PHASES && run_phase(&w, me, phase, mps ? 100 : 10) == 0)
			phase++;
		if (phase == PHASES) {
			exl3_close(w.c);
			return 0;
		}
	}
	if (!me->error[0])
		snprintf(me->error, sizeof(me->error), "%.250s", exl3_last_error());
	if (!me->error[0])
		snprintf(me->error, sizeof(me->error), "a call has failed");
	return 1;
}

/* ---- the table ---- */

static bool wait_for(const uint32_t *word, uint32_t value, unsigned nr, double seconds)
{
	uint64_t end = exl3_now_ns() + (uint64_t)(seconds * 1e9);

	while (get(word) < value) {
		for (unsigned i = 0; i < nr; i++)
			if (shared->client[i].error[0])
				return false;
		if (exl3_now_ns() > end)
			return false;
		usleep(500);
	}
	return true;
}

static void row(struct bench_file *f, unsigned phase, unsigned nr, bool mps, double daemon_calls)
{
	double *us = malloc(nr * BATCHES_MAX * sizeof(*us)), calls = 0, sys = daemon_calls, median, p99;
	size_t n = 0;

	if (!us)
		die("out of memory");
	for (unsigned i = 0; i < nr; i++) {
		const struct per_client *p = &shared->client[i];

		for (uint32_t k = 0; k < p->batches[phase]; k++)
			us[n++] = p->us[phase][k];
		calls += (double)p->calls[phase];
		sys += (double)p->syscalls[phase];
	}
	if (!n)
		die("%s with %u clients: not one batch", modes[phase], nr);
	median = bench_median(us, n);
	p99 = bench_quantile(us, n, 0.99);
	fprintf(f->f, "%s,%u,%s,%.2f,%.2f,%.3f\n", modes[phase], nr, mps ? "yes" : "no", median,
		median - shared->inproc_us[phase >= 2], sys / calls);
	fflush(f->f);
	printf("%-21s %2u clients, %s MPS: %9.2f us a call, p99 %9.2f, all together %8.0f calls/s\n", modes[phase],
	       nr, mps ? "with" : "  no", median, p99, nr * 1e6 / median);
	fflush(stdout);
	free(us);
}

static void measure(const struct options *o, struct bench_file *f, unsigned nr, bool mps)
{
	struct exl3_client *c;
	pid_t pids[CLIENTS_MAX];
	double inproc_us[2] = {shared->inproc_us[0], shared->inproc_us[1]};
	bool fine = true;

	memset(shared, 0, sizeof(*shared));
	memcpy(shared->inproc_us, inproc_us, sizeof(inproc_us));
	for (unsigned i = 0; i < nr; i++) {
		pids[i] = fork();
		if (pids[i] < 0)
			die("fork: %m");
		if (pids[i] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(client_main(o, i, nr, mps));
		}
	}
	if (exl3_connect_flags(o->socket, "rpc_stream", EXL3_CONNECT_NO_ENV, &c) < 0)
		die("%s", exl3_last_error());
	for (unsigned phase = 0; fine && phase < PHASES; phase++) {
		uint64_t before;

		fine = wait_for(&shared->ready, nr * (phase + 1), nr, 60);
		before = bench_daemon_syscalls(c);
		__atomic_store_n(&shared->go, phase + 1, __ATOMIC_SEQ_CST);
		if (fine)
			usleep((useconds_t)(o->seconds * 1e6));
		__atomic_store_n(&shared->stop, phase + 1, __ATOMIC_SEQ_CST);
		fine = fine && wait_for(&shared->done, nr * (phase + 1), nr, 30);
		if (fine)
			row(f, phase, nr, mps, (double)(bench_daemon_syscalls(c) - before));
	}
	for (unsigned i = 0; i < nr; i++) {
		if (!fine)
			kill(pids[i], SIGKILL);
		waitpid(pids[i], NULL, 0);
		if (shared->client[i].error[0])
			printf("%u clients, %s MPS: client %u: %s\n", nr, mps ? "with" : "no", i,
			       shared->client[i].error);
	}
	if (!fine)
		printf("%u clients, %s MPS: left out\n", nr, mps ? "with" : "no");
	exl3_close(c);
}

/* What was measured until then stays: every row was flushed. Children end with us. */
static void ended_early(int sig)
{
	(void)sig;
	rename(file.temporary, file.path);
	_exit(1);
}

static void run_inproc(struct bench_file *f)
{
	for (int i = 0; i < 2; i++)
		fprintf(f->f, "inproc%s,1,,%.2f,0.00,\n", i ? "-linear" : "", shared->inproc_us[i]);
	printf("inproc: %.2f us an empty kernel and its word, %.2f us a linear\n", shared->inproc_us[0],
	       shared->inproc_us[1]);
}

static void parse_options(struct options *o, int argc, char **argv)
{
	for (int i = 1; i < argc; i += 2) {
		const char *v = i + 1 < argc ? argv[i + 1] : NULL;

		if (v && !strcmp(argv[i], "--daemon"))
			o->daemon = v;
		else if (v && !strcmp(argv[i], "--seconds"))
			o->seconds = atof(v);
		else if (v && !strcmp(argv[i], "-o"))
			o->output = v;
		else
			die("usage: rpc_stream [--daemon FILE] [--seconds S] [-o FILE]");
	}
	if (!(o->seconds > 0 && o->seconds < 100))
		die("--seconds must be a positive number");
}

int main(int argc, char **argv)
{
	static const struct ckpt_matrix matrix = {"l", SIZE, SIZE};
	static const unsigned counts[] = {1, 4, 16, 48};
	struct options o = {.daemon = "build/exl3-daemon", .seconds = 0.25};
	char machine[192], gpu[96], driver[48], ceilings[128], folder[96], path[160];
	int status;
	pid_t pid;

	parse_options(&o, argc, argv);
	snprintf(o.dir, sizeof(o.dir), "/tmp/exl3-rpc-XXXXXX");
	if (!mkdtemp(o.dir))
		die("%s: %m", o.dir);
	snprintf(o.socket, sizeof(o.socket), "%s/rpc.sock", o.dir);
	snprintf(folder, sizeof(folder), "%s/model", o.dir);
	snprintf(path, sizeof(path), "%s/model.safetensors", folder);
	snprintf(o.model, sizeof(o.model), "bench=%s", folder);
	if (mkdir(folder, 0700) < 0 || !ckpt_write(folder, 0, NULL, 0, &matrix, 1))
		die("%s: %m", folder);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		die("mmap: %m");
	pid = fork();
	if (pid == 0) {
		_exit(rpc_inproc(shared->inproc_us));
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
		die("the backend does not work in a process of its own");
	bench_ask("nvidia-smi --query-gpu=name --format=csv,noheader", gpu, sizeof(gpu));
	bench_ask("cat /sys/module/nvidia/version", driver, sizeof(driver));
	snprintf(machine, sizeof(machine), "%s, driver %s, %ld processors", gpu, driver, sysconf(_SC_NPROCESSORS_ONLN));
	snprintf(ceilings, sizeof(ceilings), "in one process an empty kernel and its word %.2f us, a linear %.2f us",
		 shared->inproc_us[0], shared->inproc_us[1]);
	file = bench_open(o.output ? o.output : "bench/results/rpc_cuda.csv", argc, argv, machine, ceilings,
		       "mode,clients,mps,us_per_call,added_us,syscalls_per_call");
	signal(SIGTERM, ended_early);
	run_inproc(&file);
	for (int mps = 1; mps >= 0; mps--) {
		pid = daemon_start(&o, mps);
		for (size_t i = 0; i < 4; i++)
			measure(&o, &file, counts[i], mps);
		kill(pid, SIGTERM);
		waitpid(pid, NULL, 0);
	}
	signal(SIGTERM, SIG_IGN);
	bench_close(&file);
	unlink(path);
	rmdir(folder);
	rmdir(o.dir);
	return 0;
}
