/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_wide.cuh - grouped products for many rows per expert: wgmma, weights decoded into its A fragment.
 *
 *       out^T [128 x TN] = W^T [128 x k] X^T [k x TN]     twice per block, side by side ("half")
 *
 *   gate, up   half 0 is gate and half 1 up, of one strip of 128 columns; each has its own X
 *   down       the halves are two neighbouring strips, which share X (so does a lone up)
 *
 * A task is (unit, strip or pair of strips); blocks walk the list with a stride, so that the strips of a
 * unit, and the units of an expert, run together and meet in the L2.
 *
 *   warps      16 consumers, warp (half, w) has columns 16w..16w+15 of its half; 1 producer
 *   stage      64 of k: trellis [half][4 k-tiles][8 tiles]; X [1 or 2][rows x 128 bytes], swizzled
 *
 *   producer    | wait empty s | expect, trellis s, X s | wait empty s+1 | ...
 *   consumer    | wait full s | decode 0 | wgmma 0 | decode 1 | wgmma 1, wait 0 | ...
 *
 * Two sets of A registers: the decode of one or two k16 steps runs beside the wgmma of those before.
 * A unit with few rows uses a narrower wgmma. Epilogue, 32 rows at a time through shared memory: bit 3 of
 * the output Hadamard in the fragments, bits 0, 1, 5, 6 in registers, 2 and 4 between lanes.
 */
#ifndef EXL3_CUDA_MOE_WIDE_CUH
#define EXL3_CUDA_MOE_WIDE_CUH

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/moe_image.cuh"
#include "kernels/cuda/trellis.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace exl3
{

/* wgmma.cuh has the others. */
template <> struct wgmma<96> {
	static __device__ __forceinline__ void rs(float (&d)[48], const uint32_t (&a)[4], uint64_t b)
	{
		asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
			     "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
			     "%0, %1, %2, %3, %4, %5, %6, %7, "
			     "%8, %9, %10, %11, %12, %13, %14, %15, "
			     "%16, %17, %18, %19, %20, %21, %22, %23, "
			     "%24, %25, %26, %27, %28, %29, %30, %31, "
			     "%32, %33, %34, %35, %36, %37, %38, %39, "
			     "%40, %41, %42, %43, %44, %45, %46, %47}, "
			     "{%48, %49, %50, %51}, %52, p, 1, 1, 0; }"
			     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
			       "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
			       "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
			       "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
			       "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
			       "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
			       "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
			       "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
			       "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
			       "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
			       "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
			       "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
	}
};

template <int RATE2_, int CB_, int TN_, bool GATED_>
struct moe_wide_cfg {
	static constexpr int RATE2 = RATE2_, CB = CB_, TN = TN_;
	static constexpr bool GATED = GATED_;
	static constexpr int CONSUMERS = 16, THREADS = 32 * (CONSUMERS + 4);
	/* Registers per thread: what the producers give back of those at entry goes to the consumers. */
	static constexpr int REGS_ENTRY    = 65536 / THREADS / 8 * 8;
	static constexpr int REGS_PRODUCER = 24;
	static constexpr int REGS_CONSUMER = (REGS_ENTRY * 5 - REGS_PRODUCER) / 4 / 8 * 8;
	static constexpr int KROW    = 8 * 16 * RATE2;  /* trellis of a k-tile and a strip */
	static constexpr int W_BYTES = 2 * 4 * KROW;
	static constexpr int X_HALF  = TN * 128;
	static constexpr int X_BYTES = GATED ? 2 * X_HALF : X_HALF;
	static constexpr int STAGE   = X_BYTES + W_BYTES;
	static constexpr int PITCH   = 132;             /* floats of a row in the epilogue's buffer */
	static constexpr int ROWS    = 32;              /* rows of a half per pass */
	static constexpr int BUF     = 2 * ROWS * PITCH * 4;
	static constexpr int FIT     = (226 * 1024 - BUF - 256) / STAGE;
	static constexpr int STAGES  = FIT > 8 ? 8 : FIT;
	static constexpr int SMEM    = STAGES * STAGE + BUF + 16 * STAGES;
	static_assert(STAGE % 1024 == 0 && X_HALF % 1024 == 0, "a wgmma operand begins at a multiple of 1024 bytes");
	static_assert(STAGES >= 3, "too little shared memory for a pipeline");
};

/* Named barrier 1: the consumers. */
template <class C>
EXL3_DEV void moe_wide_sync()
{
	asm volatile("bar.sync 1, %0;" ::"n"(C::CONSUMERS * 32) : "memory");
}

struct moe_task {
	const moe_unit *u;
	uint32_t strip; /* of half 0 */
};

template <class C>
EXL3_DEV moe_task moe_wide_task(const moe_gemm_args &a, const moe_unit *units, uint32_t task)
{
	const uint32_t strips = a.n / 128, per = C::GATED ? strips : (strips + 1) / 2;

	return {units + task / per, C::GATED ? task % per : task % per * 2};
}

/* One thread. */
template <class C>
EXL3_DEV void moe_wide_produce(const moe_gemm_args &a, const moe_unit *units, uint32_t tasks, uint32_t base,
			       uint32_t full, uint32_t empty)
{
	const size_t row = (size_t)a.n * C::RATE2; /* trellis of a k-tile */
	uint32_t s = 0, parity = 1;

#pragma unroll 1
	for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
		const moe_task t = moe_wide_task<C>(a, units, task);
		const uint32_t x_bytes = (t.u->rows + 7) / 8 * 8 * 128;
		const uint32_t last = a.n / 128 - 1;
		const char *w0 = t.u->trellis[a.first_proj] + t.strip * C::KROW;
		/* An odd last strip is done twice and stored once. */
		const char *w1 = C::GATED ? t.u->trellis[a.first_proj + 1] + t.strip * C::KROW :
					    t.u->trellis[a.first_proj] + min(t.strip + 1, last) * C::KROW;
		const char *x = (const char *)a.image + (size_t)t.u->first_pad * a.k * 2;

#pragma unroll 1
		for (uint32_t step = 0; step < a.k / 64; step++) {
			const uint32_t bar = full + 8 * s, to = base + s * C::STAGE, to_w = to + C::X_BYTES;

			mbar_wait(empty + 8 * s, parity);
			mbar_expect(bar, C::W_BYTES + (C::GATED ? 2 : 1) * x_bytes);
#pragma unroll
			for (int i = 0; i < 4; i++) {
				bulk_load(to_w + i * C::KROW, w0, C::KROW, bar);
				bulk_load(to_w + (4 + i) * C::KROW, w1, C::KROW, bar);
				w0 += row;
				w1 += row;
			}
			bulk_load(to, x, x_bytes, bar);
			if (C::GATED)
				bulk_load(to + C::X_HALF, x + a.image_bytes, x_bytes, bar);
			x += x_bytes;
			if (++s == C::STAGES) {
				s = 0;
				parity ^= 1;
			}
		}
	}
}

/* Four rows of the buffer by a warp: lane 8r + c has row r and columns 32j + 4c + i. */
EXL3_DEV void moe_wide_hadamard(const float *row, int c, float (&v)[16])
{
#pragma unroll
	for (int j = 0; j < 4; j++) {
		const float4 t = *(const float4 *)(row + 32 * j + 4 * c);

		v[4 * j] = t.x;
		v[4 * j + 1] = t.y;
		v[4 * j + 2] = t.z;
		v[4 * j + 3] = t.w;
	}
#pragma unroll
	for (int s = 1; s < 16; s *= 2)
#pragma unroll
		for (int i = 0; i < 16; i++)
			if (!(i & s)) {
				const float x = v[i], y = v[i | s];

				v[i] = x + y;
				v[i | s] = x - y;
			}
	/* Column bits 2 and 4 are lane bits 0 and 2. */
	const float sign2 = c & 1 ? -1.0f : 1.0f, sign4 = c & 4 ? -1.0f : 1.0f;
#pragma unroll
	for (int i = 0; i < 16; i++)
		v[i] = fmaf(sign2, v[i], __shfl_xor_sync(~0u, v[i], 1));
#pragma unroll
	for (int i = 0; i < 16; i++)
		v[i] = fmaf(sign4, v[i], __shfl_xor_sync(~0u, v[i], 4));
}

/* Scales and bias of one row's 16 columns of the lane. */
EXL3_DEV void moe_wide_scale(const __half *svh, const float *bias, uint32_t col0, float scale, float (&v)[16])
{
#pragma unroll
	for (int j = 0; j < 4; j++) {
		const uint32_t col = col0 + 32 * j;
		float h[4];
		float4 b = make_float4(0, 0, 0, 0);

		moe_halves(svh + col, h);
		if (bias)
			b = *(const float4 *)(bias + col);
		v[4 * j] = v[4 * j] * scale * h[0] + b.x;
		v[4 * j + 1] = v[4 * j + 1] * scale * h[1] + b.y;
		v[4 * j + 2] = v[4 * j + 2] * scale * h[2] + b.z;
		v[4 * j + 3] = v[4 * j + 3] * scale * h[3] + b.w;
	}
}

/* 32 rows of both halves, four per warp, to out. */
template <class C>
EXL3_DEV void moe_wide_rows(const moe_gemm_args &a, const moe_unit &u, uint32_t strip0, uint32_t token0, const float *buf)
{
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, c = lane & 7;
	const uint32_t half = warp >> 3, in = (warp & 7) * 4 + (lane >> 3), token = token0 + in, strip = strip0 + half;
	float v[16];

	moe_wide_hadamard(buf + (half * C::ROWS + in) * C::PITCH, (int)c, v);
	if (token >= u.rows || strip * 128 >= a.n)
		return;
	const size_t row = u.first + token;

	moe_wide_scale(u.svh[a.first_proj], u.bias[a.first_proj], strip * 128 + 4 * c, a.row_scale[row] * (float)EXL3_INV_SQRT128, v);
#pragma unroll
	for (int j = 0; j < 4; j++)
		*(float4 *)(a.out + row * a.n + strip * 128 + 32 * j + 4 * c) =
			make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
}

/*
 * 32 rows, two per warp: lanes 0-15 have their gate, 16-31 their up. Each half of the lanes takes half of
 * the columns (bit 6) through the activation, and on to down's image.
 */
template <class C>
EXL3_DEV void moe_wide_gated(const moe_gemm_args &a, const moe_unit &u, uint32_t strip, uint32_t token0, const float *buf)
{
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, c = lane & 7, half = lane >> 4;
	const uint32_t in = warp * 2 + (lane >> 3 & 1), token = min(token0 + in, u.rows - 1);
	const uint32_t row = u.first + token, col0 = strip * 128 + 4 * c;
	float v[16], w[8], biggest = 0.0f;

	moe_wide_hadamard(buf + (half * C::ROWS + in) * C::PITCH, (int)c, v);
	moe_wide_scale(u.svh[half], u.bias[half], col0, a.row_scale[half * a.image_rows + row] * (float)EXL3_INV_SQRT128, v);
#pragma unroll
	for (int i = 0; i < 8; i++) {
		const float got = __shfl_xor_sync(~0u, half ? v[i] : v[8 + i], 16);

		w[i] = half ? activate(got, v[8 + i], a.act, a.limit) : activate(v[i], got, a.act, a.limit);
	}
#pragma unroll
	for (int j = 0; j < 2; j++) {
		const uint32_t col = col0 + 64 * half + 32 * j;
		float h[4];

		moe_halves(u.suh_down + col, h);
#pragma unroll
		for (int i = 0; i < 4; i++)
			w[4 * j + i] = col + i < a.n_log ? w[4 * j + i] * h[i] : 0.0f;
	}
	/* Column bits 0, 1, 5 in registers; 2, 3, 4, 6 are lane bits 0, 1, 2, 4. */
#pragma unroll
	for (int s = 1; s < 8; s *= 2)
#pragma unroll
		for (int i = 0; i < 8; i++)
			if (!(i & s)) {
				const float x = w[i], y = w[i | s];

				w[i] = x + y;
				w[i | s] = x - y;
			}
#pragma unroll
	for (int s = 1; s < 32; s *= 2) {
		const float sign = lane & s ? -1.0f : 1.0f;

		if (s == 8)
			continue;
#pragma unroll
		for (int i = 0; i < 8; i++)
			w[i] = fmaf(sign, w[i], __shfl_xor_sync(~0u, w[i], s));
	}
#pragma unroll
	for (int i = 0; i < 8; i++) {
		w[i] *= (float)EXL3_INV_SQRT128;
		biggest = moe_biggest(biggest, w[i]);
	}
#pragma unroll
	for (int s = 1; s < 32; s *= 2)
		if (s != 8)
			biggest = fmaxf(biggest, __shfl_xor_sync(~0u, biggest, s));
	if (token0 + in >= u.rows)
		return;
	const moe_place to = {a.next_image, MOE_TILES, a.n, row, u.first, u.rows, u.first_pad};
	const float power = moe_power(biggest), down = 1.0f / power;

	moe_store4(to, col0 + 64 * half, w, down);
	moe_store4(to, col0 + 64 * half + 32, w + 4, down);
	if (c == 0 && half == 0) {
		a.next_scale[(size_t)row * (a.n / 128) + strip] = power;
		if (power > 1.0f)
			atomicMax(a.next_top + row, __float_as_uint(power));
	}
}

/* All consumers: sums to rows of out, or to down's image. */
template <class C, int N>
EXL3_DEV void moe_wide_finish(const moe_gemm_args &a, const moe_task &t, float (&d)[N / 2], float *buf)
{
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
	const moe_unit &u = *t.u;

#pragma unroll
	for (int pass = 0; pass < N / C::ROWS; pass++) {
		const uint32_t token0 = pass * C::ROWS;

		if (token0 >= u.rows)
			break;
		/* Column bit 3 is a lane's two rows of D. */
		float *out = buf + (warp >> 3) * C::ROWS * C::PITCH + (warp & 7) * 16 + g;
#pragma unroll
		for (int j = 0; j < C::ROWS / 8; j++)
#pragma unroll
			for (int b = 0; b < 2; b++) {
				const float lo = d[(pass * (C::ROWS / 8) + j) * 4 + b];
				const float hi = d[(pass * (C::ROWS / 8) + j) * 4 + 2 + b];
				float *to = out + (8 * j + 2 * q + b) * C::PITCH;

				to[0] = lo + hi;
				to[8] = lo - hi;
			}
		moe_wide_sync<C>();
		if (C::GATED)
			moe_wide_gated<C>(a, u, t.strip, token0, buf);
		else
			moe_wide_rows<C>(a, u, t.strip, token0, buf);
		moe_wide_sync<C>();
	}
}

/* All consumers: one task with a wgmma of N rows. @s, @parity: the pipeline's state. */
template <class C, int N>
EXL3_DEV void moe_wide_compute(const moe_gemm_args &a, const moe_task &t, char *stages, uint32_t full,
			       uint32_t empty, uint32_t &s, uint32_t &parity, float *buf)
{
	const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = warp >> 3, slice = warp & 7;
	constexpr int GROUP = N > 64 ? 1 : 2; /* k16 steps decoded at a time: registers */
	constexpr bool AHEAD = N <= 64 || C::CB != CB_MUL1; /* likewise */
	uint32_t before = C::STAGES;
	float d[N / 2];

#pragma unroll
	for (int i = 0; i < N / 2; i++)
		d[i] = 0.0f;
#pragma unroll 1
	for (uint32_t step = 0; step < a.k / 64; step++) {
		const char *st = stages + s * C::STAGE;
		const uint32_t *w = (const uint32_t *)(st + C::X_BYTES + half * 4 * C::KROW) + slice * run<C::RATE2>::WORDS;
		const uint64_t b = wgmma_desc(smem_addr(st + (C::GATED ? half * C::X_HALF : 0)));
		uint32_t frag[2][GROUP][4], v[GROUP][run<C::RATE2>::NV];

		mbar_wait(full + 8 * s, parity);
#pragma unroll
		for (int i = 0; i < GROUP; i++)
			load_run<C::RATE2>(w + i * 8 * run<C::RATE2>::WORDS, lane, v[i]);
#pragma unroll
		for (int p = 0; p < 4 / GROUP; p++) {
			if (!AHEAD && p)
#pragma unroll
				for (int i = 0; i < GROUP; i++)
					load_run<C::RATE2>(w + (p * GROUP + i) * 8 * run<C::RATE2>::WORDS, lane, v[i]);
#pragma unroll
			for (int i = 0; i < GROUP; i++)
				decode_packed<C::RATE2, C::CB, C::CB == CB_MUL1 ? 0 : 1>(v[i], frag[p & 1][i]);
			/* The next words arrive while the wgmma before is waited for. */
			if (AHEAD && p + 1 < 4 / GROUP)
#pragma unroll
				for (int i = 0; i < GROUP; i++)
					load_run<C::RATE2>(w + ((p + 1) * GROUP + i) * 8 * run<C::RATE2>::WORDS, lane,
							   v[i]);
			wgmma_fence();
#pragma unroll
			for (int i = 0; i < GROUP; i++)
				wgmma<N>::rs(d, frag[p & 1][i], b + 2 * (p * GROUP + i));
			wgmma_commit();
			wgmma_wait<1>();
			/* The stage before is done with: its last wgmma has just been waited for. */
			if (p == 0 && before < C::STAGES && lane == 0)
				mbar_arrive(empty + 8 * before);
		}
		before = s;
		if (++s == C::STAGES) {
			s = 0;
			parity ^= 1;
		}
	}
	wgmma_wait<0>();
	wgmma_hold(d);
	if (lane == 0)
		mbar_arrive(empty + 8 * before);
	moe_wide_finish<C, N>(a, t, d, buf);
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) moe_wide_kernel(const __grid_constant__ moe_gemm_args a)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
	extern __shared__ __align__(1024) char moe_stages[];
	float *buf = (float *)(moe_stages + C::STAGES * C::STAGE);
	const uint32_t full = smem_addr(buf) + C::BUF, empty = full + 8 * C::STAGES;
	const uint32_t warp = threadIdx.x >> 5;

	if (threadIdx.x == 0) {
		for (int i = 0; i < C::STAGES; i++) {
			mbar_init(full + 8 * i, 1);
			mbar_init(empty + 8 * i, C::CONSUMERS);
		}
		mbar_init_fence();
	}
	__syncthreads();
	grid_wait();
	const uint32_t unit0 = a.class_units[a.cls], nr = a.class_units[a.cls + 1] - unit0;
	const uint32_t strips = a.n / 128, tasks = nr * (C::GATED ? strips : (strips + 1) / 2);
	const moe_unit *units = a.units + unit0;

	if (warp >= C::CONSUMERS) {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::REGS_PRODUCER));
		if (warp == C::CONSUMERS && (threadIdx.x & 31) == 0)
			moe_wide_produce<C>(a, units, tasks, smem_addr(moe_stages), full, empty);
		return;
	}
	asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::REGS_CONSUMER));
	uint32_t s = 0, parity = 0;

#pragma unroll 1
	for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
		const moe_task t = moe_wide_task<C>(a, units, task);

		if (t.u->rows > 64 && C::TN > 64)
			moe_wide_compute<C, C::TN>(a, t, moe_stages, full, empty, s, parity, buf);
		else if (t.u->rows > 32)
			moe_wide_compute<C, 64>(a, t, moe_stages, full, empty, s, parity, buf);
		else
			moe_wide_compute<C, 32>(a, t, moe_stages, full, empty, s, parity, buf);
	}
	grid_launch_dependents();
#endif
}

template <class C>
static int moe_wide_start(const moe_gemm_args &a, int sms, cudaStream_t stream)
{
	static bool ready; /* the same from every thread */

	if (!ready && cudaFuncSetAttribute(moe_wide_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM))
		return -EIO;
	ready = true;
	return moe_start(moe_wide_kernel<C>, a.programmatic,
			 dim3(a.tasks_max < (uint32_t)sms ? a.tasks_max : (uint32_t)sms), C::THREADS, C::SMEM, stream, a);
}

template <int RATE2, int CB>
static int moe_wide_start_any(const moe_gemm_args &a, int sms, cudaStream_t stream)
{
	if (a.nr_proj == 2)
		return a.tile == 64 ? moe_wide_start<moe_wide_cfg<RATE2, CB, 64, true>>(a, sms, stream) :
				      moe_wide_start<moe_wide_cfg<RATE2, CB, 96, true>>(a, sms, stream);
	return a.tile == 64 ? moe_wide_start<moe_wide_cfg<RATE2, CB, 64, false>>(a, sms, stream) :
			      moe_wide_start<moe_wide_cfg<RATE2, CB, 96, false>>(a, sms, stream);
}

} /* namespace exl3 */
#endif
