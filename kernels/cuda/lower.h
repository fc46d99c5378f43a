/* SPDX-License-Identifier: Apache-2.0 */
/* lower.h - what lower.cu and its parts for MoE and MLA share. */
#ifndef EXL3_KERNELS_CUDA_LOWER_H
#define EXL3_KERNELS_CUDA_LOWER_H

#include "kernels/cuda/dev.h"

/* Fills @a for a linear work with plain row addressing; false: not a linear, or too large. */
bool exl3_cuda_linear_args(const struct exl3_cuda_place *p, const struct exl3_work *work,
			   struct exl3_cuda_linear *a);
/* lower_table.cu: @work's @m rows as a table in device memory, for this launch. 0, -EOPNOTSUPP, -EIO. */
int exl3_cuda_table(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot, const struct exl3_work *work, uint32_t m,
		    const struct exl3_cuda_row **ret);
/* lower_stage.cu: x rows (k stored, k_log logical elements) into device memory. 0 or -EIO. */
int exl3_cuda_stage(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot, uint32_t k, uint32_t k_log,
		    struct exl3_work *staged, size_t *ws_bytes);
/* lower_moe.cu, lower_mla.cu; as exl3_cuda_lower(). */
int exl3_cuda_lower_moe(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot);
int exl3_cuda_lower_mla(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot);
bool exl3_cuda_supports_mla(const struct exl3_cuda_place *p, const struct exl3_work *work);
/* @variant: place in exl3_cuda_moe_variants. */
bool exl3_cuda_supports_moe(const struct exl3_cuda_place *p, const struct exl3_work *work, unsigned variant);
/* lower.cu: that of an entry of the kernel table; 0, the default, of NULL. */
unsigned exl3_cuda_moe_variant_of(const struct exl3_kernel *kernel);
/* lower_tuned.cu: fills in dev->builtin, NULL if there is nothing for this device; backend.h's builtin(). */
int exl3_cuda_builtin_open(struct exl3_dev *dev, struct exl3_error *err);
const struct exl3_tuned *exl3_cuda_builtin(const struct exl3_dev *dev);
/* lower_class.cu: backend.h's merge_class(). */
uint32_t exl3_cuda_merge_class(const struct exl3_dev *dev, const struct exl3_work *work);
/* Rows that the few-row kernels take @m rows of @a's matrices for in deterministic mode, or 0: they do not. */
uint32_t exl3_cuda_linear_class(const struct exl3_cuda_place *p, const struct exl3_cuda_linear *a, uint32_t m);
/* The same for all matrices of a dense MLP. */
uint32_t exl3_cuda_mlp_class(const struct exl3_cuda_place *p, const struct exl3_work *work);
/* Whether the entries of a deterministic launch may run together, see merge_class(). */
bool exl3_cuda_one_class(const struct exl3_cuda_place *p, const struct exl3_work *work);
/* Of the one entry of @work; lower_moe.cu, lower_mla.cu. 0: alone only. */
uint32_t exl3_cuda_class_of_moe(const struct exl3_cuda_place *p, const struct exl3_work *work);
/* Does the launch take each entry as it would be taken alone? */
bool exl3_cuda_mla_as_alone(const struct exl3_cuda_place *p, const struct exl3_work *work);

#endif
