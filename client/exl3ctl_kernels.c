/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_kernels.c - kernels: which there are, which a module gets and why; calibrate: measures which are the fastest. */
#include "client/exl3ctl.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void print_choices(const Exl3__Kernels *k)
{
	printf("linear %s on %s\n%11s  %-20s %s\n", ctl_safe(k->shape), ctl_safe(k->device), "ROWS", "KERNEL", "WHY");
	for (size_t i = 0; i < k->n_choices; i++) {
		const Exl3__KernelChoice *choice = k->choices[i];

		printf("%5u-%-5u  %-20s %s\n", choice->m_first, choice->m_last,
		       *choice->kernel ? ctl_safe(choice->kernel) : "-", ctl_safe(choice->why));
	}
}

int ctl_kernels(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	Exl3__ListKernels body = EXL3__LIST_KERNELS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	const Exl3__Kernels *k;
	int e;

	if (c->nr_args == 1)
		return ctl_error(CTL_USAGE, "usage: exl3ctl kernels [MODEL MODULE]");
	body.device = (char *)(uintptr_t)(c->device ? c->device : "");
	if (c->nr_args == 2) {
		body.model = (char *)(uintptr_t)c->args[0];
		body.module = (char *)(uintptr_t)c->args[1];
	}
	req.body_case = EXL3__REQUEST__BODY_LIST_KERNELS;
	req.list_kernels = &body;
	e = ctl_call(c, &req, EXL3__REPLY__BODY_KERNELS, EXL3_CALL_TIMEOUT_NS, &reply);
	if (e != CTL_OK)
		return e;
	k = reply->kernels;
	if (c->json)
		return ctl_print_json(&k->base, NULL);
	if (c->nr_args == 2)
		print_choices(k);
	for (size_t i = 0; i < k->n_names; i++)
		printf("%s%s\n", ctl_safe(k->names[i]),
		       i < k->n_usable && !k->usable[i] ? "  (not on this device)" : "");
	return CTL_OK;
}

/* ---- calibrate ---- */

#define LOOK_NS 200000000l

static int ask(struct ctl *c, uint64_t start, Exl3__Reply **ret)
{
	Exl3__CalibrateStatus body = EXL3__CALIBRATE_STATUS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	body.start = start;
	req.body_case = EXL3__REQUEST__BODY_CALIBRATE_STATUS;
	req.calibrate_status = &body;
	return ctl_call(c, &req, EXL3__REPLY__BODY_CALIBRATE, EXL3_CALL_TIMEOUT_NS, ret);
}

/* On a terminal one line that changes, else one for each shape. */
static void show(const Exl3__CalibrateReply *p, bool terminal, uint32_t *shown)
{
	if (!*p->what || (!terminal && *shown == p->shapes_done + 1))
		return;
	*shown = p->shapes_done + 1;
	fprintf(stderr, "%s%u of %u: %s%s", terminal ? "\r\033[K" : "", p->shapes_done + 1, p->shapes,
		ctl_safe(p->what), terminal ? "" : "\n");
	if (terminal)
		fprintf(stderr, ", %u rows, %llu launches", p->rows, (unsigned long long)p->launches);
	fflush(stderr);
}

/* Until it has ended: what it came to, with the first page of the table. */
static int wait_for_end(struct ctl *c, Exl3__Reply **ret)
{
	bool terminal = isatty(STDERR_FILENO);
	uint32_t shown = 0;

	for (;;) {
		exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
		int e = ask(c, 0, &reply);

		if (e != CTL_OK)
			return e;
		if (!strcmp(reply->calibrate->state, "done") || !strcmp(reply->calibrate->state, "failed")) {
			if (terminal)
				fprintf(stderr, "\r\033[K");
			*ret = exl3_take_ptr(&reply);
			return CTL_OK;
		}
		show(reply->calibrate, terminal, &shown);
		nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
	}
}

/* All pages into @f. */
static int save(struct ctl *c, const Exl3__CalibrateReply *first, FILE *f)
{
	uint64_t next = first->next;

	fputs(first->table, f);
	while (next) {
		exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
		int e = ask(c, next, &reply);

		if (e != CTL_OK)
			return e;
		if (strcmp(reply->calibrate->state, "done") || reply->calibrate->next == next)
			return ctl_error(CTL_REFUSED, "another calibration has begun: the table of this one is gone");
		fputs(reply->calibrate->table, f);
		next = reply->calibrate->next;
	}
	return CTL_OK;
}

/* A daemon that reads it meanwhile sees the old one or the new one. */
static int save_as(struct ctl *c, const Exl3__CalibrateReply *first, const char *path)
{
	char other[PATH_MAX];
	FILE *f;
	int e;

	if (snprintf(other, sizeof(other), "%s.new", path) >= (int)sizeof(other))
		return ctl_error(CTL_LOCAL, "path is too long: %s", path);
	f = fopen(other, "we");
	if (!f)
		return ctl_error(CTL_LOCAL, "%s: %m", other);
	e = save(c, first, f);
	if (e == CTL_OK && (fflush(f) || ferror(f) || fsync(fileno(f))))
		e = ctl_error(CTL_LOCAL, "%s: %m", other);
	if (fclose(f) && e == CTL_OK)
		e = ctl_error(CTL_LOCAL, "%s: %m", other);
	if (e == CTL_OK && rename(other, path) < 0)
		e = ctl_error(CTL_LOCAL, "%s: %m", path);
	if (e != CTL_OK)
		unlink(other);
	return e;
}

int ctl_calibrate(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *started = NULL, *reply = NULL;
	Exl3__Calibrate body = EXL3__CALIBRATE__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	int e;

	body.n_models = (size_t)c->nr_args;
	body.models = (char **)(uintptr_t)c->args;
	body.apply = c->apply;
	req.body_case = EXL3__REQUEST__BODY_CALIBRATE;
	req.calibrate = &body;
	e = ctl_call(c, &req, EXL3__REPLY__BODY__NOT_SET, EXL3_CALL_TIMEOUT_NS, &started);
	if (e == CTL_OK)
		e = wait_for_end(c, &reply);
	if (e != CTL_OK)
		return e;
	if (!strcmp(reply->calibrate->state, "failed"))
		return ctl_error(CTL_REFUSED, "%s", ctl_safe(reply->calibrate->error));
	e = c->output ? save_as(c, reply->calibrate, c->output) : save(c, reply->calibrate, stdout);
	if (e == CTL_OK && c->output)
		fprintf(stderr, "%s: %llu launches; the daemon reads it with kernel-table = %s\n", c->output,
			(unsigned long long)reply->calibrate->launches, c->output);
	return e;
}
