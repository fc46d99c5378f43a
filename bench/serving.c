/* SPDX-License-Identifier: Apache-2.0 */
/*
 * serving.c - many decoders at once: unmerged, merged, in trains, and each with its own copy of the weights.
 *
 *   serving [--daemon FILE] [--backend B] [--dir TMPFS] [--clients 1,2,4,8,16,32] [--private 8,16]
 *           [--rounds N] [--seconds S] [--think US] [--tail US] [--layers N] [--shrink N] [--memory host|device]
 *           [--model dense|moe] [--pin] [-o FILE]
 *
 * The dense model: 32 layers of qkv 4096->6144, o 4096->4096, gate_up 4096->2x14336, down 14336->4096, then lm_head
 * 4096->128256, 4 bits; a decoder calls these 129 modules one after the other with one row, thinks --think
 * microseconds (+- 30 %) after each answer and --tail (+- 50 %) more after the last one. --model moe: layers
 * of qkv 2048->5120, o 4096->2048 and 256 experts, 8 per token, 2048->512->2048; lm_head 2048->128256. --shrink divides all
 * widths.
 *
 * Three daemons on one device hold the same checkpoint: merge-max 1, merge-max 32 without and with trains. For
 * each number of clients the three take turns, --rounds times, so that they meet the same machine. --memory device: activations lie
 * in arenas in GPU memory, and clients have CUDA contexts; host: in arenas in host memory. private: as many
 * processes as clients, each with the backend and the weights in itself.
 *
 *   launch_us    S: time on the device per call, mean
 *   handover_us  R: from request to answer, less S, mean; with many clients also the wait for the device
 *   client_us    C: from answer to request, mean, without the tail
 *   jain         index of the clients' rates
 * At the end, per number of clients: rate over unmerged, and over min(N, N alone / saturated) times S at one row over
 * S at this mean of rows, where alone is one client's unmerged rate and saturated the largest unmerged one.
 */
#include "bench/serving/serving.h"
#include "bench/bench.h"
#include "bench/daemon.h"
#include "bench/die.h"
#include "bench/ckpt.h"
#include "client/exl3.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define CELLS_MAX 64

static const char *const modes[] = {"unmerged", "merged", "trains"};
static const char *const mode_flags[][4] = {{"--merge-max", "1", "--trains", "off"},
					    {"--merge-max", "32", "--trains", "off"},
					    {"--merge-max", "32", "--trains", "auto"}};
#define MODES 3

static const struct ckpt_matrix layer_shapes[] = {
	{"self_attn.q_proj", 4096, 4096}, {"self_attn.k_proj", 4096, 1024},
	{"self_attn.v_proj", 4096, 1024}, {"self_attn.o_proj", 4096, 4096},
	{"mlp.gate_proj", 4096, 14336},   {"mlp.up_proj", 4096, 14336},
	{"mlp.down_proj", 14336, 4096},
};
#define LAYER_SHAPES (sizeof(layer_shapes) / sizeof(layer_shapes[0]))

struct cell {
	unsigned clients, rounds; /* means over rounds */
	const char *mode;
	double tokens, p50_us, p99_us, rows, launch_us, handover_us, client_us, jain;
	uint64_t gpu_bytes;
	uint64_t trains, late, joined, expelled;
};

struct daemon {
	pid_t pid;
	char socket[96];
};

static struct serving_shared *shared;
static char folder[4096];
static struct cell cells[CELLS_MAX];
static unsigned nr_cells;

static void remove_folder(void)
{
	char path[4200];

	snprintf(path, sizeof(path), "%s/model.safetensors", folder);
	unlink(path);
	rmdir(folder);
}

static uint32_t shrunk(uint32_t width, unsigned by)
{
	return (width / by + 127) / 128 * 128;
}

/* One layer's matrices. */
static size_t layer_of(const struct serving_options *o, struct ckpt_matrix *m)
{
	static char names[3 * SERVING_EXPERTS][48];
	static const struct ckpt_matrix attention[] = {{"self_attn.q_proj", 2048, 4096},
						       {"self_attn.k_proj", 2048, 512},
						       {"self_attn.v_proj", 2048, 512},
						       {"self_attn.o_proj", 4096, 2048}};
	size_t n = 0;

	if (!o->moe) {
		memcpy(m, layer_shapes, sizeof(layer_shapes));
		return LAYER_SHAPES;
	}
	for (; n < 4; n++)
		m[n] = attention[n];
	for (unsigned i = 0; i < 3 * SERVING_EXPERTS; i++) {
		static const char *const part[] = {"gate", "up", "down"};

		snprintf(names[i], sizeof(names[i]), "mlp.experts.%u.%s_proj", i / 3, part[i % 3]);
		m[n++] = (struct ckpt_matrix){names[i], i % 3 < 2 ? 2048 : 512,
					      i % 3 < 2 ? 512 : 2048};
	}
	return n;
}

static uint64_t make_model(const struct serving_options *o)
{
	static struct ckpt_matrix shapes[4 + 3 * SERVING_EXPERTS];
	struct ckpt_matrix head = {"lm_head", o->moe ? 2048 : 4096, 128256};
	size_t nr = layer_of(o, shapes);
	uint64_t bytes;

	for (size_t i = 0; i < nr; i++) {
		shapes[i].k = shrunk(shapes[i].k, o->shrink);
		shapes[i].n = shrunk(shapes[i].n, o->shrink);
	}
	head.k = shrunk(head.k, o->shrink);
	head.n = shrunk(head.n, o->shrink);
	snprintf(folder, sizeof(folder), "%s/exl3-serving-XXXXXX", o->dir);
	if (!mkdtemp(folder))
		die("%s: %m", folder);
	atexit(remove_folder);
	bytes = ckpt_write(folder, o->layers, shapes, nr, &head, 1);
	if (!bytes)
		die("%s: %m", folder);
	return bytes;
}

/* The processors that share a core with @cpu, itself among them. */
static void core_of(int cpu, cpu_set_t *set)
{
	char path[128], text[256] = "";
	FILE *f;

	CPU_ZERO(set);
	CPU_SET(cpu, set);
	snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
		 cpu);
	f = fopen(path, "re");
	if (f && fgets(text, sizeof(text), f))
		for (char *at = text; *at >= '0' && *at <= '9';) {
			long from = strtol(at, &at, 10),
			     to = *at == '-' ? strtol(at + 1, &at, 10) : from;

			for (; from <= to && from < CPU_SETSIZE; from++)
				CPU_SET((int)from, set);
			at += *at == ',';
		}
	if (f)
		fclose(f);
}

/* Daemons keep a processor each of the first two cores, clients have the other cores. */
static void pin(bool is_daemon)
{
	long nr = sysconf(_SC_NPROCESSORS_ONLN);
	cpu_set_t first, second, set;
	int other = 1;

	core_of(0, &first);
	while (other < nr - 1 && CPU_ISSET(other, &first))
		other++;
	core_of(other, &second);
	CPU_ZERO(&set);
	for (int i = 0; i < nr; i++)
		if (is_daemon ? i == 0 || i == other
			      : !CPU_ISSET(i, &first) && !CPU_ISSET(i, &second))
			CPU_SET(i, &set);
	if (sched_setaffinity(0, sizeof(set), &set) < 0)
		die("sched_setaffinity: %m");
}

static void daemon_start(const struct serving_options *o, int mode, struct daemon *d)
{
	char model[4200];

	snprintf(d->socket, sizeof(d->socket), "/tmp/exl3-serving-%d-%d.sock", (int)getpid(), mode);
	d->pid = fork();
	if (d->pid < 0)
		die("fork: %m");
	if (d->pid > 0)
		return;
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (o->pin)
		pin(true);
	snprintf(model, sizeof(model), "bench=%s", folder);
	execl(o->daemon, o->daemon, "--socket", d->socket, "--backend", o->backend, "--spin-us",
	      "200", "--log-level", "warning", "--model", model, mode_flags[mode][0],
	      mode_flags[mode][1], mode_flags[mode][2], mode_flags[mode][3],
	      /* Whoever runs this has started a server for all of us, or wants none. */
	      "--mps", "off", (char *)NULL);
	fprintf(stderr, "serving: %s: %m\n", o->daemon);
	_exit(127);
}

/* ---- a cell ---- */

/* @clients: of the daemons; else each has all in itself. */
static void spawn(const struct serving_options *o, unsigned nr, bool clients, pid_t *pids)
{
	memset(shared, 0, sizeof(*shared));
	for (unsigned i = 0; i < nr; i++) {
		pids[i] = fork();
		if (pids[i] < 0)
			die("fork: %m");
		if (pids[i] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (o->pin)
				pin(false);
			_exit(clients ? serving_client(o, shared, i)
				      : serving_private(o, shared, i, folder));
		}
	}
	for (int i = 0; __atomic_load_n(&shared->ready, __ATOMIC_SEQ_CST) < nr; i++) {
		if (i > 60000)
			die("clients do not start");
		usleep(1000);
	}
	for (unsigned i = 0; i < nr; i++)
		if (shared->client[i].error[0])
			die("client %u: %s", i, shared->client[i].error);
}

static void end_all(unsigned nr, pid_t *pids)
{
	for (unsigned i = 0; i < nr; i++) {
		kill(pids[i], SIGKILL);
		waitpid(pids[i], NULL, 0);
	}
}

static void collect(struct cell *c, unsigned nr, double seconds) /* of one round */
{
	double sum = 0, squares = 0, exec = 0, latency = 0, think = 0, calls = 0;
	double *us = malloc((size_t)nr * SERVING_SAMPLES * sizeof(*us));
	size_t n = 0;

	if (!us)
		die("out of memory");
	for (unsigned i = 0; i < nr; i++) {
		const struct serving_record *r = &shared->client[i];
		double rate = (double)(r->end.tokens - r->begin.tokens) / seconds;
		uint64_t have = r->samples < SERVING_SAMPLES ? r->samples : SERVING_SAMPLES;

		if (r->error[0])
			die("client %u: %s", i, r->error);
		sum += rate;
		squares += rate * rate;
		calls += (double)(r->end.calls - r->begin.calls);
		exec += (double)(r->end.exec_ns - r->begin.exec_ns) / 1000;
		latency += (double)(r->end.latency_ns - r->begin.latency_ns) / 1000;
		think += (double)(r->end.think_ns - r->begin.think_ns) / 1000;
		for (uint64_t k = 0; k < have; k++)
			us[n++] = (double)r->us[k];
	}
	if (!calls || !n)
		die("not one call was made");
	c->tokens = sum;
	c->jain = sum * sum / (nr * squares);
	c->launch_us = exec / calls;
	c->handover_us = (latency - exec) / calls;
	c->client_us = think / calls;
	c->p50_us = bench_median(us, n);
	c->p99_us = bench_quantile(us, n, 0.99);
	free(us);
}

static void add_mean(double *sum, double x, unsigned rounds)
{
	*sum += (x - *sum) / rounds;
}

/* A round of a cell that may have had others. */
static void add(const struct cell *r)
{
	for (unsigned i = 0; i < nr_cells; i++) {
		struct cell *c = &cells[i];

		if (c->clients != r->clients || strcmp(c->mode, r->mode))
			continue;
		c->rounds++;
		add_mean(&c->tokens, r->tokens, c->rounds);
		add_mean(&c->p50_us, r->p50_us, c->rounds);
		add_mean(&c->p99_us, r->p99_us, c->rounds);
		add_mean(&c->rows, r->rows, c->rounds);
		add_mean(&c->launch_us, r->launch_us, c->rounds);
		add_mean(&c->handover_us, r->handover_us, c->rounds);
		add_mean(&c->client_us, r->client_us, c->rounds);
		add_mean(&c->jain, r->jain, c->rounds);
		return;
	}
	if (nr_cells == CELLS_MAX)
		die("too many cells");
	cells[nr_cells++] = *r;
}

/* @d: NULL: private copies. */
static void measure(const struct serving_options *o, unsigned nr, const char *mode,
		    const struct daemon *d, uint32_t number)
{
	struct cell now = {.clients = nr, .mode = mode, .rounds = 1, .rows = 1}, *c = &now;
	struct serving_status before = {0}, after = {0};
	uint64_t start, end;

	memset(shared->client, 0, sizeof(shared->client));
	shared->active = nr;
	shared->mode = number;
	shared->finished = 0;
	__atomic_store_n(&shared->phase, SERVING_WARM, __ATOMIC_RELEASE);
	usleep((useconds_t)(o->seconds * 0.6e6));
	if (d)
		serving_status(d->socket, &before);
	start = exl3_now_ns();
	__atomic_store_n(&shared->phase, SERVING_COUNT, __ATOMIC_RELEASE);
	usleep((useconds_t)(o->seconds * 1e6));
	__atomic_store_n(&shared->phase, SERVING_END, __ATOMIC_RELEASE);
	end = exl3_now_ns();
	if (d)
		serving_status(d->socket, &after);
	for (int i = 0; __atomic_load_n(&shared->finished, __ATOMIC_SEQ_CST) < nr; i++) {
		if (i > 10000)
			die("%s: a client hangs", mode);
		usleep(1000);
	}
	__atomic_store_n(&shared->phase, SERVING_IDLE, __ATOMIC_RELEASE);
	usleep(10000);
	collect(c, nr, (double)(end - start) / 1e9);
	c->gpu_bytes = d ? after.bytes : shared->bytes;
	if (d && after.launches > before.launches)
		c->rows = (double)(after.requests - before.requests) /
			  (double)(after.launches - before.launches);
	c->trains = after.trains - before.trains;
	c->late = after.late - before.late;
	c->joined = after.joined - before.joined;
	c->expelled = after.expelled - before.expelled;
	printf("%2u %-8s %8.1f tokens/s, p50 %6.1f p99 %7.1f us, rows %5.2f, S %6.2f R %6.2f C "
	       "%5.2f us, jain "
	       "%.3f, trains %" PRIu64 " late %" PRIu64 " joined %" PRIu64 " expelled %" PRIu64
	       "\n",
	       nr, mode, c->tokens, c->p50_us, c->p99_us, c->rows, c->launch_us, c->handover_us,
	       c->client_us, c->jain, c->trains, c->late, c->joined, c->expelled);
	fflush(stdout);
	add(c);
}

/* ---- the report ---- */

static const struct cell *find(unsigned clients, const char *mode)
{
	for (unsigned i = 0; i < nr_cells; i++)
		if (cells[i].clients == clients && !strcmp(cells[i].mode, mode))
			return &cells[i];
	return NULL;
}

static void verdict(void)
{
	const struct cell *alone = find(1, "unmerged");
	double saturated = 0;

	for (unsigned i = 0; i < nr_cells; i++)
		if (!strcmp(cells[i].mode, "unmerged") && cells[i].tokens > saturated)
			saturated = cells[i].tokens;
	for (unsigned i = 0; alone && i < nr_cells; i++) {
		const struct cell *c = &cells[i], *u = find(c->clients, "unmerged"),
				  *p = find(c->clients, "private");
		double bound, n = c->clients;

		if (strcmp(c->mode, "trains") || !u)
			continue;
		bound = n * alone->tokens / saturated;
		bound = (bound < n ? bound : n) * u->tokens * alone->launch_us / c->launch_us;
		printf("%2u clients: trains %.2f x unmerged, %.3f of the bound", c->clients,
		       c->tokens / u->tokens, c->tokens / bound);
		if (p)
			printf(", %.2f x private copies", c->tokens / p->tokens);
		printf("\n");
	}
}

static void write_file(const struct serving_options *o, int argc, char **argv, const char *device)
{
	char ceilings[300], machine[200];
	const struct cell *alone = find(1, "unmerged");
	struct bench_file f;
	double load = 0;

	getloadavg(&load, 1);
	snprintf(machine, sizeof(machine), "%s, %ld processors%s", device,
		 sysconf(_SC_NPROCESSORS_ONLN),
		 o->pin ? ", daemons on one of each of two cores, clients on the other cores" : "");
	snprintf(ceilings, sizeof(ceilings),
		 "one client unmerged: S %.2f us, R %.2f us, C %.2f us, tail %u us +- 50 %%",
		 alone ? alone->launch_us : 0, alone ? alone->handover_us : 0,
		 alone ? alone->client_us : 0, o->tail_us);
	f = bench_open(
		o->output, argc, argv, machine, ceilings,
		"model,clients,mode,tokens_per_s,p50_us,p99_us,rows_per_launch,gpu_bytes,launch_us,"
		"handover_us,client_us,jain");
	for (unsigned i = 0; i < nr_cells; i++) {
		const struct cell *c = &cells[i];

		bench_row(&f,
			  "%s-%ux%u-%s,%u,%s,%.1f,%.1f,%.1f,%.2f,%" PRIu64 ",%.2f,%.2f,%.2f,%.4f",
			  o->moe ? "moe" : "dense", o->layers,
			  shrunk(o->moe ? 2048 : 4096, o->shrink),
			  o->device_memory ? "device" : "host", c->clients, c->mode, c->tokens,
			  c->p50_us, c->p99_us, c->rows, c->gpu_bytes, c->launch_us, c->handover_us,
			  c->client_us, c->jain);
	}
	bench_close(&f);
}

/* ---- main ---- */

static unsigned parse_list(const char *text, unsigned *list, unsigned max)
{
	unsigned n = 0;

	while (*text && n < max) {
		char *end;
		unsigned long v = strtoul(text, &end, 10);

		if (end == text || v > SERVING_CLIENTS_MAX)
			die("%s: numbers from 1 to %d with commas", text, SERVING_CLIENTS_MAX);
		if (v)
			list[n++] = (unsigned)v;
		text = *end ? end + 1 : end;
	}
	return n;
}

static void parse(struct serving_options *o, int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *v = i + 1 < argc ? argv[i + 1] : NULL;

		if (!strcmp(argv[i], "--pin")) {
			o->pin = true;
			continue;
		}
		if (!v)
			die("%s: unknown option, or without its value", argv[i]);
		if (!strcmp(argv[i], "--daemon"))
			o->daemon = v;
		else if (!strcmp(argv[i], "--backend"))
			o->backend = v;
		else if (!strcmp(argv[i], "--dir"))
			o->dir = v;
		else if (!strcmp(argv[i], "--clients"))
			o->nr_clients = parse_list(v, o->clients, 16);
		else if (!strcmp(argv[i], "--model"))
			o->moe = !strcmp(v, "moe");
		else if (!strcmp(argv[i], "--memory"))
			o->device_memory = !strcmp(v, "device");
		else if (!strcmp(argv[i], "--private"))
			o->nr_private = parse_list(v, o->private, 16);
		else if (!strcmp(argv[i], "--seconds"))
			o->seconds = atof(v);
		else if (!strcmp(argv[i], "--rounds"))
			o->rounds = (unsigned)atoi(v);
		else if (!strcmp(argv[i], "--think"))
			o->think_us = (unsigned)atoi(v);
		else if (!strcmp(argv[i], "--tail"))
			o->tail_us = (unsigned)atoi(v);
		else if (!strcmp(argv[i], "--layers"))
			o->layers = (unsigned)atoi(v);
		else if (!strcmp(argv[i], "--shrink"))
			o->shrink = (unsigned)atoi(v);
		else if (!strcmp(argv[i], "-o"))
			o->output = v;
		else
			die("%s: unknown option", argv[i]);
		i++;
	}
	if (!(o->seconds > 0 && o->seconds < 100) || !o->rounds || !o->layers ||
	    o->layers > SERVING_LAYERS_MAX || !o->shrink || o->shrink > 32)
		die("--seconds 0..100, --layers 1..%d, --shrink 1..32", SERVING_LAYERS_MAX);
	if (o->moe && o->nr_private)
		die("--private is for the dense model");
	if (o->pin && sysconf(_SC_NPROCESSORS_ONLN) < 4)
		die("--pin needs at least 4 processors");
}

int main(int argc, char **argv)
{
	struct serving_options o = {.daemon = "build/exl3-daemon",
				    .backend = "auto",
				    .dir = "/dev/shm",
				    .clients = {1, 2, 4, 8, 16, 32},
				    .nr_clients = 6,
				    .seconds = 1,
				    .rounds = 3,
				    .think_us = 6,
				    .tail_us = 50,
				    .layers = 32,
				    .shrink = 1,
				    .output = "bench/results/serving_cpu.csv"};
	struct daemon daemons[MODES];
	pid_t pids[SERVING_CLIENTS_MAX];
	unsigned most = 0;
	struct serving_status status;

	parse(&o, argc, argv);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	if (shared == MAP_FAILED)
		die("mmap: %m");
	printf("a model of %.2f GB\n", (double)make_model(&o) / 1e9);
	for (int i = 0; i < MODES; i++) {
		daemon_start(&o, i, &daemons[i]);
		o.sockets[i] = daemons[i].socket;
	}
	for (int i = 0; i < MODES; i++)
		bench_daemon_wait(daemons[i].pid, daemons[i].socket, true);
	serving_status(daemons[0].socket, &status);
	for (unsigned i = 0; i < o.nr_clients; i++)
		most = o.clients[i] > most ? o.clients[i] : most;
	spawn(&o, most, true, pids);
	for (unsigned i = 0; i < o.nr_clients; i++)
		for (unsigned r = 0; r < o.rounds; r++)
			for (uint32_t k = 0; k < MODES; k++)
				measure(&o, o.clients[i], modes[k], &daemons[k], k);
	end_all(most, pids);
	for (int i = 0; i < MODES; i++) {
		bench_daemon_stop(daemons[i].pid);
	}
	write_file(&o, argc, argv, status.device); /* what there is, if the rest should fail */
	for (unsigned i = 0; i < o.nr_private; i++) {
		spawn(&o, o.private[i], false, pids);
		measure(&o, o.private[i], "private", NULL, 0);
		end_all(o.private[i], pids);
	}
	write_file(&o, argc, argv, status.device);
	verdict();
	return 0;
}
