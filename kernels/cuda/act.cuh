/* SPDX-License-Identifier: Apache-2.0 */
/* act.cuh - activations of gated and plain MLPs, and element conversion, in float. */
#ifndef EXL3_CUDA_ACT_CUH
#define EXL3_CUDA_ACT_CUH

#include "kernels/cuda/ptx.cuh"
#include "shm/exl3_abi.h"

#include <cuda_bf16.h>

namespace exl3
{

/* a = act(g, u) with limit @limit (0: none). Comparisons are written so that NaN stays NaN. */
EXL3_DEV float activate(float g, float u, int act, float limit)
{
	float a;

	switch (act) {
	case EXL3_ACT_RELU2:
		a = u > 0.0f || u != u ? u : 0.0f;
		return a * a;
	case EXL3_ACT_SWIGLU_OAI:
		if (limit > 0.0f) {
			g = g > limit ? limit : g;
			u = u > limit ? limit : u < -limit ? -limit : u;
		}
		return g / (1.0f + expf(-1.702f * g)) * (u + 1.0f);
	case EXL3_ACT_RELU2_GATED:
		return (g < 0.0f ? 0.0f : g * g) * u;
	case EXL3_ACT_GELU:
		a = 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g)));
		break;
	default: /* silu */
		a = g / (1.0f + expf(-g));
		break;
	}
	if (limit > 0.0f) {
		a = a > limit ? limit : a;
		u = u > limit ? limit : u < -limit ? -limit : u;
	}
	return a * u;
}

/* Element @i of a row of @dtype (f16, bf16, f32). */
EXL3_DEV float load_elem(const void *row, uint32_t i, int dtype)
{
	if (dtype == EXL3_F32)
		return ((const float *)row)[i];
	if (dtype == EXL3_BF16)
		return __bfloat162float(((const __nv_bfloat16 *)row)[i]);
	return __half2float(((const __half *)row)[i]);
}

EXL3_DEV void store_elem(void *row, uint32_t i, int dtype, float v)
{
	if (dtype == EXL3_F32)
		((float *)row)[i] = v;
	else if (dtype == EXL3_BF16)
		((__nv_bfloat16 *)row)[i] = __float2bfloat16_rn(v);
	else
		((__half *)row)[i] = __float2half_rn(v);
}

} /* namespace exl3 */
#endif
