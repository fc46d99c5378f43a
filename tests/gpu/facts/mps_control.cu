/* SPDX-License-Identifier: Apache-2.0 */
/* mps_control.cu - an MPS control daemon as somebody's child: start, end, kill, users, folders, who is served. */
#include "mps.h"

struct hello {
	cudaError_t result;
	double ms; /* from the start of the process's CUDA to the end of its first kernel */
	int attribute;
};

struct client_arg {
	const char *dir;
	bool stays; /* runs small kernels until it is told to leave */
	uid_t uid;
};

static int client(int sock, const void *p)
{
	const struct client_arg *a = (const struct client_arg *)p;
	const double t = now_ms();
	struct hello h = {};

	if (a->dir)
		mps_env(a->dir);
	if (a->uid && (setgid(a->uid) < 0 || setuid(a->uid) < 0))
		return 2;
	h.result = cudaFree(0);
	if (h.result == cudaSuccess) {
		nothing<<<1, 1>>>();
		h.result = cudaDeviceSynchronize();
	}
	h.ms = now_ms() - t;
	h.attribute = -1;
#if CUDART_VERSION >= 12080
	int (*get)(int *, int, int) =
		(int (*)(int *, int, int))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuDeviceGetAttribute");

	if (!get || get(&h.attribute, 133 /* CU_DEVICE_ATTRIBUTE_MPS_ENABLED */, 0) != 0)
		h.attribute = -1;
#endif
	send_msg(sock, &h, sizeof(h), -1);
	if (!a->stays || h.result != cudaSuccess)
		return h.result != cudaSuccess;
	for (struct pollfd f = {sock, POLLIN, 0}; poll(&f, 1, 2) == 0;) {
		nothing<<<1, 1>>>();
		h.result = cudaDeviceSynchronize();
		if (h.result != cudaSuccess)
			break;
	}
	send_msg(sock, &h, sizeof(h), -1);
	return h.result != cudaSuccess;
}

static bool joined(struct child *c, struct hello *h, int limit_ms)
{
	h->result = cudaErrorUnknown;
	h->ms = -1;
	h->attribute = -2;
	return recv_msg(c->fd, h, sizeof(*h), NULL, limit_ms) && h->result == cudaSuccess;
}

/* One that comes and goes: "12 ms", or what it got instead. */
static const char *visit(const char *dir, uid_t uid, int limit_ms)
{
	static char text[4][64];
	static unsigned turn;
	char *s = text[turn++ % 4];
	const struct client_arg a = {dir, false, uid};
	struct child c = start(client, &a, 20);
	struct hello h;

	if (joined(&c, &h, limit_ms))
		snprintf(s, 64, "ran, %.0f ms, attribute %d", h.ms, h.attribute);
	else if (h.ms < 0)
		snprintf(s, 64, "no answer in %d ms", limit_ms);
	else
		snprintf(s, 64, "CUDA error %d after %.0f ms", (int)h.result, h.ms);
	kill_now(&c);
	return s;
}

static bool ran(const char *s)
{
	return strncmp(s, "ran", 3) == 0;
}

/* Control daemon in the foreground as our child. */
static pid_t control(const char *dir, uid_t uid)
{
	const pid_t pid = fork();

	if (pid == 0) {
		char log[128];

		mps_env(dir);
		snprintf(log, sizeof(log), "%s/out", dir);
		freopen("/dev/null", "r", stdin);
		freopen(log, "w", stdout);
		dup2(1, 2);
		if (uid && (setgid(uid) < 0 || setuid(uid) < 0))
			_exit(2);
		alarm(50);
		execlp("nvidia-cuda-mps-control", "nvidia-cuda-mps-control", "-f", "-multiuser-server",
		       (char *)NULL);
		_exit(127);
	}
	return pid;
}

static char *fresh_dir(const char *suffix, mode_t mode, uid_t uid)
{
	static char dirs[8][160];
	static unsigned turn;
	char *dir = dirs[turn++ % 8];

	strcpy(dir, "/tmp/exl3-facts-mps-XXXXXX");
	if (!mkdtemp(dir) || chmod(dir, 0711) < 0)
		die("mkdtemp: %s", strerror(errno));
	strcat(dir, suffix);
	if (mkdir(dir, 0755) < 0 || chmod(dir, mode) < 0 || (uid && chown(dir, uid, uid) < 0))
		die("%s: %s", dir, strerror(errno));
	return dir;
}

static void show(const char *dir, const char *command)
{
	char line[400];
	const double t = now_ms();

	snprintf(line, sizeof(line),
		 "export CUDA_MPS_PIPE_DIRECTORY=%s CUDA_MPS_LOG_DIRECTORY=%s; cd %s; echo '  $ %s'; timeout 5 "
		 "sh -c '%s' 2>&1 </dev/null | head -20 | sed 's/^/  /'",
		 dir, dir, dir, command, command);
	fflush(stdout);
	if (system(line) != 0)
		printf("  (failed)\n");
	printf("  (%.0f ms)\n", now_ms() - t);
}

/* Milliseconds until @pid has ended, -1: not within the limit. */
static double ended(pid_t pid, int limit_ms)
{
	const double t = now_ms();

	while (waitpid(pid, NULL, WNOHANG) == 0) {
		if (now_ms() - t > limit_ms)
			return -1;
		sleep_ms(1);
	}
	return now_ms() - t;
}

static double until_socket(const char *dir, int limit_ms)
{
	char path[200];
	const double t = now_ms();

	snprintf(path, sizeof(path), "%s/control", dir);
	while (access(path, F_OK) != 0 && now_ms() - t < limit_ms)
		sleep_ms(1);
	return now_ms() - t;
}

static void run_as(uid_t uid, const char *what)
{
	char *dir = fresh_dir("/0123456789abcdef0123456789abcdef0123456789abcdef", 0711, uid);
	const pid_t pid = control(dir, uid);
	const double up = until_socket(dir, 3000);
	char name[64], says[128];
	const char *first = visit(dir, uid, 6000);
	const double stop_start = now_ms();

	snprintf(name, sizeof(name), "mpsc_%s", what);
	snprintf(says, sizeof(says), "control daemon of %s in the foreground, folder 0711: its user joins", what);
	fact(name, says, ran(first), "control socket after %.0f ms; first client %s", up, first);
	show(dir, "ls -la; cat out | head -5; tail -3 control.log server.log");
	const char *other = visit(dir, 65533, 3000), *root = uid ? visit(dir, 0, 3000) : "-";

	fact(name, "another uid joins", ran(other), "%s; root: %s (%.0f ms)", other, root,
	     now_ms() - stop_start);
	const struct client_arg sa = {dir, true, uid};
	struct child s = start(client, &sa, 20);
	struct hello h;
	const bool in = joined(&s, &h, 5000);

	show(dir, "echo get_server_list | nvidia-cuda-mps-control; for s in $(echo get_server_list | "
		  "nvidia-cuda-mps-control); do echo get_client_list $s | nvidia-cuda-mps-control; echo "
		  "get_server_status $s | nvidia-cuda-mps-control; done");
	/* quit while a client is there: does it wait, does the client go on, are newcomers refused? */
	if (uid == 0) {
		char line[300];

		snprintf(line, sizeof(line),
			 "CUDA_MPS_PIPE_DIRECTORY=%s sh -c 'echo quit | timeout 20 nvidia-cuda-mps-control' "
			 ">/dev/null 2>&1 &",
			 dir);
		if (system(line) != 0)
			die("sh");
		const double early = ended(pid, 700);
		const char *late = visit(dir, 0, 1200);

		send_msg(s.fd, "x", 1, -1);
		const bool last = joined(&s, &h, 3000);
		const double end = early >= 0 ? early : ended(pid, 5000);

		kill_now(&s);
		fact("mpsc_quit", "quit waits for the last client, which goes on; then the daemon ends",
		     in && early < 0 && last && end >= 0,
		     "ended early: %.0f; client %s; a newcomer meanwhile: %s; end %.0f ms after the last one left",
		     early, last ? "well" : "broken", late, end);
		if (end < 0)
			kill(pid, SIGKILL), ended(pid, 1000);
	} else {
		kill(pid, SIGTERM);
		double end = ended(pid, 1500);
		const bool well = !recv_msg(s.fd, &h, sizeof(h), NULL, 300);

		if (end < 0)
			kill(pid, SIGKILL), ended(pid, 1000);
		sleep_ms(100);
		send_msg(s.fd, "x", 1, -1);
		const bool last = joined(&s, &h, 3000);

		kill_now(&s);
		fact("mpsc_term", "SIGTERM ends the control daemon", end >= 0,
		     "end after %.0f ms, its client: %s, at the end %s", end, well ? "goes on" : "said something",
		     last ? "well" : "broken");
	}
	show("/tmp", "pgrep -a mps");
}

/* What SIGKILL of control daemon or server does to who is there. */
static void killed(bool server)
{
	char *dir = fresh_dir("/k", 0711, 0);
	const pid_t pid = control(dir, 0);

	until_socket(dir, 3000);
	const struct client_arg sa = {dir, true, 0};
	struct child s = start(client, &sa, 20);
	struct hello h;
	const bool in = joined(&s, &h, 6000);
	const double t = now_ms();

	if (server) {
		char line[300];

		snprintf(line, sizeof(line),
			 "CUDA_MPS_PIPE_DIRECTORY=%s; export CUDA_MPS_PIPE_DIRECTORY; kill -9 $(echo get_server_list "
			 "| timeout 5 nvidia-cuda-mps-control)",
			 dir);
		if (system(line) != 0)
			printf("  (kill failed)\n");
	} else {
		kill(pid, SIGKILL);
	}
	const bool said = recv_msg(s.fd, &h, sizeof(h), NULL, 1500);
	const char *late = visit(dir, 0, 1500);

	fact(server ? "mpsc_kill_server" : "mpsc_kill_control",
	     server ? "SIGKILL of the server ends its clients' contexts" : "SIGKILL of the control daemon: its clients go on",
	     in && said == server, "client: %s%d after %.0f ms; a newcomer: %s; control daemon %s", said ? "error " : "well ",
	     said ? (int)h.result : 0, now_ms() - t, late, kill(pid, 0) == 0 && ended(pid, 0) < 0 ? "there" : "gone");
	kill_now(&s);
	char *dir2 = fresh_dir("/k2", 0711, 0);
	const pid_t pid2 = control(dir2, 0);

	until_socket(dir2, 3000);
	const char *next = visit(dir2, 0, 6000);

	fact("mpsc_after_kill", "a fresh control daemon takes newcomers", ran(next), "%s", next);
	show("/tmp", "pgrep -a mps");
	kill(pid, SIGKILL);
	ended(pid, 100);
	mps_shell(dir2, "echo quit | nvidia-cuda-mps-control");
	ended(pid2, 2000);
}

int main(void)
{
	skip_without_mps("mps_control");
	const char *none = visit(NULL, 0, 6000);

	fact("mpsc_none", "without MPS the attribute is 0", ran(none) && strstr(none, "attribute 0"), "%s", none);
	run_as(0, "root");
	run_as(65534, "nobody");
	killed(false);
	killed(true);
	return facts_failed;
}
