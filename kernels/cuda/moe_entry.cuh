/* SPDX-License-Identifier: Apache-2.0 */
/* moe_entry.cuh - the requests of a launch as device code sees them: whose a row is, its ids, its x. */
#ifndef EXL3_CUDA_MOE_ENTRY_CUH
#define EXL3_CUDA_MOE_ENTRY_CUH

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/moe_image.cuh"

namespace exl3
{

constexpr uint32_t NO_EXPERT = 0xffffffffu;

struct moe_entries {
	struct exl3_cuda_moe_entry e[EXL3_CUDA_MOE_ENTRIES_MAX];
	uint32_t nr;
};

/* The entry that a pair (or token) of the launch belongs to; few entries, so a linear search. */
EXL3_DEV const exl3_cuda_moe_entry &entry_of_pair(const moe_entries &en, uint32_t pair)
{
	uint32_t i = 0;

	while (i + 1 < en.nr && pair >= en.e[i + 1].first_pair)
		i++;
	return en.e[i];
}

EXL3_DEV const exl3_cuda_moe_entry &entry_of_token(const moe_entries &en, uint32_t token)
{
	uint32_t i = 0;

	while (i + 1 < en.nr && token >= en.e[i + 1].first_token)
		i++;
	return en.e[i];
}

/* Expert of pair @i of the entry, or NO_EXPERT, which is counted unless it is a hole. */
EXL3_DEV uint32_t read_id(const exl3_cuda_moe_entry &e, uint32_t i, uint32_t nr_experts)
{
	/* Read once: the client may change it at any time. */
	const long long id = e.ids_dtype == EXL3_I64 ? ((const volatile long long *)e.ids)[i] :
						       ((const volatile int *)e.ids)[i];

	if (id >= 0 && id < (long long)nr_experts)
		return (uint32_t)id;
	if (id != -1 && e.skipped)
		atomicAdd_system(e.skipped, 1ull);
	return NO_EXPERT;
}

/* Elements col .. col + 3 of a row of x, zero from @limit on. */
EXL3_DEV void load_x(const char *x, int dtype, uint32_t col, uint32_t limit, float (&v)[4])
{
	const char *p = x + (size_t)col * (dtype == EXL3_F32 ? 4 : 2);

	if (col + 4 > limit || ((uintptr_t)p & (dtype == EXL3_F32 ? 15 : 7))) {
#pragma unroll
		for (int j = 0; j < 4; j++)
			v[j] = col + j < limit ? load_elem(x, col + j, dtype) : 0.0f;
	} else if (dtype == EXL3_F32) {
		const float4 f = *(const float4 *)p;

		v[0] = f.x;
		v[1] = f.y;
		v[2] = f.z;
		v[3] = f.w;
	} else if (dtype == EXL3_BF16) {
		const uint2 h = *(const uint2 *)p;

		v[0] = __uint_as_float(h.x << 16);
		v[1] = __uint_as_float(h.x & 0xffff0000u);
		v[2] = __uint_as_float(h.y << 16);
		v[3] = __uint_as_float(h.y & 0xffff0000u);
	} else {
		moe_halves(p, v);
	}
}

} /* namespace exl3 */
#endif
