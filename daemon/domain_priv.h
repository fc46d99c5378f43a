/* SPDX-License-Identifier: Apache-2.0 */
/* domain_priv.h - what domain.c and domain_mps.c share. */
#ifndef EXL3_DAEMON_DOMAIN_PRIV_H
#define EXL3_DAEMON_DOMAIN_PRIV_H

#include "daemon/domain.h"

/* domain.c: for the log, nothing where there is only one domain; one of a few static buffers. */
const char *exl3_domain_label(const struct exl3_domain *d);
/* The process itself; in the MPS server that is up, if any. */
int exl3_domain_start_worker(struct exl3_domain *d, struct exl3_error *err);
/* The start, or the worker, has failed: the next try is due later, or the domain is given up. */
void exl3_domain_back_off(struct exl3_domain *d);

/* domain_mps.c: 1: a control daemon starts, and then the worker; 0: no MPS here; or a negative errno. */
int exl3_domain_mps_start(struct exl3_domain *d, struct exl3_error *err);
/* The worker could not serve inside of MPS: true: it is to be tried without. */
bool exl3_domain_mps_refused(struct exl3_domain *d);

#endif
