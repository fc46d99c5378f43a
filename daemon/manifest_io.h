/* SPDX-License-Identifier: Apache-2.0 */
/* manifest_io.h - numbers and texts one behind the other: written into memory that grows, read with limits. */
#ifndef EXL3_DAEMON_MANIFEST_IO_H
#define EXL3_DAEMON_MANIFEST_IO_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* @failed: out of memory; it stays so, and only the end needs to ask. */
struct exl3_out {
	char *p; /* owned by the caller */
	size_t bytes, room;
	bool failed;
};

static inline void exl3_put_bytes(struct exl3_out *o, const void *p, size_t bytes)
{
	if (!o->failed && bytes > o->room - o->bytes) {
		size_t room = 2 * o->room > o->bytes + bytes ? 2 * o->room : o->bytes + bytes + 4096;
		char *more = realloc(o->p, room);

		o->failed = !more;
		if (more) {
			o->p = more;
			o->room = room;
		}
	}
	if (o->failed || !bytes)
		return;
	memcpy(o->p + o->bytes, p, bytes);
	o->bytes += bytes;
}

static inline void exl3_put_u32(struct exl3_out *o, uint32_t v)
{
	exl3_put_bytes(o, &v, sizeof(v));
}

static inline void exl3_put_u64(struct exl3_out *o, uint64_t v)
{
	exl3_put_bytes(o, &v, sizeof(v));
}

static inline void exl3_put_text(struct exl3_out *o, const char *text)
{
	size_t n = strlen(text);

	exl3_put_u32(o, (uint32_t)n);
	exl3_put_bytes(o, text, n);
}

/* @failed: it ended too early, a text was too long, or there was no memory; then all reads give 0 or NULL. */
struct exl3_in {
	const char *p;
	size_t left;
	bool failed;
};

static inline void exl3_get_bytes(struct exl3_in *in, void *p, size_t bytes)
{
	if (in->failed || bytes > in->left) {
		in->failed = true;
		memset(p, 0, bytes);
		return;
	}
	if (bytes)
		memcpy(p, in->p, bytes);
	in->p += bytes;
	in->left -= bytes;
}

static inline uint32_t exl3_get_u32(struct exl3_in *in)
{
	uint32_t v;

	exl3_get_bytes(in, &v, sizeof(v));
	return v;
}

static inline uint64_t exl3_get_u64(struct exl3_in *in)
{
	uint64_t v;

	exl3_get_bytes(in, &v, sizeof(v));
	return v;
}

/* The caller's to free; at most @max bytes, none of them zero. */
static inline char *exl3_get_text(struct exl3_in *in, size_t max)
{
	uint32_t n = exl3_get_u32(in);
	char *text;

	if (in->failed || n > max || n > in->left || memchr(in->p, 0, n)) {
		in->failed = true;
		return NULL;
	}
	text = malloc((size_t)n + 1);
	if (!text) {
		in->failed = true;
		return NULL;
	}
	exl3_get_bytes(in, text, n);
	text[n] = 0;
	return text;
}

#endif
