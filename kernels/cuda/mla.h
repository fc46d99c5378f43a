/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla.h - host side of sparse MLA decode: what a launch needs, and the table of compiled variants.
 *
 * o[b, h] = softmax(scale * q[b, h] . kv[i]) kv[i][0:value_dim] over the cache rows i that the
 * selection indices[b] names. As in launch.h nothing here synchronises or allocates: a launch only
 * enqueues one kernel and returns 0, -EOPNOTSUPP (shape or type not covered), -ENOMEM (workspace
 * too small), -EINVAL (see deterministic) or -EIO (CUDA error).
 */
#ifndef EXL3_KERNELS_CUDA_MLA_H
#define EXL3_KERNELS_CUDA_MLA_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXL3_CUDA_MLA_ENTRIES_MAX 32 /* merged requests of one launch; they travel by value */

/* One request. All pointers are device addresses, 16-byte aligned, as are the byte strides. */
struct exl3_cuda_mla_entry {
	const void *q;       /* [m, heads, dim] f16, bf16 or f32 */
	const void *cache;   /* [slots, dim] */
	const void *indices; /* [ceil((table_first + m) / table_queries), ceil(topk / page)] i32 or i64, page =
	                      * 1 << page_shift rows; -1 is a hole, others outside [0, slots / page) are skipped and
	                      * counted; each is loaded once and checked in a register */
	const int32_t *lengths; /* [m] keys of a query, clamped to 0..topk, bad ones counted; or NULL: topk */
	void *o;             /* [m, heads, value_dim] f16, bf16 or f32; 0 where all are holes */
	float *lse;          /* [m, heads] natural log, -inf where all are holes; or NULL */
	unsigned long long *skipped; /* the launch adds the number of bad indices; or NULL */
	uint64_t slots;
	uint64_t cache_stride;       /* bytes from slot to slot */
	uint32_t q_stride, o_stride; /* bytes from query to query */
	uint32_t indices_stride;     /* bytes from row to row, a multiple of the index size */
	uint32_t table_queries;      /* consecutive queries that share a row of indices, 1 or more */
	uint32_t table_first;        /* queries before the first that share its row */
	uint32_t topk;
	uint32_t m;
	uint32_t first, split_keys; /* set by the launch: queries of the entries before this one,
	                              * keys of a CTA */
	float scale, kv_scale;
	uint8_t q_dtype, o_dtype, indices_dtype;
	uint8_t page_shift;
};

struct exl3_cuda_mla {
	const struct exl3_cuda_mla_entry *entries; /* host array, copied by the launch */
	uint32_t nr_entries;                       /* 1..EXL3_CUDA_MLA_ENTRIES_MAX */
	uint32_t heads;                            /* 1..EXL3_MLA_HEADS_MAX */
	uint32_t dim, value_dim;                   /* multiples of 16, value_dim <= dim */
	uint8_t cache_dtype;                       /* f16, bf16, e4m3 (kv_scale) or e4m3_656 */
	/* The split of keys follows from m and topk of one entry, not from the sum over entries; all
	 * entries must lead to the same split (-EINVAL), else merge only those that do. The order of
	 * summation is fixed for a given split in any case. */
	bool deterministic;
	/* 0: chosen. Else CTAs per query and head tile = cluster * groups, cluster 1 to 8 or 16. */
	uint16_t cluster, groups;
	void *ws; /* as in struct exl3_cuda_linear: the first EXL3_CUDA_WS_ZERO bytes stay zero */
	size_t ws_bytes;
	int device_sms, device_cc;
};

struct exl3_cuda_mla_kernel {
	const char *name;
	bool (*supports)(const struct exl3_cuda_mla *a);
	size_t (*ws_bytes)(const struct exl3_cuda_mla *a);
	int (*launch)(const struct exl3_cuda_mla *a, cudaStream_t stream);
};

/* Ends with a NULL name. */
extern const struct exl3_cuda_mla_kernel exl3_cuda_mla_kernels[];

/* The variant that should be fastest for @a, or NULL. */
const struct exl3_cuda_mla_kernel *exl3_cuda_mla_select(const struct exl3_cuda_mla *a);

#ifdef __cplusplus
}
#endif
#endif
