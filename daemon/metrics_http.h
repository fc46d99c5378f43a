/* SPDX-License-Identifier: Apache-2.0 */
/* metrics_http.h - a thread that answers GET /metrics on a Unix socket and, if asked for, a loopback port. */
#ifndef EXL3_DAEMON_METRICS_HTTP_H
#define EXL3_DAEMON_METRICS_HTTP_H

#include "daemon/metrics.h"
#include "shm/util.h"

struct exl3_metrics_http;

/**
 * exl3_metrics_http_new() - listen and start the thread.
 * @m:    borrowed until exl3_metrics_http_free().
 * @path: of the socket, mode 0660; whatever is there is replaced. NULL: none.
 * @port: on 127.0.0.1; 0: none.
 * The thread serves a few connections at a time, each for a few seconds at most; of more the oldest is closed.
 * It never touches anything but @m, so nobody waits for a scraper. -EADDRINUSE, -EACCES, -ENOMEM, ...
 */
int exl3_metrics_http_new(const struct exl3_metrics *m, const char *path, uint16_t port,
			  struct exl3_metrics_http **ret, struct exl3_error *err);
/* Ends the thread and removes the socket. NULL is nothing. */
struct exl3_metrics_http *exl3_metrics_http_free(struct exl3_metrics_http *h);

#endif
