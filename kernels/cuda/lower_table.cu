/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lower_table.cu - row tables of merged requests in device memory.
 *
 * A copy on the stream before each launch costs as much as a fifth of a small one. But decoders call from the
 * same buffers step after step, and those who ride together stay together: the same tables come again and again, a
 * handful for each group. So short tables are kept, found by content, and copied only once.
 *
 *   kept table:  free -> copied on the stream (seq) -> found again ... -> the least lately used one is replaced
 *
 * Its pinned source is written again only after the copy from it has run; its device memory is, in the order of the
 * stream, behind the launches that read it.
 *
 * A track's works may be captured and run again and again, so nothing that the host writes later may be read by
 * them: their rows travel as arguments of a kernel that writes the track's one table just before it is read.
 */
#include "kernels/cuda/lower.h"

#include <errno.h>
#include <string.h>

static void fill(struct exl3_cuda_row *row, const struct exl3_work *work)
{
	for (uint32_t i = 0; i < work->nr_rows; i++)
		for (uint32_t j = 0; j < work->rows[i].m; j++, row++) {
			memset(row, 0, sizeof(*row));
			row->x = (const char *)work->rows[i].x + (size_t)j * work->rows[i].x_stride;
			row->y = (char *)work->rows[i].y + (size_t)j * work->rows[i].y_stride;
			row->x_dtype = work->rows[i].x_dtype;
			row->y_dtype = work->rows[i].y_dtype;
			row->stored = work->rows[i].stored;
		}
}

static int copy(struct exl3_cuda_place *p, struct exl3_cuda_row *to, const struct exl3_cuda_row *from, uint32_t m)
{
	return cudaMemcpyAsync(to, from, m * sizeof(*to), cudaMemcpyHostToDevice, p->stream) ==
			       cudaSuccess ?
		       0 :
		       -EIO;
}

static uint64_t hash(const struct exl3_cuda_row *rows, uint32_t m)
{
	const uint64_t *w = (const uint64_t *)rows;
	uint64_t h = m;

	static_assert(sizeof(*rows) % 8 == 0, "whole words");
	for (size_t i = 0; i < m * sizeof(*rows) / 8; i++)
		h = (h ^ w[i]) * 0x9e3779b97f4a7c15ull;
	return h;
}

#define PART_ROWS 128u

namespace
{

struct part {
	struct exl3_cuda_row rows[PART_ROWS];
};

#ifdef EXL3_EMULATE /* tests/gpu/host_table.cc: this file on the host */
void write_part(const part &a, struct exl3_cuda_row *to, uint32_t nr, cudaStream_t stream);
#else
__global__ void table_kernel(const __grid_constant__ part a, struct exl3_cuda_row *to, uint32_t nr)
{
	if (threadIdx.x < nr)
		to[threadIdx.x] = a.rows[threadIdx.x];
}

void write_part(const part &a, struct exl3_cuda_row *to, uint32_t nr, cudaStream_t stream)
{
	table_kernel<<<1, PART_ROWS, 0, stream>>>(a, to, nr);
}
#endif

} /* namespace */

static int write_table(struct exl3_cuda_place *p, const struct exl3_work *work)
{
	struct exl3_work piece = *work;
	struct exl3_rows rows;
	struct part a;
	uint32_t done = 0, nr = 0;

	piece.rows = &rows;
	piece.nr_rows = 1;
	for (uint32_t i = 0; i < work->nr_rows; i++)
		for (uint32_t j = 0; j < work->rows[i].m; j += rows.m) {
			const uint32_t left = work->rows[i].m - j;

			rows = work->rows[i];
			rows.x = (const char *)rows.x + (size_t)j * rows.x_stride;
			rows.y = (char *)rows.y + (size_t)j * rows.y_stride;
			rows.m = left < PART_ROWS - nr ? left : PART_ROWS - nr;
			fill(&a.rows[nr], &piece);
			nr += rows.m;
			if (nr < PART_ROWS && (rows.m < left || i + 1 < work->nr_rows))
				continue;
			write_part(a, p->table + done, nr, p->stream);
			done += nr;
			nr = 0;
		}
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

/* Has the launch of that number, and all before it, ended? */
static bool ended(const struct exl3_dev *dev, uint32_t seq)
{
	/* dev->seq is the present one's, which is not among those in flight yet. */
	return (int32_t)(dev->seq - 1 - (dev->tail - dev->head) - seq) >= 0;
}

int exl3_cuda_table(struct exl3_cuda_place *p, struct exl3_cuda_slot *slot, const struct exl3_work *work, uint32_t m,
		    const struct exl3_cuda_row **ret)
{
	struct exl3_dev *dev = p->dev;
	struct exl3_cuda_row rows[EXL3_CUDA_KEPT_ROWS];
	struct exl3_cuda_kept *oldest = NULL;
	uint64_t h;
	int e;

	if (p->table) {
		*ret = p->table;
		return m > EXL3_CUDA_TABLE_ROWS ? -EOPNOTSUPP : write_table(p, work);
	}
	if (m > EXL3_CUDA_KEPT_ROWS) {
		fill(slot->table, work);
		*ret = slot->table_dev;
		return copy(p, slot->table_dev, slot->table, m);
	}
	fill(rows, work);
	h = hash(rows, m);
	for (unsigned i = 0; i < EXL3_CUDA_KEPT; i++) {
		struct exl3_cuda_kept *k = &dev->kept[i];

		if (k->rows == m && k->hash == h && !memcmp(k->table, rows, m * sizeof(rows[0]))) {
			k->used = ++dev->kept_clock;
			*ret = k->table_dev;
			return 0;
		}
		if ((!k->rows || ended(dev, k->seq)) && (!oldest || k->used < oldest->used))
			oldest = k;
	}
	if (!oldest) {
		memcpy(slot->table, rows, m * sizeof(rows[0]));
		*ret = slot->table_dev;
		return copy(p, slot->table_dev, slot->table, m);
	}
	memcpy(oldest->table, rows, m * sizeof(rows[0]));
	e = copy(p, oldest->table_dev, oldest->table, m);
	oldest->rows = e ? 0 : m;
	oldest->hash = h;
	oldest->seq = slot->seq;
	oldest->used = ++dev->kept_clock;
	*ret = oldest->table_dev;
	return e;
}
