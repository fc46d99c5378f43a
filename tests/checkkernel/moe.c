/* SPDX-License-Identifier: Apache-2.0 */
/* moe.c - routed experts and dense MLPs: activations, mixed bitrates, holes, bad ids, merging. */
#include "tests/checkkernel/ck.h"

#include "kernels/cpu/ref.h"

#include <errno.h>
#include <math.h>

#define EXPERTS 6
#define ENTRIES 8

struct shape {
	uint8_t op, act;
	uint32_t hidden, inter; /* logical */
	uint32_t nr_experts;
	float limit, routed_scale;
	bool bias, stored, mixed, garbage, bad_rows;
	bool ragged; /* MLP: slices of different widths */
	uint32_t nr_entries;
	struct {
		uint32_t m, topk;
		uint8_t x_dtype, y_dtype, ids_dtype, weights_dtype;
	} entry[ENTRIES];
};

struct moe {
	struct ck_matrix *matrix[EXPERTS][3];
	struct exl3_expert host_experts[EXPERTS], dev_experts[EXPERTS];
	struct exl3_route host_routes[ENTRIES], dev_routes[ENTRIES];
	struct ck_rows rows[ENTRIES];
	struct ck_buf ids[ENTRIES], weights[ENTRIES];
	struct exl3_rows host_rows[ENTRIES], dev_rows[ENTRIES];
	struct exl3_work host, dev;
};

static void put_id(const struct ck_buf *buf, uint8_t dtype, size_t i, int64_t id)
{
	int32_t narrow = (int32_t)id;

	if (dtype == EXL3_I64)
		memcpy((char *)buf->host + 8 * i, &id, 8);
	else
		memcpy((char *)buf->host + 4 * i, &narrow, 4);
}

/* Ids that must be skipped and counted, next to the holes that are only skipped. */
static int64_t bad_id(struct ck *ck, uint8_t dtype, uint32_t nr_experts)
{
	static const int64_t wide[] = {1ll << 32, INT64_MIN, INT64_MAX, (1ll << 32) + 1,
				       -(1ll << 32)};

	switch (ck_below(ck, 6)) {
	case 0:
		return -2;
	case 1:
		return nr_experts;
	case 2:
		return INT32_MAX;
	case 3:
		return INT32_MIN;
	default:
		return dtype == EXL3_I64 ? wide[ck_below(ck, 5)] : (int32_t)ck_random(ck) | 64;
	}
}

static void build_route(struct ck *ck, const struct shape *s, struct moe *m, uint32_t e)
{
	uint32_t topk = s->entry[e].topk, n = s->entry[e].m * topk;
	uint8_t id = s->entry[e].ids_dtype, wd = s->entry[e].weights_dtype;

	m->ids[e] = ck_buf_new(ck, (size_t)n * exl3_dtype_bytes(id));
	m->weights[e] = ck_buf_new(ck, (size_t)n * exl3_dtype_bytes(wd));
	for (uint32_t i = 0; i < n; i++) {
		uint32_t kind = s->garbage ? ck_below(ck, 5) : 4;

		put_id(&m->ids[e], id, i,
		       kind == 0   ? -1
		       : kind == 1 ? bad_id(ck, id, s->nr_experts)
				   : ck_below(ck, s->nr_experts));
		/* A hole's weight must not matter. */
		exl3_ref_store(m->weights[e].host, wd, i, kind < 2 ? NAN : ck_uniform(ck, 0, 1));
	}
	ck_buf_upload(ck, &m->ids[e]);
	ck_buf_upload(ck, &m->weights[e]);
	m->host_routes[e] = (struct exl3_route){.ids = m->ids[e].host,
						.weights = m->weights[e].host,
						.topk = topk,
						.ids_dtype = id,
						.weights_dtype = wd};
	m->dev_routes[e] = m->host_routes[e];
	m->dev_routes[e].ids = m->ids[e].dev;
	m->dev_routes[e].weights = m->weights[e].dev;
}

/* False: the backend cannot plan these experts. */
static bool build(struct ck *ck, const struct shape *s, struct moe *m)
{
	static const struct {
		int rate2, codebook;
	} mix[] = {{8, EXL3_CB_MUL1},
		   {6, EXL3_CB_MCG},
		   {5, EXL3_CB_MUL1},
		   {4, EXL3_CB_3INST},
		   {16, EXL3_CB_MUL1}};
	struct exl3_moe_args args = {.nr_experts = s->nr_experts,
				     .act = s->act,
				     .limit = s->limit,
				     .routed_scale = s->routed_scale};
	struct exl3_error err;

	memset(m, 0, sizeof(*m));
	for (uint32_t i = 0; i < s->nr_experts; i++)
		for (int p = s->act == EXL3_ACT_RELU2; p < 3; p++) {
			unsigned w = s->mixed ? (i + (unsigned)p) % 5 : 0;
			uint32_t inter = s->ragged ? s->inter + 100 * (i % 3) : s->inter;
			struct ck_matrix *x = ck_matrix_new(ck, p == 2 ? inter : s->hidden,
							    p == 2 ? s->hidden : inter,
							    mix[w].rate2, mix[w].codebook, s->bias);
			const struct exl3_matrix **host[] = {&m->host_experts[i].gate,
							     &m->host_experts[i].up,
							     &m->host_experts[i].down};
			const struct exl3_matrix **dev[] = {&m->dev_experts[i].gate,
							    &m->dev_experts[i].up,
							    &m->dev_experts[i].down};

			m->matrix[i][p] = x;
			*host[p] = &x->host;
			*dev[p] = &x->dev;
		}
	for (uint32_t e = 0; e < s->nr_entries; e++) {
		const struct exl3_matrix *down = m->host_experts[0].down;
		uint32_t width = s->stored ? down->n : s->hidden;

		m->rows[e] = ck_rows_new(ck, s->entry[e].m, width, width, s->entry[e].x_dtype,
					 s->entry[e].y_dtype, s->stored, 16 * e, 32 * e);
		if (s->bad_rows) {
			ck_put(&m->rows[e].x, s->entry[e].x_dtype, m->rows[e].dev.x_stride, 0, 3,
			       NAN);
			ck_buf_upload(ck, &m->rows[e].x);
		}
		m->host_rows[e] = m->rows[e].host;
		m->dev_rows[e] = m->rows[e].dev;
		if (s->op == EXL3_OP_MOE)
			build_route(ck, s, m, e);
	}
	m->host = (struct exl3_work){
		.op = s->op, .rows = m->host_rows, .nr_rows = s->nr_entries, .u.moe = args};
	m->host.u.moe.experts = m->host_experts;
	m->host.u.moe.routes = s->op == EXL3_OP_MOE ? m->host_routes : NULL;
	m->dev = m->host;
	m->dev.rows = m->dev_rows;
	m->dev.u.moe.experts = m->dev_experts;
	m->dev.u.moe.routes = s->op == EXL3_OP_MOE ? m->dev_routes : NULL;
	if (ck->ops->moe_plan) {
		int ret = ck->ops->moe_plan(ck->dev, m->dev_experts, s->nr_experts,
					    &m->dev.u.moe.plan, &err);

		if (ret == -EOPNOTSUPP && s->ragged) {
			printf("left out: %s: %s\n", ck->what, err.text);
			return false;
		}
		if (ret) {
			fprintf(stderr, "checkkernel: moe_plan: %s\n", err.text);
			exit(1);
		}
	}
	return true;
}

static void run_shape(struct ck *ck, const struct shape *s, const char *what)
{
	double tol_max = ck->tol_max, tol_rms = ck->tol_rms;
	struct moe m;

	if (ck_skip(ck))
		return;
	ck_case_begin(ck, "%s %s: act %d, limit %g, hidden %u, inter %u, m %u, top %u%s%s",
		      s->op == EXL3_OP_MOE ? "moe" : "mlp", what, s->act, (double)s->limit,
		      s->hidden, s->inter, s->entry[0].m, s->entry[0].topk,
		      s->mixed ? ", mixed" : "", s->stored ? ", stored" : "");
	/* Three products and an activation in a row; squares double an error, so twice the limits. */
	ck->tol_max *= 2;
	ck->tol_rms *= 2;
	if (build(ck, s, &m))
		ck_check(ck, &m.host, &m.dev, m.rows);
	ck->tol_max = tol_max;
	ck->tol_rms = tol_rms;
	if (m.dev.u.moe.plan)
		ck->ops->moe_plan_free(ck->dev, m.dev.u.moe.plan);
	for (int i = 0; i < EXPERTS; i++)
		for (int p = 0; p < 3; p++)
			ck_matrix_free(m.matrix[i][p]);
	for (int e = 0; e < ENTRIES; e++) {
		ck_rows_free(&m.rows[e]);
		ck_buf_free(&m.ids[e]);
		ck_buf_free(&m.weights[e]);
	}
}

static struct shape routed(uint8_t act, uint32_t m, uint32_t topk)
{
	return (struct shape){.op = EXL3_OP_MOE,
			      .act = act,
			      .hidden = 256,
			      .inter = 128,
			      .nr_experts = EXPERTS,
			      .routed_scale = 1,
			      .nr_entries = 1,
			      .entry = {{m, topk, EXL3_F16, EXL3_F32, EXL3_I32, EXL3_F32}}};
}

static void activations(struct ck *ck)
{
	for (uint8_t act = EXL3_ACT_SILU; act < EXL3_ACT_NR; act++)
		for (int limited = 0; limited < 2; limited++) {
			struct shape s = routed(act, 3, 2);

			s.limit = limited ? 0.75f : 0;
			s.mixed = true;
			run_shape(ck, &s, "activations");
			s = routed(act, 2, 0);
			s.op = EXL3_OP_MLP;
			s.limit = limited ? 0.75f : 0;
			s.nr_experts = 1;
			run_shape(ck, &s, "activations");
		}
}

static void routes(struct ck *ck)
{
	static const uint8_t wd[] = {EXL3_F32, EXL3_F16, EXL3_BF16};
	static const uint32_t m[] = {1, 2, 5, 17, 33};

	for (int i = 0; i < (ck->quick ? 3 : 10); i++) {
		struct shape s = routed(EXL3_ACT_SILU, m[i % 5], 1 + (uint32_t)i % 4);

		s.garbage = true;
		s.mixed = i % 2;
		s.bias = i % 3 == 0;
		s.routed_scale = i % 4 == 1 ? 128 : 1;
		s.entry[0].ids_dtype = i % 2 ? EXL3_I64 : EXL3_I32;
		s.entry[0].weights_dtype = wd[i % 3];
		s.entry[0].x_dtype = wd[(i + 1) % 3];
		s.entry[0].y_dtype = wd[i / 3 % 3];
		run_shape(ck, &s, "routes");
	}
}

static void sizes(struct ck *ck)
{
	static const struct {
		uint32_t hidden, inter;
	} size[] = {{128, 128}, {100, 130}, {129, 16}, {300, 257}, {17, 33}};

	for (size_t i = 0; i < sizeof(size) / sizeof(size[0]); i++)
		for (int stored = 0; stored < 2; stored++) {
			struct shape s = routed(EXL3_ACT_SILU, 1 + (uint32_t)i, 2);

			s.hidden = size[i].hidden;
			s.inter = size[i].inter;
			s.stored = stored;
			s.mixed = s.bias = true;
			run_shape(ck, &s, "sizes");
			s.op = EXL3_OP_MLP;
			s.nr_experts = 1 + (uint32_t)i % 3;
			run_shape(ck, &s, "sizes");
		}
	for (uint32_t m = 1; m <= 4; m += 3) {
		struct shape s = routed(EXL3_ACT_SILU, m, 0);

		s.op = EXL3_OP_MLP;
		s.nr_experts = 3;
		s.ragged = true;
		run_shape(ck, &s, "slices of different widths");
	}
}

static void merged(struct ck *ck)
{
	struct shape s = routed(EXL3_ACT_SILU, 1, 3);

	s.nr_entries = 3;
	s.garbage = s.mixed = s.bad_rows = true;
	s.entry[1] = s.entry[0];
	s.entry[1].m = 4;
	s.entry[1].topk = 1;
	s.entry[1].ids_dtype = EXL3_I64;
	s.entry[1].y_dtype = EXL3_F16;
	s.entry[2] = s.entry[0];
	s.entry[2].m = 9;
	s.entry[2].topk = 5;
	s.entry[2].x_dtype = EXL3_BF16;
	run_shape(ck, &s, "merged requests");
	s.op = EXL3_OP_MLP;
	s.nr_experts = 1;
	run_shape(ck, &s, "merged requests");
}

/* Decoders at one layer: a row or a few each; then requests that are large for the experts there are. */
static void together(struct ck *ck)
{
	static const uint32_t rows[][ENTRIES] = {
		{1, 1, 1, 1, 1, 1, 1, 1}, {2, 1, 3, 1, 2}, {9, 7}, {1, 40}};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		for (int mixed = 0; mixed < 2; mixed++) {
			struct shape s = routed(EXL3_ACT_SILU, 1, 2);

			s.hidden = 500;
			s.inter = 300;
			s.mixed = mixed;
			s.bias = true;
			s.garbage = i % 2;
			s.bad_rows = i == 1;
			for (s.nr_entries = 0; s.nr_entries < ENTRIES && rows[i][s.nr_entries]; s.nr_entries++) {
				s.entry[s.nr_entries] = s.entry[0];
				s.entry[s.nr_entries].m = rows[i][s.nr_entries];
				s.entry[s.nr_entries].y_dtype = s.nr_entries % 2 ? EXL3_F16 : EXL3_F32;
			}
			run_shape(ck, &s, "requests that meet");
			s.op = EXL3_OP_MLP;
			s.nr_experts = 1 + (uint32_t)mixed;
			run_shape(ck, &s, "requests that meet");
		}
}

void ck_moe(struct ck *ck)
{
	activations(ck);
	routes(ck);
	sizes(ck);
	merged(ck);
	together(ck);
}
