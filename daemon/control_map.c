/* SPDX-License-Identifier: Apache-2.0 */
/* control_map.c - verbs of mapped mode: the weights themselves for a client's own process, and why it has none. */
#include "daemon/control.h"
#include "daemon/mapper.h"
#include "daemon/manifest.h"

#include <errno.h>
#include <string.h>

/* What tells this slab from every other one, also after a worker has adopted it. */
static int fill_slab_id(const struct exl3_model *model, Exl3__MapReply *reply)
{
	struct exl3_manifest_head head;

	if (model->manifest_fd < 0 || exl3_manifest_peek(model->manifest_fd, &head, NULL) < 0)
		return 0; /* nobody will ever adopt it */
	reply->slab_id.data = exl3_call_alloc(sizeof(head.hash));
	if (!reply->slab_id.data)
		return -ENOMEM;
	memcpy(reply->slab_id.data, head.hash, sizeof(head.hash));
	reply->slab_id.len = sizeof(head.hash);
	return 0;
}

int exl3_verb_map_model(struct exl3_call *c)
{
	struct exl3_handle *h = exl3_handle_find(c->peer, c->req->map_model->model);
	Exl3__MapReply *reply = exl3_call_alloc(sizeof(*reply));
	int rc;

	if (!h || h->type != EXL3_HANDLE_MODEL)
		return exl3_errf(&c->err, -ENOENT, "no open model has handle %u", c->req->map_model->model);
	if (!reply)
		return exl3_call_nomem(c);
	exl3__map_reply__init(reply);
	rc = exl3_models_usable(h->model, &c->err);
	if (rc < 0)
		return rc;
	reply->fingerprint = h->model->model->fingerprint;
	if (fill_slab_id(h->model->model, reply) < 0)
		return exl3_call_nomem(c);
	rc = exl3_mapper_new(c->peer, h->model, c->fds, &c->err);
	if (rc < 0)
		return rc;
	c->nr_fds = EXL3_MAP_FDS;
	c->close_fd = c->fds[EXL3_MAP_FDS - 1];
	c->peer->mode_note[0] = 0;
	c->reply->body_case = EXL3__REPLY__BODY_MAP;
	c->reply->map = reply;
	return 0;
}

int exl3_verb_map_failed(struct exl3_call *c)
{
	exl3_printable(c->peer->mode_note, sizeof(c->peer->mode_note), c->req->map_failed->reason);
	return 0;
}
