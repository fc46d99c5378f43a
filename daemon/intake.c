/* SPDX-License-Identifier: Apache-2.0 */
/* intake.c - takes a checkpoint's bytes as they stream by: hashes, checks, converts, stores. */
#include "daemon/intake.h"

#include "daemon/loader.h"
#include "kernels/format.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* Converted vectors wait here for the device's copy. The longest one is a bias of as many f32 as the
 * plan allows columns, or signs of as many rows in f16. */
#define VECTOR_BYTES (4u << 20)
_Static_assert(VECTOR_BYTES >= EXL3_WHOLE_MAX / 64 * 16 * 4, "a vector fits");

struct exl3_intake {
	struct exl3_plan *plan; /* borrowed, as the next four */
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev;
	struct exl3_slab *slab;
	int tensor_fd;
	XXH3_state_t *state;         /* owned; of the piece that is coming in */
	XXH3_state_t *outer;         /* owned; of the pieces' hashes of the tensor that is coming in */
	XXH128_canonical_t **hashes; /* owned; [file][tensor] */
	char *vectors;               /* owned, VECTOR_BYTES of staging memory */
	size_t vectors_used;         /* since the last sync */
};

int exl3_intake_new(struct exl3_plan *plan, const struct exl3_backend_ops *ops,
		    struct exl3_dev *dev, struct exl3_slab *slab, int tensor_fd,
		    struct exl3_intake **ret, struct exl3_error *err)
{
	const struct exl3_ckpt *ckpt = plan->ckpt;
	struct exl3_intake *in = calloc(1, sizeof(*in));
	bool ok = in != NULL;

	if (ok) {
		*in = (struct exl3_intake){plan, ops, dev, slab, tensor_fd,
					   NULL, NULL, NULL, NULL, 0};
		in->state = XXH3_createState();
		in->outer = XXH3_createState();
		in->hashes = calloc(ckpt->nr_files + 1, sizeof(*in->hashes));
		in->vectors = ops->staging_new(dev, VECTOR_BYTES);
		ok = in->state && in->outer && in->hashes && in->vectors;
	}
	for (uint32_t f = 0; ok && f < ckpt->nr_files; f++) {
		in->hashes[f] = calloc(ckpt->files[f].nr_tensors + 1, sizeof(**in->hashes));
		ok = in->hashes[f] != NULL;
		/* Empty tensors never come in; theirs is the hash of nothing. */
		for (uint32_t i = 0; ok && i < ckpt->files[f].nr_tensors; i++)
			XXH128_canonicalFromHash(&in->hashes[f][i], XXH3_128bits("", 0));
	}
	if (!ok) {
		exl3_intake_free(in);
		return exl3_errf(err, -ENOMEM, "out of memory");
	}
	*ret = in;
	return 0;
}

struct exl3_intake *exl3_intake_free(struct exl3_intake *in)
{
	if (!in)
		return NULL;
	for (uint32_t f = 0; in->hashes && f < in->plan->ckpt->nr_files; f++)
		free(in->hashes[f]);
	free(in->hashes);
	XXH3_freeState(in->state);
	XXH3_freeState(in->outer);
	if (in->vectors)
		in->ops->staging_free(in->dev, in->vectors, VECTOR_BYTES);
	free(in);
	return NULL;
}

void *exl3_intake_buffer_new(void *arg, size_t bytes)
{
	struct exl3_intake *in = arg;

	return in->ops->staging_new(in->dev, bytes);
}

void exl3_intake_buffer_free(void *arg, void *p, size_t bytes)
{
	struct exl3_intake *in = arg;

	in->ops->staging_free(in->dev, p, bytes);
}

int exl3_intake_sync(void *arg, struct exl3_error *err)
{
	struct exl3_intake *in = arg;
	int rc = in->ops->slab_sync(in->slab, err);

	if (rc == 0)
		in->vectors_used = 0;
	return rc;
}

static int vector_new(struct exl3_intake *in, size_t bytes, void **ret, struct exl3_error *err)
{
	if (bytes > VECTOR_BYTES - in->vectors_used) {
		int rc = exl3_intake_sync(in, err);

		if (rc < 0)
			return rc;
	}
	*ret = in->vectors + in->vectors_used;
	in->vectors_used += (bytes + EXL3_SLAB_ALIGN - 1) / EXL3_SLAB_ALIGN * EXL3_SLAB_ALIGN;
	return 0;
}

static uint16_t get_u16(const void *p, size_t i)
{
	uint16_t v;

	memcpy(&v, (const char *)p + 2 * i, 2); /* at any byte of the file */
	return le16toh(v);
}

static uint32_t get_u32(const void *p, size_t i)
{
	uint32_t v;

	memcpy(&v, (const char *)p + 4 * i, 4);
	return le32toh(v);
}

/* ---- hashes ---- */

static bool stored_as_it_is(const struct exl3_plan_item *item)
{
	return item->use == EXL3_USE_PLAIN || item->use == EXL3_USE_TRELLIS ||
	       item->use == EXL3_USE_SCALE;
}

static void piece_done(struct exl3_intake *in, uint32_t file, uint32_t index, uint64_t nr,
		       XXH128_hash_t h)
{
	const struct exl3_st_tensor *t = &in->plan->ckpt->files[file].tensors[index];
	const struct exl3_plan_item *item = &in->plan->items[file][index];
	uint64_t pieces = exl3_pieces_of(t->bytes);
	XXH128_canonical_t c;

	XXH128_canonicalFromHash(&c, h);
	if (stored_as_it_is(item))
		memcpy(in->plan->pieces[item->piece + nr], c.digest, EXL3_PIECE_HASH);
	if (pieces == 1) {
		in->hashes[file][index] = c;
		return;
	}
	if (nr == 0)
		XXH3_128bits_reset(in->outer);
	XXH3_128bits_update(in->outer, c.digest, sizeof(c.digest));
	if (nr + 1 == pieces)
		XXH128_canonicalFromHash(&in->hashes[file][index],
					 XXH3_128bits_digest(in->outer));
}

/* A tensor's hash is that of its piece or, if it has several, of their hashes one behind the other: what
 * is stored as it came need not be hashed twice. */
static void hash(struct exl3_intake *in, uint32_t file, uint32_t index, uint64_t off, const char *p,
		 size_t bytes)
{
	uint64_t total = in->plan->ckpt->files[file].tensors[index].bytes;

	while (bytes) {
		uint64_t nr = off / EXL3_PIECE, begin = nr * EXL3_PIECE, end = begin + EXL3_PIECE;
		size_t n;

		if (end > total)
			end = total;
		n = end - off < bytes ? (size_t)(end - off) : bytes;
		if (off == begin && off + n == end) {
			piece_done(in, file, index, nr, XXH3_128bits(p, n));
		} else {
			if (off == begin)
				XXH3_128bits_reset(in->state);
			XXH3_128bits_update(in->state, p, n);
			if (off + n == end)
				piece_done(in, file, index, nr, XXH3_128bits_digest(in->state));
		}
		off += n;
		p += n;
		bytes -= n;
	}
}

/* Of what was converted, as it is stored. */
static void hash_converted(struct exl3_intake *in, const struct exl3_plan_item *item, const char *p,
			   size_t bytes)
{
	for (uint64_t nr = 0; bytes; nr++) {
		size_t n = bytes < EXL3_PIECE ? bytes : EXL3_PIECE;
		XXH128_canonical_t c;

		XXH128_canonicalFromHash(&c, XXH3_128bits(p, n));
		memcpy(in->plan->pieces[item->piece + nr], c.digest, EXL3_PIECE_HASH);
		p += n;
		bytes -= n;
	}
}

/* ---- what is stored ---- */

static int put_scale(struct exl3_intake *in, const char *file, const struct exl3_st_tensor *t,
		     uint64_t offset, const void *p, struct exl3_error *err)
{
	for (uint64_t i = 0; i < t->count; i++)
		if ((get_u16(p, i) & 0x7c00) == 0x7c00)
			return exl3_errf(err, -EINVAL,
					 "%s: tensor '%.160s': element %llu is not finite", file,
					 t->name, (unsigned long long)i);
	return in->ops->slab_write(in->slab, offset, p, t->bytes, err);
}

/* Bit i of word j is the sign of element 16 j + i, set = -1. */
static int put_signs(struct exl3_intake *in, const struct exl3_st_tensor *t,
		     const struct exl3_plan_item *item, const void *p, struct exl3_error *err)
{
	uint16_t *out;
	void *v;
	int rc = vector_new(in, t->count * 32, &v, err);

	if (rc < 0)
		return rc;
	out = v;
	for (uint64_t j = 0; j < t->count; j++)
		for (int i = 0; i < 16; i++)
			out[16 * j + (unsigned)i] = get_u16(p, j) >> i & 1 ? 0xbc00 : 0x3c00;
	hash_converted(in, item, v, t->count * 32);
	return in->ops->slab_write(in->slab, item->offset, v, t->count * 32, err);
}

static int put_bias(struct exl3_intake *in, const struct exl3_matrix *m,
		    const struct exl3_st_tensor *t, const struct exl3_plan_item *item,
		    const void *p, struct exl3_error *err)
{
	bool f16 = !strcmp(t->dtype->name, "F16"), bf16 = !strcmp(t->dtype->name, "BF16");
	float *out;
	void *v;
	int rc = vector_new(in, 4ull * m->n, &v, err);

	if (rc < 0)
		return rc;
	out = v;
	for (uint32_t i = 0; i < m->n; i++) {
		uint32_t bits;

		out[i] = 0; /* padded columns, whatever the file has there */
		if (i >= m->n_log || i >= t->count)
			continue;
		if (f16 || bf16) {
			out[i] = f16 ? exl3_f16_to_f32(get_u16(p, i))
				     : exl3_bf16_to_f32(get_u16(p, i));
		} else {
			bits = get_u32(p, i);
			memcpy(&out[i], &bits, 4);
		}
	}
	hash_converted(in, item, v, 4ull * m->n);
	return in->ops->slab_write(in->slab, item->offset, v, 4ull * m->n, err);
}

static int check_marker(struct exl3_named_matrix *mat, const void *p, struct exl3_error *err)
{
	bool mcg = mat->m.codebook == EXL3_CB_MCG;
	uint32_t value = get_u32(p, 0);

	if (value == (mcg ? EXL3_MUL_MCG : EXL3_MUL_MUL1))
		return 0;
	return exl3_matrix_leave_out(mat, err, "its codebook %s has the unknown multiplier 0x%08x",
				     mcg ? "mcg" : "mul1", value);
}

static int put_plain(struct exl3_intake *in, uint64_t offset, const void *p, size_t bytes,
		     struct exl3_error *err)
{
	for (size_t done = 0; done < bytes;) {
		ssize_t n = pwrite(in->tensor_fd, (const char *)p + done, bytes - done,
				   (off_t)(offset + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return exl3_errf(err, n < 0 && errno != ENOSPC ? -errno : -ENOMEM,
					 "no memory for the unquantized tensors: %m");
		done += (size_t)n;
	}
	return 0;
}

int exl3_intake_data(void *arg, uint32_t file, uint32_t index, uint64_t off, const void *p,
		     size_t bytes, struct exl3_error *err)
{
	struct exl3_intake *in = arg;
	const struct exl3_st_file *f = &in->plan->ckpt->files[file];
	const struct exl3_st_tensor *t = &f->tensors[index];
	const struct exl3_plan_item *item = &in->plan->items[file][index];
	struct exl3_named_matrix *mat = &in->plan->matrices[item->matrix];

	hash(in, file, index, off, p, bytes);
	switch ((enum exl3_use)item->use) {
	case EXL3_USE_LEFT_OUT:
		return 0;
	case EXL3_USE_PLAIN:
		return put_plain(in, item->offset + off, p, bytes, err);
	case EXL3_USE_TRELLIS:
		return in->ops->slab_write(in->slab, item->offset + off, p, bytes, err);
	/* The plan bounds these, so that they come in one piece. */
	case EXL3_USE_SCALE:
		return put_scale(in, f->name, t, item->offset, p, err);
	case EXL3_USE_SIGNS:
		return put_signs(in, t, item, p, err);
	case EXL3_USE_BIAS:
		return put_bias(in, &mat->m, t, item, p, err);
	case EXL3_USE_MARKER:
		return check_marker(mat, p, err);
	}
	return exl3_errf(err, -EINVAL, "%s: tensor '%.160s' has no use", f->name, t->name);
}

static void hash_u64(XXH3_state_t *state, uint64_t v)
{
	v = htole64(v);
	XXH3_128bits_update(state, &v, sizeof(v));
}

void exl3_intake_fingerprint(const struct exl3_intake *in, char ret[33])
{
	const struct exl3_ckpt *ckpt = in->plan->ckpt;
	XXH128_canonical_t c;

	XXH3_128bits_reset(in->state);
	for (uint32_t i = 0; i < ckpt->nr_tensors; i++) {
		const struct exl3_st_tensor *t = ckpt->tensors[i].t;
		uint32_t f = ckpt->tensors[i].file;

		hash_u64(in->state, strlen(t->name));
		XXH3_128bits_update(in->state, t->name, strlen(t->name));
		XXH3_128bits_update(in->state, t->dtype->name, sizeof(t->dtype->name));
		hash_u64(in->state, t->nr_dims);
		for (uint32_t d = 0; d < t->nr_dims; d++)
			hash_u64(in->state, t->shape[d]);
		c = in->hashes[f][t - ckpt->files[f].tensors];
		XXH3_128bits_update(in->state, &c, sizeof(c));
	}
	XXH128_canonicalFromHash(&c, XXH3_128bits_digest(in->state));
	for (int i = 0; i < 16; i++)
		snprintf(ret + 2 * i, 3, "%02x", c.digest[i]);
}
