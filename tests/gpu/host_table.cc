/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_table.cc - row tables (kernels/cuda/lower_table.cu) on the host: a track's, written in parts, and those of
 * submit(), kept and copied. Every table must list all rows of all requests, in order, at the moment it is read.
 */
#include "kernels/cuda/lower_table.cu"

#include <stdio.h>
#include <stdlib.h>
#include <vector>

namespace
{

int failed;
unsigned launches, copies;

#define CHECK(what)                                                       \
	do {                                                              \
		if (!(what)) {                                            \
			printf("%s:%d: %s\n", __FILE__, __LINE__, #what); \
			failed++;                                         \
		}                                                         \
	} while (0)

void write_part(const part &a, struct exl3_cuda_row *to, uint32_t nr, cudaStream_t)
{
	CHECK(nr >= 1 && nr <= PART_ROWS);
	memcpy(to, a.rows, nr * sizeof(*to));
	launches++;
}

} /* namespace */

extern "C" {
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t)
{
	memcpy(to, from, bytes);
	copies++;
	return cudaSuccess;
}
cudaError_t cudaGetLastError(void)
{
	return cudaSuccess;
}
}

namespace
{

uint32_t rnd(uint32_t below)
{
	static uint64_t seed = 3;

	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 33) % below;
}

/* Entries of some length each; addresses are numbers that nobody follows. */
std::vector<struct exl3_rows> entries(uint32_t nr, uint32_t most, uint32_t *m)
{
	std::vector<struct exl3_rows> e(nr);

	*m = 0;
	for (auto &r : e) {
		r = {};
		r.x = (const void *)(uintptr_t)(0x100000 + rnd(1000) * 65536);
		r.y = (void *)(uintptr_t)(0x90000000 + rnd(1000) * 65536);
		r.x_stride = 16 * (1 + rnd(9));
		r.y_stride = 16 * (1 + rnd(9));
		r.m = 1 + rnd(most);
		r.x_dtype = (uint8_t)rnd(3);
		r.y_dtype = (uint8_t)rnd(3);
		r.stored = rnd(2);
		*m += r.m;
	}
	return e;
}

void compare(const struct exl3_cuda_row *table, const std::vector<struct exl3_rows> &e)
{
	for (const auto &r : e)
		for (uint32_t j = 0; j < r.m; j++, table++)
			CHECK(table->x == (const char *)r.x + (size_t)j * r.x_stride &&
			      table->y == (char *)r.y + (size_t)j * r.y_stride && table->x_dtype == r.x_dtype &&
			      table->y_dtype == r.y_dtype && table->stored == r.stored);
}

void of_track(uint32_t nr, uint32_t most)
{
	static struct exl3_cuda_row table[EXL3_CUDA_TABLE_ROWS + 1];
	struct exl3_cuda_place p = {};
	struct exl3_cuda_slot slot = {};
	const struct exl3_cuda_row *ret = nullptr;
	struct exl3_work work = {};
	uint32_t m;
	const std::vector<struct exl3_rows> e = entries(nr, most, &m);

	p.table = table;
	work.rows = e.data();
	work.nr_rows = nr;
	if (m > EXL3_CUDA_TABLE_ROWS) {
		CHECK(exl3_cuda_table(&p, &slot, &work, m, &ret) == -EOPNOTSUPP);
		return;
	}
	memset(table, 0x5a, sizeof(table));
	launches = copies = 0;
	CHECK(!exl3_cuda_table(&p, &slot, &work, m, &ret) && ret == table);
	CHECK(launches == (m + PART_ROWS - 1) / PART_ROWS && !copies);
	compare(table, e);
	CHECK(((unsigned char *)&table[m])[0] == 0x5a);
}

/* As the executor: works begin, tables are asked for, some time later the oldest end. */
void of_submit()
{
	static struct exl3_dev dev;
	static struct exl3_cuda_row pinned[EXL3_CUDA_KEPT][EXL3_CUDA_KEPT_ROWS], device[EXL3_CUDA_KEPT][EXL3_CUDA_KEPT_ROWS];
	static struct exl3_cuda_row own[EXL3_CUDA_TABLE_ROWS], own_dev[EXL3_CUDA_TABLE_ROWS];
	struct exl3_cuda_slot slot = {};
	std::vector<std::vector<struct exl3_rows>> groups;
	std::vector<uint32_t> rows;

	dev.place.dev = &dev;
	for (unsigned i = 0; i < EXL3_CUDA_KEPT; i++) {
		dev.kept[i].table = pinned[i];
		dev.kept[i].table_dev = device[i];
	}
	slot.table = own;
	slot.table_dev = own_dev;
	for (int i = 0; i < 100; i++) {
		uint32_t m;

		groups.push_back(entries(2 + rnd(5), i % 10 ? 12 : 200, &m));
		rows.push_back(m);
	}
	copies = 0;
	for (int t = 0; t < 5000; t++) {
		/* A few groups come again and again, others now and then. */
		const uint32_t g = rnd(4) ? rnd(12) : rnd(100);
		const struct exl3_cuda_row *ret = nullptr;
		struct exl3_work work = {};

		work.rows = groups[g].data();
		work.nr_rows = (uint32_t)groups[g].size();
		slot.seq = ++dev.seq;
		CHECK(!exl3_cuda_table(&dev.place, &slot, &work, rows[g], &ret));
		compare(ret, groups[g]);
		dev.tail++;
		if (dev.tail - dev.head > rnd(EXL3_CUDA_SLOTS))
			dev.head += 1 + rnd(dev.tail - dev.head);
	}
	CHECK(copies < 2500);
}

} /* namespace */

int main()
{
	for (uint32_t nr : {2u, 3u, 48u, 255u})
		for (uint32_t most : {1u, 5u, 64u, 127u, 128u, 129u, 300u})
			of_track(nr, most);
	of_submit();
	printf("host_table: %d failed\n", failed);
	return failed != 0;
}
