/* SPDX-License-Identifier: Apache-2.0 */
/* test_names.c - name variants, and what config.json says about sizes, activations and factors. */
#include "tests/test.h"

#include "daemon/modelconf.h"
#include "daemon/names.h"

static void keys(void **state)
{
	static const struct {
		const char *name, *key;
	} rows[] = {
		{"model.layers.3.self_attn.q_proj", "layers.3.self_attn.q_proj"},
		{"model.language_model.layers.3.self_attn.q_proj", "layers.3.self_attn.q_proj"},
		{"language_model.model.layers.3.self_attn.q_proj", "layers.3.self_attn.q_proj"},
		{"layers.3.self_attn.q_proj", "layers.3.self_attn.q_proj"},
		{"thinker.model.layers.12.mlp.down_proj", "layers.12.mlp.down_proj"},
		{"backbone.layers.5.mixer.up_proj", "layers.5.mlp.up_proj"},
		{"model.layers.0.block_sparse_moe.experts.7.w3", "layers.0.mlp.experts.7.up_proj"},
		{"model.layers.0.feed_forward.experts.7.w1", "layers.0.mlp.experts.7.gate_proj"},
		{"model.layers.0.mlp.experts.7.w2", "layers.0.mlp.experts.7.down_proj"},
		{"model.layers.0.mlp.shared_expert.up_proj", "layers.0.mlp.shared_experts.up_proj"},
		{"model.layers.0.self_attn.qkv_a_proj",
		 "layers.0.self_attn.fused_qkv_a_proj_with_mqa"},
		{"lm_head", "lm_head"},
		{"language_model.lm_head", "lm_head"},
		{"model.lm_head", "lm_head"},
		{"model.embed_tokens", "embed_tokens"},
		/* other towers are other layers */
		{"mtp.layers.0.mlp.up_proj", "mtp.layers.0.mlp.up_proj"},
		{"model.mtp.layers.0.mlp.up_proj", "mtp.layers.0.mlp.up_proj"},
		{"model.visual.blocks.0.mlp.up_proj", "visual.blocks.0.mlp.up_proj"},
		{"vision_tower.encoder.layers.0.mlp.fc1", "vision_tower.encoder.layers.0.mlp.fc1"},
		{"model.layers.x.mlp", "layers.x.mlp"},
		{"", ""},
		{".", "."},
		{"a..b", "a..b"},
	};
	char key[EXL3_KEY_MAX], name[EXL3_NAME_MAX + 2];

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		assert_true(exl3_name_key(rows[i].name, key));
		assert_string_equal(key, rows[i].key);
	}
	/* The longest names, also when every word of them grows. */
	for (size_t n = EXL3_NAME_MAX; n <= EXL3_NAME_MAX + 1; n++) {
		memset(name, 'x', n);
		name[n] = 0;
		assert_int_equal(exl3_name_key(name, key), n <= EXL3_NAME_MAX);
	}
	for (size_t i = 0; i + 3 <= EXL3_NAME_MAX; i += 3)
		memcpy(name + i, "w1.", 4);
	exl3_name_key(name, key);
}

static void experts_and_slices(void **state)
{
	static const struct {
		const char *name;
		int prefix, expert; /* -1: none */
		const char *leaf;
	} rows[] = {
		{"model.layers.0.mlp.experts.7.up_proj", 26, 7, "up_proj"},
		{"experts.0.w1", 7, 0, "w1"},
		{"model.layers.0.mlp.shared_experts.up_proj", -1, 0, NULL},
		{"model.layers.0.mlp.shared_experts.0.up_proj", -1, 0, NULL},
		{"model.layers.0.mlp.experts.7", -1, 0, NULL},
		{"model.layers.0.mlp.experts.x.up_proj", -1, 0, NULL},
		{"model.layers.0.mlp.experts.1234567.up_proj", -1, 0, NULL},
		{"model.layers.0.mlp.experts.7.up_proj.rank0", -1, 0, NULL},
	};
	size_t prefix;
	uint32_t number;

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		const char *leaf = NULL;
		bool is = exl3_name_expert(rows[i].name, &prefix, &number, &leaf);

		if (is != (rows[i].prefix >= 0))
			fail_msg("'%s' is %san expert", rows[i].name, is ? "" : "not ");
		if (!is)
			continue;
		assert_int_equal(prefix, rows[i].prefix);
		assert_int_equal(number, rows[i].expert);
		assert_string_equal(leaf, rows[i].leaf);
	}
	assert_true(exl3_name_numbered("a.up_proj.slice.12", "slice", &prefix, &number));
	assert_int_equal(prefix, 9);
	assert_int_equal(number, 12);
	assert_false(exl3_name_numbered("a.up_proj.slice.x", "slice", &prefix, &number));
	assert_false(exl3_name_numbered("a.up_proj.slic.1", "slice", &prefix, &number));
	assert_false(exl3_name_numbered("slice.1", "slice", &prefix, &number));
	assert_false(exl3_name_numbered(".slice.1", "slice", &prefix, &number));
	assert_true(exl3_name_rank("a.b.rank3", &prefix));
	assert_int_equal(prefix, 3);
	assert_false(exl3_name_rank("a.b.rankx", &prefix));
	assert_false(exl3_name_rank("rank3", &prefix));
	assert_int_equal(exl3_name_layer("model.layers.17.x"), 17);
	assert_int_equal(exl3_name_layer("transformer.h.5.x"), 5);
	assert_int_equal(exl3_name_layer("lm_head"), -1);
	assert_int_equal(exl3_name_role("w2"), EXL3_ROLE_DOWN);
	assert_int_equal(exl3_name_role("o_proj"), EXL3_ROLE_NONE);
}

/* Sizes that are not multiples of 128, so that padding shows. */
#define LLAMA                                                                                  \
	"{\"model_type\":\"llama\",\"hidden_size\":2880,\"intermediate_size\":2000,"           \
	"\"num_attention_heads\":45,\"num_key_value_heads\":5,\"head_dim\":64,\"vocab_size\":" \
	"50257}"
#define DEEPSEEK                                                                           \
	"{\"model_type\":\"deepseek_v3\",\"hidden_size\":2880,\"intermediate_size\":5000," \
	"\"moe_intermediate_size\":700,\"n_shared_experts\":2,\"num_attention_heads\":5,"  \
	"\"q_lora_rank\":200,\"kv_lora_rank\":512,\"qk_nope_head_dim\":100,"               \
	"\"qk_rope_head_dim\":64,\"v_head_dim\":90,\"n_routed_experts\":16}"
#define NESTED                                           \
	"{\"model_type\":\"vlm\",\"text_config\":" LLAMA \
	",\"vision_config\":{\"hidden_size\":1000,\"intermediate_size\":1100,\"num_heads\":10}}"

static void logical_sizes(void **state)
{
	static const struct {
		const char *config, *name;
		uint32_t k, n, k_log, n_log;
	} rows[] = {
		{LLAMA, "model.layers.0.self_attn.q_proj", 2944, 2944, 2880, 2880},
		{LLAMA, "model.layers.0.self_attn.k_proj", 2944, 384, 2880, 320},
		{LLAMA, "model.layers.0.self_attn.v_proj", 2944, 384, 2880, 320},
		{LLAMA, "model.layers.0.self_attn.o_proj", 2944, 2944, 2880, 2880},
		{LLAMA, "model.layers.0.mlp.gate_proj", 2944, 2048, 2880, 2000},
		{LLAMA, "model.layers.0.mlp.down_proj", 2048, 2944, 2000, 2880},
		{LLAMA, "lm_head", 2944, 50304, 2880, 50257},
		/* a number counts only when what is stored is its padding */
		{LLAMA, "lm_head", 3072, 50432, 3072, 50432},
		{LLAMA, "model.layers.0.mlp.down_proj", 2176, 2944, 2176, 2880},
		{LLAMA, "model.layers.0.unheard_of", 2944, 2944, 2944, 2944},
		/* Qwen3.5: query and gate in one */
		{LLAMA, "model.layers.0.self_attn.q_proj", 2944, 5760, 2880, 5760},
		/* slices: only the hidden size is known */
		{LLAMA, "model.layers.0.mlp.gate_proj.slice.0", 2944, 2048, 2880, 2048},
		{LLAMA, "model.layers.0.mlp.down_proj.slice.1", 2048, 2944, 2048, 2880},
		{DEEPSEEK, "model.layers.0.self_attn.q_a_proj", 2944, 256, 2880, 200},
		{DEEPSEEK, "model.layers.0.self_attn.q_b_proj", 256, 896, 200, 820},
		{DEEPSEEK, "model.layers.0.self_attn.kv_a_proj_with_mqa", 2944, 640, 2880, 576},
		{DEEPSEEK, "model.layers.0.self_attn.kv_b_proj", 512, 1024, 512, 950},
		{DEEPSEEK, "model.layers.0.self_attn.o_proj", 512, 2944, 450, 2880},
		{DEEPSEEK, "model.layers.0.self_attn.q_proj", 2944, 896, 2880, 820},
		{DEEPSEEK, "model.layers.0.mlp.up_proj", 2944, 5120, 2880, 5000},
		{DEEPSEEK, "model.layers.1.mlp.experts.3.up_proj", 2944, 768, 2880, 700},
		{DEEPSEEK, "model.layers.1.mlp.experts.3.w2", 768, 2944, 700, 2880},
		{DEEPSEEK, "model.layers.1.mlp.shared_experts.up_proj", 2944, 1408, 2880, 1400},
		{DEEPSEEK, "model.layers.61.eh_proj", 5760, 2944, 5760, 2880},
		{NESTED, "model.language_model.layers.0.mlp.up_proj", 2944, 2048, 2880, 2000},
		{NESTED, "model.visual.blocks.0.mlp.up_proj", 1024, 1152, 1000, 1100},
		{NESTED, "vision_tower.encoder.layers.0.mlp.fc1", 1024, 1152, 1000, 1100},
		{"{\"hidden_size\":2880,\"intermediate_size\":[300,500]}",
		 "model.layers.1.mlp.up_proj", 2944, 512, 2880, 500},
		{"{\"hidden_size\":2880,\"intermediate_size\":[300,500]}",
		 "model.layers.2.mlp.up_proj", 2944, 512, 2880, 512},
		/* nonsense is not believed */
		{"{\"hidden_size\":-5,\"intermediate_size\":\"big\",\"vocab_size\":1e300}",
		 "lm_head", 128, 256, 128, 256},
		{"{\"num_attention_heads\":2097151,\"head_dim\":2097151,\"hidden_size\":2097151}",
		 "layers.0.q_proj", 128, 256, 128, 256},
		{"{\"num_attention_heads\":0,\"hidden_size\":0}", "layers.0.q_proj", 128, 256, 128,
		 256},
		{"{}", "lm_head", 128, 256, 128, 256},
		{"null", "lm_head", 128, 256, 128, 256},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		cJSON *json = cJSON_Parse(rows[i].config);
		struct exl3_modelconf conf;
		uint32_t k, n;

		assert_non_null(json);
		exl3_modelconf_init(&conf, cJSON_IsNull(json) ? NULL : json);
		exl3_modelconf_logical(&conf, rows[i].name, rows[i].k, rows[i].n, &k, &n);
		if (k != rows[i].k_log || n != rows[i].n_log)
			fail_msg("row %zu, %s: [%u, %u], wanted [%u, %u]", i, rows[i].name, k, n,
				 rows[i].k_log, rows[i].n_log);
		cJSON_Delete(json);
	}
}

static void activations(void **state)
{
	static const struct {
		const char *config, *name;
		enum exl3_act gated, plain;
		float limit, scale;
	} rows[] = {
		{"{}", "layers.0.mlp", EXL3_ACT_SILU, EXL3_ACT_RELU2, 0, 1},
		{"{\"hidden_act\":\"silu\"}", "layers.0.mlp", EXL3_ACT_SILU, EXL3_ACT_DEFAULT, 0,
		 1},
		{"{\"hidden_activation\":\"gelu_pytorch_tanh\"}", "layers.0.mlp", EXL3_ACT_GELU,
		 EXL3_ACT_DEFAULT, 0, 1},
		{"{\"mlp_hidden_act\":\"relu2\",\"hidden_act\":\"silu\"}", "layers.0.mlp",
		 EXL3_ACT_RELU2_GATED, EXL3_ACT_RELU2, 0, 1},
		{"{\"hidden_act\":\"xielu\"}", "layers.0.mlp", EXL3_ACT_DEFAULT, EXL3_ACT_DEFAULT,
		 0, 1},
		{"{\"model_type\":\"gpt_oss\",\"hidden_act\":\"silu\"}", "layers.0.mlp",
		 EXL3_ACT_SWIGLU_OAI, EXL3_ACT_DEFAULT, 7, 1},
		{"{\"model_type\":\"gpt_oss\",\"swiglu_limit\":5.5}", "layers.0.mlp",
		 EXL3_ACT_SWIGLU_OAI, EXL3_ACT_RELU2, 5.5f, 1},
		{"{\"swiglu_limit\":10}", "layers.0.mlp.experts", EXL3_ACT_SILU, EXL3_ACT_RELU2, 10,
		 1},
		{"{\"swiglu_limits\":[0,3],\"swiglu_limits_shared\":[0,4]}", "layers.1.mlp.experts",
		 EXL3_ACT_SILU, EXL3_ACT_RELU2, 3, 1},
		{"{\"swiglu_limits\":[0,3],\"swiglu_limits_shared\":[0,4]}",
		 "layers.1.mlp.shared_experts", EXL3_ACT_SILU, EXL3_ACT_RELU2, 4, 1},
		{"{\"model_type\":\"laguna\"}", "layers.0.mlp", EXL3_ACT_SILU, EXL3_ACT_RELU2, 0,
		 128},
		{"{\"model_type\":\"mistral3\",\"text_config\":{\"model_type\":\"mistral4\"}}",
		 "layers.0.mlp", EXL3_ACT_SILU, EXL3_ACT_RELU2, 0, 128},
		{"{\"model_type\":\"mistral\"}", "layers.0.mlp", EXL3_ACT_SILU, EXL3_ACT_RELU2, 0,
		 1},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		cJSON *json = cJSON_Parse(rows[i].config);
		struct exl3_modelconf conf;

		exl3_modelconf_init(&conf, json);
		if (exl3_modelconf_act(&conf, true) != rows[i].gated ||
		    exl3_modelconf_act(&conf, false) != rows[i].plain ||
		    exl3_modelconf_limit(&conf, rows[i].name) != rows[i].limit ||
		    conf.routed_scale != rows[i].scale)
			fail_msg("%s: gated %d, plain %d, limit %g, scale %g", rows[i].config,
				 exl3_modelconf_act(&conf, true), exl3_modelconf_act(&conf, false),
				 (double)exl3_modelconf_limit(&conf, rows[i].name),
				 (double)conf.routed_scale);
		cJSON_Delete(json);
	}
}

static void words_are_printable(void **state)
{
	cJSON *json = cJSON_Parse("{\"model_type\":\"a\\nb\\u00e9\",\"hidden_act\":\"\\t\"}");
	struct exl3_modelconf conf;

	(void)state;
	exl3_modelconf_init(&conf, json);
	assert_string_equal(conf.model_type, "a?b??");
	assert_string_equal(conf.act_name, "?");
	cJSON_Delete(json);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(keys),        test_case(experts_and_slices),  test_case(logical_sizes),
		test_case(activations), test_case(words_are_printable),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
