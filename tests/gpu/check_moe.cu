/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_moe.cu - the routed block on the GPU against the double-precision oracle.
 *
 * Random experts of every bitrate and codebook (also mixed in one layer), sizes off the block edges,
 * holes, garbage ids, repeated ids, all activations, merged entries, a small workspace (chunks), NaN
 * tokens, canaries around y; with every variant that supports a case. --quick: fewer cases, --tiny: a handful;
 * --variant NAME: only that one (and the default); last, --four: 4 bits only. Last line: "N passed, N failed".
 */
#include "kernels/cuda/moe.h"
#include "kernels/format.h"

extern "C" {
#include "kernels/cpu/ref.h"
}

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

static uint64_t g_seed = 1;
static bool g_four; /* 4-bit mcg and mul1 only: what a build for tuning has */

static uint64_t rnd()
{
	uint64_t z = g_seed += 0x9E3779B97F4A7C15ull;

	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
	z = (z ^ z >> 27) * 0x94D049BB133111EBull;
	return z ^ z >> 31;
}

static double uniform() { return (double)(rnd() >> 11) * 0x1p-53 * 2.0 - 1.0; }

#define CUDA(call)                                                                                 \
	do {                                                                                       \
		cudaError_t e_ = (call);                                                           \
		if (e_ != cudaSuccess) {                                                           \
			printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* Host bytes and their copy in an allocation of its own, so that memcheck sees every step outside. */
struct buffer {
	std::vector<char> host;
	char *dev = NULL;

	void upload()
	{
		if (!dev)
			CUDA(cudaMalloc((void **)&dev, host.size()));
		CUDA(cudaMemcpy(dev, host.data(), host.size(), cudaMemcpyHostToDevice));
	}
	void download() { CUDA(cudaMemcpy(host.data(), dev, host.size(), cudaMemcpyDeviceToHost)); }
	~buffer() { cudaFree(dev); }
};

struct matrix {
	buffer trellis, suh, svh, bias;
	exl3_matrix host = {}, dev = {};

	void make(uint32_t k_log, uint32_t n_log, int rate2, int cb, bool has_bias)
	{
		exl3_matrix m = {};

		m.k = (k_log + 127) / 128 * 128;
		m.n = (n_log + 127) / 128 * 128;
		m.k_log = k_log;
		m.n_log = n_log;
		m.rate2 = (uint8_t)rate2;
		m.codebook = (uint8_t)cb;
		trellis.host.resize(exl3_trellis_bytes(m.k, m.n, rate2));
		for (size_t i = 0; i + 8 <= trellis.host.size(); i += 8) {
			uint64_t v = rnd();

			memcpy(&trellis.host[i], &v, 8);
		}
		auto scales = [](buffer &b, uint32_t n, double s) {
			b.host.resize(n * 2);
			for (uint32_t i = 0; i < n; i++) {
				double v = (0.5 + 0.5 * fabs(uniform())) * s * (rnd() & 1 ? -1 : 1);

				((uint16_t *)b.host.data())[i] = exl3_f64_to_f16(v);
			}
			b.upload();
		};
		scales(suh, m.k, 1.0 / sqrt((double)m.k));
		scales(svh, m.n, 1.0);
		trellis.upload();
		if (has_bias) {
			bias.host.resize(m.n * 4);
			for (uint32_t i = 0; i < m.n; i++)
				((float *)bias.host.data())[i] = i < n_log ? (float)uniform() : 0.0f;
			bias.upload();
		}
		host = dev = m;
		host.trellis = trellis.host.data();
		host.suh = suh.host.data();
		host.svh = svh.host.data();
		host.bias = has_bias ? bias.host.data() : NULL;
		dev.trellis = trellis.dev;
		dev.suh = suh.dev;
		dev.svh = svh.dev;
		dev.bias = bias.dev;
	}
};

struct layer {
	std::vector<matrix> mats; /* gate, up, down per expert */
	std::vector<exl3_expert> host, dev;
	struct exl3_cuda_moe_plan *plan = NULL;

	/* rate2 or cb -1: mixed over experts */
	layer(uint32_t experts, uint32_t hidden, uint32_t inter, int rate2, int cb, bool gated, bool bias,
	      bool alike = false)
		: mats(experts * 3), host(experts), dev(experts)
	{
		static const int rates[] = {2, 4, 6, 8, 10, 12, 14, 16, 3, 5, 7};
		struct exl3_error err = {};

		for (uint32_t e = 0; e < experts; e++) {
			for (int p = gated ? 0 : 1; p < 3; p++) {
				int r = rate2 > 0 ? rate2 : g_four ? 8 : rates[rnd() % 11];
				int c = r & 1 ? 2 : cb >= 0 ? cb : g_four ? 1 + (int)(rnd() % 2) : (int)(rnd() % 3);

				/* Gate like up. */
				if (p == 1 && gated && alike) {
					r = mats[e * 3].host.rate2;
					c = mats[e * 3].host.codebook;
				}

				mats[e * 3 + p].make(p < 2 ? hidden : inter, p < 2 ? inter : hidden, r, c, bias);
			}
			host[e] = {gated ? &mats[e * 3].host : NULL, &mats[e * 3 + 1].host,
				   &mats[e * 3 + 2].host};
			dev[e] = {gated ? &mats[e * 3].dev : NULL, &mats[e * 3 + 1].dev,
				  &mats[e * 3 + 2].dev};
		}
		if (exl3_cuda_moe_plan_new(dev.data(), experts, &plan, &err)) {
			printf("plan: %s\n", err.text);
			exit(1);
		}
	}
	~layer() { exl3_cuda_moe_plan_free(plan); }
};

struct request {
	uint32_t m, topk;
	uint8_t x_dtype, y_dtype, ids_dtype, weights_dtype;
	buffer x, y, ids, weights;
	uint32_t x_stride, y_stride;
	std::vector<char> expect; /* the oracle's f32 rows, each rounded up to 16 bytes */
	uint64_t skips;           /* and how many bad ids it saw */
};

#define CANARY 64

static void fill(buffer &b, size_t n, uint8_t dtype)
{
	b.host.assign(n * exl3_dtype_bytes(dtype), 0);
	for (size_t i = 0; i < n; i++)
		exl3_ref_store(b.host.data(), dtype, i, uniform());
}

enum ids_kind { IDS_GOOD, IDS_HOLES, IDS_GARBAGE, IDS_ONE };

static void make_request(request &r, uint32_t m, uint32_t topk, uint32_t hidden, uint32_t experts,
			 ids_kind kind, int variant)
{
	static const uint8_t dtypes[] = {EXL3_F16, EXL3_BF16, EXL3_F32};

	r.m = m;
	r.topk = topk;
	r.x_dtype = dtypes[variant % 3];
	r.y_dtype = dtypes[(variant + 2) % 3];
	r.weights_dtype = dtypes[(variant + 1) % 3];
	r.ids_dtype = variant & 1 ? EXL3_I64 : EXL3_I32;
	r.x_stride = (hidden * exl3_dtype_bytes(r.x_dtype) + 15) / 16 * 16 + 16;
	r.y_stride = (hidden * exl3_dtype_bytes(r.y_dtype) + 15) / 16 * 16 + 32;
	r.x.host.assign((size_t)m * r.x_stride, 0x7f);
	for (uint32_t i = 0; i < m; i++)
		for (uint32_t j = 0; j < hidden; j++)
			exl3_ref_store(&r.x.host[(size_t)i * r.x_stride], r.x_dtype, j, uniform());
	r.y.host.assign((size_t)m * r.y_stride + 2 * CANARY, (char)0xa5);
	fill(r.weights, (size_t)m * topk, r.weights_dtype);
	r.ids.host.resize((size_t)m * topk * exl3_dtype_bytes(r.ids_dtype));
	for (size_t i = 0; i < (size_t)m * topk; i++) {
		int64_t id = (int64_t)(rnd() % experts);

		if (kind == IDS_ONE)
			id = experts - 1;
		if (kind == IDS_HOLES && rnd() % 3 == 0)
			id = -1;
		if (kind == IDS_GARBAGE && rnd() % 2)
			id = (int64_t)rnd();
		if (r.ids_dtype == EXL3_I64)
			((int64_t *)r.ids.host.data())[i] = id;
		else
			((int32_t *)r.ids.host.data())[i] = (int32_t)id;
	}
}

/* max and rms over an output, relative to its rms */
static bool close_enough(const request &r, uint32_t hidden, const char *what, double *worst)
{
	double sum = 0, err2 = 0, biggest = 0;
	size_t n = 0;

	for (uint32_t i = 0; i < r.m; i++)
		for (uint32_t j = 0; j < hidden; j++) {
			double want = exl3_ref_load(&r.expect[(size_t)i * ((hidden * 4 + 15) / 16 * 16)], EXL3_F32, j);
			double got = exl3_ref_load(&r.y.host[CANARY + (size_t)i * r.y_stride], r.y_dtype, j);

			if (isnan(want) != isnan(got)) {
				printf("%s: row %u column %u: %g, expected %g\n", what, i, j, got, want);
				return false;
			}
			if (isnan(want))
				continue;
			sum += want * want;
			err2 += (got - want) * (got - want);
			biggest = fmax(biggest, fabs(got - want));
			n++;
		}
	const double rms = n ? sqrt(sum / (double)n) : 0, unit = rms > 0 ? rms : 1;
	const double ulp = r.y_dtype == EXL3_BF16 ? 0x1p-8 : r.y_dtype == EXL3_F16 ? 0x1p-11 : 0;
	const double e = n ? sqrt(err2 / (double)n) / unit : 0;

	*worst = fmax(*worst, e);
	/* Two f16 roundings of activations in a row; the largest of 6 sigma and more. */
	if (e > 1.5e-3 + ulp || biggest / unit > 1e-2 + 8 * ulp) {
		printf("%s: rms error %.2e, largest %.2e of rms %.3g\n", what, e, biggest / unit, rms);
		return false;
	}
	for (int i = 0; i < CANARY; i++)
		if (r.y.host[i] != (char)0xa5 || r.y.host[r.y.host.size() - 1 - i] != (char)0xa5) {
			printf("%s: wrote outside of y\n", what);
			return false;
		}
	for (uint32_t i = 0; i < r.m; i++)
		for (uint32_t j = hidden * exl3_dtype_bytes(r.y_dtype); j < r.y_stride; j++)
			if (r.y.host[CANARY + (size_t)i * r.y_stride + j] != (char)0xa5) {
				printf("%s: wrote behind row %u\n", what, i);
				return false;
			}
	return true;
}

static char *g_ws;
static int g_cc; /* compute capability */
static size_t g_ws_bytes = (size_t)256 << 20;
static double g_worst;
static const char *g_variant; /* or NULL: all */
static int g_runs[EXL3_CUDA_MOE_VARIANTS_NR]; /* cases of each variant */

/* Runs the requests as one launch of @variant and compares each with the oracle; true where it does not support them. */
static bool run_variant(unsigned variant, layer &l, uint32_t hidden, std::vector<request> &reqs, uint8_t act, float limit,
			float scale, size_t ws_bytes, const char *text)
{
	const struct exl3_cuda_moe_variant &v = exl3_cuda_moe_variants[variant];
	char what[192];

	snprintf(what, sizeof(what), "%s: %s", v.name, text);
	std::vector<exl3_cuda_moe_entry> entries(reqs.size());
	unsigned long long *skipped;
	struct exl3_cuda_moe a = {};
	bool ok = true;

	CUDA(cudaMalloc((void **)&skipped, reqs.size() * 8));
	CUDA(cudaMemset(skipped, 0, reqs.size() * 8));
	for (size_t i = 0; i < reqs.size(); i++) {
		request &r = reqs[i];
		exl3_cuda_moe_entry &e = entries[i];

		r.x.upload();
		memset(r.y.host.data(), 0xa5, r.y.host.size());
		r.y.upload();
		r.ids.upload();
		r.weights.upload();
		memset(&e, 0, sizeof(e));
		e.x = r.x.dev;
		e.y = r.y.dev + CANARY;
		e.ids = r.ids.dev;
		e.weights = r.weights.dev;
		e.skipped = &skipped[i];
		e.x_stride = r.x_stride;
		e.y_stride = r.y_stride;
		e.m = r.m;
		e.topk = r.topk;
		e.x_dtype = r.x_dtype;
		e.y_dtype = r.y_dtype;
		e.ids_dtype = r.ids_dtype;
		e.weights_dtype = r.weights_dtype;
	}
	a.plan = l.plan;
	a.entries = entries.data();
	a.nr_entries = (uint32_t)entries.size();
	a.act = act;
	a.limit = limit;
	a.routed_scale = scale;
	a.ws = g_ws;
	a.ws_bytes = ws_bytes;
	a.device_sms = 132;
	a.device_cc = g_cc;
	a.variant = (uint8_t)variant;
	if (!v.supports(&a)) {
		cudaFree(skipped);
		return exl3_cuda_moe_launch(&a, 0) == -EOPNOTSUPP;
	}
	g_runs[variant]++;
	int ret = exl3_cuda_moe_launch(&a, 0);

	CUDA(cudaDeviceSynchronize());
	if (ret) {
		printf("%s: launch returned %d\n", what, ret);
		return false;
	}
	std::vector<unsigned long long> counted(reqs.size());
	CUDA(cudaMemcpy(counted.data(), skipped, reqs.size() * 8, cudaMemcpyDeviceToHost));
	cudaFree(skipped);
	for (size_t i = 0; i < reqs.size(); i++) {
		request &r = reqs[i];
		exl3_rows rows = {};
		struct exl3_moe_args::exl3_route route = {};
		exl3_work work = {};
		uint64_t skips = 0;

		r.y.download();
		if (variant) { /* the default has been compared, so the oracle has been asked */
			ok &= close_enough(r, hidden, what, &g_worst);
			if (counted[i] != r.skips) {
				printf("%s: counted %llu bad ids, expected %llu\n", what, counted[i],
				       (unsigned long long)r.skips);
				ok = false;
			}
			continue;
		}
		std::vector<char> want((size_t)r.m * ((hidden * 4 + 15) / 16 * 16), 0);
		rows.x = r.x.host.data();
		rows.y = want.data();
		rows.x_stride = r.x_stride;
		rows.y_stride = (hidden * 4 + 15) / 16 * 16;
		rows.m = r.m;
		rows.x_dtype = r.x_dtype;
		rows.y_dtype = EXL3_F32;
		route.ids = r.ids.host.data();
		route.weights = r.weights.host.data();
		route.topk = r.topk;
		route.ids_dtype = r.ids_dtype;
		route.weights_dtype = r.weights_dtype;
		work.op = EXL3_OP_MOE;
		work.rows = &rows;
		work.nr_rows = 1;
		work.u.moe.experts = l.host.data();
		work.u.moe.nr_experts = (uint32_t)l.host.size();
		work.u.moe.act = act;
		work.u.moe.limit = limit;
		work.u.moe.routed_scale = scale;
		work.u.moe.routes = &route;
		work.skipped = &skips;
		std::vector<double> scratch(exl3_ref_scratch(&work) / 8 + 1);
		if (exl3_ref_run(&work, scratch.data(), scratch.size() * 8)) {
			printf("%s: the oracle refused\n", what);
			return false;
		}
		r.expect = want;
		r.skips = skips;
		ok &= close_enough(r, hidden, what, &g_worst);
		if (skips != counted[i]) {
			printf("%s: counted %llu bad ids, expected %llu\n", what, counted[i],
			       (unsigned long long)skips);
			ok = false;
		}
	}
	return ok;
}

static bool run_case(layer &l, uint32_t hidden, std::vector<request> &reqs, uint8_t act, float limit, float scale,
		     size_t ws_bytes, const char *what)
{
	bool ok = true;

	for (unsigned v = 0; exl3_cuda_moe_variants[v].name; v++)
		if (!v || !g_variant || !strcmp(g_variant, exl3_cuda_moe_variants[v].name))
			ok &= run_variant(v, l, hidden, reqs, act, limit, scale, ws_bytes, what);
	return ok;
}

int main(int argc, char **argv)
{
	/* --tiny is for sanitizers: one bitrate, and everything that has to do with ids. */
	const bool tiny = argc > 1 && !strcmp(argv[1], "--tiny");
	const bool quick = tiny || (argc > 1 && !strcmp(argv[1], "--quick"));
	static const int rates[] = {2, 4, 6, 8, 10, 12, 14, 16, 3, 5, 7};
	int passed = 0, failed = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	g_four = argc > 1 && !strcmp(argv[argc - 1], "--four");
	for (int i = 1; i + 1 < argc; i++)
		if (!strcmp(argv[i], "--variant"))
			g_variant = argv[i + 1];
	char what[128];

	int major, minor;
	CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
	CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
	g_cc = major * 10 + minor;
	CUDA(cudaMalloc((void **)&g_ws, g_ws_bytes));
	CUDA(cudaMemset(g_ws, 0, EXL3_CUDA_WS_ZERO));
	auto count = [&](bool ok) { ok ? passed++ : failed++; };
	auto one = [&](layer &l, uint32_t hidden, uint32_t experts, uint32_t m, uint32_t topk, ids_kind kind,
		       int variant, uint8_t act, float limit, const char *name) {
		std::vector<request> reqs(1);

		make_request(reqs[0], m, topk, hidden, experts, kind, variant);
		count(run_case(l, hidden, reqs, act, limit, 1.0f, g_ws_bytes, name));
	};

	/* Every bitrate and codebook, at unit sizes 8, 16, 32 and 64. */
	for (int r : rates)
		for (int cb = r & 1 ? 2 : 0; cb < 3; cb++) {
			if ((tiny && (r != 8 || cb != 1)) || (g_four && (r != 8 || !cb)))
				continue;
			layer l(4, 256, 128, r, cb, true, false);

			for (uint32_t m : {1u, 9u, 24u, 70u}) {
				if (quick && m != 9)
					continue;
				snprintf(what, sizeof(what), "rate2 %d codebook %d tokens %u", r, cb, m);
				one(l, 256, 4, m, 2, IDS_GOOD, (int)(r + m), EXL3_ACT_SILU, 0, what);
			}
		}
	for (int cb = 1; cb < 3; cb++) { /* Many rows of one expert: every width of the products, units that are cut. */
		layer l(2, 384, 250, 8, cb, true, true);

		for (uint32_t m : {7u, 15u, 16u, 17u, 31u, 33u, 47u, 64u, 66u, 81u, 100u, 129u, 190u, 200u, 257u, 300u}) {
			if ((tiny && m != 33 && m != 200) || (quick && m % 2 == 0))
				continue;
			snprintf(what, sizeof(what), "one expert, codebook %d, %u rows", cb, m);
			one(l, 384, 2, m, 1, IDS_ONE, (int)m, EXL3_ACT_SILU, 0, what);
		}
		/* More tasks than blocks run at a time, experts of all sizes, a chunk of the workspace at a time. */
		if (!quick && cb == 1) {
			layer w(160, 256, 256, 8, cb, true, false);
			std::vector<request> reqs(2);

			make_request(reqs[0], 180, 4, 256, 160, IDS_HOLES, 1);
			make_request(reqs[1], 160, 2, 256, 160, IDS_GARBAGE, 2);
			count(run_case(w, 256, reqs, EXL3_ACT_SWIGLU_OAI, 2.0f, 1.5f, g_ws_bytes, "160 experts"));
			/* Room for the scratch of all 132 blocks and some 600 pairs. */
			count(run_case(w, 256, reqs, EXL3_ACT_GELU, 0, 1.0f, EXL3_CUDA_WS_ZERO + (77u << 18),
				       "160 experts in chunks"));
		}
	}
	{ /* Experts of different bitrates and codebooks, gate and up of one: a launch per class. */
		layer l(16, 320, 200, -1, -1, true, true, true);

		for (int kind = IDS_GOOD; kind <= IDS_ONE; kind++)
			for (uint32_t m : {1u, 20u, 65u}) {
				if (m == 65 && (quick || kind != IDS_GOOD))
					continue;
				snprintf(what, sizeof(what), "classes, ids kind %d, tokens %u", kind, m);
				one(l, 320, 16, m, 4, (ids_kind)kind, kind + (int)m, EXL3_ACT_SILU, 0, what);
			}
		std::vector<request> small(2);
		make_request(small[0], 12, 4, 320, 16, IDS_HOLES, 1);
		make_request(small[1], 9, 3, 320, 16, IDS_GOOD, 2);
		count(run_case(l, 320, small, EXL3_ACT_SILU, 0, 1.0f, EXL3_CUDA_WS_ZERO + 320000, "classes in chunks"));
	}
	{ /* Longer sums, so that strips cross blocks in all ways. */
		layer l(6, 1280, 512, 8, 1, true, false);

		for (uint32_t m : {1u, 4u, 15u}) {
			snprintf(what, sizeof(what), "hidden 1280, tokens %u", m);
			one(l, 1280, 6, m, 2, IDS_GOOD, (int)m, EXL3_ACT_SILU, 0, what);
		}
	}
	{ /* Mixed bitrates and codebooks, bias, odd logical sizes, all kinds of ids. */
		layer l(16, 320, 200, -1, -1, true, true);

		for (int kind = IDS_GOOD; kind <= IDS_ONE; kind++)
			for (uint32_t m : {1u, 3u, 17u, 65u}) {
				if (m == 65 && (quick || kind == IDS_ONE))
					continue;
				snprintf(what, sizeof(what), "mixed, ids kind %d, tokens %u", kind, m);
				one(l, 320, 16, m, 4, (ids_kind)kind, kind + (int)m, EXL3_ACT_SILU, 0, what);
			}
		for (int act = EXL3_ACT_SILU; act < EXL3_ACT_NR; act++)
			for (float limit : {0.0f, 0.5f}) {
				if (act == EXL3_ACT_RELU2)
					continue;
				snprintf(what, sizeof(what), "activation %d limit %g", act, limit);
				one(l, 320, 16, 5, 3, IDS_GOOD, act, (uint8_t)act, limit, what);
			}
		/* Merged requests of different dtypes and top-k. */
		std::vector<request> reqs(5);
		for (int i = 0; i < 5; i++)
			make_request(reqs[i], 1 + 7 * i, 1 + i, 320, 16, i == 2 ? IDS_GARBAGE : IDS_HOLES, i);
		count(run_case(l, 320, reqs, EXL3_ACT_SILU, 0, 2.5f, g_ws_bytes, "merged"));
		/* A workspace for a few tokens at a time. */
		std::vector<request> small(2);
		make_request(small[0], 40, 4, 320, 16, IDS_HOLES, 1);
		make_request(small[1], 33, 3, 320, 16, IDS_GOOD, 2);
		count(run_case(l, 320, small, EXL3_ACT_SILU, 0, 1.0f, EXL3_CUDA_WS_ZERO + 700000, "chunks"));
		/* NaN and Inf tokens stay where they are. */
		std::vector<request> bad(1);
		make_request(bad[0], 12, 4, 320, 16, IDS_GOOD, 2);
		exl3_ref_store(&bad[0].x.host[3 * bad[0].x_stride], bad[0].x_dtype, 7, NAN);
		count(run_case(l, 320, bad, EXL3_ACT_SILU, 0, 1.0f, g_ws_bytes, "NaN token"));
	}
	{ /* No gate. */
		layer l(8, 256, 256, 8, 1, false, false);

		one(l, 256, 8, 19, 2, IDS_GOOD, 1, EXL3_ACT_RELU2, 0, "relu2 without gate");
	}
	{ /* bf16 range: values that f16 cannot hold. */
		layer l(2, 128, 128, 8, 1, true, false);
		std::vector<request> reqs(1);

		make_request(reqs[0], 3, 1, 128, 2, IDS_GOOD, 2); /* f32 in, bf16 out */
		for (int i = 0; i < 128; i++)
			exl3_ref_store(&reqs[0].x.host[reqs[0].x_stride], EXL3_F32, i, 3e6 * uniform());
		count(run_case(l, 128, reqs, EXL3_ACT_RELU2_GATED, 0, 1e-6f, g_ws_bytes, "large values"));
	}
	if (!quick) { /* Many experts, many tokens: counts over several scan rounds. */
		layer l(1500, 128, 128, 8, 2, true, false);

		one(l, 128, 1500, 300, 8, IDS_GARBAGE, 2, EXL3_ACT_SILU, 0, "1500 experts");
		layer f(8, 128, 128, 8, 1, true, false);
		one(f, 128, 8, 1000, 2, IDS_HOLES, 1, EXL3_ACT_GELU, 0, "2000 pairs");
	}
	for (unsigned v = 0; exl3_cuda_moe_variants[v].name; v++)
		printf("%s: %d cases\n", exl3_cuda_moe_variants[v].name, g_runs[v]);
	printf("largest rms error %.2e\n", g_worst);
	printf("%d passed, %d failed\n", passed, failed);
	return failed != 0;
}
