/* SPDX-License-Identifier: Apache-2.0 */
/* modelconf.c - what config.json tells about the quantized matrices: true sizes, activation, factors. */
#include "daemon/modelconf.h"

#include "daemon/json.h"
#include "daemon/names.h"
#include "kernels/format.h"

#include <stdio.h>
#include <string.h>

/* A size by meaning; what it is made of stands in candidates(). */
enum dim {
	DIM_STORED, /* nothing is known */
	DIM_HIDDEN,
	DIM_HIDDEN2, /* two hidden vectors side by side */
	DIM_INTER,
	DIM_VOCAB,
	DIM_Q,
	DIM_K,
	DIM_V,
	DIM_O,
	DIM_Q_LORA,
	DIM_Q_B,
	DIM_KV_A,
	DIM_KV_LORA,
	DIM_KV_B,
	DIM_GDN_QKV,
	DIM_GDN_QKVZ,
	DIM_GDN_V,
};

static const struct {
	const char *leaf;
	enum dim k, n;
} shapes[] = {
	{"q_proj", DIM_HIDDEN, DIM_Q},
	{"k_proj", DIM_HIDDEN, DIM_K},
	{"v_proj", DIM_HIDDEN, DIM_V},
	{"o_proj", DIM_O, DIM_HIDDEN},
	{"gate_proj", DIM_HIDDEN, DIM_INTER},
	{"up_proj", DIM_HIDDEN, DIM_INTER},
	{"down_proj", DIM_INTER, DIM_HIDDEN},
	{"w1", DIM_HIDDEN, DIM_INTER},
	{"w3", DIM_HIDDEN, DIM_INTER},
	{"w2", DIM_INTER, DIM_HIDDEN},
	{"fc1", DIM_HIDDEN, DIM_INTER},
	{"fc2", DIM_INTER, DIM_HIDDEN},
	{"lm_head", DIM_HIDDEN, DIM_VOCAB},
	{"head", DIM_HIDDEN, DIM_VOCAB},
	{"embed_out", DIM_HIDDEN, DIM_VOCAB},
	{"q_a_proj", DIM_HIDDEN, DIM_Q_LORA},
	{"q_b_proj", DIM_Q_LORA, DIM_Q_B},
	{"kv_a_proj_with_mqa", DIM_HIDDEN, DIM_KV_A},
	{"kv_b_proj", DIM_KV_LORA, DIM_KV_B},
	{"in_proj_qkv", DIM_HIDDEN, DIM_GDN_QKV},
	{"in_proj_qkvz", DIM_HIDDEN, DIM_GDN_QKVZ},
	{"in_proj_z", DIM_HIDDEN, DIM_GDN_V},
	{"out_proj", DIM_GDN_V, DIM_HIDDEN},
	{"eh_proj", DIM_HIDDEN2, DIM_HIDDEN},
	{"fc", DIM_HIDDEN2, DIM_HIDDEN}, /* of an MTP head */
};

static const cJSON *child(const cJSON *obj, const char *key)
{
	return cJSON_GetObjectItemCaseSensitive(obj, key);
}

static void add_part(const cJSON **parts, const cJSON *obj)
{
	for (int i = 0; i < EXL3_MODELCONF_PARTS; i++)
		if (!parts[i] && cJSON_IsObject(obj)) {
			parts[i] = obj;
			return;
		}
}

/* These go into messages and listings, so only what can be printed stays. */
static void copy_string(char *dst, size_t size, const cJSON *item)
{
	if (!cJSON_IsString(item) || *dst)
		return;
	snprintf(dst, size, "%s", item->valuestring);
	for (; *dst; dst++)
		if (*dst < ' ' || *dst > '~')
			*dst = '?';
}

/* Experts whose up_proj was divided by 128 before quantization; no config records it. */
static bool scaled_experts(const char *model_type)
{
	static const char *const types[] = {"laguna", "mistral4", "mistral_4", "mistral-4"};

	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
		size_t n = strlen(types[i]);

		/* "laguna_moe" too, "mistral40" not. */
		if (!strncmp(model_type, types[i], n) &&
		    (model_type[n] == 0 || model_type[n] == '_' || model_type[n] == '-'))
			return true;
	}
	return false;
}

void exl3_modelconf_init(struct exl3_modelconf *conf, const cJSON *config)
{
	static const char *const nested[] = {"text_config", "language_config", "llm_config"};
	static const char *const acts[] = {"mlp_hidden_act", "hidden_act", "hidden_activation",
					   "activation_function"};
	const cJSON *thinker = child(config, "thinker_config");

	*conf = (struct exl3_modelconf){.routed_scale = 1};
	for (size_t i = 0; i < sizeof(nested) / sizeof(nested[0]); i++)
		add_part(conf->text, child(config, nested[i]));
	add_part(conf->text, child(thinker, "text_config"));
	add_part(conf->text, config);
	add_part(conf->tower, child(config, "vision_config"));
	add_part(conf->tower, child(thinker, "vision_config"));
	/* The outermost type is the model's name; an inner one may say how its experts are stored. */
	copy_string(conf->model_type, sizeof(conf->model_type), child(config, "model_type"));
	for (int i = 0; i < EXL3_MODELCONF_PARTS && conf->text[i]; i++) {
		const cJSON *type = child(conf->text[i], "model_type");

		if (cJSON_IsString(type) && scaled_experts(type->valuestring))
			conf->routed_scale = 128;
		if (cJSON_IsString(type) && !strcmp(type->valuestring, "gpt_oss"))
			conf->gpt_oss = true;
		if (cJSON_IsTrue(child(conf->text[i], "tie_word_embeddings")))
			conf->tied = true;
		for (size_t a = 0; a < sizeof(acts) / sizeof(acts[0]); a++)
			copy_string(conf->act_name, sizeof(conf->act_name),
				    child(conf->text[i], acts[a]));
		copy_string(conf->model_type, sizeof(conf->model_type), type);
	}
}

enum exl3_act exl3_modelconf_act(const struct exl3_modelconf *conf, bool gated)
{
	static const struct {
		const char *name;
		enum exl3_act act;
	} acts[] = {
		{"silu", EXL3_ACT_SILU},      {"swish", EXL3_ACT_SILU},
		{"swiglu", EXL3_ACT_SILU},    {"gelu", EXL3_ACT_GELU},
		{"gelu_new", EXL3_ACT_GELU},  {"gelu_fast", EXL3_ACT_GELU},
		{"gelu_tanh", EXL3_ACT_GELU}, {"gelu_pytorch_tanh", EXL3_ACT_GELU},
	};

	if (!strcmp(conf->act_name, "relu2") || !strcmp(conf->act_name, "relu_squared"))
		return gated ? EXL3_ACT_RELU2_GATED : EXL3_ACT_RELU2;
	if (!gated) /* the only kind without a gate; what else is named runs layer by layer */
		return *conf->act_name ? EXL3_ACT_DEFAULT : EXL3_ACT_RELU2;
	if (conf->gpt_oss)
		return EXL3_ACT_SWIGLU_OAI;
	if (!*conf->act_name)
		return EXL3_ACT_SILU;
	for (size_t i = 0; i < sizeof(acts) / sizeof(acts[0]); i++)
		if (!strcmp(acts[i].name, conf->act_name))
			return acts[i].act;
	return EXL3_ACT_DEFAULT;
}

/* A matrix's place: where to look numbers up, and for which layer. */
struct place {
	const cJSON *const *parts;
	int layer;
	bool expert, shared;
};

/* Number @key, or entry [layer] of an array of numbers; NULL if config.json has neither. */
static const cJSON *get_number(const struct place *p, const char *key)
{
	for (int i = 0; i < EXL3_MODELCONF_PARTS && p->parts[i]; i++) {
		const cJSON *v = child(p->parts[i], key);

		if (cJSON_IsArray(v) && p->layer >= 0)
			v = cJSON_GetArrayItem(v, p->layer);
		if (cJSON_IsNumber(v))
			return v;
	}
	return NULL;
}

static uint64_t get(const struct place *p, const char *key)
{
	uint64_t v;

	/* No size is near 2^31, so products of three stay within 64 bits when each is cut here. */
	return exl3_json_u64(get_number(p, key), &v) && v < 1u << 21 ? v : 0;
}

/* First of several spellings that is there. */
static uint64_t get_any(const struct place *p, const char *const *keys)
{
	uint64_t v = 0;

	for (; *keys && !v; keys++)
		v = get(p, *keys);
	return v;
}

#define GET_ANY(p, ...) get_any(p, (const char *const[]){__VA_ARGS__, NULL})

#define CANDIDATES 8

static int inter_candidates(const struct place *p, uint64_t *out)
{
	uint64_t dense =
		GET_ANY(p, "intermediate_size", "ffn_dim", "n_inner", "mlp_dim", "ffn_hidden_size");
	uint64_t moe = GET_ANY(p, "moe_intermediate_size", "expert_intermediate_size",
			       "expert_ffn_hidden_size", "moe_ffn_hidden_size");
	uint64_t nr_shared =
		GET_ANY(p, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts");
	int n = 0;

	if (p->shared) {
		out[n++] =
			GET_ANY(p, "shared_expert_intermediate_size",
				"moe_shared_expert_intermediate_size", "shared_intermediate_size");
		out[n++] = nr_shared * moe;
	}
	out[n++] = p->expert || p->shared ? moe : dense;
	out[n++] = p->expert || p->shared ? dense : moe;
	out[n++] = get(p, "intermediate_size_mlp"); /* Llama 4: of its dense layers */
	return n;
}

static int candidates(const struct place *p, enum dim dim, uint64_t *out)
{
	uint64_t hidden = GET_ANY(p, "hidden_size", "n_embd", "d_model", "dim", "embed_dim");
	uint64_t heads = GET_ANY(p, "num_attention_heads", "n_head", "num_heads", "n_heads");
	uint64_t kv = GET_ANY(p, "num_key_value_heads", "num_kv_heads", "n_kv_heads");
	uint64_t head_dim = get(p, "head_dim"), global = get(p, "global_head_dim");
	uint64_t rope = get(p, "qk_rope_head_dim"), nope = get(p, "qk_nope_head_dim");
	uint64_t v_dim = get(p, "v_head_dim"), kv_lora = get(p, "kv_lora_rank");
	uint64_t gdn_k = get(p, "linear_num_key_heads") * get(p, "linear_key_head_dim");
	uint64_t gdn_v = get(p, "linear_num_value_heads") * get(p, "linear_value_head_dim");
	int n = 0;

	if (!kv)
		kv = heads;
	if (!head_dim && heads)
		head_dim = hidden / heads;
	switch (dim) {
	case DIM_STORED:
		break;
	case DIM_HIDDEN:
		out[n++] = hidden;
		break;
	case DIM_HIDDEN2:
		out[n++] = 2 * hidden;
		break;
	case DIM_INTER:
		return inter_candidates(p, out);
	case DIM_VOCAB:
		out[n++] = GET_ANY(p, "vocab_size", "padded_vocab_size");
		break;
	case DIM_Q:
		out[n++] = kv_lora ? heads * (nope + rope) : heads * head_dim;
		out[n++] = 2 * heads * head_dim; /* query and gate interleaved */
		out[n++] = heads * global;
		break;
	case DIM_K:
		out[n++] = kv * head_dim;
		out[n++] = kv * global;
		out[n++] = get(p, "num_global_key_value_heads") * global;
		break;
	case DIM_V:
		out[n++] = kv * (v_dim ? v_dim : head_dim);
		out[n++] = kv * global;
		out[n++] = get(p, "num_global_key_value_heads") * global;
		break;
	case DIM_O:
		out[n++] = heads * (v_dim ? v_dim : head_dim);
		out[n++] = heads * head_dim;
		out[n++] = heads * global;
		break;
	case DIM_Q_LORA:
		out[n++] = get(p, "q_lora_rank");
		break;
	case DIM_Q_B:
		out[n++] = heads * (nope + rope);
		out[n++] = heads * head_dim;
		break;
	case DIM_KV_A:
		out[n++] = kv_lora + rope;
		break;
	case DIM_KV_LORA:
		out[n++] = kv_lora;
		break;
	case DIM_KV_B:
		out[n++] = heads * (nope + v_dim);
		break;
	case DIM_GDN_QKV:
		out[n++] = 2 * gdn_k + gdn_v;
		break;
	case DIM_GDN_QKVZ:
		out[n++] = 2 * gdn_k + 2 * gdn_v;
		break;
	case DIM_GDN_V:
		out[n++] = gdn_v;
		break;
	}
	return n;
}

/* The true size behind @stored: the first candidate that it is the padding of. */
static uint32_t logical(const struct place *p, enum dim dim, uint32_t stored)
{
	uint64_t c[CANDIDATES] = {0};
	int n = candidates(p, dim, c);

	for (int i = 0; i < n; i++)
		if (c[i] && (c[i] + EXL3_HAD - 1) / EXL3_HAD * EXL3_HAD == stored)
			return (uint32_t)c[i];
	return stored;
}

static struct place place_of(const struct exl3_modelconf *conf, const char *name)
{
	const char *leaf;
	size_t prefix;
	uint32_t expert;

	return (struct place){
		.parts = exl3_name_other_tower(name) ? conf->tower : conf->text,
		.layer = exl3_name_layer(name),
		.expert = exl3_name_expert(name, &prefix, &expert, &leaf),
		.shared =
			strstr(name, "shared_expert") != NULL || strstr(name, "shared_mlp") != NULL,
	};
}

void exl3_modelconf_logical(const struct exl3_modelconf *conf, const char *name, uint32_t k,
			    uint32_t n, uint32_t *k_log, uint32_t *n_log)
{
	struct place p = place_of(conf, name);
	char whole[EXL3_NAME_MAX + 1];
	uint32_t slice;
	size_t prefix;
	bool sliced = exl3_name_numbered(name, "slice", &prefix, &slice);
	const char *leaf;

	*k_log = k;
	*n_log = n;
	if (strlen(name) > EXL3_NAME_MAX)
		return;
	snprintf(whole, sizeof(whole), "%.*s", sliced ? (int)prefix : (int)strlen(name), name);
	leaf = exl3_name_leaf(whole);
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		enum dim dk = shapes[i].k, dn = shapes[i].n;

		if (strcmp(shapes[i].leaf, leaf))
			continue;
		/* A slice has a part of the intermediate size; only the other side is known. */
		*k_log = logical(&p, sliced && dk == DIM_INTER ? DIM_STORED : dk, k);
		*n_log = logical(&p, sliced && dn == DIM_INTER ? DIM_STORED : dn, n);
		return;
	}
}

float exl3_modelconf_limit(const struct exl3_modelconf *conf, const char *name)
{
	struct place p = place_of(conf, name);
	const cJSON *v = NULL;

	if (p.shared)
		v = get_number(&p, "swiglu_limits_shared");
	else
		v = get_number(&p, "swiglu_limits");
	if (!v)
		v = get_number(&p, "swiglu_limit");
	if (!v)
		return conf->gpt_oss ? 7.0f : 0.0f; /* gpt-oss has one in its model code */
	return v->valuedouble > 0 && v->valuedouble < 1e30 ? (float)v->valuedouble : 0.0f;
}

uint32_t exl3_modelconf_experts(const struct exl3_modelconf *conf, const char *name)
{
	struct place p = place_of(conf, name);

	return (uint32_t)GET_ANY(&p, "n_routed_experts", "num_local_experts", "num_experts",
				 "moe_num_experts");
}
