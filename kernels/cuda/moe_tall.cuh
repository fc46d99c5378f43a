/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_tall.cuh - grouped products for many rows per expert: up to 256 rows by one decode.
 *
 *       out^T [128 x N] = W^T [128 x k] X^T [k x N]     N 32, 64, 96, 128, 192 or 256, by the unit's rows
 *
 * gemm_sm90.cuh's loop: the cost of a k16 step is about 94 + N + 8 clocks (decode and product add up there), so a weight's
 * share falls until N is as wide as the registers allow. Gate and up of a strip are two passes of one block,
 * gate's outputs wait in the block's own scratch memory (L2), where the same threads fetch them.
 *
 *   warps     8 consumers, two warpgroups of 64 columns each; 1 producer
 *   stage     64 of k: X [rows x 128 bytes], swizzled; trellis [4 k-tiles][8 tiles]
 *
 *   producer    | wait empty s | expect, trellis s, X s | wait empty s+1 | ...
 *   consumer    | wait full s | decode 0 | wgmma 0 | decode 1 | wgmma 1, wait 0 | ...
 *
 * With TURNS the warpgroups multiply in turns, gemm_turns.cuh, so that one decodes while the other multiplies.
 *
 * A task is (unit, strip); blocks walk the list with a stride, so that the strips of a unit run together and its X
 * comes from the L2. The epilogue takes 32 rows at a time through shared memory; the producer goes on meanwhile.
 */
#ifndef EXL3_CUDA_MOE_TALL_CUH
#define EXL3_CUDA_MOE_TALL_CUH

#include "kernels/cuda/gemm_turns.cuh"
#include "kernels/cuda/moe_many.cuh"

namespace exl3
{

template <int RATE2_, int CB_, bool GATED_, bool TURNS_ = false> struct tall_cfg {
	static constexpr int RATE2 = RATE2_, CB = CB_, TN = (int)TALL_ROWS;
	static constexpr bool GATED = GATED_, TURNS = TURNS_;
	static constexpr int CONSUMERS = 8, THREADS = 32 * (CONSUMERS + 4), GROUP = 2;
	static constexpr int HX = CB == CB_MUL1 ? 0 : 1; /* trellis.cuh */
	/* Registers per thread: what the producers give back of those at entry goes to the consumers. */
	static constexpr int REGS_ENTRY    = 65536 / THREADS / 8 * 8;
	static constexpr int REGS_PRODUCER = 24;
	static constexpr int REGS_CONSUMER = (REGS_ENTRY * 3 - REGS_PRODUCER) / 2 / 8 * 8;
	static constexpr int KROW    = 8 * 16 * RATE2; /* trellis of a k-tile and a strip */
	static constexpr int X_BYTES = TN * 128, W_BYTES = 4 * KROW;
	static constexpr int STAGE   = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
	static constexpr int ROWS    = 32; /* per pass of the epilogue */
	static constexpr int BUF     = ROWS * MANY_PITCH * 4;
	static constexpr int FIT     = (226 * 1024 - BUF - 256) / STAGE;
	static constexpr int STAGES  = FIT > 8 ? 8 : FIT;
	static constexpr int BUF_AT  = STAGES * STAGE, FULL_AT = BUF_AT + BUF, EMPTY_AT = FULL_AT + 8 * STAGES;
	static constexpr int TURN_AT = EMPTY_AT + 8 * STAGES, SMEM = TURN_AT + (TURNS ? turns<2>::BYTES : 0);
	static_assert(STAGES >= 3, "too little shared memory for a pipeline");
	static_assert(BUF_AT % 16 == 0 && FULL_AT % 8 == 0, "alignment");
};

struct tall_task {
	const moe_unit *u;
	uint32_t strip;
};

EXL3_DEV tall_task tall_task_of(const moe_gemm_args &a, const moe_unit *units, uint32_t task)
{
	const uint32_t strips = a.n / 128;

	return {units + task / strips, task % strips};
}

/* One thread. */
template <class C>
EXL3_DEV void tall_produce(const moe_gemm_args &a, const moe_unit *units, uint32_t tasks, uint32_t smem)
{
	const size_t row = (size_t)a.n * C::RATE2; /* trellis of a k-tile */
	uint32_t s = 0, parity = 1;

#pragma unroll 1
	for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
		const tall_task t = tall_task_of(a, units, task);
		const uint32_t x_bytes = (t.u->rows + 7) / 8 * 8 * 128;

#pragma unroll 1
		for (uint32_t proj = 0; proj < (C::GATED ? 2 : 1); proj++) {
			const char *w = t.u->trellis[a.first_proj + proj] + (size_t)t.strip * C::KROW;
			const char *x = (const char *)a.image + proj * a.image_bytes + (size_t)t.u->first_pad * a.k * 2;

#pragma unroll 1
			for (uint32_t step = 0; step < a.k / 64; step++) {
				const uint32_t bar = smem + C::FULL_AT + 8 * s, to = smem + s * C::STAGE;

				mbar_wait(smem + C::EMPTY_AT + 8 * s, parity);
				mbar_expect(bar, C::W_BYTES + x_bytes);
#pragma unroll
				for (int i = 0; i < 4; i++) {
					bulk_load(to + C::X_BYTES + i * C::KROW, w, C::KROW, bar);
					w += row;
				}
				bulk_load(to, x, x_bytes, bar);
				x += x_bytes;
				if (++s == C::STAGES) {
					s = 0;
					parity ^= 1;
				}
			}
		}
	}
}

/* Where the consumers are in the ring, and whose turn it is. */
struct tall_place {
	uint32_t s, parity;
	turns<2> turn;
};

/* Sums of one task and projection; warp w has columns 16w .. + 15 of the strip. */
template <class C, int N>
EXL3_DEV void tall_sums(const moe_gemm_args &a, const char *base, tall_place &at, const run_lane<C::RATE2> &rl,
			float (&d)[N / 2])
{
	const uint32_t smem = smem_addr(base);
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	uint32_t before = C::STAGES;

#pragma unroll
	for (int i = 0; i < N / 2; i++)
		d[i] = 0.0f;
#pragma unroll 1
	for (uint32_t step = a.k / 64; step; step--) {
		const uint32_t stage = smem + at.s * C::STAGE;
		const uint64_t desc = wgmma_desc(stage);
		uint32_t addr[run<C::RATE2>::NV + 1], f[2][C::GROUP][4], v[C::GROUP][run<C::RATE2>::NV];

#pragma unroll
		for (int j = 0; j <= run<C::RATE2>::NV; j++)
			addr[j] = stage + C::X_BYTES + warp * (16 * C::RATE2) + rl.offset[j];
		mbar_wait(smem + C::FULL_AT + 8 * at.s, at.parity);
#pragma unroll
		for (int i = 0; i < C::GROUP; i++)
			rl.load(addr, i * C::KROW, v[i]);
#pragma unroll
		for (int p = 0; p < 4 / C::GROUP; p++) {
#pragma unroll
			for (int i = 0; i < C::GROUP; i++)
				decode_packed<C::RATE2, C::CB, C::HX>(v[i], f[p & 1][i]);
			/* The next words arrive while the wgmma before is waited for. */
			if (p + 1 < 4 / C::GROUP)
#pragma unroll
				for (int i = 0; i < C::GROUP; i++)
					rl.load(addr, ((p + 1) * C::GROUP + i) * C::KROW, v[i]);
			wgmma_fence();
#pragma unroll
			for (int i = 0; i < C::GROUP; i++)
				wgmma<N>::rs(d, f[p & 1][i], desc + 2 * (p * C::GROUP + i));
			wgmma_commit();
			wgmma_wait<1>();
			/* The stage before is done with: its last wgmma has just been waited for. */
			if (p == 0 && before < C::STAGES && lane == 0)
				mbar_arrive(smem + C::EMPTY_AT + 8 * before);
		}
		before = at.s;
		if (++at.s == C::STAGES) {
			at.s = 0;
			at.parity ^= 1;
		}
	}
	wgmma_wait<0>();
	wgmma_hold(d);
	if (lane == 0)
		mbar_arrive(smem + C::EMPTY_AT + 8 * before);
}

/* The same, in turns. */
template <class C, int N>
EXL3_DEV void tall_sums_in_turns(const moe_gemm_args &a, const char *base, tall_place &at, float (&d)[N / 2])
{
	const uint32_t smem = smem_addr(base), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

#pragma unroll
	for (int i = 0; i < N / 2; i++)
		d[i] = 0.0f;
#pragma unroll 1
	for (uint32_t step = a.k / 64; step; step--) {
		const uint64_t desc = wgmma_desc(smem + at.s * C::STAGE);
		const uint32_t *w = (const uint32_t *)(base + at.s * C::STAGE + C::X_BYTES) + warp * run<C::RATE2>::WORDS;

		mbar_wait(smem + C::FULL_AT + 8 * at.s, at.parity);
		turns_stage<C::RATE2, C::CB, N, 2>(w, (uint32_t)(desc >> 32), (uint32_t)desc, at.turn, (int)lane, d);
		if (lane == 0)
			mbar_arrive(smem + C::EMPTY_AT + 8 * at.s);
		if (++at.s == C::STAGES) {
			at.s = 0;
			at.parity ^= 1;
		}
	}
}

/* All consumers: sums of projection @proj to where they go. @scratch: the block's. */
template <class C, int N>
EXL3_DEV void tall_finish(const moe_gemm_args &a, const tall_task &t, uint32_t proj, const float (&d)[N / 2], float *buf,
			  float *scratch)
{
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, in = warp * 4 + (lane >> 3);
	const moe_unit &u = *t.u;
	float *put = buf + 2 * (lane & 3) * MANY_PITCH + warp * 16 + (lane >> 2);

#pragma unroll 1
	for (uint32_t pass = 0; pass * C::ROWS < u.rows; pass++) {
#pragma unroll
		for (int p = 0; p < N / C::ROWS; p++)
			if ((uint32_t)p == pass)
				many_put<C::ROWS>(d + p * (C::ROWS / 2), put);
		team_sync(1, C::CONSUMERS * 32);
		const uint32_t token = pass * C::ROWS + in, row = u.first + min(token, u.rows - 1);
		const bool live = token < u.rows;
		/* Only this thread ever touches these. */
		float *mine = scratch + (size_t)token * 128 + 4 * (lane & 7);
		float v[16];

		many_output(u, a.first_proj + proj, t.strip, a.row_scale[proj * a.image_rows + row], buf + in * MANY_PITCH, v);
		if (!C::GATED) {
			if (live)
				many_store(a, row, t.strip, v);
		} else if (proj == 0) {
#pragma unroll
			for (int j = 0; j < 4; j++)
				*(float4 *)(mine + 32 * j) =
					make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
		} else {
			float g[16];

#pragma unroll
			for (int j = 0; j < 4; j++) {
				const float4 w = *(const float4 *)(mine + 32 * j);

				g[4 * j] = w.x;
				g[4 * j + 1] = w.y;
				g[4 * j + 2] = w.z;
				g[4 * j + 3] = w.w;
			}
			many_image(a, u, row, t.strip, live, g, v);
		}
		team_sync(1, C::CONSUMERS * 32);
	}
}

template <class C, int N>
EXL3_DEV void tall_do(const moe_gemm_args &a, const tall_task &t, uint32_t proj, char *smem, tall_place &at,
		      const run_lane<C::RATE2> &rl, float *scratch)
{
	float d[N / 2];

	if constexpr (C::TURNS)
		tall_sums_in_turns<C, N>(a, smem, at, d);
	else
		tall_sums<C, N>(a, smem, at, rl, d);
	tall_finish<C, N>(a, t, proj, d, (float *)(smem + C::BUF_AT), scratch);
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) moe_tall_kernel(const __grid_constant__ moe_many_args args)
{
#if defined(EXL3_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
	extern __shared__ __align__(1024) char moe_smem_tall[];
	const moe_gemm_args &a = args.g;
	const uint32_t smem = smem_addr(moe_smem_tall), warp = threadIdx.x >> 5;

	if (threadIdx.x == 0) {
		for (int i = 0; i < C::STAGES; i++) {
			mbar_init(smem + C::FULL_AT + 8 * i, 1);
			mbar_init(smem + C::EMPTY_AT + 8 * i, C::CONSUMERS);
		}
		if (C::TURNS)
			turns<2>::init(smem + C::TURN_AT);
		mbar_init_fence();
	}
	__syncthreads();
	grid_wait();
	const uint32_t unit0 = a.class_units[a.cls], nr = a.class_units[a.cls + 1] - unit0;
	const uint32_t tasks = nr * (a.n / 128);
	const moe_unit *units = a.units + unit0;

	if (warp >= C::CONSUMERS) {
		registers_less<C::REGS_PRODUCER>();
		if (warp == C::CONSUMERS && (threadIdx.x & 31) == 0)
			tall_produce<C>(a, units, tasks, smem);
		return;
	}
	registers_more<C::REGS_CONSUMER>();
	const run_lane<C::RATE2> rl((int)(threadIdx.x & 31));
	float *scratch = args.scratch + (size_t)blockIdx.x * (TALL_ROWS * 128);
	tall_place at = {0, 0, turns<2>(smem + C::TURN_AT, (int)(warp >> 2))};

#pragma unroll 1
	for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
		const tall_task t = tall_task_of(a, units, task);
		const uint32_t rows = t.u->rows;

#pragma unroll 1
		for (uint32_t proj = 0; proj < (C::GATED ? 2 : 1); proj++)
			if (rows > 192)
				tall_do<C, 256>(a, t, proj, moe_smem_tall, at, rl, scratch);
			else if (rows > 128)
				tall_do<C, 192>(a, t, proj, moe_smem_tall, at, rl, scratch);
			else if (rows > 96)
				tall_do<C, 128>(a, t, proj, moe_smem_tall, at, rl, scratch);
			else if (rows > 64)
				tall_do<C, 96>(a, t, proj, moe_smem_tall, at, rl, scratch);
			else if (rows > 32)
				tall_do<C, 64>(a, t, proj, moe_smem_tall, at, rl, scratch);
			else
				tall_do<C, 32>(a, t, proj, moe_smem_tall, at, rl, scratch);
	}
	grid_launch_dependents();
#endif
}

#ifndef EXL3_EMULATE

template <class C> static int tall_start(const moe_many_args &a, int sms, cudaStream_t stream)
{
	static bool ready; /* the same from every thread */

	if (!ready && cudaFuncSetAttribute(moe_tall_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM))
		return -EIO;
	ready = true;
	return moe_start(moe_tall_kernel<C>, a.g.programmatic,
			 dim3(a.g.tasks_max < (uint32_t)sms ? a.g.tasks_max : (uint32_t)sms), C::THREADS, C::SMEM, stream, a);
}

template <int RATE2, int CB, bool TURNS> static int tall_start_any(const moe_many_args &a, int sms, cudaStream_t stream)
{
	return a.g.nr_proj == 2 ? tall_start<tall_cfg<RATE2, CB, true, TURNS>>(a, sms, stream) :
				  tall_start<tall_cfg<RATE2, CB, false, TURNS>>(a, sms, stream);
}

#endif

} /* namespace exl3 */
#endif
