/* SPDX-License-Identifier: Apache-2.0 */
/*
 * domain_mps.c - a domain's generations and their MPS servers: the worker starts when its control daemon
 * is up, each generation has a fresh one, the one before it stays for whoever is left in it.
 */
#include "daemon/domain_priv.h"

#include "daemon/log.h"
#include "daemon/mps_acl.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AGAIN_NS 60000000000ull /* after a failure, generations of this time go without */

int exl3_domains_mps_init(struct exl3_domains *all, struct exl3_error *err)
{
	const struct exl3_config *cfg = all->cfg;
	bool require = strcmp(cfg->mps, "require") == 0, path = strchr(cfg->mps_control, '/');
	int rc;

	all->mps = EXL3_MPS_OFF;
	if (strcmp(cfg->mps, "off") == 0)
		return 0;
	/* Where there is no GPU there is nothing to share, and who runs a server of his own has one; but whoever
	 * names a path means it. */
	if (!require && !path &&
	    (strcmp(cfg->backend, "cpu") == 0 || access("/dev/nvidiactl", F_OK) != 0 ||
	     getenv("CUDA_MPS_PIPE_DIRECTORY")))
		return 0;
	if (!require && !exl3_mps_program_exists(cfg->mps_control)) {
		exl3_warn("there is no %s: clients with CUDA of their own share the GPU by time "
			  "slices, and each of their requests waits for several",
			  cfg->mps_control);
		return 0;
	}
	rc = exl3_mps_base(cfg->socket, all->mps_base, err);
	if (rc < 0 && require)
		return rc;
	if (rc < 0)
		exl3_warn("%s; going on without MPS", err->text);
	else
		all->mps = require ? EXL3_MPS_REQUIRE : EXL3_MPS_AUTO;
	return 0;
}

void exl3_domains_mps_fini(struct exl3_domains *all)
{
	if (all->mps_base[0])
		rmdir(all->mps_base); /* each has removed its own folder */
}

/* The control daemon is up, or is not to be had. */
static void on_up(void *arg, int code, const char *why)
{
	struct exl3_domain *d = arg;
	struct exl3_error err;

	if (d->draining || d->worker || d->state != EXL3_DOMAIN_STARTING)
		return;
	if (code == 0) {
		exl3_domain_event(d, "mps", "control daemon for generation %u", d->generation + 1);
	} else {
		exl3_err("%sMPS: %s", exl3_domain_label(d), why);
		exl3_domain_event(d, "mps", "%s", why);
		if (d->all->mps == EXL3_MPS_REQUIRE) {
			exl3_domain_back_off(d);
			return;
		}
		d->mps_failed_ns = exl3_now_ns();
		exl3_warn("%sgoing on without MPS", exl3_domain_label(d));
	}
	if (exl3_domain_start_worker(d, &err) < 0) {
		exl3_err("%s%s", exl3_domain_label(d), err.text);
		exl3_domain_back_off(d);
	}
}

/* Who is in it has lost its context, the worker too, whether it has noticed or not. */
static void on_lost(void *arg, const char *why)
{
	struct exl3_domain *d = arg;

	exl3_err("%sMPS: %s", exl3_domain_label(d), why);
	exl3_domain_event(d, "mps", "%s", why);
	if (d->worker && !d->draining) {
		snprintf(d->reason, sizeof(d->reason), "its MPS server is gone: %.200s", why);
		kill(d->worker, SIGKILL);
	}
}

static int protect(void *arg, const char *dir, struct exl3_error *err)
{
	struct exl3_domain *d = arg;

	return exl3_mps_acl_set(dir, d->all->cfg, (size_t)(d - d->all->list), err);
}

int exl3_domain_mps_start(struct exl3_domain *d, struct exl3_error *err)
{
	struct exl3_domains *all = d->all;
	int rc;

	if (all->mps == EXL3_MPS_OFF)
		return 0;
	if (d->mps_failed_ns && exl3_now_ns() - d->mps_failed_ns < AGAIN_NS)
		return 0;
	d->mps.loop = all->loop;
	d->mps.program = all->cfg->mps_control;
	d->mps.base = all->mps_base;
	d->mps.index = (unsigned)(d - all->list);
	d->mps.protect = protect;
	d->mps.up = on_up;
	d->mps.lost = on_lost;
	d->mps.arg = d;
	exl3_mps_retire(&d->mps); /* of a worker that could not be started */
	rc = exl3_mps_start(&d->mps, d->generation + 1, err);
	if (rc == 0)
		return 1;
	if (all->mps == EXL3_MPS_REQUIRE)
		return rc;
	exl3_warn("%s%s; going on without MPS", exl3_domain_label(d), err->text);
	d->mps_failed_ns = exl3_now_ns();
	return 0;
}

bool exl3_domain_mps_refused(struct exl3_domain *d)
{
	if (d->all->mps != EXL3_MPS_AUTO || d->draining)
		return false;
	exl3_warn("%sgoing on without MPS", exl3_domain_label(d));
	exl3_domain_event(d, "mps", "not used: a worker could not serve in it");
	d->mps_failed_ns = exl3_now_ns();
	return true;
}

bool exl3_domain_mps_ended(struct exl3_domain *d, pid_t pid, int wstatus)
{
	return exl3_mps_ended(&d->mps, pid, wstatus);
}
