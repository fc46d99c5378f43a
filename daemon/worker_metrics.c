/* SPDX-License-Identifier: Apache-2.0 */
/* worker_metrics.c - the worker's part of the metrics: where they are asked for, and what it alone knows. */
#include "daemon/log.h"
#include "daemon/worker.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

void exl3_worker_metrics_start(struct exl3_worker *w)
{
	const struct exl3_config *cfg = w->cfg;
	bool other = strcmp(w->domain, EXL3_DOMAIN_DEFAULT) != 0;
	struct exl3_metrics *m = &w->metrics;
	const char *given = cfg->metrics_socket;
	char path[256];
	struct exl3_error err;
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	m->generation = w->generation;
	m->start_time_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
	snprintf(m->backend, sizeof(m->backend), "%s", w->devices.list[0].ops->name);
	snprintf(m->domain, sizeof(m->domain), "%s", w->domain);
	snprintf(m->version, sizeof(m->version), "%s", EXL3_DAEMON_VERSION);
	w->policy.metrics = m;
	if (given && strcmp(given, "none") == 0 && (other || !cfg->metrics_port))
		return;
	/* A socket for each domain; the port is the default one's. */
	snprintf(path, sizeof(path), "%.100s%s%s%s", given ? given : cfg->socket,
		 given ? "" : ".metrics", other ? "." : "", other ? w->domain : "");
	if (exl3_metrics_http_new(m, given && strcmp(given, "none") == 0 ? NULL : path,
				  other ? 0 : (uint16_t)cfg->metrics_port, &w->http, &err) < 0)
		exl3_warn("no metrics: %s", err.text); /* which is no reason not to serve */
}

void exl3_worker_metrics_publish(struct exl3_worker *w)
{
	struct exl3_metrics *m = &w->metrics;
	struct exl3_sched_stats stats;

	exl3_dispatch_merging(w->dispatch, &stats);
	exl3_metric_set(&m->trains, stats.trains);
	exl3_metric_set(&m->train_late, stats.late);
	exl3_metric_set(&m->train_joined, stats.joined);
	exl3_metric_set(&m->train_expelled, stats.expelled);
	exl3_metric_set(&m->train_held_ns, stats.held_ns);
	exl3_metric_set(&m->wakeups, exl3_dispatch_syscalls(w->dispatch));
	exl3_metric_set(&m->loop_syscalls, exl3_loop_syscalls(w->loop));
	exl3_metric_set(&m->clients, w->nr_peers);
	exl3_metric_set(&m->refused, w->nr_refused);
	exl3_metric_set(&m->channels, exl3_dispatch_channels(w->dispatch));
	exl3_policy_publish(&w->policy);
}

void exl3_worker_metrics_model(struct exl3_worker *w, struct exl3_registered *reg,
			       enum exl3_models_event event)
{
	if (event == EXL3_MODELS_LOADED && !reg->metrics) {
		reg->metrics = exl3_metrics_add_model(&w->metrics, reg->name);
		if (!reg->metrics)
			return;
		exl3_metric_set(&reg->metrics->weight_bytes, reg->model->weight_bytes);
		exl3_metric_set(&reg->metrics->tensor_bytes, reg->model->tensor_bytes);
		exl3_metric_set(&reg->metrics->overhead_bytes, reg->model->overhead_bytes);
	} else if (event == EXL3_MODELS_GONE && reg->metrics) {
		exl3_metric_label_drop(&reg->metrics->label);
		reg->metrics = NULL;
	}
}
