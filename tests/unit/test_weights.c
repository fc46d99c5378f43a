/* SPDX-License-Identifier: Apache-2.0 */
/* test_weights.c - whole checkpoints: what is found in them, what is refused, what failures leave. */
#include "tests/test.h"

#include "daemon/checkpoint.h"
#include "daemon/fault.h"
#include "daemon/weights.h"
#include "kernels/format.h"
#include "tests/unit/fake_backend.h"
#include "tests/unit/make_ckpt.h"
#include "tests/unit/weights_model.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* ---- the models in the repository ---- */

static void tiny_llama(void **state)
{
	const struct exl3_module_desc *d;
	const struct exl3_tensor_desc *t;
	struct exl3_model *m;

	(void)state;
	fake_reset();
	m = load("tests/models/tiny-llama");
	assert_string_equal(m->model_type, "llama");
	assert_true(m->path[0] == '/');
	assert_int_equal(m->nr_matrices, 43);
	assert_int_equal(m->nr_modules, 43 + 6 * 3);
	assert_int_equal(m->nr_tensors, 14);
	assert_int_equal(m->nr_skipped, 0);
	assert_int_equal(m->overhead_bytes, 0);
	content(m, "tests/models/tiny-llama");
	/* layer 3: k and v have 7 bits, q has 4; layer 1 is mcg, layer 2 3inst */
	d = find(m, "model.layers.3.self_attn.qkv_proj", EXL3_MOD_ANY);
	assert_int_equal(d->kind, EXL3_MOD_LINEAR);
	assert_int_equal(d->nr_shards, 3);
	assert_int_equal(d->shards[0]->rate2, 8);
	assert_int_equal(d->shards[1]->rate2, 14);
	assert_string_equal(d->shard_names[2], "model.layers.3.self_attn.v_proj");
	assert_int_equal(d->n, 384 + 128 + 128);
	assert_int_equal(d->rate2_min, 8);
	assert_int_equal(d->rate2_max, 14);
	assert_int_equal(find(m, "model.layers.1.mlp.up_proj", EXL3_MOD_ANY)->shards[0]->codebook,
			 EXL3_CB_MCG);
	assert_int_equal(find(m, "model.layers.2.mlp.up_proj", EXL3_MOD_ANY)->shards[0]->codebook,
			 EXL3_CB_3INST);
	d = find(m, "layers.4.mlp", EXL3_MOD_ANY);
	assert_int_equal(d->kind, EXL3_MOD_MLP);
	assert_int_equal(d->nr_experts, 1);
	assert_int_equal(d->intermediate, 1024);
	assert_int_equal(d->act, EXL3_ACT_SILU);
	assert_int_equal(d->rate2_min, 4);
	assert_non_null(d->plan);
	d = find(m, "language_model.lm_head", EXL3_MOD_LINEAR);
	assert_int_equal(d->n, 256);
	not_found(m, "model.layers.9.self_attn.q_proj", EXL3_MOD_ANY, -ENOENT, "nearest is '");
	not_found(m, "model.layers.0.mlp", EXL3_MOD_MOE, -ENOENT, "no moe");
	not_found(m, "model.embed_tokens", EXL3_MOD_ANY, -ENOENT,
		  "not quantized in model 'm': open its tensor 'model.embed_tokens.weight'");
	not_found(m, "", EXL3_MOD_ANY, -ENOENT, "no module ''");
	not_found(m, "x", (enum exl3_module_kind)7, -EINVAL, "7");
	t = exl3_model_find_tensor(m, "model.language_model.norm.weight");
	assert_non_null(t);
	assert_string_equal(t->dtype, "F16");
	assert_int_equal(t->nr_dims, 1);
	assert_int_equal(t->shape[0], 384);
	assert_null(exl3_model_find_tensor(m, "model.layers.0.mlp.up_proj.suh"));
	exl3_model_get(m);
	exl3_model_put(m);
	assert_int_equal(fake.slabs, 1);
	assert_int_equal(fake.plans, 6);
	exl3_model_put(m);
	fake_reset();
}

static void tiny_deepseek(void **state)
{
	const struct exl3_module_desc *d;
	struct exl3_model *m;

	(void)state;
	fake_reset();
	m = load("tests/models/tiny-deepseek");
	assert_int_equal(m->nr_skipped, 0);
	content(m, "tests/models/tiny-deepseek");
	/* 160 outputs, stored as 256; 576-like padding shows in the fused group too */
	d = find(m, "model.layers.1.self_attn.kv_a_proj_with_mqa", EXL3_MOD_ANY);
	assert_int_equal(d->n, 256);
	assert_int_equal(d->n_log, 160);
	d = find(m, "model.layers.1.self_attn.qkv_a_proj", EXL3_MOD_LINEAR);
	assert_string_equal(d->name, "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa");
	assert_int_equal(d->n, 128 + 256);
	assert_int_equal(d->n_log, 128 + 160);
	for (int way = 0; way < 4; way++) {
		static const char *const names[] = {
			"model.layers.2.mlp.experts", "model.layers.2.mlp",
			"model.layers.2.block_sparse_moe", "layers.2.feed_forward.experts"};

		d = find(m, names[way], way & 1 ? EXL3_MOD_MOE : EXL3_MOD_ANY);
		assert_int_equal(d->kind, EXL3_MOD_MOE);
		assert_string_equal(d->name, "model.layers.2.mlp.experts");
	}
	assert_int_equal(d->nr_experts, 16);
	assert_int_equal(d->intermediate, 128);
	assert_int_equal(d->rate2_max, 6);
	/* Sorted as names 10 comes before 2, as experts not. */
	assert_ptr_equal(d->experts[10].up,
			 find(m, "model.layers.2.mlp.experts.10.up_proj", EXL3_MOD_ANY)->shards[0]);
	assert_ptr_equal(d->experts[10].gate,
			 find(m, "layers.2.mlp.experts.10.w1", EXL3_MOD_ANY)->shards[0]);
	assert_ptr_equal(
		d->experts[2].down,
		find(m, "layers.2.block_sparse_moe.experts.2.w2", EXL3_MOD_ANY)->shards[0]);
	assert_int_equal(find(m, "model.layers.0.mlp", EXL3_MOD_ANY)->kind, EXL3_MOD_MLP);
	d = find(m, "model.layers.3.mlp.shared_experts", EXL3_MOD_ANY);
	assert_int_equal(d->kind, EXL3_MOD_MLP);
	not_found(m, "model.layers.2.mlp.gate", EXL3_MOD_ANY, -ENOENT, "open its tensor");
	not_found(m, "model.layers.2.self_attn.kv_b_proj", EXL3_MOD_ANY, -ENOENT,
		  "kv_b_proj.weight");
	exl3_model_put(m);
	fake_reset();
}

/* No config.json: names as they are, true sizes are the stored ones. */
static void layers(void **state)
{
	static const char *const codebooks[] = {"3inst", "mcg", "mul1"};
	struct exl3_model *m;
	char name[32];

	(void)state;
	fake_reset();
	m = load("tests/models/layers");
	assert_string_equal(m->model_type, "");
	assert_int_equal(m->nr_modules, 24);
	content(m, "tests/models/layers");
	for (uint32_t bits = 1; bits <= 8; bits++)
		for (uint32_t cb = 0; cb < 3; cb++) {
			const struct exl3_module_desc *d;

			snprintf(name, sizeof(name), "k%u.%s", bits, codebooks[cb]);
			d = find(m, name, EXL3_MOD_ANY);
			assert_int_equal(d->shards[0]->rate2, 2 * bits);
			assert_int_equal(d->shards[0]->codebook, cb);
			assert_int_equal(d->k_log, 256);
			assert_int_equal(d->n_log, 384);
		}
	assert_non_null(exl3_model_find_tensor(m, "weight"));
	exl3_model_put(m);
	fake_reset();
}

/* ---- rules of the format ---- */

static void signs_markers_biases(void **state)
{
	static const uint16_t bias[128] = {0x3c00, 0xc000, 0x7bff, 0x0001};
	static const float want[4] = {1, -2, 65504, 0x1p-24f};
	char *dir = mk_dir();
	struct mk *f = mk_new();
	struct exl3_ckpt ckpt;
	struct exl3_error err;
	struct exl3_model *m;
	const struct exl3_matrix *mat;
	const uint16_t *suh;
	uint16_t *su;
	uint64_t bytes;

	(void)state;
	fake_reset();
	mk_matrix(f, "signs", 256, 128, 8, 1, MK_SIGNS | MK_ONE_DIM);
	for (uint32_t rate2 = 3; rate2 <= 7; rate2 += 2) {
		char name[16];

		snprintf(name, sizeof(name), "half%u", rate2);
		mk_matrix(f, name, 128, 256, rate2, 2, 0);
	}
	mk_matrix(f, "b16", 128, 128, 8, 2, 0);
	mk_tensor(f, "b16.bias", "F16", MK_DIMS(128), bias, 256);
	mk_matrix(f, "lm_head", 128, 256, 8, 2, 0);
	mk_tensor(f, "lm_head.bias", "BF16", MK_DIMS(200), NULL, 400);
	mk_matrix(f, "b32", 128, 128, 8, 0, 0);
	mk_tensor(f, "b32.bias", "F32", MK_DIMS(128), NULL, 512);
	mk_tensor(f, "b32.scale", "F32", MK_SCALAR, NULL, 4);
	mk_tensor(f, "free.bias", "F32", MK_DIMS(3), NULL, 12);
	mk_save(f, dir, "model.safetensors", 1);
	mk_text(dir, "config.json", "{\"vocab_size\":200}");
	m = load(dir);
	test_code(exl3_ckpt_open(dir, &ckpt, &err), 0, &err);
	assert_int_equal(m->nr_skipped, 0);
	mat = find(m, "signs", EXL3_MOD_ANY)->shards[0];
	su = from_file(&ckpt, "signs", "su", &bytes);
	suh = mat->suh;
	for (uint32_t i = 0; i < 256; i++)
		assert_int_equal(suh[i], su[i / 16] >> i % 16 & 1 ? 0xbc00 : 0x3c00);
	free(su);
	assert_int_equal(mat->codebook, EXL3_CB_MCG);
	assert_null(mat->bias);
	assert_int_equal(find(m, "half3", EXL3_MOD_ANY)->shards[0]->rate2, 3);
	assert_int_equal(find(m, "half7", EXL3_MOD_ANY)->shards[0]->rate2, 7);
	mat = find(m, "b16", EXL3_MOD_ANY)->shards[0];
	assert_memory_equal(mat->bias, want, sizeof(want));
	/* True size 200: what the padded columns would hold is zero. */
	mat = find(m, "lm_head", EXL3_MOD_ANY)->shards[0];
	assert_int_equal(mat->n_log, 200);
	su = from_file(&ckpt, "lm_head", "bias", &bytes);
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t bits = i < 200 ? (uint32_t)su[i] << 16 : 0;

		assert_memory_equal((const float *)mat->bias + i, &bits, 4);
	}
	free(su);
	mat = find(m, "b32", EXL3_MOD_ANY)->shards[0];
	su = from_file(&ckpt, "b32", "bias", &bytes);
	assert_memory_equal(mat->bias, su, 512);
	free(su);
	assert_non_null(exl3_model_find_tensor(m, "free.bias"));
	assert_null(exl3_model_find_tensor(m, "b32.scale"));
	exl3_ckpt_fini(&ckpt);
	exl3_model_put(m);
	mk_rmdir(dir);
	fake_reset();
}

/* One good matrix, and everything that we cannot serve: each is named, the good one loads. */
static void left_out(void **state)
{
	static const struct {
		const char *name, *say;
	} rows[] = {
		{"table", "2-D row table"},
		{"both", "both markers"},
		{"unknown", "unknown multiplier 0xcbac1fef"},
		{"half", "half bitrates exist with codebook mul1 only"},
		{"rate", "its bitrate is none of"},
		{"rate9", "its bitrate is none of"},
		{"half15", "its bitrate is none of"},
		{"k64", "not multiples of 128"},
		{"wide", "larger than any size"},
		{"empty", "its trellis is empty"},
		{"flat", "does not have 3 dimensions"},
		{"nosuh", "input scales (suh or su) are missing"},
		{"nosvh", "output scales (svh or sv) are missing"},
		{"bf16", "its scales are not F16"},
		{"i32", "not of 16-bit integers"},
		{"marker2", "not one 32-bit integer"},
		{"badbias", "bias is not F16"},
		{"ranks", "rank-sliced pack"},
		{"layers.0.self_attn.q_proj", "rank-sliced pack"},
		{"stray.suh", "without a trellis"},
		/* what is made of them */
		{"layers.0.self_attn.qkv_proj", "its part q_proj: stored as a rank-sliced pack"},
	};
	char *dir = mk_dir();
	struct mk *f = mk_new();
	struct exl3_model *m;

	(void)state;
	fake_reset();
	mk_matrix(f, "good", 128, 128, 8, 2, 0);
	mk_tensor(f, "table.trellis", "I16", MK_DIMS(10, 64), NULL, 1280);
	mk_tensor(f, "table.head_offsets", "I32", MK_DIMS(10), NULL, 40);
	mk_matrix(f, "both", 128, 128, 8, 2, MK_BOTH);
	mk_matrix(f, "unknown", 128, 128, 8, 1, MK_UNKNOWN);
	mk_matrix(f, "half", 128, 128, 5, 1, 0);
	mk_tensor(f, "rate.trellis", "I16", MK_DIMS(8, 8, 20), NULL, 2560);
	mk_tensor(f, "rate9.trellis", "I16", MK_DIMS(8, 8, 144), NULL, 18432);
	mk_matrix(f, "half15", 128, 128, 15, 2, 0);
	mk_matrix(f, "k64", 192, 128, 8, 2, 0);
	mk_tensor(f, "wide.trellis", "I16", MK_DIMS(8, 32776, 16), NULL, 8390656);
	mk_tensor(f, "empty.trellis", "I16", MK_DIMS(0, 8, 64), NULL, 0);
	mk_tensor(f, "flat.trellis", "I16", MK_DIMS(8, 8, 8, 8), NULL, 8192);
	mk_tensor(f, "nosuh.trellis", "I16", MK_DIMS(8, 8, 64), NULL, 8192);
	mk_tensor(f, "nosuh.svh", "F16", MK_DIMS(128), NULL, 256);
	mk_tensor(f, "nosvh.trellis", "I16", MK_DIMS(8, 8, 64), NULL, 8192);
	mk_tensor(f, "nosvh.suh", "F16", MK_DIMS(128), NULL, 256);
	mk_tensor(f, "bf16.trellis", "I16", MK_DIMS(8, 8, 64), NULL, 8192);
	mk_tensor(f, "bf16.suh", "BF16", MK_DIMS(128), NULL, 256);
	mk_tensor(f, "bf16.svh", "BF16", MK_DIMS(128), NULL, 256);
	mk_tensor(f, "i32.trellis", "I32", MK_DIMS(8, 8, 32), NULL, 8192);
	mk_tensor(f, "i32.suh", "F16", MK_DIMS(128), NULL, 256);
	mk_tensor(f, "i32.svh", "F16", MK_DIMS(128), NULL, 256);
	mk_matrix(f, "marker2", 128, 128, 8, 0, 0);
	mk_tensor(f, "marker2.mcg", "I32", MK_DIMS(2), NULL, 8);
	mk_matrix(f, "badbias", 128, 128, 8, 0, 0);
	mk_tensor(f, "badbias.bias", "I32", MK_DIMS(128), NULL, 512);
	for (int r = 0; r < 4; r++) {
		char name[64];

		snprintf(name, sizeof(name), "ranks.rank%d", r);
		mk_matrix(f, name, 128, 128, 8, 1, 0);
		snprintf(name, sizeof(name), "layers.0.self_attn.q_proj.rank%d", r);
		mk_matrix(f, name, 128, 128, 8, 1, 0);
	}
	mk_matrix(f, "layers.0.self_attn.k_proj", 128, 128, 8, 1, 0);
	mk_matrix(f, "layers.0.self_attn.v_proj", 128, 128, 8, 1, 0);
	mk_tensor(f, "experts.shared_h.up_proj.rank0.suh", "F16", MK_DIMS(128), NULL, 256);
	mk_tensor(f, "stray.suh", "F16", MK_DIMS(128), NULL, 256);
	mk_save(f, dir, "model.safetensors", 1);
	m = load(dir);
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		bool group = i + 1 == TEST_NR(rows);

		not_found(m, rows[i].name, EXL3_MOD_ANY, -EOPNOTSUPP, rows[i].say);
		/* A group is not listed again for its part. */
		if (skipped(m, rows[i].name, rows[i].say) == group)
			fail_msg("%s is %slisted", rows[i].name, group ? "" : "not ");
	}
	assert_int_equal(m->nr_skipped, TEST_NR(rows) - 1);
	not_found(m, "ranks.rank1", EXL3_MOD_ANY, -EOPNOTSUPP, "rank-sliced pack");
	find(m, "good", EXL3_MOD_ANY);
	find(m, "layers.0.self_attn.v_proj", EXL3_MOD_ANY);
	/* Its sibling stays what it is: a tensor. */
	assert_non_null(exl3_model_find_tensor(m, "table.head_offsets"));
	assert_null(exl3_model_find_tensor(m, "ranks.rank0.suh"));
	exl3_model_put(m);
	mk_rmdir(dir);
	fake_reset();
}

static void contradictions(void **state)
{
	static const struct {
		const char *leaf, *dtype;
		int64_t n;
		uint16_t first; /* value of the first element */
		const char *say;
	} rows[] = {
		{"suh", "F16", 256, 0x3c00,
		 "tensor 'm.suh': 256 elements where its trellis needs 128"},
		{"svh", "F16", 64, 0x3c00,
		 "tensor 'm.svh': 64 elements where its trellis needs 128"},
		{"su", "I16", 9, 0, "tensor 'm.su': 9 elements where its trellis needs 8"},
		{"bias", "F16", 100, 0,
		 "tensor 'm.bias': 100 elements where its trellis needs 128"},
		{"suh", "F16", 128, 0x7c00, "tensor 'm.suh': element 0 is not finite"},
		{"svh", "F16", 128, 0xfe00, "tensor 'm.svh': element 0 is not finite"},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		static const char *const parts[] = {"suh", "svh"};
		uint16_t v[256] = {rows[i].first};
		char *dir = mk_dir(), name[32], say[200];
		struct mk *f = mk_new();
		size_t bytes = 2 * (size_t)rows[i].n;

		fake_reset();
		mk_tensor(f, "m.trellis", "I16", MK_DIMS(8, 8, 64), NULL, 8192);
		snprintf(name, sizeof(name), "m.%s", rows[i].leaf);
		mk_tensor(f, name, rows[i].dtype, MK_DIMS(rows[i].n), v, bytes);
		memset(v, 0, sizeof(v));
		for (int p = 0; p < 2; p++) {
			if (!strncmp(rows[i].leaf, parts[p], 2))
				continue;
			snprintf(name, sizeof(name), "m.%s", parts[p]);
			mk_tensor(f, name, "F16", MK_DIMS(128), v, 256);
		}
		mk_save(f, dir, "x.safetensors", 0);
		snprintf(say, sizeof(say), "x.safetensors: %s", rows[i].say);
		refused(dir, -EINVAL, say);
		mk_rmdir(dir);
	}
	fake_reset();
}

static void nothing_to_serve(void **state)
{
	char *dir = mk_dir();
	struct mk *f = mk_new();

	(void)state;
	fake_reset();
	mk_tensor(f, "a.weight", "F16", MK_DIMS(4), NULL, 8);
	mk_save(f, dir, "x.safetensors", 0);
	refused(dir, -EOPNOTSUPP, "nothing in it is EXL3");
	mk_rmdir(dir);
	refused("/no/such/model", -ENOENT, "/no/such/model");
	fake_reset();
}

/* ---- modules ---- */

static void expert(struct mk *f, const char *prefix, unsigned e, const char *const *leaves,
		   uint32_t rate2)
{
	char name[200];

	for (int i = 0; i < 3; i++) {
		if (!leaves[i])
			continue;
		snprintf(name, sizeof(name), "%s.%u.%s", prefix, e, leaves[i]);
		mk_matrix(f, name, i == 2 ? 256 : 128, i == 2 ? 128 : 256, rate2, (e + 1) % 3, 0);
	}
}

static void experts(void **state)
{
	static const char *const gated[] = {"gate_proj", "up_proj", "down_proj"};
	static const char *const ws[] = {"w1", "w3", "w2"};
	static const char *const plain[] = {NULL, "up_proj", "down_proj"};
	static const char *const no_down[] = {"gate_proj", "up_proj", NULL};
	char *dir = mk_dir();
	struct mk *f = mk_new();
	const struct exl3_module_desc *d;
	struct exl3_model *m;

	(void)state;
	fake_reset();
	for (unsigned e = 0; e < 6; e++) {
		expert(f, "model.layers.0.block_sparse_moe.experts", e, ws, 4 + 2 * e);
		expert(f, "backbone.layers.1.mixer.experts", e, plain, 4 + 2 * e);
		if (e != 3)
			expert(f, "model.layers.2.mlp.experts", e, gated, 4);
		expert(f, "model.layers.3.mlp.experts", e, e == 4 ? no_down : gated, 4);
		expert(f, "model.layers.4.mlp.experts", e, e == 1 ? plain : gated, 4);
	}
	/* gates that stayed dense are not missing gates */
	expert(f, "model.layers.5.mlp.experts", 0, plain, 4);
	mk_tensor(f, "model.layers.5.mlp.experts.0.gate_proj.weight", "F16", MK_DIMS(256, 128),
		  NULL, 65536);
	expert(f, "model.layers.6.mlp.experts", 0, gated, 4);
	mk_matrix(f, "model.layers.6.mlp.experts.1.gate_proj", 128, 384, 8, 2, 0);
	mk_matrix(f, "model.layers.6.mlp.experts.1.up_proj", 128, 384, 8, 2, 0);
	mk_matrix(f, "model.layers.6.mlp.experts.1.down_proj", 384, 128, 8, 2, 0);
	expert(f, "model.layers.7.mlp.experts", 0, gated, 4);
	mk_matrix(f, "model.layers.7.mlp.experts.1.gate_proj", 128, 256, 8, 1, MK_UNKNOWN);
	mk_matrix(f, "model.layers.7.mlp.experts.1.up_proj", 128, 256, 8, 1, 0);
	mk_matrix(f, "model.layers.7.mlp.experts.1.down_proj", 256, 128, 8, 1, 0);
	/* a number that no table should be made for */
	expert(f, "model.layers.8.mlp.experts", 999998, gated, 8);
	mk_save(f, dir, "x.safetensors", 0);
	mk_text(dir, "config.json", "{\"model_type\":\"laguna\",\"mlp_hidden_act\":\"relu2\"}");
	m = load(dir);
	d = find(m, "model.layers.0.mlp", EXL3_MOD_MOE);
	assert_string_equal(d->name, "model.layers.0.block_sparse_moe.experts");
	assert_int_equal(d->nr_experts, 6);
	assert_int_equal(d->act, EXL3_ACT_RELU2_GATED);
	assert_true(d->routed_scale == 128);
	assert_int_equal(d->experts[1].gate->codebook, EXL3_CB_MUL1);
	assert_int_equal(d->rate2_min, 4);
	assert_int_equal(d->rate2_max, 14);
	d = find(m, "layers.1.mlp.experts", EXL3_MOD_ANY);
	assert_int_equal(d->act, EXL3_ACT_RELU2);
	assert_null(d->experts[5].gate);
	assert_true(find(m, "layers.0.mlp.experts.3.gate_up_proj", EXL3_MOD_ANY)->nr_shards == 2);
	not_found(m, "model.layers.2.mlp", EXL3_MOD_MOE, -EOPNOTSUPP, "its expert 3 is missing");
	not_found(m, "model.layers.3.mlp.experts", EXL3_MOD_ANY, -EOPNOTSUPP,
		  "its expert 4 has no quantized up or down");
	not_found(m, "model.layers.4.mlp", EXL3_MOD_ANY, -EOPNOTSUPP,
		  "its expert 1 differs from expert 0 in having a gate");
	not_found(m, "model.layers.5.mlp", EXL3_MOD_MOE, -EOPNOTSUPP, "gates are not quantized");
	not_found(m, "model.layers.6.mlp", EXL3_MOD_MOE, -EOPNOTSUPP, "parts have different sizes");
	not_found(m, "model.layers.7.mlp", EXL3_MOD_MOE, -EOPNOTSUPP,
		  "its expert 1, gate_proj: its codebook mcg has the unknown multiplier");
	not_found(m, "model.layers.8.mlp", EXL3_MOD_MOE, -EOPNOTSUPP, "do not make 999999 experts");
	find(m, "model.layers.7.mlp.experts.1.up_proj", EXL3_MOD_ANY);
	assert_true(skipped(m, "model.layers.2.mlp.experts", "its expert 3 is missing"));
	exl3_model_put(m);
	mk_rmdir(dir);
	fake_reset();
}

static void slices_and_groups(void **state)
{
	char *dir = mk_dir();
	struct mk *f = mk_new();
	const struct exl3_module_desc *d;
	struct exl3_model *m;

	(void)state;
	fake_reset();
	for (int i = 0; i < 12; i++) {
		char name[100];

		snprintf(name, sizeof(name), "model.layers.0.mlp.gate_proj.slice.%d", i);
		mk_matrix(f, name, 128, 256, 8, 2, 0);
		snprintf(name, sizeof(name), "model.layers.0.mlp.up_proj.slice.%d", i);
		mk_matrix(f, name, 128, 256, 6, 1, 0);
		snprintf(name, sizeof(name), "model.layers.0.mlp.down_proj.slice.%d", i);
		mk_matrix(f, name, 256, 128, 10, 0, 0);
	}
	/* other input sizes: no group */
	mk_matrix(f, "model.layers.1.self_attn.q_proj", 256, 128, 8, 2, 0);
	mk_matrix(f, "model.layers.1.self_attn.k_proj", 128, 128, 8, 2, 0);
	mk_matrix(f, "model.layers.1.self_attn.v_proj", 128, 128, 8, 2, 0);
	/* stored fused: nothing to make */
	mk_matrix(f, "model.layers.2.mlp.gate_proj", 128, 128, 8, 2, 0);
	mk_matrix(f, "model.layers.2.mlp.up_proj", 128, 128, 8, 2, 0);
	mk_matrix(f, "model.layers.2.mlp.gate_up_proj", 128, 512, 8, 2, 0);
	mk_matrix(f, "model.layers.3.mlp.up_proj", 128, 256, 8, 2, 0);
	mk_matrix(f, "model.layers.3.mlp.down_proj", 256, 128, 8, 2, 0);
	mk_matrix(f, "mtp.layers.0.mlp.up_proj", 128, 256, 8, 2, 0);
	mk_matrix(f, "mtp.layers.0.mlp.gate_proj", 128, 256, 8, 2, 0);
	mk_matrix(f, "mtp.layers.0.mlp.down_proj", 128, 128, 8, 2, 0);
	/* both spellings in one place: one of them has the names of what is made */
	for (int i = 0; i < 6; i++) {
		static const char *const leaves[] = {"w1",        "w2",      "w3",
						     "gate_proj", "up_proj", "down_proj"};
		char name[100];

		snprintf(name, sizeof(name), "model.layers.5.mlp.%s", leaves[i]);
		mk_matrix(f, name, 128, 128, 8, 2, 0);
	}
	/* slices of different widths; another backend may have no kernel for that */
	for (int i = 0; i < 2; i++) {
		char name[100];

		snprintf(name, sizeof(name), "model.layers.4.mlp.gate_proj.slice.%d", i);
		mk_matrix(f, name, 128, 256 - 128 * (uint32_t)i, 8, 2, 0);
		snprintf(name, sizeof(name), "model.layers.4.mlp.up_proj.slice.%d", i);
		mk_matrix(f, name, 128, 256 - 128 * (uint32_t)i, 8, 2, 0);
		snprintf(name, sizeof(name), "model.layers.4.mlp.down_proj.slice.%d", i);
		mk_matrix(f, name, 256 - 128 * (uint32_t)i, 128, 8, 2, 0);
	}
	/* two towers that a short name cannot tell apart */
	mk_matrix(f, "alpha.layers.9.o_proj", 128, 128, 8, 2, 0);
	mk_matrix(f, "beta.layers.9.o_proj", 128, 128, 8, 2, 0);
	mk_save(f, dir, "x.safetensors", 0);
	mk_text(dir, "config.json",
		"{\"hidden_size\":100,\"hidden_act\":\"gelu\",\"tie_word_embeddings\":true}");
	m = load(dir);
	d = find(m, "model.layers.0.mlp", EXL3_MOD_MLP);
	assert_int_equal(d->nr_experts, 12);
	assert_int_equal(d->intermediate, 12 * 256);
	assert_int_equal(d->k_log, 100);
	assert_int_equal(d->n_log, 100);
	assert_int_equal(d->act, EXL3_ACT_GELU);
	assert_ptr_equal(d->experts[10].down,
			 find(m, "model.layers.0.mlp.down_proj.slice.10", EXL3_MOD_ANY)->shards[0]);
	assert_int_equal(find(m, "model.layers.4.mlp", EXL3_MOD_MLP)->intermediate, 384);
	for (uint32_t i = 1; i < m->nr_modules; i++)
		assert_false(!strcmp(m->modules[i - 1].name, m->modules[i].name) &&
			     m->modules[i - 1].kind == m->modules[i].kind);
	d = find(m, "model.layers.5.mlp.gate_up_proj", EXL3_MOD_ANY);
	assert_string_equal(d->shard_names[0], "model.layers.5.mlp.gate_proj");
	d = find(m, "model.layers.0.mlp.gate_proj", EXL3_MOD_ANY);
	assert_int_equal(d->nr_shards, 12);
	assert_int_equal(d->n, 12 * 256);
	assert_string_equal(d->shard_names[11], "model.layers.0.mlp.gate_proj.slice.11");
	assert_int_equal(find(m, "model.layers.0.mlp.gate_up_proj", EXL3_MOD_ANY)->nr_shards, 24);
	not_found(m, "model.layers.0.mlp.down_proj", EXL3_MOD_ANY, -EOPNOTSUPP,
		  "ask for the MLP 'model.layers.0.mlp'");
	not_found(m, "model.layers.1.self_attn.qkv_proj", EXL3_MOD_ANY, -EOPNOTSUPP,
		  "different input sizes");
	assert_int_equal(find(m, "model.layers.2.mlp.gate_up_proj", EXL3_MOD_ANY)->nr_shards, 1);
	not_found(m, "model.layers.2.mlp", EXL3_MOD_MLP, -ENOENT, "no mlp");
	not_found(m, "model.layers.3.mlp", EXL3_MOD_MLP, -EOPNOTSUPP,
		  "no activation 'gelu' without a gate");
	not_found(m, "mtp.layers.0.mlp", EXL3_MOD_MLP, -EOPNOTSUPP,
		  "up's outputs are not down's inputs");
	not_found(m, "model.layers.0.up_proj", EXL3_MOD_LINEAR, -ENOENT, "nearest");
	not_found(m, "layers.9.o_proj", EXL3_MOD_ANY, -ENOENT,
		  "may be 'alpha.layers.9.o_proj' or 'beta");
	find(m, "beta.layers.9.o_proj", EXL3_MOD_ANY);
	not_found(m, "lm_head", EXL3_MOD_ANY, -ENOENT, "tied to the embedding");
	exl3_model_put(m);
	fake_reset();
	fake.refuse_plans = true;
	m = load(dir);
	not_found(m, "model.layers.4.mlp", EXL3_MOD_MLP, -EOPNOTSUPP, "no plan for 2 experts");
	find(m, "model.layers.4.mlp.gate_proj", EXL3_MOD_ANY);
	exl3_model_put(m);
	mk_rmdir(dir);
	fake_reset();
}

static void collect_line(void *arg, const char *line)
{
	char *all = arg;

	strcat(all, line);
	strcat(all, "\n");
}

static void trace_tells_the_way(void **state)
{
	const struct exl3_module_desc *d;
	struct exl3_model *m;
	struct exl3_error err;
	char lines[4000] = "";

	(void)state;
	fake_reset();
	m = load("tests/models/tiny-deepseek");
	test_code(exl3_model_find(m, "layers.2.block_sparse_moe", EXL3_MOD_ANY, &d, collect_line,
				  lines, &err),
		  0, &err);
	assert_non_null(strstr(lines, "no module is called exactly 'layers.2.block_sparse_moe'"));
	assert_non_null(strstr(lines, "none has the key 'layers.2.mlp'"));
	assert_non_null(strstr(lines, "its routed experts, key 'layers.2.mlp.experts'"));
	assert_non_null(
		strstr(lines, "found moe 'model.layers.2.mlp.experts': k 256 (stored 256)"));
	exl3_model_put(m);
	fake_reset();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(tiny_llama),
		test_case(tiny_deepseek),
		test_case(layers),
		test_case(signs_markers_biases),
		test_case(left_out),
		test_case(contradictions),
		test_case(nothing_to_serve),
		test_case(experts),
		test_case(slices_and_groups),
		test_case(trace_tells_the_way),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
