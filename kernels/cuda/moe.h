/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe.h - host side of the routed block: the expert table on the device, what a launch needs.
 *
 * y[t] = scale * sum over slots s of weight[t, s] * down_e(act(gate_e(x[t]), up_e(x[t]))), e = ids[t, s].
 * As in launch.h nothing here synchronises; only exl3_cuda_moe_plan_new() and _free() allocate.
 */
#ifndef EXL3_KERNELS_CUDA_MOE_H
#define EXL3_KERNELS_CUDA_MOE_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL3_CUDA_MOE_ENTRIES_MAX 32 /* merged requests of one launch; they travel by value */

struct exl3_cuda_moe_plan; /* expert table in device memory and what the host must know of it */

int exl3_cuda_moe_plan_new(const struct exl3_expert *experts, uint32_t nr_experts,
			   struct exl3_cuda_moe_plan **ret, struct exl3_error *err);
struct exl3_cuda_moe_plan *exl3_cuda_moe_plan_free(struct exl3_cuda_moe_plan *plan); /* NULL ok */
size_t exl3_cuda_moe_plan_bytes(const struct exl3_cuda_moe_plan *plan); /* of device memory */

/* One request: device pointers, strides in bytes. ids and weights are read once, ids checked then. */
struct exl3_cuda_moe_entry {
	const void *x;       /* [m, hidden] */
	void *y;             /* [m, hidden_out] */
	const void *ids;     /* [m, topk] i32 or i64; -1 is a hole, others outside [0, E) are counted */
	const void *weights; /* [m, topk] f16, bf16 or f32 */
	unsigned long long *skipped; /* the launch adds the number of bad ids; or NULL */
	uint32_t x_stride, y_stride;
	uint32_t m, topk;
	uint32_t first_token, first_pair; /* set by the launch */
	uint8_t x_dtype, y_dtype, ids_dtype, weights_dtype;
	uint8_t stored; /* x and y have stored sizes */
	uint8_t pad[3];
};

struct exl3_cuda_moe {
	const struct exl3_cuda_moe_plan *plan;
	const struct exl3_cuda_moe_entry *entries; /* host array, copied by the launch */
	uint32_t nr_entries;
	bool deterministic; /* a token's bits follow from its own row, the plan, and m and topk of its entry (of the
	                     * first one: all are of one exl3_cuda_moe_class()) */
	uint8_t act; /* enum exl3_act, never DEFAULT */
	uint8_t steps; /* bench only: align, input, gate and up, down, combine: how many of them; 0 is all */
	uint8_t variant; /* place in exl3_cuda_moe_variants; 0: what is chosen when nobody asks */
	float limit, routed_scale;
	void *ws; /* as in struct exl3_cuda_linear */
	size_t ws_bytes;
	int device_sms, device_cc;
};

/*
 * Enqueues the whole block. Tokens run in chunks that the workspace holds; what a token's result is
 * does not depend on its chunk, its neighbours or their order.
 * 0, -EOPNOTSUPP (more entries, an expert shape that differs, a variant that does not support it), -ENOMEM
 * (workspace), -EIO.
 */
int exl3_cuda_moe_launch(const struct exl3_cuda_moe *a, cudaStream_t stream);

/* Other ways to run a block, for measuring: nobody gets one without asking for it by name. */
struct exl3_cuda_moe_variant {
	const char *name;
	bool (*supports)(const struct exl3_cuda_moe *a); /* pure */
};

/* The first is the default; ends with a NULL name. */
extern const struct exl3_cuda_moe_variant exl3_cuda_moe_variants[];
#define EXL3_CUDA_MOE_VARIANTS_NR 7

/* Deterministic entries of one class may be in one launch; 0: the (only) entry of @a has to be alone. Pure. */
uint32_t exl3_cuda_moe_class(const struct exl3_cuda_moe *a);

#ifdef __cplusplus
}
#endif
#endif
