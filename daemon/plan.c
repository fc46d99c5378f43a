/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c - which tensors make which EXL3 matrix, what is left out and why, where all of it goes. */
#include "daemon/plan.h"

#include "daemon/loader.h"
#include "daemon/names.h"
#include "kernels/format.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The tensors of one matrix, as found by name; NULL: not there. */
struct parts {
	const struct exl3_ckpt_tensor *trellis, *suh, *svh, *su, *sv, *mcg, *mul1, *bias, *scale;
};

int exl3_matrix_leave_out(struct exl3_named_matrix *mat, struct exl3_error *err, const char *fmt,
			  ...)
{
	va_list ap;
	int n;

	if (mat->unsupported)
		return 0;
	va_start(ap, fmt);
	n = vasprintf(&mat->unsupported, fmt, ap);
	va_end(ap);
	if (n < 0) {
		mat->unsupported = NULL;
		return exl3_errf(err, -ENOMEM, "out of memory");
	}
	return 0;
}

static struct exl3_plan_item *item_of(const struct exl3_plan *p, const struct exl3_ckpt_tensor *t)
{
	return &p->items[t->file][t->t - p->ckpt->files[t->file].tensors];
}

static void use(struct exl3_plan *p, const struct exl3_ckpt_tensor *t, enum exl3_use what,
		uint32_t matrix, uint64_t offset, uint64_t piece)
{
	if (t)
		*item_of(p, t) = (struct exl3_plan_item){(uint8_t)what, matrix, offset, piece};
}

static const struct exl3_ckpt_tensor *part(const struct exl3_plan *p, const char *base,
					   const char *suffix)
{
	char name[EXL3_NAME_MAX + 16];

	snprintf(name, sizeof(name), "%s.%s", base, suffix);
	return exl3_ckpt_find(p->ckpt, name);
}

static bool dtype_is(const struct exl3_ckpt_tensor *t, const char *a, const char *b)
{
	return !strcmp(t->t->dtype->name, a) || !strcmp(t->t->dtype->name, b);
}

/* Why this trellis is none of ours, by its shape alone; NULL: it is. Sets sizes and bitrate. */
static const char *trellis_fault(const struct exl3_st_tensor *t, struct exl3_matrix *m)
{
	if (t->nr_dims == 2)
		return "a 2-D row table, which is another codec";
	if (t->nr_dims != 3)
		return "its trellis does not have 3 dimensions";
	if (!t->count)
		return "its trellis is empty";
	/* Scales are handled in one piece, which bounds k and n. */
	if (t->shape[0] > EXL3_WHOLE_MAX / 64 || t->shape[1] > EXL3_WHOLE_MAX / 64)
		return "larger than any size that is supported";
	m->k = (uint32_t)t->shape[0] * EXL3_TILE;
	m->n = (uint32_t)t->shape[1] * EXL3_TILE;
	if (m->k % EXL3_HAD || m->n % EXL3_HAD)
		return "its sizes are not multiples of 128";
	if (t->shape[2] % 8 || t->shape[2] / 8 > EXL3_RATE2_MAX ||
	    !exl3_rate_valid((int)t->shape[2] / 8, EXL3_CB_MUL1))
		return "its bitrate is none of 1..8, 1.5, 2.5, 3.5";
	m->rate2 = (uint8_t)(t->shape[2] / 8);
	return NULL;
}

/* The same for the rest, once the trellis is fine. */
static const char *parts_fault(const struct parts *p, const struct exl3_matrix *m)
{
	const struct exl3_ckpt_tensor *marker = p->mcg ? p->mcg : p->mul1;

	if (!dtype_is(p->trellis, "I16", "U16"))
		return "its trellis is not of 16-bit integers";
	if (!p->suh && !p->su)
		return "its input scales (suh or su) are missing";
	if (!p->svh && !p->sv)
		return "its output scales (svh or sv) are missing";
	if ((p->suh && !dtype_is(p->suh, "F16", "F16")) ||
	    (p->svh && !dtype_is(p->svh, "F16", "F16")))
		return "its scales are not F16";
	if ((!p->suh && !dtype_is(p->su, "I16", "U16")) ||
	    (!p->svh && !dtype_is(p->sv, "I16", "U16")))
		return "its signs are not of 16-bit integers";
	if (p->mcg && p->mul1)
		return "it has both markers, mcg and mul1";
	if (marker && (!dtype_is(marker, "I32", "U32") || marker->t->count != 1))
		return "its codebook marker is not one 32-bit integer";
	if (!exl3_rate_valid(m->rate2, m->codebook))
		return "half bitrates exist with codebook mul1 only";
	if (p->bias && !dtype_is(p->bias, "F16", "BF16") && !dtype_is(p->bias, "F32", "F32"))
		return "its bias is not F16, BF16 or F32";
	return NULL;
}

static int check_count(const struct exl3_plan *p, const struct exl3_ckpt_tensor *t, uint64_t want,
		       struct exl3_error *err)
{
	if (!t || t->t->count == want)
		return 0;
	return exl3_errf(err, -EINVAL,
			 "%s: tensor '%.160s': %" PRIu64
			 " elements where its trellis needs %" PRIu64,
			 p->ckpt->files[t->file].name, t->t->name, t->t->count, want);
}

static int check_counts(const struct exl3_plan *p, const struct parts *s,
			const struct exl3_matrix *m, struct exl3_error *err)
{
	int rc = check_count(p, s->suh, m->k, err);

	if (rc == 0)
		rc = check_count(p, s->svh, m->n, err);
	if (rc == 0 && !s->suh)
		rc = check_count(p, s->su, m->k / 16, err);
	if (rc == 0 && !s->svh)
		rc = check_count(p, s->sv, m->n / 16, err);
	/* A bias may be as long as what is stored or as what is true. */
	if (rc == 0 && s->bias && s->bias->t->count != m->n_log)
		rc = check_count(p, s->bias, m->n, err);
	return rc;
}

uint64_t exl3_pieces_of(uint64_t bytes)
{
	return (bytes + EXL3_PIECE - 1) / EXL3_PIECE;
}

uint64_t exl3_part_bytes(const struct exl3_named_matrix *mat, enum exl3_part part, uint64_t *offset)
{
	switch (part) {
	case EXL3_PART_TRELLIS:
		*offset = mat->trellis_off;
		return exl3_trellis_bytes(mat->m.k, mat->m.n, mat->m.rate2);
	case EXL3_PART_SUH:
		*offset = mat->suh_off;
		return 2ull * mat->m.k;
	case EXL3_PART_SVH:
		*offset = mat->svh_off;
		return 2ull * mat->m.n;
	default:
		*offset = mat->bias_off;
		return mat->has_bias ? 4ull * mat->m.n : 0;
	}
}

void exl3_layout_matrix(struct exl3_layout *layout, struct exl3_named_matrix *mat,
			uint64_t piece[EXL3_PARTS])
{
	uint64_t *const offsets[EXL3_PARTS] = {&mat->trellis_off, &mat->suh_off, &mat->svh_off,
					       &mat->bias_off};
	uint64_t at = layout->slab_bytes, was;

	mat->placed = true;
	/* Sizes are multiples of 128 elements, so every part ends on a boundary by itself. */
	for (int i = 0; i < EXL3_PARTS; i++) {
		uint64_t bytes = exl3_part_bytes(mat, (enum exl3_part)i, &was);

		*offsets[i] = at;
		at += bytes;
		if (piece)
			piece[i] = layout->nr_pieces;
		layout->nr_pieces += exl3_pieces_of(bytes);
	}
	layout->weight_bytes += at - layout->slab_bytes;
	layout->slab_bytes = (at + EXL3_SLAB_ALIGN - 1) / EXL3_SLAB_ALIGN * EXL3_SLAB_ALIGN;
}

uint64_t exl3_layout_tensor(struct exl3_layout *layout, uint64_t bytes, uint64_t *piece)
{
	uint64_t offset = layout->tensor_bytes;

	layout->tensor_bytes += (bytes + EXL3_TENSOR_ALIGN - 1) / EXL3_TENSOR_ALIGN * EXL3_TENSOR_ALIGN;
	*piece = layout->nr_pieces;
	layout->nr_pieces += exl3_pieces_of(bytes);
	return offset;
}

/* Finds a place for a matrix, and says so in the items of its parts. */
static void place(struct exl3_plan *p, const struct parts *s, uint32_t index)
{
	struct exl3_named_matrix *mat = &p->matrices[index];
	uint64_t piece[EXL3_PARTS];

	mat->has_bias = s->bias != NULL;
	exl3_layout_matrix(&p->layout, mat, piece);
	use(p, s->trellis, EXL3_USE_TRELLIS, index, mat->trellis_off, piece[EXL3_PART_TRELLIS]);
	if (s->suh)
		use(p, s->suh, EXL3_USE_SCALE, index, mat->suh_off, piece[EXL3_PART_SUH]);
	else
		use(p, s->su, EXL3_USE_SIGNS, index, mat->suh_off, piece[EXL3_PART_SUH]);
	if (s->svh)
		use(p, s->svh, EXL3_USE_SCALE, index, mat->svh_off, piece[EXL3_PART_SVH]);
	else
		use(p, s->sv, EXL3_USE_SIGNS, index, mat->svh_off, piece[EXL3_PART_SVH]);
	use(p, s->mcg, EXL3_USE_MARKER, index, 0, 0);
	use(p, s->mul1, EXL3_USE_MARKER, index, 0, 0);
	use(p, s->bias, EXL3_USE_BIAS, index, mat->bias_off, piece[EXL3_PART_BIAS]);
}

/* @base: the module's name; taken. All that belongs to it is left out unless it is fine. */
static int add_matrix(struct exl3_plan *p, const struct exl3_modelconf *conf, char *base,
		      struct exl3_error *err)
{
	struct parts s = {
		.trellis = part(p, base, "trellis"),
		.suh = part(p, base, "suh"),
		.svh = part(p, base, "svh"),
		.su = part(p, base, "su"),
		.sv = part(p, base, "sv"),
		.mcg = part(p, base, "mcg"),
		.mul1 = part(p, base, "mul1"),
		.bias = part(p, base, "bias"),
		.scale = part(p, base, "scale"),
	};
	const struct exl3_ckpt_tensor *all[] = {s.trellis, s.suh,  s.svh,  s.su,   s.sv,
						s.mcg,     s.mul1, s.bias, s.scale};
	uint32_t index = p->nr_matrices++;
	struct exl3_named_matrix *mat = &p->matrices[index];
	const char *fault;
	int rc;

	mat->name = base;
	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		use(p, all[i], EXL3_USE_LEFT_OUT, index, 0, 0);
	mat->m.codebook = s.mcg ? EXL3_CB_MCG : s.mul1 ? EXL3_CB_MUL1 : EXL3_CB_3INST;
	/* No trellis of its own: list_bases() found those of its slices. */
	fault = s.trellis ? trellis_fault(s.trellis->t, &mat->m)
			  : "stored as a rank-sliced pack, one slice per GPU";
	if (!fault)
		fault = parts_fault(&s, &mat->m);
	if (fault)
		return exl3_matrix_leave_out(mat, err, "%s", fault);
	exl3_modelconf_logical(conf, base, mat->m.k, mat->m.n, &mat->m.k_log, &mat->m.n_log);
	rc = check_counts(p, &s, &mat->m, err);
	if (rc < 0)
		return rc;
	place(p, &s, index);
	return 0;
}

/* Length of @name without ".@suffix", 0 if it does not end so. */
static size_t without(const char *name, const char *suffix)
{
	size_t n = strlen(name), s = strlen(suffix);

	if (n < s + 2 || strcmp(name + n - s, suffix) || name[n - s - 1] != '.')
		return 0;
	return n - s - 1;
}

/* Part of a rank-sliced pack: "<m>.rank<r>.suh" and so on. */
static bool rank_part(const char *name)
{
	char module[EXL3_NAME_MAX + 1];
	const char *leaf = exl3_name_leaf(name);
	size_t prefix;

	if (leaf == name)
		return false;
	snprintf(module, sizeof(module), "%.*s", (int)(leaf - name) - 1, name);
	return exl3_name_rank(module, &prefix);
}

/* Scales that have no trellis beside them. */
static bool stray(const char *name)
{
	return without(name, "suh") || without(name, "svh") || without(name, "su") ||
	       without(name, "sv");
}

static int add_tensor(struct exl3_plan *p, const struct exl3_ckpt_tensor *ct,
		      struct exl3_error *err)
{
	const struct exl3_st_tensor *t = ct->t;
	uint64_t offset, piece;
	char *name;

	if (rank_part(t->name)) {
		use(p, ct, EXL3_USE_LEFT_OUT, 0, 0, 0);
		return 0;
	}
	name = strdup(t->name);
	if (!name)
		return exl3_errf(err, -ENOMEM, "out of memory");
	if (stray(name)) {
		use(p, ct, EXL3_USE_LEFT_OUT, 0, 0, 0);
		p->strays[p->nr_strays++] = name;
		return 0;
	}
	offset = exl3_layout_tensor(&p->layout, t->bytes, &piece);
	use(p, ct, EXL3_USE_PLAIN, 0, offset, piece);
	p->tensors[p->nr_tensors] = (struct exl3_tensor_desc){
		.name = name,
		.nr_dims = t->nr_dims,
		.bytes = t->bytes,
		.offset = offset,
	};
	memcpy(p->tensors[p->nr_tensors].dtype, t->dtype->name, sizeof(t->dtype->name));
	memcpy(p->tensors[p->nr_tensors].shape, t->shape, sizeof(t->shape));
	p->nr_tensors++;
	return 0;
}

static int cmp_str(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Names of all modules with a trellis, sorted as they will stand in the table. */
static int list_bases(const struct exl3_ckpt *ckpt, char **bases, uint32_t *nr,
		      struct exl3_error *err)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < ckpt->nr_tensors; i++) {
		size_t len = without(ckpt->tensors[i].t->name, "trellis"), whole;

		if (!len)
			continue;
		bases[*nr] = strndup(ckpt->tensors[i].t->name, len);
		if (!bases[*nr])
			return exl3_errf(err, -ENOMEM, "out of memory");
		if (exl3_name_rank(bases[*nr], &whole))
			bases[*nr][whole] = 0;
		++*nr;
	}
	/* Not the order of the tensors: "a.b" stands before "a.b-c", "a.b.trellis" behind it. */
	if (*nr)
		qsort(bases, *nr, sizeof(*bases), cmp_str);
	for (uint32_t i = 0; i < *nr; i++) {
		if (kept && !strcmp(bases[kept - 1], bases[i]))
			free(bases[i]); /* another slice of the same one */
		else
			bases[kept++] = bases[i];
	}
	*nr = kept;
	return 0;
}

static int alloc_tables(struct exl3_plan *p, uint32_t nr_matrices, struct exl3_error *err)
{
	const struct exl3_ckpt *ckpt = p->ckpt;
	bool ok;

	p->items = calloc(ckpt->nr_files + 1, sizeof(*p->items));
	p->matrices = calloc(nr_matrices + 1, sizeof(*p->matrices));
	p->tensors = calloc(ckpt->nr_tensors + 1, sizeof(*p->tensors));
	p->strays = calloc(ckpt->nr_tensors + 1, sizeof(*p->strays));
	ok = p->items && p->matrices && p->tensors && p->strays;
	for (uint32_t f = 0; ok && f < ckpt->nr_files; f++) {
		p->items[f] = calloc(ckpt->files[f].nr_tensors + 1, sizeof(**p->items));
		ok = p->items[f] != NULL;
		for (uint32_t i = 0; ok && i < ckpt->files[f].nr_tensors; i++)
			p->items[f][i].use = EXL3_USE_PLAIN;
	}
	return ok ? 0 : exl3_errf(err, -ENOMEM, "out of memory");
}

static int fill(struct exl3_plan *p, const struct exl3_modelconf *conf, char **bases, uint32_t *nr,
		struct exl3_error *err)
{
	int rc = list_bases(p->ckpt, bases, nr, err);

	if (rc == 0 && !*nr)
		rc = exl3_errf(err, -EOPNOTSUPP,
			       "nothing in it is EXL3: none of its %u tensors is a trellis",
			       p->ckpt->nr_tensors);
	if (rc == 0)
		rc = alloc_tables(p, *nr, err);
	for (uint32_t i = 0; rc == 0 && i < *nr; i++) {
		char *base = bases[i];

		bases[i] = NULL;
		rc = add_matrix(p, conf, base, err);
	}
	for (uint32_t i = 0; rc == 0 && i < p->ckpt->nr_tensors; i++)
		if (item_of(p, &p->ckpt->tensors[i])->use == EXL3_USE_PLAIN)
			rc = add_tensor(p, &p->ckpt->tensors[i], err);
	if (rc == 0) {
		p->pieces = calloc(p->layout.nr_pieces + 1, sizeof(*p->pieces));
		if (!p->pieces)
			rc = exl3_errf(err, -ENOMEM, "out of memory");
	}
	return rc;
}

int exl3_plan_make(const struct exl3_ckpt *ckpt, const struct exl3_modelconf *conf,
		   struct exl3_plan *ret, struct exl3_error *err)
{
	exl3_auto(exl3_freep) char **bases = calloc(ckpt->nr_tensors + 1, sizeof(*bases));
	struct exl3_plan p = {.ckpt = ckpt};
	uint32_t nr = 0;
	int rc;

	if (!bases)
		return exl3_errf(err, -ENOMEM, "out of memory");
	rc = fill(&p, conf, bases, &nr, err);
	for (uint32_t i = 0; i < nr; i++)
		free(bases[i]);
	if (rc < 0) {
		exl3_plan_fini(&p);
		return rc;
	}
	*ret = p;
	return 0;
}

void exl3_matrices_fini(struct exl3_named_matrix *matrices, uint32_t nr)
{
	for (uint32_t i = 0; i < nr; i++) {
		free(matrices[i].name);
		free(matrices[i].unsupported);
	}
}

void exl3_tensors_fini(struct exl3_tensor_desc *tensors, uint32_t nr)
{
	for (uint32_t i = 0; i < nr; i++)
		free(tensors[i].name);
}

void exl3_plan_fini(struct exl3_plan *p)
{
	exl3_matrices_fini(p->matrices, p->nr_matrices);
	exl3_tensors_fini(p->tensors, p->nr_tensors);
	for (uint32_t i = 0; i < p->nr_strays; i++)
		free(p->strays[i]);
	for (uint32_t f = 0; p->items && f < p->ckpt->nr_files; f++)
		free(p->items[f]);
	free(p->strays);
	free(p->items);
	free(p->pieces);
	free(p->matrices);
	free(p->tensors);
	*p = (struct exl3_plan){0};
}
