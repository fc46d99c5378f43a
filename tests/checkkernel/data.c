/* SPDX-License-Identifier: Apache-2.0 */
/* data.c - random weights and operands, on the host and in a slab of the device. */
#include "tests/checkkernel/ck.h"

#include "kernels/cpu/ref.h"

#include <stdarg.h>

/* splitmix64: the generator of the format's test vectors too. */
uint64_t ck_random(struct ck *ck)
{
	uint64_t z = ck->random += 0x9e3779b97f4a7c15ull;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

uint32_t ck_below(struct ck *ck, uint32_t limit)
{
	return (uint32_t)((ck_random(ck) >> 32) * limit >> 32);
}

double ck_uniform(struct ck *ck, double low, double high)
{
	return low + (high - low) * (double)(ck_random(ck) >> 11) * 0x1p-53;
}

void *ck_alloc(size_t bytes)
{
	void *ptr = calloc(1, bytes ? bytes : 1);

	if (!ptr) {
		fprintf(stderr, "checkkernel: out of memory (%zu bytes)\n", bytes);
		exit(1);
	}
	return ptr;
}

struct ck_buf ck_buf_new(struct ck *ck, size_t bytes)
{
	struct ck_buf buf = {.bytes = bytes, .offset = (ck->used + 255) / 256 * 256};

	if (bytes > ck->slab->bytes || buf.offset > ck->slab->bytes - bytes) {
		fprintf(stderr, "checkkernel: %s: the slab of %zu bytes is too small\n", ck->what,
			ck->slab->bytes);
		exit(1);
	}
	ck->used = buf.offset + bytes;
	buf.host = ck_alloc(bytes);
	buf.dev = (char *)ck->slab->ptr + buf.offset;
	return buf;
}

void ck_buf_upload(struct ck *ck, const struct ck_buf *buf)
{
	struct exl3_error err;

	if (ck->ops->slab_write(ck->slab, buf->offset, buf->host, buf->bytes, &err) ||
	    ck->ops->slab_sync(ck->slab, &err)) {
		fprintf(stderr, "checkkernel: upload: %s\n", err.text);
		exit(1);
	}
}

void ck_buf_download(struct ck *ck, const struct ck_buf *buf)
{
	struct exl3_error err;

	if (ck->ops->slab_read(ck->slab, buf->offset, buf->host, buf->bytes, &err)) {
		fprintf(stderr, "checkkernel: download: %s\n", err.text);
		exit(1);
	}
}

void ck_buf_free(struct ck_buf *buf)
{
	free(buf->host);
	buf->host = NULL;
}

static uint32_t ceil128(uint32_t n)
{
	return (n + EXL3_HAD - 1) / EXL3_HAD * EXL3_HAD;
}

struct ck_matrix *ck_matrix_new(struct ck *ck, uint32_t k_log, uint32_t n_log, int rate2,
				int codebook, bool bias)
{
	struct ck_matrix *m = ck_alloc(sizeof(*m));
	uint32_t k = ceil128(k_log), n = ceil128(n_log);
	size_t trellis = exl3_trellis_bytes(k, n, rate2);
	struct ck_buf t = ck_buf_new(ck, trellis), u = ck_buf_new(ck, 2 * (size_t)k);
	struct ck_buf v = ck_buf_new(ck, 2 * (size_t)n), b = ck_buf_new(ck, 4 * (size_t)n);

	for (size_t i = 0; i < trellis / 8; i++)
		((uint64_t *)t.host)[i] = ck_random(ck);
	for (uint32_t i = 0; i < k; i++) {
		double s = ck_uniform(ck, 0.5, 1) / 16;

		((uint16_t *)u.host)[i] = exl3_f64_to_f16(ck_random(ck) & 1 ? -s : s);
	}
	for (uint32_t j = 0; j < n; j++) {
		double s = ck_uniform(ck, 0.5, 1);

		/* Padded columns as writers leave them: zero, or noise that must not be seen. */
		((uint16_t *)v.host)[j] = exl3_f64_to_f16(ck_random(ck) & 1 ? -s : s);
		((float *)b.host)[j] = j < n_log ? (float)ck_uniform(ck, -1, 1) : 0;
	}
	ck_buf_upload(ck, &t);
	ck_buf_upload(ck, &u);
	ck_buf_upload(ck, &v);
	ck_buf_upload(ck, &b);
	m->host = (struct exl3_matrix){.k = k,
				       .n = n,
				       .k_log = k_log,
				       .n_log = n_log,
				       .rate2 = (uint8_t)rate2,
				       .codebook = (uint8_t)codebook};
	m->dev = m->host;
	m->host.trellis = t.host;
	m->host.suh = u.host;
	m->host.svh = v.host;
	m->host.bias = b.host;
	m->dev.trellis = t.dev;
	m->dev.suh = u.dev;
	m->dev.svh = v.dev;
	m->dev.bias = b.dev;
	if (!bias) {
		free(b.host);
		m->host.bias = m->dev.bias = NULL;
	}
	return m;
}

struct ck_matrix *ck_matrix_free(struct ck_matrix *m)
{
	if (m) {
		free((void *)(uintptr_t)m->host.trellis);
		free((void *)(uintptr_t)m->host.suh);
		free((void *)(uintptr_t)m->host.svh);
		free((void *)(uintptr_t)m->host.bias);
		free(m);
	}
	return NULL;
}

void ck_put(const struct ck_buf *buf, uint8_t dtype, size_t stride, uint32_t row, uint32_t col,
	    double value)
{
	exl3_ref_store((char *)buf->host + row * stride, dtype, col, value);
}

void ck_fill(struct ck *ck, const struct ck_buf *buf, uint32_t m, uint32_t width, uint8_t dtype,
	     size_t stride)
{
	for (uint32_t r = 0; r < m; r++)
		for (uint32_t i = 0; i < width; i++)
			ck_put(buf, dtype, stride, r, i, ck_uniform(ck, -2, 2));
}

static uint32_t row_stride(uint32_t width, uint8_t dtype, uint32_t gap)
{
	return (width * exl3_dtype_bytes(dtype) + 15) / 16 * 16 + gap;
}

struct ck_rows ck_rows_new(struct ck *ck, uint32_t m, uint32_t x_width, uint32_t y_width,
			   uint8_t x_dtype, uint8_t y_dtype, bool stored, uint32_t x_gap,
			   uint32_t y_gap)
{
	uint32_t x_stride = row_stride(x_width, x_dtype, x_gap);
	uint32_t y_stride = row_stride(y_width, y_dtype, y_gap);
	struct ck_rows rows = {.width = y_width};

	rows.x = ck_buf_new(ck, (size_t)m * x_stride);
	/* What is between rows must not matter: NaN in every dtype. */
	memset(rows.x.host, 0xff, rows.x.bytes);
	ck_fill(ck, &rows.x, m, x_width, x_dtype, x_stride);
	ck_buf_upload(ck, &rows.x);
	rows.y = ck_buf_new(ck, (size_t)m * y_stride + 2 * CK_MARGIN);
	rows.ref = ck_alloc((size_t)m * y_width * sizeof(float));
	rows.dev = (struct exl3_rows){.x = rows.x.dev,
				      .y = (char *)rows.y.dev + CK_MARGIN,
				      .x_stride = x_stride,
				      .y_stride = y_stride,
				      .m = m,
				      .x_dtype = x_dtype,
				      .y_dtype = y_dtype,
				      .stored = stored};
	rows.host = rows.dev;
	rows.host.x = rows.x.host;
	rows.host.y = rows.ref;
	rows.host.y_stride = y_width * (uint32_t)sizeof(float);
	rows.host.y_dtype = EXL3_F32;
	return rows;
}

void ck_rows_free(struct ck_rows *rows)
{
	ck_buf_free(&rows->x);
	ck_buf_free(&rows->y);
	ck_buf_free(&rows->lse);
	free(rows->ref);
	free(rows->ref_lse);
}

bool ck_skip(struct ck *ck)
{
	return ck->tiny && ck->turn++ % 5;
}

void ck_case_begin(struct ck *ck, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(ck->what, sizeof(ck->what), fmt, ap);
	va_end(ap);
	ck->used = 0;
	ck->cases++;
}
