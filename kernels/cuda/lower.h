/* SPDX-License-Identifier: Apache-2.0 */
/* lower.h - what lower.cu and its parts for MoE and MLA share. */
#ifndef EXL3_KERNELS_CUDA_LOWER_H
#define EXL3_KERNELS_CUDA_LOWER_H

#include "kernels/cuda/dev.h"

/* Fills @a for a linear work with plain row addressing; false: not a linear, or too large. */
bool exl3_cuda_linear_args(const struct exl3_dev *dev, const struct exl3_work *work,
			   struct exl3_cuda_linear *a);
/* lower_stage.cu: x rows (k stored, k_log logical elements) into device memory. 0 or -EIO. */
int exl3_cuda_stage(struct exl3_dev *dev, struct exl3_cuda_slot *slot, uint32_t k, uint32_t k_log,
		    struct exl3_work *staged, size_t *ws_bytes);
/* lower_moe.cu, lower_mla.cu; as exl3_cuda_lower(). */
int exl3_cuda_lower_moe(struct exl3_dev *dev, struct exl3_cuda_slot *slot);
int exl3_cuda_lower_mla(struct exl3_dev *dev, struct exl3_cuda_slot *slot);
bool exl3_cuda_supports_mla(const struct exl3_dev *dev, const struct exl3_work *work);
bool exl3_cuda_supports_moe(const struct exl3_dev *dev, const struct exl3_work *work);

#endif
