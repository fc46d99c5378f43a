/* SPDX-License-Identifier: Apache-2.0 */
/* models.c - the models of this worker by name: loaded and freed off the loop, counted while in use. */
#include "daemon/models.h"

#include "daemon/config.h"
#include "daemon/log.h"
#include "daemon/metrics.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_NS 2000000000ull
#define MIB         1048576.0

static void on_progress(void *arg);

void exl3_models_init(struct exl3_models *all, struct exl3_loop *loop, struct exl3_jobs *jobs)
{
	memset(all, 0, sizeof(*all));
	all->loop = loop;
	all->jobs = jobs;
	all->progress.fn = on_progress;
	all->progress.arg = all;
}

struct exl3_registered *exl3_models_find(const struct exl3_models *all, const char *name)
{
	for (struct exl3_registered *reg = all->list; reg; reg = reg->next) {
		if (strcmp(reg->name, name) == 0 && reg->state != EXL3_MODEL_UNLOADING)
			return reg;
	}
	return NULL;
}

struct exl3_registered *exl3_registered_get(struct exl3_registered *reg)
{
	reg->refs++;
	return reg;
}

struct exl3_registered *exl3_registered_put(struct exl3_registered *reg)
{
	if (!reg || --reg->refs)
		return NULL;
	assert(!reg->model && !reg->inflight && !reg->mappers && !reg->job_busy);
	free(reg->name);
	free(reg->path);
	exl3_closep(&reg->map_fd);
	free(reg);
	return NULL;
}

/* ---- progress of long loads: a line every two seconds ---- */

static void progress_line(struct exl3_registered *reg, uint64_t now)
{
	uint64_t total = atomic_load(&reg->model->bytes_total);
	uint64_t bytes = atomic_load(&reg->model->bytes_loaded);
	double rate;

	if (!reg->job_busy || !total)
		return; /* its turn has not come, or only headers have been read */
	if (!reg->shown_ns) {
		reg->shown_ns = now; /* the rate counts from here */
		reg->shown_bytes = bytes;
		return;
	}
	rate = (double)(bytes - reg->shown_bytes) / ((double)(now - reg->shown_ns) / 1e9);
	exl3_info("model %s: %.0f of %.0f MiB (%.0f %%), %.0f MiB/s", reg->name,
		  (double)bytes / MIB, (double)total / MIB, 100.0 * (double)bytes / (double)total,
		  rate / MIB);
	reg->shown_ns = now;
	reg->shown_bytes = bytes;
}

static void on_progress(void *arg)
{
	struct exl3_models *all = arg;
	uint64_t now = exl3_now_ns();

	for (struct exl3_registered *reg = all->list; reg; reg = reg->next) {
		if (reg->state == EXL3_MODEL_LOADING)
			progress_line(reg, now);
	}
	if (all->nr_loading)
		exl3_timer_set(all->loop, &all->progress, now + PROGRESS_NS);
}

/* ---- freeing ---- */

static void run_free(struct exl3_job *job)
{
	struct exl3_registered *reg = (struct exl3_registered *)job;

	reg->dying = exl3_model_put(reg->dying);
}

static void done_free(struct exl3_job *job)
{
	struct exl3_registered *reg = (struct exl3_registered *)job, **p;
	struct exl3_models *all = reg->all;

	reg->job_busy = false;
	for (p = &all->list; *p != reg; p = &(*p)->next)
		assert(*p);
	*p = reg->next;
	all->nr--;
	exl3_info("model %s: unloaded", reg->name);
	if (all->event)
		all->event(all->arg, reg, EXL3_MODELS_GONE);
	exl3_registered_put(reg);
}

static void close_kept(struct exl3_kept_fds *fds)
{
	exl3_closep(&fds->manifest);
	exl3_closep(&fds->slab);
	exl3_closep(&fds->tensors);
}

/* Frees the weights when nobody needs them any more. */
static void try_free(struct exl3_registered *reg)
{
	if (reg->state != EXL3_MODEL_UNLOADING || reg->inflight || reg->mappers || reg->job_busy)
		return;
	if (reg->asked) {
		reg->asked = false; /* the answer will find nobody */
		reg->all->nr_loading--;
	}
	close_kept(&reg->kept);
	reg->dying = exl3_take_ptr(&reg->model);
	reg->job = (struct exl3_job){.run = run_free, .done = done_free};
	reg->job_busy = true;
	exl3_jobs_add(reg->all->jobs, &reg->job);
}

static void unload(struct exl3_registered *reg)
{
	if (reg->state == EXL3_MODEL_UNLOADING)
		return;
	if (reg->state == EXL3_MODEL_READY) {
		int ready = EXL3_MODEL_READY;

		atomic_compare_exchange_strong(&reg->model->state, &ready, EXL3_MODEL_UNLOADING);
	} else {
		atomic_store(&reg->model->cancel, true);
	}
	reg->state = EXL3_MODEL_UNLOADING;
	try_free(reg);
}

void exl3_models_unload(struct exl3_registered *reg)
{
	bool ask = reg->mappers && (reg->state != EXL3_MODEL_UNLOADING || reg->patient);

	reg->patient = false;
	unload(reg);
	if (ask && reg->all->revoke)
		reg->all->revoke(reg->all->arg, reg);
}

void exl3_models_unload_patiently(struct exl3_registered *reg)
{
	reg->patient |= reg->state != EXL3_MODEL_UNLOADING;
	unload(reg);
}

struct exl3_registered *exl3_models_find_leaving(const struct exl3_models *all, const char *name)
{
	for (struct exl3_registered *reg = all->list; reg; reg = reg->next) {
		if (strcmp(reg->name, name) == 0 && reg->state == EXL3_MODEL_UNLOADING && reg->mappers)
			return reg;
	}
	return NULL;
}

void exl3_models_unload_all(struct exl3_models *all)
{
	exl3_timer_cancel(all->loop, &all->progress);
	for (struct exl3_registered *reg = all->list; reg; reg = reg->next)
		exl3_models_unload(reg);
}

void exl3_registered_pin(struct exl3_registered *reg)
{
	reg->inflight++;
}

void exl3_registered_unpin(struct exl3_registered *reg)
{
	if (--reg->inflight == 0)
		try_free(reg);
}

void exl3_registered_map(struct exl3_registered *reg)
{
	reg->mappers++;
	if (reg->metrics)
		exl3_metric_set(&reg->metrics->mappers, reg->mappers);
}

void exl3_registered_unmap(struct exl3_registered *reg)
{
	reg->mappers--;
	if (reg->metrics)
		exl3_metric_set(&reg->metrics->mappers, reg->mappers);
	if (!reg->mappers)
		try_free(reg);
}

/* ---- loading ---- */

static const struct exl3_kept_fds nothing_kept = {-1, -1, -1, 0};

/* The files are others by now: they count. If they cannot be loaded, what was serving goes on serving. */
static void load_changed(struct exl3_registered *reg)
{
	struct exl3_error why = reg->why, err;

	if (exl3_model_load(reg->model) == 0)
		return;
	err = reg->model->error;
	if (err.code == -ENOMEM && reg->all->generation <= 1) {
		/* Whoever has started the daemon with new files wants them: the old weights make room. */
		atomic_store(&reg->model->state, EXL3_MODEL_NEW);
		reg->way = EXL3_MODELS_REFUSED_KEPT;
		reg->why = why;
		return;
	}
	if (err.code == -ECANCELED ||
	    exl3_model_adopt(reg->model, &reg->kept, reg->adopt_flags | EXL3_ADOPT_ANY_FILES,
			     &why) < 0) {
		/* Between the two looks at them they have become useless: the load's reason it is. */
		reg->model->error = err;
		atomic_store(&reg->model->state, EXL3_MODEL_FAILED);
		return;
	}
	reg->way = EXL3_MODELS_ADOPTED;
	reg->why = err;
}

static void adopt_kept(struct exl3_registered *reg)
{
	int rc;

	reg->why.code = 0;
	rc = exl3_model_adopt(reg->model, &reg->kept, reg->adopt_flags, &reg->why);
	reg->why.code = rc;
	reg->stale = rc == -ESTALE;
	reg->way = rc == 0      ? EXL3_MODELS_ADOPTED
		   : reg->stale ? EXL3_MODELS_STALE_KEPT
				: EXL3_MODELS_REFUSED_KEPT;
	if (!reg->stale)
		close_kept(&reg->kept); /* here: the last one of a file gives all its pages back */
}

/* Its outcome is the model's state, the way and, for what was kept, the reason. */
static void run_load(struct exl3_job *job)
{
	struct exl3_registered *reg = (struct exl3_registered *)job;

	if (reg->kept.manifest >= 0 && !reg->stale) {
		adopt_kept(reg);
		return;
	}
	reg->way = EXL3_MODELS_FROM_FILES;
	if (reg->stale)
		load_changed(reg);
	else
		exl3_model_load(reg->model);
	reg->stale = false;
	close_kept(&reg->kept);
}

static void log_ready(const struct exl3_registered *reg)
{
	const struct exl3_model *model = reg->model;
	double seconds = (double)(exl3_now_ns() - reg->start_ns) / 1e9;

	if (reg->way == EXL3_MODELS_ADOPTED && reg->why.code)
		exl3_warn("model %s: the files have changed and are refused: %s; the weights that "
			  "were serving go on", reg->name, reg->why.text);
	else if (reg->why.code)
		exl3_warn("model %s: loaded anew, not adopted: %s", reg->name, reg->why.text);
	exl3_info("model %s: %s, %u modules, %.1f MiB of weights, %.2f s, fingerprint %s",
		  reg->name, reg->way == EXL3_MODELS_ADOPTED ? "ready, adopted" : "ready",
		  model->nr_modules, (double)model->weight_bytes / MIB, seconds,
		  model->fingerprint);
	for (uint32_t i = 0; i < model->nr_skipped; i++)
		exl3_warn("model %s: left out: %s", reg->name, model->skipped[i]);
}

/* It asks again; of those that were refused, once they are gone. */
static void ask_again(struct exl3_registered *reg)
{
	struct exl3_models *all = reg->all;
	bool refused = reg->way == EXL3_MODELS_REFUSED_KEPT;

	if (refused)
		exl3_warn("model %s: kept weights are not used: %s; loading it from its files",
			  reg->name, reg->why.text);
	reg->asked = true;
	all->nr_loading++;
	if (all->event)
		all->event(all->arg, reg, refused ? EXL3_MODELS_REFUSED : EXL3_MODELS_STALE);
}

static void done_load(struct exl3_job *job)
{
	struct exl3_registered *reg = (struct exl3_registered *)job;
	struct exl3_models *all = reg->all;
	const struct exl3_model *model = reg->model;

	reg->job_busy = false;
	all->nr_loading--;
	if (reg->state == EXL3_MODEL_UNLOADING) {
		try_free(reg);
		return;
	}
	if (reg->way == EXL3_MODELS_REFUSED_KEPT || reg->way == EXL3_MODELS_STALE_KEPT) {
		ask_again(reg);
		return;
	}
	if (atomic_load(&model->state) == EXL3_MODEL_READY) {
		reg->state = EXL3_MODEL_READY;
		log_ready(reg);
	} else {
		reg->state = EXL3_MODEL_FAILED;
		exl3_err("model %s: refused: %s", reg->name, model->error.text);
	}
	if (all->event)
		all->event(all->arg, reg,
			   reg->state == EXL3_MODEL_READY ? EXL3_MODELS_LOADED
							  : EXL3_MODELS_FAILED);
}

static void start_load(struct exl3_registered *reg)
{
	reg->job = (struct exl3_job){.run = run_load, .done = done_load};
	reg->job_busy = true;
	exl3_jobs_add(reg->all->jobs, &reg->job);
}

void exl3_models_answer(struct exl3_models *all, const char *name, const struct exl3_kept_fds *fds,
			unsigned flags)
{
	struct exl3_registered *reg = exl3_models_find(all, name);
	struct exl3_kept_fds kept = fds ? *fds : nothing_kept;

	if (!reg || !reg->asked) {
		close_kept(&kept);
		return;
	}
	reg->asked = false;
	if (fds || !reg->stale) {
		close_kept(&reg->kept); /* never the last one of a file: whoever gave them has them too */
		reg->kept = kept;
		reg->kept_id = kept.id;
		reg->stale = false;
	}
	reg->adopt_flags = flags;
	start_load(reg);
}

int exl3_models_load(struct exl3_models *all, const char *name, const char *path,
		     const struct exl3_device *device, bool device_tensors, bool at_start,
		     struct exl3_registered **ret, struct exl3_error *err)
{
	struct exl3_registered *reg, *old, **p;
	int rc;

	rc = exl3_config_check_name(name, err);
	if (rc < 0)
		return rc;
	if (path[0] != '/')
		return exl3_errf(err, -EINVAL, "model %s: path '%s' is not absolute", name, path);
	old = exl3_models_find(all, name);
	if (old && old->state != EXL3_MODEL_FAILED)
		return exl3_errf(err, -EEXIST, "model %s is there already: unload it first", name);
	if (all->nr - (old ? 1 : 0) >= EXL3_MODELS_MAX)
		return exl3_errf(err, -EDQUOT, "there are %d models already", EXL3_MODELS_MAX);
	reg = calloc(1, sizeof(*reg));
	if (!reg)
		return exl3_errf(err, -ENOMEM, "model %s: out of memory", name);
	reg->all = all;
	reg->map_fd = -1;
	reg->device = device;
	reg->refs = 1;
	reg->name = strdup(name);
	reg->path = strdup(path);
	if (!reg->name || !reg->path) {
		exl3_registered_put(reg);
		return exl3_errf(err, -ENOMEM, "model %s: out of memory", name);
	}
	rc = exl3_model_new(name, path, device->ops, device->dev, &reg->model, err);
	if (rc < 0) {
		exl3_registered_put(reg);
		return rc;
	}
	reg->model->device_tensors = device_tensors;
	if (old)
		exl3_models_unload(old); /* only the reason of its failure is left of it */
	reg->state = EXL3_MODEL_LOADING;
	reg->at_start = at_start;
	reg->kept = nothing_kept;
	reg->model->origin = (struct exl3_origin){all->instance, all->generation, !at_start};
	reg->start_ns = exl3_now_ns();
	for (p = &all->list; *p; p = &(*p)->next)
		;
	*p = reg;
	all->nr++;
	if (all->nr_loading++ == 0)
		exl3_timer_set(all->loop, &all->progress, reg->start_ns + PROGRESS_NS);
	exl3_info("model %s: loading %s onto %s", name, path, device->name);
	*ret = reg;
	if (!all->want) {
		start_load(reg);
		return 0;
	}
	reg->asked = true;
	all->want(all->arg, reg);
	return 0;
}

int exl3_models_usable(const struct exl3_registered *reg, struct exl3_error *err)
{
	switch (reg->state) {
	case EXL3_MODEL_READY:
		return 0;
	case EXL3_MODEL_LOADING:
		return exl3_errf(
			err, -EAGAIN, "model %s is still loading (%llu of %llu bytes): try again",
			reg->name, (unsigned long long)atomic_load(&reg->model->bytes_loaded),
			(unsigned long long)atomic_load(&reg->model->bytes_total));
	case EXL3_MODEL_FAILED:
		return exl3_errf(err, -EIO, "model %s was refused: %s", reg->name,
				 reg->model->error.text);
	default:
		return exl3_errf(err, -ENOENT, "model %s was unloaded", reg->name);
	}
}
