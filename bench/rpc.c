/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rpc.c - what one request costs on top of its work: ring round trips with 1, 4 and 16 client processes.
 *
 *   build/bench/rpc [--daemon build/exl3-daemon] [--model DIR] [--seconds S] [-o FILE]
 *
 * Starts daemons of its own (CPU backend) on a socket in a temporary folder. Modes:
 *   eventfd     no daemon: two processes hand a blocking eventfd to and fro; the floor of nop-asleep
 *   nop         both sides spin
 *   nop-asleep  neither side spins: eventfd to the daemon, futex back
 *   direct      one row of a linear layer; added_us is the round trip less the time on the device
 * System calls are counted where they are made: by libexl3 in its channels, by the daemon in its loop.
 */
#include "bench/bench.h"
#include "bench/daemon.h"
#include "bench/die.h"
#include "client/internal.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define CLIENTS_MAX 16
/* Long enough that nobody sleeps while the other side runs; on a machine with fewer processors than
 * spinners it ends, so that the scheduler can let the other side run. */
#define SPIN_US     "1000"
#define SPIN_NS     1000000u
#define SAMPLES_MAX 200000

struct options {
	const char *daemon, *model, *module, *output;
	double seconds; /* of each cell */
	char dir[64], socket[96];
};

/* In memory that the client processes share with us. */
struct shared {
	uint32_t ready, go, stop; /* atomic */
	struct per_client {
		uint32_t samples;
		uint64_t calls, syscalls;
		float us[SAMPLES_MAX];
		float exec_us[SAMPLES_MAX];
		char error[256];
	} client[CLIENTS_MAX];
};

struct result {
	double us, p99_us, exec_us, calls, client_syscalls,
		daemon_syscalls; /* the last two: per call */
};

static struct shared *shared;

/* ---- the floor: a bare eventfd ping-pong ---- */

static double eventfd_ping_pong(double seconds)
{
	int there = eventfd(0, EFD_CLOEXEC), back = eventfd(0, EFD_CLOEXEC);
	double *us = malloc(SAMPLES_MAX * sizeof(*us)), median;
	uint64_t v = 1, end;
	size_t n = 0;
	pid_t pid;

	if (there < 0 || back < 0 || !us)
		die("eventfd: %m");
	pid = fork();
	if (pid < 0)
		die("fork: %m");
	if (pid == 0) {
		while (read(there, &v, sizeof(v)) == sizeof(v) && v == 1)
			if (write(back, &v, sizeof(v)) < 0)
				break;
		_exit(0);
	}
	end = exl3_now_ns() + (uint64_t)(seconds * 1e9);
	while (n < SAMPLES_MAX && exl3_now_ns() < end) {
		uint64_t start = exl3_now_ns();

		v = 1;
		if (write(there, &v, sizeof(v)) < 0 || read(back, &v, sizeof(v)) < 0)
			die("eventfd: %m");
		us[n++] = (double)(exl3_now_ns() - start) / 1000;
	}
	v = 2; /* stop */
	if (write(there, &v, sizeof(v)) < 0)
		die("eventfd: %m");
	waitpid(pid, NULL, 0);
	close(there);
	close(back);
	median = bench_median(us, n);
	free(us);
	return median;
}

/* ---- a daemon of ours ---- */

static pid_t daemon_start(const struct options *o, const char *spin_us)
{
	char model[512];
	pid_t pid = fork();

	if (pid < 0)
		die("fork: %m");
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGTERM); /* it spins: must not outlive us */
		if (o->model) {
			snprintf(model, sizeof(model), "bench=%s", o->model);
			execl(o->daemon, o->daemon, "--socket", o->socket, "--backend", "cpu",
			      "--spin-us", spin_us, "--log-level", "warning", "--model", model,
			      (char *)NULL);
		} else {
			execl(o->daemon, o->daemon, "--socket", o->socket, "--backend", "cpu",
			      "--spin-us", spin_us, "--log-level", "warning", (char *)NULL);
		}
		fprintf(stderr, "rpc: %s: %m\n", o->daemon);
		_exit(127);
	}
	bench_daemon_wait(pid, o->socket, o->model != NULL);
	return pid;
}

/* ---- client processes ---- */

struct work {
	struct exl3_channel *ch;
	struct exl3_module *mod;
	struct exl3_arena *arena;
	exl3_ref x, y;
};

static int work_open(const struct options *o, bool linear, struct exl3_client *c, struct work *w)
{
	struct exl3_module_info info;
	struct exl3_model *m;

	if (exl3_channel_new(c, 16, &w->ch) < 0)
		return -1;
	if (!linear)
		return 0;
	if (exl3_model_open(c, "bench", &m) < 0 ||
	    exl3_module_open(m, o->module, EXL3_KIND_LINEAR, &w->mod) < 0 ||
	    exl3_arena_new(c, 1 << 20, &w->arena) < 0)
		return -1;
	exl3_module_get_info(w->mod, &info);
	w->x = exl3_arena_ref(w->arena, exl3_arena_alloc(w->arena, info.k_logical * 2));
	w->y = exl3_arena_ref(w->arena, exl3_arena_alloc(w->arena, info.n_logical * 4));
	return 0;
}

static int one_call(struct work *w, struct exl3_cqe *cqe)
{
	struct exl3_sqe *sqe = exl3_sq_get(w->ch);

	if (!sqe)
		return -1;
	if (w->mod)
		exl3_prep_linear(sqe, w->mod, w->x, EXL3_F16, w->y, EXL3_F32, 1);
	else
		exl3_prep_nop(sqe);
	return exl3_call(w->ch, cqe);
}

/* Runs in a child. Stamps every call; the first ones, which warm up, do not count. */
static int client_main(const struct options *o, unsigned nth, bool linear, uint64_t spin_ns)
{
	struct per_client *me = &shared->client[nth];
	struct exl3_client *c;
	struct work w = {0};
	struct exl3_cqe cqe;
	uint64_t before;

	if (exl3_connect(o->socket, "rpc", &c) < 0 || work_open(o, linear, c, &w) < 0)
		goto fail;
	exl3_channel_set_spin(w.ch, spin_ns);
	for (int i = 0; i < 200; i++)
		if (one_call(&w, &cqe) < 0)
			goto fail;
	__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
	while (!__atomic_load_n(&shared->go, __ATOMIC_ACQUIRE))
		usleep(1000);
	before = exl3_channel_syscalls(w.ch);
	while (!__atomic_load_n(&shared->stop, __ATOMIC_RELAXED)) {
		uint64_t start = exl3_now_ns();

		if (one_call(&w, &cqe) < 0)
			goto fail;
		me->us[me->samples % SAMPLES_MAX] = (float)(exl3_now_ns() - start) / 1000;
		me->exec_us[me->samples % SAMPLES_MAX] = (float)cqe.exec_ns / 1000;
		me->samples++;
		me->calls++;
	}
	me->syscalls = exl3_channel_syscalls(w.ch) - before;
	exl3_close(c);
	return 0;
fail:
	snprintf(me->error, sizeof(me->error), "%s", exl3_last_error());
	__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
	return 1;
}

static void spawn(const struct options *o, unsigned nr, bool linear, uint64_t spin_ns, pid_t *pids)
{
	memset(shared, 0, sizeof(*shared));
	for (unsigned i = 0; i < nr; i++) {
		pids[i] = fork();
		if (pids[i] < 0)
			die("fork: %m");
		if (pids[i] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(client_main(o, i, linear, spin_ns));
		}
	}
	while (__atomic_load_n(&shared->ready, __ATOMIC_SEQ_CST) < nr)
		usleep(1000);
}

static struct result collect(unsigned nr, double daemon_calls)
{
	double *us = malloc(nr * SAMPLES_MAX * sizeof(*us));
	double *exec = malloc(nr * SAMPLES_MAX * sizeof(*exec));
	struct result r = {0};
	size_t n = 0;

	if (!us || !exec)
		die("out of memory");
	for (unsigned i = 0; i < nr; i++) {
		const struct per_client *p = &shared->client[i];
		uint32_t have = p->samples < SAMPLES_MAX ? p->samples : SAMPLES_MAX;

		if (p->error[0])
			die("client %u: %s", i, p->error);
		for (uint32_t k = 0; k < have; k++, n++) {
			us[n] = p->us[k];
			exec[n] = p->exec_us[k];
		}
		r.calls += (double)p->calls;
		r.client_syscalls += (double)p->syscalls;
	}
	if (!n)
		die("not one call was made");
	r.us = bench_median(us, n);
	r.p99_us = bench_quantile(us, n, 0.99);
	r.exec_us = bench_median(exec, n);
	r.client_syscalls /= r.calls;
	r.daemon_syscalls = daemon_calls / r.calls;
	free(us);
	free(exec);
	return r;
}

static struct result measure(const struct options *o, unsigned nr, bool linear, uint64_t spin_ns)
{
	pid_t pids[CLIENTS_MAX];
	struct exl3_client *c;
	uint64_t before, after;

	spawn(o, nr, linear, spin_ns, pids);
	if (exl3_connect(o->socket, "rpc", &c) < 0)
		die("%s", exl3_last_error());
	before = bench_daemon_syscalls(c);
	__atomic_store_n(&shared->go, 1, __ATOMIC_RELEASE);
	usleep((useconds_t)(o->seconds * 1e6));
	after = bench_daemon_syscalls(c);
	__atomic_store_n(&shared->stop, 1, __ATOMIC_RELEASE);
	for (unsigned i = 0; i < nr; i++)
		waitpid(pids[i], NULL, 0);
	exl3_close(c);
	return collect(nr, (double)(after - before));
}

/* ---- the table ---- */

static void row(struct bench_file *f, const char *mode, unsigned nr, const struct result *r,
		double added)
{
	char text[32] = "";

	if (added >= 0)
		snprintf(text, sizeof(text), "%.2f", added);
	fprintf(f->f, "%s,%u,,%.2f,%s,%.3f\n", mode, nr, r->us, text,
		r->client_syscalls + r->daemon_syscalls);
	printf("%-10s %2u clients: p50 %7.2f us, p99 %8.2f us, system calls per request: client "
	       "%.3f, daemon %.3f%s%s\n",
	       mode, nr, r->us, r->p99_us, r->client_syscalls, r->daemon_syscalls,
	       added >= 0 ? ", added us " : "", text);
	fflush(stdout);
}

static void parse_options(struct options *o, int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *v = i + 1 < argc ? argv[i + 1] : NULL;

		if (!v)
			die("usage: rpc [--daemon FILE] [--model DIR] [--module NAME] [--seconds "
			    "S] [-o FILE]");
		if (!strcmp(argv[i], "--daemon"))
			o->daemon = v;
		else if (!strcmp(argv[i], "--model"))
			o->model = v;
		else if (!strcmp(argv[i], "--module"))
			o->module = v;
		else if (!strcmp(argv[i], "--seconds"))
			o->seconds = atof(v);
		else if (!strcmp(argv[i], "-o"))
			o->output = v;
		else
			die("%s: unknown option", argv[i]);
		i++;
	}
	if (!(o->seconds > 0 && o->seconds < 1000))
		die("--seconds must be a positive number");
}

int main(int argc, char **argv)
{
	static const unsigned counts[] = {1, 4, 16};
	struct options o = {.daemon = "build/exl3-daemon", .module = "k4.mul1", .seconds = 2};
	struct result spinning = {0}, asleep = {0};
	char ceilings[160], machine[96];
	struct bench_file f;
	double floor_us, load = 0;
	pid_t pid;

	parse_options(&o, argc, argv);
	snprintf(o.dir, sizeof(o.dir), "/tmp/exl3-rpc-XXXXXX");
	if (!mkdtemp(o.dir))
		die("%s: %m", o.dir);
	snprintf(o.socket, sizeof(o.socket), "%s/rpc.sock", o.dir);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	if (shared == MAP_FAILED)
		die("mmap: %m");

	floor_us = eventfd_ping_pong(o.seconds);
	printf("eventfd ping-pong between two processes: %.2f us\n", floor_us);
	snprintf(ceilings, sizeof(ceilings),
		 "eventfd ping-pong between two processes: %.2f us; clock %s", floor_us,
		 "CLOCK_MONOTONIC, read twice per call");
	getloadavg(&load, 1);
	snprintf(machine, sizeof(machine), "%ld processors, load %.1f before, nice %d",
		 sysconf(_SC_NPROCESSORS_ONLN), load, getpriority(PRIO_PROCESS, 0));
	f = bench_open(o.output ? o.output : "bench/results/rpc_cpu.csv", argc, argv, machine,
		       ceilings, "mode,clients,mps,us_per_call,added_us,syscalls_per_call");

	pid = daemon_start(&o, SPIN_US);
	for (size_t i = 0; i < 3; i++) {
		struct result r = measure(&o, counts[i], false, SPIN_NS);

		if (i == 0)
			spinning = r;
		row(&f, "nop", counts[i], &r, r.us);
	}
	bench_daemon_stop(pid);

	/* The budgets that both sides have by default: computing needs the processors, too. */
	if (o.model)
		pid = daemon_start(&o, "50");
	for (size_t i = 0; o.model && i < 3; i++) {
		struct result r = measure(&o, counts[i], true, EXL3_SPIN_DEFAULT_NS);

		row(&f, "direct", counts[i], &r, counts[i] == 1 ? r.us - r.exec_us : -1);
	}
	if (o.model)
		bench_daemon_stop(pid);

	pid = daemon_start(&o, "0");
	for (size_t i = 0; i < 3; i++) {
		struct result r = measure(&o, counts[i], false, 0);

		if (i == 0)
			asleep = r;
		row(&f, "nop-asleep", counts[i], &r, r.us);
	}
	bench_daemon_stop(pid);
	bench_close(&f);
	rmdir(o.dir);
	printf("spinning p50 %.2f us (aim: at most 1); asleep %.2f times the eventfd ping-pong "
	       "(aim: at most 1.3)\n",
	       spinning.us, asleep.us / floor_us);
	return 0;
}
