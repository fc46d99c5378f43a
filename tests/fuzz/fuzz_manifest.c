/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_manifest.c - any bytes as the manifest of kept weights, with a hash that is right: refused, or sound. */
#include "daemon/manifest.h"

#include <assert.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What a reader accepts must hold: everything inside the slab or the tensor file, one after the other. */
static void check(const struct exl3_manifest *man)
{
	uint64_t slab = 0, pieces = 0;

	for (uint32_t i = 0; i < man->nr_matrices; i++) {
		const struct exl3_named_matrix *mat = &man->matrices[i];

		assert(mat->name && *mat->name);
		for (int p = 0; mat->placed && p < EXL3_PARTS; p++) {
			uint64_t offset, bytes = exl3_part_bytes(mat, (enum exl3_part)p, &offset);

			assert(offset >= slab && offset % EXL3_SLAB_ALIGN == 0);
			slab = offset + bytes;
			pieces += exl3_pieces_of(bytes);
		}
	}
	assert(slab <= man->head.slab_bytes);
	for (uint32_t i = 0; i < man->nr_tensors; i++) {
		const struct exl3_tensor_desc *t = &man->tensors[i];

		assert(t->bytes <= man->head.tensor_bytes &&
		       t->offset <= man->head.tensor_bytes - t->bytes);
		pieces += exl3_pieces_of(t->bytes);
	}
	assert(pieces == man->layout.nr_pieces);
	assert(pieces == 0 || man->pieces[pieces - 1][0] + 1);
}

/* Magic, version, size and hash are made right, so that the rest is looked at. */
static int file_of(const uint8_t *data, size_t size)
{
	size_t bytes = size < sizeof(struct exl3_manifest_head) ? sizeof(struct exl3_manifest_head) : size;
	int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	uint8_t *p = calloc(1, bytes);
	struct exl3_manifest_head head;
	XXH128_canonical_t c;

	assert(fd >= 0 && p);
	memcpy(p, data, size);
	memcpy(&head, p, sizeof(head));
	memcpy(head.magic, EXL3_MANIFEST_MAGIC, sizeof(head.magic));
	head.version = EXL3_MANIFEST_VERSION;
	head.bytes = bytes;
	memset(head.hash, 0, sizeof(head.hash));
	memcpy(p, &head, sizeof(head));
	XXH128_canonicalFromHash(&c, XXH3_128bits(p, bytes));
	memcpy(head.hash, c.digest, sizeof(head.hash));
	memcpy(p, &head, sizeof(head));
	assert(write(fd, p, bytes) == (ssize_t)bytes);
	assert(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) == 0);
	free(p);
	return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct exl3_manifest man;
	struct exl3_error err;
	int fd = file_of(data, size), again;

	if (exl3_manifest_read(fd, &man, &err) == 0) {
		check(&man);
		/* What was read is what is written. */
		assert(exl3_manifest_write(&man, &again, &err) == 0);
		close(again);
		exl3_manifest_fini(&man);
	} else {
		assert(strncmp(err.text, "manifest: ", 10) == 0);
	}
	close(fd);
	return 0;
}
