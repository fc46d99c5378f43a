/* SPDX-License-Identifier: Apache-2.0 */
/* alone.c - deterministic mode: requests in one launch have the bits that each has by itself. */
#include "tests/checkkernel/ck.h"

#include <string.h>

static void clear(struct ck *ck, struct ck_rows *rows)
{
	memset(rows->y.host, CK_CANARY, rows->y.bytes);
	ck_buf_upload(ck, &rows->y);
	if (rows->lse.host) {
		memset(rows->lse.host, CK_CANARY, rows->lse.bytes);
		ck_buf_upload(ck, &rows->lse);
	}
}

static void fetch(struct ck *ck, struct ck_rows *rows)
{
	ck_buf_download(ck, &rows->y);
	if (rows->lse.host)
		ck_buf_download(ck, &rows->lse);
}

/* Entry @i of a work, as a work of its own. */
static struct exl3_work entry_of(const struct exl3_work *work, uint32_t i, uint64_t *skipped)
{
	struct exl3_work one = *work;

	one.rows = &work->rows[i];
	one.nr_rows = 1;
	one.skipped = skipped;
	if (work->op == EXL3_OP_MOE)
		one.u.moe.routes = &work->u.moe.routes[i];
	else if (work->op == EXL3_OP_MLA_DECODE)
		one.u.mla.caches = &work->u.mla.caches[i];
	return one;
}

/* May the daemon put all entries into one launch? */
static bool one_class(struct ck *ck, const struct exl3_work *work)
{
	uint32_t first = 0;

	for (uint32_t i = 0; ck->ops->merge_class && i < work->nr_rows; i++) {
		struct exl3_work one = entry_of(work, i, NULL);
		uint32_t class = ck->ops->merge_class(ck->dev, &one);

		if (!class || (i && class != first))
			return false;
		first = class;
	}
	return first != 0;
}

void ck_alone(struct ck *ck, const struct exl3_work *work, struct ck_rows *rows)
{
	uint8_t *alone[16] = {NULL}, *lse[16] = {NULL};
	struct exl3_work all = *work;
	uint64_t skipped[16];
	const char *why = NULL;
	double worst_max = ck->worst_max, worst_rms = ck->worst_rms;
	bool ok = true;

	all.deterministic = true;
	all.kernel = NULL;
	for (uint32_t i = 0; i < all.nr_rows && !why; i++) {
		struct exl3_work one = entry_of(&all, i, &skipped[i]);

		clear(ck, &rows[i]);
		if (ck_run(ck, &one, NULL))
			why = "failed alone";
		fetch(ck, &rows[i]);
		alone[i] = ck_alloc(rows[i].y.bytes);
		memcpy(alone[i], rows[i].y.host, rows[i].y.bytes);
		if (rows[i].lse.host) {
			lse[i] = ck_alloc(rows[i].lse.bytes);
			memcpy(lse[i], rows[i].lse.host, rows[i].lse.bytes);
		}
	}
	for (uint32_t i = 0; i < all.nr_rows; i++)
		clear(ck, &rows[i]);
	all.skipped = skipped;
	if (!why && ck_run(ck, &all, NULL))
		why = "failed together";
	ck->worst_max = ck->det_max;
	ck->worst_rms = ck->det_rms;
	for (uint32_t i = 0; i < all.nr_rows && !why; i++) {
		fetch(ck, &rows[i]);
		if (memcmp(alone[i], rows[i].y.host, rows[i].y.bytes) ||
		    (lse[i] && memcmp(lse[i], rows[i].lse.host, rows[i].lse.bytes)))
			why = "deterministic: other bits together than alone";
		else if (skipped[i] != rows[i].skipped)
			why = "deterministic: another count of skipped numbers";
		else
			ok &= ck_compare(ck, &rows[i], "(deterministic)");
	}
	ck->det_max = ck->worst_max;
	ck->det_rms = ck->worst_rms;
	ck->worst_max = worst_max;
	ck->worst_rms = worst_rms;
	if (!why)
		ck->together += one_class(ck, work);
	if (why || ok)
		ck_result(ck, !why, "(deterministic)", why);
	for (uint32_t i = 0; i < 16; i++) {
		free(alone[i]);
		free(lse[i]);
	}
}
