/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_table.c - every compiled CPU kernel, and which one a piece of work gets. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/jobs.h"
#include "kernels/cpu/ref.h"
#include "kernels/tuned.h"

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
#name_, op_, name_##_supports, name_##_run, false \
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
	{"linear_ref", EXL3_OP_LINEAR, linear_ref_supports, ref_run, false},
	{"moe_ref", EXL3_OP_MOE, moe_ref_supports, ref_run, false},
	{"mlp_ref", EXL3_OP_MLP, mlp_ref_supports, ref_run, false},
	{"mla_ref", EXL3_OP_MLA_DECODE, mla_ref_supports, ref_run, false},
	{NULL, 0, NULL, NULL, false},
};

/*
 * Rows of deterministic requests may meet in a launch, and another variant may mean other bits: the first one's
 * rows decide, and cpu_one_class() sees to it that the others would be decided in the same way.
 */
static const struct exl3_kernel *tuned(const struct exl3_dev *dev, const struct exl3_work *work)
{
	const struct exl3_tuned_line *line;
	struct exl3_work first = *work;

	if (!work->tuned)
		return NULL;
	if (work->deterministic)
		first.nr_rows = 1;
	line = exl3_tuned_for_work(work->tuned, &first);
	return line && line->kernel->supports(dev, work) ? line->kernel : NULL;
}

const struct exl3_kernel *cpu_select(const struct exl3_dev *dev, const struct exl3_work *work)
{
	const struct exl3_kernel *best = tuned(dev, work);

	if (best)
		return best;
	for (const struct exl3_kernel *k = cpu_kernels; k->name; k++)
		if (k->op == work->op && k->supports(dev, work))
			return k;
	return NULL;
}

/*
 * Every row is computed by itself, in its own order of k, whatever is beside it: with one variant nothing else
 * counts. Which variant it is follows from the request's own rows.
 */
uint32_t cpu_merge_class(const struct exl3_dev *dev, const struct exl3_work *work)
{
	struct exl3_work own = *work;
	const struct exl3_kernel *kernel;

	if (work->kernel)
		return 0;
	own.deterministic = true;
	kernel = cpu_select(dev, &own);
	return kernel ? 1 + (uint32_t)(kernel - cpu_kernels) : 0;
}

bool cpu_one_class(const struct exl3_dev *dev, const struct exl3_work *work)
{
	struct exl3_work one = *work;
	uint32_t first = 0;

	if (!work->deterministic || work->kernel || work->op != EXL3_OP_LINEAR || !work->tuned)
		return true;
	one.nr_rows = 1;
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		uint32_t class;

		one.rows = &work->rows[i];
		class = cpu_merge_class(dev, &one);
		if (i && class != first)
			return false;
		first = class;
	}
	return true;
}
