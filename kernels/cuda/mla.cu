/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla.cu - sparse MLA decode: which variant, how many CTAs a query, and the launch.
 *
 * The split: a CTA costs its keys plus a start (index and first row: about 64 keys' worth of reading
 * at full HBM rate) plus what merging adds. plan() takes the cheapest number of CTAs per item; times
 * are in keys, and only their order matters.
 */
#include "kernels/cuda/mla.cuh"

#include <errno.h>
#include <string.h>

using namespace exl3_mla;

namespace exl3_mla
{
#define EXL3_MLA_LIST(X)                                                                           \
	X(mla_wide_bf16_576) X(mla_wide_bf16_512) X(mla_wide_f16_576) X(mla_wide_f16_512)              \
	X(mla_bf16_576) X(mla_bf16_512) X(mla_bf16_any) X(mla_f16_576) X(mla_f16_512) X(mla_f16_any)   \
	X(mla_e4m3_576) X(mla_e4m3_512) X(mla_e4m3_any)
#define EXL3_MLA_DECLARE(name) extern const instance name;
EXL3_MLA_LIST(EXL3_MLA_DECLARE)
} // namespace exl3_mla

namespace
{

constexpr uint64_t CLUSTER_KEYS = 24, GROUPS_KEYS = 48;

struct split {
	uint32_t cluster, groups;
	uint64_t cost;
};

struct shape {
	uint32_t head_tiles, queries;
	struct split split;
	size_t part_bytes, ml_bytes;
};

/* CTAs of clusters of @s that run at once: a GPC has 16 or more SMs. */
uint64_t capacity(int sms, uint32_t s)
{
	return s == 1 ? (uint64_t)sms : (uint64_t)sms / 16 * (16 / s) * s;
}

struct split plan(const instance &in, uint64_t items, uint32_t topk, int sms, bool clusters)
{
	struct split best = {1, 1, UINT64_MAX};

	for (uint32_t n = 1; n <= 128; n *= 2) {
		const uint32_t s = !clusters ? 1 : n < 8 ? n : 8, c = n / s;
		const uint64_t keys = ((topk + n - 1) / n + 15) & ~15u;
		const uint64_t cap = capacity(sms, s), waves = (items * n + cap - 1) / cap;
		const uint64_t cost =
			waves * (keys * in.key_cost / 100 + in.start_cost + (s > 1 ? CLUSTER_KEYS : 0) +
				 (c > 1 ? GROUPS_KEYS : 0));

		if (cost < best.cost)
			best = {s, c, cost};
		if (keys <= 16)
			break;
	}
	return best;
}

int describe(const struct exl3_cuda_mla *a, const instance &in, struct shape *ret)
{
	const bool clusters = a->device_cc >= 90 && a->device_cc < 120;
	uint32_t topk = 0;
	uint64_t queries = 0;

	ret->head_tiles = (a->heads + in.tile_h - 1) / in.tile_h;
	for (uint32_t i = 0; i < a->nr_entries; i++) {
		queries += a->entries[i].m;
		topk = a->entries[i].topk > topk ? a->entries[i].topk : topk;
	}
	ret->queries = (uint32_t)queries;
	if (a->cluster) {
		ret->split = {a->cluster, a->groups ? a->groups : 1u, 0};
	} else if (!a->deterministic) {
		ret->split = plan(in, queries * ret->head_tiles, topk, a->device_sms, clusters);
	} else {
		for (uint32_t i = 0; i < a->nr_entries; i++) {
			const struct split s = plan(in, (uint64_t)a->entries[i].m * ret->head_tiles,
						    a->entries[i].topk, a->device_sms, clusters);

			if (i && (s.cluster != ret->split.cluster || s.groups != ret->split.groups))
				return -EINVAL;
			ret->split = s;
		}
	}
	const uint64_t items = queries * ret->head_tiles;

	if (items * ret->split.cluster * ret->split.groups > INT32_MAX)
		return -EOPNOTSUPP;
	ret->part_bytes = ret->ml_bytes = 0;
	if (ret->split.groups > 1) {
		ret->part_bytes = items * ret->split.groups * in.tile_h * in.value_cap * sizeof(float);
		ret->ml_bytes = items * ret->split.groups * ret->split.cluster * in.tile_h * 2 *
				sizeof(float);
		if (items * ret->split.cluster * sizeof(uint32_t) > EXL3_CUDA_WS_ZERO)
			return -EOPNOTSUPP;
	}
	return 0;
}

} // namespace

bool exl3_mla::supports(const instance &in, const struct exl3_cuda_mla *a)
{
	struct shape s;

	if (a->cache_dtype != in.cache_dtype || !a->nr_entries ||
	    a->nr_entries > EXL3_CUDA_MLA_ENTRIES_MAX || !a->heads || a->heads > EXL3_MLA_HEADS_MAX ||
	    !a->dim || !a->value_dim || a->dim % 16 || a->value_dim % 16 || a->value_dim > a->dim)
		return false;
	if (in.exact ? (int)a->dim != in.dim_cap || (int)a->value_dim != in.value_cap
		     : (int)a->dim > in.dim_cap || (int)a->value_dim > in.value_cap)
		return false;
	if (in.tile_h > 16 && (a->device_cc != 90 || a->heads <= 16))
		return false;
	for (uint32_t i = 0; i < a->nr_entries; i++)
		if (a->entries[i].cache_stride % 16 || a->entries[i].q_stride % 16 ||
		    a->entries[i].o_stride % 16)
			return false;
	return describe(a, in, &s) != -EOPNOTSUPP;
}

size_t exl3_mla::ws_bytes(const instance &in, const struct exl3_cuda_mla *a)
{
	struct shape s;

	if (describe(a, in, &s))
		return EXL3_CUDA_WS_ZERO;
	return EXL3_CUDA_WS_ZERO + s.part_bytes + s.ml_bytes;
}

int exl3_mla::launch(const instance &in, const struct exl3_cuda_mla *a, cudaStream_t stream)
{
	struct params p;
	struct shape s;
	uint32_t first = 0;
	int r;

	if (!supports(in, a))
		return -EOPNOTSUPP;
	r = describe(a, in, &s);
	if (r)
		return r;
	if (!s.queries)
		return 0;
	if (s.split.groups > 1 && (!a->ws || a->ws_bytes < ws_bytes(in, a)))
		return -ENOMEM;
	memset(&p, 0, sizeof(p));
	memcpy(p.entries, a->entries, a->nr_entries * sizeof(*a->entries));
	for (uint32_t i = 0; i < a->nr_entries; i++) {
		p.entries[i].first = first;
		if (a->cache_dtype != EXL3_E4M3)
			p.entries[i].kv_scale = 1.0f;
		first += a->entries[i].m;
	}
	p.nr_entries = a->nr_entries;
	p.heads = a->heads;
	p.dim = a->dim;
	p.value_dim = a->value_dim;
	p.head_tiles = s.head_tiles;
	p.splits = s.split.cluster * s.split.groups;
	p.cluster = s.split.cluster;
	p.counters = (uint32_t *)a->ws;
	p.part = (float *)((uint8_t *)a->ws + EXL3_CUDA_WS_ZERO);
	p.part_ml = (float *)((uint8_t *)a->ws + EXL3_CUDA_WS_ZERO + s.part_bytes);

	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};
	void *args[] = {&p};

	attr.id = cudaLaunchAttributeClusterDimension;
	attr.val.clusterDim.x = s.split.cluster;
	attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
	cfg.gridDim = dim3(s.queries * s.head_tiles * p.splits);
	cfg.blockDim = dim3((unsigned)in.threads);
	cfg.dynamicSmemBytes = in.smem;
	cfg.stream = stream;
	cfg.attrs = &attr;
	cfg.numAttrs = s.split.cluster > 1;
	if (cudaFuncSetAttribute(in.fn, cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)in.smem) != cudaSuccess)
		return -EIO;
	if (s.split.cluster > 8 &&
	    cudaFuncSetAttribute(in.fn, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
		    cudaSuccess)
		return -EIO;
	return cudaLaunchKernelExC(&cfg, in.fn, args) == cudaSuccess ? 0 : -EIO;
}

namespace
{

#define EXL3_MLA_FUNCTIONS(name)                                                                   \
	bool name##_supports(const struct exl3_cuda_mla *a) { return supports(exl3_mla::name, a); }    \
	size_t name##_ws(const struct exl3_cuda_mla *a) { return ws_bytes(exl3_mla::name, a); }        \
	int name##_launch(const struct exl3_cuda_mla *a, cudaStream_t st)                              \
	{                                                                                              \
		return launch(exl3_mla::name, a, st);                                                  \
	}
EXL3_MLA_LIST(EXL3_MLA_FUNCTIONS)

#define EXL3_MLA_INSTANCE(name) &exl3_mla::name,
const instance *const instances[] = {EXL3_MLA_LIST(EXL3_MLA_INSTANCE)};

} // namespace

#define EXL3_MLA_ENTRY(name) {#name, name##_supports, name##_ws, name##_launch},
const struct exl3_cuda_mla_kernel exl3_cuda_mla_kernels[] = {EXL3_MLA_LIST(EXL3_MLA_ENTRY){}};

const struct exl3_cuda_mla_kernel *exl3_cuda_mla_select(const struct exl3_cuda_mla *a)
{
	const struct exl3_cuda_mla_kernel *best = nullptr;
	uint64_t best_cost = UINT64_MAX;
	bool exact = false;

	for (size_t i = 0; exl3_cuda_mla_kernels[i].name; i++) {
		const instance &in = *instances[i];
		struct shape s;

		if (!exl3_cuda_mla_kernels[i].supports(a) || describe(a, in, &s) || (exact && !in.exact))
			continue;
		if (s.split.cost < best_cost || (in.exact && !exact)) {
			best = &exl3_cuda_mla_kernels[i];
			best_cost = s.split.cost;
			exact = in.exact;
		}
	}
	return best;
}
