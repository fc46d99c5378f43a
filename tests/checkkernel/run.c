/* SPDX-License-Identifier: Apache-2.0 */
/* run.c - runs the oracle once and every kernel of the table after it, and compares. */
#include "tests/checkkernel/ck.h"

#include "kernels/cpu/ref.h"

#include <errno.h>
#include <math.h>
#include <poll.h>

void ck_result(struct ck *ck, bool ok, const char *kernel, const char *why)
{
	if (ok) {
		ck->passed++;
		return;
	}
	ck->failed++;
	printf("FAILED %s: %s: %s\n", kernel, ck->what, why);
}

bool ck_wanted(const struct ck *ck, const struct exl3_kernel *kernel)
{
	return !ck->only_kernel || !strcmp(ck->only_kernel, kernel->name);
}

int ck_run(struct ck *ck, struct exl3_work *work, const struct exl3_kernel *kernel)
{
	struct exl3_done done = {0};
	int n;

	work->kernel = kernel;
	work->tag = work;
	n = ck->ops->submit(ck->dev, work);
	if (n)
		return n;
	/* As the daemon's loop does: look, say that it sleeps, sleep. */
	while ((n = ck->ops->poll(ck->dev, &done, 1)) == 0) {
		struct pollfd p = {.fd = ck->ops->event_fd(ck->dev), .events = POLLIN};

		if (ck->ops->wake_arm(ck->dev) && poll(&p, 1, CK_TIMEOUT_MS) == 0)
			return -ETIMEDOUT;
	}
	if (n < 0)
		return n;
	return done.tag == work ? done.result : -EPROTO;
}

/* Half the distance between numbers of @dtype near @v. */
static double half_ulp(uint8_t dtype, double v)
{
	int digits = dtype == EXL3_F16 ? 11 : dtype == EXL3_BF16 ? 8 : 24, e;

	if (v == 0 || !isfinite(v))
		return dtype == EXL3_F16 ? 0x1p-25 : 0;
	frexp(v, &e);
	if (dtype == EXL3_F16 && e < -13)
		e = -13; /* subnormal */
	return ldexp(1, e - digits - 1);
}

static bool same_class(double a, double b)
{
	if (isnan(a) || isnan(b))
		return isnan(a) && isnan(b);
	if (isinf(a) || isinf(b))
		return a == b;
	return true;
}

/* Largest finite number of a dtype: beyond it the reference counts as infinite. */
static double as_seen(uint8_t dtype, double v)
{
	if (dtype == EXL3_F16 && fabs(v) >= 65520)
		return v > 0 ? INFINITY : -INFINITY;
	return v;
}

static bool canaries_whole(const struct ck_rows *rows, char *why, size_t size)
{
	const uint8_t *y = rows->y.host;
	size_t used = (size_t)rows->width * exl3_dtype_bytes(rows->dev.y_dtype);

	for (size_t i = 0; i < rows->y.bytes; i++) {
		size_t in = i - CK_MARGIN, row = in / rows->dev.y_stride;
		bool data = i >= CK_MARGIN && row < rows->dev.m && in % rows->dev.y_stride < used;

		if (!data && y[i] != CK_CANARY) {
			snprintf(why, size, "wrote outside y: byte %ld", (long)i - (long)CK_MARGIN);
			return false;
		}
	}
	return true;
}

struct error_sum {
	double worst, square, ref_square;
	uint64_t count;
};

static bool add_error(struct error_sum *s, uint8_t dtype, double got, double want, char *why,
		      size_t size, uint32_t r, uint32_t c)
{
	double err;

	want = as_seen(dtype, want);
	if (!same_class(got, want)) {
		snprintf(why, size, "row %u column %u is %g instead of %g", r, c, got, want);
		return false;
	}
	if (!isfinite(want))
		return true;
	err = fabs(got - want) - half_ulp(dtype, fabs(want) > fabs(got) ? want : got);
	err = err > 0 ? err : 0;
	s->worst = err > s->worst ? err : s->worst;
	s->square += err * err;
	s->ref_square += want * want;
	s->count++;
	return true;
}

static bool within(struct ck *ck, const struct error_sum *s, double typical, const char *name,
		   char *why, size_t size)
{
	double rms_ref = s->count ? sqrt(s->ref_square / (double)s->count) : 0;
	double rms = s->count ? sqrt(s->square / (double)s->count) : 0;
	/* A single output may be small by chance, its error is not. */
	double scale = rms_ref > typical ? rms_ref : typical > 0 ? typical : 1;

	ck->worst_max = fmax(ck->worst_max, s->worst / scale);
	ck->worst_rms = fmax(ck->worst_rms, rms / scale);
	if (s->worst / scale <= ck->tol_max && rms / scale <= ck->tol_rms)
		return true;
	snprintf(why, size, "%s: error max %.3g rms %.3g of rms %.4g (limits %.3g, %.3g)", name,
		 s->worst / scale, rms / scale, rms_ref, ck->tol_max, ck->tol_rms);
	return false;
}

bool ck_compare(struct ck *ck, const struct ck_rows *rows, const char *kernel)
{
	const char *y = (const char *)rows->y.host + CK_MARGIN;
	struct error_sum sum = {0}, lse = {0};
	char why[200] = "";
	bool ok = canaries_whole(rows, why, sizeof(why));

	for (uint32_t r = 0; ok && r < rows->dev.m; r++)
		for (uint32_t c = 0; ok && c < rows->width; c++)
			ok = add_error(&sum, rows->dev.y_dtype,
				       exl3_ref_load(y + (size_t)r * rows->dev.y_stride,
						     rows->dev.y_dtype, c),
				       rows->ref[(size_t)r * rows->width + c], why, sizeof(why), r,
				       c);
	ok = ok && within(ck, &sum, rows->typical, "y", why, sizeof(why));
	if (ok && rows->ref_lse) {
		const uint8_t *bytes = rows->lse.host;
		const float *got = (const float *)(const void *)(bytes + CK_MARGIN);
		size_t n = (size_t)rows->dev.m * rows->heads;

		for (size_t i = 0; ok && i < n; i++)
			ok = add_error(&lse, EXL3_F32, got[i], rows->ref_lse[i], why, sizeof(why),
				       (uint32_t)(i / rows->heads), (uint32_t)(i % rows->heads));
		for (size_t i = 0; ok && i < CK_MARGIN; i++)
			if (bytes[i] != CK_CANARY || bytes[CK_MARGIN + 4 * n + i] != CK_CANARY) {
				snprintf(why, sizeof(why), "wrote outside lse");
				ok = false;
			}
		ok = ok && within(ck, &lse, 1, "lse", why, sizeof(why));
	}
	if (!ok)
		ck_result(ck, false, kernel, why);
	return ok;
}

static void run_kernel(struct ck *ck, struct exl3_work *dev, struct ck_rows *rows,
		       const struct exl3_kernel *kernel, uint64_t *skipped)
{
	const char *name = kernel ? kernel->name : "(chosen)";
	char why[100];
	bool ok = true;
	int ret;

	for (uint32_t i = 0; i < dev->nr_rows; i++) {
		memset(rows[i].y.host, CK_CANARY, rows[i].y.bytes);
		ck_buf_upload(ck, &rows[i].y);
		if (rows[i].lse.host) {
			memset(rows[i].lse.host, CK_CANARY, rows[i].lse.bytes);
			ck_buf_upload(ck, &rows[i].lse);
		}
		skipped[i] = 12345;
	}
	ret = ck_run(ck, dev, kernel);
	if (ret) {
		snprintf(why, sizeof(why), "returned %d (%s)", ret, strerror(-ret));
		ck_result(ck, false, name, why);
		return;
	}
	for (uint32_t i = 0; ok && i < dev->nr_rows; i++) {
		ck_buf_download(ck, &rows[i].y);
		if (rows[i].lse.host)
			ck_buf_download(ck, &rows[i].lse);
		ok = ck_compare(ck, &rows[i], name);
		if (ok && skipped[i] != rows[i].skipped) {
			snprintf(why, sizeof(why), "entry %u: skipped %llu instead of %llu", i,
				 (unsigned long long)skipped[i],
				 (unsigned long long)rows[i].skipped);
			ck_result(ck, false, name, why);
			ok = false;
		}
	}
	if (ok)
		ck_result(ck, true, name, NULL);
}

void ck_check(struct ck *ck, struct exl3_work *host, struct exl3_work *dev, struct ck_rows *rows)
{
	size_t bytes = exl3_ref_scratch(host);
	void *scratch = ck_alloc(bytes);
	uint64_t skipped[16] = {0};
	bool any = false;
	int ret;

	if (dev->nr_rows > 16)
		abort();
	host->skipped = skipped;
	ret = exl3_ref_run(host, scratch, bytes);
	free(scratch);
	if (ret) {
		host->skipped = NULL;
		ck_result(ck, false, "oracle", strerror(-ret));
		return;
	}
	for (uint32_t i = 0; i < dev->nr_rows; i++)
		rows[i].skipped = skipped[i];
	dev->skipped = skipped;
	for (const struct exl3_kernel *k = ck->ops->kernels; k->name; k++) {
		if (k->op != dev->op || !k->supports(ck->dev, dev))
			continue;
		any = true;
		if (ck_wanted(ck, k))
			run_kernel(ck, dev, rows, k, skipped);
	}
	if (!any)
		ck_result(ck, false, "(any)", "no kernel supports this");
	else if (!ck->only_kernel)
		run_kernel(ck, dev, rows, NULL, skipped);
	if (any && dev->nr_rows > 1 && !ck->only_kernel)
		ck_alone(ck, dev, rows);
	dev->skipped = NULL;
	host->skipped = NULL;
}
