/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sched_sim.c - what merging and trains would give: the scheduler in a model of a device (tests/sim/model.h).
 *
 *       sched_sim [-S us] [-R us] [-C us] [-T us] [-m modules] [-s slope] [-d depth] [-x slow] [-r seed]
 *                 [-n clients] [-t milliseconds]
 */
#include "tests/sim/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char *const names[] = {"unmerged", "merged", "trains"};

int main(int argc, char **argv)
{
	static const uint32_t counts[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
	struct sim_config cfg;
	struct sim_result r;
	uint32_t slow = 0, only = 0;
	int o;

	sim_defaults(&cfg, SIM_CLIENTS_MAX);
	while ((o = getopt(argc, argv, "S:R:C:T:m:s:d:x:r:n:t:p:N:P:l:")) != -1) {
		double v = atof(optarg ? optarg : "");

		switch (o) {
		case 'S':
			cfg.launch_ns = (uint64_t)(v * 1000);
			break;
		case 'R':
			cfg.hand_ns = (uint64_t)(v * 1000);
			break;
		case 'C':
			for (uint32_t i = 0; i < SIM_CLIENTS_MAX; i++)
				cfg.client[i].think_ns = (uint64_t)(v * 1000);
			break;
		case 'T':
			cfg.tail_ns = (uint64_t)(v * 1000);
			break;
		case 'm':
			cfg.modules = (uint32_t)v;
			break;
		case 's':
			cfg.slope = v;
			break;
		case 'd':
			cfg.depth = (uint32_t)v;
			break;
		case 'x':
			slow = (uint32_t)v;
			break;
		case 'l':
			cfg.serial_ns = (uint64_t)(v * 1000);
			break;
		case 'N':
			cfg.noise = v;
			break;
		case 'P':
			cfg.spike_ppm = (uint32_t)v;
			break;
		case 'p':
			cfg.spread = v;
			break;
		case 'n':
			only = (uint32_t)v;
			break;
		case 't':
			cfg.run_ns = (uint64_t)(v * 1e6), cfg.warm_ns = cfg.run_ns / 3;
			break;
		case 'r':
			cfg.seed = (uint64_t)v;
			break;
		default:
			return 2;
		}
	}
	for (uint32_t i = 0; i < slow && i < SIM_CLIENTS_MAX; i++)
		cfg.client[i].extra_ns = 40000;
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		double unmerged = 0;

		if (only && only != counts[i])
			continue;
		cfg.nr_clients = counts[i];
		for (int mode = SIM_UNMERGED; mode <= SIM_TRAINS; mode++) {
			double least = 1e30, most = 0;

			cfg.mode = (enum sim_mode)mode;
			sim_run(&cfg, &r);
			if (mode == SIM_UNMERGED)
				unmerged = r.tokens_per_s;
			for (uint32_t k = 0; k < cfg.nr_clients; k++) {
				least = r.client[k] < least ? r.client[k] : least;
				most = r.client[k] > most ? r.client[k] : most;
			}
			printf("N=%2u %-8s %6.0f tokens/s (%5.2f) rows/launch %5.2f busy %.2f p50 "
			       "%6.1f "
			       "p99 %7.1f us, clients %.0f-%.0f, trains %llu late %llu joined %llu "
			       "expelled %llu\n",
			       counts[i], names[mode], r.tokens_per_s, r.tokens_per_s / unmerged,
			       r.rows_per_launch, r.busy, r.p50_us, r.p99_us, least, most,
			       (unsigned long long)r.stats.trains, (unsigned long long)r.stats.late,
			       (unsigned long long)r.stats.joined,
			       (unsigned long long)r.stats.expelled);
		}
	}
	return 0;
}
