/* SPDX-License-Identifier: Apache-2.0 */
/* devices.c - the devices of a worker: the default one, and those that models name. */
#include "daemon/devices.h"

#include "daemon/log.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A device in words, taken apart. */
struct spec {
	const struct exl3_backend_ops *ops;
	int ordinal;      /* if there is no UUID */
	const char *uuid; /* borrowed from the text, or NULL */
};

static bool is_cpu(const struct exl3_backend_ops *ops)
{
	return strcmp(ops->name, "cpu") == 0;
}

static int backend_missing(const char *name, struct exl3_error *err)
{
	return exl3_errf(err, -ENODEV, "backend %s: %s", name,
			 strcmp(name, "cuda") == 0 && exl3_backend_plugin_error()
				 ? exl3_backend_plugin_error()
				 : "there is no such backend");
}

/* @text: not empty. @fallback: the backend of a device without one. */
static int parse(const char *text, const struct exl3_backend_ops *fallback, struct spec *ret,
		 struct exl3_error *err)
{
	const char *colon = strchr(text, ':'), *rest = text;
	char name[16] = "", *end;
	long ordinal;

	*ret = (struct spec){.ops = fallback};
	if (colon || strcmp(text, "cpu") == 0 || strcmp(text, "cuda") == 0) {
		size_t len = colon ? (size_t)(colon - text) : strlen(text);

		if (len >= sizeof(name))
			return exl3_errf(err, -EINVAL, "device '%.64s': no such backend", text);
		memcpy(name, text, len);
		ret->ops = *name ? exl3_backend_find(name) : NULL;
		if (!ret->ops)
			return backend_missing(name, err);
		rest = colon ? colon + 1 : "";
		if (colon && !*rest)
			return exl3_errf(err, -EINVAL, "device '%.64s': index or UUID is missing", text);
	}
	ordinal = isdigit((unsigned char)*rest) ? strtol(rest, &end, 10) : -1;
	if (ordinal >= 0 && !*end && ordinal <= 1023)
		ret->ordinal = (int)ordinal;
	else if (*rest)
		ret->uuid = rest;
	if (ret->uuid && is_cpu(ret->ops))
		return exl3_errf(err, -EINVAL, "device '%.64s': a cpu has an index, no UUID", text);
	return 0;
}

/* Index of the device, or -1: not open. */
static int find_open(const struct exl3_devices *all, const struct spec *spec, const char *text)
{
	struct exl3_dev_info info;

	for (uint32_t i = 0; i < all->nr; i++) {
		const struct exl3_device *d = &all->list[i];

		if (d->ops != spec->ops)
			continue;
		if (strcmp(d->spec, text) == 0)
			return (int)i;
		memset(&info, 0, sizeof(info));
		d->ops->info(d->dev, &info);
		if (spec->uuid ? strcasecmp(info.uuid, spec->uuid) == 0 : info.ordinal == spec->ordinal)
			return (int)i;
	}
	return -1;
}

/* ---- opening ---- */

static int open_one(struct exl3_devices *all, const struct exl3_config *cfg, const struct spec *spec,
		    const char *text, unsigned shares, struct exl3_error *err)
{
	struct exl3_dev_options opt = {
		.ordinal = spec->ordinal,
		.uuid = spec->uuid,
		.numa_node = (int)cfg->node,
		.threads = (unsigned)cfg->threads,
		.shares = shares,
		.memory_max = is_cpu(spec->ops) ? cfg->memory_max : cfg->gpu_memory_max,
		.host_memory_max = cfg->memory_max,
		.workspace_bytes = cfg->workspace,
		.deterministic = cfg->deterministic,
	};
	struct exl3_device *d = &all->list[all->nr];
	struct exl3_dev_info info;
	int rc;

	if (all->nr == EXL3_DEVICES_MAX)
		return exl3_errf(err, -EINVAL, "more than %u devices", EXL3_DEVICES_MAX);
	exl3_errf(err, -ENODEV, "it has no device here");
	rc = spec->ops->probe(err);
	if (rc <= 0) {
		exl3_err_prefix(err, "backend %s", spec->ops->name);
		return rc < 0 ? rc : -ENODEV;
	}
	rc = spec->ops->open(&opt, &d->dev, err);
	if (rc < 0)
		return rc;
	memset(&info, 0, sizeof(info));
	spec->ops->info(d->dev, &info);
	d->ops = spec->ops;
	d->index = all->nr++;
	snprintf(d->name, sizeof(d->name), "%s:%d", spec->ops->name, info.ordinal);
	snprintf(d->spec, sizeof(d->spec), "%s", text);
	exl3_info("device %s: %s (%s)", d->name, info.name, info.isa);
	return 0;
}

/* What is to be opened: texts, each with who wants it. */
struct wanted {
	char text[EXL3_MODELS_MAX + EXL3_DEVICES_MAX + 1][64];
	bool optional[EXL3_MODELS_MAX + EXL3_DEVICES_MAX + 1];
	uint32_t nr;
};

static int want(struct wanted *w, const char *text, size_t len, bool optional, struct exl3_error *err)
{
	if (len >= sizeof(w->text[0]))
		return exl3_errf(err, -EINVAL, "device '%.64s...' is too long", text);
	if (w->nr == sizeof(w->optional) / sizeof(w->optional[0]))
		return exl3_errf(err, -EINVAL, "more than %u devices", EXL3_DEVICES_MAX);
	memcpy(w->text[w->nr], text, len);
	w->text[w->nr][len] = 0;
	w->optional[w->nr++] = optional;
	return 0;
}

static int want_list(struct wanted *w, const char *list, struct exl3_error *err)
{
	int rc = 0;

	while (list && *list && rc == 0) {
		size_t len = strcspn(list, ", ");

		if (len)
			rc = want(w, list, len, false, err);
		list += len + (list[len] != 0);
	}
	return rc;
}

/* The default device, in words that name its backend. */
static int default_device(const struct exl3_config *cfg, char text[64], struct exl3_error *err)
{
	const struct exl3_backend_ops *ops;
	const char *device = cfg->device ? cfg->device : "0";
	bool any = strcmp(cfg->backend, "auto") == 0;
	struct spec spec;
	int rc;

	ops = exl3_backend_find(cfg->backend);
	if (!ops)
		return backend_missing(cfg->backend, err);
	rc = parse(device, ops, &spec, err);
	if (rc < 0)
		return rc;
	if (spec.ops != ops && !any)
		return exl3_errf(err, -EINVAL, "device %s is not one of backend %s", device, ops->name);
	if (spec.uuid)
		rc = snprintf(text, 64, "%s:%s", spec.ops->name, spec.uuid);
	else
		rc = snprintf(text, 64, "%s:%d", spec.ops->name, spec.ordinal);
	return rc < 64 ? 0 : exl3_errf(err, -EINVAL, "device '%.64s...' is too long", device);
}

static int collect(const struct exl3_config *cfg, struct wanted *w, struct exl3_error *err)
{
	char text[64];
	int rc = default_device(cfg, text, err);

	if (rc == 0)
		rc = want(w, text, strlen(text), false, err);
	if (rc == 0)
		rc = want_list(w, cfg->devices, err);
	for (size_t i = 0; i < cfg->nr_models && rc == 0; i++) {
		const struct exl3_config_model *m = &cfg->models[i];

		if (m->device)
			rc = want(w, m->device, strlen(m->device), m->by_client, err);
	}
	return rc;
}

/* How many devices of the cpu backend there will be: they share its processors. */
static unsigned count_cpus(const struct wanted *w, const struct exl3_backend_ops *fallback)
{
	bool seen[1024] = {false};
	unsigned nr = 0;

	for (uint32_t i = 0; i < w->nr; i++) {
		struct spec spec;

		if (parse(w->text[i], fallback, &spec, NULL) < 0 || !is_cpu(spec.ops) || seen[spec.ordinal])
			continue;
		seen[spec.ordinal] = true;
		nr++;
	}
	return nr;
}

int exl3_devices_open(struct exl3_devices *all, const struct exl3_config *cfg, struct exl3_error *err)
{
	exl3_auto(exl3_freep) struct wanted *w = calloc(1, sizeof(*w));
	const struct exl3_backend_ops *fallback = NULL;
	unsigned cpus = 1;
	int rc;

	if (!w)
		return exl3_errf(err, -ENOMEM, "devices: out of memory");
	rc = collect(cfg, w, err);
	if (rc < 0)
		exl3_err_prefix(err, "devices");
	for (uint32_t i = 0; rc == 0 && i < w->nr; i++) {
		struct spec spec;

		rc = parse(w->text[i], fallback, &spec, err);
		if (rc == 0 && i == 0) {
			fallback = spec.ops;
			cpus = count_cpus(w, fallback);
		}
		if (rc == 0 && find_open(all, &spec, w->text[i]) < 0)
			rc = open_one(all, cfg, &spec, w->text[i], is_cpu(spec.ops) ? cpus : 1, err);
		if (rc < 0)
			exl3_err_prefix(err, "device %s", w->text[i]);
		if (rc < 0 && w->optional[i]) {
			exl3_err("%s", err->text);
			rc = 0;
		}
	}
	return rc;
}

void exl3_devices_close(struct exl3_devices *all)
{
	while (all->nr) {
		struct exl3_device *d = &all->list[--all->nr];

		d->dev = d->ops->close(d->dev);
	}
}

/* ---- looking up ---- */

const struct exl3_device *exl3_devices_find(const struct exl3_devices *all, const char *text,
					    struct exl3_error *err)
{
	char names[EXL3_DEVICES_MAX * 34] = "";
	struct spec spec;
	size_t n = 0;
	int at;

	if (!text || !*text)
		return &all->list[0];
	if (parse(text, all->list[0].ops, &spec, err) < 0)
		return NULL;
	/* A backend without an index: the default device if it is of that backend. */
	at = strcmp(text, all->list[0].ops->name) == 0 ? 0 : find_open(all, &spec, text);
	if (at >= 0)
		return &all->list[at];
	for (uint32_t i = 0; i < all->nr; i++)
		n += (size_t)snprintf(names + n, sizeof(names) - n, "%s%s", i ? ", " : "",
				      all->list[i].name);
	exl3_errf(err, -EINVAL,
		  "device '%.64s' is not open; this daemon has %s: name it in the configuration (devices)", text,
		  names);
	return NULL;
}

const struct exl3_device *exl3_devices_for_arenas(const struct exl3_devices *all)
{
	/* A GPU must register host memory to address it; the cpu just reads it. */
	for (uint32_t i = 0; i < all->nr; i++) {
		if (!is_cpu(all->list[i].ops))
			return &all->list[i];
	}
	return &all->list[0];
}

void *exl3_devices_address(const struct exl3_device *dev, const struct exl3_device *maker,
			   const struct exl3_arena *arena)
{
	if (arena->device) /* or imported: it is in that device's memory */
		return dev == maker ? arena->dev_ptr : NULL;
	if (dev->ops == maker->ops)
		return arena->dev_ptr;
	return is_cpu(dev->ops) ? arena->host_ptr : NULL;
}
