/* SPDX-License-Identifier: Apache-2.0 */
/* workspace.h - how much scratch memory a device gets where nobody says. */
#ifndef EXL3_KERNELS_CUDA_WORKSPACE_H
#define EXL3_KERNELS_CUDA_WORKSPACE_H

#include <stddef.h>

/* A 64th of the device's memory, 512 MiB to 4 GiB: a large prompt in one piece decodes weights once. */
static inline size_t exl3_cuda_ws_default(size_t device_bytes)
{
	const size_t least = (size_t)512 << 20, most = (size_t)4 << 30, part = device_bytes / 64;

	return part < least ? least : part > most ? most : part;
}

#endif
