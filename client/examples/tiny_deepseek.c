/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiny_deepseek.c - a DeepSeek V3 whose matrices, experts and latent attention run in the daemon.
 *
 * Multi-head latent attention, absorbed: a cached position is one row [latent | key], latent =
 * norm(c_kv), shared by all heads. kv_b_proj is not quantized; its key half is multiplied into the
 * query and its value half into the result, so that keys and values are never unpacked:
 *
 *      q_h = [ q_nope_h W_uk_h | rope(q_pe_h) ]        [latent + rope]
 *      o_h = (softmax(scale q_h . cache) cache[:latent]) W_uv_h
 *
 * The cache lies in the arena, f16; the daemon reads the rows that the request's indices name. The
 * router is here: the daemon gets expert ids and weights.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/examples/common_lm.h"
#include "client/examples/common_math.h"
#include "kernels/format.h" /* float to fp16 */

/* config.json of tests/models/tiny-deepseek; other sizes come from the tensors. */
#define NOPE_DIM     64u /* qk_nope_head_dim */
#define ROPE_DIM     32u /* qk_rope_head_dim */
#define QK_DIM       (NOPE_DIM + ROPE_DIM)
#define VALUE_DIM    64u /* v_head_dim */
#define TOPK         4u  /* num_experts_per_tok */
#define ROUTED_SCALE 1.5f
#define EXPERTS_MAX  512u
#define EPS          1e-6f
#define THETA        10000.0f
#define CONTEXT      512u /* also the number of cache slots, and of indices of a query */

struct layer {
	float *attn_norm, *mlp_norm; /* [hidden] */
	float *q_norm, *kv_norm;     /* [q_lora], [latent] */
	float *kv_b;                 /* [heads, NOPE_DIM + VALUE_DIM, latent] */
	float *router, *router_bias; /* [experts, hidden], [experts]; NULL: a dense layer */
	struct exl3_module *q_a, *q_b, *kv_a, *o;
	struct exl3_module *mlp;     /* dense, or the shared expert */
	struct exl3_module *experts; /* or NULL */
	uint16_t *cache;             /* [CONTEXT, cache_dim] f16, in the arena */
};

struct deepseek {
	uint32_t hidden, nr_layers, nr_heads, nr_experts, q_lora, latent, cache_dim;
	struct layer *layers; /* [nr_layers] */
	float *embedding;     /* [vocab, hidden] */
	float *norm;          /* [hidden] */
	float *rope;          /* [CONTEXT, ROPE_DIM] */
	struct exl3_module *head;
	uint32_t geometry; /* handle */
	float *h;          /* [batch, hidden], the residual stream */
	/* Operands of requests, in the arena: */
	float *x;          /* [batch, hidden] */
	float *qa;         /* [batch, q_lora] */
	float *qb;         /* [batch, heads, QK_DIM] */
	float *kva;        /* [batch, cache_dim] */
	float *q;          /* [batch, heads, cache_dim] */
	float *o_latent;   /* [batch, heads, latent] */
	float *o;          /* [batch, heads, VALUE_DIM] */
	float *out, *out2; /* [batch, hidden] */
	float *logits;     /* [batch, vocab] */
	int32_t *indices;  /* [batch, CONTEXT] */
	int32_t *ids;      /* [batch, TOPK] */
	float *weights;    /* [batch, TOPK] */
};

static void open_layer(struct ex_lm *lm, struct deepseek *m, uint32_t i)
{
	struct layer *l = &m->layers[i];

	l->attn_norm = ex_tensor(lm, m->hidden, 0, "model.layers.%u.input_layernorm.weight", i);
	l->mlp_norm =
		ex_tensor(lm, m->hidden, 0, "model.layers.%u.post_attention_layernorm.weight", i);
	l->q_norm =
		ex_tensor(lm, m->q_lora, 0, "model.layers.%u.self_attn.q_a_layernorm.weight", i);
	l->kv_norm =
		ex_tensor(lm, m->latent, 0, "model.layers.%u.self_attn.kv_a_layernorm.weight", i);
	l->kv_b = ex_tensor(lm, m->nr_heads * (NOPE_DIM + VALUE_DIM), m->latent,
			    "model.layers.%u.self_attn.kv_b_proj.weight", i);
	l->q_a = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, m->q_lora,
			   "model.layers.%u.self_attn.q_a_proj", i);
	l->q_b = ex_module(lm, EXL3_KIND_LINEAR, m->q_lora, m->nr_heads * QK_DIM,
			   "model.layers.%u.self_attn.q_b_proj", i);
	l->kv_a = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, m->cache_dim,
			    "model.layers.%u.self_attn.kv_a_proj_with_mqa", i);
	l->o = ex_module(lm, EXL3_KIND_LINEAR, m->nr_heads * VALUE_DIM, m->hidden,
			 "model.layers.%u.self_attn.o_proj", i);
	l->experts = ex_module_maybe(lm, EXL3_KIND_MOE, "model.layers.%u.mlp.experts", i);
	if (l->experts) {
		struct exl3_module_info info;

		exl3_module_get_info(l->experts, &info);
		m->nr_experts = info.nr_experts;
		if (m->nr_experts < TOPK || m->nr_experts > EXPERTS_MAX)
			ex_die("%u experts; %u to %u are supported", m->nr_experts, TOPK,
			       EXPERTS_MAX);
		l->router = ex_tensor(lm, m->nr_experts, m->hidden,
				      "model.layers.%u.mlp.gate.weight", i);
		l->router_bias = ex_tensor(lm, m->nr_experts, 0,
					   "model.layers.%u.mlp.gate.e_score_correction_bias", i);
		l->mlp = ex_module(lm, EXL3_KIND_MLP, m->hidden, m->hidden,
				   "model.layers.%u.mlp.shared_experts", i);
	} else {
		l->mlp = ex_module(lm, EXL3_KIND_MLP, m->hidden, m->hidden, "model.layers.%u.mlp",
				   i);
	}
}

static void open_arena(struct ex_lm *lm, struct deepseek *m)
{
	uint64_t column = 4ull * lm->batch; /* bytes of one column of 32-bit numbers */
	uint64_t cache_bytes = 2ull * CONTEXT * m->cache_dim;
	uint32_t per_head = QK_DIM + m->cache_dim + m->latent + VALUE_DIM;

	ex_arena_new(lm, column * (3 * m->hidden + m->q_lora + m->cache_dim +
				   m->nr_heads * per_head + lm->vocab + CONTEXT + 2 * TOPK) +
				 m->nr_layers * cache_bytes + (13 + m->nr_layers) * 64);
	m->x = ex_arena_alloc(lm, column * m->hidden);
	m->qa = ex_arena_alloc(lm, column * m->q_lora);
	m->qb = ex_arena_alloc(lm, column * m->nr_heads * QK_DIM);
	m->kva = ex_arena_alloc(lm, column * m->cache_dim);
	m->q = ex_arena_alloc(lm, column * m->nr_heads * m->cache_dim);
	m->o_latent = ex_arena_alloc(lm, column * m->nr_heads * m->latent);
	m->o = ex_arena_alloc(lm, column * m->nr_heads * VALUE_DIM);
	m->out = ex_arena_alloc(lm, column * m->hidden);
	m->out2 = ex_arena_alloc(lm, column * m->hidden);
	m->logits = ex_arena_alloc(lm, column * lm->vocab);
	m->indices = ex_arena_alloc(lm, column * CONTEXT);
	m->ids = ex_arena_alloc(lm, column * TOPK);
	m->weights = ex_arena_alloc(lm, column * TOPK);
	for (uint32_t i = 0; i < m->nr_layers; i++)
		m->layers[i].cache = ex_arena_alloc(lm, cache_bytes);
	m->h = ex_calloc((uint64_t)lm->batch * m->hidden, sizeof(float));
}

/* What the shapes of layer 0 say. */
static void read_sizes(struct ex_lm *lm, struct deepseek *m)
{
	struct exl3_module *mod;
	uint32_t rows;

	ex_tensor_shape(lm, &lm->vocab, &m->hidden, "model.embed_tokens.weight");
	ex_tensor_shape(lm, &rows, &m->latent, "model.layers.0.self_attn.kv_b_proj.weight");
	m->nr_heads = rows / (NOPE_DIM + VALUE_DIM);
	m->cache_dim = m->latent + ROPE_DIM;
	mod = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, 0, "model.layers.0.self_attn.q_a_proj");
	m->q_lora = ex_module_n(mod);
	exl3_module_close(mod);
	for (;; m->nr_layers++) {
		mod = ex_module_maybe(lm, EXL3_KIND_LINEAR, "model.layers.%u.self_attn.o_proj",
				      m->nr_layers);
		if (!mod)
			break;
		exl3_module_close(mod);
	}
}

static void deepseek_open(struct ex_lm *lm)
{
	struct deepseek *m = lm->priv = ex_calloc(1, sizeof(*m));
	struct exl3_mla_shape shape = {
		.topk = CONTEXT,
		.slots = CONTEXT,
		.cache_dtype = EXL3_F16,
		.indices_dtype = EXL3_I32,
	};

	read_sizes(lm, m);
	m->embedding = ex_tensor(lm, lm->vocab, m->hidden, "model.embed_tokens.weight");
	m->norm = ex_tensor(lm, m->hidden, 0, "model.norm.weight");
	m->head = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, lm->vocab, "lm_head");
	m->rope = ex_rope_table(CONTEXT, ROPE_DIM, THETA);
	if (!m->rope)
		ex_die("out of memory");
	lm->hidden = m->hidden;
	lm->context = CONTEXT;
	m->layers = ex_calloc(m->nr_layers, sizeof(*m->layers));
	for (uint32_t i = 0; i < m->nr_layers; i++)
		open_layer(lm, m, i);
	open_arena(lm, m);
	shape.heads = m->nr_heads;
	shape.dim = m->cache_dim;
	shape.value_dim = m->latent;
	shape.device = exl3_model_device(lm->model);
	if (exl3_mla_register(lm->client, &shape, &m->geometry) < 0)
		ex_die("%s", exl3_last_error());
}

static void deepseek_close(struct ex_lm *lm)
{
	struct deepseek *m = lm->priv;

	for (uint32_t i = 0; i < m->nr_layers; i++) {
		struct layer *l = &m->layers[i];

		free(l->attn_norm);
		free(l->mlp_norm);
		free(l->q_norm);
		free(l->kv_norm);
		free(l->kv_b);
		free(l->router);
		free(l->router_bias);
	}
	free(m->layers);
	free(m->embedding);
	free(m->norm);
	free(m->rope);
	free(m->h);
	free(m);
	lm->priv = NULL;
}

/* The latent and the turned key of row @r become cache row @pos. */
static void store_latent(struct deepseek *m, struct layer *l, uint32_t r, uint32_t pos)
{
	float *row = m->kva + r * m->cache_dim;
	uint16_t *slot = l->cache + pos * m->cache_dim;

	ex_rmsnorm(row, row, l->kv_norm, m->latent, EPS);
	ex_rope_apply(row + m->latent, m->rope + pos * ROPE_DIM, ROPE_DIM, EX_ROPE_PAIRS);
	for (uint32_t i = 0; i < m->cache_dim; i++)
		slot[i] = exl3_f32_to_f16(row[i]);
}

/* q of row @r: the key half of kv_b goes into the query. */
static void absorb_query(struct deepseek *m, const struct layer *l, uint32_t r, uint32_t pos)
{
	for (uint32_t head = 0; head < m->nr_heads; head++) {
		float *from = m->qb + (r * m->nr_heads + head) * QK_DIM;
		float *to = m->q + (r * m->nr_heads + head) * m->cache_dim;
		const float *w_uk = l->kv_b + head * (NOPE_DIM + VALUE_DIM) * m->latent;

		memset(to, 0, sizeof(*to) * m->latent);
		for (uint32_t i = 0; i < NOPE_DIM; i++)
			for (uint32_t j = 0; j < m->latent; j++)
				to[j] += from[i] * w_uk[i * m->latent + j];
		ex_rope_apply(from + NOPE_DIM, m->rope + pos * ROPE_DIM, ROPE_DIM, EX_ROPE_PAIRS);
		memcpy(to + m->latent, from + NOPE_DIM, sizeof(*to) * ROPE_DIM);
	}
}

/* The value half of kv_b turns the weighted latents of row @r into values. */
static void expand_values(struct deepseek *m, const struct layer *l, uint32_t r)
{
	for (uint32_t head = 0; head < m->nr_heads; head++) {
		const float *latent = m->o_latent + (r * m->nr_heads + head) * m->latent;
		const float *w_uv =
			l->kv_b + (head * (NOPE_DIM + VALUE_DIM) + NOPE_DIM) * m->latent;
		float *o = m->o + (r * m->nr_heads + head) * VALUE_DIM;

		for (uint32_t i = 0; i < VALUE_DIM; i++)
			o[i] = ex_dot(latent, w_uv + i * m->latent, m->latent);
	}
}

static void attention(struct ex_lm *lm, struct deepseek *m, struct layer *l, uint32_t n,
		      uint32_t pos)
{
	for (uint32_t r = 0; r < n; r++)
		ex_rmsnorm(m->x + r * m->hidden, m->h + r * m->hidden, l->attn_norm, m->hidden,
			   EPS);
	ex_linear(lm, l->q_a, m->x, m->qa, n);
	ex_linear(lm, l->kv_a, m->x, m->kva, n);
	ex_run(lm);

	for (uint32_t r = 0; r < n; r++)
		ex_rmsnorm(m->qa + r * m->q_lora, m->qa + r * m->q_lora, l->q_norm, m->q_lora, EPS);
	ex_linear(lm, l->q_b, m->qa, m->qb, n);
	ex_run(lm);

	for (uint32_t r = 0; r < n; r++) {
		store_latent(m, l, r, pos + r);
		absorb_query(m, l, r, pos + r);
	}
	exl3_prep_mla(ex_sqe(lm), m->geometry, ex_ref(lm, m->q), EXL3_F32, ex_ref(lm, l->cache),
		      ex_ref(lm, m->indices), ex_ref(lm, m->o_latent), EXL3_F32, EXL3_REF_NONE, n,
		      1.0f / sqrtf((float)QK_DIM), 1.0f);
	ex_run(lm);

	for (uint32_t r = 0; r < n; r++)
		expand_values(m, l, r);
	ex_linear(lm, l->o, m->o, m->out, n);
	ex_run(lm);
}

/* The TOPK experts of largest score + bias; weights from the scores alone. */
static void route(const struct deepseek *m, const struct layer *l, const float *x, int32_t *ids,
		  float *weights)
{
	float score[EXPERTS_MAX], sum = 0;
	bool taken[EXPERTS_MAX] = {false};

	for (uint32_t e = 0; e < m->nr_experts; e++)
		score[e] = 1.0f / (1.0f + expf(-ex_dot(x, l->router + e * m->hidden, m->hidden)));
	for (uint32_t i = 0; i < TOPK; i++) {
		uint32_t best = m->nr_experts;

		for (uint32_t e = 0; e < m->nr_experts; e++) {
			if (taken[e])
				continue;
			if (best == m->nr_experts ||
			    score[e] + l->router_bias[e] > score[best] + l->router_bias[best])
				best = e;
		}
		taken[best] = true;
		ids[i] = (int32_t)best;
		weights[i] = score[best];
		sum += score[best];
	}
	for (uint32_t i = 0; i < TOPK; i++)
		weights[i] *= ROUTED_SCALE / sum;
}

/* Dense MLP, or routed experts and the shared one, both in flight at once. */
static void mlp(struct ex_lm *lm, struct deepseek *m, struct layer *l, uint32_t n)
{
	for (uint32_t r = 0; r < n; r++)
		ex_rmsnorm(m->x + r * m->hidden, m->h + r * m->hidden, l->mlp_norm, m->hidden, EPS);
	ex_mlp(lm, l->mlp, m->x, m->out, n);
	if (l->experts) {
		for (uint32_t r = 0; r < n; r++)
			route(m, l, m->x + r * m->hidden, m->ids + r * TOPK, m->weights + r * TOPK);
		exl3_prep_moe(ex_sqe(lm), l->experts, ex_ref(lm, m->x), EXL3_F32,
			      ex_ref(lm, m->out2), EXL3_F32, n, ex_ref(lm, m->ids), EXL3_I32,
			      ex_ref(lm, m->weights), EXL3_F32, TOPK);
	}
	ex_run(lm);
	for (uint32_t i = 0; l->experts && i < n * m->hidden; i++)
		m->out[i] += m->out2[i];
}

static void add_out(struct deepseek *m, uint32_t n)
{
	for (uint32_t i = 0; i < n * m->hidden; i++)
		m->h[i] += m->out[i];
}

static const float *deepseek_forward(struct ex_lm *lm, const uint8_t *text, uint32_t n,
				     uint32_t pos, uint32_t nr_logits)
{
	struct deepseek *m = lm->priv;

	for (uint32_t r = 0; r < n; r++) {
		memcpy(m->h + r * m->hidden, m->embedding + text[r] * m->hidden,
		       sizeof(*m->h) * m->hidden);
		/* Each row attends to itself and all before it; the rest of the list is holes. */
		for (uint32_t i = 0; i < CONTEXT; i++)
			m->indices[r * CONTEXT + i] = i <= pos + r ? (int32_t)i : -1;
	}
	for (uint32_t i = 0; i < m->nr_layers; i++) {
		attention(lm, m, &m->layers[i], n, pos);
		add_out(m, n);
		mlp(lm, m, &m->layers[i], n);
		add_out(m, n);
	}
	for (uint32_t r = 0; r < nr_logits; r++)
		ex_rmsnorm(m->x + r * m->hidden, m->h + (n - nr_logits + r) * m->hidden, m->norm,
			   m->hidden, EPS);
	ex_linear(lm, m->head, m->x, m->logits, nr_logits);
	ex_run(lm);
	return m->logits;
}

int main(int argc, char **argv)
{
	static const struct ex_lm_ops ops = {
		.program = "tiny_deepseek",
		.model = "tiny-deepseek",
		.open = deepseek_open,
		.close = deepseek_close,
		.forward = deepseek_forward,
	};

	return ex_lm_main(&ops, argc, argv);
}
