/* SPDX-License-Identifier: Apache-2.0 */
/*
 * modules.h - what can be asked for by name: matrices, fused groups, MLPs, routed experts.
 *
 *   q_proj, k_proj, v_proj                ->  qkv_proj        LINEAR, shards side by side
 *   gate_proj, up_proj                    ->  gate_up_proj    LINEAR
 *   gate_proj.slice.0, .1, ...            ->  gate_proj       LINEAR
 *   P.gate_proj, P.up_proj, P.down_proj   ->  P               MLP (slices: as many experts, summed)
 *   P.experts.E.{gate,up,down}_proj       ->  P.experts       MOE
 */
#ifndef EXL3_DAEMON_MODULES_H
#define EXL3_DAEMON_MODULES_H

#include "daemon/modelconf.h"
#include "daemon/weights.h"

/**
 * exl3_modules_make() - fill modules, left_out, names and skipped of @model.
 * @model: matrices (with their addresses), tensors and ops are set.
 * @strays: names of tensors that were left out by themselves.
 * Returns 0, -ENOMEM, or what the backend says.
 */
int exl3_modules_make(struct exl3_model *model, const struct exl3_modelconf *conf,
		      char *const *strays, uint32_t nr_strays, struct exl3_error *err);
void exl3_modules_fini(struct exl3_model *model);

#endif
