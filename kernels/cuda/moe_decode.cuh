/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_decode.cuh - grouped products for few rows per expert (up to 16): one pass over the weights.
 *
 *   gate, up   image -> act(g, u) * suh_down, Hadamard -> down's image
 *   down       image -> Hadamard, svh, bias -> f32 rows
 *
 * A block works on P strips of 128 columns at a time: the same of gate and of up, or neighbours of one
 * matrix. The work is a flat list of positions: (unit, strips, k-tile), k-tiles fastest. Each block
 * takes an equal, contiguous range of it, whatever the routing, and walks it from its end to its start, as
 * gemv.cuh's blocks do: only the first strip that a block walks can end in another block, which is its owner.
 *
 *       strips         |     s      |    s + 1   |
 *       blocks         c-1 ] [    c     ] [ c+1
 *
 *       warp (p, kg)      every KG-th position of the range, all 8 tiles of strip p
 *       stages            weights and B of step i + S - 1 arrive (cp.async) while step i is decoded
 *
 * No block barrier inside a strip. Sums cross warps through shared memory, and blocks through slots that
 * carry their own flag; they are added in the order of the blocks, so same routing, same bits. Where a
 * row's bits may not depend on its neighbours, blocks take whole strips instead (a.whole). Down's
 * image gets a power of two per row and block of 128, because no block sees a whole row; where one is not
 * 1 (values beyond f16), down's warps bring their B to the row's largest first.
 */
#ifndef EXL3_CUDA_MOE_DECODE_CUH
#define EXL3_CUDA_MOE_DECODE_CUH

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/moe_image.cuh"
#include "kernels/cuda/trellis.cuh"

namespace exl3
{

template <int RATE2_, int CB_, int MG_, int P_, bool GATED_>
struct moe_cfg {
	static constexpr bool GATED = GATED_; /* the strips are gate's and up's */
	static constexpr int RATE2 = RATE2_, CB = CB_, MG = MG_, P = P_;
	static constexpr bool DUP = MG == 1 && CB != CB_MUL1; /* trellis.cuh */
	static constexpr int NT = 8, WARPS = 8, PER_SM = 2, HX = CB == CB_MUL1 ? 0 : 1;
	static constexpr int KG      = WARPS / P;
	static constexpr int TOKENS  = 8 * MG;
	static constexpr int THREADS = 32 * WARPS;
	static constexpr int ITEM    = NT * 16 * RATE2;    /* bytes of weights of a step */
	static constexpr int LINE    = ITEM + 32 * TOKENS; /* and its B */
	static constexpr int FIT     = 76 * 1024 / (WARPS * LINE);
	static constexpr int STAGES  = FIT > 8 ? 8 : FIT;
	static constexpr int ROW     = NT * 16 + 4; /* floats: a warp's four quarters in different banks */
	static constexpr int RED     = 8;           /* tokens reduced at a time */
	static constexpr int SMEM    = WARPS * (STAGES * LINE + RED * ROW * 4);
	static_assert(!GATED || P == 2, "gate and up");
	static_assert(STAGES >= 3, "too little shared memory for a pipeline");
};

/* The blocks' ranges: the first @more have one unit of positions more than @each. */
struct moe_share {
	uint32_t each, more, unit;

	EXL3_DEV_MEMBER uint32_t begin(uint32_t block) const { return (block * each + min(block, more)) * unit; }
};

/* Four sums to another block, and from it: 0 is "not there yet", so a value travels inverted. */
EXL3_DEV uint32_t moe_slot_bits(float v)
{
	const uint32_t b = ~__float_as_uint(v);

	return b ? b : ~0x7fffffffu; /* one NaN for another */
}

EXL3_DEV void moe_slot_send(uint32_t *slot, const float (&v)[4])
{
	store_relaxed(slot, make_uint4(moe_slot_bits(v[0]), moe_slot_bits(v[1]), moe_slot_bits(v[2]),
				       moe_slot_bits(v[3])));
}

EXL3_DEV void moe_slot_add(uint32_t *slot, uint4 w, float (&v)[4])
{
	while (!w.x || !w.y || !w.z || !w.w)
		w = load_relaxed(slot);
	*(uint4 *)slot = make_uint4(0, 0, 0, 0);
	v[0] += __uint_as_float(~w.x);
	v[1] += __uint_as_float(~w.y);
	v[2] += __uint_as_float(~w.z);
	v[3] += __uint_as_float(~w.w);
}

/* A warp's sums: [tile of the strip][8 rows]. */
template <class C>
struct moe_acc {
	float f[C::NT][C::MG][4];
};

/* One step: the strip's tiles at @tiles times the B image of their k-tile at @b, shared memory addresses. */
template <class C>
EXL3_DEV void moe_step(uint32_t tiles, const run_lane<C::RATE2> &rl, uint32_t b,
		       const uint32_t (&b_offset)[C::MG], moe_acc<C> &acc)
{
	uint32_t addr[run<C::RATE2>::NV + 1];
	uint2 w[C::MG];
	uint32_t twice[4];

#pragma unroll
	for (int j = 0; j <= run<C::RATE2>::NV; j++)
		addr[j] = tiles + rl.offset[j];
#pragma unroll
	for (int j = 0; j < C::MG; j++)
		w[j] = lds64(b + b_offset[j]);
	if constexpr (C::DUP) {
		twice[0] = prmt(w[0].x, 0, 0x1010);
		twice[1] = prmt(w[0].x, 0, 0x3232);
		twice[2] = prmt(w[0].y, 0, 0x1010);
		twice[3] = prmt(w[0].y, 0, 0x3232);
	}
#pragma unroll
	for (int t = 0; t < C::NT; t++) {
		uint32_t v[run<C::RATE2>::NV];

		rl.load(addr, t * run<C::RATE2>::WORDS * 4, v);
		if constexpr (C::DUP) {
			uint32_t r[8];

			decode_dup<C::RATE2, C::CB, C::HX>(v, r);
			mma_f16(acc.f[t][0], r[0], r[4], r[1], r[5], twice[0], twice[1]);
			mma_f16(acc.f[t][0], r[2], r[6], r[3], r[7], twice[2], twice[3]);
		} else {
			uint32_t r[4];

			decode_packed<C::RATE2, C::CB, C::HX>(v, r);
#pragma unroll
			for (int j = 0; j < C::MG; j++)
				mma_f16(acc.f[t][j], r[0], r[1], r[2], r[3], w[j].x, w[j].y);
		}
	}
}

/* A unit's groups of strips, and strip @p of the group of a task. */
template <class C>
EXL3_DEV uint32_t moe_groups(const moe_gemm_args &a)
{
	return C::GATED ? a.n / 128 : (a.n / 128 + C::P - 1) / C::P;
}

template <class C>
EXL3_DEV uint32_t moe_strip(const moe_gemm_args &a, uint32_t task, uint32_t p)
{
	const uint32_t group = task % moe_groups<C>(a);

	return C::GATED ? group : group * C::P + p;
}

/* What a warp copies next. */
template <class C>
struct moe_loader {
	int left, strip_left, position;
	const char *src, *b; /* this lane's bytes of the weights and of B */
	size_t row;
	uint32_t b_row, b_bytes;

	EXL3_DEV_MEMBER void enter_strip(const moe_gemm_args &a, const moe_unit *units, uint32_t begin)
	{
		const uint32_t kt_all = a.k / 16, lane = threadIdx.x & 31, p = (threadIdx.x >> 5) / C::KG;
		const uint32_t task = (uint32_t)position / kt_all, top = task * kt_all;
		const uint32_t kt = (uint32_t)position - top, strip = moe_strip<C>(a, task, p);
		const moe_unit &u = units[task / moe_groups<C>(a)];
		const size_t tile_row = (size_t)a.n * C::RATE2;

		row = C::KG * tile_row;
		/* Past the last strip: the last once more, which nobody stores. */
		src = u.trellis[a.first_proj + (C::GATED ? p : 0)] + kt * tile_row +
		      min(strip, a.n / 128 - 1) * C::ITEM + lane * 16;
		b_bytes = u.rows * 32;
		b_row = C::KG * b_bytes;
		b = (const char *)a.image + (C::GATED ? p * a.image_bytes : 0) +
		    ((size_t)u.first * kt_all + kt * u.rows) * 32 + lane * 16;
		strip_left = (position - (int)max(begin, top)) / C::KG + 1;
		position -= strip_left * C::KG;
	}

	EXL3_DEV_MEMBER void start(const moe_gemm_args &a, const moe_unit *units, uint32_t begin, int first)
	{
		position = first;
		left = first >= (int)begin ? (first - (int)begin) / C::KG + 1 : 0;
		strip_left = 0;
		if (left)
			enter_strip(a, units, begin);
	}

	EXL3_DEV_MEMBER void next(const moe_gemm_args &a, const moe_unit *units, uint32_t begin)
	{
		src -= row;
		b -= b_row;
		if (--left && !--strip_left)
			enter_strip(a, units, begin);
	}

	EXL3_DEV_MEMBER void copy_weights(uint32_t dst) const
	{
		const uint32_t lane = threadIdx.x & 31;

#pragma unroll
		for (uint32_t c = 0; c < C::ITEM / 16; c += 32)
			if (c + 32 <= C::ITEM / 16 || c + lane < C::ITEM / 16)
				cp_async16(dst + c * 16, src + c * 16);
	}

	EXL3_DEV_MEMBER void copy_b(uint32_t dst) const
	{
		const uint32_t lane = threadIdx.x & 31;

#pragma unroll
		for (uint32_t c = 0; c < C::TOKENS * 2; c += 32)
			if ((c + lane) * 16 < b_bytes)
				cp_async16(dst + c * 16, b + c * 16);
	}
};

/* 128 columns of one projection: Hadamard, scales. @v: columns 4 * lane .. + 3. */
EXL3_DEV void moe_output(const __half *svh, const float *biases, uint32_t col, float scale, float (&v)[4])
{
	float h[4];
	float4 bias = make_float4(0, 0, 0, 0);

	moe_halves(svh + col, h);
	if (biases)
		bias = *(const float4 *)(biases + col);
	had_warp(v);
	v[0] = v[0] * scale * h[0] + bias.x;
	v[1] = v[1] * scale * h[1] + bias.y;
	v[2] = v[2] * scale * h[2] + bias.z;
	v[3] = v[3] * scale * h[3] + bias.w;
}

/* A row's block of down's input, by a warp: times suh, Hadamard, f16 in the order of the B fragment. */
EXL3_DEV void moe_next_image(const moe_gemm_args &a, const moe_unit &u, uint32_t strip, uint32_t token, float (&v)[4])
{
	const uint32_t lane = threadIdx.x & 31, row = u.first + token, col = strip * 128 + 4 * lane;
	const moe_place to = {a.next_image, MOE_FRAGMENT, a.n, row, u.first, u.rows, 0};
	float h[4], biggest = 0.0f;

	moe_halves(u.suh_down + col, h);
#pragma unroll
	for (int j = 0; j < 4; j++)
		v[j] = col + j < a.n_log ? v[j] * h[j] : 0.0f;
	had_warp(v);
#pragma unroll
	for (int j = 0; j < 4; j++) {
		v[j] *= (float)EXL3_INV_SQRT128;
		biggest = moe_biggest(biggest, v[j]);
	}
	for (int s = 16; s; s /= 2)
		biggest = fmaxf(biggest, __shfl_xor_sync(~0u, biggest, s));
	const float power = moe_power(biggest);

	moe_store4(to, col, v, 1.0f / power);
	if (lane == 0) {
		a.next_scale[(size_t)row * (a.n / 128) + strip] = power;
		if (power > 1.0f)
			atomicMax(a.next_top + row, __float_as_uint(power));
	}
}

/*
 * One token of strips P0 .. P0 + NP - 1 by a warp: sums over all warps, then over blocks, then the output.
 * @t: token in @red, of those from @token0 on.
 */
template <class C, int NP>
EXL3_DEV void moe_reduce(const moe_gemm_args &a, const moe_unit &u, const moe_share &share, uint32_t task,
			 const float *red, uint32_t token0, uint32_t t, uint32_t p0, uint32_t lo, bool owner)
{
	const uint32_t lane = threadIdx.x & 31, first = task * (a.k / 16);
	const uint32_t token = token0 + t, row = u.first + token;
	const size_t stride = C::TOKENS * C::P * 128;
	uint32_t *slot = a.slots + (token * C::P + p0) * 128 + 4 * lane;
	float v[NP][4] = {};

#pragma unroll
	for (int p = 0; p < NP; p++) {
#pragma unroll
		for (int kg = 0; kg < C::KG; kg++) {
			const float4 w = *(const float4 *)(red + (((p0 + p) * C::KG + kg) * C::RED + t) * C::ROW +
							   4 * lane);

			v[p][0] += w.x;
			v[p][1] += w.y;
			v[p][2] += w.z;
			v[p][3] += w.w;
		}
		if (!owner)
			moe_slot_send(slot + blockIdx.x * stride + p * 128, v[p]);
	}
	if (!owner)
		return;
	/* Blocks below this one that hold earlier parts of the strip, in ascending order. */
	if (lo > first) {
		uint32_t c = blockIdx.x - 1;

		while (share.begin(c) > first)
			c--;
#pragma unroll 1
		for (; c < blockIdx.x; c += 4) {
			uint4 w[4][NP];

#pragma unroll
			for (int i = 0; i < 4; i++)
#pragma unroll
				for (int p = 0; p < NP; p++)
					if (c + i < blockIdx.x)
						w[i][p] = load_relaxed(slot + (c + i) * stride + p * 128);
#pragma unroll
			for (int i = 0; i < 4; i++)
#pragma unroll
				for (int p = 0; p < NP; p++)
					if (c + i < blockIdx.x)
						moe_slot_add(slot + (c + i) * stride + p * 128, w[i][p], v[p]);
		}
	}
	__syncwarp();
	const uint32_t strip = moe_strip<C>(a, task, p0), col = strip * 128 + 4 * lane;

	if (strip * 128 >= a.n)
		return;
#pragma unroll
	for (int p = 0; p < NP; p++)
		moe_output(u.svh[a.first_proj + p], u.bias[a.first_proj + p], col,
			   a.row_scale[p * a.image_rows + row] * (float)EXL3_INV_SQRT128, v[p]);
	if (a.out) {
		*(float4 *)(a.out + (size_t)row * a.n + col) = make_float4(v[0][0], v[0][1], v[0][2], v[0][3]);
		return;
	}
#pragma unroll
	for (int j = 0; j < 4; j++)
		v[0][j] = activate(NP == 2 ? v[0][j] : 0.0f, v[NP - 1][j], a.act, a.limit);
	moe_next_image(a, u, strip, token, v[0]);
}

/* What the end of the task will need comes to the L2: a warp, at its start. */
template <class C>
EXL3_DEV void moe_prefetch(const moe_gemm_args &a, const moe_unit &u, uint32_t task)
{
	const uint32_t lane = threadIdx.x & 31, p = lane / 2;
	const uint32_t col = min(moe_strip<C>(a, task, p) * 128, a.n - 128) + lane % 2 * 64;

	if (p < C::P)
		prefetch_l2(u.svh[a.first_proj + (C::GATED ? p : 0)] + col);
	else if (p < 2 * C::P && !a.out)
		prefetch_l2(u.suh_down + min(moe_strip<C>(a, task, p - C::P) * 128, a.n - 128) + lane % 2 * 64);
}

/* A warp's sums of tokens token0 .. + RED - 1 into its part of shared memory. */
template <class C>
EXL3_DEV void moe_flush(const moe_acc<C> &acc, float *red, int token0, uint32_t rows)
{
	const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;

#pragma unroll
	for (int j = 0; j < C::MG; j++) {
		const uint32_t token = j * 8 + 2 * q;

		if (j * 8 != token0)
			continue;
#pragma unroll
		for (int t = 0; t < C::NT; t++) {
			const float(&c)[4] = acc.f[t][j];
			float *out = red + 2 * q * C::ROW + t * 16 + g;

			if (token < rows) {
				out[0] = c[0];
				out[8] = c[2];
			}
			if (token + 1 < rows) {
				out[C::ROW] = c[1];
				out[C::ROW + 8] = c[3];
			}
		}
	}
}

/* Brings a step's B, in shared memory, from the powers of two of its blocks to those of the rows. */
template <class C>
EXL3_DEV void moe_rescale(const moe_gemm_args &a, const moe_unit &u, uint32_t kt, uint32_t b)
{
	const uint32_t lane = threadIdx.x & 31;

#pragma unroll 1
	for (uint32_t i = lane; i < u.rows * 8; i += 32) {
		const uint32_t row = u.first + i / 8;
		const __half2 s = __float2half2_rn(a.block_scale[(size_t)row * (a.k / 128) + kt / 8] / a.row_scale[row]);
		uint32_t v = lds32(b + i * 4);
		const __half2 r = __hmul2(*(__half2 *)&v, s);

		asm volatile("st.shared.u32 [%0], %1;" ::"r"(b + i * 4), "r"(*(const uint32_t *)&r) : "memory");
	}
	__syncwarp();
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, C::PER_SM) moe_decode_kernel(const __grid_constant__ moe_gemm_args a)
{
	extern __shared__ __align__(128) char moe_smem[];
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	const uint32_t kt_all = a.k / 16, groups = moe_groups<C>(a);
	const bool down = a.first_proj == 2;

	/* Down's list is there already: gate and up were started behind it. */
	if (!down)
		grid_wait();
	const uint32_t unit0 = a.class_units[a.cls], nr = a.class_units[a.cls + 1] - unit0;
	const moe_unit *units = a.units + unit0;
	const uint32_t positions = nr * groups * kt_all;
	/* The host knows only a bound of the work: at least a step for every warp of the blocks that run. */
	const uint32_t shared = a.whole ? nr * groups : positions;
	const uint32_t blocks = min(gridDim.x, max(a.whole ? shared : positions / C::KG, 1u));
	const moe_share share = {shared / blocks, shared % blocks, a.whole ? kt_all : 1};
	const uint32_t begin = share.begin(blockIdx.x), end = share.begin(blockIdx.x + 1);
	const uint32_t ring = smem_addr(moe_smem) + warp * C::STAGES * C::LINE, ring_end = ring + C::STAGES * C::LINE;
	float *red = (float *)(moe_smem + C::WARPS * C::STAGES * C::LINE);
	int position = (int)(end - 1 - warp % C::KG);
	moe_loader<C> in;

	if (blockIdx.x >= blocks || begin == end) {
		if (down)
			grid_wait();
		grid_launch_dependents();
		return;
	}
	in.start(a, units, begin, position);
	moe_loader<C> in_b = in;
	uint32_t dst = ring + lane * 16, tiles = ring;

#pragma unroll 1
	for (int s = 0; s < C::STAGES - 1; s++) {
		if (in.left) {
			in.copy_weights(dst);
			in.next(a, units, begin);
		}
		dst += C::LINE;
	}
	if (down)
		grid_wait();
#pragma unroll 1
	for (int s = 0; s < C::STAGES - 1; s++) {
		if (in_b.left) {
			in_b.copy_b(ring + s * C::LINE + C::ITEM + lane * 16);
			in_b.next(a, units, begin);
		}
		cp_async_commit(); /* the first group also has all weights so far */
	}

	const run_lane<C::RATE2> rl(lane);
	moe_acc<C> acc;
	uint32_t b_offset[C::MG];
	bool flushed = false;

#pragma unroll 1
	for (uint32_t task = (end - 1) / kt_all;; task--) {
		const uint32_t top = task * kt_all, lo = max(begin, top);
		const moe_unit &u = units[task / groups];
		const uint32_t rows = u.rows;
		int steps = position >= (int)lo ? (position - (int)lo) / C::KG + 1 : 0;
		bool scaled = false;

		if (warp == C::WARPS - 1)
			moe_prefetch<C>(a, u, task);
		if (a.block_scale)
			scaled = __any_sync(~0u, lane < rows && a.row_scale[u.first + lane] > 1.0f);
		acc = {};
		/* Columns beyond the unit's rows repeat the last one; nobody reads them. */
#pragma unroll
		for (int j = 0; j < C::MG; j++)
			b_offset[j] = min(j * 8 + (lane >> 2), rows - 1) * 32 + 8 * (lane & 3);
#pragma unroll 1
		for (; steps > 0; steps--) {
			cp_async_wait<C::STAGES - 2>();
			__syncwarp(); /* all lanes are past the step before */
			if (in.left) {
				in.copy_weights(dst);
				in.copy_b(dst + C::ITEM);
				in.next(a, units, begin);
			}
			cp_async_commit();
			dst = dst + C::LINE >= ring_end ? dst + C::LINE - C::STAGES * C::LINE : dst + C::LINE;
			if (scaled)
				moe_rescale<C>(a, u, (uint32_t)position - top, tiles + C::ITEM);
			moe_step<C>(tiles, rl, tiles + C::ITEM, b_offset, acc);
			tiles = tiles + C::LINE == ring_end ? ring : tiles + C::LINE;
			position -= C::KG;
		}
#pragma unroll
		for (int token0 = 0; token0 < C::TOKENS; token0 += C::RED) {
			if ((uint32_t)token0 >= rows)
				break;
			if (flushed)
				__syncthreads();
			flushed = true;
			moe_flush<C>(acc, red + warp * C::RED * C::ROW, token0, rows);
			__syncthreads();
			const uint32_t tokens = min(rows - token0, (uint32_t)C::RED);
			const bool owner = end >= top + kt_all;

			if constexpr (C::GATED) {
#pragma unroll 1
				for (uint32_t t = warp; t < tokens; t += C::WARPS)
					moe_reduce<C, 2>(a, u, share, task, red, token0, t, 0, lo, owner);
			} else {
#pragma unroll 1
				for (uint32_t i = warp; i < tokens * C::P; i += C::WARPS)
					moe_reduce<C, 1>(a, u, share, task, red, token0, i / C::P, i % C::P, lo,
							 owner);
			}
		}
		if (lo == begin)
			break;
	}
	grid_launch_dependents();
}

template <class C>
static int moe_decode_start(const moe_gemm_args &a, int sms, cudaStream_t stream)
{
	static bool ready; /* the same from every thread */

	if (!ready && cudaFuncSetAttribute(moe_decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM))
		return -EIO;
	ready = true;
	const uint64_t steps = (uint64_t)a.tasks_max * (a.k / 16) / C::KG;
	const uint32_t slot_blocks = EXL3_CUDA_WS_ZERO / (C::TOKENS * C::P * 512);
	uint32_t blocks = (uint32_t)sms * C::PER_SM;

	if (blocks > slot_blocks)
		blocks = slot_blocks;
	if (blocks > steps)
		blocks = (uint32_t)steps;
	return moe_start(moe_decode_kernel<C>, a.programmatic, dim3(blocks), C::THREADS, C::SMEM, stream, a);
}

template <int RATE2, int CB>
static int moe_decode_start_any(const moe_gemm_args &a, int sms, cudaStream_t stream)
{
	if (a.nr_proj == 2)
		return a.tile == 8 ? moe_decode_start<moe_cfg<RATE2, CB, 1, 2, true>>(a, sms, stream) :
				     moe_decode_start<moe_cfg<RATE2, CB, 2, 2, true>>(a, sms, stream);
	/* Short sums: fewer warps share one. */
	if (a.tile == 8 && a.k <= 768)
		return moe_decode_start<moe_cfg<RATE2, CB, 1, 4, false>>(a, sms, stream);
	return a.tile == 8 ? moe_decode_start<moe_cfg<RATE2, CB, 1, 2, false>>(a, sms, stream) :
			     moe_decode_start<moe_cfg<RATE2, CB, 2, 2, false>>(a, sms, stream);
}

} /* namespace exl3 */
#endif
