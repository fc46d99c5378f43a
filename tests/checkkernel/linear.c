/* SPDX-License-Identifier: Apache-2.0 */
/* linear.c - every linear kernel: bitrates, codebooks, sizes, shards, dtypes, strides, bad rows. */
#include "tests/checkkernel/ck.h"

#include <math.h>

#define SHARDS  4
#define ENTRIES 8

static const uint8_t dtypes[3] = {EXL3_F32, EXL3_F16, EXL3_BF16};

struct shape {
	uint32_t k_log, nr_shards;
	struct {
		uint32_t n_log;
		int rate2, codebook;
		bool bias;
	} shard[SHARDS];
	uint32_t nr_entries;
	struct {
		uint32_t m;
		uint8_t x_dtype, y_dtype;
		uint32_t x_gap, y_gap;
	} entry[ENTRIES];
	bool stored;
	bool bad_rows; /* NaN in one row of each entry, infinity in another */
};

/* A built case: weights, operands and the two works that describe them. */
struct linear {
	struct ck_matrix *matrix[SHARDS];
	const struct exl3_matrix *host_shards[SHARDS], *dev_shards[SHARDS];
	struct ck_rows rows[ENTRIES];
	struct exl3_rows host_rows[ENTRIES], dev_rows[ENTRIES];
	struct exl3_work host, dev;
};

static void put_bad_rows(struct ck *ck, struct ck_rows *r, uint32_t width)
{
	static const double bad[3] = {NAN, INFINITY, -INFINITY};

	for (uint32_t i = 0; i < 3 && 2 * i < r->dev.m; i++)
		ck_put(&r->x, r->dev.x_dtype, r->dev.x_stride, 2 * i, ck_below(ck, width), bad[i]);
	ck_buf_upload(ck, &r->x);
}

static void build(struct ck *ck, const struct shape *s, struct linear *l)
{
	uint32_t x_width, y_width = 0;

	memset(l, 0, sizeof(*l));
	for (uint32_t i = 0; i < s->nr_shards; i++) {
		struct ck_matrix *m =
			ck_matrix_new(ck, s->k_log, s->shard[i].n_log, s->shard[i].rate2,
				      s->shard[i].codebook, s->shard[i].bias);

		l->matrix[i] = m;
		l->host_shards[i] = &m->host;
		l->dev_shards[i] = &m->dev;
		y_width += s->stored ? m->host.n : m->host.n_log;
	}
	x_width = s->stored ? l->matrix[0]->host.k : s->k_log;
	for (uint32_t i = 0; i < s->nr_entries; i++) {
		l->rows[i] = ck_rows_new(ck, s->entry[i].m, x_width, y_width, s->entry[i].x_dtype,
					 s->entry[i].y_dtype, s->stored, s->entry[i].x_gap,
					 s->entry[i].y_gap);
		/* rms of x 1.15, of suh 0.048, of codes 1 to 1.24, of svh 0.76 */
		l->rows[i].typical = 0.04 * sqrt(s->k_log);
		if (s->bad_rows)
			put_bad_rows(ck, &l->rows[i], x_width);
		l->host_rows[i] = l->rows[i].host;
		l->dev_rows[i] = l->rows[i].dev;
	}
	l->host = (struct exl3_work){.op = EXL3_OP_LINEAR,
				     .rows = l->host_rows,
				     .nr_rows = s->nr_entries,
				     .u.linear = {l->host_shards, s->nr_shards}};
	l->dev = l->host;
	l->dev.rows = l->dev_rows;
	l->dev.u.linear.shards = l->dev_shards;
}

static void destroy(struct linear *l)
{
	for (int i = 0; i < SHARDS; i++)
		ck_matrix_free(l->matrix[i]);
	for (int i = 0; i < ENTRIES; i++)
		ck_rows_free(&l->rows[i]);
}

static void run_shape(struct ck *ck, const struct shape *s, const char *what)
{
	struct linear l;

	if (ck_skip(ck))
		return;
	ck_case_begin(ck, "linear %s: k %u, %u shards, n %u, bits %g cb %d, m %u, dtypes %u>%u%s",
		      what, s->k_log, s->nr_shards, s->shard[0].n_log, s->shard[0].rate2 / 2.0,
		      s->shard[0].codebook, s->entry[0].m, s->entry[0].x_dtype, s->entry[0].y_dtype,
		      s->stored ? ", stored" : "");
	build(ck, s, &l);
	ck_check(ck, &l.host, &l.dev, l.rows);
	destroy(&l);
}

static struct shape simple(uint32_t k, uint32_t n, int rate2, int codebook, uint32_t m)
{
	return (struct shape){.k_log = k,
			      .nr_shards = 1,
			      .shard = {{n, rate2, codebook, false}},
			      .nr_entries = 1,
			      .entry = {{.m = m, .x_dtype = EXL3_F16, .y_dtype = EXL3_F16}}};
}

static void all_rates(struct ck *ck)
{
	static const uint32_t sizes[] = {1, 2, 9, 16, 33};
	unsigned turn = 0;

	for (int rate2 = EXL3_RATE2_MIN; rate2 <= EXL3_RATE2_MAX; rate2++)
		for (int cb = 0; cb < EXL3_CB_NR; cb++) {
			if (!exl3_rate_valid(rate2, cb))
				continue;
			for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++, turn++) {
				struct shape s =
					simple(turn % 2 ? 256 : 384, 128 + 128 * (turn % 3), rate2,
					       cb, sizes[i]);

				if (ck->quick && i > 1)
					break;
				s.entry[0].x_dtype = dtypes[turn % 3];
				s.entry[0].y_dtype = dtypes[turn / 3 % 3];
				s.shard[0].bias = turn % 5 == 0;
				run_shape(ck, &s, "rates");
			}
		}
}

static void all_rows(struct ck *ck)
{
	for (uint32_t m = 1; m <= 33; m += ck->quick ? 4 : 1) {
		struct shape s = simple(256, 256, 8, EXL3_CB_MUL1, m);

		s.entry[0].x_dtype = s.entry[0].y_dtype = EXL3_F32;
		run_shape(ck, &s, "rows");
	}
	/* Around the number of rows that the CPU takes at once, and a tile of the GPU's GEMMs. */
	for (uint32_t m = 255; m <= 257 && !ck->quick; m++) {
		struct shape s = simple(128, 128, 6, EXL3_CB_MCG, m);

		run_shape(ck, &s, "rows");
	}
}

static void all_sizes(struct ck *ck)
{
	static const uint32_t edge[] = {1,  2,   8,   15,  16,  17,  31,  32,  33,  63,
					65, 112, 127, 128, 129, 160, 255, 257, 320, 500};
	const unsigned nr = sizeof(edge) / sizeof(edge[0]);

	for (unsigned i = 0; i < nr; i++)
		for (unsigned j = i % 2; j < nr; j += ck->quick ? 7 : 2) {
			struct shape s = simple(edge[i], edge[j], 8, (int)(i + j) % 3,
						(i + j) % 4 == 1 ? 1 + (i * j) % 20 : 1);

			s.entry[0].x_dtype = dtypes[(i + j) % 3];
			s.entry[0].y_dtype = dtypes[(i + j / 2) % 3];
			s.shard[0].bias = j % 3 == 0;
			s.stored = j % 4 == 1;
			s.entry[0].x_gap = 16 * (i % 3);
			s.entry[0].y_gap = 16 * (j % 4);
			run_shape(ck, &s, "sizes");
		}
	if (!ck->quick) {
		struct shape s = simple(2048, 1024, 8, EXL3_CB_MUL1, 3);

		run_shape(ck, &s, "sizes");
		s = simple(1152, 2176, 5, EXL3_CB_MUL1, 1);
		run_shape(ck, &s, "sizes");
	}
}

static void all_dtypes(struct ck *ck)
{
	for (int x = 0; x < 3; x++)
		for (int y = 0; y < 3; y++)
			for (int m = 1; m <= 8; m += 7) {
				struct shape s = simple(200, 300, 10, EXL3_CB_3INST, (uint32_t)m);

				s.shard[0].bias = true;
				s.entry[0].x_dtype = dtypes[x];
				s.entry[0].y_dtype = dtypes[y];
				s.entry[0].x_gap = 48;
				s.entry[0].y_gap = 32;
				run_shape(ck, &s, "dtypes");
			}
}

static void fused(struct ck *ck)
{
	for (int turn = 0; turn < (ck->quick ? 4 : 12); turn++) {
		static const uint32_t m[] = {1, 5, 17, 2};
		struct shape s = {.k_log = turn % 2 ? 384 : 200,
				  .nr_shards = 2 + (uint32_t)turn % 3,
				  .shard = {{256, 8, EXL3_CB_MUL1, true},
					    {100, 6, EXL3_CB_MCG, false},
					    {130, 5, EXL3_CB_MUL1, true},
					    {17, 16, EXL3_CB_3INST, true}},
				  .nr_entries = 1,
				  .entry = {{.m = m[turn % 4],
					     .x_dtype = dtypes[turn % 3],
					     .y_dtype = dtypes[turn / 3 % 3]}},
				  .stored = turn % 4 == 3};

		run_shape(ck, &s, "fused shards");
	}
}

static struct shape merged_shape(uint32_t m0, uint32_t m1, uint32_t m2)
{
	struct shape s = {.k_log = 300,
			  .nr_shards = 2,
			  .shard = {{256, 8, EXL3_CB_MUL1, true}, {144, 6, EXL3_CB_MUL1, false}},
			  .nr_entries = 3,
			  .entry = {{m0, EXL3_F16, EXL3_F32, 0, 0},
				    {m1, EXL3_BF16, EXL3_F16, 16, 32},
				    {m2, EXL3_F32, EXL3_BF16, 64, 0}}};

	return s;
}

static void merged(struct ck *ck)
{
	static const uint32_t m[][3] = {{1, 1, 1}, {1, 7, 2}, {16, 1, 17}, {130, 3, 140}};

	for (size_t i = 0; i < sizeof(m) / sizeof(m[0]); i++) {
		struct shape s = merged_shape(m[i][0], m[i][1], m[i][2]);

		if (ck->quick && i == 3)
			break;
		run_shape(ck, &s, "merged requests");
		s.bad_rows = true;
		run_shape(ck, &s, "merged requests with NaN and infinite rows");
	}
	for (uint32_t rows = 1; rows <= 33; rows += 8) {
		struct shape s = simple(256, 384, 8, EXL3_CB_MUL1, rows);

		s.bad_rows = true;
		run_shape(ck, &s, "NaN and infinite rows");
	}
}

/* In deterministic mode the bits of a request must not depend on those it is merged with. */
static void neighbours(struct ck *ck)
{
	struct shape s = merged_shape(1, 1, 1);
	struct linear l;
	struct ck_rows *r = &l.rows[0];
	uint8_t *alone;

	ck_case_begin(ck, "linear deterministic: alone, merged, and beside a row of NaN");
	build(ck, &s, &l);
	alone = ck_alloc(r->y.bytes);
	l.dev.deterministic = true;
	l.dev.skipped = NULL;
	for (const struct exl3_kernel *k = ck->ops->kernels; k->name; k++) {
		const char *why = NULL;

		l.dev.nr_rows = 1;
		if (k->op != EXL3_OP_LINEAR || !ck_wanted(ck, k) || !k->supports(ck->dev, &l.dev))
			continue;
		for (int run = 0; run < 3 && !why; run++) {
			l.dev.nr_rows = run ? 3 : 1;
			if (run == 2)
				put_bad_rows(ck, &l.rows[1], s.k_log);
			memset(r->y.host, CK_CANARY, r->y.bytes);
			ck_buf_upload(ck, &r->y);
			if (ck_run(ck, &l.dev, k))
				why = "failed";
			ck_buf_download(ck, &r->y);
			if (!run)
				memcpy(alone, r->y.host, r->y.bytes);
			else if (memcmp(alone, r->y.host, r->y.bytes))
				why = run == 1 ? "other bits when merged"
					       : "other bits beside a row of NaN";
		}
		ck_result(ck, !why, k->name, why);
		ck_fill(ck, &l.rows[1].x, 1, s.k_log, l.rows[1].dev.x_dtype,
			l.rows[1].dev.x_stride);
		ck_buf_upload(ck, &l.rows[1].x);
	}
	free(alone);
	destroy(&l);
}

/* Requests of a few rows each, of every codebook, with enough of k and n for sums to be split. */
static void together(struct ck *ck)
{
	static const uint32_t rows[][ENTRIES] = {
		{1, 1, 1, 1, 1, 1, 1, 1}, {1, 2, 16, 3, 1, 9}, {17, 20}, {3, 33, 1}};
	static const struct {
		int rate2, codebook;
	} kind[] = {{8, EXL3_CB_MCG}, {6, EXL3_CB_3INST}, {8, EXL3_CB_MUL1}, {7, EXL3_CB_MUL1}};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		for (size_t j = ck->quick ? i % 2 : 0; j < sizeof(kind) / sizeof(kind[0]); j += ck->quick ? 2 : 1) {
			struct shape s = {.k_log = 1500,
					  .nr_shards = 2,
					  .shard = {{250, kind[j].rate2, kind[j].codebook, true},
						    {130, kind[j].rate2, kind[j].codebook, false}}};

			while (s.nr_entries < ENTRIES && rows[i][s.nr_entries]) {
				s.entry[s.nr_entries].m = rows[i][s.nr_entries];
				s.entry[s.nr_entries].x_dtype = dtypes[(s.nr_entries + j) % 3];
				s.entry[s.nr_entries].y_dtype = dtypes[(s.nr_entries + i) % 3];
				s.nr_entries++;
			}
			s.bad_rows = j == 1;
			run_shape(ck, &s, "requests that meet");
		}
}

void ck_linear(struct ck *ck)
{
	all_rates(ck);
	all_rows(ck);
	all_sizes(ck);
	all_dtypes(ck);
	fused(ck);
	merged(ck);
	neighbours(ck);
	together(ck);
}
