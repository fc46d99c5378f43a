/* SPDX-License-Identifier: Apache-2.0 */
/* tuned.c - tables of measured choices: read line by line, sorted once, looked up by shape and rows. */
#include "kernels/tuned.h"

#include "kernels/format.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const codebooks[EXL3_CB_NR] = {"3inst", "mcg", "mul1"};

struct exl3_tuned *exl3_tuned_new(const char *source)
{
	struct exl3_tuned *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->refs = 1;
	snprintf(c->source, sizeof(c->source), "%s", source);
	return c;
}

struct exl3_tuned *exl3_tuned_get(struct exl3_tuned *c)
{
	if (c)
		c->refs++;
	return c;
}

struct exl3_tuned *exl3_tuned_put(struct exl3_tuned *c)
{
	if (c && --c->refs == 0) {
		free(c->list);
		free(c);
	}
	return NULL;
}

/* ---- shapes ---- */

bool exl3_tuned_shape(struct exl3_tuned_shape *ret, const struct exl3_linear_args *linear)
{
	memset(ret, 0, sizeof(*ret));
	if (!linear->nr_shards || linear->nr_shards > EXL3_TUNED_SHARDS_MAX)
		return false;
	ret->k = linear->shards[0]->k;
	ret->nr_shards = linear->nr_shards;
	for (uint32_t i = 0; i < linear->nr_shards; i++) {
		const struct exl3_matrix *w = linear->shards[i];

		ret->shard[i].n = w->n;
		ret->shard[i].rate2 = w->rate2;
		ret->shard[i].codebook = w->codebook;
	}
	return true;
}

void exl3_tuned_shape_text(const struct exl3_tuned_shape *s, char *text, size_t size)
{
	size_t len = (size_t)snprintf(text, size, "%u ", s->k);

	for (uint32_t i = 0; i < s->nr_shards && len < size; i++) {
		const struct exl3_tuned_shard *h = &s->shard[i];

		len += (size_t)snprintf(text + len, size - len, "%s%u:%u%s:%s", i ? "," : "", h->n, h->rate2 / 2u,
					h->rate2 % 2 ? ".5" : "",
					h->codebook < EXL3_CB_NR ? codebooks[h->codebook] : "?");
	}
}

/* ---- lines ---- */

/* A whole number in @min..@max, without sign; @at moves behind it. */
static bool take_number(const char **at, uint32_t min, uint32_t max, uint32_t *ret)
{
	uint64_t v = 0;
	const char *p = *at;

	if (!isdigit((unsigned char)*p))
		return false;
	for (; isdigit((unsigned char)*p); p++) {
		v = v * 10 + (uint64_t)(*p - '0');
		if (v > max)
			return false;
	}
	if (v < min)
		return false;
	*ret = (uint32_t)v;
	*at = p;
	return true;
}

static bool take_char(const char **at, char c)
{
	if (**at != c)
		return false;
	(*at)++;
	return true;
}

/* At least one blank. */
static bool take_blanks(const char **at)
{
	size_t n = strspn(*at, " \t");

	*at += n;
	return n > 0;
}

static bool take_shard(const char **at, struct exl3_tuned_shard *ret)
{
	uint32_t n, bits;
	size_t len;

	if (!take_number(at, 128, EXL3_TUNED_DIM_MAX, &n) || n % 128 || !take_char(at, ':') ||
	    !take_number(at, 1, 8, &bits))
		return false;
	bits *= 2;
	if (**at == '.') {
		if ((*at)[1] != '5')
			return false;
		*at += 2;
		bits++;
	}
	if (!take_char(at, ':'))
		return false;
	for (uint16_t i = 0; i < EXL3_CB_NR; i++) {
		len = strlen(codebooks[i]);
		if (strncmp(*at, codebooks[i], len) == 0 && strspn(*at + len, ", \t") &&
		    exl3_rate_valid((int)bits, i)) {
			*ret = (struct exl3_tuned_shard){n, (uint16_t)bits, i};
			*at += len;
			return true;
		}
	}
	return false;
}

static bool take_shape(const char **at, struct exl3_tuned_shape *ret)
{
	memset(ret, 0, sizeof(*ret));
	if (!take_number(at, 128, EXL3_TUNED_DIM_MAX, &ret->k) || ret->k % 128 || !take_blanks(at))
		return false;
	do {
		if (ret->nr_shards == EXL3_TUNED_SHARDS_MAX || !take_shard(at, &ret->shard[ret->nr_shards]))
			return false;
		ret->nr_shards++;
	} while (take_char(at, ','));
	return true;
}

static const struct exl3_kernel *find_kernel(const struct exl3_kernel *kernels, const char *name, size_t len)
{
	for (; kernels->name; kernels++) {
		if (strlen(kernels->name) == len && memcmp(kernels->name, name, len) == 0)
			return kernels;
	}
	return NULL;
}

int exl3_tuned_add(struct exl3_tuned *c, const struct exl3_tuned_shape *shape, uint32_t m_first, uint32_t m_last,
		     const struct exl3_kernel *kernel, struct exl3_error *err)
{
	if (c->nr == EXL3_TUNED_MAX)
		return exl3_errf(err, -E2BIG, "more than %u lines", EXL3_TUNED_MAX);
	if (c->nr == c->room) {
		uint32_t room = c->room ? 2 * c->room : 64;
		struct exl3_tuned_line *list = realloc(c->list, room * sizeof(*list));

		if (!list)
			return exl3_errf(err, -ENOMEM, "out of memory");
		c->list = list;
		c->room = room;
	}
	c->list[c->nr++] = (struct exl3_tuned_line){*shape, m_first, m_last, kernel};
	return 0;
}

int exl3_tuned_add_line(struct exl3_tuned *c, const char *line, const struct exl3_kernel *kernels,
			  struct exl3_error *err)
{
	const struct exl3_kernel *kernel;
	struct exl3_tuned_shape shape;
	uint32_t first, last;
	const char *at = line, *name;
	size_t len;

	if (strcspn(line, "#\n") > EXL3_TUNED_LINE_MAX)
		return exl3_errf(err, -EINVAL, "longer than %u bytes", EXL3_TUNED_LINE_MAX);
	if (strncmp(at, "linear", 6) != 0 || (at += 6, !take_blanks(&at)))
		return exl3_errf(err, -EINVAL, "it does not begin with an operation that tables know (linear)");
	if (!take_shape(&at, &shape) || !take_blanks(&at))
		return exl3_errf(err, -EINVAL,
				 "not a shape: K N:BITS:CODEBOOK[,N:BITS:CODEBOOK...], multiples of 128, codebooks "
				 "3inst, mcg, mul1");
	if (!take_number(&at, 1, EXL3_M_MAX, &first) || !take_blanks(&at) ||
	    !take_number(&at, 1, EXL3_M_MAX, &last) || !take_blanks(&at) || first > last)
		return exl3_errf(err, -EINVAL, "rows are FIRST LAST, in 1..%u, the smaller one first", EXL3_M_MAX);
	len = strspn(at, "abcdefghijklmnopqrstuvwxyz0123456789_");
	name = at;
	at += len;
	at += strspn(at, " \t\r");
	if (!len || (*at && *at != '\n' && *at != '#'))
		return exl3_errf(err, -EINVAL, "after the rows there must be one name of a variant, and no more");
	kernel = find_kernel(kernels, name, len);
	if (!kernel || kernel->op != EXL3_OP_LINEAR || kernel->candidate)
		return exl3_errf(err, -ENOENT, "this backend has no variant '%.*s' for linear",
				 len > 40 ? 40 : (int)len, name);
	return exl3_tuned_add(c, &shape, first, last, kernel, err);
}

static int compare(const void *a, const void *b)
{
	const struct exl3_tuned_line *x = a, *y = b;
	int c = memcmp(&x->shape, &y->shape, sizeof(x->shape));

	return c ? c : (x->m_first > y->m_first) - (x->m_first < y->m_first);
}

int exl3_tuned_done(struct exl3_tuned *c, struct exl3_error *err)
{
	char text[EXL3_TUNED_LINE_MAX];

	if (c->nr)
		qsort(c->list, c->nr, sizeof(c->list[0]), compare);
	for (uint32_t i = 1; i < c->nr; i++) {
		const struct exl3_tuned_line *a = &c->list[i - 1], *b = &c->list[i];

		if (memcmp(&a->shape, &b->shape, sizeof(a->shape)) != 0 || a->m_last < b->m_first)
			continue;
		exl3_tuned_shape_text(&b->shape, text, sizeof(text));
		return exl3_errf(err, -EINVAL, "two lines are for %u rows of linear %.100s", b->m_first, text);
	}
	return 0;
}

/* ---- looking up ---- */

const struct exl3_tuned_line *exl3_tuned_find(const struct exl3_tuned *c, const struct exl3_tuned_shape *shape,
					    uint32_t m)
{
	uint32_t low = 0, high = c ? c->nr : 0;

	/* The last line that is not behind (shape, m). */
	while (low < high) {
		uint32_t mid = low + (high - low) / 2;
		const struct exl3_tuned_line *l = &c->list[mid];
		int order = memcmp(&l->shape, shape, sizeof(*shape));

		if (order < 0 || (order == 0 && l->m_first <= m))
			low = mid + 1;
		else
			high = mid;
	}
	if (!low)
		return NULL;
	const struct exl3_tuned_line *l = &c->list[low - 1];

	return memcmp(&l->shape, shape, sizeof(*shape)) == 0 && m <= l->m_last ? l : NULL;
}

const struct exl3_tuned_line *exl3_tuned_for_work(const struct exl3_tuned *c, const struct exl3_work *work)
{
	struct exl3_tuned_shape shape;
	uint64_t m = 0;

	if (!c || !c->nr || work->op != EXL3_OP_LINEAR || !exl3_tuned_shape(&shape, &work->u.linear))
		return NULL;
	for (uint32_t i = 0; i < work->nr_rows; i++)
		m += work->rows[i].m;
	return m <= EXL3_M_MAX ? exl3_tuned_find(c, &shape, (uint32_t)m) : NULL;
}

const struct exl3_tuned_line *exl3_tuned_pick(const struct exl3_tuned *first, const struct exl3_tuned *second,
					      const struct exl3_tuned_shape *shape, uint32_t m,
					      bool (*can)(const void *arg, const struct exl3_kernel *kernel),
					      const void *arg)
{
	const struct exl3_tuned *tables[] = {first, second};

	for (size_t i = 0; i < 2; i++) {
		const struct exl3_tuned_line *line = exl3_tuned_find(tables[i], shape, m);

		if (line && can(arg, line->kernel))
			return line;
	}
	return NULL;
}

void exl3_tuned_probe(struct exl3_tuned_probe *ret, const struct exl3_tuned_shape *shape, uint32_t m)
{
	const void *nowhere = (const void *)(uintptr_t)4096;
	uint32_t n = 0;

	memset(ret, 0, sizeof(*ret));
	for (uint32_t i = 0; i < shape->nr_shards; i++) {
		const struct exl3_tuned_shard *s = &shape->shard[i];
		struct exl3_matrix *w = &ret->matrix[i];

		w->k = w->k_log = shape->k;
		w->n = w->n_log = s->n;
		w->rate2 = (uint8_t)s->rate2;
		w->codebook = (uint8_t)s->codebook;
		w->trellis = w->suh = w->svh = nowhere;
		ret->shards[i] = w;
		n += s->n;
	}
	ret->rows = (struct exl3_rows){.x = nowhere,
				       .y = (void *)(uintptr_t)nowhere,
				       .x_stride = 2 * shape->k,
				       .y_stride = 2 * n,
				       .m = m,
				       .x_dtype = EXL3_F16,
				       .y_dtype = EXL3_F16,
				       .x_device = true};
	ret->work.op = EXL3_OP_LINEAR;
	ret->work.rows = &ret->rows;
	ret->work.nr_rows = 1;
	ret->work.u.linear.shards = ret->shards;
	ret->work.u.linear.nr_shards = shape->nr_shards;
}

bool exl3_kernel_is_reference(const struct exl3_kernel *k)
{
	size_t len = strlen(k->name);

	return len >= 4 && strcmp(k->name + len - 4, "_ref") == 0;
}
