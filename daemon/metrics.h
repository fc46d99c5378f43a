/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metrics.h - what a worker has done and holds, as numbers that another thread can read at any time.
 *
 * The loop thread alone writes, each number with one relaxed store, and never waits; readers load each number
 * once. So numbers that belong together may be a moment apart, and a reader that stalls delays nobody.
 * Everything begins at 0 with each worker: exl3_worker_generation and exl3_worker_start_time_seconds tell one
 * from the next.
 */
#ifndef EXL3_DAEMON_METRICS_H
#define EXL3_DAEMON_METRICS_H

#include "daemon/config.h"
#include "shm/exl3_abi.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define EXL3_METRIC_OPS       (EXL3_OP_NR + 1) /* and one for what is no operation */
#define EXL3_METRIC_CODES     16u
#define EXL3_METRIC_TIMES     24u /* buckets: 2^3 us, 2^4 us, ... and the rest */
#define EXL3_METRIC_ROWS      15u /* buckets: 1, 2, 4, ... 8192, and the rest */
#define EXL3_METRIC_LABEL_MAX 512u

/* A label's text; @used changes whenever the slot has another owner, odd while it has one. */
struct exl3_metric_label {
	uint64_t used;
	uint64_t text[(EXL3_METRIC_LABEL_MAX + 8) / 8]; /* bytes, with a zero */
};

struct exl3_metric_times {
	uint64_t bucket[EXL3_METRIC_TIMES], sum_ns;
};

enum exl3_metric_kind { EXL3_BYTES_ARENA, EXL3_BYTES_IMPORT, EXL3_BYTES_RING, EXL3_BYTES_NR };

struct exl3_metrics_tenant {
	struct exl3_metric_label label;
	uint64_t requests[EXL3_METRIC_OPS][EXL3_METRIC_CODES]; /* completed */
	uint64_t rows;                                         /* of those that succeeded */
	struct exl3_metric_times queue; /* from acceptance to the start of a request's first launch */
	uint64_t device_ns;             /* of its launches; a shared one counts for each by its rows */
	uint64_t delayed_rate, delayed_rows; /* times that a ring waited */
	/* Held now. */
	uint64_t clients, channels, rows_now, bytes[EXL3_BYTES_NR], credits, credits_used;
};

struct exl3_metrics_model {
	struct exl3_metric_label label;
	uint64_t requests, rows; /* completed, successfully */
	uint64_t weight_bytes, tensor_bytes, overhead_bytes;
	uint64_t mappers; /* now */
};

struct exl3_metrics_op {
	struct exl3_metric_times launch;
	uint64_t rows_bucket[EXL3_METRIC_ROWS], rows;
	uint64_t merged;       /* requests that shared a launch */
	uint64_t slices;       /* launches with a part of a longer request */
	uint64_t weight_bytes; /* read by launches; routed experts: at most */
};

struct exl3_metrics {
	struct exl3_metrics_tenant tenant[EXL3_TENANTS_MAX]; /* by exl3_tenant.slot */
	struct exl3_metrics_model model[EXL3_MODELS_MAX];
	struct exl3_metrics_op op[EXL3_OP_NR];
	uint64_t wakeups;       /* system calls to wake clients */
	uint64_t loop_syscalls; /* all others of the loop */
	uint64_t channel_faults, device_faults;
	uint64_t clients, refused, channels;
	uint64_t trains, train_late, train_joined, train_expelled, train_held_ns; /* see sched.h */
	/* Set before readers start. */
	uint64_t generation, start_time_ms; /* since the epoch */
	char backend[32], domain[64], version[32];
};

static inline void exl3_metric_add(uint64_t *at, uint64_t n)
{
	__atomic_store_n(at, *at + n, __ATOMIC_RELAXED);
}

static inline void exl3_metric_set(uint64_t *at, uint64_t n)
{
	__atomic_store_n(at, n, __ATOMIC_RELAXED);
}

void exl3_metric_time(struct exl3_metric_times *t, uint64_t ns);
void exl3_metric_request(struct exl3_metrics_tenant *t, uint8_t op, int result);
/* A launch of @rows rows of @items requests, @slices of them a part of a longer one. */
void exl3_metric_launch(struct exl3_metrics_op *op, uint64_t ns, uint32_t rows, uint32_t items,
			uint32_t slices, uint64_t weight_bytes);

/* The slot is somebody's from now on, with all numbers 0; nobody's. */
void exl3_metric_label_set(struct exl3_metric_label *label, size_t bytes, const char *text);
void exl3_metric_label_drop(struct exl3_metric_label *label);
/* A free slot, named; NULL: there is none. */
struct exl3_metrics_model *exl3_metrics_add_model(struct exl3_metrics *m, const char *name);

/* All of it in Prometheus' text format 0.0.4. Any thread. */
void exl3_metrics_print(const struct exl3_metrics *m, FILE *out);

#endif
