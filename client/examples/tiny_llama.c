/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiny_llama.c - a Llama whose quantized matrices are in the daemon; everything else is here.
 *
 * A layer is four requests for any number of rows: qkv_proj (three matrices side by side), o_proj, and
 * the MLP, then norms, RoPE and attention in f32. Sizes come from the tensors; the three numbers that
 * no tensor shows are constants below.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/examples/common_lm.h"
#include "client/examples/common_math.h"

/* config.json of tests/models/tiny-llama: head_dim, rms_norm_eps, rope_theta, max_position_embeddings. */
#define HEAD_DIM 64u
#define EPS      1e-5f
#define THETA    10000.0f
#define CONTEXT  512u

struct layer {
	float *attn_norm, *mlp_norm; /* [hidden] */
	struct exl3_module *qkv, *o, *mlp;
	struct exl3_module *gate_up, *down; /* with --unfused, instead of mlp */
	float *k, *v;                       /* [CONTEXT, kv_size], RoPE already in k */
};

struct llama {
	uint32_t hidden, nr_layers, nr_heads, nr_kv_heads, intermediate;
	struct layer *layers; /* [nr_layers] */
	float *embedding;     /* [vocab, hidden] */
	float *norm;          /* [hidden] */
	float *rope;          /* [CONTEXT, HEAD_DIM] */
	struct exl3_module *head;
	float *h; /* [batch, hidden], the residual stream */
	/* Operands of requests, in the arena: */
	float *x;      /* [batch, hidden] */
	float *qkv;    /* [batch, q | k | v] */
	float *att;    /* [batch, q] */
	float *gu;     /* [batch, gate | up] */
	float *act;    /* [batch, intermediate] */
	float *out;    /* [batch, hidden] */
	float *logits; /* [batch, vocab] */
};

static void open_layer(struct ex_lm *lm, struct llama *m, uint32_t i)
{
	struct layer *l = &m->layers[i];
	uint32_t q = m->nr_heads * HEAD_DIM, kv = m->nr_kv_heads * HEAD_DIM;

	l->attn_norm = ex_tensor(lm, m->hidden, 0, "model.layers.%u.input_layernorm.weight", i);
	l->mlp_norm =
		ex_tensor(lm, m->hidden, 0, "model.layers.%u.post_attention_layernorm.weight", i);
	l->qkv = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, q + 2 * kv,
			   "model.layers.%u.self_attn.qkv_proj", i);
	l->o = ex_module(lm, EXL3_KIND_LINEAR, q, m->hidden, "model.layers.%u.self_attn.o_proj", i);
	if (lm->unfused) {
		l->gate_up = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, 2 * m->intermediate,
				       "model.layers.%u.mlp.gate_up_proj", i);
		l->down = ex_module(lm, EXL3_KIND_LINEAR, m->intermediate, m->hidden,
				    "model.layers.%u.mlp.down_proj", i);
	} else {
		l->mlp = ex_module(lm, EXL3_KIND_MLP, m->hidden, m->hidden, "model.layers.%u.mlp",
				   i);
	}
	l->k = ex_calloc((uint64_t)CONTEXT * kv, sizeof(float));
	l->v = ex_calloc((uint64_t)CONTEXT * kv, sizeof(float));
}

static void open_arena(struct ex_lm *lm, struct llama *m)
{
	uint32_t q = m->nr_heads * HEAD_DIM, kv = m->nr_kv_heads * HEAD_DIM;
	uint64_t row = 4ull * lm->batch; /* bytes of one column of f32 */

	ex_arena_new(lm, row * (2 * m->hidden + 2 * q + 2 * kv + 3 * m->intermediate + lm->vocab) +
				 8 * 64);
	m->x = ex_arena_alloc(lm, row * m->hidden);
	m->qkv = ex_arena_alloc(lm, row * (q + 2 * kv));
	m->att = ex_arena_alloc(lm, row * q);
	m->gu = ex_arena_alloc(lm, row * 2 * m->intermediate);
	m->act = ex_arena_alloc(lm, row * m->intermediate);
	m->out = ex_arena_alloc(lm, row * m->hidden);
	m->logits = ex_arena_alloc(lm, row * lm->vocab);
	m->h = ex_calloc((uint64_t)lm->batch * m->hidden, sizeof(float));
}

static void llama_open(struct ex_lm *lm)
{
	struct llama *m = lm->priv = ex_calloc(1, sizeof(*m));
	struct exl3_module *mod;

	ex_tensor_shape(lm, &lm->vocab, &m->hidden, "model.embed_tokens.weight");
	m->embedding = ex_tensor(lm, lm->vocab, m->hidden, "model.embed_tokens.weight");
	m->norm = ex_tensor(lm, m->hidden, 0, "model.norm.weight");
	m->head = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, lm->vocab, "lm_head");
	m->rope = ex_rope_table(CONTEXT, HEAD_DIM, THETA);
	if (!m->rope)
		ex_die("out of memory");
	lm->hidden = m->hidden;
	lm->context = CONTEXT;

	mod = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, 0, "model.layers.0.self_attn.q_proj");
	m->nr_heads = ex_module_n(mod) / HEAD_DIM;
	exl3_module_close(mod);
	mod = ex_module(lm, EXL3_KIND_LINEAR, m->hidden, 0, "model.layers.0.self_attn.k_proj");
	m->nr_kv_heads = ex_module_n(mod) / HEAD_DIM;
	exl3_module_close(mod);
	mod = ex_module(lm, EXL3_KIND_LINEAR, 0, m->hidden, "model.layers.0.mlp.down_proj");
	m->intermediate = ex_module_k(mod);
	exl3_module_close(mod);
	if (!m->nr_kv_heads || m->nr_heads % m->nr_kv_heads)
		ex_die("%u query heads do not share %u key heads", m->nr_heads, m->nr_kv_heads);

	for (mod = NULL;; m->nr_layers++) {
		mod = ex_module_maybe(lm, EXL3_KIND_LINEAR, "model.layers.%u.self_attn.q_proj",
				      m->nr_layers);
		if (!mod)
			break;
		exl3_module_close(mod);
	}
	m->layers = ex_calloc(m->nr_layers, sizeof(*m->layers));
	for (uint32_t i = 0; i < m->nr_layers; i++)
		open_layer(lm, m, i);
	open_arena(lm, m);
}

static void llama_close(struct ex_lm *lm)
{
	struct llama *m = lm->priv;

	for (uint32_t i = 0; i < m->nr_layers; i++) {
		free(m->layers[i].attn_norm);
		free(m->layers[i].mlp_norm);
		free(m->layers[i].k);
		free(m->layers[i].v);
	}
	free(m->layers);
	free(m->embedding);
	free(m->norm);
	free(m->rope);
	free(m->h);
	free(m);
	lm->priv = NULL;
}

/* Causal attention of one row at position @pos over the cache, every head. */
static void attend(const struct llama *m, const struct layer *l, const float *q, float *out,
		   uint32_t pos)
{
	uint32_t kv_size = m->nr_kv_heads * HEAD_DIM, group = m->nr_heads / m->nr_kv_heads;
	float score[CONTEXT];

	for (uint32_t head = 0; head < m->nr_heads; head++) {
		uint32_t kv = head / group * HEAD_DIM; /* column of its key head */
		float *o = out + head * HEAD_DIM;

		for (uint32_t t = 0; t <= pos; t++)
			score[t] = ex_dot(q + head * HEAD_DIM, l->k + t * kv_size + kv, HEAD_DIM) /
				   sqrtf((float)HEAD_DIM);
		ex_softmax(score, pos + 1);
		memset(o, 0, sizeof(*o) * HEAD_DIM);
		for (uint32_t t = 0; t <= pos; t++)
			for (uint32_t d = 0; d < HEAD_DIM; d++)
				o[d] += score[t] * l->v[t * kv_size + kv + d];
	}
}

static void attention(struct ex_lm *lm, struct llama *m, struct layer *l, uint32_t n, uint32_t pos)
{
	uint32_t q_size = m->nr_heads * HEAD_DIM, kv_size = m->nr_kv_heads * HEAD_DIM;

	for (uint32_t r = 0; r < n; r++)
		ex_rmsnorm(m->x + r * m->hidden, m->h + r * m->hidden, l->attn_norm, m->hidden,
			   EPS);
	ex_linear(lm, l->qkv, m->x, m->qkv, n);
	ex_run(lm);

	for (uint32_t r = 0; r < n; r++) {
		float *q = m->qkv + r * (q_size + 2 * kv_size), *k = q + q_size;
		const float *turn = m->rope + (pos + r) * HEAD_DIM;

		/* Query heads and key heads lie side by side: one loop turns both. */
		for (uint32_t head = 0; head < m->nr_heads + m->nr_kv_heads; head++)
			ex_rope_apply(q + head * HEAD_DIM, turn, HEAD_DIM, EX_ROPE_HALVES);
		memcpy(l->k + (pos + r) * kv_size, k, sizeof(*k) * kv_size);
		memcpy(l->v + (pos + r) * kv_size, k + kv_size, sizeof(*k) * kv_size);
		attend(m, l, q, m->att + r * q_size, pos + r);
	}
	ex_linear(lm, l->o, m->att, m->out, n);
	ex_run(lm);
}

static void mlp(struct ex_lm *lm, struct llama *m, struct layer *l, uint32_t n)
{
	for (uint32_t r = 0; r < n; r++)
		ex_rmsnorm(m->x + r * m->hidden, m->h + r * m->hidden, l->mlp_norm, m->hidden, EPS);
	if (!lm->unfused) {
		ex_mlp(lm, l->mlp, m->x, m->out, n);
		ex_run(lm);
		return;
	}
	ex_linear(lm, l->gate_up, m->x, m->gu, n);
	ex_run(lm);
	for (uint32_t r = 0; r < n; r++) {
		const float *gate = m->gu + (uint64_t)r * 2 * m->intermediate;
		const float *up = gate + m->intermediate;

		for (uint32_t i = 0; i < m->intermediate; i++)
			m->act[(uint64_t)r * m->intermediate + i] = ex_silu(gate[i]) * up[i];
	}
	ex_linear(lm, l->down, m->act, m->out, n);
	ex_run(lm);
}

static void add_out(struct llama *m, uint32_t n)
{
	for (uint32_t i = 0; i < n * m->hidden; i++)
		m->h[i] += m->out[i];
}

static const float *llama_forward(struct ex_lm *lm, const uint8_t *text, uint32_t n, uint32_t pos,
				  uint32_t nr_logits)
{
	struct llama *m = lm->priv;

	for (uint32_t r = 0; r < n; r++)
		memcpy(m->h + r * m->hidden, m->embedding + text[r] * m->hidden,
		       sizeof(*m->h) * m->hidden);
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
		.program = "tiny_llama",
		.model = "tiny-llama",
		.open = llama_open,
		.close = llama_close,
		.forward = llama_forward,
	};

	return ex_lm_main(&ops, argc, argv);
}
