/* SPDX-License-Identifier: Apache-2.0 */
/* driver.c - keeps the NVIDIA driver's state of the GPUs while no worker runs. */
#include "daemon/driver.h"

#include "daemon/log.h"
#include "shm/util.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>

/* nvidiactl, nvidia0, nvidia1, ...; not nvidia-uvm and the like, which have no GPU behind them. */
static bool is_gpu(const char *name)
{
	if (strncmp(name, "nvidia", 6) != 0)
		return false;
	name += 6;
	return strcmp(name, "ctl") == 0 || (*name && name[strspn(name, "0123456789")] == 0);
}

void exl3_driver_hold(struct exl3_driver *driver, const char *dir)
{
	DIR *d = opendir(dir);
	struct dirent *e;

	driver->nr = 0;
	while (d && driver->nr < EXL3_DRIVER_FDS && (e = readdir(d))) {
		int fd;

		if (!is_gpu(e->d_name))
			continue;
		/* Not blocking: the driver then brings the GPU up behind our back. */
		fd = openat(dirfd(d), e->d_name, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
		if (fd >= 0)
			driver->fds[driver->nr++] = fd;
		else
			exl3_dbg("%s/%s: %m", dir, e->d_name);
	}
	if (d)
		closedir(d);
}

void exl3_driver_release(struct exl3_driver *driver)
{
	while (driver->nr)
		exl3_closep(&driver->fds[--driver->nr]);
}
