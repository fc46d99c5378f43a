/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.h - a queueing model of one device and its clients that drives daemon/sched.c directly.
 *
 * N decoders walk the same modules, one call at a time. A launch of r rows takes launch_ns times (1 + r slope)
 * of its module; from an answer to the next request a client takes hand_ns for both ways and think_ns +- jitter of
 * its own, and tail_ns +- half more from a step to the next. Other clients bring long requests in slices.
 * Deterministic: equal configurations give equal results.
 */
#ifndef TESTS_SIM_MODEL_H
#define TESTS_SIM_MODEL_H

#include "daemon/sched.h"

#define SIM_CLIENTS_MAX 128u

enum sim_mode { SIM_UNMERGED, SIM_MERGED, SIM_TRAINS };

struct sim_client {
	uint32_t model;    /* which modules; the model's number */
	uint32_t rows;     /* of each call */
	uint64_t think_ns; /* C, of this client */
	uint64_t extra_ns; /* up to so much more per call, uniformly */
	uint64_t start_ns;
	uint64_t stop_ns;    /* from then on it says nothing more, wherever it is; 0: never */
	uint64_t pause_ns;   /* after stop_ns: goes on so much later; 0: never */
	uint32_t hiccup_ppm; /* calls of a million that take hiccup_ns longer */
	uint64_t hiccup_ns;
	uint64_t
		slice_ns; /* not 0: no decoder; always one request of slices that take so long queued */
	uint32_t slices;                  /* of one such request */
	uint32_t ahead;                   /* requests queued ahead, at least 1 */
	struct exl3_sched_tenant *tenant; /* NULL: one of its own */
};

struct sim_config {
	enum sim_mode mode;
	uint32_t nr_clients;
	struct sim_client client[SIM_CLIENTS_MAX];
	uint32_t modules; /* of a step */
	uint32_t repeat;  /* each so many-th of them is one and the same; 0: all differ */
	uint64_t launch_ns, hand_ns; /* S of one row, R */
	uint64_t
		serial_ns; /* the worker's loop, for each answer and each request, one after the other */
	double slope;      /* more per row: S(r) = S (1 + (r - 1) slope) */
	double spread;      /* modules differ by +- this part of S */
	double jitter;      /* of think_ns */
	double noise;       /* launches take up to this part of S longer, uniformly */
	uint32_t spike_ppm; /* and of a million so many ten times as long */
	uint64_t tail_ns;
	uint32_t depth; /* launches on the device */
	uint32_t merge_max;
	uint64_t run_ns, warm_ns; /* counted from warm to run */
	uint64_t seed;
};

struct sim_result {
	double tokens_per_s;            /* of all decoders */
	double client[SIM_CLIENTS_MAX]; /* tokens per second; others: slices per second */
	double rows_per_launch, busy; /* of decoders' launches; part of the time the device works */
	double p50_us, p99_us, max_us; /* from a decoder's request to its answer */
	uint64_t wait_ns_max;          /* the longest that the head of a flow waited to start */
	uint32_t wait_launches_max;    /* the most launches that started meanwhile */
	uint64_t calls;
	struct exl3_sched_stats stats;
};

/* @cfg of a plain run as the reference has it: 256 modules, S 15 us, R 9 us, C 6 us, tail 50 us. */
void sim_defaults(struct sim_config *cfg, uint32_t nr_clients);
/* Runs it; asserts on the way that flows keep their order and every item runs exactly once. */
void sim_run(const struct sim_config *cfg, struct sim_result *ret);

#endif
