/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exhaust.c - for LD_PRELOAD: the n-th allocation, descriptor or send of the daemon's own code fails.
 *
 * $EXHAUST is a file that holds a struct control, which the test writes and reads while the daemon runs. Calls
 * count if they come from the executable itself, not from a library, in a process whose name is the one that the
 * control says. So every call is a fault point, those that somebody will write tomorrow included.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As tests/integration/test_exhaust.py writes it. */
struct control {
	uint64_t nth;   /* the call that fails, from 1; 0: none, and none is counted */
	uint64_t count; /* calls since the test has set this to 0 */
	uint64_t where; /* the place of the one that failed, as an offset in the executable; 0: none has */
	char what[16];  /* its function */
	char process[16];
};

static struct control *control;
static uintptr_t begin, end; /* of the executable */

static int find(struct dl_phdr_info *info, size_t size, void *arg)
{
	(void)size;
	(void)arg;
	begin = info->dlpi_addr;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		uintptr_t last = begin + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;

		if (info->dlpi_phdr[i].p_type == PT_LOAD && last > end)
			end = last;
	}
	return 1; /* the first one is the executable */
}

__attribute__((constructor)) static void start(void)
{
	const char *path = getenv("EXHAUST");
	int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
	void *p;

	if (fd < 0)
		return;
	p = (void *)syscall(SYS_mmap, NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	syscall(SYS_close, fd);
	dl_iterate_phdr(find, NULL);
	if (p != MAP_FAILED)
		control = p;
}

/* Whichever of its threads asks. */
static int is_process(const char *want)
{
	char name[32] = {0};
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/comm", O_RDONLY | O_CLOEXEC);

	if (fd < 0 || syscall(SYS_read, fd, name, sizeof(name) - 1) < 0)
		name[0] = 0;
	syscall(SYS_close, fd);
	name[strcspn(name, "\n")] = 0;
	return strcmp(name, want) == 0;
}

static int fails(const char *what, void *from)
{
	uint64_t nth = control ? __atomic_load_n(&control->nth, __ATOMIC_ACQUIRE) : 0;
	uintptr_t at = (uintptr_t)from;

	if (!nth || at < begin || at >= end || !is_process(control->process) ||
	    __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST) != nth)
		return 0;
	strncpy(control->what, what, sizeof(control->what) - 1);
	__atomic_store_n(&control->where, at - begin, __ATOMIC_RELEASE);
	return 1;
}

#define NEXT(name) ((__typeof__(&name))next(#name))
void *dlsym(void *handle, const char *name);

static void *next(const char *name)
{
	return dlsym((void *)-1L, name); /* RTLD_NEXT */
}

/* The allocator is asked by others before dlsym() can be: by its own names, which need none. */
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);

#pragma GCC visibility push(default) /* these take the place of libc's */

#define FROM __builtin_return_address(0)
#define FAIL(what, error, result)                                                                  \
	do {                                                                                       \
		if (fails(what, FROM)) {                                                           \
			errno = error;                                                             \
			return result;                                                             \
		}                                                                                  \
	} while (0)

void *malloc(size_t n)
{
	FAIL("malloc", ENOMEM, NULL);
	return __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
	FAIL("calloc", ENOMEM, NULL);
	return __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
	FAIL("realloc", ENOMEM, NULL);
	return __libc_realloc(p, n);
}

char *strdup(const char *s)
{
	size_t n = strlen(s) + 1;
	char *copy;

	FAIL("strdup", ENOMEM, NULL);
	copy = __libc_malloc(n);
	return copy ? memcpy(copy, s, n) : NULL;
}

char *strndup(const char *s, size_t n)
{
	char *copy;

	FAIL("strndup", ENOMEM, NULL);
	n = strnlen(s, n);
	copy = __libc_malloc(n + 1);
	if (!copy)
		return NULL;
	memcpy(copy, s, n);
	copy[n] = 0;
	return copy;
}

int __vasprintf_chk(char **ret, int flag, const char *fmt, va_list ap);
int __vasprintf_chk(char **ret, int flag, const char *fmt, va_list ap)
{
	FAIL("vasprintf", ENOMEM, -1);
	return NEXT(__vasprintf_chk)(ret, flag, fmt, ap);
}

int __asprintf_chk(char **ret, int flag, const char *fmt, ...);
int __asprintf_chk(char **ret, int flag, const char *fmt, ...)
{
	va_list ap;
	int n;

	FAIL("asprintf", ENOMEM, -1);
	va_start(ap, fmt);
	n = NEXT(__vasprintf_chk)(ret, flag, fmt, ap);
	va_end(ap);
	return n;
}

FILE *open_memstream(char **text, size_t *size)
{
	FAIL("open_memstream", ENOMEM, NULL);
	return NEXT(open_memstream)(text, size);
}

void *mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t offset)
{
	FAIL("mmap", ENOMEM, MAP_FAILED);
	return NEXT(mmap)(addr, bytes, prot, flags, fd, offset);
}

int memfd_create(const char *name, unsigned flags)
{
	FAIL("memfd_create", EMFILE, -1);
	return NEXT(memfd_create)(name, flags);
}

int ftruncate(int fd, off_t bytes)
{
	FAIL("ftruncate", ENOMEM, -1);
	return NEXT(ftruncate)(fd, bytes);
}

int fallocate(int fd, int mode, off_t offset, off_t bytes)
{
	FAIL("fallocate", ENOSPC, -1);
	return NEXT(fallocate)(fd, mode, offset, bytes);
}

int eventfd(unsigned count, int flags);
int eventfd(unsigned count, int flags)
{
	FAIL("eventfd", EMFILE, -1);
	return NEXT(eventfd)(count, flags);
}

int socket(int domain, int type, int protocol)
{
	FAIL("socket", EMFILE, -1);
	return NEXT(socket)(domain, type, protocol);
}

int socketpair(int domain, int type, int protocol, int pair[2])
{
	FAIL("socketpair", EMFILE, -1);
	return NEXT(socketpair)(domain, type, protocol, pair);
}

int open(const char *path, int flags, ...)
{
	va_list ap;
	mode_t mode;

	FAIL("open", EMFILE, -1);
	va_start(ap, flags);
	mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
	va_end(ap);
	return NEXT(open)(path, flags, mode);
}

int openat(int dir, const char *path, int flags, ...)
{
	va_list ap;
	mode_t mode;

	FAIL("openat", EMFILE, -1);
	va_start(ap, flags);
	mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
	va_end(ap);
	return NEXT(openat)(dir, path, flags, mode);
}

int fcntl(int fd, int command, ...)
{
	va_list ap;
	long arg;

	if (command == F_DUPFD || command == F_DUPFD_CLOEXEC)
		FAIL("fcntl", EMFILE, -1);
	va_start(ap, command);
	arg = va_arg(ap, long);
	va_end(ap);
	return NEXT(fcntl)(fd, command, arg);
}

ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
	FAIL("sendmsg", ENOBUFS, -1);
	return NEXT(sendmsg)(fd, msg, flags);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
	if (fails("pthread_create", FROM))
		return EAGAIN;
	return NEXT(pthread_create)(thread, attr, fn, arg);
}
