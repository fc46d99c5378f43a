/* SPDX-License-Identifier: Apache-2.0 */
/* check.c - a submission entry against everything that it may ask for: checked once, then trusted. */
#include "kernels/check.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define ALIGN 16u

/* An operand: rows of @row_bytes, @stride apart, in one buffer. */
struct operand {
	struct exl3_extent extent; /* of the buffer */
	uint64_t stride, row_bytes;
	char *address, *end; /* on the device; past its last byte */
};

struct checker {
	const struct exl3_sqe *sqe;
	const struct exl3_check_env *env;
	struct exl3_checked *out;
	enum exl3_detail *detail;
};

static int fail(struct checker *c, int code, enum exl3_detail detail)
{
	*c->detail = detail;
	return code;
}

static bool all_zero(const void *p, size_t bytes)
{
	const unsigned char *b = p;
	unsigned char any = 0;

	for (size_t i = 0; i < bytes; i++)
		any |= b[i];
	return any == 0;
}

static bool is_float(uint32_t dtype)
{
	return dtype == EXL3_F16 || dtype == EXL3_BF16 || dtype == EXL3_F32;
}

static bool is_index(uint32_t dtype)
{
	return dtype == EXL3_I32 || dtype == EXL3_I64;
}

/**
 * operand() - find and bound one operand.
 * @stride: 0: dense. Else at least @row_bytes and a multiple of @unit.
 */
static int operand(struct checker *c, exl3_ref ref, uint64_t rows, uint64_t row_bytes,
		   uint64_t stride, uint32_t unit, struct operand *ret)
{
	uint64_t offset = EXL3_REF_OFFSET(ref), span, end;
	struct exl3_buffer *buf;

	*ret = (struct operand){.row_bytes = row_bytes};
	if (stride && (stride < row_bytes || stride % unit))
		return fail(c, -EINVAL, EXL3_DETAIL_STRIDE);
	ret->stride = stride ? stride : row_bytes;
	buf = ref == EXL3_REF_NONE ? NULL : c->env->buffer(c->env->arg, EXL3_REF_BUF(ref));
	if (!buf || !c->env->extent(buf, c->out->target.device, &ret->extent))
		return fail(c, -EINVAL, EXL3_DETAIL_BUFFER);
	if (offset % ALIGN)
		return fail(c, -EINVAL, EXL3_DETAIL_ALIGN);
	if (__builtin_mul_overflow(rows - 1, ret->stride, &span) ||
	    __builtin_add_overflow(span, row_bytes, &span) ||
	    __builtin_add_overflow(span, offset, &end) || end > ret->extent.bytes)
		return fail(c, -EINVAL, EXL3_DETAIL_BOUNDS);
	ret->address = ret->extent.base + offset;
	ret->end = ret->extent.base + end;
	c->out->pins[c->out->nr_pins++] = buf;
	return 0;
}

/* Do two operands share a byte, in whatever buffers? Rows that interleave with one stride do not. */
static bool overlap(const struct operand *a, const struct operand *b)
{
	uint64_t shift;

	if (a->address >= b->end || b->address >= a->end)
		return false;
	if (a->stride != b->stride)
		return true;
	shift = (uint64_t)(a->address > b->address ? a->address - b->address : b->address - a->address);
	shift %= a->stride;
	/* b's rows begin @shift bytes after a's (or the other way round), modulo the stride. */
	if (a->address > b->address)
		return shift < b->row_bytes || shift + a->row_bytes > a->stride;
	return shift < a->row_bytes || shift + b->row_bytes > a->stride;
}

static int check_kernel(struct checker *c)
{
	const struct exl3_check_kernels *kernels;
	const struct exl3_sqe *sqe = c->sqe;

	if (!sqe->kernel)
		return 0;
	kernels = &c->env->kernels[c->out->target.device];
	if (sqe->kernel > kernels->nr || kernels->list[sqe->kernel - 1].op != sqe->op ||
	    kernels->list[sqe->kernel - 1].candidate)
		return fail(c, -EOPNOTSUPP, EXL3_DETAIL_KERNEL);
	c->out->kernel = &kernels->list[sqe->kernel - 1];
	return 0;
}

/* What all requests with operands have in common. */
static int check_common(struct checker *c, uint32_t flags)
{
	const struct exl3_sqe *sqe = c->sqe;
	int rc;

	if (sqe->flags & ~flags || sqe->reserved0)
		return fail(c, -EINVAL, EXL3_DETAIL_OP);
	rc = c->env->target(c->env->arg, sqe->module, &c->out->target);
	if (rc < 0)
		return fail(c, -ENOENT,
			    rc == -ESTALE ? EXL3_DETAIL_MODEL : EXL3_DETAIL_MODULE);
	if (!is_float(sqe->x_dtype) || !is_float(sqe->y_dtype))
		return fail(c, -EINVAL, EXL3_DETAIL_DTYPE);
	if (sqe->rows == 0 || sqe->rows > EXL3_M_MAX)
		return fail(c, -EINVAL, EXL3_DETAIL_ROWS);
	c->out->deterministic = c->env->deterministic || (sqe->flags & EXL3_DETERMINISTIC);
	return check_kernel(c);
}

/* x and y, @x_elems and @y_elems wide. */
static int check_rows(struct checker *c, uint64_t x_elems, uint64_t y_elems, struct operand *x,
		      struct operand *y)
{
	const struct exl3_sqe *sqe = c->sqe;
	struct exl3_rows *rows = &c->out->rows;
	int rc;

	rc = operand(c, sqe->x, sqe->rows, x_elems * exl3_dtype_bytes(sqe->x_dtype), sqe->x_stride,
		     ALIGN, x);
	if (rc == 0)
		rc = operand(c, sqe->y, sqe->rows, y_elems * exl3_dtype_bytes(sqe->y_dtype),
			     sqe->y_stride, ALIGN, y);
	if (rc < 0)
		return rc;
	/* Backends keep strides in 32 bits: a dense row is far below that, see the limits of the ABI. */
	if (x->stride > UINT32_MAX || y->stride > UINT32_MAX)
		return fail(c, -EINVAL, EXL3_DETAIL_STRIDE);
	if (overlap(x, y))
		return fail(c, -EINVAL, EXL3_DETAIL_OVERLAP);
	rows->x = x->address;
	rows->y = y->address;
	rows->x_stride = (uint32_t)x->stride;
	rows->y_stride = (uint32_t)y->stride;
	rows->m = sqe->rows;
	rows->x_dtype = sqe->x_dtype;
	rows->y_dtype = sqe->y_dtype;
	rows->stored = sqe->flags & EXL3_STORED;
	rows->x_device = x->extent.device;
	return 0;
}

static int check_module(struct checker *c, enum exl3_module_kind kind, struct operand *x,
			struct operand *y)
{
	const struct exl3_module_desc *desc;
	bool stored = c->sqe->flags & EXL3_STORED;
	int rc = check_common(c, EXL3_SQE_FLAGS);

	if (rc < 0)
		return rc;
	desc = c->out->target.desc;
	if (!desc || desc->kind != kind)
		return fail(c, -EINVAL, EXL3_DETAIL_MODULE);
	return check_rows(c, stored ? desc->k : desc->k_log, stored ? desc->n : desc->n_log, x, y);
}

static int check_linear(struct checker *c)
{
	struct operand x, y;

	if (!all_zero(&c->sqe->u, sizeof(c->sqe->u)))
		return fail(c, -EINVAL, EXL3_DETAIL_OP);
	return check_module(c, EXL3_MOD_LINEAR, &x, &y);
}

/* Activation, limit and scale: the model's, unless the entry has its own. */
static int check_act(struct checker *c, uint8_t overrides)
{
	const struct exl3_module_desc *desc = c->out->target.desc;
	const __typeof__(c->sqe->u.moe) *moe = &c->sqe->u.moe;
	struct exl3_checked *out = c->out;

	if (moe->act >= EXL3_ACT_NR || moe->overrides & ~overrides)
		return fail(c, -EINVAL, EXL3_DETAIL_OP);
	out->act = moe->act == EXL3_ACT_DEFAULT ? desc->act : moe->act;
	out->limit = moe->overrides & EXL3_MOE_LIMIT ? moe->limit : desc->limit;
	out->routed_scale =
		moe->overrides & EXL3_MOE_SCALE ? moe->routed_scale : desc->routed_scale;
	if (!isfinite(out->limit) || out->limit < 0 || !isfinite(out->routed_scale))
		return fail(c, -EINVAL, EXL3_DETAIL_OP);
	/* Every activation but relu2 multiplies by a gate, which a module without one cannot do. */
	if (out->act != EXL3_ACT_RELU2 && desc->nr_experts && !desc->experts[0].gate)
		return fail(c, -EINVAL, EXL3_DETAIL_MODULE);
	return 0;
}

static int check_moe(struct checker *c)
{
	const __typeof__(c->sqe->u.moe) *moe = &c->sqe->u.moe;
	struct operand x, y, ids, weights;
	int rc;

	if (!all_zero(moe->reserved, sizeof(moe->reserved)))
		return fail(c, -EINVAL, EXL3_DETAIL_OP);
	rc = check_module(c, EXL3_MOD_MOE, &x, &y);
	if (rc == 0)
		rc = check_act(c, EXL3_MOE_LIMIT | EXL3_MOE_SCALE);
	if (rc < 0)
		return rc;
	if (!is_index(moe->ids_dtype) || !is_float(moe->weights_dtype))
		return fail(c, -EINVAL, EXL3_DETAIL_DTYPE);
	if (moe->topk == 0 || moe->topk > EXL3_TOPK_MAX)
		return fail(c, -EINVAL, EXL3_DETAIL_TOPK);
	rc = operand(c, moe->ids, c->sqe->rows, moe->topk * exl3_dtype_bytes(moe->ids_dtype), 0, 1,
		     &ids);
	if (rc == 0)
		rc = operand(c, moe->weights, c->sqe->rows,
			     moe->topk * exl3_dtype_bytes(moe->weights_dtype), 0, 1, &weights);
	if (rc < 0)
		return rc;
	if (overlap(&ids, &y) || overlap(&weights, &y))
		return fail(c, -EINVAL, EXL3_DETAIL_OVERLAP);
	c->out->u.route = (struct exl3_route){
		.ids = ids.address,
		.weights = weights.address,
		.topk = moe->topk,
		.ids_dtype = moe->ids_dtype,
		.weights_dtype = moe->weights_dtype,
	};
	return 0;
}

static int check_mlp(struct checker *c)
{
	const __typeof__(c->sqe->u.moe) *moe = &c->sqe->u.moe;
	struct operand x, y;
	int rc;

	if (moe->ids || moe->weights || moe->topk || moe->ids_dtype || moe->weights_dtype ||
	    moe->routed_scale != 0 || !all_zero(moe->reserved, sizeof(moe->reserved)))
		return fail(c, -EINVAL, EXL3_DETAIL_OP);
	rc = check_module(c, EXL3_MOD_MLP, &x, &y);
	return rc < 0 ? rc : check_act(c, EXL3_MOE_LIMIT);
}

static int check_mla(struct checker *c)
{
	const __typeof__(c->sqe->u.mla) *mla = &c->sqe->u.mla;
	const struct exl3_mla_geometry *g;
	struct operand q, o, cache, indices, lengths, lse;
	int rc;

	if (!all_zero(mla->reserved, sizeof(mla->reserved)) || !isfinite(mla->scale) ||
	    !isfinite(mla->kv_scale))
		return fail(c, -EINVAL, EXL3_DETAIL_OP);
	rc = check_common(c, EXL3_DETERMINISTIC | EXL3_STREAM);
	if (rc < 0)
		return rc;
	g = c->out->target.mla;
	if (!g)
		return fail(c, -EINVAL, EXL3_DETAIL_MODULE);
	rc = check_rows(c, (uint64_t)g->heads * g->dim, (uint64_t)g->heads * g->value_dim, &q, &o);
	if (rc == 0)
		rc = operand(c, mla->cache, g->slots,
			     exl3_cache_row_bytes(g->cache_dtype, g->dim), g->cache_stride, ALIGN,
			     &cache);
	if (rc == 0)
		rc = operand(c, mla->indices,
			     (c->sqe->rows + g->table_queries - 1) / g->table_queries,
			     (uint64_t)exl3_mla_columns(g) * exl3_dtype_bytes(g->indices_dtype),
			     g->indices_stride, exl3_dtype_bytes(g->indices_dtype), &indices);
	if (rc < 0)
		return rc;
	if (overlap(&cache, &o) || overlap(&indices, &o))
		return fail(c, -EINVAL, EXL3_DETAIL_OVERLAP);
	c->out->u.mla.geometry = *g;
	c->out->u.mla.cache = (struct exl3_mla_cache){
		.cache = cache.address,
		.indices = indices.address,
		.scale = mla->scale,
		.kv_scale = g->cache_dtype == EXL3_E4M3 ? mla->kv_scale : 1,
	};
	if (mla->lengths != EXL3_REF_NONE) {
		rc = operand(c, mla->lengths, c->sqe->rows, sizeof(int32_t), 0, sizeof(int32_t), &lengths);
		if (rc < 0)
			return rc;
		if (overlap(&lengths, &o))
			return fail(c, -EINVAL, EXL3_DETAIL_OVERLAP);
		c->out->u.mla.cache.lengths = (const void *)lengths.address;
	}
	if (mla->lse == EXL3_REF_NONE)
		return 0;
	rc = operand(c, mla->lse, c->sqe->rows, (uint64_t)g->heads * sizeof(float), 0, 1, &lse);
	if (rc < 0)
		return rc;
	if (overlap(&lse, &o) || overlap(&lse, &q) || overlap(&lse, &cache) ||
	    overlap(&lse, &indices) ||
	    (mla->lengths != EXL3_REF_NONE && overlap(&lse, &lengths)))
		return fail(c, -EINVAL, EXL3_DETAIL_OVERLAP);
	c->out->u.mla.cache.lse = (void *)lse.address;
	return 0;
}

/* NOP, CANCEL and PLAN have no operands: everything but the named fields must be zero. */
static int check_plain(struct checker *c)
{
	struct exl3_sqe rest = *c->sqe;

	rest.op = 0;
	rest.user_data = 0;
	rest.deadline_ns = 0;
	if (c->sqe->op == EXL3_OP_PLAN)
		rest.module = 0;
	if (c->sqe->op == EXL3_OP_CANCEL)
		rest.u.cancel.user_data = 0;
	else if (rest.flags & EXL3_STREAM)
		rest.flags = rest.stream_seq = 0;
	return all_zero(&rest, sizeof(rest)) ? 0 : fail(c, -EINVAL, EXL3_DETAIL_OP);
}

int exl3_check_sqe(const struct exl3_sqe *sqe, const struct exl3_check_env *env,
		   struct exl3_checked *ret, enum exl3_detail *detail)
{
	struct checker c = {.sqe = sqe, .env = env, .out = ret, .detail = detail};

	memset(ret, 0, sizeof(*ret));
	*detail = EXL3_DETAIL_NONE;
	ret->op = sqe->op;
	if (sqe->flags & EXL3_STREAM ? !env->stream : sqe->stream_seq != 0)
		return fail(&c, -EINVAL,
			    sqe->stream_seq && !(sqe->flags & EXL3_STREAM) ? EXL3_DETAIL_OP
									     : EXL3_DETAIL_STREAM);
	switch (sqe->op) {
	case EXL3_OP_NOP:
	case EXL3_OP_CANCEL:
		return check_plain(&c);
	case EXL3_OP_PLAN:
		return env->plans ? check_plain(&c) : fail(&c, -EINVAL, EXL3_DETAIL_OP);
	case EXL3_OP_LINEAR:
		return check_linear(&c);
	case EXL3_OP_MOE:
		return check_moe(&c);
	case EXL3_OP_MLP:
		return check_mlp(&c);
	case EXL3_OP_MLA_DECODE:
		return check_mla(&c);
	default:
		return fail(&c, -EINVAL, EXL3_DETAIL_OP);
	}
}

void exl3_work_describe(struct exl3_work *work, const struct exl3_checked *c)
{
	const struct exl3_module_desc *desc = c->target.desc;

	memset(work, 0, sizeof(*work));
	work->op = c->op;
	work->deterministic = c->deterministic;
	work->kernel = c->kernel;
	switch (c->op) {
	case EXL3_OP_LINEAR:
		work->u.linear.shards = desc->shards;
		work->u.linear.nr_shards = desc->nr_shards;
		break;
	case EXL3_OP_MOE:
	case EXL3_OP_MLP:
		work->u.moe.experts = desc->experts;
		work->u.moe.nr_experts = desc->nr_experts;
		work->u.moe.plan = desc->plan;
		work->u.moe.act = c->act;
		work->u.moe.limit = c->limit;
		work->u.moe.routed_scale = c->routed_scale;
		break;
	case EXL3_OP_NOP:
		break;
	default:
		work->u.mla.geometry = c->u.mla.geometry;
		break;
	}
}

int exl3_check_geometry(struct exl3_mla_geometry *g, struct exl3_error *err)
{
	uint64_t row, indices, bytes;

	if (g->cache_dtype != EXL3_F16 && g->cache_dtype != EXL3_BF16 &&
	    g->cache_dtype != EXL3_E4M3 && g->cache_dtype != EXL3_E4M3_656)
		return exl3_errf(err, -EOPNOTSUPP,
				 "mla: cache dtype %u is none of f16, bf16, e4m3, e4m3_656",
				 g->cache_dtype);
	if (!is_index(g->indices_dtype))
		return exl3_errf(err, -EINVAL, "mla: indices dtype %u is neither i32 nor i64",
				 g->indices_dtype);
	if (g->cache_dtype == EXL3_E4M3_656 &&
	    (g->dim != EXL3_RECORD_DIM || g->value_dim != EXL3_RECORD_VALUES))
		return exl3_errf(err, -EINVAL,
				 "mla: a record of 656 bytes has dim 576 and value dim 512, not %u and %u",
				 g->dim, g->value_dim);
	if (g->dim == 0 || g->dim > EXL3_MLA_DIM_MAX || g->dim % 16)
		return exl3_errf(err, -EINVAL, "mla: dim %u is not a multiple of 16 up to %u",
				 g->dim, EXL3_MLA_DIM_MAX);
	if (g->value_dim == 0 || g->value_dim > g->dim || g->value_dim % 16)
		return exl3_errf(err, -EINVAL,
				 "mla: value dim %u is not a multiple of 16 up to dim %u",
				 g->value_dim, g->dim);
	if (g->heads == 0 || g->heads > EXL3_MLA_HEADS_MAX)
		return exl3_errf(err, -EINVAL, "mla: %u heads; 1 to %u are possible", g->heads,
				 EXL3_MLA_HEADS_MAX);
	if (g->topk == 0 || g->topk > EXL3_MLA_TOPK_MAX)
		return exl3_errf(err, -EINVAL, "mla: topk %u; 1 to %u are possible", g->topk,
				 EXL3_MLA_TOPK_MAX);
	/* Slots are numbered by signed 32-bit indices too. */
	if (g->slots == 0 || g->slots > INT32_MAX)
		return exl3_errf(err, -EINVAL, "mla: %llu slots; 1 to %d are possible",
				 (unsigned long long)g->slots, INT32_MAX);
	if (!g->page_rows)
		g->page_rows = 1;
	if (!g->table_queries)
		g->table_queries = 1;
	if (g->page_rows > EXL3_MLA_PAGE_MAX || (g->page_rows & (g->page_rows - 1)))
		return exl3_errf(err, -EINVAL,
				 "mla: pages of %u rows; a power of two up to %u is possible",
				 g->page_rows, EXL3_MLA_PAGE_MAX);
	if (g->slots % g->page_rows)
		return exl3_errf(err, -EINVAL, "mla: %llu slots are no whole pages of %u rows",
				 (unsigned long long)g->slots, g->page_rows);
	if (g->table_queries > EXL3_M_MAX)
		return exl3_errf(err, -EINVAL, "mla: %u queries share a table; 1 to %u are possible",
				 g->table_queries, EXL3_M_MAX);
	row = exl3_cache_row_bytes(g->cache_dtype, g->dim);
	indices = (uint64_t)exl3_mla_columns(g) * exl3_dtype_bytes(g->indices_dtype);
	if (!g->cache_stride)
		g->cache_stride = row;
	if (!g->indices_stride)
		g->indices_stride = (uint32_t)indices;
	if (g->cache_stride < row || g->cache_stride % ALIGN)
		return exl3_errf(
			err, -EINVAL,
			"mla: cache stride %llu is not a multiple of 16 of at least %llu bytes",
			(unsigned long long)g->cache_stride, (unsigned long long)row);
	if (g->indices_stride < indices || g->indices_stride % exl3_dtype_bytes(g->indices_dtype))
		return exl3_errf(err, -EINVAL,
				 "mla: indices stride %u is less than %llu bytes, or odd",
				 g->indices_stride, (unsigned long long)indices);
	if (__builtin_mul_overflow(g->slots, g->cache_stride, &bytes) || bytes > 1ull << 47)
		return exl3_errf(err, -EINVAL, "mla: the cache would be larger than any buffer");
	return 0;
}
