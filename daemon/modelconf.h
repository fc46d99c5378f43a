/* SPDX-License-Identifier: Apache-2.0 */
/*
 * modelconf.h - what config.json tells about the quantized matrices: true sizes, activation, factors.
 *
 * Files hold sizes padded to multiples of 128. The true size is a product of a few numbers of
 * config.json; which ones follows from the matrix's name. A number counts only when it fits what is
 * stored, that is, stored = ceil128(true): otherwise the stored size is the true one.
 */
#ifndef EXL3_DAEMON_MODELCONF_H
#define EXL3_DAEMON_MODELCONF_H

#include "shm/exl3_abi.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#define EXL3_MODELCONF_PARTS 6

struct exl3_modelconf {
	const cJSON *text[EXL3_MODELCONF_PARTS];  /* borrowed; objects to look in, in order */
	const cJSON *tower[EXL3_MODELCONF_PARTS]; /* the same for vision and audio matrices */
	char model_type[64];
	char act_name[32];  /* as config.json spells it; empty: it says nothing */
	float routed_scale; /* factor baked into the routed experts' weights, 1 = none */
	bool gpt_oss;
	bool tied; /* tie_word_embeddings; counts only where there is no lm_head */
};

/* @config: parsed config.json, outlives @conf; NULL: there is none. */
void exl3_modelconf_init(struct exl3_modelconf *conf, const cJSON *config);

/* True sizes of matrix @name, stored as [@k, @n]. */
void exl3_modelconf_logical(const struct exl3_modelconf *conf, const char *name, uint32_t k,
			    uint32_t n, uint32_t *k_log, uint32_t *n_log);

/* Activation of an MLP: enum exl3_act, or EXL3_ACT_DEFAULT when there is none for act_name. */
enum exl3_act exl3_modelconf_act(const struct exl3_modelconf *conf, bool gated);

/* Limit of the activation in the MLP or experts @name, 0 = none. */
float exl3_modelconf_limit(const struct exl3_modelconf *conf, const char *name);

/* How many routed experts a block has, 0 = it does not say. */
uint32_t exl3_modelconf_experts(const struct exl3_modelconf *conf, const char *name);

#endif
