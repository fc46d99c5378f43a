/* SPDX-License-Identifier: Apache-2.0 */
/* config_check.c - --check-config: the places that a configuration names, as far as no device is needed. */
#include "daemon/config.h"

#include "daemon/checkpoint.h"
#include "daemon/modelconf.h"
#include "daemon/plan.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>

struct checker {
	FILE *out;
	void (*report)(const char *text);
	unsigned wrong;
};

static void say(struct checker *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void say(struct checker *c, const char *fmt, ...)
{
	char text[2 * EXL3_ERROR_TEXT_MAX];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	c->report(text);
	c->wrong++;
}

static void describe(struct checker *c, const char *name, const struct exl3_plan *plan)
{
	if (!c->out)
		return;
	fprintf(c->out,
		"# model %s: %u file%s, %u matrices, %.1f MiB of weights, %.1f MiB of other "
		"tensors\n",
		name, plan->ckpt->nr_files, plan->ckpt->nr_files == 1 ? "" : "s", plan->nr_matrices,
		(double)plan->layout.weight_bytes / (1 << 20),
		(double)plan->layout.tensor_bytes / (1 << 20));
	for (uint32_t i = 0; i < plan->nr_matrices; i++)
		if (plan->matrices[i].unsupported)
			fprintf(c->out, "# model %s: left out: %s: %s\n", name,
				plan->matrices[i].name, plan->matrices[i].unsupported);
}

static void check_model(struct checker *c, const struct exl3_config_model *m)
{
	struct exl3_modelconf conf;
	struct exl3_plan plan = {0};
	struct exl3_ckpt ckpt;
	struct exl3_error err;
	int rc = exl3_ckpt_open(m->path, &ckpt, &err);

	if (rc == 0) {
		exl3_modelconf_init(&conf, ckpt.config);
		rc = exl3_plan_make(&ckpt, &conf, &plan, &err);
		if (rc == 0)
			describe(c, m->name, &plan);
		else
			exl3_err_prefix(&err, "%.200s", m->path);
		exl3_plan_fini(&plan);
		exl3_ckpt_fini(&ckpt);
	}
	if (rc < 0)
		say(c, "%s%smodel %s: %s", m->where ? m->where : "", m->where ? ": " : "", m->name,
		    err.text);
}

/* That of the default path is made at the start, any other must be there. */
static void check_folder(struct checker *c, const char *key, const char *path)
{
	const char *slash = strrchr(path, '/');
	char dir[112] = ".";
	struct stat st;

	if (slash)
		snprintf(dir, sizeof(dir), "%.*s", slash == path ? 1 : (int)(slash - path), path);
	if (strcmp(dir, EXL3_RUN_DIR) == 0)
		return;
	if (stat(dir, &st) < 0)
		say(c, "%s %s: %s: %s; make the folder or name another one", key, path, dir,
		    strerror(errno));
	else if (!S_ISDIR(st.st_mode))
		say(c, "%s %s: %s is no folder", key, path, dir);
}

unsigned exl3_config_check_places(const struct exl3_config *cfg, FILE *out,
				  void (*report)(const char *text))
{
	struct checker c = {.out = out, .report = report};

	check_folder(&c, "socket", cfg->socket);
	if (cfg->metrics_socket && strcmp(cfg->metrics_socket, "none") != 0)
		check_folder(&c, "metrics-socket", cfg->metrics_socket);
	for (size_t i = 0; i < cfg->nr_models; i++)
		check_model(&c, &cfg->models[i]);
	return c.wrong;
}
