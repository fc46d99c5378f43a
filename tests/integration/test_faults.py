# SPDX-License-Identifier: Apache-2.0
"""Allocations and system calls of the daemon that fail on purpose (daemon/fault.h): one request fails, nothing else."""
import json
import os

import exl3ref as ref
from harness import MODELS, check, equal, wait_for

DEVICE = False

LAYERS = "layers=" + os.path.join(MODELS, "layers")

# Points that a request passes, and what exl3ctl may say about the one that met the failure.
POINTS = {
    "peer.new": (4,),
    "control.alloc": (3, 4, 5),
    "peer.handles": (3,),
    "channel.ring": (3,),
    "channel.eventfd": (3,),
    "arena.new": (3,),
    "dispatch.submit": (3,),
}


def one_request(env, d):
    x = env.path("x.npy")
    ref.npy_save(x, "<f4", (1, 256), [0.01 * i for i in range(256)])
    rc, _, err = d.ctl("run", "linear", "layers", "k4.mul1", x, "-o", env.path("y.npy"))
    return rc, err


def status_of(d):
    """The failure may meet this connection too, but no second one."""
    rc, out, _ = d.ctl("status", "--json")
    return json.loads(out) if rc == 0 else d.status()


def sweep(env, point):
    """Fails the 1st, 2nd, ... hit until two runs of requests met none."""
    clean, met = 0, False
    for n in range(1, 400, 7 if env.short else 1):
        d = env.daemon((LAYERS,), environ={"EXL3_FAULT": f"{point}:{n}"}, wait=False)
        wait_for(lambda d=d: " serves on " in d.log(), "worker that serves")
        failed = [r for r in (one_request(env, d) for _ in range(4)) if r[0] != 0]
        for rc, err in failed:
            check(rc in POINTS[point] and err.strip(), f"{point}:{n}: status {rc}, '{err.strip()}'")
        check(len(failed) <= 1, f"{point}:{n}: more than one request failed: {failed}")
        # All that the failed one held is back, and the worker is the first one.
        status = status_of(d)
        equal((status["channels"], status["clients"]), (0, 1), f"{point}:{n}: channels and clients")
        wait_for(lambda d=d: status_of(d)["arena_bytes"] == 0, f"{point}:{n}: arenas freed")
        check("generation 2" not in d.log(), f"{point}:{n}: the worker died: {d.log()[-1000:]}")
        equal(d.stop(), 0, f"{point}:{n}: status after SIGTERM")
        clean, met = (0, True) if failed else (clean + 1, met)
        if clean == 2:
            check(met, f"{point}: no request met a failure")
            return
    check(False, f"{point}: every run met a failure")


def test_a_failed_connection(env):
    sweep(env, "peer.new")


def test_no_memory_for_a_message(env):
    sweep(env, "control.alloc")


def test_no_memory_for_a_handle(env):
    sweep(env, "peer.handles")


def test_no_memory_for_a_channel(env):
    sweep(env, "channel.ring")
    sweep(env, "channel.eventfd")


def test_no_memory_for_an_arena(env):
    sweep(env, "arena.new")


def test_a_launch_that_fails(env):
    sweep(env, "dispatch.submit")


def test_lost_device(env):
    """The worker makes room for another, whose clients know nothing of it."""
    d = env.daemon((LAYERS,), environ={"EXL3_FAULT": "dispatch.poll:1"}, wait=False)
    wait_for(lambda: " serves on " in d.log(), "worker that serves")
    rc, err = one_request(env, d)
    equal(rc, 3, f"status of the request that met it ({err.strip()})")
    wait_for(lambda: "generation 2" in d.log(), "second worker")
    check("the device is lost" in d.log(), f"the log does not say so: {d.log()}")
    equal(d.stop(), 0, "status after SIGTERM")


def test_a_point_that_cannot_be_read(env):
    d = env.daemon((LAYERS,), environ={"EXL3_FAULT": "nonsense"})
    check("is not name:n" in d.log(), "a broken EXL3_FAULT is not reported")
    equal(one_request(env, d)[0], 0, "status of a request")
