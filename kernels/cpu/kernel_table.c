/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_table.c - every compiled CPU kernel, and which one a piece of work gets. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/jobs.h"
#include "kernels/cpu/ref.h"

#define REF(op_, name_)                                                                        \
	static bool name_##_supports(const struct exl3_dev *dev, const struct exl3_work *work) \
	{                                                                                      \
		return work->op == (op_) && exl3_ref_scratch(work) <= dev->ws_bytes;           \
	}
REF(EXL3_OP_LINEAR, linear_ref)
REF(EXL3_OP_MOE, moe_ref)
REF(EXL3_OP_MLP, mlp_ref)
REF(EXL3_OP_MLA_DECODE, mla_ref)

static int ref_run(struct exl3_dev *dev, const struct exl3_work *work)
{
	return exl3_ref_run(work, dev->ws, dev->ws_bytes);
}

/* The drivers over one instruction set. */
#define ISA(isa_, op_, name_, driver_)                                                      \
	static bool name_##_##isa_##_supports(const struct exl3_dev *dev,                   \
					      const struct exl3_work *work)                 \
	{                                                                                   \
		return work->op == (op_) && cpu_isa_##isa_.available() &&                   \
		       cpu_##driver_##_supports(dev, work);                                 \
	}                                                                                   \
	static int name_##_##isa_##_run(struct exl3_dev *dev, const struct exl3_work *work) \
	{                                                                                   \
		return cpu_##driver_##_run(dev, work, &cpu_isa_##isa_);                     \
	}
#define ISA_ALL(isa_)                             \
	ISA(isa_, EXL3_OP_LINEAR, linear, linear) \
	ISA(isa_, EXL3_OP_MOE, moe, moe)          \
	ISA(isa_, EXL3_OP_MLP, mlp, moe)          \
	ISA(isa_, EXL3_OP_MLA_DECODE, mla, mla)
ISA_ALL(avx512)
ISA_ALL(avx2)
ISA_ALL(c)

#define ENTRY_(op_, name_)                                 \
	{                                                  \
#name_, op_, name_##_supports, name_##_run \
	}
#define ENTRY(op_, name_) ENTRY_(op_, name_)
#define ENTRIES(isa_)                                                         \
	ENTRY(EXL3_OP_LINEAR, linear_##isa_), ENTRY(EXL3_OP_MOE, moe_##isa_), \
		ENTRY(EXL3_OP_MLP, mlp_##isa_), ENTRY(EXL3_OP_MLA_DECODE, mla_##isa_)

/* In order of preference: the first that supports the work is chosen. */
const struct exl3_kernel cpu_kernels[] = {
	ENTRIES(avx512),
	ENTRIES(avx2),
	ENTRIES(c),
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
