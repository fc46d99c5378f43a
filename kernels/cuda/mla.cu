/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla.cu - sparse MLA decode: which variant, how many CTAs a query, and the launch.
 *
 * plan() estimates the time of each possible split (CTAs per item = cluster * groups) in nanoseconds
 * and takes the least: a CTA computes a key in key_ns, but no faster than HBM delivers rows to all
 * CTAs that run; it starts and ends in start_ns; merging costs more, see below.
 */
#include "kernels/cuda/mla_common.cuh"

#include <atomic>
#include <errno.h>
#include <math.h>
#include <string.h>

using namespace exl3_mla;

namespace exl3_mla
{
#define EXL3_MLA_LIST(X)                                                                      \
	X(mla_wide_bf16_576)                                                                  \
	X(mla_wide_bf16_512)                                                                  \
	X(mla_wide_e4m3_576) X(mla_wide_e4m3_512)                                             \
	X(mla_wide_f16_576)                                                                   \
	X(mla_wide_f16_512) X(mla_bf16_576) X(mla_bf16_512) X(mla_bf16_any) X(mla_bf16_small) \
		X(mla_f16_576) X(mla_f16_512) X(mla_f16_any) X(mla_f16_small) X(mla_e4m3_576) \
			X(mla_e4m3_512) X(mla_e4m3_any) X(mla_e4m3_656)
/* By name only, until they have been measured. */
#define EXL3_MLA_CANDIDATES(X) X(mla_wide_apart_bf16_576) X(mla_wide_apart_e4m3_576)
#define EXL3_MLA_DECLARE(name) extern const instance name;
EXL3_MLA_LIST(EXL3_MLA_DECLARE)
EXL3_MLA_CANDIDATES(EXL3_MLA_DECLARE)
} // namespace exl3_mla

namespace
{

constexpr float CLUSTER16_NS = 1300.0f;                 /* 16 CTAs share one GPC's bandwidth */
constexpr float GROUPS_NS = 6000.0f, GROUP_NS = 250.0f; /* merging through memory, and each group */
constexpr float HBM_BYTES_PER_NS = 4200.0f, L2_BYTES_PER_NS = 5200.0f;

struct split {
	uint32_t cluster, groups;
	float ns;
};

struct shape {
	uint32_t head_tiles, queries;
	struct split split;
	size_t part_bytes, ml_bytes;
};

#define EXL3_MLA_INSTANCE(name) &exl3_mla::name,
const instance *const instances[] = {EXL3_MLA_LIST(EXL3_MLA_INSTANCE) EXL3_MLA_CANDIDATES(EXL3_MLA_INSTANCE)};
constexpr int NR_INSTANCES = sizeof(instances) / sizeof(*instances);
#define EXL3_MLA_ONE(name) +1
constexpr size_t NR_CHOSEN = 0 EXL3_MLA_LIST(EXL3_MLA_ONE); /* of them, and of the table */

void set_cluster(cudaLaunchConfig_t *cfg, cudaLaunchAttribute *attr, const instance &in, uint32_t s)
{
	attr->id = cudaLaunchAttributeClusterDimension;
	attr->val.clusterDim.y = s;
	attr->val.clusterDim.x = attr->val.clusterDim.z = 1;
	cfg->blockDim = dim3((unsigned)in.threads);
	cfg->dynamicSmemBytes = in.smem;
	cfg->attrs = attr;
	cfg->numAttrs = s > 1;
}

bool prepare(const instance &in, uint32_t cluster)
{
	return cudaFuncSetAttribute(in.fn, cudaFuncAttributeMaxDynamicSharedMemorySize,
				    (int)in.smem) == cudaSuccess &&
	       (cluster <= 8 ||
		cudaFuncSetAttribute(in.fn, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
			cudaSuccess);
}

/* Bytes of shared memory that a CTA may have. */
size_t smem_max(int cc)
{
	return cc == 80 || cc == 87 ? 163u << 10 : cc >= 90 && cc < 120 ? 227u << 10 : 99u << 10;
}

/*
 * CTAs of clusters of @s that run at once. How many clusters fit depends on how many SMs each GPC of
 * the very chip has, so the driver is asked, once; it only affects speed, so all devices of a process
 * are taken to be alike.
 */
uint32_t capacity(const instance &in, int sms, uint32_t s)
{
	static std::atomic<int> known[NR_INSTANCES][CLUSTER_MAX + 1];
	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};
	int i = 0, n;

	if (s == 1)
		return (uint32_t)sms;
	while (i < NR_INSTANCES && instances[i] != &in)
		i++;
	if (i < NR_INSTANCES && (n = known[i][s].load(std::memory_order_relaxed)) > 0)
		return (uint32_t)n;
	set_cluster(&cfg, &attr, in, s);
	cfg.gridDim = dim3(1, s);
	if (!prepare(in, s) || cudaOccupancyMaxActiveClusters(&n, in.fn, &cfg) != cudaSuccess ||
	    n < 1) {
		(void)cudaGetLastError();
		n = sms / 18 * (16 / (int)s); /* a guess for a place without the device */
	}
	n = n < 1 ? (int)s : n * (int)s;
	if (i < NR_INSTANCES)
		known[i][s].store(n, std::memory_order_relaxed);
	return (uint32_t)n;
}

struct split plan(const instance &in, uint64_t items, uint32_t head_tiles, uint32_t topk, int sms,
		  bool clusters)
{
	static const uint8_t sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};
	/* Head tiles of a query read the same rows: one of them from HBM, the others from L2. */
	const float rate = fminf(HBM_BYTES_PER_NS * head_tiles,
				 head_tiles == 1 ? HBM_BYTES_PER_NS : L2_BYTES_PER_NS);
	const float row_ns =
		(float)exl3_cache_row_bytes((uint32_t)in.cache_dtype, (uint32_t)in.dim_cap) / rate;
	struct split best = {1, 1, 1e30f};

	for (const uint32_t s : sizes) {
		if (s > 1 && !clusters)
			break;
		const uint32_t cap = capacity(in, sms, s);

		for (uint32_t c = 1; c <= CLUSTER_MAX; c++) {
			const uint64_t ctas = items * s * c, waves = (ctas + cap - 1) / cap;
			const uint32_t n = s * c, keys = ((topk + n - 1) / n + 15) & ~15u;
			const float key_ns =
				fmaxf(in.key_ns, row_ns * fminf((float)ctas, (float)cap));
			const float merge_ns = (s == 1 ? 0 : in.merge_ns) +
					       (s == 16 ? CLUSTER16_NS : 0) +
					       (c == 1 ? 0 : GROUPS_NS + c * GROUP_NS);
			const float ns = waves * (keys * key_ns + in.start_ns + merge_ns);

			if (ns < best.ns)
				best = {s, c, ns};
			/* Without a cluster there are no pushes, so no groups either (see describe). */
			if (keys <= 16 || waves > 2 || (clusters && s == 1))
				break;
		}
	}
	return best;
}

int describe(const struct exl3_cuda_mla *a, const instance &in, struct shape *ret)
{
	const bool clusters = a->device_cc >= 90 && a->device_cc < 120;
	uint32_t topk = 0;
	uint64_t queries = 0;

	ret->head_tiles = (a->heads + in.tile_h - 1) / in.tile_h;
	ret->split = {1, 1, 0.0f};
	for (uint32_t i = 0; i < a->nr_entries; i++) {
		queries += a->entries[i].m;
		topk = a->entries[i].topk > topk ? a->entries[i].topk : topk;
	}
	ret->queries = (uint32_t)queries;
	if (a->cluster) {
		ret->split = {a->cluster, a->groups ? a->groups : 1u, 0.0f};
		if ((ret->split.cluster > 8 && ret->split.cluster != 16) ||
		    ret->split.groups > CLUSTER_MAX)
			return -EOPNOTSUPP;
	} else if (!a->deterministic) {
		ret->split = plan(in, queries * ret->head_tiles, ret->head_tiles, topk,
				  a->device_sms, clusters);
	} else {
		for (uint32_t i = 0; i < a->nr_entries; i++) {
			const struct split s =
				plan(in, (uint64_t)a->entries[i].m * ret->head_tiles,
				     ret->head_tiles, a->entries[i].topk, a->device_sms, clusters);

			if (i && (s.cluster != ret->split.cluster || s.groups != ret->split.groups))
				return -EINVAL;
			ret->split = s;
		}
	}
	const uint64_t items = queries * ret->head_tiles;

	/* st.async needs a cluster launch; where clusters exist, groups are groups of clusters. */
	if (clusters && ret->split.groups > 1 && ret->split.cluster == 1)
		return -EOPNOTSUPP;
	if (items * ret->split.cluster * ret->split.groups > INT32_MAX)
		return -EOPNOTSUPP;
	ret->part_bytes = ret->ml_bytes = 0;
	if (ret->split.groups > 1) {
		ret->part_bytes =
			items * ret->split.groups * in.tile_h * in.value_cap * sizeof(float);
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
	    a->nr_entries > EXL3_CUDA_MLA_ENTRIES_MAX || !a->heads ||
	    a->heads > EXL3_MLA_HEADS_MAX || !a->dim || !a->value_dim || a->dim % 16 ||
	    a->value_dim % 16 || a->value_dim > a->dim)
		return false;
	if (in.exact ? (int)a->dim != in.dim_cap || (int)a->value_dim != in.value_cap
		     : (int)a->dim > in.dim_cap || (int)a->value_dim > in.value_cap)
		return false;
	if (in.smem > smem_max(a->device_cc) ||
	    (in.tile_h > 16 && (a->device_cc != 90 || a->heads <= 16)))
		return false;
	for (uint32_t i = 0; i < a->nr_entries; i++) {
		const struct exl3_cuda_mla_entry &e = a->entries[i];

		if (e.cache_stride % 16 || e.q_stride % 16 || e.o_stride % 16)
			return false;
		if (!e.table_queries || e.page_shift > 31 || e.slots & ((1ull << e.page_shift) - 1))
			return false;
		/* Row offsets are 32-bit numbers of 16-byte units below NO_ROW: caches to 64 GiB. */
		if (e.cache_stride >> 36 ||
		    (e.cache_stride && e.slots > ((uint64_t)NO_ROW << 4) / e.cache_stride))
			return false;
	}
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
		const uint32_t n = s.split.cluster * s.split.groups;

		p.entries[i].first = first;
		p.entries[i].split_keys = ((a->entries[i].topk + n - 1) / n + 15) & ~15u;
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
	p.groups = s.split.groups;
	for (uint32_t i = 0, chunks = (uint32_t)in.value_cap / 16; i <= p.cluster; i++)
		p.first_chunk[i] = (uint8_t)((i * chunks + p.cluster - 1) / p.cluster);
	p.most = (in.value_cap / 16 + p.cluster - 1) / p.cluster;
	p.counters = (uint32_t *)a->ws;
	p.part = (float *)((uint8_t *)a->ws + EXL3_CUDA_WS_ZERO);
	p.part_ml = (float *)((uint8_t *)a->ws + EXL3_CUDA_WS_ZERO + s.part_bytes);

	cudaLaunchAttribute attr = {};
	cudaLaunchConfig_t cfg = {};
	void *args[] = {&p};

	set_cluster(&cfg, &attr, in, s.split.cluster);
	cfg.gridDim = dim3(s.queries * s.head_tiles, p.splits);
	cfg.stream = stream;
	if (!prepare(in, s.split.cluster))
		return -EIO;
	return cudaLaunchKernelExC(&cfg, in.fn, args) == cudaSuccess ? 0 : -EIO;
}

namespace
{

#define EXL3_MLA_FUNCTIONS(name)                                          \
	bool name##_supports(const struct exl3_cuda_mla *a)               \
	{                                                                 \
		return supports(exl3_mla::name, a);                       \
	}                                                                 \
	size_t name##_ws(const struct exl3_cuda_mla *a)                   \
	{                                                                 \
		return ws_bytes(exl3_mla::name, a);                       \
	}                                                                 \
	int name##_launch(const struct exl3_cuda_mla *a, cudaStream_t st) \
	{                                                                 \
		return launch(exl3_mla::name, a, st);                     \
	}
EXL3_MLA_LIST(EXL3_MLA_FUNCTIONS)
EXL3_MLA_CANDIDATES(EXL3_MLA_FUNCTIONS)

} // namespace

#define EXL3_MLA_ENTRY(name) {#name, name##_supports, name##_ws, name##_launch},
const struct exl3_cuda_mla_kernel exl3_cuda_mla_kernels[] = {EXL3_MLA_LIST(EXL3_MLA_ENTRY)
								     EXL3_MLA_CANDIDATES(EXL3_MLA_ENTRY){}};

const struct exl3_cuda_mla_kernel *exl3_cuda_mla_select(const struct exl3_cuda_mla *a)
{
	const struct exl3_cuda_mla_kernel *best = nullptr;
	float best_ns = 1e30f;
	bool exact = false;

	for (size_t i = 0; i < NR_CHOSEN; i++) {
		const instance &in = *instances[i];
		struct shape s;

		if (!exl3_cuda_mla_kernels[i].supports(a) || describe(a, in, &s) ||
		    (exact && !in.exact))
			continue;
		if (s.split.ns < best_ns || (in.exact && !exact)) {
			best = &exl3_cuda_mla_kernels[i];
			best_ns = s.split.ns;
			exact = in.exact;
		}
	}
	return best;
}
