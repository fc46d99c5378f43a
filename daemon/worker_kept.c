/* SPDX-License-Identifier: Apache-2.0 */
/* worker_kept.c - weights that outlive a worker, its side: asks for them, takes them, hands on its own. */
#include "daemon/log.h"
#include "daemon/manifest.h"
#include "daemon/worker.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

void exl3_worker_want_kept(void *arg, struct exl3_registered *reg)
{
	exl3_worker_tell(arg, EXL3_SUP_WANT, reg->name);
}

/* The name and, where there is something to tell, why it came about as it did. */
static void name_and_why(const struct exl3_registered *reg, char text[EXL3_SUP_TEXT_MAX])
{
	snprintf(text, EXL3_SUP_TEXT_MAX, "%s%s%s", reg->name, reg->why.code ? "\n" : "",
		 reg->why.code ? reg->why.text : "");
}

/* Hands on what another worker can adopt. */
static void keep(struct exl3_worker *w, const struct exl3_registered *reg)
{
	struct exl3_sup_msg msg = {.type = EXL3_SUP_KEEP, .generation = w->generation};
	struct exl3_model *m = reg->model;
	int fds[EXL3_KEPT_FDS] = {m->manifest_fd, m->slab->fd, m->tensor_fd};
	char text[EXL3_SUP_TEXT_MAX];
	int rc;

	if (m->manifest_fd < 0 || strcmp(w->cfg->adopt, "never") == 0) {
		exl3_worker_tell(w, EXL3_SUP_OVER, reg->name);
		return;
	}
	name_and_why(reg, text);
	rc = exl3_sup_send(w->control_fd, &msg, text, fds, m->tensor_fd < 0 ? 2 : 3, true);
	if (rc < 0) {
		exl3_warn("model %s: cannot be handed on: %s", reg->name, strerror(-rc));
		exl3_worker_tell(w, EXL3_SUP_OVER, reg->name);
	}
}

void exl3_worker_tell_way(struct exl3_worker *w, const struct exl3_registered *reg,
			  enum exl3_models_event event)
{
	struct exl3_sup_msg msg = {.type = EXL3_SUP_USELESS, .generation = w->generation};
	char text[EXL3_SUP_TEXT_MAX];

	name_and_why(reg, text);
	if (event == EXL3_MODELS_LOADED && reg->way == EXL3_MODELS_ADOPTED)
		exl3_worker_tell(w, EXL3_SUP_ADOPTED, text);
	else if (event == EXL3_MODELS_LOADED)
		keep(w, reg);
	else if (event == EXL3_MODELS_FAILED)
		exl3_worker_tell(w, EXL3_SUP_OVER, reg->name);
	if (event != EXL3_MODELS_REFUSED && event != EXL3_MODELS_STALE)
		return;
	msg.id = reg->kept_id;
	if (event == EXL3_MODELS_STALE)
		msg.type = EXL3_SUP_STALE;
	else if (reg->why.code == -EBADMSG)
		msg.flags = EXL3_SUP_DAMAGED;
	exl3_sup_send(w->control_fd, &msg, text, NULL, 0, true);
}

void exl3_worker_take_kept(struct exl3_worker *w, const struct exl3_sup_msg *msg, int *fds,
			   unsigned nr_fds)
{
	struct exl3_kept_fds kept = {-1, -1, -1, msg->id};
	unsigned flags = msg->flags & EXL3_SUP_VERIFY_ALL ? EXL3_ADOPT_VERIFY_ALL : 0;

	if (nr_fds < 2 || nr_fds > EXL3_KEPT_FDS) { /* they did not fit into this process */
		exl3_models_answer(&w->models, msg->text, NULL, 0);
		return;
	}
	kept.manifest = exl3_take_fd(&fds[0]);
	kept.slab = exl3_take_fd(&fds[1]);
	if (nr_fds == 3)
		kept.tensors = exl3_take_fd(&fds[2]);
	exl3_models_answer(&w->models, msg->text, &kept, flags);
}
