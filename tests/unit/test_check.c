/* SPDX-License-Identifier: Apache-2.0 */
/* test_check.c - every rule for a submission entry: the last value that is right, the first that is not. */
#include "tests/test.h"

#include "daemon/check.h"

#include <math.h>

/* A client with three buffers, a linear (k 200 of 256, n 300 of 384), experts, a dense MLP, a geometry. */
#define BUF_BYTES  (1u << 20)
#define H_LINEAR   11u
#define H_MOE      12u
#define H_MLP      13u
#define H_MLA      14u
#define H_UNLOADED 20u
#define H_UNGATED  15u
#define K          200u
#define N          300u

static char memory[3][4096]; /* addresses only: nothing is read */
static struct exl3_buffer buffers[4];
static struct exl3_matrix matrix;
static struct exl3_expert gated = {.gate = &matrix, .up = &matrix, .down = &matrix};
static struct exl3_expert ungated = {.up = &matrix, .down = &matrix};

static const struct exl3_module_desc linear = {
	.kind = EXL3_MOD_LINEAR, .k = 256, .n = 384, .k_log = K, .n_log = N};
static const struct exl3_module_desc moe = {.kind = EXL3_MOD_MOE,
					    .k = 256,
					    .n = 256,
					    .k_log = K,
					    .n_log = K,
					    .experts = &gated,
					    .nr_experts = 1,
					    .act = EXL3_ACT_SILU,
					    .limit = 7,
					    .routed_scale = 2};
static const struct exl3_module_desc mlp = {.kind = EXL3_MOD_MLP,
					    .k = 256,
					    .n = 256,
					    .k_log = K,
					    .n_log = K,
					    .experts = &gated,
					    .nr_experts = 1,
					    .act = EXL3_ACT_GELU,
					    .routed_scale = 1};
static const struct exl3_module_desc ungated_mlp = {.kind = EXL3_MOD_MLP,
						    .k = 256,
						    .n = 256,
						    .k_log = K,
						    .n_log = K,
						    .experts = &ungated,
						    .nr_experts = 1,
						    .act = EXL3_ACT_RELU2,
						    .routed_scale = 1};
static struct exl3_mla_geometry geometry = {.heads = 4,
					    .dim = 64,
					    .value_dim = 32,
					    .topk = 8,
					    .slots = 100,
					    .cache_dtype = EXL3_F16,
					    .indices_dtype = EXL3_I32};
static const struct exl3_kernel kernels[] = {
	{.name = "a", .op = EXL3_OP_LINEAR}, {.name = "b", .op = EXL3_OP_MOE},
	{.name = "c", .op = EXL3_OP_LINEAR, .candidate = true}, {0}};

static struct exl3_buffer *buffer(void *arg, uint32_t id)
{
	(void)arg;
	return id >= 1 && id <= 3 ? &buffers[id] : NULL;
}

static int target(void *arg, uint32_t handle, struct exl3_target *ret)
{
	(void)arg;
	*ret = (struct exl3_target){0};
	switch (handle) {
	case H_LINEAR:
		ret->desc = &linear;
		return 0;
	case H_MOE:
		ret->desc = &moe;
		return 0;
	case H_MLP:
		ret->desc = &mlp;
		return 0;
	case H_UNGATED:
		ret->desc = &ungated_mlp;
		return 0;
	case H_MLA:
		ret->mla = &geometry;
		return 0;
	case H_UNLOADED:
		return -ESTALE;
	default:
		return -ENOENT;
	}
}

static const struct exl3_check_env env = {
	.buffer = buffer, .extent = exl3_buffer_extent, .target = target, .kernels = {{kernels, 3}}};

static int setup(void **state)
{
	struct exl3_error err;

	(void)state;
	for (int i = 1; i <= 3; i++)
		buffers[i] =
			(struct exl3_buffer){.base = {memory[i - 1]}, .bytes = BUF_BYTES, .refs = 1};
	test_code(exl3_check_geometry(&geometry, &err), 0, &err);
	return 0;
}

/* ---- entries that are right; each case spoils one field ---- */

static struct exl3_sqe good_linear(void)
{
	return (struct exl3_sqe){.op = EXL3_OP_LINEAR,
				 .x_dtype = EXL3_F16,
				 .y_dtype = EXL3_F32,
				 .module = H_LINEAR,
				 .rows = 3,
				 .x = EXL3_REF(1, 0),
				 .y = EXL3_REF(2, 0)};
}

static struct exl3_sqe good_moe(void)
{
	struct exl3_sqe s = good_linear();

	s.op = EXL3_OP_MOE;
	s.module = H_MOE;
	s.u.moe.ids = EXL3_REF(3, 0);
	s.u.moe.weights = EXL3_REF(3, 4096);
	s.u.moe.topk = 2;
	s.u.moe.ids_dtype = EXL3_I32;
	s.u.moe.weights_dtype = EXL3_F32;
	return s;
}

static struct exl3_sqe good_mlp(void)
{
	struct exl3_sqe s = good_linear();

	s.op = EXL3_OP_MLP;
	s.module = H_MLP;
	return s;
}

static struct exl3_sqe good_mla(void)
{
	struct exl3_sqe s = good_linear();

	s.op = EXL3_OP_MLA_DECODE;
	s.module = H_MLA;
	s.u.mla.cache = EXL3_REF(3, 0);
	s.u.mla.indices = EXL3_REF(3, 65536);
	s.u.mla.lse = EXL3_REF(2, 65536);
	s.u.mla.scale = 0.125f;
	s.u.mla.kv_scale = 1;
	return s;
}

static struct exl3_sqe good_nop(void)
{
	return (struct exl3_sqe){.op = EXL3_OP_NOP, .user_data = 1, .deadline_ns = 1};
}

static struct exl3_sqe good_cancel(void)
{
	return (struct exl3_sqe){.op = EXL3_OP_CANCEL, .user_data = 1, .u.cancel.user_data = 2};
}

/* One function per change would bury the table: the changes are numbered in one switch instead. */
enum {
	NONE,
	RES0,
	RES1,
	FLAG,
	FLAG_STORED,
	FLAG_DET,
	HANDLE,
	UNLOADED,
	KIND,
	X_DTYPE,
	Y_DTYPE,
	ROWS0,
	ROWS_MAX,
	ROWS_OVER,
	X_NONE,
	X_NOBUF,
	X_ALIGN,
	X_END,
	X_PAST,
	X_FAR,
	STRIDE_SMALL,
	STRIDE_OK,
	STRIDE_ODD,
	STRIDE_HUGE,
	Y_STRIDE_SMALL,
	Y_PAST,
	SAME,
	ABUT,
	OVERLAP_BYTE,
	INTERLEAVED,
	INTERLEAVED_BAD,
	U_SET,
	KERNEL_OK,
	KERNEL_OTHER,
	KERNEL_CANDIDATE,
	KERNEL_PAST,
	IDS_NONE,
	IDS_DTYPE,
	W_DTYPE,
	TOPK0,
	TOPK_MAX,
	TOPK_OVER,
	IDS_IN_Y,
	W_IN_Y,
	ACT_OVER,
	ACT_RELU2,
	OVERRIDES,
	LIMIT_NAN,
	LIMIT_NEG,
	LIMIT_UNUSED,
	SCALE_INF,
	MOE_RES,
	MLP_TOPK,
	MLP_SCALE,
	GATE,
	MLA_RES,
	LENGTHS,
	LENGTHS_PAST,
	LENGTHS_IN_O,
	LENGTHS_IN_LSE,
	MLA_SCALE,
	CACHE_NONE,
	CACHE_PAST,
	INDICES_PAST,
	LSE_NONE,
	LSE_IN_O,
	CACHE_IN_O,
	LSE_IN_Q,
	NOP_X,
	NOP_U,
	NOP_FLAGS,
	STREAM,
	CANCEL_U,
	OPCODE,
	OPCODE_MAX
};

static void change(struct exl3_sqe *s, int what)
{
	switch (what) {
	case RES0:
		s->reserved0 = 1;
		break;
	case RES1:
		s->stream_seq = 1;
		break;
	case FLAG:
		s->flags = EXL3_SQE_FLAGS + 1;
		break;
	case FLAG_STORED:
		s->flags = EXL3_STORED;
		break;
	case FLAG_DET:
		s->flags = EXL3_DETERMINISTIC;
		break;
	case HANDLE:
		s->module = 99;
		break;
	case UNLOADED:
		s->module = H_UNLOADED;
		break;
	case KIND:
		s->module = s->module == H_LINEAR ? H_MOE : H_LINEAR;
		break;
	case X_DTYPE:
		s->x_dtype = EXL3_I32;
		break;
	case Y_DTYPE:
		s->y_dtype = EXL3_E4M3;
		break;
	case ROWS0:
		s->rows = 0;
		break;
	case ROWS_MAX:
		s->rows = EXL3_M_MAX;
		s->x_stride = s->y_stride = 0;
		break;
	case ROWS_OVER:
		s->rows = EXL3_M_MAX + 1;
		break;
	case X_NONE:
		s->x = EXL3_REF_NONE;
		break;
	case X_NOBUF:
		s->x = EXL3_REF(9, 0);
		break;
	case X_ALIGN:
		s->x = EXL3_REF(1, 8);
		break;
	/* x: 3 rows of 200 f16, 400 bytes each, 1200 in all */
	case X_END:
		s->x = EXL3_REF(1, BUF_BYTES - 1200);
		break;
	case X_PAST:
		s->x = EXL3_REF(1, BUF_BYTES - 1200 + 16);
		break;
	case X_FAR:
		s->x = EXL3_REF(1, 0xfffffffffff0ull);
		break;
	case STRIDE_SMALL:
		s->x_stride = 384;
		break;
	case STRIDE_OK:
		s->x_stride = 416;
		break;
	case STRIDE_ODD:
		s->x_stride = 408;
		break;
	case STRIDE_HUGE:
		s->x_stride = 0xfffffff0u;
		break;
	case Y_STRIDE_SMALL:
		s->y_stride = 1184;
		break;
	/* y: 3 rows of 300 f32, 1200 bytes each */
	case Y_PAST:
		s->y = EXL3_REF(2, BUF_BYTES - 3600 + 16);
		break;
	case SAME:
		s->y = s->x;
		break;
	case ABUT:
		s->y = EXL3_REF(1, 1200);
		break;
	case OVERLAP_BYTE:
		s->y = EXL3_REF(1, 1184);
		break;
	case INTERLEAVED:
		s->x_stride = s->y_stride = 1616;
		s->y = EXL3_REF(1, 400);
		break;
	case INTERLEAVED_BAD:
		s->x_stride = s->y_stride = 1600;
		s->y = EXL3_REF(1, 416);
		break;
	case U_SET:
		s->u.words[7] = 1;
		break;
	case KERNEL_OK:
		s->kernel = 1;
		break;
	case KERNEL_OTHER:
		s->kernel = 2;
		break;
	case KERNEL_CANDIDATE:
		s->kernel = 3;
		break;
	case KERNEL_PAST:
		s->kernel = 4;
		break;
	case IDS_NONE:
		s->u.moe.ids = EXL3_REF_NONE;
		break;
	case IDS_DTYPE:
		s->u.moe.ids_dtype = EXL3_F32;
		break;
	case W_DTYPE:
		s->u.moe.weights_dtype = EXL3_I64;
		break;
	case TOPK0:
		s->u.moe.topk = 0;
		break;
	case TOPK_MAX:
		s->u.moe.topk = EXL3_TOPK_MAX;
		break;
	case TOPK_OVER:
		s->u.moe.topk = EXL3_TOPK_MAX + 1;
		break;
	case IDS_IN_Y:
		s->u.moe.ids = EXL3_REF(2, 16);
		break;
	case W_IN_Y:
		s->u.moe.weights = EXL3_REF(2, 2384);
		break;
	case ACT_OVER:
		s->u.moe.act = EXL3_ACT_NR;
		break;
	case ACT_RELU2:
		s->u.moe.act = EXL3_ACT_RELU2;
		break;
	case OVERRIDES:
		s->u.moe.overrides = 4;
		break;
	case LIMIT_NAN:
		s->u.moe.limit = NAN;
		s->u.moe.overrides = EXL3_MOE_LIMIT;
		break;
	case LIMIT_NEG:
		s->u.moe.limit = -1;
		s->u.moe.overrides = EXL3_MOE_LIMIT;
		break;
	case LIMIT_UNUSED:
		s->u.moe.limit = -1;
		break; /* not named in overrides: not looked at */
	case SCALE_INF:
		s->u.moe.routed_scale = INFINITY;
		s->u.moe.overrides = EXL3_MOE_SCALE;
		break;
	case MOE_RES:
		s->u.moe.reserved[5] = 1;
		break;
	case MLP_TOPK:
		s->u.moe.topk = 1;
		break;
	case MLP_SCALE:
		s->u.moe.overrides = EXL3_MOE_SCALE;
		break;
	case GATE:
		s->module = H_UNGATED;
		s->u.moe.act = EXL3_ACT_SILU;
		break;
	case MLA_RES:
		s->u.mla.reserved[0] = 1;
		break;
	/* 3 i32 */
	case LENGTHS:
		s->u.mla.lengths = EXL3_REF(3, BUF_BYTES - 16);
		break;
	case LENGTHS_PAST:
		s->u.mla.lengths = EXL3_REF(3, BUF_BYTES);
		break;
	case LENGTHS_IN_O:
		s->u.mla.lengths = EXL3_REF(2, 16);
		break;
	case LENGTHS_IN_LSE:
		s->u.mla.lengths = EXL3_REF(2, 65536);
		break;
	case MLA_SCALE:
		s->u.mla.scale = NAN;
		break;
	case CACHE_NONE:
		s->u.mla.cache = EXL3_REF_NONE;
		break;
	/* cache: 100 rows of 64 f16 */
	case CACHE_PAST:
		s->u.mla.cache = EXL3_REF(3, BUF_BYTES - 12800 + 16);
		break;
	/* indices: 3 rows of 8 i32 */
	case INDICES_PAST:
		s->u.mla.indices = EXL3_REF(3, BUF_BYTES - 96 + 16);
		break;
	case LSE_NONE:
		s->u.mla.lse = EXL3_REF_NONE;
		break;
	case LSE_IN_O:
		s->u.mla.lse = EXL3_REF(2, 16);
		break;
	case CACHE_IN_O:
		s->u.mla.cache = EXL3_REF(2, 0);
		break;
	case LSE_IN_Q:
		s->u.mla.lse = EXL3_REF(1, 0);
		break;
	case NOP_X:
		s->x = 1;
		break;
	case NOP_U:
		s->u.words[0] = 1;
		break;
	case STREAM:
		s->flags = EXL3_STREAM;
		s->stream_seq = 7;
		break;
	case NOP_FLAGS:
		s->flags = EXL3_STORED;
		break;
	case CANCEL_U:
		s->u.cancel.reserved[6] = 1;
		break;
	case OPCODE:
		s->op = EXL3_OP_NR;
		break;
	case OPCODE_MAX:
		s->op = 255;
		break;
	default:
		break;
	}
}

#define OK     0, EXL3_DETAIL_NONE
#define BAD(d) -EINVAL, EXL3_DETAIL_##d

static const struct {
	const char *name;
	struct exl3_sqe (*good)(void);
	int what, code;
	enum exl3_detail detail;
} cases[] = {
	{"linear", good_linear, NONE, OK},
	{"linear, reserved0", good_linear, RES0, BAD(OP)},
	{"linear, stream_seq", good_linear, RES1, BAD(OP)},
	{"linear, unknown flag", good_linear, FLAG, BAD(OP)},
	{"linear, stored", good_linear, FLAG_STORED, OK},
	{"linear, deterministic", good_linear, FLAG_DET, OK},
	{"linear, no handle", good_linear, HANDLE, -ENOENT, EXL3_DETAIL_MODULE},
	{"linear, model unloaded", good_linear, UNLOADED, -ENOENT, EXL3_DETAIL_MODEL},
	{"linear, experts' handle", good_linear, KIND, BAD(MODULE)},
	{"linear, x of integers", good_linear, X_DTYPE, BAD(DTYPE)},
	{"linear, y of e4m3", good_linear, Y_DTYPE, BAD(DTYPE)},
	{"linear, no rows", good_linear, ROWS0, BAD(ROWS)},
	{"linear, most rows, buffer too small", good_linear, ROWS_MAX, BAD(BOUNDS)},
	{"linear, too many rows", good_linear, ROWS_OVER, BAD(ROWS)},
	{"linear, no x", good_linear, X_NONE, BAD(BUFFER)},
	{"linear, x in no buffer", good_linear, X_NOBUF, BAD(BUFFER)},
	{"linear, x not aligned", good_linear, X_ALIGN, BAD(ALIGN)},
	{"linear, x ends with its buffer", good_linear, X_END, OK},
	{"linear, x ends past its buffer", good_linear, X_PAST, BAD(BOUNDS)},
	{"linear, x at the end of offsets", good_linear, X_FAR, BAD(BOUNDS)},
	{"linear, stride below the row", good_linear, STRIDE_SMALL, BAD(STRIDE)},
	{"linear, stride", good_linear, STRIDE_OK, OK},
	{"linear, odd stride", good_linear, STRIDE_ODD, BAD(STRIDE)},
	{"linear, huge stride", good_linear, STRIDE_HUGE, BAD(BOUNDS)},
	{"linear, y stride below the row", good_linear, Y_STRIDE_SMALL, BAD(STRIDE)},
	{"linear, y ends past its buffer", good_linear, Y_PAST, BAD(BOUNDS)},
	{"linear, y is x", good_linear, SAME, BAD(OVERLAP)},
	{"linear, y right behind x", good_linear, ABUT, OK},
	{"linear, y over the end of x", good_linear, OVERLAP_BYTE, BAD(OVERLAP)},
	{"linear, rows of x and y take turns", good_linear, INTERLEAVED, OK},
	{"linear, rows of x and y touch", good_linear, INTERLEAVED_BAD, BAD(OVERLAP)},
	{"linear, operation's words set", good_linear, U_SET, BAD(OP)},
	{"linear, kernel", good_linear, KERNEL_OK, OK},
	{"linear, kernel of experts", good_linear, KERNEL_OTHER, -EOPNOTSUPP, EXL3_DETAIL_KERNEL},
	{"linear, kernel not for requests", good_linear, KERNEL_CANDIDATE, -EOPNOTSUPP, EXL3_DETAIL_KERNEL},
	{"linear, no such kernel", good_linear, KERNEL_PAST, -EOPNOTSUPP, EXL3_DETAIL_KERNEL},
	{"moe", good_moe, NONE, OK},
	{"moe, a linear's handle", good_moe, KIND, BAD(MODULE)},
	{"moe, no ids", good_moe, IDS_NONE, BAD(BUFFER)},
	{"moe, ids of floats", good_moe, IDS_DTYPE, BAD(DTYPE)},
	{"moe, weights of integers", good_moe, W_DTYPE, BAD(DTYPE)},
	{"moe, topk 0", good_moe, TOPK0, BAD(TOPK)},
	{"moe, most topk", good_moe, TOPK_MAX, OK},
	{"moe, topk over", good_moe, TOPK_OVER, BAD(TOPK)},
	{"moe, ids within y", good_moe, IDS_IN_Y, BAD(OVERLAP)},
	{"moe, weights over the end of y", good_moe, W_IN_Y, BAD(OVERLAP)},
	{"moe, no such activation", good_moe, ACT_OVER, BAD(OP)},
	{"moe, relu2 of a gated module", good_moe, ACT_RELU2, OK},
	{"moe, unknown override", good_moe, OVERRIDES, BAD(OP)},
	{"moe, limit NaN", good_moe, LIMIT_NAN, BAD(OP)},
	{"moe, limit negative", good_moe, LIMIT_NEG, BAD(OP)},
	{"moe, limit that does not count", good_moe, LIMIT_UNUSED, OK},
	{"moe, scale infinite", good_moe, SCALE_INF, BAD(OP)},
	{"moe, reserved", good_moe, MOE_RES, BAD(OP)},
	{"mlp", good_mlp, NONE, OK},
	{"mlp, topk", good_mlp, MLP_TOPK, BAD(OP)},
	{"mlp, scale", good_mlp, MLP_SCALE, BAD(OP)},
	{"mlp, limit NaN", good_mlp, LIMIT_NAN, BAD(OP)},
	{"mlp, silu without a gate", good_mlp, GATE, BAD(MODULE)},
	{"mlp, a linear's handle", good_mlp, KIND, BAD(MODULE)},
	{"mla", good_mla, NONE, OK},
	{"mla, without lse", good_mla, LSE_NONE, OK},
	{"mla, reserved", good_mla, MLA_RES, BAD(OP)},
	{"mla, stored", good_mla, FLAG_STORED, BAD(OP)},
	{"mla, scale NaN", good_mla, MLA_SCALE, BAD(OP)},
	{"mla, a linear's handle", good_mla, KIND, BAD(MODULE)},
	{"mla, no cache", good_mla, CACHE_NONE, BAD(BUFFER)},
	{"mla, cache past its buffer", good_mla, CACHE_PAST, BAD(BOUNDS)},
	{"mla, indices past their buffer", good_mla, INDICES_PAST, BAD(BOUNDS)},
	{"mla, lse within o", good_mla, LSE_IN_O, BAD(OVERLAP)},
	{"mla, cache over o", good_mla, CACHE_IN_O, BAD(OVERLAP)},
	{"mla, lse over q", good_mla, LSE_IN_Q, BAD(OVERLAP)},
	{"mla, lengths", good_mla, LENGTHS, OK},
	{"mla, lengths past their buffer", good_mla, LENGTHS_PAST, BAD(BOUNDS)},
	{"mla, lengths within o", good_mla, LENGTHS_IN_O, BAD(OVERLAP)},
	{"mla, lengths over lse", good_mla, LENGTHS_IN_LSE, BAD(OVERLAP)},
	{"nop", good_nop, NONE, OK},
	{"nop with an operand", good_nop, NOP_X, BAD(OP)},
	{"nop with words", good_nop, NOP_U, BAD(OP)},
	{"nop with flags", good_nop, NOP_FLAGS, BAD(OP)},
	{"cancel", good_cancel, NONE, OK},
	{"cancel, reserved", good_cancel, CANCEL_U, BAD(OP)},
	{"next opcode", good_nop, OPCODE, BAD(OP)},
	{"last opcode", good_nop, OPCODE_MAX, BAD(OP)},
};

static void entries(void **state)
{
	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		struct exl3_sqe sqe = cases[i].good();
		struct exl3_checked out;
		enum exl3_detail detail;
		int code;

		change(&sqe, cases[i].what);
		code = exl3_check_sqe(&sqe, &env, &out, &detail);
		if (code != cases[i].code || detail != cases[i].detail)
			fail_msg("%s: %d detail %d, wanted %d detail %d", cases[i].name, code,
				 (int)detail, cases[i].code, (int)cases[i].detail);
	}
}

/* The same with words for stream calls, and without. */
static void stream_calls(void **state)
{
	static const struct {
		const char *name;
		struct exl3_sqe (*good)(void);
		int code;
		enum exl3_detail detail;
	} with[] = {
		{"linear", good_linear, OK}, {"moe", good_moe, OK},
		{"mlp", good_mlp, OK},       {"mla", good_mla, OK},
		{"nop", good_nop, OK},       {"cancel", good_cancel, BAD(OP)},
	};
	struct exl3_check_env bound = env;

	(void)state;
	bound.stream = true;
	for (size_t i = 0; i < TEST_NR(with); i++) {
		struct exl3_sqe sqe = with[i].good();
		struct exl3_checked out;
		enum exl3_detail detail;
		int code;

		change(&sqe, STREAM);
		code = exl3_check_sqe(&sqe, &bound, &out, &detail);
		if (code != with[i].code || detail != with[i].detail)
			fail_msg("%s: %d detail %d, wanted %d detail %d", with[i].name, code, (int)detail,
				 with[i].code, (int)with[i].detail);
		assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), -EINVAL);
		assert_int_equal(detail, EXL3_DETAIL_STREAM);
		/* The number alone means nothing. */
		sqe.flags = 0;
		assert_int_equal(exl3_check_sqe(&sqe, &bound, &out, &detail), -EINVAL);
		assert_int_equal(detail, EXL3_DETAIL_OP);
	}
}

/* ---- what comes out ---- */

/* One factor for all values is what e4m3 needs; other caches have none, whatever the entry says. */
static void scale_of_the_cache(void **state)
{
	struct exl3_sqe sqe = good_mla();
	struct exl3_checked out;
	enum exl3_detail detail;

	(void)state;
	sqe.u.mla.kv_scale = 0.5f;
	assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), 0);
	assert_true(out.u.mla.cache.kv_scale == 1);
	geometry.cache_dtype = EXL3_E4M3;
	assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), 0);
	assert_true(out.u.mla.cache.kv_scale == 0.5f);
	geometry.cache_dtype = EXL3_F16;
}

static void results(void **state)
{
	struct exl3_sqe sqe = good_linear();
	struct exl3_checked out;
	enum exl3_detail detail;

	(void)state;
	sqe.x = EXL3_REF(1, 32);
	sqe.y_stride = 1600;
	sqe.kernel = 1;
	assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), 0);
	assert_ptr_equal(out.rows.x, buffers[1].base[0] + 32);
	assert_ptr_equal(out.rows.y, buffers[2].base[0]);
	assert_int_equal(out.rows.x_stride, 2 * K); /* dense */
	assert_int_equal(out.rows.y_stride, 1600);
	assert_int_equal(out.rows.m, 3);
	assert_false(out.rows.stored);
	assert_false(out.deterministic);
	assert_ptr_equal(out.kernel, &kernels[0]);
	assert_ptr_equal(out.target.desc, &linear);
	assert_int_equal(out.nr_pins, 2);
	assert_ptr_equal(out.pins[0], &buffers[1]);
	assert_ptr_equal(out.pins[1], &buffers[2]);

	sqe.flags = EXL3_STORED | EXL3_DETERMINISTIC;
	assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), 0);
	assert_true(out.rows.stored);
	assert_true(out.deterministic);
	assert_int_equal(out.rows.x_stride, 2 * 256);

	sqe = good_moe();
	assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), 0);
	assert_int_equal(out.act, EXL3_ACT_SILU); /* the model's */
	assert_true(out.limit == 7 && out.routed_scale == 2);
	assert_ptr_equal(out.u.route.weights, buffers[3].base[0] + 4096);
	assert_int_equal(out.nr_pins, 4);
	sqe.u.moe.act = EXL3_ACT_GELU;
	sqe.u.moe.overrides = EXL3_MOE_LIMIT | EXL3_MOE_SCALE;
	sqe.u.moe.limit = 0;
	sqe.u.moe.routed_scale = 128;
	assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), 0);
	assert_int_equal(out.act, EXL3_ACT_GELU);
	assert_true(out.limit == 0 && out.routed_scale == 128);

	sqe = good_mla();
	assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), 0);
	assert_ptr_equal(out.u.mla.cache.lse, buffers[2].base[0] + 65536);
	assert_int_equal(out.u.mla.geometry.cache_stride, 128);
	assert_int_equal(out.nr_pins, 5);
	sqe.u.mla.lse = EXL3_REF_NONE;
	assert_int_equal(exl3_check_sqe(&sqe, &env, &out, &detail), 0);
	assert_null(out.u.mla.cache.lse);
}

/* ---- geometries ---- */

static void geometries(void **state)
{
	static const struct exl3_mla_geometry good = {.heads = 128,
						      .dim = 576,
						      .value_dim = 512,
						      .topk = 2048,
						      .slots = 1 << 20,
						      .cache_dtype = EXL3_E4M3,
						      .indices_dtype = EXL3_I64};
	struct exl3_mla_geometry g = good;
	struct exl3_error err;

	(void)state;
	test_code(exl3_check_geometry(&g, &err), 0, &err);
	assert_int_equal(g.cache_stride, 576);
	assert_int_equal(g.indices_stride, 2048 * 8);
#define REFUSED(wanted, ...)                                                 \
	do {                                                                 \
		g = good;                                                    \
		__VA_ARGS__;                                                 \
		if (exl3_check_geometry(&g, &err) != (wanted))               \
			fail_msg("%s: not refused as wanted", #__VA_ARGS__); \
	} while (0)
	REFUSED(-EINVAL, g.heads = 0);
	REFUSED(-EINVAL, g.heads = 129);
	REFUSED(-EINVAL, g.dim = 0);
	REFUSED(-EINVAL, g.dim = 650);
	REFUSED(0, (g.dim = 640, g.value_dim = 640));
	REFUSED(-EINVAL, g.dim = 584);
	REFUSED(-EINVAL, g.value_dim = 0);
	REFUSED(-EINVAL, g.value_dim = 592);
	REFUSED(-EINVAL, g.value_dim = 8);
	REFUSED(-EINVAL, g.topk = 0);
	REFUSED(-EINVAL, g.topk = EXL3_MLA_TOPK_MAX + 1);
	REFUSED(-EINVAL, g.slots = 0);
	REFUSED(-EINVAL, g.slots = 1ull << 31);
	REFUSED(-EINVAL, g.slots = UINT64_MAX);
	REFUSED(-EINVAL, g.cache_stride = 560);
	REFUSED(-EINVAL, g.cache_stride = 600);
	REFUSED(0, g.cache_stride = 592);
	REFUSED(-EINVAL, g.cache_stride = UINT64_MAX - 15);
	REFUSED(-EINVAL, g.indices_stride = 2048 * 8 - 8);
	REFUSED(-EINVAL, g.indices_stride = 2048 * 8 + 4);
	REFUSED(0, g.indices_stride = 2048 * 8 + 8);
	REFUSED(0, g.cache_stride = 656);
	REFUSED(0, g.cache_dtype = EXL3_E4M3_656);
	assert_int_equal(g.cache_stride, 656);
	assert_int_equal(g.page_rows, 1);
	assert_int_equal(g.table_queries, 1);
	REFUSED(0, (g.cache_dtype = EXL3_E4M3_656, g.cache_stride = 672));
	REFUSED(-EINVAL, (g.cache_dtype = EXL3_E4M3_656, g.cache_stride = 640));
	REFUSED(-EINVAL, (g.cache_dtype = EXL3_E4M3_656, g.dim = 512));
	REFUSED(-EINVAL, (g.cache_dtype = EXL3_E4M3_656, g.value_dim = 576));
	REFUSED(0, g.page_rows = 64);
	assert_int_equal(g.indices_stride, 32 * 8);
	REFUSED(0, (g.page_rows = 64, g.topk = 2049));
	assert_int_equal(g.indices_stride, 33 * 8);
	REFUSED(0, g.page_rows = EXL3_MLA_PAGE_MAX);
	REFUSED(-EINVAL, g.page_rows = EXL3_MLA_PAGE_MAX * 2);
	REFUSED(-EINVAL, g.page_rows = 48);
	REFUSED(-EINVAL, (g.page_rows = 64, g.slots -= 32));
	REFUSED(0, g.table_queries = EXL3_M_MAX);
	REFUSED(-EINVAL, g.table_queries = EXL3_M_MAX + 1);
	REFUSED(-EOPNOTSUPP, g.cache_dtype = EXL3_DTYPE_NR);
	REFUSED(-EOPNOTSUPP, g.cache_dtype = EXL3_F32);
	REFUSED(-EINVAL, g.indices_dtype = EXL3_F32);
#undef REFUSED
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(entries),
		test_case(stream_calls),
		test_case(scale_of_the_cache),
		test_case(results),
		test_case(geometries),
	};

	return cmocka_run_group_tests(tests, setup, NULL);
}
