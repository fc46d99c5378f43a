/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_mla.cu - every MLA decode variant against a plain double reference on the CPU.
 *
 * Prints one line per failed check and "N passed, N failed"; exit 0 only if none failed, 77 without
 * a GPU. Operands are cudaMalloc'ed one by one, so compute-sanitizer sees any step outside them.
 * Outputs stand between canaries.
 *
 * usage: check_mla [quick] [only=TEXT] [skip=TEXT]   quick: a reduced set for memcheck and racecheck;
 *        only, skip: variants whose name contains TEXT
 */
#include "kernels/cuda/mla.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>
#include <vector>

namespace
{

constexpr size_t CANARY = 256;
unsigned long nr_passed, nr_failed;
void *ws;
constexpr size_t WS_BYTES = (size_t)256 << 20;
int sms, cc;
const char *only = "", *skip; /* of the command line */

bool wanted(const struct exl3_cuda_mla_kernel *k, const struct exl3_cuda_mla *a)
{
	return strstr(k->name, only) && !(skip && strstr(k->name, skip)) && k->supports(a);
}

uint64_t rng_state = 0x9e3779b97f4a7c15ull;

uint64_t rng()
{
	uint64_t z = rng_state += 0x9e3779b97f4a7c15ull;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* Normal values, drawn from a table: the checks need hundreds of millions. */
float normal()
{
	static std::vector<float> table;

	if (table.empty()) {
		table.resize(1 << 16);
		for (float &x : table) {
			const double u = ((rng() >> 11) + 1) * 0x1p-53, v = (rng() >> 11) * 0x1p-53;

			x = (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
		}
	}
	return table[rng() >> 48];
}

void must(cudaError_t e, const char *what)
{
	if (e != cudaSuccess) {
		fprintf(stderr, "check_mla: %s: %s\n", what, cudaGetErrorString(e));
		exit(2);
	}
}

/* Element @i of a buffer of @dtype. */
void put(void *buf, uint32_t dtype, size_t i, float v)
{
	switch (dtype) {
	case EXL3_F32:
		((float *)buf)[i] = v;
		break;
	case EXL3_F16:
		((__half *)buf)[i] = __float2half(v);
		break;
	case EXL3_BF16:
		((__nv_bfloat16 *)buf)[i] = __float2bfloat16(v);
		break;
	default:
		((__nv_fp8_storage_t *)buf)[i] =
			__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
	}
}

float get(const void *buf, uint32_t dtype, size_t i)
{
	switch (dtype) {
	case EXL3_F32:
		return ((const float *)buf)[i];
	case EXL3_F16:
		return __half2float(((const __half *)buf)[i]);
	case EXL3_BF16:
		return __bfloat162float(((const __nv_bfloat16 *)buf)[i]);
	default:
		return __half2float(__half(
			__nv_cvt_fp8_to_halfraw(((const __nv_fp8_storage_t *)buf)[i], __NV_E4M3)));
	}
}

struct device_buf {
	uint8_t *ptr = nullptr; /* owned; canary | bytes | canary */
	size_t bytes = 0, guard = 0;

	uint8_t *data() const
	{
		return ptr + guard;
	}
	void init(const void *src, size_t n, bool guarded)
	{
		bytes = n;
		guard = guarded ? CANARY : 0;
		must(cudaMalloc((void **)&ptr, n + 2 * guard), "cudaMalloc");
		must(cudaMemset(ptr, 0xa5, n + 2 * guard), "cudaMemset");
		if (src)
			must(cudaMemcpy(data(), src, n, cudaMemcpyHostToDevice), "copy in");
	}
	bool intact() const
	{
		std::vector<uint8_t> h(bytes + 2 * guard);

		must(cudaMemcpy(h.data(), ptr, h.size(), cudaMemcpyDeviceToHost), "copy out");
		for (size_t i = 0; i < guard; i++)
			if (h[i] != 0xa5 || h[guard + bytes + i] != 0xa5)
				return false;
		return true;
	}
	~device_buf()
	{
		cudaFree(ptr);
	}
};

enum pattern { PLAIN, HOLES, GARBAGE, EMPTY, SHORT };

struct test {
	uint32_t cache, q, o, heads, dim, value_dim, topk, m;
	uint64_t slots;
	bool wide, lse, pad; /* pad: strides larger than the rows */
	pattern pat;
	uint32_t cluster, groups;
	uint32_t page_shift = 0, table_queries = 1, table_first = 0;
	bool lengths = false;

	uint32_t columns() const
	{
		return (topk + (1u << page_shift) - 1) >> page_shift;
	}
	uint64_t pages() const
	{
		return slots >> page_shift;
	}
};

/* Element @d of a cache row. */
float get_kv(const uint8_t *row, uint32_t dtype, uint32_t d)
{
	float f;

	if (dtype != EXL3_E4M3_656)
		return get(row, dtype, d);
	if (d >= 512)
		return get(row + 528, EXL3_BF16, d - 512);
	memcpy(&f, row + 512 + d / 128 * 4, 4);
	return f * get(row, EXL3_E4M3, d);
}

/* One request: host copies, device buffers, reference. */
struct request {
	test t;
	std::vector<uint8_t> q, cache, idx;
	std::vector<int32_t> len;
	std::vector<double> ref, ref_lse;
	uint64_t bad = 0;
	float scale, kv_scale;
	uint32_t q_stride, o_stride, idx_stride;
	uint64_t cache_stride;
	device_buf dq, dcache, didx, dlen, dout, dlse, dskipped;

	explicit request(const test &c);
	/* That query @b looks at. */
	uint32_t keys(uint32_t b) const
	{
		if (!t.lengths)
			return t.topk;
		return len[b] < 0 ? 0 : std::min((uint32_t)len[b], t.topk);
	}
	void reference();
	void zero_out();
	struct exl3_cuda_mla_entry entry() const;
	uint32_t check(const char *name, bool nan_query0);
	std::vector<uint8_t> output() const;
};

request::request(const test &c) : t(c)
{
	const uint32_t extra = t.pad ? 32 : 0;

	q_stride = t.heads * t.dim * exl3_dtype_bytes(t.q) + extra;
	o_stride = t.heads * t.value_dim * exl3_dtype_bytes(t.o) + extra;
	t.slots = t.pages() << t.page_shift;
	cache_stride = exl3_cache_row_bytes(t.cache, t.dim) + extra;
	idx_stride = t.columns() * (t.wide ? 8 : 4) + (t.pad ? 8 : 0);
	scale = 1.5f / sqrtf((float)t.dim);
	kv_scale = t.cache == EXL3_E4M3 ? 0.37f : 1.0f;
	q.resize((size_t)q_stride * t.m);
	cache.resize(cache_stride * t.slots, 0xff); /* padding reads as NaN */
	const uint32_t tables = (t.table_first + t.m + t.table_queries - 1) / t.table_queries;

	idx.resize((size_t)idx_stride * tables, 0xff);
	for (uint32_t b = 0; b < t.m; b++)
		for (uint32_t i = 0; i < t.heads * t.dim; i++)
			put(&q[(size_t)b * q_stride], t.q, i, normal());
	for (uint64_t s = 0; s < t.slots; s++)
		if (t.cache == EXL3_E4M3_656) {
			/* Factors that differ by powers of two between rows and blocks. */
			for (uint32_t d = 0; d < 512; d += 128) {
				const float f = ldexpf(0.5f + rng() % 64 / 64.0f, (int)(rng() % 9) - 6);

				memcpy(&cache[s * cache_stride + 512 + d / 128 * 4], &f, 4);
				for (uint32_t i = d; i < d + 128; i++)
					put(&cache[s * cache_stride], EXL3_E4M3, i, normal());
			}
			for (uint32_t d = 0; d < 64; d++)
				put(&cache[s * cache_stride + 528], EXL3_BF16, d, normal());
		} else {
			for (uint32_t d = 0; d < t.dim; d++)
				put(&cache[s * cache_stride], t.cache, d, normal() / kv_scale);
		}
	for (uint32_t b = 0; b < t.m && t.lengths; b++) {
		const uint32_t kind = (uint32_t)(rng() % 8);

		len.push_back(kind == 0 ? 0 : kind == 1 ? -5 : kind == 2 ? (int)t.topk + 1 : (int)(rng() % (t.topk + 1)));
		bad += kind == 1 || kind == 2;
	}
	for (uint32_t b = 0; b < tables; b++)
		for (uint32_t i = 0; i < t.columns(); i++) {
			int64_t v = (int64_t)(rng() % t.pages());

			if (t.pat == EMPTY || (t.pat == HOLES && rng() % 3 == 0) ||
			    (t.pat == SHORT && i >= t.columns() / 3))
				v = -1;
			if (t.pat == GARBAGE && rng() % 2)
				v = rng() % 8 == 0 ? (int64_t)t.pages() : (int64_t)rng();
			if (!t.wide)
				v = (int32_t)v;
			for (uint32_t r = 0; r < t.m; r++)
				bad += (r + t.table_first) / t.table_queries == b && v != -1 &&
				       (v < 0 || (uint64_t)v >= t.pages()) &&
				       i << t.page_shift < keys(r);
			if (t.wide)
				memcpy(&idx[(size_t)b * idx_stride + i * 8], &v, 8);
			else
				memcpy(&idx[(size_t)b * idx_stride + i * 4], &v, 4);
		}
	dq.init(q.data(), q.size(), false);
	dcache.init(cache.data(), cache.size(), false);
	didx.init(idx.data(), idx.size(), false);
	if (t.lengths)
		dlen.init(len.data(), len.size() * 4, false);
	dout.init(nullptr, (size_t)o_stride * t.m, true);
	dlse.init(nullptr, (size_t)t.m * t.heads * 4, true);
	dskipped.init(nullptr, 8, true);
}

void request::reference()
{
	std::vector<float> kv(t.slots * t.dim);

	for (uint64_t s = 0; s < t.slots; s++)
		for (uint32_t d = 0; d < t.dim; d++)
			kv[s * t.dim + d] = get_kv(&cache[s * cache_stride], t.cache, d);
	ref.assign((size_t)t.m * t.heads * t.value_dim, 0.0);
	ref_lse.assign((size_t)t.m * t.heads, -INFINITY);
	const unsigned nr = std::max(1u, std::thread::hardware_concurrency());
	std::vector<std::thread> threads;

	for (unsigned w = 0; w < nr; w++)
		threads.emplace_back([this, w, nr, &kv] {
			std::vector<double> s(t.topk);
			std::vector<const float *> rows(t.topk);

			for (uint32_t bh = w; bh < t.m * t.heads; bh += nr) {
				const uint32_t b = bh / t.heads, h = bh % t.heads;
				std::vector<double> qd(t.dim);
				double top = -INFINITY, sum = 0;

				for (uint32_t d = 0; d < t.dim; d++)
					qd[d] = get(&q[(size_t)b * q_stride], t.q,
						    (size_t)h * t.dim + d);
				for (uint32_t i = 0; i < t.topk; i++) {
					const uint8_t *p = &idx[(size_t)((b + t.table_first) / t.table_queries) * idx_stride];
					const uint32_t at = i >> t.page_shift;
					int32_t v32;
					int64_t v;

					if (t.wide) {
						memcpy(&v, p + at * 8, 8);
					} else {
						memcpy(&v32, p + at * 4, 4);
						v = v32;
					}
					const bool in = v >= 0 && (uint64_t)v < t.pages() && i < keys(b);

					rows[i] = in ? &kv[((v << t.page_shift) + (i & ((1u << t.page_shift) - 1))) * t.dim]
						     : nullptr;
					s[i] = -INFINITY;
					if (!rows[i])
						continue;
					double a = 0;

					for (uint32_t d = 0; d < t.dim; d++)
						a += qd[d] * rows[i][d];
					s[i] = a * scale * kv_scale;
					top = fmax(top, s[i]);
				}
				double *o = &ref[(size_t)bh * t.value_dim];

				for (uint32_t i = 0; i < t.topk; i++) {
					if (!rows[i])
						continue;
					const double e = exp(s[i] - top);

					sum += e;
					for (uint32_t d = 0; d < t.value_dim; d++)
						o[d] += e * rows[i][d];
				}
				if (sum == 0)
					continue;
				for (uint32_t d = 0; d < t.value_dim; d++)
					o[d] *= kv_scale / sum;
				ref_lse[bh] = top + log(sum);
			}
		});
	for (auto &th : threads)
		th.join();
}

void request::zero_out()
{
	must(cudaMemset(dout.data(), 0xff, dout.bytes), "memset");
	must(cudaMemset(dlse.data(), 0xff, dlse.bytes), "memset");
	must(cudaMemset(dskipped.data(), 0, 8), "memset");
}

struct exl3_cuda_mla_entry request::entry() const
{
	struct exl3_cuda_mla_entry e = {};

	e.q = dq.data();
	e.cache = dcache.data();
	e.indices = didx.data();
	e.o = dout.data();
	e.lse = t.lse ? (float *)dlse.data() : nullptr;
	e.skipped = (unsigned long long *)dskipped.data();
	e.lengths = t.lengths ? (const int32_t *)dlen.data() : nullptr;
	e.table_queries = t.table_queries;
	e.table_first = t.table_first;
	e.page_shift = (uint8_t)t.page_shift;
	e.slots = t.slots;
	e.cache_stride = cache_stride;
	e.q_stride = q_stride;
	e.o_stride = o_stride;
	e.indices_stride = idx_stride;
	e.topk = t.topk;
	e.m = t.m;
	e.scale = scale;
	e.kv_scale = kv_scale;
	e.q_dtype = (uint8_t)t.q;
	e.o_dtype = (uint8_t)t.o;
	e.indices_dtype = t.wide ? EXL3_I64 : EXL3_I32;
	return e;
}

std::vector<uint8_t> request::output() const
{
	std::vector<uint8_t> h(dout.bytes);

	must(cudaMemcpy(h.data(), dout.data(), h.size(), cudaMemcpyDeviceToHost), "copy out");
	return h;
}

void result(bool ok, const char *name, const test &t, const char *what, double seen, double want)
{
	if (ok) {
		nr_passed++;
		return;
	}
	nr_failed++;
	printf("FAIL %s: cache %u q %u o %u heads %u dim %u/%u topk %u m %u wide %d pattern %d "
	       "split %ux%u pages 2^%u, %u queries a table, lengths %d: "
	       "%s: saw %g, want %g\n",
	       name, t.cache, t.q, t.o, t.heads, t.dim, t.value_dim, t.topk, t.m, t.wide, t.pat,
	       t.cluster, t.groups, t.page_shift, t.table_queries, t.lengths, what, seen, want);
}

/* Errors are measured in units of the rms of the reference. */
uint32_t request::check(const char *name, bool nan_query0)
{
	const std::vector<uint8_t> out = output();
	const double tol = t.cache == EXL3_BF16 || t.cache == EXL3_E4M3_656 ? 0.03 : 0.008;
	/* Rounding of the output, relative to the value itself. */
	const double ulp = t.o == EXL3_BF16 ? 0x1p-8 : t.o == EXL3_F16 ? 0x1p-10 : 0x1p-20;
	double sq = 0, worst = 0;
	const size_t n = (size_t)t.m * t.heads * t.value_dim, start = nan_query0 ? n / t.m : 0;

	for (size_t i = 0; i < n; i++)
		sq += ref[i] * ref[i];
	const double rms = fmax(sqrt(sq / n), 1e-6);

	for (size_t i = start; i < n; i++) {
		const size_t b = i / ((size_t)t.heads * t.value_dim);
		const float v = get(&out[b * o_stride], t.o, i % ((size_t)t.heads * t.value_dim));
		const double e = (fabs(v - ref[i]) - ulp * fabs(ref[i])) / rms;

		if (!(e <= worst)) /* NaN counts as worst */
			worst = e;
	}
	const unsigned long before = nr_failed;

	result(worst <= tol, name, t, "largest error / rms", worst, tol);
	result(dout.intact(), name, t, "canary of o", 0, 1);
	if (t.lse) {
		std::vector<float> lse((size_t)t.m * t.heads);
		double w = 0;

		must(cudaMemcpy(lse.data(), dlse.data(), dlse.bytes, cudaMemcpyDeviceToHost),
		     "copy");
		for (size_t i = nan_query0 ? t.heads : 0; i < lse.size(); i++) {
			const double e = lse[i] == ref_lse[i] ? 0 : fabs(lse[i] - ref_lse[i]);

			if (!(e <= w))
				w = e;
		}
		result(w <= 0.02, name, t, "lse error", w, 0.02);
		result(dlse.intact(), name, t, "canary of lse", 0, 1);
	}
	unsigned long long skipped;

	must(cudaMemcpy(&skipped, dskipped.data(), 8, cudaMemcpyDeviceToHost), "copy");
	result(skipped == bad, name, t, "skipped", (double)skipped, (double)bad);
	return nr_failed != before;
}

struct exl3_cuda_mla args(const test &t, const struct exl3_cuda_mla_entry *e, uint32_t nr)
{
	struct exl3_cuda_mla a = {};

	a.entries = e;
	a.nr_entries = nr;
	a.heads = t.heads;
	a.dim = t.dim;
	a.value_dim = t.value_dim;
	a.cache_dtype = (uint8_t)t.cache;
	a.cluster = (uint16_t)t.cluster;
	a.groups = (uint16_t)t.groups;
	a.ws = ws;
	a.ws_bytes = WS_BYTES;
	a.device_sms = sms;
	a.device_cc = cc;
	return a;
}

bool ws_zero()
{
	std::vector<uint8_t> h(EXL3_CUDA_WS_ZERO);

	must(cudaMemcpy(h.data(), ws, h.size(), cudaMemcpyDeviceToHost), "copy ws");
	for (uint8_t b : h)
		if (b)
			return false;
	return true;
}

void launch(const struct exl3_cuda_mla_kernel *k, const struct exl3_cuda_mla *a, const test &t)
{
	const int r = k->launch(a, 0);

	result(r == 0, k->name, t, "launch", r, 0);
	must(cudaDeviceSynchronize(), k->name);
}

/* One request through every variant that takes it. */
void run_case(const test &t)
{
	request rq(t);
	const struct exl3_cuda_mla_entry e = rq.entry();
	const struct exl3_cuda_mla a = args(t, &e, 1);
	unsigned variants = 0;

	rq.reference();
	for (const struct exl3_cuda_mla_kernel *k = exl3_cuda_mla_kernels; k->name; k++) {
		if (!wanted(k, &a))
			continue;
		variants++;
		result(k->ws_bytes(&a) <= WS_BYTES, k->name, t, "workspace",
		       (double)k->ws_bytes(&a), (double)WS_BYTES);
		rq.zero_out();
		launch(k, &a, t);
		rq.check(k->name, false);
		const std::vector<uint8_t> one = rq.output();

		rq.zero_out();
		launch(k, &a, t);
		result(one == rq.output(), k->name, t, "second run is bit-equal", 0, 1);
	}
	result(exl3_cuda_mla_select(&a) != nullptr, "select", t, "a variant", 0, 1);
	if (!*only && !skip)
		result(variants > 0, "table", t, "variants", variants, 1);
	result(ws_zero(), "workspace", t, "left zero", 0, 1);
}

/* A query of NaN and an unselected cache row of NaN change nothing elsewhere. */
void run_nan(test t)
{
	request rq(t);
	const struct exl3_cuda_mla_entry e = rq.entry();
	const struct exl3_cuda_mla a = args(t, &e, 1);

	rq.reference();
	for (const struct exl3_cuda_mla_kernel *k = exl3_cuda_mla_kernels; k->name; k++) {
		if (!wanted(k, &a))
			continue;
		rq.zero_out();
		must(cudaMemcpy(rq.dq.data(), rq.q.data(), rq.q.size(), cudaMemcpyHostToDevice),
		     "copy");
		launch(k, &a, t);
		const std::vector<uint8_t> clean = rq.output();

		must(cudaMemset(rq.dq.data(), 0xff, rq.q_stride), "memset");
		rq.zero_out();
		launch(k, &a, t);
		const std::vector<uint8_t> dirty = rq.output();

		result(!memcmp(&clean[rq.o_stride], &dirty[rq.o_stride],
			       clean.size() - rq.o_stride),
		       k->name, t, "NaN stays in its query", 0, 1);
		result(isnan(get(dirty.data(), t.o, 0)), k->name, t, "NaN comes through", 0, 1);
		rq.check(k->name, true);
	}
}

/* Several requests in one launch are bit-equal to each alone with the same split. */
void run_merged(const test &base)
{
	std::vector<request *> rqs;
	std::vector<struct exl3_cuda_mla_entry> es;
	std::vector<std::vector<uint8_t>> alone;

	for (uint32_t i = 0; i < 7; i++) {
		test t = base;

		t.m = 1 + i % 3;
		t.q = i % 3 == 0 ? EXL3_F32 : i % 3 == 1 ? EXL3_F16 : EXL3_BF16;
		t.o = i % 2 ? EXL3_F32 : EXL3_BF16;
		t.wide = i & 1;
		t.topk = base.topk - i * 7;
		t.slots = base.slots + i * 11;
		t.pad = i & 1;
		t.pat = i == 3 ? GARBAGE : i == 4 ? EMPTY : HOLES;
		t.page_shift = i % 3 == 2 ? 4 : 0;
		t.table_queries = 1 + i % 2;
		t.lengths = i > 4;
		rqs.push_back(new request(t));
		rqs.back()->reference();
		es.push_back(rqs.back()->entry());
	}
	const struct exl3_cuda_mla a = args(base, es.data(), (uint32_t)es.size());

	for (const struct exl3_cuda_mla_kernel *k = exl3_cuda_mla_kernels; k->name; k++) {
		if (!wanted(k, &a))
			continue;
		alone.clear();
		for (size_t i = 0; i < rqs.size(); i++) {
			const struct exl3_cuda_mla one = args(base, &es[i], 1);

			rqs[i]->zero_out();
			launch(k, &one, base);
			alone.push_back(rqs[i]->output());
			rqs[i]->zero_out();
		}
		launch(k, &a, base);
		for (size_t i = 0; i < rqs.size(); i++) {
			rqs[i]->check(k->name, false);
			result(alone[i] == rqs[i]->output(), k->name, rqs[i]->t,
			       "merged is bit-equal to alone", 0, 1);
		}
	}
	result(ws_zero(), "workspace", base, "left zero", 0, 1);
	for (request *rq : rqs)
		delete rq;
}

const uint32_t caches[] = {EXL3_BF16, EXL3_F16, EXL3_E4M3, EXL3_E4M3_656};

void run_all(bool quick)
{
	static const uint32_t heads[] = {1, 3, 16, 17, 64, 128};
	static const uint32_t topks[] = {1, 15, 33, 250, 700, 2100};
	static const struct {
		uint32_t dim, value_dim;
	} dims[] = {{576, 512}, {512, 512}, {16, 16},   {640, 640},
		    {576, 576}, {80, 48},   {320, 256}, {512, 16}};
	static const struct {
		uint32_t cluster, groups;
	} splits[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1},  {8, 1}, {16, 1},
		      {2, 4}, {5, 2}, {8, 3}, {8, 16}, {16, 2}};
	unsigned i = 0;

	for (uint32_t cache : caches) {
		/* Sizes and heads; the other choices cycle with different periods. */
		for (const auto &d : dims)
			for (uint32_t h : heads) {
				static const uint32_t types[] = {EXL3_BF16, EXL3_F16, EXL3_F32};
				test t = {cache,
					  types[i % 3],
					  types[i / 3 % 3],
					  h,
					  d.dim,
					  d.value_dim,
					  topks[i % 6],
					  1 + i % 3,
					  300 + i * 13,
					  (i & 1) != 0,
					  i % 4 != 3,
					  i % 5 == 0,
					  (pattern)(i % 5),
					  0,
					  0};

				i++;
				if (cache == EXL3_E4M3_656) {
					t.dim = 576;
					t.value_dim = 512;
				}
				if (i % 3 == 1) {
					t.page_shift = i % 7;
					t.table_queries = 1 + i % 4;
					t.table_first = i / 3 % t.table_queries;
					t.m += 2;
					t.lengths = i % 2;
				}
				if (quick && (h == 64 || h == 3 || i % 3))
					continue;
				if (quick)
					t.topk = t.topk > 250 ? 250 : t.topk;
				run_case(t);
			}
		for (const auto &s : splits) {
			test t = {cache, EXL3_BF16, EXL3_F32, 16,    576,   512,       2048,    2,
				  5000,  false,     true,     false, HOLES, s.cluster, s.groups};

			if (quick && s.cluster != 5 && s.groups != 3)
				continue;
			run_case(t);
			t.dim = cache == EXL3_E4M3_656 ? 576 : 512;
			t.topk = 333;
			t.lengths = s.cluster != 3;
			t.page_shift = s.groups == 1 ? 6 : 0;
			t.pat = GARBAGE;
			t.heads = 20;
			run_case(t);
		}
		test t = {cache, EXL3_BF16, EXL3_F32, 16,    576,   512, 500, 3,
			  2000,  false,     true,     false, HOLES, 2,   2};

		run_nan(t);
		run_merged(t);
		t.heads = 40;
		if (cache != EXL3_E4M3_656) {
			t.dim = 192;
			t.value_dim = 128;
		}
		run_nan(t);
		run_merged(t);
		/* Keys for many blocks: several sets of offsets a warp. */
		t = {cache, EXL3_F16, EXL3_F16, 16,    576, 512, quick ? 1500u : 9000u, 1, 20000,
		     true,  true,     false,    HOLES, 1,   1};
		run_case(t);
		t.heads = 64;
		t.m = quick ? 2 : 9;
		t.topk = quick ? 100 : 1100;
		t.pat = GARBAGE;
		t.cluster = t.groups = 0;
		run_case(t);
	}
}

} // namespace

int main(int argc, char **argv)
{
	bool quick = false;

	setvbuf(stdout, nullptr, _IOLBF, 0);
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "quick"))
			quick = true;
		else if (!strncmp(argv[i], "only=", 5))
			only = argv[i] + 5;
		else if (!strncmp(argv[i], "skip=", 5))
			skip = argv[i] + 5;
		else
			return fprintf(stderr,
				       "usage: check_mla [quick] [only=TEXT] [skip=TEXT]\n"),
			       2;
	}
	if (cudaFree(nullptr) != cudaSuccess) {
		printf("check_mla: no GPU: skipped\n");
		return 77;
	}
	must(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
	int major, minor;

	must(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "attribute");
	must(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "attribute");
	cc = major * 10 + minor;
	must(cudaMalloc(&ws, WS_BYTES), "cudaMalloc");
	must(cudaMemset(ws, 0, EXL3_CUDA_WS_ZERO), "memset");
	run_all(quick);
	printf("check_mla: %lu passed, %lu failed\n", nr_passed, nr_failed);
	return nr_failed != 0;
}
