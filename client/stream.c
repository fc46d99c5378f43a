/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.c - calls in the order of a CUDA stream: ready and done words, and whom they concern.
 *
 * Of one call: its number is noted (issued), the stream is told to write *ready* and then to wait for
 * *done*, and the entry goes into the ring. The daemon looks at *ready* before it starts anything; its
 * stream writes *done*. When the daemon is gone nobody would, so the watcher does:
 *
 *   D0 caller: store issued, then load dead and ended  }  all seq_cst: either the watcher sees the call, or
 *   D1 watcher: store dead or ended, then load issued  }  its caller sees that nobody will answer it
 */
#include "client/map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define USER_DATA 0x4558335300000000ull /* "EX3S"; what completions of stream calls carry, with the number */

static struct exl3_stream_slot *slot_of(const struct exl3_stream *s, uint32_t call)
{
	return &s->slots[call & s->mask];
}

static bool reached(const uint32_t *word, uint32_t call)
{
	return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - call) >= 0;
}

/* ---- the words ---- */

/* At every worker once. */
static int bind_words(struct exl3_channel *ch, struct exl3_stream *s)
{
	Exl3__BindStream body = EXL3__BIND_STREAM__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	struct exl3_client *c = ch->obj.client;
	int e;

	body.channel = ch->id;
	body.buffer = s->words->buffer;
	req.body_case = EXL3__REQUEST__BODY_BIND_STREAM;
	req.bind_stream = &body;
	pthread_mutex_lock(&c->call);
	e = exl3_client_check(c);
	/* The channel's number means something at its own worker only. */
	if (e == 0 && ch->epoch != c->epoch)
		e = exl3_errf(exl3_client_err(), -ESTALE, "the daemon's worker has gone");
	if (e == 0)
		e = exl3_client_call_locked(c, &req, EXL3__REPLY__BODY__NOT_SET,
					    EXL3_CALL_TIMEOUT_NS, NULL, NULL, 0, NULL, 0);
	pthread_mutex_unlock(&c->call);
	if (e == 0)
		s->epoch = ch->epoch;
	return e;
}

static void stream_freep(struct exl3_stream **at)
{
	struct exl3_stream *s = *at;

	if (!s)
		return;
	exl3_arena_free(s->words);
	free(s->own);
	free(s->issued);
	free(s->ends);
	free(s);
	*at = NULL;
}

int exl3_stream_make(struct exl3_channel *ch, uint32_t first)
{
	exl3_auto(stream_freep) struct exl3_stream *s = NULL;
	uint32_t nr = ch->ring.cq_mask + 1;
	int e;

	if (ch->stream)
		return ch->map || ch->stream->epoch == ch->epoch ? 0 : bind_words(ch, ch->stream);
	s = calloc(1, sizeof(*s));
	if (s) {
		s->mask = nr - 1;
		s->next = first;
		s->issued = calloc(nr, sizeof(*s->issued));
		s->ends = calloc(nr, sizeof(*s->ends));
	}
	if (!ch->kept)
		ch->kept = calloc(nr, sizeof(*ch->kept));
	if (!s || !s->issued || !s->ends || !ch->kept)
		return exl3_errf(exl3_client_err(), -ENOMEM, "stream: out of memory");
	if (ch->map) {
		s->slots = s->own = calloc(nr, sizeof(*s->own));
		e = s->own ? 0 : exl3_errf(exl3_client_err(), -ENOMEM, "stream: out of memory");
	} else {
		e = exl3_arena_new(ch->obj.client, nr * sizeof(struct exl3_stream_slot), &s->words);
		if (e == 0)
			s->slots = exl3_arena_ptr(s->words);
	}
	if (e < 0)
		return e;
	/* The calls before the first one have ended, whatever its number is. */
	for (uint32_t i = 0; i < nr; i++) {
		s->slots[i].ready = s->slots[i].done = s->issued[i] = first - 1;
		s->ends[i].call = first - 1;
	}
	e = ch->map ? 0 : bind_words(ch, s);
	if (e < 0)
		return e;
	/* The watcher may look from now on. */
	__atomic_store_n(&ch->stream, s, __ATOMIC_RELEASE);
	s = NULL;
	return 0;
}

/* With the first call that comes from a stream: the stream's device can write and read the words. */
static int map_words(struct exl3_stream *s)
{
	exl3_cu_ptr dev;
	void *ctx;
	int e;

	if (s->cu)
		return 0;
	e = exl3_cuda_context(&s->cu, &ctx);
	if (e == 0)
		e = exl3_cuda_errf(s->cu->host_register(s->slots, exl3_arena_bytes(s->words),
							EXL3_CU_HOST_PORTABLE |
								EXL3_CU_HOST_DEVICEMAP),
				   "stream: cuMemHostRegister");
	if (e == 0) {
		e = exl3_cuda_errf(s->cu->host_device_pointer(&dev, s->slots, 0),
				   "stream: cuMemHostGetDevicePointer");
		if (e < 0)
			s->cu->host_unregister(s->slots);
	}
	if (e < 0) {
		s->cu = NULL;
		return e;
	}
	s->dev = dev;
	s->ctx = ctx;
	return 0;
}

void exl3_stream_release(struct exl3_channel *ch, int result)
{
	struct exl3_stream *s = __atomic_load_n(&ch->stream, __ATOMIC_ACQUIRE);

	for (uint32_t i = 0; s && i <= s->mask; i++) {
		uint32_t call = __atomic_load_n(&s->issued[i], __ATOMIC_SEQ_CST); /* D1 */

		if (reached(&s->slots[i].done, call))
			continue;
		__atomic_store_n(&s->slots[i].result, result, __ATOMIC_RELAXED);
		__atomic_store_n(&s->slots[i].done, call, __ATOMIC_RELEASE);
	}
}

void exl3_stream_free(struct exl3_channel *ch, bool forked)
{
	struct exl3_stream *s = ch->stream;
	void *before = NULL;

	ch->stream = NULL;
	if (!s)
		return;
	if (s->cu && !forked) {
		/* A stream may still have to write *ready* or to look at *done*: as cudaFree does, wait until
		 * none has. It has nothing to wait for any more. */
		s->cu->ctx_get_current(&before);
		s->cu->ctx_set_current(s->ctx);
		s->cu->ctx_synchronize();
		s->cu->host_unregister(s->slots);
		s->cu->ctx_set_current(before);
	}
	free(s->own);
	free(s->issued);
	free(s->ends);
	free(s); /* the arena is an object of the client */
}

/* ---- what has ended ---- */

void exl3_stream_ended(struct exl3_channel *ch, const struct exl3_cqe *cqe)
{
	struct exl3_stream *s = ch->stream;
	uint32_t call = (uint32_t)cqe->user_data;

	s->ends[call & s->mask] = (struct exl3_stream_end){.call = call, .cqe = *cqe};
	if (cqe->result < 0 && !s->error) {
		s->error = cqe->result;
		s->error_call = call;
	}
	/* The daemon did it, unless it was gone before. */
	if (!reached(&slot_of(s, call)->done, call))
		exl3_stream_release(ch, cqe->result);
}

/* Takes what is there of stream calls. Completions of others wait for exl3_wait(). */
static int reap(struct exl3_channel *ch)
{
	int e;

	do
		e = exl3_channel_take(ch);
	while (e > 0);
	return e;
}

/* Waits until something has been taken, or @end_ns. */
static int reap_wait(struct exl3_channel *ch, uint64_t end_ns)
{
	int e = exl3_channel_take(ch);

	if (e != 0)
		return e;
	return exl3_channel_sleep(ch, end_ns) ? exl3_channel_take(ch) : -ETIMEDOUT;
}

int exl3_stream_result(struct exl3_channel *ch, uint32_t call, struct exl3_cqe *ret,
		       uint64_t timeout_ns)
{
	struct exl3_stream *s = ch->stream;
	uint64_t now = exl3_now_ns(), end = timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
	int e;

	if (exl3_client_forked(ch->obj.client))
		return exl3_client_check(ch->obj.client);
	/* A slot's last call or the one before it: of older ones nothing is kept. */
	if (!s || (int32_t)(s->next - call) <= 0 || s->next - call > s->mask + 1)
		return exl3_errf(exl3_client_err(), -ENOENT,
				 "stream: call %u is not one of the last %u", call,
				 ch->ring.cq_mask + 1);
	if (ch->map && exl3_map_stream_wait(ch, timeout_ns ? end : 0) == 0)
		return exl3_errf(exl3_client_err(), -EAGAIN, "stream: call %u has not ended", call);
	while (s->ends[call & s->mask].call != call) {
		e = timeout_ns ? reap_wait(ch, end) : exl3_channel_take(ch);
		if (e == -ETIMEDOUT || (e == 0 && timeout_ns == 0))
			return exl3_errf(exl3_client_err(), -EAGAIN, "stream: call %u has not ended", call);
		if (e < 0)
			return e;
	}
	*ret = s->ends[call & s->mask].cqe;
	return 0;
}

int exl3_stream_error(struct exl3_channel *ch, uint32_t *call)
{
	struct exl3_stream *s = ch->stream;
	int error;

	if (!s || exl3_client_forked(ch->obj.client))
		return 0;
	reap(ch);
	/* Whose completion is still on its way: what failed says so beside its done word. */
	for (uint32_t i = ch->pending_first; i != ch->pending_last && !s->error; i++) {
		const struct exl3_pending *p = &ch->pending[i & ch->ring.cq_mask];
		const struct exl3_stream_slot *slot = slot_of(s, (uint32_t)p->user_data);

		if (p->stream && !p->done && reached(&slot->done, (uint32_t)p->user_data)) {
			s->error = __atomic_load_n(&slot->result, __ATOMIC_RELAXED);
			s->error_call = (uint32_t)p->user_data;
		}
	}
	error = s->error;
	if (call && error)
		*call = s->error_call;
	s->error = 0;
	return error;
}

/* ---- a call ---- */

/* Hands out an entry; waits for one as a launch waits for room in the driver's queue. */
static int get_entry(struct exl3_channel *ch, struct exl3_sqe **ret)
{
	int e;

	while (!(*ret = exl3_sq_get(ch))) {
		if (exl3_client_err()->code != -EAGAIN)
			return exl3_client_err()->code;
		e = reap_wait(ch, UINT64_MAX);
		if (e < 0)
			return e;
	}
	return 0;
}

static int enqueue(struct exl3_stream *s, void *stream, uint32_t call)
{
	exl3_cu_ptr at = s->dev + (call & s->mask) * sizeof(struct exl3_stream_slot);
	union exl3_cu_mem_op ops[2];

	memset(ops, 0, sizeof(ops));
	ops[0].value.operation = EXL3_CU_OP_WRITE_VALUE_32;
	ops[0].value.address = at + offsetof(struct exl3_stream_slot, ready);
	ops[0].value.value = call;
	ops[1].value.operation = EXL3_CU_OP_WAIT_VALUE_32;
	ops[1].value.address = at + offsetof(struct exl3_stream_slot, done);
	ops[1].value.value = call;
	ops[1].value.flags = EXL3_CU_WAIT_GEQ;
	return exl3_cuda_errf(s->cu->stream_mem_ops(stream, 2, ops, 0), "stream: cuStreamBatchMemOp");
}

/* May this stream be used at all? */
static int check_stream(struct exl3_stream *s, void *stream)
{
	int status = EXL3_CU_CAPTURE_NONE, e;

	if (stream == EXL3_STREAM_HOST)
		return 0;
	e = map_words(s);
	if (e == 0)
		e = exl3_cuda_errf(s->cu->stream_capturing(stream, &status),
				   "stream: cuStreamIsCapturing");
	if (e < 0)
		return e;
	if (status != EXL3_CU_CAPTURE_NONE)
		return exl3_errf(exl3_client_err(), -EOPNOTSUPP,
				 "stream: it is being captured, and a graph that is replayed would repeat "
				 "the number of this call: keep calls of the daemon out of graphs, or map the weights (mapped mode)");
	return 0;
}

/* In mapped mode the call itself is enqueued: nobody is told, nobody waits. */
static int mapped_call(struct exl3_channel *ch, void *stream, uint32_t *call)
{
	struct exl3_stream *s = ch->stream;
	struct exl3_sqe sqe = *ch->last;
	uint32_t number = s->next;
	int e;

	exl3_channel_forget(ch);
	sqe.flags |= EXL3_STREAM;
	sqe.stream_seq = number;
	sqe.user_data = USER_DATA | number;
	e = exl3_map_stream(ch, &sqe, stream);
	if (e < 0)
		return e;
	s->slots[number & s->mask].done = s->issued[number & s->mask] = number;
	s->ends[number & s->mask] = (struct exl3_stream_end){.call = number, .cqe = {.user_data = sqe.user_data}};
	s->next++;
	if (call)
		*call = number;
	return 0;
}

int exl3_stream_call(struct exl3_channel *ch, void *stream, uint32_t *call)
{
	struct exl3_client *c = ch->obj.client;
	struct exl3_stream_slot *slot;
	struct exl3_sqe *sqe = ch->last;
	struct exl3_stream *s;
	int e;

	if (exl3_client_forked(c))
		return exl3_client_check(c);
	if (ch->recording)
		return exl3_errf(exl3_client_err(), -EOPNOTSUPP,
				 "stream: the channel records a plan, which is replayed as a whole: exl3_plan_stream()");
	if (!sqe || ch->ring.sq_next - ch->ring.sq_published != 1)
		return exl3_errf(exl3_client_err(), -EINVAL,
				 "stream: exactly one entry must be prepared and not submitted");
	e = exl3_stream_make(ch, 1);
	if (e == 0 && ch->map && stream != EXL3_STREAM_HOST)
		return mapped_call(ch, stream, call);
	if (e == 0)
		e = check_stream(ch->stream, stream);
	if (e < 0) {
		exl3_channel_forget(ch);
		return e;
	}
	s = ch->stream;
	slot = slot_of(s, s->next);
	sqe->flags |= EXL3_STREAM;
	sqe->stream_seq = s->next;
	sqe->user_data = USER_DATA | s->next;
	__atomic_store_n(&slot->result, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&s->issued[s->next & s->mask], s->next, __ATOMIC_SEQ_CST); /* D0 */
	e = stream == EXL3_STREAM_HOST ? 0 : enqueue(s, stream, s->next);
	if (e < 0) {
		exl3_channel_forget(ch);
		return e;
	}
	if (call)
		*call = s->next;
	s->next++;
	ch->last_is_stream = true;
	e = exl3_submit(ch);
	ch->last_is_stream = false;
	/* D0: the watcher may have looked before. The call has its number, and ends with that error. */
	if (e < 0 || __atomic_load_n(&c->dead, __ATOMIC_SEQ_CST) ||
	    __atomic_load_n(&ch->ended, __ATOMIC_SEQ_CST))
		exl3_stream_release(ch, -ESTALE);
	return e < 0 ? e : 0;
}

void exl3_stream_ready(struct exl3_channel *ch, uint32_t call)
{
	if (ch->stream)
		__atomic_store_n(&slot_of(ch->stream, call)->ready, call, __ATOMIC_RELEASE);
}

int exl3_linear_stream(struct exl3_channel *ch, const struct exl3_module *mod, exl3_ref x,
		       unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m, void *stream,
		       uint32_t *call)
{
	struct exl3_sqe *sqe;
	int e = get_entry(ch, &sqe);

	if (e < 0)
		return e;
	exl3_prep_linear(sqe, mod, x, x_dtype, y, y_dtype, m);
	return exl3_stream_call(ch, stream, call);
}

int exl3_mlp_stream(struct exl3_channel *ch, const struct exl3_module *mod, exl3_ref x,
		    unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m, void *stream,
		    uint32_t *call)
{
	struct exl3_sqe *sqe;
	int e = get_entry(ch, &sqe);

	if (e < 0)
		return e;
	exl3_prep_mlp(sqe, mod, x, x_dtype, y, y_dtype, m);
	return exl3_stream_call(ch, stream, call);
}

int exl3_moe_stream(struct exl3_channel *ch, const struct exl3_module *mod, exl3_ref x,
		    unsigned x_dtype, exl3_ref y, unsigned y_dtype, uint32_t m, exl3_ref ids,
		    unsigned ids_dtype, exl3_ref weights, unsigned weights_dtype, uint32_t topk,
		    void *stream, uint32_t *call)
{
	struct exl3_sqe *sqe;
	int e = get_entry(ch, &sqe);

	if (e < 0)
		return e;
	exl3_prep_moe(sqe, mod, x, x_dtype, y, y_dtype, m, ids, ids_dtype, weights, weights_dtype,
		      topk);
	return exl3_stream_call(ch, stream, call);
}

int exl3_mla_stream(struct exl3_channel *ch, uint32_t geometry, exl3_ref q, unsigned q_dtype,
		    exl3_ref cache, exl3_ref indices, exl3_ref o, unsigned o_dtype, exl3_ref lse,
		    uint32_t batch, float scale, float kv_scale, void *stream, uint32_t *call)
{
	struct exl3_sqe *sqe;
	int e = get_entry(ch, &sqe);

	if (e < 0)
		return e;
	exl3_prep_mla(sqe, geometry, q, q_dtype, cache, indices, o, o_dtype, lse, batch, scale,
		      kv_scale);
	return exl3_stream_call(ch, stream, call);
}

int exl3_nop_stream(struct exl3_channel *ch, void *stream, uint32_t *call)
{
	struct exl3_sqe *sqe;
	int e = get_entry(ch, &sqe);

	if (e < 0)
		return e;
	exl3_prep_nop(sqe);
	return exl3_stream_call(ch, stream, call);
}
