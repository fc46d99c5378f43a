/* SPDX-License-Identifier: Apache-2.0 */
/* mps.c - MPS control daemons of a fault domain: one per generation, children of the supervisor. */
#include "daemon/mps.h"

#include "daemon/fault.h"
#include "daemon/log.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define LOOK_NS 5000000ull    /* between two looks for the control daemon's socket */
#define STOP_NS 1000000000ull /* that clients have at the daemon's end */
#define LAST_NS 5000000000ull /* that the control daemon has when its last client has left */

enum server_state { STARTING, UP, RETIRED };

struct exl3_mps_server {
	struct exl3_mps *mps;
	struct exl3_mps_server *next; /* in mps->old */
	enum server_state state;
	pid_t control, quit; /* 0: none, or it has ended */
	uint64_t start_ns;
	uint32_t generation;
	bool stopping, killed;
	struct exl3_timer timer; /* STARTING: look for the socket; stopping: kill */
	char dir[EXL3_MPS_DIR_MAX];
};

/* ---- folders ---- */

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
	(void)st;
	(void)type;
	(void)at;
	remove(path);
	return 0;
}

static void remove_tree(const char *dir)
{
	nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static int make_dir(const char *dir, mode_t mode, struct exl3_error *err)
{
	/* chmod: the umask is for files of clients, not for who may enter here. */
	if (mkdir(dir, 0700) < 0 || chmod(dir, mode) < 0)
		return exl3_errf(err, -errno, "MPS: folder %s: %m", dir);
	return 0;
}

/* Folders of daemons that were killed: their names begin with the supervisor's process id. */
static void remove_left(const char *base)
{
	char path[EXL3_MPS_DIR_MAX + 256];
	struct dirent *entry;
	DIR *dir = opendir(base);

	while (dir && (entry = readdir(dir))) {
		long pid = strtol(entry->d_name, NULL, 10);

		if (pid > 0 && pid != getpid() && (kill((pid_t)pid, 0) == 0 || errno != ESRCH))
			continue; /* it may be about to hand over to us */
		if (pid > 0 && snprintf(path, sizeof(path), "%s/%s", base, entry->d_name) <
				       (int)sizeof(path))
			remove_tree(path);
	}
	if (dir)
		closedir(dir);
}

int exl3_mps_base(const char *socket, char *ret, struct exl3_error *err)
{
	size_t len = strlen(socket);
	struct stat st;

	if (len > 5 && strcmp(socket + len - 5, ".sock") == 0)
		len -= 5;
	if (snprintf(ret, 104, "%.*s.mps", (int)len, socket) >= 104)
		return exl3_errf(err, -ENAMETOOLONG, "MPS: the socket's path is too long");
	if (lstat(ret, &st) < 0)
		return make_dir(ret, 0711, err);
	if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid())
		return exl3_errf(err, -EEXIST, "MPS: %s is there and is not ours", ret);
	remove_left(ret);
	return chmod(ret, 0711) < 0 ? exl3_errf(err, -errno, "MPS: folder %s: %m", ret) : 0;
}

void exl3_mps_log_dir(const char *pipe, char *ret)
{
	snprintf(ret, EXL3_MPS_DIR_MAX + 8, "%s/log", pipe);
}

static int make_folders(struct exl3_mps_server *s, struct exl3_error *err)
{
	char log[EXL3_MPS_DIR_MAX + 8];
	uint64_t secret;
	int n, rc;

	if (getrandom(&secret, sizeof(secret), 0) != sizeof(secret))
		return exl3_errf(err, -errno, "MPS: getrandom: %m");
	n = snprintf(s->dir, sizeof(s->dir), "%s/%d.%u.%u.%016llx", s->mps->base, (int)getpid(),
		     s->mps->index, s->generation, (unsigned long long)secret);
	if (n >= (int)sizeof(s->dir)) {
		s->dir[0] = 0;
		return exl3_errf(err, -ENAMETOOLONG,
				 "MPS: %s is too long a path for the sockets that would be in it",
				 s->mps->base);
	}
	exl3_mps_log_dir(s->dir, log);
	/* A daemon that has just handed over to us may have removed what it thought was its own. */
	if (access(s->mps->base, F_OK) < 0 && make_dir(s->mps->base, 0711, err) < 0)
		return err->code;
	rc = exl3_fault("mps.folder") ? exl3_errf(err, -ENOSPC, "MPS: no folder")
				      : make_dir(s->dir, 0700, err);
	if (rc == 0)
		rc = make_dir(log, 0700, err);
	return rc < 0 ? rc : s->mps->protect(s->mps->arg, s->dir, err);
}

static void protect_again(struct exl3_mps_server *s)
{
	struct exl3_error err;

	if (s->mps->protect(s->mps->arg, s->dir, &err) < 0)
		exl3_err("%s", err.text);
}

void exl3_mps_protect(struct exl3_mps *mps)
{
	if (mps->now)
		protect_again(mps->now);
	for (struct exl3_mps_server *s = mps->old; s; s = s->next)
		protect_again(s);
}

/* ---- children ---- */

/* In the child: @input becomes its standard input, /dev/null if -1. */
static void become_program(const struct exl3_mps_server *s, char *const argv[], int input,
			   pid_t supervisor)
{
	char log[EXL3_MPS_DIR_MAX + 8], out[EXL3_MPS_DIR_MAX + 16];
	sigset_t none;
	int fd;

	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != supervisor)
		_exit(126);
	exl3_mps_log_dir(s->dir, log);
	snprintf(out, sizeof(out), "%s/out", log);
	fd = input >= 0 ? input : open("/dev/null", O_RDONLY);
	if (fd < 0 || dup2(fd, 0) < 0)
		_exit(126);
	fd = open(out, O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
		_exit(126);
	close_range(3, ~0u, 0);
	setenv("CUDA_MPS_PIPE_DIRECTORY", s->dir, 1);
	setenv("CUDA_MPS_LOG_DIRECTORY", log, 1);
	unsetenv("NOTIFY_SOCKET");
	unsetenv("WATCHDOG_USEC");
	unsetenv("WATCHDOG_PID");
	umask(0); /* other users join */
	signal(SIGPIPE, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	execvp(argv[0], argv);
	_exit(127);
}

static pid_t spawn(const struct exl3_mps_server *s, char *const argv[], int input,
		   struct exl3_error *err)
{
	pid_t supervisor = getpid(), pid = exl3_fault("mps.fork") ? (errno = EAGAIN, -1) : fork();

	if (pid == 0)
		become_program(s, argv, input, supervisor);
	return pid < 0 ? exl3_errf(err, -errno, "MPS: fork: %m") : pid;
}

static void kill_all(struct exl3_mps_server *s)
{
	s->killed = true;
	if (s->quit)
		kill(s->quit, SIGKILL);
	if (s->control)
		kill(s->control, SIGKILL);
}

/* Its processes are gone. */
static void forget(struct exl3_mps_server *s)
{
	struct exl3_mps *mps = s->mps;

	exl3_timer_cancel(mps->loop, &s->timer);
	if (mps->now == s) {
		mps->now = NULL;
	} else {
		struct exl3_mps_server **p = &mps->old;

		while (*p && *p != s)
			p = &(*p)->next;
		if (*p) {
			*p = s->next;
			mps->nr_old--;
		}
	}
	if (s->dir[0])
		remove_tree(s->dir);
	free(s);
}

/* ---- start ---- */

static void up(struct exl3_mps_server *s)
{
	exl3_timer_cancel(s->mps->loop, &s->timer);
	s->state = UP;
	s->mps->up(s->mps->arg, 0, "");
}

static void look(struct exl3_mps_server *s)
{
	char path[EXL3_MPS_DIR_MAX + 16];
	uint64_t now = exl3_now_ns();

	snprintf(path, sizeof(path), "%s/control", s->dir);
	if (access(path, F_OK) == 0) {
		up(s);
		return;
	}
	if (now - s->start_ns >= EXL3_MPS_START_NS) {
		kill_all(s); /* exl3_mps_ended() follows and reports it */
		return;
	}
	exl3_timer_set(s->mps->loop, &s->timer, now + LOOK_NS);
}

static void on_timer(void *arg)
{
	struct exl3_mps_server *s = arg;

	if (s->stopping || s->state == RETIRED)
		kill_all(s);
	else
		look(s);
}

int exl3_mps_start(struct exl3_mps *mps, uint32_t generation, struct exl3_error *err)
{
	/* With -multiuser-server other users join, if root starts it. Another user's serves that user alone. */
	char *const argv[] = {(char *)(uintptr_t)mps->program, (char *)"-f",
			      geteuid() == 0 ? (char *)"-multiuser-server" : NULL, NULL};
	struct exl3_mps_server *s = calloc(1, sizeof(*s));
	int rc;

	if (!s)
		return exl3_errf(err, -ENOMEM, "MPS: out of memory");
	s->mps = mps;
	s->generation = generation;
	s->state = STARTING;
	s->start_ns = exl3_now_ns();
	s->timer.fn = on_timer;
	s->timer.arg = s;
	mps->now = s;
	rc = make_folders(s, err);
	if (rc == 0)
		rc = spawn(s, argv, -1, err);
	if (rc < 0) {
		forget(s);
		return rc;
	}
	s->control = rc;
	exl3_timer_set(mps->loop, &s->timer, s->start_ns + LOOK_NS);
	return 0;
}

bool exl3_mps_program_exists(const char *program)
{
	exl3_auto(exl3_freep) char *copy = NULL;
	const char *path = getenv("PATH");
	char file[4096], *save;

	if (strchr(program, '/'))
		return access(program, X_OK) == 0;
	copy = strdup(path ? path : "/usr/local/bin:/usr/bin:/bin");
	for (char *dir = copy ? strtok_r(copy, ":", &save) : NULL; dir;
	     dir = strtok_r(NULL, ":", &save)) {
		if (snprintf(file, sizeof(file), "%s/%s", dir, program) < (int)sizeof(file) &&
		    access(file, X_OK) == 0)
			return true;
	}
	return false;
}

const char *exl3_mps_pipe(const struct exl3_mps *mps)
{
	return mps->now && mps->now->state == UP ? mps->now->dir : NULL;
}

/* ---- end ---- */

/* quit, on the control program's standard input: returns when the last client has left. */
static void send_quit(struct exl3_mps_server *s)
{
	static const char command[] = "quit\n";
	char *const argv[] = {(char *)(uintptr_t)s->mps->program, NULL};
	exl3_auto(exl3_closep) int fd = memfd_create("exl3-mps-quit", MFD_CLOEXEC);
	struct exl3_error err;
	int rc = -1;

	if (s->quit || !s->control)
		return;
	if (fd >= 0 && write(fd, command, sizeof(command) - 1) == (ssize_t)sizeof(command) - 1 &&
	    lseek(fd, 0, SEEK_SET) == 0)
		rc = spawn(s, argv, fd, &err);
	if (rc > 0) {
		s->quit = rc;
	} else {
		exl3_warn("MPS: a control daemon cannot be told to quit and is killed");
		kill_all(s);
	}
}

void exl3_mps_retire(struct exl3_mps *mps)
{
	struct exl3_mps_server *s = mps->now, *oldest;

	if (!s)
		return;
	exl3_timer_cancel(mps->loop, &s->timer);
	mps->now = NULL;
	s->state = RETIRED;
	s->next = mps->old;
	mps->old = s;
	mps->nr_old++;
	send_quit(s);
	if (mps->nr_old <= EXL3_MPS_OLD_MAX)
		return;
	for (oldest = mps->old; oldest->next; oldest = oldest->next)
		;
	if (!oldest->killed)
		exl3_warn("MPS: more than %u servers of former generations have clients left: the "
			  "oldest, of generation %u, is killed",
			  EXL3_MPS_OLD_MAX, oldest->generation);
	kill_all(oldest);
}

static struct exl3_mps_server *find(struct exl3_mps *mps, pid_t pid)
{
	struct exl3_mps_server *s = mps->now;

	if (s && (s->control == pid || s->quit == pid))
		return s;
	for (s = mps->old; s && s->control != pid && s->quit != pid; s = s->next)
		;
	return s;
}

static void how_it_ended(const struct exl3_mps_server *s, int wstatus, char *text, size_t size)
{
	if (s->state == STARTING && s->killed)
		snprintf(text, size, "%s has not opened its socket within %llu s", s->mps->program,
			 EXL3_MPS_START_NS / 1000000000u);
	else if (WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == 127)
		snprintf(text, size, "%s cannot be run", s->mps->program);
	else if (WIFEXITED(wstatus))
		snprintf(text, size, "%s ended with status %d", s->mps->program,
			 WEXITSTATUS(wstatus));
	else
		snprintf(text, size, "%s was killed by signal %d", s->mps->program,
			 WTERMSIG(wstatus));
}

bool exl3_mps_ended(struct exl3_mps *mps, pid_t pid, int wstatus)
{
	struct exl3_mps_server *s = find(mps, pid);
	enum server_state state;
	char why[256];
	bool silent;

	if (!s)
		return false;
	if (s->quit == pid) {
		s->quit = 0;
		if (s->control && (!WIFEXITED(wstatus) || WEXITSTATUS(wstatus)))
			kill_all(s); /* it does not listen */
		else if (s->control && !s->stopping)
			exl3_timer_set(mps->loop, &s->timer, exl3_now_ns() + LAST_NS);
		return true;
	}
	s->control = 0;
	how_it_ended(s, wstatus, why, sizeof(why));
	if (s->quit)
		kill(s->quit, SIGKILL); /* nobody answers it any more; it is reaped as a stranger */
	state = s->state;
	silent = s->stopping;
	forget(s);
	if (silent)
		return true;
	if (state == STARTING)
		mps->up(mps->arg, -EIO, why);
	else if (state == UP)
		mps->lost(mps->arg, why);
	return true;
}

static void stop_one(struct exl3_mps_server *s)
{
	if (s->stopping)
		return;
	s->stopping = true;
	if (s->state == STARTING)
		kill_all(s);
	else
		send_quit(s);
	exl3_timer_set(s->mps->loop, &s->timer, exl3_now_ns() + STOP_NS);
}

void exl3_mps_stop(struct exl3_mps *mps)
{
	if (mps->now)
		stop_one(mps->now);
	for (struct exl3_mps_server *s = mps->old; s; s = s->next)
		stop_one(s);
}

bool exl3_mps_busy(const struct exl3_mps *mps)
{
	return mps->now || mps->old;
}

void exl3_mps_fini(struct exl3_mps *mps)
{
	if (mps->now) {
		kill_all(mps->now);
		forget(mps->now);
	}
	while (mps->old) {
		kill_all(mps->old);
		forget(mps->old);
	}
}
