/* SPDX-License-Identifier: Apache-2.0 */
/* config_file.c - reads a configuration: files with their drop-ins, then the flags of the command line. */
#include "daemon/config_priv.h"

#include <dirent.h>
#include <errno.h>
#include <ini.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- files ---- */

#define SECTION_MAX 48 /* libinih cuts longer headings without a word */

struct file_state {
	struct exl3_config *cfg;
	struct exl3_error *err;
	int code;         /* of the first error; err has its sentence */
	FILE *file;       /* where lines come from, or NULL: */
	const char *text; /* here */
	int line;         /* the one being read */
	const char *name; /* of the file, for messages */
	char where[PATH_MAX + 16]; /* name:line */
	int line_max;     /* bytes that the reader takes, once a line was longer; else 0 */
	int heading;      /* line of a [model NAME] or [domain NAME] without a key so far; else 0 */
	int bare;         /* of the first that never had one: libinih does not report it; else 0 */
};

/* The end of the section before, and whether a section that needs a key begins. */
static void see_heading(struct file_state *st, const char *line)
{
	size_t space;

	if (st->line == 1 && memcmp(line, "\xef\xbb\xbf", strnlen(line, 3)) == 0)
		line += strnlen(line, 3); /* as libinih: a byte order mark */
	line += strspn(line, " \t");
	if (*line != '[' || !strchr(line, ']'))
		return;
	if (!st->bare)
		st->bare = st->heading;
	space = strcspn(line, " \t]");
	st->heading = (space == 6 && memcmp(line, "[model", 6) == 0) ||
				      (space == 7 && memcmp(line, "[domain", 7) == 0)
			      ? st->line
			      : 0;
}

/* fgets() for libinih, which would take the rest of a line that is too long for another line. */
static char *next_line(char *buf, int size, void *arg)
{
	struct file_state *st = arg;
	size_t len;

	if (st->line_max)
		return NULL;
	if (st->file) {
		if (!fgets(buf, size, st->file))
			return NULL;
	} else {
		if (!*st->text)
			return NULL;
		len = strcspn(st->text, "\n");
		len += st->text[len] == '\n';
		if (len > (size_t)size - 1)
			len = (size_t)size - 1;
		memcpy(buf, st->text, len);
		buf[len] = 0;
		st->text += len;
	}
	st->line++;
	len = strlen(buf);
	if (len == (size_t)size - 1 && buf[len - 1] != '\n') {
		st->line_max = size - 2;
		return NULL;
	}
	see_heading(st, buf);
	return buf;
}

/* @dashes: what stands before a name of this @kind. */
static int unknown(struct exl3_error *err, const char *kind, const char *dashes, const char *name)
{
	const char *near = exl3_config_nearest_key(name);

	return exl3_errf(err, -EINVAL, "unknown %s '%s%s'%s%s%s%s; see exl3-daemon --help", kind, dashes, name,
			 near ? " (did you mean " : "", near ? dashes : "", near ? near : "",
			 near ? "?)" : "");
}

static int model_value(struct file_state *st, const char *of, const char *name, const char *value)
{
	struct exl3_config_model *model = exl3_config_model_get(st->cfg, of, st->err);
	int rc = model ? exl3_config_model_set(model, name, value, st->err) : st->err->code;

	if (rc == 0 && strcmp(name, "path") == 0)
		rc = exl3_config_model_note(st->cfg, model, st->err);
	return rc;
}

static int domain_value(struct file_state *st, const char *of, const char *name, const char *value)
{
	struct exl3_config_domain *domain = exl3_config_domain_get(st->cfg, of, st->err);

	return domain ? exl3_config_domain_set(domain, name, value, st->err) : st->err->code;
}

static int tenant_value(struct file_state *st, const char *of, const char *name, const char *value)
{
	struct exl3_config_tenant *tenant = exl3_config_tenant_get(st->cfg, of, st->err);

	return tenant ? exl3_config_tenant_set(tenant, name, value, st->err) : st->err->code;
}

/* A section that is more than a heading: sets st->code. False: this is none. */
static bool in_section(struct file_state *st, const char *section, const char *name, const char *value)
{
	static const struct {
		const char *word;
		int (*set)(struct file_state *st, const char *of, const char *name, const char *value);
	} kinds[] = {{"model ", model_value}, {"domain ", domain_value}, {"tenant ", tenant_value}};

	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		size_t len = strlen(kinds[i].word);

		if (strncmp(section, kinds[i].word, len) != 0)
			continue;
		st->code = kinds[i].set(st, section + len + strspn(section + len, " "), name, value);
		return true;
	}
	return false;
}

static int ini_line(void *arg, const char *section, const char *name, const char *value)
{
	struct file_state *st = arg;
	const struct key *key;

	if (st->code)
		return 0;
	snprintf(st->where, sizeof(st->where), "%s:%d", st->name, st->line);
	if (!name) /* only a heading (INI_CALL_HANDLER_ON_NEW_SECTION builds) */
		return 1;
	st->heading = 0;
	if (!value)
		value = "";
	if (strlen(section) >= SECTION_MAX) {
		st->code = exl3_errf(st->err, -EINVAL,
				     "heading '%s...' is too long: write model = NAME=DIR instead",
				     section);
		return 0;
	}
	if (in_section(st, section, name, value))
		return st->code == 0;
	key = exl3_config_find_key(name, strlen(name));
	if (!key)
		st->code = unknown(st->err, "key", "", name);
	else
		st->code = exl3_config_set_key(st->cfg, key, value, st->err);
	return st->code == 0;
}

static int parse_lines(struct file_state *st, const char *name)
{
	int line;

	st->name = name;
	st->cfg->reading = st->where;
	line = ini_parse_stream(next_line, st, ini_line, st);
	st->cfg->reading = NULL;

	if (st->line_max)
		return exl3_errf(st->err, -EINVAL, "%s:%d: line is longer than %d bytes", name,
				 st->line, st->line_max);
	if (line == 0) {
		line = st->bare ? st->bare : st->heading;
		if (line)
			return exl3_errf(st->err, -EINVAL,
					 "%s:%d: a section without a key: a model needs path = "
					 "DIR, a domain users = LIST",
					 name, line);
		return 0;
	}
	if (line < 0)
		return exl3_errf(st->err, -ENOMEM, "%s: out of memory", name);
	if (!st->code)
		return exl3_errf(st->err, -EINVAL, "%s:%d: not a 'key = value' line", name, line);
	exl3_err_prefix(st->err, "%s:%d", name, line);
	return st->code;
}

static int read_file(struct exl3_config *cfg, const char *path, struct exl3_error *err)
{
	struct file_state st = {.cfg = cfg, .err = err};
	int rc;

	st.file = fopen(path, "re");
	if (!st.file)
		return exl3_errf(err, -errno, "%s: %m", path);
	rc = parse_lines(&st, path);
	if (rc == 0 && ferror(st.file))
		rc = exl3_errf(err, -EIO, "%s: cannot be read to its end", path);
	fclose(st.file);
	return rc;
}

static int conf_only(const struct dirent *d)
{
	size_t len = strlen(d->d_name);

	return d->d_name[0] != '.' && len > 5 && strcmp(d->d_name + len - 5, ".conf") == 0;
}

/* The drop-ins of "x.conf" lie in "x.conf.d". */
static int read_drop_ins(struct exl3_config *cfg, const char *path, struct exl3_error *err)
{
	char dir[PATH_MAX], file[PATH_MAX];
	struct dirent **list;
	int n, rc = 0;

	if (snprintf(dir, sizeof(dir), "%s.d", path) >= (int)sizeof(dir))
		return exl3_errf(err, -ENAMETOOLONG, "%s: path too long", path);
	n = scandir(dir, &list, conf_only, alphasort);
	if (n < 0)
		return errno == ENOENT || errno == ENOTDIR ? 0
							   : exl3_errf(err, -errno, "%s: %m", dir);
	for (int i = 0; i < n; i++) {
		if (rc == 0 &&
		    snprintf(file, sizeof(file), "%s/%s", dir, list[i]->d_name) < (int)sizeof(file))
			rc = read_file(cfg, file, err);
		free(list[i]);
	}
	free(list);
	return rc;
}

/* ---- the whole ---- */

/* What can be checked only when all values are known, and defaults that depend on others. */
static int finish(struct exl3_config *cfg, struct exl3_error *err)
{
	char text[PATH_MAX];

	if (!cfg->socket) {
		snprintf(text, sizeof(text), EXL3_RUN_DIR "/%lld.sock",
			 cfg->node < 0 ? 0ll : (long long)cfg->node);
		if (exl3_config_set_string(&cfg->socket, text) < 0)
			return exl3_errf(err, -ENOMEM, "socket: out of memory");
	}
	if (strlen(cfg->socket) > 100) /* sun_path has 108 bytes; the lock's suffix has 5 */
		return exl3_errf(err, -EINVAL, "socket: '%s' is longer than 100 bytes",
				 cfg->socket);
	for (size_t i = 0; i < cfg->nr_models; i++) {
		struct exl3_config_model *model = &cfg->models[i];

		if (!model->path)
			return exl3_errf(err, -EINVAL, "model %s: no path", model->name);
		if (model->path[0] == '/')
			continue;
		/* Made absolute now: the worker is started again later, maybe from elsewhere. */
		if (!getcwd(text, sizeof(text)) ||
		    strlen(text) + strlen(model->path) + 2 > sizeof(text))
			return exl3_errf(err, -EINVAL, "model %s: cannot make '%s' absolute",
					 model->name, model->path);
		strcat(strcat(text, "/"), model->path);
		if (exl3_config_set_string(&model->path, text) < 0)
			return exl3_errf(err, -ENOMEM, "model: out of memory");
	}
	return exl3_config_check_domains(cfg, err);
}

/* Value of "--key value" or "--key=value" at argv[*i]; a boolean needs none. NULL: missing. */
static const char *flag_value(int argc, char *const argv[], int *i, const char *eq, bool boolean)
{
	if (eq)
		return eq + 1;
	if (boolean && (*i + 1 >= argc || argv[*i + 1][0] == '-'))
		return "yes";
	return *i + 1 < argc ? argv[++*i] : NULL;
}

static int unknown_flag(struct exl3_error *err, const char *name, size_t len)
{
	char text[64];

	snprintf(text, sizeof(text), "%.*s", (int)(len < sizeof(text) ? len : sizeof(text) - 1), name);
	return unknown(err, "flag", "--", text);
}

/* One pass over the flags. @cfg NULL: only the flags that are not keys (which file to read). */
static int read_flags(int argc, char *const argv[], struct exl3_config *cfg, const char **file,
		      struct exl3_config_args *args, struct exl3_error *err)
{
	for (int i = 1; i < argc; i++) {
		const char *name = argv[i] + 2, *eq, *value;
		const struct key *key;
		size_t len;
		int rc;

		if (strcmp(argv[i], "-h") == 0)
			name = "help";
		else if (strncmp(argv[i], "--", 2) != 0)
			return exl3_errf(err, -EINVAL, "'%s': flags begin with --; see exl3-daemon --help",
					 argv[i]);
		eq = strchr(name, '=');
		len = eq ? (size_t)(eq - name) : strlen(name);
		if (strcmp(name, "help") == 0) {
			args->help = true;
		} else if (strcmp(name, "version") == 0) {
			args->version = true;
		} else if (strcmp(name, "check-config") == 0) {
			args->check = true;
		} else if (strcmp(name, "takeover") == 0) {
			args->takeover = true;
		} else if (len == 6 &&
			   (memcmp(name, "config", 6) == 0 || memcmp(name, "worker", 6) == 0)) {
			value = flag_value(argc, argv, &i, eq, false);
			if (!value)
				return exl3_errf(err, -EINVAL, "--%.6s: value missing; see exl3-daemon --help", name);
			if (name[0] == 'c')
				*file = value;
			else
				args->worker_fd = atoi(value);
		} else {
			key = exl3_config_find_key(name, len);
			if (!key)
				return unknown_flag(err, name, len);
			value = flag_value(argc, argv, &i, eq, key->type == KEY_BOOL);
			if (!value)
				return exl3_errf(err, -EINVAL, "--%s: value missing; see exl3-daemon --help", key->name);
			rc = 0;
			if (cfg) {
				cfg->reading = "--model";
				rc = exl3_config_set_key(cfg, key, value, err);
				cfg->reading = NULL;
			}
			if (rc < 0)
				return exl3_err_prefix(err, "--%s", key->name), rc;
		}
	}
	return 0;
}

int exl3_config_read(int argc, char *const argv[], struct exl3_config *ret,
		     struct exl3_config_args *args, struct exl3_error *err)
{
	const char *file = NULL;
	struct exl3_config cfg;
	int rc;

	*args = (struct exl3_config_args){.worker_fd = -1};
	rc = read_flags(argc, argv, NULL, &file, args, err);
	if (rc < 0)
		return rc;
	rc = exl3_config_set_defaults(&cfg, err);
	if (rc == 0 && args->worker_fd >= 0) {
		*ret = cfg; /* the supervisor says the rest */
		return 0;
	}
	if (rc == 0 && (file || access(EXL3_CONFIG_PATH, F_OK) == 0)) {
		const char *path = file ? file : EXL3_CONFIG_PATH;

		if (access(path, R_OK) < 0)
			rc = exl3_errf(err, -errno, "%s: %m", path);
		if (rc == 0)
			rc = read_file(&cfg, path, err);
		if (rc == 0)
			rc = read_drop_ins(&cfg, path, err);
	}
	if (rc == 0)
		rc = read_flags(argc, argv, &cfg, &file, args, err);
	if (rc == 0)
		rc = finish(&cfg, err);
	if (rc < 0) {
		exl3_config_fini(&cfg);
		return rc;
	}
	*ret = cfg;
	return 0;
}

int exl3_config_parse_string(const char *text, struct exl3_config *ret, struct exl3_error *err)
{
	struct file_state st = {.err = err, .text = text};
	struct exl3_config cfg;
	int rc;

	st.cfg = &cfg;
	rc = exl3_config_set_defaults(&cfg, err);
	if (rc == 0)
		rc = parse_lines(&st, "configuration");
	if (rc == 0)
		rc = finish(&cfg, err);
	if (rc < 0) {
		exl3_config_fini(&cfg);
		return rc;
	}
	*ret = cfg;
	return 0;
}
