/* SPDX-License-Identifier: Apache-2.0 */
/* metrics.c - what a worker has done and holds: counting, and Prometheus' text format. */
#include "daemon/metrics.h"

#include <errno.h>
#include <string.h>

#define FIRST_TIME 3 /* log2 of the first bucket's microseconds */

/* Of requests; others are "other". The order is that of the columns. */
static const struct {
	int code;
	const char *name;
} codes[EXL3_METRIC_CODES] = {
	{0, "ok"},
	{-EINVAL, "EINVAL"},
	{-ENOENT, "ENOENT"},
	{-EOPNOTSUPP, "EOPNOTSUPP"},
	{-ECANCELED, "ECANCELED"},
	{-EALREADY, "EALREADY"},
	{-ETIME, "ETIME"},
	{-EIO, "EIO"},
	{-ESHUTDOWN, "ESHUTDOWN"},
	{-ENOMEM, "ENOMEM"},
	{-EDQUOT, "EDQUOT"},
	{-EAGAIN, "EAGAIN"},
	{-EPERM, "EPERM"},
	{-ETIMEDOUT, "ETIMEDOUT"},
	{-ESTALE, "ESTALE"},
	{1, "other"},
};

static const char *const ops[EXL3_METRIC_OPS] = {
	[EXL3_OP_NOP] = "nop", [EXL3_OP_LINEAR] = "linear",         [EXL3_OP_MOE] = "moe",
	[EXL3_OP_MLP] = "mlp", [EXL3_OP_MLA_DECODE] = "mla_decode", [EXL3_OP_CANCEL] = "cancel",
	[EXL3_OP_PLAN] = "plan",
	[EXL3_OP_NR] = "invalid"};

static const char *const kinds[EXL3_BYTES_NR] = {
	[EXL3_BYTES_ARENA] = "arena", [EXL3_BYTES_IMPORT] = "import", [EXL3_BYTES_RING] = "ring"};

/* ---- counting ---- */

/* Which of the buckets 2^@first, 2^(first + 1), ... the value is in; the last one takes the rest. */
static unsigned bucket(uint64_t value, unsigned first, unsigned nr)
{
	unsigned log = value > 1 ? 64 - (unsigned)__builtin_clzll(value - 1) : 0; /* rounded up */

	if (log <= first)
		return 0;
	return log - first < nr - 1 ? log - first : nr - 1;
}

void exl3_metric_time(struct exl3_metric_times *t, uint64_t ns)
{
	exl3_metric_add(&t->bucket[bucket((ns + 999) / 1000, FIRST_TIME, EXL3_METRIC_TIMES)], 1);
	exl3_metric_add(&t->sum_ns, ns);
}

void exl3_metric_request(struct exl3_metrics_tenant *t, uint8_t op, int result)
{
	unsigned code = 0;

	while (code < EXL3_METRIC_CODES - 1 && codes[code].code != result)
		code++;
	exl3_metric_add(&t->requests[op < EXL3_OP_NR ? op : EXL3_OP_NR][code], 1);
}

void exl3_metric_launch(struct exl3_metrics_op *op, uint64_t ns, uint32_t rows, uint32_t items,
			uint32_t slices, uint64_t weight_bytes)
{
	exl3_metric_time(&op->launch, ns);
	exl3_metric_add(&op->rows_bucket[bucket(rows, 0, EXL3_METRIC_ROWS)], 1);
	exl3_metric_add(&op->rows, rows);
	exl3_metric_add(&op->merged, items > 1 ? items : 0);
	exl3_metric_add(&op->slices, slices);
	exl3_metric_add(&op->weight_bytes, weight_bytes);
}

/* ---- labels ---- */

void exl3_metric_label_drop(struct exl3_metric_label *label)
{
	if (label->used & 1)
		__atomic_store_n(&label->used, label->used + 1, __ATOMIC_RELEASE);
}

void exl3_metric_label_set(struct exl3_metric_label *label, size_t bytes, const char *text)
{
	uint64_t *numbers = (uint64_t *)(label + 1);
	size_t len = strlen(text);

	exl3_metric_label_drop(label);
	for (size_t i = 0; i < (bytes - sizeof(*label)) / sizeof(*numbers); i++)
		exl3_metric_set(&numbers[i], 0);
	if (len > EXL3_METRIC_LABEL_MAX)
		len = EXL3_METRIC_LABEL_MAX;
	for (size_t i = 0; i < sizeof(label->text) / 8; i++) {
		uint64_t word = 0;

		if (8 * i < len)
			memcpy(&word, text + 8 * i, len - 8 * i < 8 ? len - 8 * i : 8);
		exl3_metric_set(&label->text[i], word);
	}
	__atomic_store_n(&label->used, label->used + 1, __ATOMIC_RELEASE);
}

struct exl3_metrics_model *exl3_metrics_add_model(struct exl3_metrics *m, const char *name)
{
	for (size_t i = 0; i < EXL3_MODELS_MAX; i++) {
		if (m->model[i].label.used & 1)
			continue;
		exl3_metric_label_set(&m->model[i].label, sizeof(m->model[i]), name);
		return &m->model[i];
	}
	return NULL;
}

/* The escaped text of a label; 0: nobody's, or it has changed hands meanwhile. */
static uint64_t label_text(const struct exl3_metric_label *label, char out[2 * EXL3_METRIC_LABEL_MAX + 1])
{
	uint64_t used = __atomic_load_n(&label->used, __ATOMIC_ACQUIRE);
	uint64_t words[sizeof(label->text) / 8];
	const char *p = (const char *)words;
	char *to = out;

	if (!(used & 1))
		return 0;
	for (size_t i = 0; i < sizeof(words) / 8; i++)
		words[i] = __atomic_load_n(&label->text[i], __ATOMIC_ACQUIRE);
	if (__atomic_load_n(&label->used, __ATOMIC_RELAXED) != used)
		return 0;
	for (size_t i = 0; i < EXL3_METRIC_LABEL_MAX && p[i]; i++) {
		if (p[i] == '\\' || p[i] == '"' || p[i] == '\n')
			*to++ = '\\';
		*to++ = p[i] == '\n' ? 'n' : p[i];
	}
	*to = 0;
	return used;
}

/* ---- text ---- */

static uint64_t load(const uint64_t *at)
{
	return __atomic_load_n(at, __ATOMIC_RELAXED);
}

static void head(FILE *f, const char *name, const char *type, const char *help)
{
	fprintf(f, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void value(FILE *f, const char *name, const char *labels, uint64_t v)
{
	fprintf(f, "%s%s %llu\n", name, labels, (unsigned long long)v);
}

/* @label: KEY="VALUE". Count is what the buckets add up to, so that the two always agree. */
static void times(FILE *f, const char *name, const char *label, const struct exl3_metric_times *t)
{
	uint64_t count = 0;

	for (unsigned i = 0; i < EXL3_METRIC_TIMES; i++) {
		count += load(&t->bucket[i]);
		if (i < EXL3_METRIC_TIMES - 1)
			fprintf(f, "%s_bucket{%s,le=\"%.6f\"} %llu\n", name, label,
				(double)(1u << (FIRST_TIME + i)) / 1e6, (unsigned long long)count);
	}
	fprintf(f, "%s_bucket{%s,le=\"+Inf\"} %llu\n", name, label, (unsigned long long)count);
	fprintf(f, "%s_sum{%s} %.9f\n", name, label, (double)load(&t->sum_ns) / 1e9);
	fprintf(f, "%s_count{%s} %llu\n", name, label, (unsigned long long)count);
}

static void rows(FILE *f, const char *op, const struct exl3_metrics_op *o)
{
	uint64_t count = 0;

	for (unsigned i = 0; i < EXL3_METRIC_ROWS; i++) {
		count += load(&o->rows_bucket[i]);
		if (i < EXL3_METRIC_ROWS - 1)
			fprintf(f, "exl3_launch_rows_bucket{op=\"%s\",le=\"%u\"} %llu\n", op, 1u << i,
				(unsigned long long)count);
	}
	fprintf(f, "exl3_launch_rows_bucket{op=\"%s\",le=\"+Inf\"} %llu\n", op,
		(unsigned long long)count);
	fprintf(f, "exl3_launch_rows_sum{op=\"%s\"} %llu\n", op, (unsigned long long)load(&o->rows));
	fprintf(f, "exl3_launch_rows_count{op=\"%s\"} %llu\n", op, (unsigned long long)count);
}

/* A family with one number per tenant. */
static void per_tenant(const struct exl3_metrics *m, FILE *f, const char *name, const char *type,
		       const char *help, size_t offset)
{
	char text[2 * EXL3_METRIC_LABEL_MAX + 1], labels[sizeof(text) + 16];

	head(f, name, type, help);
	for (size_t i = 0; i < EXL3_TENANTS_MAX; i++) {
		const struct exl3_metrics_tenant *t = &m->tenant[i];

		if (!label_text(&t->label, text))
			continue;
		snprintf(labels, sizeof(labels), "{tenant=\"%s\"}", text);
		value(f, name, labels, load((const uint64_t *)((const char *)t + offset)));
	}
}

#define TENANT(field) offsetof(struct exl3_metrics_tenant, field)

static void print_requests(const struct exl3_metrics *m, FILE *f)
{
	char text[2 * EXL3_METRIC_LABEL_MAX + 1];

	head(f, "exl3_requests_total", "counter", "Requests completed, by result.");
	for (size_t i = 0; i < EXL3_TENANTS_MAX; i++) {
		const struct exl3_metrics_tenant *t = &m->tenant[i];

		if (!label_text(&t->label, text))
			continue;
		for (unsigned op = 0; op < EXL3_METRIC_OPS; op++) {
			for (unsigned code = 0; code < EXL3_METRIC_CODES; code++) {
				uint64_t n = load(&t->requests[op][code]);

				if (n)
					fprintf(f,
						"exl3_requests_total{op=\"%s\",tenant=\"%s\",code=\"%s\"} "
						"%llu\n",
						ops[op], text, codes[code].name,
						(unsigned long long)n);
			}
		}
	}
}

static void print_tenants(const struct exl3_metrics *m, FILE *f)
{
	char text[2 * EXL3_METRIC_LABEL_MAX + 1], label[sizeof(text) + 16];

	print_requests(m, f);
	per_tenant(m, f, "exl3_rows_total", "counter", "Rows of requests that succeeded.",
		   TENANT(rows));
	head(f, "exl3_queue_seconds", "histogram",
	     "Time from a request's acceptance to the start of its first launch.");
	for (size_t i = 0; i < EXL3_TENANTS_MAX; i++) {
		if (!label_text(&m->tenant[i].label, text))
			continue;
		snprintf(label, sizeof(label), "tenant=\"%s\"", text);
		times(f, "exl3_queue_seconds", label, &m->tenant[i].queue);
	}
	head(f, "exl3_tenant_device_seconds_total", "counter",
	     "Device time of its launches; of a shared one by its rows.");
	for (size_t i = 0; i < EXL3_TENANTS_MAX; i++) {
		if (label_text(&m->tenant[i].label, text))
			fprintf(f, "exl3_tenant_device_seconds_total{tenant=\"%s\"} %.9f\n", text,
				(double)load(&m->tenant[i].device_ns) / 1e9);
	}
	head(f, "exl3_delayed_total", "counter",
	     "Times that a ring waited because its tenant was at a limit.");
	for (size_t i = 0; i < EXL3_TENANTS_MAX; i++) {
		const struct exl3_metrics_tenant *t = &m->tenant[i];

		if (!label_text(&t->label, text))
			continue;
		fprintf(f,
			"exl3_delayed_total{tenant=\"%s\",limit=\"requests-per-second\"} %llu\n"
			"exl3_delayed_total{tenant=\"%s\",limit=\"rows\"} %llu\n",
			text, (unsigned long long)load(&t->delayed_rate), text,
			(unsigned long long)load(&t->delayed_rows));
	}
	per_tenant(m, f, "exl3_tenant_clients", "gauge", "Clients connected.", TENANT(clients));
	per_tenant(m, f, "exl3_tenant_channels", "gauge", "Channels, with those that are closing.",
		   TENANT(channels));
	per_tenant(m, f, "exl3_tenant_rows_in_flight", "gauge",
		   "Rows of requests accepted and not complete.", TENANT(rows_now));
	per_tenant(m, f, "exl3_ring_credits", "gauge",
		   "Requests that its channels can have outstanding.", TENANT(credits));
	per_tenant(m, f, "exl3_ring_credits_used", "gauge", "Requests taken and not answered.",
		   TENANT(credits_used));
	head(f, "exl3_tenant_bytes", "gauge", "Registered memory.");
	for (size_t i = 0; i < EXL3_TENANTS_MAX; i++) {
		if (!label_text(&m->tenant[i].label, text))
			continue;
		for (unsigned k = 0; k < EXL3_BYTES_NR; k++)
			fprintf(f, "exl3_tenant_bytes{tenant=\"%s\",kind=\"%s\"} %llu\n", text, kinds[k],
				(unsigned long long)load(&m->tenant[i].bytes[k]));
	}
}

static void print_ops(const struct exl3_metrics *m, FILE *f)
{
	static const struct {
		const char *name, *help;
		size_t offset;
	} counters[] = {
		{"exl3_merged_requests_total", "Requests that shared a launch with others.",
		 offsetof(struct exl3_metrics_op, merged)},
		{"exl3_slices_total", "Parts of longer requests among what was launched.",
		 offsetof(struct exl3_metrics_op, slices)},
		{"exl3_weight_read_bytes_total",
		 "Weights that launches read; of routed experts, at most.",
		 offsetof(struct exl3_metrics_op, weight_bytes)},
	};
	char label[32];

	head(f, "exl3_device_seconds", "histogram", "Time of a launch on the device.");
	for (unsigned op = EXL3_OP_NOP; op <= EXL3_OP_MLA_DECODE; op++) {
		snprintf(label, sizeof(label), "op=\"%s\"", ops[op]);
		times(f, "exl3_device_seconds", label, &m->op[op].launch);
	}
	head(f, "exl3_launch_rows", "histogram", "Rows per launch.");
	for (unsigned op = EXL3_OP_NOP; op <= EXL3_OP_MLA_DECODE; op++)
		rows(f, ops[op], &m->op[op]);
	for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
		head(f, counters[i].name, "counter", counters[i].help);
		for (unsigned op = EXL3_OP_NOP; op <= EXL3_OP_MLA_DECODE; op++) {
			snprintf(label, sizeof(label), "{op=\"%s\"}", ops[op]);
			value(f, counters[i].name, label,
			      load((const uint64_t *)((const char *)&m->op[op] +
						      counters[i].offset)));
		}
	}
}

static void print_models(const struct exl3_metrics *m, FILE *f)
{
	char text[2 * EXL3_METRIC_LABEL_MAX + 1];

	head(f, "exl3_model_requests_total", "counter", "Requests that succeeded.");
	for (size_t i = 0; i < EXL3_MODELS_MAX; i++) {
		if (label_text(&m->model[i].label, text))
			fprintf(f, "exl3_model_requests_total{model=\"%s\"} %llu\n", text,
				(unsigned long long)load(&m->model[i].requests));
	}
	head(f, "exl3_model_rows_total", "counter", "Rows of requests that succeeded.");
	for (size_t i = 0; i < EXL3_MODELS_MAX; i++) {
		if (label_text(&m->model[i].label, text))
			fprintf(f, "exl3_model_rows_total{model=\"%s\"} %llu\n", text,
				(unsigned long long)load(&m->model[i].rows));
	}
	head(f, "exl3_model_mappers", "gauge", "Clients that have its weights in their own process.");
	for (uint32_t i = 0; i < EXL3_MODELS_MAX; i++) {
		if (label_text(&m->model[i].label, text))
			fprintf(f, "exl3_model_mappers{model=\"%s\"} %llu\n", text,
				(unsigned long long)load(&m->model[i].mappers));
	}
	head(f, "exl3_model_bytes", "gauge", "Memory of models that are ready.");
	for (size_t i = 0; i < EXL3_MODELS_MAX; i++) {
		const struct exl3_metrics_model *model = &m->model[i];

		if (!label_text(&model->label, text))
			continue;
		fprintf(f,
			"exl3_model_bytes{model=\"%s\",kind=\"weights\"} %llu\n"
			"exl3_model_bytes{model=\"%s\",kind=\"tensors\"} %llu\n"
			"exl3_model_bytes{model=\"%s\",kind=\"overhead\"} %llu\n",
			text, (unsigned long long)load(&model->weight_bytes), text,
			(unsigned long long)load(&model->tensor_bytes), text,
			(unsigned long long)load(&model->overhead_bytes));
	}
}

static void single(FILE *f, const char *name, const char *type, const char *help, uint64_t v)
{
	head(f, name, type, help);
	value(f, name, "", v);
}

void exl3_metrics_print(const struct exl3_metrics *m, FILE *f)
{
	head(f, "exl3_build_info", "gauge", "Always 1.");
	fprintf(f, "exl3_build_info{version=\"%s\",backend=\"%s\",domain=\"%s\"} 1\n", m->version,
		m->backend, m->domain);
	single(f, "exl3_worker_generation", "gauge",
	       "Of the worker, 1 at the start, one more after each restart; all numbers are its own.",
	       m->generation);
	head(f, "exl3_worker_start_time_seconds", "gauge", "When the worker was started, Unix time.");
	fprintf(f, "exl3_worker_start_time_seconds %.3f\n", (double)m->start_time_ms / 1e3);
	single(f, "exl3_worker_restarts_total", "counter",
	       "Workers of this domain that ended otherwise than asked, since the daemon started.",
	       m->generation - 1);
	single(f, "exl3_clients", "gauge", "Clients connected.", load(&m->clients));
	single(f, "exl3_refused_clients", "gauge", "Clients connected that are only told why not.",
	       load(&m->refused));
	single(f, "exl3_channels", "gauge", "Channels, with those that are closing.",
	       load(&m->channels));
	single(f, "exl3_wakeups_total", "counter", "System calls made to wake clients.",
	       load(&m->wakeups));
	single(f, "exl3_loop_syscalls_total", "counter",
	       "System calls of the loop to sleep and to watch descriptors.",
	       load(&m->loop_syscalls));
	single(f, "exl3_trains_total", "counter", "Groups of decoders that began a step together.",
	       load(&m->trains));
	single(f, "exl3_train_late_total", "counter", "Decoders that missed their train.",
	       load(&m->train_late));
	single(f, "exl3_train_joined_total", "counter", "Decoders that got on another train on its way.",
	       load(&m->train_joined));
	single(f, "exl3_train_expelled_total", "counter",
	       "Decoders that made others wait too much and go with their like for some steps.",
	       load(&m->train_expelled));
	head(f, "exl3_train_held_seconds_total", "counter",
	     "Time that the first request of a train's launch waited for its company.");
	fprintf(f, "exl3_train_held_seconds_total %.6f\n", (double)load(&m->train_held_ns) / 1e9);
	head(f, "exl3_faults_total", "counter", "Channels whose client broke the protocol; devices lost.");
	value(f, "exl3_faults_total", "{kind=\"channel\"}", load(&m->channel_faults));
	value(f, "exl3_faults_total", "{kind=\"device\"}", load(&m->device_faults));
	print_tenants(m, f);
	print_ops(m, f);
	print_models(m, f);
}
