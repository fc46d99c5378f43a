/* SPDX-License-Identifier: Apache-2.0 */
/*
 * devices.h - the devices of a worker: the default one, and those that models name.
 *
 * A device is written cpu, cpu:INDEX, cuda, cuda:INDEX, cuda:UUID, or INDEX or UUID of the default backend.
 * All are opened at the start of the worker and stay until its end; a model lives on one of them.
 */
#ifndef EXL3_DAEMON_DEVICES_H
#define EXL3_DAEMON_DEVICES_H

#include "daemon/config.h"
#include "kernels/check.h" /* EXL3_DEVICES_MAX */

struct exl3_device {
	const struct exl3_backend_ops *ops; /* static */
	struct exl3_dev *dev;               /* owned */
	uint32_t index;                     /* in its list; the default device has 0 */
	char name[32];                      /* "cuda:1" */
	char spec[64];                      /* as it was named first: what another worker is told */
};

struct exl3_devices {
	struct exl3_device list[EXL3_DEVICES_MAX];
	uint32_t nr;
};

/**
 * exl3_devices_open() - the default device, those of the key "devices", and those of the models.
 * @cfg: backend, device, devices, models, and what the devices are to be opened with.
 * A device that only a model wants that was loaded at run time is left out with a line in the log: its model
 * is refused then. Returns 0, -ENODEV, -EINVAL or what the backend says; what was opened is the caller's to
 * close also after a failure.
 */
int exl3_devices_open(struct exl3_devices *all, const struct exl3_config *cfg, struct exl3_error *err);
void exl3_devices_close(struct exl3_devices *all);

/* The device that @spec means; NULL or "": the default one. NULL: it is not open, @err says which are. */
const struct exl3_device *exl3_devices_find(const struct exl3_devices *all, const char *spec,
					    struct exl3_error *err);
/* The one that makes arenas: what it makes, all devices can address that can share memory at all. */
const struct exl3_device *exl3_devices_for_arenas(const struct exl3_devices *all);
/* Where @dev addresses an arena that @maker made; NULL: it cannot. */
void *exl3_devices_address(const struct exl3_device *dev, const struct exl3_device *maker,
			   const struct exl3_arena *arena);

#endif
