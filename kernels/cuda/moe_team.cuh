/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_team.cuh - grouped products for some ten to sixty rows per expert: gemv_wide.cuh's loop, whole sums.
 *
 *       out^T [128 x N] = W^T [128 x k] X^T [k x N]     N 16, 32 or 64, by the unit's rows
 *
 *   block     two teams of four warps (warpgroups), two blocks per SM: one's epilogue runs beside the other's loop
 *   gate, up  team 0 is gate and team 1 up, of one strip of 128 columns; each has its own X
 *   down      the teams are two neighbouring strips (so is a lone last strip, done twice and stored once)
 *   warp w    n-tiles w and 4 + w of its strip: two accumulators, A straight from the bits
 *   stage     of a team, 64 of k: trellis [4 k-tiles][8 tiles]; X [rows x 128 bytes], swizzled
 *
 *   cp.async  weights of position i + DEPTH          (team of 128 threads)
 *   bulk copy X of position i + DEPTH                (one thread; so no proxy fence in the loop)
 *   decode    BATCH tiles           beside
 *   wgmma     the BATCH tiles before
 *
 * A task is (unit, strip or pair of strips); blocks walk the list with a stride and copy across the ends of
 * tasks. A stage is filled again two positions after its last use: then every warp has waited for the products that read it
 * (the one group that a position leaves open is waited for in the next one's first batch).
 */
#ifndef EXL3_CUDA_MOE_TEAM_CUH
#define EXL3_CUDA_MOE_TEAM_CUH

#include "kernels/cuda/moe_many.cuh"

namespace exl3
{

template <int RATE2_, int CB_, int TN_, bool GATED_> struct team_cfg {
	static constexpr int RATE2 = RATE2_, CB = CB_, TN = TN_;
	static constexpr bool GATED = GATED_;
	static constexpr int TEAMS = 2, THREADS = 128 * TEAMS, PER_SM = 2, BATCH = 2;
	static constexpr int HX = CB == CB_MUL1 ? 0 : 1; /* trellis.cuh */
	static constexpr int KROW = 8 * 16 * RATE2;      /* trellis of a k-tile and a strip */
	static constexpr int W_BYTES = 4 * KROW, X_BYTES = TN * 128;
	static constexpr int COPIES = (W_BYTES / 16 + 127) / 128; /* of a thread, weights of a stage */
	static constexpr int ROWS = 32;                           /* of a strip per pass of the epilogue */
	static constexpr int BUF = TEAMS * ROWS * MANY_PITCH * 4;
	/* 228 KB per SM, 1 KB of each block is the system's; mbarriers. */
	static constexpr int FIT = (113 * 1024 - BUF - 256) / TEAMS / (W_BYTES + X_BYTES);
	static constexpr int STAGES = FIT > 6 ? 6 : FIT, DEPTH = STAGES - 2;
	static constexpr int X_AT = 0, W_AT = TEAMS * STAGES * X_BYTES, BUF_AT = W_AT + TEAMS * STAGES * W_BYTES;
	static constexpr int BAR_AT = BUF_AT + BUF, SMEM = BAR_AT + 8 * TEAMS * STAGES;
	static_assert(STAGES >= 3, "one position in flight, one in work, one behind");
	static_assert(X_BYTES % 1024 == 0, "a wgmma operand begins at a multiple of 1024 bytes");
	static_assert(BUF_AT % 16 == 0 && BAR_AT % 8 == 0, "alignment");
};

struct team_task {
	const moe_unit *u;
	uint32_t strip; /* of team 0 */
};

template <class C> EXL3_DEV uint32_t team_groups(const moe_gemm_args &a)
{
	return C::GATED ? a.n / 128 : (a.n / 128 + 1) / 2;
}

template <class C> EXL3_DEV team_task team_task_of(const moe_gemm_args &a, const moe_unit *units, uint32_t task)
{
	const uint32_t groups = team_groups<C>(a), group = task % groups;

	return {units + task / groups, C::GATED ? group : 2 * group};
}

/* What a team copies next. */
template <class C> struct team_loader {
	uint32_t task, rest; /* steps left in it; 0: everything has been asked for */
	const char *src, *x;
	uint32_t x_bytes, row;      /* of X a step; of trellis from step to step */
	uint32_t offset[C::COPIES]; /* of this thread's copies in a stage */

	EXL3_DEV_MEMBER void start(const moe_gemm_args &a, const moe_unit *units, uint32_t tasks)
	{
		const uint32_t tile_row = a.n * C::RATE2;

#pragma unroll
		for (int i = 0; i < C::COPIES; i++) {
			const uint32_t j = (threadIdx.x & 127) + 128 * i;

			offset[i] = j / (8 * C::RATE2) * tile_row + j % (8 * C::RATE2) * 16;
		}
		row = 4 * tile_row;
		task = blockIdx.x;
		enter(a, units, tasks);
	}

	EXL3_DEV_MEMBER void enter(const moe_gemm_args &a, const moe_unit *units, uint32_t tasks)
	{
		rest = 0;
		if (task >= tasks)
			return;
		const team_task t = team_task_of<C>(a, units, task);
		const uint32_t team = threadIdx.x >> 7;
		const uint32_t strip = C::GATED ? t.strip : min(t.strip + team, a.n / 128 - 1);

		rest = a.k / 64;
		src = t.u->trellis[a.first_proj + (C::GATED ? team : 0)] + (size_t)strip * C::KROW;
		x = (const char *)a.image + (C::GATED ? team * a.image_bytes : 0) + (size_t)t.u->first_pad * a.k * 2;
		x_bytes = (t.u->rows + 7) / 8 * 8 * 128;
	}

	/* One position to the stage at @w and @x_to, whose mbarrier is @bar; all threads of the team. */
	EXL3_DEV_MEMBER void copy(const moe_gemm_args &a, const moe_unit *units, uint32_t tasks, uint32_t w, uint32_t x_to,
				  uint32_t bar)
	{
		const uint32_t thread = threadIdx.x & 127;

#pragma unroll
		for (int i = 0; i < C::COPIES; i++)
			if (128 * (i + 1) <= C::W_BYTES / 16 || 128 * i + thread < C::W_BYTES / 16)
				cp_async16(w + (thread + 128 * i) * 16, src + offset[i]);
		if (thread == 0) {
			mbar_expect(bar, x_bytes);
			bulk_load(x_to, x, x_bytes, bar);
		}
		src += row;
		x += x_bytes;
		if (!--rest) {
			task += gridDim.x;
			enter(a, units, tasks);
		}
	}
};

/* Where a team is in its ring. */
struct team_place {
	uint32_t slot, fill, parity;
};

/* A team's sums of one task: acc[h] is n-tiles w + 4h of the strip. */
template <class C, int N>
EXL3_DEV void team_sums(const moe_gemm_args &a, const moe_unit *units, uint32_t tasks, uint32_t smem, team_loader<C> &in,
			team_place &at, const run_lane<C::RATE2> &rl, float (&acc)[2][N / 2])
{
	const uint32_t team = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3;
	const uint32_t x_ring = smem + C::X_AT + team * C::STAGES * C::X_BYTES;
	const uint32_t w_ring = smem + C::W_AT + team * C::STAGES * C::W_BYTES;
	const uint32_t bars = smem + C::BAR_AT + team * C::STAGES * 8;

#pragma unroll
	for (int i = 0; i < N / 2; i++)
		acc[0][i] = acc[1][i] = 0.0f;
#pragma unroll 1
	for (uint32_t step = a.k / 64; step; step--) {
		uint32_t addr[run<C::RATE2>::NV + 1], w[2][C::BATCH][4];
		const uint64_t desc = wgmma_desc(x_ring + at.slot * C::X_BYTES);

		cp_async_wait<C::DEPTH - 1>();
		mbar_wait(bars + 8 * at.slot, at.parity);
		team_sync(1 + team, 128); /* everybody's copies have landed, and the stage to fill is free */
		if (in.rest)
			in.copy(a, units, tasks, w_ring + at.fill * C::W_BYTES, x_ring + at.fill * C::X_BYTES,
				bars + 8 * at.fill);
		cp_async_commit();
#pragma unroll
		for (int j = 0; j <= run<C::RATE2>::NV; j++)
			addr[j] = w_ring + at.slot * C::W_BYTES + warp * (16 * C::RATE2) + rl.offset[j];
#pragma unroll
		for (int t = 0; t < 8; t += C::BATCH) {
			uint32_t(&f)[C::BATCH][4] = w[t / C::BATCH & 1];

#pragma unroll
			for (int i = t; i < t + C::BATCH; i++) {
				uint32_t v[run<C::RATE2>::NV];

				rl.load(addr, (i >> 1) * C::KROW + (i & 1) * (4 * 16 * C::RATE2), v);
				decode_packed<C::RATE2, C::CB, C::HX>(v, f[i - t]);
			}
			wgmma_fence();
#pragma unroll
			for (int i = t; i < t + C::BATCH; i++)
				wgmma<N>::rs(acc[i & 1], f[i - t], desc + 2 * (i >> 1));
			wgmma_commit();
			wgmma_wait<1>();
		}
		at.fill = at.fill + 1 == C::STAGES ? 0 : at.fill + 1;
		if (++at.slot == C::STAGES) {
			at.slot = 0;
			at.parity ^= 1;
		}
	}
	wgmma_wait<0>();
	wgmma_hold(acc[0]);
	wgmma_hold(acc[1]);
}

/* All threads: both teams' sums to rows of out, or to down's image. */
template <class C, int N>
EXL3_DEV void team_finish(const moe_gemm_args &a, const team_task &t, const float (&acc)[2][N / 2], float *buf)
{
	constexpr int ROWS = N < C::ROWS ? N : C::ROWS;
	const uint32_t team = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	const moe_unit &u = *t.u;
	float *put = buf + (team * ROWS + 2 * (lane & 3)) * MANY_PITCH + (warp & 3) * 16 + (lane >> 2);

#pragma unroll 1
	for (uint32_t pass = 0; pass * ROWS < u.rows; pass++) {
#pragma unroll
		for (int p = 0; p < N / ROWS; p++)
			if ((uint32_t)p == pass) {
				many_put<ROWS>(acc[0] + p * (ROWS / 2), put);
				many_put<ROWS>(acc[1] + p * (ROWS / 2), put + 64);
			}
		__syncthreads();
		/* Eight lanes a row, four rows a warp. */
#pragma unroll 1
		for (uint32_t i = warp * 4; i < (C::GATED ? ROWS : 2 * ROWS); i += C::THREADS / 8) {
			const uint32_t in = i % ROWS + (lane >> 3), half = i / ROWS, token = pass * ROWS + in;
			const bool live = token < u.rows;
			const uint32_t row = u.first + min(token, u.rows - 1);
			float v[16];

			if constexpr (C::GATED) {
				float g[16];

				many_output(u, 0, t.strip, a.row_scale[row], buf + in * MANY_PITCH, g);
				many_output(u, 1, t.strip, a.row_scale[a.image_rows + row],
					    buf + (ROWS + in) * MANY_PITCH, v);
				many_image(a, u, row, t.strip, live, g, v);
			} else {
				const uint32_t strip = t.strip + half;

				if (strip * 128 >= a.n)
					continue; /* a lone last strip: so for the whole warp */
				many_output(u, a.first_proj, strip, a.row_scale[row], buf + (half * ROWS + in) * MANY_PITCH,
					    v);
				if (live)
					many_store(a, row, strip, v);
			}
		}
		__syncthreads();
	}
}

template <class C, int N>
EXL3_DEV void team_do(const moe_gemm_args &a, const moe_unit *units, uint32_t tasks, const team_task &t, char *smem,
		      team_loader<C> &in, team_place &at, const run_lane<C::RATE2> &rl)
{
	float acc[2][N / 2];

	team_sums<C, N>(a, units, tasks, smem_addr(smem), in, at, rl, acc);
	team_finish<C, N>(a, t, acc, (float *)(smem + C::BUF_AT));
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, C::PER_SM) moe_team_kernel(const __grid_constant__ moe_many_args args)
{
#if defined(EXL3_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
	extern __shared__ __align__(1024) char moe_smem_team[];
	const moe_gemm_args &a = args.g;
	const uint32_t smem = smem_addr(moe_smem_team), team = threadIdx.x >> 7;
	team_place at = {0, C::DEPTH, 0};
	team_loader<C> in;

	if (threadIdx.x == 0) {
		for (int i = 0; i < C::TEAMS * C::STAGES; i++)
			mbar_init(smem + C::BAR_AT + 8 * i, 1);
		mbar_init_fence();
	}
	__syncthreads();
	grid_wait();
	const uint32_t unit0 = a.class_units[a.cls], nr = a.class_units[a.cls + 1] - unit0;
	const uint32_t tasks = nr * team_groups<C>(a);
	const moe_unit *units = a.units + unit0;
	const run_lane<C::RATE2> rl((int)(threadIdx.x & 31));

	in.start(a, units, tasks);
#pragma unroll 1
	for (int s = 0; s < C::DEPTH; s++) {
		if (in.rest)
			in.copy(a, units, tasks, smem + C::W_AT + (team * C::STAGES + s) * C::W_BYTES,
				smem + C::X_AT + (team * C::STAGES + s) * C::X_BYTES,
				smem + C::BAR_AT + (team * C::STAGES + s) * 8);
		cp_async_commit();
	}
#pragma unroll 1
	for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
		const team_task t = team_task_of<C>(a, units, task);

		if (C::TN > 32 && t.u->rows > 32)
			team_do<C, C::TN>(a, units, tasks, t, moe_smem_team, in, at, rl);
		else if (t.u->rows > 16)
			team_do<C, 32>(a, units, tasks, t, moe_smem_team, in, at, rl);
		else
			team_do<C, 16>(a, units, tasks, t, moe_smem_team, in, at, rl);
	}
	grid_launch_dependents();
#endif
}

#ifndef EXL3_EMULATE

template <class C> static int team_start(const moe_many_args &a, int sms, cudaStream_t stream)
{
	static bool ready; /* the same from every thread */
	const uint32_t most = (uint32_t)sms * C::PER_SM;

	if (!ready && cudaFuncSetAttribute(moe_team_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM))
		return -EIO;
	ready = true;
	return moe_start(moe_team_kernel<C>, a.g.programmatic, dim3(a.g.tasks_max < most ? a.g.tasks_max : most), C::THREADS,
			 C::SMEM, stream, a);
}

template <int RATE2, int CB> static int team_start_any(const moe_many_args &a, int sms, cudaStream_t stream)
{
	if (a.g.nr_proj == 2)
		return a.g.tile == 32 ? team_start<team_cfg<RATE2, CB, 32, true>>(a, sms, stream) :
					team_start<team_cfg<RATE2, CB, 64, true>>(a, sms, stream);
	return a.g.tile == 32 ? team_start<team_cfg<RATE2, CB, 32, false>>(a, sms, stream) :
				team_start<team_cfg<RATE2, CB, 64, false>>(a, sms, stream);
}

#endif

} /* namespace exl3 */
#endif
