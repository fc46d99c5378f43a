/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl_top.c - tenants with their limits, and top: rates of models, tenants and clients. */
#include "client/exl3ctl.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int get_tenants(struct ctl *c, Exl3__Reply **ret)
{
	Exl3__ListTenants body = EXL3__LIST_TENANTS__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	req.body_case = EXL3__REQUEST__BODY_LIST_TENANTS;
	req.list_tenants = &body;
	return ctl_call(c, &req, EXL3__REPLY__BODY_TENANTS, EXL3_CALL_TIMEOUT_NS, ret);
}

/* "3/8", or "3" without a limit. One of a few static buffers. */
static const char *of(uint64_t held, uint64_t max)
{
	static char text[4][48];
	static unsigned next;
	char *t = text[next++ % 4];

	if (max)
		snprintf(t, sizeof(text[0]), "%llu/%llu", (unsigned long long)held,
			 (unsigned long long)max);
	else
		snprintf(t, sizeof(text[0]), "%llu", (unsigned long long)held);
	return t;
}

int ctl_tenants(struct ctl *c)
{
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	int e = get_tenants(c, &reply);

	if (e != CTL_OK)
		return e;
	if (c->json)
		return ctl_print_json(&reply->tenants->base, NULL);
	printf("%-20s %6s %4s %9s %9s %11s %10s %10s %7s %12s %8s  %s\n", "NAME", "WEIGHT", "PRIO",
	       "CLIENTS", "CHANNELS", "ROWS", "BYTES", "OF", "REQ/S", "REQUESTS", "ERRORS", "MODELS");
	for (size_t i = 0; i < reply->tenants->n_tenants; i++) {
		const Exl3__Tenant *t = reply->tenants->tenants[i];

		printf("%-20s %6u %4u %9s %9s %11s %10s", ctl_safe(t->name), t->weight, t->priority,
		       of(t->clients, t->clients_max), of(t->channels, t->channels_max),
		       of(t->rows_in_flight, t->rows_max), ctl_bytes(t->bytes));
		printf(" %10s", t->bytes_max ? ctl_bytes(t->bytes_max) : "-");
		if (t->requests_per_second)
			printf(" %7llu", (unsigned long long)t->requests_per_second);
		else
			printf(" %7s", "-");
		printf(" %12llu %8llu  %s%s\n", (unsigned long long)t->requests,
		       (unsigned long long)t->errors, ctl_safe(t->models),
		       t->retired ? " (no longer configured)" : "");
	}
	return CTL_OK;
}

/* ---- top ---- */

/* Everything that one picture shows. */
struct sample {
	Exl3__Reply *status, *tenants, *ps; /* owned */
	uint64_t at_ns;
};

static void sample_free(struct sample *s)
{
	exl3_reply_freep(&s->status);
	exl3_reply_freep(&s->tenants);
	exl3_reply_freep(&s->ps);
}

static int sample_take(struct ctl *c, struct sample *s)
{
	int e;

	*s = (struct sample){0};
	e = ctl_get_status(c, &s->status);
	if (e == CTL_OK)
		e = get_tenants(c, &s->tenants);
	if (e == CTL_OK)
		e = ctl_get_ps(c, &s->ps);
	s->at_ns = exl3_now_ns();
	if (e != CTL_OK)
		sample_free(s);
	return e;
}

/* A counter that is below what it was belongs to another worker, or to a model that was loaded again. */
static double rate(uint64_t now, uint64_t before, double seconds)
{
	return seconds > 0 && now >= before ? (double)(now - before) / seconds : 0;
}

static const Exl3__Model *find_model(const struct sample *s, const char *name)
{
	for (size_t i = 0; s->status && i < s->status->status->n_models; i++)
		if (!strcmp(s->status->status->models[i]->name, name))
			return s->status->status->models[i];
	return NULL;
}

static const Exl3__Tenant *find_tenant(const struct sample *s, const char *name)
{
	for (size_t i = 0; s->tenants && i < s->tenants->tenants->n_tenants; i++)
		if (!strcmp(s->tenants->tenants->tenants[i]->name, name))
			return s->tenants->tenants->tenants[i];
	return NULL;
}

static const Exl3__PsClient *find_client(const struct sample *s, const Exl3__PsClient *like)
{
	for (size_t i = 0; s->ps && i < s->ps->ps->n_clients; i++) {
		const Exl3__PsClient *p = s->ps->ps->clients[i];

		if (p->pid == like->pid && p->connected_ms <= like->connected_ms &&
		    !strcmp(p->name, like->name))
			return p;
	}
	return NULL;
}

static void print_models(const struct sample *now, const struct sample *before, double seconds)
{
	printf("\n%12s %12s %8s %10s  %s\n", "REQUESTS/S", "ROWS/S", "CLIENTS", "WEIGHTS", "MODEL");
	for (size_t i = 0; i < now->status->status->n_models; i++) {
		const Exl3__Model *m = now->status->status->models[i];
		const Exl3__Model *then = find_model(before, m->name);

		printf("%12.0f %12.0f %8u %10s  %s\n",
		       then ? rate(m->requests, then->requests, seconds) : 0,
		       then ? rate(m->rows, then->rows, seconds) : 0, m->clients,
		       ctl_bytes(m->weight_bytes), ctl_safe(m->name));
	}
}

static void print_tenants(const struct sample *now, const struct sample *before, double seconds)
{
	printf("\n%12s %12s %7s %8s %8s %10s %9s  %s\n", "REQUESTS/S", "ROWS/S", "DEVICE", "QUEUED",
	       "CLIENTS", "BYTES", "DELAYED/S", "TENANT");
	for (size_t i = 0; i < now->tenants->tenants->n_tenants; i++) {
		const Exl3__Tenant *t = now->tenants->tenants->tenants[i];
		const Exl3__Tenant *then = find_tenant(before, t->name);

		printf("%12.0f %12.0f %6.1f%% %8llu %8u %10s %9.0f  %s\n",
		       then ? rate(t->requests, then->requests, seconds) : 0,
		       then ? rate(t->rows, then->rows, seconds) : 0,
		       then ? rate(t->device_ns, then->device_ns, seconds) / 1e7 : 0,
		       (unsigned long long)t->queued, t->clients, ctl_bytes(t->bytes),
		       then ? rate(t->delayed, then->delayed, seconds) : 0, ctl_safe(t->name));
	}
}

static void print_clients(const struct sample *now, const struct sample *before, double seconds)
{
	printf("\n%12s %12s %8s %10s %-12s %s\n", "REQUESTS/S", "ROWS/S", "PID", "ARENAS", "TENANT",
	       "CLIENT");
	for (size_t i = 0; i < now->ps->ps->n_clients; i++) {
		const Exl3__PsClient *p = now->ps->ps->clients[i], *then = find_client(before, p);

		printf("%12.0f %12.0f %8d %10s %-12s %s\n",
		       then ? rate(p->requests, then->requests, seconds) : 0,
		       then ? rate(p->rows, then->rows, seconds) : 0, p->pid,
		       ctl_bytes(p->arena_bytes), ctl_safe(p->tenant), ctl_safe(p->name));
	}
}

static void print_top(const struct sample *now, const struct sample *before)
{
	const Exl3__StatusReply *s = now->status->status,
				*then = before->status ? before->status->status : NULL;
	double seconds = then ? (double)(now->at_ns - before->at_ns) / 1e9 : 0;

	if (isatty(STDOUT_FILENO))
		printf("\033[H\033[J");
	printf("exl3-daemon %s: clients %u, weights %s, arenas %s, %.0f requests/s, %.0f launches/s, "
	       "device %.0f %%, %llu failed\n",
	       ctl_safe(s->state), s->clients, ctl_bytes(s->weight_bytes), ctl_bytes(s->arena_bytes),
	       then ? rate(s->requests, then->requests, seconds) : 0,
	       then ? rate(s->launches, then->launches, seconds) : 0,
	       then ? rate(s->launch_ns, then->launch_ns, seconds) / 1e7 : 0,
	       (unsigned long long)s->errors);
	print_models(now, before, seconds);
	print_tenants(now, before, seconds);
	print_clients(now, before, seconds);
	fflush(stdout);
}

static bool parse_positive(const char *text, double *ret)
{
	char *end;

	*ret = strtod(text, &end);
	return end != text && !*end && *ret > 0 && *ret < 1e9;
}

/* On a terminal until Ctrl-C, the first picture at once; elsewhere one picture, with the rates of one interval. */
int ctl_top(struct ctl *c)
{
	bool terminal = isatty(STDOUT_FILENO);
	double interval = 1, count = terminal ? 1e9 : 1;
	struct sample now, before = {0};
	int e;

	if ((c->interval && !parse_positive(c->interval, &interval)) ||
	    (c->count && !parse_positive(c->count, &count)))
		return ctl_error(CTL_USAGE, "--interval and --count take a positive number");
	for (double shown = 0; shown < count;) {
		e = sample_take(c, &now);
		if (e != CTL_OK) {
			sample_free(&before);
			return e;
		}
		if (terminal || before.status) {
			print_top(&now, &before);
			shown++;
		}
		sample_free(&before);
		before = now;
		if (shown < count)
			usleep((useconds_t)(interval * 1e6));
	}
	sample_free(&before);
	return CTL_OK;
}
