/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.h - what a module's name says, and which names mean the same module.
 *
 * Checkpoints of one architecture differ in what stands before "layers.<i>." and in a few words
 * behind it. Two names mean the same module when their keys are equal:
 *
 *   model.language_model.layers.3.mlp.experts.7.up_proj   \
 *   language_model.model.layers.3.block_sparse_moe.experts.7.w3  -> layers.3.mlp.experts.7.up_proj
 *   layers.3.feed_forward.experts.7.w3                    /
 *
 * Layers of another tower (vision, audio, draft heads) keep their prefix: they are other layers.
 */
#ifndef EXL3_DAEMON_NAMES_H
#define EXL3_DAEMON_NAMES_H

#include "shm/exl3_abi.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXL3_KEY_MAX (2 * EXL3_NAME_MAX + 64) /* a key, with its zero */

/* Writes the key of @name. False: it is too long, so it cannot match anything. */
bool exl3_name_key(const char *name, char key[EXL3_KEY_MAX]);

/* Last component: "up_proj" of "layers.0.mlp.up_proj". */
const char *exl3_name_leaf(const char *name);

/* Index behind the first "layers." (or "h.", "blocks."), or -1. */
int exl3_name_layer(const char *name);

/* A name of the vision or audio tower. */
bool exl3_name_other_tower(const char *name);

/* Ends in ".<word>.<number>", as "...gate_proj.slice.2": length before it, and the number. */
bool exl3_name_numbered(const char *name, const char *word, size_t *prefix, uint32_t *number);

/* Ends in ".rank<number>": a tensor-parallel slice; length of what stands before. */
bool exl3_name_rank(const char *name, size_t *prefix);

/* "P.experts.<E>.<leaf>": length of "P.experts", the expert and the leaf. */
bool exl3_name_expert(const char *name, size_t *prefix, uint32_t *expert, const char **leaf);

/* What a projection of an MLP does, in any of its spellings. */
enum exl3_role { EXL3_ROLE_NONE, EXL3_ROLE_GATE, EXL3_ROLE_UP, EXL3_ROLE_DOWN };
enum exl3_role exl3_name_role(const char *leaf);

#endif
