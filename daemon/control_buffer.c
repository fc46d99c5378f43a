/* SPDX-License-Identifier: Apache-2.0 */
/* control_buffer.c - verbs for memory of a client's own, and for the words of its stream calls. */
#include "daemon/control.h"

#include <errno.h>
#include <string.h>

#define ALIGN 16u /* of operands: checked as offsets, so buffers must begin so */

/* A handle is bytes that anybody may have seen, and names memory of any process of this machine. */
static int check_ipc(struct exl3_call *c)
{
	const struct exl3_tenant *tenant = c->peer->tenant;

	if (exl3_tenant_cuda_ipc(tenant))
		return 0;
	return exl3_errf(&c->err, -EPERM,
			 "tenant %s may not register memory by CUDA IPC handles (cuda-ipc): take an arena "
			 "in GPU memory",
			 tenant->conf.name);
}

static int check_parts(struct exl3_call *c, const Exl3__RegisterBuffer *req)
{
	uint64_t sum = 0;

	if (req->n_fd_bytes != c->nr_req_fds)
		return exl3_errf(&c->err, -EINVAL, "register: %zu lengths for %u descriptors",
				 req->n_fd_bytes, c->nr_req_fds);
	if (req->ipc.len && c->nr_req_fds)
		return exl3_errf(&c->err, -EINVAL, "register: either a handle or descriptors");
	if (!c->nr_req_fds && req->ipc.len != sizeof(((struct exl3_import *)0)->ipc))
		return exl3_errf(&c->err, -EINVAL, "register: an IPC handle has 64 bytes, not %zu",
				 req->ipc.len);
	if (req->bytes == 0 || req->offset % ALIGN ||
	    __builtin_add_overflow(req->offset, req->bytes, &sum))
		return exl3_errf(&c->err, -EINVAL, "register: %llu bytes at %llu",
				 (unsigned long long)req->bytes, (unsigned long long)req->offset);
	for (size_t i = 0; i < req->n_fd_bytes; i++) {
		if (__builtin_add_overflow(sum, req->fd_bytes[i], &sum) || sum >> 47)
			return exl3_errf(&c->err, -EINVAL, "register: more than any GPU has");
	}
	return c->nr_req_fds ? 0 : check_ipc(c);
}

int exl3_verb_register_buffer(struct exl3_call *c)
{
	const Exl3__RegisterBuffer *req = c->req->register_buffer;
	const struct exl3_device *device =
		exl3_devices_find(&c->w->devices, req->device, &c->err);
	struct exl3_arena_job *a;
	int rc;

	if (!device)
		return c->err.code;
	if (!device->ops->import)
		return exl3_errf(&c->err, -EOPNOTSUPP,
				 "register: device %s has no memory of its own: take an arena",
				 device->name);
	rc = check_parts(c, req);
	if (rc == 0)
		rc = exl3_arena_job_new(c, EXL3_ARENA_IMPORT, req->bytes, device, &a);
	if (rc < 0)
		return rc;
	a->want = req->buffer;
	a->import = (struct exl3_import){
		.fds = a->fds,
		.fd_bytes = a->fd_bytes,
		.nr_fds = c->nr_req_fds,
		.offset = req->offset,
		.bytes = req->bytes,
	};
	if (!c->nr_req_fds)
		memcpy(a->import.ipc, req->ipc.data, sizeof(a->import.ipc));
	if (c->nr_req_fds)
		memcpy(a->fd_bytes, req->fd_bytes, c->nr_req_fds * sizeof(a->fd_bytes[0]));
	return exl3_arena_job_start(c, a);
}

int exl3_verb_bind_stream(struct exl3_call *c)
{
	const Exl3__BindStream *req = c->req->bind_stream;
	uint32_t slot = req->channel - 1;
	struct exl3_buffer *buf;

	if (slot >= EXL3_CHANNELS_MAX || !c->peer->channels[slot])
		return exl3_errf(&c->err, -ENOENT, "there is no channel %u", req->channel);
	buf = exl3_peer_buffer(c->peer, req->buffer);
	if (!buf)
		return exl3_errf(&c->err, -ENOENT, "there is no buffer %u", req->buffer);
	return exl3_channel_bind_stream(c->peer->channels[slot], buf, &c->err);
}
