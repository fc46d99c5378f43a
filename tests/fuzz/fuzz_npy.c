/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_npy.c - any bytes as a NumPy file: refused with a sentence, or an array of the size that it says. */
#include "client/npy.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct exl3_error err = {0};
	struct exl3_npy a;
	uint64_t n = 1;

	if (exl3_npy_parse(data, size, &a, &err) < 0) {
		if (!err.text[0] || err.code >= 0)
			abort();
		return 0;
	}
	for (unsigned i = 0; i < a.nr_dims; i++)
		n *= a.shape[i];
	if (n != a.count || a.count * a.size > size)
		abort();
	/* All of it is ours to touch. */
	memset(a.data, 0x5a, a.count * a.size);
	exl3_npy_fini(&a);
	return 0;
}
