/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lower_stage.cu - activations in host memory: from their arena to device memory, once.
 *
 * The kernels read a row of x many times (every block its part of k, every expert its tokens), which over
 * PCIe would cost more than the whole operation. One small kernel reads each row once, by all SMs; for
 * the sizes of decoding that is as fast as the copy engine or faster (tests/gpu/facts/copies.cu). Results
 * are written once, so they go to the arena directly.
 */
#include "kernels/cuda/lower.h"

#include <errno.h>
#include <string.h>

#define STAGE_ENTRIES 48 /* requests per launch; they travel by value */

namespace
{

struct stage_entry {
	const char *src;
	char *dst;
	uint32_t src_stride, dst_stride;
	uint32_t bytes, rows;
};

struct stage_args {
	stage_entry e[STAGE_ENTRIES];
	uint32_t nr;
};

/* One row of blocks per entry: they are read side by side, as each waits for its way over PCIe. */
__global__ void __launch_bounds__(256) stage_kernel(const __grid_constant__ stage_args a)
{
	const stage_entry &e = a.e[blockIdx.y];
	const uint32_t pieces = (e.bytes + 15) / 16;
	const uint64_t total = (uint64_t)pieces * e.rows;

	for (uint64_t p = blockIdx.x * 256ull + threadIdx.x; p < total; p += gridDim.x * 256ull) {
		const uint32_t row = (uint32_t)(p / pieces), at = (uint32_t)(p % pieces) * 16;
		const char *src = e.src + (size_t)row * e.src_stride + at;
		char *dst = e.dst + (size_t)row * e.dst_stride + at;

		if (at + 16 <= e.bytes && !((uintptr_t)src & 15)) {
			*(uint4 *)dst = *(const uint4 *)src;
		} else { /* dense rows of an odd width begin and end at any element */
			for (uint32_t b = 0; b < 16 && at + b < e.bytes; b += 2)
				*(uint16_t *)(dst + b) = *(const uint16_t *)(src + b);
		}
	}
}

/* Of the device's own memory only rows whose ends would need care are copied. */
bool in_place(const struct exl3_rows *r, size_t bytes)
{
	return r->x_device && bytes % 16 == 0 && r->x_stride % 16 == 0 && !((uintptr_t)r->x & 15);
}

void launch_stage(struct exl3_cuda_place *p, stage_args *a)
{
	const unsigned most = (unsigned)p->dev->sms * 4 / a->nr + 1;
	size_t blocks = 1;

	for (uint32_t i = 0; i < a->nr; i++) {
		const size_t need = ((size_t)(a->e[i].bytes + 15) / 16 * a->e[i].rows + 255) / 256;

		blocks = need > blocks ? need : blocks;
	}
	stage_kernel<<<dim3(blocks < most ? (unsigned)blocks : most, a->nr), 256, 0, p->stream>>>(*a);
	a->nr = 0;
}

} /* namespace */

/*
 * Makes @staged a copy of slot->work whose x rows lie at the end of the workspace; *ws_bytes is what the
 * kernels may still use. Larger operands than a quarter of the workspace stay where they are: the many-row
 * kernels read those once anyway.
 */
int exl3_cuda_stage(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot, uint32_t k, uint32_t k_log,
		    struct exl3_work *staged, size_t *ws_bytes)
{
	const struct exl3_work *work = slot->work;
	size_t need = 0, at;
	bool all_there = true;
	stage_args a;

	*staged = *work;
	*ws_bytes = p->ws_bytes;
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		const struct exl3_rows *r = &work->rows[i];
		const size_t bytes = (size_t)(r->stored ? k : k_log) * exl3_dtype_bytes(r->x_dtype);

		if (in_place(r, bytes))
			continue;
		all_there = false;
		need += ((bytes + 15) / 16 * 16) * r->m;
	}
	if (all_there || need > p->ws_bytes / 4)
		return 0;
	at = (p->ws_bytes - need) / 256 * 256;
	*ws_bytes = at;
	memset(&a, 0, sizeof(a));
	memcpy(slot->rows, work->rows, work->nr_rows * sizeof(*slot->rows));
	staged->rows = slot->rows;
	for (uint32_t i = 0; i < work->nr_rows; i++) {
		struct exl3_rows *r = &slot->rows[i];
		const size_t bytes = (size_t)(r->stored ? k : k_log) * exl3_dtype_bytes(r->x_dtype);
		const bool last = i + 1 == work->nr_rows;
		stage_entry *e = &a.e[a.nr];

		if (in_place(r, bytes)) {
			if (last && a.nr)
				launch_stage(p, &a);
			continue;
		}
		a.nr++;
		e->src = (const char *)r->x;
		e->src_stride = r->x_stride;
		e->bytes = (uint32_t)bytes;
		e->dst_stride = (e->bytes + 15) / 16 * 16;
		e->rows = r->m;
		e->dst = p->ws + at;
		at += (size_t)e->dst_stride * r->m;
		r->x = e->dst;
		r->x_stride = e->dst_stride;
		if (a.nr == STAGE_ENTRIES || last)
			launch_stage(p, &a);
	}
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}
