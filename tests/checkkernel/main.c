/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - checkkernel: every kernel of every backend's table against the double-precision oracle.
 *
 *       checkkernel [--backend NAME] [--kernel NAME] [--quick] [--tiny] [--seed N] [--threads N] [--list]
 *
 * Exit status 0: all passed, 1: something failed, 2: usage, 77: the named backend has no device.
 */
#include "tests/checkkernel/ck.h"

#include <getopt.h>

#define SLAB_BYTES (96u << 20)

static int usage(void)
{
	fputs("usage: checkkernel [--backend NAME] [--kernel NAME] [--quick] [--tiny] [--seed N] "
	      "[--threads "
	      "N] "
	      "[--list]\n",
	      stderr);
	return 2;
}

/*
 * Limits relative to the rms of the output, beyond half an ulp of its dtype. The CPU computes in
 * f32 throughout; on the GPU, x and the weights meet in fp16 (section S4 of the format: the chain
 * of fp16 roundings alone has 2e-3 and 5e-4).
 */
static void set_limits(struct ck *ck)
{
	bool f32 = !strcmp(ck->ops->name, "cpu");

	ck->tol_max = f32 ? 2e-5 : 5e-3;
	ck->tol_rms = f32 ? 3e-6 : 1e-3;
}

/* With the largest errors against the oracle that were seen, as parts of the rms of the output. */
static void check_part(struct ck *ck, const char *name, void (*part)(struct ck *ck))
{
	ck->worst_max = ck->worst_rms = ck->det_max = ck->det_rms = 0;
	part(ck);
	printf("%s: %-15s largest error max %.2g rms %.2g; deterministic max %.2g rms %.2g\n", ck->ops->name, name,
	       ck->worst_max, ck->worst_rms, ck->det_max, ck->det_rms);
}

static int check_backend(struct ck *ck, const struct exl3_backend_ops *ops, unsigned threads)
{
	struct exl3_dev_options opt = {.numa_node = -1, .threads = threads};
	struct exl3_dev_info info;
	struct exl3_error err = {0};
	int ret;

	ck->ops = ops;
	ret = ops->open(&opt, &ck->dev, &err);
	if (ret) {
		printf("%s: cannot open the device: %s\n", ops->name, err.text);
		ck->failed++;
		return ret;
	}
	ops->info(ck->dev, &info);
	printf("%s: %s, %s\n", ops->name, info.name, info.isa);
	ret = ops->slab_new(ck->dev, SLAB_BYTES, &ck->slab, &err);
	if (ret) {
		printf("%s: %s\n", ops->name, err.text);
		ck->failed++;
	} else {
		set_limits(ck);
		check_part(ck, "linear", ck_linear);
		check_part(ck, "MLP and experts", ck_moe);
		check_part(ck, "MLA", ck_mla);
		printf("%s: %llu cases; %llu deterministic launches of requests that may meet\n", ops->name,
		       (unsigned long long)ck->cases, (unsigned long long)ck->together);
	}
	ck->slab = ops->slab_free(ck->slab);
	ck->dev = ops->close(ck->dev);
	return ret;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {{"backend", required_argument, NULL, 'b'},
						{"kernel", required_argument, NULL, 'k'},
						{"quick", no_argument, NULL, 'q'},
						{"tiny", no_argument, NULL, 'y'},
						{"seed", required_argument, NULL, 's'},
						{"threads", required_argument, NULL, 't'},
						{"list", no_argument, NULL, 'l'},
						{NULL, 0, NULL, 0}};
	struct ck ck = {.random = 20260808};
	const char *only = NULL;
	unsigned threads = 0, tried = 0;
	bool list = false;
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1)
		switch (c) {
		case 'b':
			only = optarg;
			break;
		case 'k':
			ck.only_kernel = optarg;
			break;
		case 'q':
			ck.quick = true;
			break;
		case 'y': /* for instrumented builds */
			ck.quick = ck.tiny = true;
			break;
		case 's':
			ck.random = strtoull(optarg, NULL, 0);
			break;
		case 't':
			threads = (unsigned)strtoul(optarg, NULL, 0);
			break;
		case 'l':
			list = true;
			break;
		default:
			return usage();
		}
	if (optind < argc)
		return usage();
	printf("seed %llu\n", (unsigned long long)ck.random);
	exl3_backend_find("cpu"); /* looks for plugins: the list is complete then */
	for (size_t i = 0; exl3_backends[i]; i++) {
		const struct exl3_backend_ops *ops = exl3_backends[i];
		struct exl3_error err = {0};

		if (only && strcmp(only, ops->name))
			continue;
		if (list) {
			for (const struct exl3_kernel *k = ops->kernels; k->name; k++)
				printf("%s %s\n", ops->name, k->name);
			tried++;
			continue;
		}
		if (ops->probe(&err) <= 0) {
			printf("%s: no device: %s\n", ops->name, err.text);
			continue;
		}
		tried++;
		check_backend(&ck, ops, threads);
	}
	if (!tried) {
		const char *why = only && !strcmp(only, "cuda") ? exl3_backend_plugin_error() : NULL;

		printf("skipped: no such backend or no device for it%s%s\n", why ? ": cuda: " : "",
		       why ? why : "");
		return 77;
	}
	printf("%llu passed, %llu failed\n", (unsigned long long)ck.passed,
	       (unsigned long long)ck.failed);
	return ck.failed || (!ck.passed && !list) ? 1 : 0;
}
