/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_kernel_table.c - any text as a kernel table: what is accepted can be looked up, in order and without overlap. */
#include "daemon/kernel_table.h"
#include "daemon/log.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct exl3_kernel kernels[] = {
	{"gemv", EXL3_OP_LINEAR, NULL, NULL, false},
	{"gemm", EXL3_OP_LINEAR, NULL, NULL, false},
	{NULL, 0, NULL, NULL, false},
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct exl3_table_device device = {"cpu", "X", "avx2", "", "b", kernels};
	struct exl3_tuned *table = NULL;
	struct exl3_error err;
	char *text = malloc(size + 1);

	assert(text);
	exl3_log_set_level(EXL3_LOG_ERROR);
	memcpy(text, data, size);
	text[size] = 0;
	if (exl3_kernel_table_parse("fuzz", text, size, &device, &table, &err) == 0 && table) {
		assert(table->nr && table->nr <= EXL3_TUNED_MAX);
		for (uint32_t i = 0; i < table->nr; i++) {
			const struct exl3_tuned_line *l = &table->list[i];
			struct exl3_tuned_probe probe;

			assert(l->m_first && l->m_first <= l->m_last && l->m_last <= EXL3_M_MAX);
			assert(exl3_tuned_find(table, &l->shape, l->m_first) == l);
			assert(exl3_tuned_find(table, &l->shape, l->m_last) == l);
			exl3_tuned_probe(&probe, &l->shape, l->m_first);
			assert(exl3_tuned_for_work(table, &probe.work) == l);
		}
		exl3_tuned_put(table);
	}
	free(text);
	return 0;
}
