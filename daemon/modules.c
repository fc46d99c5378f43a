/* SPDX-License-Identifier: Apache-2.0 */
/* modules.c - what can be asked for by name: matrices, fused groups, MLPs, routed experts. */
#include "daemon/modules.h"

#include "daemon/names.h"
#include "kernels/format.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHARDS_MAX 64u /* of one group: three matrices of up to 21 slices */
#define GROUP_MAX  3

static const struct {
	const char *name;
	const char *members[GROUP_MAX + 1];
} groups[] = {
	{"qkv_proj", {"q_proj", "k_proj", "v_proj"}},
	{"gate_up_proj", {"gate_proj", "up_proj"}},
	{"gate_up_proj", {"w1", "w3"}},
	{"fused_qkv_a_proj_with_mqa", {"q_a_proj", "kv_a_proj_with_mqa"}},
	{"in_proj_qkvz", {"in_proj_qkv", "in_proj_z"}},
	/* A matrix that was cut along its columns. */
	{"gate_proj", {"gate_proj"}},
	{"up_proj", {"up_proj"}},
	{"w1", {"w1"}},
	{"w3", {"w3"}},
};

static const struct {
	const char *gate, *up, *down;
} spellings[] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};

struct build {
	struct exl3_model *model;
	const struct exl3_modelconf *conf;
	size_t modules_room, left_out_room;
};

/* Matrices found for a group or an MLP, in order; or the reason why they cannot be used. */
struct found {
	const struct exl3_named_matrix *v[SHARDS_MAX];
	uint32_t nr;
	const struct exl3_named_matrix *bad; /* left out itself */
	bool full;                           /* there are more */
};

static int no_memory(struct exl3_error *err)
{
	return exl3_errf(err, -ENOMEM, "out of memory");
}

static void *grow(void *v, uint32_t nr, size_t *room, size_t size)
{
	size_t more = *room ? 2 * *room : 64;
	void *p;

	if (nr < *room)
		return v;
	p = realloc(v, more * size);
	if (p)
		*room = more;
	return p;
}

/* A new, empty module at the end of the table; @name is copied. */
static int module_new(struct build *b, const char *name, enum exl3_module_kind kind,
		      struct exl3_module_desc **ret, struct exl3_error *err)
{
	struct exl3_model *m = b->model;
	struct exl3_module_desc *v = grow(m->modules, m->nr_modules, &b->modules_room, sizeof(*v));

	if (!v)
		return no_memory(err);
	m->modules = v;
	v += m->nr_modules;
	*v = (struct exl3_module_desc){.name = strdup(name), .kind = kind, .routed_scale = 1};
	if (!v->name)
		return no_memory(err);
	m->nr_modules++;
	*ret = v;
	return 0;
}

static int __attribute__((format(printf, 6, 7)))
leave_out(struct build *b, const char *name, enum exl3_module_kind kind, bool follows,
	  struct exl3_error *err, const char *fmt, ...)
{
	struct exl3_model *m = b->model;
	struct exl3_left_out *v = grow(m->left_out, m->nr_left_out, &b->left_out_room, sizeof(*v));
	va_list ap;
	int n;

	if (!v)
		return no_memory(err);
	m->left_out = v;
	v += m->nr_left_out;
	*v = (struct exl3_left_out){.name = strdup(name), .kind = kind, .follows = follows};
	va_start(ap, fmt);
	n = v->name ? vasprintf(&v->reason, fmt, ap) : -1;
	va_end(ap);
	if (n < 0) {
		free(v->name);
		return no_memory(err);
	}
	m->nr_left_out++;
	return 0;
}

static int cmp_matrix(const void *key, const void *elem)
{
	return strcmp(key, ((const struct exl3_named_matrix *)elem)->name);
}

static const struct exl3_named_matrix *find_matrix(const struct exl3_model *m, const char *name)
{
	return bsearch(name, m->matrices, m->nr_matrices, sizeof(*m->matrices), cmp_matrix);
}

/* "@prefix.@leaf", or @leaf alone. False: too long to exist. */
static bool join(char *out, size_t size, const char *prefix, const char *leaf)
{
	int n = snprintf(out, size, "%s%s%s", prefix, *prefix ? "." : "", leaf);

	return n >= 0 && (size_t)n < size;
}

static bool has_tensor(const struct exl3_model *m, const char *prefix, const char *leaf)
{
	char name[EXL3_NAME_MAX + 32];

	return join(name, sizeof(name) - 8, prefix, leaf) && strcat(name, ".weight") &&
	       exl3_model_find_tensor(m, name);
}

static void push(struct found *f, const struct exl3_named_matrix *mat)
{
	if (mat->unsupported && !f->bad)
		f->bad = mat;
	if (f->nr == SHARDS_MAX)
		f->full = true;
	else
		f->v[f->nr++] = mat;
}

/* Adds "@prefix.@leaf", or all of its slices; counts them. */
static uint32_t collect(const struct exl3_model *m, const char *prefix, const char *leaf,
			struct found *f)
{
	char name[EXL3_NAME_MAX + 32], slice[EXL3_NAME_MAX + 64];
	const struct exl3_named_matrix *mat;
	uint32_t nr = 0;

	if (!join(name, sizeof(name), prefix, leaf))
		return 0;
	mat = find_matrix(m, name);
	if (mat) {
		push(f, mat);
		return 1;
	}
	for (;; nr++) {
		snprintf(slice, sizeof(slice), "%s.slice.%u", name, nr);
		mat = find_matrix(m, slice);
		if (!mat)
			return nr;
		push(f, mat);
	}
}

static void count_matrix(struct exl3_module_desc *d, const struct exl3_matrix *m)
{
	d->bytes += exl3_trellis_bytes(m->k, m->n, m->rate2) + 2ull * (m->k + m->n) +
		    (m->bias ? 4ull * m->n : 0);
	if (!d->rate2_min || m->rate2 < d->rate2_min)
		d->rate2_min = m->rate2;
	if (m->rate2 > d->rate2_max)
		d->rate2_max = m->rate2;
}

/* ---- linear modules ---- */

static int add_linear(struct build *b, const char *name, const struct found *f,
		      struct exl3_error *err)
{
	struct exl3_module_desc *d;
	int rc = module_new(b, name, EXL3_MOD_LINEAR, &d, err);

	if (rc < 0)
		return rc;
	d->shards = malloc(f->nr * sizeof(*d->shards));
	d->shard_names = malloc(f->nr * sizeof(*d->shard_names));
	if (!d->shards || !d->shard_names)
		return no_memory(err);
	d->nr_shards = f->nr;
	d->k = f->v[0]->m.k;
	d->k_log = f->v[0]->m.k_log;
	for (uint32_t i = 0; i < f->nr; i++) {
		d->shards[i] = &f->v[i]->m;
		d->shard_names[i] = f->v[i]->name;
		d->n += f->v[i]->m.n;
		d->n_log += f->v[i]->m.n_log;
		count_matrix(d, &f->v[i]->m);
	}
	return 0;
}

/* Name of the whole that @mat is, or is the first slice of: prefix and leaf. False: a later slice. */
static bool split(const struct exl3_named_matrix *mat, char *prefix, char *leaf)
{
	char whole[EXL3_NAME_MAX + 1];
	size_t len = strlen(mat->name), before;
	uint32_t number;
	const char *l;

	if (exl3_name_numbered(mat->name, "slice", &before, &number)) {
		if (number)
			return false;
		len = before;
	}
	if (len > EXL3_NAME_MAX)
		return false;
	memcpy(whole, mat->name, len);
	whole[len] = 0;
	l = exl3_name_leaf(whole);
	strcpy(leaf, l);
	len = l == whole ? 0 : (size_t)(l - whole) - 1;
	memcpy(prefix, whole, len);
	prefix[len] = 0;
	return true;
}

/* All members of group @g, in order. False: one does not exist. */
static bool collect_group(const struct exl3_model *m, size_t g, const char *prefix, struct found *f)
{
	*f = (struct found){0};
	for (int i = 0; groups[g].members[i]; i++)
		if (!collect(m, prefix, groups[g].members[i], f))
			return false;
	return true;
}

static int add_group(struct build *b, size_t g, const char *prefix, struct exl3_error *err)
{
	char name[EXL3_NAME_MAX + 32];
	struct found f;

	if (!join(name, sizeof(name), prefix, groups[g].name) || find_matrix(b->model, name))
		return 0;
	/* Two spellings side by side: the first one has the name. */
	for (size_t i = 0; i < g; i++)
		if (!strcmp(groups[i].name, groups[g].name) &&
		    collect_group(b->model, i, prefix, &f))
			return 0;
	if (!collect_group(b->model, g, prefix, &f))
		return 0;
	if (f.bad)
		return leave_out(b, name, EXL3_MOD_LINEAR, true, err, "its part %s: %s",
				 exl3_name_leaf(f.bad->name), f.bad->unsupported);
	if (f.full)
		return leave_out(b, name, EXL3_MOD_LINEAR, false, err, "more than %u parts",
				 SHARDS_MAX);
	for (uint32_t i = 1; i < f.nr; i++)
		if (f.v[i]->m.k != f.v[0]->m.k || f.v[i]->m.k_log != f.v[0]->m.k_log)
			return leave_out(b, name, EXL3_MOD_LINEAR, false, err,
					 "its parts have different input sizes");
	return add_linear(b, name, &f, err);
}

static int add_groups(struct build *b, const struct exl3_named_matrix *mat, struct exl3_error *err)
{
	char prefix[EXL3_NAME_MAX + 1], leaf[EXL3_NAME_MAX + 1], name[EXL3_NAME_MAX + 32];
	int rc = 0;

	if (!split(mat, prefix, leaf))
		return 0;
	for (size_t g = 0; rc == 0 && g < sizeof(groups) / sizeof(groups[0]); g++)
		if (!strcmp(groups[g].members[0], leaf))
			rc = add_group(b, g, prefix, err);
	/* A down projection is cut along its rows, so that the slices' outputs add up. */
	if (rc == 0 && exl3_name_role(leaf) == EXL3_ROLE_DOWN &&
	    strcmp(mat->name + strlen(mat->name) - strlen(leaf), leaf) &&
	    join(name, sizeof(name), prefix, leaf))
		rc = leave_out(b, name, EXL3_MOD_LINEAR, true, err,
			       "stored in slices of its rows: ask for the MLP '%s'", prefix);
	return rc;
}

/* ---- MLPs and experts ---- */

/* Do these make one expert? Sizes on both sides of the activation have to meet. */
static const char *expert_fault(const struct exl3_expert *e)
{
	if (e->gate && (e->gate->k != e->up->k || e->gate->n != e->up->n ||
			e->gate->k_log != e->up->k_log || e->gate->n_log != e->up->n_log))
		return "gate and up have different sizes";
	if (e->down->k != e->up->n || e->down->k_log != e->up->n_log)
		return "up's outputs are not down's inputs";
	return NULL;
}

/* Experts of a block are of one size; slices of an MLP may each have their own width. */
static bool same_sizes(const struct exl3_expert *a, const struct exl3_expert *b, bool width)
{
	return !a->gate == !b->gate && a->up->k == b->up->k && a->up->k_log == b->up->k_log &&
	       a->down->n == b->down->n && a->down->n_log == b->down->n_log &&
	       (!width || (a->up->n == b->up->n && a->up->n_log == b->up->n_log));
}

static const char *experts_fault(const struct exl3_expert *e, uint32_t nr, bool width)
{
	const char *fault = NULL;

	for (uint32_t i = 0; i < nr && !fault; i++) {
		fault = expert_fault(&e[i]);
		if (!fault && !same_sizes(&e[0], &e[i], width))
			fault = "its parts have different sizes";
	}
	return fault;
}

/* A MoE or MLP module from @experts (taken, also on failure). */
static int add_experts(struct build *b, const char *name, enum exl3_module_kind kind,
		       struct exl3_expert *taken, uint32_t nr, struct exl3_error *err)
{
	exl3_auto(exl3_freep) struct exl3_expert *e = taken;
	enum exl3_act act = exl3_modelconf_act(b->conf, e[0].gate != NULL);
	const char *fault = experts_fault(e, nr, kind == EXL3_MOD_MOE);
	const struct exl3_backend_ops *ops = b->model->ops;
	struct exl3_module_desc *d;
	struct exl3_error why = {0};
	void *plan = NULL;
	int rc;

	if (fault)
		return leave_out(b, name, kind, false, err, "%s", fault);
	if (act == EXL3_ACT_DEFAULT)
		return leave_out(b, name, kind, false, err, "no activation '%s'%s",
				 b->conf->act_name, e[0].gate ? "" : " without a gate");
	rc = ops->moe_plan ? ops->moe_plan(b->model->dev, e, nr, &plan, &why) : 0;
	if (rc == -EOPNOTSUPP) /* this device cannot; another one might */
		return leave_out(b, name, kind, false, err, "%s", why.text);
	if (rc < 0)
		return exl3_errf(err, rc, "%.160s: %.300s", name, why.text);
	rc = module_new(b, name, kind, &d, err);
	if (rc < 0) {
		if (plan)
			ops->moe_plan_free(b->model->dev, plan);
		return rc;
	}
	d->plan = plan;
	d->experts = exl3_take_ptr(&e);
	d->nr_experts = nr;
	d->k = d->experts[0].up->k;
	d->k_log = d->experts[0].up->k_log;
	d->n = d->experts[0].down->n;
	d->n_log = d->experts[0].down->n_log;
	d->act = (uint8_t)act;
	d->limit = exl3_modelconf_limit(b->conf, name);
	d->routed_scale = kind == EXL3_MOD_MOE ? b->conf->routed_scale : 1;
	for (uint32_t i = 0; i < nr; i++) {
		if (kind == EXL3_MOD_MLP || i == 0)
			d->intermediate += d->experts[i].up->n_log;
		if (d->experts[i].gate)
			count_matrix(d, d->experts[i].gate);
		count_matrix(d, d->experts[i].up);
		count_matrix(d, d->experts[i].down);
	}
	return 0;
}

/* The MLP around up projection "@prefix.<up>", spelled as in row @s. */
static int add_mlp(struct build *b, size_t s, const char *prefix, struct exl3_error *err)
{
	struct found gate = {0}, up = {0}, down = {0};
	uint32_t nr = collect(b->model, prefix, spellings[s].up, &up);
	bool gated = collect(b->model, prefix, spellings[s].gate, &gate) != 0;
	const struct exl3_named_matrix *bad;
	struct exl3_expert *e;

	collect(b->model, prefix, spellings[s].down, &down);
	if (!*prefix || !down.nr)
		return 0;
	bad = up.bad ? up.bad : gate.bad ? gate.bad : down.bad;
	if (bad)
		return leave_out(b, prefix, EXL3_MOD_MLP, true, err, "its part %s: %s",
				 bad->name + strlen(prefix) + 1, bad->unsupported);
	if (!gated && has_tensor(b->model, prefix, spellings[s].gate))
		return leave_out(b, prefix, EXL3_MOD_MLP, false, err, "its %s is not quantized",
				 spellings[s].gate);
	if (up.full || down.nr != nr || (gated && gate.nr != nr))
		return leave_out(b, prefix, EXL3_MOD_MLP, false, err,
				 "its projections have different numbers of slices, or too many");
	e = calloc(nr, sizeof(*e));
	if (!e)
		return no_memory(err);
	for (uint32_t i = 0; i < nr; i++)
		e[i] = (struct exl3_expert){gated ? &gate.v[i]->m : NULL, &up.v[i]->m,
					    &down.v[i]->m};
	return add_experts(b, prefix, EXL3_MOD_MLP, e, nr, err);
}

static int add_mlps(struct build *b, const struct exl3_named_matrix *mat, struct exl3_error *err)
{
	char prefix[EXL3_NAME_MAX + 1], leaf[EXL3_NAME_MAX + 1];
	const char *rest;
	uint32_t expert;
	size_t len;
	int rc = 0;

	if (exl3_name_expert(mat->name, &len, &expert, &rest) || !split(mat, prefix, leaf))
		return 0;
	for (size_t s = 0; rc == 0 && s < sizeof(spellings) / sizeof(spellings[0]); s++) {
		struct found other = {0};

		/* As for groups: one MLP has the name. */
		if (!strcmp(spellings[s].up, leaf) &&
		    (!s || !collect(b->model, prefix, spellings[0].up, &other)))
			rc = add_mlp(b, s, prefix, err);
	}
	return rc;
}

/* Puts one matrix of a routed block where it belongs. NULL, or why the block cannot be used. */
static const char *place_expert(struct exl3_expert *e, enum exl3_role role,
				const struct exl3_matrix *m)
{
	const struct exl3_matrix **slot = role == EXL3_ROLE_GATE ? &e->gate
					  : role == EXL3_ROLE_UP ? &e->up
								 : &e->down;

	if (*slot)
		return "has a projection in two spellings";
	*slot = m;
	return NULL;
}

/* Why the experts [0, nr) are not complete, as a sentence with one number; NULL: they are. */
static const char *experts_gap(const struct exl3_expert *e, uint32_t nr, uint32_t *which)
{
	for (uint32_t i = 0; i < nr; i++) {
		*which = i;
		if (!e[i].up && !e[i].down && !e[i].gate)
			return "is missing";
		if (!e[i].up || !e[i].down)
			return "has no quantized up or down projection";
		if (!e[i].gate != !e[0].gate)
			return "differs from expert 0 in having a gate";
	}
	return NULL;
}

/* Matrices [from, to) of the model are the experts of one block, "P.experts". */
static int add_moe(struct build *b, const char *name, uint32_t from, uint32_t to,
		   struct exl3_error *err)
{
	uint32_t nr = 0, expert = 0, which = 0, want = exl3_modelconf_experts(b->conf, name);
	exl3_auto(exl3_freep) struct exl3_expert *e = NULL;
	const char *leaf, *fault = NULL;
	size_t len;

	for (uint32_t i = from; i < to; i++)
		if (exl3_name_expert(b->model->matrices[i].name, &len, &expert, &leaf) &&
		    expert >= nr)
			nr = expert + 1;
	/* Every expert has two matrices at least; a number beyond that has holes before it. */
	if (nr > to - from || nr < want)
		return leave_out(b, name, EXL3_MOD_MOE, false, err,
				 "%u matrices do not make %u experts", to - from,
				 nr < want ? want : nr);
	e = calloc(nr, sizeof(*e));
	if (!e)
		return no_memory(err);
	for (uint32_t i = from; i < to && !fault; i++) {
		const struct exl3_named_matrix *mat = &b->model->matrices[i];
		enum exl3_role role;

		if (!exl3_name_expert(mat->name, &len, &expert, &leaf))
			continue;
		role = exl3_name_role(leaf);
		which = expert;
		if (role == EXL3_ROLE_NONE)
			continue;
		if (mat->unsupported)
			return leave_out(b, name, EXL3_MOD_MOE, true, err, "its expert %u, %s: %s",
					 expert, leaf, mat->unsupported);
		fault = place_expert(&e[expert], role, &mat->m);
	}
	if (!fault)
		fault = experts_gap(e, nr, &which);
	if (fault)
		return leave_out(b, name, EXL3_MOD_MOE, false, err, "its expert %u %s", which,
				 fault);
	/* Without this a gate that stayed unquantized would look like a block without gates. */
	if (!e[0].gate &&
	    (has_tensor(b->model, name, "0.gate_proj") || has_tensor(b->model, name, "0.w1")))
		return leave_out(b, name, EXL3_MOD_MOE, false, err, "its gates are not quantized");
	return add_experts(b, name, EXL3_MOD_MOE, exl3_take_ptr(&e), nr, err);
}

static int add_moes(struct build *b, struct exl3_error *err)
{
	const struct exl3_model *m = b->model;
	char name[EXL3_NAME_MAX + 1];
	int rc = 0;

	for (uint32_t i = 0, to; rc == 0 && i < m->nr_matrices; i = to) {
		const char *leaf;
		uint32_t expert;
		size_t len;

		to = i + 1;
		if (!exl3_name_expert(m->matrices[i].name, &len, &expert, &leaf))
			continue;
		/* Sorted by name: the experts of one block stand together. */
		while (to < m->nr_matrices &&
		       !strncmp(m->matrices[to].name, m->matrices[i].name, len + 1))
			to++;
		snprintf(name, sizeof(name), "%.*s", (int)len, m->matrices[i].name);
		rc = add_moe(b, name, i, to, err);
	}
	return rc;
}

/* ---- tables ---- */

/* Entries for matrices that are left out, and for stray scales. */
static int add_left_out(struct build *b, char *const *strays, uint32_t nr_strays,
			struct exl3_error *err)
{
	const struct exl3_model *m = b->model;
	int rc = 0;

	for (uint32_t i = 0; rc == 0 && i < m->nr_matrices; i++)
		if (m->matrices[i].unsupported)
			rc = leave_out(b, m->matrices[i].name, EXL3_MOD_LINEAR, false, err, "%s",
				       m->matrices[i].unsupported);
	for (uint32_t i = 0; rc == 0 && i < nr_strays; i++)
		rc = leave_out(b, strays[i], EXL3_MOD_LINEAR, false, err,
			       "scales without a trellis beside them");
	return rc;
}

static int cmp_module(const void *a, const void *b)
{
	const struct exl3_module_desc *x = a, *y = b;
	int c = strcmp(x->name, y->name);

	return c ? c : (int)x->kind - (int)y->kind;
}

static int cmp_left_out(const void *a, const void *b)
{
	const struct exl3_left_out *x = a, *y = b;
	int c = strcmp(x->name, y->name);

	return c ? c : (int)x->kind - (int)y->kind;
}

static int cmp_name(const void *a, const void *b)
{
	const struct exl3_name_ref *x = a, *y = b;
	int c = strcmp(x->key, y->key);

	if (!c)
		c = (int)x->kind - (int)y->kind;
	return c ? c : (int)x->left_out - (int)y->left_out;
}

static int add_name(struct exl3_model *m, const char *name, enum exl3_module_kind kind,
		    bool left_out, uint32_t index, struct exl3_error *err)
{
	char key[EXL3_KEY_MAX];

	if (!exl3_name_key(name, key))
		return 0;
	m->names[m->nr_names] = (struct exl3_name_ref){strdup(key), kind, left_out, index};
	if (!m->names[m->nr_names].key)
		return no_memory(err);
	m->nr_names++;
	return 0;
}

static int make_tables(struct exl3_model *m, struct exl3_error *err)
{
	int rc = 0;

	if (m->nr_modules)
		qsort(m->modules, m->nr_modules, sizeof(*m->modules), cmp_module);
	if (m->nr_left_out)
		qsort(m->left_out, m->nr_left_out, sizeof(*m->left_out), cmp_left_out);
	m->names = calloc((size_t)m->nr_modules + m->nr_left_out + 1, sizeof(*m->names));
	m->skipped = calloc((size_t)m->nr_left_out + 1, sizeof(*m->skipped));
	if (!m->names || !m->skipped)
		return no_memory(err);
	for (uint32_t i = 0; rc == 0 && i < m->nr_modules; i++)
		rc = add_name(m, m->modules[i].name, m->modules[i].kind, false, i, err);
	for (uint32_t i = 0; rc == 0 && i < m->nr_left_out; i++) {
		const struct exl3_left_out *v = &m->left_out[i];

		rc = add_name(m, v->name, v->kind, true, i, err);
		if (rc < 0 || v->follows)
			continue;
		if (asprintf(&m->skipped[m->nr_skipped], "%s: %s", v->name, v->reason) < 0)
			return no_memory(err);
		m->nr_skipped++;
	}
	qsort(m->names, m->nr_names, sizeof(*m->names), cmp_name);
	return rc;
}

int exl3_modules_make(struct exl3_model *model, const struct exl3_modelconf *conf,
		      char *const *strays, uint32_t nr_strays, struct exl3_error *err)
{
	struct build b = {.model = model, .conf = conf};
	int rc = add_left_out(&b, strays, nr_strays, err);

	for (uint32_t i = 0; rc == 0 && i < model->nr_matrices; i++) {
		const struct exl3_named_matrix *mat = &model->matrices[i];
		struct found f = {.v = {mat}, .nr = 1};

		if (!mat->unsupported)
			rc = add_linear(&b, mat->name, &f, err);
		if (rc == 0)
			rc = add_groups(&b, mat, err);
		if (rc == 0)
			rc = add_mlps(&b, mat, err);
	}
	if (rc == 0)
		rc = add_moes(&b, err);
	if (rc == 0)
		rc = make_tables(model, err);
	return rc;
}

void exl3_modules_fini(struct exl3_model *m)
{
	for (uint32_t i = 0; i < m->nr_modules; i++) {
		struct exl3_module_desc *d = &m->modules[i];

		if (d->plan && m->ops->moe_plan_free)
			m->ops->moe_plan_free(m->dev, d->plan);
		free(d->name);
		free(d->shards);
		free(d->shard_names);
		free(d->experts);
	}
	for (uint32_t i = 0; i < m->nr_left_out; i++) {
		free(m->left_out[i].name);
		free(m->left_out[i].reason);
	}
	for (uint32_t i = 0; i < m->nr_names; i++)
		free(m->names[i].key);
	for (uint32_t i = 0; i < m->nr_skipped; i++)
		free(m->skipped[i]);
	free(m->modules);
	free(m->left_out);
	free(m->names);
	free(m->skipped);
	/* A load that has failed lets go of them, and once more when the model itself goes. */
	m->modules = NULL;
	m->left_out = NULL;
	m->names = NULL;
	m->skipped = NULL;
	m->nr_modules = m->nr_left_out = m->nr_names = m->nr_skipped = 0;
}
