/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exl3ctl_run.c - one operation with NumPy files: linear, mlp, moe, mla.
 *
 * Files are read and checked first, then the daemon is asked. More rows than one request may have are
 * sent as several requests through one arena. The output is written when all of them are done.
 */
#include "client/exl3ctl.h"
#include "client/npy.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows of one file as an operand: split by requests, or (the KV cache) sent whole. */
struct operand {
	const char *path; /* NULL: not given */
	struct exl3_npy npy;
	unsigned dtype; /* enum exl3_dtype */
	uint64_t rows;  /* shape[0] */
	size_t row_bytes;
	void *at; /* in the arena */
};

struct job {
	struct operand x, ids, weights, kv; /* x: q of mla; ids: its indices */
	unsigned y_dtype;
	const char *y_type;              /* in the file */
	uint64_t y_dims[3], lse_dims[2]; /* first one: all rows */
	unsigned nr_y_dims;
	size_t y_row_bytes, lse_row_bytes; /* lse: 0 if it is not wanted */
	char *y, *lse;                     /* owned; all rows */
	void *y_at, *lse_at;               /* in the arena */
	uint32_t kernel, act;
	float limit, routed_scale, scale, kv_scale;
	uint32_t value_dim, geometry;
	uint64_t skipped;

	struct exl3_model *model; /* owned by the client, as the next three */
	struct exl3_module *module;
	struct exl3_arena *arena;
	struct exl3_channel *channel;
};

static void job_fini(struct job *j)
{
	exl3_npy_fini(&j->x.npy);
	exl3_npy_fini(&j->ids.npy);
	exl3_npy_fini(&j->weights.npy);
	exl3_npy_fini(&j->kv.npy);
	free(j->y);
	free(j->lse);
}

/* ---- options ---- */

static int parse_float(const char *option, const char *text, float *ret)
{
	char *end;

	*ret = strtof(text, &end);
	if (end == text || *end || !isfinite(*ret))
		return ctl_error(CTL_USAGE, "%s %s: not a number", option, text);
	return CTL_OK;
}

static int parse_options(const struct ctl *c, struct job *j)
{
	static const struct {
		const char *name;
		unsigned dtype;
		const char *type;
	} dtypes[] = {
		{"f32", EXL3_F32, "f4"}, {"f16", EXL3_F16, "f2"}, {"bf16", EXL3_BF16, "u2"},
		{"f4", EXL3_F32, "f4"},  {"f2", EXL3_F16, "f2"},  {"u2", EXL3_BF16, "u2"},
	};
	static const char *const acts[EXL3_ACT_NR] = {
		[EXL3_ACT_DEFAULT] = "",
		[EXL3_ACT_SILU] = "silu",
		[EXL3_ACT_GELU] = "gelu",
		[EXL3_ACT_RELU2] = "relu2",
		[EXL3_ACT_RELU2_GATED] = "relu2_gated",
		[EXL3_ACT_SWIGLU_OAI] = "swiglu_oai",
	};
	int e = CTL_OK;

	j->y_dtype = EXL3_F32;
	j->y_type = "f4";
	if (c->dtype) {
		size_t i = 0;

		while (i < 6 && strcmp(dtypes[i].name, c->dtype) != 0)
			i++;
		if (i == 6)
			return ctl_error(CTL_USAGE, "--dtype %s: f32, f16 or bf16", c->dtype);
		j->y_dtype = dtypes[i].dtype;
		j->y_type = dtypes[i].type;
	}
	for (j->act = 0; c->act && j->act < EXL3_ACT_NR; j->act++)
		if (j->act != EXL3_ACT_DEFAULT && !strcmp(acts[j->act], c->act))
			break;
	if (j->act == EXL3_ACT_NR)
		return ctl_error(CTL_USAGE,
				 "--act %s: silu, gelu, relu2, relu2_gated or swiglu_oai", c->act);
	if (c->limit)
		e = parse_float("--limit", c->limit, &j->limit);
	if (e == CTL_OK && c->routed_scale)
		e = parse_float("--routed-scale", c->routed_scale, &j->routed_scale);
	if (e == CTL_OK && c->scale)
		e = parse_float("--scale", c->scale, &j->scale);
	j->kv_scale = 1;
	if (e == CTL_OK && c->kv_scale)
		e = parse_float("--kv-scale", c->kv_scale, &j->kv_scale);
	return e;
}

/* ---- files ---- */

enum { FLOATS = 1, E4M3 = 2, IDS = 4 };

static unsigned npy_dtype(const struct ctl *c, const struct exl3_npy *a, unsigned kinds)
{
	if (a->kind == 'f' && kinds & FLOATS)
		return a->size == 4 ? EXL3_F32 : a->size == 2 ? EXL3_F16 : EXL3_DTYPE_NONE;
	if (a->kind == 'u' && a->size == 2 && kinds & FLOATS && c->bf16)
		return EXL3_BF16;
	if (a->kind == 'u' && a->size == 1 && kinds & E4M3)
		return EXL3_E4M3;
	if (a->kind == 'i' && kinds & IDS)
		return a->size == 4 ? EXL3_I32 : a->size == 8 ? EXL3_I64 : EXL3_DTYPE_NONE;
	return EXL3_DTYPE_NONE;
}

static const char *kinds_text(unsigned kinds)
{
	return kinds & IDS    ? "i4 or i8"
	       : kinds & E4M3 ? "f2, u1 (e4m3), or u2 with --bf16"
			      : "f2, f4, or u2 with --bf16";
}

/* Reads @path into @o; @nr_dims of them. */
static int load_operand(const struct ctl *c, const char *path, unsigned nr_dims, unsigned kinds,
			struct operand *o)
{
	struct exl3_error err;
	const struct exl3_npy *a = &o->npy;

	if (exl3_npy_load(path, &o->npy, &err) < 0)
		return ctl_error(CTL_LOCAL, "%s", err.text);
	o->path = path;
	o->dtype = npy_dtype(c, a, kinds);
	if (!o->dtype)
		return ctl_error(CTL_LOCAL, "%s: element type %c%u; must be %s", path, a->kind,
				 a->size, kinds_text(kinds));
	if (a->nr_dims != nr_dims)
		return ctl_error(CTL_LOCAL, "%s: %u dimensions; must be %u", path, a->nr_dims,
				 nr_dims);
	o->rows = a->shape[0];
	o->row_bytes = a->size;
	for (unsigned i = 1; i < nr_dims; i++) {
		if (!a->shape[i] || a->shape[i] > UINT32_MAX)
			return ctl_error(CTL_LOCAL, "%s: dimension %u has size %llu", path, i,
					 (unsigned long long)a->shape[i]);
		o->row_bytes *= a->shape[i];
	}
	return CTL_OK;
}

static int same_rows(const struct operand *a, const struct operand *b)
{
	if (a->rows == b->rows)
		return CTL_OK;
	return ctl_error(CTL_LOCAL, "%s has %llu rows, %s has %llu", a->path,
			 (unsigned long long)a->rows, b->path, (unsigned long long)b->rows);
}

/* ---- what the daemon has to be asked first ---- */

static int find_kernel(struct ctl *c, struct job *j)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__ListKernels body = EXL3__LIST_KERNELS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	int e;

	if (!c->kernel)
		return CTL_OK;
	req.body_case = EXL3__REQUEST__BODY_LIST_KERNELS;
	body.device = (char *)(uintptr_t)(j->model    ? exl3_model_device(j->model)
					  : c->device ? c->device
						      : "");
	req.list_kernels = &body;
	e = ctl_call(c, &req, EXL3__REPLY__BODY_KERNELS, EXL3_CALL_TIMEOUT_NS, &reply);
	if (e != CTL_OK)
		return e;
	for (size_t i = 0; i < reply->kernels->n_names; i++)
		if (!strcmp(reply->kernels->names[i], c->kernel)) {
			j->kernel = (uint32_t)i + 1;
			return CTL_OK;
		}
	return ctl_error(CTL_REFUSED, "there is no kernel '%s'; exl3ctl kernels lists them",
			 c->kernel);
}

/* Opens model and module and settles the size of y. */
static int open_module(struct ctl *c, struct job *j, unsigned kind)
{
	struct exl3_module_info info;
	uint32_t k, n;
	int e = ctl_connect(c);

	if (e != CTL_OK)
		return e;
	if (exl3_model_open(c->client, c->args[1], &j->model) < 0 ||
	    exl3_module_open(j->model, c->args[2], kind, &j->module) < 0)
		return ctl_failed(c);
	exl3_module_get_info(j->module, &info);
	k = c->stored ? info.k : info.k_logical;
	n = c->stored ? info.n : info.n_logical;
	if (j->x.npy.shape[1] != k)
		return ctl_error(CTL_LOCAL, "%s: %llu columns, but %s takes %u", j->x.path,
				 (unsigned long long)j->x.npy.shape[1], c->args[2], k);
	j->nr_y_dims = 2;
	j->y_dims[1] = n;
	j->y_row_bytes = (size_t)n * exl3_dtype_bytes(j->y_dtype);
	return CTL_OK;
}

static int register_mla(struct ctl *c, struct job *j)
{
	struct exl3_mla_shape shape = {
		.heads = (uint32_t)j->x.npy.shape[1],
		.dim = (uint32_t)j->x.npy.shape[2],
		.value_dim = j->value_dim,
		.topk = (uint32_t)j->ids.npy.shape[1],
		.slots = j->kv.rows,
		.cache_dtype = j->kv.dtype,
		.indices_dtype = j->ids.dtype,
		.device = c->device,
	};
	int e = ctl_connect(c);

	if (e != CTL_OK)
		return e;
	return exl3_mla_register(c->client, &shape, &j->geometry) < 0 ? ctl_failed(c) : CTL_OK;
}

/* ---- requests ---- */

static size_t align64(size_t n)
{
	return (n + 63) & ~(size_t)63;
}

static int take(struct job *j, size_t bytes, void **ret)
{
	*ret = bytes ? exl3_arena_alloc(j->arena, bytes) : NULL;
	return bytes && !*ret ? -ENOMEM : 0;
}

/* An arena for @rows rows of everything. */
static int make_arena(struct ctl *c, struct job *j, uint64_t rows)
{
	size_t kv = j->kv.path ? j->kv.row_bytes * j->kv.rows : 0;
	size_t bytes = align64(j->x.row_bytes * rows) + align64(j->ids.row_bytes * rows) +
		       align64(j->weights.row_bytes * rows) + align64(kv) +
		       align64(j->y_row_bytes * rows) + align64(j->lse_row_bytes * rows);

	if (exl3_arena_new(c->client, bytes, &j->arena) < 0 ||
	    exl3_channel_new(c->client, EXL3_SQ_ENTRIES_MIN, &j->channel) < 0)
		return ctl_failed(c);
	if (take(j, j->x.row_bytes * rows, &j->x.at) < 0 ||
	    take(j, j->ids.row_bytes * rows, &j->ids.at) < 0 ||
	    take(j, j->weights.row_bytes * rows, &j->weights.at) < 0 ||
	    take(j, kv, &j->kv.at) < 0 || take(j, j->y_row_bytes * rows, &j->y_at) < 0 ||
	    take(j, j->lse_row_bytes * rows, &j->lse_at) < 0)
		return ctl_error(CTL_REFUSED, "the arena is smaller than asked for");
	if (kv)
		memcpy(j->kv.at, j->kv.npy.data, kv);
	return CTL_OK;
}

static void put_rows(struct operand *o, uint64_t from, uint64_t n)
{
	if (o->path)
		memcpy(o->at, (const char *)o->npy.data + from * o->row_bytes, n * o->row_bytes);
}

static void describe(const struct ctl *c, const struct job *j, unsigned op, struct exl3_sqe *sqe,
		     uint32_t n)
{
	exl3_ref x = exl3_arena_ref(j->arena, j->x.at), y = exl3_arena_ref(j->arena, j->y_at);

	switch (op) {
	case EXL3_OP_LINEAR:
		exl3_prep_linear(sqe, j->module, x, j->x.dtype, y, j->y_dtype, n);
		break;
	case EXL3_OP_MLP:
		exl3_prep_mlp(sqe, j->module, x, j->x.dtype, y, j->y_dtype, n);
		break;
	case EXL3_OP_MOE:
		exl3_prep_moe(sqe, j->module, x, j->x.dtype, y, j->y_dtype, n,
			      exl3_arena_ref(j->arena, j->ids.at), j->ids.dtype,
			      exl3_arena_ref(j->arena, j->weights.at), j->weights.dtype,
			      (uint32_t)j->ids.npy.shape[1]);
		break;
	default:
		exl3_prep_mla(sqe, j->geometry, x, j->x.dtype, exl3_arena_ref(j->arena, j->kv.at),
			      exl3_arena_ref(j->arena, j->ids.at), y, j->y_dtype,
			      j->lse_at ? exl3_arena_ref(j->arena, j->lse_at) : EXL3_REF_NONE, n,
			      j->scale, j->kv_scale);
	}
	if (op == EXL3_OP_MOE || op == EXL3_OP_MLP) {
		sqe->u.moe.act = (uint8_t)j->act;
		sqe->u.moe.limit = j->limit;
		sqe->u.moe.routed_scale = j->routed_scale;
		sqe->u.moe.overrides = (uint8_t)((c->limit ? EXL3_MOE_LIMIT : 0) |
						 (c->routed_scale ? EXL3_MOE_SCALE : 0));
	}
	sqe->flags = (c->stored ? EXL3_STORED : 0) | (c->deterministic ? EXL3_DETERMINISTIC : 0);
	sqe->kernel = j->kernel;
}

static int run_rows(struct ctl *c, struct job *j, unsigned op, uint64_t from, uint32_t n)
{
	struct exl3_sqe *sqe;
	struct exl3_cqe cqe;

	put_rows(&j->x, from, n);
	put_rows(&j->ids, from, n);
	put_rows(&j->weights, from, n);
	sqe = exl3_sq_get(j->channel);
	if (!sqe)
		return ctl_failed(c);
	describe(c, j, op, sqe, n);
	if (exl3_call(j->channel, &cqe) < 0)
		return ctl_failed(c);
	j->skipped += cqe.detail;
	memcpy(j->y + from * j->y_row_bytes, j->y_at, n * j->y_row_bytes);
	if (j->lse_row_bytes)
		memcpy(j->lse + from * j->lse_row_bytes, j->lse_at, n * j->lse_row_bytes);
	return CTL_OK;
}

static int run_all(struct ctl *c, struct job *j, unsigned op)
{
	uint64_t rows = j->x.rows, most = rows < EXL3_M_MAX ? rows : EXL3_M_MAX;
	int e = find_kernel(c, j);

	if (e != CTL_OK)
		return e;
	/* One more byte: no rows are no error of malloc. */
	j->y = malloc(rows * j->y_row_bytes + 1);
	j->lse = malloc(rows * j->lse_row_bytes + 1);
	if (!j->y || !j->lse)
		return ctl_error(CTL_LOCAL, "no memory for %llu rows", (unsigned long long)rows);
	if (rows)
		e = make_arena(c, j, most);
	for (uint64_t from = 0; e == CTL_OK && from < rows; from += most)
		e = run_rows(c, j, op, from, (uint32_t)(rows - from < most ? rows - from : most));
	return e;
}

static int write_output(struct ctl *c, struct job *j)
{
	struct exl3_error err;

	if (j->skipped)
		fprintf(stderr, "exl3ctl: %llu invalid %s skipped\n",
			(unsigned long long)j->skipped, j->kv.path ? "indices" : "expert ids");
	j->y_dims[0] = j->lse_dims[0] = j->x.rows;
	if (exl3_npy_save(c->output, j->y_type, j->nr_y_dims, j->y_dims, j->y, &err) < 0 ||
	    (c->lse && exl3_npy_save(c->lse, "f4", 2, j->lse_dims, j->lse, &err) < 0))
		return ctl_error(CTL_LOCAL, "%s", err.text);
	return CTL_OK;
}

/* ---- the four operations: files, then what the daemon knows ---- */

static int prepare_linear(struct ctl *c, struct job *j)
{
	int e = load_operand(c, c->args[3], 2, FLOATS, &j->x);

	return e == CTL_OK ? open_module(c, j, EXL3_KIND_LINEAR) : e;
}

static int prepare_mlp(struct ctl *c, struct job *j)
{
	int e = load_operand(c, c->args[3], 2, FLOATS, &j->x);

	return e == CTL_OK ? open_module(c, j, EXL3_KIND_MLP) : e;
}

static int prepare_moe(struct ctl *c, struct job *j)
{
	int e;

	if (!c->ids || !c->weights)
		return ctl_error(CTL_USAGE, "run moe needs --ids and --weights");
	e = load_operand(c, c->args[3], 2, FLOATS, &j->x);
	if (e == CTL_OK)
		e = load_operand(c, c->ids, 2, IDS, &j->ids);
	if (e == CTL_OK)
		e = load_operand(c, c->weights, 2, FLOATS, &j->weights);
	if (e == CTL_OK)
		e = same_rows(&j->x, &j->ids);
	if (e == CTL_OK)
		e = same_rows(&j->x, &j->weights);
	if (e == CTL_OK && j->ids.npy.shape[1] != j->weights.npy.shape[1])
		e = ctl_error(CTL_LOCAL, "%s has %llu columns, %s has %llu", j->ids.path,
			      (unsigned long long)j->ids.npy.shape[1], j->weights.path,
			      (unsigned long long)j->weights.npy.shape[1]);
	return e == CTL_OK ? open_module(c, j, EXL3_KIND_MOE) : e;
}

static int settle_value_dim(const struct ctl *c, struct job *j)
{
	uint64_t dim = j->x.npy.shape[2];
	unsigned long v;
	char *end;

	if (!c->value_dim) {
		j->value_dim = (uint32_t)(dim < 512 ? dim : 512);
		return CTL_OK;
	}
	errno = 0;
	v = strtoul(c->value_dim, &end, 10);
	if (errno || *end || end == c->value_dim || *c->value_dim == '-' || !v || v > UINT32_MAX)
		return ctl_error(CTL_USAGE, "--value-dim %s: not a size", c->value_dim);
	j->value_dim = (uint32_t)v;
	return CTL_OK;
}

static int prepare_mla(struct ctl *c, struct job *j)
{
	int e;

	if (!c->q || !c->kv || !c->indices || !c->scale)
		return ctl_error(CTL_USAGE, "run mla needs --q, --kv, --indices and --scale");
	e = load_operand(c, c->q, 3, FLOATS, &j->x);
	if (e == CTL_OK)
		e = load_operand(c, c->kv, 2, FLOATS | E4M3, &j->kv);
	if (e == CTL_OK && j->kv.dtype == EXL3_F32)
		e = ctl_error(CTL_LOCAL, "%s: element type f4; must be %s", c->kv,
			      kinds_text(FLOATS | E4M3));
	if (e == CTL_OK && j->kv.dtype == EXL3_E4M3 && j->kv.npy.shape[1] == EXL3_RECORD_BYTES)
		j->kv.dtype = EXL3_E4M3_656;
	if (e == CTL_OK && c->kv_scale && j->kv.dtype != EXL3_E4M3)
		e = ctl_error(CTL_USAGE, "--kv-scale is for e4m3 caches, which %s is not", c->kv);
	if (e == CTL_OK)
		e = load_operand(c, c->indices, 2, IDS, &j->ids);
	if (e == CTL_OK)
		e = same_rows(&j->x, &j->ids);
	if (e == CTL_OK && j->kv.dtype != EXL3_E4M3_656 && j->x.npy.shape[2] != j->kv.npy.shape[1])
		e = ctl_error(CTL_LOCAL, "%s has dimension %llu, %s has %llu", c->q,
			      (unsigned long long)j->x.npy.shape[2], c->kv,
			      (unsigned long long)j->kv.npy.shape[1]);
	if (e == CTL_OK)
		e = settle_value_dim(c, j);
	if (e == CTL_OK)
		e = register_mla(c, j);
	j->nr_y_dims = 3;
	j->y_dims[1] = j->lse_dims[1] = j->x.npy.shape[1];
	j->y_dims[2] = j->value_dim;
	j->y_row_bytes = j->y_dims[1] * j->value_dim * exl3_dtype_bytes(j->y_dtype);
	j->lse_row_bytes = c->lse ? j->lse_dims[1] * sizeof(float) : 0;
	return e;
}

/* An option that another operation has would be left out without a word: NULL, or its name. */
static const char *foreign_option(const struct ctl *c, unsigned op)
{
	const unsigned moe = 1u << EXL3_OP_MOE, mlp = 1u << EXL3_OP_MLP,
		       mla = 1u << EXL3_OP_MLA_DECODE;
	const struct {
		const char *name, *value;
		unsigned ops;
	} own[] = {
		{"--ids", c->ids, moe},
		{"--weights", c->weights, moe},
		{"--routed-scale", c->routed_scale, moe},
		{"--act", c->act, moe | mlp},
		{"--limit", c->limit, moe | mlp},
		{"--q", c->q, mla},
		{"--kv", c->kv, mla},
		{"--indices", c->indices, mla},
		{"--lse", c->lse, mla},
		{"--scale", c->scale, mla},
		{"--kv-scale", c->kv_scale, mla},
		{"--value-dim", c->value_dim, mla},
		{"--device", c->device, mla}, /* a module runs where its model lives */
	};

	for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
		if (own[i].value && !(own[i].ops & 1u << op))
			return own[i].name;
	return NULL;
}

int ctl_run(struct ctl *c)
{
	static const struct {
		const char *name;
		unsigned op;
		int nr_args;
		int (*prepare)(struct ctl *c, struct job *j);
	} ops[] = {
		{"linear", EXL3_OP_LINEAR, 4, prepare_linear},
		{"mlp", EXL3_OP_MLP, 4, prepare_mlp},
		{"moe", EXL3_OP_MOE, 4, prepare_moe},
		{"mla", EXL3_OP_MLA_DECODE, 1, prepare_mla},
	};
	const char *foreign;
	struct job j = {0};
	size_t i = 0;
	int e;

	while (i < 4 && strcmp(ops[i].name, c->args[0]) != 0)
		i++;
	if (i == 4)
		return ctl_error(CTL_USAGE, "run %s: linear, mlp, moe or mla", c->args[0]);
	if (c->nr_args != ops[i].nr_args || !c->output)
		return ctl_error(CTL_USAGE,
				 "run %s: arguments or -o are missing; see exl3ctl help run",
				 c->args[0]);
	foreign = foreign_option(c, ops[i].op);
	if (foreign)
		return ctl_error(CTL_USAGE, "run %s does not take %s; see exl3ctl help run",
				 c->args[0], foreign);
	e = parse_options(c, &j);
	if (e == CTL_OK)
		e = ops[i].prepare(c, &j);
	if (e == CTL_OK)
		e = run_all(c, &j, ops[i].op);
	if (e == CTL_OK)
		e = write_output(c, &j);
	job_fini(&j);
	return e;
}
