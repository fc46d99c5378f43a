/* SPDX-License-Identifier: Apache-2.0 */
/* common_main.c - the command line of the example language models: generate, perplexity, logits. */
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/examples/common_lm.h"
#include "client/examples/common_math.h"

#define LOAD_SECONDS_MAX 60
#define WINDOW           512u /* bytes; the model sees nothing before its window */
#define LINE_WIDTH       72u  /* of labelled output */

struct options {
	const char *socket, *model, *prompt, *file, *label;
	uint32_t tokens, batch, windows;
	float temperature;
	uint64_t seed;
	bool unfused, help;
};

static const char usage[] =
	"usage: %s [--socket PATH] [--model NAME] COMMAND [options]\n"
	"  generate --prompt TEXT [--tokens N] [--seed S] [--temperature T] [--label NAME]\n"
	"        writes N bytes that continue TEXT; without a temperature the likeliest ones.\n"
	"        --label: whole lines, each behind [NAME], for several programs on one terminal\n"
	"  perplexity --text FILE [--windows N]\n"
	"        of the text in windows of 512 bytes, each on its own\n"
	"  logits --prompt TEXT --file FILE\n"
	"        compares the logits after every byte of TEXT with FILE (f32, [bytes, "
	"vocabulary])\n"
	"options: --batch N  rows of one request (128)   --unfused  an MLP as three requests\n";

static double seconds_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static uint64_t parse_number(const char *name, const char *text, uint64_t max)
{
	char *end;
	unsigned long long v;

	errno = 0;
	v = strtoull(text, &end, 10);
	if (errno || end == text || *end || *text == '-' || v > max)
		ex_die("--%s: \"%s\" is not a number from 0 to %llu", name, text,
		       (unsigned long long)max);
	return v;
}

static float parse_temperature(const char *text)
{
	char *end;
	float v = strtof(text, &end);

	if (end == text || *end || !(v >= 0 && v <= 100))
		ex_die("--temperature: \"%s\" is not a number from 0 to 100", text);
	return v;
}

static void parse_options(struct options *o, int argc, char **argv)
{
	static const struct option longopts[] = {
		{"socket", 1, NULL, 's'},      {"model", 1, NULL, 'm'},
		{"prompt", 1, NULL, 'p'},      {"tokens", 1, NULL, 'n'},
		{"temperature", 1, NULL, 't'}, {"seed", 1, NULL, 'S'},
		{"label", 1, NULL, 'l'},       {"text", 1, NULL, 'f'},
		{"file", 1, NULL, 'f'},        {"windows", 1, NULL, 'w'},
		{"batch", 1, NULL, 'b'},       {"unfused", 0, NULL, 'u'},
		{"help", 0, NULL, 'h'},        {NULL, 0, NULL, 0},
	};
	int c, which = 0;

	while ((c = getopt_long(argc, argv, "h", longopts, &which)) != -1) {
		const char *name = longopts[which].name;

		switch (c) {
		case 's':
			o->socket = optarg;
			break;
		case 'm':
			o->model = optarg;
			break;
		case 'p':
			o->prompt = optarg;
			break;
		case 'f':
			o->file = optarg;
			break;
		case 'l':
			o->label = optarg;
			break;
		case 'n':
			o->tokens = (uint32_t)parse_number(name, optarg, 1u << 20);
			break;
		case 'b':
			o->batch = (uint32_t)parse_number(name, optarg, EXL3_M_MAX);
			break;
		case 'w':
			o->windows = (uint32_t)parse_number(name, optarg, 1u << 20);
			break;
		case 'S':
			o->seed = parse_number(name, optarg, UINT64_MAX);
			break;
		case 't':
			o->temperature = parse_temperature(optarg);
			break;
		case 'u':
			o->unfused = true;
			break;
		case 'h':
			o->help = true;
			break;
		default:
			exit(2);
		}
	}
}

/* The model may still be on its way from the disk. */
static void open_model(struct ex_lm *lm, const char *name)
{
	double until = seconds_now() + LOAD_SECONDS_MAX;
	int r;

	while ((r = exl3_model_open(lm->client, name, &lm->model)) == -EAGAIN) {
		if (seconds_now() > until)
			ex_die("model %s: still loading after %d s", name, LOAD_SECONDS_MAX);
		usleep(50000);
	}
	if (r < 0)
		ex_die("%s", exl3_last_error());
}

static uint8_t *read_file(const char *path, size_t *bytes)
{
	FILE *f = fopen(path, "rbe");
	uint8_t *data;
	long size;

	if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET))
		ex_die("%s: %s", path, strerror(errno));
	*bytes = (size_t)size;
	data = ex_calloc(*bytes + 1, 1);
	if (fread(data, 1, *bytes, f) != *bytes)
		ex_die("%s: cannot be read", path);
	fclose(f);
	return data;
}

/* ---- generate ---- */

/* Bytes go out as they come, or with a label as whole lines in one write each. */
struct writer {
	const char *label;
	char line[LINE_WIDTH + 1];
	uint32_t used;
};

static void flush_line(struct writer *w, uint32_t n)
{
	char out[sizeof(w->line) + 64];
	int len;

	while (n && w->line[n - 1] == ' ')
		n--;
	len = snprintf(out, sizeof(out), "[%.40s] %.*s\n", w->label, (int)n, w->line);

	if (write(STDOUT_FILENO, out, (size_t)len) != len)
		ex_die("cannot write: %s", strerror(errno));
}

static void put_byte(struct writer *w, uint8_t byte)
{
	uint32_t cut, skip = 0;

	if (!w->label) {
		putchar(byte);
		fflush(stdout);
		return;
	}
	if (byte == '\n' || w->used == LINE_WIDTH) {
		cut = w->used;
		if (byte != '\n') { /* at the last blank, if there is one */
			while (cut && w->line[cut - 1] != ' ')
				cut--;
			cut = cut ? cut : w->used;
		}
		if (cut)
			flush_line(w, cut);
		skip = cut;
		memmove(w->line, w->line + skip, w->used - skip);
		w->used -= skip;
	}
	if (byte != '\n')
		w->line[w->used++] = byte < 32 || byte > 126 ? '.' : (char)byte;
}

/* Runs the whole text through the model, @batch rows at a time; logits of the last byte. */
static const float *prefill(const struct ex_lm_ops *ops, struct ex_lm *lm, const uint8_t *text,
			    uint32_t n)
{
	const float *logits = NULL;

	for (uint32_t pos = 0; pos < n; pos += lm->batch) {
		uint32_t rows = n - pos < lm->batch ? n - pos : lm->batch;

		logits = ops->forward(lm, text + pos, rows, pos, 1);
	}
	return logits;
}

static int generate(const struct ex_lm_ops *ops, struct ex_lm *lm, const struct options *o)
{
	struct writer w = {.label = o->label};
	size_t nr_prompt = strlen(o->prompt);
	uint64_t rng = o->seed;
	uint32_t done = 0;
	const float *logits;
	double start, took;

	if (!nr_prompt || nr_prompt >= lm->context)
		ex_die("the prompt must have 1 to %u bytes", lm->context - 1);
	for (size_t i = 0; i < nr_prompt; i++)
		put_byte(&w, (uint8_t)o->prompt[i]);
	logits = prefill(ops, lm, (const uint8_t *)o->prompt, (uint32_t)nr_prompt);
	start = seconds_now();
	while (done < o->tokens) {
		uint8_t byte = (uint8_t)ex_sample(logits, lm->vocab, o->temperature, &rng);

		done++;
		if (!byte) /* ends a text */
			break;
		put_byte(&w, byte);
		if (done == o->tokens || nr_prompt + done > lm->context)
			break;
		logits = ops->forward(lm, &byte, 1, (uint32_t)nr_prompt + done - 1, 1);
	}
	took = seconds_now() - start;
	put_byte(&w, '\n');
	fprintf(stderr, "tokens=%u seconds=%.3f tokens_per_s=%.1f requests=%llu\n", done, took,
		took > 0 ? done / took : 0, (unsigned long long)lm->requests);
	return 0;
}

/* ---- perplexity ---- */

static int perplexity(const struct ex_lm_ops *ops, struct ex_lm *lm, const struct options *o)
{
	size_t bytes;
	uint8_t *text = read_file(o->file, &bytes);
	uint32_t nr_windows = (uint32_t)(bytes / WINDOW), predicted = 0;
	double nll = 0, start = seconds_now();

	if (o->windows && o->windows < nr_windows)
		nr_windows = o->windows;
	if (!nr_windows || lm->context < WINDOW)
		ex_die("%s: shorter than one window of %u bytes", o->file, WINDOW);
	for (uint32_t i = 0; i < nr_windows; i++) {
		const uint8_t *window = text + (size_t)i * WINDOW;

		/* The last byte is only predicted, never an input. */
		for (uint32_t pos = 0; pos < WINDOW - 1; pos += lm->batch) {
			uint32_t left = WINDOW - 1 - pos;
			uint32_t rows = left < lm->batch ? left : lm->batch;
			const float *logits = ops->forward(lm, window + pos, rows, pos, rows);

			for (uint32_t r = 0; r < rows; r++, predicted++)
				nll -= ex_log_prob(logits + (uint64_t)r * lm->vocab, lm->vocab,
						   window[pos + r + 1]);
		}
	}
	free(text);
	printf("perplexity=%.4f nll=%.6f bytes=%u windows=%u seconds=%.3f requests=%llu\n",
	       exp(nll / predicted), nll / predicted, predicted, nr_windows, seconds_now() - start,
	       (unsigned long long)lm->requests);
	return 0;
}

/* ---- logits ---- */

static int compare_logits(const struct ex_lm_ops *ops, struct ex_lm *lm, const struct options *o)
{
	size_t bytes, n = strlen(o->prompt);
	float *want = (float *)(void *)read_file(o->file, &bytes);
	double largest = 0, squares = 0;

	if (!n || n > lm->context || bytes != n * lm->vocab * sizeof(*want))
		ex_die("%s: not the logits of %zu bytes", o->file, n);
	for (uint32_t pos = 0; pos < n; pos += lm->batch) {
		uint32_t rows = (uint32_t)n - pos < lm->batch ? (uint32_t)n - pos : lm->batch;
		const float *got =
			ops->forward(lm, (const uint8_t *)o->prompt + pos, rows, pos, rows);

		for (uint64_t i = 0; i < (uint64_t)rows * lm->vocab; i++) {
			double d = fabs((double)got[i] - want[(uint64_t)pos * lm->vocab + i]);

			if (isnan(d)) /* would lose every comparison */
				d = INFINITY;
			largest = d > largest ? d : largest;
			squares += d * d;
		}
	}
	free(want);
	printf("largest_difference=%.6f rms_difference=%.6f rows=%zu\n", largest,
	       sqrt(squares / (double)(n * lm->vocab)), n);
	return 0;
}

int ex_lm_main(const struct ex_lm_ops *ops, int argc, char **argv)
{
	struct options o = {.model = ops->model, .tokens = 200, .batch = 128, .seed = 1};
	struct ex_lm lm = {0};
	const char *command;
	int (*run)(const struct ex_lm_ops *, struct ex_lm *, const struct options *);

	parse_options(&o, argc, argv);
	command = optind < argc ? argv[optind] : "";
	if (!strcmp(command, "generate") && o.prompt)
		run = generate;
	else if (!strcmp(command, "perplexity") && o.file)
		run = perplexity;
	else if (!strcmp(command, "logits") && o.prompt && o.file)
		run = compare_logits;
	else
		run = NULL;
	if (!run || o.help || optind + 1 != argc || !o.batch) {
		fprintf(o.help ? stdout : stderr, usage, ops->program);
		return o.help ? 0 : 2;
	}

	if (exl3_connect(o.socket, o.label ? o.label : ops->program, &lm.client) < 0)
		ex_die("%s", exl3_last_error());
	open_model(&lm, o.model);
	if (exl3_channel_new(lm.client, EX_RING, &lm.channel) < 0)
		ex_die("%s", exl3_last_error());
	lm.batch = o.batch;
	lm.unfused = o.unfused;
	ops->open(&lm);

	run(ops, &lm, &o);

	ops->close(&lm);
	exl3_close(lm.client);
	return 0;
}
