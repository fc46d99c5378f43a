/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_linear.cu - every linear kernel of both tables against a plain reference in double.
 *
 * The reference decodes weights with format.h, one thread per column, and transforms by the definition of
 * the Hadamard matrix; it shares no code with the kernels. Inputs are numbers that fp16, bf16 and fp32 hold
 * exactly, so one reference serves every input type. Checked beside the values: bytes around and between
 * the output rows, the workspace's zero part, repeatability bit by bit, and that a NaN stays in its row.
 *
 *       check_linear [--quick] [--kernel NAME | --candidates] [--verbose]       exit status 77: no device
 *
 * Candidates (launch.h) are checked where they are named or asked for, so that one that hangs takes nothing else along.
 */
#include "kernels/cuda/launch.h"
#include "kernels/format.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>

#define CK(x)                                                                              \
	do {                                                                               \
		cudaError_t e_ = (x);                                                      \
		if (e_ != cudaSuccess) {                                                   \
			printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); \
			exit(1);                                                           \
		}                                                                          \
	} while (0)

static const uint8_t CANARY = 0xa5;
static const uint32_t M_MAX = 33;

static unsigned long passed, failed;
static bool quick, verbose, candidates;
static const char *only;
static cudaDeviceProp prop;
static uint8_t *ws;
static size_t ws_size = 256u << 20;

static uint64_t seed = 12345;

static uint32_t rnd(void)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 32);
}

static float uniform(float lo, float hi)
{
	return lo + (hi - lo) * (float)(rnd() >> 8) / 16777216.0f;
}

/* About normal, and exact in fp16, bf16 and fp32: eight significant bits. */
static float exact_value(void)
{
	float v = uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1);

	return fabsf(v) < 0.01f ? 0.0f : exl3_bf16_to_f32(exl3_f32_to_bf16(v));
}

template <class T> static T *upload(const std::vector<T> &v)
{
	T *p;

	CK(cudaMalloc(&p, v.size() * sizeof(T) + 256));
	CK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
	return p;
}

/* ---- the reference ---- */

__global__ void ref_input(const float *x, const uint16_t *suh, const float *f16, uint32_t k,
			  double *xh)
{
	const uint32_t base = blockIdx.x * 128, i = threadIdx.x;
	const float *row = x + (size_t)blockIdx.y * k + base;
	double sum = 0;

	for (int j = 0; j < 128; j++) {
		double v = (double)row[j] * (double)f16[suh[base + j]];

		sum += __popc(i & j) & 1 ? -v : v;
	}
	xh[(size_t)blockIdx.y * k + base + i] = sum * EXL3_INV_SQRT128;
}

/* One column per thread, 8 rows at a time; @value: [3][65536] codebook values. */
__global__ void ref_product(const uint32_t *trellis, const float *value, int rate2, uint32_t k,
			    uint32_t n, uint32_t m, const double *xh, double *yh)
{
	const uint32_t col = blockIdx.x * 64 + threadIdx.x, m0 = blockIdx.y * 8;
	double sum[8] = {};

	for (uint32_t row = 0; row < k; row++) {
		const uint32_t *tile = trellis + ((size_t)(row / 16) * (n / 16) + col / 16) *
							 exl3_tile_words32(rate2);
		const int t = exl3_tile_index(row % 16, col % 16);
		const double w = (double)value[exl3_window(tile, rate2, t)];

		for (uint32_t i = 0; i < 8 && m0 + i < m; i++)
			sum[i] += xh[(size_t)(m0 + i) * k + row] * w;
	}
	for (uint32_t i = 0; i < 8 && m0 + i < m; i++)
		yh[(size_t)(m0 + i) * n + col] = sum[i];
}

__global__ void ref_output(const double *yh, const uint16_t *svh, const float *bias,
			   const float *f16, uint32_t n, double *y)
{
	const uint32_t base = blockIdx.x * 128, i = threadIdx.x;
	double sum = 0;

	for (int j = 0; j < 128; j++) {
		double v = yh[(size_t)blockIdx.y * n + base + j];

		sum += __popc(i & j) & 1 ? -v : v;
	}
	y[(size_t)blockIdx.y * n + base + i] = sum * EXL3_INV_SQRT128 * (double)f16[svh[base + i]] +
					       (bias ? (double)bias[base + i] : 0.0);
}

__global__ void count_nonzero(const uint32_t *p, size_t words, unsigned *count)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words;
	     i += (size_t)gridDim.x * blockDim.x)
		if (p[i])
			atomicAdd(count, 1u);
}

static float *value_table, *f16_table;
static unsigned *counter;

static void make_tables(void)
{
	std::vector<float> v(3 * 65536), h(65536);

	for (int cb = 0; cb < 3; cb++)
		for (uint32_t w = 0; w < 65536; w++)
			v[cb * 65536 + w] = exl3_f16_to_f32(exl3_code_f16(w, cb));
	for (uint32_t b = 0; b < 65536; b++)
		h[b] = exl3_f16_to_f32((uint16_t)b);
	value_table = upload(v);
	f16_table = upload(h);
	CK(cudaMalloc(&counter, 4));
}

/* ---- a layer, its inputs and the expected outputs ---- */

struct shape {
	uint32_t n, n_log;
	int rate2, codebook;
	bool bias;
};

struct layer {
	uint32_t k, k_log;
	std::vector<shape> shapes;
	std::vector<exl3_matrix> shards;
	std::vector<void *> owned;
	std::vector<float> x;               /* [M_MAX][k], zero beyond k_log */
	std::vector<std::vector<double>> y; /* per shard [M_MAX][n] */
	double rms;

	layer(uint32_t k_, uint32_t k_log_, std::vector<shape> s);
	~layer()
	{
		for (void *p : owned)
			cudaFree(p);
	}
	layer(const layer &) = delete;
	uint32_t width(bool stored) const
	{
		uint32_t w = 0;

		for (const shape &s : shapes)
			w += stored ? s.n : s.n_log;
		return w;
	}
};

layer::layer(uint32_t k_, uint32_t k_log_, std::vector<shape> s) : k(k_), k_log(k_log_), shapes(s)
{
	double *xh, *yh, *yd, sum = 0;
	size_t count = 0;

	x.resize((size_t)M_MAX * k);
	for (uint32_t r = 0; r < M_MAX; r++)
		for (uint32_t i = 0; i < k_log; i++)
			x[(size_t)r * k + i] = exact_value();
	float *xd = upload(x);

	CK(cudaMalloc(&xh, (size_t)M_MAX * k * 8));
	for (const shape &p : shapes) {
		std::vector<uint32_t> t(exl3_trellis_bytes(k, p.n, p.rate2) / 4);
		std::vector<uint16_t> suh(k), svh(p.n);
		std::vector<float> bias(p.n, 0.0f);
		exl3_matrix w = {};

		for (uint32_t &v : t)
			v = rnd();
		for (uint16_t &v : suh)
			v = exl3_f32_to_f16(uniform(0.5f, 1.5f) * (rnd() & 1 ? 1.0f : -1.0f));
		for (uint16_t &v : svh)
			v = exl3_f32_to_f16(uniform(0.5f, 1.5f) * (rnd() & 1 ? 0.1f : -0.1f));
		for (uint32_t i = 0; i < p.n_log; i++)
			bias[i] = uniform(-1, 1);
		w.k = k;
		w.n = p.n;
		w.k_log = k_log;
		w.n_log = p.n_log;
		w.rate2 = (uint8_t)p.rate2;
		w.codebook = (uint8_t)p.codebook;
		w.trellis = upload(t);
		w.suh = upload(suh);
		w.svh = upload(svh);
		w.bias = p.bias ? upload(bias) : NULL;
		for (const void *q : {w.trellis, w.suh, w.svh, w.bias})
			if (q)
				owned.push_back((void *)q);
		shards.push_back(w);

		CK(cudaMalloc(&yh, (size_t)M_MAX * p.n * 8));
		CK(cudaMalloc(&yd, (size_t)M_MAX * p.n * 8));
		ref_input<<<dim3(k / 128, M_MAX), 128>>>(xd, (const uint16_t *)w.suh, f16_table, k,
							 xh);
		ref_product<<<dim3(p.n / 64, (M_MAX + 7) / 8), 64>>>(
			(const uint32_t *)w.trellis, value_table + p.codebook * 65536, p.rate2, k,
			p.n, M_MAX, xh, yh);
		ref_output<<<dim3(p.n / 128, M_MAX), 128>>>(
			yh, (const uint16_t *)w.svh, (const float *)w.bias, f16_table, p.n, yd);
		std::vector<double> out((size_t)M_MAX * p.n);

		CK(cudaMemcpy(out.data(), yd, out.size() * 8, cudaMemcpyDeviceToHost));
		for (double v : out)
			sum += v * v, count++;
		y.push_back(out);
		CK(cudaFree(yh));
		CK(cudaFree(yd));
	}
	rms = sqrt(sum / (double)count);
	CK(cudaFree(xh));
	CK(cudaFree(xd));
}

/* ---- one run of one kernel ---- */

struct setting {
	uint32_t m = 1;
	uint8_t x_dtype = EXL3_F16, y_dtype = EXL3_F16;
	bool stored = false;
	uint32_t pad = 0;   /* bytes more than needed in each stride, a multiple of 16 */
	bool dense = false; /* rows without a gap: every row but the first begins at any element */
	bool table = false; /* rows through a table, in another order, with mixed types */
	int nan_row = -1;
};

static uint32_t bytes_of(int dtype)
{
	return dtype == EXL3_F32 ? 4 : 2;
}
/* From row to row. */
static uint32_t row_bytes(const setting &s, uint32_t columns, int dtype)
{
	const uint32_t bytes = columns * bytes_of(dtype);

	return s.dense ? bytes : ((bytes + 15) & ~15u) + s.pad;
}

static void encode(uint8_t *p, int dtype, float v)
{
	uint16_t h;

	if (dtype == EXL3_F32) {
		memcpy(p, &v, 4);
		return;
	}
	h = dtype == EXL3_F16 ? exl3_f32_to_f16(v) : exl3_f32_to_bf16(v);
	memcpy(p, &h, 2);
}

static double decode(const uint8_t *p, int dtype)
{
	uint16_t h;
	float f;

	if (dtype == EXL3_F32) {
		memcpy(&f, p, 4);
		return f;
	}
	memcpy(&h, p, 2);
	return dtype == EXL3_F16 ? exl3_f16_to_f32(h) : exl3_bf16_to_f32(h);
}

struct place {
	size_t x, y;
	uint8_t x_dtype, y_dtype;
	bool stored;
};

static bool run(const exl3_cuda_linear_kernel *kern, const layer &l, const setting &s,
		const char *what)
{
	exl3_cuda_linear a = {};
	std::vector<place> at(s.m);
	std::vector<uint8_t> xb, first;
	std::string why;
	char text[256];
	size_t x_bytes = 256, y_bytes = 256;
	const uint32_t x_cols = s.stored ? l.k : l.k_log;
	const uint32_t x_stride = row_bytes(s, x_cols, s.x_dtype);
	const uint32_t y_stride = row_bytes(s, l.width(s.stored), s.y_dtype);

	for (size_t i = 0; i < l.shards.size(); i++)
		a.shard[i] = l.shards[i];
	a.nr_shards = (uint32_t)l.shards.size();
	a.m = s.m;
	a.x_stride = x_stride;
	a.y_stride = y_stride;
	a.x_dtype = s.x_dtype;
	a.y_dtype = s.y_dtype;
	a.stored = s.stored;
	a.ws = ws;
	a.ws_bytes = ws_size;
	a.device_sms = prop.multiProcessorCount;
	a.device_cc = prop.major * 10 + prop.minor;
	for (uint32_t i = 0; i < s.m; i++) {
		/* In a table, rows lie in reverse order, each with types of its own. */
		place &p = at[s.table ? s.m - 1 - i : i];

		p.x_dtype = s.table ? (uint8_t)(EXL3_F16 + i % 3) : s.x_dtype;
		p.y_dtype = s.table ? (uint8_t)(EXL3_F16 + (i + 1) % 3) : s.y_dtype;
		p.stored = s.table ? i % 2 : s.stored;
		p.x = x_bytes;
		p.y = y_bytes;
		x_bytes += s.table ? row_bytes(s, p.stored ? l.k : l.k_log, p.x_dtype) : x_stride;
		y_bytes += s.table ? row_bytes(s, l.width(p.stored), p.y_dtype) : y_stride;
		if (s.table && s.dense) { /* each row begins at a multiple of its own element */
			x_bytes = (x_bytes + 3) & ~(size_t)3;
			y_bytes = (y_bytes + 3) & ~(size_t)3;
		}
	}
	x_bytes += 256;
	y_bytes += 256;
	/* What lies between and behind the rows of x is NaN: reading it shows. */
	xb.assign(x_bytes, 0xff);
	for (uint32_t i = 0; i < s.m; i++)
		for (uint32_t c = 0; c < (at[i].stored ? l.k : l.k_log); c++) {
			float v = l.x[(size_t)i * l.k + c];

			if ((int)i == s.nan_row && c == l.k_log / 2)
				v = NAN;
			encode(&xb[at[i].x + c * bytes_of(at[i].x_dtype)], at[i].x_dtype, v);
		}
	uint8_t *xd = upload(xb), *yd;
	exl3_cuda_row *td = NULL;

	CK(cudaMalloc(&yd, y_bytes));
	if (s.table) {
		std::vector<exl3_cuda_row> rows(s.m);

		for (uint32_t i = 0; i < s.m; i++)
			rows[i] = exl3_cuda_row{xd + at[i].x,  yd + at[i].y, at[i].x_dtype,
						at[i].y_dtype, at[i].stored, {}};
		td = upload(rows);
		a.table = td;
	} else {
		a.x = xd + at[0].x;
		a.y = yd + at[0].y;
	}
	if (kern->supports(&a) && kern->ws_bytes(&a) <= ws_size) {
		for (int round = 0; round < 2 && why.empty(); round++) {
			std::vector<uint8_t> yb(y_bytes);

			CK(cudaMemset(yd, CANARY, y_bytes));
			int r = kern->launch(&a, 0);
			cudaError_t e = cudaDeviceSynchronize();

			if (r || e != cudaSuccess) {
				printf("FAILED %s: %s m %u: launch %d, %s\n", kern->name, what, s.m,
				       r, cudaGetErrorString(e));
				if (e != cudaSuccess)
					exit(1); /* the context is lost */
				failed++;
				why = "x";
				break;
			}
			CK(cudaMemcpy(yb.data(), yd, y_bytes, cudaMemcpyDeviceToHost));
			if (round == 1) {
				if (memcmp(first.data(), yb.data(), y_bytes))
					why = "second run differs";
				break;
			}
			first = yb;

			double worst = 0, sum = 0, limit_rms = 1e-3;
			size_t count = 0;
			std::vector<uint8_t> rest = yb;

			for (uint32_t i = 0; i < s.m && why.empty(); i++) {
				const place &p = at[i];
				uint32_t base = 0;

				if (p.y_dtype == EXL3_BF16)
					limit_rms = 1e-3 + 0x1p-9;
				for (size_t sh = 0; sh < l.shapes.size(); sh++) {
					const shape &q = l.shapes[sh];
					const uint32_t cols = p.stored ? q.n : q.n_log;

					for (uint32_t c = 0; c < cols; c++) {
						const size_t o = p.y + (size_t)(base + c) *
									       bytes_of(p.y_dtype);
						const double got = decode(&yb[o], p.y_dtype);
						const double want = l.y[sh][(size_t)i * q.n + c];
						const double ulp =
							p.y_dtype == EXL3_F32
								? 0
								: fabs(want) *
									  (p.y_dtype == EXL3_F16
										   ? 0x1p-11
										   : 0x1p-8);

						memset(&rest[o], CANARY, bytes_of(p.y_dtype));
						if ((int)i == s.nan_row) {
							if (!isnan(got)) {
								snprintf(text, sizeof(text),
									 "row %u column %u is %g, "
									 "not NaN",
									 i, c, got);
								why = text;
							}
							continue;
						}
						const double err = fabs(got - want) - ulp;

						if (!(err <= 5e-3 * l.rms) && why.empty()) {
							snprintf(text, sizeof(text),
								 "row %u shard %zu column %u: %g, "
								 "want %g (rms %g)",
								 i, sh, c, got, want, l.rms);
							why = text;
						}
						if (err > worst)
							worst = err;
						sum += (got - want) * (got - want);
						count++;
					}
					base += cols;
				}
			}
			if (why.empty() && count && sqrt(sum / (double)count) > limit_rms * l.rms) {
				snprintf(text, sizeof(text), "rms error %.2e of rms(y)",
					 sqrt(sum / (double)count) / l.rms);
				why = text;
			}
			for (size_t i = 0; i < y_bytes && why.empty(); i++)
				if (rest[i] != CANARY) {
					snprintf(text, sizeof(text),
						 "byte %zu outside of the rows was written", i);
					why = text;
				}
			unsigned dirty = 0;

			CK(cudaMemset(counter, 0, 4));
			count_nonzero<<<64, 256>>>((const uint32_t *)ws, EXL3_CUDA_WS_ZERO / 4,
						   counter);
			CK(cudaMemcpy(&dirty, counter, 4, cudaMemcpyDeviceToHost));
			if (dirty) {
				CK(cudaMemset(ws, 0, EXL3_CUDA_WS_ZERO));
				if (why.empty())
					why = "workspace left dirty";
			}
			if (verbose && why.empty())
				printf("ok %-16s %-40s m %2u max %.1e rms %.1e\n", kern->name, what,
				       s.m, worst / l.rms,
				       count ? sqrt(sum / (double)count) / l.rms : 0.0);
		}
		if (why.empty()) {
			passed++;
		} else if (why != "x") {
			if (failed++ < 60)
				printf("FAILED %s: %s m %u x %d y %d stored %d table %d: %s\n",
				       kern->name, what, s.m, s.x_dtype, s.y_dtype, s.stored,
				       s.table, why.c_str());
		}
	}
	CK(cudaFree(xd));
	CK(cudaFree(yd));
	if (td)
		CK(cudaFree(td));
	return why.empty();
}

static void run_all(const layer &l, const setting &s, const char *what)
{
	for (const exl3_cuda_linear_kernel *table :
	     {exl3_cuda_gemv_kernels, exl3_cuda_gemm_kernels})
		for (const exl3_cuda_linear_kernel *k = table; k->name; k++)
			if (only ? !strcmp(only, k->name) : k->candidate == candidates)
				run(k, l, s, what);
}

/* ---- the cases ---- */

static void check_rates(void)
{
	for (int rate2 = EXL3_RATE2_MIN; rate2 <= EXL3_RATE2_MAX; rate2++)
		for (int cb = 0; cb < 3; cb++) {
			char what[64];

			if (!exl3_rate_valid(rate2, cb))
				continue;
			snprintf(what, sizeof(what), "%g bits codebook %d", rate2 / 2.0, cb);
			layer l(384, 384, {{256, 256, rate2, cb, false}});

			for (uint32_t m : {1u, 3u, 4u, 5u, 8u, 9u, 16u, 17u, 32u, 33u}) {
				setting s;

				if (quick && m != 1 && m != 8 && m != 16 && m != 33)
					continue;
				s.m = m;
				run_all(l, s, what);
			}
		}
}

static void check_sizes(void)
{
	static const uint32_t sizes[][4] = {
		{128, 128, 128, 128},     {128, 100, 1152, 1152}, {1152, 1152, 128, 99},
		{256, 193, 640, 513},     {640, 640, 384, 383},   {1024, 1000, 896, 896},
		{1152, 1025, 1152, 1145}, {768, 768, 1024, 1024},
	};
	static const int kinds[][2] = {
		{8, EXL3_CB_MCG}, {6, EXL3_CB_3INST}, {8, EXL3_CB_MUL1}, {7, EXL3_CB_MUL1}};

	for (const auto &z : sizes)
		for (const auto &kind : kinds) {
			char what[64];

			snprintf(what, sizeof(what), "k %u (%u) n %u (%u) rate2 %d cb %d", z[0],
				 z[1], z[2], z[3], kind[0], kind[1]);
			layer l(z[0], z[1], {{z[2], z[3], kind[0], kind[1], true}});

			for (uint32_t m = 1; m <= M_MAX; m += quick ? 8 : m < 9 ? 1 : 4)
				for (bool stored : {false, true}) {
					setting s;

					if (stored && m > 9)
						continue;
					s.m = m;
					s.stored = stored;
					s.pad = 16 * (m % 3);
					run_all(l, s, what);
				}
		}
}

static void check_types(void)
{
	for (int cb = 0; cb < 3; cb++) {
		layer l(512, 509, {{256, 250, 8, cb, true}});

		for (uint8_t xt : {EXL3_F16, EXL3_BF16, EXL3_F32})
			for (uint8_t yt : {EXL3_F16, EXL3_BF16, EXL3_F32})
				for (uint32_t m : {1u, 4u, 8u, 13u, 32u}) {
					setting s;

					s.m = m;
					s.x_dtype = xt;
					s.y_dtype = yt;
					run_all(l, s, "types");
				}
	}
}

static void check_shards(void)
{
	layer same(512, 512,
		   {{384, 384, 8, 1, false}, {128, 128, 8, 1, true}, {256, 256, 8, 1, false}});
	layer mixed(384, 380,
		    {{256, 251, 8, 1, true},
		     {128, 128, 6, 0, false},
		     {384, 300, 5, 2, true},
		     {128, 65, 8, 1, false}});
	layer mul1(640, 640,
		   {{256, 256, 8, 2, false}, {256, 256, 8, 2, false}, {128, 128, 12, 2, false}});

	for (uint32_t m : {1u, 2u, 4u, 8u, 11u, 16u, 24u, 33u})
		for (bool table : {false, true}) {
			setting s;

			s.m = m;
			s.table = table;
			s.pad = 32;
			run_all(same, s, "three shards");
			run_all(mixed, s, "mixed shards");
			run_all(mul1, s, "mul1 shards");
		}
}

/* Rows of an odd width, one behind the other, as a client has them that gives no stride. */
static void check_dense(void)
{
	static const int kinds[][2] = {
		{8, EXL3_CB_MCG}, {6, EXL3_CB_3INST}, {8, EXL3_CB_MUL1}, {7, EXL3_CB_MUL1}};

	for (const auto &kind : kinds) {
		layer one(384, 300, {{384, 301, kind[0], kind[1], true}});
		layer two(384, 300, {{384, 301, kind[0], kind[1], true}, {256, 131, kind[0], kind[1], false}});

		for (uint8_t xt : {EXL3_F16, EXL3_BF16, EXL3_F32})
			for (uint8_t yt : {EXL3_F16, EXL3_BF16, EXL3_F32})
				for (uint32_t m : {1u, 2u, 3u, 5u, 8u, 17u, 33u})
					for (bool table : {false, true}) {
						setting s;

						s.m = m;
						s.x_dtype = xt;
						s.y_dtype = yt;
						s.dense = true;
						s.table = table;
						run_all(one, s, "300 x 301, dense");
						if (xt == yt)
							run_all(two, s, "300 x (301 | 131), dense");
					}
	}
}

static void check_nan(void)
{
	for (int cb = 0; cb < 3; cb++) {
		layer l(512, 512, {{256, 256, 8, cb, false}});

		for (uint32_t m : {2u, 4u, 8u, 16u, 32u, 33u}) {
			setting s;

			s.m = m;
			s.nan_row = (int)m / 2;
			s.y_dtype = EXL3_F32;
			run_all(l, s, "a NaN row");
		}
	}
}

static void check_large(void)
{
	static const uint32_t sizes[][2] = {{4096, 4096}, {5120, 1024}, {17408, 640}, {512, 34816}};

	for (const auto &z : sizes)
		for (int cb : {EXL3_CB_MCG, EXL3_CB_MUL1}) {
			char what[64];

			if (quick && z[0] != 4096)
				continue;
			snprintf(what, sizeof(what), "k %u n %u 4 bits cb %d", z[0], z[1], cb);
			layer l(z[0], z[0], {{z[1], z[1], 8, cb, false}});

			for (uint32_t m : {1u, 4u, 8u, 16u, 32u}) {
				setting s;

				s.m = m;
				run_all(l, s, what);
			}
		}
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--quick"))
			quick = true;
		else if (!strcmp(argv[i], "--verbose"))
			verbose = true;
		else if (!strcmp(argv[i], "--candidates"))
			candidates = true;
		else if (!strcmp(argv[i], "--kernel") && i + 1 < argc)
			only = argv[++i];
		else
			return printf("usage: %s [--quick] [--verbose] [--kernel NAME | --candidates]\n", argv[0]),
			       2;
	}
	int devices = 0;

	if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) {
		printf("no CUDA device\n");
		return 77;
	}
	CK(cudaGetDeviceProperties(&prop, 0));
	CK(cudaMalloc(&ws, ws_size));
	CK(cudaMemset(ws, 0, EXL3_CUDA_WS_ZERO));
	make_tables();

	static void (*const cases[])(void) = {check_rates,  check_sizes, check_types,
					      check_shards, check_dense, check_nan, check_large};
	static const char *const names[] = {"rates", "sizes", "types", "shards", "dense", "nan", "large"};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		const unsigned long p = passed, f = failed;

		cases[i]();
		printf("%-8s %lu passed, %lu failed\n", names[i], passed - p, failed - f);
		fflush(stdout);
	}
	printf("check_linear on %s: %lu passed, %lu failed\n", prop.name, passed, failed);
	return failed || !passed;
}
