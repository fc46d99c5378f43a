/* SPDX-License-Identifier: Apache-2.0 */
/* config_model.c - the models of a configuration: their names, NAME=DIR, and what [model NAME] may say. */
#include "daemon/config.h"

#include "shm/exl3_abi.h"

#include <errno.h>
#include <limits.h>
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

	if (!at)
		return exl3_errf(err, -EINVAL, "model %s: unknown key '%s' (path, device)",
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

int exl3_config_add_model(struct exl3_config *cfg, const char *spec, bool by_client,
			  struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *copy = strdup(spec);
	struct exl3_config_model *model;
	char *path, *option = NULL, *value;

	if (!copy)
		return exl3_errf(err, -ENOMEM, "model: out of memory");
	path = strchr(copy, '=');
	if (!path)
		return exl3_errf(err, -EINVAL, "model: '%s' is not NAME=DIR", spec);
	*path++ = 0;
	/* Only a known option ends the path, and the last one, so that directories may have commas. */
	for (char *p = strstr(path, ",device="); p; p = strstr(p + 1, ",device="))
		option = p;
	if (option)
		*option++ = 0;
	model = exl3_config_model_get(cfg, copy, err);
	if (!model)
		return err ? err->code : -EINVAL;
	model->by_client = by_client;
	if (exl3_config_model_set(model, "path", path, err) < 0)
		return err ? err->code : -EINVAL;
	if (!option)
		return 0;
	value = strchr(option, '=');
	*value++ = 0;
	return exl3_config_model_set(model, option, value, err);
}

void exl3_config_model_fini(struct exl3_config_model *model)
{
	free(model->name);
	free(model->path);
	free(model->device);
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
