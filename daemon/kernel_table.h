/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_table.h - files of measured choices: written by a calibration, read at start and on reload.
 *
 *   exl3-kernel-table 1
 *   device cpu AMD EPYC 9B14            a section begins: backend, then the device's name
 *   isa avx512
 *   driver -                            - for none
 *   build 0.1.0-1a2b3c4d5e6f7081        of the program that measured
 *   date 2026-11-30T12:00:00Z           for people
 *   linear 4096 4096:4:mcg 1 8 linear_avx512    # lines as in kernels/tuned.h
 *
 * Blank lines and # comments anywhere. A section holds for devices that are the same in name, isa and driver, with the
 * same build: another one may have other variants, or the same names for other code. Nothing in a file is trusted.
 */
#ifndef EXL3_DAEMON_KERNEL_TABLE_H
#define EXL3_DAEMON_KERNEL_TABLE_H

#include "daemon/devices.h"
#include "kernels/tuned.h"

#define EXL3_KERNEL_TABLE_MAX (4u << 20) /* bytes of a file */

/* What a section must be for. Texts are borrowed. */
struct exl3_table_device {
	const char *backend, *name, *isa, *driver, *build;
	const struct exl3_kernel *kernels; /* of the backend */
};

/* A device in these words, with the memory that they lie in. */
struct exl3_table_device_info {
	struct exl3_table_device is;
	struct exl3_dev_info info;
	char build[64];
};
void exl3_table_device(const struct exl3_device *device, struct exl3_table_device_info *ret);

/* The first device of @all that is the same as that one, for a table; maybe itself. */
uint32_t exl3_table_kind(const struct exl3_devices *all, uint32_t device);

/* The lines above the first "linear" line of a section; for the first one of a file with the line above that. */
int exl3_kernel_table_head(const struct exl3_table_device *is, bool first, char *text, size_t size);

/**
 * exl3_kernel_table_parse() - the section for @device of a file's text.
 * @name: of the file, for messages. @text: @bytes bytes and a 0.
 * 0: *@ret is the table, or NULL: there is no section for it, and @err says why not. Variants that the backend does not
 * have are left out with a line in the log. -EINVAL: it is not such a file, with line and reason.
 */
int exl3_kernel_table_parse(const char *name, const char *text, size_t bytes, const struct exl3_table_device *device,
			    struct exl3_tuned **ret, struct exl3_error *err);
/* The same of a file: -ENOENT and others that reading gives; -EFBIG; -EINVAL, not a regular file. */
int exl3_kernel_table_read(const char *path, const struct exl3_table_device *device, struct exl3_tuned **ret,
			   struct exl3_error *err);
/* Logs the lines of @table whose variant @device cannot run. */
void exl3_kernel_table_check(const struct exl3_tuned *table, const struct exl3_device *device);

/* "0.1.0-1a2b3c4d5e6f7081": version of this program and, where the linker left one, the build id of what has @address. */
void exl3_build_text(const void *address, char *text, size_t size);

#endif
