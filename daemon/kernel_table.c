/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_table.c - files of measured choices: which section is for a device, and what is wrong with a line. */
#include "daemon/kernel_table.h"

#include "daemon/log.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define VERSION_LINE "exl3-kernel-table 1"
#define WARNINGS_MAX 8u /* of one file and kind */

/* ---- who measured ---- */

struct build {
	uintptr_t address;
	char *text;
	size_t size, len;
};

static void take_note(struct build *b, const uint8_t *at, size_t bytes)
{
	while (bytes >= sizeof(ElfW(Nhdr))) {
		ElfW(Nhdr) note;
		size_t name, desc;

		memcpy(&note, at, sizeof(note));
		name = (note.n_namesz + 3u) & ~(size_t)3;
		desc = (note.n_descsz + 3u) & ~(size_t)3;
		if (name > bytes - sizeof(note) || desc > bytes - sizeof(note) - name)
			return;
		if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && !memcmp(at + sizeof(note), "GNU", 4)) {
			for (size_t i = 0; i < note.n_descsz && i < 8 && b->len < b->size; i++)
				b->len += (size_t)snprintf(b->text + b->len, b->size - b->len, "%s%02x", i ? "" : "-",
							   at[sizeof(note) + name + i]);
			return;
		}
		at += sizeof(note) + name + desc;
		bytes -= sizeof(note) + name + desc;
	}
}

static int visit(struct dl_phdr_info *info, size_t size, void *arg)
{
	struct build *b = arg;
	bool inside = false;

	(void)size;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];

		inside |= p->p_type == PT_LOAD && b->address - info->dlpi_addr - p->p_vaddr < p->p_memsz;
	}
	for (int i = 0; inside && i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];

		if (p->p_type == PT_NOTE)
			take_note(b, (const uint8_t *)(info->dlpi_addr + p->p_vaddr), p->p_memsz);
	}
	return inside;
}

void exl3_build_text(const void *address, char *text, size_t size)
{
	struct build b = {(uintptr_t)address, text, size, 0};

	b.len = (size_t)snprintf(text, size, "%s", EXL3_DAEMON_VERSION);
	dl_iterate_phdr(visit, &b);
}

void exl3_table_device(const struct exl3_device *device, struct exl3_table_device_info *ret)
{
	memset(ret, 0, sizeof(*ret));
	device->ops->info(device->dev, &ret->info);
	exl3_build_text(device->ops, ret->build, sizeof(ret->build));
	ret->is = (struct exl3_table_device){.backend = device->ops->name,
					     .name = ret->info.name,
					     .isa = ret->info.isa,
					     .driver = ret->info.driver,
					     .build = ret->build,
					     .kernels = device->ops->kernels};
}

static bool same_kind(const struct exl3_device *a, const struct exl3_device *b)
{
	struct exl3_table_device_info x, y;

	if (a->ops != b->ops)
		return false;
	exl3_table_device(a, &x);
	exl3_table_device(b, &y);
	return !strcmp(x.info.name, y.info.name) && !strcmp(x.info.isa, y.info.isa) &&
	       !strcmp(x.info.driver, y.info.driver);
}

uint32_t exl3_table_kind(const struct exl3_devices *all, uint32_t device)
{
	uint32_t i = 0;

	while (i < device && !same_kind(&all->list[i], &all->list[device]))
		i++;
	return i;
}

/* ---- reading ---- */

enum field { DEVICE, ISA, DRIVER, BUILD, DATE, NR_FIELDS };
static const char *const words[NR_FIELDS] = {"device", "isa", "driver", "build", "date"};

struct parser {
	const struct exl3_table_device *device;
	struct exl3_tuned *table; /* owned */
	struct exl3_error *err;
	const char *name;
	bool versioned;
	bool section, seen[NR_FIELDS];
	char why[256];  /* this section is for something else; empty: it is ours */
	char other[256]; /* the first reason of such a section */
	unsigned nr_sections, warnings;
	int line;
};

/* The text of a field without blanks at its end; "-" is empty. */
static void value_of(const char *text, char *buf, size_t size)
{
	size_t len = strcspn(text, "\n");

	while (len && strchr(" \t\r", text[len - 1]))
		len--;
	snprintf(buf, size, "%.*s", len > 300 ? 300 : (int)len, text);
	if (strcmp(buf, "-") == 0)
		*buf = 0;
}

static void demand(struct parser *p, const char *what, const char *got, const char *want)
{
	if (strcmp(got, want) != 0 && !*p->why)
		snprintf(p->why, sizeof(p->why), "%s is '%.80s', here it is '%.80s'", what, got, want);
}

static int take_field(struct parser *p, enum field f, const char *text)
{
	char value[320], ours[320];

	value_of(text, value, sizeof(value));
	if (f == DEVICE) {
		if (*p->why && !*p->other)
			memcpy(p->other, p->why, sizeof(p->other));
		memset(p->seen, 0, sizeof(p->seen));
		*p->why = 0;
		p->section = true;
		p->nr_sections++;
	} else if (!p->section || p->seen[f]) {
		return exl3_errf(p->err, -EINVAL, "%s %s", words[f],
				 p->section ? "twice in a section" : "above the first device");
	}
	p->seen[f] = true;
	switch (f) {
	case DEVICE:
		snprintf(ours, sizeof(ours), "%s %s", p->device->backend, p->device->name);
		demand(p, "the device", value, ours);
		break;
	case ISA:
		demand(p, "isa", value, p->device->isa);
		break;
	case DRIVER:
		demand(p, "the driver", value, p->device->driver);
		break;
	case BUILD:
		demand(p, "the build that measured", value, p->device->build);
		break;
	default:
		break;
	}
	return 0;
}

static int take_choice(struct parser *p, const char *line)
{
	int rc;

	for (enum field f = DEVICE; f <= BUILD; f++) {
		if (!p->seen[f])
			return exl3_errf(p->err, -EINVAL, "no '%s' above it in its section", words[f]);
	}
	if (*p->why)
		return 0; /* names of another build or backend mean nothing here */
	rc = exl3_tuned_add_line(p->table, line, p->device->kernels, p->err);
	if (rc != -ENOENT)
		return rc;
	if (p->warnings++ < WARNINGS_MAX)
		exl3_warn("%s:%d: %s; the line is left out", p->name, p->line, p->err->text);
	return 0;
}

static int take_line(struct parser *p, const char *line)
{
	line += strspn(line, " \t");
	if (!*line || strchr("#\r\n", *line))
		return 0;
	if (!p->versioned) {
		p->versioned = strncmp(line, VERSION_LINE, strlen(VERSION_LINE)) == 0 &&
			       strchr(" \t\r\n", line[strlen(VERSION_LINE)]);
		return p->versioned ? 0
				    : exl3_errf(p->err, -EINVAL, "a kernel table begins with '" VERSION_LINE "'");
	}
	for (enum field f = DEVICE; f < NR_FIELDS; f++) {
		size_t len = strlen(words[f]);

		if (strncmp(line, words[f], len) == 0 && (line[len] == ' ' || line[len] == '\t'))
			return take_field(p, f, line + len + strspn(line + len, " \t"));
	}
	return take_choice(p, line);
}

int exl3_kernel_table_parse(const char *name, const char *text, size_t bytes, const struct exl3_table_device *device,
			    struct exl3_tuned **ret, struct exl3_error *err)
{
	struct parser p = {.device = device, .err = err, .name = name};
	const char *at = text;
	int rc = 0;

	if (memchr(text, 0, bytes))
		return exl3_errf(err, -EINVAL, "%s: not text", name);
	p.table = exl3_tuned_new(name);
	if (!p.table)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", name);
	while (*at && rc == 0) {
		p.line++;
		rc = take_line(&p, at);
		at += strcspn(at, "\n");
		at += *at == '\n';
	}
	if (rc < 0)
		exl3_err_prefix(err, "%s:%d", name, p.line);
	else if (!p.versioned)
		rc = exl3_errf(err, -EINVAL, "%s: a kernel table begins with '" VERSION_LINE "'", name);
	else if ((rc = exl3_tuned_done(p.table, err)) < 0)
		exl3_err_prefix(err, "%s", name);
	if (rc == 0 && p.warnings > WARNINGS_MAX)
		exl3_warn("%s: %u more lines are left out", name, p.warnings - WARNINGS_MAX);
	if (rc == 0 && !p.table->nr) {
		const char *why = *p.other ? p.other : p.why;

		exl3_errf(err, 0, "%s: nothing in it is for %s %.80s: %s", name, device->backend, device->name,
			  *why ? why : p.nr_sections ? "its section is empty" : "it has no section");
	}
	if (rc < 0 || !p.table->nr)
		p.table = exl3_tuned_put(p.table);
	if (rc == 0)
		*ret = p.table;
	return rc;
}

int exl3_kernel_table_read(const char *path, const struct exl3_table_device *device, struct exl3_tuned **ret,
			   struct exl3_error *err)
{
	exl3_auto(exl3_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	exl3_auto(exl3_freep) char *text = NULL;
	size_t len = 0, room;
	struct stat st;

	if (fd < 0)
		return exl3_errf(err, -errno, "%s: %m", path);
	if (fstat(fd, &st) < 0)
		return exl3_errf(err, -errno, "%s: %m", path);
	if (!S_ISREG(st.st_mode))
		return exl3_errf(err, -EINVAL, "%s: not a regular file", path);
	if (st.st_size > (off_t)EXL3_KERNEL_TABLE_MAX)
		return exl3_errf(err, -EFBIG, "%s: more than %u bytes", path, EXL3_KERNEL_TABLE_MAX);
	room = (size_t)st.st_size;
	text = malloc(room + 1);
	if (!text)
		return exl3_errf(err, -ENOMEM, "%s: out of memory", path);
	while (len < room) { /* what is added meanwhile is not read */
		ssize_t n = read(fd, text + len, room - len);

		if (n < 0 && errno != EINTR)
			return exl3_errf(err, -errno, "%s: %m", path);
		if (n == 0)
			break;
		len += n > 0 ? (size_t)n : 0;
	}
	text[len] = 0;
	return exl3_kernel_table_parse(path, text, len, device, ret, err);
}

void exl3_kernel_table_check(const struct exl3_tuned *table, const struct exl3_device *device)
{
	struct exl3_tuned_probe probe;
	char text[EXL3_TUNED_LINE_MAX];
	unsigned warnings = 0;

	for (uint32_t i = 0; i < table->nr; i++) {
		const struct exl3_tuned_line *l = &table->list[i];
		bool can;

		exl3_tuned_probe(&probe, &l->shape, l->m_first);
		can = l->kernel->supports(device->dev, &probe.work);
		exl3_tuned_probe(&probe, &l->shape, l->m_last);
		if ((can && l->kernel->supports(device->dev, &probe.work)) || warnings++ >= WARNINGS_MAX)
			continue;
		exl3_tuned_shape_text(&l->shape, text, sizeof(text));
		exl3_warn("%s: %s cannot run %u to %u rows of linear %s on %s: what it cannot run, others do",
			  table->source, l->kernel->name, l->m_first, l->m_last, text, device->name);
	}
}

/* ---- writing ---- */

int exl3_kernel_table_head(const struct exl3_table_device *is, bool first, char *text, size_t size)
{
	time_t now = time(NULL);
	struct tm tm;
	char date[32];

	gmtime_r(&now, &tm);
	strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &tm);
	return snprintf(text, size, "%s\ndevice %s %s\nisa %s\ndriver %s\nbuild %s\ndate %s\n",
			first ? VERSION_LINE "\n" : "", is->backend, is->name, *is->isa ? is->isa : "-",
			*is->driver ? is->driver : "-", is->build, date);
}
