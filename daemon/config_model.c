/* SPDX-License-Identifier: Apache-2.0 */
/* config_model.c - the models of a configuration: their names, NAME=DIR, and what [model NAME] may say. */
#include "daemon/config.h"

#include "shm/exl3_abi.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_MAX 64u /* bytes of a GPU's index or UUID */

int exl3_config_check_name(const char *name, struct exl3_error *err)
{
	size_t len = strlen(name);

	if (len == 0 || len > EXL3_NAME_MAX)
		return exl3_errf(err, -EINVAL, "model name: 1 to %u bytes, this has %zu",
				 EXL3_NAME_MAX, len);
	for (size_t i = 0; i < len; i++) {
		if ((unsigned char)name[i] <= ' ' || name[i] == 0x7f || strchr("=,/\\", name[i]))
			return exl3_errf(
				err, -EINVAL,
				"model name '%s': no spaces, control characters, '=', ',' or '/'",
				name);
	}
	return 0;
}

struct exl3_config_model *exl3_config_model_get(struct exl3_config *cfg, const char *name,
						struct exl3_error *err)
{
	struct exl3_config_model *grown;

	if (exl3_config_check_name(name, err) < 0)
		return NULL;
	for (size_t i = 0; i < cfg->nr_models; i++) {
		if (strcmp(cfg->models[i].name, name) == 0)
			return &cfg->models[i];
	}
	if (cfg->nr_models == EXL3_MODELS_MAX) {
		exl3_errf(err, -EINVAL, "more than %d models", EXL3_MODELS_MAX);
		return NULL;
	}
	grown = realloc(cfg->models, (cfg->nr_models + 1) * sizeof(*grown));
	if (!grown) {
		exl3_errf(err, -ENOMEM, "model: out of memory");
		return NULL;
	}
	cfg->models = grown;
	grown = &cfg->models[cfg->nr_models];
	memset(grown, 0, sizeof(*grown));
	grown->name = strdup(name);
	if (!grown->name) {
		exl3_errf(err, -ENOMEM, "model: out of memory");
		return NULL;
	}
	cfg->nr_models++;
	return grown;
}

int exl3_config_model_set(struct exl3_config_model *model, const char *key, const char *value,
			  struct exl3_error *err)
{
	char **at = strcmp(key, "path") == 0     ? &model->path
		    : strcmp(key, "device") == 0 ? &model->device
						 : NULL;
	char *copy;

	if (strcmp(key, "unquantized") == 0) {
		if (strcmp(value, "host") != 0 && strcmp(value, "device") != 0)
			return exl3_errf(err, -EINVAL,
					 "model %s: unquantized: '%s' is neither host nor device", model->name,
					 value);
		model->device_tensors = strcmp(value, "device") == 0;
		return 0;
	}
	if (!at)
		return exl3_errf(err, -EINVAL, "model %s: unknown key '%s' (path, device, unquantized)",
				 model->name, key);
	if (!*value)
		return exl3_errf(err, -EINVAL, "model %s: %s is empty", model->name, key);
	if (strlen(value) >= (at == &model->path ? (size_t)PATH_MAX : DEVICE_MAX))
		return exl3_errf(err, -EINVAL, "model %s: %s is too long", model->name, key);
	copy = strdup(value);
	if (!copy)
		return exl3_errf(err, -ENOMEM, "model: out of memory");
	free(*at);
	*at = copy;
	return 0;
}

int exl3_config_model_note(const struct exl3_config *cfg, struct exl3_config_model *model,
			   struct exl3_error *err)
{
	char *copy = cfg->reading ? strdup(cfg->reading) : NULL;

	if (cfg->reading && !copy)
		return exl3_errf(err, -ENOMEM, "model: out of memory");
	free(model->where);
	model->where = copy;
	return 0;
}

void exl3_config_model_spec(char *text, size_t size, const char *name, const char *path,
			    bool device_tensors, const char *device)
{
	snprintf(text, size, "%s=%s,unquantized=%s,device=%s", name, path, device_tensors ? "device" : "host",
		 device);
}

static const char *const options[] = {"device", "unquantized"};
#define NR_OPTIONS (sizeof(options) / sizeof(options[0]))

/* The last option of the path that is not @taken, cut off from it: its index; -1: there is none. */
static int cut_option(char *path, const bool taken[NR_OPTIONS], char **value)
{
	char *last = NULL;
	int which = -1;

	for (size_t i = 0; i < NR_OPTIONS; i++) {
		size_t len = strlen(options[i]);

		for (char *p = taken[i] ? NULL : strchr(path, ','); p; p = strchr(p + 1, ',')) {
			if (strncmp(p + 1, options[i], len) != 0 || p[len + 1] != '=' || p <= last)
				continue;
			last = p;
			which = (int)i;
			*value = p + len + 2;
		}
	}
	if (last)
		*last = 0;
	return which;
}

int exl3_config_add_model(struct exl3_config *cfg, const char *spec, bool by_client,
			  struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *copy = strdup(spec);
	struct exl3_config_model *model;
	char *path, *values[NR_OPTIONS] = {NULL}, *value = NULL;
	bool taken[NR_OPTIONS] = {false};
	int which;

	if (!copy)
		return exl3_errf(err, -ENOMEM, "model: out of memory");
	path = strchr(copy, '=');
	if (!path)
		return exl3_errf(err, -EINVAL, "model: '%s' is not NAME=DIR", spec);
	*path++ = 0;
	/* Only known options end the path, each once and the last ones, so that directories may have commas. */
	while ((which = cut_option(path, taken, &value)) >= 0) {
		taken[which] = true;
		values[which] = value;
	}
	model = exl3_config_model_get(cfg, copy, err);
	if (!model)
		return err ? err->code : -EINVAL;
	model->by_client = by_client;
	if (exl3_config_model_set(model, "path", path, err) < 0)
		return err ? err->code : -EINVAL;
	for (size_t i = 0; i < NR_OPTIONS; i++) {
		if (values[i] && exl3_config_model_set(model, options[i], values[i], err) < 0)
			return err ? err->code : -EINVAL;
	}
	return exl3_config_model_note(cfg, model, err);
}

void exl3_config_model_fini(struct exl3_config_model *model)
{
	free(model->name);
	free(model->path);
	free(model->device);
	free(model->where);
}

void exl3_config_remove_model(struct exl3_config *cfg, const char *name)
{
	for (size_t i = 0; i < cfg->nr_models; i++) {
		if (strcmp(cfg->models[i].name, name) != 0)
			continue;
		exl3_config_model_fini(&cfg->models[i]);
		cfg->nr_models--;
		memmove(&cfg->models[i], &cfg->models[i + 1],
			(cfg->nr_models - i) * sizeof(cfg->models[0]));
		return;
	}
}
