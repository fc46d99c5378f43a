/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.h - keeps the NVIDIA driver's state of the GPUs while no worker runs.
 *
 * When nobody has a GPU open, the driver may shut it down, and the next worker waits seconds for it to come up
 * again. nvidia-persistenced prevents that; where it does not run, these open device files do. They are opened
 * and nothing else: no CUDA, no ioctl.
 */
#ifndef EXL3_DAEMON_DRIVER_H
#define EXL3_DAEMON_DRIVER_H

#define EXL3_DRIVER_FDS 33u /* nvidiactl and 32 GPUs */

struct exl3_driver {
	int fds[EXL3_DRIVER_FDS]; /* owned */
	unsigned nr;
};

/* @dir: "/dev". What is not there or must not be opened is left out. Does not wait for a GPU to come up. */
void exl3_driver_hold(struct exl3_driver *driver, const char *dir);
void exl3_driver_release(struct exl3_driver *driver);

#endif
