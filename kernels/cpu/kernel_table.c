/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_table.c - every compiled CPU kernel, and which one a piece of work gets. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/ref.h"

#define REF_KERNEL(op_, name_)                                                                 \
	static bool name_##_supports(const struct exl3_dev *dev, const struct exl3_work *work) \
	{                                                                                      \
		return work->op == (op_) && exl3_ref_scratch(work) <= dev->ws_bytes;           \
	}
REF_KERNEL(EXL3_OP_LINEAR, linear_ref)
REF_KERNEL(EXL3_OP_MOE, moe_ref)
REF_KERNEL(EXL3_OP_MLP, mlp_ref)
REF_KERNEL(EXL3_OP_MLA_DECODE, mla_ref)

static int ref_run(struct exl3_dev *dev, const struct exl3_work *work)
{
	return exl3_ref_run(work, dev->ws, dev->ws_bytes);
}

/* In order of preference: the first that supports the work is chosen. */
const struct exl3_kernel cpu_kernels[] = {
	{"linear_ref", EXL3_OP_LINEAR, linear_ref_supports, ref_run},
	{"moe_ref", EXL3_OP_MOE, moe_ref_supports, ref_run},
	{"mlp_ref", EXL3_OP_MLP, mlp_ref_supports, ref_run},
	{"mla_ref", EXL3_OP_MLA_DECODE, mla_ref_supports, ref_run},
	{NULL, 0, NULL, NULL},
};

const struct exl3_kernel *cpu_select(const struct exl3_dev *dev, const struct exl3_work *work)
{
	for (const struct exl3_kernel *k = cpu_kernels; k->name; k++)
		if (k->op == work->op && k->supports(dev, work))
			return k;
	return NULL;
}
