/* SPDX-License-Identifier: Apache-2.0 */
/* arena.c - memory that daemon and client share: host arenas, and what all kinds have in common. */
#include "client/map.h"

#include <errno.h>
#include <stdlib.h>

static void arena_drop(struct exl3_object *o)
{
	struct exl3_arena *a = (struct exl3_arena *)o;

	exl3_offer_fini(a);
	exl3_segment_free(a->seg);
	free(a);
}

void exl3_arena_tell_free(struct exl3_client *c, uint32_t buffer)
{
	Exl3__FreeBuffer body = EXL3__FREE_BUFFER__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;

	body.buffer = buffer;
	req.body_case = EXL3__REQUEST__BODY_FREE_BUFFER;
	req.free_buffer = &body;
	exl3_client_tell(c, &req, UINT64_MAX);
}

void exl3_arena_add(struct exl3_client *c, struct exl3_arena *a)
{
	exl3_object_add(c, &a->obj, EXL3_OBJECT_ARENA, arena_drop);
	exl3_map_enter(&a->obj);
}

int exl3_arena_new(struct exl3_client *c, size_t bytes, struct exl3_arena **ret)
{
	Exl3__CreateArena body = EXL3__CREATE_ARENA__INIT;
	Exl3__Request req = EXL3__REQUEST__INIT;
	exl3_auto(exl3_reply_freep) Exl3__Reply *reply = NULL;
	exl3_auto(exl3_freep) struct exl3_arena *a = calloc(1, sizeof(*a));
	exl3_auto(exl3_closep) int fd = -1;
	int e;

	if (!a)
		return exl3_errf(exl3_client_err(), -ENOMEM, "arena: out of memory");
	body.bytes = bytes;
	req.body_case = EXL3__REQUEST__BODY_CREATE_ARENA;
	req.create_arena = &body;
	e = exl3_client_call(c, &req, EXL3__REPLY__BODY_ARENA, EXL3_CALL_TIMEOUT_NS, &reply, &fd,
			     1);
	if (e < 0)
		return e;
	a->buffer = reply->arena->buffer;
	if (!a->buffer || a->buffer > UINT16_MAX || reply->arena->bytes < bytes)
		return exl3_errf(exl3_client_err(), -EPROTO,
				 "arena: the daemon answered with buffer %u of %llu bytes",
				 a->buffer, (unsigned long long)reply->arena->bytes);
	e = exl3_segment_map(fd, reply->arena->bytes, &a->seg, exl3_client_err());
	if (e < 0) {
		exl3_arena_tell_free(c, a->buffer);
		return e;
	}
	exl3_take_fd(&fd);
	a->base = a->seg->base;
	a->bytes = a->seg->bytes;
	exl3_arena_add(c, a);
	*ret = exl3_take_ptr(&a);
	return 0;
}

struct exl3_arena *exl3_arena_free(struct exl3_arena *a)
{
	if (!a)
		return NULL;
	if (!exl3_client_forked(a->obj.client)) {
		exl3_object_remove(&a->obj);
		exl3_map_leave(&a->obj);
		exl3_arena_tell_free(a->obj.client, a->buffer);
		arena_drop(&a->obj);
	}
	return NULL;
}

void *exl3_arena_ptr(const struct exl3_arena *a)
{
	return a->base;
}

size_t exl3_arena_bytes(const struct exl3_arena *a)
{
	return a->bytes;
}

void *exl3_arena_alloc(struct exl3_arena *a, size_t bytes)
{
	size_t at = __atomic_load_n(&a->used, __ATOMIC_RELAXED), size;

	if (bytes > a->bytes || a->kind == EXL3_ARENA_REGISTERED)
		return NULL;
	size = (bytes + 63) & ~(size_t)63;
	do
		if (size > a->bytes - at)
			return NULL;
	while (!__atomic_compare_exchange_n(&a->used, &at, at + size, false, __ATOMIC_RELAXED,
					    __ATOMIC_RELAXED));
	return a->base + at;
}

exl3_ref exl3_memory_ref(const void *ptr)
{
	uintptr_t at = (uintptr_t)ptr;

	return at < EXL3_PROCESS_BASE || at >> 47 ? EXL3_REF_NONE
						  : EXL3_REF(EXL3_BUF_PROCESS, at - EXL3_PROCESS_BASE);
}

exl3_ref exl3_arena_ref(const struct exl3_arena *a, const void *ptr)
{
	size_t offset = (uintptr_t)ptr - (uintptr_t)a->base;

	if (offset >= a->bytes) /* before the arena as well: the difference wraps */
		return EXL3_REF_NONE;
	return EXL3_REF(a->buffer, offset);
}
