/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla.cuh - sparse MLA decode for 16 heads a CTA, with mma.sync: gather rows, online softmax, merge.
 *
 * Formula, work items, split and merge: mla_common.cuh. Cache rows bf16, f16 or e4m3; f32 accumulation.
 *
 *   warps 8..11   producers: rows into a ring of blocks of KB keys, 16-byte cp.async; each warp holds
 *                 the checked row offsets of its KB/4 keys of the next blocks in registers
 *   warps 0..3    group 0: even blocks     each group has its own max, sum and O and merges them
 *   warps 4..7    group 1: odd blocks      with the other group's at the end
 *
 * A group and a block, warp w = 0..3 of the group:
 *
 *            16 heads (M)                         S = Q K^T: warp w has dims w*D/4.., all keys; the
 *          [ Q in registers ]                     four partial sums meet in shared memory (part)
 *   KB    D                                       softmax: 128 threads, thread = (head, KB/8 keys)
 *   keys [ kv block in shared memory ]            O += P V: warp w has value dims w*Dv/4.., all keys
 *   (N)
 *
 *   time        | block j            | block j + 1          |
 *   group 0     | S part softmax P O | (waits for j + 2)
 *   group 1          | S part softmax P O |
 *   producers   blocks j + 2 .. j + STAGES - 1 in flight; a stage is free when its group has read V
 *
 * e4m3 rows stay e4m3 in shared memory and are converted to f16 fragments (exact); ldmatrix hands a
 * lane four adjacent dims for a k step, so Q's fragments are loaded in that order too.
 * Records (656 bytes) too: warp w's quarter is the block of 128 values that share factor w, and 16 of the
 * 64 bf16 dims. The factor multiplies S between the two products, and P before the values; P times factor
 * is kept in f16 relative to the largest power of two that the warp has met (`unit`), which O carries.
 * Rows take an odd number of 16-byte chunks (padded by one, a record has 41), so ldmatrix meets no bank twice.
 * Named barriers: 0 __syncthreads, 1 sync_mergers, 2 + group.
 */
#ifndef EXL3_KERNELS_CUDA_MLA_CUH
#define EXL3_KERNELS_CUDA_MLA_CUH

#include "kernels/cuda/mla_common.cuh"

namespace exl3_mla
{

/* DP, VP: capacities, multiples of 64 and 128; EXACT: they are the sizes. */
template <int CACHE, int DP_, int VP_, int STAGES_, bool EXACT_> struct config {
	static constexpr int DP = DP_, VP = VP_, KB = 32, STAGES = STAGES_;
	static constexpr int THREADS = 384, TILE_H = 16, PRODUCERS = 4; /* warps */
	static constexpr bool RECORD = CACHE == EXL3_E4M3_656;
	static constexpr bool EXACT = EXACT_, FP8 = CACHE == EXL3_E4M3 || RECORD, BF16 = CACHE == EXL3_BF16;
	static constexpr int ESIZE = FP8 ? 1 : 2;
	static constexpr int CHUNKS = (RECORD ? (int)EXL3_RECORD_BYTES : DP * ESIZE) / 16; /* of 16 bytes in a row */
	static constexpr int ROW = (CHUNKS | 1) * 16; /* bytes of a row in shared memory */
	static constexpr int KEYS_W =
		KB / PRODUCERS;                 /* keys that a producer warp loads per block */
	static constexpr int SET = 32 / KEYS_W; /* blocks per register set of offsets */
	static constexpr int LANES = CHUNKS % 8 && !RECORD ? 4 : 8; /* that copy a row together */
	static constexpr int KSTEPS = DP / 64;           /* k steps of 16 dims of a quarter; of a record: the last is bf16 */
	static constexpr int ROPE_CHUNK = EXL3_RECORD_VALUES / 16 + 1; /* of a record: its bf16 values */
	static constexpr int NT = KB / 8;                /* tiles of 8 keys */
	static constexpr int VW = VP / 4;                /* value dims of a warp */
	static constexpr int VT = VW / 8;
	static constexpr int PART = KB + 8;      /* words of a row of partial scores */
	static constexpr int PROW = KB * 2 + 16; /* bytes of a row of P */
	static constexpr int QROW = DP * 2 + 16; /* bytes of a row of Q on its way to registers */
	static_assert(DP % 64 == 0 && VP % 128 == 0, "tile sizes");
	static_assert(!RECORD || (EXACT && DP == EXL3_RECORD_DIM && VP == EXL3_RECORD_VALUES && KB == 32 &&
				  VW == EXL3_RECORD_BLOCK),
		      "records");
	static_assert(NT == 4 && VT % 4 == 0, "fragments of a warp");
	static_assert(TILE_H * QROW <= 2 * TILE_H * (4 * PART * 4 + PROW), "q fits part and p");
	using merger_type = merger<TILE_H, VP>;
	static constexpr int OROW = VP + 8; /* words of a row of O */
	static_assert(STAGES * KB * ROW >= 2 * TILE_H * OROW * 4, "both groups' O fit the stages");
};

/* Max and sum of a row over both groups, and the groups' weights. */
struct alignas(16) row_sum {
	float m, l, w0, w1;
};

template <class C> struct shared {
	alignas(128) uint8_t stage[C::STAGES][C::KB][C::ROW]; /* at the end: O of both groups */
	alignas(16) uint8_t recv[C::merger_type::recv_bytes()];
	alignas(16) float part[2][4][C::TILE_H][C::PART]; /* group, quarter */
	alignas(16) uint8_t p[2][C::TILE_H][C::PROW];
	float alpha[2][C::TILE_H];
	float ml[2][2][C::TILE_H]; /* group; max (log2 units) and sum */
	row_sum rows[C::TILE_H];
	merge_shared<C::TILE_H> merge;
	alignas(8) uint64_t full[C::STAGES], empty[C::STAGES], merged;
	uint8_t valid[C::STAGES][C::PRODUCERS]; /* bit k: key k of that producer warp exists */
};

__device__ __forceinline__ void sync_group(int group)
{
	asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

/*
 * Q on its way: copied to shared memory as it is (f32: see below), zeros for heads past the last and
 * dims past dim. Uses part and p, before their first use. Loops stay rolled: code that runs once costs
 * its fetch from L2.
 */
template <class C>
__device__ __forceinline__ void request_q(shared<C> &sm, const uint8_t *q, uint32_t dtype,
					  uint32_t heads, uint32_t dim, int t)
{
	constexpr uint32_t PER_ROW = C::DP / 8;

	if (dtype == EXL3_F32)
		return;
#pragma unroll 1
	for (uint32_t u = t; u < C::TILE_H * PER_ROW; u += MERGERS) {
		const uint32_t head = u / PER_ROW, d = u % PER_ROW * 8;
		const bool in = head < heads && d < dim;

		cp_async16(smem_addr((uint8_t *)sm.part + head * C::QROW + d * 2),
			   in ? q + ((size_t)head * dim + d) * 2 : q, in ? 16 : 0);
	}
	cp_async_commit();
}

/* Q in the MMA type, in fragments for one quarter of the dims. */
template <class C>
__device__ __forceinline__ void load_q(shared<C> &sm, uint32_t (&qf)[C::KSTEPS][4],
				       const uint8_t *q, uint32_t dtype, uint32_t heads,
				       uint32_t dim, int w, int t)
{
	constexpr uint32_t PER_ROW = C::DP / 8, ALL = C::TILE_H * PER_ROW;
	const int lane = t & 31;
	uint8_t *stage = (uint8_t *)sm.part;

	cp_async_wait<0>();
	/* Each thread converts what it has copied itself. */
	if (C::RECORD || dtype != (C::BF16 ? EXL3_BF16 : EXL3_F16)) {
#pragma unroll 1
		for (uint32_t u = t; u < ALL; u += MERGERS) {
			const uint32_t head = u / PER_ROW, d = u % PER_ROW * 8;
			uint8_t *at = stage + head * C::QROW + d * 2;
			uint4 v = make_uint4(0, 0, 0, 0);

			/* Of a record's q the last 64 dims meet bf16. */
			const bool bf16 = C::RECORD && d >= EXL3_RECORD_VALUES;
			const uint8_t *from = dtype == EXL3_F32 ? q + (size_t)head * dim * 4 + d * 4 : at;

			if (dtype != EXL3_F32 || (head < heads && d < dim))
				v = bf16 ? load_q8<true>(from, dtype, 0) : load_q8<C::BF16>(from, dtype, 0);
			*(uint4 *)at = v;
		}
	}
	sync_mergers();
#pragma unroll
	for (int ks = 0; ks < C::KSTEPS; ks++) {
		const bool rope = C::RECORD && ks == C::KSTEPS - 1;
		const uint32_t d0 = !C::RECORD ? (w * C::KSTEPS + ks) * 16 :
				    rope       ? EXL3_RECORD_VALUES + w * 16 :
						 w * EXL3_RECORD_BLOCK + ks * 16;

		if (C::FP8 && !rope) {
			/* k slots (2q, 2q+1, 2q+8, 2q+9) of a lane are the four adjacent dims 4q.. */
			const uint8_t *at =
				stage + (lane >> 2) * C::QROW + (d0 + 4 * (lane & 3)) * 2;
			const uint2 a = *(const uint2 *)at, b = *(const uint2 *)(at + 8 * C::QROW);

			qf[ks][0] = a.x;
			qf[ks][1] = b.x;
			qf[ks][2] = a.y;
			qf[ks][3] = b.y;
		} else {
			ldmatrix4(qf[ks], smem_addr(stage) + (lane & 15) * C::QROW +
						  (d0 + (lane >> 4) * 8) * 2);
		}
	}
	sync_mergers();
}

/* Fills the ring. Copies arrive by themselves; one more arrival per warp publishes `valid`. */
template <class C>
__device__ __forceinline__ void produce(shared<C> &sm, selection<C> &sel, const uint8_t *cache,
					uint32_t blocks, uint32_t row_chunks, int warp, int lane)
{
	uint32_t stage = 0, round = 0;

	for (uint32_t j = 0; j < blocks; j++) {
		const uint32_t mask = sel.advance(j, warp, lane);

		if (round)
			mbar_wait(smem_addr(&sm.empty[stage]), (round - 1) & 1);
		const uint32_t bar = smem_addr(&sm.full[stage]);

#pragma unroll
		for (int r = 0; r < C::KEYS_W; r += 32 / C::LANES) {
			/* LANES lanes a row: every step copies whole lines of it. */
			const uint32_t k = r + lane / C::LANES, c = lane % C::LANES;
			uint32_t bytes;
			const uint8_t *src = sel.row(cache, j, k, bytes) + c * 16;
			const uint32_t dst =
				smem_addr(sm.stage[stage][warp * C::KEYS_W + k]) + c * 16;

			if constexpr (C::EXACT) {
#pragma unroll
				for (int i = 0; i < (C::CHUNKS + C::LANES - 1) / C::LANES; i++)
					if (C::CHUNKS % C::LANES == 0 || i * C::LANES + c < C::CHUNKS)
						cp_async16(dst + i * C::LANES * 16,
							   src + i * C::LANES * 16, bytes);
			} else {
				for (uint32_t i = 0; c + i < row_chunks; i += C::LANES)
					cp_async16(dst + i * 16, bytes ? src + i * 16 : cache,
						   bytes);
			}
		}
		mbar_arrive_copies(bar);
		if (lane == 0) {
			sm.valid[stage][warp] = (uint8_t)mask;
			mbar_arrive(bar);
		}
		if (++stage == C::STAGES) {
			stage = 0;
			round++;
		}
	}
	cp_async_commit();
	cp_async_wait<0>();
}

/* Factor of a record's block @w of values. */
template <class C>
__device__ __forceinline__ float factor_of(const shared<C> &sm, uint32_t stage, int key, int w)
{
	return *(const float *)&sm.stage[stage][key][EXL3_RECORD_VALUES + w * 4];
}

/* S times the keys' factors. */
template <class C>
__device__ __forceinline__ void apply_factor(const shared<C> &sm, float (&s)[C::NT][4], uint32_t stage, int w, int lane)
{
#pragma unroll
	for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
		for (int i = 0; i < 2; i++) {
			const float f = factor_of<C>(sm, stage, nt * 8 + 2 * (lane & 3) + i, w);

			s[nt][i] *= f;
			s[nt][2 + i] *= f;
		}
}

/* A running power of two: the largest that a factor of this block, or of one before, reaches. */
template <class C>
__device__ __forceinline__ float next_unit(const shared<C> &sm, float unit, uint32_t stage, int w, int lane)
{
	const uint32_t top = __reduce_max_sync(~0u, __float_as_uint(fabsf(factor_of<C>(sm, stage, lane, w))));

	/* Kept where its inverse is a normal number too. */
	return fmaxf(unit, __uint_as_float(min(max(top >> 23, 1u), 252u) << 23));
}

/* Two factors, relative to the unit. */
template <class C>
__device__ __forceinline__ uint32_t factors_of(const shared<C> &sm, float inverse, uint32_t stage, int key, int w)
{
	return pack2<false>(factor_of<C>(sm, stage, key, w) * inverse, factor_of<C>(sm, stage, key + 1, w) * inverse);
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b)
{
	const __half2 h = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);

	return *(const uint32_t *)&h;
}

/* This warp's part of S: a quarter of the dims. */
template <class C>
__device__ __forceinline__ void scores(shared<C> &sm, const uint32_t (&qf)[C::KSTEPS][4],
				       uint32_t stage, int group, int w, int lane)
{
	float s[C::NT][4] = {};
	const uint32_t base = smem_addr(sm.stage[stage]);

#pragma unroll
	for (int ks = 0; ks < C::KSTEPS; ks++) {
		const bool rope = C::RECORD && ks == C::KSTEPS - 1;
		uint32_t b[4];

		if (rope)
			apply_factor<C>(sm, s, stage, w, lane);
		if (C::FP8 && !rope) {
			/* One 16-byte chunk is one k step; a matrix is 8 keys of it. */
			ldmatrix4(b, base + lane * C::ROW +
					     (C::RECORD ? w * 8 + ks : w * C::KSTEPS + ks) * 16);
#pragma unroll
			for (int nt = 0; nt < C::NT; nt++) {
				uint32_t lo, hi;

				e4m3x4_to_f16x2(b[nt], lo, hi);
				mma16816<false>(s[nt], qf[ks], lo, hi);
			}
		} else {
#pragma unroll
			for (int nt = 0; nt < C::NT; nt += 2) {
				const int row = nt * 8 + (lane >> 4) * 8 + (lane & 7);
				const int chunk = (C::RECORD ? C::ROPE_CHUNK + w * 2 :
							       (w * C::KSTEPS + ks) * 2) +
						  ((lane >> 3) & 1);

				ldmatrix4(b, base + row * C::ROW + chunk * 16);
				mma16816<C::BF16 || C::RECORD>(s[nt], qf[ks], b[0], b[1]);
				mma16816<C::BF16 || C::RECORD>(s[nt + 1], qf[ks], b[2], b[3]);
			}
		}
	}
	const int g = lane >> 2, l4 = lane & 3;

#pragma unroll
	for (int nt = 0; nt < C::NT; nt++) {
		*(float2 *)&sm.part[group][w][g][nt * 8 + 2 * l4] = make_float2(s[nt][0], s[nt][1]);
		*(float2 *)&sm.part[group][w][g + 8][nt * 8 + 2 * l4] =
			make_float2(s[nt][2], s[nt][3]);
	}
}

/* Thread (head, 4 keys): sums the quarters, updates running max and sum, writes P and alpha. */
template <class C>
__device__ __forceinline__ void softmax(shared<C> &sm, uint32_t stage, int group, float scale_log2,
					float &m, float &l, int t)
{
	const int row = t >> 3, key = (t & 7) * 4;
	const uint32_t valid = sm.valid[stage][key / C::KEYS_W] >> (key % C::KEYS_W);
	float s[4] = {};

#pragma unroll
	for (int w = 0; w < 4; w++) {
		const float4 v = *(const float4 *)&sm.part[group][w][row][key];

		s[0] += v.x;
		s[1] += v.y;
		s[2] += v.z;
		s[3] += v.w;
	}
	float top = -CUDART_INF_F;

#pragma unroll
	for (int i = 0; i < 4; i++) {
		s[i] = (valid >> i) & 1 ? s[i] * scale_log2 : -CUDART_INF_F;
		top = fmaxf(top, s[i]);
	}
#pragma unroll
	for (int d = 4; d; d >>= 1)
		top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
	top = fmaxf(top, m);
	const float base = exponent_base(top), alpha = exp2_fast(m - base);
	float sum = 0.0f;

	m = top;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		s[i] = exp2_fast(s[i] - base);
		sum += s[i];
	}
	l = l * alpha + sum;
	*(uint2 *)&sm.p[group][row][key * 2] =
		make_uint2(pack2<C::BF16>(s[0], s[1]), pack2<C::BF16>(s[2], s[3]));
	if ((t & 7) == 0)
		sm.alpha[group][row] = alpha;
}

/* O = alpha O + P V for this warp's dims. Tile pairs of e4m3 hold even and odd dims. */
template <class C>
__device__ __forceinline__ void values(shared<C> &sm, float (&o)[C::VT][4], float &unit, uint32_t stage,
				       int group, int w, int lane)
{
	float a0 = sm.alpha[group][lane >> 2], a1 = sm.alpha[group][(lane >> 2) + 8], inverse = 1.0f;

	if constexpr (C::RECORD) {
		const float now = next_unit<C>(sm, unit, stage, w, lane);

		inverse = 1.0f / now;
		a0 *= unit * inverse;
		a1 *= unit * inverse;
		unit = now;
	}

	/* The maximum seldom moves after the first blocks. NaN compares unequal. */
	if (__any_sync(~0u, !(a0 == 1.0f && a1 == 1.0f))) {
#pragma unroll
		for (int vt = 0; vt < C::VT; vt++) {
			o[vt][0] *= a0;
			o[vt][1] *= a0;
			o[vt][2] *= a1;
			o[vt][3] *= a1;
		}
	}
	const uint32_t pbase = smem_addr(sm.p[group]) + (lane & 15) * C::PROW + (lane >> 4) * 16;

#pragma unroll
	for (int ks = 0; ks < C::KB / 16; ks++) {
		uint32_t p[4];

		ldmatrix4(p, pbase + ks * 32);
		if constexpr (C::RECORD) {
			const int key = ks * 16 + 2 * (lane & 3);
			const uint32_t lo = factors_of<C>(sm, inverse, stage, key, w);
			const uint32_t hi = factors_of<C>(sm, inverse, stage, key + 8, w);

			p[0] = mul_f16x2(p[0], lo);
			p[1] = mul_f16x2(p[1], lo);
			p[2] = mul_f16x2(p[2], hi);
			p[3] = mul_f16x2(p[3], hi);
		}
		const uint32_t base = smem_addr(sm.stage[stage][ks * 16 + (lane & 15)]) +
				      w * C::VW * C::ESIZE + (lane >> 4) * 16;

#pragma unroll
		for (int vt = 0; vt < C::VT; vt += C::FP8 ? 4 : 2) {
			uint32_t b[4];

			ldmatrix4_trans(b, base + vt * 8 * C::ESIZE);
			if constexpr (C::FP8) {
#pragma unroll
				for (int i = 0; i < 4; i += 2) {
					/* Bytes (key, dim) 00 01 10 11 to 00 10 01 11: pairs of keys. */
					const uint32_t x0 = __byte_perm(b[i], 0, 0x3120);
					const uint32_t x1 = __byte_perm(b[i + 1], 0, 0x3120);

					uint32_t l0, h0, l1, h1;

					e4m3x4_to_f16x2(x0, l0, h0);
					e4m3x4_to_f16x2(x1, l1, h1);
					mma16816<false>(o[vt + i], p, l0, l1);
					mma16816<false>(o[vt + i + 1], p, h0, h1);
				}
			} else {
				mma16816<C::BF16>(o[vt], p, b[0], b[1]);
				mma16816<C::BF16>(o[vt + 1], p, b[2], b[3]);
			}
		}
	}
}

/* A group's blocks. m, l: running max and sum of head t >> 3, the sum of this thread's keys only. */
template <class C>
__device__ __forceinline__ void consume(shared<C> &sm, const uint32_t (&qf)[C::KSTEPS][4],
					float (&o)[C::VT][4], float &unit, float &m, float &l,
					uint32_t blocks, float scale_log2, int group, int t)
{
	const int w = t >> 5, lane = t & 31;
	uint32_t stage = group, round = 0; /* STAGES >= 2 */

	for (uint32_t j = group; j < blocks; j += 2) {
		mbar_wait(smem_addr(&sm.full[stage]), round & 1);
		scores<C>(sm, qf, stage, group, w, lane);
		sync_group(group);
		softmax<C>(sm, stage, group, scale_log2, m, l, t);
		sync_group(group);
		values<C>(sm, o, unit, stage, group, w, lane);
		__syncwarp();
		if (lane == 0)
			mbar_arrive(smem_addr(&sm.empty[stage]));
		stage += 2;
		if (stage >= C::STAGES) {
			stage -= C::STAGES;
			round++;
		}
	}
}

/* A group's O fragments to shared memory as [16][OROW] f32. */
template <class C>
__device__ __forceinline__ void spill_o(float *osm, const float (&o)[C::VT][4], int w, int lane)
{
	const int g = lane >> 2, l4 = lane & 3;
	float *at = osm + g * C::OROW + w * C::VW + (C::FP8 ? 4 : 2) * l4;

#pragma unroll
	for (int vt = 0; vt < C::VT; vt += C::FP8 ? 2 : 1) {
#pragma unroll
		for (int r = 0; r < 2; r++) {
			if constexpr (C::FP8)
				*(float4 *)(at + r * 8 * C::OROW + vt * 8) =
					make_float4(o[vt][2 * r], o[vt + 1][2 * r],
						    o[vt][2 * r + 1], o[vt + 1][2 * r + 1]);
			else
				*(float2 *)(at + r * 8 * C::OROW + vt * 8) =
					make_float2(o[vt][2 * r], o[vt][2 * r + 1]);
		}
	}
}

template <class C> __device__ __forceinline__ row_sum sum_groups(const shared<C> &sm, int row)
{
	const float m0 = sm.ml[0][0][row], m1 = sm.ml[1][0][row];
	row_sum s;

	s.m = fmaxf(m0, m1);
	const float base = exponent_base(s.m);

	s.w0 = exp2_fast(m0 - base);
	s.w1 = exp2_fast(m1 - base);
	s.l = s.w0 * sm.ml[0][1][row] + s.w1 * sm.ml[1][1][row];
	return s;
}

/* Both groups' O become one and go to the caller, or to the ranks of the cluster. */
template <class C>
__device__ __forceinline__ void deliver(shared<C> &sm, const params &p, const target &to,
					const float (&o)[C::VT][4], int group, int t)
{
	constexpr int PER_ROW = C::VP / 4; /* units of four dims */
	const typename C::merger_type mg(sm.merge, (float *)sm.recv, smem_addr(&sm.merged), p);
	float *osm = (float *)sm.stage;
	const int u0 = group * 128 + t;

	sync_mergers(); /* both groups are done with the stages */
	if (u0 < C::TILE_H) {
		const row_sum s = sum_groups<C>(sm, u0);

		sm.rows[u0] = s;
		if (p.splits == 1)
			to.store_lse(u0, s.m, s.l);
	}
	spill_o<C>(osm + group * C::TILE_H * C::OROW, o, t >> 5, t & 31);
	if (p.cluster > 1)
		cluster_wait(); /* all mbarriers are ready */
	sync_mergers();
	if (p.splits > 1 && u0 / C::TILE_H < (int)p.cluster) {
		const row_sum s = sm.rows[u0 % C::TILE_H];

		mg.push_ml(u0 / C::TILE_H, u0 % C::TILE_H, s.m, s.l);
	}
	const auto merged = [&](int row, int d) {
		const row_sum s = sm.rows[row];
		float4 v = make_float4(0, 0, 0, 0);

		fma4(v, s.w0, *(const float4 *)(osm + row * C::OROW + d));
		fma4(v, s.w1, *(const float4 *)(osm + (C::TILE_H + row) * C::OROW + d));
		return v;
	};

	if (p.splits == 1) {
#pragma unroll 4
		for (int u = u0; u < C::TILE_H * PER_ROW; u += MERGERS) {
			const int row = u / PER_ROW, d = u % PER_ROW * 4;
			const float4 v = merged(row, d);
			const float f = to.factor(sm.rows[row].l);

			to.store4(row, d, make_float4(v.x * f, v.y * f, v.z * f, v.w * f));
		}
		return;
	}
	/* A thread has the same dims in all its rows, so one destination, where rows divide evenly. */
	uint32_t bar, at = mg.slot(u0 % PER_ROW / 4, bar);

#pragma unroll 4
	for (int u = u0; u < C::TILE_H * PER_ROW; u += MERGERS) {
		const int row = u / PER_ROW, d = u % PER_ROW * 4;
		const float4 v = merged(row, d);

		if (MERGERS % PER_ROW)
			at = mg.slot(d / 16, bar);
		push4(at + (row * 16 + d % 16) * 4, bar, v.x, v.y, v.z, v.w);
	}
	mg.finish(to, u0);
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) kernel(const __grid_constant__ params p)
{
	extern __shared__ __align__(128) uint8_t smem_raw[];
	shared<C> &sm = *reinterpret_cast<shared<C> *>(smem_raw);
	const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
	const uint32_t item = blockIdx.x, split = blockIdx.y;
	const uint32_t query = p.head_tiles == 1 ? item : item / p.head_tiles;
	const uint32_t tile = item - query * p.head_tiles;
	const struct exl3_cuda_mla_entry &e = p.entries[entry_of(p, query)];
	const uint32_t row = query - e.first, dim = C::EXACT ? C::DP : p.dim;
	const extent keys = extent_of(p, e, row, split, sm.alpha[0][0]);
	const uint32_t blocks = (keys.end - keys.begin + C::KB - 1) / C::KB;
	const uint32_t heads = min(p.heads - tile * C::TILE_H, (uint32_t)C::TILE_H);
	const uint8_t *q = (const uint8_t *)e.q + (size_t)row * e.q_stride +
			   (size_t)tile * C::TILE_H * dim * (e.q_dtype == EXL3_F32 ? 4 : 2);
	selection<C> sel;

	if (warp >= 8) {
		sel.init(e, row, keys.begin, keys.end);
		sel.bad = split == 0 && threadIdx.x == 256 ? keys.bad : 0;
		sel.fetch(0, warp - 8, lane);
	} else {
		request_q<C>(sm, q, e.q_dtype, heads, dim, threadIdx.x);
	}
	if (threadIdx.x < C::STAGES) {
		mbar_init(smem_addr(&sm.full[threadIdx.x]), C::PRODUCERS * 33);
		mbar_init(smem_addr(&sm.empty[threadIdx.x]), 4);
	}
	if (threadIdx.x == 32 && p.splits > 1)
		C::merger_type::expect(smem_addr(&sm.merged), p);
	if constexpr (!C::EXACT) {
		/* Columns past dim are never loaded; zeros there keep NaN out of S. */
		for (uint32_t i = threadIdx.x; i < sizeof(sm.stage) / 16; i += C::THREADS)
			((uint4 *)sm.stage)[i] = make_uint4(0, 0, 0, 0);
	}
	__syncthreads();
	if (p.cluster > 1)
		cluster_arrive(); /* our mbarrier is ready; waited for before the first push */
	if (warp >= 8) {
		produce<C>(sm, sel, (const uint8_t *)e.cache, blocks, dim * C::ESIZE / 16, warp - 8,
			   lane);
		sel.report(e, tile, lane);
		return; /* cluster barriers do not wait for threads that have exited */
	}
	const int group = warp >> 2, t = threadIdx.x & 127;
	const float scale_log2 = e.scale * e.kv_scale * 1.4426950408889634f;
	uint32_t qf[C::KSTEPS][4];
	float o[C::VT][4] = {};
	float m = -CUDART_INF_F, l = 0.0f, unit = 0.0f;

	load_q<C>(sm, qf, q, e.q_dtype, heads, dim, warp & 3, threadIdx.x);
	consume<C>(sm, qf, o, unit, m, l, blocks, scale_log2, group, t);
	if constexpr (C::RECORD) {
#pragma unroll
		for (int i = 0; i < C::VT * 4; i++)
			o[i / 4][i % 4] *= unit;
	}
#pragma unroll
	for (int d = 4; d; d >>= 1)
		l += __shfl_xor_sync(~0u, l, d);
	if ((t & 7) == 0) {
		sm.ml[group][0][t >> 3] = m;
		sm.ml[group][1][t >> 3] = l;
	}
	target to;

	to.init(p, e, row, tile, C::TILE_H);
	deliver<C>(sm, p, to, o, group, t);
}

} // namespace exl3_mla

/* Defines exl3_mla::NAME, an instance; key_ns as measured on H200 with few CTAs. */
#define EXL3_MLA_INSTANTIATE(name, cache, dp, vp, stages, exact, key_ns) \
	namespace exl3_mla                                               \
	{                                                                \
	using name##_config = config<cache, dp, vp, stages, exact>;      \
	extern const instance name;                                      \
	const instance name = {(const void *)kernel<name##_config>,      \
			       sizeof(shared<name##_config>),            \
			       cache,                                    \
			       dp,                                       \
			       vp,                                       \
			       16,                                       \
			       384,                                      \
			       exact,                                    \
			       key_ns,                                   \
			       5000.0f,                                  \
			       1000.0f};                                 \
	}

#endif
