/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_format.c - the format against its test vectors, and real layers against their originals.
 *
 * The vectors were made by an independent program and checked against upstream's kernels; what is
 * compared here are kernels/format.h (shared with the GPU) and the oracle kernels/cpu/ref.c.
 */
#include "tests/test.h"

#include "kernels/cpu/ref.h"
#include "kernels/format.h"

#include <cjson/cJSON.h>
#include <math.h>

#define VECTORS "tests/vectors/"
#define LAYERS  "tests/models/layers/"

static const char *const codebook_name[3] = {"3inst", "mcg", "mul1"};

static void *read_file(const char *path, size_t *size)
{
	FILE *f = fopen(path, "rb");
	char *data;
	long bytes;

	if (!f)
		fail_msg("cannot open %s (tests run in the top folder): %s", path, strerror(errno));
	fseek(f, 0, SEEK_END);
	bytes = ftell(f);
	rewind(f);
	data = malloc((size_t)bytes + 1);
	assert_non_null(data);
	assert_int_equal(fread(data, 1, (size_t)bytes, f), bytes);
	data[bytes] = 0;
	fclose(f);
	if (size)
		*size = (size_t)bytes;
	return data;
}

static cJSON *read_json(const char *path)
{
	char *text = read_file(path, NULL);
	cJSON *json = cJSON_Parse(text);

	free(text);
	if (!json)
		fail_msg("%s is not JSON", path);
	return json;
}

static const cJSON *need(const cJSON *json, const char *key)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);

	if (!item)
		fail_msg("key \"%s\" is missing", key);
	return item;
}

static double number(const cJSON *json, const char *key)
{
	return need(json, key)->valuedouble;
}

static const char *string(const cJSON *json, const char *key)
{
	return need(json, key)->valuestring;
}

/* Hexadecimal words separated by blanks; returns how many. */
static size_t hex_words(const char *text, uint16_t *out, size_t max)
{
	size_t n = 0;
	char *end;

	for (; n < max; n++, text = end) {
		unsigned long v = strtoul(text, &end, 16);

		if (end == text)
			break;
		out[n] = (uint16_t)v;
	}
	return n;
}

static uint64_t fnv1a(uint64_t h, const void *data, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		h = (h ^ ((const uint8_t *)data)[i]) * 0x100000001b3ull;
	return h;
}

#define FNV_START 0xcbf29ce484222325ull

static int codebook_id(const char *name)
{
	for (int i = 0; i < 3; i++)
		if (!strcmp(name, codebook_name[i]))
			return i;
	fail_msg("codebook \"%s\"", name);
	return -1;
}

static void codebooks(void **state)
{
	static uint16_t value[65536];
	cJSON *json = read_json(VECTORS "codebooks.json");

	(void)state;
	for (int cb = 0; cb < 3; cb++) {
		const cJSON *c = need(json, codebook_name[cb]), *sample;
		double low = 0, high = 0, square = 0;
		char hash[17];
		int samples = 0;

		for (uint32_t code = 0; code < 65536; code++) {
			double v;

			value[code] = exl3_code_f16(code, cb);
			v = exl3_f16_to_f32(value[code]);
			low = v < low ? v : low;
			high = v > high ? v : high;
			square += v * v;
		}
		snprintf(hash, sizeof(hash), "%016llx",
			 (unsigned long long)fnv1a(FNV_START, value, sizeof(value)));
		assert_string_equal(hash, string(c, "fnv1a64_le_fp16_of_codes_0_to_65535"));
		assert_true(low == number(c, "min") && high == number(c, "max"));
		assert_true(fabs(sqrt(square / 65536) - number(c, "rms")) < 1e-8);
		cJSON_ArrayForEach(sample, need(c, "code_value"))
		{
			assert_int_equal(value[strtoul(sample->string, NULL, 16)],
					 strtoul(sample->valuestring, NULL, 16));
			samples++;
		}
		assert_true(samples >= 20);
	}
	cJSON_Delete(json);
}

static void tile_map(void **state)
{
	cJSON *json = read_json(VECTORS "tile_map.json");
	bool seen[256] = {false};

	(void)state;
	for (int t = 0; t < 256; t++) {
		int row = exl3_tile_row(t), col = exl3_tile_col(t);

		assert_int_equal(row, cJSON_GetArrayItem(need(json, "row_of_t"), t)->valueint);
		assert_int_equal(col, cJSON_GetArrayItem(need(json, "col_of_t"), t)->valueint);
		assert_int_equal(exl3_tile_index(t / 16, t % 16),
				 cJSON_GetArrayItem(need(json, "t_of_row_major"), t)->valueint);
		assert_int_equal(exl3_tile_index(row, col), t);
		assert_false(seen[16 * row + col]);
		seen[16 * row + col] = true;
	}
	cJSON_Delete(json);
}

static void check_tile(const char *path, int rate2)
{
	cJSON *json = read_json(path);
	uint16_t words[128], window[256], want[256], got[256];
	uint32_t u32[64];
	int codebooks_seen = 0;

	assert_true(number(json, "bits") * 2 == rate2);
	assert_int_equal(hex_words(string(json, "words_in_file_order_as_u16"), words, 128),
			 exl3_tile_words16(rate2));
	memcpy(u32, words, (size_t)exl3_tile_bytes(rate2));
	assert_int_equal(hex_words(string(json, "window_of_t_0_to_255"), window, 256), 256);
	for (int t = 0; t < 256; t++)
		if (exl3_window(u32, rate2, t) != window[t])
			fail_msg("%s: window %d is %04x instead of %04x", path, t,
				 exl3_window(u32, rate2, t), window[t]);
	for (int cb = 0; cb < 3; cb++) {
		char key[64];
		const cJSON *item;

		snprintf(key, sizeof(key), "fp16_row_major_k_n_%s", codebook_name[cb]);
		item = cJSON_GetObjectItemCaseSensitive(json, key);
		assert_int_equal(item != NULL, exl3_rate_valid(rate2, cb));
		if (!item)
			continue;
		assert_int_equal(hex_words(item->valuestring, want, 256), 256);
		exl3_ref_tile(words, rate2, cb, got);
		assert_memory_equal(got, want, sizeof(want));
		codebooks_seen++;
	}
	assert_int_equal(codebooks_seen, rate2 & 1 ? 1 : 3);
	cJSON_Delete(json);
}

static void tiles(void **state)
{
	int files = 0;

	(void)state;
	for (int rate2 = 1; rate2 <= 17; rate2++) {
		char path[64];

		if (!exl3_rate_valid(rate2, EXL3_CB_MUL1))
			continue;
		snprintf(path, sizeof(path), VECTORS "tile_%.1fbpw.json", rate2 / 2.0);
		check_tile(path, rate2);
		files++;
	}
	assert_int_equal(files, 11);
	assert_false(exl3_rate_valid(9, 2) || exl3_rate_valid(1, 2) || exl3_rate_valid(3, 1) ||
		     exl3_rate_valid(8, 3) || exl3_rate_valid(8, -1) || exl3_rate_valid(18, 0));
}

/* A window is a state of a shift register that runs round the ring. */
static void ring(void **state)
{
	uint32_t words[64];
	uint32_t v = 1;

	(void)state;
	for (int rate2 = 2; rate2 <= 16; rate2++) {
		if (!exl3_rate_valid(rate2, EXL3_CB_MUL1))
			continue;
		for (int i = 0; i < 64; i++)
			words[i] = v = v * 1664525u + 1013904223u;
		for (int t = 0; t < 256; t++) {
			int next = (t + 1) & 255;
			int own = exl3_tile_end(rate2, next) -
				  (next ? exl3_tile_end(rate2, next - 1) : 0);

			assert_int_equal(exl3_window(words, rate2, next) >> own,
					 exl3_window(words, rate2, t) & (0xffffu >> own));
		}
		assert_int_equal(exl3_tile_end(rate2, 255), 128 * rate2);
	}
}

static void hadamard(void **state)
{
	cJSON *json = read_json(VECTORS "hadamard128.json");
	const cJSON *in = need(json, "input"), *out = need(json, "output_unnormalised");
	double v[128];

	(void)state;
	for (int i = 0; i < 128; i++)
		v[i] = cJSON_GetArrayItem(in, i)->valuedouble;
	exl3_ref_hadamard(v);
	for (int i = 0; i < 128; i++)
		assert_true(fabs(v[i] / EXL3_INV_SQRT128 -
				 cJSON_GetArrayItem(out, i)->valuedouble) < 1e-9);
	cJSON_Delete(json);
}

/* fp16, bf16 and e4m3 over all their values; rounding at the points where it can go wrong. */
static void number_formats(void **state)
{
	static const struct {
		double v;
		uint16_t h;
	} rounding[] = {
		{65504, 0x7bff}, {65519.99, 0x7bff}, {65520, 0x7c00},       {-65520, 0xfc00},
		{0x1p-24, 1},    {0x1p-25, 0},       {0x1.8p-25, 1},        {0x1.8p-24, 2},
		{0x1.4p-23, 2},  {0x1p-14, 0x0400},  {0x1.ffbp-15, 0x03ff}, {0x1.ffcp-15, 0x0400},
		{2049, 0x6800},  {2051, 0x6802},     {1 + 0x1p-11, 0x3c00}, {1 + 0x1.8p-10, 0x3c02},
		{-0.0, 0x8000},  {1e-30, 0},         {1e300, 0x7c00},
	};

	(void)state;
	for (uint32_t h = 0; h < 65536; h++) {
		float f = exl3_f16_to_f32((uint16_t)h), b = exl3_bf16_to_f32((uint16_t)h);

		if (isnan(f))
			assert_true(isnan(exl3_f16_to_f32(exl3_f32_to_f16(f))));
		else
			assert_int_equal(exl3_f32_to_f16(f), h);
		if (isnan(b))
			assert_true(isnan(exl3_bf16_to_f32(exl3_f32_to_bf16(b))));
		else
			assert_int_equal(exl3_f32_to_bf16(b), h);
	}
	for (size_t i = 0; i < TEST_NR(rounding); i++)
		if (exl3_f64_to_f16(rounding[i].v) != rounding[i].h)
			fail_msg("%a rounds to %04x instead of %04x", rounding[i].v,
				 exl3_f64_to_f16(rounding[i].v), rounding[i].h);
	for (int v = 0; v < 256; v++) {
		int e = v >> 3 & 15, m = v & 7;
		double want = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
		float got = exl3_e4m3_to_f32((uint8_t)v);

		if ((v & 127) == 127)
			assert_true(isnan(got));
		else
			assert_true((double)got == (v & 128 ? -want : want) &&
				    !!signbit(got) == v >> 7);
	}
}

/* ---- data of the vectors: splitmix64, 16 bits a draw ---- */

static uint16_t draw(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15ull;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return (uint16_t)((z ^ z >> 31) >> 48);
}

static double draw_scale(uint64_t *state, double s)
{
	uint16_t v = draw(state);
	double r = (512 + (v & 511)) / 1024.0 * s;

	return v & 0x8000 ? -r : r;
}

static double draw_x(uint64_t *state)
{
	return ((draw(state) >> 4) - 2048) / 1024.0;
}

struct owned {
	struct exl3_matrix m;
	uint16_t *trellis, *suh, *svh;
	float *bias;
	uint64_t hash;
};

static struct owned draw_matrix(uint64_t *state, uint32_t k, uint32_t n, int rate2, int cb,
				bool bias)
{
	size_t words = exl3_trellis_bytes(k, n, rate2) / 2;
	struct owned o = {.hash = FNV_START};

	o.trellis = malloc(2 * words);
	o.suh = malloc(2 * (size_t)k);
	o.svh = malloc(2 * (size_t)n);
	o.bias = malloc(4 * (size_t)n);
	assert_true(o.trellis && o.suh && o.svh && o.bias);
	for (size_t i = 0; i < words; i++)
		o.trellis[i] = draw(state);
	for (uint32_t i = 0; i < k; i++)
		o.suh[i] = exl3_f64_to_f16(draw_scale(state, 1.0 / 16));
	for (uint32_t i = 0; i < n; i++)
		o.svh[i] = exl3_f64_to_f16(draw_scale(state, 1));
	o.hash = fnv1a(o.hash, o.trellis, 2 * words);
	o.hash = fnv1a(o.hash, o.suh, 2 * (size_t)k);
	o.hash = fnv1a(o.hash, o.svh, 2 * (size_t)n);
	for (uint32_t i = 0; bias && i < n; i++) {
		uint16_t h = exl3_f64_to_f16(draw_scale(state, 1));

		o.hash = fnv1a(o.hash, &h, 2);
		o.bias[i] = exl3_f16_to_f32(h);
	}
	o.m = (struct exl3_matrix){.k = k,
				   .n = n,
				   .k_log = k,
				   .n_log = n,
				   .rate2 = (uint8_t)rate2,
				   .codebook = (uint8_t)cb,
				   .trellis = o.trellis,
				   .suh = o.suh,
				   .svh = o.svh,
				   .bias = bias ? o.bias : NULL};
	return o;
}

static void free_matrix(struct owned *o)
{
	free(o->trellis);
	free(o->suh);
	free(o->svh);
	free(o->bias);
}

static void check_hash(uint64_t hash, const char *want)
{
	char text[17];

	snprintf(text, sizeof(text), "%016llx", (unsigned long long)hash);
	assert_string_equal(text, want);
}

static void run_oracle(struct exl3_work *work)
{
	size_t bytes = exl3_ref_scratch(work);
	void *scratch = malloc(bytes);

	assert_non_null(scratch);
	assert_int_equal(exl3_ref_run(work, scratch, bytes - 8), -ENOMEM);
	assert_int_equal(exl3_ref_run(work, scratch, bytes), 0);
	free(scratch);
}

static void check_close(const float *got, const cJSON *want, uint32_t n)
{
	double square = 0, rms;

	assert_int_equal(cJSON_GetArraySize(want), n);
	for (uint32_t i = 0; i < n; i++)
		square += pow(cJSON_GetArrayItem(want, (int)i)->valuedouble, 2);
	rms = sqrt(square / n);
	/* The oracle's output is f32 here: half an ulp of it is 6e-8. */
	for (uint32_t i = 0; i < n; i++) {
		double w = cJSON_GetArrayItem(want, (int)i)->valuedouble;

		if (!(fabs(got[i] - w) <= 1e-7 * (rms + fabs(w))))
			fail_msg("output %u is %.9g instead of %.9g", i, (double)got[i], w);
	}
}

static void linears(void **state)
{
	(void)state;
	for (int i = 0; i < 4; i++) {
		char path[64];
		cJSON *json;
		uint64_t seed;
		uint32_t k, n;
		struct owned o;
		float x[256], y[256];
		uint16_t x16[256];

		snprintf(path, sizeof(path), VECTORS "linear_%d.json", i);
		json = read_json(path);
		seed = (uint64_t)number(json, "splitmix64_seed");
		k = (uint32_t)number(json, "k");
		n = (uint32_t)number(json, "n");
		o = draw_matrix(&seed, k, n, (int)(2 * number(json, "bits")),
				codebook_id(string(json, "codebook")),
				cJSON_IsTrue(need(json, "has_bias")));
		check_hash(o.hash, string(json, "fnv1a64_of_trellis_suh_svh_bias"));
		assert_int_equal(hex_words(string(json, "x_fp16"), x16, 256), k);
		for (uint32_t j = 0; j < k; j++) {
			x[j] = (float)draw_x(&seed);
			assert_int_equal(exl3_f32_to_f16(x[j]), x16[j]);
		}
		{
			const struct exl3_matrix *shard = &o.m;
			struct exl3_rows rows = {
				.x = x16, .y = y, .m = 1, .x_dtype = EXL3_F16, .y_dtype = EXL3_F32};
			struct exl3_work work = {.op = EXL3_OP_LINEAR,
						 .rows = &rows,
						 .nr_rows = 1,
						 .u.linear = {&shard, 1}};

			run_oracle(&work);
			check_close(y, need(json, "y_double"), n);
		}
		free_matrix(&o);
		cJSON_Delete(json);
	}
}

static void mixture(void **state)
{
	cJSON *json = read_json(VECTORS "moe_silu.json");
	uint64_t seed = (uint64_t)number(json, "splitmix64_seed");
	uint32_t hidden = (uint32_t)number(json, "hidden");
	uint32_t inter = (uint32_t)number(json, "intermediate");
	int in = (int)(2 * number(json, "gate_up_bits")),
	    out = (int)(2 * number(json, "down_bits"));
	int cb = codebook_id(string(json, "codebook"));
	struct owned o[3][3];
	struct exl3_expert experts[3];
	int32_t ids[4];
	float weights[4], x[128], y[128];
	uint64_t skipped = 99;

	(void)state;
	assert_int_equal(hidden, 128);
	assert_int_equal(number(json, "experts"), 3);
	assert_int_equal(cJSON_GetArraySize(need(json, "selected")), 2);
	for (int e = 0; e < 3; e++) {
		for (int p = 0; p < 3; p++) {
			o[e][p] =
				draw_matrix(&seed, p == 2 ? inter : hidden, p == 2 ? hidden : inter,
					    p == 2 ? out : in, cb, false);
			check_hash(o[e][p].hash,
				   cJSON_GetArrayItem(
					   need(json, "fnv1a64_gate_up_down_of_expert_0_1_2"),
					   3 * e + p)
					   ->valuestring);
		}
		experts[e] = (struct exl3_expert){&o[e][0].m, &o[e][1].m, &o[e][2].m};
	}
	for (uint32_t i = 0; i < hidden; i++) {
		x[i] = (float)draw_x(&seed);
		assert_true((double)x[i] ==
			    cJSON_GetArrayItem(need(json, "x"), (int)i)->valuedouble);
	}
	/* A hole and an invalid id in between must change nothing but the count. */
	for (int j = 0; j < 2; j++) {
		ids[2 * j] = j ? 3 : -1;
		weights[2 * j] = 1;
		ids[2 * j + 1] = cJSON_GetArrayItem(need(json, "selected"), j)->valueint;
		weights[2 * j + 1] =
			(float)cJSON_GetArrayItem(need(json, "weights"), j)->valuedouble;
	}
	{
		struct exl3_route route = {.ids = ids,
					   .weights = weights,
					   .topk = 4,
					   .ids_dtype = EXL3_I32,
					   .weights_dtype = EXL3_F32};
		struct exl3_rows rows = {
			.x = x, .y = y, .m = 1, .x_dtype = EXL3_F32, .y_dtype = EXL3_F32};
		struct exl3_work work = {.op = EXL3_OP_MOE,
					 .rows = &rows,
					 .nr_rows = 1,
					 .skipped = &skipped,
					 .u.moe = {.experts = experts,
						   .nr_experts = 3,
						   .act = EXL3_ACT_SILU,
						   .routed_scale = 1,
						   .routes = &route}};

		run_oracle(&work);
		check_close(y, need(json, "y_double"), hidden);
		assert_int_equal(skipped, 1);
	}
	for (int e = 0; e < 3; e++)
		for (int p = 0; p < 3; p++)
			free_matrix(&o[e][p]);
	cJSON_Delete(json);
}

/* ---- real layers ---- */

/* Copies tensor @name of a safetensors file that was read whole; @bytes is checked. */
static void tensor(const char *file, const cJSON *header, size_t data, const char *name, void *out,
		   size_t bytes)
{
	const cJSON *t = need(header, name), *offsets = need(t, "data_offsets");
	double begin = cJSON_GetArrayItem(offsets, 0)->valuedouble;

	assert_true(cJSON_GetArrayItem(offsets, 1)->valuedouble - begin == (double)bytes);
	memcpy(out, file + data + (size_t)begin, bytes);
}

static char *open_tensors(const char *path, cJSON **header, size_t *data)
{
	char *file = read_file(path, NULL);
	uint64_t length;

	memcpy(&length, file, 8);
	*header = cJSON_ParseWithLength(file + 8, length);
	assert_non_null(*header);
	*data = 8 + length;
	return file;
}

static void real_layers(void **state)
{
	enum { K = 256, N = 384 };
	cJSON *json = read_json(LAYERS "layers.json"), *header, *original_header;
	size_t data, original_data;
	char *file = open_tensors(LAYERS "layers.safetensors", &header, &data);
	char *original_file =
		open_tensors(LAYERS "original.safetensors", &original_header, &original_data);
	float *original = malloc(sizeof(float) * K * N);
	double *dense = malloc(sizeof(double) * K * N);
	uint16_t *trellis = malloc(K * N * 2), suh[K], svh[N];
	const cJSON *layer;
	int layers = 0;

	(void)state;
	assert_true(original && dense && trellis);
	tensor(original_file, original_header, original_data, "weight", original, 4 * K * N);
	cJSON_ArrayForEach(layer, json)
	{
		int rate2 = (int)(2 * number(layer, "bits"));
		struct exl3_matrix w = {.k = K,
					.n = N,
					.k_log = K,
					.n_log = N,
					.rate2 = (uint8_t)rate2,
					.codebook = (uint8_t)codebook_id(string(layer, "codebook")),
					.trellis = trellis,
					.suh = suh,
					.svh = svh};
		double diff = 0, norm = 0, got, want = number(layer, "relative_error");
		char name[64];

		snprintf(name, sizeof(name), "%s.trellis", layer->string);
		tensor(file, header, data, name, trellis, exl3_trellis_bytes(K, N, rate2));
		snprintf(name, sizeof(name), "%s.suh", layer->string);
		tensor(file, header, data, name, suh, sizeof(suh));
		snprintf(name, sizeof(name), "%s.svh", layer->string);
		tensor(file, header, data, name, svh, sizeof(svh));
		exl3_ref_dense(&w, dense);
		for (int i = 0; i < K * N; i++) {
			diff += pow(dense[i] - original[i], 2);
			norm += pow(original[i], 2);
		}
		got = sqrt(diff / norm);
		/* The recorded figure went through float32. */
		if (!(fabs(got - want) <= 1e-5 * want))
			fail_msg("%s: relative error %.9g instead of %.9g", layer->string, got,
				 want);
		layers++;
	}
	assert_int_equal(layers, 24);
	free(original);
	free(dense);
	free(trellis);
	free(file);
	free(original_file);
	cJSON_Delete(header);
	cJSON_Delete(original_header);
	cJSON_Delete(json);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(codebooks), test_case(tile_map), test_case(tiles),
		test_case(ring),      test_case(hadamard), test_case(number_formats),
		test_case(linears),   test_case(mixture),  test_case(real_layers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
