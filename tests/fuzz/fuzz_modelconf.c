/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_modelconf.c - any text as config.json: sizes stay what is stored, or are what it pads. */
#include "daemon/json.h"
#include "daemon/modelconf.h"

#include <assert.h>
#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const char *const names[] = {
		"lm_head",
		"model.layers.1.self_attn.q_proj",
		"model.layers.1.self_attn.k_proj",
		"model.layers.1.self_attn.v_proj",
		"model.layers.1.self_attn.o_proj",
		"model.layers.1.self_attn.q_b_proj",
		"model.layers.1.self_attn.kv_a_proj_with_mqa",
		"model.layers.1.linear_attn.in_proj_qkvz",
		"model.layers.1.mlp.down_proj",
		"model.layers.1.mlp.experts.3.up_proj",
		"model.layers.1.mlp.shared_experts.gate_proj",
		"model.layers.1.mlp.gate_proj.slice.0",
		"model.visual.blocks.0.mlp.fc1",
		"mtp.fc",
	};
	static const uint32_t stored[] = {128, 256, 2944, 151936, 1u << 20};
	struct exl3_modelconf conf;
	cJSON *json = NULL;

	if (exl3_json_parse("fuzz", (const char *)data, size, &json, NULL) < 0)
		return 0;
	exl3_modelconf_init(&conf, json);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		float limit = exl3_modelconf_limit(&conf, names[i]);

		assert(limit >= 0 && isfinite(limit));
		exl3_modelconf_experts(&conf, names[i]);
		for (size_t s = 0; s < 25; s++) {
			uint32_t k = stored[s / 5], n = stored[s % 5], k_log, n_log;

			exl3_modelconf_logical(&conf, names[i], k, n, &k_log, &n_log);
			assert(k_log && k_log <= k && k - k_log < 128);
			assert(n_log && n_log <= n && n - n_log < 128);
		}
	}
	exl3_modelconf_act(&conf, true);
	exl3_modelconf_act(&conf, false);
	assert(conf.routed_scale == 1 || conf.routed_scale == 128);
	cJSON_Delete(json);
	return 0;
}
