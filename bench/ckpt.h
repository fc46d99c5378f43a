/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt.h - a dense decoder's checkpoint for benchmarks: every bit pattern is a valid weight, so the trellis is one
 * block of noise over and over, and scales are ones.
 */
#ifndef EXL3_BENCH_CKPT_H
#define EXL3_BENCH_CKPT_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ckpt_matrix {
	const char
		*name; /* behind "model.layers.N.", or the whole name of one that is there once */
	uint32_t k, n;
};

#define CKPT_BLOCK (1u << 20)
#define CKPT_BITS  4u

struct ckpt_writer {
	FILE *header; /* in memory */
	char *text;
	size_t len;
	uint64_t at;
	unsigned nr;
};

static inline void ckpt_tensor(struct ckpt_writer *w, const char *name, const char *leaf,
			       const char *dtype, const char *shape, uint64_t bytes)
{
	fprintf(w->header,
		"%s\"%s.%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%" PRIu64
		",%" PRIu64 "]}",
		w->nr++ ? "," : "{", name, leaf, dtype, shape, w->at, w->at + bytes);
	w->at += bytes;
}

/* Header entries of one matrix, or its data; the order of both is the same. */
static inline int ckpt_matrix(struct ckpt_writer *w, FILE *f, const char *name, uint32_t k,
			      uint32_t n)
{
	static uint64_t noise[CKPT_BLOCK / 8];
	static uint16_t ones[131072];
	const uint32_t mcg = 0xCBAC1FED;
	uint64_t trellis = (uint64_t)k * n * CKPT_BITS / 8, seed = 1;
	char shape[64];

	if (!f) {
		snprintf(shape, sizeof(shape), "%u,%u,%u", k / 16, n / 16, 16 * CKPT_BITS);
		ckpt_tensor(w, name, "trellis", "I16", shape, trellis);
		snprintf(shape, sizeof(shape), "%u", k);
		ckpt_tensor(w, name, "suh", "F16", shape, 2ull * k);
		snprintf(shape, sizeof(shape), "%u", n);
		ckpt_tensor(w, name, "svh", "F16", shape, 2ull * n);
		ckpt_tensor(w, name, "mcg", "I32", "", 4);
		return 0;
	}
	for (size_t i = 0; !noise[0] && i < CKPT_BLOCK / 8; i++)
		noise[CKPT_BLOCK / 8 - 1 - i] = seed =
			seed * 6364136223846793005u + 1442695040888963407u;
	for (size_t i = 0; !ones[0] && i < 131072; i++)
		ones[131071 - i] = 0x3c00;
	for (uint64_t left = trellis; left;) {
		size_t now = left < CKPT_BLOCK ? (size_t)left : CKPT_BLOCK;

		if (fwrite(noise, 1, now, f) != now)
			return -1;
		left -= now;
	}
	return fwrite(ones, 2, k, f) == k && fwrite(ones, 2, n, f) == n &&
			       fwrite(&mcg, 4, 1, f) == 1
		       ? 0
		       : -1;
}

/**
 * ckpt_write() - @folder/model.safetensors with @layers times @per_layer and once @last.
 * Sizes at most 131072. Returns the bytes of its data, or 0: errno.
 */
static inline uint64_t ckpt_write(const char *folder, unsigned layers,
				  const struct ckpt_matrix *per_layer, size_t nr_per_layer,
				  const struct ckpt_matrix *last, size_t nr_last)
{
	struct ckpt_writer w = {0};
	FILE *f = NULL;
	char name[128], path[4200];
	uint64_t n;

	w.header = open_memstream(&w.text, &w.len);
	if (!w.header)
		return 0;
	for (int pass = 0; pass < 2; pass++) {
		for (unsigned i = 0; i < layers; i++)
			for (size_t k = 0; k < nr_per_layer; k++) {
				snprintf(name, sizeof(name), "model.layers.%u.%s", i,
					 per_layer[k].name);
				if (ckpt_matrix(&w, f, name, per_layer[k].k, per_layer[k].n))
					return 0;
			}
		for (size_t k = 0; k < nr_last; k++)
			if (ckpt_matrix(&w, f, last[k].name, last[k].k, last[k].n))
				return 0;
		if (pass == 1)
			break;
		fputc('}', w.header);
		if (fclose(w.header))
			return 0;
		snprintf(path, sizeof(path), "%s/model.safetensors", folder);
		f = fopen(path, "we");
		n = w.len;
		if (!f || fwrite(&n, 8, 1, f) != 1 || fwrite(w.text, 1, w.len, f) != w.len)
			return 0;
	}
	free(w.text);
	return fclose(f) ? 0 : w.at;
}

#endif
