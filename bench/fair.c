/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fair.c - shares of several tenants that want more than the device has, and a light one beside a flood.
 *
 *   build/bench/fair [--daemon FILE] [--backend B] --model DIR [--module NAME] [--mlp] [--rows N]
 *                    [--chunk-us N] [--spin-us N] [--arena host|device] [--seconds S] [-o FILE]
 *
 * Needs root: tenants are told apart by uid, and every client process here is another one. Modes:
 *   shares-1:1:1, shares-1:2:4   three tenants of these weights, two clients each, which keep 8 requests in
 *               flight, of a sixteenth of --rows rows; share: of all rows; jain: index of rate over weight
 *   alone       a client that sends one row, waits for it, and pauses for up to 2 chunks
 *   beside      the same beside a tenant that keeps 8 requests of --rows rows in flight
 *   flood, flood-whole   that tenant alone, in slices and with chunk-us = 0: what slices cost
 * chunk_us is the mean time on the device of one launch, as the daemon counts it; beside: of the flood's
 * launches only. On a machine with many processors daemon and light client spin (--spin-us), so that waiting
 * for a turn is what is measured and not waiting for a processor to wake up.
 */
#include "bench/bench.h"
#include "bench/daemon.h"
#include "bench/die.h"
#include "client/internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define UID         20001 /* of the first tenant; no such users are needed */
#define TENANTS     3
#define CLIENTS_MAX 6
#define DEPTH       8
#define SAMPLES_MAX 100000

struct options {
	const char *daemon, *backend, *model, *module, *output;
	bool mlp, device_memory;
	unsigned rows, chunk_us, spin_us;
	double seconds;
	char dir[64], socket[96];
};

/* In memory that the client processes share with us. */
struct shared {
	uint32_t ready, go, stop; /* atomic */
	struct per_client {
		uint64_t rows; /* atomic, as the next two; of requests that are complete */
		uint64_t calls, exec_ns;
		uint32_t samples;
		float us[SAMPLES_MAX];
		char error[256];
	} client[CLIENTS_MAX];
};

static struct shared *shared;

/* ---- a daemon of ours ---- */

static pid_t daemon_start(const struct options *o, const unsigned weight[TENANTS])
{
	char model[512], chunk[16], spin[16], text[TENANTS][2][64];
	const char *argv[32];
	int n = 0;
	pid_t pid;

	snprintf(model, sizeof(model), "bench=%s", o->model);
	snprintf(chunk, sizeof(chunk), "%u", o->chunk_us);
	snprintf(spin, sizeof(spin), "%u", o->spin_us);
	argv[n++] = o->daemon;
	argv[n++] = "--socket", argv[n++] = o->socket;
	argv[n++] = "--backend", argv[n++] = o->backend;
	argv[n++] = "--log-level", argv[n++] = "warning";
	argv[n++] = "--model", argv[n++] = model;
	argv[n++] = "--chunk-us", argv[n++] = chunk;
	argv[n++] = "--spin-us", argv[n++] = spin;
	argv[n++] = "--mps", argv[n++] = "off"; /* no client runs kernels of its own */
	for (int t = 0; t < TENANTS; t++) {
		snprintf(text[t][0], sizeof(text[t][0]), "t%d:users=%d", t, UID + t);
		snprintf(text[t][1], sizeof(text[t][1]), "t%d:weight=%u", t, weight[t] * 100);
		argv[n++] = "--tenant", argv[n++] = text[t][0];
		argv[n++] = "--tenant", argv[n++] = text[t][1];
	}
	argv[n] = NULL;
	pid = fork();
	if (pid < 0)
		die("fork: %m");
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGTERM);
		execv(o->daemon, (char *const *)(uintptr_t)argv);
		fprintf(stderr, "fair: %s: %m\n", o->daemon);
		_exit(127);
	}
	bench_daemon_wait(pid, o->socket, true);
	return pid;
}

/* Launches and their time since the worker started. */
static void launches(const struct options *o, uint64_t *nr, uint64_t *ns)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	struct exl3_client *c;

	if (exl3_connect(o->socket, "fair", &c) < 0)
		die("connect: %s", exl3_last_error());
	reply = bench_daemon_status(c);
	*nr = reply->status->launches;
	*ns = reply->status->launch_ns;
	exl3_close(c);
}

/* ---- client processes ---- */

struct work {
	struct exl3_client *c;
	struct exl3_channel *ch;
	struct exl3_module *mod;
	exl3_ref x, y;
};

/* The process becomes one with CUDA of its own, as a framework is. */
static void start_cuda(void)
{
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
	int (*init)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : NULL;
	int (*retain)(void **, int) =
		cuda ? (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain") : NULL;
	int (*current)(void *) = cuda ? (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent") : NULL;

	if (!init || !retain || !current || init(0) || retain(&context, 0) || current(context))
		die("no CUDA in a client process");
}

static int work_open(const struct options *o, unsigned rows, struct work *w)
{
	struct exl3_module_info info;
	struct exl3_arena *arena;
	struct exl3_model *m;

	if (exl3_connect(o->socket, "fair", &w->c) < 0 || exl3_channel_new(w->c, 16, &w->ch) < 0 ||
	    exl3_model_open(w->c, "bench", &m) < 0 ||
	    exl3_module_open(m, o->module, o->mlp ? EXL3_KIND_MLP : EXL3_KIND_LINEAR, &w->mod) < 0)
		return -1;
	exl3_module_get_info(w->mod, &info);
	if (o->device_memory)
		start_cuda();
	if ((o->device_memory ? exl3_arena_new_device : exl3_arena_new)(
		    w->c, 2ull * rows * (info.k_logical + info.n_logical) + 8192, &arena) < 0)
		return -1;
	w->x = exl3_arena_ref(arena, exl3_arena_alloc(arena, 2ull * rows * info.k_logical));
	w->y = exl3_arena_ref(arena, exl3_arena_alloc(arena, 2ull * rows * info.n_logical));
	return 0;
}

static int send_rows(const struct options *o, struct work *w, unsigned rows)
{
	struct exl3_sqe *sqe = exl3_sq_get(w->ch);

	if (!sqe)
		return -1;
	if (o->mlp)
		exl3_prep_mlp(sqe, w->mod, w->x, EXL3_F16, w->y, EXL3_F16, rows);
	else
		exl3_prep_linear(sqe, w->mod, w->x, EXL3_F16, w->y, EXL3_F16, rows);
	return exl3_submit(w->ch) < 0 ? -1 : 0;
}

static int take(struct work *w, struct per_client *me)
{
	struct exl3_cqe cqe;

	if (exl3_wait(w->ch, &cqe, 60000000000ull) != 1 || cqe.result)
		return -1;
	__atomic_fetch_add(&me->calls, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&me->exec_ns, cqe.exec_ns, __ATOMIC_RELAXED);
	return 0;
}

static bool running(void)
{
	return !__atomic_load_n(&shared->stop, __ATOMIC_RELAXED);
}

static void wait_go(void)
{
	__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
	while (!__atomic_load_n(&shared->go, __ATOMIC_ACQUIRE))
		usleep(200);
}

/* Keeps DEPTH requests of @rows rows in flight. */
static int flood(const struct options *o, struct per_client *me, unsigned rows)
{
	struct work w = {0};

	if (work_open(o, rows, &w) < 0 || send_rows(o, &w, rows) < 0 || take(&w, me) < 0)
		return -1;
	wait_go();
	for (int i = 0; i < DEPTH; i++) {
		if (send_rows(o, &w, rows) < 0)
			return -1;
	}
	while (running()) {
		if (take(&w, me) < 0 || send_rows(o, &w, rows) < 0)
			return -1;
		__atomic_fetch_add(&me->rows, rows, __ATOMIC_RELAXED);
	}
	return 0;
}

/* One row at a time, at moments that have nothing to do with the flood's. */
static int light(const struct options *o, struct per_client *me)
{
	unsigned short seed[3] = {1, 2, 3};
	struct work w = {0};

	if (work_open(o, 1, &w) < 0)
		return -1;
	exl3_channel_set_spin(w.ch, o->spin_us > 50 ? 10000000 : EXL3_SPIN_DEFAULT_NS);
	for (int i = 0; i < 20; i++) {
		if (send_rows(o, &w, 1) < 0 || take(&w, me) < 0)
			return -1;
	}
	wait_go();
	usleep(200000);
	while (running() && me->samples < SAMPLES_MAX) {
		uint64_t start = exl3_now_ns();

		if (send_rows(o, &w, 1) < 0 || take(&w, me) < 0)
			return -1;
		me->us[me->samples++] = (float)(exl3_now_ns() - start) / 1000;
		usleep((useconds_t)(erand48(seed) * 2 * o->chunk_us));
	}
	return 0;
}

static pid_t client_start(const struct options *o, unsigned nth, unsigned tenant, unsigned rows)
{
	struct per_client *me = &shared->client[nth];
	pid_t pid = fork();
	int rc;

	if (pid < 0)
		die("fork: %m");
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (setgroups(0, NULL) < 0 || setresuid(UID + tenant, UID + tenant, UID + tenant) < 0)
		_exit(1);
	rc = rows ? flood(o, me, rows) : light(o, me);
	if (rc < 0) {
		snprintf(me->error, sizeof(me->error), "%s", exl3_last_error());
		__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
	}
	_exit(rc < 0);
}

struct count {
	uint64_t launches, ns, light_calls, light_ns;
};

static void count(const struct options *o, struct count *c)
{
	launches(o, &c->launches, &c->ns);
	c->light_calls = __atomic_load_n(&shared->client[0].calls, __ATOMIC_RELAXED);
	c->light_ns = __atomic_load_n(&shared->client[0].exec_ns, __ATOMIC_RELAXED);
}

/* Mean microseconds of a launch while they run; @others: without those of client 0, a launch for each of its
 * requests. */
static double run(const struct options *o, unsigned nr, pid_t *pids, bool others)
{
	struct count a, b;
	double calls, ns;

	while (__atomic_load_n(&shared->ready, __ATOMIC_SEQ_CST) < nr)
		usleep(1000);
	__atomic_store_n(&shared->go, 1, __ATOMIC_RELEASE);
	usleep(300000);
	count(o, &a);
	for (unsigned i = 0; i < nr; i++) /* shares are those of the time when all want something */
		__atomic_store_n(&shared->client[i].rows, 0, __ATOMIC_RELAXED);
	usleep((useconds_t)(o->seconds * 1e6));
	count(o, &b);
	__atomic_store_n(&shared->stop, 1, __ATOMIC_RELEASE);
	for (unsigned i = 0; i < nr; i++) {
		kill(pids[i], SIGKILL); /* what a flood still has in flight is of no interest */
		waitpid(pids[i], NULL, 0);
		if (shared->client[i].error[0])
			die("client %u: %s", i, shared->client[i].error);
	}
	calls = (double)(b.launches - a.launches);
	ns = (double)(b.ns - a.ns);
	if (others) {
		calls -= (double)(b.light_calls - a.light_calls);
		ns -= (double)(b.light_ns - a.light_ns);
	}
	return calls > 0 ? ns / calls / 1000 : 0;
}

/* ---- modes ---- */

static void shares(const struct options *o, struct bench_file *f, const unsigned weight[TENANTS])
{
	double rate[TENANTS], all = 0, sum = 0, squares = 0, worst = 0, jain, chunk;
	pid_t daemon = daemon_start(o, weight), pids[CLIENTS_MAX];
	unsigned weights = 0;

	memset(shared, 0, sizeof(*shared));
	for (unsigned i = 0; i < CLIENTS_MAX; i++)
		pids[i] = client_start(o, i, i / 2, o->rows / 16);
	chunk = run(o, CLIENTS_MAX, pids, false);
	bench_daemon_stop(daemon);
	for (int t = 0; t < TENANTS; t++) {
		rate[t] = (double)(shared->client[2 * t].rows + shared->client[2 * t + 1].rows) /
			  o->seconds;
		all += rate[t];
		sum += rate[t] / weight[t];
		squares += rate[t] / weight[t] * rate[t] / weight[t];
		weights += weight[t];
	}
	jain = sum * sum / (TENANTS * squares);
	for (int t = 0; t < TENANTS; t++) {
		double want = (double)weight[t] / weights, off = rate[t] / all / want - 1;

		if (off < 0)
			off = -off;
		worst = off > worst ? off : worst;
		bench_row(f, "shares-%u:%u:%u,%u,%.0f,%.4f,,,%.1f,%.4f", weight[0], weight[1],
			  weight[2], weight[t], rate[t], rate[t] / all, chunk, jain);
	}
	printf("weights %u:%u:%u: shares %.3f %.3f %.3f, worst deviation %.1f %%, Jain index %.4f, mean "
	       "launch %.0f us\n",
	       weight[0], weight[1], weight[2], rate[0] / all, rate[1] / all, rate[2] / all,
	       worst * 100, jain, chunk);
	fflush(stdout);
}

static void latency(const struct options *o, struct bench_file *f, bool beside)
{
	static const unsigned weight[TENANTS] = {1, 1, 1};
	pid_t daemon = daemon_start(o, weight), pids[CLIENTS_MAX];
	struct per_client *me = &shared->client[0];
	double *us = calloc(SAMPLES_MAX, sizeof(*us)), p50, p99, chunk;

	if (!us)
		die("out of memory");
	memset(shared, 0, sizeof(*shared));
	pids[0] = client_start(o, 0, 0, 0);
	if (beside)
		pids[1] = client_start(o, 1, 1, o->rows);
	chunk = run(o, beside ? 2 : 1, pids, beside);
	bench_daemon_stop(daemon);
	if (!me->samples)
		die("not one request of the light tenant");
	for (uint32_t i = 0; i < me->samples; i++)
		us[i] = (double)me->us[i];
	p50 = bench_quantile(us, me->samples, 0.5);
	p99 = bench_quantile(us, me->samples, 0.99);
	bench_row(f, "%s,1,%.0f,,%.1f,%.1f,%.1f,", beside ? "beside" : "alone",
		  beside ? (double)shared->client[1].rows / o->seconds : 0.0, p50, p99, chunk);
	printf("light tenant %s: p50 %.0f us, p99 %.0f us (%u requests), mean launch %.0f us",
	       beside ? "beside the flood" : "alone", p50, p99, me->samples, chunk);
	if (beside)
		printf(": p99 %.2f launches; flood %.0f rows/s", p99 / chunk,
		       (double)shared->client[1].rows / o->seconds);
	putchar('\n');
	fflush(stdout);
	free(us);
}

static void flood_alone(const struct options *o, struct bench_file *f, unsigned chunk_us)
{
	static const unsigned weight[TENANTS] = {1, 1, 1};
	struct options mine = *o;
	double chunk, rate;
	pid_t daemon, pid;

	mine.chunk_us = chunk_us;
	daemon = daemon_start(&mine, weight);
	memset(shared, 0, sizeof(*shared));
	pid = client_start(&mine, 0, 0, o->rows);
	chunk = run(&mine, 1, &pid, false);
	bench_daemon_stop(daemon);
	rate = (double)shared->client[0].rows / o->seconds;
	bench_row(f, "%s,1,%.0f,,,,%.1f,", chunk_us ? "flood" : "flood-whole", rate, chunk);
	printf("flood alone, chunk-us %u: %.0f rows/s, mean launch %.0f us\n", chunk_us, rate, chunk);
	fflush(stdout);
}

static void parse_options(struct options *o, int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *v = i + 1 < argc ? argv[i + 1] : NULL;

		if (!strcmp(argv[i], "--mlp")) {
			o->mlp = true;
			continue;
		}
		if (!v)
			die("%s: value missing", argv[i]);
		if (!strcmp(argv[i], "--daemon"))
			o->daemon = v;
		else if (!strcmp(argv[i], "--backend"))
			o->backend = v;
		else if (!strcmp(argv[i], "--model"))
			o->model = v;
		else if (!strcmp(argv[i], "--module"))
			o->module = v;
		else if (!strcmp(argv[i], "--arena"))
			o->device_memory = !strcmp(v, "device");
		else if (!strcmp(argv[i], "--rows"))
			o->rows = (unsigned)atoi(v);
		else if (!strcmp(argv[i], "--chunk-us"))
			o->chunk_us = (unsigned)atoi(v);
		else if (!strcmp(argv[i], "--spin-us"))
			o->spin_us = (unsigned)atoi(v);
		else if (!strcmp(argv[i], "--seconds"))
			o->seconds = atof(v);
		else if (!strcmp(argv[i], "-o"))
			o->output = v;
		else
			die("%s: unknown option", argv[i]);
		i++;
	}
	if (!o->model || o->rows < 16 || o->rows > EXL3_M_MAX || !o->chunk_us || !(o->seconds > 0))
		die("--model DIR, --rows 16..%u, --chunk-us and --seconds above 0", EXL3_M_MAX);
}

int main(int argc, char **argv)
{
	static const unsigned equal[TENANTS] = {1, 1, 1}, unequal[TENANTS] = {1, 2, 4};
	struct options o = {.daemon = "build/exl3-daemon",
			    .backend = "cpu",
			    .module = "model.layers.0.mlp.down_proj",
			    .rows = EXL3_M_MAX,
			    .chunk_us = 1000,
			    .spin_us = sysconf(_SC_NPROCESSORS_ONLN) >= 8 ? 5000 : 50,
			    .seconds = 4};
	char machine[128], text[160], path[128];
	struct bench_file f;
	double load = 0;

	parse_options(&o, argc, argv);
	if (geteuid() != 0) {
		fprintf(stderr, "fair: needs root, to be several users\n");
		return 77;
	}
	snprintf(o.dir, sizeof(o.dir), "/tmp/exl3-fair-XXXXXX");
	if (!mkdtemp(o.dir) || chmod(o.dir, 0711) < 0)
		die("%s: %m", o.dir);
	snprintf(o.socket, sizeof(o.socket), "%s/fair.sock", o.dir);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	if (shared == MAP_FAILED)
		die("mmap: %m");
	getloadavg(&load, 1);
	if (strcmp(o.backend, "cpu"))
		bench_ask("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader", machine,
			  sizeof(machine));
	else
		snprintf(machine, sizeof(machine), "%ld processors, load %.1f before",
			 sysconf(_SC_NPROCESSORS_ONLN), load);
	snprintf(text, sizeof(text), "chunk-us %u, spin-us %u, requests of %u rows (shares: a sixteenth), %s arenas", o.chunk_us,
		 o.spin_us, o.rows, o.device_memory ? "device" : "host");
	snprintf(path, sizeof(path), "bench/results/fair_%s.csv", o.backend);
	f = bench_open(o.output ? o.output : path, argc, argv, machine, text,
		       "mode,weight,rows_per_s,share,p50_us,p99_us,chunk_us,jain");
	shares(&o, &f, equal);
	shares(&o, &f, unequal);
	latency(&o, &f, false);
	latency(&o, &f, true);
	flood_alone(&o, &f, o.chunk_us);
	flood_alone(&o, &f, 0);
	bench_close(&f);
	rmdir(o.dir);
	return 0;
}
