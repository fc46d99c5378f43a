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

static bool in_mps(const char *s)
{
	return strncmp(s, "ran", 3) == 0 && strstr(s, "attribute 1");
}

/* Control daemon in the foreground as our child. */
static pid_t control(const char *dir, uid_t uid, bool multiuser)
{
	const pid_t pid = fork();

	if (pid == 0) {
		char log[200];

		mps_env(dir);
		snprintf(log, sizeof(log), "%s/out", dir);
		if (!freopen("/dev/null", "r", stdin) || !freopen(log, "w", stdout))
			_exit(2);
		dup2(1, 2);
		if (uid && (setgid(uid) < 0 || setuid(uid) < 0))
			_exit(2);
		alarm(50);
		umask(0);
		execlp("nvidia-cuda-mps-control", "nvidia-cuda-mps-control", "-f",
		       multiuser ? "-multiuser-server" : (char *)NULL, (char *)NULL);
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
	char line[1200];
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

/* @first, @other: is its user, is another one expected to join? */
static void run_as(uid_t uid, bool multiuser, const char *name, bool first, bool other)
{
	char *dir = fresh_dir("/0123456789abcdef0123456789abcdef0123456789abcdef", 0711, uid);
	const pid_t pid = control(dir, uid, multiuser);
	const double up = until_socket(dir, 1000);
	char says[160];
	const char *seen = visit(dir, uid, 6000);

	snprintf(says, sizeof(says), "control daemon of %s%s in the foreground, folder 0711: its user %s",
		 uid ? "a user" : "root", multiuser ? ", -multiuser-server," : "",
		 first ? "joins" : "does not join");
	fact(name, says, in_mps(seen) == first, "control socket after %.0f ms; first client %s", up, seen);
	show(dir, "ls -la; head -5 out");
	seen = visit(dir, 65533, 3000);
	fact(name, other ? "another user joins" : "another user does not join", in_mps(seen) == other, "%s",
	     seen);
	kill(pid, SIGKILL);
	ended(pid, 1000);
}

/* How it ends: by the command, by a signal; what a client meets that is still there. */
static void ends(const char *name, const char *says, const char *command, int sig, bool leaves)
{
	char *dir = fresh_dir("/e", 0711, 0), line[300];
	const pid_t pid = control(dir, 0, true);
	const struct client_arg sa = {dir, true, 0};

	until_socket(dir, 3000);
	struct child s = start(client, &sa, 20);
	struct hello h, last;
	const bool in = joined(&s, &h, 6000);

	if (!strcmp(name, "mpsc_quit"))
		show(dir, "echo get_server_list | nvidia-cuda-mps-control; for s in $(echo get_server_list | "
			  "nvidia-cuda-mps-control); do echo get_client_list $s | nvidia-cuda-mps-control; echo "
			  "get_server_status $s | nvidia-cuda-mps-control; echo ps | nvidia-cuda-mps-control; done");
	const double t = now_ms();

	if (sig) {
		kill(pid, sig);
	} else {
		snprintf(line, sizeof(line),
			 "CUDA_MPS_PIPE_DIRECTORY=%s sh -c 'echo %s | timeout 20 nvidia-cuda-mps-control' "
			 ">/dev/null 2>&1 &",
			 dir, command);
		if (system(line) != 0)
			die("sh");
	}
	double end = ended(pid, leaves ? 500 : 4000);
	const bool early = end >= 0, said = recv_msg(s.fd, &last, sizeof(last), NULL, 600);
	const char *late = visit(dir, 0, 1500);

	send_msg(s.fd, "x", 1, -1);
	const bool well = !said && joined(&s, &last, 3000);
	const double t2 = now_ms();

	if (!early)
		end = ended(pid, 5000);
	fact(name, says, in && (leaves ? !early && well && end >= 0 : early),
	     "daemon %s after %.0f ms; client %s%d; a newcomer: %s", end < 0 ? "did not end" : early ? "ended" : "ended, after the last client,",
	     early ? end : now_ms() - t2, well ? "well " : "error ", well ? 0 : (int)last.result, late);
	printf("  (%.0f ms in all)\n", now_ms() - t);
	kill_now(&s);
	if (end < 0)
		kill(pid, SIGKILL), ended(pid, 1000);
	show("/tmp", "pgrep -a mps-server");
}

/* A fault: what the control daemon says about the server then, and how long until the next generation serves. */
static int faulter(int sock, const void *p)
{
	mps_env((const char *)p);
	illegal_access<<<1, 1>>>();
	const int rc = (int)cudaDeviceSynchronize();

	send_msg(sock, &rc, sizeof(rc), -1);
	pause();
	return 0;
}

static void faulted(void)
{
	char *dir = fresh_dir("/f", 0711, 0), *dir2 = fresh_dir("/f2", 0711, 0);
	const pid_t pid = control(dir, 0, true);

	until_socket(dir, 3000);
	struct child f = start(faulter, dir, 20);
	int rc = 0;
	const bool in = recv_msg(f.fd, &rc, sizeof(rc), NULL, 6000);

	show(dir, "for s in $(timeout 2 sh -c \"echo get_server_list | nvidia-cuda-mps-control\"); do echo get_server_status $s "
		  "| timeout 2 nvidia-cuda-mps-control; done");
	const double t = now_ms();
	const pid_t pid2 = control(dir2, 0, true);

	until_socket(dir2, 3000);
	const char *next = visit(dir2, 0, 6000);

	fact("mpsc_fault", "beside a faulted server with a survivor, a fresh control daemon serves", in && in_mps(next),
	     "fault %d; daemon, server, first kernel: %.0f ms, %s", rc, now_ms() - t, next);
	const double t2 = now_ms();
	char line[300];

	snprintf(line, sizeof(line), "CUDA_MPS_PIPE_DIRECTORY=%s sh -c 'echo quit | timeout 20 nvidia-cuda-mps-control' >/dev/null 2>&1 &", dir);
	if (system(line) != 0)
		die("sh");
	const double early = ended(pid, 500);

	kill_now(&f);
	const double end = early >= 0 ? early : ended(pid, 5000);

	fact("mpsc_fault_quit", "quit of the faulted one ends it when the survivor has left", end >= 0,
	     "early %.0f, end %.0f ms after it, %.0f ms in all", early, end, now_ms() - t2);
	kill(pid, SIGKILL);
	kill(pid2, SIGTERM);
	if (ended(pid2, 1500) < 0)
		kill(pid2, SIGKILL), ended(pid2, 1000);
	if (end < 0)
		ended(pid, 1000);
}

int main(void)
{
	skip_without_mps("mps_control");
	const char *none = visit(NULL, 0, 6000);

	fact("mpsc_none", "without MPS the attribute is 0", strstr(none, "attribute 0") != NULL, "%s", none);
	run_as(65534, true, "mpsc_user_multi", false, false);
	run_as(65534, false, "mpsc_user", true, false);
	run_as(0, true, "mpsc_root", true, true);
	ends("mpsc_quit", "quit waits for the last client, which goes on", "quit", 0, true);
	ends("mpsc_quit_t", "quit -t 1 ends it in spite of a client", "quit -t 1", 0, false);
	ends("mpsc_term", "SIGTERM ends it", NULL, SIGTERM, false);
	ends("mpsc_kill_control", "SIGKILL ends it, and its clients' contexts", NULL, SIGKILL, false);
	faulted();
	return facts_failed;
}
