/* SPDX-License-Identifier: Apache-2.0 */
/* call.c - describe a request in its entry; and calls that submit one and wait for it. */
#include "client/internal.h"

#include <errno.h>
#include <string.h>

void exl3_prep_nop(struct exl3_sqe *sqe)
{
	sqe->op = EXL3_OP_NOP;
}

void exl3_prep_cancel(struct exl3_sqe *sqe, uint64_t user_data)
{
	sqe->op = EXL3_OP_CANCEL;
	sqe->u.cancel.user_data = user_data;
}

static void prep_rows(struct exl3_sqe *sqe, enum exl3_op op, const struct exl3_module *mod,
		      exl3_ref x, unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m)
{
	sqe->op = (uint8_t)op;
	sqe->module = mod->handle;
	sqe->x = x;
	sqe->x_dtype = (uint8_t)x_dtype;
	sqe->y = y;
	sqe->y_dtype = (uint8_t)y_dtype;
	sqe->rows = m;
}

void exl3_prep_linear(struct exl3_sqe *sqe, const struct exl3_module *mod, exl3_ref x,
		      unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m)
{
	prep_rows(sqe, EXL3_OP_LINEAR, mod, x, x_dtype, y, y_dtype, m);
}

void exl3_prep_mlp(struct exl3_sqe *sqe, const struct exl3_module *mod, exl3_ref x,
		   unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m)
{
	prep_rows(sqe, EXL3_OP_MLP, mod, x, x_dtype, y, y_dtype, m);
}

void exl3_prep_moe(struct exl3_sqe *sqe, const struct exl3_module *mod, exl3_ref x,
		   unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m, exl3_ref ids,
		   unsigned ids_dtype, exl3_ref weights, unsigned weights_dtype, uint32_t topk)
{
	prep_rows(sqe, EXL3_OP_MOE, mod, x, x_dtype, y, y_dtype, m);
	sqe->u.moe.ids = ids;
	sqe->u.moe.ids_dtype = (uint8_t)ids_dtype;
	sqe->u.moe.weights = weights;
	sqe->u.moe.weights_dtype = (uint8_t)weights_dtype;
	sqe->u.moe.topk = topk;
}

void exl3_prep_mla(struct exl3_sqe *sqe, uint32_t geometry, exl3_ref q, unsigned q_dtype,
		   exl3_ref cache, exl3_ref indices, exl3_ref o, unsigned o_dtype, exl3_ref lse,
		   uint32_t batch, float scale, float kv_scale)
{
	sqe->op = EXL3_OP_MLA_DECODE;
	sqe->module = geometry;
	sqe->x = q;
	sqe->x_dtype = (uint8_t)q_dtype;
	sqe->y = o;
	sqe->y_dtype = (uint8_t)o_dtype;
	sqe->rows = batch;
	sqe->u.mla.cache = cache;
	sqe->u.mla.indices = indices;
	sqe->u.mla.lse = lse;
	sqe->u.mla.scale = scale;
	sqe->u.mla.kv_scale = kv_scale;
}

void exl3_prep_mla_lengths(struct exl3_sqe *sqe, exl3_ref lengths)
{
	sqe->u.mla.lengths = lengths;
}

/* ---- results in words ---- */

const char *exl3_result_text(const struct exl3_cqe *cqe)
{
	static const struct {
		int code;
		const char *text;
	} codes[] = {
		{0, "done"},
		{EINVAL, "the request is wrong"},
		{ENOENT, "no such module, or it was closed or unloaded"},
		{EOPNOTSUPP, "not supported"},
		{EPERM, "not allowed"},
		{EAGAIN, "the model is still loading: try again"},
		{EDQUOT, "a limit of this client"},
		{ENOMEM, "the daemon has no memory for it"},
		{ECANCELED, "cancelled"},
		{ETIME, "its deadline passed before it started"},
		{ESHUTDOWN, "the daemon is draining"},
		{EIO, "the device failed"},
		{ESTALE, "the daemon's worker has gone: wait with exl3_reconnect()"},
		{ENOTRECOVERABLE, "this process's CUDA context is lost: start a new process"},
	};
	const char *why = cqe->result < 0 ? exl3_detail_text((uint32_t)cqe->detail) : NULL;

	if (why)
		return why;
	for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
		if (codes[i].code == -cqe->result)
			return codes[i].text;
	return "unknown result";
}

/* ---- synchronous calls ---- */

int exl3_call(struct exl3_channel *ch, struct exl3_cqe *ret)
{
	struct exl3_cqe cqe;
	int e;

	if (ch->recording) {
		if (ret)
			memset(ret, 0, sizeof(*ret));
		return 0;
	}
	if (ch->ring.sq_next - ch->ring.sq_published != ch->ring.outstanding || !ch->last)
		return exl3_errf(exl3_client_err(), -EBUSY,
				 ch->last ? "this channel has requests outstanding: take their "
					    "completions first"
					  : "nothing was prepared");
	e = exl3_submit(ch);
	if (e < 0)
		return e;
	/* Normally one; whatever else was got without being submitted goes with it, the last one counts. */
	for (int left = e; left > 0; left--) {
		e = exl3_wait(ch, &cqe, UINT64_MAX);
		if (e < 0)
			return e;
	}
	if (ret)
		*ret = cqe;
	if (cqe.result < 0)
		exl3_errf(exl3_client_err(), cqe.result, "%s", exl3_result_text(&cqe));
	return cqe.result;
}

/* The daemon checks all this against the buffer's size; here the pointer is checked, which it cannot
 * see. */
static int operand(const struct exl3_arena *a, const char *what, const void *p, uint64_t bytes,
		   exl3_ref *ret)
{
	size_t offset = (uintptr_t)p - (uintptr_t)a->base;

	if (offset >= a->bytes || bytes > a->bytes - offset)
		return exl3_errf(exl3_client_err(), -EFAULT,
				 "%s: %llu bytes at %p do not lie in the arena of %zu bytes at %p",
				 what, (unsigned long long)bytes, p, a->bytes, a->base);
	*ret = exl3_arena_ref(a, p);
	return 0;
}

static int rows_call(struct exl3_channel *ch, enum exl3_op op, const struct exl3_module *mod,
		     const struct exl3_arena *a, const void *x, unsigned x_dtype, void *y,
		     unsigned y_dtype, uint32_t m)
{
	struct exl3_sqe *sqe;
	exl3_ref xr, yr;
	int e;

	e = operand(a, "x", x, (uint64_t)m * mod->info.k_logical * exl3_dtype_bytes(x_dtype), &xr);
	if (e == 0)
		e = operand(a, "y", y,
			    (uint64_t)m * mod->info.n_logical * exl3_dtype_bytes(y_dtype), &yr);
	if (e < 0)
		return e;
	sqe = exl3_sq_get(ch);
	if (!sqe)
		return exl3_client_err()->code;
	prep_rows(sqe, op, mod, xr, x_dtype, yr, y_dtype, m);
	return exl3_call(ch, NULL);
}

int exl3_linear(struct exl3_channel *ch, const struct exl3_module *mod, const struct exl3_arena *a,
		const void *x, unsigned x_dtype, void *y, unsigned y_dtype, uint32_t m)
{
	return rows_call(ch, EXL3_OP_LINEAR, mod, a, x, x_dtype, y, y_dtype, m);
}

int exl3_mlp(struct exl3_channel *ch, const struct exl3_module *mod, const struct exl3_arena *a,
	     const void *x, unsigned x_dtype, void *y, unsigned y_dtype, uint32_t m)
{
	return rows_call(ch, EXL3_OP_MLP, mod, a, x, x_dtype, y, y_dtype, m);
}

int exl3_moe(struct exl3_channel *ch, const struct exl3_module *mod, const struct exl3_arena *a,
	     const void *x, unsigned x_dtype, void *y, unsigned y_dtype, uint32_t m,
	     const void *ids, unsigned ids_dtype, const void *weights, unsigned weights_dtype,
	     uint32_t topk, uint64_t *detail)
{
	uint64_t picks = (uint64_t)m * topk;
	struct exl3_sqe *sqe;
	struct exl3_cqe cqe = {0};
	exl3_ref xr, yr, ir, wr;
	int e;

	e = operand(a, "x", x, (uint64_t)m * mod->info.k_logical * exl3_dtype_bytes(x_dtype), &xr);
	if (e == 0)
		e = operand(a, "y", y,
			    (uint64_t)m * mod->info.n_logical * exl3_dtype_bytes(y_dtype), &yr);
	if (e == 0)
		e = operand(a, "ids", ids, picks * exl3_dtype_bytes(ids_dtype), &ir);
	if (e == 0)
		e = operand(a, "weights", weights, picks * exl3_dtype_bytes(weights_dtype), &wr);
	if (e < 0)
		return e;
	sqe = exl3_sq_get(ch);
	if (!sqe)
		return exl3_client_err()->code;
	exl3_prep_moe(sqe, mod, xr, x_dtype, yr, y_dtype, m, ir, ids_dtype, wr, weights_dtype,
		      topk);
	e = exl3_call(ch, &cqe);
	if (detail)
		*detail = cqe.detail;
	return e;
}
