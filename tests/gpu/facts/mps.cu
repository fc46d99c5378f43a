/* SPDX-License-Identifier: Apache-2.0 */
/* mps.cu - what a fault or a killed client does to the other clients of an MPS server, and who may join. */
#include "mps.h"

struct hello {
	cudaError_t result;
	double ms; /* from the start of the process's CUDA to the end of its first kernel */
};

struct client_arg {
	const char *dir;
	int kind; /* 'v' runs small kernels, 'f' faults when told, 's' spins in a kernel, 'n' just comes */
	uid_t uid;
};

/* cudaGetErrorName() would start CUDA in the parent, and its later children could not use it. */
static const char *error_text(cudaError_t e)
{
	static char text[32];

	snprintf(text, sizeof(text), "CUDA error %d", (int)e);
	return text;
}

static int client(int sock, const void *p)
{
	const struct client_arg *a = (const struct client_arg *)p;
	struct hello h;
	char go;

	mps_env(a->dir);
	if (a->uid && (setgid(a->uid) < 0 || setuid(a->uid) < 0))
		return 2;
	const double t = now_ms();

	h.result = cudaFree(0);
	if (h.result == cudaSuccess) {
		nothing<<<1, 1>>>();
		h.result = cudaDeviceSynchronize();
	}
	h.ms = now_ms() - t;
	send_msg(sock, &h, sizeof(h), -1);
	if (h.result != cudaSuccess || a->kind == 'n')
		return h.result != cudaSuccess;
	if (a->kind == 'v') {
		const double end = now_ms() + 15000;

		do {
			nothing<<<1, 1>>>();
			h.result = cudaDeviceSynchronize();
			sleep_ms(1);
		} while (h.result == cudaSuccess && now_ms() < end);
		h.ms = now_ms() - t;
		send_msg(sock, &h, sizeof(h), -1);
	} else {
		uint32_t *flag;

		RT(cudaMalloc((void **)&flag, 4));
		RT(cudaMemset(flag, 0, 4));
		if (!recv_msg(sock, &go, 1, NULL, 10000))
			return 2;
		if (a->kind == 'f')
			illegal_access<<<1, 1>>>();
		else
			wait_flag<<<1, 1>>>(flag, 1, 4000);
		send_msg(sock, "l", 1, -1);
		h.result = cudaDeviceSynchronize();
		send_msg(sock, &h, sizeof(h), -1);
	}
	pause(); /* keeps its place at the server */
	return 0;
}

static struct child join_as(const struct client_arg *a)
{
	return start(client, a, 25);
}

/* First message of a client: true if it ran a kernel. */
static bool joined(struct child *c, struct hello *h, int limit_ms)
{
	h->result = cudaErrorUnknown;
	h->ms = -1;
	return recv_msg(c->fd, h, sizeof(*h), NULL, limit_ms) && h->result == cudaSuccess;
}

static void faults(struct mps *m)
{
	const struct client_arg va = {m->dir, 'v', 0}, fa = {m->dir, 'f', 0}, na = {m->dir, 'n', 0};
	struct child v = join_as(&va), f = join_as(&fa);
	struct hello hv, hf, hn;
	struct mps fresh;
	char launched;

	if (!joined(&v, &hv, 8000) || !joined(&f, &hf, 8000)) {
		fact("mps_fault", "clients join", false, "victim %d, faulter %d", hv.result,
		     hf.result);
		kill_now(&v);
		kill_now(&f);
		return;
	}
	send_msg(f.fd, "g", 1, -1);
	recv_msg(f.fd, &launched, 1, NULL, 3000);
	const bool seen = recv_msg(v.fd, &hv, sizeof(hv), NULL, 8000);

	fact("mps_fault",
	     "a client's illegal access kills the contexts of all clients of its server",
	     seen && hv.result != cudaSuccess, "the other client saw %s",
	     seen ? error_text(hv.result) : "nothing in 8 s");
	struct child n = join_as(&na);
	const bool in = joined(&n, &hn, 2500);

	kill_now(&n);
	fact("mps_fault_newcomer",
	     "the faulted server refuses newcomers until its last client is gone", !in,
	     "newcomer: %s",
	     in          ? "ran"
	     : hn.ms < 0 ? "no answer in 2.5 s"
			 : error_text(hn.result));
	const double t = now_ms();
	const bool up = mps_start(&fresh, true);
	const struct client_arg ga = {fresh.dir, 'n', 0};

	n = join_as(&ga);
	const bool in2 = up && joined(&n, &hn, 8000);
	const double took = now_ms() - t;

	kill_now(&n);
	fact("mps_fresh_daemon", "a second control daemon takes newcomers at once (165 ms)",
	     in2 && took < 1500, "daemon, server and first kernel %.0f ms", took);
	mps_stop(&fresh);
	kill_now(&v);
	kill_now(&f);
	sleep_ms(200);
	n = join_as(&na);
	const bool in3 = joined(&n, &hn, 8000);

	kill_now(&n);
	fact("mps_fault_over", "after its last client the server takes newcomers again", in3,
	     "newcomer: %s",
	     in3         ? "ran"
	     : hn.ms < 0 ? "no answer in 8 s"
			 : error_text(hn.result));
}

static void killed(struct mps *m)
{
	const struct client_arg va = {m->dir, 'v', 0}, sa = {m->dir, 's', 0};
	struct child v = join_as(&va), s = join_as(&sa);
	struct hello hv, hs;
	char launched;

	if (!joined(&v, &hv, 8000) || !joined(&s, &hs, 8000)) {
		fact("mps_kill", "clients join", false, "victim %d, spinner %d", hv.result,
		     hs.result);
	} else {
		send_msg(s.fd, "g", 1, -1);
		recv_msg(s.fd, &launched, 1, NULL, 3000);
		sleep_ms(50);
		kill(s.pid, SIGKILL);
		const bool seen = recv_msg(v.fd, &hv, sizeof(hv), NULL, 8000);

		fact("mps_kill",
		     "SIGKILL of a client inside a kernel kills the contexts of all clients",
		     seen && hv.result != cudaSuccess, "the other client saw %s",
		     seen ? error_text(hv.result) : "nothing in 8 s");
	}
	kill_now(&s);
	kill_now(&v);
}

static void two_daemons(void)
{
	struct mps a, b;
	const bool up = mps_start(&a, true) && mps_start(&b, true);
	const struct client_arg ca = {a.dir, 'v', 0}, cb = {b.dir, 'n', 0};
	struct child x = join_as(&ca), y = join_as(&cb);
	struct hello hx, hy;
	const bool ok = joined(&x, &hx, 8000) && joined(&y, &hy, 8000);

	fact("mps_two_daemons", "two control daemons serve one GPU side by side", up && ok, "%s",
	     up && ok ? "clients of both ran" : "one did not run");
	kill_now(&x);
	kill_now(&y);
	mps_stop(&a);
	mps_stop(&b);
}

static void second_uid(bool multiuser)
{
	const char *name = multiuser ? "mps_uid_multiuser" : "mps_uid";
	struct mps m;
	const bool up = mps_start(&m, multiuser);
	const struct client_arg ra = {m.dir, 'v', 0}, ua = {m.dir, 'n', 65534};
	struct child r = join_as(&ra);
	struct hello hr, hu;
	const bool first = up && joined(&r, &hr, 8000);
	struct child u = join_as(&ua);
	const bool second = joined(&u, &hu, multiuser ? 8000 : 2500);

	if (!first)
		fact(name, "the first client joins", false, "it did not");
	else if (multiuser)
		fact(name, "with -multiuser-server a second uid joins", second, "%s",
		     second      ? "ran"
		     : hu.ms < 0 ? "no answer in 8 s"
				 : error_text(hu.result));
	else
		fact(name, "without -multiuser-server a second uid waits for ever",
		     !second && hu.ms < 0, "%s",
		     second      ? "ran"
		     : hu.ms < 0 ? "no answer in 2.5 s"
				 : error_text(hu.result));
	kill_now(&u);
	kill_now(&r);
	mps_stop(&m);
}

int main(void)
{
	struct mps m;

	skip_without_mps("mps");
	if (!mps_start(&m, true)) {
		printf("%-22s | skipped: nvidia-cuda-mps-control does not start here\n", "mps");
		return 77;
	}
	faults(&m);
	mps_stop(&m);
	if (mps_start(&m, true))
		killed(&m);
	mps_stop(&m);
	two_daemons();
	second_uid(false);
	second_uid(true);
	return facts_failed;
}
