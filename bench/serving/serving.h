/* SPDX-License-Identifier: Apache-2.0 */
/* serving.h - what the processes of bench/serving share: options, records, phases. */
#ifndef EXL3_BENCH_SERVING_H
#define EXL3_BENCH_SERVING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SERVING_CLIENTS_MAX 64
#define SERVING_LAYERS_MAX  128
#define SERVING_EXPERTS     256u
#define SERVING_TOPK        8u
#define SERVING_SAMPLES     32768u /* latencies that are kept of each client, the last ones */

struct serving_options {
	const char *daemon, *backend, *dir, *output;
	unsigned clients[16], nr_clients, private[16], nr_private;
	double seconds;
	unsigned rounds, think_us, tail_us, layers, shrink;
	bool pin, device_memory, moe;
	const char *sockets[3]; /* of the daemons */
};

enum serving_phase { SERVING_IDLE, SERVING_WARM, SERVING_COUNT, SERVING_END };

/* Sums since the start of a client. */
struct serving_sums {
	uint64_t tokens, calls, exec_ns, latency_ns, think_ns;
};

/* In memory that all processes share. */
struct serving_shared {
	/* Atomic. A cell: the first @active processes decode through daemon @mode. */
	uint32_t ready, phase, active, mode, finished;
	uint64_t bytes; /* of all private copies */
	struct serving_record {
		struct serving_sums begin, end;
		uint64_t samples;
		float us[SERVING_SAMPLES];
		char error[256];
	} client[SERVING_CLIENTS_MAX];
};

struct serving_status {
	uint64_t launches, requests, trains, late, joined, expelled;
	uint64_t bytes; /* of weights and arenas */
	char device[128];
};

/* What one process does until it is ended; its exit status if it fails. */
int serving_client(const struct serving_options *o, struct serving_shared *shared, unsigned nth);
int serving_private(const struct serving_options *o, struct serving_shared *shared, unsigned nth,
		    const char *folder);
/* The @i-th module of a step; false: there are no more. */
bool serving_module(const struct serving_options *o, uint32_t i, char *name, size_t size);
/* Asks a daemon; ends the program if it does not answer. */
void serving_status(const char *socket, struct serving_status *ret);

/* A decoder: in each cell that has it, calls modules 0..nr-1 over and over through @call, and takes notes. */
struct serving_decoder {
	const struct serving_options *o;
	struct serving_shared *shared;
	struct serving_record *record;
	uint64_t rng;
	uint32_t modules;
	/* One call to its end: 0 and the time on the device, or -1 with the reason in record->error. */
	int (*call)(struct serving_decoder *d, uint32_t module, uint64_t *exec_ns);
	void *arg;
	uint32_t mode, active; /* of the present cell */
	bool crowded;          /* more decoders than processors */
};
int serving_decode(struct serving_decoder *d, unsigned nth);

#endif
