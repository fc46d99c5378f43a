/* SPDX-License-Identifier: Apache-2.0 */
/*
 * npy.c - NumPy array files, as far as exl3ctl needs them.
 *
 * A file: "\x93NUMPY", version (two bytes), length of the header (two bytes little endian, four from
 * version 2 on), the header, the elements. The header is the text of a Python dictionary:
 *
 *     {'descr': '<f4', 'fortran_order': False, 'shape': (3, 256), }
 */
#include "client/npy.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC      "\x93NUMPY"
#define MAGIC_SIZE 6u

/* ---- the header's text ---- */

struct cursor {
	const char *p, *end;
};

static void skip_space(struct cursor *c)
{
	while (c->p < c->end && (*c->p == ' ' || *c->p == '\t' || *c->p == '\n' || *c->p == '\r'))
		c->p++;
}

static bool eat(struct cursor *c, char ch)
{
	skip_space(c);
	if (c->p == c->end || *c->p != ch)
		return false;
	c->p++;
	return true;
}

/* A quoted string without escapes. */
static bool eat_string(struct cursor *c, char *ret, size_t size)
{
	size_t n = 0;
	char quote;

	skip_space(c);
	if (c->p == c->end || (*c->p != '\'' && *c->p != '"'))
		return false;
	quote = *c->p++;
	while (c->p < c->end && *c->p != quote) {
		if (*c->p == '\\' || n + 1 >= size)
			return false;
		ret[n++] = *c->p++;
	}
	ret[n] = 0;
	return c->p < c->end && *c->p++ == quote;
}

static bool eat_word(struct cursor *c, const char *word)
{
	size_t n = strlen(word);

	skip_space(c);
	if ((size_t)(c->end - c->p) < n || memcmp(c->p, word, n))
		return false;
	c->p += n;
	return true;
}

static bool eat_number(struct cursor *c, uint64_t *ret)
{
	uint64_t v = 0;
	bool any = false;

	skip_space(c);
	for (; c->p < c->end && *c->p >= '0' && *c->p <= '9'; c->p++, any = true)
		if (__builtin_mul_overflow(v, 10u, &v) ||
		    __builtin_add_overflow(v, (uint64_t)(*c->p - '0'), &v))
			return false;
	if (any && c->p < c->end && *c->p == 'L') /* as Python 2 wrote it */
		c->p++;
	*ret = v;
	return any;
}

static bool eat_shape(struct cursor *c, struct exl3_npy *a)
{
	a->nr_dims = 0;
	if (!eat(c, '('))
		return false;
	while (!eat(c, ')')) {
		if (a->nr_dims == EXL3_NPY_DIMS_MAX || !eat_number(c, &a->shape[a->nr_dims]))
			return false;
		a->nr_dims++;
		if (!eat(c, ','))
			return eat(c, ')');
	}
	return true;
}

struct header {
	char descr[16];
	bool fortran;
	bool has_descr, has_order, has_shape;
};

static bool eat_entry(struct cursor *c, struct header *h, struct exl3_npy *a)
{
	char key[16];

	if (!eat_string(c, key, sizeof(key)) || !eat(c, ':'))
		return false;
	if (!strcmp(key, "descr") && !h->has_descr)
		return h->has_descr = eat_string(c, h->descr, sizeof(h->descr));
	if (!strcmp(key, "shape") && !h->has_shape)
		return h->has_shape = eat_shape(c, a);
	if (!strcmp(key, "fortran_order") && !h->has_order) {
		h->fortran = eat_word(c, "True");
		return h->has_order = h->fortran || eat_word(c, "False");
	}
	return false;
}

static bool parse_header(const char *text, size_t size, struct header *h, struct exl3_npy *a)
{
	struct cursor c = {text, text + size};

	if (!eat(&c, '{'))
		return false;
	while (!eat(&c, '}')) {
		if (!eat_entry(&c, h, a))
			return false;
		if (!eat(&c, ',')) {
			if (!eat(&c, '}'))
				return false;
			break;
		}
	}
	skip_space(&c);
	return c.p == c.end && h->has_descr && h->has_order && h->has_shape;
}

/* "<f4" and so on; *swap: the other byte order. */
static int parse_type(const char *descr, struct exl3_npy *a, bool *swap, struct exl3_error *err)
{
	const bool little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
	const char *t = descr;

	*swap = false;
	if (*t == '<' || *t == '>' || *t == '|' || *t == '=') {
		*swap = (*t == '>' && little) || (*t == '<' && !little);
		t++;
	}
	if ((t[0] == 'f' || t[0] == 'i' || t[0] == 'u') &&
	    (t[1] == '1' || t[1] == '2' || t[1] == '4' || t[1] == '8') && !t[2] &&
	    !(t[0] == 'f' && t[1] == '1')) {
		a->kind = t[0];
		a->size = (unsigned)(t[1] - '0');
		return 0;
	}
	return exl3_errf(err, -EOPNOTSUPP, "element type '%s' is not supported", descr);
}

/* ---- the elements ---- */

/* Bytes of all elements; false: more than can be addressed. */
static bool count_bytes(struct exl3_npy *a, size_t *ret)
{
	uint64_t n = 1;

	for (unsigned i = 0; i < a->nr_dims; i++)
		if (__builtin_mul_overflow(n, a->shape[i], &n))
			return false;
	a->count = n;
	return !__builtin_mul_overflow(n, a->size, ret) && *ret <= (size_t)INT64_MAX;
}

static void swap_bytes(struct exl3_npy *a)
{
	unsigned char *p = a->data;

	for (uint64_t i = 0; i < a->count; i++, p += a->size)
		for (unsigned lo = 0, hi = a->size - 1; lo < hi; lo++, hi--) {
			unsigned char t = p[lo];

			p[lo] = p[hi];
			p[hi] = t;
		}
}

/* @from: first index runs fastest. Walks the target in order and keeps the position in the source. */
static void to_c_order(struct exl3_npy *a, const unsigned char *from)
{
	uint64_t index[EXL3_NPY_DIMS_MAX] = {0}, step[EXL3_NPY_DIMS_MAX], at = 0;
	unsigned char *to = a->data;

	for (unsigned i = 0; i < a->nr_dims; i++)
		step[i] = i ? step[i - 1] * a->shape[i - 1] : 1;
	for (uint64_t n = 0; n < a->count; n++, to += a->size) {
		memcpy(to, from + at * a->size, a->size);
		for (unsigned d = a->nr_dims; d-- > 0;) {
			at += step[d];
			if (++index[d] < a->shape[d])
				break;
			at -= step[d] * a->shape[d];
			index[d] = 0;
		}
	}
}

int exl3_npy_parse(const void *bytes, size_t size, struct exl3_npy *ret, struct exl3_error *err)
{
	const unsigned char *b = bytes;
	struct exl3_npy a = {0};
	struct header h = {0};
	size_t start, text, want;
	bool swap;
	int e;

	if (size < 10 || memcmp(b, MAGIC, MAGIC_SIZE))
		return exl3_errf(err, -EINVAL, "not a NumPy array file");
	if (b[6] < 1 || b[6] > 3)
		return exl3_errf(err, -EINVAL, "NumPy format version %u.%u is not known", b[6],
				 b[7]);
	start = b[6] == 1 ? 10 : 12;
	if (size < start)
		return exl3_errf(err, -EINVAL, "the header is cut off");
	text = (size_t)b[8] | (size_t)b[9] << 8;
	if (b[6] > 1)
		text |= (size_t)b[10] << 16 | (size_t)b[11] << 24;
	if (text > size - start)
		return exl3_errf(err, -EINVAL, "the header is cut off");
	if (!parse_header((const char *)b + start, text, &h, &a))
		return exl3_errf(err, -EINVAL, "the header makes no sense");
	e = parse_type(h.descr, &a, &swap, err);
	if (e < 0)
		return e;
	if (!count_bytes(&a, &want) || want != size - start - text)
		return exl3_errf(err, -EINVAL, "%zu bytes of elements do not match the shape",
				 size - start - text);
	a.data = malloc(want ? want : 1);
	if (!a.data)
		return exl3_errf(err, -ENOMEM, "no memory for %zu bytes", want);
	if (h.fortran && a.nr_dims > 1)
		to_c_order(&a, b + start + text);
	else
		memcpy(a.data, b + start + text, want);
	if (swap)
		swap_bytes(&a);
	*ret = a;
	return 0;
}

void exl3_npy_fini(struct exl3_npy *a)
{
	free(a->data);
	a->data = NULL;
}

/* ---- files ---- */

/* Not by size: a pipe has none, and a file can grow. */
static int read_all(FILE *f, char **ret, size_t *size)
{
	exl3_auto(exl3_freep) char *buf = NULL;
	size_t room = 0, n = 0;

	do {
		char *more;

		room = room ? 2 * room : 65536;
		more = realloc(buf, room);
		if (!more)
			return -ENOMEM;
		buf = more;
		n += fread(buf + n, 1, room - n, f);
		/* What is no NumPy file may have no end: /dev/zero. */
	} while (n == room && !memcmp(buf, MAGIC, sizeof(MAGIC) - 1));
	if (ferror(f))
		return errno ? -errno : -EIO;
	*ret = exl3_take_ptr(&buf);
	*size = n;
	return 0;
}

int exl3_npy_load(const char *path, struct exl3_npy *ret, struct exl3_error *err)
{
	exl3_auto(exl3_freep) char *bytes = NULL;
	FILE *f = fopen(path, "re");
	size_t size = 0;
	int e;

	if (!f)
		return exl3_errf(err, -errno, "%s: %m", path);
	e = read_all(f, &bytes, &size);
	fclose(f);
	if (e < 0)
		return exl3_errf(err, e, "%s: %s", path, strerror(-e));
	e = exl3_npy_parse(bytes, size, ret, err);
	return e < 0 ? exl3_err_prefix(err, "%s", path) : 0;
}

/* The header with its prefix, padded so that the elements start at a multiple of 64. */
static size_t make_header(char *buf, size_t size, const char *type, unsigned nr_dims,
			  const uint64_t *shape)
{
	size_t n = 10, end;

	n += (size_t)snprintf(buf + n, size - n,
			      "{'descr': '%c%s', 'fortran_order': False, 'shape': (",
			      __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? '<' : '>', type);
	for (unsigned i = 0; i < nr_dims; i++)
		n += (size_t)snprintf(buf + n, size - n,
				      i + 1 < nr_dims || nr_dims == 1 ? "%llu, " : "%llu",
				      (unsigned long long)shape[i]);
	n += (size_t)snprintf(buf + n, size - n, "), }");
	end = (n + 1 + 63) & ~(size_t)63;
	memset(buf + n, ' ', end - n - 1);
	buf[end - 1] = '\n';
	memcpy(buf, MAGIC "\x01", 8); /* and its zero byte: version 1.0 */
	buf[8] = (char)((end - 10) & 0xff);
	buf[9] = (char)((end - 10) >> 8);
	return end;
}

int exl3_npy_save(const char *path, const char *type, unsigned nr_dims, const uint64_t *shape,
		  const void *data, struct exl3_error *err)
{
	char header[512];
	size_t n, bytes = (size_t)(type[1] - '0');
	FILE *f;
	bool ok;

	if (nr_dims > EXL3_NPY_DIMS_MAX)
		return exl3_errf(err, -EINVAL, "%s: %u dimensions", path, nr_dims);
	for (unsigned i = 0; i < nr_dims; i++)
		bytes *= shape[i];
	n = make_header(header, sizeof(header), type, nr_dims, shape);
	f = fopen(path, "we");
	if (!f)
		return exl3_errf(err, -errno, "%s: %m", path);
	ok = fwrite(header, 1, n, f) == n && fwrite(data, 1, bytes, f) == bytes;
	/* Buffered bytes may meet a full disk only now. */
	if (fclose(f) != 0 || !ok)
		return exl3_errf(err, -errno, "%s: %m", path);
	return 0;
}
