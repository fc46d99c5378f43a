/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_packet.c - any packets of a client to the control verbs of a worker on the cpu backend.
 *
 * Input: packets, each after two bytes of length. Every packet gets exactly one reply that unpacks, with
 * the request's id; when the client has gone, everything that it held is free again.
 */
#include "daemon/control.h"
#include "daemon/log.h"
#include "proto/frame.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct exl3_worker w;
static struct exl3_config cfg;

static void must(bool ok)
{
	if (!ok)
		abort();
}

/* Once: the worker lives as long as the fuzzer. Loads find no folder, so nothing is read from disk. */
static void set_up(void)
{
	struct exl3_dispatch_options dopt;
	struct exl3_error err;

	exl3_log_set_level((enum exl3_log_level)0);
	must(exl3_config_parse_string("arena-max = 1M\nbackend = cpu\ndevices = cpu:1\n"
				      "threads = 1\nworkspace = 16M\n", &cfg, NULL) == 0);
	w.cfg = &cfg;
	w.control_fd = w.signal_fd = -1;
	must(exl3_devices_open(&w.devices, &cfg, &err) == 0 && w.devices.nr == 2);
	must(exl3_loop_new(&w.loop, NULL) == 0);
	must(exl3_jobs_new(w.loop, "load", &w.loads, NULL) == 0);
	must(exl3_jobs_new(w.loop, "memory", &w.memory, NULL) == 0);
	dopt = (struct exl3_dispatch_options){.loop = w.loop,
					      .buffer_free = exl3_buffer_free,
					      .arg = &w,
					      .queue_depth = 4,
					      .merge_max = 1};
	must(exl3_dispatch_new(&dopt, &w.dispatch, NULL) == 0);
	for (uint32_t i = 0; i < w.devices.nr; i++)
		must(exl3_dispatch_add_device(w.dispatch, w.devices.list[i].ops, w.devices.list[i].dev, true,
					      NULL) == 0);
	must(exl3_policy_apply(&w.policy, &cfg, exl3_now_ns(), NULL) == 0);
	exl3_models_init(&w.models, w.loop, w.loads);
	w.generation = 1;
	w.instance = 42;
}

static void on_model(void *arg, struct exl3_registered *reg, enum exl3_models_event event)
{
	exl3_control_model_event(arg, reg, event);
}

static void turn(void)
{
	exl3_loop_poll(w.loop, exl3_now_ns());
	exl3_dispatch_turn(w.dispatch, exl3_now_ns());
}

static void run(int sock, const uint8_t *data, size_t size)
{
	static uint8_t reply[EXL3_PACKET_MAX];

	while (size > 2) {
		size_t bytes = (size_t)data[0] | (size_t)data[1] << 8;
		int fds[EXL3_FDS_MAX], n = -EAGAIN;
		Exl3__Request *req;
		Exl3__Reply *r;
		unsigned nr_fds;

		data += 2;
		size -= 2;
		bytes = bytes < size ? bytes : size;
		if (!bytes || exl3_frame_send(sock, data, bytes, &sock, bytes & 1,
					      EXL3_FRAME_NOWAIT, NULL) < 0)
			return;
		for (int tries = 0; tries < 20000 && n == -EAGAIN; tries++) {
			turn();
			n = exl3_frame_recv(sock, reply, sizeof(reply), fds, EXL3_FDS_MAX, &nr_fds,
					    EXL3_FRAME_NOWAIT, NULL);
			if (n == -EAGAIN && tries > 50)
				poll(NULL, 0, 1);
		}
		must(n != -EAGAIN); /* a reply is owed */
		if (n < 0)
			return; /* disconnected */
		r = exl3__reply__unpack(NULL, (size_t)n, reply);
		must(r != NULL);
		must((r->code == 0) == (r->error[0] == 0) && r->code <= 0 && r->instance == 42);
		req = exl3__request__unpack(NULL, bytes, data);
		must(!req || req->id == r->id);
		if (req)
			exl3__request__free_unpacked(req, NULL);
		exl3__reply__free_unpacked(r, NULL);
		for (unsigned i = 0; i < nr_fds; i++)
			close(fds[i]);
		data += bytes;
		size -= bytes;
	}
}

/* What clients' arenas take on the device: freed by a thread, so a moment after their owner. */
static uint64_t arena_bytes(void)
{
	struct exl3_dev_info info;
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < w.devices.nr; i++) {
		w.devices.list[i].ops->info(w.devices.list[i].dev, &info);
		bytes += info.arena_bytes;
	}
	return bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int s[2];

	if (!w.loop) {
		set_up();
		w.models.event = on_model;
		w.models.arg = &w;
	}
	w.draining = false;
	must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, s) == 0);
	must(exl3_peer_new(&w, s[0], NULL) == 0);
	run(s[1], data, size);
	close(s[1]);
	for (int tries = 0; tries < 20000 && (w.peers || arena_bytes() || w.models.nr_loading);
	     tries++) {
		turn();
		if (tries > 50)
			poll(NULL, 0, 1);
	}
	must(!w.peers && !arena_bytes() && !w.models.nr_loading);
	must(exl3_dispatch_channels(w.dispatch) == 0);
	/* What it has loaded stays: take it away before the next one. */
	exl3_models_unload_all(&w.models);
	for (int tries = 0; tries < 20000 && w.models.nr; tries++) {
		turn();
		if (tries > 50)
			poll(NULL, 0, 1);
	}
	must(!w.models.nr);
	return 0;
}
