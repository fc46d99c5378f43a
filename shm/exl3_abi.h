/* SPDX-License-Identifier: Apache-2.0 */
/* exl3_abi.h - what daemon and client share in memory: entries, ring words, dtypes, limits. */
#ifndef EXL3_ABI_H
#define EXL3_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#define EXL3_STATIC_ASSERT(cond, text) static_assert(cond, text)
#else
#define EXL3_STATIC_ASSERT(cond, text) _Static_assert(cond, text)
#endif

#define EXL3_ABI_MAGIC   0x334c5845u /* "EXL3" in memory order */
#define EXL3_ABI_VERSION 1u

/* Limits. Whatever a client can make grow has one here. */
#define EXL3_M_MAX           8192u  /* rows of one request */
#define EXL3_TOPK_MAX        64u    /* experts per token of one MoE request */
#define EXL3_MLA_TOPK_MAX    65536u /* cache slots per query of one MLA request */
#define EXL3_MLA_DIM_MAX     640u   /* query and cache dimension, a multiple of 16 */
#define EXL3_MLA_HEADS_MAX   128u
#define EXL3_MLA_PAGE_MAX    4096u  /* cache rows of a page */
#define EXL3_SQ_ENTRIES_MIN  2u
#define EXL3_SQ_ENTRIES_MAX  4096u  /* a power of two; the CQ has twice as many entries */
#define EXL3_CHANNELS_MAX    64u    /* channels of one client */
#define EXL3_BUFFERS_MAX     1024u  /* arenas and registered buffers of one client */
#define EXL3_PLANS_MAX       64u    /* recorded plans of one client */
#define EXL3_PLAN_CALLS_MAX  4096u  /* calls of one of them */
#define EXL3_PLANS_CALLS_MAX 16384u /* of all of one client */
#define EXL3_HANDLES_MAX     65536u /* open modules and MLA geometries of one client */
#define EXL3_NAME_MAX        512u   /* bytes of a model, module or tensor name, without the zero */
#define EXL3_DOMAIN_NAME_MAX 32u    /* bytes of a fault domain's name */
#define EXL3_PACKET_MAX      65536u /* bytes of one control message */
#define EXL3_FDS_MAX         8u     /* file descriptors attached to one control message */

/* Element types of operands. Values are part of the ABI. */
enum exl3_dtype {
	EXL3_DTYPE_NONE = 0,
	EXL3_F16 = 1,
	EXL3_BF16 = 2,
	EXL3_F32 = 3,
	EXL3_E4M3 = 4, /* fp8, MLA caches only */
	EXL3_I32 = 5,  /* expert ids and cache slots */
	EXL3_I64 = 6,
	EXL3_E4M3_656 = 7, /* not elements but records of MLA caches, see below */
	EXL3_DTYPE_NR
};

static inline uint32_t exl3_dtype_bytes(uint32_t dtype)
{
	switch (dtype) {
	case EXL3_E4M3:
		return 1;
	case EXL3_F16:
	case EXL3_BF16:
		return 2;
	case EXL3_F32:
	case EXL3_I32:
		return 4;
	case EXL3_I64:
		return 8;
	default:
		return 0;
	}
}

/*
 * The packed DeepSeek cache record, 656 bytes: 512 e4m3 values, 4 f32 factors (of 128 of them each), 64 bf16
 * values. Row dims 0..511 are value times factor, 512..575 the bf16 values; so dim is 576 and value_dim 512.
 */
#define EXL3_RECORD_BYTES  656u
#define EXL3_RECORD_DIM    576u
#define EXL3_RECORD_VALUES 512u /* of e4m3; multiples of EXL3_RECORD_BLOCK share a factor */
#define EXL3_RECORD_BLOCK  128u

/* Bytes of a row of an MLA cache. */
static inline uint32_t exl3_cache_row_bytes(uint32_t dtype, uint32_t dim)
{
	return dtype == EXL3_E4M3_656 ? EXL3_RECORD_BYTES : dim * exl3_dtype_bytes(dtype);
}

/* Weight codebooks: ids as in the EXL3 format. */
enum exl3_codebook { EXL3_CB_3INST = 0, EXL3_CB_MCG = 1, EXL3_CB_MUL1 = 2, EXL3_CB_NR };

/* Activations of a gated or plain MLP; formulas in kernels/format.h. DEFAULT: what config.json says. */
enum exl3_act {
	EXL3_ACT_DEFAULT = 0,
	EXL3_ACT_SILU = 1,
	EXL3_ACT_GELU = 2,        /* tanh form */
	EXL3_ACT_RELU2 = 3,       /* relu(u)^2, no gate */
	EXL3_ACT_RELU2_GATED = 4, /* relu(g)^2 * u */
	EXL3_ACT_SWIGLU_OAI = 5,
	EXL3_ACT_NR
};

enum exl3_op {
	EXL3_OP_NOP = 0,
	EXL3_OP_LINEAR = 1,
	EXL3_OP_MOE = 2,
	EXL3_OP_MLP = 3,
	EXL3_OP_MLA_DECODE = 4,
	EXL3_OP_CANCEL = 5,
	EXL3_OP_PLAN = 6, /* replay of a recorded plan, whose handle is sqe.module */
	EXL3_OP_NR
};

/* sqe.flags */
#define EXL3_STORED        (1u << 0) /* x and y have the stored (padded) sizes, not the logical ones */
#define EXL3_DETERMINISTIC (1u << 1) /* result bits depend on this request alone */
#define EXL3_STREAM        (1u << 2) /* a stream call: see struct exl3_stream_slot */
#define EXL3_SQE_FLAGS     (EXL3_STORED | EXL3_DETERMINISTIC | EXL3_STREAM)

/* Where an operand lies: buffer id in the upper 16 bits, byte offset in the lower 48. 0 is "none":
 * buffer ids start at 1. */
typedef uint64_t exl3_ref;
#define EXL3_REF_NONE        ((exl3_ref)0)
#define EXL3_REF(buf, off)   (((exl3_ref)(buf) << 48) | ((exl3_ref)(off) & 0xffffffffffffull))
#define EXL3_REF_BUF(ref)    ((uint32_t)((ref) >> 48))
#define EXL3_REF_OFFSET(ref) ((ref) & 0xffffffffffffull)
/* No id that the daemon gives: memory of the process itself, in mapped mode. Offset 0 is address EXL3_PROCESS_BASE. */
#define EXL3_BUF_PROCESS  1u
#define EXL3_PROCESS_BASE 4096u

/* One request. Unused fields must be zero. Operands are row-major and 16-byte aligned. */
struct exl3_sqe {
	uint8_t op;           /* enum exl3_op */
	uint8_t x_dtype;      /* f16, bf16, f32; MLA: q */
	uint8_t y_dtype;      /* f16, bf16, f32; MLA: o */
	uint8_t reserved0;
	uint32_t flags;       /* EXL3_STORED, EXL3_DETERMINISTIC, EXL3_STREAM */
	uint64_t user_data;   /* comes back in the completion */
	uint32_t module;      /* handle; MLA: geometry handle */
	uint32_t rows;        /* tokens; MLA: queries (batch) */
	exl3_ref x;           /* [rows, k]; MLA: q [rows, heads, dim] */
	exl3_ref y;           /* [rows, n]; MLA: o [rows, heads, value_dim] */
	uint32_t x_stride;    /* bytes from row to row, a multiple of 16 (0 = dense) */
	uint32_t y_stride;
	uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0 = none */
	uint32_t kernel;      /* 0 = chosen by the daemon; else index + 1 in its kernel list */
	uint32_t stream_seq;  /* EXL3_STREAM: number of the call; else 0 */
	union {
		struct {
			exl3_ref ids;     /* [rows, topk] i32 or i64; -1 = hole */
			exl3_ref weights; /* [rows, topk] f16, bf16 or f32 */
			uint32_t topk;
			uint8_t ids_dtype;
			uint8_t weights_dtype;
			uint8_t act;      /* enum exl3_act; DEFAULT = the model's */
			uint8_t overrides; /* EXL3_MOE_LIMIT, EXL3_MOE_SCALE: which of the two below count */
			float limit;      /* activation limit, 0 = none */
			float routed_scale;
			uint32_t reserved[6];
		} moe; /* MLP uses act, overrides and limit only */
		struct {
			exl3_ref cache;   /* [slots, dim], as the geometry says */
			exl3_ref indices; /* [rows / queries of a table, columns] i32 or i64; -1 = hole */
			exl3_ref lse;     /* [rows, heads] f32, or none */
			float scale;      /* of q.k before the softmax */
			float kv_scale;   /* of e4m3 cache values; not used otherwise */
			exl3_ref lengths; /* [rows] i32: keys of each query, 0..topk; or none: topk */
			uint32_t reserved[6];
		} mla;
		struct {
			uint64_t user_data; /* the request to cancel, of the same channel */
			uint64_t reserved[7];
		} cancel;
		uint64_t words[8];
	} u;
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_sqe) == 128, "a submission entry is 128 bytes");

/*
 * Words of a stream call, in a host buffer that is bound to the channel (BindStream): call number s has
 * slot s % cq_entries. The daemon starts it once it has seen *ready* reach s, and writes s to *done* when
 * the call has ended, however. Numbers run freely over 2^32; "reached" is (int32_t)(word - s) >= 0. The
 * ready word of a slot is written by the client (its stream), done and result by the daemon (its stream or
 * its host), by the client once the daemon is gone.
 */
struct exl3_stream_slot {
	uint32_t ready;
	uint32_t pad0[15];
	uint32_t done;
	int32_t result; /* cleared by the client before a call; a negative errno before done, if it failed */
	uint32_t pad1[14];
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_stream_slot) == 128, "a line for each side");

#define EXL3_MOE_LIMIT (1u << 0)
#define EXL3_MOE_SCALE (1u << 1)

/* One completion. */
struct exl3_cqe {
	uint64_t user_data;
	int32_t result;     /* 0 or a negative errno, see client/exl3.h */
	uint32_t flags;     /* none yet */
	uint64_t detail;    /* invalid ids or slots that were skipped; for errors: enum exl3_detail */
	uint64_t exec_ns;   /* time on the device */
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_cqe) == 32, "a completion entry is 32 bytes");

/* Why a request failed, in cqe.detail beside a negative result. */
enum exl3_detail {
	EXL3_DETAIL_NONE = 0,
	EXL3_DETAIL_OP = 1,       /* unknown opcode, flag or reserved field set */
	EXL3_DETAIL_MODULE = 2,   /* no such handle, or of another kind */
	EXL3_DETAIL_DTYPE = 3,
	EXL3_DETAIL_ROWS = 4,
	EXL3_DETAIL_STRIDE = 5,
	EXL3_DETAIL_ALIGN = 6,
	EXL3_DETAIL_BUFFER = 7,   /* no such buffer */
	EXL3_DETAIL_BOUNDS = 8,   /* operand reaches past its buffer */
	EXL3_DETAIL_TOPK = 9,
	EXL3_DETAIL_KERNEL = 10,  /* no kernel for this shape and type, or not of that name */
	EXL3_DETAIL_MODEL = 11,   /* the module's model was unloaded */
	EXL3_DETAIL_OVERLAP = 12, /* y overlaps an input */
	EXL3_DETAIL_LIMIT = 13,   /* more rows than the tenant may have in flight */
	EXL3_DETAIL_STREAM = 14,  /* a stream call on a channel without stream words */
	EXL3_DETAIL_NR
};

/* A plan's completion with a negative result: the call that failed first, counted from 0, in detail's upper half. */
#define EXL3_PLAN_DETAIL(call, detail) (((uint64_t)(call) + 1) << 32 | (uint32_t)(detail))
#define EXL3_PLAN_CALL(detail)         ((uint32_t)((detail) >> 32) - 1u) /* UINT32_MAX: none, the plan itself */

/* Ring words: one cache line each, one writer each. Indices run freely over 2^32. */
struct exl3_ring_word {
	uint32_t v;
	uint32_t pad[15];
};

struct exl3_ring_hdr {
	/* Written once by the daemon before the client sees the segment. */
	uint32_t magic, version;
	uint32_t sq_entries, cq_entries; /* powers of two */
	uint32_t sqe_offset, cqe_offset; /* bytes from the start of the segment */
	uint64_t bytes;                  /* of the whole segment */
	uint64_t instance;               /* daemon's instance id */
	uint32_t generation;             /* of the worker */
	uint32_t channel;
	uint32_t pad[4];
	struct exl3_ring_word sq_tail;  /* client */
	struct exl3_ring_word sq_head;  /* daemon */
	struct exl3_ring_word sq_flags; /* daemon: EXL3_SQ_NEED_WAKEUP */
	struct exl3_ring_word cq_tail;  /* daemon; a sleeping client waits on it (futex) */
	struct exl3_ring_word cq_head;  /* client */
	struct exl3_ring_word cq_flags; /* client: EXL3_CQ_NEED_WAKEUP, EXL3_CQ_WANT_MSG */
	struct exl3_ring_word state;    /* daemon: enum exl3_channel_state */
};
EXL3_STATIC_ASSERT(sizeof(struct exl3_ring_hdr) == 512, "header and seven ring words");

#define EXL3_SQ_NEED_WAKEUP (1u << 0) /* the daemon sleeps: kick the eventfd after storing the tail */
#define EXL3_CQ_NEED_WAKEUP (1u << 0) /* the client sleeps in a futex on cq_tail */
#define EXL3_CQ_WANT_MSG    (1u << 1) /* the client polls the channel's socket: send it one byte */

enum exl3_channel_state {
	EXL3_CHANNEL_OPEN = 0,
	EXL3_CHANNEL_FAILED = 1, /* the client broke the protocol: nothing is taken any more */
	EXL3_CHANNEL_CLOSED = 2
};

#ifdef __cplusplus
}
#endif
#endif
