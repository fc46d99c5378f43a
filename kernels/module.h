/* SPDX-License-Identifier: Apache-2.0 */
/* module.h - what a request can name: a matrix or several side by side, routed experts, an MLP. */
#ifndef EXL3_KERNELS_MODULE_H
#define EXL3_KERNELS_MODULE_H

#include "kernels/backend.h"

enum exl3_module_kind { EXL3_MOD_ANY, EXL3_MOD_LINEAR, EXL3_MOD_MOE, EXL3_MOD_MLP };

/* What a request names. Owned by its model, immutable. */
struct exl3_module_desc {
	char *name; /* owned; canonical */
	enum exl3_module_kind kind;
	uint32_t k, n, k_log, n_log;
	/* LINEAR */
	const struct exl3_matrix **shards; /* owned array of borrowed matrices */
	const char **shard_names;          /* owned array of borrowed names */
	uint32_t nr_shards;
	/* MOE, MLP */
	struct exl3_expert *experts; /* owned */
	uint32_t nr_experts, intermediate; /* logical */
	uint8_t act;
	float limit, routed_scale;
	void *plan;                  /* owned, backend's moe_plan() or NULL */
	uint64_t bytes;
	uint32_t rate2_min, rate2_max;
};

#endif
