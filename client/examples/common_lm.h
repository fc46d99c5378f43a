/* SPDX-License-Identifier: Apache-2.0 */
/* common_lm.h - what the example language models share: connection, requests, and the three commands. */
#ifndef EXL3_EXAMPLES_COMMON_LM_H
#define EXL3_EXAMPLES_COMMON_LM_H

#include "client/exl3.h"

/*
 * A byte-level language model whose quantized matrices are in the daemon. ex_lm_main() fills the first
 * part before open(), open() the second. One thread. A failure ends the program with a sentence and
 * status 1, so nothing here returns an error: the daemon takes back what a client held.
 */
struct ex_lm {
	struct exl3_client *client; /* owned, as the next three */
	struct exl3_model *model;
	struct exl3_channel *channel; /* EX_RING entries */
	struct exl3_arena *arena;     /* made by open() with ex_arena_new() */
	uint32_t batch;               /* most rows of one forward() */
	bool unfused;                 /* --unfused: an MLP as three requests instead of one */
	uint64_t requests;            /* sent so far */
	uint32_t outstanding;

	uint32_t vocab, hidden, context;
	void *priv; /* the architecture's own */
};

#define EX_RING 16u /* entries: no model here has more in flight */

struct ex_lm_ops {
	const char *program, *model; /* its name in messages; the model it opens without --model */
	void (*open)(struct ex_lm *lm);
	void (*close)(struct ex_lm *lm);
	/*
	 * Runs @n bytes (1..batch) that stand at positions @pos.. of the text, after the pos bytes
	 * of earlier calls. Returns the logits that follow each of the last @nr_logits of them,
	 * [nr_logits, vocab], valid until the next call.
	 */
	const float *(*forward)(struct ex_lm *lm, const uint8_t *text, uint32_t n, uint32_t pos,
				uint32_t nr_logits);
};

/* The whole program: arguments, connection, one of generate, perplexity, logits. */
int ex_lm_main(const struct ex_lm_ops *ops, int argc, char **argv);

/* Prints "program: sentence" and ends the program. */
_Noreturn void ex_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void *ex_calloc(uint64_t count, uint64_t size);

/* ---- for open() ---- */

/* A tensor that is not quantized as f32, malloc'ed; its shape must be [d0] (d1 = 0) or [d0, d1]. */
float *ex_tensor(struct ex_lm *lm, uint32_t d0, uint32_t d1, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
/* Is there one? Its shape goes to *d0 and *d1. */
void ex_tensor_shape(struct ex_lm *lm, uint32_t *d0, uint32_t *d1, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
/* A module; @k and @n: its logical sizes, 0 = any. */
struct exl3_module *ex_module(struct ex_lm *lm, unsigned kind, uint32_t k, uint32_t n,
			      const char *fmt, ...) __attribute__((format(printf, 5, 6)));
/* The same, but NULL if the model has no such module. */
struct exl3_module *ex_module_maybe(struct ex_lm *lm, unsigned kind, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
uint32_t ex_module_n(const struct exl3_module *mod); /* logical */
uint32_t ex_module_k(const struct exl3_module *mod);

void ex_arena_new(struct ex_lm *lm, uint64_t bytes);
void *ex_arena_alloc(struct ex_lm *lm,
		     uint64_t bytes); /* never NULL; each call costs up to 64 bytes more */

/* ---- requests: queued here, sent and awaited together by ex_run() ---- */

void ex_linear(struct ex_lm *lm, const struct exl3_module *mod, const float *x, float *y,
	       uint32_t m);
void ex_mlp(struct ex_lm *lm, const struct exl3_module *mod, const float *x, float *y, uint32_t m);
struct exl3_sqe *ex_sqe(struct ex_lm *lm);
exl3_ref ex_ref(const struct ex_lm *lm, const void *ptr);
/* Waits for all that was queued; a failed request ends the program. */
void ex_run(struct ex_lm *lm);

#endif
