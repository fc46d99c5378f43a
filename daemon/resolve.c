/* SPDX-License-Identifier: Apache-2.0 */
/* resolve.c - finds modules and tensors of a model by name, with name variants. */
#include "daemon/names.h"
#include "daemon/weights.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One question, and who listens to how it is answered. */
struct query {
	const struct exl3_model *model;
	enum exl3_module_kind kind; /* ANY: linear, MoE, MLP, in this order */
	void (*trace)(void *arg, const char *line);
	void *arg;
};

static const char *kind_name(enum exl3_module_kind kind)
{
	static const char *const names[] = {"module", "linear", "moe", "mlp"};

	return names[kind];
}

static void __attribute__((format(printf, 2, 3))) say(const struct query *q, const char *fmt, ...)
{
	char line[2 * EXL3_KEY_MAX];
	va_list ap;

	if (!q->trace)
		return;
	va_start(ap, fmt);
	vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	q->trace(q->arg, line);
}

/* First entry of a sorted table that is not below @name. */
static uint32_t lower_bound(const void *table, uint32_t nr, size_t size, const char *name)
{
	uint32_t lo = 0, hi = nr;

	/* Every table here starts its entries with a char pointer, the name. */
	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		const char *const *entry = (const void *)((const char *)table + (size_t)mid * size);

		if (strcmp(*entry, name) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}
_Static_assert(offsetof(struct exl3_module_desc, name) == 0, "lower_bound() reads it");
_Static_assert(offsetof(struct exl3_left_out, name) == 0, "lower_bound() reads it");
_Static_assert(offsetof(struct exl3_name_ref, key) == 0, "lower_bound() reads it");
_Static_assert(offsetof(struct exl3_tensor_desc, name) == 0, "lower_bound() reads it");

static bool wanted(const struct query *q, enum exl3_module_kind kind)
{
	return q->kind == EXL3_MOD_ANY || q->kind == kind;
}

/* What a name leads to: a module, or the entry of one that was left out, or nothing. */
struct hit {
	const struct exl3_module_desc *module;
	const struct exl3_left_out *left_out;
};

static bool hit_any(const struct hit *h)
{
	return h->module || h->left_out;
}

static struct hit find_exact(const struct query *q, const char *name)
{
	const struct exl3_model *m = q->model;
	struct hit h = {0};
	uint32_t i = lower_bound(m->modules, m->nr_modules, sizeof(*m->modules), name);

	/* Kinds of one name stand in the order of the enum, which is the order of preference. */
	for (; i < m->nr_modules && !strcmp(m->modules[i].name, name) && !h.module; i++)
		if (wanted(q, m->modules[i].kind))
			h.module = &m->modules[i];
	i = lower_bound(m->left_out, m->nr_left_out, sizeof(*m->left_out), name);
	for (; i < m->nr_left_out && !strcmp(m->left_out[i].name, name) && !hit_any(&h); i++)
		if (wanted(q, m->left_out[i].kind))
			h.left_out = &m->left_out[i];
	return h;
}

/* By key. More than one module of the same kind: @rival is another one's name. */
static struct hit find_key(const struct query *q, const char *key, const char **rival)
{
	const struct exl3_model *m = q->model;
	struct hit h = {0};
	uint32_t i = lower_bound(m->names, m->nr_names, sizeof(*m->names), key);

	for (; i < m->nr_names && !strcmp(m->names[i].key, key); i++) {
		const struct exl3_name_ref *r = &m->names[i];

		if (!wanted(q, r->kind))
			continue;
		if (!r->left_out && h.module && h.module->kind == r->kind)
			*rival = m->modules[r->index].name;
		else if (!r->left_out && !h.module)
			h.module = &m->modules[r->index];
		else if (r->left_out && !h.left_out)
			h.left_out = &m->left_out[r->index];
	}
	if (h.module)
		h.left_out = NULL;
	return h;
}

/* Slices of a rank-sliced pack are left out under the name of the whole. */
static struct hit find_rank(const struct query *q, const char *name)
{
	char whole[EXL3_NAME_MAX + 1];
	struct hit h = {0};
	size_t prefix;

	if (exl3_name_rank(name, &prefix)) {
		snprintf(whole, sizeof(whole), "%.*s", (int)prefix, name);
		h = find_exact(q, whole);
		h.module = NULL;
	}
	return h;
}

static struct hit search(const struct query *q, const char *name, const char **rival)
{
	char key[EXL3_KEY_MAX], block[EXL3_KEY_MAX + 16];
	struct hit h = find_exact(q, name);

	if (hit_any(&h)) {
		say(q, "exact name '%s'", name);
		return h;
	}
	say(q, "no %s is called exactly '%s'", kind_name(q->kind), name);
	h = find_rank(q, name);
	if (hit_any(&h)) {
		say(q, "a slice of '%s'", h.left_out->name);
		return h;
	}
	if (!exl3_name_key(name, key))
		return h;
	h = find_key(q, key, rival);
	if (hit_any(&h)) {
		say(q, "same key '%s'", key);
		return h;
	}
	say(q, "none has the key '%s'", key);
	if (!wanted(q, EXL3_MOD_MOE))
		return h;
	/* "...mlp" means the layer's routed experts, if it has any. */
	snprintf(block, sizeof(block), "%s.experts", key);
	h = find_key(&(struct query){q->model, EXL3_MOD_MOE, NULL, NULL}, block, rival);
	if (hit_any(&h))
		say(q, "its routed experts, key '%s'", block);
	else
		say(q, "no routed experts with the key '%s'", block);
	return h;
}

static void say_module(const struct query *q, const struct exl3_module_desc *d)
{
	static const char *const codebooks[] = {"3inst", "mcg", "mul1"};

	say(q, "found %s '%s': k %u (stored %u), n %u (stored %u)", kind_name(d->kind), d->name,
	    d->k_log, d->k, d->n_log, d->n);
	for (uint32_t i = 0; i < d->nr_shards; i++) {
		const struct exl3_matrix *m = d->shards[i];

		say(q, "  shard %u '%s': k %u (stored %u), n %u (stored %u), %g bits, %s%s", i,
		    d->shard_names[i], m->k_log, m->k, m->n_log, m->n, m->rate2 / 2.0,
		    codebooks[m->codebook], m->bias ? ", bias" : "");
	}
	if (d->nr_experts && d->rate2_min == d->rate2_max)
		say(q, "  %u experts, intermediate %u, %g bits%s", d->nr_experts, d->intermediate,
		    d->rate2_min / 2.0, d->experts[0].gate ? "" : ", no gate");
	else if (d->nr_experts)
		say(q, "  %u experts, intermediate %u, %g to %g bits%s", d->nr_experts,
		    d->intermediate, d->rate2_min / 2.0, d->rate2_max / 2.0,
		    d->experts[0].gate ? "" : ", no gate");
}

/*
 * Module whose name has @name in it, else most of its beginning and end in common with it; NULL: none is near.
 * Linear in both lengths: every client may ask.
 */
static const char *nearest(const struct query *q, const char *name)
{
	const struct exl3_model *m = q->model;
	size_t best = 2, len = strlen(name), least = 0;
	const char *ret = NULL;

	for (uint32_t i = 0; i < m->nr_modules; i++) {
		const char *other = m->modules[i].name;
		size_t n = strlen(other), head = 0, tail = 0, same;

		if (!wanted(q, m->modules[i].kind))
			continue;
		while (head < len && head < n && name[head] == other[head])
			head++;
		while (tail < len - head && tail < n - head &&
		       name[len - 1 - tail] == other[n - 1 - tail])
			tail++;
		same = strstr(other, name) ? len : head + tail;
		if (same > best || (same == best && n < least)) {
			best = same;
			least = n;
			ret = other;
		}
	}
	return ret;
}

static int not_found(const struct query *q, const char *name, struct exl3_error *err)
{
	const struct exl3_model *m = q->model;
	char weight[EXL3_NAME_MAX + 16], key[EXL3_KEY_MAX];
	const struct exl3_tensor_desc *t;
	const char *near;

	snprintf(weight, sizeof(weight), "%.*s.weight", (int)EXL3_NAME_MAX, name);
	t = exl3_model_find_tensor(m, weight);
	if (t) {
		say(q, "tensor '%s' exists: the layer is not quantized", t->name);
		return exl3_errf(
			err, -ENOENT,
			"'%.160s' is not quantized in model '%.60s': open its tensor '%.160s'",
			name, m->name, t->name);
	}
	if (m->tied && exl3_name_key(name, key) && !strcmp(key, "lm_head")) {
		say(q, "config.json ties lm_head to the embedding");
		return exl3_errf(
			err, -ENOENT,
			"model '%.60s' has no lm_head of its own: it is tied to the embedding,"
			" which is not quantized",
			m->name);
	}
	near = nearest(q, name);
	say(q, "nothing matches; nearest is '%s'", near ? near : "(none)");
	return exl3_errf(err, -ENOENT, "no %s '%.160s' in model '%.60s'%s%.160s%s",
			 kind_name(q->kind), name, m->name, near ? "; nearest is '" : "",
			 near ? near : "", near ? "'" : "");
}

int exl3_model_find(const struct exl3_model *model, const char *name, enum exl3_module_kind kind,
		    const struct exl3_module_desc **ret, void (*trace)(void *arg, const char *line),
		    void *arg, struct exl3_error *err)
{
	struct query q = {model, kind, trace, arg};
	const char *rival = NULL;
	struct hit h;

	if (kind > EXL3_MOD_MLP)
		return exl3_errf(err, -EINVAL, "%d is no kind of module", (int)kind);
	if (strlen(name) > EXL3_NAME_MAX)
		return exl3_errf(err, -ENOENT, "no module has a name of more than %u bytes",
				 EXL3_NAME_MAX);
	h = search(&q, name, &rival);
	if (rival) {
		say(&q, "'%s' and '%s' both match", h.module->name, rival);
		return exl3_errf(err, -ENOENT,
				 "'%.120s' may be '%.120s' or '%.120s': use the full name", name,
				 h.module->name, rival);
	}
	if (h.left_out) {
		say(&q, "%s '%s' was left out: %s", kind_name(h.left_out->kind), h.left_out->name,
		    h.left_out->reason);
		return exl3_errf(err, -EOPNOTSUPP, "'%.160s' is not supported: %.200s",
				 h.left_out->name, h.left_out->reason);
	}
	if (!h.module)
		return not_found(&q, name, err);
	say_module(&q, h.module);
	*ret = h.module;
	return 0;
}

const struct exl3_tensor_desc *exl3_model_find_tensor(const struct exl3_model *m, const char *name)
{
	uint32_t i = lower_bound(m->tensors, m->nr_tensors, sizeof(*m->tensors), name);
	char key[EXL3_KEY_MAX], other[EXL3_KEY_MAX];

	if (i < m->nr_tensors && !strcmp(m->tensors[i].name, name))
		return &m->tensors[i];
	if (!exl3_name_key(name, key))
		return NULL;
	/* Few enough to look at all of them, and only when a name is not exact. */
	for (i = 0; i < m->nr_tensors; i++)
		if (exl3_name_key(m->tensors[i].name, other) && !strcmp(other, key))
			return &m->tensors[i];
	return NULL;
}
