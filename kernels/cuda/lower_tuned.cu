/* SPDX-License-Identifier: Apache-2.0 */
/* lower_tuned.cu - measured choices that come with the backend, for the device at hand. */
#include "kernels/cuda/dev.h"
#include "kernels/cuda/lower.h"
#include "kernels/cuda/tuned_builtin.h"
#include "kernels/tuned.h"

#include <errno.h>
#include <string.h>

/* A line that names what this build does not have is left out: the order of preference counts there. */
int exl3_cuda_builtin_open(struct exl3_dev *dev, struct exl3_error *err)
{
	const char *line = dev->cc == 90 ? exl3_tuned_builtin_sm90a : "";
	struct exl3_tuned *table = *line ? exl3_tuned_new("built in") : NULL;
	int ret = 0;

	if (!*line)
		return 0;
	if (!table)
		return exl3_errf(err, -ENOMEM, "cuda: out of memory");
	for (; *line && !ret; line += strcspn(line, "\n"), line += *line == '\n') {
		ret = exl3_tuned_add_line(table, line, exl3_cuda_kernel_table, err);
		if (ret == -ENOENT)
			ret = 0;
	}
	if (!ret)
		ret = exl3_tuned_done(table, err);
	if (ret) {
		exl3_tuned_put(table);
		return exl3_err_prefix(err, "cuda: built-in table");
	}
	dev->builtin = table;
	return 0;
}

const struct exl3_tuned *exl3_cuda_builtin(const struct exl3_dev *dev)
{
	return dev->builtin;
}
