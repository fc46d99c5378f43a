/* SPDX-License-Identifier: Apache-2.0 */
/* common_lm.c - what the example language models share: connection, modules, tensors, requests. */
#include "client/examples/common_lm.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/format.h" /* fp16 and bf16 to float */

#define REPLY_NS_MAX 60000000000u /* a request that takes longer than this has been lost */

void ex_die(const char *fmt, ...)
{
	va_list ap;

	fflush(stdout);
	fprintf(stderr, "%s: ", program_invocation_short_name);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(1);
}

void *ex_calloc(uint64_t count, uint64_t size)
{
	void *ptr = calloc(count, size);

	if (!ptr)
		ex_die("out of memory");
	return ptr;
}

static void format_name(char name[EXL3_NAME_MAX + 1], const char *fmt, va_list ap)
{
	if (vsnprintf(name, EXL3_NAME_MAX + 1, fmt, ap) > (int)EXL3_NAME_MAX)
		ex_die("a name of more than %u bytes", EXL3_NAME_MAX);
}

/* Elements as f32, whatever type the checkpoint has. */
static float *to_f32(const struct exl3_tensor *t, const char *name, uint64_t count)
{
	float *out = ex_calloc(count, sizeof(*out));
	const uint16_t *half = t->data;

	if (!strcmp(t->dtype, "F32") && t->bytes == 4 * count) {
		memcpy(out, t->data, 4 * count);
	} else if (!strcmp(t->dtype, "F16") && t->bytes == 2 * count) {
		for (uint64_t i = 0; i < count; i++)
			out[i] = exl3_f16_to_f32(half[i]);
	} else if (!strcmp(t->dtype, "BF16") && t->bytes == 2 * count) {
		for (uint64_t i = 0; i < count; i++)
			out[i] = exl3_bf16_to_f32(half[i]);
	} else {
		ex_die("%s: %llu bytes of type %s are not %llu numbers", name,
		       (unsigned long long)t->bytes, t->dtype, (unsigned long long)count);
	}
	return out;
}

float *ex_tensor(struct ex_lm *lm, uint32_t d0, uint32_t d1, const char *fmt, ...)
{
	char name[EXL3_NAME_MAX + 1];
	struct exl3_tensor t;
	float *out;
	va_list ap;

	va_start(ap, fmt);
	format_name(name, fmt, ap);
	va_end(ap);
	if (exl3_tensor_open(lm->model, name, &t) < 0)
		ex_die("%s", exl3_last_error());
	if (t.nr_dims != (d1 ? 2u : 1u) || t.shape[0] != d0 || (d1 && t.shape[1] != d1))
		ex_die("%s: its shape is not [%u%s%.0u]", name, d0, d1 ? ", " : "", d1);
	out = to_f32(&t, name, (uint64_t)d0 * (d1 ? d1 : 1));
	exl3_tensor_close(&t);
	return out;
}

void ex_tensor_shape(struct ex_lm *lm, uint32_t *d0, uint32_t *d1, const char *fmt, ...)
{
	char name[EXL3_NAME_MAX + 1];
	struct exl3_tensor t;
	va_list ap;

	va_start(ap, fmt);
	format_name(name, fmt, ap);
	va_end(ap);
	if (exl3_tensor_open(lm->model, name, &t) < 0)
		ex_die("%s", exl3_last_error());
	if (t.nr_dims != 2 || !t.shape[0] || !t.shape[1] || t.shape[0] > UINT32_MAX ||
	    t.shape[1] > UINT32_MAX)
		ex_die("%s: not a matrix", name);
	*d0 = (uint32_t)t.shape[0];
	*d1 = (uint32_t)t.shape[1];
	exl3_tensor_close(&t);
}

uint32_t ex_module_n(const struct exl3_module *mod)
{
	struct exl3_module_info info;

	exl3_module_get_info(mod, &info);
	return info.n_logical;
}

uint32_t ex_module_k(const struct exl3_module *mod)
{
	struct exl3_module_info info;

	exl3_module_get_info(mod, &info);
	return info.k_logical;
}

struct exl3_module *ex_module(struct ex_lm *lm, unsigned kind, uint32_t k, uint32_t n,
			      const char *fmt, ...)
{
	char name[EXL3_NAME_MAX + 1];
	struct exl3_module *mod;
	va_list ap;

	va_start(ap, fmt);
	format_name(name, fmt, ap);
	va_end(ap);
	if (exl3_module_open(lm->model, name, kind, &mod) < 0)
		ex_die("%s", exl3_last_error());
	if ((k && ex_module_k(mod) != k) || (n && ex_module_n(mod) != n))
		ex_die("%s: [%u, %u] where this program expects [%u, %u]", name, ex_module_k(mod),
		       ex_module_n(mod), k, n);
	return mod;
}

struct exl3_module *ex_module_maybe(struct ex_lm *lm, unsigned kind, const char *fmt, ...)
{
	char name[EXL3_NAME_MAX + 1];
	struct exl3_module *mod = NULL;
	va_list ap;
	int r;

	va_start(ap, fmt);
	format_name(name, fmt, ap);
	va_end(ap);
	r = exl3_module_open(lm->model, name, kind, &mod);
	if (r < 0 && r != -ENOENT)
		ex_die("%s", exl3_last_error());
	return mod;
}

void ex_arena_new(struct ex_lm *lm, uint64_t bytes)
{
	if (exl3_arena_new(lm->client, bytes, &lm->arena) < 0)
		ex_die("%s", exl3_last_error());
}

void *ex_arena_alloc(struct ex_lm *lm, uint64_t bytes)
{
	void *ptr = exl3_arena_alloc(lm->arena, bytes);

	if (!ptr)
		ex_die("the arena of %zu bytes is too small", exl3_arena_bytes(lm->arena));
	return ptr;
}

exl3_ref ex_ref(const struct ex_lm *lm, const void *ptr)
{
	return exl3_arena_ref(lm->arena, ptr);
}

struct exl3_sqe *ex_sqe(struct ex_lm *lm)
{
	struct exl3_sqe *sqe = exl3_sq_get(lm->channel);

	if (!sqe)
		ex_die("%s", exl3_last_error());
	lm->requests++;
	lm->outstanding++;
	return sqe;
}

void ex_linear(struct ex_lm *lm, const struct exl3_module *mod, const float *x, float *y,
	       uint32_t m)
{
	exl3_prep_linear(ex_sqe(lm), mod, ex_ref(lm, x), EXL3_F32, ex_ref(lm, y), EXL3_F32, m);
}

void ex_mlp(struct ex_lm *lm, const struct exl3_module *mod, const float *x, float *y, uint32_t m)
{
	exl3_prep_mlp(ex_sqe(lm), mod, ex_ref(lm, x), EXL3_F32, ex_ref(lm, y), EXL3_F32, m);
}

void ex_run(struct ex_lm *lm)
{
	struct exl3_cqe cqe;
	int r = exl3_submit(lm->channel);

	if (r < 0)
		ex_die("%s", exl3_last_error());
	for (; lm->outstanding; lm->outstanding--) {
		r = exl3_wait(lm->channel, &cqe, REPLY_NS_MAX);
		if (r < 0)
			ex_die("%s", exl3_last_error());
		if (!r)
			ex_die("no answer within %llu s",
			       (unsigned long long)(REPLY_NS_MAX / 1000000000u));
		if (cqe.result == -ESTALE)
			ex_die("the daemon went away");
		if (cqe.result < 0)
			ex_die("a request failed: %s", exl3_result_text(&cqe));
	}
}
