/* SPDX-License-Identifier: Apache-2.0 */
/* calibrate.c - measures which variant of a linear's kernel is the fastest, by shape and rows, beside the clients. */
#include "daemon/calibrate.h"

#include "daemon/kernel_table.h"
#include "daemon/log.h"
#include "daemon/worker.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHAPES_MAX    512u
#define MODULES_MAX   256u /* of a shape: more are not needed to keep out of a cache */
#define VARIANTS_MAX  128u
#define REPEATS       5u
#define REPEATS_LONG  3u
#define LONG_NS       2000000u
#define BATCH_NS      200000u /* launches that are too short for a clock are timed together up to this */
#define MARGIN        0.97    /* of the time of what runs without a table: less is no reason for another one */
#define LOOK_NS       50000000u
#define BLOCK_BYTES   (1u << 20)
#define OPERANDS_CPU  (64ull << 20) /* bytes of x and y at most */
#define OPERANDS_GPU  (1ull << 30)

struct module {
	const struct exl3_module_desc *desc; /* of a pinned model */
	uint64_t read_at; /* what was read in all when it was launched last; 0: never */
};

struct shape {
	struct exl3_tuned_shape is;
	uint32_t kind, device; /* the first device that is the same as the one that it is measured on; this one */
	uint64_t macs, bytes;  /* of one module */
	struct module *modules; /* owned */
	uint32_t nr, next;
};

struct variant {
	const struct exl3_kernel *kernel;
	bool on;          /* measured at these rows */
	bool out;         /* not with as many rows of this shape or more: too slow, or it failed */
	uint64_t best_ns; /* 0: not yet */
	uint64_t before_ns, before2_ns; /* at half and a quarter of the rows */
	double ns_per_mac; /* of one row, of the last shape; 0: unknown */
};

struct exl3_calibration {
	struct exl3_worker *w;
	struct exl3_peer *owner; /* borrowed; NULL: it has left, or all is over */
	enum exl3_calibrate_state state;
	bool apply, cancelled;
	struct exl3_error error;
	char why[128]; /* it was cancelled */
	struct exl3_registered **pinned; /* owned */
	uint32_t nr_pinned;
	struct shape *shapes; /* owned; by kind, device, size */
	uint32_t nr_shapes, at;
	struct exl3_timer timer;

	/* Of the device at hand. */
	struct exl3_job job;
	struct exl3_slab *slab; /* owned; x, then y */
	uint64_t slab_bytes;
	uint64_t cache_bytes, read_bytes; /* by all launches */
	struct variant variants[VARIANTS_MAX];
	uint32_t nr_variants;

	/* Of these rows. */
	uint32_t m, variant, repeat;
	uint32_t evict_left, evict_shape; /* modules to be launched yet before the next timed one, from there on */
	bool timed; /* what runs is */
	uint32_t together; /* launches of it */
	uint64_t launches;
	struct exl3_guest guest;
	struct exl3_rows rows[EXL3_GUEST_WORKS];
	uint64_t skipped[EXL3_GUEST_WORKS];

	char *text; /* owned; the file so far */
	size_t text_len, text_room;
	int headed; /* the kind whose section it is; -1: none yet */
};

static const struct exl3_device *device_of(const struct exl3_calibration *c)
{
	return &c->w->devices.list[c->shapes[c->at].device];
}

/* ---- the file ---- */

static void __attribute__((format(printf, 2, 3))) print(struct exl3_calibration *c, const char *fmt, ...)
{
	va_list args;
	char line[2048];
	size_t len;
	int n;

	va_start(args, fmt);
	n = vsnprintf(line, sizeof(line), fmt, args);
	va_end(args);
	len = n < (int)sizeof(line) ? (size_t)n : sizeof(line) - 1;
	if (c->text_len + len + 1 > c->text_room) {
		size_t room = 2 * c->text_room + len + 4096;
		char *text = room <= EXL3_KERNEL_TABLE_MAX ? realloc(c->text, room) : NULL;

		if (!text) {
			c->cancelled = true;
			exl3_errf(&c->error, -ENOMEM, "the table has grown too large");
			return;
		}
		c->text = text;
		c->text_room = room;
	}
	memcpy(c->text + c->text_len, line, len + 1);
	c->text_len += len;
}

static void print_head(struct exl3_calibration *c)
{
	const struct shape *s = &c->shapes[c->at];
	struct exl3_table_device_info who;
	char text[1024];

	if (c->headed == (int)s->kind)
		return;
	exl3_table_device(device_of(c), &who);
	exl3_kernel_table_head(&who.is, c->headed < 0, text, sizeof(text));
	print(c, "%s%s", c->headed < 0 ? "" : "\n", text);
	c->headed = (int)s->kind;
}

/* ---- what there is to measure ---- */

static struct shape *shape_for(struct exl3_calibration *c, const struct exl3_tuned_shape *is, uint32_t kind)
{
	for (uint32_t i = 0; i < c->nr_shapes; i++) {
		if (c->shapes[i].kind == kind && !memcmp(&c->shapes[i].is, is, sizeof(*is)))
			return &c->shapes[i];
	}
	return NULL;
}

static int add_module(struct exl3_calibration *c, const struct exl3_registered *reg, uint32_t kind,
		      const struct exl3_module_desc *desc)
{
	const struct exl3_linear_args linear = {desc->shards, desc->nr_shards};
	struct exl3_tuned_shape is;
	struct shape *s;

	if (desc->kind != EXL3_MOD_LINEAR || !exl3_tuned_shape(&is, &linear))
		return 0;
	s = shape_for(c, &is, kind);
	if (!s) {
		if (c->nr_shapes == SHAPES_MAX)
			return 0;
		s = &c->shapes[c->nr_shapes];
		s->modules = calloc(MODULES_MAX, sizeof(*s->modules));
		if (!s->modules)
			return -ENOMEM;
		c->nr_shapes++;
		s->is = is;
		s->kind = kind;
		s->device = reg->device->index;
		for (uint32_t i = 0; i < is.nr_shards; i++) {
			uint64_t macs = (uint64_t)is.k * is.shard[i].n;

			s->macs += macs;
			s->bytes += macs * is.shard[i].rate2 / 16;
		}
	}
	if (s->device == reg->device->index && s->nr < MODULES_MAX)
		s->modules[s->nr++].desc = desc;
	return 0;
}

static int by_device_and_size(const void *a, const void *b)
{
	const struct shape *x = a, *y = b;

	if (x->kind != y->kind)
		return x->kind < y->kind ? -1 : 1;
	if (x->device != y->device)
		return x->device < y->device ? -1 : 1;
	return (x->macs > y->macs) - (x->macs < y->macs);
}

static bool wanted(const struct exl3_registered *reg, char *const *models, size_t nr)
{
	for (size_t i = 0; i < nr; i++) {
		if (strcmp(models[i], reg->name) == 0)
			return true;
	}
	return !nr && reg->state == EXL3_MODEL_READY;
}

static int collect(struct exl3_calibration *c, char *const *models, size_t nr_models, struct exl3_error *err)
{
	struct exl3_worker *w = c->w;
	int rc = 0;

	for (size_t i = 0; i < nr_models; i++) {
		const struct exl3_registered *reg = exl3_models_find(&w->models, models[i]);

		if (!reg)
			return exl3_errf(err, -ENOENT, "there is no model '%.100s': see 'exl3ctl models'", models[i]);
		rc = exl3_models_usable(reg, err);
		if (rc < 0)
			return rc;
	}
	c->shapes = calloc(SHAPES_MAX, sizeof(*c->shapes));
	c->pinned = calloc(w->models.nr + 1, sizeof(c->pinned[0]));
	if (!c->shapes || !c->pinned)
		return exl3_errf(err, -ENOMEM, "calibrate: out of memory");
	for (struct exl3_registered *reg = w->models.list; reg; reg = reg->next) {
		uint32_t kind;

		if (!wanted(reg, models, nr_models) || reg->state != EXL3_MODEL_READY)
			continue;
		kind = exl3_table_kind(&w->devices, reg->device->index);
		for (uint32_t i = 0; i < reg->model->nr_modules && rc == 0; i++)
			rc = add_module(c, reg, kind, &reg->model->modules[i]);
		if (rc < 0)
			return exl3_errf(err, rc, "calibrate: out of memory");
		exl3_registered_pin(reg);
		c->pinned[c->nr_pinned++] = reg;
	}
	if (!c->nr_shapes)
		return exl3_errf(err, -EOPNOTSUPP, "calibrate: no model with linear layers is loaded");
	qsort(c->shapes, c->nr_shapes, sizeof(c->shapes[0]), by_device_and_size);
	return 0;
}

static void unpin(struct exl3_calibration *c)
{
	while (c->nr_pinned)
		exl3_registered_unpin(c->pinned[--c->nr_pinned]);
	for (uint32_t i = 0; i < c->nr_shapes; i++)
		memset(c->shapes[i].modules, 0, MODULES_MAX * sizeof(struct module));
}

/* ---- works ---- */

static uint64_t operand_bytes(const struct shape *s, uint32_t m)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < s->is.nr_shards; i++)
		n += s->is.shard[i].n;
	return (uint64_t)m * (s->is.k + n) * 2; /* 128 numbers are a multiple of 256 bytes */
}

/* Adds a launch of @s's next module to what is about to be started. */
static void add_work(struct exl3_calibration *c, struct shape *s, uint32_t m, const struct exl3_kernel *kernel)
{
	struct module *module = &s->modules[s->next++ % s->nr];
	uint32_t i = c->guest.nr++, n = 0;
	struct exl3_rows *rows = &c->rows[i];

	for (uint32_t k = 0; k < s->is.nr_shards; k++)
		n += s->is.shard[k].n;
	*rows = (struct exl3_rows){.x = c->slab->ptr,
				   .y = (char *)c->slab->ptr + (size_t)m * s->is.k * 2,
				   .x_stride = s->is.k * 2,
				   .y_stride = n * 2,
				   .m = m,
				   .x_dtype = EXL3_F16,
				   .y_dtype = EXL3_F16,
				   .stored = true,
				   .x_device = true};
	c->guest.works[i] = (struct exl3_work){.op = EXL3_OP_LINEAR,
					       .kernel = kernel,
					       .rows = rows,
					       .nr_rows = 1,
					       .u.linear = {module->desc->shards, module->desc->nr_shards},
					       .skipped = &c->skipped[i]};
	c->read_bytes += s->bytes;
	module->read_at = c->read_bytes;
}

/* Is the next module of the shape in the cache still, as far as can be told? */
static bool warm(const struct exl3_calibration *c, const struct shape *s)
{
	const struct module *next = &s->modules[s->next % s->nr];

	return next->read_at && c->read_bytes - next->read_at < c->cache_bytes;
}

/* How long one row of it is expected to take. */
static uint64_t row_ns(const struct exl3_calibration *c, const struct shape *s)
{
	double best = 0;

	for (uint32_t i = 0; i < c->nr_variants; i++) {
		double v = c->variants[i].ns_per_mac;

		if (v > 0 && (best == 0 || v < best))
			best = v;
	}
	return (uint64_t)(best * (double)s->macs);
}

/* Launches of other shapes of this device, at most once around; false: there are none, or it has been done. */
static bool evict(struct exl3_calibration *c)
{
	const struct shape *own = &c->shapes[c->at];
	uint64_t ns = 0;

	while (c->evict_left && c->guest.nr < EXL3_GUEST_WORKS && warm(c, own)) {
		struct shape *s = &c->shapes[c->evict_shape];

		if (s == own || s->device != own->device || !s->nr) {
			c->evict_shape = (c->evict_shape + 1) % c->nr_shapes;
			c->evict_left--;
			continue;
		}
		ns += row_ns(c, s);
		if (c->guest.nr && ns > EXL3_CALIBRATE_NS)
			break;
		add_work(c, s, 1, NULL);
		/* All its modules, then the next shape. */
		if (s->next % s->nr == 0) {
			c->evict_shape = (c->evict_shape + 1) % c->nr_shapes;
			c->evict_left--;
		}
	}
	return c->guest.nr > 0;
}

static void measure(struct exl3_calibration *c)
{
	const struct exl3_device *d = device_of(c);
	struct shape *s = &c->shapes[c->at];
	struct variant *v = &c->variants[c->variant];
	uint32_t nr = 1;

	c->guest.nr = 0;
	c->timed = !evict(c);
	c->launches += c->guest.nr;
	if (!c->timed)
		return;
	/* The cpu's clock is its own; elsewhere the host's is too coarse for one launch. */
	if (strcmp(d->ops->name, "cpu") != 0 && v->best_ns)
		nr = (uint32_t)(BATCH_NS / (v->best_ns + 1));
	nr = nr < 1 ? 1 : nr > EXL3_GUEST_WORKS ? EXL3_GUEST_WORKS : nr > s->nr ? s->nr : nr;
	for (uint32_t i = 0; i < nr; i++)
		add_work(c, s, c->m, v->kernel);
	c->together = nr;
	c->launches += nr;
	c->evict_left = c->nr_shapes;
}

/* ---- rows ---- */

static uint64_t expected_ns(const struct exl3_calibration *c, const struct variant *v)
{
	double growth = 2;

	if (c->m == 1)
		return (uint64_t)(v->ns_per_mac * (double)c->shapes[c->at].macs);
	if (v->before2_ns && v->before_ns < 2 * v->before2_ns)
		growth = v->before_ns > v->before2_ns ? (double)v->before_ns / (double)v->before2_ns : 1;
	return (uint64_t)(growth * (double)v->before_ns);
}

static bool runs(const struct exl3_calibration *c, const struct variant *v)
{
	const struct exl3_device *d = device_of(c);
	struct exl3_tuned_probe probe;

	exl3_tuned_probe(&probe, &c->shapes[c->at].is, c->m);
	probe.work.kernel = v->kernel;
	return v->kernel->supports(d->dev, &probe.work);
}

/* Chooses who takes part with c->m rows; false: nobody. */
static bool begin_rows(struct exl3_calibration *c)
{
	uint64_t least = UINT64_MAX;
	bool any = false;

	if (operand_bytes(&c->shapes[c->at], c->m) > c->slab_bytes)
		return false;
	for (uint32_t i = 0; i < c->nr_variants; i++) {
		struct variant *v = &c->variants[i];

		v->on = !v->out && runs(c, v);
		v->best_ns = 0;
		if (v->on && expected_ns(c, v) < least)
			least = expected_ns(c, v);
	}
	/* One row is what the smallest request takes too, so the fastest may take as long as it likes. */
	for (uint32_t i = 0; i < c->nr_variants; i++) {
		struct variant *v = &c->variants[i];
		uint64_t ns = expected_ns(c, v);

		v->out |= v->on && ns > EXL3_CALIBRATE_NS && (c->m > 1 || ns > least);
		v->on &= !v->out;
		any |= v->on;
	}
	c->variant = c->repeat = 0;
	c->evict_left = c->nr_shapes;
	return any;
}

static void end_rows(struct exl3_calibration *c)
{
	const struct exl3_device *d = device_of(c);
	const struct shape *s = &c->shapes[c->at];
	const struct variant *best = NULL, *usual = NULL;
	const struct exl3_kernel *kernel;
	struct exl3_tuned_probe probe;
	char shape[EXL3_TUNED_LINE_MAX], times[1400];
	size_t n = 0;

	exl3_tuned_probe(&probe, &s->is, c->m);
	kernel = d->ops->select(d->dev, &probe.work);
	*times = 0;
	for (uint32_t i = 0; i < c->nr_variants; i++) {
		struct variant *v = &c->variants[i];

		if (v->best_ns && (!best || v->best_ns < best->best_ns))
			best = v;
		if (v->best_ns && v->kernel == kernel)
			usual = v;
		if (v->best_ns && n < sizeof(times))
			n += (size_t)snprintf(times + n, sizeof(times) - n, "%s%s %.2f", n ? ", " : "",
					      v->kernel->name, (double)v->best_ns / 1e3);
		if (c->m == 1 && v->best_ns)
			v->ns_per_mac = (double)v->best_ns / (double)s->macs;
		v->before2_ns = v->before_ns;
		v->before_ns = v->best_ns;
	}
	if (!best)
		return;
	if (usual && (double)best->best_ns >= MARGIN * (double)usual->best_ns)
		best = usual;
	print_head(c);
	exl3_tuned_shape_text(&s->is, shape, sizeof(shape));
	print(c, "linear %s %u %u %s # us with %u: %s\n", shape, c->m / 2 + 1, c->m, best->kernel->name, c->m, times);
}

static void begin_shape(struct exl3_calibration *c)
{
	c->m = 1;
	for (uint32_t i = 0; i < c->nr_variants; i++) {
		struct variant *v = &c->variants[i];

		v->best_ns = v->before_ns = v->before2_ns = 0;
		v->out = false;
	}
}

/* ---- one after the other ---- */

static void finish(struct exl3_calibration *c);

static uint32_t repeats(const struct variant *v)
{
	return v->best_ns > EXL3_CALIBRATE_NS ? 1 : v->best_ns > LONG_NS ? REPEATS_LONG : REPEATS;
}

/* The next (variant, repeat) of these rows; false: all have been measured. */
static bool next_variant(struct exl3_calibration *c)
{
	for (; c->repeat < REPEATS; c->repeat++, c->variant = 0) {
		for (; c->variant < c->nr_variants; c->variant++) {
			const struct variant *v = &c->variants[c->variant];

			if (v->on && c->repeat < repeats(v))
				return true;
		}
	}
	return false;
}

/* Sets up what is to be started next, as long as there is anything on this device. */
static void go_on(struct exl3_calibration *c)
{
	uint32_t device = c->shapes[c->at].device;

	for (;;) {
		if (c->cancelled) {
			finish(c);
			return;
		}
		if (next_variant(c)) {
			measure(c);
			return;
		}
		end_rows(c);
		c->m *= 2;
		if (c->m <= EXL3_M_MAX && begin_rows(c))
			continue;
		do {
			c->at++;
			if (c->at == c->nr_shapes || c->shapes[c->at].device != device) {
				finish(c);
				return;
			}
			begin_shape(c);
		} while (!begin_rows(c));
	}
}

static void on_launched(void *arg, int result, uint64_t exec_ns)
{
	struct exl3_calibration *c = arg;
	struct variant *v = &c->variants[c->variant];

	if (c->timed && result == 0) {
		uint64_t ns = exec_ns / c->together;

		ns += ns == 0; /* 0: not measured */
		if (!v->best_ns || ns < v->best_ns)
			v->best_ns = ns;
	}
	if (result == -EIO) {
		c->cancelled = true;
		exl3_errf(&c->error, -EIO, "%s failed while it was measured", v->kernel->name);
	}
	if (c->timed && result != -EBUSY) {
		v->out |= result < 0;
		v->on &= !v->out;
		c->variant++;
	}
	go_on(c);
}

/* Models that go, and the end of the daemon, do not wait for us. */
static void on_look(void *arg)
{
	struct exl3_calibration *c = arg;

	for (uint32_t i = 0; i < c->nr_pinned; i++) {
		if (c->pinned[i]->state != EXL3_MODEL_READY)
			exl3_calibrate_cancel(c->w, "a model that it measures is being unloaded");
	}
	if (c->w->draining)
		exl3_calibrate_cancel(c->w, "the daemon is draining");
	if (c->state == EXL3_CALIBRATE_PREPARING || c->state == EXL3_CALIBRATE_MEASURING)
		exl3_timer_set(c->w->loop, &c->timer, exl3_now_ns() + LOOK_NS);
}

/* ---- operands ---- */

static void run_prepare(struct exl3_job *job)
{
	struct exl3_calibration *c = (struct exl3_calibration *)((char *)job - offsetof(struct exl3_calibration, job));
	const struct exl3_device *d = device_of(c);
	exl3_auto(exl3_freep) uint16_t *block = malloc(BLOCK_BYTES);
	uint64_t seed = 88172645463325252ull;
	int rc;

	if (!block) {
		exl3_errf(&c->error, -ENOMEM, "out of memory");
		return;
	}
	rc = d->ops->slab_new(d->dev, c->slab_bytes, &c->slab, &c->error);
	/* f16 of both signs, 2^-8 to 1: numbers as a layer gets, not zeros, for which a chip clocks higher. */
	for (size_t i = 0; i < BLOCK_BYTES / 2; i++) {
		seed ^= seed << 13;
		seed ^= seed >> 7;
		seed ^= seed << 17;
		block[i] = (uint16_t)((seed & 0x83ff) | (7 + (seed >> 20) % 8) << 10);
	}
	for (uint64_t at = 0; at < c->slab_bytes && rc == 0; at += BLOCK_BYTES) {
		uint64_t left = c->slab_bytes - at;

		rc = d->ops->slab_write(c->slab, at, block, left < BLOCK_BYTES ? left : BLOCK_BYTES, &c->error);
	}
	if (rc == 0)
		rc = d->ops->slab_sync(c->slab, &c->error);
	if (rc < 0)
		exl3_err_prefix(&c->error, "operands for it");
}

static void done_prepare(struct exl3_job *job)
{
	struct exl3_calibration *c = (struct exl3_calibration *)((char *)job - offsetof(struct exl3_calibration, job));

	if (c->error.code < 0 || c->cancelled) {
		if (c->error.code == 0)
			exl3_errf(&c->error, -ECANCELED, "cancelled: %s", c->why);
		c->cancelled = true;
		finish(c);
		return;
	}
	c->state = EXL3_CALIBRATE_MEASURING;
	exl3_dispatch_set_guest(c->w->dispatch, device_of(c)->index, &c->guest);
	begin_shape(c);
	begin_rows(c);
	go_on(c);
}

static void prepare(struct exl3_calibration *c)
{
	const struct exl3_device *d = device_of(c);
	uint64_t max = strcmp(d->ops->name, "cpu") == 0 ? OPERANDS_CPU : OPERANDS_GPU, most = 0, least = 0, all = 0;
	struct exl3_dev_info info;

	memset(&info, 0, sizeof(info));
	d->ops->info(d->dev, &info);
	c->cache_bytes = info.cache_bytes;
	c->read_bytes = 0;
	max = max < info.memory_free / 4 ? max : info.memory_free / 4;
	for (uint32_t i = 0; i < c->nr_shapes; i++) {
		const struct shape *s = &c->shapes[i];

		if (s->device != d->index)
			continue;
		all += s->nr * s->bytes;
		most = most > operand_bytes(s, EXL3_M_MAX) ? most : operand_bytes(s, EXL3_M_MAX);
		least = least > operand_bytes(s, 1) ? least : operand_bytes(s, 1);
	}
	if (all <= c->cache_bytes)
		c->cache_bytes = 0; /* nothing is ever cold, in service neither */
	c->slab_bytes = most < max ? most : max > least ? max : least;
	c->nr_variants = 0;
	for (const struct exl3_kernel *k = d->ops->kernels; k->name && c->nr_variants < VARIANTS_MAX; k++) {
		if (k->op == EXL3_OP_LINEAR && !k->candidate && !exl3_kernel_is_reference(k))
			c->variants[c->nr_variants++] = (struct variant){.kernel = k};
	}
	c->state = EXL3_CALIBRATE_PREPARING;
	c->job = (struct exl3_job){.run = run_prepare, .done = done_prepare};
	exl3_jobs_add(c->w->memory, &c->job);
}

static void run_free(struct exl3_job *job)
{
	struct exl3_calibration *c = (struct exl3_calibration *)((char *)job - offsetof(struct exl3_calibration, job));

	if (c->slab)
		c->slab = c->slab->dev ? c->w->devices.list[c->shapes[c->at ? c->at - 1 : 0].device].ops->slab_free(c->slab)
				       : NULL;
}

/* ---- the end ---- */

static void apply(struct exl3_calibration *c)
{
	for (uint32_t i = 0; i < c->w->devices.nr; i++) {
		struct exl3_table_device_info who;
		struct exl3_tuned *table = NULL;
		struct exl3_error err;

		exl3_table_device(&c->w->devices.list[i], &who);
		if (exl3_kernel_table_parse("calibration", c->text, c->text_len, &who.is, &table, &err) < 0)
			exl3_err("calibrate: %s", err.text);
		if (!table)
			continue;
		exl3_info("calibrate: %u lines count on %s from now on", table->nr, c->w->devices.list[i].name);
		exl3_dispatch_set_tuned(c->w->dispatch, i, table);
		exl3_tuned_put(table);
	}
}

static void done_free(struct exl3_job *job)
{
	struct exl3_calibration *c = (struct exl3_calibration *)((char *)job - offsetof(struct exl3_calibration, job));

	if (!c->cancelled && c->at < c->nr_shapes) {
		prepare(c); /* the next device */
		return;
	}
	unpin(c);
	exl3_timer_cancel(c->w->loop, &c->timer);
	c->owner = NULL;
	if (!c->cancelled && !c->text_len) {
		c->cancelled = true;
		exl3_errf(&c->error, -EOPNOTSUPP, "no variant could be measured");
	}
	c->state = c->cancelled ? EXL3_CALIBRATE_FAILED : EXL3_CALIBRATE_DONE;
	if (c->cancelled)
		exl3_warn("calibrate: %s", c->error.text);
	else
		exl3_info("calibrate: %u shapes measured with %llu launches", c->nr_shapes,
			  (unsigned long long)c->launches);
	if (!c->cancelled && c->apply)
		apply(c);
}

/* Nothing of it is on the device: its operands go. */
static void finish(struct exl3_calibration *c)
{
	uint32_t at = c->at < c->nr_shapes && c->cancelled ? c->at : c->at - 1;

	exl3_dispatch_set_guest(c->w->dispatch, c->shapes[at].device, NULL);
	c->guest.nr = 0;
	if (c->cancelled) {
		c->at = at + 1; /* run_free() looks at the one before */
		unpin(c);
	}
	c->state = EXL3_CALIBRATE_ENDING;
	c->job = (struct exl3_job){.run = run_free, .done = done_free};
	exl3_jobs_add(c->w->memory, &c->job);
}

/* ---- for others ---- */

static struct exl3_calibration *calibration_free(struct exl3_calibration *c)
{
	if (!c)
		return NULL;
	unpin(c);
	for (uint32_t i = 0; i < c->nr_shapes; i++)
		free(c->shapes[i].modules);
	free(c->shapes);
	free(c->pinned);
	free(c->text);
	free(c);
	return NULL;
}

static bool under_way(const struct exl3_calibration *c)
{
	return c && (c->state == EXL3_CALIBRATE_PREPARING || c->state == EXL3_CALIBRATE_MEASURING ||
		     c->state == EXL3_CALIBRATE_ENDING);
}

int exl3_calibrate_start(struct exl3_worker *w, char *const *models, size_t nr_models, bool apply_it,
			 struct exl3_peer *owner, struct exl3_error *err)
{
	struct exl3_calibration *c;
	int rc;

	if (under_way(w->calibration))
		return exl3_errf(err, -EBUSY, "a calibration is under way already");
	c = calloc(1, sizeof(*c));
	if (!c)
		return exl3_errf(err, -ENOMEM, "calibrate: out of memory");
	c->w = w;
	c->apply = apply_it;
	c->headed = -1;
	c->timer.fn = on_look;
	c->timer.arg = c;
	c->guest.done = on_launched;
	c->guest.arg = c;
	rc = collect(c, models, nr_models, err);
	if (rc < 0) {
		calibration_free(c);
		return rc;
	}
	calibration_free(w->calibration);
	w->calibration = c;
	c->owner = owner;
	exl3_timer_set(w->loop, &c->timer, exl3_now_ns() + LOOK_NS);
	exl3_info("calibrate: %u shapes of %u models", c->nr_shapes, c->nr_pinned);
	prepare(c);
	return 0;
}

void exl3_calibrate_progress(const struct exl3_worker *w, struct exl3_calibrate_progress *ret)
{
	const struct exl3_calibration *c = w->calibration;
	char shape[256];

	memset(ret, 0, sizeof(*ret));
	ret->error = "";
	if (!c)
		return;
	ret->state = c->state;
	ret->shapes = c->nr_shapes;
	ret->shapes_done = c->at;
	ret->launches = c->launches;
	if (c->state == EXL3_CALIBRATE_MEASURING) {
		ret->rows = c->m;
		exl3_tuned_shape_text(&c->shapes[c->at].is, shape, sizeof(shape));
		snprintf(ret->what, sizeof(ret->what), "%s: linear %s", device_of(c)->name, shape);
	}
	if (c->state == EXL3_CALIBRATE_FAILED)
		ret->error = c->error.text;
	if (c->state == EXL3_CALIBRATE_DONE) {
		ret->table = c->text;
		ret->table_bytes = c->text_len;
	}
}

void exl3_calibrate_cancel(struct exl3_worker *w, const char *why)
{
	struct exl3_calibration *c = w->calibration;

	if (!under_way(c) || c->cancelled)
		return;
	/* A thread may be writing the error just now: it is ours when its job is done. */
	c->cancelled = true;
	c->owner = NULL;
	snprintf(c->why, sizeof(c->why), "%s", why);
	if (c->state != EXL3_CALIBRATE_PREPARING)
		exl3_errf(&c->error, -ECANCELED, "cancelled: %s", why);
	if (c->state == EXL3_CALIBRATE_MEASURING && !exl3_dispatch_guest_runs(w->dispatch, device_of(c)->index))
		finish(c);
	else if (c->state != EXL3_CALIBRATE_MEASURING)
		unpin(c); /* nothing of it is on the device */
}

void exl3_calibrate_forget(struct exl3_worker *w, const struct exl3_peer *owner)
{
	if (w->calibration && w->calibration->owner == owner)
		exl3_calibrate_cancel(w, "the client that had asked for it has left");
}

void exl3_calibrate_free(struct exl3_worker *w)
{
	w->calibration = calibration_free(w->calibration);
}
